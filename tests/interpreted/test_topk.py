"""The router kernel against the eager routings."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meta.routing import ROUTINGS, route
from moe_ops.kernels.triton.topk import fused_topk
from tests.ops.nan_cases import BAD, CASES, NAN, POISONS, E, T, check_routing, logits_and_bias, routing_options

OPTIONS = {
    "renormalize": True,
    "renorm_eps": 1e-20,
    "num_groups": 1,
    "topk_groups": 1,
    "scale": 1.0,
}
# E, K, num_groups, topk_groups: powers of two and not, one expert, K = E, groups that are not powers of two.
SIZES = [(8, 2, 1, 1), (60, 4, 1, 1), (32, 6, 8, 3), (18, 6, 3, 2), (1, 1, 1, 1), (6, 6, 1, 1)]


def check(logits, bias=None, **options):
    """The same ids as the eager router, and weights equal to float64 within fp32's rounding."""
    options = {**OPTIONS, **options}
    weights, ids = fused_topk(logits, bias, **options)
    expected_weights, expected_ids = route(logits, bias, **options)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=3e-6, atol=1e-30, equal_nan=True)


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


@pytest.mark.parametrize("case", CASES)
def test_nan_and_infinity_give_what_torch_gives(case, poisoned):
    """Before renormalising, which would make one NaN weight all of them."""
    routing, poison = CASES[case]
    logits, bias = logits_and_bias(poison)
    options = routing_options(routing, renormalize=False)
    check_routing(*fused_topk(logits, bias, **options), logits, bias, options)


@pytest.mark.parametrize("poison", [name for name, values in POISONS.items() if not values.bias])
@pytest.mark.parametrize("routing", ["softmax", "topk_softmax", "topk_sigmoid"])
def test_nan_and_infinity_where_key_and_expert_share_an_integer(routing, poison, poisoned):
    logits, bias = logits_and_bias(POISONS[poison], torch.bfloat16)
    options = routing_options(routing, renormalize=False)
    check_routing(*fused_topk(logits, bias, **options), logits, bias, options)


@pytest.mark.parametrize("poison", ["nan_logit", "inf", "all_minus_inf"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_renormalising_nan_and_zero_by_zero(routing, poison):
    logits, bias = logits_and_bias(POISONS[poison])
    options = routing_options(routing)
    check_routing(*fused_topk(logits, bias, **options), logits, bias, options)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_nan_token_leaves_every_bit_of_the_others(routing, monkeypatch, poisoned):
    """Several tokens share a program here."""
    monkeypatch.setattr("moe_ops.kernels.triton.topk.WARPS_RESIDENT", 2)
    logits, bias = logits_and_bias(POISONS["nan_beside_inf"])
    healthy = logits.clone()
    healthy[BAD] = torch.randn(E)
    others = [t for t in range(T) if t != BAD]
    for got, want in zip(
        fused_topk(logits, bias, **routing_options(routing)),
        fused_topk(healthy, bias, **routing_options(routing)),
        strict=True,
    ):
        assert torch.equal(got[others].view(torch.int32), want[others].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_nan_is_the_same_nan(dtype):
    """Neither sign nor payload ranks one NaN before another."""
    bits = torch.tensor([[0, 0x7FC00000, -0x400000, 0x7FFF0000, 0x7F800000, -0x10000]], dtype=torch.int32)
    _, ids = fused_topk(bits.view(torch.float32).to(dtype), None, **OPTIONS, top_k=6, routing="topk_sigmoid")
    assert ids.tolist() == [[1, 2, 3, 5, 4, 0]]


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
