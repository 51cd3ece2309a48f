"""Expert GEMMs of many rows of e4m3 and weights of e4m3, whose scales are those of whole rows, or of 128 columns of a
row and of 128 x 128 of a weight, for Hopper.

What `mm_tile` computes, with the loop written out: one warp has descriptors bring rows and weights, and two groups of
four warps have 64 rows of tokens each. Tensor cores add up 128 columns, more than which their own sums of e4m3 have too
few bits for; one group adds that to its sums in fp32 while the other multiplies. A tile is of 256 weight rows, in two
products of 128 one after the other, so that registers hold both sums and one product. A group without rows leaves the
tensor cores to the other. Rows that another kernel quantises then, each as a whole, leave in fp16 of units of their own
(`scales.store_as`): benchmarks/comparisons/h200-rows-as-a-whole.json.

us of a layer on an H100, in bf16, by `mm_tile` and by this kernel, T = 4096: Qwen3-30B-A3B, fp8_channel 723, 686, 575,
fp8_block128 721, 600, 554; Mixtral-8x7B, fp8_channel 4575, 4342, 3082, fp8_block128 4651, 4138, 3042.

Written in Gluon, which has no interpreter: that runs `mm_tile` for the same products.
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

from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.hopper import (
    buffers,
    computed_here,
    drawn,
    no_more_tiles,
    said_tile,
    say_tile,
    table_of_tiles,
    tiles_told,
    with_bias,
    write,
)
from moe_ops.kernels.triton.scales import group_scale, largest_magnitude, load_scale, quantize_tile, store_as
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait, round_to

ROWS = gl.constexpr(64)  # of a group of warps
HALF = gl.constexpr(128)  # weight rows of a product
STEP = gl.constexpr(128)  # columns of a product
GROUPS = gl.constexpr(2)
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 32]))  # a group's product


@gluon.constexpr_function
def columns_of(glu):
    """Output columns of a tile, and of what a group of warps writes at once."""
    return {NOT_GATED.value: (256, 128), CONCAT.value: (128, 128), INTERLEAVED.value: (128, 64)}[glu]


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that has rows and weights of every step of every tile brought, as soon as there is room; of halves that
    are apart the gate's first, wherever it is.
    """
    a_desc, w_desc, rows_of, weights_of, tiles_of, full, empty, extents, num_rows, told = given
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    BATCHED: gl.constexpr = SIZES[9]
    STAGES: gl.constexpr = BLOCK[6]
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
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
            mbarrier.expect(arrived, (GROUPS * ROWS + 2 * HALF) * STEP)
            for part in gl.static_range(2):
                at = stage * 2 + part
                tma.async_copy_global_to_shared(a_desc, [first + part * ROWS, step * STEP], arrived, rows_of.index(at))
                weights = weights_of.index(at)
                if GLU == CONCAT:
                    where = [expert, 1 - part if SWAPPED else part, n_tile * HALF, step * STEP]
                else:
                    where = [expert, (n_tile * 2 + part) * HALF, step * STEP]
                tma.async_copy_global_to_shared(w_desc, where, arrived, weights)
            place += 1
        tile = drawn(told)
    no_more_tiles(tiles_of, place, full, empty, STAGES)


