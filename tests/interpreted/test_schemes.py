"""Layers whose activations are quantised by whole rows, under the CPU interpreter, and what quantises between their
products.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moe_ops
from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops import choice
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton import act_quant, topk
from moe_ops.kernels.triton.config import MMConfig, SmallConfig
from moe_ops.kernels.triton.expert_mm import batched_mm, grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM
from tests.ops.errors import norm_error
from tests.ops.scheme_layers import FORMS, assert_contract, build

BY_ROW = ("fp8_channel", "fp8_tensor", "int8_channel")
SIZES = (3, 2, 144, 80)
DESCRIPTORS = MMConfig(16, 64, 128, 2, 4, 2, a_tma=True, w_tma=True)
POINTERS = MMConfig(16, 64, 128, 1, 4, 2, a_tma=False, w_tma=False)
PLANS = {
    "small": triton_plans.plan("small", SmallConfig(32, 128, 4), SmallConfig(64, 128, 4)),
    "grouped": triton_plans.plan("grouped", DESCRIPTORS, DESCRIPTORS),
    "gathered": triton_plans.plan("grouped", POINTERS, POINTERS),
    "batched": triton_plans.plan("batched", DESCRIPTORS, DESCRIPTORS),
}
#: Every form in both formats; rows by descriptor and gathered, the small kernels, biases and maps along the way.
CASES = [
    *[("grouped", form, False, False) for form in FORMS],
    *[("batched", form, True, False) for form in FORMS],
    ("gathered", "concat", True, True),
    ("batched", "halves", False, True),
    ("small", "halves", True, True),
    ("small", "interleaved", False, False),
    ("small", "none", True, False),
]


@pytest.mark.parametrize(("plan", "form", "bias", "expert_map"), CASES, ids=lambda v: str(v).lower())
@pytest.mark.parametrize("scheme", BY_ROW)
def test_a_layer_rounds_exactly_where_the_row_says(scheme, plan, form, bias, expert_map, monkeypatch):
    """Of fp32 tokens: nothing else is rounded, so that the reference's result is met far within its error."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer = build(scheme, T=5, sizes=SIZES, form=form, bias=bias, expert_map=expert_map, dtype=torch.float32)
    format = "batched" if plan == "batched" else "grouped"
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, format=format, backend="triton")
    assert_contract(got, layer)
    assert norm_error(got, layer.rounded()) < 1e-3


#: Plans, with the weight before the experts or not; the small kernels know no expert's scale.
STATIC = {
    "grouped": ("grouped", False), "gathered": ("gathered", False), "batched": ("batched", False),
    "small": ("small", False), "grouped, weighed before": ("grouped", True),
    "batched, weighed before": ("batched", True),
}  # fmt: skip


@pytest.mark.parametrize("case", STATIC)
def test_static_scales_are_those_of_the_experts(case, monkeypatch):
    """Both products' rows, to the numbers of the reference; the last expert is held elsewhere."""
    plan, weigh = STATIC[case]
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer = build("fp8_tensor", T=5, sizes=SIZES, expert_map=True, dtype=torch.float32, static=True)
    options = {**layer.options, "weight_on_input": weigh, "format": "batched" if plan == "batched" else "grouped"}
    monkeypatch.setattr(triton_plans, "by_products", lambda *_: PLANS["gathered"])
    got, want = (
        moe_ops.fused_experts(**layer.tensors, **options, backend=backend) for backend in ("triton", "reference")
    )
    assert norm_error(got, want) < 1e-3
    if not weigh:
        assert_contract(got, layer)
        assert norm_error(got, layer.rounded()) < 1e-3


