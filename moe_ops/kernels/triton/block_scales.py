"""Rows of `meta.blocks` on the device: how they are quantised, stored and, for the interpreter, decoded."""

from __future__ import annotations

import triton
import triton.language as tl

from meta import blocks
from moe_ops.kernels.triton.scales import AMAX_FLOOR, E4M3_MAX, quantize_tile, store_e4m3
from moe_ops.kernels.triton.util import round_to

MX_BLOCK = tl.constexpr(blocks.MX_BLOCK)
NV_BLOCK = tl.constexpr(blocks.NV_BLOCK)
FACTOR_BYTES = tl.constexpr(blocks.FACTOR_BYTES)
E2M1_MAX = tl.constexpr(blocks.E2M1_MAX)
INFINITY = tl.constexpr(0x7F800000)  # bits of fp32; those of NaN are larger
LEAST_E4M3 = tl.constexpr(2.0**-9)


@triton.jit
def magnitude_bits(x):
    """Bits of fp32 magnitudes, which are in the order of these; NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quantize_mx(x):
    """(e4m3 [M, 32], exponents u8 [M]) of fp32 `x` [M, 32], see `meta.blocks.MxRows`."""
    bits = tl.max(magnitude_bits(x), axis=1)
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    exponent = tl.where(bits >= INFINITY, 255, exponent)
    inverse = (tl.where(exponent == 255, 127, 254 - exponent) << 23).to(tl.float32, bitcast=True)
    return store_e4m3(x * inverse[:, None]), exponent.to(tl.uint8)


@triton.jit
def quantize_group(x, DTYPE: tl.constexpr, SCALE: tl.constexpr):
    """(stored, scales [M]) of fp32 `x` [M, group] in the format whose elements are DTYPE and whose scales are SCALE."""
    if SCALE == tl.uint8:
        stored, scale = quantize_mx(x)
    else:
        stored, scale = quantize_tile(x, DTYPE)
    return stored, scale


@triton.jit
def nv_factor(bits):
    """fp32 factor of a row from the bits of its largest magnitude."""
    amax = tl.maximum(bits.to(tl.float32, bitcast=True), AMAX_FLOOR)
    return tl.where(bits >= INFINITY, float("nan"), tl.div_rn(amax, E4M3_MAX * E2M1_MAX))


@triton.jit
def _e2m1(x):
    """Codes (int32) of fp32 `x`, to nearest, ties to even, saturating; 0 of NaN."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return tl.where(x == x, code | ((x.to(tl.int32, bitcast=True) >> 28) & 8), 0)


@triton.jit
def nv_scale_bytes(K):
    """Bytes of a row's scales: `meta.blocks.NvRows.scale_width`."""
    return FACTOR_BYTES + 16 * ((K + 16 * NV_BLOCK - 1) // (16 * NV_BLOCK))


@triton.jit
def store_nv(x, factor, r, first, exists, q_ptr, scale_ptr, K):
    """Quantise columns `first` and on of rows `r` [M] i64, fp32 `x` [M, C], by the rows' `factor` [M], and store codes
    and scales; whatever is past column K - 1 is left out, and rows that do not exist.
    """
    M: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    wide = x.reshape(M, C // NV_BLOCK, NV_BLOCK)
    part = tl.div_rn(tl.div_rn(tl.max(tl.abs(wide), axis=2), E2M1_MAX), factor[:, None])
    scale = round_to(tl.clamp(part, LEAST_E4M3, E4M3_MAX), tl.float8e4nv)
    inverse = tl.div_rn(1.0, scale.to(tl.float32) * factor[:, None])
    low, high = tl.split(_e2m1(wide * inverse[:, :, None]).reshape(M, C // 2, 2))
    pair = first // 2 + tl.arange(0, C // 2)[None, :]
    tl.store(
        q_ptr + r[:, None] * (K // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=exists[:, None] & (pair < K // 2)
    )
    block = first // NV_BLOCK + tl.arange(0, C // NV_BLOCK)[None, :]
    place = scale_ptr + (r * nv_scale_bytes(K))[:, None] + FACTOR_BYTES + block
    tl.store(place, scale.to(tl.uint8, bitcast=True), mask=exists[:, None] & (block * NV_BLOCK < K))


@triton.jit
def store_nv_factor(factor, r, exists, scale_ptr, K):
    """Store the factors [M] of rows `r` [M] i64."""
    place = (scale_ptr + r * nv_scale_bytes(K)).to(tl.pointer_type(tl.float32))
    tl.store(place, factor, mask=exists)


@triton.jit
def store_nv_rows(x, r, exists, q_ptr, scale_ptr, K):
    """Quantise whole rows `r` [M] i64, fp32 `x` [M, >= K], and store all of them."""
    factor = nv_factor(tl.max(magnitude_bits(x), axis=1))
    store_nv(x, factor, r, 0, exists, q_ptr, scale_ptr, K)
    store_nv_factor(factor, r, exists, scale_ptr, K)


@triton.jit
def quantize_nv_rows(
    first, x_ptr, q_ptr, scale_ptr, rows, K, stride_r, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr
):
    """Quantise rows first .. first + BLOCK_M - 1 of K <= COLUMNS columns, STEP of them at a time, read twice: for the
    rows' factors, and for the codes.
    """
    r = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    exists = r < rows
    bits = tl.zeros([BLOCK_M], tl.int32)
    for start in range(0, COLUMNS, STEP):
        k = start + tl.arange(0, STEP)[None, :]
        x = tl.load(x_ptr + r[:, None] * stride_r + k, mask=exists[:, None] & (k < K), other=0.0).to(tl.float32)
        bits = tl.maximum(bits, tl.max(magnitude_bits(x), axis=1))
    factor = nv_factor(bits)
    for start in range(0, COLUMNS, STEP):
        k = start + tl.arange(0, STEP)[None, :]
        x = tl.load(x_ptr + r[:, None] * stride_r + k, mask=exists[:, None] & (k < K), other=0.0).to(tl.float32)
        store_nv(x, factor, r, start, exists, q_ptr, scale_ptr, K)
    store_nv_factor(factor, r, exists, scale_ptr, K)


@triton.jit
def load_nv_factor(scale_ptr, r, exists, K: tl.constexpr):
    """The factors [M] of rows `r` [M]."""
    place = (scale_ptr + r.to(tl.int64) * nv_scale_bytes(K)).to(tl.pointer_type(tl.float32))
    return tl.load(place, mask=exists, other=0.0)
