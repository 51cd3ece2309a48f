"""One output tile of an expert GEMM whose weights are codes of four or eight bits and whose activations are bf16.

The stored bytes come by descriptor and are decoded in registers, where they are the first operand of the product; the
rows are the second. The accumulator is therefore the tile transposed, and weight rows fill the 64 rows that the tensor
core always computes, however few tokens there are. Two codes of a byte are columns 2 j and 2 j + 1 of the weight: they
are multiplied as two tiles, of the even and of the odd columns, so that no code moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.scales import decode_scale, load_scale, load_stored_scale
from moe_ops.kernels.triton.tile_loads import BOTH, CONCAT, load_rows, load_weight, weight_rows
from moe_ops.kernels.triton.util import INTERPRETED, widen

# e2m1 in place of the last exponent bits of a bf16 number is 2^-126 of its value; the scale of its group brings 2^62 of
# that back, the end of the sum the rest. So scales from 2^-60 to 2^64 leave no bf16 number out of range.
E2M1_UNIT = tl.constexpr(2.0**64)
E2M1_FACTOR = tl.constexpr(2.0**62)

E2M1 = tl.constexpr(0)
INT4 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
INT8 = tl.constexpr(3)
WIDE_M = tl.constexpr(128)  # rows of a tile from which on they are the product's first operand
#: Names of `meta.formats.CODES`.
CODE_NUMBERS = {"e2m1": E2M1.value, "int4": INT4.value, "e4m3": E4M3.value, "int8": INT8.value}


@triton.jit
def _e2m1_pairs(tile):
    """bf16 (even, odd) of bytes of two e2m1 codes, times 2^-126: their bits at the ends of the fields."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 wide<2>, low<2>, part<4>;
        prmt.b32 wide0, $4, 0, 0x1404;
        prmt.b32 wide1, $4, 0, 0x3424;
        shl.b32 low0, wide0, 4;
        shl.b32 low1, wide1, 4;
        shr.u32 part0, low0, 6;
        shr.u32 part1, low1, 6;
        shr.u32 part2, wide0, 6;
        shr.u32 part3, wide1, 6;
        and.b32 part0, part0, 0x01C001C0;
        and.b32 part1, part1, 0x01C001C0;
        and.b32 part2, part2, 0x01C001C0;
        and.b32 part3, part3, 0x01C001C0;
        lop3.b32 $0, low0, 0x80008000, part0, 0xEA;
        lop3.b32 $1, low1, 0x80008000, part1, 0xEA;
        lop3.b32 $2, wide0, 0x80008000, part2, 0xEA;
        lop3.b32 $3, wide1, 0x80008000, part3, 0xEA;
        }
        """,
        "=r,=r,=r,=r,r",
        [tile],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _int4_pairs(tile):
    """bf16 (even, odd) of bytes of two codes of four bits, each 128 + code: the last bits of a number in [128, 256)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 wide<2>, high<2>;
        prmt.b32 wide0, $4, 0, 0x4140;
        prmt.b32 wide1, $4, 0, 0x4342;
        shr.u32 high0, wide0, 4;
        shr.u32 high1, wide1, 4;
        lop3.b32 $0, wide0, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $1, wide1, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $2, high0, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $3, high1, 0x000F000F, 0x43004300, 0xEA;
        }
        """,
        "=r,=r,=r,=r,r",
        [tile],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _int8_wide(tile):
    """fp32 of int8: bits of 2^23 + 128 + code, less as much; the conversion instruction takes four times as long."""
    bits = (tile.to(tl.int32) & 0xFF) ^ 0x4B000080
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _e2m1_value(nibble):
    """fp32 of e2m1, for the interpreter."""
    exponent, mantissa = (nibble >> 1) & 3, (nibble & 1).to(tl.float32)
    scale = (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * scale)
    return tl.where(nibble >= 8, -magnitude, magnitude)


@triton.jit
def decode_pairs(tile, zero, CODE: tl.constexpr):
    """(even, odd) columns of a tile of bytes: e2m1 times 2^-126, int4 less `zero` [rows, 1] or 8."""
    if INTERPRETED:
        low, high = tile.to(tl.int32) & 15, tile.to(tl.int32) >> 4
        if CODE == E2M1:
            even, odd = (
                _e2m1_value(low) * (1.0 / E2M1_UNIT / E2M1_FACTOR),
                _e2m1_value(high) * (1.0 / E2M1_UNIT / E2M1_FACTOR),
            )
        else:
            shift = 8 if zero is None else zero.to(tl.int32)
            even, odd = (low - shift).to(tl.float32), (high - shift).to(tl.float32)
    elif CODE == E2M1:
        even, odd = _e2m1_pairs(tile)
    else:
        even, odd = _int4_pairs(tile)
        if zero is None:
            shift = tl.full((1, 1), 136.0, tl.bfloat16)
        else:
            shift = (zero.to(tl.float32) + 128.0).to(tl.bfloat16)
        even, odd = even - shift, odd - shift
    return even, odd


@triton.jit
def decode_one(tile, zero, CODE: tl.constexpr):
    """bf16 of a tile of e4m3, or of int8 less `zero` [rows, 1]."""
    if CODE == E4M3:
        value = widen(tile) if INTERPRETED else tile.to(tl.bfloat16)
    else:
        value = _int8_wide(tile)
        if zero is not None:
            value -= zero.to(tl.float32)
        value = value if INTERPRETED else value.to(tl.bfloat16)
    return value


@triton.jit
def _row_pairs(a, a_row, row_valid, k, K: tl.constexpr, A_STRIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    """(even, odd) columns [BLOCK_M, BLOCK_K / 2] of bf16 rows, which are read as words of two."""
    pair = k // 2 + tl.arange(0, BLOCK_K // 2)
    words = a.to(tl.pointer_type(tl.int32)) + a_row.to(tl.int64)[:, None] * (A_STRIDE // 2) + pair[None, :]
    mask = row_valid[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (pair < K // 2)[None, :]
    word = tl.load(words, mask=mask, other=0)
    if INTERPRETED:
        return (word << 16).to(tl.float32, bitcast=True), (word & -0x10000).to(tl.float32, bitcast=True)
    return word.to(tl.int16).to(tl.bfloat16, bitcast=True), (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _of_rows(
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
        stored = load_stored_scale(inner[:, None] + group[None, :] * STRIDES[2], mask)
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
    if GLU == CONCAT:
        half = tl.arange(0, BLOCK_N) // (BLOCK_N // 2)
        if SWAPPED:
            half = 1 - half
    else:
        half = tl.zeros((BLOCK_N,), tl.int32)
    if inner is not None:
        inner = _of_rows(inner, inner_apart, expert, w_row, half, N, GROUP_N, RUNS_ON, GROUP_STRIDES)
    if zeros is not None:
        zeros = _of_rows(zeros, zeros_apart, expert, w_row, half, N, GROUP_N, RUNS_ON, ZERO_STRIDES)
    COLUMNS: tl.constexpr = BLOCK_K // PACK
    # Many rows: they are the product's first operand, and the decoded weights the second, which all warps share.
    WIDE: tl.constexpr = BLOCK_M >= WIDE_M
    accumulator = tl.zeros((BLOCK_M, BLOCK_N) if WIDE else (BLOCK_N, BLOCK_M), tl.float32)
    stored_scale = _scale_at(inner, 0, w_valid, K, BLOCK_K, GROUP_K, EXACT, GROUP_STRIDES)
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
        scale = stored_scale
        # The next step's come while this one is multiplied: loads of single bytes have no pipeline of their own.
        stored_scale = _scale_at(inner, k + BLOCK_K, w_valid, K, BLOCK_K, GROUP_K, EXACT, GROUP_STRIDES)
        if EXACT:
            factor = decode_scale(scale)
            if CODE == E2M1:
                factor *= E2M1_FACTOR
            if not INTERPRETED:
                factor = factor.to(tl.bfloat16)
            factor = tl.broadcast_to(factor[:, :, None], (BLOCK_N, BLOCK_K // GROUP_K, GROUP_K // PACK))
            factor = factor.reshape(BLOCK_N, COLUMNS)
        summed = accumulator if (EXACT or inner is None) else tl.zeros_like(accumulator)
        if PACK == 2:
            w_even, w_odd = decode_pairs(stored, zero, CODE)
            if EXACT:
                w_even *= factor
                w_odd *= factor
        else:
            decoded = decode_one(stored, zero, CODE)
            if EXACT:
                decoded *= factor
        if PACK == 2 and not WIDE:
            even, odd = _row_pairs(a, a_row, row_valid, k, K, A_STRIDE, BLOCK_K)
            summed = tl.dot(w_even, even.T, summed, input_precision="ieee")
            summed = tl.dot(w_odd, odd.T, summed, input_precision="ieee")
        else:
            rows = load_rows(a, a_desc, a_row, row_valid, row_start, k, K, A_STRIDE, BLOCK_K, A_TMA)
            if INTERPRETED:
                rows = rows.to(tl.float32)
            if WIDE:
                if PACK == 2:
                    decoded = tl.join(w_even, w_odd).reshape(BLOCK_N, BLOCK_K)
                summed = tl.dot(rows, decoded.T, summed, input_precision="ieee")
            else:
                summed = tl.dot(decoded, rows.T, summed, input_precision="ieee")
        if inner is not None and not EXACT:
            factor = decode_scale(scale)
            accumulator += summed * (factor[None, :] if WIDE else factor[:, None])
        else:
            accumulator = summed
    if CODE == E2M1:
        accumulator *= E2M1_UNIT
    if outer is not None:
        pointers = _of_rows(outer, outer_apart, expert, w_row, half, N, OUTER_N, OUTER_RUNS_ON, OUTER_STRIDES)
        factor = load_scale(pointers, w_valid)
        accumulator *= factor[None, :] if WIDE else factor[:, None]
    return accumulator if WIDE else accumulator.T
