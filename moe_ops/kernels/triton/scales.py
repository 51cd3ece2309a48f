"""Quantisation arithmetic inlined into kernels: how scales are read, and one helper per stored type of activations.

The helpers are the only place that computes these numbers, so a stand-alone quantise kernel and a GEMM epilogue that
quantises give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.util import INTERPRETED, round_to, widen

E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
WHOLE_NUMBERS = tl.constexpr(12582912.0)  # 1.5 * 2^23: fp32 beside it has no fraction, so adding it rounds to even
HALF_GROUP = tl.constexpr(128)  # columns of a row that have one unit as fp16
AMAX_FLOOR = tl.constexpr(1e-12)  # keeps an all-zero group's scale a normal number and its quotient 0


@triton.jit
def load_scale(pointers, mask=None):
    """fp32 scales, see `decode_scale`."""
    return decode_scale(load_stored_scale(pointers, mask))


@triton.jit
def load_stored_scale(pointers, mask=None):
    """Scales as they are stored; 0 where they do not exist."""
    if mask is None:
        stored = tl.load(pointers)
    else:
        stored = tl.load(pointers, mask=mask, other=0 if pointers.dtype.element_ty == tl.uint8 else 0.0)
    return stored


@triton.jit
def decode_scale(stored):
    """fp32 of scales stored as a float or as e8m0: an exponent alone, which arrives as uint8."""
    if stored.dtype == tl.uint8:
        bits = tl.maximum(stored.to(tl.int32) << 23, 0x00400000)  # 2^-127, a subnormal
        return tl.where(stored == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        return widen(stored)


@triton.jit
def load_row_scale(a_scale, a_row, row_valid, k, K: tl.constexpr, GROUP: tl.constexpr):
    """Scales [BLOCK_M] of a quantised activation tile, from [rows, ceil(K / GROUP)]."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    return tl.load(a_scale + a_row.to(tl.int64) * groups + k // GROUP, mask=row_valid, other=0.0)


@triton.jit
def _divide_rows(x, divisor):
    """IEEE-rounded `x / divisor[:, None]` with one real division per row instead of one per element.

    Markstein's correction: with a correctly rounded reciprocal r, q = x r is off by at most an ulp and the exact
    remainder x - q d (one fma) repairs it. Three instructions an element, against about a dozen for `div.rn`. Holds
    for normal quotients, and smaller ones are far below e4m3's least value.
    """
    if INTERPRETED:  # its fma rounds twice
        quotient = tl.div_rn(x, divisor[:, None])
    else:
        reciprocal = tl.div_rn(1.0, divisor)[:, None]
        estimate = x * reciprocal
        remainder = tl.fma(estimate, tl.broadcast_to(-divisor[:, None], x.shape), x)
        quotient = tl.fma(remainder, tl.broadcast_to(reciprocal, x.shape), estimate)
    return quotient


@triton.jit
def _power_of_two(exponent):
    """2^exponent, a normal number."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_exponent(amax):
    """Of the power of two that numbers of a group are in units of as fp16, which the group's largest magnitude is 2^14
    to 2^15 times, or a finite one beside an infinity less.
    """
    biased = amax.to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(biased, 15), 254) - 127 - 14


@triton.jit
def from_half(stored, amax):
    """fp32 of fp16 `stored` [M, G], see `store_as`, of groups whose largest magnitudes are `amax` [M]."""
    return stored.to(tl.float32) * _power_of_two(_half_exponent(amax))[:, None]


@triton.jit
def group_scale(amax, DTYPE: tl.constexpr):
    """fp32 scale of groups whose largest magnitudes are `amax`: what stores those as the largest number of DTYPE; of
    fp16, which is stored for a while, these themselves.
    """
    if DTYPE == tl.float16:
        return amax
    else:
        raised = tl.maximum(amax, AMAX_FLOOR, propagate_nan=tl.PropagateNan.ALL)
        return tl.div_rn(raised, INT8_MAX if DTYPE == tl.int8 else E4M3_MAX)


@triton.jit
def store_e4m3(quotient):
    """To nearest, saturating; NaN stays NaN."""
    clamped = tl.clamp(quotient, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return round_to(clamped, tl.float8e4nv)


@triton.jit
def _to_int8(quotient):
    """To nearest, ties to even, saturating; NaN, which int8 does not have, to 0: its group's scale is NaN."""
    whole = (tl.clamp(quotient, -INT8_MAX, INT8_MAX) + WHOLE_NUMBERS) - WHOLE_NUMBERS
    return tl.where(quotient == quotient, whole, 0.0).to(tl.int8)


@triton.jit
def store_as(x, scale, DTYPE: tl.constexpr):
    """fp32 `x` [M, G] over `scale` [M], rounded to DTYPE: int8, float8e4nv, or such numbers as bfloat16; or, `scale`
    being the largest magnitudes, fp16 in units of powers of two: at least eleven bits of whatever is not 2^28 times
    smaller than the largest.
    """
    if DTYPE == tl.float16:
        return round_to(x * _power_of_two(-_half_exponent(scale))[:, None], tl.float16)
    else:
        quotient = _divide_rows(x, scale)
        if DTYPE == tl.int8:
            return _to_int8(quotient)
        else:
            return store_e4m3(quotient).to(DTYPE)


@triton.jit
def largest_magnitude(x, DTYPE: tl.constexpr):
    """[M] of `x` [M, G]; NaN of a row with a NaN where DTYPE has none."""
    amax = tl.max(tl.abs(x), axis=1)
    if DTYPE == tl.int8:
        amax = tl.where(tl.max((x != x).to(tl.int32), axis=1) > 0, float("nan"), amax)
    return amax


@triton.jit
def quantize_tile(x, DTYPE: tl.constexpr):
    """Quantise an fp32 tile with one scale per row: the 1x128 scheme when the tile has 128 columns, a scale per token
    when it has all.

    `scale = max(amax(|x|), 1e-12) / largest`, `q = round(clamp(x / scale, -largest, largest))`, both divisions
    IEEE-rounded, so that the numbers equal the eager reference's bit for bit. Zeros beyond a ragged edge change
    nothing. A NaN element of e4m3 stays NaN in `q`, of int8 in the row's scale; a row with an infinity dequantises to
    NaN.

    Args:
        x: fp32 [M, G].
        DTYPE: float8e4nv, whose largest number is 448, or int8: 127.

    Returns:
        (q, scale): DTYPE [M, G] and fp32 [M].
    """
    scale = group_scale(largest_magnitude(x, DTYPE), DTYPE)
    return store_as(x, scale, DTYPE), scale
