"""Scales of activations that were calibrated before: one for each expert and product, the last of a weight's list."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from meta.schemes import SCHEMES
from moe_ops import layer as composition
from moe_ops import ops
from moe_ops.backends import cpu
from tests.ops.errors import norm_error
from tests.ops.scheme_layers import FORMS, assert_contract, build

STATIC = [name for name, row in SCHEMES.items() if row.static_rows is not None]
SIZES = (3, 2, 144, 80)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "separate"])
@pytest.mark.parametrize("scheme", STATIC)
def test_rows_are_rounded_by_the_scale_of_their_expert(scheme: str, form: str, backend: str) -> None:
    layer = build(scheme, T=7, sizes=SIZES, form=form, bias=True, expert_map=form == "none", static=True)
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, backend=backend)
    assert_contract(got, layer)
    assert norm_error(got, layer.rounded()) < 4e-3
    for scales in ("gate_up_scales", "down_scales"):
        others = layer.tensors | {scales: [layer.tensors[scales][0], layer.tensors[scales][1] * 1.5]}
        assert norm_error(moe_ops.fused_experts(**others, **layer.options, backend=backend), got) > 0.01


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_one_product_may_have_them_alone(backend: str) -> None:
    layer = build("fp8_channel", T=5, sizes=SIZES, static=True)
    tensors = layer.tensors | {"down_scales": layer.tensors["down_scales"][:1]}
    first, both = (
        moe_ops.fused_experts(**given, **layer.options, backend=backend) for given in (tensors, layer.tensors)
    )
    assert not torch.equal(first, both)
    amax = torch.full((SIZES[0],), 1e6)  # a coarse scale: nothing of the rows between the products is left
    emptied = layer.tensors | {"down_scales": [layer.tensors["down_scales"][0], amax]}
    assert not moe_ops.fused_experts(**emptied, **layer.options, backend=backend).any()
    assert first.any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_in_the_batched_format_and_weighed_before(backend: str) -> None:
    layer = build("fp8_tensor", T=5, sizes=SIZES, static=True)
    plain = moe_ops.fused_experts(**layer.tensors, **layer.options, backend=backend)
    batched = moe_ops.fused_experts(**layer.tensors, **layer.options, backend=backend, format="batched")
    assert torch.equal(plain, batched)
    given = layer.tensors | {"topk_weights": torch.ones(5, 2)}
    one, other = (
        moe_ops.fused_experts(**given, **layer.options, backend=backend, weight_on_input=weigh)
        for weigh in (True, False)
    )
    assert torch.equal(one, other)


def test_a_nan_stays_one_and_in_its_row() -> None:
    layer = build("fp8_tensor", T=3, sizes=SIZES, static=True)
    before = moe_ops.fused_experts(**layer.tensors, **layer.options)
    layer.tensors["hidden_states"][1, 0] = float("nan")
    after = moe_ops.fused_experts(**layer.tensors, **layer.options)
    assert after[1].isnan().all() and torch.equal(before[[0, 2]], after[[0, 2]])


def test_a_compiled_call_has_the_bits_of_the_eager_one() -> None:
    layer = build("fp8_tensor", T=3, sizes=SIZES, static=True)

    def call(x: Tensor) -> Tensor:
        return moe_ops.fused_experts(
            x, **{k: v for k, v in layer.tensors.items() if k != "hidden_states"}, **layer.options
        )

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for x in (layer.tensors["hidden_states"], torch.randn(8, 144)[:3].bfloat16()):
        assert torch.equal(compiled(x), call(x))


def test_torchs_own_checks_of_the_operator() -> None:
    layer = build("fp8_channel", T=3, sizes=SIZES, static=True)
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    given = ops.SIGNATURES["fused_experts"]
    args = [layer.tensors[name] if name in layer.tensors else None for name in given.positional]
    torch.library.opcheck(torch.ops.moe_ops.fused_experts.default, args, layer.options, test_utils=utilities)


def scales(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {name: [given[name][0], change(given[name][1])]}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "too few experts": (
        scales("down_scales", lambda s: s[:2]), "down_scales[1] must be [E=3, N_groups=1, K_groups=1], got [2, 1, 1].",
    ),
    "one for each half": (
        scales("gate_up_scales", lambda s: s.view(3, 1, 1).expand(3, 2, 1)),
        "gate_up_scales[1] must be [E=3, N_groups=1, K_groups=1], got [3, 2, 1].",
    ),
    "half precision": (scales("down_scales", Tensor.half), "down_scales[1] must be torch.float32, got torch.float16."),
    "quantised states": (
        lambda given: {
            "hidden_states": given["hidden_states"].to(torch.float8_e4m3fn), "hidden_states_scale": torch.ones(2, 1),
        },
        "hidden_states_scale must be None beside the static scale in gate_up_scales, got a tensor. Pass hidden_states",
    ),
    "gate and up apart": (
        lambda given: {
            "gate_up_proj": given["gate_up_proj"][:, :80], "up_proj": given["gate_up_proj"][:, 80:],
            "gate_up_scales": given["gate_up_scales"] * 2,
        },
        "gate_up_scales must be without static scales of activations beside up_proj, got some. Stack gate and up",
    ),
    "another scheme": (
        lambda given: {"scheme": "fp8_block128"},
        "gate_up_scales must be [scale [E, ceil(N / 128), ceil(K / 128)]] for scheme 'fp8_block128', got 2 tensors.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_refuses(case: str) -> None:
    change, message = REFUSED[case]
    layer = build("fp8_tensor", T=2, sizes=SIZES, static=True)
    with pytest.raises(ValueError, match=re.escape(f"fused_experts: {message}")):
        moe_ops.fused_experts(**{**layer.tensors, **layer.options, **change(layer.tensors)})


def test_products_take_rows_that_were_quantised_before() -> None:
    """By hand, with the scale of each row's expert: the bits of the layer's first product."""
    layer, row = build("fp8_tensor", T=4, sizes=SIZES, form="none", static=True), SCHEMES["fp8_tensor"]
    offsets, (scale, static) = torch.tensor([1, 3, 4], dtype=torch.int32), layer.tensors["gate_up_scales"]
    x, weight = layer.tensors["hidden_states"], layer.tensors["gate_up_proj"]
    stored, (rows_scale,) = row.rows.quantize(x, static[[0, 1, 1, 2], None])
    options = {"scheme": "fp8_tensor", "rows_scale": rows_scale}
    got = moe_ops.grouped_mm(stored, weight, offsets, weight_scales=[scale], out_dtype=torch.float32, **options)
    wide = layer.weights[0][[0, 1, 1, 2]]
    want = torch.einsum("rk,rnk->rn", row.rows.dequantize(stored, (rows_scale,)).double(), wide)
    assert norm_error(got, want) < 1e-5
    with pytest.raises(ValueError, match="grouped_mm: weight_scales must be without the static scale of rows"):
        moe_ops.grouped_mm(stored, weight, offsets, weight_scales=[scale, static], **options)


def test_a_backend_of_products_alone_refuses_them() -> None:
    layer = build("fp8_tensor", T=4, sizes=SIZES, static=True)
    call = ops.parse("fused_experts", **layer.tensors, **layer.options)
    with pytest.raises(ValueError, match="fused_experts: scales of activations must be dynamic for backend=None"):
        composition.composed(call, cpu)
