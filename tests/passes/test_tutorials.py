"""Layers of `benchmarks/tutorials.py`: prepared by `moe_ops.compile`, fused in one graph, equal to eager."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import moe_ops
from benchmarks import tutorials
from benchmarks.tutorials import LAYERS, Block, StackedWeights
from tests.passes.compare import difference, refusals

DIM = 16
BF16 = {name for name in LAYERS if name.startswith(("torchtitan", "grouped_mm"))}


def tokens(length: int) -> torch.Tensor:
    return torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(length))


def prepared(module: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moe_ops.compile(module)  # nothing is compiled before a call
    return module


def made(kind: type[torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize("name", LAYERS)
def test_fused_in_one_graph(name: str) -> None:
    """For all numbers of tokens two, as torch makes the first static; gradients of the tokens but of those in bf16."""
    module = made(LAYERS[name])
    original = copy.deepcopy(module)
    prepared(module)
    torch.compiler.reset()
    counters.clear()
    compiled = moe_ops.compile(module, backend="moe_ops_eager")
    trained, bound = name not in BF16, 2e-2 if name in BF16 else 1e-5
    with torch.set_grad_enabled(trained):
        for length in (2, 3, 7, 31):
            x = tokens(length).requires_grad_(trained)
            results = [one(x) for one in (compiled, original)]
            torch.testing.assert_close(*results, atol=bound, rtol=bound)
        if trained:
            weighed = [(result * torch.linspace(0.5, 1.5, DIM)).sum() for result in results]
            assert difference(*(torch.autograd.grad(total, x) for total in weighed), 1e-4) is None
    found = counters["moe_ops"]
    assert (found["fused"], found["refused"]) == (2, 0)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_compiled_without_us_before() -> None:
    """Where a graph breaks inside a loop, torch.compile marks the code, for everyone who compiles it after that."""
    torch.compiler.reset()
    module = made(tutorials.HalvesInTheLoop)
    with torch.no_grad():
        torch.compile(module, backend="eager")(tokens(3))
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            assert len(moe_ops.explain(module, tokens(3)).fused) == 1
        torch.compile(module, backend="eager")(tokens(3))
        counters.clear()
        with pytest.warns(UserWarning, match="only the data knows"):
            moe_ops.compile(module, backend="moe_ops_eager", fullgraph=True)(tokens(3))
    assert counters["moe_ops"]["fused"] == 1


# ---- near misses


class Placed(Block):
    """As `UnflattenedPlaces`, with another step for every expert."""

    def step(self, y, x, weights, expert, batch, place, slot):
        raise NotImplementedError

    def routed(self, x):
        return x

    def forward(self, x):
        weights, ids = self.route(self.routed(x))
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            self.step(y, x, weights, expert, *torch.where(ids == e))
        return y


class OtherPlaces(Placed):
    """Results go to the same places of another sequence."""

    def step(self, y, x, weights, expert, batch, place, slot):
        y[1 - batch, place] += weights[batch, place, slot, None] * expert(x[batch, place])


class Square(Placed):
    """Two sequences of two tokens."""

    def forward(self, x):
        return super().forward(x[:, :2])


class SwappedPlaces(Square):
    """Batch and length are taken for each other."""

    def step(self, y, x, weights, expert, batch, place, slot):
        y[batch, place] += weights[batch, place, slot, None] * expert(x[place, batch])


class WeightsOfOtherPlaces(Square):
    def step(self, y, x, weights, expert, batch, place, slot):
        y[batch, place] += weights[place, batch, slot, None] * expert(x[batch, place])


class PlacesOfTheFirstHalf(Placed):
    """Half of the tokens have no expert."""

    def routed(self, x):
        return x[:, :2]

    def step(self, y, x, weights, expert, batch, place, slot):
        y[batch, place] += weights[batch, place, slot, None] * expert(x[batch, place])


class Assigned(Placed):
    """The second expert of a token overwrites what the first one wrote."""

    def step(self, y, x, weights, expert, batch, place, slot):
        y[batch, place] = weights[batch, place, slot, None] * expert(x[batch, place])


class Reduced(Block):
    """`scatter_reduce` that takes the mean, or leaves out what was there."""

    def add(self, y, index, rows):
        return y.scatter_reduce(0, index, rows, reduce="mean")

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, ids = self.route(rows)
        y = torch.ones_like(rows)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            index = token[:, None].expand(-1, rows.shape[1])
            y = self.add(y, index, expert(rows[token]) * weights[token, slot, None])
        return y


class ReducedAlone(Reduced):
    def add(self, y, index, rows):
        return y.scatter_reduce(0, index, rows, reduce="sum", include_self=False)


class MasksOfOthers(Block):
    """The mask is that of the sequences in the other order."""

    def forward(self, x):
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            chosen = (ids.flip(0) == e).any(-1)
            scores = (weights * (ids == e)).sum(-1)
            y[chosen] += expert(x[chosen]) * scores[chosen].unsqueeze(-1)
        return y


class GatheredAlongLength(Block):
    """[2, 4, 4, H]: the places are taken for experts."""

    def forward(self, x):
        weights, ids = self.route(x)
        results = torch.stack([expert(x) for expert in self.experts], dim=1)
        index = ids.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
        return (torch.gather(results, 2, index) * weights.unsqueeze(-1)).sum(dim=2)


class GatheredOfOtherPlaces(StackedWeights):
    """Weights of the sequences in the other order."""

    def forward(self, x):
        weights, ids = self.route(x)
        other = ids.flip(0)
        gate, up = torch.einsum("bsh,bskih->bski", x, self.w_in[ids]).chunk(2, dim=-1)
        out = torch.einsum("bski,bskhi->bskh", F.silu(gate) * up, self.w_out[other])
        return torch.einsum("bsk,bskh->bsh", weights, out)


class SummedOverLength(StackedWeights):
    """Four places are taken for slots."""

    def forward(self, x):
        weights, ids = self.route(x)
        gate, up = torch.einsum("bsh,bskih->bski", x, self.w_in[ids]).chunk(2, dim=-1)
        out = torch.einsum("bski,bskhi->bskh", F.silu(gate) * up, self.w_out[ids])
        return (out * weights.unsqueeze(-1)).sum(1)


class MasksOfNext(Block):
    """As litgpt's, of the numbers from one."""

    def forward(self, x):
        x = x.flatten(0, 1)
        weights, ids = self.route(x)
        masks = ids.unsqueeze(-1) == torch.arange(1, self.num_experts + 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks.permute(2, 0, 1), self.experts, strict=True):
            token, slot = torch.where(mask)
            y[token] += weights[token, slot, None] * expert(x[token])
        return y


