"""Panels of weight rows that are decoded once for all tiles that multiply with them: those of `decoded_once_mm`, and
beside rows of 16 bits of `decoded_plain_mm`.

A panel is 256 weight rows: HALF of the gate and as many of up, or twice as many in a row. In every program some warps
decode, whatever panel is next, 128 bytes of a row at a time, to memory that stays in L2. One warp draws what they
decode, and has codes and scales of it brought; another tells all programs what is decoded.

Memory is that of the panels which programs multiply with at a time and as many more. A panel gets the place of an
earlier one when all tiles of that are done. Panels are counted over the experts that have rows.

e2m1 codes become e5m2, whose scales are folded in as in `folded_mm`, but the largest of 128 weight rows and 128 columns
is their unit. Where codes other than 0 have scales too far below it, columns are multiplied in turns. int4 codes become
e4m3, whose scales are multiplied with sums, and rows come in the order of `weight_rows`. Codes that become bf16 are
multiplied with the scales of their groups.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moe_ops.kernels.triton.codes import E2M1, codes_of_word
from moe_ops.kernels.triton.folded_mm import NAN_SCALE, WORDS, ask_for_codes, e5m2_of, four_scales
from moe_ops.kernels.triton.hopper import IN_LINE, WARPS, boxes, computed_here, drawn, ring, said, say, table_of_tiles
from moe_ops.kernels.triton.packed_fp8_tile import (
    ABOVE,
    BELOW,
    HIGH_BYTES,
    HIGH_POWER,
    LOW_BYTES,
    LOW_POWER,
    NO_NUMBER,
    WINDOW,
    int4_parts,
    join_int4,
)
from moe_ops.kernels.triton.packed_tile import fetch, of_rows
from moe_ops.kernels.triton.promoted_mm import HALF, STEP
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED, NOT_GATED
from moe_ops.kernels.triton.util import uniform

COUNTERS = gl.constexpr(32)  # words of `told` before all others, on a line of their own: next tile, next lot
LOT = gl.constexpr(2)  # steps that are drawn together
CHUNK = gl.constexpr(64)  # weight rows that are decoded at a time
FEW = gl.constexpr(8)  # the same of turns after the first
TURNS_AT = gl.constexpr(16)  # bits before those of how often a step is multiplied
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
BY_BYTE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def is_wide(scheme):
    """Whether codes become bf16, beside rows of that."""
    return scheme[4][11]


@gluon.constexpr_function
def is_folded(scheme):
    """Whether scales are folded into codes of eight bits; else sums are multiplied with them, or codes of bf16."""
    return scheme[4][0] == E2M1.value and not is_wide(scheme)


@gluon.constexpr_function
def columns_of_step(scheme):
    """Columns of a step: STEP bytes of numbers."""
    return STEP.value // 2 if is_wide(scheme) else STEP.value


@gluon.constexpr_function
def words_of(scheme):
    """Words of a row's codes in a step."""
    return columns_of_step(scheme) // codes_of_word(scheme[4][0])


@gluon.constexpr_function
def lines_of(scheme):
    """How they lie in shared memory."""
    return gl.NVMMASharedLayout(4 * words_of(scheme), 32, 2)


@gluon.constexpr_function
def steps_of_codes(scheme):
    """Steps of codes that there is room for in shared memory. Beside bf16 numbers, which are multiplied half as fast,
    one of codes of eight bits: room for one more step of numbers is worth more.
    """
    return 1 if is_wide(scheme) and codes_of_word(scheme[4][0]) == 4 else 2


@gluon.constexpr_function
def has_scales(scheme):
    """Whether what decodes has to know scales; else sums are multiplied with them."""
    return is_folded(scheme) or scheme[4][2]


def code_bytes(scheme):
    """Shared memory for codes, and a word of scales for each row."""
    return steps_of_codes(scheme) * 2 * HALF.value * 4 * (words_of(scheme) + 1)


@gluon.jit
def seen(pointer):
    """Words at `pointer` as they are in L2. What they tell of is read by descriptor, which goes by L2 too, or written:
    in either case after they have been seen. To acquire them would empty L1.
    """
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sleep(word, NANOSECONDS: gl.constexpr):
    """Between two looks: who looks all the time keeps L2 busy."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $2; mov.b32 $0, $1;", "=r,r,r", [word, NANOSECONDS], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fenced(word):
    """`word`, behind a fence between what threads have written to memory and what descriptors read."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def done_of(told):
    """Words of how many tiles of each panel are done, times the WARPS of the group that says so."""
    return told + COUNTERS


