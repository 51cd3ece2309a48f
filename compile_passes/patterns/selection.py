"""Dense scores to a selection: from weights [T, E] of all experts to K ids and K weights for every token.

A value ``[..., E]`` is read as a number for each of K ids and one constant everywhere else: what a scatter writes over
a fill, a one-hot, a score times a mask. Operations on such a value are followed on its K numbers alone:
``full(-inf).scatter(1, ids, logits).softmax(-1)`` is ``logits.softmax(-1)`` at the ids, and 0 everywhere else. In the
end everything else has to be 0 by this construction, whatever the data: a threshold may let more than K pass where
scores are equal, and is no selection.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast, no_narrower
from compile_passes.match import Made, Refusal, Spread, Value, everywhere, in_dtype
from compile_passes.patterns.contraction import TRANSPOSES, alike, axis_of, moves_one, permutation, spread_of
from compile_passes.patterns.ids import are_distinct, are_in_range, topk_over_experts
from compile_passes.patterns.rows import counted_off, entry_of
from compile_passes.patterns.signs import is_not_negative
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, same_shape, single, two_labelled

_ATEN = torch.ops.aten
_COMPARES: dict[str, Callable[[float, float], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
}  # fmt: skip
# How far down scores are looked into.
_DEPTH = 16
# The largest number that weights no larger than 1 are scaled by in any dtype, and stay finite.
_SCALE = 2.0**15
_JOINED = ("index", "values")  # of the terms of a sum
_CURE = (
    "Make them zero but for the ids of a topk: torch.zeros_like(scores).scatter(-1, topk_ids, topk_weights), or give "
    "ids and weights to moe_ops.fused_experts."
)


@dataclass(frozen=True)
class Selection:
    """The experts of every token: ``ids`` [..., K] in row-major order of tokens, ``weights`` [T, K]."""

    ids: Value
    weights: Value
    top_k: int


@dataclass(frozen=True)
class _Sparse:
    """A value for all experts of every token: ``values`` [T, K], or one number, at ``ids``; else ``elsewhere``.

    Attributes:
        index: the ids as [T, K].
        once: an id that a token has twice counts once.
        order: of tokens and experts.
        terms: of a sum, whose ids are those of all terms: an id that two of them have counts twice.
        sum: its values; where they are others now, the terms are what it was of.
    """

    ids: Value
    index: Value
    top_k: int
    values: Value | float
    elsewhere: float
    once: bool
    order: Spread
    terms: tuple[_Sparse, ...] = ()
    sum: Value | None = None


def selected_of(
    reading: Reading, scores: fx.Node, experts: Any, order: Spread, floor: torch.dtype
) -> Selection | Refusal:  # fmt: skip
    """The K ids and weights of every token that ``scores`` come to.

    Args:
        order: the order of tokens and experts that they have to have, and so for how many tokens.
        floor: the narrowest dtype that scores may be rounded to.
    """
    found = _Reader(reading, experts, floor).sparse(scores)
    if found is None or found.elsewhere != 0 or not alike(found.order, order):
        what = _origin(reading, scores)
        return Refusal(
            scores, f"A token's weights for the {experts} experts cannot be proved to be zero for all but top_k of "
            f"them (they come from {what}).", _CURE,
        )  # fmt: skip
    problem = next(filter(None, (_unsafe(reading, term, experts) for term in found.terms or (found,))), None)
    if problem is not None:
        return problem
    held = example(scores)
    if held is None or not held.dtype.is_floating_point:
        return integer_weights(scores)
    weights = found.values
    if not isinstance(weights, fx.Node | Made):
        weights = everywhere(found.ids, float(weights), held.dtype)
    return Selection(found.ids, weights, found.top_k)


def chosen_by(reading: Reading, mask: fx.Node, floor: torch.dtype, at: int) -> tuple[fx.Node, int] | None:
    """(ids [..., K], K) of a mask of tokens and experts, these its dimension ``at``, that is set for K experts of every
    token, and for no others.
    """
    found = _of_mask(reading, mask, floor, at)
    return None if found is None or not isinstance(found.ids, fx.Node) else (found.ids, found.top_k)


def weights_listed_by(reading: Reading, mask: fx.Node, scores: fx.Node, floor: torch.dtype) -> Value | None:
    """What ``scores`` [experts, tokens] hold where a mask as of `chosen_by` is set, [T, K] in the order of its ids."""
    found, shape = _of_mask(reading, mask, floor, 0), example(mask)
    if found is None or shape is None:
        return None
    reader = _Reader(reading, shape.shape[0], floor)
    given = reader.sparse(scores)
    if given is None or given.terms or not isinstance(given.values, fx.Node | Made):
        return reader._at_ids(found, reading.strip(scores))
    alone = isinstance(given.ids, fx.Node) and reading.same(given.ids, found.ids) and alike(given.order, found.order)
    return given.values if alone else None


def _of_mask(reading: Reading, mask: fx.Node, floor: torch.dtype, at: int) -> _Sparse | None:
    """The ids of a mask of tokens and experts, the experts its dimension ``at``: a bit is set once for each of them."""
    shape = example(mask)
    if shape is None or shape.dim() != 2:
        return None
    experts, order = shape.shape[at], spread_of(shape.shape, at)
    found = _Reader(reading, experts, floor).sparse(mask)
    if found is None or found.terms or (found.values, found.elsewhere) != (1, 0) or not alike(found.order, order):
        return None
    return found if _unsafe(reading, replace(found, once=True), experts) is None else None


def integer_weights(weights: fx.Node) -> Refusal:
    """The refusal of routing weights that are integers, or masks."""
    return Refusal(weights, "The routing weights are integers.", "Cast them to the dtype of the tokens.")


def without_zeros(reading: Reading, chosen: Selection, tokens: Any, floor: torch.dtype) -> Selection:
    """``chosen`` without the pairs whose weights are zero by the way they are made, if there are such pairs."""
    if not isinstance(chosen.ids, fx.Node) or not isinstance(chosen.weights, fx.Node):
        return chosen
    found = selected_of(reading, reading.uncast(chosen.weights, floor), chosen.top_k, Spread(tokens, 1), floor)
    if isinstance(found, Refusal) or found.top_k >= chosen.top_k:
        return chosen
    slots = Made(_ATEN.reshape.default, (found.ids, [-1, found.top_k]))
    slots = Made(_ATEN.to.dtype, (slots, torch.int64))
    return replace(found, ids=Made(_ATEN.gather.default, (_rows(chosen.ids, chosen.top_k), -1, slots)))


def beside_zeros(
    reading: Reading, chosen: Selection, experts: Any, floor: torch.dtype, of: Iterable[fx.Node]
) -> Selection:
    """``chosen``, whose weights are multiplied by masks of the experts: an infinite one makes NaN of all experts' sums,
    as its products with the zeros are.

    Args:
        of: what the weights are, or are columns of.
    """
    if all(map(_Reader(reading, experts, floor).is_finite, of)):
        return chosen
    return replace(chosen, weights=_or_nan(_rows(chosen.weights, chosen.top_k)))


def _unsafe(reading: Reading, term: _Sparse, experts: Any) -> Refusal | None:
    """Why the ids of one scatter or one-hot may not be those of the pairs."""
    ids: Any = term.ids
    if not are_in_range(reading, ids, experts):
        return Refusal(ids, "The expert ids cannot be proved to be in [0, number of experts).", _CURE)
    if term.once and term.top_k > 1 and not are_distinct(reading, ids, experts, term.top_k):
        return Refusal(
            ids, "A token may have an expert id twice, as far as can be proved, and its weight would count once.",
            "Take the ids from one topk over the experts.",
        )  # fmt: skip
    return None


def _origin(reading: Reading, value: Any) -> str:
    """What made ``value``, whatever its shape and dtype."""
    while (
        call := reading.named(value, "view", "clone", "cast", "transpose", "mt", "t", "permute", "item")
    ) is not None:
        value = call["x"]
    call = reading.call(value)
    return "a graph input" if call is None else call.name


class _Reader:
    def __init__(self, reading: Reading, experts: Any, floor: torch.dtype) -> None:
        self.reading, self.experts, self.floor = reading, experts, floor
        self._known: dict[fx.Node, _Sparse | None] = {}

    def sparse(self, value: Any, depth: int = _DEPTH) -> _Sparse | None:
        """``value`` [..., E], or the experts elsewhere among the tokens, as K numbers for every token."""
        call = self.reading.call(value)
        step = None if call is None or depth == 0 else _STEPS.get(call.name)
        if call is None or step is None:
            return None
        if value not in self._known:
            self._known[value] = step(self, value, call, depth - 1)
        return self._known[value]

    # ---- where sparsity comes from

    def _scatter(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        understood = self.reading.read(value, "scatter scatter_add", "dim index src") is not None
        start, index, shape = self._constant(call["x"]), example(call["index"]), example(value)
        if start is None and call.name == "scatter":
            return self._slot_by_slot(value)
        if not understood or start is None or index is None or shape is None or type(index.shape[-1]) is not int:
            return None
        top_k, src = index.shape[-1], call["src"]
        if not self._over_experts(value, call["dim"]) or not has_shape(call["index"], *shape.shape[:-1], top_k):
            return None
        number = self._constant(src)
        values: Value | float | None = None if number is None else _as_stored(number, shape.dtype)
        if values is None:
            values = _rows(src, top_k) if same_shape(src, call["index"]) else None
        if values is None or (call.name == "scatter_add" and start != 0):
            return None
        return self._at(call["index"], top_k, values, start, call.name == "scatter")

    def _slot_by_slot(self, value: fx.Node) -> _Sparse | None:
        """A scatter for every slot: of ``ids[..., k:k + 1]``, over what the last one wrote."""
        columns: list[Any] = []
        start, last, shape = None, value, example(value)
        while start is None and (call := self.reading.read(last, "scatter", "dim index src")) is not None:
            if not self._over_experts(last, call["dim"]) or not same_shape(call["src"], call["index"]):
                return None
            columns.insert(0, (entry_of(self.reading, call["index"]), call["src"]))
            start, last = self._constant(call["x"]), call["x"]
        found = [entry for entry, _ in columns if entry is not None]
        ids = found[0][0] if found else None
        held = example(ids)
        if ids is None or start is None or shape is None or held is None or len(found) < len(columns):
            return None
        if not has_shape(ids, *shape.shape[:-1], len(columns)) or any(
            not self.reading.same(source, ids) or (dim, number) != (held.dim() - 1, slot)
            for slot, (source, dim, number) in enumerate(found)
        ):
            return None
        values = Made(_ATEN.cat.default, ([_rows(src, 1) for _, src in columns], -1))
        return self._at(ids, len(columns), values, start, True)

    def _at(self, ids: fx.Node, top_k: int, values: Value | float, elsewhere: float, once: bool) -> _Sparse | None:
        if top_k == 0:
            return None  # how many tokens there are cannot be told from no ids
        index, tensor = _rows(ids, top_k), example(ids)
        if tensor is not None and tensor.dtype != torch.int64:
            index = Made(_ATEN.to.dtype, (index, torch.int64))
        tokens = 0 if tensor is None else tensor.numel() // top_k
        return _Sparse(ids, index, top_k, values, elsewhere, once, Spread(tokens, 1))

    def _one_hot(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        """One expert for each: a one-hot of ids ``[...]``."""
        ids = self._compared(value)
        return None if ids is None else self._at(ids, 1, 1.0, 0.0, False)

    def _compared(self, value: Any) -> fx.Node | None:
        """The ids that ``value`` [..., E] is a one-hot of."""
        call, shape = self.reading.read(value, "one_hot eq", "num_classes y"), example(value)
        if call is None or shape is None or not equal_sizes(shape.shape[-1], self.experts):
            return None
        if call.name == "one_hot":
            return call["x"] if equal_sizes(call["num_classes"], self.experts) else None
        ids = counted_off(self.reading, value, self.experts)
        return self.reading.strip(ids) if ids is not None and has_shape(ids, *shape.shape[:-1], 1) else None

    def _by_slot(self, value: Any, depth: int) -> tuple[fx.Node, int, Value | float] | None:
        """(ids, K, values) of ``value`` [..., K, E] that is a one-hot for every slot, times a weight for every slot."""
        while (call := self.reading.read(value, "cast clone")) is not None:
            before = example(call["x"])
            if before is None or (before.dtype.is_floating_point and not self._is_float_or_mask(value)):
                return None
            value = call["x"]
        call, shape = self.reading.read(value, "mul", "y"), example(value)
        if depth == 0 or shape is None or shape.dim() < 3 or type(shape.shape[-2]) is not int:
            return None
        if call is None:
            ids = self._compared(value)
            return None if ids is None else (ids, shape.shape[-2], 1.0)
        for one, other in (("x", "y"), ("y", "x")):
            hot = self._by_slot(call[one], depth - 1) if same_shape(call[one], value) else None
            if hot is not None and hot[2] == 1 and has_shape(call[other], *shape.shape[:-1], 1):
                given = self._beside_zeros(_rows(self._uncast(call[other]), hot[1]), call[other])
                return (hot[0], hot[1], _as_float(given, call[other], shape.dtype))
        return None

    def _sum(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        """A sum, or a maximum, over the slots of one-hots."""
        if call.name == "item":
            inner = self.reading.read(call["x"], "max", "dim keepdim") if call["index"] == 0 else None
        else:
            inner = self.reading.read(value, "sum any amax", "dim keepdim")
        shape = example(inner["x"]) if inner is not None else None
        if inner is None or shape is None or inner["keepdim"] or not self._is_float_or_mask(value):
            return None
        dim = single(inner["dim"])
        found = self._by_slot(inner["x"], depth) if dim in (-2, shape.dim() - 2) else None
        if found is None or (inner.name != "sum" and found[2] != 1):
            return None
        ids, top_k, values = found
        return self._at(ids, top_k, values, 0.0, inner.name != "sum")

    def _contracted(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        """Weights and one-hots in one product: ``einsum("tk,tke->te", w, hot)``, ``w.unsqueeze(1) @ hot``."""
        if call.name == "einsum":
            found = two_labelled(self.reading.read(value, "einsum", "arg1 arg2"))
            if found is None:
                return None
            (one, other), (left, right), result = found
            if len(left) > len(right):
                one, other, left, right = other, one, right, left
            fits = right[:-1] == left and result == right[:-2] + right[-1]
        else:
            one, other, shape = call["x"], call["y"], example(call["x"])
            fits = shape is not None and shape.dim() == 3 and equal_sizes(shape.shape[1], 1)
        hot = self._by_slot(other, depth) if fits else None
        if hot is None or hot[2] != 1:
            return None
        weights = self._beside_zeros(_rows(self._uncast(one), hot[1]), one)
        return self._at(hot[0], hot[1], weights, 0.0, False)

    def _beside_zeros(self, values: Value, of: Any) -> Value:
        return values if self.is_finite(of) else _or_nan(values)

    def is_finite(self, weights: Any) -> bool:
        """Whether ``weights``, perhaps scaled by a number, are finite, or NaN, whatever the data."""
        root = self._uncast(weights)
        call = self.reading.read(root, "mul", "y")
        for one, other in (("x", "y"), ("y", "x")) if call is not None else ():
            if type(call[other]) in (int, float) and abs(call[other]) <= _SCALE:  # type: ignore[index]
                root = call[one]  # type: ignore[index]
        return self._is_bounded(root)

    # ---- what is done to it

    def _same(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        return self.sparse(call["x"], depth)

    def _cast(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        found = self.sparse(call["x"], depth)
        after = example(value)
        if found is None or after is None or not isinstance(found.values, float):
            return found if is_float_cast(value, call["x"], self.floor) else None
        exact = {found.values, found.elsewhere} <= {0.0, 1.0}
        return replace(found, once=found.once or after.dtype == torch.bool) if exact else None

    def _transpose(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        """Experts moved to another place among the tokens, which stay in their order."""
        found, shape = self.sparse(call["x"], depth), example(call["x"])
        at = None if found is None or shape is None else axis_of((*shape.shape, 1), found.order, self.experts)
        dims = None if shape is None else moves_one(call, shape.dim(), at)
        if found is None or shape is None or at is None or dims is None:
            return None
        order = spread_of([shape.shape[dim] for dim in dims], dims.index(at))
        return replace(found, order=order)

    def _not(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        found, mask = self.sparse(call["x"], depth), example(call["x"])
        if found is None or mask is None or mask.dtype != torch.bool or not isinstance(found.values, float):
            return None
        return replace(found, values=1 - found.values, elsewhere=1 - found.elsewhere, once=True)

    def _compare(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        """Ids compared with all experts, or a mask of numbers compared with one."""
        hot = self._one_hot(value, call, depth) if call.name == "eq" else None
        if hot is not None or type(call["y"]) not in (int, float, bool):
            return hot
        found = self.sparse(call["x"], depth)
        if found is None or not isinstance(found.values, float):
            return None
        met = [float(_COMPARES[call.name](number, call["y"])) for number in (found.values, found.elsewhere)]
        return replace(found, values=met[0], elsewhere=met[1], once=True)

    def _mul(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        for one, other in (("x", "y"), ("y", "x")):
            found = self.sparse(call[one], depth)
            if found is None or not self._is_float_or_mask(value):
                continue
            factor = self._factor(found, call[other], value, depth)
            held = example(value)
            if held is None or (not held.dtype.is_floating_point and _may_wrap(found.values, factor, call[other])):
                return None
            if factor is not None and found.elsewhere == 0:
                factor = _as_float(factor, call[other], held.dtype)
                twice = self.sparse(call[other], depth) is not None
                if twice and found.terms:
                    return None
                return replace(found, values=_times(found.values, factor, held.dtype), once=found.once or twice)
        return None

    def _add(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        """``weight_1 * one_hot(ids_1) + weight_2 * one_hot(ids_2)``: the ids and weights of both."""
        if self.reading.read(value, "add", "y") is None or not self._no_narrower(value):
            return None
        for one, other in (("x", "y"), ("y", "x")):
            if type(call[one]) in (int, float) and call[one] == 0:  # of Python's sum
                return self.sparse(call[other], depth)
        masked = self._masked_sum(value, call, depth)
        if masked is not None:
            return masked
        sides = [self.sparse(self._uncast(call[side]), depth) for side in ("x", "y")]
        for side in sides:
            if side is not None and side.terms and (side.values is not side.sum or side.order != side.terms[0].order):
                return None
        terms = [term for side in sides if side is not None for term in (side.terms or (side,))]
        same = all(same_shape(call[side], value) for side in ("x", "y"))
        if None in sides or not same or any(not alike(term.order, terms[0].order) for term in terms):
            return None
        if any(term.elsewhere != 0 or isinstance(term.values, float) for term in terms):
            return None
        index, values = (Made(_ATEN.cat.default, ([getattr(term, name) for term in terms], -1)) for name in _JOINED)
        top_k = sum(term.top_k for term in terms)
        return _Sparse(index, index, top_k, values, 0.0, False, terms[0].order, tuple(terms), values)

    def _masked_sum(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        """Logits plus 0 at the ids of their own topk and -inf elsewhere: where NaN or infinity are among the others,
        they are among the chosen ones, too, and make all of a token's weights NaN.
        """
        if not all(same_shape(call[side], value) for side in ("x", "y")):
            return None
        for one, other in (("x", "y"), ("y", "x")):
            found = self.sparse(call[one], depth)
            if found is None or found.terms or found.elsewhere != -inf or not isinstance(found.values, int | float):
                continue
            chosen = topk_over_experts(self.reading, found.ids, self.experts)
            if found.values != 0 or chosen is None or not chosen.largest:
                continue
            values = self._at_ids(found, call[other])
            if values is not None and self.reading.same(self._uncast(chosen.scores), self._uncast(call[other])):
                return replace(found, values=values)
        return None

    def _factor(self, found: _Sparse, other: Any, value: fx.Node, depth: int) -> Value | float | None:
        """What ``other`` multiplies the K numbers by; it is finite wherever the product has to be 0."""
        if type(other) in (int, float):
            return float(other) if isfinite(other) else None
        if same_shape(other, value):
            inner = self.sparse(other, depth)
            if inner is not None:
                agree = self.reading.same(inner.ids, found.ids) and alike(inner.order, found.order)
                return inner.values if agree and abs(inner.elsewhere) < inf else None
            zero = self._is_bounded(other) and self._is_nan_in_chosen(found, other)
            return self._at_ids(found, other) if zero else None
        factor = self._per_token(found, other, value)
        if factor is not None and not self._is_bounded(other):  # infinite: the others' products with 0 are NaN
            factor = Made(_ATEN.add.Tensor, (factor, Made(_ATEN.mul.Scalar, (factor, 0.0))))
        return factor if factor is None or found.top_k == 1 else Made(_ATEN.expand.default, (factor, [-1, found.top_k]))

    def _div(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        found = self.sparse(call["x"], depth) if self.reading.read(value, "div", "y") is not None else None
        if found is None or found.elsewhere != 0 or not isinstance(found.values, fx.Node | Made):
            return None
        held = example(value)
        given = found.values if held is None else in_dtype(found.values, held.dtype)
        found = replace(found, values=given)  # of which the sum is, too: rounded once on the way back
        if type(call["y"]) in (int, float):
            made = Made(_ATEN.div.Scalar, (given, call["y"]))
            return replace(found, values=made) if call["y"] != 0 else None
        total = self._total(found, call["y"], call["x"], depth) if self._is_of_tokens(found, call["y"], value) else None
        divisor = total or self._per_token(found, call["y"], value)
        if divisor is None:
            return None
        values = Made(_ATEN.div.Tensor, (given, divisor))
        if total is None or not is_not_negative(self.reading, call["x"]):  # 0: the others' quotients are NaN
            nothing = Made(_ATEN.div.Tensor, (Made(_ATEN.mul.Scalar, (divisor, 0.0)), divisor))
            values = Made(_ATEN.add.Tensor, (values, nothing))
        return replace(found, values=values)

    def _is_of_tokens(self, found: _Sparse, divisor: Any, value: fx.Node) -> bool:
        """Whether ``divisor`` has one number for all experts of a token of ``value``."""
        shape = example(value)
        at = None if shape is None else axis_of((*shape.shape, 1), found.order, self.experts)
        return shape is not None and has_shape(divisor, *(1 if d == at else n for d, n in enumerate(shape.shape)))

    def _total(self, found: _Sparse, value: Any, scores: Any, depth: int) -> Made | None:
        """``scores.sum(-1, keepdim=True)``, at least or plus a number: the sum of the K numbers.

        Nothing is taken off it: what is left may be 0 where no score is, and the others' quotients NaN.
        """
        value = self._uncast(value)
        call = self.reading.read(value, "add clamp", "y min")
        number = call["y" if call.name == "add" else "min"] if call is not None else None
        if call is not None and isinstance(number, int | float):
            if number < 0:
                return None
            inner = self._total(found, call["x"], scores, depth)
            made = _ATEN.add.Scalar if call.name == "add" else _ATEN.clamp_min.default
            return None if inner is None else Made(made, (inner, number))
        call = self.reading.read(value, "sum", "dim keepdim dtype")
        if call is None or not self._over_experts(call["x"], single(call["dim"]), found):
            return None
        summed = (self._uncast(side) for side in (call["x"], scores))
        held = example(value)
        if held is None or not isinstance(found.values, fx.Node | Made) or not self.reading.same(*summed):
            return None
        return Made(_ATEN.sum.dim_IntList, (in_dtype(found.values, held.dtype), [-1], True))

    def _per_token(self, found: _Sparse, other: Any, value: fx.Node) -> Value | None:
        """A factor ``[..., 1]`` of every token."""
        shape = example(value)
        if shape is None or not self._over_experts(value, -1, found) or not has_shape(other, *shape.shape[:-1], 1):
            return None
        return _rows(other, 1)

    def _masked_fill(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        return self._either(call["mask"], self._constant(call["value"]), call["x"], value, depth)

    def _where(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        if "y" not in call.args:
            return None
        chosen = self._constant(call["x"])
        if chosen is not None:
            return self._either(call["mask"], chosen, call["y"], value, depth)
        mask, other = self.sparse(call["mask"], depth), self._constant(call["y"])
        if mask is None or not isinstance(mask.values, float):
            return None
        flipped = replace(mask, values=1 - mask.values, elsewhere=1 - mask.elsewhere)
        return self._filled(flipped, other, call["x"], value, depth)

    def _either(self, mask: Any, number: float | None, scores: Any, value: fx.Node, depth: int) -> _Sparse | None:
        """``number`` where the mask is set, ``scores`` where it is not."""
        found = self.sparse(mask, depth)
        return None if found is None else self._filled(found, number, scores, value, depth)

    def _filled(
        self, mask: _Sparse, number: float | None, scores: Any, value: fx.Node, depth: int
    ) -> _Sparse | None:  # fmt: skip
        if number is None or (mask.values, mask.elsewhere) != (0.0, 1.0) or not same_shape(scores, value):
            return None
        inner = self.sparse(scores, depth)
        if inner is not None:
            same = self.reading.same(inner.ids, mask.ids) and alike(inner.order, mask.order)
            return replace(inner, elsewhere=number, once=True) if same else None
        values = self._at_ids(mask, scores)
        return None if values is None else replace(mask, values=values, elsewhere=number, once=True)

    def _softmax(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        understood = self.reading.read(value, "softmax", "dim dtype half_to_float") is not None
        found, shape = self.sparse(call["x"], depth), example(value)
        if not understood or found is None or shape is None or not isinstance(found.values, fx.Node | Made):
            return None
        if found.elsewhere != -inf or not self._no_narrower(value):
            return None
        if not self._over_experts(value, call["dim"], found):
            return None
        return replace(found, values=Made(_ATEN.softmax.int, (found.values, -1, shape.dtype)), elsewhere=0.0)

    def _sigmoid(self, value: fx.Node, call: Call, depth: int) -> _Sparse | None:
        found, held = self.sparse(call["x"], depth), example(value)
        if found is None or found.elsewhere != -inf or not isinstance(found.values, fx.Node | Made) or held is None:
            return None
        given = in_dtype(found.values, held.dtype)
        return replace(found, values=Made(_ATEN.sigmoid.default, (given,)), elsewhere=0.0)

    # ---- values

    def _constant(self, value: Any) -> float | None:
        """The number that ``value``, a tensor or a number, is everywhere."""
        if type(value) in (int, float, bool):
            return float(value)
        root = self.reading.strip(value)
        held = [example(root)]
        while (call := self.reading.named(root, "expand", "cast")) is not None:
            root = self.reading.strip(call["x"])
            held.append(example(root))
        call = self.reading.named(root, "zeros", "zeros_like", "ones", "ones_like", "full", "tensor")
        if call is None:
            return None
        made = {"tensor": call["x"], "full": call["fill"]}.get(call.name, call.name.startswith("ones"))
        number = float(made) if type(made) in (int, float, bool) else None
        for tensor in reversed(held):
            number = None if number is None or tensor is None else _as_stored(number, tensor.dtype)
        return number

    def _at_ids(self, found: _Sparse, scores: Any) -> Value | None:
        """The numbers of dense ``scores`` at the ids."""
        shape = example(scores)
        at = None if shape is None else axis_of((*shape.shape, 1), found.order, self.experts)
        if at is not None and not equal_sizes(found.order.after, 1):
            moved = self.reading.named(scores, *TRANSPOSES)
            dims = None if moved is None or shape is None else permutation(moved, shape.dim())
            if moved is None or dims is None or sorted(rest := [dim for dim in dims if dim != dims[at]]) != rest:
                return None
            if dims[at] != len(dims) - 1:
                return None
            scores = moved["x"]
        tensor = example(scores)
        if tensor is None or not equal_sizes(tensor.shape[-1], self.experts):
            return None
        return Made(_ATEN.gather.default, (_rows(scores, self.experts), -1, found.index))

    def _is_bounded(self, value: Any) -> bool:
        """Whether ``value`` is finite, or NaN, whatever the data: 0 times it is 0."""
        tensor = example(value)
        if tensor is not None and not tensor.dtype.is_floating_point:
            return True
        call = self.reading.call(self._uncast(value))
        if call is not None and call.name == "item":  # the best of some
            call = self.reading.named(call["x"], "max", "topk", "sort") if call["index"] == 0 else None
        if call is not None and call.name in ("max", "topk", "sort", "amax", "gather"):
            return self._is_bounded(call["x"])
        if call is not None and call.name == "div":
            return self._is_share(call)
        return call is not None and call.name in ("softmax", "sigmoid")

    def _is_share(self, call: Call) -> bool:
        """Whether a quotient is of what is not negative, by its own sum over the last dimension, or more."""
        total, shared, shape = self._uncast(call["y"]), call["x"], example(call["x"])
        more = self.reading.read(total, "add clamp", "y min")
        number = None if more is None else more["y" if more.name == "add" else "min"]
        if more is not None and isinstance(number, int | float) and number >= 0:
            total = self._uncast(more["x"])
        summed = self.reading.read(total, "sum", "dim keepdim dtype")
        if summed is None or shape is None or not has_shape(call["y"], *shape.shape[:-1], 1):
            return False
        whole = same_shape(summed["x"], shared) and single(summed["dim"]) in (-1, shape.dim() - 1)
        own = whole and self.reading.same(self._uncast(summed["x"]), self._uncast(shared))
        return own and is_not_negative(self.reading, shared)

    def _is_nan_in_chosen(self, found: _Sparse, scores: Any) -> bool:
        """Whether a token with NaN among bounded ``scores`` has one among those at its ids."""
        held, root = example(scores), self._uncast(scores)
        if held is None or not held.dtype.is_floating_point:
            return held is not None
        if (call := self.reading.read(root, "softmax", "dim dtype half_to_float")) is not None:
            return self._over_experts(root, call["dim"], found)  # all of a token's are
        call = self.reading.read(root, "sigmoid")
        if call is None:
            return False
        chosen = topk_over_experts(self.reading, found.ids, self.experts)
        if chosen is None or not chosen.largest:
            return False
        order = self._uncast(chosen.scores)
        sides = self.reading.read(order, "add", "y")
        roots = (self._uncast(scores), self._uncast(call["x"]))
        return any(value in roots for value in (order, *((map(self._uncast, sides.args.values())) if sides else ())))

    def _is_float_or_mask(self, value: Any) -> bool:
        tensor = example(value)
        return tensor is not None and (not tensor.dtype.is_floating_point or self._no_narrower(value))

    def _no_narrower(self, value: Any) -> bool:
        tensor = example(value)
        return tensor is not None and no_narrower(tensor.dtype, self.floor)

    def _uncast(self, value: Any) -> Any:
        return self.reading.uncast(value, self.floor)

    def _over_experts(self, value: Any, dim: Any, found: _Sparse | None = None) -> bool:
        """Whether ``dim`` is that of the experts in ``value``: the last of [..., E], or where ``found`` has them."""
        shape = example(value)
        if shape is None or type(dim) is not int or not -shape.dim() <= dim < shape.dim():
            return False
        last = shape.dim() - 1 if equal_sizes(shape.shape[-1], self.experts) else None
        at = last if found is None else axis_of((*shape.shape, 1), found.order, self.experts)
        return at is not None and dim % shape.dim() == at


def _as_float(values: Value | float, of: Any, dtype: torch.dtype) -> Value | float:
    """``values``, which are from ``of``, as a product of ``dtype`` promotes them: alone, a mask would be no weights."""
    tensor = example(of)
    if isinstance(values, float) or tensor is None or tensor.dtype.is_floating_point or not dtype.is_floating_point:
        return values
    return Made(_ATEN.to.dtype, (values, dtype))


def _may_wrap(values: Value | float, factor: Value | float | None, of: Any) -> bool:
    """Whether a product of integers, the second of which are ``of``, may be another than that of the numbers."""
    if isinstance(factor, float):
        return factor not in (0.0, 1.0)
    tensor = example(of)
    return (tensor is None or tensor.dtype != torch.bool) and values not in (0.0, 1.0)


def _as_stored(number: float, dtype: torch.dtype) -> float | None:
    """``number`` in a tensor of this dtype; None where that is nothing that C++ promises."""
    if dtype.is_floating_point:
        return number
    if dtype == torch.bool:
        return float(bool(number))
    limits = None if dtype.is_complex else torch.iinfo(dtype)
    return float(int(number)) if limits is not None and limits.min <= number <= limits.max else None


def _or_nan(weights: Value) -> Made:
    """``weights`` [T, K], all of a token NaN where one of them is infinite."""
    nothing = Made(_ATEN.sum.dim_IntList, (Made(_ATEN.mul.Scalar, (weights, 0.0)), [-1], True))
    return Made(_ATEN.add.Tensor, (weights, nothing))


def _rows(value: Any, width: Any) -> Value:
    """``value`` as [T, width]."""
    shape = example(value)
    if shape is not None and shape.dim() == 2 and equal_sizes(shape.shape[1], width):
        node: fx.Node = value
        return node
    return Made(_ATEN.reshape.default, (value, [-1, width]))


def _times(values: Value | float, factor: Value | float, dtype: torch.dtype) -> Value | float:
    """The product in at least ``dtype``."""
    if isinstance(values, float) or isinstance(factor, float):
        number, other = (values, factor) if isinstance(values, float) else (factor, values)
        if isinstance(other, float):
            return number * other  # type: ignore[operator]
        return other if number == 1 else Made(_ATEN.mul.Scalar, (in_dtype(other, dtype), number))
    return Made(_ATEN.mul.Tensor, (in_dtype(values, dtype), in_dtype(factor, dtype)))


_STEPS = {
    "scatter": _Reader._scatter, "scatter_add": _Reader._scatter, "one_hot": _Reader._one_hot,
    "sum": _Reader._sum, "any": _Reader._sum, "amax": _Reader._sum, "item": _Reader._sum,
    "einsum": _Reader._contracted, "bmm": _Reader._contracted, "view": _Reader._same, "clone": _Reader._same,
    "cast": _Reader._cast, "transpose": _Reader._transpose, "mt": _Reader._transpose, "t": _Reader._transpose,
    "permute": _Reader._transpose, "not": _Reader._not, "mul": _Reader._mul, "div": _Reader._div,
    "add": _Reader._add, "masked_fill": _Reader._masked_fill, "where": _Reader._where, "softmax": _Reader._softmax,
    "sigmoid": _Reader._sigmoid, **dict.fromkeys(_COMPARES, _Reader._compare),
}  # fmt: skip
