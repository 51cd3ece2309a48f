"""Backward formulas of the stage operators, traceable: plain tensor code and calls of our own operators.

A row that holds no pair (past the last expert's, or past an expert's count) has a gradient of exactly zero, whatever
its memory held; so has a pair that was dropped. Nothing here synchronises, and no order of summation depends on time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta.activations import join_glu, resolve_activation
from meta.dims import accumulation_dtype, is_known
from moe_ops.experts_backward import gate_and_up, through_first
from moe_ops.pairs import used_rows
from moe_ops.runtime import refuse_second_derivatives

Gradients = dict[str, Tensor | None]


def run_op(name: str, *args: Any, **options: Any) -> Any:
    """An operator through torch's dispatcher."""
    return getattr(torch.ops.moe_ops, name).default(*args, **options)


def dispatch(op: str, saved: dict[str, Tensor], needs: dict[str, bool], grad_rows: Tensor) -> Gradients:
    """Of ``moe_permute`` and ``batched_dispatch``: a token's gradient is the sum of its rows'."""
    places = saved["places"]
    ones = torch.ones_like(places, dtype=torch.float32)
    collect = "moe_unpermute" if op == "moe_permute" else "batched_combine"
    return {"hidden_states": run_op(collect, grad_rows, places, ones)}


def combine(op: str, saved: dict[str, Tensor], needs: dict[str, bool], grad: Tensor) -> Gradients:
    """Of ``moe_unpermute`` and ``batched_combine``."""
    rows_name, places_name = ("rows", "pair_to_row") if op == "moe_unpermute" else ("batch", "slots")
    rows, places, weights = saved[rows_name], saved[places_name], saved["topk_weights"]
    flat, wide = rows.flatten(0, -2), accumulation_dtype(rows.dtype)
    count = flat.shape[0]
    dropped = (places < 0) | (places >= count)
    found: Gradients = {}
    if needs.get(rows_name):
        of_pairs = (grad.to(wide).unsqueeze(1) * weights.to(wide).unsqueeze(2)).to(rows.dtype)
        # Pairs may share a row; a dropped pair's goes to one that is cut off.
        index = places.masked_fill(dropped, count).reshape(-1).long()
        summed = flat.new_zeros((count + 1, flat.shape[1]))
        summed = summed.index_put((index,), _in_one(of_pairs), accumulate=True)
        found[rows_name] = summed[:count].view(rows.shape)
    if needs.get("topk_weights"):
        # Where there may be no rows, one is read for dropped pairs, of which then all are.
        some = flat if is_known(count > 0) else torch.cat((flat, flat.new_zeros(1, flat.shape[1])))
        picked = some.index_select(0, places.masked_fill(dropped, 0).reshape(-1).long()).to(wide)
        dots = (picked.view(*places.shape, flat.shape[1]) * grad.to(wide).unsqueeze(1)).sum(dim=-1)
        found["topk_weights"] = torch.where(dropped, 0.0, dots).to(weights.dtype)
    if needs.get("added"):
        found["added"] = grad.to(saved["added"].dtype)
    return found


def _in_one(rows: Tensor) -> Tensor:
    """``[E, C, N]`` as ``[E * C, N]``, by `reshape`: batches of gradients (``is_grads_batched``) know no `flatten`."""
    return rows if rows.dim() == 2 else rows.reshape(rows.shape[0] * rows.shape[1], rows.shape[2])


class _Rows:
    """Sorted rows of either format: a batch is its experts' blocks, zero where a block is not in use."""

    def __init__(self, op: str, x: Tensor, extents: Tensor) -> None:
        self._op, self._batched = op, op.startswith("batched")
        self._extents = extents
        self._used = used_rows(x, extents)
        self.offsets = extents
        if self._batched:
            ends = torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1]
            self.offsets = ends.to(torch.int32)

    def clean(self, values: Tensor) -> Tensor:
        """``values`` with zeros in rows that hold no pair."""
        return torch.where(self._used, values, 0)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """``x @ weight[e].T + bias[e]``."""
        name = "batched_mm" if self._batched else "grouped_mm"
        found: Tensor = run_op(name, x, weight, self._extents, [], bias, out_dtype=dtype)
        return found

    def wgrad(self, grad: Tensor, x: Tensor) -> Tensor:
        """``[E, N, K]``."""
        self._refuse_to_differentiate(grad, x)
        if self._batched:
            grad, x = _in_one(self.clean(grad)), _in_one(self.clean(x))
        found: Tensor = run_op("grouped_wgrad", grad.contiguous(), x, self.offsets)
        return found

    def sums(self, grad: Tensor) -> Tensor:
        """Sum of every expert's rows, ``[E, N]``."""
        self._refuse_to_differentiate(grad)
        found: Tensor = run_op("expert_sums", _in_one(self.clean(grad)), self.offsets)
        return found

    def _refuse_to_differentiate(self, *tensors: Tensor) -> None:
        """Under the name of what was called, not of what makes its gradient."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            refuse_second_derivatives(self._op)


def gemm(op: str, saved: dict[str, Tensor], needs: dict[str, bool], grad: Tensor, **options: Any) -> Gradients:
    """Of the four GEMM operators; one with an activation computes what stood before it again."""
    x_name, extents_name = ("batch", "expert_num_tokens") if op.startswith("batched") else ("rows", "offsets")
    x, weight, up, bias = saved[x_name], saved["weight"], saved.get("up_weight"), saved.get("bias")
    rows, wide = _Rows(op, x, saved[extents_name]), accumulation_dtype(x.dtype)
    weights = {"weight": weight} if up is None else {"weight": weight, "up_weight": up}
    first, grad_h = list(weights.values()), grad.to(x.dtype)
    if "activation" in options:
        row, alpha, limit = resolve_activation(op, options["activation"], options["alpha"], options["limit"])
        layout = options["glu_layout"] if up is None else "separate"
        gate, other = gate_and_up(lambda w, b: rows.product(x, w, b, wide), first, bias, layout)
        grad_h = join_glu(*row.backward(grad.to(wide), gate, other, alpha, limit), layout).to(x.dtype)
    parts = grad_h.chunk(len(first), dim=-1)
    found: Gradients = {}
    if needs.get(x_name):
        found[x_name] = rows.clean(through_first(rows.product, parts, first, wide).to(x.dtype))
    for name, part in zip(weights, parts, strict=True):
        if needs.get(name):
            found[name] = rows.wgrad(part, x).to(weight.dtype)
    if bias is not None and needs.get("bias"):
        found["bias"] = rows.sums(grad_h).to(bias.dtype)
    return found


#: What a formula reads of the arguments, and of the results by their places.
SAVED: dict[Callable[..., Gradients], tuple[tuple[str, ...], dict[str, int]]] = {
    dispatch: ((), {"places": 2}),
    combine: (("rows", "batch", "pair_to_row", "slots", "topk_weights", "added"), {}),
    gemm: (("rows", "batch", "weight", "offsets", "expert_num_tokens", "up_weight", "bias"), {}),
}
FORMULAS: dict[str, Callable[..., Gradients]] = {
    **dict.fromkeys(("moe_permute", "batched_dispatch"), dispatch),
    **dict.fromkeys(("moe_unpermute", "batched_combine"), combine),
    **dict.fromkeys(("grouped_mm", "grouped_mm_glu", "batched_mm", "batched_mm_glu"), gemm),
}
#: Keyword arguments that they take.
OPTIONS = ("activation", "alpha", "limit", "glu_layout")
