"""Decoded weights under the CPU interpreter: every scheme and form against float64, beside the CPU's own steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import moe_ops
from meta.schemes import SCHEMES
from moe_ops import reference
from moe_ops.backends import triton as backend
from moe_ops.backends import triton_plans
from moe_ops.backends.triton_plans import PACKED
from moe_ops.kernels.triton import small
from moe_ops.kernels.triton.config import MMConfig, SmallConfig
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.ops import parse
from tests.ops.errors import assert_accurate, norm_error
from tests.ops.layers import Layer, Variant, dense_formula, factors_in_fp64
from tests.ops.scheme_layers import assert_contract, build, further
from tests.ops.test_layer import staged

PLAIN = Variant(dtype=torch.bfloat16, E=3, K=2, T=5, H=160, I=96)
FORMS: dict[str, dict[str, Any]] = {
    "bias_minus": {"bias": True, "ids": "minus"},
    "batched_interleaved": {"options": (("format", "batched"), ("glu_layout", "interleaved"))},
    "not_gated": {"options": (("glu_layout", "none"), ("activation", "relu2"))},
    "separate": {"separate": True},
    "many_rows": {"E": 1, "K": 1, "T": 130},
    "many_rows_in_order": {"E": 2, "K": 1, "T": 210, "H": 256, "I": 128},
    "many_rows_in_order_batched": {"E": 1, "K": 1, "T": 130, "H": 128, "I": 192, "options": (("format", "batched"),)},
}


#: Blocks that no size fills, and as few programs as that leaves: the interpreter pays for each.
SMALL = triton_plans.plan("small", SmallConfig(64, 128, 4), SmallConfig(128, 64, 4))


@pytest.fixture(autouse=True, params=["grouped"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Products in tiles, or kernels of few tokens, whatever the rule would choose."""
    ran, experts = [], small.small_experts
    monkeypatch.setattr(small, "small_experts", lambda *args, **named: ran.append(1) or experts(*args, **named))
    by_products = triton_plans.by_products
    monkeypatch.setattr(triton_plans, "plan_for", by_products if request.param == "grouped" else lambda *_: SMALL)
    yield request.param
    assert bool(ran) == (request.param == "small")


both_paths = pytest.mark.parametrize("path", ["grouped", "small"], indirect=True)
few_tokens = pytest.mark.parametrize("path", ["small"], indirect=True, ids=[""])


def assert_as_accurate_as_the_steps(layer: Layer) -> None:
    """`staged` computes as the kernels do: it rounds what lies between the products, and the pairs' results."""
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, backend="triton")
    assert_accurate(got, dense_formula(layer.float64()), staged(layer))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_scheme(scheme: str, form: str) -> None:
    made = replace(PLAIN, scheme=scheme, **FORMS[form])
    if SCHEMES[scheme].code.name == "int4":
        made = replace(made, H=128, I=128)  # else one group is a row
    assert_as_accurate_as_the_steps(made.build())


STEPS = ["128_128", "256_128", "128_64", "64_256", "64_64"]  # weight rows of GEMM 1's tile and columns of its steps


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("scheme", ["mxfp4", "int8_w8a16", "int4_w4a16"])
def test_orders_of_columns(scheme: str, steps: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMM 1 leaves its rows in the order that GEMM 2 has, however many columns a tile and a step of either have."""
    rows, columns = map(int, steps.split("_"))
    first, second = (MMConfig(64, *sizes, 8, 4, 2, a_tma=True, w_tma=True) for sizes in ((rows, columns), (128, 128)))
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: triton_plans.plan(format, first, second))
    made = replace(PLAIN, scheme=scheme, E=2, K=1, T=70, H=256, I=128, options=(("format", format),))
    assert_as_accurate_as_the_steps(made.build())


@pytest.mark.parametrize("scheme", ["mxfp4", "int8_w8a16", "int4_w4a16"])
@pytest.mark.parametrize("form", ["sorted", "batch"])
def test_one_product_of_many_rows(form: str, scheme: str) -> None:
    """Rows that come from a user, in their own order of columns."""
    layer = replace(PLAIN, scheme=scheme, E=2, H=256, I=128).build().tensors
    counts, batched = torch.tensor([200, 10], dtype=torch.int32), form == "batch"
    rows = (torch.randn(2, 200, 256) if batched else torch.randn(210, 256)).bfloat16()
    extents = counts if batched else counts.cumsum(0).int()
    operands = (rows, layer["gate_up_proj"], extents, layer["gate_up_scales"])
    call = parse("batched_mm" if batched else "grouped_mm", *operands, scheme=scheme)
    got, want = getattr(backend, call.op)(call), getattr(reference, call.op)(call)
    used = torch.arange(200) < counts[:, None] if batched else slice(None)
    assert norm_error(got[used], want[used]) < 5e-3


@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_few_rows_that_a_kernel_counts(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `decoded_few_mm` would take them but for that: threads gather them."""
    tile, taken = MMConfig(8, 128, 256, 1, 4, 3, a_tma=True, w_tma=True), []
    monkeypatch.setattr(triton_plans, "tile_for", lambda *of: tile)
    monkeypatch.setattr(ExpertMM, "specialises", lambda mm, config: mm.takes_few(config))
    launched = backend.launch_grouped_mm
    monkeypatch.setattr(backend, "launch_grouped_mm", lambda *of, **by: taken.append(of[3]) or launched(*of, **by))
    layer = replace(PLAIN, scheme=scheme, E=3, H=384, I=128).build().tensors
    offsets = torch.tensor([2, 2, 21], dtype=torch.int32)
    operands = (torch.randn(21, 384).bfloat16(), layer["gate_up_proj"], offsets, layer["gate_up_scales"])
    call = parse("grouped_mm_glu", *operands, scheme=scheme)
    got, want = backend.grouped_mm_glu(call)[0], reference.grouped_mm_glu(call)[0]
    assert norm_error(got, want) < 5e-3 and [(tile.block_m, tile.a_tma) for tile in taken] == [(16, False)]


@both_paths
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "int4_w4a16"])
def test_rows_that_are_not_made_of_words(scheme: str) -> None:
    """Codes that lie in memory one byte further; scales of an odd number of bytes a row."""
    layer = replace(PLAIN, scheme=scheme, H=160 if scheme != "int4_w4a16" else 128, I=96).build()
    for name in ("gate_up_proj", "down_proj"):
        layer.tensors[name] = further(layer.tensors[name], 1)
    assert_as_accurate_as_the_steps(layer)


