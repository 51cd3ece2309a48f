"""Loops over slices of sorted rows: where slices start and end, and what becomes of the rows behind the loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

import moe_ops
from compile_passes.loops import STATIC
from tests.passes.slice_forms import FORMS, MISSES, WrittenBehindZero
from tests.passes.test_static_loops import assert_no_further, decoder, gradients, learnt, prepared, tokens


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_form(kind):
    """One graph for one number of tokens, one for all others; equal to eager, and gradients no further from float64; as
    before after `restore`.
    """
    if kind is WrittenBehindZero and TorchVersion(torch.__version__) < (2, 12):
        pytest.skip("Dynamo writes no numbers that were counted into a slice before")
    model = decoder(kind, training=True)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    function, said = prepared(model, fullgraph=True)
    assert "moe_ops.restore(model) undoes it" in said[0] and kind.__name__ in said[0]
    for count in (3, 32, 2, 5):
        found = function(tokens(count))
        torch.testing.assert_close(found, eager(tokens(count)), atol=1e-5, rtol=1e-5)
    found.square().sum().backward()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2 and counters["moe_ops"]["fused"] == graphs
    assert torch.equal(moe_ops.restore(model)(tokens(3)), eager(tokens(3)))
    assert_no_further(gradients(model), learnt(eager, 5), learnt(exact, 5))


@pytest.mark.parametrize("kind", FORMS[::4], ids=lambda kind: kind.__name__)
def test_form_in_inference(kind):
    """By a trial of its own."""
    model = decoder(kind)
    function, said = prepared(model, fullgraph=True)
    assert "moe_ops.restore(model) undoes it" in said[0]
    with torch.no_grad():
        found = function(tokens(5))
        assert counters["moe_ops"]["fused"] == 1
        torch.testing.assert_close(found, moe_ops.restore(model)(tokens(5)), atol=1e-5, rtol=1e-5)


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
