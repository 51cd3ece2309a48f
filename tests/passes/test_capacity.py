"""Blocks with a capacity: rows to the slots of their experts and back by products with one-hots, as one operator.

The forms are written after the public definitions of GShard's descendants; where they have their own names for
dimensions these are kept: s tokens, e experts, c slots, m hidden (DeepSpeed).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.foreign import DeepSpeed
from tests.passes import capacity as family
from tests.passes.blocks import E, H, T, silu_glu, weights
from tests.passes.compare import check, decisions, refusals, settled

BLOCKS, NEAR_MISSES = 16, 8

CAPACITY = 4


def experts(rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """All experts on [E, C, H]."""
    return torch.bmm(silu_glu(torch.bmm(rows, w1.transpose(1, 2))), w2.transpose(1, 2))


def moved(x: Tensor, combine: Tensor, mask: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """DeepSpeed's MOELayer without its all-to-all."""
    rows = torch.einsum("sec,sm->ecm", mask.type_as(x), x)
    return torch.einsum("sec,ecm->sm", combine.type_as(x), experts(rows, w1, w2))


def top1(x, gate, w1, w2, *, capacity=CAPACITY, random=False):
    """DeepSpeed's top1gating, with places in order (use_rts=False, drop by position) or drawn (use_rts=True)."""
    gates = F.softmax(F.linear(x, gate).float(), dim=1)
    mask = F.one_hot(torch.argmax(gates, dim=1), num_classes=gates.shape[1])
    if random:
        top_idx = torch.topk(mask * torch.rand(mask.shape), k=capacity, dim=0)[1]
        mask = mask * torch.zeros_like(mask).scatter_(0, top_idx, 1)
    locations = torch.cumsum(mask, dim=0) - 1
    if not random:
        mask = mask * torch.lt(locations, capacity)
    places = torch.sum(locations * mask, dim=1)
    combine = torch.einsum("se,sc->sec", gates * mask.float(), F.one_hot(places, num_classes=capacity).float())
    return moved(x, combine, combine.bool(), w1, w2)


def top2(x, gate, w1, w2, *, capacity=CAPACITY, behind=True, renormalised="after", limit=None, counted="all"):
    """DeepSpeed's top2gating: the second choices behind all first ones, gates renormalised over what is kept."""
    gates = F.softmax(F.linear(x, gate).float(), dim=1)
    num_experts = gates.shape[1]
    mask1 = F.one_hot(torch.argmax(gates, dim=1), num_classes=num_experts)
    mask2 = F.one_hot(torch.argmax(gates.masked_fill(mask1.bool(), float("-inf")), dim=1), num_classes=num_experts)
    locations1 = torch.cumsum(mask1, dim=0) - 1
    locations2 = torch.cumsum(mask2, dim=0) - 1
    if behind and counted == "all":
        locations2 += torch.sum(mask1, dim=0, keepdim=True)
    limit = capacity if limit is None else limit
    mask1 *= torch.lt(locations1, limit)
    if behind and counted == "kept":
        locations2 += torch.sum(mask1, dim=0, keepdim=True)
    mask2 *= torch.lt(locations2, limit)
    places1 = torch.sum(locations1 * mask1, dim=1)
    places2 = torch.sum(locations2 * mask2, dim=1)
    mask1_float, mask2_float = mask1.float(), mask2.float()
    gates1_s = torch.einsum("se,se->s", gates, mask1_float)
    gates2_s = torch.einsum("se,se->s", gates, mask2_float)
    if renormalised == "after":
        denom_s = torch.clamp(gates1_s + gates2_s, min=torch.finfo(gates.dtype).eps)
        gates1_s /= denom_s
        gates2_s /= denom_s
    gates1 = torch.einsum("s,se->se", gates1_s, mask1_float)
    gates2 = torch.einsum("s,se->se", gates2_s, mask2_float)
    slots1 = F.one_hot(places1, num_classes=capacity).float()
    slots2 = F.one_hot(places2, num_classes=capacity).float()
    combine = torch.einsum("se,sc->sec", gates1, slots1) + torch.einsum("se,sc->sec", gates2, slots2)
    return moved(x, combine, combine.bool(), w1, w2)


