"""Arithmetic of the CPU backend in plain tensor code: pairs by expert, a product for each of them; activation and
combination in fp32, both in C++ where that knows how.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.dims import accumulation_dtype
from meta.operands import Glu, Operand
from moe_ops.kernels import cpu_native
from moe_ops.pairs import drop_overflow, local_ids, places

#: ``(expert, first row, end row)`` of an expert that has rows.
Span = tuple[int, int, int]


def grouped_spans(offsets: Tensor, rows: int) -> list[Span]:
    """Spans of so many sorted rows from cumulative ends, whatever the data says."""
    ends = [min(max(end, 0), rows) for end in offsets.tolist()]
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]


def batched_spans(capacity: int, counts: Tensor) -> list[Span]:
    """Spans of a flattened expert batch; a count above the capacity stops at it."""
    return [(e, e * capacity, e * capacity + min(n, capacity)) for e, n in enumerate(counts.tolist()) if n > 0]


def sorted_spans(counts: list[int]) -> list[Span]:
    """Spans of rows sorted by expert, from the rows of every expert."""
    ends = accumulate(counts)
    return [(e, end - count, end) for e, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]


def rows_of_experts(spans: list[Span], num_experts: int) -> list[int]:
    """How many rows every expert has."""
    rows = [0] * num_experts
    for expert, start, end in spans:
        rows[expert] += end - start
    return rows


def sort_pairs(
    topk_ids: Tensor, expert_map: Tensor | None, num_experts: int, capacity: int | None
) -> tuple[Tensor, list[int]]:
    """(pairs by expert, in pair order, without the dropped ones; how many each expert has).

    Dropped: ids outside of ``[0, E)``, and what an expert has past its capacity.
    """
    ids = local_ids(topk_ids, expert_map, num_experts)
    if capacity is not None:
        ids = drop_overflow(ids, num_experts, capacity)
    counted, order, _ = places(ids, num_experts)
    counts = counted.tolist()
    return order[: sum(counts)], counts


def scale_of_rows(static: Tensor | None, spans: list[Span]) -> Tensor | None:
    """``[R, 1]`` of the scales ``[E, 1, 1]`` of the experts, for rows that are in ``spans``, one after the other."""
    if static is None:
        return None
    experts, lengths = ([span[0] for span in spans], [end - start for _, start, end in spans])
    of_rows = torch.tensor(experts, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return static.reshape(-1, 1).index_select(0, of_rows)


def linear(x: Tensor, operand: Operand, bias: Tensor | None, spans: list[Span], *, wide: bool = False) -> Tensor:
    """``[R, N]`` from ``x [R, K]``: a product for each span. Rows in none are zero, so that results repeat.

    In the dtype of ``x``, as torch rounds products on a CPU; but in the accumulation dtype of fp16, whose numbers end
    at 65504, beside a bias in that, and where ``wide``.
    """
    wide = wide or x.dtype == torch.float16 or (bias is not None and bias.dtype != x.dtype)
    dtype = accumulation_dtype(x.dtype) if wide else x.dtype
    result = x.new_zeros((x.shape[0], operand.data.shape[1]), dtype=dtype)
    x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    for expert, start, end in spans:
        weight = (operand.of_expert(expert) if operand.scales else operand.data[expert]).to(dtype)
        if bias is None:
            torch.mm(x[start:end], weight.t(), out=result[start:end])
        else:
            torch.addmm(bias[expert], x[start:end], weight.t(), out=result[start:end])
    return result


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x [M, K] @ matrix [K, N]``, of fp16 in fp32, by which few CPUs multiply and whose numbers end at 65504."""
    return x.float() @ matrix.float() if x.dtype == torch.float16 else x @ matrix


def first_projection(
    x: Tensor, gate_up: Operand, up: Operand | None, bias: Tensor | None, glu: Glu, spans: list[Span]
) -> Tensor:
    """The activated ``[R, I]`` in the dtype of ``x``; the weights are stacked, or two beside each other."""
    if up is None:
        results = [linear(x, gate_up, bias, spans)]
    else:
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2, dim=1)
        results = [linear(x, gate_up, gate_bias, spans), linear(x, up, up_bias, spans)]
    rows, columns = results[0].shape
    activated = results[0].new_empty((rows, columns // 2 if up is None and glu.layout != "none" else columns))
    if cpu_native.activate(results, glu, activated) is None:
        activated.copy_(_activated(results, glu))
    return activated.to(x.dtype)


def _activated(results: list[Tensor], glu: Glu) -> Tensor:
    """In the accumulation dtype, of one result or of two halves."""
    wide = [result.to(accumulation_dtype(result.dtype)) for result in results]
    halves = split_glu(wide[0], glu.layout) if len(wide) == 1 else (wide[0], wide[1])
    return ACTIVATIONS[glu.activation].eager(*halves, glu.alpha, glu.limit)


def combine(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None, added_TH: Tensor | None = None) -> Tensor:
    """Sum over k in the order of k, in the accumulation dtype; ``added_TH`` joins the sum last.

    Pairs whose place is not a row are left out: a row that they had may hold NaN.
    """
    total = cpu_native.combine(rows, places_TK, weights_TK, added_TH)
    if total is not None:
        return total
    wide = accumulation_dtype(rows.dtype)
    sums = rows.new_zeros((len(places_TK), rows.shape[1]), dtype=wide)
    for k, place in enumerate(places_TK.unbind(1)):
        kept = (place >= 0) & (place < len(rows))
        some = rows[place[kept]].to(wide)
        sums[kept] += some if weights_TK is None else some * weights_TK[kept, k, None].to(wide)
    return (sums if added_TH is None else sums + added_TH).to(rows.dtype)
