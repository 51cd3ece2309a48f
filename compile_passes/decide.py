"""Whether the operators and a backend accept a match, asked with the graph's fake tensors before any change."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from compile_passes.compat import fake_mode_of
from compile_passes.match import MoEMatch, Product, Refusal, Router, Weight
from compile_passes.quantised import Containers, list_arguments, nominal_dtype, read_containers
from compile_passes.vocabulary import example
from meta.dims import LayerProblem
from moe_ops import choice
from moe_ops.integrations.containers import Part
from moe_ops.ops import parse


@dataclass(frozen=True)
class Decision:
    """A match that will be fused.

    Attributes:
        match: the block; its router is a Refusal when `fused_topk` cannot express it.
        problem: its sizes and types.
        backend: name of the backend that accepted it.
    """

    match: MoEMatch
    problem: LayerProblem
    backend: str


def decide(match: MoEMatch) -> Decision | Refusal:
    """Check the block's shapes and types by the operators' own rules, and choose its backend.

    Low-rank factors that the operators refuse stay merged with their weight.
    """
    decision = _decide(match)
    if isinstance(decision, Refusal) and match.whole is not None:
        return decide(replace(match.whole, merged=decision))
    return decision


def _decide(match: MoEMatch) -> Decision | Refusal:
    tensors = [example(match.dispatch.hidden), *(_weight(product.weight) for product in match.products)]
    if any(tensor is None for tensor in tensors):
        return Refusal(
            match.down.anchor, "The graph does not record the shapes in this block.", "Compile with torch.compile."
        )
    hidden, *weights = cast(list[torch.Tensor], tensors)
    found = read_containers(match)
    if isinstance(found, Refusal):
        return found
    try:
        with fake_mode_of(hidden) or nullcontext(), torch.no_grad():
            return _describe(match, hidden, weights, found)
    except ValueError as error:
        return Refusal(
            match.down.anchor,
            f"The operators refuse this block: {error}",
            "It is fused once the model has what this asks for; until then it runs as it is written.",
        )


def _describe(
    match: MoEMatch, hidden: torch.Tensor, weights: list[torch.Tensor], found: Containers
) -> Decision:  # fmt: skip
    dtype, stored = nominal_dtype(match), dict[str, Any]()
    if found:
        weights = [_inner(product, found[product.weight.node].data) for product in match.products]
        stored = list_arguments(match, found, _inner)
    elif match.dtype is not None:
        weights = [weight.to(match.dtype) for weight in weights]
    gate_up, *halves, down = weights
    up, layout, body = halves[0] if halves else None, match.body.glu_layout, match.body
    bias, down_bias = _bias(match), _flat(match.down.bias)
    if match.dtype is not None:
        bias, down_bias = (None if one is None else one.to(match.dtype) for one in (bias, down_bias))
    parts = body.halves(gate_up.shape[1])
    if parts is not None:
        up, gate_up, layout = gate_up[:, parts[1]], gate_up[:, parts[0]], "separate"
    tokens = hidden.new_empty((math.prod(hidden.shape[:-1]), hidden.shape[-1]), dtype=dtype if found else gate_up.dtype)
    ids = tokens.new_empty((tokens.shape[0], match.dispatch.top_k), dtype=torch.int32)
    call = parse(
        "fused_experts", tokens, gate_up, down, ids.float(), ids, up_proj=up, gate_up_bias=bias,
        down_bias=down_bias, activation=body.activation, alpha=body.alpha, limit=body.limit, glu_layout=layout,
        weight_on_input=match.dispatch.weights is not None, **stored,
    )  # fmt: skip
    problem = cast(LayerProblem, call.problem)
    for product, weight in zip(match.products, weights, strict=True):
        _ask_for_updates(product.weight, weight, tokens, match)
    return Decision(replace(match, router=_router(match)), problem, choice.choose(problem).NAME)


def _inner(product: Product, part: Part) -> torch.Tensor:
    """An operand of a quantised weight."""
    return part.of(cast(torch.Tensor, example(product.weight.node)))


def _ask_for_updates(weight: Weight, stored: torch.Tensor, tokens: torch.Tensor, match: MoEMatch) -> None:
    """Raise ValueError where rows cannot go through the low-rank factors beside ``stored`` [E, N, K]."""
    experts, columns, inner = stored.shape
    offsets = tokens.new_empty(experts, dtype=torch.int32)
    rows = tokens.new_empty((tokens.shape[0] * match.dispatch.top_k, inner))
    for update in weight.updates:
        for shape in ((experts, update.rank, inner), (experts, columns, update.rank)):
            call = parse("grouped_mm", rows, stored.new_empty(shape), offsets)
            choice.choose(call.problem, None, "grouped_mm")
            rows = rows.new_empty((rows.shape[0], shape[1]))
        rows = rows.new_empty((rows.shape[0], inner))


def _bias(match: MoEMatch) -> torch.Tensor | None:
    """The bias of gate and up, as one."""
    one, other = _flat(match.up.bias), _flat(None if match.up_half is None else match.up_half.bias)
    if one is None or other is None:
        if match.up_half is not None and (one is None) != (other is None):
            raise ValueError("Of gate and up only one has a bias.")
        return one
    return torch.cat((one, other), 1)


def _flat(bias: fx.Node | None) -> torch.Tensor | None:
    """A stacked bias as ``[E, N]``."""
    value = None if bias is None else example(bias)
    return value if value is None or value.dim() == 2 else value.squeeze(1)


def _router(match: MoEMatch) -> Router | Refusal:
    """The router, or the refusal of `fused_topk` to express it."""
    router = match.router
    logits = None if isinstance(router, Refusal) else example(router.logits)
    if isinstance(router, Refusal) or logits is None:
        return match.router
    bias = None if router.bias is None else example(router.bias)
    try:
        parse("fused_topk", logits.reshape(-1, logits.shape[-1]), bias, **router.options())
    except ValueError as error:
        return Refusal(router.logits, f"The router stays in the graph: {error}", "")
    return router


def _weight(weight: Weight) -> torch.Tensor | None:
    value = example(weight.node)
    if value is not None and weight.part is not None:
        operator, arguments = weight.part.call(value)
        value = operator(*arguments)
    if value is not None and weight.experts is not None:
        value = value[: weight.experts]
    if value is not None and weight.dtype is not None:
        value = value.to(weight.dtype)
    return value.transpose(1, 2) if value is not None and weight.transposed else value
