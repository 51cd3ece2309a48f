"""Triton kernels on NVIDIA GPUs (and, for tests, on the CPU under Triton's interpreter)."""

from __future__ import annotations

from typing import Any

import torch

from meta.arch import lacks
from meta.dims import Problem
from meta.schemes import SCHEMES
from moe_ops import plans
from moe_ops.backends.compose import ROUTING_OPTIONS, topk_then_experts
from moe_ops.kernels.triton import act_quant, batched_io, combine, permute, route, topk
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import batched_mm as launch_batched_mm
from moe_ops.kernels.triton.expert_mm import grouped_mm as launch_grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import Layer, fit, gpu_of, pdl_launches
from moe_ops.kernels.triton.util import INTERPRETED, unit_stride
from moe_ops.kernels.triton.wgrad import grouped_wgrad as grouped_wgrad
from moe_ops.plans import LayerKey

NAME = "triton"
SERVED_SCHEMES = frozenset({"bf16", "fp16", "fp32", "fp8_block128"})
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

OWN_PATHS = ("small", "grouped", "batched")

Tensor = torch.Tensor


def refuses(problem: Problem) -> str | None:
    """None when these kernels can run `problem`, else why not."""
    if problem.device_type != "cuda" and not INTERPRETED.value:
        return f"needs a CUDA device, got {problem.device_type}"
    if problem.dtype not in (*DTYPES, torch.float8_e4m3fn):
        return f"supports {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, got {problem.dtype}"
    if problem.scheme and SCHEMES[problem.scheme].quantizes_rows and (reason := lacks(problem.arch, "fp8")):
        return f"scheme {problem.scheme} {reason}"
    return lacks(problem.arch, "kernels")


def measured_faster(problem: Problem) -> str | None:
    """The backend whose tuned plan beat these kernels at this size, or None."""
    if problem.has_symbols or problem.device_type != "cuda" or problem.format != "grouped" or not problem.scheme:
        return None
    # The sizes are no symbols here.
    T, E, K, H, I = (int(size) for size in (problem.T, problem.E, problem.K, problem.H, problem.I))
    key = LayerKey(problem.scheme, "grouped", E, K, H, I, problem.gated)
    plan = plans.plan_for(key, plans.bucket(T), *gpu_of(torch.device("cuda")))
    return None if plan.path in OWN_PATHS else plan.path


# ---- routing and rows ----


