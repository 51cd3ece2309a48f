"""From the files of a quantised checkpoint to fused layers on its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch._dynamo.utils import counters

import moe_ops
import moe_ops.integrations.transformers
from tests.ops import checkpoints as files
from tests.ops.checkpoints import CASES, E, H, I

LAYERS = [f"model.layers.{i}.mlp.experts" for i in range(2)]
WIDTHS = dict(
    num_hidden_layers=1, hidden_size=H, intermediate_size=I, vocab_size=8, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, num_local_experts=E,
)  # fmt: skip
#: Families whose stacks ModelOpt stores as the models hold them, ``[E, K, N]``.
TRANSPOSED = {
    "llama4": lambda: transformers.Llama4TextConfig(**WIDTHS, intermediate_size_mlp=I, pad_token_id=None),
    "gpt_oss": lambda: transformers.GptOssConfig(**WIDTHS, num_experts_per_tok=2, experts_implementation="grouped_mm"),
}


@pytest.mark.parametrize("name", ["pack 4, group", "float, channel", "float, block"])
def test_a_checkpoint_runs_fused_on_its_bytes(name: str, tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=2, vocab_size=8,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, experts_implementation="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    case = CASES[name]
    state = {}
    for prefix in LAYERS:
        state |= files.per_expert(lambda weight: files.compressed(weight, case), case.dtype, prefix)
    save_file(state, tmp_path / "model.safetensors")
    schemes = moe_ops.load_experts_(model, tmp_path)
    assert list(schemes) == LAYERS

    ids = torch.arange(5).view(1, 5)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        compiled = torch.compile(model, backend="moe_ops_eager", fullgraph=True)
        got = compiled(input_ids=ids).logits
        assert counters["moe_ops"]["fused"] == 2 and not counters["moe_ops"]["refused"]
        model.set_experts_implementation("moe_ops")
        assert torch.equal(got, model(input_ids=ids).logits)


# The families in turn; of both the kind whose bytes hold two numbers: gpt-oss has gate and up side by side.
STACKS = [(("llama4", "gpt_oss")[place % 2], kind) for place, kind in enumerate(files.MODELOPT_STACKS)]


@pytest.mark.parametrize(("family", "kind"), [*STACKS, ("gpt_oss", "nvfp4")])
def test_stacks_of_modelopt_run_fused(family: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TRANSPOSED[family](), dtype=torch.float32).eval()
    layers = [name for name, module in model.named_modules() if name.endswith(".experts")]
    state = {}
    for prefix in layers:
        state |= files.modelopt_stacks(kind, prefix=prefix)[0]
        state |= {f"{prefix}.{name}_input_scale": torch.tensor(8.0) for name in ("gate_up_proj", "down_proj")}
        for name, bias in model.get_submodule(prefix).named_parameters(recurse=False):
            if name.endswith("bias"):
                state[f"{prefix}.{name}"] = torch.randn(bias.shape)
    if files.MODELOPT_STACKS[kind] not in ("fp8_tensor", "nvfp4"):
        state = {key: tensor for key, tensor in state.items() if "input_scale" not in key}
    save_file(state, tmp_path / "model.safetensors")
    assert list(moe_ops.load_experts_(model, tmp_path)) == layers and len(layers) == 1

    ids = torch.arange(5).view(1, 5)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits  # of the dequantised weights: activations are not rounded
        got = torch.compile(model, backend="moe_ops_eager", fullgraph=True)(input_ids=ids).logits
    assert counters["moe_ops"]["fused"] == 1 and not counters["moe_ops"]["refused"]
    difference = (got - wanted).norm() / wanted.norm()
    assert difference < (1e-5 if kind == "nvfp4" else 0.3)  # of other weights: 1.4
