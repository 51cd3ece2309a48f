"""Expert GEMMs of many rows of e4m3 and weights of e2m1 codes, for Hopper.

What `packed_fp8_tile` computes, with the loop written out. One warp has descriptors bring rows and codes, two look up
the codes' scales, and four decode codes to e5m2 in shared memory. There the products of two groups of four warps take
them, as those of `promoted_mm` do: 64 rows of tokens each, twice 128 weight rows, of 128 columns at a time.

Scales are powers of two and are folded into the codes, which is exact in e5m2 for those that are within 2^WINDOW of
each other. The largest of 32 weight rows and 128 columns is their unit, by which sums are multiplied beside the scales
of their rows. Where others are further below, columns are decoded and multiplied in turns.

us of a layer on an H200, T = 4096, by fp8_block128, by a kernel that decodes into the registers of the groups that
multiply, scales beside sums of 64 tokens each, and by this one: Qwen3-30B-A3B 486, 952, 688; Mixtral-8x7B 2819, 4886,
4744. Decoding is the time: a warp's step has 420 instructions of it, for 128 of its rows' columns in two lots.

Written in Gluon, which has no interpreter: that runs `packed_fp8_tile` for the same products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moe_ops.kernels.triton.hopper import (
    IN_LINE,
    boxes,
    computed_here,
    no_more_tiles,
    ring,
    said,
    said_tile,
    say,
    say_tile,
    table_of_tiles,
    tiles_told,
)
from moe_ops.kernels.triton.packed_fp8_tile import (
    FOLDED_UNIT,
    HIGH_BYTES,
    HIGH_POWER,
    LOW_BYTES,
    LOW_POWER,
    NO_NUMBER,
    WINDOW,
)
from moe_ops.kernels.triton.packed_tile import fetch, of_rows
from moe_ops.kernels.triton.promoted_mm import GROUPS, HALF, ROWS, STEP, SUM, columns_of, finish
from moe_ops.kernels.triton.scales import decode_scale
from moe_ops.kernels.triton.tile_loads import CONCAT, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait

WORDS = gl.constexpr(16)  # of eight codes, of a row and a step
BLOCKS = gl.constexpr(8)  # of 32 weight rows, in a tile
#: Steps that there is room for: of rows, of codes, and decoded ones.
OF_ROWS, OF_CODES, OF_NUMBERS = gl.constexpr(4), gl.constexpr(2), gl.constexpr(3)
NAN_SCALE = gl.constexpr(255)  # of e8m0
#: Added to how far apart a block's scales are where one is NaN, or is the smallest there is and too far below.
NONE, LOWEST = gl.constexpr(256), gl.constexpr(512)
CHUNK = gl.constexpr(128)  # weight rows that are decoded at a time, each by one thread
CHUNKS = gl.constexpr(2)
OF_WORDS = gl.constexpr(gl.BlockedLayout([1, WORDS.value], [32, 1], [4, 1], [1, 0]))
OF_CHUNK = gl.constexpr(gl.SliceLayout(1, OF_WORDS.value))
OF_ALL = gl.constexpr(gl.BlockedLayout([BLOCKS.value], [32], [4], [0]))  # every thread has all of them
OF_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def ask_for_codes(
    w_desc, expert, n_tile, step, arrived, codes_of, slot, SIZES: gl.constexpr, WORDS: gl.constexpr = WORDS
):  # fmt: skip
    """Have a step's codes of both halves of a tile's weight rows brought, WORDS of each; of halves that are apart the
    gate's first, wherever it is.
    """
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    mbarrier.expect(arrived, 2 * HALF * WORDS * 4)
    for part in gl.static_range(2):
        if GLU == CONCAT:
            where = [expert, 1 - part if SWAPPED else part, n_tile * HALF, step * WORDS]
        else:
            where = [expert, (n_tile * 2 + part) * HALF, step * WORDS]
        tma.async_copy_global_to_shared(w_desc, where, arrived, codes_of.index(slot * 2 + part))


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that has rows and codes of every step of every tile brought, as soon as there is room."""
    a_desc, w_desc, rows_of, tiles_of, codes_of, full, empty, coded, taken, extents, num_rows = given
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[9]
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
        for step in range((K + STEP - 1) // STEP):
            slot, stage = place % OF_CODES, place % OF_ROWS
            arrived = coded.index(slot)
            mbarrier.wait(taken.index(slot), ((place // OF_CODES) & 1) ^ 1)
            ask_for_codes(w_desc, expert, n_tile, step, arrived, codes_of, slot, SIZES)
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), ((place // OF_ROWS) & 1) ^ 1)
            if step == 0:
                say_tile(tiles_of, stage, expert, first, past, n_tile)
                gl.thread_barrier()
            mbarrier.expect(arrived, GROUPS * ROWS * STEP)
            for part in gl.static_range(GROUPS):
                where = [first + part * ROWS, step * STEP]
                tma.async_copy_global_to_shared(a_desc, where, arrived, rows_of.index(stage * GROUPS + part))
            place += 1
    no_more_tiles(tiles_of, place, full, empty, OF_ROWS)


@gluon.jit
def four_scales(first, group, LAST: gl.constexpr, STRIDE: gl.constexpr, WIDE: gl.constexpr):
    """The bytes of four scales of columns, from number `group` on, in a word; the LAST stands in for those behind it.
    `first` is where that of column 0 is; WIDE: how many of a row may be loaded at once.
    """
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
def _below(tops, like):
    """For each of the weight rows, which are `like` these, four bytes of 2^WINDOW below the largest exponent of its
    block: what exponents are counted from. As words are subtracted and added again, a borrow does no harm.
    """
    by_block = like.reshape([like.shape[0] // 32, 32])
    tops = gl.convert_layout(tops, gl.SliceLayout(1, by_block.type.layout))
    four = (by_block * 0 + tops[:, None] - WINDOW) * 0x01010101
    return gl.convert_layout(four.reshape(like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def _tops(below):
    """The largest exponents, of `_below`."""
    return (below + WINDOW) & 0xFF


@gluon.jit
def _look_up(given, looked, extents, num_rows, SIZES: gl.constexpr):
    """The warps that look up the exponents of the scales of a step's weight rows, four in a word, counted from
    `_below` the largest of each block, that one, and how far the smallest is below it. Those of groups of zeros, the
    smallest there are, do not count, nor NaN.
    """
    scale, apart, coded, taken = given
    fours_of, tops_of, far_of = looked
    E: gl.constexpr = SIZES[0]
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3][1]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    BATCHED: gl.constexpr = SIZES[9]
    PACKED: gl.constexpr = SIZES[10][4]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    LAST: gl.constexpr = (K + 31) // 32 - 1
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, _, _, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
        row = gl.arange(0, 2 * HALF, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        if GLU == CONCAT:
            half = row // HALF
            row = gl.minimum(n_tile * HALF + row % HALF, N - 1)
        else:
            half = row * 0
            row = gl.minimum(n_tile * 2 * HALF + row, (N if GLU == NOT_GATED else 2 * N) - 1)
        first = of_rows(scale, apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)
        four = four_scales(first, 0, LAST, STRIDES[2], PACKED[9])
        for step in range(STEPS):
            slot = place % OF_CODES
            # Before the step's arithmetic, which hides that it comes from memory.
            next_four = four_scales(first, gl.minimum(step + 1, STEPS - 1) * 4, LAST, STRIDES[2], PACKED[9])
            largest, smallest, lowest, none = row * 0, row * 0 + NAN_SCALE, row * 0 + NAN_SCALE, row * 0
            for byte in gl.static_range(4):
                exponent = (four >> (8 * byte)) & 0xFF
                none = gl.maximum(none, exponent)
                lowest = gl.minimum(lowest, exponent)
                largest = gl.maximum(largest, gl.where(exponent == NAN_SCALE, 0, exponent))
                smallest = gl.minimum(smallest, gl.where(exponent == 0, NAN_SCALE, exponent))
            top = gl.max(largest.reshape([BLOCKS, 32]), axis=1)
            far = gl.maximum(top - gl.min(smallest.reshape([BLOCKS, 32]), axis=1), 0)
            far += gl.where(gl.max(none.reshape([BLOCKS, 32]), axis=1) == NAN_SCALE, NONE, 0)
            lowest = gl.min(lowest.reshape([BLOCKS, 32]), axis=1)
            far += gl.where((lowest == 0) & (top > WINDOW), LOWEST, 0)
            mbarrier.wait(taken.index(slot), ((place // OF_CODES) & 1) ^ 1)
            fours_of.index(slot).store(four - _below(top, four))
            tops_of.index(slot).store(top)
            far_of.index(slot).store(far)
            gl.thread_barrier()
            mbarrier.arrive(coded.index(slot))
            four = next_four
            place += 1


@gluon.jit
def e5m2_of(words, low, high):
    """e5m2, four in a word, two words for each of eight codes. `low` and `high` are their tables, of magnitudes 0 to 3
    and 4 to 7.
    """
    # Signs go to the upper bit of a byte; magnitudes come from a table of eight bytes, by selectors of four bits.
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 up, magnitude, signs, others;
        and.b32 magnitude, $2, 0x77777777;
        shl.b32 up, $2, 4;
        prmt.b32 signs, up, $2, 0x5140;
        prmt.b32 others, up, $2, 0x7362;
        prmt.b32 $0, $3, $4, magnitude;
        shr.b32 magnitude, magnitude, 16;
        prmt.b32 $1, $3, $4, magnitude;
        lop3.b32 $0, signs, 0x80808080, $0, 0xEA;
        lop3.b32 $1, others, 0x80808080, $1, 0xEA;
        }
        """,
        "=&r,=&r,r,r,r",
        [words, low, high],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _decoded(words, four, down, ALL: gl.constexpr):
    """e5m2, four in a word [CHUNK, 2 * WORDS], of words of eight codes whose groups' powers of two are the bytes of
    `four`, where ALL are from 0 to WINDOW. Else those are that are as exponents of words `four`[0] from `four`[1] on
    less `down`, and others' codes become 0.
    """
    group = gl.arange(0, WORDS, layout=gl.SliceLayout(0, OF_WORDS))[None, :] // 4
    if ALL:
        power = (four[:, None] >> (group * 8)) & 0xFF
        low, high = power * LOW_POWER + LOW_BYTES, power * HIGH_POWER + HIGH_BYTES
    else:
        exponent = (four[0][:, None] >> (group * 8)) & 0xFF
        power = exponent - (_tops(four[1]) - WINDOW - down)[:, None]
        counts = (power >= 0) & (power <= WINDOW) & (exponent != NAN_SCALE)
        low = gl.where(counts, power * LOW_POWER + LOW_BYTES, 0)
        high = gl.where(counts, power * HIGH_POWER + HIGH_BYTES, 0)
        low = gl.where(exponent == NAN_SCALE, NO_NUMBER, low)
        high = gl.where(exponent == NAN_SCALE, NO_NUMBER, high)
    first, second = e5m2_of(words, low, high)
    return gl.join(first, second).reshape([CHUNK, 2 * WORDS])


@gluon.jit
def _exponents(looked, at):
    """Of a chunk's weight rows, four in a word, and of what they are counted from."""
    fours_of, tops_of, _, _ = looked
    four = fours_of.index(at).load(OF_CHUNK)
    by_block = four.reshape([CHUNK // 32, 32])
    below = _below(tops_of.index(at).load(gl.SliceLayout(1, by_block.type.layout)), four)
    return four + below, below


@gluon.jit
def _decode_step(looked, made, at, slot, down, last, ALL: gl.constexpr):
    """Decode the codes of a step, in units that are 2^down below the largest of each block; `last`: 1 if its columns
    have no turn after this one.
    """
    fours_of, _, tops_of_step, _ = looked
    codes_of, numbers_of, units_of, last_of, ready = made
    if ALL:
        fours = (fours_of.index(at * CHUNKS).load(OF_CHUNK), fours_of.index(at * CHUNKS + 1).load(OF_CHUNK))
    else:
        fours = (_exponents(looked, at * CHUNKS), _exponents(looked, at * CHUNKS + 1))
    top = gl.maximum(tops_of_step.index(at).load(OF_ONE) - down, 0)
    units_of.index(slot).store(decode_scale(top.to(gl.uint8)) * FOLDED_UNIT)
    say(last_of, slot, last)
    for chunk in gl.static_range(CHUNKS):
        words = codes_of.index(at * CHUNKS + chunk).load(OF_WORDS)
        numbers_of.index(slot * CHUNKS + chunk).store(_decoded(words, fours[chunk], down, ALL))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready.index(slot))


@gluon.jit
def _turns(looked, codes_of, at):
    """How often a step's columns are decoded and multiplied. Groups of the smallest scale count if a code is not 0."""
    _, _, _, far_of = looked
    far = far_of.index(at).load(OF_ALL)
    turns = gl.max(far & 0xFF, axis=0) // (WINDOW + 1) + 1
    if gl.max(far, axis=0) >= LOWEST:
        for chunk in gl.static_range(CHUNKS):
            four, below = _exponents(looked, at * CHUNKS + chunk)
            words = codes_of.index(at * CHUNKS + chunk).load(OF_WORDS)
            group = gl.arange(0, WORDS, layout=gl.SliceLayout(0, OF_WORDS))[None, :] // 4
            lowest = ((four[:, None] >> (group * 8)) & 0xFF) == 0
            counts = gl.max((lowest & ((words & 0x77777777) != 0)).to(gl.int32), axis=1)
            turns = gl.maximum(turns, gl.max(counts * _tops(below), axis=0) // (WINDOW + 1) + 1)
    return turns


@gluon.jit
def _decode(given, looked, made, extents, num_rows, SIZES: gl.constexpr):
    """The warps that decode the codes of every step of every tile."""
    coded, taken, used = given
    _, _, _, far_of = looked
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[9]
    _, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    of_program = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    place = 0
    for step in range(of_program * ((K + STEP - 1) // STEP)):
        at, slot = step % OF_CODES, place % OF_NUMBERS
        mbarrier.wait(coded.index(at), (step // OF_CODES) & 1)
        mbarrier.wait(used.index(slot), ((place // OF_NUMBERS) & 1) ^ 1)
        if gl.max(far_of.index(at).load(OF_ALL), axis=0) <= WINDOW:
            _decode_step(looked, made, at, slot, 0, 1, True)
            place += 1
        else:
            turns = _turns(looked, made[0], at)
            for turn in range(turns):
                slot = place % OF_NUMBERS
                mbarrier.wait(used.index(slot), ((place // OF_NUMBERS) & 1) ^ 1)
                last = (turn == turns - 1).to(gl.int32)
                _decode_step(looked, made, at, slot, turn * (WINDOW + 1), last, False)
                place += 1
        mbarrier.arrive(taken.index(at))


@gluon.jit
def _units(units_of, at, like):
    """Units of the 32 columns each of a product, which is `like` this one."""
    return units_of.index(at).load(
        gl.SliceLayout(0, gl.SliceLayout(2, like.reshape([ROWS, HALF // 32, 32]).type.layout))
    )


@gluon.jit
def _added(total, product, of_tokens, of_columns):
    """`total` and a product times the scales of its rows and the units of 32 columns each."""
    cut = product.reshape([ROWS, HALF // 32, 32])
    of_tokens = gl.convert_layout(of_tokens, gl.SliceLayout(1, gl.SliceLayout(2, cut.type.layout)), assert_trivial=True)
    scaled = cut * (of_tokens[:, None] * of_columns[None, :])[:, :, None]
    return computed_here(total + gl.convert_layout(scaled.reshape([ROWS, HALF]), SUM, assert_trivial=True))


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its 64 rows of every tile times the tile's weight rows."""
    rows_of, tiles_of, numbers_of, units_of, last_of, full, empty, ready, used, leaving, a_scale, bias = given
    K: gl.constexpr = SIZES[2]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    place, decoded = 0, 0
    expert, first, past, n_tile = said_tile(tiles_of, place, full, OF_ROWS)
    while past > 0:
        first += GROUP * ROWS
        step = first * 0
        if first >= past:
            while step < STEPS:
                slot = decoded % OF_NUMBERS
                mbarrier.wait(ready.index(slot), (decoded // OF_NUMBERS) & 1)
                last = said(last_of, slot)
                mbarrier.arrive(used.index(slot))
                mbarrier.arrive(empty.index(place % OF_ROWS), pred=last == 1)
                decoded += 1
                step += last
                place += last
        else:
            lower = gl.zeros([ROWS, HALF], gl.float32, layout=SUM)
            upper = gl.zeros([ROWS, HALF], gl.float32, layout=SUM)
            product = warpgroup_mma_init(lower)
            at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUM))
            scales = a_scale + at.to(gl.int64) * STEPS
            of_tokens = gl.load(scales, mask=at < past, other=0.0)
            while step < STEPS:
                stage, slot = place % OF_ROWS, decoded % OF_NUMBERS
                rows = rows_of.index(stage * GROUPS + GROUP)
                mbarrier.wait(full.index(stage), (place // OF_ROWS) & 1)
                mbarrier.wait(ready.index(slot), (decoded // OF_NUMBERS) & 1)
                numbers = numbers_of.index(slot * 2).permute((1, 0))
                product = warpgroup_mma(rows, numbers, product, use_acc=False, is_async=True)
                of_columns = _units(units_of, slot * 2, lower)
                last = said(last_of, slot)
                next_of_tokens = gl.load(scales + gl.minimum(step + last, STEPS - 1), mask=at < past, other=0.0)
                summed = warpgroup_mma_wait(0, deps=[product])
                lower = _added(lower, summed, of_tokens, of_columns)
                numbers = numbers_of.index(slot * 2 + 1).permute((1, 0))
                product = warpgroup_mma(rows, numbers, warpgroup_mma_init(summed), use_acc=False, is_async=True)
                of_columns = _units(units_of, slot * 2 + 1, lower)
                summed = warpgroup_mma_wait(0, deps=[product])
                upper = _added(upper, summed, of_tokens, of_columns)
                mbarrier.arrive(used.index(slot))
                mbarrier.arrive(empty.index(stage), pred=last == 1)
                product = warpgroup_mma_init(summed)
                of_tokens = next_of_tokens
                decoded += 1
                step += last
                place += last
            of_weights = (bias, 0, bias)  # no scales are left
            finish(lower, upper, None, of_weights, (expert, first, past, n_tile), leaving, GROUP, SIZES)
        expert, first, past, n_tile = said_tile(tiles_of, place, full, OF_ROWS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "up_scale_offset"])
def _folded_mm_kernel(
    a_desc,
    a_scale,
    extents,
    w_desc,
    w_scale,
    up_scale_offset,
    bias,
    out_desc,
    out_scale,
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
    """One program for each multiprocessor, every num_programs-th tile of 128 rows of one expert times 256 rows of its
    weight.

    Args: see `expert_mm._expert_mm_kernel`. Rows, codes and output come and leave by descriptor, 128 columns at a time.
    """
    N_TILES: gl.constexpr = (N + columns_of(GLU)[0] - 1) // columns_of(GLU)[0]
    rows_of = gl.allocate_shared_memory(a_desc.dtype, boxes(OF_ROWS * GROUPS, a_desc.block_shape), a_desc.layout)
    codes_of = gl.allocate_shared_memory(w_desc.dtype, boxes(OF_CODES * 2, w_desc.block_shape), w_desc.layout)
    numbers_of = gl.allocate_shared_memory(gl.float8e5, [OF_NUMBERS * 2, HALF, STEP], gl.NVMMASharedLayout(128, 8, 2))
    staged = gl.allocate_shared_memory(out_desc.dtype, boxes(GROUPS, out_desc.block_shape), out_desc.layout)
    fours_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, 2 * HALF], IN_LINE)
    tops_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, BLOCKS], IN_LINE)
    far_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, BLOCKS], IN_LINE)
    units_of = gl.allocate_shared_memory(gl.float32, [OF_NUMBERS, BLOCKS], IN_LINE)
    last_of = gl.allocate_shared_memory(gl.int32, [OF_NUMBERS, 1], IN_LINE)
    tiles_of = tiles_told(OF_ROWS)
    full, empty = ring(OF_ROWS, GROUPS)
    coded, taken = ring(OF_CODES, 1, 2)
    ready, used = ring(OF_NUMBERS, GROUPS)
    pdl_wait(PDL)
    pdl_release(PDL)
    bias = bias if STRIDES[2] is not None else extents
    leaving = (staged, out_desc, out_scale, alpha, limit)
    units_of_halves = units_of._reinterpret(gl.float32, [OF_NUMBERS * 2, BLOCKS // 2], IN_LINE)
    multiplied = (
        rows_of, tiles_of, numbers_of, units_of_halves, last_of, full, empty, ready, used, leaving, a_scale, bias,
    )  # fmt: skip
    fours_of_chunks = fours_of._reinterpret(gl.int32, [OF_CODES * CHUNKS, CHUNK], IN_LINE)
    tops_of_chunks = tops_of._reinterpret(gl.int32, [OF_CODES * CHUNKS, BLOCKS // CHUNKS], IN_LINE)
    decoded = (
        codes_of._reinterpret(gl.int32, [OF_CODES * CHUNKS, CHUNK, WORDS], gl.NVMMASharedLayout(64, 32, 2)),
        numbers_of._reinterpret(gl.int32, [OF_NUMBERS * CHUNKS, CHUNK, 2 * WORDS], gl.NVMMASharedLayout(128, 32, 2)),
        units_of, last_of, ready,
    )  # fmt: skip
    looked = (fours_of_chunks, tops_of_chunks, tops_of, far_of)
    brought = (a_desc, w_desc, rows_of, tiles_of, codes_of, full, empty, coded, taken, extents, num_rows)
    scales = (w_scale, up_scale_offset, coded, taken)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, BATCHED, SCHEME)
    gl.warp_specialize(
        [
            (_multiply, (multiplied, 0, SIZES)),
            (_multiply, (multiplied, 1, SIZES)),
            (_decode, ((coded, taken, used), looked, decoded, extents, num_rows, SIZES)),
            (_bring, (brought, SIZES)),
            (_look_up, (scales, (fours_of, tops_of, far_of), extents, num_rows, SIZES)),
        ],
        [4, 4, 1, 2],
        [208, 64, 32, 32],
    )
