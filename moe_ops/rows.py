"""Sorted rows and what is done to them between a layer's products, in plain tensor code: what a backend has no kernels
for. A backend that has some gives functions of the same names. Nothing here synchronises.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, join_glu, split_glu
from meta.dims import accumulation_dtype
from meta.operands import Glu
from moe_ops import counters
from moe_ops.pairs import local_ids, places


class Routed(NamedTuple):
    """Where the pairs of a call are among rows sorted by expert.

    Attributes:
        offsets: int32 ``[E]``, cumulative ends.
        row_to_pair: int32 ``[R]``, -1 past the last row.
        pair_to_row: int32 ``[T, K]``, -1 for dropped pairs.
    """

    offsets: Tensor
    row_to_pair: Tensor
    pair_to_row: Tensor


def sort_pairs(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None, *, counted_for: Tensor | None) -> Routed:
    """Stable sort of the pairs by expert.

    Args:
        topk_ids: ``[T, K]`` int32 or int64; expert_map: ``[E_global]`` or None.
        counted_for: the weights that :mod:`moe_ops.counters` knows the layer by, None to count nothing.
    """
    ids = local_ids(topk_ids, expert_map, num_experts)
    counts, order, rank = places(ids, num_experts)
    if counters.active and counted_for is not None:
        counters.count(counted_for, counts.tolist())
    ends = counts.cumsum(0)
    starts = torch.cat((ends - counts, ends.new_zeros(1)))
    pair_to_row = (starts[ids] + rank).masked_fill(ids == num_experts, -1)
    kept = ends[-1:] if num_experts else ends.new_zeros(1)
    row_to_pair = order.masked_fill(torch.arange(ids.shape[0], device=ids.device) >= kept, -1)
    return Routed(ends.int(), row_to_pair.int(), pair_to_row.int().view(topk_ids.shape))


def gather_rows(tokens: Tensor, row_to_pair: Tensor, pair_to_row: Tensor, topk_weights: Tensor | None = None) -> Tensor:
    """The token of every row, times the weight of its pair if there are weights, in the accumulation dtype and rounded
    once, ``[R, H]``; rows past the last are those of token 0.
    """
    pairs = row_to_pair.long().clamp(min=0)
    rows = tokens.index_select(0, pairs // max(pair_to_row.shape[1], 1))
    if topk_weights is None:
        return rows
    wide = accumulation_dtype(rows.dtype)
    return (rows.to(wide) * topk_weights.reshape(-1, 1).index_select(0, pairs).to(wide)).to(rows.dtype)


def gathers(tokens: Tensor, pairs: int, experts: int, columns: int) -> bool:
    """Whether ``grouped_wgrad`` of ``tokens`` and rows of so many pairs, of experts about ``columns`` wide, is faster
    than of copies that :func:`collect` makes.
    """
    return False


def gathers_any_number(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """The same, however many pairs there are: all that is known while a graph is traced."""
    return False


def collect(
    grad_rows: Tensor,
    pair_to_row: Tensor,
    row_to_pair: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor | None,
    grad_output: Tensor | None,
    *,
    rows: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of tokens from those of their rows, in the accumulation dtype and the order of k; and rows of tokens,
    which belong to the products that follow.

    Args:
        grad_rows: ``[R, H]``, whose memory may be taken; those past the last are not read.
        pair_to_row, row_to_pair: int32 ``[T, K]``, ``[R]``.
        hidden_states: ``[T, H]``.
        topk_weights: ``[T, K]`` by which a row was its token multiplied, or None for 1.
        grad_output: ``[T, H]`` or None.
        rows: whether rows of hidden_states are asked for, times their weights.

    Returns:
        (gradient of hidden_states ``[T, H]``, rows of hidden_states ``[R, H]`` or None, of grad_output or None,
        gradient of topk_weights ``[T, K]`` in the accumulation dtype or None without them).
    """
    dtype, wide = grad_rows.dtype, accumulation_dtype(grad_rows.dtype)
    total = torch.zeros(hidden_states.shape, dtype=wide, device=grad_rows.device)
    dots: list[Tensor] = []
    for of_slot in pair_to_row.unbind(1):
        dropped = of_slot < 0
        row = grad_rows.index_select(0, of_slot.clamp(min=0)).to(wide).masked_fill(dropped.unsqueeze(1), 0.0)
        if topk_weights is None:
            total += row
        else:
            weight = topk_weights[:, len(dots), None].to(wide).masked_fill(dropped.unsqueeze(1), 0.0)
            dots.append(torch.where(dropped, 0.0, (row * hidden_states.to(wide)).sum(dim=1)))
            total += row * weight
    of_weights = None
    if topk_weights is not None:
        of_weights = torch.stack(dots, dim=1) if dots else topk_weights.new_zeros(topk_weights.shape, dtype=wide)
    return (
        total.to(dtype),
        gather_rows(hidden_states, row_to_pair, pair_to_row, topk_weights) if rows else None,
        None if grad_output is None else gather_rows(grad_output, row_to_pair, pair_to_row),
        of_weights,
    )


