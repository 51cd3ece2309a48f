"""Public functions for the stages of a MoE layer, for code that composes them itself.

The grouped chain is ``moe_permute -> grouped_mm_glu -> grouped_mm -> moe_unpermute`` on rows sorted by expert; the
batched chain is ``batched_dispatch -> batched_mm_glu -> batched_mm -> batched_combine`` on an ``[E, C, H]`` batch.
All
but the two that quantise differentiate; :mod:`moe_ops.layer` is a chain in three steps. See :mod:`moe_ops.api` for
errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops.integrations.containers import are_plain, unpacked
from moe_ops.ops import call


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy every token once per selected expert, rows sorted by expert (stable: by expert, then pair ``t * K + k``).

    Args:
        hidden_states: ``[T, H]`` float.
        topk_ids: ``[T, K]`` int32 or int64; -1 and ids out of range are dropped.
        expert_map: ``[E_global]`` global id to local id or -1, or None when ids are local.
        num_experts: E, experts held here.

    Returns:
        rows ``[R, H]`` (rows past ``offsets[-1]`` are uninitialised), offsets int32 ``[E]`` (cumulative ends), and
        pair_to_row int32 ``[T, K]`` (-1 = dropped).

    Raises:
        ValueError: a wrong shape, dtype or device.

    Source: MegaBlocks (arXiv 2211.15841).

    Example:
        >>> ids = torch.tensor([[1], [0], [1]])
        >>> rows, offsets, pair_to_row = moe_ops.moe_permute(torch.randn(3, 4), ids, num_experts=2)
        >>> offsets.tolist(), pair_to_row.flatten().tolist()
        ([1, 3], [1, 0, 2])
    """
    return call("moe_permute", hidden_states, topk_ids, expert_map, num_experts=num_experts)


def moe_unpermute(rows: Tensor, pair_to_row: Tensor, topk_weights: Tensor, *, added: Tensor | None = None) -> Tensor:
    """Weighted sum of every token's rows, fp32, in the order of k.

    Args:
        rows: ``[R, H]`` float.
        pair_to_row: ``[T, K]`` int32 of :func:`moe_permute`; -1 contributes exactly zero.
        topk_weights: ``[T, K]`` any float dtype.
        added: ``[T, H]`` any float dtype, a shared expert's output: added to the sum before it is rounded, or None.

    Returns:
        ``[T, H]`` in the dtype of rows.

    Raises:
        ValueError: a wrong shape, dtype or device.

    Source: MegaBlocks (arXiv 2211.15841).

    Example:
        >>> pair_to_row = torch.tensor([[0, 1]], dtype=torch.int32)
        >>> moe_ops.moe_unpermute(torch.ones(2, 4), pair_to_row, torch.ones(1, 2)).tolist()
        [[2.0, 2.0, 2.0, 2.0]]
    """
    return call("moe_unpermute", rows, pair_to_row, topk_weights, added)


