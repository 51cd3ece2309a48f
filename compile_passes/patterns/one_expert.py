"""The product of one expert: rows with a slice ``w[e]`` of one stacked weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from compile_passes.match import Part, Product, Weight
from compile_passes.patterns.contraction import peel_transpose
from compile_passes.reading import Reading
from compile_passes.vocabulary import equal_sizes, example, has_shape, rank, same_shape, tensors_of


def product_of_one(reading: Reading, node: fx.Node) -> tuple[Product, int] | None:
    """A product of rows with the weight of one expert, and the expert's number."""
    call = reading.read(node, "linear matmul addmm", "weight bias y")
    found = None if call is None else _slice(reading, call["weight" if call.name == "linear" else "y"])
    if call is None or found is None:
        return None
    weight, number = found
    if call.name != "linear":
        weight = replace(weight, transposed=not weight.transposed)
    given = None if call["bias"] is None else _bias(reading, call["bias"])
    if call["bias"] is not None and (given is None or given[1] != number):
        return None
    bias = None if given is None else given[0].node
    product = Product(node, call["x"], weight, weight.node, bias, None, (), node)
    readers = reading.readers(node)
    added = reading.read(readers[0], "add", "y") if len(readers) == 1 and bias is None else None
    if added is not None and same_shape(readers[0], node):
        more = _bias(reading, added["y"] if added["x"] is node else added["x"])
        if more is not None and more[1] == number:
            product = replace(product, bias=more[0].node, result=readers[0])
    return product, number


def _bias(reading: Reading, value: Any) -> tuple[Weight, int] | None:
    """``stacked[e]`` of a bias ``[E, N]`` or ``[E, 1, N]``: the stack, and e."""
    found = _slice(reading, value, dims=2)
    if found is None and rank(value) == 2 and (found := _slice(reading, value)) is not None:
        weight, stacked = found[0], example(found[0].node)
        row = stacked is not None and equal_sizes(stacked.shape[1], 1)
        return found if row and not weight.transposed and weight.part is None else None
    return found


def _slice(reading: Reading, value: Any, dims: int = 3) -> tuple[Weight, int] | None:
    """``stacked[e]``, or a part of it such as ``stacked[e].chunk(2)[0]``, perhaps transposed: the stack, and e."""
    value, transposed, part = reading.unwrap(value), False, None
    while dims == 3:
        if rank(value) == 2 and (call := reading.named(value, "transpose", "mt", "t")) is not None:
            value, transposed = reading.unwrap(call["x"]), not transposed
            part = None if part is None else replace(part, dim=1 - part.dim)
            continue
        taken = None if part is not None else _taken(reading, value)
        if taken is None or len(taken[1]) != 1 or not _of_one(reading, *taken):
            break
        value, part = reading.unwrap(taken[0]), taken[1][0]
    taken = _taken(reading, value)
    if taken is None:
        return None
    source, (entry, *more) = taken
    if more and dims == 3 and part is None:
        (second,) = more if len(more) == 1 else (None,)
        part = None if second is None else replace(second, dim=second.dim - 1)
        if part is None:
            return None
    elif more:
        return None
    stacked = example(source)
    if stacked is None or entry.dim != 0 or entry.length is not None or type(stacked.shape[0]) is not int:
        return None
    if part is not None:
        part = replace(part, dim=part.dim + 1)
    if stacked.dim() != dims + int(part is not None and part.length is None):
        return None
    # `stacked.transpose(1, 2)` is written anew for every expert, as views are.
    weight = peel_transpose(reading, Weight(source, transposed)) if stacked.dim() == 3 else Weight(source, transposed)
    if part is not None and weight.transposed != transposed:
        part = replace(part, dim=3 - part.dim)
    return replace(weight, node=_first_view(reading, weight.node), part=part), entry.start


