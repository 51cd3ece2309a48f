"""Backward formulas of the stage operators, traceable: plain tensor code and calls of our own operators.

A row that holds no pair (past the last expert's, or past an expert's count) has a gradient of exactly zero, whatever
its memory held; so has a pair that was dropped. Nothing here synchronises, and no order of summation depends on time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, join_glu, resolve_activation, split_glu
from moe_ops.experts_backward import expert_sums

Context = Any
Gradients = dict[str, Tensor | None]


def _op(name: str, *args: Any, **options: Any) -> Any:
    return getattr(torch.ops.moe_ops, name).default(*args, **options)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def dispatch(op: str, saved: dict[str, Tensor], needs: dict[str, bool], grad_rows: Tensor) -> Gradients:
    """Of ``moe_permute`` and ``batched_dispatch``: a token's gradient is the sum of its rows'."""
    places = saved["places"]
    ones = torch.ones_like(places, dtype=torch.float32)
    collect = "moe_unpermute" if op == "moe_permute" else "batched_combine"
    return {"hidden_states": _op(collect, grad_rows, places, ones)}


def combine(op: str, saved: dict[str, Tensor], needs: dict[str, bool], grad: Tensor) -> Gradients:
    """Of ``moe_unpermute`` and ``batched_combine``."""
    rows_name, places_name = ("rows", "pair_to_row") if op == "moe_unpermute" else ("batch", "slots")
    rows, places, weights = saved[rows_name], saved[places_name], saved["topk_weights"]
    flat, wide = rows.flatten(0, -2), _wide(rows.dtype)
    count, top_k = flat.shape[0], places.shape[1]
    dropped = (places < 0) | (places >= count)
    found: Gradients = {}
    if needs.get(rows_name):
        of_pairs = (grad.to(wide).unsqueeze(1) * weights.to(wide).unsqueeze(2)).to(rows.dtype)
        # Pairs may share a row; a dropped pair's goes to one that is cut off.
        index = places.masked_fill(dropped, count).reshape(-1).long()
        summed = flat.new_zeros((count + 1, flat.shape[1]))
        summed = summed.index_put((index,), of_pairs.flatten(0, 1), accumulate=True)
        found[rows_name] = summed[:count].view(rows.shape)
    if needs.get("topk_weights"):
        if count == 0:
            found["topk_weights"] = torch.zeros_like(weights)
        else:
            picked = flat.index_select(0, places.masked_fill(dropped, 0).reshape(-1).long()).to(wide)
            dots = (picked.view(-1, top_k, flat.shape[1]) * grad.to(wide).unsqueeze(1)).sum(dim=-1)
            found["topk_weights"] = torch.where(dropped, 0.0, dots).to(weights.dtype)
    if needs.get("added"):
        found["added"] = grad.to(saved["added"].dtype)
    return found


class _Rows:
    """Sorted rows of either format: a batch is its experts' blocks, zero where a block is not in use."""

    def __init__(self, op: str, x: Tensor, extents: Tensor) -> None:
        self._batched = op.startswith("batched")
        self._extents = extents
        if self._batched:
            places = torch.arange(x.shape[1], device=x.device)
            self._used = (places < extents.unsqueeze(1)).unsqueeze(2)
            ends = torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1]
            self.offsets = ends.to(torch.int32)
        else:
            last = extents[-1:] if extents.shape[0] else extents.new_zeros(1)
            self._used = (torch.arange(x.shape[0], device=x.device) < last).unsqueeze(1)
            self.offsets = extents

    def clean(self, values: Tensor) -> Tensor:
        """``values`` with zeros in rows that hold no pair."""
        return torch.where(self._used, values, 0)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``x @ weight[e].T + bias[e]``."""
        name = "batched_mm" if self._batched else "grouped_mm"
        found: Tensor = _op(name, x, weight, self._extents, [], bias, out_dtype=dtype)
        return found

    def wgrad(self, grad: Tensor, x: Tensor) -> Tensor:
        """``[E, N, K]``."""
        if self._batched:
            grad, x = self.clean(grad).flatten(0, 1), self.clean(x).flatten(0, 1)
        found: Tensor = _op("grouped_wgrad", grad.contiguous(), x, self.offsets)
        return found

    def sums(self, grad: Tensor) -> Tensor:
        """Sum of every expert's rows, ``[E, N]``."""
        return expert_sums(self.clean(grad).flatten(0, -2), self.offsets, _op)


