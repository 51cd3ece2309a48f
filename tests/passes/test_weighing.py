"""Gathered weights of experts in a product that multiplies by the routing weights as well, and sums or not; sums that
have no routing weights, or one number for all pairs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.blocks import E, H, K, silu_glu, weights
from tests.passes.compare import check, refusals

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
    (row,) = refusals(program, *inputs.values(), fullgraph=True)
    assert "it does not multiply its bias" in row.reason


@pytest.mark.parametrize("program", [weighed_first, weighed_before_and_after], ids=lambda program: program.__name__)
def test_first_products_do_not_weigh(program):
    inputs = weights(dtype=torch.float32)
    (row, *_) = refusals(program, *inputs.values(), fullgraph=True)
    assert row.reason and row.cure


# ---- no routing weights


def results(x, ids, w1, w2):
    return torch.einsum("tkn,tkhn->tkh", silu_glu(torch.einsum("th,tknh->tkn", x, w1[ids])), w2[ids])


def every(x, scores, w1, w2):
    return torch.einsum("te,ten,ehn->th", scores, silu_glu(torch.einsum("th,enh->ten", x, w1)), w2)


def gathered_sum(x, gate, w1, w2):
    return results(x, F.linear(x, gate).topk(K).indices, w1, w2).sum(1)


def gathered_best(x, gate, w1, w2):
    best = F.linear(x, gate).argmax(-1)
    return torch.einsum("tn,thn->th", silu_glu(torch.einsum("th,tnh->tn", x, w1[best])), w2[best])


def switch_by_one_hot(x, gate, w1, w2):
    """The best expert's probability multiplies what its one-hot picked."""
    best, index = F.linear(x, gate).softmax(-1).max(-1)
    return best[:, None] * every(x, F.one_hot(index, E).to(x.dtype), w1, w2)


def mask_of_the_best(x, gate, w1, w2):
    return every(x, F.one_hot(F.linear(x, gate).topk(K).indices, E).sum(1).to(x.dtype), w1, w2)


def one_number(x, gate, w1, w2):
    ids = F.linear(x, gate).topk(K).indices
    return every(x, torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, 0.3), w1, w2)


def sorted_rows(x, gate, w1, w2):
    flat = F.linear(x, gate).topk(K).indices.reshape(-1)
    perm = flat.argsort()
    offsets = torch.histc(flat.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    h = F.grouped_mm(x[perm // K].bfloat16(), w1.bfloat16().mT, offs=offsets)
    out = F.grouped_mm(silu_glu(h), w2.bfloat16().mT, offs=offsets).to(x.dtype)
    return torch.zeros_like(x).index_add(0, perm // K, out)


UNWEIGHTED = (gathered_sum, gathered_best, switch_by_one_hot, mask_of_the_best, one_number, sorted_rows)


@pytest.mark.parametrize("program", UNWEIGHTED, ids=lambda program: program.__name__)
def test_sum_without_routing_weights(program):
    loose = 3e-2 if program is sorted_rows else None
    for gradients, dtype in ((False, torch.float32), (True, torch.float64)):
        given = weights(dtype=dtype).values()
        outcome = check(program, *given, gradients=gradients, tolerance=loose, fullgraph=True)
        assert (outcome.problem, outcome.fused) == (None, 1)


def first_slot(x, gate, w1, w2):
    return results(x, F.linear(x, gate).topk(K).indices, w1, w2)[:, 0]


def mean_of_slots(x, gate, w1, w2):
    return results(x, F.linear(x, gate).topk(K).indices, w1, w2).mean(1)


def other_tokens_sum(x, gate, w1, w2):
    out = results(x, F.linear(x, gate).topk(K).indices, w1, w2)
    return out.transpose(0, 1).reshape(-1, K, H).sum(1)


def ones_elsewhere(x, gate, w1, w2):
    ids = F.linear(x, gate).topk(K).indices
    return every(x, torch.ones(x.shape[0], E, dtype=x.dtype).scatter(1, ids, 0.0), w1, w2)


def one_id_twice(x, gate, w1, w2):
    ids = F.linear(x, gate).topk(K).indices // 2
    return every(x, torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, 1.0), w1, w2)


NO_SUM = (first_slot, mean_of_slots, other_tokens_sum, ones_elsewhere, one_id_twice)


@pytest.mark.parametrize("program", NO_SUM, ids=lambda program: program.__name__)
def test_other_sums_without_routing_weights(program):
    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)
