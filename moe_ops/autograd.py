"""Backward formulas of the operators, traceable: plain tensor code and calls of our own operators.

``fused_topk`` differentiates analytically through the selected scores. ``fused_experts`` saves its inputs alone and
runs ``fused_experts_backward``, which recomputes the first projection. Operators without a formula raise when an input
requires grad: without a registration autograd would record through their bodies without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meta.routing import ROUTINGS
from moe_ops.backends.compose import ROUTING_OPTIONS

Context = Any

#: Keyword arguments that the backward needs.
_LAYER_OPTIONS = ("activation", "alpha", "limit", "glu_layout", "weight_on_input", "format", "capacity")


def topk_backward(grad_TK: Tensor, logits_TE: Tensor, ids_TK: Tensor, options: dict[str, Any]) -> Tensor:
    """Gradient of the logits of :func:`meta.routing.route` from that of its weights; the selection is constant.

    Args:
        grad_TK: gradient of the weights, ``[T, K]`` fp32.
        logits_TE: ``[T, E]``.
        ids_TK: selected experts, ``[T, K]``.
        options: the keyword arguments of ``fused_topk``.

    Returns:
        ``[T, E]`` in the dtype of the logits; NaN where autograd through the formula gives NaN, which includes scores
        that are NaN and were not selected: their derivative is multiplied by a gradient of 0.
    """
    row = ROUTINGS[options["routing"]]
    logits, ids = logits_TE.float(), ids_TK.long()
    picked = logits.gather(1, ids)
    grad = grad_TK * options["scale"]
    raw = _selected(row.score, row.after, logits, picked, ids)
    if options["renormalize"]:
        total = raw.sum(dim=-1, keepdim=True) + options["renorm_eps"]
        grad = grad / total - (grad * raw).sum(dim=-1, keepdim=True) / total.square()
    if row.after == "softmax":
        grad = raw * (grad - (grad * raw).sum(dim=-1, keepdim=True))
    elif row.score == "softmax":
        probabilities = torch.softmax(logits, dim=-1)
        centred = torch.zeros_like(logits).scatter(1, ids, grad) - (grad * raw).sum(dim=-1, keepdim=True)
        grad_logits: Tensor = probabilities * centred
        return grad_logits.to(logits_TE.dtype)
    elif row.after == "sigmoid":
        grad = grad * raw * (1 - raw)
    dense = torch.zeros_like(logits).scatter(1, ids, grad)
    if row.score == "sigmoid":
        scores = torch.sigmoid(logits)
        dense = dense * scores * (1 - scores)
    elif row.score == "sqrtsoftplus":
        dense = dense * torch.sigmoid(logits) / (2 * F.softplus(logits).sqrt())
    return dense.to(logits_TE.dtype)


def _selected(score: str, after: str, logits: Tensor, picked: Tensor, ids: Tensor) -> Tensor:
    """Weights of the selected experts before renormalisation."""
    if score == "softmax":
        return torch.softmax(logits, dim=-1).gather(1, ids)
    if score == "sqrtsoftplus":
        return F.softplus(picked).sqrt()
    if after == "softmax":
        return torch.softmax(picked, dim=-1)
    return torch.sigmoid(picked) if "sigmoid" in (score, after) else picked


def _setup_topk(ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.options = dict(keyword_only_inputs)


def _backward_topk(ctx: Context, grad_weights: Tensor, grad_ids: Tensor | None) -> tuple[Tensor | None, None]:
    logits, ids = ctx.saved_tensors
    return topk_backward(grad_weights, logits, ids, ctx.options), None


def _refuse_quantized(op: str, gate_up_scale: Tensor | None, down_scale: Tensor | None) -> None:
    if gate_up_scale is not None or down_scale is not None:
        raise ValueError(
            f"{op}: inputs must not require grad for quantised weights, got one that does. "
            "Call it under torch.no_grad(), or train with unquantised weights."
        )


def _setup_experts(ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _refuse_quantized("fused_experts", inputs[8], inputs[9])
    ctx.save_for_backward(*inputs[:8])
    ctx.options = {name: keyword_only_inputs[name] for name in _LAYER_OPTIONS}


def _backward_experts(ctx: Context, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    needed = _needed(ctx)
    grads = _experts_grads(ctx, grad_output, ctx.saved_tensors, [needed[i] for i in (0, 1, 2, 3, 5, 6)])
    hidden, gate_up, down, weights, gate_up_bias, down_bias = grads
    return (hidden, gate_up, down, weights, None, gate_up_bias, down_bias, *[None] * 7)


def _needed(ctx: Context) -> list[bool]:
    """Which positional inputs require grad; torch leaves out trailing inputs that equal their default."""
    return [*ctx.needs_input_grad, *[False] * (14 - len(ctx.needs_input_grad))]


def _experts_grads(
    ctx: Context, grad_output: Tensor, tensors: Sequence[Tensor | None], needs: list[bool]
) -> list[Tensor | None]:
    """The backward operator, with None for what is not needed."""
    op = torch.ops.moe_ops.fused_experts_backward.default
    grads = op(grad_output, *tensors, needs=needs, **ctx.options)
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def _setup_moe(ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _refuse_quantized("fused_moe", inputs[8], inputs[9])
    ctx.save_for_backward(*inputs[:8])
    ctx.options = {name: keyword_only_inputs[name] for name in _LAYER_OPTIONS}
    ctx.topk_options = {name: keyword_only_inputs[name] for name in ROUTING_OPTIONS}


def _backward_moe(ctx: Context, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    hidden_states, logits, gate_up, down, correction_bias, gate_up_bias, down_bias, expert_map = ctx.saved_tensors
    with torch.no_grad():
        weights, ids = torch.ops.moe_ops.fused_topk.default(logits, correction_bias, **ctx.topk_options)
    needed = _needed(ctx)
    needs = [needed[0], needed[2], needed[3], needed[1], needed[5], needed[6]]
    tensors = (hidden_states, gate_up, down, weights, ids, gate_up_bias, down_bias, expert_map)
    grads = _experts_grads(ctx, grad_output, tensors, needs)
    grad_weights = grads[3]
    grad_logits = None if grad_weights is None else topk_backward(grad_weights, logits, ids, ctx.topk_options)
    return (grads[0], grad_logits, grads[1], grads[2], None, grads[4], grads[5], *[None] * 7)


Formula = tuple[Callable[..., Any], Callable[..., Any]]


def no_formula(op: str, cure: str) -> Formula:
    """A formula for an operator that has none: it raises as soon as an input requires grad."""

    def setup_context(ctx: Context, inputs: Any, keyword_only_inputs: Any = None, output: Any = None) -> None:
        raise ValueError(f"{op}: inputs must not require grad, got one that does. {cure}")

    def backward(ctx: Context, *grads: Any) -> None:
        raise ValueError(f"{op}: must not be differentiated. {cure}")

    return backward, setup_context


#: ``(backward, setup_context)`` of the differentiable operators.
FORMULAS: dict[str, Formula] = {
    "fused_topk": (_backward_topk, _setup_topk),
    "fused_experts": (_backward_experts, _setup_experts),
    "fused_moe": (_backward_moe, _setup_moe),
}
