"""Weight gradients of a grouped GEMM in Gluon, for Hopper: what `wgrad` computes, with the loop written out.

One warp has descriptors bring steps of rows of both factors. Three groups of four warps have 64 weight rows each of a
tile of 192 x 256 (or x 192), which is more than Triton gives to one product. They do not wait for one another: while
one rounds and writes its sums, the others multiply. Of experts of few hundred rows that is much of a tile's time.

A factor that stands in the order of tokens is gathered: three more warps copy its rows, 16 bytes a thread, into the
same memory, as a descriptor would lay them out there. Who multiplies puts a fence between the copies and the tensor
core, so that who copies need not wait: us of gpt-oss-120b's dimensions, T = 4096, where that warp waited and put it
2796, so 2572, DeepSeek-V3, T = 4096, 8905 and 8573 (`wgrad.gathers`).

us of both products of a layer on an H200, by Triton's kernel and by this one: Qwen3-30B-A3B, T = 2048 532 and 453,
T = 4096 686 and 599; gpt-oss-120b's dimensions, T = 4096 2913 and 2192, T = 16384 6528 and 5793; Mixtral-8x7B,
T = 4096 4722 and 4511; OLMoE, T = 16384 2598 and 2582.

Written in Gluon, which has no interpreter: that runs `wgrad`'s kernel.
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

from moe_ops.kernels.triton.hopper import boxes, in_turn, next_turn, ring, turns_of, write_at
from moe_ops.kernels.triton.tile_loads import RAGGED
from moe_ops.kernels.triton.util import round_to
from moe_ops.kernels.triton.wgrad import rows_of_expert, tile_at

HEIGHT = gl.constexpr(64)  # weight rows of a group of warps
LEFT = gl.constexpr(128)  # columns of a tile's first product
STEP = gl.constexpr(32)  # rows of a step
GROUPS = gl.constexpr(3)  # of warps
GATHERERS = gl.constexpr(3)  # warps that gather tokens, every third step each
THREADS = gl.constexpr(32)  # of one of them
ROWS, GRADS = gl.constexpr(1), gl.constexpr(2)  # which factor is gathered


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that has both factors of every step of every tile brought, as soon as there is room."""
    grad_desc, left_desc, right_desc, grads_of, lefts_of, rights_of, full, empty, offsets = given
    E: gl.constexpr = SIZES[0]
    N_TILES: gl.constexpr = SIZES[1]
    K_TILES: gl.constexpr = SIZES[2]
    STAGES: gl.constexpr = SIZES[3]
    RIGHT: gl.constexpr = SIZES[4]
    GATHERED: gl.constexpr = SIZES[5]
    COLUMNS: gl.constexpr = (GROUPS * HEIGHT if GATHERED != GRADS else 0) + (LEFT + RIGHT if GATHERED != ROWS else 0)
    place = 0
    for tile in range(gl.program_id(0), E * N_TILES * K_TILES, gl.num_programs(0)):
        expert, n, k = tile_at(tile, N_TILES, K_TILES)
        first, end = rows_of_expert(offsets, expert)
        for start in range(first, end, STEP):
            stage, turn = place % STAGES, place // STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
            mbarrier.expect(arrived, COLUMNS * STEP * 2)
            if GATHERED != GRADS:
                for group in gl.static_range(GROUPS):
                    where = [RAGGED, end, RAGGED - (end - start), (n * GROUPS + group) * HEIGHT]
                    tma.async_copy_global_to_shared(grad_desc, where, arrived, grads_of.index(stage * GROUPS + group))
            if GATHERED != ROWS:
                where = [RAGGED, end, RAGGED - (end - start), k * (LEFT + RIGHT)]
                tma.async_copy_global_to_shared(left_desc, where, arrived, lefts_of.index(stage))
                where = [RAGGED, end, RAGGED - (end - start), k * (LEFT + RIGHT) + LEFT]
                tma.async_copy_global_to_shared(right_desc, where, arrived, rights_of.index(stage))
            place += 1


@gluon.jit
def _tokens(row_to_pair, start, end, of_row, TOP_K: gl.constexpr):
    """(the tokens of rows start and on, whether there are these rows)"""
    exists = start + of_row < end
    return gl.load(row_to_pair + start + of_row, mask=exists, other=0) // TOP_K, exists


