"""Which keys fill a module: renamed layers are found, those of another module or stack of layers are not taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import moe_ops
from moe_ops.checkpoint_names import check_prefixes, prefix_of
from tests.ops import checkpoints as files
from tests.ops.checkpoints import E, H, I
from tests.ops.test_load_experts import Experts, Model, layers_of, wanted_of

#: id -> (module, prefix of its keys): the same layer.
RENAMED = {
    "the same": ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts"),
    "model in front": ("layers.1.mlp.experts", "model.layers.1.mlp.experts"),
    "model left out": ("model.layers.1.mlp.experts", "layers.1.mlp.experts"),
    "another block": ("model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"),
    "ffn": ("model.layers.1.mlp.experts", "layers.1.ffn.experts"),
    "language model": ("model.language_model.layers.1.mlp.experts", "language_model.model.layers.1.mlp.experts"),
    "h": ("model.layers.1.mlp.experts", "transformer.h.1.mlp.experts"),
    "decoder in both": ("model.decoder.layers.1.mlp.experts", "decoder.block.1.ffn.experts"),
    "mtp in both": ("mtp.layers.1.mlp.experts", "model.mtp_layers.1.mlp.experts"),
    "wrapped": ("layers.1.mlp.experts.inner", "layers.1.mlp.experts"),
}


@pytest.mark.parametrize("name", RENAMED)
def test_a_renamed_layer_is_found(name: str) -> None:
    module, prefix = RENAMED[name]
    found = prefix_of(module, {prefix: True, prefix.replace("1", "2"): True})
    assert found == prefix
    parts = module.split(".")
    check_prefixes({module: found}, [".".join(parts[:count]) for count in range(len(parts) + 1)])


#: id -> (module, prefix of keys of another stack of layers).
OTHERS = {
    "encoder": ("encoder.layers.1.mlp.experts", "decoder.block.1.moe.experts"),
    "mtp": ("mtp.layers.1.mlp.experts", "model.layers.1.mlp.experts"),
    "mtp by its end": ("mtp.layers.1.mlp.experts", "layers.1.mlp.experts"),
    "model of mtp": ("model.layers.1.mlp.experts", "model.mtp.layers.1.mlp.experts"),
    "talker": ("talker.model.layers.1.mlp.experts", "thinker.model.layers.1.mlp.experts"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_stack_of_layers_is_not_taken_for_its_number(name: str) -> None:
    module, prefix = OTHERS[name]
    words = f"with the experts of {module!r}, got those of another stack of layers, [{prefix!r}]. Pass the model that"
    with pytest.raises(ValueError, match=re.escape(words)):
        prefix_of(module, {prefix: True})


@pytest.mark.parametrize("other", ["a.layers.0.mlp.experts", "layers.0.mlp.experts"])
def test_keys_of_a_module_that_the_filter_leaves_out_are_its_own(other: str, tmp_path: Path) -> None:
    """They are the name of it, or end like it."""
    save_file(layers_of("float, channel", [other]), tmp_path / "model.safetensors")
    model = nn.ModuleDict({"a": Model(1), "b": Model(1)})
    before = dict(model.named_parameters())
    words = (
        f"keys of its own for each module of experts, got {{'b.layers.0.mlp.experts': {other!r}, 'a.layers.0.mlp.exp"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(model, tmp_path, filter=lambda name, module: name.startswith("b"))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    if other.startswith("a"):
        assert moe_ops.load_experts_(model, tmp_path, filter=lambda name, module: name == other) == {
            other: "fp8_channel"
        }


def test_layers_of_one_form_have_keys_of_one_form(tmp_path: Path) -> None:
    prefixes = ["h.0.mlp.experts", "others.1.experts"]
    save_file(layers_of("float, channel", prefixes), tmp_path / "model.safetensors")
    words = "with keys like 'h.0.mlp.experts' for 'layers.1.mlp.experts', too, got 'others.1.experts'. Leave layers"
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(Model(2), tmp_path)


@pytest.mark.parametrize("front", ["", "model."])
def test_a_missing_layer_of_a_stack_that_is_there_is_not_taken_from_another(front: str, tmp_path: Path) -> None:
    """Whichever layers the filter takes: other layers have keys with the module's own name."""
    prefixes = [f"{front}layers.0.mlp.experts", "others.1.mlp.experts"]
    save_file(layers_of("float, channel", prefixes), tmp_path / "model.safetensors")
    words = "checkpoint must be with the experts of 'layers.1.mlp.experts', got no such keys. Pass the model that the"
    for take in (None, lambda name, module: "1" in name):
        model = Model(2)
        with pytest.raises(ValueError, match=re.escape(words)):
            moe_ops.load_experts_(model, tmp_path, filter=take)
    assert moe_ops.load_experts_(model, tmp_path, filter=lambda name, module: "0" in name)


class Apart(nn.Module):
    """Gate and up stacked apart."""

    def __init__(self) -> None:
        super().__init__()
        for name, (N, K) in files.PROJECTIONS.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(E, N, K, dtype=torch.bfloat16)))


def of_two_layers() -> nn.Module:
    """The second one has gate and up apart."""
    model = Model(2)
    model.layers[1]["mlp"]["experts"] = Apart()
    return model


