"""Router: score, select and weigh the top-k experts of every token in one kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from meta.routing import ROUTINGS
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.util import INTERPRETED, cdiv, next_power_of_2, pdl_release, pdl_wait

LEAST = tl.constexpr(-(2**31))  # below the key of every expert, -inf included: taken or absent
MINUS_INF = tl.constexpr(float("-inf"))
KEY_OF_NAN = tl.constexpr(0x7FC00000)  # above +inf, and a NaN again in `_from_key`, its low bits cleared or not
KEY_OF_MINUS_INF = tl.constexpr(-0x7F800001)
EXPERT_BITS = tl.constexpr(511)  # a 16-bit float leaves at least 13 low bits of its fp32 key unused
FEW_PAIRS, FEW_LOGITS = 64, 2048  # one program routes and sorts so few as fast as kernels of their own would
LOGITS_OF_A_WARP = 256
WARPS_RESIDENT = 4096  # about 32 one-warp programs on each multiprocessor


@triton.jit
def _exp(x):
    """exp to about an ulp: Triton's own loses |x| ulps, which fp32 routers would notice."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + _exp(-x))


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))) without cancellation for very negative x."""
    tail = _exp(-tl.abs(x))
    if INTERPRETED:
        u = 1.0 + tail
        log1p = tl.where(u == 1.0, tail, tl.log(u) * tail / tl.where(u == 1.0, 1.0, u - 1.0))
    else:
        log1p = libdevice.log1p(tail)
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sqrt_rn(positive + log1p)


@triton.jit
def _softmax(x, valid):
    """Softmax over axis 1 where `valid`, 0 elsewhere; a row with a NaN or an infinite maximum is all NaN."""
    largest = tl.max(tl.where(valid, x, MINUS_INF), axis=1)
    raised = tl.where(valid, _exp(x - largest[:, None]), 0.0)
    return raised * (1.0 / tl.sum(raised, axis=1))[:, None]


@triton.jit
def _score(logits, exists, SCORE: tl.constexpr):
    """Scores of all experts."""
    if SCORE == "softmax":
        return _softmax(logits, exists)
    elif SCORE == "sigmoid":
        return _sigmoid(logits)
    elif SCORE == "sqrtsoftplus":
        return _sqrt_softplus(logits)
    else:
        return logits


@triton.jit
def _finish_weights(weights, slot, renorm_eps, scale, AFTER: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Weights of the selected experts from their scores, which are the columns in `slot`."""
    if AFTER == "softmax":
        weights = _softmax(weights, slot)
    elif AFTER == "sigmoid":
        weights = _sigmoid(weights)
    if RENORMALIZE:
        total = tl.sum(tl.where(slot, weights, 0.0), axis=1) + renorm_eps
        weights = weights / total[:, None]
    return weights * scale


