"""Sorted rows and what is done to them between a layer's products, in plain tensor code: what a backend has no kernels
for. A backend that has some gives functions of the same names. Nothing here synchronises.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, join_glu, split_glu
from meta.calls import GatherCall
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


def sort_pairs(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None, *, counted_for: Tensor) -> Routed:
    """Stable sort of the pairs by expert.

    Args:
        topk_ids: ``[T, K]`` int32 or int64; expert_map: ``[E_global]`` or None.
        counted_for: the weights that :mod:`moe_ops.counters` knows the layer by.
    """
    ids = local_ids(topk_ids, expert_map, num_experts)
    counts, order, rank = places(ids, num_experts)
    if counters.active:
        counters.count(counted_for, counts.tolist())
    ends = counts.cumsum(0)
    starts = torch.cat((ends - counts, ends.new_zeros(1)))
    pair_to_row = (starts[ids] + rank).masked_fill(ids == num_experts, -1)
    kept = ends[-1:] if num_experts else ends.new_zeros(1)
    row_to_pair = order.masked_fill(torch.arange(ids.shape[0], device=ids.device) >= kept, -1)
    return Routed(ends.int(), row_to_pair.int(), pair_to_row.int().view(topk_ids.shape))


def gather_rows(call: GatherCall) -> Tensor:
    """The token of every row, times the weight of its pair if there are weights, in the accumulation dtype and rounded
    once, ``[R, H]``; rows past the last are those of token 0.
    """
    pairs = call.row_to_pair.long().clamp(min=0)
    rows = call.tokens.index_select(0, pairs // max(call.pair_to_row.shape[1], 1))
    if call.topk_weights is None:
        return rows
    wide = accumulation_dtype(rows.dtype)
    return (rows.to(wide) * call.topk_weights.reshape(-1, 1).index_select(0, pairs).to(wide)).to(rows.dtype)


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
    row_to_pair: Tensor,
    glu: Glu,
    offsets: Tensor,
    *,
    value: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients through the activation and the routing weights behind the second product.

    Args:
        grad: ``[R, I]``, of the activation's result where its weight is 1.
        gate_up, up, offsets: of :func:`glu_rows`.
        topk_weights: ``[T, K]``, or None for 1.
        row_to_pair: int32 ``[R]``.
        value: whether the weighted result is asked for.

    Returns:
        (gradient of ``gate_up``, of ``up`` or None, weighted result ``[R, I]`` or None, ``[R]`` in the accumulation
        dtype: the gradient of each row's weight).
    """
    wide = accumulation_dtype(grad.dtype)
    gate, other = _halves(gate_up, up, glu.layout)
    row, grad = ACTIVATIONS[glu.activation], grad.to(wide)
    result = row.eager(gate, other, glu.alpha, glu.limit)
    dots = (grad * result).sum(dim=-1)
    if topk_weights is not None:
        pairs = row_to_pair.long().clamp(min=0)
        weights = topk_weights.reshape(-1, 1).index_select(0, pairs).to(wide)
        grad, result = grad * weights, result * weights
    of_gate, of_up = row.backward(grad, gate, other, glu.alpha, glu.limit)
    weighted = result.to(gate_up.dtype) if value else None
    if up is not None and of_up is not None:
        return of_gate.to(gate_up.dtype), of_up.to(gate_up.dtype), weighted, dots
    return join_glu(of_gate, of_up, glu.layout).to(gate_up.dtype), None, weighted, dots


def _halves(gate_up: Tensor, up: Tensor | None, layout: str) -> tuple[Tensor, Tensor | None]:
    wide = accumulation_dtype(gate_up.dtype)
    gate, other = (gate_up, up) if layout == "separate" else split_glu(gate_up, layout)
    return gate.to(wide), None if other is None else other.to(wide)
