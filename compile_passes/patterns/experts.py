"""The expert products: where every search starts. Two of them with an activation between are an MoE block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compile_passes.match import Product, Refusal, Weight
from compile_passes.patterns.contraction import dense_product, peel_transpose
from compile_passes.patterns.slices import sliced_product
from compile_passes.reading import Reading
from compile_passes.vocabulary import (
    Call,
    Labelled,
    equal_sizes,
    example,
    has_shape,
    is_zero,
    rank,
    same_shape,
    scored,
    two_labelled,
)  # fmt: skip

# The rows of a first product come from tokens, or the tokens from the layer before, through one of these; the search
# for it goes no further back.
_BARRIERS = frozenset(
    {"index", "index_select", "repeat_interleave", "gather", "expand", "linear", "matmul", "embedding", "sort", "topk",
     "index_put", "scatter", "index_add", "sdpa", "cat", "take_along_dim", "scatter_add", "index_copy", "sum", "einsum",
     "bmm"}
)  # fmt: skip
_SEARCH_LIMIT = 64


def find_products(reading: Reading) -> dict[fx.Node, Product]:
    """Every product of rows with stacked expert weights, by its node, in graph order."""
    products = {}
    for node in reading.graph.nodes:
        call = reading.call(node)
        ways = () if call is None else _WAYS.get(call.name, ())
        product = next((product for way in ways if (product := way(reading, node)) is not None), None)
        if product is not None:
            products[node] = product
    return products


def feeding_products(reading: Reading, down: Product, products: Mapping[fx.Node, Product]) -> list[Product]:
    """The products whose results reach the rows of ``down`` without passing through another gather or projection."""
    found: list[Product] = []
    seen: set[fx.Node] = set()
    stack: list[Any] = [down.rows]
    while stack and len(seen) < _SEARCH_LIMIT:
        value = stack.pop()
        if not isinstance(value, fx.Node) or value in seen:
            continue
        seen.add(value)
        if value in products:
            found.append(products[value])
            continue
        call = reading.call(value)
        if call is not None and call.name not in _BARRIERS:
            stack.extend(call.args.values())
    return found


def _grouped_product(reading: Reading, node: fx.Node) -> Product | None:
    """``grouped_mm(rows [R, K], weight [E, K, N], offs)``: transformers, torchtitan, any hand-written code."""
    call = reading.read(node, "grouped_mm", "weight offs")
    stacked = example(call["weight"]) if call is not None else None
    if call is None or stacked is None or stacked.dim() != 3 or rank(call["x"]) != 2 or rank(call["offs"]) != 1:
        return None
    weight = peel_transpose(reading, Weight(reading.unwrap(call["weight"]), transposed=True))
    rows, masks = _peel_masks(reading, call["x"], stacked.dtype)
    return _with_epilogue(reading, node, rows, weight, call["offs"], masks)


def _batched_product(reading: Reading, node: fx.Node) -> Product | None:
    """``bmm(weight[ids] [R, N, K], rows [R, K, 1])`` or ``bmm(rows [R, 1, K], weight[ids] [R, K, N])``, or such a
    ``baddbmm`` with ``bias[ids]``.
    """
    call = reading.read(node, "bmm baddbmm", "y bias")
    added = None if call is None or call.name == "bmm" else _gathered(reading, reading.strip(call["bias"]))
    if call is None or (call.name == "baddbmm" and (added is None or not same_shape(call["bias"], node))):
        return None
    for side, other, transposed in (("x", "y", False), ("y", "x", True)):
        gathered = peel_transpose(reading, Weight(call[side], transposed))
        index = reading.read(reading.unwrap(gathered.node), "index", "index")
        copies, value = example(call[side]), example(call[other])
        if index is None or copies is None or value is None or rank(index["x"]) != 3 or rank(index["index"]) != 1:
            continue
        count, inner = copies.shape[0], copies.shape[2 if side == "x" else 1]
        column, row = has_shape(call[other], count, inner, 1), has_shape(call[other], count, 1, inner)
        if column if side == "x" else row:
            weight = peel_transpose(reading, Weight(reading.unwrap(index["x"]), gathered.transposed))
            rows = _two_dimensional(reading, call[other], count, inner, copies.dtype)
            product = None if rows is None else _with_epilogue(reading, node, rows, weight, index["index"], ())
            if product is None or added is None:
                return product
            bias, bias_ids, _ = added
            return replace(product, bias=bias, bias_ids=bias_ids) if product.bias is None else None
    return None


def _product_by_slot(reading: Reading, node: fx.Node) -> Product | None:
    """``einsum("ti,taoi->tao", tokens, weight[ids])`` or ``matmul(weight[ids], rows[..., None])``, with ids ``[T, K]``,
    [..., K], or [R], of tokens or of rows.
    """
    found = _einsum(reading, node) or _matmul_by_slot(reading, node)
    if found is None:
        return None
    rows, gathered, transposed, scores, summed = found
    weight = peel_transpose(reading, Weight(gathered, transposed))
    index, shape = _gather_of(reading, weight.node), example(weight.node)
    if index is None or shape is None:
        return None
    stacked = peel_transpose(reading, Weight(reading.unwrap(index["x"]), weight.transposed))
    copies = shape.shape[-3] if shape.dim() > 3 and rank(rows) == shape.dim() - 2 else None
    if copies is not None and type(copies) is not int:
        return None
    product = replace(_with_epilogue(reading, node, rows, stacked, index["index"], ()), copies=copies, summed=summed)
    return product if scores is None else replace(product, weighed=(scores, None))


def _gather_of(reading: Reading, weight: Any) -> Call | None:
    """The ``stacked[ids]`` that ``weight`` [..., N, K] is, its rows perhaps as [T, slots]."""
    shape, root = example(weight), reading.strip(weight)
    made, index = example(root), reading.read(root, "index", "index")
    if shape is None or made is None or index is None or rank(index["x"]) != 3 or not rank(index["index"]):
        return None
    return index if all(map(equal_sizes, shape.shape[-2:], made.shape[-2:])) else None


# Rows, gathered weights, whether these are [..., K, N], scores by which the product multiplies, and whether it sums the
# slots of a token.
_BySlot = tuple[Any, fx.Node, bool, fx.Node | None, bool]


def _einsum(reading: Reading, node: fx.Node) -> _BySlot | None:
    """An einsum that is a product for every slot; ``"tki,tkhi->th"`` sums the slots, and ``"tki,tkhi,tk->th"``
    multiplies by scores.
    """
    found = two_labelled(reading.read(node, "einsum", "arg1 arg2"))
    if found is not None:
        return _of_two(found, None, "")
    ways = scored(reading.read(node, "einsum", "arg1 arg2 arg3"))
    return next((product for (scores, letters), two in ways if (product := _of_two(two, scores, letters))), None)


def _of_two(found: Labelled, scores: fx.Node | None, of_scores: str) -> _BySlot | None:
    operands, labels, result = found
    for place in (0, 1):
        rows, weight = operands[place], operands[1 - place]
        of_rows, of_weight = labels[place], labels[1 - place]
        lead, last = of_weight[:-2], of_weight[-2:]
        if not lead or len(of_rows) < 2:
            continue
        inner = of_rows[-1]
        outer = last.replace(inner, "")
        if len(outer) != 1 or of_rows[:-1] not in (lead, lead[:-1]):
            continue
        whole = len(lead) > 1 and of_rows[:-1] == lead
        if scores is not None and not (whole and of_scores == lead):
            continue
        summed = whole and result == lead[:-1] + outer
        if summed or result == lead + outer:
            return rows, weight, last[0] == inner, scores, summed
    return None


def _matmul_by_slot(reading: Reading, node: fx.Node) -> _BySlot | None:
    """As `_einsum`, of ``weight[ids] [T, K, N, H] @ rows [T, K or 1, H, 1]``, or the other way round."""
    call = reading.read(node, "matmul", "y")
    if call is None or rank(call["x"]) != 4 or rank(call["y"]) != 4:
        return None
    for side, other, at, transposed in (("x", "y", -1, False), ("y", "x", -2, True)):
        weight, value = example(call[side]), example(call[other])
        if weight is None or value is None or not equal_sizes(value.shape[at], 1):
            continue
        tokens, slots = weight.shape[:2]
        inner = weight.shape[-1 if side == "x" else -2]
        if equal_sizes(value.shape[0], tokens) and equal_sizes(value.shape[1], slots):
            return call[other], call[side], transposed, None, False
        views = reading.casts(call[other], weight.dtype)
        rows = next((node for node in views if has_shape(node, tokens, inner)), None)
        if rows is not None:
            return rows, call[side], transposed, None, False
    return None


def _sliced_product(reading: Reading, node: fx.Node) -> Product | None:
    """A product for every expert's slice of the rows, put together; the bias added in the slices or to all rows."""
    found = sliced_product(reading, node)
    if found is None or found.bias is not None or found.result is not node:
        return found
    whole = _with_epilogue(reading, node, found.rows, found.weight, found.routing_key, ())
    return replace(whole, sizes=found.sizes)


