"""Where each expert's rows end: cumulative counts of the expert ids, however they are counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compile_passes.equal import holds
from compile_passes.match import Dispatch, Refusal
from compile_passes.patterns.ids import are_distinct, are_in_range, exact_ids
from compile_passes.patterns.rows import Order, is_ramp
from compile_passes.patterns.selection import chosen_by
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, rank

_RAISES = (
    "Take the ids from topk over the experts, or count with torch.histc(ids.float(), bins=num_experts, min=0, "
    "max=num_experts - 1)."
)


def offsets_of(order: Order, offsets: fx.Node, dispatch: Dispatch, experts: Any) -> Refusal | None:
    """Why ``offsets`` are not proved to be the ends of the experts' rows; None when they are."""
    return _Counting(order, dispatch, experts).offsets(offsets)


def counts_of(order: Order, counts: fx.Node, dispatch: Dispatch, experts: Any) -> Refusal | None:
    """Why ``counts`` are not proved to be the experts' numbers of rows, all rows in sum; None when they are."""
    return _Counting(order, dispatch, experts).all_rows(counts)


def row_ids(order: Order, value: Any, dispatch: Dispatch, experts: Any) -> bool:
    """Whether ``value`` holds the expert id of every row."""
    reading = order.reading
    if dispatch.perm is None:
        return _are_pair_ids(reading, value, dispatch, experts)
    value = reading.strip(value)
    taken = order.taken(value)
    if taken is not None:
        pairs = _are_pair_ids(reading, taken.source, dispatch, experts)
        return pairs and order.has_order(taken.index, dispatch.perm, taken.wide)
    call = reading.read(value, "item", "index")
    ordered = reading.read(call["x"], "sort", "dim") if call is not None and call["index"] == 0 else None
    return (
        ordered is not None and rank(ordered["x"]) == 1
        and ordered["dim"] in (-1, 0) and _are_pair_ids(reading, ordered["x"], dispatch, experts)
    )  # fmt: skip


def _are_pair_ids(reading: Reading, value: Any, dispatch: Dispatch, experts: Any) -> bool:
    """Whether ``value`` holds the ids of all pairs in their order, which rows may be sorted by casts of."""
    if reading.same(value, dispatch.ids):
        return True
    return reading.same(exact_ids(reading, value, experts), exact_ids(reading, dispatch.ids, experts))


