"""``fused_experts`` in training, and its gradient: products by the stage operators, and what is between them by the
backend's kernels or in plain tensor code. No synchronisation on a GPU.

With rows ``x``, ``h = x W1 + b1``, ``a = act(h)``, ``y = a W2 + b2``, out = sum of ``w y``, the forward keeps ``h`` and
where the pairs are. Then ``u = dout W2`` gives ``dw = <u, a> + <dout, b2>`` without a second forward GEMM (SonicMoE,
arXiv 2512.14080), ``dh = act'(h) (w u)``, ``dx = dh W1^T``, ``dW1 = dh^T x``, ``dW2 = dout^T (w a)``. With
``weight_on_input`` the weight multiplies ``x``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meta.activations import split_glu
from meta.calls import BackwardCall, ExpertsCall
from meta.dims import GRADIENTS, accumulation_dtype
from moe_ops import rows as plain
from moe_ops.pairs import drop_overflow, local_ids
from moe_ops.rows import Routed

#: Runs a stage operator by its name and flat arguments.
Stage = Callable[..., Any]


def _between(kernels: ModuleType) -> Any:
    """The module with what is between products."""
    return getattr(kernels, "ROWS", plain)


def fused_experts_saving(call: ExpertsCall, stage: Stage, kernels: ModuleType) -> tuple[Tensor, ...]:
    """``fused_experts`` in sorted rows, whatever its format: a capacity drops pairs, and does nothing else.

    Returns:
        The output, gate_up, up (numel 0 unless the halves are apart), offsets, row_to_pair, pair_to_row.
    """
    weights, between, experts = call.experts, _between(kernels), int(call.experts.count)
    topk_ids, expert_map = call.topk_ids, call.expert_map
    if call.capacity is not None:
        ids = drop_overflow(local_ids(topk_ids, expert_map, experts), experts, call.capacity)
        topk_ids, expert_map = ids.masked_fill(ids == experts, -1).view(topk_ids.shape), None
    routed: Routed = between.sort_pairs(topk_ids, experts, expert_map, counted_for=weights.down.data)
    weighing = call.topk_weights if call.weight_on_input else None
    x = stage("gather_rows", call.hidden_states.data, *routed[1:], weighing)
    first = [weights.gate_up.data] if weights.up is None else [weights.gate_up.data, weights.up.data]
    bias = weights.gate_up_bias
    biases = [bias] if bias is None or len(first) == 1 else bias.chunk(2, dim=1)
    halves = [
        stage("grouped_mm", x, weight, routed.offsets, [], own) for weight, own in zip(first, biases * 2, strict=False)
    ]
    del x
    up = halves[1] if len(halves) > 1 else None
    value = between.glu_rows(halves[0], up, weights.glu, routed.offsets)
    y = stage("grouped_mm", value, weights.down.data, routed.offsets, [], weights.down_bias)
    del value
    out = stage("moe_unpermute", y, routed.pair_to_row, _scales(call.topk_weights, call.weight_on_input))
    return out, halves[0], out.new_empty(0) if up is None else up, *routed


def _scales(topk_weights: Tensor, weight_on_input: bool) -> Tensor:
    """What results are multiplied by."""
    return torch.ones_like(topk_weights, dtype=torch.float32) if weight_on_input else topk_weights


def fused_experts_backward(call: BackwardCall, stage: Stage, kernels: ModuleType) -> tuple[Tensor, ...]:
    """Gradients of what stood before the activation, and of :data:`meta.dims.GRADIENTS`, numel 0 where not needed.

    Args:
        stage: stages choose their own backends: a request binds the operator that it was made for.
        kernels: the backend that may have more than plain code for what is between products.
    """
    needs, weights, on_input = call.needs, call.experts, call.weight_on_input
    places = (call.row_to_pair, call.pair_to_row)
    wide = accumulation_dtype(call.grad_output.dtype)
    grads: dict[str, Tensor] = {}
    grad_y = stage("gather_rows", call.grad_output, *places)
    grad_a = stage("grouped_mm", grad_y, weights.down.data.transpose(1, 2), call.offsets)
    if not (needs["down_proj"] or weights.down_bias is not None):
        del grad_y
    of_gate, of_up, value, dots = _between(kernels).glu_rows_backward(
        grad_a, call.gate_up, None if weights.up is None else call.up, None if on_input else call.topk_weights,
        call.row_to_pair, weights.glu, call.offsets, value=needs["down_proj"],
    )  # fmt: skip
    del grad_a
    if needs["topk_weights"]:
        if weights.down_bias is not None:
            bias = weights.down_bias.unsqueeze(1)
            dots = dots + stage("grouped_mm", grad_y, bias, call.offsets, out_dtype=wide).squeeze(1)
        grads["topk_weights"] = pair_sums(dots, call.pair_to_row)
    if needs["down_proj"]:
        grads["down_proj"] = stage("grouped_wgrad", grad_y, value, call.offsets)
    del value
    if needs["down_bias"]:
        weighed = grad_y if on_input else stage("gather_rows", call.grad_output, *places, call.topk_weights)
        grads["down_bias"] = expert_sums(weighed, call.offsets, stage)
    none = call.grad_output.new_empty(0, dtype=torch.float32)
    return (
        of_gate,
        call.gate_up.new_empty(0) if of_up is None else of_up,
        *(
            grads[name].to(dtype).contiguous() if needs[name] else none
            for name, (_, dtype) in zip(GRADIENTS, call.outputs[2:], strict=True)
        ),
    )


def through_the_first_product(
    saved: dict[str, Any], parts: Sequence[Tensor], needs: dict[str, bool], weight_on_input: bool, stage: Stage
) -> dict[str, Tensor]:
    """Gradients of hidden_states, gate_up_proj, up_proj, gate_up_bias, and of topk_weights with ``weight_on_input``,
    those that are needed.

    Args:
        saved: inputs of ``fused_experts`` by name, and where the pairs are.
        parts: gradients of what stood before the activation, of the halves one each where these are apart.
    """
    hidden_states, topk_weights, offsets = saved["hidden_states"], saved["topk_weights"], saved["offsets"]
    places = (saved["row_to_pair"], saved["pair_to_row"])
    wide, first = accumulation_dtype(hidden_states.dtype), {"gate_up_proj": saved["gate_up_proj"]}
    if saved["up_proj"] is not None:
        first["up_proj"] = saved["up_proj"]
    grads: dict[str, Tensor] = {}
    if needs["gate_up_bias"]:
        sums = [expert_sums(part, offsets, stage) for part in parts]
        whole = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        grads["gate_up_bias"] = whole.to(saved["gate_up_bias"].dtype)
    if needs["gate_up_proj"] or needs["up_proj"]:  # first, while there are no rows but these
        x = stage("gather_rows", hidden_states, *places, topk_weights if weight_on_input else None)
        for (name, weight), part in zip(first.items(), parts, strict=True):
            if needs[name]:
                grads[name] = stage("grouped_wgrad", part, x, offsets).to(weight.dtype)
        del x
    if needs["hidden_states"] or (needs["topk_weights"] and weight_on_input):

        def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
            result: Tensor = stage("grouped_mm", x, weight, offsets, [], bias, out_dtype=dtype)
            return result

        grad_x = through_first(product, parts, list(first.values()), wide).to(hidden_states.dtype)
        if needs["topk_weights"] and weight_on_input:
            rows = stage("gather_rows", hidden_states, *places)
            dots = (grad_x.to(wide) * rows.to(wide)).sum(dim=-1)
            grads["topk_weights"] = pair_sums(dots, places[1]).to(topk_weights.dtype)
        if needs["hidden_states"]:
            scales = _scales(topk_weights, not weight_on_input)
            grads["hidden_states"] = stage("moe_unpermute", grad_x, places[1], scales)
    return grads


def gate_and_up(
    product: Callable[..., Tensor], weights: Sequence[Tensor], bias: Tensor | None, layout: str
) -> tuple[Tensor, Tensor | None]:
    """What stands before the activation; `product(weight, bias)`, of one stacked weight, or of the halves' two."""
    if len(weights) == 1:
        return split_glu(product(weights[0], bias), layout)
    halves = (None, None) if bias is None else bias.chunk(2, dim=1)
    gate, up = (product(weight, half) for weight, half in zip(weights, halves, strict=True))
    return gate, up


