"""Lists of experts as stacked parameters: the model computes, saves and loads what it did, and its loop is fused."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.foreign import Expert, ExpertLoop, perceptron
from compile_passes import rebind
from meta.schemes import SCHEMES
from tests.passes.blocks import FEW as E
from tests.passes.blocks import H, I
from tests.passes.compare import compiled

WAYS = ("transformers", "mistral", "mask", "stack")
MAKES = {"expert": Expert, "biased": partial(Expert, bias=True), "sequential": perceptron}


def mixture(how: str = "transformers", make=Expert) -> ExpertLoop:
    torch.manual_seed(0)
    return ExpertLoop(how, dim=H, hidden=I, num_experts=E, make=make)


X = torch.randn(4, 3, H, generator=torch.Generator().manual_seed(1))


# Every way to loop and every kind of expert, and the way of transformers with each.
@pytest.mark.parametrize(
    ("how", "make"),
    [*(("transformers", make) for make in MAKES), ("mistral", "biased"), ("mask", "sequential"), ("stack", "expert"),
     ("stack", "biased")],
)  # fmt: skip
def test_fused_in_one_graph(how, make):
    """Not fused as a list; stacked, one operator, for every number of tokens but the first one graph."""
    model = mixture(how, MAKES[make])
    expected = [model(X[:n]) for n in (4, 2, 3)]
    moe_ops.stack_experts_(model)
    assert torch.equal(model(X), expected[0])
    function = compiled(model, fullgraph=True)
    with torch.no_grad():
        for value, n in zip(expected, (4, 2, 3), strict=True):
            torch.testing.assert_close(function(X[:n]), value, atol=1e-5, rtol=1e-5)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2 and counters["moe_ops"]["fused"] == graphs


@pytest.mark.parametrize("how", WAYS)
def test_gradients(how):
    """Those of the stacked parameters are those of the single ones, stacked."""
    single, stacked = mixture(how), moe_ops.stack_experts_(mixture(how))
    single(X).square().sum().backward()
    compiled(stacked, fullgraph=True)(X).square().sum().backward()
    assert counters["moe_ops"]["fused"] == 1
    for name in ("w1", "w2", "w3"):
        expected = torch.stack([getattr(expert, name).weight.grad for expert in single.experts])
        torch.testing.assert_close(getattr(stacked.experts, f"{name}_weight").grad, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stacked.gate.weight.grad, single.gate.weight.grad, atol=1e-5, rtol=1e-4)


def test_one_parameter_per_projection():
    model = moe_ops.stack_experts_(mixture())
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert shapes == {
        "gate.weight": (E, H), "experts.w1_weight": (E, I, H), "experts.w3_weight": (E, I, H),
        "experts.w2_weight": (E, H, I),
    }  # fmt: skip
    assert all(isinstance(expert, Expert) and isinstance(expert.w1, nn.Linear) for expert in model.experts)


def test_state_dict_keeps_its_keys_and_their_order():
    single, stacked = mixture(make=MAKES["biased"]), moe_ops.stack_experts_(mixture(make=MAKES["biased"]))
    one, other = single.state_dict(), stacked.state_dict()
    assert sorted(one) == sorted(other) and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("assign", [False, True])
def test_load_both_ways(assign):
    source = mixture()
    with torch.no_grad():
        for weight in source.parameters():
            weight.mul_(1.5)
    stacked = moe_ops.stack_experts_(mixture())
    stacked.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(stacked(X), source(X))
    again = mixture()
    again.load_state_dict(stacked.state_dict(), assign=assign)
    assert torch.equal(again(X), source(X))
    function = compiled(stacked, fullgraph=True)
    torch.testing.assert_close(function(X), source(X), atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


def test_saved_to_a_file():
    stacked, file = moe_ops.stack_experts_(mixture()), io.BytesIO()
    torch.save(stacked.state_dict(), file)
    file.seek(0)
    loaded = mixture("mask")
    loaded.load_state_dict(torch.load(file))
    assert torch.equal(loaded.experts[E - 1].w2.weight, stacked.experts[E - 1].w2.weight)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("absent", ["experts.2.w1", "experts.1", "experts.", "gate"])
def test_incomplete_checkpoint(absent, assign):
    """What is in it is loaded and what is not is named, as of single experts; the rest keeps its numbers and dtype."""
    single, stacked = mixture().double(), moe_ops.stack_experts_(mixture().double())
    state = {key: 1 + value.float() for key, value in mixture().state_dict().items() if not key.startswith(absent)}
    missing, _ = stacked.load_state_dict(state, strict=False, assign=assign)
    assert sorted(missing) == sorted(single.load_state_dict(state, strict=False).missing_keys)
    for key, value in single.state_dict().items():
        torch.testing.assert_close(stacked.state_dict()[key], value, rtol=0, atol=0, check_dtype=not assign)
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{re.escape(absent)}'):
        stacked.load_state_dict(state)


def test_incomplete_checkpoints_that_nothing_can_be_filled_from():
    """Of quantised stacks, whose experts may differ in scales, and of stacks without numbers."""
    state = quantised("int8_w8a16").state_dict()
    single = mixture().state_dict()
    for of_one, target in ((state, quantised("int8_w8a16")), (single, moe_ops.stack_experts_(mixture()).to("meta"))):
        del of_one["experts.2.w1.weight"]
        with pytest.raises(RuntimeError, match=re.escape(f"experts.*.w1.weight: {E - 1} of {E} experts")):
            target.load_state_dict(of_one, strict=False, assign=True)


def test_dtype_and_device():
    model = moe_ops.stack_experts_(mixture()).to(torch.bfloat16)
    assert model.experts[1].w1.weight.dtype == torch.bfloat16
    with torch.no_grad():
        out = compiled(model, fullgraph=True)(X.bfloat16())
    torch.testing.assert_close(out, model(X.bfloat16()), atol=1e-2, rtol=3e-2)
    assert counters["moe_ops"]["fused"] == 1
    assert model.to("meta").experts[0].w3.weight.device.type == "meta"


def test_deepcopy_is_on_its_own():
    model = moe_ops.stack_experts_(mixture())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.experts.w1_weight.zero_()
    assert twin.experts[0].w1.weight.abs().sum() > 0 and model.experts[0].w1.weight.abs().sum() == 0
    assert sorted(twin.state_dict()) == sorted(mixture().state_dict())
    assert twin.state_dict()["experts.0.w1.weight"].abs().sum() > 0
    moe_ops.restore(twin)
    assert isinstance(twin.experts[0].w1.weight, nn.Parameter)


@pytest.mark.parametrize("protocol", [1, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("make", MAKES)
def test_pickled_as_a_whole(make, protocol, tmp_path: Path):
    model = moe_ops.stack_experts_(mixture(make=MAKES[make]))
    torch.save(model, tmp_path / "model.pt", pickle_protocol=protocol)
    loaded = [torch.load(tmp_path / "model.pt", weights_only=False), pickle.loads(pickle.dumps(model, protocol))]
    for twin in loaded:
        assert torch.equal(twin(X), model(X)) and list(twin.state_dict()) == list(model.state_dict())
        assert type(twin.experts[0]) is type(model.experts[0])
        twin.load_state_dict({key: 2 * value for key, value in model.state_dict().items()})
        assert twin.experts.get_parameter(next(iter(dict(twin.experts.named_parameters())))).requires_grad
        assert not torch.equal(twin(X), model(X))
        assert [type(module) for module in moe_ops.restore(twin).modules()] == [
            type(module) for module in mixture(make=MAKES[make]).modules()
        ]


def test_pickled_class_with_arguments():
    """What a class hands to its own __new__ is handed on."""
    model = nn.Module()
    model.experts = nn.ModuleList(Named("one") for _ in range(2))
    twin = pickle.loads(pickle.dumps(moe_ops.stack_experts_(model)))
    assert isinstance(twin.experts[1], Named) and twin.experts[1].name == "one" and twin.experts.weight.shape == (2, 3)


class Named(nn.Module):
    def __new__(cls, name: str) -> Named:
        made = super().__new__(cls)
        object.__setattr__(made, "name", name)
        return made

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def __getnewargs__(self) -> tuple[str]:
        return (self.name,)


@pytest.mark.parametrize("path", ["experts.1", "experts.1.w2"])
def test_one_expert_alone_is_not_frozen(path):
    """Nor thawed; where that changes nothing, as in a loop over all modules of a model that is frozen, it may."""
    model = moe_ops.stack_experts_(mixture())
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        module = twin.get_submodule(path)
        with pytest.raises(ValueError, match=r"must be True, as of all experts .* got False\. Call it on the list, or"):
            module.requires_grad_(False)
        assert module.requires_grad_() is module and twin.experts.w2_weight.requires_grad
        for frozen in (twin.experts, twin):
            frozen.requires_grad_(False)
            assert not any(weight.requires_grad for weight in frozen.parameters())
            module.requires_grad_(False)
            with pytest.raises(ValueError, match="must be False"):
                module.requires_grad_()
            frozen.requires_grad_()
        inside = moe_ops.restore(twin).get_submodule(path).requires_grad_(False)
        assert not any(weight.requires_grad for weight in inside.parameters())
        assert "requires_grad_" not in vars(inside)


def test_stacked_experts_are_alike_for_trials():
    """What forbids freezing is nothing that an expert runs, nor anything that tells two layers apart."""
    one, two = (moe_ops.stack_experts_(mixture()) for _ in range(2))
    assert list(rebind._facts(one)) == list(rebind._facts(two))
    rebind._check_unbound(one.experts[0])


def test_a_slice_is_not_replaced():
    model = moe_ops.stack_experts_(mixture())
    before = model(X)
    with pytest.raises(ValueError, match=r"weight must be left in its place.*copy_.*moe_ops\.restore\(model\) first"):
        model.experts[1].w1.weight = nn.Parameter(torch.zeros(I, H))
    assert torch.equal(model(X), before)
    model.experts[1].w1.register_parameter("other", nn.Parameter(torch.zeros(1)))
    assert "experts.1.w1.other" in model.state_dict()


def _appended(experts):
    experts.append(Expert(H, I))


def _inserted(experts):
    experts.insert(1, Expert(H, I))


def _deleted(experts):
    del experts[2]


def _replaced(experts):
    experts[1] = Expert(H, I)


def _swapped(experts):
    experts[0], experts[-1] = experts[-1], experts[0]


def _replaced_inside(experts):
    experts[1].w1 = nn.Linear(H, I, bias=False)


def _wrapped(experts):
    experts[1].w1 = nn.Sequential(experts[1].w1, nn.Linear(I, I))


@pytest.mark.parametrize(
    "change", [_appended, _inserted, _deleted, _replaced, _swapped, _replaced_inside, _wrapped],
    ids=lambda change: change.__name__.strip("_"),
)  # fmt: skip
def test_a_list_that_changes_after_it(change):
    """The state dict, loading and restoring know experts by their slices, not by their place."""
    single, stacked = mixture("mask"), moe_ops.stack_experts_(mixture("mask"))
    for model in (single, stacked):
        torch.manual_seed(2)
        change(model.experts)
        count = len(model.experts)
        model.gate = nn.Linear(H, count, bias=False)
    state = single.state_dict()
    assert sorted(stacked.state_dict()) == sorted(state)
    assert all(torch.equal(value, state[key]) for key, value in stacked.state_dict().items())
    expected = single(X)
    assert torch.equal(stacked(X), expected)
    torch.testing.assert_close(compiled(stacked)(X), expected, atol=1e-5, rtol=1e-5)
    doubled = {key: 2 * value for key, value in state.items()}
    stacked.load_state_dict(doubled)
    assert all(torch.equal(value, doubled[key]) for key, value in stacked.state_dict().items())
    moe_ops.restore(stacked)
    assert all(torch.equal(value, doubled[key]) for key, value in stacked.state_dict().items())
    assert [name for name, _ in stacked.named_parameters()] == [name for name, _ in single.named_parameters()]


@pytest.mark.filterwarnings("ignore:moe_ops.compile")
@pytest.mark.parametrize("stack", [moe_ops.stack_experts_, partial(moe_ops.compile, backend="moe_ops_eager")])
def test_of_lists_in_one_another_the_inner_ones_are_stacked(stack):
    torch.manual_seed(0)
    model = ExpertLoop("mask", dim=H, hidden=I, num_experts=3, make=lambda *sizes: mixture("mask"))
    before, state = model(X), model.state_dict()
    stack(model)
    assert model.experts[1].experts.w1_weight.shape == (E, I, H)
    assert [*model.experts._parameters] == [] and torch.equal(model(X), before)
    assert list(model.state_dict()) == list(state)
    torch.testing.assert_close(compiled(model)(X), before, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 3
    for names in ((), ("experts",)):
        with pytest.raises(ValueError, match="not stacked yet"):
            moe_ops.stack_experts_(model, *names)
    moe_ops.restore(model)
    assert [name for name, _ in model.named_parameters()] == [*state]
    moe_ops.stack_experts_(model, "experts")  # alone, by its name
    assert model.experts.get_parameter("experts_0_w1_weight").shape == (3, I, H)
    assert torch.equal(model(X), before) and list(model.state_dict()) == list(state)


def test_optimizer_made_after_it():
    """A step of training changes stacked experts as it changes single ones."""
    single, stacked = mixture("mask"), moe_ops.stack_experts_(mixture("mask"))
    for model, function in ((single, single), (stacked, compiled(stacked, fullgraph=True))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        function(X).square().mean().backward()
        optimizer.step()
    for key, value in single.state_dict().items():
        torch.testing.assert_close(stacked.state_dict()[key], value, atol=1e-6, rtol=1e-5)


def test_restore():
    model = moe_ops.stack_experts_(mixture(make=MAKES["biased"]))
    with torch.no_grad():
        model.experts.w1_weight.mul_(2)
    expected, state = model(X), model.state_dict()
    assert moe_ops.restore(model) is model
    assert torch.equal(model(X), expected) and type(model.experts[0].w1) is nn.Linear
    assert sorted(name for name, _ in model.named_parameters()) == sorted(
        name for name, _ in mixture(make=MAKES["biased"]).named_parameters()
    )
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    moe_ops.stack_experts_(model)
    assert torch.equal(model(X), expected)


def test_restore_in_training():
    """Gradients go along; an optimizer that would go on with what the model no longer has is named."""
    model = moe_ops.stack_experts_(mixture(make=MAKES["biased"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    expected = model.experts.w1_weight.grad
    with pytest.warns(UserWarning, match=r"moe_ops\.restore: a SGD optimizer holds stacked experts"):
        moe_ops.restore(model)
    assert torch.equal(torch.stack([expert.w1.weight.grad for expert in model.experts]), expected)
    optimizer.param_groups.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe_ops.restore(moe_ops.stack_experts_(mixture(make=MAKES["biased"])))


def test_stacks_can_be_quantised():
    """Of two projections, whose shapes fit either orientation, as those of linear layers."""
    model = moe_ops.stack_experts_(mixture(make=MAKES["sequential"]))
    expected = model(X)
    moe_ops.quantize_(model, "fp8_w8a16")
    assert not any(weight.transposed for weight in model.experts.parameters() if weight.dim() == 3)
    torch.testing.assert_close(model(X), expected, rtol=0.1, atol=0.05)
    moe_ops.restore(model)
    assert not hasattr(model.experts, "is_transposed")


def quantised(scheme: str, seed: int = 0, again: bool = False) -> ExpertLoop:
    """``again``: the hooks of both calls come in the other order."""
    model = mixture(make=MAKES["biased"])
    torch.manual_seed(seed)
    for weight in model.parameters():
        nn.init.normal_(weight)
    del weight  # a name of a parameter is somebody else who holds it: all that is alive would be looked through
    for _ in range(1 + again):
        moe_ops.quantize_(moe_ops.stack_experts_(moe_ops.restore(model)), scheme)
    return model


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("again", [False, True], ids=["hooks_of_stacks_first", "hooks_of_stacks_last"])
@pytest.mark.parametrize("way", ["torch", "safetensors", "assign", "copy"])
@pytest.mark.parametrize("scheme", [name for name, row in SCHEMES.items() if row.quantized])
def test_quantised_stacks_are_saved_as_the_bytes_of_each_expert(scheme, way, again, tmp_path: Path):
    model, target = quantised(scheme, again=again), quantised(scheme, seed=1)
    state = model.state_dict()
    assert state["experts.2.w1.weight"].dtype == SCHEMES[scheme].weight_dtype
    assert state["experts.2.w1.weight_scale"].shape == model.experts.w1_weight.scale.shape[1:]
    assert not any(key.startswith("experts.w") for key in state)
    if way == "torch":
        torch.save(state, tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
    elif way == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, tmp_path / "model.safetensors")
        state = safetensors.load_file(tmp_path / "model.safetensors")
    target.load_state_dict(state, assign=way == "assign")
    for name in ("w1_weight", "w2_weight", "w3_weight"):
        own, loaded = (getattr(made.experts, name) for made in (model, target))
        assert own.parts().keys() == loaded.parts().keys()
        assert all(torch.equal(bits(own.parts()[part]), bits(loaded.parts()[part])) for part in own.parts())
    assert torch.equal(target(X), model(X))


def _into_another_scheme(state):
    quantised("int8_channel").load_state_dict(state)


def _into_a_float_list(state):
    mixture(make=MAKES["biased"]).load_state_dict(state)


def _into_float_stacks(state):
    moe_ops.stack_experts_(mixture(make=MAKES["biased"])).load_state_dict(state)


def _floats_into_quantised(state):
    quantised("int8_w8a16").load_state_dict(mixture(make=MAKES["biased"]).state_dict())


def _one_scale_missing(state):
    del state["experts.2.w1.weight_scale"]
    quantised("int8_w8a16").load_state_dict(state)


def _scales_of_two_dtypes(state):
    state["experts.2.w1.weight_scale"] = state["experts.2.w1.weight_scale"].bfloat16()
    quantised("int8_w8a16").load_state_dict(state)


NOT_LOADED = {
    _into_another_scheme: "experts.w1_weight must be stored in scheme 'int8_channel', got scheme 'int8_w8a16'",
    _into_a_float_list: '"experts.0.w1.weight_scale"',
    _into_float_stacks: '"experts.0.w1.weight_scale"',
    _floats_into_quantised: "experts.w1_weight_scale must be given for scheme 'int8_w8a16', got nothing. Load float",
    _one_scale_missing: f"experts.*.w1.weight_scale: {E - 1} of {E} experts are in the checkpoint.",
    _scales_of_two_dtypes: "experts.*.w1.weight_scale: the experts of the checkpoint differ in shape, dtype or device.",
}


@pytest.mark.parametrize("load", NOT_LOADED, ids=lambda load: load.__name__.strip("_"))
def test_state_dicts_of_quantised_stacks_that_do_not_fit(load):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(NOT_LOADED[load])):
        load(quantised("int8_w8a16").state_dict())


def test_by_name():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffns = nn.ModuleList(Expert(H, I) for _ in range(E))

    model = Other()
    with pytest.raises(ValueError, match="If one has another name, give it"):
        moe_ops.stack_experts_(model)
    with pytest.raises(ValueError, match="ffn"):
        moe_ops.stack_experts_(model, "ffn")
    moe_ops.stack_experts_(model, "ffns")
    assert model.ffns.w2_weight.shape == (E, H, I)


def test_what_has_no_weights_is_no_expert():
    """A dropout for all experts beside them in their list, as nllb has it; its buffers stay in the state dict."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Buffer(torch.ones(2))

    model = nn.Module()
    torch.manual_seed(0)
    model.experts = nn.ModuleDict({"one": Expert(H, I), "drop": nn.Dropout(0.1), "two": Expert(H, I), "noise": Noise()})
    before = copy.deepcopy(model.state_dict())
    moe_ops.stack_experts_(model)
    assert model.experts.w1_weight.shape == (2, I, H)
    state = model.state_dict()
    assert sorted(state) == sorted(before) and all(torch.equal(value, before[key]) for key, value in state.items())
    model.load_state_dict(before)
    moe_ops.restore(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def _tied(model):
    model.experts[1].w1.weight = model.experts[0].w1.weight


def _other_shape(model):
    model.experts[2].w1 = nn.Linear(H, 2 * I, bias=False)


def _other_class(model):
    model.experts[2] = perceptron(H, I)


def _other_dtype(model):
    model.experts[2].w3.half()


def _frozen(model):
    model.experts[2].w3.requires_grad_(False)


def _gradient(model):
    model(X).sum().backward()


def _hook(model):
    model.experts[2].w2.weight.register_hook(lambda grad: grad)


def _subclass(model):
    class Special(nn.Parameter):
        pass

    model.experts[0].w1._parameters["weight"] = Special(model.experts[0].w1.weight.detach())


UNFIT = {
    _tied: r"experts\.0\.w1\.weight, which the model uses in more than one place",
    _other_shape: r"experts\.2\.w1\.weight, which is torch.float32 \[32, 32\] .* unlike",
    _other_class: r"experts\.2 is made of other modules than experts\.0",
    _other_dtype: r"experts\.2\.w3\.weight, which is torch\.float16",
    _frozen: r"experts\.2\.w3\.weight, which is frozen, unlike that of expert 0: a stack trains as a whole",
    _gradient: r"experts\.\d\.w1\.weight, which has a gradient",
    _hook: r"experts\.2\.w2\.weight, which has a hook",
    _subclass: r"experts\.0\.w1\.weight, which is a Special",
}


@pytest.mark.parametrize("spoil", UNFIT, ids=lambda spoil: spoil.__name__.strip("_"))
def test_refused_by_name(spoil):
    """And nothing is changed."""
    model = mixture("mask")
    spoil(model)
    with pytest.raises(ValueError, match=UNFIT[spoil]):
        moe_ops.stack_experts_(model)
    assert isinstance(model.experts[0].w2.weight, nn.Parameter) and type(model.experts[0].w2) is nn.Linear


def test_refused_after_the_optimizer():
    model = mixture()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="AdamW optimizer holds already"):
        moe_ops.stack_experts_(model)
    del optimizer
    moe_ops.stack_experts_(model)


