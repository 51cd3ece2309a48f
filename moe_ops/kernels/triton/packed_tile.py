"""One output tile of an expert GEMM whose weights are codes of four or eight bits and whose activations are bf16.

The stored bytes come by descriptor and are decoded in registers, where they are the first operand of the product; the
rows are the second. The accumulator is therefore the tile transposed, and weight rows fill the 64 rows that the tensor
core always computes, however few tokens there are.

Codes of four bits are decoded by the word of eight, so that no code moves between threads. The tensor core has given
each thread columns that lie apart; the sum does not care for the order of columns, so that of both operands is changed
to one in which a thread's are side by side in memory. Instructions of a loop step of 128 by 128 codes and a warp:
int4_w4a16 325, byte by byte 481; mxfp4 454 and 536 (and the decoded tile then went through shared memory).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.scales import decode_scale, load_scale, load_stored_scale
from moe_ops.kernels.triton.tile_loads import BOTH, halves_of, load_rows, load_weight, weight_rows
from moe_ops.kernels.triton.util import INTERPRETED, widen

# e2m1 in place of the last exponent bits of a bf16 number is 2^-126 of its value; the scale of its group brings 2^62 of
# that back, the end of the sum the rest. So scales from 2^-60 to 2^64 leave no bf16 number out of range.
E2M1_UNIT = tl.constexpr(2.0**64)
E2M1_FACTOR = tl.constexpr(2.0**62)

E2M1 = tl.constexpr(0)
INT4 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
INT8 = tl.constexpr(3)
#: Names of `meta.formats.CODES`.
CODE_NUMBERS = {"e2m1": E2M1.value, "int4": INT4.value, "e4m3": E4M3.value, "int8": INT8.value}


@triton.jit
def _e2m1_codes(words):
    """Eight bf16 of each word's codes in order, times 2^-126: their bits at the ends of the fields.

    A product with two powers of two is two copies of a code: one's sign and the other's rest are in their places.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 high, code<4>;
        shr.u32 high, $8, 8;
        and.b32 code0, $8, 0x000F000F;
        and.b32 code1, $8, 0x00F000F0;
        and.b32 code2, high, 0x000F000F;
        and.b32 code3, high, 0x00F000F0;
        mul.lo.u32 code0, code0, 0x1040;
        mul.lo.u32 code1, code1, 0x0104;
        mul.lo.u32 code2, code2, 0x1040;
        mul.lo.u32 code3, code3, 0x0104;
        and.b32 code0, code0, 0x81C081C0;
        and.b32 code1, code1, 0x81C081C0;
        and.b32 code2, code2, 0x81C081C0;
        and.b32 code3, code3, 0x81C081C0;
        mov.b32 {$0, $4}, code0;
        mov.b32 {$1, $5}, code1;
        mov.b32 {$2, $6}, code2;
        mov.b32 {$3, $7}, code3;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _int4_codes(words):
    """Eight bf16 of each word's codes in order, each 128 + code: the last bits of a number in [128, 256)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 at<4>;
        shr.u32 at1, $8, 4;
        shr.u32 at2, $8, 8;
        shr.u32 at3, $8, 12;
        lop3.b32 at0, $8, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 at1, at1, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 at2, at2, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 at3, at3, 0x000F000F, 0x43004300, 0xEA;
        mov.b32 {$0, $4}, at0;
        mov.b32 {$1, $5}, at1;
        mov.b32 {$2, $6}, at2;
        mov.b32 {$3, $7}, at3;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _int8_wide(tile):
    """fp32 of int8: bits of 2^23 + 128 + code, less as much; the conversion instruction takes four times as long."""
    bits = (tile.to(tl.int32) & 0xFF) ^ 0x4B000080
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def codes_of_bytes(stored):
    """The codes [rows, 2 columns] of bytes [rows, columns], for the interpreter."""
    codes = tl.join(stored.to(tl.int32) & 15, stored.to(tl.int32) >> 4)
    return codes.reshape(stored.shape[0], 2 * stored.shape[1])


@triton.jit
def e2m1_value(nibble):
    """fp32 of e2m1, for the interpreter."""
    exponent, mantissa = (nibble >> 1) & 3, (nibble & 1).to(tl.float32)
    scale = (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * scale)
    return tl.where(nibble >= 8, -magnitude, magnitude)


@triton.jit
def _in_order(c0, c1, c2, c3, c4, c5, c6, c7):
    """[..., 2, 4] of the eight numbers of a word; a thread's neighbours are halves of one register."""
    first, second = tl.join(tl.join(c0, c2), tl.join(c1, c3)), tl.join(tl.join(c4, c6), tl.join(c5, c7))
    return tl.join(first, second).permute(0, 1, 4, 2, 3).reshape(c0.shape[0], c0.shape[1], 2, 4)


