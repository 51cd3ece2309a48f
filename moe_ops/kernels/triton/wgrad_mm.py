"""Weight gradients of a grouped GEMM in Gluon, for Hopper: what `wgrad` computes, with the loop written out.

One warp has descriptors bring steps of rows of both factors. Three groups of four warps have 64 weight rows each of a
tile of 192 x 256 (or x 192), which is more than Triton gives to one product. They do not wait for one another: while
one rounds and writes its sums, the others multiply. Of experts of few hundred rows that is much of a tile's time.

us of both products of a layer on an H200, by Triton's kernel and by this one: Qwen3-30B-A3B, T = 2048 532 and 453,
T = 4096 686 and 599; gpt-oss-120b's dimensions, T = 4096 2913 and 2192, T = 16384 6528 and 5793; Mixtral-8x7B,
T = 4096 4722 and 4511; OLMoE, T = 16384 2598 and 2582. The same roles for products of rows and weights (GEMM 2 and the
gradient of rows) took from 0.96 to 1.08 of the time of `mm_tile`, so there is no such kernel.

Written in Gluon, which has no interpreter: that runs `wgrad`'s kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that has both factors of every step of every tile brought, as soon as there is room."""
    grad_desc, left_desc, right_desc, grads_of, lefts_of, rights_of, full, empty, offsets = given
    E: gl.constexpr = SIZES[0]
    N_TILES: gl.constexpr = SIZES[1]
    K_TILES: gl.constexpr = SIZES[2]
    STAGES: gl.constexpr = SIZES[3]
    RIGHT: gl.constexpr = SIZES[4]
    place = 0
    for tile in range(gl.program_id(0), E * N_TILES * K_TILES, gl.num_programs(0)):
        expert, n, k = tile_at(tile, N_TILES, K_TILES)
        first, end = rows_of_expert(offsets, expert)
        for start in range(first, end, STEP):
            stage, turn = place % STAGES, place // STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
            mbarrier.expect(arrived, (GROUPS * HEIGHT + LEFT + RIGHT) * STEP * 2)
            for group in gl.static_range(GROUPS):
                where = [RAGGED, end, RAGGED - (end - start), (n * GROUPS + group) * HEIGHT]
                tma.async_copy_global_to_shared(grad_desc, where, arrived, grads_of.index(stage * GROUPS + group))
            where = [RAGGED, end, RAGGED - (end - start), k * (LEFT + RIGHT)]
            tma.async_copy_global_to_shared(left_desc, where, arrived, lefts_of.index(stage))
            where = [RAGGED, end, RAGGED - (end - start), k * (LEFT + RIGHT) + LEFT]
            tma.async_copy_global_to_shared(right_desc, where, arrived, rights_of.index(stage))
            place += 1


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


@gluon.jit
def _wgrad_mm_kernel(
    grad_desc,
    left_desc,
    right_desc,
    offsets,
    out_left,
    out_right,
    E: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One program for each multiprocessor, every num_programs-th tile of out[e] = sum over the expert's rows r of
    grad[r].T x[r], in row order; see `wgrad._wgrad_kernel`.

    STAGES: steps that there is room for. Descriptors of `x` and `out` are of the columns of a tile's two products.
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
    full, empty = ring(STAGES, GROUPS)
    given = (grads_of, lefts_of, rights_of, full, empty, turns, staged, out_left, out_right, offsets)
    brought = (grad_desc, left_desc, right_desc, grads_of, lefts_of, rights_of, full, empty, offsets)
    SIZES: gl.constexpr = (E, N_TILES, K_TILES, STAGES, RIGHT)
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