def topk(x, gate, w1, w2, *, capacity=CAPACITY, policy="position", k=2, noise=False):
    """DeepSpeed's topkgating, which drops by position or by the size of the gates."""
    logits = F.linear(x, gate).float()
    gates = F.softmax(logits, dim=1)
    top_gate, top_idx = torch.topk(gates, k=k, dim=1)
    mask = torch.zeros_like(gates).scatter_(1, top_idx, 1)
    if policy == "probs":
        given = torch.zeros_like(logits).scatter(1, top_idx, top_gate)
        if noise:
            given = given * torch.rand_like(given)
        kept = torch.topk(given, k=capacity, dim=0, sorted=False)[1]
        mask = torch.mul(mask, torch.zeros_like(logits).scatter(0, kept, 1))
        locations = torch.cumsum(mask, dim=0) - 1
    else:
        locations = torch.cumsum(mask, dim=0) - 1
        mask *= torch.lt(locations, capacity)
    gates_masked = gates * mask
    denom_s = torch.clamp(gates_masked.sum(dim=-1, keepdim=True), min=torch.finfo(gates.dtype).eps)
    slots = F.one_hot((locations * mask).long(), num_classes=capacity).float()
    combine = torch.einsum("se,sec->sec", gates_masked / denom_s, slots)
    return moved(x, combine, combine.bool(), w1, w2)


def nanomoe(x, gate, w1, w2, *, capacity=CAPACITY, k=2):
    """nanoMoE's router: choices before tokens, one cumsum over both, products instead of einsum."""
    tokens, num_experts = x.shape[:-1].numel(), gate.shape[0]
    scores, ids = F.linear(x, gate).float().topk(k, dim=-1)
    probs = torch.full((*x.shape[:-1], num_experts), float("-inf")).scatter_(-1, ids, scores).softmax(-1)
    x, probs = x.view(tokens, -1), probs.view(tokens, num_experts)
    mask = F.one_hot(ids, num_classes=num_experts).view(tokens, k, num_experts).permute(1, 0, 2)
    rank = torch.cumsum(mask.reshape(k * tokens, num_experts), dim=0) - 1
    rank = rank.reshape(k, tokens, num_experts)
    mask = mask * torch.lt(rank, capacity)
    place = torch.sum(mask * rank, dim=-1)
    weights = mask * probs[None, :]
    slots = F.one_hot(place, num_classes=capacity)
    combine = torch.sum(weights.unsqueeze(3) * slots.unsqueeze(2), dim=0)
    rows = combine.bool().permute(1, 2, 0).type_as(x) @ x
    out = experts(rows, w1, w2)
    return combine.view(tokens, -1).to(x.dtype) @ out.view(-1, x.shape[-1])


def nanomoe_of_sequences(x, *given):
    """The router sees [B, S, H], and a one-hot of its ids becomes one of all tokens."""
    return nanomoe(x.view(3, -1, H), *given).view(x.shape)


FORMS = {
    "top1": top1,
    "top2": top2,
    "top2_counting_what_is_kept": lambda *given: top2(*given, counted="kept"),
    "top2_renormalised_before": lambda *given: top2(*given, renormalised="never"),
    "top2_dropping_more": lambda *given: top2(*given, limit=CAPACITY - 1),
    "topk": topk,
    "topk_by_size": lambda *given: topk(*given, policy="probs"),
    "nanomoe": nanomoe,
    "nanomoe_of_sequences": nanomoe_of_sequences,
    "room_for_all": lambda *given: top2(*given, capacity=T),
    "one_slot": lambda *given: nanomoe(*given, capacity=1),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name):
    """One operator, which drops the pairs that the block drops, gradients included."""
    inputs = weights(dtype=torch.float32).values()
    (found,) = decisions(FORMS[name], *inputs, gradients=True, tolerance=1e-3, fullgraph=True)
    assert (found.match.dispatch.form, found.problem.K) == ("capacity", 1 if name == "top1" else 2)


