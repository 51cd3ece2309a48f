"""Blocks that send every token through every expert: fused where the scores leave K experts by construction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import moe_ops
from compile_passes.match import Router
from tests.passes import dense
from tests.passes.blocks import E, H, I, K, T, batched, block, match, silu_glu, weights
from tests.passes.compare import check, refusals, settled

BLOCKS, NEAR_MISSES = 24, 12


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_block(seed):
    """Fused, unless the weights' sizes are symbols."""
    case = dense.make(seed, misses=0)
    assert settled(dense.run, case).fused == (case.dynamic != "all"), str(case)


@pytest.mark.parametrize("name", dense.MUTATIONS)
def test_near_miss(name):
    """Each near miss on its own, on the first block that it gives another result."""
    settled(dense.run, dense.with_mutation(name))


@pytest.mark.parametrize("seed", range(1000, 1000 + NEAR_MISSES))
def test_changed_block(seed):
    settled(dense.run, dense.make(seed, misses=1 + seed % 2))


def every_expert(x, scores, w1, w2):
    h = silu_glu(torch.einsum("th,enh->ten", x, w1))
    return torch.einsum("te,teh->th", scores, torch.einsum("ten,ehn->teh", h, w2))


def soft(x, gate, w1, w2):
    return every_expert(x, F.linear(x, gate).softmax(-1), w1, w2)


def threshold(x, gate, w1, w2):
    logits = F.linear(x, gate)
    low = logits < logits.topk(K).values[:, -1:]
    return every_expert(x, logits.masked_fill(low, float("-inf")).softmax(-1), w1, w2)


def unbounded(x, gate, w1, w2):
    """0 * inf is NaN: a logit that is not selected may be infinite."""
    logits = F.linear(x, gate)
    return every_expert(x, logits * F.one_hot(logits.topk(K).indices, E).sum(1), w1, w2)


def repeated(x, gate, w1, w2):
    """Two choices that may be the same expert, whose weight then counts once."""
    scores = F.linear(x, gate).softmax(-1)
    ids = torch.stack((scores.argmax(-1), scores.roll(1, 0).argmax(-1)), dim=1)
    return every_expert(x, torch.zeros_like(scores).scatter(1, ids, scores.gather(1, ids)), w1, w2)


def biased_input(x, gate, w1, w2):
    """An expert that a token did not select computes something of its biases."""
    scores = torch.zeros(T, E).scatter(1, *F.linear(x, gate).topk(K, dim=1)[::-1])
    rows = x.unsqueeze(1) * scores.unsqueeze(-1)
    h = silu_glu(torch.einsum("teh,enh->ten", rows, w1) + w1[:, :, 0])
    return torch.einsum("ten,ehn->th", h, w2)


def escaping(x, gate, w1, w2):
    scores = torch.zeros(T, E).scatter(1, *F.linear(x, gate).topk(K, dim=1)[::-1])
    h = silu_glu(torch.einsum("th,enh->ten", x, w1))
    return torch.einsum("te,teh->th", scores, torch.einsum("ten,ehn->teh", h, w2)), h.mean()


def slot_by_slot(x, gate, w1, w2, slots=range(K), of=lambda k: k, fill=0.0, ids_of=lambda ids: ids):
    """A scatter for every slot, in place; ``of``: the slot whose score it writes."""
    logits = F.linear(x, gate)
    best, ids = logits.topk(K)
    best, ids, scores = best.softmax(-1), ids_of(ids), torch.full_like(logits, fill)
    for k in slots:
        scores.scatter_(dim=-1, index=ids[..., k : k + 1], src=best[..., of(k) : of(k) + 1])
    return every_expert(x, scores, w1, w2)


def test_scores_slot_by_slot():
    outcome = check(slot_by_slot, *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)
    swapped = check(lambda *given: slot_by_slot(*given, of=lambda k: K - 1 - k), *weights(dtype=torch.float64).values())
    assert (swapped.problem, swapped.fused) == (None, 1)


