"""Warm calls: as right as cold ones, seen by whoever watches the dispatcher, and nothing is kept for them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import ops, runtime
from moe_ops.ops import LAUNCHERS
from tests.ops.calls import CALLS, Call

E, K, H, I = 4, 2, 16, 24


def other(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same signature: other numbers where any number will do."""
    values = torch.rand(tensor.shape).abs() + 0.5 if tensor.is_floating_point() else tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(values)


def layer(T: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    x, logits = torch.randn(T, H).to(dtype), torch.randn(T, E)
    return x, logits, torch.randn(E, 2 * I, H).to(dtype), torch.randn(E, H, I).to(dtype)


def rules_run(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """A list that grows by one entry each time the rule of `name` runs."""
    runs: list[str] = []
    rule = ops.RULES[name]
    monkeypatch.setitem(ops.RULES, name, lambda flat: runs.append(name) or rule(flat))
    return runs


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_warm_is_cold(call: Call):
    """The third call of a signature, on other tensors, gives what a first one gives."""
    for _ in range(2):
        call.run()
    args = tree_map_only(torch.Tensor, other, call.args)
    warm = Call(call.op, args, call.kwargs).run()
    LAUNCHERS[call.op].forget()
    cold = Call(call.op, args, call.kwargs).run()
    for mine, theirs in zip(warm, cold, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_rule_runs_twice(monkeypatch: pytest.MonkeyPatch):
    runs = rules_run(monkeypatch, "fused_moe")
    for _ in range(5):
        moe_ops.fused_moe(*layer(), top_k=K)
    assert len(runs) == 2


CHANGES: dict[str, Any] = {
    "tokens": lambda x, logits, up, down: (torch.randn(5, H), torch.randn(5, E), up, down),
    "dtype": lambda x, logits, up, down: (x.double(), logits, up.double(), down.double()),
    "logits": lambda x, logits, up, down: (x, logits.bfloat16(), up, down),
    "strides": lambda x, logits, up, down: (x, logits, up.transpose(1, 2).contiguous().transpose(1, 2), down),
    "experts": lambda x, logits, up, down: (x, torch.randn(3, 6), torch.randn(6, 2 * I, H), torch.randn(6, H, I)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_signature(monkeypatch: pytest.MonkeyPatch, change: str):
    """What is learnt for one signature is not used for another."""
    for _ in range(3):
        arguments = layer()
        moe_ops.fused_moe(*arguments, top_k=K)
    runs = rules_run(monkeypatch, "fused_moe")
    changed = CHANGES[change](*arguments)
    found = moe_ops.fused_moe(*changed, top_k=K)
    assert len(runs) == 1
    torch.testing.assert_close(found, moe_ops.fused_moe(*changed, top_k=K, backend="reference"), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("option", ["top_k", "activation", "renormalize", "scale"])
def test_another_option(option: str):
    value = {"top_k": 1, "activation": "gelu", "renormalize": False, "scale": 2.0}[option]
    arguments = layer()
    for _ in range(3):
        moe_ops.fused_moe(*arguments, top_k=K)
    options = {"top_k": K, option: value}
    expected = moe_ops.fused_moe(*arguments, **options, backend="reference")
    torch.testing.assert_close(moe_ops.fused_moe(*arguments, **options), expected, rtol=1e-3, atol=1e-3)


def test_one_tensor_as_two_arguments():
    """Which argument a tensor is cannot be told from such a call, and later ones pass two."""
    square = torch.randn(E, H, H)
    ids = torch.zeros(3, K, dtype=torch.int32)
    for _ in range(3):
        one = torch.randn(3, H)
        moe_ops.fused_experts(one, square, square, torch.rand(3, K), ids, glu_layout="none")
    arguments = (one, torch.randn(E, H, H), torch.randn(E, H, H), torch.rand(3, K), ids)
    found = moe_ops.fused_experts(*arguments, glu_layout="none")
    expected = moe_ops.fused_experts(*arguments, glu_layout="none", backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_signatures_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime, "MOST_SIGNATURES", 4)
    for T in range(1, 20):
        moe_ops.fused_moe(*layer(T), top_k=K)
    assert len(LAUNCHERS["fused_moe"]._warm) == 4


@pytest.mark.parametrize("name", [name for name in CALLS if name.endswith(("-plain", "-fp8", "-separate_bias"))])
def test_no_tensor_is_kept(name: str):
    """Nor one in a list, nor one of a result."""
    call = Call(CALLS[name].op, tree_map_only(torch.Tensor, other, CALLS[name].args), CALLS[name].kwargs)
    for _ in range(3):
        results = call.run()
    alive = [weakref.ref(tensor) for tensor in (*call.tensors, *results)]
    del call, results
    gc.collect()
    assert alive and not any(reference() is not None for reference in alive)


def test_two_threads():
    cases = [layer(T) for T in (1, 2, 3, 4)]
    expected = [moe_ops.fused_moe(*case, top_k=K, backend="reference") for case in cases]
    wrong: list[int] = []

    def work() -> None:
        for turn in range(100):
            number = turn % len(cases)
            if not torch.allclose(moe_ops.fused_moe(*cases[number], top_k=K), expected[number], atol=1e-3):
                wrong.append(number)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_debug_checks_warm_calls():
    x, _, up, down = layer()
    ids = torch.zeros(3, K, dtype=torch.int32)
    for _ in range(3):
        moe_ops.fused_experts(x, up, down, torch.rand(3, K), ids)
    with moe_ops.debug(), pytest.raises(ValueError, match="topk_ids must be in"):
        moe_ops.fused_experts(x, up, down, torch.rand(3, K), ids + E)


@pytest.mark.parametrize("bad", ["sparse", "shape"])
def test_bad_input_is_refused_every_time(bad: str):
    x, logits, up, down = layer()
    x = x.to_sparse() if bad == "sparse" else torch.randn(3, H + 1)
    for _ in range(4):
        with pytest.raises(ValueError, match="must be"):
            moe_ops.fused_moe(x, logits, up, down, top_k=K)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def flops_seen(call: Any) -> bool:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() > 0


def mode_sees(call: Any) -> bool:
    with Seen() as seen:
        call()
    return "moe_ops.fused_moe.default" in seen.ops


def profiler_sees(call: Any) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any(event.key == "moe_ops::fused_moe" for event in profile.key_averages())


OBSERVERS = {"flop_counter": flops_seen, "dispatch_mode": mode_sees, "profiler": profiler_sees}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_warm_calls_pass_the_dispatcher(observer: str, grad: bool):
    arguments = layer()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            moe_ops.fused_moe(*arguments, top_k=K)
        assert OBSERVERS[observer](lambda: moe_ops.fused_moe(*arguments, top_k=K))


def test_warm_calls_differentiate():
    x, logits, up, down = layer()
    for _ in range(3):
        moe_ops.fused_moe(x, logits, up, down, top_k=K)
    x.requires_grad_()
    moe_ops.fused_moe(x, logits, up, down, top_k=K).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_functorch_is_not_passed_by():
    """torch has no transforms of custom operators, and says so; below autograd the gradient would be lost instead."""
    x, logits, up, down = layer()
    for _ in range(3):
        moe_ops.fused_moe(x, logits, up, down, top_k=K)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: moe_ops.fused_moe(x, logits, up, down, top_k=K).sum())(x)


@pytest.mark.parametrize("value", [None, True, 1.0, "grouped"], ids=str)
def test_a_default_of_another_type_is_no_default(value: Any):
    """1 == True == 1.0: what is left out for speed must be the default itself."""
    _, kept = ops.SIGNATURES["fused_moe"].without_defaults((), {"num_groups": value, "renormalize": 1, "scale": 1})
    assert kept == {"num_groups": value, "renormalize": 1, "scale": 1}


class Wrapped(torch.Tensor):
    """A subclass may want to know."""


PLAIN: dict[str, tuple[bool, Any]] = {
    "plain": (True, lambda x, up: (x, x, up, up, (), [])),
    "parameters": (True, lambda x, up: (x, x, torch.nn.Parameter(up, requires_grad=False), up, (), [])),
    "optional_none": (True, lambda x, up: (x, x, up, up, (), [], None, None, up)),
    "required_none": (False, lambda x, up: (x, x, None, up, (), [])),
    "gradient": (False, lambda x, up: (x, x, up.requires_grad_(), up, (), [])),
    "gradient_in_a_list": (False, lambda x, up: (x, x, up, up, [up.clone().requires_grad_()], [])),
    "subclass": (False, lambda x, up: (x.as_subclass(Wrapped), x, up, up, (), [])),
    "tensor_for_a_list": (False, lambda x, up: (x, x, up, up, up, [])),
    "no_tensor": (False, lambda x, up: (x, x, up, [[1.0]], (), [])),
}


@pytest.mark.parametrize("name", PLAIN)
def test_who_may_pass_by_autograd(name: str):
    expected, build = PLAIN[name]
    assert ops.SIGNATURES["fused_moe"].are_plain(build(torch.randn(3), torch.randn(3))) is expected


def test_function_modes_are_not_passed_by():
    with torch.device("cpu"):
        assert not ops.SIGNATURES["fused_moe"].are_plain((torch.randn(3),))
