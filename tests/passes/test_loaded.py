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
