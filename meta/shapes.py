"""One rule per operator: it checks the arguments (ValueError) and says what the outputs are.

A rule has its operator's signature and returns :class:`meta.checks.Checked`. The same rule runs before every real
implementation and is the whole of the fake one, so eager and compiled code reject the same arguments with the same
words. Rules read sizes, strides and types, never data, and take symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
from meta.dims import Dim, Problem
from meta.gemm_shapes import batched_mm, batched_mm_glu, grouped_mm, grouped_mm_glu
from meta.layer_shapes import check_expert_map, check_routing, fused_experts, fused_experts_backward, fused_moe
from meta.schemes import SCHEMES, QuantScheme

INT32_MAX = 2**31 - 1


def fused_topk(
    router_logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    routing: str = "softmax",
    renormalize: bool = True,
    renorm_eps: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> Checked:
    """``router_logits [T, E]`` -> weights fp32 ``[T, K]``, ids int32 ``[T, K]``."""
    op = "fused_topk"
    device = check_placement(op, {"router_logits": router_logits, "correction_bias": correction_bias})
    check_routing(op, router_logits, correction_bias, top_k, routing, renorm_eps, num_groups, topk_groups)
    tokens, experts = router_logits.shape
    problem = Problem.of_stage(router_logits, T=tokens, E=experts, K=top_k)
    sizes = (tokens, top_k)
    return Checked(problem, device, ((sizes, torch.float32), (sizes, torch.int32)))


def _check_dispatch(
    op: str, hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None, num_experts: Dim
) -> tuple[torch.device, Dim, Dim, Dim]:
    device = check_placement(op, {"hidden_states": hidden_states, "topk_ids": topk_ids, "expert_map": expert_map})
    check_rank(op, "hidden_states", hidden_states, "T H")
    check_float(op, "hidden_states", hidden_states)
    check_rank(op, "topk_ids", topk_ids, "T K")
    check_index(op, "topk_ids", topk_ids)
    tokens, hidden = hidden_states.shape
    top_k = topk_ids.shape[1]
    check_shape(op, "topk_ids", topk_ids, "T K", (tokens, top_k))
    check_expert_map(op, expert_map)
    check_positive(op, "num_experts", num_experts)
    return device, tokens, hidden, top_k


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: Dim
) -> Checked:
    """-> rows ``[R, H]``, offsets int32 ``[E]``, pair_to_row int32 ``[T, K]``."""
    device, tokens, hidden, top_k = _check_dispatch("moe_permute", hidden_states, topk_ids, expert_map, num_experts)
    problem = Problem.of_stage(
        hidden_states, T=tokens, E=num_experts, K=top_k, H=hidden, has_expert_map=expert_map is not None
    )
    outputs = (
        ((tokens * top_k, hidden), hidden_states.dtype),
        ((num_experts,), torch.int32),
        ((tokens, top_k), torch.int32),
    )
    return Checked(problem, device, outputs)


def batched_dispatch(
    hidden_states: Tensor, topk_ids: Tensor, expert_map: Tensor | None = None, *, num_experts: Dim, capacity: Dim
) -> Checked:
    """-> batch ``[E, C, H]``, expert_num_tokens int32 ``[E]``, slots int32 ``[T, K]``."""
    op = "batched_dispatch"
    device, tokens, hidden, top_k = _check_dispatch(op, hidden_states, topk_ids, expert_map, num_experts)
    check_positive(op, "capacity", capacity)
    rule = f"<= {INT32_MAX // num_experts} so that a slot number fits int32"
    check_at_most(op, "capacity", capacity, INT32_MAX // num_experts, rule, "Pass fewer rows per expert.")
    problem = Problem.of_stage(
        hidden_states, T=tokens, E=num_experts, K=top_k, H=hidden, C=capacity, has_expert_map=expert_map is not None
    )
    outputs = (
        ((num_experts, capacity, hidden), hidden_states.dtype),
        ((num_experts,), torch.int32),
        ((tokens, top_k), torch.int32),
    )
    return Checked(problem, device, outputs)


def _check_combine(op: str, places_name: str, places: Tensor, topk_weights: Tensor) -> tuple[Dim, Dim]:
    check_rank(op, places_name, places, "T K")
    check_dtype(op, places_name, places, torch.int32, "Pass it as the dispatch operator returned it.")
    tokens, top_k = places.shape
    check_shape(op, "topk_weights", topk_weights, "T K", (tokens, top_k))
    check_float(op, "topk_weights", topk_weights)
    return tokens, top_k


def moe_unpermute(rows: Tensor, pair_to_row: Tensor, topk_weights: Tensor) -> Checked:
    """``rows [R, H]`` -> ``[T, H]`` in the dtype of rows."""
    op = "moe_unpermute"
    device = check_placement(op, {"rows": rows, "pair_to_row": pair_to_row, "topk_weights": topk_weights})
    check_rank(op, "rows", rows, "R H")
    check_float(op, "rows", rows)
    tokens, top_k = _check_combine(op, "pair_to_row", pair_to_row, topk_weights)
    hidden = rows.shape[1]
    check_shape(op, "rows", rows, "R H", (tokens * top_k, hidden))
    problem = Problem.of_stage(rows, T=tokens, E=0, K=top_k, H=hidden)
    return Checked(problem, device, (((tokens, hidden), rows.dtype),))


def batched_combine(batch: Tensor, slots: Tensor, topk_weights: Tensor) -> Checked:
    """``batch [E, C, H]`` -> ``[T, H]`` in the dtype of batch."""
    op = "batched_combine"
    device = check_placement(op, {"batch": batch, "slots": slots, "topk_weights": topk_weights})
    check_rank(op, "batch", batch, "E C H")
    check_float(op, "batch", batch)
    tokens, top_k = _check_combine(op, "slots", slots, topk_weights)
    experts, capacity, hidden = batch.shape
    problem = Problem.of_stage(batch, T=tokens, E=experts, K=top_k, H=hidden, C=capacity)
    return Checked(problem, device, (((tokens, hidden), batch.dtype),))


def _row_scheme(op: str, scheme: str) -> tuple[QuantScheme, torch.dtype]:
    valid = {name for name, row in SCHEMES.items() if row.quantizes_rows}
    check_name(op, "scheme", scheme, valid)
    row = SCHEMES[scheme]
    if row.rows_dtype is None:
        raise fail(op, "scheme", f"one of {sorted(valid)}", repr(scheme))
    return row, row.rows_dtype


def quantize_rows(rows: Tensor, *, scheme: str) -> Checked:
    """``rows [R, K]`` -> stored ``[R, K]``, scale fp32 ``[R, ceil(K / 128)]``."""
    op = "quantize_rows"
    device = check_placement(op, {"rows": rows})
    check_rank(op, "rows", rows, "R K")
    check_float(op, "rows", rows)
    row, stored = _row_scheme(op, scheme)
    count, width = rows.shape
    problem = Problem.of_stage(rows, T=count, E=0, H=width, scheme=scheme)
    outputs = (((count, width), stored), ((count, row.rows_scale_width(width)), torch.float32))
    return Checked(problem, device, outputs)


def quantize_batched(batch: Tensor, expert_num_tokens: Tensor, *, scheme: str) -> Checked:
    """``batch [E, C, K]`` -> stored ``[E, C, K]``, scale fp32 ``[E, C, ceil(K / 128)]``."""
    op = "quantize_batched"
    device = check_placement(op, {"batch": batch, "expert_num_tokens": expert_num_tokens})
    check_rank(op, "batch", batch, "E C K")
    check_float(op, "batch", batch)
    row, stored = _row_scheme(op, scheme)
    experts, capacity, width = batch.shape
    check_shape(op, "expert_num_tokens", expert_num_tokens, "E", (experts,))
    check_dtype(op, "expert_num_tokens", expert_num_tokens, torch.int32)
    problem = Problem.of_stage(batch, T=experts * capacity, E=experts, H=width, C=capacity, scheme=scheme)
    scale_sizes = (experts, capacity, row.rows_scale_width(width))
    return Checked(problem, device, (((experts, capacity, width), stored), (scale_sizes, torch.float32)))


Rule = Callable[..., Checked]

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        fused_topk,
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
        fused_experts,
        fused_experts_backward,
        fused_moe,
    )
}
