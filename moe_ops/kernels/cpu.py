"""Arithmetic of the CPU backend: one GEMM per run of rows, fp32 activation and combine."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
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
# Of half precision rows, at a time, unless they have up to twice as many: memory for more is new in every call. ms to
# combine 8 rows for each of 1024 and 4096 tokens, bf16, H = 2048, with 2 ** 24, and so: 21 and 6.7, 112 and 38.
_WIDENED_ELEMENTS = 2**21
_LINE = 16  # fp32 numbers of a line of the cache
# What the two GEMMs of an expert alone cost, in rows, besides its own rows and those of reading its weight: of a larger
# projection of _MIDDLE elements, the power by which it falls with the elements, and that for more of them, which share
# work better. Threads that sleep in between are woken for each, those that spin wait for each other; their shares, and
# one thread's. us of an expert on two cores in bf16, threads that sleep, spin, and one: 2I x H = 256 x 256 136, 34 and
# 31, 768 x 768 197, 82 and 87, 1024 x 1024 118, 44 and 26.
_MIDDLE, _ALONE = 768 * 768, {torch.bfloat16: (58.0, 0.7, 1.5), torch.float32: (22.0, 1.0, 1.0)}
_SLEEPS = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
_OF_SPINNING, _OF_ONE, _READ_IN_ROWS = 0.45, 0.27, 24
# What padding costs besides its GEMMs must be won back, and splitting costs more than padding every expert whole.
_WORTHWHILE, _WORTHWHILE_WHOLE = 0.7, 0.93
_LENGTHS = 8  # that are tried


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
    for (expert, _, _), (part, to) in zip(spans, parts, strict=True):
        if plain and bias is None:
            torch.mm(part, matrices[expert], out=to)
        elif plain and bias is not None:
            torch.addmm(bias[expert], part, matrices[expert], out=to)
        else:
            y = product(part, operand.of_expert(expert).t())
            to.copy_(y if bias is None else y.to(accumulation_dtype(y.dtype)) + bias[expert])
    return result


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


def _alone_in_rows(weight: Tensor) -> float:
    """See :data:`_ALONE`."""
    middle, power, power_of_large = _ALONE[weight.dtype]
    size = weight.shape[1] * weight.shape[2] / _MIDDLE
    share = _OF_ONE if torch.get_num_threads() == 1 else 1.0 if _SLEEPS else _OF_SPINNING
    return float(share * middle * size ** -(power if size < 1 else power_of_large))


def padded_length(counts: list[int], weight: Tensor) -> int:
    """Rows of every expert to compute as one batched GEMM, the rest expert by expert; 0: all expert by expert.

    A GEMM of one expert wakes threads for little work; a batch wakes them once but computes padding, and reads every
    expert's weight. The length minimises what all of them cost, in rows: its rows for a GEMM, at least those that
    reading the weight takes as long as, and for one of its own some more (:data:`_ALONE`).

    Args:
        counts: rows of every expert.
        weight: ``[E, N, K]`` of the larger projection.
    """
    longest = max(counts)
    if weight.dtype not in _ALONE or longest == 0 or weight.numel() == 0:
        return 0
    alone = _alone_in_rows(weight)
    ascending = sorted(counts)
    sums = [0, *accumulate(ascending)]

    def cost(length: int) -> float:
        """In rows, over the share of the time without padding that it has to win back."""
        rest, computed = bisect_right(ascending, length), bisect_left(ascending, length + _READ_IN_ROWS)
        padded = len(counts) * max(length, _READ_IN_ROWS) if length else 0
        read = (computed - rest) * _READ_IN_ROWS + sums[-1] - sums[computed] - (len(counts) - computed) * length
        worthwhile = 1.0 if not length else _WORTHWHILE_WHOLE if length == longest else _WORTHWHILE
        return (padded + read + alone * (len(counts) - rest)) / worthwhile

    tried = {ascending[(len(ascending) - 1) * n // _LENGTHS] for n in range(_LENGTHS + 1)}
    return min((0, *sorted(tried - {0})), key=cost)


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
        self._rows, self._first, self._behind = rows, 0, self._bytes(rows, *pieces[0])
        self._memory = torch.empty(sum(self._bytes(rows, *piece) for piece in pieces), dtype=torch.uint8)

    @staticmethod
    def _bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
        """Of a piece, behind which the next one begins a line of the cache."""
        return -(-rows * columns * dtype.itemsize // 64) * 64

    def take(self, columns: int, dtype: torch.dtype) -> Tensor:
        """``[rows, columns]``, contiguous, of memory that has not been taken yet."""
        first, self._first = self._first, self._first + self._bytes(self._rows, columns, dtype)
        return self._memory.view(dtype).as_strided((self._rows, columns), (columns, 1), first // dtype.itemsize)

    def spare(self, dtype: torch.dtype) -> Tensor:
        """All behind the first piece, whatever has been taken of it."""
        return self._memory[self._behind :].view(dtype)


class Lot(NamedTuple):
    """Experts whose rows pass both products together, and the rows of their pairs.

    Attributes:
        experts: which they are; rows: which of all lots' rows are theirs.
        pairs: by expert; row_of_pair: of each of them, from the lot's first row on. Both int64.
        length, spans: see :func:`linear`; the lot's first expert is 0.
    """

    experts: slice
    rows: slice
    pairs: Tensor
    row_of_pair: Tensor
    length: int
    spans: list[Span]


def in_lots(order: Tensor, experts: Tensor, counts: list[int], weight: Tensor) -> list[Lot]:
    """All experts, in lots.

    Args:
        order, experts, counts: see :func:`sort_pairs`.
        weight: ``[E, N, K]`` of the larger projection.
    """
    found: list[Lot] = []
    pair = row = 0
    for some in lots(counts, weight.shape[1]):
        within = counts[some]
        pairs = slice(pair, pair + sum(within))
        length = padded_length(within, weight)
        row_of_pair, rows, spans = lay_out(experts[pairs] - some.start, within, length)
        found.append(Lot(some, slice(row, row + rows), order[pairs], row_of_pair, length, spans))
        pair, row = pairs.stop, row + rows
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
    x: Tensor,
    gate_up: Operand,
    up: Operand | None,
    bias: Tensor | None,
    glu: Glu,
    spans: list[Span],
    length: int = 0,
    room: Room | None = None,
) -> Tensor:
    """The activated ``[R, I]`` in the accumulation dtype; the weights are stacked, or two beside each other."""

    def wide(weight: Operand, bias: Tensor | None) -> Tensor:
        outputs, dtype = weight.data.shape[1], accumulation_dtype(x.dtype)
        if room is None:
            return linear(x, weight, bias, spans, length).to(dtype)
        result = linear(x, weight, bias, spans, length, room.take(outputs, x.dtype))
        return result if x.dtype == dtype else room.take(outputs, dtype).copy_(result)

    if up is None:
        halves = split_glu(wide(gate_up, bias), glu.layout)
    else:
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2, dim=1)
        halves = (wide(gate_up, gate_bias), wide(up, up_bias))
    return ACTIVATIONS[glu.activation].consume(*halves, glu.alpha, glu.limit)


def combine(
    rows: Tensor,
    places_TK: Tensor,
    weights_TK: Tensor | None,
    added_TH: Tensor | None = None,
    *,
    spare: Tensor | None = None,
) -> Tensor:
    """Sum over k in the order of k, in the accumulation dtype; ``added_TH`` joins the sum last. ``spare``: memory of
    that dtype, if there is some that is not new, for as many columns of ``rows`` at a time.

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
    elif rows.dtype == dtype or (columns := _columns_at_once(rows, spare)) >= hidden:
        total = _bags(_widened(rows, dtype, spare), places_TK, weights_TK)
    else:
        result = rows.new_empty((tokens, hidden))
        for first in range(0, hidden, columns):
            part = slice(first, first + columns)
            total = _bags(_widened(rows[:, part], dtype, spare), places_TK, weights_TK)
            result[:, part] = total if added_TH is None else total + added_TH[:, part]
        return result
    return (total if added_TH is None else total + added_TH).to(rows.dtype)


