"""Arithmetic of the CPU backend: one GEMM per run of rows, fp32 activation and combine."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.dims import accumulation_dtype
from meta.operands import Glu, Operand
from moe_ops.pairs import local_ids

#: ``(expert, first row, end row)`` of an expert that has rows.
Span = tuple[int, int, int]

# With so many experts for every pair, pairs share few of them: sorting and laying out costs more than the products that
# it saves, and more still where one product of small weights costs less than laying out. On two cores 0.57 to 1.00 of
# the time, the median 0.84 (2 to 64 pairs, 8 to 64 experts, 256 x 128 to 2048 x 768, fp32 and bf16); twice the pairs:
# 1.1 to 1.6.
_RARELY_SHARED, _RARELY_SHARED_SMALL = 2, 1
_SMALL_TO_READ = 2**20  # elements of an expert's larger projection, in fp32
_GATHERED_ELEMENTS = 2**15
# From so many elements between the products and so many rows an expert on, some experts' rows pass both products before
# the next ones': what is between stays in the cache. One expert after the other, of the time of all at once, on two
# cores, T = 1024 and 2048, the median of ratios to torch.compile's: H = 256, I = 128, 8 experts 0.84 and 0.77 in fp32,
# 0.60 and 0.46 in bf16; H = 768 0.95 and 0.97, 0.60 and 0.63; 64 experts of 512 x 256 0.99 and 0.82, 0.50 and 0.60.
# With half as much, up to 1.5. Lots of experts with 64 rows each, of the time of all at once: bf16 0.62 to 1.09 (median
# 0.76, 64 experts 512 x 256 to 2048 x 768), fp32 0.84 to 1.04; with 32 rows 1.02 to 2.1 and 1.00 to 1.05.
_BETWEEN, _ROWS_OF_ONE = 2**19, 64
# Elements between the products of the experts that pass both together then: of fewer, threads are woken for work that
# takes less time. Of torch.compile's time, T = 1024, in turn, of one expert after the other and of lots: H = 256,
# I = 128, 8 experts 1.85 and 1.36 in bf16, 1.06 and 0.95 in fp32; H = 768 1.43 and 1.27, 1.03 and 1.02. Threads that
# spin: 1.53 and 1.35, 1.22 and 1.18; 1.18 and 1.15, 1.00 and 1.00. Half as many elements: 1.50 of the first.
_AT_ONCE = 2**18
# Of half precision rows, at a time, unless they have up to twice as many: memory for more is new in every call. ms to
# combine 8 rows for each of 1024 and 4096 tokens, bf16, H = 2048, with 2 ** 24, and so: 21 and 6.7, 112 and 38.
_WIDENED_ELEMENTS = 2**21
# What a GEMM of its own costs, in rows, besides its own rows and at least those of reading its weight: in bf16 for a
# weight of 2 ** 18 elements, and less for larger ones. A layer's time with these constants, of that with the ones
# before, which padded to 8 rows at the least: 0.63 to 1.12, geometric mean 0.96 in bf16 and 0.90 in fp32 (70 layers of
# 8 to 64 experts, H = 256 to 2048, T = 4 to 64, two cores).
_ALONE_IN_ROWS = {torch.bfloat16: 20.0, torch.float32: 8.0}
_MOST_ALONE, _READ_IN_ROWS, _SMALL_WEIGHT = 40.0, 8, 2**18
_SLOWER_ALONE = 1.25
# What padding costs besides its GEMMs must be won back, and splitting costs more than padding every expert whole.
_WORTHWHILE, _WORTHWHILE_WHOLE = 0.7, 0.85
_LENGTHS = (0, 8, 12, 16, 24, 32, 48, 64)


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

    Dropped: ids outside of ``[0, E)``, which sort to either end, and what an expert has past its capacity.
    """
    ids = topk_ids.reshape(-1) if expert_map is None else local_ids(topk_ids, expert_map, num_experts)
    sorted_ids, order = ids.sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, dtype=ids.dtype)).tolist()
    counts = [end - start for start, end in pairwise(bounds)]
    if capacity is not None and max(counts) > capacity:
        kept = [order[start : min(end, start + capacity)] for start, end in pairwise(bounds)]
        return torch.cat(kept), [min(count, capacity) for count in counts]
    return order[bounds[0] : bounds[-1]], counts


