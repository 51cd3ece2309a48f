"""One rule per operator: it parses the flat arguments into a :class:`meta.calls.Call`, checks them (ValueError) and
says what the outputs are.

A rule takes its operator's arguments by the names of the schema, defaults included. The same rule runs before every
real implementation and is the whole of the fake one, so an operator rejects the same arguments with the same words in
eager and in compiled code. Rules read sizes, strides and types, never data, and take symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meta.arch import device_arch
from meta.calls import Call, CombineCall, DispatchCall, Output, QuantizeCall, RouteCall
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
)
from meta.dims import SLOT_ORDERS, Dim, Problem
from meta.gemm_shapes import Flat, batched_mm, batched_mm_glu, grouped_mm, grouped_mm_glu
from meta.gradient_shapes import (
    expert_sums,
    fused_experts_backward,
    fused_experts_backward_first,
    fused_topk_backward,
    gathered_mm,
    grouped_wgrad,
    sort_pairs,
)
from meta.layer_shapes import (
    check_expert_map,
    fused_experts,
    fused_experts_saving,
    fused_moe,
    route_call,
)
from meta.schemes import SCHEMES, ActivationFormat

INT32_MAX = 2**31 - 1


def fused_topk(flat: Flat) -> RouteCall:
    """``router_logits [T, E]`` -> weights fp32 ``[T, K]``, ids int32 ``[T, K]``."""
    op = "fused_topk"
    tensors = {"router_logits": flat.router_logits, "correction_bias": flat.correction_bias}
    return route_call(op, flat, check_placement(op, tensors))


def _dispatch(op: str, flat: Flat, batched: bool, slot_order: str) -> DispatchCall:
    hidden_states, ids = flat.hidden_states, flat.topk_ids
    device = check_placement(op, {"hidden_states": hidden_states, "topk_ids": ids, "expert_map": flat.expert_map})
    check_rank(op, "hidden_states", hidden_states, "T H")
    check_float(op, "hidden_states", hidden_states)
    check_rank(op, "topk_ids", ids, "T K")
    check_index(op, "topk_ids", ids)
    (tokens, hidden), top_k = hidden_states.shape, ids.shape[1]
    check_shape(op, "topk_ids", ids, "T K", (tokens, top_k))
    check_expert_map(op, flat.expert_map)
    check_positive(op, "num_experts", flat.num_experts)
    if type(flat.num_experts) is int:  # a symbol is a size of what there is
        rule = f"<= {INT32_MAX} so that an expert's number fits int32"
        check_at_most(op, "num_experts", flat.num_experts, INT32_MAX, rule, "Pass how many experts are held here.")
    rows: Output
    capacity: Dim | None = None
    if not batched:
        rows = ((tokens * top_k, hidden), hidden_states.dtype)
    else:
        capacity = tokens if flat.capacity is None else flat.capacity  # of no tokens 0, which nobody may ask for
        if flat.capacity is not None:
            check_positive(op, "capacity", capacity)
        rule = f"<= {INT32_MAX // flat.num_experts} so that a slot number fits int32"
        check_at_most(op, "capacity", capacity, INT32_MAX // flat.num_experts, rule, "Pass fewer rows per expert.")
        check_name(op, "slot_order", slot_order, SLOT_ORDERS)
        rows = ((flat.num_experts, capacity, hidden), hidden_states.dtype)
    return DispatchCall(
        op=op,
        problem=Problem(hidden_states.dtype, device.type, device_arch(device), ""),
        device=device,
        outputs=(rows, ((flat.num_experts,), torch.int32), ((tokens, top_k), torch.int32)),
        hidden_states=hidden_states,
        topk_ids=ids,
        expert_map=flat.expert_map,
        num_experts=flat.num_experts,
        capacity=capacity,
        slot_order=slot_order,
    )


def moe_permute(flat: Flat) -> DispatchCall:
    """-> rows ``[R, H]``, offsets int32 ``[E]``, pair_to_row int32 ``[T, K]``."""
    return _dispatch("moe_permute", flat, False, "token")


def batched_dispatch(flat: Flat) -> DispatchCall:
    """-> batch ``[E, C, H]``, expert_num_tokens int32 ``[E]``, slots int32 ``[T, K]``."""
    return _dispatch("batched_dispatch", flat, True, flat.slot_order)


def _combine(op: str, rows_name: str, letters: str, places_name: str, flat: Flat) -> CombineCall:
    rows, places = getattr(flat, rows_name), getattr(flat, places_name)
    weights: Tensor = flat.topk_weights
    device = check_placement(op, {rows_name: rows, places_name: places, "topk_weights": weights, "added": flat.added})
    check_rank(op, rows_name, rows, letters)
    check_float(op, rows_name, rows)
    check_rank(op, places_name, places, "T K")
    check_dtype(op, places_name, places, torch.int32, "Pass it as the dispatch operator returned it.")
    tokens, top_k = places.shape
    check_shape(op, "topk_weights", weights, "T K", (tokens, top_k))
    check_float(op, "topk_weights", weights)
    sizes = (tokens, rows.shape[-1])
    if flat.added is not None:
        check_float(op, "added", flat.added)
        check_shape(op, "added", flat.added, "T H", sizes)
    return CombineCall(
        op=op,
        problem=Problem(rows.dtype, device.type, device_arch(device), ""),
        device=device,
        outputs=((sizes, rows.dtype),),
        rows=rows,
        places=places,
        topk_weights=weights,
        added=flat.added,
    )


def moe_unpermute(flat: Flat) -> CombineCall:
    """``rows [R, H]`` -> ``[T, H]`` in the dtype of rows."""
    return _combine("moe_unpermute", "rows", "R H", "pair_to_row", flat)


def batched_combine(flat: Flat) -> CombineCall:
    """``batch [E, C, H]`` -> ``[T, H]`` in the dtype of batch."""
    return _combine("batched_combine", "batch", "E C H", "slots", flat)


def _quantize(op: str, argument: str, letters: str, flat: Flat) -> QuantizeCall:
    rows: Tensor = getattr(flat, argument)
    counts: Tensor | None = getattr(flat, "expert_num_tokens", None)
    device = check_placement(op, {argument: rows, "expert_num_tokens": counts})
    check_rank(op, argument, rows, letters)
    check_float(op, argument, rows)
    forms: dict[str, ActivationFormat] = {name: row.rows for name, row in SCHEMES.items() if row.rows is not None}
    check_name(op, "scheme", flat.scheme, forms)
    if counts is not None:
        check_shape(op, "expert_num_tokens", counts, "E", (rows.shape[0],))
        check_dtype(op, "expert_num_tokens", counts, torch.int32)
    form = forms[flat.scheme]
    scale_sizes = (*rows.shape[:-1], form.scale_width(rows.shape[-1]))
    return QuantizeCall(
        op=op,
        problem=Problem(rows.dtype, device.type, device_arch(device), flat.scheme),
        device=device,
        outputs=((tuple(rows.shape), form.dtype), (scale_sizes, torch.float32)),
        rows=rows,
        expert_num_tokens=counts,
    )


def quantize_rows(flat: Flat) -> QuantizeCall:
    """``rows [R, K]`` -> stored ``[R, K]``, scale fp32 ``[R, K groups]``."""
    return _quantize("quantize_rows", "rows", "R K", flat)


def quantize_batched(flat: Flat) -> QuantizeCall:
    """``batch [E, C, K]`` -> stored ``[E, C, K]``, scale fp32 ``[E, C, K groups]``."""
    return _quantize("quantize_batched", "batch", "E C K", flat)


Rule = Callable[[Flat], Call]

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        fused_topk,
        fused_topk_backward,
        moe_permute,
        moe_unpermute,
        batched_dispatch,
        batched_combine,
        quantize_rows,
        quantize_batched,
        grouped_mm_glu,
        grouped_mm,
        batched_mm_glu,
        batched_mm,
        sort_pairs,
        gathered_mm,
        grouped_wgrad,
        expert_sums,
        fused_experts,
        fused_experts_saving,
        fused_experts_backward,
        fused_experts_backward_first,
        fused_moe,
    )
}
