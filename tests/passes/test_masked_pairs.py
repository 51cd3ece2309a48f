"""Loops over experts whose pairs are those of a one-hot under a mask, as switch transformers and nllb drop tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import moe_ops
from tests.passes.blocks import FEW as E
from tests.passes.blocks import H, silu_glu, softmax_router
from tests.passes.blocks import few_weights as weights
from tests.passes.compare import check, refusals


def route(x, gate):
    scores, ids = softmax_router(x, gate)
    return scores.to(x.dtype), ids


def expert(x, w1, w2):
    return F.linear(silu_glu(F.linear(x, w1)), w2)


def added(mask, scores, x, w1, w2, scale=None):
    """Mixtral's loop over ``mask`` [E, K, T]."""
    out = torch.zeros_like(x)
    for e in range(E):
        slot, token = torch.where(mask[e])
        rows = expert(x[None, token].reshape(-1, H), w1[e], w2[e]) * scores[token, slot, None]
        if scale is not None:
            rows *= scale
        out.index_add_(0, token, rows)
    return out


def switch(x, gate, w1, w2):
    """Tokens beyond an expert's capacity are dropped: their rows are zeros."""
    probs = F.linear(x.view(1, -1, H), gate).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E)
    hot = hot * (hot.cumsum(dim=-2) <= 1)
    scores = probs.max(-1).values.unsqueeze(-1)
    return added(hot.view(-1, 1, E).permute(2, 1, 0), scores.view(-1, 1), x, w1, w2)


def two_slots(x, gate, w1, w2):
    scores, ids = route(x, gate)
    hot = F.one_hot(ids, num_classes=E)
    hot = hot * (scores > 0.3).unsqueeze(-1).expand(-1, -1, E)
    return added(hot.permute(2, 1, 0), scores, x, w1, w2)


def two_slots_tokens_first(x, gate, w1, w2):
    scores, ids = route(x, gate)
    mask = ((scores > 0.3)[..., None] * F.one_hot(ids, num_classes=len(w1))).permute(2, 0, 1)
    out = torch.zeros_like(x)
    for e in range(len(w1)):
        token, slot = torch.where(mask[e])
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, slot, None])
    return out


def bits_as_ids(x, gate, w1, w2):
    """nllb: the one-hot of a mask [T, E], whose zeros are pairs with expert 0."""
    probs = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E)
    hot = hot * torch.lt(hot.cumsum(0) - 1, 2)
    return added(F.one_hot(hot, num_classes=E).permute(2, 1, 0), probs * hot, x, w1, w2)


def bits_of_the_best_two(x, gate, w1, w2):
    """nllb's own weights: the gates of two one-hots, added."""
    logits = F.linear(x, gate)
    probs = logits.softmax(-1).to(x.dtype)
    first = F.one_hot(logits.argmax(-1), num_classes=E)
    second = F.one_hot(logits.masked_fill(first.bool(), float("-inf")).argmax(-1), num_classes=E)
    places = second.cumsum(0) - 1
    places += first.sum(0, keepdim=True)
    first, second = first * torch.lt(first.cumsum(0) - 1, 2), second * torch.lt(places, 3)
    one, two = ((probs * mask).sum(1) for mask in (first, second))
    total = (one + two).clamp(min=torch.finfo(x.dtype).eps)
    scores = (one / total)[:, None] * first + (two / total)[:, None] * second
    return added(F.one_hot(first, num_classes=E).permute(2, 1, 0), scores, x, w1, w2, scale=0.8)


def bits_of_all(x, gate, w1, w2):
    """Every pair has a weight."""
    probs = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E)
    return added(F.one_hot(hot, num_classes=E).permute(2, 1, 0), probs, x, w1, w2)


def scaled(x, gate, w1, w2):
    scores, ids = route(x, gate)
    return added(F.one_hot(ids, num_classes=E).permute(2, 1, 0), scores, x, w1, w2, scale=0.8)


