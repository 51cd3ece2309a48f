"""One expert after the other: products with slices ``w[e]`` of one stacked weight, unrolled by a loop over e.

An expert is a chain: rows, its products, its results. E such chains, one for every e and alike in everything but e, are
a block where their results meet in one sum, in one of these ways:

    all tokens      out = out + scores[:, e, None] * expert_e(x)          or stacked, then picked from
    rows of pairs   token, slot = torch.where(ids == e)
                    out.index_add_(0, token, expert_e(x[token]) * weights[token, slot, None])
    rows by mask    y[ids == e] = expert_e(x_of_pairs[ids == e]), then weighted and summed over the slots

The scores are columns of dense scores (`selection` says which K experts they leave), or sums over the slots of
``weights * (ids == e)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast, narrower, no_narrower
from compile_passes.match import Body, Combine, Dispatch, Product, Refusal, Spread, Weight
from compile_passes.patterns.activation import recognise_body
from compile_passes.patterns.combine import final_cast, recognise_combine
from compile_passes.patterns.dense import recognise_dense
from compile_passes.patterns.experts import feeding_products
from compile_passes.patterns.ids import are_distinct, are_in_range
from compile_passes.patterns.rows import Order
from compile_passes.patterns.selection import selected_of
from compile_passes.reading import Reading
from compile_passes.safety import CREATES
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, rank, same_shape

_CALL = "moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids)"
_BLANK = ("empty_like", "zeros_like", "zeros", "empty")


@dataclass(frozen=True)
class Expert:
    """The chain of one expert: its first products, and its second one."""

    number: int
    ups: tuple[Product, ...]
    down: Product


@dataclass(frozen=True)
class Loop:
    """A block that runs one expert after the other."""

    ups: list[Product]
    down: Product
    body: Body
    dispatch: Dispatch
    combine: Combine


def find_siblings(reading: Reading) -> list[list[Expert]]:
    """The experts of every unrolled loop over stacked weights, in the order of their numbers."""
    links = {node: link for node in reading.graph.nodes if (link := _link(reading, node)) is not None}
    products = {node: link[0] for node, link in links.items()}
    groups: dict[Any, list[list[Expert]]] = {}
    for node, (down, number) in links.items():
        ups = feeding_products(reading, down, products)
        if not ups or any(links[up.anchor][1] != number for up in ups):
            continue
        ups.sort(key=lambda up: reading.order[up.anchor])
        runs = groups.setdefault((down.weight, tuple(up.weight for up in ups)), [[]])
        if any(expert.number == number for expert in runs[-1]):
            runs.append([])
        runs[-1].append(Expert(number, tuple(ups), products[node]))
    return [sorted(run, key=lambda expert: expert.number) for runs in groups.values() for run in runs]


def _link(reading: Reading, node: fx.Node) -> tuple[Product, int] | None:
    """A product of rows with the weight of one expert, and the expert's number."""
    call = reading.read(node, "linear matmul addmm", "weight bias y")
    found = None if call is None else _slice(reading, call["weight" if call.name == "linear" else "y"])
    if call is None or found is None:
        return None
    weight, number = found
    if call.name != "linear":
        weight = replace(weight, transposed=not weight.transposed)
    given = None if call["bias"] is None else _slice(reading, call["bias"], dims=2)
    if call["bias"] is not None and (given is None or given[1] != number):
        return None
    bias = None if given is None else given[0].node
    product = Product(node, call["x"], weight, weight.node, bias, None, (), node)
    readers = reading.readers(node)
    added = reading.read(readers[0], "add", "y") if len(readers) == 1 and bias is None else None
    if added is not None and same_shape(readers[0], node):
        more = _slice(reading, added["y"] if added["x"] is node else added["x"], dims=2)
        if more is not None and more[1] == number:
            product = replace(product, bias=more[0].node, result=readers[0])
    return product, number


def _slice(reading: Reading, value: Any, dims: int = 3) -> tuple[Weight, int] | None:
    """``stacked[e]``, perhaps transposed: the stack, and e."""
    value, transposed = reading.unwrap(value), False
    while dims == 3 and rank(value) == 2 and (call := reading.named(value, "transpose", "mt", "t")) is not None:
        value, transposed = reading.unwrap(call["x"]), not transposed
    call = reading.read(value, "getslice select item", "index dim")
    source: Any = call["x"] if call is not None else None
    number = call["index"] if call is not None else None
    if call is not None and call.name == "item":
        parts = reading.read(source, "unbind", "dim")
        source = parts["x"] if parts is not None and parts["dim"] == 0 else None
    elif call is not None and call.name == "select" and call["dim"] != 0:
        return None
    if isinstance(number, tuple):
        number = number[0] if all(part in (slice(None), Ellipsis) for part in number[1:]) else None
    stacked = example(source)
    if stacked is None or stacked.dim() != dims or type(number) is not int or type(stacked.shape[0]) is not int:
        return None
    return Weight(source, transposed), number % stacked.shape[0]


