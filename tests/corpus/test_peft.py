"""LoRA on stacked experts as PEFT writes it (`target_parameters`), trained in one graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.adapters import find_adapters
from compile_passes.passes import run_all
from moe_ops.logs import quiet
from tests.corpus.families import available, build, tokens
from tests.ops.errors import assert_accurate
from tests.passes.blocks import E, H, K, batched, weights
from tests.passes.compare import difference
from tests.passes.test_lora import kept, made_as_large

peft = pytest.importorskip("peft")

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapted(model: nn.Module, names: tuple[str, ...] = EXPERTS, rank: int = 2, **settings: Any) -> nn.Module:
    """``model`` with adapters of its parameters ``names`` that add something."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=3, target_modules=[], target_parameters=list(names), init_lora_weights=False, **settings
    )
    found: nn.Module = peft.get_peft_model(model, config)
    return found


def prepared(model: nn.Module) -> list[str]:
    """What `moe_ops.compile` says that it did to ``model``."""
    with warnings.catch_warnings(record=True) as heard, quiet():
        warnings.simplefilter("always")
        moe_ops.compile(model)
    return [text for warning in heard if (text := str(warning.message)).startswith("moe_ops.compile")]


def trained(model: nn.Module, run: Callable[..., Any], steps: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of every step of AdamW."""
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    ids, found = tokens(2, 12), []
    for _ in range(steps):
        loss = run(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.detach(), {name: weight.grad.clone() for name, weight in parameters.items()}))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("family", "form"), [("qwen3_moe", "grouped_mm"), ("mixtral", "batched_mm"), ("gpt_oss", "grouped_mm")]
)
def test_five_steps_follow_eager(family: str, form: str) -> None:
    """In one graph, without a merged weight or the gradient of one in either direction."""
    if not available(family):
        pytest.skip(f"transformers has no {family}")
    model = adapted(build(family, torch.float32, form, num_hidden_layers=1)).train()
    eager, graphs = copy.deepcopy(model), list[fx.Graph]()
    expected = trained(eager, eager, steps=5)
    assert any("captured as sums" in text for text in prepared(model))
    stored = {name: weight.clone() for name, weight in model.named_parameters() if not weight.requires_grad}
    torch.compiler.reset()
    counters.clear()
    got = trained(model, torch.compile(model, backend=kept(graphs), fullgraph=True), steps=5)
    assert counters["stats"]["unique_graphs"] == 1 and len(graphs) == 2
    assert counters["moe_ops"]["fused"] == 1 and not counters["moe_ops"]["refused"]
    size = min(weight.numel() for weight in stored.values() if weight.dim() == 3)
    assert [made_as_large(graph, size) for graph in graphs] == [[], []]
    assert difference(got, expected, 2e-4) is None
    own = dict(model.named_parameters())
    assert all(own[name].grad is None and torch.equal(own[name], value) for name, value in stored.items())


class Experts(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        made = weights(dtype=dtype)
        self.w1, self.w2 = nn.Parameter(made["w1"]), nn.Parameter(made["w2"])

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return batched(x, ids, scores.to(x.dtype), self.w1, self.w2)


class Block(nn.Module):
    """A router and experts."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.experts, self.gate = Experts(dtype), nn.Linear(H, E, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.gate(x).float().softmax(-1).topk(K, dim=-1)
        return self.experts(x, ids, scores / scores.sum(-1, keepdim=True))


NAMES = ("experts.w1", "experts.w2")


def block(*names: str, **settings: Any) -> nn.Module:
    return adapted(Block(), names or NAMES, **settings)


def both(model: nn.Module, *, ranks: int, **options: Any) -> None:
    """Eager and compiled results and gradients of a prepared model agree; in one graph with so many factors."""
    x, outcomes, found = weights(dtype=torch.float32)["x"], [], []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.extend(decision.match.ranks for report in run_all(gm) for decision in report.fused)
        return gm.forward

    torch.compiler.reset()
    with quiet():
        for run in (model, torch.compile(model, backend=backend, fullgraph=True, **options)):
            model.zero_grad()
            given = x.clone().requires_grad_()
            out = run(given)
            out.square().sum().backward()
            grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
            outcomes.append((out.detach(), given.grad, grads))
    assert difference(outcomes[1], outcomes[0], 1e-4) is None
    assert [len(row) for row in found] == [ranks]


STATES: dict[str, tuple[Callable[[nn.Module], Any], int]] = {
    "as_made": (lambda model: model, 2),
    "two_active": (lambda model: model.base_model.set_adapter(["default", "other"]), 4),
    "another_one": (lambda model: model.set_adapter("other"), 2),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), 0),
    "merged": (lambda model: model.merge_adapter(), 0),
    "unmerged": (lambda model: (model.merge_adapter(), model.unmerge_adapter()), 2),
    "a_copy": (copy.deepcopy, 2),
    "merged_and_unloaded": (lambda model: model.merge_and_unload(), 0),
    "unloaded": (lambda model: model.unload(), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_adapters_are_what_they_are_at_a_call(name: str) -> None:
    """Whatever PEFT does after `moe_ops.compile`."""
    change, ranks = STATES[name]
    model = block()
    other = peft.LoraConfig(
        r=3, lora_alpha=2, target_modules=[], target_parameters=list(NAMES), init_lora_weights=False, use_rslora=True
    )
    model.add_adapter("other", other)
    prepared(model)
    made = change(model)
    both(made if isinstance(made, nn.Module) else model, ranks=ranks)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_inference_makes_no_sum_either(training: bool) -> None:
    model, x = block().train(training), weights(dtype=torch.float32)["x"]
    prepared(model)
    with torch.no_grad(), quiet():
        report = moe_ops.explain(model, x)
        own = torch.compile(model, backend="moe_ops_eager", fullgraph=True)(x)
        assert difference(own, model(x), 1e-4) is None
    assert [row.low_rank for row in report.fused] == [(2, 2)] and report.graphs == 1
    after = report.to_dict()["blocks"][0]["operators"]
    assert after == ["fused_topk", "moe_permute", *["grouped_mm"] * 6, "moe_unpermute"]


def test_a_router_is_adapted_too() -> None:
    """A parameter of two dimensions, of whose adapter the sum is made."""
    model = block("gate.weight", "experts.w2")
    assert len(find_adapters(model)) == 2
    prepared(model)
    both(model, ranks=1)


def test_a_scale_that_dynamo_makes_a_symbol() -> None:
    model = block()
    prepared(model)
    both(model, ranks=2, dynamic=True)


def test_under_autocast() -> None:
    """Weights in bf16, which PEFT's adapters in fp32 are cast to."""
    model, x = adapted(Block(torch.bfloat16), NAMES), weights()["x"]
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    prepared(model)
    with torch.autocast("cpu", torch.bfloat16), quiet():
        report = moe_ops.explain(model, x)
        own = torch.compile(model, backend="moe_ops_eager", fullgraph=True)(x)
        expected = model(x)
    assert [row.low_rank for row in report.fused] == [(2, 2)]
    exact = copy.deepcopy(model).double()(x.double())
    assert_accurate(own.detach(), exact.detach(), expected.detach(), dtype=torch.bfloat16)


def own_names(model: nn.Module) -> list[list[str]]:
    """What is set on the modules in the place of methods, or by us."""
    return [[key for key in vars(module) if key == "forward" or "moe_ops" in key] for module in model.modules()]


def test_restored() -> None:
    model = block()
    state, before = list(model.state_dict()), own_names(model)
    prepared(model)
    assert list(model.state_dict()) == state and not find_adapters(model) and own_names(model) != before
    both(model, ranks=2)
    moe_ops.restore(model)
    assert own_names(model) == before and len(find_adapters(model)) == 1


def test_wrappers_are_said_to_have_no_sizes_of_the_data() -> None:
    """PEFT's code compares devices in a loop, in `any(...)`, which is no mask of rows."""
    assert not [text for text in prepared(block()) if "only the data knows" in text]


def test_explain_names_the_cure() -> None:
    report = moe_ops.explain(block(), weights(dtype=torch.float32)["x"])
    (row,) = report.refused
    assert report.graph_breaks + len(report.eager_frames) and "parametrization at every call" in row.reason
    assert row.module == "base_model.model.experts" and row.cure.startswith("moe_ops.compile(model)")


def in_float8(model: nn.Module) -> None:
    experts = model.base_model.model.experts.get_base_layer()
    experts.w1 = nn.Parameter(experts.w1.detach().to(torch.float8_e4m3fn), requires_grad=False)


def bound(model: nn.Module) -> None:
    wrapper = model.base_model.model.experts
    wrapper.forward = lambda *args, **kwargs: type(wrapper).forward(wrapper, *args, **kwargs)


def bound_inside(model: nn.Module) -> None:
    experts = model.base_model.model.experts.get_base_layer()
    experts.forward = lambda *args, **kwargs: type(experts).forward(experts, *args, **kwargs)


def parametrized(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model.base_model.model.experts.get_base_layer(), "w1", nn.Tanh())


def with_one_expert(model: nn.Module) -> None:
    for wrapper in (module for module in model.modules() if hasattr(module, "num_experts")):
        wrapper.num_experts = 1


LEFT = {
    "in_float8": (in_float8, "torch.float8_e4m3fn", "load the model in bfloat16"),
    "bound": (bound, "bound to the instance already", "Take off what binds it"),
    "bound_inside": (bound_inside, "the forward of the module inside", "take off what binds it"),
    "parametrized": (parametrized, "is parametrized otherwise", "remove the other parametrization"),
    "with_one_expert": (with_one_expert, "no [E, N, K] of several experts", "target_modules"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_captured_is_left_and_named(name: str) -> None:
    change, reason, mend = LEFT[name]
    model = block()
    change(model)
    before = own_names(model)
    said = " ".join(prepared(model))
    assert reason in said and mend in said and "captured as sums" not in said
    assert own_names(model) == before
