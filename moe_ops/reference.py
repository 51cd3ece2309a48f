"""Eager oracle of every operator, on CPU, as the papers write it: loops over tokens and experts, nothing clever.

The functions have the operators' names and signatures and take validated, resolved arguments. They accumulate in fp32,
or in fp64 when the inputs are fp64, so that upcast inputs give a gold result. They share no code with the CPU backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.dims import Problem
from meta.routing import route
from meta.schemes import SCHEMES

NAME = "reference"
SERVED_SCHEMES = frozenset({"bf16", "fp16", "fp32", "fp64", "fp8_block128"})


def refuses(problem: Problem) -> str | None:
    """Only tensors in host memory are supported."""
    return None if problem.device_type == "cpu" else f"computes on cpu tensors, got {problem.device_type}"


def fused_topk(
    router_logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    routing: str = "softmax",
    renormalize: bool = True,
    renorm_eps: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Router: the eager body of :mod:`meta.routing`."""
    return route(
        router_logits,
        correction_bias,
        top_k=top_k,
        routing=routing,
        renormalize=renormalize,
        renorm_eps=renorm_eps,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scale=scale,
    )


def _local_expert(expert: int, expert_map: Tensor | None, num_experts: int) -> int:
    """Local id of a global id, or -1 when the pair contributes nothing."""
    if expert_map is not None:
        expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
    return expert if 0 <= expert < num_experts else -1


