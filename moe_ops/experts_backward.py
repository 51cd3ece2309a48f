"""``fused_experts`` in training, and the steps of its gradient: products by the stage operators, and what is between
them by the backend's kernels or in plain tensor code. No synchronisation on a GPU.

With rows ``x``, ``h = x W1 + b1``, ``a = act(h)``, ``y = a W2 + b2``, out = sum of ``w y``, the forward keeps ``h`` and
where the pairs are. Then ``u = dout W2`` gives ``dw = <u, a> + <dout, b2>`` without a second forward GEMM (SonicMoE,
arXiv 2512.14080), ``dh = act'(h) (w u)``, ``dx = dh W1^T``, ``dW1 = dh^T x``, ``dW2 = dout^T (w a)``. With
``weight_on_input`` the weight multiplies ``x``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meta.activations import split_glu
from meta.calls import BackwardCall, Call, ExpertsCall, FirstBackwardCall, SortCall
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
        The output, gate_up, up, offsets, row_to_pair, pair_to_row; numel 0 where there is none or it is not to be kept.
    """
    weights, between = call.experts, _between(kernels)
    ids = (call.topk_ids, call.expert_map, int(weights.count), call.capacity)
    routed = _sorted(between, *ids, counted_for=weights.down.data)
    # Some backends compute the activation in the product before it.
    activate, keep = getattr(kernels, "activated_rows", None), call.recompute is None
    if activate is not None:
        value, *halves = activate(call, routed, keep=keep)
    else:
        first = [weights.gate_up.data] if weights.up is None else [weights.gate_up.data, weights.up.data]
        weighing = call.topk_weights if call.weight_on_input else None
        halves = first_product(stage, call.hidden_states.data, first, weights.gate_up_bias, routed, weighing)
        value = plain.glu_rows(halves[0], halves[1] if len(halves) > 1 else None, weights.glu, routed.offsets)
        halves = halves if keep else []
    kept = [*halves, *(value.new_empty(0) for _ in range(2 - len(halves)))]
    del halves
    y = stage("grouped_mm", value, weights.down.data, routed.offsets, [], weights.down_bias)
    del value
    scales = torch.ones_like(call.topk_weights, dtype=torch.float32) if call.weight_on_input else call.topk_weights
    out = stage("moe_unpermute", y, routed.pair_to_row, scales)
    places = routed if call.recompute != "all" else [part.new_empty(0) for part in routed]
    return out, *kept, *places


def sort_pairs(call: SortCall, stage: Stage, kernels: ModuleType) -> Routed:
    """Where the pairs of a layer are in sorted rows, as :func:`fused_experts_saving` finds them; nothing is counted."""
    ids = (call.topk_ids, call.expert_map, call.num_experts, call.capacity)
    return _sorted(_between(kernels), *ids, counted_for=None)


def _sorted(
    between: Any,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    experts: int,
    capacity: Any,
    *,
    counted_for: Tensor | None,
) -> Routed:
    if capacity is not None:
        ids = drop_overflow(local_ids(topk_ids, expert_map, experts), experts, capacity)
        topk_ids, expert_map = ids.masked_fill(ids == experts, -1).view(topk_ids.shape), None
    routed: Routed = between.sort_pairs(topk_ids, experts, expert_map, counted_for=counted_for)
    return routed


def first_product(
    stage: Stage,
    hidden_states: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    routed: Routed,
    topk_weights: Tensor | None,
) -> list[Tensor]:
    """What stands before the activation, ``[R, N]`` of each weight, of rows times ``topk_weights`` if given."""
    biases = [bias] if bias is None or len(weights) == 1 else bias.chunk(2, dim=1)
    return [
        stage("gathered_mm", hidden_states, weight, *routed, topk_weights, own)
        for weight, own in zip(weights, biases * 2, strict=False)
    ]


