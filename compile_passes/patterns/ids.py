"""What is known about expert ids themselves, whatever the data: where they come from, and that they are in range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_passes.patterns.bounds import bounds_of
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example, same_shape

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
    """Whether the ids of one token, all in [0, E), never repeat: they are the indices of one topk, some columns of
    them, or several such beside each other that have no number in common, as those of experts that every token has.
    """
    return are_in_range(reading, ids, experts) and _are_distinct(reading, ids, experts, top_k, _DEPTH)


def _are_distinct(reading: Reading, ids: Any, experts: Any, width: Any, depth: int) -> bool:
    value = reading.exact(ids, experts)
    call, shape = reading.call(value), example(value)
    if call is None or shape is None or depth == 0 or reading.is_stale(value):
        return False
    if _is_choice(reading, value, width):
        return True
    # A view of them may have made one token of two.
    if not shape.dim() or not equal_sizes(shape.shape[-1], width):
        return False
    if equal_sizes(width, 1) and shape.dim() > 1:
        return True
    if reading.read(value, "getslice slice narrow", "index dim start end length") is not None:
        whole = example(call["x"])
        index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
        kept = call.name != "getslice" or all(part is Ellipsis or isinstance(part, slice) for part in index)
        return kept and whole is not None and _are_distinct(reading, call["x"], experts, whole.shape[-1], depth - 1)
    if call.name in ("add", "sub") and type(call["y"]) is int and same_shape(call["x"], value):
        return _are_distinct(reading, call["x"], experts, width, depth - 1)
    if call.name == "arange":
        return True
    if call.name in ("expand", "repeat"):
        inner = example(call["x"])
        one = inner is not None and inner.dim() and equal_sizes(inner.shape[-1], width)
        return bool(one) and _are_distinct(reading, call["x"], experts, width, depth - 1)
    return call.name == "cat" and _are_apart(reading, call, experts, depth - 1)


def _are_apart(reading: Reading, call: Call, experts: Any, depth: int) -> bool:
    """Whether the columns of every part of a cat are distinct, and no number is in two parts."""
    parts = [(bounds_of(reading, part), example(part), part) for part in call["x"]]
    for place, (found, shape, part) in enumerate(parts):
        if found is None or shape is None or not _are_distinct(reading, part, experts, shape.shape[-1], depth):
            return False
        if not all(other is not None and found.apart_from(other) for other, *_ in parts[:place]):
            return False
    return True


def _is_choice(reading: Reading, value: Any, width: Any) -> bool:
    """Whether ``value`` are the places of the best ``width`` along a last dimension."""
    item = reading.read(value, "item", "index")
    topk = None if item is None else reading.read(item["x"], "topk", "k dim largest")
    scores = example(topk["x"]) if topk is not None else None
    if topk is None or item is None or scores is None or item["index"] != 1:
        return False
    return topk["dim"] in (-1, scores.dim() - 1) and bool(topk["k"] == width)


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
    found = bounds_of(reading, ids)
    return found is not None and found.within(experts)


def are_not_negative(reading: Reading, ids: Any) -> bool:
    """Whether ``ids`` are proved to be 0 or more, whatever the data."""
    found = bounds_of(reading, ids)
    return found is not None and found.low >= 0
