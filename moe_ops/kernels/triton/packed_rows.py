"""Products of decoded weight rows with a few vectors, on the CUDA cores: few tokens, weights of four or eight bits,
vectors of bf16, fp16, or e4m3 with scales of their own.

A thread loads 16 bytes of a row, decodes them in registers and sums their products with the vector; that sum alone is
multiplied with the scale of its group, and only then threads add theirs up. No decoded weight is ever stored, and with
16 codes a sum a scale costs next to nothing, exact or not. With four bits the bytes are fewer than a quarter of bf16's
but the codes are as many: about five instructions each of e2m1, of which the product is one and two are the integer
pipe's, which takes one every second cycle. So a word's codes become fp32 in one block of instructions, by fp16
where they are integers, and the second kernel's threads load the rows that they multiply: us of a layer of
Qwen3-30B-A3B on an H200, T = 1, before and after: mxfp4 14.1 and 12.4, nvfp4 13.8 and 13.3, int4_w4a16 12.9 and 12.0,
int8_w8a16 19.0 and 17.4, and with the tiles that this made the best 12.2, 12.9, 12.1, 15.3 (`small_of_words` of
benchmarks/comparisons/h200-one-token.json). `decoded_few_mm`, whose products the tensor core makes, has fewer, but
sorts first; for `one_token` with such products see `codes_in_registers` there.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from moe_ops.kernels.triton.codes import (
    E2M1,
    E2M1_FACTOR,
    E2M1_UNIT,
    as_words,
    codes_of_word,
    decode_bytes,
    decode_wide,
    in_order,
)
from moe_ops.kernels.triton.packed_tile import of_rows
from moe_ops.kernels.triton.scales import decode_scale, load_scale, load_stored_scale
from moe_ops.kernels.triton.tile_loads import INTERLEAVED, NOT_GATED, expert_rows
from moe_ops.kernels.triton.util import INTERPRETED, round_to, widen

LOAD_BYTES = 16  # of a thread
# As E2M1_FACTOR and E2M1_UNIT, beside e4m3: the sum of a group is some 16 bits, so that every scale leaves it in fp32.
ROWS_FACTOR = tl.constexpr(2.0**110)
ROWS_UNIT = tl.constexpr(2.0**16)


@triton.constexpr_function
def unit_codes(packed, columns):
    """Columns of a row, of `columns` at a time, whose products are summed before they are scaled: as many as a thread
    loads, or what of them lies in one group.
    """
    group = packed[4]
    unit = min(LOAD_BYTES * codes_of_word(packed[0]) // 4, columns)
    return unit if group == 0 else math.gcd(unit, group)


@triton.jit
def packed_operand(
    w,
    scales,
    up_offset,
    expert,
    row,
    half,
    exists,
    N: tl.constexpr,
    PACKED: tl.constexpr,
    STRIDES: tl.constexpr,
):
    """Where weight rows and their scales begin: what `row_sums` takes.

    Args:
        scales: see `packed_tile.packed_tile`.
        expert: i32 or i64, scalar or [P, 1].
        row, half, exists: [P, N], or what broadcasts to it: rows of their own half, which half, and whether they exist.
        STRIDES: of the weight, of its scales of groups, of the bias, of zero points and of scales of rows.
    """
    inner, zeros, outer = 0, 0, 0
    W_STRIDES: tl.constexpr = STRIDES[0]
    SCALE_STRIDES: tl.constexpr = STRIDES[1]
    ZERO_STRIDES: tl.constexpr = STRIDES[3]
    OUTER_STRIDES: tl.constexpr = STRIDES[4]
    rows = w + expert.to(tl.int64) * W_STRIDES[0] + row.to(tl.int64) * W_STRIDES[1] + half.to(tl.int64) * up_offset
    if SCALE_STRIDES is not None:
        inner = of_rows(scales[0], scales[3], expert, row, half, N, PACKED[3], PACKED[5], SCALE_STRIDES)
    if ZERO_STRIDES is not None:
        zeros = of_rows(scales[1], scales[4], expert, row, half, N, PACKED[3], PACKED[5], ZERO_STRIDES)
    if OUTER_STRIDES is not None:
        outer = of_rows(scales[2], scales[5], expert, row, half, N, PACKED[6], PACKED[7], OUTER_STRIDES)
    return rows, inner, zeros, outer, exists


@triton.constexpr_function
def scales_of_row(packed, columns):
    """How many scales a quantised row of so many columns has."""
    return -(-columns // packed[8]) if packed[8] > 0 else 1


@triton.jit
def vectors_at(x, x_scale, row, stride, K: tl.constexpr, PACKED: tl.constexpr):
    """Pointers to rows of x, and to the scales of quantised ones: what `row_sums` takes."""
    if PACKED[8] < 0:
        return x + row.to(tl.int64) * stride, 0
    else:
        return x + row.to(tl.int64) * stride, x_scale + row.to(tl.int64) * scales_of_row(PACKED, K)


@triton.jit
def load_stored(operand, k, K: tl.constexpr, PACKED: tl.constexpr, STRIDES: tl.constexpr, BLOCK_K: tl.constexpr):
    """What is stored of columns k .. k + BLOCK_K - 1: (codes [P, N, elements], scales [P, N, units], zero points); 0 in
    the place of what there is not, and outside.
    """
    rows, inner, zeros, _, exists = operand
    W_STRIDES: tl.constexpr = STRIDES[0]
    SCALE_STRIDES: tl.constexpr = STRIDES[1]
    ZERO_STRIDES: tl.constexpr = STRIDES[3]
    PACK: tl.constexpr = PACKED[1]
    GROUP_K: tl.constexpr = PACKED[4]
    UNIT: tl.constexpr = unit_codes(PACKED, BLOCK_K)
    codes = expert_rows(rows, exists, k // PACK, K // PACK, W_STRIDES, BLOCK_K // PACK)
    unit = k // UNIT + tl.arange(0, BLOCK_K // UNIT)
    if GROUP_K == 0:
        group = unit * 0
        held = exists[:, :, None] & (group == 0)[None, None, :]
    else:
        group = unit // (GROUP_K // UNIT)
        held = exists[:, :, None] & (group < (K + GROUP_K - 1) // GROUP_K)[None, None, :]
    scale, zero = 0, 0
    if SCALE_STRIDES is not None:
        scale = load_stored_scale(inner[:, :, None] + group[None, None, :] * SCALE_STRIDES[2], held)
    if ZERO_STRIDES is not None:
        zero = tl.load(zeros[:, :, None] + group[None, None, :] * ZERO_STRIDES[2], mask=held, other=0)
    return codes, scale, zero


@triton.jit
def _of_units(product, UNIT: tl.constexpr):
    """[P, N, columns / UNIT] sums of UNIT neighbours, which one thread has."""
    P: tl.constexpr = product.shape[0]
    N: tl.constexpr = product.shape[1]
    return tl.sum(product.reshape(P, N, product.shape[2] // UNIT, UNIT), axis=3)


@triton.jit
def _times_factor(x):
    """x in the units that e2m1's need, exact: bf16 as such, else fp32."""
    if x.dtype == tl.float8e4nv:
        return widen(x) * ROWS_FACTOR
    elif x.dtype == tl.float16 or x.dtype == tl.float32:
        return x.to(tl.float32) * E2M1_FACTOR
    elif INTERPRETED:
        return round_to(widen(x) * E2M1_FACTOR, tl.bfloat16)
    else:
        return x * tl.full((1, 1), E2M1_FACTOR, tl.bfloat16)


