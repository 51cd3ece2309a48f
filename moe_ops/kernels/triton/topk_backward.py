"""The router's gradient: from the weights of the selected experts to the logits of all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meta.calls import RouterOptions
from meta.routing import ROUTINGS
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.topk import _sigmoid, _softmax, _sqrt_softplus
from moe_ops.kernels.triton.util import next_power_of_2, round_to

OF_A_WARP = 1024  # pairs of a selected expert and an expert


@triton.jit
def _less_mean(g, shares, exists):
    """(g less its mean by shares, which add up to 1; g of the largest share). That one's g is taken off all first: what
    is left where one share is nearly all then comes of the small ones, not of how that one was rounded.
    """
    place = tl.arange(0, g.shape[1])[None, :]
    largest = tl.argmax(tl.where(exists, shares, -1.0), axis=1)[:, None]
    of_largest = tl.sum(tl.where(place == largest, g, 0.0), axis=1)[:, None]
    rest = tl.where(exists, g - of_largest, 0.0)
    return rest - tl.sum(rest * shares, axis=1)[:, None], of_largest


@triton.jit
def _topk_backward_kernel(
    grad,
    logits,
    ids,
    out,
    stride_t,
    stride_e,
    renorm_eps,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    AFTER: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: `moe_ops.router_gradient.topk_backward` of one token. Bytes: (2 E + 3 K) 4 or less, from L2."""
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    exists, slot = e < E, k < TOP_K
    row = logits + token * stride_t
    x = tl.load(row + e * stride_e, mask=exists, other=0.0).to(tl.float32)
    expert = tl.load(ids + token * TOP_K + k, mask=slot, other=0)
    picked = tl.load(row + expert * stride_e, mask=slot, other=0.0).to(tl.float32)
    g = tl.load(grad + token * TOP_K + k, mask=slot, other=0.0).to(tl.float32) * scale
    chosen = (expert[:, :, None] == e[:, None, :]) & slot[:, :, None]
    scores = x
    if SCORE == "softmax":
        scores = _softmax(x, exists)
        raw = tl.sum(tl.where(chosen, scores[:, None, :], 0.0), axis=2)
    elif SCORE == "sqrtsoftplus":
        raw = _sqrt_softplus(picked)
    elif AFTER == "softmax":
        raw = _softmax(picked, slot)
    elif SCORE == "sigmoid" or AFTER == "sigmoid":
        raw = _sigmoid(picked)
    else:
        raw = picked
    raw = tl.where(slot, raw, 0.0)
    if RENORMALIZE:
        total = tl.sum(raw, axis=1)[:, None] + renorm_eps
        # By shares, as the square of a small total is 0; they add up to 1 with that of `renorm_eps`, whose g is 0.
        share, of_eps = raw / total, renorm_eps / total
        mean = tl.sum(g * share, axis=1)[:, None]
        g, of_largest = _less_mean(g, share, slot)
        g = tl.where(slot, (g + of_largest * of_eps) / total, 0.0)
    if AFTER == "softmax":
        g = raw * _less_mean(g, raw, slot)[0]
    elif AFTER == "sigmoid":
        g = g * raw * (1.0 - raw)
    dense = tl.sum(tl.where(chosen, g[:, :, None], 0.0), axis=1)
    if SCORE == "softmax":
        rest = _less_mean(dense, scores, exists)[0]
        if RENORMALIZE:
            # Where the largest score is of no weight, the mean of the others is not rounded away: what all have in
            # common is in no weight, but beside `renorm_eps`.
            of_weight = tl.max(raw, axis=1)[:, None] >= tl.max(scores, axis=1)[:, None]
            rest = tl.where(of_weight, rest, dense - of_eps * mean)
        dense = scores * rest
    elif SCORE == "sigmoid":
        scores = _sigmoid(x)
        dense = dense * scores * (1.0 - scores)
    elif SCORE == "sqrtsoftplus":
        dense = dense * _sigmoid(x) / (2.0 * _sqrt_softplus(x))
    tl.store(out + token * E + e, round_to(dense, out.dtype.element_ty), mask=exists)


def topk_backward(
    grad_weights: torch.Tensor, router_logits: torch.Tensor, topk_ids: torch.Tensor, options: RouterOptions
) -> torch.Tensor:
    """As :func:`moe_ops.router_gradient.topk_backward`, in one kernel.

    Args:
        grad_weights: [T, K] any float dtype; router_logits: [T, E] any float dtype and strides; topk_ids: [T, K] i32.
    """
    T, E = router_logits.shape
    out = router_logits.new_empty((T, E))
    if not out.numel():
        return out
    row, K = ROUTINGS[options.routing], options.top_k
    block_k, block_e = next_power_of_2(K), max(32, next_power_of_2(E))
    launch(
        _topk_backward_kernel,
        (T,),
        grad_weights.contiguous(),
        router_logits,
        topk_ids.contiguous(),
        out,
        *router_logits.stride(),
        options.renorm_eps,
        options.scale,
        E,
        K,
        row.score,
        row.after,
        options.renormalize,
        block_k,
        block_e,
        num_warps=min(8, max(1, block_k * block_e // OF_A_WARP)),
    )
    return out
