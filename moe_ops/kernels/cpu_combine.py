"""The weighted sum of every token's rows on the CPU: in fp32, rounded once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from meta.dims import accumulation_dtype

_GATHERED_ELEMENTS = 2**15
# Of half precision rows, at a time, unless they have up to twice as many: memory for more is new in every call. ms to
# combine 8 rows for each of 1024 and 4096 tokens, H = 2048, with 2 ** 24, and so: 21 and 6.7, 112 and 38.
_WIDENED_ELEMENTS = 2**21
# More elements of bf16 rows are not widened, see `_in_pieces`. us on two cores, K = 2, widened and in pieces: 614 x 768
# 190 and 161, 614 x 2048 453 and 236, 2458 x 256 253 and 206, 307 x 768 95 and 101, 154 x 768 63 and 84.
_WIDENED = 2**18
_LINE = 16  # fp32 numbers of a line of the cache


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
    elif rows.dtype == torch.bfloat16 and rows.numel() > _WIDENED and added_TH is None and _bags_of_bf16_are_exact():
        return _bags(rows, *_in_pieces(places_TK, weights_TK))
    elif rows.dtype == dtype or (columns := _columns_at_once(rows)) >= hidden:
        total = _bags(rows.to(dtype), places_TK, weights_TK)
    else:
        result = rows.new_empty((tokens, hidden))
        for first in range(0, hidden, columns):
            part = slice(first, first + columns)
            total = _bags(rows[:, part].to(dtype), places_TK, weights_TK)
            result[:, part] = total if added_TH is None else total + added_TH[:, part]
        return result
    return (total if added_TH is None else total + added_TH).to(rows.dtype)


def combine_pairs(rows: Tensor, weights_TK: Tensor | None, tokens: int) -> Tensor:
    """:func:`combine` of one row for each pair, in their order."""
    return _weighted_sum(rows.view(tokens, -1, rows.shape[1]), weights_TK, 1).to(rows.dtype)


def _columns_at_once(rows: Tensor) -> int:
    """Of ``rows``, whose copies in the accumulation dtype are in memory together; parts of about the same number."""
    number, hidden = rows.shape
    elements = _WIDENED_ELEMENTS * (2 if rows.numel() <= 2 * _WIDENED_ELEMENTS else 1)
    if rows.numel() <= elements:
        return hidden
    parts = -(-hidden // max(elements // number // _LINE * _LINE, _LINE))
    return -(-hidden // (parts * _LINE)) * _LINE


@cache
def _bags_of_bf16_are_exact() -> bool:
    """Whether bags multiply and sum bf16 rows in fp32 and round their sum alone, as those of torch with fbgemm do."""
    small = 1 + 2**-7
    rows = torch.tensor([[small], [1.0]], dtype=torch.bfloat16).repeat(1, 2 * _LINE)
    weights = torch.tensor([[small, -(1 + 2**-6)]], dtype=torch.bfloat16)
    return bool((_bags(rows, torch.tensor([[0, 1]]), weights) == 2**-14).all())


def _in_pieces(places_TK: Tensor, weights_TK: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Places and bf16 weights of bags in which every row stands twice, with both pieces of its weight: what bf16 holds
    of it, cut and not rounded, and of the rest, to 2^-17 of it. Both have its sign and none is 0 unless it is, so that
    an infinite row's sum stays infinite.
    """
    if weights_TK is None:
        return places_TK, None
    first = (weights_TK.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
    rest = weights_TK - first
    rest = torch.where(rest.abs() > 0, rest, first * 2**-40)
    tokens = len(places_TK)
    return (
        places_TK.unsqueeze(2).expand(-1, -1, 2).reshape(tokens, -1),
        torch.stack((first, rest), dim=2).view(tokens, -1).to(torch.bfloat16),
    )


def _bags(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """What ``F.embedding_bag`` gives, less what it asks first."""
    bags = torch.arange(0, places_TK.numel(), places_TK.shape[1])
    weights = None if weights_TK is None else weights_TK.reshape(-1)
    return torch.embedding_bag(rows.contiguous(), places_TK.reshape(-1), bags, False, 0, False, weights)[0]


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
