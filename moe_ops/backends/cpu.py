"""CPU backend: layers of weights that are multiplied as they are stored in C++ (`kernels/cpu.cpp`); all else expert by
expert, activated, combined and routed in C++ where that knows how. fp32 activation and combine; products of bf16
weights are bf16, all others fp32 (fp64 for fp64).

Experts without rows are never touched. Reading the row counts is free on the CPU, so ``.tolist()`` is used here, and
only here. Weights may have any strides; quantised weights are dequantised expert by expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from meta.operands import quantized
from meta.routing import route
from meta.schemes import SCHEMES
from moe_ops import counters, router_gradient
from moe_ops import rows as plain
from moe_ops.kernels import cpu_native
from moe_ops.kernels.cpu import (
    Span,
    batched_spans,
    combine,
    first_projection,
    grouped_spans,
    linear,
    product,
    rows_of_experts,
    scale_of_rows,
    sort_pairs,
    sorted_spans,
)
from moe_ops.pairs import local_ids, places

NAME = "cpu"
SERVED_SCHEMES = frozenset(SCHEMES)  # each decodes and rounds by its row


def refuses(problem: Problem) -> str | None:
    """Everything in host memory is accepted."""
    return None if problem.device_type == "cpu" else f"computes on cpu tensors, got {problem.device_type}"


def fused_topk(call: RouteCall) -> tuple[Tensor, Tensor]:
    """By torch's softmax, whose bits a router written out has, and C++ in place of sorting."""
    return route(call.router_logits, call.correction_bias, select=cpu_native.selected, **call.options._asdict())


fused_topk_backward = router_gradient.fused_topk_backward


