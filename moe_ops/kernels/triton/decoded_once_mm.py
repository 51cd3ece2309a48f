"""Expert GEMMs of very many rows of e4m3 and weights of codes of four bits, for Hopper.

What `folded_mm` and `decoded_fp8_mm` compute, to the bit but for the order in which tensor cores add, for experts that
have several tiles of rows. There every tile decodes its weight rows. Here a panel of 256 weight rows is decoded once,
to memory that stays in L2 (`panels`), and all tiles of its expert have descriptors bring it from there, as those of
`promoted_mm` bring stored weights: in every program one warp has rows and decoded weights brought for two groups of
four that multiply, beside four that decode and two for what belongs to that. `decoded_plain_mm` does so beside rows of
16 bits.

Programs draw tiles and what they decode in order, from two counters: what a program waits for was drawn before, by one
that runs. However few programs run at once, all get done.

Times as fast as fp8_block128 on an H200, the other kernel and this one, T = 4096, 16384: mxfp4_a8, Qwen3-30B-A3B (256
rows an expert, 1024) 0.72, 0.80 and 0.70, 0.95, Mixtral-8x7B (1024, 4096) 0.59, 0.90 and 0.75, 0.99; w4a8_fp8,
Qwen3-30B-A3B, 16384 tokens, 0.70, 0.82, Mixtral-8x7B, 4096, 0.87, 0.92. Of few tiles an expert, L2 is the limit,
through which decoded weights go once more. Counters, and what was tried: benchmarks/comparisons/h200-decoded-once.json.

Of e2m1 codes, a step's columns are multiplied in turns where scales are too far apart for one unit; codes of turns
after the first are decoded by the warp that has the others brought, for every tile. Of int4 codes weight rows are the
first operand: `weight_rows`.

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

from moe_ops.kernels.triton.folded_mm import WORDS
from moe_ops.kernels.triton.hopper import (
    IN_LINE,
    buffers,
    count_by_warps,
    done_with,
    drawn,
    no_more_tiles,
    ring,
    said,
    said_tile,
    say,
    say_tile,
    table_of_tiles,
    tiles_told,
)
from moe_ops.kernels.triton.packed_fp8_tile import FOLDED_UNIT, WINDOW
from moe_ops.kernels.triton.panels import (
    CHUNK,
    FEW,
    TURNS_AT,
    WARP,
    added,
    at_once_of,
    decode,
    done_of,
    draw,
    folded_codes,
    is_folded,
    panel_of,
    panels_held,
    publish,
    room_for_codes,
    room_of,
    steps_of_codes,
    stored_codes,
    when_decoded,
    whole_columns,
    words_of_steps,
)
from moe_ops.kernels.triton.promoted_mm import GROUPS, HALF, ROWS, STEP, SUM, columns_of, finish
from moe_ops.kernels.triton.scales import decode_scale
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait
from moe_ops.kernels.triton.weight_rows import multiply_weight_rows


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that draws tiles, and has rows and decoded weights of their steps brought, as soon as there is room."""
    a_desc, memory_desc, rows_of, weights_of, few_of, left, full, empty, stored, scales, told, extents, num_rows = given
    steps_of, tile_of = left
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    BATCHED: gl.constexpr = SIZES[9]
    STAGES: gl.constexpr = BLOCK[6]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    FOLDED: gl.constexpr = is_folded(SIZES[10])
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    room = room_of(at_once_of(panels_held(table, N_TILES), tiles, BLOCK), BLOCK)
    place = 0
    tile = drawn(told)
    while tile < tiles:
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, whole_columns(N_TILES))
        panel = panel_of(table, expert, n_tile, N_TILES)
        of_steps = words_of_steps(told, E * N_TILES) + panel * STEPS
        words = gl.zeros([32], gl.int32, layout=WARP)
        for step in range(STEPS):
            words, word = when_decoded(of_steps, words, step)
            turns, lower, upper = word >> TURNS_AT, word & 0xFF, (word >> 8) & 0xFF
            stage = place % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            if FOLDED:
                say(steps_of, stage, lower | (upper << 8) | ((turns == 1).to(gl.int32) << TURNS_AT))
            if step == 0:
                say_tile(tile_of, stage, expert, first, past, panel)
            gl.thread_barrier()
            mbarrier.expect(arrived, (GROUPS * ROWS + 2 * HALF) * STEP)
            for box in gl.static_range(2):
                at = [first + box * ROWS, step * STEP]
                tma.async_copy_global_to_shared(a_desc, at, arrived, rows_of.index(stage * 2 + box))
                at = [(panel % room * 2 + box) * HALF, step * STEP]
                tma.async_copy_global_to_shared(memory_desc, at, arrived, weights_of.index(stage * 2 + box))
            place += 1
            if FOLDED:
                for turn in range(1, turns):
                    stage = place % STAGES
                    arrived = full.index(stage)
                    mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
                    lower -= WINDOW + 1
                    upper -= WINDOW + 1
                    in_panel = (expert, n_tile, step)
                    few = stage * (2 * HALF // FEW)
                    for chunk in range(HALF // FEW):
                        codes, exponent = stored_codes(stored, scales, in_panel, chunk * FEW, 0, SIZES)
                        few_of.index(few + chunk).store(folded_codes(codes, exponent, lower, False))
                        codes, exponent = stored_codes(stored, scales, in_panel, chunk * FEW, 1, SIZES)
                        few_of.index(few + HALF // FEW + chunk).store(folded_codes(codes, exponent, upper, False))
                    tops = gl.maximum(lower, 0) | (gl.maximum(upper, 0) << 8)
                    say(steps_of, stage, tops | ((turn == turns - 1).to(gl.int32) << TURNS_AT))
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.expect(arrived, GROUPS * ROWS * STEP)
                    for box in gl.static_range(2):
                        at = [first + box * ROWS, step * STEP]
                        tma.async_copy_global_to_shared(a_desc, at, arrived, rows_of.index(stage * 2 + box))
                    place += 1
        tile = drawn(told)
    no_more_tiles(tile_of, place, full, empty, STAGES)


@gluon.jit
def _unit(tops, HALF_OF: gl.constexpr):
    return decode_scale(((tops >> (8 * HALF_OF)) & 0xFF).to(gl.uint8)) * FOLDED_UNIT


@gluon.jit
def _multiply_rows(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its 64 rows of every tile times the tile's weight rows, whose scales are folded in."""
    rows_of, weights_of, left, full, empty, leaving, a_scale, done, bias, _ = given
    steps_of, tile_of = left
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    STAGES: gl.constexpr = BLOCK[6]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    place = 0
    expert, first, past, panel = said_tile(tile_of, place, full, STAGES)
    while past > 0:
        n_tile = panel % N_TILES
        first += GROUP * ROWS
        step = first * 0
        if first >= past:
            while step < STEPS:
                stage = place % STAGES
                mbarrier.wait(full.index(stage), (place // STAGES) & 1)
                step += said(steps_of, stage) >> TURNS_AT
                done_with(empty, stage)
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
                lower = added(lower, summed, of_tokens * _unit(tops, 0))
                numbers = weights_of.index(stage * 2 + 1).permute((1, 0))
                product = warpgroup_mma(rows, numbers, warpgroup_mma_init(summed), use_acc=False, is_async=True)
                summed = warpgroup_mma_wait(0, deps=[product])
                done_with(empty, stage)
                upper = added(upper, summed, of_tokens * _unit(tops, 1))
                product = warpgroup_mma_init(summed)
                of_tokens = ahead
                place += 1
            if GROUP == 0:  # whose rows there always are: the panel has been read
                count_by_warps(done + panel)
            of_weights = (bias, 0, bias)  # no scales are left
            finish(lower, upper, None, of_weights, (expert, first, past, n_tile), leaving, GROUP, SIZES)
        expert, first, past, panel = said_tile(tile_of, place, full, STAGES)
    tma.store_wait(0)


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    if is_folded(SIZES[10]):
        _multiply_rows(given, GROUP, SIZES)
    else:
        multiply_weight_rows(given, GROUP, SIZES)


@gluon.jit(do_not_specialize=["num_rows", "up_offset", "up_scale_offset", "up_outer_offset"])
def _decoded_once_mm_kernel(
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
    bytes at a time. BLOCK[6]: steps that there is room for in shared memory; BLOCK[-1]: panels, in `memory`. told: i32
    [COUNTERS + panels * (1 + steps) + 32], all 0: see `panels.drawn`, `done_of`, `words_of_steps`.
    """
    N_TILES: gl.constexpr = (N + columns_of(GLU)[0] - 1) // columns_of(GLU)[0]
    STAGES: gl.constexpr = BLOCK[6]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    OF_CODES: gl.constexpr = steps_of_codes(SCHEME)
    THREADS: gl.constexpr = 32 * gl.num_warps()  # of a group
    rows_of, weights_of, staged, full, empty = buffers(a_desc, memory_desc, out_desc, 2, 2, GROUPS, STAGES, THREADS)
    codes_of, chunks_of, bytes_of, passed, coded, taken = room_for_codes(w_desc, CHUNK, SCHEME)
    steps_of = gl.allocate_shared_memory(gl.int32, [STAGES, 1], IN_LINE)
    tile_of = tiles_told(STAGES)
    kept, _ = ring(OF_CODES, 1)
    pdl_wait(PDL)
    pdl_release(PDL)
    done, of_steps = done_of(told), words_of_steps(told, E * N_TILES)
    # A partition takes no None.
    inner = w_scale if STRIDES[1] is not None else extents
    outer = w_outer if STRIDES[5] is not None else extents
    bias = bias if STRIDES[2] is not None else extents
    leaving = (staged, out_desc, out_scale, alpha, limit)
    stored, scales = (w, gl.multiple_of(up_offset, 16)), (inner, up_scale_offset)
    few_of = weights_of._reinterpret(
        gl.int32, [STAGES * 2 * HALF // FEW, FEW, 2 * WORDS], gl.NVMMASharedLayout(128, 32, 2)
    )
    left = (steps_of, tile_of)
    decoding = (inner, outer, up_scale_offset, up_outer_offset)
    multiplied = (rows_of, weights_of, left, full, empty, leaving, a_scale, done, bias, decoding)
    brought = (
        a_desc, memory_desc, rows_of, weights_of, few_of, left, full, empty, stored, scales, told, extents, num_rows,
    )  # fmt: skip
    decoded = (chunks_of, bytes_of, passed, coded, kept, memory)
    drawn_of = (scales, w_desc, codes_of, passed, coded, taken, told, extents, num_rows)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, BATCHED, SCHEME)
    gl.warp_specialize(
        [
            (_multiply, (multiplied, 0, SIZES)),
            (_multiply, (multiplied, 1, SIZES)),
            (decode, (decoded, STEPS, GLU, SCHEME)),
            (_bring, (brought, SIZES)),
            (draw, (drawn_of, SIZES)),
            (publish, (passed[0], passed[1], kept, taken, of_steps, OF_CODES)),
        ],
        [4, 4, 1, 1, 1],
        [216, 48, 32, 32, 32],
    )