def through_first(
    product: Callable[..., Tensor], parts: Sequence[Tensor], weights: Sequence[Tensor], wide: torch.dtype
) -> Tensor:
    """Gradient of the rows before the first projection; `product(rows, weight, None, dtype)`, whose gradients are
    `parts`. The sum of two halves is in `wide`, so that it is rounded once.
    """
    dtype = None if len(weights) == 1 else wide
    terms = [product(part, weight.transpose(1, 2), None, dtype) for part, weight in zip(parts, weights, strict=True)]
    return sum(terms[1:], terms[0])


def expert_sums(grad_rows: Tensor, offsets: Tensor, stage: Stage) -> Tensor:
    """Sum of every expert's rows, ``[E, N]``, in a fixed order; a NaN is in the sum of its own expert alone."""
    wide = accumulation_dtype(grad_rows.dtype)
    ones = grad_rows.new_ones((grad_rows.shape[0], 1), dtype=wide)
    sums: Tensor = stage("grouped_wgrad", grad_rows.to(wide), ones, offsets)
    return sums.squeeze(2)


def pair_sums(values_R: Tensor, pair_to_row: Tensor) -> Tensor:
    """Value of every pair's row, ``[T, K]``; 0 for dropped pairs."""
    picked = values_R.index_select(0, pair_to_row.reshape(-1).clamp(min=0)) if values_R.numel() else values_R
    return torch.where(pair_to_row < 0, 0.0, picked.view(pair_to_row.shape))
