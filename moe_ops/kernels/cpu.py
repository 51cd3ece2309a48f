"""Arithmetic of the CPU backend: one GEMM per run of rows, fp32 activation and combine."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.schemes import SCHEMES

#: ``(expert, first row, end row)`` of an expert that has rows.
Span = tuple[int, int, int]

_COMBINE_ELEMENTS = 2**18
_GEMM_IN_ROWS = {torch.bfloat16: 48, torch.float32: 16}
_SMALL_WEIGHT = 512 * 256
_LARGE_GEMM_IN_ROWS = 8
_WORTHWHILE = 0.7  # what padding and splitting cost besides their GEMMs must be won back
_LENGTHS = (0, 4, 8, 12, 16, 24, 32, 48, 64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64 data."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped_spans(offsets: Tensor) -> list[Span]:
    """Spans of sorted rows from cumulative ends."""
    ends = offsets.tolist()
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]


def batched_spans(capacity: int, counts: Tensor) -> list[Span]:
    """Spans of a flattened expert batch; a count above the capacity stops at it."""
    return [(e, e * capacity, e * capacity + min(n, capacity)) for e, n in enumerate(counts.tolist()) if n > 0]


def sorted_spans(counts: list[int]) -> list[Span]:
    """Spans of rows sorted by expert, from the rows of every expert."""
    ends = accumulate(counts)
    return [(e, end - count, end) for e, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_scale: Tensor | None, spans: list[Span], scheme: str
) -> Tensor:
    """``[R, N]`` from ``x [R, K]``: one GEMM per span. Rows outside of the spans are zero, so that results repeat."""
    rows = x.shape[0]
    spans = [(expert, start, min(end, rows)) for expert, start, end in spans if start < rows]  # whatever the data says
    dequantize = SCHEMES[scheme].dequantize_weight
    plain = dequantize is None and x.dtype != torch.float16 and (bias is None or bias.dtype == x.dtype)
    allocate = torch.empty if sum(end - start for _, start, end in spans) == x.shape[0] else torch.zeros
    out = allocate((x.shape[0], weight.shape[1]), dtype=x.dtype)
    transposed = weight.transpose(1, 2)
    for expert, start, end in spans:
        if plain and bias is None:
            torch.mm(x[start:end], transposed[expert], out=out[start:end])
        elif plain and bias is not None:
            torch.addmm(bias[expert], x[start:end], transposed[expert], out=out[start:end])
        else:
            matrix = transposed[expert]
            if dequantize is not None and weight_scale is not None:
                matrix = dequantize(weight[expert : expert + 1], weight_scale[expert : expert + 1])[0].t()
            y = product(x[start:end], matrix)
            out[start:end] = y if bias is None else y.to(accumulation_dtype(y.dtype)) + bias[expert]
    return out


def padded_length(counts: list[int], weight: Tensor) -> int:
    """Rows of every expert to compute as one batched GEMM, the rest expert by expert; 0: all expert by expert.

    A GEMM of a few rows uses one core badly and several not at all; a batch spreads over them but computes padding. The
    length minimises padded rows plus what the remaining GEMMs cost, both in rows. On two cores a GEMM of its own costs
    as much as 48 batched rows in bf16 and 16 in fp32 (512 x 256; 64 experts of 8 rows: 1.2 against 0.26 ms, and 1.2
    against 0.9 ms), less the larger the weight, and as much as 8 once reading it dominates (1024 x 1024).

    Args:
        counts: rows of every expert.
        weight: ``[E, N, K]`` of the larger projection.
    """
    small = _GEMM_IN_ROWS.get(weight.dtype)
    if small is None:
        return 0
    per_gemm = min(small, max(_LARGE_GEMM_IN_ROWS, small * _SMALL_WEIGHT // (weight.shape[1] * weight.shape[2])))

    def cost(length: int) -> int:
        return len(counts) * length + sum(per_gemm + count - length for count in counts if count > length)

    best = min(_LENGTHS, key=cost)
    return best if cost(best) <= _WORTHWHILE * cost(0) else 0


def batched_linear(batch: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[E, C, N]`` from ``batch [E, C, K]``."""
    transposed = weight.transpose(1, 2)
    return torch.bmm(batch, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), batch, transposed)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x [M, K] @ matrix [K, N]``; fp16 operands go through fp32 where that is faster.

    Few CPUs multiply fp16: 16 rows by 1024 x 1024 take 0.65 ms in fp16 and 0.30 ms with both casts; when K is not the
    contiguous dimension even one row takes 1.7 ms against 0.11 ms.
    """
    if x.dtype == torch.float16 and (x.shape[0] > 4 or matrix.stride(0) != 1):
        return x.float() @ matrix.float()
    return x @ matrix


def activate(hidden: Tensor, activation: str, alpha: float, limit: float, glu_layout: str) -> Tensor:
    """The activation in the accumulation dtype."""
    hidden = hidden.to(accumulation_dtype(hidden.dtype))
    return ACTIVATIONS[activation].eager(*split_glu(hidden, glu_layout), alpha, limit)


def dequantize_rows(rows: Tensor, rows_scale: Tensor | None, scheme: str) -> Tensor:
    """Activations as a GEMM takes them: fp32 when they were quantised."""
    dequantize = SCHEMES[scheme].dequantize_rows
    return rows if dequantize is None or rows_scale is None else dequantize(rows, rows_scale)


def combine(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum over k in the order of k, in blocks of tokens whose fp32 products stay in a core's cache."""
    (tokens, top_k), hidden = places_TK.shape, rows.shape[1]
    dtype = accumulation_dtype(rows.dtype)
    out = torch.zeros((tokens, hidden), dtype=rows.dtype)
    block = max(1, _COMBINE_ELEMENTS // max(top_k * hidden, 1))
    for start in range(0, tokens if top_k else 0, block):
        places = places_TK[start : start + block]
        products = rows.index_select(0, places.reshape(-1)).to(dtype).view(*places.shape, hidden)
        if weights_TK is not None:
            products = products * weights_TK[start : start + block].to(dtype).unsqueeze(2)
        first, *others = products.unbind(1)
        total = first.clone()
        for product in others:
            total += product
        out[start : start + block] = total
    return out
