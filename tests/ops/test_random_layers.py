"""Random layers of quantised experts on a CPU."""

from __future__ import annotations

import pytest

import moe_ops
from tests.ops.random_layers import CONTRACT_OF_FEW, random_layer
from tests.ops.scheme_layers import assert_contract


@pytest.mark.parametrize("seed", range(80))
def test_is_as_near_to_float64_as_its_row_says(seed):
    layer = random_layer(seed, device="cpu", largest=256, elements=2**19, tokens=(1, 2, 5, 17, 64))
    for format in ("grouped", "batched"):
        assert_contract(moe_ops.fused_experts(**layer.tensors, **layer.options, format=format), layer, CONTRACT_OF_FEW)
