"""How groups of warps multiply panels of `decoded_once_mm` whose scales are not folded into the codes: of int4.

Weight rows are the first operand, so that a thread has two of them in each product, and their scales in registers:
groups have 128 weight rows each, in two products of 64 with the tile's 128 rows of tokens, or with 64 where it has no
more. Of a gated weight the first is the gate's and the second that of up, of the same outputs. Tensor cores add up 128
columns, more than which their own sums of e4m3 have too few bits for; one group adds that to its sums in fp32 while the
other multiplies.

Tried, us of a layer on an H200, Qwen3-30B-A3B, 16384 tokens, and Mixtral-8x7B, 4096: rows of tokens as the first
operand, as in `promoted_mm`, and scales of weight rows in shared memory, from where every thread takes 64 a step 2004,
3900; this 1864, 3245. Beside rows of bf16, Mixtral-8x7B, T = 4096: int4_w4a16, whose sums wait for the scales of 128
columns, 6281, added up after 128 columns, for which a group holds two steps, 7105; by `decoded_mm` 5653.
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
from moe_ops.kernels.triton.hopper import count_by_warps, done_with, said_tile, write
from moe_ops.kernels.triton.order import in_order
from moe_ops.kernels.triton.packed_fp8_tile import INT4_UNIT
from moe_ops.kernels.triton.packed_tile import of_rows
from moe_ops.kernels.triton.panels import CHUNK, added
from moe_ops.kernels.triton.promoted_mm import HALF, ROWS, STEP
from moe_ops.kernels.triton.scales import decode_scale, load_scale
from moe_ops.kernels.triton.tile_loads import INTERLEAVED, NOT_GATED


@gluon.constexpr_function
def _product_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.jit
def _rows_of(n_tile, UPPER: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, SIZES: gl.constexpr):
    """(row of its stack, half) of each of a group's weight rows of its first or its UPPER product with so many TOKENS,
    and the first output; others stand in for those behind the last one.
    """
    N: gl.constexpr = SIZES[1]
    GLU: gl.constexpr = SIZES[6]
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, _product_layout(TOKENS)))
    half = row * 0
    if GLU == NOT_GATED:
        n_start = n_tile * (2 * HALF) + GROUP * HALF + UPPER * CHUNK
    else:
        n_start = n_tile * HALF + GROUP * CHUNK
    if N % CHUNK == 0:  # all of a product's rows exist, or none: so their places are a constant apart
        row += gl.minimum(n_start, N - CHUNK)
    else:
        row = gl.minimum(n_start + row, N - 1)
    if GLU == INTERLEAVED:
        row = row * 2 + UPPER
    elif GLU != NOT_GATED:
        half += UPPER
    return row, half, n_start


@gluon.jit
def _scaled_sums(given, where, GROUP: gl.constexpr, TOKENS: gl.constexpr, SIZES: gl.constexpr):
    """(where the next step is, sums [weight rows, tokens] of a group's first and of its second product) of a tile whose
    sums are multiplied with the scales of groups of columns.
    """
    tokens_of, weights_of, full, empty, decoding = given
    expert, n_tile, place = where
    inner, _, inner_apart, _ = decoding
    N: gl.constexpr = SIZES[1]
    K: gl.constexpr = SIZES[2]
    STRIDES: gl.constexpr = SIZES[3][1]
    STAGES: gl.constexpr = SIZES[4][6]
    PACKED: gl.constexpr = SIZES[10][4]
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    GROUP_K: gl.constexpr = PACKED[4]
    LAST: gl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    row, half, _ = _rows_of(n_tile, 0, GROUP, TOKENS, SIZES)
    of_lower = of_rows(inner, inner_apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)
    row, half, _ = _rows_of(n_tile, 1, GROUP, TOKENS, SIZES)
    of_upper = of_rows(inner, inner_apart, expert, row, half, N, PACKED[3], PACKED[5], STRIDES)
    next_lower, next_upper = gl.load(of_lower), gl.load(of_upper)
    lower = gl.zeros([CHUNK, TOKENS], gl.float32, layout=_product_layout(TOKENS))
    upper = gl.zeros([CHUNK, TOKENS], gl.float32, layout=_product_layout(TOKENS))
    product = warpgroup_mma_init(lower)
    for step in range(STEPS):
        stage = place % STAGES
        mbarrier.wait(full.index(stage), (place // STAGES) & 1)
        tokens = tokens_of.index(stage * (2 * ROWS // TOKENS)).permute((1, 0))
        numbers = weights_of.index(stage * 4 + GROUP * 2)
        product = warpgroup_mma(numbers, tokens, product, use_acc=False, is_async=True)
        scale, scale_of_upper = decode_scale(next_lower), decode_scale(next_upper)
        if GROUP_K > 0:
            group = gl.minimum((step + 1) * STEP // GROUP_K, LAST) * STRIDES[2]
            next_lower, next_upper = gl.load(of_lower + group), gl.load(of_upper + group)
        summed = warpgroup_mma_wait(0, deps=[product])
        lower = added(lower, summed, scale)
        numbers = weights_of.index(stage * 4 + GROUP * 2 + 1)
        product = warpgroup_mma(numbers, tokens, warpgroup_mma_init(summed), use_acc=False, is_async=True)
        summed = warpgroup_mma_wait(0, deps=[product])
        done_with(empty, stage)
        upper = added(upper, summed, scale_of_upper)
        product = warpgroup_mma_init(summed)
        place += 1
    return place, lower, upper


@gluon.jit
def _scaled(total, of_tokens, row, half, expert, decoding, bias, SIZES: gl.constexpr):
    """Sums with what comes behind the loop: scales of tokens, the codes' unit, scales of whole weight rows, a bias."""
    N: gl.constexpr = SIZES[1]
    OUTER_STRIDES: gl.constexpr = SIZES[3][5]
    BIAS_STRIDES: gl.constexpr = SIZES[3][2]
    PACKED: gl.constexpr = SIZES[10][4]
    _, outer, _, outer_apart = decoding
    total = total * of_tokens[None, :] * INT4_UNIT
    if OUTER_STRIDES is not None:
        pointers = of_rows(outer, outer_apart, expert, row, half, N, PACKED[6], PACKED[7], OUTER_STRIDES)
        total *= load_scale(pointers)[:, None]
    if BIAS_STRIDES is not None:
        at = bias + expert.to(gl.int64) * BIAS_STRIDES[0] + (row + half * N) * BIAS_STRIDES[1]
        total += gl.load(at).to(gl.float32)[:, None]
    return total


@gluon.jit
def _leave(value, staged, out_desc, first, past, n_start, ORDER: gl.constexpr):
    """Write columns n_start and on [columns, tokens] of a tile's rows, 64 of these at a time, in the order that the
    next product has.
    """
    PARTS: gl.constexpr = value.shape[1] // ROWS
    values = (value,)
    if PARTS == 2:
        values = gl.split(value.reshape([CHUNK, 2, ROWS]).permute([0, 2, 1]))
    for part in gl.static_range(PARTS):
        out = values[part].to(staged.dtype).permute([1, 0])
        if ORDER is not None:
            out = in_order(out, ORDER[0], ORDER[1])
        write(out, staged, out_desc, first + part * ROWS, past, n_start)


@gluon.jit
def _tile(given, where, leaving, GROUP: gl.constexpr, TOKENS: gl.constexpr, SIZES: gl.constexpr):
    """A group's weight rows of a tile's panel times its rows of tokens; where the next step is."""
    expert, first, past, n_tile, place = where
    staged, out_desc, a_scale, decoding, bias, alpha, limit = leaving
    GLU: gl.constexpr = SIZES[6]
    ACTIVATION: gl.constexpr = SIZES[7]
    ORDER: gl.constexpr = SIZES[10][6]
    place, lower, upper = _scaled_sums(given, (expert, n_tile, place), GROUP, TOKENS, SIZES)
    at = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, _product_layout(TOKENS)))
    of_tokens = gl.load(a_scale + at, mask=at < past, other=0.0)
    row, half, n_start = _rows_of(n_tile, 0, GROUP, TOKENS, SIZES)
    lower = _scaled(lower, of_tokens, row, half, expert, decoding, bias, SIZES)
    row, half, n_start_of_upper = _rows_of(n_tile, 1, GROUP, TOKENS, SIZES)
    upper = _scaled(upper, of_tokens, row, half, expert, decoding, bias, SIZES)
    if GLU == NOT_GATED:
        if ACTIVATION is not None:
            lower = apply_activation(lower, lower, alpha, limit, ACTIVATION, False)
            upper = apply_activation(upper, upper, alpha, limit, ACTIVATION, False)
        _leave(lower, staged, out_desc, first, past, n_start, ORDER)
        _leave(upper, staged, out_desc, first, past, n_start_of_upper, ORDER)
    else:
        value = apply_activation(lower, upper, alpha, limit, ACTIVATION, True)
        _leave(value, staged, out_desc, first, past, n_start, ORDER)
    return place


