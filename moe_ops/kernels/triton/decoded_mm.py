"""Expert GEMMs of many rows whose weights are codes that are decoded in registers, for Hopper.

What `packed_tile` computes, with the loop written out: Triton's pipeline waits for each product whose first operand is
in registers before the next codes are decoded into them. Here one warp has descriptors bring weights and rows, and the
others decode one step's codes into registers while the tensor cores multiply those of the step before. Columns are in
an order in which a thread's codes are side by side (`order`); both halves of a gated weight meet in one thread: nothing
moves between threads but the result on its way out. Where sums wait for the scales of groups of columns, two groups of
four warps have half of a tile's weight rows each: one decodes and scales while the other multiplies.

A tile has 128 or 256 rows of tokens; of an expert's last ones a half or a quarter is multiplied where there are no
more. Programs draw tiles: as every num_programs-th tile they would get ends alone, or none.

us of a layer on an H200, in bf16, by tiles of 128 rows without short ends, with these, and by 256 rows with them and
drawn: Qwen3-30B-A3B, T = 4096, mxfp4 669, 796, 788, 689, int8_w8a16 669, 814, 807, 702, by 128 rows and drawn
int4_w4a16 646, 809, 669; Mixtral-8x7B, T = 4096, mxfp4 4816, 5676 (128), 4907 (256), drawn 4752 beside 4747. Tried,
and no faster: rows that are gathered from tokens, and two groups of warps for 256 rows, for which there are no
registers (benchmarks/comparisons/h200-short-ends.json); on an H100 steps of 128 columns, 256 weight rows
(h100-decoded-mm.json). gpt-oss-120b, scales loaded one step before, and prefetched and for 64 rows two: 64 rows,
T = 1000, mxfp4 1322, 1083, nvfp4 1467, 1157; 128 rows, T = 5000, mxfp4 3011, 2878, nvfp4 3512, 3110
(h200-decoded-scales.json).

Written in Gluon, Triton's language of layouts, which has no interpreter: that runs `packed_tile` for the same products.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.codes import (
    E2M1,
    INT4,
    codes_of_word,
    decode_words,
)
from moe_ops.kernels.triton.hopper import (
    buffers,
    drawn,
    no_more_tiles,
    said_tile,
    say_tile,
    table_of_tiles,
    tiles_told,
    write,
)
from moe_ops.kernels.triton.order import in_order
from moe_ops.kernels.triton.packed_tile import factor_of, fetch, of_rows, shift_of, unit_of
from moe_ops.kernels.triton.scales import load_scale
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait


@gluon.constexpr_function
def bits_below(size):
    return [1 << at for at in range(size.bit_length() - 1)]


@gluon.constexpr_function
def rows_layout(warps, columns, unit, glu):
    """[16 * warps, columns] of weight rows, of which a thread has those that are 8 apart in the product: a gate's and
    the same one of the up half; and of every `unit` columns a quarter.
    """
    run = unit // 4
    lanes = [[0, run], [0, 2 * run]] + [[row, 0] for row in ((2, 4, 8) if glu == INTERLEAVED.value else (1, 2, 4))]
    pair, first = {NOT_GATED.value: (8, 16), CONCAT.value: (8 * warps, 8), INTERLEAVED.value: (1, 16)}[glu]
    registers = (
        [[0, at] for at in bits_below(run)] + [[0, unit * at] for at in bits_below(columns // unit)] + [[pair, 0]]
    )
    return gl.DistributedLinearLayout(
        registers, lanes, [[first * at, 0] for at in bits_below(warps)], [], [16 * warps, columns]
    )


@gluon.constexpr_function
def pieces_of(exact, block_k, group, unit):
    """Parts of a step's columns that are one thread's and have one scale."""
    return max(4 * block_k // unit, block_k // group if exact else 0)


@gluon.constexpr_function
def columns_of(block_n, glu):
    """Output columns of a tile."""
    return block_n // 2 if glu else block_n


@gluon.constexpr_function
def steps_of(depth, block_k):
    """Steps of a tile, an even number: what is behind the last column is 0."""
    return -(-depth // (2 * block_k)) * 2


@gluon.jit
def _prefetch(pointers):
    """Have L2 hold what is there; nobody waits for it."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(gl.int64)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _prefetch_scales(scale, apart, expert, n_tile, SIZES: gl.constexpr):
    """Have L2 hold the scales of groups of a tile's weight rows, by one warp. Rows of scales begin anywhere in a sector
    of 32 bytes (those of 2880 columns have 90), so that in every step other rows' would come from memory, and all rows
    of a product wait for the last.
    """
    N: gl.constexpr = SIZES[1]
    HEIGHT: gl.constexpr = SIZES[4][1]
    GLU: gl.constexpr = SIZES[6]
    PACKED: gl.constexpr = SIZES[9][4]
    STRIDES: gl.constexpr = SIZES[3][1]
    LAST: gl.constexpr = (SIZES[2] + PACKED[4] - 1) // PACKED[4] - 1
    SECTOR: gl.constexpr = 256 // scale.dtype.element_ty.primitive_bitwidth
    BY_LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n_start = n_tile * columns_of(HEIGHT, GLU)
    row, half, exists = stacked_rows(HEIGHT, BY_LANE, n_start, N, GLU, SIZES[8], False)
    row = gl.where(exists, row, 0)
    first = of_rows(scale, apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)
    for group in range(0, LAST + SECTOR, SECTOR):
        _prefetch(first + gl.minimum(group, LAST) * STRIDES[2])


