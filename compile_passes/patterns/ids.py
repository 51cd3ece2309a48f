"""What is known about expert ids themselves, whatever the data: where they come from, and that they are in range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example

# Calls whose result holds only elements of their first operand.
_PICKS = frozenset(
    {"index", "gather", "getslice", "slice", "narrow", "select", "transpose", "permute", "mt", "expand", "repeat",
     "index_select", "take_along_dim", "repeat_interleave"}
)  # fmt: skip
# How far down ids are looked into.
_DEPTH = 8


def is_harmless(clamp: Call, experts: Any) -> bool:
    """Whether a clamp leaves ids in ``[0, E)`` alone."""
    low, high = clamp["min"], clamp["max"]
    return (low is None or low == 0) and (high is None or equal_sizes(high, experts - 1))


@dataclass(frozen=True)
class Choice:
    """The best ``k`` of ``scores`` [..., E]: a topk, or max or argmax, which are a topk of one.

    ``node``: what has the scores and the ids as its results, or None where it has the ids alone.
    """

    scores: Any
    k: Any
    largest: Any
    node: fx.Node | None


def topk_over_experts(reading: Reading, ids: Any, experts: Any) -> Choice | None:
    """The choice over ``experts`` columns whose indices ``ids`` are, in another shape or dtype."""
    value = reading.exact(ids, experts)
    item = reading.read(value, "item", "index")
    source = value if item is None else item["x"]
    call = reading.read(source, "argmax" if item is None else "topk max", "k dim largest keepdim")
    scores = example(call["x"]) if call is not None else None
    if call is None or scores is None or call["dim"] not in (-1, scores.dim() - 1) or (item and item["index"] != 1):
        return None
    if not equal_sizes(scores.shape[-1], experts):
        return None
    one = call.name != "topk"
    return Choice(
        call["x"], 1 if one else call["k"], True if one else call["largest"], None if item is None else source
    )


def are_distinct(reading: Reading, ids: Any, experts: Any, top_k: int) -> bool:
    """Whether the ids of one token never repeat: they are the indices of one topk, or some columns of them."""
    topk = topk_over_experts(reading, ids, experts)
    if topk is not None:
        return bool(topk.k == top_k)
    taken = reading.exact(ids, experts)
    columns, some = reading.read(taken, "getslice slice narrow", "index dim start end length"), example(taken)
    whole = example(columns["x"]) if columns is not None else None
    # A view of them may have made one token of two.
    if columns is None or whole is None or some is None or not equal_sizes(some.shape[-1], top_k):
        return False
    index = columns["index"] if isinstance(columns["index"], tuple) else (columns["index"],)
    kept = columns.name != "getslice" or all(part is Ellipsis or isinstance(part, slice) for part in index)
    return kept and are_distinct(reading, columns["x"], experts, whole.shape[-1])


def ids_within(reading: Reading, ids: fx.Node, experts: Any) -> fx.Node:
    """``ids`` without a clamp to ``[0, E)`` that cannot change them: they are a topk's indices over E columns."""
    call = reading.read(reading.exact(ids, experts), "clamp", "min max")
    if call is None or not is_harmless(call, experts) or topk_over_experts(reading, call["x"], experts) is None:
        return ids
    inner: fx.Node = call["x"]
    return inner


def are_integers(reading: Reading, value: Any) -> bool:
    """Whether ``value`` holds integers, in a floating dtype, too: casts of some."""
    while (tensor := example(value)) is not None and tensor.dtype.is_floating_point:
        call = reading.read(value, "view clone cast")
        if call is None:
            return False
        value = call["x"]
    return tensor is not None


def exact_ids(reading: Reading, ids: Any, experts: Any, also: torch.dtype | None = None) -> Any:
    """What ``ids`` are reshapes and casts of, whose numbers are theirs: all casts of ids that are in range are; of
    others casts of integers to ``also``, too.
    """
    return reading.exact(ids, experts) if are_in_range(reading, ids, experts) else reading.faithful(ids, experts, also)


