"""Programs of training around fused blocks of transformers: fused, in one graph, with eager torch's gradients.

The programs run through "moe_ops_eager", which rewrites as "moe_ops" does, but where Inductor's own cut between forward
and backward is the point.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moe_ops
from compile_passes.match import Refusal
from compile_passes.passes import SAVE, run, run_all
from compile_passes.recording import FORWARD_ALONE
from compile_passes.tiny import use_experts
from moe_ops.testing import assert_cuda_graph_safe
from tests.corpus.families import build, tokens
from tests.passes.blocks import K, batched, block, found, silu_glu, weights
from tests.passes.compare import assert_same, difference

IDS = tokens(2, 8)
_OPS = torch.ops.moe_ops
TOPK, EXPERTS = _OPS.fused_topk.default, _OPS.fused_experts_saving.default


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    flags = {FORWARD_ALONE: False} if hasattr(torch._dynamo.config, FORWARD_ALONE) else {}
    with torch._dynamo.config.patch(**flags), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


def model_of(family: str, form: str = "grouped_mm", layers: int = 1) -> Any:
    return build(family, torch.float32, form, num_hidden_layers=layers).train().requires_grad_(True)


def step(run: Callable[..., Any], autocast: bool = False, **options: Any) -> Any:
    """One forward and backward; the model's output."""
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        out = run(input_ids=IDS, labels=IDS, use_cache=False, **options)
    out.loss.backward()
    return out


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_fused(blocks: int = 1, graphs: int = 1) -> None:
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == graphs
    passes = counters["moe_ops"]
    assert (passes["fused"], passes["refused"], passes["errors"]) == (blocks, 0, 0)


# ---- autocast


def far(got: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor:
    """The distance of every gradient from the exact one, relative to that."""
    return torch.stack(
        [(got[name].double() - grad).norm() / grad.norm().clamp(min=1e-9) for name, grad in exact.items()]
    )


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", "grouped_mm"),
        ("qwen3_moe", "batched_mm"),
        ("gpt_oss", "batched_mm"),
        ("deepseek_v3", "grouped_mm"),
    ],
)
def test_autocast_with_fp32_weights(family, form):
    """As near to float64 as eager autocast; and the gradients are fp32, as the weights."""
    model = model_of(family, form)
    exact, eager = use_experts(copy.deepcopy(model).double(), "eager"), copy.deepcopy(model)
    step(exact)
    step(eager, autocast=True)
    step(torch.compile(model, backend="moe_ops_eager", fullgraph=True), autocast=True)
    assert_fused()
    found = gradients(model)
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    ours, theirs = (far(grads, gradients(exact)) for grads in (found, gradients(eager)))
    assert ours.median() <= 1.1 * theirs.median() and ours.max() <= 1.5 * theirs.max()


def test_autocast_computes_dense_experts_in_its_dtype():
    """Meta's experts, in batched products that autocast rounds: the scores multiply tokens in fp32, as they do."""
    model = model_of("llama4", "batched_mm")
    eager = copy.deepcopy(model)
    expected = step(eager, autocast=True)
    got = step(torch.compile(model, backend="moe_ops_eager", fullgraph=True), autocast=True)
    assert_fused()
    assert difference(got.loss, expected.loss, 1e-3) is None
    assert difference(gradients(model), gradients(eager), 5e-2) is None