@pytest.mark.parametrize("stacked", [False, True], ids=["numbered", "stacked"])
def test_gate_and_up_apart_are_filled_each(stacked: bool, tmp_path: Path) -> None:
    names = [f"layers.{i}.mlp.experts" for i in range(2)]
    state = layers_of("float, channel", names)
    wanted = wanted_of("float, channel", state, names[1])
    gate, up = wanted.pop("gate_up_proj").chunk(2, dim=1)
    if stacked:
        of_one = layers_of("float, channel", [files.PREFIX])
        state = {
            key.replace(files.PREFIX, name): tensor.clone()
            for name in names
            for key, tensor in files.stacked(of_one, join=False).items()
        }
    save_file(state, tmp_path / "model.safetensors")
    model = of_two_layers()
    assert moe_ops.load_experts_(model, tmp_path) == dict.fromkeys(names, "fp8_channel")
    for name, tensor in {"gate_proj": gate, "up_proj": up, **wanted}.items():
        held = model.get_submodule(names[1]).get_parameter(name)
        assert isinstance(held, moe_ops.QuantizedWeight) and torch.equal(held.dequantize(), tensor)


def without_gate(key: str) -> bool:
    return "layers.1" not in key or "gate_proj" not in key


def test_weights_that_the_checkpoint_does_not_have_are_missed_before_anything_is_replaced(tmp_path: Path) -> None:
    state: dict[str, Tensor] = layers_of("float, channel", [f"layers.{i}.mlp.experts" for i in range(2)])
    save_file({key: tensor for key, tensor in state.items() if without_gate(key)}, tmp_path / "model.safetensors")
    for model in (of_two_layers(), Model(2)):
        before = dict(model.named_parameters())
        with pytest.raises(
            ValueError, match=r"of 'layers\.1\.mlp\.experts', got down_proj, up_proj\..*by the filter\."
        ):
            moe_ops.load_experts_(model, tmp_path)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_square_experts_have_to_say_how_they_are_stored(tmp_path: Path) -> None:
    """As for quantize_: nothing tells [E, N, K] from [E, K, N]."""
    torch.manual_seed(0)
    weights = {name: torch.randn(E, 128, 128) for name in ("up_proj", "down_proj")}
    state = {
        f"experts.{expert}.{name}.{key}": tensor
        for name, weight in weights.items()
        for expert in range(E)
        for key, tensor in files.modelopt_fp8(weight[expert]).items()
    }
    save_file(state, tmp_path / "model.safetensors")
    module = nn.Module()
    for name in weights:
        module.register_parameter(name, nn.Parameter(torch.zeros(E, 128, 128)))
    model = nn.ModuleDict({"experts": module})
    words = (
        "experts must be of shapes that are [E, N, K] or [E, K, N], got [[3, 128, 128], [3, 128, 128]], both. Set mod"
    )
    for call in (moe_ops.load_experts_, lambda model, _: moe_ops.quantize_(model, "fp8_tensor")):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(model, tmp_path)
    module.is_transposed = True
    moe_ops.load_experts_(model, tmp_path)
    assert module.up_proj.transposed


def tied(modules: bool = False) -> nn.Module:
    model = Model(2)
    first, second = (layer["mlp"]["experts"] for layer in model.layers)
    if modules:
        model.layers[1]["mlp"]["experts"] = first
        return model
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    return model


ties = pytest.mark.parametrize("modules", [False, True], ids=["parameters", "modules"])


@ties
@pytest.mark.parametrize("stored", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_a_parameter_of_two_names_stays_one(stored: tuple[int, ...], modules: bool, tmp_path: Path) -> None:
    state = layers_of("float, channel", [f"layers.{i}.mlp.experts" for i in stored])
    save_file(state, tmp_path / "model.safetensors")
    model = tied(modules)
    names = [f"layers.{i}.mlp.experts" for i in range(2)]
    assert moe_ops.load_experts_(model, tmp_path) == dict.fromkeys(names, "fp8_channel")
    first, second = (model.get_submodule(name) for name in names)
    assert first.gate_up_proj is second.gate_up_proj and first.down_proj is second.down_proj
    wanted = wanted_of("float, channel", state, names[stored[0]])
    assert torch.equal(first.down_proj.dequantize(), wanted["down_proj"])
    assert all(type(tensor) is Tensor for tensor in model.state_dict().values())


@ties
def test_what_the_names_of_a_parameter_say_is_the_same(modules: bool, tmp_path: Path) -> None:
    names = [f"layers.{i}.mlp.experts" for i in range(2)]
    state = layers_of("float, channel", names)
    state[f"{names[1]}.0.down_proj.weight"] = torch.zeros(H, I, dtype=torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors")
    words = f"{names[1]}.down_proj must be the same as that of the other names of the parameter, got another. Give each"
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(tied(modules), tmp_path)


def test_a_parameter_of_two_names_is_taken_whole(tmp_path: Path) -> None:
    names = [f"layers.{i}.mlp.experts" for i in range(2)]
    save_file(layers_of("float, channel", names), tmp_path / "model.safetensors")
    words = (
        f"filter must be the same for {names[0]}.gate_up_proj and {names[1]}.gate_up_proj, one parameter of two names"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(tied(), tmp_path, filter=lambda name, module: name == names[0])


def test_biases_that_are_buffers_stay_buffers(tmp_path: Path) -> None:
    state = files.per_expert(lambda weight: files.modelopt_fp8(weight) | {"bias": weight[:, 0]}, prefix="experts")
    save_file(state, tmp_path / "model.safetensors")
    module = Experts()
    for name, rows in (("gate_up_proj", 2 * I), ("down_proj", H)):
        module.register_buffer(f"{name}_bias", torch.zeros(E, rows))
    moe_ops.load_experts_(nn.ModuleDict({"experts": module}), tmp_path)
    assert [*dict(module.named_buffers())] == ["gate_up_proj_bias", "down_proj_bias"]
    assert module.down_proj_bias.dtype == torch.float32
    assert torch.equal(module.down_proj_bias, files.weights(torch.bfloat16)["down_proj"][..., 0].float())