@both_paths
@pytest.mark.parametrize("halves", [3, 4])
@pytest.mark.parametrize("scheme", ["nvfp4", "int4_w4a16"])
def test_scales_that_start_again_with_the_up_half(scheme: str, halves: int) -> None:
    assert_as_accurate_as_the_steps(replace(PLAIN, scheme=scheme, halves=4 if scheme == "nvfp4" else halves).build())


@both_paths
@pytest.mark.parametrize("form", ["whole", "halves", "separate", "separate, one in fp32"])
def test_factors_in_fp64(form: str) -> None:
    """Reciprocals of divisors, as the reference has them; halves that are stored apart may differ."""
    variant = replace(PLAIN, scheme="nvfp4", halves=4 if form == "halves" else 0, separate=form.startswith("separate"))
    layer = variant.build()
    factors_in_fp64(layer.tensors, all_but_one=form == "separate, one in fp32")
    assert_as_accurate_as_the_steps(layer)
    got, want = (
        moe_ops.fused_experts(**layer.tensors, **layer.options, backend=backend) for backend in ("triton", "reference")
    )
    assert norm_error(got, want) < 5e-3


@both_paths
@pytest.mark.parametrize("form", ["runs_on", "apart", "tensor", "tensor_apart", "e8m0"])
def test_forms_of_fp8(form: str) -> None:
    """Blocks that one scheme shares with others, which quantise the rows, too."""
    scheme = "fp8_tensor" if form.startswith("tensor") else "fp8_block128"
    variant = replace(PLAIN, scheme=scheme, I=192, halves=3 if form in ("apart", "tensor_apart") else 0)
    variant = replace(variant, scale_dtype=torch.float8_e8m0fnu) if form == "e8m0" else variant
    layer = variant.build()
    layer.options["scheme"] = "fp8_w8a16"
    assert_as_accurate_as_the_steps(layer)


