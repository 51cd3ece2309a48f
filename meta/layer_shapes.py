"""Shape rules of the whole-layer operators: ``fused_experts``, its backward, and ``fused_moe``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meta.activations import resolve_activation
from meta.checks import (
    Checked,
    check_at_most,
    check_dtype,
    check_float,
    check_index,
    check_name,
    check_placement,
    check_positive,
    check_rank,
    check_shape,
    fail,
)
from meta.dims import BACKEND_NAMES, FORMATS, GLU_LAYOUTS, Dim, Problem
from meta.gemm_shapes import check_bias, check_weight_extras, half_width
from meta.routing import ROUTINGS
from meta.schemes import ceil_div, resolve_scheme


def check_expert_map(op: str, expert_map: Tensor | None) -> None:
    """An int32 or int64 ``[E_global]`` or None."""
    if expert_map is not None:
        check_rank(op, "expert_map", expert_map, "E_global")
        check_index(op, "expert_map", expert_map)


def check_routing(
    op: str,
    router_logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    routing: str,
    renorm_eps: float,
    num_groups: int,
    topk_groups: int,
) -> None:
    """Everything about a router but where its tensors are."""
    check_name(op, "routing", routing, ROUTINGS)
    row = ROUTINGS[routing]
    check_rank(op, "router_logits", router_logits, "T E")
    check_float(op, "router_logits", router_logits)
    experts = router_logits.shape[1]
    if correction_bias is not None:
        if not row.supports_bias:
            raise fail(op, "correction_bias", f"None for routing {routing!r}", "a tensor")
        check_float(op, "correction_bias", correction_bias)
        check_shape(op, "correction_bias", correction_bias, "E", (experts,))
    check_positive(op, "top_k", top_k)
    if not renorm_eps >= 0:
        raise fail(op, "renorm_eps", ">= 0", renorm_eps)
    check_positive(op, "num_groups", num_groups)
    check_positive(op, "topk_groups", topk_groups)
    allowed: Dim = experts
    rule = f"<= E={experts}"
    if num_groups > 1:
        if row.group is None:
            cure = f"Use one of {sorted(name for name, other in ROUTINGS.items() if other.group)}."
            raise fail(op, "num_groups", f"1 for routing {routing!r}", num_groups, cure)
        least = 2 if row.group == "top2" else 1
        if experts % num_groups or experts // num_groups < least:
            raise fail(op, "num_groups", f"a divisor of E={experts} leaving >= {least} experts a group", num_groups)
        check_at_most(op, "topk_groups", topk_groups, num_groups, f"<= num_groups={num_groups}", "")
        allowed = experts // num_groups * topk_groups
        rule = f"<= {allowed} = E={experts} / num_groups={num_groups} * topk_groups={topk_groups}"
    check_at_most(op, "top_k", top_k, allowed, rule, "A token cannot select more experts than it may choose from.")


@dataclass(slots=True)
class Experts:
    """The expert tensors of one layer, named as in the operators."""

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    expert_map: Tensor | None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_up_global_scale: Tensor | None = None
    down_global_scale: Tensor | None = None
    gate_up_zero_point: Tensor | None = None
    down_zero_point: Tensor | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """Every tensor by argument name."""
        return {name: getattr(self, name) for name in self.__slots__}


def _check_weights(op: str, experts: Experts, hidden: Dim, glu_layout: str, pack: int) -> tuple[Dim, Dim, Dim]:
    """Shapes of the two projections; returns E, N and I."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    check_rank(op, "gate_up_proj", gate_up, "E N H")
    check_rank(op, "down_proj", down, "E H I")
    count, rows_of_weight, _ = gate_up.shape
    stored = ceil_div(hidden, pack)
    check_shape(op, "gate_up_proj", gate_up, "E N H", (count, rows_of_weight, stored), hint=True)
    width = half_width(op, "gate_up_proj", rows_of_weight, glu_layout)
    check_shape(op, "down_proj", down, "E H I", (count, hidden, ceil_div(width, pack)), hint=True)
    return count, rows_of_weight, width


def _check_layer(
    op: str,
    hidden_states: Tensor,
    experts: Experts,
    top_k: Dim,
    activation: str,
    alpha: float | None,
    limit: float | None,
    glu_layout: str,
    weight_on_input: bool,
    scheme: str | None,
    format: str,
    capacity: Dim | None,
    backend: str | None,
) -> Checked:
    """Everything about the experts of a layer; placement was checked by the caller."""
    _, alpha, limit = resolve_activation(op, activation, alpha, limit)
    check_name(op, "glu_layout", glu_layout, GLU_LAYOUTS)
    check_name(op, "format", format, FORMATS)
    if backend is not None:
        check_name(op, "backend", backend, BACKEND_NAMES)
    check_rank(op, "hidden_states", hidden_states, "T H")
    check_float(op, "hidden_states", hidden_states)
    row = resolve_scheme(op, scheme, experts.gate_up_proj.dtype)
    check_dtype(op, "down_proj", experts.down_proj, row.weight_dtype, "Both projections share one scheme.")
    if not row.quantized:
        check_dtype(op, "hidden_states", hidden_states, row.weight_dtype, "Cast it to the weights' dtype.")
    tokens, hidden = hidden_states.shape
    count, rows_of_weight, width = _check_weights(op, experts, hidden, glu_layout, row.pack)
    check_bias(op, "gate_up_bias", experts.gate_up_bias, "E N", (count, rows_of_weight))
    check_bias(op, "down_bias", experts.down_bias, "E H", (count, hidden))
    check_expert_map(op, experts.expert_map)
    gate_up_extras = (experts.gate_up_scale, experts.gate_up_global_scale, experts.gate_up_zero_point)
    check_weight_extras(op, "gate_up_", row, (count, rows_of_weight, hidden), *gate_up_extras)
    down_extras = (experts.down_scale, experts.down_global_scale, experts.down_zero_point)
    check_weight_extras(op, "down_", row, (count, hidden, width), *down_extras)
    if capacity is not None:
        if format != "batched":
            raise fail(op, "capacity", f"None for format {format!r}", capacity, "Pass format='batched'.")
        check_positive(op, "capacity", capacity)
    elif format == "batched":
        capacity = tokens
    problem = Problem.of_layer(
        hidden_states,
        experts.gate_up_proj,
        experts.down_proj,
        top_k,
        row.name,
        has_bias=experts.gate_up_bias is not None or experts.down_bias is not None,
        has_expert_map=experts.expert_map is not None,
        activation=activation,
        glu_layout=glu_layout,
        weight_on_input=weight_on_input,
        format=format,
        capacity=capacity,
    )
    resolved = {"scheme": row.name, "alpha": alpha, "limit": limit, "format": format, "capacity": capacity}
    return Checked(problem, hidden_states.device, (((tokens, hidden), hidden_states.dtype),), resolved)


