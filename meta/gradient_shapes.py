"""Rules of the operators that gradients are made of: products of rows that are taken from tokens, and the steps of a
layer's backward. No public function calls them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meta.activations import resolve_activation
from meta.arch import device_arch
from meta.calls import (
    BackwardCall,
    FirstBackwardCall,
    GatheredCall,
    Output,
    RouteBackwardCall,
    Sizes,
    SortCall,
    SumsCall,
    WgradCall,
)
from meta.checks import (
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
from meta.dims import GRADIENTS, Dim, Problem, accumulation_dtype
from meta.gemm_shapes import Flat, check_bias, plain_product
from meta.layer_shapes import check_expert_map, route_call
from meta.operands import Glu
from meta.routing import DIFFERENTIABLE_AFTER, DIFFERENTIABLE_SCORES, ROUTINGS

NOTHING: Output = ((0,), torch.float32)


def check_places(op: str, tokens: Tensor, row_to_pair: Tensor, pair_to_row: Tensor) -> tuple[Dim, Dim]:
    """Where the rows of ``tokens [T, ..]`` are: int32 ``[R]`` and ``[T, K]``; (T, K)."""
    check_rank(op, "pair_to_row", pair_to_row, "T K")
    sizes = (tokens.shape[0], pair_to_row.shape[1])
    check_shape(op, "pair_to_row", pair_to_row, "T K", sizes)
    check_shape(op, "row_to_pair", row_to_pair, "R", (sizes[0] * sizes[1],))
    check_dtype(op, "row_to_pair", row_to_pair, torch.int32)
    check_dtype(op, "pair_to_row", pair_to_row, torch.int32)
    return sizes


def _check_weights(op: str, topk_weights: Tensor | None, sizes: tuple[Dim, Dim]) -> None:
    if topk_weights is not None:
        check_shape(op, "topk_weights", topk_weights, "T K", sizes)
        check_float(op, "topk_weights", topk_weights)


def sort_pairs(flat: Flat) -> SortCall:
    """``topk_ids [T, K]`` -> offsets ``[E]``, row_to_pair ``[R]`` and pair_to_row ``[T, K]``, int32."""
    op = "sort_pairs"
    ids = flat.topk_ids
    device = check_placement(op, {"topk_ids": ids, "expert_map": flat.expert_map})
    check_rank(op, "topk_ids", ids, "T K")
    check_index(op, "topk_ids", ids)
    check_expert_map(op, flat.expert_map)
    check_positive(op, "num_experts", flat.num_experts)
    if flat.capacity is not None:
        check_positive(op, "capacity", flat.capacity)
    tokens, top_k = ids.shape
    sizes: tuple[Sizes, ...] = ((flat.num_experts,), (tokens * top_k,), (tokens, top_k))
    return SortCall(
        op=op,
        problem=Problem(torch.float32, device.type, device_arch(device), ""),
        device=device,
        outputs=tuple((size, torch.int32) for size in sizes),
        topk_ids=ids,
        expert_map=flat.expert_map,
        num_experts=flat.num_experts,
        capacity=flat.capacity,
    )


def gathered_mm(flat: Flat) -> GatheredCall:
    """``tokens [T, K]``, ``weight [E, N, K]`` -> ``[R, N]``."""
    op = "gathered_mm"
    rest = {name: getattr(flat, name) for name in ("row_to_pair", "pair_to_row", "topk_weights")}
    check_placement(op, {"tokens": flat.tokens, **rest})
    flat.up_weight = flat.scheme = flat.tokens_scale = None
    flat.weight_scales = ()
    call = plain_product(op, flat)
    sizes = check_places(op, flat.tokens, flat.row_to_pair, flat.pair_to_row)
    _check_weights(op, flat.topk_weights, sizes)
    rows = sizes[0] * sizes[1]
    ((_, width), dtype), *_ = call.outputs
    fields = {name: getattr(call, name) for name in ("op", "device", "x", "weight", "extents", "bias")}
    return GatheredCall(
        **fields, problem=replace(call.problem, M=rows), outputs=(((rows, width), dtype),), **rest
    )  # fmt: skip


def _places(op: str, tokens: Tensor, flat: Flat) -> Dim:
    """R: of ``tokens`` that are rows, or of which ``row_to_pair`` and ``pair_to_row`` make rows."""
    if flat.pair_to_row is None:
        if flat.row_to_pair is not None:
            raise fail(op, "row_to_pair", "None without pair_to_row", "a tensor")
        return tokens.shape[0]
    if flat.row_to_pair is None:
        raise fail(op, "row_to_pair", "a tensor beside pair_to_row", "None")
    tokens_and_choices = check_places(op, tokens, flat.row_to_pair, flat.pair_to_row)
    return tokens_and_choices[0] * tokens_and_choices[1]


def grouped_wgrad(flat: Flat) -> WgradCall:
    """``grad_rows [R, N]``, ``rows [R, K]`` -> ``[E, N, K]`` in the dtype of the rows. With places one of them, which
    ``tokens`` names, has tokens ``[T, ..]``.
    """
    op = "grouped_wgrad"
    tensors = {name: getattr(flat, name) for name in ("grad_rows", "rows", "offsets", "row_to_pair", "pair_to_row")}
    grad_rows, rows, offsets = flat.grad_rows, flat.rows, flat.offsets
    device = check_placement(op, tensors)
    check_name(op, "tokens", flat.tokens, ("grad_rows", "rows"))
    check_rank(op, "grad_rows", grad_rows, "R N")
    check_rank(op, "rows", rows, "R K")
    check_float(op, "rows", rows)
    check_dtype(op, "grad_rows", grad_rows, rows.dtype)
    count = _places(op, tensors[flat.tokens], flat)
    if flat.tokens == "rows":
        check_shape(op, "grad_rows", grad_rows, "R N", (count, grad_rows.shape[1]))
    else:
        check_shape(op, "rows", rows, "R K", (count, rows.shape[1]))
    check_rank(op, "offsets", offsets, "E")
    check_dtype(op, "offsets", offsets, torch.int32)
    return WgradCall(
        op=op,
        problem=Problem(rows.dtype, device.type, device_arch(device), ""),
        device=device,
        outputs=(((offsets.shape[0], grad_rows.shape[1], rows.shape[1]), rows.dtype),),
        **tensors,
        tokens=flat.tokens,
    )


def expert_sums(flat: Flat) -> SumsCall:
    """``rows [R, N]`` or tokens ``[T, N]`` -> ``[E, N]`` in the accumulation dtype."""
    op = "expert_sums"
    names = ("rows", "offsets", "row_to_pair", "pair_to_row", "topk_weights")
    tensors = {name: getattr(flat, name) for name in names}
    rows, offsets = flat.rows, flat.offsets
    device = check_placement(op, tensors)
    check_rank(op, "rows", rows, "R N")
    check_float(op, "rows", rows)
    check_rank(op, "offsets", offsets, "E")
    check_dtype(op, "offsets", offsets, torch.int32)
    _places(op, rows, flat)
    if flat.topk_weights is not None:
        if flat.pair_to_row is None:
            raise fail(op, "topk_weights", "None without pair_to_row", "a tensor")
        _check_weights(op, flat.topk_weights, tuple(flat.pair_to_row.shape))
    return SumsCall(
        op=op,
        problem=Problem(rows.dtype, device.type, device_arch(device), ""),
        device=device,
        outputs=(((offsets.shape[0], rows.shape[1]), accumulation_dtype(rows.dtype)),),
        **tensors,
    )


def _check_sorted(op: str, tokens: Tensor, experts: Dim, flat: Flat) -> tuple[tuple[Dim, Dim], Dim]:
    """Where the pairs of ``tokens`` are, and their weights; (T, K) and R."""
    sizes = check_places(op, tokens, flat.row_to_pair, flat.pair_to_row)
    _check_weights(op, flat.topk_weights, sizes)
    check_dtype(op, "offsets", flat.offsets, torch.int32)
    check_shape(op, "offsets", flat.offsets, "E", (experts,))
    return sizes, sizes[0] * sizes[1]


def fused_experts_backward(flat: Flat) -> BackwardCall:
    """Gradients of gate_up and up, the weighted result of the activation ``[R, I]`` (numel 0 unless ``value``), and the
    gradient of the routing weights fp32 ``[T, K]`` (numel 0 with ``weight_on_input``).

    Beside ``hidden_states`` and ``gate_up_proj`` gate_up and up are not read, but computed again.
    """
    op = "fused_experts_backward"
    grad, down, weights, glu = flat.grad_output, flat.down_proj, flat.topk_weights, flat.glu_layout
    again = ("hidden_states", "gate_up_proj", "up_proj", "gate_up_bias")
    names = ("grad_output", "down_proj", "topk_weights", "gate_up", "up", "offsets", "row_to_pair", "pair_to_row")
    device = check_placement(op, {name: getattr(flat, name) for name in (*names, "down_bias", *again)})
    check_rank(op, "grad_output", grad, "T H")
    check_float(op, "grad_output", grad)
    check_rank(op, "down_proj", down, "E H I")
    experts, hidden, width = down.shape
    check_shape(op, "grad_output", grad, "T H", (grad.shape[0], hidden))
    check_dtype(op, "down_proj", down, grad.dtype)
    sizes, rows = _check_sorted(op, grad, experts, flat)
    check_bias(op, "down_bias", flat.down_bias, "E H", (experts, hidden))
    row, alpha, limit = resolve_activation(op, flat.activation, flat.alpha, flat.limit)
    of_one = 2 * width if glu in ("concat", "interleaved") else width
    saved: dict[str, Output] = {"gate_up": ((rows, of_one), grad.dtype)}
    if glu == "separate":
        saved["up"] = ((rows, width), grad.dtype)
    first: tuple[Tensor, ...] = ()
    if flat.hidden_states is None:
        for name, (shape, dtype) in saved.items():
            check_shape(op, name, getattr(flat, name), "R N", shape)
            check_dtype(op, name, getattr(flat, name), dtype)
    else:
        check_shape(op, "hidden_states", flat.hidden_states, "T H", tuple(grad.shape))
        check_dtype(op, "hidden_states", flat.hidden_states, grad.dtype)
        first = (flat.gate_up_proj, flat.up_proj) if glu == "separate" else (flat.gate_up_proj,)
        for name, weight in zip(again[1:], first, strict=False):
            if weight is None:
                raise fail(op, name, "a tensor beside hidden_states", "None")
            check_shape(op, name, weight, "E N H", (experts, of_one, hidden))
            check_dtype(op, name, weight, grad.dtype)
        check_bias(op, "gate_up_bias", flat.gate_up_bias, "E N", (experts, of_one * len(first)))
    of_rows: Output = ((rows, width), grad.dtype)
    return BackwardCall(
        op=op,
        problem=Problem(grad.dtype, device.type, device_arch(device), ""),
        device=device,
        outputs=(
            saved["gate_up"],
            saved.get("up", NOTHING),
            of_rows if flat.value else NOTHING,
            NOTHING if flat.weight_on_input else (sizes, accumulation_dtype(grad.dtype)),
        ),
        grad_output=grad,
        down=down,
        topk_weights=weights,
        gate_up=None if first else flat.gate_up,
        up=flat.up if not first and glu == "separate" else None,
        offsets=flat.offsets,
        row_to_pair=flat.row_to_pair,
        pair_to_row=flat.pair_to_row,
        down_bias=flat.down_bias,
        hidden_states=flat.hidden_states,
        first=first,
        first_bias=flat.gate_up_bias,
        glu=Glu(row.name, alpha, limit, glu),
        weight_on_input=flat.weight_on_input,
        value=flat.value,
    )


def fused_experts_backward_first(flat: Flat) -> FirstBackwardCall:
    """Gradients by the names of :data:`meta.dims.GRADIENTS`, numel 0 where not needed, that of topk_weights in fp32;
    behind them ``grad_output`` in sorted rows ``[R, H]``, numel 0 without it.
    """
    op = "fused_experts_backward_first"
    hidden, first, weights = flat.hidden_states, flat.gate_up_proj, flat.topk_weights
    names = ("grad_gate_up", "hidden_states", "gate_up_proj", "topk_weights", "offsets", "row_to_pair", "pair_to_row")
    device = check_placement(op, {name: getattr(flat, name) for name in (*names, "grad_up", "up_proj", "grad_output")})
    check_rank(op, "hidden_states", hidden, "T H")
    check_float(op, "hidden_states", hidden)
    check_rank(op, "gate_up_proj", first, "E N H")
    experts, width, columns = first.shape
    check_shape(op, "hidden_states", hidden, "T H", (hidden.shape[0], columns))
    check_dtype(op, "gate_up_proj", first, hidden.dtype)
    sizes, rows = _check_sorted(op, hidden, experts, flat)
    grads, of_rows = [flat.grad_gate_up], [first]
    if flat.up_proj is not None:
        check_shape(op, "up_proj", flat.up_proj, "E I H", tuple(first.shape))
        check_dtype(op, "up_proj", flat.up_proj, hidden.dtype)
        grads.append(flat.grad_up)
        of_rows.append(flat.up_proj)
    for name, grad in zip(("grad_gate_up", "grad_up"), grads, strict=False):
        check_shape(op, name, grad, "R N", (rows, width))
        check_dtype(op, name, grad, hidden.dtype)
    if flat.grad_output is not None:
        check_shape(op, "grad_output", flat.grad_output, "T H", (sizes[0], columns))
        check_dtype(op, "grad_output", flat.grad_output, hidden.dtype)
    if len(flat.needs) != len(GRADIENTS):
        raise fail(op, "needs", f"{len(GRADIENTS)} booleans", len(flat.needs))
    needs = dict(zip(GRADIENTS, flat.needs, strict=True))
    needs["up_proj"] = needs["up_proj"] and flat.up_proj is not None
    needs["topk_weights"] = needs["topk_weights"] and flat.weight_on_input
    wide = accumulation_dtype(hidden.dtype)
    outputs: dict[str, Output] = {
        "hidden_states": (tuple(hidden.shape), hidden.dtype),
        "gate_up_proj": (tuple(first.shape), hidden.dtype),
        "up_proj": (tuple(first.shape), hidden.dtype),
        "gate_up_bias": ((experts, width * len(grads)), wide),
        "topk_weights": (sizes, wide),
    }
    copies: Output = ((rows, columns), hidden.dtype)
    return FirstBackwardCall(
        op=op,
        problem=Problem(hidden.dtype, device.type, device_arch(device), ""),
        device=device,
        outputs=(
            *(outputs[name] if needs[name] else NOTHING for name in GRADIENTS),
            NOTHING if flat.grad_output is None else copies,
        ),
        grads=tuple(grads),
        hidden_states=hidden,
        weights=tuple(of_rows),
        topk_weights=weights,
        offsets=flat.offsets,
        row_to_pair=flat.row_to_pair,
        pair_to_row=flat.pair_to_row,
        grad_output=flat.grad_output,
        weight_on_input=flat.weight_on_input,
        sparing=flat.sparing,
        needs=needs,
    )


def fused_topk_backward(flat: Flat) -> RouteBackwardCall:
    """``grad_weights [T, K]``, ``router_logits [T, E]``, ``topk_ids [T, K]`` -> ``[T, E]`` in the logits' dtype."""
    op = "fused_topk_backward"
    tensors = {name: getattr(flat, name) for name in ("grad_weights", "router_logits", "topk_ids")}
    device = check_placement(op, tensors)
    flat.correction_bias = None
    route = route_call(op, flat, device)
    row = ROUTINGS[route.options.routing]
    if row.score not in DIFFERENTIABLE_SCORES or row.after not in DIFFERENTIABLE_AFTER:
        rule = f"one with a derivative, of a score in {DIFFERENTIABLE_SCORES} and an 'after' in {DIFFERENTIABLE_AFTER}"
        raise fail(op, "routing", rule, repr(row.name), "Call fused_topk under torch.no_grad().")
    ((sizes, _), _), logits = route.outputs, flat.router_logits
    check_shape(op, "grad_weights", flat.grad_weights, "T K", sizes)
    check_float(op, "grad_weights", flat.grad_weights)
    check_shape(op, "topk_ids", flat.topk_ids, "T K", sizes)
    check_index(op, "topk_ids", flat.topk_ids)
    return RouteBackwardCall(
        op=op,
        problem=route.problem,
        device=device,
        outputs=((tuple(logits.shape), logits.dtype),),
        options=route.options,
        **tensors,
    )
