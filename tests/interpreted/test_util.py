"""Device helpers: rounding casts, and the walk through the experts' tiles."""

import pytest
import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.util import cdiv, cut_into_tiles, find_tile, next_power_of_2, round_to, widen


@triton.jit
def _round_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, round_to(tl.load(x_ptr + i), y_ptr.dtype.element_ty))


@triton.jit
def _widen_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, widen(tl.load(x_ptr + i)))


@triton.jit
def _walk_kernel(
    extents_ptr,
    out_ptr,
    num_rows,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TALL_M: tl.constexpr,
    N_TILES: tl.constexpr,
    GROUP_M: tl.constexpr,
    BATCHED: tl.constexpr,
):
    tile = tl.program_id(0)
    table = cut_into_tiles(tl.arange(0, BLOCK_E), extents_ptr, num_rows, E, BLOCK_M, TALL_M, N_TILES, BATCHED)
    expert, row_start, row_end, n_tile = find_tile(tile, table, BLOCK_M, TALL_M, N_TILES, GROUP_M)
    tl.store(out_ptr + tile * 5, expert)
    tl.store(out_ptr + tile * 5 + 1, row_start)
    tl.store(out_ptr + tile * 5 + 2, row_end)
    tl.store(out_ptr + tile * 5 + 3, n_tile)
    tl.store(out_ptr + tile * 5 + 4, tl.max(table[3], axis=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_rounding_casts_equal_torchs(dtype):
    least = {torch.float16: -14, torch.float8_e4m3fn: -12}.get(dtype, -60)
    x = torch.randn(4096) * torch.exp2(torch.randint(least, 8, (4096,)).float())
    x = torch.cat((x.clamp(-448, 448), torch.tensor([0.0, -0.0, 448.0, -448.0, float("nan")]), torch.zeros(4091)))
    y = torch.full((8192,), 3.0).to(dtype)
    _round_kernel[(1,)](x, y, N=8192)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.float().nan_to_num(1.0), x.to(dtype).float().nan_to_num(1.0))


@pytest.mark.parametrize("tall_m", [0, 16], ids=["one_height", "two_heights"])
@pytest.mark.parametrize("batched", [False, True], ids=["grouped", "batched"])
@pytest.mark.parametrize("counts", [[3], [0, 5, 0, 16, 1], [0, 0, 0], [8, 8, 8, 8], [0, 0, 33], [40, 0, 17]], ids=str)
def test_the_walk_visits_every_tile_once_and_an_expert_s_together(counts, batched, tall_m):
    E, block_m, capacity, group = len(counts), 8, 40, 2
    if batched:
        starts, extents, num_rows = [e * capacity for e in range(E)], torch.tensor(counts).int(), capacity
    else:
        extents, num_rows = torch.tensor(counts).cumsum(0).int(), sum(counts)
        starts = (extents - torch.tensor(counts)).tolist()
    out = walk(extents, num_rows, block_m, group, batched, tall_m)
    heights = [tall_m if tall_m and count > block_m else block_m for count in counts]
    expected = [
        [e, start + tile * height, start + count, column]
        for e, (count, start, height) in enumerate(zip(counts, starts, heights, strict=True))
        for first in range(0, cdiv(count, height), group)
        for column in range(N_TILES)
        for tile in range(first, min(first + group, cdiv(count, height)))
    ]
    assert (out[:, 4] == len(expected)).all()
    assert out[: len(expected), :4].tolist() == expected
    assert (out[len(expected) :, 1] >= out[len(expected) :, 2]).all(), "no rows past the last tile"


def test_every_e4m3_code_is_read_as_torch_reads_it():
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.empty(256)
    _widen_kernel[(1,)](codes, wide, 256)
    torch.testing.assert_close(wide, codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("batched", [False, True], ids=["grouped", "batched"])
def test_the_walk_stays_inside_whatever_the_extents_say(batched):
    num_rows = 20
    rows = num_rows * (4 if batched else 1)
    out = walk(torch.tensor([-5, 2**30, 7, 21]).int(), num_rows, 8, 2, batched)
    tiles = out[: int(out[0, 4])]
    assert len(tiles) > 0 and (tiles[:, 1] >= 0).all() and (tiles[:, 1] < tiles[:, 2]).all()
    assert (tiles[:, 2] <= rows).all() and ((tiles[:, 3] >= 0) & (tiles[:, 3] < N_TILES)).all()


N_TILES = 3


def walk(extents, num_rows, block_m, group, batched, tall_m=0):
    """[tiles and some more, (expert, row_start, row_end, n_tile, how many tiles)]."""
    E = len(extents)
    programs = (E * cdiv(num_rows, block_m) + 2) * N_TILES
    out = torch.full((programs, 5), -77, dtype=torch.int32)
    sizes = {"BLOCK_E": next_power_of_2(E), "BLOCK_M": block_m, "TALL_M": tall_m, "N_TILES": N_TILES, "GROUP_M": group}
    _walk_kernel[(programs,)](extents, out, num_rows, E, **sizes, BATCHED=batched)
    return out
