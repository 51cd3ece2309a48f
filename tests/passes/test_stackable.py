"""Lists of experts that stay lists, as code, state dicts or somebody's references need each expert's own parameters."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import weakref
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_ops
from benchmarks.foreign import Expert, ExpertLoop, perceptron
from compile_passes import stackable
from tests.passes.blocks import FEW as E
from tests.passes.blocks import H, I
from tests.passes.compare import compiled
from tests.passes.test_stacking import X, mixture


def dtype_of(module):
    return next(module.parameters()).dtype


def penalty(module):
    return sum(weight.square().sum() for weight in module.parameters())


class AsksByAProperty(Expert):
    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, x):
        return super().forward(x.to(self.dtype))


class AsksByAFunction(Expert):
    def forward(self, x):
        return super().forward(x.to(dtype_of(self)))


class AsksByAnotherName(Expert):
    def forward(this, x):
        return this.asked(x)

    def asked(this, x):
        return super().forward(x) + sum(weight.square().sum() for weight in this.parameters())


class AsksInABaseClass(AsksByAFunction):
    def forward(self, x):
        return super().forward(x) * 2


class AsksByARecord(Expert):
    def forward(self, x):
        return super().forward(x) * len(self.w1._parameters)


class AsksOfOneModule(Expert):
    def forward(self, x):
        return super().forward(x) * len(list(self.w1.parameters(recurse=False)))


class AsksForOneByName(Expert):
    def forward(self, x):
        return super().forward(x) * self.get_parameter("w1.weight").abs().max()


class ComparesTypes(nn.Module):
    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, hidden), nn.Linear(hidden, dim)])

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x)) if type(layer) is nn.Linear else layer(x)
        return x


class ComparesClasses(Expert):
    def forward(self, x):
        return super().forward(x) * (1 if self.w1.__class__ == nn.Linear else 2)


class AsksForLeaves(Expert):
    def forward(self, x):
        return super().forward(x) * (1 if self.w1.weight.is_leaf else 2)


class AsksForAParameter(Expert):
    def forward(self, x):
        return super().forward(x) * (1 if isinstance(self.w1.weight, nn.Parameter) else 2)


class LoadsTransposed(Expert):
    def _load_from_state_dict(self, state, prefix, *others):
        super()._load_from_state_dict({key: value.clone() for key, value in state.items()}, prefix, *others)


class SavesOtherwise(Expert):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix + "own.", keep_vars)


class HasAHook(Expert):
    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__(dim, hidden, *others)
        self.register_load_state_dict_pre_hook(lambda *given: None)


class Marked(Expert):
    """One weight's scale is read where it runs."""

    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__(dim, hidden, *others)
        self.w1.weight.scale_of_rows = 3.0

    def forward(self, x):
        return super().forward(x) * getattr(self.w1.weight, "scale_of_rows", 1.0)


class Numbered(Expert):
    """Each weight has a number of its own."""

    count = 0

    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__(dim, hidden, *others)
        Numbered.count += 1
        self.w1.weight.number = Numbered.count


class NoHeirs(nn.Linear):
    def __init_subclass__(cls, **options) -> None:
        raise TypeError("no class may be derived from this one")


class OfNoHeirs(Expert):
    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__(dim, hidden, *others)
        self.w1 = NoHeirs(dim, hidden, bias=False)


def scripted(dim: int, hidden: int, *others) -> nn.Module:
    return torch.jit.script(perceptron(dim, hidden))


