"""``QuantizedWeight`` as a tensor, and ``quantize_``: values, casts, copies, files, what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import moe_ops
from meta.schemes import SCHEMES
from moe_ops.pairs import used_rows
from moe_ops.quantized import QuantizedWeight, quantized_schemes, rebuild

E, N, K = 4, 64, 128
#: One with a format for rows, one of packed integers, one with exponents, one with two scales.
SOME = ("fp8_channel", "int4_w4a16", "mxfp4", "nvfp4")
ALL = [name for name, row in SCHEMES.items() if row.make_scales is not None]


def made(scheme: str, *, transposed: bool = False) -> QuantizedWeight:
    values = torch.randn(E, N, K, generator=torch.Generator().manual_seed(0))
    stored, *scales = moe_ops.quantize_weight(values, scheme=scheme)
    return QuantizedWeight(stored, scales, scheme=scheme, dtype=torch.float32, transposed=transposed)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bytes(one: Tensor, other: Tensor) -> None:
    assert isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight)
    assert one.parts().keys() == other.parts().keys()
    assert all(torch.equal(bits(one.parts()[name]), bits(other.parts()[name])) for name in one.parts())


# Each gives [E, rows, columns] weights, or some of them, to an operation that knows nothing of them.
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear_of_one": lambda w: nn.functional.linear(torch.ones(3, w.shape[2]), w[1]),
    "bmm": lambda w: torch.bmm(torch.ones(E, 3, w.shape[1]), w),
    "matmul_transposed": lambda w: torch.ones(3, w.shape[2]) @ w.transpose(-2, -1),
    "permuted_otherwise": lambda w: w.permute(2, 0, 1) + w.permute(0, 1, 2).sum(),
    "permuted": lambda w: torch.ones(3, w.shape[2]) @ w.permute(0, 2, 1),
    "einsum": lambda w: torch.einsum("tk,enk->ten", torch.ones(3, w.shape[2]), w),
    "gathered": lambda w: w[torch.tensor([[0, 3], [2, 2]])],
    "index_select": lambda w: w.index_select(0, torch.tensor([3, 1])),
    "index_select_of_one": lambda w: w.index_select(0, torch.tensor(1)),
    "index_select_backwards": lambda w: w.index_select(-3, torch.tensor([2, 2, 0], dtype=torch.int32)),
    "index_select_of_none": lambda w: w.index_select(0, torch.tensor([], dtype=torch.long)),
    "last": lambda w: w[-1],
    "by_number_tensor": lambda w: w[torch.tensor(2)],
    "mask": lambda w: w[torch.tensor([True, False, False, True])],
    "halves": lambda w: torch.cat(w.chunk(2, dim=1)[::-1], dim=1),
    "unbind": lambda w: torch.stack(w.unbind(0)),
    "grouped_mm": lambda w: torch._grouped_mm(
        torch.ones(6, w.shape[1], dtype=torch.bfloat16), w.bfloat16(), offs=torch.tensor([1, 1, 4, 6]).int()
    ),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["E_N_K", "E_K_N"])
@pytest.mark.parametrize("use", USES)
def test_other_code_computes_with_the_dequantised_numbers(use: str, transposed: bool) -> None:
    for scheme in SOME:
        weight = made(scheme, transposed=transposed)
        dense = weight.dequantize()
        assert dense.shape == weight.shape == ((E, K, N) if transposed else (E, N, K))
        got = USES[use](weight)
        assert type(got) is Tensor
        assert torch.equal(got, USES[use](dense))


@pytest.mark.parametrize("born", ["before it", "in it"])
@pytest.mark.parametrize("use", USES)
def test_inference_mode_changes_no_number(use: str, born: str) -> None:
    """torch hands composite functions over whole there, and refuses views of what was made before it."""
    with torch.inference_mode(born == "in it"):
        weight = made("mxfp4")
    wanted = USES[use](made("mxfp4").dequantize())
    with torch.inference_mode():
        assert torch.equal(USES[use](weight), wanted)
    if born == "in it":
        assert torch.equal(USES[use](weight), wanted)


@pytest.mark.parametrize("born", ["before it", "in it"])
@pytest.mark.parametrize("cast", ["half", "bfloat16", "to device", "to dtype", "mT"])
def test_inference_mode_keeps_the_bytes(cast: str, born: str) -> None:
    casts: dict[str, Callable[[Any], Any]] = {
        **{"half": lambda it: it.half(), "bfloat16": lambda it: it.bfloat16(), "to device": lambda it: it.to("meta")},
        **{"to dtype": lambda it: it.to(torch.float64), "mT": lambda it: it.mT},
    }
    with torch.inference_mode(born == "in it"):
        weight = made("fp8_channel")
        holder = nn.ParameterDict({"w": nn.Parameter(weight, requires_grad=False)})
    for inside in (True, False):
        with torch.inference_mode(inside):
            made_of_it = [casts[cast](weight)] + ([] if cast == "mT" else [casts[cast](holder)["w"]])
        for got in made_of_it:
            assert isinstance(got, QuantizedWeight) and got.stored.dtype == weight.stored.dtype


def test_it_never_requires_grad() -> None:
    """``model.requires_grad_()`` is said of a whole model; the operators would drop the gradient of one that is set."""
    module = nn.Module()
    module.w = nn.Parameter(made("mxfp4"), requires_grad=False)
    assert not module.requires_grad_(True).w.requires_grad and module.w.requires_grad_() is module.w
    x, logits, layer_of = layer("mxfp4")
    layer_of.down_proj.requires_grad = True
    words = "fused_moe: down_proj must be without requires_grad: quantised weights have no gradient, got True. Set req"
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.fused_moe(x, logits, layer_of.gate_up_proj, layer_of.down_proj, top_k=2)
    with torch.no_grad():
        moe_ops.fused_moe(x, logits, layer_of.gate_up_proj, layer_of.down_proj, top_k=2)


#: Of [E, rows, columns] weights of any kind.
OUT_OF_RANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "negative_ids": lambda w: w.index_select(0, torch.tensor([-1])),
    "ids": lambda w: w.index_select(0, torch.tensor([E])),
    "ids_of_two_dimensions": lambda w: w.index_select(0, torch.tensor([[1]])),
    "index_select": lambda w: w.index_select(3, torch.tensor([1])),
    "select": lambda w: w.select(3, 0),
    "select_of_expert": lambda w: w.select(0, E),
    "transpose": lambda w: w.transpose(1, 5),
    "permute": lambda w: w.permute(0, 5, 4),
    "permute_twice": lambda w: w.permute(0, 2, -1),
}


@pytest.mark.parametrize("use", OUT_OF_RANGE)
def test_what_is_out_of_range_is_an_error_of_torch(use: str) -> None:
    weight = made("mxfp4")
    with pytest.raises((IndexError, RuntimeError)) as wanted:
        OUT_OF_RANGE[use](weight.dequantize())
    with pytest.raises(wanted.type):
        OUT_OF_RANGE[use](weight)


def test_one_expert_is_dequantised_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = made("mxfp4"), list[int]()
    whole = QuantizedWeight.dequantize
    monkeypatch.setattr(QuantizedWeight, "dequantize", lambda self: (seen.append(self.shape[0]), whole(self))[1])
    weight[1], weight[torch.tensor([0, 2, 0])], weight.transpose(1, 2)[3], weight.index_select(0, torch.tensor([3, 1]))
    assert seen == [1, 3, 1, 2]


@pytest.mark.parametrize("scheme", ALL)
def test_nothing_is_quantised_to_nothing(scheme: str) -> None:
    for shape in ((0, N, K), (E, 0, K), (E, N, 0), (0, 0, 0)):
        stored, *scales = moe_ops.quantize_weight(torch.ones(shape), scheme=scheme)
        weight = QuantizedWeight(stored, scales, scheme=scheme)
        assert weight.shape == shape and weight.dequantize().shape == shape


@pytest.mark.parametrize("scheme", ALL)
def test_casts_change_the_nominal_dtype_alone(scheme: str) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(made(scheme), requires_grad=False)
    before = made(scheme)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        module.to(dtype)
        assert isinstance(module.weight, nn.Parameter) and module.weight.dtype == dtype
        assert module.weight[0].dtype == dtype
        assert_same_bytes(module.weight, before)
    assert module.to("meta").weight.stored.is_meta


@pytest.mark.parametrize("scheme", SOME)
def test_copies_have_memory_of_their_own(scheme: str) -> None:
    weight = nn.Parameter(made(scheme, transposed=True), requires_grad=False)
    for other in (copy.deepcopy(weight), weight.clone()):
        assert_same_bytes(other, weight)
        assert other.transposed and other.stored.data_ptr() != weight.stored.data_ptr()
    assert isinstance(copy.deepcopy(weight), nn.Parameter)
    assert weight.detach().stored.data_ptr() == weight.stored.data_ptr()


@pytest.mark.parametrize("scheme", ALL)
def test_a_pickled_weight_is_the_same(scheme: str) -> None:
    weight = made(scheme, transposed=True)
    for given in (weight, nn.Parameter(weight, requires_grad=False)):
        again = pickle.loads(pickle.dumps(given))
        assert_same_bytes(again, weight)
        assert again.transposed and again.dtype == weight.dtype and type(again) is type(given)
        assert isinstance(again, nn.Parameter) == isinstance(given, nn.Parameter)


@pytest.mark.parametrize("scheme", SOME)
def test_what_was_pickled_part_by_part_is_read(scheme: str) -> None:
    weight = made(scheme)
    assert_same_bytes(rebuild(weight.parts(), scheme, weight.dtype, False, False), weight)


@pytest.mark.parametrize("scheme", ALL)
def test_a_saved_weight_is_loaded_with_weights_only(scheme: str) -> None:
    file, weight = io.BytesIO(), nn.Parameter(made(scheme), requires_grad=False)
    torch.save({"weight": weight}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert isinstance(loaded, nn.Parameter) and not loaded.requires_grad and loaded.dtype == weight.dtype
    assert_same_bytes(loaded, weight)


@pytest.mark.parametrize("scheme", ALL)
def test_what_is_quantised_has_no_gradient(scheme: str) -> None:
    """And keeps nothing of the float weight, which may be freed."""
    parameter = nn.Parameter(torch.randn(E, N, K))
    alive, parts = weakref.ref(parameter), moe_ops.quantize_weight(parameter, scheme=scheme)
    del parameter
    assert not any(part.requires_grad for part in parts) and alive() is None


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("scheme", ALL)
def test_graphs_of_symbolic_sizes_dequantise(scheme: str, dynamic: bool | None) -> None:
    """Groups whose size the scale's shape says, of weights whose width is a symbol."""
    torch.compiler.reset()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight.transpose(1, 2))

    run = torch.compile(product, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for width in (128, 256, 384, 640, 192):
        stored, *scales = moe_ops.quantize_weight(torch.randn(2, 16, width), scheme=scheme)
        weight = QuantizedWeight(stored, scales, scheme=scheme, dtype=torch.float32)
        x = torch.randn(2, 3, width)
        assert torch.equal(run(x, weight), product(x, weight)), width


@pytest.mark.parametrize("scheme", ALL)
def test_inductor_quantises_and_dequantises_to_the_same_bits(scheme: str) -> None:
    """Of symbolic sizes and one group of columns, in one graph."""
    torch.compiler.reset()

    def both(values: Tensor) -> tuple[Tensor, ...]:
        stored, *scales = moe_ops.quantize_weight(values, scheme=scheme)
        return stored, *scales, QuantizedWeight(stored, scales, scheme=scheme, dtype=torch.float32) * 1

    values = torch.randn(2, 6, 128, generator=torch.Generator().manual_seed(0))
    for one, other in zip(torch.compile(both, fullgraph=True, dynamic=True)(values), both(values), strict=True):
        assert one.dtype == other.dtype and torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("scheme", ALL)
def test_a_captured_graph_divides_in_fp64(scheme: str) -> None:
    """Quotients of fp32 have other bits where Inductor's kernels for CUDA divide: two units of error are allowed."""
    divided: list[torch.dtype] = []

    def looked_at(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> torch.fx.GraphModule:
        divided.extend(
            node.meta["val"].dtype
            for node in graph.graph.nodes
            if node.target in (torch.ops.aten.div.Tensor, torch.ops.aten.reciprocal.default)
            and node.meta["val"].is_floating_point()
        )
        return graph

    torch.compiler.reset()
    values = torch.randn(2, 6, 128, generator=torch.Generator().manual_seed(0))
    quantise = torch.compile(
        lambda values: moe_ops.quantize_weight(values, scheme=scheme), backend=aot_autograd(fw_compiler=looked_at)
    )
    for one, other in zip(quantise(values), moe_ops.quantize_weight(values, scheme=scheme), strict=True):
        assert torch.equal(bits(one), bits(other))
    assert set(divided) == {torch.float64}


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_inductor_dequantises_halves_of_one_scale_each(scheme: str) -> None:
    """Of symbolic sizes: how many rows a half has is a symbol."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    halves = [moe_ops.quantize_weight(torch.randn(2, 6, 64, generator=generator), scheme=scheme) for _ in range(2)]
    stored, *scales = (torch.stack(pair, dim=1) for pair in zip(*halves, strict=True))
    weight = QuantizedWeight(stored.flatten(1, 2), scales, scheme=scheme, dtype=torch.float32)

    def dequantised(weight: Tensor) -> Tensor:
        return weight * 1

    assert torch.equal(torch.compile(dequantised, fullgraph=True, dynamic=True)(weight), dequantised(weight))


BAD = (1, 3, 5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "minus_inf"])
@pytest.mark.parametrize("scheme", ALL)
def test_a_weight_that_is_not_finite_is_not_hidden(scheme: str, value: float) -> None:
    """It makes NaN of what shares a scale with it, itself included, and leaves the other experts as they are."""
    values = torch.randn(E, N, K, generator=torch.Generator().manual_seed(0))
    fine = made(scheme)
    values[BAD] = value
    stored, *scales = moe_ops.quantize_weight(values, scheme=scheme)
    found = QuantizedWeight(stored, scales, scheme=scheme, dtype=torch.float32).dequantize()
    assert found[BAD].isnan() and not found.isinf().any()
    sharing = torch.zeros(E, N, K, dtype=torch.bool)
    for scale in scales:
        rows, columns = N // scale.shape[1], K // scale.shape[2]
        n, k = BAD[1] // rows * rows, BAD[2] // columns * columns
        sharing[1, n : n + rows, k : k + columns] = True
    assert torch.equal(found.isnan(), sharing)
    assert torch.equal(found[[0, 2, 3]], fine.dequantize()[[0, 2, 3]])


@pytest.mark.parametrize("scheme", ALL)
def test_results_of_experts_that_are_not_finite_are_nan(scheme: str) -> None:
    x, logits, _ = layer(scheme)
    model = experts()
    with torch.no_grad():
        model[1].down_proj[2, 3, 5] = float("inf")
    report = moe_ops.quantize_(model, scheme)
    assert report.worst.name == "1.down_proj" and math.isnan(report.worst.error)
    assert not math.isnan(report.parameters[0].error) and "nan" in str(report)
    got = moe_ops.fused_moe(x, logits, model[1].gate_up_proj, model[1].down_proj, top_k=2)
    hit = (logits.topk(2).indices == 2).any(dim=1)
    assert hit.any() and not hit.all()
    assert torch.equal(got.isnan().any(dim=1), hit)


def test_a_weight_of_parts_with_gradients_has_none() -> None:
    """And keeps nothing of their graph."""
    scale = torch.rand(E, N, 1, requires_grad=True)
    alive, made_of = weakref.ref(scale), scale * 2
    stored, _ = moe_ops.quantize_weight(torch.randn(E, N, K), scheme="int8_channel")
    weight = QuantizedWeight(stored, [made_of], scheme="int8_channel")
    del scale, made_of
    assert not weight.scale.requires_grad and alive() is None
    assert copy.deepcopy(weight).scheme == weight.scheme


def experts(scheme: str | None = None, seed: int = 0, transposed: bool = False) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    for name, shape in {"gate_up_proj": (E, 64, 96), "down_proj": (E, 96, 32)}.items():
        values = torch.randn(shape, generator=generator)
        setattr(module, name, nn.Parameter(values.transpose(1, 2).contiguous() if transposed else values))
    model = nn.Sequential(nn.Linear(8, 8), module)
    if scheme is not None:
        moe_ops.quantize_(model, scheme)
    return model


@pytest.mark.parametrize("transposed", [False, True], ids=["E_N_K", "E_K_N"])
@pytest.mark.parametrize("scheme", ALL)
def test_quantize_is_that_of_the_scheme(scheme: str, transposed: bool) -> None:
    model, plain = experts(transposed=transposed), experts(transposed=transposed)
    report = moe_ops.quantize_(model, scheme)
    assert [one.name for one in report.parameters] == ["1.gate_up_proj", "1.down_proj"]
    for one, (name, was) in zip(report.parameters, plain[1].named_parameters(), strict=True):
        weight = getattr(model[1], name)
        assert isinstance(weight, nn.Parameter) and not weight.requires_grad
        assert weight.shape == was.shape and weight.transposed == transposed
        stored, *scales = moe_ops.quantize_weight(was.transpose(1, 2) if transposed else was, scheme=scheme)
        assert_same_bytes(weight, QuantizedWeight(stored, scales, scheme=scheme))
        error = (weight.dequantize() - was).norm() / was.norm()
        assert one.error == pytest.approx(error.item(), rel=1e-4)
        assert one.after == weight.stored_bytes < one.before
    assert report.worst.name in str(report) and f"{report.worst.error:.5f}" in str(report)


@pytest.mark.parametrize("scheme", ALL)
def test_autocast_changes_no_byte(scheme: str) -> None:
    model, plain = experts(), experts()
    with torch.autocast("cpu", torch.float16):
        moe_ops.quantize_(model, scheme)
    moe_ops.quantize_(plain, scheme)
    for one, other in zip(model[1].parameters(), plain[1].parameters(), strict=True):
        assert_same_bytes(one, other)


@pytest.mark.parametrize("scheme", ALL)
def test_state_dicts_hold_plain_tensors(scheme: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = experts(scheme), experts(scheme, seed=1)
    state = model.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    assert state["1.down_proj"].dtype == SCHEMES[scheme].weight_dtype and "1.down_proj_scale" in state
    for way in ("torch", "safetensors", "assign", "copy"):
        target = copy.deepcopy(other)
        if way == "safetensors":
            safetensors.save_file(state, tmp_path / "model.safetensors")
            target.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
        elif way == "torch":
            torch.save(state, tmp_path / "model.pt")
            target.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
        else:
            target.load_state_dict(copy.deepcopy(model).state_dict(), assign=way == "assign")
        for name in ("gate_up_proj", "down_proj"):
            assert isinstance(getattr(target[1], name), nn.Parameter)
            assert_same_bytes(getattr(target[1], name), getattr(model[1], name))


def test_the_filter_leaves_modules_out() -> None:
    model = nn.ModuleDict({"one": experts()[1], "two": experts()[1]})
    report = moe_ops.quantize_(model, "mxfp4", filter=lambda name, module: name == "two")
    assert {one.name.partition(".")[0] for one in report.parameters} == {"two"}
    assert type(model["one"].down_proj) is nn.Parameter


def tied() -> nn.ModuleList:
    model = nn.ModuleList([experts()[1], experts(seed=1)[1]])
    model[1].down_proj = model[0].down_proj
    model[0].w13 = model[0].gate_up_proj  # a second name in the same module
    model.kept = nn.Module()  # and one in a module that holds no experts
    model.kept.weight = model[0].down_proj
    return model


def assert_tied(model: nn.ModuleList) -> None:
    assert isinstance(model[0].down_proj, QuantizedWeight) and isinstance(model[0].w13, QuantizedWeight)
    assert model[1].down_proj is model[0].down_proj is model.kept.weight
    assert model[0].w13 is model[0].gate_up_proj
    assert len(list(model.parameters())) == 3


def test_a_parameter_of_many_names_stays_one() -> None:
    model = tied()
    report = moe_ops.quantize_(model, "mxfp4")
    assert [one.name for one in report.parameters] == ["0.gate_up_proj", "0.down_proj", "1.gate_up_proj"]
    assert_tied(model)
    assert_tied(copy.deepcopy(model))
    assert_tied(model.bfloat16())
    assert model[1].down_proj.dtype == torch.bfloat16


def test_a_parameter_of_many_names_is_loaded_as_one() -> None:
    """With a scale that the one at hand has not, too."""
    model, other = tied(), tied()
    moe_ops.quantize_(model, "fp8_channel")
    moe_ops.quantize_(other, "fp8_channel")
    down = model[0].down_proj
    down.data = QuantizedWeight(down.stored, [*down.scales, torch.rand(E, 1, 1)], scheme="fp8_channel")
    state = model.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    assert {"0.w13", "0.w13_scale", "1.down_proj_input_scale", "kept.weight_input_scale"} <= state.keys()
    for one in other.parameters():
        one.data = torch.empty_like(one)
    other.load_state_dict(state)
    assert_tied(other)
    for one, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert_same_bytes(one, wanted)


def test_a_parameter_that_the_filter_takes_and_leaves_is_refused() -> None:
    model = tied()
    with pytest.raises(ValueError, match=r"quantize_: filter must be the same for 0.down_proj and 1.down_proj, one"):
        moe_ops.quantize_(model, "mxfp4", filter=lambda name, module: name == "0")
    assert type(model[0].down_proj) is nn.Parameter


def test_memory_is_shared_with_other_processes() -> None:
    model = experts("mxfp4")
    weight, before = model[1].down_proj, copy.deepcopy(model[1].down_proj)
    assert not weight.is_shared()
    assert weight.share_memory_() is weight and weight.is_shared()
    assert all(part.is_shared() for part in weight.parts().values())
    assert not model[1].gate_up_proj.is_shared()
    model.share_memory()
    assert model[1].gate_up_proj.is_shared() and isinstance(model[1].gate_up_proj, nn.Parameter)
    assert_same_bytes(model[1].down_proj, before)


def half_quantised() -> nn.ModuleList:
    model = nn.ModuleList([experts()[1], experts(seed=1)[1]])
    model[0].down_proj = experts("mxfp4")[1].down_proj
    return model


def test_a_module_with_one_float_weight_is_left_and_named() -> None:
    model = half_quantised()
    report = moe_ops.quantize_(model, "mxfp4")
    assert report.left == ("0",) and type(model[0].gate_up_proj) is nn.Parameter
    assert "left as they are, with weights that are quantised and others that are not: 0" in str(report)
    assert moe_ops.quantize_(experts(), "mxfp4").left == ()
    assert moe_ops.quantize_(half_quantised(), "mxfp4", filter=lambda name, module: name == "1").left == ()


def beside_factors(*names: str) -> nn.Module:
    """Experts, and low-rank factors, which are a pair of experts' shapes as well."""
    module = nn.Module()
    for name, size in (*zip(names, ((4, 64, 32), (4, 32, 32)), strict=True), ("a", (4, 2, 32)), ("b", (4, 32, 2))):
        module.register_parameter(name, nn.Parameter(torch.randn(size)))
    return module


def test_a_module_that_does_not_say_which_weights_are_its_experts_is_left_and_named() -> None:
    model = nn.ModuleList([experts()[1], beside_factors("w13", "w2")])
    report = moe_ops.quantize_(model, "mxfp4")
    assert report.unclear == ("1",) and type(model[1].w13) is nn.Parameter and len(report.parameters) == 2
    assert "left as they are, as several pairs of weights have the shapes of experts: 1" in str(report)
    with pytest.raises(ValueError, match="quantize_: 1 must be of one pair of experts' shapes, got several pairs"):
        moe_ops.quantize_(model, "mxfp4", filter=lambda name, module: name == "1")
    taken = moe_ops.quantize_(nn.ModuleList([beside_factors("gate_up_proj", "down_proj")]), "mxfp4")
    assert taken.unclear == () and [one.name for one in taken.parameters] == ["0.gate_up_proj", "0.down_proj"]


@pytest.mark.parametrize("scheme", quantized_schemes())
def test_small_weights_are_no_zeros(scheme: str) -> None:
    weight = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(0))
    errors = []
    for factor in (1.0, 2.0**-60, 2.0**-100):
        stored, *scales = moe_ops.quantize_weight(weight * factor, scheme=scheme)
        found = moe_ops.QuantizedWeight(stored, scales, scheme=scheme, dtype=torch.float32).dequantize()
        errors.append(((found - weight * factor).norm() / (weight * factor).norm()).item())
    assert max(errors) <= 1.05 * errors[0]


def square(**attributes: object) -> nn.Module:
    module = nn.Module()
    module.up_proj, module.down_proj = (nn.Parameter(torch.randn(E, 32, 32)) for _ in range(2))
    vars(module).update(attributes)
    return module


def test_a_module_says_how_it_stores_square_experts() -> None:
    module = square(is_transposed=True)
    moe_ops.quantize_(module, "mxfp4")
    assert module.down_proj.transposed


def apart(router: tuple[int, ...] = (), norm: int = 0, transposed: bool = False) -> nn.Module:
    """Gate and up in stacks of their own, hidden width 64: the shapes fit both orientations."""
    module = nn.Module()
    shapes = {"w1": (E, 32, 64), "w2": (E, 64, 32), "w3": (E, 32, 64)}
    for name, shape in shapes.items():
        stored = (shape[0], *shape[:0:-1]) if transposed else shape
        setattr(module, name, nn.Parameter(torch.randn(stored)))
    for name, shape in (("router", router), ("norm", (norm,) if norm else ())):
        if shape:
            setattr(module, name, nn.Parameter(torch.randn(shape)))
    return module


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("beside", [{"router": (E, 64)}, {"norm": 64}, {"router": (E, 64), "norm": 32}], ids=str)
def test_the_rest_of_a_model_says_how_experts_are_stored(beside: dict[str, Any], transposed: bool) -> None:
    module = apart(**beside, transposed=transposed)
    moe_ops.quantize_(module, "mxfp4")
    assert module.w2.transposed == transposed and module.w1.transposed == transposed


def odd() -> nn.Module:
    module = nn.Module()
    module.gate_up_proj, module.down_proj = nn.Parameter(torch.randn(E, 10, 8)), nn.Parameter(torch.randn(E, 8, 5))
    return module


def fp8_of_transformers() -> nn.Module:
    """Whose scales have three dimensions, too."""
    module = nn.Module()
    for name, shape in {"gate_up_proj": (E, 256, 256), "down_proj": (E, 256, 128)}.items():
        stored, scale = moe_ops.quantize_weight(torch.randn(shape), scheme="fp8_block128")
        module.register_parameter(name, nn.Parameter(stored, False))
        module.register_parameter(f"{name}_scale_inv", nn.Parameter(scale, False))
    return module


class Multiplying(nn.Module):
    """Experts with a forward, for what takes modules by what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(E, 96, 64)), nn.Parameter(torch.ones(E, 64, 48))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.gate_up_proj.transpose(1, 2)


def misshapen() -> nn.Module:
    module = odd()
    module.gate_up_proj = nn.Parameter(torch.randn(E, 9, 8))
    return module


STORED, SCALE = moe_ops.quantize_weight(torch.ones(E, N, K), scheme="mxfp4")
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "unknown_scheme": (lambda: moe_ops.quantize_(experts(), "int3"), "quantize_: scheme must be one of"),
    "no_string": (lambda: moe_ops.quantize_(experts(), 4), "quantize_: scheme must be a string, got 4"),
    "one_float_alone": (
        lambda: moe_ops.quantize_(half_quantised()[0], "mxfp4"),
        "quantize_: model must be of float weights alone, got some that are quantised",
    ),
    "no_function": (
        lambda: moe_ops.quantize_(experts(), "mxfp4", filter="1"),
        r"quantize_: filter must be a function \(name, module\) -> bool or None, got '1' \(str\)",
    ),
    "no_module": (lambda: moe_ops.quantize_(torch.ones(2), "mxfp4"), "quantize_: model must be a torch.nn.Module"),
    "traced": (
        lambda: moe_ops.quantize_(torch.jit.trace(nn.Sequential(Multiplying()), torch.ones(1, 64)), "mxfp4"),
        r"quantize_: 0 must be a module of Python, got TracedModule\. Call it before torch\.jit\.trace or",
    ),
    "no_experts": (lambda: moe_ops.quantize_(nn.Linear(4, 4), "mxfp4"), "quantize_: model must be a module with"),
    "twice": (lambda: moe_ops.quantize_(experts("mxfp4"), "mxfp4"), "quantize_: model must be a module with"),
    "square": (lambda: moe_ops.quantize_(square(), "mxfp4"), "quantize_: model must be of shapes that are"),
    "fp8_already": (
        lambda: moe_ops.quantize_(fp8_of_transformers(), "mxfp4"), "quantize_: model must be a module with",
    ),
    "no_shapes_of_experts": (
        lambda: moe_ops.quantize_(misshapen(), "mxfp4"),
        r"quantize_: model must be of shapes that are \[E, N, K\] or \[E, K, N\], got .*, neither. Pass a filter",
    ),
    "odd_width": (lambda: moe_ops.quantize_(odd(), "mxfp4"), "quantize_: down_proj must be of a contracted width"),
    "not_quantised": (lambda: QuantizedWeight(STORED, [], scheme="bf16"), "QuantizedWeight: scheme must be one of"),
    "other_bytes": (
        lambda: QuantizedWeight(STORED.float(), [SCALE], scheme="mxfp4"), "QuantizedWeight: stored must be torch.uint8",
    ),
    "no_bytes": (
        lambda: QuantizedWeight(None, [SCALE], scheme="mxfp4"),
        "QuantizedWeight: stored must be a torch.Tensor, got None",
    ),
    "bytes_in_a_list": (
        lambda: QuantizedWeight([1], [SCALE], scheme="mxfp4"),
        "QuantizedWeight: stored must be a torch.Tensor, got list",
    ),
    "sparse_bytes": (
        lambda: QuantizedWeight(STORED.to_sparse(), [SCALE], scheme="mxfp4"),
        "QuantizedWeight: stored must be a strided tensor",
    ),
    "no_list": (
        lambda: QuantizedWeight(STORED, SCALE, scheme="mxfp4"),
        "QuantizedWeight: scales must be a list or tuple of tensors, got Tensor",
    ),
    "no_scales": (
        lambda: QuantizedWeight(STORED, None, scheme="mxfp4"),
        "QuantizedWeight: scales must be a list or tuple of tensors, got None",
    ),
    "scale_that_is_none": (
        lambda: QuantizedWeight(STORED, [None], scheme="mxfp4"),
        r"QuantizedWeight: scales\[0\] must be a torch.Tensor, got None",
    ),
    "scale_on_another_device": (
        lambda: QuantizedWeight(STORED, [SCALE.to("meta")], scheme="mxfp4"),
        r"QuantizedWeight: scales\[0\] must be on cpu like stored, got meta. Move it first",
    ),
    "scheme_of_another_type": (
        lambda: QuantizedWeight(STORED, [SCALE], scheme=["mxfp4"]),
        "QuantizedWeight: scheme must be a string, got list",
    ),
    "nominal_dtype": (
        lambda: QuantizedWeight(STORED, [SCALE], scheme="mxfp4", dtype="bf16"),
        r"QuantizedWeight: dtype must be a torch.dtype, got 'bf16' \(str\)",
    ),
    "orientation": (
        lambda: QuantizedWeight(STORED, [SCALE], scheme="mxfp4", transposed="yes"),
        r"QuantizedWeight: transposed must be True or False, got 'yes' \(str\)",
    ),
    "odd_columns": (
        lambda: moe_ops.quantize_weight(torch.ones(E, N, 33), scheme="mxfp4"),
        "quantize_weight: weight must be of a last dimension K that 2 divides for scheme 'mxfp4', got K=33",
    ),
    "sparse_floats": (
        lambda: moe_ops.quantize_weight(torch.ones(E, N, K).to_sparse(), scheme="mxfp4"),
        "quantize_weight: weight must be a strided tensor",
    ),
    "no_scale": (lambda: QuantizedWeight(STORED, [], scheme="mxfp4"), "QuantizedWeight: scales must be"),
    "short_scale": (
        lambda: QuantizedWeight(STORED, [SCALE[:, 1:]], scheme="mxfp4"), r"QuantizedWeight: scales\[0\] must be",
    ),
    "data_of_floats": (
        lambda: setattr(made("mxfp4"), "data", torch.ones(E, N, K)), "QuantizedWeight: data must be a QuantizedWeight",
    ),
    "written": (lambda: made("mxfp4").mul_(2), "QuantizedWeight: self must be a float tensor for aten.mul_"),
    "copied_from_floats": (
        lambda: made("mxfp4").copy_(torch.ones(E, N, K)), "QuantizedWeight.copy_: source must be a QuantizedWeight",
    ),
    "floats_loaded": (
        lambda: experts("mxfp4").load_state_dict(experts().state_dict()), "load_state_dict: 1.*_scale must be given",
    ),
    "another_scheme_loaded": (
        lambda: experts("mxfp4").load_state_dict(experts("int4_w4a16").state_dict()),
        "load_state_dict: 1.* must be stored in scheme 'mxfp4', got scheme 'int4_w4a16'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_what_is_wrong(case: str) -> None:
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block128", "int8_channel", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("written", ["apart", "in a row"])
def test_an_odd_number_of_rows_has_no_halves(scheme: str, written: str) -> None:
    """Scales of two halves of which one has a row less decode no weight."""
    stored, *scales = moe_ops.quantize_weight(torch.randn(E, 65, 64), scheme=scheme)
    *_, half = moe_ops.quantize_weight(torch.randn(E, 32, 64), scheme=scheme)  # the last scale is what is doubled
    scales[-1] = half.repeat_interleave(2, 0).unflatten(0, (E, 2))
    if written == "in a row":
        scales[-1] = scales[-1].flatten(1, 2)
    words = rf"QuantizedWeight: scales\[{len(scales) - 1}\] must be \[E=4, N_groups=\d+, "
    with pytest.raises(ValueError, match=words):
        QuantizedWeight(stored, scales, scheme=scheme)


@pytest.mark.parametrize(
    ("scheme", "sizes", "scale"),
    [
        ("fp8_tensor", (E, 0, 64), (E, 2, 1, 1)),
        ("fp8_w8a16", (E, 0, 0), (E, 2, 1)),
        ("int8_w8a16", (E, 64, 0), (E, 64, 2)),
        ("int4_w4a16", (E, 64, 0), (E, 2, 32, 2)),
        ("w4a8_fp8", (E, 64, 0), (E, 64, 64)),
    ],
    ids=str,
)
def test_nothing_has_no_groups(scheme: str, sizes: tuple[int, ...], scale: tuple[int, ...]) -> None:
    """Neither two halves of no row nor many groups of no column."""
    stored = torch.zeros(sizes, dtype=SCHEMES[scheme].weight_dtype)
    with pytest.raises(ValueError, match=r"QuantizedWeight: scales\[0\] must be \[E=4, N"):
        QuantizedWeight(stored, [torch.ones(scale)], scheme=scheme)


def stepped(name: str, **options: Any) -> Callable[[Tensor], None]:
    """A step of an optimiser that was given the weight, which has a gradient."""

    def step(weight: Tensor) -> None:
        parameter = nn.Parameter(weight)
        parameter.requires_grad = True
        optimizer = getattr(torch.optim, name)([parameter], **options)
        with torch.enable_grad():
            parameter[0].sum().backward()
        optimizer.step()

    return step


def assign(weight: Tensor, index: Any, value: Any) -> None:
    weight[index] = value


#: Each would write the weight; where PyTorch selects elements first, or takes lists, too.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "element": lambda w: assign(w, 0, 0),
    "slice": lambda w: assign(w, slice(1, 2), 0),
    "elements": lambda w: assign(w, (0, slice(1, 2)), torch.ones(K)),
    "mask": lambda w: assign(w, torch.ones(E, dtype=torch.bool), 0),
    "everything": lambda w: assign(w, ..., 0),
    "foreach": lambda w: torch._foreach_mul_([torch.ones(2), w], 0.0),
    "foreach_copy": lambda w: torch._foreach_copy_([w], [torch.ones(E, N, K)]),
    "out_of_many": lambda w: torch.max(torch.ones(2, E, N, K), 0, out=(w, torch.ones(E, N, K).long())),
}
STEPS: dict[str, Callable[[Tensor], object]] = {
    "sgd": stepped("SGD", lr=1.0, foreach=False),
    "sgd_foreach": stepped("SGD", lr=1.0, foreach=True),
    "sgd_fused": stepped("SGD", lr=1.0, fused=True),
    "adamw_foreach": stepped("AdamW", foreach=True),
    "adamw_fused": stepped("AdamW", fused=True),
}


@pytest.mark.parametrize("write", WRITES | STEPS)
def test_what_would_be_lost_is_refused(write: str) -> None:
    weight = made("mxfp4")
    with pytest.raises(
        ValueError, match=r"QuantizedWeight: .* must be a float tensor for .*, got quantised bytes. Change"
    ):
        (WRITES | STEPS)[write](weight)
    assert_same_bytes(weight, made("mxfp4"))


@pytest.mark.parametrize("call", ["apply_", "map_", "map2_"])
def test_functions_of_each_element_are_refused(call: str) -> None:
    """torch calls no operator for them, and writes to the address 0."""
    weight, others = made("mxfp4"), {"apply_": 0, "map_": 1, "map2_": 2}[call]
    words = "QuantizedWeight: self must be a float tensor for a function of each element, which is written, got quanti"
    with pytest.raises(ValueError, match=words):
        getattr(weight, call)(*[torch.ones(E, N, K)] * others, lambda *numbers: 0.0)
    assert_same_bytes(weight, made("mxfp4"))


@pytest.mark.parametrize("number", [2, 0.5, True])
def test_a_number_is_not_copied(number: float) -> None:
    with pytest.raises(ValueError, match=r"QuantizedWeight.copy_: source must be a QuantizedWeight of the form"):
        made("mxfp4").copy_(number)


@pytest.mark.parametrize("write", WRITES)
def test_what_would_be_lost_is_refused_in_graphs(write: str) -> None:
    torch.compiler.reset()
    run = torch.compile(WRITES[write], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"QuantizedWeight: .* must be a float tensor for "):
        run(made("mxfp4"))


def test_another_takes_the_place_of_its_data() -> None:
    parameter = nn.Parameter(made("mxfp4"), requires_grad=False)
    other = made("nvfp4", transposed=True).bfloat16()
    parameter.data = other
    assert isinstance(parameter, nn.Parameter) and parameter.scheme == "nvfp4" and parameter.transposed
    assert parameter.shape == other.shape and parameter.dtype == torch.bfloat16
    assert_same_bytes(parameter, other)
    assert torch.equal(parameter[0], other[0])
    assert parameter.data.stored.data_ptr() == other.stored.data_ptr()


def layer(scheme: str) -> tuple[Tensor, Tensor, nn.Module]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(5, 96, generator=generator), torch.randn(5, E, generator=generator), experts(scheme)[1]


@pytest.mark.parametrize("scheme", SOME)
def test_operators_unpack_it(scheme: str) -> None:
    x, logits, module = layer(scheme)
    gate_up, down = module.gate_up_proj, module.down_proj
    lists = {"gate_up_scales": gate_up.scales, "down_scales": down.scales}
    wanted = moe_ops.fused_moe(x, logits, gate_up.stored, down.stored, top_k=2, scheme=scheme, **lists)
    assert torch.equal(moe_ops.fused_moe(x, logits, gate_up, down, top_k=2), wanted)
    weights, ids = moe_ops.fused_topk(logits, top_k=2)
    assert torch.equal(moe_ops.fused_experts(x, gate_up, down, weights, ids), wanted)


def test_operators_take_gate_and_up_apart() -> None:
    x, logits, module = layer("mxfp4")
    dense = module.gate_up_proj.dequantize()
    halves = []
    for half in dense.chunk(2, dim=1):
        stored, *scales = moe_ops.quantize_weight(half, scheme="mxfp4")
        halves.append(QuantizedWeight(stored, scales, scheme="mxfp4"))
    gate, up = halves
    wanted = moe_ops.fused_moe(x, logits, module.gate_up_proj, module.down_proj, top_k=2)
    assert torch.equal(moe_ops.fused_moe(x, logits, gate, module.down_proj, up_proj=up, top_k=2), wanted)


def prepared(scheme: str, format: str = "grouped") -> tuple[moe_ops.Prepared, nn.Module]:
    x, logits, module = layer(scheme)
    routed = moe_ops.fused_topk(logits, top_k=2)
    return moe_ops.prepare(x, *routed, num_experts=E, scheme=scheme, format=format), module


def halves(weight: QuantizedWeight) -> list[QuantizedWeight]:
    """Gate and up of a stack, quantised apart."""
    form = {"scheme": weight.scheme, "dtype": weight.dtype}
    parts = [moe_ops.quantize_weight(half, scheme=weight.scheme) for half in weight.dequantize().chunk(2, dim=1)]
    return [QuantizedWeight(stored, scales, **form) for stored, *scales in parts]


#: What computes with weights, from the rows: by the stored bytes and their scales, and by the wrappers.
STAGES: dict[str, Callable[[moe_ops.Prepared, QuantizedWeight, QuantizedWeight], tuple[object, object]]] = {
    "experts": lambda p, g, d: (
        moe_ops.experts(
            p, g.stored, d.stored, scheme=g.scheme, gate_up_scales=g.scales, down_scales=d.scales, out_dtype=g.dtype
        ),
        moe_ops.experts(p, g, d, out_dtype=g.dtype),
    ),
    "mm_glu": lambda p, g, d: of_stage("mm_glu", p, g),
    "mm_glu_apart": lambda p, g, d: of_stage("mm_glu", p, *halves(g)),
    "mm": lambda p, g, d: of_stage("mm", p, g),
}  # fmt: skip


def of_stage(name: str, p: moe_ops.Prepared, weight: QuantizedWeight, up: QuantizedWeight | None = None) -> Any:
    run, batched = getattr(moe_ops, f"{p.format}_{name}"), p.format == "batched"
    rows = {f"{'batch' if batched else 'rows'}_scale": p.rows_scale}
    plain = {} if up is None else {"up_weight": up.stored}
    scales = [*weight.scales, *([] if up is None else up.scales)]
    wanted = run(p.rows, weight.stored, p.extents, **rows, **plain, scheme=weight.scheme, weight_scales=scales)
    return wanted, run(p.rows, weight, p.extents, **rows, **({} if up is None else {"up_weight": up}))


def used(rows: Tensor, p: moe_ops.Prepared) -> Tensor:
    return rows[used_rows(rows, p.extents).expand_as(rows)]


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", SOME)
@pytest.mark.parametrize("stage", STAGES)
def test_stages_unpack_it(stage: str, scheme: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, module = prepared(scheme, format)
    weights = module.gate_up_proj, module.down_proj
    cut = halves(module.gate_up_proj)
    monkeypatch.setattr(f"{__name__}.halves", lambda weight: cut)
    monkeypatch.delattr(QuantizedWeight, "dequantize")
    wanted, got = STAGES[stage](given, *weights)
    assert torch.equal(used(got, given), used(wanted, given))


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("stage", ["experts", "mm_glu", "mm"])
def test_stages_unpack_it_in_one_graph(stage: str, format: str) -> None:
    given, module = prepared("fp8_channel", format)
    torch.compiler.reset()
    run = torch.compile(lambda *args: STAGES[stage](*args)[1], backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got, wanted = run(given, module.gate_up_proj, module.down_proj), STAGES[stage](
            given, module.gate_up_proj, module.down_proj
        )[0]  # fmt: skip
    assert torch.equal(used(got, given), used(wanted, given))


def stage_refusals() -> dict[str, tuple[Callable[[], object], str]]:
    given, module = prepared("mxfp4")
    gate_up, down = module.gate_up_proj, module.down_proj
    other = experts("fp8_channel")[1].down_proj
    rows, ends = given.rows, given.extents
    found: dict[str, tuple[Callable[[], object], str]] = {
        "experts_scheme_twice": (
            lambda: moe_ops.experts(given, gate_up, down, scheme="mxfp4"), "experts: scheme must be left out",
        ),
        "experts_scales_twice": (
            lambda: moe_ops.experts(given, gate_up, down, down_scales=down.scales),
            "experts: down_scales must be left out",
        ),
        "experts_mixed": (
            lambda: moe_ops.experts(given, gate_up, other), "experts: down_proj must be quantised as the other",
        ),
        "experts_rows_as_they_are": (
            lambda: moe_ops.experts(given, *(experts("fp8_channel")[1].parameters())),
            "experts: prepared.rows_scale must be given .* Pass scheme='fp8_channel' to moe_ops.prepare",
        ),
    }  # fmt: skip
    static = QuantizedWeight(other.stored, [*other.scales, torch.ones(E, 1, 1)], scheme="fp8_channel")
    found["experts_static"] = (
        lambda: moe_ops.experts(prepared("fp8_channel")[0], experts("fp8_channel")[1].gate_up_proj, static),
        "experts: down_proj must be without a static scale of rows, .* got a QuantizedWeight with input_scale",
    )
    for name in ("grouped_mm", "grouped_mm_glu", "batched_mm", "batched_mm_glu"):
        run = getattr(moe_ops, name)
        found |= {
            f"{name}_static": (
                lambda run=run: run(rows, static, ends), f"{name}: weight must be without a static scale of rows",
            ),
            f"{name}_scheme_twice": (
                lambda run=run: run(rows, gate_up, ends, scheme="mxfp4"), f"{name}: scheme must be left out",
            ),
            f"{name}_scales_twice": (
                lambda run=run: run(rows, gate_up, ends, weight_scales=gate_up.scales),
                f"{name}: weight_scales must be left out",
            ),
            f"{name}_transposed": (
                lambda run=run: run(rows, gate_up.mT, ends), rf"{name}: weight must be \[E, N, K\]",
            ),
        }  # fmt: skip
    for name in ("grouped_mm_glu", "batched_mm_glu"):
        run = getattr(moe_ops, name)
        found[f"{name}_up_plain"] = (
            lambda run=run: run(rows, gate_up, ends, up_weight=gate_up.dequantize()),
            f"{name}: up_weight must be quantised as the other",
        )
    return found


STAGE_REFUSALS = stage_refusals()


@pytest.mark.parametrize("case", STAGE_REFUSALS)
def test_stages_refuse(case: str) -> None:
    call, message = STAGE_REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call()


REFUSED: dict[str, tuple[Callable[[QuantizedWeight, QuantizedWeight], dict[str, object]], str]] = {
    "scheme_twice": (lambda g, d: {"scheme": "mxfp4"}, "scheme must be left out"),
    "scales_twice": (lambda g, d: {"down_scales": d.scales}, "down_scales must be left out"),
    "one_plain": (lambda g, d: {"down_proj": d.dequantize()}, "down_proj must be quantised as the other"),
    "other_scheme": (lambda g, d: {"down_proj": experts("fp8_channel")[1].down_proj}, "down_proj must be quantised as"),
    "up_alone": (
        lambda g, d: {
            "gate_up_proj": torch.ones(E, 32, 96), "down_proj": d.dequantize(),
            "up_proj": QuantizedWeight(g.stored[:, :32], [g.scale[:, :32]], scheme="mxfp4"),
        },
        "gate_up_proj must be quantised as the other",
    ),
    "transposed": (lambda g, d: {"gate_up_proj": g.transpose(1, 2)}, r"gate_up_proj must be \[E, N, K\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_operators_refuse(case: str) -> None:
    x, logits, module = layer("mxfp4")
    change, message = REFUSED[case]
    given = {"gate_up_proj": module.gate_up_proj, "down_proj": module.down_proj}
    with pytest.raises(ValueError, match=f"fused_moe: {message}"):
        moe_ops.fused_moe(x, logits, top_k=2, **given | change(module.gate_up_proj, module.down_proj))
    routed = moe_ops.fused_topk(logits, top_k=2)
    with pytest.raises(ValueError, match=f"fused_experts: {message}"):
        moe_ops.fused_experts(
            x, topk_weights=routed[0], topk_ids=routed[1], **given | change(module.gate_up_proj, module.down_proj)
        )


def test_rows_of_eight_bits_without_their_scale_are_refused_with_the_cure() -> None:
    model = experts("fp8_channel")[1]
    rows = torch.zeros(3, model.gate_up_proj.shape[2]).to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"hidden_states must be .*, got torch.float8_e4m3fn. Pass the scale of quantised"
    ):
        moe_ops.fused_experts(rows, model.gate_up_proj, model.down_proj, torch.ones(3, 1), torch.zeros(3, 1).long())
