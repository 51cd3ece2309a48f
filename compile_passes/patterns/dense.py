"""Every token through every expert: products without any routing, whose results scores [T, E] then pick from.

The scores may multiply the tokens, the value between the products (where the second adds no bias), or the results, in
the order of tokens and experts that these have; or the results of selected experts are gathered. Which K experts the
scores leave is `selection`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast, narrower, no_narrower
from compile_passes.match import Combine, Dispatch, Product, Refusal, Spread, in_words
from compile_passes.patterns.combine import final_cast, recognise_combine, stopped
from compile_passes.patterns.contraction import alike, axis_of, moves_one, permutation, spread_of
from compile_passes.patterns.formula import OfRows
from compile_passes.patterns.ids import are_in_range
from compile_passes.patterns.rows import Order, is_ramp
from compile_passes.patterns.selection import selected_of
from compile_passes.reading import Reading
from compile_passes.safety import readers_of_numbers
from compile_passes.vocabulary import (
    Call,
    equal_sizes,
    example,
    has_shape,
    has_sizes,
    rank,
    same_count,
    same_shape,
    single,
    two_labelled,
)

_LATER = "Apply the weights after the experts."
# Calls that put rows somewhere.
_PUTS = ("index_put", "fancy_put", "index_add", "index_copy", "scatter", "scatter_add")


@dataclass(frozen=True)
class _Scores:
    """What multiplies the experts' rows, and the order of tokens and experts that it has to have for that."""

    node: fx.Node
    order: Spread


@dataclass(frozen=True)
class _State:
    """Where the walk is: the results ``value`` and their order, or, ``done``, the sum over the experts; ``turned``: the
    results are [..., H, E], all experts of a token behind each other.
    """

    value: fx.Node
    order: Spread | None
    scores: _Scores | None
    done: bool
    added: fx.Node | None = None
    turned: bool = False


def recognise_dense(
    reading: Reading,
    ups: Sequence[Product],
    down: Product,
    floor: torch.dtype,
    inside: OfRows | None,
    turned: bool = False,
) -> tuple[Dispatch, Combine] | Refusal:
    """The tokens before, and the sum over the selected experts behind, products of every token with every expert.

    Args:
        inside: what multiplies the rows between the products, or None.
        floor: the narrowest dtype that rows and scores may be rounded to.
        turned: whether the results are [..., H, E].
    """
    return _Dense(reading, ups, down, floor, inside, turned).block()


