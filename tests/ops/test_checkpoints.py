"""Checkpoints dequantise to the bits of the library that owns their layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meta.operands import Operand
from moe_ops.checkpoints import read_experts
from tests.ops import checkpoints as files
from tests.ops.checkpoints import CASES, PREFIX, Case, Tensors


def written(folder: Path, state: Tensors, prefix: str = PREFIX) -> dict[str, Operand]:
    save_file(state, folder / "model.safetensors")
    return read_experts(folder, prefix)


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    whole = torch.int32 if wanted.dtype == torch.float32 else torch.int16
    assert got.shape == wanted.shape
    assert torch.equal(got.to(wanted.dtype).view(whole), wanted.contiguous().view(whole))


def assert_reads(operands: dict[str, Operand], wanted: Tensors, scheme: str | None = None) -> None:
    """All have the wanted bits and, if it is named, the scheme."""
    for weight, operand in operands.items():
        assert scheme is None or operand.scheme.name == scheme
        assert_same_bits(operand.dequantized(), wanted[weight])


@pytest.mark.parametrize("name", CASES)
def test_compressed_tensors_own_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    state = files.per_expert(lambda weight: files.compressed(weight, case), case.dtype)
    operands = written(tmp_path, state)
    wanted = files.expected(state, lambda tensors: files.decompressed(tensors, case))
    assert_reads(operands, wanted, case.scheme)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("divisors", ["the library's", "any"])
def test_nvfp4_of_compressed_tensors_before_rounding(divisors: str, stacked: bool, tmp_path: Path) -> None:
    """It divides by the global scale; a product with the fp32 reciprocal would be up to two roundings apart."""
    case, generator = CASES["nvfp4"], torch.Generator().manual_seed(1)

    def store(weight: torch.Tensor) -> Tensors:
        state = files.compressed(weight, case)
        if divisors == "any":
            state["weight_global_scale"] = torch.exp2(torch.rand(1, generator=generator) * 160 - 80)
        return state

    state = files.per_expert(store)
    operands = written(tmp_path, files.stacked(state) if stacked else state)
    wanted = files.expected(state, files.nvfp4_in_fp32)
    assert_reads(operands, wanted, "nvfp4")
    for weight, whole in files.expected(state, lambda tensors: files.decompressed(tensors, case)).items():
        assert_same_bits(operands[weight].dequantized(), whole)


def test_modelopt_nvfp4(tmp_path: Path) -> None:
    state = files.per_expert(files.modelopt_nvfp4)
    operands = written(tmp_path, state)
    wanted = files.expected(state, files.read_modelopt_nvfp4)
    assert_reads(operands, wanted, "nvfp4")


def test_modelopt_fp8(tmp_path: Path) -> None:
    """Scales without a dimension, of gate and of up."""
    state = files.per_expert(files.modelopt_fp8)
    operands = written(tmp_path, state)
    wanted = files.expected(state, lambda tensors: tensors["weight"].float() * tensors["weight_scale"])
    assert_reads(operands, wanted, "fp8_tensor")


@pytest.mark.parametrize("kind", files.MODELOPT_STACKS)
def test_modelopt_stacks_of_the_other_orientation(kind: str, tmp_path: Path) -> None:
    """Llama 4 and gpt-oss: ``[E, K, N]``, and one scale for all experts."""
    state, wanted = files.modelopt_stacks(kind)
    operands = written(tmp_path, state)
    assert_reads(operands, wanted, files.MODELOPT_STACKS[kind])
    assert all(operand.data.is_contiguous() for operand in operands.values())
    for operand in operands.values() if kind == "fp8, tensor" else ():
        assert torch.equal(operand.static, torch.full((files.E, 1, 1), 0.5))


#: (N, K) of gate|up and down where one weight, or a square of blocks, does not say how it is stored.
SQUARE = {
    "down": {"gate_up_proj": (512, 256), "down_proj": (256, 256)},
    "gate_up": {"gate_up_proj": (256, 256), "down_proj": (256, 128)},
}


@pytest.mark.parametrize("upright", [False, True], ids=["turned", "upright"])
@pytest.mark.parametrize("square", SQUARE)
@pytest.mark.parametrize("kind", files.MODELOPT_STACKS)
def test_a_square_stack_is_turned_as_the_other_one_is(kind: str, square: str, upright: bool, tmp_path: Path) -> None:
    state, wanted = files.modelopt_stacks(kind, shapes=SQUARE[square])
    if upright:
        state = {key: tensor.mT.contiguous() if tensor.dim() == 3 else tensor for key, tensor in state.items()}
    assert_reads(written(tmp_path, state), wanted)


def test_a_square_of_blocks_is_turned_where_those_of_the_other_stack_are(tmp_path: Path) -> None:
    """Weights ``[E, K, N]`` beside blocks ``[E, N / 128, K / 128]``, of which gate|up has 3 x 2 and down 2 x 2."""
    state, wanted = files.modelopt_stacks("fp8, block")
    state = {key: tensor.mT.contiguous() if "scale" in key else tensor for key, tensor in state.items()}
    assert_reads(written(tmp_path, state), wanted, "fp8_block128")


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_zero_points_of_turned_stacks_have_the_dimensions_that_they_need(dims: int, tmp_path: Path) -> None:
    """``[E, 1, N]`` beside such scales, ``[E, N]``, or one for each expert, which has scales of its own kind."""
    generator, state, wanted = torch.Generator().manual_seed(0), {}, {}
    for name, (N, K) in {"gate_up_proj": (2 * files.I, files.H), "down_proj": (files.H, files.I)}.items():
        codes = torch.randint(-128, 128, (files.E, N, K), generator=generator, dtype=torch.int8)
        rows = 1 if dims == 1 else N
        scale = torch.rand(files.E, rows, 1, generator=generator) + 0.5
        zero = torch.randint(-9, 9, (files.E, rows, 1), generator=generator, dtype=torch.int8)
        wanted[name] = (codes.float() - zero) * scale
        state |= {f"{PREFIX}.{name}": codes.mT.contiguous(), f"{PREFIX}.{name}_scale": scale.mT.contiguous()}
        state[f"{PREFIX}.{name}_zero_point"] = zero.mT.contiguous() if dims == 3 else zero.flatten(dims - 1)
    assert_reads(written(tmp_path, state), wanted, "int8_w8a16")


#: How static scales of activations are stored: of one expert's projection, or of all experts.
STATIC = {
    "modelopt": (False, lambda scale: scale),
    "compressed-tensors": (False, lambda scale: scale.bfloat16().view(1)),
    "stacked": (True, lambda scale: scale),
    "stacked, with a dimension more": (True, lambda scale: scale.view(1)),
}


@pytest.mark.parametrize("way", STATIC)
def test_static_scales_of_activations_are_those_of_each_expert(way: str, tmp_path: Path) -> None:
    stacked, store = STATIC[way]
    state = files.per_expert(files.modelopt_fp8)
    state = {key: tensor for key, tensor in state.items() if "weight_scale" not in key}
    for expert in range(files.E):
        for name, static in (("gate_proj", 0.5), ("up_proj", 0.5), ("down_proj", 3.0)):
            stem = f"{PREFIX}.{expert}.{name}"
            state[f"{stem}.weight_scale"] = torch.ones(state[f"{stem}.weight"].shape[0], 1)
            state[f"{stem}.input_scale"] = store(torch.tensor(static + expert / 4))
    if stacked:
        state = files.stacked(state, join=False)
        state[f"{PREFIX}.gate_proj.input_zero_point"] = torch.zeros(files.E)
    for weight, operand in written(tmp_path, state).items():
        first = 3.0 if weight == "down_proj" else 0.5
        assert operand.scheme.name == "fp8_channel" and len(operand.scales) == 1
        assert operand.static.dtype == torch.float32
        assert torch.equal(operand.static, (first + torch.arange(files.E) / 4).view(files.E, 1, 1))


@pytest.mark.parametrize("name", ["modelopt_nvfp4", "int8_w8a16"])
def test_schemes_that_round_no_activations_leave_their_scales(name: str, tmp_path: Path) -> None:
    store = files.modelopt_nvfp4
    if name == "int8_w8a16":
        case = CASES["int8, channel, zero"]

        def store(weight: torch.Tensor) -> Tensors:
            return files.compressed(weight, case) | {"input_scale": torch.ones(1)}

    assert all(operand.static is None for operand in written(tmp_path, files.per_expert(store)).values())


@pytest.mark.parametrize("scale", ["fp32", "e8m0", "exponents in uint8"])
def test_deepseek_blocks_start_again_at_the_up_half(scale: str, tmp_path: Path) -> None:
    state = files.per_expert(lambda weight: files.deepseek(weight, scale))
    operands = written(tmp_path, state)
    wanted = files.expected(state, files.read_deepseek)
    assert operands["gate_up_proj"].scales[0].shape == (files.E, 2, 2, 2)
    assert_reads(operands, wanted, "fp8_block128")


def test_deepseek_blocks_that_run_on_are_one_grid(tmp_path: Path) -> None:
    """128 divides the height of a half: nothing starts again."""
    state = {
        f"{PREFIX}.0.{name}.{key}": tensor
        for name, shape in (("gate_proj", (128, 256)), ("up_proj", (128, 256)), ("down_proj", (256, 128)))
        for key, tensor in files.deepseek(torch.randn(shape), "fp32").items()
    }
    assert written(tmp_path, state)["gate_up_proj"].scales[0].shape == (1, 2, 2)


def test_deepseek_blocks_apart_of_as_many_as_would_run_on(tmp_path: Path) -> None:
    """Two blocks over 2 * 100 rows, whether they start again or not: experts that are numbered tell."""
    shapes = {"gate_proj": (100, 256), "up_proj": (100, 256), "down_proj": (256, 100)}
    torch.manual_seed(0)
    parts = {name: files.deepseek(torch.randn(shape), "fp32") for name, shape in shapes.items()}
    state = {f"{PREFIX}.0.{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()}
    wanted = torch.cat([files.read_deepseek(parts[name]) for name in ("gate_proj", "up_proj")])
    assert_same_bits(written(tmp_path, state)["gate_up_proj"].dequantized(), wanted[None])


def test_names_of_deepseeks_own_files(tmp_path: Path) -> None:
    """``w1``, ``w3`` and ``w2``, with ``scale``; the same experts."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "weight_scale_inv": "scale"}
    state = files.per_expert(lambda weight: files.deepseek(weight, "fp32"))
    renamed = {".".join(names.get(part, part) for part in key.split(".")): tensor for key, tensor in state.items()}
    assert len(renamed.keys() & state.keys()) == 0
    operands = written(tmp_path, renamed)
    wanted = files.expected(state, files.read_deepseek)
    assert_reads(operands, wanted)