def fused_experts_backward(call: BackwardCall, stage: Stage, kernels: ModuleType) -> tuple[Tensor, ...]:
    """Gradients of gate_up and up, the weighted result of the activation, the gradient of topk_weights; numel 0 where
    not needed. What was computed again gives its memory to its gradient.

    Args:
        stage: stages choose their own backends: a request binds the operator that it was made for.
        kernels: the backend that may have more than plain code for what is between products.
    """
    places = (call.row_to_pair, call.pair_to_row)
    weights = None if call.weight_on_input else call.topk_weights
    dots = None
    if weights is not None and call.down_bias is not None:
        wide = accumulation_dtype(call.grad_output.dtype)
        bias = call.down_bias.unsqueeze(1).to(call.grad_output.dtype)
        dots = stage("gathered_mm", call.grad_output, bias, call.offsets, *places, out_dtype=wide).squeeze(1)
    grad = stage("gathered_mm", call.grad_output, call.down.transpose(1, 2), call.offsets, *places)
    gate_up, up, again = call.gate_up, call.up, call.hidden_states
    if again is not None:
        routed, weighing = Routed(call.offsets, *places), call.topk_weights if call.weight_on_input else None
        halves = first_product(stage, again, call.first, call.first_bias, routed, weighing)
        gate_up, up = (*halves, None)[:2]
    results = _between(kernels).glu_rows_backward(
        grad, gate_up, up, weights, places, call.glu, call.offsets,
        value=call.value, dots=dots, in_place=again is not None,
    )  # fmt: skip
    return _filled(call, results)


def _filled(call: Call, results: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Results of an operator, numel 0 for those that there are not."""
    return tuple(
        torch.empty(0, dtype=dtype, device=call.device) if result is None else result
        for result, (_, dtype) in zip(results, call.outputs, strict=True)
    )


def fused_experts_backward_first(call: FirstBackwardCall, stage: Stage, kernels: ModuleType) -> tuple[Tensor, ...]:
    """Gradients by the names of :data:`meta.dims.GRADIENTS`, and ``grad_output`` in sorted rows; numel 0 where not
    needed.
    """
    needs, offsets, dtype = call.needs, call.offsets, call.hidden_states.dtype
    places = (call.row_to_pair, call.pair_to_row)
    found: dict[str, Tensor | None] = {}
    if needs["gate_up_bias"]:
        sums = [stage("expert_sums", grad, offsets) for grad in call.grads]
        found["gate_up_bias"] = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
    names = [name for name in ("gate_up_proj", "up_proj") if needs[name]]
    between, weights = _between(kernels), call.topk_weights if call.weight_on_input else None
    # The products of the weights' gradients take the tokens themselves, or copies of them in sorted rows.
    columns = call.grads[0].shape[1] * len(call.grads) // 2  # I, of gated experts
    sizes = (call.row_to_pair.shape[0], offsets.shape[0], columns)
    gathered = weights is None and (call.sparing or between.gathers(call.hidden_states, *sizes))
    copied, rows = bool(names) and not gathered, None
    if needs["hidden_states"] or needs["topk_weights"]:

        def product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
            result: Tensor = stage("grouped_mm", x, weight, offsets, [], bias, out_dtype=out_dtype)
            return result

        of_rows = through_first(product, call.grads, call.weights, accumulation_dtype(dtype)).to(dtype)
        found["hidden_states"], rows, found["grad_output"], found["topk_weights"] = between.collect(
            of_rows, call.pair_to_row, call.row_to_pair, call.hidden_states, weights, call.grad_output, rows=copied
        )
        del of_rows
    else:
        rows = between.gather_rows(call.hidden_states, *places, weights) if copied else None
        if call.grad_output is not None:
            found["grad_output"] = between.gather_rows(call.grad_output, *places)
    for name, grad in zip(("gate_up_proj", "up_proj"), call.grads, strict=False):
        if needs[name] and gathered:
            found[name] = stage("grouped_wgrad", grad, call.hidden_states, offsets, *places, tokens="rows")
        elif needs[name]:
            found[name] = stage("grouped_wgrad", grad, rows, offsets)
    asked = needs | {"grad_output": call.grad_output is not None}
    return _filled(call, (found.get(name) if asked[name] else None for name in (*GRADIENTS, "grad_output")))


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
