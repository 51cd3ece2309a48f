"""How the rows of the second expert product return to their tokens: weight, un-permute and sum over K, in any order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast, is_noop_cast, no_narrower
from compile_passes.match import KEEP, Combine, Dispatch, Product, Refusal, Staged, Value, everywhere, in_words
from compile_passes.patterns.contraction import TRANSPOSES, permutation
from compile_passes.patterns.rows import BLANK, Order, is_mask, is_ramp, sorts
from compile_passes.patterns.rowwise import row_wise
from compile_passes.patterns.selection import weights_listed_by
from compile_passes.reading import Reading
from compile_passes.safety import readers_of_numbers
from compile_passes.vocabulary import Call, example, has_shape, rank, same_shape, single, two_labelled

_NORM_SEARCH = 12
_PRODUCTS = ("bmm", "matmul")


@dataclass(frozen=True)
class _State:
    """Where the walk is: ``value`` holds rows (weighted or not, in pair order or not) or ``[T, K, H]``, or, ``done``,
    the sum over the slots; ``added``: what it was added to; ``staged``: the row-wise code that was passed.
    """

    value: fx.Node
    in_pair_order: bool
    weights: fx.Node | None = None
    done: bool = False
    added: fx.Node | None = None
    staged: Staged | None = None


def recognise_combine(
    reading: Reading, dispatch: Dispatch, down: Product, floor: torch.dtype, weights: fx.Node | None = None
) -> Combine | Refusal:
    """Follow the second product's result forward, reader by reader, to the ``[T, H]`` output.

    Args:
        floor: the narrowest dtype that a cast of rows or weights may go to.
        weights: what the result's rows were multiplied by already.
    """
    return _Walk(reading, dispatch, down, floor, weights).run()


class _Walk:
    def __init__(
        self, reading: Reading, dispatch: Dispatch, down: Product, floor: torch.dtype, weights: fx.Node | None
    ) -> None:
        self.reading, self.dispatch, self.floor = reading, dispatch, floor
        self.order = Order(reading, floor)
        hidden, ids = example(dispatch.hidden), example(dispatch.ids)
        result = example(reading.operand(down.result))
        self.lead: tuple[Any, ...] = () if hidden is None else tuple(hidden.shape[:-1])
        self.tokens: Any = None if hidden is None else math.prod(self.lead)
        self.rows: Any = None if ids is None else ids.numel()
        if is_mask(dispatch.perm):  # a size of the data, of which the mask is proved to make as many
            self.rows = None if result is None else result.shape[0]
        self.width: Any = None if result is None else result.shape[-1]
        self.down, self.start = down, _State(down.result, dispatch.perm is None, weights)

    def run(self) -> Combine | Refusal:
        if self.down.weighed is not None:
            given = self.order.weights_of(self.down.weighed[0], self.rows, None)
            if given is None or self.down.bias is not None or not self.start.in_pair_order:
                return Refusal(
                    self.down.anchor, "What the second product multiplies by cannot be proved to be the routing "
                    "weights, or it does not multiply its bias.", "Apply the weights after the experts.",
                )  # fmt: skip
            self.start = replace(self.start, weights=given)
        if self.down.summed:
            if self.down.bias is not None or not self.start.in_pair_order:
                return Refusal(
                    self.down.anchor, "The second product sums a token's rows before its bias is added.",
                    "Add the bias of every expert first.",
                )  # fmt: skip
            self.start = replace(self.start, done=True)
        state = rows = self.start
        while not state.done:
            readers = readers_of_numbers(self.reading, state.value)
            step = self._step(state, readers[0]) if len(readers) == 1 and self._known(state.value) else None
            if step is not None and (step.in_pair_order != state.in_pair_order or not self._are_rows(rows.value)):
                rows = step
            step = step or self._passed(state, rows)
            if step is None and self._is_whole(state):
                break
            if step is None:
                return stopped(self.reading, state.value, readers)
            state = step
        found = final_cast(self.reading, self.dispatch.hidden, state.value, self.floor, self._shapes())
        if isinstance(found, Refusal):
            return found
        weights = self._all_weights(state, found[0])
        if isinstance(weights, Refusal):
            return weights
        return Combine(weights, found[0], state.value, state.added, found[1], staged=state.staged)

    def _shapes(self) -> list[fx.Node]:
        """What the result may have the shape of, beside [T, H]."""
        return [self.dispatch.hidden] if len(self.lead) > 1 else []

    def _passed(self, state: _State, rows: _State) -> _State | None:
        """Behind the row-wise code that reads ``rows``, the last value that was in this order: it may stay."""
        plain = state.weights is None and state.staged is None and self.dispatch.weights is None
        plain = plain and not is_mask(self.dispatch.perm)
        if not plain or not self._are_rows(rows.value):
            return None
        staged = row_wise(self.reading, rows.value)
        made = None if staged is None else example(staged.end)
        if staged is None or made is None or not self._known(staged.end) or not no_narrower(made.dtype, self.floor):
            return None
        return replace(rows, value=staged.end, staged=staged)

    def _are_rows(self, value: fx.Node) -> bool:
        return has_shape(self.reading.operand(value), self.rows, self.width)

    def _is_whole(self, state: _State) -> bool:
        """Whether one expert for each token leaves nothing to sum."""
        value = self.reading.operand(state.value)
        whole = has_shape(value, self.tokens, self.width) or has_shape(value, *self.lead, self.width)
        return self.dispatch.top_k == 1 and state.in_pair_order and whole

    def _all_weights(self, state: _State, output: fx.Node) -> Value | Refusal:
        """The routing weights: those of the rows before the experts, or of their results."""
        before, after = self.dispatch.weights, state.weights
        if before is not None and after is not None:
            return Refusal(
                after, "The routing weights multiply the experts' inputs and their results.", "Apply them once."
            )
        made = example(output)
        if after is not None and self.dispatch.perm is not None and is_mask(self.dispatch.perm):
            weights = weights_listed_by(self.reading, self.dispatch.perm, after, self.floor)
            return weights or Refusal(
                after, "What multiplies an expert's rows cannot be proved to be their routing weights.",
                "Multiply by weights.T.masked_select(mask)[:, None], of weights [tokens, experts].",
            )  # fmt: skip
        weights = after if before is None else before
        if weights is not None:
            return weights
        if state.staged is not None or made is None:  # the weights may be in the code between that stays
            return Refusal(
                output, "The rows are summed without routing weights, behind code of the model.",
                "Multiply them by topk_weights, or by ones if nothing weighs them.",
            )  # fmt: skip
        return everywhere(self.dispatch.ids, 1.0, made.dtype)

    def _known(self, value: fx.Node) -> bool:
        return self._are_rows(value) or self._by_token(value)

    def _by_token(self, value: fx.Node) -> bool:
        """Whether ``value`` is [T, K, H], or [..., K, H] of hidden states [..., H]."""
        value, rows = self.reading.operand(value), (self.dispatch.top_k, self.width)
        return has_shape(value, self.tokens, *rows) or has_shape(value, *self.lead, *rows)

    def _step(self, state: _State, reader: fx.Node) -> _State | None:
        call = self.reading.call(reader)
        if call is None:
            return None
        if self.reading.read(reader, "cast") is not None:
            return replace(state, value=reader) if is_float_cast(reader, state.value, self.floor) else None
        if self.reading.read(reader, "mul", "y") is not None and state.weights is None:
            perm = None if state.in_pair_order else self.dispatch.perm
            weights = self.order.weights(call["y"] if call["x"] is state.value else call["x"], state.value, perm)
            return None if weights is None else replace(state, value=reader, weights=weights)
        if self.reading.read(reader, "view") is not None and state.in_pair_order:
            return replace(state, value=reader) if self._known(reader) else None
        if call.name == "sum" and self._by_token(state.value) and self._sums_slots(state, reader):
            return replace(state, value=reader, done=True)
        if call.name in (*_PRODUCTS, *TRANSPOSES, "einsum") and state.weights is None and state.in_pair_order:
            return self._contracts(state, reader)
        if not state.in_pair_order and self._unpermutes(state, reader):
            return replace(state, value=reader, in_pair_order=True)
        return self._adds_to_tokens(state, reader)

    def _is_perm(self, value: Any, wide: bool = False) -> bool:
        return self.order.has_order(value, self.dispatch.perm, wide)

    def _unpermutes(self, state: _State, reader: fx.Node) -> bool:
        """``rows[inverse]``, or ``empty_like(rows)[perm] = rows``."""
        put = self.order.placed(reader)
        if put is not None:
            blank, target = self.reading.named(put.start, *BLANK), example(put.start)
            return (
                blank is not None and target is not None and no_narrower(target.dtype, self.floor)
                and has_shape(put.start, self.rows, self.width) and put.rows is state.value
                and self._is_perm(put.index, put.wide)
            )  # fmt: skip
        taken = self.order.taken(reader)
        if taken is None or taken.source is not state.value:
            return False
        index = self.order.column(taken.index) if taken.wide else taken.index
        return index is not None and self._is_inverse(index)

    def _is_inverse(self, value: Any) -> bool:
        """``inverse[perm] = arange(R)``, or the sorting permutation of ``perm``."""
        value = self.order.bare(value)
        if not isinstance(value, fx.Node) or not has_shape(self.reading.operand(value), self.rows):
            return False
        put = self.order.placed(value)
        if put is None:
            ordered = sorts(self.reading, value)
            return ordered is not None and self._is_perm(ordered)
        return (
            has_shape(put.start, self.rows) and self._is_perm(put.index)
            and has_shape(put.rows, self.rows) and is_ramp(self.reading, put.rows)
        )  # fmt: skip

    def _sums_slots(self, state: _State, reader: fx.Node) -> bool:
        call, result = self.reading.read(reader, "sum", "dim dtype"), example(reader)
        dims = ((rank(self.reading.operand(state.value)) or 0) - 2, -2)
        along = call is not None and single(call["dim"]) in dims
        return along and result is not None and no_narrower(result.dtype, self.floor)

    def _contracts(self, state: _State, reader: fx.Node) -> _State | None:
        """Weights and rows ``[T, K, H]`` in one product that sums over the slots."""
        product = self._transposed_by(state.value, reader) or reader
        result = example(product)
        if not self._by_token(state.value) or result is None or not no_narrower(result.dtype, self.floor):
            return None
        if self.reading.named(product, *_PRODUCTS) is not None:
            other = self._summed_by_product(state.value, reader, product)
        else:
            other = self._summed_by_einsum(state.value, product)
        weights = None if other is None else self.order.weights_of(other, self.rows, None)
        total = product if product is reader else self._without_one(product)
        if weights is None or total is None:
            return None
        return replace(state, value=total, weights=weights, done=True)

    def _without_one(self, product: fx.Node) -> fx.Node | None:
        """``[..., H]``, as which alone ``product`` [..., H, 1] is read."""
        made, readers = example(product), readers_of_numbers(self.reading, product)
        if made is None or len(readers) != 1 or self.reading.read(readers[0], "view") is None:
            return None
        return readers[0] if has_shape(readers[0], *made.shape[:-1]) else None

    def _transposed_by(self, rows: fx.Node, reader: fx.Node) -> fx.Node | None:
        """What alone reads the rows as ``[..., H, K]``, which is what ``reader`` makes of them."""
        call, held = self.reading.named(reader, *TRANSPOSES), example(self.reading.operand(rows))
        readers = readers_of_numbers(self.reading, reader)
        if call is None or held is None or len(readers) != 1:
            return None
        *lead, slots, width = range(held.dim())
        return readers[0] if permutation(call, held.dim()) == [*lead, width, slots] else None

    def _summed_by_product(self, rows: fx.Node, reader: fx.Node, product: fx.Node) -> Any:
        """The weights of ``weights [..., 1, K] @ rows``, or of ``rows.mT @ weights [..., K, 1]``."""
        call, held = self.reading.read(product, " ".join(_PRODUCTS), "y"), example(self.reading.operand(rows))
        if call is None or held is None:
            return None
        *lead, slots, _ = held.shape
        if product is reader:
            return call["x"] if call["y"] is rows and has_shape(call["x"], *lead, 1, slots) else None
        return call["y"] if call["x"] is reader and has_shape(call["y"], *lead, slots, 1) else None

    def _summed_by_einsum(self, rows: fx.Node, reader: fx.Node) -> Any:
        """The weights of ``einsum("tkh,tk->th", rows, weights)``, in either order, whatever the letters."""
        call, tensor = self.reading.read(reader, "einsum", "arg1 arg2"), self.reading.operand(rows)
        if call is None:
            return None
        given = {key: tensor if value is rows else value for key, value in call.args.items()}
        found = two_labelled(Call(call.name, given))
        if found is None or tensor not in found[0]:
            return None
        operands, labels, result = found
        place = operands.index(tensor)
        mine, other, weights = labels[place], labels[1 - place], operands[1 - place]
        held = example(tensor)
        if held is None or len(mine) != held.dim() or not has_shape(weights, *held.shape[:-1]):
            return None
        return weights if other == mine[:-1] and result == mine[:-2] + mine[-1] else None

    def _adds_to_tokens(self, state: _State, reader: fx.Node) -> _State | None:
        """``start.index_add(0, tokens, rows)``: the sum, added to what was there."""
        added = self.order.added(reader)
        if added is None or not has_shape(self.reading.operand(state.value), self.rows, self.width):
            return None
        total = example(added.start)
        if (
            added.rows is not state.value or total is None or not no_narrower(total.dtype, self.floor)
            or not has_shape(added.start, self.tokens, self.width)
            or not self._are_tokens(state, added.index, added.wide)
        ):  # fmt: skip
            return None
        start = None if self.reading.is_zeros(added.start) else added.start
        return replace(state, value=reader, done=True, added=start)

    def _are_tokens(self, state: _State, value: Any, wide: bool) -> bool:
        """Whether ``value`` is the token of every row."""
        found, perm = self.order.positions(value, wide), None if state.in_pair_order else self.dispatch.perm
        if found is None or (found.perm is None) != (perm is None):
            return False
        if perm is not None and not self.order.same(found.perm, perm):
            return False
        if found.kind == "pair":
            return bool(self.dispatch.top_k == 1)
        return found.kind == "token" and (is_mask(perm) or bool(found.top_k == self.dispatch.top_k))


def final_cast(
    reading: Reading, hidden: fx.Node, value: fx.Node, floor: torch.dtype, shapes: Sequence[fx.Node] = ()
) -> tuple[fx.Node, fx.Node | None] | Refusal:  # fmt: skip
    """The sum over the experts ``value`` in the dtype of the hidden states, or one between it and ``floor``, and as
    [tokens, hidden] or of one of the ``shapes``; and which of these, where it is not [tokens, hidden].
    """
    tokens = example(hidden)
    held_by = {reading.operand(shape): shape for shape in shapes}
    while True:
        held, readers = reading.operand(value), reading.readers(value)
        tensor = example(held)
        if tensor is None or tokens is None:
            break
        flat = (math.prod(tokens.shape[:-1]), tensor.shape[-1])
        call = reading.read(readers[0], "cast view") if len(readers) == 1 else None
        if call is not None and call.name == "view":
            if _is_result(readers[0], flat, held_by) and not _is_result(held, flat, held_by):
                value = readers[0]
                continue
            call = None
        # A dtype that is already right needs no cast; transformers writes one all the same.
        wider = tensor.dtype != tokens.dtype and call is not None and is_float_cast(readers[0], value, tokens.dtype)
        if wider or (call is not None and is_noop_cast(readers[0], value)):
            value = readers[0]
            continue
        if tensor.dtype != tokens.dtype and not _is_between(tensor.dtype, floor, tokens.dtype):
            break
        if _is_result(held, flat, held_by):
            return value, None if has_shape(held, *flat) else _alike(held, held_by)
        return Refusal(
            value, "The sum over experts is not [tokens, hidden].", "Sum into one row for every token, no more."
        )
    return Refusal(
        value, "The sum over experts is used in another dtype than the hidden states.",
        "Cast it with .to(hidden_states.dtype) before using it.",
    )  # fmt: skip


def _is_between(dtype: torch.dtype, floor: torch.dtype, tokens: torch.dtype) -> bool:
    """Whether ``dtype`` is one that autocast leaves results in: narrower than the tokens', as the products are."""
    return no_narrower(dtype, floor) and no_narrower(tokens, dtype)