def scale_of_rows(static: Tensor | None, spans: list[Span]) -> Tensor | None:
    """``[R, 1]`` of the scales ``[E, 1, 1]`` of the experts, for rows that are in ``spans``, one after the other."""
    if static is None:
        return None
    experts, lengths = ([span[0] for span in spans], [end - start for _, start, end in spans])
    of_rows = torch.tensor(experts, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return static.reshape(-1, 1).index_select(0, of_rows)


def spans_of_pairs(topk_ids: Tensor, weight: Tensor) -> list[Span] | None:
    """A span for each pair, in their order, where pairs rarely share an expert; None where they do, or one is dropped.

    Args:
        weight: ``[E, N, K]`` of the larger projection.
    """
    pairs, num_experts = topk_ids.numel(), weight.shape[0]
    small = weight.dtype == torch.float32 and weight.shape[1] * weight.shape[2] <= _SMALL_TO_READ
    if not 0 < pairs * (_RARELY_SHARED_SMALL if small else _RARELY_SHARED) <= num_experts:
        return None
    experts = topk_ids.reshape(-1).tolist()
    if min(experts) < 0 or max(experts) >= num_experts:
        return None
    return [(expert, pair, pair + 1) for pair, expert in enumerate(experts)]


def lay_out(order: Tensor, counts: list[int], pairs: int, length: int) -> tuple[Tensor, Tensor, list[Span]]:
    """Rows for the GEMMs: ``length`` of every expert, padded, then the other pairs sorted by expert.

    Args:
        order, counts: see :func:`sort_pairs`.
        pairs: R, dropped ones included.

    Returns:
        pair_of_row ``[rows]`` (padding reads pair 0, and nobody reads its result), row_of_pair ``[R]`` (``rows`` for
        dropped pairs), both int64; spans of the rows past the first ``E * length``.
    """
    total, batched = len(order), len(counts) * length
    rest = [max(count - length, 0) for count in counts]
    spans = sorted_spans(rest)
    rows = torch.arange(total)
    pair_of_row = order
    if length:
        ends = accumulate(counts)
        # Sorted position s of expert e goes to row s + shift[e].
        shift = torch.tensor(
            [e * length - end + count for e, (end, count) in enumerate(zip(ends, counts, strict=True))]
        )
        rows = rows + shift.repeat_interleave(torch.tensor(counts), output_size=total)
        if spans:
            lengths = torch.tensor([(e + 1) * length for e in range(len(counts))])
            past = rows >= lengths.repeat_interleave(torch.tensor(counts), output_size=total)
            rows = torch.where(past, batched - 1 + past.cumsum(0), rows)
        pair_of_row = torch.zeros(batched + sum(rest), dtype=torch.int64).scatter_(0, rows, order)
    row_of_pair = torch.full((pairs,), batched + sum(rest)).scatter_(0, order, rows)
    return pair_of_row, row_of_pair, spans


def linear(
    x: Tensor, operand: Operand, bias: Tensor | None, spans: list[Span], length: int = 0, result: Tensor | None = None
) -> Tensor:
    """``[R, N]`` from ``x [R, K]``, fp32 for weights to be decoded: one batched GEMM for the first ``E * length``
    rows, one for each span of the rows after them. Rows in neither are zero, so that results repeat.

    Args:
        result: where to write it, of rows that are all in one of them; None for new memory.
    """
    weight = operand.data
    batched, transposed = weight.shape[0] * length, weight.transpose(1, 2)
    rows = x.shape[0] - batched
    same = bias is None or bias.dtype == x.dtype
    plain = not operand.scales and x.dtype != torch.float16 and same
    if result is None:
        allocate = torch.empty if sum(end - start for _, start, end in spans) == rows else torch.zeros
        result = allocate((x.shape[0], weight.shape[1]), dtype=x.dtype)
    if length:
        batch, out = x[:batched].view(-1, length, x.shape[1]), result[:batched].view(-1, length, result.shape[1])
        if bias is None:
            torch.bmm(batch, transposed, out=out)
        elif same:
            torch.baddbmm(bias.unsqueeze(1), batch, transposed, out=out)
        else:
            out.copy_(torch.bmm(batch, transposed).to(accumulation_dtype(x.dtype)) + bias.unsqueeze(1))
        x, out = x[batched:], result[batched:]
    else:
        out = result
    for expert, start, end in spans:
        if plain and bias is None:
            torch.mm(x[start:end], transposed[expert], out=out[start:end])
        elif plain and bias is not None:
            torch.addmm(bias[expert], x[start:end], transposed[expert], out=out[start:end])
        else:
            y = product(x[start:end], operand.of_expert(expert).t())
            out[start:end] = y if bias is None else y.to(accumulation_dtype(y.dtype)) + bias[expert]
    return result


def padded_length(counts: list[int], weight: Tensor) -> int:
    """Rows of every expert to compute as one batched GEMM, the rest expert by expert; 0: all expert by expert.

    A GEMM of a few rows uses one core badly and several not at all; a batch spreads over them but computes padding, and
    reads every expert's weight. The length minimises what all of them cost, in rows: its rows for a GEMM, at least
    those that reading the weight takes as long as, and for one of its own some more (fitted on two cores).

    Args:
        counts: rows of every expert.
        weight: ``[E, N, K]`` of the larger projection.
    """
    longest = max(counts)
    if weight.dtype not in _ALONE_IN_ROWS or longest == 0:
        return 0
    alone = _ALONE_IN_ROWS[weight.dtype]
    if weight.dtype == torch.bfloat16:
        alone = min(_MOST_ALONE, alone * (_SMALL_WEIGHT / (weight.shape[1] * weight.shape[2])) ** 1.5)
    ascending = sorted(counts)
    sums = [0, *accumulate(ascending)]

    def cost(length: int) -> float:
        """In rows, over the share of the time without padding that it has to win back."""
        rest, computed = bisect_right(ascending, length), bisect_left(ascending, length + _READ_IN_ROWS)
        padded = len(counts) * max(length, _READ_IN_ROWS) if length else 0
        read = (computed - rest) * _READ_IN_ROWS + sums[-1] - sums[computed] - (len(counts) - computed) * length
        worthwhile = 1.0 if not length else _WORTHWHILE_WHOLE if length == longest else _WORTHWHILE
        return (padded + _SLOWER_ALONE * read + alone * (len(counts) - rest)) / worthwhile

    return min((*(length for length in _LENGTHS if length < longest), longest), key=cost)


def in_lots(counts: list[int], weight: Tensor) -> bool:
    """Whether some experts' rows should pass both products before the next ones', see :func:`lots`.

    Args:
        counts: rows of every expert.
        weight: ``[E, N, K]`` of the larger projection.
    """
    rows, experts = sum(counts), len(counts) - counts.count(0)
    return weight.dtype in _ALONE_IN_ROWS and rows * weight.shape[1] >= _BETWEEN and rows >= _ROWS_OF_ONE * experts


def lots(spans: list[Span], columns: int) -> list[list[Span]]:
    """Neighbours with :data:`_AT_ONCE` elements between the products, or more by less than one's; the last may have
    fewer.

    Args:
        spans: one after the other.
        columns: between the products.
    """
    found: list[list[Span]] = []
    for span in spans:
        if not found or (span[1] - found[-1][0][1]) * columns >= _AT_ONCE:
            found.append([])
        found[-1].append(span)
    return found


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x [M, K] @ matrix [K, N]``; fp16 operands go through fp32 where that is faster.

    Few CPUs multiply fp16: 16 rows by 1024 x 1024 take 0.65 ms in fp16 and 0.30 ms with both casts; when K is not the
    contiguous dimension even one row takes 1.7 ms against 0.11 ms.
    """
    if x.dtype == torch.float16 and (x.shape[0] > 4 or matrix.stride(0) != 1):
        return x.float() @ matrix.float()
    return x @ matrix


def first_projection(
    x: Tensor, gate_up: Operand, up: Operand | None, bias: Tensor | None, glu: Glu, spans: list[Span], length: int = 0
) -> Tensor:
    """The activated ``[R, I]`` in the accumulation dtype; the weights are stacked, or two beside each other."""
    wide = accumulation_dtype(x.dtype)
    if up is None:
        halves = split_glu(linear(x, gate_up, bias, spans, length).to(wide), glu.layout)
    else:
        biases = (None, None) if bias is None else bias.chunk(2, dim=1)
        pair = zip((gate_up, up), biases, strict=True)
        gate, other = (linear(x, weight, half, spans, length).to(wide) for weight, half in pair)
        halves = (gate, other)
    return ACTIVATIONS[glu.activation].eager(*halves, glu.alpha, glu.limit)


def combine(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None, added_TH: Tensor | None = None) -> Tensor:
    """Sum over k in the order of k, in the accumulation dtype; ``added_TH`` joins the sum last.

    us of bags and of gathered rows on two cores, fp32, K = 2, H = 256: T = 1024 191 and 1202; T = 64, where threads
    wake up for bags, 153 and 88.
    """
    (tokens, top_k), hidden = places_TK.shape, rows.shape[1]
    dtype = accumulation_dtype(rows.dtype)
    weights_TK = None if weights_TK is None else weights_TK.to(dtype)
    if not tokens * top_k * hidden:
        total = torch.zeros((tokens, hidden), dtype=dtype)
    elif tokens * top_k * hidden <= _GATHERED_ELEMENTS:
        gathered = rows.index_select(0, places_TK.t().reshape(-1)).view(top_k, tokens, hidden)
        total = _weighted_sum(gathered, None if weights_TK is None else weights_TK.t(), 0)
    elif rows.dtype == dtype or rows.numel() <= 2 * _WIDENED_ELEMENTS:
        total = _bags(rows, places_TK, weights_TK)
    else:
        result, columns = rows.new_empty((tokens, hidden)), max(1, _WIDENED_ELEMENTS // rows.shape[0])
        for first in range(0, hidden, columns):
            part = slice(first, first + columns)
            total = _bags(rows[:, part], places_TK, weights_TK)
            result[:, part] = total if added_TH is None else total + added_TH[:, part]
        return result
    return (total if added_TH is None else total + added_TH).to(rows.dtype)


def _bags(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """:func:`combine` in the accumulation dtype, of few elements if they must be widened."""
    wide = rows.to(accumulation_dtype(rows.dtype)).contiguous()
    return F.embedding_bag(places_TK, wide, mode="sum", per_sample_weights=weights_TK)


def combine_pairs(rows: Tensor, weights_TK: Tensor | None, tokens: int) -> Tensor:
    """:func:`combine` of one row for each pair, in their order."""
    return _weighted_sum(rows.view(tokens, -1, rows.shape[1]), weights_TK, 1).to(rows.dtype)


def _weighted_sum(products: Tensor, weights: Tensor | None, dim: int) -> Tensor:
    """Sum of ``products * weights`` over ``dim`` of both, in its order and the accumulation dtype."""
    products = products.to(accumulation_dtype(products.dtype))
    if weights is not None:
        products = products * weights.to(products.dtype).unsqueeze(2)
    total, *others = products.unbind(dim)
    for product in others:
        total = total + product
    return total


def combine_dropping(
    rows: Tensor, places_TK: Tensor, dropped_TK: Tensor, weights_TK: Tensor | None, added_TH: Tensor | None = None
) -> Tensor:
    """:func:`combine` where dropped pairs read one zero row more, with weight 0: a row of theirs may hold NaN."""
    padded = torch.cat((rows, rows.new_zeros((1, rows.shape[1]))))
    weights_TK = None if weights_TK is None else weights_TK.masked_fill(dropped_TK, 0)
    return combine(padded, places_TK.masked_fill(dropped_TK, rows.shape[0]), weights_TK, added_TH)
