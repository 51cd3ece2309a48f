"""Choosing a backend: order, requests, refusals, the environment variable, and lazy imports."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import moe_ops
from meta.dims import LayerProblem
from meta.schemes import SCHEMES
from moe_ops import backends, choice
from moe_ops.backends import cpu
from moe_ops.ops import parse
from tests.ops.forked import forked
from tests.ops.layers import VARIANTS


def problem(**changes: object) -> LayerProblem:
    return replace(parse("fused_experts", **VARIANTS["plain"].build().tensors).problem, **changes)


def test_cpu_tensors_run_on_the_cpu_backend() -> None:
    assert choice.choose(problem()) is cpu
    assert choice.choose(problem(), "cpu") is cpu


def test_reference_by_name_only() -> None:
    assert backends.BACKENDS["reference"].device is None
    assert choice.choose(problem(), "reference").NAME == "reference"


def test_request_never_falls_back() -> None:
    with pytest.raises(
        ValueError, match=r"fused_experts: backend='triton' must accept the problem, got refusals: triton"
    ):
        choice.choose(problem(), "triton")


def test_unknown_backend_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of \['cpu', 'reference', 'triton'\], got 'x'"):
        choice.choose(problem(), "x")


def test_every_refusal_is_listed() -> None:
    with pytest.raises(ValueError) as caught:
        choice.choose(problem(device_type="xpu"))
    considered = [name for name, row in backends.BACKENDS.items() if row.device is not None]
    assert all(f"{name} does not serve xpu tensors" in str(caught.value) for name in considered)


def test_first_backend_that_implements_the_operator_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ModuleType("first")
    first.refuses, first.SERVED_SCHEMES = lambda problem: None, {"fp32"}
    monkeypatch.setitem(backends.BACKENDS, "triton", replace(backends.BACKENDS["triton"], device="cpu"))
    monkeypatch.setattr(backends, "load", lambda name: first if name == "triton" else cpu)
    assert choice._choose(problem(), None, "fused_experts") is cpu
    with pytest.raises(ValueError, match="triton does not implement fused_experts"):
        choice._choose(problem(), "triton", "fused_experts")
    first.fused_experts = cpu.fused_experts
    assert choice._choose(problem(), None, "fused_experts") is first
    first.refuses = lambda problem: "is asleep"
    with pytest.raises(ValueError, match="triton is asleep"):
        choice._choose(problem(), "triton", "fused_experts")


def test_missing_module_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(backends.BACKENDS["triton"], module="moe_ops.backends.no_such_module")
    monkeypatch.setitem(backends.BACKENDS, "triton", row)
    backends.load.cache_clear()
    assert "cannot be imported" in backends.load("triton")
    backends.load.cache_clear()


def test_choices_are_remembered() -> None:
    before = choice._choose_cached.cache_info().misses
    found = problem(T=123457)
    assert choice.choose(found) is choice.choose(replace(found))
    assert choice._choose_cached.cache_info().misses == before + 1


def test_symbolic_sizes_are_chosen_for_without_a_hash() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    symbol = ShapeEnv().create_unbacked_symint()
    assert problem(T=symbol).has_symbols
    assert choice.choose(problem(T=symbol)) is cpu


def test_backends_get_every_option_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    said = SimpleNamespace(fused_experts=lambda call: seen.append(call) or call.hidden_states.data)
    monkeypatch.setattr(choice, "choose", lambda *a: said)
    layer = VARIANTS["plain"].build()
    moe_ops.fused_experts(*layer.args()[:5], activation="swiglu_oai", format="batched")
    (call,) = seen
    assert call.experts.scheme is SCHEMES["fp32"] and call.experts.glu == ("swiglu_oai", 1.702, 7.0, "concat")
    assert call.capacity == 7 and call.weight_on_input is False and call.backend is None


def has_the_layer_alone(called: list[str]) -> ModuleType:
    """A backend without stages or routing; it notes that it was called."""
    module = ModuleType("layer_alone")
    module.refuses, module.SERVED_SCHEMES = lambda problem: None, {"fp32"}
    module.fused_experts = lambda call: called.append("fused_experts") or cpu.fused_experts(call)
    return module


@pytest.fixture
def layer_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a backend that takes the name "triton" and has ``fused_experts`` alone."""
    called: list[str] = []
    module, load = has_the_layer_alone(called), backends.load
    monkeypatch.setattr(backends, "load", lambda name: module if name == "triton" else load(name))
    choice._choose_cached.cache_clear()
    yield called
    choice._choose_cached.cache_clear()


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_training_with_a_requested_backend_chooses_the_stages_that_it_has_not(
    by: str, layer_alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "variable":
        monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    requests = {"backend": "triton"} if by == "argument" else {}
    layer = VARIANTS["plain"].build()
    arguments = [a.clone().requires_grad_() if i < 4 else a for i, a in enumerate(layer.args()[:5])]
    moe_ops.fused_experts(*arguments, **requests).square().sum().backward()
    assert layer_alone == []
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", None)
    wanted = [a.detach().clone().requires_grad_() if i < 4 else a for i, a in enumerate(layer.args()[:5])]
    moe_ops.fused_experts(*wanted).square().sum().backward()
    for got, want in zip(arguments[:4], wanted[:4], strict=True):
        assert torch.equal(got.grad, want.grad)


def test_the_variable_binds_the_operators_that_its_backend_implements(
    layer_alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    moe_ops.fused_topk(torch.randn(2, 4), top_k=1)
    layer = VARIANTS["plain"].build()
    moe_ops.fused_experts(*layer.args()[:5])
    assert layer_alone == ["fused_experts"]
    moe_ops.fused_experts(*layer.args()[:5], backend="cpu")
    assert layer_alone == ["fused_experts"], "an argument comes before the variable"


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_backend_refuses_a_scheme_that_it_does_not_list(name: str) -> None:
    module = backends.load(name)
    if isinstance(module, str):
        pytest.skip(module)
    on_device = problem(device_type="cpu" if name in ("cpu", "reference") else "cuda", scheme="int8_of_tomorrow")
    with pytest.raises(ValueError) as caught:
        choice.choose(on_device, name)
    listed = ", ".join(sorted(module.SERVED_SCHEMES))
    assert f"{name} serves the schemes {listed}, got int8_of_tomorrow" in str(caught.value)


def test_a_scheme_that_no_backend_serves_is_refused_by_all() -> None:
    with pytest.raises(ValueError, match=r"any backend must accept .*cpu serves .*got int8_of_tomorrow"):
        choice.choose(problem(scheme="int8_of_tomorrow"))


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_backends_list_schemes_that_exist(name: str) -> None:
    module = backends.load(name)
    if isinstance(module, str):
        pytest.skip(module)
    assert module.SERVED_SCHEMES <= set(SCHEMES)


#: Prints which operators the reference ran, then the operators' words or "ran".
CALLS_BY_VARIABLE = """
import torch, moe_ops
from moe_ops import reference

def noting(name, function):
    return lambda call: print(name) or function(call)

for name in ("fused_topk", "fused_experts"):
    setattr(reference, name, noting(name, getattr(reference, name)))
x, logits, up, down = torch.randn(2, 4), torch.randn(2, 3), torch.randn(3, 4, 4), torch.randn(3, 4, 2)
for options in {options}:
    try:
        weights, ids = moe_ops.fused_topk(logits, top_k=1)
        moe_ops.fused_experts(x, up, down, weights, ids, **options)
        print("ran")
    except ValueError as error:
        print(error)
"""


CPU_CALLS = """
import sys, torch, moe_ops
moe_ops.fused_moe(torch.randn(2, 4), torch.randn(2, 3), torch.randn(3, 4, 4), torch.randn(3, 4, 2), top_k=1)
heavy = ('triton.', 'transformers.', 'torch._inductor.')
print([m for m in sys.modules if f'{m}.'.startswith(heavy)])
"""
OF_ENVIRONMENT = "import os; os.environ['MOE_OPS_BACKEND'] = {!r}\n"
PROGRAMS = {
    "reference": OF_ENVIRONMENT.format("reference")
    + CALLS_BY_VARIABLE.replace("{options}", "({}, {'backend': 'cpu'})"),
    "triton": OF_ENVIRONMENT.format("triton") + CALLS_BY_VARIABLE.replace("{options}", "({},)"),
    "cutlass": OF_ENVIRONMENT.format("cutlass") + "import moe_ops",
    "cpu calls": CPU_CALLS,
}


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """Lines that each program wrote, in a process that has imported torch, and nothing of ours."""
    return {name: text.splitlines() for name, text in forked("import torch\n", PROGRAMS).items()}


def test_environment_variable_is_honoured(said: dict[str, list[str]]) -> None:
    wanted = ["fused_topk", "fused_experts", "ran", "fused_topk", "ran"]
    assert said["reference"] == wanted, "an argument comes before the variable"


def test_environment_variable_never_falls_back(said: dict[str, list[str]]) -> None:
    (refused,) = said["triton"]
    assert refused.startswith("fused_topk: MOE_OPS_BACKEND=triton must accept the problem, got refusals: triton")
    assert refused.endswith("Unset MOE_OPS_BACKEND."), "it takes no backend="


def test_environment_variable_with_an_unknown_name_fails_at_import(said: dict[str, list[str]]) -> None:
    error = said["cutlass"][-1]
    assert "MOE_OPS_BACKEND must be one of ['cpu', 'reference', 'triton'], got 'cutlass'" in error


def test_import_and_cpu_calls_load_neither_triton_nor_inductor(said: dict[str, list[str]]) -> None:
    assert said["cpu calls"] == ["[]"]


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fused_attention'"):
        moe_ops.fused_attention  # noqa: B018


def test_public_names_exist() -> None:
    assert all(callable(getattr(moe_ops, name)) for name in moe_ops.__all__)
    assert set(moe_ops._FROM_PASSES) <= set(moe_ops.__all__)
    assert set(moe_ops.__all__) <= set(dir(moe_ops))


def test_torch_operators_and_public_functions_agree() -> None:
    layer = VARIANTS["plain"].build()
    wanted = torch.ops.moe_ops.fused_experts(*layer.args()[:5], [], [])
    assert torch.equal(moe_ops.fused_experts(*layer.args()[:5]), wanted)