def gemm(op: str, saved: dict[str, Tensor], needs: dict[str, bool], grad: Tensor, **options: Any) -> Gradients:
    """Of the four GEMM operators; one with an activation computes what stood before it again."""
    x_name, extents_name = ("batch", "expert_num_tokens") if op.startswith("batched") else ("rows", "offsets")
    x, weight, up, bias = saved[x_name], saved["weight"], saved.get("up_weight"), saved.get("bias")
    rows, wide = _Rows(op, x, saved[extents_name]), _wide(x.dtype)
    weights = {"weight": weight} if up is None else {"weight": weight, "up_weight": up}
    parts = [grad.to(x.dtype)]
    if "activation" in options:
        row, alpha, limit = resolve_activation(op, options["activation"], options["alpha"], options["limit"])
        layout = options["glu_layout"] if up is None else "separate"
        if up is None:
            gate, other = split_glu(rows.product(x, weight, bias, wide), layout)
        else:
            biases = (None, None) if bias is None else bias.chunk(2, dim=1)
            gate, other = (rows.product(x, half, b, wide) for half, b in zip((weight, up), biases, strict=True))
        halves = ACTIVATIONS[row.name].backward(grad.to(wide), gate, other, alpha, limit)
        joined = join_glu(*halves, "concat" if up is not None else layout).to(x.dtype)
        parts = [joined] if up is None else list(joined.chunk(2, dim=-1))
    found: Gradients = {}
    if needs.get(x_name):
        terms = zip(parts, weights.values(), strict=True)
        # The sum of two halves is rounded once.
        dtype = x.dtype if up is None else wide
        products = [rows.product(part, w.transpose(1, 2), None, dtype) for part, w in terms]
        found[x_name] = rows.clean(sum(products[1:], products[0]).to(x.dtype))
    for name, part in zip(weights, parts, strict=True):
        if needs.get(name):
            found[name] = rows.wgrad(part, x).to(weight.dtype)
    if bias is not None and needs.get("bias"):
        found["bias"] = torch.cat([rows.sums(part) for part in parts], dim=1).to(bias.dtype)
    return found


#: Formula, what it reads of the arguments and of the results, and the options it takes, by operator.
_SAVED = {
    dispatch: ((), ("places",)),
    combine: (("rows", "batch", "pair_to_row", "slots", "topk_weights", "added"), ()),
    gemm: (("rows", "batch", "weight", "offsets", "expert_num_tokens", "up_weight", "bias"), ()),
}
FORMULAS: dict[str, Callable[..., Gradients]] = {
    **dict.fromkeys(("moe_permute", "batched_dispatch"), dispatch),
    **dict.fromkeys(("moe_unpermute", "batched_combine"), combine),
    **dict.fromkeys(("grouped_mm", "grouped_mm_glu", "batched_mm", "batched_mm_glu"), gemm),
}
_GLU = ("activation", "alpha", "limit", "glu_layout")


class StageFormula:
    """The formula of one stage operator; its inputs are read by the names of its schema."""

    def __init__(self, op: str, names: tuple[str, ...]) -> None:
        self._op, self._names, self._formula = op, names, FORMULAS[op]

    def setup_context(
        self, ctx: Context, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any] | None = None, output: Any = ()
    ) -> None:
        """Save what the formula reads."""
        options = keyword_only_inputs or {}
        given = dict(zip(self._names, inputs, strict=False))
        quantised = given.get("weight_scales") or any(given.get(f"{x}_scale") is not None for x in ("rows", "batch"))
        if quantised or options.get("quantize_output"):
            raise ValueError(
                f"{self._op}: inputs must not require grad for quantised operands, got one that does. "
                "Call it under torch.no_grad(), or train with unquantised weights."
            )
        arguments, results = _SAVED[self._formula]
        tensors = {name: given[name] for name in arguments if given.get(name) is not None}
        tensors |= {"places": output[2]} if results else {}
        ctx.saved = tuple(tensors)
        ctx.save_for_backward(*tensors.values())
        ctx.options = {name: options[name] for name in _GLU if name in options}

    def backward(self, ctx: Context, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the inputs, in their order."""
        saved = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        # torch leaves out trailing inputs that equal their default; of a list there is a list.
        given = dict(zip(self._names, ctx.needs_input_grad, strict=False))
        needs = {name: need is True for name, need in given.items()}
        found = self._formula(self._op, saved, needs, grads[0], **ctx.options)
        return tuple([None] * len(need) if isinstance(need, list) else found.get(name) for name, need in given.items())