@triton.jit
def _to_key(x):
    """fp32 -> i32 in the same order, so that reductions are single integer instructions. -0 equals +0.

    Every NaN gets one key, above that of +inf: `torch.topk` ranks NaN greatest, and equals go by expert.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), KEY_OF_NAN)


@triton.jit
def _from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _clear_expert(packed):
    """The key of a 16-bit float again: its low bits are ones when negative, zeros otherwise."""
    return tl.where(packed < 0, packed | EXPERT_BITS, packed & ~EXPERT_BITS)


@triton.jit
def _keep_groups(key, GROUP_SCORE: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr):
    """Whether each group of keys [T, groups, slots] (absent slots LEAST) is among the KEEP best; ties to the lower.

    In keys NaN is a value like any other, so a group that holds one scores NaN and ranks first. A group's rank is the
    number of groups that beat it: all pairs at once instead of KEEP dependent rounds.
    """
    group = tl.arange(0, key.shape[1])
    score = tl.max(key, axis=2)
    if GROUP_SCORE == "top2":
        slot = tl.arange(0, key.shape[2])[None, None, :]
        best = tl.min(tl.where(key == score[:, :, None], slot, key.shape[2]), axis=2)
        second = tl.max(tl.where(slot == best[:, :, None], LEAST, key), axis=2)
        score = _to_key(_from_key(score) + _from_key(second))
    score = tl.where((group < GROUPS)[None, :], score, LEAST)
    mine, other = score[:, :, None], score[:, None, :]
    beaten = (other > mine) | ((other == mine) & (group[None, None, :] < group[None, :, None]))
    return tl.sum(beaten.to(tl.int32), axis=2) < KEEP


@triton.jit
def route_tokens(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    first,
    T,
    stride_t,
    stride_e,
    renorm_eps,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    AFTER: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Route tokens first .. first + BLOCK_T - 1: read logits once, write TOP_K weights and ids each; the first TOP_K
    columns of the result are the ids.

    Columns are experts laid out [BLOCK_G groups, BLOCK_S slots], padded to powers of two. Each of TOP_K rounds takes
    the greatest (key, lowest expert id): two integer reductions, or one when PACKED puts the expert id into the unused
    low bits of a 16-bit float's key. Column k of the result tiles collects round k, so results never change layout
    before the store. Plain softmax selects by logit (the same order), which takes the softmax off the critical path:
    round 0 delivers its maximum.

    Bytes: T (E sizeof(logit) + 8 TOP_K).
    """
    t = first + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_G * BLOCK_S)
    expert = column // BLOCK_S * (E // GROUPS) + column % BLOCK_S
    real = (column % BLOCK_S < E // GROUPS) & (column < GROUPS * BLOCK_S)
    exists = real[None, :]
    at = t.to(tl.int64)[:, None] * stride_t + expert[None, :] * stride_e
    logits = tl.load(logits_ptr + at, mask=(t < T)[:, None] & exists, other=0.0).to(tl.float32)

    PLAIN: tl.constexpr = bias_ptr is None and GROUPS == 1  # the choice is the score
    BY_LOGIT: tl.constexpr = SCORE == "softmax" and PLAIN
    score = _score(logits, exists, "none" if BY_LOGIT else SCORE)
    choice = score
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)[None, :]
    key = tl.where(exists, _to_key(choice), LEAST)
    if GROUPS > 1:
        keep = _keep_groups(tl.reshape(key, [BLOCK_T, BLOCK_G, BLOCK_S]), GROUP_SCORE, GROUPS, TOPK_GROUPS)
        keep = tl.broadcast_to(keep.to(tl.int32)[:, :, None], [BLOCK_T, BLOCK_G, BLOCK_S])
        kept = tl.reshape(keep, [BLOCK_T, BLOCK_G * BLOCK_S]) != 0
        key = tl.where(exists & ~kept, KEY_OF_MINUS_INF, key)

    if PACKED:
        key = tl.where(exists, (key & ~EXPERT_BITS) | (expert ^ EXPERT_BITS)[None, :], LEAST)
    ids = tl.zeros([BLOCK_T, BLOCK_G * BLOCK_S], tl.int32)
    picks = tl.zeros([BLOCK_T, BLOCK_G * BLOCK_S], tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=1)
        if PACKED:
            taken = key == best[:, None]
        else:
            chosen = tl.min(tl.where(key == best[:, None], expert[None, :], E), axis=1)
            taken = (expert[None, :] == chosen[:, None]) & exists
            ids = tl.where(column[None, :] == k, chosen[:, None], ids)
        key = tl.where(taken, LEAST, key)
        if not PLAIN:
            best = tl.sum(tl.where(taken, score.to(tl.int32, bitcast=True), 0), axis=1)  # the unbiased score's bits
        picks = tl.where(column[None, :] == k, best[:, None], picks)
        if BY_LOGIT and k == 0:
            largest = _from_key(_clear_expert(best) if PACKED else best)
            total = tl.sum(tl.where(exists, _exp(logits - largest[:, None]), 0.0), axis=1)
    if PACKED:
        ids = (picks & EXPERT_BITS) ^ EXPERT_BITS
        picks = _clear_expert(picks)
    if PLAIN:
        weights = _from_key(picks)
    else:
        weights = picks.to(tl.float32, bitcast=True)

    slot = (column < TOP_K)[None, :]
    if BY_LOGIT:
        # One NaN or +inf, or nothing but -inf, makes every score NaN, and equal scores go to the lowest experts.
        ids = tl.where((total == total)[:, None], ids, column[None, :])
        weights = _exp(weights - largest[:, None]) * (1.0 / total)[:, None]
    weights = _finish_weights(weights, slot, renorm_eps, scale, AFTER, RENORMALIZE)
    to = t.to(tl.int64)[:, None] * TOP_K + column[None, :]
    stored = (t < T)[:, None] & slot
    tl.store(weights_ptr + to, weights, mask=stored)
    tl.store(ids_ptr + to, ids, mask=stored)
    return ids


