"""Device helpers: rounding casts, and the lookup from tile number to expert rows."""

import pytest
import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.util import cdiv, find_tile, next_power_of_2, round_to, widen


@triton.jit
def _round_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, round_to(tl.load(x_ptr + i), y_ptr.dtype.element_ty))


@triton.jit
def _widen_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, widen(tl.load(x_ptr + i)))


@triton.jit
def _tile_kernel(
    extents_ptr, out_ptr, num_rows, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BATCHED: tl.constexpr
):
    pid = tl.program_id(0)
    expert, row_start, row_end, valid = find_tile(extents_ptr, num_rows, pid, E, BLOCK_E, BLOCK_M, BATCHED)
    tl.store(out_ptr + pid * 4, expert)
    tl.store(out_ptr + pid * 4 + 1, row_start)
    tl.store(out_ptr + pid * 4 + 2, row_end)
    tl.store(out_ptr + pid * 4 + 3, valid.to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_rounding_casts_equal_torchs(dtype):
    least = {torch.float16: -14, torch.float8_e4m3fn: -12}.get(dtype, -60)
    x = torch.randn(4096) * torch.exp2(torch.randint(least, 8, (4096,)).float())
    x = torch.cat((x.clamp(-448, 448), torch.tensor([0.0, -0.0, 448.0, -448.0, float("nan")]), torch.zeros(4091)))
    y = torch.full((8192,), 3.0).to(dtype)
    _round_kernel[(1,)](x, y, N=8192)
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.float().nan_to_num(1.0), x.to(dtype).float().nan_to_num(1.0))


@pytest.mark.parametrize("batched", [False, True], ids=["grouped", "batched"])
@pytest.mark.parametrize("counts", [[3], [0, 5, 0, 16, 1], [0, 0, 0], [8, 8, 8, 8], [0, 0, 33]], ids=str)
def test_find_tile_enumerates_every_tile_once(counts, batched):
    E, block_m, capacity = len(counts), 8, 40
    if batched:
        starts, extents, num_rows = [e * capacity for e in range(E)], torch.tensor(counts).int(), capacity
    else:
        extents, num_rows = torch.tensor(counts).cumsum(0).int(), sum(counts)
        starts = (extents - torch.tensor(counts)).tolist()
    out = tiles(extents, num_rows, block_m, batched)
    expected = [
        [e, start + tile * block_m, start + count, 1]
        for e, (count, start) in enumerate(zip(counts, starts, strict=True))
        for tile in range(cdiv(count, block_m))
    ]
    assert out[: len(expected)].tolist() == expected
    assert out[len(expected) :, 3].sum() == 0
    assert (out[len(expected) :, 0] == E - 1).all()
    assert torch.equal(out[len(expected) :, 1], out[len(expected) :, 2])


def test_every_e4m3_code_is_read_as_torch_reads_it():
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.empty(256)
    _widen_kernel[(1,)](codes, wide, 256)
    torch.testing.assert_close(wide, codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("batched", [False, True], ids=["grouped", "batched"])
def test_find_tile_stays_inside_whatever_the_extents_say(batched):
    num_rows = 20
    rows = num_rows * (4 if batched else 1)
    out = tiles(torch.tensor([-5, 2**30, 7, 21]).int(), num_rows, 8, batched)
    valid = out[out[:, 3] == 1]
    assert len(valid) > 0 and (valid[:, 1] >= 0).all() and (valid[:, 2] <= rows).all()


def tiles(extents, num_rows, block_m, batched):
    """[programs, (expert, row_start, row_end, valid)] for a grid that covers everything and more."""
    E = len(extents)
    programs = E * cdiv(num_rows, block_m) + E + 2
    out = torch.full((programs, 4), -77, dtype=torch.int32)
    options = {"BLOCK_E": next_power_of_2(E), "BLOCK_M": block_m, "BATCHED": batched}
    _tile_kernel[(programs,)](extents, out, num_rows, E, **options)
    return out
