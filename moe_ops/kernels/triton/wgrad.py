"""Weight gradient of a grouped GEMM: one product per expert over that expert's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from meta.arch import FIRST_CAPABILITY
from moe_ops.kernels.triton.launch import (
    PROGRAM_BYTES,
    TYPICAL,
    descriptor_strides,
    for_gluon,
    hopper_with_gluon,
    ragged_rows,
)
from moe_ops.kernels.triton.layer import gpu_of
from moe_ops.kernels.triton.permute import scatter_rows
from moe_ops.kernels.triton.programs import multiprocessors, side_by_side
from moe_ops.kernels.triton.record import launch, on_device, with_memory
from moe_ops.kernels.triton.tile_loads import RAGGED
from moe_ops.kernels.triton.util import INTERPRETED, cdiv, next_power_of_2, round_to, uniform

Tensor = torch.Tensor

# Tiles: with as many programs as there are multiprocessors about a square of the weight. One row of tiles after another
# read the rows of Mixtral-8x7B's down projection, 117 MB an expert, once for each: 6734 us, T = 16384; torch's 5908.
GROUP_N = tl.constexpr(16)
MANY_ROWS = 256  # of an expert: from here on the arithmetic is the time, whatever the columns
# Of an expert, from which on `wgrad_mm` is faster; below, what is written is the time. us of both products of a layer
# by this kernel and by that on an H200: Qwen3-30B-A3B, T = 1024 (64 an expert) 392 and 407, T = 2048 532 and 453.
ROWS_FOR_GROUPS = 96
GATHERED_COLUMNS = 1536  # I, up to which gathered tokens are faster, whatever their number: `gathers`
PIECE = 256  # columns of tokens whose rows are copied at once, at the least


class Tile(NamedTuple):
    """A tile of [block_n, block_k] of a weight, and the rows that are multiplied at once."""

    block_n: int
    block_k: int
    block_r: int
    num_warps: int
    num_stages: int


@triton.jit
def _load(
    x,
    desc,
    first,
    end,
    column,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows first .. first + ROWS - 1, columns column .. column + COLUMNS - 1; zero from row `end` on.

    By descriptor see `launch.ragged_rows`. Rows that threads gather from tokens took 1.3 to 1.6 times as long as
    copies of them with the time to make these (Qwen3-30B-A3B, T = 4096 and 16384, on an H200).
    """
    if desc is not None:
        return desc.load([RAGGED, end, RAGGED - (end - first), column]).reshape(ROWS, COLUMNS)
    else:
        row = first + tl.arange(0, ROWS)
        exists = row < end
        at = column + tl.arange(0, COLUMNS)
        mask = exists[:, None]
        if WIDTH % COLUMNS != 0:
            mask = mask & (at < WIDTH)[None, :]
        return tl.load(x + row.to(tl.int64)[:, None] * WIDTH + at[None, :], mask=mask, other=0.0)