# One of each way to count and to weigh: what they cast, they cast alike.
@pytest.mark.parametrize("name", ["top1", "top2", "topk_by_size", "nanomoe"])
def test_form_in_bf16(name):
    outcome = check(FORMS[name], *weights(dtype=torch.bfloat16).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_something_is_dropped():
    """The forms above drop pairs at this capacity, each according to its own order of choices and tokens."""
    inputs = weights(dtype=torch.float32).values()
    small, all_of_them = top2(*inputs), top2(*inputs, capacity=T)
    assert not torch.allclose(small, all_of_them)
    assert not torch.allclose(top2(*inputs), nanomoe(*inputs))


def with_half_of_the_tokens(x, gate, w1, w2):
    """Slots for half of the tokens, compared with an arange, which may have a symbol for its size."""
    capacity = x.shape[0] // 2
    gates = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(gates.argmax(-1), E)
    rank = hot.cumsum(0) - 1
    hot = hot * (rank < capacity)
    slots = (rank * hot).sum(-1, keepdim=True) == torch.arange(capacity)
    combine = torch.einsum("se,sc->sec", gates * hot, slots.float())
    return moved(x, combine, combine.bool(), w1, w2)


PROGRAMS = {"top2": top2, "topk": topk, "nanomoe": nanomoe, "half_of_the_tokens": with_half_of_the_tokens}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_recompile_per_batch_size(name):
    """One graph for every number of tokens, where torch has one: F.one_hot takes its capacity as a constant."""
    program, inputs = PROGRAMS[name], weights(dtype=torch.float32)
    torch._dynamo.reset()
    counters.clear()
    counter = torch._dynamo.testing.CompileCounterWithBackend("moe_ops_eager")
    compiled = torch.compile(program, backend=counter, dynamic=None, fullgraph=True)
    for tokens in (12, 8, 20, 6):
        x = torch.randn(tokens, H)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        given = (x, *list(inputs.values())[1:])
        torch.testing.assert_close(compiled(*given), program(*given))
    assert (counter.frame_count, counters["moe_ops"]["fused"]) == (1, 1)


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_block(seed):
    case = family.make(seed, misses=0)
    assert settled(family.run, case).fused == 1, str(case)


@pytest.mark.parametrize("name", family.MUTATIONS)
def test_near_miss(name):
    """Each near miss on its own, on the first block that it gives another result."""
    settled(family.run, family.with_mutation(name))


@pytest.mark.parametrize("seed", range(1000, 1000 + NEAR_MISSES))
def test_changed_block(seed):
    settled(family.run, family.make(seed, misses=1 + seed % 2))


def one_choice(x, gate, w1, w2, *, ids=None, places=None, kept=None, combine=None, mask=None):
    """A block of one choice, of which each part can be another."""
    gates = F.linear(x, gate).float().softmax(-1)
    ids = gates.argmax(-1) if ids is None else ids(gates)
    hot = F.one_hot(ids, E)
    counted = hot.cumsum(0) - 1 if places is None else places(hot)
    hot = hot * (counted < CAPACITY if kept is None else kept(counted))
    slots = F.one_hot((counted * hot).sum(-1).long(), CAPACITY).float()
    made = torch.einsum("se,sc->sec", gates * hot, slots)
    made = made if combine is None else combine(made, gates, hot, slots)
    return moved(x, made, made.bool() if mask is None else mask(made, hot, slots), w1, w2)


def changed(**parts):
    return lambda *given: one_choice(*given, **parts)


def ids_of_a_sigmoid(gates):
    return (gates[:, 0] * (E - 1)).long()


def twice(x, gate, w1, w2):
    """A token with one expert twice has it once in a scattered mask."""
    gates = F.linear(x, gate).softmax(-1)
    ids = torch.stack((gates.argmax(-1), gates.roll(1, 0).argmax(-1)), dim=1)
    hot = torch.zeros_like(gates).scatter(1, ids, 1.0)
    rank = hot.cumsum(0) - 1
    hot = hot * (rank < CAPACITY)
    combine = (gates * hot).unsqueeze(-1) * F.one_hot((rank * hot).long(), CAPACITY)
    return moved(x, combine, combine.bool(), w1, w2)


REFUSED = {
    "weights_of_weights": (changed(combine=lambda made, *_: made.exp() * made), "The weights of the slots cannot be"),
    "mask_by_size": (changed(mask=lambda made, *_: made > 0.2), "The mask that moves tokens to slots cannot be read"),
    "mask_above_zero_of_any_sign": (
        changed(combine=lambda made, gates, hot, slots: torch.einsum("se,sc->sec", (gates - 0.2) * hot, slots),
                mask=lambda made, *_: made > 0),
        "The mask that moves tokens to slots cannot be read",
    ),
    "all_experts": (
        changed(combine=lambda made, gates, hot, slots: torch.einsum("se,sc->sec", gates, slots)),
        "A pair of a token and an expert is not in one slot",
    ),
    "ids_not_in_range": (changed(ids=ids_of_a_sigmoid), "The expert ids cannot be proved to be in [0, number of"),
    "twice": (twice, "A token may have an expert id twice"),
    "mask_of_fewer": (
        changed(mask=lambda made, hot, slots: torch.einsum("se,sc->sec", hot * (slots.sum(-1) > 0)[:, None], slots)),
        "cannot be proved to have the same pairs",
    ),
    "places_from_one": (changed(places=lambda hot: hot.cumsum(0)), "to count those of one expert, from 0"),
    "places_rounded": (
        changed(places=lambda hot: hot.bfloat16().cumsum(0) - 1), "to count those of one expert, from 0",
    ),
    "places_of_the_next": (changed(places=lambda hot: hot.roll(1, 1).cumsum(0) - 1), "to count those of one expert"),
    "places_by_expert": (changed(places=lambda hot: hot.cumsum(1) - 1), "do not count over all tokens that share the"),
    "second_on_top": (lambda *given: top2(*given, behind=False), "their places do not begin behind the earlier ones"),
    "random": (lambda *given: top1(*given, random=True), "drawn at random (random token selection)"),
    "random_by_size": (lambda *given: topk(*given, policy="probs", noise=True), "drawn at random (random token sel"),
    "no_limit": (changed(kept=lambda counted: counted >= 0), "Places may exceed the capacity"),
    "limit_beyond": (changed(kept=lambda counted: counted <= CAPACITY), "Places may exceed the capacity"),
    "mask_alone": (
        changed(combine=lambda made, gates, hot, slots: torch.einsum("se,sc->sec", hot.float(), slots)),
        "The weights of the slots are not numbers of tokens and experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    program, reason = REFUSED[name]
    inputs = weights(dtype=torch.float32)
    try:
        (row,) = refusals(program, *inputs.values(), fullgraph=True)
    except (RuntimeError, IndexError):  # eager torch itself refuses a place beyond the slots
        (row,) = moe_ops.explain(program, *inputs.values()).refused
    assert reason in row.reason and row.cure


def test_one_choice_is_fused():
    """What the refusals above change is a block."""
    outcome = check(one_choice, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def weighed(weigh):
    """The gates of the chosen experts, changed."""
    return lambda made, gates, hot, slots: torch.einsum("se,sc->sec", weigh(gates, hot), slots)


def best_tokens(gates):
    return torch.zeros_like(gates).scatter(0, gates.topk(CAPACITY - 1, 0)[1], 1.0).unsqueeze(-1)


ALIKE = {
    "numbers that are not 0": weighed(lambda gates, hot: gates * torch.logical_and(hot.bool(), gates - 0.3).float()),
    "integers that are not 0": weighed(lambda gates, hot: gates * torch.logical_and(hot, (gates * 9).long()).float()),
    "all but some": lambda made, gates, *_: made * torch.logical_not(best_tokens(gates)),
    "some": lambda made, gates, *_: made * best_tokens(gates),
}


@pytest.mark.parametrize("name", ALIKE)
def test_masks_of_weights_are_what_they_are(name):
    outcome = check(changed(combine=ALIKE[name]), *weights(dtype=torch.float32).values(), fullgraph=True)
    assert outcome.problem is None


def of_a_token(x, gate, w1, w2, *, weights=None, slotted=None, places=None):
    """A block of one choice; its mask is made of the one-hots, whatever the weights are.

    Args:
        weights: from (own: the gate of each token's expert, gates, hot, ranks) [s, e].
        slotted: from the same and the slots, the weights of the slots.
        places: from (ranks, hot: what is kept).
    """
    gates = F.linear(x, gate).softmax(-1)
    hot = F.one_hot(gates.argmax(-1), E)
    ranks = hot.cumsum(0) - 1
    hot = hot * (ranks < CAPACITY)
    place = (ranks * hot).sum(-1) if places is None else places(ranks, hot)
    slots = (place.unsqueeze(-1) == torch.arange(CAPACITY)).to(x.dtype)
    given = (gates * hot).sum(-1, keepdim=True), gates, hot.to(x.dtype), ranks.to(x.dtype)
    if slotted is None:
        combine = torch.einsum("se,sc->sec", gates * hot if weights is None else weights(*given), slots)
    else:
        combine = slotted(*given, slots)
    return moved(x, combine, combine.bool() if places is None else hot.unsqueeze(-1) * slots.unsqueeze(1), w1, w2)


# Numbers that a sum over the experts picked, in places where they are numbers for all experts.
PICKED = {
    "times its one-hot": (dict(weights=lambda own, gates, hot, ranks: own * hot), 1),
    "times the one-hots of slots": (
        dict(slotted=lambda own, gates, hot, ranks, slots: own[..., None] * torch.einsum("se,sc->sec", hot, slots)), 1,
    ),
    "times all gates": (dict(weights=lambda own, gates, hot, ranks: own * gates), 0),
    "times ranks": (dict(weights=lambda own, gates, hot, ranks: torch.einsum("s,se->se", own[:, 0], ranks)), 0),
    "times a mask of sizes": (dict(weights=lambda own, gates, hot, ranks: own * (gates > 0.1)), 0),
    "for all experts": (dict(weights=lambda own, gates, hot, ranks: own.expand(-1, E)), 0),
    "times all, in slots": (
        dict(slotted=lambda own, gates, hot, ranks, slots: torch.einsum("se,sc->sec", ranks, own * slots)), 0,
    ),
    "times slots of all": (
        dict(slotted=lambda own, gates, hot, ranks, slots: own[..., None] * torch.einsum("se,sc->sec", ranks, slots)),
        0,
    ),
    "places of all experts": (dict(places=lambda ranks, hot: (ranks * hot.sum(1, keepdim=True)).sum(-1)), 0),
    "places of all experts by einsum": (
        dict(places=lambda ranks, hot: torch.einsum("se,s->s", ranks, hot.sum(1))), 0,
    ),
    "places in all experts": (dict(places=lambda ranks, hot: hot.sum(1).cumsum(0) - 1), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKED)
def test_what_is_picked_by_a_one_hot_is_a_number_of_all_experts(name):
    parts, fused = PICKED[name]
    inputs = weights(dtype=torch.float32).values()
    outcome = check(lambda *given: of_a_token(*given, **parts), *inputs, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, fused)


def test_second_choices_behind_all_first_ones_of_any_expert():
    """Their places are compared with the capacity as if they began behind those of one expert."""

    def run(x, gate, w1, w2):
        gates = F.linear(x, gate).softmax(-1)
        first = F.one_hot(gates.argmax(-1), E)
        second = F.one_hot(gates.masked_fill(first.bool(), float("-inf")).argmax(-1), E)
        rank, other = first.cumsum(0) - 1, second.cumsum(0) - 1
        kept, others = first * (rank < CAPACITY), second * (other + first.sum(0, keepdim=True) < CAPACITY)
        further = other + first.sum(1, keepdim=True).sum(0, keepdim=True)
        made = []
        for hot, places in ((kept, rank), (others, further)):
            slots = ((places * hot).sum(-1).unsqueeze(-1) == torch.arange(CAPACITY)).to(x.dtype)
            made.append(torch.einsum("se,sc->sec", gates * hot, slots))
        combine = made[0] + made[1]
        return moved(x, combine, combine.bool(), w1, w2)

    outcome = check(run, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


# How experts one after the other take their slots and give back the results: DeepSpeed's Experts, and others.
LISTS = {
    "chunk": lambda rows, expert: torch.cat(
        [expert(e, part) for e, part in enumerate(rows.unsqueeze(0).chunk(E, dim=1))], dim=1
    ).squeeze(0),
    "index": lambda rows, expert: torch.stack([expert(e, rows[e]) for e in range(E)]),
    "index_all": lambda rows, expert: torch.stack([expert(e, rows[e, :, :]) for e in range(E)], dim=0),
    "unbind": lambda rows, expert: torch.stack([expert(e, part) for e, part in enumerate(rows.unbind(0))]),
    "slice": lambda rows, expert: torch.cat([expert(e, rows[e : e + 1]) for e in range(E)]),
    "narrow": lambda rows, expert: torch.cat([expert(e, rows.narrow(0, e, 1)) for e in range(E)]),
    "split": lambda rows, expert: torch.cat([expert(e, part) for e, part in enumerate(rows.split(1))]),
    "of_the_next": lambda rows, expert: torch.stack([expert(e, rows[(e + 1) % E]) for e in range(E)]),
    "in_another_order": lambda rows, expert: torch.stack([expert(e, rows[e]) for e in range(E)][::-1]),
}


@pytest.mark.parametrize("name", LISTS)
def test_experts_one_after_the_other(name):
    """The slots of one expert after the other; not those of another, and not the results in another order."""

    def program(x, gate, w1, w2):
        gates = F.linear(x, gate).float().softmax(-1)
        hot = F.one_hot(gates.argmax(-1), E)
        rank = hot.cumsum(0) - 1
        hot = hot * (rank < CAPACITY)
        combine = torch.einsum("se,sc->sec", gates * hot, F.one_hot((rank * hot).sum(-1), CAPACITY).float())
        rows = torch.einsum("sec,sm->ecm", combine.bool().type_as(x), x)
        out = LISTS[name](rows, lambda e, part: F.linear(silu_glu(F.linear(part, w1[e])), w2[e]))
        return torch.einsum("sec,ecm->sm", combine.type_as(x), out)

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, int(name not in ("of_the_next", "in_another_order")))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_deepspeed_layer(train):
    """A list of experts that take their chunk of the slots, stacked: one graph, one operator, the loss as it was."""
    torch.manual_seed(0)
    module = moe_ops.stack_experts_(DeepSpeed(capacity_factor=0.6))
    x = torch.randn(2, 9, 32)
    outcome = check(module, x, gradients=train, fullgraph=True, tolerance=1e-3 if train else None)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_deepspeed_layer_by_compile():
    """`moe_ops.compile` stacks the experts by itself."""
    torch.manual_seed(0)
    module, x = DeepSpeed(capacity_factor=0.6), torch.randn(18, 32)
    with torch.no_grad():
        expected = module(x)
        counters.clear()
        with pytest.warns(UserWarning, match="stacked the experts of experts"):
            compiled = moe_ops.compile(module, fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
    assert counters["moe_ops"]["fused"] == 1


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_gates_under_no_grad_have_no_gradient(training):
    """They stay, as their sum divides the weights, and what they are made of is all that the weights need beside it."""

    def run(x, gate, w1, w2):
        gates = F.linear(x, gate).softmax(dim=1)
        mask = torch.zeros_like(gates).scatter_(1, gates.topk(2, dim=1)[1], 1)
        locations = torch.cumsum(mask, dim=0) - 1
        mask *= torch.lt(locations, CAPACITY)
        with torch.no_grad():
            gates_masked = gates * mask
        denom_s = torch.clamp(gates_masked.sum(dim=-1, keepdim=True), min=torch.finfo(gates.dtype).eps)
        slots = F.one_hot((locations * mask).long(), num_classes=CAPACITY).to(x.dtype)
        combine = torch.einsum("se,sec->sec", gates_masked / denom_s, slots)
        return moved(x, combine, combine.bool(), w1, w2)

    outcome = check(run, *weights(dtype=torch.float64).values(), gradients=training, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0 if training else 1)


def test_a_mask_that_is_written_through_a_view_is_another_mask():
    """It stays, as a sum of scores is made of it, and what it was made of was a mask of ones before the write."""

    def run(x, gate, w1, w2):
        gates = F.linear(x, gate).softmax(dim=1)
        hot = torch.zeros_like(gates).scatter_(1, gates.topk(2, dim=1)[1], 1)
        locations = (torch.cumsum(hot, dim=0) - hot) * hot
        hot[:1].mul_(2)
        mask = torch.where(locations < CAPACITY, hot, 0)
        slots = F.one_hot((locations * mask).long(), num_classes=2 * T).to(x.dtype)
        scores = gates * mask
        scores = scores / scores.sum(-1, keepdim=True).clamp(min=1e-6)
        return moved(x, scores.unsqueeze(-1) * slots, mask.unsqueeze(-1) * slots, w1, w2)

    given = list(weights(dtype=torch.float64).values())
    row = refusals(run, *given, fullgraph=True)[0]
    assert "reads through another view" in row.reason
