"""Expert GEMMs over the batched format: [E, C, K] x [E, N, K] -> [E, C, N], work bounded by expert_num_tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.mm_tile import compute_tile
from moe_ops.kernels.triton.util import cdiv, on_device, pdl_release, pdl_wait


@triton.jit
def _batched_mm_kernel(
    a,
    a_desc,
    a_scale,
    expert_num_tokens,
    w,
    w_desc,
    w_scale,
    bias,
    out,
    out_scale,
    capacity,
    stride_am,
    alpha,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LOADS: tl.constexpr,
    A_QUANT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M slots of one expert times BLOCK_N rows of its weight.

    Grid: (n tiles, ceil(C / BLOCK_M), E). A program whose slots lie past the expert's count reads that count and
    returns: rows past the count are neither read into a result nor written.
    Bytes: experts with tokens * N_w * K * w_size + 2 * sum(counts) * (K + N). FLOPs: 2 * sum(counts) * N_w * K.
    """
    BLOCK_M: tl.constexpr = BLOCK[0]
    BLOCK_N: tl.constexpr = BLOCK[1]
    out_columns: tl.constexpr = BLOCK_N if GLU == 0 else BLOCK_N // 2
    pdl_wait(PDL)
    pdl_release(PDL)
    expert = tl.program_id(2)
    slot = tl.program_id(1) * BLOCK_M
    count = tl.load(expert_num_tokens + expert)
    if slot < count:
        slots = slot + tl.arange(0, BLOCK_M)
        row_valid = slots < count
        row_start = expert * capacity + slot
        rows = row_start + tl.arange(0, BLOCK_M)
        n_start = tl.program_id(0) * out_columns
        compute_tile(
            a,
            a_desc,
            a_scale,
            rows,
            row_valid,
            row_start,
            stride_am,
            w,
            w_desc,
            w_scale,
            bias,
            out,
            out_scale,
            expert,
            rows,
            n_start,
            alpha,
            limit,
            N,
            K,
            STRIDES,
            BLOCK,
            GLU,
            ACTIVATION,
            LOADS,
            A_QUANT,
            QUANTIZE,
        )


def batched_mm(
    batch: torch.Tensor, mm: ExpertMM, expert_num_tokens: torch.Tensor, config: MMConfig, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one batched expert GEMM.

    Args:
        batch: [E, C, K], contiguous.
        mm: weight, bias, scales, activation and output form (see `ExpertMM`).
        expert_num_tokens: [E] i32, rows in use per expert.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        (out [E, C, N], out_scale [E, C, ceil(N / 128)] f32, empty unless the epilogue quantises). Rows past an
        expert's count are not written.
    """
    E, C, K = batch.shape
    out, out_scale = mm.allocate((E, C), batch)
    if C == 0:
        return out, out_scale
    a = batch.view(E * C, K)
    launch = mm.prepare(a, config, gathered=False)
    with on_device(a):
        _batched_mm_kernel[(launch.n_tiles, cdiv(C, config.block_m), E)](
            a,
            launch.a_desc,
            mm.rows_scale,
            expert_num_tokens,
            mm.weight,
            launch.w_desc,
            mm.weight_scale,
            mm.bias,
            out,
            out_scale,
            C,
            K,
            mm.alpha,
            mm.limit,
            mm.out_features,
            mm.in_features,
            launch.strides,
            launch.block,
            mm.glu,
            mm.activation,
            launch.loads,
            launch.a_quant,
            mm.quantize_output,
            pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            launch_pdl=pdl,
        )
    return out, out_scale
