"""What a new row of a table touches: a scheme and an activation that nobody else knows run on the CPU backends."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from meta.activations import ACTIVATIONS, Activation
from meta.schemes import SCHEMES, WHOLE, QuantScheme, Scale, per_element
from moe_ops import reference
from moe_ops.backends import cpu
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, Layer, Variant, dense_formula, plain_result

NAME, CHANNEL = "int8_of_the_test", Scale("scale", 1, WHOLE)


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    scale = weight.float().abs().amax(dim=2, keepdim=True).clamp(min=1e-12) / 127
    return (weight.float() / scale).round().to(torch.int8), (scale,)


def _dequantize(stored: torch.Tensor, scales: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return stored.float() * per_element(scales[0], CHANNEL, *stored.shape[1:])


#: Weights alone: int8 with a scale for each row, activations as they are.
ROW = QuantScheme(NAME, torch.int8, 2.0**-8, scales=(CHANNEL,), quantize=_quantize, dequantize=_dequantize)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row, and its name in the backends."""
    monkeypatch.setitem(SCHEMES, NAME, ROW)
    for module in (cpu, reference):
        monkeypatch.setattr(module, "SERVED_SCHEMES", module.SERVED_SCHEMES | {NAME})


def layer_of(**changes: object) -> Layer:
    return Variant(scheme=NAME, dtype=torch.bfloat16, **changes).build()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "form", [{}, {"separate": True}, {"options": (("format", "batched"),)}, {"bias": True}], ids=str
)
def test_a_scheme_is_a_row(form: dict[str, object], backend: str, served: None) -> None:
    layer = layer_of(**form)
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, backend=backend)
    assert_accurate(got, dense_formula(layer.float64()), plain_result(layer))


def test_its_scales_are_checked_by_the_row(served: None) -> None:
    layer = layer_of()
    layer.tensors["down_scales"] = [torch.ones(6, 48, 2)]
    with pytest.raises(
        ValueError, match=r"down_scales\[0\] must be \[E=6, N_groups=48, K_groups=1\], got \[6, 48, 2\]"
    ):
        moe_ops.fused_experts(**layer.tensors, **layer.options)
    layer.tensors["down_scales"] = []
    with pytest.raises(
        ValueError, match=r"down_scales must be \[scale \[E, ceil\(N / 1\), 1\]\] for scheme 'int8_of_the_test'"
    ):
        moe_ops.fused_experts(**layer.tensors, **layer.options)


def test_its_weights_are_made_by_the_public_function_and_go_through_the_stages(served: None) -> None:
    weight, x = torch.randn(3, 24, 16), torch.randn(5, 16).bfloat16()
    stored, scale = moe_ops.quantize_weight(weight, scheme=NAME)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    got = moe_ops.grouped_mm(x, stored, offsets, weight_scales=[scale], scheme=NAME, out_dtype=torch.float32)
    wide = ROW.dequantize(stored, (scale,)).double()
    wanted = torch.cat((x[:2].double() @ wide[0].T, x[2:].double() @ wide[2].T))
    assert (got.double() - wanted).norm() <= 4e-3 * wanted.norm()


def test_no_backend_serves_a_scheme_that_it_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, NAME, ROW)
    layer = layer_of()
    with pytest.raises(ValueError, match=r"cpu serves the schemes bf16, .* got int8_of_the_test"):
        moe_ops.fused_experts(**layer.tensors, **layer.options)


def test_an_activation_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """x * sigmoid(1.702 x), with its gradient."""

    def quick_gelu(gate: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        return gate * torch.sigmoid(alpha * gate)

    def gradient(grad: torch.Tensor, gate: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        sigmoid = torch.sigmoid(alpha * gate)
        return grad * (sigmoid + alpha * gate * sigmoid * (1 - sigmoid))

    row = Activation("quick_gelu", quick_gelu, gradient, alpha=1.702)
    monkeypatch.setitem(ACTIVATIONS, row.name, row)
    t = VARIANTS["fp64"].build().tensors
    leaves = [t[name].requires_grad_() for name in ("hidden_states", "gate_up_proj", "down_proj")]

    def layer(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return moe_ops.fused_experts(x, gate_up, down, t["topk_weights"], t["topk_ids"], activation="quick_gelu")

    assert torch.autograd.gradcheck(layer, leaves, fast_mode=True)
    gate, up = (leaves[0][0] @ leaves[1][int(t["topk_ids"][0, 0])].T).chunk(2)
    first = (quick_gelu(gate, 1.702, 0.0) * up) @ leaves[2][int(t["topk_ids"][0, 0])].T
    alone = moe_ops.fused_experts(
        leaves[0][:1], leaves[1], leaves[2], torch.ones(1, 1), t["topk_ids"][:1, :1], activation="quick_gelu"
    )
    torch.testing.assert_close(alone[0], first)
