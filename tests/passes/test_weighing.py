"""Gathered weights of experts in a product that multiplies by the routing weights as well, and sums or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import moe_ops
from tests.passes.blocks import K, silu_glu, weights
from tests.passes.compare import check

# The second product, from [T, K, I], gathered [T, K, H, I] and routing weights [T, K].
WAYS = {
    "summed": lambda h, w, s: torch.einsum("tki,tkhi,tk->th", h, w, s),
    "scores_first": lambda h, w, s: torch.einsum("tk, tkhi, tki -> th", s, w, h),
    "slots_kept": lambda h, w, s: torch.einsum("tki,tkhi,tk->tkh", h, w, s).sum(dim=1),
    "turned": lambda h, w, s: torch.einsum("tki,tkih,tk->th", h, w.mT, s),
    "other_letters": lambda h, w, s: torch.einsum("bec,bekc,be->bk", h, w, s),
    "dots": lambda h, w, s: torch.einsum("...ki,...khi,...k->...h", h, w, s),
}


def route(x, gate):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    return topk_weights.to(x.dtype), ids


def program_of(second):
    def program(x, gate, w1, w2):
        topk_weights, ids = route(x, gate)
        return second(silu_glu(torch.einsum("th,tknh->tkn", x, w1[ids])), w2[ids], topk_weights)

    return program


@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, torch.float32) for way in WAYS), ("summed", torch.bfloat16)], ids=str
)
def test_fused(way, dtype):
    outcome = check(program_of(WAYS[way]), *weights(dtype=dtype).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_gradients():
    given = weights(dtype=torch.float64).values()
    outcome = check(program_of(WAYS["summed"]), *given, gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def twice(h, w, s):
    return (torch.einsum("tki,tkhi,tk->tkh", h, w, s) * s[..., None]).sum(1)


def slots_before_tokens(h, w, s):
    return torch.einsum("tki,tkhi,kt->th", h, w, s.t())


def by_feature(h, w, s):
    return torch.einsum("tki,tkhi,ti->th", h, w, h[:, 0])


def by_token(h, w, s):
    return torch.einsum("tki,tkhi,t->th", h, w, s[:, 0])


def summed_over_tokens(h, w, s):
    return torch.einsum("tki,tkhi,tk->kh", h, w, s)


def of_the_token_before(h, w, s):
    return torch.einsum("tki,tkhi,tk->th", h.roll(1, 0), w, s)


MISSES = (twice, slots_before_tokens, by_feature, by_token, summed_over_tokens, of_the_token_before)


@pytest.mark.parametrize("second", MISSES, ids=lambda second: second.__name__)
def test_near_miss(second):
    outcome = check(program_of(second), *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


def weighed_first(x, gate, w1, w2):
    topk_weights, ids = route(x, gate)
    h = silu_glu(torch.einsum("th,tknh,tk->tkn", x, w1[ids], topk_weights))
    return torch.einsum("tki,tkhi,tk->th", h, w2[ids], topk_weights)


def weighed_before_and_after(x, gate, w1, w2):
    topk_weights, ids = route(x, gate)
    rows = x.unsqueeze(1).expand(-1, K, -1)
    h = silu_glu(torch.einsum("tkh,tknh,tk->tkn", rows, w1[ids], topk_weights))
    return torch.einsum("tki,tkhi,tk->th", h, w2[ids], topk_weights)


def test_a_bias_is_not_weighed():
    def program(x, gate, w1, w2):
        topk_weights, ids = route(x, gate)
        h = silu_glu(torch.einsum("th,tknh->tkn", x, w1[ids]))
        return (torch.einsum("tki,tkhi,tk->tkh", h, w2[ids], topk_weights) + w2[:, :, 0][ids]).sum(1)

    inputs = weights(dtype=torch.float32)
    (row,) = moe_ops.explain(program, *inputs.values()).refused
    assert "it does not multiply its bias" in row.reason
    outcome = check(program, *inputs.values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


@pytest.mark.parametrize("program", [weighed_first, weighed_before_and_after], ids=lambda program: program.__name__)
def test_first_products_do_not_weigh(program):
    inputs = weights(dtype=torch.float32)
    (row, *_) = moe_ops.explain(program, *inputs.values()).refused
    assert row.reason and row.cure
    outcome = check(program, *inputs.values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)
