"""Loops whose experts write the rows of their pairs, which are summed over the slots behind the loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.blocks import FEW as E
from tests.passes.blocks import H, K, silu_glu, softmax_router
from tests.passes.blocks import few_weights as weights
from tests.passes.compare import check


def route(x, gate):
    scores, ids = softmax_router(x, gate)
    return scores.to(x.dtype), ids


def expert(x, w1, w2):
    return F.linear(silu_glu(F.linear(x, w1)), w2)


def place_of(flat, e):
    return torch.where(flat == e)[0]


def summed(rows, scores):
    return (rows.view(*scores.shape, H) * scores[..., None]).sum(1)


def copies_by_mask(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, copies = ids.flatten(), x.repeat_interleave(K, 0)
    y = torch.empty_like(copies)
    for e in range(E):
        y[flat == e] = expert(copies[flat == e], w1[e], w2[e])
    return summed(y, scores)


def copies_by_place(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, copies = ids.flatten(), x.repeat_interleave(K, 0)
    y = torch.zeros_like(copies)
    for e in range(E):
        y[place_of(flat, e)] = expert(copies[place_of(flat, e)], w1[e], w2[e])
    return summed(y, scores)


def taken_by_mask_and_copied_by_place(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, copies = ids.flatten(), x.repeat_interleave(K, 0)
    y = torch.empty_like(copies)
    for e in range(E):
        y = y.index_copy(0, (flat == e).nonzero().squeeze(-1), expert(copies[flat == e], w1[e], w2[e]))
    return summed(y, scores)


def tokens_of_places(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat = ids.flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[place // K], w1[e], w2[e])
    return summed(y, scores)


def scattered(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat = ids.flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        rows = expert(x[torch.div(place, K, rounding_mode="floor")], w1[e], w2[e])
        y = y.scatter(0, place[:, None].expand(-1, H), rows)
    return summed(y, scores)


def added(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat = ids.flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y.index_add_(0, place, expert(x[place // K], w1[e], w2[e]))
    return summed(y, scores)


def weighted_before(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, given = ids.flatten(), scores.flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[place // K], w1[e], w2[e]) * given[place, None]
    return y.view(-1, K, H).sum(1)


def by_slot(x, gate, w1, w2):
    scores, ids = route(x, gate)
    y = x.new_zeros(*ids.shape, H)
    for e in range(E):
        token, slot = torch.where(ids == e)
        y[token, slot] = expert(x[token], w1[e], w2[e])
    return summed(y, scores)


def slots_first(x, gate, w1, w2):
    scores, ids = route(x, gate)
    y, hot = torch.empty(*ids.shape, H, dtype=x.dtype), F.one_hot(ids, E).permute(2, 1, 0)
    for e in range(E):
        slot, token = torch.where(hot[e])
        y[token, slot] = expert(x[token], w1[e], w2[e])
    return torch.einsum("tkh,tk->th", y, scores)


def by_slot_weighted_before(x, gate, w1, w2):
    scores, ids = route(x, gate)
    y = x.new_zeros(*ids.shape, H)
    for e in range(E):
        token, slot = torch.where(ids == e)
        y[token, slot] = expert(x[token], w1[e], w2[e]) * scores[token, slot, None]
    return y.sum(1)


def tokens_of_a_list(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, token = ids.flatten(), torch.arange(len(x)).repeat_interleave(K)
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[token[place]], w1[e], w2[e])
    return summed(y, scores)


def added_to_tokens(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, given, out = ids.flatten(), scores.flatten(), torch.zeros_like(x)
    for e in range(E):
        place = place_of(flat, e)
        out.index_add_(0, place // K, expert(x[place // K], w1[e], w2[e]) * given[place].unsqueeze(-1))
    return out


def added_to_tokens_of_a_list(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, given, out = ids.flatten(), scores.flatten(), x * 0.5
    tokens = torch.arange(len(flat)) // K
    for e in range(E):
        token = tokens[flat == e]
        out = out.index_add(0, token, expert(x[token], w1[e], w2[e]) * given[flat == e, None])
    return out


def places_as_columns(x, gate, w1, w2):
    scores, ids = route(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        places = torch.nonzero(ids == e)
        token, slot = places[:, 0], places[:, 1]
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, slot, None])
    return out


def columns_of_slots_first(x, gate, w1, w2):
    scores, ids = route(x, gate)
    out, hot = torch.zeros_like(x), F.one_hot(ids, E).permute(2, 1, 0)
    for e in range(E):
        slot, token = hot[e].nonzero().unbind(1)
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, slot, None])
    return out


def places_as_rows(x, gate, w1, w2):
    scores, ids = route(x, gate)
    y = x.new_zeros(*ids.shape, H)
    for e in range(E):
        token, slot = torch.argwhere(ids == e).t()
        y[token, slot] = expert(x[token], w1[e], w2[e])
    return summed(y, scores)


FORMS = (
    copies_by_mask, copies_by_place, taken_by_mask_and_copied_by_place, tokens_of_places, tokens_of_a_list, scattered,
    added, weighted_before, by_slot, slots_first, by_slot_weighted_before, places_as_columns, columns_of_slots_first,
    places_as_rows, added_to_tokens, added_to_tokens_of_a_list,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", FORMS, ids=lambda program: program.__name__)
def test_fused(program, dtype):
    outcome = check(program, *weights(dtype=dtype).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("program", FORMS, ids=lambda program: program.__name__)
def test_gradients(program):
    outcome = check(program, *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


# ---- near misses


def next_tokens(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat = ids.flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[(place // K + 1) % len(x)], w1[e], w2[e])
    return summed(y, scores)


def another_width(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat = ids.flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[place // (K + 1)], w1[e], w2[e])
    return summed(y, scores)


def slots_are_rows(x, gate, w1, w2):
    """Copies one behind the other: place p is token p % T."""
    scores, ids = route(x, gate)
    flat, copies = ids.flatten(), x.repeat(K, 1)
    y = torch.zeros_like(copies)
    for e in range(E):
        y[place_of(flat, e)] = expert(copies[place_of(flat, e)], w1[e], w2[e])
    return summed(y, scores)


def places_of_others(x, gate, w1, w2):
    """As many as the expert has, but of the other slots."""
    scores, ids = route(x, gate)
    flat, turned = ids.flatten(), ids.flip(1).flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        y[place_of(turned, e)] = expert(x[place_of(flat, e) // K], w1[e], w2[e])
    return summed(y, scores)


def other_slots(x, gate, w1, w2):
    scores, ids = route(x, gate)
    y = x.new_zeros(*ids.shape, H)
    for e in range(E):
        token, slot = torch.where(ids == e)
        y[token, 1 - slot] = expert(x[token], w1[e], w2[e])
    return summed(y, scores)


def slots_of_tokens(x, gate, w1, w2):
    """Slot and token the other way round."""
    scores, ids = route(x, gate)
    y, hot = x.new_zeros(*ids.shape, H), F.one_hot(ids[:K], E).permute(2, 1, 0)
    for e in range(E):
        slot, token = torch.where(hot[e])
        y[slot, token] = expert(x[token], w1[e], w2[e])
    return summed(y, scores)


def over_ones(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat = ids.flatten()
    y = x.new_ones(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y.index_add_(0, place, expert(x[place // K], w1[e], w2[e]))
    return summed(y, scores)


def beside_more_rows(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat = ids.flatten()
    y = x.new_zeros(len(flat) + K, H)
    for e in range(E):
        place = place_of(flat, e)
        y[place + K] = expert(x[place // K], w1[e], w2[e])
    return summed(y[:-K], scores)


def weights_of_tokens(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, given = ids.flatten(), scores.flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[place // K], w1[e], w2[e]) * given[place // K, None]
    return y.view(-1, K, H).sum(1)


def weighted_twice(x, gate, w1, w2):
    scores, ids = route(x, gate)
    y = x.new_zeros(*ids.shape, H)
    for e in range(E):
        token, slot = torch.where(ids == e)
        y[token, slot] = expert(x[token], w1[e], w2[e]) * scores[token, slot, None]
    return summed(y, scores)


def weighted_for_one(x, gate, w1, w2):
    scores, ids = route(x, gate)
    y = x.new_zeros(*ids.shape, H)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = expert(x[token], w1[e], w2[e])
        y[token, slot] = rows * scores[token, slot, None] if e == 1 else rows
    return y.sum(1)


def ids_of_no_expert(x, gate, w1, w2):
    """Rows that no expert writes stay what they were."""
    scores, _ = route(x, gate)
    flat = (x[:, :K] * 3).long().flatten()
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[place // K], w1[e], w2[e])
    return summed(y, scores)


def read_between(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, seen = ids.flatten(), 0.0
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[place // K], w1[e], w2[e])
        seen = seen + y.sum() * e
    return summed(y, scores) + seen


def added_to_next_tokens(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, given, out = ids.flatten(), scores.flatten(), torch.zeros_like(x)
    for e in range(E):
        place = place_of(flat, e)
        rows = expert(x[place // K], w1[e], w2[e]) * given[place, None]
        out.index_add_(0, (place // K + 1) % len(x), rows)
    return out


def each_token_once(x, gate, w1, w2):
    """Of two slots with one expert the last one counts."""
    scores, ids = route(x, gate)
    ids = ids[:, :1].expand(-1, K)
    flat, given, out = ids.flatten(), scores.flatten(), torch.zeros_like(x)
    for e in range(E):
        token = place_of(flat, e) // K
        out[token] += expert(x[token], w1[e], w2[e]) * given[place_of(flat, e), None]
    return out


def tokens_of_another_list(x, gate, w1, w2):
    scores, ids = route(x, gate)
    flat, token = ids.flatten(), torch.arange(len(x)).repeat(K)
    y = x.new_zeros(len(flat), H)
    for e in range(E):
        place = place_of(flat, e)
        y[place] = expert(x[token[place]], w1[e], w2[e])
    return summed(y, scores)


def columns_swapped(x, gate, w1, w2):
    """Slot and token, of as many tokens as slots."""
    scores, ids = route(x, gate)
    ids, scores, first = ids[:K], scores[:K], x[:K]
    out = torch.zeros_like(first)
    for e in range(E):
        slot, token = torch.nonzero(ids == e).unbind(1)
        out.index_add_(0, token, expert(first[token], w1[e], w2[e]) * scores[token, slot, None])
    return out


def weights_of_the_first_slot(x, gate, w1, w2):
    """Weights of the first slot."""
    scores, ids = route(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        places = torch.nonzero(ids == e)
        token, slot = places[:, 0], places[:, 0] * 0
        out.index_add_(0, token, expert(x[token], w1[e], w2[e]) * scores[token, slot, None])
    return out


MISSES = (
    added_to_next_tokens, each_token_once, tokens_of_another_list, columns_swapped, weights_of_the_first_slot,
    next_tokens, another_width, slots_are_rows, places_of_others, other_slots, slots_of_tokens, over_ones,
    beside_more_rows, weights_of_tokens, weighted_twice, weighted_for_one, ids_of_no_expert, read_between,
)  # fmt: skip


@pytest.mark.parametrize("program", MISSES, ids=lambda program: program.__name__)
def test_near_misses(program):
    outcome = check(program, *weights(dtype=torch.float64).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)
