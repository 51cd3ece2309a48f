"""Warm calls and call sites: as right as cold ones, seen by whoever watches the dispatcher, and nothing is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import counters, ops, runtime
from moe_ops.ops import LAUNCHERS, SIGNATURES
from tests.ops.calls import CALLS, Call
from tests.ops.layers import VARIANTS

E, K, H, I = 4, 2, 16, 24


def other(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same signature: other numbers where any number will do."""
    values = torch.rand(tensor.shape).abs() + 0.5 if tensor.is_floating_point() else tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(values)


def layer(T: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    x, logits = torch.randn(T, H).to(dtype), torch.randn(T, E)
    return x, logits, torch.randn(E, 2 * I, H).to(dtype), torch.randn(E, H, I).to(dtype)


def in_two_threads(work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_results_are_no_views(call: Call):
    """Which autograd would not let anybody write to; of a first call, of the one that is learnt from, of a warm one."""
    LAUNCHERS[call.op].forget()
    for _ in range(3):
        assert not any(result._is_view() for result in call.run())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_cast_around_a_call_changes_no_bit(call: Call):
    LAUNCHERS[call.op].forget()
    plain = call.run()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            around = call.run()
        for mine, theirs in zip(around, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_results_have_the_dtype_of_the_rule_under_another_default(monkeypatch: pytest.MonkeyPatch):
    call = CALLS["grouped_mm_glu-plain"]
    try:
        torch.set_default_dtype(torch.float64)
        assert call.run()[1].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_tensor_without_a_device_is_refused_by_a_warm_signature():
    """Its number is that of the CPU."""
    call = CALLS["fused_experts-fp8"]
    for _ in range(3):
        call.run()
    args = list(call.args)
    place = SIGNATURES["fused_experts"].positional.index("down_scales")
    args[place] = [scale.to("meta") for scale in args[place]]
    with pytest.raises(ValueError, match=r"fused_experts: down_scales\[0\] must be on cpu"):
        Call(call.op, tuple(args), call.kwargs).run()


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

    in_two_threads(work)
    assert not wrong


def site_of(call: Call, *varying: str) -> Any:
    """A site of calls like this one, and what it is given for tensors besides them."""
    many = [
        None if one is None else len(one) if isinstance(one, (list, tuple)) else runtime.TENSOR for one in call.args
    ]
    fixed = {name: value for name, value in call.kwargs.items() if name not in varying}
    return LAUNCHERS[call.op].site(many, varying, **fixed)


def launches(monkeypatch: pytest.MonkeyPatch, op: str = "fused_moe") -> list[str]:
    """A list that grows by one entry each time a signature is taken for a call."""
    taken: list[str] = []
    run = runtime.Launcher.__call__

    def call(self: runtime.Launcher, *args: Any, **kwargs: Any) -> Any:
        if self is LAUNCHERS[op]:
            taken.append(op)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(runtime.Launcher, "__call__", call)
    return taken


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_site_is_the_operator(call: Call, monkeypatch: pytest.MonkeyPatch):
    """The third call of a key, on other tensors, gives what the operator gives, and asks the launcher for nothing."""
    site = site_of(call)
    for _ in range(2):
        site((), *call.tensors)
    args = tree_map_only(torch.Tensor, other, call.args)
    changed = Call(call.op, args, call.kwargs)
    unknown = list(LAUNCHERS[call.op]._warm.values())[-1] is runtime._cold
    names = SIGNATURES[call.op].positional
    apart = any(
        name in ("up_proj", "up_weight") for name, one in zip(names, call.args, strict=False) if one is not None
    )
    taken = launches(monkeypatch, call.op)
    warm = site((), *changed.tensors)
    assert bool(taken) == (unknown or apart)  # halves apart are at another distance
    LAUNCHERS[call.op].forget()
    for mine, theirs in zip(warm if isinstance(warm, tuple) else (warm,), changed.run(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_default_device_is_not_that_of_a_site(call: Call, monkeypatch: pytest.MonkeyPatch):
    """Of a first call, of the one that is learnt from, of a warm one; what is counted in it, too."""
    monkeypatch.setattr(counters, "active", 1)
    site = site_of(call)
    expected = call.run()
    LAUNCHERS[call.op].forget()
    for _ in range(3):
        with torch.device("meta"):
            found = site((), *call.tensors)
        for mine, theirs in zip(found if isinstance(found, tuple) else (found,), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_a_default_device_is_not_that_of_compiled_code(format: str, grad: bool):
    def step(*tensors: torch.Tensor) -> torch.Tensor:
        return moe_ops.fused_moe(*tensors, top_k=K, format=format)

    torch._dynamo.reset()
    run, given = torch.compile(step, fullgraph=True), layer()
    expected = step(*given)
    tensors = [tensor.requires_grad_(grad) for tensor in given]
    for _ in range(3):
        with torch.device("meta"):
            found = run(*tensors)
            if grad:
                found.sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert not grad or all(tensor.grad.device.type == "cpu" for tensor in tensors)


LAYER = Call("fused_moe", layer(), {"top_k": K})


def test_keys_of_a_site(monkeypatch: pytest.MonkeyPatch):
    site = site_of(LAYER)
    cases = {T: layer(T) for T in (3, 5)}
    for _ in range(2):
        for T, case in cases.items():
            site((T,), *case)
    taken = launches(monkeypatch)
    for T, case in cases.items():
        torch.testing.assert_close(site((T,), *case), torch.ops.moe_ops.fused_moe(*case, top_k=K), rtol=0, atol=0)
    assert len(taken) == 2  # the operator's


def test_options_that_vary():
    """They are the beginning of a key; sizes follow."""
    x, _, up, down = layer(6)
    arguments = (x, up, down, torch.rand(6, K), torch.zeros(6, K, dtype=torch.int32))
    site = site_of(Call("fused_experts", arguments, {"format": "batched", "capacity": 2}), "capacity")
    for capacity in (1, 2, 9) * 3:
        expected = torch.ops.moe_ops.fused_experts(*arguments, format="batched", capacity=capacity)
        torch.testing.assert_close(site((capacity, 6), *arguments), expected, rtol=0, atol=0)


def test_sites_know_aligned_tensors_alone(monkeypatch: pytest.MonkeyPatch):
    """A record holds for addresses of which a kernel was told how many zeros they end with."""
    site = site_of(LAYER)
    for _ in range(3):
        site((), *LAYER.args)
    x, *others = LAYER.args
    beside = torch.randn(x.numel() + 1)[1:].view(x.shape)
    assert beside.data_ptr() % runtime.ALIGNED
    expected = torch.ops.moe_ops.fused_moe(beside, *others, top_k=K)
    taken = launches(monkeypatch)
    for many in (1, 2, 3):
        torch.testing.assert_close(site((), beside, *others), expected, rtol=0, atol=0)
        assert len(taken) == many
    site((), *LAYER.args)
    assert len(taken) == 3


def test_sites_forget(monkeypatch: pytest.MonkeyPatch):
    site = site_of(LAYER)
    for _ in range(3):
        site((), *LAYER.args)
    runs = rules_run(monkeypatch, "fused_moe")
    site((), *LAYER.args)
    assert not runs
    LAUNCHERS["fused_moe"].forget()
    for many in (1, 2, 2):
        site((), *LAYER.args)
        assert len(runs) == many


def test_sites_are_checked_by_debug():
    arguments = (*layer()[:1], *layer()[2:], torch.rand(3, K), torch.zeros(3, K, dtype=torch.int32))
    site = site_of(Call("fused_experts", arguments, {}))
    for _ in range(3):
        site((), *arguments)
    with moe_ops.debug(), pytest.raises(ValueError, match="topk_ids must be in"):
        site((), *arguments[:-1], arguments[-1] + E)


def test_sites_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime, "MOST_KEYS", 4)
    site = site_of(LAYER)
    for T in range(1, 20):
        for _ in range(2):
            site((T,), *layer(T))
    gc.collect()
    (known,) = [one.known for one in LAUNCHERS["fused_moe"]._sites if one.known]
    assert list(known) == [(T,) for T in (16, 17, 18, 19)]


def test_sites_end_with_their_code():
    sites = LAUNCHERS["moe_unpermute"]._sites
    gc.collect()
    before = len(sites)
    site = LAUNCHERS["moe_unpermute"].site((runtime.TENSOR,) * 3, ())
    assert len(sites) == before + 1
    del site
    gc.collect()
    assert len(sites) == before


@pytest.mark.parametrize("op", ["fused_experts", "grouped_mm_glu"])
def test_halves_apart_are_known_by_their_addresses(op: str):
    """Kernels are given the distance between them."""
    x, _, stacked, down = layer()
    ids = torch.zeros(3, K, dtype=torch.int32)
    pairs = [[half.contiguous() for half in stacked.chunk(2, 1)] for _ in range(2)]

    def arguments(gate: torch.Tensor, up: torch.Tensor) -> tuple[Any, ...]:
        if op == "grouped_mm_glu":
            return x, gate, torch.tensor([3, 3, 3, 3], dtype=torch.int32), None, up
        return x, gate, down, torch.rand(3, K), ids, None, None, up

    site = site_of(Call(op, arguments(*pairs[0]), {"glu_layout": "separate"}))
    for gate, up in (pairs[0], pairs[1], (pairs[0][0], pairs[1][1])) * 3:
        given = arguments(gate, up)
        found = site((), *(one for one in given if one is not None))
        torch.testing.assert_close(found, getattr(torch.ops.moe_ops, op)(*given, glu_layout="separate"))
    (known,) = [one.known for one in LAUNCHERS[op]._sites if one.known]
    assert len(known) == 3 and {key[1:] for key in known} >= {(up.data_ptr(), gate.data_ptr()) for gate, up in pairs}


def test_one_tensor_as_two_arguments_of_a_site():
    square = torch.randn(E, H, H)
    ids, chosen = torch.zeros(3, K, dtype=torch.int32), torch.rand(3, K)
    one = torch.randn(3, H)
    site = site_of(Call("fused_experts", (one, square, square, chosen, ids), {"glu_layout": "none"}))
    for _ in range(3):
        site((), one, square, square, chosen, ids)
    arguments = (one, torch.randn(E, H, H), torch.randn(E, H, H), chosen, ids)
    expected = moe_ops.fused_experts(*arguments, glu_layout="none", backend="reference")
    torch.testing.assert_close(site((), *arguments), expected, rtol=1e-3, atol=1e-3)


def test_a_size_of_one_has_any_stride():
    """Nobody asserts it: what was learnt with another one is as right."""
    x, logits, up, down = layer(1)
    site = site_of(LAYER)
    for _ in range(3):
        site((), x, logits, up, down)
    for stride in (0, 1, 7, H):
        view = x.as_strided((1, H), (stride, 1))
        expected = moe_ops.fused_moe(view, logits, up, down, top_k=K, backend="reference")
        torch.testing.assert_close(site((), view, logits, up, down), expected, rtol=1e-3, atol=1e-3)


def test_two_threads_at_a_site():
    """And what they learn is forgotten now and then."""
    site = site_of(LAYER)
    cases = [layer(T) for T in (1, 2, 3, 4)]
    expected = [moe_ops.fused_moe(*case, top_k=K, backend="reference") for case in cases]
    wrong: list[int] = []

    def work() -> None:
        for turn in range(200):
            number = turn % len(cases)
            if turn % 50 == 0:
                LAUNCHERS["fused_moe"].forget()
            if not torch.allclose(site((number + 1,), *cases[number]), expected[number], atol=1e-3):
                wrong.append(number)

    in_two_threads(work)
    assert not wrong


def test_results_are_as_their_fake():
    """Compiled code does not ask, so what it would learn from is."""
    results = {"contiguous": torch.empty(4, 4), "one row": torch.empty(8, 4)[::8], "columns": torch.empty(4, 4).t()}
    for name, result in results.items():
        launcher = runtime.Launcher(lambda x: x, lambda call, made=result: (lambda x: (x, made), None), ())
        site = launcher.site((runtime.TENSOR,), ())
        if name == "columns":
            with pytest.raises(RuntimeError, match=r"must be contiguous .* got strides \(1, 4\) and shape \(4, 4\)"):
                site((), torch.empty(4))
        else:
            assert site((), torch.empty(4))[1] is result


def test_no_tensor_is_kept_by_a_site():
    tensors = list(layer())
    site = site_of(LAYER)
    for _ in range(3):
        tensors.append(site((), *tensors[:4]))
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert not any(reference() is not None for reference in alive)


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


def steps_of_a_layer(x: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    prepared = moe_ops.prepare(x, *moe_ops.fused_topk(logits, top_k=K), num_experts=E)
    return moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared)


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap_of_grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x.unsqueeze(0)),
    "grad_of_vmap": lambda f, x: torch.func.grad(lambda x: torch.func.vmap(f)(x.unsqueeze(0)).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("how", ["whole", "steps"])
def test_functorch_is_not_passed_by(how: str, transform: str):
    """torch has no transforms of custom operators; below autograd the gradient would be lost instead."""
    x, logits, up, down = layer()
    run = partial(moe_ops.fused_moe, top_k=K) if how == "whole" else steps_of_a_layer
    for _ in range(3):
        run(x, logits, up, down)
    said = r"\w+: arguments must not be differentiated by torch.func, got .* torch.autograd.grad"
    with pytest.raises(ValueError, match=said):
        TRANSFORMS[transform](lambda x: run(x, logits, up, down), x)


class Gradient(torch.nn.Module):
    """`torch.func.grad` of a layer, to capture."""

    def __init__(self, run: Any, *others: torch.Tensor) -> None:
        super().__init__()
        self.run, self.others = run, others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: self.run(x, *self.others).sum())(x)


CAPTURES: dict[str, Any] = {
    "compiled": lambda model, x: torch.compile(model, backend="eager")(x),
    "exported": lambda model, x: torch.export.export(model, (x,)),
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("how", ["whole", "steps"])
def test_functorch_is_refused_in_our_words_while_capturing(how: str, capture: str) -> None:
    torch._dynamo.reset()
    x, *others = layer()
    model = Gradient(partial(moe_ops.fused_moe, top_k=K) if how == "whole" else steps_of_a_layer, *others)
    with pytest.raises(Exception, match=r"must not be differentiated by torch.func, got .* torch.autograd.grad"):
        CAPTURES[capture](model, x)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "compiled"])
def test_vmap_takes_no_list_apart(captured: bool) -> None:
    tensors = VARIANTS["fp8"].build().tensors
    x, up, down, *routing = list(tensors.values())[:5]
    scales, down_scales = tensors["gate_up_scales"], tensors["down_scales"]

    def run(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        options = {"gate_up_scales": [scale], "down_scales": down_scales, "scheme": "fp8_block128"}
        return moe_ops.fused_experts(x, up, down, *routing, **options)

    two, batch = torch.stack([x, 2 * x]), torch.stack([scales[0], 2 * scales[0]])
    of_each, of_tokens = torch.vmap(run), torch.vmap(run, in_dims=(0, None))
    if captured:
        torch._dynamo.reset()
        of_each, of_tokens = (torch.compile(one, backend="eager", fullgraph=True) for one in (of_each, of_tokens))
    with pytest.raises(
        Exception, match=r"gate_up_scales must be the same for all elements of torch.vmap.* Call it once"
    ):
        of_each(two, batch)
    wanted = torch.stack([run(one, scales[0]) for one in two])
    torch.testing.assert_close(of_tokens(two, scales[0]), wanted, rtol=0, atol=0)


def test_what_functorch_does_not_differentiate_is_left_alone():
    x, logits, up, down = layer()
    run = partial(moe_ops.fused_moe, top_k=K)
    wanted = run(x, logits, up, down)
    torch.testing.assert_close(torch.func.functionalize(run)(x, logits, up, down), wanted, rtol=0, atol=0)
    found = torch.func.grad(lambda scale: (run(x, logits, up, down) * scale).sum())(torch.ones(()))
    torch.testing.assert_close(found, wanted.sum())


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_bodies_are_no_frames_to_capture(grad: bool):
    """A mode ends the compilation of a function whose graph is called under it; then Dynamo looks at what it calls."""

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        return moe_ops.fused_moe(*tensors, top_k=K)

    torch._dynamo.reset()
    given = [tensor.requires_grad_(grad) for tensor in layer()]
    torch.compile(step, backend="eager")(*given)
    with Seen():
        torch.compile(step, backend="eager")(*given)
    torch._dynamo.utils.counters.clear()
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return aot_eager(gm, inputs)

    torch.compile(step, backend=backend)(*given)
    called = [node.target for gm in graphs for node in gm.graph.nodes if node.op == "call_function"]
    assert called in ([], [torch.ops.moe_ops.fused_moe])  # that of `step`, which torch 2.14 compiles again
    assert not torch._dynamo.utils.counters["graph_break"]


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
