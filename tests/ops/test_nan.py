"""NaN in, NaN out, and nowhere else: the reference and the CPU backend, forward and backward, whole and in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from meta.activations import ACTIVATIONS
from meta.routing import route
from moe_ops import reference
from moe_ops.backends import cpu
from moe_ops.ops import parse
from tests.ops.nan_cases import (
    BAD,
    CASES,
    INF,
    NAN,
    POISONS,
    E,
    T,
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

MODULES = {"reference": reference, "cpu": cpu}
BACKENDS = tuple(MODULES)
Run = Callable[[dict[str, Tensor]], Tensor]


def whole(backend: str, **options: Any) -> Run:
    return lambda layer: moe_ops.fused_experts(**layer, backend=backend, **options)


def grouped_stages(layer: dict[str, Tensor]) -> Tensor:
    x, gate_up, down, weights, ids = layer.values()
    rows, offsets, pair_to_row = moe_ops.moe_permute(x, ids, num_experts=gate_up.shape[0])
    value = moe_ops.grouped_mm_glu(rows, gate_up, offsets)
    return moe_ops.moe_unpermute(moe_ops.grouped_mm(value, down, offsets), pair_to_row, weights)


def batched_stages(layer: dict[str, Tensor]) -> Tensor:
    x, gate_up, down, weights, ids = layer.values()
    batch, counts, slots = moe_ops.batched_dispatch(x, ids, num_experts=gate_up.shape[0], capacity=most_rows(ids))
    value = moe_ops.batched_mm_glu(batch, gate_up, counts)
    return moe_ops.batched_combine(moe_ops.batched_mm(value, down, counts), slots, weights)


def forms(layer: dict[str, Tensor]) -> dict[str, Run]:
    full = most_rows(layer["topk_ids"])
    made: dict[str, Run] = {"grouped_stages": grouped_stages, "batched_stages": batched_stages}
    for backend in BACKENDS:
        made[f"{backend}-grouped"] = whole(backend)
        made[f"{backend}-weight_on_input"] = whole(backend, weight_on_input=True)
        made[f"{backend}-batched"] = whole(backend, format="batched")
        made[f"{backend}-batched_full"] = whole(backend, format="batched", capacity=full)
        made[f"{backend}-batched_overflow"] = whole(backend, format="batched", capacity=full - 1)
    return made


FORMS = tuple(forms(experts_layer()))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_in_its_token(form: str, dtype: str) -> None:
    layer = experts_layer(DTYPES[dtype])
    layer["topk_ids"][BAD] = torch.tensor([0, 1, 2])  # first in their experts, so that a capacity drops others
    check_nan_stays_in_its_token(forms(layer)[form], layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_dropped_pairs_are_exactly_zero(form: str, dtype: str) -> None:
    layer = experts_layer(DTYPES[dtype])
    check_dropped_pairs_are_exactly_zero(forms(layer)[form], layer)


def test_what_a_capacity_drops_may_be_nan() -> None:
    layer = experts_layer()
    layer["topk_ids"][:] = torch.tensor([1, 3, 4], dtype=torch.int32)
    options = {"format": "batched", "capacity": BAD}
    poisoned = changed(layer, hidden_states=(slice(BAD, None), NAN), topk_weights=(slice(BAD, None), NAN))
    for backend in BACKENDS:
        out = whole(backend, **options)(poisoned)
        assert torch.equal(out, whole(backend, **options)(layer))
        assert (out[BAD:] == 0).all() and (out[:BAD] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_topk(case: str, backend: str) -> None:
    routing, poison = CASES[case]
    logits, bias = logits_and_bias(poison)
    options = routing_options(routing)
    check_routing(*MODULES[backend].fused_topk(parse("fused_topk", logits, bias, **options)), logits, bias, options)


@pytest.mark.parametrize("tokens", [T, 1])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_fused_moe_is_nan_where_eager_code_is(case: str, backend: str, format: str, tokens: int) -> None:
    routing, poison = CASES[case]
    logits, bias = logits_and_bias(poison)
    logits = logits[BAD : BAD + 1] if tokens == 1 else logits
    layer = experts_layer(T=tokens, E=E)
    x, gate_up, down = (layer[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))
    options = routing_options(routing)
    wanted = eager_experts(x, gate_up, down, *by_torch(logits, bias, options))
    got = moe_ops.fused_moe(x, logits, gate_up, down, correction_bias=bias, backend=backend, format=format, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def autograd(function: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves, grad)


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalised"])
@pytest.mark.parametrize("case", CASES)
def test_topk_gradients_are_nan_where_those_of_eager_code_are(case: str, renormalize: bool) -> None:
    routing, poison = CASES[case]
    logits, bias = logits_and_bias(poison)
    options = routing_options(routing, renormalize=renormalize)
    grad = torch.randn(T, options["top_k"])
    (got,) = autograd(lambda x: moe_ops.fused_topk(x, bias, **options)[0], [logits], grad)
    (wanted,) = autograd(lambda x: route(x, bias, **options)[0], [logits], grad)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("routing", ["softmax", "topk_softmax", "sigmoid"])
def test_the_gradient_of_a_nan_row_is_nan(routing: str) -> None:
    """Written out: a softmax mixes all experts, an elementwise score reaches its own, the rest keep their zeros."""
    logits = torch.randn(3, 6)
    logits[1, 4] = NAN
    (grad,) = autograd(lambda x: moe_ops.fused_topk(x, top_k=2, routing=routing)[0], [logits], torch.ones(3, 2))
    chosen = moe_ops.fused_topk(logits, top_k=2, routing=routing)[1][1].tolist()
    expected = set(range(6)) if routing == "softmax" else set(chosen)
    assert 4 in expected and set(grad[1].isnan().nonzero().flatten().tolist()) == expected
    assert grad[[0, 2]].isfinite().all()


POISONED_GRADIENTS: dict[str, dict[str, tuple[Any, float]]] = {
    "nan_token": {"hidden_states": (BAD, NAN)},
    "nan_in_a_token": {"hidden_states": ((BAD, 3), NAN)},
    "nan_weight": {"topk_weights": ((BAD, 1), NAN)},
    "nan_expert": {"down_proj": ((1, 2, 3), NAN)},
    "nan_gate_row": {"gate_up_proj": ((1, 2), NAN)},
    "nan_gradient": {"grad": (BAD, NAN)},
    "one_nan_in_a_gradient": {"grad": ((BAD, 5), NAN)},
}


GRADIENT_FORMS = [*((name, form) for name in ACTIVATIONS for form in ("eager", "batched")), ("silu", "compiled")]


@pytest.mark.parametrize("poison", POISONED_GRADIENTS)
@pytest.mark.parametrize(("activation", "form"), GRADIENT_FORMS)
def test_experts_gradients_are_nan_where_those_of_eager_code_are(activation: str, poison: str, form: str) -> None:
    layer = experts_layer(H=12, I=10)
    layer["grad"] = torch.randn(layer["hidden_states"].shape, generator=torch.Generator().manual_seed(2))
    layer = changed(layer, **POISONED_GRADIENTS[poison])
    ids, grad = layer["topk_ids"], layer["grad"]
    layer |= {"gate_up_bias": torch.randn(6, 20), "down_bias": torch.randn(6, 12)}
    tensors = [value for name, value in layer.items() if name not in ("topk_ids", "grad")]
    options = {"format": "batched"} if form == "batched" else {}

    def fused(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        return moe_ops.fused_experts(
            x, up, down, weights, ids, gate_up_bias=up_bias, down_bias=down_bias, activation=activation, **options
        )

    def eager(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
        return eager_experts(x, up, down, weights, ids, up_bias, down_bias, activation=activation)

    torch._dynamo.reset()
    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if form == "compiled" else fused
    for got, wanted in zip(autograd(function, tensors, grad), autograd(eager, tensors, grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_gradients_of_dropped_pairs_are_exactly_zero() -> None:
    layer = experts_layer()
    layer["topk_ids"][BAD] = -1
    x, gate_up, down, weights, ids = layer.values()

    def fused(*tensors: Tensor) -> Tensor:
        return moe_ops.fused_experts(*tensors, ids)

    grad = torch.randn(x.shape)
    wanted = autograd(fused, [x, gate_up, down, weights], grad)
    poisoned = changed(layer, hidden_states=(BAD, NAN), topk_weights=(BAD, NAN))
    grad[BAD] = NAN
    got = autograd(fused, [poisoned["hidden_states"], gate_up, down, poisoned["topk_weights"]], grad)
    assert all(map(torch.equal, got, wanted))
    assert (got[0][BAD] == 0).all() and (got[3][BAD] == 0).all()


@pytest.mark.parametrize("poison", ["nan_logit", "inf", "all_minus_inf", "minus_inf"])
@pytest.mark.parametrize("routing", ["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"])
def test_fused_moe_gradients_are_nan_where_those_of_its_parts_are(routing: str, poison: str) -> None:
    logits, _ = logits_and_bias(POISONS[poison])
    layer = experts_layer(T=T, E=E, H=12, I=10)
    options, grad = routing_options(routing), torch.randn(T, 12)
    tensors = [layer["hidden_states"], logits, layer["gate_up_proj"], layer["down_proj"]]

    def eager(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return eager_experts(x, gate_up, down, *route(logits, **options))

    got = autograd(lambda *tensors: moe_ops.fused_moe(*tensors, **options), tensors, grad)
    for one, wanted in zip(got, autograd(eager, tensors, grad), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_infinite_tokens_are_not_hidden() -> None:
    layer = changed(experts_layer(), hidden_states=((BAD, 0), INF))
    for backend in BACKENDS:
        out = whole(backend)(layer)
        assert out[BAD].isnan().any() and out[:BAD].isfinite().all()


def test_debug_still_refuses_nan_logits() -> None:
    logits, _ = logits_and_bias(POISONS["nan_logit"])
    with moe_ops.debug(), pytest.raises(ValueError, match="router_logits must be free of NaN"):
        moe_ops.fused_topk(logits, top_k=2)
