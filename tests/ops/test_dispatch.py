"""Choosing a backend: order, requests, refusals, the environment variable, and lazy imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import moe_ops
from meta.dims import BACKEND_NAMES, Problem
from moe_ops import backends, dispatch
from moe_ops.backends import cpu
from tests.ops.layers import VARIANTS


def problem(**changes: object) -> Problem:
    t = VARIANTS["plain"].build().tensors
    found = Problem.from_experts(t["hidden_states"], t["gate_up_proj"], t["down_proj"], t["topk_ids"])
    return replace(found, **changes)


def test_cpu_tensors_run_on_the_cpu_backend() -> None:
    assert dispatch.choose(problem()) is cpu
    assert dispatch.choose(problem(), "cpu") is cpu


def test_reference_by_name_only() -> None:
    assert "reference" not in backends.BACKENDS and set(backends.BACKENDS) < set(BACKEND_NAMES)
    assert dispatch.choose(problem(), "reference").NAME == "reference"


def test_request_never_falls_back() -> None:
    with pytest.raises(
        ValueError, match=r"fused_experts: backend='triton' must accept the problem, got refusals: triton"
    ):
        dispatch.choose(problem(), "triton")


def test_unknown_backend_lists_the_names() -> None:
    with pytest.raises(
        ValueError, match=r"backend must be one of \['cpu', 'reference', 'torch_grouped', 'triton'\], got 'x'"
    ):
        dispatch.choose(problem(), "x")


def test_every_refusal_is_listed() -> None:
    with pytest.raises(ValueError) as caught:
        dispatch.choose(problem(device_type="xpu"))
    assert all(f"{name} does not serve xpu tensors" in str(caught.value) for name in backends.BACKENDS)


def test_first_backend_that_implements_the_operator_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ModuleType("first")
    first.refuses = lambda problem: None
    monkeypatch.setattr(backends, "serves", lambda name, device_type: True)
    monkeypatch.setattr(backends, "load", lambda name: first if name == "triton" else cpu)
    assert dispatch._choose(problem(), None, "fused_experts") is cpu
    with pytest.raises(ValueError, match="triton does not implement fused_experts"):
        dispatch._choose(problem(), "triton", "fused_experts")
    first.fused_experts = cpu.fused_experts
    assert dispatch._choose(problem(), None, "fused_experts") is first
    first.refuses = lambda problem: "is asleep"
    with pytest.raises(ValueError, match="triton is asleep"):
        dispatch._choose(problem(), "triton", "fused_experts")


def test_a_backend_measured_faster_wins_unless_one_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ModuleType("first"), ModuleType("second")
    for module in (first, second):
        module.refuses, module.fused_experts = lambda problem: None, cpu.fused_experts
    first.measured_faster = lambda problem: "torch_grouped"
    monkeypatch.setattr(backends, "serves", lambda name, device_type: True)
    monkeypatch.setattr(backends, "load", lambda name: {"triton": first, "torch_grouped": second}[name])
    assert dispatch._choose(problem(), None, "fused_experts") is second
    assert dispatch._choose(problem(), "triton", "fused_experts") is first
    second.refuses = lambda problem: "is asleep"
    assert dispatch._choose(problem(), None, "fused_experts") is first


def test_missing_module_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._MODULES, "torch_grouped", "moe_ops.backends.no_such_module")
    backends.load.cache_clear()
    assert "cannot be imported" in backends.load("torch_grouped")
    backends.load.cache_clear()


def test_choices_are_remembered() -> None:
    before = dispatch._choose_cached.cache_info().misses
    found = problem(T=123457)
    assert dispatch.choose(found) is dispatch.choose(replace(found))
    assert dispatch._choose_cached.cache_info().misses == before + 1


def test_symbolic_sizes_are_chosen_for_without_a_hash() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    symbol = ShapeEnv().create_unbacked_symint()
    assert problem(T=symbol).has_symbols
    assert dispatch.choose(problem(T=symbol)) is cpu


def test_backends_get_every_option_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(
        dispatch, "choose", lambda *a: SimpleNamespace(fused_experts=lambda *a, **k: seen.update(k) or a[0])
    )
    layer = VARIANTS["plain"].build()
    moe_ops.fused_experts(*layer.args()[:5], activation="swiglu_oai", format="batched")
    assert (seen["scheme"], seen["alpha"], seen["limit"], seen["capacity"]) == ("fp32", 1.702, 7.0, 7)
    assert seen["weight_on_input"] is False and seen["glu_layout"] == "concat" and seen["backend"] is None


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_environment_variable_is_honoured() -> None:
    code = "import torch, moe_ops; from moe_ops import dispatch; print(dispatch.DEFAULT_BACKEND)"
    assert run_python(code, MOE_OPS_BACKEND="reference").stdout.strip() == "reference"


def test_environment_variable_with_an_unknown_name_fails_at_import() -> None:
    result = run_python("import moe_ops", MOE_OPS_BACKEND="cutlass")
    assert (
        "MOE_OPS_BACKEND must be one of ['cpu', 'reference', 'torch_grouped', 'triton'], got 'cutlass'" in result.stderr
    )


def test_import_and_cpu_calls_load_neither_triton_nor_inductor() -> None:
    code = (
        "import sys, torch, moe_ops\n"
        "moe_ops.fused_moe(torch.randn(2, 4), torch.randn(2, 3), torch.randn(3, 4, 4), torch.randn(3, 4, 2), top_k=1)\n"
        "heavy = ('triton.', 'transformers.', 'torch._inductor.')\n"
        "print([m for m in sys.modules if f'{m}.'.startswith(heavy)])"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fused_attention'"):
        moe_ops.fused_attention  # noqa: B018


def test_public_names_exist() -> None:
    from_passes = {"compile", "explain", "fuse"}
    assert all(callable(getattr(moe_ops, name)) for name in set(moe_ops.__all__) - from_passes)
    assert set(moe_ops.__all__) <= set(dir(moe_ops))


def test_torch_operators_and_public_functions_agree() -> None:
    layer = VARIANTS["plain"].build()
    wanted = torch.ops.moe_ops.fused_experts(*layer.args()[:5])
    assert torch.equal(moe_ops.fused_experts(*layer.args()[:5]), wanted)
