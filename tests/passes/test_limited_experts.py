"""Loops in which an expert takes the first of its tokens, as many as it has room for, by a slice of their positions."""

from __future__ import annotations

import ast
import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.loops import Block, H
from compile_passes.first_rows import first_rows_alone
from tests.passes.compare import refusals
from tests.passes.test_static_loops import (
    assert_left,
    assert_no_further,
    decoder,
    gradients,
    learnt,
    prepared,
    tokens,
)  # fmt: skip


class Limited(Block):
    """Subclasses add what the experts make of tokens [T, H], at most ``n`` of each."""

    factor = 0.75

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        w, ids = self.route(x)
        n = int(x.shape[0] * self.top_k / self.num_experts * self.factor)
        return self.mixed(x, w, ids, n).view(shape)


class Pairs(Limited):
    """By token, then slot."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            token, slot = token[:n], slot[:n]
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class SlotsFirst(Limited):
    """By slot, then token: first choices go before second ones."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, self.num_experts).permute(2, 1, 0)
        for e in range(self.num_experts):
            slot, token = torch.where(mask[e])
            if len(token) > n:
                token = token[:n]
                slot = slot[:n]
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class AtMost(Limited):
    """Seven at most, whatever the number of tokens; asks for tokens before it drops some."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            if 7 <= token.size(0):
                token, slot = token[:7], slot[:7]
            out[token] += expert(x[token]) * w[token, slot, None]
        return out


class Least(Limited):
    """By the least of two sizes."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            most = min(n, len(token))
            if token.numel() > 0:
                token, slot = token[:most], slot[:most]
                out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