class _Dense:
    def __init__(
        self,
        reading: Reading,
        ups: Sequence[Product],
        down: Product,
        floor: torch.dtype,
        inside: OfRows | None,
        turned: bool,
    ) -> None:
        self.reading, self.ups, self.down, self.floor, self.inside = reading, ups, down, floor, inside
        self.turned = turned
        self.order = Order(reading, floor)
        stacked, result = example(down.weight.node), example(down.result)
        self.experts: Any = None if stacked is None else stacked.shape[0]
        self.width: Any = None if result is None else result.shape[-2 if turned else -1]
        self.hidden: fx.Node = down.rows
        self.tokens: Any = None
        # What the results may be rounded to: the hidden states' own dtype may be narrower than that of the weights.
        self.wide = floor

    def _put_at_places(self) -> Refusal | None:
        """The refusal of rows that are put at their places of a buffer [experts, capacity, hidden]."""
        rows = self.ups[0].rows
        while (call := self.reading.named(rows, "view", "clone", "cast", "getslice", "slice", "narrow")) is not None:
            rows = call["x"]
        if self.reading.named(rows, *_PUTS) is None:
            return None
        return Refusal(
            rows, f"Rows are put at places of [experts, capacity, hidden], by {in_words(rows)}; a capacity is read as "
            "products with one-hots of the places, or as the first tokens of every expert in a loop.",
            "Call moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids) in place of "
            "putting rows, the experts and taking rows, with the id -1 for a pair that is dropped, as by "
            "torch.where(places < capacity, topk_ids, -1). Or use moe_ops.batched_dispatch, batched_mm_glu, batched_mm "
            "and batched_combine.",
        )  # fmt: skip

    def block(self) -> tuple[Dispatch, Combine] | Refusal:
        if not self._agrees():
            return Refusal(
                self.down.anchor, "The expert products have different numbers of experts, or other orders of tokens "
                "and experts, as far as can be proved.", "Keep [experts, tokens, ...] or [tokens, experts, ...].",
            )  # fmt: skip
        (hidden, scores), *others = [self._tokens_of(up) for up in self.ups]
        tensor = example(hidden)
        if hidden is None or tensor is None:
            return self._put_at_places() or Refusal(
                self.ups[0].anchor, "The rows of the first expert product are not all tokens for all experts, as far "
                "as can be proved.", "Write them as hidden_states.expand(num_experts, -1, -1). Rows that experts "
                "choose are for moe_ops.batched_dispatch, batched_mm_glu, batched_mm and batched_combine.",
            )  # fmt: skip
        if any(other != (hidden, scores) for other in others):
            return Refusal(
                self.ups[-1].anchor, "The gate and the up projection cannot be proved to be of the same rows.",
                "Multiply the same rows by both.",
            )  # fmt: skip
        self.hidden, self.tokens = hidden, prod(tensor.shape[:-1])
        self.wide = narrower(tensor.dtype, self.floor)
        return self._weighted(scores)

    def _agrees(self) -> bool:
        """One number of experts, and one order of rows from the first product to the second."""
        inner = self.down.spread[0] if self.down.spread is not None else None
        for up in self.ups:
            weight = example(up.weight.node)
            if weight is None or up.spread is None or not equal_sizes(weight.shape[0], self.experts):
                return False
            if inner is None or not alike(up.spread[1], inner):
                return False
        return True

    # ---- the tokens

    def _tokens_of(self, up: Product) -> tuple[fx.Node | None, _Scores | None]:
        """The hidden states [..., H] that are the rows of a first product, and what multiplies them."""
        order = up.spread[0] if up.spread is not None else None
        if order is None:
            return self.order.flat(up.rows), None
        rows = self.reading.uncast(up.rows, self.floor)
        call, shape = self.reading.read(rows, "mul", "y"), example(rows)
        if call is not None and shape is not None:
            for one, other in (("x", "y"), ("y", "x")):
                hidden = self._copies(call[one], order, shape) if _multiplies_rows(call[other], shape) else None
                if hidden is not None:
                    return hidden, _Scores(call[other], order)
        found = two_labelled(self.reading.read(rows, "einsum", "arg1 arg2"))
        if found is not None and shape is not None:
            return _outer(*found, shape, order)
        return (None if shape is None else self._copies(rows, order, shape)), None

    def _copies(self, value: Any, order: Spread, rows: torch.Tensor) -> fx.Node | None:
        """The hidden states of which ``value`` is one copy for every expert, or has room for one, in ``rows``."""
        root = self.reading.uncast(value, self.floor)
        call, shape, given = self.reading.call(root), example(root), example(value)
        if shape is None or given is None:
            return None
        if self._broadcasts(given, rows, order):
            return self.order.flat(value)
        if call is None or not same_count(shape, rows):
            return None
        before = example(call["x"])
        if call.name in ("expand", "repeat") and before is not None:
            if self._broadcasts(before, shape, order):
                return self.order.flat(call["x"])
            return (
                self.order.flat(call["x"])
                if self._in_blocks(call, order) and before.dim() == shape.dim() == 2
                else None
            )
        if self.reading.read(root, "repeat_interleave", "repeats dim") is not None:
            along = call["dim"] in (0, -2) and rank(call["x"]) == 2 and equal_sizes(order.after, 1)
            return call["x"] if along and equal_sizes(call["repeats"], self.experts) else None
        taken = self.order.taken(root)
        if taken is None or rank(taken.source) != 2 or not equal_sizes(order.before, 1):
            return None
        index = self.order.column(taken.index) if taken.wide else taken.index
        return taken.source if self._numbers_tokens(index, example(taken.source)) else None

    def _broadcasts(self, given: torch.Tensor, whole: torch.Tensor, order: Spread) -> bool:
        """Whether ``given`` [..., 1, ..., H] meets ``whole`` [..., E, ..., H] with a dimension of 1 for the experts."""
        at = axis_of(whole.shape, order, self.experts)
        shape = [1] * (whole.dim() - given.dim()) + list(given.shape)
        if at is None or len(shape) != whole.dim():
            return False
        wanted = [1 if place == at else size for place, size in enumerate(whole.shape)]
        return all(map(equal_sizes, shape, wanted))

    def _in_blocks(self, call: Call, order: Spread) -> bool:
        """``x.repeat(E, 1)``: all tokens for one expert after the other."""
        counts = [value for key, value in call.args.items() if key != "x"]
        counts = list(counts[0]) if len(counts) == 1 and isinstance(counts[0], list | tuple) else counts
        once = len(counts) == 2 and counts[1] == 1 and call.name == "repeat"
        return once and equal_sizes(counts[0], self.experts) and equal_sizes(order.before, 1)

    def _numbers_tokens(self, value: Any, tokens: torch.Tensor | None) -> bool:
        """Whether ``value`` is 0, 1, 2, ... T - 1, once for every expert."""
        root = self.order.bare(value)
        call = self.reading.named(root, "expand", "repeat")
        ramp = self.order.bare(call["x"]) if call is not None else None
        if call is None or tokens is None or not has_shape(root, self.experts, tokens.shape[0]):
            return False
        one = has_shape(call["x"], tokens.shape[0]) or has_shape(call["x"], 1, tokens.shape[0])
        return one and is_ramp(self.reading, ramp)

    # ---- the sum over the experts

    def _weighted(self, before: _Scores | None) -> tuple[Dispatch, Combine] | Refusal:
        """Walk from the second product to the sum, and read the one factor there is as a selection."""
        if before is not None and any(product.bias is not None for product in (*self.ups, self.down)):
            return Refusal(
                self.down.anchor, "The routing weights multiply the input of the experts, and those not selected add "
                "their biases.", _LATER,
            )  # fmt: skip
        inner, order = self.down.spread or (None, None)
        within = [] if self.inside is None or inner is None else [_Scores(self.inside.weights, inner)]
        if self.down.weighed is not None and self.down.weighed[1] is not None:
            within.append(_Scores(self.down.weighed[0], self.down.weighed[1]))
        if self.inside is not None and not same_shape(self.inside.product, self.down.rows):
            return Refusal(
                self.inside.product, "The routing weights multiply the rows between the products in another shape than "
                "that in which the second product takes them.", _LATER,
            )  # fmt: skip
        if within and (len(within) > 1 or before is not None or self.down.bias is not None):
            return Refusal(
                self.down.anchor, "The routing weights multiply what the second product takes, and not its bias, or "
                "multiply twice.", _LATER,
            )  # fmt: skip
        inside = within[0] if within else None
        state = _State(self.down.result, order, before or inside, done=order is None, turned=self.turned)
        while not state.done:
            readers = readers_of_numbers(self.reading, state.value)
            ids = self._gathered(state, readers[0]) if len(readers) == 1 and state.scores is None else None
            if ids is not None:
                return self._by_slot(ids, readers[0])
            step = self._step(state, readers[0]) if len(readers) == 1 else None
            if step is None:
                return stopped(self.reading, state.value, readers)
            state = step
        return self._finish(state, before is not None)

    def _step(self, state: _State, reader: fx.Node) -> _State | None:
        """What ``reader`` makes of the results so far; None where it is nothing that a sum over the experts does."""
        shape, made, call = example(self.reading.operand(state.value)), example(reader), self.reading.call(reader)
        if call is None or shape is None or state.order is None:
            return None
        if state.turned:
            return self._turned_step(state, state.order, reader, call, shape)
        at = axis_of(shape.shape, state.order, self.experts)
        if self.reading.read(reader, "cast") is not None:
            return replace(state, value=reader) if is_float_cast(reader, state.value, self.wide) else None
        if self.reading.read(reader, "view") is not None:
            wide = made is not None and equal_sizes(made.shape[-1], self.width)
            return replace(state, value=reader) if wide else None
        if self.reading.read(reader, "mul", "y") is not None:
            other = call["y"] if call["x"] is state.value else call["x"]
            fits = state.scores is None and same_shape(reader, state.value) and _multiplies_rows(other, shape)
            return replace(state, value=reader, scores=_Scores(other, state.order)) if fits else None
        if call.name in ("transpose", "permute", "mt"):
            dims = moves_one(call, shape.dim(), at)
            if at is None or dims is None or dims[-1] != shape.dim() - 1:
                return None
            moved = spread_of([shape.shape[dim] for dim in dims[:-1]], dims.index(at))
            return replace(state, value=reader, order=moved)
        if call.name == "sum":
            dim = self._summed_dim(reader)
            fits = type(dim) is int and dim % shape.dim() == at
            return replace(state, value=reader, done=True) if fits else None
        if call.name in ("einsum", "bmm", "matmul"):
            if at is None or state.scores is not None:
                return None
            scores = self._contracted(state.value, reader, call, at)
            return None if scores is None else replace(state, value=reader, scores=scores, done=True)
        return self._adds(state, reader)

    def _turned_step(
        self, state: _State, order: Spread, reader: fx.Node, call: Call, shape: torch.Tensor
    ) -> _State | None:
        """`_step` of results [..., H, E]."""
        tokens, last = shape.shape[:-2], shape.dim() - 1
        other = call["y"] if call["x"] is state.value else call["x"]
        if self.reading.read(reader, "cast") is not None:
            return replace(state, value=reader) if is_float_cast(reader, state.value, self.wide) else None
        if call.name in ("transpose", "permute", "mt"):
            back = permutation(call, last + 1) == [*range(last - 1), last, last - 1]
            return replace(state, value=reader, turned=False) if back else None
        if call.name == "sum":
            dim = self._summed_dim(reader)
            return replace(state, value=reader, done=True) if type(dim) is int and dim % (last + 1) == last else None
        if state.scores is not None:
            return None
        if self.reading.read(reader, "mul", "y") is not None:
            factor = self._before_expanding(other)
            fits = same_shape(reader, state.value) and has_sizes(factor, [*tokens, 1, shape.shape[-1]])
            return replace(state, value=reader, scores=_Scores(factor, order)) if fits else None
        scores = None
        if self.reading.read(reader, "bmm matmul", "y") is not None:  # [T, H, E] @ [T, E, 1]
            fits = call["x"] is state.value and has_shape(other, *tokens, self.experts, 1)
            scores = _Scores(other, order) if fits else None
        elif call.name == "einsum":
            scores = self._contracted(state.value, reader, call, last)
        made = example(reader)
        if scores is None or made is None or not no_narrower(made.dtype, self.wide):
            return None
        readers = self.reading.readers(reader)
        column = call.name != "einsum" and len(readers) == 1 and self.reading.read(readers[0], "view") is not None
        flat = readers[0] if column and has_shape(readers[0], *tokens, self.width) else reader
        return replace(state, value=flat, scores=scores, done=True)

    def _before_expanding(self, factor: Any) -> Any:
        """What ``factor`` repeats along dimensions of 1."""
        call = self.reading.named(factor, "expand")
        return factor if call is None else call["x"]

    def _summed_dim(self, reader: fx.Node) -> Any:
        call, made = self.reading.read(reader, "sum", "dim dtype"), example(reader)
        if call is None or made is None or not no_narrower(made.dtype, self.wide):
            return None
        return single(call["dim"])

    def _contracted(self, value: fx.Node, reader: fx.Node, call: Call, at: int) -> _Scores | None:
        """The scores of a product that sums over the experts."""
        shape, made = example(value), example(reader)
        if shape is None or made is None or not no_narrower(made.dtype, self.wide):
            return None
        if call.name != "einsum":  # [T, 1, E] @ [T, E, H]
            fits = call["y"] is value and self.reading.read(reader, "bmm matmul", "y") is not None
            row = at == shape.dim() - 2 and has_shape(call["x"], *shape.shape[:at], 1, self.experts)
            return _Scores(call["x"], Spread(self.tokens, 1)) if fits and row else None
        found = two_labelled(self.reading.read(reader, "einsum", "arg1 arg2"))
        if found is None or value not in found[0]:
            return None
        operands, labels, result = found
        place = operands.index(value)
        mine, other = labels[place], labels[1 - place]
        expert, kept = mine[at], mine.replace(mine[at], "")
        tokens = kept[:-1]
        if result != kept or other not in (tokens + expert, expert + tokens):
            return None
        order = Spread(1, self.tokens) if other == expert + tokens else Spread(self.tokens, 1)
        return _Scores(operands[1 - place], order)

    def _adds(self, state: _State, reader: fx.Node) -> _State | None:
        """Results added to their tokens: ``out.scatter_add(0, token_of_every_row, rows)``."""
        added = self.order.added(reader)
        by_expert = state.order is not None and equal_sizes(state.order.before, 1)
        if added is None or added.rows is not state.value or not by_expert:
            return None
        index, total = self.order.column(added.index) if added.wide else added.index, example(added.start)
        if total is None or not no_narrower(total.dtype, self.wide):
            return None
        if not has_shape(added.start, self.tokens, self.width):
            return None
        if not self._numbers_tokens(index, example(self.hidden)):
            return None
        start = None if self.reading.is_zeros(added.start) else added.start
        return replace(state, value=reader, done=True, added=start)

    def _finish(self, state: _State, before: bool) -> tuple[Dispatch, Combine] | Refusal:
        if state.scores is None:
            return Refusal(state.value, "The experts' results are summed without routing weights.", "Multiply by them.")
        found = selected_of(self.reading, state.scores.node, self.experts, state.scores.order, self.floor)
        if isinstance(found, Refusal):
            return found
        shapes = [node for rows in (self.ups[0].rows, self.hidden) for node in self.reading.casts(rows, self.floor)]
        result = final_cast(self.reading, self.hidden, state.value, self.wide, shapes)
        if isinstance(result, Refusal):
            return result
        given = found.weights if before else None
        dispatch = Dispatch("dense", self.hidden, found.ids, None, found.top_k, weights=given)
        return dispatch, Combine(found.weights, result[0], state.value, state.added, result[1])

    # ---- results of selected experts

    def _gathered(self, state: _State, reader: fx.Node) -> fx.Node | None:
        """The ids [T, K], or [..., K], by which ``reader`` takes the results of K experts for every token."""
        made, call = example(reader), self.reading.call(reader)
        if call is None or made is None or made.dim() < 3 or type(made.shape[-2]) is not int:
            return None
        *lead, slots, _ = made.shape
        if state.order is None or not equal_sizes(state.order.after, 1) or not equal_sizes(prod(lead), self.tokens):
            return None
        if call["x"] is not state.value or not has_shape(state.value, *lead, self.experts, self.width):
            return None
        if self.reading.read(reader, "gather take_along_dim", "dim index") is not None:
            root = self.reading.named(self.reading.unwrap(call["index"]), "expand", "repeat")
            column = call["index"] if root is None else root["x"]
            one = call["dim"] in (len(lead), -2) and has_shape(column, *lead, slots, 1)
            return self.reading.strip(column) if one and has_shape(reader, *lead, slots, self.width) else None
        if made.dim() != 3:
            return None
        index = call["index"] if call.name == "fancy" else None
        if not isinstance(index, list | tuple) or len(index) < 2 or any(part != slice(None) for part in index[2:]):
            return None
        numbers, ids = index[:2]
        ramp = isinstance(numbers, fx.Node) and is_ramp(self.reading, self.order.bare(numbers))
        flat = rank(ids) == 2 and has_shape(numbers, self.tokens, 1)
        return ids if ramp and flat and has_shape(ids, self.tokens, made.shape[1]) else None

    def _by_slot(self, ids: fx.Node, reader: fx.Node) -> tuple[Dispatch, Combine] | Refusal:
        """The results of K experts for every token, to be weighted and summed as anywhere."""
        if not are_in_range(self.reading, ids, self.experts):
            return Refusal(
                ids, "The expert ids cannot be proved to be in [0, number of experts).", "Take them from a topk."
            )
        made = example(reader)
        dispatch = Dispatch("dense", self.hidden, ids, None, made.shape[-2])  # type: ignore[union-attr]
        combine = recognise_combine(self.reading, dispatch, replace(self.down, result=reader), self.floor)
        return combine if isinstance(combine, Refusal) else (dispatch, combine)


def _multiplies_rows(factor: Any, rows: torch.Tensor) -> bool:
    """Whether ``factor`` has one number for every row of ``rows`` [..., H], its dimensions in their places."""
    return has_sizes(factor, [*rows.shape[:-1], 1])


def _outer(
    operands: Any, labels: Any, result: str, rows: torch.Tensor, order: Spread
) -> tuple[fx.Node | None, _Scores | None]:
    """The tokens and the scores of ``einsum("th,te->teh", x, scores)``, which makes ``rows`` in this order."""
    for place in (0, 1):
        tokens, scores = labels[place], labels[1 - place]
        if len(tokens) != 2 or len(scores) != 2 or tokens[0] not in scores:
            continue
        expert = scores.replace(tokens[0], "")
        if not alike(spread_of(rows.shape[:-1], max(result.find(expert), 0)), order):
            continue
        if expert not in tokens and result in (tokens[0] + expert + tokens[1], expert + tokens):
            made = example(operands[1 - place])
            sizes = () if made is None else made.shape
            return operands[place], _Scores(operands[1 - place], spread_of(sizes, scores.index(expert)))
    return None, None
