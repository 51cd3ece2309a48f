"""torch's own grouped GEMM (CUTLASS) between our routing, activation and combine kernels, on NVIDIA GPUs.

The GEMMs have no epilogue, so the activation is a kernel of its own and the gate_up rows make a trip to memory. Chosen
when asked for by name, or where a tuned plan measured it faster than the Triton GEMMs.
"""

from __future__ import annotations

import torch

from meta.arch import lacks
from meta.dims import Problem
from moe_ops import compat
from moe_ops.backends.compose import topk_then_experts
from moe_ops.kernels.triton import act_quant, combine, permute, topk

NAME = "torch_grouped"
SERVED_SCHEMES = frozenset({"bf16"})
ALIGNMENT = 16  # bytes: what the tensor maps of the CUTLASS kernel need of every stride

Tensor = torch.Tensor


def refuses(problem: Problem) -> str | None:
    """None when torch's grouped GEMM can run `problem`, else why not."""
    if problem.device_type != "cuda":
        return f"needs a CUDA device, got {problem.device_type}"
    if reason := lacks(problem.arch, "grouped_mm"):
        return reason
    if problem.has_bias:
        return "torch's grouped_mm takes no bias"
    if problem.format != "grouped":
        return "supports format 'grouped' only"
    if problem.weight_layout not in ("nk", "kn"):
        return "needs weights that are contiguous along N or K"
    if any(isinstance(width, int) and width * 2 % ALIGNMENT for width in (problem.H, problem.I)):
        return f"needs hidden and intermediate widths that are multiples of 8, got H={problem.H}, I={problem.I}"
    return None


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    *scales: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    glu_layout: str,
    weight_on_input: bool,
    scheme: str,
    format: str,
    capacity: int | None = None,
    backend: str | None = None,
) -> Tensor:
    if hidden_states.shape[0] == 0:
        return hidden_states.new_empty(hidden_states.shape)
    offsets, _, pair_to_row = permute.sort_pairs(topk_ids, gate_up_proj.shape[0], expert_map)
    rows = permute.gather_rows(hidden_states, pair_to_row, topk_weights if weight_on_input else None)
    h = compat.grouped_mm(rows, gate_up_proj.transpose(1, 2), offsets)
    h = act_quant.glu_rows(h, activation=activation, alpha=alpha, limit=limit, glu_layout=glu_layout, offsets=offsets)
    y = compat.grouped_mm(h, down_proj.transpose(1, 2), offsets)
    return combine.combine(y, pair_to_row, None if weight_on_input else topk_weights)


fused_moe = topk_then_experts(topk.fused_topk, fused_experts)