@triton.jit
def decode_words(words, zero, CODE: tl.constexpr):
    """[rows, words, 2, 4] of the codes of words [rows, words], first to last: e2m1 times 2^-126, int4 less `zero`,
    which broadcasts to the words, or 8.
    """
    if INTERPRETED:
        code = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        if CODE == E2M1:
            value = e2m1_value(code) * (1.0 / E2M1_UNIT / E2M1_FACTOR)
        else:
            value = (code - (8 if zero is None else zero.to(tl.int32)[:, :, None])).to(tl.float32)
        found = value.reshape(words.shape[0], words.shape[1], 2, 4)
    elif CODE == E2M1:
        found = _in_order(*_e2m1_codes(words))
    else:
        if zero is None:
            shift = tl.full((1, 1), 136.0, tl.bfloat16)
        else:
            shift = (zero.to(tl.float32) + 128.0).to(tl.bfloat16)
        found = _in_order(*_int4_codes(words)) - shift[:, :, None, None]
    return found


@triton.jit
def decode_wide(tile, zero, CODE: tl.constexpr):
    """fp32 of a tile of e4m3, or of int8 less `zero`, which broadcasts."""
    if CODE == E4M3:
        value = widen(tile)
    else:
        value = _int8_wide(tile)
        if zero is not None:
            value -= zero.to(tl.float32)
    return value


@triton.jit
def decode_one(tile, zero, CODE: tl.constexpr):
    """`decode_wide` in bf16, which holds every code."""
    if INTERPRETED:
        value = decode_wide(tile, zero, CODE)
    elif CODE == E4M3:
        value = tile.to(tl.bfloat16)
    else:
        value = decode_wide(tile, zero, CODE).to(tl.bfloat16)
    return value