def fused_topk(router_logits: Tensor, correction_bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    return topk.fused_topk(router_logits, correction_bias, **options, pdl=pdl_launches(router_logits.device))


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    offsets, _, pair_to_row = permute.sort_pairs(topk_ids, num_experts, expert_map)
    return permute.gather_rows(hidden_states, pair_to_row), offsets, pair_to_row


def moe_unpermute(rows: Tensor, pair_to_row: Tensor, topk_weights: Tensor) -> Tensor:
    return combine.combine(rows, pair_to_row, topk_weights)


def batched_dispatch(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, counts, slots = batched_io.dispatch(hidden_states, topk_ids, num_experts, capacity, expert_map)
    return batch, counts, slots


def batched_combine(batch: Tensor, slots: Tensor, topk_weights: Tensor) -> Tensor:
    return combine.combine(batch.flatten(0, 1), slots, topk_weights)


def quantize_rows(rows: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    return act_quant.quantize_rows(rows, scheme)


def quantize_batched(batch: Tensor, expert_num_tokens: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    return act_quant.quantize_batched(batch, expert_num_tokens, scheme)


# ---- single GEMMs ----


def _stage_mm(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows_scale: Tensor | None,
    weight_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    **epilogue: Any,
) -> ExpertMM:
    """The projection of a stage operator; a quantised input's result defaults to bf16."""
    if out_dtype is None:
        out_dtype = torch.bfloat16 if rows.dtype == torch.float8_e4m3fn else rows.dtype
    return ExpertMM(weight, out_dtype, bias=bias, rows_scale=rows_scale, weight_scale=weight_scale, **epilogue)


def _stage_tile(mm: ExpertMM, rows: int, scheme: str, device: torch.device) -> MMConfig:
    """Tile of GEMM 1 or GEMM 2 for `rows` rows spread over the experts."""
    up, down = plans.tiles(scheme, rows / mm.num_experts, gpu_of(device)[1])
    return fit(up, mm) if mm.activation else down


def grouped_mm_glu(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    rows_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    activation: str,
    alpha: float,
    limit: float,
    glu_layout: str,
    scheme: str,
    quantize_output: bool = False,
) -> tuple[Tensor, Tensor]:
    mm = _stage_mm(
        rows,
        weight,
        bias,
        rows_scale,
        weight_scale,
        None,
        glu_layout=glu_layout,
        activation=activation,
        alpha=alpha,
        limit=limit,
        quantize_output=quantize_output,
    )
    tile = _stage_tile(mm, rows.shape[0], scheme, rows.device)
    return launch_grouped_mm(unit_stride(rows), mm, offsets, tile, num_rows=rows.shape[0])


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    rows_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    scheme: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    mm = _stage_mm(rows, weight, bias, rows_scale, weight_scale, out_dtype)
    tile = _stage_tile(mm, rows.shape[0], scheme, rows.device)
    return launch_grouped_mm(unit_stride(rows), mm, offsets, tile, num_rows=rows.shape[0])[0]


def batched_mm_glu(
    batch: Tensor,
    weight: Tensor,
    expert_num_tokens: Tensor,
    bias: Tensor | None = None,
    batch_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    activation: str,
    alpha: float,
    limit: float,
    glu_layout: str,
    scheme: str,
    quantize_output: bool = False,
) -> tuple[Tensor, Tensor]:
    mm = _stage_mm(
        batch,
        weight,
        bias,
        batch_scale,
        weight_scale,
        None,
        glu_layout=glu_layout,
        activation=activation,
        alpha=alpha,
        limit=limit,
        quantize_output=quantize_output,
    )
    tile = _stage_tile(mm, batch.shape[0] * batch.shape[1], scheme, batch.device)
    return launch_batched_mm(batch.contiguous(), mm, expert_num_tokens, tile)


def batched_mm(
    batch: Tensor,
    weight: Tensor,
    expert_num_tokens: Tensor,
    bias: Tensor | None = None,
    batch_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    scheme: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    mm = _stage_mm(batch, weight, bias, batch_scale, weight_scale, out_dtype)
    tile = _stage_tile(mm, batch.shape[0] * batch.shape[1], scheme, batch.device)
    return launch_batched_mm(batch.contiguous(), mm, expert_num_tokens, tile)[0]


# ---- the whole layer ----


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *experts_tensors: Tensor | None,
    **options: Any,
) -> Tensor:
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    layer, plan = _layer(hidden_states, gate_up_proj, down_proj, topk_ids.shape[1], *experts_tensors, **options)
    return layer.run(plan, hidden_states, topk_weights, topk_ids)


def _layer(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    *_: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    glu_layout: str,
    weight_on_input: bool,
    scheme: str,
    format: str,
    capacity: int | None = None,
    backend: str | None = None,
) -> tuple[Layer, plans.Plan]:
    """A layer's experts, and the plan for this many tokens."""
    (T, H), dtype = hidden_states.shape, hidden_states.dtype
    epilogue: dict[str, Any] = {"glu_layout": glu_layout, "activation": activation, "alpha": alpha, "limit": limit}
    up = ExpertMM(gate_up_proj, dtype, bias=gate_up_bias, weight_scale=gate_up_scale, **epilogue)
    down = ExpertMM(down_proj, dtype, bias=down_bias, weight_scale=down_scale)
    key = LayerKey(scheme, format, up.num_experts, top_k, H, up.out_features, glu_layout != "none")
    gpu, sm = gpu_of(hidden_states.device)
    plan = plans.plan_for(key, plans.bucket(T), gpu, sm)
    if plan.path not in OWN_PATHS:
        plan = plans.rule(key, T, sm)
    return Layer(up, down, scheme, expert_map, weight_on_input, T if capacity is None else capacity), plan


_topk_then_experts = topk_then_experts(fused_topk, fused_experts)


def fused_moe(
    hidden_states: Tensor,
    router_logits: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    correction_bias: Tensor | None = None,
    *experts_tensors: Tensor | None,
    **options: Any,
) -> Tensor:
    (T, E), top_k = router_logits.shape, options["top_k"]
    if route.is_few(T, top_k, E) and not options["weight_on_input"]:
        of_experts = {name: value for name, value in options.items() if name not in ROUTING_OPTIONS}
        layer, plan = _layer(hidden_states, gate_up_proj, down_proj, top_k, *experts_tensors, **of_experts)
        if plan.path == "grouped":
            routing = {name: options[name] for name in ROUTING_OPTIONS}
            return layer.run_routed(plan, hidden_states, router_logits, correction_bias, **routing)
    tensors = (hidden_states, router_logits, gate_up_proj, down_proj, correction_bias, *experts_tensors)
    return _topk_then_experts(*tensors, **options)
