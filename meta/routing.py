"""Routers: from logits to the K selected experts and their weights. One row and one eager body serve every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Select = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Routing:
    """One routing method.

    Attributes:
        name: the name that crosses operator schemas.
        score: what turns logits into scores over all experts: "softmax", "sigmoid", "sqrtsoftplus" or "none".
        after: what is applied to the K selected scores: "none", "softmax" or "sigmoid".
        group: how a group of experts is ranked: None (no groups), "max", or "top2" (sum of its two best).
        supports_bias: whether a correction bias may steer the selection.
    """

    name: str
    score: str
    after: str = "none"
    group: str | None = None
    supports_bias: bool = True


ROUTINGS: dict[str, Routing] = {
    row.name: row
    for row in (
        Routing("softmax", "softmax"),
        Routing("topk_softmax", "none", after="softmax", supports_bias=False),
        Routing("sigmoid", "sigmoid"),
        Routing("sqrtsoftplus", "sqrtsoftplus"),
        Routing("topk_sigmoid", "none", after="sigmoid"),
        Routing("softmax_group_max", "softmax", group="max"),
        Routing("softmax_group_top2", "softmax", group="top2"),
        Routing("sigmoid_group_max", "sigmoid", group="max"),
        Routing("sigmoid_group_top2", "sigmoid", group="top2"),
    )
}


#: Of which the operators' gradients, in plain tensor code and in Triton, know the derivatives.
DIFFERENTIABLE_SCORES = ("none", "softmax", "sigmoid", "sqrtsoftplus")
DIFFERENTIABLE_AFTER = ("none", "softmax", "sigmoid")


def route(
    router_logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    routing: str = "softmax",
    renormalize: bool = True,
    renorm_eps: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    select: Select | None = None,
) -> tuple[Tensor, Tensor]:
    """Select ``top_k`` experts per token, as the routers' papers write it.

    ``score`` all experts; ``choice = score + bias``; keep the best ``topk_groups`` groups; take the K best choices
    (ties: lowest expert id; order: descending choice); the weight is the UNBIASED score of the selected expert, then
    ``after``, ``w / (sum(w) + renorm_eps)``, ``* scale``.

    A NaN choice ranks above +inf, as in ``torch.topk``, and a group that holds one above every other group; NaN choices
    are equal, so the lowest id comes first and ids never repeat nor leave ``[0, E)``. Weights are what the formula
    gives: all NaN for a softmax over a NaN, a +inf or nothing but -inf, and NaN where renormalising divides 0 by 0.

    Args:
        router_logits: ``[T, E]`` any float dtype.
        correction_bias: ``[E]`` or None.
        dtype: dtype of the computation; float64 makes an oracle of this function.
        select: a backend's own :func:`selected`.

    Returns:
        topk_weights ``[T, K]`` in ``dtype`` and topk_ids ``[T, K]`` int32.
    """
    row, select = ROUTINGS[routing], select or selected
    scores_TE = _score(router_logits, row.score, dtype)
    choice_TE = scores_TE if correction_bias is None else scores_TE + correction_bias.to(dtype)
    if row.group is not None and num_groups > 1:
        choice_TE = _limit_groups(choice_TE, row.group, num_groups, topk_groups, select)
    shares = renormalize and row.after == "none" and not renorm_eps and top_k <= 2  # a sum of two has no order
    weights_TK, ids_TK = select(choice_TE, scores_TE, top_k, shares)
    return finish_weights(weights_TK, row.after, renormalize and not shares, renorm_eps, scale), ids_TK


def selected(choice_TE: Tensor, scores_TE: Tensor, k: int, shares: bool) -> tuple[Tensor, Tensor]:
    """Scores of the k largest choices, divided by their sum where they are ``shares``, and int32 ids, ``[T, K]``."""
    ids_TK = first_k(choice_TE, k)
    weights_TK = finish_weights(scores_TE.gather(1, ids_TK), "none", shares, 0.0, 1.0)
    return weights_TK, ids_TK.to(torch.int32, memory_format=torch.contiguous_format)


def _score(logits_TE: Tensor, score: str, dtype: torch.dtype) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits_TE, dim=-1, dtype=dtype)
    if score == "sigmoid":
        return torch.sigmoid(logits_TE.to(dtype))
    if score == "sqrtsoftplus":
        return F.softplus(logits_TE.to(dtype)).sqrt()
    return logits_TE.to(dtype)


def first_k(choice: Tensor, k: int) -> Tensor:
    """Indices of the k largest entries of the last dimension, NaN first, descending, equals by ascending index."""
    return choice.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _limit_groups(choice_TE: Tensor, group: str, num_groups: int, topk_groups: int, select: Select) -> Tensor:
    """-inf everywhere but in the best ``topk_groups`` of ``num_groups`` equal runs of experts."""
    tokens, experts = choice_TE.shape
    grouped = choice_TE.view(tokens, num_groups, experts // num_groups)
    best = grouped.topk(1 if group == "max" else 2, dim=-1).values.sum(dim=-1)
    ids = select(best, best, topk_groups, False)[1].long()
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, ids, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


def finish_weights(selected_TK: Tensor, after: str, renormalize: bool, renorm_eps: float, scale: float) -> Tensor:
    """Weights from the K selected scores: ``after``, renormalisation, scale."""
    if after == "softmax":
        selected_TK = torch.softmax(selected_TK, dim=-1)
    elif after == "sigmoid":
        selected_TK = torch.sigmoid(selected_TK)
    if renormalize:
        total = selected_TK.sum(dim=-1, keepdim=True)
        selected_TK = selected_TK / (total + renorm_eps if renorm_eps else total)
    return selected_TK if scale == 1.0 else selected_TK * scale
