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

Quantised rows are gathered, by each thread those that it multiplies, from memory where their e4m3 numbers are stored as
bf16: of mxfp4_a8 376 instructions beside 8 rows. Their sums wait for their scales.

Written in Gluon, Triton's language of layouts, which has no interpreter: that runs `packed_tile` for the same products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.codes import E2M1_UNIT, codes_of_word, decode_words
from moe_ops.kernels.triton.decoded_mm import (
    bits_below,
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
    weights_of,
)
from moe_ops.kernels.triton.hopper import buffers, done_with, table_of_tiles
from moe_ops.kernels.triton.order import in_order
from moe_ops.kernels.triton.packed_tile import factor_of, fetch, load_words, of_rows, takes_turns
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait, uniform

PART_COLUMNS = gl.constexpr(128)  # of a step that are decoded and multiplied at a time
CODES_UNIT = gl.constexpr(2.0**126)  # of e2m1 as it is decoded


@gluon.jit
def _step_of(
    given, expert, first, n_tile, step, stage, ROWS_TOO: gl.constexpr, WEIGHTS_TOO: gl.constexpr, SIZES: gl.constexpr
):
    """Have a step's weights, or rows, or both brought into the memory of a stage."""
    a_desc, w_desc, rows_of, words_of, full, _, _, _ = given
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    GATHERED: gl.constexpr = SIZES[12] is not None
    WORDS: gl.constexpr = w_desc.block_shape[-1]
    OF_ROWS: gl.constexpr = 0 if GATHERED else BLOCK[0] * BLOCK[2] * a_desc.dtype.primitive_bitwidth // 8
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
    if ROWS_TOO and not GATHERED:
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
    GATHERED: gl.constexpr = SIZES[12] is not None
    STEPS: gl.constexpr = (SIZES[2] + BLOCK[2] - 1) // BLOCK[2]
    STAGES: gl.constexpr = BLOCK[6]
    AHEAD: gl.constexpr = min(STAGES, STEPS) if KNOWN and not GATHERED else 0
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    if AHEAD > 0:
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
    return finished(total, row, half, expert, decoding, bias, SIZES, not takes_turns(SIZES[9][4]))