@gluon.jit
def multiply_weight_rows(given, GROUP: gl.constexpr, SIZES: gl.constexpr):
    """A group of warps: its 128 weight rows of every tile's panel times the tile's rows."""
    rows_of, weights_of, left, full, empty, leaving, a_scale, done, bias, decoding = given
    _, tile_of = left
    staged, out_desc, _, alpha, limit = leaving
    N_TILES: gl.constexpr = SIZES[5]
    STAGES: gl.constexpr = SIZES[4][6]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    all_of = rows_of._reinterpret(gl.float8e4nv, [STAGES, 2 * ROWS, STEP], LAYOUT)
    halves_of = rows_of._reinterpret(gl.float8e4nv, [STAGES * 2, ROWS, STEP], LAYOUT)
    weights_of = weights_of._reinterpret(gl.float8e4nv, [STAGES * 4, CHUNK, STEP], LAYOUT)
    many, few = (all_of, weights_of, full, empty, decoding), (halves_of, weights_of, full, empty, decoding)
    leaving = (staged.index(GROUP), out_desc, a_scale, decoding, bias, alpha, limit)
    place = 0
    expert, first, past, panel = said_tile(tile_of, place, full, STAGES)
    while past > 0:
        where = (expert, first, past, panel % N_TILES, place)
        if past - first > ROWS:
            place = _tile(many, where, leaving, GROUP, 2 * ROWS, SIZES)
        else:
            place = _tile(few, where, leaving, GROUP, ROWS, SIZES)
        if GROUP == 0:  # the panel has been read
            count_by_warps(done + panel)
        expert, first, past, panel = said_tile(tile_of, place, full, STAGES)
    tma.store_wait(0)
