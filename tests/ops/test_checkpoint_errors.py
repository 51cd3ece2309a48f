"""What a checkpoint cannot give is refused with the key, the rule, what is there and, where there is one, the cure."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import moe_ops
from moe_ops.checkpoints import read_experts
from tests.ops import checkpoints as files
from tests.ops.checkpoints import CASES, PREFIX, E, Tensors
from tests.ops.test_load_experts import Model

FIRST = f"{PREFIX}.0.gate_proj"
ALL = [(expert, name) for expert in range(E) for name in files.PROJECTIONS]
Break = Callable[[Tensors], object]


def layer(name: str) -> Tensors:
    case = CASES[name]
    return files.per_expert(lambda weight: files.compressed(weight, case), case.dtype)


def renamed(old: str, new: str) -> Break:
    return lambda state: state.update({new: state.pop(old)})


def put(key: str, tensor: torch.Tensor) -> Break:
    return lambda state: state.update({key: tensor})


#: id -> (what is stored, how it is broken, words of the message).
BROKEN: dict[str, tuple[str, Break, str]] = {
    "projection": (
        "float, channel",
        lambda state: [state.pop(f"{PREFIX}.1.up_proj.{part}") for part in ("weight", "weight_scale")],
        f"checkpoint must be complete, with '{PREFIX}.1.up_proj', got no key of it.",
    ),
    "scale": (
        "float, channel",
        lambda state: state.pop(f"{FIRST}.weight_scale"),
        f"{FIRST}.weight must be stored beside 'weight_scale' or 'weight_scale_inv', got ['{FIRST}.weight'].",
    ),
    "weight": (
        "float, channel",
        lambda state: state.pop(f"{FIRST}.weight"),
        f"{FIRST}.weight_scale must be stored beside the weight that it belongs to, got",
    ),
    "second scale": (
        "nvfp4",
        lambda state: state.pop(f"{FIRST}.weight_global_scale"),
        "must be stored beside 'weight_global_scale' or 'weight_scale_2'",
    ),
    "order of columns": (
        "pack 4, group",
        put(f"{FIRST}.weight_g_idx", torch.zeros(files.H, dtype=torch.int32)),
        f"{FIRST}.weight_g_idx must be absent beside a weight of this layout, got it. Nothing here knows",
    ),
    "zero point of fp8": (
        "float, channel",
        put(f"{FIRST}.weight_zero_point", torch.zeros(files.I, 1)),
        f"{FIRST}.weight_zero_point must be absent",
    ),
    "zero point that is not packed": (
        "pack 4, group, zero",
        put(f"{FIRST}.weight_zero_point", torch.zeros(files.I, 8, dtype=torch.int8)),
        f"{FIRST}.weight_zero_point must be torch.int32 beside a weight of torch.int32, got torch.int8.",
    ),
    "blocks of 64": (
        "float, block",
        put(f"{FIRST}.weight_scale", torch.ones(3, 4)),
        f"{FIRST}.weight_scale must be scale [E, ceil(N / 128), ceil(K / 128)] or",
    ),
    "3 bits": (
        "pack 4, group",
        put(f"{FIRST}.weight_packed", torch.zeros(files.I, files.H * 3 // 32, dtype=torch.int32)),
        f"{FIRST}.weight_packed must be [.., N, K / 8] or [.., N, K / 4] of 4 or 8 bits for K = 256, got [192, 24].",
    ),
    "nvfp4 with bf16 scales": (
        "nvfp4",
        put(f"{FIRST}.weight_scale", torch.ones(files.I, files.H // 16, dtype=torch.bfloat16)),
        f"{FIRST}.weight_scale must be float8_e4m3fn for NVFP4, uint8 or float8_e8m0fnu for MXFP4, got torch.bfloat16.",
    ),
    "float64 scales": (
        "float, channel",
        put(f"{FIRST}.weight_scale", torch.ones(files.I, 1, dtype=torch.float64)),
        f"{FIRST}.weight_scale must be torch.float32 or torch.bfloat16, got torch.float64.",
    ),
    "not quantised": (
        "float, channel",
        put(f"{FIRST}.weight", torch.zeros(files.I, files.H, dtype=torch.bfloat16)),
        f"{FIRST}.weight must be torch.uint8 or torch.float8_e4m3fn or torch.int8, got torch.bfloat16. Leave layers "
        "that are not quantised out by the filter; load_state_dict loads them.",
    ),
    "another code": (
        "float, channel",
        put(f"{FIRST}.weight", torch.zeros(files.I, files.H, dtype=torch.float8_e5m2)),
        f"{FIRST}.weight must be torch.uint8 or torch.float8_e4m3fn or torch.int8, got torch.float8_e5m2. Other codes",
    ),
    "two names of a projection": (
        "float, channel",
        put(f"{PREFIX}.0.w1.weight", torch.zeros(files.I, files.H, dtype=torch.float8_e4m3fn)),
        f"{PREFIX}.0.w1.weight must be absent beside '{FIRST}.weight', which is the same part of '{FIRST}', got it. "
        "Take one of them out",
    ),
    "gate and up in two forms": (
        "float, channel",
        put(f"{PREFIX}.0.gate_up_proj.weight", torch.zeros(2 * files.I, files.H, dtype=torch.float8_e4m3fn)),
        f"{PREFIX}.0.gate_proj.weight must be absent beside '{PREFIX}.0.gate_up_proj', got it. Take one of them out",
    ),
    "stacked beside numbered experts": (
        "float, channel",
        put(f"{PREFIX}.gate_up_proj", torch.zeros(2, files.H, 2 * files.I, dtype=torch.float8_e4m3fn)),
        f"{PREFIX}.gate_up_proj must be absent beside '{FIRST}', got it. Take one of them out",
    ),
    "two names of a scale": (
        "float, channel",
        put(f"{FIRST}.scale", torch.ones(files.I, 1)),
        f"{FIRST}.weight_scale must be absent beside '{FIRST}.scale', which is the same part of '{FIRST}', got it.",
    ),
    "flat": (
        "float, channel",
        put(f"{FIRST}.weight", torch.zeros(files.I * files.H, dtype=torch.float8_e4m3fn)),
        f"{FIRST}.weight must be [N, K], K packed or not, got [49152].",
    ),
    "experts that differ": (
        "float, channel",
        put(f"{PREFIX}.1.gate_proj.weight_scale", torch.ones(files.I, 1)),
        f"{PREFIX}.1.gate_proj.weight must be stored like expert 0's, fp8_channel of torch.float8_e4m3fn [192, 256], "
        "torch.bfloat16 [192, 1], got fp8_channel of torch.float8_e4m3fn [192, 256], torch.float32 [192, 1].",
    ),
    "projections that differ": (
        "float, tensor",
        lambda state: state.update(
            {f"{PREFIX}.{e}.down_proj.weight_scale": torch.ones(files.H, 1) for e in range(E)}
        ),
        f"{PREFIX}.down_proj must be stored in one scheme, 'fp8_tensor' like gate_up_proj, got 'fp8_channel'.",
    ),
    "static scales that differ": (
        "float, channel",
        lambda state: state.update(
            {f"{PREFIX}.{e}.{p}.input_scale": torch.tensor(0.5 + 0.5 * (e == 1 and p == "up_proj")) for e, p in ALL}
        ),
        f"{PREFIX}.1.up_proj.input_scale must be 0.5, that of the gate, which is multiplied with the same rows, got",
    ),
    "static scale of one expert": (
        "float, channel",
        put(f"{FIRST}.input_scale", torch.tensor(0.5)),
        f"{PREFIX}.0.up_proj.weight must be stored like expert 0's, fp8_channel of torch.float8_e4m3fn [192, 256], ",
    ),
    "static scales of columns": (
        "float, channel",
        put(f"{FIRST}.input_scale", torch.ones(files.H)),
        f"{FIRST}.input_scale must be one number for each expert, [], got torch.float32 [256].",
    ),
    "static zero point": (
        "float, tensor",
        lambda state: state.update(
            {f"{FIRST}.input_scale": torch.ones(1), f"{FIRST}.input_zero_point": torch.ones(1)}
        ),
        f"{FIRST}.input_zero_point must be 0 for scheme 'fp8_tensor', got another number.",
    ),
    "static scale of int8": (
        "int8, channel",
        put(f"{FIRST}.input_scale", torch.ones(1)),
        f"{FIRST}.input_scale must be absent for scheme 'int8_channel', which computes scales of activations for every",
    ),
    "groups that do not cover K": (
        "pack 4, group",
        lambda state: state.update(
            {f"{PREFIX}.{e}.down_proj.weight_scale": torch.ones(files.H, 7) for e in range(E)}
        ),
        f"{PREFIX}.down_proj scales[0] must be [E=3, N=256, G_count], G_count a divisor of K=192, got [3, 256, 7].",
    ),
    **{
        f"static scale of {value}": (
            "float, channel",
            lambda state, value=value: state.update(
                {f"{PREFIX}.{e}.{p}.input_scale": torch.tensor(0.5 if e < 2 else value) for e, p in ALL}
            ),
            f"{PREFIX}.2.gate_proj.input_scale must be finite and larger than 0, got {value}. Calibrate the checkpoint",
        )
        for value in (0.0, -1.0, float("nan"), float("inf"))
    },
    "static scale in 8 bits": (
        "float, channel",
        put(f"{FIRST}.input_scale", torch.ones(1).to(torch.float8_e4m3fn)),
        f"{FIRST}.input_scale must be one number for each expert, [], got torch.float8_e4m3fn [1].",
    ),
    "second scale of complex numbers": (
        "nvfp4",
        put(f"{FIRST}.weight_global_scale", torch.ones(1, dtype=torch.complex64)),
        f"{FIRST}.weight_global_scale must be bfloat16, float16, float32 or float64, got torch.complex64.",
    ),
    "second scale with a dimension of experts": (
        "nvfp4",
        put(f"{FIRST}.weight_global_scale", torch.ones(1, 1, 1)),
        f"{FIRST}.weight_global_scale must be [N groups, K groups] beside a weight [192, 128], got [1, 1, 1].",
    ),
    **{
        f"{name}, with a dimension of experts": (
            name,
            lambda state, part=part: state.update(
                {f"{PREFIX}.{e}.{p}.{part}": state[f"{PREFIX}.{e}.{p}.{part}"][None] for e, p in ALL}
            ),
            f"{FIRST}.{part} must be [N groups, K groups] beside a weight [192, ",
        )
        for name, part in (
            ("float, channel", "weight_scale"),
            ("float, block", "weight_scale"),
            ("mxfp8", "weight_scale"),
            ("mxfp4", "weight_scale"),
            ("int8, channel", "weight_scale"),
            ("pack 4, group", "weight_scale"),
            ("int8, channel, zero", "weight_zero_point"),
            ("pack 4, group, zero", "weight_zero_point"),
        )
    },
    "packed zero points of few rows": (
        "pack 4, group, zero",
        put(f"{FIRST}.weight_zero_point", torch.zeros(1, 8, dtype=torch.int32)),
        f"{FIRST}.weight_zero_point must be [24, 8] beside scales [192, 8], got [1, 8].",
    ),
    "packed zero points of few groups": (
        "pack 8, group, zero",
        put(f"{FIRST}.weight_zero_point", torch.zeros(48, 4, dtype=torch.int32)),
        f"{FIRST}.weight_zero_point must be [48, 8] beside scales [192, 8], got [48, 4].",
    ),
    "zero points of other groups": (
        "int8, channel, zero",
        put(f"{FIRST}.weight_zero_point", torch.zeros(files.I, 3, dtype=torch.int8)),
        f"{FIRST}.weight_zero_point must be [192, 1] beside scales [192, 1], got [192, 3].",
    ),
    **{
        f"weight_shape {given}": (
            "pack 4, group",
            put(f"{FIRST}.weight_shape", torch.tensor(given)),
            f"{FIRST}.weight_shape must be {rule}",
        )
        for given, rule in (
            ([256, 192], "[N, K] with N = 192, got [256, 192]."),
            ([999, 256], "[N, K] with N = 192, got [999, 256]."),
            ([192.0, 256.0], "integers, [2], got torch.float32 [2]."),
            ([192.0, 256j], "integers, [2], got torch.complex64 [2]."),
            ([], "integers, [2], got torch.float32 [0]."),
            ([256], "integers, [2], got torch.int64 [1]."),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_layer(name: str, tmp_path: Path) -> None:
    stored, damage, words = BROKEN[name]
    state = layer(stored)
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read_experts(tmp_path, PREFIX)
    assert str(caught.value).startswith("load_experts_: ")


#: Parts of a projection as other libraries store it.
LAYOUTS: dict[str, Tensors] = {
    "GPTQ": {"qweight": torch.zeros(32, 192).int(), "qzeros": torch.zeros(8, 24).int(), "scales": torch.ones(8, 192)},
    "bitsandbytes": {"weight": torch.zeros(192 * 128, 1, dtype=torch.uint8), "weight.absmax": torch.ones(768)},
    "bitsandbytes, 8 bits": {"weight": torch.zeros(192, 256, dtype=torch.int8), "SCB": torch.ones(192)},
    "HQQ": {"W_q": torch.zeros(384, 64, dtype=torch.uint8), "scale": torch.ones(768, 1), "zero": torch.ones(768, 1)},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_are_not_read_have_a_cure(name: str, tmp_path: Path) -> None:
    save_file({f"{PREFIX}.0.{p}.{k}": t.clone() for p in files.PROJECTIONS for k, t in LAYOUTS[name].items()},
              tmp_path / "model.safetensors")  # fmt: skip
    words = r"gate_proj\.\w+ must be stored beside .* are not read; compressed-tensors writes some that are\."
    with pytest.raises(ValueError, match=words):
        read_experts(tmp_path, PREFIX)


@pytest.mark.parametrize("name", ["float, channel", "mxfp4", "int8, channel", "pack 4, group", "pack 4, group, zero"])
@pytest.mark.parametrize("count", [1, 2])
def test_scales_of_fewer_experts_than_the_weight_has(count: int, name: str, tmp_path: Path) -> None:
    """Nothing is spread over the others."""
    part = "weight_zero_point" if name.endswith("zero") else "weight_scale"
    key = f"{PREFIX}.up_proj.{part}"
    state = files.stacked(layer(name), join=False)
    state[key] = state[key][:count].clone()
    save_file(state, tmp_path / "model.safetensors")
    words = re.escape(f"{key} must be [E=3, N groups, K groups] beside a weight [3, 192, ")
    with pytest.raises(ValueError, match=rf"load_experts_: {words}\d+\], got \[{count}, "):
        read_experts(tmp_path, PREFIX)


def test_scales_of_fewer_experts_beside_a_parameters_own_keys(tmp_path: Path) -> None:
    state = {}
    for name, shape in files.PROJECTIONS.items():
        state[f"{PREFIX}.{name}"], state[f"{PREFIX}.{name}_scale"] = moe_ops.quantize_weight(
            torch.randn(E, *shape), scheme="mxfp8"
        )
    state[f"{PREFIX}.gate_proj_scale"] = state[f"{PREFIX}.gate_proj_scale"].view(torch.uint8)[:1].clone()
    state[f"{PREFIX}.up_proj_scale"] = state[f"{PREFIX}.up_proj_scale"].view(torch.uint8)[:1].clone()
    save_file(state, tmp_path / "model.safetensors")
    words = "gate_proj_scale must be [E=3, N groups, K groups] beside a weight [3, 192, 256], got [1, 192, 8]."
    with pytest.raises(ValueError, match=re.escape(f"{PREFIX}.{words}")):
        read_experts(tmp_path, PREFIX)


@pytest.mark.parametrize("spelling", ["stacked", "numbered"])
def test_border_of_halves_in_one_key_that_no_shape_tells(spelling: str, tmp_path: Path) -> None:
    """Two rows of blocks over two halves of 100 rows: 100 and 100, or 128 and 72."""
    state = {
        f"{PREFIX}.gate_up_proj": torch.zeros(E, 200, 128, dtype=torch.float8_e4m3fn),
        f"{PREFIX}.gate_up_proj_scale_inv": torch.ones(E, 2, 1),
        f"{PREFIX}.down_proj": torch.zeros(E, 128, 100, dtype=torch.float8_e4m3fn),
        f"{PREFIX}.down_proj_scale_inv": torch.ones(E, 1, 1),
    }
    save_file(files.numbered(state) if spelling == "numbered" else state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="gate_up_proj_scale_inv must be of gate and up apart where 128"):
        read_experts(tmp_path, PREFIX)


def test_the_number_of_an_expert_that_is_far_away_takes_no_memory(tmp_path: Path) -> None:
    state = layer("float, channel")
    state[f"{PREFIX}.300000.gate_proj.weight"] = state[f"{FIRST}.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=re.escape(f"complete, with '{PREFIX}.3.gate_proj', got no key of it.")):
            read_experts(tmp_path, PREFIX)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_weights_that_are_stored_transposed_are_called_so(tmp_path: Path) -> None:
    """One of two weights by its scales, or both by the shapes of the model."""
    state = files.stacked(layer("float, channel"))
    turned = {key: tensor.mT.contiguous() for key, tensor in state.items()}
    kept = {key: tensor for key, tensor in state.items() if "down_proj" in key}
    save_file(turned | kept, tmp_path / "model.safetensors")
    cure = "stored transposed. Transpose weights and scales to [E, N, K], and save them anew."
    with pytest.raises(ValueError, match=re.escape(f"got [3, 1, 384]. They fit a weight that is {cure}")):
        read_experts(tmp_path, PREFIX)
    for key in [key for key in turned if key.endswith("scale")]:
        turned[key] = torch.ones(*turned[key.replace("_scale", "")].shape[:2], 1)
    save_file(files.numbered(turned), tmp_path / "model.safetensors")
    words = f"must be [3, 256, 384] as in the checkpoint, got [3, 384, 256]. It fits if the checkpoint is {cure}"
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(nn.ModuleDict({"model": Model(2)}), tmp_path, filter=lambda name, module: "1" in name)


@pytest.mark.parametrize("shape", [(), (3,), (1, 3, 256, 192)], ids=str)
def test_weights_of_other_dimensions_beside_a_stack(shape: tuple[int, ...], tmp_path: Path) -> None:
    state = files.stacked(layer("float, channel"))
    state[f"{PREFIX}.down_proj.weight"] = torch.zeros(shape, dtype=torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors")
    words = f"{PREFIX}.down_proj.weight must be [E, N, K], K packed or not, got {[*shape]}."
    with pytest.raises(ValueError, match=re.escape(f"load_experts_: {words}")):
        read_experts(tmp_path, PREFIX)


@pytest.mark.parametrize("is_turned", [True, False], ids=["turned", "upright"])
def test_scales_of_columns_of_stacks(is_turned: bool, tmp_path: Path) -> None:
    """The shapes of gate|up and down say how they are stored: scales that fit the other way are no reason to turn."""
    state = {}
    for name, (N, K) in {"gate_up_proj": (2 * files.I, files.H), "down_proj": (files.H, files.I)}.items():
        stored = torch.zeros(E, N, K, dtype=torch.float8_e4m3fn), torch.ones(E, 1, K)
        weight, scale = (part.mT.contiguous() if is_turned else part for part in stored)
        state |= {f"{PREFIX}.{name}": weight, f"{PREFIX}.{name}_scale": scale}
    save_file(state, tmp_path / "model.safetensors")
    order, got = ("K, N", "[3, 256, 1] beside [3, 256, 384]") if is_turned else ("N, K", "[3, 1, 256] beside [3, 384")
    words = f"along K of weights [E, {order}], which the layer's are by their shapes, got {got}"
    with pytest.raises(ValueError, match=re.escape(f"load_experts_: {PREFIX}.gate_up_proj_scale must be {words}")):
        read_experts(tmp_path, PREFIX)


#: id -> (experts and projections whose bias is another, that bias, words of the message).
BIASES: dict[str, tuple[Callable[[int, str], bool], torch.Tensor, str]] = {
    "short": (lambda e, p: (e, p) == (1, "gate_proj"), torch.ones(5), "1.gate_proj.bias must be [192] of bfloat16"),
    "short, of all": (lambda e, p: p == "gate_proj", torch.ones(5), "0.gate_proj.bias must be [192] of bfloat16"),
    "of two dimensions": (lambda e, p: p == "down_proj", torch.ones(1, 256), "0.down_proj.bias must be [256] of bfl"),
    "a number": (lambda e, p: (e, p) == (2, "up_proj"), torch.tensor(1.0), "2.up_proj.bias must be [192] of bfloat16"),
    "integers": (
        lambda e, p: (e, p) == (2, "up_proj"),
        torch.ones(192, dtype=torch.int8),
        "2.up_proj.bias must be [192] of bfloat16, float16, float32 or float64, a number for each row of the weight, "
        "got torch.int8 [192].",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_do_not_fit_their_weight(name: str, tmp_path: Path) -> None:
    is_other, other, words = BIASES[name]
    biases = {
        f"{PREFIX}.{e}.{p}.bias": other.clone() if is_other(e, p) else torch.zeros(files.PROJECTIONS[p][0])
        for e, p in ALL
    }
    save_file(at_layer_0(layer("float, channel") | biases), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"load_experts_: layers.0.mlp.experts.{words}")):
        moe_ops.load_experts_(Model(1, has_bias=True), tmp_path)


@pytest.mark.parametrize("text", ["{oops", "[]", "{}"])
def test_config_that_is_no_json_is_named_and_others_say_nothing(text: str, tmp_path: Path) -> None:
    save_file(at_layer_0(layer("float, channel")), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    if text != "{oops":
        assert moe_ops.load_experts_(Model(1), tmp_path) == {"layers.0.mlp.experts": "fp8_channel"}
        return
    with pytest.raises(ValueError, match=r"checkpoint must be with JSON in 'config\.json', got JSONDecodeError: Exp"):
        moe_ops.load_experts_(Model(1), tmp_path)


def test_a_target_of_a_config_that_is_no_expression_is_named(tmp_path: Path) -> None:
    save_file(at_layer_0(layer("float, channel")), tmp_path / "model.safetensors")
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["re:*.experts"]}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    words = r"checkpoint must be with regular expressions behind 're:' in 'config\.json', got 're:\*\.experts': nothing"
    with pytest.raises(ValueError, match=words):
        moe_ops.load_experts_(Model(1), tmp_path)


def at_layer_0(state: Tensors) -> Tensors:
    return {key.replace("model.layers.1", "layers.0"): tensor for key, tensor in state.items()}


def gate_and_up_apart() -> nn.Module:
    model = Model(1)
    experts = nn.Module()
    experts.is_transposed = False
    for name, shape in files.PROJECTIONS.items():
        setattr(experts, name, nn.Parameter(torch.zeros(E, *shape, dtype=torch.bfloat16)))
    model.layers[0]["mlp"]["experts"] = experts
    return model


def with_a_scale_of_its_own() -> nn.Module:
    model = Model(1)
    model.layers[0]["mlp"]["experts"].down_proj_scale = nn.Parameter(torch.ones(E))
    return model


#: id -> (model, keys of the checkpoint, words of the message).
MISMATCHES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensors], Tensors], str]] = {
    "no experts": (lambda: nn.Linear(2, 2), at_layer_0, "model must be a model with modules of 3-D parameters"),
    "no such layer": (
        lambda: Model(2),
        at_layer_0,
        "checkpoint must be with the experts of 'layers.1.mlp.experts', got no such keys. Pass the model that the",
    ),
    "a part of the model": (
        lambda: Model(1).layers[0],
        lambda state: (
            at_layer_0(state) | {key.replace("rs.0", "rs.1"): part for key, part in at_layer_0(state).items()}
        ),
        "checkpoint must be with one layer of experts that can be 'mlp.experts', got ['layers.0.mlp.experts', "
        "'layers.1.mlp.experts']. Pass the model that the checkpoint is of, not a part of it",
    ),
    "experts alone": (
        lambda: Model(1).layers[0]["mlp"]["experts"],
        at_layer_0,
        "checkpoint must be with the experts of the model, which is a module of experts itself, got no such keys. Pass",
    ),
    "two such layers": (
        lambda: Model(1),
        lambda state: {f"{half}.{key}": tensor for half in "ab" for key, tensor in at_layer_0(state).items()},
        "got ['a.layers.0.mlp.experts', 'b.layers.0.mlp.experts'].",
    ),
    "another shape": (
        lambda: Model(1, is_transposed=True),
        at_layer_0,
        "layers.0.mlp.experts.gate_up_proj must be [3, 256, 384] as in the checkpoint, got [3, 256, 380].",
    ),
    "interleaved": (
        lambda: Model(1, is_concatenated=False),
        at_layer_0,
        "layers.0.mlp.experts.gate_up_proj must be one weight of interleaved rows, as layers.0.mlp.experts computes",
    ),
    "interleaved, with scales of halves": (
        lambda: Model(1, is_concatenated=False),
        lambda state: at_layer_0(files.stacked(state)),
        "layers.0.mlp.experts.gate_up_proj must be of scales that do not start again at half of the rows, which "
        "layers.0.mlp.experts interleaves, got scales [3, 2, 1, 1].",
    ),
    "not float": (
        lambda: Model(1).to(torch.float8_e4m3fn),
        at_layer_0,
        "layers.0.mlp.experts.gate_up_proj must be a parameter of bfloat16, float16, float32 or float64, got torch.fl",
    ),
    "one layer for two modules": (
        lambda: nn.ModuleDict({"a": Model(1), "b": Model(1)}),
        at_layer_0,
        "checkpoint must be with keys of its own for each module of experts, got {'a.layers.0.mlp.experts':",
    ),
    "no bias": (
        lambda: Model(1),
        lambda state: (
            at_layer_0(state) | {f"layers.0.mlp.experts.{e}.down_proj.bias": torch.zeros(files.H) for e in range(E)}
        ),
        "layers.0.mlp.experts.down_proj_bias must be a parameter of",
    ),
    "a bias of its own": (
        lambda: Model(1, has_bias=True),
        at_layer_0,
        "checkpoint must be complete, with 'layers.0.mlp.experts.0.gate_proj.bias' for "
        "layers.0.mlp.experts.gate_up_proj_bias, got no such key. Make the model with the checkpoint's config.",
    ),
    "a bias of its own beside stacked weights": (
        lambda: Model(1, has_bias=True),
        lambda state: at_layer_0(files.stacked(state)),
        "checkpoint must be complete, with 'layers.0.mlp.experts.gate_up_proj_bias' for "
        "layers.0.mlp.experts.gate_up_proj_bias, got no such key.",
    ),
    "a bias on the meta device": (
        lambda: Model(1, has_bias=True).to("meta"),
        at_layer_0,
        "checkpoint must be complete, with 'layers.0.mlp.experts.0.gate_proj.bias' for",
    ),
    "static rows of gate and up apart": (
        gate_and_up_apart,
        lambda state: (
            at_layer_0(state)
            | {
                f"layers.0.mlp.experts.{e}.{name}.input_scale": torch.ones(1)
                for e in range(E)
                for name in files.PROJECTIONS
            }
        ),
        "must be without static scales of activations (input_scale) where gate and up are two parameters, got some.",
    ),
    "a parameter under the key of a scale": (
        with_a_scale_of_its_own,
        at_layer_0,
        "must be without a parameter 'down_proj_scale', under which the state dict keeps scales of",
    ),
    "biases of some": (
        lambda: Model(1, has_bias=True),
        lambda state: at_layer_0(state) | {"layers.0.mlp.experts.1.up_proj.bias": torch.zeros(files.I)},
        "layers.0.mlp.experts.0.gate_proj.weight must be stored beside 'bias', got",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_model_and_checkpoint_that_do_not_match(name: str, tmp_path: Path) -> None:
    make, change, words = MISMATCHES[name]
    state = {key: tensor.clone() for key, tensor in change(layer("float, tensor")).items()}
    save_file(state, tmp_path / "model.safetensors")
    model = make()
    if name == "another shape":
        experts = model.layers[0]["mlp"]["experts"]
        experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[..., :380])
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(model, tmp_path)
    after = dict(model.named_parameters())
    assert all(after[key] is parameter for key, parameter in before.items())


def test_arguments_of_other_types(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"load_experts_: model must be a torch\.nn\.Module, got str"):
        moe_ops.load_experts_("model", tmp_path)
    with pytest.raises(ValueError, match="load_experts_: checkpoint must be the path of a file or folder, got int"):
        moe_ops.load_experts_(Model(1), 3)
    with pytest.raises(
        ValueError, match=re.escape("filter must be a function (name, module) -> bool or None, got 'x' (")
    ):
        moe_ops.load_experts_(Model(1), tmp_path, filter="x")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("prefix", 3, "prefix must be a string, got 3 (int)."),
        ("prefix", None, "prefix must be a string, got None."),
        ("device", "nope", "device must be a device that is there, or its name, got 'nope' (str): RuntimeError."),
        ("device", None, "device must be a device that is there, or its name, got None: TypeError."),
    ],
    ids=str,
)
def test_arguments_of_read_experts(name: str, value: object, words: str, tmp_path: Path) -> None:
    save_file(layer("float, channel"), tmp_path / NAME)
    with pytest.raises(ValueError, match=re.escape(f"load_experts_: {words}")):
        read_experts(tmp_path, **{"prefix": PREFIX, name: value})


NAME, INDEX, KEY = "model.safetensors", "model.safetensors.index.json", "layers.0.mlp.experts.0.gate_proj.weight"


def cut_short(folder: Path) -> None:
    whole = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(whole[:-5000])


#: id -> (what is done in the folder of a good file, what of it is passed, words of the message).
FILES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "index that is no JSON": (
        lambda folder: (folder / INDEX).write_text("{oops"),
        "",
        f"with the file of each key, as 'weight_map' in '{INDEX}', got JSONDecodeError: Expecting property name",
    ),
    "index that is no text": (
        lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe\xfa"),
        "",
        f"with the file of each key, as 'weight_map' in '{INDEX}', got UnicodeDecodeError:",
    ),
    **{
        f"index of {content}": (
            lambda folder, content=content: (folder / INDEX).write_text(content),
            "",
            f"with the file of each key, as 'weight_map' in '{INDEX}', got JSON without that. Get it anew, or remove",
        )
        for content in ("{}", "[]", "3", '{"weight_map": []}', '{"weight_map": {"a.w1": 1}}')
    },
    "another JSON": (
        lambda folder: (folder / "config.json").write_text(json.dumps({"weight_map": {KEY: NAME}})),
        "config.json",
        "of files in safetensors' format, 'config.json' too, got SafetensorError: Error while deserializing header: "
        "header too large. Pass the folder that it is in.",
    ),
    "file of other bytes": (
        lambda folder: (folder / NAME).write_bytes(b"x" * 100),
        "",
        f"of files in safetensors' format, '{NAME}' too, got SafetensorError: Error while deserializing header: ",
    ),
    "file cut short": (
        cut_short,
        NAME,
        f"of files in safetensors' format, '{NAME}' too, got SafetensorError: Error while deserializing header: "
        "incomplete metadata, file not fully covered. Get it anew: it is cut short, or no such file.",
    ),
    "empty file": (
        lambda folder: (folder / NAME).write_bytes(b""),
        "",
        f"of files in safetensors' format, '{NAME}' too, got SafetensorError: Error while deserializing header: ",
    ),
    "file of torch.save": (
        lambda folder: torch.save({}, folder / "pytorch_model.bin"),
        "pytorch_model.bin",
        "of files in safetensors' format, 'pytorch_model.bin' too, got SafetensorError: Error while deserializing "
        "header: header too large. Convert it with safetensors.torch.save_file.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    spoil, passed, words = FILES[name]
    save_file({KEY: torch.zeros(100, 100)}, tmp_path / NAME)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"load_experts_: checkpoint must be {words}")):
        moe_ops.load_experts_(Model(1), tmp_path / passed)


def test_a_key_in_two_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({KEY: torch.zeros(1)}, tmp_path / name)
    words = f"{KEY} must be in one file where a folder has no index, got 'a.safetensors' and 'b.safetensors'. Pass"
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(Model(1), tmp_path)


@pytest.mark.parametrize("where", ["nothing", "empty folder", "file of the index", "key of the index"])
def test_files_that_are_not_there(where: str, tmp_path: Path) -> None:
    words = "checkpoint must be a safetensors file, or a folder with some, got"
    if where.endswith("index"):
        key = "layers.0.mlp.experts.0.gate_proj.weight"
        others = [f"layers.0.mlp.experts.0.{name}.weight" for name in ("up_proj", "down_proj")]
        index = {"weight_map": dict.fromkeys((key, *others), "model-1.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        words = "load_experts_: checkpoint must be complete, with the file 'model-1.safetensors' of its index, got no"
        if where == "key of the index":
            save_file({"other": torch.zeros(1)}, tmp_path / "model-1.safetensors")
            words = f"{key} must be readable from 'model-1.safetensors', got SafetensorError"
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        moe_ops.load_experts_(Model(1), tmp_path / "none" if where == "nothing" else tmp_path)
    why = {"nothing": "which does not exist. ", "empty folder": "which has none. "}.get(where, "")
    assert why in str(caught.value) and ("snapshot_download" in str(caught.value)) == bool(why)
    assert str(caught.value).count("load_experts_") == 1


def test_several_indices(tmp_path: Path) -> None:
    """Which of them counts is nobody's guess."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    words = "of one index, got 2: 'one.safetensors.index.json', 'two.safetensors.index.json'. Pass the path of the one"
    with pytest.raises(ValueError, match=re.escape(words)):
        moe_ops.load_experts_(Model(1), tmp_path)
