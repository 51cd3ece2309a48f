"""Random layers of quantised experts on a GPU: every plan that such layers get, beside one another."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from tests.ops.random_layers import CONTRACT_OF_FEW, random_layer
from tests.ops.scheme_layers import assert_contract

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("seed", range(64))
def test_is_as_near_to_float64_as_its_row_says(seed):
    tokens = (1, 3, 9, 17, 64, 300, 2000)
    layer = random_layer(seed, device="cuda", largest=1536, elements=2**25, tokens=tokens)
    for format in ("grouped", "batched"):
        got = moe_ops.fused_experts(**layer.tensors, **layer.options, format=format, backend="triton")
        assert_contract(got, layer, CONTRACT_OF_FEW)
        again = moe_ops.fused_experts(**layer.tensors, **layer.options, format=format, backend="triton")
        assert torch.equal(again, got)
