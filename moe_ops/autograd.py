"""Backward formulas of the operators, traceable: plain tensor code and calls of our own operators.

``fused_topk`` differentiates analytically through the selected scores. Where gradients are wanted, ``fused_moe`` is
``fused_topk`` and ``fused_experts``, and that is ``fused_experts_saving``, which returns what
``fused_experts_backward`` reads, whose results go on by stages: a compiled graph lets go of rows between them. The
stages' formulas are in :mod:`moe_ops.stage_gradients`. Operators without a formula raise when an input requires grad:
without a registration autograd would record through their bodies without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meta.calls import RouterOptions
from meta.dims import GRADIENTS
from meta.routing import ROUTINGS
from moe_ops import compat, experts_backward, stage_gradients

Context = Any

#: Keyword arguments that the backward needs.
_LAYER_OPTIONS = ("activation", "alpha", "limit", "glu_layout", "weight_on_input")
_FORMAT_OPTIONS = ("format", "capacity", "backend")
#: Tensor arguments of ``fused_experts_backward`` behind the gradient: inputs, what was saved, and inputs again.
_INPUTS = ("hidden_states", "gate_up_proj", "down_proj", "topk_weights")
_RESULTS = ("gate_up", "up", "offsets", "row_to_pair", "pair_to_row")
_OPTIONAL = ("up_proj", "gate_up_bias", "down_bias")


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

    def __init__(self, op: str, names: tuple[str, ...]) -> None:
        self._op, self._names = op, names

    def _given(self, values: tuple[Any, ...]) -> dict[str, Any]:
        # torch leaves out trailing inputs that equal their default.
        return dict(zip(self._names, values, strict=False))

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
    """Of ``fused_experts_saving``."""

    def setup_context(
        self, ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        """Save the inputs, what stood before the activation, and where the pairs are."""
        given, results = self._given(inputs), dict(zip(_RESULTS, output[1:], strict=True))
        ctx.mark_non_differentiable(*results.values())
        ctx.set_materialize_grads(False)
        self._save(ctx, {name: given.get(name) for name in (*_INPUTS, *_OPTIONAL)} | results)
        ctx.options = {name: keyword_only_inputs[name] for name in _LAYER_OPTIONS}

    def _gradients(self, ctx: Context, saved: Any, needs: dict[str, bool], grad: Any) -> dict[str, Tensor | None]:
        if grad is None:
            return {}
        if torch.is_grad_enabled():
            raise ValueError(
                "fused_experts: second derivatives are not implemented, got a backward pass with create_graph=True. "
                "Leave create_graph out."
            )
        on_input = ctx.options["weight_on_input"]
        asked = [needs.get(name, False) and not (on_input and name == "topk_weights") for name in GRADIENTS]
        stage = stage_gradients.run_op
        tensors = tuple(saved[name] for name in (*_INPUTS, *_RESULTS, *_OPTIONAL))
        of_gate, of_up, *others = stage("fused_experts_backward", grad, *tensors, needs=asked, **ctx.options)
        found = {name: value for name, value, need in zip(GRADIENTS, others, asked, strict=True) if need}
        # Nobody reads these again: memory for what follows.
        del tensors, saved["gate_up"], saved["up"]
        ctx.maybe_clear_saved_tensors()
        halves = [of_gate] if saved["up_proj"] is None else [of_gate, of_up]
        needed = defaultdict(bool, needs)
        return found | experts_backward.through_the_first_product(saved, halves, needed, on_input, stage)


class InTraining:
    """A layer's kernel at autograd's key: the operator itself, or, where gradients are wanted, those it is made of.

    Args:
        bind: the operator's arguments by name, defaults included.
    """

    def __init__(self, op: str, bind: Callable[..., dict[str, Any]]) -> None:
        self._op, self._bind = op, bind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and any(map(_wants_grad, (*args, *kwargs.values())))):
            with compat.below_autograd():
                return getattr(torch.ops.moe_ops, self._op).default(*args, **kwargs)
        given = self._bind(args, kwargs)
        if given["scheme"] is not None or given["gate_up_scales"] or given["hidden_states_scale"] is not None:
            raise ValueError(
                f"{self._op}: inputs must not require grad for quantised weights, got one that does. "
                "Call it under torch.no_grad(), or train with unquantised weights."
            )
        if self._op == "fused_moe":
            options = {name: given[name] for name in RouterOptions._fields}
            topk = torch.ops.moe_ops.fused_topk.default(given["router_logits"], given["correction_bias"], **options)
            given["topk_weights"], given["topk_ids"] = topk
        tensors = (given[name] for name in (*_INPUTS, "topk_ids", "up_proj", "gate_up_bias", "down_bias", "expert_map"))
        options = {name: given[name] for name in (*_LAYER_OPTIONS, *_FORMAT_OPTIONS)}
        return torch.ops.moe_ops.fused_experts_saving.default(*tensors, **options)[0]


def _wants_grad(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_wants_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


class _StageFormula(_Formula):
    def setup_context(
        self, ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any] | None = None, output: Any = ()
    ) -> None:
        """Save what the formula reads."""
        given, options = self._given(inputs), keyword_only_inputs or {}
        scales = given.get("weight_scales") or any(given.get(f"{x}_scale") is not None for x in ("rows", "batch"))
        if scales or options.get("quantize_output"):
            raise ValueError(
                f"{self._op}: inputs must not require grad for quantised operands, got one that does. "
                "Call it under torch.no_grad(), or train with unquantised weights."
            )
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


def formula(op: str, names: tuple[str, ...], bind: Callable[..., dict[str, Any]]) -> Formula | InTraining | None:
    """``(backward, setup_context)`` of a differentiable operator, whose positional arguments have these names; of a
    layer what stands in its place.
    """
    if op == "fused_topk":
        return _backward_topk, _setup_topk
    if op in ("fused_experts", "fused_moe"):
        return InTraining(op, bind)
    if op == "fused_experts_saving":
        layer = _LayerFormula(op, names)
        return layer.backward, layer.setup_context
    if op not in stage_gradients.FORMULAS:
        return None
    stage = _StageFormula(op, names)
    return stage.backward, stage.setup_context