@pytest.mark.parametrize(
    "options",
    [{"slots": (0, 0)}, {"slots": (1, 0)}, {"fill": 0.1}, {"ids_of": lambda ids: ids // 2}],
    ids=["one twice", "in another order", "over no zeros", "ids that may be twice"],
)
def test_other_scores_slot_by_slot(options):
    assert refusals(lambda *given: slot_by_slot(*given, **options), *weights(dtype=torch.float32).values())


def scattered(x, gate):
    return torch.zeros(x.shape[0], E).scatter(1, *F.linear(x, gate).topk(K, dim=1)[::-1])


def unproven(x, gate):
    """Ids that are in range, but by numbers alone."""
    return (F.linear(x, gate)[:, :K].sigmoid() * E).long()


def another_order(x, gate, w1, w2):
    """As many tokens as experts: [experts, tokens] out of the first product, [tokens, experts] into the second."""
    x = x[:E]
    out = torch.einsum("tei,ehi->teh", silu_glu(x @ w1.mT), w2)
    return (out * scattered(x, gate).unsqueeze(-1)).sum(1)


def other_copies(x, gate, w1, w2):
    """Copies of one token after the other, read as copies of all tokens for one expert after the other."""
    rows = x.repeat_interleave(E, 0).view(E, -1, H) * scattered(x, gate).t().unsqueeze(-1)
    return torch.bmm(silu_glu(torch.bmm(rows, w1.mT)), w2.mT).sum(0)


def gate_of_other_tokens(x, gate, w1, w2):
    one, other = w1.chunk(2, dim=1)
    h = F.silu(torch.einsum("th,enh->ten", x.roll(1, 0), one)) * torch.einsum("th,enh->ten", x, other)
    return torch.einsum("te,teh->th", scattered(x, gate), torch.einsum("ten,ehn->teh", h, w2))


def weighted_before_a_bias(x, gate, w1, w2):
    h = silu_glu(torch.einsum("th,enh->ten", x, w1)) * scattered(x, gate).unsqueeze(-1)
    return (torch.einsum("ten,ehn->teh", h, w2) + w2[:, :, 0]).sum(1)


def ids_not_in_range(x, gate, w1, w2):
    scores = torch.zeros(T, E).scatter_add(1, unproven(x, gate), F.linear(x, gate)[:, :K].sigmoid())
    return every_expert(x, scores, w1, w2)


def picked_by_ids_not_in_range(x, gate, w1, w2):
    out = torch.einsum("ten,ehn->teh", silu_glu(torch.einsum("th,enh->ten", x, w1)), w2)
    picked = out.gather(1, unproven(x, gate).unsqueeze(-1).expand(-1, -1, H))
    return (picked * F.linear(x, gate)[:, :K].sigmoid().unsqueeze(-1)).sum(1)


def without_scores(x, gate, w1, w2):
    return (silu_glu(x @ w1.mT) @ w2.mT).sum(0) * F.linear(x, gate).softmax(-1).topk(1).values


def weights_of_the_first_token(x, gate, w1, w2):
    """einsum repeats an operand along a dimension of size 1."""
    topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
    return every_expert(x, torch.einsum("tk,tke->te", topk_weights[:1], F.one_hot(ids, E).float()), w1, w2)


def none_selected(x, gate, w1, w2):
    scores, ids = F.linear(x, gate).topk(0, dim=1)
    return every_expert(x, torch.zeros(T, E).scatter(1, ids, scores), w1, w2)


REFUSED = {
    soft: "A token's weights for the 8 experts cannot be proved to be zero for all but top_k of them (they come",
    threshold: "(they come from softmax)",
    unbounded: "(they come from mul)",
    repeated: "A token may have an expert id twice",
    biased_input: "those not selected add their biases",
    escaping: "is also used by `",
    another_order: "other orders of tokens and experts",
    other_copies: "not all tokens for all experts",
    gate_of_other_tokens: "cannot be proved to be of the same rows",
    weighted_before_a_bias: "and not its bias",
    ids_not_in_range: "cannot be proved to be in [0, number of experts)",
    picked_by_ids_not_in_range: "cannot be proved to be in [0, number of experts)",
    without_scores: "results are summed without routing weights",
    weights_of_the_first_token: "(they come from einsum)",
    none_selected: "(they come from scatter)",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused_with_the_reason(program):
    inputs = weights(dtype=torch.float32)
    (row,) = refusals(program, *inputs.values(), fullgraph=True)
    assert REFUSED[program] in row.reason and row.cure


@pytest.mark.parametrize(
    ("scores", "routing"),
    [("scattered", "softmax"), ("softmax_of_the_rest", "topk_softmax"), ("sigmoid_of_the_rest", "topk_sigmoid"),
     ("multiplied", "softmax"), ("multiplied_by_one_hot", "sigmoid"), ("filled", "topk_softmax"),
     ("filled_where_zero", "topk_softmax")],
)  # fmt: skip
def test_router_is_fused_too(scores, routing):
    """What the scores are at the ids is a routing of `fused_topk`, although no node of the graph holds it."""
    sizes = dense.Sizes(T, E, K, H, I)

    def program(x, gate, w1, w2):
        return every_expert(x, dense.SCORES[scores](F.linear(x, gate), sizes), w1, w2)

    (row,) = moe_ops.explain(program, *weights(dtype=torch.float32).values()).fused
    assert (row.routing, row.experts, row.K) == (routing, "dense", K)


@pytest.mark.parametrize("scores", dense.FIRST)
def test_router_of_one_expert(scores):
    """max and argmax are a topk of one."""
    sizes = dense.Sizes(T, E, 1, H, I)

    def program(x, gate, w1, w2):
        return every_expert(x, dense.FIRST[scores](F.linear(x, gate), sizes), w1, w2)

    inputs = weights(dtype=torch.float32).values()
    (row,) = moe_ops.explain(program, *inputs).fused
    assert (row.routing, row.K) == ("softmax", 1)
    outcome = check(program, *inputs, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def each(x, w1):
    return silu_glu(torch.einsum("th,enh->ten", x, w1))


# The second product, from [T, E, I], [E, H, I] and scores [T, E], which multiplies by the scores as well.
WEIGHING = {
    "scores_last": lambda h, w, scores: torch.einsum("tei,ehi,te->th", h, w, scores),
    "scores_first": lambda h, w, scores: torch.einsum("te,tei,ehi->th", scores, h, w),
    "weight_first": lambda h, w, scores: torch.einsum("e h i, t e i, t e -> t h", w, h, scores),
    "turned_scores": lambda h, w, scores: torch.einsum("tei,et,ehi->th", h, scores.t(), w),
    "turned_weight": lambda h, w, scores: torch.einsum("tei,eih,te->th", h, w.mT, scores),
    "experts_kept": lambda h, w, scores: torch.einsum("tei,ehi,te->teh", h, w, scores).sum(1),
    "experts_moved": lambda h, w, scores: torch.einsum("tei,ehi,te->eth", h, w, scores).sum(dim=0),
    "batches": lambda h, w, scores: torch.einsum(
        "bsei,ehi,bse->bsh", h.unflatten(0, (2, -1)), w, scores.unflatten(0, (2, -1))
    ).flatten(0, 1),
    "dots": lambda h, w, scores: torch.einsum("...ei,ehi,...e->...h", h, w, scores),
}


@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, torch.float32) for way in WEIGHING), ("scores_last", torch.bfloat16)], ids=str
)
def test_a_product_that_weighs_too(way, dtype):
    def program(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).float().softmax(-1).topk(K)
        scores = torch.zeros(x.shape[0], E).scatter(1, ids, topk_weights).to(x.dtype)
        return WEIGHING[way](each(x, w1), w2, scores)

    outcome = check(program, *weights(dtype=dtype).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_a_product_that_weighs_rows_by_expert():
    def program(x, gate, w1, w2):
        return torch.einsum("eti,ehi,te->th", silu_glu(x @ w1.mT), w2, scattered(x, gate))

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_gradients_of_a_product_that_weighs_too():
    def program(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).topk(K)
        return torch.einsum("tei,ehi,te->th", each(x, w1), w2, x.new_zeros(T, E).scatter(1, ids, topk_weights))

    given = weights(dtype=torch.float64)
    outcome = check(program, *given.values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def weighed_twice(x, gate, w1, w2):
    scores = scattered(x, gate)
    return torch.einsum("tei,ehi,te->teh", each(x, w1), w2, scores).mul(scores.unsqueeze(-1)).sum(1)


def weighed_inside_and_out(x, gate, w1, w2):
    scores = scattered(x, gate)
    return torch.einsum("tei,ehi,te->th", each(x, w1) * scores.unsqueeze(-1), w2, scores)


def weighed_without_its_bias(x, gate, w1, w2):
    return (torch.einsum("tei,ehi,te->teh", each(x, w1), w2, scattered(x, gate)) + w2[:, :, 0]).sum(1)


def weighed_by_features(x, gate, w1, w2):
    return torch.einsum("tei,ehi,ti->th", each(x, w1), w2, x[:, :I])


def weighed_by_experts(x, gate, w1, w2):
    return torch.einsum("tei,ehi,e->th", each(x, w1), w2, scattered(x, gate)[0])


def weighed_by_all(x, gate, w1, w2):
    return torch.einsum("tei,ehi,te->th", each(x, w1), w2, F.linear(x, gate).softmax(-1))


def weighed_first(x, gate, w1, w2):
    scores = scattered(x, gate)
    h = silu_glu(torch.einsum("th,enh,te->ten", x, w1, scores))
    return torch.einsum("tei,ehi,te->th", h, w2, scores)


def weighed_by_other_tokens(x, gate, w1, w2):
    """As many tokens as experts, whose letters are exchanged."""
    x = x[:E]
    return torch.einsum("tei,ehi,et->th", each(x, w1), w2, scattered(x, gate))


def weighed_by_turned_tokens(x, gate, w1, w2):
    """Batch and position are exchanged in the scores."""
    scores = scattered(x, gate).view(T // 2, 2, E)
    return torch.einsum("bsei,ehi,sbe->bsh", each(x, w1).view(2, T // 2, E, I), w2, scores).flatten(0, 1)


@pytest.mark.parametrize(
    "program",
    [weighed_by_turned_tokens, weighed_twice, weighed_inside_and_out, weighed_without_its_bias, weighed_by_features,
     weighed_by_experts, weighed_by_all, weighed_first, weighed_by_other_tokens],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_a_product_that_weighs_otherwise(program):
    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


@pytest.mark.parametrize("gradients", [False, True])
def test_no_tokens(gradients):
    """Slices of an empty tensor are told from reshapes of it by what they would take of more tokens."""

    def run(x, gate, w1, w2):
        out = every_expert(x, scattered(x, gate), w1, w2)
        return block(batched, activation=lambda h: F.silu(h[..., :I]) * h[..., I:])(out, gate, w1, w2)

    x, *rest = weights(dtype=torch.float32).values()
    outcome = check(run, x[:0].clone(), *rest, fullgraph=True, gradients=gradients)
    assert (outcome.problem, outcome.fused) == (None, 2)


def test_an_expert_chosen_twice_counts_twice():
    """In a sum of one-hots, whose choices need not differ."""

    def program(x, gate, w1, w2):
        scores = F.linear(x, gate).softmax(-1)
        hots = [F.one_hot(ids, E) for ids in (scores.argmax(-1), scores.roll(1, 0).argmax(-1))]
        return every_expert(x, sum(hot * (scores * hot).sum(-1, keepdim=True) for hot in hots), w1, w2)

    inputs = weights(dtype=torch.float32)
    inputs["x"][1] = inputs["x"][0]  # token 1 has one expert twice
    outcome = check(program, *inputs.values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_columns_of_a_topk_are_distinct():
    """Two scatters of the ids of one topk, added."""

    def program(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K + 1)
        one = torch.zeros(T, E).scatter(1, ids[:, :1], topk_weights[:, :1])
        more = torch.zeros(T, E).scatter(1, ids[:, 1:], topk_weights[:, 1:])
        return every_expert(x, one + more, w1, w2)

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_columns_of_two_topks_may_repeat():
    """The ids of two choices, viewed as those of one token, whose weight counts once."""

    def program(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).repeat_interleave(2, 0).softmax(-1).topk(K + 1)
        topk_weights, ids = (one[:, 1:].reshape(T, 2 * K) for one in (topk_weights, ids))
        return every_expert(x, torch.zeros(T, E).scatter(1, ids, topk_weights), w1, w2)

    inputs = weights(dtype=torch.float32)
    (row,) = refusals(program, *inputs.values(), fullgraph=True)
    assert "A token may have an expert id twice" in row.reason


def test_terms_of_a_sum_have_ids_in_range():
    def program(x, gate, w1, w2):
        logits = F.linear(x, gate)
        one = torch.zeros(T, E).scatter(1, *logits.topk(K, dim=1)[::-1])
        other = torch.zeros(T, E).scatter_add(1, unproven(x, gate), logits[:, :K].sigmoid())
        return every_expert(x, one + other, w1, w2)

    inputs = weights(dtype=torch.float32)
    (row,) = refusals(program, *inputs.values(), fullgraph=True)
    assert "cannot be proved to be in [0, number of experts)" in row.reason


def test_what_a_product_adds_is_not_lost():
    """baddbmm adds what it is given: a bias of the experts, or anything else, which is no bias."""

    def program(x, gate, w1, w2):
        rows = torch.baddbmm(x[:, :1].expand(E, -1, -1), x.expand(E, -1, -1), w1.mT)
        out = torch.bmm(silu_glu(rows), w2.mT)
        scores = torch.zeros(T, E).scatter(1, *F.linear(x, gate).topk(K, dim=1)[::-1])
        return (out * scores.t().unsqueeze(-1)).sum(0)

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


def with_rows(x, scores, w1, w2, row):
    h = silu_glu(torch.baddbmm(row, x.expand(E, -1, -1), w1.mT))
    return torch.einsum("te,eth->th", scores, torch.bmm(h, w2.mT))


def with_rows_in_a_loop(x, scores, w1, w2, row):
    return sum(scores[:, e, None] * (silu_glu(x @ w1[e].mT + row[e]) @ w2[e].mT) for e in range(E))


def with_rows_of_tokens(x, scores, w1, w2, row):
    """As many tokens as experts."""
    h = torch.einsum("th,enh->ten", x[:E], w1) + row
    return torch.einsum("te,teh->th", scores[:E], torch.einsum("ten,ehn->teh", silu_glu(h), w2))


@pytest.mark.parametrize("way", [with_rows, with_rows_in_a_loop, with_rows_of_tokens], ids=lambda way: way.__name__)
def test_a_bias_that_is_a_row_for_each_expert(way):
    """[E, 1, N], as it is added to the rows of all tokens."""

    def program(x, gate, w1, w2, row):
        scores = torch.zeros(T, E).scatter(1, *F.linear(x, gate).softmax(-1).topk(K, dim=1)[::-1])
        return way(x, scores, w1, w2, row)

    row = torch.randn(E, 1, 2 * I, generator=torch.Generator().manual_seed(0))
    outcome = check(program, *weights(dtype=torch.float32).values(), row, gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, way is not with_rows_of_tokens)


def test_scores_that_somebody_else_reads_stay():
    """A load-balancing loss reads the dense scores: they stay, the products of all experts go."""

    def program(x, gate, w1, w2):
        scores = torch.zeros(T, E).scatter(1, *F.linear(x, gate).softmax(-1).topk(K, dim=1)[::-1])
        return every_expert(x, scores, w1, w2), scores.mean(0)

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_nan_scores_give_nan():
    """A broken router is not hidden: NaN where eager torch has NaN."""

    def program(x, gate, w1, w2):
        return every_expert(x, dense.SCORES["multiplied"](F.linear(x, gate), dense.Sizes(T, E, K, H, I)), w1, w2)

    inputs = weights(dtype=torch.float32)
    inputs["x"][3] = float("nan")
    outcome = check(program, *inputs.values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_a_sum_less_a_number_may_be_0():
    """The quotients of the others are NaN then: the softmax of one score is 1."""

    def program(x, gate, w1, w2):
        best, ids = F.linear(x, gate).topk(1)
        scores = torch.zeros(T, E).scatter(1, ids, best.softmax(-1))
        return every_expert(x, scores / (scores.sum(-1, keepdim=True) + -1), w1, w2)

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def valid(x):
    """A mask of the tokens that are no padding."""
    return x[:, :1] > 0


@pytest.mark.parametrize(
    "scores",
    [
        lambda x, ids: torch.zeros(T, E).scatter(1, ids, 1.0) * valid(x),
        lambda x, ids: torch.zeros(T, E).scatter(1, ids, 1.0) * (torch.arange(E) % 2 == 0).expand(T, E),
        lambda x, ids: (F.one_hot(ids, E).float() * (ids > 2).unsqueeze(-1)).sum(1),
    ],
    ids=["tokens", "experts", "slots"],
)
def test_masks_alone_are_weights(scores):
    """Of a product with a float, in whose dtype their ones and zeros are."""

    def program(x, gate, w1, w2):
        return every_expert(x, scores(x, F.linear(x, gate).topk(K).indices), w1, w2)

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_scores_that_stay_and_are_constants_are_no_scores_with_a_gradient(training):
    """A loss reads them, so that they are left where they are; what they are made of has a gradient, and not they."""

    def program(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
        with torch.no_grad():
            scores = torch.zeros(T, E, dtype=x.dtype).scatter(1, ids, topk_weights)
        return every_expert(x, scores, w1, w2), scores.mean(0)

    outcome = check(program, *weights(dtype=torch.float64).values(), gradients=training, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0 if training else 1)


def by_sum(x, gate, w1, w2, of=lambda logits: logits, at=0.0, largest=True):
    """The softmax of logits and a mask of -inf for the experts that were not chosen."""
    logits = F.linear(x, gate)
    ids = of(logits).topk(K, largest=largest).indices
    mask = torch.full_like(logits, float("-inf")).scatter_(-1, ids, at)
    return every_expert(x, (logits + mask).softmax(-1), w1, w2)


def test_mask_that_is_added_to_logits():
    outcome = check(by_sum, *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_mask_that_is_added_to_logits_that_are_not_finite(value):
    inputs = weights(dtype=torch.float32)
    inputs["x"][3] = value
    outcome = check(by_sum, *inputs.values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize(
    "given",
    [{"of": lambda logits: logits.roll(1, 0)}, {"at": 1.0}, {"largest": False}],
    ids=["of other logits", "of ones", "of the smallest"],
)
def test_other_masks_that_are_added_to_logits(given):
    assert refusals(lambda *inputs: by_sum(*inputs, **given), *weights(dtype=torch.float32).values(), fullgraph=True)


def by_a_loop(x, values, ids, w1, w2):
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + (values * (ids == e)).sum(-1, keepdim=True) * (silu_glu(x @ w1[e].t()) @ w2[e].t())
    return out


def by_slots(x, values, ids, w1, w2):
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            out = out + (values[:, k] * (ids[:, k] == e))[:, None] * (silu_glu(x @ w1[e].t()) @ w2[e].t())
    return out


LOOPS = {"loop": by_a_loop, "slots": by_slots}
MASKED = {
    "one_hot": lambda values, ids: (F.one_hot(ids, E) * values.unsqueeze(-1)).sum(1),
    "einsum": lambda values, ids: torch.einsum("tk,tke->te", values, F.one_hot(ids, E).to(values.dtype)),
    "bmm": lambda values, ids: torch.bmm(values.unsqueeze(1), F.one_hot(ids, E).to(values.dtype)).squeeze(1),
}


def weighted_by_masks(form, scores, share=False):
    """A block whose weights are multiplied by masks of the experts, of ``scores`` of the logits."""

    def run(x, gate, w1, w2):
        values, ids = scores(F.linear(x, gate)).topk(K)
        if share:
            values = values / (values.sum(-1, keepdim=True) + 1e-20) * 2.5
        if form in LOOPS:
            return LOOPS[form](x, values, ids, w1, w2)
        return every_expert(x, MASKED[form](values, ids), w1, w2)

    return run


@pytest.mark.parametrize("given", [float("inf"), float("-inf")])
@pytest.mark.parametrize("form", [*MASKED, *LOOPS])
def test_infinite_weights_that_masks_multiply(form, given):
    """Infinity times the zeros of the others is NaN."""

    def scores(logits):
        """One finite score for the first tokens, as many as there are for the others."""
        return logits.masked_fill((torch.arange(T) < 4)[:, None] & (torch.arange(E) > 0), given)

    outcome = check(weighted_by_masks(form, scores), *weights(dtype=torch.float64).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("form", [*MASKED, *LOOPS])
def test_weights_divided_by_a_sum_that_may_be_zero(form):
    def run(x, gate, w1, w2):
        signs = torch.ones(E, dtype=x.dtype).index_fill(0, torch.arange(1, E), -1.0)
        values, ids = torch.where((torch.arange(T) < 4)[:, None], signs, F.linear(x, gate)).topk(K)
        values = values / values.sum(-1, keepdim=True)
        if form in LOOPS:
            return LOOPS[form](x, values, ids, w1, w2)
        return every_expert(x, MASKED[form](values, ids), w1, w2)

    outcome = check(run, *weights(dtype=torch.float64).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("scores", [torch.sigmoid, lambda logits: logits.softmax(-1)], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("form", [*MASKED, *LOOPS])
def test_shares_that_masks_multiply_keep_their_router(form, scores):
    found = match(weighted_by_masks(form, scores, share=True), **weights(dtype=torch.float32))
    assert isinstance(found.router, Router) and found.router.renormalize
