"""What a new row of a table touches: a scheme, an activation and a backend that nobody else knows run on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import moe_ops
from meta import routing
from meta.activations import ACTIVATIONS, Activation
from meta.formats import CODES
from meta.routing import ROUTINGS, Routing
from meta.schemes import SCHEMES, WHOLE, QuantScheme, Scale
from moe_ops import backends, choice, plans, reference
from moe_ops.backends import cpu
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, Layer, Variant, dense_formula, plain_result

NAME = "int8_of_the_test"


def _scales(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight.abs().amax(dim=2, keepdim=True).clamp(min=1e-12) / 127,)


#: Weights alone: int8 with a scale for each row, activations as they are.
ROW = QuantScheme(NAME, CODES["int8"], (Scale("scale", ((1, WHOLE),)),), make_scales=_scales)


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
    with pytest.raises(ValueError, match=r"down_scales must be \[scale \[E, N, 1\]\] for scheme 'int8_of_the_test'"):
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

    row = Activation("gelu_of_the_test", quick_gelu, gradient, alpha=1.702)
    monkeypatch.setitem(ACTIVATIONS, row.name, row)
    t = VARIANTS["fp64"].build().tensors
    leaves = [t[name].requires_grad_() for name in ("hidden_states", "gate_up_proj", "down_proj")]

    def layer(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return moe_ops.fused_experts(x, gate_up, down, t["topk_weights"], t["topk_ids"], activation="gelu_of_the_test")

    assert torch.autograd.gradcheck(layer, leaves, fast_mode=True)
    gate, up = (leaves[0][0] @ leaves[1][int(t["topk_ids"][0, 0])].T).chunk(2)
    first = (quick_gelu(gate, 1.702, 0.0) * up) @ leaves[2][int(t["topk_ids"][0, 0])].T
    alone = moe_ops.fused_experts(
        leaves[0][:1], leaves[1], leaves[2], torch.ones(1, 1), t["topk_ids"][:1, :1], activation="gelu_of_the_test"
    )
    torch.testing.assert_close(alone[0], first)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A backend of one file and one row that has products alone; the operators that it was asked for."""
    asked: list[str] = []
    module = ModuleType("products_of_the_test")
    module.SERVED_SCHEMES, module.refuses = frozenset({"fp32", "bf16", "fp8_block128"}), lambda problem: None

    def product(name: str) -> Callable[[Any], Any]:
        return lambda call: asked.append(name) or getattr(cpu, name)(call)

    for name in ("grouped_mm", "grouped_mm_glu", "batched_mm"):
        setattr(module, name, product(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(backends.BACKENDS, "products", backends.Backend("products", module.__name__, "cpu"))
    yield asked
    backends.load.cache_clear()
    choice._choose_cached.cache_clear()


LAYERS = ["plain", "bias", "weight_on_input", "expert_map", "separate_bias", "fp8", "batched_overflow", "no_tokens"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_backend_of_products_alone(name: str, products: list[str]) -> None:
    """Its products stand between the sort and the combination of the backend that has those."""
    layer = VARIANTS[name].build()
    batched = layer.options.get("format") == "batched"
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, backend="products")
    assert_accurate(got, dense_formula(layer.float64()), plain_result(layer), dtype=got.dtype)
    assert products == (["batched_mm"] if batched else ["grouped_mm_glu", "grouped_mm"])


def test_without_tokens_a_batch_has_no_rows(products: list[str]) -> None:
    layer = VARIANTS["no_tokens"].build()
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, format="batched", backend="products")
    assert got.shape == layer.tensors["hidden_states"].shape and products == ["batched_mm"]


def test_it_routes_and_differentiates(products: list[str]) -> None:
    layer = VARIANTS["plain"].build()
    x, up, down = (layer.tensors[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))
    x.requires_grad_()
    logits = torch.randn(x.shape[0], up.shape[0])
    got = moe_ops.fused_moe(x, logits, up, down, top_k=2, backend="products")
    assert products == ["grouped_mm", "grouped_mm"], "in training what stands before the activation is kept"
    wanted = moe_ops.fused_moe(x, logits, up, down, top_k=2)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in (got, wanted)), rtol=1e-4, atol=1e-4)


def test_it_refuses_what_no_stage_moves(products: list[str]) -> None:
    layer = VARIANTS["fp8_rows"].build()
    with pytest.raises(ValueError, match="fused_experts: hidden_states_scale must be None for backend='products'"):
        moe_ops.fused_experts(**layer.tensors, **layer.options, backend="products")


def test_without_a_request_its_place_in_the_table_counts(products: list[str]) -> None:
    """Last in the table it is asked for nothing; as the first one it is, operator by operator."""
    layer = VARIANTS["plain"].build()
    x, up, down, weights, ids = layer.args()[:5]
    moe_ops.finalize(moe_ops.experts(prepared := moe_ops.prepare(x, weights, ids, num_experts=6), up, down), prepared)
    assert products == []
    row = backends.BACKENDS.pop("products")
    others = dict(backends.BACKENDS)
    backends.BACKENDS.clear()
    backends.BACKENDS.update({"products": row, **others})
    choice._choose_cached.cache_clear()
    try:
        moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared)
        moe_ops.fused_experts(x, up, down, weights, ids)
        assert products == ["grouped_mm_glu", "grouped_mm"]
    finally:
        backends.BACKENDS.clear()
        backends.BACKENDS.update({**others, "products": row})


@pytest.mark.parametrize("tokens", [3, 4], ids=["serves", "refuses"])
def test_the_backend_that_measured_fastest_goes_first(
    tokens: int, products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is the last of the table; where it refuses, the others are asked as ever."""
    module: Any = sys.modules["products_of_the_test"]
    module.fused_experts = lambda call: products.append("fused_experts") or cpu.fused_experts(call)
    module.refuses = lambda problem: "not today" if problem.T == 4 else None
    monkeypatch.setattr(plans, "fastest_backend", lambda problem, device: "products")
    layer = VARIANTS["plain"].build()
    x, up, down, weights, ids = layer.args()[:5]
    moe_ops.fused_experts(x[:tokens], up, down, weights[:tokens], ids[:tokens])
    assert products == (["fused_experts"] if tokens == 3 else [])


def test_a_routing_method_without_a_derivative_is_refused_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient would be that of something else."""
    monkeypatch.setitem(ROUTINGS, "tanh_of_the_test", Routing("tanh_of_the_test", "tanh"))
    score = routing._score
    monkeypatch.setattr(
        routing, "_score", lambda x, name, dtype: torch.tanh(x.to(dtype)) if name == "tanh" else score(x, name, dtype)
    )
    logits = torch.randn(4, 6, requires_grad=True)
    weights, ids = moe_ops.fused_topk(logits, top_k=2, routing="tanh_of_the_test", renormalize=False)
    assert torch.equal(weights, torch.tanh(logits).gather(1, ids.long()))
    with pytest.raises(ValueError, match="fused_topk_backward: routing must be one with a derivative"):
        weights.sum().backward()