ASKING = {
    AsksByARecord: r"AsksByARecord\.forward asks for _parameters",
    AsksOfOneModule: r"AsksOfOneModule\.forward asks for parameters",
    AsksForOneByName: r"AsksForOneByName\.forward asks for get_parameter",
    ComparesTypes: r"ComparesTypes\.forward asks for a class",
    ComparesClasses: r"ComparesClasses\.forward asks for a class",
    AsksForLeaves: r"AsksForLeaves\.forward asks for is_leaf",
    AsksForAParameter: r"AsksForAParameter\.forward asks for Parameter",
    LoadsTransposed: r"experts\.0, which has a _load_from_state_dict of its own",
    SavesOtherwise: r"experts\.0, which has a _save_to_state_dict of its own",
    HasAHook: r"experts\.0, which has a hook on its state dict",
    Marked: r"experts\.0\.w1\.weight, which has an attribute scale_of_rows, which a slice of a stack has not",
    Numbered: r"experts\.1\.w1\.weight, which has an attribute number that expert 0's has not",
    scripted: r"experts\.0, which is TorchScript",
    OfNoHeirs: r"no class can be derived from NoHeirs: TypeError: no class may be derived from this one",
}


@pytest.mark.parametrize("make", ASKING, ids=lambda make: make.__name__)
def test_experts_whose_code_needs_its_own_parameters(make):
    """Nothing is changed; `moe_ops.compile` says so, and the list runs as it did."""
    model = mixture("mask", make)
    before, expected = copy.deepcopy(model.state_dict()), model(X)
    with pytest.raises(ValueError, match=ASKING[make]):
        moe_ops.stack_experts_(model)
    with pytest.warns(UserWarning, match="a list of experts stays a list"):
        function = moe_ops.compile(model, backend="moe_ops_eager")
    torch.testing.assert_close(function(X), expected)
    state = model.state_dict()
    assert list(state) == list(before) and all(torch.equal(value, before[key]) for key, value in state.items())


def same_when_compiled(model):
    """Of a stacked model, in one graph: what it gave before, and the gradients of the weights of each expert."""
    model(X).square().sum().backward()
    expected, gradients = model(X), {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    moe_ops.stack_experts_(model)
    found = compiled(model, fullgraph=True)(X)
    found.square().sum().backward()
    moe_ops.restore(model)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-2, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "make", [AsksByAProperty, AsksByAFunction, AsksByAnotherName, AsksInABaseClass], ids=lambda make: make.__name__
)
def test_experts_whose_code_asks_for_slices(make):
    same_when_compiled(mixture("mask", make))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mixture("mask")


class Penalised(Around):
    def forward(self, x):
        return self.layer(x) + sum(penalty(expert) for expert in self.layer.experts)


class PenalisedInABaseClass(Penalised):
    def forward(self, x):
        return super().forward(x) * 2


class PenalisedInANamedClass(Penalised):
    def forward(self, x):
        return Penalised.forward(self, x) * 2


class Penalties:
    """The same function by other names."""

    @staticmethod
    def of(module):
        return sum(weight.square().sum() for weight in module.parameters())

    def __call__(self, module):
        return penalty(module)


PENALTIES, BOUND, TABLE = Penalties(), partial(penalty), {"square": penalty}
HELPERS = ModuleType("helpers")
HELPERS.inner = ModuleType("helpers.inner")
HELPERS.inner.squares = penalty

PENALISED = {
    "of a class": lambda expert: Penalties.of(expert),
    "of an object": lambda expert: PENALTIES.of(expert),
    "an object": lambda expert: PENALTIES(expert),
    "a partial": lambda expert: BOUND(expert),
    "of a table": lambda expert: TABLE["square"](expert),
    "of a module": lambda expert: HELPERS.inner.squares(expert),
    "a default": lambda expert, penalised=penalty: penalised(expert),
}


@pytest.mark.parametrize("called", PENALISED)
def test_code_around_them_by_other_names(called):
    """Without parameters of the experts a penalty would be 0."""
    penalised = PENALISED[called]

    class Calls(Around):
        def forward(self, x):
            return self.layer(x) + sum(penalised(expert) for expert in self.layer.experts)

    with pytest.raises(ValueError, match=r"which (penalty|Penalties\.of) asks for by parameters"):
        moe_ops.stack_experts_(Calls())


