"""Routers: from the routing weights and ids back to the logits, in the terms of `fused_topk`.

A router that is not recognised stays in the graph, and only the experts are replaced; so each function here may say no
freely. The logits are taken as they are: the projection that makes them keeps its precision.

Every axis is judged on a whole shape: scores are ``[..., E]`` and weights ``[..., K]`` whose leading sizes multiply to
T, so that in row-major order the last axis is the experts of one token, however often the value was reshaped before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_passes.equal import no_narrower
from compile_passes.match import Refusal, Router, in_words
from compile_passes.patterns.ids import Choice, exact_ids, topk_over_experts
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, same_shape, single
from meta.routing import ROUTINGS

_CURE = "Nothing to do: the experts are fused all the same."
_TAKES = ("gather", "take_along_dim")
_MASKED = "the scores are masked by something else than a group limit"


@dataclass(frozen=True)
class _Weights:
    """What is done to the K selected scores: ``after``, renormalisation, scale. ``selected`` holds those scores.

    ``absolute``: they are divided by the sum of their absolute values.
    """

    selected: fx.Node
    absolute: bool = False
    after: str = "none"
    renormalize: bool = False
    renorm_eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class _Groups:
    """A group limit: how groups are ranked (None: there is no limit), how many there are, how many are kept."""

    ranking: str | None = None
    count: int = 1
    kept: int = 1


def recognise_router(
    reading: Reading, weights: fx.Node, ids: fx.Node, *, tokens: Any, experts: Any, top_k: int, floor: torch.dtype
) -> Router | Refusal:
    """The router that makes ``weights`` and ``ids``, or the node at which it stops being a known one.

    Args:
        tokens, experts, top_k: T, E and K of the block.
        floor: the narrowest dtype that a cast of scores may go to.
    """
    return _RouterReader(reading, tokens, experts, top_k, floor).router(weights, ids)


def kept(node: fx.Node, reason: str) -> Refusal:
    """The refusal of a router that stays in the graph."""
    return Refusal(node, f"The router stays in the graph: {reason}.", _CURE)


class _RouterReader:
    def __init__(self, reading: Reading, tokens: Any, experts: Any, top_k: int, floor: torch.dtype) -> None:
        self.reading, self.tokens, self.experts, self.top_k, self.floor = reading, tokens, experts, top_k, floor

    def router(self, weights: fx.Node, ids: fx.Node) -> Router | Refusal:
        inner, rounded = self._rounded(weights)
        finished = self._finishing(inner)
        if isinstance(finished, Refusal):
            return finished
        topk = topk_over_experts(self.reading, ids, self.experts)
        if topk is None or topk.largest is not True or topk.k != self.top_k or not self._scores_all(topk.scores):
            return kept(ids, "the expert ids are not the indices of a topk over the experts")
        selected = self._scores(finished, ids, topk)
        if isinstance(selected, Refusal):
            return selected
        found = self._selection(*selected, topk.scores)
        if isinstance(found, Refusal):
            return found
        row = ROUTINGS[found.routing]
        if finished.absolute and (row.score, row.after) == ("none", "none"):
            return kept(weights, "the weights are divided by the sum of their absolute values, and may be negative")
        router = replace(
            found, top_k=self.top_k, renormalize=finished.renormalize, renorm_eps=finished.renorm_eps,
            scale=finished.scale, rounded=rounded,
        )  # fmt: skip
        return self._typed(router)

    def _rounded(self, weights: fx.Node) -> tuple[fx.Node, torch.dtype | None]:
        """The weights before a last cast below the floor, to the dtype of logits that autocast made, and that dtype."""
        value = self._uncast(weights)
        call, made = self.reading.read(value, "cast"), example(value)
        source = example(call["x"]) if call is not None else None
        if call is None or made is None or source is None or made.device != source.device:
            return weights, None
        floats = source.dtype.is_floating_point and made.dtype.is_floating_point
        return (call["x"], made.dtype) if floats else (weights, None)

    def _typed(self, router: Router) -> Router | Refusal:
        """The router, if sizes and dtypes are those of `fused_topk`."""
        logits = example(router.logits)
        if logits is None or not logits.dtype.is_floating_point or logits.dtype.itemsize not in (2, 4):
            return kept(router.logits, "the logits are not fp32, bf16 or fp16")
        if not self._per_token(router.logits, self.experts):
            return kept(router.logits, "the logits are not one row of the experts' scores for every token")
        if router.bias is not None and not ROUTINGS[router.routing].supports_bias:
            return kept(router.bias, f"routing {router.routing} takes no correction bias")
        return router

    # ---- shapes

    def _per_token(self, value: Any, *sizes: Any) -> bool:
        """Whether ``value`` is ``[..., *sizes]`` with one such block for every token."""
        tensor = example(value)
        if tensor is None or tensor.dim() < len(sizes) + (len(sizes) > 0):
            return False
        count = self.tokens
        for size in sizes:
            count = count * size
        return equal_sizes(tensor.numel(), count) and all(map(equal_sizes, tensor.shape[-len(sizes) :], sizes))

    def _scores_all(self, value: Any) -> bool:
        return self._per_token(value, self.experts)

    def _uncast(self, value: Any) -> Any:
        return self.reading.uncast(value, self.floor)

    # ---- from the weights to the selected scores

    def _finishing(self, weights: fx.Node) -> _Weights | Refusal:
        """Peel casts, constant factors and one division by the sum off the weights."""
        state = _Weights(self._uncast(weights))
        while True:
            value = state.selected
            call = self.reading.call(value)
            if call is None:
                return kept(value, f"the weights come from {in_words(value)}")
            if call.name in ("item", *_TAKES):
                return state
            found = self._finishing_step(state, value)
            if found is None:
                return kept(value, f"the weights pass through {call.name}")
            if isinstance(found, Refusal) or found.after != "none":
                return found
            state = found

    def _finishing_step(self, state: _Weights, value: fx.Node) -> _Weights | Refusal | None:
        """The state before the last operation on the weights."""
        call = self.reading.read(value, "mul div softmax sigmoid", "y dim dtype")
        if call is None or not self._is_no_narrower(value):
            return None
        if call.name in ("mul", "div") and not state.renormalize and (found := _constant_factor(call)) is not None:
            rest, constant = found
            if call.name == "div" and constant == 0:
                return kept(value, "the weights are divided by 0")
            scale = state.scale * constant if call.name == "mul" else state.scale / constant
            return replace(state, selected=self._uncast(rest), scale=scale)
        divided = None if state.renormalize else self._division(call)
        if divided is not None:
            found_sum = self._sum_of(divided[1], divided[0])
            if found_sum is None:
                return kept(value, "the weights are divided by something else than their sum")
            eps, absolute = found_sum
            selected = self._uncast(divided[0])
            return replace(state, selected=selected, renormalize=True, renorm_eps=eps, absolute=absolute)
        if call.name in ("softmax", "sigmoid") and self._is_selected(call["x"]):
            if call.name == "softmax" and not (self._per_token(call["x"], self.top_k) and _over_last(call)):
                return kept(value, "the softmax is not over the selected experts")
            return replace(state, selected=self._uncast(call["x"]), after=call.name)
        return None

    def _division(self, call: Call) -> tuple[Any, Any] | None:
        """(dividend, divisor) of a division, or of a product with a reciprocal."""
        if call.name == "div":
            return call["x"], call["y"]
        for one, other in (("x", "y"), ("y", "x")) if call.name == "mul" else ():
            inverse = self.reading.read(self._uncast(call[other]), "reciprocal")
            if inverse is not None and self._is_no_narrower(call[other]):
                return call[one], inverse["x"]
        return None

    def _is_no_narrower(self, value: Any) -> bool:
        tensor = example(value)
        return tensor is not None and no_narrower(tensor.dtype, self.floor)

    def _sum_of(self, denominator: Any, weights: Any) -> tuple[float, bool] | None:
        """(eps, whether of absolute values) when ``denominator`` is ``weights.sum(-1, keepdim=True) + eps``: one sum
        for every token's K weights.
        """
        divided = example(weights)
        if divided is None or not self._per_token(weights, self.top_k):
            return None
        if not has_shape(denominator, *divided.shape[:-1], 1):
            return None
        value, eps = self._uncast(denominator), 0.0
        call = self.reading.read(value, "add", "y")
        if call is not None and (found := _constant_factor(call)) is not None:
            value, eps = self._uncast(found[0]), found[1]
        total = self.reading.read(value, "sum vector_norm", "dim keepdim dtype y")
        if total is None or not _over_last(total) or not self._per_token(total["x"], self.top_k):
            return None
        if not self._is_no_narrower(value):
            return None
        absolute = total.name == "vector_norm"
        if absolute and total["y"] != 1:
            return None
        summed = self._uncast(total["x"])
        if not absolute and (inner := self.reading.read(summed, "abs")) is not None:
            summed, absolute = self._uncast(inner["x"]), True
        return (eps, absolute) if self.reading.same(summed, self._uncast(weights)) else None

    def _is_selected(self, value: Any) -> bool:
        return self.reading.named(self._uncast(value), "item", *_TAKES) is not None

    def _scores(self, weights: _Weights, ids: fx.Node, topk: Choice) -> tuple[fx.Node, str] | Refusal:
        """The scores over all experts from which the weights were selected, and what is applied after the selection."""
        item = self.reading.read(weights.selected, "item", "index")
        if item is not None and item["index"] == 0 and item["x"] is topk.node:
            return topk.scores, weights.after
        call = self.reading.read(weights.selected, " ".join(_TAKES), "dim index")
        if call is not None and _over_last(call) and self._scores_all(call["x"]) and self._are_ids(call["index"], ids):
            chosen = weights.after == "none" and self._is_softmax_of_chosen(call["x"], ids, topk)
            return (topk.scores, "softmax") if chosen else (self._uncast(call["x"]), weights.after)
        return kept(weights.selected, "the weights are not the selected scores")

    def _are_ids(self, value: Any, ids: fx.Node) -> bool:
        """Whether ``value`` [..., K] is the ids."""
        same = exact_ids(self.reading, value, self.experts) is exact_ids(self.reading, ids, self.experts)
        return same and self._per_token(value, self.top_k)

    def _is_softmax_of_chosen(self, value: Any, ids: fx.Node, topk: Choice) -> bool:
        """Whether ``value`` [..., E] is the softmax of what topk chose from, -inf wherever it did not choose."""
        value = self._uncast(value)
        call = self.reading.read(value, "softmax", "dim dtype")
        if call is None or not _over_last(call) or not self._scores_all(call["x"]) or not self._is_no_narrower(value):
            return False
        inner = self._uncast(call["x"])
        put = self.reading.read(inner, "scatter", "dim index src")
        if put is not None and _over_last(put) and self._are_ids(put["index"], ids):
            blank, item = self.reading.named(self.reading.strip(put["x"]), "full"), self._uncast(put["src"])
            source = self.reading.read(item, "item", "index")
            best = source is not None and source["index"] == 0 and source["x"] is topk.node
            return blank is not None and blank["fill"] == -torch.inf and best and self._per_token(item, self.top_k)
        limited = self.reading.read(inner, "masked_fill", "mask value")
        unchosen = None if limited is None else self.reading.read(self.reading.exact(limited["mask"], 2), "not")
        if limited is None or unchosen is None or limited["value"] != -torch.inf or not self._scores_all(inner):
            return False
        chosen = self.reading.read(self.reading.exact(unchosen["x"], 2), "scatter", "dim index src")
        return (
            chosen is not None and _dtype(unchosen["x"]) == torch.bool and _over_last(chosen)
            and self._scores_all(limited["mask"]) and self._are_ids(chosen["index"], ids)
            and chosen["src"] in (1, 1.0, True) and self.reading.is_zeros(chosen["x"])
            and self._uncast(limited["x"]) is self._uncast(topk.scores)
        )  # fmt: skip

    # ---- from the scores to the logits

    def _selection(self, scores: fx.Node, after: str, choice: Any) -> Router | Refusal:
        """Scores, correction bias and group limit: what `topk` was taken of."""
        choice, scores = self._uncast(choice), self._uncast(scores)
        limited = self.reading.read(choice, "masked_fill", "mask value")
        groups = _Groups()
        if limited is not None:
            same_values = choice is scores
            found = self._groups(limited, choice)
            if isinstance(found, Refusal):
                return found
            groups, choice = found, self._uncast(limited["x"])
            scores = choice if same_values else scores
        bias = None
        if choice is not scores:
            bias = self._bias(choice, scores)
            if bias is None:
                return kept(choice, "experts are selected by something else than score + bias [experts]")
        if limited is not None and limited["value"] == 0 and bias is not None and groups.count != groups.kept:
            return kept(choice, "excluded groups get score 0, which a biased score may fall below")
        return self._named_routing(scores, after, groups, bias)

    def _bias(self, choice: Any, scores: fx.Node) -> fx.Node | None:
        """The correction bias ``[E]`` when ``choice`` is ``scores + bias``, the same bias for every token."""
        added = self.reading.read(choice, "add", "y")
        if added is None or not self._scores_all(choice):
            return None
        for one, other in (("x", "y"), ("y", "x")):
            if self._uncast(added[one]) is scores and same_shape(added[one], choice):
                shape = example(added[other])
                if shape is None or not has_shape(added[other], *[1] * (shape.dim() - 1), self.experts):
                    return None
                root = self._uncast(added[other])
                nodes = (root, *self.reading.reshapes(added[other]))
                return next((node for node in nodes if has_shape(node, self.experts)), None)
        return None

    def _named_routing(self, scores: fx.Node, after: str, groups: _Groups, bias: fx.Node | None) -> Router | Refusal:
        logits, score = self._score_function(scores)
        if groups.count == groups.kept:  # every group is kept
            groups = _Groups()
        for row in ROUTINGS.values():
            if (row.score, row.after, row.group) == (score, after, groups.ranking):
                return Router(logits, bias, 0, row.name, num_groups=groups.count, topk_groups=groups.kept)
        return kept(scores, f"no routing has scores={score}, after={after}, groups={groups.ranking}")

    def _score_function(self, scores: fx.Node) -> tuple[fx.Node, str]:
        """The logits and the name of the score function that turns them into ``scores``."""
        call = self.reading.read(scores, "softmax sigmoid sqrt", "dim dtype")
        if call is None or not self._is_no_narrower(scores):
            return scores, "none"
        if call.name == "softmax" and _over_last(call) and self._scores_all(call["x"]):
            return self._uncast(call["x"]), "softmax"
        if call.name == "sigmoid":
            return self._uncast(call["x"]), "sigmoid"
        inner = self.reading.read(self._uncast(call["x"]), "softplus") if call.name == "sqrt" else None
        return (scores, "none") if inner is None else (self._uncast(inner["x"]), "sqrtsoftplus")

    # ---- group limits

    def _groups(self, limited: Call, result: Any) -> _Groups | Refusal:
        """The limit of ``choice.masked_fill(~mask_of_kept_groups, -inf or 0)``."""
        reason = kept(limited["x"], _MASKED)
        inverted = self.reading.read(self.reading.exact(limited["mask"], 2), "not")
        fill = limited["value"]
        if (
            inverted is None
            or _dtype(inverted["x"]) != torch.bool
            or type(fill) not in (int, float)
            or fill not in (-torch.inf, 0)
        ):
            return reason
        if not self._scores_all(result) or not self._scores_all(limited["x"]) or not self._scores_all(limited["mask"]):
            return reason
        found = self._group_mask(inverted["x"])
        if found is None:
            return reason
        mask, count = found
        scattered = self.reading.read(mask, "scatter", "dim index src")
        if scattered is None or not _over_last(scattered) or scattered["src"] not in (1, 1.0, True):
            return reason
        item = self.reading.read(self.reading.strip(scattered["index"]), "item", "index")
        best = self.reading.read(item["x"], "topk", "k dim") if item is not None and item["index"] == 1 else None
        if (
            not self.reading.is_zeros(scattered["x"])
            or best is None
            or type(best["k"]) is not int
            or not _over_last(best)
        ):
            return reason
        ranking = self._ranking(best["x"], limited["x"], count)
        indices = self._per_token(scattered["index"], best["k"])
        return _Groups(ranking, count, best["k"]) if ranking is not None and indices else reason

    def _group_mask(self, mask: Any) -> tuple[fx.Node, int] | None:
        """(mask ``[T, G]`` of groups, G), repeated for every expert of a group, groups being runs of experts."""
        if not self._scores_all(mask):
            return None
        wide = self.reading.exact(mask, 2)
        call, shape = self.reading.read(wide, "expand"), example(wide)
        if call is None or shape is None or shape.dim() != 3 or type(shape.shape[1]) is not int:
            return None
        _, count, size = shape.shape
        if not self._per_token(wide, count, size) or not has_shape(call["x"], shape.shape[0], count, 1):
            return None
        narrow = self.reading.exact(call["x"], 2)
        return (narrow, count) if self._per_token(narrow, count) and equal_sizes(count * size, self.experts) else None

    def _ranking(self, group_scores: Any, choice: Any, count: int) -> str | None:
        """ "top2" or "max": how ``choice.view(-1, G, E/G)`` was reduced over its last dimension."""
        if not self._per_token(group_scores, count):
            return None
        call = self.reading.read(self.reading.strip(group_scores), "sum item amax", "dim index keepdim")
        if call is None:
            return None
        if call.name == "sum":
            item = self.reading.read(self.reading.strip(call["x"]), "item", "index")
            best = self.reading.read(item["x"], "topk", "k dim") if item is not None and item["index"] == 0 else None
            if best is None or best["k"] != 2 or not _over_last(call) or not self._per_token(call["x"], count, 2):
                return None
            name = "top2"
        else:
            best = call if call.name == "amax" else self.reading.read(call["x"], "max", "dim keepdim")
            if best is None or (call.name == "item" and call["index"] != 0):
                return None
            name = "max"
        if not _over_last(best) or not self._grouped(best["x"], count):
            return None
        return name if self.reading.same(self._uncast(best["x"]), self._uncast(choice)) else None

    def _grouped(self, value: Any, count: int) -> bool:
        shape = example(value)
        return (
            shape is not None
            and self._per_token(value, count, shape.shape[-1])
            and equal_sizes(count * shape.shape[-1], self.experts)
        )


def _dtype(value: Any) -> torch.dtype | None:
    tensor = example(value)
    return None if tensor is None else tensor.dtype


def _constant_factor(call: Call) -> tuple[Any, float] | None:
    """(the other operand, the number) of a call with one number; a number is no dividend."""
    for one, other in (("x", "y"), ("y", "x")):
        if type(call[other]) in (int, float) and (call.name != "div" or other == "y"):
            return call[one], float(call[other])
    return None


def _over_last(call: Call) -> bool:
    """Whether ``call`` reduces, gathers from or selects along the last dimension."""
    tensor, dim = example(call["x"]), single(call["dim"])
    return tensor is not None and type(dim) is int and dim in (-1, tensor.dim() - 1)
