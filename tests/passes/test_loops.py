"""Loops over experts are found by what the code does, not by what its comments say, and the advice is true."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_ops
from compile_passes.loops import are_projections, cure, find_experts, find_loops, find_sizes_of_the_data
from tests.corpus.families import build
from tests.passes.blocks import E, H, I
from tests.passes.test_backend import Loop


class Stacked(nn.Module):
    """Stacked expert weights; what runs them is in the classes below."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, I, H))
        self.down = nn.Parameter(torch.randn(E, H, I))

    def one(self, x, expert):
        return (x @ self.up[expert].T).relu() @ self.down[expert].T


class InAMethod(Stacked):
    """The loop is in a method that forward calls."""

    def forward(self, x, ids):
        return self._loop(x, ids)

    def _loop(self, x, ids):
        out = torch.zeros_like(x)
        for expert in ids.unique():
            token, _ = torch.where(ids == expert)
            out[token] += self.one(x[token], expert)
        return out


class While(Stacked):
    """A while loop over sizes that were read on the host."""

    def forward(self, x, ids):
        sizes = ids.flatten().bincount().tolist()
        while sizes:
            x = self.one(x, sizes.pop())
        return x


class OnlyInTheText(Stacked):
    """No loop over the data: only the words of one."""

    def forward(self, x, ids):
        """Instead of
        for expert in hit.nonzero(): out.index_add_(0, *torch.where(mask))
        """
        # for expert in hit.nonzero().tolist(): the old form
        how = "for expert in ids.unique().tolist()"
        for layer in range(2):
            x = torch.where(x > layer, x, -x)
        return x @ self.up[0].T if how else x


class InAnotherMethod(Stacked):
    """The loop is in a method that forward does not call."""

    def forward(self, x, ids):
        return self.one(x, 0)

    def counts(self, ids):
        return [expert.item() for expert in ids] and list(ids.nonzero())

    def loop(self, ids):
        for expert in ids.nonzero():
            self.counts(expert)


class CountsBeside(Stacked):
    """Counts of rows that no loop reads: the balancing bias of DeepSeek-V3."""

    def forward(self, x, ids):
        out = torch.zeros_like(x)
        for expert in range(E):
            token, _ = torch.where(ids == expert)
            out.index_add_(0, token, self.one(x[token], expert))
        counts = torch.bincount(ids.flatten(), minlength=E)
        mean = counts.float().mean()
        self.bias = torch.sign(mean - counts)
        return out


class CountsOfALoop(Stacked):
    """The same counts, by which a loop cuts its rows."""

    def forward(self, x, ids):
        counts = torch.bincount(ids.flatten(), minlength=E)
        ends = counts.cumsum(0)
        for expert in range(E):
            x = self.one(x[: ends[expert]], expert)
        return x


class OfABaseClass(InAMethod):
    """Its forward calls that of its base class, where the loop is."""

    def forward(self, x, ids):
        return x if x.shape[0] > 100 else super().forward(x, ids)


class OfANamedClass(InAMethod):
    """The same, by name."""

    def forward(self, x, ids):
        return x if x.shape[0] > 100 else InAMethod.forward(self, x, ids)


class Holder(nn.Module):
    """A layer with experts."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts


@pytest.mark.parametrize(
    ("kind", "looping"),
    [
        (InAMethod, True), (While, True), (OnlyInTheText, False), (InAnotherMethod, False), (CountsBeside, False),
        (CountsOfALoop, True), (OfABaseClass, True), (OfANamedClass, True),
    ],
)  # fmt: skip
def test_found_by_syntax(kind, looping):
    assert [loop.name for loop in find_loops(Holder(kind()))] == ["experts"] * looping


def test_advice_fits_the_weights():
    stacked, listed = find_loops(Holder(While()))[0], find_loops(Loop())[0]
    assert stacked.stacked and "stacked already" in cure(stacked)
    assert not listed.stacked and cure(listed, tried=True).startswith("Store the experts as stacked")
    assert cure(listed).startswith("moe_ops.compile(model) gives it a static form")
    switchable = find_loops(build("mixtral", torch.float32, "eager"))[0]
    assert switchable.switchable and "moe_ops.compile(model) switches it" in cure(switchable)


OTHER_EXPERTS = {
    "convolution": lambda: nn.Sequential(nn.Conv1d(H, I, 1), nn.SiLU(), nn.Conv1d(I, H, 1)),
    "one_projection": lambda: nn.Linear(H, H),
    "normed": lambda: nn.Sequential(nn.LayerNorm(H), nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)),
    "deep": lambda: nn.Sequential(*(nn.Linear(H, H) for _ in range(4))),
}


@pytest.mark.parametrize("kind", OTHER_EXPERTS)
def test_no_operator_is_advised_that_does_not_compute_the_experts(kind):
    """Of a loop over them, and where they are captured as they are."""
    model = Loop()
    model.experts = nn.ModuleList(OTHER_EXPERTS[kind]() for _ in range(E))
    assert cure(find_loops(model)[0], tried=True).startswith("Give every expert all tokens, and multiply by")
    assert not are_projections(model) and are_projections(Loop())


def test_experts_of_a_stacked_list_are_projections():
    assert are_projections(moe_ops.stack_experts_(Loop()))


class SlicesInAList(Stacked):
    """By bounds that are read on the host, as MegaBlocks' rows."""

    def forward(self, x, ids):
        ends = torch.histc(ids.flatten().float(), E, 0, E - 1).int().cumsum(0).tolist()
        return torch.cat([self.one(x[start:end], e) for e, (start, end) in enumerate(zip([0, *ends], ends))])  # noqa: B905


