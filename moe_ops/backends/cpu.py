"""CPU backend: a product for each pair where pairs rarely share an expert; else the first rows of every expert in one
batched GEMM where experts are short (`kernels.cpu.padded_length` decides), one GEMM for the other rows of each expert
that has any. fp32 activation and combine.

Experts without rows are never touched. Reading the row counts is free on the CPU, so ``.tolist()`` is used here, and
only here. Weights may have any strides; fp8 weights are dequantised expert by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta.dims import Problem
from meta.routing import route
from meta.schemes import SCHEMES
from moe_ops.backends.compose import topk_then_experts
from moe_ops.kernels.cpu import (
    Span,
    accumulation_dtype,
    activate,
    batched_spans,
    combine,
    combine_dropping,
    dequantize_rows,
    grouped_spans,
    in_pair_order,
    lay_out,
    linear,
    padded_length,
    product,
    sort_pairs,
)
from moe_ops.pairs import local_ids, places

NAME = "cpu"
SERVED_SCHEMES = frozenset({"bf16", "fp16", "fp32", "fp64", "fp8_block128"})


def refuses(problem: Problem) -> str | None:
    """Everything in host memory is accepted."""
    return None if problem.device_type == "cpu" else f"computes on cpu tensors, got {problem.device_type}"


def fused_topk(router_logits: Tensor, correction_bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The vectorised router of :mod:`meta.routing`."""
    return route(router_logits, correction_bias, **options)


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert and gather their tokens; rows of dropped pairs come last."""
    ids = local_ids(topk_ids, expert_map, num_experts)
    counts, order, rank = places(ids, num_experts)
    ends = counts.cumsum(0)
    starts = torch.cat((ends - counts, ends.new_zeros(1)))
    pair_to_row = (starts[ids] + rank).masked_fill(ids == num_experts, -1)
    rows = hidden_states.index_select(0, order // max(topk_ids.shape[1], 1))
    return rows, ends.int(), pair_to_row.int().view(topk_ids.shape)


def batched_dispatch(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy every kept pair's token to slot ``expert * C + rank``."""
    ids = local_ids(topk_ids, expert_map, num_experts)
    counts, _, rank = places(ids, num_experts)
    kept = (ids < num_experts) & (rank < capacity)
    slots = (ids * capacity + rank).masked_fill(~kept, -1)
    batch = hidden_states.new_zeros((num_experts * capacity, hidden_states.shape[1]))
    pairs = kept.nonzero().squeeze(1)
    batch[slots[pairs]] = hidden_states[pairs // max(topk_ids.shape[1], 1)]
    batch = batch.view(num_experts, capacity, hidden_states.shape[1])
    return batch, counts.clamp(max=capacity).int(), slots.int().view(topk_ids.shape)


def moe_unpermute(rows: Tensor, pair_to_row: Tensor, topk_weights: Tensor) -> Tensor:
    """Weighted sum over k, in the order of k."""
    places_TK = pair_to_row.long()
    dropped_TK = (places_TK < 0) | (places_TK >= rows.shape[0])
    if not bool(dropped_TK.any()):
        return combine(rows, places_TK, topk_weights)
    return combine_dropping(rows, places_TK, dropped_TK, topk_weights)


def batched_combine(batch: Tensor, slots: Tensor, topk_weights: Tensor) -> Tensor:
    """Weighted sum over k of the slots' rows."""
    return moe_unpermute(batch.flatten(0, 1), slots, topk_weights)


def quantize_rows(rows: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    """The scheme's own body."""
    quantize = SCHEMES[scheme].quantize_rows
    if quantize is None:
        raise ValueError(f"quantize_rows: scheme must quantise activations, got {scheme!r}.")
    return quantize(rows)


def quantize_batched(batch: Tensor, expert_num_tokens: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    """Quantise the whole batch; rows past the count are not read by anyone."""
    return quantize_rows(batch, scheme=scheme)


def _glu(
    rows: Tensor,
    weight: Tensor,
    spans: list[Span],
    bias: Tensor | None,
    rows_scale: Tensor | None,
    weight_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    glu_layout: str,
    scheme: str,
    quantize_output: bool,
) -> tuple[Tensor, Tensor]:
    out_dtype = torch.bfloat16 if SCHEMES[scheme].quantizes_rows else rows.dtype
    x = dequantize_rows(rows, rows_scale, scheme)
    value = activate(linear(x, weight, bias, weight_scale, spans, scheme), activation, alpha, limit, glu_layout)
    if quantize_output:
        return quantize_rows(value, scheme=scheme)
    return value.to(out_dtype).contiguous(), torch.empty(0)


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
    glu_layout: str = "concat",
    scheme: str,
    quantize_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """First projection and activation of sorted rows."""
    tensors = (rows, weight, grouped_spans(offsets), bias, rows_scale, weight_scale)
    return _glu(*tensors, activation, alpha, limit, glu_layout, scheme, quantize_output)


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
    out_dtype: torch.dtype,
) -> Tensor:
    """One projection of sorted rows."""
    x = dequantize_rows(rows, rows_scale, scheme)
    return linear(x, weight, bias, weight_scale, grouped_spans(offsets), scheme).to(out_dtype)


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
    glu_layout: str = "concat",
    scheme: str,
    quantize_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """First projection and activation of the counted rows of an expert batch."""
    experts, capacity, _ = batch.shape
    scale = None if batch_scale is None else batch_scale.flatten(0, 1)
    tensors = (batch.flatten(0, 1), weight, batched_spans(capacity, expert_num_tokens), bias, scale, weight_scale)
    value, value_scale = _glu(*tensors, activation, alpha, limit, glu_layout, scheme, quantize_output)
    if quantize_output:
        value_scale = value_scale.view(experts, capacity, value_scale.shape[1])
    return value.view(experts, capacity, value.shape[1]), value_scale


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
    out_dtype: torch.dtype,
) -> Tensor:
    """One projection of the counted rows of an expert batch."""
    experts, capacity, _ = batch.shape
    x = dequantize_rows(batch, batch_scale, scheme).flatten(0, 1)
    out = linear(x, weight, bias, weight_scale, batched_spans(capacity, expert_num_tokens), scheme)
    return out.to(out_dtype).view(experts, capacity, out.shape[1])


def grouped_wgrad(grad_rows: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """``out[e] = grad_rows[rows of e].T @ rows[rows of e]``, ``[E, N, K]``; zero for experts without rows."""
    out = grad_rows.new_zeros((offsets.shape[0], grad_rows.shape[1], rows.shape[1]))
    for expert, start, end in grouped_spans(offsets):
        out[expert] = product(grad_rows[start:end].t(), rows[start:end])
    return out


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_global_scale: Tensor | None = None,
    down_global_scale: Tensor | None = None,
    gate_up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    *,
    activation: str,
    alpha: float,
    limit: float,
    glu_layout: str = "concat",
    weight_on_input: bool = False,
    scheme: str,
    format: str = "grouped",
    capacity: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Both formats in the same rows: the batched format differs by the pairs that its capacity drops, and in nothing
    else.
    """
    experts, pairs, top_k = gate_up_proj.shape[0], topk_ids.numel(), topk_ids.shape[1]
    row = SCHEMES[scheme]
    simple = expert_map is None and row.dequantize_weight is None and not weight_on_input
    layout = in_pair_order(topk_ids, experts) if simple and (capacity is None or capacity >= pairs) else None
    length, kept = 0, pairs
    if layout is None:
        order, counts = sort_pairs(topk_ids, expert_map, experts, capacity)
        length = padded_length(counts, gate_up_proj) if row.dequantize_weight is None else 0
        kept = sum(counts)
        layout = lay_out(order, counts, pairs, length)
    pair_of_row, row_of_pair, spans = layout
    x = hidden_states.index_select(0, pair_of_row // max(top_k, 1))
    if weight_on_input:
        row_weights = topk_weights.reshape(-1, 1).index_select(0, pair_of_row)
        x = (x.to(accumulation_dtype(x.dtype)) * row_weights).to(x.dtype)
    if row.quantizes_rows:
        x = dequantize_rows(*quantize_rows(x, scheme=scheme), scheme)
    hidden = linear(x, gate_up_proj, gate_up_bias, gate_up_scale, spans, scheme, length)
    value = activate(hidden, activation, alpha, limit, glu_layout)
    value = dequantize_rows(*quantize_rows(value, scheme=scheme), scheme) if row.quantizes_rows else value.to(x.dtype)
    rows = linear(value, down_proj, down_bias, down_scale, spans, scheme, length)
    places_TK, weights_TK = row_of_pair.view(topk_ids.shape), None if weight_on_input else topk_weights
    if kept == pairs:
        return combine(rows, places_TK, weights_TK).to(hidden_states.dtype)
    return combine_dropping(rows, places_TK, places_TK == rows.shape[0], weights_TK).to(hidden_states.dtype)


fused_moe = topk_then_experts(fused_topk, fused_experts)
