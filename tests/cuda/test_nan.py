"""NaN in, NaN out, and nowhere else, on a GPU: eager, compiled and captured, at every size's own path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from meta.routing import ROUTINGS, route
from meta.schemes import SCHEMES
from tests.ops.nan_cases import (
    BAD,
    CASES,
    NAN,
    POISONS,
    E,
    by_torch,
    changed,
    check_dropped_pairs_are_exactly_zero,
    check_nan_stays_in_its_token,
    check_routing,
    eager_experts,
    experts_layer,
    logits_and_bias,
    most_rows,
    routing_options,
)

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = ("grouped", "weight_on_input", "batched", "batched_full", "batched_overflow")
TOKENS = (3, 16, 300, 4096)


def captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through a CUDA graph that was captured on other values."""

    def run(*tensors: Tensor) -> Any:
        static = [torch.ones_like(tensor) for tensor in tensors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function(*static)
        for to, value in zip(static, tensors, strict=True):
            to.copy_(value)
        graph.replay()
        return out

    return run


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda function: function,
    "compiled": compiled,
    "captured": captured,
}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize(
    ("dtype", "renormalize"), [("fp32", False), ("bf16", True)], ids=["fp32-raw", "bf16-renormalised"]
)
@pytest.mark.parametrize("case", CASES)
def test_topk(case: str, dtype: str, renormalize: bool) -> None:
    routing, poison = CASES[case]
    logits, bias = logits_and_bias(poison, DTYPES[dtype])
    options = routing_options(routing, renormalize=renormalize)
    got = moe_ops.fused_topk(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), **options)
    check_routing(*got, logits, bias, options)


