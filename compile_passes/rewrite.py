"""What is inserted for what was found: `fused_topk` and `fused_experts` for a match, a larger operator for a chain.

Why the rewrite is legal. `recognise` has proved that (1) the products, two or three, read rows of one token tensor,
ordered by one id tensor, over one number of experts; or all tokens for all experts, at once or one after the other, of
which scores leave K by construction, or every token at most once in the slots of an expert; (2) between them stands an
activation of `meta.activations`; (3) the result is the sum over each token's K rows, which the routing weights multiply
before or after the experts, or that sum added to a tensor; (4) no value computed inside is used outside, but for what
is made of the ids alone, which stays; (5) no input is overwritten between its first use in the block and the block's
end, where the operator is inserted; (6) gradients flow where they flowed before. So the block computes what
`fused_experts` computes, except that the operator accumulates, activates and combines in fp32, and that ids of E and
more contribute exactly zero (transformers writes masks to that effect, which disappear with the block). A number that
multiplies what is between the products, or each row of it, multiplies the routing weights: the second product is linear
(but for infinite weights of rows, whose sums were NaN and are infinite). Ids that index
weights from the end where they are negative get E added. A router is replaced only when its weights and ids have no
reader outside of the block. Casts of the routing weights to a narrower dtype, that of the hidden states at the least,
disappear: the operator takes them in fp32; one to a dtype below that stays behind `fused_topk`. Where autocast rounds
the operands of the products, the weights are cast to its dtype in the graph, once, and the operator computes in it; but
not where the routing weights multiply hidden states of another dtype, which would be rounded twice. Experts that a
token did not select are no longer computed for it: where 0 times an infinity of theirs was NaN, it is nothing.

    linear -> float -> softmax -> topk -> div --+--> reshape, sort, index, histc, cumsum, _grouped_mm, chunk, silu, mul,
                                                |    _grouped_mm, mul, setitem, index, view, sum, to     (31 nodes)
    becomes
    linear -> moe_ops.fused_topk -> moe_ops.fused_experts

Where row-wise code of the model stands between the second product and the combine (`Combine.staged`), it stays: the
stages' operators are put around it. It makes each row of its own row alone, so that it may read rows in another order,
that of `moe_permute`; ids are proved to be in range there, so that every row is one of an expert.

    linear -> moe_ops.fused_topk -> moe_permute -> grouped_mm_glu -> grouped_mm -> [the model's norm] -> moe_unpermute

Where low-rank factors are added to a weight (`match.LowRank`), rows go through these beside it, as `staging` writes it,
and nobody makes the sum: the products are bilinear, and the sum has no other reader.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import fx

from compile_passes.builder import Builder, arguments
from compile_passes.match import Factor, Made, MoEMatch, Product, Refusal, RoutedCall, Router, Value, Weight, leaves
from compile_passes.memory import written
from compile_passes.quantised import Containers, list_arguments, nominal_dtype, read_containers
from compile_passes.reading import Reading
from compile_passes.staging import Stored, expert_rows
from compile_passes.vocabulary import equal_sizes, example, is_dense
from moe_ops.integrations.containers import Part

_OPS = torch.ops.moe_ops
_ATEN = torch.ops.aten


class Rewriter:
    """Applies changes to one graph, which was read before any of them."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.graph = reading, reading.graph
        self._replaced: dict[fx.Node, fx.Node] = {}
        # New nodes that read what was there before old ones wrote it.
        self._before: dict[fx.Node, frozenset[fx.Node]] = {}

    def apply(self, match: MoEMatch) -> fx.Node:
        """Replace one block; returns its `fused_experts` node, or that of `moe_unpermute` where it becomes stages."""
        writers = self._writers(match)
        rows = self._rows(match, writers) if match.combine.staged is not None else None
        builder = Builder(self.graph, match.output, self.reading.operand(match.output))
        with self.graph.inserting_before(match.output):
            if rows is not None:
                fused, result = self._return_rows(builder, match, rows)
            else:
                fused, result = (self._apart if match.updated else self._build)(builder, match)
        self._before |= dict.fromkeys(builder.made, writers)
        self._replace(match.output, result)
        for node in self._same(match):
            self._replaced[node] = result
        self._sweep([*match.region, *leaves(match.combine.weights), *leaves(match.dispatch.ids)])
        stays = next((writer for writer in writers if not writer._erased), None)
        if stays is not None:
            raise RuntimeError(f"{stays.name} stays, and overwrites what the operators read")
        return fused

    def _same(self, match: MoEMatch) -> Iterator[fx.Node]:
        """Nodes of the block with the numbers of its result, in other shapes, by which a later block may know it."""
        node = match.output
        while (call := self.reading.read(node, "view cast")) is not None:
            inner, made = call["x"], example(node)
            held = example(inner)
            if inner not in match.region or held is None or made is None or held.dtype != made.dtype:
                break
            yield inner
            node = inner

    def _writers(self, match: MoEMatch) -> frozenset[fx.Node]:
        """The nodes of the block that overwrite what the operators read: `weights /= total`, `out.index_add_(...)`."""
        order, memory, region = self.reading.order, self.reading.memory, set(match.region)
        return frozenset(
            writer for value in match.inputs for writer in memory.writers(value)
            if writer in region and order[writer] > order[value]
        )  # fmt: skip

    def apply_router(self, routed: RoutedCall) -> None:
        """Give a `fused_experts` call of the model the weights and ids of a `fused_topk`."""
        given = arguments(routed.call)
        builder = Builder(self.graph, routed.call)
        with self.graph.inserting_before(routed.call):
            weights, ids = self._topk(builder, routed.router)
            call = builder.operator("fused_experts", {**given, "topk_weights": weights, "topk_ids": ids})
        self._replace(routed.call, call)
        old = [given[name] for name in ("topk_weights", "topk_ids")]
        self._sweep([routed.call, routed.weights, routed.ids, *(node for node in old if isinstance(node, fx.Node))])

    def apply_operator(self, end: fx.Node, name: str, values: Mapping[str, Any], between: Iterable[fx.Node]) -> None:
        """Put operator ``name`` in the place of ``end``, the last of a chain of operators, and erase the chain."""
        builder = Builder(self.graph, end)
        with self.graph.inserting_before(end):
            call = builder.operator(name, values)
        self._replace(end, call)
        self._sweep([end, *between])

    def apply_shared_heads(self, call: fx.Node, places: Mapping[str, tuple[int, fx.Node]]) -> None:
        """Give an attention call other key and value heads, and let it share them among its query heads."""
        old = []
        for name, (place, heads) in places.items():
            if name in call.kwargs:
                old.append(call.kwargs[name])
                call.kwargs = {**call.kwargs, name: self._node(heads)}
            else:
                old.append(call.args[place])
                call.args = (*call.args[:place], self._node(heads), *call.args[place + 1 :])
        call.kwargs = {**call.kwargs, "enable_gqa": True}
        self._sweep([node for node in old if isinstance(node, fx.Node)])

    def apply_causal(self, call: fx.Node) -> None:
        """Let an attention call with a mask be causal without one."""
        mask = call.kwargs.get("attn_mask", call.args[3] if len(call.args) > 3 else None)
        given = {name: value for name, value in call.kwargs.items() if name not in ("attn_mask", "is_causal")}
        if len(call.args) > 4:
            given["dropout_p"] = call.args[4]
        call.args, call.kwargs = call.args[:3], {**given, "is_causal": True}
        self._sweep([mask] if isinstance(mask, fx.Node) else [])

    def apply_shared_product(
        self, product: fx.Node, left: fx.Node, heads: fx.Node, times: int, transposed: bool
    ) -> None:
        """Multiply ``left`` [B, heads * times, T, X] with heads of which so many in a row share one, all at once."""
        builder = Builder(self.graph, product)
        with self.graph.inserting_before(product):
            right, rows = self._node(heads), self._node(left)
            if transposed:
                right = builder.call(_ATEN.transpose.int, (right, 2, 3))
            rows = builder.call(_ATEN.unflatten.int, (rows, 1, [-1, times]))
            rows = builder.call(_ATEN.flatten.using_ints, (rows, 2, 3))
            made = builder.call(_ATEN.matmul.default, (rows, right))
            made = builder.call(_ATEN.unflatten.int, (made, 2, [times, -1]))
            made = builder.call(_ATEN.flatten.using_ints, (made, 1, 2))
        self._replace(product, made)
        self._sweep([product])

    def _build(self, builder: Builder, match: MoEMatch) -> tuple[fx.Node, fx.Node]:
        """The new nodes; returns the `fused_experts` node and the block's result in its original dtype."""
        projections = self._projections(builder, match)
        weights, ids = self._routing(builder, match, projections["gate_up_proj"])
        fused = builder.operator(
            "fused_experts",
            {
                "hidden_states": self._hidden(builder, match, projections["gate_up_proj"]), **projections,
                **self._activation(match), "topk_weights": weights, "topk_ids": ids,
                "weight_on_input": match.dispatch.weights is not None,
            },
        )  # fmt: skip
        return fused, self._finished(builder, match, fused)

    def _rows(self, match: MoEMatch, writers: frozenset[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
        """Put the experts' results, sorted by expert, in the place of the rows that row-wise code reads; returns where
        each pair's row is, and the routing weights of a known router: others may not be computed yet."""
        start = match.combine.staged.start if match.combine.staged is not None else match.output
        builder = Builder(self.graph, start, self.reading.operand(start))
        with self.graph.inserting_before(start):
            gate_up, weights = self._weight(builder, match, match.up), None
            if isinstance(match.router, Router):
                weights, ids = self._topk(builder, match.router)
            else:
                ids = self._ids(builder, match, gate_up)
            made, places = self._experts(builder, match, self._hidden(builder, match, gate_up), ids)
            made = builder.cast(made, self.reading.operand(start))
        self._before |= dict.fromkeys(builder.made, writers)
        self._replace(start, made)
        return places, weights

    def _apart(self, builder: Builder, match: MoEMatch) -> tuple[fx.Node, fx.Node]:
        """The block as stages, with low-rank factors beside their weights; as `_build`."""
        gate_up, top_k = self._weight(builder, match, match.up), match.dispatch.top_k
        weights, ids = self._routing(builder, match, gate_up)
        hidden = self._hidden(builder, match, gate_up)
        if match.dispatch.weights is not None:  # each pair has a token of its own, which its weight multiplies
            hidden, ids = builder.weighed(hidden, weights), builder.rows_of(ids, 1)
            weights = builder.call(_ATEN.ones_like.default, (weights,))
        made, places = self._experts(builder, match, hidden, ids)
        values = {"rows": made, "pair_to_row": builder.rows_of(places, top_k), "topk_weights": weights}
        fused = builder.operator("moe_unpermute", values)
        return fused, self._finished(builder, match, fused)

    def _experts(self, builder: Builder, match: MoEMatch, hidden: fx.Node, ids: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Results of the experts, sorted by expert, and where each pair's row is."""
        *firsts, last = (self._stored(builder, match, product) for product in match.products)
        stacked, glu = example(match.down.weight.node), None
        if not any(stored.updates for stored in firsts):
            given = self._projections(builder, match)
            glu = {
                "weight": given["gate_up_proj"], "up_weight": given["up_proj"], "bias": given["gate_up_bias"],
                "glu_layout": given["glu_layout"], **self._activation(match),
            }  # fmt: skip
            if "scheme" in given:
                glu |= {"weight_scales": given["gate_up_scales"], "scheme": given["scheme"]}
                last = replace(last, scales=given["down_scales"], scheme=given["scheme"])
        count = None if stacked is None else stacked.shape[0]
        tokens = {"hidden_states": hidden, "topk_ids": ids, "num_experts": count}
        return expert_rows(builder, tokens, firsts, last, match.body, glu)

    def _stored(self, builder: Builder, match: MoEMatch, product: Product) -> Stored:
        weight = self._weight(builder, match, product)
        updates = [
            (self._factor(builder, update.down, weight), self._factor(builder, update.up, weight), update.scale)
            for update in product.weight.updates
        ]
        return Stored(weight, self._bias(builder, match, product), tuple(updates))

    def _factor(self, builder: Builder, factor: Factor, weight: fx.Node) -> fx.Node:
        """A low-rank factor in the weight's dtype, with entries that are neighbours in memory."""
        node = builder.cast(self._node(factor.node), weight)
        if factor.dims != (0, 1, 2):
            node = builder.call(_ATEN.permute.default, (node, list(factor.dims)))
        return builder.dense(node)

    def _return_rows(
        self, builder: Builder, match: MoEMatch, rows: tuple[fx.Node, fx.Node | None]
    ) -> tuple[fx.Node, fx.Node]:  # fmt: skip
        """`moe_unpermute` of what row-wise code made of the experts' results; as `_build`."""
        places, weights = rows
        end = match.output if match.combine.staged is None else match.combine.staged.end
        made = builder.rows(self._node(end), None)  # of one expert for each token it may be [T, 1, H]
        weights = self._weights(builder, match) if weights is None else weights
        values = {"rows": made, "pair_to_row": places, "topk_weights": weights}
        fused = builder.operator("moe_unpermute", values)
        return fused, self._finished(builder, match, fused)

    def _routing(self, builder: Builder, match: MoEMatch, gate_up: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Routing weights and ids ``[T, K]``."""
        if isinstance(match.router, Router):
            return self._topk(builder, match.router)
        return self._weights(builder, match), self._ids(builder, match, gate_up)

    def _weights(self, builder: Builder, match: MoEMatch) -> fx.Node:
        weights = builder.rows(self._value(builder, match.combine.weights), match.dispatch.top_k)
        return builder.scaled(weights, match.body.scale, match.down.dtype)

    def _ids(self, builder: Builder, match: MoEMatch, gate_up: fx.Node) -> fx.Node:
        ids = builder.integers(builder.rows(self._value(builder, match.dispatch.ids), match.dispatch.top_k))
        return builder.wrapped(ids, gate_up) if match.dispatch.wrapped else ids

    def _hidden(self, builder: Builder, match: MoEMatch, gate_up: fx.Node) -> fx.Node:
        """The hidden states ``[T, H]`` in the weights' dtype, the nominal one of quantised weights."""
        hidden = self._node(match.dispatch.hidden)
        if self._containers(match):
            return builder.rows(builder.to(hidden, nominal_dtype(match)), None)
        return builder.rows(builder.cast(hidden, gate_up), None)

    def _containers(self, match: MoEMatch) -> Containers:
        """How the weights are read where they are containers of quantised bytes; empty where they are plain.

        Raises:
            RuntimeError: they cannot be read, which `decide` has refused.
        """
        found = read_containers(match)
        if isinstance(found, Refusal):
            raise RuntimeError(found.reason)
        return found

    def _scales(self, builder: Builder, match: MoEMatch) -> dict[str, Any]:
        """The arguments that say how quantised weights are read; none for plain ones."""
        found = self._containers(match)
        if not found:
            return {}

        return list_arguments(match, found, lambda product, part: self._part(builder, product.weight.node, part))

    def _part(self, builder: Builder, weight: fx.Node, part: Part) -> fx.Node:
        """An operand of a quantised weight."""
        node = builder.attribute(self._node(weight), part.name)
        for function, rest in part.calls:
            node = builder.call(function, (node, *rest))
        return node

    def _activation(self, match: MoEMatch) -> dict[str, Any]:
        return {"activation": match.body.activation, "alpha": match.body.alpha, "limit": match.body.limit}

    def _finished(self, builder: Builder, match: MoEMatch, fused: fx.Node) -> fx.Node:
        """The sum over the experts as the block's result: in its shape and dtype, and added to what it was added to."""
        added, result = match.combine.added, fused
        if match.combine.like is not None:
            result = builder.call(_ATEN.view_as.default, (fused, self._node(match.combine.like)))
        if added is not None:
            start = self._node(added)
            result = builder.call(_ATEN.add.Tensor, (start, builder.cast(fused, start)))
        return self._as_it_lay(builder, builder.cast(result, self.reading.operand(match.output)), match.output)

    def _as_it_lay(self, builder: Builder, result: fx.Node, output: fx.Node) -> fx.Node:
        """``result`` in the strides of the block's own: what comes after may ask for them, as views do."""
        made, held = example(result), example(self.reading.operand(output))
        if made is None or held is None or made.dim() != held.dim():
            return result
        sides = zip(made.shape, made.stride(), held.stride(), strict=True)
        if all(equal_sizes(one, other) or equal_sizes(size, 1) for size, one, other in sides):
            return result
        order = next((order for order in permutations(range(held.dim())) if is_dense(held, order)), None)
        return result if order is None else builder.laid_out(result, order)

    def _projections(self, builder: Builder, match: MoEMatch) -> dict[str, Any]:
        """The weights and biases of the block, and how gate and up lie in them."""
        gate_up, layout, up = self._weight(builder, match, match.up), match.body.glu_layout, None
        bias, down_bias = (self._bias(builder, match, product) for product in (match.up, match.down))
        stacked = example(gate_up)
        halves = None if stacked is None else match.body.halves(stacked.shape[1])
        if match.up_half is not None:
            up, other = (make(builder, match, match.up_half) for make in (self._weight, self._bias))
            if bias is not None and other is not None:
                bias = builder.joined(bias, other)
        elif halves is not None:
            gate_up, up = (builder.part(gate_up, half) for half in halves)
            layout = "separate"
            if bias is not None:
                bias = builder.joined(*(builder.part(bias, half) for half in halves))
        return {
            "gate_up_proj": gate_up, "up_proj": up, "down_proj": self._weight(builder, match, match.down),
            "gate_up_bias": bias, "down_bias": down_bias, "glu_layout": layout, **self._scales(builder, match),
        }  # fmt: skip

    def _topk(self, builder: Builder, router: Router) -> tuple[fx.Node, fx.Node]:
        logits = builder.rows(self._node(router.logits), None)
        bias = None if router.bias is None else builder.constant(self._node(router.bias))
        topk = builder.operator("fused_topk", {"router_logits": logits, "correction_bias": bias, **router.options()})
        return builder.to(builder.item(topk, 0, "topk_weights"), router.rounded), builder.item(topk, 1, "topk_ids")

    def _bias(self, builder: Builder, match: MoEMatch, product: Product) -> fx.Node | None:
        if product.bias is None:
            return None
        bias, stacked = self._node(product.bias), example(product.bias)
        if stacked is not None and stacked.dim() == 3:
            bias = builder.call(_ATEN.squeeze.dim, (bias, 1))
        return builder.to(bias, match.dtype)

    def _weight(self, builder: Builder, match: MoEMatch, product: Product) -> fx.Node:
        weight = product.weight
        if weight not in builder.weights:
            container = self._containers(match).get(weight.node)
            builder.weights[weight] = (
                self._read_weight(builder, match, weight)
                if container is None
                else self._part(builder, weight.node, container.data)
            )
        return builder.weights[weight]

    def _read_weight(self, builder: Builder, match: MoEMatch, weight: Weight) -> fx.Node:
        node = builder.to(self._node(weight.node), match.dtype)
        if weight.part is not None:
            node = builder.call(*weight.part.call(node))
        if weight.experts is not None:
            node = builder.call(_ATEN.slice.Tensor, (node, 0, 0, weight.experts, 1))
        if weight.dtype is not None:
            node = builder.to(node, weight.dtype)
        return builder.call(_ATEN.transpose.int, (node, 1, 2)) if weight.transposed else node

    def _value(self, builder: Builder, value: Value) -> fx.Node:
        """``value``, made where the graph does not hold it."""
        if isinstance(value, fx.Node):
            return self._node(value)
        if id(value) not in builder.values:
            call = builder.call(value.operator, tuple(self._argument(builder, arg) for arg in value.args))
            builder.values[id(value)] = value, call
        return builder.values[id(value)][1]

    def _argument(self, builder: Builder, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._argument(builder, part) for part in value]
        return self._value(builder, value) if isinstance(value, fx.Node | Made) else value

    def _node(self, value: fx.Node) -> fx.Node:
        """The node that holds ``value`` in the graph as it is now."""
        while value in self._replaced:
            value = self._replaced[value]
        if value not in self.reading.order or self.reading.operand(value) is value:
            return value
        return written(value)[0]  # its target, which an earlier block's result may have taken the place of

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every reader of the value ``old`` read ``new``, under whichever name it reads it.

        Where ``old`` wrote a tensor that existed before, what comes later reads and writes it by that tensor's name, or
        by that of the node that took the place of an earlier block's writes to it.
        """
        for reader, name in self.reading.later_reads(old, self._replaced):
            reader.replace_input_with(name, new)
        old.replace_all_uses_with(new)
        self.reading.adopt(old, new)
        self._replaced[old] = new

    def _sweep(self, seeds: Iterable[fx.Node]) -> None:
        """Erase ``seeds`` and what only they used, as far as nothing live reads it, in-place writes included.

        FX's own dead-code elimination either keeps in-place operations for ever or drops them while another name of
        their storage is still read; here a write dies when no live node after it reads any name of what it wrote.
        """
        order, memory = self.reading.order, self.reading.memory
        erased: set[fx.Node] = set()
        queued = {node for node in seeds if node in order}
        heap = [(-order[node], node.name, node) for node in queued]
        heapq.heapify(heap)
        while heap:
            node = heapq.heappop(heap)[2]
            queued.discard(node)
            if node in erased or node._erased:
                continue
            for check in [user for user in node.users if self.reading.is_check(user)]:
                if self._is_dead(node, erased, ignored=check):
                    self.graph.erase_node(check)
                    erased.add(check)
            if not self._is_dead(node, erased):
                continue
            touched = {*node.all_input_nodes}
            for name in node.all_input_nodes:  # what is read later keeps a writer, and nothing that is read before it
                touched.update(writer for writer in memory.writers(name) if order[writer] < order[node])
            self.graph.erase_node(node)
            erased.add(node)
            for other in touched - erased - queued:
                if other in order:
                    queued.add(other)
                    heapq.heappush(heap, (-order[other], other.name, other))

    def _aliases(self, node: fx.Node, erased: set[fx.Node]) -> set[fx.Node]:
        """The names of what ``node`` writes: those of the tensor that was there, and what took the place of an earlier
        writer of it. A view of that, taken later, is none of those for the writers before.
        """
        order, memory = self.reading.order, self.reading.memory
        shared = {name for target in memory.writes[node] for name in memory.names(target)}
        found = {new for old, new in self._replaced.items() if old in shared and order[old] < order[node]}
        names = shared - erased
        for name in sorted(names, key=order.__getitem__):
            if order[name] <= order[node] or any(operand in found for operand in name.all_input_nodes):
                found.add(name)
        return found

    def _is_dead(self, node: fx.Node, erased: set[fx.Node], ignored: fx.Node | None = None) -> bool:
        if node.op not in ("call_function", "call_method") or any(user is not ignored for user in node.users):
            return False
        if not self.reading.is_writer(node):
            return not node.is_impure()
        order, names = self.reading.order, self._aliases(node, erased)
        if any(name.op in ("placeholder", "get_attr") for name in names):
            return False
        readers = (user for name in names for user in name.users)
        readers = (user for user in readers if node not in self._before.get(user, ()))
        return all(user in (node, ignored) or order.get(user, len(order)) < order[node] for user in readers)
