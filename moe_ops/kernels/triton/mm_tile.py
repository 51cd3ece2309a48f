"""The expert GEMM's inner part, shared by the grouped and the batched format: one output tile of one expert.

A tile is BLOCK_M rows of one expert by BLOCK_N rows of its weight. Gated experts put their gate and their up rows into
the same tile (the first and the second half of it, or alternating), so one wgmma covers both and the epilogue pairs
them in registers: h = act(gate) * up never leaves the chip unactivated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.block_scales import MX_BLOCK, quantize_mx
from moe_ops.kernels.triton.order import in_order
from moe_ops.kernels.triton.packed_fp8_tile import packed_fp8_tile
from moe_ops.kernels.triton.packed_tile import packed_tile
from moe_ops.kernels.triton.scaled_tile import scaled_tile
from moe_ops.kernels.triton.scales import load_row_scale, load_scale, quantize_tile
from moe_ops.kernels.triton.tile_loads import (
    BOTH,
    CONCAT,
    GATE,
    INTERLEAVED,
    NOT_GATED,
    RAGGED,
    UP,
    load_rows,
    load_weight,
    weight_rows,
)
from moe_ops.kernels.triton.util import INTERPRETED, round_to, widen


@triton.jit
def scaled_product(
    a_tile,
    row_scale,
    w_tile,
    w_scale,
    expert,
    row,
    w_valid,
    k,
    W_SCALE_STRIDES: tl.constexpr,
    SCHEME: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):
    """One scale group's product, promoted to fp32 with both scales.

    Promotion group by group: the tensor core's own fp8 accumulator keeps too few bits for a long sum. ONE_SCALE: all
    weight rows of the tile share their scales, so the column's folds into the row's.
    """
    pointers = w_scale + expert.to(tl.int64) * W_SCALE_STRIDES[0] + (k // SCHEME[1]) * W_SCALE_STRIDES[2]
    pointers += (row // SCHEME[0]) * W_SCALE_STRIDES[1]
    if INTERPRETED:
        a_tile = widen(a_tile)
        w_tile = widen(w_tile)
    if ONE_SCALE:
        scale = (row_scale * load_scale(pointers))[:, None]
    else:
        scale = row_scale[:, None] * load_scale(pointers, w_valid)[None, :]
    return tl.dot(a_tile, w_tile, input_precision="ieee") * scale


@triton.jit
def add_product(a_tile, w_tile, accumulator):
    """accumulator + a_tile @ w_tile of quantised tiles whose scales come behind the loop: of int8 in int32, exactly; of
    e4m3 in fp32, tile by tile, as the tensor core's own accumulator keeps too few bits for a long sum.
    """
    if a_tile.dtype == tl.int8:
        return tl.dot(a_tile, w_tile, accumulator, out_dtype=tl.int32)
    else:
        if INTERPRETED:
            a_tile = widen(a_tile)
            w_tile = widen(w_tile)
        return accumulator + tl.dot(a_tile, w_tile, input_precision="ieee")


@triton.jit
def scale_product(
    accumulator, a_scale, a_row, row_valid, w_scale, expert, w_row, w_valid, W_SCALE_STRIDES: tl.constexpr
):
    """fp32 `accumulator` times the scales of its rows, [rows] f32, and of its columns, which are weight rows."""
    pointers = w_scale + expert.to(tl.int64) * W_SCALE_STRIDES[0] + w_row.to(tl.int64) * W_SCALE_STRIDES[1]
    row_scale = tl.load(a_scale + a_row, mask=row_valid, other=0.0)
    return accumulator.to(tl.float32) * row_scale[:, None] * load_scale(pointers, w_valid)[None, :]


@triton.jit
def mm_tile(
    a,
    a_desc,
    a_scale,
    a_row,
    row_valid,
    row_start,
    w,
    w_desc,
    w_scale,
    up_offset,
    expert,
    n_start,
    N: tl.constexpr,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_STRIDES: tl.constexpr,
    W_SCALE_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    A_TMA: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    SCHEME: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 accumulator [BLOCK_M, BLOCK_N] of a tile: sum over k of a[row, k] * w[expert, n, k].

    Args:
        a_row: [BLOCK_M] row of `a` for each row of the tile; row_valid masks rows of other experts.
        row_start: first row, for the descriptor load.
        a_scale: [rows, groups of K] f32, contiguous; w_scale: with strides W_SCALE_STRIDES over its groups.
        SCHEME: None, or of the weights' scales (rows that share one, columns, whether groups run on from the gate into
            the up half, whether the output is quantised). 0 columns: one scale for all of them, in `a_scale`, too.
    """
    w_row, w_valid = weight_rows(n_start, N, BLOCK_N, GLU)
    BY_ROW: tl.constexpr = False if SCHEME is None else SCHEME[1] == 0
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a_tile = load_rows(a, a_desc, a_row, row_valid, row_start, k, K, A_STRIDE, BLOCK_K, A_TMA)
        w_tile = load_weight(
            w,
            w_desc,
            up_offset,
            w_row,
            w_valid,
            expert,
            n_start,
            k,
            K,
            W_STRIDES,
            BLOCK_N,
            BLOCK_K,
            GLU,
            W_LOAD,
            SWAPPED,
            BOTH,
        )
        if SCHEME is None:
            if INTERPRETED:
                a_tile = a_tile.to(tl.float32)
                w_tile = w_tile.to(tl.float32)
            accumulator = tl.dot(a_tile, w_tile, accumulator, input_precision="ieee")
        elif BY_ROW:
            accumulator = add_product(a_tile, w_tile, accumulator)
        else:
            ONE_SCALE: tl.constexpr = GLU == NOT_GATED and BLOCK_N <= SCHEME[0]
            row_scale = load_row_scale(a_scale, a_row, row_valid, k, K, SCHEME[1])
            row = n_start if ONE_SCALE else w_row
            accumulator += scaled_product(
                a_tile, row_scale, w_tile, w_scale, expert, row, w_valid, k, W_SCALE_STRIDES, SCHEME, ONE_SCALE
            )
    if BY_ROW:
        accumulator = scale_product(
            accumulator, a_scale, a_row, row_valid, w_scale, expert, w_row, w_valid, W_SCALE_STRIDES
        )
    return accumulator


