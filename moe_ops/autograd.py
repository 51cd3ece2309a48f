"""Backward formulas of the operators, traceable: plain tensor code and calls of our own operators.

``fused_topk`` differentiates analytically through the selected scores. ``fused_experts`` saves its inputs alone and
runs ``fused_experts_backward``, which recomputes the first projection; the stages' formulas are in
:mod:`moe_ops.stage_gradients`. Operators without a formula raise when an input requires grad: without a registration
autograd would record through their bodies without a word.
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
from moe_ops import stage_gradients

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
    """The formula of one operator; its inputs are read by the names of its schema."""

    quantised: str  # what the operator takes that has no gradient when it is quantised

    def __init__(self, op: str, names: tuple[str, ...]) -> None:
        self._op, self._names = op, names

    def _given(self, values: tuple[Any, ...]) -> dict[str, Any]:
        # torch leaves out trailing inputs that equal their default.
        return dict(zip(self._names, values, strict=False))

    def _refuse(self, quantised: bool) -> None:
        if quantised:
            raise ValueError(
                f"{self._op}: inputs must not require grad for quantised {self.quantised}, got one that does. "
                "Call it under torch.no_grad(), or train with unquantised weights."
            )

    def _save(self, ctx: Context, tensors: dict[str, Tensor | None]) -> None:
        ctx.saved = tuple(tensors)
        ctx.save_for_backward(*tensors.values())

    def backward(self, ctx: Context, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs, in their order."""
        saved = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        given = self._given(ctx.needs_input_grad)  # of a list there is a list
        found = self._gradients(ctx, saved, {name: need is True for name, need in given.items()}, grads[0])
        return tuple([None] * len(need) if isinstance(need, list) else found.get(name) for name, need in given.items())

    def _gradients(self, ctx: Context, saved: Any, needs: dict[str, bool], grad: Any) -> dict[str, Tensor | None]:
        raise NotImplementedError


class _LayerFormula(_Formula):
    quantised = "weights"

    def setup_context(
        self, ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        """Save the inputs alone."""
        given = self._given(inputs)
        scales = given.get("gate_up_scales") or given.get("down_scales")
        self._refuse(bool(scales) or given.get("hidden_states_scale") is not None)
        self._save(ctx, {name: given.get(name) for name in _SAVED if name in self._names})
        ctx.options = {name: keyword_only_inputs[name] for name in _LAYER_OPTIONS}
        if self._op == "fused_moe":
            ctx.topk_options = {name: keyword_only_inputs[name] for name in RouterOptions._fields}

    def _gradients(self, ctx: Context, saved: Any, needs: dict[str, bool], grad: Any) -> dict[str, Tensor | None]:
        if self._op == "fused_moe":
            logits, bias = saved.pop("router_logits"), saved.pop("correction_bias")
            with torch.no_grad():
                weights, ids = torch.ops.moe_ops.fused_topk.default(logits, bias, **ctx.topk_options)
            saved |= {"topk_weights": weights, "topk_ids": ids}
            needs["topk_weights"] = needs["router_logits"]
        asked = [needs.get(name, False) for name in GRADIENTS]
        op = torch.ops.moe_ops.fused_experts_backward.default
        found = op(grad, *(saved[name] for name in _BACKWARD_TENSORS), needs=asked, **ctx.options)
        grads: dict[str, Tensor | None] = {
            name: value for name, value, need in zip(GRADIENTS, found, asked, strict=True) if need
        }
        grad_weights = grads.get("topk_weights")
        if self._op == "fused_moe" and grad_weights is not None:
            grads["router_logits"] = topk_backward(grad_weights, logits, ids, ctx.topk_options)
        return grads


class _StageFormula(_Formula):
    quantised = "operands"

    def setup_context(
        self, ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any] | None = None, output: Any = ()
    ) -> None:
        """Save what the formula reads."""
        given, options = self._given(inputs), keyword_only_inputs or {}
        scales = given.get("weight_scales") or any(given.get(f"{x}_scale") is not None for x in ("rows", "batch"))
        self._refuse(bool(scales or options.get("quantize_output")))
        arguments, results = stage_gradients.SAVED[stage_gradients.FORMULAS[self._op]]
        tensors = {name: given[name] for name in arguments if given.get(name) is not None}
        self._save(ctx, tensors | {name: output[place] for name, place in results.items()})
        ctx.options = {name: options[name] for name in stage_gradients.OPTIONS if name in options}

    def _gradients(self, ctx: Context, saved: Any, needs: dict[str, bool], grad: Any) -> dict[str, Tensor | None]:
        return stage_gradients.FORMULAS[self._op](self._op, saved, needs, grad, **ctx.options)


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
    kind: type[_LayerFormula | _StageFormula] = _LayerFormula
    if op in stage_gradients.FORMULAS:
        kind = _StageFormula
    elif op not in ("fused_experts", "fused_moe"):
        return None
    found = kind(op, names)
    return found.backward, found.setup_context
