"""How tokens become rows of the first expert product, and the proof that rows, offsets and biases agree."""

from __future__ import annotations

from typing import Any

from torch import fx

from compile_passes.canonical import Canonical, equal_sizes
from compile_passes.match import Dispatch, Product, Refusal
from compile_passes.vocabulary import Call, example, rank

_SAME_IDS = "Sort, count and gather with one topk_ids tensor."


def recognise_dispatch(canon: Canonical, up: Product, down: Product) -> Dispatch | Refusal:
    """The token gather before ``up``, checked against the routing keys, biases and masks of both products."""
    if canon.named(up.anchor, "grouped_mm") is not None:
        found = _sorted_rows(canon, up)
    else:
        found = _repeated_rows(canon, up)
    if isinstance(found, Refusal):
        return found
    return _disagreement(canon, found, up, down) or found


def sorts(canon: Canonical, value: Any) -> fx.Node | None:
    """The ids that ``value`` is the ascending sorting permutation of, or None."""
    call = canon.named(canon.strip(value), "item", "argsort")
    if call is None:
        return None
    if call.name == "item":
        call = canon.named(call["x"], "sort") if call["index"] == 1 else None
    if call is None or call["descending"] or call["dim"] not in (None, -1, 0) or rank(call["x"]) != 1:
        return None
    ids: fx.Node = call["x"]
    return ids


def _sorted_rows(canon: Canonical, up: Product) -> Dispatch | Refusal:
    """``hidden[perm // K]`` with ``perm`` sorting the flattened ids."""
    gather = canon.named(up.rows, "index")
    divided = canon.named(canon.uncast(gather["index"]), "floordiv") if gather is not None else None
    ids = sorts(canon, canon.uncast(divided["x"])) if divided is not None else None
    if gather is None or divided is None or ids is None or not isinstance(divided["y"], int):
        return Refusal(
            up.anchor, "The rows of the first expert product are not tokens gathered by a sort of the expert ids.",
            "Write them as hidden_states[perm // top_k] with perm = ids.reshape(-1).argsort().",
        )  # fmt: skip
    return _dispatch(canon, up, "grouped_mm", gather["x"], ids, canon.strip(divided["x"]), divided["y"])


def _repeated_rows(canon: Canonical, up: Product) -> Dispatch | Refusal:
    """``hidden.repeat_interleave(K, 0)`` or ``hidden[arange(R) // K]``: K copies of every token, not sorted."""
    call = canon.named(up.rows, "repeat_interleave", "index")
    top_k: Any = None
    if call is not None and call.name == "repeat_interleave" and call["dim"] in (0, -2):
        top_k = call["repeats"]
    elif call is not None and call.name == "index":
        divided = canon.named(canon.uncast(call["index"]), "floordiv")
        if divided is not None and canon.named(divided["x"], "arange") is not None:
            top_k = divided["y"]
    if call is None or not isinstance(top_k, int):
        return Refusal(
            up.anchor, "The rows of the first expert product are not tokens repeated top_k times.",
            "Write them as hidden_states.repeat_interleave(top_k, dim=0).",
        )  # fmt: skip
    return _dispatch(canon, up, "batched_mm", call["x"], up.routing_key, None, top_k)


def _dispatch(
    canon: Canonical, up: Product, form: str, source: fx.Node, ids: fx.Node, perm: fx.Node | None, top_k: int
) -> Dispatch | Refusal:
    hidden = _two_dimensional(canon, source)
    tokens, count = example(hidden), example(ids)
    if hidden is None or tokens is None or count is None:
        return Refusal(
            up.anchor, "The gathered hidden states are not [tokens, hidden].", "Flatten them to two dimensions."
        )
    if not equal_sizes(count.numel(), tokens.shape[0] * top_k):
        return Refusal(
            up.anchor, f"There are {count.numel()} expert ids for {tokens.shape[0]} tokens, not top_k={top_k} each.",
            "Gather with perm // topk_ids.shape[1].",
        )  # fmt: skip
    return Dispatch(form, hidden, ids, perm, top_k)


def _two_dimensional(canon: Canonical, value: fx.Node) -> fx.Node | None:
    return value if rank(value) == 2 else None


def _disagreement(canon: Canonical, dispatch: Dispatch, up: Product, down: Product) -> Refusal | None:
    """The first of PATTERNS.md's proofs that fails: one set of ids and one number of experts everywhere."""
    for product in (up, down):
        experts, other = example(product.weight.node), example(up.weight.node)
        if experts is None or other is None or not equal_sizes(experts.shape[0], other.shape[0]):
            return Refusal(product.anchor, "The two expert products have different numbers of experts.", _SAME_IDS)
        if dispatch.perm is None:
            wrong = None if canon.same(product.routing_key, dispatch.ids) else "weights"
        else:
            counted = _counts(canon, product.routing_key, dispatch, experts.shape[0])
            if isinstance(counted, Refusal):
                return counted
            wrong = None if counted else "offsets"
        if (
            wrong is None
            and product.bias_ids is not None
            and not _bias_ids(canon, product.bias_ids, dispatch, experts.shape[0])
        ):
            wrong = "bias"
        if wrong is not None:
            return Refusal(
                product.anchor,
                f"This product takes its {wrong} by other ids than those that order its rows.",
                _SAME_IDS,
            )
        for mask in product.masks:
            if not _is_sentinel_mask(canon, mask, dispatch, experts.shape[0]):
                return Refusal(
                    mask, "Rows are zeroed by a mask that is not `expert id >= number of experts`.", _SAME_IDS
                )
    return None


