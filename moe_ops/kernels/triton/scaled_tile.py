"""One output tile of an expert GEMM whose operands are both stored in blocks along K that have scales: tensor cores
multiply by these themselves (`tl.dot_scaled`; on sm_100 `tcgen05.mma` with `block_scale`).

The weights are the first operand, so that their rows fill the 128 that the tensor core always computes, however few
tokens there are; the accumulator is the tile transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.block_scales import FACTOR_BYTES, load_nv_factor, nv_scale_bytes
from moe_ops.kernels.triton.codes import E2M1, codes_of_bytes, e2m1_value
from moe_ops.kernels.triton.scales import decode_scale, load_scale, load_stored_scale
from moe_ops.kernels.triton.tile_loads import BOTH, halves_of, load_rows, load_weight, weight_rows
from moe_ops.kernels.triton.util import INTERPRETED, widen


@triton.jit
def _decoded(tile, scale, CODE: tl.constexpr, GROUP: tl.constexpr):
    """fp32 of a tile [rows, K / codes of an element] and its scales [rows, K / GROUP], for the interpreter, which has
    no scaled products.
    """
    if CODE == E2M1:
        value = e2m1_value(codes_of_bytes(tile))
    else:
        value = widen(tile)
    factor = tl.broadcast_to(decode_scale(scale)[:, :, None], (scale.shape[0], scale.shape[1], GROUP))
    return value * factor.reshape(value.shape[0], value.shape[1])


@triton.jit
def multiply(w, w_scale, rows, row_scale, accumulator, CODE: tl.constexpr, ROW_CODE: tl.constexpr, GROUP: tl.constexpr):
    """accumulator + (w times w_scale) @ (rows times row_scale).T."""
    if INTERPRETED:
        wide = _decoded(w, w_scale, CODE, GROUP)
        return tl.dot(wide, _decoded(rows, row_scale, ROW_CODE, GROUP).T, accumulator, input_precision="ieee")
    else:
        FORM: tl.constexpr = "e2m1" if CODE == E2M1 else "e4m3"
        ROW_FORM: tl.constexpr = "e2m1" if ROW_CODE == E2M1 else "e4m3"
        return tl.dot_scaled(w, w_scale, FORM, rows.T, row_scale, ROW_FORM, accumulator)


@triton.jit
def scaled_tile(
    a,
    a_desc,
    a_scale,
    a_row,
    row_valid,
    row_start,
    w,
    w_desc,
    scales,
    up_offset,
    expert,
    n_start,
    N: tl.constexpr,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    A_TMA: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,
    OUTER_STRIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 accumulator [BLOCK_M, BLOCK_N] of a tile: sum over k of a[row, k] * w[expert, n, k], both times the scales
    of their blocks; times the factors of the row and of the expert where there are such.

    Args: see `mm_tile.mm_tile`;
        a_scale: [rows, bytes of a row], as `meta.blocks` stores it.
        scales: see `packed_tile.packed_tile`; of them the scales of blocks, and that of a whole half.
        BLOCKS: see `launch.ExpertMM.blocks_of`; the strides are those of both scales.
    """
    CODE: tl.constexpr = BLOCKS[0]
    ROW_CODE: tl.constexpr = BLOCKS[1]
    GROUP: tl.constexpr = BLOCKS[2]
    PACK: tl.constexpr = 2 if CODE == E2M1 else 1
    ROW_PACK: tl.constexpr = 2 if ROW_CODE == E2M1 else 1
    inner, _, outer, inner_apart, _, outer_apart = scales
    w_row, w_valid = weight_rows(n_start, N, BLOCK_N, GLU)
    half = halves_of(BLOCK_N, GLU, SWAPPED)
    if BLOCKS[3]:  # said so that the compiler sees it: what is known of an argument is lost in a function
        inner_apart = inner_apart // 16 * 16
    inner += expert.to(tl.int64) * SCALE_STRIDES[0] + half.to(tl.int64) * inner_apart + w_row * SCALE_STRIDES[1]
    row_scales = a_scale + a_row.to(tl.int64) * (nv_scale_bytes(K) if ROW_PACK == 2 else (K + GROUP - 1) // GROUP)
    if ROW_PACK == 2:
        row_scales += FACTOR_BYTES
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # fmt: off
        stored = load_weight(
            w, w_desc, up_offset, w_row, w_valid, expert, n_start, k // PACK, K // PACK, W_STRIDES, BLOCK_N,
            BLOCK_K // PACK, GLU, W_LOAD, SWAPPED, BOTH,
        ).T
        rows = load_rows(
            a, a_desc, a_row, row_valid, row_start, k // ROW_PACK, K // ROW_PACK, A_STRIDE, BLOCK_K // ROW_PACK, A_TMA
        )
        # fmt: on
        group = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
        w_inside, row_inside = w_valid[:, None], row_valid[:, None]
        if K % BLOCK_K != 0:
            inside = (group * GROUP < K)[None, :]
            w_inside, row_inside = w_inside & inside, row_inside & inside
        w_scale = load_stored_scale(inner[:, None] + group[None, :] * SCALE_STRIDES[2], w_inside)
        row_scale = load_stored_scale(row_scales[:, None] + group[None, :], row_inside)
        if ROW_PACK == 2:
            row_scale = row_scale.to(tl.float8e4nv, bitcast=True)
        accumulator = multiply(stored, w_scale, rows, row_scale, accumulator, CODE, ROW_CODE, GROUP)
    if outer is not None:
        pointers = outer + expert.to(tl.int64) * OUTER_STRIDES[0] + half.to(tl.int64) * outer_apart
        accumulator *= load_scale(pointers, w_valid)[:, None]
    if ROW_PACK == 2:
        accumulator *= load_nv_factor(a_scale, a_row, row_valid, K)[None, :]
    return accumulator.T
