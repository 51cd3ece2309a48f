"""Checkpoints that torchao, or transformers with it, wrote: their bits, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import moe_ops
from moe_ops.checkpoints import read_experts
from tests.ops.checkpoints import PREFIX

torchao = pytest.importorskip("torchao.quantization")
workflows = pytest.importorskip("torchao.quantization.quantize_.workflows")
flatten = pytest.importorskip("torchao.prototype.safetensors.safetensors_support").flatten_tensor_state_dict
PerRow, PerTensor, PerBlock = torchao.PerRow, torchao.PerTensor, torchao.PerBlock
#: Experts, hidden and intermediate width.
E, H, I = 3, 256, 128


def float8(granularity: Any, rows: Any = None) -> Callable[[Tensor], Tensor]:
    kwargs = None if rows is None else workflows.QuantizeTensorToFloat8Kwargs(granularity=rows)
    return lambda w: torchao.Float8Tensor.from_hp(w, granularity=granularity, act_quant_kwargs=kwargs)


def int8(**options: Any) -> Callable[[Tensor], Tensor]:
    return lambda w: torchao.Int8Tensor.from_hp(w, granularity=PerRow(), **options)


def block(w: Tensor) -> Any:
    return PerBlock([*(1,) * (w.dim() - 2), 128, 128])


def intx(w: Tensor) -> Tensor:
    sizes = [*(1,) * (w.dim() - 1), 32]
    return workflows.IntxUnpackedToInt8Tensor.from_hp(w, sizes, torch.int8)


asymmetric = {"mapping_type": torchao.quant_primitives.MappingType.ASYMMETRIC}
int8_rows = {"act_quant_kwargs": workflows.QuantizeTensorToInt8Kwargs(granularity=PerRow())}
#: id -> (how a weight is made, the scheme that reads it).
MADE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "fp8, row": (float8(PerRow()), "fp8_w8a16"),
    "fp8, weight": (float8(PerTensor()), "fp8_w8a16"),
    "fp8, block": (lambda w: float8(block(w))(w), "fp8_w8a16"),
    "fp8, row, fp8 rows": (float8(PerRow(), PerRow()), "fp8_channel"),
    "fp8, weight, fp8 rows": (float8(PerTensor(), PerTensor()), "fp8_tensor"),
    "int8, row": (int8(), "int8_w8a16"),
    "int8, row, zero points": (int8(**asymmetric), "int8_w8a16"),
    "int8, row, int8 rows": (int8(**int8_rows), "int8_channel"),
    "intx, groups": (intx, "int8_w8a16"),
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}
    return {name: torch.randn(E, *shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def write(folder: Path, made: dict[str, Tensor]) -> None:
    state, metadata = flatten(made)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "model.safetensors", metadata)


def assert_reads(folder: Path, wanted: dict[str, Tensor], scheme: str) -> None:
    for name, operand in read_experts(folder, PREFIX).items():
        assert operand.scheme.name == scheme
        assert torch.equal(operand.dequantized().to(torch.bfloat16), wanted[name])


@pytest.mark.parametrize("name", MADE)
def test_stacks_have_torchaos_bits(name: str, tmp_path: Path) -> None:
    make, scheme = MADE[name]
    made = {key: make(weight) for key, weight in weights().items()}
    write(tmp_path, {f"{PREFIX}.{key}": tensor for key, tensor in made.items()})
    assert_reads(tmp_path, {key: tensor.dequantize() for key, tensor in made.items()}, scheme)


@pytest.mark.parametrize("name", MADE)
def test_numbered_experts_have_torchaos_bits(name: str, tmp_path: Path) -> None:
    make, scheme = MADE[name]
    made, wanted = {}, {}
    for key, stack in weights().items():
        halves = {"gate_proj": stack[:, :I], "up_proj": stack[:, I:]} if key == "gate_up_proj" else {key: stack}
        found = {half: [make(one.contiguous()) for one in stacked] for half, stacked in halves.items()}
        wanted[key] = torch.cat([torch.stack([one.dequantize() for one in each]) for each in found.values()], dim=1)
        made |= {f"{PREFIX}.{e}.{half}.weight": one for half, each in found.items() for e, one in enumerate(each)}
    write(tmp_path, made)
    assert_reads(tmp_path, wanted, scheme)


@pytest.mark.parametrize("name", ["fp8, row", "fp8, weight", "fp8, block", "int8, row"])
def test_stacks_that_are_stored_transposed(name: str, tmp_path: Path) -> None:
    """As torchao quantises ``[E, K, N]`` parameters along K; one scale for a weight says nothing of it."""
    made = {key: MADE[name][0](weight) for key, weight in weights().items()}
    state, metadata = flatten({f"{PREFIX}.{key}": tensor for key, tensor in made.items()})
    turned = {key: tensor.mT.contiguous() for key, tensor in state.items()}
    for key, said in [*metadata.items()]:
        metadata[key] = re.sub(r'"block_size": \[(\d+), (\d+), (\d+)\]', r'"block_size": [\1, \3, \2]', said)
    save_file(turned, tmp_path / "model.safetensors", metadata)
    assert_reads(tmp_path, {key: tensor.dequantize() for key, tensor in made.items()}, MADE[name][1])


@pytest.mark.parametrize("conf", ["Float8WeightOnlyConfig", "Int8WeightOnlyConfig"])
def test_what_transformers_saved_is_loaded(conf: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=1, hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=2, vocab_size=8,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    settings = torchao.FqnToConfig({r"re:.*\.experts\.(gate_up|down)_proj": getattr(torchao, conf)()})
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=transformers.TorchAoConfig(settings), dtype=torch.bfloat16
    )
    quantised.save_pretrained(tmp_path / "quantised")
    (scheme,) = moe_ops.load_experts_(model, tmp_path / "quantised").values()
    assert scheme == ("fp8_w8a16" if "Float8" in conf else "int8_w8a16")
    for name in ("gate_up_proj", "down_proj"):
        got, wanted = (getattr(one.model.layers[0].mlp.experts, name) for one in (model, quantised))
        assert torch.equal(got.dequantize(), wanted.dequantize())


def bounded(w: Tensor) -> Tensor:
    kwargs = workflows.QuantizeTensorToFloat8Kwargs(granularity=PerRow(), hp_value_lb=1.0)
    return torchao.Float8Tensor.from_hp(w, granularity=PerRow(), act_quant_kwargs=kwargs)


#: id -> (how a weight is made, what becomes of the metadata, words of the message).
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[str], str] | None, str]] = {
    "no metadata": (float8(PerRow()), None, "gate_up_proj_qdata must be in a file whose metadata say what"),
    "another version's": (
        float8(PerRow()),
        lambda said: said.replace("block_size", "blocks"),
        "got ValueError: Failed to create instance of Float8Tensor",
    ),
    "a class that is not known": (float8(PerRow()), lambda said: said.replace("Float8Tensor", "NoTensor"), "NoTensor"),
    "rows that torchao does not read back": (
        lambda w: float8(block(w), torchao.PerGroup(128))(w),
        lambda said: said,
        "Failed to find class PerGroup",
    ),
    "activations of another kind": (
        float8(PerRow()),
        lambda said: said.replace('"act_quant_kwargs": null', '"act_quant_kwargs": 7'),
        "scales [3, 256, 1] of a weight [3, 256, 256] and activations by None. Quantise it by",
    ),
    "blocks that are not those of its scales": (
        int8(),
        lambda said: said.replace("[1, 1, 256]", "[1, 2, 128]"),
        "must be of blocks that scales [3, 256, 1] are of, as its metadata say, got [1, 2, 128] of [3, 256, 256].",
    ),
    "bounds of scales": (bounded, lambda said: said, "bounds of its activations' scales, hp_value_lb"),
    "groups of rows": (lambda w: float8(PerBlock([1, 64, 64]))(w), lambda said: said, "scales [3, 4, 4]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_the_key(name: str, tmp_path: Path) -> None:
    make, change, words = REFUSED[name]
    state, metadata = flatten({f"{PREFIX}.{key}": make(weight) for key, weight in weights().items()})
    said = None if change is None else {key: change(value) for key, value in metadata.items()}
    save_file(state, tmp_path / "model.safetensors", said)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read_experts(tmp_path, PREFIX)
    assert "_gate_up_proj_qdata" in str(caught.value)


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    state, metadata = flatten({f"{PREFIX}.{key}": float8(PerRow())(weight) for key, weight in weights().items()})
    save_file(
        {key: t for key, t in state.items() if "up_proj_scale" not in key}, tmp_path / "model.safetensors", metadata
    )
    with pytest.raises(ValueError, match=re.escape(f"{PREFIX}._gate_up_proj_qdata must be")):
        read_experts(tmp_path, PREFIX)


def test_scales_that_are_not_stored_as_their_weight_is(tmp_path: Path) -> None:
    """Of a square weight, which would be read as the other one's are: torchao has no such tensor."""
    made = {f"{PREFIX}.{key}": float8(PerRow())(weight) for key, weight in weights().items()}
    state, metadata = flatten(made)
    turned = {key: tensor.mT.contiguous() for key, tensor in state.items() if "gate_up_proj_scale" not in key}
    save_file(state | turned, tmp_path / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=re.escape("down_proj_qdata must be of a tensor [.., N, K] that a scheme")):
        read_experts(tmp_path, PREFIX)


def test_the_layer_runs_on_these_bytes(tmp_path: Path) -> None:
    made = {key: MADE["fp8, row"][0](weight) for key, weight in weights().items()}
    write(tmp_path, {f"layer.experts.{key}": tensor for key, tensor in made.items()})
    model = nn.ModuleDict({"layer": nn.ModuleDict({"experts": nn.Module()})})
    for key, weight in weights().items():
        model["layer"]["experts"].register_parameter(key, nn.Parameter(torch.zeros_like(weight)))
    assert moe_ops.load_experts_(model, tmp_path) == {"layer.experts": "fp8_w8a16"}
    experts, generator = model["layer"]["experts"], torch.Generator().manual_seed(1)
    x, logits = torch.randn(5, H, generator=generator).bfloat16(), torch.randn(5, E, generator=generator)
    got = moe_ops.fused_moe(x, logits, experts.gate_up_proj, experts.down_proj, top_k=2)
    assert torch.equal(got, moe_ops.fused_moe(x, logits, made["gate_up_proj"], made["down_proj"], top_k=2))
