"""Loops over slices of sorted rows: where slices start and end, and what becomes of the rows behind the loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.loops import STATIC
from tests.passes.slice_forms import FORMS, MISSES
from tests.passes.test_static_loops import decoder, prepared, tokens


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_form(kind):
    """One graph for one number of tokens, one for all others; equal to eager; as before after `restore`."""
    model = decoder(kind)
    before = {count: model(tokens(count)) for count in (3, 32, 2, 5)}
    function, said = prepared(model, fullgraph=True)
    assert "moe_ops.restore(model) undoes it" in said[0] and kind.__name__ in said[0]
    with torch.no_grad():
        for count, expected in before.items():
            torch.testing.assert_close(function(tokens(count)), expected, atol=1e-5, rtol=1e-5)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2 and counters["moe_ops"]["fused"] == graphs
    assert torch.equal(moe_ops.restore(model)(tokens(3)), before[3])


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_gradients(kind):
    """No further from float64 than eager's."""
    model = decoder(kind, training=True)
    exact = copy.deepcopy(model).double()
    exact(tokens(8).double()).square().sum().backward()
    eager = copy.deepcopy(model)
    eager(tokens(8)).square().sum().backward()
    function, _ = prepared(model, fullgraph=True)
    function(tokens(8)).square().sum().backward()
    assert counters["moe_ops"]["fused"] == 1
    found = moe_ops.restore(model)
    of = [dict(one.named_parameters()) for one in (exact, eager)]
    for name, weight in found.named_parameters():
        one, other = (one[name].grad for one in of)
        if weight.grad is not None:
            bound = (other - one).abs().max() + 16 * torch.finfo(torch.float32).eps * one.abs().max()
            assert (weight.grad - one).abs().max() <= bound, name


@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_left_alone_with_the_reason(kind):
    model = decoder(kind)
    expected = model(tokens(5))
    function, said = prepared(model)
    assert len(said) == 1 and "left as is" in said[0] and MISSES[kind] in said[0]
    assert not {"forward", "infer", STATIC} & set(vars(model.layers[0]["moe_experts"]))
    with torch.no_grad():
        assert torch.equal(function(tokens(5)), expected)
    assert counters["moe_ops"]["fused"] == 0
