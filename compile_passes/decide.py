"""Whether the operators and a backend accept a match, asked with the graph's fake tensors before any change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from compile_passes.compat import fake_mode_of
from compile_passes.match import MoEMatch, Refusal, Router, Weight
from compile_passes.vocabulary import example
from meta.dims import LayerProblem
from moe_ops import choice
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
    """Check the block's shapes and types by the operators' own rules, and choose its backend."""
    tensors = [example(match.dispatch.hidden), _weight(match.up.weight), _weight(match.down.weight)]
    hidden, gate_up, down = tensors
    if hidden is None or gate_up is None or down is None:
        return Refusal(match.down.anchor, "The graph carries no shapes for this block.", "Compile with fake tensors.")
    try:
        mode = fake_mode_of(hidden)
        if mode is None:
            return _describe(match, hidden, gate_up, down)
        with mode, torch.no_grad():
            return _describe(match, hidden, gate_up, down)
    except ValueError as error:
        return Refusal(
            match.down.anchor, f"The operators refuse this block: {error}", "See the message of the operator."
        )


def _describe(match: MoEMatch, hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Decision:
    tokens = hidden.new_empty(hidden.shape, dtype=gate_up.dtype)
    ids = tokens.new_empty((tokens.shape[0], match.dispatch.top_k), dtype=torch.int32)
    biases = [None if bias is None else example(bias) for bias in (match.up.bias, match.down.bias)]
    body = match.body
    call = parse(
        "fused_experts", tokens, gate_up, down, ids.float(), ids, None, None, None, *biases,
        activation=body.activation, alpha=body.alpha, limit=body.limit, glu_layout=body.glu_layout,
    )  # fmt: skip
    problem = cast(LayerProblem, call.problem)
    return Decision(replace(match, router=_router(match)), problem, choice.choose(problem).NAME)


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
    return value.transpose(1, 2) if value is not None and weight.transposed else value