@triton.jit
def _store(
    out,
    desc,
    accumulator,
    expert,
    n,
    k,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Round a tile, and write what of it exists; by descriptor COLUMNS at a time, all or half of them."""
    result = round_to(accumulator, out.dtype.element_ty)
    if desc is not None:
        if COLUMNS < BLOCK_K:
            left, right = tl.split(result.reshape(BLOCK_N, 2, COLUMNS).permute(0, 2, 1))
            desc.store([expert, n, k], left.reshape(1, BLOCK_N, COLUMNS))
            desc.store([expert, n, k + COLUMNS], right.reshape(1, BLOCK_N, COLUMNS))
        else:
            desc.store([expert, n, k], result.reshape(1, BLOCK_N, BLOCK_K))
    else:
        row, column = n + tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K)
        pointers = out + expert.to(tl.int64) * STRIDES[0] + row.to(tl.int64)[:, None] * STRIDES[1] + column[None, :]
        tl.store(pointers, result, mask=(row < N)[:, None] & (column < K)[None, :])


@triton.jit
def _steps(offsets, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """How often this program multiplies: for each of its tiles once for every ROWS rows of the expert, or once."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(offsets + e, mask=e < E, other=0)
    start = tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0)
    of_tile = tl.maximum((end - start + (ROWS - 1)) // ROWS, 1)
    # Tiles t < x with t % programs == program: cdiv(x - program, programs).
    programs = tl.num_programs(0)
    below = (e * TILES - tl.program_id(0) + (programs - 1)) // programs
    upto = ((e + 1) * TILES - tl.program_id(0) + (programs - 1)) // programs
    return uniform(tl.sum(tl.where(e < E, (upto - tl.maximum(below, 0)) * of_tile, 0), axis=0))


@triton.jit
def tile_at(tile, N_TILES: tl.constexpr, K_TILES: tl.constexpr):
    """(expert, row of tiles, column of tiles). Neighbours are GROUP_N tiles high, so that those under way at once share
    what they read in L2.
    """
    TILES: tl.constexpr = N_TILES * K_TILES
    expert, place = tile // TILES, tile % TILES
    group = place // (GROUP_N * K_TILES) * GROUP_N
    height = tl.minimum(N_TILES - group, GROUP_N)
    place %= GROUP_N * K_TILES
    return expert, group + place % height, place // height


@triton.jit
def rows_of_expert(offsets, expert):
    """(first, end) of an expert's rows."""
    return tl.load(offsets + expert - 1, mask=expert > 0, other=0), tl.load(offsets + expert)


@triton.jit
def _wgrad_kernel(
    grad,
    grad_desc,
    x,
    x_desc,
    offsets,
    out,
    out_desc,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: every num_programs-th tile [BLOCK[0], BLOCK[1]] of out[e] = sum over the expert's rows r of
    grad[r].T x[r], BLOCK[2] rows at a time, in row order.

    One loop over tiles and rows: the next tile's loads run under this tile's store. FLOPs: 2 R N K. Bytes:
    R (N cdiv(K, BLOCK[1]) + K cdiv(N, BLOCK[0])) read, most of them from L2, and E N K written; an expert without rows
    multiplies zeros once.
    """
    BLOCK_N: tl.constexpr = BLOCK[0]
    BLOCK_K: tl.constexpr = BLOCK[1]
    BLOCK_R: tl.constexpr = BLOCK[2]
    STORE: tl.constexpr = BLOCK[3]
    BLOCK_E: tl.constexpr = BLOCK[4]
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    K_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = N_TILES * K_TILES
    programs = tl.num_programs(0)
    tile = tl.program_id(0) - programs
    first, end, expert, n, k = 0, 0, 0, 0, 0
    accumulator = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for _ in range(_steps(offsets, E, BLOCK_E, BLOCK_R, TILES)):
        first += BLOCK_R
        if first >= end:
            tile += programs
            expert, n, k = tile_at(tile, N_TILES, K_TILES)
            n *= BLOCK_N
            k *= BLOCK_K
            first, end = rows_of_expert(offsets, expert)
        g = _load(grad, grad_desc, first, end, n, N, BLOCK_R, BLOCK_N)
        value = _load(x, x_desc, first, end, k, K, BLOCK_R, BLOCK_K)
        if INTERPRETED:
            g = g.to(tl.float32)
            value = value.to(tl.float32)
        accumulator = tl.dot(g.T, value, accumulator, input_precision="ieee")
        if first + BLOCK_R >= end:
            _store(out, out_desc, accumulator, expert, n, k, N, K, STRIDES, BLOCK_N, BLOCK_K, STORE)
            accumulator = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)


def _has_descriptors(rows: Tensor) -> bool:
    return rows.dtype != torch.float32 and gpu_of(rows.device)[1] >= FIRST_CAPABILITY["tma"]


def _tile(rows: Tensor, K: int, experts: int) -> Tile:
    """us of tiles of 128 x 256 and 128 x 128 on an H200: Qwen3-30B-A3B, T = 4096, gate|up, 429 and 478; gpt-oss-120b's
    dimensions, where the wider one has more columns that do not exist, 1663 and 1628, at T = 16384 3701 and 4098.
    torch's product: 553, 2157, 4577.
    """
    if rows.dtype == torch.float32:
        return Tile(64, min(64, max(16, next_power_of_2(K))), 32, 8, 3)
    if not _has_descriptors(rows):
        return Tile(128, min(128, max(16, next_power_of_2(K))), 64, 8, 3)
    wide = cdiv(K, 256) * 256 <= 1.04 * cdiv(K, 128) * 128 or rows.shape[0] >= MANY_ROWS * experts
    return Tile(128, 256 if wide else min(128, max(16, next_power_of_2(K))), 64, 8, 4)


def grouped_wgrad(grad_rows: Tensor, rows: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
    """`out[e] = grad_rows[rows of e].T @ rows[rows of e]`.

    Args:
        grad_rows: [R, N]; rows: [R, K]; those past offsets[-1] are not read.
        offsets: [E] i32 cumulative ends.
        out: [E, N, K] to write to, a piece of a weight's gradient; None allocates.

    Returns:
        [E, N, K] in the dtype of `rows`.
    """
    grad_rows, rows = grad_rows.contiguous(), rows.contiguous()
    E, N, K = offsets.shape[0], grad_rows.shape[1], rows.shape[1]
    out = rows.new_empty((E, N, K)) if out is None else out
    if not out.numel():
        return out
    if not rows.numel():  # no tensor map has an address of nothing
        return out.zero_()
    if rows.shape[0] >= ROWS_FOR_GROUPS * E and _specialises(grad_rows, rows, out):
        _launch_specialised(grad_rows, rows, offsets, out)
        return out
    tile, descriptors = _tile(rows, K, E), _has_descriptors(rows)
    columns = tile.block_k // 2 if tile.block_k > 128 else tile.block_k

    def described(x: Tensor, columns: int) -> TensorDescriptor | None:
        return ragged_rows(x, tile.block_r, columns) if descriptors and descriptor_strides(x, inner=1) else None

    store = None
    if descriptors and descriptor_strides(out, inner=2):
        store = TensorDescriptor(out, [E, N, K], list(out.stride()), [1, tile.block_n, columns])
    arguments = (
        grad_rows,
        described(grad_rows, tile.block_n),
        rows,
        described(rows, tile.block_k),
        offsets,
        out,
        store,
        E,
        N,
        K,
        out.stride()[:2],
        (tile.block_n, tile.block_k, tile.block_r, columns, next_power_of_2(E)),
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    loads = tuple(argument is None for argument in arguments)
    key = ("wgrad", *arguments[7:], *loads, tile, rows.dtype, rows.device)
    with on_device(rows):
        programs = side_by_side(_wgrad_kernel, key, with_memory(arguments), options)
    launch(_wgrad_kernel, (min(programs, E * cdiv(N, tile.block_n) * cdiv(K, tile.block_k)),), *arguments, **options)
    return out


def gathers(tokens: Tensor, pairs: int, experts: int, columns: int) -> bool:
    """As :func:`moe_ops.rows.gathers`: by `wgrad_mm`, where its tensor cores wait for memory anyway, or copies are much
    beside the product.

    us of both products and the sum of rows per token on an H200, of copies that the sum makes beside, and gathered
    (benchmarks/comparisons/h200-wgrad-gathered.json): Qwen3-30B-A3B, T = 4096 764 and 718, T = 16384 2452 and 2242;
    OLMoE, T = 4096 861 and 823; gpt-oss-120b's dimensions, T = 4096 2641 and 2572, T = 16384 6413 and 6666;
    DeepSeek-V3, T = 4096 8962 and 8573; Mixtral-8x7B, T = 4096 4682 and 4929.
    """
    faster = pairs < MANY_ROWS * experts or columns <= GATHERED_COLUMNS
    return faster and descriptor_strides(tokens, inner=1) and _has_groups(tokens.device, tokens.dtype)


def gathers_any_number(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """As :func:`moe_ops.rows.gathers_any_number`."""
    return columns <= GATHERED_COLUMNS and _has_groups(device, dtype)


def _has_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is `wgrad_mm`."""
    return dtype.itemsize == 2 and hopper_with_gluon(device)


def _specialises(grad_rows: Tensor, rows: Tensor, out: Tensor) -> bool:
    """Whether `wgrad_mm` can take a product: all three need tensor maps."""
    mapped = all(descriptor_strides(x, inner=1) for x in (grad_rows, rows)) and descriptor_strides(out, inner=2)
    return mapped and rows.dtype == grad_rows.dtype and _has_groups(rows.device, rows.dtype)


def stages_of(width: int, size: int) -> int:
    """Steps of `wgrad_mm` that there is room for beside what it writes: tiles of so many columns of so many bytes."""
    from moe_ops.kernels.triton.wgrad_mm import GROUPS, HEIGHT, LEFT, STEP

    height = GROUPS.value * HEIGHT.value
    room = TYPICAL.shared_kib * 1024 - PROGRAM_BYTES - height * LEFT.value * size
    return room // ((height + width) * STEP.value * size)


class Tokens(NamedTuple):
    """Which factor of `wgrad_mm` has tokens, of `top_k` pairs each, and the pair of every row."""

    factor: str
    row_to_pair: Tensor
    top_k: int


def _launch_specialised(
    grad_rows: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, tokens: Tokens | None = None
) -> None:
    from moe_ops.kernels.triton.wgrad_mm import GRADS, GROUPS, HEIGHT, LEFT, ROWS, STEP, _wgrad_mm_kernel

    E, N, K = out.shape
    width = 192 if cdiv(K, 192) * 192 < 0.97 * cdiv(K, 256) * 256 else 256  # fewer columns that do not exist
    parts = (LEFT.value, width - LEFT.value)
    tensors = (
        for_gluon(ragged_rows(grad_rows, STEP.value, HEIGHT.value)),
        *(for_gluon(ragged_rows(rows, STEP.value, part)) for part in parts),
        offsets,
        *(for_gluon(TensorDescriptor(out, [E, N, K], list(out.stride()), [1, HEIGHT.value, part])) for part in parts),
    )
    gathered: tuple[Any, ...] = (None, None)
    options: tuple[Any, ...] = (0, None)
    if tokens is not None:
        factor, which = (rows, ROWS) if tokens.factor == "rows" else (grad_rows, GRADS)
        gathered = (factor, tokens.row_to_pair)
        options = (which.value, (tokens.top_k, factor.stride(0), factor.shape[1]))
    programs = min(E * cdiv(N, GROUPS.value * HEIGHT.value) * cdiv(K, width), multiprocessors(rows.device))
    sizes = (E, N, K, stages_of(width, rows.element_size()))
    launch(_wgrad_mm_kernel, (programs,), *tensors, *gathered, *sizes, *options, num_warps=4)


def of_tokens(
    grad_rows: Tensor, rows: Tensor, offsets: Tensor, row_to_pair: Tensor, pair_to_row: Tensor, tokens: str
) -> Tensor:
    """`grouped_wgrad` where one of the factors, which `tokens` names, has tokens [T, ..] instead of sorted rows.

    `wgrad_mm` gathers them. Else rows are copied some columns at a time, no more than the other factor has: memory
    counts here.
    """
    E, N, K = offsets.shape[0], grad_rows.shape[1], rows.shape[1]
    out = rows.new_empty((E, N, K))
    pairs, top_k = pair_to_row.numel(), pair_to_row.shape[1]
    if out.numel() and pairs and _specialises(grad_rows, rows, out):
        _launch_specialised(grad_rows, rows, offsets, out, Tokens(tokens, row_to_pair, top_k))
        return out
    width, most = (N, K) if tokens == "grad_rows" else (K, N)
    step = cdiv(cdiv(width, cdiv(width, max(most, PIECE))), PIECE) * PIECE
    # One buffer for all pieces: a call that is fired again allocates all that it ever held at once.
    buffer = rows.new_empty(pairs * min(step, width))
    for start in range(0, width, step):
        piece = slice(start, min(start + step, width))
        copies = buffer[: pairs * (piece.stop - start)].view(pairs, piece.stop - start)
        scatter_rows((grad_rows if tokens == "grad_rows" else rows)[:, piece], pair_to_row, None, copies, None, False)
        if tokens == "grad_rows":
            grouped_wgrad(copies, rows, offsets, out[:, piece])
        else:
            grouped_wgrad(grad_rows, copies, offsets, out[:, :, piece])
    return out