def test_deepseek_mxfp4_in_int8(tmp_path: Path) -> None:
    state = files.per_expert(files.deepseek_mxfp4)
    operands = written(tmp_path, state)
    wanted = files.expected(state, files.read_deepseek_mxfp4)
    assert_reads(operands, wanted, "mxfp4")


def test_gpt_oss_blocks(tmp_path: Path) -> None:
    state = files.gpt_oss()
    operands = written(tmp_path, state)
    for weight, operand in operands.items():
        assert operand.scheme.name == "mxfp4"
        assert_same_bits(operand.dequantized(), files.read_gpt_oss(state, weight))


@pytest.mark.parametrize("name", ["float, tensor", "float, channel", "float, block", "pack 4, group, zero", "nvfp4"])
@pytest.mark.parametrize("spelling", ["stacked", "numbered"])
def test_gate_and_up_in_one_key(spelling: str, name: str, tmp_path: Path) -> None:
    """Of all experts or of each; scales of halves as they are where gate and up have keys of their own."""
    case = CASES[name]
    state = files.per_expert(lambda weight: files.compressed(weight, case), case.dtype)
    whole = files.stacked(state)
    operands = written(tmp_path, files.numbered(whole) if spelling == "numbered" else whole)
    wanted = files.expected(state, lambda tensors: files.decompressed(tensors, case))
    assert_reads(operands, wanted, case.scheme)


