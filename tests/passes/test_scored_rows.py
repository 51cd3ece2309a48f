"""Loops whose experts take the tokens that have a score for them, or are weighted by one, of scores of all experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.blocks import FEW as E
from tests.passes.blocks import K, silu_glu
from tests.passes.blocks import few_weights as weights
from tests.passes.compare import check


def expert(x, w1, w2):
    return F.linear(silu_glu(F.linear(x, w1)), w2)


def routed(x, gate):
    """Scores of all experts, and those of the chosen ones."""
    scores = F.linear(x, gate).softmax(-1)
    return (scores, *scores.topk(K, dim=-1))


def gates(x, gate):
    """Scores that are 0 but at the ids."""
    scores, chosen, ids = routed(x, gate)
    return torch.zeros_like(scores).scatter(1, ids, chosen)


def tokens_of_gates(x, gate, w1, w2):
    dense, out = gates(x, gate), torch.zeros_like(x)
    for e in range(E):
        token = dense[:, e].nonzero().squeeze(-1)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * dense[token, e, None])
    return out


def tokens_of_gates_as_a_tuple(x, gate, w1, w2):
    dense, out = gates(x, gate), torch.zeros_like(x)
    for e in range(E):
        token = torch.nonzero(dense[:, e], as_tuple=True)[0]
        out[token] += expert(x[token], w1[e], w2[e]) * dense[token, e].unsqueeze(-1)
    return out


def gates_above_zero(x, gate, w1, w2):
    dense, out = gates(x, gate), torch.zeros_like(x)
    for e in range(E):
        mask = dense[:, e] > 0
        out[mask] += expert(x[mask], w1[e], w2[e]) * dense[mask, e, None]
    return out


def gates_that_are_not_zero(x, gate, w1, w2):
    dense, out = gates(x, gate), torch.zeros_like(x)
    for e in range(E):
        token = torch.where(dense[:, e] != 0)[0]
        out = out.index_add(0, token, expert(x[token], w1[e], w2[e]) * dense[:, e][token][:, None])
    return out


def logits_above_zero(x, gate, w1, w2):
    """Of a token's experts those whose logits are negative get nothing."""
    logits, out = F.linear(x, gate), torch.zeros_like(x)
    chosen, ids = logits.topk(K, dim=-1)
    dense = torch.zeros_like(logits).scatter(1, ids, chosen)
    for e in range(E):
        mask = dense[:, e] > 0
        out[mask] += expert(x[mask], w1[e], w2[e]) * logits[mask, e, None]
    return out


def logits_that_may_be_zero(x, gate, w1, w2):
    """Nothing is computed for a score of 0, which may be one of the largest."""
    logits, out = F.linear(x, gate).relu(), torch.zeros_like(x)
    chosen, ids = logits.topk(K, dim=-1)
    dense = torch.zeros_like(logits).scatter(1, ids, chosen)
    for e in range(E):
        token = dense[:, e].nonzero().flatten()
        out.index_add_(0, token, (expert(x[token], w1[e], w2[e]) * dense[token, e, None]))
    return out


def scores_of_those_hit(x, gate, w1, w2):
    """By a one-hot that is scattered."""
    scores, _, ids = routed(x, gate)
    hot, out = torch.zeros_like(scores).scatter(1, ids, 1.0), torch.zeros_like(x)
    for e in range(E):
        token = hot[:, e].nonzero(as_tuple=True)[0]
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, e, None])
    return out


def scores_at_the_tokens(x, gate, w1, w2):
    scores, _, ids = routed(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, _ = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, e, None])
    return out


def scores_under_a_mask(x, gate, w1, w2):
    scores, _, ids = routed(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        mask = (ids == e).any(-1)
        out[mask] += expert(x[mask], w1[e], w2[e]) * scores[:, e][mask][:, None]
    return out


def scores_of_ids_twice(x, gate, w1, w2):
    """A token that has an expert twice adds its row twice."""
    scores, _, ids = routed(x, gate)
    ids, out = ids[:, :1].expand(-1, K), torch.zeros_like(x)
    for e in range(E):
        token, _ = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, e, None])
    return out


FORMS = (
    tokens_of_gates, tokens_of_gates_as_a_tuple, gates_above_zero, gates_that_are_not_zero, logits_above_zero,
    logits_that_may_be_zero, scores_of_those_hit, scores_at_the_tokens, scores_under_a_mask, scores_of_ids_twice,
)  # fmt: skip


@pytest.mark.parametrize("function", FORMS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_form(function, gradients):
    outcome = check(function, *weights(dtype=torch.float64).values(), gradients=gradients, fullgraph=True)
    assert outcome.problem is None and outcome.fused == 1


def of_the_expert_before(x, gate, w1, w2):
    scores, _, ids = routed(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, _ = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, e - 1, None])
    return out


def gates_of_other_tokens(x, gate, w1, w2):
    dense, out = gates(x, gate), torch.zeros_like(x)
    other = dense.flip(0)
    for e in range(E):
        token = other[:, e].nonzero().squeeze(-1)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * dense[token, e, None])
    return out


def gates_above_a_half(x, gate, w1, w2):
    dense, out = gates(x, gate), torch.zeros_like(x)
    for e in range(E):
        mask = dense[:, e] > 0.5
        out[mask] += expert(x[mask], w1[e], w2[e]) * dense[mask, e, None]
    return out


def gates_below_zero(x, gate, w1, w2):
    """Which are none."""
    dense, out = gates(x, gate), torch.zeros_like(x)
    for e in range(E):
        mask = dense[:, e] <= 0
        out[mask] += expert(x[mask], w1[e], w2[e]) * dense[mask, e, None]
    return out


def ids_twice_under_a_mask(x, gate, w1, w2):
    """A token that has an expert twice adds its row once."""
    scores, _, ids = routed(x, gate)
    ids, out = ids[:, :1].expand(-1, K), torch.zeros_like(x)
    for e in range(E):
        mask = (ids == e).any(-1)
        out[mask] += expert(x[mask], w1[e], w2[e]) * scores[mask, e, None]
    return out


def ids_of_no_expert(x, gate, w1, w2):
    """Of which a score is none."""
    scores, _, ids = routed(x, gate)
    ids, out = ids + 1, torch.zeros_like(x)
    for e in range(E):
        token, _ = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, e, None])
    return out


MISSES = (
    of_the_expert_before, gates_of_other_tokens, gates_above_a_half, gates_below_zero, ids_twice_under_a_mask,
    ids_of_no_expert,
)  # fmt: skip


@pytest.mark.parametrize("function", MISSES, ids=lambda function: function.__name__)
def test_near_miss_is_left_alone(function):
    outcome = check(function, *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert outcome.problem is None and outcome.fused == 0
