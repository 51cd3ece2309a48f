"""Loops that no compiler captures: bound in a static form that a trial has proved, fused, and put back by `restore`."""

from __future__ import annotations

import ast
import copy
import pickle
import random
import warnings
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.loops import (
    FORMS,
    Block,
    DeepseekV3,
    E,
    GptOssMLP,
    H,
    MakeMoE,
    MoeInfer,
    MoeInferAdding,
    StackedExperts,
    Unique,
)  # fmt: skip
from compile_passes import rebind
from compile_passes.loops import STATIC, find_loops
from compile_passes.rebind import verdict_of
from compile_passes.zero_sums import drop_results_of_zeros
from moe_ops.compat import captured_under
from tests.passes.loop_forms import (
    ARRAY,
    CALLS,
    COUNTER,
    MISSES,
    MODULE,
    SLOTS,
    SPACE,
    Counter,
    Missing,
    Subtracts,
    in_a_default,
)  # fmt: skip


class Decoder(nn.Module):
    """Two blocks with a norm before each and a residual around it, called as models call them."""

    def __init__(self, kind, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"moe_experts": kind()}) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            out = layer["moe_experts"](F.rms_norm(x, (H,)))
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


def decoder(kind, layers: int = 1, *, training: bool = False) -> Decoder:
    torch.manual_seed(0)
    return Decoder(kind, layers).train(training)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(2, count, H, generator=torch.Generator().manual_seed(count))


def prepared(model: nn.Module, backend="moe_ops_eager", **options):
    """The compiled model, and what `moe_ops.compile` said."""
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        function = moe_ops.compile(model, backend=backend, **options)
    return function, [str(warning.message) for warning in said if "moe_ops" in str(warning.message)]


