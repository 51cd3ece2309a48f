"""The gradient of ``fused_experts``, in plain tensor code and the stage operators: no synchronisation on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, join_glu, split_glu
from meta.calls import BackwardCall
from meta.dims import GRADIENTS, accumulation_dtype
from moe_ops.pairs import drop_overflow, invert, local_ids

#: Runs a stage operator by its name and flat arguments.
Stage = Callable[..., Any]


def fused_experts_backward(call: BackwardCall, stage: Stage) -> tuple[Tensor, ...]:
    """Gradients of ``fused_experts``, in sorted rows.

    With rows ``x``, ``h = x W1 + b1``, ``a = act(h)``, ``y = a W2 + b2``, out = sum of ``w y``: ``u = dout W2`` gives
    ``dw = <u, a> + <dout, b2>`` without a second forward GEMM (SonicMoE, arXiv 2512.14080), ``dh = act'(h) (w u)``,
    ``dx = dh W1^T``, ``dW1 = dh^T x``, ``dW2 = (w dout)^T a``. With ``weight_on_input`` the weight multiplies ``x``.

    The stages choose their own backends: a request binds the operator that it was made for, and not every backend has
    stages.

    Returns:
        Gradients of :data:`meta.dims.GRADIENTS`, each of its primal's shape and dtype, numel 0 where not needed.
    """
    weights, glu, needs = call.experts, call.experts.glu, call.needs
    gate_up_proj, down_proj = weights.gate_up.data, weights.down.data
    up_proj = None if weights.up is None else weights.up.data
    topk_ids, expert_map, experts = call.topk_ids, call.expert_map, gate_up_proj.shape[0]
    tokens, top_k = topk_ids.shape
    activation = ACTIVATIONS[glu.activation]
    if call.capacity is not None:
        ids = drop_overflow(local_ids(topk_ids, expert_map, experts), experts, call.capacity)
        topk_ids, expert_map = ids.masked_fill(ids == experts, -1).view(tokens, top_k), None
    rows, offsets, pair_to_row = stage(
        "moe_permute", call.hidden_states.data, topk_ids, expert_map, num_experts=experts
    )
    pairs_R = invert(pair_to_row, rows.shape[0])
    wide = accumulation_dtype(rows.dtype)
    weights_R = call.topk_weights.reshape(-1, 1).index_select(0, pairs_R).to(wide)
    x = (rows.to(wide) * weights_R).to(rows.dtype) if call.weight_on_input else rows

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        result: Tensor = stage("grouped_mm", x, weight, offsets, [], bias, out_dtype=dtype)
        return result

    first = [gate_up_proj] if up_proj is None else [gate_up_proj, up_proj]
    gate, up = gate_and_up(lambda w, b: product(x, w, b).to(wide), first, weights.gate_up_bias, glu.layout)
    grad_y = call.grad_output.index_select(0, pairs_R // max(top_k, 1))
    grad_a = product(grad_y, down_proj.transpose(1, 2), None).to(wide)
    value = activation.eager(gate, up, glu.alpha, glu.limit)
    dot_R = (grad_a * value).sum(dim=-1)
    if weights.down_bias is not None and not call.weight_on_input:
        bias_rows = weights.down_bias.index_select(0, _expert_of_row(offsets, rows.shape[0]).clamp(max=experts - 1))
        dot_R = dot_R + (grad_y.to(wide) * bias_rows.to(wide)).sum(dim=-1)
    if not call.weight_on_input:
        grad_a = grad_a * weights_R
        grad_y = (grad_y.to(wide) * weights_R).to(rows.dtype)
    halves = activation.backward(grad_a, gate, up, glu.alpha, glu.limit)
    grad_h = join_glu(*halves, glu.layout).to(rows.dtype)
    parts = grad_h.chunk(len(first), dim=1)

    grads: dict[str, Tensor] = {}
    if needs["hidden_states"] or (needs["topk_weights"] and call.weight_on_input):
        grad_x = through_first(product, parts, first, wide).to(rows.dtype)
        if call.weight_on_input:
            dot_R = (grad_x.to(wide) * rows.to(wide)).sum(dim=-1)
            grad_x = (grad_x.to(wide) * weights_R).to(rows.dtype)
        ones = torch.ones_like(pair_to_row, dtype=torch.float32)
        grads["hidden_states"] = stage("moe_unpermute", grad_x, pair_to_row, ones)
    for name, part in zip(("gate_up_proj", "up_proj"), parts, strict=False):
        if needs[name]:
            grads[name] = stage("grouped_wgrad", part, x, offsets)
    if needs["down_proj"]:
        grads["down_proj"] = stage("grouped_wgrad", grad_y, value.to(rows.dtype), offsets)
    if needs["topk_weights"]:
        grads["topk_weights"] = _pair_sums(dot_R, pair_to_row)
    if needs["gate_up_bias"]:
        grads["gate_up_bias"] = expert_sums(grad_h, offsets, stage)
    if needs["down_bias"]:
        grads["down_bias"] = expert_sums(grad_y, offsets, stage)
    return tuple(
        grads[name].to(dtype).contiguous() if needs[name] else rows.new_empty(0, dtype=torch.float32)
        for name, (_, dtype) in zip(GRADIENTS, call.outputs, strict=True)
    )


def gate_and_up(
    product: Callable[..., Tensor], weights: Sequence[Tensor], bias: Tensor | None, layout: str
) -> tuple[Tensor, Tensor | None]:
    """What stands before the activation; `product(weight, bias)`, of one stacked weight, or of the halves' two."""
    if len(weights) == 1:
        return split_glu(product(weights[0], bias), layout)
    halves = (None, None) if bias is None else bias.chunk(2, dim=1)
    gate, up = (product(weight, half) for weight, half in zip(weights, halves, strict=True))
    return gate, up


def through_first(
    product: Callable[..., Tensor], parts: Sequence[Tensor], weights: Sequence[Tensor], wide: torch.dtype
) -> Tensor:
    """Gradient of the rows before the first projection; `product(rows, weight, None, dtype)`, whose gradients are
    `parts`. The sum of two halves is in `wide`, so that it is rounded once.
    """
    dtype = None if len(weights) == 1 else wide
    terms = [product(part, weight.transpose(1, 2), None, dtype) for part, weight in zip(parts, weights, strict=True)]
    return sum(terms[1:], terms[0])


def expert_sums(grad_rows: Tensor, offsets: Tensor, stage: Stage) -> Tensor:
    """Sum of every expert's rows, ``[E, N]``, in a fixed order; a NaN is in the sum of its own expert alone."""
    wide = accumulation_dtype(grad_rows.dtype)
    ones = grad_rows.new_ones((grad_rows.shape[0], 1), dtype=wide)
    sums: Tensor = stage("grouped_wgrad", grad_rows.to(wide), ones, offsets)
    return sums.squeeze(2)


def _expert_of_row(offsets: Tensor, count: int) -> Tensor:
    """Expert of every sorted row, E for the rows past the last one, ``[count]`` int64."""
    return torch.searchsorted(offsets, torch.arange(count, device=offsets.device, dtype=offsets.dtype), right=True)


def _pair_sums(values_R: Tensor, pair_to_row: Tensor) -> Tensor:
    """Value of every pair's row, ``[T, K]``; 0 for dropped pairs."""
    picked = values_R.index_select(0, pair_to_row.reshape(-1).clamp(min=0)) if values_R.numel() else values_R
    return torch.where(pair_to_row < 0, 0.0, picked.view(pair_to_row.shape))
