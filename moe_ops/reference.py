"""Eager oracle of every operator, on CPU, as the papers write it: loops over tokens and experts, nothing clever.

The functions take what an operator's rule makes of its arguments. They accumulate in fp32, or in fp64 when the inputs
are fp64, so that upcast inputs give a gold result. They share no code with the CPU backend.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.blocks import blocks_on
from meta.calls import (
    CombineCall,
    DispatchCall,
    ExpertsCall,
    GatheredCall,
    GemmCall,
    GluCall,
    MoeCall,
    QuantizeCall,
    RouteCall,
    SumsCall,
    WgradCall,
)
from meta.dims import Problem, accumulation_dtype
from meta.operands import Operand, quantized
from meta.routing import route
from meta.schemes import SCHEMES
from moe_ops import counters, router_gradient

NAME = "reference"
SERVED_SCHEMES = frozenset(SCHEMES)  # each decodes and rounds by its row


def refuses(problem: Problem) -> str | None:
    """Only tensors in host memory are supported."""
    return None if problem.device_type == "cpu" else f"computes on cpu tensors, got {problem.device_type}"


def fused_topk(call: RouteCall) -> tuple[Tensor, Tensor]:
    """Router: the eager body of :mod:`meta.routing`."""
    return route(call.router_logits, call.correction_bias, **call.options._asdict())


fused_topk_backward = router_gradient.fused_topk_backward


def _local_expert(expert: int, expert_map: Tensor | None, num_experts: int) -> int:
    """Local id of a global id, or -1 when the pair contributes nothing."""
    if expert_map is not None:
        expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
    return expert if 0 <= expert < num_experts else -1


def _pairs(call: DispatchCall) -> list[tuple[int, int, int]]:
    """``(token, k, local expert)`` of every pair that counts, by expert, then by token and k, or by k and token."""
    pairs = [
        (token, k, _local_expert(int(call.topk_ids[token, k]), call.expert_map, call.num_experts))
        for token in range(call.topk_ids.shape[0])
        for k in range(call.topk_ids.shape[1])
    ]
    if call.slot_order == "choice":
        pairs.sort(key=lambda pair: pair[1])
    return sorted((pair for pair in pairs if pair[2] >= 0), key=lambda pair: pair[2])


def moe_permute(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once per selected expert, rows ordered by expert; dropped pairs leave zero rows at the end."""
    tokens, top_k = call.topk_ids.shape
    rows = call.hidden_states.new_zeros((tokens * top_k, call.hidden_states.shape[1]))
    counts = torch.zeros(call.num_experts, dtype=torch.int32)
    pair_to_row = torch.full((tokens, top_k), -1, dtype=torch.int32)
    for row, (token, k, expert) in enumerate(_pairs(call)):
        rows[row] = call.hidden_states[token]
        counts[expert] += 1
        pair_to_row[token, k] = row
    return rows, counts.cumsum(0, dtype=torch.int32), pair_to_row


