"""Routers: from the routing weights and ids back to the logits, in the terms of `fused_topk`.

A router that is not recognised stays in the graph, and only the experts are replaced; so each function here may say no
freely. The logits are taken as they are: the projection that makes them keeps its precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from compile_passes.canonical import Canonical, equal_sizes
from compile_passes.match import Refusal, Router
from compile_passes.vocabulary import Call, example
from meta.routing import ROUTINGS

_CURE = "Nothing to do: the experts are fused all the same. A row in meta/routing.py would fuse this router too."


@dataclass(frozen=True)
class _Weights:
    """What is done to the K selected scores: ``after``, renormalisation, scale. ``selected`` holds those scores."""

    selected: fx.Node
    after: str = "none"
    renormalize: bool = False
    renorm_eps: float = 0.0
    scale: float = 1.0


def recognise_router(canon: Canonical, weights: fx.Node, ids: fx.Node, top_k: int) -> Router | Refusal:
    """The router that makes ``weights`` and ``ids``, or the node at which it stops being a known one."""
    finished = _finishing(canon, weights)
    if isinstance(finished, Refusal):
        return finished
    item = canon.named(canon.uncast(ids), "item")
    topk = canon.named(item["x"], "topk") if item is not None and item["index"] == 1 else None
    if topk is None or not _over_last(canon, topk) or topk["largest"] is False or topk["k"] != top_k:
        return _kept(ids, "the expert ids are not the indices of a topk over the experts")
    selected = _scores(canon, finished, canon.uncast(ids), topk)
    if isinstance(selected, Refusal):
        return selected
    scores, after = selected
    found = _selection(canon, scores, after, topk["x"])
    if isinstance(found, Refusal):
        return found
    router = replace(
        found, top_k=top_k, renormalize=finished.renormalize, renorm_eps=finished.renorm_eps, scale=finished.scale
    )
    return _plain_router(canon, router, ids)


def _kept(node: fx.Node, reason: str) -> Refusal:
    return Refusal(node, f"The router stays in the graph: {reason}.", _CURE)


def _plain_router(canon: Canonical, router: Router, ids: fx.Node) -> Router | Refusal:
    """A softmax over the K chosen logits already sums to one; sizes and dtypes have to be those of `fused_topk`."""
    logits = example(router.logits)
    if logits is None or not logits.dtype.is_floating_point or logits.dtype.itemsize > 4:
        return _kept(router.logits, "the logits are not fp32, bf16 or fp16")
    bias = None if router.bias is None else example(router.bias)
    if router.bias is not None and (
        bias is None or bias.dim() != 1 or not equal_sizes(bias.shape[0], logits.shape[-1])
    ):
        return _kept(router.bias, "the correction bias is not [experts]")
    if router.bias is not None and not ROUTINGS[router.routing].supports_bias:
        return _kept(router.bias, f"routing {router.routing} takes no correction bias")
    return router


def _finishing(canon: Canonical, weights: fx.Node) -> _Weights | Refusal:
    """Peel casts, constant factors and one division by the sum off the weights."""
    state = _Weights(canon.uncast(weights))
    while True:
        value = state.selected
        call = canon.call(value)
        if call is None:
            return _kept(value, f"the weights come from {value.name}")
        if call.name == "mul" and (factored := _constant_factor(call)) is not None and not state.renormalize:
            rest, constant = factored
            state = replace(state, selected=canon.uncast(rest), scale=state.scale * constant)
        elif call.name == "div" and isinstance(call["y"], int | float) and not state.renormalize:
            state = replace(state, selected=canon.uncast(call["x"]), scale=state.scale / call["y"])
        elif call.name == "div" and not state.renormalize and state.after == "none":
            eps = _sum_of(canon, call["y"], call["x"])
            if eps is None:
                return _kept(value, "the weights are divided by something else than their sum")
            state = replace(state, selected=canon.uncast(call["x"]), renormalize=True, renorm_eps=eps)
        elif call.name in ("softmax", "sigmoid") and state.after == "none" and _is_selected(canon, call["x"]):
            if call.name == "softmax" and not _over_last(canon, call):
                return _kept(value, "the softmax is not over the selected experts")
            return replace(state, selected=canon.uncast(call["x"]), after=call.name)
        elif call.name in ("item", "gather"):
            return state
        else:
            return _kept(value, f"the weights pass through {call.name}")


def _constant_factor(call: Call) -> tuple[Any, float] | None:
    for one, other in (("x", "y"), ("y", "x")):
        if isinstance(call[other], int | float):
            return call[one], float(call[other])
    return None


def _sum_of(canon: Canonical, denominator: Any, weights: Any) -> float | None:
    """eps when ``denominator`` is ``weights.sum(-1, keepdim=True) + eps``."""
    value, eps = canon.uncast(denominator), 0.0
    call = canon.named(value, "add")
    if call is not None and call["alpha"] in (None, 1) and (found := _constant_factor(call)) is not None:
        value, eps = canon.uncast(found[0]), found[1]
    total = canon.named(value, "sum")
    if total is None or not total["keepdim"] or not _over_last(canon, total):
        return None
    if not canon.same(canon.uncast(total["x"]), canon.uncast(weights)):
        return None
    return eps


def _is_selected(canon: Canonical, value: Any) -> bool:
    return canon.named(canon.uncast(value), "item", "gather") is not None


def _scores(canon: Canonical, weights: _Weights, ids: fx.Node, topk: Call) -> tuple[fx.Node, str] | Refusal:
    """The scores over all experts from which the weights were selected, and what is applied after the selection."""
    call = canon.call(weights.selected)
    if call is not None and call.name == "item" and call["index"] == 0:
        values = canon.named(call["x"], "topk")
        if values is topk:
            return topk["x"], weights.after
    if call is not None and call.name == "gather" and _over_last(canon, call) and canon.uncast(call["index"]) is ids:
        return canon.uncast(call["x"]), weights.after
    return _kept(weights.selected, "the weights are not the selected scores")


def _selection(canon: Canonical, scores: fx.Node, after: str, choice: Any) -> Router | Refusal:
    """Scores, correction bias and group limit: what `topk` was taken of."""
    choice, scores = canon.uncast(choice), canon.uncast(scores)
    limited = canon.named(choice, "masked_fill")
    groups: tuple[str | None, int, int] = (None, 1, 1)
    if limited is not None:
        same_values = choice is scores
        found = _groups(canon, limited)
        if isinstance(found, Refusal):
            return found
        groups, choice = found, canon.uncast(limited["x"])
        scores = choice if same_values else scores
    bias = None
    if choice is not scores:
        added = canon.named(choice, "add")
        sides = ("x", "y") if added is not None and canon.uncast(added["x"]) is scores else ("y", "x")
        if added is None or canon.uncast(added[sides[0]]) is not scores or added["alpha"] not in (None, 1):
            return _kept(choice, "experts are selected by something else than score + bias")
        bias = canon.strip(canon.uncast(added[sides[1]]))
    if limited is not None and limited["value"] == 0 and bias is not None and groups[1] != groups[2]:
        return _kept(choice, "excluded groups get score 0, which a biased score may fall below")
    return _named_routing(canon, scores, after, groups, bias)


def _named_routing(
    canon: Canonical, scores: fx.Node, after: str, groups: tuple[str | None, int, int], bias: fx.Node | None
) -> Router | Refusal:
    logits, score = _score_function(canon, scores)
    group, num_groups, topk_groups = groups
    if num_groups == topk_groups:  # every group is kept
        group, num_groups, topk_groups = None, 1, 1
    for row in ROUTINGS.values():
        if (row.score, row.after, row.group) == (score, after, group):
            return Router(logits, bias, 0, row.name, num_groups=num_groups, topk_groups=topk_groups)
    return _kept(scores, f"no routing has scores={score}, after={after}, groups={group}")


def _score_function(canon: Canonical, scores: fx.Node) -> tuple[fx.Node, str]:
    """The logits and the name of the score function that turns them into ``scores``."""
    call = canon.call(scores)
    if call is not None and call.name == "softmax" and _over_last(canon, call):
        return canon.uncast(call["x"]), "softmax"
    if call is not None and call.name == "sigmoid":
        return canon.uncast(call["x"]), "sigmoid"
    if call is not None and call.name == "sqrt":
        inner = canon.named(canon.uncast(call["x"]), "softplus")
        if inner is not None and inner["beta"] in (None, 1) and inner["threshold"] in (None, 20):
            return canon.uncast(inner["x"]), "sqrtsoftplus"
    return scores, "none"


def _over_last(canon: Canonical, call: Call) -> bool:
    """Whether ``call`` reduces, gathers from or selects along the last dimension."""
    tensor, dim = example(call["x"]), call["dim"]
    if isinstance(dim, list | tuple) and len(dim) == 1:
        (dim,) = dim
    if dim is None and call.name == "topk":
        dim = -1
    return tensor is not None and isinstance(dim, int) and dim in (-1, tensor.dim() - 1)


def _groups(canon: Canonical, limited: Call) -> tuple[str | None, int, int] | Refusal:
    """(ranking, groups, kept groups) of ``choice.masked_fill(~mask_of_kept_groups, -inf or 0)``."""
    node = limited["x"]
    reason = _kept(node, "the scores are masked by something else than a group limit")
    inverted = canon.named(canon.uncast(limited["mask"]), "not")
    if inverted is None or limited["value"] not in (float("-inf"), 0, 0.0):
        return reason
    mask = _group_mask(canon, inverted["x"])
    scattered = canon.named(mask, "scatter")
    if scattered is None or scattered["dim"] not in (1, -1) or scattered["src"] not in (1, 1.0, True):
        return reason
    zeros = canon.named(canon.strip(scattered["x"]), "zeros_like", "zeros")
    item = canon.named(canon.strip(scattered["index"]), "item")
    kept = canon.named(item["x"], "topk") if item is not None and item["index"] == 1 else None
    if zeros is None or kept is None or not isinstance(kept["k"], int):
        return reason
    ranking = _ranking(canon, canon.strip(kept["x"]), limited["x"])
    if ranking is None:
        return reason
    return ranking[0], ranking[1], kept["k"]


def _ranking(canon: Canonical, group_scores: fx.Node, choice: Any) -> tuple[str, int] | None:
    """("top2" or "max", number of groups) of ``choice.view(-1, G, E/G)`` reduced over its last dimension."""
    call = canon.named(group_scores, "sum", "item", "amax", "getattr")
    if call is None:
        return None
    if call.name == "sum":
        item = canon.named(canon.strip(call["x"]), "item")
        best = canon.named(item["x"], "topk") if item is not None and item["index"] == 0 else None
        if best is None or best["k"] != 2:
            return None
        name, grouped = "top2", best["x"]
    elif call.name == "amax":
        name, grouped = "max", call["x"]
    else:
        best = canon.named(call["x"], "max") if call["index"] in (0, "values") else None
        if best is None:
            return None
        name, grouped = "max", best["x"]
    shape = example(grouped)
    if shape is None or shape.dim() != 3 or not canon.same(canon.uncast(grouped), canon.uncast(choice)):
        return None
    return (name, shape.shape[1]) if isinstance(shape.shape[1], int) else None


def _group_mask(canon: Canonical, mask: Any) -> Any:
    """The mask ``[T, G]`` of groups that was repeated for every expert of a group, groups being runs of experts."""
    mask = canon.strip(mask)
    while (call := canon.named(mask, "cast", "expand")) is not None:
        source = example(call["x"])
        if call.name == "expand" and (source is None or source.dim() != 3 or source.shape[-1] != 1):
            return mask
        mask = canon.strip(call["x"])
    return mask
