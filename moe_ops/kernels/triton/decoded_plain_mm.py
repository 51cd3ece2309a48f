"""Expert GEMMs of very many rows of 16 bits and weights of codes, for Hopper: `plain_mm` of panels, decoded once.

What `decoded_mm` computes, but for the order in which tensor cores add. There every tile of rows decodes its weight
rows. Here warps of every program decode, whatever panel of 256 weight rows is next, to bf16 in memory that stays in L2
(`panels`, as `decoded_once_mm` does beside rows of e4m3), and two groups of four warps multiply as those of `plain_mm`:
64 rows of tokens each, beside all of a panel, without waiting for one another. For these products a thread needs the
registers of no more than 12 warps: one decodes where another copies rows from tokens, two where rows come sorted.
Scales of whole weight rows stand behind the sum; those of groups are multiplied with the codes, which is exact.

us of layers on an H200 in bf16, by `decoded_mm` and by this kernel, of mxfp4: Qwen3-30B-A3B, T = 8192 (512 rows an
expert) 1059, 1196, 1391, T = 16384 2083, 2349, 2282; Mixtral-8x7B, T = 4096 (1024) 4464, 4655, 4937, T = 16384 18060,
18707, 17960. A panel takes a program 3.6 us a step, as long as four tiles multiply one; where eight share it, what is
decoded makes up a tenth of what goes through L2, which the products of bf16 alone fill; where 32 do it costs nothing.
Tried: rows copied by the warp that draws tiles, two that decode (Mixtral-8x7B, T = 16384 17909 in bf16, so 19844);
`decoded_once_mm`'s four warps that decode leave no registers for products of 256 weight rows. All in
benchmarks/comparisons/h200-decoded-plain-mm.json.

Written in Gluon, which has no interpreter: that runs `packed_tile` for the same products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moe_ops.kernels.triton.codes import codes_of_word, decode_words
from moe_ops.kernels.triton.hopper import (
    buffers,
    drawn,
    no_more_tiles,
    ring,
    said,
    say_tile,
    table_of_tiles,
    tiles_told,
)
from moe_ops.kernels.triton.packed_tile import factor_of, shift_of
from moe_ops.kernels.triton.panels import (
    WARP,
    at_once_of,
    done_of,
    draw,
    fenced,
    keep,
    panel_of,
    panels_held,
    room_for_codes,
    room_of,
    steps_of_codes,
    when_decoded,
    whole_columns,
    words_layout,
    words_of,
    words_of_steps,
)
from moe_ops.kernels.triton.plain_mm import (
    GROUPS,
    HALF,
    HEIGHT,
    ROWS,
    STEP,
    THREADS,
    columns_of,
    gather,
    multiply,
)
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that draws tiles, and has decoded weights of their steps brought, and rows unless another gathers them,
    as soon as there is room.
    """
    a_desc, memory_desc, rows_of, weights_of, tiles_of, full, empty, begun, told, extents, num_rows = given
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[9]
    STAGES: gl.constexpr = BLOCK[6]
    TOP_K: gl.constexpr = BLOCK[7]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    BYTES: gl.constexpr = ((GROUPS * ROWS if TOP_K == 0 else 0) + HEIGHT) * STEP * 2
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    room = room_of(at_once_of(panels_held(table, N_TILES), tiles, BLOCK), BLOCK)
    place, number = 0, 0
    tile = drawn(told)
    while tile < tiles:
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, whole_columns(N_TILES))
        panel = panel_of(table, expert, n_tile, N_TILES)
        of_steps = words_of_steps(told, E * N_TILES) + panel * STEPS
        words = gl.zeros([32], gl.int32, layout=WARP)
        for step in range(STEPS):
            stage = place % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            if step == 0:
                say_tile(tiles_of, stage, expert, first, past, panel)
                gl.thread_barrier()
                if TOP_K > 0:
                    mbarrier.arrive(begun.index(number % STAGES))
            words, _ = when_decoded(of_steps, words, step)
            mbarrier.expect(arrived, BYTES)
            if TOP_K == 0:
                for group in gl.static_range(GROUPS):
                    at = [first + group * ROWS, step * STEP]
                    tma.async_copy_global_to_shared(a_desc, at, arrived, rows_of.index(stage * GROUPS + group))
            for half in gl.static_range(2):
                at = [(panel % room * 2 + half) * HALF, step * STEP]
                tma.async_copy_global_to_shared(memory_desc, at, arrived, weights_of.index(stage * 2 + half))
            place += 1
        number += 1
        tile = drawn(told)
    no_more_tiles(tiles_of, place, full, empty, STAGES)
    if TOP_K > 0:
        mbarrier.arrive(begun.index(number % STAGES))


