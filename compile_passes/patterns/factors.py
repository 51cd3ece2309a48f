"""Masks and weights of tokens, experts and slots as sums of products of factors, whose dimensions have names.

    mask1 * (locations1 < capacity)                            [t, e]: a one-hot of ids, a comparison
    einsum("se,sc->sec", gates * mask1, one_hot(places, C))    [t, e, c]: these, the gates, a one-hot of places

Names follow a value down through views, transpositions and broadcasts, so that it does not matter in which order the
dimensions are written. A dimension that a sum removes is a new name: another slot of the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast, no_narrower
from compile_passes.patterns.contraction import TRANSPOSES, permutation
from compile_passes.patterns.rows import counted_off
from compile_passes.reading import Reading
from compile_passes.vocabulary import (
    Call,
    equal_sizes,
    example,
    has_shape,
    is_zero,
    rank,
    same_shape,
    single,
    two_labelled,
)

# The dimensions of experts, and of the slots of one expert; every other name is a dimension of tokens, or a summed one.
EXPERT, SLOT = "expert", "slot"
# A name for every dimension: None for one of size 1, several for the dimensions that it joins.
Axes = tuple[Any, ...]
# What the name of a scatter's choices for one token begins with: they are distinct, so that only equal ones meet.
CHOICES = "@"
# Calls that give zeros where their operand is all zeros.
_KEEP_ZEROS = frozenset({"sum", "cumsum", "cast", "view", "clone", "expand"})
# How many terms, and how many steps down.
_TERMS, _DEPTH = 16, 48


@dataclass(frozen=True)
class Factor:
    """One factor of a product.

    Attributes:
        kind: "experts" for a one-hot of the expert ids ``node``, "places" for one of the slots ``node``, "number" for
            ``node`` itself, "inverse" for 1 / ``node``, "not" for its negation.
        axes: the dimensions of ``node``.
        drops: places outside of the slots give zeros, and no error.
    """

    kind: str
    node: fx.Node
    axes: Axes
    drops: bool = False


Factored = tuple[Factor, ...]
# The two operands of a product, and their dimensions.
Pairs = Sequence[tuple[Any, Axes]]


def flat(axes: Axes) -> tuple[str, ...]:
    """All names in ``axes``."""
    return tuple(name for axis in axes if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,)))


def names(product: Factored) -> set[str]:
    """The names of all dimensions of a product."""
    return {name for factor in product for name in flat(factor.axes)}


def one_of(product: Factored, kind: str) -> Factor:
    """The factor of a kind of which there is one."""
    return next(factor for factor in product if factor.kind == kind)


def has_hot(product: Factored) -> bool:
    """Whether a one-hot of experts is among the factors."""
    return any(factor.kind == "experts" for factor in product)


def spreads(axes: Axes, inner: Axes) -> bool:
    """Whether a value has a dimension of experts that what it is made of has not: there a one-hot picks of others."""
    return EXPERT in flat(axes) and EXPERT not in flat(inner)


@dataclass
class Factors:
    """Reads values whose dimensions have the ``sizes`` of their names.

    Attributes:
        floor: the narrowest dtype that weights may be rounded to.
    """

    reading: Reading
    floor: torch.dtype
    sizes: dict[str, Any] = field(default_factory=dict)

    # ---- sums

    def terms(self, value: Any, axes: Axes, depth: int = _DEPTH) -> list[Factored] | None:
        """The products whose sum ``value`` is; None where it cannot be read."""
        call = self.reading.call(value)
        if call is None or depth == 0 or rank(value) != len(axes):
            return None
        if SLOT not in flat(axes):
            alone = self.factors(value, axes, depth)
            return None if alone is None else [alone]
        place = self._place(value, call, axes)
        if place is not None:
            return [(place,)]
        inner = self.moved(value, call, axes)
        if inner is not None:
            found = self.terms(*inner, depth - 1)
            picked = any(map(has_hot, found or ())) and spreads(axes, inner[1])
            return None if picked else found
        if call.name == "add" and self.reading.read(value, "add", "y") is not None:
            if not all(same_shape(call[side], value) for side in "xy"):
                return None
            one, other = (self.terms(call[side], axes, depth - 1) for side in "xy")
            return [*one, *other] if one and other and len(one) + len(other) <= _TERMS else None
        summed = self.summed(value, call, axes)
        parts = [summed] if summed is not None else self.multiplied(value, call, axes) or []
        # A sum over the experts inside would take the name of the experts outside.
        if not parts or any(EXPERT in flat(inside) for _, inside in parts) > (EXPERT in flat(axes)):
            return None
        sides = [self.terms(part, inside, depth - 1) for part, inside in parts]
        if len(sides) == 1:
            return sides[0]
        own = {*flat(axes), *({*flat(parts[0][1])} & {*flat(parts[1][1])})}
        return None if sides[0] is None or sides[1] is None else self._products(sides[0], sides[1], parts, own)

    # ---- products

    def factors(self, value: Any, axes: Axes, depth: int = _DEPTH) -> Factored | None:
        """The factors of ``value``, which has no slots; itself where it is no product."""
        call = self.reading.call(value)
        number: Factored | None = (Factor("number", value, axes),) if isinstance(value, fx.Node) else None
        if call is None or depth == 0 or rank(value) != len(axes):
            return number
        hot = self._hot(value, call, axes)
        if hot is not None:
            return hot
        inner = self.moved(value, call, axes)
        if inner is not None:
            found = self.factors(*inner, depth - 1)
            picked = found is not None and has_hot(found) and spreads(axes, inner[1])
            return number if found is None or picked or self._is_narrower(found, value) else found
        pairs = self.multiplied(value, call, axes)
        if pairs is not None and all(set(flat(pair[1])) <= set(flat(axes)) for pair in pairs):
            return self._product(pairs, depth) or number
        divided = self._divided(value, call, axes, depth) or self._kept(value, call, axes, depth)
        if divided is not None:
            return divided
        return self.picked(value, call, axes, depth) or number

    def _is_narrower(self, found: Factored, value: fx.Node) -> bool:
        """Whether ``value`` is nothing but a number in a wider dtype, in which others are made of it, too."""
        one, made = example(found[0].node) if len(found) == 1 and found[0].kind == "number" else None, example(value)
        if one is None or made is None or not one.dtype.is_floating_point:
            return False
        return not no_narrower(one.dtype, made.dtype)

    def picked(self, value: Any, call: Call, axes: Axes, depth: int) -> Factored | None:
        """A sum over the experts of a product with a one-hot of one expert for each token: the others at the ids."""
        if EXPERT in flat(axes):
            return None
        summed = self.summed(value, call, axes)
        pairs = self.multiplied(value, call, axes) if summed is None else None
        if summed is not None:
            found = self.factors(*summed, depth - 1) if EXPERT in flat(summed[1]) else None
        elif pairs is not None:
            found = self._product(pairs, depth)
        else:
            return None
        hots = [one for one in found or () if one.kind == "experts"]
        return found if len(hots) == 1 and set(flat(hots[0].axes)) <= set(flat(axes)) else None

    def _product(self, pairs: Pairs, depth: int) -> Factored | None:
        one, other = (self.factors(*pair, depth - 1) for pair in pairs)
        return None if one is None or other is None else self._together(one, other, pairs)

    def _products(
        self, left: Sequence[Factored], right: Sequence[Factored], pairs: Pairs, own: set[str]
    ) -> list[Factored] | None:
        """The products of the terms of two sums, whose common dimensions are ``own``: a sum over another one, times
        itself, is no sum of products over it.
        """
        twice = {name for one in left for other in right for name in names(one) & names(other) - own}
        if len(left) * len(right) > _TERMS or not all(name.startswith(CHOICES) for name in twice):
            return None
        found = [self._together(one, other, pairs) for one in left for other in right]
        known = [term for term in found if term is not None]
        return known if len(known) == len(found) else None

    def _together(self, one: Factored, other: Factored, pairs: Pairs) -> Factored | None:
        """The product of terms of two operands. What is picked by a one-hot has no experts: beside an operand that has,
        it is at its expert where that has this one-hot, too, and otherwise a number for all of them.
        """
        sides = [one, other]
        for place, (value, axes) in enumerate(pairs):
            if not spreads(pairs[1 - place][1], axes):
                continue
            hots = [factor for factor in sides[1 - place] if factor.kind == "experts"]
            if all(factor.kind != "experts" or any(self.same(factor, hot) for hot in hots) for factor in sides[place]):
                continue
            if SLOT in flat(axes) or not isinstance(value, fx.Node):
                return None
            sides[place] = (Factor("number", value, axes),)
        return _joined(*sides)

    def is_mask(self, factor: Factor) -> bool:
        """Whether ``factor`` is 0 or 1."""
        if factor.kind in ("experts", "places"):
            return True
        tensor = example(factor.node)
        if tensor is not None and tensor.dtype == torch.bool:
            return factor.kind in ("number", "not")
        return factor.kind in ("number", "not") and self.scattered_ones(factor) is not None

    def scattered_ones(self, factor: Factor) -> Call | None:
        """The scatter of ones over zeros that ``factor`` is."""
        call = self.reading.read(factor.node, "scatter", "dim index src")
        if call is None or not self.reading.is_zeros(call["x"]):
            return None
        return call if self._is_one(call["src"]) else None

    def same(self, one: Factor, other: Factor) -> bool:
        """Whether two factors are provably equal."""
        alike = (one.kind, one.axes) == (other.kind, other.axes)
        return alike and self.reading.same(one.node, other.node)

    def is_nothing(self, value: Any, depth: int = _DEPTH) -> bool:
        """Whether ``value`` is 0 everywhere, made so, or a sum or a product of what is."""
        call = self.reading.call(value)
        if call is None or depth == 0:
            return False
        if self.reading.is_zeros(value):
            return True
        filled = (call.name == "masked_fill" and is_zero(call["value"])) or (
            call.name == "where" and is_zero(call["y"])
        )
        parts = ("x", "y") if call.name == "mul" else ("x",) if filled or call.name in _KEEP_ZEROS else ()
        return any(self.is_nothing(call[part], depth - 1) for part in parts)

    def within(self, some: Factored, of: Factored) -> bool:
        """Whether every factor of ``some`` is one of the product ``of``."""
        return all(any(self.same(one, other) for other in of) for one in some)

    # ---- steps

    def moved(self, value: fx.Node, call: Call, axes: Axes) -> tuple[fx.Node, Axes] | None:
        """What ``value`` is a view, a transposition, a copy or a cast of, and its dimensions."""
        dims = rank(call.args.get("x"))
        if dims is None:
            return None
        if call.name in TRANSPOSES:
            order = permutation(call, dims)
            if order is None:
                return None
            before: list[Any] = [None] * dims
            for place, dim in enumerate(order):
                before[dim] = axes[place]
            return call["x"], tuple(before)
        if self.reading.read(value, "view") is not None:
            through = self._through_view(value, call["x"], axes)
            return None if through is None else (call["x"], through)
        if call.name == "expand":
            return call["x"], self.broadcast(call["x"], value, axes)
        if self.reading.read(value, "clone") is not None:
            return call["x"], axes
        return (call["x"], axes) if call.name == "cast" and self._keeps_numbers(value, call["x"]) else None

    def root(self, value: fx.Node, axes: Axes) -> tuple[fx.Node, Axes]:
        """What ``value`` is a view, a transposition, a copy or a cast of, in the end."""
        while (call := self.reading.call(value)) is not None and (inner := self.moved(value, call, axes)) is not None:
            value, axes = inner
        return value, axes

    def _keeps_numbers(self, value: fx.Node, source: Any) -> bool:
        """Whether a cast keeps masks and small integers as they are, and rounds weights to ``floor`` at most."""
        after, before = example(value), example(source)
        if after is None or before is None or after.device != before.device:
            return False
        return before.dtype == torch.bool or (
            is_float_cast(value, source, self.floor)
            if before.dtype.is_floating_point
            else after.dtype.is_floating_point or after.dtype in (torch.int32, torch.int64)
        )

    def broadcast(self, operand: Any, value: Any, axes: Axes) -> Axes:
        """The dimensions of ``operand``, which is broadcast to ``value``."""
        given, whole = example(operand), example(value)
        if given is None or whole is None:
            return ()
        ones = whole.dim() - given.dim()
        return tuple(
            axes[ones + place] if equal_sizes(size, whole.shape[ones + place]) else None
            for place, size in enumerate(given.shape)
        )

    def _through_view(self, value: fx.Node, source: fx.Node, axes: Axes) -> Axes | None:
        """The dimensions of ``source``, of which ``value`` is a reshape: joined, taken apart, or with others of 1."""
        after, before = example(value), example(source)
        if after is None or before is None:
            return None
        names = list(flat(axes))
        found: list[Any] = []
        for size in before.shape:
            if equal_sizes(size, 1):
                found.append(names.pop(0) if names and equal_sizes(self.sizes[names[0]], 1) else None)
                continue
            part: list[str] = []
            known: Any = 1
            while names and not (part and equal_sizes(known, size)):
                known = known * self.sizes[names[0]]
                part.append(names.pop(0))
            if not part or not equal_sizes(known, size):
                return None
            found.append(part[0] if len(part) == 1 else tuple(part))
        return tuple(found) if all(equal_sizes(self.sizes[name], 1) for name in names) else None

    def named(self, axes: Axes) -> Axes:
        """``axes`` with names for the dimensions that have more than one entry, and for the slots."""
        return tuple(None if axis not in (EXPERT, SLOT) and equal_sizes(self._size(axis), 1) else axis for axis in axes)

    def multiplied(self, value: fx.Node, call: Call, axes: Axes) -> list[tuple[Any, Axes]] | None:
        """The two operands of a product, a sum over one of their dimensions included, and their dimensions."""
        if self.reading.read(value, "mul and", "y") is not None:
            sides = [example(call[side]) for side in "xy"]
            if None in sides or (
                call.name == "and" and any(side.dtype != torch.bool for side in sides if side is not None)
            ):
                return None
            return [(call[side], self.broadcast(call[side], value, axes)) for side in "xy"]
        if call.name == "einsum":
            found = two_labelled(self.reading.read(value, "einsum", "arg1 arg2"))
            if found is None:
                return None
            operands, labels, result = found
            names = dict(zip(result, axes, strict=True))
            for operand, label in zip(operands, labels, strict=True):
                for place, letter in enumerate(label):
                    if letter not in names:
                        names[letter] = self._new(value, letter, example(operand).shape[place], axes)  # type: ignore[union-attr]
            return [
                (operand, tuple(names[letter] for letter in label))
                for operand, label in zip(operands, labels, strict=True)
            ]
        if self.reading.read(value, "bmm matmul", "y") is None:
            return None
        one, other = example(call["x"]), example(call["y"])
        if one is None or other is None or one.dim() != len(axes) or other.dim() != len(axes) or len(axes) < 3:
            return None
        summed = self._new(value, "k", one.shape[-1], axes)
        *lead, row, column = axes
        given = [(call["x"], (*lead, row, summed)), (call["y"], (*lead, summed, column))]
        return given if all(self.has_sizes(*pair) for pair in given) else None

    def has_sizes(self, value: Any, axes: Axes) -> bool:
        sizes = [1 if axis is None else self._size(axis) for axis in axes]
        return has_shape(value, *sizes)

    def _size(self, axis: Any) -> Any:
        size: Any = 1
        for name in flat((axis,)):
            size = size * self.sizes[name]
        return size

    def summed(self, value: fx.Node, call: Call, axes: Axes) -> tuple[fx.Node, Axes] | None:
        """What ``value`` is a sum of over one dimension, and its dimensions."""
        call_ = self.reading.read(value, "sum", "dim keepdim dtype")
        source = example(call["x"]) if call_ is not None else None
        if call_ is None or source is None:
            return None
        dim = single(call["dim"])
        if type(dim) is not int or (source.dtype.is_floating_point and not self._keeps_sums(value)):
            return None
        dim %= source.dim()
        outer = list(axes)
        if call["keepdim"]:
            outer.pop(dim)
        outer.insert(dim, self._new(call["x"], str(dim), source.shape[dim], axes))
        return call["x"], tuple(outer)

    def _keeps_sums(self, value: fx.Node) -> bool:
        tensor = example(value)
        return tensor is not None and tensor.dtype.is_floating_point

    def _new(self, node: fx.Node, label: str, size: Any, axes: Axes) -> str | None:
        """The name of a dimension that a sum removes."""
        if equal_sizes(size, 1):
            return None
        if EXPERT not in flat(axes) and equal_sizes(size, self.sizes[EXPERT]):
            return EXPERT
        name = f"{node.name}.{label}"
        self.sizes[name] = size
        return name

    def _divided(self, value: fx.Node, call: Call, axes: Axes, depth: int) -> Factored | None:
        if self.reading.is_writer(value) and len(self.reading.readers(value)) > 1:
            return None  # `gate /= total` that others read stays, and what was divided is no more
        if self.reading.read(value, "div", "y") is None or any(example(call[side]) is None for side in "xy"):
            return None
        if not same_shape(call["x"], value):
            return None
        found = self.factors(call["x"], axes, depth - 1)
        below = Factor("inverse", call["y"], self.broadcast(call["y"], value, axes))
        return None if found is None else _joined(found, (below,))

    def _kept(self, value: fx.Node, call: Call, axes: Axes, depth: int) -> Factored | None:
        """``where(mask, x, 0)``, ``masked_fill(x, mask, 0)`` and the negation of a mask."""
        if call.name == "not":
            tensor = example(value)
            if tensor is None or tensor.dtype != torch.bool:
                return None
            inner = self.factors(call["x"], axes, depth - 1) or ()
            negated = {"number": "not", "not": "number"}.get(inner[0].kind) if len(inner) == 1 else None
            return None if negated is None or not self.is_mask(inner[0]) else (replace(inner[0], kind=negated),)
        if call.name == "where" and is_zero(call["y"]) and self.reading.read(value, "where", "mask y") is not None:
            mask = self.factors(call["mask"], self.broadcast(call["mask"], value, axes), depth - 1)
        elif self.reading.read(value, "masked_fill", "mask value") is not None and is_zero(call["value"]):
            shut = self.factors(call["mask"], self.broadcast(call["mask"], value, axes), depth - 1) or ()
            negated = {"number": "not", "not": "number"}.get(shut[0].kind) if len(shut) == 1 else None
            mask = None if negated is None else (replace(shut[0], kind=negated),)
        else:
            return None
        found = self.factors(call["x"], axes, depth - 1) if same_shape(call["x"], value) else None
        if found is None or mask is None or not all(map(self.is_mask, mask)):
            return None
        covered = self.broadcast(call["mask"], value, axes)
        return self._together(found, mask, [(call["x"], axes), (call["mask"], covered)])

    # ---- one-hots

    def _hot(self, value: fx.Node, call: Call, axes: Axes) -> Factored | None:
        """A one-hot over the experts: of one id for each token, or scattered at several."""
        if EXPERT not in axes:
            return None
        if axes[-1] == EXPERT:
            ids = self._one_hot(value, call, axes, EXPERT)
            if ids is not None:
                return (Factor("experts", *ids),)
        at = axes.index(EXPERT)
        if self.reading.read(value, "scatter", "dim index src") is None or not self.reading.is_zeros(call["x"]):
            return None
        index = example(call["index"])
        if index is None or type(call["dim"]) is not int or call["dim"] % len(axes) != at or index.dim() != len(axes):
            return None
        slots = f"{CHOICES}{call['index'].name}"
        self.sizes[slots] = index.shape[at]
        inner = (*axes[:at], slots, *axes[at + 1 :])
        if not self.has_sizes(call["index"], inner):
            return None
        hot = Factor("experts", call["index"], inner)
        if self._is_one(call["src"]):
            return (hot,)
        return (hot, Factor("number", call["src"], inner)) if same_shape(call["src"], call["index"]) else None

    def _place(self, value: fx.Node, call: Call, axes: Axes) -> Factor | None:
        """A one-hot over the slots of an expert."""
        if axes[-1] != SLOT:
            return None
        found = self._one_hot(value, call, axes, SLOT)
        if found is not None:
            return Factor("places", *found, drops=call.name == "eq")
        # one_hot(places, more)[..., :capacity]
        if call.name not in ("getslice", "slice", "narrow") or not self._from_the_first(value, call):
            return None
        inner = self.reading.read(call["x"], "one_hot", "num_classes")
        return None if inner is None else Factor("places", inner["x"], axes[:-1], drops=True)

    def _from_the_first(self, value: fx.Node, call: Call) -> bool:
        """Whether a slice takes the first entries of the last dimension, and all of the others."""
        dims = rank(value)
        if dims is None or rank(call["x"]) != dims:
            return False
        if call.name == "getslice":
            index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
            *lead, last = index
            whole = all(part is Ellipsis or part == slice(None) for part in lead)
            full = len(index) == dims or Ellipsis in lead
            return whole and full and isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1)
        last_dim = type(call["dim"]) is int and call["dim"] % dims == dims - 1
        return last_dim and call["start"] in (None, 0) and call["step"] in (None, 1)

    def _one_hot(self, value: fx.Node, call: Call, axes: Axes, name: str) -> tuple[fx.Node, Axes] | None:
        """The numbers of which ``value`` is the one-hot over the last dimension, and their dimensions."""
        size = self.sizes[name]
        if self.reading.read(value, "one_hot", "num_classes") is not None:
            fits = equal_sizes(call["num_classes"], size) or has_shape(value, *example(value).shape[:-1], size)  # type: ignore[union-attr]
            return (call["x"], axes[:-1]) if fits and rank(call["x"]) == len(axes) - 1 else None
        numbers = counted_off(self.reading, value, size)
        return None if numbers is None else (numbers, (*self.broadcast(numbers, value, axes)[:-1], None))

    def _is_one(self, value: Any) -> bool:
        if type(value) in (int, float, bool):
            return bool(value == 1)
        call = self.reading.named(self.reading.strip(value), "ones", "ones_like", "full")
        return call is not None and (call.name != "full" or call["fill"] in (1, True))


def _joined(one: Sequence[Factor], other: Sequence[Factor]) -> Factored:
    """A product of two products; a mask that stands in both stands once."""
    found = list(one)
    found += [factor for factor in other if factor.kind != "experts" or factor not in found]
    return tuple(found)


def named_by_ids(term: Factored, tokens: Sequence[str], factors: Factors) -> Factored | None:
    """``term`` with one one-hot of experts and one of places, and its summed dimensions named by where the ids have
    them; None where there are others.
    """
    hots, places = ([one for one in term if one.kind == kind] for kind in ("experts", "places"))
    if not hots or not places or not all(factors.same(one, hots[0]) for one in hots):
        return None
    if not all(factors.same(one, places[0]) for one in places):
        return None
    of_ids = flat(hots[0].axes)
    others = names(term) - {*tokens, EXPERT, SLOT}
    if not others <= {*of_ids} or not {*tokens} <= {*of_ids}:
        return None
    called = {name: name if name.startswith(CHOICES) else f"k{of_ids.index(name)}" for name in others}
    factors.sizes |= {called[name]: factors.sizes[name] for name in others}
    rest = [one for one in term if one.kind not in ("experts", "places")]
    return tuple(replace(one, axes=_renamed(one.axes, called)) for one in (hots[0], places[0], *rest))


def _renamed(axes: Axes, called: dict[str, str]) -> Axes:
    return tuple(_renamed(axis, called) if isinstance(axis, tuple) else called.get(axis, axis) for axis in axes)
