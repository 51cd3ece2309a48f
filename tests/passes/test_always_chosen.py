"""Shared experts in one stack with routed ones: every token has their ids, with constant weights, beside its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.passes.blocks import E, H, K, T, silu_glu, weights
from tests.passes.compare import check, compiled, difference, refusals

SHARED = 2
ROUTED = E - SHARED


def route(x, gate):
    values, ids = F.linear(x, gate[:ROUTED]).softmax(-1).topk(K, dim=-1)
    return values / values.sum(-1, keepdim=True), ids


def last(x, gate):
    values, ids = route(x, gate)
    shared = torch.arange(ROUTED, E).expand(x.shape[0], -1)
    return torch.cat((values, torch.ones_like(values[:, :SHARED])), -1), torch.cat((ids, shared), -1)


def first(x, gate):
    values, ids = route(x, gate)
    shared = torch.arange(SHARED).repeat(x.shape[0], 1)
    return torch.cat((torch.full_like(values[:, :SHARED], 0.5), values), -1), torch.cat((shared, ids + SHARED), -1)


def overlapping(x, gate):
    """A token may have chosen a shared expert, too."""
    values, ids = F.linear(x, gate).softmax(-1).topk(K, dim=-1)
    shared = torch.arange(ROUTED, E).expand(x.shape[0], -1)
    return torch.cat((values, torch.ones_like(values[:, :SHARED])), -1), torch.cat((ids, shared), -1)


def ordered(route):
    """Rows sorted by expert."""

    def run(x, gate, w1, w2):
        topk_weights, ids = route(x, gate)
        perm = ids.reshape(-1).argsort(stable=True)
        token = perm // ids.shape[1]
        offsets = torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
        rows = F.grouped_mm(x[token].bfloat16(), w1.bfloat16().mT, offs=offsets)
        rows = F.grouped_mm(silu_glu(rows), w2.bfloat16().mT, offs=offsets) * topk_weights.reshape(-1)[perm, None]
        return torch.zeros_like(x).index_add(0, token, rows)

    return run


def by_one_hot(route):
    """A loop over the experts, by a one-hot."""

    def run(x, gate, w1, w2):
        topk_weights, ids = route(x, gate)
        out, mask = torch.zeros_like(x), F.one_hot(ids, E).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(mask[e])
            rows = F.linear(silu_glu(F.linear(x[token], w1[e])), w2[e])
            out.index_add_(0, token, rows * topk_weights[token, slot, None])
        return out

    return run


def by_mask(route):
    """A loop over the experts, by masks of tokens, of which each counts once."""

    def run(x, gate, w1, w2):
        topk_weights, ids = route(x, gate)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (ids == e).any(-1)
            scores = (topk_weights * (ids == e)).sum(-1)
            out[mask] += F.linear(silu_glu(F.linear(x[mask], w1[e])), w2[e]) * scores[mask, None]
        return out

    return run


@pytest.mark.parametrize("route", [last, first], ids=lambda route: route.__name__)
@pytest.mark.parametrize("form", [ordered, by_one_hot, by_mask], ids=lambda form: form.__name__)
def test_fused(form, route):
    given = weights(dtype=torch.float32).values()
    tolerance = 3e-2 if form is ordered else None  # products in bf16
    outcome = check(form(route), *given, gradients=True, tolerance=tolerance, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_an_expert_that_may_be_there_twice():
    """In a loop by one-hots and in sorted rows it counts twice, as it is fused; in one by masks it would count once."""
    given = weights(dtype=torch.float32).values()
    outcome = check(by_one_hot(overlapping), *given, gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)
    assert ["twice" in row.reason for row in refusals(by_mask(overlapping), *given, fullgraph=True)] == [True]


def test_numbers_of_tokens():
    """In one graph for the first, one for all others, and one for a single token."""
    run, given = by_mask(last), [*weights(dtype=torch.float32).values()][1:]
    function = compiled(run, fullgraph=True)
    for count in (T, 64, 2, 7, 1):
        x = torch.randn(count, H, generator=torch.Generator().manual_seed(count))
        assert difference(function(x, *given), run(x, *given)) is None
    assert counters["stats"]["unique_graphs"] == counters["moe_ops"]["fused"] == 3