class PenalisedUnseen(Around):
    """By a name that no code has."""

    def forward(self, x):
        asked = [getattr(expert, "para" + "meters")() for expert in self.layer.experts]
        return self.layer(x) + sum(weight.square().sum() for weights in asked for weight in weights)


class Penalty(nn.Module):
    def forward(self, module):
        return penalty(module)


class PenalisedByAModule(Around):
    def __init__(self) -> None:
        super().__init__()
        self.added = Penalty()

    def forward(self, x):
        return self.layer(x) + sum(self.added(expert.w2) for expert in self.layer.experts)


@pytest.mark.parametrize("kind", [PenalisedUnseen, PenalisedByAModule], ids=lambda kind: kind.__name__)
def test_penalties_of_slices(kind):
    """Of what no analysis finds the experts' modules have their slices."""
    same_when_compiled(kind())


class PenalisedByAnAttribute(Around):
    def __init__(self) -> None:
        super().__init__()
        self.penalise = penalty

    def forward(self, x):
        return self.layer(x) + self.penalise(self.layer.experts)


class PenalisedByName(Around):
    def forward(self, x):
        return self.layer(x) + sum(w.sum() for name, w in self.named_parameters() if ".w1." in name)


class Cached(Around):
    """Weights in a list of the model's own, in an object that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"all": [expert.w1.weight for expert in self.layer.experts]}

    def forward(self, x):
        return self.layer(x)


class HeldInParts(Around):
    """A view of a weight, in a namespace beside a function of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.space = SimpleNamespace(view=self.layer.experts[1].w2.weight.detach())

    def forward(self, x):
        return self.layer(x) + self.space.view.sum()


class HeldInAPartial(Around):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = [{"a": 1}], {"b": [2]}
        self.product = partial(F.linear, weight=self.layer.experts[2].w1.weight)

    def forward(self, x):
        return self.layer(x) + self.product(x).sum()


class HeldAsABuffer(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", self.layer.experts[E - 1].w3.weight.detach())

    def forward(self, x):
        return self.layer(x) + self.seen.sum()


class FirstDtype(Around):
    """What comes first is no expert's: transformers' models ask so for their dtype."""

    @property
    def dtype(self):
        return next(weight.dtype for weight in self.parameters() if weight.is_floating_point())

    def forward(self, x):
        return self.layer(x.to(self.dtype))


class FirstShape(Around):
    """What comes first of experts alone is a stack."""

    def forward(self, x):
        return self.layer(x) * next(self.layer.experts.parameters()).shape[0]


class ClampsTheFirst(Around):
    def forward(self, x):
        first = next(iter(self.layer.experts.parameters()))
        with torch.no_grad():
            first[0].clamp_(max=0)
        return self.layer(x.to(first.dtype))


class FirstByAName(Around):
    """Of which nothing is asked but what a stack has, too."""

    def forward(self, x):
        first = next(self.layer.experts.parameters())
        return self.layer(x.to(first.device, first.dtype).to(next(self.parameters())))


AROUND = {
    FirstShape: r"which FirstShape\.forward asks for by parameters",
    ClampsTheFirst: r"which ClampsTheFirst\.forward asks for by parameters",
    PenalisedByAnAttribute: r"which penalty asks for by parameters",
    Penalised: r"layer\.experts\.0\.w1\.weight, which penalty asks for by parameters, to find one stack",
    PenalisedInABaseClass: r"which penalty asks for by parameters",
    PenalisedInANamedClass: r"which penalty asks for by parameters",
    PenalisedByName: r"which PenalisedByName\.forward asks for by named_parameters",
    HeldInParts: r"layer\.experts\.1\.w2\.weight, which HeldInParts also holds as space\.view",
    HeldInAPartial: r"experts\.2\.w1\.weight, which HeldInAPartial also holds as product\.keywords\['weight'\]",
    HeldAsABuffer: rf"layer\.experts\.{E - 1}\.w3\.weight, which HeldAsABuffer also holds as seen",
    Cached: r"layer\.experts\.0\.w1\.weight, which Cached also holds as held\['all'\]\[0\]",
}


@pytest.mark.parametrize("kind", AROUND, ids=lambda kind: kind.__name__)
def test_code_around_them(kind):
    with pytest.raises(ValueError, match=AROUND[kind]):
        moe_ops.stack_experts_(kind())


@pytest.mark.parametrize("kind", [FirstDtype, FirstByAName], ids=lambda kind: kind.__name__)
def test_code_that_asks_for_the_first_parameter(kind):
    model = kind()
    expected = model(X)
    moe_ops.stack_experts_(model)
    torch.testing.assert_close(compiled(model, fullgraph=True)(X), expected, atol=1e-5, rtol=1e-5)


class AsksHarmlessly(ExpertLoop):
    """Names that are other things' too: of the first parameter, of tensors, of a signature, in a message; and a class
    that no module has.
    """

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, x):
        if x.dim() == 9 or ("x" not in inspect.signature(perceptron).parameters and x.device != self.device):
            raise ValueError(f"{type(self).__name__} takes no {type(x)}, nor what {self.__class__.__name__} is")
        out = super().forward(x)
        return out[0] if type(out) is tuple else out


