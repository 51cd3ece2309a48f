"""Loops that put their results into a tensor: `safety.different_gradient` knows what required a gradient when it
was read, and which writes recorded one, where the tensor itself shows what it came to in the end.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.passes.blocks import FEW as E
from tests.passes.blocks import K, batched, softmax_router
from tests.passes.blocks import few_weights as weights
from tests.passes.compare import check
from tests.passes.test_unrolled import expert


def assigned_rows(x, gate, w1, w2, start=torch.zeros_like):
    out, (topk_weights, ids) = start(x), softmax_router(x, gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out[token] = out[token] + topk_weights[token, slot, None] * expert(x[token], w1[e], w2[e])
    return out


def assigned_by_mask(x, gate, w1, w2):
    out, (topk_weights, ids) = x.new_zeros(x.shape), softmax_router(x, gate)
    for k in range(K):
        for e in range(E):
            mine = ids[:, k] == e
            out[mine] = out[mine] + topk_weights[mine, k, None] * expert(x[mine], w1[e], w2[e])
    return out


def assigned_to_zeros_cast(x, gate, w1, w2):
    return assigned_rows(x, gate, w1, w2, lambda x: torch.zeros(x.shape, dtype=x.dtype).to(x.dtype))


def assigned_to_a_constant(x, gate, w1, w2):
    return assigned_rows(x, gate, w1, w2, lambda x: x.detach().sin())


def assigned_to_tokens(x, gate, w1, w2):
    return assigned_rows(x, gate, w1, w2, torch.sin)


@pytest.mark.parametrize(
    "form",
    [assigned_rows, assigned_by_mask, assigned_to_zeros_cast, assigned_to_a_constant, assigned_to_tokens],
    ids=lambda form: form.__name__,
)
def test_gradients_of_assigned_rows(form):
    outcome = check(form, *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused, counters["moe_ops"]["refused"]) == (None, 1, 0)


def added_without_gradients(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = topk_weights[token, slot, None] * expert(x[token], w1[e], w2[e])
        with torch.set_grad_enabled(e == E - 1):
            out.index_add_(0, token, rows)
    return out


def put_without_gradients(x, gate, w1, w2):
    scores, choice = F.linear(x, gate).softmax(-1).max(dim=-1)
    out = torch.zeros_like(x)
    for e in range(E):
        rows = expert(x[choice == e], w1[e], w2[e])
        with torch.set_grad_enabled(e > 0):
            out[choice == e] = rows
    return out * scores.unsqueeze(-1)


def read_without_gradients(x, gate, w1, w2):
    """Of what the experts before have added, and of what was there."""
    out, (topk_weights, ids) = x.sin(), softmax_router(x, gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        with torch.set_grad_enabled(e > 1):
            before = out[token]
        out[token] = before + topk_weights[token, slot, None] * expert(x[token], w1[e], w2[e])
    return out


def activated_without_gradients(x, gate, w1, w2):
    """What the activation gives is written by a product that records gradients."""
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        gated, up = F.linear(x[token], w1[e]).chunk(2, -1)
        with torch.no_grad():
            rows = F.silu(gated)
        rows.mul_(up)
        out.index_add_(0, token, topk_weights[token, slot, None] * F.linear(rows, w2[e]))
    return out


@pytest.mark.parametrize(
    "form",
    [added_without_gradients, put_without_gradients, read_without_gradients, activated_without_gradients],
    ids=lambda form: form.__name__,
)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_some_results_are_put_there_without_gradients(form, training):
    """Which the tensor's own requires_grad does not show: it is that of the end."""
    outcome = check(form, *weights(dtype=torch.float64).values(), gradients=training, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0 if training else 1)


def weights_in_bounds(x, gate, w1, w2):
    """As code that keeps its weights in bounds writes them, out of autograd's sight."""
    w2.data.clamp_(-0.1, 0.1)
    return batched(x, *softmax_router(x, gate)[::-1], w1, w2)


def scores_written_as_constants(x, gate, w1, w2):
    topk_weights, ids = softmax_router(x, gate)
    topk_weights.detach().mul_(2)
    return batched(x, ids, topk_weights, w1, w2)


def sum_read_as_a_constant(x, gate, w1, w2):
    topk_weights, ids = softmax_router(x, gate)
    total = torch.zeros_like(x)
    constant = total.detach()
    for e in range(E):
        token, slot = torch.where(ids == e)
        total.index_add_(0, token, topk_weights[token, slot, None] * expert(x[token], w1[e], w2[e]))
    return total * 1 + constant * 3


@pytest.mark.parametrize(
    "form",
    [weights_in_bounds, scores_written_as_constants, sum_read_as_a_constant],
    ids=lambda form: form.__name__,
)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_detached_name_is_no_name_of_what_has_a_gradient(form, training):
    """One memory, and two tensors to autograd."""
    outcome = check(form, *weights(dtype=torch.float64).values(), gradients=training, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0 if training else 1)
