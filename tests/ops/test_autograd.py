"""Gradients against float64 autograd of the plain formulas, eager and compiled; errors where there is no gradient."""

from __future__ import annotations

import runpy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from meta import activations
from meta.activations import ACTIVATIONS
from meta.dims import RECOMPUTE
from meta.routing import ROUTINGS, route
from moe_ops import reference, rows
from moe_ops.backends import cpu
from moe_ops.ops import parse
from tests.ops.calls import CALLS, DIFFERENTIABLE, Call, covering, with_grad
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, Layer, Variant, dense_formula, relative_error

NAMES = ("hidden_states", "gate_up_proj", "down_proj", "up_proj", "topk_weights", "gate_up_bias", "down_bias")
TRAINABLE = [name for name, variant in VARIANTS.items() if variant.scheme is None]


def leaves(layer: Layer) -> Layer:
    def leaf(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or name not in NAMES:
            return tensor
        return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()

    return Layer({name: leaf(name, tensor) for name, tensor in layer.tensors.items()}, layer.options)


def gradients(layer: Layer, function: Any, grad: Tensor) -> dict[str, Tensor]:
    layer = leaves(layer)
    function(layer).backward(grad.to(layer.tensors["hidden_states"].dtype))
    return {name: layer.tensors[name].grad for name in NAMES if layer.tensors.get(name) is not None}


def fused(layer: Layer) -> Tensor:
    return torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options)


