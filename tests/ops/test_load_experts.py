"""``load_experts_`` fills the experts of a model with ``QuantizedWeight``, one layer after the other."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import checkpoints
from moe_ops.checkpoint_files import Checkpoint
from moe_ops.quantized import QuantizedWeight
from tests.ops import checkpoints as files
from tests.ops.checkpoints import CASES, E, H, I, Tensors


class Experts(nn.Module):
    """Parameters as transformers names them."""

    def __init__(self, is_transposed: bool = False, has_bias: bool = False, is_concatenated: bool = True) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        for name, (N, K) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
            shape = (E, K, N) if is_transposed else (E, N, K)
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
            if has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(E, N, dtype=torch.bfloat16)))


class Model(nn.Module):
    """``layers.{i}.mlp.experts``."""

    def __init__(self, layers: int, **options: bool) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts(**options)})}) for _ in range(layers)]
        self.layers = nn.ModuleList(blocks)


def layers_of(name: str, prefixes: Sequence[str]) -> Tensors:
    """One and the same layer of :data:`CASES` under several prefixes."""
    case = CASES[name]
    state: Tensors = {}
    for prefix in prefixes:
        state |= files.per_expert(lambda weight: files.compressed(weight, case), case.dtype, prefix)
    return state


def wanted_of(name: str, state: Tensors, prefix: str) -> dict[str, Tensor]:
    return files.expected(state, lambda tensors: files.decompressed(tensors, CASES[name]), prefix)


def indexed(state: Tensors, folder: Path) -> None:
    """Two files, tensors of a layer in both, and an index."""
    parts = {f"model-{i}.safetensors": dict(list(state.items())[i::2]) for i in range(2)}
    for name, part in parts.items():
        save_file(part, folder / name)
    where = {key: name for name, part in parts.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    ("where", "prefix"),
    [
        ("folder", "layers.{}.mlp.experts"),
        ("index", "layers.{}.mlp.experts"),
        ("index of several", "layers.{}.mlp.experts"),
        ("path of an index", "layers.{}.mlp.experts"),
        ("file", "layers.{}.mlp.experts"),
        ("folder", "model.layers.{}.mlp.experts"),
        ("folder", "model.layers.{}.block_sparse_moe.experts"),
    ],
)
def test_every_layer_is_filled(where: str, prefix: str, tmp_path: Path) -> None:
    prefixes = [prefix.format(i) for i in range(2)]
    state = layers_of("float, channel", prefixes)
    state["model.layers.0.mlp.shared_expert.gate_proj.weight"] = torch.zeros(2, 2)
    path: Path | str = str(tmp_path)
    if "index" in where:
        indexed(state, tmp_path)
        if where != "index":  # of other files, which are not there
            (tmp_path / "model.fp16.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b"}}))
        if where == "path of an index":
            path = (tmp_path / "model.safetensors.index.json").rename(tmp_path / "mine.safetensors.index.json")
    else:
        save_file(state, tmp_path / "some.safetensors")
        path = tmp_path / "some.safetensors" if where == "file" else path
    model = Model(2)
    schemes = moe_ops.load_experts_(model, path)
    assert schemes == {f"layers.{i}.mlp.experts": "fp8_channel" for i in range(2)}
    for i, layer in enumerate(model.layers):
        for name, wanted in wanted_of("float, channel", state, prefixes[i]).items():
            held = getattr(layer["mlp"]["experts"], name)
            assert isinstance(held, nn.Parameter) and not held.requires_grad and isinstance(held, QuantizedWeight)
            assert not held.transposed
            assert held.dtype == torch.bfloat16 and torch.equal(held, wanted)


def test_the_state_dict_of_a_loaded_model_holds_plain_tensors(tmp_path: Path) -> None:
    state = layers_of("float, channel", ["layers.0.mlp.experts"])
    save_file(state, tmp_path / "model.safetensors")
    model = Model(1)
    moe_ops.load_experts_(model, tmp_path)
    plain = model.state_dict()
    assert all(type(tensor) is Tensor for tensor in plain.values()) and len(plain) == 4
    other = copy.deepcopy(model)
    experts = [made.layers[0]["mlp"]["experts"] for made in (model, other)]
    experts[1].down_proj.stored.zero_()
    other.load_state_dict(plain)
    assert torch.equal(*(module.down_proj.dequantize() for module in experts))


def test_quotients_of_nvfp4_come_through_state_dicts(tmp_path: Path) -> None:
    """compressed-tensors' numbers in fp32, in the model that was filled and in one with a factor of its own."""
    prefix = "layers.0.mlp.experts"
    state = layers_of("nvfp4", [prefix])
    save_file(state, tmp_path / "model.safetensors")
    model, other = Model(1).float(), Model(1).float()
    moe_ops.load_experts_(model, tmp_path)
    moe_ops.quantize_(other, "nvfp4")
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    for name, wanted in files.expected(state, files.nvfp4_in_fp32, prefix).items():
        for made in (model, other):
            assert torch.equal(getattr(made.layers[0]["mlp"]["experts"], name).dequantize(), wanted)