class Answers:
    """An object that answers to every name."""

    __slots__ = ()

    def __getattr__(self, name):
        return lambda *given: 1


def test_what_only_looks_like_asking():
    model = AsksHarmlessly("mask", dim=H, hidden=I, num_experts=E)
    model.answers = Answers()
    vars(model)["gone"] = weakref.proxy(Expert(H, I))  # of one that is no more
    expected = model(X)
    moe_ops.stack_experts_(model)
    torch.testing.assert_close(compiled(model, fullgraph=True)(X), expected, atol=1e-5, rtol=1e-5)


def test_adapters_stay_in_lists(monkeypatch):
    """PEFT merges by assigning to `.data`, which would change a slice and not the stack."""
    module = ModuleType("peft.layers")
    monkeypatch.setitem(sys.modules, "peft.layers", module)

    class Adapter(nn.Linear):
        __module__ = "peft.layers"

    model = mixture("mask")
    for expert in model.experts:
        expert.w1 = Adapter(H, I, bias=False)
    with pytest.raises(ValueError, match=r"experts\.0\.w1, which has an adapter of PEFT.*merge_and_unload"):
        moe_ops.stack_experts_(model)


class NamedAlike(nn.Module):
    """A layer and a parameter whose names are one once they have no dots."""

    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.norm_weight = nn.Parameter(torch.full((dim,), 0.3))

    def forward(self, x):
        return self.w2(F.silu(self.w1(self.norm(x)))) * self.norm_weight


def test_experts_that_another_model_has_too():
    """A stack would be the first model's alone."""
    model, other = ExpertLoop("mask", make=Expert), ExpertLoop("mask", make=Expert)
    other.experts[2].w1.weight = model.experts[2].w1.weight
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight, which a Linear outside of the model has, too"):
        moe_ops.stack_experts_(model)


class Listed(nn.Module):
    """Parameters whose names are those of experts in their list."""

    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__()
        self.register_parameter("0", nn.Parameter(torch.randn(hidden, dim)))
        self.register_parameter("1", nn.Parameter(torch.randn(dim, hidden)))

    def forward(self, x):
        return F.linear(F.silu(F.linear(x, getattr(self, "0"))), getattr(self, "1"))


class Transposed(Expert):
    """A weight that is stored in another order than its dimensions have, and code that needs it so."""

    def __init__(self, dim: int, hidden: int, *others) -> None:
        super().__init__(dim, hidden, *others)
        self.w1.weight = nn.Parameter(torch.randn(dim, hidden).t())

    def forward(self, x):
        assert self.w1.weight.t().view(-1).shape == (H * I,)
        return super().forward(x)