@gluon.jit
def words_of_steps(told, PANELS: gl.constexpr):
    """Words of each step of each panel, 0 until it is decoded: the largest exponents of its halves, a byte each, and
    how often it is multiplied.
    """
    return told + COUNTERS + PANELS


@gluon.jit
def _at_lane(words, at):
    """The word of lane `at` of a warp."""
    return uniform(gl.sum(gl.where(gl.arange(0, 32, layout=WARP) == at, words, 0), axis=0))


@gluon.jit
def when_decoded(of_steps, words, step):
    """(words of 32 steps, that of this one), once it is decoded; `words`: what was seen of the step before."""
    lane = gl.arange(0, 32, layout=WARP)
    if step % 32 == 0:
        words = seen(of_steps + step + lane)
    word = _at_lane(words, step % 32)
    while word == 0:
        sleep(word, 64)
        words = seen(of_steps + step // 32 * 32 + lane)
        word = _at_lane(words, step % 32)
    return words, fenced(word)


@gluon.constexpr_function
def whole_columns(n_tiles):
    """So many tiles of rows that all of an expert's go along its columns together: those of a panel are neighbours."""
    return 2**30 // n_tiles


@gluon.jit
def at_once_of(panels, tiles, BLOCK: gl.constexpr):
    """How many panels programs multiply with at a time."""
    at_once = (gl.num_programs(0) * panels + tiles - 1) // gl.maximum(tiles, 1)
    return gl.minimum(gl.maximum(at_once, 1), BLOCK[-1])


@gluon.jit
def _together(at_once):
    """Panels whose first steps are decoded before the next ones of any: a quarter of `at_once`."""
    return (at_once + 3) // 4


@gluon.jit
def room_of(at_once, BLOCK: gl.constexpr):
    """Panels that there is room for."""
    return gl.minimum(2 * at_once + 2, BLOCK[-1])


@gluon.jit
def panels_held(table, N_TILES: gl.constexpr):
    """How many panels experts with rows have."""
    _, start, end, _ = table
    return uniform(gl.sum((end > start).to(gl.int32), axis=0)) * N_TILES


@gluon.jit
def panel_of(table, expert, n_tile, N_TILES: gl.constexpr):
    """The number of a panel, counted over experts with rows."""
    e, start, end, _ = table
    return uniform(gl.sum(((end > start) & (e < expert)).to(gl.int32), axis=0)) * N_TILES + n_tile


@gluon.jit
def _tiles_of(panel, ranks, rows, BLOCK: gl.constexpr, N_TILES: gl.constexpr):
    """How many tiles of rows multiply with a panel."""
    rows = gl.sum(gl.where(ranks == panel // N_TILES, rows, 0), axis=0)
    return uniform((rows + BLOCK[0] - 1) // BLOCK[0])


@gluon.jit
def _lot(number, together, panels, LOTS: gl.constexpr):
    """(panel, lot of its steps) of number `number`: lot by lot of so many panels together."""
    first = number // (together * LOTS) * together
    within = number - first * LOTS
    count = gl.minimum(panels - first, together)
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
def room_for_codes(w_desc, CHUNK: gl.constexpr, SCHEME: gl.constexpr):
    """Shared memory for steps of codes and words of scales, both as they come and by CHUNK weight rows; for what `draw`
    says of a step: largest exponents, its number, its place; barriers of the steps.
    """
    OF_CODES: gl.constexpr = steps_of_codes(SCHEME)
    CHUNKS: gl.constexpr = OF_CODES * 2 * HALF // CHUNK
    codes_of = gl.allocate_shared_memory(w_desc.dtype, boxes(OF_CODES * 2, w_desc.block_shape), w_desc.layout)
    fours_of = gl.allocate_shared_memory(gl.int32, [OF_CODES * 2, HALF], IN_LINE)
    tops_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, 1], IN_LINE)
    numbers_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, 1], IN_LINE)
    places_of = gl.allocate_shared_memory(gl.int32, [OF_CODES, 1], IN_LINE)
    coded, taken = ring(OF_CODES, 1, 2)
    chunks_of = codes_of._reinterpret(gl.int32, [CHUNKS, CHUNK, words_of(SCHEME)], lines_of(SCHEME))
    bytes_of = fours_of._reinterpret(gl.uint8, [CHUNKS, CHUNK, 4], BY_BYTE)
    return (codes_of, fours_of), chunks_of, bytes_of, (tops_of, numbers_of, places_of), coded, taken


