"""Files of quantised models' own state dicts: the scheme and values that they were written with, or an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import moe_ops
from moe_ops.checkpoints import read_experts
from moe_ops.quantized import quantized_schemes
from tests.ops import checkpoints as files
from tests.ops.test_load_experts import Model

#: Schemes whose bytes and scales are those of no other one.
TOLD = ("mxfp8", "nvfp4", "w4a8_fp8")
NAMES = ("gate_up_proj", "down_proj")


def quantised(scheme: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = Model(1).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    moe_ops.quantize_(model, scheme)
    return model


def experts(model: nn.Module) -> nn.Module:
    return model.layers[0]["mlp"]["experts"]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name in NAMES:
        mine, its = (getattr(experts(model), name) for model in (one, other))
        assert mine.scheme == its.scheme
        for part, tensor in mine.parts().items():
            assert torch.equal(tensor.view(torch.uint8), its.parts()[part].view(torch.uint8))


def test_experts_that_are_the_whole_file_have_no_prefix(tmp_path: Path) -> None:
    written, model = quantised("nvfp4"), Model(1)
    save_file(experts(written).state_dict(), tmp_path / "model.safetensors")
    assert moe_ops.load_experts_(experts(model), tmp_path) == {"": "nvfp4"}
    assert_same(model, written)
    operand = read_experts(tmp_path, "")["down_proj"]
    assert torch.equal(operand.data, experts(written).down_proj.stored)


@pytest.mark.parametrize("scheme", quantized_schemes())
def test_a_scheme_is_that_of_the_file_or_not_guessed(scheme: str, tmp_path: Path) -> None:
    written = quantised(scheme)
    save_file(written.state_dict(), tmp_path / "model.safetensors")
    model = Model(1)
    if scheme in TOLD:
        assert moe_ops.load_experts_(model, tmp_path) == {"layers.0.mlp.experts": scheme}
        assert_same(model, written)
        return
    words = "layers.0.mlp.experts.gate_up_proj must be of a scheme that its dtypes and shapes tell, got "
    cure = "Call moe_ops.quantize_ with the scheme that it was written with, then load_state_dict."
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        moe_ops.load_experts_(model, tmp_path)
    assert repr(scheme) in str(caught.value) and str(caught.value).endswith(cure)
    moe_ops.quantize_(model, scheme)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(model, written)


def test_parts_that_only_one_scheme_has_tell_it(tmp_path: Path) -> None:
    """Static scales of activations."""
    model = quantised("fp8_channel")
    state = model.state_dict()
    statics = {f"layers.0.mlp.experts.{name}_input_scale": torch.full((files.E, 1, 1), 0.5) for name in NAMES}
    save_file(state | statics, tmp_path / "model.safetensors")
    loaded = Model(1)
    assert moe_ops.load_experts_(loaded, tmp_path) == {"layers.0.mlp.experts": "fp8_channel"}
    assert torch.equal(experts(loaded).down_proj.input_scale, torch.full((files.E, 1, 1), 0.5))
    assert torch.equal(experts(loaded).down_proj, experts(model).down_proj)


def test_quotients_of_nvfp4_come_back_from_a_file(tmp_path: Path) -> None:
    """The reciprocal of compressed-tensors' divisor is a factor in the file of the model that was filled with it."""
    prefix, case = "layers.0.mlp.experts", files.CASES["nvfp4"]
    state = files.per_expert(lambda weight: files.compressed(weight, case), case.dtype, prefix)
    save_file(state, tmp_path / "model.safetensors")
    first, second = Model(1), Model(1)
    moe_ops.load_experts_(first, tmp_path)
    save_file(first.state_dict(), tmp_path / "model.safetensors")
    moe_ops.load_experts_(second, tmp_path)
    assert_same(first, second)


def test_experts_with_keys_of_their_own_keep_the_factor(tmp_path: Path) -> None:
    """As modules that `stack_experts_` made write them: `weight`, which compressed-tensors calls `weight_packed`."""
    prefix = "layers.0.mlp.experts"
    written = quantised("nvfp4")
    state = {}
    for name in NAMES:
        for part, tensor in getattr(experts(written), name).parts().items():
            suffix = "" if part == "stored" else f"_{part}"
            state |= {f"{prefix}.{e}.{name}.weight{suffix}": tensor[e].clone() for e in range(files.E)}
    save_file(state, tmp_path / "model.safetensors")
    model = Model(1)
    moe_ops.load_experts_(model, tmp_path)
    assert_same(model, written)
