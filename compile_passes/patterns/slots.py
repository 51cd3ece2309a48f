"""Ids and weights [T, K] of the pairs of tokens and experts that a product of factors says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import fx

from compile_passes.match import Made, Value, in_dtype
from compile_passes.patterns.factors import EXPERT, SLOT, Axes, Factored, Factors, flat, one_of

_ATEN = torch.ops.aten


def pairs_of(factors: Factors, tokens: Sequence[str], term: Factored, outside: bool) -> tuple[Value, Value, int] | None:
    """(ids, weights, K) of one term: [T, K] each, the id -1 where a pair is dropped; None where it has no weights.

    Args:
        tokens: the names of the dimensions of tokens, in order.
        outside: whether a place outside of the slots drops a pair.
    """
    hot = one_of(term, "experts")
    chosen = [name for name in flat(hot.axes) if name not in tokens]
    top_k = factors.sizes[chosen[0]] if chosen else 1
    ids = _at(factors, tokens, hot.node, hot.axes, chosen, None)
    if ids is None:
        return None
    ids = Made(_ATEN.to.dtype, (ids, torch.int64))
    masks: list[Value] = []
    above: list[Value] = []
    below: list[Value] = []
    for factor in term:
        if factor.kind in ("experts", "places"):
            continue
        value = _at(factors, tokens, factor.node, factor.axes, chosen, ids)
        if value is None:
            return None
        if factors.is_mask(factor):
            shut = factor.kind == "not"
            masks.append(Made(_ATEN.logical_not.default, (value,)) if shut else Made(_ATEN.ne.Scalar, (value, 0)))
        elif factor.kind == "inverse":
            below.append(value)
        else:
            above.append(value)
    if outside:
        place = one_of(term, "places")
        slots, at = factors.sizes[SLOT], _at(factors, tokens, place.node, place.axes, chosen, ids)
        if at is None or type(slots) is not int:
            return None
        masks.append(Made(_ATEN.lt.Scalar, (at, slots)))
    if not above:
        return None
    if len(above) + len(below) > 1:
        above, below = ([in_dtype(value, factors.floor) for value in values] for values in (above, below))
    weight = reduce(lambda one, other: Made(_ATEN.mul.Tensor, (one, other)), above)
    for value in below:
        weight = Made(_ATEN.div.Tensor, (weight, value))
    if masks:
        ids = dropped_unless(reduce(lambda one, other: Made(_ATEN.logical_and.default, (one, other)), masks), ids)
    return ids, weight, top_k


def _at(
    factors: Factors, tokens: Sequence[str], node: fx.Node, axes: Axes, chosen: list[str], ids: Value | None
) -> Value | None:
    """``node`` as [T, K]: at the ids where it has a dimension of experts."""
    found = [*flat(axes)]
    wanted = [*tokens, *(name for name in chosen if name in found), *([EXPERT] if EXPERT in found else [])]
    if sorted(found) != sorted(wanted):
        return None
    value: Value = node
    sizes = [factors.sizes[name] for name in found]
    if len(axes) != len(found) or None in axes:
        free = [size for size in sizes if type(size) is not int]
        if len(free) > 1:
            return None
        value = Made(_ATEN.reshape.default, (value, [size if type(size) is int else -1 for size in sizes]))
    if found != wanted:
        value = Made(_ATEN.permute.default, (value, [found.index(name) for name in wanted]))
    slots = [factors.sizes[name] for name in wanted if name in chosen]
    if EXPERT not in found:
        value = Made(_ATEN.reshape.default, (value, [-1, *(slots or [1])]))
        top_k = factors.sizes[chosen[0]] if chosen else 1
        return value if slots or top_k == 1 else Made(_ATEN.expand.default, (value, [-1, top_k]))
    value = Made(_ATEN.reshape.default, (value, [-1, *slots, factors.sizes[EXPERT]]))
    if not slots:
        return Made(_ATEN.gather.default, (value, -1, ids))
    column = Made(_ATEN.unsqueeze.default, (ids, -1))
    return Made(_ATEN.squeeze.dim, (Made(_ATEN.gather.default, (value, -1, column)), -1))


def dropped_unless(kept: Value, ids: Value) -> Made:
    """``ids``, with -1 for a pair that is not ``kept``."""
    return Made(_ATEN.where.ScalarOther, (kept, ids, -1))


def beside(values: Sequence[Value]) -> Value:
    """[T, K] of several choices as one."""
    return values[0] if len(values) == 1 else Made(_ATEN.cat.default, (tuple(values), 1))
