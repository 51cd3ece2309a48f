"""Blocks that run one expert after the other over stacked weights: every spelling of the loop is one operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.passes import run_all
from tests.passes import unrolled
from tests.passes.blocks import FEW as E
from tests.passes.blocks import H, K, T, silu_glu, softmax_router
from tests.passes.blocks import few_weights as weights
from tests.passes.compare import assert_same, check, refusals, settled
from tests.passes.test_forms import boolean_assignment, masked_everywhere, mixtral_v4

BLOCKS, NEAR_MISSES = 22, 8


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_block(seed):
    case = unrolled.make(seed, misses=0)
    assert settled(unrolled.run, case).fused == 1, str(case)


@pytest.mark.parametrize("name", unrolled.MUTATIONS)
def test_near_miss(name):
    """Each near miss on its own, on the first block that it gives another result."""
    settled(unrolled.run, unrolled.with_mutation(name))


@pytest.mark.parametrize("seed", range(1000, 1000 + NEAR_MISSES))
def test_changed_block(seed):
    settled(unrolled.run, unrolled.make(seed, misses=1 + seed % 2))


def expert(x, w1, w2):
    return F.linear(silu_glu(F.linear(x, w1)), w2)


def mistral(x, gate, w1, w2):
    """mistral-inference: tokens and slots of an expert's pairs, results added by an item assignment."""
    topk_weights, ids = torch.topk(F.linear(x, gate), K)
    topk_weights = F.softmax(topk_weights, dim=1, dtype=torch.float).to(x.dtype)
    results = torch.zeros_like(x)
    for e in range(E):
        batch, nth = torch.where(ids == e)
        results[batch] += topk_weights[batch, nth, None] * expert(x[batch], w1[e], w2[e])
    return results


