"""Records of launches: the same bits as the call they were taken of, for other tensors, through the interpreter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops import plans
from moe_ops.backends import triton_plans
from moe_ops.backends.triton_plans import plan
from moe_ops.kernels.triton import record
from moe_ops.kernels.triton.config import MMConfig, SmallConfig
from moe_ops.ops import LAUNCHERS

pytestmark = pytest.mark.usefixtures("poisoned_memory")
E, K, H, I = 4, 2, 128, 64
TILE = MMConfig(16, 32, 32, 2, 4, 2, a_tma=True, w_tma=True)
TALL = MMConfig(64, 32, 32, 2, 4, 2, a_tma=True, w_tma=True)  # a stream of tiles, stored by tensor map
FP8_TILE = MMConfig(16, 256, 128, 2, 4, 2, a_tma=True, w_tma=True)
FP8_SECOND = FP8_TILE._replace(block_n=128)
SMALL = SmallConfig(16, 128, 4)


def layer(T: int = 5, scheme: str | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    made = {"hidden_states": torch.randn(T, H).to(dtype), "router_logits": torch.randn(T, E), "top_k": K, **options}
    weights = {"gate_up_proj": torch.randn(E, 2 * I, H) * 0.1, "down_proj": torch.randn(E, H, I) * 0.1}
    if scheme is None:
        return {**made, **{name: weight.to(dtype) for name, weight in weights.items()}}
    for name, weight in weights.items():
        stored, *scales = moe_ops.quantize_weight(weight, scheme=scheme)
        made |= {name: stored, f"{name.removesuffix('_proj')}_scales": scales}
    return {**made, "scheme": scheme}


def static(made: dict[str, Any]) -> dict[str, Any]:
    """With scales of activations that were calibrated before."""
    names = ("gate_up_scales", "down_scales")
    return made | {name: [*made[name], 0.01 + torch.rand(E, 1, 1) / 100] for name in names}


LAYERS: dict[str, tuple[plans.Plan, Callable[[], dict[str, Any]]]] = {
    "small": (plan("small", SMALL, SMALL), lambda: layer(1)),
    "grouped": (plan("grouped", TILE, TILE), layer),
    "stream": (plan("grouped", TALL, TALL), lambda: layer(9)),
    "sorted": (plan("grouped", TILE, TILE), lambda: layer(17)),
    "weight_on_input": (plan("grouped", TILE, TILE), lambda: layer(weight_on_input=True)),
    "expert_map": (plan("grouped", TILE, TILE), lambda: layer(expert_map=torch.tensor([1, 0, -1, 2]))),
    "biases": (
        plan("grouped", TILE, TILE),
        lambda: layer(gate_up_bias=torch.randn(E, 2 * I), down_bias=torch.randn(E, H)),
    ),
    "batched": (plan("batched", TILE, TILE), lambda: layer(format="batched")),
    "capacity": (plan("batched", TILE, TILE), lambda: layer(17, format="batched", capacity=3)),
    "fp8": (
        plan("grouped", FP8_TILE, FP8_SECOND),
        lambda: layer(scheme="fp8_block128", dtype=torch.bfloat16),
    ),
    "static scales": (
        plan("grouped", FP8_TILE, FP8_SECOND),
        lambda: static(layer(scheme="fp8_tensor", dtype=torch.bfloat16)),
    ),
    "fp8_batched": (
        plan("batched", FP8_TILE, FP8_SECOND),
        lambda: layer(scheme="fp8_block128", dtype=torch.bfloat16, format="batched"),
    ),
    "int8": (plan("grouped", FP8_SECOND, FP8_SECOND), lambda: layer(scheme="int8_channel", dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch, reasons: list[str | None]):
    chosen, build = LAYERS[name]
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: chosen)
    for _ in range(2):
        moe_ops.fused_moe(**build(), backend="triton")
    changed = build()
    warm = moe_ops.fused_moe(**changed, backend="triton")
    assert reasons == [None]
    LAUNCHERS["fused_moe"].forget()
    cold = moe_ops.fused_moe(**changed, backend="triton")
    assert not cold.isnan().any()
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)


def test_halves_apart(reasons: list[str | None]):
    """Kernels are given the distance between halves that are tensors of their own: another one is another signature."""
    made = layer()
    stacked = made.pop("gate_up_proj")
    expected = moe_ops.fused_moe(**made, gate_up_proj=stacked, backend="reference")
    for place in (1, 1, 1, 2):
        memory = torch.full((3, E, I, H), float("nan"))
        memory[0], memory[place] = stacked.chunk(2, dim=1)
        halves = {"gate_up_proj": memory[0], "up_proj": memory[place], "glu_layout": "separate"}
        found = moe_ops.fused_moe(**made, **halves, backend="triton")
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_site_fires_records(monkeypatch: pytest.MonkeyPatch, reasons: list[str | None]):
    """With the tokens as its key; a record of one number of them is wrong for another."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: plan("grouped", TILE, TILE))
    site = LAUNCHERS["fused_moe"].site((-1, -1, -1, -1), (), top_k=K, backend="triton")
    names = ("hidden_states", "router_logits", "gate_up_proj", "down_proj")
    for T in (5, 9) * 3:
        made = layer(T)
        found = site((T,), *(made[name] for name in names))
        torch.testing.assert_close(found, moe_ops.fused_moe(**made, backend="reference"), rtol=1e-3, atol=1e-3)
    assert reasons == [None] * 2


