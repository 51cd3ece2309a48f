"""What kernels in Gluon for Hopper share: `decoded_mm` and the like, `promoted_mm`, `plain_mm` and `wgrad_mm`,
one of whose warps brings what others take.

Gluon is Triton's language of layouts. It is experimental, and may be another in another Triton: `CALLED`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moe_ops.kernels.triton.tile_loads import RAGGED
from moe_ops.kernels.triton.util import cut_into_tiles, uniform

#: What is called of it, and with which parameters.
CALLED = {
    gl.warp_specialize: ("functions_and_args", "worker_num_warps", "worker_num_regs"),
    gl.inline_asm_elementwise: ("asm", "constraints", "args", "dtype", "is_pure", "pack"),
    gl.convert_layout: ("value", "layout", "assert_trivial"),
    gl.allocate_shared_memory: ("element_ty", "shape", "layout"),
    gl.thread_barrier: (),
    gl.shared_memory_descriptor._reinterpret: ("dtype", "shape", "layout"),
    gl.shared_memory_descriptor.slice: ("start", "length", "dim"),
    mma_v2: ("a", "b", "acc"),
    async_copy.async_copy_global_to_shared: ("smem", "pointer", "mask"),
    async_copy.mbarrier_arrive: ("mbarrier", "increment_count"),
    fence_async_shared: (),
    mbarrier.init: ("mbarrier", "count"),
    mbarrier.expect: ("mbarrier", "bytes"),
    mbarrier.wait: ("mbarrier", "phase"),
    mbarrier.arrive: ("mbarrier", "pred"),
    tma.async_copy_global_to_shared: ("tensor_desc", "coord", "barrier", "result"),
    tma.async_copy_shared_to_global: ("tensor_desc", "coord", "src"),
    tma.store_wait: ("pendings",),
    warpgroup_mma_init: ("value",),
    warpgroup_mma: ("a", "b", "acc", "use_acc", "is_async"),
    warpgroup_mma_wait: ("num_outstanding", "deps"),
}


WARPS = gl.constexpr(4)  # of a group
IN_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def boxes(count, shape):
    """Shape of so many boxes of a descriptor."""
    return [count, *shape]


@gluon.jit
def table_of_tiles(
    extents, num_rows, E: gl.constexpr, BLOCK: gl.constexpr, N_TILES: gl.constexpr, BATCHED: gl.constexpr
):
    """`util.cut_into_tiles` in every warp, and how many tiles there are."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([max(BLOCK[4] // 32, 1)], [32], [gl.num_warps()], [0])
    e = gl.arange(0, BLOCK[4], layout=LAYOUT)
    table = cut_into_tiles(e, extents, num_rows, E, BLOCK[0], 0, N_TILES, BATCHED)
    return table, uniform(gl.max(table[3], axis=0))


@gluon.jit
def drawn(counter):
    """The next number of a counter, to a warp, which draws no sooner than it can begin: tiles of the same weight rows,
    drawn together, then begin together, and all but one find these in L2. Steps that are on their way hide the wait.

    us of GEMM 1 with 128 rows an expert on an H200, two tiles' rows of half of them, drawn when the tile before begins
    and so, beside two heights of `mm_tile` in the same process: DeepSeek-V3 5086 beside 4658, 6288 beside 6532, Phi
    562 beside 536, 541 beside 520 (benchmarks/comparisons/h200-plain-mm.json).
    """
    gl.static_assert(gl.num_warps() == 1, "a warp draws by itself")
    return uniform(_by_one_lane("atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", counter))


@gluon.jit
def count_by_warps(counter):
    """Each warp adds 1: a group of warps that is done with something adds WARPS."""
    _by_one_lane("red.relaxed.gpu.global.add.u32 [$1], 1;", counter)


@gluon.jit
def _by_one_lane(DO: gl.constexpr, pointer):
    """What lane 0 of every warp gets that does this, the others 0.

    Of `gl.atomic_add` ptxas has lanes vote which of them add, though there is one, and keeps the vote in a register of
    the whole warp, where it can be lost when a GPU that processes share goes from one to the next. Of 3600 products in
    four processes, 238 then lost programs before the last tile, and 4 of them a tile that had been drawn
    (benchmarks/comparisons/h200-in-company.json).
    """
    DOES: gl.constexpr = (
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0; "
        "@first " + DO + " }"
    )
    return gl.inline_asm_elementwise(DOES, "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ring(STAGES: gl.constexpr, READERS: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Barriers of steps in shared memory: (that one has arrived, which so many warps or threads say, that all its
    readers are done with it, groups of warps or threads).
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def done_with(empty, stage):
    """Each thread says for itself that it is done with a step, before which a group of warps need not wait for one
    another. Where they do, each arrival costs more than that: us of a layer on an H200, Mixtral-8x7B, T = 4096, by
    groups and by threads, `decoded_once_mm` 3335 and 3226 (mxfp4_a8), 3294 and 3184 (w4a8_fp8), `promoted_mm` 2789 and
    2841 (fp8_channel), `decoded_mm` 5458 and 5545 (mxfp4), 5264 and 5298 (int8_w8a16).
    """
    async_copy.mbarrier_arrive(empty.index(stage), increment_count=False)