@triton.jit
def as_words(stored):
    """int32 [rows, columns / 4] of bytes [rows, columns]."""
    if stored.dtype == tl.int32:
        words = stored
    else:
        parts = stored.reshape(stored.shape[0], stored.shape[1] // 4, 4).to(tl.int32)
        words = tl.sum(parts << (8 * tl.arange(0, 4))[None, None, :], axis=2)
    return words


@triton.jit
def of_rows(
    scale, apart, expert, w_row, half, N: tl.constexpr, GROUP_N: tl.constexpr, RUNS_ON: tl.constexpr,
    STRIDES: tl.constexpr,
):  # fmt: skip
    """Where the first of each weight row's scales is; those of the up half are `apart` unless the groups run on."""
    if GROUP_N == 0:
        at = w_row * 0
    elif RUNS_ON:
        at = (w_row + half * N) // GROUP_N
    else:
        at = w_row // GROUP_N
    start = expert.to(tl.int64) * STRIDES[0]
    return scale + start + (half.to(tl.int64) * apart if not RUNS_ON else 0) + at * STRIDES[1]


@triton.jit
def _scale_at(
    inner,
    k,
    w_valid,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_K: tl.constexpr,
    EXACT: tl.constexpr,
    STRIDES: tl.constexpr,
):
    """Scales as stored of columns k .. k + BLOCK_K - 1: [rows, groups] where EXACT, else [rows] of the only group."""
    if inner is None:
        stored = 0
    elif EXACT:
        group = k // GROUP_K + tl.arange(0, BLOCK_K // GROUP_K)
        mask = w_valid[:, None] & (group < (K + GROUP_K - 1) // GROUP_K)[None, :]
        pointers = inner[:, None] + group[None, :] * STRIDES[2]
        if STRIDES[1] % 4 == 0:
            stored = load_stored_scale(pointers, mask)
        else:
            # Words can be fetched ahead, bytes cannot: 0.93 of the time (gpt-oss-120b's dimensions, T = 64, an H100).
            at = pointers.to(tl.int64)
            word = tl.load((at & -4).to(tl.pointer_type(tl.int32)), mask=mask, other=0)
            stored = (word >> (8 * (at & 3)).to(tl.int32)).to(tl.uint8)
            if inner.dtype.element_ty != tl.uint8:
                stored = stored.to(inner.dtype.element_ty, bitcast=True)
    else:
        group = k // GROUP_K
        stored = load_stored_scale(inner + group * STRIDES[2], w_valid & (k < K))
    return stored


@triton.jit
def packed_tile(
    a,
    a_desc,
    a_row,
    row_valid,
    row_start,
    w,
    w_desc,
    scales,
    up_offset,
    expert,
    n_start,
    N: tl.constexpr,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    A_TMA: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP_STRIDES: tl.constexpr,
    ZERO_STRIDES: tl.constexpr,
    OUTER_STRIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 accumulator [BLOCK_M, BLOCK_N] of a tile: sum over k of a[row, k] * decoded w[expert, n, k].

    A scale of a power of two, or of few bits on a code of two, is multiplied in bf16, where the result is exact; any
    other where a group's sum is complete; one for a whole row of the weight at the end.

    Args: see `mm_tile.mm_tile`;
        scales: (scale of groups of columns, zero points, scale of rows) and, of each, elements from the gate half to
            the up half; None for what is absent.
        PACKED: see `launch.ExpertMM.packed`; the strides are those of the three scales.
    """
    CODE: tl.constexpr = PACKED[0]
    PACK: tl.constexpr = PACKED[1]
    EXACT: tl.constexpr = PACKED[2]
    GROUP_N: tl.constexpr = PACKED[3]
    GROUP_K: tl.constexpr = PACKED[4]
    RUNS_ON: tl.constexpr = PACKED[5]
    OUTER_N: tl.constexpr = PACKED[6]
    OUTER_RUNS_ON: tl.constexpr = PACKED[7]
    inner, zeros, outer, inner_apart, zeros_apart, outer_apart = scales
    w_row, w_valid = weight_rows(n_start, N, BLOCK_N, GLU)
    half = halves_of(BLOCK_N, GLU, SWAPPED)
    if inner is not None:
        inner = of_rows(inner, inner_apart, expert, w_row, half, N, GROUP_N, RUNS_ON, GROUP_STRIDES)
    if zeros is not None:
        zeros = of_rows(zeros, zeros_apart, expert, w_row, half, N, GROUP_N, RUNS_ON, ZERO_STRIDES)
    COLUMNS: tl.constexpr = BLOCK_K // PACK
    PER_WORD: tl.constexpr = 1 if PACK == 1 else 8  # codes that are decoded together
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # fmt: off
        stored = load_weight(
            w, w_desc, up_offset, w_row, w_valid, expert, n_start, k // PACK, K // PACK, W_STRIDES, BLOCK_N, COLUMNS,
            GLU, W_LOAD, SWAPPED, BOTH,
        ).T
        # fmt: on
        zero = None
        if zeros is not None:
            group = k // GROUP_K if GROUP_K > 0 else 0
            zero = tl.load(zeros + group * ZERO_STRIDES[2], mask=w_valid, other=0)[:, None]
        scale = _scale_at(inner, k, w_valid, K, BLOCK_K, GROUP_K, EXACT, GROUP_STRIDES)
        if EXACT:
            factor = decode_scale(scale)
            if CODE == E2M1:
                factor *= E2M1_FACTOR
            if not INTERPRETED:
                factor = factor.to(tl.bfloat16)
            factor = tl.broadcast_to(factor[:, :, None], (BLOCK_N, BLOCK_K // GROUP_K, GROUP_K // PER_WORD))
            factor = factor.reshape(BLOCK_N, BLOCK_K // PER_WORD)
        summed = accumulator if (EXACT or inner is None) else tl.zeros_like(accumulator)
        rows = load_rows(a, a_desc, a_row, row_valid, row_start, k, K, A_STRIDE, BLOCK_K, A_TMA)
        if PACK == 1:
            decoded = decode_one(stored, zero, CODE)
            if EXACT:
                decoded *= factor
        else:
            decoded = decode_words(as_words(stored), zero, CODE)
            if EXACT:
                decoded *= factor[:, :, None, None]
            # A thread of the product has columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of every 16; it gets the q-th of four
            # runs of codes, halves of a word as neighbours.
            decoded = decoded.reshape(BLOCK_N, 4, BLOCK_K // 32, 2, 4).permute(0, 2, 4, 1, 3).reshape(BLOCK_N, BLOCK_K)
            rows = rows.reshape(BLOCK_M, 4, BLOCK_K // 32, 2, 4).permute(0, 2, 4, 1, 3).reshape(BLOCK_M, BLOCK_K)
        if INTERPRETED:
            rows = rows.to(tl.float32)
        summed = tl.dot(decoded, rows.T, summed, input_precision="ieee")
        if inner is not None and not EXACT:
            factor = decode_scale(scale)
            accumulator += summed * factor[:, None]
        else:
            accumulator = summed
    if CODE == E2M1:
        accumulator *= E2M1_UNIT
    if outer is not None:
        pointers = of_rows(outer, outer_apart, expert, w_row, half, N, OUTER_N, OUTER_RUNS_ON, OUTER_STRIDES)
        factor = load_scale(pointers, w_valid)
        accumulator *= factor[:, None]
    return accumulator.T