@triton.jit(do_not_specialize=["T"])
def _topk_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    T,
    stride_t,
    stride_e,
    renorm_eps,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    AFTER: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program routes BLOCK_T tokens, see `route_tokens`."""
    pdl_wait(PDL)
    pdl_release(PDL)
    route_tokens(
        logits_ptr,
        bias_ptr,
        weights_ptr,
        ids_ptr,
        tl.program_id(0) * BLOCK_T,
        T,
        stride_t,
        stride_e,
        renorm_eps,
        scale,
        E,
        TOP_K,
        SCORE,
        AFTER,
        GROUP_SCORE,
        GROUPS,
        TOPK_GROUPS,
        RENORMALIZE,
        BLOCK_T,
        BLOCK_G,
        BLOCK_S,
        PACKED,
    )


def is_few(tokens: int, top_k: int, experts: int) -> bool:
    """Whether tokens are so few that one program should do all of it."""
    return 0 < tokens * top_k <= FEW_PAIRS and _logits(tokens, experts) <= FEW_LOGITS


def _logits(tokens: int, experts: int) -> int:
    """How many a tile that holds all tokens' logits has."""
    return next_power_of_2(tokens) * max(32, next_power_of_2(experts))


def kernel_constants(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    routing: str,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
) -> dict[str, Any]:
    """The compile-time arguments of `route_tokens`, and the warps of a program."""
    T, E = router_logits.shape
    row = ROUTINGS[routing]
    groups = num_groups if row.group is not None else 1
    block_g = next_power_of_2(groups)
    block_s = next_power_of_2(max(E // groups, cdiv(max(32, top_k), block_g)))
    # Few tokens are one program's, here as in `route.route_few`: the order of a sum, and so its bits, go with the tile.
    few, num_warps = is_few(T, top_k, E), 1
    block_t = next_power_of_2(T if few else min(cdiv(T, WARPS_RESIDENT), max(1, 512 // (block_g * block_s))))
    if few and _logits(T, E) > LOGITS_OF_A_WARP:
        num_warps = min(8, block_t)
    packed = (
        router_logits.dtype in (torch.bfloat16, torch.float16)
        and row.score in ("softmax", "none")
        and correction_bias is None
        and groups == 1
        and E <= 512
    )
    return {
        "E": E,
        "TOP_K": top_k,
        "SCORE": row.score,
        "AFTER": row.after,
        "GROUP_SCORE": row.group,
        "GROUPS": groups,
        "TOPK_GROUPS": topk_groups,
        "RENORMALIZE": renormalize,
        "BLOCK_T": block_t,
        "BLOCK_G": block_g,
        "BLOCK_S": block_s,
        "PACKED": packed,
        "num_warps": num_warps,
    }


def fused_topk(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    *,
    top_k: int,
    routing: str,
    renormalize: bool,
    renorm_eps: float,
    num_groups: int,
    topk_groups: int,
    scale: float,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route every token in one kernel: one-warp programs, or a single one where tokens are few.

    Args:
        router_logits: [T, E] any float dtype, any strides.
        correction_bias: [E] float or None; moves the selection, not the weights.
        routing: a name of `meta.routing.ROUTINGS`.
        pdl: launch as a programmatic dependent of the previous kernel.

    Returns:
        (topk_weights f32 [T, K], topk_ids i32 [T, K]), by descending choice; ties go to the lower expert id.
    """
    T = router_logits.shape[0]
    weights = torch.empty((T, top_k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((T, top_k), dtype=torch.int32, device=router_logits.device)
    if T == 0 or top_k == 0:
        return weights, ids
    constants = kernel_constants(router_logits, correction_bias, top_k, routing, renormalize, num_groups, topk_groups)
    bias = None if correction_bias is None else correction_bias.contiguous()
    launch(
        _topk_kernel,
        (cdiv(T, constants["BLOCK_T"]),),
        router_logits,
        bias,
        weights,
        ids,
        T,
        *router_logits.stride(),
        renorm_eps,
        scale,
        **constants,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return weights, ids
