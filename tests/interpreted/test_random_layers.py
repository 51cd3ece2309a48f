"""Random layers of quantised experts under the CPU interpreter."""

from __future__ import annotations

import pytest

import moe_ops
from tests.ops.random_layers import CONTRACT_OF_FEW, random_layer
from tests.ops.scheme_layers import assert_contract


@pytest.mark.parametrize("seed", range(8))
def test_is_as_near_to_float64_as_its_row_says(seed):
    layer = random_layer(seed, device="cpu", largest=128, elements=2**15, tokens=(1, 3, 9))
    for format in ("grouped", "batched"):
        got = moe_ops.fused_experts(**layer.tensors, **layer.options, format=format, backend="triton")
        assert_contract(got, layer, CONTRACT_OF_FEW)
