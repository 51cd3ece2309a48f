"""The router kernel against the eager routings."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meta.routing import ROUTINGS, route
from moe_ops.kernels.triton.topk import fused_topk

OPTIONS = {
    "renormalize": True,
    "renorm_eps": 1e-20,
    "num_groups": 1,
    "topk_groups": 1,
    "scale": 1.0,
}
NAN, INF = float("nan"), float("inf")
# E, K, num_groups, topk_groups: powers of two and not, one expert, K = E, groups that are not powers of two.
SIZES = [(8, 2, 1, 1), (60, 4, 1, 1), (32, 6, 8, 3), (18, 6, 3, 2), (1, 1, 1, 1), (6, 6, 1, 1)]


def check(logits, bias=None, **options):
    """The same ids as the eager router, and weights equal to float64 within fp32's rounding."""
    options = {**OPTIONS, **options}
    weights, ids = fused_topk(logits, bias, **options)
    expected_weights, expected_ids = route(logits, bias, **options)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("E, K, G, KG", SIZES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_eager_router(routing, E, K, G, KG, dtype, poisoned):
    groups = {"num_groups": G, "topk_groups": KG} if ROUTINGS[routing].group and E // G > 1 else {}
    check((2 * torch.randn(3, E)).to(dtype), top_k=K, routing=routing, scale=2.5, **groups)


@pytest.mark.parametrize("routing", [name for name, row in ROUTINGS.items() if row.supports_bias])
def test_bias_moves_the_selection_only(routing):
    groups = {"num_groups": 4, "topk_groups": 2} if ROUTINGS[routing].group else {}
    check(torch.randn(3, 32), 0.5 * torch.randn(32), top_k=5, routing=routing, renormalize=False, **groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_ties_go_to_the_lower_expert(routing, dtype):
    groups = {"num_groups": 4, "topk_groups": 2} if ROUTINGS[routing].group else {}
    check(torch.zeros(1, 16).to(dtype), top_k=4, routing=routing, **groups)
    check(torch.randint(-2, 3, (4, 16)).to(dtype) * 0.5, top_k=6, routing=routing, **groups)
    check(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]).to(dtype), top_k=2, routing=routing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_nan_and_infinite_logits(routing, biased, dtype):
    if biased and not ROUTINGS[routing].supports_bias:
        pytest.skip("takes no bias")
    logits = torch.randn(6, 16)
    logits[0] = NAN
    logits[1, 3] = NAN
    logits[2, 2:] = NAN
    logits[3, 5] = -INF
    logits[4] = -INF
    logits[5, 1:15] = -INF
    bias = torch.zeros(16) if biased else None
    groups = {"num_groups": 4, "topk_groups": 2} if ROUTINGS[routing].group else {}
    check(logits.to(dtype), bias, top_k=4, routing=routing, **groups)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("routing", ["softmax", "topk_softmax", "sigmoid"])
def test_renormalisation(routing, eps, renormalize):
    check(torch.randn(2, 16), top_k=3, routing=routing, renormalize=renormalize, renorm_eps=eps, scale=0.5)


def test_any_stride():
    wide = torch.randn(3, 64)
    check(wide[:, 5:29], top_k=4, routing="softmax")
    check(wide[:, ::2], top_k=4, routing="softmax")
    check(wide.t()[:24], top_k=1, routing="topk_sigmoid", renormalize=False)


def test_several_tokens_a_program(monkeypatch):
    monkeypatch.setattr("moe_ops.kernels.triton.topk.WARPS_RESIDENT", 2)
    check(torch.randn(7, 40), top_k=3, routing="softmax")
    check(
        torch.randn(7, 32).bfloat16(),
        torch.randn(32),
        top_k=3,
        routing="sigmoid_group_top2",
        num_groups=4,
        topk_groups=2,
    )


def test_no_tokens():
    weights, ids = fused_topk(torch.randn(0, 8), None, top_k=2, routing="softmax", **OPTIONS)
    assert weights.shape == ids.shape == (0, 2)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_sizes(data):
    E = data.draw(st.integers(1, 70))
    K = data.draw(st.integers(1, min(E, 32)))
    routing = data.draw(st.sampled_from(["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"]))
    values = torch.tensor(data.draw(st.lists(st.sampled_from([-3.0, 0.0, 0.25, 7.0, NAN]), min_size=E, max_size=E)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    check(values[None].to(dtype), top_k=K, routing=routing)