@gluon.jit
def _factors(
    a_scale, at, past, w_scale, up_apart, expert, n_tile, step, N: gl.constexpr, K: gl.constexpr, GLU: gl.constexpr,
    STRIDES: gl.constexpr, RUNS_ON: gl.constexpr,
):  # fmt: skip
    """What a step's products are multiplied by: a row's scale times that of the 128 weight rows, of both halves, and of
    those of the upper one that are the next block's where blocks RUN ON from the gate.
    """
    LAST: gl.constexpr = (K + STEP - 1) // STEP - 1
    OUTPUTS: gl.constexpr = N if GLU == NOT_GATED else 2 * N
    step = gl.minimum(step, LAST)
    of_rows = gl.load(a_scale + at.to(gl.int64) * (LAST + 1) + step, mask=at < past, other=0.0)
    first = w_scale + expert.to(gl.int64) * STRIDES[0] + step * STRIDES[2]
    if GLU == CONCAT:
        lower, upper = first + n_tile * STRIDES[1], first + up_apart + n_tile * STRIDES[1]
    else:
        lower = first + n_tile * 2 * STRIDES[1]
        upper = first + gl.minimum(n_tile * 2 + 1, (OUTPUTS - 1) // HALF) * STRIDES[1]
    of_upper = of_rows * load_scale(upper)
    of_next = of_upper
    if RUNS_ON:
        block = gl.minimum(N // HALF + n_tile + 1, (OUTPUTS - 1) // HALF)
        of_next = of_rows * load_scale(first + block * STRIDES[1])
    return of_rows * load_scale(lower), of_upper, of_next


@gluon.jit
def _times(summed, of_rows, of_next, FIRST: gl.constexpr):
    """Sums [rows, weight rows] times a factor of each row, from column FIRST on another one: the registers of a thread
    have columns that are 8 apart, so that which is known when this is compiled.
    """
    if FIRST == HALF:
        return summed * of_rows[:, None]
    else:
        cut = summed.reshape([ROWS, HALF // 8, 8])
        OF_EIGHTS: gl.constexpr = gl.SliceLayout(2, cut.type.layout)
        eighth = gl.arange(0, HALF // 8, layout=gl.SliceLayout(0, OF_EIGHTS))[None, :]
        rows: gl.constexpr = gl.SliceLayout(1, OF_EIGHTS)
        of_rows = gl.convert_layout(of_rows, rows, assert_trivial=True)[:, None]
        of_next = gl.convert_layout(of_next, rows, assert_trivial=True)[:, None]
        factors = gl.where(eighth < FIRST // 8, of_rows, of_next)
        scaled = (cut * factors[:, :, None]).reshape([ROWS, HALF])
        return gl.convert_layout(scaled, summed.type.layout, assert_trivial=True)


@gluon.jit
def _scaled(total, of_rows, w_scale, expert, row, exists, STRIDES: gl.constexpr):
    """Sums [rows, weight rows] times the scales of both, if `of_rows` has the rows'."""
    if of_rows is not None:
        pointers = w_scale + expert.to(gl.int64) * STRIDES[0] + row.to(gl.int64) * STRIDES[1]
        total = total * of_rows[:, None] * load_scale(pointers, exists)[None, :]
    return total


@gluon.jit
def _quantized(value, exists, at, past, out_scale, group, N: gl.constexpr, DTYPE: gl.constexpr):
    """Rows of one scale group of columns in e4m3, or for a while in fp16; their scales are stored."""
    quantized, scale = quantize_tile(gl.where(exists[None, :], value, 0.0), DTYPE)
    GROUPS_OF_N: gl.constexpr = (N + HALF - 1) // HALF
    gl.store(out_scale + at.to(gl.int64) * GROUPS_OF_N + group, scale, mask=(at < past) & (group < GROUPS_OF_N))
    return quantized


@gluon.jit
def _quantized_together(lower, upper, at, past, out_scale, group, N: gl.constexpr, DTYPE: gl.constexpr):
    """The same of both halves of one scale group of columns."""
    column = group * HALF + gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, lower.type.layout))[None, :]
    lower = gl.where(column < N, lower, 0.0)
    upper = gl.where(column + HALF // 2 < N, upper, 0.0)
    amax = gl.maximum(largest_magnitude(lower, DTYPE), largest_magnitude(upper, DTYPE))
    scale = group_scale(amax, DTYPE)
    where = out_scale + at.to(gl.int64) * ((N + HALF - 1) // HALF) + group
    gl.store(where, gl.convert_layout(scale, at.type.layout), mask=at < past)
    return store_as(lower, scale, DTYPE), store_as(upper, scale, DTYPE)


@gluon.jit
def finish(lower, upper, of_rows, of_weights, where, leaving, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """Write a tile of a group of warps, of its sums [rows, weight rows] of both halves: scales, bias, activation,
    quantised if the scheme says so. `of_rows`: see `_scaled`.
    """
    w_scale, up_apart, bias = of_weights
    expert, first, past, n_tile = where
    staged, out_desc, out_scale, alpha, limit = leaving
    N: gl.constexpr = SIZES[1]
    SCALES: gl.constexpr = SIZES[3][1]
    BIASES: gl.constexpr = SIZES[3][2]
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    QUANTIZES: gl.constexpr = SIZES[10][3] or SIZES[4][7]
    COLUMNS: gl.constexpr = columns_of(GLU)[0]
    AT_ONCE: gl.constexpr = columns_of(GLU)[1]
    at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUM))
    place_in_half = gl.arange(0, HALF, layout=gl.SliceLayout(0, SUM))
    n_start = n_tile * COLUMNS
    if GLU == CONCAT:
        row = n_start + place_in_half
        exists = row < N
        lower = _scaled(lower, of_rows, w_scale, expert, row, exists, SCALES)
        upper = _scaled(upper, of_rows, w_scale + up_apart, expert, row, exists, SCALES)
        lower = with_bias(lower, bias, expert, row, exists, BIASES)
        upper = with_bias(upper, bias, expert, row + N, exists, BIASES)
        value = apply_activation(lower, upper, alpha, limit, ACTIVATION, True)
        if QUANTIZES:
            value = _quantized(value, exists, at, past, out_scale, n_tile, N, staged.dtype)
        write(round_to(value, staged.dtype), staged.index(GROUP), out_desc, first, past, n_start)
    else:
        OUTPUTS: gl.constexpr = N if GLU == NOT_GATED else 2 * N
        for half in gl.static_range(2):
            row = (n_tile * 2 + half) * HALF + place_in_half
            exists = row < OUTPUTS
            value = _scaled(lower if half == 0 else upper, of_rows, w_scale, expert, row, exists, SCALES)
            value = with_bias(value, bias, expert, row, exists, BIASES)
            if GLU == INTERLEAVED:
                gate, up = gl.split(value.reshape([ROWS, HALF // 2, 2]))
                value = apply_activation(gate, up, alpha, limit, ACTIVATION, True)
            elif ACTIVATION is not None:
                value = apply_activation(value, value, alpha, limit, ACTIVATION, False)
            if QUANTIZES and GLU == INTERLEAVED:
                if half == 0:
                    lower_value = value
                else:
                    both = _quantized_together(lower_value, value, at, past, out_scale, n_tile, N, staged.dtype)
                    write(both[0], staged.index(GROUP), out_desc, first, past, n_start)
                    write(both[1], staged.index(GROUP), out_desc, first, past, n_start + AT_ONCE)
            else:
                if QUANTIZES:
                    value = _quantized(value, exists, at, past, out_scale, n_tile * 2 + half, N, staged.dtype)
                rounded = round_to(value, staged.dtype)
                write(rounded, staged.index(GROUP), out_desc, first, past, n_start + half * AT_ONCE)


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its 64 rows of every tile times the tile's weight rows."""
    rows_of, weights_of, tiles_of, full, empty, leaving, a_scale, w_scale, up_apart, bias = given
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3]
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    BY_ROW: gl.constexpr = SIZES[10][1] == 0
    RUNS_ON: gl.constexpr = SIZES[10][2]
    NEXT: gl.constexpr = HALF - N % HALF if RUNS_ON else HALF  # the first weight row of the next block
    STAGES: gl.constexpr = BLOCK[6]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    SCALES: gl.constexpr = STRIDES[1]
    place = 0
    expert, first, past, n_tile = said_tile(tiles_of, place, full, STAGES)
    while past > 0:
        first += GROUP * ROWS
        if first >= past:
            for _ in range(STEPS):
                mbarrier.wait(full.index(place % STAGES), (place // STAGES) & 1)
                mbarrier.arrive(empty.index(place % STAGES))
                place += 1
        else:
            lower = gl.zeros([ROWS, HALF], gl.float32, layout=SUM)
            upper = gl.zeros([ROWS, HALF], gl.float32, layout=SUM)
            product = warpgroup_mma_init(lower)
            at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUM))
            if not BY_ROW:
                where = (a_scale, at, past, w_scale, up_apart, expert, n_tile)
                of_lower, of_upper, of_next = _factors(*where, 0, N, K, GLU, SCALES, RUNS_ON)
            for step in range(STEPS):
                stage = place % STAGES
                mbarrier.wait(full.index(stage), (place // STAGES) & 1)
                rows = rows_of.index(stage * 2 + GROUP)
                weights = weights_of.index(stage * 2).reshape([HALF, STEP]).permute((1, 0))
                product = warpgroup_mma(rows, weights, product, use_acc=False, is_async=True)
                if not BY_ROW:
                    ahead = _factors(*where, step + 1, N, K, GLU, SCALES, RUNS_ON)
                summed = warpgroup_mma_wait(0, deps=[product])
                if BY_ROW:
                    lower += summed
                else:
                    lower = computed_here(lower + summed * of_lower[:, None])
                weights = weights_of.index(stage * 2 + 1).reshape([HALF, STEP]).permute((1, 0))
                product = warpgroup_mma(rows, weights, warpgroup_mma_init(summed), use_acc=False, is_async=True)
                summed = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(empty.index(stage))
                if BY_ROW:
                    upper += summed
                else:
                    upper = computed_here(upper + _times(summed, of_upper, of_next, NEXT))
                    of_lower, of_upper, of_next = ahead
                product = warpgroup_mma_init(summed)
                place += 1
            of_rows = None
            if BY_ROW:
                of_rows = gl.load(a_scale + at, mask=at < past, other=0.0)
            of_weights = (w_scale, up_apart, bias)
            finish(lower, upper, of_rows, of_weights, (expert, first, past, n_tile), leaving, GROUP, SIZES)
        expert, first, past, n_tile = said_tile(tiles_of, place, full, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "up_scale_offset"])
def _promoted_mm_kernel(
    a_desc,
    a_scale,
    extents,
    w_desc,
    w_scale,
    up_scale_offset,
    bias,
    out_desc,
    out_scale,
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

    Args: see `expert_mm._expert_mm_kernel`. Rows, weights and output come and leave by descriptor, 128 columns at a
    time; BLOCK[6]: steps that there is room for; BLOCK[7]: whether rows that a kernel quantises then, each as a whole,
    leave in fp16, with the largest magnitudes of 128 columns in `out_scale`. told: a word that is 0.
    """
    COLUMNS: gl.constexpr = columns_of(GLU)[0]
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = BLOCK[6]
    rows_of, weights_of, staged, full, empty = buffers(a_desc, w_desc, out_desc, 2, 2, GROUPS, STAGES)
    tiles_of = tiles_told(STAGES)
    pdl_wait(PDL)
    pdl_release(PDL)
    bias = bias if STRIDES[2] is not None else extents
    leaving = (staged, out_desc, out_scale, alpha, limit)
    given = (rows_of, weights_of, tiles_of, full, empty, leaving, a_scale, w_scale, up_scale_offset, bias)
    brought = (a_desc, w_desc, rows_of, weights_of, tiles_of, full, empty, extents, num_rows, told)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, BATCHED, SCHEME)
    gl.warp_specialize(
        [(_multiply, (given, 0, SIZES)), (_multiply, (given, 1, SIZES)), (_bring, (brought, SIZES))],
        [4, 1],
        [232, 40],
    )
