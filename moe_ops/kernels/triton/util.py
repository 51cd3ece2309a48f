"""What every Triton kernel here shares: interpreter flag, rounding casts, programmatic launch, the walk through tiles.

The CPU interpreter (`TRITON_INTERPRET=1`, set before this module is imported) computes bf16 arithmetic wrongly and
truncates float casts, so kernels load, `.to(tl.float32)` at once, compute in fp32, and store through `round_to`.

Sizes that change from call to call (tokens, pairs, capacity) are marked `do_not_specialize`: otherwise a first batch
that is not a multiple of 16 would compile its kernels anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
CLEARED = tl.constexpr(256)  # words that a program makes 0 at a time


def cdiv(numerator: int, denominator: int) -> int:
    """ceil(numerator / denominator) for non-negative integers."""
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()


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
def uniform(x):
    """The scalar i32 `x`, which all lanes hold, as lane 0 has it.

    The compiler cannot tell that what a reduction left is the same in all lanes; a shuffle's result it knows to be.
    Then a loop's trip count and a descriptor's coordinates stay in uniform registers: on sm_90 a stream of tiles of
    128 x 256 takes 172 registers a thread instead of 254, of 128 x 128 98 instead of 135, so that two programs fit.
    """
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def cut_into_tiles(
    e,
    extents_ptr,
    num_rows,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TALL_M: tl.constexpr,
    N_TILES: tl.constexpr,
    BATCHED: tl.constexpr,
):
    """The table of work, in registers: every expert's rows are cut into tiles of BLOCK_M rows by N_TILES columns; those
    of an expert that has more into tiles of TALL_M, unless that is 0.

    An expert's tiles are neighbours and an expert without rows has none. One vector load and one scan a program, and a
    reduction a tile, which runs while products do: a table in memory would need a kernel of its own, or the sort to
    write one for the tile shape of each GEMM.

    Args:
        e: [a power of two >= E], counted from 0, in the layout that the table has.
        extents_ptr: [E] i32, cumulative row ends; BATCHED: rows in use of each expert's block of rows. Clamped, so
            that no value leads out of bounds.
        num_rows: rows of all experts; BATCHED: of each expert's block.

    Returns:
        (e, start, end, last): the expert's rows are start .. end - 1, its tiles end before tile `last`.
    """
    end = tl.load(extents_ptr + e, mask=e < E, other=0)
    end = tl.minimum(tl.maximum(end, 0), num_rows)
    if BATCHED:
        start = tl.where(e < E, e * num_rows, 0)
        end += start
    else:
        start = tl.load(extents_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
        start = tl.minimum(tl.maximum(start, 0), num_rows)
    return e, start, end, tl.cumsum(_row_tiles(end - start, BLOCK_M, TALL_M), axis=0) * N_TILES


@triton.jit
def _row_tiles(rows, BLOCK_M: tl.constexpr, TALL_M: tl.constexpr):
    """How many tiles an expert's rows fill."""
    rows = tl.maximum(rows, 0)
    if TALL_M == 0:
        return (rows + (BLOCK_M - 1)) // BLOCK_M
    else:
        return tl.where(rows > BLOCK_M, (rows + (TALL_M - 1)) // TALL_M, tl.minimum(rows, 1))


@triton.jit
def _add_each(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def find_tile(tile, table, BLOCK_M: tl.constexpr, TALL_M: tl.constexpr, N_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile number `tile` of the `table` of `cut_into_tiles`.

    Within an expert GROUP_M row tiles go along all columns together, so that neighbours share weights and rows in L2.

    Returns:
        (expert, row_start, row_end, n_tile): rows row_start .. min(row_start + height, row_end) - 1, where row_end is
        the end of the expert's and the height TALL_M if more than BLOCK_M rows are left; uniform. Past the last tile an
        empty range.
    """
    e, start, end, last = table
    first = last - _row_tiles(end - start, BLOCK_M, TALL_M) * N_TILES
    owner = (tile >= first) & (tile < last)
    # Exactly one lane owns a tile that exists, so each sum reads that lane out (0 when there is none).
    expert, begin, row_end, first = tl.reduce(
        (tl.where(owner, e, 0), tl.where(owner, start, 0), tl.where(owner, end, 0), tl.where(owner, first, 0)),
        0,
        _add_each,
    )
    place = tile - first
    group = place // (GROUP_M * N_TILES) * GROUP_M
    place %= GROUP_M * N_TILES
    height = tl.minimum(_row_tiles(row_end - begin, BLOCK_M, TALL_M) - group, GROUP_M)
    height = tl.maximum(height, 1)
    row_start = begin + (group + place % height) * (BLOCK_M if TALL_M == 0 else TALL_M)
    return uniform(expert), uniform(row_start), uniform(row_end), uniform(place // height)


@triton.jit
def clear_part(words_ptr, part, parts, COUNT):
    """Make words 0, this part of so many of them."""
    for first in range(part * CLEARED, COUNT, parts * CLEARED):
        word = first + tl.arange(0, CLEARED)
        tl.store(words_ptr + word, tl.zeros([CLEARED], tl.int32), mask=word < COUNT)


@triton.jit
def load_expert(topk_ids_ptr, expert_map_ptr, p, exists, E, E_GLOBAL):
    """`held_expert` of each pair `p`; a pair outside `exists` is one to drop."""
    return held_expert(tl.load(topk_ids_ptr + p, mask=exists, other=-1), expert_map_ptr, E, E_GLOBAL)


@triton.jit
def held_expert(expert, expert_map_ptr, E, E_GLOBAL):
    """The place 0 .. E - 1 of an expert among those held here, or E for a pair to drop.

    Dropped: ids outside [0, E), and with an `expert_map` (i32 or i64 [E_GLOBAL], else None) ids outside it and those
    it maps outside [0, E). Compared before narrowing, so no int64 id wraps into range.
    """
    if expert_map_ptr is not None:
        mapped = (expert >= 0) & (expert < E_GLOBAL)
        expert = tl.load(expert_map_ptr + expert, mask=mapped, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def is_counted(load_ptr, asks):
    """The flag of a layer's row of counters (`moe_ops.counters`), 0 without one and where not `asks`.

    Read at the start and used at the end it costs nobody time; `volatile`, so that ptxas does not move it to its use.
    """
    if load_ptr is None:
        return 0
    else:
        return tl.load(load_ptr.to(tl.pointer_type(tl.int32)), mask=asks, other=0, volatile=True)


@triton.jit
def count_pairs(load_ptr, counted, expert, pairs, mask):
    """Add `pairs` to the counters of `expert` where `mask`, if the flag `counted` is set. Sums of integers, so that no
    order of the programs shows.
    """
    if load_ptr is not None:
        if counted != 0:
            tl.atomic_add(load_ptr + 1 + expert, pairs.to(tl.int64), mask=mask, sem="relaxed")


@triton.jit
def count_pair(load_ptr, counted, expert):
    """`count_pairs` of a pair, whose expert is held here: by the one lane that could, not by all that agree on it, of
    whom ptxas would have a vote (`hopper._by_one_lane`).
    """
    lane = tl.arange(0, 32)
    count_pairs(load_ptr, counted, expert + lane, lane * 0 + 1, lane == 0)
