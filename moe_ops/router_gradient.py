"""The gradient of ``fused_topk`` in plain tensor code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meta.calls import RouteBackwardCall
from meta.routing import ROUTINGS


def fused_topk_backward(call: RouteBackwardCall) -> Tensor:
    """Gradient of the logits of :func:`meta.routing.route` from that of its weights; the selection is constant.

    Returns:
        ``[T, E]`` in the dtype of the logits; NaN where autograd through the formula gives NaN, which includes scores
        that are NaN and were not selected: their derivative is multiplied by a gradient of 0.
    """
    options, row = call.options, ROUTINGS[call.options.routing]
    logits, ids = call.router_logits.float(), call.topk_ids.long()
    grad = call.grad_weights * options.scale
    raw = _selected(row.score, row.after, logits, ids)
    if options.renormalize:
        total = raw.sum(dim=-1, keepdim=True) + options.renorm_eps
        # By shares, as the square of a small total is 0; they add up to 1 with that of `renorm_eps`, whose grad is 0.
        share, of_eps = raw / total, options.renorm_eps / total
        mean = (grad * share).sum(dim=-1, keepdim=True)
        rest, of_largest = _less_mean(grad, share)
        grad = (rest + of_largest * of_eps) / total
    if row.after == "softmax":
        grad = raw * _less_mean(grad, raw)[0]
    elif row.score == "softmax":
        probabilities = torch.softmax(logits, dim=-1)
        of_all = torch.zeros_like(logits).scatter(1, ids, grad)
        rest, _ = _less_mean(of_all, probabilities)
        if options.renormalize:
            # Where the largest score is of no weight, the mean of the others is not rounded away: what all have in
            # common is in no weight, but beside `renorm_eps`.
            of_weight = raw.amax(dim=-1, keepdim=True) >= probabilities.amax(dim=-1, keepdim=True)
            rest = torch.where(of_weight, rest, of_all - of_eps * mean)
        return (probabilities * rest).to(call.router_logits.dtype)
    elif row.after == "sigmoid":
        grad = grad * raw * (1 - raw)
    dense = torch.zeros_like(logits).scatter(1, ids, grad)
    if row.score == "sigmoid":
        scores = torch.sigmoid(logits)
        dense = dense * scores * (1 - scores)
    elif row.score == "sqrtsoftplus":
        dense = dense * torch.sigmoid(logits) / (2 * F.softplus(logits).sqrt())
    return dense.to(call.router_logits.dtype)


def _less_mean(grad: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """``grad`` less its mean by shares that add up to 1, and ``grad`` of the largest share, ``[T, 1]``, which is taken
    off first: where one share is nearly all, what is left then comes of the small ones, not of how that one is rounded.
    """
    of_largest = grad.gather(1, shares.argmax(dim=1, keepdim=True))
    rest = grad - of_largest
    return rest - (rest * shares).sum(dim=1, keepdim=True), of_largest


def _selected(score: str, after: str, logits: Tensor, ids: Tensor) -> Tensor:
    """Weights of the selected experts before renormalisation."""
    picked = logits.gather(1, ids)
    if score == "softmax":
        return torch.softmax(logits, dim=-1).gather(1, ids)
    if score == "sqrtsoftplus":
        return F.softplus(picked).sqrt()
    if after == "softmax":
        return torch.softmax(picked, dim=-1)
    return torch.sigmoid(picked) if "sigmoid" in (score, after) else picked