def rounding_router(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = nn.functional.linear(x, gate).softmax(-1).topk(K, dim=-1)
    return values.to(torch.bfloat16), ids


def test_routing_weights_stay_rounded_to_the_logits_dtype():
    """Narrower than the rows that they multiply, as transformers casts them to what autocast made of the logits."""
    function, given = block(batched, rounding_router), weights(dtype=torch.float32)
    (match,) = found(function, **given)
    assert match.router.routing == "softmax" and match.router.rounded == torch.bfloat16
    assert assert_same(function, *given.values()).fused == 1


def test_weights_that_are_rounded_before_a_scale_keep_their_router():
    function = block(batched, rounding_router, activation=lambda h: 3 * silu_glu(h))
    given = weights(dtype=torch.float32)
    (match,) = found(function, **given)
    assert isinstance(match.router, Refusal) and "rounded" in match.router.reason
    assert assert_same(function, *given.values()).fused == 1


# ---- accumulation


def test_gradients_accumulate_and_are_cleared():
    """Set to None or to zero, before every second step of two batches."""
    model = model_of("olmoe")
    eager = copy.deepcopy(model)
    found = []
    for one, called in ((eager, eager), (model, torch.compile(model, backend="moe_ops_eager", fullgraph=True))):
        for clear in (True, False, True):
            one.zero_grad(set_to_none=clear)
            step(called)
            step(called)
            found.append(gradients(one))
    assert_fused()
    assert difference(found[3:], found[:3], 2e-5) is None


# ---- checkpoints


@pytest.mark.parametrize(
    ("family", "reentrant"), [("qwen3_moe", False), ("gpt_oss", True)], ids=["not reentrant", "reentrant"]
)
def test_every_layer_checkpointed(family, reentrant):
    """Dynamo captures both kinds as the one that is not reentrant; what is computed again has the forward's bits."""
    model = model_of(family)
    eager, plain = copy.deepcopy(model), copy.deepcopy(model)
    for one in (model, eager):
        one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    step(eager)
    step(torch.compile(model, backend="moe_ops_eager", fullgraph=True))
    assert_fused()
    assert difference(gradients(model), gradients(eager), 2e-5) is None
    step(torch.compile(plain, backend="moe_ops_eager", fullgraph=True))
    for name, grad in gradients(plain).items():
        assert torch.equal(grad, gradients(model)[name]), name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_router_logits_recorded_in_checkpointed_layers(family):
    """What trl does by default: one graph, the balancing loss and its gradients."""
    model = model_of(family, layers=2 if family == "qwen3_moe" else 1)
    model.config.output_router_logits = True
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    eager = copy.deepcopy(model)
    other = step(eager)
    if not hasattr(other, "router_logits"):
        pytest.skip("this transformers does not record them for this family")
    one = step(moe_ops.compile(model, backend="moe_ops_eager", fullgraph=True))
    assert_fused(model.config.num_hidden_layers)
    assert difference([one.loss, one.router_logits], [other.loss, other.router_logits], 2e-5) is None
    if family != "deepseek_v3":  # which records no more than the logits
        assert other.aux_loss is not None and difference(one.aux_loss, other.aux_loss, 2e-5) is None
    assert difference(gradients(model), gradients(eager), 2e-5) is None


def test_recording_is_prepared_where_it_is_asked_for_alone():
    model = model_of("mixtral").eval()
    compiled = partial(moe_ops.compile, model, backend="moe_ops_eager")
    compiled()
    assert not getattr(model, "_output_capturing_hooks_installed", False)
    model.train()
    compiled()
    assert not getattr(model, "_output_capturing_hooks_installed", False)
    model.config.output_router_logits = True
    with pytest.warns(UserWarning, match=f"hooks are installed.*{FORWARD_ALONE}"):
        compiled()
    assert hooks_of(model) and getattr(torch._dynamo.config, FORWARD_ALONE)
    moe_ops.restore(model)
    assert not hooks_of(model)
    assert model(tokens(1, 8), use_cache=False).router_logits is not None and hooks_of(model)


def hooks_of(model: nn.Module) -> list[Any]:
    """Hooks of modules, of which a model that records nothing has none."""
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


class Adapted(nn.Module):
    """A model whose embeddings ask for gradients of their own, as PEFT's do: Dynamo leaves that frame to Python."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        model.requires_grad_(False)
        model.enable_input_require_grads()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


def test_a_graph_that_is_broken_above_the_layers_is_not_broken_again():
    """`moe_ops.compile` fuses what the backend does, of a model in training that nobody asks for router logits."""
    made = Adapted(model_of("qwen3_moe"))
    compiled = moe_ops.compile(made, backend="moe_ops_eager")
    compiled(tokens(2, 8)).sum().backward()
    assert counters["graph_break"] and counters["moe_ops"]["fused"] == 1
    assert not any("ContextVar" in reason for reason in counters["graph_break"])


def captured(function: Callable[..., Any]) -> bool:
    try:
        with torch.no_grad():
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
        return True
    except torch._dynamo.exc.Unsupported:
        return False
    finally:
        torch.compiler.reset()
        counters.clear()


@pytest.mark.parametrize(
    ("frozen", "mode"),
    [(False, torch.no_grad), (True, torch.inference_mode), (True, torch.no_grad)],
    ids=["trained-no_grad", "frozen-inference_mode", "frozen-no_grad"],
)
def test_embeddings_that_ask_for_gradients_are_evaluated_without_any(mode, frozen):
    """Gradient checkpointing, and PEFT, have the embeddings' output `requires_grad_()`, whatever the mode."""
    model = model_of("qwen3_moe").eval().requires_grad_(not frozen)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    if not captured(lambda x: (x.exp().requires_grad_(), x.exp())[1]):
        pytest.skip("this Dynamo does not capture requires_grad_()")
    with mode():
        expected = model(IDS, use_cache=False).logits
        got = torch.compile(model, backend="moe_ops_eager", fullgraph=True)(IDS, use_cache=False).logits
    assert_fused()
    assert difference(got, expected, 2e-5) is None


class Block(nn.Module):
    """A router and stacked experts behind a function that two kernels could round differently."""

    def __init__(self, router: str = "fused") -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.router = router
        self.gate, self.gate_up, self.down = (
            nn.Parameter(torch.randn(shape, generator=make) / 4) for shape in ((8, 16), (8, 24, 16), (8, 16, 12))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        weights, ids = nn.functional.linear(x, self.gate).softmax(-1).topk(2, dim=-1)
        if self.router == "kept":
            weights = weights.square() / weights.square().sum(-1, keepdim=True)
        flat = ids.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat], x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        out = torch.bmm(self.down[flat], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1, 1)).view(-1, 2, 16).sum(1)