def test_static_scales_behind_the_router(monkeypatch):
    """Which no kernel quantises beside the choice of the experts."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["gathered"])
    layer, logits = build("fp8_channel", T=2, sizes=SIZES, static=True), torch.randn(2, SIZES[0])
    tensors = {k: v for k, v in layer.tensors.items() if not k.startswith("topk_")}
    got, want = (
        moe_ops.fused_moe(tensors["hidden_states"], logits, top_k=2, backend=backend, **layer.options,
                          **{k: v for k, v in tensors.items() if k != "hidden_states"})
        for backend in ("triton", "reference")
    )  # fmt: skip
    assert norm_error(got, want) < 5e-3


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_static_rows_are_those_of_the_format(format, poisoned):
    """To the bit, and rows of no expert are neither read nor written."""
    form, counts = SCHEMES["fp8_tensor"].rows, torch.tensor([3, 0, 9, 2], dtype=torch.int32)
    E, C, K = 4, 10, 144
    static = torch.rand(E, 1, 1) / 200 + 1e-3
    used = torch.arange(C) < counts[:, None] if format == "batched" else torch.arange(E * C) < counts.sum()
    x = torch.randn(*used.shape, K)
    x[~used] = float("nan")
    x.view(-1, K)[0, :3] = torch.tensor([float("inf"), -1e30, float("nan")])
    experts = torch.arange(E).repeat_interleave(counts)
    extents = counts if format == "batched" else counts.cumsum(0).int()
    q, scale = act_quant.quantize_static(x, extents, static, form)
    want, (want_scale,) = form.quantize(x[used], static.view(E, 1)[experts])
    assert want[0, :3].float().nan_to_num(1.0).tolist() == [448.0, -448.0, 1.0]
    torch.testing.assert_close(q[used].float(), want.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scale[used], want_scale)
    assert poisoned(q[~used]).all() and poisoned(scale[~used]).all()


@pytest.mark.parametrize("plan", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_channel"])
def test_no_tokens(scheme, plan):
    layer = build(scheme, T=0, sizes=SIZES)
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, format=plan, backend="triton")
    assert got.shape == (0, SIZES[2]) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["bf16", "fp8_channel", "w4a8_fp8"])
def test_no_tokens_step_by_step(scheme, monkeypatch):
    """A batch without rows, in all kernels."""
    layer = build(scheme, T=0, sizes=SIZES)
    given = layer.tensors
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    prepared = moe_ops.prepare(
        given["hidden_states"], given["topk_weights"], given["topk_ids"], num_experts=SIZES[0], format="batched",
        scheme=scheme,
    )  # fmt: skip
    assert prepared.rows.shape[:2] == (SIZES[0], 0)
    scales = {name: given[name] for name in ("gate_up_scales", "down_scales")}
    rows = moe_ops.experts(prepared, given["gate_up_proj"], given["down_proj"], scheme=scheme, **scales)
    assert moe_ops.finalize(rows, prepared).shape == (0, SIZES[2])


@pytest.mark.parametrize(
    ("scheme", "plan"),
    [(s, p) for s in ("fp8_tensor", "int8_channel", "mxfp4_a8") for p in ("gathered", "small")]
    + [("w4a8_fp8", "small")],
)
def test_rows_quantised_beside_the_router(scheme, plan, monkeypatch):
    """To the bits of the kernels one by one."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer, logits = build(scheme, T=2, sizes=SIZES), torch.randn(2, SIZES[0])
    tensors = {k: v for k, v in layer.tensors.items() if not k.startswith("topk_")}
    hidden_states = tensors.pop("hidden_states")
    assert topk.is_few(2, 2, SIZES[0])
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    got = moe_ops.fused_moe(hidden_states, logits, **tensors, **layer.options, top_k=2)
    weights, ids = moe_ops.fused_topk(logits, top_k=2)
    routed = {"hidden_states": hidden_states, "topk_weights": weights, "topk_ids": ids}
    assert torch.equal(got, moe_ops.fused_experts(**tensors, **routed, **layer.options))


@pytest.mark.parametrize("plan", ["grouped", "batched", "small"])
def test_the_weight_before_the_experts(plan, monkeypatch):
    """Each of a token's rows has a scale of its own then."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[plan])
    layer = build("int8_channel", T=3, sizes=SIZES)
    options = {**layer.options, "weight_on_input": True, "format": "batched" if plan == "batched" else "grouped"}
    got, want = (
        moe_ops.fused_experts(**layer.tensors, **options, backend=backend) for backend in ("triton", "reference")
    )
    assert norm_error(got, want) < 5e-3
    assert norm_error(moe_ops.fused_experts(**layer.tensors, **layer.options, backend="reference"), want) > 0.1


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_channel"])
def test_a_product_that_quantises_is_the_product_quantised(scheme, format, poisoned):
    """To the bit, and rows of no expert are neither read nor written."""
    row, counts = SCHEMES[scheme], torch.tensor([3, 0, 18, 2], dtype=torch.int32)
    E, C, K, I = 4, 19, 144, 40
    x, (x_scale,) = row.rows.quantize(torch.randn(E * C, K))
    weight = Operand(*(lambda stored, scales: (stored, row, scales))(*row.quantize(torch.randn(E, 2 * I, K))))
    plain = ExpertMM(weight, torch.float32, glu_layout="concat", activation="silu", rows_scale=x_scale)

    def run(mm: ExpertMM) -> tuple[torch.Tensor, torch.Tensor]:
        if format == "batched":
            return batched_mm(x.view(E, C, K), mm, counts, POINTERS)
        return grouped_mm(x, mm, counts.cumsum(0).int(), POINTERS, num_rows=E * C)

    (h, _), (q, scale) = run(plain), run(replace(plain, quantize_output=True))
    used = torch.arange(C) < counts[:, None] if format == "batched" else torch.arange(E * C) < counts.sum()
    want, (want_scale,) = row.rows.quantize(h[used])
    assert q.dtype == row.rows.dtype and scale.shape == (*h.shape[:-1], 1)
    assert torch.equal(q[used].float(), want.float()) and torch.equal(scale[used], want_scale)
    assert poisoned(q[~used]).all() and poisoned(scale[~used]).all()


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", ["int8_channel", "mxfp4_a8", "w4a8_fp8"])
def test_stage_operators_of_quantised_rows(scheme, format, monkeypatch):
    """prepare, experts, finalize: the bits of the whole."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[format])
    monkeypatch.setattr(triton_plans, "tile_for", lambda *_: DESCRIPTORS)
    layer = build(scheme, T=4, sizes=SIZES)
    given = layer.tensors
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    prepared = moe_ops.prepare(
        given["hidden_states"], given["topk_weights"], given["topk_ids"], num_experts=SIZES[0], format=format,
        scheme=scheme,
    )  # fmt: skip
    scales = {name: given[name] for name in ("gate_up_scales", "down_scales")}
    rows = moe_ops.experts(prepared, given["gate_up_proj"], given["down_proj"], scheme=scheme, **scales)
    got = moe_ops.finalize(rows, prepared)
    assert torch.equal(got, moe_ops.fused_experts(**given, **layer.options, format=format))