def learnt(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
    """The gradients of a call."""
    model(tokens(count).to(next(model.parameters()).dtype)).square().sum().backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Zeros where there are none: of an expert without tokens."""
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.named_parameters()}


def assert_no_further(found: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]):
    """From float64 than eager's gradients."""
    assert list(found) == list(eager) == list(exact) and any(value.any() for value in found.values())
    for name, value in found.items():
        bound = (eager[name] - exact[name]).abs().max() + 16 * torch.finfo(torch.float32).eps * exact[name].abs().max()
        assert (value - exact[name]).abs().max() <= bound, name


def assert_trains_as_eager(kind, count: int) -> str:
    """A block of ``kind`` is one graph and fused, equal to eager, and so are its gradients; what was said of it."""
    model = decoder(kind, training=True)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    function, said = prepared(model, fullgraph=True)
    assert "was proved equal" in said[0], said
    found = function(tokens(count))
    torch.testing.assert_close(found, eager(tokens(count)), atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == counters["moe_ops"]["fused"] == 1
    found.square().sum().backward()
    assert_no_further(gradients(moe_ops.restore(model)), learnt(eager, count), learnt(exact, count))
    return said[0]


def assert_left(kind, reason: str):
    """A block of ``kind`` stays as it is, for a reason with these words."""
    torch.manual_seed(0)
    verdict, _ = verdict_of(kind().eval(), "")
    assert not verdict.forms and reason in verdict.reason


# In inference those whose own code has no gradients, whose experts are no list, or that run other code in training.
@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_form(kind):
    """One graph for one number of tokens, one for all others; equal to eager, and so are the gradients; as before after
    `restore`.
    """
    training = kind not in (MoeInfer, StackedExperts, MoeInferAdding)
    model = decoder(kind, training=training)
    before, keys = {n: model(tokens(n)).detach() for n in (3, 32, 2, 5)}, list(model.state_dict())
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    function, said = prepared(model, fullgraph=True)
    assert "moe_ops.restore(model) undoes it" in said[0] and " s; " in said[0] and kind.__name__ in said[0]
    assert "is 0 in place of None: weight decay and momentum go on for it. Hooks that are put on experts" in said[0]
    with torch.set_grad_enabled(training):
        for count, expected in before.items():
            found = function(tokens(count))
            torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-5)
    if training:
        found.square().sum().backward()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2 and counters["moe_ops"]["fused"] == graphs
    assert list(model.state_dict()) == keys
    moe_ops.restore(model)
    assert list(model.state_dict()) == keys == [*dict(model.named_parameters())]
    assert not any({"forward", "moe_infer", STATIC} & set(vars(module)) for module in model.modules())
    assert torch.equal(model(tokens(3)), before[3])
    if training:
        assert_no_further(gradients(model), learnt(eager, count), learnt(exact, count))


def test_code_of_training_alone():
    """Another loop than in inference, which is captured as it is."""
    model = decoder(MoeInferAdding, training=True)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    function, _ = prepared(model, fullgraph=True)
    function(tokens(8)).square().sum().backward()
    assert counters["moe_ops"]["fused"] == 1
    assert_no_further(gradients(moe_ops.restore(model)), learnt(eager, 8), learnt(exact, 8))


@pytest.mark.parametrize("kind", MISSES, ids=lambda kind: kind.__name__)
def test_left_alone_with_the_reason(kind):
    model = decoder(kind)
    state, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    _, said = prepared(model)
    assert len(said) == 1 and "left as is" in said[0]
    assert MISSES[kind].lower() in said[0].lower() and kind.__name__ in said[0] and said[0].endswith(".")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for layer in model.layers:
        block = layer["moe_experts"]
        assert not {"forward", STATIC} & set(vars(block)) and block.log == []
    assert [type(module) for module in model.modules()] == kinds
    assert CALLS == [0] and COUNTER.calls == Counter.called == COUNTER.sizes["least"] == 0
    assert SPACE.calls == SLOTS.calls == ARRAY[0] == MODULE.calls == in_a_default.__defaults__[0][0] == 0
    assert not hasattr(type(SLOTS), "calls_in_all")


class Remembers(MoeInfer):
    """A global that keeps what the first call computed of the weights, and a mask that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.unset = torch.full((3,), float("-inf")), float("nan")

    def route(self, x):
        if "bias" not in REMEMBERED:
            REMEMBERED["bias"] = self.gate.weight.sum().detach()
        return super().route(x + REMEMBERED["bias"])


REMEMBERED: dict[str, torch.Tensor] = {}


class NamedOtherwise(Block):
    """Methods whose first argument is not called self."""

    def forward(this, x):
        flat = x.view(-1, x.shape[-1])
        weights, ids = this.route(flat)
        return this.mixed(flat, ids, weights).view_as(x)

    def mixed(module, x, ids, weights):
        out = torch.zeros_like(x)
        hit = F.one_hot(ids, len(module.experts)).permute(2, 1, 0)
        for expert in (hit.sum(dim=(-1, -2)) > 0).nonzero():
            slot, token = torch.where(hit[expert[0]])
            out.index_add_(0, token, module.experts[expert[0]](x[token]) * weights[token, slot, None])
        return out


def test_any_name_of_the_first_argument():
    model = decoder(NamedOtherwise)
    expected = model(tokens(5))
    function, said = prepared(model, fullgraph=True)
    assert "moe_ops.restore(model) undoes it" in said[0]
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(5)), expected, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


def test_nothing_of_a_trial_is_left():
    """What code keeps of the weights is of the model's own, and not of the trial's copy."""
    model, twin = (decoder(Remembers) for _ in range(2))
    function, said = prepared(model)
    assert "static form" in said[0] and not REMEMBERED
    with torch.no_grad():
        result = function(tokens(5))
        REMEMBERED.clear()
        torch.testing.assert_close(result, twin(tokens(5)), atol=1e-5, rtol=1e-5)
    REMEMBERED.clear()


class KeepsParameters(Block):
    """Parameters of experts without tokens stay in autograd's graph while it trains, as minimind has it."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            pairs = ids == i
            if pairs.any():
                token = pairs.any(dim=-1).nonzero().flatten()
                out.index_add_(0, token, expert(x[token]) * weights[pairs].view(-1, 1))
            elif self.training:
                out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        return out.view(shape)


class KeepsParametersInRows(Block):
    """The same with a sum for rows that there are none of, as minimind had it."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        x, flat = x.repeat_interleave(self.top_k, dim=0), ids.view(-1)
        out = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            rows = expert(x[flat == i])
            if rows.shape[0] > 0:
                out[flat == i] = rows.to(out.dtype)
            else:
                out[flat == i] = sum([w.sum() for w in expert.parameters()]) * 0.0 + rows.to(out.dtype)
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).view(shape)


class ListsOfPositions(Block):
    """Lists with names of their own, as DBRX has them, and without."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(ids == i)
            if token.shape[0] == 0:
                continue
            tokens, slots = token.tolist(), slot.tolist()
            out[tokens] += expert(x[token.tolist()]) * weights[tokens, slots, None]
        return out.view(shape)


def test_lists_of_positions():
    assert_trains_as_eager(ListsOfPositions, 9)


class Normalised(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.normalize(self.weight, dim=-1))


class OfNormalisedWeights(DeepseekV3):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.w1 = Normalised(expert.w1.in_features, expert.w1.out_features, bias=False)


def test_a_form_that_is_captured_is_no_loop_any_more():
    assert_left(OfNormalisedWeights, "captured but not fused: Its weights are in a captured graph, but not in a form")


class RunsOnZeros(Block):
    """Experts without tokens run on zeros, as Nemotron-H has it."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(ids == i)
            if token.numel() > 0:
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            else:
                nothing = expert(torch.zeros_like(x[0]).unsqueeze(0))
                out = out + nothing
        return out.view(shape)


ZEROS = {
    KeepsParameters: "which is 0 as long as all weights are finite",
    KeepsParametersInRows: "which is 0 as long as all weights are finite",
    RunsOnZeros: "which experts make of zeros, and which is 0",
}


@pytest.mark.parametrize("kind", ZEROS, ids=lambda kind: kind.__name__)
def test_what_experts_without_tokens_add_is_0(kind):
    """It is left out, which is said."""
    assert ZEROS[kind] in assert_trains_as_eager(kind, 1)  # fewer pairs than experts


class KeepsMore(Missing):
    """A sum that is no zero."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficient = 0.0

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(ids == i)
            if token.numel() > 0:
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            elif self.training:
                out[0, 0] += self.coefficient * sum(p.sum() for p in expert.parameters())
        return out.view(shape)


def test_sums_of_parameters_that_are_no_zeros():
    _, said = prepared(decoder(KeepsMore, training=True))
    assert len(said) == 1 and "KeepsMore.forward asks for parameters" in said[0]


@pytest.mark.parametrize(
    ("otherwise", "count"),
    [
        ("elif self.training: out += expert(x.new_zeros(1, 4))", 1),
        ("elif self.training: y = torch.zeros(4); out = out + expert(y)", 1),
        ("else: x = torch.zeros(4); out = out + expert(x)", 0),  # x is read elsewhere
        ("else: out = expert(torch.zeros(4)) + 1", 0),
        ("else: out += expert(x)", 0),
    ],
)
def test_what_is_left_out_of_zeros(otherwise, count):
    text = f"def forward(self, x):\n for expert in self.experts:\n  if x.numel(): out = x\n  {otherwise}\n return out"
    assert len(drop_results_of_zeros(ast.parse(text).body[0])) == count


class RunsBiasesOnZeros(RunsOnZeros):
    """Of zeros experts make their biases here, which every token gets."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(H, 8, bias=False), nn.SiLU(), nn.Linear(8, H)) for _ in self.experts
        )


class RunsOnMoreThanZeros(RunsOnZeros):
    """Another condition than one on tokens."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(ids == i)
            if token.numel() > 1:
                out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
            else:
                out = out + expert(torch.zeros_like(flat[:1]))
        return out.view(x.shape)


@pytest.mark.parametrize(("kind", "why"), [(RunsBiasesOnZeros, "other outputs"), (RunsOnMoreThanZeros, "no test for")])
def test_results_of_zeros_that_count(kind, why):
    _, said = prepared(decoder(kind))
    assert len([line for line in said if why in line]) == 1, said


class Router(nn.Module):
    """A router that brings its weights to another dtype in its first call, where it is asked to."""

    def __init__(self, asked: bool) -> None:
        super().__init__()
        self.asked, self.dtype = asked, torch.float32
        self.classifier = nn.Linear(H, E, bias=False).bfloat16()

    def forward(self, x):
        if self.asked:
            self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x.to(self.classifier.weight.dtype)).float()


