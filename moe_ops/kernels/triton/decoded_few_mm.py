"""Expert GEMMs of few rows whose weights are codes that are decoded in registers, for Hopper.

What `packed_tile` computes, with the loop written out: the weights' bytes are the time there, or, where memory is fast,
the instructions that decode them. Each warp multiplies 16 weight rows at a time by the tensor core's instructions for
one warp (`mma_v2`), so that no product waits for other warps; a warp of its own has descriptors bring weights and rows.
Rows come in the order of the product (`order`): nothing moves between threads. Of a gated weight in two halves each
warp has the same rows of both. Steps of 256 columns are read as whole lines of memory; 128 of them are decoded at a
time.

Instructions of a warp for 32 x 128 codes, beside 8 and 16 rows, and `packed_tile`'s: mxfp4 333, 351 and 416, nvfp4 359,
379 and 453, int4_w4a16 240, 268 and 338, fp8_w8a16 491, 505 and 569, int8_w8a16 267, 281 and 347, mxfp8 575, 591 and
685. Most take two cycles of the integer or the bf16 pipe; with three programs on a multiprocessor, five cycles issue
three. us of a layer on an H200, T = 16, by `packed_tile` and by this kernel, and T = 64: gpt-oss-120b, mxfp4 258 and
229, 559 and 495, int4_w4a16 210 and 184, 453 and 391; DeepSeek-V3, mxfp4 862 and 743, 1908 and 1587 (two H200s, of
which the second took 0.98 of the first one's time with bf16).

Written in Gluon, Triton's language of layouts, which has no interpreter: that runs `packed_tile` for the same products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.codes import codes_of_word
from moe_ops.kernels.triton.decoded_mm import (
    bits_of_pieces,
    columns_of,
    finished,
    first_operand,
    for_partitions,
    gate_and_up,
    leave,
    pieces_of,
    rows_layout,
    stacked_rows,
)
from moe_ops.kernels.triton.hopper import buffers, done_with, table_of_tiles
from moe_ops.kernels.triton.packed_tile import factor_of, fetch, of_rows
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait

PART_COLUMNS = gl.constexpr(128)  # of a step that are decoded and multiplied at a time


@gluon.jit
def _step_of(
    given, expert, first, n_tile, step, stage, ROWS_TOO: gl.constexpr, WEIGHTS_TOO: gl.constexpr, SIZES: gl.constexpr
):
    """Have a step's weights, or rows, or both brought into the memory of a stage."""
    a_desc, w_desc, rows_of, words_of, full, _, _, _ = given
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    WORDS: gl.constexpr = w_desc.block_shape[-1]
    OF_ROWS: gl.constexpr = BLOCK[0] * BLOCK[2] * a_desc.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = OF_ROWS + BLOCK[1] * WORDS * w_desc.dtype.primitive_bitwidth // 8
    arrived = full.index(stage)
    if WEIGHTS_TOO:
        mbarrier.expect(arrived, BYTES)
        words = words_of.index(stage)
        if GLU == CONCAT:
            at = n_tile * (BLOCK[1] // 2)
            tma.async_copy_global_to_shared(w_desc, [expert, 0, at, step * WORDS], arrived, words)
        else:
            tma.async_copy_global_to_shared(w_desc, [expert, n_tile * BLOCK[1], step * WORDS], arrived, words)
    if ROWS_TOO:
        tma.async_copy_global_to_shared(a_desc, [first, step * BLOCK[2]], arrived, rows_of.index(stage))


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that has rows and weights of every step of every tile brought, as soon as there is room; the first
    weights before the kernel that writes the rows has ended, where it may.
    """
    empty, extents, num_rows = given[5], given[6], given[7]
    E: gl.constexpr = SIZES[0]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[10]
    KNOWN: gl.constexpr = SIZES[11]
    STEPS: gl.constexpr = (SIZES[2] + BLOCK[2] - 1) // BLOCK[2]
    STAGES: gl.constexpr = BLOCK[6]
    AHEAD: gl.constexpr = min(STAGES, STEPS) if KNOWN else 0
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    if KNOWN:
        begins = gl.program_id(0) < tiles
        expert, first, _past, n_tile = find_tile(gl.program_id(0), table, BLOCK[0], 0, N_TILES, BLOCK[3])
        if begins:
            for step in gl.static_range(AHEAD):
                _step_of(given, expert, first, n_tile, step, step, False, True, SIZES)
        pdl_wait(True)
        if begins:
            for step in gl.static_range(AHEAD):
                _step_of(given, expert, first, n_tile, step, step, True, False, SIZES)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, _past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
        for step in range(STEPS):
            if place >= AHEAD:
                stage = place % STAGES
                mbarrier.wait(empty.index(stage), (place // STAGES & 1) ^ 1)
                _step_of(given, expert, first, n_tile, step, stage, True, True, SIZES)
            place += 1


@gluon.jit
def _rows_of_lot(
    LOT: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr, n_start, SIZES: gl.constexpr, IN_PRODUCT: gl.constexpr
):
    """(row of its stack, half) of each weight row of half a tile, see `decoded_mm.stacked_rows`: of a gated weight in
    two halves the first lot is one, the second the other. The first row stands in for those that do not exist.
    """
    N: gl.constexpr = SIZES[1]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    KIND: gl.constexpr = INTERLEAVED if GLU == INTERLEAVED else NOT_GATED
    AT: gl.constexpr = 0 if GLU == CONCAT else LOT * columns_of(ROWS, GLU)
    row, half, exists = stacked_rows(ROWS, LAYOUT, n_start + AT, N, KIND, False, IN_PRODUCT)
    if GLU == CONCAT:
        half += 1 - LOT if SWAPPED else LOT
    return gl.where(exists, row, 0), half


@gluon.jit
def _finished(total, LOT: gl.constexpr, expert, n_start, LAYOUT: gl.constexpr, decoding, bias, SIZES: gl.constexpr):
    """A lot's sum, see `decoded_mm.finished`."""
    row, half = _rows_of_lot(LOT, total.shape[0], LAYOUT, n_start, SIZES, True)
    return finished(total, row, half, expert, decoding, bias, SIZES)


@gluon.jit
def _activated(total, alpha, limit, ACTIVATION: gl.constexpr):
    """Of rows of gates and ups that alternate, eight of each, what comes out of them."""
    gate, up = gate_and_up(total)
    value = apply_activation(gate, up, alpha, limit, ACTIVATION, True)
    return value.reshape([total.shape[0] // 2, total.shape[1]])


@gluon.jit
def _multiply(given, SIZES: gl.constexpr):
    """The warps that decode the weight rows of every tile, in two lots, and multiply them with the tile's rows."""
    rows_of, words_of, full, empty, staged, out_desc, extents, num_rows, decoding, bias, alpha, limit = given
    E: gl.constexpr = SIZES[0]
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    SWAPPED: gl.constexpr = SIZES[8]
    SCHEME: gl.constexpr = SIZES[9]
    BATCHED: gl.constexpr = SIZES[10]
    BLOCK_M: gl.constexpr = BLOCK[0]
    BLOCK_K: gl.constexpr = BLOCK[2]
    STAGES: gl.constexpr = BLOCK[6]
    PACKED: gl.constexpr = SCHEME[4]
    CODE: gl.constexpr = PACKED[0]
    EXACT: gl.constexpr = PACKED[2]
    GROUP_K: gl.constexpr = PACKED[4]
    OUT_ORDER: gl.constexpr = SCHEME[6]
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    KIND: gl.constexpr = INTERLEAVED if GLU == INTERLEAVED else NOT_GATED
    UNIT: gl.constexpr = PACKED[10]
    PART: gl.constexpr = min(BLOCK_K, PART_COLUMNS)
    PARTS: gl.constexpr = BLOCK_K // PART
    ALL_PARTS: gl.constexpr = (K + PART - 1) // PART
    PART_WORDS: gl.constexpr = PART // codes_of_word(CODE)
    WORDS: gl.constexpr = PARTS * PART_WORDS
    PIECES: gl.constexpr = pieces_of(EXACT, PART, GROUP_K, UNIT)
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    LAST: gl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    COLUMNS: gl.constexpr = columns_of(2 * ROWS, GLU)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    OF_WORDS: gl.constexpr = rows_layout(WARPS, PART_WORDS, UNIT // codes_of_word(CODE), KIND)
    OF_PIECES: gl.constexpr = rows_layout(WARPS, PIECES, PIECES * UNIT // PART, KIND)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    inner, zeros, _, inner_apart, zeros_apart, _ = decoding
    INNER_STRIDES: gl.constexpr = STRIDES[1]
    ZERO_STRIDES: gl.constexpr = STRIDES[4]
    SHIFTED: gl.constexpr = ZERO_STRIDES is not None
    SCALED: gl.constexpr = INNER_STRIDES is not None and not EXACT  # group by group, where their sums are complete
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
        n_start = n_tile * COLUMNS
        bits0, bits1, zero_bits0, zero_bits1 = 0, 0, 0, 0
        if EXACT or SHIFTED:
            row0, half0 = _rows_of_lot(0, ROWS, gl.SliceLayout(1, OF_PIECES), n_start, SIZES, False)
            row1, half1 = _rows_of_lot(1, ROWS, gl.SliceLayout(1, OF_PIECES), n_start, SIZES, False)
            row0, half0, row1, half1 = row0[:, None], half0[:, None], row1[:, None], half1[:, None]
        if EXACT:
            scale0 = of_rows(inner, inner_apart, expert, row0, half0, N, PACKED[3], PACKED[5], INNER_STRIDES)
            scale1 = of_rows(inner, inner_apart, expert, row1, half1, N, PACKED[3], PACKED[5], INNER_STRIDES)
            bits0 = bits_of_pieces(scale0, 0, K, PART, GROUP_K, INNER_STRIDES[2], OF_PIECES)
            bits1 = bits_of_pieces(scale1, 0, K, PART, GROUP_K, INNER_STRIDES[2], OF_PIECES)
        if SHIFTED:
            zero0 = of_rows(zeros, zeros_apart, expert, row0, half0, N, PACKED[3], PACKED[5], ZERO_STRIDES)
            zero1 = of_rows(zeros, zeros_apart, expert, row1, half1, N, PACKED[3], PACKED[5], ZERO_STRIDES)
            zero_bits0 = bits_of_pieces(zero0, 0, K, PART, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
            zero_bits1 = bits_of_pieces(zero1, 0, K, PART, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
        if SCALED:
            row0, half0 = _rows_of_lot(0, ROWS, OF_ROWS, n_start, SIZES, True)
            row1, half1 = _rows_of_lot(1, ROWS, OF_ROWS, n_start, SIZES, True)
            scale0 = of_rows(inner, inner_apart, expert, row0, half0, N, PACKED[3], PACKED[5], INNER_STRIDES)
            scale1 = of_rows(inner, inner_apart, expert, row1, half1, N, PACKED[3], PACKED[5], INNER_STRIDES)
        nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SUM)
        total0 = nothing
        total1 = nothing
        for step in range(STEPS):
            stage = place % STAGES
            mbarrier.wait(full.index(stage), (place // STAGES) & 1)
            words = words_of.index(stage).reshape([2 * ROWS, WORDS])
            for part in gl.static_range(PARTS):
                if part == 0 or K % BLOCK_K == 0 or step * PARTS + part < ALL_PARTS:
                    at = step * PARTS + part
                    if SCALED:
                        group = gl.minimum(at * PART // GROUP_K, LAST) * INNER_STRIDES[2]
                        factor0 = factor_of(fetch(scale0 + group), inner, False, 0)[:, None]
                        factor1 = factor_of(fetch(scale1 + group), inner, False, 0)[:, None]
                    rows = rows_of.index(stage).slice(part * PART, PART, dim=1).permute((1, 0)).load(OF_TOKENS)
                    lot = words.slice(0, ROWS, dim=0).slice(part * PART_WORDS, PART_WORDS, dim=1).load(OF_WORDS)
                    numbers = first_operand(lot, bits0, inner, zero_bits0, zeros, SHIFTED, PACKED, PART, KIND, OPERAND)
                    if EXACT:
                        bits0 = bits_of_pieces(scale0, at + 1, K, PART, GROUP_K, INNER_STRIDES[2], OF_PIECES)
                    if SHIFTED:
                        zero_bits0 = bits_of_pieces(zero0, at + 1, K, PART, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
                    if SCALED:
                        total0 += mma_v2(numbers, rows, nothing) * factor0
                    else:
                        total0 = mma_v2(numbers, rows, total0)
                    lot = words.slice(ROWS, ROWS, dim=0).slice(part * PART_WORDS, PART_WORDS, dim=1).load(OF_WORDS)
                    numbers = first_operand(lot, bits1, inner, zero_bits1, zeros, SHIFTED, PACKED, PART, KIND, OPERAND)
                    if EXACT:
                        bits1 = bits_of_pieces(scale1, at + 1, K, PART, GROUP_K, INNER_STRIDES[2], OF_PIECES)
                    if SHIFTED:
                        zero_bits1 = bits_of_pieces(zero1, at + 1, K, PART, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
                    if SCALED:
                        total1 += mma_v2(numbers, rows, nothing) * factor1
                    else:
                        total1 = mma_v2(numbers, rows, total1)
            done_with(empty, stage)
            place += 1
        total0 = _finished(total0, 0, expert, n_start, OF_ROWS, decoding, bias, SIZES)
        total1 = _finished(total1, 1, expert, n_start, OF_ROWS, decoding, bias, SIZES)
        if GLU == CONCAT:
            gate, up = (total1, total0) if SWAPPED else (total0, total1)
            value = apply_activation(gate, up, alpha, limit, ACTIVATION, True)
            leave(value, staged.index(0), out_desc, first, past, n_start, OUT_ORDER)
        elif GLU == INTERLEAVED:
            left = _activated(total0, alpha, limit, ACTIVATION)
            right = _activated(total1, alpha, limit, ACTIVATION)
            value = gl.join(left, right).permute([2, 0, 1]).reshape([ROWS, BLOCK_M])
            leave(value, staged.index(0), out_desc, first, past, n_start, OUT_ORDER)
        else:
            if ACTIVATION is not None:
                total0 = apply_activation(total0, total0, alpha, limit, ACTIVATION, False)
                total1 = apply_activation(total1, total1, alpha, limit, ACTIVATION, False)
            leave(total0, staged.index(0), out_desc, first, past, n_start, OUT_ORDER)
            leave(total1, staged.index(0), out_desc, first, past, n_start + ROWS, OUT_ORDER)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "up_scale_offset", "up_zeros_offset", "up_outer_offset"])
def _decoded_few_mm_kernel(
    a_desc,
    extents,
    w_desc,
    w_scale,
    w_zeros,
    w_outer,
    up_scale_offset,
    up_zeros_offset,
    up_outer_offset,
    bias,
    out_desc,
    num_rows,
    alpha,
    limit,
    E: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STRIDES: gl.constexpr,
    BLOCK: gl.constexpr,
    GLU: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SWAPPED: gl.constexpr,
    SCHEME: gl.constexpr,
    BATCHED: gl.constexpr,
    PDL: gl.constexpr,
    KNOWN: gl.constexpr,
):
    """As many programs as run at once, every num_programs-th tile of BLOCK_M rows of one expert times BLOCK_N rows of
    its weight.

    Args: see `decoded_mm._decoded_mm_kernel`; KNOWN: only the rows, and what the output lies on, wait for the kernel
    before, see `expert_mm.grouped_mm`.
    """
    COLUMNS: gl.constexpr = columns_of(BLOCK[1], GLU)
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    THREADS: gl.constexpr = 32 * gl.num_warps()
    rows_of, words_of, staged, full, empty = buffers(a_desc, w_desc, out_desc, 1, 1, 1, BLOCK[6], THREADS)
    if not KNOWN:
        pdl_wait(PDL)
    pdl_release(PDL)
    inner, zeros, outer, bias = for_partitions(w_scale, w_zeros, w_outer, bias, extents, STRIDES)
    decoding = (inner, zeros, outer, up_scale_offset, up_zeros_offset, up_outer_offset)
    given = (rows_of, words_of, full, empty, staged, out_desc, extents, num_rows, decoding, bias, alpha, limit)
    brought = (a_desc, w_desc, rows_of, words_of, full, empty, extents, num_rows)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, SCHEME, BATCHED, KNOWN)
    gl.warp_specialize([(_multiply, (given, SIZES)), (_bring, (brought, SIZES))], [1], [24])
