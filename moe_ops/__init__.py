"""Mixture-of-experts operators for PyTorch, and the entry points of the compiler passes that find MoE blocks.

The operators are functions of this module and of ``torch.ops.moe_ops``. Importing it registers them and imports neither
triton nor inductor. ``compile``, ``explain``, ``fuse``, ``stack_experts_`` and ``restore`` come from
:mod:`compile_passes`, which is imported when one of them is first used: the only place where this package looks at the
one above it.
"""

from __future__ import annotations

from typing import Any

from moe_ops import siblings  # (first: it refuses a foreign `meta` before anything imports that)

# isort: split

from moe_ops import ep as ep  # (a module of public functions)
from moe_ops import ops as _ops  # noqa: F401  (registers the operators)
from moe_ops.api import fused_experts, fused_moe, fused_topk, quantize_weight
from moe_ops.checkpoints import load_experts_
from moe_ops.debugging import debug
from moe_ops.layer import Prepared, experts, finalize, prepare
from moe_ops.load import load_statistics
from moe_ops.quantized import QuantizedWeight
from moe_ops.quantizing import quantize_
from moe_ops.stages import (
    batched_combine,
    batched_dispatch,
    batched_mm,
    batched_mm_glu,
    grouped_mm,
    grouped_mm_glu,
    moe_permute,
    moe_unpermute,
    quantize_batched,
    quantize_rows,
)

__version__ = "0.1.0"

_FROM_PASSES = ("compile", "explain", "fuse", "restore", "stack_experts_")

__all__ = [
    "Prepared",
    "QuantizedWeight",
    "batched_combine",
    "batched_dispatch",
    "batched_mm",
    "batched_mm_glu",
    "compile",
    "debug",
    "experts",
    "explain",
    "finalize",
    "fuse",
    "fused_experts",
    "fused_moe",
    "fused_topk",
    "grouped_mm",
    "grouped_mm_glu",
    "load_experts_",
    "load_statistics",
    "moe_permute",
    "moe_unpermute",
    "prepare",
    "quantize_",
    "quantize_batched",
    "quantize_rows",
    "quantize_weight",
    "restore",
    "stack_experts_",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM_PASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    siblings.require("compile_passes", by="moe_ops")
    import compile_passes

    return getattr(compile_passes, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_PASSES})
