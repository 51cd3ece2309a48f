"""Rows of selected experts: from the tokens to the first products, and from the last one back."""

from __future__ import annotations

import torch

from compile_passes.equal import narrower
from compile_passes.match import Combine, Dispatch, Product, Refusal
from compile_passes.patterns.combine import recognise_combine
from compile_passes.patterns.dispatch import recognise_dispatch, weighted_tokens
from compile_passes.reading import Reading
from compile_passes.vocabulary import example


def routed_rows(
    reading: Reading, ups: list[Product], down: Product, dtype: torch.dtype
) -> tuple[Dispatch, Combine] | Refusal:  # fmt: skip
    """How rows of selected experts come from the tokens and return to them."""
    dispatch = recognise_dispatch(reading, ups, down, dtype)
    if isinstance(dispatch, Refusal):
        return dispatch
    floor = narrowest(example(dispatch.hidden), dtype)
    combine = recognise_combine(reading, dispatch, down, floor)
    weighted = weighted_tokens(reading, dispatch, floor) if isinstance(combine, Refusal) else None
    again = combine if weighted is None else recognise_combine(reading, weighted, down, floor)
    if weighted is not None and not isinstance(again, Refusal):
        return weighted, again
    return combine if isinstance(combine, Refusal) else (dispatch, combine)


def narrowest(hidden: torch.Tensor | None, dtype: torch.dtype) -> torch.dtype:
    """The narrowest dtype that values inside of a block may be rounded to for the block to be replaceable."""
    return dtype if hidden is None else narrower(hidden.dtype, dtype)