def _counts(canon: Canonical, offsets: fx.Node, dispatch: Dispatch, experts: Any) -> bool | Refusal:
    """Whether ``offsets`` are the cumulative counts of the dispatched ids over ``experts`` experts."""
    cumulative = canon.named(canon.uncast(offsets), "cumsum")
    if cumulative is None or cumulative["dim"] not in (0, -1):
        return Refusal(
            offsets, "The group offsets are not a cumulative sum of counts per expert.",
            "Compute them as counts.cumsum(0, dtype=torch.int32).",
        )  # fmt: skip
    counts = _through_casts(canon, cumulative["x"])
    call = canon.call(counts)
    if call is None or call.name not in ("histc", "bincount", "sum"):
        return Refusal(
            counts, "The counts per expert are not a histogram of the expert ids.", "Count with torch.histc."
        )
    if call.name == "sum":
        return _one_hot_counts(canon, call, dispatch, experts)
    if call.name == "histc":
        wrong = (
            call["min"] not in (0, None)
            or not equal_sizes(call["bins"], experts)
            or not equal_sizes(call["max"], experts - 1)
        )
    else:
        wrong = not equal_sizes(call["minlength"], experts)
    if wrong:
        return Refusal(
            counts, f"The histogram of expert ids has {call['bins']} bins from {call['min']} to {call['max']}, "
            f"but the weights have {experts} experts.", "Count with bins=num_experts, min=0, max=num_experts - 1.",
        )  # fmt: skip
    counted = _through_casts(canon, call["x"])
    return _row_ids(canon, counted, dispatch) or canon.same(counted, dispatch.ids)


def _one_hot_counts(canon: Canonical, call: Call, dispatch: Dispatch, experts: Any) -> bool:
    """torchtitan: ``zeros(T, E, bool).scatter(1, ids, True).sum(0)``; ids of one token are distinct there."""
    scattered = canon.named(_through_casts(canon, call["x"]), "scatter")
    if scattered is None or call["dim"] not in (0, [0], (0,)) or scattered["dim"] not in (1, -1):
        return False
    shape = example(scattered["x"])
    zeros = canon.named(canon.strip(scattered["x"]), "zeros", "zeros_like")
    one = scattered["src"] in (1, True)
    return (
        zeros is not None and shape is not None and one and equal_sizes(shape.shape[1], experts)
        and canon.same(scattered["index"], dispatch.ids)
    )  # fmt: skip


def _row_ids(canon: Canonical, value: Any, dispatch: Dispatch) -> bool:
    """Whether ``value`` holds the expert id of every row."""
    if dispatch.perm is None:
        return canon.same(value, dispatch.ids)
    call = canon.named(canon.strip(value), "item", "index")
    if call is None:
        return False
    if call.name == "index":
        return canon.same(call["x"], dispatch.ids) and canon.same(call["index"], dispatch.perm)
    ordered = canon.named(call["x"], "sort")
    return ordered is not None and call["index"] == 0 and canon.same(ordered["x"], dispatch.ids)


def _bias_ids(canon: Canonical, value: Any, dispatch: Dispatch, experts: Any) -> bool:
    """As `_row_ids`; ids of no expert may be clamped into range: their rows contribute nothing whatever the bias."""
    call = canon.named(canon.strip(value), "clamp")
    if call is not None and dispatch.perm is not None and _harmless(call, experts):
        value = call["x"]
    return _row_ids(canon, value, dispatch)


def _harmless(clamp: Call, experts: Any) -> bool:
    """Whether a clamp leaves ids in ``[0, E)`` alone."""
    low, high = clamp["min"], clamp["max"]
    return (low is None or low == 0) and (high is None or equal_sizes(high, experts - 1))


def _is_sentinel_mask(canon: Canonical, mask: Any, dispatch: Dispatch, experts: Any) -> bool:
    """``ids_of_rows >= E``: rows of no expert, which the fused operator leaves out by itself."""
    call = canon.named(canon.strip(mask), "ge", "gt")
    if call is None or not _row_ids(canon, call["x"], dispatch):
        return False
    return equal_sizes(call["y"], experts if call.name == "ge" else experts - 1)


def _through_casts(canon: Canonical, value: Any) -> Any:
    """``value`` without any cast: counts and ids are small integers, exact in every dtype used for them."""
    while (call := canon.named(canon.strip(value), "cast")) is not None:
        value = call["x"]
    return canon.strip(value)


def ids_within(canon: Canonical, ids: fx.Node, experts: Any) -> fx.Node:
    """``ids`` without a clamp to ``[0, E)`` that cannot change them: they are a topk's indices over E columns."""
    call = canon.named(canon.strip(ids), "clamp")
    if call is None:
        return ids
    item = canon.named(canon.uncast(call["x"]), "item")
    topk = canon.named(item["x"], "topk") if item is not None and item["index"] == 1 else None
    scores = example(topk["x"]) if topk is not None else None
    if scores is None or topk is None or topk["dim"] not in (None, -1, scores.dim() - 1):
        return ids
    if not _harmless(call, experts) or not equal_sizes(scores.shape[-1], experts):
        return ids
    inner: fx.Node = call["x"]
    return inner
