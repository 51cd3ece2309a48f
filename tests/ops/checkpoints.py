"""Small checkpoints of expert layers, as the libraries that own the layouts write and read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

#: Experts, hidden and intermediate width: 128 does not divide the last, so blocks start again at the up half.
E, H, I = 3, 256, 192
PROJECTIONS = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
PREFIX = "model.layers.1.mlp.experts"

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One way in which compressed-tensors stores a weight.

    Attributes:
        scheme: the row that reads it.
        format: its name of the compressor.
        weights: its arguments.
        dtype: of the model, hence of the scales that are not of a type of their own.
    """

    scheme: str
    format: str
    weights: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16

    @property
    def args(self) -> QuantizationArgs:
        return QuantizationArgs(**self.weights)


def _float(strategy: str, **more: Any) -> dict[str, Any]:
    return dict(num_bits=8, type="float", strategy=strategy, **more)


def _int(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return dict(num_bits=bits, type="int", strategy=strategy, **more)


_BLOCK = dict(strategy="block", block_structure=[128, 128])
_MX = dict(type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8)
_NV = dict(type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
CASES = {
    "float, tensor": Case("fp8_tensor", "float-quantized", _float("tensor")),
    "float, channel": Case("fp8_channel", "float-quantized", _float("channel")),
    "float, channel, fp16": Case("fp8_channel", "float-quantized", _float("channel"), torch.float16),
    "float, channel, fp32": Case("fp8_channel", "float-quantized", _float("channel"), torch.float32),
    "float, block": Case("fp8_block128", "float-quantized", dict(num_bits=8, type="float", **_BLOCK)),
    "mxfp8": Case("mxfp8", "mxfp8-quantized", dict(num_bits=8, **_MX)),
    "int8, channel": Case("int8_channel", "int-quantized", _int(8, "channel")),
    "int8, tensor": Case("int8_channel", "int-quantized", _int(8, "tensor")),
    "int8, channel, zero": Case("int8_w8a16", "int-quantized", _int(8, "channel", symmetric=False)),
    "int8, group": Case("int8_w8a16", "naive-quantized", _int(8, "group", group_size=32)),
    "pack 4, group": Case("int4_w4a16", "pack-quantized", _int(4, "group", group_size=32)),
    "pack 4, group, fp16": Case("int4_w4a16", "pack-quantized", _int(4, "group", group_size=64), torch.float16),
    "pack 4, group, zero": Case("int4_w4a16", "pack-quantized", _int(4, "group", group_size=32, symmetric=False)),
    "pack 4, channel": Case("int4_w4a16", "pack-quantized", _int(4, "channel")),
    "pack 4, channel, zero": Case("int4_w4a16", "pack-quantized", _int(4, "channel", symmetric=False)),
    "pack 4, tensor": Case("int4_w4a16", "pack-quantized", _int(4, "tensor")),
    "pack 8, group": Case("int8_w8a16", "pack-quantized", _int(8, "group", group_size=32)),
    "pack 8, channel": Case("int8_w8a16", "pack-quantized", _int(8, "channel"), torch.float32),
    "pack 8, group, zero": Case("int8_w8a16", "pack-quantized", _int(8, "group", group_size=32, symmetric=False)),
    "mxfp4": Case("mxfp4", "mxfp4-pack-quantized", dict(num_bits=4, **_MX)),
    "nvfp4": Case("nvfp4", "nvfp4-pack-quantized", dict(num_bits=4, **_NV)),
}


def _extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Least and largest element of every group of a weight."""
    rows, columns = weight.shape
    n, k = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": (128, 128),
    }.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(weight, (0, -columns % k, 0, -rows % n))
    blocks = padded.unflatten(1, (-1, k)).unflatten(0, (-1, n))
    least, most = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    return (least.flatten(), most.flatten()) if args.strategy == "tensor" else (least, most)


def compressed(weight: Tensor, case: Case, *, multiplier: float = 1.0) -> Tensors:
    """``weight [N, K]`` as compressed-tensors stores it, without a prefix."""
    args, state = case.args, {"weight": weight}
    least, most = _extremes(weight, args)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax()) * multiplier
    scale, zero = calculate_qparams(least, most, args, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(case.format)
    return compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))


def decompressed(state: Tensors, case: Case) -> Tensor:
    """``[N, K]`` of what :func:`compressed` gives, in the library's own arithmetic and dtype."""
    compressor = BaseCompressor.get_value_from_registry(case.format)
    return compressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=case.args))["weight"]


def nvfp4_in_fp32(state: Tensors) -> Tensor:
    """What compressed-tensors computes before it rounds to bf16."""
    args, packed = CASES["nvfp4"].args, state["weight_packed"]
    codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
    scale = state["weight_scale"].float()
    return dequantize(codes, scale, args=args, dtype=torch.float32, global_scale=state["weight_global_scale"])


