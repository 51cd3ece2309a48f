"""The weighted sum over top-k: order, rounding, and what must not be read."""

import pytest
import torch

from moe_ops.kernels.triton.combine import combine

NAN = float("nan")


def reference(rows, pair_to_row, weights):
    """fp32, k ascending, one rounding."""
    T, K = pair_to_row.shape
    out = torch.zeros(T, rows.shape[1])
    for k in range(K):
        kept = (pair_to_row[:, k] >= 0)[:, None]
        term = rows[pair_to_row[:, k].clamp(min=0).long()].float()
        if weights is not None:
            term = term * weights[:, k, None].float()
        out = out + torch.where(kept, term, 0.0)
    return out.to(rows.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T, K, H", [(1, 8, 256), (5, 3, 130), (4, 11, 24)])
def test_equals_the_sequential_sum_bit_for_bit(T, K, H, weights_dtype, dtype, poisoned):
    rows = torch.randn(T * K, H).to(dtype)
    pair_to_row = torch.randperm(T * K).view(T, K).int()
    weights = None if weights_dtype is None else torch.rand(T, K).to(weights_dtype)
    out = combine(rows, pair_to_row, weights)
    assert out.dtype == dtype and out.is_contiguous()
    assert torch.equal(out, reference(rows, pair_to_row, weights))


def test_dropped_pairs_contribute_exactly_zero():
    """Neither the weight of a dropped pair, nor any row that no pair maps to, may reach the sum."""
    rows = torch.full((12, 40), NAN)
    pair_to_row = torch.tensor([[3, -1, 5], [-1, -1, -1], [-1, 7, -1], [99, -5, 3]], dtype=torch.int32)
    rows[[3, 5, 7]] = torch.randn(3, 40)
    weights = torch.where((pair_to_row >= 0) & (pair_to_row < 12), torch.rand(4, 3), NAN)
    inside = torch.where(pair_to_row < 12, pair_to_row, -1)
    for w in (weights, None):
        out = combine(rows, pair_to_row, w)
        assert torch.equal(out, reference(rows, inside, w))
        assert (out[1] == 0).all()


def test_strided_arguments():
    rows = torch.randn(6, 64)
    places = torch.randperm(6).view(2, 3).int().t()
    weights = torch.rand(2, 3).t()
    assert torch.equal(combine(rows[:, :32], places, weights), reference(rows[:, :32], places, weights))
    assert torch.equal(combine(rows.t()[:6], places, weights), reference(rows.t()[:6], places, weights))


@pytest.mark.parametrize("T, K, R", [(0, 2, 0), (3, 2, 0), (3, 0, 4)])
def test_nothing_to_sum(T, K, R):
    out = combine(torch.randn(R, 8), torch.full((T, K), -1, dtype=torch.int32), torch.rand(T, K))
    assert torch.equal(out, torch.zeros(T, 8))