@both_paths
@pytest.mark.parametrize("group", [32, 64, 160])
@pytest.mark.parametrize("scheme", ["int4_w4a16", "int8_w8a16"])
def test_groups_and_zero_points(scheme: str, group: int) -> None:
    layer = replace(PLAIN, scheme="int4_w4a16", I=160 if group == 160 else 64, H=160 if group == 160 else 128).build()
    code = SCHEMES[scheme].code
    for name in ("gate_up", "down"):
        E, N, packed = layer.tensors[f"{name}_proj"].shape
        K = 2 * packed
        stored = torch.randint(0, 256, (E, N, K // code.pack)).to(torch.uint8).view(code.dtype)
        shape = (E, N, K // group)
        zero = torch.randint(0, 16, shape, dtype=torch.uint8)
        layer.tensors[f"{name}_proj"] = stored
        step = 0.01 if code.pack == 2 else 0.001
        layer.tensors[f"{name}_scales"] = [(torch.rand(shape) + 0.5).mul(step).bfloat16(), zero]
    layer.options["scheme"] = scheme
    assert_as_accurate_as_the_steps(layer)


FEW: list[tuple[int, str, bool, bool]] = [
    (1, "concat", True, True),
    (3, "interleaved", True, False),
    (3, "halves", False, True),
    (1, "none", True, False),
]


@few_tokens
@pytest.mark.parametrize(("T", "form", "bias", "expert_map"), FEW, ids=lambda v: str(v).lower())
@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_few_tokens(scheme: str, T: int, form: str, bias: bool, expert_map: bool, poisoned: Any) -> None:
    """Rows that end within a group and within a thread's load; pairs of experts held elsewhere, whose h is poison."""
    layer = build(scheme, T=T, sizes=(4, 3, 144, 80), form=form, bias=bias, expert_map=expert_map)
    if expert_map:
        layer.tensors["topk_ids"][0, 0] = int((layer.tensors["expert_map"] < 0).nonzero()[0])
        layer.tensors["topk_weights"][0, 0] = float("nan")
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, backend="triton")
    assert_contract(got, layer)


@both_paths
def test_groups_of_a_number_of_columns_that_is_no_power_of_two() -> None:
    layer = replace(PLAIN, scheme="int4_w4a16", T=1, H=192, I=96).build()
    for name, K in (("gate_up", 192), ("down", 96)):
        shape = (*layer.tensors[f"{name}_proj"].shape[:2], K // 96)
        layer.tensors[f"{name}_scales"] = [
            (torch.rand(shape) + 0.5).mul(0.01),
            torch.randint(0, 16, shape, dtype=torch.uint8),
        ]
    assert_as_accurate_as_the_steps(layer)


@few_tokens
@pytest.mark.parametrize("scheme", ["nvfp4", "int8_w8a16"])
def test_the_weight_before_the_experts_of_few_tokens(scheme: str) -> None:
    layer = build(scheme, T=2, sizes=(4, 2, 144, 80))
    got, want = (
        moe_ops.fused_experts(**layer.tensors, **layer.options, weight_on_input=True, backend=backend)
        for backend in ("triton", "reference")
    )
    assert norm_error(got, want) < 5e-3
    assert norm_error(moe_ops.fused_experts(**layer.tensors, **layer.options, backend="reference"), want) > 0.1


def test_a_word_whose_codes_have_two_scales_takes_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which say that they have no tile for it, either."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: SMALL)
    layer = replace(PLAIN, scheme="int4_w4a16", T=1, H=192, I=96).build()
    for name, (rows, columns) in {"gate_up": (192, 64), "down": (192, 32)}.items():
        layer.tensors[f"{name}_scales"] = [torch.ones(3, rows, columns)]
    with pytest.raises(ValueError, match="int4_w4a16: scales must be of groups that 32 divides on a GPU, got 3"):
        moe_ops.fused_experts(**layer.tensors, **layer.options, backend="triton")


@pytest.mark.parametrize("plan", ["small", "grouped"])
def test_zero_points_of_other_groups_than_their_scale_are_refused(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_plans, "plan_for", lambda *wanted: SMALL if plan == "small" else triton_plans.by_products(*wanted)
    )
    layer = replace(PLAIN, scheme="int4_w4a16", H=128, I=128).build()
    for name, rows in (("gate_up", 256), ("down", 128)):
        zero = torch.full((3, rows, 2), 8, dtype=torch.uint8)
        layer.tensors[f"{name}_scales"] = [torch.ones(3, rows, 4), zero]
    message = (
        "int4_w4a16: zero_point must be of the scale's groups of 32 columns on a GPU, or one for a row, got groups of"
    )
    with pytest.raises(ValueError, match=message):
        moe_ops.fused_experts(**layer.tensors, **layer.options, backend="triton")


def test_a_group_that_no_tile_fits_is_named() -> None:
    layer = replace(PLAIN, scheme="int4_w4a16", H=160, I=96).build()
    for name, (rows, columns) in {"gate_up": (192, 10), "down": (160, 6)}.items():
        layer.tensors[f"{name}_scales"] = [torch.ones(3, rows, columns)]
    with pytest.raises(ValueError, match="int4_w4a16: scales must be of groups that 32 divides on a GPU, got 16"):
        moe_ops.fused_experts(**layer.tensors, **layer.options, backend="triton")


@both_paths
@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_fp16_activations(scheme: str) -> None:
    groups = {"H": 128, "I": 128} if SCHEMES[scheme].code.name == "int4" else {}
    assert_as_accurate_as_the_steps(replace(PLAIN, scheme=scheme, dtype=torch.float16, bias=True, **groups).build())


@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_other_activations_are_refused(scheme: str) -> None:
    layer = replace(PLAIN, scheme=scheme, dtype=torch.float32).build()
    with pytest.raises(ValueError, match=f"scheme {scheme} takes bfloat16 or float16 activations, got torch.float32"):
        moe_ops.fused_experts(**layer.tensors, **layer.options, backend="triton")
