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
        # By shares, as the square of a small total is 0.
        grad = (grad - (grad * (raw / total)).sum(dim=-1, keepdim=True)) / total
    if row.after == "softmax":
        grad = raw * (grad - (grad * raw).sum(dim=-1, keepdim=True))
    elif row.score == "softmax":
        probabilities = torch.softmax(logits, dim=-1)
        centred = torch.zeros_like(logits).scatter(1, ids, grad) - (grad * raw).sum(dim=-1, keepdim=True)
        grad_logits: Tensor = probabilities * centred
        return grad_logits.to(call.router_logits.dtype)
    elif row.after == "sigmoid":
        grad = grad * raw * (1 - raw)
    dense = torch.zeros_like(logits).scatter(1, ids, grad)
    if row.score == "sigmoid":
        scores = torch.sigmoid(logits)
        dense = dense * scores * (1 - scores)
    elif row.score == "sqrtsoftplus":
        dense = dense * torch.sigmoid(logits) / (2 * F.softplus(logits).sqrt())
    return dense.to(call.router_logits.dtype)


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
