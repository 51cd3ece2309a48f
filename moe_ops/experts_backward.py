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
    x = between.gather_rows(call.hidden_states.data, routed, call.topk_weights if call.weight_on_input else None)
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


class _Backward:
    """One call of the gradient.

    Args:
        stage: stages choose their own backends: a request binds the operator that it was made for, and not every
            backend has stages.
        kernels: the backend that may have more than plain code for what is between products.
    """

    def __init__(self, call: BackwardCall, stage: Stage, kernels: ModuleType) -> None:
        self.call, self.stage, self.between = call, stage, _between(kernels)
        weights = call.experts
        self.wide = accumulation_dtype(call.hidden_states.data.dtype)
        self.first = [weights.gate_up.data] if weights.up is None else [weights.gate_up.data, weights.up.data]
        self.routed = Routed(call.offsets, call.row_to_pair, call.pair_to_row)

    def _rows(self, tokens: Tensor, *, weighted: bool = False) -> Tensor:
        rows: Tensor = self.between.gather_rows(tokens, self.routed, self.call.topk_weights if weighted else None)
        return rows

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        result: Tensor = self.stage("grouped_mm", x, weight, self.routed.offsets, [], bias, out_dtype=dtype)
        return result

    def _wgrad(self, grad: Tensor, x: Tensor) -> Tensor:
        result: Tensor = self.stage("grouped_wgrad", grad, x, self.routed.offsets)
        return result

    def gradients(self) -> dict[str, Tensor]:
        """Of what is asked for, by name. Rows are let go of as soon as they are done with."""
        call, needs, routed = self.call, self.call.needs, self.routed
        hidden_states, weights, on_input = call.hidden_states.data, call.experts, call.weight_on_input
        grads: dict[str, Tensor] = {}
        grad_y = self._rows(call.grad_output)
        grad_a = self._product(grad_y, weights.down.data.transpose(1, 2), None)
        of_gate, of_up, value, dots = self.between.glu_rows_backward(
            grad_a, call.gate_up, None if weights.up is None else call.up, None if on_input else call.topk_weights,
            routed.row_to_pair, weights.glu, routed.offsets, value=needs["down_proj"],
        )  # fmt: skip
        parts = [of_gate] if of_up is None else [of_gate, of_up]
        del grad_a
        if weights.down_bias is not None and needs["topk_weights"] and not on_input:
            dots = dots + self._product(grad_y, weights.down_bias.unsqueeze(1), None, self.wide).squeeze(1)
        if needs["down_proj"]:
            grads["down_proj"] = self._wgrad(grad_y, value)
        del value
        if needs["down_bias"]:
            of_bias = grad_y if on_input else self._rows(call.grad_output, weighted=True)
            grads["down_bias"] = expert_sums(of_bias, routed.offsets, self.stage)
            del of_bias
        del grad_y
        if needs["hidden_states"] or (needs["topk_weights"] and on_input):
            grad_x = through_first(self._product, parts, self.first, self.wide).to(hidden_states.dtype)
            if on_input:
                dots = (grad_x.to(self.wide) * self._rows(hidden_states).to(self.wide)).sum(dim=-1)
            scales = _scales(call.topk_weights, not on_input)
            grads["hidden_states"] = self.stage("moe_unpermute", grad_x, routed.pair_to_row, scales)
            del grad_x
        if needs["topk_weights"]:
            grads["topk_weights"] = _pair_sums(dots, routed.pair_to_row)
        if needs["gate_up_bias"]:
            sums = [expert_sums(part, routed.offsets, self.stage) for part in parts]
            grads["gate_up_bias"] = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        if needs["gate_up_proj"] or needs["up_proj"]:
            x = self._rows(hidden_states, weighted=on_input)
            for name, part in zip(("gate_up_proj", "up_proj"), parts, strict=False):
                if needs[name]:
                    grads[name] = self._wgrad(part, x)
        return grads


def fused_experts_backward(call: BackwardCall, stage: Stage, kernels: ModuleType) -> tuple[Tensor, ...]:
    """Gradients of :data:`meta.dims.GRADIENTS`, each of its primal's shape and dtype, numel 0 where not needed."""
    grads = _Backward(call, stage, kernels).gradients()
    return tuple(
        grads[name].to(dtype).contiguous() if call.needs[name] else call.grad_output.new_empty(0, dtype=torch.float32)
        for name, (_, dtype) in zip(GRADIENTS, call.outputs, strict=True)
    )


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


def _pair_sums(values_R: Tensor, pair_to_row: Tensor) -> Tensor:
    """Value of every pair's row, ``[T, K]``; 0 for dropped pairs."""
    picked = values_R.index_select(0, pair_to_row.reshape(-1).clamp(min=0)) if values_R.numel() else values_R
    return torch.where(pair_to_row < 0, 0.0, picked.view(pair_to_row.shape))
