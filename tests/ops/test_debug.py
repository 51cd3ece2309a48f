"""``with moe_ops.debug():`` reports what only the device knows; outside of it the same calls stay silent and in
bounds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_ops
from moe_ops import debugging

T, E, K, H, I = 4, 4, 2, 8, 6
x = torch.randn(T, H)
ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
weights = torch.rand(T, K)
gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
nan_logits = torch.randn(T, E).index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(float("nan")))
wrong_ids = ids.index_put((torch.tensor([1, 3]), torch.tensor([0, 1])), torch.tensor([7, -3], dtype=torch.int32))
one_expert = torch.zeros_like(ids)
map_of_8 = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1])
wrong_map = torch.tensor([0, 1, 9, 3])


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


FAULTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str]] = {
    "nan_logits": (
        moe_ops.fused_topk,
        (nan_logits,),
        {"top_k": 2},
        "fused_topk: router_logits must be free of NaN, got 1 entries that are not, the first nan at [2, 1]. Look for",
    ),
    "nan_logits_moe": (
        moe_ops.fused_moe,
        (x, nan_logits, gate_up, down),
        {"top_k": 2},
        "fused_moe: router_logits must be free",
    ),
    "ids": (
        moe_ops.fused_experts,
        (x, gate_up, down, weights, wrong_ids),
        {},
        "fused_experts: topk_ids must be in [-1, E=4), got 2 entries that are not, the first 7 at [1, 0]. Use -1 for",
    ),
    "ids_global": (
        moe_ops.moe_permute,
        (x, ids + 6, map_of_8),
        {"num_experts": E},
        "moe_permute: topk_ids must be in [-1, E_global=8), got 4 entries that are not, the first 8 at [1, 1]",
    ),
    "expert_map": (
        moe_ops.moe_permute,
        (x, ids, wrong_map),
        {"num_experts": E},
        "expert_map must be in [-1, E=4), got 1 entries that are not, the first 9 at [2]",
    ),
    "expert_map_of_one_more": (
        moe_ops.moe_permute,
        (x, ids, torch.tensor([0, 1, 2, E])),
        {"num_experts": E},
        "expert_map must be in [-1, E=4), got 1 entries that are not, the first 4 at [3]",
    ),
    "expert_map_below": (
        moe_ops.moe_permute,
        (x, ids, torch.tensor([0, -2, 2, 3])),
        {"num_experts": E},
        "expert_map must be in [-1, E=4), got 1 entries that are not, the first -2 at [1]",
    ),
    "capacity": (
        moe_ops.batched_dispatch,
        (x, one_expert),
        {"num_experts": E, "capacity": 5},
        "rows per expert must be <= capacity=5, got 1 entries that are not, the first 8 at [0]. The rows past capacity "
        "were dropped; pass capacity >= 8.",
    ),
    "capacity_experts": (
        moe_ops.fused_experts,
        (x, gate_up, down, weights, one_expert),
        {"format": "batched", "capacity": 5},
        "fused_experts: rows per expert must be <= capacity=5",
    ),
    "capacity_moe": (
        moe_ops.fused_moe,
        (x, torch.tensor([[9.0, 1, 0, 0]] * T), gate_up, down),
        {"top_k": 1, "format": "batched", "capacity": 3},
        "fused_moe: rows per expert must be <= capacity=3",
    ),
    "offsets_decrease": (
        moe_ops.grouped_mm,
        (x, gate_up, int32(2, 1, 3, 4)),
        {},
        "offsets must be non-decreasing and in [0, R=4]",
    ),
    "offsets_past_end": (
        moe_ops.grouped_mm_glu,
        (x, gate_up, int32(1, 2, 3, 5)),
        {},
        "the first 5 at [3]. Pass cumulative ENDS",
    ),
    "counts": (
        moe_ops.batched_mm,
        (torch.randn(E, 3, H), gate_up, int32(0, 4, -1, 1)),
        {},
        "expert_num_tokens must be in [0, C=3], got 2 entries that are not, the first 4 at [1]",
    ),
    "places": (
        moe_ops.moe_unpermute,
        (torch.randn(T * K, H), ids + 7, weights),
        {},
        "pair_to_row must be in [-1, 8), got 6 entries that are not, the first 8 at [0, 1]",
    ),
    "slots": (
        moe_ops.batched_combine,
        (torch.randn(E, 1, H), ids + 1, weights),
        {},
        "slots must be in [-1, 4), got 2 entries",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name: str) -> None:
    op, args, kwargs, message = FAULTS[name]
    with moe_ops.debug(), pytest.raises(ValueError) as caught:
        op(*args, **kwargs)
    assert message in str(caught.value)
    assert not debugging.active()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_silent_and_in_bounds_outside(name: str) -> None:
    op, args, kwargs, _ = FAULTS[name]
    outputs = op(*args, **kwargs)
    healthy = [0, 1, 3] if name.startswith("nan") else slice(None)  # NaN in token 2 is NaN out
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        assert torch.isfinite(output[healthy]).all()


def test_rows_out_of_range_contribute_nothing() -> None:
    rows, places = torch.randn(T * K, H), ids.masked_fill(ids == 1, 99)
    wanted = moe_ops.moe_unpermute(rows, ids.masked_fill(ids == 1, -1), weights)
    assert torch.equal(moe_ops.moe_unpermute(rows, places, weights), wanted)


def test_counts_above_the_capacity_stop_at_it() -> None:
    batch = torch.randn(E, 3, H)
    wanted = moe_ops.batched_mm(batch, gate_up, int32(3, 3, 3, 3))
    assert torch.equal(moe_ops.batched_mm(batch, gate_up, int32(5, 4, 9, 7)), wanted)


def test_sound_calls_pass() -> None:
    with moe_ops.debug():
        got_weights, got_ids = moe_ops.fused_topk(torch.randn(T, E), top_k=K)
        moe_ops.fused_experts(x, gate_up, down, got_weights, got_ids, format="batched")
        moe_ops.fused_experts(x, gate_up, down, weights, ids.masked_fill(ids == 0, -1), expert_map=torch.arange(E))
        rows, offsets, pair_to_row = moe_ops.moe_permute(x, ids, num_experts=E)
        value = moe_ops.grouped_mm(moe_ops.grouped_mm_glu(rows, gate_up, offsets), down, offsets)
        moe_ops.moe_unpermute(value, pair_to_row, weights)


def test_blocks_nest_and_close_after_an_error() -> None:
    with moe_ops.debug():
        with moe_ops.debug():
            pass
        assert debugging.active()
    with pytest.raises(KeyError), moe_ops.debug():
        raise KeyError
    assert not debugging.active()


def test_it_reaches_into_compiled_functions() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda logits: moe_ops.fused_topk(logits, top_k=2), backend="eager", fullgraph=True)
    compiled(torch.randn(T, E))
    with moe_ops.debug(), pytest.raises(ValueError, match="router_logits must be free of NaN"):
        compiled(nan_logits)
    compiled(nan_logits)
