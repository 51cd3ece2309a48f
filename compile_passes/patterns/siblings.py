"""One expert after the other: products with slices ``w[e]`` of one stacked weight, unrolled by a loop over e.

An expert is a chain: rows, its products, its results. E such chains, one for every e and alike in everything but e, are
a block where their results meet in one sum, in one of these ways:

    all tokens      out = out + scores[:, e, None] * expert_e(x)          or stacked, then picked from
    rows of pairs   token, slot = torch.where(ids == e)
                    out.index_add_(0, token, expert_e(x[token]) * weights[token, slot, None])
    rows put back   y[ids == e] = expert_e(x_of_pairs[ids == e]), then weighted and summed over the slots
    rows of slots   torch.stack([expert_e(rows[e]) ...]) of rows that were moved to [E, C]
    sorted rows     torch.cat([expert_e(rows.split(counts)[e]) ...])

Whose rows these are, and what weighs them, is the business of `pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast, narrower
from compile_passes.match import Body, Combine, Dispatch, Made, Product, Refusal, Spread, Weight, in_words
from compile_passes.patterns.activation import of_rows_and_bias, recognise_body
from compile_passes.patterns.capacity import recognise_capacity
from compile_passes.patterns.chains import Expert
from compile_passes.patterns.combine import final_cast, recognise_combine
from compile_passes.patterns.counts import counts_of
from compile_passes.patterns.dense import recognise_dense
from compile_passes.patterns.ends import End, Ends, Entry, Scale, Step, chain_of
from compile_passes.patterns.ids import are_distinct, are_in_range
from compile_passes.patterns.limits import same_limit, within_limit
from compile_passes.patterns.pair_rows import PairRows, pair_rows
from compile_passes.patterns.pairs import Chosen, Hits, Pairs, no_loop
from compile_passes.patterns.routed import routed_rows
from compile_passes.patterns.rows import Order, entry_of, sorts
from compile_passes.patterns.selection import Selection, without_zeros
from compile_passes.patterns.slices import all_rows, cut_up, parts_of, slices_of
from compile_passes.patterns.slots import dropped_unless
from compile_passes.reading import Reading
from compile_passes.vocabulary import equal_sizes, example, has_shape, rank, same_shape

_ANY, _CAST, _SCALED = torch.ops.aten.any.dim, torch.ops.aten.to.dtype, torch.ops.aten.mul.Scalar
_TAKEN, _TIMES = torch.ops.aten.index_select.default, torch.ops.aten.mul.Tensor
_RESHAPE = torch.ops.aten.reshape.default


@dataclass(frozen=True)
class Loop:
    """A block that runs one expert after the other."""

    ups: list[Product]
    down: Product
    body: Body
    dispatch: Dispatch
    combine: Combine


def recognise_loop(reading: Reading, experts: Sequence[Expert]) -> Loop | Refusal:
    """The block that ``experts`` are, or why they are none."""
    return _Loop(reading, experts).block()


class _Loop:
    def __init__(self, reading: Reading, experts: Sequence[Expert]) -> None:
        self.reading, self.experts, self.first = reading, experts, experts[0]
        stacked, result = example(self.first.down.weight.node), example(self.first.down.result)
        self.count: Any = None if stacked is None else stacked.shape[0]
        self.floor = self.first.down.dtype
        self.width: Any = None if result is None else result.shape[-1]
        self.order = Order(reading, self.floor)
        self.ups: list[Product] = []
        self.inside: list[fx.Node | None] = []  # what multiplies each expert's rows between the products
        self.ended: list[Expert] = []  # the expert of each end
        # What the results may be rounded to: the hidden states' own dtype may be narrower than that of the weights.
        self.wide = self.floor
        self.ends = Ends(self.order, self.wide)

    def block(self) -> Loop | Refusal:
        numbers = [expert.number for expert in self.experts]
        slots = len(numbers) // self.count
        if self.count < 2 or slots < 1 or sorted(numbers) != sorted([*range(self.count)] * slots):
            return self._no(f"The loop runs {len({*numbers})} of {self.count} experts, or some of them twice.")
        body = self._body()
        if isinstance(body, Refusal):
            return body
        self.ups = [replace(up, weight=self._of_count(up)) for up in self.ups]
        if any(up.bias is not None and up.weight.experts is not None for up in self.ups):
            return self._no("The stacked weights, with a bias, are of more experts than the loop runs.")
        rows = example(self.reading.uncast(self.ups[0].rows, self.floor))
        self.wide = self.floor if rows is None else narrower(rows.dtype, self.floor)
        self.ends = Ends(self.order, self.wide)
        reached = [
            (expert, self.ends.of(expert.down.result, inside))
            for expert, inside in zip(self.experts, self.inside, strict=True)
        ]
        followed = [end for _, found in reached for end in found]
        self.ended = [expert for expert, found in reached for _ in found]
        ends = [end for end in followed if end is not None]
        whole = len(ends) == len(followed) and self._are_scaled_alike(ends)
        plain = [self._of_all_tokens, self._of_slots, self._of_slices] if whole and ends[0].scale == 1 else []
        by_row = [self._of_rows, self._of_split_pairs] if whole else []
        ways = [*plain, *by_row] if len(ends) == self.count else []
        refusal: Refusal | None = None
        for way in [*ways, *([self._slot_by_slot] if plain else [])]:
            found = way(ends)
            if isinstance(found, Refusal):
                refusal = refusal or found
            elif found is not None:
                return Loop(self.ups, self.first.down, body, *found)
        return (
            refusal
            or self._tokens_of_experts()
            or self._no(
                "The rows that an expert of the loop takes, or what becomes of its results, are no known way to route: "
                "neither all tokens times its weights, nor the rows of torch.where(ids == e), added or assigned back."
            )
        )

    def _are_scaled_alike(self, ends: Sequence[End]) -> bool:
        """Whether one number multiplies all results, or those of every expert its own entry of one tensor [E]."""
        scales = [end.scale for end in ends]
        entries = [scale for scale in scales if isinstance(scale, Entry)]
        if not entries:
            return len({*scales}) == 1
        source = entries[0].source
        own = [Entry(source, expert.number) for expert in self.ended]
        return entries == own and has_shape(source, self.count)

    def _tokens_of_experts(self) -> Refusal | None:
        """The refusal of experts that choose their tokens: every one takes those of its row of a list of tokens."""
        rows = [row for row in map(self.ends.taken, self.experts) if row is not None]
        listed = [entry_of(self.reading, self.order.bare(row.index)) for row in rows if isinstance(row.index, fx.Node)]
        lists = [one for one in listed if one is not None]
        shape = example(lists[0][0]) if lists else None
        if len(lists) != self.count or shape is None or shape.dtype != torch.int64:
            return None
        if [one[1:] for one in lists] != [(0, expert.number) for expert in self.experts]:
            return None
        if any(one[0] is not lists[0][0] for one in lists) or not equal_sizes(shape.shape[0], self.count):
            return None
        return Refusal(
            self.first.down.anchor,
            f"Experts choose their tokens here, by {in_words(lists[0][0])}: a token has as many experts as chose it.",
            "Nothing to do: what is fused are the experts that every token chose, of which all have as many.",
        )

    def _of_count(self, up: Product) -> Weight:
        """The weight of a first product, which may be stacked with more than the experts that the second one has."""
        stacked = example(up.weight.node)
        more = stacked is not None and not equal_sizes(stacked.shape[0], self.count)
        return replace(up.weight, experts=self.count) if more else up.weight

    def _no(self, reason: str) -> Refusal:
        return no_loop(self.first.down.anchor, reason)

    def _pairs(self, tokens: Any) -> Pairs:
        return Pairs(self.order, tokens, self.count, self.first.down.anchor)

    def _body(self) -> Body | Refusal:
        """What lies between the products, if it is the same for every expert."""
        bodies: list[Body] = []
        for expert in self.experts:
            results = [up.result for up in expert.ups]
            found = recognise_body(self.reading, expert.down.rows, results, self.floor)
            if isinstance(found, Refusal):
                return found
            if found.of_rows is not None and expert.down.bias is not None:
                return of_rows_and_bias(found.of_rows)
            self.inside.append(None if found.of_rows is None else found.of_rows.weights)
            ups = [next(up for up in expert.ups if up.result is source) for source in found.sources]
            self.ups = self.ups or ups
            alike = [(up.weight, up.bias, up.dtype) for up in ups] == [
                (up.weight, up.bias, up.dtype) for up in self.ups
            ]
            alike = alike and expert.down.dtype == self.first.down.dtype  # one of them under autocast
            if not alike or len(ups) != len(expert.ups) or expert.down.bias is not self.first.down.bias:
                return self._no(
                    "The experts of the loop are not alike: one of them has a bias, a product, or a dtype to multiply "
                    "in, that another has not."
                )
            if bodies and found.body != bodies[0]:
                return self._no("The experts of the loop have other activations.")
            bodies.append(found.body)
        return bodies[0]

    # ---- all tokens for every expert

    def _of_all_tokens(self, ends: Sequence[End]) -> tuple[Dispatch, Combine] | Refusal | None:
        roots = {self.reading.uncast(up.rows, self.floor) for expert in self.experts for up in expert.ups}
        hidden = self.order.flat(self.ups[0].rows) if len(roots) == 1 else None
        tensor = example(hidden)
        if hidden is None or tensor is None:
            return None
        pairs = self._pairs(prod(tensor.shape[:-1]))
        if self.reading.named(ends[0].reader, "stack", "cat") is not None:
            return self._stacked(ends)
        if self.reading.named(ends[0].reader, "where") is not None:
            return self._chosen(pairs, hidden, ends)
        found = self.ends.added_up([end.value for end in ends])
        if found is None:
            return None
        total, start = found
        if any(end.mask is not None for end in ends):
            kept = [pairs.of_mask(end.mask, number, end.others) for number, end in enumerate(ends)]
            ids = [pair[0] for pair in kept if pair is not None and not pair[1]]
            one = len(ids) == len(ends) and all(map(pairs.one_each, ids)) and start is None
            return self._one_expert(pairs, hidden, ids, [end.factor for end in ends], total) if one else None
        selection = pairs.selection([end.factor for end in ends])
        return selection if isinstance(selection, Refusal) else self._combined(hidden, selection, total, start)

    def _combined(
        self, hidden: fx.Node, selection: Selection, total: fx.Node, start: fx.Node | None, *views: fx.Node
    ) -> tuple[Dispatch, Combine] | Refusal:
        """The block of ``hidden``, whose sum ``total``, added to ``start``, may have the shape of one of the views."""
        shapes = [
            shape for view in (self.ups[0].rows, hidden, *views) for shape in self.reading.casts(view, self.floor)
        ]
        result = final_cast(self.reading, hidden, total, self.wide, shapes)
        if isinstance(result, Refusal):
            return result
        if result[1] is not None and start is not None:
            return self._no("The results are added to a tensor that is not [tokens, hidden].")
        dispatch = Dispatch("loop", hidden, selection.ids, None, selection.top_k)
        return dispatch, Combine(selection.weights, result[0], total, start, result[1])

    def _stacked(self, ends: Sequence[End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """Results of all experts as one tensor, from which scores or ids pick."""
        collected = self._collected(ends)
        if collected is None:
            return None
        reader, spread, turned = collected
        ups = [replace(up, spread=(None, spread)) for up in self.ups]
        down = replace(self.first.down, result=reader, spread=(spread, spread))
        return recognise_dense(self.reading, ups, down, self.floor, None, turned)

    def _collected(self, ends: Sequence[End]) -> tuple[fx.Node, Spread, bool] | None:
        """What puts the results of all experts beside each other, their order in it, and whether it is [..., H, E]."""
        reader, result = ends[0].reader, example(ends[0].value)
        call, shape = self.reading.read(reader, "stack cat", "dim"), example(reader)
        values = call["x"] if call is not None else None
        if call is None or result is None or shape is None or not isinstance(values, list | tuple):
            return None
        dim = call["dim"] % shape.dim()
        if [*values] != [end.value for end in ends] or any(end.factor or end.mask for end in ends):
            return None
        if call.name == "cat":  # of [..., 1, ..., H]
            if not equal_sizes(result.shape[dim], 1):
                return None
            result = result.squeeze(dim)
        turned = dim == result.dim()
        return reader, Spread(prod(result.shape[: -1 if turned else dim]), prod(result.shape[dim:-1])), turned

    # ---- rows of the slots of every expert

    def _of_slots(self, ends: Sequence[End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """Every expert takes its part of rows [.., E, .., H] that others made, and the results are put together."""
        parts = [self._part(up.rows, expert.number) for expert in self.experts for up in expert.ups]
        collected = self._collected(ends) if parts[0] is not None else None
        if collected is None or collected[2] or parts[0] is None or any(part != parts[0] for part in parts):
            return None
        source, dim = parts[0]
        shape = example(source).shape  # type: ignore[union-attr]
        order = Spread(prod(shape[:dim]), prod(shape[dim + 1 : -1]))
        ups = [replace(up, rows=source, spread=(order, order)) for up in self.ups]
        down = replace(self.first.down, result=collected[0], spread=(order, collected[1]))
        return recognise_capacity(self.reading, ups, down, self.floor)

    def _part(self, rows: fx.Node, number: int) -> tuple[fx.Node, int] | None:
        """What ``rows`` are entry ``number`` of along a dimension of E, and which dimension."""
        found = entry_of(self.reading, self.reading.uncast(rows, self.floor))
        shape = None if found is None else example(found[0])
        if found is None or shape is None or found[2] != number or not equal_sizes(shape.shape[found[1]], self.count):
            return None
        return found[:2] if found[1] < shape.dim() - 1 else None

    def _chosen(
        self, pairs: Pairs, hidden: fx.Node, ends: Sequence[End]
    ) -> tuple[Dispatch, Combine] | Refusal | None:  # fmt: skip
        """``out = where(ids == e, expert_e(x), out)`` with one expert for each token."""
        ids: list[fx.Node] = []
        steps: list[Step] = []
        for number, end in enumerate(ends):
            call = self.reading.read(end.reader, "where", "mask y")
            pair = None if call is None else pairs.of_mask(call["mask"], number)
            if call is None or pair is None or pair[1] or call["x"] is not end.value or end.mask is not None:
                return None
            if not self.ends._is_by_row(call["mask"], end.value) or not same_shape(end.reader, end.value):
                return None
            if not pairs.one_each(pair[0]) or example(call["y"]) is None:
                return None
            ids.append(pair[0])
            steps.append((call["y"], end.reader))
        chain = chain_of(steps)
        return None if chain is None else self._one_expert(pairs, hidden, ids, [end.factor for end in ends], chain[1])

    def _one_expert(
        self, pairs: Pairs, hidden: fx.Node, ids: Sequence[fx.Node], weights: Sequence[Any], total: fx.Node,
        *views: fx.Node,
    ) -> tuple[Dispatch, Combine] | Refusal | None:  # fmt: skip
        """Every token has the result of its one expert in ``total``: weighted before, or after it."""
        if not pairs.all_same(ids):
            return None
        if all(weight is None for weight in weights):
            total, weight = self._weighted_after(total)
            if weight is None:
                return self._no("The experts' results are taken without routing weights.")
        elif pairs.all_same(weights):
            weight = weights[0]
        else:
            return None
        weight = self.reading.uncast(weight, self.floor)
        if not pairs.one_each(weight):
            return None
        if not are_in_range(self.reading, ids[0], self.count):
            return Refusal(
                ids[0], "The expert ids cannot be proved to be in [0, number of experts), and a token of no expert "
                "would keep what was there.", "Take the ids from topk, max or argmax over the experts.",
            )  # fmt: skip
        return self._combined(hidden, Selection(ids[0], weight, 1), total, None, *views)

    def _weighted_after(self, value: fx.Node) -> tuple[fx.Node, Any]:
        """What follows the results of all experts up to their weights, and these."""
        while len(readers := self.reading.readers(value)) == 1:
            (reader,) = readers
            made, call = example(reader), self.reading.read(reader, "mul cast view", "y")
            if call is None or made is None:
                break
            if call.name == "mul":
                factor = self.ends.factor(reader, value)
                return (value, None) if factor is None else (reader, factor)
            if call.name == "cast" and not is_float_cast(reader, value, self.wide):
                break
            if call.name == "view" and not equal_sizes(made.shape[-1], self.width):
                break
            value = reader
        return value, None

    # ---- slices of sorted rows

    def _of_slices(self, ends: Sequence[End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """Every expert takes its slice of the sorted rows, and the results are put behind each other."""
        joined = parts_of(self.reading, ends[0].reader)
        cuts = {slices_of(self.reading, [expert.ups[n].rows for expert in self.experts], self.floor)
                for n in range(len(self.ups))}  # fmt: skip
        cut = cuts.pop()
        if cut is None or cuts or joined is None or list(joined) != [end.value for end in ends]:
            return None
        if any(end.reader is not ends[0].reader or end.mask for end in ends):
            return None
        weights = None
        if any(end.factor is not None for end in ends):
            given = slices_of(self.reading, [self.reading.strip(end.factor) for end in ends], self.floor)
            if given is None or given.sizes != cut.sizes:
                return None
            weights = given.rows
        self.ups = [cut_up(up, cut) for up in self.ups]
        result = all_rows(self.reading, ends[0].reader, cut.rows)
        down = replace(cut_up(self.first.down, cut), result=result)
        return routed_rows(self.reading, self.ups, down, self.floor, weights)

    def _of_split_pairs(self, ends: Sequence[End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """Every expert takes the tokens in its slice of the sorted pairs, and adds its results to them."""
        rows = [row for row in map(self.ends.taken, self.experts) if row is not None]
        if len(rows) != len(ends) or any(end.mask or end.factor is None or end.scale != 1 for end in ends):
            return None
        source, indices = rows[0].source, [row.index for row in rows]
        tokens = slices_of(self.reading, indices, self.floor) if rank(source) == 2 else None
        by = self.order.positions(tokens.rows) if tokens is not None else None
        ids = sorts(self.reading, by.perm) if by is not None and by.perm is not None else None
        if tokens is None or by is None or by.kind != "token" or ids is None:
            return None
        given = slices_of(self.reading, [self.reading.strip(end.factor) for end in ends], self.floor)
        if any(row.source is not source for row in rows) or given is None or given.sizes != tokens.sizes:
            return None
        pairs, shape = example(ids), example(source)
        weights = self.order.weights_of(given.rows, None if pairs is None else pairs.numel(), by.perm)
        added = self.ends.added_to_tokens(ends, indices)
        if weights is None or added is None or pairs is None or shape is None:
            return None
        if not equal_sizes(pairs.numel(), shape.shape[0] * by.top_k):
            return None
        dispatch = Dispatch("loop", source, ids, by.perm, by.top_k)
        wrong = counts_of(self.order, tokens.counts, dispatch, self.count)
        if wrong is not None:
            return wrong
        total, start, once = added
        if once and by.top_k > 1 and not are_distinct(self.reading, ids, self.count, by.top_k):
            return None
        self.ups = [replace(up, sizes=tokens.sizes) for up in self.ups]
        return self._combined(source, Selection(ids, weights, by.top_k), total, start, rows[0].indexed)

    # ---- rows of the tokens that an expert gets

    def _of_rows(self, ends: Sequence[End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """Rows of every expert's pairs, or tokens, by the places where a mask is set."""
        rows = [row for row in map(self.ends.taken, self.experts) if row is not None]
        if len(rows) != len(ends) or any(end.mask is not None for end in ends):
            return None
        source, shape = rows[0].source, example(rows[0].source)
        if shape is None or not all(self.reading.same(row.source, source) for row in rows):
            return None
        indices = [row.index for row in rows]
        pairs = self._pairs(prod(shape.shape[:-1]))
        written = pair_rows(self.ends, pairs, rows, ends) if shape.dim() == 2 and ends[0].scale == 1 else None
        if written is not None and written.result is not None:
            return self._by_pair(written, written.result)
        if written is not None:
            return self._added_by_pair(written, self.ends.added_to_tokens(ends, indices), rows[0].indexed)
        hits = [hit for number, index in enumerate(indices) if (hit := pairs.hits(index, number)) is not None]
        if len(hits) != len(ends) or not pairs.all_same([hit.ids for hit in hits]):
            return None
        ids, alone = hits[0].ids, hits[0].alone
        limit = hits[0].limit
        if any(hit.alone != alone or not same_limit(hit.limit, limit) for hit in hits):
            return None
        weighed = [pairs.weights_at(end.factor, hit, n) for n, (end, hit) in enumerate(zip(ends, hits, strict=True))]
        weights = [None if one is None else one.node for one in weighed]
        routed, scale = hits[0].routed, ends[0].scale
        if any(hit.routed is not routed for hit in hits) or (routed is not None and limit is not None):
            return None
        one_each = alone and pairs.one_each(ids) and scale == 1 and routed is None
        total = self.ends.put_in_turn(ends, indices, limit is None) if one_each else None
        bare = [limit is None and end.factor is None for end in ends]  # a token beyond the limit would be 0 * weight
        if total is not None and all(none or weight for none, weight in zip(bare, weights, strict=True)):
            put = self._one_expert(pairs, source, [ids], weights, total, rows[0].indexed)
            return self._limited(hits[0], put)
        if ends[0].factor is None and same_shape(ends[0].reader, ends[0].value):
            return Refusal(
                ends[0].reader, "An expert's results are not weighted as they come out of its last product: "
                f"{in_words(ends[0].reader)} takes them first.",
                "Weight them first, or compute the layer with moe_ops.prepare, experts and finalize, of which the last "
                "two have a place between them for what becomes of an expert's rows, such as a norm.",
            )  # fmt: skip
        if weighed[0] is None or not pairs.all_same(weights) or len({one.scores for one in weighed if one}) != 1:
            cure = "Multiply by topk_weights[token, slot, None], with token, slot = torch.where(ids == e)."
            return Refusal(
                ends[0].factor or ends[0].value,
                "What multiplies an expert's rows cannot be proved to be their routing weights.", cure,
            )  # fmt: skip
        added = self.ends.added_to_tokens(ends, indices)
        if added is None:
            return None
        total, start, once = added
        chosen = pairs.selection_of(hits[0], weighed[0])
        if isinstance(chosen, Refusal):
            return chosen
        if once and routed is not None and not alone:
            return None
        if (once or alone) and chosen.top_k > 1 and not are_distinct(self.reading, ids, self.count, chosen.top_k):
            return Refusal(
                ids, "A token may have an expert id twice, as far as can be proved, and its row would count once.",
                "Take the ids from one topk over the experts, or add with index_add_.",
            )  # fmt: skip
        if not (once or alone) and routed is None and limit is None:
            chosen = without_zeros(self.reading, chosen, pairs.tokens, self.floor)
        block = self._limited(hits[0], self._combined(source, chosen, total, start, rows[0].indexed))
        if block is None or isinstance(block, Refusal):
            return block
        dispatch, combine = block
        if routed is not None:
            kept, pairs_ = (Made(_RESHAPE, (one, [-1, chosen.top_k])) for one in (Made(_ANY, (routed, -1)), ids))
            dispatch = replace(dispatch, ids=dropped_unless(kept, pairs_))
        if isinstance(scale, Entry) and not are_in_range(self.reading, ids, self.count):
            return Refusal(
                ids, "The expert ids cannot be proved to be in [0, number of experts), of which every one has a scale.",
                "Take the ids from topk, max or argmax over the experts.",
            )  # fmt: skip
        if scale != 1:
            combine = replace(combine, weights=self._scaled(chosen, scale, weighed[0].node))
        return dispatch, combine

    def _limited(
        self, hits: Hits, block: tuple[Dispatch, Combine] | Refusal | None
    ) -> tuple[Dispatch, Combine] | Refusal | None:
        """``block`` without the pairs that the experts, which get as those of ``hits``, have no room for."""
        if block is None or isinstance(block, Refusal) or hits.limit is None:
            return block
        dispatch, combine = block
        ids = Made(_RESHAPE, (dispatch.ids, [-1, dispatch.top_k]))
        kept = within_limit(ids, dispatch.top_k, self.count, hits.limit, hits.listed_by)
        return replace(dispatch, ids=dropped_unless(kept, ids)), combine

    def _scaled(self, chosen: Selection, scale: Scale, given: fx.Node) -> Made:
        """``scale`` times routing weights, in no fewer bits than the original has for their product with the rows.

        Args:
            given: the weights as the graph has them.
        """
        held, weights = example(given), chosen.weights
        wide = torch.promote_types(self.floor if held is None else held.dtype, torch.float32)
        wide = torch.promote_types(wide, self.floor)
        if held is not None:
            weights = Made(_CAST, (weights, wide, False, False, None))
        if not isinstance(scale, Entry):
            return Made(_SCALED, (weights, scale))
        ids = Made(_CAST, (Made(_RESHAPE, (chosen.ids, [-1])), torch.int64, False, False, None))
        own = Made(_CAST, (Made(_TAKEN, (scale.source, 0, ids)), wide, False, False, None))
        rows = [-1, chosen.top_k]
        return Made(_TIMES, (Made(_RESHAPE, (weights, rows)), Made(_RESHAPE, (own, rows))))

    # ---- one slot after the other

    def _slot_by_slot(self, ends: Sequence[End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """A loop over the slots, and one over the experts, whichever is inside: every pair is added by its own step."""
        roots = {self.reading.uncast(up.rows, self.floor) for expert in self.experts for up in expert.ups}
        hidden = self.order.flat(self.ups[0].rows) if len(roots) == 1 else None
        tensor = example(hidden)
        chosen: list[Chosen | None] = []
        added: tuple[fx.Node, fx.Node | None] | None = None
        views: list[fx.Node] = []
        if hidden is not None and tensor is not None:
            pairs = self._pairs(prod(tensor.shape[:-1]))
            chosen = [
                pairs.chosen(end.mask, end.others, end.factor, expert.number)
                for end, expert in zip(ends, self.ended, strict=True)
            ]
            added = self.ends.added_up([end.value for end in ends])
        else:
            rows = [row for row in map(self.ends.taken, self.ended) if row is not None]
            shape = example(rows[0].source) if len(rows) == len(ends) else None
            if shape is None or any(row.source is not rows[0].source for row in rows):
                return None
            hidden, views = rows[0].source, [rows[0].indexed]
            pairs = self._pairs(prod(shape.shape[:-1]))
            chosen = [
                None
                if end.mask is not None
                else pairs.chosen_at(row.index, end.factor, expert.number, shape.shape[:-1])
                for end, row, expert in zip(ends, rows, self.ended, strict=True)
            ]
            total = self.ends.added_to_tokens(ends, [row.index for row in rows])
            added = None if total is None else total[:2]
        found = [one for one in chosen if one is not None]
        if added is None or len(found) < len(chosen):
            return None
        selection = pairs.beside([expert.number for expert in self.ended], found)
        return selection if isinstance(selection, Refusal) else self._combined(hidden, selection, *added, *views)

    def _added_by_pair(
        self, found: PairRows, added: tuple[fx.Node, fx.Node | None, bool] | None, view: fx.Node
    ) -> tuple[Dispatch, Combine] | Refusal | None:
        """Every expert adds the rows of its pairs to their tokens, once each where a token's rows overwrite another."""
        if added is None or found.weights is None:
            return None
        total, start, once = added
        if once and found.top_k > 1 and not are_distinct(self.reading, found.ids, self.count, found.top_k):
            return None
        return self._combined(found.hidden, Selection(found.ids, found.weights, found.top_k), total, start, view)

    def _by_pair(self, found: PairRows, result: fx.Node) -> tuple[Dispatch, Combine] | Refusal:
        """Every expert writes the rows of its pairs; weighted and summed over the slots as anywhere."""
        if not are_in_range(self.reading, found.ids, self.count):
            return Refusal(
                found.ids, "The expert ids cannot be proved to be in [0, number of experts), and rows of no expert "
                "would not be written.", "Take the ids from topk over the experts.",
            )  # fmt: skip
        dispatch = Dispatch("loop", found.hidden, found.ids, None, found.top_k)
        down = replace(self.first.down, result=result)
        combine = recognise_combine(self.reading, dispatch, down, self.wide, found.weights)
        return combine if isinstance(combine, Refusal) else (dispatch, combine)
