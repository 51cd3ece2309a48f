"""Expert GEMMs of many rows whose weights are bf16 or fp16 as they are stored, for Hopper.

What `mm_tile` computes, with the loop written out: one warp has descriptors bring weights, and rows where they are
sorted, and two groups of four warps have 64 rows of tokens each beside 256 weight rows. They do not wait for one
another: while one adds a bias, activates and writes, the other multiplies. A group without rows leaves the tensor cores
to the other, so that an expert's last 64 rows take about half of a tile's time. Programs draw tiles: as every
num_programs-th tile they would get ends alone, or none.

Rows that are gathered from tokens are copied by two more warps, 16 bytes a thread, into the same memory, as a
descriptor would lay them out there. Who multiplies puts a fence between the copies and the tensor cores, so that who
copies need not wait.

us of both products of a layer on an H200, each by the faster of two tiles of `mm_tile` (128 or 64 x 256, 128 x 128),
and by this kernel: Qwen3-30B-A3B, T = 4096 624 and 579, T = 16384 2165 and 1921; OLMoE, T = 16384 2774 and 2543;
gpt-oss-120b, T = 4096 2107 and 2076, T = 16384 6092 and 5718; Mixtral-8x7B, T = 4096 4680 and 4532, T = 16384 18376 and
17544; DeepSeek-V3, T = 4096 9249 and 8704, T = 16384 21035 and 19860. A third tile, of 128 x 256, is up to 1.5 % faster
than these two there. Tried, and no faster: groups of warps a step apart, steps of 32 columns
(benchmarks/comparisons/h200-plain-mm.json).

Written in Gluon, which has no interpreter: that runs `mm_tile` for the same products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.hopper import (
    begun_tile,
    buffers,
    count_by_warps,
    drawn,
    no_more_tiles,
    ring,
    said_tile,
    say_tile,
    table_of_tiles,
    tiles_told,
    with_bias,
    write,
)
from moe_ops.kernels.triton.order import in_order
from moe_ops.kernels.triton.packed_tile import of_rows, unit_of
from moe_ops.kernels.triton.scales import load_scale
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait, round_to

ROWS = gl.constexpr(64)  # of a group of warps
HEIGHT = gl.constexpr(256)  # weight rows of a tile
HALF = gl.constexpr(128)  # of them, which are written at once
STEP = gl.constexpr(64)  # columns of a step
GROUPS = gl.constexpr(2)  # of warps; and warps that gather the rows of one each
THREADS = gl.constexpr(32)  # of such a warp
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT.value, 16]))
OF_HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16]))


@gluon.constexpr_function
def columns_of(glu):
    """Output columns of a tile."""
    return HEIGHT.value // 2 if glu else HEIGHT.value


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that draws tiles, and has weights of their steps brought, and rows unless others gather them, as soon as
    there is room.
    """
    a_desc, w_desc, rows_of, weights_of, tiles_of, full, empty, begun, extents, num_rows, told = given
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    BATCHED: gl.constexpr = SIZES[9]
    STAGES: gl.constexpr = BLOCK[6]
    TOP_K: gl.constexpr = BLOCK[7]
    TURNED: gl.constexpr = BLOCK[8]
    BYTES: gl.constexpr = ((GROUPS * ROWS if TOP_K == 0 else 0) + HEIGHT) * STEP * 2
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place, number = 0, 0
    tile = drawn(told)
    while tile < tiles:
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
        for step in range((K + STEP - 1) // STEP):
            stage = place % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            if step == 0:
                say_tile(tiles_of, stage, expert, first, past, n_tile)
                gl.thread_barrier()
                if TOP_K > 0:
                    mbarrier.arrive(begun.index(number % STAGES))
            mbarrier.expect(arrived, BYTES)
            if TOP_K == 0:
                for group in gl.static_range(GROUPS):
                    at = [first + group * ROWS, step * STEP]
                    tma.async_copy_global_to_shared(a_desc, at, arrived, rows_of.index(stage * GROUPS + group))
            weights = weights_of.index(stage)
            if TURNED:
                where = [expert, step * STEP, n_tile * HEIGHT]
            elif GLU == CONCAT:
                where = [expert, 0, n_tile * HALF, step * STEP]
            else:
                where = [expert, n_tile * HEIGHT, step * STEP]
            tma.async_copy_global_to_shared(w_desc, where, arrived, weights)
            place += 1
        number += 1
        tile = drawn(told)
    no_more_tiles(tiles_of, place, full, empty, STAGES)
    if TOP_K > 0:
        mbarrier.arrive(begun.index(number % STAGES))


@gluon.jit
def gather(given, PART: gl.constexpr, SIZES: gl.constexpr):
    """A warp that copies rows of every step from tokens, as soon as there is room: those of a group, or all of a
    tile's, as `rows_of` has them together. It waits for none of them: the copies of each of its threads arrive at the
    step's barrier by themselves.
    """
    a, row_to_pair, rows_of, tiles_of, full, empty, begun = given
    K: gl.constexpr = SIZES[2]
    A_STRIDE: gl.constexpr = SIZES[3][3]
    BLOCK: gl.constexpr = SIZES[4]
    STAGES: gl.constexpr = BLOCK[6]
    TOP_K: gl.constexpr = BLOCK[7]
    TOGETHER: gl.constexpr = rows_of.shape[1]
    PARTS: gl.constexpr = GROUPS * ROWS // TOGETHER
    COPIED_BY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    of_row = PART * TOGETHER + gl.arange(0, TOGETHER, layout=gl.SliceLayout(1, COPIED_BY))
    of_column = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPIED_BY))
    place, number = 0, 0
    _, first, past, _ = begun_tile(tiles_of, place, begun, number, STAGES)
    while past > 0:
        exist = first + PART * TOGETHER < past
        # The last row stands in for those behind it, whose products nobody reads.
        token = gl.load(row_to_pair + gl.minimum(first + of_row, past - 1)) // TOP_K
        tokens = a + token.to(gl.int64) * A_STRIDE
        for step in range((K + STEP - 1) // STEP):
            stage = place % STAGES
            mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
            if exist:
                column = step * STEP + of_column
                where = tokens[:, None] + column[None, :]
                room = rows_of.index(stage * PARTS + PART)
                if K % STEP == 0:
                    async_copy.async_copy_global_to_shared(room, where)
                else:
                    async_copy.async_copy_global_to_shared(room, where, mask=(column < K)[None, :])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            place += 1
        number += 1
        _, first, past, _ = begun_tile(tiles_of, place, begun, number, STAGES)
    async_copy.mbarrier_arrive(full.index(place % STAGES), increment_count=False)  # that there are no more tiles


@gluon.jit
def _halves(tile):
    """The left and the right half of a tile's columns, which a thread has of both alike."""
    ROWS_OF: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left, right = gl.split(tile.reshape([ROWS_OF, 2, COLUMNS]).permute([0, 2, 1]))
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _leave(value, room, desc, where, column, ORDER: gl.constexpr):
    """A group's rows of columns `column` and on, rounded, as many of them at once as a box of the descriptor has, in an
    order of columns if there is one.
    """
    _, first, past, _ = where
    if value.shape[1] > desc.block_shape[3]:
        left, right = _halves(value)
        _leave(left, room, desc, where, column, ORDER)
        _leave(right, room, desc, where, column + value.shape[1] // 2, ORDER)
    else:
        rounded = round_to(value, room.dtype)
        if ORDER is not None:
            rounded = in_order(rounded, ORDER[0], ORDER[1])
        write(rounded, room, desc, first, past, column)


@gluon.jit
def _decoded(total, expert, row, half, decoding, SIZES: gl.constexpr):
    """Sums of weight rows `row` of `half`: of decoded ones times the unit of what they became and their scales."""
    OUTER_STRIDES: gl.constexpr = SIZES[3][5]
    SCHEME: gl.constexpr = SIZES[10]
    if SCHEME is not None:
        PACKED: gl.constexpr = SCHEME[4]
        if unit_of(PACKED) != 1.0:
            total *= unit_of(PACKED)
        if OUTER_STRIDES is not None:
            _, outer, apart = decoding
            scale = of_rows(outer, apart, expert, row, row * 0 + half, SIZES[1], PACKED[6], PACKED[7], OUTER_STRIDES)
            total *= load_scale(scale)[None, :]
    return total


@gluon.jit
def _finish(total, where, leaving, decoding, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """Write a tile of a group of warps, of its sums [rows, weight rows]: scales, bias, what is kept, activation."""
    staged, out_desc, kept_desc, kept_up_desc, bias, alpha, limit = leaving
    expert, _, _, n_tile = where
    N: gl.constexpr = SIZES[1]
    BIASES: gl.constexpr = SIZES[3][2]
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    SWAPPED: gl.constexpr = SIZES[8]
    KEEPS: gl.constexpr = SIZES[4][9]
    ORDER: gl.constexpr = SIZES[10][6] if SIZES[10] is not None else None
    room = staged.index(GROUP)
    place = gl.arange(0, HALF, layout=gl.SliceLayout(0, OF_HALF))
    left, right = _halves(total)
    if GLU == CONCAT:
        n_start = n_tile * HALF
        row, exists = n_start + place, n_start + place < N
        gate, up = left, right
        if SWAPPED:
            gate, up = right, left
        held = gl.minimum(row, N - 1)
        gate, up = _decoded(gate, expert, held, 0, decoding, SIZES), _decoded(up, expert, held, 1, decoding, SIZES)
        gate = with_bias(gate, bias, expert, row, exists, BIASES)
        up = with_bias(up, bias, expert, row + N, exists, BIASES)
        if KEEPS:
            _leave(gate, room, kept_desc, where, n_start, None)
            _leave(up, room, kept_up_desc, where, n_start, None)
        _leave(apply_activation(gate, up, alpha, limit, ACTIVATION, True), room, out_desc, where, n_start, ORDER)
    else:
        WIDTH: gl.constexpr = 2 * N if GLU == INTERLEAVED else N
        for half in gl.static_range(2):
            n_start = n_tile * HEIGHT + half * HALF
            row = n_start + place
            value = left if half == 0 else right
            value = _decoded(value, expert, gl.minimum(row, WIDTH - 1), 0, decoding, SIZES)
            value = with_bias(value, bias, expert, row, row < WIDTH, BIASES)
            if KEEPS:
                _leave(value, room, kept_desc, where, n_start, None)
            if GLU == INTERLEAVED:
                gate, up = gl.split(value.reshape([ROWS, HALF // 2, 2]))
                value = apply_activation(gate, up, alpha, limit, ACTIVATION, True)
            elif ACTIVATION is not None:
                value = apply_activation(value, value, alpha, limit, ACTIVATION, False)
            _leave(value, room, out_desc, where, n_start // 2 if GLU == INTERLEAVED else n_start, ORDER)


@gluon.jit
def multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its 64 rows of every tile times the tile's weight rows. Of decoded ones the tiles that are told
    name a panel, of which the first group counts the tiles that are done.
    """
    rows_of, weights_of, tiles_of, full, empty, leaving, decoding = given
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    STAGES: gl.constexpr = BLOCK[6]
    TOP_K: gl.constexpr = BLOCK[7]
    TURNED: gl.constexpr = BLOCK[8]
    DECODED: gl.constexpr = SIZES[10] is not None
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    place = 0
    expert, first, past, column = said_tile(tiles_of, place, full, STAGES)
    while past > 0:
        n_tile = column % SIZES[5] if DECODED else column
        first += GROUP * ROWS
        if first >= past:
            for _ in range(STEPS):
                mbarrier.wait(full.index(place % STAGES), (place // STAGES) & 1)
                mbarrier.arrive(empty.index(place % STAGES))
                place += 1
        else:
            total = warpgroup_mma_init(gl.zeros([ROWS, HEIGHT], gl.float32, layout=SUM))
            for step in range(STEPS):
                stage = place % STAGES
                mbarrier.wait(full.index(stage), (place // STAGES) & 1)
                if TOP_K > 0:
                    fence_async_shared()  # what threads copied is not the tensor core's to see before
                rows = rows_of.index(stage * GROUPS + GROUP)
                if TURNED:
                    weights = weights_of.index(stage).reshape([STEP, HEIGHT])
                else:
                    weights = weights_of.index(stage).reshape([HEIGHT, STEP]).permute((1, 0))
                total = warpgroup_mma(rows, weights, total, is_async=True)
                total = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[total]))
                mbarrier.arrive(empty.index((place + STAGES - 1) % STAGES), pred=step > 0)
                place += 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index((place + STAGES - 1) % STAGES))
            if DECODED and GROUP == 0:  # whose rows there always are: the panel has been read
                count_by_warps(decoding[0] + column)
            _finish(total, (expert, first, past, n_tile), leaving, decoding, GROUP, SIZES)
        expert, first, past, column = said_tile(tiles_of, place, full, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def _plain_mm_kernel(
    a,
    a_desc,
    row_to_pair,
    extents,
    w_desc,
    bias,
    out_desc,
    kept_desc,
    kept_up_desc,
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
    """One program for each multiprocessor; tiles of 128 rows of one expert times 256 rows of its weight, which programs
    draw one by one.

    Args: see `expert_mm._expert_mm_kernel`; SCHEME is None. BLOCK[6]: steps that there is room for; BLOCK[7]: pairs of
    a token where rows are gathered, or 0; BLOCK[8]: whether it is a weight's rows that are side by side in memory;
    BLOCK[9]: whether what stands before the activation is kept. told: a word that is 0. Where nothing is kept, or no
    up half is apart, the output's descriptor stands in, as no partition takes None.
    """
    COLUMNS: gl.constexpr = columns_of(GLU)
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = BLOCK[6]
    TOP_K: gl.constexpr = BLOCK[7]
    gl.static_assert(SCHEME is None, "scales are not applied here")
    ARRIVALS: gl.constexpr = 1 if TOP_K == 0 else 1 + GROUPS * THREADS
    rows_of, weights_of, staged, full, empty = buffers(
        a_desc, w_desc, out_desc, GROUPS, 1, GROUPS, STAGES, ARRIVALS=ARRIVALS
    )
    begun = full
    if TOP_K > 0:
        begun, _ = ring(STAGES, 1)
    tiles_of = tiles_told(STAGES)
    pdl_wait(PDL)
    pdl_release(PDL)
    bias = bias if STRIDES[2] is not None else extents
    leaving = (staged, out_desc, kept_desc, kept_up_desc, bias, alpha, limit)
    # A partition takes no None: nothing is decoded.
    given = (rows_of, weights_of, tiles_of, full, empty, leaving, (extents, extents, num_rows))
    brought = (a_desc, w_desc, rows_of, weights_of, tiles_of, full, empty, begun, extents, num_rows, told)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, BATCHED, SCHEME)
    if TOP_K == 0:
        gl.warp_specialize(
            [(multiply, (given, 0, SIZES)), (multiply, (given, 1, SIZES)), (_bring, (brought, SIZES))],
            [4, 1],
            [232, 40],
        )
    else:
        gathered = (a, row_to_pair, rows_of, tiles_of, full, empty, begun)
        gl.warp_specialize(
            [
                (multiply, (given, 0, SIZES)),
                (multiply, (given, 1, SIZES)),
                (_bring, (brought, SIZES)),
                (gather, (gathered, 0, SIZES)),
                (gather, (gathered, 1, SIZES)),
            ],
            [4, 1, 1, 1],
            [208, 96, 96, 96],
        )
