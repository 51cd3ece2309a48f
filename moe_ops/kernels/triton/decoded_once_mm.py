"""Expert GEMMs of very many rows of e4m3 and weights of e2m1 codes, for Hopper.

What `folded_mm` computes, to the bit, for experts that have several tiles of rows. There every tile decodes its weight
rows. Here a panel of 256 weight rows is decoded once, to e5m2 in memory that stays in L2, and all tiles of its expert
have descriptors bring it from there, as those of `promoted_mm` bring stored weights. In every program four warps
decode, whatever panel is next, 128 columns at a time; three more have codes and scales brought for them, tell all
programs what is decoded, and have rows and decoded weights brought for two groups of four that multiply.

Memory is that of the panels which programs multiply with at a time and as many more. A panel gets the place of an
earlier one when all tiles of that are done. Programs draw tiles and what they decode in order, from two counters: what
a program waits for was drawn before, by one that runs. However few programs run at once, all get done.

Times as fast as fp8_block128 on an H200, `folded_mm` and this kernel: Qwen3-30B-A3B, T = 2048 (128 rows an expert)
0.77, 0.61, T = 4096 0.72, 0.74, T = 16384 0.70, 0.88; Mixtral-8x7B, T = 4096 (1024) 0.59, 0.87, T = 16384 0.75, 1.03.
Of few tiles an expert, L2 is the limit, through which decoded weights go once more. Counters, and what was tried:
benchmarks/comparisons/h200-decoded-once.json.

Scales are folded as there, but the largest of 128 weight rows and 128 columns is their unit. Where codes other than 0
have scales too far below it, columns are multiplied in turns; those of turns after the first are decoded by the warp
that has the others brought, for every tile.

Written in Gluon, which has no interpreter: that runs `packed_fp8_tile` for the same products.
"""

from __future__ import annotations

import triton.language as tl
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

from moe_ops.kernels.triton.folded_mm import IN_LINE, NAN_SCALE, WORDS, e5m2_of, four_scales
from moe_ops.kernels.triton.hopper import boxes, buffers, computed_here, ring, said, say, table_of_tiles
from moe_ops.kernels.triton.packed_fp8_tile import (
    FOLDED_UNIT,
    HIGH_BYTES,
    HIGH_POWER,
    LOW_BYTES,
    LOW_POWER,
    NO_NUMBER,
    WINDOW,
)
from moe_ops.kernels.triton.packed_tile import of_rows
from moe_ops.kernels.triton.promoted_mm import GROUPS, HALF, ROWS, STEP, SUM, columns_of, finish
from moe_ops.kernels.triton.scales import decode_scale
from moe_ops.kernels.triton.tile_loads import CONCAT, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait, uniform