@pytest.mark.parametrize("widths", [(64, 192), (192, 64)], ids=str)
def test_integers_in_groups_one_of_which_is_a_whole_row(widths: tuple[int, int], tmp_path: Path) -> None:
    """The scales of that weight are those of rows; the others tell that there are groups."""
    H, I = widths
    case = Case("int8_w8a16", "naive-quantized", dict(num_bits=8, type="int", strategy="group", group_size=64))
    state, wanted = {}, {}
    for name, shape in {"up_proj": (I, H), "down_proj": (H, I)}.items():
        stored = files.compressed(torch.randn(shape).bfloat16(), case)
        state |= {f"{PREFIX}.0.{name}.{key}": tensor for key, tensor in stored.items()}
        wanted[name] = files.decompressed(stored, case)[None]
    operands = written(tmp_path, state)
    assert_reads(operands, wanted, "int8_w8a16")


def test_stacked_gates_and_stacked_ups(tmp_path: Path) -> None:
    case = CASES["float, tensor"]
    state = files.per_expert(lambda weight: files.compressed(weight, case), case.dtype)
    operands = written(tmp_path, files.stacked(state, join=False))
    wanted = files.expected(state, lambda tensors: files.decompressed(tensors, case))
    assert_reads(operands, wanted)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    state = files.per_expert(files.modelopt_fp8)
    whole = written(tmp_path, state)["gate_up_proj"].dequantized()
    operands = written(tmp_path, {key: tensor for key, tensor in state.items() if "gate_proj" not in key})
    assert list(operands) == ["up_proj", "down_proj"]
    assert_same_bits(operands["up_proj"].dequantized(), whole[:, files.I :].contiguous())
