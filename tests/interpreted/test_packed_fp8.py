"""Codes of four bits that are decoded for e4m3 rows, under the CPU interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moe_ops
from meta.formats import E4M3
from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton import small
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import fit
from tests.interpreted import test_schemes
from tests.ops.errors import norm_error
from tests.ops.scheme_layers import SchemeLayer, assert_contract, build, further, with_scales_far_apart

BOTH = ("mxfp4_a8", "w4a8_fp8")
RAGGED, WHOLE = (3, 2, 144, 80), (3, 2, 256, 128)
TILE = MMConfig(64, 64, 128, 1, 4, 2, a_tma=False, w_tma=True)
FEW = TILE._replace(block_m=16)  # multiplied in bf16
PLANS = {**test_schemes.PLANS, "many": triton_plans.plan("grouped", TILE, TILE)}
#: Kernels of few tokens, products of few rows and of many.
every_kernel = pytest.mark.parametrize("plan", ["small", "gathered", "many"])
#: Plan, form, sizes, tokens, biases, expert_map.
CASES = [
    ("grouped", "concat", RAGGED, 17, False, True),
    ("gathered", "halves", RAGGED, 1, True, False),
    ("gathered", "interleaved", WHOLE, 17, False, True),
    ("many", "concat", RAGGED, 3, True, True),
    ("grouped", "none", RAGGED, 3, True, False),
    ("batched", "separate", WHOLE, 3, False, True),
    ("batched", "interleaved", WHOLE, 5, True, False),
    ("batched", "none", WHOLE, 1, False, False),
    ("small", "concat", RAGGED, 1, True, True),
    ("small", "halves", WHOLE, 3, False, False),
    ("small", "interleaved", RAGGED, 2, False, True),
    ("small", "none", RAGGED, 3, True, False),
]


def run(layer: SchemeLayer, plan: str) -> torch.Tensor:
    format = "batched" if plan == "batched" else "grouped"
    return moe_ops.fused_experts(**layer.tensors, **layer.options, format=format, backend="triton")


def check(layer: SchemeLayer, plan: str) -> None:
    """Of fp32 tokens: nothing but what the row says is rounded, so the reference's result is met far within its
    error.
    """
    got = run(layer, plan)
    assert_contract(got, layer)
    assert norm_error(got, layer.rounded()) < 1e-5


@pytest.mark.parametrize(("plan", "form", "sizes", "T", "bias", "expert_map"), CASES, ids=lambda v: str(v).lower())
@pytest.mark.parametrize("scheme", BOTH)
def test_a_layer_rounds_exactly_where_the_row_says(scheme, plan, form, sizes, T, bias, expert_map, monkeypatch):
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    check(build(scheme, T=T, sizes=sizes, form=form, bias=bias, expert_map=expert_map, dtype=torch.float32), plan)


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", BOTH)
def test_no_tokens(scheme, format):
    got = run(build(scheme, T=0, sizes=RAGGED), format)
    assert got.shape == (0, RAGGED[2]) and got.dtype == torch.bfloat16


@every_kernel
@pytest.mark.parametrize(
    ("group", "dtype", "channel"),
    [(32, torch.bfloat16, False), (64, torch.float32, False), (96, E4M3, True), (192, E4M3, True)],
    ids=["32_bf16", "64_fp32", "96_e4m3_channel", "row_e4m3_channel"],
)
def test_groups_of_int4(group, dtype, channel, plan, monkeypatch):
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer, row = build("w4a8_fp8", T=3, sizes=(2, 1, 192, 192), dtype=torch.float32), SCHEMES["w4a8_fp8"]
    weights = []
    for name in ("gate_up", "down"):
        stored = layer.tensors[f"{name}_proj"]
        E, N, packed = stored.shape
        scales = [(torch.rand(E, N, 2 * packed // group) / 16 + 0.03).to(dtype)]
        scales += [torch.rand(E, N, 1)] if channel else []
        layer.tensors[f"{name}_scales"] = scales
        weights.append(row.dequantize(stored, scales).double())
    check(replace(layer, weights=tuple(weights)), plan)


def test_a_group_that_no_tile_fits_is_named():
    layer = build("w4a8_fp8", T=3, sizes=(2, 1, 96, 96), dtype=torch.float32)
    layer.tensors["down_scales"] = [torch.ones(2, 96, 2)]
    with pytest.raises(ValueError, match="w4a8_fp8: scales must be of groups that 32 divides on a GPU, got 48"):
        run(layer, "grouped")


@every_kernel
@pytest.mark.parametrize("powers", [26, 27, 100])
def test_scales_that_no_number_of_eight_bits_holds_count(powers, plan, monkeypatch):
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer = with_scales_far_apart(build("mxfp4_a8", T=3, sizes=(2, 1, 256, 128), dtype=torch.float32), powers)
    check(layer, plan)


@pytest.mark.parametrize(
    "exponents", [(2, 240), (40, 200), (127, 3), (127, 240), (180, 70)], ids="{0[0]}_{0[1]}".format
)
@every_kernel
def test_every_scale_of_both_products_counts(exponents, plan, monkeypatch):
    """As far as fp32 holds what they make."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer, row = build("mxfp4_a8", T=2, sizes=(2, 1, 64, 64), form="none", dtype=torch.float32), SCHEMES["mxfp4_a8"]
    layer.options["activation"] = "relu"
    scales = {name: layer.tensors[name][0].view(torch.uint8).clone() for name in ("gate_up_scales", "down_scales")}
    for scale, exponent in zip(scales.values(), exponents, strict=True):
        scale.fill_(exponent)
    given = layer.tensors | {name: [scale.view(torch.float8_e8m0fnu)] for name, scale in scales.items()}
    weights = (row.dequantize(given[f"{name}_proj"], given[f"{name}_scales"]).double() for name in ("gate_up", "down"))
    check(replace(layer, tensors=given, weights=tuple(weights)), plan)