def by_mask(x, gate, w1, w2):
    """The tokens that have an expert in any slot."""
    topk_weights, ids = softmax_router(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        mine = (ids == e).any(-1)
        scores = (topk_weights * (ids == e)).sum(-1)
        out[mine] += expert(x[mine], w1[e], w2[e]) * scores[mine].unsqueeze(-1)
    return out


def tutorial(x, gate, w1, w2):
    """makeMoE on sequences: scores of a masked softmax, tokens by a mask of them, both flattened and not."""
    x = x.view(3, -1, H)
    logits = F.linear(x, gate)
    top, ids = logits.topk(K, dim=-1)
    gating = torch.full_like(logits, float("-inf")).scatter(-1, ids, top).softmax(-1)
    out, flat, flat_gating = torch.zeros_like(x), x.view(-1, H), gating.view(-1, E)
    for e in range(E):
        mine = (ids == e).any(dim=-1)
        flat_mine = mine.view(-1)
        rows = expert(flat[flat_mine], w1[e], w2[e]) * flat_gating[flat_mine, e].unsqueeze(1)
        out[mine] += rows.squeeze(1)
    return out


def switch(x, gate, w1, w2):
    """One expert for each token: results assigned, weighted after all of them."""
    scores, choice = F.linear(x, gate).softmax(-1).max(dim=-1)
    out = torch.zeros_like(x)
    for e in range(E):
        mine = torch.where(choice == e)[0]
        out[mine] = expert(x[mine], w1[e], w2[e])
    return out * scores.unsqueeze(-1)


@pytest.mark.parametrize(
    "form",
    [mixtral_v4, mistral, by_mask, boolean_assignment, masked_everywhere, tutorial, switch],
    ids=lambda form: form.__name__,
)
def test_nothing_depends_on_the_data(form):
    """With its router: no nonzero, no symbol of the data and no check of one stays in the graph."""
    left = []

    def collect(gm, inputs):
        run_all(gm)
        left.extend(str(node.target) for node in gm.graph.nodes if node.op.startswith("call_"))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(form, backend=collect, fullgraph=True)(*weights(dtype=torch.float32).values())
    assert len(left) <= 5 and any("fused_moe" in target for target in left), left


def skipping(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(1, E):
        out = out + (topk_weights * (ids == e)).sum(-1, keepdim=True) * expert(x, w1[e], w2[e])
    return out


def unweighted(x, gate, w1, w2):
    out, (_, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        out = out + expert(x, w1[e], w2[e])
    return out * ids.sum()


def weighted_by_integers(x, gate, w1, w2):
    out, (_, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        out = out + (ids * (ids == e)).sum(-1, keepdim=True) * expert(x, w1[e], w2[e])
    return out


def of_another_expert(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        out = out + (topk_weights * (ids == (e + 1) % E)).sum(-1, keepdim=True) * expert(x, w1[e], w2[e])
    return out


def one_is_different(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        h = F.linear(x, w1[e])
        a = silu_glu(h) if e else F.gelu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :]
        out = out + (topk_weights * (ids == e)).sum(-1, keepdim=True) * F.linear(a, w2[e])
    return out


def counted_once(x, gate, w1, w2):
    """A token that has an expert twice is assigned once."""
    topk_weights = F.linear(x, gate).softmax(-1)[:, :K]
    ids = torch.stack([F.linear(x, gate).argmax(-1), F.linear(x, gate).roll(1, 0).argmax(-1)], dim=1)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out[token] += topk_weights[token, slot, None] * expert(x[token], w1[e], w2[e])
    return out


def unproven(x, gate):
    """Ids that are in range, but by numbers alone."""
    return (F.linear(x, gate)[:, :K].sigmoid() * E).long()


def one_with_a_bias(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        row = F.linear(silu_glu(F.linear(x, w1[e])), w2[e], w2[:, :, 0][e] if e == 0 else None)
        out = out + (topk_weights * (ids == e)).sum(-1, keepdim=True) * row
    return out


def multiplied(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.ones_like(x), softmax_router(x, gate)
    for e in range(E):
        out = out * ((topk_weights * (ids == e)).sum(-1, keepdim=True) * expert(x, w1[e], w2[e]))
    return out


def first_slot_for_all(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, topk_weights[token, slot * 0, None] * expert(x[token], w1[e], w2[e]))
    return out


def scores_of_others(x, gate, w1, w2):
    """Rows by one choice, scores by another."""
    logits = F.linear(x, gate)
    scores = torch.zeros(T, E).scatter(1, logits.abs().topk(K).indices, logits.sigmoid()[:, :K])
    out, ids = torch.zeros_like(x), logits.topk(K).indices
    for e in range(E):
        mine = (ids == e).any(-1)
        out[mine] += expert(x[mine], w1[e], w2[e]) * scores[mine, e].unsqueeze(-1)
    return out


def added_to_sequences(x, gate, w1, w2):
    x = x.view(3, -1, H)
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = x * 0.5
    for e in range(E):
        out = out + (topk_weights * (ids == e)).sum(-1, keepdim=True) * expert(x, w1[e], w2[e])
    return out


def one_expert(ids, x, w1, w2):
    out = torch.zeros_like(x)
    for e in range(E):
        out = torch.where(ids == e, expert(x, w1[e], w2[e]), out)
    return out


def one_expert_unweighted(x, gate, w1, w2):
    return one_expert(F.linear(x, gate).argmax(-1, keepdim=True), x, w1, w2)


def one_expert_or_none(x, gate, w1, w2):
    return one_expert(unproven(x, gate)[:, :1], x, w1, w2) * F.linear(x, gate)[:, :1].sigmoid()


def rows_of_pairs_or_none(x, gate, w1, w2):
    rows, flat = x.repeat_interleave(K, dim=0), unproven(x, gate).view(-1)
    out = torch.empty_like(rows)
    for e in range(E):
        out[flat == e] = expert(rows[flat == e], w1[e], w2[e])
    return (out.view(T, K, H) * F.linear(x, gate)[:, :K].sigmoid().unsqueeze(-1)).sum(1)


def ids_of_half_of_the_tokens(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x[: T // 2], gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, topk_weights[token, slot, None] * expert(x[token], w1[e], w2[e]))
    return out


def with_a_residual(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = x[token]
        out.index_add_(0, token, topk_weights[token, slot, None] * (rows + expert(rows, w1[e], w2[e])))
    return out


def with_a_norm(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = F.rms_norm(expert(x[token], w1[e], w2[e]), (H,))
        out.index_add_(0, token, topk_weights[token, slot, None] * rows)
    return out


def with_three_projections(x, gate, w1, w2):
    out, (topk_weights, ids) = x.new_zeros(len(x), w1.shape[1]), softmax_router(x, gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = F.linear(expert(x[token], w1[e], w2[e]).relu(), w1[e])
        out.index_add_(0, token, topk_weights[token, slot, None] * rows)
    return out


REFUSED = {
    with_three_projections: "more than two projections",
    with_a_residual: "`out.index_add_(0, token, topk_weights[token, slot, None] * (rows + expert(",
    with_a_norm: "`rows = F.rms_norm(expert(x[token], w1[e], w2[e]), (H,))`",
    skipping: f"The loop runs {E - 1} of {E} experts",
    weighted_by_integers: "weights are integers",
    unweighted: "summed without routing weights",
    of_another_expert: "cannot be proved to be its routing weight",
    one_is_different: "other activations",
    counted_once: "A token may have an expert id twice",
    one_with_a_bias: "not alike",
    multiplied: "no known way to route",
    first_slot_for_all: "cannot be proved to be their routing weights",
    scores_of_others: "other experts than those whose weights are not zero",
    added_to_sequences: "added to a tensor that is not [tokens, hidden]",
    one_expert_unweighted: "taken without routing weights",
    one_expert_or_none: "a token of no expert would keep what was there",
    rows_of_pairs_or_none: "rows of no expert would not be written",
    ids_of_half_of_the_tokens: "are not [tokens, top_k]",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused_with_the_reason(program):
    inputs = weights(dtype=torch.float32)
    (row,) = refusals(program, *inputs.values(), fullgraph=True)
    assert REFUSED[program] in row.reason and row.cure


def test_mask_that_is_broadcast_over_the_tokens():
    """As many tokens as features: a mask [T] is one of features, and chooses no tokens."""

    def program(x, gate, w1, w2):
        x = x[:1].expand(H, H) + torch.eye(H)
        scores, choice = F.linear(x, gate).softmax(-1).max(dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            out = torch.where(choice == e, expert(x, w1[e], w2[e]), out)
        return out * scores.unsqueeze(-1)

    def added(x, gate, w1, w2):
        x = x[:1].expand(H, H) + torch.eye(H)
        scores, choice = F.linear(x, gate).softmax(-1).max(dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + torch.where(choice == e, expert(x, w1[e], w2[e]) * scores.unsqueeze(-1), 0.0)
        return out

    for form in (program, added):
        outcome = check(form, *weights(dtype=torch.float32).values(), fullgraph=True)
        assert (outcome.problem, outcome.fused) == (None, 0)


def test_scores_of_all_experts_with_as_many_experts_as_slots():
    """Column e of the scores is expert e's, which their shape alone does not tell from the e-th of each token's."""
    inputs = weights(dtype=torch.float32)
    inputs = {name: value[:K] if name in ("gate", "w1", "w2") else value for name, value in inputs.items()}

    def program(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
        scores = torch.zeros(x.shape[0], K).scatter(-1, ids, topk_weights)
        out = torch.zeros_like(x)
        for e in range(K):
            mine = (ids == e).any(-1)
            out[mine] += expert(x[mine], w1[e], w2[e]) * scores[mine, e].unsqueeze(1)
        return out

    assert_same(program, *inputs.values(), fullgraph=True)


def _once_for_each_slot(taken):
    """Every expert's results once, which each slot weighs."""

    def program(x, gate, w1, w2):
        out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
        for e in range(E):
            row = expert(x, w1[e], w2[e])
            for k in taken:
                out = out + topk_weights[:, k, None] * (ids[:, k, None] == e) * row
        return out

    return program


@pytest.mark.parametrize(("taken", "fused"), [(range(K), 1), ((0, 0), 1), ((1, 0), 1)], ids=str)
def test_results_that_every_slot_weighs(taken, fused):
    outcome = check(_once_for_each_slot(taken), *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, fused)


def test_results_that_are_read_once_more():
    def program(x, gate, w1, w2):
        out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
        for e in range(E):
            row = expert(x, w1[e], w2[e])
            for k in range(K):
                out = out + topk_weights[:, k, None] * (ids[:, k, None] == e) * row
            out = out + row * 0.1 if e == 0 else out
        return out

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


MASKED = {
    "kept_where_it_is_another_expert": lambda row, mine: torch.where(~mine, row, 0.0),
    "filled_where_it_is_the_expert": lambda row, mine: row.masked_fill(mine, 0.0),
    "another_number_than_zero": lambda row, mine: torch.where(mine, row, 1.0),
    "filled_with_another_number": lambda row, mine: row.masked_fill(~mine, 1.0),
    "other_numbers": lambda row, mine: torch.where(mine, row, row * 0.5),
    "turned_twice": lambda row, mine: torch.where(~mine, row, torch.zeros_like(row)),
}


@pytest.mark.parametrize("name", MASKED)
def test_mask_that_keeps_others(name):
    def program(x, gate, w1, w2):
        out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
        for k in range(K):
            for e in range(E):
                row = topk_weights[:, k, None] * expert(x, w1[e], w2[e])
                out = out + MASKED[name](row, (ids[:, k] == e)[:, None])
        return out

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


FIRST = {
    "of_the_slots": lambda token, slot: (token, token, slot[:1]),
    "of_the_rows": lambda token, slot: (token[:1], token, slot),
}


@pytest.mark.parametrize("name", FIRST)
def test_first_of_an_experts_pairs_is_not_all_of_them(name):
    """Eager torch gives every pair what the first one has; torch's own graph asserts that there are no others, which is
    no proof: it raises, and so do we.
    """

    def program(x, gate, w1, w2):
        out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
        for e in range(E):
            taken, token, slot = FIRST[name](*torch.where(ids == e))
            out.index_add_(0, token, topk_weights[token, slot, None] * expert(x[taken], w1[e], w2[e]))
        return out

    for backend in ("eager", "moe_ops_eager"):
        torch.compiler.reset()
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            torch.compile(program, backend=backend, fullgraph=True)(*weights(dtype=torch.float32).values())


def test_added_in_place_to_what_is_there():
    """Every addition of the chain goes, and what it added to is read before any of them."""

    def program(x, gate, w1, w2):
        out, (topk_weights, ids) = x * 0.5, softmax_router(x, gate)
        for e in range(E):
            out += (topk_weights * (ids == e)).sum(-1, keepdim=True) * expert(x, w1[e], w2[e])
        return out

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_sequences():
    """Tokens [B, S, H], as a decoder has them."""

    def program(x, gate, w1, w2):
        x = x.view(3, -1, H)
        topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + (topk_weights * (ids == e)).sum(-1, keepdim=True) * expert(x, w1[e], w2[e])
        return out

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


# ---- a step for every slot, of tokens [B, S, H]


def slots_of_sequences(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            mine = ids[..., k] == e
            out[mine] += topk_weights[..., k][mine].unsqueeze(-1) * expert(x[mine], w1[e], w2[e])
    return out


def experts_before_slots(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e in range(E):
        for k in range(K):
            mine = ids[:, :, k] == e
            out[mine] += topk_weights[mine, k, None] * expert(x[mine], w1[e], w2[e])
    return out


def slots_before_tokens(x, gate, w1, w2):
    """Ids [B, K, S], and the weights of the slots the other way around."""
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out, ids = torch.zeros_like(x), ids.transpose(1, 2)
    for k in range(K):
        for e in range(E):
            mine = ids[:, k] == e
            out[mine] += topk_weights[:, :, K - 1 - k, None][mine] * expert(x[mine], w1[e], w2[e])
    return out


def steps(x, ids, topk_weights, w1, w2):
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            where = torch.where(ids[..., k] == e)
            mine = where[0] if x.dim() == 2 else ids[..., k] == e
            out[mine] += topk_weights[mine, k, None] * expert(x[mine], w1[e], w2[e])
    return out


# Long and short sequences, one token, and K sequences of K tokens.
SEQUENCES = {"many": (3, -1), "one_each": (-1, 1), "one": (1, -1), "token": (1, 1), "as_slots": (K, K)}


def in_sequences(shape):
    """Inputs; those of one sequence are of one direction, so that most experts are empty."""
    given = weights(dtype=torch.float64)
    rows = given["x"][: {"token": 1, "as_slots": K * K}.get(shape)]
    rows = rows[:1] * torch.linspace(0.5, 2, len(rows), dtype=rows.dtype)[:, None] if shape == "one" else rows
    given["x"] = rows.reshape(*SEQUENCES[shape], H)
    return given.values()


@pytest.mark.parametrize(
    "form", [slots_of_sequences, experts_before_slots, slots_before_tokens], ids=lambda f: f.__name__
)
def test_slot_by_slot(form):
    """One block of K slots, not one for each."""
    given = weights(dtype=torch.float32)
    given["x"] = given["x"].reshape(3, -1, H)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = moe_ops.explain(form, *given.values())
    assert [row.K for row in report.fused] == [K] and not report.refused


@pytest.mark.parametrize(
    ("form", "shape"),
    [*((slots_of_sequences, shape) for shape in SEQUENCES), (experts_before_slots, "many"),
     *((slots_before_tokens, shape) for shape in ("many", "as_slots"))],
    ids=lambda one: getattr(one, "__name__", one),
)  # fmt: skip
def test_gradients_slot_by_slot(form, shape):
    outcome = check(form, *in_sequences(shape), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def one_of_another_slot(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            mine = ids[..., k] == e
            factor = topk_weights[..., 0 if e == 1 else k][mine].unsqueeze(-1)
            out[mine] += factor * expert(x[mine], w1[e], w2[e])
    return out


def one_of_other_tokens(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            mine = ids[..., k] == e
            rows = x.roll(1, 1)[mine] if e == 1 else x[mine]
            out[mine] += topk_weights[..., k][mine].unsqueeze(-1) * expert(rows, w1[e], w2[e])
    return out


def tokens_as_slots(x, gate, w1, w2):
    """Columns of the tokens, not of the slots, where there are as many."""
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            mine = ids[:, k] == e
            out[mine] += topk_weights[:, k][mine].unsqueeze(-1) * expert(x[mine], w1[e], w2[e])
    return out


def fewer_slots(x, gate, w1, w2):
    """Some of the slots that there are."""
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K + 1)
    return steps(x, ids, topk_weights, w1, w2)


def weights_of_more_tokens(x, gate, w1, w2):
    topk_weights, ids = F.linear(x.view(-1, H), gate).softmax(-1).topk(K)
    return steps(x.view(-1, H), ids, torch.cat([topk_weights, topk_weights]), w1, w2)


# Of the first, the slot that is as it should be; the last is what it says, in columns of its own.
@pytest.mark.parametrize(
    ("form", "fused"),
    [(one_of_another_slot, 1), (one_of_other_tokens, 0), (weights_of_more_tokens, 0), (fewer_slots, 1),
     (tokens_as_slots, 1)],
    ids=lambda one: getattr(one, "__name__", None),
)  # fmt: skip
def test_near_miss_of_slot_by_slot(form, fused):
    given = weights(dtype=torch.float64)
    given["x"] = given["x"][: K * K].reshape(K, K, H)
    outcome = check(form, *given.values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, fused)


# ---- a step for every slot, by the places of its tokens [B, S]


def places_of_slots(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            b, s = torch.where(ids[..., k] == e)
            out[b, s] += topk_weights[b, s, k, None] * expert(x[b, s], w1[e], w2[e])
    return out


def places_before_slots(x, gate, w1, w2):
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e in range(E):
        for k in range(K):
            b, s = (ids[:, :, k] == e).nonzero(as_tuple=True)
            out[b, s] = out[b, s] + topk_weights[..., k][b, s].unsqueeze(-1) * expert(x[b, s], w1[e], w2[e])
    return out


@pytest.mark.parametrize(
    ("form", "shape"),
    [*((places_of_slots, shape) for shape in SEQUENCES),
     *((places_before_slots, shape) for shape in ("many", "as_slots"))],
    ids=lambda one: getattr(one, "__name__", one),
)  # fmt: skip
def test_gradients_slot_by_slot_by_places(form, shape):
    outcome = check(form, *in_sequences(shape), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def _by_places(number=lambda e: e, take=lambda x, b, s: x[b, s], weigh=lambda w, b, s, k: w[b, s, k], ids_of=None,
               weights_of=None):  # fmt: skip
    """`places_of_slots` with something else in one of its places."""

    def run(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
        ids = ids if ids_of is None else ids_of(ids)
        topk_weights = topk_weights if weights_of is None else weights_of(topk_weights)
        out = torch.zeros_like(x)
        for k in range(K):
            for e in range(E):
                b, s = torch.where(ids[..., k] == number(e))
                out[b, s] += weigh(topk_weights, b, s, k).unsqueeze(-1) * expert(take(x, b, s), w1[e], w2[e])
        return out

    return run


def _one_token(ids):
    """Ids of as many tokens in other sequences, all but one of which have no expert."""
    ids = ids.reshape(3, 2, K)
    return ids.masked_fill((torch.arange(6).view(3, 2, 1) != 2), -1)


BY_PLACES = {
    "other_experts": _by_places(number=lambda e: (e + 1) % E),
    "tokens_turned": _by_places(take=lambda x, b, s: x[s, b]),
    "weights_turned": _by_places(weigh=lambda w, b, s, k: w[s, b, k]),
    "weights_of_one_slot_turned": _by_places(weigh=lambda w, b, s, k: w[..., k][s, b]),
    "weights_of_one_sequence": _by_places(weigh=lambda w, b, s, k: w[b, b, k]),
    "weights_of_other_places": _by_places(weigh=lambda w, b, s, k: w[b.flip(0), s, k]),
    "weights_of_whole_sequences": _by_places(weigh=lambda w, b, s, k: w[b].sum((1, 2))),
    "weights_of_all_slots": _by_places(weigh=lambda w, b, s, k: w[b, s].sum(-1)),
    "weights_of_more_tokens": _by_places(weights_of=lambda w: torch.cat([w.flip(1), w], 1)),
    "one_weight_of_more_tokens": _by_places(
        weigh=lambda w, b, s, k: w[..., k][b, s], weights_of=lambda w: torch.cat([w.flip(1), w], 1)
    ),
    "ids_of_other_sequences": _by_places(
        ids_of=_one_token, weigh=lambda w, b, s, k: w[b, s, k], weights_of=lambda w: w.reshape(3, 2, K)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_PLACES)
def test_near_miss_of_slot_by_slot_by_places(name):
    given = weights(dtype=torch.float64)
    sizes = (2, 3) if name == "ids_of_other_sequences" else (K, K)
    given["x"] = given["x"][: sizes[0] * sizes[1]].reshape(*sizes, H)
    outcome = check(BY_PLACES[name], *given.values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


# ---- blocks that add to one tensor by masks, and experts that are run again


def add_slot(out, x, ids, topk_weights, k, w1, w2, after=lambda rows: rows):
    for e in range(E):
        mine = ids[..., k] == e
        out[mine] += after(topk_weights[..., k][mine].unsqueeze(-1) * expert(x[mine], w1[e], w2[e]))


def experts_twice(x, gate, w1, w2, v1, v2):
    first = slots_of_sequences(x, gate, w1, w2)
    return first + slots_of_sequences(x, gate.flip(0), w1, w2)


def experts_of_their_results(x, gate, w1, w2, v1, v2):
    return experts_before_slots(experts_before_slots(x, gate, w1, w2).tanh(), gate, w1, w2)


def other_experts_after(x, gate, w1, w2, v1, v2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for first, second in ((w1, w2), (v1, v2)):
        for k in range(K):
            add_slot(out, x, ids, topk_weights, k, first, second)
    return out.sin()


def other_experts_between(x, gate, w1, w2, v1, v2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for k in range(K):
        add_slot(out, x, ids, topk_weights, k, w1, w2)
        add_slot(out, x, ids, topk_weights, k, v1, v2)
    return out


def refused_between(x, gate, w1, w2, v1, v2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    add_slot(out, x, ids, topk_weights, 0, w1, w2)
    add_slot(out, x, ids, topk_weights, 0, v1, v2, lambda rows: rows.clamp(-0.1, 0.1))
    add_slot(out, x, ids, topk_weights, 1, w1, w2)
    return out


def assigned_between(x, gate, w1, w2, v1, v2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    add_slot(out, x, ids, topk_weights, 0, w1, w2)
    out[..., :1] = 0.5
    add_slot(out, x, ids, topk_weights, 1, w1, w2)
    out[x[..., 0] > 0] += 1
    return out


def read_between(x, gate, w1, w2, v1, v2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    add_slot(out, x, ids, topk_weights, 0, w1, w2)
    middle = out * 2
    add_slot(out, x, ids, topk_weights, 1, v1, v2)
    return middle, out, out.sum()


def written_by_a_view(x, gate, w1, w2, v1, v2):
    """Half of it, between the blocks: the second one is left alone."""
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    add_slot(out, x, ids, topk_weights, 0, w1, w2)
    half = out[..., :2]
    half.mul_(3)
    add_slot(out, x, ids, topk_weights, 1, w1, w2)
    return out, half + 1


ONE_TENSOR = {
    experts_twice: 2, experts_of_their_results: 2, other_experts_after: 2, other_experts_between: 2 * K,
    refused_between: 2, assigned_between: 2, read_between: 2, written_by_a_view: 1,
}  # fmt: skip


# In inference, too, those of which not all is fused, or where something else reads the tensor between.
@pytest.mark.parametrize(
    ("form", "training"),
    [*((form, True) for form in ONE_TENSOR),
     *((form, False) for form in (refused_between, read_between, written_by_a_view))],
    ids=lambda one: getattr(one, "__name__", "training" if one is True else "inference"),
)  # fmt: skip
def test_blocks_that_add_to_one_tensor(form, training):
    """Each reads what the ones before have left there, fused or not."""
    given = weights(dtype=torch.float64)
    if form is experts_of_their_results:
        given["x"] = given["x"].reshape(3, -1, H)
    others = [given[name].flip(0) * 0.7 for name in ("w1", "w2")]
    outcome = check(form, *given.values(), *others, gradients=training, fullgraph=True)
    assert (outcome.problem, outcome.fused, counters["moe_ops"]["errors"]) == (None, ONE_TENSOR[form], 0)


def scattered(x, gate):
    """Weights [.., E], zero but for the experts of a topk."""
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    return torch.zeros(*x.shape[:-1], E, dtype=x.dtype).scatter(-1, ids, topk_weights)


LAST = {
    "multiplied": lambda outs, scores: (outs * scores.unsqueeze(-2)).sum(-1),
    "expanded": lambda outs, scores: torch.sum(outs * scores[..., None, :].expand_as(outs), dim=-1),
    "from the left": lambda outs, scores: (scores.unsqueeze(-2) * outs).sum(dim=outs.dim() - 1),
    "matmul": lambda outs, scores: torch.matmul(outs, scores.unsqueeze(-1)).squeeze(-1),
    "einsum": lambda outs, scores: torch.einsum("...he,...e->...h", outs, scores),
    "turned back": lambda outs, scores: (outs.transpose(-1, -2) * scores.unsqueeze(-1)).sum(-2),
    "swapped": lambda outs, scores: (scores.unsqueeze(-2) @ outs.swapaxes(-1, -2)).squeeze(-2),
}


@pytest.mark.parametrize("sequences", [False, True], ids=["tokens", "sequences"])
@pytest.mark.parametrize("name", LAST)
def test_results_stacked_along_the_last_dimension(name, sequences):
    def program(x, gate, w1, w2):
        x = x.view(3, -1, H) if sequences else x
        return LAST[name](torch.stack([expert(x, w1[e], w2[e]) for e in range(E)], dim=-1), scattered(x, gate))

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


NOT_LAST = {
    "scores of features": lambda outs, scores: (outs * scores.unsqueeze(-1)).sum(-1),
    "sum over features": lambda outs, scores: (outs * scores.unsqueeze(-2)).sum(-2),
    "features of the scores": lambda outs, scores: torch.einsum("the,th->te", outs, scores),
    "matmul of features": lambda outs, scores: (outs.transpose(1, 2) @ scores.unsqueeze(-1)).squeeze(-1),
    "weighted twice": lambda outs, scores: (outs * scores.unsqueeze(1) * scores.unsqueeze(1)).sum(-1),
}


@pytest.mark.parametrize("name", NOT_LAST)
def test_near_miss_of_results_stacked_along_the_last_dimension(name):
    """As many features as experts, so that every shape fits."""
    torch.manual_seed(0)
    x, gate, w1, w2 = torch.randn(T, E), torch.randn(E, E), torch.randn(E, 2 * H, E), torch.randn(E, E, H)

    def program(x, gate, w1, w2):
        return NOT_LAST[name](torch.stack([expert(x, w1[e], w2[e]) for e in range(E)], dim=-1), scattered(x, gate))

    outcome = check(program, x, gate, w1, w2, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)
