"""Which pairs of a token and a slot one expert of an unrolled loop gets, and what they are weighted by.

An expert e finds its pairs by ``ids == e`` or column e of a one-hot, as a mask [T, K] or [K, T], as the places where
one is set (``torch.where``, ``nonzero``), or as a mask [T] of the tokens that have e in any slot, or whose score for e,
of scores [T, E] that are 0 but at the ids, is not 0. Its weights are taken
at those places, are the sum over the slots of ``weights * mask``, or are column e of scores for all experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from compile_passes.match import Made, Refusal, Spread, Value
from compile_passes.patterns.contraction import TRANSPOSES
from compile_passes.patterns.ids import are_distinct, are_in_range, are_integers
from compile_passes.patterns.limits import Limit, cut_short, same_limit
from compile_passes.patterns.rows import Order, counted_off, entry_of, listed_mask, numbered, place_of
from compile_passes.patterns.selection import Selection, beside_zeros, selected_of
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, rank, same_shape, single

_ATEN = torch.ops.aten
_CALL = "moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids)"


@dataclass(frozen=True)
class Hits:
    """The pairs of one expert: ``places`` lists them, ``token`` is which of its results holds tokens.

    ``alone``: tokens, whatever the slot. ``routed``: a tensor [..., E] that is not zero at the expert of a pair where
    the expert gets it, or [T, K, 1] that is not zero at such a pair; None: it gets all. ``single``: the places are
    [T, 1], and element t of the ids is the expert of token t, whatever shape they have. ``dims``: how many results
    number a token, of ids [B, S, K] two. ``limit``: the expert gets so many of them, the first that are listed; None:
    all.
    """

    ids: fx.Node
    places: fx.Node
    token: int
    alone: bool
    routed: Value | None = None
    single: bool = False
    dims: int = 1
    limit: Limit | None = None

    @property
    def listed_by(self) -> str:
        """As `within_limit` asks."""
        return "tokens" if self.alone else "slot" if self.token else "token"


class Weighed(NamedTuple):
    """Weights [T, K], or ``scores`` of all experts [T, E]: with as many experts as slots their shape does not tell."""

    node: fx.Node
    scores: bool = False


@dataclass(frozen=True)
class Slot:
    """Numbers of one slot of every token: column ``number`` of ``source`` [..., K], or all of ``source`` [T]."""

    source: fx.Node
    number: int | None


@dataclass(frozen=True)
class Chosen:
    """The ids and the weights of one slot; ``multiplied``: the weights are, by a mask of the ids."""

    ids: Slot
    weights: Slot
    multiplied: bool = False


def no_loop(anchor: fx.Node, reason: str) -> Refusal:
    """The refusal of a loop over experts at its first second product."""
    return Refusal(anchor, reason, f"Replace the loop by one call, {_CALL}.")


class Pairs:
    """Reads masks and weights of the experts of one loop.

    Args:
        order: reads orders of rows, and knows the narrowest dtype that weights may be rounded to.
        tokens, experts: T and E of the block.
        anchor: where the block is refused.
    """

    def __init__(self, order: Order, tokens: Any, experts: Any, anchor: fx.Node) -> None:
        self.order, self.reading, self.floor = order, order.reading, order.floor
        self.tokens, self.experts, self.anchor = tokens, experts, anchor
        self._asked: dict[tuple[fx.Node, str], tuple[fx.Node, Value | None] | None] = {}

    # ---- masks

    def of_mask(self, mask: Any, number: int, others: bool = False) -> tuple[fx.Node, bool] | None:
        """(ids, whether slots come before tokens) of the mask of the pairs that expert ``number`` gets, or with
        ``others`` of those that it does not get.
        """
        value = self.reading.exact(mask, 2)
        if (inverse := self.reading.read(value, "not")) is not None and self._is_boolean(value):
            return self.of_mask(inverse["x"], number, not others)
        call = self.reading.read(value, "ne" if others else "eq", "y")
        if call is not None and type(call["y"]) is int:
            return (call["x"], False) if call["y"] == number and are_integers(self.reading, call["x"]) else None
        if others:
            return None
        call = self.reading.read(value, "getslice select item", "index dim")
        if call is None or not same_shape(value, mask):
            return None
        source, index, dim = call["x"], call["index"], call["dim"]
        if call.name == "item":
            parts = self.reading.read(source, "unbind", "dim")
            source, dim = (None, None) if parts is None else (parts["x"], parts["dim"])
        index = index if isinstance(index, tuple) else (index,)
        turned = self.reading.read(source, "permute", "dims")
        if turned is not None and index == (number,) and dim in (None, 0):
            ids = self._one_hot_of(turned["x"])
            order = [axis % 3 for axis in turned["dims"] if type(axis) is int]
            known = ids is not None and rank(ids) == 2 and order in ([2, 1, 0], [2, 0, 1])
            return (ids, order == [2, 1, 0]) if ids is not None and known else None
        ids = self._one_hot_of(source)
        *lead, last = index
        whole = all(part is Ellipsis or part == slice(None) for part in lead)
        last_of = type(dim) is int and dim % (rank(source) or 1) == (rank(source) or 0) - 1
        full = len(index) == rank(source) or Ellipsis in lead or (call.name != "getslice" and last_of)
        return (ids, False) if ids is not None and whole and full and last == number else None

    def _one_hot_of(self, value: Any) -> fx.Node | None:
        """The ids of a one-hot with a class for every expert, or more: a token of another class is no expert's."""
        value = self.reading.exact(value, 2)
        numbers, shape = counted_off(self.reading, value, self.experts), example(value)
        if numbers is not None and shape is not None:
            return next((ids for ids in self.reading.reshapes(numbers) if has_shape(ids, *shape.shape[:-1])), None)
        call = self.reading.read(value, "one_hot", "num_classes")
        if call is None or type(classes := call["num_classes"]) is not int or not classes >= self.experts:
            return None
        ids: fx.Node = call["x"]
        known = any(are_in_range(self.reading, ids, count) for count in (self.experts, classes))
        return ids if known else None

    def _masked(self, mask: Any, number: int, places: fx.Node, place: int) -> Hits | None:
        """The pairs of an expert by ``one_hot(ids) * more``, permuted to [E, K, T] or [E, T, K]; ``more`` is a mask.

        Whatever it is, the product is set at no other expert than the pair's own.
        """
        value = self.reading.exact(mask, 2)
        call = self.reading.read(value, "getslice select", "index dim")
        turned = None if call is None else self.reading.read(call["x"], "permute", "dims")
        if call is None or turned is None or call["index"] not in (number, (number,)) or call["dim"] not in (None, 0):
            return None
        order = [axis % 3 for axis in turned["dims"] if type(axis) is int]
        hot, shape = turned["x"], example(turned["x"])
        if order not in ([2, 1, 0], [2, 0, 1]) or shape is None or not equal_sizes(shape.shape[-1], self.experts):
            return None
        root = self.reading.exact(hot, 2)
        while (view := self.reading.read(root, "view")) is not None:
            root = self.reading.exact(view["x"], 2)
        product, routed = self.reading.read(root, "mul", "y"), None
        whole = example(root)
        if whole is None or not equal_sizes(whole.shape[-1], self.experts):
            return None
        ids = self._one_hot_of(root)
        if product is not None:
            sides = [(product["x"], product["y"]), (product["y"], product["x"])]
            ids = next((found for one, other in sides if same_shape(one, root) and self._is_boolean(other)
                        and (found := self._one_hot_of(one)) is not None), None)  # fmt: skip
            routed = root
        single_slot = equal_sizes(shape.shape[1], 1) and ids is not None and self.one_each(ids)
        if ids is None or not (single_slot or (rank(ids) == 2 and same_shape(root, hot))):
            return None
        token = order.index(0) - 1
        return Hits(ids, places, token, False, routed, single_slot) if place == token else None

    def _is_boolean(self, value: Any) -> bool:
        held = example(self.reading.exact(value, 2))
        return held is not None and held.dtype == torch.bool

    def one_each(self, ids: fx.Node) -> bool:
        """Whether there is one expert id for each token."""
        return self._numbers(ids, self.tokens)

    def _numbers(self, value: Any, count: Any) -> bool:
        shape = example(value)
        return shape is not None and equal_sizes(shape.numel(), count)

    # ---- places

    def hits(self, index: Any, number: int) -> Hits | None:
        """The pairs of expert ``number``, if ``index`` is their tokens; of hidden states [B, S, H] one for B and S."""
        if isinstance(index, tuple):
            return self._hits_by_dims(index, number)
        value = self.order.bare(index)
        first = cut_short(self.reading, value)
        if first is not None:
            whole = self.hits(first[0], number)
            return None if whole is None or whole.limit is not None else replace(whole, limit=first[1])
        found = self._listing(value)
        return None if found is None else self._hits(found[0], number, *found[1:])

    def mask_of(self, index: Any) -> fx.Node | None:
        """The mask of one dimension whose places ``index`` lists, or which it is."""
        found = self._listing(self.order.bare(index))
        return found[0] if found is not None and rank(found[0]) == 1 and found[2] == 0 else None

    def _listing(self, value: Any) -> tuple[Any, fx.Node, int] | None:
        """(mask, what lists its places, or it, which result of that ``value`` is)."""
        call, shape = self.reading.read(value, "item", "index"), example(value)
        mask = None if call is None else listed_mask(self.reading, call["x"])
        if call is not None and mask is not None:
            return mask, call["x"], call["index"]
        if shape is not None and shape.dtype == torch.bool:
            return value, value, 0
        column = self._column_of(value)
        places, dims = (value, 1) if column is None else (column[0], 2)  # of one dimension, squeezed
        listed = self.reading.read(places, "nonzero", "as_tuple")
        if listed is None or rank(listed["x"]) != dims or listed["as_tuple"]:
            return None
        return listed["x"], places, 0 if column is None else column[1]

    def _column_of(self, value: Any) -> tuple[fx.Node, int] | None:
        """(source, number) of a column of ``source``, or of a row of what that is transposed."""
        found = entry_of(self.reading, value)
        if found is None or rank(found[0]) != 2:
            return None
        source, dim, number = found
        turned = self.reading.read(source, "t mt") if dim == 0 else None
        if turned is not None:
            return turned["x"], number
        return (source, number) if dim == 1 else None

    def _hits_by_dims(self, index: tuple[fx.Node, ...], number: int) -> Hits | None:
        """``b, s, k = torch.where(ids == e)``, of which b and s are ``index``."""
        listed = self._listed(index)
        if listed is None:
            return None
        (places, mask), dims = listed, len(index)
        found = self.of_mask(mask, number)
        if found is None or found[1] or rank(mask) != dims + 1 or not same_shape(found[0], mask):
            return None
        return Hits(found[0], places, 0, False, dims=dims)

    def _listed(self, index: tuple[fx.Node, ...]) -> tuple[fx.Node, Any] | None:
        """What lists the places, of which ``index`` are the first results, and the mask of the places."""
        calls = [self.reading.read(self.order.bare(part), "item", "index") for part in index]
        places = calls[0]["x"] if calls[0] is not None else None
        if any(call is None or call["x"] is not places or call["index"] != at for at, call in enumerate(calls)):
            return None
        mask = listed_mask(self.reading, places)
        return None if places is None or mask is None else (places, mask)

    def _hits(self, mask: Any, number: int, places: fx.Node, place: int) -> Hits | None:
        found, boolean = self.of_mask(mask, number), places is mask
        if found is not None:
            ids, flipped = found
            if rank(mask) == 2 and rank(ids) == 2 and not boolean:
                if not self._is_pairwise(mask, ids, flipped):
                    return None
                return Hits(ids, places, int(flipped), False) if place == int(flipped) else None
            alone = not flipped and self.one_each(ids) and (rank(mask) == 1 or boolean)
            return Hits(ids, places, 0, True) if alone and place == 0 else None
        if not boolean and (masked := self._masked(mask, number, places, place)) is not None:
            return masked
        if place == 0 and (rank(mask) == 1 or boolean) and (scored := self._by_scores(mask, number)) is not None:
            return Hits(scored[0], places, 0, True, scored[1])
        any_slot = self.reading.read(self.reading.exact(mask, 2), "any sum amax", "dim")
        found = None if any_slot is None else self.of_mask(any_slot["x"], number)
        if any_slot is None or found is None or place != 0 or not (rank(mask) == 1 or boolean):
            return None
        wanted = (0,) if found[1] else (-1, (rank(any_slot["x"]) or 0) - 1)
        fits = any_slot["dim"] in wanted and self._numbers(mask, self.tokens)
        return Hits(found[0], places, 0, True) if fits else None

    def _by_scores(self, mask: Any, number: int) -> tuple[fx.Node, Value | None] | None:
        """(ids, see `Hits.routed`) of the tokens whose score for an expert is not 0, or is more: ``scores[:, e]``, or
        ``scores[:, e] > 0``, of scores that are 0 but at the ids.
        """
        value = self.reading.exact(mask, 2)
        call = self.reading.read(value, "gt ne", "y")
        name = "ne" if call is None else call.name
        if not self._numbers(mask, self.tokens) or (call is not None and call["y"] != 0):
            return None
        scores = self._column(value if call is None else call["x"], number)
        if scores is None:
            return None
        if (scores, name) not in self._asked:  # of every expert the same
            self._asked[scores, name] = self._chosen_by(scores, name)
        return self._asked[scores, name]

    def _chosen_by(self, scores: fx.Node, name: str) -> tuple[fx.Node, Value | None] | None:
        chosen = self._selected(scores)
        if isinstance(chosen, Refusal) or not isinstance(chosen.ids, fx.Node):
            return None
        weights = chosen.weights
        if isinstance(weights, Made) and weights.operator is _ATEN.full_like.default and weights.args[1] > 0:
            return chosen.ids, None
        compare = _ATEN.gt.Scalar if name == "gt" else _ATEN.ne.Scalar
        return chosen.ids, Made(_ATEN.unsqueeze.default, (Made(compare, (weights, 0)), -1))

    def _is_pairwise(self, value: Any, ids: fx.Node, flipped: bool = False) -> bool:
        """Whether ``value`` has one for every id, by token and slot, or ``flipped``: a view may have other tokens."""
        tensor = example(ids)
        shapes = [] if tensor is None else [tuple(tensor.shape)]
        if self.one_each(ids):
            shapes.append((self.tokens, 1))
        return any(has_shape(value, *(reversed(shape) if flipped else shape)) for shape in shapes)

    def lists(self, value: Any, hits: Hits, result: int) -> bool:
        """Whether ``value`` is result ``result`` of what lists the pairs, or the mask of them."""
        value = self.order.bare(value)
        whole, limit = cut_short(self.reading, value) or (value, None)
        if not same_limit(limit, hits.limit):
            return False
        value = self.order.bare(whole)
        found = self._listing(value)
        return found is not None and found[2] == result and self.reading.same(found[1], hits.places)

    # ---- weights

    def weights_at(self, factor: Any, hits: Hits, number: int) -> Weighed | None:
        """The weights, or the scores, that ``factor`` takes at the pairs of ``hits``."""
        value = self.reading.uncast(factor, self.floor) if isinstance(factor, fx.Node) else None
        added = self.reading.read(value, "sum", "dim keepdim")
        call = self.reading.read(value if added is None else added["x"], "fancy index", "index")
        if call is None:
            return self._weights_of_rows(value, added, hits, number)
        index = call["index"]
        parts = [part for part in ([index] if isinstance(index, fx.Node) else index) if part is not None]
        if added is not None:
            return self._added_at(added, call, parts, hits, number)
        if hits.dims == 1 and list(map(place_of, parts[1:])) == [number]:  # scores[tokens, e]
            scores = self._scores(call["x"]) if rank(call["x"]) == 2 else None
            return Weighed(scores, True) if scores is not None and self.lists(parts[0], hits, hits.token) else None
        if hits.alone:
            return self._weights_of_tokens(call["x"], parts[0], hits, number) if len(parts) == 1 else None
        found = numbered(self.reading, call, hits.dims + 1)
        if found is None:
            return None
        source, parts = found
        if hits.dims > 1:
            listed = all(self.lists(part, hits, at) for at, part in enumerate(parts))
            return Weighed(self._uncast(source)) if listed else None
        if not self.lists(parts[0], hits, hits.token) or not self.lists(parts[1], hits, 1 - hits.token):
            return None
        if not self._is_pairwise(source, hits.ids):
            return None
        return Weighed(self._uncast(source))

    def _weights_of_tokens(self, source: fx.Node, place: Any, hits: Hits, number: int) -> Weighed | None:
        if self._has_one_slot(place, hits, number) and same_shape(source, place):  # weights[ids == e]
            return Weighed(self._uncast(source))
        if not self.lists(place, hits, hits.token):
            return None
        found = self.summed(source, number)
        if found is not None:
            return Weighed(found[1]) if self.reading.same(found[0], hits.ids) else None
        column = self._column(source, number)
        if column is not None:
            return Weighed(column, True)
        one = self.one_each(hits.ids) and self._numbers(source, self.tokens)
        return Weighed(self._uncast(source)) if one else None

    def _weights_of_rows(self, value: Any, added: Call | None, hits: Hits, number: int) -> Weighed | None:
        """The weights that are picked out of those [R, K] of the tokens of ``hits``: masked and added, or gathered at
        the slot of the expert.
        """
        if added is not None:
            if single(added["dim"]) not in (-1, 1) or rank(added["x"]) != 2:
                return None
            sides = self._masked_sides(self.reading.uncast(added["x"], self.floor))
            masked = (weights for weights, mask, others in sides if self._is_of_rows(mask, hits, number, others))
            weights = next(masked, None)
        else:
            call = self.reading.read(value, "gather take_along_dim", "dim index")
            if call is None or call["dim"] not in (-1, 1) or not self._is_slot_of_rows(call["index"], hits, number):
                return None
            weights = call["x"]
        source = None if weights is None else self._of_tokens(weights, hits)
        if source is None or not same_shape(source, hits.ids):
            return None
        return Weighed(self._uncast(source))

    def _uncast(self, weights: fx.Node) -> fx.Node:
        """``weights`` without casts, as far as the shape stays the same: theirs has to be that of the ids."""
        *_, inner = (node for node in self.reading.casts(weights, self.floor) if same_shape(node, weights))
        return inner  # type: ignore[no-any-return]

    def _of_tokens(self, value: Any, hits: Hits) -> fx.Node | None:
        """The tensor, of all tokens, whose entries for those of ``hits`` are ``value`` [R, K] or [R]."""
        value = self.reading.uncast(value, self.floor) if isinstance(value, fx.Node) else None
        call = self.reading.read(value, "fancy index", "index")
        if call is None or not hits.alone:
            return None
        parts = [call["index"]] if isinstance(call["index"], fx.Node) else call["index"]
        source: fx.Node = call["x"]
        return source if len(parts) == 1 and self.lists(parts[0], hits, hits.token) else None

    def _is_of_rows(self, mask: Any, hits: Hits, number: int, others: bool = False) -> bool:
        """Whether ``mask`` [R, K] is ``(ids == e)[places]`` or ``ids[places] == e``, or the inverse with ``others``."""
        if not isinstance(mask, fx.Node) or rank(mask) != 2:
            return False
        source = self._of_tokens(mask, hits)
        if source is not None:
            found = self.of_mask(source, number, others)
            return found is not None and not found[1] and self._is_of(found[0], source, hits)
        call = self.reading.read(self.reading.exact(mask, 2), "ne" if others else "eq", "y")
        ids = None if call is None or call["y"] != number else self._of_tokens(call["x"], hits)
        return ids is not None and are_integers(self.reading, ids) and self._is_of(ids, ids, hits)

    def _is_of(self, ids: fx.Node, value: fx.Node, hits: Hits) -> bool:
        """Whether ``value`` has one entry for each of ``ids``, which are those of ``hits``."""
        return same_shape(value, ids) and same_shape(ids, hits.ids) and self.reading.same(ids, hits.ids)

    def _is_slot_of_rows(self, index: Any, hits: Hits, number: int) -> bool:
        """Whether ``index`` has, for each token of ``hits``, the one slot with expert ``number``."""
        shape = example(hits.ids)
        if shape is None or not are_distinct(self.reading, hits.ids, self.experts, shape.shape[-1]):
            return False
        value = self.reading.strip(index)
        item = self.reading.read(value, "item", "index")
        if item is not None:  # the second of `(ids[places] == e).nonzero(as_tuple=True)`
            return bool(item["index"] == 1) and self._is_of_rows(listed_mask(self.reading, item["x"]), hits, number)
        source = self._of_tokens(value, hits)
        call = self.reading.read(value if source is None else self.reading.strip(source), "argmax", "dim keepdim")
        if call is None or call["dim"] not in (-1, (rank(call["x"]) or 0) - 1):
            return False
        mask = self.reading.exact(call["x"], 2)
        if source is None:
            return self._is_of_rows(mask, hits, number)
        found = self.of_mask(mask, number)
        return found is not None and not found[1] and self._is_of(found[0], mask, hits)

    def _has_one_slot(self, mask: Any, hits: Hits, number: int) -> bool:
        """Whether ``mask`` [T, K] is set once for each token of ``hits``: its expert is in no two slots."""
        found = self.of_mask(mask, number) if self._is_boolean(mask) and rank(mask) == 2 else None
        if found is None or found[1] or not same_shape(mask, found[0]) or not self.reading.same(found[0], hits.ids):
            return False
        shape = example(found[0])
        return shape is not None and are_distinct(self.reading, found[0], self.experts, shape.shape[-1])

    def _added_at(self, added: Call, call: Call, parts: Sequence[Any], hits: Hits, number: int) -> Weighed | None:
        """``(weights * (ids == e))[mask].sum(-1)``."""
        if len(parts) != 1 or single(added["dim"]) not in (-1, 1) or rank(call["x"]) != 2:
            return None
        found = self._masked_by(call["x"], number) if self.lists(parts[0], hits, hits.token) else None
        if found is None or found[2] != 1 or not self.reading.same(found[0], hits.ids):
            return None
        return Weighed(found[1])

    def summed(self, value: Any, number: int) -> tuple[fx.Node, fx.Node] | None:
        """(ids, weights) of ``(weights * (ids == e)).sum(-1)``."""
        value = self.reading.uncast(value, self.floor)
        call = self.reading.read(value, "sum", "dim keepdim")
        shape = example(call["x"]) if call is not None else None
        if call is None or shape is None or type(dim := single(call["dim"])) is not int:
            return None
        found = self._masked_by(call["x"], number)
        return found[:2] if found is not None and dim % shape.dim() == found[2] else None

    def _masked_by(self, value: fx.Node, number: int) -> tuple[fx.Node, fx.Node, int] | None:
        """(ids, weights, dimension of the slots) of weights that are 0 but in the slots with expert ``number``."""
        product, shape = self.reading.uncast(value, self.floor), example(value)
        if shape is None or not same_shape(product, value):
            return None
        for weights, mask, others in self._masked_sides(product):
            found = self.of_mask(mask, number, others)
            if found is None or not same_shape(mask, product):
                continue
            ids, flipped = found
            root = self.reading.uncast(weights, self.floor)
            if flipped:
                turned = self.reading.named(root, *TRANSPOSES)
                root = turned["x"] if turned is not None and rank(turned["x"]) == 2 else None
            known = root is not None and same_shape(root, ids)
            return (ids, root, 0 if flipped else shape.dim() - 1) if known else None
        return None

    def _masked_sides(self, product: fx.Node) -> list[tuple[Any, Any, bool]]:
        """(numbers, mask, whether they are 0 where it is set, and not where it is not), as ``product`` may be made."""
        inner = self.reading.read(product, "mul where masked_fill", "y mask value")
        if inner is None:
            return []
        if inner.name == "mul":
            return [(inner["x"], inner["y"], False), (inner["y"], inner["x"], False)]
        other = inner["y" if inner.name == "where" else "value"]
        zero = other == 0 or self.reading.is_zeros(other)
        return [(inner["x"], inner["mask"], inner.name == "masked_fill")] if zero else []

    def _column(self, value: Any, number: int) -> fx.Node | None:
        """The scores [..., E] of which ``value`` is column ``number``."""
        value = self.reading.uncast(value, self.floor)
        call = self.reading.read(value, "getslice select slice narrow item", "index dim start end length step")
        if call is None:
            return None
        if call.name == "item":
            parts = self.reading.read(call["x"], "unbind split chunk", "dim size chunks")
            if parts is None or call["index"] != number or not self._is_last(parts):
                return None
            one = parts.name == "unbind" or parts["size"] == 1 or equal_sizes(parts["chunks"], self.experts)
            return self._scores(parts["x"]) if one else None
        if call.name == "getslice":
            index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
            *lead, last = [part for part in index if part is not None]
            whole = all(part is Ellipsis or part == slice(None) for part in lead)
            full = len(lead) + 1 == rank(call["x"]) or Ellipsis in lead
            taken = last == number or last == slice(number, number + 1)
            return self._scores(call["x"]) if whole and full and taken else None
        start = call["index"] if call.name == "select" else call["start"]
        one = self._is_last(call) and type(start) is int and start == number and self._numbers(value, self.tokens)
        return self._scores(call["x"]) if one else None

    def _is_last(self, call: Call) -> bool:
        """Whether ``call`` works along the last dimension."""
        dims = rank(call["x"])
        return dims is not None and type(call["dim"]) is int and call["dim"] % dims == dims - 1

    def _scores(self, value: Any) -> fx.Node | None:
        """``value`` if it is [..., E] with a number for every token and expert."""
        shape = example(value)
        last = shape is not None and equal_sizes(shape.shape[-1], self.experts)
        return value if last and self._numbers(value, self.tokens * self.experts) else None

    # ---- what the weights of all experts come to

    def selection(self, factors: Sequence[Any]) -> Selection | Refusal:
        """The experts of every token, by what multiplies every expert's results for all tokens."""
        if any(factor is None for factor in factors):
            return no_loop(self.anchor, "The experts' results are summed without routing weights.")
        columns = [self._column(factor, number) for number, factor in enumerate(factors)]
        if columns[0] is not None and self.all_same(columns):
            return self._selected(columns[0])
        found = [self.summed(factor, number) for number, factor in enumerate(factors)]
        pairs = [pair for pair in found if pair is not None]
        ids, weights = ([pair[side] for pair in pairs] for side in (0, 1))
        if len(pairs) != len(factors) or not self.all_same(ids) or not self.all_same(weights):
            return Refusal(
                factors[0], "What multiplies an expert's results cannot be proved to be its routing weight.",
                "Multiply by (topk_weights * (topk_ids == e)).sum(-1, keepdim=True).",
            )  # fmt: skip
        chosen = self._checked(*pairs[0])
        if isinstance(chosen, Refusal) or not any(map(self._is_product, factors)):
            return chosen
        return beside_zeros(self.reading, chosen, self.experts, self.floor, [pairs[0][1]])

    def _is_product(self, factor: Any) -> bool:
        """Whether a sum over the slots is of products with a mask, and not of what was chosen by it."""
        call = self.reading.read(self.reading.uncast(factor, self.floor), "sum", "dim keepdim")
        return call is not None and self.reading.named(self.reading.uncast(call["x"], self.floor), "mul") is not None

    def selection_of(self, hits: Hits, weighed: Weighed) -> Selection | Refusal:
        """The experts of every token, by the pairs of an expert and what weighs them."""
        ids, weights = hits.ids, weighed.node
        if hits.single or (hits.alone and self.one_each(ids)):
            if self._numbers(weights, self.tokens):
                return Selection(ids, weights, 1)
            if hits.single:
                return no_loop(self.anchor, "The routing weights of one expert for each token are not [tokens, 1].")
        if not weighed.scores and same_shape(ids, weights):
            return self._checked(ids, weights)
        found = self._selected(weights)
        if isinstance(found, Refusal) and weighed.scores:  # scores[tokens, e], of tokens with that id alone
            return self._gathered(weights, ids) or found
        if isinstance(found, Selection) and not self.reading.same(found.ids, ids):
            return no_loop(
                self.anchor,
                "The rows go to other experts than those whose weights are not zero, as far as can be proved.",
            )
        return found

    def _gathered(self, scores: fx.Node, ids: fx.Node) -> Selection | None:
        """The scores of every token's own experts."""
        shape = example(ids)
        top_k = None if shape is None or shape.dim() != 2 else shape.shape[-1]
        if type(top_k) is not int or not self._numbers(ids, self.tokens * top_k):
            return None
        if not are_in_range(self.reading, ids, self.experts):
            return None
        of_tokens = Made(_ATEN.reshape.default, (scores, [-1, self.experts]))
        index = Made(_ATEN.to.dtype, (ids, torch.int64))
        return Selection(ids, Made(_ATEN.gather.default, (of_tokens, -1, index)), top_k)

    # ---- one slot alone

    def chosen(self, mask: Any, others: bool, factor: Any, number: int) -> Chosen | None:
        """The slot in which expert ``number`` is one of each token's: ``w[:, k] * (ids[:, k] == e)``, multiplied by or
        masked by; ``others``: the mask is that of the other experts.
        """
        if mask is not None:
            return self._alone(mask, factor, number, others)
        value = self.reading.uncast(factor, self.floor)
        call = self.reading.read(value, "mul where", "y mask")
        if call is None:
            return None
        multiplied = call.name == "mul"
        sides = [(call["x"], call["mask"])] if call.name == "where" and call["y"] == 0 else []
        sides += [(call["x"], call["y"]), (call["y"], call["x"])] if multiplied else []
        found = (self._alone(given, weights, number) for weights, given in sides if isinstance(given, fx.Node))
        return next((replace(one, multiplied=multiplied) for one in found if one is not None), None)

    def _alone(self, mask: Any, weights: Any, number: int, others: bool = False) -> Chosen | None:
        found, one = self.of_mask(mask, number, others), isinstance(weights, fx.Node)
        if (
            not one
            or found is None
            or found[1]
            or not self.one_each(found[0])
            or not self._numbers(weights, self.tokens)
        ):
            return None
        return Chosen(self._slot(found[0]), self._slot(self.reading.uncast(weights, self.floor)))

    def chosen_at(self, index: Any, factor: Any, number: int, shape: Sequence[Any]) -> Chosen | None:
        """As `chosen`, for the tokens, of ``shape``, that ``index`` lists, or its mask has: ``w[token, k]``, ``w[:,
        k][token]``.
        """
        if isinstance(index, tuple):
            return self._chosen_by_dims(index, factor, number, shape)
        hits = self.hits(index, number)
        value = self.reading.uncast(factor, self.floor) if isinstance(factor, fx.Node) else None
        call = self.reading.read(value, "fancy index", "index")
        if call is None or hits is None or not hits.alone or not self.one_each(hits.ids) or hits.limit is not None:
            return None
        index = call["index"]
        place, *rest = [part for part in ([index] if isinstance(index, fx.Node) else index) if part is not None]
        if not self.lists(place, hits, hits.token):
            return None
        source, ids = self.reading.uncast(call["x"], self.floor), self._slot(hits.ids)
        if not rest:
            return Chosen(ids, self._slot(source)) if self._numbers(source, self.tokens) else None
        whole = example(source)
        fits = whole is not None and equal_sizes(prod(whole.shape[:-1]), self.tokens)
        slot = place_of(rest[0]) if len(rest) == 1 else None
        return Chosen(ids, Slot(source, slot)) if fits and slot is not None else None

    def _chosen_by_dims(
        self, index: tuple[fx.Node, ...], factor: Any, number: int, shape: Sequence[Any]
    ) -> Chosen | None:
        """As `chosen_at`, for tokens of this ``shape`` [B, S] by ``b, s = torch.where(ids[..., k] == e)``: weighted by
        ``w[b, s, k]`` or ``w[..., k][b, s]``.
        """
        listed = self._listed(index)
        value = self.reading.uncast(factor, self.floor) if isinstance(factor, fx.Node) else None
        call = self.reading.read(value, "fancy index", "index")
        found = None if listed is None else self.of_mask(listed[1], number)
        if listed is None or call is None or found is None or found[1] or isinstance(call["index"], fx.Node):
            return None
        # Tokens by other dimensions than the ids and the weights have would be other tokens.
        ids, source = found[0], self.reading.uncast(call["x"], self.floor)
        if not has_shape(listed[1], *shape) or not has_shape(ids, *shape):
            return None
        parts = [part for part in call["index"] if part is not None]
        rest = parts[len(index) :]
        own = self._listed(tuple(parts[: len(index)])) if len(parts) >= len(index) else None
        if own is None or not self.reading.same(own[0], listed[0]):
            return None
        if not rest:
            return Chosen(self._slot(ids), self._slot(source)) if has_shape(source, *shape) else None
        whole, slot = example(source), place_of(rest[0]) if len(rest) == 1 else None
        fits = whole is not None and has_shape(source, *shape, whole.shape[-1])
        return Chosen(self._slot(ids), Slot(source, slot)) if fits and slot is not None else None

    def _slot(self, value: fx.Node) -> Slot:
        """``value``, one number for every token, as a column if it is one."""
        root = self.reading.strip(value)
        found = entry_of(self.reading, root)
        whole = None if found is None else example(found[0])
        of_tokens = whole is not None and equal_sizes(prod(whole.shape[:-1]), self.tokens)
        if found is None or whole is None or not of_tokens or not found[1] == whole.dim() - 1 > 0:
            return Slot(root, None)
        return Slot(self._uncast(found[0]), found[2])

    def beside(self, numbers: Sequence[int], chosen: Sequence[Chosen]) -> Selection | Refusal:
        """The experts of every token, by the slots in which each expert, of these numbers, is looked for."""
        by_expert: dict[int, list[Chosen]] = {}
        for number, one in zip(numbers, chosen, strict=True):
            by_expert.setdefault(number, []).append(one)
        first, *others = by_expert.values()
        for slots in others:
            left = list(slots)
            for one in first:
                match = next((two for two in left if self._equal(one, two)), None)
                if match is None:
                    return no_loop(self.anchor, "The experts of the loop are looked for in other slots of the tokens.")
                left.remove(match)
        ids, weights = ([getattr(one, side) for one in first] for side in ("ids", "weights"))
        selection = Selection(self._columns(ids), self._columns(weights), len(first))
        if not any(one.multiplied for one in chosen):
            return selection
        return beside_zeros(self.reading, selection, self.experts, self.floor, [slot.source for slot in weights])

    def _equal(self, one: Chosen, other: Chosen) -> bool:
        pairs = ((one.ids, other.ids), (one.weights, other.weights))
        return all(a.number == b.number and self.reading.same(a.source, b.source) for a, b in pairs)

    def _columns(self, slots: Sequence[Slot]) -> Value:
        """[..., K] of slots: what they are the columns of, in order, or these put together."""
        source, whole = slots[0].source, example(slots[0].source)
        in_order = [slot.number for slot in slots] == list(range(len(slots)))
        if in_order and whole is not None and has_shape(source, *whole.shape[:-1], len(slots)):
            if all(self.reading.same(slot.source, source) for slot in slots):
                return source
        taken = [slot.source if slot.number is None else Made(_ATEN.select.int, (slot.source, -1, slot.number))
                 for slot in slots]  # fmt: skip
        return Made(_ATEN.stack.default, ([Made(_ATEN.reshape.default, (one, [-1])) for one in taken], 1))

    def all_same(self, values: Sequence[Any]) -> bool:
        """Whether all ``values`` are provably equal numbers, and none is None."""
        return all(value is not None and self.reading.same(value, values[0]) for value in values)

    def _selected(self, scores: fx.Node) -> Selection | Refusal:
        return selected_of(self.reading, scores, self.experts, Spread(self.tokens, 1), self.floor)

    def _checked(self, ids: fx.Node, weights: fx.Node) -> Selection | Refusal:
        shape = example(ids)
        if shape is None or shape.dim() == 0 or type(shape.shape[-1]) is not int:
            return no_loop(self.anchor, "The number of experts for each token is not known.")
        top_k = shape.shape[-1]
        if not self._numbers(ids, self.tokens * top_k) or not same_shape(ids, weights):
            return no_loop(self.anchor, "The expert ids and the routing weights are not [tokens, top_k].")
        return Selection(ids, weights, top_k)
