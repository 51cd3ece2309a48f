"""What whole models are timed: configurations, and the ways in which each is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

import compile_passes  # noqa: F401  (registers the backend in a checkout that is not installed)
from compile_passes.compat import mode_options
from compile_passes.passes import CAUSAL, SHARE, MoEPass, Pass


@dataclass(frozen=True)
class Model:
    """A configuration to build, and the rows (batch, new tokens) that are timed on it.

    ``family``: what the names of its classes in transformers begin with. ``title``: of plots, where it is not its name.
    ``published``: as it is published, all layers.
    """

    config: dict[str, Any]
    dtype: torch.dtype
    cache_length: int
    rows: tuple[tuple[int, int], ...]
    family: str = "Qwen3Moe"
    title: str = ""
    published: bool = False


_QWEN3_30B = {
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}
MODELS = {
    # The vocabulary is cut so that embeddings do not dominate four layers.
    "qwen3-4l": Model(
        _QWEN3_30B | {"num_hidden_layers": 4, "vocab_size": 32000},
        torch.bfloat16,
        cache_length=1024,
        rows=((1, 1), (8, 1), (32, 1), (1, 2048), (4, 2048)),
        title="4 layers of Qwen3-30B-A3B",
    ),
    "gpt-oss-20b-4l": Model(
        {
            "num_hidden_layers": 4,
            "vocab_size": 32000,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            # Of a window the cache's end could not be set, which the steps need (see `e2e`).
            "layer_types": ["full_attention"] * 4,
        },
        torch.bfloat16,
        cache_length=1024,
        rows=((8, 1), (32, 1)),
        family="GptOss",
        title="4 layers of gpt-oss-20b",
    ),
    # Three models as they are published, all layers, with random weights.
    "OLMoE-1B-7B": Model(
        {
            "num_hidden_layers": 16,
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "max_position_embeddings": 4096,
        },
        torch.bfloat16,
        cache_length=1024,
        rows=((8, 1),),
        family="Olmoe",
        published=True,
    ),
    "Qwen3-30B-A3B": Model(_QWEN3_30B, torch.bfloat16, cache_length=1024, rows=((8, 1),), published=True),
    "Mixtral-8x7B": Model(
        {
            "num_hidden_layers": 32,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        torch.bfloat16,
        cache_length=1024,
        rows=((8, 1),),
        family="Mixtral",
        published=True,
    ),
    "tiny": Model(
        {
            "num_hidden_layers": 2,
            "vocab_size": 1000,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "norm_topk_prob": True,
            "max_position_embeddings": 512,
        },
        torch.float32,
        cache_length=64,
        rows=((1, 1), (8, 1), (1, 64)),
    ),
}


@dataclass(frozen=True)
class Variant:
    """An experts implementation of transformers, and how the model is compiled (None: not at all).

    ``steps``: passes of this project to add to the default backend, which tells their part in a gain apart.
    ``scheme``: what the weights of the experts are quantised to.
    """

    experts: str
    compile_options: dict[str, Any] | None = field(default_factory=dict)
    steps: tuple[Pass, ...] = ()
    scheme: str | None = None

    def describe(self) -> str:
        """For the listing."""
        if self.compile_options is None:
            return f"{self.experts} experts, eager"
        steps = "".join(f", pass {step.name}" for step in self.steps)
        weights = f" of {self.scheme} weights" if self.scheme else ""
        return f"{self.experts} experts{weights}, torch.compile({self.compile_options or ''}){steps}"

    def compiled(self, network: Any) -> Any:
        """``network`` as this variant runs it."""
        if self.compile_options is None:
            return network
        network = own_code(network)
        options = dict(self.compile_options)
        if self.steps:  # torch.compile takes a mode or options, not both
            options = {"options": mode_options(options.pop("mode", None), False) | options}
            options["options"]["pre_grad_custom_pass"] = MoEPass(self.steps)
        return torch.compile(network, fullgraph=True, dynamic=False, **options)


TRANSFORMERS = ("grouped_mm", "batched_mm")  # what names of variants without this project begin with
REDUCE = {"mode": "reduce-overhead"}
VARIANTS = {
    "grouped_mm": Variant("grouped_mm", None),
    "grouped_mm compiled": Variant("grouped_mm"),
    "grouped_mm reduce-overhead": Variant("grouped_mm", REDUCE),
    "batched_mm reduce-overhead": Variant("batched_mm", REDUCE),
    "attention alone": Variant("grouped_mm", steps=(CAUSAL, SHARE)),
    "shared heads alone reduce-overhead": Variant("grouped_mm", REDUCE, (SHARE,)),
    "moe_ops": Variant("grouped_mm", {"backend": "moe_ops"}),
    "moe_ops reduce-overhead": Variant("grouped_mm", {"backend": "moe_ops", **REDUCE}),
    **{
        f"moe_ops {scheme} reduce-overhead": Variant("grouped_mm", {"backend": "moe_ops", **REDUCE}, scheme=scheme)
        for scheme in ("mxfp4", "int4_w4a16", "fp8_channel")
    },
}


def own_code(network: Any) -> Callable[..., Any]:
    """``network`` behind a function with a code object of its own.

    Dynamo keeps graphs by code object, and tries the guards of one after the other: variants that share one would be
    charged for each other's guards.
    """

    def forward(*args: Any, **inputs: Any) -> Any:
        return network(*args, **inputs)

    code = forward.__code__.replace(co_name=f"forward_{id(network)}")
    return FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
