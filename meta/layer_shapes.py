"""Rules of the whole-layer operators: ``fused_experts``, what it is in training, and ``fused_moe``."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from meta.activations import resolve_activation
from meta.arch import device_arch
from meta.calls import ExpertsCall, MoeCall, Output, RouteCall, RouterOptions
from meta.checks import (
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
from meta.dims import FORMATS, RECOMPUTE, Dim, LayerProblem, Problem, common_layout
from meta.gemm_shapes import (
    Flat,
    by_place,
    check_bias,
    check_packed,
    glu_layout,
    half_width,
    rows_operand,
    stacked_or_separate,
    weight_operand,
)
from meta.operands import Experts, Glu, Operand
from meta.routing import ROUTINGS
from meta.schemes import QuantScheme, ceil_div, resolve_scheme


def check_expert_map(op: str, expert_map: Tensor | None) -> None:
    """An int32 or int64 ``[E_global]`` or None."""
    if expert_map is not None:
        check_rank(op, "expert_map", expert_map, "E_global")
        check_index(op, "expert_map", expert_map)


_router_options = attrgetter(*RouterOptions._fields)


def route_call(op: str, flat: Flat, device: torch.device, problem: Problem | None = None) -> RouteCall:
    """Everything about a router but where its tensors are; ``problem`` of the layer that it is a part of."""
    logits: Tensor = flat.router_logits
    check_name(op, "routing", flat.routing, ROUTINGS)
    row = ROUTINGS[flat.routing]
    check_rank(op, "router_logits", logits, "T E")
    check_float(op, "router_logits", logits)
    tokens, experts = logits.shape
    if flat.correction_bias is not None:
        if not row.supports_bias:
            others = sorted(name for name, other in ROUTINGS.items() if other.supports_bias)
            cure = f"Leave it out, or use one of {others}."
            raise fail(op, "correction_bias", f"None for routing {flat.routing!r}", "a tensor", cure)
        check_float(op, "correction_bias", flat.correction_bias)
        check_shape(op, "correction_bias", flat.correction_bias, "E", (experts,))
    check_positive(op, "top_k", flat.top_k)
    if not flat.renorm_eps >= 0:
        raise fail(op, "renorm_eps", ">= 0", flat.renorm_eps)
    check_positive(op, "num_groups", flat.num_groups)
    check_positive(op, "topk_groups", flat.topk_groups)
    allowed: Dim = experts
    rule = f"<= E={experts}"
    groups, kept = flat.num_groups, flat.topk_groups
    check_at_most(op, "topk_groups", kept, groups, f"<= num_groups={groups}", "")
    if groups > 1:
        if row.group is None:
            cure = f"Use one of {sorted(name for name, other in ROUTINGS.items() if other.group)}."
            raise fail(op, "num_groups", f"1 for routing {flat.routing!r}", groups, cure)
        least = 2 if row.group == "top2" else 1
        if experts % groups or experts // groups < least:
            raise fail(op, "num_groups", f"a divisor of E={experts} leaving >= {least} experts a group", groups)
        allowed = experts // groups * kept
        rule = f"<= {allowed} = E={experts} / num_groups={groups} * topk_groups={kept}"
    check_at_most(op, "top_k", flat.top_k, allowed, rule, "A token cannot select more experts than it may choose from.")
    sizes = (tokens, flat.top_k)
    return RouteCall(
        op=op,
        problem=Problem(logits.dtype, device.type, device_arch(device), "") if problem is None else problem,
        device=device,
        outputs=((sizes, torch.float32), (sizes, torch.int32)),
        router_logits=logits,
        correction_bias=flat.correction_bias,
        options=RouterOptions(*_router_options(flat)),
    )


def _experts(op: str, flat: Flat, scheme: QuantScheme, hidden: Dim) -> tuple[Experts, Dim]:
    """The weights, and I."""
    row, alpha, limit = resolve_activation(op, flat.activation, flat.alpha, flat.limit)
    layout = glu_layout(op, flat.glu_layout, "up_proj", flat.up_proj)
    gate_up, down = flat.gate_up_proj, flat.down_proj
    check_dtype(op, "down_proj", down, scheme.weight_dtype, "Both projections share one scheme.")
    check_rank(op, "down_proj", down, "E H I")
    count, rows_of_weight, _ = gate_up.shape
    check_packed(op, "hidden_states", "H", hidden, scheme)
    stored = ceil_div(hidden, scheme.pack)
    check_shape(op, "gate_up_proj", gate_up, "E N H", (count, rows_of_weight, stored), hint=True)
    first, up = stacked_or_separate(
        op, ("gate_up_proj", "up_proj", "gate_up_scales"), gate_up, flat.up_proj, scheme, flat.gate_up_scales,
        (count, rows_of_weight, hidden), halves=layout == "concat",
    )  # fmt: skip
    width = half_width(op, "gate_up_proj", rows_of_weight, layout)
    check_packed(op, "down_proj", "I", width, scheme)
    check_shape(op, "down_proj", down, "E H I", (count, hidden, ceil_div(width, scheme.pack)), hint=True)
    columns = 2 * rows_of_weight if layout == "separate" else rows_of_weight
    check_bias(op, "gate_up_bias", flat.gate_up_bias, "E N", (count, columns))
    check_bias(op, "down_bias", flat.down_bias, "E H", (count, hidden))
    second = weight_operand(op, "down_scales", down, scheme, flat.down_scales, (count, hidden, width))
    glu = Glu(row.name, alpha, limit, layout)
    return Experts(scheme, first, second, up, flat.gate_up_bias, flat.down_bias, glu), width


def _hidden_states(op: str, flat: Flat, scheme: QuantScheme) -> Operand:
    hidden, scale = flat.hidden_states, flat.hidden_states_scale
    if scale is not None:
        if flat.weight_on_input:
            cure = "Weigh the rows before they are quantised."
            raise fail(op, "hidden_states_scale", "None with weight_on_input", "a tensor", cure)
        return rows_operand(op, "hidden_states", hidden, scheme, scale, "T H_groups")
    check_float(op, "hidden_states", hidden)
    if not scheme.quantized:
        check_dtype(op, "hidden_states", hidden, scheme.weight_dtype, "Cast it to the weights' dtype.")
    return Operand(hidden, None)


def _layer(op: str, flat: Flat, routed: dict[str, Tensor | None]) -> dict[str, Any]:
    """Fields of a :class:`LayerCall`, everything about the experts checked; ``routed``: the tensors beside theirs."""
    gate_up: Tensor = flat.gate_up_proj
    tensors = {
        "hidden_states": flat.hidden_states,
        **routed,
        "gate_up_proj": gate_up,
        "down_proj": flat.down_proj,
        "up_proj": flat.up_proj,
        "gate_up_bias": flat.gate_up_bias,
        "down_bias": flat.down_bias,
        "expert_map": flat.expert_map,
        "hidden_states_scale": flat.hidden_states_scale,
    }
    for name in ("gate_up_scales", "down_scales"):
        if scales := getattr(flat, name):
            tensors |= by_place(name, scales)
    device = check_placement(op, tensors)
    check_rank(op, "hidden_states", flat.hidden_states, "T H")
    top_k = _top_k(op, flat) if "topk_ids" in routed else flat.top_k
    check_name(op, "format", flat.format, FORMATS)
    check_rank(op, "gate_up_proj", gate_up, "E N H")
    scheme = resolve_scheme(op, flat.scheme, gate_up.dtype)
    hidden_states = _hidden_states(op, flat, scheme)
    tokens, hidden = flat.hidden_states.shape
    experts, width = _experts(op, flat, scheme, hidden)
    if hidden_states.scales and experts.gate_up.static is not None:
        rule = "None beside the static scale in gate_up_scales"
        raise fail(op, "hidden_states_scale", rule, "a tensor", "Pass hidden_states before they are quantised.")
    check_expert_map(op, flat.expert_map)
    capacity: Dim | None = flat.capacity
    if capacity is not None:
        if flat.format != "batched":
            raise fail(op, "capacity", f"None for format {flat.format!r}", capacity, "Pass format='batched'.")
        check_positive(op, "capacity", capacity)
    elif flat.format == "batched":
        capacity = tokens
    stored = flat.hidden_states.dtype
    weights = (gate_up, flat.down_proj) if flat.up_proj is None else (gate_up, flat.up_proj, flat.down_proj)
    problem = LayerProblem(
        dtype=stored,
        device_type=device.type,
        arch=device_arch(device),
        scheme=scheme.name,
        T=tokens,
        E=gate_up.shape[0],
        K=top_k,
        H=hidden,
        I=width,
        C=capacity,
        format=flat.format,
        activation=experts.glu.activation,
        glu_layout=experts.glu.layout,
        weight_layout=common_layout(*weights),
        has_bias=flat.gate_up_bias is not None or flat.down_bias is not None,
        has_expert_map=flat.expert_map is not None,
        weight_on_input=flat.weight_on_input,
    )
    return {
        "op": op,
        "problem": problem,
        "device": device,
        "outputs": (((tokens, hidden), stored if hidden_states.scheme is None else torch.bfloat16),),
        "backend": flat.backend,
        "hidden_states": hidden_states,
        "experts": experts,
        "expert_map": flat.expert_map,
        "weight_on_input": flat.weight_on_input,
    }


def _top_k(op: str, flat: Flat) -> Dim:
    """K, everything about the weights and ids checked."""
    ids: Tensor = flat.topk_ids
    check_rank(op, "topk_ids", ids, "T K")
    check_index(op, "topk_ids", ids)
    top_k = ids.shape[1]
    sizes = (flat.hidden_states.shape[0], top_k)
    check_shape(op, "topk_ids", ids, "T K", sizes)
    check_shape(op, "topk_weights", flat.topk_weights, "T K", sizes)
    check_float(op, "topk_weights", flat.topk_weights)
    return top_k


def _routed(flat: Flat) -> dict[str, Any]:
    return {"topk_weights": flat.topk_weights, "topk_ids": flat.topk_ids}


def fused_experts(flat: Flat) -> ExpertsCall:
    """``hidden_states [T, H]`` and ids ``[T, K]`` -> ``[T, H]``."""
    op = "fused_experts"
    check_recompute(op, flat.recompute)
    routed = _routed(flat)
    return ExpertsCall(**_layer(op, flat, routed), **routed)


def fused_moe(flat: Flat) -> MoeCall:
    """``hidden_states [T, H]`` and ``router_logits [T, E]`` -> ``[T, H]``."""
    op = "fused_moe"
    check_recompute(op, flat.recompute)
    tensors = {"router_logits": flat.router_logits, "correction_bias": flat.correction_bias}
    fields = _layer(op, flat, tensors)
    route = route_call(op, flat, fields["device"], fields["problem"])
    experts = flat.gate_up_proj.shape[0] if flat.expert_map is None else flat.expert_map.shape[0]
    letters = "T E" if flat.expert_map is None else "T E_global"
    check_shape(op, "router_logits", flat.router_logits, letters, (flat.hidden_states.shape[0], experts))
    return MoeCall(**fields, route=route)


def fused_experts_saving(flat: Flat) -> ExpertsCall:
    """``fused_experts``, and what its backward reads: gate_up ``[R, N]`` before the activation, up ``[R, I]`` beside
    ``up_proj`` (else numel 0), offsets ``[E]``, row_to_pair ``[R]`` and pair_to_row ``[T, K]`` of the sorted rows.

    What ``recompute`` names has numel 0: the first two, or all five.
    """
    op = "fused_experts_saving"
    routed = _routed(flat)
    fields = _layer(op, flat, routed)
    check_recompute(op, flat.recompute)
    problem: LayerProblem = fields["problem"]
    rows, of_one = problem.T * problem.K, flat.gate_up_proj.shape[1]
    places = {"offsets": (problem.E,), "row_to_pair": (rows,), "pair_to_row": (problem.T, problem.K)}
    projected = (rows, of_one) if flat.recompute is None else (0,)
    saved: dict[str, Output] = {
        "gate_up": (projected, problem.dtype),
        "up": ((0,) if flat.up_proj is None else projected, problem.dtype),
        **{name: ((0,) if flat.recompute == "all" else sizes, torch.int32) for name, sizes in places.items()},
    }
    fields["outputs"] += tuple(saved.values())
    return ExpertsCall(**fields, **routed, recompute=flat.recompute)


def check_recompute(op: str, recompute: str | None) -> None:
    """A name of :data:`meta.dims.RECOMPUTE` or None."""
    if recompute is not None:
        check_name(op, "recompute", recompute, RECOMPUTE)