class Converts(Unique):
    def __init__(self, asked: bool) -> None:
        super().__init__()
        self.gate = Router(asked)


@pytest.mark.parametrize("asked", [True, False])
def test_conversions_of_the_first_call_are_made_where_the_code_makes_them(asked):
    torch.manual_seed(0)
    model = Converts(asked).eval()
    expected = copy.deepcopy(model)(tokens(5))
    function, said = prepared(model, fullgraph=True)
    dtype = torch.float32 if asked else torch.bfloat16
    assert "static" in said[0] and model.gate.classifier.weight.dtype == dtype, said
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(5)), expected, atol=1e-5, rtol=1e-5)


class Converted(nn.Sequential):
    """A classifier of several modules, whose parameters have names with dots."""

    @property
    def weight(self) -> torch.Tensor:
        return self[0].weight


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_converted_module_is_whatever_stands_there(when: str) -> None:
    """Before `moe_ops.compile`, between it and the first call, and after that."""
    torch.manual_seed(0)
    model = Converts(True).eval()

    def give(one: nn.Module) -> None:
        one.gate.classifier = Converted(one.gate.classifier, nn.Tanh())

    eager = copy.deepcopy(model)
    give(eager)
    if when == "before":
        give(model)
    function, said = prepared(model)
    assert "static" in said[0]
    with torch.no_grad():
        if when == "after":
            function(tokens(5))
        if when != "before":
            give(model)
        torch.testing.assert_close(function(tokens(5)), eager(tokens(5)), atol=1e-5, rtol=1e-5)


