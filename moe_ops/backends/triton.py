"""Triton kernels on NVIDIA GPUs (and, for tests, on the CPU under Triton's interpreter)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from meta.arch import lacks
from meta.calls import (
    Call,
    CombineCall,
    DispatchCall,
    ExpertsCall,
    GatheredCall,
    GemmCall,
    GluCall,
    LayerCall,
    MoeCall,
    QuantizeCall,
    RouteBackwardCall,
    RouteCall,
    SumsCall,
    WgradCall,
)
from meta.dims import Problem
from meta.formats import E4M3
from meta.operands import Glu, Operand
from meta.schemes import SCHEMES, ActivationFormat
from moe_ops.backends import triton_plans
from moe_ops.counters import Row
from moe_ops.kernels.triton import (
    act_quant,
    batched_io,
    collect,
    combine,
    permute,
    rows,
    small,
    topk,
    topk_backward,
    wgrad,
)
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import batched_mm as launch_batched_mm
from moe_ops.kernels.triton.expert_mm import grouped_mm as launch_grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM, descriptor_strides
from moe_ops.kernels.triton.layer import Ends, Layer, blocks_for, fit, pdl_launches, plans_for
from moe_ops.kernels.triton.record import Recorder
from moe_ops.kernels.triton.tile_loads import CONCAT
from moe_ops.kernels.triton.util import INTERPRETED, unit_stride
from moe_ops.plans import LayerKey, Plan, bucket
from moe_ops.rows import Routed

NAME = triton_plans.NAME
SERVED_SCHEMES = frozenset(
    {"bf16", "fp16", "fp32", "fp8_block128", "fp8_channel", "fp8_tensor", "int8_channel", *triton_plans.DECODED}
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Of rows that operators take and return.
FORMS: dict[str, ActivationFormat] = {name: row.rows for name, row in SCHEMES.items() if row.rows is not None}
#: In place of :mod:`moe_ops.rows`.
ROWS = rows

Tensor = torch.Tensor


def refuses(problem: Problem) -> str | None:
    """None when these kernels can run `problem`, else why not."""
    if problem.device_type != "cuda" and not INTERPRETED.value:
        return f"needs a CUDA device, got {problem.device_type}"
    form = SCHEMES[problem.scheme].rows if problem.scheme else None
    if problem.dtype not in (*DTYPES, form and form.dtype):
        return f"supports {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, got {problem.dtype}"
    scheme = SCHEMES.get(problem.scheme)
    if scheme is not None and E4M3 in scheme.dtypes and (reason := lacks(problem.arch, "fp8")):
        return f"scheme {problem.scheme} {reason}"
    if problem.scheme in triton_plans.PACKED and problem.dtype == torch.float32:
        return f"scheme {problem.scheme} takes bfloat16 or float16 activations, got {problem.dtype}"
    return lacks(problem.arch, "kernels")


def record(
    function: Callable[[Any], Any], call: Call, tensors: Sequence[Tensor]
) -> tuple[Any, Callable[..., Any] | None]:
    """The result of a call, and what fires its launches for other tensors, if no more than launches are needed."""
    with Recorder(tensors) as recorder:
        result = function(call)
    made = recorder.finish(result)
    return result, None if made is None else made.fire


def _dense(tensor: Tensor | None) -> Any:
    """A small argument, or its copy, as kernels address it: its elements one after the other."""
    return None if tensor is None else tensor.contiguous()


# ---- routing and rows ----


def fused_topk(call: RouteCall) -> tuple[Tensor, Tensor]:
    options = call.options._asdict()
    return topk.fused_topk(call.router_logits, call.correction_bias, **options, pdl=pdl_launches(call.device))


def fused_topk_backward(call: RouteBackwardCall) -> Tensor:
    return topk_backward.topk_backward(call.grad_weights, call.router_logits, call.topk_ids, call.options)


def moe_permute(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    offsets, _, pair_to_row = permute.sort_pairs(call.topk_ids, call.num_experts, call.expert_map)
    return permute.gather_rows(call.hidden_states, pair_to_row), offsets, pair_to_row


def moe_unpermute(call: CombineCall) -> Tensor:
    return combine.combine(call.rows.flatten(0, -2), call.places, call.topk_weights, call.added)


batched_combine = moe_unpermute


def batched_dispatch(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, counts, slots = batched_io.dispatch(
        call.hidden_states,
        call.topk_ids,
        call.num_experts,
        call.capacity or 0,
        call.expert_map,
        by_choice=call.slot_order == "choice",
    )
    return batch, counts, slots


def quantize_rows(call: QuantizeCall) -> tuple[Tensor, Tensor]:
    return act_quant.quantize_rows(call.rows, FORMS[call.problem.scheme])


def quantize_batched(call: QuantizeCall) -> tuple[Tensor, Tensor]:
    return act_quant.quantize_batched(call.rows, _dense(call.expert_num_tokens), FORMS[call.problem.scheme])


# ---- single GEMMs ----


def _epilogue(glu: Glu) -> dict[str, Any]:
    """An activation as `ExpertMM` takes it."""
    return {"glu_layout": glu.layout, "activation": glu.activation, "alpha": glu.alpha, "limit": glu.limit}


def _gemm(
    call: GemmCall, load: Row | None = None, gather: dict[str, Any] | None = None, **epilogue: Any
) -> tuple[Tensor, Tensor]:
    """``gather``: where its rows come from, if `call.x` has tokens."""
    problem, blocks = call.problem, blocks_for(call.weight, call.x, call.device)
    x = call.x if blocks is None else _in_blocks(call, blocks, gathered=gather is not None)
    extents = _dense(call.extents)
    epilogue |= {"rows_scale": _dense(x.scales[0]) if x.scales else None, "blocks": blocks}
    mm = ExpertMM(call.weight, call.out_dtype, bias=call.bias, **epilogue)
    column = triton_plans.product(problem.scheme, first=mm.activation is not None, gathered=gather is not None)
    tile = _tile_for(problem.scheme, mm, int(problem.M), column)
    if mm.gathers_few(tile):  # bf16 numbers, not what is given
        tile = mm.beside_few(tile)
    rows = unit_stride(x.data)
    # Of a batch every row would be copied, in use or not; few are not worth a kernel that counts them.
    counted = load is not None and mm.takes_few(tile)
    shared = mm.shares(tile) and mm.specialises(tile)
    copied = problem.format == "batched" and not shared
    gathered = gather is not None and not (shared and descriptor_strides(rows, inner=1))
    tile = fit(tile, mm, as_they_are=gathered or copied or counted)
    if problem.format == "batched":
        return launch_batched_mm(rows.contiguous(), mm, extents, tile, load=load)
    order, count = mm.order(tile), int(problem.M)
    if order is not None:
        rows, mm = permute.gather_rows(rows, None, order=order), replace(mm, rows_order=order)
    return launch_grouped_mm(rows, mm, extents, tile, num_rows=count, load=load, **(gather or {}))


def _tile_for(scheme: str, mm: ExpertMM, rows: int, column: str) -> MMConfig:
    sizes = (mm.num_experts, bucket(rows), mm.out_features * (2 if mm.glu else 1), mm.in_features)
    return triton_plans.tile_for(scheme, *sizes, *plans_for(mm.weight.device, mm.blocks), column)


def _in_blocks(call: GemmCall, form: ActivationFormat, gathered: bool) -> Operand:
    """The product's rows, or tokens where it gathers them, as a `form` of :mod:`meta.blocks`."""
    if gathered:
        made = act_quant.quantize_rows(call.x.data, form)
    elif call.problem.format == "batched":
        made = act_quant.quantize_batched(call.x.data, _dense(call.extents), form)
    else:
        made = act_quant.quantize_sorted(call.x.data, _dense(call.extents), form)
    return Operand(made[0], form, (made[1],))


