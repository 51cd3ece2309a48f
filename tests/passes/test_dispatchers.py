"""Objects that hand rows out by gates that are not 0: static, fused in one graph, and equal to eager."""

from __future__ import annotations

import ast

import pytest
import torch

from benchmarks.loops import Block, K
from compile_passes.dispatchers import without_own_gradients
from compile_passes.rebind import verdict_of
from tests.passes.test_static_loops import assert_left, assert_trains_as_eager


class Dispatcher:
    """Rows of every expert, sorted by expert, and their sum."""

    def __init__(self, experts, gates):
        self.gates = gates
        by_expert = gates.nonzero()[gates.nonzero()[:, 1].argsort(stable=True)]
        self.row, expert = by_expert.unbind(1)
        self.sizes = (gates > 0).sum(0).tolist()
        self.weights = gates[self.row, expert].unsqueeze(1)

    def dispatch(self, x):
        return torch.split(x[self.row], self.sizes, dim=0)

    def weights_of_rows(self):
        return torch.split(self.weights, self.sizes, dim=0)

    def combine(self, outs, weighted=True):
        rows = torch.cat(outs, 0)
        if weighted:
            rows = rows * self.weights
        out = torch.zeros(self.gates.size(0), outs[-1].size(1), dtype=rows.dtype, requires_grad=True)
        return out.index_add(0, self.row, rows)


class InLogarithms(Dispatcher):
    def combine(self, outs):
        return torch.zeros(self.gates.size(0), outs[-1].size(1)).index_add(0, self.row, torch.cat(outs).exp()).log()


class Gated(Block):
    """Gates of all experts, 0 for those that were not chosen; a load of each beside them."""

    def gates(self, x):
        best, ids = self.gate(x).topk(K)
        zeros = torch.zeros(len(x), len(self.experts), dtype=x.dtype, requires_grad=True)
        return zeros.scatter(1, ids, best.softmax(-1))

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        return self.mixed(flat, self.gates(flat)).view_as(x)


class Listed(Gated):
    def mixed(self, x, gates):
        dispatcher = Dispatcher(self.num_experts, gates)
        inputs = dispatcher.dispatch(x)
        gates = dispatcher.weights_of_rows()
        outs = [self.experts[i](inputs[i]) for i in range(self.num_experts)]
        return dispatcher.combine(outs)


class Zipped(Gated):
    def mixed(self, x, gates):
        split = Dispatcher(gates=gates, experts=self.num_experts)
        outs = []
        for expert, rows in zip(self.experts, split.dispatch(x), strict=False):
            outs.append(expert(rows))
        return split.combine(outs, weighted=True)


def test_form():
    assert "as all rows times the gates" in assert_trains_as_eager(Zipped, 9)


def test_list_by_an_expression():
    torch.manual_seed(0)
    verdict, _ = verdict_of(Listed().eval(), "")
    assert verdict.forms and verdict.training is None


class Unweighted(Gated):
    def mixed(self, x, gates):
        dispatcher = Dispatcher(self.num_experts, gates)
        outs = [expert(rows) for expert, rows in zip(self.experts, dispatcher.dispatch(x), strict=False)]
        return dispatcher.combine(outs, weighted=False)


class ReadsMore(Gated):
    def mixed(self, x, gates):
        dispatcher = Dispatcher(self.num_experts, gates)
        outs = [expert(rows) for expert, rows in zip(self.experts, dispatcher.dispatch(x), strict=False)]
        return dispatcher.combine(outs) * dispatcher.weights.mean()


class Exponentials(Gated):
    def mixed(self, x, gates):
        dispatcher = InLogarithms(self.num_experts, gates)
        outs = [expert(rows) for expert, rows in zip(self.experts, dispatcher.dispatch(x), strict=False)]
        return dispatcher.combine(outs)


class OtherExperts(Gated):
    """Rows of one expert go to another: what is written is no sum of gates times results."""

    def mixed(self, x, gates):
        dispatcher = Dispatcher(self.num_experts, gates)
        return dispatcher.combine(
            [e(rows.flip(0)) for e, rows in zip(self.experts, dispatcher.dispatch(x), strict=False)]
        )


MISSES = {
    Unweighted: "what dispatcher.combine(outs, weighted=False) does is not known",
    ReadsMore: "what else Dispatcher does is not known",
    Exponentials: "adds exponentials of results",
    OtherExperts: "gives other outputs",
}


@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_left_as_it_is(kind):
    assert_left(kind, MISSES[kind])


def test_gradient_that_may_be_read_stays():
    def tried(text):
        tree = ast.parse(
            f"def gates(self, ids, best):\n    zeros = torch.zeros(4, requires_grad=True)\n    {text}"
        ).body[0]
        return without_own_gradients(tree)

    assert len(tried("return zeros.scatter(0, ids, best)")) == 1
    assert not tried("self.zeros = zeros; return zeros.scatter(0, ids, best)")
    assert not tried("return zeros")
