"""Trials of blocks for whose copies memory has no room: on narrower copies, and on the block itself."""

from __future__ import annotations

import copy
import math
import random
import re

import pytest
import torch
from torch import nn

import moe_ops
from benchmarks.forms import _dbrx, _switch
from benchmarks.loops import MakeMoE, MixtralHits, MoeInfer, Unique
from compile_passes import rebind, trial
from compile_passes.loops import STATIC
from compile_passes.narrow import narrowing
from compile_passes.source import NotStatic
from tests.passes.test_static_loops import prepared

H, I, E, K = 256, 128, 4, 2
BLOCKS = {
    **{kind.__name__: kind for kind in (MixtralHits, MakeMoE, MoeInfer)},
    "switch": _switch,
    "dbrx": _dbrx,
}


@pytest.fixture(autouse=True)
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_free", lambda device: 0)
    monkeypatch.setattr(rebind, "_VERDICTS", {})


def built(make, hidden: int = I) -> nn.Module:
    torch.manual_seed(0)
    block = make(dim=H, hidden=hidden, num_experts=E, top_k=K).eval().requires_grad_(False)
    for weight in block.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return block


def output(result) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_bound_and_equal(name):
    """What is proved on a copy eight times narrower is bound, and fused at full width; the trial touches nothing."""
    block = built(BLOCKS[name])
    state, drawn, numbers = copy.deepcopy(block.state_dict()), torch.get_rng_state(), random.getstate()
    tokens = {T: torch.randn(1, T, H, generator=torch.Generator().manual_seed(T)) for T in (3, 32)}
    expected = {T: output(copy.deepcopy(block)(x)) for T, x in tokens.items()}
    function, said = prepared(block, fullgraph=True)
    assert re.search(
        r"proved equal on a copy of one layer, outputs and gradients, [48] times narrower for want of memory, and on "
        r"the layer itself, outputs, in \d+\.\d s; ",
        said[0],
    )
    assert torch.equal(torch.get_rng_state(), drawn) and random.getstate() == numbers
    assert all(torch.equal(value, state[key]) for key, value in block.state_dict().items())
    for T, x in tokens.items():
        torch.testing.assert_close(output(function(x)), expected[T], atol=1e-5, rtol=1e-5)
    assert moe_ops.explain(block, tokens[3]).fused


def test_weights_of_the_model_keep_their_dtype():
    """A router that its first call makes float32 does that in a trial to a copy."""
    block = built(_switch).bfloat16()
    made = trial.Trial(block)
    made.compare({}, False)
    assert made.narrowing.factor > 1 and {weight.dtype for weight in block.parameters()} == {torch.bfloat16}


class OfAGlobal(Unique):
    def forward(self, x):
        w, ids = self.route(x.view(-1, H))
        out = torch.zeros_like(x.view(-1, H))
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x.view(-1, H)[token]) * w[token, slot, None])
        return out.view(x.shape)


class WritesToWeights(Unique):
    def forward(self, x):
        self.gate.weight.data.clamp_(-0.01, 0.01)
        w, ids = self.route(x.flatten(0, 1))
        out = torch.zeros_like(x.flatten(0, 1))
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x.flatten(0, 1)[token]) * w[token, slot, None])
        return out.view(x.shape)


class NotFinite(Unique):
    def forward(self, x):
        w, ids = self.route(x.flatten(0, 1))
        out = torch.zeros_like(x.flatten(0, 1))
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x.flatten(0, 1)[token]) * w[token, slot, None])
        return out.view(x.shape) * math.inf if x.shape[-1] == H else out.view(x.shape)


MISSES = {
    OfAGlobal: "Copies of one layer take 0 GB, more than half of the memory that is free, and of a narrower one, it "
    "does not run on hidden states alone",
    WritesToWeights: "its forward writes to its weights",
    NotFinite: "it has outputs that are not finite on many tokens",
}


@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_left_alone_with_the_reason(kind):
    block = built(kind)
    state = copy.deepcopy(block.state_dict())
    _, said = prepared(block)
    assert MISSES[kind].lower() in said[0].lower() and "left as is" in said[0]
    assert not {"forward", STATIC} & set(vars(block))
    assert all(torch.equal(value, state[key]) for key, value in block.state_dict().items())


def test_widths_without_a_common_factor():
    block = built(Unique, hidden=131)
    _, said = prepared(block)
    assert "its widths have no factor in common by which it could be narrowed" in said[0] and "left as is" in said[0]


def _twice_at_full_width(self, x):
    return type(self).forward(self, x) * (2 if x.shape[-1] == H else 1)


def test_the_layer_itself_is_run():
    """A form that differs at full width alone is no static form."""
    made = trial.Trial(built(Unique))
    made.compare({"": {"forward": lambda self, x: type(self).forward(self, x)}}, False)
    with pytest.raises(NotStatic, match=r"the static form gives other outputs \(output 0\) on many tokens in float32"):
        made.compare({"": {"forward": _twice_at_full_width}}, False)


def test_numbers_of_experts_are_no_widths():
    """They stay, and no width becomes one."""
    found = narrowing(Unique(dim=512, hidden=256, num_experts=64, top_k=2))
    assert found is not None and found.widths == {512, 256} and {found.size(512), found.size(256)} == {32, 16}
    found = narrowing(Unique(dim=512, hidden=256, num_experts=32, top_k=2))
    assert found is not None and found.factor == 4  # 8 and 16 make 32 of one of them
    found = narrowing(Unique(dim=512, hidden=256, num_experts=256, top_k=2))
    assert found is not None and found.widths == {512}