@gluon.jit
def _bring_tile(given, where, place, TOKENS: gl.constexpr, SIZES: gl.constexpr):
    """Have weights and TOKENS rows of a tile's steps brought, as soon as there is room; where the next step is."""
    a_desc, w_desc, rows_of, words_of, tiles_of, full, empty = given
    expert, first, past, n_tile = where
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    STAGES: gl.constexpr = BLOCK[6]
    GROUPS: gl.constexpr = BLOCK[7]
    BOX: gl.constexpr = a_desc.block_shape[0]
    BOXES: gl.constexpr = BLOCK[0] // BOX
    ROWS: gl.constexpr = w_desc.block_shape[-2]
    WORDS: gl.constexpr = w_desc.block_shape[-1]
    OF_ROWS: gl.constexpr = TOKENS * BLOCK[2] * a_desc.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = OF_ROWS + BLOCK[1] * WORDS * w_desc.dtype.primitive_bitwidth // 8
    for step in range(steps_of(SIZES[2], BLOCK[2])):
        stage = place % STAGES
        arrived = full.index(stage)
        mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
        if step == 0:
            say_tile(tiles_of, stage, expert, first, past, n_tile)
            gl.thread_barrier()
        mbarrier.expect(arrived, BYTES)
        for box in gl.static_range(TOKENS // BOX):
            at = [first + box * BOX, step * BLOCK[2]]
            tma.async_copy_global_to_shared(a_desc, at, arrived, rows_of.index(stage * BOXES + box))
        for group in gl.static_range(GROUPS):
            words = words_of.index(stage * GROUPS + group)
            at = (n_tile * GROUPS + group) * ROWS
            if GLU == CONCAT:
                tma.async_copy_global_to_shared(w_desc, [expert, 0, at, step * WORDS], arrived, words)
            else:
                tma.async_copy_global_to_shared(w_desc, [expert, at, step * WORDS], arrived, words)
        place += 1
    return place


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that draws tiles, and has rows and weights of their steps brought."""
    a_desc, w_desc, rows_of, words_of, tiles_of, full, empty, extents, num_rows, scale, apart, told = given
    E: gl.constexpr = SIZES[0]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[10]
    MOST: gl.constexpr = BLOCK[0]
    FEWEST: gl.constexpr = a_desc.block_shape[0]
    brought = (a_desc, w_desc, rows_of, words_of, tiles_of, full, empty)
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    tile = drawn(told)
    while tile < tiles:
        expert, first, past, n_tile = find_tile(tile, table, MOST, 0, N_TILES, BLOCK[3])
        if SIZES[3][1] is not None and SIZES[9][4][4] > 0:  # scales, and of groups of columns
            _prefetch_scales(scale, apart, expert, n_tile, SIZES)
        where = (expert, first, past, n_tile)
        if MOST == FEWEST or past - first > MOST // 2:
            place = _bring_tile(brought, where, place, MOST, SIZES)
        elif MOST == 2 * FEWEST or past - first > MOST // 4:
            place = _bring_tile(brought, where, place, MOST // 2, SIZES)
        else:
            place = _bring_tile(brought, where, place, MOST // 4, SIZES)
        tile = drawn(told)
    no_more_tiles(tiles_of, place, full, empty, STAGES=BLOCK[6])


@gluon.jit
def _spread(values, LIKE: gl.constexpr):
    """Of each piece of a step [rows, pieces], for each of its numbers in the layout that they are decoded to."""
    ROWS: gl.constexpr = values.shape[0]
    PIECES: gl.constexpr = values.shape[1]
    WORDS: gl.constexpr = LIKE.shape[1]
    found = tl.broadcast_to(values.reshape([ROWS, PIECES, 1]), [ROWS, PIECES, WORDS // PIECES])
    found = tl.broadcast_to(found.reshape([ROWS, WORDS, 1, 1]), LIKE.shape)
    return gl.convert_layout(found, LIKE.layout, assert_trivial=True)


@gluon.jit
def bits_of_pieces(
    first, step, K: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_K: gl.constexpr, STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bits of what belongs to the pieces of a step; `first` is where that of column 0 is. The last stands in for those
    behind a row.
    """
    PIECES: gl.constexpr = LAYOUT.shape[1]
    LAST: gl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    column = gl.arange(0, PIECES, layout=gl.SliceLayout(0, LAYOUT))[None, :] * (BLOCK_K // PIECES)
    if GROUP_K == 0:
        group = column * 0
    elif GROUP_K % BLOCK_K == 0:
        group = column * 0 + gl.minimum(step * BLOCK_K // GROUP_K, LAST)
    elif K % BLOCK_K == 0 and BLOCK_K % GROUP_K == 0:
        group = column // GROUP_K + gl.minimum(step, K // BLOCK_K - 1) * (BLOCK_K // GROUP_K)
    else:
        group = gl.minimum((step * BLOCK_K + column) // GROUP_K, LAST)
    return fetch(first + group * STRIDE)


@gluon.jit
def first_operand(
    words, bits, inner, zero_bits, zeros, SHIFTED: gl.constexpr, PACKED: gl.constexpr, BLOCK_K: gl.constexpr,
    GLU: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Weights [rows, BLOCK_K] as a product's first operand, in the order of its columns."""
    CODE: gl.constexpr = PACKED[0]
    EXACT: gl.constexpr = PACKED[2]
    PER_WORD: gl.constexpr = codes_of_word(CODE)
    SHIFT: gl.constexpr = shift_of(PACKED)
    ROWS: gl.constexpr = words.shape[0]
    decoded = decode_words(words, None, CODE, EXACT)
    if EXACT:
        decoded *= _spread(factor_of(bits, inner, EXACT, SHIFT), decoded.type)
    if SHIFTED:
        # Integers of at most nine bits, as bf16 has them; 8 is subtracted already.
        zero = (zero_bits << 24) >> 24 if zeros.dtype.element_ty == gl.int8 else zero_bits
        decoded -= _spread((zero - 8 if CODE == INT4 else zero).to(gl.bfloat16), decoded.type)
    return in_product(in_order(decoded.reshape([ROWS, BLOCK_K]), PACKED[10], PER_WORD), GLU, OPERAND)


@gluon.jit
def weights_of(decoded, factor, PACKED: gl.constexpr, BLOCK_K: gl.constexpr, GLU: gl.constexpr, OPERAND: gl.constexpr):
    """The same of words that are decoded, times what is each piece's."""
    numbers = decoded * _spread(factor, decoded.type)
    ordered = in_order(numbers.reshape([decoded.shape[0], BLOCK_K]), PACKED[10], codes_of_word(PACKED[0]))
    return in_product(ordered, GLU, OPERAND)


@gluon.jit
def in_product(decoded, GLU: gl.constexpr, OPERAND: gl.constexpr):
    """Weights [rows, columns] as the first operand of a product, whose rows that are 8 apart are of one output."""
    ROWS: gl.constexpr = decoded.shape[0]
    COLUMNS: gl.constexpr = decoded.shape[1]
    if GLU == CONCAT:
        decoded = decoded.reshape([2, ROWS // 16, 8, COLUMNS]).permute([1, 0, 2, 3]).reshape([ROWS, COLUMNS])
    elif GLU == INTERLEAVED:
        decoded = decoded.reshape([ROWS // 16, 8, 2, COLUMNS]).permute([0, 2, 1, 3]).reshape([ROWS, COLUMNS])
    return gl.convert_layout(decoded, OPERAND, assert_trivial=True)


@gluon.jit
def stacked_rows(
    HEIGHT: gl.constexpr, LAYOUT: gl.constexpr, n_start, N: gl.constexpr, GLU: gl.constexpr, SWAPPED: gl.constexpr,
    IN_PRODUCT: gl.constexpr,
):  # fmt: skip
    """(row of its stack, half, whether it exists) of each of a group's weight rows [HEIGHT], as they come or as the
    product has them; n_start: the group's first output column.
    """
    row = gl.arange(0, HEIGHT, layout=LAYOUT)
    if GLU == NOT_GATED:
        half = row * 0
        output = n_start + row
        row = output
    elif GLU == CONCAT:
        if IN_PRODUCT:
            half = row // 8 % 2
            output = n_start + row // 16 * 8 + row % 8
        else:
            half = row // (HEIGHT // 2)
            output = n_start + row % (HEIGHT // 2)
        if SWAPPED:
            half = 1 - half
        row = output
    else:
        output = n_start + (row // 16 * 8 + row % 8 if IN_PRODUCT else row // 2)
        row = 2 * output + (row // 8 % 2 if IN_PRODUCT else row % 2)
        half = row * 0
    return row, half, output < N


@gluon.jit
def finished(total, row, half, expert, decoding, bias, SIZES: gl.constexpr, IN_UNITS: gl.constexpr = True):
    """Sums of weight rows `row` of `half` with what comes behind the loop: the codes' unit, where sums are IN_UNITS,
    scales of rows, a bias.
    """
    N: gl.constexpr = SIZES[1]
    STRIDES: gl.constexpr = SIZES[3]
    PACKED: gl.constexpr = SIZES[9][4]
    BIAS_STRIDES: gl.constexpr = STRIDES[2]
    OUTER_STRIDES: gl.constexpr = STRIDES[5]
    _, _, outer, _, _, outer_apart = decoding
    if unit_of(PACKED) != 1.0 and (IN_UNITS or PACKED[0] != E2M1):
        total *= unit_of(PACKED)
    if OUTER_STRIDES is not None:
        pointers = of_rows(outer, outer_apart, expert, row, half, N, PACKED[6], PACKED[7], OUTER_STRIDES)
        total *= load_scale(pointers)[:, None]
    if BIAS_STRIDES is not None:
        where = bias + expert.to(gl.int64) * BIAS_STRIDES[0] + (row + half * N) * BIAS_STRIDES[1]
        total += gl.load(where).to(gl.float32)[:, None]
    return total


@gluon.jit
def gate_and_up(total):
    """Of sums of rows that are of one half and of the other by eights; both [rows / 16, 8, columns]."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    return gl.split(total.reshape([ROWS // 16, 2, 8, COLUMNS]).permute([0, 2, 3, 1]))


@gluon.jit
def leave(value, staged, out_desc, first, past, n_start, ORDER: gl.constexpr):
    """Write columns n_start and on [columns, rows] of a tile's rows, in the order that the next product has."""
    out = value.to(staged.dtype).permute([1, 0])
    if ORDER is not None:
        out = in_order(out, ORDER[0], ORDER[1])
    write(out, staged, out_desc, first, past, n_start)


@gluon.jit
def _tile(given, where, GROUP: gl.constexpr, TOKENS: gl.constexpr, SIZES: gl.constexpr):
    """A group's weight rows of a tile, which it decodes, times the tile's rows, no more than TOKENS; where the next
    step is.
    """
    rows_of, words_of, _, full, empty, staged, out_desc, decoding, bias, alpha, limit = given
    expert, first, past, n_tile, place = where
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3]
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    SWAPPED: gl.constexpr = SIZES[8]
    SCHEME: gl.constexpr = SIZES[9]
    BLOCK_K: gl.constexpr = BLOCK[2]
    STAGES: gl.constexpr = BLOCK[6]
    PACKED: gl.constexpr = SCHEME[4]
    CODE: gl.constexpr = PACKED[0]
    EXACT: gl.constexpr = PACKED[2]
    GROUP_K: gl.constexpr = PACKED[4]
    OUT_ORDER: gl.constexpr = SCHEME[6]
    GROUPS: gl.constexpr = BLOCK[7]
    WARPS: gl.constexpr = gl.num_warps()
    HEIGHT: gl.constexpr = 16 * WARPS
    UNIT: gl.constexpr = PACKED[10] if PACKED[10] > 0 else BLOCK_K
    WORDS: gl.constexpr = BLOCK_K // codes_of_word(CODE)
    PIECES: gl.constexpr = pieces_of(EXACT, BLOCK_K, GROUP_K, UNIT)
    STEPS: gl.constexpr = steps_of(K, BLOCK_K)
    LAST: gl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    COLUMNS: gl.constexpr = columns_of(HEIGHT, GLU)
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    OF_WORDS: gl.constexpr = rows_layout(WARPS, WORDS, UNIT // codes_of_word(CODE), GLU)
    OF_PIECES: gl.constexpr = rows_layout(WARPS, PIECES, PIECES * UNIT // BLOCK_K, GLU)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    inner, zeros, _, inner_apart, zeros_apart, _ = decoding
    INNER_STRIDES: gl.constexpr = STRIDES[1]
    ZERO_STRIDES: gl.constexpr = STRIDES[4]
    SHIFTED: gl.constexpr = ZERO_STRIDES is not None
    gl.static_assert(EXACT or GROUP_K % BLOCK_K == 0, "a step is within a group")
    TWO: gl.constexpr = EXACT and TOKENS <= 64  # steps ahead of which scales are loaded: a step of more rows is longer
    SCALED: gl.constexpr = INNER_STRIDES is not None and not EXACT  # group by group, where their sums are complete
    EACH: gl.constexpr = SCALED and GROUP_K % (2 * BLOCK_K) != 0  # after every step, else after every other
    rows_of = rows_of._reinterpret(rows_of.dtype, [STAGES * (BLOCK[0] // TOKENS), TOKENS, BLOCK_K], rows_of.layout)
    n_start = (n_tile * GROUPS + GROUP) * COLUMNS
    row, half, exists = stacked_rows(HEIGHT, gl.SliceLayout(1, OF_PIECES), n_start, N, GLU, SWAPPED, False)
    held = gl.where(exists, row, 0)[:, None]
    half = half[:, None]
    row, in_half, exists = stacked_rows(HEIGHT, OF_ROWS, n_start, N, GLU, SWAPPED, True)
    row = gl.where(exists, row, 0)
    bits, ahead, zero_bits = 0, 0, 0
    scales, zero, per_row = None, None, None
    if EXACT:
        scales = of_rows(inner, inner_apart, expert, held, half, N, PACKED[3], PACKED[5], INNER_STRIDES)
        bits = bits_of_pieces(scales, 0, K, BLOCK_K, GROUP_K, INNER_STRIDES[2], OF_PIECES)
    if TWO:
        ahead = bits_of_pieces(scales, 1, K, BLOCK_K, GROUP_K, INNER_STRIDES[2], OF_PIECES)
    if SCALED:
        per_row = of_rows(inner, inner_apart, expert, row, in_half, N, PACKED[3], PACKED[5], INNER_STRIDES)
    if SHIFTED:
        zero = of_rows(zeros, zeros_apart, expert, held, half, N, PACKED[3], PACKED[5], ZERO_STRIDES)
        zero_bits = bits_of_pieces(zero, 0, K, BLOCK_K, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
    total = gl.zeros([HEIGHT, TOKENS], gl.float32, layout=SUM)
    product = warpgroup_mma_init(total)
    for pair in range(STEPS // 2):
        for part in gl.static_range(2):
            step = pair * 2 + part
            stage, before = place % STAGES, (place + STAGES - 1) % STAGES
            if SCALED and (EACH or part == 0):
                group_k = gl.minimum(step * BLOCK_K // GROUP_K, LAST)
                factor = factor_of(fetch(per_row + group_k * INNER_STRIDES[2]), inner, False, 0)
            mbarrier.wait(full.index(stage), (place // STAGES) & 1)
            words = words_of.index(stage * GROUPS + GROUP).reshape([HEIGHT, WORDS]).load(OF_WORDS)
            numbers = first_operand(words, bits, inner, zero_bits, zeros, SHIFTED, PACKED, BLOCK_K, GLU, OPERAND)
            if TWO:
                bits = ahead
                ahead = bits_of_pieces(scales, step + 2, K, BLOCK_K, GROUP_K, INNER_STRIDES[2], OF_PIECES)
            elif EXACT:
                bits = bits_of_pieces(scales, step + 1, K, BLOCK_K, GROUP_K, INNER_STRIDES[2], OF_PIECES)
            if SHIFTED:
                zero_bits = bits_of_pieces(zero, step + 1, K, BLOCK_K, GROUP_K, ZERO_STRIDES[2], OF_PIECES)
            rows = rows_of.index(stage * (BLOCK[0] // TOKENS)).permute((1, 0))
            use_acc = not SCALED or (part == 1 and not EACH)
            product = warpgroup_mma(numbers, rows, product, use_acc=use_acc, is_async=True)
            if not SCALED:
                product = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[product]))
                mbarrier.arrive(empty.index(before), pred=step > 0)
            elif EACH or part == 1:
                summed = warpgroup_mma_wait(0, deps=[product])
                if not EACH:
                    mbarrier.arrive(empty.index(before))
                mbarrier.arrive(empty.index(stage))
                total += summed * factor[:, None]
                product = warpgroup_mma_init(summed)
            place += 1
    if not SCALED:
        total = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index((place + STAGES - 1) % STAGES))
    total = finished(total, row, in_half, expert, decoding, bias, SIZES)
    if GLU == NOT_GATED:
        value = total
        if ACTIVATION is not None:
            value = apply_activation(total, total, alpha, limit, ACTIVATION, False)
    else:
        gate, up = gate_and_up(total)
        if SWAPPED:
            gate, up = up, gate
        value = apply_activation(gate, up, alpha, limit, ACTIVATION, True).reshape([COLUMNS, TOKENS])
    leave(value, staged.index(GROUP), out_desc, first, past, n_start, OUT_ORDER)
    return place


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its weight rows of every tile times the tile's rows, whose last may be half or a quarter."""
    rows_of, tiles_of, full = given[0], given[2], given[3]
    MOST: gl.constexpr = SIZES[4][0]
    FEWEST: gl.constexpr = rows_of.shape[1]
    STAGES: gl.constexpr = SIZES[4][6]
    place = 0
    expert, first, past, n_tile = said_tile(tiles_of, place, full, STAGES)
    while past > 0:
        where = (expert, first, past, n_tile, place)
        if MOST == FEWEST or past - first > MOST // 2:
            place = _tile(given, where, GROUP, MOST, SIZES)
        elif MOST == 2 * FEWEST or past - first > MOST // 4:
            place = _tile(given, where, GROUP, MOST // 2, SIZES)
        else:
            place = _tile(given, where, GROUP, MOST // 4, SIZES)
        expert, first, past, n_tile = said_tile(tiles_of, place, full, STAGES)
    tma.store_wait(0)


@gluon.jit
def for_partitions(w_scale, w_zeros, w_outer, bias, extents, STRIDES: gl.constexpr):
    """These, or for what is absent, which has no strides, any pointer: a partition takes no None."""
    inner = w_scale if STRIDES[1] is not None else extents
    zeros = w_zeros if STRIDES[4] is not None else extents
    outer = w_outer if STRIDES[5] is not None else extents
    return inner, zeros, outer, bias if STRIDES[2] is not None else extents


@gluon.jit(do_not_specialize=["num_rows", "up_scale_offset", "up_zeros_offset", "up_outer_offset"])
def _decoded_mm_kernel(
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
    told,
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
):
    """One program for each multiprocessor; tiles of BLOCK_M rows of one expert times BLOCK_N rows of its weight, which
    programs draw one by one: those of an expert's last rows take less time.

    Args: see `expert_mm._expert_mm_kernel`. Rows, weights and output come and leave by descriptor, rows in the order of
    the product, a step's columns at a time; BLOCK[6]: steps that there is room for. told: a word that is 0.
    """
    COLUMNS: gl.constexpr = columns_of(BLOCK[1], GLU)
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = BLOCK[6]
    GROUPS: gl.constexpr = BLOCK[7]
    BOXES: gl.constexpr = BLOCK[0] // a_desc.block_shape[0]
    rows_of, words_of, staged, full, empty = buffers(a_desc, w_desc, out_desc, BOXES, GROUPS, GROUPS, STAGES)
    tiles_of = tiles_told(STAGES)
    pdl_wait(PDL)
    pdl_release(PDL)
    inner, zeros, outer, bias = for_partitions(w_scale, w_zeros, w_outer, bias, extents, STRIDES)
    decoding = (inner, zeros, outer, up_scale_offset, up_zeros_offset, up_outer_offset)
    # Warps of each further partition, and registers of its threads: the first has what is left. 384 threads have 168
    # each; one that brings tiles needs few, one of a group what it can get.
    given = (rows_of, words_of, tiles_of, full, empty, staged, out_desc, decoding, bias, alpha, limit)
    brought = (
        a_desc, w_desc, rows_of, words_of, tiles_of, full, empty, extents, num_rows, inner, up_scale_offset, told,
    )  # fmt: skip
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, SCHEME, BATCHED)
    if GROUPS == 1:
        gl.warp_specialize([(_multiply, (given, 0, SIZES)), (_bring, (brought, SIZES))], [1], [40])
    else:
        gl.warp_specialize(
            [(_multiply, (given, 0, SIZES)), (_multiply, (given, 1, SIZES)), (_bring, (brought, SIZES))],
            [4, 1],
            [232, 40],
        )