@pytest.mark.parametrize("make", [NamedAlike, Listed, Transposed], ids=lambda make: make.__name__)
def test_names_and_strides(make):
    single, stacked = mixture("mask", make), moe_ops.stack_experts_(mixture("mask", make))
    assert torch.equal(single(X), stacked(X))
    state, expected = stacked.state_dict(), single.state_dict()
    assert list(state) == list(expected) and all(torch.equal(value, expected[key]) for key, value in state.items())
    assert torch.equal(moe_ops.restore(stacked)(X), single(X))


def test_attributes_of_parameters_go_to_the_stack():
    """Optimizers find their groups by them."""

    def flagged(*sizes):
        made = Expert(*sizes)
        made.w1.weight.no_weight_decay = True
        return made

    model = moe_ops.stack_experts_(mixture("mask", flagged))
    assert [name for name, w in model.named_parameters() if vars(w)] == ["experts.w1_weight"]
    moe_ops.restore(model)
    assert sum(bool(vars(weight)) for weight in model.parameters()) == E


def test_nothing_is_lost_where_memory_ends(monkeypatch):
    model = mixture("mask")
    before, expected = copy.deepcopy(model.state_dict()), model(X)
    stack, calls = torch.stack, []

    def scarce(tensors, *others):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return stack(tensors, *others)

    monkeypatch.setattr(torch, "stack", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        moe_ops.stack_experts_(model)
    monkeypatch.undo()
    assert torch.equal(model(X), expected)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(moe_ops.stack_experts_(model)(X), expected)


# ---- single experts of a stacked list


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.fixture
def pair() -> tuple[ExpertLoop, ExpertLoop]:
    """The same model, as a list and stacked."""
    return mixture("mask"), moe_ops.stack_experts_(mixture("mask"))


def same(one: nn.Module, other: nn.Module) -> bool:
    state = one.state_dict()
    return torch.equal(one(X), other(X)) and all(torch.equal(v, state[key]) for key, v in other.state_dict().items())


def test_the_state_of_one_expert(pair):
    """As of one that is no slice, and so is what is loaded into it (upcycling)."""
    for model in pair:
        first = model.experts[0].state_dict()
        assert list(first) == ["w1.weight", "w2.weight", "w3.weight"] or set(first) == set(
            pair[0].experts[0].state_dict()
        )
        for expert in model.experts[1:]:
            expert.load_state_dict(first)
        model.experts[2].w2.load_state_dict({"weight": torch.ones(H, I)})
        assert torch.equal(model.experts[E - 1].w1.weight, model.experts[0].w1.weight)
    assert same(*pair)


MISFITS = {
    "absent": ("w1.weight", {}, r'Missing key\(s\) in state_dict: "w1.weight"'),
    "more": ("", {"w9": torch.ones(1)}, r'Unexpected key\(s\) in state_dict: "w9"'),
    "shape": ("", {"w1.weight": torch.ones(1, 2)}, r"size mismatch for w1.weight: \[1, 2\]"),
    "nothing": ("", {"w1.weight": None}, r"size mismatch for w1.weight: NoneType in the checkpoint"),
}


@pytest.mark.parametrize(("without", "more", "said"), MISFITS.values(), ids=MISFITS)
def test_states_of_one_expert_that_do_not_fit(pair, without, more, said):
    state = pair[1].experts[0].state_dict() | more
    state.pop(without, None)
    with pytest.raises(RuntimeError, match=said):
        pair[1].experts[1].load_state_dict(state)


@pytest.mark.parametrize("path", ["", "w2"])
@pytest.mark.parametrize("through", [lambda model: model, copy.deepcopy, pickled], ids=["itself", "copied", "pickled"])
def test_the_parameters_of_one_expert(pair, path, through):
    """Its slices, by its own names and in their order; of a module alone, as DDP asks for what it reduces, none."""
    plain, stacked = pair
    stacked = through(stacked)
    one, other = (dict(model.experts[1].get_submodule(path).named_parameters("of")) for model in (plain, stacked))
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert sum(weight.numel() for weight in stacked.experts[1].parameters()) > 0
    held = [weight for module in stacked.modules() for weight in module.parameters(recurse=False)]
    assert [*map(id, held)] == [*map(id, stacked.parameters())]


def test_the_gradients_of_one_expert(pair):
    """Read, clipped and cleared through its slices, which reach the gradient of the stack."""
    for model in pair:
        model(X).square().sum().backward()
    for one, other in zip(*(model.experts[1].parameters() for model in pair), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    states = [model.state_dict(keep_vars=True) for model in pair]
    torch.testing.assert_close(*(state["experts.1.w1.weight"].grad for state in states))
    norms = [torch.nn.utils.clip_grad_norm_(model.experts[1].parameters(), 0.01) for model in pair]
    torch.testing.assert_close(*norms)
    for model in pair:
        model.experts[0].zero_grad()
        model.experts[2].w1.zero_grad(set_to_none=False)
    plain, stacked = pair[0], moe_ops.restore(pair[1])
    for name, weight in plain.named_parameters():
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(stacked.get_parameter(name).grad, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_there_is_no_gradient_before_there_is_one(pair):
    pair[1].experts[1].zero_grad()
    assert all(weight.grad is None for weight in pair[1].experts[1].parameters())


def test_a_copy_of_one_expert_is_its_own(pair):
    for model in pair:
        model.experts[2] = copy.deepcopy(model.experts[0])
        assert isinstance(model.experts[2].w1.weight, nn.Parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(pair[1](X), pair[0](X))
    assert sorted(pair[0].state_dict()) == sorted(pair[1].state_dict())


def test_some_experts_in_a_list_of_their_own(pair):
    """Whose state is whole at once, and whose parameters `restore` brings back."""
    for model in pair:
        model.experts = nn.ModuleList(model.experts[place] for place in (0, *range(2, E)))
    assert same(*pair)
    assert same(pair[0], moe_ops.restore(pair[1]))
    assert len({sum(weight.numel() for weight in model.parameters()) for model in pair}) == 1


def test_writing_in_place(pair):
    """As a merge by hand does; another tensor is refused with the cure, and nothing is written."""
    for model in pair:
        with torch.no_grad():
            model.experts[1].w1.weight += 1.0
            model.experts[2].w3.weight *= 2.0
    assert same(*pair)
    for value in (torch.zeros(I, H), None):
        with pytest.raises(ValueError, match=r"weight must be left in its place.*copy_.*moe_ops\.restore\(model\)"):
            pair[1].experts[1].w1.weight = value
    assert same(*pair)


def test_what_a_quantised_expert_saves():
    model = moe_ops.stack_experts_(mixture("mask"))
    moe_ops.quantize_(model, "fp8_channel")
    whole, one = model.state_dict(), dict(model.experts[1].state_dict())
    assert list(one) == [key.removeprefix("experts.1.") for key in whole if key.startswith("experts.1.")]
    assert all(torch.equal(value.float(), whole[f"experts.1.{key}"].float()) for key, value in one.items())
    expected = model(X)
    model.experts[1].load_state_dict(model.experts[0].state_dict())
    assert torch.equal(model.experts[1].w1.weight, model.experts[0].w1.weight) and not torch.equal(model(X), expected)


@pytest.mark.parametrize("held", [False, True], ids=["alone", "held"])
def test_what_is_alive_is_looked_through_only_for_parameters_that_others_hold(held: bool, monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    others = [model[1].bias] if held else []
    looked: list[int] = []
    monkeypatch.setattr(stackable.gc, "get_objects", lambda: looked.append(1) or [])
    stackable.taken_elsewhere(model, [])
    assert looked == [1] * len(others)
