"""Loops whose experts write the rows of their pairs, which code behind the loop sums over the slots:

    y[flat_ids == e] = expert_e(x_of_pairs[flat_ids == e])
    y[place] = expert_e(x[place // K])          place, = torch.where(flat_ids == e)
    y[token, slot] = expert_e(x[token])         token, slot = torch.where(ids == e)

by assignment, index_copy, index_put or scatter, or added to zeros; weighted before that, or behind the loop. And, of
places, `out.index_add_(0, place // K, expert_e(x[place // K]) * flat_weights[place, None])`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_passes.compat import number_by_a_guard
from compile_passes.patterns.ends import End, Ends, Taken, chain_of
from compile_passes.patterns.pairs import Hits, Pairs
from compile_passes.patterns.rows import BLANK, Written
from compile_passes.vocabulary import equal_sizes, example, has_shape, rank, size_of


@dataclass(frozen=True)
class PairRows:
    """``result`` has the rows of all pairs, [T * K, H] or [T, K, H], of tokens ``hidden``; ``weights``: what each was
    multiplied by, or None. Without a result the rows, which are weighted, are added to their tokens.
    """

    hidden: fx.Node
    top_k: Any
    ids: fx.Node
    result: fx.Node | None
    weights: fx.Node | None


def pair_rows(ends: Ends, pairs: Pairs, rows: Sequence[Taken], results: Sequence[End]) -> PairRows | None:
    """What experts 0, 1, ..., which take ``rows``, write."""
    reader = _PairRows(ends, pairs, rows, results)
    return reader.by_place() or reader.by_slot()


class _PairRows:
    def __init__(self, ends: Ends, pairs: Pairs, rows: Sequence[Taken], results: Sequence[End]) -> None:
        self.ends, self.pairs, self.rows, self.results = ends, pairs, rows, results
        self.order, self.reading = ends.order, ends.reading
        self.source = rows[0].source

    def by_place(self) -> PairRows | None:
        """By the number of the pair, row by row of the ids."""
        tokens = [self._token_of(row.index) for row in self.rows]
        of_tokens = [token for token in tokens if token is not None]
        if of_tokens:
            if len(of_tokens) != len(tokens) or len({number for _, number in of_tokens}) != 1:
                return None
            hidden, top_k, places = self.source, of_tokens[0][1], [place for place, _ in of_tokens]
        else:
            copies = self.order.rows(self.source)
            if copies is None or copies.perm is not None or copies.weights is not None:
                return None
            hidden, top_k, places = copies.hidden, copies.top_k, [row.index for row in self.rows]
        shape, masks = example(hidden), [self.pairs.mask_of(place) for place in places]
        found = [self.pairs.of_mask(mask, number) for number, mask in enumerate(masks) if mask is not None]
        ids = [pair[0] for pair in found if pair is not None and not pair[1]]
        held = example(ids[0]) if len(ids) == len(masks) and self.pairs.all_same(ids) else None
        if shape is None or held is None or not equal_sizes(held.numel(), shape.shape[0] * top_k):
            return None
        weighted = any(end.factor is not None for end in self.results)
        weights = self._weights_at(masks, held.numel()) if weighted else None
        if weighted and weights is None:
            return None
        written = [self._written(end) for end in self.results]
        if all(one is not None and self._are(one.index, mask) for one, mask in zip(written, masks, strict=True)):
            result = self._result(written)
            return None if result is None else PairRows(hidden, top_k, ids[0], result, weights)
        return PairRows(hidden, top_k, ids[0], None, weights) if of_tokens and weighted else None

    def by_slot(self) -> PairRows | None:
        """By token and slot."""
        shape = example(self.source)
        found = [self.pairs.hits(row.index, number) for number, row in enumerate(self.rows)]
        hits = [one for one in found if one is not None and not one.alone and one.dims == 1 and one.routed is None]
        if shape is None or len(hits) != len(found) or any(hit.limit is not None or hit.single for hit in hits):
            return None
        ids = example(hits[0].ids)
        if ids is None or ids.dim() != 2 or not self.pairs.all_same([hit.ids for hit in hits]):
            return None
        written = [self._written(end) for end in self.results]
        if any(one is None or not self._are_pairs(one.index, hit) for one, hit in zip(written, hits, strict=True)):
            return None
        result, weights = self._result(written), None
        if result is None or not has_shape(self.reading.operand(result), *ids.shape, shape.shape[-1]):
            return None
        if any(end.factor is not None for end in self.results):
            given = [self.pairs.weights_at(end.factor, hit, n)
                     for n, (end, hit) in enumerate(zip(self.results, hits, strict=True))]  # fmt: skip
            nodes = [None if one is None or one.scores else one.node for one in given]
            if not self.pairs.all_same(nodes):
                return None
            weights = nodes[0]
        return PairRows(self.source, ids.shape[1], hits[0].ids, result, weights)

    def _token_of(self, index: Any) -> tuple[Any, int] | None:
        """(place, K) of the tokens ``place // K``, which may be looked up in a list of all pairs'."""
        if rank(index) != 1:
            return None
        call = self.reading.read(self.order.bare(index), "floordiv truncdiv", "y")
        if call is not None:
            top_k = number_by_a_guard(size_of(call["y"]))
            return None if top_k is None or top_k < 1 else (call["x"], top_k)
        found = self._taken_at(self.order.bare(index))
        known = None if found is None else self.order.positions(found[0])
        if found is None or known is None or known.kind != "token" or known.perm is not None:
            return None
        return (found[1], known.top_k) if type(known.top_k) is int else None

    def _taken_at(self, value: Any) -> tuple[fx.Node, Any] | None:
        """(source, place) of entries of a vector, in any shape."""
        call = self.reading.read(value, "index fancy", "index")
        index = None if call is None else call["index"]
        parts = [part for part in (index if isinstance(index, list | tuple) else [index]) if part is not None]
        return (call["x"], parts[0]) if call is not None and len(parts) == 1 and rank(call["x"]) == 1 else None

    def _written(self, end: End) -> Written | None:
        """What ``end`` is written into; or is added to, where no row is twice."""
        for found in (self.order.placed(end.reader), self.order.added(end.reader)):
            if found is not None and found.rows is end.value:
                return found._replace(index=self.order.by_row(found))
        return None

    def _are(self, index: Any, mask: Any) -> bool:
        """Whether ``index`` lists the places of ``mask``, or is it."""
        found = self.pairs.mask_of(index) if isinstance(index, fx.Node) else None
        return found is not None and self.reading.same(found, mask)

    def _are_pairs(self, index: Any, hits: Hits) -> bool:
        """Whether ``index`` has the token and the slot of every pair of ``hits``, in their order."""
        if not isinstance(index, list | tuple) or len(index) != 2:
            return False
        return all(
            self.pairs.lists(part, hits, at) for part, at in zip(index, (hits.token, 1 - hits.token), strict=True)
        )

    def _result(self, written: Sequence[Written | None]) -> fx.Node | None:
        """What has all rows. Every row is written, so that what was there before counts where rows are added alone."""
        steps = self.ends.in_order(self.results, written)
        chain = chain_of(None if one is None else (one.start, end.reader) for end, one in steps)
        if chain is None or not self.ends.is_wide(chain[0]):
            return None
        sums = any(self.order.placed(end.reader) is None for end in self.results)
        blank = self.reading.named(self.reading.strip(chain[0]), *BLANK) is not None
        return chain[1] if (self.reading.is_zeros(chain[0]) if sums else blank) else None

    def _weights_at(self, masks: Sequence[Any], count: Any) -> fx.Node | None:
        """The weights of all pairs, ``count``, that every expert takes at its places."""
        sources: list[Any] = []
        for end, mask in zip(self.results, masks, strict=True):
            value = None if end.factor is None else self.reading.uncast(end.factor, self.order.floor)
            found = self._taken_at(value)
            if found is None or not self._are(found[1], mask):
                return None
            sources.append(found[0])
        return self.order.weights_of(sources[0], count, None) if self.pairs.all_same(sources) else None
