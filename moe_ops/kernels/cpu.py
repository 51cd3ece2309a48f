"""Arithmetic of the CPU backend: how rows are laid out, one GEMM per run of them, and the activation in fp32."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.dims import accumulation_dtype
from meta.operands import Glu, Operand
from moe_ops.kernels.cpu_costs import one_row_is_a_vector, padded_length
from moe_ops.pairs import local_ids

#: ``(expert, first row, end row)`` of an expert that has rows.
Span = tuple[int, int, int]

# With so many experts for every pair, pairs share few of them: sorting and laying out costs more than the products that
# it saves, and more still where one product of small weights costs less than laying out. On two cores 0.57 to 1.00 of
# the time, the median 0.84 (2 to 64 pairs, 8 to 64 experts, 256 x 128 to 2048 x 768, fp32 and bf16); twice the pairs:
# 1.1 to 1.6.
_RARELY_SHARED, _RARELY_SHARED_SMALL = 2, 1
_SMALL_TO_READ = 2**20  # elements of an expert's larger projection, in fp32
# Elements of a bf16 weight that is copied beside those of other experts which have one row each as well: one product
# wakes threads once, and no copy of as few does, eight bytes at a time. us on two cores of 2 and 4 rows, 256 x 256,
# threads that sleep 170 and 125, 342 and 160, that spin 46 and 55, 89 and 89, one thread 30 and 28, 63 and 41; twice as
# many elements, that sleep 165 and 155, 350 and 218, that spin 65 and 95, 126 and 150.
_COPIED = 2**16
# Elements between the products of experts that pass both together: what is there stays in a cache, and the next ones
# have its memory. us of a layer's products and activation on two cores in bf16, 8
# experts, K = 2, T = 4096, all experts at once and four lots: H = 256 7785 and 5159, H = 768 26125 and 23838. Fewer
# elements are not worth a lot's threads that are woken: T = 1024, H = 768 7199 and 8736.
_IN_A_LOT = 2**21
_WIDENED = 2**20  # elements of half precision, before the activation, in fp32 at a time: memory that is used again
_FEW = 128  # pairs that Python sorts faster than torch does


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
) -> tuple[Tensor, Tensor, list[int]]:
    """(pairs by expert, in pair order, without the dropped ones; their experts; how many each expert has).

    Dropped: ids outside of ``[0, E)``, which sort to either end, and what an expert has past its capacity.
    """
    ids = topk_ids.reshape(-1) if expert_map is None else local_ids(topk_ids, expert_map, num_experts)
    sorted_ids, order = ids.sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, dtype=ids.dtype)).tolist()
    counts = [end - start for start, end in pairwise(bounds)]
    if capacity is not None and max(counts, default=0) > capacity:
        kept = torch.cat([torch.arange(start, min(end, start + capacity)) for start, end in pairwise(bounds)])
        return order[kept], sorted_ids[kept], [min(count, capacity) for count in counts]
    held = slice(bounds[0], bounds[-1])
    return order[held], sorted_ids[held], counts


def scale_of_rows(static: Tensor | None, spans: list[Span]) -> Tensor | None:
    """``[R, 1]`` of the scales ``[E, 1, 1]`` of the experts, for rows that are in ``spans``, one after the other."""
    if static is None:
        return None
    experts, lengths = ([span[0] for span in spans], [end - start for _, start, end in spans])
    of_rows = torch.tensor(experts, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return static.reshape(-1, 1).index_select(0, of_rows)


def lay_out(experts: Tensor, counts: list[int], length: int) -> tuple[Tensor, int, list[Span]]:
    """Rows for the GEMMs: ``length`` of every expert, padded, then the other pairs sorted by expert.

    Args:
        experts: of pairs, sorted; counts: how many each has.

    Returns:
        row of each pair, int64; how many rows there are; spans of the rows past the first ``E * length``.
    """
    rest = [max(count - length, 0) for count in counts]
    spans, batched = sorted_spans(rest), len(counts) * length
    rows = torch.arange(len(experts))
    if length:
        ends = accumulate(counts)
        # Sorted position s of expert e goes to row s + shift[e].
        shift = torch.tensor(
            [e * length - end + count for e, (end, count) in enumerate(zip(ends, counts, strict=True))]
        )
        rows = rows + shift[experts]
        if spans:
            past = rows >= (experts + 1) * length
            rows = torch.where(past, batched - 1 + past.cumsum(0), rows)
    return rows, batched + sum(rest), spans


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
    lengths = [end - start for _, start, end in spans]
    whole = sum(lengths) == x.shape[0] - batched
    same = bias is None or bias.dtype == x.dtype
    plain = not operand.scales and x.dtype != torch.float16 and same
    if result is None:
        allocate = torch.empty if whole else torch.zeros
        result = allocate((x.shape[0], weight.shape[1]), dtype=x.dtype)
    if length:
        batch, out = x[:batched].view(-1, length, x.shape[1]), result[:batched].view(-1, length, result.shape[1])
        if bias is None or same:
            _batched(batch, transposed, bias, out)
        else:
            out.copy_(torch.bmm(batch, transposed).to(accumulation_dtype(x.dtype)) + bias.unsqueeze(1))
        if not spans:
            return result
        x, out = x[batched:], result[batched:]
    else:
        out = result
    if plain and whole and _copies(weight, lengths):
        experts = [expert for expert, _, _ in spans]
        words = weight.view(torch.int64)
        copies = torch.stack([words[expert] for expert in experts]).view(weight.dtype).transpose(1, 2)
        _batched(x.unsqueeze(1), copies, None if bias is None else bias[experts], out.unsqueeze(1))
        return result
    # Views at once: where weights fill the caches, what an interpreter reads for each of them is in memory.
    matrices = transposed.unbind() if plain and 2 * len(spans) >= len(transposed) else transposed
    if whole:
        parts = zip(torch.split_with_sizes(x, lengths), torch.split_with_sizes(out, lengths), strict=True)
    else:
        parts = zip(*([tensor[start:end] for _, start, end in spans] for tensor in (x, out)), strict=True)
    vectors = plain and weight.stride(2) == 1 and 1 in lengths and one_row_is_a_vector(x.dtype)
    for (expert, _, _), (part, to) in zip(spans, parts, strict=True):
        if vectors and part.shape[0] == 1:
            _one_row(part[0], weight[expert], None if bias is None else bias[expert], to[0])
        elif plain and bias is None:
            torch.mm(part, matrices[expert], out=to)
        elif plain and bias is not None:
            torch.addmm(bias[expert], part, matrices[expert], out=to)
        else:
            y = product(part, operand.of_expert(expert).t())
            to.copy_(y if bias is None else y.to(accumulation_dtype(y.dtype)) + bias[expert])
    return result


def _one_row(row: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``matrix @ row`` and ``bias [N]``, which has their dtype, to ``out``."""
    if bias is None:
        torch.mv(matrix, row, out=out)
    else:
        torch.addmv(bias, matrix, row, out=out)


