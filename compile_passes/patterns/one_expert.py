"""The product of one expert: rows with a slice ``w[e]`` of one stacked weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from compile_passes.match import Product, Weight
from compile_passes.reading import Reading
from compile_passes.vocabulary import example, rank, same_shape


def product_of_one(reading: Reading, node: fx.Node) -> tuple[Product, int] | None:
    """A product of rows with the weight of one expert, and the expert's number."""
    call = reading.read(node, "linear matmul addmm", "weight bias y")
    found = None if call is None else _slice(reading, call["weight" if call.name == "linear" else "y"])
    if call is None or found is None:
        return None
    weight, number = found
    if call.name != "linear":
        weight = replace(weight, transposed=not weight.transposed)
    given = None if call["bias"] is None else _slice(reading, call["bias"], dims=2)
    if call["bias"] is not None and (given is None or given[1] != number):
        return None
    bias = None if given is None else given[0].node
    product = Product(node, call["x"], weight, weight.node, bias, None, (), node)
    readers = reading.readers(node)
    added = reading.read(readers[0], "add", "y") if len(readers) == 1 and bias is None else None
    if added is not None and same_shape(readers[0], node):
        more = _slice(reading, added["y"] if added["x"] is node else added["x"], dims=2)
        if more is not None and more[1] == number:
            product = replace(product, bias=more[0].node, result=readers[0])
    return product, number


def _slice(reading: Reading, value: Any, dims: int = 3) -> tuple[Weight, int] | None:
    """``stacked[e]``, perhaps transposed: the stack, and e."""
    value, transposed = reading.unwrap(value), False
    while dims == 3 and rank(value) == 2 and (call := reading.named(value, "transpose", "mt", "t")) is not None:
        value, transposed = reading.unwrap(call["x"]), not transposed
    call = reading.read(value, "getslice select item", "index dim")
    source: Any = call["x"] if call is not None else None
    number = call["index"] if call is not None else None
    if call is not None and call.name == "item":
        parts = reading.read(source, "unbind", "dim")
        source = parts["x"] if parts is not None and parts["dim"] == 0 else None
    elif call is not None and call.name == "select" and call["dim"] != 0:
        return None
    if isinstance(number, tuple):
        number = number[0] if all(part in (slice(None), Ellipsis) for part in number[1:]) else None
    stacked = example(source)
    if stacked is None or stacked.dim() != dims or type(number) is not int or type(stacked.shape[0]) is not int:
        return None
    return Weight(_first_view(reading, source), transposed), number % stacked.shape[0]


def _first_view(reading: Reading, stacked: fx.Node) -> fx.Node:
    """``flat.view(E, N, K)`` is written anew for every expert: the first of such views of one tensor stands for all."""
    call = reading.read(stacked, "view")
    views = [] if call is None else [reader for reader in reading.readers(call["x"]) if same_shape(reader, stacked)]
    return next((view for view in views if reading.read(view, "view") is not None), stacked)
