"""Places of tokens among the slots of their experts, and the proof that no slot has two tokens.

A place is a rank: how many tokens before this one chose the same expert, a cumsum of the one-hot of the experts less 1.
Ranks over all tokens that share the slots are distinct. A later choice of the same tokens begins behind the earlier
ones: all of them, or those that were kept, are added to its ranks. A pair is kept where its place is less than the
capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import fx

from compile_passes.equal import holds
from compile_passes.match import Refusal
from compile_passes.memory import is_deterministic
from compile_passes.patterns.factors import (
    CHOICES,
    EXPERT,
    SLOT,
    Axes,
    Factor,
    Factored,
    Factors,
    flat,
    has_hot,
    names,
    one_of,
)
from compile_passes.vocabulary import Call, equal_sizes, example, rank, same_shape, single

_DEPTH = 24
CURE = (
    "Take the places from a cumsum of the one-hot of the experts, drop with (places < capacity), and let a second "
    "choice begin behind the first ones; or call moe_ops.fused_experts with the id -1 for a pair that is dropped."
)
# What ``left`` is less than: the other side, or one more, as a comparison or its negation says.
_LESS = {("lt", "number"): 0, ("le", "number"): 1, ("ge", "not"): 0, ("gt", "not"): 1}
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True)
class _Rank:
    """How many elements of ``mask`` come before one, or up to it, over the dimensions ``over``.

    Attributes:
        first: what the first one has, 0 or 1.
        behind: masks whose elements all come before.
        only: zero outside of a one-hot of the experts.
    """

    mask: Factored
    over: tuple[str, ...]
    first: int
    behind: tuple[Factored, ...] = ()
    only: bool = False


def unproved(node: fx.Node, reason: str) -> Refusal:
    """The refusal of a block with a capacity at ``node``."""
    return Refusal(node, reason, CURE)


def dropped_by_place(
    factors: Factors, tokens: Sequence[str], shared: set[str], terms: Sequence[Factored]
) -> list[bool] | Refusal:
    """For every term, whether it drops a pair by a place outside of the slots, and by nothing else; a refusal where two
    pairs may be in one slot, or one in none.

    Args:
        tokens: the names of all dimensions of tokens.
        shared: of those whose tokens share the slots.
        terms: a product of masks for every choice of experts.
    """
    return _Places(factors).dropped(tokens, shared, terms)


class _Places:
    def __init__(self, factors: Factors) -> None:
        self.factors, self.reading = factors, factors.reading

    def dropped(self, tokens: Sequence[str], shared: set[str], terms: Sequence[Factored]) -> list[bool] | Refusal:
        ranks: list[tuple[Factored, _Rank]] = []
        for term in terms:
            place = one_of(term, "places")
            found = self._rank(place.node, place.axes, term)
            if found is None or found.first != 0:
                return unproved(
                    place.node, "The places of the tokens cannot be proved to count those of one expert, from 0."
                )
            counted = {*found.over} | {name for name in names(found.mask) if name.startswith(CHOICES)}
            chosen = {name for name in flat(one_of(term, "experts").axes) if name not in tokens}
            if counted != shared | chosen:
                return unproved(place.node, "The places do not count over all tokens that share the slots.")
            ranks.append((term, found))
        ranks.sort(key=lambda pair: len(pair[1].behind))
        for number, (term, found) in enumerate(ranks):
            place = one_of(term, "places")
            if len(found.behind) != number or not all(
                any(self._counts(mask, *earlier) for mask in found.behind) for earlier in ranks[:number]
            ):
                return unproved(
                    place.node,
                    "Two choices of tokens may be in one slot: their places do not begin behind the earlier ones.",
                )
            if not place.drops and not self._fits(term, found):
                return self._out_of_slots(term, place)
        fits = {id(term): self._fits(term, found) for term, found in ranks}
        return [not fits[id(term)] for term in terms]

    def _out_of_slots(self, term: Factored, place: Factor) -> Refusal:
        drawn = [one for one in term if self._is_drawn(one)]
        if drawn:
            return Refusal(
                drawn[0].node, "Which tokens an expert keeps is drawn at random (random token selection).",
                "Keep the first tokens of every expert, (places < capacity), or those with the largest gates.",
            )  # fmt: skip
        return unproved(place.node, "Places may exceed the capacity, as far as can be proved.")

    def _is_drawn(self, factor: Factor) -> bool:
        """Whether random numbers say where ``factor`` is 1, as far as it is told from the router's scores."""
        call = self.factors.scattered_ones(factor)
        stack: list[Any] = [] if call is None else [call["index"]]
        for _ in range(_DEPTH):
            value = stack.pop() if stack else None
            call = self.reading.call(value)
            if call is None or call.name in ("softmax", "sigmoid", "one_hot"):
                continue
            if not is_deterministic(value):  # type: ignore[arg-type]
                return True
            stack.extend(call.args.values())
        return False

    def _counts(self, mask: Factored, term: Factored, found: _Rank) -> bool:
        """Whether as many elements of ``mask`` are set as the pairs of ``term`` have places."""
        more = [one for one in mask if not any(self.factors.same(one, known) for known in found.mask)]
        return self.factors.within(found.mask, mask) and all(
            self.factors.within((one,), term) and self._is_fit(one, term, found) for one in more
        )

    def _fits(self, term: Factored, found: _Rank) -> bool:
        """Whether every place of ``term`` is one of the slots."""
        everyone = prod(self.factors.sizes[name] for name in found.over)
        if not found.behind and equal_sizes(self.factors.sizes[SLOT], everyone):
            return True
        return any(self._is_fit(one, term, found) or self._limits(one, found) for one in term)

    def _limits(self, factor: Factor, found: _Rank) -> bool:
        """Whether ``factor`` keeps as many tokens for every expert as it has slots: those of a topk over the tokens."""
        call, among = self.factors.scattered_ones(factor), any(self.factors.same(factor, one) for one in found.mask)
        chosen = None if call is None else self.reading.read(call["index"], "item", "index")
        best = None if chosen is None else self.reading.read(chosen["x"], "topk", "k dim largest")
        if call is None or chosen is None or best is None or chosen["index"] != 1 or found.behind or not among:
            return False
        dims = {dim % len(factor.axes) for dim in (call["dim"], best["dim"]) if type(dim) is int}
        one = len(dims) == 1 and flat((factor.axes[dims.pop()],)) == found.over
        return one and self._at_most(best["k"], self.factors.sizes[SLOT]) and not self._is_drawn(factor)

    def _is_fit(self, factor: Factor, term: Factored, found: _Rank) -> bool:
        """Whether ``factor`` says that the place is less than the capacity."""
        call = self.reading.call(factor.node)
        if call is None or factor.kind not in ("number", "not") or call.name not in _SWAPPED:
            return False
        if self.reading.read(factor.node, call.name, "y") is None:
            return False
        name, left, right = call.name, call["x"], call["y"]
        if example(left) is None:
            name, left, right = _SWAPPED[name], right, left
        up_to = _LESS.get((name, factor.kind))
        if up_to is None or not same_shape(left, factor.node):
            return False
        other = self._rank(left, factor.axes, term)
        if other is None or other.over != found.over or len(other.behind) != len(found.behind):
            return False
        pairs = [(other.mask, found.mask), *zip(other.behind, found.behind, strict=True)]
        if not all(self.factors.within(*pair) and self.factors.within(*pair[::-1]) for pair in pairs):
            return False
        limit = right if not isinstance(right, float) else int(right) if right.is_integer() else None
        if limit is None or example(limit) is not None:
            return False
        return self._at_most(limit, self.factors.sizes[SLOT] + other.first - up_to)

    def _at_most(self, limit: Any, most: Any) -> bool:
        known = type(limit) is int and type(most) is int
        return bool(limit <= most) if known else equal_sizes(limit, most)

    # ---- ranks

    def _rank(self, value: Any, axes: Axes, term: Factored, depth: int = _DEPTH) -> _Rank | None:
        """What ``value`` counts, wherever ``term`` is not zero."""
        call, made = self.reading.call(value), example(value)
        if call is None or made is None or depth == 0 or made.dim() != len(axes) or not holds(made.dtype, None):
            return None
        inner = (call["x"], axes) if call.name == "cast" else self.factors.moved(value, call, axes)
        if inner is not None:
            return self._rank(inner[0], inner[1], term, depth - 1)
        if call.name == "cumsum":
            return self._counted(value, call, axes, term)
        if call.name in ("add", "sub"):
            return self._shifted(value, call, axes, term, depth)
        if self.reading.read(value, "mul", "y") is not None:
            for one, other in (("x", "y"), ("y", "x")):
                own = self.factors.broadcast(call[other], value, axes)
                mask = self._mask(call[other], own, term)
                if mask is not None and same_shape(call[one], value):
                    found = self._rank(call[one], axes, term, depth - 1)
                    only = _is_of_one(mask, own)
                    return None if found is None else replace(found, only=found.only or only)
            return None
        if self.reading.read(value, "gather", "dim index") is not None:
            return self._at_ids(value, call, axes, term, depth)
        if call.name in ("getslice", "slice", "narrow"):
            return self._before(value, call, axes, term)
        return self._of_its_expert(value, call, axes, term, depth)

    def _mask(self, value: Any, axes: Axes, term: Factored) -> Factored | None:
        """The factors of ``value``, where it is 1 wherever ``term`` is not zero."""
        found = self.factors.factors(value, axes) if isinstance(value, fx.Node) else None
        fits = found is not None and all(map(self.factors.is_mask, found)) and self.factors.within(found, term)
        return found if fits else None

    def _counted(self, value: fx.Node, call: Call, axes: Axes, term: Factored) -> _Rank | None:
        """A cumsum of a mask: 1 at its first element."""
        understood = self.reading.read(value, "cumsum", "dim dtype") is not None
        mask = self._mask(call["x"], axes, term) if understood and type(call["dim"]) is int else None
        if mask is None or not _is_of_one(mask, axes):
            return None
        return _Rank(mask, flat((axes[call["dim"] % len(axes)],)), 1)

    def _before(self, value: fx.Node, call: Call, axes: Axes, term: Factored) -> _Rank | None:
        """``F.pad(mask, (0, 0, 1, 0)).cumsum(-2)[..., :-1, :]``: 0 at the first element."""
        counted = self.reading.read(call["x"], "cumsum", "dim dtype")
        padded = None if counted is None else self.reading.named(counted["x"], "pad")
        if counted is None or padded is None or type(counted["dim"]) is not int or not same_shape(padded["x"], value):
            return None
        dim, widths = counted["dim"] % len(axes), padded["pad"]
        wanted = [0] * 2 * (len(axes) - dim - 1) + [1, 0]
        zeros = padded["mode"] in (None, "constant") and padded["value"] in (None, 0)
        if not isinstance(widths, list | tuple) or list(widths) != wanted or not zeros:
            return None
        index = call["index"] if call.name == "getslice" and isinstance(call["index"], tuple) else ()
        kept = [part for part in index if part is not Ellipsis]
        at = dim if len(kept) == len(index) else dim - len(axes) + len(kept)
        ends = 0 <= at < len(kept) and kept[at] == slice(None, -1)
        if not ends or any(part != slice(None) for place, part in enumerate(kept) if place != at):
            return None
        mask = self._mask(padded["x"], axes, term)
        hot = mask is not None and _is_of_one(mask, axes)
        return _Rank(mask, flat((axes[dim],)), 0) if mask is not None and hot else None

    def _shifted(self, value: fx.Node, call: Call, axes: Axes, term: Factored, depth: int) -> _Rank | None:
        """A rank less 1, less the mask itself, or behind all elements of another mask."""
        if self.reading.read(value, call.name, "y") is None:
            return None
        x, y = call["x"], call["y"]
        if type(y) in (int, float):
            found = self._rank(x, axes, term, depth - 1)
            less = y == (1 if call.name == "sub" else -1)
            return replace(found, first=0, only=False) if found is not None and less and found.first == 1 else None
        sides = [(x, y)] if call.name == "sub" else [(x, y), (y, x)]
        for one, other in sides:
            found = self._rank(one, axes, term, depth - 1) if same_shape(one, value) else None
            if found is None:
                continue
            own = self.factors.broadcast(other, value, axes)
            if call.name == "sub":
                fits = found.first == 1 and same_shape(other, value) and self._mask(other, own, term) is not None
                return replace(found, first=0, only=False) if fits else None
            counts = self._count(other, own, found.over)
            return None if counts is None else replace(found, behind=(*found.behind, *counts), only=False)
        return None

    def _count(self, value: Any, axes: Axes, over: tuple[str, ...]) -> list[Factored] | None:
        """The masks whose elements ``value`` counts, all together, over the one dimension ``over``."""
        while (call := self.reading.call(value)) is not None:
            inner = self.factors.moved(value, call, axes) if call.name != "sum" else None
            if inner is None:
                break
            value, axes = inner
        if (both := self.reading.read(value, "add", "y")) is not None:
            sides = [self._count(both[side], axes, over) if same_shape(both[side], value) else None for side in "xy"]
            return None if sides[0] is None or sides[1] is None else sides[0] + sides[1]
        call = self.reading.read(value, "sum", "dim keepdim dtype")
        made = example(value)
        if call is None or made is None or len(over) > 1 or not holds(made.dtype, None):
            return None
        dim, dims = single(call["dim"]), rank(call["x"])
        if type(dim) is not int or dims is None or rank(value) != len(axes):
            return None
        source = list(axes)
        if call["keepdim"]:
            source.pop(dim % dims)
        source.insert(dim % dims, over[0] if over else None)
        mask = self.factors.factors(call["x"], tuple(source)) if len(source) == dims else None
        if mask is None or not _is_of_one(mask, tuple(source)):
            return None
        return [mask] if all(map(self.factors.is_mask, mask)) else None

    def _at_ids(self, value: fx.Node, call: Call, axes: Axes, term: Factored, depth: int) -> _Rank | None:
        """``ranks.gather(1, ids)``: the rank at the token's expert."""
        hot = one_of(term, "experts")
        if type(call["dim"]) is not int or EXPERT in flat(axes):
            return None
        index, own = self.factors.root(call["index"], axes), self.factors.root(hot.node, hot.axes)
        if flat(index[1]) != flat(own[1]) or not self.reading.same(index[0], own[0]):
            return None
        dim = call["dim"] % len(axes)
        source = (*axes[:dim], EXPERT, *axes[dim + 1 :])
        if not self.factors.has_sizes(call["x"], source):
            return None
        found = self._rank(call["x"], source, term, depth - 1)
        return None if found is None else replace(found, only=False)

    def _of_its_expert(self, value: fx.Node, call: Call, axes: Axes, term: Factored, depth: int) -> _Rank | None:
        """The sum over the experts of ranks that are zero but for the token's one expert."""
        if EXPERT in flat(axes):
            return None
        summed = self.factors.summed(value, call, axes)
        if summed is not None and EXPERT in flat(summed[1]):
            found = self._rank(*summed, term, depth - 1)
        elif call.name == "einsum":
            pairs = self.factors.multiplied(value, call, axes) or []
            found = None
            for one, other in (pairs, pairs[::-1]) if len(pairs) == 2 else ():
                mask = self._mask(*other, term)
                inner = None if mask is None else self._rank(*one, term, depth - 1)
                if mask is not None and inner is not None:
                    found = replace(inner, only=inner.only or _is_of_one(mask, other[1]))
        else:
            return None
        one_each = not any(name.startswith(CHOICES) for name in flat(one_of(term, "experts").axes))
        return replace(found, only=False) if found is not None and found.only and one_each else None


def _is_of_one(mask: Factored, axes: Axes) -> bool:
    """Whether a mask is 0 but for one expert of a token: what is picked by a one-hot is a number for all of them."""
    return has_hot(mask) and EXPERT in flat(axes)