def moe_permute(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert and gather their tokens; rows of dropped pairs come last."""
    ids = local_ids(call.topk_ids, call.expert_map, call.num_experts)
    counts, order, rank = places(ids, call.num_experts)
    ends = counts.cumsum(0)
    starts = torch.cat((ends - counts, ends.new_zeros(1)))
    pair_to_row = (starts[ids] + rank).masked_fill(ids == call.num_experts, -1)
    rows = call.hidden_states.index_select(0, order // max(call.topk_ids.shape[1], 1))
    return rows, ends.int(), pair_to_row.int().view(call.topk_ids.shape)


def batched_dispatch(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    """Copy every kept pair's token to slot ``expert * C + rank``."""
    experts, capacity, hidden_states = call.num_experts, call.capacity or 0, call.hidden_states
    tokens, top_k = call.topk_ids.shape
    ids = local_ids(call.topk_ids, call.expert_map, experts)
    if call.slot_order == "choice":
        counts, _, rank = places(ids.view(tokens, top_k).t().reshape(-1), experts)
        rank = rank.view(top_k, tokens).t().reshape(-1)
    else:
        counts, _, rank = places(ids, experts)
    kept = (ids < experts) & (rank < capacity)
    slots = (ids * capacity + rank).masked_fill(~kept, -1)
    batch = hidden_states.new_zeros((experts * capacity, hidden_states.shape[1]))
    pairs = kept.nonzero().squeeze(1)
    batch[slots[pairs]] = hidden_states[pairs // max(top_k, 1)]
    batch = batch.view(experts, capacity, hidden_states.shape[1])
    return batch, counts.clamp(max=capacity).int(), slots.int().view(call.topk_ids.shape)


def moe_unpermute(call: CombineCall) -> Tensor:
    """Weighted sum over k, in the order of k."""
    return combine(call.rows.flatten(0, -2), call.places.long(), call.topk_weights, call.added)


batched_combine = moe_unpermute


def quantize_rows(call: QuantizeCall) -> tuple[Tensor, Tensor]:
    """The scheme's own body; rows past the count are not read by anyone."""
    stored = quantized(call.rows, SCHEMES[call.problem.scheme].rows)
    return stored.data, stored.scales[0]


quantize_batched = quantize_rows


def _rows_and_spans(call: GemmCall) -> tuple[Tensor, list[Span]]:
    """Rows ``[R, K]`` of either format as a product takes them, and whose they are."""
    rows = call.x.dequantized()
    rows = rows.float() if call.weight.scales else rows
    if call.problem.format == "grouped":
        return rows, grouped_spans(call.extents, rows.shape[0])
    return rows.flatten(0, 1), batched_spans(rows.shape[1], call.extents)


def grouped_mm_glu(call: GluCall) -> tuple[Tensor, Tensor]:
    """First projection and activation."""
    rows, spans = _rows_and_spans(call)
    value = first_projection(rows, call.weight, call.up, call.bias, call.glu, spans)
    if counters.active:
        counters.count(call.weight.data, rows_of_experts(spans, call.weight.data.shape[0]))
    (sizes, dtype), _ = call.outputs
    if call.quantize_output:
        stored = quantized(value, SCHEMES[call.problem.scheme].rows)
        scale = stored.scales[0]
        return stored.data.view(sizes), scale.view(*sizes[:-1], scale.shape[1])
    result = torch.empty(sizes, dtype=dtype)
    result.view(value.shape).copy_(value)  # of which the activation may have left columns between
    return result, torch.empty(0, dtype=torch.float32)


batched_mm_glu = grouped_mm_glu


def grouped_mm(call: GemmCall) -> Tensor:
    """One projection."""
    rows, spans = _rows_and_spans(call)
    wide = call.out_dtype.itemsize > rows.dtype.itemsize
    out = linear(rows, call.weight, call.bias, spans, wide=wide).to(call.out_dtype)
    return out.view(call.outputs[0][0])


batched_mm = grouped_mm


def gathered_mm(call: GatheredCall) -> Tensor:
    """A product of copies."""
    rows = plain.gather_rows(call.x.data, call.row_to_pair, call.pair_to_row, call.topk_weights)
    return grouped_mm(call.of_rows(rows))


def grouped_wgrad(call: WgradCall) -> Tensor:
    """``out[e] = grad_rows[rows of e].T @ rows[rows of e]``; zero for experts without rows."""
    ((sizes, _),), grad, rows = call.outputs, call.grad_rows, call.rows
    out = rows.new_zeros(sizes)
    if call.row_to_pair is not None and call.pair_to_row is not None:
        places = (call.row_to_pair, call.pair_to_row)
        if call.tokens == "rows":
            rows = plain.gather_rows(rows, *places)
        else:
            grad = plain.gather_rows(grad, *places)
    for expert, start, end in grouped_spans(call.offsets, rows.shape[0]):
        out[expert] = product(grad[start:end].t(), rows[start:end])
    return out


def expert_sums(call: SumsCall) -> Tensor:
    """Sums in the accumulation dtype; zero for experts without rows."""
    ((sizes, wide),), rows = call.outputs, call.rows
    if call.row_to_pair is not None and call.pair_to_row is not None:
        rows = plain.gather_rows(rows.to(wide), call.row_to_pair, call.pair_to_row, call.topk_weights)
    out = call.rows.new_zeros(sizes, dtype=wide)
    for expert, start, end in grouped_spans(call.offsets, rows.shape[0]):
        out[expert] = rows[start:end].sum(dim=0, dtype=wide)
    return out


def fused_experts(call: ExpertsCall) -> Tensor:
    """Of either format: both in the same rows, as the batched format differs by the pairs that its capacity drops, and
    in nothing else.
    """
    weights, topk_ids = call.experts, call.topk_ids
    if int(weights.count) == 0:
        return call.hidden_states.data.new_zeros(call.outputs[0][0], dtype=call.out_dtype)
    out = cpu_native.experts(call)
    if out is not None:
        return out.to(call.out_dtype)
    pairs, counts = sort_pairs(topk_ids, call.expert_map, int(weights.count), call.capacity)
    if counters.active:
        counters.count(weights.down.data, counts)
    rows = _rows(call, pairs, sorted_spans(counts))
    places = torch.full((topk_ids.numel(),), -1).scatter_(0, pairs, torch.arange(len(pairs)))
    weights_TK = None if call.weight_on_input else call.topk_weights
    return combine(rows, places.view(topk_ids.shape), weights_TK).to(call.out_dtype)


def _rows(call: ExpertsCall, pairs: Tensor, spans: list[Span]) -> Tensor:
    """The experts' results for sorted pairs."""
    weights, form = call.experts, call.experts.scheme.rows
    x = call.hidden_states.dequantized().index_select(0, pairs // max(call.topk_ids.shape[1], 1))
    if call.weight_on_input:
        row_weights = call.topk_weights.reshape(-1, 1).index_select(0, pairs)
        x = (x.to(accumulation_dtype(x.dtype)) * row_weights).to(x.dtype)
    if call.hidden_states.scheme is None:
        x = quantized(x, form, scale_of_rows(weights.gate_up.static, spans)).dequantized()
    x = x.float() if weights.scheme.quantized else x
    value = first_projection(x, weights.gate_up, weights.up, weights.gate_up_bias, weights.glu, spans)
    if form is not None:
        value = quantized(value, form, scale_of_rows(weights.down.static, spans)).dequantized()
    return linear(value, weights.down, weights.down_bias, spans)


def fused_moe(call: MoeCall) -> Tensor:
    """The router, then the experts."""
    return fused_experts(call.routed(*fused_topk(call.route)))
