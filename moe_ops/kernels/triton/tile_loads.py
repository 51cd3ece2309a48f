"""How a tile of a GEMM comes: which weight rows it holds, and its weights and rows from memory."""

from __future__ import annotations

import triton
import triton.language as tl

# How the weight tile is laid out (GLU) and loaded (W_LOAD).
NOT_GATED = tl.constexpr(0)
CONCAT = tl.constexpr(1)
INTERLEAVED = tl.constexpr(2)
POINTERS = tl.constexpr(0)
TMA_NK = tl.constexpr(1)
TMA_KN = tl.constexpr(2)
RAGGED = tl.constexpr(2**30)  # see `launch.ragged_rows`
# Which part of a gated weight in two halves a tile holds.
GATE = tl.constexpr(0)
UP = tl.constexpr(1)
BOTH = tl.constexpr(2)


@triton.jit
def weight_rows(n_start, N: tl.constexpr, BLOCK_N: tl.constexpr, GLU: tl.constexpr):
    """Rows of the expert's weight in this tile, of their own half when concat, and which of them exist.

    N counts OUTPUT columns.
    """
    column = tl.arange(0, BLOCK_N)
    if GLU == CONCAT:
        output = n_start + column % (BLOCK_N // 2)
        row = output
    elif GLU == INTERLEAVED:
        output = n_start + column // 2
        row = 2 * n_start + column
    else:
        output = n_start + column
        row = output
    return row, output < N


@triton.jit
def halves_of(BLOCK_N: tl.constexpr, GLU: tl.constexpr, SWAPPED: tl.constexpr):
    """Which half each weight row of a tile of BOTH is of: 0 the gate's, or the only one; 1 up."""
    if GLU == CONCAT:
        half = tl.arange(0, BLOCK_N) // (BLOCK_N // 2)
        if SWAPPED:
            half = 1 - half
    else:
        half = tl.zeros((BLOCK_N,), tl.int32)
    return half


@triton.jit
def load_weight(
    w,
    w_desc,
    up_offset,
    w_row,
    w_valid,
    expert,
    n_start,
    k,
    K: tl.constexpr,
    W_STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    PART: tl.constexpr,
):
    """Weight tile [BLOCK_K, BLOCK_N]; what lies outside the expert's matrix reads as 0.

    PART (concat only): GATE, UP, or BOTH in the order of the descriptor, which begins with UP when SWAPPED. By pointers
    the up half is `up_offset` elements behind the gate, wherever that is.
    """
    HALF: tl.constexpr = 0 if PART == BOTH else (1 - PART if SWAPPED else PART)
    if W_LOAD == TMA_NK:
        if GLU == CONCAT:
            tile = w_desc.load([expert, HALF, n_start, k]).reshape(BLOCK_N, BLOCK_K).T
        elif GLU == INTERLEAVED:
            tile = w_desc.load([expert, 2 * n_start, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            tile = w_desc.load([expert, n_start, k]).reshape(BLOCK_N, BLOCK_K).T
    elif W_LOAD == TMA_KN:
        if GLU == CONCAT:
            tile = w_desc.load([expert, k, HALF, n_start]).reshape(BLOCK_K, BLOCK_N)
        elif GLU == INTERLEAVED:
            tile = w_desc.load([expert, k, 2 * n_start]).reshape(BLOCK_K, BLOCK_N)
        else:
            tile = w_desc.load([expert, k, n_start]).reshape(BLOCK_K, BLOCK_N)
    else:
        k_index = k + tl.arange(0, BLOCK_K)
        column = w_row.to(tl.int64) * W_STRIDES[1]
        if GLU == CONCAT:
            if PART == BOTH:
                column += (tl.arange(0, BLOCK_N) // (BLOCK_N // 2)).to(tl.int64) * up_offset
            elif PART == UP:
                column += up_offset
        pointers = (
            w + expert.to(tl.int64) * W_STRIDES[0] + column[None, :] + k_index.to(tl.int64)[:, None] * W_STRIDES[2]
        )
        if K % BLOCK_K == 0:
            tile = tl.load(pointers, mask=w_valid[None, :], other=0.0)
        else:
            tile = tl.load(pointers, mask=w_valid[None, :] & (k_index < K)[:, None], other=0.0)
    return tile


@triton.jit
def load_rows(
    a,
    a_desc,
    a_row,
    row_valid,
    row_start,
    k,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    A_TMA: tl.constexpr,
):
    """Activation tile [BLOCK_M, BLOCK_K]; a descriptor may also read rows past the end, which are not stored."""
    if A_TMA:
        tile = a_desc.load([row_start, k])
    else:
        k_index = k + tl.arange(0, BLOCK_K)
        pointers = a + a_row.to(tl.int64)[:, None] * A_STRIDE + k_index[None, :]
        if K % BLOCK_K == 0:
            tile = tl.load(pointers, mask=row_valid[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=row_valid[:, None] & (k_index < K)[None, :], other=0.0)
    return tile


@triton.jit
def expert_rows(rows, exists, k, K: tl.constexpr, STRIDES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_P, BLOCK_N, BLOCK_K] of the weight rows at `rows` [BLOCK_P, BLOCK_N], as stored; 0 outside."""
    k_index = k + tl.arange(0, BLOCK_K)
    pointers = rows[:, :, None] + k_index.to(tl.int64)[None, None, :] * STRIDES[2]
    return tl.load(pointers, mask=exists[:, :, None] & (k_index < K)[None, None, :], other=0.0)