def _columns_at_once(rows: Tensor, spare: Tensor | None) -> int:
    """Of ``rows``, whose copies in the accumulation dtype are in memory together; parts of about the same number."""
    number, hidden = rows.shape
    elements = 0 if spare is None else spare.numel()
    if elements < _WIDENED_ELEMENTS:
        elements = max(elements, _WIDENED_ELEMENTS * (2 if rows.numel() <= 2 * _WIDENED_ELEMENTS else 1))
    if rows.numel() <= elements:
        return hidden
    parts = -(-hidden // max(elements // number // _LINE * _LINE, _LINE))
    return -(-hidden // (parts * _LINE)) * _LINE


def _widened(rows: Tensor, dtype: torch.dtype, spare: Tensor | None) -> Tensor:
    """``rows`` in ``dtype``, in ``spare`` memory if that is enough."""
    if rows.dtype == dtype or spare is None or rows.numel() > spare.numel():
        return rows.to(dtype)
    return spare[: rows.numel()].view(rows.shape).copy_(rows)


def _bags(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """What ``F.embedding_bag`` gives, less what it asks first."""
    bags = torch.arange(0, places_TK.numel(), places_TK.shape[1])
    weights = None if weights_TK is None else weights_TK.reshape(-1)
    return torch.embedding_bag(rows.contiguous(), places_TK.reshape(-1), bags, False, 0, False, weights)[0]


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
