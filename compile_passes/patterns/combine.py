"""How the rows of the second expert product return to their tokens: weight, un-permute and sum over K, in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_passes.canonical import Canonical, equal_sizes, is_noop_cast, same_kind
from compile_passes.match import Combine, Dispatch, Product, Refusal
from compile_passes.patterns.dispatch import sorts
from compile_passes.vocabulary import Call, example, rank

_NORM_SEARCH = 12
# Calls that read the shape of their operand and none of its numbers.
_SHAPE_ONLY = ("empty_like", "zeros_like", "metadata")


@dataclass(frozen=True)
class _State:
    """Where the walk is: ``value`` holds rows (weighted or not, in token order or not) or ``[T, K, H]``."""

    value: fx.Node
    in_token_order: bool
    weights: fx.Node | None = None
    done: bool = False


def recognise_combine(canon: Canonical, dispatch: Dispatch, down: Product) -> Combine | Refusal:
    """Follow the second product's result forward, reader by reader, to the ``[T, H]`` output."""
    state = _State(down.result, in_token_order=dispatch.perm is None)
    while not state.done:
        readers = [r for r in canon.readers(state.value) if canon.named(r, *_SHAPE_ONLY) is None]
        step = _step(canon, dispatch, state, readers[0]) if len(readers) == 1 else None
        if step is None:
            return _stopped(canon, state, readers)
        state = step
    output = _final_cast(canon, state.value, dispatch)
    if isinstance(output, Refusal):
        return output
    if state.weights is None:
        return Refusal(output, "The rows are summed without routing weights.", "Multiply them by topk_weights.")
    return Combine(state.weights, output)


def _step(canon: Canonical, dispatch: Dispatch, state: _State, reader: fx.Node) -> _State | None:
    call = canon.call(reader)
    if call is None:
        return None
    if call.name == "cast":
        return replace(state, value=reader) if same_kind(reader, state.value) else None
    if call.name == "mul" and state.weights is None:
        weights = _weights(canon, dispatch, state, call["y"] if call["x"] is state.value else call["x"])
        return None if weights is None else replace(state, value=reader, weights=weights)
    if call.name in ("index", "index_put") and not state.in_token_order:
        return replace(state, value=reader, in_token_order=True) if _unpermutes(canon, dispatch, state, call) else None
    if call.name == "view" and state.in_token_order:
        return replace(state, value=reader) if _token_shape(reader, dispatch) or rank(reader) == 2 else None
    if call.name == "sum" and _token_shape(state.value, dispatch) and _sums_slots(call):
        return replace(state, value=reader, done=True)
    if call.name == "index_add" and not state.in_token_order and _adds_to_tokens(canon, dispatch, state, call):
        return replace(state, value=reader, done=True)
    return None


def _weights(canon: Canonical, dispatch: Dispatch, state: _State, other: Any) -> fx.Node | None:
    """The weights that ``other`` brings to the order of the rows, or None."""
    value = canon.uncast(other)
    rows, factor = example(state.value), example(other)
    if rows is None or factor is None or factor.dim() != rows.dim() or factor.shape[-1] != 1:
        return None
    if not state.in_token_order:
        gathered = canon.named(value, "index")
        if gathered is None or not canon.same(gathered["index"], dispatch.perm):
            return None
        value = canon.uncast(gathered["x"])
    weights = example(value)
    count = example(dispatch.ids)
    if weights is None or count is None or not weights.dtype.is_floating_point:
        return None
    return value if equal_sizes(weights.numel(), count.numel()) else None


def _unpermutes(canon: Canonical, dispatch: Dispatch, state: _State, call: Call) -> bool:
    """``rows[inverse]``, or ``empty_like(rows)[perm] = rows``."""
    if call.name == "index_put":
        blank = canon.named(call["x"], "empty_like", "zeros_like", "zeros", "empty")
        return call["values"] is state.value and blank is not None and canon.same(call["index"], dispatch.perm)
    return call["x"] is state.value and _is_inverse(canon, dispatch, call["index"])


