"""Expert GEMMs in both formats, activation in the epilogue.

Grouped: sorted rows [R, K] x [E, N, K] -> [R, N]. Batched: [E, C, K] x [E, N, K] -> [E, C, N], work bounded by
expert_num_tokens. They differ in one thing, which rows belong to which expert, so one kernel serves both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.mm_tile import compute_tile, swizzle
from moe_ops.kernels.triton.util import cdiv, find_tile, on_device, pdl_release, pdl_wait


@triton.jit(do_not_specialize=["m_tiles", "num_rows"])
def _expert_mm_kernel(
    a,
    a_desc,
    a_scale,
    row_to_pair,
    extents,
    w,
    w_desc,
    w_scale,
    bias,
    out,
    out_scale,
    m_tiles,
    num_rows,
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
    QUANTIZED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BATCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of one expert times BLOCK_N rows of its weight.

    Grid: (bound on row tiles) * ceil(N / out_columns), from shapes only; a program past the last tile returns after
    one load of the experts' `extents`: cumulative row ends, or BATCHED, how many of each block's `num_rows` are used.
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
    expert, row_start, row_end, valid = find_tile(extents, num_rows, pid_m, E, BLOCK_E, BLOCK_M, BATCHED)
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
            QUANTIZED,
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
    out, out_scale = mm.allocate((num_rows,), a)
    m_tiles = most_tiles(num_rows, mm.num_experts, config)
    _launch(a, mm, offsets, config, (out, out_scale), (m_tiles, num_rows, False), row_to_pair, top_k, pdl)
    return out, out_scale


def batched_mm(
    batch: torch.Tensor,
    mm: ExpertMM,
    expert_num_tokens: torch.Tensor,
    config: MMConfig,
    *,
    most_rows: int | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one batched expert GEMM.

    Args:
        batch: [E, C, K], contiguous.
        mm: weight, bias, scales, activation and output form (see `ExpertMM`).
        expert_num_tokens: [E] i32, rows in use per expert.
        most_rows: bound on their sum, if the caller knows one below E * C: a smaller grid.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        (out [E, C, N], out_scale [E, C, ceil(N / 128)] f32, empty unless the epilogue quantises). Rows past an
        expert's count are not written.
    """
    E, C, K = batch.shape
    out, out_scale = mm.allocate((E, C), batch)
    m_tiles = E * cdiv(C, config.block_m)
    if most_rows is not None:
        m_tiles = min(m_tiles, most_tiles(most_rows, E, config))
    _launch(batch.view(E * C, K), mm, expert_num_tokens, config, (out, out_scale), (m_tiles, C, True), None, 0, pdl)
    return out, out_scale


def most_tiles(rows: int, num_experts: int, config: MMConfig) -> int:
    """Bound on row tiles when each expert's rows are cut into tiles by themselves."""
    return cdiv(rows, config.block_m) + min(num_experts, rows)


def _launch(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    outputs: tuple[torch.Tensor, torch.Tensor],
    grid: tuple[int, int, bool],
    row_to_pair: torch.Tensor | None,
    top_k: int,
    pdl: bool,
) -> None:
    """Launch the kernel on rows `a` [rows, K]; `grid`: (bound on row tiles, num_rows, batched)."""
    if outputs[0].numel() == 0:
        return
    m_tiles, num_rows, batched = grid
    launch = mm.prepare(a, config, gathered=row_to_pair is not None)
    with on_device(a):
        _expert_mm_kernel[(m_tiles * launch.n_tiles,)](
            a,
            launch.a_desc,
            mm.rows_scale,
            row_to_pair,
            extents,
            mm.weight,
            launch.w_desc,
            mm.weight_scale,
            mm.bias,
            *outputs,
            m_tiles,
            num_rows,
            a.stride(0),
            mm.alpha,
            mm.limit,
            mm.num_experts,
            mm.out_features,
            mm.in_features,
            top_k,
            launch.strides,
            launch.block,
            mm.glu,
            mm.activation,
            launch.loads,
            mm.weight_scale is not None,
            mm.quantize_output,
            batched,
            pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            launch_pdl=pdl,
        )
