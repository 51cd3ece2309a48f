"""Loops over experts, by how they find the weights of an expert's rows: a mask of pairs, a column, zeros beside."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.passes.blocks import FEW as E
from tests.passes.blocks import few_weights as weights
from tests.passes.blocks import silu_glu, softmax_router
from tests.passes.compare import check, refusals


def route(x, gate):
    scores, ids = softmax_router(x, gate)
    return scores.to(x.dtype), ids


def expert(x, w1, w2):
    return F.linear(silu_glu(F.linear(x, w1)), w2)


def every_token(x, gate, w1, w2, weighs):
    """All tokens through every expert, times ``weighs(scores, ids, e)``."""
    scores, ids = route(x, gate)
    return sum(weighs(scores, ids, e) * expert(x, w1[e], w2[e]) for e in range(E))


def its_tokens(x, gate, w1, w2, weighs, of=lambda scores, ids: (scores, ids)):
    """An expert's own tokens, times ``weighs(scores, ids == e, token)``."""
    scores, ids = of(*route(x, gate))
    out = torch.zeros_like(x)
    for e in range(E):
        mask = ids == e
        token = mask.any(-1)
        out[token] += expert(x[token], w1[e], w2[e]) * weighs(scores, mask, token)
    return out


def zeros_beside(*given):
    return every_token(*given, lambda w, ids, e: torch.where(ids == e, w, torch.zeros_like(w)).sum(-1, keepdim=True))


def others_filled(*given):
    return every_token(*given, lambda w, ids, e: w.masked_fill(ids != e, 0.0).sum(-1, keepdim=True))


def at_a_mask_of_pairs(*given):
    return its_tokens(*given, lambda w, mask, token: w[mask].unsqueeze(-1))


def rows_of_masked_weights(*given):
    return its_tokens(*given, lambda w, mask, token: (w * mask)[token].sum(-1, keepdim=True))


def rows_of_filled_weights(*given):
    return its_tokens(*given, lambda w, mask, token: w.masked_fill(~mask, 0.0)[token].sum(-1, keepdim=True))


def picked(x, gate, w1, w2, weighs, number=lambda e: e, of=lambda scores, ids: (scores, ids)):
    """The best of [batch, length], flattened; weights from those of an expert's tokens: ``weighs(scores, ids, token,
    e)``.
    """
    scores, ids = (part.reshape(-1, part.shape[-1]) for part in of(*route(x[None], gate)))
    out = torch.zeros_like(x)
    for e in range(E):
        token = (ids == e).any(-1).nonzero().squeeze(-1)
        weight = weighs(scores, ids, token, number(e))
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * weight.view(-1, 1))
    return out


def where_of_rows(w, ids, token, e):
    return torch.where(ids[token] == e, w[token], torch.zeros_like(w[token])).sum(-1)


def filled_rows(w, ids, token, e):
    return w[token].masked_fill(ids[token] != e, 0).sum(1)


def rows_of_both(w, ids, token, e):
    return ((ids == e)[token] * w[token]).sum(-1, keepdim=True)


def slot_of_rows(w, ids, token, e):
    slot = (ids == e)[token].int().argmax(dim=-1, keepdim=True)
    return w.index_select(0, token).gather(-1, slot).squeeze(-1)


def rows_of_slots(w, ids, token, e):
    slot = (ids == e).float().argmax(dim=-1)
    return torch.gather(w[token], 1, slot[token].unsqueeze(-1))


def slot_by_nonzero(w, ids, token, e):
    slot = (ids[token] == e).nonzero(as_tuple=True)[1]
    return w[token].gather(1, slot.unsqueeze(1))


def pairs_of_flattened(w, ids, token, e):
    return w[ids == e]


def scaled_slot(w, ids, token, e):
    return 2.5 * slot_of_rows(w, ids, token, e)


def scaled_pairs(w, ids, token, e):
    return (w[ids == e] * 0.5).unsqueeze(-1)


PICKS = (where_of_rows, filled_rows, rows_of_both, slot_of_rows, rows_of_slots, slot_by_nonzero, pairs_of_flattened,
         scaled_slot, scaled_pairs)  # fmt: skip


