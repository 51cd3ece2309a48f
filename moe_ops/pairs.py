"""Routed pairs in plain tensor code: local expert ids, places in sorted order, capacity. Nothing here synchronises.

Pair ``p = t * K + k`` is token t's k-th selected expert.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local_ids(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Local expert of every pair, ``num_experts`` for pairs that contribute nothing.

    Args:
        topk_ids: ``[T, K]`` int32 or int64, global ids; anything out of range counts as dropped.
        expert_map: ``[E_global]`` global id -> local id or -1, or None when ids are local.

    Returns:
        ``[R]`` int64.
    """
    ids = topk_ids.reshape(-1).long()
    if expert_map is not None:
        size = expert_map.shape[0]
        # Ids that the map does not have read one place behind it.
        mapped = torch.cat((expert_map.long(), expert_map.new_full((1,), -1, dtype=torch.int64)))
        ids = mapped[torch.where((ids >= 0) & (ids < size), ids, size)]
    return ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)


def count_pairs(ids: Tensor, num_experts: int) -> Tensor:
    """Pairs per expert, ``[num_experts]`` int64, from the result of :func:`local_ids`."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:num_experts]


def places(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable order of pairs by expert.

    Returns:
        counts ``[E]``, order ``[R]`` (pair at each sorted position, dropped pairs last) and rank ``[R]`` (place of each
        pair among the pairs of its expert, in pair order), all int64.
    """
    counts = count_pairs(ids, num_experts)
    sorted_ids, order = ids.sort(stable=True)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    sorted_rank = torch.arange(ids.shape[0], device=ids.device) - starts[sorted_ids]
    rank = torch.empty_like(sorted_rank).scatter_(0, order, sorted_rank)
    return counts, order, rank


def drop_overflow(ids: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Local ids with every pair past the first ``capacity`` of its expert dropped."""
    _, _, rank = places(ids, num_experts)
    return ids.masked_fill(rank >= capacity, num_experts)


def invert(pair_to_row: Tensor, count: int) -> Tensor:
    """Pair of every row, ``[count]`` int64; rows that hold no pair get pair 0."""
    flat = pair_to_row.reshape(-1).long()
    pairs = torch.arange(flat.shape[0], device=flat.device)
    inverse = torch.zeros(count + 1, dtype=torch.int64, device=flat.device)
    return inverse.scatter_(0, torch.where(flat < 0, count, flat), pairs)[:count]


def used_rows(rows: Tensor, extents: Tensor) -> Tensor:
    """Which rows hold a pair, boolean ``[R, 1]`` or ``[E, C, 1]``.

    Args:
        rows: ``[R, H]`` sorted by expert, or a batch ``[E, C, H]``.
        extents: ``[E]``: cumulative ends, or how many rows of each expert's block are used.
    """
    places = torch.arange(rows.shape[-2], device=rows.device)
    if rows.dim() == 3:
        ends = extents.unsqueeze(1)
    else:
        ends = extents[-1:] if extents.shape[0] else extents.new_zeros(1)  # without experts no row is used
    return (places < ends).unsqueeze(-1)