@gluon.jit
def _decode_step(codes_of, fours_of, slot, scale, memory, place, STEPS: gl.constexpr, SCHEME: gl.constexpr):
    """Decode a step of a panel, times its scales if these are the codes'."""
    ROWS_OF: gl.constexpr = codes_of.shape[1]
    CHUNKS: gl.constexpr = HEIGHT // ROWS_OF
    CODE: gl.constexpr = SCHEME[4][0]
    EXACT: gl.constexpr = SCHEME[4][2]
    PER_WORD: gl.constexpr = codes_of_word(CODE)
    OF_WORDS: gl.constexpr = words_layout(gl.num_warps(), words_of(SCHEME), 8 // PER_WORD)
    IN_LINES: gl.constexpr = words_layout(gl.num_warps(), words_of(SCHEME), 8 // PER_WORD, PER_WORD)
    for chunk in range(CHUNKS):
        at = slot * CHUNKS + chunk
        numbers = decode_words(codes_of.index(at).load(OF_WORDS), None, CODE, EXACT)
        if EXACT:
            numbers = numbers.reshape([ROWS_OF, 4, STEP // 4])
            bits = fours_of.index(at).load(gl.SliceLayout(2, numbers.type.layout)).to(gl.int32)
            numbers *= factor_of(bits, scale, True, shift_of(SCHEME[4]))[:, :, None]
        numbers = gl.convert_layout(numbers.reshape([ROWS_OF, STEP]), IN_LINES, assert_trivial=True)
        row = chunk * ROWS_OF + gl.arange(0, ROWS_OF, layout=gl.SliceLayout(1, IN_LINES))
        keep(numbers, row, memory, place, STEPS)


@gluon.jit
def _decode(given, STEPS: gl.constexpr, SCHEME: gl.constexpr):
    """The warps that decode what the one that draws has had brought, and tell all programs of it."""
    codes_of, fours_of, passed, coded, taken, memory, scale, of_steps = given
    tops_of, numbers_of, places_of = passed
    OF_CODES: gl.constexpr = steps_of_codes(SCHEME)
    step = 0
    mbarrier.wait(coded.index(0), 0)
    number = said(numbers_of, 0)
    while number >= 0:
        slot = step % OF_CODES
        word = said(tops_of, slot)
        _decode_step(codes_of, fours_of, slot, scale, memory, said(places_of, slot), STEPS, SCHEME)
        word = fenced(word)
        gl.thread_barrier()
        mbarrier.arrive(taken.index(slot))
        gl.atomic_xchg(of_steps + number, word, sem="release", scope="gpu")
        step += 1
        mbarrier.wait(coded.index(step % OF_CODES), (step // OF_CODES) & 1)
        number = said(numbers_of, step % OF_CODES)


@gluon.jit(do_not_specialize=["num_rows", "up_scale_offset", "up_outer_offset"])
def _decoded_plain_mm_kernel(
    a,
    a_desc,
    row_to_pair,
    extents,
    w_desc,
    w_scale,
    w_outer,
    up_scale_offset,
    up_outer_offset,
    memory,
    memory_desc,
    told,
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
    """One program for each multiprocessor; tiles of 128 rows of one expert times 256 rows of its weight.

    Args: see `expert_mm._expert_mm_kernel`; codes, decoded weights and output come and leave by descriptor. BLOCK[6] to
    BLOCK[9]: as of `plain_mm`; BLOCK[-1]: panels, in `memory`. told: see `decoded_once_mm`.
    """
    COLUMNS: gl.constexpr = columns_of(GLU)
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = BLOCK[6]
    TOP_K: gl.constexpr = BLOCK[7]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    DECODERS: gl.constexpr = 1 if TOP_K > 0 else 2  # warps that decode, so many as there is room for
    ARRIVALS: gl.constexpr = 1 if TOP_K == 0 else 1 + THREADS
    rows_of, weights_of, staged, full, empty = buffers(
        a_desc, memory_desc, out_desc, GROUPS, 2, GROUPS, STAGES, ARRIVALS=ARRIVALS
    )
    codes_of, chunks_of, bytes_of, passed, coded, taken = room_for_codes(w_desc, 32 * DECODERS, SCHEME)
    tiles_of = tiles_told(STAGES)
    begun = full
    if TOP_K > 0:
        begun, _ = ring(STAGES, 1)
    pdl_wait(PDL)
    pdl_release(PDL)
    done, of_steps = done_of(told), words_of_steps(told, E * N_TILES)
    # A partition takes no None.
    inner = w_scale if STRIDES[1] is not None else extents
    outer = w_outer if STRIDES[5] is not None else extents
    bias = bias if STRIDES[2] is not None else extents
    panels_of = weights_of._reinterpret(memory_desc.dtype, [STAGES, HEIGHT, STEP], memory_desc.layout)
    leaving = (staged, out_desc, out_desc, out_desc, bias, alpha, limit)
    multiplied = (rows_of, panels_of, tiles_of, full, empty, leaving, (done, outer, up_outer_offset))
    brought = (a_desc, memory_desc, rows_of, weights_of, tiles_of, full, empty, begun, told, extents, num_rows)
    decoded = (chunks_of, bytes_of, passed, coded, taken, memory, inner, of_steps)
    drawn_of = ((inner, up_scale_offset), w_desc, codes_of, passed, coded, taken, told, extents, num_rows)
    # A panel has the gate's rows first, wherever they are stored.
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, False, BATCHED, SCHEME)
    OF_CODES_SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, BATCHED, SCHEME)
    if TOP_K == 0:
        gl.warp_specialize(
            [
                (multiply, (multiplied, 0, SIZES)),
                (multiply, (multiplied, 1, SIZES)),
                (_decode, (decoded, STEPS, SCHEME)),
                (_bring, (brought, SIZES)),
                (draw, (drawn_of, OF_CODES_SIZES)),
            ],
            [4, 2, 1, 1],
            [208, 96, 96, 96],
        )
    else:
        tokens_of = rows_of._reinterpret(a_desc.dtype, [STAGES, GROUPS * ROWS, STEP], a_desc.layout)
        gl.warp_specialize(
            [
                (multiply, (multiplied, 0, SIZES)),
                (multiply, (multiplied, 1, SIZES)),
                (_decode, (decoded, STEPS, SCHEME)),
                (_bring, (brought, SIZES)),
                (draw, (drawn_of, OF_CODES_SIZES)),
                (gather, ((a, row_to_pair, tokens_of, tiles_of, full, empty, begun), 0, SIZES)),
            ],
            [4, 1, 1, 1, 1],
            [208, 96, 96, 96, 96],
        )