def test_compile_stacks_and_says_so():
    """One call is all that a model with a loop over a list needs; an optimizer's parameters are left alone."""
    model = mixture("mistral")
    expected = model(X)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False),
        pytest.warns(UserWarning, match=r"stacked the experts of experts: .*moe_ops\.restore\(model\) undoes it"),
    ):
        torch.compiler.reset()
        counters.clear()
        function = moe_ops.compile(model, backend="moe_ops_eager")
        with torch.no_grad():
            torch.testing.assert_close(function(X), expected, atol=1e-5, rtol=1e-5)
    assert counters["moe_ops"]["fused"] == 1 and counters["stats"]["unique_graphs"] == 1


def test_compile_leaves_what_an_optimizer_holds():
    model = mixture("mask")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"a list of experts stays a list.* which a SGD optimizer holds already"):
        moe_ops.compile(model, backend="moe_ops_eager")
    assert isinstance(model.experts[0].w1.weight, nn.Parameter) and optimizer is not None


def test_what_data_parallel_holds_is_left_alone():
    """Its reducer would go on with parameters that the model no longer has, and every rank train experts of its own."""
    model = mixture("mask")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        held = "which a DistributedDataParallel holds already: make it around the model after"
        for call in (moe_ops.stack_experts_, lambda given: moe_ops.stack_experts_(given.module)):
            with pytest.raises(ValueError, match=held):
                call(parallel)
        with torch._dynamo.config.patch(optimize_ddp=False), pytest.warns(UserWarning, match=held):
            moe_ops.compile(parallel, backend="moe_ops_eager")
        assert isinstance(model.experts[0].w1.weight, nn.Parameter)
        del parallel
        moe_ops.stack_experts_(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", WAYS)
def test_a_list_is_refused_with_the_cure(how):
    """By explain, and by the backend alone: a pass cannot rebind parameters."""
    (row,) = moe_ops.explain(mixture(how), X).refused
    assert "moe_ops.compile(model)" in row.cure and "moe_ops.stack_experts_(model)" in row.cure
