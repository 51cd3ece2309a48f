"""Few rows times decoded weights in Gluon on a Hopper GPU, beside Triton's tile for the same rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import moe_ops
from moe_ops.backends import triton_plans
from moe_ops.census import kernel_names
from moe_ops.kernels.triton.config import MMConfig
from tests.cuda.specialised import assert_any_number_of_rows, assert_replays, beside_tritons_tile, run
from tests.cuda.test_decoded import assert_zero_points
from tests.cuda.test_schemes import every_code
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory", "tile")]
SCHEMES = sorted(triton_plans.PACKED)
#: E, K, H, I: whole steps and tiles; half a step behind the last whole one; no whole tiles, an order of 32 columns.
SIZES = {"whole": (32, 2, 1024, 512), "half": (32, 2, 1152, 640), "ragged": (30, 2, 320, 160)}
T = 140  # nine rows an expert
TILES = [(8, 256), (16, 256), (16, 128), (32, 128)]


@pytest.fixture(params=TILES, ids=lambda tile: "x".join(map(str, tile)))
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of so many rows, in steps of so many columns, whatever a plan would take."""
    rows, columns = request.param
    config = MMConfig(rows, 128, columns, 1, 4, 3, a_tma=True, w_tma=True)
    monkeypatch.setattr(triton_plans, "_few_tile", lambda scheme, rows, gpu: config)
    planned = (triton_plans.plan_for, triton_plans.by_products, triton_plans.tile_for)
    for cached in planned:
        cached.cache_clear()
    yield
    for cached in planned:
        cached.cache_clear()


def layer_of(scheme: str, size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=T, sizes=SIZES[size], device="cuda", bias=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_as_near_to_float64_as_tritons_tile(scheme, size, form, monkeypatch):
    layer = layer_of(scheme, size, form=form)
    for _ in beside_tritons_tile(layer, "_decoded_few_mm", 2, "specialises", monkeypatch):
        pass


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_any_number_of_rows(scheme):
    assert_any_number_of_rows(layer_of(scheme), *SIZES["whole"][:2])


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, format):
    assert_replays(layer_of(scheme), format, SIZES["whole"][0])


@pytest.mark.parametrize("zeros", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("scheme", ["int4_w4a16", "int8_w8a16"])
def test_zero_points(scheme, zeros):
    assert_zero_points(layer_of(scheme), scheme, zeros)


@pytest.mark.parametrize("scheme", ["mxfp4", "int4_w4a16"])
def test_an_up_half_that_lies_below_the_gate(scheme):
    layer = layer_of(scheme, form="separate")
    both = torch.stack([layer.tensors["up_proj"], layer.tensors["gate_up_proj"]])
    layer.tensors["up_proj"], layer.tensors["gate_up_proj"] = both
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_code_is_the_number_that_it_stands_for(scheme):
    """Of rows that each name a column, four an expert."""
    torch.manual_seed(0)
    given, wide = every_code(scheme, 64, 192, 256)
    rows = torch.eye(256)[torch.randperm(256)].bfloat16()
    offsets = torch.arange(4, 257, 4, dtype=torch.int32, device="cuda")
    got = moe_ops.grouped_mm(rows.cuda(), offsets=offsets, **given)
    expected = rows.double().view(64, 4, 256) @ wide.mT
    torch.testing.assert_close(got.double().cpu(), expected.view(256, 192), rtol=0, atol=0, equal_nan=True)
    names = kernel_names(lambda: moe_ops.grouped_mm(rows.cuda(), offsets=offsets, **given))
    assert any("_decoded_few_mm" in name for name in names), names