class Switch(Limited):
    """One expert for each token, which leaves zeros where it has no room."""

    def mixed(self, x, w, ids, n):
        w, ids = self.gate(x).softmax(-1).max(dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            index = (ids == e).nonzero(as_tuple=True)[0]
            index = index if index.shape[0] <= n else index[:n]
            if len(index) > 0:
                out[index] = expert(x[index]) * w[index].unsqueeze(1)
        return out


class AllExperts(Limited):
    """All tokens are listed for every expert, most with a weight of 0."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        w, ids = (
            torch.zeros_like(self.gate(x)).scatter(1, ids, w),
            torch.arange(self.num_experts).expand(x.shape[0], -1),
        )
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            token, slot = token[:n], slot[:n]
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


@pytest.mark.parametrize("kind", [Pairs, SlotsFirst, AtMost, Least, Switch, AllExperts], ids=lambda kind: kind.__name__)
def test_exactly_the_pairs_are_dropped_that_the_loop_drops(kind):
    """In two graphs for all numbers of tokens, none of which fits in; with ties, and where none is kept."""
    model = decoder(kind, training=True)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    function, said = prepared(model, fullgraph=True)
    assert not any("left as is" in line for line in said), said
    for count in (32, 1, 7, 2):
        x = tokens(count)
        for given in (x, x[:, :1].expand_as(x).contiguous()):
            torch.testing.assert_close(function(given), eager(given), atol=1e-5, rtol=1e-5)
    function(tokens(7)).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == counters["moe_ops"]["fused"] <= 3
    assert_no_further(gradients(moe_ops.restore(model)), learnt(eager, 7), learnt(exact, 7))


# ---- near misses


class Cut(Limited):
    """A slice of the positions that is another for every class."""

    def cut(self, positions, n, e):
        raise NotImplementedError

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (self.cut(part, n, e) for part in torch.where(ids == e))
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


class LastTokens(Cut):
    def cut(self, positions, n, e):
        return positions[-n:]


class AllButOne(Cut):
    def cut(self, positions, n, e):
        return positions[:-1]


class ButTheFirst(Cut):
    def cut(self, positions, n, e):
        return positions[1:n]


class EverySecond(Cut):
    def cut(self, positions, n, e):
        return positions[:n:2]


class RoomOfItsOwn(Cut):
    """Every expert has room for another number."""

    def cut(self, positions, n, e):
        return positions[: n + e]


class CutTwice(Cut):
    def cut(self, positions, n, e):
        return positions[: n + 1][:n]


class FirstOfSome(Limited):
    """The first of the tokens that a mask leaves of an expert's."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        hot = F.one_hot(ids, self.num_experts) * (w > 0.3).unsqueeze(-1)
        mask = hot.permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = (part[:n] for part in torch.where(mask[e]))
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


class FirstTokens(Limited):
    """The first of all tokens, not of those of an expert."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask, scores = (ids == e).any(-1)[:n], (w * (ids == e)).sum(-1)[:n]
            out[:n][mask] += expert(x[:n][mask]) * scores[mask].unsqueeze(-1)
        return out


class SlotsOfOthers(Limited):
    """Weights of the last pairs for the first ones."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            token, slot = token[:n], slot.flip(0)[:n]
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


class PassesThrough(Limited):
    """A token for which there is no room stays as it is."""

    def mixed(self, x, w, ids, n):
        w, ids = self.gate(x).softmax(-1).max(dim=-1)
        out = x.clone()
        for e, expert in enumerate(self.experts):
            index = (ids == e).nonzero(as_tuple=True)[0][:n]
            out[index] = expert(x[index]) * w[index].unsqueeze(1)
        return out


class WeighedInTheEnd(Limited):
    """What is left out is 0 times a weight, NaN for some."""

    def mixed(self, x, w, ids, n):
        w, ids = self.gate(x).softmax(-1).max(dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            index = (ids == e).nonzero(as_tuple=True)[0][:n]
            out[index] = expert(x[index])
        return out * w.unsqueeze(1)


class SlotBySlot(Limited):
    """Room for each slot."""

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for slot in range(self.top_k):
            for e, expert in enumerate(self.experts):
                index = (ids[:, slot] == e).nonzero(as_tuple=True)[0][:n]
                out.index_add_(0, index, expert(x[index]) * w[index, slot].unsqueeze(-1))
        return out


MISSES = [
    LastTokens, AllButOne, ButTheFirst, EverySecond, RoomOfItsOwn, CutTwice, FirstOfSome, FirstTokens, SlotsOfOthers,
    PassesThrough, WeighedInTheEnd, SlotBySlot,
]  # fmt: skip


@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_other_rows(kind):
    torch.manual_seed(0)
    module = kind().eval()
    moe_ops.stack_experts_(module)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = refusals(module, torch.randn(2, 8, H))
    assert found and all(row.reason and row.cure for row in found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a = a[:n] if a.numel() > n else a", 1),
        ("a = a if n >= a.size(0) else a[:n]", 1),
        ("a = a[:n] if a.numel() > m else a", 0),
        ("a = a[:m] if a.numel() > n else a", 0),
        ("a = a[:n] if a.numel() < n else a", 0),
        ("a = a[:n] if a.numel() > n else a[1:]", 0),
        ("a = a[:n] if a.size(1) > n else a", 0),
        ("a = a[n:] if len(a) > n else a", 0),
        ("if len(a) > n: a = a[:n]", 1),
        ("if len(a) > n: a = a[:m]", 0),
        ("if len(a) < n: a = a[:n]", 0),
        ("if len(a) > n: a = a[:n]; m += 1", 0),
        ("if len(a) > n: b = a[:n]", 0),
        ("if len(c) > n: b, c = b[:n], c[:n]", 1),
        ("if len(a) > n: b, c = b[:n], c[:n]", 0),
        ("if len(c) > n: a, c = a[:n], c[:n]", 0),  # need not be as long
        ("if len(d) > n: d = d[:n]; e = e[:n]", 0),
    ],
)
def test_slices_in_the_place_of_tests(text, count):
    tree = ast.parse(f"def forward(self):\n for i in x:\n  b, c = torch.where(i)\n  d, e = self.parts(i)\n  {text}")
    assert len(first_rows_alone(tree.body[0])) == count
    assert any(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(tree)) == (count == 0)


class CountsTheDropped(Limited):
    """It does more where it drops."""

    dropped = 0

    def mixed(self, x, w, ids, n):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() > n:
                self.dropped += token.numel() - n
                token, slot = token[:n], slot[:n]
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out


def test_a_test_that_stays():
    assert_left(CountsTheDropped, "`if token.numel() > n` is no test for an expert without tokens")