def dropout_in_eval(x, gate, w1, w2):
    scores, ids = route(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        inner = F.dropout(silu_glu(F.linear(x[token], w1[e])), 0.1, training=False)
        out.index_add_(0, token, F.dropout(F.linear(inner, w2[e]), 0.0) * scores[token, slot, None])
    return out


FORMS = (switch, two_slots, two_slots_tokens_first, bits_as_ids, bits_of_the_best_two, bits_of_all, scaled,
         dropout_in_eval)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "dtype"),
    [(program, torch.float32) for program in FORMS]
    + [(program, torch.bfloat16) for program in (two_slots, bits_of_the_best_two, scaled)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_fused(program, dtype):
    """In bf16 one of each way to make the weights."""
    outcome = check(program, *weights(dtype=dtype).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize(
    "program", [switch, two_slots, bits_of_the_best_two, scaled], ids=lambda program: program.__name__
)
def test_gradients(program):
    outcome = check(program, *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize(
    ("program", "pairs"),
    [(bits_as_ids, 1), (bits_of_the_best_two, 2), (bits_of_all, E)],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_pairs_whose_weights_are_zero_are_not_computed(program, pairs):
    """Of E pairs for each token, those that are left by the way the weights are made."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (row,) = moe_ops.explain(program, *weights(dtype=torch.float32).values()).fused
    assert row.K == pairs


def test_dropped_token_with_an_infinity():
    """What is dropped is not computed: zero times an infinity would be NaN."""
    given = weights(dtype=torch.float32)
    given["x"] = given["x"].clone()
    probs = F.linear(given["x"].view(1, -1, H), given["gate"]).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E)
    dropped = ((hot * (hot.cumsum(-2) <= 1)).sum(-1) == 0).flatten().nonzero()[0, 0]
    # Large enough to overflow in the experts, and of the same routing.
    given["x"][dropped] *= 1e30
    assert switch(*given.values())[dropped].abs().sum() == 0
    outcome = check(switch, *given.values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


# ---- near misses


def of_other_experts(x, gate, w1, w2):
    """The mask is shifted by an expert after it was made."""
    probs = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E)
    hot = (hot * (hot.cumsum(0) <= 3)).roll(1, -1)
    return added(hot.view(-1, 1, E).permute(2, 1, 0), probs.max(-1).values.view(-1, 1), x, w1, w2)


def a_sum_of_masks(x, gate, w1, w2):
    """A token may have several experts in its one slot."""
    probs = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E) + F.one_hot(probs.argmin(-1), num_classes=E)
    return added(hot.view(-1, 1, E).permute(2, 1, 0), probs.max(-1).values.view(-1, 1), x, w1, w2)


def rearranged(x, gate, w1, w2):
    """The view makes slots of what were tokens."""
    probs = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E).view(-1, 2, E)
    return added(hot.permute(2, 1, 0), probs.max(-1).values.view(-1, 2), x, w1, w2)


def dropped_for_one(x, gate, w1, w2):
    scores, ids = route(x, gate)
    hot = F.one_hot(ids, num_classes=E)
    mask, rest = ((one).permute(2, 1, 0) for one in (hot * (scores > 0.3).unsqueeze(-1), hot))
    out = torch.zeros_like(x)
    for e in range(E):
        slot, token = torch.where(mask[e] if e == 1 else rest[e])
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, slot, None])
    return out


def scaled_for_one(x, gate, w1, w2):
    scores, ids = route(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, slot, None] * (0.5 if e == 1 else 2.0))
    return out


def scaled_by_tensor(x, gate, w1, w2):
    scores, ids = route(x, gate)
    return added(F.one_hot(ids, num_classes=E).permute(2, 1, 0), scores, x, w1, w2, scale=x[0, :1])


def counts_as_ids(x, gate, w1, w2):
    """Twice a bit is no id of [0, 2)."""
    probs = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(probs.argmax(-1), num_classes=E) * (E - 1)
    return added(F.one_hot(hot, num_classes=E).permute(2, 1, 0), probs, x, w1, w2)


def dropout_in_training(x, gate, w1, w2):
    scores, ids = route(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        inner = F.dropout(silu_glu(F.linear(x[token], w1[e])), 1.0)
        out.index_add_(0, token, F.linear(inner, w2[e]) * scores[token, slot, None])
    return out


MISSES = (
    of_other_experts, a_sum_of_masks, rearranged, dropped_for_one, scaled_for_one, scaled_by_tensor, counts_as_ids,
    dropout_in_training,
)  # fmt: skip


@pytest.mark.parametrize("program", MISSES, ids=lambda program: program.__name__)
def test_near_miss(program):
    (row,) = refusals(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert row.reason and row.cure