@gluon.constexpr_function
def _tokens_layout(warps, rows, columns, unit):
    """[rows, columns] of tokens, of which a thread has the columns that it has of weight rows, see `rows_layout`: in
    every warp the same.
    """
    run = unit // 4
    registers = [[0, at] for at in bits_below(run)] + [[0, unit * at] for at in bits_below(columns // unit)]
    registers += [[8 * at, 0] for at in bits_below(rows // 8)]
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0] for _ in bits_below(warps)], [], [rows, columns])


@gluon.jit
def _sources(first, past, row_to_pair, LAYOUT: gl.constexpr, ROWS: gl.constexpr, TOP_K: gl.constexpr):
    """Where each row of a tile comes from; the last one stands in for those that do not exist."""
    row = gl.minimum(first + gl.arange(0, ROWS, layout=LAYOUT), past - 1)
    if TOP_K > 0:
        row = gl.load(row_to_pair + row) // TOP_K
    return row.to(gl.int64)


@gluon.jit
def _tokens(rows, start, K: gl.constexpr, UNIT: gl.constexpr, PER_WORD: gl.constexpr, OPERAND: gl.constexpr):
    """Columns `start` and on of gathered rows as a product's second operand, 0 behind the last."""
    LAYOUT: gl.constexpr = rows.type.layout
    COLUMNS: gl.constexpr = rows.shape[1]
    if K % COLUMNS == 0:
        found = gl.load(rows + start)
    else:
        column = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        found = gl.load(rows + start, mask=(column < K)[None, :], other=0.0)
    return gl.convert_layout(in_order(found, UNIT, PER_WORD).permute((1, 0)), OPERAND, assert_trivial=True)


@gluon.jit
def _activated(total, alpha, limit, ACTIVATION: gl.constexpr):
    """Of rows of gates and ups that alternate, eight of each, what comes out of them."""
    gate, up = gate_and_up(total)
    value = apply_activation(gate, up, alpha, limit, ACTIVATION, True)
    return value.reshape([total.shape[0] // 2, total.shape[1]])


@gluon.constexpr_function
def _by_each_warp(rows, warps):
    """[rows, 16] of which each warp has all."""
    registers = [[0, 1], [0, 2]] + [[8 * at, 0] for at in bits_below(rows // 8)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0] for _ in bits_below(warps)], [], [rows, 16])


@gluon.constexpr_function
def _uppermost(size):
    """The uppermost bit of each of so many bytes, as an i32."""
    return 0x80808080 - 2**32 if size == 4 else 0x80808080 >> 8 * (4 - size)


@gluon.jit
def _all_held(given, expert, n_start, ROWS: gl.constexpr, SIZES: gl.constexpr):
    """Whether every scale of a tile's weight rows, an exponent, is in 64 .. 191: then one number of bf16 holds a code
    times its scale in the units of all others. Every warp reads them all, so that none waits for another.
    """
    decoding = given[8]
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3][1]
    PACKED: gl.constexpr = SIZES[9][4]
    BYTES: gl.constexpr = PACKED[9]  # that may be loaded at once
    WORDS: gl.constexpr = (K + PACKED[4] * BYTES - 1) // (PACKED[4] * BYTES)
    AT_ONCE: gl.constexpr = 16
    LAYOUT: gl.constexpr = _by_each_warp(ROWS, gl.num_warps())
    inner, apart = decoding[0], decoding[3]
    upper = gl.full([ROWS, AT_ONCE], -1, gl.int32, layout=LAYOUT)
    for lot in gl.static_range(2):
        row, half = _rows_of_lot(lot, ROWS, gl.SliceLayout(1, LAYOUT), n_start, SIZES, False)
        of_row = of_rows(inner, apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)
        for start in range(0, WORDS, AT_ONCE):
            word = gl.minimum(start + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, LAYOUT)), WORDS - 1)
            bits = load_words(of_row[:, None] + word[None, :] * (BYTES * STRIDES[2]), BYTES)
            upper &= bits ^ (bits << 1)  # whose uppermost two bits differ
    EACH: gl.constexpr = _uppermost(BYTES)
    outside = gl.max(gl.max(((upper & EACH) != EACH).to(gl.int32), axis=1), axis=0)
    return uniform(outside) == 0


@gluon.jit
def _product_apart(
    words, bits, rows, nothing, factor, PACKED: gl.constexpr, PART: gl.constexpr, KIND: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """A part's product times `factor`, of e2m1 whose scales are any powers of two: the sum of two, one of the scales
    below 2 in units of 2^-64, one of the others in units of 2^64.
    """
    decoded = decode_words(words, None, PACKED[0]) * CODES_UNIT  # in bf16, not in units
    low = gl.where(bits < 128, (bits + 64) << 7, 0)
    high = gl.where(bits >= 128, gl.where(bits == 255, 0x7FC0, (bits - 64) << 7), 0)
    below = weights_of(decoded, low.to(gl.int16).to(gl.bfloat16, bitcast=True), PACKED, PART, KIND, OPERAND)
    above = weights_of(decoded, high.to(gl.int16).to(gl.bfloat16, bitcast=True), PACKED, PART, KIND, OPERAND)
    return mma_v2(below, rows, nothing) * factor * 2.0**-64 + mma_v2(above, rows, nothing) * factor * 2.0**64


@gluon.jit
def _sum_columns(
    given, gathered, expert, n_start, place, APART: gl.constexpr, LAYOUTS: gl.constexpr, SIZES: gl.constexpr
):
    """The sums over all columns of a tile's weight rows, in two lots, and the next step's number.

    Args:
        gathered: of rows that are gathered where these and their scales are.
        APART: whether scales below 2 and others have sums of their own, in which every scale counts.
    """
    rows_of, words_of, full, empty, _, _, _, _, decoding, _, _, _, _ = given
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3]
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    SCHEME: gl.constexpr = SIZES[9]
    GATHERED: gl.constexpr = SIZES[12] is not None
    BLOCK_M: gl.constexpr = BLOCK[0]
    BLOCK_K: gl.constexpr = BLOCK[2]
    STAGES: gl.constexpr = BLOCK[6]
    PACKED: gl.constexpr = SCHEME[4]
    CODE: gl.constexpr = PACKED[0]
    EXACT: gl.constexpr = PACKED[2]
    GROUP_K: gl.constexpr = PACKED[4]
    ROWS_GROUP: gl.constexpr = PACKED[8]
    KIND: gl.constexpr = INTERLEAVED if GLU == INTERLEAVED else NOT_GATED
    SUM: gl.constexpr = LAYOUTS[0]
    OF_WORDS: gl.constexpr = LAYOUTS[1]
    OF_PIECES: gl.constexpr = LAYOUTS[2]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    OF_TOKENS: gl.constexpr = gl.DotOperandLayout(1, SUM, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    ROWS: gl.constexpr = OF_WORDS.shape[0]
    PART: gl.constexpr = min(BLOCK_K, PART_COLUMNS)
    PARTS: gl.constexpr = BLOCK_K // PART
    ALL_PARTS: gl.constexpr = (K + PART - 1) // PART
    PART_WORDS: gl.constexpr = PART // codes_of_word(CODE)
    WORDS: gl.constexpr = PARTS * PART_WORDS
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    LAST: gl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    gl.static_assert(EXACT or GROUP_K % PART == 0, "what is multiplied at a time is within a group")
    inner, zeros, _, inner_apart, zeros_apart, _ = decoding
    INNER_STRIDES: gl.constexpr = STRIDES[1]
    ZERO_STRIDES: gl.constexpr = STRIDES[4]
    SHIFTED: gl.constexpr = ZERO_STRIDES is not None
    SCALED: gl.constexpr = INNER_STRIDES is not None and not EXACT  # group by group, where their sums are complete
    WAITS: gl.constexpr = SCALED or ROWS_GROUP > 0
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
        if GATHERED:  # the first of them while the weights arrive
            rows = _tokens(gathered[0], step * BLOCK_K, K, PACKED[10], codes_of_word(CODE), OF_TOKENS)
        mbarrier.wait(full.index(stage), (place // STAGES) & 1)
        words = words_of.index(stage).reshape([2 * ROWS, WORDS])
        for part in gl.static_range(min(PARTS, ALL_PARTS)):
            if part == 0 or K % BLOCK_K == 0 or step * PARTS + part < ALL_PARTS:
                at = step * PARTS + part
                if GATHERED:
                    if part > 0:
                        rows = _tokens(gathered[0], at * PART, K, PACKED[10], codes_of_word(CODE), OF_TOKENS)
                else:
                    rows = rows_of.index(stage).slice(part * PART, PART, dim=1).permute((1, 0)).load(OF_TOKENS)
                factor0, factor1 = 1.0, 1.0
                if SCALED:
                    group = (gl.minimum(at * PART // GROUP_K, LAST) if GROUP_K > 0 else 0) * INNER_STRIDES[2]
                    factor0 = factor_of(fetch(scale0 + group), inner, False, 0)[:, None]
                    factor1 = factor_of(fetch(scale1 + group), inner, False, 0)[:, None]
                if ROWS_GROUP > 0:
                    of_row = gl.load(gathered[1] + at * PART // ROWS_GROUP)[None, :]
                    factor0 *= of_row
                    factor1 *= of_row
                lot = words.slice(0, ROWS, dim=0).slice(part * PART_WORDS, PART_WORDS, dim=1).load(OF_WORDS)
                if APART:
                    total0 += _product_apart(lot, bits0, rows, nothing, factor0, PACKED, PART, KIND, OPERAND)
                else:
                    numbers = first_operand(lot, bits0, inner, zero_bits0, zeros, SHIFTED, PACKED, PART, KIND, OPERAND)
                if EXACT:
                    bits0 = bits_of_pieces(scale0, at + 1, K, PART, GROUP_K, INNER_STRIDES[2], OF_PIECES)
                if SHIFTED:
                    zero_bits0 = bits_of_pieces(zero0, at + 1, K, PART, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
                if WAITS and not APART:
                    total0 += mma_v2(numbers, rows, nothing) * factor0
                elif not APART:
                    total0 = mma_v2(numbers, rows, total0)
                lot = words.slice(ROWS, ROWS, dim=0).slice(part * PART_WORDS, PART_WORDS, dim=1).load(OF_WORDS)
                if APART:
                    total1 += _product_apart(lot, bits1, rows, nothing, factor1, PACKED, PART, KIND, OPERAND)
                else:
                    numbers = first_operand(lot, bits1, inner, zero_bits1, zeros, SHIFTED, PACKED, PART, KIND, OPERAND)
                if EXACT:
                    bits1 = bits_of_pieces(scale1, at + 1, K, PART, GROUP_K, INNER_STRIDES[2], OF_PIECES)
                if SHIFTED:
                    zero_bits1 = bits_of_pieces(zero1, at + 1, K, PART, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
                if WAITS and not APART:
                    total1 += mma_v2(numbers, rows, nothing) * factor1
                elif not APART:
                    total1 = mma_v2(numbers, rows, total1)
        done_with(empty, stage)
        place += 1
    if takes_turns(PACKED) and not APART:
        total0 *= E2M1_UNIT
        total1 *= E2M1_UNIT
    return total0, total1, place


@gluon.jit
def _multiply(given, SIZES: gl.constexpr):
    """The warps that decode the weight rows of every tile, in two lots, and multiply them with the tile's rows."""
    _, _, _, _, staged, out_desc, extents, num_rows, decoding, bias, alpha, limit, sources = given
    a, a_scale, row_to_pair = sources
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    SWAPPED: gl.constexpr = SIZES[8]
    SCHEME: gl.constexpr = SIZES[9]
    BATCHED: gl.constexpr = SIZES[10]
    TOP_K: gl.constexpr = SIZES[12]
    BLOCK_M: gl.constexpr = BLOCK[0]
    PACKED: gl.constexpr = SCHEME[4]
    CODE: gl.constexpr = PACKED[0]
    OUT_ORDER: gl.constexpr = SCHEME[6]
    UNIT: gl.constexpr = PACKED[10]
    ROWS_GROUP: gl.constexpr = PACKED[8]
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    KIND: gl.constexpr = INTERLEAVED if GLU == INTERLEAVED else NOT_GATED
    PART: gl.constexpr = min(BLOCK[2], PART_COLUMNS)
    PIECES: gl.constexpr = pieces_of(PACKED[2], PART, PACKED[4], UNIT)
    COLUMNS: gl.constexpr = columns_of(2 * ROWS, GLU)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OF_WORDS: gl.constexpr = rows_layout(WARPS, PART // codes_of_word(CODE), UNIT // codes_of_word(CODE), KIND)
    OF_PIECES: gl.constexpr = rows_layout(WARPS, PIECES, PIECES * UNIT // PART, KIND)
    LAYOUTS: gl.constexpr = (SUM, OF_WORDS, OF_PIECES)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    if SIZES[11] and TOP_K is not None:
        pdl_wait(True)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
        n_start = n_tile * COLUMNS
        gathered = (extents, extents)
        if TOP_K is not None:
            OF_SOURCES: gl.constexpr = _tokens_layout(WARPS, BLOCK_M, PART, UNIT)
            source = _sources(first, past, row_to_pair, gl.SliceLayout(1, OF_SOURCES), BLOCK_M, TOP_K)
            column = gl.arange(0, PART, layout=gl.SliceLayout(0, OF_SOURCES))
            of_sums = _sources(first, past, row_to_pair, gl.SliceLayout(0, SUM), BLOCK_M, TOP_K)
            groups: gl.constexpr = (K + ROWS_GROUP - 1) // ROWS_GROUP if ROWS_GROUP > 0 else 1
            gathered = (a + source[:, None] * STRIDES[3] + column[None, :], a_scale + of_sums * groups)
        if not takes_turns(PACKED):
            total0, total1, place = _sum_columns(given, gathered, expert, n_start, place, False, LAYOUTS, SIZES)
        elif _all_held(given, expert, n_start, ROWS, SIZES):
            total0, total1, place = _sum_columns(given, gathered, expert, n_start, place, False, LAYOUTS, SIZES)
        else:
            total0, total1, place = _sum_columns(given, gathered, expert, n_start, place, True, LAYOUTS, SIZES)
        if TOP_K is not None and ROWS_GROUP == 0:
            of_row = gl.load(gathered[1])[None, :]
            total0 *= of_row
            total1 *= of_row
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
    a,
    a_scale,
    row_to_pair,
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
    TOP_K: gl.constexpr,
):
    """As many programs as run at once, every num_programs-th tile of BLOCK_M rows of one expert times BLOCK_N rows of
    its weight.

    Args: see `decoded_mm._decoded_mm_kernel`; KNOWN: only the rows, and what the output lies on, wait for the kernel
    before, see `expert_mm.grouped_mm`. Quantised rows, in place of those of `a_desc`, are bf16 numbers `a` with their
    scales `a_scale`; `row_to_pair` with TOP_K > 0: as in `expert_mm._expert_mm_kernel`. TOP_K is None without them.
    """
    COLUMNS: gl.constexpr = columns_of(BLOCK[1], GLU)
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    THREADS: gl.constexpr = 32 * gl.num_warps()
    ROWS: gl.constexpr = 1 if TOP_K is None else 0
    rows_of, words_of, staged, full, empty = buffers(a_desc, w_desc, out_desc, ROWS, 1, 1, BLOCK[6], THREADS)
    if not KNOWN:
        pdl_wait(PDL)
    pdl_release(PDL)
    if TOP_K is not None:  # a partition takes no None
        a_desc = w_desc
    pairs = row_to_pair if TOP_K is not None and TOP_K > 0 else extents
    sources = (extents, extents, extents) if TOP_K is None else (a, a_scale, pairs)
    inner, zeros, outer, bias = for_partitions(w_scale, w_zeros, w_outer, bias, extents, STRIDES)
    decoding = (inner, zeros, outer, up_scale_offset, up_zeros_offset, up_outer_offset)
    given = (rows_of, words_of, full, empty, staged, out_desc, extents, num_rows, decoding, bias, alpha, limit, sources)
    brought = (a_desc, w_desc, rows_of, words_of, full, empty, extents, num_rows)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, SCHEME, BATCHED, KNOWN, TOP_K)
    gl.warp_specialize([(_multiply, (given, SIZES)), (_bring, (brought, SIZES))], [1], [24])