def grouped_mm(call: GemmCall) -> Tensor:
    return _gemm(call)[0]


batched_mm = grouped_mm


def gathered_mm(call: GatheredCall) -> Tensor:
    """Threads gather the rows in the product, unless they carry weights: as fast as copies of them without the time to
    make these (Qwen3-30B-A3B, gate|up, T = 4096 and 16384, us on an H200: 383 and 1449, with copies 424 and 1587).
    """
    if call.topk_weights is not None:
        return grouped_mm(call.of_rows(permute.gather_rows(call.x.data, call.pair_to_row, call.topk_weights)))
    gather = {"row_to_pair": _dense(call.row_to_pair), "top_k": call.pair_to_row.shape[1]}
    return _gemm(call, gather=gather)[0]


def activated_rows(call: ExpertsCall, routed: Routed, *, keep: bool) -> tuple[Tensor, ...]:
    """Results of the activation ``[R, I]``, by expert, and what stands before it, where that is to be kept: in one
    tensor, or the halves' two.
    """
    x, weights, (T, top_k) = unit_stride(call.hidden_states.data), call.experts, routed.pair_to_row.shape
    mm = ExpertMM(weights.gate_up, x.dtype, up=weights.up, bias=weights.gate_up_bias, **_epilogue(weights.glu))
    apart = 1 if weights.up is None else 2
    width = mm.out_features * (2 if mm.glu and apart == 1 else 1)
    halves = [x.new_empty((T * top_k, width)) for _ in range(apart if keep else 0)]
    parts = halves
    if keep and mm.glu == CONCAT.value and apart == 1:
        parts = [halves[0][:, : mm.out_features], halves[0][:, mm.out_features :]]
    gathered = not call.weight_on_input  # else threads would have to multiply them
    column = triton_plans.product(call.problem.scheme, first=True, gathered=gathered)
    tile = _tile_for(call.problem.scheme, mm, T * top_k, column)
    gather: dict[str, Any] = {"row_to_pair": routed.row_to_pair, "top_k": top_k} if gathered else {}
    rows = x if gathered else permute.gather_rows(x, routed.pair_to_row, call.topk_weights)
    value, _ = launch_grouped_mm(rows, mm, routed.offsets, tile, num_rows=T * top_k, kept=tuple(parts), **gather)
    return value, *halves