def _of_one(reading: Reading, source: Any, parts: list[Part]) -> bool:
    """Whether ``source`` is of one expert, of whose weight a part is taken, and not the stack of all."""
    inner, shape = _taken(reading, reading.unwrap(source)), example(source)
    if shape is not None and shape.dim() == 2:
        turned = reading.named(source, "transpose", "mt", "t")
        return parts[0].length is not None and (inner is not None or turned is not None)
    one = inner is not None and [part.length for part in inner[1]] == [None] and inner[1][0].dim == 0
    return one and shape is not None and shape.dim() == 3 and parts[0].length is None and shape.shape[parts[0].dim] == 2


def _taken(reading: Reading, value: Any) -> tuple[fx.Node, list[Part]] | None:
    """(x, what ``value`` takes of it): a slice, an entry, one of several parts, also ``slice.squeeze(0)`` of one."""
    call = reading.read(value, "getslice slice narrow select item", "index dim start end step length")
    if call is None:
        view, made = reading.read(value, "view"), example(value)
        if view is None or made is None or not has_shape(view["x"], 1, *made.shape):
            return None
        inner = _taken(reading, view["x"])
        one = inner is not None and inner[1][0].dim == 0 and inner[1][0].length == 1
        return (inner[0], [replace(inner[1][0], length=None), *inner[1][1:]]) if inner is not None and one else None
    source: Any = call["x"]
    if call.name == "item":
        return _split(reading, source, call["index"])
    shape = example(source)
    if shape is None or any(type(size) is not int for size in shape.shape):
        return None
    dim = call["dim"]
    if call.name == "getslice":
        index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (shape.dim() - len(index) + 1), *index[at + 1 :])
        taken = [_part_of(shape, place, one) for place, one in enumerate(index) if one != slice(None)]
    elif type(dim) is not int or call["step"] not in (None, 1):
        return None
    elif call.name == "select":
        taken = [_part_of(shape, dim, call["index"])]
    else:
        end = call["end"] if call.name == "slice" else _sum(call["start"], call["length"])
        taken = [_part_of(shape, dim, slice(call["start"], end))]
    parts = [part for part in taken if part is not None]
    return (source, parts) if parts and len(parts) == len(taken) else None


def _split(reading: Reading, parts: Any, place: int) -> tuple[fx.Node, list[Part]] | None:
    """Result ``place`` of unbind, chunk, split or tensor_split, if all parts have one size."""
    call = reading.read(parts, "unbind chunk split tensor_split", "dim chunks size sizes")
    shape = example(call["x"]) if call is not None else None
    if call is None or shape is None or type(dim := call["dim"] or 0) is not int:
        return None
    made, dim = tensors_of(parts), dim % shape.dim()
    if call.name == "unbind":
        return call["x"], [Part(dim, place % len(made), None)]
    sizes = [one.shape[dim] for one in made]
    place %= len(made)
    return (call["x"], [Part(dim, sum(sizes[:place]), sizes[place])]) if all(type(s) is int for s in sizes) else None


def _part_of(shape: Any, dim: int, taken: Any) -> Part | None:
    if dim >= shape.dim():
        return None
    size = shape.shape[dim]
    if type(taken) is int:
        return Part(dim % shape.dim(), taken % size, None)
    if not isinstance(taken, slice) or taken.step not in (None, 1):
        return None
    if any(type(number) is not int and number is not None for number in (taken.start, taken.stop)):
        return None
    start, stop, _ = taken.indices(size)
    return Part(dim % shape.dim(), start, stop - start) if stop > start else None


def _sum(start: Any, length: Any) -> Any:
    return start + length if type(start) is int and type(length) is int else None


def _first_view(reading: Reading, stacked: fx.Node) -> fx.Node:
    """``flat.view(E, N, K)`` is written anew for every expert: the first of such views of one tensor stands for all."""
    call = reading.read(stacked, "view")
    views = [] if call is None else [reader for reader in reading.readers(call["x"]) if same_shape(reader, stacked)]
    return next((view for view in views if reading.read(view, "view") is not None), stacked)
