"""State dicts of quantised models that do not fit the model at hand: taken on, or refused by key with nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.quantized import QuantizedWeight
from moe_ops.quantized_state import put

E, I, H = 4, 64, 128
State = dict[str, Any]


def experts(scheme: str, E: int = E, I: int = I, H: int = H, seed: int = 0) -> nn.Module:
    """A model whose quantised experts are under ``e``."""
    generator, module = torch.Generator().manual_seed(seed), nn.Module()
    for name, shape in {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
    model = nn.ModuleDict({"e": module})
    moe_ops.quantize_(model, scheme)
    return model


def with_scales(model: nn.Module, *scales: Tensor) -> nn.Module:
    """The model, its first weight decoded by these."""
    weight = model.e.gate_up_proj
    put(model.e, "gate_up_proj", QuantizedWeight(weight.stored, scales, scheme=weight.scheme, dtype=weight.dtype))
    return model


#: Of a scheme, a model with scales of another form than quantize_ makes.
FORMS: dict[str, tuple[str, Callable[[], tuple[Tensor, ...]]]] = {
    "smaller_groups": ("int4_w4a16", lambda: (torch.rand(E, 2 * I, H // 32).bfloat16(),)),
    "groups_of_another_dtype": ("int4_w4a16", lambda: (torch.rand(E, 2 * I, H // 32),)),
    "zero_points": (
        "int4_w4a16",
        lambda: (torch.rand(E, 2 * I, 2).bfloat16(), torch.full((E, 2 * I, 2), 3, dtype=torch.uint8)),
    ),
    "halves": ("fp8_tensor", lambda: (torch.rand(E, 2, 1, 1),)),
    "static_rows": ("fp8_tensor", lambda: (torch.rand(E, 1, 1), torch.rand(E, 1, 1))),
    "bfloat16": ("fp8_channel", lambda: (torch.rand(E, 2 * I, 1).bfloat16(),)),
    "blocks": ("fp8_w8a16", lambda: (torch.rand(E, 1, 1),)),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(one: State, other: State) -> bool:
    """Whether two states are the same bytes under the same keys, in the same dtypes."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(bits(one[key]), bits(other[key])) for key in one
    )


def copied(model: nn.Module) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("way", ["metadata", "plain", "assigned", "swapped", "wrapped"])
@pytest.mark.parametrize("form", FORMS)
def test_a_prepared_model_takes_every_form_of_its_scheme(form: str, way: str) -> None:
    scheme, scales = FORMS[form]
    source, model = with_scales(experts(scheme), *scales()), experts(scheme, seed=1)
    state = source.state_dict() if way == "metadata" else dict(source.state_dict())
    before = copied(source)
    if way == "wrapped":  # entries that are weights still
        state = dict(source.named_parameters())
    torch.__future__.set_swap_module_params_on_conversion(way == "swapped")
    try:
        model.load_state_dict(state, assign=way == "assigned")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same(copied(model), before)
    weight = model.e.gate_up_proj
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad and weight.shape == (E, 2 * I, H)
    if way != "assigned":  # memory of its own
        weight.stored.zero_()
        assert same(copied(source), before)


OTHER_SIZES = [{"E": 2}, {"I": 32}, {"H": 64}]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", OTHER_SIZES, ids=str)
def test_a_model_of_other_sizes_is_torchs_size_mismatch(
    sizes: dict[str, int], dtype: torch.dtype, assign: bool
) -> None:
    """Whatever else differs."""
    state = {
        key: value.to(dtype) if key.endswith("_scale") else value
        for key, value in experts("fp8_channel", **sizes).state_dict().items()
    }
    model = experts("fp8_channel", seed=1)
    before = copied(model)
    with pytest.raises(RuntimeError, match=r"size mismatch for e\.gate_up_proj: .*\n.*size mismatch for e\.down_proj"):
        model.load_state_dict(state, assign=assign)
    assert same(copied(model), before)


def test_an_optional_scale_does_not_hide_other_sizes() -> None:
    source, model = experts("fp8_channel", E=2), experts("fp8_channel")
    state = dict(source.state_dict()) | {f"e.{name}_input_scale": torch.ones(2, 1, 1) for name in source.e._parameters}
    before = copied(model)
    with pytest.raises(RuntimeError, match=r"size mismatch for e\.gate_up_proj"):
        model.load_state_dict(state)
    assert same(copied(model), before)