def batched_dispatch(
    hidden_states: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None = None,
    *,
    num_experts: int,
    capacity: int | None = None,
    slot_order: str = "token",
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy every token into a batch of its selected expert; pairs past the first ``capacity`` of an expert are dropped.

    Args:
        hidden_states: ``[T, H]`` float.
        topk_ids: ``[T, K]`` int32 or int64; -1 and ids out of range are dropped.
        expert_map: ``[E_global]`` global id to local id or -1, or None when ids are local.
        num_experts: E, experts held here.
        capacity: C, rows per expert; None means T.
        slot_order: which pairs come first in an expert: "token" (by token, then k), or "choice" (every token's first
            choice before any second one).

    Returns:
        batch ``[E, C, H]`` (rows past the count are uninitialised), expert_num_tokens int32 ``[E]`` (at most C), and
        slots int32 ``[T, K]`` (``e * C + c``, -1 = dropped).

    Raises:
        ValueError: a wrong shape, dtype or device; overflow raises under :func:`moe_ops.debug` only.

    Source: GShard (arXiv 2006.16668); its capacity counts first choices first.

    Example:
        >>> ids = torch.tensor([[1], [0], [1]])
        >>> batch, counts, slots = moe_ops.batched_dispatch(torch.randn(3, 4), ids, num_experts=2, capacity=1)
        >>> counts.tolist(), slots.flatten().tolist()
        ([1, 1], [1, 0, -1])
    """
    return call(
        "batched_dispatch",
        hidden_states,
        topk_ids,
        expert_map,
        num_experts=num_experts,
        capacity=capacity,
        slot_order=slot_order,
    )


def batched_combine(batch: Tensor, slots: Tensor, topk_weights: Tensor, *, added: Tensor | None = None) -> Tensor:
    """Weighted sum of every token's slots, fp32, in the order of k.

    Args:
        batch: ``[E, C, H]`` float.
        slots: ``[T, K]`` int32 of :func:`batched_dispatch`; -1 contributes exactly zero.
        topk_weights: ``[T, K]`` any float dtype.
        added: of :func:`moe_unpermute`.

    Returns:
        ``[T, H]`` in the dtype of batch.

    Raises:
        ValueError: a wrong shape, dtype or device.

    Source: GShard (arXiv 2006.16668).

    Example:
        >>> slots = torch.tensor([[0, -1]], dtype=torch.int32)
        >>> moe_ops.batched_combine(torch.ones(2, 1, 4), slots, torch.ones(1, 2)).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """
    return call("batched_combine", batch, slots, topk_weights, added)


def quantize_rows(rows: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    """Quantise activations for the GEMMs of ``scheme``.

    Args:
        rows: ``[R, K]`` float.
        scheme: a name of :data:`meta.schemes.SCHEMES` that quantises activations.

    Returns:
        stored ``[R, K]`` and its fp32 scale ``[R, K groups]``: ``[R, ceil(K / 128)]`` of the schemes whose rows are
        ``fp8_1x128``, ``[R, 1]`` of those that quantise whole rows.

    Raises:
        ValueError: a wrong shape or dtype, or a scheme that keeps activations as they are.

    Source: that of the scheme's row; 1 x 128 tiles, DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    Example:
        >>> stored, scale = moe_ops.quantize_rows(torch.randn(3, 256), scheme="fp8_block128")
        >>> stored.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([3, 2]))
    """
    return call("quantize_rows", rows, scheme=scheme)


def quantize_batched(batch: Tensor, expert_num_tokens: Tensor, *, scheme: str) -> tuple[Tensor, Tensor]:
    """As :func:`quantize_rows` for an expert batch; only counted rows are quantised.

    Args:
        batch: ``[E, C, K]`` float.
        expert_num_tokens: ``[E]`` int32.
        scheme: a name of :data:`meta.schemes.SCHEMES` that quantises activations.

    Returns:
        stored ``[E, C, K]`` and its fp32 scale ``[E, C, K groups]``, see :func:`quantize_rows`; rows past the count are
        uninitialised.

    Raises:
        ValueError: a wrong shape or dtype, or a scheme that keeps activations as they are.

    Source: that of the scheme's row; 1 x 128 tiles, DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    Example:
        >>> counts = torch.tensor([1, 0], dtype=torch.int32)
        >>> moe_ops.quantize_batched(torch.randn(2, 1, 128), counts, scheme="fp8_block128")[1].shape
        torch.Size([2, 1, 1])
    """
    return call("quantize_batched", batch, expert_num_tokens, scheme=scheme)


def _unpacked(
    op: str, weight: Any, up_weight: Any, scheme: str | None, weight_scales: Sequence[Tensor]
) -> tuple[Any, Any, str | None, Sequence[Tensor]]:
    """``(weight, up_weight, scheme, weight_scales)``, where the weights are containers: what they hold."""
    found = unpacked(op, {"weight": weight, "up_weight": up_weight}, scheme, {"weight_scales": weight_scales})
    if found is None:
        return weight, up_weight, scheme, weight_scales
    (weight, up_weight), (first, second) = found.data.values(), found.scales.values()
    return weight, up_weight, found.scheme, first + second


def grouped_mm_glu(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    up_weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str | None = "concat",
    scheme: str | None = None,
    weight_scales: Sequence[Tensor] = (),
    rows_scale: Tensor | None = None,
    quantize_output: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """First projection of sorted rows, with the activation computed from the fp32 accumulator, or, on a CPU, from the
    bf16 products of bf16 weights that torch has there.

    Args:
        rows: ``[R, K]`` in the weights' dtype; for quantised weights of any float dtype, or quantised by
            :func:`quantize_rows` where the scheme has a format for rows.
        weight: ``[E, N, K]`` any strides, N = 2I; N = I beside ``up_weight`` and when ``glu_layout`` is "none". A
            :class:`moe_ops.QuantizedWeight`, or torchao's tensor, brings its scheme and scales.
        offsets: ``[E]`` int32 cumulative ends, as :func:`moe_permute` returns.
        up_weight: ``[E, I, K]``, the up half where it is a tensor of its own, or None.
        bias: ``[E, 2I]`` (``[E, I]`` without a gate) float or None.
        activation, alpha, limit, glu_layout, scheme: of :func:`moe_ops.fused_experts`.
        weight_scales: what the scheme's row lists, see :func:`moe_ops.fused_experts`.
        rows_scale: fp32 ``[R, K groups]``, of :func:`quantize_rows`, for quantised rows.
        quantize_output: return the activations quantised for the next GEMM.

    Returns:
        ``[R, I]`` in the dtype of rows (bf16 for quantised rows); with ``quantize_output`` a pair, stored ``[R, I]``
        and fp32 scale ``[R, I groups]``, see :func:`quantize_rows`. Rows past ``offsets[-1]`` are uninitialised.

    Raises:
        ValueError: a wrong shape, dtype, device or name.

    Source: SwiGLU, GLU Variants Improve Transformer (arXiv 2002.05202).

    Example:
        >>> offsets = torch.tensor([2, 3], dtype=torch.int32)
        >>> moe_ops.grouped_mm_glu(torch.randn(3, 16), torch.randn(2, 64, 16), offsets).shape
        torch.Size([3, 32])
    """
    if not are_plain(weight, up_weight):
        weight, up_weight, scheme, weight_scales = _unpacked("grouped_mm_glu", weight, up_weight, scheme, weight_scales)
    value, scale = call(
        "grouped_mm_glu",
        rows,
        weight,
        offsets,
        weight_scales,
        up_weight,
        bias,
        rows_scale,
        activation=activation,
        alpha=alpha,
        limit=limit,
        glu_layout="none" if glu_layout is None else glu_layout,
        scheme=scheme,
        quantize_output=quantize_output,
    )
    return (value, scale) if quantize_output else value


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    scheme: str | None = None,
    weight_scales: Sequence[Tensor] = (),
    rows_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y[r] = rows[r] @ weight[e].T + bias[e]`` for sorted rows, e the expert of row r.

    Args:
        rows: ``[R, K]`` in the weights' dtype; for quantised weights of any float dtype, or quantised by
            :func:`quantize_rows` where the scheme has a format for rows.
        weight: of :func:`grouped_mm_glu`, ``[E, N, K]``.
        offsets: ``[E]`` int32 cumulative ends.
        bias: ``[E, N]`` float or None.
        scheme: a name of :data:`meta.schemes.SCHEMES`, or None.
        weight_scales: what the scheme's row lists, see :func:`moe_ops.fused_experts`.
        rows_scale: fp32 ``[R, K groups]``, of :func:`quantize_rows`, for quantised rows.
        out_dtype: dtype of the result; None means that of rows (bf16 for quantised rows).

    Returns:
        ``[R, N]``; rows past ``offsets[-1]`` are uninitialised.

    Raises:
        ValueError: a wrong shape, dtype, device or name.

    Source: MegaBlocks (arXiv 2211.15841).

    Example:
        >>> offsets = torch.tensor([2, 3], dtype=torch.int32)
        >>> moe_ops.grouped_mm(torch.randn(3, 16), torch.randn(2, 8, 16), offsets).shape
        torch.Size([3, 8])
    """
    if not are_plain(weight):
        weight, _, scheme, weight_scales = _unpacked("grouped_mm", weight, None, scheme, weight_scales)
    return call(
        "grouped_mm",
        rows,
        weight,
        offsets,
        weight_scales,
        bias,
        rows_scale,
        scheme=scheme,
        out_dtype=out_dtype,
    )


