"""Routers: each spelling is read as a row of meta.routing with its options, or stays in the graph with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from compile_passes.match import Router
from tests.passes.blocks import E, K, batched, block, capture, match, weights
from tests.passes.compare import compiled

BIAS = torch.linspace(-0.1, 0.1, E)


def logits_of(x, gate):
    return F.linear(x.float(), gate.float())


def plain_softmax(x, gate):
    return logits_of(x, gate).softmax(-1).topk(K, dim=-1)


def in_place_renorm(x, gate):
    values, ids = F.softmax(F.linear(x, gate), dim=1, dtype=torch.float).topk(K, -1)
    values /= values.sum(dim=-1, keepdim=True)
    return values.to(x.dtype), ids


def topk_softmax(x, gate):
    values, ids = torch.topk(F.linear(x, gate), K, dim=-1)
    return torch.softmax(values, dim=-1) / 4, ids


def sigmoid_bias(x, gate):
    scores = logits_of(x, gate).sigmoid()
    ids = torch.topk(scores + BIAS, k=K, dim=-1, sorted=False)[1]
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def sqrtsoftplus(x, gate):
    scores = F.softplus(logits_of(x, gate)).sqrt()
    values, ids = scores.topk(K)
    return values, ids


def dense_sigmoid(x, gate):
    values, ids = logits_of(x, gate).topk(K)
    return values.sigmoid(), ids


def grouped_sigmoid(x, gate, groups=4, kept=2, fill=float("-inf")):
    scores = logits_of(x, gate).sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, groups, E // groups).topk(2, dim=-1)[0].sum(-1)
    index = torch.topk(best, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best)
    mask.scatter_(1, index, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, E // groups).reshape(-1, E)
    ids = choice.masked_fill(~mask.bool(), fill).topk(K, dim=-1, sorted=False)[1]
    return scores.gather(1, ids), ids


def group_max_softmax(x, gate, groups=4, kept=2):
    scores = logits_of(x, gate).softmax(-1)
    best = scores.view(-1, groups, E // groups).max(dim=-1).values
    mask = torch.zeros_like(best).scatter(1, best.topk(kept)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, E // groups).reshape(-1, E)
    return scores.masked_fill(~mask.bool(), 0.0).topk(K)


def no_group_limit(x, gate):
    return grouped_sigmoid(x, gate, groups=2, kept=2)


ROUTERS = {
    plain_softmax: {"routing": "softmax"},
    in_place_renorm: {"routing": "softmax", "renormalize": True},
    topk_softmax: {"routing": "topk_softmax", "scale": 0.25},
    sigmoid_bias: {"routing": "sigmoid", "renormalize": True, "renorm_eps": 1e-20, "scale": 2.5},
    sqrtsoftplus: {"routing": "sqrtsoftplus"},
    dense_sigmoid: {"routing": "topk_sigmoid"},
    grouped_sigmoid: {"routing": "sigmoid_group_top2", "num_groups": 4, "topk_groups": 2},
    group_max_softmax: {"routing": "softmax_group_max", "num_groups": 4, "topk_groups": 2},
    no_group_limit: {"routing": "sigmoid"},
}


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.__name__)
def test_router(router):
    found = match(block(router=router)).router
    assert isinstance(found, Router), str(found)
    defaults = {"renormalize": False, "renorm_eps": 0.0, "num_groups": 1, "topk_groups": 1, "scale": 1.0}
    assert found.options() == {"top_k": K, **defaults, **ROUTERS[router]}


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.__name__)
def test_router_selects_what_the_model_selects(router):
    inputs = weights()
    found = match(block(router=router), **inputs).router
    x, gate = inputs["x"], inputs["gate"]
    logits = F.linear(x, gate) if found.logits.meta["example_value"].dtype == x.dtype else logits_of(x, gate)
    ours = torch.ops.moe_ops.fused_topk(logits, BIAS if found.bias is not None else None, **found.options())
    theirs = router(x, gate)
    for expected, got in zip(_dense(*theirs), _dense(*ours), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2 if theirs[0].dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def _dense(topk_weights, ids):
    return torch.zeros(len(ids), E).scatter(1, ids.long(), topk_weights.float())


def clamped_sum(x, gate):
    values, ids = plain_softmax(x, gate)
    return values / values.sum(-1, keepdim=True).clamp(min=1e-6), ids


def scaled_per_expert(x, gate):
    values, ids = plain_softmax(x, gate)
    return values * BIAS[ids], ids


def biased_with_zero_fill(x, gate):
    return grouped_sigmoid(x, gate, fill=0.0)


def smallest(x, gate):
    return logits_of(x, gate).softmax(-1).topk(K, largest=False)


def strided_groups(x, gate):
    """Groups of every fourth expert instead of runs."""
    scores = logits_of(x, gate).softmax(-1)
    best = scores.view(-1, 4, 2).amax(-1)
    mask = torch.zeros_like(best).scatter(1, best.topk(2)[1], 1)
    mask = mask.unsqueeze(1).expand(-1, 2, 4).reshape(-1, E)
    return scores.masked_fill(~mask.bool(), 0.0).topk(K)


def overwritten_through_a_view(x, gate):
    scores = logits_of(x, gate).softmax(-1)
    half = scores[:, : E // 2]
    half.mul_(2.0)
    return scores.topk(K)


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (clamped_sum, "something else than their sum"),
        (scaled_per_expert, "pass through mul"),
        (biased_with_zero_fill, "score 0"),
        (smallest, "not the indices of a topk"),
        (strided_groups, "something else than a group limit"),
        (overwritten_through_a_view, "through another view"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_router_stays(router, reason):
    found = match(block(router=router))
    assert reason in found.router.reason


def test_escaping_ids_keep_the_router():
    def run(x, gate, w1, w2):
        topk_weights, ids = plain_softmax(x, gate)
        return block(router=lambda *_: (topk_weights, ids))(x, gate, w1, w2), ids

    assert "also used by what the captured code returns" in match(run).router.reason


def test_escaping_scores_do_not():
    def run(x, gate, w1, w2):
        scores = logits_of(x, gate).softmax(-1)
        return block(router=lambda *_: scores.topk(K))(x, gate, w1, w2), scores

    assert match(run).router.routing == "softmax"


def test_logits_are_taken_before_the_upcast():
    graph = capture(block(), **weights()).graph
    linear = next(node for node in graph.nodes if "linear" in node.name)
    assert match(block()).router.logits.name == linear.name


def _rows(x, gate):
    """Logits [2, T / 2, E]: a router that keeps batch and sequence apart."""
    return F.linear(x.view(2, -1, x.shape[-1]), gate).float()


def _flat(values, ids):
    return values.reshape(-1, K), ids.reshape(-1, K)


def soft_in_three(x, gate):
    values, ids = _rows(x, gate).softmax(2).topk(K, dim=2)
    return _flat(values / values.sum(2, keepdim=True), ids)


def sigmoid_in_three(x, gate):
    scores = _rows(x, gate).sigmoid()
    ids = (scores + BIAS.view(1, 1, E)).topk(K, -1)[1]
    chosen = scores.gather(2, ids)
    return _flat(chosen / (chosen.sum(-1, True) + 1e-6) * 2.0, ids)


def softmax_after_topk_in_three(x, gate):
    values, ids = _rows(x, gate).topk(K)
    return _flat(values.softmax(2, dtype=torch.float32), ids)


@pytest.mark.parametrize(
    ("router", "options"),
    [
        (soft_in_three, {"routing": "softmax", "renormalize": True}),
        (sigmoid_in_three, {"routing": "sigmoid", "renormalize": True, "renorm_eps": 1e-6, "scale": 2.0}),
        (softmax_after_topk_in_three, {"routing": "topk_softmax"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_router_of_three_dimensions(router, options):
    found = match(block(router=router)).router
    assert isinstance(found, Router), str(found)
    defaults = {"renormalize": False, "renorm_eps": 0.0, "num_groups": 1, "topk_groups": 1, "scale": 1.0}
    assert found.options() == {"top_k": K, **defaults, **options}
    assert (found.bias is None) == (router is not sigmoid_in_three)


def sum_over_the_sequence(x, gate):
    values, ids = _rows(x, gate).softmax(-1).topk(K)
    return _flat(values / values.sum(1, keepdim=True), ids)


def softmax_over_the_batch(x, gate):
    return _flat(*_rows(x, gate).softmax(0).topk(K))


def softmax_of_the_chosen_over_the_sequence(x, gate):
    values, ids = _rows(x, gate).topk(K)
    return _flat(values.softmax(1), ids)


def gathered_by_other_ids(x, gate):
    scores = logits_of(x, gate).sigmoid()
    ids = (scores + BIAS).topk(K)[1]
    return scores.gather(1, (scores - BIAS).topk(K)[1]), ids


def gathered_of_other_scores(x, gate):
    scores = logits_of(x, gate).sigmoid()
    ids = scores.topk(K)[1]
    return (scores * 1.5).tanh().gather(1, ids), ids


def bias_per_token(x, gate):
    scores = logits_of(x, gate).sigmoid()
    ids = (scores + scores.mean(-1, keepdim=True)).topk(K)[1]
    return scores.gather(1, ids), ids


def bias_on_softmax_groups(x, gate):
    scores = logits_of(x, gate)
    ids = (scores + BIAS).topk(K)[1]
    return scores.gather(1, ids).softmax(-1), ids


def renormalised_twice(x, gate):
    values, ids = plain_softmax(x, gate)
    values = values / values.sum(-1, keepdim=True)
    return values / (values.sum(-1, keepdim=True) + 1.0), ids


def scaled_before_the_sum_is_added(x, gate):
    values, ids = plain_softmax(x, gate)
    return values / (values.sum(-1, keepdim=True) * 2 + 1e-3), ids


def number_divided_by_weights(x, gate):
    values, ids = plain_softmax(x, gate)
    return 0.1 / values, ids


def double_logits(x, gate):
    return F.linear(x.double(), gate.double()).softmax(-1).topk(K)


def logits_of_another_shape(x, gate):
    halves = F.linear(x.reshape(-1, x.shape[-1] // 2), gate[: E // 2, : x.shape[-1] // 2])
    return halves.view(-1, E).float().softmax(-1).topk(K)


def powers(x, gate):
    values, ids = (logits_of(x, gate).sigmoid() ** 2).topk(K)
    return values, ids


def sqrt_of_sigmoid(x, gate):
    return logits_of(x, gate).sigmoid().sqrt().topk(K)


def sharp_softplus(x, gate):
    return F.softplus(logits_of(x, gate), beta=2).sqrt().topk(K)


def half_of_the_weights(x, gate):
    values, ids = plain_softmax(x, gate)
    return values.half(), ids


def filled_with_one(x, gate):
    return grouped_sigmoid(x, gate, fill=1.0)


def unmasked(x, gate):
    """The mask of the kept groups is not inverted: they are the ones that are excluded."""
    scores = logits_of(x, gate).softmax(-1)
    best = scores.view(-1, 4, E // 4).max(dim=-1).values
    mask = torch.zeros_like(best).scatter(1, best.topk(2)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    return scores.masked_fill(mask.bool(), 0.0).topk(K)


def groups_ranked_by_three(x, gate):
    scores = logits_of(x, gate).sigmoid()
    best = scores.view(-1, 2, E // 2).topk(3, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(best).scatter(1, best.topk(1)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 2, E // 2).reshape(-1, E)
    return scores.masked_fill(~mask.bool(), float("-inf")).topk(K)


def groups_ranked_by_other_scores(x, gate):
    scores = logits_of(x, gate).softmax(-1)
    best = scores.square().view(-1, 4, E // 4).amax(-1)
    mask = torch.zeros_like(best).scatter(1, best.topk(2)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    return scores.masked_fill(~mask.bool(), 0.0).topk(K)


def groups_ranked_by_the_least(x, gate):
    scores = logits_of(x, gate).softmax(-1)
    best = scores.view(-1, 4, E // 4).amax(-1)
    mask = torch.zeros_like(best).scatter(1, best.topk(2, largest=False)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    return scores.masked_fill(~mask.bool(), 0.0).topk(K)


def groups_marked_on_ones(x, gate):
    scores = logits_of(x, gate).softmax(-1)
    best = scores.view(-1, 4, E // 4).amax(-1)
    mask = torch.ones_like(best).scatter(1, best.topk(2)[1], 0)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    return scores.masked_fill(~mask.bool(), 0.0).topk(K)


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (sum_over_the_sequence, "something else than their sum"),
        (softmax_over_the_batch, "scores=none"),
        (softmax_of_the_chosen_over_the_sequence, "not over the selected experts"),
        (gathered_by_other_ids, "not the selected scores"),
        (gathered_of_other_scores, "score + bias"),
        (bias_per_token, "score + bias"),
        (renormalised_twice, "pass through div"),
        (scaled_before_the_sum_is_added, "something else than their sum"),
        (number_divided_by_weights, "something else than their sum"),
        (double_logits, "the logits are not"),
        (logits_of_another_shape, "not one row of the experts' scores"),
        (powers, "scores=none"),
        (sqrt_of_sigmoid, "scores=none"),
        (sharp_softplus, "scores=none"),
        (filled_with_one, "something else than a group limit"),
        (unmasked, "something else than a group limit"),
        (groups_ranked_by_three, "something else than a group limit"),
        (groups_ranked_by_other_scores, "something else than a group limit"),
        (groups_ranked_by_the_least, "something else than a group limit"),
        (groups_marked_on_ones, "something else than a group limit"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_router_that_is_almost_known_stays(router, reason):
    found = match(block(router=router))
    assert not isinstance(found.router, Router) and reason in found.router.reason, str(found.router)


def test_a_bias_is_refused_where_the_routing_takes_none():
    found = match(block(router=bias_on_softmax_groups))
    assert "takes no correction bias" in found.router.reason


def test_a_trained_bias_gives_a_frozen_block_no_gradient():
    """Correction biases are parameters, often the only ones that nobody froze: they select, and are not learned."""

    def run(x, gate, w1, w2, bias):
        scores = F.linear(x, gate).sigmoid()
        ids = (scores + bias).topk(K, dim=-1)[1]
        return batched(x, ids, scores.gather(1, ids), w1, w2)

    given = weights(dtype=torch.float32)
    bias = torch.linspace(-0.5, 0.5, E).requires_grad_()
    expected = run(*given.values(), bias)
    for trained in ((), ("gate",)):
        inputs = {name: value.clone().requires_grad_(name in trained) for name, value in given.items()}
        got = compiled(run, fullgraph=True)(*inputs.values(), bias)
        assert counters["moe_ops"]["fused"] == 1
        assert got.requires_grad == bool(trained)
        torch.testing.assert_close(got, expected)
    got.sum().backward()
    assert bias.grad is None and inputs["gate"].grad is not None
