"""Backward formulas of the operators, traceable: plain tensor code and calls of our own operators.

``fused_topk`` differentiates analytically through the selected scores. Where gradients are wanted, ``fused_moe`` is
``fused_topk`` and ``fused_experts``, and that is ``fused_experts_saving``, which returns what its gradient reads. That
is several operators, so that a compiled graph lets go of rows between them: through the second product and the
activation; through the first product, with the gradient of its weight; and the gradient of the second weight, whose
rows are the smallest, when the memory of all others has been allocated. The stages' formulas are in
:mod:`moe_ops.stage_gradients`. Operators without a formula raise when an input requires grad: without a registration
autograd would record through their bodies without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta.arch import device_arch
from meta.calls import RouterOptions
from meta.dims import GRADIENTS, Problem
from meta.schemes import SCHEMES
from moe_ops import choice, compat, rows, stage_gradients
from moe_ops.runtime import refuse_second_derivatives, refuse_tangents

Context = Any

#: Keyword arguments that the backward needs.
_LAYER_OPTIONS = ("activation", "alpha", "limit", "glu_layout", "weight_on_input")
_FORMAT_OPTIONS = ("format", "capacity", "backend", "recompute")
#: What a layer's gradient reads: arguments, results, and arguments that may be absent.
_INPUTS = ("hidden_states", "gate_up_proj", "down_proj", "topk_weights")
_PLACES = ("offsets", "row_to_pair", "pair_to_row")
_RESULTS = ("gate_up", "up", *_PLACES)
_AGAIN = ("hidden_states", "gate_up_proj", "up_proj", "gate_up_bias")
_OPTIONAL = ("up_proj", "gate_up_bias", "down_bias")


def _setup_topk(ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # zeros for the ids would be a kernel
    ctx.save_for_backward(inputs[0], output[1])
    ctx.options = dict(keyword_only_inputs)


def _backward_topk(ctx: Context, grad_weights: Tensor | None, grad_ids: None) -> tuple[Tensor | None, None]:
    if grad_weights is None:
        return None, None
    if torch.is_grad_enabled():
        refuse_second_derivatives("fused_topk")
    found = stage_gradients.run_op("fused_topk_backward", grad_weights, *ctx.saved_tensors, **ctx.options)
    return found, None


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
        """Save the inputs, and of the results what is kept: what stood before the activation, where the pairs are."""
        given, results = self._given(inputs), dict(zip(_RESULTS, output[1:], strict=True))
        ctx.mark_non_differentiable(*results.values())
        ctx.set_materialize_grads(False)
        ctx.options = {name: keyword_only_inputs[name] for name in (*_LAYER_OPTIONS, *_FORMAT_OPTIONS)}
        names = [*_INPUTS, *_OPTIONAL]
        if ctx.options["recompute"] == "all":
            names += ["topk_ids", "expert_map"]
        self._save(ctx, {name: given.get(name) for name in names} | results)

    def _gradients(self, ctx: Context, saved: Any, needs: dict[str, bool], grad: Any) -> dict[str, Tensor | None]:
        if grad is None:
            return {}
        if torch.is_grad_enabled():
            refuse_second_derivatives("fused_experts")
        recompute, needed = ctx.options["recompute"], defaultdict(bool, needs)
        on_input, run = ctx.options["weight_on_input"], stage_gradients.run_op
        if recompute == "all":
            saved |= dict(zip(_PLACES, self._places(saved, ctx.options), strict=True))
        places, glu = [saved[name] for name in _PLACES], {name: ctx.options[name] for name in _LAYER_OPTIONS}
        if saved["up_proj"] is not None:
            glu["glu_layout"] = "separate"
        again = [saved[name] if recompute is not None else None for name in _AGAIN]
        given = (grad, saved["down_proj"], saved["topk_weights"], saved["gate_up"], saved["up"], *places)
        backward = run(
            "fused_experts_backward", *given, saved["down_bias"], *again, value=needed["down_proj"], **glu
        )  # fmt: skip
        of_gate, of_up, value, of_weights = backward
        # Nobody reads these again: memory for what follows.
        del given, backward, saved["gate_up"], saved["up"]
        ctx.maybe_clear_saved_tensors()
        asked = [needed[name] and (name != "topk_weights" or on_input) for name in GRADIENTS]
        # Copied beside what the kernel does anyway; where memory is short, or the product gathers them, not here.
        copied = needed["down_proj"] and recompute is None and not self._gathers(saved["down_proj"])
        beside = grad if copied else None
        inputs = (saved["hidden_states"], saved["gate_up_proj"], saved["topk_weights"], *places, saved["up_proj"])
        options = {"needs": asked, "weight_on_input": on_input, "sparing": recompute is not None}
        of_first = run("fused_experts_backward_first", of_gate, of_up, *inputs, beside, **options)
        del of_gate, of_up
        found = {name: result for name, result, need in zip(GRADIENTS, of_first, asked, strict=False) if need}
        if needed["topk_weights"] and not on_input:
            found["topk_weights"] = of_weights
        if needed["down_proj"]:
            rows = (grad, value, *places) if beside is None else (of_first[-1], value, places[0])
            found["down_proj"] = run("grouped_wgrad", *rows)
        if needed["down_bias"]:
            weights = None if on_input else saved["topk_weights"]
            found["down_bias"] = run("expert_sums", grad, *places, weights)
        return {name: None if result is None else result.to(saved[name].dtype) for name, result in found.items()}

    @staticmethod
    def _gathers(down_proj: Tensor) -> bool:
        """Whether the product for these weights' gradient takes tokens rather than copies, of any number of them."""
        if down_proj.device.type == "meta":
            return False
        problem = Problem(down_proj.dtype, down_proj.device.type, device_arch(down_proj.device), "")
        between = getattr(choice.choose(problem, op="grouped_wgrad"), "ROWS", rows)
        gathers: bool = between.gathers_any_number(down_proj.device, down_proj.dtype, down_proj.shape[2])
        return gathers

    @staticmethod
    def _places(saved: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, ...]:
        """Where the pairs are, found again."""
        capacity = options["capacity"]
        if options["format"] == "batched" and capacity is None:
            capacity = torch.sym_max(saved["hidden_states"].shape[0], 1)
        sizes = {"num_experts": saved["down_proj"].shape[0], "capacity": capacity}
        found: tuple[Tensor, ...] = stage_gradients.run_op(
            "sort_pairs", saved["topk_ids"], saved["expert_map"], **sizes
        )
        return found