def test_a_loop_that_is_left_runs_beside_one_that_is_captured():
    """Dynamo raises at its list of counts once it may capture these."""
    torch.manual_seed(0)
    model = nn.Sequential(MoeInfer(), Subtracts()).eval()
    expected = {n: model(tokens(n)) for n in (5, 3)}
    function, said = prepared(model)
    assert any("1 (Subtracts) run their experts in a Python loop" in line for line in said)
    with torch.no_grad():
        for n, value in expected.items():
            torch.testing.assert_close(function(tokens(n)), value, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 2  # for one number of tokens, and for all others


def proved_and_fused(model, x):
    """Its static form was, in one graph, and gives what it gave."""
    expected = model(x)
    function, said = prepared(model, fullgraph=True)
    assert "was proved equal" in said[0], said
    with torch.no_grad():
        torch.testing.assert_close(function(x), expected, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


class SumsInFloat32(Block):
    """Results of a bfloat16 model that are added in float32, as DeepSeek-V3 of transformers 4.5x has them."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = F.linear(x.float(), self.gate.weight.float()).sigmoid().topk(self.top_k)
        out = torch.zeros_like(x, dtype=weights.dtype)
        for expert_idx, expert in enumerate(self.experts):
            token, slot = torch.where(ids == expert_idx)
            if token.numel() > 0:
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out.type(x.dtype).view(shape)


class RouterInFloat32(Block):
    """A router that is asked in float32, as ERNIE 4.5 has it."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.gate(x.float()).softmax(-1).topk(self.top_k)
        out = torch.zeros(x.size(0), x.size(1), device=x.device)
        for expert_idx, expert in enumerate(self.experts):
            token, slot = torch.where(ids == expert_idx)
            if token.numel() > 0:
                out[token] += expert(x[token]) * weights[token, slot, None]
        return out.view(shape)


@pytest.mark.parametrize("kind", [SumsInFloat32, RouterInFloat32], ids=lambda kind: kind.__name__)
def test_code_that_does_not_run_in_float64(kind):
    """It is tried in float32: code may name that."""
    proved_and_fused(decoder(kind), tokens(5))


class OfAnyRank(Block):
    """Code that runs on [tokens, hidden], where it is fused, and on [batch, length, hidden], where it is not."""

    def forward(self, x):
        weights, ids = self.route(x)
        scores = torch.zeros_like(self.gate(x)).scatter(-1, ids, weights)
        out = torch.zeros_like(x)
        for expert_idx, expert in enumerate(self.experts):
            mask = (ids == expert_idx).any(-1)
            if mask.any():
                out[mask] += expert(x[mask]) * scores[mask, expert_idx].unsqueeze(1)
        return out


def test_code_that_runs_on_tokens_of_either_rank():
    torch.manual_seed(0)
    proved_and_fused(OfAnyRank().eval(), tokens(5).flatten(0, 1))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_gpt_oss(training):
    """Its experts are called with ids and weights, which may be None: the trial is one of the layer around them."""
    model = decoder(GptOssMLP, training=training)
    x = tokens(5).requires_grad_()
    expected = model(x)
    expected.square().sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    function, said = prepared(model, fullgraph=True)
    assert "was proved equal" in said[0], said
    found = function(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-5, rtol=1e-4)
    assert counters["moe_ops"]["fused"] == 1


class AsksTwice(Block):
    """A test of a mask that is made anew for the positions."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for expert_idx, expert in enumerate(self.experts):
            if (ids == expert_idx).any(-1).any():
                token, slot = torch.where(ids == expert_idx)
                out[token] += expert(x[token]) * weights[token, slot, None]
        return out.view(shape)


def test_a_test_of_any_slot_of_any_token():
    proved_and_fused(decoder(AsksTwice), tokens(5))


class AddsByScatter(Block):
    """Results added by ids of tokens that are as wide as they are."""

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            rows = expert(x[token]) * w[token, slot, None]
            out.scatter_add_(0, token[:, None].expand_as(rows), rows)
        return out.view(shape)


class AddsByRepeatedIds(Block):
    """The same, not in place."""

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() > 0:
                rows = expert(x[token]) * w[token, slot, None]
                out = out.scatter_add(0, token[..., None].repeat(1, H), rows)
        return out.view(shape)


class PutsByTokenAndSlot(Block):
    """Results of all pairs beside one another, of an expert that has some."""

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, H)
        w, ids = self.route(x)
        rows = x.new_zeros(*ids.shape, H)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() > 0:
                rows[token, slot] = expert(x[token])
        return torch.einsum("tkh,tk->th", rows, w).view(shape)


@pytest.mark.parametrize("kind", [AddsByScatter, AddsByRepeatedIds, PutsByTokenAndSlot], ids=lambda kind: kind.__name__)
def test_rows_written_by_ids_as_wide_as_they_are(kind):
    proved_and_fused(decoder(kind), tokens(5))


class ListsByColumns(Block):
    """Pairs as rows of one list."""

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            pairs = torch.argwhere(ids == e)
            token, slot = pairs[:, 0], pairs[:, 1]
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out.view(shape)


class ListsOfAllExperts(Block):
    """Made before the loop, one for each."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        lists = [torch.where(ids == e) for e in range(self.num_experts)]
        for expert, (token, slot) in zip(self.experts, lists, strict=True):
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
        return out.view(shape)


@pytest.mark.parametrize("kind", [ListsByColumns, ListsOfAllExperts], ids=lambda kind: kind.__name__)
def test_lists_of_pairs_are_captured(kind):
    model, x = decoder(kind), tokens(5)
    expected = model(x)
    function, _ = prepared(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(function(x), expected, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


class Counts(nn.Module):
    """Every token through every expert, and a list of counts: Dynamo breaks the graph there, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.counts = Dense(), []

    def forward(self, x):
        out = self.moe(x)
        self.counts = torch.bincount(out.argmax(-1).flatten(), minlength=2).tolist()
        return out * len(self.counts)


class Dense(Block):
    def forward(self, x):
        weights, ids = self.route(x)
        return sum(((ids == e) * weights).sum(-1, keepdim=True) * expert(x) for e, expert in enumerate(self.experts))


def cut(rows, counts):
    return rows.split(counts)


class SplitByCounts(Block):
    """By a function beside it, whose result nobody follows."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        order = ids.flatten().argsort()
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        parts = cut(x.repeat_interleave(self.top_k, 0)[order], counts)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = torch.empty_like(rows)
        back[order] = rows
        return (back.view(-1, self.top_k, shape[-1]) * weights[..., None]).sum(1).view(shape)


@pytest.mark.parametrize("kind", [Counts, SplitByCounts], ids=lambda kind: kind.__name__)
def test_lists_of_counts_run_as_under_plain_compile(kind):
    """Nothing is captured for experts that are stacked alone, so that Dynamo breaks the graph where it did."""
    torch.manual_seed(0)
    model = kind().eval()
    expected = model(tokens(5))
    function, said = prepared(model)
    assert "stacked the experts" in said[0] and len(said) == 1
    assert not captured_under(function)
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(5)), expected, atol=1e-5, rtol=1e-5)


def test_advice_is_a_sentence():
    """What the loop is called, where it is, and what to do."""
    _, (said,) = prepared(decoder(next(iter(MISSES)), layers=2))
    assert said.startswith(
        "moe_ops.compile: layers.0.moe_experts and 1 more (Jitter) run their experts in a Python loop"
    )


# The first of two blocks with nothing between them must return what the second takes.
@pytest.mark.parametrize("kind", [DeepseekV3, MakeMoE, MoeInfer], ids=lambda kind: kind.__name__)
def test_two_blocks_directly_after_each_other(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind()).eval()
    expected = model(tokens(5))
    function, _ = prepared(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(5)), expected, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 2


@pytest.mark.parametrize("kind", [DeepseekV3, MakeMoE, MoeInfer, StackedExperts], ids=lambda kind: kind.__name__)
def test_quantised_experts(kind):
    """The trial computes with numbers in the place of the bytes, the compiled code with the bytes."""
    model = decoder(kind)
    if kind is not StackedExperts:
        moe_ops.stack_experts_(model)
    moe_ops.quantize_(model, "fp8_w8a16")
    expected = model(tokens(5))
    function, _ = prepared(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(5)), expected, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


def test_nothing_of_the_model_is_touched_by_the_trial():
    """Random states, gradients, buffers and weights are those of before, and hooks of the block hear nothing."""
    model, heard = decoder(Unique), []
    block = model.layers[0]["moe_experts"]
    block.register_forward_hook(lambda *given: heard.append(given))
    block.gate.weight.grad = torch.ones_like(block.gate.weight)
    state, drawn, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.getstate()
    prepared(model)
    assert torch.equal(torch.get_rng_state(), drawn) and random.getstate() == numbers
    assert heard == [] and torch.equal(block.gate.weight.grad, torch.ones_like(block.gate.weight))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model(tokens(2))
    assert len(heard) == 1


def test_one_trial_for_a_class_and_configuration(monkeypatch):
    """Layers that are alike share a verdict, in this model and in the next; one of other widths has its own."""
    made = []

    class Counting(rebind.Trial):
        def __init__(self, *args) -> None:
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(rebind, "Trial", Counting)
    monkeypatch.setattr(rebind, "_VERDICTS", {})
    monkeypatch.setattr(rebind, "_check_fused", lambda *given: None)
    prepared(decoder(Unique, layers=2))
    prepared(decoder(Unique, layers=3))
    assert len(made) == 1
    other = decoder(Unique, layers=2)
    other.layers[1]["moe_experts"].top_k = 3
    prepared(other)
    assert len(made) == 2


@pytest.mark.parametrize("kind", ["private attribute", "buffer of one element"])
def test_values_that_a_verdict_is_for(kind, monkeypatch):
    """A layer that holds another value has a trial of its own."""
    verdicts: dict = {}
    monkeypatch.setattr(rebind, "_VERDICTS", verdicts)
    monkeypatch.setattr(rebind, "_check_fused", lambda *given: None)
    model = decoder(Unique, layers=3)
    for layer, value in zip(model.layers, (0.0, 0.0, 0.5), strict=True):
        if kind == "private attribute":
            layer["moe_experts"]._coefficient = value
        else:
            layer["moe_experts"].register_buffer("coefficient", torch.tensor(value))
    prepared(model)
    assert len(verdicts) == 2


def test_what_a_loop_writes_of_its_own():
    """In place, in copies of rows and in results: that is no obstacle to a static form."""

    class Weighs(Unique):
        def forward(self, x):
            w, ids = self.route(x.reshape(-1, H))
            tokens, out = x.reshape(-1, H), torch.zeros_like(x.reshape(-1, H))
            for e in ids.unique().tolist():
                token, slot = torch.where(ids == e)
                rows = tokens[token]
                rows.mul_(1.0)
                result = self.experts[e](rows)
                result.view(-1, H).mul_(w[token, slot, None])
                out.index_add_(0, token, result)
            return out.view_as(x)

    _, (said,) = prepared(decoder(Weighs))
    assert "The static form is captured" in said


class NoisyRouter(Block):
    """The choice is one of noisy logits, in eval mode, too, as tutorials have it."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        logits = self.gate(x)
        best, ids = (logits + torch.randn_like(logits) * F.softplus(logits)).topk(self.top_k)
        scores = torch.full_like(logits, float("-inf")).scatter(-1, ids, best).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            if mask.any():
                out[mask] += expert(x[mask]) * scores[mask, i].unsqueeze(1)
        return out.view(shape)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_noise_before_the_loop(training):
    """The same from the same seed."""
    model = decoder(NoisyRouter, training=training)
    single = copy.deepcopy(model)
    function, said = prepared(model, fullgraph=True)
    assert "was proved equal" in said[0] and "original runs" not in said[0]
    results = []
    for one in (function, single):
        torch.manual_seed(1)
        results.append(one(tokens(5)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


class CountsInLists(Unique):
    """Counts as a list, at which Dynamo fails once it captures sizes of the data; ``self`` has another name."""

    def forward(module, x):
        w, ids = module.route(flat := x.reshape(-1, H))
        out = torch.zeros_like(flat)
        counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        for e, expert in enumerate(module.experts):
            if counts[e] == 0:
                continue
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, module.noisy(expert(flat[token])) * w[token, slot, None])
        return out.view_as(x)

    def noisy(self, rows):
        return rows * torch.rand(()) if self.training else rows


class Lengths(CountsInLists):
    """Asks for the truth of a size, at which Dynamo fails once it captures `where`."""

    def forward(self, x):
        w, ids = self.route(flat := x.reshape(-1, H))
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if len(token):
                out.index_add_(0, token, self.noisy(expert(flat[token])) * w[token, slot, None])
        return out.view_as(x)


class Numbers(CountsInLists):
    def forward(self, x):
        w, ids = self.route(flat := x.reshape(-1, H))
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if not token.numel():
                continue
            out.index_add_(0, token, self.noisy(expert(flat[token])) * w[token, slot, None])
        return out.view_as(x)


class Shapes(CountsInLists):
    def forward(self, x):
        w, ids = self.route(flat := x.reshape(-1, H))
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.shape[0]:
                out.index_add_(0, token, self.noisy(expert(flat[token])) * w[token, slot, None])
        return out.view_as(x)


@pytest.mark.parametrize("kind", [CountsInLists, Lengths, Numbers, Shapes])
def test_random_in_training_alone(kind):
    """Fused in eval mode; in training the original runs, and draws what it would for the experts that were hit."""
    torch.manual_seed(0)
    model = kind().eval()
    single = copy.deepcopy(model)
    function, said = prepared(model)
    assert STATIC in vars(model) and "In training the original runs." in said[0]
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(4)), single(tokens(4)))
    assert counters["moe_ops"]["fused"] == 1
    model.train(), single.train()
    results = []
    for one in (function, single):
        torch.manual_seed(1)
        results.append(one(tokens(4)))
    assert torch.equal(*results) and counters["moe_ops"]["fused"] == 1
    _, said = prepared(kind().train())
    assert "gives other random numbers" in said[0]


def test_a_loop_that_asks_for_truth_runs_beside_one_that_is_captured():
    """However it asks: alone, all ways are in the test above."""
    torch.manual_seed(0)
    model = nn.Sequential(MoeInfer(), Lengths()).train()
    single = copy.deepcopy(model)
    function, _ = prepared(model)
    results = []
    for one in (function, single):
        torch.manual_seed(1)
        results.append(one(tokens(4)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def truth_of_a_size(x):
    return x.clamp(max=1) if len((x > 1).nonzero()) else x


def parts_by_counts(x):
    flat = x.flatten(0, 1)
    counts = torch.bincount((flat[:, 0] > 0).long(), minlength=2)
    return torch.cat([part * 2 for part in flat.split(counts.tolist())]).view_as(x)


class Beside(nn.Module):
    """A block behind code that Dynamo breaks the graph at, and raises at once it captures sizes of the data."""

    def __init__(self, asks) -> None:
        super().__init__()
        self.asks, self.moe = asks, MoeInfer()

    def forward(self, x):
        return self.moe(self.asks(x)) * 2


@pytest.mark.parametrize("asks", [truth_of_a_size, parts_by_counts], ids=lambda asks: asks.__name__)
def test_code_beside_a_block_runs_as_under_plain_compile(asks):
    """In two graphs, the block in one of them; `explain` says why."""
    torch.manual_seed(0)
    model = Beside(asks).eval()
    expected = {n: model(tokens(n)) for n in (5, 3)}
    function, _ = prepared(model)
    assert captured_under(function)
    with torch.no_grad():
        for n, value in expected.items():
            torch.testing.assert_close(function(tokens(n)), value, atol=1e-5, rtol=1e-5)
        assert counters["moe_ops"]["fused"] == 2  # for one number of tokens, and for all others
        report = moe_ops.explain(model, tokens(5))
    assert (report.error, len(report.fused), report.refused, report.eager_frames) == (None, 1, [], [])
    assert "data-dependent expression" in report.graph_break_reasons[0]


@torch.compiler.disable(recursive=False)
def left_to_python(x):
    return x.sin()


def test_functions_that_are_not_to_be_captured_are_not():
    model, graphs = Beside(left_to_python).eval(), []
    function, _ = prepared(model, backend=lambda gm, inputs: graphs.append(gm.code) or gm.forward)
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(5)), model(tokens(5)), atol=1e-5, rtol=1e-5)
    assert graphs and not any("sin" in code for code in graphs)


def test_code_beside_a_block_in_data_parallel():
    """Dynamo compiles frames there by a copy of what it compiles others by."""
    torch.manual_seed(0)
    model = Beside(truth_of_a_size).eval()
    expected = model(tokens(5))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        function = nn.parallel.DistributedDataParallel(prepared(model)[0])
        torch.testing.assert_close(function(tokens(5)), expected, atol=1e-5, rtol=1e-5)
    finally:
        torch.distributed.destroy_process_group()


def test_the_cure_of_lists_of_counts_is_not_to_capture_sizes():
    """Dynamo raises at the list, once it captures what was counted."""
    (row,) = moe_ops.explain(SplitByCounts().eval(), tokens(5)).refused
    assert "no .tolist()" in row.cure and "capture_dynamic_output_shape_ops" not in row.cure
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = moe_ops.explain(SplitByCounts().eval(), tokens(5))
    assert report.error is None and "specialized integer" in report.refused[0].reason


def test_attribute_that_the_form_relies_on():
    """Code for several processes was left out; where there are some, the original runs."""
    torch.manual_seed(0)
    model = MoeInfer().eval()
    prepared(model)
    assert "moe_infer" in vars(model)
    model.ep_size = 2
    with pytest.raises(Exception):  # noqa: B017  (the original, with a layout that this model has not)
        model(tokens(3))


def test_deepcopy_of_what_was_bound():
    model = decoder(Unique, layers=2)
    prepared(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    bound = vars(twin.layers[0]["moe_experts"])["forward"]
    assert bound.__self__ is twin.layers[0]["moe_experts"]
    torch.testing.assert_close(twin(tokens(3)), decoder(Unique, layers=2)(tokens(3)))
    fresh = decoder(Unique, layers=2)
    fresh.load_state_dict(twin.state_dict())
    assert torch.equal(moe_ops.restore(twin)(tokens(3)), fresh(tokens(3)))


def test_what_was_bound_and_unpickled_is_a_loop_again():
    """Methods are pickled by name, and those of the class come back: what bound the first ones binds others."""
    model = decoder(Unique, layers=2)
    prepared(model)
    twin = pickle.loads(pickle.dumps(model))
    assert [loop.name for loop in find_loops(twin)] == [f"layers.{place}.moe_experts" for place in (0, 1)]
    compiled, said = prepared(twin)
    assert any("The static form was proved equal" in line for line in said) and not find_loops(twin)
    torch.compiler.reset()
    counters.clear()
    torch.testing.assert_close(compiled(tokens(3)), model(tokens(3)))
    assert counters["moe_ops"]["fused"] == 2 and counters["stats"]["unique_graphs"] == 1
    assert not {"forward", STATIC} & set(vars(moe_ops.restore(twin).layers[0]["moe_experts"]))


def test_weights_on_the_meta_device_are_to_be_loaded_first():
    model = decoder(Unique).to("meta")
    _, said = prepared(model)
    (line,) = (line for line in said if "weights are on the meta device" in line)
    assert line.endswith("Call moe_ops.compile(model) again when they are loaded.")
    model.to_empty(device="cpu").load_state_dict(decoder(Unique).state_dict())
    _, said = prepared(model)
    assert any("The static form was proved equal" in line for line in said)


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _hook_on_an_expert(model):
    return model.layers[0]["moe_experts"].experts[2].register_forward_hook(lambda *given: None)


def _bound_already(model):
    block = model.layers[0]["moe_experts"]
    block.forward = block.forward


SPOILED = {
    _optimizer: "its list of experts stays a list: experts.0.w1.weight, which a SGD optimizer holds already",
    _hook_on_an_expert: "experts.2 has hooks, which would also be called for experts without tokens",
    _bound_already: "its forward is bound to the instance already",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__.strip("_"))
def test_instance_that_is_left_alone(spoil):
    model = decoder(Unique)
    kept = spoil(model)
    _, said = prepared(model)
    assert any(SPOILED[spoil].lower() in line.lower() for line in said)
    assert STATIC not in vars(model.layers[0]["moe_experts"]) and kept is kept


def test_hooks_that_come_after_it_hear_of_experts_without_tokens():
    """As the warning says; results are what they were."""
    model, rows = decoder(Unique), []
    expected = model(tokens(1))
    compiled, said = prepared(model)
    assert any("put on experts from now on are called for it, too, with no rows." in line for line in said)
    for expert in model.layers[0]["moe_experts"].experts:
        expert.register_forward_hook(lambda _, given, out: rows.append(given[0].shape[0]))
    torch.testing.assert_close(compiled(tokens(1)), expected)
    assert len(rows) == len(model.layers[0]["moe_experts"].experts) and 0 in rows


@pytest.mark.parametrize("bound", [False, True], ids=["function", "method"])
def test_a_wrapper_around_a_static_form_stays(bound):
    """As accelerate, or a user's logging, puts one there; it calls what it was made around."""
    model = decoder(Unique)
    expected = model(tokens(3))
    prepared(model)
    block = model.layers[0]["moe_experts"]
    inside, calls = block.forward, []

    def forward(*given):
        calls.append(len(given))
        return inside(given[-1])

    block.forward = MethodType(forward, block) if bound else forward
    prepared(model)
    torch.testing.assert_close(model(tokens(3)), expected)
    torch.testing.assert_close(moe_ops.restore(model)(tokens(3)), expected)
    assert calls == [1 + bound] * 2


def test_without_source():
    scope: dict = {"torch": torch, "Block": Block}
    exec(
        "class Hidden(Block):\n"
        "    def forward(self, x):\n"
        "        for e in x.unique().tolist():\n"
        "            x = self.experts[e](x)\n"
        "        return x\n",
        scope,
    )
    with pytest.raises(rebind.NotStatic, match=r"the source of Hidden\.forward is not available"):
        rebind.static_form(scope["Hidden"]())


def test_line_numbers_are_those_of_the_file():
    """So that explain, and a traceback, show the user's own code."""
    torch.manual_seed(0)
    model = MoeInferAdding().eval()
    prepared(model)
    one, other = (vars(model)["moe_infer"].__func__.__wrapped__.__code__, MoeInferAdding.moe_infer.__wrapped__.__code__)
    lines, original = ({line for *_, line in code.co_lines() if line is not None} for code in (one, other))
    assert one.co_filename == other.co_filename
    assert min(original) <= min(lines) and max(lines) <= max(original)


class SeldomNegative(Unique):
    """Some ids count from the end, of tokens such as no trial has."""

    def route(self, x):
        weights, ids = super().route(x)
        return weights, ids.masked_fill(x[:, :1] > 8, -1)


class SeldomNegativeSlices(SeldomNegative):
    """They move the rows of the others, by counts that leave them out."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        flat = ids.view(-1)
        order = flat.argsort()
        ends = torch.histc(flat.to(x.dtype), bins=E, min=0, max=E - 1).long().cumsum(0).tolist()
        out = torch.zeros_like(x)
        for e, end in enumerate(ends):
            pairs = order[ends[e - 1] if e > 0 else 0 : end]
            token = pairs // self.top_k
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[pairs, None])
        return out


class CountedOnce(Unique):
    """Slices by counts that have an expert of a token once, however often it has it."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        counts = ids.new_zeros((ids.shape[0], E))
        counts.scatter_(1, ids, 1)
        order = ids.view(-1).argsort()
        ends = counts.sum(0).cumsum(0).tolist()
        out = torch.zeros_like(x)
        for e, end in enumerate(ends):
            pairs = order[ends[e - 1] if e > 0 else 0 : end]
            token = pairs // self.top_k
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[pairs, None])
        return out


class SeldomTwice(CountedOnce):
    def route(self, x):
        weights, ids = super().route(x)
        return weights, torch.where(x[:, :1] > 8, ids[:, :1], ids)


class SkipsNegative(SeldomNegative):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            if e == -1:
                continue
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


@pytest.mark.parametrize("kind", [SeldomNegative, SeldomNegativeSlices], ids=lambda kind: kind.__name__)
def test_ids_that_may_be_negative(kind):
    """Experts by the numbers of ids: a negative one counts from the end, which no form over all experts does."""
    assert_left(kind, "its ids cannot be proved not to be negative")


def test_ids_that_are_asked_for_being_negative():
    torch.manual_seed(0)
    assert verdict_of(SkipsNegative().eval(), "")[0].forms


def test_ids_that_may_be_twice_a_tokens_where_it_is_counted_once():
    torch.manual_seed(0)
    assert verdict_of(CountedOnce().eval(), "")[0].forms
    assert_left(SeldomTwice, "its ids cannot be proved to be a token's only once each")


class MayBeMasked(Unique):
    """Tokens of padding have the last expert, as -1 counts from the end."""

    def forward(self, x, mask=None):
        return self.mixed(*self.chosen(x, mask)).view(x.shape)

    def chosen(self, x, mask):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        return x, w, ids if mask is None else ids.masked_fill(mask.view(-1, 1), -1)

    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class MaskedInForward(MayBeMasked):
    def forward(self, x, mask=None, *, causal=False, **others):
        rows, w, ids = self.chosen(x, mask)
        out = torch.zeros_like(rows)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](rows[token]) * w[token, slot, None])
        return out.view(x.shape)


