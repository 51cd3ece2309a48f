"""Routing weights that the model rounds and then widens: what it computes with them stays in the wider dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.blocks import E, K, T, silu_glu, weights
from tests.passes.compare import check
from tests.passes.test_capacity import CAPACITY, moved


def rounded(values, x):
    return values.bfloat16().to(x.dtype)


def with_a_capacity(x, gate, w1, w2, weigh):
    logits = F.linear(x, gate)
    hot = F.one_hot(logits.argmax(-1), E)
    ranks = hot.cumsum(0) - 1
    hot = hot * (ranks < CAPACITY)
    slots = F.one_hot((ranks * hot).sum(-1), CAPACITY).to(x.dtype)
    combine = torch.einsum("se,sc->sec", weigh(logits, x) * hot, slots)
    return moved(x, combine, combine.bool(), w1, w2)


def for_all_experts(x, gate, w1, w2, weigh):
    logits = F.linear(x, gate)
    values, ids = logits.softmax(-1).topk(K, -1)
    zeros = torch.zeros(logits.shape, dtype=torch.bfloat16)
    scores = weigh(zeros.scatter(1, ids, values.bfloat16()).to(x.dtype), x)
    rows = torch.einsum("etn,ehn->eth", silu_glu(torch.einsum("th,enh->etn", x, w1)), w2)
    return torch.einsum("eth,te->th", rows, scores)


def gathered(x, gate, w1, w2, weigh):
    values, ids = F.linear(x, gate).softmax(-1).topk(K, -1)
    flat = ids.flatten()
    h = silu_glu(torch.bmm(w1[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)) * 0.3
    rows = torch.bmm(w2[flat], h.unsqueeze(-1)).squeeze(-1)
    return (rows * weigh(values, x).reshape(-1, 1)).view(T, K, -1).sum(1)


PROGRAMS = {
    "capacity, a product": (
        with_a_capacity, lambda logits, x: rounded(logits.softmax(-1), x) * rounded(logits.sigmoid(), x),
    ),
    "all experts, a number": (for_all_experts, lambda scores, x: scores * 0.3),
    "all experts, by token": (for_all_experts, lambda scores, x: scores * rounded(x[:, :1].sigmoid(), x)),
    "all experts, divided": (for_all_experts, lambda scores, x: scores / scores.sum(-1, keepdim=True)),
    "gathered, a number between": (gathered, rounded),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_exact_as_the_model(name):
    """In float64, so that a product in another dtype shows."""
    program, weigh = PROGRAMS[name]
    inputs = weights(dtype=torch.float64).values()
    outcome = check(lambda *given: program(*given, weigh), *inputs, gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)
