"""Quantisation arithmetic inlined into kernels: how scales are read, and one helper per scheme's activation side.

The helpers are the only place that computes these numbers, so a stand-alone quantise kernel and a GEMM epilogue that
quantises give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.util import INTERPRETED, round_to

E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-12)  # keeps an all-zero group's scale a normal number and its quotient 0


@triton.jit
def load_scale(pointers, mask=None):
    """fp32 scales, see `decode_scale`."""
    return decode_scale(load_stored_scale(pointers, mask))


@triton.jit
def load_stored_scale(pointers, mask=None):
    """Scales as they are stored; 0 where they do not exist."""
    if mask is None:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=0 if pointers.dtype.element_ty == tl.uint8 else 0.0)


@triton.jit
def decode_scale(stored):
    """fp32 of scales stored as a float or as e8m0: an exponent alone, which arrives as uint8."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int32) << 23
        bits = tl.where(stored == 0, 0x00400000, bits)  # 2^-127, a subnormal
        return tl.where(stored == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


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
def quantize_tile(x):
    """Quantise an fp32 tile to e4m3 with one scale per row: the 1x128 scheme when the tile has 128 columns.

    `scale = max(amax(|x|), 1e-12) / 448`, `q = e4m3(clamp(x / scale, -448, 448))`, both divisions IEEE-rounded, so
    that the numbers equal the eager reference's bit for bit. Zeros beyond a ragged edge change nothing. A NaN element
    stays NaN in `q`; a row with an infinity dequantises to NaN.

    Args:
        x: fp32 [M, G].

    Returns:
        (q, scale): float8e4nv [M, G] and fp32 [M].
    """
    amax = tl.max(tl.abs(x), axis=1)
    scale = tl.div_rn(tl.maximum(amax, AMAX_FLOOR), E4M3_MAX)
    clamped = tl.clamp(_divide_rows(x, scale), -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return round_to(clamped, tl.float8e4nv), scale
