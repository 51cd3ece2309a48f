"""Further spellings of routers: read where the formula is one of ours, kept beside fused experts where it is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_passes.match import MoEMatch, Router
from tests.passes.blocks import E, H, K, block, found, match, silu_glu, weights
from tests.passes.compare import assert_same

SCALES = torch.linspace(0.5, 1.5, E)


def logits_of(x, gate):
    return F.linear(x.float(), gate.float())


def soft(x, gate):
    return logits_of(x, gate).softmax(-1).topk(K)


def norm_of_one(x, gate):
    values, ids = soft(x, gate)
    return values / torch.norm(values, p=1, dim=-1, keepdim=True), ids


def vector_norm_of_one(x, gate):
    values, ids = logits_of(x, gate).sigmoid().topk(K)
    return values / torch.linalg.vector_norm(values, ord=1, dim=-1, keepdim=True), ids


def norm_as_a_method(x, gate):
    values, ids = soft(x, gate)
    return values / (values.norm(1, -1, True) + 1e-6), ids


def sum_of_absolute_values(x, gate):
    values, ids = logits_of(x, gate).topk(K)
    values = values.sigmoid()
    return values / values.abs().sum(-1, keepdim=True), ids


def times_the_reciprocal(x, gate):
    values, ids = soft(x, gate)
    return values * values.sum(-1, keepdim=True).reciprocal() * 2.5, ids


def softmax_of_gathered_logits(x, gate):
    logits = logits_of(x, gate)
    ids = logits.topk(K).indices
    return logits.gather(-1, ids).softmax(-1), ids


def taken_along(x, gate):
    scores = logits_of(x, gate).sigmoid()
    ids = (scores + SCALES).topk(K)[1]
    return torch.take_along_dim(scores, ids, -1), ids


def softmax_of_scattered_logits(x, gate):
    logits = logits_of(x, gate)
    values, ids = logits.topk(K)
    sparse = torch.full_like(logits, float("-inf")).scatter(-1, ids, values)
    return sparse.softmax(-1).gather(-1, ids), ids


def softmax_of_masked_logits(x, gate):
    logits = logits_of(x, gate)
    ids = logits.topk(K).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return torch.softmax(logits.masked_fill(~chosen, float("-inf")), dim=1).gather(1, ids), ids


READ = {
    norm_of_one: {"routing": "softmax", "renormalize": True},
    vector_norm_of_one: {"routing": "sigmoid", "renormalize": True},
    norm_as_a_method: {"routing": "softmax", "renormalize": True, "renorm_eps": 1e-6},
    sum_of_absolute_values: {"routing": "topk_sigmoid", "renormalize": True},
    times_the_reciprocal: {"routing": "softmax", "renormalize": True, "scale": 2.5},
    softmax_of_gathered_logits: {"routing": "topk_softmax"},
    taken_along: {"routing": "sigmoid"},
    softmax_of_scattered_logits: {"routing": "topk_softmax"},
    softmax_of_masked_logits: {"routing": "topk_softmax"},
}


@pytest.mark.parametrize("router", READ, ids=lambda router: router.__name__)
def test_read(router):
    run = block(router=router)
    row = match(run).router
    assert isinstance(row, Router), str(row)
    defaults = {"renormalize": False, "renorm_eps": 0.0, "num_groups": 1, "topk_groups": 1, "scale": 1.0}
    assert row.options() == {"top_k": K, **defaults, **READ[router]}
    assert assert_same(run, *weights().values()).fused == 1


def clamped_sum(x, gate):
    values, ids = soft(x, gate)
    return values / values.sum(-1, keepdim=True).clamp(min=1e-9), ids


def normalized(x, gate):
    values, ids = soft(x, gate)
    return F.normalize(values, p=1.0, dim=-1), ids


def scaled_per_expert(x, gate):
    values, ids = soft(x, gate)
    return values * SCALES[ids], ids


def norm_of_two(x, gate):
    values, ids = soft(x, gate)
    return values / torch.norm(values, dim=-1, keepdim=True), ids


def norm_of_all_tokens(x, gate):
    values, ids = soft(x, gate)
    return values / torch.norm(values, p=1, dim=0, keepdim=True), ids


def absolute_values_of_logits(x, gate):
    values, ids = logits_of(x, gate).topk(K)
    return values / values.abs().sum(-1, keepdim=True), ids


def sum_of_others(x, gate):
    values, ids = soft(x, gate)
    return values * values.square().sum(-1, keepdim=True).reciprocal(), ids


def softmax_over_zeros(x, gate):
    logits = logits_of(x, gate)
    values, ids = logits.topk(K)
    return torch.zeros_like(logits).scatter(-1, ids, values).softmax(-1).gather(-1, ids), ids


def softmax_of_other_values(x, gate):
    logits = logits_of(x, gate)
    values, ids = logits.topk(K)
    sparse = torch.full_like(logits, float("-inf")).scatter(-1, ids, values * 2)
    return sparse.softmax(-1).gather(-1, ids), ids


def softmax_of_those_not_chosen(x, gate):
    logits = logits_of(x, gate)
    ids = logits.topk(K).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return logits.masked_fill(chosen, -30.0).softmax(-1).gather(1, ids), ids


def softmax_of_other_masked_logits(x, gate):
    logits = logits_of(x, gate)
    ids = logits.topk(K).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return (logits * 2).masked_fill(~chosen, float("-inf")).softmax(-1).gather(1, ids), ids


def softmax_of_scattered_over_the_tokens(x, gate):
    logits = logits_of(x, gate)
    values, ids = logits.topk(K)
    sparse = torch.full_like(logits, -1e4).scatter(-1, ids, values)
    return sparse.softmax(-1).gather(-1, ids), ids


KEPT = (
    clamped_sum, normalized, scaled_per_expert, norm_of_two, norm_of_all_tokens, absolute_values_of_logits,
    sum_of_others, softmax_over_zeros, softmax_of_other_values, softmax_of_those_not_chosen,
    softmax_of_other_masked_logits, softmax_of_scattered_over_the_tokens,
)  # fmt: skip


@pytest.mark.parametrize("router", KEPT, ids=lambda router: router.__name__)
def test_kept_beside_fused_experts(router):
    run = block(router=router)
    row = match(run).router
    assert not isinstance(row, Router) and "stays in the graph" in row.reason
    assert assert_same(run, *weights().values()).fused == 1


def one_by_max(logits):
    return logits.max(dim=-1, keepdim=True)


def one_by_topk(logits):
    return torch.topk(logits, 1, dim=1)


def one_by_argmax(logits):
    ids = logits.argmax(-1, keepdim=True)
    return logits.gather(1, ids), ids


def one_by_argmax_of_a_row(logits):
    ids = logits.argmax(dim=-1)
    return torch.gather(logits, 1, ids.unsqueeze(1)), ids.unsqueeze(1)


@pytest.mark.parametrize("before", [False, True], ids=["weights_after", "weights_before"])
@pytest.mark.parametrize(
    "choose", [one_by_max, one_by_topk, one_by_argmax, one_by_argmax_of_a_row], ids=lambda choose: choose.__name__
)
def test_sigmoid_of_the_best(choose, before):
    """Top-1 routing whose weight is a sigmoid, on the input or on the result."""

    def run(x, gate, w1, w2):
        values, ids = choose(logits_of(x, gate))
        scale, flat = values.sigmoid().to(x.dtype), ids.reshape(-1)
        rows = x * scale if before else x
        h = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[flat], silu_glu(h).unsqueeze(-1)).squeeze(-1)
        return out if before else out * scale

    (row,) = found(run)
    assert isinstance(row, MoEMatch) and row.router.routing == "topk_sigmoid", str(row)
    assert (row.dispatch.weights is not None) == before
    assert assert_same(run, *weights().values()).fused == 1


def test_grouped_rows_of_the_best():
    def run(x, gate, w1, w2):
        values, ids = one_by_max(logits_of(x, gate))
        flat = ids.reshape(-1)
        ordered, perm = flat.sort()
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        h = F.grouped_mm(x[perm], w1.mT, offs=offsets)
        out = F.grouped_mm(silu_glu(h), w2.mT, offs=offsets)
        return (out[perm.argsort()] * values.sigmoid()).view(-1, H).to(x.dtype)

    assert match(run).router.routing == "topk_sigmoid"
