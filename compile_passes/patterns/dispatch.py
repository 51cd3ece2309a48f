"""How tokens become rows of the first expert product, and the proof that rows, offsets and biases agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from compile_passes.match import KEEP, Dispatch, Product, Refusal
from compile_passes.patterns.counts import counts_of, offsets_of, row_ids
from compile_passes.patterns.ids import are_in_range, exact_ids, is_harmless
from compile_passes.patterns.rows import Order, Rows, is_mask, sorts
from compile_passes.patterns.selection import chosen_by, weights_listed_by
from compile_passes.reading import Reading
from compile_passes.vocabulary import as_many_by_a_guard, equal_sizes, example, has_shape, rank

_SAME_IDS = "Sort, count and gather with one topk_ids tensor."


def recognise_dispatch(
    reading: Reading, ups: Sequence[Product], down: Product, floor: torch.dtype
) -> Dispatch | Refusal:
    """The token gather before the first products, checked against the routing keys, biases and masks of all products.

    Args:
        ups: the product with gate and up, or that of the gate, then that of the up half.
        floor: the narrowest dtype that rows may be rounded to.
    """
    order = Order(reading, floor)
    found: list[Dispatch] = []
    for up in ups:
        one = _rows_of(order, up)
        if isinstance(one, Refusal):
            return one
        found.append(one)
    if not all(_alike(order, found[0], other) for other in found[1:]):
        return Refusal(
            ups[-1].anchor, "The gate and the up projection cannot be proved to be of the same rows.",
            "Multiply the same rows by both.",
        )  # fmt: skip
    return _disagreement(order, found[0], (*ups, down)) or found[0]


def weighted_tokens(reading: Reading, dispatch: Dispatch, floor: torch.dtype) -> Dispatch | None:
    """The same, of one expert for each token, whose tokens are hidden states times one weight each; or None.

    Args:
        floor: the narrowest dtype that hidden states and weights may be rounded to.
    """
    order, product = Order(reading, floor), reading.uncast(dispatch.hidden, floor)
    call = reading.read(product, "mul", "y")
    if call is None or dispatch.top_k != 1 or dispatch.weights is not None or not has_shape(product, *_shape(dispatch)):
        return None
    for one, other in (("x", "y"), ("y", "x")):
        weights = order.weights(call[other], product, None)
        if weights is not None and has_shape(call[one], *_shape(dispatch)):
            return replace(dispatch, hidden=call[one], weights=weights)
    return None


def _shape(dispatch: Dispatch) -> Sequence[Any]:
    tokens = example(dispatch.hidden)
    return () if tokens is None else tokens.shape


def _rows_of(order: Order, up: Product) -> Dispatch | Refusal:
    in_groups = up.sizes or order.reading.named(up.anchor, "grouped_mm") is not None
    return _sorted_rows(order, up) if in_groups else _repeated_rows(order, up)


def _alike(order: Order, one: Dispatch, other: Dispatch) -> bool:
    """Whether two dispatches are of the same tokens, in the same order, with the same weights."""
    if one.hidden is not other.hidden or one.form != other.form or one.top_k != other.top_k:
        return False
    pairs = ((one.ids, other.ids), (one.perm, other.perm), (one.weights, other.weights))
    return all(a is b or (a is not None and b is not None and order.reading.same(a, b)) for a, b in pairs)


def _sorted_rows(order: Order, up: Product) -> Dispatch | Refusal:
    """Tokens sorted by their flattened expert ids."""
    rows = order.rows(up.rows)
    if rows is not None and rows.perm is not None and is_mask(rows.perm):
        return _listed_rows(order, up, rows, rows.perm)
    ids = sorts(order.reading, rows.perm) if rows is not None else None
    if rows is None or rows.perm is None or ids is None:
        return _not_gathered(order, up)
    return _dispatch(up, _sorted_form(up), rows, ids)


def _listed_rows(order: Order, up: Product, rows: Rows, mask: fx.Node) -> Dispatch | Refusal:
    """The tokens where a mask [experts, tokens] is set."""
    found = chosen_by(order.reading, mask, order.floor, 0)
    if found is None:
        return Refusal(
            mask, "A mask [experts, tokens] lists the rows, which cannot be proved to be set for top_k experts of each "
            "token.", "Make it by torch.zeros(..., dtype=torch.bool).scatter(1, topk_ids, True), with ids from topk.",
        )  # fmt: skip
    ids, top_k = found
    weights = None if rows.weights is None else weights_listed_by(order.reading, mask, rows.weights, order.floor)
    if rows.weights is not None and weights is None:
        return _not_gathered(order, up)
    made = _dispatch(up, _sorted_form(up), replace(rows, top_k=top_k, weights=None), ids)
    return replace(made, weights=weights) if isinstance(made, Dispatch) else made


def _sorted_form(up: Product) -> str:
    return "loop" if up.sizes else "grouped_mm"


def _not_gathered(order: Order, up: Product) -> Refusal:
    if order.reading.read(up.rows, "mul", "y") is not None:
        return Refusal(
            up.anchor, "The rows of the first expert product are multiplied by something that cannot be proved to be "
            "the routing weights, in the order of the rows.", "Multiply them by topk_weights.reshape(-1)[perm]"
            ".unsqueeze(-1), or apply the weights after the experts.",
        )  # fmt: skip
    return Refusal(
        _at_fault(order, up), "The rows of the first expert product are not tokens gathered by an ascending sort of "
        "the expert ids, as far as can be proved.", "Write them as hidden_states[perm // top_k] with perm = "
        "ids.reshape(-1).argsort().",
    )  # fmt: skip


def _at_fault(order: Order, up: Product) -> fx.Node:
    """What makes the rows other ones: the index where its permutation sorts the ids, the permutation where not."""
    reading = order.reading
    taken = order.taken(reading.uncast(up.rows, order.floor))
    if taken is None:
        return up.anchor
    perm: Any = reading.operand(taken.index)
    while (call := reading.named(perm, "floordiv", "truncdiv", "mod", "cast", "view")) is not None:
        perm = reading.operand(call["x"])
    found = taken.index if sorts(reading, perm) is not None else perm
    return found if isinstance(found, fx.Node) else up.anchor


def _repeated_rows(order: Order, up: Product) -> Dispatch | Refusal:
    """K copies of every token, not sorted; with one expert for each, the tokens themselves."""
    given, ids = example(up.rows), example(up.routing_key)
    rows = order.rows(up.rows) if up.copies is None else Rows(up.rows, up.copies)
    if rows is None and given is not None and ids is not None and equal_sizes(given.shape[0], ids.numel()):
        tokens = next((node for node in order.reading.reshapes(up.rows) if rank(node) == 2), None)
        rows = None if tokens is None else Rows(tokens, 1)
    if rows is None or rows.perm is not None:
        return Refusal(
            up.anchor, "The rows of the first expert product are not tokens repeated top_k times, as far as can be "
            "proved.", "Where all experts of a token are given its hidden state, write them as "
            f"hidden_states.repeat_interleave(top_k, dim=0); rows that differ are not fused. {KEEP}",
        )  # fmt: skip
    return _dispatch(up, "batched_mm", rows, up.routing_key)


def _dispatch(up: Product, form: str, rows: Rows, ids: fx.Node) -> Dispatch | Refusal:
    tokens, count = example(rows.hidden), example(ids)
    if tokens is None or count is None or (tokens.dim() != 2 and up.copies is None):
        return Refusal(
            up.anchor, "The gathered hidden states are not [tokens, hidden].", "Flatten them to two dimensions."
        )
    number, width = prod(tokens.shape[:-1]), tokens.shape[-1]
    given, copied = example(up.rows), number if up.copies is not None else count.numel()
    whole = given is not None and (is_mask(rows.perm) or equal_sizes(given.numel(), copied * width))
    if not whole or not as_many_by_a_guard(count, number * rows.top_k):
        return Refusal(
            up.anchor, f"There are {count.numel()} expert ids for {number} tokens, not top_k={rows.top_k} "
            "each.", "Gather with perm // topk_ids.shape[1].",
        )  # fmt: skip
    return Dispatch(form, rows.hidden, ids, rows.perm, rows.top_k, weights=rows.weights)


def _disagreement(order: Order, dispatch: Dispatch, products: Sequence[Product]) -> Refusal | None:
    """The first proof that fails: one set of ids and one number of experts everywhere."""
    reading, stacked = order.reading, example(products[0].weight.node)
    experts = None if stacked is None else stacked.shape[0]
    for product in products:
        weight = example(product.weight.node)
        if weight is None or not equal_sizes(weight.shape[0], experts):
            return Refusal(product.anchor, "The expert products have different numbers of experts.", _SAME_IDS)
        if dispatch.perm is None:
            wrong = None if reading.same(product.routing_key, dispatch.ids) else "weights"
        else:
            prove = counts_of if product.sizes else offsets_of
            refusal = prove(order, product.routing_key, dispatch, experts)
            if refusal is not None:
                return refusal
            wrong = None
        # What a bias makes of rows of no expert is zeroed, or goes into the next product, which leaves such rows out.
        masked = reading.named(reading.strip(product.result), "masked_fill") is not None
        left_out = product is not products[-1] or masked or are_in_range(reading, dispatch.ids, experts)
        if wrong is None and not _is_biased_alike(order, product, dispatch, experts, left_out):
            wrong = "bias"
        if wrong is not None:
            return Refusal(
                product.anchor,
                f"This product takes its {wrong} by ids that cannot be proved to be those that order its rows.",
                _SAME_IDS,
            )
        for mask in product.masks:
            if not _is_sentinel_mask(order, mask, dispatch, experts):
                return Refusal(
                    mask, "Rows are zeroed by a mask that is not `expert id >= number of experts`.", _SAME_IDS
                )
    return None


def _is_biased_alike(order: Order, product: Product, dispatch: Dispatch, experts: Any, left_out: bool) -> bool:
    """Whether every row gets the bias of its own expert, if there is one; ``left_out``: whatever rows of none get."""
    if product.bias_ids is None:
        return True
    if product.bias_repeated:
        return dispatch.perm is not None and counts_of(order, product.bias_ids, dispatch, experts) is None
    return _bias_ids(order, product.bias_ids, dispatch, experts, left_out)


def _bias_ids(order: Order, value: Any, dispatch: Dispatch, experts: Any, left_out: bool) -> bool:
    """As `row_ids`; ids of no expert may be clamped into range where their rows are ``left_out``."""
    reading = order.reading
    value = exact_ids(reading, value, experts)
    call = reading.read(value, "clamp", "min max")
    if call is not None and dispatch.perm is not None and left_out and is_harmless(call, experts):
        value = call["x"]
    return row_ids(order, exact_ids(reading, value, experts), dispatch, experts)


def _is_sentinel_mask(order: Order, mask: Any, dispatch: Dispatch, experts: Any) -> bool:
    """``ids_of_rows >= E``: rows of no expert, which the fused operator leaves out by itself."""
    call, ids = order.reading.read(order.reading.strip(mask), "ge gt", "y"), example(dispatch.ids)
    if call is None or ids is None or not has_shape(mask, ids.numel(), 1):
        return False
    if not row_ids(order, call["x"], dispatch, experts):
        return False
    return equal_sizes(call["y"], experts if call.name == "ge" else experts - 1)