def test_transposed_parameters_and_biases(tmp_path: Path) -> None:
    """gpt-oss."""
    state = files.gpt_oss()
    save_file(state, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"model": Model(2, is_transposed=True, has_bias=True)})
    model["model"].layers[0] = nn.Identity()
    moe_ops.load_experts_(model, tmp_path)
    experts = model["model"].layers[1]["mlp"]["experts"]
    for name in ("gate_up_proj", "down_proj"):
        assert getattr(experts, name).transposed
        assert torch.equal(getattr(experts, name), files.read_gpt_oss(state, name).transpose(1, 2))
        assert torch.equal(getattr(experts, f"{name}_bias"), state[f"{files.PREFIX}.{name}_bias"])


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("kind", files.MODELOPT_STACKS)
def test_modelopt_stacks_into_models_of_either_orientation(kind: str, is_transposed: bool, tmp_path: Path) -> None:
    state, wanted = files.modelopt_stacks(kind, prefix="layers.0.mlp.experts")
    save_file(state, tmp_path / "model.safetensors")
    model = Model(1, is_transposed=is_transposed)
    assert {*moe_ops.load_experts_(model, tmp_path).values()} == {files.MODELOPT_STACKS[kind]}
    for name, numbers in wanted.items():
        held = getattr(model.layers[0]["mlp"]["experts"], name).dequantize().float()
        assert torch.equal(held.mT if is_transposed else held, numbers.to(torch.bfloat16).float())


def test_biases_of_numbered_experts(tmp_path: Path) -> None:
    def store(weight: Tensor) -> Tensors:
        return files.modelopt_fp8(weight) | {"bias": weight[:, 0]}

    state = files.per_expert(store, prefix="layers.0.mlp.experts")
    save_file(state, tmp_path / "model.safetensors")
    model = Model(1, has_bias=True)
    moe_ops.load_experts_(model, tmp_path)
    firsts = files.weights(torch.bfloat16)
    experts = model.layers[0]["mlp"]["experts"]
    assert torch.equal(experts.down_proj.input_scale, torch.full((E, 1, 1), 0.5))
    assert torch.equal(experts.gate_up_proj_bias, torch.cat([firsts["gate_proj"], firsts["up_proj"]], dim=1)[..., 0])
    assert torch.equal(experts.down_proj_bias, firsts["down_proj"][..., 0])


#: Scheme of a checkpoint that quantises weights and activations -> that where it says that it has weights alone.
WEIGHTS_ALONE = {
    "float, tensor": "fp8_w8a16",
    "float, channel": "fp8_w8a16",
    "float, block": "fp8_w8a16",
    "int8, channel": "int8_w8a16",
    "int8, tensor": "int8_w8a16",
    "pack 4, group": "int4_w4a16",
    "nvfp4": "nvfp4",
}


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "dynamic": True}], ids=["alone", "both"])
@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_a_config_says_that_activations_are_not_quantised(
    name: str, activations: dict[str, Any] | None, tmp_path: Path
) -> None:
    prefix = "layers.0.mlp.experts"
    state = layers_of(name, [prefix])
    save_file(state, tmp_path / "model.safetensors")
    group = {
        "targets": ["Linear"],
        "weights": CASES[name].weights | {"scale_dtype": None},
        "input_activations": activations,
    }
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}, default=str))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        model = Model(1)
        wanted = WEIGHTS_ALONE[name] if activations is None else CASES[name].scheme
        assert moe_ops.load_experts_(model, path) == {prefix: wanted}
        for weight, numbers in wanted_of(name, state, prefix).items():
            assert torch.equal(model.get_submodule(prefix).get_parameter(weight).dequantize(), numbers)


