"""Capacity: rows moved to the slots of their experts by a product with a one-hot, and back by another (GShard).

    rows[e, c] = sum over t of D[t, e, c] * x[t]
    out[t] = sum over e, c of W[t, e, c] * expert_e(rows[e, c])

D and W are sums of terms, each a product of a one-hot of experts, a one-hot of places, masks, and in W of numbers.
Where no slot has two tokens, and W is zero where D is, the sum is one over the K experts of every token, with the
numbers as routing weights; a pair whose masks say no is dropped: it gets the id -1. What dropped it stays in the graph,
so that exactly those pairs are dropped that the block drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast
from compile_passes.match import Combine, Dispatch, Product, Refusal
from compile_passes.patterns.combine import final_cast, stopped
from compile_passes.patterns.contraction import alike, axis_of
from compile_passes.patterns.factors import (
    CHOICES,
    EXPERT,
    SLOT,
    Axes,
    Factor,
    Factored,
    Factors,
    flat,
    named_by_ids,
    one_of,
)  # fmt: skip
from compile_passes.patterns.ids import are_distinct, are_in_range
from compile_passes.patterns.places import CURE, dropped_by_place, unproved
from compile_passes.patterns.rows import Order
from compile_passes.patterns.signs import is_not_negative
from compile_passes.patterns.slots import beside, pairs_of
from compile_passes.reading import Reading
from compile_passes.safety import readers_of_numbers
from compile_passes.vocabulary import equal_sizes, example, rank, two_labelled


@dataclass(frozen=True)
class _Moved:
    """The product that moves tokens to slots: its mask, the tokens, and the names of its dimensions.

    ``of_hidden``: of the tokens in ``hidden``, in order, ``tokens`` without those of size 1; ``slots``: of the rows of
    one expert, in order.
    """

    mask: fx.Node
    axes: Axes
    hidden: fx.Node
    of_hidden: tuple[str, ...]
    slots: tuple[str, ...]
    tokens: tuple[str, ...] = ()


def recognise_capacity(
    reading: Reading, ups: Sequence[Product], down: Product, floor: torch.dtype
) -> tuple[Dispatch, Combine] | Refusal | None:
    """The tokens before, and the weighted sum behind, products of slots with every expert; None where there are none.

    Args:
        floor: the narrowest dtype that rows and weights may be rounded to.
    """
    return _Capacity(reading, ups, down, floor).block()


class _Capacity:
    def __init__(self, reading: Reading, ups: Sequence[Product], down: Product, floor: torch.dtype) -> None:
        self.reading, self.ups, self.down, self.floor = reading, ups, down, floor
        self.factors = Factors(reading, floor)
        stacked, result = example(down.weight.node), example(down.result)
        self.experts: Any = None if stacked is None else stacked.shape[0]
        self.width: Any = None if result is None else result.shape[-1]

    def block(self) -> tuple[Dispatch, Combine] | Refusal | None:
        rows = {self.reading.uncast(up.rows, self.floor) for up in self.ups}
        order = self.down.spread[0] if self.down.spread is not None else None
        if (
            len(rows) != 1
            or order is None
            or any(up.spread is None or not alike(up.spread[0], order) for up in self.ups)
        ):
            return None
        moved = self._moved()
        if moved is None:
            return None
        found = self._weights(moved)
        if isinstance(found, Refusal):
            return found
        total, weights, axes = found
        block = self._block(moved, total, weights, axes)
        sequences = self._sequences(moved) if isinstance(block, Refusal) else None
        if sequences is None:
            return block
        self.factors.sizes |= sequences  # of which a one-hot [B, S, K, E] may be a view [B * S, K, E]
        both = tuple(sequences)
        mask, weighs = (
            tuple(both if flat((axis,)) == moved.of_hidden else axis for axis in given) for given in (moved.axes, axes)
        )
        again = self._block(replace(moved, of_hidden=both, axes=mask), total, weights, weighs)
        return block if isinstance(again, Refusal) else again

    def _sequences(self, moved: _Moved) -> dict[str, Any] | None:
        """B and S by new names, where the tokens are those of [B, S, H]."""
        views = [self.reading.read(node, "view") for node in self.reading.casts(moved.hidden, self.floor)]
        source = next((example(view["x"]) for view in views if view is not None), None)
        if moved.of_hidden != ("t0",) or source is None or source.dim() != 3:
            return None
        rows = equal_sizes(source.shape[0] * source.shape[1], self.factors.sizes["t0"])
        return {"t0": source.shape[0], "t1": source.shape[1]} if rows else None

    # ---- the two products

    def _moved(self) -> _Moved | None:
        order = self.ups[0].spread[0]  # type: ignore[index]
        for node in self.reading.casts(self.ups[0].rows, self.floor):
            made = example(node)
            at = None if made is None or order is None else axis_of(made.shape, order, self.experts)
            labelled = two_labelled(self.reading.read(node, "einsum", "arg1 arg2"))
            if labelled is not None:
                return None if at is None else self._by_einsum(*labelled, at)
            call = self.reading.read(node, "matmul", "y")
            if call is not None and rank(call["y"]) == 2 and order is not None and made is not None:
                first = equal_sizes(order.before, 1) if made.dim() == 2 else at == 0
                pair = (EXPERT, SLOT) if first else (SLOT, EXPERT)
                lead: Axes = (pair,) if made.dim() == 2 else pair
                tokens = example(call["y"])
                slots = order.after if first else order.before
                self.factors.sizes = {EXPERT: self.experts, SLOT: slots, "t0": tokens.shape[0]}  # type: ignore[union-attr]
                return _Moved(call["x"], (*lead, "t0"), call["y"], ("t0",), (SLOT,))
        return None

    def _by_einsum(
        self, operands: tuple[fx.Node, fx.Node], labels: tuple[str, str], result: str, at: int
    ) -> _Moved | None:
        """``einsum("sec,sm->ecm", mask, x)``, groups of tokens, each with slots of its own, included."""
        for place in (0, 1):
            given, mask = labels[place], labels[1 - place]
            expert, slots = result[at], result[:-1].replace(result[at], "")
            own = [letter for letter in slots if letter not in given]
            if given[-1] != result[-1] or result[-1] in mask or expert in given or len(own) != 1:
                continue
            if {*mask} != {*given[:-1], expert, own[0]} or not {*given[:-1]} - {*result}:
                continue
            called = {letter: f"t{number}" for number, letter in enumerate(given[:-1])}
            called |= {expert: EXPERT, own[0]: SLOT}
            shapes = (example(operands[1 - place]), example(operands[place]))
            for shape, letters in zip(shapes, (mask, given[:-1]), strict=True):
                self.factors.sizes |= {
                    called[letter]: size
                    for letter, size in zip(letters, shape.shape, strict=False)  # type: ignore[union-attr]
                }
            if not equal_sizes(self.factors.sizes[EXPERT], self.experts):
                return None
            axes, slots_ = (tuple(called[letter] for letter in letters) for letters in (mask, slots))
            return _Moved(operands[1 - place], axes, operands[place], tuple(called[x] for x in given[:-1]), slots_)
        return None

    def _weights(self, moved: _Moved) -> tuple[fx.Node, fx.Node, Axes] | Refusal:
        """(the sum over experts and slots, W, the dimensions of W)."""
        value, order = self.down.result, self.down.spread[1] if self.down.spread is not None else None
        while True:
            readers = readers_of_numbers(self.reading, value)
            shape, made = example(value), example(readers[0]) if len(readers) == 1 else None
            if shape is None or made is None or order is None:
                return stopped(self.reading, value, readers)
            (reader,) = readers
            cast = self.reading.read(reader, "cast") is not None and is_float_cast(reader, value, self.floor)
            view = self.reading.read(reader, "view") is not None and equal_sizes(made.shape[-1], self.width)
            if cast or view:
                value = reader
                continue
            found = self._summed(moved, value, reader, axis_of(shape.shape, order, self.experts))
            if found is None or not self.factors.has_sizes(*found):
                return stopped(self.reading, value, readers)
            return reader, *found

    def _summed(self, moved: _Moved, value: fx.Node, reader: fx.Node, at: int | None) -> tuple[fx.Node, Axes] | None:
        """W and its dimensions, where ``reader`` sums its product with ``value`` over experts and slots."""
        call, shape = self.reading.read(reader, "matmul", "y"), example(value)
        if call is not None:
            first = self.down.spread is not None and equal_sizes(self.down.spread[1].before, 1)  # type: ignore[union-attr]
            joined = (EXPERT, SLOT) if first else (SLOT, EXPERT)
            flat_rows = call["y"] is value and shape is not None and shape.dim() == 2 and moved.slots == (SLOT,)
            if not flat_rows or rank(call["x"]) not in (2, len(moved.of_hidden) + 1):
                return None
            tokens = moved.of_hidden if rank(call["x"]) == len(moved.of_hidden) + 1 else (moved.of_hidden,)
            return call["x"], (*tokens, joined)
        labelled = two_labelled(self.reading.read(reader, "einsum", "arg1 arg2"))
        if labelled is None or at is None or value not in labelled[0]:
            return None
        operands, labels, result = labelled
        place = operands.index(value)
        mine, other = labels[place], labels[1 - place]
        rest = mine[:-1].replace(mine[at], "")
        if result[-1:] != mine[-1] or mine[-1] in other or len(rest) != len(moved.slots):
            return None
        called = {mine[at]: EXPERT, **dict(zip(rest, moved.slots, strict=True))}
        for letter, name in zip(result[:-1], moved.of_hidden, strict=False):
            if called.setdefault(letter, name) != name:
                return None
        if len(result) - 1 != len(moved.of_hidden) or any(letter not in called for letter in other):
            return None
        return operands[1 - place], tuple(called[letter] for letter in other)

    # ---- what they prove together

    def _block(self, moved: _Moved, total: fx.Node, weights: fx.Node, axes: Axes) -> tuple[Dispatch, Combine] | Refusal:
        if not self.factors.has_sizes(moved.mask, moved.axes):
            return unproved(moved.mask, "The mask that moves tokens to slots is not [tokens, experts, slots].")
        many = tuple(name for name in moved.of_hidden if not equal_sizes(self.factors.sizes[name], 1))
        moved = replace(moved, tokens=many, axes=self.factors.named(moved.axes))
        given = self.factors.terms(weights, self.factors.named(axes))
        if given is None:
            return unproved(
                weights, "The weights of the slots cannot be read as numbers times one-hots of experts and places."
            )
        masks, of_weights = self._mask_terms(moved.mask, moved.axes)
        if masks is None:
            return unproved(
                moved.mask, "The mask that moves tokens to slots cannot be read as one-hots of experts and places."
            )
        given, unread = self._some(given)
        masks, _ = self._some(masks)
        terms = [named_by_ids(term, moved.tokens, self.factors) for term in given]
        places = [named_by_ids(term, moved.tokens, self.factors) for term in masks]
        problem = self._unclear(moved, terms) or self._unclear(moved, places)
        if problem is not None:
            return problem
        known = [term for term in terms if term is not None]
        matched = self._matched(known, [term for term in places if term is not None], of_weights)
        if not matched:
            return unproved(
                moved.mask,
                "The mask that moves tokens to slots, and the weights, cannot be proved to have the same pairs.",
            )
        dropped = dropped_by_place(self.factors, moved.tokens, {*moved.tokens} - {*moved.slots}, matched)
        if isinstance(dropped, Refusal):
            return dropped
        found = [
            pairs_of(self.factors, moved.tokens, term, outside) for term, outside in zip(known, dropped, strict=True)
        ]
        values = [pair for pair in found if pair is not None]
        if len(values) < len(found):
            return unproved(weights, "The weights of the slots are not numbers of tokens and experts.")
        order = Order(self.reading, self.floor)
        hidden = order.flat(moved.hidden)
        tensor = example(hidden)
        if hidden is None or tensor is None:
            return unproved(moved.mask, "What is moved to the slots cannot be proved to be the tokens.")
        shapes = [*self.reading.casts(moved.hidden, self.floor), hidden]
        result = final_cast(self.reading, hidden, total, self.floor, shapes)
        if isinstance(result, Refusal):
            return result
        ids, numbers = beside([pair[0] for pair in values]), beside([pair[1] for pair in values])
        top_k = sum(pair[2] for pair in values)
        dispatch = Dispatch("capacity", hidden, ids, None, top_k)
        return dispatch, Combine(numbers, result[0], total, None, result[1], unread=unread)

    def _mask_terms(self, mask: fx.Node, axes: Axes) -> tuple[list[Factored] | None, bool]:
        """The terms of D, and whether it only says where the sum of them is not zero."""
        value, inner = mask, axes
        while (call := self.reading.call(value)) is not None:
            source, made = example(call.args.get("x")), example(value)
            asked = call.name == "cast" and made is not None and made.dtype == torch.bool
            asked = asked or (self.reading.read(value, "ne", "y") is not None and call["y"] in (0, False))
            above = self.reading.read(value, "gt", "y") is not None and call["y"] == 0
            if above and source is not None and source.dtype.is_floating_point:
                found = self.factors.terms(call["x"], inner)
                known = found is not None and is_not_negative(self.reading, call["x"])
                return (found if known else None), True
            if asked and source is not None and source.dtype.is_floating_point:
                return self.factors.terms(call["x"], inner), True
            moved = self.factors.moved(value, call, inner)
            if moved is None:
                break
            value, inner = moved
        return self.factors.terms(mask, axes), False

    def _unclear(self, moved: _Moved, terms: Sequence[Factored | None]) -> Refusal | None:
        """A refusal where a term is no one-hot of experts and of places for every token."""
        for term in terms:
            if term is None:
                return unproved(
                    moved.mask, "A pair of a token and an expert is not in one slot, as far as can be proved."
                )
            hot = one_of(term, "experts")
            if not are_in_range(self.reading, hot.node, self.experts):
                return Refusal(hot.node, "The expert ids cannot be proved to be in [0, number of experts).", CURE)
            chosen = [name for name in flat(hot.axes) if name not in moved.tokens]
            if len(chosen) > 1 or any(type(self.factors.sizes[name]) is not int for name in chosen):
                return unproved(hot.node, "The number of experts for each token is not known.")
            scattered = [name for name in chosen if name.startswith(CHOICES)]
            if scattered and not are_distinct(self.reading, hot.node, self.experts, self.factors.sizes[scattered[0]]):
                return Refusal(
                    hot.node, "A token may have an expert id twice, as far as can be proved, and would count once.",
                    "Take the ids from one topk over the experts.",
                )  # fmt: skip
        return None

    def _some(self, terms: Sequence[Factored]) -> tuple[list[Factored], tuple[fx.Node, ...]]:
        """The terms without those that are 0 everywhere (second choices of which none is kept), and what these read."""
        some: list[Factored] = []
        unread: list[fx.Node] = []
        for term in terms:
            nothing = {one.node for one in term if one.kind == "number" and self.factors.is_nothing(one.node)}
            if nothing and not any(map(self._may_raise, term)):
                unread += [one.node for one in term if one.kind != "places" and one.node not in nothing]
            else:
                some.append(term)
        return some, tuple(unread)

    def _may_raise(self, factor: Factor) -> bool:
        """Whether ``factor`` is a one-hot of numbers that it may have no room for."""
        if factor.kind == "experts":
            return not are_in_range(self.reading, factor.node, self.experts)
        return factor.kind == "places" and not factor.drops and not self.factors.is_nothing(factor.node)

    def _matched(self, terms: Sequence[Factored], masks: Sequence[Factored], of_weights: bool) -> list[Factored] | None:
        """For every term of W, the one of D that has its pairs; each once."""
        left, found = list(masks), []
        for term in terms:
            fits = (mask for mask in left if self._has_pairs_of(mask, term, of_weights))
            mask = next(fits, None)
            if mask is None:
                return None
            left.remove(mask)
            found.append(mask)
        return None if left else found

    def _has_pairs_of(self, mask: Factored, term: Factored, of_weights: bool) -> bool:
        """Whether ``mask`` is 1 wherever ``term`` is not zero."""
        if not self.factors.within(mask, term):
            return False
        return self.factors.within(term, mask) if of_weights else all(map(self.factors.is_mask, mask))