class Checkpointed(Block):
    """The loss of a block that is computed again in the backward, in part as ``context_fn`` says."""

    def __init__(self, router: str = "fused", context_fn: Any = None) -> None:
        super().__init__(router)
        self.options = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, **self.options).square().sum()


def rows() -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_training_step_under_inductor():
    """No host synchronisation in forward and backward, and the routing of the forward is kept."""
    saved: list[str] = []

    def look(joint: torch.fx.Graph) -> None:
        saved.extend(str(n.target) for n in joint.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE)

    with torch._inductor.config.patch(joint_custom_post_pass=look):
        assert_cuda_graph_safe(Checkpointed(), rows(), backward=True)
    assert str(TOPK) in saved and str(EXPERTS) not in saved


def backward_operators(model: Checkpointed) -> list[str]:
    """What the backward graph calls, of operators that compute a block's forward or its routing: as under Inductor, but
    without code generation: the rewritten graph, our pass on the joint one, and torch's own cut.
    """
    graphs: list[list[str]] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes])
        return make_boxed_func(module.forward)

    def cut(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        run(SAVE, joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    below = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=cut)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        assert [len(report.fused) for report in run_all(module) if report.fused] == [1]
        return below(module, inputs)

    x = rows()
    expected = torch.autograd.grad(model(x), [x, *model.parameters()])
    got = torch.autograd.grad(torch.compile(model, fullgraph=True, backend=backend)(x), [x, *model.parameters()])
    assert difference(got, expected, 2e-5) is None
    names = ("fused_topk.", "fused_experts_saving", "topk.", "sort.")
    return [name for target in graphs[1] for name in names if name in target]


def recomputes_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(
    ("router", "context", "again"),
    [
        ("fused", None, ["fused_experts_saving"]),
        ("kept", recomputes_all, ["fused_experts_saving"]),
        ("fused", [EXPERTS], []),
    ],
    ids=["no policy", "all recomputed, the model's router", "experts saved"],
)
def test_no_policy_computes_the_routing_again(router, context, again):
    """Whatever else is recomputed, the backward has the ids of the forward."""
    context_fn = partial(create_selective_checkpoint_contexts, context) if context is not None else None
    assert backward_operators(Checkpointed(router, context_fn)) == again


@pytest.mark.parametrize("saved", [[], [EXPERTS], [TOPK, EXPERTS]], ids=["nothing", "experts", "routing and experts"])
def test_policies_see_the_operators_without_a_compiler(saved):
    """Of code that calls them: an operator that is saved is not called again."""
    block, called = Block(), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(operator)
            return operator(*args, **(kwargs or {}))

    def run(x: Tensor) -> Tensor:
        logits = nn.functional.linear(x, block.gate)
        return moe_ops.fused_moe(x, logits, block.gate_up, block.down, top_k=2)

    x = rows()
    expected = torch.autograd.grad(run(x).square().sum(), x)
    context_fn = partial(create_selective_checkpoint_contexts, saved)
    with Count():
        out = checkpoint(run, x, use_reentrant=False, context_fn=context_fn)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(grad, expected[0])
    assert [called.count(operator) for operator in (TOPK, EXPERTS)] == [2 - (op in saved) for op in (TOPK, EXPERTS)]


# ---- optimizers


class Listed(nn.Module):
    """Experts in a list, which `moe_ops.compile` stacks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return sum((weights * (ids == e)).sum(-1, keepdim=True) * expert(x) for e, expert in enumerate(self.experts))


@pytest.mark.parametrize("way", ["fused", "foreach", "compiled with the model"])
def test_optimizers_of_stacked_parameters(way):
    """AdamW after `moe_ops.compile` updates stacked experts as it updates a list of them."""
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    losses = []
    for ours in (False, True):
        model = Listed()
        run = moe_ops.compile(model, backend="moe_ops_eager", fullgraph=True) if ours else model
        flags = {name: True for name in ("fused", "foreach") if way == name}
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2) if "compiled" in way else 1e-2, **flags)

        def update(run=run, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        whole = torch.compile(update, backend="moe_ops_eager") if ours and "compiled" in way else update
        losses.append(torch.stack([whole().detach() for _ in range(4)]))
    assert counters["moe_ops"]["fused"] == 1
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert difference(losses[1], losses[0], 1e-4) is None