@gluon.jit
def _codes(stored, expert, n_tile, row, HALF_OF: gl.constexpr, SIZES: gl.constexpr):
    """Where the codes of rows of one half of a panel are, in words."""
    w, up_apart = stored
    W_STRIDES: gl.constexpr = SIZES[3][0]
    words = w.to(gl.pointer_type(gl.int32)) + expert.to(gl.int64) * (W_STRIDES[0] // 4)
    if SIZES[6] == CONCAT:
        words += HALF_OF * (up_apart // 4)
    return words + _weight_rows(n_tile, row, HALF_OF, SIZES).to(gl.int64) * (W_STRIDES[1] // 4)


@gluon.jit
def _scales(scales, expert, n_tile, row, HALF_OF: gl.constexpr, SIZES: gl.constexpr):
    """Where the scales of rows of one half of a panel are."""
    scale, apart = scales
    N: gl.constexpr = SIZES[1]
    STRIDES: gl.constexpr = SIZES[3][1]
    PACKED: gl.constexpr = SIZES[10][4]
    half = row * 0
    if SIZES[6] == CONCAT:
        half += HALF_OF
    row = _weight_rows(n_tile, row, HALF_OF, SIZES)
    return of_rows(scale, apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)


@gluon.constexpr_function
def words_layout(warps, words, together, numbers=1):
    """[rows, words] of codes, or of so many numbers of each. A thread has as many words TOGETHER as become 16 bytes,
    and its neighbour the next ones: one store of a warp is of whole lines.
    """
    lanes = words // together
    return gl.BlockedLayout([1, together * numbers], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def stored_codes(stored, scales, where, first, HALF_OF: gl.constexpr, SIZES: gl.constexpr):
    """Words of codes [FEW, WORDS] and exponents [FEW, 4] of a step of rows `first` and on of one half of a panel; codes
    behind the last column are 0.
    """
    expert, n_tile, step = where
    K: gl.constexpr = SIZES[2]
    OF_WORDS: gl.constexpr = words_layout(gl.num_warps(), WORDS, 2)
    column = step * WORDS + gl.arange(0, WORDS, layout=gl.SliceLayout(0, OF_WORDS))
    row = first + gl.arange(0, FEW, layout=gl.SliceLayout(1, OF_WORDS))
    words = _codes(stored, expert, n_tile, row, HALF_OF, SIZES)
    words = gl.load(words[:, None] + column[None, :], mask=(column < K // 8)[None, :], other=0)
    OF_GROUPS: gl.constexpr = gl.SliceLayout(2, words.reshape([FEW, 4, 4]).type.layout)
    group = gl.minimum(step * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, OF_GROUPS)), K // 32 - 1)
    row = first + gl.arange(0, FEW, layout=gl.SliceLayout(1, OF_GROUPS))
    first = _scales(scales, expert, n_tile, row, HALF_OF, SIZES)
    return words, gl.load(first[:, None] + group[None, :] * SIZES[3][1][2]).to(gl.int32)


@gluon.jit
def folded_codes(words, exponent, top, ALL: gl.constexpr):
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
def _two_scales(first, group, LAST: gl.constexpr, STRIDE: gl.constexpr, WIDE: gl.constexpr):
    """The bytes of two scales of columns, each twice, in a word; see `four_scales`."""
    if WIDE >= 2:
        both = fetch((first + gl.minimum(group, LAST - 1)).to(gl.pointer_type(gl.int16))) & 0xFFFF
    else:
        both = fetch(first + gl.minimum(group, LAST) * STRIDE)
        both |= fetch(first + gl.minimum(group + 1, LAST) * STRIDE) << 8
    return (both & 0xFF) * 0x0101 + (both >> 8) * 0x01010000


@gluon.jit
def _scale_words(first, step, SIZES: gl.constexpr):
    """The bytes of a step's scales of weight rows, each as often as they are four; `first`: where those of column 0
    are.
    """
    K: gl.constexpr = SIZES[2]
    STRIDE: gl.constexpr = SIZES[3][1][2]
    PACKED: gl.constexpr = SIZES[10][4]
    GROUPS: gl.constexpr = columns_of_step(SIZES[10]) // PACKED[4]
    LAST: gl.constexpr = (K + PACKED[4] - 1) // PACKED[4] - 1
    if GROUPS == 1:
        return fetch(first + gl.minimum(step, LAST) * STRIDE) * 0x01010101
    elif GROUPS == 2:
        return _two_scales(first, step * 2, LAST, STRIDE, PACKED[9])
    else:
        return four_scales(first, step * 4, LAST, STRIDE, PACKED[9])


@gluon.jit
def draw(given, SIZES: gl.constexpr):
    """The warp that draws what is decoded here, has codes and scales brought, and says where it belongs. It waits until
    there is room in memory, so that who decodes need not.
    """
    scales, w_desc, held, passed, coded, taken, told, extents, num_rows = given
    codes_of, fours_of = held
    tops_of, numbers_of, places_of = passed
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[9]
    FOLDED: gl.constexpr = is_folded(SIZES[10])
    SCALES: gl.constexpr = has_scales(SIZES[10])
    OF_CODES: gl.constexpr = steps_of_codes(SIZES[10])
    STEPS: gl.constexpr = (K + columns_of_step(SIZES[10]) - 1) // columns_of_step(SIZES[10])
    LOTS: gl.constexpr = (STEPS + LOT - 1) // LOT
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    e, start, end, _ = table
    ranks = gl.where(end > start, tl.cumsum((end > start).to(gl.int32), axis=0) - 1, -1)
    panels = panels_held(table, N_TILES)
    at_once = at_once_of(panels, tiles, BLOCK)
    together, room = _together(at_once), room_of(at_once, BLOCK)
    row = gl.arange(0, HALF, layout=WARP)
    place = 0
    number = drawn(told + 1)
    while number < panels * LOTS:
        panel, lot = _lot(number, together, panels, LOTS)
        number = drawn(told + 1)
        expert = uniform(gl.sum(gl.where(ranks == panel // N_TILES, e, 0), axis=0))
        n_tile = panel % N_TILES
        if SCALES:
            of_lower = _scales(scales, expert, n_tile, row, 0, SIZES)
            of_upper = _scales(scales, expert, n_tile, row, 1, SIZES)
        before = panel - room
        if before >= 0:
            used = WARPS * _tiles_of(before, ranks, end - start, BLOCK, N_TILES)
            while seen(done_of(told) + before) < used:
                sleep(used, 200)
        for step in range(lot * LOT, gl.minimum(lot * LOT + LOT, STEPS)):
            if SCALES:
                lower, upper = _scale_words(of_lower, step, SIZES), _scale_words(of_upper, step, SIZES)
            slot = place % OF_CODES
            arrived = coded.index(slot)
            mbarrier.wait(taken.index(slot), ((place // OF_CODES) & 1) ^ 1)
            ask_for_codes(w_desc, expert, n_tile, step, arrived, codes_of, slot, SIZES, words_of(SIZES[10]))
            if SCALES:
                fours_of.index(slot * 2).store(lower)
                fours_of.index(slot * 2 + 1).store(upper)
            if FOLDED:
                top, smallest = _extremes(lower)
                top_of_upper, smallest_of_upper = _extremes(upper)
                apart = gl.maximum(top - smallest, top_of_upper - smallest_of_upper)
                near = (gl.maximum(top, top_of_upper) < NAN_SCALE) & (apart <= WINDOW)
                say(tops_of, slot, top | (top_of_upper << 8) | (near.to(gl.int32) << TURNS_AT))
            else:
                say(tops_of, slot, 1 << TURNS_AT)
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
    words = codes_of.index(at).load(words_layout(gl.num_warps(), WORDS, 2))
    LAYOUT: gl.constexpr = gl.SliceLayout(2, words.reshape([CHUNK, 4, 4]).type.layout)
    return words, fours_of.index(at).load(LAYOUT).to(gl.int32)


@gluon.jit
def keep(decoded, row, memory, place, STEPS: gl.constexpr):
    """Store a step of weight rows as rows `row` of a panel; `place`: of its first one and this step, in steps."""
    LIKE: gl.constexpr = decoded.type.layout
    COLUMNS: gl.constexpr = decoded.shape[1]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LIKE))
    first = memory.to(gl.pointer_type(decoded.dtype)) + place * COLUMNS
    gl.store(first + row[:, None] * (STEPS * COLUMNS) + column[None, :], decoded, cache_modifier=".cg")


@gluon.jit
def _decode_rows(codes_of, fours_of, slot, tops, memory, place, STEPS: gl.constexpr, ALL: gl.constexpr):
    """Decode a step, both halves in units of their `tops`."""
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    for chunk in range(CHUNKS):
        words, exponent = _chunk(codes_of, fours_of, slot * CHUNKS + chunk)
        top = gl.where(chunk < CHUNKS // 2, tops[0], tops[1])
        folded = folded_codes(words, exponent, top, ALL)
        row = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, folded.type.layout))
        keep(folded, row, memory, place, STEPS)


@gluon.jit
def _row_of_panel(chunk, LAYOUT: gl.constexpr, GLU: gl.constexpr):
    """Where weight rows of a chunk of int4 codes belong. Of each group of warps that multiplies, rows of its first
    product are followed by those of its second one: of 64 outputs the gate's and up's, or 128 in a row.
    """
    row = gl.arange(0, CHUNK, layout=LAYOUT)
    if GLU == CONCAT:
        row += chunk % 2 * HALF + chunk // 2 * CHUNK
    elif GLU == INTERLEAVED:
        row = chunk // 2 * HALF + row % 2 * CHUNK + chunk % 2 * (CHUNK // 2) + row // 2
    else:
        row += chunk * CHUNK
    return row


@gluon.jit
def _decode_int4(codes_of, slot, memory, place, STEPS: gl.constexpr, GLU: gl.constexpr):
    """Decode a step to e4m3 in units of INT4_UNIT."""
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    for chunk in range(CHUNKS):
        words = codes_of.index(slot * CHUNKS + chunk).load(words_layout(gl.num_warps(), WORDS, 2))
        first = join_int4(int4_parts(words, BELOW, ABOVE))
        second = join_int4(int4_parts(words >> 16, BELOW, ABOVE))
        numbers = gl.join(first, second).reshape([CHUNK, 2 * WORDS])
        keep(numbers, _row_of_panel(chunk, gl.SliceLayout(1, numbers.type.layout), GLU), memory, place, STEPS)


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
def decode(given, STEPS: gl.constexpr, GLU: gl.constexpr, SCHEME: gl.constexpr):
    """The warps that decode what the one that draws has had brought, beside rows of e4m3."""
    codes_of, fours_of, passed, coded, kept, memory = given
    tops_of, numbers_of, places_of = passed
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    OF_CODES: gl.constexpr = steps_of_codes(SCHEME)
    step = 0
    mbarrier.wait(coded.index(0), 0)
    number = said(numbers_of, 0)
    while number >= 0:
        slot = step % OF_CODES
        word, place = said(tops_of, slot), said(places_of, slot)
        if not is_folded(SCHEME):
            _decode_int4(codes_of, slot, memory, place, STEPS, GLU)
        elif word >> TURNS_AT == 1:
            tops = (word & 0xFF, (word >> 8) & 0xFF)
            _decode_rows(codes_of, fours_of, slot, tops, memory, place, STEPS, True)
        else:
            top, turns = _largest(codes_of, fours_of, slot * CHUNKS)
            top_of_upper, turns_of_upper = _largest(codes_of, fours_of, slot * CHUNKS + CHUNKS // 2)
            _decode_rows(codes_of, fours_of, slot, (top, top_of_upper), memory, place, STEPS, False)
            word = top | (top_of_upper << 8) | (gl.maximum(turns, turns_of_upper) << TURNS_AT)
        gl.thread_barrier()
        say(tops_of, slot, fenced(word))
        gl.thread_barrier()
        mbarrier.arrive(kept.index(slot))
        step += 1
        mbarrier.wait(coded.index(step % OF_CODES), (step // OF_CODES) & 1)
        number = said(numbers_of, step % OF_CODES)
    mbarrier.arrive(kept.index(step % OF_CODES))


@gluon.jit
def publish(tops_of, numbers_of, kept, taken, of_steps, OF_CODES: gl.constexpr):
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
def added(total, product, factors):
    """`total` and a product times a factor of each row."""
    return computed_here(total + product * factors[:, None])
