"""The families of transformers whose experts come in the shared compiled forms, as tiny models.

`compile_passes.tiny` makes them: it shrinks a configuration by the meaning of its attributes.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compile_passes.tiny import FAMILIES, text_classes, tiny_config, tiny_model

REQUIRED = (
    "mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe", "nemotron_h", "gemma4", "aria",
    "minimax_m2",
)  # fmt: skip
OTHERS = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2", "deepseek_v2",
    "deepseek_v32", "deepseek_v4", "diffusion_gemma", "dots1", "dots3_note", "ernie4_5_moe",
    "ernie4_5_vl_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm4v_moe",
    "glm5_next", "glm_moe_dsa", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
    "hy_v3", "hy_v4", "hy_v4_vl", "inkling", "inkling2", "inkling2_loop", "jamba", "kimi_linear", "kolibri1", "laguna",
    "lara_mini", "lfm2_moe",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m3_vl", "mistral4", "mistral_large4", "muse_spark",
    "openai_privacy_filter", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "qwen3_omni_moe",
    "qwen3_vl_moe", "qwen4_exp", "solar_open", "unlimited_ocr", "zaya",
)  # fmt: skip
# Families whose own code stays between the experts and the combine.
STAGED = frozenset({"muse_spark"})
# MoE layers of the tiny model, where it is not the usual two.
LAYERS = {"nemotron_h": 1}
# What a model of a single layer, with a MoE block, needs beside that number; None: it is one already.
_ONE_LAYER: dict[str, dict[str, Any] | None] = {
    "nemotron_h": None, **{name: {"layer_types": ["full_attention"]} for name in ("gemma4", "kimi_linear", "lfm2_moe")},
}  # fmt: skip
# Families whose two layers are not alike, in their routers or in what their configuration says of each.
UNLIKE_LAYERS = frozenset({"diffusion_gemma"})
# Families with code of their own between the expert products.
OWN_ACTIVATIONS = frozenset({"beam", "deepseek_v4", "inkling2", "minimax_m3_vl", "muse_spark", "openai_privacy_filter"})
# Families whose router `fused_topk` does not express, with a word of the reason.
KEPT_ROUTERS = {
    "deepseek_v4": "ids", "diffusion_gemma": "mul", "ernie4_5_moe": "sum", "ernie4_5_vl_moe": "sum", "gemma4": "mul",
    "inkling": "slice", "phimoe": "weights", "zaya": "masked_fill",
}  # fmt: skip


@cache
def _classes(family: str) -> tuple[type[Any], type[Any]]:
    package = f"transformers.models.{family}"
    return text_classes(
        importlib.import_module(f"{package}.configuration_{family}"),
        importlib.import_module(f"{package}.modeling_{family}"),
    )


def available(family: str) -> bool:
    """Whether the installed transformers has the family, with the shared experts code."""
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        return False
    modeling = importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}")
    return modeling is not None and "@use_experts_implementation" in Path(str(modeling.origin)).read_text()


def build(family: str, dtype: torch.dtype, experts: str, **settings: Any) -> torch.nn.Module:
    """A tiny model of ``family``: two layers, 8 experts, top-2 (zaya: top-1), but for ``settings`` of its config."""
    config_class, model_class = _classes(family)
    config = tiny_config(config_class, {**FAMILIES.get(family, {}), **settings})
    return tiny_model(config, model_class, dtype=dtype, experts=experts)


def one_layer(family: str) -> dict[str, Any]:
    """Settings of `build` for one layer: a capture takes half as long as that of two."""
    more = _ONE_LAYER.get(family, {})
    return {} if more is None else {"num_hidden_layers": 1, **more}


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids that no tiny configuration uses for padding or image markers."""
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def result(output: Any) -> torch.Tensor:
    """Logits or last hidden state of a model's output."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if value is not None:
            return value
    return output[0]