@pytest.mark.parametrize("way", ["compiled", "captured"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_topk_compiled_and_captured(routing: str, way: str) -> None:
    logits, _ = logits_and_bias(POISONS["nan_beside_inf"])
    options = routing_options(routing)
    check_routing(*WAYS[way](lambda x: moe_ops.fused_topk(x, **options))(logits.to(DEVICE)), logits, None, options)


def test_every_nan_is_the_same_nan() -> None:
    """Neither sign nor payload ranks one NaN before another."""
    bits = torch.tensor([[0, 0x7FC00000, -0x400000, 0x7FFF0000, 0x7F800000, -0x10000]], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        _, ids = moe_ops.fused_topk(bits.view(torch.float32).to(dtype).to(DEVICE), top_k=6, routing="topk_sigmoid")
        assert ids.tolist() == [[1, 2, 3, 5, 4, 0]]


def layer_of(T: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Odd widths; token BAD is the first of its experts, so that a capacity drops others. 3 tokens: the small path."""
    layer = experts_layer(dtype, DEVICE, T=T, E=64 if T == 3 else 12, K=4, H=480, I=176)
    layer["topk_ids"][BAD] = torch.arange(4)
    layer["topk_ids"][:BAD] = torch.arange(4, 8)
    return layer


def form_of(form: str, layer: dict[str, Tensor]) -> dict[str, Any]:
    if not form.startswith("batched"):
        return {"weight_on_input": form == "weight_on_input"}
    full = most_rows(layer["topk_ids"])
    capacity = {"batched": None, "batched_full": full, "batched_overflow": full - 1}[form]
    return {"format": "batched", "capacity": capacity}


@pytest.mark.parametrize(("dtype", "way"), [*(("bf16", way) for way in WAYS), ("fp16", "eager"), ("fp32", "eager")])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", TOKENS)
def test_experts(T: int, dtype: str, form: str, way: str) -> None:
    layer = layer_of(T, DTYPES[dtype])
    options = form_of(form, layer)
    gate_up, down = layer["gate_up_proj"], layer["down_proj"]

    def whole(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, **options)

    function = WAYS[way](whole)
    names = ("hidden_states", "topk_weights", "topk_ids")
    check_nan_stays_in_its_token(lambda layer: function(*(layer[name] for name in names)), layer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", TOKENS)
def test_dropped_pairs_are_exactly_zero(T: int, form: str) -> None:
    layer = layer_of(T, torch.bfloat16)
    options = form_of(form, layer) if form != "batched_overflow" else form_of("batched", layer)
    check_dropped_pairs_are_exactly_zero(lambda layer: moe_ops.fused_experts(**layer, **options), layer)


@pytest.mark.parametrize("form", ["grouped", "batched", "batched_full"])
@pytest.mark.parametrize("T", TOKENS)
def test_quantising_experts(T: int, form: str) -> None:
    layer, scales = layer_of(T, torch.bfloat16), {}
    for name in ("gate_up", "down"):
        quantized = SCHEMES["fp8_block128"].quantize(layer[f"{name}_proj"].float())
        layer[f"{name}_proj"], scales[f"{name}_scales"] = quantized
    options = {"scheme": "fp8_block128", **scales, **form_of(form, layer)}
    check_nan_stays_in_its_token(lambda layer: moe_ops.fused_experts(**layer, **options), layer)


@every_way
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_fused_moe(routing: str, tokens: int, format: str, way: str) -> None:
    logits, _ = logits_and_bias(POISONS["nan_logit"])
    logits = logits[BAD : BAD + 1] if tokens == 1 else logits
    layer = experts_layer(T=tokens, E=E, H=128, I=64)
    x, gate_up, down = (layer[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))
    options = routing_options(routing)
    wanted = eager_experts(x, gate_up, down, *by_torch(logits, None, options))
    fixed = (gate_up.to(DEVICE), down.to(DEVICE))
    function = WAYS[way](lambda x, logits: moe_ops.fused_moe(x, logits, *fixed, format=format, **options))
    got = function(x.to(DEVICE), logits.to(DEVICE))
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_a_nan_router_row_leaves_every_bit_of_the_other_tokens(format: str, T: int) -> None:
    """The NaN token is routed to other experts than the healthy one, so the others' rows move too."""
    layer = layer_of(T, torch.bfloat16)
    x, gate_up, down = (layer[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))
    healthy = torch.randn(T, gate_up.shape[0], device=DEVICE)
    poisoned = healthy.index_fill(0, torch.tensor(BAD, device=DEVICE), NAN)
    clean, out = (moe_ops.fused_moe(x, logits, gate_up, down, top_k=4, format=format) for logits in (healthy, poisoned))
    others = [t for t in range(T) if t != BAD]
    assert out[BAD].isnan().all() and torch.equal(out[others], clean[others]) and clean.isfinite().all()


def autograd(function: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves, grad)


@pytest.mark.parametrize("case", CASES)
def test_topk_gradients(case: str) -> None:
    routing, poison = CASES[case]
    logits, bias = logits_and_bias(poison)
    options = routing_options(routing)
    grad = torch.randn(5, options["top_k"])
    on_gpu = None if bias is None else bias.to(DEVICE)
    (got,) = autograd(lambda x: moe_ops.fused_topk(x, on_gpu, **options)[0], [logits.to(DEVICE)], grad.to(DEVICE))
    (wanted,) = autograd(lambda x: route(x, bias, **options)[0], [logits], grad)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("poison", ["hidden_states", "topk_weights", "grad"])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2"])
def test_experts_gradients(activation: str, poison: str, way: str) -> None:
    layer = experts_layer(device=DEVICE, T=33, E=12, K=4, H=128, I=64)
    layer["grad"] = torch.randn(33, 128, device=DEVICE)
    layer = changed(layer, **{poison: ((BAD, 1), NAN)})
    ids, grad = layer.pop("topk_ids"), layer.pop("grad")
    biases = torch.randn(12, 128, device=DEVICE), torch.randn(12, 128, device=DEVICE)

    def fused(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        return moe_ops.fused_experts(
            x, up, down, weights, ids, gate_up_bias=up_bias, down_bias=down_bias, activation=activation
        )

    def eager(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        return eager_experts(x, up, down, weights, ids, up_bias, down_bias, activation=activation)

    tensors = [*layer.values(), *biases]
    for got, wanted in zip(autograd(WAYS[way](fused), tensors, grad), autograd(eager, tensors, grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3, equal_nan=True)
