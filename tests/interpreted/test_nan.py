"""NaN in, NaN out, and nowhere else, through the Triton backend: every path, every routing, one token and several."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from meta.routing import ROUTINGS
from meta.schemes import SCHEMES
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton.config import MMConfig, SmallConfig
from tests.ops.nan_cases import (
    BAD,
    NAN,
    POISONS,
    E,
    by_torch,
    changed,
    check_dropped_pairs_are_exactly_zero,
    check_nan_stays_in_its_token,
    eager_experts,
    experts_layer,
    logits_and_bias,
    most_rows,
    routing_options,
)

SMALL = SmallConfig(16, 32, 4)
POINTERS = MMConfig(16, 32, 32, 2, 4, 2, a_tma=False, w_tma=False)
TMA = POINTERS._replace(a_tma=True, w_tma=True)
PLANS = {
    "small": triton_plans.plan("small", SMALL, SMALL),
    "grouped": triton_plans.plan("grouped", TMA, TMA),
    "grouped_pointers": triton_plans.plan("grouped", POINTERS, POINTERS),
    "batched": triton_plans.plan("batched", TMA, TMA),
    "batched_full": triton_plans.plan("batched", TMA, TMA),
    "batched_overflow": triton_plans.plan("batched", POINTERS, POINTERS),
}
every_path = pytest.mark.parametrize("path", PLANS)


def few_tokens(dtype=torch.float32, H=40, I=24):
    """Small, for the interpreter, with a tail in every dimension; the last token is what a capacity drops."""
    layer = experts_layer(dtype, T=4, E=4, K=2, H=H, I=I)
    layer["topk_ids"] = torch.tensor([[0, 1], [2, 3], [1, 2], [1, 0]], dtype=torch.int32)
    return layer


@pytest.fixture
def forced(path, monkeypatch):
    """Force one path, whatever the rule would choose; returns its options for a layer."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[path])

    def options(layer):
        if not path.startswith("batched"):
            return {}
        full = most_rows(layer["topk_ids"])
        capacity = {"batched": None, "batched_full": full, "batched_overflow": full - 1}[path]
        return {"format": "batched", "capacity": capacity}

    return options


@every_path
@pytest.mark.parametrize("check", [check_nan_stays_in_its_token, check_dropped_pairs_are_exactly_zero])
def test_experts(check, path, forced, poisoned):
    layer = few_tokens()
    check(lambda layer: moe_ops.fused_experts(**layer, backend="triton", **forced(layer)), layer)


@pytest.mark.parametrize("path", ["small", "grouped", "batched_full"])
def test_experts_in_bf16(path, forced, poisoned):
    layer = few_tokens(torch.bfloat16)
    check_nan_stays_in_its_token(lambda layer: moe_ops.fused_experts(**layer, backend="triton", **forced(layer)), layer)


@pytest.mark.parametrize("path", ["small", "grouped", "batched_full"])
def test_experts_with_the_weight_on_the_input(path, forced, poisoned):
    def run(layer):
        return moe_ops.fused_experts(**layer, backend="triton", weight_on_input=True, **forced(layer))

    layer = few_tokens()
    check_nan_stays_in_its_token(run, layer)
    check_dropped_pairs_are_exactly_zero(run, layer)


@pytest.mark.parametrize("path", ["small", "grouped", "batched_full"])
def test_quantising_experts(path, forced, monkeypatch, poisoned):
    tile = MMConfig(16, 256, 128, 2, 4, 2, a_tma=False, w_tma=True)
    small = SmallConfig(64, 128, 4)
    plan = triton_plans.plan(path.removesuffix("_full"), *((small, small) if path == "small" else (tile, tile)))
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: plan)
    layer = few_tokens(H=160, I=160)
    scales = {}
    for name in ("gate_up", "down"):
        quantized = SCHEMES["fp8_block128"].quantize(layer[f"{name}_proj"])
        layer[f"{name}_proj"], scales[f"{name}_scales"] = quantized

    def run(layer):
        return moe_ops.fused_experts(**layer, **scales, scheme="fp8_block128", backend="triton", **forced(layer))

    check_nan_stays_in_its_token(run, layer)


MOE = [*((routing, 1, path) for routing in ROUTINGS for path in ("small", "grouped"))]
MOE += [(routing, 5, path) for routing in ("softmax", "sigmoid_group_top2") for path in ("grouped", "batched")]


@pytest.mark.parametrize(("routing", "tokens", "path"), MOE)
def test_fused_moe(routing, tokens, path, forced, poisoned):
    """`grouped` with one token routes, sorts and gathers in one kernel."""
    logits, _ = logits_and_bias(POISONS["nan_logit"])
    logits = logits[BAD : BAD + 1] if tokens == 1 else logits
    layer = experts_layer(T=tokens, E=E, H=24, I=16)
    x, gate_up, down = (layer[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))
    options = routing_options(routing)
    format = "batched" if path == "batched" else "grouped"
    got = moe_ops.fused_moe(x, logits, gate_up, down, backend="triton", format=format, **options)
    wanted = eager_experts(x, gate_up, down, *by_torch(logits, None, options))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_one_token_by_the_cheapest_plan(format):
    """No plan forced: what a user's first call does, and whether kernels overlap their starts is decided once."""
    layer = experts_layer(T=1, H=40, I=24)
    x, gate_up, down = (layer[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))
    logits = torch.randn(1, 6)
    got = moe_ops.fused_moe(x, logits, gate_up, down, top_k=2, backend="triton", format=format)
    weights, ids = moe_ops.fused_topk(logits, top_k=2)
    torch.testing.assert_close(got, eager_experts(x, gate_up, down, weights, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("poison", ["hidden_states", "topk_weights"])
def test_gradients(poison, poisoned):
    layer = changed(few_tokens(H=12, I=10), **{poison: ((BAD, 1), NAN)})
    ids = layer.pop("topk_ids")
    biases = {"gate_up_bias": torch.randn(4, 20), "down_bias": torch.randn(4, 12)}
    grad = torch.randn(4, 12)

    def gradients(function):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in {**layer, **biases}.items()}
        x, gate_up, down, weights, *rest = leaves.values()
        return torch.autograd.grad(function(x, gate_up, down, weights, ids, *rest), list(leaves.values()), grad)

    def fused(x, gate_up, down, weights, ids, up_bias, down_bias):
        biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, **biases, backend="triton")

    got = gradients(fused)
    for one, wanted in zip(got, gradients(eager_experts), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
