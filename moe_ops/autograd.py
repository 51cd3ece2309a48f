"""Backward formulas of the operators, traceable: plain tensor code and calls of our own operators.

``fused_topk`` differentiates analytically through the selected scores. ``fused_experts`` saves its inputs alone and
runs ``fused_experts_backward``, which recomputes the first projection; the stages' formulas are in
:mod:`moe_ops.stage_gradients`. Operators without a formula raise when an input
requires grad: without a registration autograd would record through their bodies without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meta.calls import RouterOptions
from meta.dims import GRADIENTS
from meta.routing import ROUTINGS
from moe_ops.stage_gradients import FORMULAS, StageFormula

Context = Any

#: Keyword arguments that the backward needs.
_LAYER_OPTIONS = ("activation", "alpha", "limit", "glu_layout", "weight_on_input", "format", "capacity")
#: Tensor arguments of ``fused_experts_backward`` behind the gradient.
_BACKWARD_TENSORS = (
    "hidden_states", "gate_up_proj", "down_proj", "topk_weights", "topk_ids", "up_proj", "gate_up_bias", "down_bias",
    "expert_map",
)  # fmt: skip
_SAVED = (*_BACKWARD_TENSORS, "router_logits", "correction_bias")


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


Formula = tuple[Callable[..., Any], Callable[..., Any]]


class _Formula:
    """The formula of one layer operator; its inputs are read by the names of its schema."""

    def __init__(self, op: str, names: tuple[str, ...]) -> None:
        self._op, self._names = op, names

    def setup_context(
        self, ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        given = dict(zip(self._names, inputs, strict=False))
        if given.get("gate_up_scales") or given.get("down_scales") or given.get("hidden_states_scale") is not None:
            raise ValueError(
                f"{self._op}: inputs must not require grad for quantised weights, got one that does. "
                "Call it under torch.no_grad(), or train with unquantised weights."
            )
        ctx.saved = tuple(name for name in _SAVED if name in self._names)
        ctx.save_for_backward(*(given.get(name) for name in ctx.saved))
        ctx.options = {name: keyword_only_inputs[name] for name in _LAYER_OPTIONS}
        if self._op == "fused_moe":
            ctx.topk_options = {name: keyword_only_inputs[name] for name in RouterOptions._fields}

    def backward(self, ctx: Context, grad_output: Tensor) -> tuple[Any, ...]:
        saved = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        # torch leaves out trailing inputs that equal their default; of a list there is a list.
        given = dict(zip(self._names, ctx.needs_input_grad, strict=False))
        needed = dict(given)
        if self._op == "fused_moe":
            logits, bias = saved.pop("router_logits"), saved.pop("correction_bias")
            with torch.no_grad():
                weights, ids = torch.ops.moe_ops.fused_topk.default(logits, bias, **ctx.topk_options)
            saved |= {"topk_weights": weights, "topk_ids": ids}
            needed["topk_weights"] = given["router_logits"]
        needs = [needed.get(name, False) for name in GRADIENTS]
        op = torch.ops.moe_ops.fused_experts_backward.default
        found = op(grad_output, *(saved[name] for name in _BACKWARD_TENSORS), needs=needs, **ctx.options)
        grads: dict[str, Tensor | None] = {
            name: grad for name, grad, need in zip(GRADIENTS, found, needs, strict=True) if need
        }
        grad_weights = grads.get("topk_weights")
        if self._op == "fused_moe" and grad_weights is not None:
            grads["router_logits"] = topk_backward(grad_weights, logits, ids, ctx.topk_options)
        return tuple([None] * len(need) if isinstance(need, list) else grads.get(name) for name, need in given.items())


def no_formula(op: str, cure: str) -> Formula:
    """A formula for an operator that has none: it raises as soon as an input requires grad."""

    def setup_context(ctx: Context, inputs: Any, keyword_only_inputs: Any = None, output: Any = None) -> None:
        raise ValueError(f"{op}: inputs must not require grad, got one that does. {cure}")

    def backward(ctx: Context, *grads: Any) -> None:
        raise ValueError(f"{op}: must not be differentiated. {cure}")

    return backward, setup_context


def formula(op: str, names: tuple[str, ...]) -> Formula | None:
    """``(backward, setup_context)`` of a differentiable operator, whose positional arguments have these names."""
    if op == "fused_topk":
        return _backward_topk, _setup_topk
    if op in ("fused_experts", "fused_moe"):
        rows = _Formula(op, names)
        return rows.backward, rows.setup_context
    if op in FORMULAS:
        stage = StageFormula(op, names)
        return stage.backward, stage.setup_context
    return None