COUNTERS = gl.constexpr(32)  # words of `told` before all others, on a line of their own: next tile, next lot
LOT = gl.constexpr(2)  # steps that are drawn together
OF_CODES = gl.constexpr(2)  # steps of codes that there is room for in shared memory
CODE_BYTES = OF_CODES.value * 2 * HALF.value * (STEP.value // 2 + 4)  # of it, with their scales
CHUNK = gl.constexpr(64)  # weight rows that are decoded at a time
FEW = gl.constexpr(8)  # the same of turns after the first
TURNS_AT = gl.constexpr(16)  # bits before those of how often a step is multiplied
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
BY_BYTE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _seen(pointer):
    """Words at `pointer` as they are in L2. What they tell of is read by descriptor, which goes by L2 too, or written:
    in either case after they have been seen. To acquire them would empty L1.
    """
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _sleep(word, NANOSECONDS: gl.constexpr):
    """Between two looks: who looks all the time keeps L2 busy."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $2; mov.b32 $0, $1;", "=r,r,r", [word, NANOSECONDS], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fenced(word):
    """`word`, behind a fence between what threads have written to memory and what descriptors read."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _drawn(counter):
    """The next number of a counter, to a warp."""
    return uniform(gl.atomic_add(counter, 1, sem="relaxed", scope="gpu"))


@gluon.jit
def _done(told):
    """Words of how many tiles of each panel are done."""
    return told + COUNTERS


@gluon.jit
def _of_steps(told, PANELS: gl.constexpr):
    """Words of each step of each panel, 0 until it is decoded: the largest exponents of its halves, a byte each, and
    how often it is multiplied.
    """
    return told + COUNTERS + PANELS


@gluon.jit
def _at_once(tiles, BLOCK: gl.constexpr, PANELS: gl.constexpr):
    """How many panels programs multiply with at a time."""
    at_once = (gl.num_programs(0) * PANELS + tiles - 1) // gl.maximum(tiles, 1)
    return gl.minimum(gl.maximum(at_once, 1), BLOCK[8])


@gluon.jit
def _together(at_once):
    """Panels whose first steps are decoded before the next ones of any: a quarter of `at_once`."""
    return (at_once + 3) // 4


@gluon.jit
def _room(at_once, BLOCK: gl.constexpr):
    """Panels that there is room for."""
    return gl.minimum(2 * at_once + 2, BLOCK[8])


@gluon.jit
def _rows_of(expert, extents, num_rows, BATCHED: gl.constexpr):
    """How many an expert has, as `cut_into_tiles` counts them."""
    end = gl.minimum(gl.maximum(gl.load(extents + expert), 0), num_rows)
    if not BATCHED:
        start = gl.load(extents + expert - 1, mask=expert > 0, other=0)
        end -= gl.minimum(gl.maximum(start, 0), num_rows)
    return end


@gluon.jit
def _lot(number, together, PANELS: gl.constexpr, LOTS: gl.constexpr):
    """(panel, lot of its steps) of number `number`: lot by lot of so many panels together."""
    first = number // (together * LOTS) * together
    within = number - first * LOTS
    count = gl.minimum(PANELS - first, together)
    return first + within % count, within // count


@gluon.jit
def _weight_rows(n_tile, row, HALF_OF: gl.constexpr, SIZES: gl.constexpr):
    """Rows of a half's stack, of rows of one half of a panel; the last one stands in for those behind it."""
    N: gl.constexpr = SIZES[1]
    GLU: gl.constexpr = SIZES[6]
    if GLU == CONCAT:
        return gl.minimum(n_tile * HALF + row, N - 1)
    else:
        return gl.minimum((n_tile * 2 + HALF_OF) * HALF + row, (N if GLU == NOT_GATED else 2 * N) - 1)


@gluon.jit
def _codes(of_weights, expert, n_tile, row, HALF_OF: gl.constexpr, SIZES: gl.constexpr):
    """Where the codes of rows of one half of a panel are, in words."""
    w, up_apart, _, _ = of_weights
    W_STRIDES: gl.constexpr = SIZES[3][0]
    words = w.to(gl.pointer_type(gl.int32)) + expert.to(gl.int64) * (W_STRIDES[0] // 4)
    if SIZES[6] == CONCAT:
        words += HALF_OF * (up_apart // 4)
    return words + _weight_rows(n_tile, row, HALF_OF, SIZES).to(gl.int64) * (W_STRIDES[1] // 4)


@gluon.jit
def _scales(of_weights, expert, n_tile, row, HALF_OF: gl.constexpr, SIZES: gl.constexpr):
    """Where the scales of rows of one half of a panel are."""
    _, _, scale, apart = of_weights
    N: gl.constexpr = SIZES[1]
    STRIDES: gl.constexpr = SIZES[3][1]
    PACKED: gl.constexpr = SIZES[10][4]
    half = row * 0
    if SIZES[6] == CONCAT:
        half += HALF_OF
    row = _weight_rows(n_tile, row, HALF_OF, SIZES)
    return of_rows(scale, apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)


@gluon.constexpr_function
def words_layout(warps):
    """[rows, WORDS] of codes; threads have neighbours, so that a warp writes whole lines of what they become."""
    return gl.BlockedLayout([1, 2], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def _stored(of_weights, where, first, HALF_OF: gl.constexpr, SIZES: gl.constexpr):
    """Words of codes [FEW, WORDS] and exponents [FEW, 4] of a step of rows `first` and on of one half of a panel; codes
    behind the last column are 0.
    """
    expert, n_tile, step = where
    K: gl.constexpr = SIZES[2]
    OF_WORDS: gl.constexpr = words_layout(gl.num_warps())
    column = step * WORDS + gl.arange(0, WORDS, layout=gl.SliceLayout(0, OF_WORDS))
    row = first + gl.arange(0, FEW, layout=gl.SliceLayout(1, OF_WORDS))
    words = _codes(of_weights, expert, n_tile, row, HALF_OF, SIZES)
    words = gl.load(words[:, None] + column[None, :], mask=(column < K // 8)[None, :], other=0)
    OF_GROUPS: gl.constexpr = gl.SliceLayout(2, words.reshape([FEW, 4, 4]).type.layout)
    group = gl.minimum(step * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, OF_GROUPS)), K // 32 - 1)
    row = first + gl.arange(0, FEW, layout=gl.SliceLayout(1, OF_GROUPS))
    scales = _scales(of_weights, expert, n_tile, row, HALF_OF, SIZES)
    return words, gl.load(scales[:, None] + group[None, :] * SIZES[3][1][2]).to(gl.int32)


@gluon.jit
def _decoded(words, exponent, top, ALL: gl.constexpr):
    """e5m2, four in a word [rows, 2 * WORDS], in units of `top`. Unless ALL scales are from 2^WINDOW below it on, the
    codes of others become 0.
    """
    R: gl.constexpr = words.shape[0]
    power = exponent - (top - WINDOW)
    low, high = power * LOW_POWER + LOW_BYTES, power * HIGH_POWER + HIGH_BYTES
    if not ALL:
        counts = (power >= 0) & (power <= WINDOW)
        low = gl.where(exponent == NAN_SCALE, NO_NUMBER, gl.where(counts, low, 0))
        high = gl.where(exponent == NAN_SCALE, NO_NUMBER, gl.where(counts, high, 0))
    low = tl.broadcast_to(low[:, :, None], [R, 4, 4])
    high = tl.broadcast_to(high[:, :, None], [R, 4, 4])
    first, second = e5m2_of(words.reshape([R, 4, 4]), low, high)
    return gl.join(first, second).reshape([R, 2 * WORDS])


@gluon.jit
def _counted(words, exponent):
    """(the largest exponent that counts, how much the smallest is below NAN_SCALE): those of NaN do not, nor those of
    codes that are all 0; both 0 where none does.
    """
    some = gl.max((words & 0x77777777).reshape([words.shape[0], 4, 4]), axis=2) > 0
    some &= exponent != NAN_SCALE
    top = gl.max(gl.max(gl.where(some, exponent, 0), axis=1), axis=0)
    lacking = gl.max(gl.max(gl.where(some, NAN_SCALE - exponent, 0), axis=1), axis=0)
    return uniform(top), uniform(lacking)


@gluon.jit
def _extremes(four):
    """The largest and the smallest byte of words."""
    largest, smallest = four & 0xFF, four & 0xFF
    for byte in gl.static_range(1, 4):
        exponent = (four >> (8 * byte)) & 0xFF
        largest, smallest = gl.maximum(largest, exponent), gl.minimum(smallest, exponent)
    return uniform(gl.max(largest, axis=0)), uniform(gl.min(smallest, axis=0))


@gluon.jit
def _draw(given, SIZES: gl.constexpr):
    """The warp that draws what is decoded here, has codes and scales brought, and says where it belongs. It waits until
    there is room in memory, so that who decodes need not.
    """
    of_weights, w_desc, codes_of, fours_of, passed, coded, taken, told, extents, num_rows = given
    tops_of, numbers_of, places_of = passed
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3][1]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    BATCHED: gl.constexpr = SIZES[9]
    PACKED: gl.constexpr = SIZES[10][4]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    LOTS: gl.constexpr = (STEPS + LOT - 1) // LOT
    PANELS: gl.constexpr = E * N_TILES
    _, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    at_once = _at_once(tiles, BLOCK, PANELS)
    together, room = _together(at_once), _room(at_once, BLOCK)
    row = gl.arange(0, HALF, layout=WARP)
    place = 0
    number = _drawn(told + 1)
    while number < PANELS * LOTS:
        panel, lot = _lot(number, together, PANELS, LOTS)
        number = _drawn(told + 1)
        expert, n_tile = panel // N_TILES, panel % N_TILES
        if _rows_of(expert, extents, num_rows, BATCHED) > 0:
            of_lower = _scales(of_weights, expert, n_tile, row, 0, SIZES)
            of_upper = _scales(of_weights, expert, n_tile, row, 1, SIZES)
            before = panel - room
            if before >= 0:
                used = (_rows_of(before // N_TILES, extents, num_rows, BATCHED) + BLOCK[0] - 1) // BLOCK[0]
                while _seen(_done(told) + before) < used:
                    _sleep(used, 200)
            for step in range(lot * LOT, gl.minimum(lot * LOT + LOT, STEPS)):
                lower = four_scales(of_lower, step * 4, K, STRIDES[2], PACKED[9])
                upper = four_scales(of_upper, step * 4, K, STRIDES[2], PACKED[9])
                slot = place % OF_CODES
                arrived = coded.index(slot)
                mbarrier.wait(taken.index(slot), ((place // OF_CODES) & 1) ^ 1)
                mbarrier.expect(arrived, HALF * STEP)
                for part in gl.static_range(2):
                    if GLU == CONCAT:
                        where = [expert, 1 - part if SWAPPED else part, n_tile * HALF, step * WORDS]
                    else:
                        where = [expert, (n_tile * 2 + part) * HALF, step * WORDS]
                    tma.async_copy_global_to_shared(w_desc, where, arrived, codes_of.index(slot * 2 + part))
                fours_of.index(slot * 2).store(lower)
                fours_of.index(slot * 2 + 1).store(upper)
                top, smallest = _extremes(lower)
                top_of_upper, smallest_of_upper = _extremes(upper)
                apart = gl.maximum(top - smallest, top_of_upper - smallest_of_upper)
                near = (gl.maximum(top, top_of_upper) < NAN_SCALE) & (apart <= WINDOW)
                say(tops_of, slot, top | (top_of_upper << 8) | (near.to(gl.int32) << TURNS_AT))
                say(numbers_of, slot, panel * STEPS + step)
                say(places_of, slot, panel % room * (2 * HALF) * STEPS + step)
                gl.thread_barrier()
                mbarrier.arrive(arrived)
                place += 1
    slot = place % OF_CODES
    mbarrier.wait(taken.index(slot), ((place // OF_CODES) & 1) ^ 1)
    say(numbers_of, slot, -1)
    gl.thread_barrier()
    mbarrier.arrive(coded.index(slot))
    mbarrier.arrive(coded.index(slot))


@gluon.jit
def _chunk(codes_of, fours_of, at):
    """Words of codes [CHUNK, WORDS] and exponents [CHUNK, 4] of a chunk of weight rows."""
    words = codes_of.index(at).load(words_layout(gl.num_warps()))
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words.reshape([CHUNK, 4, 4]).type.layout)
    return words, fours_of.index(at).load(LAYOUT).to(gl.int32)


@gluon.jit
def _keep(decoded, memory, place, chunk, STEPS: gl.constexpr):
    """Store a step of a chunk of weight rows; `place`: of the panel's first row and this step, in steps."""
    LIKE: gl.constexpr = decoded.type.layout
    row = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LIKE))
    column = gl.arange(0, 2 * WORDS, layout=gl.SliceLayout(0, LIKE))
    first = memory.to(gl.pointer_type(gl.int32)) + place * (2 * WORDS)
    gl.store(first + row[:, None] * (STEPS * 2 * WORDS) + column[None, :], decoded, cache_modifier=".cg")


@gluon.jit
def _decode_rows(codes_of, fours_of, slot, tops, memory, place, STEPS: gl.constexpr, ALL: gl.constexpr):
    """Decode a step, both halves in units of their `tops`."""
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    for chunk in range(CHUNKS):
        words, exponent = _chunk(codes_of, fours_of, slot * CHUNKS + chunk)
        top = gl.where(chunk < CHUNKS // 2, tops[0], tops[1])
        _keep(_decoded(words, exponent, top, ALL), memory, place, chunk, STEPS)


@gluon.jit
def _largest(codes_of, fours_of, first):
    """(the largest exponent that counts, how often columns are multiplied) of the chunks of a half."""
    largest = first * 0
    lacking = first * 0
    for chunk in range(HALF // CHUNK):
        words, exponent = _chunk(codes_of, fours_of, first + chunk)
        counted = _counted(words, exponent)
        largest, lacking = gl.maximum(largest, counted[0]), gl.maximum(lacking, counted[1])
    return largest, gl.maximum(largest + lacking - NAN_SCALE, 0) // (WINDOW + 1) + 1


@gluon.jit
def _decode(given, STEPS: gl.constexpr):
    """The warps that decode what the one that draws has had brought."""
    codes_of, fours_of, passed, coded, kept, memory = given
    tops_of, numbers_of, places_of = passed
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    step = 0
    mbarrier.wait(coded.index(0), 0)
    number = said(numbers_of, 0)
    while number >= 0:
        slot = step % OF_CODES
        word, place = said(tops_of, slot), said(places_of, slot)
        if word >> TURNS_AT == 1:
            tops = (word & 0xFF, (word >> 8) & 0xFF)
            _decode_rows(codes_of, fours_of, slot, tops, memory, place, STEPS, True)
        else:
            top, turns = _largest(codes_of, fours_of, slot * CHUNKS)
            top_of_upper, turns_of_upper = _largest(codes_of, fours_of, slot * CHUNKS + CHUNKS // 2)
            _decode_rows(codes_of, fours_of, slot, (top, top_of_upper), memory, place, STEPS, False)
            word = top | (top_of_upper << 8) | (gl.maximum(turns, turns_of_upper) << TURNS_AT)
        gl.thread_barrier()
        say(tops_of, slot, _fenced(word))
        gl.thread_barrier()
        mbarrier.arrive(kept.index(slot))
        step += 1
        mbarrier.wait(coded.index(step % OF_CODES), (step // OF_CODES) & 1)
        number = said(numbers_of, step % OF_CODES)
    mbarrier.arrive(kept.index(step % OF_CODES))


@gluon.jit
def _publish(tops_of, numbers_of, kept, taken, of_steps):
    """The warp that tells all programs what is decoded here, once it is in memory: those that decode go on."""
    step = 0
    mbarrier.wait(kept.index(0), 0)
    number = said(numbers_of, 0)
    while number >= 0:
        word = said(tops_of, step % OF_CODES)
        mbarrier.arrive(taken.index(step % OF_CODES))
        gl.atomic_xchg(of_steps + number, word, sem="release", scope="gpu")
        step += 1
        mbarrier.wait(kept.index(step % OF_CODES), (step // OF_CODES) & 1)
        number = said(numbers_of, step % OF_CODES)


@gluon.jit
def _at_lane(words, at):
    """The word of lane `at` of a warp."""
    return uniform(gl.sum(gl.where(gl.arange(0, 32, layout=WARP) == at, words, 0), axis=0))


@gluon.constexpr_function
def whole_columns(n_tiles):
    """So many tiles of rows that all of an expert's go along its columns together: those of a panel are neighbours."""
    return 2**30 // n_tiles


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that draws tiles, and has rows and decoded weights of their steps brought, as soon as there is room."""
    a_desc, memory_desc, rows_of, weights_of, few_of, left, full, empty, of_weights, told, extents, num_rows = given
    steps_of, tiles_of = left
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[9]
    STAGES: gl.constexpr = BLOCK[6]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    room = _room(_at_once(tiles, BLOCK, E * N_TILES), BLOCK)
    lane = gl.arange(0, 32, layout=WARP)
    place = 0
    tile = _drawn(told)
    while tile < tiles:
        next_tile = _drawn(told)
        expert, first, _, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, whole_columns(N_TILES))
        panel = expert * N_TILES + n_tile
        of_steps = _of_steps(told, E * N_TILES) + panel * STEPS
        words = lane * 0
        for step in range(STEPS):
            if step % 32 == 0:
                words = _seen(of_steps + step + lane)
            word = _at_lane(words, step % 32)
            while word == 0:
                _sleep(word, 64)
                words = _seen(of_steps + step // 32 * 32 + lane)
                word = _at_lane(words, step % 32)
            word = _fenced(word)
            turns, lower, upper = word >> TURNS_AT, word & 0xFF, (word >> 8) & 0xFF
            stage = place % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            say(steps_of, stage, lower | (upper << 8) | ((turns == 1).to(gl.int32) << TURNS_AT))
            say(tiles_of, stage, tile)
            gl.thread_barrier()
            mbarrier.expect(arrived, (GROUPS * ROWS + 2 * HALF) * STEP)
            for box in gl.static_range(2):
                at = [first + box * ROWS, step * STEP]
                tma.async_copy_global_to_shared(a_desc, at, arrived, rows_of.index(stage * 2 + box))
                at = [(panel % room * 2 + box) * HALF, step * STEP]
                tma.async_copy_global_to_shared(memory_desc, at, arrived, weights_of.index(stage * 2 + box))
            place += 1
            for turn in range(1, turns):
                stage = place % STAGES
                arrived = full.index(stage)
                mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
                lower -= WINDOW + 1
                upper -= WINDOW + 1
                in_panel = (expert, n_tile, step)
                few = stage * (2 * HALF // FEW)
                for chunk in range(HALF // FEW):
                    codes, exponent = _stored(of_weights, in_panel, chunk * FEW, 0, SIZES)
                    few_of.index(few + chunk).store(_decoded(codes, exponent, lower, False))
                    codes, exponent = _stored(of_weights, in_panel, chunk * FEW, 1, SIZES)
                    few_of.index(few + HALF // FEW + chunk).store(_decoded(codes, exponent, upper, False))
                tops = gl.maximum(lower, 0) | (gl.maximum(upper, 0) << 8)
                say(steps_of, stage, tops | ((turn == turns - 1).to(gl.int32) << TURNS_AT))
                say(tiles_of, stage, tile)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.expect(arrived, GROUPS * ROWS * STEP)
                for box in gl.static_range(2):
                    at = [first + box * ROWS, step * STEP]
                    tma.async_copy_global_to_shared(a_desc, at, arrived, rows_of.index(stage * 2 + box))
                place += 1
        tile = next_tile
    stage = place % STAGES
    mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
    say(tiles_of, stage, tile)
    gl.thread_barrier()
    mbarrier.arrive(full.index(stage))


@gluon.jit
def _unit(tops, HALF_OF: gl.constexpr):
    return decode_scale(((tops >> (8 * HALF_OF)) & 0xFF).to(gl.uint8)) * FOLDED_UNIT


@gluon.jit
def _added(total, product, factors):
    """`total` and a product times a factor of each row."""
    return computed_here(total + product * factors[:, None])


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its 64 rows of every tile times the tile's weight rows."""
    rows_of, weights_of, left, full, empty, leaving, a_scale, done, extents, num_rows, bias = given
    steps_of, tiles_of = left
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[9]
    STAGES: gl.constexpr = BLOCK[6]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    mbarrier.wait(full.index(0), 0)
    tile = said(tiles_of, 0)
    while tile < tiles:
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, whole_columns(N_TILES))
        first += GROUP * ROWS
        step = first * 0
        if first >= past:
            while step < STEPS:
                stage = place % STAGES
                mbarrier.wait(full.index(stage), (place // STAGES) & 1)
                step += said(steps_of, stage) >> TURNS_AT
                mbarrier.arrive(empty.index(stage))
                place += 1
        else:
            lower = gl.zeros([ROWS, HALF], gl.float32, layout=SUM)
            upper = gl.zeros([ROWS, HALF], gl.float32, layout=SUM)
            product = warpgroup_mma_init(lower)
            at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUM))
            scales = a_scale + at.to(gl.int64) * STEPS
            of_tokens = gl.load(scales, mask=at < past, other=0.0)
            while step < STEPS:
                stage = place % STAGES
                mbarrier.wait(full.index(stage), (place // STAGES) & 1)
                rows = rows_of.index(stage * GROUPS + GROUP)
                numbers = weights_of.index(stage * 2).permute((1, 0))
                product = warpgroup_mma(rows, numbers, product, use_acc=False, is_async=True)
                tops = said(steps_of, stage)
                step += tops >> TURNS_AT
                ahead = gl.load(scales + gl.minimum(step, STEPS - 1), mask=at < past, other=0.0)
                summed = warpgroup_mma_wait(0, deps=[product])
                lower = _added(lower, summed, of_tokens * _unit(tops, 0))
                numbers = weights_of.index(stage * 2 + 1).permute((1, 0))
                product = warpgroup_mma(rows, numbers, warpgroup_mma_init(summed), use_acc=False, is_async=True)
                summed = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(empty.index(stage))
                upper = _added(upper, summed, of_tokens * _unit(tops, 1))
                product = warpgroup_mma_init(summed)
                of_tokens = ahead
                place += 1
            if GROUP == 0:  # whose rows there always are: the panel has been read
                gl.atomic_add(done + expert * N_TILES + n_tile, 1, sem="relaxed", scope="gpu")
            of_weights = (bias, 0, bias)  # no scales are left
            finish(lower, upper, None, of_weights, (expert, first, past, n_tile), leaving, GROUP, SIZES)
        mbarrier.wait(full.index(place % STAGES), (place // STAGES) & 1)
        tile = said(tiles_of, place % STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "up_offset", "up_scale_offset"])
def _decoded_once_mm_kernel(
    a_desc,
    a_scale,
    extents,
    w,
    w_desc,
    up_offset,
    w_scale,
    up_scale_offset,
    memory,
    memory_desc,
    told,
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
    """One program for each multiprocessor; tiles of 128 rows of one expert times 256 rows of its weight.

    Args: see `expert_mm._expert_mm_kernel`. Rows, codes, decoded weights and output come and leave by descriptor, 128
    columns at a time. BLOCK[6]: steps that there is room for in shared memory; BLOCK[8]: panels, in `memory`. told: i32
    [COUNTERS + panels * (1 + steps) + 32], all 0: see `_drawn`, `_done`, `_of_steps`.
    """
    N_TILES: gl.constexpr = (N + columns_of(GLU)[0] - 1) // columns_of(GLU)[0]
    STAGES: gl.constexpr = BLOCK[6]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    rows_of, weights_of, staged, full, empty = buffers(a_desc, memory_desc, out_desc, 2, 2, GROUPS, STAGES)
    codes_of = gl.allocate_shared_memory(w_desc.dtype, boxes(OF_CODES * 2, w_desc.block_shape), w_desc.layout)
    fours_of = gl.allocate_shared_memory(gl.int32, [OF_CODES * 2, HALF], IN_LINE)
    steps_of = gl.allocate_shared_memory(gl.int32, [STAGES, 1], IN_LINE)
    tiles_of = gl.allocate_shared_memory(gl.int32, [STAGES, 1], IN_LINE)
    tops_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, 1], IN_LINE)
    numbers_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, 1], IN_LINE)
    places_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, 1], IN_LINE)
    coded, taken = ring(OF_CODES, 1, 2)
    kept, _ = ring(OF_CODES, 1)
    pdl_wait(PDL)
    pdl_release(PDL)
    done, of_steps = _done(told), _of_steps(told, E * N_TILES)
    bias = bias if STRIDES[2] is not None else extents
    leaving = (staged, out_desc, out_scale, alpha, limit)
    of_weights = (w, gl.multiple_of(up_offset, 16), w_scale, up_scale_offset)
    few_of = weights_of._reinterpret(
        gl.int32, [STAGES * 2 * HALF // FEW, FEW, 2 * WORDS], gl.NVMMASharedLayout(128, 32, 2)
    )
    chunks_of = codes_of._reinterpret(gl.int32, [OF_CODES * CHUNKS, CHUNK, WORDS], gl.NVMMASharedLayout(64, 32, 2))
    bytes_of = fours_of._reinterpret(gl.uint8, [OF_CODES * CHUNKS, CHUNK, 4], BY_BYTE)
    left, passed = (steps_of, tiles_of), (tops_of, numbers_of, places_of)
    multiplied = (rows_of, weights_of, left, full, empty, leaving, a_scale, done, extents, num_rows, bias)
    brought = (
        a_desc, memory_desc, rows_of, weights_of, few_of, left, full, empty, of_weights, told, extents, num_rows,
    )  # fmt: skip
    drawn = (of_weights, w_desc, codes_of, fours_of, passed, coded, taken, told, extents, num_rows)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, BATCHED, SCHEME)
    gl.warp_specialize(
        [
            (_multiply, (multiplied, 0, SIZES)),
            (_multiply, (multiplied, 1, SIZES)),
            (_decode, ((chunks_of, bytes_of, passed, coded, kept, memory), STEPS)),
            (_bring, (brought, SIZES)),
            (_draw, (drawn, SIZES)),
            (_publish, (tops_of, numbers_of, kept, taken, of_steps)),
        ],
        [4, 4, 1, 1, 1],
        [208, 64, 32, 32, 32],
    )