class InTraining:
    """A layer's kernel at autograd's key: the operator itself, or, where gradients are wanted, those it is made of.

    Args:
        bind: the operator's arguments by name, defaults included.
        rule: what refuses its arguments.
    """

    def __init__(self, op: str, bind: Callable[..., dict[str, Any]], rule: Callable[..., Any]) -> None:
        self._op, self._bind, self._rule = op, bind, rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_tangents(self._op, args)
        if not torch.is_grad_enabled() or not any(map(wants_grad, (*args, *kwargs.values()))):
            with compat.below_autograd():
                return getattr(torch.ops.moe_ops, self._op).default(*args, **kwargs)
        self._rule(*args, **kwargs)  # the parts know less: neither that each expert has a logit, nor of scales
        given = self._bind(args, kwargs)
        if given["scheme"] is not None and SCHEMES[given["scheme"]].quantized:
            raise ValueError(
                f"{self._op}: {_asking(given)} must not require grad for quantised weights, got a tensor that does. "
                "Call it under torch.no_grad(), or train with unquantised weights."
            )
        if self._op == "fused_moe":
            options = {name: given[name] for name in RouterOptions._fields}
            topk = torch.ops.moe_ops.fused_topk.default(given["router_logits"], given["correction_bias"], **options)
            given["topk_weights"], given["topk_ids"] = topk
        tensors = (given[name] for name in (*_INPUTS, "topk_ids", "up_proj", "gate_up_bias", "down_bias", "expert_map"))
        options = {name: given[name] for name in (*_LAYER_OPTIONS, *_FORMAT_OPTIONS)}
        try:
            return torch.ops.moe_ops.fused_experts_saving.default(*tensors, **options)[0]
        except ValueError as error:
            by, _, rest = str(error).partition(": ")
            if by != "fused_experts_saving":
                raise
            raise ValueError(f"{self._op}: {rest}") from None  # in the words of what was called


def wants_grad(value: Any) -> bool:
    """Whether an argument is, or is a list with, a tensor that autograd follows."""
    if isinstance(value, list | tuple):
        return any(map(wants_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


def _asking(given: dict[str, Any]) -> str:
    """The arguments that autograd follows."""
    return ", ".join(name for name, value in given.items() if wants_grad(value)) or "inputs"


class _StageFormula(_Formula):
    def setup_context(
        self, ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any] | None = None, output: Any = ()
    ) -> None:
        """Save what the formula reads."""
        given, options = self._given(inputs), keyword_only_inputs or {}
        scales = given.get("weight_scales") or any(given.get(f"{x}_scale") is not None for x in ("rows", "batch"))
        if scales or options.get("quantize_output"):
            raise ValueError(
                f"{self._op}: {_asking(given)} must not require grad for quantised operands, got a tensor that does. "
                "Call it under torch.no_grad(), or train with unquantised weights."
            )
        arguments, results = stage_gradients.SAVED[stage_gradients.FORMULAS[self._op]]
        tensors = {name: given[name] for name in arguments if given.get(name) is not None}
        self._save(ctx, tensors | {name: output[place] for name, place in results.items()})
        ctx.options = {name: options[name] for name in stage_gradients.OPTIONS if name in options}

    def _gradients(self, ctx: Context, saved: Any, needs: dict[str, bool], grad: Any) -> dict[str, Tensor | None]:
        return stage_gradients.FORMULAS[self._op](self._op, saved, needs, grad, **ctx.options)


def no_formula(op: str, names: tuple[str, ...], cure: str) -> Formula:
    """A formula for an operator that has none: it raises as soon as an input requires grad."""

    def setup_context(ctx: Context, inputs: Any, keyword_only_inputs: Any = None, output: Any = None) -> None:
        asking = _asking(dict(zip(names, inputs, strict=False)))
        raise ValueError(f"{op}: {asking} must not require grad, got a tensor that does. {cure}")

    def backward(ctx: Context, *grads: Any) -> None:
        raise ValueError(f"{op}: must not be differentiated. {cure}")

    return backward, setup_context


def formula(
    op: str, names: tuple[str, ...], bind: Callable[..., dict[str, Any]], rule: Callable[..., Any]
) -> Formula | InTraining | None:
    """``(backward, setup_context)`` of a differentiable operator, whose positional arguments have these names; of a
    layer what stands in its place, which is :class:`InTraining`.
    """
    if op == "fused_topk":
        return _backward_topk, _setup_topk
    if op in ("fused_experts", "fused_moe"):
        return InTraining(op, bind, rule)
    if op == "fused_experts_saving":
        layer = _LayerFormula(op, names)
        return layer.backward, layer.setup_context
    if op not in stage_gradients.FORMULAS:
        return None
    stage = _StageFormula(op, names)
    return stage.backward, stage.setup_context