def _is_inverse(canon: Canonical, dispatch: Dispatch, value: Any) -> bool:
    """``inverse[perm] = arange(R)``, or the sorting permutation of ``perm``."""
    call = canon.named(canon.strip(value), "index_put", "scatter")
    if call is None:
        return canon.same(sorts(canon, value), dispatch.perm)
    filled = call["values"] if call.name == "index_put" else call["src"]
    ramp, count = canon.named(canon.strip(filled), "arange"), example(dispatch.ids)
    return (
        ramp is not None and count is not None and not call["accumulate"]
        and canon.same(call["index"], dispatch.perm) and _length_is(filled, count.numel())
    )  # fmt: skip


def _length_is(value: Any, length: Any) -> bool:
    tensor = example(value)
    return tensor is not None and equal_sizes(tensor.numel(), length)


def _token_shape(value: fx.Node, dispatch: Dispatch) -> bool:
    """Whether ``value`` is ``[T, K, H]``."""
    shape, hidden = example(value), example(dispatch.hidden)
    if shape is None or hidden is None or shape.dim() != 3:
        return False
    return equal_sizes(shape.shape[0], hidden.shape[0]) and equal_sizes(shape.shape[1], dispatch.top_k)


def _sums_slots(call: Call) -> bool:
    return call["dim"] in (1, -2, (1,), [1], (-2,), [-2]) and not call["keepdim"]


def _adds_to_tokens(canon: Canonical, dispatch: Dispatch, state: _State, call: Call) -> bool:
    """``zeros(T, H).index_add(0, perm // K, rows)``."""
    start, divided = canon.named(call["x"], "zeros", "zeros_like"), canon.named(canon.uncast(call["index"]), "floordiv")
    return (
        start is not None and divided is not None and call["dim"] in (0, -2) and call["source"] is state.value
        and call["alpha"] in (None, 1) and divided["y"] == dispatch.top_k and canon.same(divided["x"], dispatch.perm)
    )  # fmt: skip


def _final_cast(canon: Canonical, value: fx.Node, dispatch: Dispatch) -> fx.Node | Refusal:
    """The sum in the dtype of the hidden states, which is what the fused operator returns."""
    hidden = example(dispatch.hidden)
    while True:
        tensor, readers = example(value), canon.readers(value)
        call = canon.named(readers[0], "cast") if len(readers) == 1 else None
        # A dtype that is already right needs no cast; transformers writes one all the same.
        if call is not None and (is_noop_cast(readers[0], value) or _differ(tensor, hidden)):
            value = readers[0]
            continue
        if tensor is None or hidden is None or tensor.dtype != hidden.dtype:
            return Refusal(
                value, "The sum over experts is used in another dtype than the hidden states.",
                "Cast it with .to(hidden_states.dtype) before using it.",
            )  # fmt: skip
        return value


def _differ(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None and left.dtype != right.dtype


def _stopped(canon: Canonical, state: _State, readers: list[fx.Node]) -> Refusal:
    norm = _norm_after(canon, readers)
    if norm is not None:
        return Refusal(
            norm, "A normalisation follows each expert's second projection, before the routing weights.",
            "Post-expert norms are not fused; move the norm after the sum over experts if the model allows it.",
        )  # fmt: skip
    if len(readers) != 1:
        what = (
            "is read by nothing"
            if not readers
            else f"is read {len(readers)} times ({', '.join(r.name for r in readers)})"
        )
        return Refusal(
            state.value, f"An interior value of the MoE block, {state.value.name}, {what}.",
            "Only the routing logits, weights and ids may be used outside of the block.",
        )  # fmt: skip
    call = canon.call(readers[0])
    name = "the graph's output" if call is None else call.name
    return Refusal(
        readers[0], f"The result of the second expert product meets {name}, which is no known way to combine.",
        "Combine as (rows * weights)[inverse].view(T, K, H).sum(1).",
    )  # fmt: skip


def _norm_after(canon: Canonical, readers: list[fx.Node]) -> fx.Node | None:
    seen, queue = set[fx.Node](), list(readers)
    while queue and len(seen) < _NORM_SEARCH:
        node = queue.pop(0)
        call = canon.call(node)
        if node in seen or call is None:
            continue
        if call.name in ("rsqrt", "norm"):
            return node
        seen.add(node)
        if call.name in ("cast", "pow", "square", "add", "mul", "sqrt", "mean"):
            queue.extend(canon.readers(node))
    return None
