"""A capacity by a slice: an expert takes the first tokens that chose it, ``torch.where(ids == e)[0][:capacity]``.

A pair is kept where no more than ``capacity`` of those that the code lists for its expert, up to it, come first: a
cumsum over the pairs in that order. An empty slice keeps none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compile_passes.compat import statically_known_true
from compile_passes.match import Made, Value
from compile_passes.reading import Reading
from compile_passes.vocabulary import equal_sizes, example, size_of

_ATEN = torch.ops.aten
# A number, or the node that computes it on the host.
Limit = int | fx.Node


def cut_short(reading: Reading, value: Any) -> tuple[fx.Node, Limit] | None:
    """(x, n) of ``x[:n]``, or of ``x[: min(len(x), n)]``, where x is a list, or a column, and n is not negative, which
    would count from the end.
    """
    call = reading.read(value, "getslice", "index")
    shape = example(call["x"]) if call is not None else None
    if call is None or shape is None or not all(equal_sizes(size, 1) for size in shape.shape[1:]):
        return None
    given = call["index"]
    if not isinstance(given, slice) or given.start not in (None, 0) or given.step not in (None, 1):
        return None
    least = reading.read(given.stop, "sym_min", "arg1")  # min(len(x), n)
    sides = () if least is None else ((least["x"], least["arg1"]), (least["arg1"], least["x"]))
    limit = next((other for one, other in sides if equal_sizes(one, shape.shape[0])), given.stop)
    size = size_of(limit)
    if type(size) is not int and not isinstance(size, torch.SymInt):
        return None
    return (call["x"], limit) if statically_known_true(size >= 0) else None


def same_limit(one: Limit | None, other: Limit | None) -> bool:
    """Whether two limits are one number, or neither is any."""
    return one is other or (one is not None and other is not None and equal_sizes(one, other))


def within_limit(ids: Value, top_k: int, experts: int, limit: Limit, by: str) -> Made:
    """Which pairs [T, K] of ``ids`` are kept.

    Args:
        by: what is listed for an expert: "tokens", by "token" and slot, by "slot" and token.
    """
    rows = Made(_ATEN.to.dtype, (Made(_ATEN.reshape.default, (ids, [-1, top_k])), torch.int64, False, False, None))
    numbers = Made(
        _ATEN.sub.Scalar, (Made(_ATEN.cumsum.default, (Made(_ATEN.new_ones.default, (rows, [experts])), 0)), 1)
    )
    hot = Made(_ATEN.eq.Tensor, (Made(_ATEN.unsqueeze.default, (rows, -1)), numbers))  # [T, K, E]
    listed = Made(_ATEN.any.dim, (hot, 1, True)) if by == "tokens" else hot
    if by == "slot":
        listed = Made(_ATEN.transpose.int, (listed, 0, 1))
    if by != "tokens":
        listed = Made(_ATEN.reshape.default, (listed, [-1, experts]))
    count = Made(_ATEN.cumsum.default, (listed, 0))
    if by == "token":
        count = Made(_ATEN.reshape.default, (count, [-1, top_k, experts]))
    if by == "slot":
        count = Made(_ATEN.transpose.int, (Made(_ATEN.reshape.default, (count, [top_k, -1, experts])), 0, 1))
    kept = Made(_ATEN.logical_and.default, (hot, Made(_ATEN.le.Scalar, (count, limit))))
    return Made(_ATEN.any.dim, (kept, -1))