@pytest.mark.parametrize("name", ["int8, channel, zero", "pack 4, group, zero", "pack 8, group, zero"])
def test_zero_points_that_a_config_promises_are_there(name: str, tmp_path: Path) -> None:
    """Without the config these are weights without zero points, as others are."""
    prefix = "layers.0.mlp.experts"
    state = layers_of(name, [prefix])
    group = {"weights": CASES[name].weights | {"scale_dtype": None}, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    save_file(state, tmp_path / "model.safetensors")
    assert moe_ops.load_experts_(Model(1), tmp_path) == {prefix: CASES[name].scheme}
    lost = {key: tensor for key, tensor in state.items() if "down_proj.weight_zero_point" not in key}
    save_file(lost, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"0.down_proj.weight.* must be stored beside 'weight_zero_point', got"):
        moe_ops.load_experts_(Model(1), tmp_path)
    (tmp_path / "config.json").unlink()
    assert moe_ops.load_experts_(Model(1), tmp_path) == {prefix: CASES[name].scheme}


def config_of(groups: dict[str, Any], method: str = "compressed-tensors") -> str:
    return json.dumps({"quantization_config": {"quant_method": method, "config_groups": groups}})


ALONE, BOTH = {"input_activations": None}, {"input_activations": {"num_bits": 8, "dynamic": True}}
EXPERTS, ATTENTION = {"targets": ["re:.*mlp\\.experts\\..*"]}, {"targets": ["re:.*self_attn.*"]}
ONE = {"targets": ["layers.0.mlp.experts.2.down_proj"]}
LINEAR, OTHERS = {"targets": ["Linear"]}, {"targets": ["LlamaAttention"]}
#: Groups of a config, and whether they say that activations are not quantised; None: of some projections.
GROUPS: dict[str, tuple[list[dict[str, Any]], bool | None]] = {
    "agree": ([LINEAR | ALONE, LINEAR | ALONE], True),
    "of all modules": ([ALONE, ALONE], True),
    "do not agree": ([LINEAR | ALONE, LINEAR | BOTH], False),
    "experts alone": ([LINEAR | BOTH, EXPERTS | ALONE], True),
    "others alone": ([EXPERTS | BOTH, LINEAR | ALONE], False),
    "attention alone": ([ATTENTION | ALONE, LINEAR | BOTH], False),
    "attention both": ([ATTENTION | BOTH, LINEAR | ALONE], True),
    "another class": ([OTHERS | BOTH, LINEAR | ALONE], True),
    "no class of theirs": ([OTHERS | ALONE], False),
    "one projection": ([LINEAR | BOTH, ONE | ALONE], None),
    "one projection beside expressions": ([EXPERTS | BOTH, ONE | ALONE], None),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_group_of_the_experts_counts(case: str, tmp_path: Path) -> None:
    groups, alone = GROUPS[case]
    save_file(layers_of("float, channel", ["layers.0.mlp.experts"]), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config_of({f"group_{i}": group for i, group in enumerate(groups)}))
    if alone is None:
        with pytest.raises(ValueError, match=r"experts\.2\.down_proj.* must be stored like expert 0's, fp8_channel"):
            moe_ops.load_experts_(Model(1), tmp_path)
    else:
        wanted = "fp8_w8a16" if alone else "fp8_channel"
        assert moe_ops.load_experts_(Model(1), tmp_path) == {"layers.0.mlp.experts": wanted}


@pytest.mark.parametrize("change", ["another method", "names of presets"])
def test_other_configs_change_no_scheme(change: str, tmp_path: Path) -> None:
    save_file(layers_of("float, channel", ["layers.0.mlp.experts"]), tmp_path / "model.safetensors")
    groups: dict[str, Any] = {"FP8": ["Linear"]} if change == "names of presets" else {"group_0": ALONE}
    method = "fp8" if change == "another method" else "compressed-tensors"
    (tmp_path / "config.json").write_text(config_of(groups, method))
    assert moe_ops.load_experts_(Model(1), tmp_path) == {"layers.0.mlp.experts": "fp8_channel"}


@pytest.mark.parametrize("stacked", [False, True], ids=["numbered", "stacked"])
@pytest.mark.parametrize("name", ["float, channel", "pack 8, group", "pack 8, group, zero", "pack 4, group, zero"])
def test_reading_twice_gives_the_same_and_nothing_stays_a_view_of_the_file(
    name: str, stacked: bool, tmp_path: Path
) -> None:
    state = layers_of(name, [files.PREFIX])
    path = tmp_path / "model.safetensors"
    save_file(files.stacked(state) if stacked else state, path)
    with Checkpoint(path) as source:
        once, again = (checkpoints.read_experts(source, files.PREFIX) for _ in range(2))
    wanted = {weight: operand.dequantized().clone() for weight, operand in once.items()}
    assert all(torch.equal(operand.dequantized(), wanted[weight]) for weight, operand in again.items())
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(path.stat().st_size - 4096))
    assert all(torch.equal(operand.dequantized(), wanted[weight]) for weight, operand in once.items())


def test_the_filter_leaves_float_layers_to_others(tmp_path: Path) -> None:
    first, second = (f"layers.{i}.mlp.experts" for i in range(2))
    state = layers_of("float, channel", [first])
    floats = {f"{second}.0.{name}.weight": torch.ones(2, 2).bfloat16() for name in files.PROJECTIONS}
    save_file(state | floats, tmp_path / "model.safetensors")
    model = Model(2)
    asked: list[tuple[str, nn.Module]] = []
    schemes = moe_ops.load_experts_(
        model, tmp_path, filter=lambda name, module: asked.append((name, module)) or name != second
    )
    assert asked == [(name, model.get_submodule(name)) for name in (first, second)]
    assert schemes == {first: "fp8_channel"}
    assert type(model.get_submodule(second).down_proj) is nn.Parameter
    with pytest.raises(ValueError, match="and down_proj that the filter takes, got Model"):
        moe_ops.load_experts_(model, tmp_path, filter=lambda name, module: False)


def test_experts_of_transformers_on_the_meta_device(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=2, vocab_size=8,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, mlp_only_layers=[0],
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = layers_of("pack 4, group", [files.PREFIX])
    save_file(state, tmp_path / "model.safetensors")
    assert moe_ops.load_experts_(model, tmp_path) == {files.PREFIX: "int4_w4a16"}
    for name, wanted in wanted_of("pack 4, group", state, files.PREFIX).items():
        assert torch.equal(model.model.layers[1].mlp.experts.get_parameter(name), wanted)


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are alive among those made while it is on, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size and address not in self._known:
            self._known.add(address)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.add(tensor)
        return result


@pytest.mark.parametrize("name", ["float, block", "int8, channel, zero", "pack 4, group", "pack 8, group, zero"])
@pytest.mark.parametrize("stacked", [False, True], ids=["numbered", "stacked"])
def test_memory_beside_the_new_weights_is_that_of_one_expert_or_weight(
    name: str, stacked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Never a second layer: what is alive, less the weights that stay, of a model whose experts have no memory yet."""
    layers = 3
    state = layers_of(name, [files.PREFIX])
    state = files.stacked(state) if stacked else state
    state = {key.replace("layers.1", f"layers.{i}"): tensor for i in range(layers) for key, tensor in state.items()}
    save_file({key: tensor.clone() for key, tensor in state.items()}, tmp_path / "model.safetensors")
    live, extra, kept = LiveBytes(), [], []

    def keep(data: Tensor, scales: Sequence[Tensor], **options: Any) -> Tensor:
        kept.append((data, *scales))
        if len(kept) % 2 == 0:
            layer = sum(part.untyped_storage().nbytes() for weight in kept[-2:] for part in weight)
            extra.append((live.most - len(kept) // 2 * layer, layer))
            live.most = live.now
        return torch.empty(0)

    monkeypatch.setattr(checkpoints, "QuantizedWeight", keep)
    with torch.device("meta"):
        model = Model(layers)
    with live:
        moe_ops.load_experts_(model, tmp_path)
    assert len(extra) == layers and live.most > 0
    for most, layer in extra:
        # One projection of one expert is a ninth, and its conversion takes as much again.
        assert most <= layer * (2 / 9 if not stacked else 1 / 3), (most, layer)
