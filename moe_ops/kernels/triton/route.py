"""Routing, sorting and quantising a few tokens in one kernel: at decode every launch shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from meta.schemes import SCHEMES
from moe_ops.kernels.triton.act_quant import quantize_groups
from moe_ops.kernels.triton.permute import place_items
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.topk import kernel_constants, route_tokens
from moe_ops.kernels.triton.util import cdiv, next_power_of_2, pdl_release, pdl_wait

GROUPS_PER_PROGRAM = 4


@dataclass(frozen=True)
class Routed:
    """Tokens that are routed, sorted by expert, and quantised if the scheme says so.

    Args:
        topk_weights: f32 [T, K], or None when the tokens were multiplied already.
        topk_ids: i32 [T, K], or None when the rest was made from them.
        offsets: i32 [E]; row_to_pair: i32 [R], or None when the tokens are sorted rows already; pair_to_row: i32 [T, K]
            (see `permute`); None without sorting.
        tokens: [T, H], or sorted rows [R, H]; tokens_scale: f32 [., groups of H] or None.
    """

    topk_weights: torch.Tensor | None
    topk_ids: torch.Tensor | None
    offsets: torch.Tensor | None
    row_to_pair: torch.Tensor | None
    pair_to_row: torch.Tensor | None
    tokens: torch.Tensor
    tokens_scale: torch.Tensor | None


@triton.jit(do_not_specialize=["T"])
def _route_few_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    expert_map_ptr,
    offsets_ptr,
    row_to_pair_ptr,
    pair_to_row_ptr,
    hidden_ptr,
    q_ptr,
    scale_ptr,
    T,
    E_HELD,
    E_GLOBAL,
    H,
    stride_h,
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
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTIZED_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0, one warp: route all T tokens, then sort their pairs if there is room for the offsets. The others:
    quantise some groups each.

    Bytes: T (E sizeof(logit) + 16 TOP_K) + 4 E, and T H (sizeof(element) + 1) when quantising.
    """
    pdl_wait(PDL)
    pdl_release(PDL)
    if tl.program_id(0) == 0:
        route_tokens(
            logits_ptr,
            bias_ptr,
            weights_ptr,
            ids_ptr,
            0,
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
        if offsets_ptr is not None:
            tl.debug_barrier()  # the ids just written are read back by other lanes
            R = T * TOP_K
            for start in range(0, R + E_HELD, BLOCK_P):
                place_items(
                    start + tl.arange(0, BLOCK_P),
                    ids_ptr,
                    expert_map_ptr,
                    offsets_ptr,
                    row_to_pair_ptr,
                    pair_to_row_ptr,
                    R,
                    E_HELD,
                    E_GLOBAL,
                    0,
                    False,
                    BLOCK_P,
                    BLOCK_Q,
                )
    elif QUANTIZED_GROUPS > 0:
        first_group = (tl.program_id(0) - 1) * QUANTIZED_GROUPS
        groups = (H + GROUP - 1) // GROUP
        quantize_groups(first_group, hidden_ptr, q_ptr, scale_ptr, T, H, groups, stride_h, GROUP, QUANTIZED_GROUPS)


def route_few(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_experts: int | None,
    expert_map: torch.Tensor | None,
    *,
    scheme: str,
    top_k: int,
    renorm_eps: float,
    scale: float,
    pdl: bool,
    **routing: Any,
) -> Routed:
    """`fused_topk`, `sort_pairs` and `quantize_rows` in one kernel, where `topk.is_few`; the same numbers.

    Args:
        hidden_states: [T, H], unit stride along H, T >= 1; router_logits: [T, E_global] any strides.
        num_experts: experts held here, None to leave the pairs unsorted; expert_map: [E_global] or None.
        scheme: a name of `meta.schemes.SCHEMES`.
        routing: the other options of `fused_topk`.
    """
    (T, H), device = hidden_states.shape, hidden_states.device
    ids, row_to_pair, pair_to_row = (torch.empty((T, top_k), dtype=torch.int32, device=device) for _ in range(3))
    offsets = None if num_experts is None else torch.empty(num_experts, dtype=torch.int32, device=device)
    weights = torch.empty((T, top_k), dtype=torch.float32, device=device)
    tokens, tokens_scale, programs = hidden_states, None, 1
    form = SCHEMES[scheme].rows
    if form is not None:
        groups = form.scale_width(H)
        tokens = torch.empty((T, H), dtype=form.dtype, device=device)
        tokens_scale = torch.empty((T, groups), dtype=torch.float32, device=device)
        programs += cdiv(T * groups, GROUPS_PER_PROGRAM)
    constants = kernel_constants(router_logits, correction_bias, top_k, **routing)
    launch(
        _route_few_kernel,
        (programs,),
        router_logits,
        None if correction_bias is None else correction_bias.contiguous(),
        weights,
        ids,
        None if expert_map is None else expert_map.contiguous(),
        offsets,
        row_to_pair,
        pair_to_row,
        hidden_states,
        tokens if tokens_scale is not None else None,
        tokens_scale,
        T,
        num_experts or 0,
        0 if expert_map is None else expert_map.shape[0],
        H,
        hidden_states.stride(0),
        *router_logits.stride(),
        renorm_eps,
        scale,
        **{**constants, "BLOCK_T": next_power_of_2(T)},  # all of them, as `topk.fused_topk` has few
        BLOCK_P=32,
        BLOCK_Q=max(16, next_power_of_2(T * top_k)),
        GROUP=1 if form is None else form.group,
        QUANTIZED_GROUPS=0 if tokens_scale is None else GROUPS_PER_PROGRAM,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return Routed(weights, ids, offsets, row_to_pair.view(-1), pair_to_row, tokens, tokens_scale)
