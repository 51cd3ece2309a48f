"""How tokens become rows of the first expert product, and the proof that rows, offsets and biases agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compile_passes.match import Dispatch, Product, Refusal
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, rank

_SAME_IDS = "Sort, count and gather with one topk_ids tensor."
# Integers that a position or an expert id may be computed in.
_INDEX = (torch.int32, torch.int64)
# Calls whose result holds only elements of their first operand.
_PICKS = frozenset(
    {"index", "gather", "getslice", "slice", "narrow", "transpose", "permute", "mt", "expand", "index_select",
     "repeat_interleave"}
)  # fmt: skip
# How far down ids are looked into.
_DEPTH = 8


def recognise_dispatch(reading: Reading, up: Product, down: Product) -> Dispatch | Refusal:
    """The token gather before ``up``, checked against the routing keys, biases and masks of both products."""
    if reading.named(up.anchor, "grouped_mm") is not None:
        found = _sorted_rows(reading, up)
    else:
        found = _repeated_rows(reading, up)
    if isinstance(found, Refusal):
        return found
    return _disagreement(reading, found, up, down) or found


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


def _sorted_rows(reading: Reading, up: Product) -> Dispatch | Refusal:
    """``hidden[perm // K]`` with ``perm`` sorting the flattened ids."""
    gather = reading.read(up.rows, "index", "index")
    divided = _quotient(reading, gather["index"]) if gather is not None else None
    perm = reading.strip(position(reading, divided["x"])) if divided is not None else None
    ids = sorts(reading, perm)
    if gather is None or divided is None or ids is None or type(divided["y"]) is not int:
        return _not_gathered(reading, up)
    return _dispatch(reading, up, "grouped_mm", gather["x"], ids, perm, divided["y"])


def _not_gathered(reading: Reading, up: Product) -> Refusal:
    weighted = reading.read(up.rows, "mul", "y")
    if weighted is not None:
        return Refusal(
            up.anchor, "The rows of the first expert product are multiplied by something (routing weights?) before it.",
            "Apply the routing weights after the experts, or call moe_ops.fused_experts(..., weight_on_input=True).",
        )  # fmt: skip
    return Refusal(
        up.anchor, "The rows of the first expert product are not tokens gathered by an ascending sort of the expert "
        "ids, as far as can be proved.", "Write them as hidden_states[perm // top_k] with perm = "
        "ids.reshape(-1).argsort().",
    )  # fmt: skip


def _quotient(reading: Reading, value: Any) -> Call | None:
    """``x // y`` of positions, which are never negative, so that truncation is the same."""
    return reading.read(position(reading, value), "floordiv truncdiv", "y")


def position(reading: Reading, value: Any) -> Any:
    """Row positions without casts between the integers that hold any of them."""
    while (call := reading.read(value, "cast")) is not None:
        before, after = example(call["x"]), example(value)
        if before is None or after is None or before.dtype not in _INDEX or after.dtype not in _INDEX:
            break
        value = call["x"]
    return value


def _repeated_rows(reading: Reading, up: Product) -> Dispatch | Refusal:
    """``hidden.repeat_interleave(K, 0)`` or ``hidden[arange(R) // K]``: K copies of every token, not sorted."""
    call = reading.read(up.rows, "repeat_interleave index", "repeats dim index")
    top_k: Any = None
    if call is not None and call.name == "repeat_interleave" and call["dim"] in (0, -2):
        top_k = call["repeats"]
    elif call is not None and call.name == "index":
        divided = _quotient(reading, call["index"])
        if divided is not None and is_ramp(reading, divided["x"]):
            top_k = divided["y"]
    if call is None or type(top_k) is not int:
        return Refusal(
            up.anchor, "The rows of the first expert product are not tokens repeated top_k times, as far as can be "
            "proved.", "Write them as hidden_states.repeat_interleave(top_k, dim=0).",
        )  # fmt: skip
    return _dispatch(reading, up, "batched_mm", call["x"], up.routing_key, None, top_k)


def is_ramp(reading: Reading, value: Any) -> bool:
    """Whether ``value`` is 0, 1, 2, ... in one dimension."""
    node = reading.strip(position(reading, value))
    ramp, tensor = reading.read(node, "arange", "end dtype"), example(node)
    return ramp is not None and tensor is not None and tensor.dtype in _INDEX and rank(value) == 1


def _dispatch(
    reading: Reading, up: Product, form: str, source: fx.Node, ids: fx.Node, perm: fx.Node | None, top_k: int
) -> Dispatch | Refusal:
    tokens, count = example(source), example(ids)
    if tokens is None or count is None or tokens.dim() != 2:
        return Refusal(
            up.anchor, "The gathered hidden states are not [tokens, hidden].", "Flatten them to two dimensions."
        )
    if not equal_sizes(count.numel(), tokens.shape[0] * top_k) or not has_shape(
        up.rows, count.numel(), tokens.shape[1]
    ):
        return Refusal(
            up.anchor, f"There are {count.numel()} expert ids for {tokens.shape[0]} tokens, not top_k={top_k} each.",
            "Gather with perm // topk_ids.shape[1].",
        )  # fmt: skip
    return Dispatch(form, source, ids, perm, top_k)


def _disagreement(reading: Reading, dispatch: Dispatch, up: Product, down: Product) -> Refusal | None:
    """The first proof that fails: one set of ids and one number of experts everywhere."""
    for product in (up, down):
        experts, other = example(product.weight.node), example(up.weight.node)
        if experts is None or other is None or not equal_sizes(experts.shape[0], other.shape[0]):
            return Refusal(product.anchor, "The two expert products have different numbers of experts.", _SAME_IDS)
        if dispatch.perm is None:
            wrong = None if reading.same(product.routing_key, dispatch.ids) else "weights"
        else:
            counted = _counts(reading, product.routing_key, dispatch, experts.shape[0])
            if isinstance(counted, Refusal):
                return counted
            wrong = None if counted else "offsets"
        if (
            wrong is None
            and product.bias_ids is not None
            and not _bias_ids(reading, product.bias_ids, dispatch, experts.shape[0])
        ):
            wrong = "bias"
        if wrong is not None:
            return Refusal(
                product.anchor,
                f"This product takes its {wrong} by ids that cannot be proved to be those that order its rows.",
                _SAME_IDS,
            )
        for mask in product.masks:
            if not _is_sentinel_mask(reading, mask, dispatch, experts.shape[0]):
                return Refusal(
                    mask, "Rows are zeroed by a mask that is not `expert id >= number of experts`.", _SAME_IDS
                )
    return None


def _counts(reading: Reading, offsets: fx.Node, dispatch: Dispatch, experts: Any) -> bool | Refusal:
    """Whether ``offsets`` are the cumulative counts of the dispatched ids over ``experts`` experts."""
    total = _rows(dispatch) + 1
    cumulative = reading.read(reading.exact(offsets, total), "cumsum", "dim dtype")
    summed = reading.exact(cumulative["x"], total) if cumulative is not None else None
    along = cumulative is not None and cumulative["dim"] in (0, -1) and has_shape(cumulative["x"], experts)
    if cumulative is None or summed is None or not along:
        return Refusal(
            offsets, "The group offsets are not a cumulative sum of counts per expert.",
            "Compute them as counts.cumsum(0, dtype=torch.int32).",
        )  # fmt: skip
    call = reading.read(summed, "histc bincount sum", "bins min max minlength dim dtype")
    if call is None:
        return _unknown_counts(reading, summed)
    if call.name == "sum":
        counted = _one_hot_counts(reading, call, dispatch, experts)
        return counted or _unknown_counts(reading, summed)
    if call.name == "histc":
        wrong = call["min"] != 0 or not equal_sizes(call["bins"], experts) or not equal_sizes(call["max"], experts - 1)
    else:
        wrong = not equal_sizes(call["minlength"], experts)
    if wrong:
        return Refusal(
            summed, f"The histogram of expert ids has {call['bins']} bins from {call['min']} to {call['max']}, "
            f"but the weights have {experts} experts.", "Count with bins=num_experts, min=0, max=num_experts - 1.",
        )  # fmt: skip
    ids = reading.exact(call["x"], experts)
    return row_ids(reading, ids, dispatch) or reading.same(ids, dispatch.ids)


def _unknown_counts(reading: Reading, counts: Any) -> Refusal:
    call = reading.call(counts)
    name = call.name if call is not None else str(counts)
    return Refusal(
        counts, f"The counts per expert are not a histogram of the expert ids that can be proved (they come from "
        f"{name}).", "Count with torch.histc(ids.float(), bins=num_experts, min=0, max=num_experts - 1).",
    )  # fmt: skip


def _rows(dispatch: Dispatch) -> Any:
    ids = example(dispatch.ids)
    return 0 if ids is None else ids.numel()


def _one_hot_counts(reading: Reading, call: Call, dispatch: Dispatch, experts: Any) -> bool:
    """torchtitan: ``zeros(T, E, bool).scatter(1, ids, True).sum(0)``, right where a token's ids are distinct."""
    scattered = reading.read(reading.exact(call["x"], 2), "scatter", "dim index src")
    if scattered is None or call["dim"] not in (0, [0], (0,)) or scattered["dim"] not in (1, -1):
        return False
    tokens = example(dispatch.hidden)
    zeros = reading.named(reading.strip(scattered["x"]), "zeros", "zeros_like")
    return (
        zeros is not None and tokens is not None and scattered["src"] in (1, True)
        and has_shape(scattered["x"], tokens.shape[0], experts) and has_shape(call["x"], tokens.shape[0], experts)
        and has_shape(scattered["index"], tokens.shape[0], dispatch.top_k)
        and reading.same(reading.exact(scattered["index"], experts), reading.exact(dispatch.ids, experts))
        and are_distinct(reading, scattered["index"], experts, dispatch.top_k)
    )  # fmt: skip


def row_ids(reading: Reading, value: Any, dispatch: Dispatch) -> bool:
    """Whether ``value`` holds the expert id of every row."""
    if dispatch.perm is None:
        return reading.same(value, dispatch.ids)
    call = reading.read(reading.strip(value), "item index", "index")
    if call is None:
        return False
    if call.name == "index":
        if rank(call["x"]) != 1 or not reading.same(call["x"], dispatch.ids):
            return False
        return reading.same(position(reading, call["index"]), dispatch.perm)
    ordered = reading.read(call["x"], "sort", "dim")
    return (
        ordered is not None and call["index"] == 0 and rank(ordered["x"]) == 1
        and ordered["dim"] in (-1, 0) and reading.same(ordered["x"], dispatch.ids)
    )  # fmt: skip


def _bias_ids(reading: Reading, value: Any, dispatch: Dispatch, experts: Any) -> bool:
    """As `row_ids`; ids of no expert may be clamped into range: their rows contribute nothing whatever the bias."""
    value = reading.exact(value, experts)
    call = reading.read(value, "clamp", "min max")
    if call is not None and dispatch.perm is not None and _harmless(call, experts):
        value = call["x"]
    return row_ids(reading, reading.exact(value, experts), dispatch)


def _harmless(clamp: Call, experts: Any) -> bool:
    """Whether a clamp leaves ids in ``[0, E)`` alone."""
    low, high = clamp["min"], clamp["max"]
    return (low is None or low == 0) and (high is None or equal_sizes(high, experts - 1))


def _is_sentinel_mask(reading: Reading, mask: Any, dispatch: Dispatch, experts: Any) -> bool:
    """``ids_of_rows >= E``: rows of no expert, which the fused operator leaves out by itself."""
    call = reading.read(reading.strip(mask), "ge gt", "y")
    if call is None or not has_shape(mask, _rows(dispatch), 1) or not row_ids(reading, call["x"], dispatch):
        return False
    return equal_sizes(call["y"], experts if call.name == "ge" else experts - 1)


# ---- what is known about the ids themselves


def topk_over_experts(reading: Reading, ids: Any, experts: Any) -> Call | None:
    """The topk over ``experts`` columns whose indices ``ids`` are, in another shape or dtype."""
    item = reading.read(reading.exact(ids, experts), "item", "index")
    topk = reading.read(item["x"], "topk", "k dim largest") if item is not None and item["index"] == 1 else None
    scores = example(topk["x"]) if topk is not None else None
    if topk is None or scores is None or topk["dim"] not in (-1, scores.dim() - 1):
        return None
    return topk if equal_sizes(scores.shape[-1], experts) else None


def are_distinct(reading: Reading, ids: Any, experts: Any, top_k: int) -> bool:
    """Whether the ids of one token never repeat: they are the indices of one topk."""
    topk = topk_over_experts(reading, ids, experts)
    return topk is not None and topk["k"] == top_k


def ids_within(reading: Reading, ids: fx.Node, experts: Any) -> fx.Node:
    """``ids`` without a clamp to ``[0, E)`` that cannot change them: they are a topk's indices over E columns."""
    call = reading.read(reading.exact(ids, experts), "clamp", "min max")
    if call is None or not _harmless(call, experts) or topk_over_experts(reading, call["x"], experts) is None:
        return ids
    inner: fx.Node = call["x"]
    return inner


def are_in_range(reading: Reading, ids: Any, experts: Any) -> bool:
    """Whether ``ids`` are proved to be in ``[0, E)``, whatever the data."""
    return _bounded(reading, ids, experts, above=True, depth=_DEPTH)


def are_not_negative(reading: Reading, ids: Any, experts: Any) -> bool:
    """Whether ``ids`` are proved to be 0 or more, whatever the data."""
    return _bounded(reading, ids, experts, above=False, depth=_DEPTH)


def _bounded(reading: Reading, ids: Any, experts: Any, above: bool, depth: int) -> bool:
    """Whether ``ids`` are 0 or more and, if asked ``above``, less than E."""
    value = reading.exact(ids, experts)
    if depth == 0 or reading.call(value) is None:
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
    call = reading.read(value, "mod", "y")
    if call is None:
        return False
    return equal_sizes(call["y"], experts) if above else type(call["y"]) is int and call["y"] > 0


def _picked_from(reading: Reading, value: Any) -> list[Any] | None:
    """The values, and numbers, among which every element of ``value`` is one; None when it is computed otherwise."""
    call = reading.call(value)
    if call is None:
        return None
    if call.name in _PICKS:
        return [call["x"]]
    if call.name in ("cat", "concat", "stack", "hstack", "vstack") and isinstance(call["x"], list | tuple):
        return list(call["x"])
    if call.name == "where" and len(call.args) == 3:
        return list(call.args.values())[1:]
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