def _pairs(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> list[tuple[int, int, int]]:
    """``(token, k, local expert)`` of every pair that counts, by expert, then by pair index."""
    pairs = [
        (token, k, _local_expert(int(topk_ids[token, k]), expert_map, num_experts))
        for token in range(topk_ids.shape[0])
        for k in range(topk_ids.shape[1])
    ]
    return sorted((pair for pair in pairs if pair[2] >= 0), key=lambda pair: pair[2])


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once per selected expert, rows ordered by expert; dropped pairs leave zero rows at the end."""
    tokens, top_k = topk_ids.shape
    rows = hidden_states.new_zeros((tokens * top_k, hidden_states.shape[1]))
    counts = torch.zeros(num_experts, dtype=torch.int32)
    pair_to_row = torch.full((tokens, top_k), -1, dtype=torch.int32)
    for row, (token, k, expert) in enumerate(_pairs(topk_ids, expert_map, num_experts)):
        rows[row] = hidden_states[token]
        counts[expert] += 1
        pair_to_row[token, k] = row
    return rows, counts.cumsum(0, dtype=torch.int32), pair_to_row


def batched_dispatch(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token into the first free slot of each selected expert; pairs that find no slot are dropped."""
    batch = hidden_states.new_zeros((num_experts, capacity, hidden_states.shape[1]))
    counts = torch.zeros(num_experts, dtype=torch.int32)
    slots = torch.full(tuple(topk_ids.shape), -1, dtype=torch.int32)
    for token, k, expert in _pairs(topk_ids, expert_map, num_experts):
        slot = int(counts[expert])
        if slot < capacity:
            batch[expert, slot] = hidden_states[token]
            counts[expert] += 1
            slots[token, k] = expert * capacity + slot
    return batch, counts, slots


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def moe_unpermute(rows: Tensor, pair_to_row: Tensor, topk_weights: Tensor) -> Tensor:
    """``out[t] = sum over k of weight[t, k] * rows[pair_to_row[t, k]]``, in the order of k."""
    out = torch.zeros((pair_to_row.shape[0], rows.shape[1]), dtype=_accumulation_dtype(rows.dtype))
    for token in range(pair_to_row.shape[0]):
        for k in range(pair_to_row.shape[1]):
            row = int(pair_to_row[token, k])
            if 0 <= row < rows.shape[0]:
                out[token] += topk_weights[token, k].to(out.dtype) * rows[row].to(out.dtype)
    return out.to(rows.dtype)


def batched_combine(batch: Tensor, slots: Tensor, topk_weights: Tensor) -> Tensor:
    """As :func:`moe_unpermute`, from the slots of an expert batch."""
    return moe_unpermute(batch.flatten(0, 1), slots, topk_weights)


def quantize_rows(rows: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    """Quantise activations as the scheme's row says."""
    quantize = SCHEMES[scheme].quantize_rows
    if quantize is None:
        raise ValueError(f"quantize_rows: scheme must quantise activations, got {scheme!r}.")
    return quantize(rows)


def quantize_batched(batch: Tensor, expert_num_tokens: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    """Quantise every row of an expert batch; rows past the count hold whatever their input held."""
    return quantize_rows(batch, scheme=scheme)


def _activations(rows: Tensor, rows_scale: Tensor | None, scheme: str) -> Tensor:
    """Activations in the accumulation dtype."""
    dequantize = SCHEMES[scheme].dequantize_rows
    if rows_scale is not None and dequantize is not None:
        return dequantize(rows, rows_scale)
    return rows.to(_accumulation_dtype(rows.dtype))


def _weights(weight: Tensor, weight_scale: Tensor | None, scheme: str) -> Tensor:
    """Weights ``[E, N, K]`` in the accumulation dtype."""
    dequantize = SCHEMES[scheme].dequantize_weight
    if weight_scale is not None and dequantize is not None:
        return dequantize(weight, weight_scale)
    return weight.to(_accumulation_dtype(weight.dtype))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    y = x @ weight[expert].T
    return y if bias is None else y + bias[expert].to(y.dtype)


def _expert_linears(x: Tensor, weight: Tensor, bias: Tensor | None, spans: list[tuple[int, int, int]]) -> Tensor:
    """``y[row] = W[expert of row] x[row] + b[expert of row]``; rows of no expert are zero."""
    y = x.new_zeros((x.shape[0], weight.shape[1]))
    for expert, start, end in spans:
        y[start:end] = _linear(x[start:end], weight, bias, expert)
    return y


def _grouped_spans(offsets: Tensor) -> list[tuple[int, int, int]]:
    ends = offsets.tolist()
    return [(expert, start, end) for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]


def _batched_spans(capacity: int, counts: Tensor) -> list[tuple[int, int, int]]:
    return [(e, e * capacity, e * capacity + min(count, capacity)) for e, count in enumerate(counts.tolist())]


def _activate(
    hidden: Tensor,
    dtype: torch.dtype,
    activation: str,
    alpha: float,
    limit: float,
    glu_layout: str,
    scheme: str,
    quantize_output: bool,
) -> tuple[Tensor, Tensor]:
    value = ACTIVATIONS[activation].eager(*split_glu(hidden, glu_layout), alpha, limit)
    if quantize_output:
        return quantize_rows(value, scheme=scheme)
    return value.to(dtype), torch.empty(0)


def _output_dtype(rows: Tensor) -> torch.dtype:
    return torch.bfloat16 if rows.dtype == torch.float8_e4m3fn else rows.dtype


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
    """First projection and activation of every row."""
    x = _activations(rows, rows_scale, scheme)
    hidden = _expert_linears(x, _weights(weight, weight_scale, scheme), bias, _grouped_spans(offsets))
    dtype = _output_dtype(rows)
    return _activate(hidden, dtype, activation, alpha, limit, glu_layout, scheme, quantize_output)


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
    """One projection of every row."""
    x = _activations(rows, rows_scale, scheme)
    y = _expert_linears(x, _weights(weight, weight_scale, scheme), bias, _grouped_spans(offsets))
    return y.to(out_dtype)


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
    """First projection and activation of the counted rows of every expert."""
    experts, capacity, _ = batch.shape
    x = _activations(batch, batch_scale, scheme).flatten(0, 1)
    spans = _batched_spans(capacity, expert_num_tokens)
    hidden = _expert_linears(x, _weights(weight, weight_scale, scheme), bias, spans)
    hidden = hidden.unflatten(0, (experts, capacity))
    dtype = _output_dtype(batch)
    return _activate(hidden, dtype, activation, alpha, limit, glu_layout, scheme, quantize_output)


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
    """One projection of the counted rows of every expert."""
    experts, capacity, _ = batch.shape
    x = _activations(batch, batch_scale, scheme).flatten(0, 1)
    spans = _batched_spans(capacity, expert_num_tokens)
    y = _expert_linears(x, _weights(weight, weight_scale, scheme), bias, spans)
    batch_out: Tensor = y.unflatten(0, (experts, capacity))
    return batch_out.to(out_dtype)


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
    """``out[t] = sum over k of w[t, k] * down_e(activation(gate_up_e(x[t])))``, e = topk_ids[t, k]; one pair at a
    time.
    """
    gate_up, down = _weights(gate_up_proj, gate_up_scale, scheme), _weights(down_proj, down_scale, scheme)
    body = ACTIVATIONS[activation].eager

    def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
        """The value of ``x`` after the rounding that the scheme gives to activations."""
        if SCHEMES[scheme].quantizes_rows:
            return _activations(*quantize_rows(x.unsqueeze(0), scheme=scheme), scheme).squeeze(0)
        return x.to(dtype).to(gate_up.dtype)

    out = torch.zeros(tuple(hidden_states.shape), dtype=gate_up.dtype)
    counts = [0] * gate_up_proj.shape[0]
    for token in range(topk_ids.shape[0]):
        for k in range(topk_ids.shape[1]):
            expert = _local_expert(int(topk_ids[token, k]), expert_map, len(counts))
            if expert < 0 or (capacity is not None and counts[expert] >= capacity):
                continue
            counts[expert] += 1
            x, weight = hidden_states[token].to(out.dtype), topk_weights[token, k].to(out.dtype)
            if weight_on_input:
                x, weight = (x * weight).to(hidden_states.dtype).to(out.dtype), torch.ones_like(weight)
            hidden = _linear(stored(x, hidden_states.dtype), gate_up, gate_up_bias, expert)
            value = body(*split_glu(hidden, glu_layout), alpha, limit)
            out[token] += weight * _linear(stored(value, hidden_states.dtype), down, down_bias, expert)
    return out.to(hidden_states.dtype)


def fused_moe(
    hidden_states: Tensor,
    router_logits: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    correction_bias: Tensor | None = None,
    *tensors: Tensor | None,
    top_k: int,
    routing: str = "softmax",
    renormalize: bool = True,
    renorm_eps: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    **experts: Any,
) -> Tensor:
    """Router, then experts; ``tensors`` and ``experts`` are those of :func:`fused_experts` from ``gate_up_bias`` on."""
    topk_weights, topk_ids = fused_topk(
        router_logits,
        correction_bias,
        top_k=top_k,
        routing=routing,
        renormalize=renormalize,
        renorm_eps=renorm_eps,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scale=scale,
    )
    return fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids, *tensors, **experts)