def _batched(batch: Tensor, matrices: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``batch @ matrices`` and ``bias [E, N]``, which has their dtype, to ``out``."""
    if bias is None:
        torch.bmm(batch, matrices, out=out)
    else:
        torch.baddbmm(bias.unsqueeze(1), batch, matrices, out=out)


def _copies(weight: Tensor, lengths: list[int]) -> bool:
    """Whether weights of experts that have so many rows are copied for one product: see :data:`_COPIED`."""
    few = weight.dtype == torch.bfloat16 and weight.shape[1] * weight.shape[2] <= _COPIED
    places = (weight.shape[2], weight.storage_offset(), *weight.stride()[:2])  # of one row, any stride is contiguous
    in_words = weight.is_contiguous() and not any(place % 4 for place in places)
    return few and in_words and 1 < len(lengths) == sum(lengths)


def lots(counts: list[int], columns: int) -> list[slice]:
    """Experts that pass both products together, all of them: as few lots of about as many rows as have
    :data:`_IN_A_LOT` elements between the products at the most.

    Args:
        counts: rows of every expert.
        columns: between the products.
    """
    rows = sum(counts)
    number = max(1, -(-rows * columns // _IN_A_LOT))
    sums = list(accumulate(counts))
    ends = [bisect_left(sums, -(-rows * n // number)) + 1 for n in range(1, number)]
    return [slice(*pair) for pair in pairwise((0, *ends, len(counts))) if pair[0] < pair[1]]


class Room:
    """Memory for all that is between a lot's gathered rows and its results, in one piece: glibc then has it when the
    next lot or layer asks. Freed in several pieces it goes back to the system where these are larger together than
    twice the largest, and its pages are new in every call: a sixth of a layer of 8 experts, bf16, H = 768, T = 1024.
    """

    def __init__(self, rows: int, *pieces: tuple[int, torch.dtype]) -> None:
        self._rows, self._first = rows, 0
        self._memory = torch.empty(sum(self._bytes(rows, *piece) for piece in pieces), dtype=torch.uint8)

    @staticmethod
    def _bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
        """Of a piece, behind which the next one begins a line of the cache."""
        return -(-rows * columns * dtype.itemsize // 64) * 64

    def take(self, columns: int, dtype: torch.dtype) -> Tensor:
        """``[rows, columns]``, contiguous, of memory that has not been taken yet."""
        first, self._first = self._first, self._first + self._bytes(self._rows, columns, dtype)
        return self._memory.view(dtype).as_strided((self._rows, columns), (columns, 1), first // dtype.itemsize)


class Lot(NamedTuple):
    """Experts whose rows pass both products together, and the rows of their pairs.

    Attributes:
        experts: which they are; rows: which of all lots' rows are theirs.
        pair_of_row: int64, the first pair for padding, whose results nobody reads; None where row n is that of pair n.
        length, spans: see :func:`linear`; the lot's first expert is 0.
    """

    experts: slice
    rows: slice
    pair_of_row: Tensor | None
    length: int
    spans: list[Span]


class Layout(NamedTuple):
    """Where every pair's row is.

    Attributes:
        lots: all experts'.
        row_of_pair: int64, among all lots' rows; how many these are for a pair that is dropped; or None, see `Lot`.
        dropped: whether one is.
    """

    lots: list[Lot]
    row_of_pair: Tensor | None
    dropped: bool


def in_lots(order: Tensor, experts: Tensor, counts: list[int], pairs: int, weight: Tensor) -> Layout:
    """All experts, in lots.

    Args:
        order, experts, counts: see :func:`sort_pairs`; pairs: the dropped ones, too.
        weight: ``[E, N, K]`` of the larger projection.
    """
    found: list[Lot] = []
    places: list[Tensor] = []
    pair = row = 0
    for some in lots(counts, weight.shape[1]):
        within = counts[some]
        kept = slice(pair, pair + sum(within))
        length = padded_length(within, weight)
        place, rows, spans = lay_out(experts[kept] - some.start, within, length)
        pairs_here = order[kept]
        pair_of_row = torch.zeros(rows, dtype=torch.int64).scatter_(0, place, pairs_here) if length else pairs_here
        places.append(place + row)
        found.append(Lot(some, slice(row, row + rows), pair_of_row, length, spans))
        pair, row = kept.stop, row + rows
    row_of_pair = torch.full((pairs,), row).scatter_(0, order, places[0] if len(places) == 1 else torch.cat(places))
    return Layout(found, row_of_pair, len(order) < pairs)


def of_few(topk_ids: Tensor, weight: Tensor) -> Layout | None:
    """:func:`in_lots` of few pairs, without torch's sort and what follows; a span for each pair, in their order, where
    pairs rarely share an expert. None of more pairs, and where one is dropped.

    Args:
        weight: ``[E, N, K]`` of the larger projection.
    """
    pairs, num_experts = topk_ids.numel(), weight.shape[0]
    if not 0 < pairs <= _FEW:
        return None
    experts = topk_ids.reshape(-1).tolist()
    if min(experts) < 0 or max(experts) >= num_experts:
        return None
    if _rarely_shared(pairs, weight):
        spans = [(expert, pair, pair + 1) for pair, expert in enumerate(experts)]
        return Layout([Lot(slice(0, num_experts), slice(0, pairs), None, 0, spans)], None, False)
    rows, length, spans = _lay_out_few(experts, weight)
    total = num_experts * length + (spans[-1][2] if spans else 0)
    pair_of_row = [0] * total
    for pair, row in enumerate(rows):
        pair_of_row[row] = pair
    lot = Lot(slice(0, num_experts), slice(0, total), torch.tensor(pair_of_row), length, spans)
    return Layout([lot], torch.tensor(rows), False)


def _rarely_shared(pairs: int, weight: Tensor) -> bool:
    """See :data:`_RARELY_SHARED`."""
    small = weight.dtype == torch.float32 and weight.shape[1] * weight.shape[2] <= _SMALL_TO_READ
    return pairs * (_RARELY_SHARED_SMALL if small else _RARELY_SHARED) <= weight.shape[0]


def _lay_out_few(experts: list[int], weight: Tensor) -> tuple[list[int], int, list[Span]]:
    """Row of each pair, in their order, of so many padded rows of every expert, and spans of the rows after them."""
    counts, ranks = [0] * weight.shape[0], []
    for expert in experts:
        ranks.append(counts[expert])
        counts[expert] += 1
    length = padded_length(counts, weight)
    spans = sorted_spans([max(count - length, 0) for count in counts])
    past = {expert: (len(counts) - 1) * length + start for expert, start, _ in spans}
    rows = [
        expert * length + rank if rank < length else past[expert] + rank
        for expert, rank in zip(experts, ranks, strict=True)
    ]
    return rows, length, spans


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x [M, K] @ matrix [K, N]``; fp16 operands go through fp32 where that is faster.

    Few CPUs multiply fp16: 16 rows by 1024 x 1024 take 0.65 ms in fp16 and 0.30 ms with both casts; when K is not the
    contiguous dimension even one row takes 1.7 ms against 0.11 ms.
    """
    if x.dtype == torch.float16 and (x.shape[0] > 4 or matrix.stride(0) != 1):
        return x.float() @ matrix.float()
    return x @ matrix


def first_projection(
    x: Tensor,
    gate_up: Operand,
    up: Operand | None,
    bias: Tensor | None,
    glu: Glu,
    spans: list[Span],
    length: int = 0,
    room: Room | None = None,
) -> Tensor:
    """The activated ``[R, I]`` in the dtype of ``x``; the weights are stacked, or two beside each other."""

    def outputs(weight: Operand, bias: Tensor | None) -> Tensor:
        result = None if room is None else room.take(weight.data.shape[1], x.dtype)
        return linear(x, weight, bias, spans, length, result)

    if up is None:
        results = [outputs(gate_up, bias)]
    else:
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2, dim=1)
        results = [outputs(gate_up, gate_bias), outputs(up, up_bias)]
    rows, columns = results[0].shape
    if x.dtype == accumulation_dtype(x.dtype) or rows * columns <= _WIDENED:
        return _activated(results, glu).to(x.dtype)
    activated_columns = columns // 2 if up is None and glu.layout != "none" else columns
    activated = x.new_empty((rows, activated_columns)) if room is None else room.take(activated_columns, x.dtype)
    at_once = max(_WIDENED // columns, 1)
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        activated[part] = _activated([result[part] for result in results], glu)
    return activated


def _activated(results: list[Tensor], glu: Glu) -> Tensor:
    """In the accumulation dtype, of one result or of two halves, which may be overwritten."""
    wide = [result.to(accumulation_dtype(result.dtype)) for result in results]
    halves = split_glu(wide[0], glu.layout) if len(wide) == 1 else (wide[0], wide[1])
    return ACTIVATIONS[glu.activation].consume(*halves, glu.alpha, glu.limit)