def check_gradients(layer: Layer, function: Any) -> None:
    grad = torch.randn(layer.tensors["hidden_states"].shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(layer.tensors["hidden_states"].dtype)
    got = gradients(layer, function, grad)
    wanted = gradients(layer.float64(), dense_formula, grad)
    plain = gradients(layer, dense_formula, grad)
    for name, value in wanted.items():
        assert got[name].dtype == layer.tensors[name].dtype
        assert_accurate(got[name], value, plain[name], dtype=grad.dtype, what=name)


@pytest.mark.parametrize("name", TRAINABLE)
def test_experts_gradients(name: str) -> None:
    check_gradients(VARIANTS[name].build(), fused)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_experts_gradients_of_a_requested_backend(backend: str) -> None:
    layer = VARIANTS["gpt_oss"].build()
    layer.options["backend"] = backend
    plain = Layer(layer.tensors, {k: v for k, v in layer.options.items() if k != "backend"})
    grad = torch.randn_like(layer.tensors["hidden_states"])
    got, wanted = gradients(layer, fused, grad), gradients(plain.float64(), dense_formula, grad)
    assert all(relative_error(got[name], wanted[name]) <= 1e-5 for name in wanted)


ALONE = [
    (name, of)
    for name in ("bias", "separate_bias", "weight_on_input_bias_bf16")
    for of in NAMES
    if of != "up_proj" or name == "separate_bias"
]


@pytest.mark.parametrize("gathers", [False, True], ids=["copied", "gathered"])
@pytest.mark.parametrize(("name", "of"), ALONE, ids="-".join)
def test_a_gradient_alone_has_the_same_bits(name: str, of: str, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others need is left out; whether a backend's weight products copy tokens or gather them."""
    layer = leaves(VARIANTS[name].build())
    grad = torch.randn_like(layer.tensors["hidden_states"])
    inputs = [layer.tensors[of] for of in NAMES if layer.tensors[of] is not None]
    wanted = dict(zip(map(id, inputs), torch.autograd.grad(fused(layer), inputs, grad), strict=True))
    for question in ("gathers", "gathers_any_number"):
        monkeypatch.setattr(rows, question, lambda *sizes: gathers)
    alone = {key: value.detach() if isinstance(value, Tensor) else value for key, value in layer.tensors.items()}
    alone[of] = layer.tensors[of]
    (found,) = torch.autograd.grad(fused(Layer(alone, layer.options)), [layer.tensors[of]], grad)
    assert torch.equal(found, wanted[id(layer.tensors[of])])


COMPILED = ["plain", "gpt_oss", "weight_on_input", "batched_overflow", "expert_map_bias", "separate_bias"]


@pytest.mark.parametrize("name", COMPILED)
def test_experts_gradients_compiled(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True, dynamic=True)
    check_gradients(VARIANTS[name].build(), compiled)


def test_experts_gradients_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    check_gradients(VARIANTS["bias"].build(), torch.compile(fused, fullgraph=True))


def test_experts_pass_gradcheck() -> None:
    layer = leaves(Variant(T=3, E=3, K=2, H=4, I=3, dtype=torch.float64, bias=True, ids="minus").build())
    layer.tensors["topk_weights"] = layer.tensors["topk_weights"].detach().double().requires_grad_()
    inputs = tuple(layer.tensors[name] for name in NAMES)

    def function(*tensors: Tensor) -> Tensor:
        return fused(Layer({**layer.tensors, **dict(zip(NAMES, tensors, strict=True))}, layer.options))

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("frozen", ["hidden_states", "gate_up_proj", "down_proj", "topk_weights"])
def test_frozen_arguments_get_no_gradient(frozen: str) -> None:
    layer = leaves(VARIANTS["plain"].build())
    layer.tensors[frozen] = layer.tensors[frozen].detach()
    fused(layer).sum().backward()
    names = [name for name in NAMES if layer.tensors[name] is not None]
    assert [name for name in names if layer.tensors[name].grad is None] == [frozen]


def test_experts_without_rows_get_zero_gradients() -> None:
    layer = leaves(VARIANTS["one_expert"].build())
    fused(layer).sum().backward()
    grad = layer.tensors["gate_up_proj"].grad
    assert torch.equal(grad[[0, 1, 3, 4, 5]], torch.zeros_like(grad[1:])) and grad[2].abs().max() > 0


def test_garbage_past_the_last_row_stays_out_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU kernels leave rows past offsets[-1] uninitialised: poison them."""
    layer = VARIANTS["expert_map_bias"].build()
    grad = torch.randn_like(layer.tensors["hidden_states"])
    wanted = gradients(layer, fused, grad)

    def poison(rows: Tensor, offsets: Tensor) -> Tensor:
        return rows.index_fill(0, torch.arange(int(offsets[-1]), rows.shape[0]), float("nan"))

    permute, mm, gathered = cpu.moe_permute, cpu.grouped_mm, cpu.gathered_mm

    def moe_permute(call: Any) -> Any:
        rows, offsets, pair_to_row = permute(call)
        return poison(rows, offsets), offsets, pair_to_row

    monkeypatch.setattr(cpu, "moe_permute", moe_permute)
    monkeypatch.setattr(cpu, "grouped_mm", lambda call: poison(mm(call), call.extents))
    monkeypatch.setattr(cpu, "gathered_mm", lambda call: poison(gathered(call), call.extents))
    got = gradients(layer, fused, grad)
    for name, value in wanted.items():
        assert relative_error(got[name], value) <= 1e-5, name


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("op", ["fused_experts", "fused_moe"])
def test_errors_name_what_was_called(op: str, how: str) -> None:
    """Not the operator that saves what the gradient reads."""
    x, up, down = torch.randn(3, 16, requires_grad=True), torch.randn(4, 64, 16), torch.randn(4, 32, 16)

    def call(x: torch.Tensor) -> torch.Tensor:
        if op == "fused_moe":
            return moe_ops.fused_moe(x, x[:, :4], up, down, top_k=2)
        return moe_ops.fused_experts(x, up, down, torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32))

    torch.compiler.reset()
    run = call if how == "eager" else torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"{op}: down_proj must be \[E=4, H=16, I=32\]") as caught:
        run(x)
    assert "fused_experts_saving: " not in str(caught.value)


ROUTERS = {
    "more logits": (dict(), 8, r"router_logits must be \[T=3, E=4\], got \[3, 8\]"),
    "fewer logits": (dict(), 3, r"router_logits must be \[T=3, E=4\], got \[3, 3\]"),
    "logits of held experts": (
        dict(expert_map=torch.arange(6)), 4, r"router_logits must be \[T=3, E_global=6\], got \[3, 4\]",
    ),
    "top_k": (dict(top_k=9), 4, "top_k must be <= E=4, got 9"),
    "routing": (dict(routing="x"), 4, "routing must be one of"),
    "bias": (dict(correction_bias=torch.ones(3)), 4, r"correction_bias must be \[E=4\]"),
}  # fmt: skip


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_in_training_is_refused_as_without_gradients(name: str, how: str) -> None:
    """Its ids of experts that are not there would be left out without a word."""
    options, experts, words = ROUTERS[name]
    x, logits = torch.randn(3, 16), torch.randn(3, experts, requires_grad=True)
    up, down = torch.randn(4, 64, 16), torch.randn(4, 16, 32)

    def call(logits: torch.Tensor) -> torch.Tensor:
        return moe_ops.fused_moe(x, logits, up, down, **{"top_k": 2, **options})

    torch.compiler.reset()
    run = call if how == "eager" else torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"fused_moe: {words}"):
        run(logits)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("scales", ["gate_up_scales", "down_scales"])
def test_scales_beside_float_weights_are_refused_in_training(scales: str, how: str) -> None:
    """They would be left out without a word, as the part that trains takes none."""
    x, up, down = torch.randn(3, 16, requires_grad=True), torch.randn(4, 64, 16), torch.randn(4, 16, 32)
    options = {scales: [torch.ones(4, 1, 1)]}

    def call(x: torch.Tensor) -> torch.Tensor:
        return moe_ops.fused_experts(x, up, down, torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32), **options)

    torch.compiler.reset()
    run = call if how == "eager" else torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"fused_experts: {scales} must be empty for scheme 'fp32', got 1 tensors"):
        run(x)


RECOMPUTED = (
    "plain", "bias", "bf16", "gpt_oss", "separate_bias", "weight_on_input", "expert_map_bias", "batched", "no_tokens",
)  # fmt: skip


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_is_computed_again_has_the_same_bits(name: str, recompute: str) -> None:
    layer = VARIANTS[name].build()
    again = Layer(layer.tensors, {**layer.options, "recompute": recompute})
    grad = torch.randn_like(layer.tensors["hidden_states"])
    assert torch.equal(fused(again), fused(layer))
    wanted, got = (gradients(one, fused, grad) for one in (layer, again))
    assert wanted.keys() == got.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


class Dispatched(TorchDispatchMode):
    """Names of the operators that torch's dispatcher gets to see."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_backward_is_our_operators_alone(frozen: bool) -> None:
    """Whatever else it called would be another launch on a GPU."""
    x, logits, w1, w2 = torch.randn(5, 16), torch.randn(5, 4), torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    leaves = [t.requires_grad_() for t in ((x, logits) if frozen else (x, logits, w1, w2))]
    out = moe_ops.fused_moe(x, logits, w1, w2, top_k=2)
    grad = torch.randn(5, 16)
    with Dispatched() as seen:
        torch.autograd.grad(out, leaves, grad)
    steps = ["fused_experts_backward", "fused_experts_backward_first", *([] if frozen else ["grouped_wgrad"])]
    assert [name.removesuffix(".default") for name in seen.names] == [
        f"moe_ops.{step}" for step in (*steps, "fused_topk_backward")
    ]


@pytest.mark.parametrize(("recompute", "kept"), [(None, 7), ("activation", 2), ("all", 0)])
def test_what_a_forward_keeps(recompute: str | None, kept: int) -> None:
    """Bytes beyond the arguments: h, and three int32 lists of places."""
    layer = leaves(VARIANTS["plain"].build())
    arguments = {value.untyped_storage().data_ptr() for value in layer.tensors.values() if isinstance(value, Tensor)}
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in arguments:
            found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused(Layer(layer.tensors, {**layer.options, "recompute": recompute}))
    (T, K), (E, N, _) = layer.tensors["topk_ids"].shape, layer.tensors["gate_up_proj"].shape
    h, places = T * K * N * 4, 4 * (E + 2 * T * K)
    wanted = {7: h + places, 2: places, 0: 0}[kept]
    assert sum(tensor.numel() * tensor.element_size() for tensor in found) == wanted


@pytest.mark.parametrize("recompute", [None, *RECOMPUTE])
def test_what_a_compiled_forward_keeps(recompute: str | None) -> None:
    """torch's partitioner neither keeps what is to be computed again nor computes again what is kept."""
    torch._dynamo.reset()
    graphs: dict[str, list[Any]] = {}

    def compiler(name: str) -> Any:
        def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs[name] = list(graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return record

    layer = leaves(VARIANTS["plain"].build())
    options = {**layer.options, "recompute": recompute}

    def step(x: Tensor) -> Tensor:
        return fused(Layer({**layer.tensors, "hidden_states": x.sin()}, options)).cos()

    backend = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    torch.compile(step, backend=backend, fullgraph=True)(layer.tensors["hidden_states"]).sum().backward()
    called = {name: [str(node.target).split(".")[1] for node in nodes if "moe_ops" in str(node.target)]
              for name, nodes in graphs.items()}  # fmt: skip
    again = ["sort_pairs"] if recompute == "all" else []
    steps = ["fused_experts_backward", "fused_experts_backward_first", "grouped_wgrad"]
    assert called == {"forward": ["fused_experts_saving"], "backward": [*again, *steps]}
    (results,) = graphs["forward"][-1].args
    rows = layer.tensors["topk_ids"].numel()
    h = [node for node in results if node.meta["val"].shape[:1] == (rows,) and node.meta["val"].dim() == 2]
    assert len(h) == (recompute is None)


@pytest.mark.parametrize("name", ["plain", "empty_experts", "no_tokens"])
def test_weight_gradient_equals_the_reference(name: str) -> None:
    rows, _, offsets, *_ = CALLS[f"grouped_mm-{name}"].args
    call = parse("grouped_wgrad", torch.randn(rows.shape[0], 5), rows, offsets)
    got, wanted = cpu.grouped_wgrad(call), reference.grouped_wgrad(call)
    assert got.shape == wanted.shape and relative_error(got, wanted) <= 1e-6


def topk_options(name: str) -> dict[str, Any]:
    groups = {"num_groups": 4, "topk_groups": 2} if ROUTINGS[name].group else {}
    return {"top_k": 3, "routing": name, **groups}


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalised"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_topk_gradients(name: str, renormalize: bool) -> None:
    options = {**topk_options(name), "renormalize": renormalize, "renorm_eps": 0.01, "scale": 2.5}
    logits = torch.randn(6, 12, requires_grad=True)
    bias = torch.randn(12, requires_grad=True) if ROUTINGS[name].supports_bias else None
    grad = torch.randn(6, 3)
    moe_ops.fused_topk(logits, bias, **options)[0].backward(grad)
    gold = logits.detach().double().requires_grad_()
    route(gold, None if bias is None else bias.detach(), dtype=torch.float64, **options)[0].backward(grad.double())
    assert relative_error(logits.grad, gold.grad) <= 2e-6
    assert bias is None or bias.grad is None


@pytest.mark.parametrize("name", ROUTINGS)
def test_topk_gradients_compiled(name: str) -> None:
    torch._dynamo.reset()
    options = topk_options(name)

    def loss(logits: Tensor) -> Tensor:
        return moe_ops.fused_topk(logits, **options)[0].square().sum()

    logits = torch.randn(6, 12, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss(logits), logits)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    (got,) = torch.autograd.grad(compiled(logits), logits)
    assert relative_error(got, wanted) <= 1e-6


@pytest.mark.parametrize("routing", ["sigmoid", "topk_sigmoid"])
def test_topk_gradients_of_weights_whose_squares_are_0(routing: str) -> None:
    logits = torch.tensor([[-60.0, -61.0, -70.0]], requires_grad=True)
    grad = torch.tensor([[1.0, -0.5]])
    moe_ops.fused_topk(logits, top_k=2, routing=routing)[0].backward(grad)
    gold = logits.detach().double().requires_grad_()
    route(gold, None, top_k=2, routing=routing, dtype=torch.float64)[0].backward(grad.double())
    assert relative_error(logits.grad, gold.grad) <= 2e-6


def test_topk_gradient_has_the_dtype_of_the_logits() -> None:
    logits = torch.randn(3, 6, dtype=torch.bfloat16, requires_grad=True)
    moe_ops.fused_topk(logits, top_k=2)[0][:, 0].sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_moe_gradients_equal_those_of_its_parts(compiled: bool) -> None:
    layer = Variant(bias=True).build()
    logits = torch.randn(7, 6)

    def whole(logits: Tensor, layer: Layer) -> Tensor:
        t = layer.tensors
        biases = {"gate_up_bias": t["gate_up_bias"], "down_bias": t["down_bias"]}
        return moe_ops.fused_moe(t["hidden_states"], logits, t["gate_up_proj"], t["down_proj"], top_k=2, **biases)

    def parts(logits: Tensor, layer: Layer) -> Tensor:
        weights, ids = moe_ops.fused_topk(logits, top_k=2)
        return dense_formula(Layer({**layer.tensors, "topk_weights": weights, "topk_ids": ids}, {}))

    if compiled:
        torch._dynamo.reset()
        whole = torch.compile(whole, backend="aot_eager", fullgraph=True)
    results = []
    for function in (whole, parts):
        a, b = logits.clone().requires_grad_(), leaves(layer)
        function(a, b).square().sum().backward()
        names = [name for name in NAMES if name != "topk_weights" and b.tensors[name] is not None]
        results.append([a.grad, *(b.tensors[name].grad for name in names)])
    for got, wanted in zip(*results, strict=True):
        assert relative_error(got, wanted) <= 1e-5


@pytest.mark.parametrize("glu_layout", ["concat", "none"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_derivatives(name: str, glu_layout: str) -> None:
    row = ACTIVATIONS[name]
    alpha, limit = row.alpha or 1.0, 1.5 if row.limit else float("inf")
    gate = torch.linspace(-4, 4, 41, dtype=torch.float64, requires_grad=True)
    up = torch.linspace(3, -3, 41, dtype=torch.float64, requires_grad=True) if glu_layout == "concat" else None
    grad = torch.randn(41, dtype=torch.float64)
    inputs = [gate] if up is None else [gate, up]
    wanted = torch.autograd.grad(row.eager(gate, up, alpha, limit), inputs, grad)
    got = row.backward(grad, gate.detach(), None if up is None else up.detach(), alpha, limit)
    for a, b in zip(got, wanted, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


MODES = {
    "none": nullcontext,
    "inference_mode": torch.inference_mode,
    "fake_tensors": FakeTensorMode,
    "a_device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_what_clamp_does_at_its_bounds_is_known_under_any_mode(mode: str) -> None:
    """Of an import under that mode."""
    x = torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad(x.clamp(max=1.0), x)
    with MODES[mode]():
        found = runpy.run_path(activations.__file__)["CLAMP_PASSES_AT_BOUNDS"]
    assert found is bool(grad)


WITHOUT = sorted({call.op for call in CALLS.values()} - set(DIFFERENTIABLE))


def first_call(op: str) -> Call:
    return with_grad(next(call for call in CALLS.values() if call.op == op and call.args[0].numel()))


@pytest.mark.parametrize("op", WITHOUT)
def test_operators_without_a_formula_refuse_inputs_that_require_grad(op: str) -> None:
    call = first_call(op)
    if not any(isinstance(a, Tensor) and a.requires_grad for a in call.args):
        pytest.skip("no argument can require grad")
    with pytest.raises(ValueError, match=f"{op}: [\\w, ]+ must not require grad"):
        call.run()
    with torch.no_grad():
        call.run()


@pytest.mark.parametrize("op", WITHOUT)
def test_operators_without_a_formula_refuse_inputs_that_require_grad_compiled(op: str) -> None:
    torch._dynamo.reset()
    call = first_call(op)
    if not any(isinstance(a, Tensor) and a.requires_grad for a in call.args):
        pytest.skip("no argument can require grad")
    compiled = torch.compile(call.overload, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{op}: [\\w, ]+ must not require grad"):
        compiled(*call.args, **call.kwargs)


@pytest.mark.parametrize("op", ["fused_experts", "fused_moe"])
def test_quantised_weights_refuse_inputs_that_require_grad(op: str) -> None:
    call = with_grad(CALLS[f"{op}-fp8"])
    with pytest.raises(ValueError, match=f"{op}: hidden_states[\\w, ]* must not require grad for quantised weights"):
        call.run()
    with torch.no_grad():
        call.run()


def test_second_derivatives_are_refused() -> None:
    layer = leaves(VARIANTS["plain"].build())
    x = layer.tensors["hidden_states"]
    with pytest.raises(ValueError, match="fused_experts: second derivatives are not implemented"):
        torch.autograd.grad(fused(layer).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("leaf", ["hidden_states", "gate_up_proj", "down_proj", "topk_weights"])
@pytest.mark.parametrize("name", ["plain", "gpt_oss", "weight_on_input", "expert_map_bias"])
def test_each_gradient_alone_is_the_one_among_all(name: str, leaf: str) -> None:
    """The backward computes what is needed and nothing else; what is needed does not depend on what else is."""

    def gradient(alone: bool) -> Tensor:
        layer = leaves(VARIANTS[name].build())
        for other in NAMES:
            if alone and other != leaf and layer.tensors[other] is not None:
                layer.tensors[other] = layer.tensors[other].detach()
        grad = torch.linspace(-1, 1, layer.tensors["hidden_states"].numel()).view_as(layer.tensors["hidden_states"])
        fused(layer).backward(grad.to(layer.tensors["hidden_states"].dtype))
        return layer.tensors[leaf].grad

    torch.testing.assert_close(gradient(alone=True), gradient(alone=False), rtol=0, atol=0)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("trained", ["gate_up_proj", "hidden_states"])
def test_results_may_be_added_to_in_place(trained: str, top_k: int) -> None:
    """As models add a shared expert's output."""
    x, up, down, weights, ids = (
        tensor[:, :top_k] if name.startswith("topk") else tensor
        for name, tensor in VARIANTS["plain"].build().tensors.items()
        if name in ("hidden_states", "gate_up_proj", "down_proj", "topk_weights", "topk_ids")
    )
    given = {"hidden_states": x.requires_grad_(trained == "hidden_states")}
    given["gate_up_proj"] = up.requires_grad_(trained == "gate_up_proj")
    apart = {name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in given.items()}
    out = moe_ops.fused_experts(given["hidden_states"], given["gate_up_proj"], down, weights, ids)
    out += 1.0
    out.square().sum().backward()
    other = moe_ops.fused_experts(apart["hidden_states"], apart["gate_up_proj"], down, weights, ids) + 1.0
    other.square().sum().backward()
    torch.testing.assert_close(given[trained].grad, apart[trained].grad, rtol=0, atol=0)


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_a_cast_around_a_backward_pass_changes_no_bit(format: str) -> None:
    """Of parameters in fp32, which stay so."""

    def layer_gradients() -> dict[str, Tensor]:
        layer = VARIANTS["plain"].build()
        layer.options["format"] = format
        return gradients(layer, fused, torch.ones(layer.tensors["hidden_states"].shape))

    wanted = layer_gradients()
    with torch.autocast("cpu", torch.bfloat16):
        got = layer_gradients()
    assert all(torch.equal(got[name], gradient) for name, gradient in wanted.items())


FORWARD_MODE = {
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "jacfwd": lambda function, x: torch.func.jacfwd(function)(x),
    "compiled": lambda function, x: torch.compile(
        lambda x: torch.func.jvp(function, (x,), (x,)), backend="aot_eager", fullgraph=True
    )(x),
}


@pytest.mark.parametrize("how", [*FORWARD_MODE, "dual"])
@pytest.mark.parametrize("op", ["fused_experts", "prepare", "torch.ops"])
def test_forward_mode_is_refused(op: str, how: str) -> None:
    """A custom operator would return no tangent, or one of zeros, without a word."""
    tensors = VARIANTS["plain"].build().tensors
    x, up, down, weights, ids = list(tensors.values())[:5]
    function = {
        "fused_experts": lambda x: moe_ops.fused_experts(x, up, down, weights, ids),
        "prepare": lambda x: moe_ops.prepare(x, weights, ids, num_experts=up.shape[0]).rows,
        "torch.ops": lambda x: torch.ops.moe_ops.fused_experts(x, up, down, weights, ids),
    }[op]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="must not carry a tangent, got one of forward-mode differentiation"):
        if how == "dual":
            with torch.autograd.forward_ad.dual_level():
                function(torch.autograd.forward_ad.make_dual(x, x))
        else:
            FORWARD_MODE[how](function, x)


def test_a_level_of_forward_mode_without_tangents_changes_nothing() -> None:
    layer = VARIANTS["plain"].build()
    with torch.autograd.forward_ad.dual_level():
        got = fused(layer)
    torch.testing.assert_close(got, fused(layer), rtol=0, atol=0)


@pytest.mark.parametrize("op", ["fused_experts", "fused_moe"])
def test_the_name_of_a_float_scheme_trains(op: str) -> None:
    call = with_grad(CALLS[f"{op}-plain"])
    named = Call(op, call.args, {**call.kwargs, "scheme": "fp32"})
    torch.testing.assert_close(named.run(), call.run(), rtol=0, atol=0)
    assert named.run()[0].requires_grad
    for scheme, message in (("int3", "scheme must be one of"), ("bf16", "must be torch.bfloat16")):
        with pytest.raises(ValueError, match=f"{op}: .*{message}"):
            Call(op, call.args, {**call.kwargs, "scheme": scheme}).run()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("recompute", [None, *RECOMPUTE])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_gradients_of_no_tokens(format: str, recompute: str | None, device: str) -> None:
    tensors = {
        name: None if tensor is None else tensor.to(device)
        for name, tensor in VARIANTS["plain"].build().tensors.items()
        if not name.endswith("scales")
    }
    none = {name: tensors[name][:0] for name in ("hidden_states", "topk_weights", "topk_ids")}
    layer = leaves(Layer({**tensors, **none}, {"format": format, "recompute": recompute}))
    fused(layer).sum().backward()
    assert layer.tensors["hidden_states"].grad.shape == none["hidden_states"].shape
    if device == "cpu":
        assert not layer.tensors["gate_up_proj"].grad.any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("empty", ["T", "K", "E", "H", "I"])
def test_an_empty_sum_is_zero_and_has_gradients(empty: str, format: str, backend: str) -> None:
    sizes = {"T": 3, "K": 2, "E": 4, "H": 16, "I": 8} | {empty: 0}
    T, K, E, H, I = sizes.values()
    tensors = {
        "hidden_states": torch.randn(T, H), "gate_up_proj": torch.randn(E, 2 * I, H),
        "down_proj": torch.randn(E, H, I), "topk_weights": torch.rand(T, K),
        "topk_ids": torch.arange(T * K).view(T, K) if E else torch.full((T, K), -1),
    }  # fmt: skip
    layer = leaves(Layer(tensors, {"format": format, "backend": backend}))
    result = fused(layer)
    result.sum().backward()
    assert result.shape == (T, H) and not result.any()
    for name in ("hidden_states", "gate_up_proj", "down_proj", "topk_weights"):
        assert layer.tensors[name].grad.shape == tensors[name].shape and not layer.tensors[name].grad.any(), name


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_gradients_on_no_device(format: str) -> None:
    layer = VARIANTS["plain"].build()
    tensors = {name: tensor.to("meta") for name, tensor in layer.tensors.items() if isinstance(tensor, Tensor)}
    layer = leaves(Layer(tensors, {"format": format}))
    fused(layer).sum().backward()
    assert {layer.tensors[name].grad.shape for name in ("gate_up_proj",)} == {tensors["gate_up_proj"].shape}


def test_what_does_not_differentiate_says_what_does() -> None:
    rows = torch.randn(4, 6, requires_grad=True)
    with pytest.raises(ValueError, match=r"quantize_rows: .*Quantised activations have no gradient; .*no_grad"):
        moe_ops.quantize_rows(rows, scheme="fp8_block128")
    bias = torch.randn(2, 256, requires_grad=True)
    stored, weight, offsets, scales, _, _, scale = CALLS["grouped_mm_glu-fp8"].args
    with pytest.raises(ValueError, match="grouped_mm_glu: bias must not require grad for quantised operands"):
        moe_ops.grouped_mm_glu(
            stored, weight, offsets, bias=bias, scheme="fp8_block128", weight_scales=scales, rows_scale=scale
        )
    layer = leaves(VARIANTS["plain"].build())
    loss = fused(layer).sum()
    with pytest.raises(ValueError, match=r"second derivatives are not implemented.*Leave create_graph out"):
        torch.autograd.grad(loss, layer.tensors["hidden_states"], create_graph=True)


def test_a_second_derivative_of_the_router_is_refused_under_its_name() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    weights, _ = moe_ops.fused_topk(logits, top_k=2)
    with pytest.raises(ValueError, match="fused_topk: second derivatives are not implemented"):
        torch.autograd.grad(weights.square().sum(), logits, create_graph=True)


STAGES = [
    name
    for name in covering(CALLS)
    if CALLS[name].op in DIFFERENTIABLE and not CALLS[name].op.startswith("fused") and "fp8" not in name
]


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
@pytest.mark.parametrize("name", [*STAGES, "grouped_mm_glu-gpt_oss", "fused_topk-softmax", "fused_experts-bias"])
def test_a_batch_of_gradients_is_each_of_them(name: str, how: str) -> None:
    call = with_grad(CALLS[name])
    out = next(result for result in call.run() if result.requires_grad)
    inputs = [tensor for tensor in call.tensors if tensor.requires_grad]
    grads = torch.randn(3, *out.shape).to(out.dtype)

    def gradients_of(grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad, retain_graph=True, **options)

    got = gradients_of(grads, is_grads_batched=True) if how == "is_grads_batched" else torch.vmap(gradients_of)(grads)
    for found, wanted in zip(got, zip(*map(gradients_of, grads), strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_glu", "batched_mm", "batched_mm_glu"])
def test_a_second_derivative_of_a_product_is_refused_under_its_name(op: str) -> None:
    call = with_grad(CALLS[f"{op}-bias"])
    inputs = [tensor for tensor in call.tensors if tensor.requires_grad]
    with pytest.raises(ValueError, match=f"^{op}: second derivatives are not implemented"):
        torch.autograd.grad(call.run()[0].square().sum(), inputs, create_graph=True)
    # What needs no operator without a formula has them.
    x = call.args[0].detach().double().requires_grad_()
    given = [value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value
             for value in call.args[1:]]  # fmt: skip

    def run(x: Tensor) -> Tensor:
        out = call.overload(x, *given, **{key: value for key, value in call.kwargs.items() if key != "out_dtype"})
        return out[0] if isinstance(out, tuple) else out

    assert torch.autograd.gradgradcheck(run, (x,), fast_mode=True)
