"""Loops in a method that `super()` calls: static, fused in one graph, and equal to eager."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.loops import Block, H
from tests.passes.test_static_loops import assert_trains_as_eager, decoder, prepared, tokens


class Hits(Block):
    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out.view(shape)


class WithShared(Hits):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(H, H)

    def forward(self, x):
        return super().forward(x) + self.shared(x)


class Twice(WithShared):
    """Over two classes, and with a method of its own that the first of them calls."""

    def route(self, x):
        weights, ids = super().route(x)
        return weights * 2, ids

    def forward(self, x):
        return super().forward(x) * 0.5


def test_form():
    assert_trains_as_eager(Twice, 9)


def test_pickled_and_restored():
    model = decoder(Twice)
    eager = copy.deepcopy(model)
    prepared(model)
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(tokens(5)), eager(tokens(5)), atol=1e-5, rtol=1e-5)
    assert _bound(model) and not _bound(moe_ops.restore(model))


def _bound(model: nn.Module) -> list[str]:
    return [name for module in model.modules() for name in vars(module) if "_base_" in name]


class Drops(WithShared):
    """Random numbers of the experts that were hit: in training the original runs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 8), nn.SiLU(), nn.Dropout(0.5), nn.Linear(8, H)) for _ in self.experts
        )


def test_training_runs_the_original():
    model = decoder(Drops)
    eager = copy.deepcopy(model)
    function, said = prepared(model)
    assert "In training the original runs." in said[0], said
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(1)), eager(tokens(1)), atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1
    found = []
    for one in (model, eager):
        torch.manual_seed(0)
        found.append(one.train()(tokens(1)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
