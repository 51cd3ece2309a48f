"""Expert GEMMs over sorted rows (the grouped format): [R, K] x [E, N, K] -> [R, N], activation in the epilogue."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.mm_tile import compute_tile, swizzle
from moe_ops.kernels.triton.util import cdiv, find_tile, on_device, pdl_release, pdl_wait


@triton.jit
def _grouped_mm_kernel(
    a,
    a_desc,
    a_scale,
    row_to_pair,
    offsets,
    w,
    w_desc,
    w_scale,
    bias,
    out,
    out_scale,
    m_tiles,
    stride_am,
    alpha,
    limit,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LOADS: tl.constexpr,
    A_QUANT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M sorted rows of one expert times BLOCK_N rows of its weight.

    Grid: (ceil(R / BLOCK_M) + min(E, R)) * ceil(N / out_columns), a bound from shapes only; a program past the last
    tile returns after one load of `offsets`.
    Bytes: sum over experts with rows of N_w * K * w_size, + R * K + R * N activations. FLOPs: 2 * R * N_w * K.
    With TOP_K > 0 the rows of `a` are tokens: row r reads token row_to_pair[r] // TOP_K, so no permuted copy exists.
    """
    BLOCK_M: tl.constexpr = BLOCK[0]
    BLOCK_N: tl.constexpr = BLOCK[1]
    GROUP_M: tl.constexpr = BLOCK[3]
    BLOCK_E: tl.constexpr = BLOCK[4]
    out_columns: tl.constexpr = BLOCK_N if GLU == 0 else BLOCK_N // 2
    N_TILES: tl.constexpr = (N + out_columns - 1) // out_columns
    pdl_wait(PDL)
    pdl_release(PDL)
    pid_m, pid_n = swizzle(tl.program_id(0), m_tiles, N_TILES, GROUP_M)
    expert, row_start, row_end, valid = find_tile(offsets, pid_m, E, BLOCK_E, BLOCK_M)
    if valid:
        rows = row_start + tl.arange(0, BLOCK_M)
        row_valid = rows < row_end
        if TOP_K > 0:
            a_row = tl.load(row_to_pair + rows, mask=row_valid, other=0) // TOP_K
        else:
            a_row = rows
        n_start = pid_n * out_columns
        compute_tile(
            a,
            a_desc,
            a_scale,
            a_row,
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


def grouped_mm(
    a: torch.Tensor,
    mm: ExpertMM,
    offsets: torch.Tensor,
    config: MMConfig,
    *,
    num_rows: int,
    row_to_pair: torch.Tensor | None = None,
    top_k: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one grouped expert GEMM.

    Args:
        a: [R, K] sorted rows, or [T, K] tokens when `row_to_pair` is given; unit stride along K.
        mm: weight, bias, scales, activation and output form (see `ExpertMM`).
        offsets: [E] i32 cumulative row ends.
        num_rows: R.
        row_to_pair: [R] i32, pair (t * top_k + k) of each sorted row.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        (out [R, N], out_scale [R, ceil(N / 128)] f32, empty unless the epilogue quantises).
    """
    E = mm.num_experts
    out, out_scale = mm.allocate((num_rows,), a)
    if num_rows == 0:
        return out, out_scale
    launch = mm.prepare(a, config, gathered=row_to_pair is not None)
    m_tiles = cdiv(num_rows, config.block_m) + min(E, num_rows)
    with on_device(a):
        _grouped_mm_kernel[(m_tiles * launch.n_tiles,)](
            a,
            launch.a_desc,
            mm.rows_scale,
            row_to_pair,
            offsets,
            mm.weight,
            launch.w_desc,
            mm.weight_scale,
            mm.bias,
            out,
            out_scale,
            m_tiles,
            a.stride(0),
            mm.alpha,
            mm.limit,
            E,
            mm.out_features,
            mm.in_features,
            top_k,
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
