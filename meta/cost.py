"""What a problem costs: floating point operations, bytes, and the time neither can beat.

The figures feed the flop counter, the roofline plots and the tuner's pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meta.arch import Arch
from meta.dims import Dim, Problem
from meta.schemes import SCHEMES, ceil_div

Shape = Sequence[int]


def projection_rows(problem: Problem) -> Dim:
    """N of the first projection."""
    return problem.I * 2 if problem.gated else problem.I


def flops(problem: Problem) -> Dim:
    """Multiplications and additions of both expert GEMMs, ``2 R N H + 2 R I H``; routing, activation are left out."""
    return 2 * problem.R * problem.H * (projection_rows(problem) + problem.I)


def expected_experts(E: int, K: int, T: int) -> float:
    """Expected number of distinct experts that T tokens select when every K of E are equally likely.

    One token misses an expert with probability ``1 - K / E``, so ``E * (1 - (1 - K / E) ** T)``.
    """
    return E * (1.0 - (1.0 - min(K / E, 1.0)) ** T) if E else 0.0


def expert_bytes(problem: Problem) -> int:
    """Bytes of one expert's two weights, scales included."""
    scheme = SCHEMES[problem.scheme]
    H, I = int(problem.H), int(problem.I)
    total = 0
    for N, K in ((int(projection_rows(problem)), H), (H, I)):
        total += N * int(ceil_div(K, scheme.pack)) * scheme.weight_dtype.itemsize
        scale = scheme.weight_scale_shape(1, N, K)
        if scale is not None:
            total += 4 * int(scale[1]) * int(scale[2])
    return total


def bytes_moved(problem: Problem, experts: float | None = None) -> float:
    """Least traffic of the experts of a layer: weights of the distinct experts once, tokens in once, tokens out once.

    ``experts`` is the number of distinct experts when it is known; uniform routing is assumed otherwise.
    """
    if experts is None:
        experts = expected_experts(int(problem.E), int(problem.K), int(problem.T))
    return experts * expert_bytes(problem) + 2.0 * int(problem.T) * int(problem.H) * problem.dtype.itemsize


def _kind(problem: Problem) -> str:
    if SCHEMES[problem.scheme].quantizes_rows:
        return "fp8"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(problem.dtype, "tf32")


def roofline_us(problem: Problem, arch: Arch, experts: float | None = None) -> float:
    """Microseconds that no implementation can beat: the larger of memory time and compute time (see `bytes_moved`)."""
    memory = bytes_moved(problem, experts) / (arch.ceiling_tbps() * 1e6)
    compute = int(flops(problem)) / (arch.ceiling_tflops(_kind(problem)) * 1e6)
    return max(memory, compute)


def _no_flops(*args: Any, **kwargs: Any) -> int:
    """Operators that only move or rank data."""
    return 0


def _gemm_flops(x: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    """``2 * rows * N * K``. In the batched format every slot counts: how many are filled is known to the device
    alone.
    """
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * weight[1] * x[-1]


def _layer_flops(pairs: int, gate_up: Shape, down: Shape) -> int:
    return 2 * pairs * (gate_up[1] * down[1] + down[1] * down[2])


def _fused_experts_flops(hidden: Shape, gate_up: Shape, down: Shape, weights: Shape, *args: Any, **kwargs: Any) -> int:
    return _layer_flops(weights[0] * weights[1], gate_up, down)


def _fused_moe_flops(hidden: Shape, logits: Shape, gate_up: Shape, down: Shape, *args: Any, **kwargs: Any) -> int:
    return _layer_flops(hidden[0] * kwargs["top_k"], gate_up, down)


def _backward_flops(
    grad: Shape, hidden: Shape, gate_up: Shape, down: Shape, weights: Shape, *args: Any, **kwargs: Any
) -> int:
    """The recomputed first projection, the data gradients, and the weight gradients that are needed."""
    pairs = weights[0] * weights[1]
    first = 2 * pairs * gate_up[1] * down[1]
    second = 2 * pairs * down[1] * down[2]
    need_hidden, need_gate_up, need_down, need_weights, *_ = kwargs["needs"]
    data = first if need_hidden or (need_weights and kwargs.get("weight_on_input", False)) else 0
    return int(first + second + data + first * need_gate_up + second * need_down)


#: Formulas for ``torch.utils.flop_counter``: tensors arrive as shapes.
OP_FLOPS: dict[str, Callable[..., int]] = {
    "fused_topk": _no_flops,
    "moe_permute": _no_flops,
    "moe_unpermute": _no_flops,
    "batched_dispatch": _no_flops,
    "batched_combine": _no_flops,
    "quantize_rows": _no_flops,
    "quantize_batched": _no_flops,
    "grouped_mm_glu": _gemm_flops,
    "grouped_mm": _gemm_flops,
    "batched_mm_glu": _gemm_flops,
    "batched_mm": _gemm_flops,
    "fused_experts": _fused_experts_flops,
    "fused_experts_backward": _backward_flops,
    "fused_moe": _fused_moe_flops,
}
