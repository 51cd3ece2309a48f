"""Rows of selected experts: from the tokens to the first products, and from the last one back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from compile_passes.equal import narrower, no_narrower
from compile_passes.match import Combine, Dispatch, Made, Product, Refusal
from compile_passes.patterns.combine import recognise_combine
from compile_passes.patterns.dispatch import recognise_dispatch, weighted_tokens
from compile_passes.patterns.rows import Order
from compile_passes.reading import Reading
from compile_passes.vocabulary import example, same_shape


def routed_rows(
    reading: Reading, ups: list[Product], down: Product, dtype: torch.dtype, of_rows: fx.Node | None = None
) -> tuple[Dispatch, Combine] | Refusal:  # fmt: skip
    """How rows of selected experts come from the tokens and return to them.

    Args:
        of_rows: what multiplies the results already, or what they are of: one number for each row.
    """
    dispatch = recognise_dispatch(reading, ups, down, dtype)
    if isinstance(dispatch, Refusal):
        return dispatch
    floor = narrowest(example(dispatch.hidden), dtype)
    weights, ids = None, example(dispatch.ids)
    if of_rows is not None:
        count = None if ids is None else ids.numel()
        given = None if down.weighed is not None else Order(reading, floor).weights_of(of_rows, count, dispatch.perm)
        if given is None:
            return Refusal(
                of_rows, "An expert's rows are multiplied by a number for each of them, which cannot be proved to be "
                "the routing weights.", "Multiply them by topk_weights in the order of the rows, once.",
            )  # fmt: skip
        weights = given
    combine = recognise_combine(reading, dispatch, down, floor, weights)
    if isinstance(combine, Refusal):
        others = [weighted_tokens(reading, dispatch, floor), _unrounded(reading, dispatch, dtype)]
    else:  # results that are summed as they are may be of tokens that were weighed
        others = [weighted_tokens(reading, dispatch, floor)] if isinstance(combine.weights, Made) else []
    for other in others:
        again = None if other is None else recognise_combine(reading, other, down, floor, weights)
        if other is not None and isinstance(again, Combine):
            return other, again
    return combine if isinstance(combine, Refusal) else (dispatch, combine)


def _unrounded(reading: Reading, dispatch: Dispatch, floor: torch.dtype) -> Dispatch | None:
    """The same of the hidden states before they were rounded to the experts' dtype, as the operator does by itself; or
    None where they were not.
    """
    rounded = example(dispatch.hidden)
    views = [(node, example(node)) for node in reading.casts(dispatch.hidden, floor)]
    wider = [
        node
        for node, held in views
        if rounded is not None and held is not None and held.dtype != rounded.dtype
        and no_narrower(held.dtype, rounded.dtype) and same_shape(node, dispatch.hidden)
    ]  # fmt: skip
    return replace(dispatch, hidden=wider[0]) if wider else None


def narrowest(hidden: torch.Tensor | None, dtype: torch.dtype) -> torch.dtype:
    """The narrowest dtype that values inside of a block may be rounded to for the block to be replaceable."""
    return dtype if hidden is None else narrower(hidden.dtype, dtype)