@gluon.jit
def _copy(tokens, half, HALF: gl.constexpr, column, OF_TOKENS: gl.constexpr, room):
    """HEIGHT columns, from number `column` on, of one half of a step's tokens; 0 where there are none."""
    token, exists = half
    at = column + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, _copied_by()))
    mask = exists[:, None] & (at < OF_TOKENS[2])[None, :]
    where = tokens + token.to(gl.int64)[:, None] * OF_TOKENS[1] + at[None, :]
    room = room.reshape([STEP, HEIGHT]).slice(HALF * (STEP // 2), STEP // 2, dim=0)
    async_copy.async_copy_global_to_shared(room, where, mask=mask)


@gluon.constexpr_function
def _copied_by():
    """The part of each thread of a warp that copies boxes of a step of rows."""
    return gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])


@gluon.jit
def _gather(given, WHO: gl.constexpr, SIZES: gl.constexpr, OF_TOKENS: gl.constexpr):
    """A warp that copies the tokens of every GATHERERS-th step's rows, as soon as there is room. It waits for none of
    them: the copies of each of its threads arrive at the step's barrier by themselves.
    """
    tokens, row_to_pair, grads_of, lefts_of, rights_of, full, empty, offsets = given
    E: gl.constexpr = SIZES[0]
    N_TILES: gl.constexpr = SIZES[1]
    K_TILES: gl.constexpr = SIZES[2]
    STAGES: gl.constexpr = SIZES[3]
    RIGHT: gl.constexpr = SIZES[4]
    GATHERED: gl.constexpr = SIZES[5]
    TOP_K: gl.constexpr = OF_TOKENS[0]
    DTYPE: gl.constexpr = grads_of.dtype
    BOX: gl.constexpr = [1, 1, STEP, HEIGHT]
    of_row = gl.arange(0, STEP // 2, layout=gl.SliceLayout(1, _copied_by()))
    steps = 0
    for tile in range(gl.program_id(0), E * N_TILES * K_TILES, gl.num_programs(0)):
        expert, n, k = tile_at(tile, N_TILES, K_TILES)
        first, end = rows_of_expert(offsets, expert)
        for step in range(
            (WHO + GATHERERS - steps % GATHERERS) % GATHERERS, (end - first + STEP - 1) // STEP, GATHERERS
        ):
            start, place = first + step * STEP, steps + step
            stage, turn = place % STAGES, place // STAGES
            # Half a step's at a time, for whose addresses the warp has registers.
            halves = (
                _tokens(row_to_pair, start, end, of_row, TOP_K),
                _tokens(row_to_pair, start + STEP // 2, end, of_row, TOP_K),
            )
            mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
            left = lefts_of.index(stage)._reinterpret(DTYPE, boxes(LEFT // HEIGHT, BOX), grads_of.layout)
            right = rights_of.index(stage)._reinterpret(DTYPE, boxes(RIGHT // HEIGHT, BOX), grads_of.layout)
            for half in gl.static_range(2):
                if GATHERED == GRADS:
                    for group in gl.static_range(GROUPS):
                        column, room = (n * GROUPS + group) * HEIGHT, grads_of.index(stage * GROUPS + group)
                        _copy(tokens, halves[half], half, column, OF_TOKENS, room)
                else:
                    column = k * (LEFT + RIGHT)
                    for box in gl.static_range(LEFT // HEIGHT):
                        _copy(tokens, halves[half], half, column + box * HEIGHT, OF_TOKENS, left.index(box))
                    for box in gl.static_range(RIGHT // HEIGHT):
                        _copy(tokens, halves[half], half, column + LEFT + box * HEIGHT, OF_TOKENS, right.index(box))
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        steps += (end - first + STEP - 1) // STEP


@gluon.jit
def _write(total, staged, out_desc, expert, n, k):
    """A group's sums of one product, rounded."""
    staged = staged._reinterpret(out_desc.dtype, out_desc.block_shape, out_desc.layout)
    write_at(round_to(total, staged.dtype), staged, out_desc, (expert, n, k))


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its 64 weight rows of every tile."""
    grads_of, lefts_of, rights_of, full, empty, turns, staged, out_left, out_right, offsets = given
    E: gl.constexpr = SIZES[0]
    N_TILES: gl.constexpr = SIZES[1]
    K_TILES: gl.constexpr = SIZES[2]
    STAGES: gl.constexpr = SIZES[3]
    RIGHT: gl.constexpr = SIZES[4]
    GATHERED: gl.constexpr = SIZES[5]
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, LEFT, 16])
    RIGHT_SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, RIGHT, 16])
    place = 0
    for tile in range(gl.program_id(0), E * N_TILES * K_TILES, gl.num_programs(0)):
        expert, n, k = tile_at(tile, N_TILES, K_TILES)
        first, end = rows_of_expert(offsets, expert)
        left = warpgroup_mma_init(gl.zeros([HEIGHT, LEFT], gl.float32, layout=SUM))
        right = warpgroup_mma_init(gl.zeros([HEIGHT, RIGHT], gl.float32, layout=RIGHT_SUM))
        for start in range(first, end, STEP):
            stage = place % STAGES
            in_turn(turns, GROUP)
            mbarrier.wait(full.index(stage), (place // STAGES) & 1)
            if GATHERED != 0:
                fence_async_shared()  # what threads copied is not the tensor core's to see before
            grad = grads_of.index(stage * GROUPS + GROUP).reshape([STEP, HEIGHT]).permute((1, 0))
            left = warpgroup_mma(grad, lefts_of.index(stage).reshape([STEP, LEFT]), left, is_async=True)
            right = warpgroup_mma(grad, rights_of.index(stage).reshape([STEP, RIGHT]), right, is_async=True)
            left, right = warpgroup_mma_wait(2, deps=[left, right])
            left, right = warpgroup_mma_init(left), warpgroup_mma_init(right)
            mbarrier.arrive(empty.index((place + STAGES - 1) % STAGES), pred=start > first)
            next_turn(turns, GROUP, GROUPS, place)
            place += 1
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        mbarrier.arrive(empty.index((place + STAGES - 1) % STAGES), pred=end > first)
        row, column = (n * GROUPS + GROUP) * HEIGHT, k * (LEFT + RIGHT)
        _write(left, staged.index(GROUP), out_left, expert, row, column)
        _write(right, staged.index(GROUP), out_right, expert, row, column + LEFT)
    tma.store_wait(0)


@gluon.constexpr_function
def _registers(right):
    """Of a thread of each group of warps but the first, which gets the rest: what sums leave goes to those who copy."""
    return [160, 160, *[32] * 4] if right == LEFT else [152, 152, *[56] * 4]


@gluon.jit
def _wgrad_mm_kernel(
    grad_desc,
    left_desc,
    right_desc,
    offsets,
    out_left,
    out_right,
    tokens,
    row_to_pair,
    E: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GATHERED: gl.constexpr,
    OF_TOKENS: gl.constexpr,
):
    """One program for each multiprocessor, every num_programs-th tile of out[e] = sum over the expert's rows r of
    grad[r].T x[r], in row order; see `wgrad._wgrad_kernel`.

    STAGES: steps that there is room for. Descriptors of `x` and `out` are of the columns of a tile's two products.
    GATHERED: which factor has the rows of `tokens` instead, ROWS or GRADS, or 0: row r that of pair row_to_pair[r];
    OF_TOKENS: pairs of a token, elements from one to the next, and its columns. Its descriptors say no more than the
    layout.
    """
    RIGHT: gl.constexpr = right_desc.block_shape[3]
    N_TILES: gl.constexpr = (N + GROUPS * HEIGHT - 1) // (GROUPS * HEIGHT)
    K_TILES: gl.constexpr = (K + LEFT + RIGHT - 1) // (LEFT + RIGHT)
    DTYPE: gl.constexpr = grad_desc.dtype
    grads_of = gl.allocate_shared_memory(DTYPE, boxes(STAGES * GROUPS, grad_desc.block_shape), grad_desc.layout)
    lefts_of = gl.allocate_shared_memory(DTYPE, boxes(STAGES, left_desc.block_shape), left_desc.layout)
    rights_of = gl.allocate_shared_memory(DTYPE, boxes(STAGES, right_desc.block_shape), right_desc.layout)
    staged = gl.allocate_shared_memory(DTYPE, boxes(GROUPS, out_left.block_shape), out_left.layout)
    turns = turns_of(GROUPS)
    full, empty = ring(STAGES, GROUPS, 1 if GATHERED == 0 else 1 + THREADS)
    given = (grads_of, lefts_of, rights_of, full, empty, turns, staged, out_left, out_right, offsets)
    brought = (grad_desc, left_desc, right_desc, grads_of, lefts_of, rights_of, full, empty, offsets)
    SIZES: gl.constexpr = (E, N_TILES, K_TILES, STAGES, RIGHT, GATHERED)
    if GATHERED == 0:
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SIZES)),
                (_multiply, (given, 1, SIZES)),
                (_multiply, (given, 2, SIZES)),
                (_bring, (brought, SIZES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gathered = (tokens, row_to_pair, grads_of, lefts_of, rights_of, full, empty, offsets)
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SIZES)),
                (_multiply, (given, 1, SIZES)),
                (_multiply, (given, 2, SIZES)),
                (_bring, (brought, SIZES)),
                (_gather, (gathered, 0, SIZES, OF_TOKENS)),
                (_gather, (gathered, 1, SIZES, OF_TOKENS)),
                (_gather, (gathered, 2, SIZES, OF_TOKENS)),
            ],
            [4, 4, 1, 1, 1, 1],
            _registers(RIGHT),
        )