@triton.constexpr_function
def _fetching(dtype, count):
    """What loads `count` numbers of 16 bits at once and makes fp32 of them."""
    words = [f"word{n}" for n in range(count // 2)]
    load = f"@held ld.global.v{len(words)}.b32 {{{', '.join(words)}}}, [${count}];"
    body = "".join(f"mov.b32 {word}, 0;" for word in words) + load
    for n, word in enumerate(words):
        low, high = f"${2 * n}", f"${2 * n + 1}"
        if dtype == tl.bfloat16:
            body += f"shl.b32 {low}, {word}, 16; and.b32 {high}, {word}, 0xFFFF0000;"
        else:
            body += f"mov.b32 {{first, second}}, {word}; cvt.f32.f16 {low}, first; cvt.f32.f16 {high}, second;"
    return f"""
    {{
    .reg .pred held;
    .reg .b32 word<{len(words)}>;
    .reg .b16 first, second;
    setp.ne.b64 held, ${count}, 0;
    {body}
    }}
    """


@triton.jit
def _fetch_rows(rows, first, held, COUNT: tl.constexpr):
    """fp32 [P, COUNT * columns of `first`]: COUNT neighbours, as many as a word has codes, of 16 bits and aligned, from
    each of columns `first` [1, .] on, 0 where not `held` [P, .]; loaded by the threads that multiply that word's codes.
    From threads that load in an order of Triton's own they come through shared memory, in rounds.

    Args:
        rows: [P] pointers, see `_after_the_wait`.
    """
    INSTRUCTIONS: tl.constexpr = _fetching(rows.dtype.element_ty, COUNT)
    where = tl.where(held, (rows[:, None] + first).to(tl.int64), 0)
    if COUNT == 8:
        numbers = tl.inline_asm_elementwise(
            INSTRUCTIONS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l", [where], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    else:
        numbers = tl.inline_asm_elementwise(
            INSTRUCTIONS, "=&r,=&r,=&r,=&r,l", [where], dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    return in_order(numbers).reshape(held.shape[0], held.shape[1] * COUNT)


@triton.jit
def _after_the_wait(pointers):
    """The pointers, which nothing knows before what comes before this: loads of `_fetch_rows` are pure, so that copies
    of them can be where they are used, and no wait for another kernel would hold them.
    """
    bits = tl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )
    return bits.to(pointers.dtype)


@triton.jit
def _unit_sums(
    stored,
    x,
    x_held,
    x_factor,
    k,
    K: tl.constexpr,
    PACKED: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OWN: tl.constexpr,
):
    """[P, N, units] of what `load_stored` loaded: scaled products with columns k .. k + BLOCK_K - 1 of the vectors."""
    codes, scale, zero = stored
    SCALE_STRIDES: tl.constexpr = STRIDES[1]
    ZERO_STRIDES: tl.constexpr = STRIDES[3]
    CODE: tl.constexpr = PACKED[0]
    P: tl.constexpr = codes.shape[0]
    N: tl.constexpr = codes.shape[1]
    UNIT: tl.constexpr = unit_codes(PACKED, BLOCK_K)
    TOGETHER: tl.constexpr = 1 if PACKED[1] == 1 else codes_of_word(CODE)  # codes that are decoded together
    column = k + tl.arange(0, BLOCK_K)
    vectors, x_scale = x
    if OWN:
        word = k // TOGETHER + tl.arange(0, BLOCK_K // TOGETHER)
        value = _fetch_rows(
            vectors, word[None, :] * TOGETHER, x_held[:, None] & (word < K // TOGETHER)[None, :], TOGETHER
        )
    else:
        value = tl.load(vectors[:, None] + column[None, :], mask=x_held[:, None] & (column < K)[None, :], other=0.0)
    if x_factor is not None:
        value = round_to(widen(value) * x_factor, value.dtype)
    shift = None
    if ZERO_STRIDES is not None:
        shift = tl.broadcast_to(zero[:, :, :, None], (P, N, BLOCK_K // UNIT, UNIT // TOGETHER))
        shift = shift.reshape(P * N, BLOCK_K // TOGETHER)
    if CODE == E2M1:
        value = _times_factor(value)  # before it goes to where the weights are
    flat = codes.reshape(P * N, codes.shape[2])
    if TOGETHER == 1:
        number = decode_bytes(flat, shift, CODE)
    else:
        number = decode_wide(as_words(flat), shift, CODE)
    sums = _of_units(number.reshape(P, N, BLOCK_K) * widen(value)[:, None, :], UNIT)
    if PACKED[8] > 0:
        group = (k + tl.arange(0, BLOCK_K // UNIT) * UNIT) // PACKED[8]
        held = x_held[:, None] & (group < scales_of_row(PACKED, K))[None, :]
        sums *= tl.load(x_scale[:, None] + group[None, :], mask=held, other=0.0)[:, None, :]
    if SCALE_STRIDES is not None:
        sums *= decode_scale(scale)
    return sums


@triton.jit
def row_sums(
    stored,
    operand,
    x,
    x_held,
    x_factor,
    K: tl.constexpr,
    PACKED: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OWN: tl.constexpr = False,
):
    """fp32 [P, N]: sum over k of x[p, k] * decoded w[row p, n, k].

    Args:
        stored: `load_stored` of the first columns, which may be on its way before x is known.
        operand: `packed_operand`.
        x: `vectors_at` of [P] vectors of K columns, or [1] for all; x_held: those that are read, the others are 0.
        x_factor: multiplied with x and rounded as x is stored, or None.
        OWN: whether the vectors are rows of a contiguous tensor [., K].
    """
    vectors, x_scale = x
    PER_WORD: tl.constexpr = codes_of_word(PACKED[0])
    FETCHED: tl.constexpr = (
        OWN
        and PACKED[1] > 1
        and K % PER_WORD == 0
        and vectors.dtype.element_ty.primitive_bitwidth == 16
        and not INTERPRETED
    )
    if FETCHED:
        x = (_after_the_wait(vectors), x_scale)
    total = _unit_sums(stored, x, x_held, x_factor, 0, K, PACKED, STRIDES, BLOCK_K, FETCHED)
    # Nothing on its way while a product is made: bytes that outlive a step would be a register each.
    for k in range(BLOCK_K, K, BLOCK_K):
        stored = load_stored(operand, k, K, PACKED, STRIDES, BLOCK_K)
        total += _unit_sums(stored, x, x_held, x_factor, k, K, PACKED, STRIDES, BLOCK_K, FETCHED)
    result = tl.sum(total, axis=2)
    if PACKED[0] == E2M1:
        result *= E2M1_UNIT if PACKED[8] < 0 else ROWS_UNIT
    OUTER_STRIDES: tl.constexpr = STRIDES[4]
    _, _, _, outer, exists = operand
    if OUTER_STRIDES is not None:
        result *= load_scale(outer, exists)
    if PACKED[8] == 0:
        _, x_scale = x
        result *= tl.load(x_scale, mask=x_held, other=0.0)[:, None]
    return result


@triton.jit
def packed_glu_sums(
    x,
    x_scale,
    x_factor,
    token,
    stride_x,
    w,
    scales,
    up_offset,
    expert,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    PACKED: tl.constexpr,
):
    """fp32 [BLOCK_N] products of the token's vector with the gate's rows and with the up half's, from column `first`
    on; without a gate both are the same.

    Args:
        x_factor: see `row_sums`; scales: see `packed_tile.packed_tile`; expert: scalar.
    """
    HALVES: tl.constexpr = 1 if GLU == NOT_GATED else 2
    column = (first + tl.arange(0, BLOCK_N))[None, :]
    half = tl.arange(0, HALVES)[:, None]
    exists = (column < N) & (half >= 0)
    if GLU == INTERLEAVED:
        row, half = 2 * column + half, half * 0
    else:
        row = column + half * 0
    operand = packed_operand(w, scales, up_offset, expert, row, half, exists, N, PACKED, STRIDES)
    stored = load_stored(operand, 0, K, PACKED, STRIDES, BLOCK_K)
    one = tl.arange(0, 1)  # vector, for both halves
    vector = vectors_at(x, x_scale, token + one, stride_x, K, PACKED)
    sums = row_sums(stored, operand, vector, one == 0, x_factor, K, PACKED, STRIDES, BLOCK_K)
    if GLU == NOT_GATED:
        alone = sums.reshape(BLOCK_N)
        return alone, alone
    else:
        return tl.split(sums.T)