@pytest.mark.parametrize("pick", PICKS, ids=lambda pick: pick.__name__)
def test_picked_from_rows(pick):
    inputs = weights(dtype=torch.float64).values()
    outcome = check(lambda *given: picked(*given, pick), *inputs, gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def slot_of_others(w, ids, token, e):
    return w[token].gather(-1, (ids[token] != e).int().argmax(dim=-1, keepdim=True))


def slots_of_other_rows(w, ids, token, e):
    return w[token].gather(-1, (ids == e).int().flip(0).argmax(dim=-1, keepdim=True)[token])


def last_slot(w, ids, token, e):
    return w[token].gather(-1, (ids[token] == e).int().argmax(dim=-1, keepdim=True) * 0 + 1)


def ones_beside_rows(w, ids, token, e):
    return torch.where(ids[token] == e, w[token], torch.ones_like(w[token])).sum(-1)


def its_own_filled_rows(w, ids, token, e):
    return w[token].masked_fill(ids[token] == e, 0).sum(1)


def over_rows(w, ids, token, e):
    return torch.where(ids[token] == e, w[token], torch.zeros_like(w[token])).sum(0).sum() + torch.zeros_like(
        w[token, 0]
    )


def scaled_by_number(w, ids, token, e):
    return w[ids == e] * (e + 1)


def scaled_by_rows(w, ids, token, e):
    return w[ids == e] * w[token, 0]


NO_PICKS = (slot_of_others, slots_of_other_rows, last_slot, ones_beside_rows, its_own_filled_rows, over_rows,
            scaled_by_rows)  # fmt: skip


@pytest.mark.parametrize("pick", NO_PICKS, ids=lambda pick: pick.__name__)
def test_picked_otherwise(pick):
    inputs = weights(dtype=torch.float32).values()
    found = refusals(lambda *given: picked(*given, pick), *inputs, fullgraph=True)
    assert "routing weights" in found[0].reason


@pytest.mark.parametrize("pick", [where_of_rows, slot_of_rows], ids=lambda pick: pick.__name__)
def test_picked_for_the_next_expert(pick):
    inputs = weights(dtype=torch.float32).values()
    assert refusals(lambda *given: picked(*given, pick, number=lambda e: (e + 1) % E), *inputs, fullgraph=True)


def test_scaled_otherwise_for_every_expert():
    inputs = weights(dtype=torch.float32).values()
    assert refusals(lambda *given: picked(*given, scaled_by_number), *inputs, fullgraph=True)


def scaled(x, gate, w1, w2, scale, weighs, of=lambda ids: ids):
    """Every expert has a scale of its own: ``weighs(rows, weights, scale, e)``."""
    scores, ids = route(x, gate)
    ids = of(ids)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out = out.index_add(0, token, weighs(expert(x[token], w1[e], w2[e]), scores[token, slot, None], scale, e))
    return out


def scaled_weights(rows, w, scale, e):
    return rows * (w * scale[e])


def scaled_results(rows, w, scale, e):
    return scale[e] * rows * w


def scaled_after(rows, w, scale, e):
    return rows * w * scale.unbind(0)[e]


def scaled_as_the_next(rows, w, scale, e):
    return rows * w * scale[(e + 1) % E]


def scaled_and_changed(rows, w, scale, e):
    return rows * w * scale.add_(1)[e]


def scaled_inputs(dtype):
    return [*weights(dtype=dtype).values(), torch.linspace(0.5, 2, E, dtype=dtype)]


@pytest.mark.parametrize("weighs", [scaled_weights, scaled_results, scaled_after], ids=lambda one: one.__name__)
def test_scale_of_every_expert(weighs):
    outcome = check(
        lambda *given: scaled(*given, weighs), *scaled_inputs(torch.float64), gradients=True, fullgraph=True
    )
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_scale_of_another_expert():
    assert refusals(lambda *given: scaled(*given, scaled_as_the_next), *scaled_inputs(torch.float32), fullgraph=True)


def test_scale_that_changes_in_the_loop():
    def program(*given):
        *others, scale = given
        return scaled(*others, scale.clone(), scaled_and_changed)

    assert refusals(program, *scaled_inputs(torch.float32), fullgraph=True)


def test_scale_of_ids_that_may_be_no_experts():
    found = refusals(
        lambda *given: scaled(*given, scaled_weights, of=lambda ids: ids * 2 - 1),
        *scaled_inputs(torch.float32), fullgraph=True,
    )  # fmt: skip
    assert "of which every one has a scale" in found[0].reason


def test_one_of_two_slots_with_the_same_expert():
    """The weight of the first slot alone is not what the sum of both weighs."""
    inputs = weights(dtype=torch.float32).values()
    program = partial(picked, weighs=slot_of_rows, of=lambda scores, ids: (scores, ids // 2))
    assert refusals(lambda *given: program(*given), *inputs, fullgraph=True)


def column_at_tokens(x, gate, w1, w2, number=lambda e: e):
    """Of scores for all experts, at tokens that are listed by pairs."""
    scores, ids = route(x, gate)
    scores = torch.zeros_like(F.linear(x, gate)).scatter(-1, ids, scores)
    out = torch.zeros_like(x)
    for e in range(E):
        token, _ = torch.where(ids == e)
        out[token] += expert(x[token], w1[e], w2[e]) * scores[token, number(e), None]
    return out


def put_in_all_columns(x, gate, w1, w2):
    """labml's switch: rows by `x[index, :]`, put by `out[index, :] =`, weighted at last."""
    scores, ids = F.linear(x, gate).softmax(-1).max(-1)
    out = x.new_zeros(x.shape)
    for e in range(E):
        token = torch.eq(ids, e).nonzero(as_tuple=True)[0]
        out[token, :] = expert(x[token, :], w1[e], w2[e])
    return out * scores.view(-1, 1)


FORMS = (zeros_beside, others_filled, at_a_mask_of_pairs, rows_of_masked_weights, rows_of_filled_weights,
         column_at_tokens, put_in_all_columns)  # fmt: skip


@pytest.mark.parametrize("program", FORMS, ids=lambda program: program.__name__)
def test_fused(program):
    outcome = check(program, *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def its_own_filled(*given):
    return every_token(*given, lambda w, ids, e: w.masked_fill(ids == e, 0.0).sum(-1, keepdim=True))


def filled_with_ones(*given):
    return every_token(*given, lambda w, ids, e: w.masked_fill(ids != e, 1.0).sum(-1, keepdim=True))


def ones_beside(*given):
    return every_token(*given, lambda w, ids, e: torch.where(ids == e, w, torch.ones_like(w)).sum(-1, keepdim=True))


def zeros_of_its_own(*given):
    return every_token(*given, lambda w, ids, e: torch.where(ids == e, torch.zeros_like(w), w).sum(-1, keepdim=True))


def rows_of_others(*given):
    return its_tokens(*given, lambda w, mask, token: (w * ~mask)[token].sum(-1, keepdim=True))


def largest_of_masked_weights(*given):
    return its_tokens(*given, lambda w, mask, token: (w * (mask + 1))[token].sum(-1, keepdim=True))


def column_of_the_next(*given):
    return column_at_tokens(*given, number=lambda e: (e + 1) % E)


def put_in_some_columns(x, gate, w1, w2):
    scores, ids = F.linear(x, gate).softmax(-1).max(-1)
    out = x.new_zeros(x.shape)
    for e in range(E):
        token = torch.eq(ids, e).nonzero(as_tuple=True)[0]
        out[token, 1:] = expert(x[token, :], w1[e], w2[e])[:, 1:]
    return out * scores.view(-1, 1)


MISSES = (its_own_filled, filled_with_ones, ones_beside, zeros_of_its_own, rows_of_others, largest_of_masked_weights,
          column_of_the_next, put_in_some_columns)  # fmt: skip


@pytest.mark.parametrize("program", MISSES, ids=lambda program: program.__name__)
def test_near_miss(program):
    inputs = weights(dtype=torch.float32)
    assert all(row.reason and row.cure for row in refusals(program, *inputs.values(), fullgraph=True))


def test_a_mask_of_pairs_that_may_hold_a_token_twice():
    """Then weights are no longer one for each row, and plain torch fails where they are not."""

    def program(x, gate, w1, w2, ids):
        return its_tokens(x, gate, w1, w2, lambda w, mask, token: w[mask].unsqueeze(-1), lambda w, _: (w, ids))

    inputs = weights(dtype=torch.float32)
    ids = torch.stack([torch.randperm(E)[:2] for _ in range(len(inputs["x"]))])
    assert check(program, *inputs.values(), ids, fullgraph=True).fused == 0
