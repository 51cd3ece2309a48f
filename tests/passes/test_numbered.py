"""Experts that are no `nn.ModuleList`: numbered attributes, lists beside them, dictionaries, lists of parameters. They
are stacked, and their loops fused, with the outputs and all gradients of the code as written.
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.foreign import Expert
from compile_passes.loops import numbered_experts
from compile_passes.narrow import narrowing
from tests.passes.blocks import H, I, K

E = 4  # not as many as an expert has weights, which are numbered, too


class Mixture(nn.Module):
    """A loop over the numbers of experts, which are wherever `expert` finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.num_experts = E
        self.make()

    def make(self) -> None:
        for e in range(E):
            setattr(self, f"expert_{e}", Expert(H, I, torch.float32))

    def expert(self, x, e):
        return getattr(self, f"expert_{e}")(x)

    def numbers(self, ids):
        return range(self.num_experts)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, H)
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in self.numbers(ids):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.expert(x[token], e) * weights[token, slot, None])
        return out.view(hidden_states.shape)


class Added(Mixture):
    def make(self):
        for e in range(1, E + 1):
            self.add_module(f"expert{e}", Expert(H, I, torch.float32))

    def expert(self, x, e):
        return self._modules[f"expert{e + 1}"](x)


class Listed(Mixture):
    """Beside what is called alike, or is not there."""

    def make(self):
        super().make()
        self.expert_fc1, self.expert_fc2 = nn.Linear(H, I), nn.Linear(I, H)
        self.register_module("expert_99", None)
        self.shared_expert_0, self.shared_expert_1 = nn.Linear(H, H), nn.Linear(H, H)
        self.listed = [getattr(self, f"expert_{e}") for e in range(E)]

    def expert(self, x, e):
        return self.listed[e](x)


class OtherNames(Mixture):
    """Not called experts, but as many as the router scores."""

    def make(self):
        for e in range(E):
            setattr(self, f"ffn_{e}", Expert(H, I, torch.float32))

    def expert(self, x, e):
        return getattr(self, f"ffn_{e}")(x)


class OtherNamesListed(OtherNames):
    """Beside numbered projections, of which there are fewer."""

    def make(self):
        super().make()
        self.fc1, self.fc2 = nn.Linear(H, I), nn.Linear(I, H)

    def expert(self, x, e):
        return [getattr(self, f"ffn_{n}") for n in range(self.num_experts)][e](x)


class Named(Mixture):
    def make(self):
        self.names = [f"of_{chr(97 + e)}" for e in range(E)]
        self.experts = nn.ModuleDict({name: Expert(H, I, torch.float32) for name in self.names})

    def expert(self, x, e):
        return self.experts[self.names[e]](x)


class NamedLayers(Mixture):
    """Every expert is a dictionary as well, of its layers."""

    def make(self):
        self.experts = nn.ModuleDict({
            f"expert_{e}": nn.ModuleDict({"wi": nn.Linear(H, I, bias=False), "wo": nn.Linear(I, H, bias=False)})
            for e in range(E)
        })  # fmt: skip

    def expert(self, x, e):
        layers = self.experts[f"expert_{e}"]
        return layers["wo"](F.relu(layers["wi"](x)))


class Parameters(Mixture):
    """Lists of weights, by which rows are multiplied."""

    def make(self):
        self.w1, self.w3, self.w2 = (
            nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.2) for _ in range(E))
            for shape in ((I, H), (I, H), (H, I))
        )

    def expert(self, x, e):
        return (F.silu(x @ self.w1[e].T) * (x @ self.w3[e].T)) @ self.w2[e].T


class ParametersByName(Mixture):
    """Weights in dicts, by numbered keys."""

    def make(self):
        self.w1, self.w3, self.w2 = (
            nn.ParameterDict({f"expert_{e}": nn.Parameter(torch.randn(shape) * 0.2) for e in range(E)})
            for shape in ((I, H), (I, H), (H, I))
        )

    def expert(self, x, e):
        w1, w3, w2 = (weights[f"expert_{e}"] for weights in (self.w1, self.w3, self.w2))
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


