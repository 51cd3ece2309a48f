"""Products of decoded weights and rows of e4m3 in Gluon on a Hopper GPU, beside those of Triton's tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ops.backends import triton_plans
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import ExpertMM
from tests.cuda.specialised import (
    assert_any_number_of_rows,
    assert_panels_are_written_over,
    assert_replays,
    beside_tritons_tile,
    every_tile,
    forget,
    run,
)
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build, with_scales_far_apart

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory")]
SCHEMES = sorted(triton_plans.DECODED - triton_plans.PACKED)
#: E, K, H, I: whole tiles; an odd number of steps, and half a tile of columns; one expert; scales in odd numbers, which
#: no wide load takes, and less than a step at the end.
SIZES = {"whole": (8, 2, 1024, 512), "odd": (6, 2, 1152, 640), "one": (1, 1, 256, 128), "ragged": (3, 2, 1184, 320)}
CASES = [(scheme, size) for scheme in SCHEMES for size in SIZES if scheme == "mxfp4_a8" or size != "ragged"]
#: The kernel whose every tile decodes its weights.
IN_EVERY_TILE = {"mxfp4_a8": "_folded_mm", "w4a8_fp8": "_decoded_fp8_mm"}
#: The tile that both kernels have, whatever a plan would take.
MANY = MMConfig(128, 128, 128, 8, 8, 3, a_tma=True, w_tma=True)
#: Tokens whose experts have one or two tiles of rows, each of which decodes its weights, and several, for which
#: these are decoded once.
FEW, SEVERAL = 800, 4200


@pytest.fixture(autouse=True)
def many(monkeypatch):
    with every_tile(MANY, monkeypatch):
        yield


def layer_of(scheme: str, tokens: int, size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=tokens, sizes=SIZES[size], device="cuda", bias=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("several", [True, False], ids=["several_tiles", "few_tiles"])
@pytest.mark.parametrize(("scheme", "size"), CASES)
def test_is_as_near_to_float64_as_tritons_tile(scheme, size, several, form, monkeypatch):
    """A bias is added in one rounding or in two."""
    E, K = SIZES[size][:2]
    few = {"mxfp4_a8": 200, "w4a8_fp8": 300}[scheme]  # rows an expert
    layer = layer_of(scheme, SEVERAL if several else few * E // K, size, form=form)
    kernel = "_decoded_once_mm" if several else IN_EVERY_TILE[scheme]
    for got, other in beside_tritons_tile(layer, kernel, 2, "specialises", monkeypatch):
        assert (other.double() - got.double()).norm() <= 1e-3 * got.double().norm()


@pytest.mark.parametrize(("scheme", "size"), CASES)
def test_the_same_bits_wherever_weights_are_decoded(scheme, size, monkeypatch):
    """Once, or in every tile."""
    layer = layer_of(scheme, SEVERAL, size)
    for format in ("grouped", "batched"):
        once = run(layer, format)
        with monkeypatch.context() as patched:
            patched.setattr(ExpertMM, "decodes_once", lambda *of: False)
            forget()
            assert torch.equal(run(layer, format), once)
        forget()


@pytest.mark.parametrize("panels", [2, 3])
@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 20000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_of_panels_is_written_over_again_and_again(scheme, tokens, panels, monkeypatch):
    assert_panels_are_written_over(layer_of(scheme, tokens), panels, SIZES["whole"][2], monkeypatch)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_decoded_beside_other_work(scheme):
    """Two layers on two streams share the multiprocessors: none of their programs waits for one that cannot run."""
    layers = [layer_of(scheme, 20000) for _ in range(2)]
    expected = [run(layer, "grouped") for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(layer, "grouped"))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("tokens", [400, 1000, 5000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_any_number_of_rows(scheme, tokens):
    """Tiles of one product to four."""
    assert_any_number_of_rows(layer_of(scheme, tokens), *SIZES["whole"][:2])


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("tokens", [1000, 1500])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, tokens, format):
    assert_replays(layer_of(scheme, tokens), format, SIZES["whole"][0])


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("tokens", [FEW, SEVERAL])
@pytest.mark.parametrize("powers", [20, 26, 27, 60, 120])
def test_scales_that_no_code_holds_beside_each_other(powers, tokens, format):
    """Columns are taken in turns."""
    layer = with_scales_far_apart(layer_of("mxfp4_a8", tokens), powers)
    assert_contract(run(layer, format), layer)


def with_first_weights(layer: SchemeLayer, stored: torch.Tensor, scale: torch.Tensor) -> SchemeLayer:
    row = triton_plans.SCHEMES[layer.options["scheme"]]
    given = {**layer.tensors, "gate_up_proj": stored, "gate_up_scales": [scale]}
    return replace(layer, tensors=given, weights=(row.dequantize(stored, (scale,)).double(), layer.weights[1]))


@pytest.mark.parametrize("tokens", [FEW, SEVERAL])
@pytest.mark.parametrize("zeros", ["rows", "groups", "all"])
def test_groups_of_zeros_have_the_smallest_scale(zeros, tokens):
    """Beside which no turn is taken: they are 0 in any."""
    layer = layer_of("mxfp4_a8", tokens)
    stored, (scale,) = layer.tensors["gate_up_proj"].clone(), layer.tensors["gate_up_scales"]
    groups = stored.view(*stored.shape[:2], -1, 16)
    where = {"rows": (slice(None), slice(3, None, 50)), "groups": (..., slice(5, None, 7), slice(None)), "all": (...,)}
    groups[where[zeros]] = 0x80  # a negative zero among them
    scale = torch.where((groups & 0x77).any(-1), scale.view(torch.uint8), 0).view(scale.dtype)
    assert scale.view(torch.uint8).min() == 0
    layer = with_first_weights(layer, stored, scale)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@pytest.mark.parametrize("tokens", [FEW, SEVERAL])
def test_codes_of_the_smallest_scale_count(tokens):
    """Tokens are 0 where the other codes are: what is left is what these, of 2^-127, bring."""
    layer = with_scales_far_apart(layer_of("mxfp4_a8", tokens), 100)
    scale = layer.tensors["gate_up_scales"][0].view(torch.uint8).clone()
    few = scale.clone()
    few[..., 1] = 0
    got = [
        run(with_first_weights(layer, layer.tensors["gate_up_proj"], s.view(torch.float8_e8m0fnu)), "grouped")
        for s in (scale, few)
    ]
    assert not torch.equal(*got), "the columns of that scale were larger"
    layer = with_first_weights(layer, layer.tensors["gate_up_proj"], few.view(torch.float8_e8m0fnu))
    assert_contract(got[1], layer)


@pytest.mark.parametrize("tokens", [FEW, SEVERAL])
def test_a_scale_that_is_no_number_stays_in_its_column(tokens):
    layer = layer_of("mxfp4_a8", tokens)
    expert, column = 2, 77
    scale = layer.tensors["down_scales"][0].view(torch.uint8).clone()
    expected = run(layer, "grouped")
    scale[expert, column, 3] = 255
    got = run(layer, "grouped", down_scales=[scale.view(torch.float8_e8m0fnu)])
    there = (layer.tensors["topk_ids"] == expert).any(1)
    assert got[there, column].isnan().all()
    got[there, column] = expected[there, column]
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    assert not got.isnan().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_not_numbers_stay_in_their_rows(scheme):
    layer = layer_of(scheme, SEVERAL)
    x = layer.tensors["hidden_states"]
    seventh = torch.arange(SEVERAL, device="cuda") == 7
    got = run(layer, "grouped")
    broken = run(layer, "grouped", hidden_states=torch.where(seventh[:, None], float("nan"), x))
    assert torch.equal(broken[~seventh], got[~seventh]) and broken[7].isnan().all()