def _is_result(value: fx.Node, flat: tuple[Any, ...], shapes: Mapping[fx.Node, fx.Node]) -> bool:
    return has_shape(value, *flat) or _alike(value, shapes) is not None


def _alike(value: fx.Node, shapes: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """By tensors, the name of the one with the shape of ``value``: what writes a tensor is a name of it."""
    return next((shape for held, shape in shapes.items() if same_shape(held, value)), None)


def stopped(reading: Reading, value: fx.Node, readers: list[fx.Node]) -> Refusal:
    """Why the walk from the second product's result does not go on from ``value``."""
    norm = _norm_after(reading, readers)
    if norm is not None:
        return Refusal(
            norm, "A normalisation follows each expert's second projection, before the routing weights, and cannot be "
            "proved to be of each row alone.", "Norm the rows over their last dimension, with weights [hidden], as "
            "[R, hidden] (rows.reshape(-1, hidden) before, .view(T, K, hidden) after), and use nothing inside of it "
            "elsewhere.",
        )  # fmt: skip
    if len(readers) != 1:
        what = (
            "is read by nothing"
            if not readers
            else f"is read {len(readers)} times ({', '.join(map(in_words, readers))})"
        )
        return Refusal(
            value, f"A value inside of the MoE block, {in_words(value)}, {what}.",
            "Only the routing logits, weights and ids may be used outside of the block.",
        )  # fmt: skip
    call = reading.call(readers[0])
    node, name = (value, "the graph's output") if call is None else (readers[0], call.name)
    return Refusal(
        node, f"The result of the second expert product meets {name}, which is no known way to combine.",
        f"Write a sum by the routing weights as (rows * weights)[inverse].view(T, K, H).sum(1); anything else is not "
        f"fused. {KEEP}",
    )  # fmt: skip


def _norm_after(reading: Reading, readers: list[fx.Node]) -> fx.Node | None:
    seen, queue = set[fx.Node](), list(readers)
    while queue and len(seen) < _NORM_SEARCH:
        node = queue.pop(0)
        call = reading.call(node)
        if node in seen or call is None:
            continue
        if call.name in ("rsqrt", "norm", "vector_norm"):
            return node
        seen.add(node)
        if call.name in ("cast", "pow", "square", "add", "mul", "sqrt", "mean"):
            queue.extend(reading.readers(node))
    return None
