"""Few rows times decoded weights in Gluon on a Hopper GPU, beside Triton's tile for the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import moe_ops
from meta.schemes import SCHEMES as layer_schemes
from moe_ops.backends import triton_plans
from moe_ops.census import kernel_names
from moe_ops.kernels.triton.config import MMConfig
from tests.cuda.specialised import (
    GROUPS,
    ZEROS,
    assert_any_number_of_rows,
    assert_replays,
    beside_tritons_tile,
    every_tile,
    run,
)
from tests.cuda.test_schemes import every_code
from tests.ops.scheme_layers import (
    FORMS,
    SchemeLayer,
    assert_contract,
    build,
    further,
    in_groups,
    with_scales_far_apart,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory", "tile")]
SCHEMES = sorted(triton_plans.PACKED)
GATHERED = sorted(triton_plans.DECODED - triton_plans.PACKED)  # quantised rows
#: E, K, H, I: whole steps and tiles; half a step behind the last whole one; no whole tiles, an order of 32 columns;
#: no more than half a step.
SIZES = {"whole": (32, 2, 1024, 512), "half": (32, 2, 1152, 640), "ragged": (30, 2, 320, 160), "less": (30, 2, 128, 96)}
T = 140  # nine rows an expert
TILES = {"8x256": (8, 256), "16x256": (16, 256), "16x128": (16, 128), "32x128": (32, 128)}
GATHERING = {name: tile for name, tile in TILES.items() if tile[0] <= 16}
#: Tiles, and schemes whose rows they take: in order, or gathered and quantised.
EVERY = pytest.mark.parametrize(
    ("tile", "scheme"),
    [
        pytest.param(tile, scheme, id=f"{name}-{scheme}")
        for tiles, schemes in ((TILES, SCHEMES), (GATHERING, GATHERED))
        for name, tile in tiles.items()
        for scheme in schemes
    ],
    indirect=["tile"],
)
OF_GATHERED = pytest.mark.parametrize("tile", GATHERING.values(), ids=GATHERING, indirect=True)


@pytest.fixture(params=TILES.values(), ids=TILES)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of so many rows, in steps of so many columns, whatever a plan would take."""
    rows, columns = request.param
    config = MMConfig(rows, 128, columns, 1, 4, 3, a_tma=True, w_tma=True)
    with every_tile(config, monkeypatch):
        yield


def layer_of(scheme: str, size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=T, sizes=SIZES[size], device="cuda", bias=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
@EVERY
def test_is_as_near_to_float64_as_tritons_tile(scheme, size, form, monkeypatch):
    layer = layer_of(scheme, size, form=form)
    for _ in beside_tritons_tile(layer, "_decoded_few_mm", 2, "specialises", monkeypatch):
        pass


@EVERY
def test_experts_of_any_number_of_rows(scheme):
    assert_any_number_of_rows(layer_of(scheme), *SIZES["whole"][:2])


@OF_GATHERED
@pytest.mark.parametrize("powers", [60, 70, 126])
def test_scales_that_no_number_of_bf16_holds_count(powers):
    layer = with_scales_far_apart(layer_of("mxfp4_a8"), powers)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@OF_GATHERED
@pytest.mark.parametrize("powers", [56, 100])
def test_scales_below_those_of_bf16_count(powers):
    """All of GEMM 2's: about the last that are multiplied as they are, and smaller ones."""
    layer = layer_of("mxfp4_a8")
    row, stored, (scale,) = layer_schemes["mxfp4_a8"], layer.tensors["down_proj"], layer.tensors["down_scales"]
    exponents = scale.view(torch.uint8) - powers
    layer.tensors["down_scales"] = [exponents.view(scale.dtype)]
    layer.tensors["down_bias"] = None
    smaller = row.dequantize(stored, layer.tensors["down_scales"]).double()
    layer = replace(layer, weights=(layer.weights[0], smaller))
    for format in ("grouped", "batched"):
        got = run(layer, format)
        assert 0 < got.abs().max() < 2.0 ** (20 - powers)
        assert_contract(got, layer)


@pytest.mark.parametrize("format", ["grouped", "batched"])
@EVERY
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, format):
    assert_replays(layer_of(scheme), format, SIZES["whole"][0])


@OF_GATHERED
@pytest.mark.parametrize("scheme", GATHERED)
def test_many_calls_one_behind_the_other(scheme):
    """Of Qwen3-30B-A3B's dimensions, with as many programs on each multiprocessor as it takes: a program that waited
    for what never comes would show in some of them.
    """
    torch.manual_seed(0)
    layer = build(scheme, T=16, sizes=(128, 8, 2048, 768), device="cuda")
    expected = run(layer, "grouped")
    torch.use_deterministic_algorithms(False)
    for _ in range(1000):
        got = run(layer, "grouped")
    assert torch.equal(got, expected)


@GROUPS
@ZEROS
@pytest.mark.parametrize("scheme", ["int4_w4a16", "int8_w8a16"])
def test_groups_of_columns(scheme, zeros, columns):
    layer = in_groups(layer_of(scheme), columns, zeros)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@GROUPS
def test_gemm_1_of_weights_that_no_descriptor_takes(columns):
    layer = in_groups(layer_of("int4_w4a16"), columns)
    layer.tensors["gate_up_proj"] = further(layer.tensors["gate_up_proj"], 8)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@OF_GATHERED
@GROUPS
def test_groups_of_columns_beside_gathered_rows(columns):
    layer = in_groups(layer_of("w4a8_fp8"), columns)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


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
