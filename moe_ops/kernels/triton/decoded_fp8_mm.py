"""Expert GEMMs of many rows of e4m3 and weights that are codes of four bits, for Hopper.

What `packed_fp8_tile` computes, with the loop written out. One warp has descriptors bring rows and weights; two groups
of four warps have 64 weight rows each, which they decode into registers, the first operand of their products. Tensor
cores add up 128 columns, more than which their own sums of e4m3 have too few bits for. Codes that are decoded once are
multiplied with up to 256 rows of tokens, in products of 64: each is added to its sum in fp32 while the next one is
under way, and beside the last one the next step's codes are decoded. Products that would have no rows are left out.

int4: a product is of one group of columns, whose scale every weight row has. e2m1: scales are powers of two and are
folded into the codes, which is exact in e5m2 for those that are within 2^WINDOW of each other. Two warps look up how
far those of a tile's weight rows are apart, a tile ahead; further apart, the columns are taken in turns. So rows of a
weight have no scales left, and the products wait for those of the rows of tokens alone, which one more warp copies.
What GEMM 1 leaves is quantised by another kernel: a tile has half of a scale group of its columns.

us of a layer on an H100, T = 4096, by fp8_block128 and this kernel: Qwen3-30B-A3B 548, w4a8_fp8 662, mxfp4_a8 996;
Mixtral-8x7B 2960, 3464, 4963. By fp8_block128 and `packed_fp8_tile`, another H100: 539, 830, 1225; 2770, 5522, 9417.
What instructions take decides: a warp's step has 325 of them, 128 of which add products to sums, and 407 had taken 5 to
8 % longer. What else was tried: benchmarks/comparisons/h100-decoded-fp8-mm.json.

Written in Gluon, which has no interpreter: that runs `packed_fp8_tile` for the same products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.codes import E2M1
from moe_ops.kernels.triton.decoded_mm import columns_of, in_product, rows_layout, stacked_rows
from moe_ops.kernels.triton.hopper import buffers, lots_of, ring, table_of_tiles, tile_of, write
from moe_ops.kernels.triton.packed_fp8_tile import (
    ABOVE,
    BELOW,
    FOLDED_UNIT,
    HIGH_BYTES,
    HIGH_POWER,
    INT4_UNIT,
    LOW_BYTES,
    LOW_POWER,
    NO_NUMBER,
    WINDOW,
    e2m1_parts,
    in_order,
    int4_parts,
    join_e2m1,
    join_int4,
)
from moe_ops.kernels.triton.packed_tile import factor_of, fetch, of_rows
from moe_ops.kernels.triton.scales import decode_scale, load_scale
from moe_ops.kernels.triton.tile_loads import CONCAT, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait

ROWS = gl.constexpr(64)  # of tokens, of a product
HEIGHT = gl.constexpr(64)  # weight rows of a group of warps
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS.value, 32]))  # a group's product
GROUPS = gl.constexpr(2)
AT_ONCE = gl.constexpr(4)  # steps whose scales of tokens come together
LOTS = gl.constexpr(2)  # of them that there is room for
MOST = gl.constexpr(4)  # products of a tile
NAN_SCALE = gl.constexpr(255)  # of e8m0
SLOTS = gl.constexpr(2)  # tiles whose scales are looked up, the one at hand among them


@gluon.jit
def _products(first, past):
    """How many products a tile has rows for that begins at the first and whose expert ends before the last."""
    return gl.minimum((past - first + ROWS - 1) // ROWS, MOST)


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that has rows and weights of every step of every tile brought, as soon as there is room."""
    a_desc, w_desc, rows_of, words_of, full, empty, extents, num_rows = given
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    BATCHED: gl.constexpr = SIZES[10]
    STAGES: gl.constexpr = BLOCK[6]
    STEP: gl.constexpr = BLOCK[2]
    OF_WEIGHTS: gl.constexpr = GROUPS * HEIGHT * STEP // 2
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    for number in range(lots_of(tiles)):
        expert, first, past, n_tile = find_tile(tile_of(number), table, BLOCK[0], 0, N_TILES, BLOCK[3])
        count = _products(first, past)
        for step in range((K + STEP - 1) // STEP if count > 0 else 0):
            stage, turn = place % STAGES, place // STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
            for some in gl.static_range(1, MOST + 1):
                mbarrier.expect(arrived, OF_WEIGHTS + some * ROWS * STEP, pred=count == some)
            for box in gl.static_range(MOST):
                where = [first + box * ROWS, step * STEP]
                tma.async_copy_global_to_shared(
                    a_desc, where, arrived, rows_of.index(stage * MOST + box), pred=box < count
                )
            for group in gl.static_range(GROUPS):
                words = words_of.index(stage * GROUPS + group)
                at = (n_tile * GROUPS + group) * words.shape[-2]
                if GLU == CONCAT:
                    tma.async_copy_global_to_shared(w_desc, [expert, 0, at, step * STEP // 4], arrived, words)
                else:
                    tma.async_copy_global_to_shared(w_desc, [expert, at, step * STEP // 4], arrived, words)
            place += 1


@gluon.jit
def _at(first, group, K: gl.constexpr, STRIDE: gl.constexpr, WIDE: gl.constexpr):
    """The bytes of four scales of columns, from number `group` on, in a word; the last stands in for those behind it.
    `first` is where that of column 0 is; WIDE: how many of a row may be loaded at once.
    """
    LAST: gl.constexpr = (K + 31) // 32 - 1
    if WIDE == 4:
        return fetch((first + gl.minimum(group, LAST - 3)).to(gl.pointer_type(gl.int32)))
    elif WIDE == 2:
        word = fetch((first + gl.minimum(group, LAST - 1)).to(gl.pointer_type(gl.int16))) & 0xFFFF
        return word | (fetch((first + gl.minimum(group + 2, LAST - 1)).to(gl.pointer_type(gl.int16))) << 16)
    else:
        word = fetch(first + gl.minimum(group, LAST) * STRIDE)
        for other in gl.static_range(1, 4):
            word |= fetch(first + gl.minimum(group + other, LAST) * STRIDE) << (8 * other)
        return word


@gluon.jit
def _look_up(given, SIZES: gl.constexpr):
    """The warps that find the largest and the smallest scale of every tile's weight rows, of each group of warps', and
    whether one is NaN. Groups of zeros, which have the smallest scale there is, do not count.
    """
    w, up_offset, inner, inner_apart, found, known, taken, extents, num_rows = given
    E: gl.constexpr = SIZES[0]
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    WEIGHT_STRIDES: gl.constexpr = SIZES[3][0]
    STRIDES: gl.constexpr = SIZES[3][1]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    PACKED: gl.constexpr = SIZES[9][4]
    BATCHED: gl.constexpr = SIZES[10]
    WIDE: gl.constexpr = 8  # words of a row
    STEPS: gl.constexpr = (K + BLOCK[2] * WIDE - 1) // (BLOCK[2] * WIDE)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [2, 1], [1, 0])
    OF_FOUND: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    word = gl.arange(0, WIDE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for number in range(lots_of(tiles)):
        expert, _, _, n_tile = find_tile(tile_of(number), table, BLOCK[0], 0, N_TILES, BLOCK[3])
        slot = number % SLOTS
        mbarrier.wait(taken.index(slot), ((number // SLOTS) & 1) ^ 1)
        for group in gl.static_range(GROUPS):
            n_start = (n_tile * GROUPS + group) * columns_of(HEIGHT, GLU)
            row, half, exists = stacked_rows(HEIGHT, gl.SliceLayout(1, LAYOUT), n_start, N, GLU, SWAPPED, False)
            row = gl.where(exists, row, 0)
            first = of_rows(inner, inner_apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)[:, None]
            largest = gl.zeros([HEIGHT, WIDE], gl.int32, layout=LAYOUT)
            smallest, special = largest + NAN_SCALE, largest
            for step in range(STEPS):
                four = _at(first, (step * WIDE + word) * 4, K, STRIDES[2], PACKED[9])
                for byte in gl.static_range(4):
                    exponent = (four >> (8 * byte)) & 0xFF
                    largest = gl.maximum(largest, gl.where(exponent == NAN_SCALE, 0, exponent))
                    smallest = gl.minimum(smallest, gl.where(exponent == 0, NAN_SCALE, exponent))
                    special |= gl.where(exponent == NAN_SCALE, 2, gl.where(exponent == 0, 1, 0))
            largest, smallest = _all(largest), -_all(-smallest)
            none, lowest = _all(special >> 1), _all(special & 1)
            if lowest > 0 and largest > WINDOW:
                numbers = gl.zeros([HEIGHT, WIDE], gl.int32, layout=LAYOUT)
                codes = w + expert.to(gl.int64) * WEIGHT_STRIDES[0] + row.to(gl.int64) * WEIGHT_STRIDES[1]
                codes = (codes + half.to(gl.int64) * up_offset).to(gl.pointer_type(gl.int32))[:, None]
                for step in range(STEPS):
                    at = (step * WIDE + word) * 4
                    four = _at(first, at, K, STRIDES[2], PACKED[9])
                    for byte in gl.static_range(4):
                        counts = (((four >> (8 * byte)) & 0xFF) == 0) & (at + byte < (K + 31) // 32)
                        for part in gl.static_range(4):
                            numbers |= gl.load(codes + (at + byte) * 4 + part, mask=counts, other=0)
                if _all(((numbers & 0x77777777) != 0).to(gl.int32)) > 0:
                    smallest = 0
            both = largest | (smallest << 8) | (none << 16)
            found.index(slot * GROUPS + group).store(gl.full([32], 0, gl.int32, layout=OF_FOUND) + both)
        gl.thread_barrier()
        mbarrier.arrive(known.index(slot))


@gluon.jit
def _all(values):
    """The largest of values [rows, columns]."""
    return gl.max(gl.max(values, axis=1), axis=0)


@gluon.jit
def _bring_scales(given, SIZES: gl.constexpr):
    """The warp that copies the scales of a tile's rows of tokens to shared memory, those of four steps at a time, which
    are neighbours where they come from; it waits for none of them.
    """
    a_scale, room, full, empty, extents, num_rows = given
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[10]
    STEPS: gl.constexpr = (K + BLOCK[2] - 1) // BLOCK[2]
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8], [16], [32]], [[ROWS], [2 * ROWS], [1], [2], [4]], [], [], [AT_ONCE * ROWS]
    )
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    at = gl.arange(0, AT_ONCE * ROWS, layout=LAYOUT)
    token, of_step = at % ROWS, at // ROWS
    lot = 0
    for number in range(lots_of(tiles)):
        _, first, past, _ = find_tile(tile_of(number), table, BLOCK[0], 0, N_TILES, BLOCK[3])
        count = _products(first, past)
        scales = a_scale + (first + token).to(gl.int64) * STEPS + of_step
        for begin in range(0, STEPS if count > 0 else 0, AT_ONCE):
            slot = lot % LOTS
            mbarrier.wait(empty.index(slot), ((lot // LOTS) & 1) ^ 1)
            for box in gl.static_range(MOST):
                if box < count:
                    exists = (token < past - first - box * ROWS) & (of_step < STEPS - begin)
                    where = scales + (begin + box * ROWS * STEPS)
                    async_copy.async_copy_global_to_shared(room.index(slot * MOST + box), where, mask=exists)
            async_copy.mbarrier_arrive(full.index(slot))
            gl.thread_barrier()
            mbarrier.arrive(full.index(slot))
            lot += 1


@gluon.jit
def _of_weight_rows(where, SIZES: gl.constexpr):
    """(factors, biases) [rows] of a group's sums, 0 where there are none: loaded once for all products of a tile."""
    N: gl.constexpr = SIZES[1]
    STRIDES: gl.constexpr = SIZES[3]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    PACKED: gl.constexpr = SIZES[9][4]
    OUTER_STRIDES: gl.constexpr = STRIDES[5]
    expert, n_start, outer, outer_apart, bias = where
    row, half, exists = stacked_rows(HEIGHT, gl.SliceLayout(1, SUM), n_start, N, GLU, SWAPPED, True)
    row = gl.where(exists, row, 0)
    factor, shift = 0, 0
    if OUTER_STRIDES is not None:
        pointers = of_rows(outer, outer_apart, expert, row, half, N, PACKED[6], PACKED[7], OUTER_STRIDES)
        factor = load_scale(pointers)
    if STRIDES[2] is not None:
        at = bias + expert.to(gl.int64) * STRIDES[2][0] + (row + half * N) * STRIDES[2][1]
        shift = gl.load(at).to(gl.float32)
    return factor, shift


@gluon.jit
def _of_tokens(a_scale, first, past, SIZES: gl.constexpr):
    """Factors [rows] of a product's rows of tokens, 0 where those of groups of columns are in its sums already."""
    PACKED: gl.constexpr = SIZES[9][4]
    if PACKED[8] == 0:
        at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUM))
        return gl.load(a_scale + at, mask=at < past, other=0.0)
    else:
        return 0


@gluon.jit
def _written(total, unit, factors, shift, first, past, where, SIZES: gl.constexpr):
    """A product's rows first .. past - 1: scaled, activated, and written by descriptor; `factors`: of rows of tokens,
    of weight rows.
    """
    STRIDES: gl.constexpr = SIZES[3]
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    SWAPPED: gl.constexpr = SIZES[8]
    PACKED: gl.constexpr = SIZES[9][4]
    staged, out_desc, n_start, alpha, limit = where
    if PACKED[8] == 0:
        total *= factors[0][None, :]
    total *= unit
    if STRIDES[5] is not None:
        total *= factors[1][:, None]
    if STRIDES[2] is not None:
        total += shift[:, None]
    if GLU == NOT_GATED:
        value = total
        if ACTIVATION is not None:
            value = apply_activation(total, total, alpha, limit, ACTIVATION, False)
    else:
        gate, up = gl.split(total.reshape([HEIGHT // 16, 2, 8, ROWS]).permute([0, 2, 3, 1]))
        if SWAPPED:
            gate, up = up, gate
        value = apply_activation(gate, up, alpha, limit, ACTIVATION, True).reshape([HEIGHT // 2, ROWS])
    write(value.to(staged.dtype).permute([1, 0]), staged, out_desc, first, past, n_start)


@gluon.jit
def _in_register(NUMBER: gl.constexpr, words):
    """A number for each of `words`, which the assembler does not know: it would move one that it knows to a register
    again whenever a table begins with it. Threads of a warp are numbered below 32.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid; shr.u32 $0, $0, 5; add.u32 $0, $0, $1;",
        "=r,r",
        [gl.full(words.shape, NUMBER, gl.int32, layout=words.type.layout)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _decoded(words, bits, base, FOLDED: gl.constexpr, ALL: gl.constexpr):
    """Four weights in two parts of 32 bits, of words of four codes, see `_operand`. FOLDED: of e2m1 whose scales'
    exponents are the bytes of `bits` [rows], in units of 2^(base - 127) * FOLDED_UNIT; unless ALL are within 2^WINDOW
    below, others are 0.
    """
    if FOLDED:
        word = gl.arange(0, words.shape[1], layout=gl.SliceLayout(0, words.type.layout))[None, :]
        power = ((bits[:, None] >> (word // 8 * 8)) & 0xFF) - (base - WINDOW)
        low, high = power * LOW_POWER + LOW_BYTES, power * HIGH_POWER + HIGH_BYTES
        if not ALL:
            none = power == NAN_SCALE - (base - WINDOW)
            counts = (power >= 0) & (power <= WINDOW) & ~none
            low, high = gl.where(counts, low, 0), gl.where(counts, high, 0)
            low, high = gl.where(none, NO_NUMBER, low), gl.where(none, NO_NUMBER, high)
        return e2m1_parts(words.to(gl.int32), low, high)
    else:
        return int4_parts(words.to(gl.int32), _in_register(BELOW, words), _in_register(ABOVE, words))


@gluon.jit
def _operand(parts, GLU: gl.constexpr, OPERAND: gl.constexpr, FOLDED: gl.constexpr):
    """Weights [rows, columns] as the first operand of a product. What is decoded while another product is under way are
    their parts, as the assembler lets no product run beside instructions that write the next one's registers.
    """
    if FOLDED:
        return in_product(in_order(join_e2m1(parts), gl.float8e5), GLU, OPERAND)
    else:
        return in_product(in_order(join_int4(parts), gl.float8e4nv), GLU, OPERAND)


@gluon.jit
def _promoted(total, product, factor, factors_of, at, FOLDED: gl.constexpr):
    """`total` and a product, times the factors of weight rows, or where FOLDED those of tokens, number `at` of what is
    in shared memory, times `factor`, unless that is None.
    """
    if FOLDED:
        factors = factors_of.index(at).load(gl.SliceLayout(0, total.type.layout))
        if factor is not None:
            factors *= factor
        return total + product * factors[None, :]
    else:
        return total + product * factor[:, None]


@gluon.jit
def _with(sums, AT: gl.constexpr, sum_at):
    """`sums`, number AT of which is another one."""
    if AT == 0:
        return sum_at, sums[1], sums[2], sums[3]
    elif AT == 1:
        return sums[0], sum_at, sums[2], sums[3]
    elif AT == 2:
        return sums[0], sums[1], sum_at, sums[3]
    else:
        return sums[0], sums[1], sums[2], sum_at


@gluon.jit
def _sums(
    given, at, top, turns, GROUP: gl.constexpr, PRODUCTS: gl.constexpr, IN_TURNS: gl.constexpr, SIZES: gl.constexpr
):
    """A tile's weight rows of a group of warps, times the rows of tokens of so many products of at most four: (where
    the next step is, sums [weight rows, rows] of each).

    A product is added to its sum while the next one is under way, the last one's time is that of the next step's codes.
    IN_TURNS: one step after the other, columns whose scales are within 2^WINDOW of 2^top first, then those within as
    much below, and so on.
    """
    rows_of, words_of, full, empty = given[:4]
    decoding = given[9]
    place, number, expert, n_start = at
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3][1]
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    PACKED: gl.constexpr = SIZES[9][4]
    STEP: gl.constexpr = BLOCK[2]
    STAGES: gl.constexpr = BLOCK[6]
    WORDS: gl.constexpr = STEP // 4
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    FOLDED: gl.constexpr = PACKED[0] == E2M1
    GROUP_K: gl.constexpr = PACKED[4]
    LAST: gl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    OF_WORDS: gl.constexpr = rows_layout(4, WORDS, 4, GLU)
    OF_SCALES: gl.constexpr = gl.SliceLayout(1, OF_WORDS if FOLDED else SUM)
    inner, _, inner_apart, _ = decoding
    row, half, exists = stacked_rows(HEIGHT, OF_SCALES, n_start, N, GLU, SWAPPED, not FOLDED)
    row = gl.where(exists, row, 0)
    scales = of_rows(inner, inner_apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)
    if FOLDED:
        factor = None
        factors_of, arrived, taken = given[16:]
        bits = _at(scales, 0, K, STRIDES[2], PACKED[9])
    else:
        factors_of = rows_of
        bits = fetch(scales)
    zero = gl.zeros([HEIGHT, ROWS], gl.float32, layout=SUM)
    sums = (zero, zero, zero, zero)
    one, other = warpgroup_mma_init(zero), warpgroup_mma_init(zero)
    if not IN_TURNS:
        mbarrier.wait(full.index(place % STAGES), (place // STAGES) & 1)
        words = words_of.index(place % STAGES * GROUPS + GROUP).reshape([HEIGHT, WORDS]).load(OF_WORDS)
        parts = _decoded(words, bits, top, FOLDED, True)
    for step in range(STEPS):
        stage, next_stage = place % STAGES, (place + 1) % STAGES
        after = gl.minimum(step + 1, STEPS - 1)
        box = stage * MOST
        if FOLDED:
            this_bits = bits
            bits = _at(scales, after * 4, K, STRIDES[2], PACKED[9])
            lot = number * ((STEPS + AT_ONCE - 1) // AT_ONCE) + step // AT_ONCE
            mbarrier.wait(arrived.index(lot % LOTS), (lot // LOTS) & 1)
            first_factors = lot % LOTS * MOST * AT_ONCE + step % AT_ONCE
        else:
            first_factors = 0
            factor = factor_of(bits, inner, False, 0)
            if GROUP_K > 0:
                bits = fetch(scales + gl.minimum((step + 1) * STEP // GROUP_K, LAST) * STRIDES[2])
        if IN_TURNS:
            mbarrier.wait(full.index(stage), (place // STAGES) & 1)
            words = words_of.index(stage * GROUPS + GROUP).reshape([HEIGHT, WORDS]).load(OF_WORDS)
            for turn in range(turns):
                base = top - turn * (WINDOW + 1)
                numbers = _operand(_decoded(words, this_bits, base, FOLDED, False), GLU, OPERAND, FOLDED)
                below = decode_scale(base.to(gl.uint8)) * FOLDED_UNIT
                for at_box in gl.static_range(PRODUCTS):
                    rows = rows_of.index(box + at_box).permute((1, 0))
                    one = warpgroup_mma(numbers, rows, one, use_acc=False, is_async=True)
                    done = warpgroup_mma_wait(0, deps=[one])
                    where = first_factors + at_box * AT_ONCE
                    sums = _with(sums, at_box, _promoted(sums[at_box], done, below, factors_of, where, FOLDED))
                    one = warpgroup_mma_init(done)
        else:
            numbers = _operand(parts, GLU, OPERAND, FOLDED)
            for at_box in gl.static_range(PRODUCTS):
                rows = rows_of.index(box + at_box).permute((1, 0))
                if at_box % 2 == 0:
                    one = warpgroup_mma(numbers, rows, one, use_acc=False, is_async=True)
                else:
                    other = warpgroup_mma(numbers, rows, other, use_acc=False, is_async=True)
                if at_box > 0:
                    done = warpgroup_mma_wait(1, deps=[other if at_box % 2 == 0 else one])
                    where = first_factors + (at_box - 1) * AT_ONCE
                    before = _promoted(sums[at_box - 1], done, factor, factors_of, where, FOLDED)
                    sums = _with(sums, at_box - 1, before)
                    if at_box % 2 == 0:
                        other = warpgroup_mma_init(done)
                    else:
                        one = warpgroup_mma_init(done)
            mbarrier.wait(full.index(next_stage), ((place + 1) // STAGES) & 1, pred=step + 1 < STEPS)
            words = words_of.index(next_stage * GROUPS + GROUP).reshape([HEIGHT, WORDS]).load(OF_WORDS)
            parts = _decoded(words, bits, top, FOLDED, True)
            done = warpgroup_mma_wait(0, deps=[one if PRODUCTS % 2 == 1 else other])
            where = first_factors + (PRODUCTS - 1) * AT_ONCE
            last = _promoted(sums[PRODUCTS - 1], done, factor, factors_of, where, FOLDED)
            sums = _with(sums, PRODUCTS - 1, last)
            if PRODUCTS % 2 == 1:
                one = warpgroup_mma_init(done)
            else:
                other = warpgroup_mma_init(done)
        if FOLDED:
            mbarrier.arrive(taken.index(lot % LOTS), pred=(step % AT_ONCE == AT_ONCE - 1) | (step == STEPS - 1))
        mbarrier.arrive(empty.index(stage))
        place += 1
    return place, sums


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: decodes its weight rows of every tile, multiplies them with the tile's rows and writes."""
    staged, out_desc, a_scale, extents, num_rows, decoding, bias, alpha, limit = given[4:13]
    E: gl.constexpr = SIZES[0]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[10]
    FOLDED: gl.constexpr = SIZES[9][4][0] == E2M1
    COLUMNS: gl.constexpr = columns_of(HEIGHT, SIZES[6])
    _, outer, _, outer_apart = decoding
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    for number in range(lots_of(tiles)):
        tile = tile_of(number)
        if tile < tiles:
            expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
            n_start = (n_tile * GROUPS + GROUP) * COLUMNS
            at = (place, number, expert, n_start)
            top, turns, none = 0, 1, 0
            if FOLDED:
                found, known, taken = given[13:16]
                slot = number % SLOTS
                mbarrier.wait(known.index(slot), (number // SLOTS) & 1)
                both = gl.max(found.index(slot * GROUPS + GROUP).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
                gl.thread_barrier()
                mbarrier.arrive(taken.index(slot))
                top, none = both & 0xFF, both >> 16
                turns = gl.maximum((top - ((both >> 8) & 0xFF)) // (WINDOW + 1) + 1, 1)
            count = _products(first, past)
            in_turns = (turns > 1) | (none > 0)
            if FOLDED and in_turns:
                place, sums = _sums(given, at, top, turns, GROUP, MOST, True, SIZES)
            else:
                if count == MOST:
                    place, sums = _sums(given, at, top, turns, GROUP, MOST, False, SIZES)
                elif count == 1:
                    place, sums = _sums(given, at, top, turns, GROUP, 1, False, SIZES)
                elif count == 2:
                    place, sums = _sums(given, at, top, turns, GROUP, 2, False, SIZES)
                else:
                    place, sums = _sums(given, at, top, turns, GROUP, 3, False, SIZES)
            if FOLDED:
                unit = gl.where(in_turns, 1.0, decode_scale(top.to(gl.uint8)) * FOLDED_UNIT)
            else:
                unit = INT4_UNIT
            factor, shift = _of_weight_rows((expert, n_start, outer, outer_apart, bias), SIZES)
            of_tokens = (
                _of_tokens(a_scale, first, past, SIZES),
                _of_tokens(a_scale, first + ROWS, past, SIZES),
                _of_tokens(a_scale, first + 2 * ROWS, past, SIZES),
                _of_tokens(a_scale, first + 3 * ROWS, past, SIZES),
            )
            where = (staged.index(GROUP), out_desc, n_start, alpha, limit)
            for box in gl.static_range(MOST):
                start = first + box * ROWS
                if start < past:
                    _written(sums[box], unit, (of_tokens[box], factor), shift, start, past, where, SIZES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "up_offset", "up_scale_offset", "up_outer_offset"])
def _decoded_fp8_mm_kernel(
    a_desc,
    a_scale,
    extents,
    w,
    w_desc,
    up_offset,
    w_scale,
    w_outer,
    up_scale_offset,
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
):
    """One program for each multiprocessor, every num_programs-th tile of BLOCK_M rows of one expert times 128 rows of
    its weight.

    Args: see `expert_mm._expert_mm_kernel`. Rows, weights and output come and leave by descriptor, 128 columns at a
    time; BLOCK[6]: steps that there is room for.
    """
    COLUMNS: gl.constexpr = columns_of(GROUPS * HEIGHT, GLU)
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = BLOCK[6]
    rows_of, words_of, staged, full, empty = buffers(a_desc, w_desc, out_desc, MOST, GROUPS, GROUPS, STAGES)
    pdl_wait(PDL)
    pdl_release(PDL)
    outer = w_outer if STRIDES[5] is not None else extents
    decoding = (w_scale, outer, up_scale_offset, up_outer_offset)
    bias = bias if STRIDES[2] is not None else extents
    given = (
        rows_of, words_of, full, empty, staged, out_desc, a_scale, extents, num_rows, decoding, bias, alpha, limit,
    )  # fmt: skip
    brought = (a_desc, w_desc, rows_of, words_of, full, empty, extents, num_rows)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, SCHEME, BATCHED)
    if SCHEME[4][0] == E2M1:
        found = gl.allocate_shared_memory(gl.int32, [SLOTS * GROUPS, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        known, taken = ring(SLOTS, GROUPS)
        looked_up = (w, up_offset, w_scale, up_scale_offset, found, known, taken, extents, num_rows)
        in_line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        lots = gl.allocate_shared_memory(gl.float32, [LOTS * MOST, AT_ONCE * ROWS], in_line)
        arrived, used = ring(LOTS, GROUPS)
        factors = lots._reinterpret(gl.float32, [LOTS * MOST * AT_ONCE, ROWS], in_line)
        given = given + (found, known, taken, factors, arrived, used)  # noqa: RUF005 (no such thing in Triton)
        scales = (a_scale, lots, arrived, used, extents, num_rows)
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SIZES)),
                (_multiply, (given, 1, SIZES)),
                (_bring, (brought, SIZES)),
                (_look_up, (looked_up, SIZES)),
                (_bring_scales, (scales, SIZES)),
            ],
            [4, 1, 2, 1],
            [232, 40, 40, 40],
        )
    else:
        gl.warp_specialize(
            [(_multiply, (given, 0, SIZES)), (_multiply, (given, 1, SIZES)), (_bring, (brought, SIZES))],
            [4, 1],
            [232, 40],
        )