class ParametersOfDictsWalkedThrough(ParametersByName):
    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, H)
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, (name, w1) in enumerate(self.w1.items()):
            h = F.silu(x @ w1.T) * (x @ self.w3.get(name).T)
            out = out + (weights * (ids == e)).sum(-1, keepdim=True) * F.linear(h, list(self.w2.values())[e])
        return out.view(hidden_states.shape)


class Linear(Parameters):
    def expert(self, x, e):
        return F.linear(F.silu(F.linear(x, self.w1[e])) * F.linear(x, self.w3[e]), self.w2[e])


class Zipped(Parameters):
    """The lists walked through side by side."""

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, H)
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, (w1, w3, w2) in enumerate(zip(self.w1, self.w3, self.w2[:], strict=True)):
            out = out + (weights * (ids == e)).sum(-1, keepdim=True) * F.linear(F.silu(x @ w1.T) * (x @ w3.T), w2)
        return out.view(hidden_states.shape)


class NumberedHits(Mixture):
    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, H)
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, getattr(self, f"expert_{e}")(x[token]) * weights[token, slot, None])
        return out.view(hidden_states.shape)


class ParameterHits(Parameters):
    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, H)
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out[token] += self.expert(x[token], e) * weights[token, slot, None]
        return out.view(hidden_states.shape)


GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randn(2, 6, H, generator=GENERATOR, dtype=torch.float64)
# As many tokens of one direction: most experts are empty.
ALIKE = TOKENS[:1, :1] * torch.linspace(0.5, 2, 12, dtype=torch.float64).view(2, 6, 1)
# By whether gradients are asked for: one graph for both batches; and one for one token and one for any other number.
BATCHES = {True: (TOKENS, ALIKE), False: (TOKENS, ALIKE[:1, :1], ALIKE[:, :4])}


def made(kind: type[Mixture]) -> Mixture:
    torch.manual_seed(0)
    return kind().double()