def recognise_loop(reading: Reading, experts: Sequence[Expert]) -> Loop | Refusal:
    """The block that ``experts`` are, or why they are none."""
    return _Loop(reading, experts).block()


@dataclass(frozen=True)
class _End:
    """What becomes of one expert's results: ``value``, multiplied by ``factor`` if at all, meets ``reader``.

    ``mask``: where the results are not replaced by zeros, if some are.
    """

    value: fx.Node
    factor: fx.Node | None
    reader: fx.Node
    mask: fx.Node | None = None


class _Loop:
    def __init__(self, reading: Reading, experts: Sequence[Expert]) -> None:
        self.reading, self.experts = reading, experts
        self.first = experts[0]
        stacked, result = example(self.first.down.weight.node), example(self.first.down.result)
        self.count: Any = None if stacked is None else stacked.shape[0]
        self.floor = torch.float64 if stacked is None else stacked.dtype
        self.wide = self.floor
        self.width: Any = None if result is None else result.shape[-1]
        self.order = Order(reading, self.floor)
        self._ups: list[Product] = []
        self._indexed: tuple[fx.Node, ...] = ()

    def block(self) -> Loop | Refusal:
        if [expert.number for expert in self.experts] != list(range(self.count)) or self.count < 2:
            return self._no(f"The loop runs {len(self.experts)} of {self.count} experts, or some of them twice.")
        body = self._body()
        if isinstance(body, Refusal):
            return body
        ends = [self._follow(expert.down.result) for expert in self.experts]
        found = self._of_all_tokens(ends) or self._of_rows(ends)
        if found is None:
            return self._no("The rows of the experts, or what becomes of their results, are no known way to route.")
        if isinstance(found, Refusal):
            return found
        ups = [replace(up, spread=None) for up in self._ups]
        return Loop(ups, self.first.down, body, *found)

    def _no(self, reason: str) -> Refusal:
        return Refusal(self.first.down.anchor, reason, f"Replace the loop by one call, {_CALL}.")

    def _body(self) -> Body | Refusal:
        """What lies between the products, if it is the same for every expert."""
        bodies: list[Body] = []
        for expert in self.experts:
            results = [up.result for up in expert.ups]
            found = recognise_body(self.reading, expert.down.rows, results, self.floor)
            if isinstance(found, Refusal):
                return found
            ups = [next(up for up in expert.ups if up.result is source) for source in found[1]]
            self._ups = self._ups or ups
            alike = [(up.weight, up.bias) for up in ups] == [(up.weight, up.bias) for up in self._ups]
            if not alike or len(ups) != len(expert.ups) or expert.down.bias is not self.first.down.bias:
                return self._no("The experts of the loop are not alike.")
            if bodies and found[0] != bodies[0]:
                return self._no("The experts of the loop have other activations.")
            bodies.append(found[0])
        return bodies[0]

    def _follow(self, value: fx.Node) -> _End | None:
        """From an expert's result to what sums or collects the results of all."""
        factor = mask = None
        while True:
            readers = [r for r in self.reading.readers(value) if self.reading.named(r, *CREATES) is None]
            if len(readers) != 1:
                return None
            (reader,), shape = readers, example(value)
            if self.reading.read(reader, "cast") is not None and is_float_cast(reader, value, self.floor_of_results):
                value = reader
            elif self.reading.read(reader, "view") is not None:
                value = reader
            elif factor is None and shape is not None and (call := self.reading.read(reader, "mul", "y")) is not None:
                factor = call["y"] if call["x"] is value else call["x"]
                if not has_shape(factor, *shape.shape[:-1], 1) or not same_shape(reader, value):
                    return None
                value = reader
            elif mask is None and (kept := self._kept_by(reader, value)) is not None:
                value, mask = reader, kept
            else:
                return _End(value, factor, reader, mask)

    def _kept_by(self, reader: fx.Node, value: fx.Node) -> fx.Node | None:
        """The mask of ``where(mask, value, 0)``."""
        call = self.reading.read(reader, "where", "mask y")
        if call is None or call["x"] is not value or type(call["y"]) not in (int, float) or call["y"] != 0:
            return None
        mask: fx.Node = call["mask"]
        return mask if same_shape(reader, value) and self._is_by_token(mask, value) else None

    def _is_by_token(self, mask: Any, value: fx.Node) -> bool:
        """Whether ``mask`` is one for all features of ``value`` [..., H], not one that is broadcast over tokens."""
        shape = example(value)
        return shape is not None and has_shape(mask, *shape.shape[:-1], 1)

    @property
    def floor_of_results(self) -> torch.dtype:
        """Results may be rounded to the dtype of the hidden states."""
        hidden = self._source_dtype()
        return self.floor if hidden is None else narrower(hidden, self.floor)

    def _source_dtype(self) -> torch.dtype | None:
        root = example(self.reading.uncast(self._ups[0].rows, self.floor))
        return None if root is None else root.dtype

    # ---- all tokens for every expert

    def _of_all_tokens(self, ends: Sequence[_End | None]) -> tuple[Dispatch, Combine] | Refusal | None:
        hidden = self._same_rows()
        tensor = example(hidden)
        if hidden is None or tensor is None or any(end is None for end in ends):
            return None
        met = [end for end in ends if end is not None]
        self.tokens = prod(tensor.shape[:-1])
        if self.reading.named(met[0].reader, "stack", "cat") is not None:
            return self._stacked(met)
        if self.reading.named(met[0].reader, "where") is not None and met[0].mask is None:
            return self._chosen(hidden, met)
        found = self._added_up([end.value for end in met])
        if found is None:
            return None
        total, start = found
        if any(end.mask is not None for end in met):
            pairs = [self._pairs(end.mask, number) for number, end in enumerate(met)]
            kept = [(pair[0], end.factor) for pair, end in zip(pairs, met, strict=True) if pair is not None]
            one = len(kept) == len(met) and all(self._one_each(ids) for ids, _ in kept) and start is None
            return self._one_expert(hidden, kept, total) if one else None
        selection = self._selection([end.factor for end in met])
        if isinstance(selection, Refusal):
            return selection
        return self._combined(hidden, selection, total, start)

    def _combined(
        self, hidden: fx.Node, selection: tuple[fx.Node, Any, int], total: fx.Node, start: fx.Node | None
    ) -> tuple[Dispatch, Combine] | Refusal:
        ids, weights, top_k = selection
        views = (self._ups[0].rows, hidden, *self._indexed)
        shapes = [shape for view in views for shape in self.reading.casts(view, self.floor)]
        output = final_cast(self.reading, hidden, total, shapes)
        if isinstance(output, Refusal):
            return output
        held = self.reading.operand(output)
        flat = has_shape(held, self.tokens, self.width)
        like = None if flat else next(shape for shape in shapes if same_shape(shape, held))
        if like is not None and start is not None:
            return self._no("The results are added to a tensor that is not [tokens, hidden].")
        if not self._one_each(ids) and top_k == 1:
            return self._no("There is not one expert id for each token.")
        return Dispatch("loop", hidden, ids, None, top_k), Combine(weights, output, total, start, like)

    def _same_rows(self) -> fx.Node | None:
        """The hidden states that every first product takes, all of them."""
        roots = {self.reading.uncast(up.rows, self.floor) for expert in self.experts for up in expert.ups}
        if len(roots) != 1:
            return None
        views = self.reading.casts(self._ups[0].rows, self.floor)
        wide = [node for node in views if (shape := example(node)) is not None and self._is_wide(shape)]
        flat = [node for node in wide if rank(node) == 2]
        found = (flat or wide)[-1:]
        return found[0] if found else None

    def _is_wide(self, shape: torch.Tensor) -> bool:
        rows = example(self._ups[0].rows)
        return rows is not None and equal_sizes(shape.shape[-1], rows.shape[-1])

    def _stacked(self, ends: Sequence[_End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """Results of all experts as one tensor, from which scores or ids pick."""
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
        if dim == result.dim():
            return None
        spread = Spread(prod(result.shape[:dim]), prod(result.shape[dim:-1]))
        ups = [replace(up, spread=(None, spread)) for up in self._ups]
        down = replace(self.first.down, result=reader, spread=(spread, spread))
        return recognise_dense(self.reading, ups, down, self.floor, None)

    def _chosen(self, hidden: fx.Node, ends: Sequence[_End]) -> tuple[Dispatch, Combine] | Refusal | None:
        """``out = where(ids == e, expert_e(x), out)`` with one expert for each token."""
        found: list[tuple[fx.Node, Any]] = []
        total: Any = None
        for number, end in enumerate(ends):
            call = self.reading.read(end.reader, "where", "mask y")
            pair = None if call is None else self._pairs(call["mask"], number)
            if (
                call is None
                or pair is None
                or call["x"] is not end.value
                or (total is not None and call["y"] is not total)
            ):
                return None
            if end.mask is not None or not self._is_by_token(call["mask"], end.value):
                return None
            if not same_shape(end.reader, end.value) or not self._one_each(pair[0]) or example(call["y"]) is None:
                return None
            found.append((pair[0], end.factor))
            total = end.reader
        return self._one_expert(hidden, found, total)

    def _one_expert(
        self, hidden: fx.Node, found: Sequence[tuple[fx.Node, Any]], total: fx.Node
    ) -> tuple[Dispatch, Combine] | Refusal | None:
        """Every token has the result of its one expert in ``total``: weighted before, or after it."""
        ids, weights = found[0]
        if any(not self.reading.same(one, ids) or (other is None) != (weights is None) for one, other in found):
            return None
        if weights is None:
            total, weights = self._weighted_after(total)
        elif any(not self.reading.same(other, weights) for _, other in found):
            return None
        if weights is None:
            return self._no("The experts' results are taken without routing weights.")
        weights = self.reading.uncast(weights, self.floor)
        given = example(weights)
        if given is None or not equal_sizes(given.numel(), self.tokens):
            return None
        if not are_in_range(self.reading, ids, self.count):
            return Refusal(
                ids, "The expert ids cannot be proved to be in [0, number of experts), and a token of no expert would "
                "keep what was there.", "Take the ids from topk, max or argmax over the experts.",
            )  # fmt: skip
        return self._combined(hidden, (ids, weights, 1), total, None)

    def _weighted_after(self, value: fx.Node) -> tuple[fx.Node, Any]:
        """What follows the results of all experts up to their weights, and these."""
        while len(readers := self.reading.readers(value)) == 1:
            (reader,), shape = readers, example(self.reading.operand(value))
            call = self.reading.read(reader, "mul cast view", "y")
            if call is None or shape is None:
                break
            if call.name == "mul":
                factor = call["y"] if call["x"] is value else call["x"]
                fits = has_shape(factor, *shape.shape[:-1], 1) and has_shape(reader, *shape.shape)
                return (reader, factor) if fits else (value, None)
            if call.name == "cast" and not is_float_cast(reader, value, self.floor_of_results):
                break
            if call.name == "view" and not equal_sizes(example(reader).shape[-1], self.width):  # type: ignore[union-attr]
                break
            value = reader
        return value, None

    def _one_each(self, ids: fx.Node) -> bool:
        shape = example(ids)
        return shape is not None and equal_sizes(shape.numel(), self.tokens)

    def _added_up(self, values: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node | None] | None:
        """The node at which all ``values`` have been added up, and the one other term there is."""
        counted = dict.fromkeys(values, 1)
        readers = {reader for value in values for reader in self.reading.readers(value)}
        waiting = sorted(readers, key=self.reading.order.__getitem__)
        rest: list[Any] = []
        for node in waiting:
            call = self.reading.read(node, "add", "y")
            if call is None or node in counted:
                return None
            terms = (call["x"], call["y"])
            counted[node] = sum(counted.get(term, 0) for term in terms if isinstance(term, fx.Node))
            rest += [term for term in terms if not (isinstance(term, fx.Node) and term in counted) and term != 0]
            if counted[node] == len(values):
                break
            waiting += [reader for reader in self.reading.readers(node) if reader not in waiting]
        else:
            return None
        total = example(node)
        if total is None or not no_narrower(total.dtype, self.floor_of_results) or len(rest) > 1:
            return None
        if not all(same_shape(value, node) for value in (*values, *rest)):
            return None
        blank = bool(rest) and self.reading.named(self.reading.strip(rest[0]), "zeros", "zeros_like") is not None
        return node, rest[0] if rest and not blank else None

    # ---- which experts

    def _selection(self, factors: Sequence[Any]) -> tuple[fx.Node, Any, int] | Refusal:
        """(ids, weights, K) of what multiplies every expert's results for all tokens."""
        if any(factor is None for factor in factors):
            return self._no("The experts' results are summed without routing weights.")
        columns = [self._column(factor, number) for number, factor in enumerate(factors)]
        if columns[0] is not None and all(
            column is not None and self.reading.same(column, columns[0]) for column in columns
        ):
            order = Spread(self.tokens, 1)
            found = selected_of(self.reading, columns[0], self.tokens, self.count, order, self.floor)
            return found if isinstance(found, Refusal) else (found.ids, found.weights, found.top_k)
        pairs = [self._weight_of_pairs(factor, number) for number, factor in enumerate(factors)]
        if pairs[0] is None or any(pair is None or not self._alike(pair, pairs[0]) for pair in pairs):
            return Refusal(
                factors[0], "What multiplies an expert's results cannot be proved to be its routing weight.",
                "Multiply by (topk_weights * (topk_ids == e)).sum(-1, keepdim=True).",
            )  # fmt: skip
        return self._checked(*pairs[0])

    def _alike(self, one: Sequence[Any], other: Sequence[Any]) -> bool:
        return all(self.reading.same(a, b) for a, b in zip(one, other, strict=True))

    def _checked(self, ids: fx.Node, weights: fx.Node) -> tuple[fx.Node, Any, int] | Refusal:
        shape = example(ids)
        if shape is None or shape.dim() == 0 or type(shape.shape[-1]) is not int:
            return self._no("The number of experts for each token is not known.")
        top_k = shape.shape[-1]
        if not equal_sizes(shape.numel(), self.tokens * top_k) or not same_shape(ids, weights):
            return self._no("The expert ids and the routing weights are not [tokens, top_k].")
        return ids, weights, top_k

    def _column(self, value: Any, number: int) -> fx.Node | None:
        """The scores [..., E] of which ``value`` is column ``number``."""
        value = self.reading.uncast(value, self.floor)
        call = self.reading.read(value, "getslice select slice narrow item", "index dim start end length step")
        if call is None:
            return None
        if call.name == "item":
            parts = self.reading.read(call["x"], "unbind split chunk", "dim size chunks")
            shape = example(parts["x"]) if parts is not None else None
            if parts is None or shape is None or call["index"] != number:
                return None
            single = parts.name == "unbind" or parts["size"] == 1 or equal_sizes(parts["chunks"], self.count)
            last = type(parts["dim"]) is int and parts["dim"] % shape.dim() == shape.dim() - 1
            return self._scores(parts["x"]) if single and last else None
        shape = example(call["x"])
        if shape is None:
            return None
        if call.name == "getslice":
            index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
            given = [part for part in index if part is not None]
            *lead, last = given
            whole = all(part is Ellipsis or part == slice(None) for part in lead)
            full = len(given) == shape.dim() or Ellipsis in lead
            taken = last == number or last == slice(number, number + 1)
            return self._scores(call["x"]) if whole and full and taken else None
        start = call["index"] if call.name == "select" else call["start"]
        last = type(call["dim"]) is int and call["dim"] % shape.dim() == shape.dim() - 1
        one = equal_sizes(example(value).numel() * self.count, shape.numel())  # type: ignore[union-attr]
        return self._scores(call["x"]) if last and one and type(start) is int and start == number else None

    def _scores(self, value: Any) -> fx.Node | None:
        shape = example(value)
        fits = shape is not None and equal_sizes(shape.shape[-1], self.count)
        return value if fits and equal_sizes(shape.numel(), self.tokens * self.count) else None  # type: ignore[union-attr]

    def _weight_of_pairs(self, value: Any, number: int) -> tuple[fx.Node, fx.Node] | None:
        """(ids, weights) of ``(weights * (ids == e)).sum(-1)``."""
        value = self.reading.uncast(value, self.floor)
        call = self.reading.read(value, "sum", "dim keepdim")
        shape = example(call["x"]) if call is not None else None
        if call is None or shape is None:
            return None
        dim = call["dim"][0] if isinstance(call["dim"], list | tuple) and len(call["dim"]) == 1 else call["dim"]
        product = self.reading.uncast(call["x"], self.floor)
        inner = self.reading.read(product, "mul where", "y mask")
        if inner is None or not same_shape(product, call["x"]) or type(dim) is not int:
            return None
        if inner.name == "where":
            sides = [(inner["x"], inner["mask"])] if inner["y"] == 0 else []
        else:
            sides = [(inner["x"], inner["y"]), (inner["y"], inner["x"])]
        for weights, mask in sides:
            found = self._pairs(mask, number)
            if found is None or not same_shape(mask, product):
                continue
            ids, flipped = found
            if dim % shape.dim() != (0 if flipped else shape.dim() - 1):
                return None
            root = self.reading.uncast(weights, self.floor)
            if flipped:
                turned = self.reading.named(root, "transpose", "mt", "t", "permute")
                root = turned["x"] if turned is not None and rank(turned["x"]) == 2 else None
            return (ids, root) if root is not None and same_shape(root, ids) else None
        return None

    def _pairs(self, mask: Any, number: int) -> tuple[fx.Node, bool] | None:
        """(ids, whether slots come before tokens) of the mask of the pairs that expert ``number`` gets."""
        value = self.reading.exact(mask, 2)
        call = self.reading.read(value, "eq", "y")
        if call is not None and type(call["y"]) is int:
            return (call["x"], False) if call["y"] == number else None
        call = self.reading.read(value, "getslice select item", "index dim")
        if call is None or not same_shape(value, mask):
            return None
        source, index = call["x"], call["index"]
        if call.name == "item":
            parts = self.reading.read(source, "unbind", "dim")
            source = parts["x"] if parts is not None else None
            call = replace(call, name="select", args={"x": source, "dim": parts["dim"] if parts is not None else None})
        index = index if isinstance(index, tuple) else (index,)
        turned = self.reading.read(source, "permute transpose", "dims dim0 dim1")
        if turned is not None and index == (number,) and call["dim"] in (None, 0):
            dims = turned["dims"] if turned.name == "permute" else None
            ids = self._one_hot_of(turned["x"])
            order = None if dims is None else [dim % 3 for dim in dims if type(dim) is int]
            if ids is None or order not in ([2, 1, 0], [2, 0, 1]) or rank(ids) != 2:
                return None
            return ids, order == [2, 1, 0]
        ids = self._one_hot_of(source)
        *lead, last = index
        whole = all(part is Ellipsis or part == slice(None) for part in lead)
        full = len(index) == rank(source) or Ellipsis in lead or (call.name == "select" and call["dim"] in (-1, 2))
        return (ids, False) if ids is not None and whole and full and last == number else None

    def _one_hot_of(self, value: Any) -> fx.Node | None:
        call = self.reading.read(self.reading.exact(value, 2), "one_hot", "num_classes")
        if call is None or not equal_sizes(call["num_classes"], self.count):
            return None
        ids: fx.Node = call["x"]
        return ids if are_in_range(self.reading, ids, self.count) else None

    # ---- rows of the tokens that an expert gets

    def _of_rows(self, ends: Sequence[_End | None]) -> tuple[Dispatch, Combine] | Refusal | None:
        """Rows of every expert's pairs, or tokens, by the places where a mask is set."""
        taken = [self._taken(expert) for expert in self.experts]
        if any(row is None for row in taken) or any(end is None or end.mask is not None for end in ends):
            return None
        rows, met = [row for row in taken if row is not None], [end for end in ends if end is not None]
        source, shape = rows[0][0], example(rows[0][0])
        self._indexed = (rows[0][2],)
        if shape is None or shape.dim() != 2 or any(row[0] is not source for row in rows):
            return None
        put = self._put_by_mask(source, [row[1] for row in rows], met)
        if put is not None:
            return put
        self.tokens = shape.shape[0]
        found = [self._hits(index, number) for number, (_, index, _) in enumerate(rows)]
        if any(hit is None for hit in found):
            return None
        hits = [hit for hit in found if hit is not None]
        ids = hits[0].ids
        if any(not self.reading.same(hit.ids, ids) or hit.alone != hits[0].alone for hit in hits):
            return None
        indices = [row[1] for row in rows]
        total_put = self._put_in_turn(met, indices) if hits[0].alone and self._one_each(ids) else None
        weights = [self._weights_at(end.factor, hit, n) for n, (end, hit) in enumerate(zip(met, hits, strict=True))]
        if total_put is not None and all(
            end.factor is None or weight for end, weight in zip(met, weights, strict=True)
        ):
            return self._one_expert(source, [(ids, weight) for weight in weights], total_put)
        if weights[0] is None or any(one is None or not self.reading.same(one, weights[0]) for one in weights):
            return Refusal(
                met[0].factor or met[0].value, "What multiplies an expert's rows cannot be proved to be their routing "
                "weights.", "Multiply by topk_weights[token, slot, None], with token, slot = torch.where(ids == e).",
            )  # fmt: skip
        summed = self._added_to_tokens(met, indices)
        if summed is None:
            return None
        total, start, once = summed
        chosen = self._weights_of_all(ids, weights[0])
        if isinstance(chosen, Refusal):
            return chosen
        if (once or hits[0].alone) and not are_distinct(self.reading, ids, self.count, chosen[2]) and chosen[2] > 1:
            return Refusal(
                ids, "A token may have an expert id twice, as far as can be proved, and its row would count once.",
                "Take the ids from one topk over the experts, or add with index_add_.",
            )  # fmt: skip
        return self._combined(source, chosen, total, start)

    def _weights_of_all(self, ids: fx.Node, weights: fx.Node) -> tuple[fx.Node, Any, int] | Refusal:
        """(ids, weights, K) of weights [T, K], or of scores for all experts."""
        given = example(weights)
        if self._one_each(ids) and given is not None and equal_sizes(given.numel(), self.tokens):
            return ids, weights, 1
        if same_shape(ids, weights):
            return self._checked(ids, weights)
        found = selected_of(self.reading, weights, self.tokens, self.count, Spread(self.tokens, 1), self.floor)
        if isinstance(found, Refusal):
            return found
        if not self.reading.same(found.ids, ids):
            return self._no("The scores are zero for others than the experts that take the rows.")
        return found.ids, found.weights, found.top_k

    def _put_in_turn(self, ends: Sequence[_End], indices: Sequence[Any]) -> fx.Node | None:
        """What the experts have written one after the other, each the results of its tokens."""
        total: fx.Node | None = None
        for end, index in zip(self._in_order(ends), self._in_order(indices, ends), strict=True):
            placed = self.order.placed(end.reader)
            if placed is not None and placed.rows is end.value and self.reading.same(placed.index, index):
                before = placed.start
            else:
                put = self._put(end.reader, index)
                if put is None or put[1] is not end.value:
                    return None
                before = put[0]
            if total is not None and before is not total:
                return None
            total = end.reader
        held = example(self.reading.operand(total)) if total is not None else None
        return total if held is not None and no_narrower(held.dtype, self.floor_of_results) else None

    def _taken(self, expert: Expert) -> tuple[fx.Node, Any, fx.Node] | None:
        """(tokens or rows [N, H], the index or mask by which an expert takes its own, what is indexed by it)."""
        found: list[tuple[fx.Node, Any, fx.Node]] = []
        for up in expert.ups:
            value = self.reading.uncast(up.rows, self.floor)
            call = self.reading.read(value, "index fancy", "index")
            if call is None:
                return None
            index = call["index"]
            if isinstance(index, list | tuple):  # x[None, token]
                parts = [part for part in index if part is not None and part not in (Ellipsis, slice(None))]
                index = parts[0] if len(parts) == 1 and index.index(parts[0]) <= index.count(None) else None
            source = self.reading.uncast(call["x"], self.floor)
            source = source if rank(source) == 2 else call["x"]
            if not isinstance(index, fx.Node):
                return None
            found.append((source, index, call["x"]))
        first = found[0]
        same = all(row[0] is first[0] and self.reading.same(row[1], first[1]) for row in found)
        return first if same else None

    def _hits(self, index: Any, number: int) -> _Hits | None:
        """The pairs that ``index`` lists the tokens of."""
        value = self.order.bare(index)
        call = self.reading.read(value, "item getslice", "index")
        if call is not None and call.name == "item":
            where, place = self.reading.read(call["x"], "where nonzero", "mask as_tuple"), call["index"]
            if where is None or "y" in where.args:
                return None
            mask = where["mask"] if where.name == "where" else where["x"]
            return self._hit(mask, number, call["x"], place)
        shape = example(value)
        if shape is not None and shape.dtype == torch.bool:
            return self._hit(value, number, value, 0)
        listed = self.reading.read(value, "nonzero", "as_tuple")  # of one dimension, squeezed
        if listed is not None and rank(listed["x"]) == 1 and not listed["as_tuple"]:
            return self._hit(listed["x"], number, value, 0)
        return None

    def _hit(self, mask: Any, number: int, places: fx.Node, place: int) -> _Hits | None:
        found, boolean = self._pairs(mask, number), places is mask
        if found is not None:
            ids, flipped = found
            if rank(mask) == 2 and rank(ids) == 2 and not boolean:
                return _Hits(ids, places, int(flipped), False) if place == int(flipped) else None
            alone = not flipped and self._one_each(ids) and (rank(mask) == 1 or boolean)
            return _Hits(ids, places, 0, True) if alone and place == 0 else None
        any_slot = self.reading.read(self.reading.exact(mask, 2), "any sum amax", "dim")
        found = None if any_slot is None else self._pairs(any_slot["x"], number)
        if any_slot is None or found is None or place != 0 or not (rank(mask) == 1 or boolean):
            return None
        dims = rank(any_slot["x"]) or 0
        wanted = (0,) if found[1] else (-1, dims - 1)
        shape = example(mask)
        fits = any_slot["dim"] in wanted and shape is not None and equal_sizes(shape.numel(), self.tokens)
        return _Hits(found[0], places, 0, True) if fits else None

    def _weights_at(self, factor: Any, hit: _Hits, number: int) -> fx.Node | None:
        """The weights [T, K] that ``factor`` takes at the pairs of ``hit``."""
        value = self.reading.uncast(factor, self.floor) if isinstance(factor, fx.Node) else None
        call = self.reading.read(value, "fancy index", "index")
        if call is None:
            return None
        if hit.alone:
            return self._weights_of_tokens(call, hit, number)
        index = call["index"] if isinstance(call["index"], list | tuple) else ()
        parts = [part for part in index if part is not None]
        if len(parts) != 2 or rank(call["x"]) != 2:
            return None
        for axis, part in enumerate(parts):
            item = self.reading.read(self.order.bare(part), "item", "index")
            wanted = hit.token if axis == 0 else 1 - hit.token
            if item is None or not self.reading.same(item["x"], hit.places) or item["index"] != wanted:
                return None
        weights: fx.Node = self.reading.uncast(call["x"], self.floor)
        return weights

    def _weights_of_tokens(self, call: Call, hit: _Hits, number: int) -> fx.Node | None:
        """The weights, or the scores for all experts, from which an expert's tokens take their own."""
        parts = [call["index"]] if isinstance(call["index"], fx.Node) else [*call["index"]]
        place, *rest = [part for part in parts if part is not None]
        if not self._is_places(place, hit):
            return None
        source: fx.Node = call["x"]
        if rest:  # scores[mask, e]
            return self._scores(source) if rest == [number] and rank(source) == 2 else None
        found, given = self._weight_of_pairs(source, number), example(source)
        if found is not None:
            return found[1] if self.reading.same(found[0], hit.ids) else None
        single = self._one_each(hit.ids) and given is not None and equal_sizes(given.numel(), self.tokens)
        return self.reading.uncast(source, self.floor) if single else None

    def _is_places(self, value: Any, hit: _Hits) -> bool:
        value = self.order.bare(value)
        item = self.reading.read(value, "item", "index")
        if item is not None:
            return item["index"] == hit.token and self.reading.same(item["x"], hit.places)
        return self.reading.same(value, hit.places)

    def _added_to_tokens(
        self, ends: Sequence[_End], indices: Sequence[Any]
    ) -> tuple[fx.Node, fx.Node | None, bool] | None:  # fmt: skip
        """(the sum, what it was added to, whether a token's row counts once) of results added to their tokens."""
        start: fx.Node | None = None
        total: fx.Node | None = None
        once = False
        for end, index in zip(self._in_order(ends), self._in_order(indices, ends), strict=True):
            step = self._added(end, index)
            if step is None:
                return None
            begin, total_of, by_put = step
            if total is None:
                start = begin
            elif begin is not total:
                return None
            total, once = total_of, once or by_put
        shape = example(self.reading.operand(total)) if total is not None else None
        if total is None or shape is None or not no_narrower(shape.dtype, self.floor_of_results):
            return None
        zeros = self.reading.named(self.reading.strip(start), "zeros", "zeros_like") is not None
        return total, None if zeros else start, once

    def _in_order(self, values: Sequence[Any], ends: Sequence[_End] | None = None) -> list[Any]:
        """``values`` of the experts in the order in which their results are added."""
        keys: Sequence[Any] = values if ends is None else ends
        places = sorted(range(len(keys)), key=lambda place: self.reading.order[keys[place].reader])
        return [values[place] for place in places]

    def _added(self, end: _End, index: Any) -> tuple[Any, fx.Node, bool] | None:
        """(before, after, whether rows of one token overwrite each other) of one expert's addition."""
        added = self.order.added(end.reader)
        if added is not None and added.rows is end.value:
            column = self.order.column(added.index) if added.wide else added.index
            fits = column is not None and self.reading.same(self.order.bare(column), self.order.bare(index))
            return (added.start, end.reader, False) if fits else None
        call, readers = self.reading.read(end.reader, "add", "y"), self.reading.readers(end.reader)
        if call is None or len(readers) != 1:
            return None
        before = self._at(call["y"] if call["x"] is end.value else call["x"], index)
        put = self._put(readers[0], index)
        if before is None or put is None or put[1] is not end.reader or put[0] is not before:
            return None
        return before, readers[0], True

    def _at(self, value: Any, index: Any) -> fx.Node | None:
        """What ``value`` takes at ``index``."""
        call = self.reading.read(value, "index fancy", "index")
        same = call is not None and isinstance(call["index"], fx.Node) and self.reading.same(call["index"], index)
        return call["x"] if call is not None and same else None

    def _put(self, value: Any, index: Any) -> tuple[Any, Any] | None:
        """(before, rows) of ``before[index] = rows``."""
        call = self.reading.read(value, "index_put fancy_put", "index src")
        same = call is not None and isinstance(call["index"], fx.Node) and self.reading.same(call["index"], index)
        return (call["x"], call["src"]) if call is not None and same else None

    def _put_by_mask(
        self, source: fx.Node, masks: Sequence[Any], ends: Sequence[_End]
    ) -> tuple[Dispatch, Combine] | Refusal | None:
        """Every expert writes the rows of its pairs; weighted and summed over the slots as anywhere."""
        rows = self.order.rows(source)
        if rows is None or rows.perm is not None or rows.weights is not None:
            return None
        start: Any = None
        total: fx.Node | None = None
        ids: Any = None
        for number, (mask, end) in enumerate(zip(masks, ends, strict=True)):
            found, put = self._pairs(mask, number), self._put(end.reader, mask)
            if found is None or put is None or put[1] is not end.value or end.factor is not None or found[1]:
                return None
            if ids is not None and not self.reading.same(found[0], ids):
                return None
            ids = found[0]
            if total is not None and put[0] is not total:
                return None
            start, total = (put[0] if total is None else start), end.reader
        blank, held = self.reading.named(self.reading.strip(start), *_BLANK), example(self.reading.operand(start))
        if total is None or blank is None or held is None or not no_narrower(held.dtype, self.floor_of_results):
            return None
        if not are_in_range(self.reading, ids, self.count):
            return Refusal(
                ids, "The expert ids cannot be proved to be in [0, number of experts), and rows of no expert would "
                "not be written.", "Take the ids from topk over the experts.",
            )  # fmt: skip
        shape = example(ids)
        if shape is None or not equal_sizes(shape.numel(), example(rows.hidden).shape[0] * rows.top_k):  # type: ignore[union-attr]
            return None
        dispatch = Dispatch("loop", rows.hidden, ids, None, rows.top_k)
        down = replace(self.first.down, result=total)
        combine = recognise_combine(self.reading, dispatch, down, self.floor_of_results)
        return combine if isinstance(combine, Refusal) else (dispatch, combine)


@dataclass(frozen=True)
class _Hits:
    """The pairs of one expert: ``places`` lists them, ``token`` is which of its results holds tokens.

    ``alone``: tokens, whatever the slot.
    """

    ids: fx.Node
    places: fx.Node
    token: int
    alone: bool