def _check_topk(op: str, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    check_rank(op, "hidden_states", hidden_states, "T H")
    check_rank(op, "topk_ids", topk_ids, "T K")
    check_index(op, "topk_ids", topk_ids)
    sizes = (hidden_states.shape[0], topk_ids.shape[1])
    check_shape(op, "topk_ids", topk_ids, "T K", sizes)
    check_shape(op, "topk_weights", topk_weights, "T K", sizes)
    check_float(op, "topk_weights", topk_weights)


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_global_scale: Tensor | None = None,
    down_global_scale: Tensor | None = None,
    gate_up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str = "concat",
    weight_on_input: bool = False,
    scheme: str | None = None,
    format: str = "grouped",
    capacity: Dim | None = None,
    backend: str | None = None,
) -> Checked:
    """``hidden_states [T, H]`` and ids ``[T, K]`` -> ``[T, H]``."""
    op = "fused_experts"
    experts = Experts(
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        expert_map,
        gate_up_scale,
        down_scale,
        gate_up_global_scale,
        down_global_scale,
        gate_up_zero_point,
        down_zero_point,
    )
    routed = {"hidden_states": hidden_states, "topk_weights": topk_weights, "topk_ids": topk_ids}
    check_placement(op, {**routed, **experts.tensors()})
    _check_topk(op, hidden_states, topk_weights, topk_ids)
    options = (activation, alpha, limit, glu_layout, weight_on_input, scheme, format, capacity, backend)
    return _check_layer(op, hidden_states, experts, topk_ids.shape[1], *options)


def fused_moe(
    hidden_states: Tensor,
    router_logits: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    correction_bias: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_global_scale: Tensor | None = None,
    down_global_scale: Tensor | None = None,
    gate_up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    *,
    top_k: int,
    routing: str = "softmax",
    renormalize: bool = True,
    renorm_eps: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str = "concat",
    weight_on_input: bool = False,
    scheme: str | None = None,
    format: str = "grouped",
    capacity: Dim | None = None,
    backend: str | None = None,
) -> Checked:
    """``hidden_states [T, H]`` and ``router_logits [T, E]`` -> ``[T, H]``."""
    op = "fused_moe"
    experts = Experts(
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        expert_map,
        gate_up_scale,
        down_scale,
        gate_up_global_scale,
        down_global_scale,
        gate_up_zero_point,
        down_zero_point,
    )
    routed = {"hidden_states": hidden_states, "router_logits": router_logits, "correction_bias": correction_bias}
    check_placement(op, {**routed, **experts.tensors()})
    check_routing(op, router_logits, correction_bias, top_k, routing, renorm_eps, num_groups, topk_groups)
    options = (activation, alpha, limit, glu_layout, weight_on_input, scheme, format, capacity, backend)
    checked = _check_layer(op, hidden_states, experts, top_k, *options)
    routed_experts = gate_up_proj.shape[0] if expert_map is None else expert_map.shape[0]
    letters = "T E" if expert_map is None else "T E_global"
    check_shape(op, "router_logits", router_logits, letters, (hidden_states.shape[0], routed_experts))
    return checked


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
    capacity: Dim | None = None,
) -> Checked:
    """Gradients of hidden_states, gate_up_proj, down_proj, topk_weights, gate_up_bias, down_bias; numel 0 when not
    needed.
    """
    op = "fused_experts_backward"
    experts = Experts(gate_up_proj, down_proj, gate_up_bias, down_bias, expert_map)
    routed = {"hidden_states": hidden_states, "topk_weights": topk_weights, "topk_ids": topk_ids}
    check_placement(op, {**routed, "grad_output": grad_output, **experts.tensors()})
    _check_topk(op, hidden_states, topk_weights, topk_ids)
    options = (activation, alpha, limit, glu_layout, weight_on_input, None, format, capacity, None)
    checked = _check_layer(op, hidden_states, experts, topk_ids.shape[1], *options)
    check_shape(op, "grad_output", grad_output, "T H", tuple(hidden_states.shape))
    check_dtype(op, "grad_output", grad_output, hidden_states.dtype)
    primals = (hidden_states, gate_up_proj, down_proj, topk_weights, gate_up_bias, down_bias)
    if len(needs) != len(primals):
        raise fail(op, "needs", f"{len(primals)} booleans", len(needs))
    checked.outputs = tuple(
        (tuple(primal.shape), primal.dtype) if primal is not None and need else ((0,), torch.float32)
        for primal, need in zip(primals, needs, strict=True)
    )
    return checked