#: Changes of a state of `fp8_channel` in other dtypes, which is refused then for its second weight, and the message.
REFUSED: dict[str, tuple[Callable[[State], object], str]] = {
    "a_scale_missing": (lambda s: s.pop("e.down_proj_scale"), r"e\.down_proj_scale must be given"),
    "a_scale_of_another_shape": (
        lambda s: s.update({"e.down_proj_scale": s["e.down_proj_scale"][:, 1:]}),
        r"e\.down_proj_scale must be \[E=4, N_groups=128, K_groups=1\], got \[4, 127, 1\]",
    ),
    "a_scale_of_another_dtype": (
        lambda s: s.update({"e.down_proj_scale": s["e.down_proj_scale"].half()}),
        r"e\.down_proj_scale must be torch.float32 or torch.bfloat16, got torch.float16",
    ),
    "an_optional_scale_of_another_shape": (
        lambda s: s.update({"e.down_proj_input_scale": torch.ones(3, 1, 1)}),
        r"e\.down_proj_input_scale must be \[E=4, N_groups=1, K_groups=1\], got \[3, 1, 1\]",
    ),
    "a_scale_elsewhere": (
        lambda s: s.update({"e.down_proj_scale": s["e.down_proj_scale"].to("meta")}),
        r"e\.down_proj_scale must be on cpu like e\.down_proj, got meta",
    ),
    "no_tensor": (lambda s: s.update({"e.down_proj_scale": [1.0]}), r"e\.down_proj_scale must be a torch.Tensor, got"),
    "bytes_of_another_dtype": (
        lambda s: s.update({"e.down_proj": s["e.down_proj"].float()}),
        r"e\.down_proj must be torch.float8_e4m3fn for scheme 'fp8_channel', got torch.float32",
    ),
    "bytes_of_two_dimensions": (
        lambda s: s.update({"e.down_proj": s["e.down_proj"][0]}), r"e\.down_proj must be \[E, N, K\]",
    ),
    "bytes_in_a_list": (
        lambda s: s.update({"e.down_proj": [1]}), r"e\.down_proj must be a torch.Tensor, got list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_the_key_and_changes_nothing(case: str) -> None:
    change, message = REFUSED[case]
    state = {
        key: value.bfloat16() if key.endswith("_scale") else value
        for key, value in experts("fp8_channel").state_dict().items()
    }
    change(state)
    model = experts("fp8_channel", seed=1)
    before = copied(model)
    with pytest.raises(ValueError, match=f"^load_state_dict: {message}"):
        model.load_state_dict(state)
    assert same(copied(model), before)


def test_what_stops_the_load_later_leaves_no_memory_that_nobody_wrote() -> None:
    source, model = experts("fp8_channel"), experts("fp8_channel", seed=1)
    state = {k: v.bfloat16() if k.endswith("_scale") else v for k, v in source.state_dict().items()}

    def stop(*given: object) -> None:
        raise InterruptedError

    model.e.register_load_state_dict_pre_hook(stop)
    with pytest.raises(InterruptedError):
        model.load_state_dict(state)
    assert same(copied(model), state)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_key_that_the_model_has_already_is_refused(kind: str) -> None:
    """What it had there would be saved nowhere, and scales loaded in its place."""
    model = nn.ModuleDict({"e": nn.Module()})
    for name, shape in {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}.items():
        model.e.register_parameter(name, nn.Parameter(torch.randn(shape)))
    own = {"parameter": nn.Parameter(torch.ones(E)), "buffer": torch.ones(E), "module": nn.Identity()}[kind]
    {"parameter": model.e.register_parameter, "buffer": model.e.register_buffer, "module": model.e.add_module}[kind](
        "down_proj_scale", own
    )
    with pytest.raises(ValueError, match=f"quantize_: Module must be without a {kind} 'down_proj_scale'"):
        moe_ops.quantize_(model, "mxfp4")
    assert not any(isinstance(weight, QuantizedWeight) for weight in model.parameters())


def test_what_is_missing_is_missing_with_its_scales() -> None:
    model, state = experts("nvfp4"), copied(experts("nvfp4"))
    left = [key for key in state if key.startswith("e.down_proj")]
    for key in left:
        del state[key]
    found = model.load_state_dict(state, strict=False)
    assert sorted(found.missing_keys) == sorted(left) and not found.unexpected_keys
    assert len(left) == 3


def test_safetensors_loads_a_weight_of_many_names(tmp_path: Path) -> None:
    """It saves each once, and asks which of the other keys the model lacks."""
    files = pytest.importorskip("safetensors.torch")
    models = experts("nvfp4"), experts("nvfp4", seed=1)
    for model in models:
        model["again"] = nn.Module()
        put(model["again"], "up_proj", model.e.gate_up_proj)
    files.save_model(models[0], tmp_path / "model.safetensors")
    assert files.load_model(models[1], tmp_path / "model.safetensors") == (set(), [])
    assert same(copied(models[1]), copied(models[0]))