@triton.jit
def scaled_glu_tile(
    a,
    a_desc,
    a_scale,
    a_row,
    row_valid,
    row_start,
    w,
    w_desc,
    w_scale,
    up_offset,
    up_scale_offset,
    expert,
    n_start,
    N: tl.constexpr,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_STRIDES: tl.constexpr,
    W_SCALE_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    A_TMA: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    SCHEME: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(gate, up) fp32 accumulators [BLOCK_M, COLUMNS] of a quantised gated tile, concat layout.

    Two products instead of one twice as wide: a product that waits for its scales then takes half the registers, so
    that two CTAs share a multiprocessor and one multiplies while the other promotes.
    """
    RUNS_ON: tl.constexpr = SCHEME[2]
    BY_ROW: tl.constexpr = SCHEME[1] == 0
    ONE_SCALE: tl.constexpr = COLUMNS <= SCHEME[0] and (not RUNS_ON or N % COLUMNS == 0)
    up_scale = w_scale if RUNS_ON else w_scale + up_scale_offset
    gate_row, w_valid = weight_rows(n_start, N, COLUMNS, NOT_GATED)
    ACCUMULATOR: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    gate = tl.zeros((BLOCK_M, COLUMNS), ACCUMULATOR)
    up = tl.zeros((BLOCK_M, COLUMNS), ACCUMULATOR)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a_tile = load_rows(a, a_desc, a_row, row_valid, row_start, k, K, A_STRIDE, BLOCK_K, A_TMA)
        where = (w, w_desc, up_offset, gate_row, w_valid, expert, n_start, k)
        gate_tile = load_weight(*where, K, W_STRIDES, COLUMNS, BLOCK_K, CONCAT, W_LOAD, SWAPPED, GATE)
        up_tile = load_weight(*where, K, W_STRIDES, COLUMNS, BLOCK_K, CONCAT, W_LOAD, SWAPPED, UP)
        if BY_ROW:
            gate = add_product(a_tile, gate_tile, gate)
            up = add_product(a_tile, up_tile, up)
        else:
            row_scale = load_row_scale(a_scale, a_row, row_valid, k, K, SCHEME[1])
            row = n_start if ONE_SCALE else gate_row
            gate += scaled_product(
                a_tile, row_scale, gate_tile, w_scale, expert, row, w_valid, k, W_SCALE_STRIDES, SCHEME, ONE_SCALE
            )
            up_row = N + row if RUNS_ON else row
            up += scaled_product(
                a_tile, row_scale, up_tile, up_scale, expert, up_row, w_valid, k, W_SCALE_STRIDES, SCHEME, ONE_SCALE
            )
    if BY_ROW:
        rows = (a_scale, a_row, row_valid)
        gate = scale_product(gate, *rows, w_scale, expert, gate_row, w_valid, W_SCALE_STRIDES)
        up = scale_product(up, *rows, up_scale, expert, gate_row, w_valid, W_SCALE_STRIDES)
    return gate, up


@triton.jit
def _bias(bias, expert, row, valid, BIAS_STRIDES: tl.constexpr):
    """fp32 row vector of the expert's bias."""
    pointers = bias + expert.to(tl.int64) * BIAS_STRIDES[0] + row * BIAS_STRIDES[1]
    return tl.load(pointers, mask=valid, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_rows(out_desc, row_start, row_end, n_start, tile):
    """Rows of `tile` to row_start .. row_end - 1; those past the end, and columns past the last, are cut off."""
    at = [RAGGED, row_end, RAGGED - (row_end - row_start), n_start]
    out_desc.store(at, tile.reshape(1, 1, tile.shape[0], tile.shape[1]))


@triton.jit
def halves_of(tile):
    """The left and the right half of a tile's columns."""
    return tl.split(tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1))


@triton.jit
def store_tile(
    out, out_desc, tile, where, first, N: tl.constexpr, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """Columns `first` and on of `out`, N wide, AT_ONCE of them at a time; `where`: the tile's rows. MAPPED: by the
    descriptor, if there is one.
    """
    rows, row_valid, row_start, row_end = where
    if tile.shape[1] > AT_ONCE:
        left, right = halves_of(tile)
        store_tile(out, out_desc, left, where, first, N, STRIDE, AT_ONCE, MAPPED)
        store_tile(out, out_desc, right, where, first + tile.shape[1] // 2, N, STRIDE, AT_ONCE, MAPPED)
    elif out_desc is not None and MAPPED:
        store_rows(out_desc, row_start, row_end, first, tile)
    else:
        column = first + tl.arange(0, tile.shape[1])
        mask = row_valid[:, None] & (column < N)[None, :]
        tl.store(out + rows.to(tl.int64)[:, None] * STRIDE + column[None, :], tile, mask=mask)


@triton.jit
def store_scales(scale, out_scale, rows, row_valid, n_start, N: tl.constexpr, GROUP: tl.constexpr):
    """Scales [BLOCK_M, groups] of columns n_start and on, GROUP of them each."""
    groups: tl.constexpr = (N + GROUP - 1) // GROUP
    group = n_start // GROUP + tl.arange(0, scale.shape[1])
    mask = row_valid[:, None] & (group < groups)[None, :]
    tl.store(out_scale + rows.to(tl.int64)[:, None] * groups + group[None, :], scale, mask=mask)


@triton.jit
def compute_tile(
    expert,
    row_start,
    row_end,
    n_start,
    a,
    a_desc,
    a_scale,
    row_to_pair,
    w,
    w_desc,
    w_scale,
    up_offset,
    up_scale_offset,
    decoding,
    bias,
    out,
    out_desc,
    out_scale,
    kept,
    alpha,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MOVES: tl.constexpr,
    SCHEME: tl.constexpr,
    TALL: tl.constexpr = False,
):
    """A whole output tile: product, + bias (fp32), activation (fp32), one rounding, store.

    The rows are row_start .. row_end - 1, at most BLOCK_M of them, the columns n_start and on.

    Args: see `mm_tile`; decoding: scales of `packed_tile`; kept: where what stood before the activation is written, or
            its two halves, each with its descriptor, or None; row_to_pair: with TOP_K > 0, row r is that of
            token row_to_pair[r] // TOP_K in `a`, else row r.
        A quantised output needs as many columns as a scale group has.
    BLOCK: see `launch.Launch`; TALL: of the taller of two heights.
    MOVES: whether rows come by descriptor, how weights do, columns of one store, and whether the weights' descriptor
        begins with the up half.
    """
    W_STRIDES: tl.constexpr = STRIDES[0]
    W_SCALE_STRIDES: tl.constexpr = STRIDES[1]
    BIAS_STRIDES: tl.constexpr = STRIDES[2]
    A_STRIDE: tl.constexpr = STRIDES[3]
    ZERO_STRIDES: tl.constexpr = STRIDES[4]
    OUTER_STRIDES: tl.constexpr = STRIDES[5]
    KEPT_STRIDE: tl.constexpr = STRIDES[6]
    BLOCK_M: tl.constexpr = BLOCK[5] if TALL else BLOCK[0]
    STAGES: tl.constexpr = BLOCK[6] if TALL else None
    # Descriptors have the rows of the taller tile: the shorter one's come and leave by pointer.
    TALLEST: tl.constexpr = TALL or BLOCK[5] == 0
    BLOCK_N: tl.constexpr = BLOCK[1]
    BLOCK_K: tl.constexpr = BLOCK[2]
    A_TMA: tl.constexpr = MOVES[0] and TALLEST
    W_LOAD: tl.constexpr = MOVES[1]
    AT_ONCE: tl.constexpr = MOVES[2] if TALLEST else BLOCK_N
    SWAPPED: tl.constexpr = MOVES[3]
    rows = row_start + tl.arange(0, BLOCK_M)
    row_valid = rows < row_end
    if TOP_K > 0:
        a_row = tl.load(row_to_pair + rows, mask=row_valid, other=0) // TOP_K
    else:
        a_row = rows
    COLUMNS: tl.constexpr = BLOCK_N if GLU == NOT_GATED else BLOCK_N // 2
    column, valid = weight_rows(n_start, N, COLUMNS, NOT_GATED)
    PACKED: tl.constexpr = None if SCHEME is None else SCHEME[4]
    BLOCKS: tl.constexpr = None if SCHEME is None else SCHEME[5]
    if GLU == CONCAT and SCHEME is not None and PACKED is None and BLOCKS is None:
        gate, up = scaled_glu_tile(
            a,
            a_desc,
            a_scale,
            a_row,
            row_valid,
            row_start,
            w,
            w_desc,
            w_scale,
            up_offset,
            up_scale_offset,
            expert,
            n_start,
            N,
            K,
            A_STRIDE,
            W_STRIDES,
            W_SCALE_STRIDES,
            BLOCK_M,
            COLUMNS,
            BLOCK_K,
            A_TMA,
            W_LOAD,
            SWAPPED,
            SCHEME,
            STAGES,
        )
    else:
        if BLOCKS is not None:
            gate = scaled_tile(
                a, a_desc, a_scale, a_row, row_valid, row_start, w, w_desc, decoding, up_offset, expert, n_start, N, K,
                A_STRIDE, W_STRIDES, BLOCK_M, BLOCK_N, BLOCK_K, GLU, A_TMA, W_LOAD, SWAPPED, BLOCKS, W_SCALE_STRIDES,
                OUTER_STRIDES, STAGES,
            )  # fmt: skip
        elif PACKED is None:
            gate = mm_tile(
                a,
                a_desc,
                a_scale,
                a_row,
                row_valid,
                row_start,
                w,
                w_desc,
                w_scale,
                up_offset,
                expert,
                n_start,
                N,
                K,
                A_STRIDE,
                W_STRIDES,
                W_SCALE_STRIDES,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                GLU,
                A_TMA,
                W_LOAD,
                SWAPPED,
                SCHEME,
                STAGES,
            )
        elif PACKED[11]:
            gate = packed_tile(
                a, a_desc, a_scale, a_row, row_valid, row_start, w, w_desc, decoding, up_offset, expert, n_start, N, K,
                A_STRIDE, W_STRIDES, BLOCK_M, BLOCK_N, BLOCK_K, GLU, A_TMA, W_LOAD, SWAPPED, PACKED, W_SCALE_STRIDES,
                ZERO_STRIDES, OUTER_STRIDES, STAGES,
            )  # fmt: skip
        else:
            gate = packed_fp8_tile(
                a, a_desc, a_scale, a_row, row_valid, row_start, w, w_desc, decoding, up_offset, expert, n_start, N, K,
                A_STRIDE, W_STRIDES, BLOCK_M, BLOCK_N, BLOCK_K, GLU, A_TMA, W_LOAD, SWAPPED, PACKED, W_SCALE_STRIDES,
                OUTER_STRIDES, STAGES,
            )  # fmt: skip
        up = gate
        if GLU == CONCAT:
            first, second = tl.split(gate.reshape(BLOCK_M, 2, COLUMNS).permute(0, 2, 1))
            if SWAPPED:
                gate, up = second, first
            else:
                gate, up = first, second
        elif GLU == INTERLEAVED:
            gate, up = tl.split(gate.reshape(BLOCK_M, COLUMNS, 2))
    if BIAS_STRIDES is not None:
        if GLU == CONCAT:
            gate += _bias(bias, expert, column, valid, BIAS_STRIDES)
            up += _bias(bias, expert, N + column, valid, BIAS_STRIDES)
        elif GLU == INTERLEAVED:
            gate += _bias(bias, expert, 2 * column, valid, BIAS_STRIDES)
            up += _bias(bias, expert, 2 * column + 1, valid, BIAS_STRIDES)
        else:
            gate += _bias(bias, expert, column, valid, BIAS_STRIDES)
    where = (rows, row_valid, row_start, row_end)
    if KEPT_STRIDE is not None:
        # What stands before the activation, rounded.
        of_kept = kept[0].dtype.element_ty
        if GLU == INTERLEAVED:
            both = round_to(tl.join(gate, up).reshape(BLOCK_M, 2 * COLUMNS), of_kept)
            store_tile(kept[0], kept[1], both, where, 2 * n_start, 2 * N, KEPT_STRIDE, AT_ONCE, TALLEST)
        else:
            left = round_to(gate, of_kept)
            store_tile(kept[0], kept[1], left, where, n_start, N, KEPT_STRIDE, AT_ONCE, TALLEST)
            if GLU == CONCAT:
                right = round_to(up, of_kept)
                store_tile(kept[2], kept[3], right, where, n_start, N, KEPT_STRIDE, AT_ONCE, TALLEST)
    value = gate
    if ACTIVATION is not None:
        value = apply_activation(gate, up, alpha, limit, ACTIVATION, GLU != NOT_GATED)
    QUANTIZE: tl.constexpr = False if SCHEME is None else SCHEME[3]
    if QUANTIZE:
        value = tl.where(valid[None, :], value, 0.0)
        if BLOCKS is None:
            tile, scale = quantize_tile(value, out.dtype.element_ty)
            groups: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
            tl.store(out_scale + rows.to(tl.int64) * groups + n_start // COLUMNS, scale, mask=row_valid)
        else:
            tile, scale = quantize_mx(value.reshape(BLOCK_M * COLUMNS // MX_BLOCK, MX_BLOCK))
            tile, scale = tile.reshape(BLOCK_M, COLUMNS), scale.reshape(BLOCK_M, COLUMNS // MX_BLOCK)
            store_scales(scale, out_scale, rows, row_valid, n_start, N, MX_BLOCK)
    else:
        tile = round_to(value, out.dtype.element_ty)
    OUT_ORDER: tl.constexpr = None if SCHEME is None else SCHEME[6]
    if OUT_ORDER is not None:
        tile = in_order(tile, OUT_ORDER[0], OUT_ORDER[1])
    store_tile(out, out_desc, tile, where, n_start, N, N, AT_ONCE, TALLEST)
