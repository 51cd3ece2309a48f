"""Expert GEMMs of many rows of e4m3 and weights of int4 codes, for Hopper.

What `packed_fp8_tile` computes, with the loop written out. One warp has descriptors bring rows and weights; two groups
of four warps have 64 weight rows each, which they decode into registers, the first operand of their products. Tensor
cores add up 128 columns, more than which their own sums of e4m3 have too few bits for. Codes that are decoded once are
multiplied with up to 256 rows of tokens, in products of 64: each is added to its sum in fp32 while the next one is
under way, times the scales that weight rows have for its columns, and beside the last one the next step's codes are
decoded. Products that would have no rows are left out. Rows of tokens have one scale each, and what GEMM 1 leaves is
quantised by another kernel. Of 512 rows an expert and more, and groups of 128 columns, `decoded_once_mm` has the
product.

us of a layer on an H100, T = 4096, by fp8_block128 and this kernel: Qwen3-30B-A3B 548, w4a8_fp8 662; Mixtral-8x7B 2960,
3464. By fp8_block128 and `packed_fp8_tile`, another H100: 539, 830; 2770, 5522. What instructions take decides: a
warp's step has 325 of them, 128 of which add products to sums, and 407 had taken 5 to 8 % longer. What else was tried:
benchmarks/comparisons/h100-decoded-fp8-mm.json.

Written in Gluon, which has no interpreter: that runs `packed_fp8_tile` for the same products.
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
from moe_ops.kernels.triton.decoded_mm import columns_of, gate_and_up, in_product, leave, rows_layout, stacked_rows
from moe_ops.kernels.triton.hopper import (
    buffers,
    drawn,
    no_more_tiles,
    said_tile,
    say_tile,
    table_of_tiles,
    tiles_told,
)
from moe_ops.kernels.triton.packed_fp8_tile import ABOVE, BELOW, INT4_UNIT, in_order, int4_parts, join_int4
from moe_ops.kernels.triton.packed_tile import factor_of, fetch, of_rows
from moe_ops.kernels.triton.scales import load_scale
from moe_ops.kernels.triton.tile_loads import CONCAT, NOT_GATED
from moe_ops.kernels.triton.util import find_tile, pdl_release, pdl_wait

ROWS = gl.constexpr(64)  # of tokens, of a product
HEIGHT = gl.constexpr(64)  # weight rows of a group of warps
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS.value, 32]))  # a group's product
GROUPS = gl.constexpr(2)
MOST = gl.constexpr(4)  # products of a tile


@gluon.jit
def _products(first, past):
    """How many products a tile has rows for that begins at the first and whose expert ends before the last."""
    return gl.minimum((past - first + ROWS - 1) // ROWS, MOST)


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that draws tiles, and has rows and weights of their steps brought, as soon as there is room."""
    a_desc, w_desc, rows_of, words_of, tiles_of, full, empty, extents, num_rows, told = given
    E: gl.constexpr = SIZES[0]
    K: gl.constexpr = SIZES[2]
    BLOCK: gl.constexpr = SIZES[4]
    N_TILES: gl.constexpr = SIZES[5]
    GLU: gl.constexpr = SIZES[6]
    BATCHED: gl.constexpr = SIZES[10]
    STAGES: gl.constexpr = BLOCK[6]
    STEP: gl.constexpr = BLOCK[2]
    OF_WEIGHTS: gl.constexpr = GROUPS * HEIGHT * STEP // 2
    table, tiles = table_of_tiles(extents, num_rows, E, BLOCK, N_TILES, BATCHED)
    place = 0
    tile = drawn(told)
    while tile < tiles:
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], 0, N_TILES, BLOCK[3])
        count = _products(first, past)
        for step in range((K + STEP - 1) // STEP):
            stage, turn = place % STAGES, place // STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
            if step == 0:
                say_tile(tiles_of, stage, expert, first, past, n_tile)
                gl.thread_barrier()
            for some in gl.static_range(1, MOST + 1):
                mbarrier.expect(arrived, OF_WEIGHTS + some * ROWS * STEP, pred=count == some)
            for box in gl.static_range(MOST):
                where = [first + box * ROWS, step * STEP]
                tma.async_copy_global_to_shared(
                    a_desc, where, arrived, rows_of.index(stage * MOST + box), pred=box < count
                )
            for group in gl.static_range(GROUPS):
                words = words_of.index(stage * GROUPS + group)
                at = (n_tile * GROUPS + group) * words.shape[-2]
                if GLU == CONCAT:
                    tma.async_copy_global_to_shared(w_desc, [expert, 0, at, step * STEP // 4], arrived, words)
                else:
                    tma.async_copy_global_to_shared(w_desc, [expert, at, step * STEP // 4], arrived, words)
            place += 1
        tile = drawn(told)
    no_more_tiles(tiles_of, place, full, empty, STAGES)


@gluon.jit
def _of_weight_rows(where, SIZES: gl.constexpr):
    """(factors, biases) [rows] of a group's sums, 0 where there are none: loaded once for all products of a tile."""
    N: gl.constexpr = SIZES[1]
    STRIDES: gl.constexpr = SIZES[3]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    PACKED: gl.constexpr = SIZES[9][4]
    OUTER_STRIDES: gl.constexpr = STRIDES[5]
    expert, n_start, outer, outer_apart, bias = where
    row, half, exists = stacked_rows(HEIGHT, gl.SliceLayout(1, SUM), n_start, N, GLU, SWAPPED, True)
    row = gl.where(exists, row, 0)
    factor, shift = 0, 0
    if OUTER_STRIDES is not None:
        pointers = of_rows(outer, outer_apart, expert, row, half, N, PACKED[6], PACKED[7], OUTER_STRIDES)
        factor = load_scale(pointers)
    if STRIDES[2] is not None:
        at = bias + expert.to(gl.int64) * STRIDES[2][0] + (row + half * N) * STRIDES[2][1]
        shift = gl.load(at).to(gl.float32)
    return factor, shift


@gluon.jit
def _of_tokens(a_scale, first, past):
    """Factors [rows] of a product's rows of tokens."""
    at = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUM))
    return gl.load(a_scale + at, mask=at < past, other=0.0)


@gluon.jit
def _written(total, factors, shift, first, past, where, SIZES: gl.constexpr):
    """A product's rows first .. past - 1: scaled, activated, and written by descriptor; `factors`: of rows of tokens,
    of weight rows.
    """
    STRIDES: gl.constexpr = SIZES[3]
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    SWAPPED: gl.constexpr = SIZES[8]
    staged, out_desc, n_start, alpha, limit = where
    total *= factors[0][None, :]
    total *= INT4_UNIT
    if STRIDES[5] is not None:
        total *= factors[1][:, None]
    if STRIDES[2] is not None:
        total += shift[:, None]
    if GLU == NOT_GATED:
        value = total
        if ACTIVATION is not None:
            value = apply_activation(total, total, alpha, limit, ACTIVATION, False)
    else:
        gate, up = gate_and_up(total)
        if SWAPPED:
            gate, up = up, gate
        value = apply_activation(gate, up, alpha, limit, ACTIVATION, True).reshape([HEIGHT // 2, ROWS])
    leave(value, staged, out_desc, first, past, n_start, None)


@gluon.jit
def _in_register(NUMBER: gl.constexpr, words):
    """A number for each of `words`, which the assembler does not know: it would move one that it knows to a register
    again whenever a table begins with it. Threads of a warp are numbered below 32.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid; shr.u32 $0, $0, 5; add.u32 $0, $0, $1;",
        "=r,r",
        [gl.full(words.shape, NUMBER, gl.int32, layout=words.type.layout)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _decoded(words):
    """Four weights in two parts of 32 bits, of words of four codes. What is decoded while another product is under way
    are these, as the assembler lets no product run beside instructions that write the next one's registers.
    """
    return int4_parts(words.to(gl.int32), _in_register(BELOW, words), _in_register(ABOVE, words))


@gluon.jit
def _promoted(total, product, factor):
    """`total` and a product, times the factors of weight rows."""
    return total + product * factor[:, None]


@gluon.jit
def _with(sums, AT: gl.constexpr, sum_at):
    """`sums`, number AT of which is another one."""
    if AT == 0:
        return sum_at, sums[1], sums[2], sums[3]
    elif AT == 1:
        return sums[0], sum_at, sums[2], sums[3]
    elif AT == 2:
        return sums[0], sums[1], sum_at, sums[3]
    else:
        return sums[0], sums[1], sums[2], sum_at


@gluon.jit
def _sums(given, at, GROUP: gl.constexpr, PRODUCTS: gl.constexpr, SIZES: gl.constexpr):
    """A tile's weight rows of a group of warps, times the rows of tokens of so many products of at most four: (where
    the next step is, sums [weight rows, rows] of each).

    A product is added to its sum while the next one is under way, the last one's time is that of the next step's codes.
    """
    rows_of, words_of, _, full, empty = given[:5]
    inner, _, inner_apart, _ = given[8]
    place, expert, n_start = at
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3][1]
    BLOCK: gl.constexpr = SIZES[4]
    GLU: gl.constexpr = SIZES[6]
    SWAPPED: gl.constexpr = SIZES[8]
    PACKED: gl.constexpr = SIZES[9][4]
    STEP: gl.constexpr = BLOCK[2]
    STAGES: gl.constexpr = BLOCK[6]
    WORDS: gl.constexpr = STEP // 4
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    GROUP_K: gl.constexpr = PACKED[4]
    LAST: gl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUM, 4)
    OF_WORDS: gl.constexpr = rows_layout(4, WORDS, 4, GLU)
    row, half, exists = stacked_rows(HEIGHT, gl.SliceLayout(1, SUM), n_start, N, GLU, SWAPPED, True)
    row = gl.where(exists, row, 0)
    scales = of_rows(inner, inner_apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)
    bits = fetch(scales)
    zero = gl.zeros([HEIGHT, ROWS], gl.float32, layout=SUM)
    sums = (zero, zero, zero, zero)
    one, other = warpgroup_mma_init(zero), warpgroup_mma_init(zero)
    mbarrier.wait(full.index(place % STAGES), (place // STAGES) & 1)
    parts = _decoded(words_of.index(place % STAGES * GROUPS + GROUP).reshape([HEIGHT, WORDS]).load(OF_WORDS))
    for step in range(STEPS):
        stage, next_stage = place % STAGES, (place + 1) % STAGES
        box = stage * MOST
        factor = factor_of(bits, inner, False, 0)
        if GROUP_K > 0:
            bits = fetch(scales + gl.minimum((step + 1) * STEP // GROUP_K, LAST) * STRIDES[2])
        numbers = in_product(in_order(join_int4(parts), gl.float8e4nv), GLU, OPERAND)
        for at_box in gl.static_range(PRODUCTS):
            rows = rows_of.index(box + at_box).permute((1, 0))
            if at_box % 2 == 0:
                one = warpgroup_mma(numbers, rows, one, use_acc=False, is_async=True)
            else:
                other = warpgroup_mma(numbers, rows, other, use_acc=False, is_async=True)
            if at_box > 0:
                done = warpgroup_mma_wait(1, deps=[other if at_box % 2 == 0 else one])
                sums = _with(sums, at_box - 1, _promoted(sums[at_box - 1], done, factor))
                if at_box % 2 == 0:
                    other = warpgroup_mma_init(done)
                else:
                    one = warpgroup_mma_init(done)
        mbarrier.wait(full.index(next_stage), ((place + 1) // STAGES) & 1, pred=step + 1 < STEPS)
        parts = _decoded(words_of.index(next_stage * GROUPS + GROUP).reshape([HEIGHT, WORDS]).load(OF_WORDS))
        done = warpgroup_mma_wait(0, deps=[one if PRODUCTS % 2 == 1 else other])
        sums = _with(sums, PRODUCTS - 1, _promoted(sums[PRODUCTS - 1], done, factor))
        if PRODUCTS % 2 == 1:
            one = warpgroup_mma_init(done)
        else:
            other = warpgroup_mma_init(done)
        mbarrier.arrive(empty.index(stage))
        place += 1
    return place, sums


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: decodes its weight rows of every tile, multiplies them with the tile's rows and writes."""
    tiles_of, full, _, staged, out_desc, a_scale, decoding, bias, alpha, limit = given[2:]
    STAGES: gl.constexpr = SIZES[4][6]
    COLUMNS: gl.constexpr = columns_of(HEIGHT, SIZES[6])
    _, outer, _, outer_apart = decoding
    place = 0
    expert, first, past, n_tile = said_tile(tiles_of, place, full, STAGES)
    while past > 0:
        n_start = (n_tile * GROUPS + GROUP) * COLUMNS
        at = (place, expert, n_start)
        count = _products(first, past)
        if count == MOST:
            place, sums = _sums(given, at, GROUP, MOST, SIZES)
        elif count == 1:
            place, sums = _sums(given, at, GROUP, 1, SIZES)
        elif count == 2:
            place, sums = _sums(given, at, GROUP, 2, SIZES)
        else:
            place, sums = _sums(given, at, GROUP, 3, SIZES)
        factor, shift = _of_weight_rows((expert, n_start, outer, outer_apart, bias), SIZES)
        of_tokens = (
            _of_tokens(a_scale, first, past),
            _of_tokens(a_scale, first + ROWS, past),
            _of_tokens(a_scale, first + 2 * ROWS, past),
            _of_tokens(a_scale, first + 3 * ROWS, past),
        )
        where = (staged.index(GROUP), out_desc, n_start, alpha, limit)
        for box in gl.static_range(MOST):
            start = first + box * ROWS
            if start < past:
                _written(sums[box], (of_tokens[box], factor), shift, start, past, where, SIZES)
        expert, first, past, n_tile = said_tile(tiles_of, place, full, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "up_scale_offset", "up_outer_offset"])
def _decoded_fp8_mm_kernel(
    a_desc,
    a_scale,
    extents,
    w_desc,
    w_scale,
    w_outer,
    up_scale_offset,
    up_outer_offset,
    bias,
    out_desc,
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
    """One program for each multiprocessor; tiles of BLOCK_M rows of one expert times 128 rows of its weight, which
    programs draw one by one: those of an expert's last rows take less time.

    Args: see `expert_mm._expert_mm_kernel`. Rows, weights and output come and leave by descriptor, 128 columns at a
    time; BLOCK[6]: steps that there is room for. told: a word that is 0.
    """
    COLUMNS: gl.constexpr = columns_of(GROUPS * HEIGHT, GLU)
    N_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STAGES: gl.constexpr = BLOCK[6]
    rows_of, words_of, staged, full, empty = buffers(a_desc, w_desc, out_desc, MOST, GROUPS, GROUPS, STAGES)
    tiles_of = tiles_told(STAGES)
    pdl_wait(PDL)
    pdl_release(PDL)
    outer = w_outer if STRIDES[5] is not None else extents
    decoding = (w_scale, outer, up_scale_offset, up_outer_offset)
    bias = bias if STRIDES[2] is not None else extents
    given = (
        rows_of, words_of, tiles_of, full, empty, staged, out_desc, a_scale, decoding, bias, alpha, limit,
    )  # fmt: skip
    brought = (a_desc, w_desc, rows_of, words_of, tiles_of, full, empty, extents, num_rows, told)
    SIZES: gl.constexpr = (E, N, K, STRIDES, BLOCK, N_TILES, GLU, ACTIVATION, SWAPPED, SCHEME, BATCHED)
    gl.warp_specialize(
        [(_multiply, (given, 0, SIZES)), (_multiply, (given, 1, SIZES)), (_bring, (brought, SIZES))],
        [4, 1],
        [232, 40],
    )
