"""Weight gradient of a grouped GEMM: one product per expert over that expert's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.util import INTERPRETED, cdiv, next_power_of_2, round_to

ROWS = 64  # rows per step
# Where torch's product is faster: us of both on an H200, this kernel's first. It costs some 30 us before it starts.
# Many rows an expert: Qwen3-30B-A3B, gate|up, 16 rows 317 and 353, 64 rows 380 and 372, 1024 rows 1731 and 1478.
# Large weights, however many rows: Mixtral, down, 4 rows 363 and 330; gpt-oss-120b, gate|up, 8 rows 1727 and 1590.
MANY_ROWS = 48
LARGE_WEIGHTS = 450_000_000  # elements of all experts


@triton.jit
def _wgrad_kernel(
    grad,
    x,
    offsets,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: out[e, n block, k block] = sum over the expert's rows r of grad[r, n] * x[r, k], in row order.

    Grid: (n tiles * k tiles, E). FLOPs: 2 * R * N * K. Bytes: R * (N * k tiles + K * n tiles) read, E * N * K written;
    an expert without rows writes zeros.
    """
    expert = tl.program_id(1)
    start = 0
    if expert > 0:
        start = tl.load(offsets + expert - 1)
    end = tl.load(offsets + expert)
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n = (tl.program_id(0) // k_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tl.program_id(0) % k_tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
    accumulator = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(start, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        exists = (row < end)[:, None]
        row64 = row.to(tl.int64)[:, None]
        g = tl.load(grad + row64 * N + n[None, :], mask=exists & (n < N)[None, :], other=0.0)
        value = tl.load(x + row64 * K + k[None, :], mask=exists & (k < K)[None, :], other=0.0)
        if INTERPRETED:
            g = g.to(tl.float32)
            value = value.to(tl.float32)
        accumulator = tl.dot(g.T, value, accumulator, input_precision="ieee")
    pointers = out + expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(pointers, round_to(accumulator, out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def grouped_wgrad(grad_rows: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`out[e] = grad_rows[rows of e].T @ rows[rows of e]`.

    Args:
        grad_rows: [R, N]; rows: [R, K]; those past offsets[-1] are not read.
        offsets: [E] i32 cumulative ends.

    Returns:
        [E, N, K] in the dtype of `rows`.
    """
    grad_rows, rows = grad_rows.contiguous(), rows.contiguous()
    E, N, K = offsets.shape[0], grad_rows.shape[1], rows.shape[1]
    if _is_faster_by_torch(grad_rows, rows, E):
        return torch._grouped_mm(grad_rows.t(), rows, offs=offsets)
    out = rows.new_empty((E, N, K))
    block = 64 if rows.dtype == torch.float32 else 128
    block_k = min(block, max(16, next_power_of_2(K)))
    launch(
        _wgrad_kernel,
        (cdiv(N, block) * cdiv(K, block_k), E),
        grad_rows,
        rows,
        offsets,
        out,
        N,
        K,
        block,
        block_k,
        ROWS if block == 128 else 32,
        num_warps=8,
        num_stages=3,
    )
    return out


def _is_faster_by_torch(grad_rows: torch.Tensor, rows: torch.Tensor, E: int) -> bool:
    """Whether torch has this product for the GPU, for operands like these, and is faster than the kernel above."""
    R, N, K = rows.shape[0], grad_rows.shape[1], rows.shape[1]
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    aligned = N % 8 == 0 and K % 8 == 0 and grad_rows.data_ptr() % 16 == 0 and rows.data_ptr() % 16 == 0
    if not aligned or R == 0 or torch.cuda.get_device_capability(rows.device) != (9, 0):
        return False
    return R >= MANY_ROWS * E or E * N * K >= LARGE_WEIGHTS