def test_a_list_of_slices_is_a_loop():
    """It is what `moe_ops.compile` speaks of, which does not capture it."""
    assert [loop.name for loop in find_loops(Holder(SlicesInAList()))] == ["experts"]


def test_three_matrices_are_two_projections_where_two_are_alike():
    """Gate and up; not of three layers one after the other."""

    def of(*shapes):
        model = Loop()
        model.experts = nn.ModuleList(nn.ModuleList(nn.Linear(*shape) for shape in shapes) for _ in range(E))
        return model

    assert are_projections(of((H, 8), (H, 8), (8, H))) and not are_projections(of((H, 8), (8, 4), (4, H)))


@pytest.mark.parametrize("projections", [1, 2, 3, 4])
def test_lists_of_projections_beside_each_other(projections):
    """As many lists as an expert has projections."""
    model = Loop()
    del model.experts
    for number in range(projections):
        model.add_module(f"{'abcd'[number]}_experts", nn.ModuleList(nn.Linear(H, H) for _ in range(E)))
    assert are_projections(model) == (projections in (2, 3))


@pytest.mark.parametrize("kind", ["mlp", *OTHER_EXPERTS])
def test_experts_that_are_called_by_numbers_are_looked_at_one_by_one(kind):
    model = nn.Module()
    for number in range(E):
        expert = nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)) if kind == "mlp" else OTHER_EXPERTS[kind]()
        model.add_module(f"expert_{number}", expert)
    assert are_projections(model) == (kind == "mlp")


class Projection(nn.Module):
    """One projection of all experts, as jetmoe has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, I, H))


class ParallelExperts(Projection):
    """The same under a name that says what it is."""


def test_experts_of_a_block_are_one_group():
    two = nn.Module()
    two.mlp = nn.Module()
    two.mlp.input_linear, two.mlp.output_linear = ParallelExperts(), ParallelExperts()
    groups = find_experts(two)
    assert [(group.name, len(group.weights)) for group in groups] == [("mlp", 2)]
    assert [(group.name, len(group.weights)) for group in find_experts(Loop())] == [("", 2 * E)]
    assert find_experts(nn.Sequential(nn.Conv1d(4, 4, 3), Projection(), nn.Linear(4, 4))) == []


class Layer(nn.Module):
    """Experts and their router in one module; the router a module or a parameter."""

    def __init__(self, experts, router):
        super().__init__()
        self.experts, self.router = experts, router


@pytest.mark.parametrize("router", [lambda: nn.Linear(H, E), lambda: nn.Parameter(torch.randn(E, H))])
def test_layers_beside_each_other_are_groups_each(router):
    def experts():
        return nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    model = nn.Module()
    model.a, model.b = Layer(experts(), router()), Layer(experts(), router())
    assert [(group.name, len(group.weights)) for group in find_experts(model)] == [("a", E), ("b", E)]
    model.b.router = None
    assert [(group.name, len(group.weights)) for group in find_experts(model)] == [("", 2 * E)]


class Counts(Stacked):
    """Counts, and loops over nothing."""

    def forward(self, x, ids):
        return self.one(x, 0) * ids.bincount(minlength=E)[0]


class CountsInABaseClass(Counts):
    """Its forward calls that of its base class, where the counts are."""

    def forward(self, x, ids):
        return super().forward(x, ids) * 2


class CountsInANamedClass(Counts):
    """The same, by name."""

    def forward(self, x, ids):
        return Counts.forward(self, x, ids) * 2


class TakesByMasks(Stacked):
    """Of a one-hot of the ids, as Switch Transformers has it."""

    def forward(self, x, ids):
        out, chosen = torch.zeros_like(x), F.one_hot(ids, E).sum(1)
        for e in range(E):
            mask = chosen[:, e].bool()
            out[mask] = self.one(x[mask], e)
        return out


@pytest.mark.parametrize("kind", [CountsInABaseClass, CountsInANamedClass, TakesByMasks])
def test_sizes_of_the_data_are_found(kind):
    assert find_sizes_of_the_data(Holder(kind())) == ["experts"]


def test_counts_are_found_at_experts_alone():
    """Not far from them, and not beside a loop, which has a static form of its own."""
    model = nn.Module()
    model.layer, model.far = Holder(Counts()), nn.Sequential(nn.Sequential(Counts()))
    assert find_sizes_of_the_data(model) == ["layer.experts"]
    model.layer = Holder(While())
    assert find_sizes_of_the_data(model) == []
