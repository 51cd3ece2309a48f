"""Few rows times decoded weights in Gluon on a Hopper GPU, beside Triton's tile for the same rows."""

from __future__ import annotations

import pytest
import torch

from moe_ops.backends import triton_plans
from tests.cuda.specialised import assert_any_number_of_rows, assert_replays, beside_tritons_tile, run
from tests.cuda.test_decoded import assert_zero_points
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory")]
SCHEMES = sorted(triton_plans.PACKED)
#: E, K, H, I: whole steps and tiles; half a step behind the last whole one; no whole tiles, an order of 32 columns.
SIZES = {"whole": (32, 2, 1024, 512), "half": (32, 2, 1152, 640), "ragged": (30, 2, 320, 160)}
#: Tokens for tiles of 8 and of 16 rows.
TOKENS = [40, 140]


def layer_of(scheme: str, T: int, size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=T, sizes=SIZES[size], device="cuda", bias=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_as_near_to_float64_as_tritons_tile(scheme, T, size, form, monkeypatch):
    layer = layer_of(scheme, T, size, form=form)
    for _ in beside_tritons_tile(layer, "_decoded_few_mm", 2, "specialises", monkeypatch):
        pass


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_any_number_of_rows(scheme, T):
    assert_any_number_of_rows(layer_of(scheme, T), *SIZES["whole"][:2])


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, format):
    assert_replays(layer_of(scheme, TOKENS[0]), format, SIZES["whole"][0])


@pytest.mark.parametrize("zeros", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("scheme", ["int4_w4a16", "int8_w8a16"])
def test_zero_points(scheme, zeros):
    assert_zero_points(layer_of(scheme, TOKENS[0]), scheme, zeros)


@pytest.mark.parametrize("scheme", ["mxfp4", "int4_w4a16"])
def test_an_up_half_that_lies_below_the_gate(scheme):
    layer = layer_of(scheme, TOKENS[0], form="separate")
    both = torch.stack([layer.tensors["up_proj"], layer.tensors["gate_up_proj"]])
    layer.tensors["up_proj"], layer.tensors["gate_up_proj"] = both
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)
