"""Routing rows against formulas written out by hand, and the promises about ties, NaN and ids."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meta.routing import ROUTINGS, route
from tests.ops.nan_cases import CASES, INF, NAN, check_routing, logits_and_bias, routing_options

E, K = 12, 3


def options(name: str) -> dict[str, object]:
    return {"routing": name, **({"num_groups": 4, "topk_groups": 2} if ROUTINGS[name].group else {})}


def by_hand(name: str, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before renormalisation and ids, token by token."""
    weights, ids = [], []
    for row in logits.double():
        scores = row
        if name.startswith("softmax"):
            scores = row.exp() / row.exp().sum()
        elif name.startswith("sigmoid"):
            scores = 1 / (1 + (-row).exp())
        elif name == "sqrtsoftplus":
            scores = torch.log1p(row.exp()).sqrt()
        choice = scores if bias is None else scores + bias.double()
        allowed = list(range(E))
        if ROUTINGS[name].group:
            best = 1 if name.endswith("max") else 2
            groups = [sorted(choice[g * 3 : g * 3 + 3].tolist(), reverse=True)[:best] for g in range(4)]
            kept = sorted(range(4), key=lambda g: -sum(groups[g]))[:2]
            allowed = [e for e in allowed if e // 3 in kept]
        picked = sorted(allowed, key=lambda e: -float(choice[e]))[:K]
        chosen = scores[picked]
        if name == "topk_softmax":
            chosen = F.softmax(chosen, dim=0)
        elif name == "topk_sigmoid":
            chosen = torch.sigmoid(chosen)
        weights.append(chosen)
        ids.append(picked)
    return torch.stack(weights), torch.tensor(ids)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_equals_the_formula(name: str, with_bias: bool) -> None:
    if with_bias and not ROUTINGS[name].supports_bias:
        pytest.skip("this routing takes no bias")
    logits = torch.randn(20, E)
    bias = torch.randn(E) if with_bias else None
    wanted, wanted_ids = by_hand(name, logits, bias)
    weights, ids = route(logits, bias, top_k=K, renormalize=False, **options(name))
    assert torch.equal(ids.long(), wanted_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)
    weights, _ = route(logits, bias, top_k=K, renormalize=True, renorm_eps=0.5, scale=2.5, **options(name))
    wanted = wanted / (wanted.sum(dim=1, keepdim=True) + 0.5) * 2.5
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ROUTINGS)
def test_ties_go_to_the_lowest_id(name: str) -> None:
    _, ids = route(torch.zeros(2, E), top_k=K, **options(name))
    assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalised"])
@pytest.mark.parametrize("case", CASES)
def test_nan_and_infinity_give_what_torch_gives(case: str, renormalize: bool) -> None:
    name, poison = CASES[case]
    logits, bias = logits_and_bias(poison)
    wanted = routing_options(name, renormalize=renormalize)
    check_routing(*route(logits, bias, **wanted), logits, bias, wanted)


def test_among_nan_choices_the_lowest_expert_comes_first() -> None:
    logits = torch.tensor([[1.0, NAN, -5.0, INF, NAN, 0.0]])
    weights, ids = route(logits, top_k=4, routing="sigmoid", renormalize=False)
    assert ids.tolist() == [[1, 4, 3, 0]]
    assert weights[0, :2].isnan().all() and weights[0, 2:].tolist() == [1.0, torch.sigmoid(torch.tensor(1.0)).item()]
    assert route(logits, top_k=6)[1].tolist() == [[0, 1, 2, 3, 4, 5]], "a softmax over NaN leaves nothing to rank"


def test_every_nan_is_the_same_nan() -> None:
    """Neither sign nor payload ranks one NaN before another."""
    bits = torch.tensor([[0, 0x7FC00000, -0x400000, 0x7FFF0000, 0x7F800000, -0x10000]], dtype=torch.int32)
    _, ids = route(bits.view(torch.float32), top_k=6, routing="topk_sigmoid")
    assert ids.tolist() == [[1, 2, 3, 5, 4, 0]]


def test_a_masked_expert_weighs_nothing() -> None:
    weights, ids = route(torch.tensor([[1.0, -INF, 0.0]]), top_k=3)
    assert ids.tolist() == [[0, 2, 1]] and weights[0, 2] == 0 and weights.isfinite().all()


def test_low_precision_logits_are_routed_in_fp32() -> None:
    logits = torch.randn(8, E).bfloat16()
    assert torch.equal(route(logits, top_k=K)[0], route(logits.float(), top_k=K)[0])


def test_no_tokens() -> None:
    weights, ids = route(torch.randn(0, E), top_k=K)
    assert weights.shape == ids.shape == (0, K) and ids.stride() == (K, 1)
