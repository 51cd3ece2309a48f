"""The transformers models that the examples compile: real classes, random weights, nothing downloaded.

In the quick start each layer has its model's real dimensions on a GPU (DeepSeek-V3 with a quarter of its experts, so
that a float64 copy of a block fits in memory too), and is scaled down on a CPU. `finetune` trains still smaller ones.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

LAYERS = 2
# Attention and embeddings are small next to the experts in every model here.
COMMON = {"num_hidden_layers": LAYERS, "vocab_size": 8192, "max_position_embeddings": 4096, "pad_token_id": 0}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: as in `transformers.models`.
        prefix: of its classes, `<prefix>Config` and `<prefix>ForCausalLM`.
        real, small, tiny: configuration at the model's own dimensions, scaled down, and small enough to train on a CPU.
    """

    name: str
    prefix: str
    real: dict[str, Any]
    small: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)

    def build(self, device: str, dtype: torch.dtype) -> torch.nn.Module:
        """The quick start's model, for inference."""
        settings = self.real if device == "cuda" else {**SMALL, **self.small}
        return self.model(device, dtype, settings).eval().requires_grad_(False)

    def model(self, device: str, dtype: torch.dtype, settings: dict[str, Any]) -> torch.nn.Module:
        """A model with random weights, the same ones in every call, made on its device and in its dtype.

        Args:
            settings: of the configuration, beside and before `COMMON`.
        """
        package = f"transformers.models.{self.name}"
        config_class = getattr(importlib.import_module(f"{package}.configuration_{self.name}"), f"{self.prefix}Config")
        model_class = getattr(importlib.import_module(f"{package}.modeling_{self.name}"), f"{self.prefix}ForCausalLM")
        config = config_class(**{**COMMON, **settings})
        default = torch.get_default_dtype()
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model: torch.nn.Module = model_class(config)
                return model
        finally:
            torch.set_default_dtype(default)


FAMILIES = (
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        {"moe_intermediate_size": 128, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
        {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    Family(
        "mixtral",
        "Mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3",
        {
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 0,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 128,
            "n_routed_experts": 32,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "q_lora_rank": 64,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "head_dim": 32,
        },
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "q_lora_rank": 64,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "head_dim": 16,
        },
    ),
    Family(
        "gpt_oss",
        "GptOss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
        {"intermediate_size": 256, "num_local_experts": 32, "num_experts_per_tok": 4},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
)
# Beside those of the quick start, which all say the same of one more.
OLMOE = Family(
    "olmoe",
    "Olmoe",
    {
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    {"intermediate_size": 128, "num_experts": 64, "num_experts_per_tok": 8},
    {"intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4},
)