# The calls that may be products, and how each is read, in this order.
_WAYS: dict[str, tuple[Callable[[Reading, fx.Node], Product | None], ...]] = {
    "grouped_mm": (_grouped_product,),
    "bmm": (_batched_product, dense_product),
    "baddbmm": (_batched_product, dense_product),
    "einsum": (_product_by_slot, dense_product),
    "matmul": (_product_by_slot, dense_product),
    "cat": (_sliced_product,),
}


def _two_dimensional(reading: Reading, value: Any, count: Any, width: Any, floor: torch.dtype) -> Any:
    """The rows ``[R, K]`` that ``value`` is a reshape or cast of; its root when there are none."""
    root = reading.uncast(value, floor)
    if has_shape(root, count, width):
        return root
    return next((node for node in reading.reshapes(value) if has_shape(node, count, width)), root)


def _peel_masks(reading: Reading, rows: fx.Node, floor: torch.dtype) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Rows before they were zeroed by masks and cast, and the masks."""
    masks: list[fx.Node] = []
    rows = reading.uncast(rows, floor)
    while (call := reading.read(rows, "masked_fill", "mask value")) is not None and is_zero(call["value"]):
        masks.append(call["mask"])
        rows = reading.uncast(call["x"], floor)
    return rows, tuple(masks)


def _with_epilogue(
    reading: Reading, anchor: fx.Node, rows: fx.Node, weight: Weight, routing_key: fx.Node, masks: tuple[fx.Node, ...]
) -> Product:
    """Follow the product forward through its squeeze, its gathered bias and the zeroing of rows of no expert."""
    value, bias, bias_ids, repeated = anchor, None, None, False
    while len(readers := reading.readers(value)) == 1:
        reader = readers[0]
        call = reading.call(reader)
        if call is None or (call := reading.read(reader, call.name, "y mask value")) is None:
            break
        if call.name == "view" and value is anchor and _squeezes(reader, anchor):
            value = reader
        elif call.name == "add" and bias is None and (found := _gathered_bias(reading, call, value)) is not None:
            bias, bias_ids, repeated = found
            value = reader
        elif call.name == "masked_fill" and call["x"] is value and is_zero(call["value"]):
            masks, value = (*masks, call["mask"]), reader
        else:
            break
    product = Product(anchor, rows, weight, routing_key, bias, bias_ids, masks, value)
    return replace(product, bias_repeated=repeated)


def _squeezes(reader: fx.Node, anchor: fx.Node) -> bool:
    """Whether ``reader`` is ``[..., N]`` of a batched product ``[..., N, 1]`` or ``[..., 1, N]``, or of its rows
    ``[R, N, 1]`` by token and slot ``[T, K, N]``.
    """
    product = example(anchor)
    if product is None or product.dim() < 3:
        return False
    *lead, rows, columns = product.shape
    if not any(equal_sizes(size, 1) for size in (rows, columns)):
        return False
    held, width = example(reader), rows * columns
    by_slot = held is not None and held.dim() == 3 and len(lead) == 1 and equal_sizes(held.shape[-1], width)
    return by_slot or has_shape(reader, *lead, width)


def _gathered_bias(reading: Reading, call: Call, value: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """``value + bias[ids]`` with bias ``[E, N]``: the bias and the ids; or the counts of rows by which it is repeated,
    and True.
    """
    other = call["y"] if call["x"] is value else call["x"]
    return _gathered(reading, reading.unwrap(other)) if same_shape(other, value) else None


def _gathered(reading: Reading, rows: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """As `_gathered_bias`, of ``bias[ids]``."""
    index = reading.read(rows, "index repeat_interleave", "index repeats dim")
    if index is None or rank(index["x"]) != 2:
        return None
    repeated = index.name == "repeat_interleave"
    by = index["repeats" if repeated else "index"]
    if (rank(by) != 1 or index["dim"] not in (0, -2)) if repeated else not rank(by):
        return None
    return reading.unwrap(index["x"]), by, repeated


def unpaired(product: Product) -> Refusal:
    """The refusal of a product that is neither the first nor the second of an MoE block."""
    return Refusal(
        product.anchor,
        "A product with stacked expert weights, of which no second one was found before or after it.",
        "Experts of two projections (gate and up, then down) are fused, for all tokens at once: call "
        "moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids) in place of a loop over "
        "tokens, or of torch.vmap. Nothing to do if this is something else.",
    )