def batched_mm_glu(
    batch: Tensor,
    weight: Tensor,
    expert_num_tokens: Tensor,
    *,
    up_weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str | None = "concat",
    scheme: str | None = None,
    weight_scales: Sequence[Tensor] = (),
    batch_scale: Tensor | None = None,
    quantize_output: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`grouped_mm_glu` for an expert batch; rows past the count are neither read nor written.

    Args:
        batch: ``[E, C, K]`` in the weights' dtype; for quantised weights of any float dtype, or quantised by
            :func:`quantize_batched` where the scheme has a format for rows.
        weight: of :func:`grouped_mm_glu`.
        expert_num_tokens: ``[E]`` int32, rows of each expert.
        up_weight, ..., quantize_output: of :func:`grouped_mm_glu`.

    Returns:
        ``[E, C, I]``; with ``quantize_output`` a pair, stored ``[E, C, I]`` and fp32 scale ``[E, C, I groups]``.

    Raises:
        ValueError: a wrong shape, dtype, device or name.

    Source: SwiGLU, GLU Variants Improve Transformer (arXiv 2002.05202).

    Example:
        >>> counts = torch.tensor([3, 1], dtype=torch.int32)
        >>> moe_ops.batched_mm_glu(torch.randn(2, 3, 16), torch.randn(2, 64, 16), counts).shape
        torch.Size([2, 3, 32])
    """
    if not are_plain(weight, up_weight):
        weight, up_weight, scheme, weight_scales = _unpacked("batched_mm_glu", weight, up_weight, scheme, weight_scales)
    value, scale = call(
        "batched_mm_glu",
        batch,
        weight,
        expert_num_tokens,
        weight_scales,
        up_weight,
        bias,
        batch_scale,
        activation=activation,
        alpha=alpha,
        limit=limit,
        glu_layout="none" if glu_layout is None else glu_layout,
        scheme=scheme,
        quantize_output=quantize_output,
    )
    return (value, scale) if quantize_output else value


def batched_mm(
    batch: Tensor,
    weight: Tensor,
    expert_num_tokens: Tensor,
    *,
    bias: Tensor | None = None,
    scheme: str | None = None,
    weight_scales: Sequence[Tensor] = (),
    batch_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As :func:`grouped_mm` for an expert batch; rows past the count are neither read nor written.

    Args:
        batch: ``[E, C, K]`` in the weights' dtype; for quantised weights of any float dtype, or quantised by
            :func:`quantize_batched` where the scheme has a format for rows.
        weight: of :func:`grouped_mm`.
        expert_num_tokens: ``[E]`` int32, rows of each expert.
        bias, ..., out_dtype: of :func:`grouped_mm`.

    Returns:
        ``[E, C, N]``.

    Raises:
        ValueError: a wrong shape, dtype, device or name.

    Source: GShard (arXiv 2006.16668).

    Example:
        >>> counts = torch.tensor([3, 1], dtype=torch.int32)
        >>> moe_ops.batched_mm(torch.randn(2, 3, 16), torch.randn(2, 8, 16), counts).shape
        torch.Size([2, 3, 8])
    """
    if not are_plain(weight):
        weight, _, scheme, weight_scales = _unpacked("batched_mm", weight, None, scheme, weight_scales)
    return call(
        "batched_mm",
        batch,
        weight,
        expert_num_tokens,
        weight_scales,
        bias,
        batch_scale,
        scheme=scheme,
        out_dtype=out_dtype,
    )