def batched_dispatch(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token into the first free slot of each selected expert; pairs that find no slot are dropped."""
    capacity = call.capacity or 0
    batch = call.hidden_states.new_zeros((call.num_experts, capacity, call.hidden_states.shape[1]))
    counts = torch.zeros(call.num_experts, dtype=torch.int32)
    slots = torch.full(tuple(call.topk_ids.shape), -1, dtype=torch.int32)
    for token, k, expert in _pairs(call):
        slot = int(counts[expert])
        if slot < capacity:
            batch[expert, slot] = call.hidden_states[token]
            counts[expert] += 1
            slots[token, k] = expert * capacity + slot
    return batch, counts, slots


def moe_unpermute(call: CombineCall) -> Tensor:
    """``out[t] = sum over k of weight[t, k] * rows[place[t, k]]``, in the order of k, then ``+ added[t]``."""
    rows, places = call.rows.flatten(0, -2), call.places
    out = torch.zeros((places.shape[0], rows.shape[1]), dtype=accumulation_dtype(rows.dtype))
    for token in range(places.shape[0]):
        for k in range(places.shape[1]):
            row = int(places[token, k])
            if 0 <= row < rows.shape[0]:
                out[token] += call.topk_weights[token, k].to(out.dtype) * rows[row].to(out.dtype)
        if call.added is not None:
            out[token] += call.added[token].to(out.dtype)
    return out.to(rows.dtype)


batched_combine = moe_unpermute


def quantize_rows(call: QuantizeCall) -> tuple[Tensor, Tensor]:
    """Quantise activations as the scheme's row says; rows past the count hold whatever their input held."""
    stored = quantized(call.rows, SCHEMES[call.problem.scheme].rows)
    return stored.data, stored.scales[0]


quantize_batched = quantize_rows


def _wide(operand: Operand) -> Tensor:
    """The operand in the accumulation dtype."""
    value = operand.dequantized()
    return value.to(accumulation_dtype(value.dtype))


def _first_weight(gate_up: Operand, up: Operand | None) -> Tensor:
    """``[E, N, K]`` of the first projection; separate halves are stacked."""
    return _wide(gate_up) if up is None else torch.cat((_wide(gate_up), _wide(up)), dim=1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    y = x @ weight[expert].T
    return y if bias is None else y + bias[expert].to(y.dtype)


def _spans(call: GemmCall) -> list[tuple[int, int]]:
    """First and end row of every expert, among the rows of all."""
    extents = call.extents.tolist()
    if call.problem.format == "grouped":
        return list(pairwise([0, *extents]))
    capacity = call.x.data.shape[1]
    return [(e * capacity, e * capacity + min(count, capacity)) for e, count in enumerate(extents)]


def _expert_linears(call: GemmCall, weight: Tensor) -> Tensor:
    """``y[row] = W[expert of row] x[row] + b[expert of row]``, ``[R, N]``; rows of no expert are zero."""
    rows, spans = call.x, _spans(call)
    if rows.scheme is None:
        rows = quantized(rows.data, blocks_on(SCHEMES[call.problem.scheme], call.problem.arch))
    x = _wide(rows).flatten(0, -2)
    y = x.new_zeros((x.shape[0], weight.shape[1]))
    for expert, (start, end) in enumerate(spans):
        y[start:end] = _linear(x[start:end], weight, call.bias, expert)
    return y


def grouped_mm_glu(call: GluCall) -> tuple[Tensor, Tensor]:
    """First projection and activation of every row."""
    hidden = _expert_linears(call, _first_weight(call.weight, call.up))
    value = ACTIVATIONS[call.glu.activation].eager(*split_glu(hidden, call.glu.layout), call.glu.alpha, call.glu.limit)
    if counters.active:
        counters.count(call.weight.data, [end - start for start, end in _spans(call)])
    (sizes, dtype), _ = call.outputs
    if call.quantize_output:
        stored = quantized(value.view(sizes), SCHEMES[call.problem.scheme].rows)
        return stored.data, stored.scales[0]
    return value.reshape(sizes).to(dtype), torch.empty(0, dtype=torch.float32)


batched_mm_glu = grouped_mm_glu


def grouped_mm(call: GemmCall) -> Tensor:
    """One projection of every row."""
    return _expert_linears(call, _wide(call.weight)).view(call.outputs[0][0]).to(call.out_dtype)


batched_mm = grouped_mm


def _rows_of_tokens(
    tokens: Tensor, row_to_pair: Tensor | None, pair_to_row: Tensor | None, topk_weights: Tensor | None = None
) -> Tensor:
    """Rows in the accumulation dtype, copied one by one; ``tokens`` themselves without places."""
    wide = tokens.to(accumulation_dtype(tokens.dtype))
    if row_to_pair is None or pair_to_row is None:
        return wide
    rows, top_k = wide.new_zeros((row_to_pair.shape[0], wide.shape[1])), pair_to_row.shape[1]
    for row, pair in enumerate(row_to_pair.tolist()):
        if pair >= 0:
            weight = 1.0 if topk_weights is None else topk_weights[pair // top_k, pair % top_k].to(wide.dtype)
            rows[row] = wide[pair // top_k] * weight
    return rows


def gathered_mm(call: GatheredCall) -> Tensor:
    """:func:`grouped_mm` of rows that are copied first, and rounded where they are weighted."""
    rows = _rows_of_tokens(call.x.data, call.row_to_pair, call.pair_to_row, call.topk_weights)
    return grouped_mm(call.of_rows(rows.to(call.x.data.dtype)))


def grouped_wgrad(call: WgradCall) -> Tensor:
    """``out[e] = grad_rows[rows of e].T @ rows[rows of e]``."""
    given = {"grad_rows": call.grad_rows, "rows": call.rows}
    places = (call.row_to_pair, call.pair_to_row)
    wide = {
        name: _rows_of_tokens(rows, *(places if name == call.tokens else (None, None))) for name, rows in given.items()
    }
    ends = pairwise([0, *call.offsets.tolist()])
    products = [wide["grad_rows"][start:end].T @ wide["rows"][start:end] for start, end in ends]
    (sizes, dtype), *_ = call.outputs
    return torch.stack(products).to(dtype) if products else call.rows.new_empty(sizes)


def expert_sums(call: SumsCall) -> Tensor:
    """``out[e] = sum of rows[rows of e]``."""
    rows = _rows_of_tokens(call.rows, call.row_to_pair, call.pair_to_row, call.topk_weights)
    sums = [rows[start:end].sum(dim=0) for start, end in pairwise([0, *call.offsets.tolist()])]
    (sizes, dtype), *_ = call.outputs
    return torch.stack(sums) if sums else rows.new_empty(sizes, dtype=dtype)


def fused_experts(call: ExpertsCall) -> Tensor:
    """``out[t] = sum over k of w[t, k] * down_e(activation(gate_up_e(x[t])))``, e = topk_ids[t, k]; one pair at a
    time.
    """
    weights, glu, form = call.experts, call.experts.glu, call.experts.scheme.rows
    if call.hidden_states.scheme is None:
        form = blocks_on(weights.scheme, call.problem.arch) or form
    gate_up, down = _first_weight(weights.gate_up, weights.up), _wide(weights.down)
    body, dtype = ACTIVATIONS[glu.activation].eager, call.out_dtype

    def stored(x: Tensor, static: Tensor | None, expert: int) -> Tensor:
        """The value of ``x`` after the rounding that the scheme gives to activations."""
        if form is not None:
            calibrated = None if static is None else static[expert]
            return quantized(x.unsqueeze(0), form, calibrated).dequantized().squeeze(0)
        return x.to(dtype).to(gate_up.dtype)

    hidden_states = _wide(call.hidden_states)
    out = torch.zeros(tuple(hidden_states.shape), dtype=gate_up.dtype)
    counts = [0] * gate_up.shape[0]
    for token in range(call.topk_ids.shape[0]):
        for k in range(call.topk_ids.shape[1]):
            expert = _local_expert(int(call.topk_ids[token, k]), call.expert_map, len(counts))
            if expert < 0 or (call.capacity is not None and counts[expert] >= call.capacity):
                continue
            counts[expert] += 1
            x, weight = hidden_states[token].to(out.dtype), call.topk_weights[token, k].to(out.dtype)
            if call.weight_on_input:
                x, weight = (x * weight).to(dtype).to(out.dtype), torch.ones_like(weight)
            x = stored(x, weights.gate_up.static, expert) if call.hidden_states.scheme is None else x
            hidden = _linear(x, gate_up, weights.gate_up_bias, expert)
            value = body(*split_glu(hidden, glu.layout), glu.alpha, glu.limit)
            value = stored(value, weights.down.static, expert)
            out[token] += weight * _linear(value, down, weights.down_bias, expert)
    if counters.active:
        counters.count(weights.down.data, counts)
    return out.to(dtype)


def fused_moe(call: MoeCall) -> Tensor:
    """Router, then experts."""
    return fused_experts(call.routed(*fused_topk(call.route)))