class _Counting:
    def __init__(self, order: Order, dispatch: Dispatch, experts: Any) -> None:
        self.order, self.reading, self.dispatch, self.experts = order, order.reading, dispatch, experts
        ids = example(dispatch.ids)
        self.rows: Any = 0 if ids is None else ids.numel()

    def offsets(self, offsets: fx.Node) -> Refusal | None:
        value = self._exact(offsets)
        searched = self.reading.read(value, "searchsorted bucketize", "y out_int32 right side")
        if searched is not None and has_shape(value, self.experts):
            return None if self._searches_ends(searched) else self._unknown(value)
        cumulative = self.reading.read(value, "cumsum", "dim dtype")
        if (
            cumulative is None
            or cumulative["dim"] not in (0, -1)
            or not has_shape(cumulative["x"], self.experts)
            or not self._holds(value)
        ):
            return Refusal(
                offsets, "The group offsets are not a cumulative sum of counts per expert.",
                "Compute them as counts.cumsum(0, dtype=torch.int32).",
            )  # fmt: skip
        return self._counts(self._exact(cumulative["x"]))

    def all_rows(self, counts: fx.Node) -> Refusal | None:
        value = self._exact(counts)
        return self._counts(value) or self._raising(value)

    def _counts(self, value: Any) -> Refusal | None:
        """Why ``value`` are not the counts per expert; None when they are."""
        if not self._holds(value):
            return self._unknown(value)
        call = self.reading.read(value, "histc bincount", "bins min max minlength")
        if call is not None:
            return self._histogram(value, call)
        if self._added_ones(value):
            return self._raising(value)
        mask = self._summed(value)
        if mask is not None and self._is_one_hot(mask):
            return self._raising(value) if self.reading.named(mask, "one_hot") is not None else None
        if mask is not None and self._is_set_at_ids(mask):
            return None
        return None if self._sum_for_each(value) else self._unknown(value)

    def _histogram(self, value: Any, call: Call) -> Refusal | None:
        if call.name == "histc":
            # Experts are whole numbers: bins of width 1 hold them one by one, and the last of E - 1 holds its end.
            whole = equal_sizes(call["max"], self.experts)
            wrong = call["min"] != 0 or not equal_sizes(call["bins"], self.experts)
            wrong = wrong or not (whole or equal_sizes(call["max"], self.experts - 1))
        else:
            whole, wrong = False, not equal_sizes(call["minlength"], self.experts)
        if wrong:
            return Refusal(
                value, f"The histogram of expert ids has {call['bins']} bins from {call['min']} to {call['max']}, "
                f"but the weights have {self.experts} experts.",
                "Count with bins=num_experts, min=0, max=num_experts - 1.",
            )  # fmt: skip
        if not self._all_ids(call["x"]):
            return Refusal(
                value, "The rows are counted by ids that cannot be proved to be those that order them.",
                "Sort, count and gather with one topk_ids tensor.",
            )  # fmt: skip
        return self._raising(value) if whole else None

    def _raising(self, value: Any) -> Refusal | None:
        """A refusal where an id of no expert would raise, or be counted, and the fused operator leaves it out."""
        if are_in_range(self.reading, self.dispatch.ids, self.experts):
            return None
        return Refusal(
            value, "The expert ids cannot be proved to be in [0, number of experts), and this way to count does not "
            "leave others out.", _RAISES,
        )  # fmt: skip

    def _unknown(self, counts: Any) -> Refusal:
        call = self.reading.call(counts)
        name = call.name if call is not None else str(counts)
        return Refusal(
            counts, f"The counts per expert are not a histogram of the expert ids that can be proved (they come from "
            f"{name}).", "Count with torch.histc(ids.float(), bins=num_experts, min=0, max=num_experts - 1).",
        )  # fmt: skip

    # ---- spellings

    def _searches_ends(self, call: Call) -> bool:
        """Where the ids up to e end in the sorted ids, for every expert e."""
        ordered, asked = ("x", "y") if call.name == "searchsorted" else ("y", "x")
        right = call["right"] is True or call["side"] == "right"
        if call["side"] == "left" or not self._row_ids(self._exact_ids(call[ordered])):
            return False
        return self._is_experts(call[asked], first=0 if right else 1)

    def _is_experts(self, value: Any, first: int = 0) -> bool:
        """Whether ``value`` is first, first + 1, ... for all experts, one after the other."""
        shape = example(value)
        if shape is None or not equal_sizes(shape.numel(), self.experts):
            return False
        if first == 0:
            return is_ramp(self.reading, self.reading.strip(value))
        call = self.reading.read(self.reading.strip(value), "arange add", "start end dtype y")
        if call is None or shape.dtype.is_floating_point:
            return False
        if call.name == "add":
            return any(call[b] == 1 and self._is_experts(call[a]) for a, b in (("x", "y"), ("y", "x")))
        return type(call["start"]) is int and bool(call["start"] == 1)

    def _added_ones(self, value: Any) -> bool:
        """``zeros(E).scatter_add(0, ids, ones)`` and its kin."""
        added = self.order.added(value)
        if added is None or not has_shape(added.start, self.experts):
            return False
        return self.reading.is_zeros(added.start) and self._are_ones(added.rows) and self._all_ids(added.index)

    def _are_ones(self, value: Any) -> bool:
        shape = example(value)
        if shape is None:
            return type(value) in (int, float, bool) and value == 1
        return equal_sizes(shape.numel(), self.rows) and self._is_one(value)

    def _is_one(self, value: Any) -> bool:
        root = self.reading.exact(value, 2)
        while (call := self.reading.named(root, "expand")) is not None:
            root = self.reading.exact(call["x"], 2)
        return self.reading.named(root, "ones", "ones_like") is not None

    def _is_one_hot(self, mask: fx.Node) -> bool:
        """Whether ``mask`` is a one-hot ``[..., E]`` of all ids."""
        call = self.reading.read(mask, "one_hot eq scatter", "num_classes y dim index src")
        shape = example(mask)
        if call is None or shape is None or not equal_sizes(shape.shape[-1], self.experts):
            return False
        if call.name == "one_hot":
            return equal_sizes(call["num_classes"], self.experts) and self._all_ids(call["x"])
        if call.name == "scatter":
            return self._scattered(call)
        return self._compared(call, shape.numel())

    def _summed(self, value: Any) -> Any:
        """The mask ``[..., E]`` that ``value`` [E] is a sum of over all dimensions but the last, exactly, or None."""
        found = None
        while (call := self.reading.read(self._exact(value), "sum count_nonzero", "dim dtype")) is not None:
            operand, dims = example(call["x"]), call["dim"]
            dims = [dims] if type(dims) is int else dims
            if operand is None or not isinstance(dims, list | tuple) or not self._holds(self._exact(value)):
                return None
            if any(type(dim) is not int or dim in (-1, operand.dim() - 1) for dim in dims):
                return None
            found = value = call["x"]
            if call.name == "count_nonzero":
                break
        return None if found is None else self.reading.exact(found, 2)

    def _is_set_at_ids(self, mask: fx.Node) -> bool:
        """Whether ``mask`` [T, E] is set for the ids of every token, and nowhere else."""
        found, shape = chosen_by(self.reading, mask, self.order.floor, 1), example(mask)
        if found is None or shape is None or not equal_sizes(shape.shape[-1], self.experts):
            return False
        return _are_pair_ids(self.reading, found[0], self.dispatch, self.experts)

    def _scattered(self, call: Call) -> bool:
        """torchtitan: ``zeros(T, E, bool).scatter(1, ids, True)``, right where a token's ids are distinct."""
        tokens, top_k = example(self.dispatch.hidden), self.dispatch.top_k
        return (
            self.reading.is_zeros(call["x"]) and tokens is not None
            and call["dim"] in (1, -1) and call["src"] in (1, True)
            and has_shape(call["x"], tokens.shape[0], self.experts)
            and has_shape(call["index"], tokens.shape[0], top_k) and self._all_ids(call["index"])
            and are_distinct(self.reading, call["index"], self.experts, top_k)
        )  # fmt: skip

    def _compared(self, call: Call, size: Any) -> bool:
        """``ids[..., None] == arange(E)``."""
        for one, other in (("x", "y"), ("y", "x")):
            ids, experts = example(call[one]), example(call[other])
            if ids is None or experts is None or not equal_sizes(ids.numel() * self.experts, size):
                continue
            last = ids.dim() > 0 and equal_sizes(ids.shape[-1], 1)
            spread = experts.dim() > 0 and equal_sizes(experts.shape[-1], self.experts)
            if last and spread and self._is_experts(call[other]) and self._all_ids(call[one]):
                return True
        return False

    def _sum_for_each(self, value: Any) -> bool:
        """``stack([(ids == e).sum() for e in range(E)])``."""
        call = self.reading.named(value, "stack")
        parts = call["x"] if call is not None else None
        if not isinstance(parts, list | tuple) or not equal_sizes(len(parts), self.experts):
            return False
        return all(self._counts_one(part, expert) for expert, part in enumerate(parts))

    def _counts_one(self, value: Any, expert: int) -> bool:
        value = self._exact(value)
        total = self.reading.read(value, "sum count_nonzero", "dtype")
        if total is None or not self._holds(value):
            return False
        call = self.reading.read(self.reading.exact(total["x"], 2), "eq", "y")
        return call is not None and type(call["y"]) is int and call["y"] == expert and self._all_ids(call["x"])

    # ---- values

    def _row_ids(self, value: Any) -> bool:
        return row_ids(self.order, value, self.dispatch, self.experts)

    def _all_ids(self, value: Any) -> bool:
        """Whether ``value`` holds the ids of all rows, in whatever order."""
        value = self._exact_ids(value)
        return self._row_ids(value) or _are_pair_ids(self.reading, value, self.dispatch, self.experts)

    def _exact_ids(self, value: Any) -> Any:
        return exact_ids(self.reading, value, self.experts, also=torch.int32)

    def _exact(self, value: Any) -> Any:
        return self.reading.exact(value, self.rows + 1)

    def _holds(self, value: Any) -> bool:
        """Whether the dtype of ``value`` holds every number of rows."""
        tensor = example(self.reading.operand(value)) if isinstance(value, fx.Node) else None
        return tensor is not None and holds(tensor.dtype, self.rows + 1)