def weights(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """``[E, N, K]`` of every projection; experts and halves have scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(E, len(PROJECTIONS), generator=generator) + 0.1
    return {
        name: (torch.randn(E, *shape, generator=generator) * sizes[:, i, None, None]).to(dtype)
        for i, (name, shape) in enumerate(PROJECTIONS.items())
    }


def per_expert(
    store: Callable[[Tensor], Tensors], dtype: torch.dtype = torch.bfloat16, prefix: str = PREFIX
) -> Tensors:
    """A layer of numbered experts, each projection as ``store`` writes it."""
    return {
        f"{prefix}.{expert}.{name}.{key}": tensor.clone()
        for name, stacked in weights(dtype).items()
        for expert in range(E)
        for key, tensor in store(stacked[expert]).items()
    }


def expected(state: Tensors, read: Callable[[Tensors], Tensor], prefix: str = PREFIX) -> dict[str, Tensor]:
    """``gate_up_proj`` and ``down_proj`` of such a layer, each weight as ``read`` decodes it."""

    def of(expert: int, name: str) -> Tensor:
        stem = f"{prefix}.{expert}.{name}."
        return read({key.removeprefix(stem): tensor for key, tensor in state.items() if key.startswith(stem)})

    return {
        "gate_up_proj": torch.stack([torch.cat([of(e, "gate_proj"), of(e, "up_proj")]) for e in range(E)]),
        "down_proj": torch.stack([of(e, "down_proj") for e in range(E)]),
    }


def stacked(state: Tensors, *, join: bool = True) -> Tensors:
    """The same layer with one tensor for all experts, of gate and up (if ``join``) and of down."""
    result = {}
    first = f"{PREFIX}.0.gate_proj."
    for part in [key.removeprefix(first) for key in state if key.startswith(first)]:
        all_of = {
            name: torch.stack([state[f"{PREFIX}.{expert}.{name}.{part}"] for expert in range(E)])
            for name in PROJECTIONS
        }
        if join:
            halves = all_of.pop("gate_proj"), all_of.pop("up_proj")
            all_of["gate_up_proj"] = halves[0] if part == "weight_shape" else torch.cat(halves, dim=1)
        result |= {f"{PREFIX}.{name}.{part}": tensor for name, tensor in all_of.items()}
    return result


def numbered(state: Tensors) -> Tensors:
    """Every expert of what :func:`stacked` gives in keys of its own, with gate and up in one."""
    return {
        key.replace(PREFIX, f"{PREFIX}.{expert}"): tensor[expert].clone()
        for key, tensor in state.items()
        for expert in range(E)
    }


def modelopt_nvfp4(weight: Tensor) -> Tensors:
    """``weight_scale_2`` is the largest magnitude over 6 * 448; the codes are those of compressed-tensors."""
    state = compressed(weight, CASES["nvfp4"])
    return {
        "weight": state["weight_packed"],
        "weight_scale": state["weight_scale"],
        "weight_scale_2": weight.float().abs().amax() / (6 * 448),
        "input_scale": torch.tensor(0.02),
    }


def read_modelopt_nvfp4(state: Tensors) -> Tensor:
    """NVIDIA's formula: the block scale times the second scale, in fp32, times the code."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = state["weight"].long()
    codes = table[torch.stack((packed % 16, packed // 16), dim=-1).flatten(1)]
    scale = state["weight_scale"].float() * state["weight_scale_2"]
    return codes * scale.repeat_interleave(16, dim=1)


def modelopt_fp8(weight: Tensor) -> Tensors:
    scale = weight.float().abs().amax() / 448
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.5)}


def _turned(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    return {"": weight.mT.contiguous(), "_weight_scale": scale.mT.contiguous()}


def _modelopt_stack(kind: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A stack ``[E, N, K]`` as ModelOpt's export of transformers' Llama 4 and gpt-oss has it, and its numbers."""
    if kind == "fp8, tensor":
        scale = weight.float().abs().amax() / 448
        stored = (weight.float() / scale).to(torch.float8_e4m3fn)
        state = {"": stored.mT.contiguous(), "_weight_scale": scale, "_input_scale": torch.tensor(0.5)}
        return state, stored.float() * scale
    if kind == "fp8, channel":  # whose scales are not turned
        scale = weight.float().abs().amax(-1) / 448
        stored = (weight.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
        return {"": stored.mT.contiguous(), "_weight_scale": scale}, stored.float() * scale.unsqueeze(-1)
    if kind == "fp8, block":
        states = [compressed(one, CASES["float, block"]) for one in weight]
        stored, scale = (torch.stack([state[key] for state in states]) for key in ("weight", "weight_scale"))
        wanted = torch.stack([decompressed(state, CASES["float, block"]) for state in states])
        return _turned(stored, scale), wanted
    if kind == "fp8, block, exponents":
        states = [deepseek(one, "exponents in uint8") for one in weight]
        stored, scale = (torch.stack([state[key] for state in states]) for key in ("weight", "weight_scale_inv"))
        return _turned(stored, scale), torch.stack([read_deepseek(state) for state in states])
    divisor = 6 * 448 / weight.float().abs().amax()
    states = []
    for one in weight:
        args = CASES["nvfp4"].args
        scale, zero = calculate_qparams(*_extremes(one, args), args, global_scale=divisor)
        compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        state = {"weight": one, "weight_scale": scale, "weight_zero_point": zero, "weight_global_scale": divisor}
        states.append(compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args)))
    factor = (1 / divisor).squeeze()
    wanted = [
        read_modelopt_nvfp4(
            {"weight": state["weight_packed"], "weight_scale": state["weight_scale"], "weight_scale_2": factor}
        )
        for state in states
    ]
    packed, scale = (torch.stack([state[key] for state in states]) for key in ("weight_packed", "weight_scale"))
    return _turned(packed, scale) | {"_weight_scale_2": factor, "_input_scale": torch.tensor(0.02)}, torch.stack(wanted)


#: How ModelOpt stores a stack (and one whose scales are bytes of exponents) -> the scheme that reads it.
MODELOPT_STACKS = {
    "fp8, tensor": "fp8_tensor",
    "fp8, channel": "fp8_channel",
    "fp8, block": "fp8_block128",
    "fp8, block, exponents": "fp8_block128",
    "nvfp4": "nvfp4",
}


def modelopt_stacks(
    kind: str, prefix: str = PREFIX, shapes: dict[str, tuple[int, int]] | None = None
) -> tuple[Tensors, Tensors]:
    """A layer of such stacks ``[E, K, N]``, and the ``[E, N, K]`` numbers of each.

    Args:
        shapes: ``(N, K)`` of each.
    """
    generator = torch.Generator().manual_seed(0)
    state, wanted = {}, {}
    for name, shape in (shapes or {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}).items():
        stored, wanted[name] = _modelopt_stack(kind, torch.randn(E, *shape, generator=generator).bfloat16())
        state |= {f"{prefix}.{name}{part}": tensor for part, tensor in stored.items()}
    return state, wanted


def deepseek(weight: Tensor, scale: str) -> Tensors:
    """128 x 128 blocks, the last ones cut short, and their ``weight_scale_inv``."""
    case = CASES["float, block"]
    state = compressed(weight.float(), case)
    factor = state["weight_scale"]
    if scale != "fp32":
        factor = factor.log2().ceil().exp2().to(torch.float8_e8m0fnu)
        factor = factor.view(torch.uint8) if scale != "e8m0" else factor
    return {"weight": state["weight"].contiguous(), "weight_scale_inv": factor}


def read_deepseek(state: Tensors) -> Tensor:
    scale = state["weight_scale_inv"]
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    reader = FP8BlockDequantizer(targets=["m"], dtype=torch.float32)
    return reader.process({"m.weight": state["weight"], "m.weight_scale_inv": scale.float()})["m.weight"]


def deepseek_mxfp4(weight: Tensor) -> Tensors:
    state = compressed(weight, CASES["mxfp4"])
    scale = state["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": state["weight_packed"].view(torch.int8), "scale": scale}


def read_deepseek_mxfp4(state: Tensors) -> Tensor:
    reader = Fp8Dequantize(hf_quantizer=None)
    return reader._dequantize_one(state["weight"], state["scale"].view(torch.uint8), torch.float32)


def gpt_oss(prefix: str = PREFIX, seed: int = 0) -> Tensors:
    """Blocks and scales of any bytes (of exponents, those whose numbers bf16 holds), and biases."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, (N, K) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        blocks = torch.randint(0, 256, (E, N, K // 32, 16), generator=generator)
        scales = torch.randint(110, 135, (E, N, K // 32), generator=generator)
        state |= {
            f"{prefix}.{name}_blocks": blocks.to(torch.uint8),
            f"{prefix}.{name}_scales": scales.to(torch.uint8),
            f"{prefix}.{name}_bias": torch.randn(E, N, generator=generator).bfloat16(),
        }
    return state


def read_gpt_oss(state: Tensors, name: str) -> Tensor:
    """``[E, N, K]``; transformers gives it transposed, as its experts store it."""
    parts = (state[f"{PREFIX}.{name}_{part}"] for part in ("blocks", "scales"))
    return convert_moe_packed_tensors(*parts).transpose(1, 2)
