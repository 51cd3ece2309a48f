"""Sorted rows cut into one slice for each expert, by counts that are read on the host.

    inputs = rows.split(counts.tolist())
    out = torch.cat([F.linear(inputs[e], weight[e]) for e in range(E)])

Dynamo captures it with ``capture_scalar_outputs``. The products of all slices are one product of the sorted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from compile_passes.match import Product
from compile_passes.patterns.one_expert import product_of_one
from compile_passes.reading import Reading
from compile_passes.safety import readers_of_numbers
from compile_passes.vocabulary import equal_sizes, example, rank


class Slices(NamedTuple):
    """``rows`` [R, .], cut into as many for each expert as ``counts`` [E] says; ``sizes``: the same on the host."""

    rows: fx.Node
    counts: fx.Node
    sizes: tuple[fx.Node, ...]


def slices_of(reading: Reading, parts: Sequence[Any], floor: torch.dtype) -> Slices | None:
    """What ``parts`` are the slices of, for all experts in their order.

    Args:
        floor: the narrowest dtype that a slice may be rounded to.
    """
    calls = [reading.read(reading.uncast(part, floor), "item", "index") for part in parts]
    first = calls[0] if calls else None
    cut = None if first is None else reading.read(first["x"], "split", "sizes dim")
    if first is None or cut is None or cut["dim"] not in (0, -(rank(cut["x"]) or 0)):
        return None
    if any(call is None or call["x"] is not first["x"] or call["index"] != e for e, call in enumerate(calls)):
        return None
    sizes = cut["sizes"]
    counts = _counts(reading, sizes) if isinstance(sizes, list | tuple) and len(sizes) == len(parts) else None
    rows = None if counts is None else _all_of(reading, cut["x"], sizes)
    return None if counts is None or rows is None else Slices(rows, counts, tuple(sizes))


def sliced_product(reading: Reading, node: fx.Node) -> Product | None:
    """``cat([slice_e @ weight[e] ...])``: one product of all rows."""
    joined = parts_of(reading, node)
    found = [] if joined is None else [product_of_one(reading, part) or _biased(reading, part) for part in joined]
    products = [one[0] for one in found if one is not None]
    if len(products) < 2 or [one and one[1] for one in found] != list(range(len(products))):
        return None
    first, stacked = products[0], example(products[0].weight.node)
    alike = all((one.weight, one.bias, one.dtype) == (first.weight, first.bias, first.dtype) for one in products)
    if not alike or stacked is None or stacked.shape[0] != len(products) or rank(node) != 2:
        return None
    cut = slices_of(reading, [one.rows for one in products], stacked.dtype)
    if cut is None:
        return None
    result = all_rows(reading, node, cut.rows)
    return Product(node, cut.rows, first.weight, cut.counts, first.bias, None, (), result, sizes=cut.sizes)


def parts_of(reading: Reading, node: fx.Node) -> Sequence[Any] | None:
    """The rows that ``node`` puts behind each other."""
    call = reading.read(node, "cat", "dim")
    along = call is not None and call["dim"] in (0, -(rank(node) or 0))
    return call["x"] if call is not None and along and isinstance(call["x"], list | tuple) else None


def all_rows(reading: Reading, joined: fx.Node, rows: fx.Node) -> fx.Node:
    """``joined`` [R, .], or it with as many rows of zeros behind it as ``rows`` has more, which are none."""
    readers, shape = readers_of_numbers(reading, joined), example(rows)
    call = reading.read(readers[0], "cat vstack", "dim") if len(readers) == 1 else None
    made = example(readers[0]) if call is not None else None
    if call is None or made is None or shape is None or call["dim"] not in (None, 0, -2):
        return joined
    parts = call["x"] if isinstance(call["x"], list | tuple) else ()
    padded = len(parts) == 2 and parts[0] is joined and reading.is_zeros(parts[1])
    return readers[0] if padded and made.dim() == 2 and equal_sizes(made.shape[0], shape.shape[0]) else joined


def cut_up(product: Product, cut: Slices) -> Product:
    """The product of all rows, of that of one slice."""
    return replace(product, rows=cut.rows, routing_key=cut.counts, sizes=cut.sizes)


def _biased(reading: Reading, value: Any) -> tuple[Product, int] | None:
    """A product of one expert whose bias is added afterwards."""
    call = reading.read(value, "add", "y")
    for side in ("x", "y") if call is not None else ():
        found = product_of_one(reading, call[side]) if isinstance(call[side], fx.Node) else None  # type: ignore[index]
        if found is not None and found[0].result is value:
            return found
    return None


def _counts(reading: Reading, sizes: Sequence[Any]) -> fx.Node | None:
    """The counts [E] that ``sizes`` are, one after the other."""
    found = [_entry(reading, size) for size in sizes]
    if not found or found[0] is None:
        return None
    counts = found[0][0]
    shape = example(counts)
    if shape is None or shape.dim() != 1 or shape.dtype.is_floating_point or shape.shape[0] != len(sizes):
        return None
    return counts if found == [(counts, number) for number in range(len(sizes))] else None


def _entry(reading: Reading, size: Any) -> tuple[fx.Node, Any] | None:
    """(source, number) of ``source[number].item()``; Dynamo gives the entries of ``tolist`` no shape."""
    asked = reading.named(size, "item")
    call = None if asked is None or asked["index"] is not None else reading.named(asked["x"], "getslice", "select")
    return None if call is None else (call["x"], call["index"])


def _all_of(reading: Reading, rows: Any, sizes: Sequence[Any]) -> fx.Node | None:
    """``rows`` without ``[: sum(sizes)]``."""
    call = reading.named(rows, "getslice")
    index = call["index"] if call is not None else None
    if call is None or not isinstance(index, slice):
        return rows if isinstance(rows, fx.Node) else None
    ends = index.start in (None, 0) and index.step in (None, 1) and sorted(map(str, _terms(reading, index.stop)))
    return call["x"] if ends == sorted(map(str, sizes)) else None


def _terms(reading: Reading, total: Any) -> list[Any]:
    """What ``total`` is the sum of."""
    call = reading.named(total, "add", "sym_sum")
    if call is None:
        return [] if total == 0 else [total]
    parts = call["x"] if call.name == "sym_sum" else (call["x"], call["y"])
    return [term for part in parts for term in _terms(reading, part)]
