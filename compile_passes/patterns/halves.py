"""The halves of the first expert product: gate and up, however they are taken from its rows, perhaps clamped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, example, has_shape, rank, same_shape

_PARTS = ("item", "getslice", "slice", "narrow", "select", "chunk", "split", "tensor_split", "unbind", "view", "index")


@dataclass(frozen=True)
class Half:
    """A part of the first product: all of it, or its gate (0) or up (1) half; clamped to ``[low, high]``."""

    source: fx.Node
    layout: str
    index: int
    low: float | None = None
    high: float | None = None

    @property
    def is_positive_part(self) -> bool:
        """Whether it is clamped at 0 alone."""
        return self.low == 0 and self.high is None


class Halves:
    """Reads halves of first products.

    Args:
        results: the values that first products may have.
        floor: the narrowest dtype that a cast may go to.
    """

    def __init__(self, reading: Reading, results: Iterable[fx.Node], floor: torch.dtype) -> None:
        self.reading, self.results, self.floor = reading, frozenset(results), floor

    def uncast(self, value: Any) -> Any:
        """``value`` without reshapes and casts, no further than a first product."""
        return self.reading.uncast(value, self.floor, self.results)

    def elementwise(self, value: Any, names: str, parameters: str = "") -> Call | None:
        """As `Reading.read`, of a call all of whose tensors have the shape of its result: nothing is broadcast."""
        call = self.reading.read(value, names, parameters)
        if call is None:
            return None
        tensors = [operand for operand in call.args.values() if example(operand) is not None]
        return call if all(same_shape(operand, value) for operand in tensors) else None

    def whole(self, value: Any) -> Any:
        """What ``value`` is taken of, by whichever slices and parts."""
        value = self.uncast(value)
        while value not in self.results and (call := self.reading.named(value, *_PARTS)) is not None:
            value = self.uncast(call["x"])
        return value

    def half(self, value: Any) -> Half | None:
        """The half that ``value`` is, or None; a bound at infinity is none."""
        value = self.uncast(value)
        if value in self.results:
            return Half(value, "none", 0)
        call = self.elementwise(value, "clamp", "min max")
        if call is not None:
            inner = self.half(call["x"])
            bounds = (call["min"], call["max"])
            if inner is None or inner.low is not None or inner.high is not None:
                return None
            if not all(bound is None or isinstance(bound, int | float) for bound in bounds):
                return None
            return Half(inner.source, inner.layout, inner.index, *finite_bounds(call))
        return self._split(value)

    def _split(self, value: Any) -> Half | None:
        """An element of chunk or split, a slice of the last dimension, or one of two along a dimension of size 2:
        (first, second) or (even, odd).
        """
        call = self.reading.read(value, "item getslice slice narrow select", "index dim start end step length")
        if call is None:
            return None
        chosen = self._selected(call)
        if chosen is not None:
            return self._of_two(*chosen)
        if call.name == "item":
            parts = self.reading.read(call["x"], "chunk split tensor_split", "chunks size sizes dim")
            source = self._source(parts["x"]) if parts is not None else None
            if parts is None or source is None or call["index"] not in (0, 1):
                return None
            width = _width(source)
            halves = parts["chunks"] == 2 if parts.name == "chunk" else _halves(parts, width)
            dim = 0 if parts["dim"] is None else parts["dim"]
            last = dim in (-1, (rank(parts["x"]) or 0) - 1)
            return Half(source, "concat", call["index"]) if last and halves and width % 2 == 0 else None
        bounds, source = _slice_of_last(call), self._source(call["x"])
        if bounds is None or source is None:
            return None
        width = _width(source)
        start, stop, step = bounds.indices(width)
        if step == 2 and start in (0, 1) and width % 2 == 0:  # `_fits` sees where it stops
            return Half(source, "interleaved", start)
        if step == 1 and width % 2 == 0 and (start, stop) in ((0, width // 2), (width // 2, width)):
            return Half(source, "concat", int(start > 0))
        return None

    def _selected(self, call: Call) -> tuple[Any, int, int] | None:
        """(x, dimension, place) of ``x[..., place, ...]``, whatever else of x is taken whole."""
        if call.name == "item":
            parts = self.reading.read(call["x"], "unbind", "dim")
            return None if parts is None else (parts["x"], parts["dim"], call["index"])
        if call.name == "select":
            return call["x"], call["dim"], call["index"]
        index = call["index"] if call.name == "getslice" else None
        index = index if isinstance(index, tuple) else (index,)
        numbers = [place for place, part in enumerate(index) if type(part) is int]
        whole = all(part is Ellipsis or part == slice(None) for part in index if type(part) is not int)
        if len(numbers) != 1 or not whole:
            return None
        (place,) = numbers
        return call["x"], place - len(index) if Ellipsis in index[:place] else place, index[place]

    def _of_two(self, value: Any, dim: Any, place: Any) -> Half | None:
        """Gate or up of the product's result as [R, 2, I] or [R, I, 2]."""
        shape, source = example(value), self.uncast(value)
        rows = example(source) if source in self.results else None
        if shape is None or rows is None or type(dim) is not int or place not in (0, 1, -1, -2):
            return None
        lead, width, dim = shape.dim() - 2, _width(source), dim % shape.dim()
        for at, layout, sizes in ((lead, "concat", (2, width // 2)), (lead + 1, "interleaved", (width // 2, 2))):
            fits = any(has_shape(value, *front, *sizes) for front in _leads(rows))
            if dim == at and width % 2 == 0 and fits:
                return Half(source, layout, place % 2)
        return None

    def _source(self, value: Any) -> fx.Node | None:
        """The product's result ``[..., N]`` that ``value``, of the same rows, is: its halves are those of N."""
        source = self.uncast(value)
        rows = example(source) if source in self.results else None
        if rows is None:
            return None
        return source if any(has_shape(value, *lead, rows.shape[-1]) for lead in _leads(rows)) else None


def _leads(rows: torch.Tensor) -> tuple[tuple[Any, ...], ...]:
    """The shapes that rows [..., N] have in front of N, as they are and one after the other."""
    lead = tuple(rows.shape[:-1])
    count = math.prod(lead)
    return (lead, (count,), (count, 1), (1, count))


def finite_bounds(clamp: Call) -> tuple[float | None, float | None]:
    """(min, max) of a clamp, each None where it is infinite and bounds nothing."""
    low, high = clamp["min"], clamp["max"]
    return None if low == -math.inf else low, None if high == math.inf else high


def _slice_of_last(call: Call) -> slice | None:
    """The slice of the last dimension that ``call`` takes, when it takes nothing else."""
    if call.name == "getslice":
        index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
        *lead, last = index
        if isinstance(last, slice) and all(part is Ellipsis or part == slice(None) for part in lead):
            whole = len(index) == (rank(call["x"]) or 0) or Ellipsis in lead
            return (
                last if whole and all(isinstance(b, int | None) for b in (last.start, last.stop, last.step)) else None
            )
        return None
    dim, source_rank = call["dim"], rank(call["x"]) or 0
    numbers = (call["start"], call["length"] if call.name == "narrow" else call["end"], call["step"])
    if not all(isinstance(number, int | None) for number in numbers) or call["start"] is None:
        return None
    if call.name in ("slice", "narrow") and dim in (-1, source_rank - 1):
        end = call["start"] + call["length"] if call.name == "narrow" else call["end"]
        return slice(call["start"], end, call["step"])
    return None


def _halves(parts: Call, width: int) -> bool:
    if parts.name == "tensor_split":
        return list(parts["sizes"]) == [width // 2] if parts["sizes"] is not None else bool(parts["size"] == 2)
    if parts["sizes"] is not None:
        return list(parts["sizes"]) == [width // 2, width // 2]
    return bool(parts["size"] == width // 2)


def _width(value: fx.Node) -> int:
    tensor = example(value)
    return tensor.shape[-1] if tensor is not None and isinstance(tensor.shape[-1], int) else 0
