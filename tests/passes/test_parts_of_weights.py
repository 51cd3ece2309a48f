"""Loops whose experts take their gate and up weights out of one stacked weight, each for itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.blocks import E, I, softmax_router, weights
from tests.passes.compare import check, refusals

LOOP = "run one after the other"


def interleave(w1):
    """[E, 2, I, H]: gate, then up."""
    return w1.view(E, 2, I, -1)


# (w1 [E, 2I, H], e) -> gate and up of expert e, [I, H] each.
TAKEN = {
    "chunk": lambda w1, e: w1[e].chunk(2),
    "chunk_of_select": lambda w1, e: torch.chunk(w1.select(0, e), 2, dim=0),
    "split": lambda w1, e: w1[e].split(I),
    "split_sizes": lambda w1, e: torch.split(w1[e], [I, I], dim=-2),
    "tensor_split": lambda w1, e: w1[e].tensor_split(2),
    "slices": lambda w1, e: (w1[e, :I], w1[e, I:]),
    "slices_of_slices": lambda w1, e: (w1[e][:I], w1[e][I:, :]),
    "slices_negative": lambda w1, e: (w1[e, :-I], w1[e, -I:]),
    "slices_after_ellipsis": lambda w1, e: (w1[e, :I, ...], w1[e][..., I:, :]),
    "narrow": lambda w1, e: (w1[e].narrow(0, 0, I), torch.narrow(w1[e], 0, I, I)),
    "unbind": lambda w1, e: w1.unbind(0)[e].chunk(2),
    "turned_before": lambda w1, e: [half.T for half in w1[e].T.chunk(2, dim=1)],
    "turned_stack": lambda w1, e: [half.t() for half in w1.transpose(1, 2)[e].chunk(2, -1)],
    "turned_slices": lambda w1, e: (w1.mT[e, :, :I].T, w1.mT[e][:, I:].T),
    "two_of_four_dims": lambda w1, e: (interleave(w1)[e, 0], interleave(w1)[e, 1]),
    "two_of_three_dims": lambda w1, e: (interleave(w1)[e][0], interleave(w1)[e][-1]),
    "unbind_of_three_dims": lambda w1, e: interleave(w1)[e].unbind(0),
    "up_first": lambda w1, e: w1[e].chunk(2)[::-1],
}


def loop(x, gate, w1, w2, taken):
    """Rows of every expert's pairs."""
    scores, ids = softmax_router(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        one, other = taken(w1, e)
        rows = F.silu(F.linear(x[token], one)) * (x[token] @ other.T)
        out.index_add_(0, token, F.linear(rows, w2[e]) * scores[token, slot, None].to(x.dtype))
    return out


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in TAKEN), ("chunk", torch.bfloat16)], ids=str
)
def test_fused(name, dtype):
    inputs = weights(dtype=dtype)
    outcome = check(lambda *given: loop(*given, TAKEN[name]), *inputs.values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("name", ["turned_before", "two_of_four_dims"])
def test_gradients(name):
    inputs = weights(dtype=torch.float64)
    outcome = check(lambda *given: loop(*given, TAKEN[name]), *inputs.values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_all_tokens_times_their_weights():
    """The second weight is a part too: [E, 3, I, H] holds w1, w3 and the second one as [I, H]."""

    def program(x, gate, w1, w2):
        stack = torch.cat((w1.view(E, 2, I, -1), w2.mT.unsqueeze(1)), dim=1)
        scores, ids = softmax_router(x, gate)
        out = 0
        for e in range(E):
            rows = F.silu(x @ stack[e, 0].T) * (x @ stack[e, 1].T)
            out = out + (scores * (ids == e)).sum(-1, keepdim=True).to(x.dtype) * (rows @ stack[e, 2])
        return out

    outcome = check(program, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def of_the_next_expert(w1, e):
    return w1[e, :I], w1[(e + 1) % E, I:]


def turned_for_one(w1, e):
    return w1[e].chunk(2)[:: -1 if e == 3 else 1]


def every_other(w1, e):
    """Gate and up in turn: no part of one piece."""
    return w1[e, ::2], w1[e, 1::2]


def widened(w1, e):
    return F.pad(w1[e], (0, 0, 1, 0)).narrow(0, 0, I), w1[e, I:]


MISSES = (of_the_next_expert, turned_for_one, every_other, widened)


@pytest.mark.parametrize("taken", MISSES, ids=lambda taken: taken.__name__)
def test_near_miss(taken):
    def program(x, gate, w1, w2):
        return loop(x, gate, w1, w2, taken)

    inputs = weights(dtype=torch.float32).values()
    said = [row.reason for row in refusals(program, *inputs, fullgraph=True)]
    assert all(LOOP in reason or "experts" in reason for reason in said)
