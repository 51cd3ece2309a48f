"""Routing, sorting and quantising a few tokens in one kernel: at decode every launch shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from meta.schemes import ActivationFormat
from moe_ops.counters import Row
from moe_ops.kernels.triton.act_quant import beside, beside_arguments, quantize_beside
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.topk import kernel_constants, route_tokens
from moe_ops.kernels.triton.util import (
    cdiv,
    count_pairs,
    held_expert,
    is_counted,
    next_power_of_2,
    pdl_release,
    pdl_wait,
)

ABSENT = tl.constexpr(-1)  # bits of results that are not there yet: a NaN that no conversion makes
ABSENT_AT_ONCE = tl.constexpr(4096)


@triton.jit
def leave_absent(h, part, COUNT, BLOCK: tl.constexpr):
    """Part number `part` of what has COUNT results that are not there yet."""
    at = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(h + at, ABSENT, mask=at < COUNT)


@dataclass(frozen=True)
class Routed:
    """Tokens that are routed, sorted by expert, and quantised if their products take them so.

    Args:
        topk_weights: f32 [T, K], or None when the tokens were multiplied already.
        topk_ids: i32 [T, K], or None when the rest was made from them.
        offsets: i32 [E]; row_to_pair: i32 [R], or None when the tokens are sorted rows already; pair_to_row: i32 [T, K]
            (see `permute`); None without sorting.
        tokens: [T, H], or sorted rows [R, H]; tokens_scale: [., groups of H] or None.
    """

    topk_weights: torch.Tensor | None
    topk_ids: torch.Tensor | None
    offsets: torch.Tensor | None
    row_to_pair: torch.Tensor | None
    pair_to_row: torch.Tensor | None
    tokens: torch.Tensor
    tokens_scale: torch.Tensor | None


@triton.jit
def _sort_few(
    ids,
    expert_map_ptr,
    offsets_ptr,
    row_to_pair_ptr,
    pair_to_row_ptr,
    T,
    E,
    E_GLOBAL,
    load_ptr,
    counted,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Place all pairs of T tokens whose ids are the first TOP_K columns of `ids` [BLOCK_T, columns], without memory in
    between: by `permute`'s keys, all compared with all at once.

    Comparisons: R (R + E). Bytes: 8 R + 4 E.
    """
    BLOCK_T: tl.constexpr = ids.shape[0]
    t = tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.gather(ids, tl.broadcast_to(k, [BLOCK_T, BLOCK_K]), axis=1)
    R = T * TOP_K
    pair = tl.reshape(tl.where((t < T) & (k < TOP_K), t * TOP_K + k, R), [BLOCK_T * BLOCK_K])
    is_pair = pair < R
    expert = held_expert(tl.where(is_pair, tl.reshape(chosen, [BLOCK_T * BLOCK_K]), -1), expert_map_ptr, E, E_GLOBAL)
    key = tl.where(is_pair, expert * R + pair, 0x7FFFFFFF)
    row = tl.sum((key[:, None] < key[None, :]).to(tl.int32), axis=0)  # (lanes lie along axis 1)
    held = expert < E
    tl.store(row_to_pair_ptr + row, tl.where(held, pair, -1), mask=is_pair)
    tl.store(pair_to_row_ptr + pair, tl.where(held, row, -1), mask=is_pair)
    e = tl.arange(0, BLOCK_E)
    ends = tl.sum((key[:, None] < ((e + 1) * R)[None, :]).to(tl.int32), axis=0)
    tl.store(offsets_ptr + e, ends, mask=e < E)
    count_pairs(load_ptr, counted, expert, tl.full([BLOCK_T * BLOCK_K], 1, tl.int32), is_pair & held)


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
    load_ptr,
    absent_ptr,
    ABSENT_COUNT,
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
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
    BESIDE_PROGRAMS: tl.constexpr,
    ABSENT_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0: route all T tokens, then sort their pairs if there is room for the offsets. The next BESIDE_PROGRAMS:
    quantise some groups each. The others: make results of `one_token` absent.

    EARLY: the kernel behind it waits for this one prior to any access, and takes long to start.

    Bytes: T (E sizeof(logit) + 16 TOP_K) + 4 E, and T H (sizeof(element) + 1) when quantising.
    """
    if EARLY:
        pdl_release(PDL)
    pdl_wait(PDL)
    if not EARLY:
        pdl_release(PDL)
    if tl.program_id(0) == 0:
        counted = is_counted(load_ptr, True)
        ids = route_tokens(
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
            _sort_few(
                ids,
                expert_map_ptr,
                offsets_ptr,
                row_to_pair_ptr,
                pair_to_row_ptr,
                T,
                E_HELD,
                E_GLOBAL,
                load_ptr,
                counted,
                TOP_K,
                BLOCK_K,
                BLOCK_E,
            )
    elif tl.program_id(0) <= BESIDE_PROGRAMS:
        quantize_beside(tl.program_id(0) - 1, hidden_ptr, q_ptr, scale_ptr, T, H, stride_h, GROUP)
    elif absent_ptr is not None:
        leave_absent(absent_ptr, tl.program_id(0) - 1 - BESIDE_PROGRAMS, ABSENT_COUNT, ABSENT_BLOCK)


def route_few(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    num_experts: int | None,
    expert_map: torch.Tensor | None,
    *,
    form: ActivationFormat | None,
    top_k: int,
    renorm_eps: float,
    scale: float,
    pdl: bool,
    load: Row | None = None,
    absent: torch.Tensor | None = None,
    **routing: Any,
) -> Routed:
    """`fused_topk`, `sort_pairs` and `quantize_rows` in one kernel, where `topk.is_few`; the same numbers.

    Args:
        hidden_states: [T, H], unit stride along H, T >= 1; router_logits: [T, E_global] any strides.
        num_experts: experts held here, None to leave the pairs unsorted; expert_map: [E_global] or None.
        form: of the quantised tokens, None to leave them as they are.
        load: the layer's counters, to which sorted pairs are added, or None.
        absent: results that `one_token` makes, which the kernel makes absent before, or None.
        routing: the other options of `fused_topk`.
    """
    T, device = hidden_states.shape[0], hidden_states.device
    ids, row_to_pair, pair_to_row = (torch.empty((T, top_k), dtype=torch.int32, device=device) for _ in range(3))
    offsets = None if num_experts is None else torch.empty(num_experts, dtype=torch.int32, device=device)
    weights = torch.empty((T, top_k), dtype=torch.float32, device=device)
    rows = beside(hidden_states, form)
    constants = kernel_constants(router_logits, correction_bias, top_k, **routing)
    programs = 0 if rows is None else rows.programs
    absents = 0 if absent is None else absent.numel()
    launch(
        _route_few_kernel,
        (1 + programs + cdiv(absents, ABSENT_AT_ONCE.value),),
        router_logits,
        None if correction_bias is None else correction_bias.contiguous(),
        weights,
        ids,
        None if expert_map is None else expert_map.contiguous(),
        offsets,
        row_to_pair,
        pair_to_row,
        **beside_arguments(rows),
        T=T,
        E_HELD=num_experts or 0,
        E_GLOBAL=0 if expert_map is None else expert_map.shape[0],
        stride_t=router_logits.stride(0),
        stride_e=router_logits.stride(1),
        renorm_eps=renorm_eps,
        scale=scale,
        load_ptr=load,
        absent_ptr=absent,
        ABSENT_COUNT=absents,
        **constants,
        BLOCK_K=next_power_of_2(top_k),
        BLOCK_E=next_power_of_2(num_experts or 1),
        BESIDE_PROGRAMS=programs,
        ABSENT_BLOCK=ABSENT_AT_ONCE.value,
        EARLY=absent is not None,
        PDL=pdl,
        launch_pdl=pdl,
    )
    tokens = (hidden_states, None) if rows is None else (rows.quantized, rows.scale)
    return Routed(weights, ids, offsets, row_to_pair.view(-1), pair_to_row, *tokens)
