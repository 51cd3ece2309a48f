"""How the rows of the second expert product return to their tokens: weight, un-permute and sum over K, in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast, is_noop_cast, no_narrower
from compile_passes.match import Combine, Dispatch, Product, Refusal
from compile_passes.patterns.dispatch import is_ramp, position, sorts
from compile_passes.reading import Reading
from compile_passes.vocabulary import equal_sizes, example, has_shape, rank

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


def recognise_combine(reading: Reading, dispatch: Dispatch, down: Product, floor: torch.dtype) -> Combine | Refusal:
    """Follow the second product's result forward, reader by reader, to the ``[T, H]`` output.

    Args:
        floor: the narrowest dtype that a cast of rows or weights may go to.
    """
    return _Walk(reading, dispatch, down, floor).run()


class _Walk:
    def __init__(self, reading: Reading, dispatch: Dispatch, down: Product, floor: torch.dtype) -> None:
        self.reading, self.dispatch, self.floor = reading, dispatch, floor
        self.start = _State(down.result, in_token_order=dispatch.perm is None)
        hidden, ids, result = example(dispatch.hidden), example(dispatch.ids), example(down.result)
        self.tokens: Any = None if hidden is None else hidden.shape[0]
        self.rows: Any = None if ids is None else ids.numel()
        self.width: Any = None if result is None else result.shape[-1]

    def run(self) -> Combine | Refusal:
        state = self.start
        while not state.done:
            readers = [r for r in self.reading.readers(state.value) if self.reading.named(r, *_SHAPE_ONLY) is None]
            step = self._step(state, readers[0]) if len(readers) == 1 and self._known(state.value) else None
            if step is None:
                return _stopped(self.reading, state, readers)
            state = step
        output = self._final_cast(state.value)
        if isinstance(output, Refusal):
            return output
        if state.weights is None:
            return Refusal(output, "The rows are summed without routing weights.", "Multiply them by topk_weights.")
        if not has_shape(output, self.tokens, self.width):
            return Refusal(
                output, "The sum over experts is not [tokens, hidden].", "Sum into one row for every token, no more."
            )
        return Combine(state.weights, output)

    def _known(self, value: fx.Node) -> bool:
        return has_shape(self.reading.operand(value), self.rows, self.width) or self._by_token(value)

    def _by_token(self, value: fx.Node) -> bool:
        return has_shape(self.reading.operand(value), self.tokens, self.dispatch.top_k, self.width)

    def _step(self, state: _State, reader: fx.Node) -> _State | None:
        call = self.reading.call(reader)
        if call is None:
            return None
        if self.reading.read(reader, "cast") is not None:
            return replace(state, value=reader) if is_float_cast(reader, state.value, self.floor) else None
        if self.reading.read(reader, "mul", "y") is not None and state.weights is None:
            weights = self._weights(state, call["y"] if call["x"] is state.value else call["x"])
            return None if weights is None else replace(state, value=reader, weights=weights)
        if call.name in ("index", "index_put") and not state.in_token_order:
            return replace(state, value=reader, in_token_order=True) if self._unpermutes(state, reader) else None
        if self.reading.read(reader, "view") is not None and state.in_token_order:
            return replace(state, value=reader) if self._known(reader) else None
        if call.name == "sum" and self._by_token(state.value) and self._sums_slots(reader):
            return replace(state, value=reader, done=True)
        if call.name == "index_add" and not state.in_token_order and self._adds_to_tokens(state, reader):
            return replace(state, value=reader, done=True)
        return None

    def _weights(self, state: _State, other: Any) -> fx.Node | None:
        """The weights that ``other`` brings to the order of the rows, or None."""
        rows = example(self.reading.operand(state.value))
        if rows is None or not has_shape(other, *rows.shape[:-1], 1):
            return None
        value = self.reading.uncast(other, self.floor)
        if not state.in_token_order:
            gathered = self.reading.read(value, "index", "index")
            if gathered is None or rank(gathered["x"]) != 1 or not self._is_perm(gathered["index"]):
                return None
            value = self.reading.uncast(gathered["x"], self.floor)
        weights = example(value)
        if weights is None or not no_narrower(weights.dtype, self.floor):
            return None
        return value if equal_sizes(weights.numel(), self.rows) else None

    def _is_perm(self, value: Any) -> bool:
        return rank(value) == 1 and self.reading.same(position(self.reading, value), self.dispatch.perm)

    def _unpermutes(self, state: _State, reader: fx.Node) -> bool:
        """``rows[inverse]``, or ``empty_like(rows)[perm] = rows``."""
        put = self.reading.read(reader, "index_put", "index values")
        if put is not None:
            blank = self.reading.named(put["x"], "empty_like", "zeros_like", "zeros", "empty")
            target = example(put["x"])
            return (
                blank is not None and target is not None and no_narrower(target.dtype, self.floor)
                and has_shape(put["x"], self.rows, self.width)
                and put["values"] is state.value and self._is_perm(put["index"])
            )  # fmt: skip
        taken = self.reading.read(reader, "index", "index")
        return taken is not None and taken["x"] is state.value and self._is_inverse(taken["index"])

    def _is_inverse(self, value: Any) -> bool:
        """``inverse[perm] = arange(R)``, or the sorting permutation of ``perm``."""
        if not isinstance(value, fx.Node) or not has_shape(self.reading.operand(value), self.rows):
            return False
        call = self.reading.read(self.reading.strip(value), "index_put scatter", "index values dim src")
        if call is None:
            ordered = sorts(self.reading, value)
            return ordered is not None and self._is_perm(ordered)
        filled = call["values"] if call.name == "index_put" else call["src"]
        along = call.name == "index_put" or call["dim"] in (0, -1)
        return (
            along and has_shape(call["x"], self.rows) and self._is_perm(call["index"])
            and has_shape(filled, self.rows) and is_ramp(self.reading, filled)
        )  # fmt: skip

    def _sums_slots(self, reader: fx.Node) -> bool:
        call, result = self.reading.read(reader, "sum", "dim dtype"), example(reader)
        dims = (1, -2, (1,), [1], (-2,), [-2])
        return call is not None and call["dim"] in dims and result is not None and no_narrower(result.dtype, self.floor)

    def _adds_to_tokens(self, state: _State, reader: fx.Node) -> bool:
        """``zeros(T, H).index_add(0, perm // K, rows)``."""
        call = self.reading.read(reader, "index_add", "dim index source")
        if call is None or call["dim"] not in (0, -2) or call["source"] is not state.value:
            return False
        start = self.reading.named(call["x"], "zeros", "zeros_like")
        divided = self.reading.read(self.reading.strip(call["index"]), "floordiv truncdiv", "y")
        total = example(call["x"])
        return (
            start is not None and divided is not None and total is not None and no_narrower(total.dtype, self.floor)
            and has_shape(call["x"], self.tokens, self.width) and type(divided["y"]) is int
            and divided["y"] == self.dispatch.top_k and self._is_perm(divided["x"])
        )  # fmt: skip

    def _final_cast(self, value: fx.Node) -> fx.Node | Refusal:
        """The sum in the dtype of the hidden states, which is what the fused operator returns."""
        hidden = example(self.dispatch.hidden)
        while True:
            tensor, readers = example(value), self.reading.readers(value)
            call = self.reading.read(readers[0], "cast") if len(readers) == 1 else None
            if call is not None and hidden is not None and tensor is not None:
                # A dtype that is already right needs no cast; transformers writes one all the same.
                wider = tensor.dtype != hidden.dtype and is_float_cast(readers[0], value, hidden.dtype)
                if wider or is_noop_cast(readers[0], value):
                    value = readers[0]
                    continue
            if tensor is None or hidden is None or tensor.dtype != hidden.dtype:
                return Refusal(
                    value, "The sum over experts is used in another dtype than the hidden states.",
                    "Cast it with .to(hidden_states.dtype) before using it.",
                )  # fmt: skip
            return value


def _stopped(reading: Reading, state: _State, readers: list[fx.Node]) -> Refusal:
    norm = _norm_after(reading, readers)
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
    call = reading.call(readers[0])
    node, name = (state.value, "the graph's output") if call is None else (readers[0], call.name)
    return Refusal(
        node, f"The result of the second expert product meets {name}, which is no known way to combine.",
        "Combine as (rows * weights)[inverse].view(T, K, H).sum(1).",
    )  # fmt: skip


def _norm_after(reading: Reading, readers: list[fx.Node]) -> fx.Node | None:
    seen, queue = set[fx.Node](), list(readers)
    while queue and len(seen) < _NORM_SEARCH:
        node = queue.pop(0)
        call = reading.call(node)
        if node in seen or call is None:
            continue
        if call.name in ("rsqrt", "norm"):
            return node
        seen.add(node)
        if call.name in ("cast", "pow", "square", "add", "mul", "sqrt", "mean"):
            queue.extend(reading.readers(node))
    return None