class MaskedByANumber(MaskedInForward):
    def forward(self, x, padded=0):
        return super().forward(x, torch.arange(x[..., 0].numel()) < padded)


class Masks(nn.Module):
    """The loop is in a module of its own, which is given the ids."""

    def __init__(self, inner=None) -> None:
        super().__init__()
        self.inner = MixesGiven() if inner is None else inner

    def forward(self, x, mask=None):
        return self.inner.mixed(*self.inner.chosen(x, mask)) if mask is not None else self.inner(
            *self.inner.chosen(x, None)).view(x.shape)  # fmt: skip


class MixesGiven(MayBeMasked):
    def forward(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class Given(Masks):
    def forward(self, x):
        return super().forward(x)


def test_ids_that_an_argument_makes_others():
    """The static form runs where the argument is not given, as in the trial, and the original where it is."""
    torch.manual_seed(0)
    model = MaskedInForward().eval()
    mask = torch.arange(10).view(2, 5) < 4
    expected = [model(tokens(5)), model(tokens(5), mask), model(tokens(5), unknown=1)]
    with torch.no_grad():
        function, _ = prepared(model)
        found = [function(tokens(5))]
        assert counters["moe_ops"]["fused"] == 1
        found += [function(tokens(5), mask), function(tokens(5), unknown=1)]
    assert counters["moe_ops"]["fused"] == 1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def twice(kind):
    """Two modules with one module inside."""
    first = kind()
    return nn.ModuleList([first, kind(first.inner)])


@pytest.mark.parametrize(
    "make, path, reason",
    [
        (MayBeMasked, "", "others where forward is given more than hidden states"),
        (MaskedByANumber, "", "others where padded is given"),
        (Masks, "inner", "others where the model is given more than hidden states"),
        (lambda: nn.Sequential(Masks()), "0.inner", "others where 0 is given more than hidden states"),
        (lambda: twice(Given), "0.inner", "others where 0.inner is called from another module"),
    ],
    ids=["by a method", "a number", "around", "of a layer around", "shared"],
)
def test_ids_that_may_be_others_than_in_a_trial(make, path, reason):
    torch.manual_seed(0)
    verdict, _ = verdict_of(make().eval(), path)
    assert not verdict.forms and f"its ids may be {reason}" in verdict.reason


def test_ids_of_a_module_around():
    torch.manual_seed(0)
    assert verdict_of(Given().eval(), "inner")[0].forms


class NegativeInTraining(SeldomNegative):
    def route(self, x):
        return super().route(x) if self.training else Unique.route(self, x)


@pytest.mark.parametrize("training, proved", [(False, False), (True, None)], ids=["eval", "train"])
def test_ids_that_may_be_negative_in_one_mode(training, proved):
    torch.manual_seed(0)
    verdict, _ = verdict_of(NegativeInTraining().train(training), "")
    assert (verdict.training if verdict.forms else None) == proved


class Muted(Unique):
    """Experts that a buffer mutes are left out; in a trial none is."""

    def __init__(self) -> None:
        super().__init__()
        self.active = nn.Buffer(torch.ones(E))

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=E)
        counts.masked_fill_(self.active == 0, 0)
        for e in counts.nonzero().flatten().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class MovedLater(Unique):
    """Some tokens get another expert, which need not have been hit before; in a trial no token does."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        hit = ids.unique().tolist()
        ids = ids.masked_fill(x[:, :1] > 8, 0)
        for e in hit:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class MovedByAView(Unique):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out, ids = torch.zeros_like(x), ids.clone()
        hit = ids.unique().tolist()
        first = ids[:, 0]
        first[x[:, 0] > 8] = 0
        for e in hit:
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class CountedBefore(Unique):
    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        ids = ids.masked_fill(x[:, :1] > 8, 0)
        for e in range(E):
            if counts[e] == 0:
                continue
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out


class SlicesInPlace(Unique):
    """Slices in the order of ids that some tokens no longer have."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        flat = ids.flatten().clone()
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        flat.masked_fill_((x[:, 0] > 8).repeat_interleave(self.top_k), 0)
        rows, outs, start = x[order // self.top_k], [], 0
        for e, n in enumerate(counts.tolist()):
            end = start + n
            if n == 0:
                continue
            outs.append(self.experts[e](rows[start:end]))
            start = end
        outs = torch.cat(outs)
        y = torch.empty_like(outs)
        y[order] = outs
        return (y.view(-1, self.top_k, H) * w.unsqueeze(-1)).sum(1)


class CountsInPlaceOfSlices(Unique):
    """Slices as long as other experts have rows, for tokens such as no trial has."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        flat = ids.flatten()
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=E)
        counts.copy_(torch.where((x > 8).any(), counts.flip(0), counts))
        rows, outs, start = x[order // self.top_k], [], 0
        for e, n in enumerate(counts.tolist()):
            end = start + n
            if n == 0:
                continue
            outs.append(self.experts[e](rows[start:end]))
            start = end
        outs = torch.cat(outs)
        y = torch.empty_like(outs)
        y[order] = outs
        return (y.view(-1, self.top_k, H) * w.unsqueeze(-1)).sum(1)


class ChunksOfOtherSizes(Unique):
    """Chunks as long as other experts have rows, for tokens such as no trial has."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        order = ids.flatten().argsort()
        sizes = torch.bincount(ids.flatten(), minlength=E).tolist()
        sizes = sizes[::-1] if bool((x > 8).any()) else sizes
        parts = x[order // self.top_k].split(sizes)
        outs = [self.experts[e](parts[e]) for e in range(E)]
        outs = torch.cat(outs)
        y = torch.empty_like(outs)
        y[order] = outs
        return (y.view(-1, self.top_k, H) * w.unsqueeze(-1)).sum(1)


class ChunksOfChangedSizes(Unique):
    """The same, written in place."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        order = ids.flatten().argsort()
        counts = torch.bincount(ids.flatten(), minlength=E)
        counts.copy_(torch.where((x > 8).any(), counts.flip(0), counts))
        parts = x[order // self.top_k].split(counts.tolist())
        outs = [self.experts[e](parts[e]) for e in range(E)]
        outs = torch.cat(outs)
        y = torch.empty_like(outs)
        y[order] = outs
        return (y.view(-1, self.top_k, H) * w.unsqueeze(-1)).sum(1)


class CountedTwice(CountedOnce):
    """Into zeros, and once more for tokens such as no trial has."""

    def forward(self, x):
        x = x.reshape(-1, H)
        w, ids = self.route(x)
        counts = ids.new_zeros((ids.shape[0], E))
        counts.scatter_(1, ids, 1)
        counts[x[:, 0] > 8] = 1
        order = ids.view(-1).argsort()
        ends = counts.sum(0).cumsum(0).tolist()
        out = torch.zeros_like(x)
        for e, end in enumerate(ends):
            pairs = order[ends[e - 1] if e > 0 else 0 : end]
            token = pairs // self.top_k
            out.index_add_(0, token, self.experts[e](x[token]) * w.view(-1)[pairs, None])
        return out


@pytest.mark.parametrize(
    "kind, reason",
    [
        (SlicesInPlace, "flat changes before the loop"),
        (CountsInPlaceOfSlices, "is no list of the experts that were hit"),
        (ChunksOfOtherSizes, "no loop in it is over the experts that were hit"),
        (ChunksOfChangedSizes, "no loop in it is over the experts that were hit"),
        (CountedTwice, "no loop in it is over the experts that were hit"),
        (Muted, "may be other experts than those that were hit"),
        (MovedLater, "what the loop writes is not chosen by hit alone"),
        (MovedByAView, "what the loop writes is not chosen by hit alone"),
        (CountedBefore, "no loop in it is over the experts that were hit"),
    ],
    ids=[
        "ids in place",
        "lengths in place",
        "sizes",
        "sizes in place",
        "counts twice",
        "counts in place",
        "assigned",
        "a view in place",
        "counts before",
    ],
)
def test_what_changes_between_its_count_and_the_loop(kind, reason):
    assert_left(kind, reason)


class WarmsUp(Unique):
    """A branch that runs from the third call on, by a number that changes between the start of a call and it."""

    calls = 0

    def forward(self, x):
        self.counted()
        shape, x = x.shape, x.reshape(-1, H)
        w, ids = self.route(x)
        if self.calls > 2:
            w = w * 2
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out.view(shape)

    def counted(self):
        self.calls += 1


def test_a_branch_that_what_a_call_itself_writes_decides():
    torch.manual_seed(0)
    model = WarmsUp().eval()
    with torch.no_grad():
        eager = copy.deepcopy(model)
        expected = [eager(tokens(3)) for _ in range(4)]
        function, _ = prepared(model)
        found = [function(tokens(3)) for _ in range(4)]
    assert counters["moe_ops"]["fused"] and not torch.equal(expected[1], expected[2])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
