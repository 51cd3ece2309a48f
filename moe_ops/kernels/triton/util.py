"""What every Triton kernel here shares: interpreter flag, rounding casts, programmatic launch, tile lookup.

The CPU interpreter (`TRITON_INTERPRET=1`, set before this module is imported) computes bf16 arithmetic wrongly and
truncates float casts, so kernels load, `.to(tl.float32)` at once, compute in fp32, and store through `round_to`.

Sizes that change from call to call (tokens, pairs, capacity) are marked `do_not_specialize`: otherwise a first batch
that is not a multiple of 16 would compile its kernels anew.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def cdiv(numerator: int, denominator: int) -> int:
    """ceil(numerator / denominator) for non-negative integers."""
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make `tensor`'s GPU current for a launch. Free when it already is: Triton launches on the current device."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.get_device())
    return nullcontext()


def unit_stride(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, copied if its last dimension is strided."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """With programmatic dependent launch, wait for the previous kernel's writes; otherwise nothing."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_release(PDL: tl.constexpr):
    """With programmatic dependent launch, let the next kernel start its prologue; otherwise nothing."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Round fp32 `x` to DTYPE, to nearest even: one conversion instruction on a GPU.

    The interpreter truncates to bf16 and mis-rounds e4m3, so there the value is first moved onto DTYPE's grid with
    exact fp32 and integer steps, which makes the conversion exact.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        if DTYPE == tl.bfloat16:
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
        elif DTYPE == tl.float8e4nv:
            rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
            subnormal = ((tl.abs(x) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)  # to multiples of 2^-9
            rounded = tl.where(tl.abs(x) < 0.015625, subnormal | (bits & -0x80000000), rounded)
            x = tl.where(x == x, rounded, 0x7FF00000).to(tl.float32, bitcast=True)  # e4m3's NaN: three ones
    return x.to(DTYPE)


@triton.jit
def widen(x):
    """`x` in fp32. The interpreter reads a NaN of e4m3 as 480, which is no number of e4m3."""
    wide = x.to(tl.float32)
    if INTERPRETED:
        if x.dtype == tl.float8e4nv:
            wide = tl.where(tl.abs(wide) == 480.0, float("nan"), wide)
    return wide


@triton.jit
def find_tile(extents_ptr, num_rows, pid_m, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BATCHED: tl.constexpr):
    """Which expert's rows tile `pid_m` covers when every expert's rows are cut into tiles of BLOCK_M.

    Tiles are numbered expert by expert, so any grid of at least `ceil(rows / BLOCK_M) + min(E, rows)` programs covers
    all rows, and programs past the last tile learn it here. One vector load of `extents` and one scan: no tile table,
    no extra kernel.

    Args:
        extents_ptr: [E] i32, cumulative row ends; BATCHED: rows in use of each expert's block of rows. Clamped, so
            that no value leads out of bounds.
        num_rows: rows of all experts; BATCHED: of each expert's block.
        pid_m: tile number.
        E: number of experts; BLOCK_E: a power of two >= E.

    Returns:
        (expert, row_start, row_end, valid): the tile is rows row_start .. min(row_start + BLOCK_M, row_end) - 1, and
        row_end is where its expert ends. When not valid: expert E - 1 and an empty range.
    """
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(extents_ptr + e, mask=e < E, other=0)
    ends = tl.minimum(tl.maximum(ends, 0), num_rows)
    if BATCHED:
        starts = tl.where(e < E, e * num_rows, 0)
        ends += starts
    else:
        starts = tl.load(extents_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
        starts = tl.minimum(tl.maximum(starts, 0), num_rows)
    tiles = (ends - starts + (BLOCK_M - 1)) // BLOCK_M
    tile_ends = tl.cumsum(tiles, axis=0)
    owner = (pid_m < tile_ends) & (pid_m >= tile_ends - tiles)
    # Exactly one lane owns a valid tile, so each sum reads that lane out (0 when there is none).
    row_start = tl.sum(tl.where(owner, starts + (pid_m - tile_ends + tiles) * BLOCK_M, 0), axis=0)
    row_end = tl.sum(tl.where(owner, ends, 0), axis=0)
    expert = tl.sum(tl.where(owner, e, 0), axis=0)
    valid = row_end > row_start
    return tl.where(valid, expert, E - 1), row_start, row_end, valid


@triton.jit
def load_expert(topk_ids_ptr, expert_map_ptr, p, exists, E, E_GLOBAL):
    """The expert, 0 .. E - 1, that holds each pair `p`, or E for a pair to drop.

    Dropped: pairs outside `exists`, ids outside [0, E), and with an `expert_map` (i32 or i64 [E_GLOBAL], else None)
    ids outside it and those it maps outside [0, E). Compared before narrowing, so no int64 id wraps into range.
    """
    expert = tl.load(topk_ids_ptr + p, mask=exists, other=-1)
    if expert_map_ptr is not None:
        mapped = (expert >= 0) & (expert < E_GLOBAL)
        expert = tl.load(expert_map_ptr + expert, mask=mapped, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
