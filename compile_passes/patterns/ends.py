"""What becomes of each expert's results in an unrolled loop, and what each takes its rows from.

Results are multiplied by a factor for each row, or masked; then they are added up, or collected: put into or added to
the rows of a tensor, one expert after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import fx

from compile_passes.equal import is_float_cast, no_narrower
from compile_passes.patterns.chains import Expert
from compile_passes.patterns.rows import Order, Written, entry_of
from compile_passes.safety import readers_of_numbers
from compile_passes.vocabulary import example, has_shape, rank, same_shape

# One index, or one for each leading dimension.
Index = fx.Node | tuple[fx.Node, ...]
# What one expert's results are put into or added to, and what that gives.
Step = tuple[Any, fx.Node]
_Other = TypeVar("_Other")
_NOTHING: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True)
class Entry:
    """Entry ``number`` of ``source`` [N], as a tensor without dimensions."""

    source: fx.Node
    number: int


Scale = int | float | Entry


@dataclass(frozen=True)
class End:
    """What becomes of one expert's results: ``value``, multiplied by ``factor`` if at all, meets ``reader``.

    ``mask``: where the results are not replaced by zeros, if some are; with ``others`` where they are. ``scale``: a
    number that multiplies them, too, or the entry of a tensor.
    """

    value: fx.Node
    factor: fx.Node | None
    reader: fx.Node
    mask: fx.Node | None = None
    others: bool = False
    scale: Scale = 1


@dataclass(frozen=True)
class Taken:
    """What an expert takes its rows from, by which index, or one for each leading dimension, or mask; ``indexed``: the
    source in the shape that it has.
    """

    source: fx.Node
    index: Index
    indexed: fx.Node


class Ends:
    """Follows results, and reads rows, of the experts of one loop.

    Args:
        order: reads orders of rows, and knows the narrowest dtype that rows may be rounded to.
        wide: the narrowest dtype that results may be rounded to.
    """

    def __init__(self, order: Order, wide: torch.dtype) -> None:
        self.order, self.reading, self.floor, self.wide = order, order.reading, order.floor, wide

    def of(self, value: fx.Node, inside: fx.Node | None) -> list[End | None]:
        """What becomes of an expert's result, of whose rows ``inside`` is a factor: once, or once for each slot of the
        tokens.
        """
        readers = readers_of_numbers(self.reading, value)
        return [self._follow(value, reader, inside) for reader in readers] or [None]

    def _follow(self, value: fx.Node, reader: fx.Node, factor: fx.Node | None) -> End | None:
        """From an expert's result, as ``reader`` reads it, to what sums or collects the results of all."""
        kept: tuple[fx.Node | None, bool] = (None, False)
        scale: Scale = 1
        while True:
            if self.reading.read(reader, "cast") is not None and is_float_cast(reader, value, self.wide):
                value = reader
            elif self.reading.read(reader, "view") is not None:
                value = reader
            elif scale == 1 and (number := self._number(reader, value)) is not None:
                scale, value = number, reader
            elif factor is None and self.reading.read(reader, "mul", "y") is not None:
                factor = self.factor(reader, value)
                if factor is None:
                    return None
                if scale == 1:
                    factor, scale = self._without_number(factor)
                value = reader
            elif kept[0] is None and (found := self._kept_by(reader, value)) is not None:
                kept, value = found, reader
            else:
                return End(value, factor, reader, *kept, scale)
            readers = readers_of_numbers(self.reading, value)
            if len(readers) != 1:
                return None
            (reader,) = readers

    def _number(self, reader: fx.Node, value: fx.Node) -> Scale | None:
        """The number, or the entry of a tensor, that ``reader`` multiplies ``value`` by."""
        call = self.reading.read(reader, "mul", "y")
        if call is None or not same_shape(reader, self.reading.operand(value)):
            return None
        other = call["y"] if call["x"] is value else call["x"]
        return other if type(other) in (int, float) else self._entry(other)

    def _entry(self, value: Any) -> Entry | None:
        """``scale[e]`` of floats [N]: it has no dimensions, and changes no dtype of what it multiplies."""
        held = example(value)
        found = entry_of(self.reading, value) if held is not None and held.dim() == 0 else None
        known = found is not None and rank(found[0]) == 1 and held is not None and held.dtype.is_floating_point
        return Entry(found[0], found[2]) if found is not None and known else None

    def _without_number(self, factor: fx.Node) -> tuple[fx.Node, Scale]:
        """Weights of rows, and what they are multiplied by: ``weights[token, slot, None] * 2.5``, or ``scale[e]``."""
        scaled = self.reading.uncast(factor, self.floor)
        call, held = self.reading.read(scaled, "mul", "y"), example(scaled)
        for one, other in (("x", "y"), ("y", "x")) if call is not None else ():
            weights, number = call[one], call[other]  # type: ignore[index]
            before = example(weights)
            scale = number if type(number) in (int, float) and isfinite(number) else self._entry(number)
            if before is None or held is None or scale is None:
                continue
            if before.dtype.is_floating_point and before.dtype == held.dtype and same_shape(weights, scaled):
                return weights, scale
        return factor, 1

    def factor(self, reader: fx.Node, value: fx.Node) -> fx.Node | None:
        """What the multiplication ``reader`` multiplies ``value`` [..., H] by: one number for each of its rows."""
        call, held = self.reading.call(reader), self.reading.operand(value)
        if call is None or not same_shape(reader, held):
            return None
        other = call["y"] if call["x"] is value else call["x"]
        return other if self._is_by_row(other, held) else None

    def _kept_by(self, reader: fx.Node, value: fx.Node) -> tuple[fx.Node, bool] | None:
        """The mask of ``where(mask, value, 0)``, or of ``where(mask, 0, value)`` and True."""
        call = self.reading.read(reader, "where masked_fill", "mask y value")
        if call is None or not same_shape(reader, value):
            return None
        if call.name == "where":
            other, others = (call["y"], False) if call["x"] is value else (call["x"], True)
            held = value in (call["x"], call["y"])
        else:
            other, others, held = call["value"], True, call["x"] is value
        empty = other == 0 if type(other) in (int, float) else self._is_no_start(other, reader)
        mask: fx.Node = call["mask"]
        return (mask, others) if held and empty and self._is_by_row(mask, value) else None

    def _is_no_start(self, zeros: Any, reader: fx.Node) -> bool:
        """Whether ``zeros`` are some, and not what ``reader``, the first of several, chooses a result before."""
        several = any(self.reading.named(next_, "where") is not None for next_ in self.reading.readers(reader))
        return self.reading.is_zeros(zeros) and not several

    def _is_by_row(self, given: Any, value: fx.Node) -> bool:
        """Whether ``given`` has one number for each row of ``value`` [..., H], and is not broadcast over rows."""
        shape = example(value)
        return shape is not None and has_shape(given, *shape.shape[:-1], 1)

    def added_up(self, values: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node | None] | None:
        """The node at which all ``values`` have been added up, and the one other term there is."""
        summed = {value: frozenset({value}) for value in values}
        readers = {reader for value in values for reader in self.reading.readers(value)}
        waiting = sorted(readers, key=self.reading.order.__getitem__)
        rest: list[Any] = []
        for node in waiting:
            call = self.reading.read(node, "add", "y")
            if call is None or node in summed:
                return None
            terms = (call["x"], call["y"])
            one, other = (summed.get(term, _NOTHING) if isinstance(term, fx.Node) else _NOTHING for term in terms)
            if one & other:  # twice in the sum
                return None
            summed[node] = one | other
            rest += [term for term in terms if not (isinstance(term, fx.Node) and term in summed) and term != 0]
            if len(summed[node]) == len(values):
                break
            waiting += [reader for reader in self.reading.readers(node) if reader not in waiting]
        else:
            return None
        if not self.is_wide(node) or len(rest) > 1 or not all(same_shape(value, node) for value in (*values, *rest)):
            return None
        if not rest or self.reading.is_zeros(rest[0]):
            return node, None
        start, total = (example(self.reading.operand(value)) for value in (rest[0], node))
        # Added in a narrower dtype of its own, the sum would be rounded to that.
        return (node, rest[0]) if start is not None and total is not None and start.dtype == total.dtype else None

    def is_wide(self, value: fx.Node) -> bool:
        """Whether sums of results may be rounded to the dtype of ``value``."""
        held = example(self.reading.operand(value))
        return held is not None and no_narrower(held.dtype, self.wide)

    def taken(self, expert: Expert) -> Taken | None:
        """The tokens or rows [N, H] that an expert takes its own from, and by what."""
        found: list[Taken] = []
        for up in expert.ups:
            call = self.reading.read(self.reading.uncast(up.rows, self.floor), "index fancy", "index")
            if call is None:
                return None
            index = call["index"]
            if isinstance(index, list | tuple):  # x[None, token], x[batch, place]
                parts = [part for part in index if part is not None and part not in (Ellipsis, slice(None))]
                leading = len(parts) == 1 and index.index(parts[0]) <= index.count(None)
                all_nodes = all(isinstance(part, fx.Node) for part in parts) and len(parts) == len(index)
                index = parts[0] if leading else tuple(parts) if len(parts) > 1 and all_nodes else None
            if not isinstance(index, fx.Node | tuple):
                return None
            root, given = self.reading.uncast(call["x"], self.floor), call["x"]
            dims = len(index) if isinstance(index, tuple) else _dims(index)
            source = next((node for node in (root, given) if rank(node) == dims + 1), None)
            if source is None:
                return None
            found.append(Taken(source, index, given))
        first = found[0]
        same = all(one.source is first.source and self._same(one.index, first.index) for one in found)
        return first if same else None

    def _same(self, one: Any, other: Any) -> bool:
        """Whether two indices are the same numbers."""
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            return self.reading.same(one, other)
        parts = [part if isinstance(part, list | tuple) else (part,) for part in (one, other)]
        alike = len(parts[0]) == len(parts[1]) and all(isinstance(part, fx.Node) for both in parts for part in both)
        return alike and all(self.reading.same(a, b) for a, b in zip(*parts, strict=True))

    def _is_index_of(self, written: Written, index: Any) -> bool:
        """Whether rows are written at ``index``."""
        return self._same(
            *(self.order.bare(i) if isinstance(i, fx.Node) else i for i in (self.order.by_row(written), index))
        )

    def in_order(self, ends: Sequence[End], others: Sequence[_Other]) -> list[tuple[End, _Other]]:
        """Ends of the experts, and what else each has, in the order in which their results are collected."""
        return sorted(zip(ends, others, strict=True), key=lambda pair: self.reading.order[pair[0].reader])

    def put_in_turn(self, ends: Sequence[End], indices: Sequence[Index], whole: bool) -> fx.Node | None:
        """What the experts have written one after the other, each the results of its tokens; over zeros, where these
        are not the ``whole``.
        """
        chain = chain_of(self.put(end.reader, index, end.value) for end, index in self.in_order(ends, indices))
        if chain is None or not (whole or self.reading.is_zeros(chain[0])):
            return None
        return chain[1] if self.is_wide(chain[1]) else None

    def put(self, node: fx.Node, index: Any, rows: fx.Node) -> Step | None:
        """(before, after) of ``before[index] = rows``."""
        placed = self.order.placed(node)
        fits = placed is not None and placed.rows is rows and self._is_index_of(placed, index)
        return (placed.start, node) if placed is not None and fits else None

    def added_to_tokens(
        self, ends: Sequence[End], indices: Sequence[Index]
    ) -> tuple[fx.Node, fx.Node | None, bool] | None:  # fmt: skip
        """(the sum, what it was added to, whether a token's row counts once) of results added to their tokens."""
        steps = [(end, self._added(end, index)) for end, index in self.in_order(ends, indices)]
        chain = chain_of(step for _, step in steps)
        if chain is None or not self.is_wide(chain[1]):
            return None
        once = any(step is not None and step[1] is not end.reader for end, step in steps)
        return chain[1], None if self.reading.is_zeros(chain[0]) else chain[0], once

    def _added(self, end: End, index: Index) -> Step | None:
        """(before, after) of one expert's addition; ``before[index] += rows``, where rows of one token overwrite each
        other, ends behind the addition.
        """
        added = self.order.added(end.reader)
        if added is not None and added.rows is end.value:
            return (added.start, end.reader) if self._is_index_of(added, index) else None
        call, readers = self.reading.read(end.reader, "add", "y"), self.reading.readers(end.reader)
        if call is None or len(readers) != 1:
            return None
        taken = self.reading.read(call["y"] if call["x"] is end.value else call["x"], "index fancy", "index")
        put = self.put(readers[0], index, end.reader)
        if taken is None or put is None or put[0] is not taken["x"]:
            return None
        return put if self._same(taken["index"], index) else None


def _dims(index: fx.Node) -> int:
    """How many dimensions an index takes the place of."""
    held = example(index)
    return held.dim() if held is not None and held.dtype == torch.bool else 1


def chain_of(steps: Iterable[Step | None]) -> Step | None:
    """(what was there first, what is there last) of steps that each begin where the one before ends."""
    first: Any = None
    last: fx.Node | None = None
    for step in steps:
        if step is None or (last is not None and step[0] is not last):
            return None
        first, last = (step[0] if last is None else first), step[1]
    return None if last is None else (first, last)