@pytest.mark.parametrize("scheme", [*BOTH, "int8_channel"])
def test_codes_of_few_tokens_that_are_not_made_of_words(scheme, monkeypatch):
    """Codes that lie in memory one byte further; products in tiles take those of int8."""
    ran, experts = [], small.small_experts
    monkeypatch.setattr(small, "small_experts", lambda *args, **named: ran.append(1) or experts(*args, **named))
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["small"])
    monkeypatch.setattr(triton_plans, "by_products", lambda *_: PLANS["gathered"])
    layer = build(scheme, T=2, sizes=RAGGED, dtype=torch.float32)
    for name in ("gate_up_proj", "down_proj"):
        layer.tensors[name] = further(layer.tensors[name], 1)
    check(layer, "small")
    assert len(ran) == (scheme in BOTH)


@pytest.mark.parametrize("scheme", [*BOTH, "int8_channel"])
def test_rows_of_few_tokens_that_come_quantised(scheme, monkeypatch):
    """At an odd address, with other columns between them."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["small"])
    layer = build(scheme, T=2, sizes=RAGGED, dtype=torch.float32)
    stored, (scale,) = SCHEMES[scheme].rows.quantize(layer.tensors.pop("hidden_states"))
    room = torch.empty(2, stored.shape[1] + 3, dtype=stored.dtype)
    rows = room[:, 1 : 1 + stored.shape[1]].copy_(stored)
    given = {"hidden_states_scale": scale, **layer.tensors, **layer.options}
    got, want = (moe_ops.fused_experts(rows, **given, backend=backend) for backend in ("triton", "reference"))
    assert norm_error(got, want) < 5e-3


def product(
    codes: torch.Tensor, exponents: torch.Tensor, x: torch.Tensor, tile: MMConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [rows, K]`` times a weight ``[N, K]`` of e2m1 codes and their scales, by the kernel and in float64."""
    row, rows = SCHEMES["mxfp4_a8"], SCHEMES["mxfp4_a8"].rows
    weight = Operand((codes[:, ::2] | codes[:, 1::2] << 4)[None], row, (exponents[None],))
    stored, scales = rows.quantize(x)
    mm = ExpertMM(weight, torch.float32, rows_scale=scales[0])
    got, _ = grouped_mm(stored, mm, torch.tensor([len(x)], dtype=torch.int32), fit(tile, mm), num_rows=len(x))
    wide = row.dequantize(weight.data, weight.scales)[0].double()
    return got.double(), rows.dequantize(stored, scales).double() @ wide.T


few_and_many = pytest.mark.parametrize("tile", [FEW, TILE], ids=["few", "many"])


@few_and_many
def test_every_scale(tile):
    """One in each row, of fp32 results: the smallest are no normal numbers, the largest just finite."""
    exponents = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 4).contiguous()
    got, want = product(torch.ones(255, 128, dtype=torch.uint8), exponents, torch.full((2, 128), 2.0**-8), tile)
    assert want.isfinite().all() and (want > 0).all()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=2.0**-149)


@few_and_many
@pytest.mark.parametrize("groups", [6, 7, 8], ids=["2_at_once", "1_at_once", "4_at_once"])
def test_rows_of_weights_are_apart(groups, tile):
    """One with a scale that is no number, one of tiny scales, one with zeros far below the others, one with a tiny
    scale and a huge one in the same place of two steps: the columns of a tile that is computed in turns.
    """
    K, codes = 32 * groups, torch.randint(0, 16, (4, 32 * groups), dtype=torch.uint8)
    exponents = torch.randint(120, 130, (4, groups), dtype=torch.uint8)
    exponents[1, 5] = 255
    exponents[2] = torch.arange(groups)
    codes[3, 64:96], exponents[3, 2] = 0, 0
    exponents[0, 0], exponents[0, 4] = 3, 200
    got, want = product(codes, exponents, torch.randn(5, K), tile)
    assert got[:, 1].isnan().all()
    got[:, 1], want[:, 1] = 0.0, 0.0
    assert ((got - want).norm(dim=0) <= 1e-5 * want.norm(dim=0)).all()


@every_kernel
def test_halves_whose_exponents_are_stored_in_two_ways(plan, monkeypatch):
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer = build("mxfp4_a8", T=2, sizes=(2, 1, 64, 32), form="separate", dtype=torch.float32)
    layer.tensors["gate_up_scales"][1] = layer.tensors["gate_up_scales"][1].view(torch.uint8)
    check(layer, plan)
