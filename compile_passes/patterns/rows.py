"""Which token, which slot and whose weight every routed row has: one algebra for all spellings of an order of rows.

R = T * K pairs of a token and one of its K slots are numbered row by row of ``topk_ids`` [T, K]: pair r is slot r % K
of token r // K. Rows are in pair order, or sorted by a permutation. An index says which pairs, tokens or slots a list
of rows has, in an order; taking rows by an index of pairs sorts what was in pair order, whatever it is:
``x[perm // K]``, ``x.repeat_interleave(K, 0)[perm]`` and ``x.gather(0, tokens[perm][:, None].expand(-1, H))`` are one.

Rows may be those of a mask [experts, tokens] as well, as Megatron lists them: ``arange(T).expand(E, -1)[mask]`` and
``weights.T.masked_select(mask)``, expert after expert, and of each the tokens in their order. Such a mask stands where
the permutation does; whether it is set for K experts of every token, and which, others have to prove.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from compile_passes.compat import number_by_a_guard
from compile_passes.equal import no_narrower
from compile_passes.patterns.ids import are_integers
from compile_passes.reading import Reading
from compile_passes.vocabulary import (
    Call,
    as_many_by_a_guard,
    equal_sizes,
    example,
    has_shape,
    rank,
    same_count,
    same_shape,
    size_of,
)

#: Calls whose memory rows may be put into, all of them.
BLANK = ("empty_like", "zeros_like", "zeros", "empty")
# Integers that a position or an expert id may be computed in.
_INDEX = (torch.int32, torch.int64)
# How far down an index, or rows, are looked into.
_DEPTH = 12


@dataclass(frozen=True)
class Positions:
    """What an integer vector says of every row: the number of its pair, its token or its slot.

    Attributes:
        kind: "pair", "token" or "slot".
        top_k: the K that tokens and slots were computed with; None of pairs, and of the tokens of a mask.
        perm: the permutation that the rows are sorted by, or the mask that lists them, None in pair order.
    """

    kind: str
    top_k: Any = None
    perm: fx.Node | None = None


class Taken(NamedTuple):
    """``source[index]``; a ``wide`` index is [N, W], and has to be alike in all columns."""

    source: fx.Node
    index: Any
    wide: bool


class Written(NamedTuple):
    """``rows`` written, or added, into ``start`` at ``index``, which is as in `Taken`, or a list of vectors for all
    dimensions but the last.
    """

    start: fx.Node
    index: Any
    rows: Any
    wide: bool


@dataclass(frozen=True)
class Rows:
    """Tokens as rows ``[R, H]``: ``hidden`` [T, H], ``top_k`` copies of each, ``perm`` as above.

    ``weights``: R routing weights, in pair order, that the rows were multiplied by, or None.
    """

    hidden: fx.Node
    top_k: Any
    perm: fx.Node | None = None
    weights: fx.Node | None = None


class Order:
    """Reads orders of rows in one graph. ``floor``: the narrowest dtype that rows and weights may be rounded to."""

    def __init__(self, reading: Reading, floor: torch.dtype) -> None:
        self.reading, self.floor = reading, floor

    # ---- indices

    def positions(self, value: Any, wide: bool = False, depth: int = _DEPTH) -> Positions | None:
        """What ``value``, integers in any shape, says of the rows, row-major.

        Args:
            wide: it is [N, W], and has to be alike in all columns.
        """
        node = position(self.reading, value) if wide else self.bare(value)
        call = self.reading.call(node)
        if depth == 0 or call is None:
            return None
        if self.reading.read(node, "floordiv truncdiv mod", "y") is not None:
            inner = self.positions(call["x"], wide, depth - 1)
            # A K that is the size of an input, as under dynamic=True, is a symbol there.
            top_k = number_by_a_guard(size_of(call["y"])) if inner is not None and inner.kind == "pair" else None
            if inner is None or top_k is None or top_k < 1:
                return None
            return replace(inner, kind="slot" if call.name == "mod" else "token", top_k=top_k)
        if wide:
            column = self.column(node)
            return None if column is None else self.positions(column, False, depth - 1)
        if is_ramp(self.reading, node):
            return Positions("pair")
        if sorts(self.reading, node) is not None:
            return Positions("pair", perm=node)
        return self._repeated_positions(node) or self._listed_positions(node) or self._taken_positions(node, depth)

    def _listed_positions(self, node: Any) -> Positions | None:
        """The tokens of a mask [E, T], expert after expert."""
        chosen = self.chosen(node)
        if chosen is not None:
            call, tokens = self.reading.named(self.reading.strip(chosen[0]), "expand", "repeat"), example(chosen[0])
            if call is None or tokens is None or not is_ramp(self.reading, self.bare(call["x"])):
                return None
            across = has_shape(call["x"], 1, tokens.shape[1]) or has_shape(call["x"], tokens.shape[1])
            return Positions("token", perm=chosen[1]) if across else None
        part = self.reading.read(node, "item", "index")
        mask = None if part is None or part["index"] != 1 else listed_mask(self.reading, part["x"])
        return Positions("token", perm=mask) if is_mask(mask) and rank(mask) == 2 else None

    def chosen(self, value: Any) -> tuple[fx.Node, fx.Node] | None:
        """(x, mask) of the entries of ``x`` [E, T] where a mask of its shape is set."""
        call = self.reading.read(value, "masked_select fancy", "mask index")
        mask = None if call is None else call["mask" if call.name == "masked_select" else "index"]
        if call is None or not isinstance(mask, fx.Node) or not is_mask(mask) or rank(mask) != 2:
            return None
        return (call["x"], mask) if same_shape(mask, call["x"]) else None

    def column(self, value: Any) -> Any:
        """``value`` [N, W] is [N, 1] in every column, or is [N, 1] itself."""
        shape = example(value)
        if shape is None or shape.dim() != 2:
            return None
        if has_shape(value, shape.shape[0], 1):
            return value
        call = self.reading.named(value, "expand", "repeat")
        return call["x"] if call is not None and has_shape(call["x"], shape.shape[0], 1) else None

    def _taken_positions(self, node: Any, depth: int) -> Positions | None:
        taken = self.taken(node)
        if taken is None or rank(taken.source) != 1 or not self._as_many(node, taken.source):
            return None
        source = self.positions(taken.source, False, depth - 1)
        by = self.positions(taken.index, False, depth - 1)
        if source is None or by is None or source.perm is not None or by.kind != "pair":
            return None
        return replace(source, perm=by.perm)

    def _repeated_positions(self, node: Any) -> Positions | None:
        """0, 1, 2, ... of tokens or slots, each repeated for all slots or tokens."""
        call = self.reading.read(node, "repeat_interleave", "repeats dim")
        if call is not None:
            ramp = rank(call["x"]) == 1 and is_ramp(self.reading, call["x"])
            return Positions("token", call["repeats"]) if ramp and type(call["repeats"]) is int else None
        call = self.reading.named(node, "expand", "repeat")
        shape = example(node)
        if call is None or shape is None or shape.dim() != 2 or not is_ramp(self.reading, self.bare(call["x"])):
            return None
        tokens, top_k = shape.shape
        if has_shape(call["x"], tokens, 1) and type(top_k) is int:
            return Positions("token", top_k)
        if type(top_k) is int and (has_shape(call["x"], top_k) or has_shape(call["x"], 1, top_k)):
            return Positions("slot", top_k)
        return None

    def bare(self, value: Any) -> Any:
        """Positions without reshapes, and casts between the integers that hold any of them."""
        while (inner := position(self.reading, self.reading.strip(value))) is not value:
            value = inner
        return value

    def same(self, perm: Any, other: Any) -> bool:
        """Whether two permutations are the same numbers."""
        return self.reading.same(self.bare(perm), self.bare(other))

    def has_order(self, value: Any, perm: fx.Node | None, wide: bool = False) -> bool:
        """Whether ``value`` numbers all pairs, sorted by ``perm``."""
        found = self.positions(value, wide)
        return found is not None and found.kind == "pair" and found.perm is not None and self.same(found.perm, perm)

    # ---- taking

    def taken(self, value: Any) -> Taken | None:
        """Rows ``x[i]``, one for every entry of ``i`` [N], however they are gathered."""
        call, shape = self.reading.read(value, "index gather take_along_dim", "dim index"), example(value)
        if call is None or (call.name != "index" and (shape is None or call["dim"] not in (0, -shape.dim()))):
            return None
        if call.name == "index" or shape is None or shape.dim() == 1:
            return Taken(call["x"], call["index"], False) if self._is_vector(call["index"]) else None
        source = example(call["x"])
        if source is None or shape.dim() != 2 or source.dim() != 2 or not equal_sizes(shape.shape[1], source.shape[1]):
            return None
        along = same_shape(call["index"], value) or (
            call.name == "take_along_dim" and has_shape(call["index"], shape.shape[0], 1)
        )
        return Taken(call["x"], call["index"], True) if along else None

    def placed(self, value: Any) -> Written | None:
        """``start`` with rows put at an index, or where a mask is set, one for each, in place of what was there."""
        return self._written(value, "index_put fancy_put index_copy scatter", "")

    def added(self, value: Any) -> Written | None:
        """``start`` with rows added at an index, one for each."""
        return self._written(value, "index_put fancy_put index_add scatter_add", "accumulate")

    def by_row(self, written: Written) -> Any:
        """The index of `written` with one entry for each row; None where it has several that may differ."""
        return self.column(written.index) if written.wide else written.index

    def _written(self, value: Any, names: str, flag: str) -> Written | None:
        call = self.reading.read(value, names, f"dim index src {flag}")
        dims = rank(self.reading.operand(call["x"])) if call is not None and isinstance(call["x"], fx.Node) else None
        if call is None or dims is None:
            return None
        index = call["index"]
        if call.name == "fancy_put" and not isinstance(index, fx.Node):
            if not isinstance(index, list | tuple):
                return None
            if index and index[-1] in (slice(None), Ellipsis):  # rows[index, :]
                index = index[:-1]
            if len(index) != dims - 1 or not all(map(self._is_vector, index)):
                return None
            index = index[0] if dims == 2 else index
        wide = dims == 2 and call.name in ("scatter", "scatter_add")
        fits = not wide or same_shape(index, self.reading.operand(call["src"]))
        by_index = call.name in ("index_put", "fancy_put")
        along = bool(call[flag]) == bool(flag) if by_index else call["dim"] in (0, -dims)
        return Written(call["x"], index, call["src"], wide) if fits and along else None

    def _is_vector(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and rank(self.reading.operand(value)) == 1

    def _in_a_row(self, value: Any) -> bool:
        """Whether ``value`` is [N] or [N, 1]."""
        shape = example(value)
        return shape is not None and (shape.dim() == 1 or has_shape(value, shape.shape[0], 1))

    def _as_many(self, value: Any, other: Any) -> bool:
        one, two = example(value), example(other)
        return one is not None and two is not None and same_count(one, two)

    # ---- rows

    def flat(self, value: Any) -> fx.Node | None:
        """The hidden states [..., H] that ``value`` is a reshape or cast of: [T, H] where there are such."""
        shape = example(value)
        if shape is None:
            return None
        width = shape.shape[-2] if shape.dim() > 1 and equal_sizes(shape.shape[-1], 1) else shape.shape[-1]
        views = [(node, example(node)) for node in self.reading.casts(value, self.floor)]
        wide = [(node, view) for node, view in views if view is not None and equal_sizes(view.shape[-1], width)]
        flat = [(node, view) for node, view in wide if view.dim() == 2]
        found = (flat or wide)[-1:]
        return found[0][0] if found else None

    def rows(self, value: Any, depth: int = _DEPTH) -> Rows | None:
        """The tokens that ``value`` [R, H], or [T, K, H], has as rows."""
        value = self.reading.uncast(value, self.floor)
        if depth == 0 or self.reading.call(value) is None:
            return None
        return self._weighted(value, depth) or self._copied(value) or self._taken_rows(value, depth)

    def _taken_rows(self, value: fx.Node, depth: int) -> Rows | None:
        taken = self.taken(value)
        by = self.positions(taken.index, taken.wide) if taken is not None else None
        if taken is None or by is None or rank(taken.source) != 2:
            return None
        if by.kind == "token":
            return Rows(taken.source, by.top_k, by.perm)
        if by.kind != "pair" or not self._as_many(value, taken.source):
            return None
        inner = self.rows(taken.source, depth - 1)
        if inner is None:
            return Rows(taken.source, 1, by.perm)
        return replace(inner, perm=by.perm) if inner.perm is None and self._is_wide(taken.source, inner) else None

    def _is_wide(self, value: Any, rows: Rows) -> bool:
        """Whether the last dimension of ``value`` is that of the tokens."""
        one, two = example(value), example(rows.hidden)
        return one is not None and two is not None and equal_sizes(one.shape[-1], two.shape[-1])

    def _copied(self, value: fx.Node) -> Rows | None:
        """K copies of every token one after the other."""
        call = self.reading.read(value, "repeat_interleave", "repeats dim")
        if call is not None:
            along = call["dim"] in (0, -2) and rank(call["x"]) == 2 and type(call["repeats"]) is int
            return Rows(call["x"], call["repeats"]) if along else None
        call = self.reading.named(value, "expand", "repeat")
        shape = example(value)
        if call is None or shape is None or shape.dim() != 3 or type(shape.shape[1]) is not int:
            return None
        if not has_shape(call["x"], shape.shape[0], 1, shape.shape[2]):
            return None
        tokens = self._tokens(call["x"], shape)
        return None if tokens is None else Rows(tokens, shape.shape[1])

    def _weighted(self, value: fx.Node, depth: int) -> Rows | None:
        call, result = self.reading.read(value, "mul", "y"), example(value)
        if call is None or result is None or not no_narrower(result.dtype, self.floor):
            return None
        for one, other in (("x", "y"), ("y", "x")):
            inner = self._factor(call[one], value, depth - 1)
            if inner is None or inner.weights is not None or not self._is_wide(value, inner):
                continue
            weights = self.weights(call[other], value, inner.perm)
            if weights is not None:
                return replace(inner, weights=weights)
        return None

    def _factor(self, value: Any, product: fx.Node, depth: int) -> Rows | None:
        """The rows of one factor: as many as the product has, or [T, 1, H] that are broadcast over the slots."""
        if same_shape(value, product):
            return self.rows(value, depth)
        shape = example(product)
        if shape is None or shape.dim() != 3 or not has_shape(value, shape.shape[0], 1, shape.shape[2]):
            return None
        tokens = self._tokens(value, shape)
        return Rows(tokens, shape.shape[1]) if tokens is not None and type(shape.shape[1]) is int else None

    def _tokens(self, value: Any, shape: torch.Tensor) -> fx.Node | None:
        """The [T, H] that ``value`` [T, 1, H] is a reshape of."""
        return next((n for n in self.reading.reshapes(value) if has_shape(n, shape.shape[0], shape.shape[2])), None)

    def weights(self, value: Any, rows: Any, perm: fx.Node | None) -> fx.Node | None:
        """The weights, in pair order, that ``value`` brings to ``rows`` [..., H] in the order of ``perm``, or None; in
        that of a mask [E, T], those of every expert and token.
        """
        shape = example(self.reading.operand(rows) if isinstance(rows, fx.Node) else rows)
        if shape is None or not has_shape(value, *shape.shape[:-1], 1):
            return None
        return self.weights_of(value, shape.numel() // max(shape.shape[-1], 1), perm)

    def weights_of(self, value: Any, count: Any, perm: fx.Node | None) -> fx.Node | None:
        """As `weights`, of ``count`` rows; ``value`` in any shape."""
        value = self.reading.uncast(value, self.floor)
        if perm is not None:
            value = self._sorted_weights(value, perm)
        weights = example(value)
        # Narrower ones are widened where they meet the rows, by the operator, too.
        if weights is None or not weights.dtype.is_floating_point or weights.dtype.itemsize < 2:
            return None
        found: fx.Node = value
        return found if is_mask(perm) or as_many_by_a_guard(weights, count) else None

    def _sorted_weights(self, value: Any, perm: fx.Node) -> Any:
        """What ``value`` takes in the order of ``perm``: ``w[perm]`` of flat weights, ``w[perm // K, perm % K]``."""
        chosen = self.chosen(value)
        if chosen is not None:
            return self.reading.uncast(chosen[0], self.floor) if self.same(chosen[1], perm) else None
        taken = self.taken(value)
        if taken is not None:
            by_pair = self._in_a_row(taken.source) and self.has_order(taken.index, perm, taken.wide)
            return self.reading.uncast(taken.source, self.floor) if by_pair else None
        call = self.reading.read(value, "fancy", "index")
        found = None if call is None else numbered(self.reading, call, 2)
        if found is None:
            return None
        source, parts = found
        width = example(source)
        token, slot = (self.positions(part) if isinstance(part, fx.Node) else None for part in parts)
        if token is None or slot is None or (token.kind, slot.kind) != ("token", "slot") or width is None:
            return None
        agree = token.top_k == slot.top_k and equal_sizes(width.shape[1], token.top_k)
        ordered = all(p.perm is not None and self.same(p.perm, perm) for p in (token, slot))
        return self.reading.uncast(source, self.floor) if agree and ordered else None


def numbered(reading: Reading, call: Call, dims: int) -> tuple[fx.Node, list[Any]] | None:
    """(weights of ``dims`` dimensions, what numbers each of these) of ``weights[token, slot, None]``: in graphs of
    `torch.export` they have another dimension, of size 1, by ``unsqueeze``, before they are indexed.
    """
    index = call["index"] if isinstance(call["index"], list | tuple) else [call["index"]]
    parts = [part for part in index if part is not None]
    if len(parts) != dims or rank(call["x"]) == dims:
        return (call["x"], parts) if len(parts) == dims else None
    view = reading.read(call["x"], "view")
    inner = None if view is None else example(view["x"])
    if view is None or inner is None or inner.dim() != dims or not has_shape(call["x"], *inner.shape, 1):
        return None
    return view["x"], parts


def listed_mask(reading: Reading, places: Any) -> Any:
    """The mask whose places ``torch.where(mask)`` or ``mask.nonzero(as_tuple=True)`` lists; None of other values."""
    call = reading.read(places, "where nonzero", "mask as_tuple")
    if call is None or "y" in call.args:
        return None
    return call["mask" if call.name == "where" else "x"]


def is_mask(value: Any) -> bool:
    """Whether ``value`` holds booleans."""
    held = example(value)
    return held is not None and held.dtype == torch.bool


def sorts(reading: Reading, value: Any) -> fx.Node | None:
    """The ids that ``value`` is the ascending sorting permutation of, or None."""
    call = reading.read(reading.strip(value), "item argsort", "index dim")
    if call is None:
        return None
    if call.name == "item":
        call = reading.read(call["x"], "sort", "dim") if call["index"] == 1 else None
    if call is None or call["dim"] not in (-1, 0) or rank(call["x"]) != 1:
        return None
    ids: fx.Node = call["x"]
    return ids


def position(reading: Reading, value: Any) -> Any:
    """Row positions without casts between the integers that hold any of them."""
    while (call := reading.read(value, "cast")) is not None:
        before, after = example(call["x"]), example(value)
        if before is None or after is None or before.dtype not in _INDEX or after.dtype not in _INDEX:
            break
        value = call["x"]
    return value


def entry_of(reading: Reading, value: Any) -> tuple[fx.Node, int, int] | None:
    """(source, dimension, number) where ``value`` is one entry of ``source`` along a dimension, which it may keep."""
    call = reading.named(value, "select", "getslice", "narrow", "item")
    if call is None:
        return None
    source, dim, number = call["x"], call["dim"], call["index"]
    if call.name == "item":
        parts = reading.read(source, "unbind chunk split", "dim size chunks")
        source, dim = (None, None) if parts is None else (parts["x"], parts["dim"] or 0)
    elif call.name == "narrow":
        number = call["start"] if call["length"] == 1 else None
    elif call.name == "getslice":
        index = tuple(part for part in (number if isinstance(number, tuple) else (number,)) if part is not None)
        some = [place for place, part in enumerate(index) if part != slice(None) and part is not Ellipsis]
        if len(some) != 1:
            return None
        (at,), number = some, index[some[0]]
        dim = at - len(index) if Ellipsis in index[:at] else at
        number = place_of(number)
    whole, made = example(source), example(value)
    if whole is None or made is None or type(dim) is not int or type(number) is not int:
        return None
    dim %= whole.dim()
    size = whole.shape[dim]
    one = type(size) is int and equal_sizes(made.numel() * size, whole.numel())
    return (source, dim, number % size) if one else None


def place_of(part: Any) -> int | None:
    """k, of the index k or k:k+1."""
    if isinstance(part, slice) and type(part.start) is int and part == slice(part.start, part.start + 1):
        part = part.start
    return part if type(part) is int else None


def counted_off(reading: Reading, value: Any, size: Any) -> fx.Node | None:
    """The numbers [..., 1] that ``value`` compares with 0, 1, 2, ... ``size`` - 1 along its last dimension."""
    call = reading.read(value, "eq", "y")
    for one, other in (("x", "y"), ("y", "x")) if call is not None else ():
        numbers, ramp = example(call[one]), example(call[other])  # type: ignore[index]
        if numbers is None or ramp is None or not numbers.dim() or not equal_sizes(numbers.shape[-1], 1):
            continue
        if not are_integers(reading, call[one]):  # type: ignore[index]
            continue
        if equal_sizes(ramp.numel(), size) and is_ramp(reading, reading.strip(call[other])):  # type: ignore[index]
            found: fx.Node = call[one]  # type: ignore[index]
            return found
    return None


def is_ramp(reading: Reading, value: Any) -> bool:
    """Whether ``value`` is 0, 1, 2, ... row by row."""
    node = reading.strip(position(reading, value))
    ramp, tensor = reading.read(node, "arange", "end dtype"), example(node)
    return ramp is not None and tensor is not None and tensor.dtype in _INDEX and rank(value) == 1
