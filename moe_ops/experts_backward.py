"""The gradient of ``fused_experts``, in plain tensor code and the stage operators: no synchronisation on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meta.activations import join_glu, resolve_activation, split_glu
from meta.shapes import RULES
from moe_ops import dispatch
from moe_ops.pairs import drop_overflow, invert, local_ids


def fused_experts_backward(
    grad_output: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    *,
    needs: Sequence[bool],
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str = "concat",
    weight_on_input: bool = False,
    format: str = "grouped",
    capacity: int | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of ``fused_experts``, in sorted rows.

    With rows ``x``, ``h = x W1 + b1``, ``a = act(h)``, ``y = a W2 + b2``, out = sum of ``w y``: ``u = dout W2`` gives
    ``dw = <u, a> + <dout, b2>`` without a second forward GEMM (SonicMoE, arXiv 2512.14080), ``dh = act'(h) (w u)``,
    ``dx = dh W1^T``, ``dW1 = dh^T x``, ``dW2 = (w dout)^T a``. With ``weight_on_input`` the weight multiplies ``x``.

    The stages choose their own backends: a request binds the operator that it was made for, and not every backend has
    stages.

    Returns:
        Gradients of hidden_states, gate_up_proj, down_proj, topk_weights, gate_up_bias and down_bias, each of its
        primal's shape and dtype, numel 0 where ``needs`` is False.
    """
    experts, (tokens, top_k) = gate_up_proj.shape[0], topk_ids.shape
    row, alpha, limit = resolve_activation("fused_experts_backward", activation, alpha, limit)
    if format == "batched":
        ids = local_ids(topk_ids, expert_map, experts)
        ids = drop_overflow(ids, experts, tokens if capacity is None else capacity)
        topk_ids, expert_map = ids.masked_fill(ids == experts, -1).view(tokens, top_k), None
    rows, offsets, pair_to_row = _stage("moe_permute", hidden_states, topk_ids, expert_map, num_experts=experts)
    pairs_R = invert(pair_to_row, rows.shape[0])
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    weights_R = topk_weights.reshape(-1, 1).index_select(0, pairs_R).to(wide)
    x = (rows.to(wide) * weights_R).to(rows.dtype) if weight_on_input else rows

    gate, up = split_glu(_stage("grouped_mm", x, gate_up_proj, offsets, gate_up_bias).to(wide), glu_layout)
    grad_y = grad_output.index_select(0, pairs_R // max(top_k, 1))
    grad_a = _stage("grouped_mm", grad_y, down_proj.transpose(1, 2), offsets).to(wide)
    value = row.eager(gate, up, alpha, limit)
    dot_R = (grad_a * value).sum(dim=-1)
    if down_bias is not None and not weight_on_input:
        bias_rows = down_bias.index_select(0, _expert_of_row(offsets, rows.shape[0]).clamp(max=experts - 1))
        dot_R = dot_R + (grad_y.to(wide) * bias_rows.to(wide)).sum(dim=-1)
    if not weight_on_input:
        grad_a = grad_a * weights_R
        grad_y = (grad_y.to(wide) * weights_R).to(rows.dtype)
    grad_h = join_glu(*row.backward(grad_a, gate, up, alpha, limit), glu_layout).to(rows.dtype)

    grad_hidden = None
    if needs[0] or (needs[3] and weight_on_input):
        grad_x = _stage("grouped_mm", grad_h, gate_up_proj.transpose(1, 2), offsets)
        if weight_on_input:
            dot_R = (grad_x.to(wide) * rows.to(wide)).sum(dim=-1)
            grad_x = (grad_x.to(wide) * weights_R).to(rows.dtype)
        grad_hidden = _stage("moe_unpermute", grad_x, pair_to_row, torch.ones_like(pair_to_row, dtype=torch.float32))
    grads = (
        grad_hidden,
        _wgrad(grad_h, x, offsets) if needs[1] else None,
        _wgrad(grad_y, value.to(rows.dtype), offsets) if needs[2] else None,
        _pair_sums(dot_R, pair_to_row) if needs[3] else None,
        _expert_sums(grad_h, offsets) if needs[4] else None,
        _expert_sums(grad_y, offsets) if needs[5] else None,
    )
    primals = (hidden_states, gate_up_proj, down_proj, topk_weights, gate_up_bias, down_bias)
    return tuple(
        grad.to(primal.dtype).contiguous()
        if need and grad is not None and primal is not None
        else hidden_states.new_empty(0, dtype=torch.float32)
        for grad, primal, need in zip(grads, primals, needs, strict=True)
    )


def _stage(op: str, *args: Any, **kwargs: Any) -> Any:
    """A stage operator, called below torch's dispatcher."""
    return dispatch.run(op, None, args, kwargs)


def _wgrad(grad_rows: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """``[E, N, K]``: the backend's own ``grouped_wgrad(grad_rows, rows, offsets)``, else :func:`grouped_wgrad`."""
    weight = grad_rows.new_empty((offsets.shape[0], 0, rows.shape[1]))
    problem = RULES["grouped_mm"](rows, weight, offsets).problem
    module = dispatch.choose(problem, None, "grouped_mm")
    return getattr(module, "grouped_wgrad", grouped_wgrad)(grad_rows, rows, offsets)


def _expert_sums(grad_rows: Tensor, offsets: Tensor) -> Tensor:
    """Sum of every expert's rows, ``[E, N]``, in a fixed order; a NaN is in the sum of its own expert alone."""
    wide = torch.float64 if grad_rows.dtype == torch.float64 else torch.float32
    ones = grad_rows.new_ones((grad_rows.shape[0], 1), dtype=wide)
    return _wgrad(grad_rows.to(wide), ones, offsets).squeeze(2)


def grouped_wgrad(grad_rows: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """``out[e] = grad_rows[rows of e].T @ rows[rows of e]`` on any device: one masked product per expert.

    The work is E times what it must be; a backend with a segmented product replaces it.

    Args:
        grad_rows: ``[R, N]``; rows past ``offsets[-1]`` may hold anything.
        rows: ``[R, K]``, likewise.
        offsets: ``[E]`` int32 cumulative ends.

    Returns:
        ``[E, N, K]`` in the dtype of the rows.
    """
    expert_of_row = _expert_of_row(offsets, rows.shape[0])
    products = []
    for expert in range(offsets.shape[0]):
        mine = (expert_of_row == expert).unsqueeze(1)
        products.append(torch.where(mine, grad_rows, 0).t() @ torch.where(mine, rows, 0))
    return torch.stack(products)


def _expert_of_row(offsets: Tensor, count: int) -> Tensor:
    """Expert of every sorted row, E for the rows past the last one, ``[count]`` int64."""
    return torch.searchsorted(offsets, torch.arange(count, device=offsets.device, dtype=offsets.dtype), right=True)


def _pair_sums(values_R: Tensor, pair_to_row: Tensor) -> Tensor:
    """Value of every pair's row, ``[T, K]``; 0 for dropped pairs."""
    picked = values_R.index_select(0, pair_to_row.reshape(-1).clamp(min=0)) if values_R.numel() else values_R
    return torch.where(pair_to_row < 0, 0.0, picked.view(pair_to_row.shape))