def are_in_range(reading: Reading, ids: Any, experts: Any) -> bool:
    """Whether ``ids`` are proved to be in ``[0, E)``, whatever the data."""
    return _bounded(reading, ids, experts, above=True, depth=_DEPTH)


def are_not_negative(reading: Reading, ids: Any, experts: Any) -> bool:
    """Whether ``ids`` are proved to be 0 or more, whatever the data."""
    return _bounded(reading, ids, experts, above=False, depth=_DEPTH)


def _bounded(reading: Reading, ids: Any, experts: Any, above: bool, depth: int) -> bool:
    """Whether ``ids`` are 0 or more and, if asked ``above``, less than E."""
    value = reading.exact(ids, experts)
    if depth == 0 or reading.call(value) is None or reading.is_stale(value):
        return False
    parts = _picked_from(reading, value)
    if parts is not None:
        limit = experts if above else None
        return all(_is_within(part, limit) or _bounded(reading, part, experts, above, depth - 1) for part in parts)
    if (call := reading.read(value, "item argmax argsort", "index dim keepdim descending")) is not None:
        source = _positions_source(reading, call)
        return source is not None and (not above or _axis_is(source, experts))
    if (call := reading.read(value, "clamp", "min max")) is not None:
        low, high = call["min"], call["max"]
        return _is_within(low, None) and (not above or (high is not None and equal_sizes(high, experts - 1)))
    if (call := reading.read(value, "randint", "low high size dtype")) is not None:
        return _is_within(call["low"], None) and (not above or equal_sizes(call["high"], experts))
    if _is_bit(reading, value, depth):
        return not above or (isinstance(experts, int) and experts > 1)
    call = reading.read(value, "mod", "y")
    if call is None:
        return False
    return equal_sizes(call["y"], experts) if above else type(call["y"]) is int and call["y"] > 0


def _is_bit(reading: Reading, value: Any, depth: int) -> bool:
    """Whether ``value`` is 0 or 1 everywhere: a mask, a one-hot, or a product of such."""
    tensor, value = example(value), reading.exact(value, 2)
    made = example(value)
    if depth == 0 or tensor is None or made is None:
        return False
    if made.dtype == torch.bool or reading.named(value, "one_hot") is not None:
        return True
    call = reading.read(value, "mul", "y")
    return call is not None and all(_is_bit(reading, part, depth - 1) for part in (call["x"], call["y"]))


def _picked_from(reading: Reading, value: Any) -> list[Any] | None:
    """The values, and numbers, among which every element of ``value`` is one; None when it is computed otherwise."""
    call = reading.call(value)
    if call is None:
        return None
    if call.name in _PICKS:
        return [call["x"]]
    if call.name in ("cat", "stack", "hstack", "vstack") and isinstance(call["x"], list | tuple):
        return list(call["x"])
    if call.name == "where" and len(call.args) == 3:
        return [call["x"], call["y"]]
    if call.name == "masked_fill":
        return [call["x"], call["value"]]
    if call.name == "item":
        source = reading.named(call["x"], "sort", "topk", "max", "chunk", "split")
        if source is not None and (source.name in ("chunk", "split") or call["index"] == 0):
            return [source["x"]]
    return None


def _is_within(value: Any, experts: Any) -> bool:
    """Whether ``value`` is a number in ``[0, E)``; with E of None, in ``[0, inf)``."""
    return type(value) is int and value >= 0 and (experts is None or (isinstance(experts, int) and value < experts))


def _positions_source(reading: Reading, call: Call) -> Call | None:
    """The call along whose dimension ``call`` holds positions: the second result of sort, topk or max, or its own."""
    if call.name != "item":
        return call
    return reading.named(call["x"], "sort", "topk", "max") if call["index"] == 1 else None


def _axis_is(call: Call, size: Any) -> bool:
    """Whether the dimension along which ``call`` works has ``size`` entries."""
    tensor, dim = example(call["x"]), call["dim"]
    if tensor is None or type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        return False
    return equal_sizes(tensor.shape[dim], size)
