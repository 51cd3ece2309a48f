"""Rows that a mask [experts, tokens] lists, expert after expert, as Megatron's dispatchers do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_ops
from tests.passes.blocks import E, H, I, K, silu_glu, weights
from tests.passes.compare import check, refusals


def route(x, gate):
    top, ids = F.linear(x, gate).topk(K, dim=1)
    return top.float().softmax(-1).type_as(x), ids


def scattered(like, ids, src):
    return torch.zeros_like(like).scatter(1, ids, src)


def by_ones(like, ids):
    return torch.zeros_like(like).int().scatter(1, ids, 1).bool()


def numbered(mask):
    experts, tokens = mask.shape
    return torch.arange(tokens, device=mask.device).unsqueeze(0).expand(experts, -1)


# What makes the mask [T, E], lists the tokens of its transpose, and the weights; counts, and puts rows back.
MASKS = {
    "ones": by_ones,
    "true": lambda like, ids: torch.zeros_like(like, dtype=torch.bool).scatter(1, ids, True),
    "one_hot": lambda like, ids: F.one_hot(ids, E).sum(1).bool(),
    "above_zero": lambda like, ids: F.one_hot(ids, E).sum(1) > 0,
}
TOKENS = {
    "select": lambda mask: numbered(mask).masked_select(mask),
    "index": lambda mask: numbered(mask)[mask],
    "where": lambda mask: torch.where(mask)[1],
    "nonzero": lambda mask: mask.nonzero(as_tuple=True)[1],
}
WEIGHTS = {
    "select": lambda scores, mask: scores.T.contiguous().masked_select(mask),
    "index": lambda scores, mask: scores.T[mask],
}
COUNTS = {"sum": lambda mask: mask.sum(0), "long": lambda mask: mask.long().sum(dim=0)}
BACK = {
    "scatter_add": lambda x, tokens, y: torch.zeros_like(x).scatter_add_(0, tokens[:, None].expand(-1, H), y),
    "index_add": lambda x, tokens, y: torch.zeros_like(x).index_add_(0, tokens, y),
}


def program_of(mask="ones", tokens="select", given="select", count="sum", back="scatter_add", inside=False, **other):
    """Each step by its name above, or another one."""
    make = other.get("make", MASKS[mask])
    listed, counted = other.get("listed", TOKENS[tokens]), other.get("counted", COUNTS[count])
    spread, weigh = other.get("spread", scattered), other.get("weigh", WEIGHTS[given])
    turned, put = other.get("turned", lambda mask: mask.T.contiguous()), BACK[back]

    def program(x, gate, w1, w2):
        w, ids = route(x, gate)
        like = F.linear(x, gate)
        scores, chosen = spread(like, ids, w), make(like, ids)
        rows = turned(chosen)
        token, own = listed(rows), weigh(scores, rows)
        offsets = counted(chosen).cumsum(0).to(torch.int32)
        h = silu_glu(F.grouped_mm(x.index_select(0, token), w1.mT, offs=offsets))
        y = F.grouped_mm(h * own[:, None] if inside else h, w2.mT, offs=offsets)
        return put(x, token, y if inside else y * own[:, None])

    return program


FORMS = {
    **{f"mask-{name}": program_of(mask=name) for name in MASKS},
    **{f"tokens-{name}": program_of(tokens=name) for name in TOKENS},
    "weights-index": program_of(given="index"),
    "counts-long": program_of(count="long"),
    "back-index_add": program_of(back="index_add"),
    "inside": program_of(inside=True),
    "weights_turned": program_of(weigh=lambda scores, mask: scores.flip(0).T.masked_select(mask)),
    "dense_scores": program_of(spread=lambda like, ids, w: like.softmax(-1)),
}


def weighted_before(weigh=WEIGHTS["index"]):
    def program(x, gate, w1, w2):
        w, ids = route(x, gate)
        like = F.linear(x, gate)
        mask = by_ones(like, ids).T
        offsets = by_ones(like, ids).sum(0).cumsum(0).to(torch.int32)
        token, own = torch.where(mask)[1], weigh(scattered(like, ids, w), mask)
        h = silu_glu(F.grouped_mm(x[token] * own[:, None], w1.mT, offs=offsets))
        return torch.zeros_like(x).index_add_(0, token, F.grouped_mm(h, w2.mT, offs=offsets))

    return program


FORMS["before"] = weighted_before()


@pytest.mark.parametrize("name", FORMS)
def test_fused(name):
    outcome = check(FORMS[name], *weights().values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("name", ["mask-ones", "inside", "dense_scores"])
def test_gradients(name):
    outcome = check(FORMS[name], *weights().values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


MISSES = {
    "threshold": program_of(make=lambda like, ids: like > like.mean(-1, keepdim=True)),
    "ids_that_repeat": program_of(make=lambda like, ids: by_ones(like, ids % 3)),
    "ids_of_other_tokens": program_of(make=lambda like, ids: by_ones(like, ids.flip(0))),
    "more_ids": program_of(make=lambda like, ids: by_ones(like, torch.cat([ids, 0 * ids[:, :1]], 1))),
    "others": program_of(make=lambda like, ids: ~by_ones(like, ids)),
    "counts_of_others": program_of(counted=lambda mask: mask.flip(1).sum(0)),
    "counts_of_tokens_flipped": program_of(counted=lambda mask: mask.sum(0).flip(0)),
    "tokens_from_behind": program_of(listed=lambda mask: numbered(mask).flip(1).masked_select(mask)),
    "experts_in_place_of_tokens": program_of(
        listed=lambda mask: torch.arange(E)[:, None].expand(-1, mask.shape[1]).masked_select(mask)
    ),
    "experts_of_where": program_of(listed=lambda mask: torch.where(mask)[0]),
    "weights_of_other_ids": program_of(spread=lambda like, ids, w: scattered(like, ids.flip(1), w)),
    "weights_by_another_mask": program_of(weigh=lambda scores, mask: scores.T.masked_select(mask.flip(0))),
    "before_by_another_mask": weighted_before(lambda scores, mask: scores.T[mask.flip(0)]),
    "before_of_other_ids": weighted_before(
        lambda scores, mask: scattered(scores, (scores.topk(K)[1] + 1) % E, scores.topk(K)[0]).T[mask]
    ),
    "experts_turned": program_of(turned=lambda mask: mask.T.flip(0)),
    "tokens_turned": program_of(turned=lambda mask: mask.T.flip(1)),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name):
    given = weights().values()
    outcome = check(MISSES[name], *given, fullgraph=True)
    assert outcome.problem is None
    assert outcome.fused == 0 and refusals(MISSES[name], *given)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 2 * I, bias=False), nn.Linear(I, H, bias=False)

    def forward(self, x, w=None):
        h = silu_glu(self.up(x))
        return self.down(h if w is None else h * w[:, None])


class Sequential(nn.Module):
    """Experts one after the other, on the parts that counts on the host cut."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.gate, self.inside = nn.Linear(H, E, bias=False), inside
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x):
        w, ids = route(x, self.gate.weight)
        like = self.gate(x)
        scores, chosen = scattered(like, ids, w), by_ones(like, ids)
        mask = chosen.T.contiguous()
        token, own = numbered(mask).masked_select(mask), scores.T.contiguous().masked_select(mask)
        counts = chosen.sum(0).tolist()
        rows = torch.split(x[token], counts)
        weights = torch.split(own, counts)
        done = []
        for expert, part, mine in zip(self.experts, rows, weights, strict=True):
            done.append(expert(part, mine) if self.inside else expert(part))
        y = torch.cat(done)
        return torch.zeros_like(x).index_add_(0, token, y if self.inside else y * own[:, None])


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_sequential_experts(inside):
    torch.manual_seed(0)
    model, x = Sequential(inside).double(), torch.randn(13, H, dtype=torch.float64)

    def losses(run):
        rows = x.clone().requires_grad_()
        model.zero_grad()
        out = run(rows)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        return out, rows.grad, model.gate.weight.grad

    expected = losses(model)
    model.zero_grad()
    compiled = moe_ops.compile(model)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for got, wanted in zip(losses(compiled), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert torch._dynamo.utils.counters["moe_ops"]["fused"] == 1