def prepared(model: nn.Module) -> tuple[object, list[str]]:
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function = moe_ops.compile(model, backend="moe_ops_eager")
    return function, [str(warning.message) for warning in caught]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name; none of an expert without tokens, or zeros."""
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.named_parameters()}


def check(kind: type[Mixture], training: bool) -> int:
    """Outputs and gradients of every batch are those of the code as written; how many graphs were fused."""
    single, model = made(kind).train(training), made(kind).train(training)
    function, _ = prepared(model)
    for batch in BATCHES[training]:
        results = []
        for one in (single, function):
            x = batch.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                out = one(x)
            if training:
                (out * torch.linspace(-1, 1, H, dtype=out.dtype)).sum().backward()
            results.append((out.detach(), x.grad))
        torch.testing.assert_close(*results)
    counts = counters["moe_ops"]["fused"] * (counters["moe_ops"]["fused"] == counters["stats"]["unique_graphs"])
    moe_ops.restore(model)
    assert list(dict(model.named_parameters())) == list(dict(single.named_parameters()))
    torch.testing.assert_close(gradients(model), gradients(single))
    return counts


KINDS = (
    Mixture,
    Added,
    Listed,
    OtherNames,
    OtherNamesListed,
    Named,
    NamedLayers,
    Parameters,
    Linear,
    Zipped,
    ParametersByName,
    ParametersOfDictsWalkedThrough,
    NumberedHits,
    ParameterHits,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fused_in_training(kind):
    assert check(kind, training=True) == 1


# One of each kind of container, and loops over the experts that were hit.
@pytest.mark.parametrize(
    "kind", [Mixture, Named, ParametersByName, NumberedHits, ParameterHits], ids=lambda kind: kind.__name__
)
def test_fused_for_every_number_of_tokens(kind):
    assert check(kind, training=False) == 3


@pytest.mark.parametrize("kind", [Listed, OtherNames, Parameters, ParametersByName], ids=lambda kind: kind.__name__)
def test_state_dict_copies_and_back(kind):
    """Old keys both ways, of copies and of what was pickled too, and a missing one is missed."""
    single, model = made(kind), moe_ops.stack_experts_(made(kind))
    state = single.state_dict()
    assert not list(dict(model.named_parameters())) == list(dict(single.named_parameters()))
    other = {key: value + 1 for key, value in state.items()}
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = one.state_dict()
        assert sorted(found) == sorted(state) and all(torch.equal(found[key], state[key]) for key in state)
        one.load_state_dict(other)
        assert all(torch.equal(value, other[key]) for key, value in one.state_dict().items())
        one_weight = ("w1.1", "w1.expert_1", "expert_1.w1.weight", "ffn_1.w1.weight")
        some = {key: value for key, value in state.items() if key not in one_weight}
        assert len(one.load_state_dict(some, strict=False).missing_keys) == 1
        one.load_state_dict(state)
        assert torch.equal(one(TOKENS), single(TOKENS))
    moe_ops.restore(model)
    assert list(model.state_dict()) == list(state) and type(model) is kind
    assert [type(part) for part in model.modules()] == [type(part) for part in single.modules()]


def test_lists_of_parameters_are_as_they_were():
    single, model = made(Parameters), moe_ops.stack_experts_(made(Parameters))
    one, other = model.w1, single.w1
    assert len(one) == E and isinstance(one, nn.ParameterList) and repr(one[0].shape) == repr(other[0].shape)
    for part in (slice(1, 3), slice(None, None, -2)):
        assert isinstance(one[part], nn.ParameterList) and len(one[part]) == len(other[part])
        assert all(map(torch.equal, one[part], other[part]))
    assert torch.equal(one[-1], other[-1]) and all(map(torch.equal, one, other))
    sum(weight.sum() for weight in one[1:2]).backward()
    assert one.stacked.grad[1].eq(1).all() and one.stacked.grad.sum() == other[1].numel()
    with torch.no_grad():
        one[0] += 1
        torch.testing.assert_close(one[0], other[0] + 1)
        with pytest.raises(ValueError, match="left in its place"):
            one[0] = torch.zeros_like(one[0])


@pytest.mark.parametrize(
    "made_of",
    [
        lambda one, other: one,
        lambda one, other: one.copy(),
        lambda one, other: one | other,
        lambda one, other: other | one,
        lambda one, other: {} | one,
    ],
    ids=["itself", "copy", "joined with another", "another joined with it", "joined with a plain dict"],
)
def test_dicts_of_parameters_are_as_they_were(made_of):
    """What is made of one holds its slices, through which gradients go."""
    single, model = made(ParametersByName), moe_ops.stack_experts_(made(ParametersByName))
    other = nn.ParameterDict({"another": torch.ones(2)})
    wanted, got = made_of(single.w1, other), made_of(model.w1, other)
    assert list(got) == list(wanted) and len(got) == len(wanted) and "expert_1" in got
    assert all(torch.equal(got[key], value) for key, value in wanted.items())
    got["expert_1"].sum().backward()
    assert model.w1.stacked.grad[1].eq(1).all() and model.w1.stacked.grad.sum() == model.w1["expert_1"].numel()


@pytest.mark.parametrize("lists", [False, True], ids=["attributes", "parameters"])
def test_their_number_is_no_width(lists):
    """Of a block of which a narrower copy is tried."""
    block = nn.Module()
    block.gate = nn.Linear(256, 64, bias=False)
    if lists:
        block.w1 = nn.ParameterList(nn.Parameter(torch.empty(256, 256)) for _ in range(64))
    else:
        for e in range(64):
            block.add_module(f"expert_{e}", nn.Linear(256, 256, bias=False))
    found = narrowing(block)
    assert found is not None and found.widths == {256}


# ---- what is left alone


class NextOne(Mixture):
    def expert(self, x, e):
        return getattr(self, f"expert_{(e + 1) % E}")(x)


class NextWeight(Parameters):
    def expert(self, x, e):
        return (F.silu(x @ self.w1[e].T) * (x @ self.w3[e].T)) @ self.w2[e - 1].T


@pytest.mark.parametrize("kind", [NextOne, NextWeight], ids=lambda kind: kind.__name__)
def test_other_experts_than_the_tokens_chose(kind):
    assert check(kind, training=True) == 0


class Gap(Mixture):
    def make(self):
        super().make()
        self.expert_9 = Expert(H, I, torch.float32)


class Twice(Mixture):
    def make(self):
        super().make()
        self.expert_01 = Expert(H, I, torch.float32)


class TwoGroups(Mixture):
    def make(self):
        super().make()
        self.text_expert_0, self.text_expert_1 = nn.Linear(H, H), nn.Linear(H, H)


class OtherCount(OtherNames):
    """A router that scores one more than there are."""

    def make(self):
        super().make()
        self.gate = nn.Linear(H, E + 1, bias=False)


class OtherWidth(OtherNames):
    def make(self):
        super().make()
        self.ffn_1 = Expert(H, I + 1, torch.float32)


class Projections(OtherNames):
    """As many as the router scores, but no experts of two products."""

    def make(self):
        for e in range(E):
            setattr(self, f"ffn_{e}", nn.Linear(H, H))


class OtherNamesTwice(OtherNames):
    def make(self):
        super().make()
        for e in range(E):
            setattr(self, f"other_{e}", Expert(H, I, torch.float32))


class OwnState(Mixture):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}own.{name}": weight for name, weight in self._parameters.items()})


class OtherShape(Parameters):
    def make(self):
        super().make()
        self.w1[E - 1] = nn.Parameter(torch.randn(1, H))


class NoParameter(Parameters):
    def make(self):
        super().make()
        self.w1[E - 1] = None

    def numbers(self, ids):
        return range(E - 1)


class OneMore(Parameters):
    def make(self):
        super().make()
        self.w2.scale = nn.Parameter(torch.ones(H, I))


class InTwoLists(Parameters):
    def make(self):
        super().make()
        self.w3 = nn.ParameterList(self.w1)


class ByRole(Mixture):
    """A dict of the weights of one layer is no list of experts, though it has as many as the router scores."""

    def make(self):
        self.experts = nn.ParameterDict({name: nn.Parameter(torch.randn(H, H) * 0.2) for name in "abcdefgh"[:E]})

    def expert(self, x, e):
        return torch.relu(x @ self.experts["abcdefgh"[e]])


class OneKeyOfAnotherName(ParametersByName):
    def make(self):
        super().make()
        for weights in (self.w1, self.w3, self.w2):
            weights["shared"] = nn.Parameter(weights["expert_0"] + 1)


class OtherShapeInDict(ParametersByName):
    def make(self):
        super().make()
        self.w3["expert_1"] = nn.Parameter(torch.randn(1, H))


class AsksForLeaves(Parameters):
    def expert(self, x, e):
        return super().expert(x, e) * (2 if self.w1[e].is_leaf else 1)


class PartlyFrozen(Mixture):
    """A stack trains or does not: an optimizer's weight decay would change what is frozen."""

    def make(self):
        super().make()
        self.expert_1.requires_grad_(False)


LEFT = {
    Gap: None, Twice: None, TwoGroups: None, OtherCount: None, OtherWidth: None, Projections: None,
    OtherNamesTwice: None, OwnState: "has a _save_to_state_dict of its own",
    OtherShape: "unlike that of", NoParameter: "has others than", OneMore: "has others than",
    OtherShapeInDict: "unlike that of", ByRole: None, OneKeyOfAnotherName: None,
    InTwoLists: "in more than one place", AsksForLeaves: "asks for is_leaf",
    PartlyFrozen: "is frozen, unlike that of expert 0",
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_left_alone(kind):
    single, model = made(kind), made(kind)
    function, said = prepared(model)
    assert torch.equal(function(TOKENS), single(TOKENS)) and counters["moe_ops"]["fused"] == 0
    if LEFT[kind] is None:
        assert numbered_experts(model) == ("", ())
    else:
        assert LEFT[kind] in said[0]
    assert list(model.state_dict()) == list(single.state_dict())
    assert list(dict(model.named_parameters())) == list(dict(single.named_parameters()))
