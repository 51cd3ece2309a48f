"""CPU backend: a product for each pair where pairs rarely share an expert; else the first rows of every expert in one
batched GEMM (`kernels.cpu_costs` decides how many), one GEMM for the other rows of each expert that has any.
fp32 activation and combine.

Experts without rows are never touched. Reading the row counts is free on the CPU, so ``.tolist()`` is used here, and
only here. Weights may have any strides; fp8 weights are dequantised expert by expert.
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
from meta.operands import Experts, quantized
from meta.routing import route
from meta.schemes import SCHEMES
from moe_ops import counters, router_gradient
from moe_ops import rows as plain
from moe_ops.kernels.cpu import (
    Layout,
    Lot,
    Room,
    Span,
    batched_spans,
    first_projection,
    grouped_spans,
    in_lots,
    linear,
    of_few,
    product,
    rows_of_experts,
    scale_of_rows,
    sort_pairs,
)
from moe_ops.kernels.cpu_combine import combine, combine_dropping, combine_pairs
from moe_ops.pairs import local_ids, places

NAME = "cpu"
_FEW_ELEMENTS = 2**15  # of all rows: glibc has as much memory at hand, in as many pieces as may be
SERVED_SCHEMES = frozenset(SCHEMES)  # each decodes and rounds by its row


def refuses(problem: Problem) -> str | None:
    """Everything in host memory is accepted."""
    return None if problem.device_type == "cpu" else f"computes on cpu tensors, got {problem.device_type}"


def fused_topk(call: RouteCall) -> tuple[Tensor, Tensor]:
    """The vectorised router of :mod:`meta.routing`."""
    return route(call.router_logits, call.correction_bias, **call.options._asdict())


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
    rows = call.rows.flatten(0, -2)
    places_TK = call.places.long()
    dropped_TK = (places_TK < 0) | (places_TK >= rows.shape[0])
    if not bool(dropped_TK.any()):
        return combine(rows, places_TK, call.topk_weights, call.added)
    return combine_dropping(rows, places_TK, dropped_TK, call.topk_weights, call.added)


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
    out = linear(rows, call.weight, call.bias, spans).to(call.out_dtype)
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
    lots, row_of_pair, dropped = _layout(call)
    total = lots[-1].rows.stop
    if len(lots) == 1:
        rows = _rows(call, weights, lots[0], None)
    else:
        dtype = torch.float32 if weights.scheme.quantized else call.hidden_states.data.dtype
        rows = torch.empty((total, weights.down.data.shape[1]), dtype=dtype)
        for lot in lots:
            _rows(call, weights.of_experts(lot.experts), lot, rows[lot.rows])
    weights_TK = None if call.weight_on_input else call.topk_weights
    if row_of_pair is None:
        return combine_pairs(rows, weights_TK, topk_ids.shape[0]).to(call.out_dtype)
    places_TK = row_of_pair.view(topk_ids.shape)
    if not dropped:
        return combine(rows, places_TK, weights_TK).to(call.out_dtype)
    return combine_dropping(rows, places_TK, places_TK == total, weights_TK).to(call.out_dtype)


def _layout(call: ExpertsCall) -> Layout:
    """Rows of all pairs; experts' loads are counted here."""
    weights, topk_ids, capacity = call.experts, call.topk_ids, call.capacity
    experts, pairs = int(weights.count), topk_ids.numel()
    if call.expert_map is None and not weights.scheme.quantized and (capacity is None or capacity >= pairs):
        few = of_few(topk_ids, weights.gate_up.data)
        if few is not None:
            if counters.active:
                counters.count(weights.down.data, topk_ids.reshape(-1).bincount(minlength=experts).tolist())
            return few
    order, expert_of_pair, counts = sort_pairs(topk_ids, call.expert_map, experts, capacity)
    if counters.active:
        counters.count(weights.down.data, counts)
    return in_lots(order, expert_of_pair, counts, pairs, weights.gate_up.data)


def fused_moe(call: MoeCall) -> Tensor:
    """The router, then the experts."""
    return fused_experts(call.routed(*fused_topk(call.route)))


def _rows(call: ExpertsCall, weights: Experts, lot: Lot, out: Tensor | None) -> Tensor:
    """Results of a lot's experts, by row, padding included.

    Args:
        weights: of these experts; out: where to write them, or None, for memory of the function's own.
    """
    form, spans, length = weights.scheme.rows, lot.spans, lot.length
    tokens, top_k, number = call.hidden_states.dequantized(), call.topk_ids.shape[1], lot.rows.stop - lot.rows.start
    few = number * tokens.shape[1] <= _FEW_ELEMENTS
    room = None if few or weights.scheme.quantized else _room(weights, tokens, number)
    if lot.pair_of_row is None:
        x = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(number, tokens.shape[1])
    else:
        memory = None if room is None else room.take(tokens.shape[1], tokens.dtype)
        x = torch.index_select(tokens, 0, lot.pair_of_row // max(top_k, 1), out=memory)
    if call.weight_on_input:
        of_pairs = call.topk_weights.reshape(-1, 1)
        row_weights = of_pairs if lot.pair_of_row is None else of_pairs.index_select(0, lot.pair_of_row)
        x = (x.to(accumulation_dtype(x.dtype)) * row_weights).to(x.dtype)
    if call.hidden_states.scheme is None:
        x = quantized(x, form, scale_of_rows(weights.gate_up.static, spans)).dequantized()
    x = x.float() if weights.scheme.quantized else x
    value = first_projection(x, weights.gate_up, weights.up, weights.gate_up_bias, weights.glu, spans, length, room)
    if form is not None:
        value = quantized(value, form, scale_of_rows(weights.down.static, spans)).dequantized()
    if out is None and lot.pair_of_row is not None and weights.down.data.shape[1] == x.shape[1]:
        out = x  # copies of tokens, which are read by now
    return linear(value, weights.down, weights.down_bias, spans, length, out)


def _room(weights: Experts, tokens: Tensor, rows: int) -> Room:
    """For so many tokens' rows, the first product's results, and those of the activation."""
    first = [weight.data.shape[1] for weight in (weights.gate_up, weights.up) if weight is not None]
    columns = (tokens.shape[1], *first, weights.down.data.shape[2])
    return Room(rows, *((number, tokens.dtype) for number in columns))