class SplitOfOtherTokens(StackedWeights):
    how = staticmethod(lambda tokens, scores, sizes: (tokens.flip(0).split(sizes), scores.split(sizes)))

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, ids = self.route(rows)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        sizes = F.one_hot(flat, self.num_experts).sum(0).tolist()
        tokens, scores = self.how(order // self.top_k, weights.reshape(-1)[order], sizes)
        y = torch.zeros_like(rows)
        for e in range(self.num_experts):
            y.index_add_(0, tokens[e], self.expert(rows[tokens[e]], e) * scores[e][:, None])
        return y


class SplitOfOtherWeights(SplitOfOtherTokens):
    how = staticmethod(lambda tokens, scores, sizes: (tokens.split(sizes), scores.flip(0).split(sizes)))


class SplitInOtherOrder(SplitOfOtherTokens):
    how = staticmethod(lambda tokens, scores, sizes: (tokens.split(sizes)[::-1], scores.split(sizes)[::-1]))


class BiasesByOtherCounts(tutorials.RepeatedBiases):
    """Every expert's bias goes to as many rows as the next one has."""

    @staticmethod
    def product(rows, weight, bias, offsets, counts):
        return tutorials.RepeatedBiases.product(rows, weight, bias, offsets, counts.roll(1))


MISSES = [
    PlacesOfTheFirstHalf, Assigned, Reduced, ReducedAlone, OtherPlaces, SwappedPlaces, WeightsOfOtherPlaces,
    MasksOfOthers, GatheredAlongLength, MasksOfNext, GatheredOfOtherPlaces, SummedOverLength, SplitOfOtherTokens,
    SplitOfOtherWeights, SplitInOtherOrder, BiasesByOtherCounts,
]  # fmt: skip


@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_near_miss(kind: type[torch.nn.Module]) -> None:
    module = made(kind)
    if issubclass(kind, Block):
        moe_ops.stack_experts_(module)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        found = refusals(module, tokens(4))
    assert found and all(row.reason and row.cure for row in found)


@pytest.mark.parametrize("kind", [tutorials.UnflattenedStack, tutorials.LastStack], ids=lambda kind: kind.__name__)
def test_list_of_experts_before_it_is_stacked(kind: type[torch.nn.Module]) -> None:
    """Rows that are no weight, though they have three dimensions and are an input of the graph: the cure is known."""
    (refused,) = moe_ops.explain(made(kind), tokens(5)).refused
    assert "one after the other" in refused.reason and "moe_ops.compile(model)" in refused.cure