def grouped_mm_glu(call: GluCall) -> tuple[Tensor, Tensor]:
    epilogue = {**_epilogue(call.glu), "quantize_output": call.quantize_output}
    return _gemm(call, Row(call.weight.data), up=call.up, **epilogue)


batched_mm_glu = grouped_mm_glu


def grouped_wgrad(call: WgradCall) -> Tensor:
    offsets = _dense(call.offsets)
    if call.row_to_pair is None or call.pair_to_row is None:
        return wgrad.grouped_wgrad(call.grad_rows, call.rows, offsets)
    places = (_dense(call.row_to_pair), _dense(call.pair_to_row))
    return wgrad.of_tokens(call.grad_rows, call.rows, offsets, *places, call.tokens)


def expert_sums(call: SumsCall) -> Tensor:
    places = (_dense(call.row_to_pair), call.pair_to_row)
    return collect.expert_sums(call.rows, _dense(call.offsets), *places, call.topk_weights)


# ---- the whole layer ----


def fused_experts(call: ExpertsCall) -> Tensor:
    x = call.hidden_states.data
    if call.topk_ids.numel() == 0 or call.experts.count == 0:  # nothing is selected
        return x.new_zeros(x.shape, dtype=call.out_dtype)
    layer, plan = _layer(call)
    return layer.run(plan, call.hidden_states, call.topk_weights, call.topk_ids)


def fused_experts_between(call: ExpertsCall, arrive: Callable[[], None], deliver: Callable[..., None]) -> None:
    """A layer on tokens that are still arriving, whose results are delivered; see :func:`moe_ops.choice.between`."""
    layer, plan = _layer(call)
    layer.run_between(plan, call.hidden_states, call.topk_weights, call.topk_ids, Ends(arrive, deliver))


def _layer(call: LayerCall) -> tuple[Layer, Plan]:
    """A layer's experts, and the plan for this many tokens."""
    problem, weights, dtype = call.problem, call.experts, call.out_dtype
    blocks = blocks_for(weights.gate_up, call.hidden_states, call.device)
    epilogue = {**_epilogue(weights.glu), "blocks": blocks}
    up = ExpertMM(weights.gate_up, dtype, up=weights.up, bias=weights.gate_up_bias, **epilogue)
    down = ExpertMM(weights.down, dtype, bias=weights.down_bias, blocks=blocks)
    wanted = (LayerKey.of(problem), bucket(int(problem.T)), *plans_for(call.device, blocks))
    plan = triton_plans.plan_for(*wanted)
    if plan.sequence == "small" and not small.reads_rows(up, down):
        plan = triton_plans.by_products(*wanted)
    return Layer(up, down, problem.scheme, _dense(call.expert_map), call.weight_on_input, call.capacity), plan


def run_plan(
    key: LayerKey,
    plan: Plan,
    weights: Sequence[Operand],
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    capacity: int,
) -> Tensor:
    """A layer by a plan, for the tuner.

    Args:
        weights: of the two projections; hidden_states: [T, H]; topk_weights, topk_ids: [T, K].
        capacity: rows per expert of the batched format.
    """
    first, second = weights
    rows, layout = Operand(hidden_states, None), "concat" if key.gated else "none"
    blocks = blocks_for(first, rows, hidden_states.device)
    up = ExpertMM(first, hidden_states.dtype, glu_layout=layout, activation="silu", blocks=blocks)
    down = ExpertMM(second, hidden_states.dtype, blocks=blocks)
    layer = Layer(up, down, key.scheme, capacity=capacity)
    return layer.run(plan, rows, topk_weights, topk_ids)


def fused_moe(call: MoeCall) -> Tensor:
    logits, options = call.route.router_logits, call.route.options
    tokens, experts = logits.shape
    plain = call.hidden_states.scheme is None and not call.weight_on_input
    if plain and topk.is_few(tokens, options.top_k, experts):
        layer, plan = _layer(call)
        few = plan.sequence == "small" and (layer.quantizes or layer.one_token(tokens, options.top_k) is not None)
        routes = plan.sequence == "grouped" or few
        # A static scale is that of a row's expert, which is known when rows are sorted.
        if routes and not layer.has_static_rows:
            routing = options._asdict()
            return layer.run_routed(plan, call.hidden_states.data, logits, call.route.correction_bias, **routing)
    return fused_experts(call.routed(*fused_topk(call.route)))