def test_a_default_device_is_not_that_of_a_record(monkeypatch: pytest.MonkeyPatch, reasons: list[str | None]):
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: plan("grouped", TILE, TILE))
    site = LAUNCHERS["fused_moe"].site((-1, -1, -1, -1), (), top_k=K, backend="triton")
    names = ("hidden_states", "router_logits", "gate_up_proj", "down_proj")
    for _ in range(3):
        made = layer()
        with torch.device("meta"):
            found = site((), *(made[name] for name in names))
        torch.testing.assert_close(found, moe_ops.fused_moe(**made, backend="reference"), rtol=1e-3, atol=1e-3)
    assert reasons == [None]


def test_halves_apart_at_a_site(reasons: list[str | None]):
    """Nothing but addresses tells these calls apart."""
    made = layer()
    stacked = made.pop("gate_up_proj")
    expected = moe_ops.fused_moe(**made, gate_up_proj=stacked, backend="reference")
    options = {"top_k": K, "glu_layout": "separate", "backend": "triton"}
    pattern = (-1, -1, -1, -1, None, None, None, -1)
    site = LAUNCHERS["fused_moe"].site(pattern, (), **options)
    memory = torch.empty(3, E, I, H)
    for place in (1, 1, 1, 2, 2, 2, 1):
        memory.fill_(float("nan"))
        memory[0], memory[place] = stacked.chunk(2, dim=1)
        others = made["hidden_states"], made["router_logits"]
        found = site((), *others, memory[0], made["down_proj"], memory[place])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def stages(x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    weights, ids = moe_ops.fused_topk(logits, top_k=K)
    rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
    h = moe_ops.grouped_mm_glu(rows, up, offsets)
    return moe_ops.moe_unpermute(moe_ops.grouped_mm(h, down, offsets), places, weights)


def test_stages(reasons: list[str | None], monkeypatch: pytest.MonkeyPatch):
    """Operators with several results, which are theirs alone."""
    from moe_ops import choice

    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    for _ in range(3):
        made = layer()
        arguments = [made[name] for name in ("hidden_states", "router_logits", "gate_up_proj", "down_proj")]
        warm = stages(*arguments)
    assert reasons == [None] * 5
    expected = moe_ops.fused_moe(**made, backend="reference")
    torch.testing.assert_close(warm, expected, rtol=1e-3, atol=1e-3)


def test_results_are_no_part_of_the_workspace():
    for _ in range(3):
        made = layer(scheme="fp8_block128", dtype=torch.bfloat16)
        stored, scale = torch.ops.moe_ops.quantize_rows(made["hidden_states"], scheme="fp8_block128")
        weights, ids = torch.ops.moe_ops.fused_topk(made["router_logits"], top_k=K)
    for result in (stored, scale, weights, ids):
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()


def test_no_tensor_is_kept():
    for _ in range(3):
        made = layer(2, scheme="fp8_block128", dtype=torch.bfloat16)
        result = moe_ops.fused_moe(**made, backend="triton")
    tensors = [value for value in made.values() if isinstance(value, torch.Tensor)]
    tensors += [*made["gate_up_scales"], *made["down_scales"], result]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del made, result, tensors
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_copies_are_not_recorded(reasons: list[str | None]):
    """Rows without a unit stride are copied before the kernels: such a call is run anew, and right."""
    for _ in range(3):
        made = layer()
        made["hidden_states"] = torch.randn(H, 5).t()
        warm = moe_ops.fused_moe(**made, backend="triton")
    assert reasons and "is not a launch" in reasons[0]
    torch.testing.assert_close(warm, moe_ops.fused_moe(**made, backend="reference"), rtol=1e-3, atol=1e-3)


def test_a_call_that_fails_is_not_recorded(monkeypatch: pytest.MonkeyPatch):
    """What a failed recording leaves behind takes no note of later calls."""
    made = layer()
    moe_ops.fused_moe(**made, backend="triton")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(record, "on_device", fail)
        with pytest.raises(RuntimeError, match="no kernel"):
            moe_ops.fused_moe(**made, backend="triton")
    assert getattr(record._running, "recorder", None) is None
    for _ in range(2):
        found = moe_ops.fused_moe(**made, backend="triton")
    torch.testing.assert_close(found, moe_ops.fused_moe(**made, backend="reference"), rtol=1e-3, atol=1e-3)


def test_fills_are_not_recorded():
    """Whoever writes to memory by other means than a launch writes there in every call."""
    memory = torch.empty(4)
    with record.Recorder([memory]) as recorder:
        torch.zeros_like(memory)
        memory.zero_()
    assert recorder.finish(memory) is None and "is not a launch" in str(recorder.reason)
    with record.Recorder([memory]) as recorder:
        memory.zero_()
    assert recorder.finish(memory) is None and "zero_" in str(recorder.reason)
