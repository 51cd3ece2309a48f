"""The expert products: where every search starts. Two of them with an activation between are an MoE block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from compile_passes.canonical import Canonical
from compile_passes.match import Product, Refusal, Weight
from compile_passes.vocabulary import Call, example, rank

# The rows of a first product come from tokens through one of these; the search for it goes no further back.
_BARRIERS = frozenset(
    {"index", "index_select", "repeat_interleave", "gather", "expand", "linear", "matmul", "embedding", "sort", "topk",
     "index_put", "scatter", "index_add", "scaled_dot_product_attention", "cat"}
)  # fmt: skip
_SEARCH_LIMIT = 64


def find_products(canon: Canonical) -> dict[fx.Node, Product]:
    """Every product of routed rows with stacked expert weights, by its node, in graph order."""
    products = {}
    for node in canon.graph.nodes:
        product = _grouped_product(canon, node) or _batched_product(canon, node)
        if product is not None:
            products[node] = product
    return products


def feeding_products(canon: Canonical, down: Product, products: Mapping[fx.Node, Product]) -> list[Product]:
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
        call = canon.call(value)
        if call is not None and call.name not in _BARRIERS:
            stack.extend(call.args.values())
    return found


def _grouped_product(canon: Canonical, node: fx.Node) -> Product | None:
    """``grouped_mm(rows [R, K], weight [E, K, N], offs)``: transformers, torchtitan, any hand-written code."""
    call = canon.named(node, "grouped_mm")
    if call is None or rank(call["weight"]) != 3 or call["offs"] is None or call["bias"] is not None:
        return None
    weight = _peel_transpose(canon, Weight(canon.strip(call["weight"]), transposed=True))
    rows, masks = _peel_masks(canon, canon.uncast(call["x"]))
    return _with_epilogue(canon, node, rows, weight, call["offs"], masks)


def _batched_product(canon: Canonical, node: fx.Node) -> Product | None:
    """``bmm(weight[ids] [R, N, K], rows [R, K, 1])`` or ``bmm(rows [R, 1, K], weight[ids] [R, K, N])``."""
    call = canon.named(node, "bmm")
    if call is None:
        return None
    for side, other, unit_dim, transposed in (("x", "y", 2, False), ("y", "x", 1, True)):
        gathered = _peel_transpose(canon, Weight(call[side], transposed))
        index = canon.named(canon.strip(gathered.node), "index")
        value = example(call[other])
        if index is None or rank(index["x"]) != 3 or rank(index["index"]) != 1 or value is None:
            continue
        if value.dim() == 3 and value.shape[unit_dim] == 1:
            weight = _peel_transpose(canon, Weight(canon.strip(index["x"]), gathered.transposed))
            return _with_epilogue(canon, node, canon.uncast(call[other]), weight, index["index"], ())
    return None


def _peel_transpose(canon: Canonical, weight: Weight) -> Weight:
    """The same weight without transpositions of its last two dimensions."""
    while (call := canon.named(weight.node, "transpose", "mt", "permute")) is not None and _swaps_last_two(call):
        weight = Weight(canon.strip(call["x"]), not weight.transposed)
    return weight


def _swaps_last_two(call: Call) -> bool:
    if call.name == "mt":
        return True
    if call.name == "permute":
        return call["dims"] in ((0, 2, 1), [0, 2, 1])
    dims = (call["dim0"], call["dim1"])
    return all(isinstance(dim, int) for dim in dims) and {dim % 3 for dim in dims} == {1, 2}


def _peel_masks(canon: Canonical, rows: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Rows before they were zeroed by masks, and the masks."""
    masks: list[fx.Node] = []
    while (call := canon.named(rows, "masked_fill")) is not None and call["value"] == 0:
        masks.append(call["mask"])
        rows = canon.uncast(call["x"])
    return rows, tuple(masks)


def _with_epilogue(
    canon: Canonical, anchor: fx.Node, rows: fx.Node, weight: Weight, routing_key: fx.Node, masks: tuple[fx.Node, ...]
) -> Product:
    """Follow the product forward through its squeeze, its gathered bias and the zeroing of rows of no expert."""
    value, bias, bias_ids = anchor, None, None
    while len(readers := canon.readers(value)) == 1:
        reader = readers[0]
        call = canon.call(reader)
        if call is None:
            break
        if call.name == "view" and value is anchor and rank(anchor) == 3:
            value = reader
        elif call.name == "add" and bias is None and (found := _gathered_bias(canon, call, value)) is not None:
            bias, bias_ids = found
            value = reader
        elif call.name == "masked_fill" and call["x"] is value and call["value"] == 0:
            masks, value = (*masks, call["mask"]), reader
        else:
            break
    return Product(anchor, rows, weight, routing_key, bias, bias_ids, masks, value)


def _gathered_bias(canon: Canonical, call: Call, value: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``value + bias[ids]`` with bias ``[E, N]``: the bias and the ids."""
    other = call["y"] if call["x"] is value else call["x"]
    index = canon.named(canon.strip(other), "index")
    if index is None or rank(index["x"]) != 2 or rank(index["index"]) != 1 or call["alpha"] not in (None, 1):
        return None
    return canon.strip(index["x"]), index["index"]


def unpaired(product: Product) -> Refusal:
    """The refusal of a product that is neither the first nor the second of an MoE block."""
    return Refusal(
        product.anchor,
        "A product with stacked expert weights is not followed or preceded by a second one.",
        "Only two-projection experts (gate/up, then down) are fused; nothing to do if this is something else.",
    )