def glu_rows(gate_up: Tensor, up: Tensor | None, glu: Glu, offsets: Tensor) -> Tensor:
    """The activation's result ``[R, I]``, in the dtype of ``gate_up``.

    Args:
        gate_up: ``[R, 2I]``, or the gate's ``[R, I]`` beside ``up``, or without a gate.
        offsets: int32 ``[E]``.
    """
    gate, other = _halves(gate_up, up, glu.layout)
    return ACTIVATIONS[glu.activation].eager(gate, other, glu.alpha, glu.limit).to(gate_up.dtype)


def glu_rows_backward(
    grad: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    topk_weights: Tensor | None,
    places: tuple[Tensor, Tensor],
    glu: Glu,
    offsets: Tensor,
    *,
    value: bool,
    dots: Tensor | None,
    in_place: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients through the activation and the routing weights behind the second product.

    Args:
        grad: ``[R, I]``, of the activation's result where its weight is 1; its memory may be taken.
        gate_up, up, offsets: of :func:`glu_rows`.
        topk_weights: ``[T, K]``, or None for 1.
        places: int32 row_to_pair ``[R]`` and pair_to_row ``[T, K]``.
        value: whether the weighted result is asked for.
        dots: ``[R]``, what comes to the gradient of each row's weight besides, or None.
        in_place: whether the memory of ``gate_up`` and ``up`` may be taken for their gradients.

    Returns:
        (gradient of ``gate_up``, of ``up`` or None, weighted result ``[R, I]`` or None, gradient of topk_weights ``[T,
        K]`` in the accumulation dtype, 0 for dropped pairs, or None without them).
    """
    wide = accumulation_dtype(grad.dtype)
    gate, other = _halves(gate_up, up, glu.layout)
    row, grad = ACTIVATIONS[glu.activation], grad.to(wide)
    result = row.eager(gate, other, glu.alpha, glu.limit)
    of_weights = None
    if topk_weights is not None:
        row_to_pair, pair_to_row = places
        of_rows = (grad * result).sum(dim=-1)
        of_rows = of_rows if dots is None else of_rows + dots
        kept, at = pair_to_row >= 0, pair_to_row.reshape(-1).clamp(min=0)
        of_pairs = of_rows.index_select(0, at) if of_rows.numel() else of_rows
        of_weights = torch.where(kept, of_pairs.view(pair_to_row.shape), 0.0)
        pairs = row_to_pair.long().clamp(min=0)
        weights = topk_weights.reshape(-1, 1).index_select(0, pairs).to(wide)
        grad, result = grad * weights, result * weights
    of_gate, of_up = row.backward(grad, gate, other, glu.alpha, glu.limit)
    weighted = result.to(gate_up.dtype) if value else None
    if up is not None and of_up is not None:
        return of_gate.to(gate_up.dtype), of_up.to(gate_up.dtype), weighted, of_weights
    return join_glu(of_gate, of_up, glu.layout).to(gate_up.dtype), None, weighted, of_weights


def _halves(gate_up: Tensor, up: Tensor | None, layout: str) -> tuple[Tensor, Tensor | None]:
    wide = accumulation_dtype(gate_up.dtype)
    gate, other = (gate_up, up) if layout == "separate" else split_glu(gate_up, layout)
    return gate.to(wide), None if other is None else other.to(wide)