@gluon.jit
def said(of, at):
    """A number that another warp has left in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(of.index(at).load(LAYOUT), axis=0)


@gluon.jit
def say(of, at, number):
    """Leave a number there, which all threads have."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    of.index(at).store(gl.full([1], 0, gl.int32, layout=LAYOUT) + number)


@gluon.jit
def tiles_told(STAGES: gl.constexpr):
    """Shared memory for what `say_tile` says."""
    return gl.allocate_shared_memory(gl.int32, [STAGES * 4, 1], IN_LINE)


@gluon.jit
def say_tile(of, stage, expert, first, past, column):
    """What tile begins with a step: its expert, first row, row behind the last of the expert's, and which columns; none
    if that is row 0.
    """
    say(of, stage * 4, expert)
    say(of, stage * 4 + 1, first)
    say(of, stage * 4 + 2, past)
    say(of, stage * 4 + 3, column)


@gluon.jit
def no_more_tiles(of, place, full, empty, STAGES: gl.constexpr):
    """Say so in the place of step number `place`, once there is room."""
    stage = place % STAGES
    mbarrier.wait(empty.index(stage), ((place // STAGES) & 1) ^ 1)
    say_tile(of, stage, 0, 0, 0, 0)
    gl.thread_barrier()
    mbarrier.arrive(full.index(stage))


@gluon.jit
def said_tile(of, place, full, STAGES: gl.constexpr):
    """(expert, first, past, column) of `say_tile`, once step number `place` has arrived, to warps that need no table
    then: of 128 experts it is 16 registers of each thread, and some hundred instructions a tile.
    """
    return begun_tile(of, place, full, place, STAGES)


@gluon.jit
def begun_tile(of, place, begun, number, STAGES: gl.constexpr):
    """The same of step number `place`, with which tile `number` begins, once that is said. Of every tile `begun` is
    told, once, and asked, once: of steps, who asks only where tiles begin could be told of one that was there before.
    """
    mbarrier.wait(begun.index(number % STAGES), (number // STAGES) & 1)
    stage = place % STAGES
    expert, first = uniform(said(of, stage * 4)), uniform(said(of, stage * 4 + 1))
    return expert, first, uniform(said(of, stage * 4 + 2)), uniform(said(of, stage * 4 + 3))


@gluon.jit
def computed_here(total):
    """A sum that the compiler would compute where it is used next, and hold what it is of until then."""
    return gl.inline_asm_elementwise("", "=f,0", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def turns_of(GROUPS: gl.constexpr):
    """Barriers by which groups of warps begin one after the other: `in_turn`, `next_turn`."""
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    return turns


@gluon.jit
def in_turn(turns, GROUP: gl.constexpr):
    """Wait until the group of warps before has begun, once: groups that are a part of a step apart write one after the
    other, while the others multiply.
    """
    if GROUP > 0:
        mbarrier.wait(turns.index(GROUP), 0)  # over for good after the first step


@gluon.jit
def next_turn(turns, GROUP: gl.constexpr, GROUPS: gl.constexpr, place):
    """After a group's step number `place`: with its first, the next group may begin."""
    if GROUP + 1 < GROUPS:
        mbarrier.arrive(turns.index(GROUP + 1), pred=place == 0)


@gluon.jit
def buffers(
    a_desc, w_desc, out_desc, ROWS: gl.constexpr, WEIGHTS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    DONE: gl.constexpr = 1, ARRIVALS: gl.constexpr = 1,
):  # fmt: skip
    """Shared memory for so many boxes of rows and of weights in each of STAGES steps, for what every group of warps
    writes, and the `ring` of the steps, of each of which a group says DONE times that it is done, and who brings it
    ARRIVALS times that it has arrived. Where no rows come, that of weights stands in for theirs, as no partition takes
    None.
    """
    if ROWS > 0:
        rows_of = gl.allocate_shared_memory(a_desc.dtype, boxes(STAGES * ROWS, a_desc.block_shape), a_desc.layout)
    weights_of = gl.allocate_shared_memory(w_desc.dtype, boxes(STAGES * WEIGHTS, w_desc.block_shape), w_desc.layout)
    if ROWS == 0:
        rows_of = weights_of
    staged = gl.allocate_shared_memory(out_desc.dtype, boxes(GROUPS, out_desc.block_shape), out_desc.layout)
    full, empty = ring(STAGES, GROUPS * DONE, ARRIVALS)
    return rows_of, weights_of, staged, full, empty


@gluon.jit
def with_bias(value, bias, expert, row, exists, STRIDES: gl.constexpr):
    """Sums [rows, weight rows] and what an expert's bias has for weight rows `row` that exist, if there is one."""
    if STRIDES is not None:
        where = bias + expert.to(gl.int64) * STRIDES[0] + row * STRIDES[1]
        value += gl.load(where, mask=exists, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def write(tile, staged, out_desc, first, past, n_start):
    """A group's rows first .. past - 1 of columns n_start and on, see `write_at`."""
    write_at(tile, staged, out_desc, (RAGGED, past, RAGGED - (past - first), n_start))


@gluon.jit
def write_at(tile, staged, out_desc, where):
    """A group's tile at these coordinates, by descriptor, once what it wrote before is gone."""
    tma.store_wait(0)
    gl.thread_barrier()
    room = staged.reshape([staged.shape[-2], staged.shape[-1]])
    if tile.shape[0] < room.shape[0]:
        room = room.slice(0, tile.shape[0], 0)
    room.store(tile)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, where, staged)
