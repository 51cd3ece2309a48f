"""The only file that names an operator to insert: from a match to `fused_topk` and `fused_experts` nodes.

Why the rewrite is legal. `recognise` has proved that (1) the two products read rows of one token tensor, ordered by
one id tensor, over one number of experts; (2) between them stands an activation of `meta.activations`; (3) the result
is the weighted sum over each token's K rows; (4) no value computed inside is used outside; (5) no input is
overwritten between its first use in the block and the block's end, where the operator is inserted. So the block
computes what `fused_experts` computes, except that the operator accumulates, activates and combines in fp32, and that
ids outside of [0, E) contribute exactly zero (transformers writes masks to that effect, which disappear with the
block). A router is replaced only when its weights and ids have no reader outside of the block. Casts of the routing
weights to a narrower dtype disappear: the operator takes them in fp32.

    linear -> float -> softmax -> topk -> div --+--> reshape, sort, index, histc, cumsum, _grouped_mm, chunk, silu, mul,
                                                |    _grouped_mm, mul, setitem, index, view, sum, to     (31 nodes)
    becomes
    linear -> moe_ops.fused_topk -> moe_ops.fused_experts
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from compile_passes.canonical import Canonical
from compile_passes.match import MoEMatch, RoutedCall, Router, Weight
from compile_passes.vocabulary import example
from moe_ops.compat_compile import fake_mode_of

_OPS = torch.ops.moe_ops
_ATEN = torch.ops.aten
# Places of the routing's results among the arguments of `fused_experts`.
_ROUTED = {"topk_weights": 3, "topk_ids": 4}


class Rewriter:
    """Applies matches of one graph, which was read by ``canon`` before any change."""

    def __init__(self, canon: Canonical) -> None:
        self.canon, self.graph = canon, canon.graph
        self._replaced: dict[fx.Node, fx.Node] = {}

    def apply(self, match: MoEMatch) -> fx.Node:
        """Replace one block; returns its `fused_experts` node."""
        builder = _Builder(self.graph, match.output)
        with self.graph.inserting_before(match.output):
            fused, result = self._build(builder, match)
        match.output.replace_all_uses_with(result)
        self.canon.adopt(match.output, result)
        self._replaced[match.output] = result
        sweep(self.graph, self.canon, [*match.region, match.combine.weights, match.dispatch.ids])
        return fused

    def apply_router(self, routed: RoutedCall) -> None:
        """Give a `fused_experts` call of the model the weights and ids of a `fused_topk`."""
        call = routed.call
        given = [call.kwargs[name] if name in call.kwargs else call.args[place] for name, place in _ROUTED.items()]
        with self.graph.inserting_before(call):
            made = self._topk(_Builder(self.graph, call), routed.router)
        for old, new in zip(given, made, strict=True):
            if isinstance(old, fx.Node):
                call.replace_input_with(old, new)
        seeds = (routed.weights, routed.ids, *(old for old in given if isinstance(old, fx.Node)))
        sweep(self.graph, self.canon, seeds)

    def _build(self, builder: _Builder, match: MoEMatch) -> tuple[fx.Node, fx.Node]:
        """The new nodes; returns the `fused_experts` node and the block's result in its original dtype."""
        if isinstance(match.router, Router):
            weights, ids = self._topk(builder, match.router)
        else:
            weights = builder.rows(self._node(match.combine.weights), match.dispatch.top_k)
            ids = builder.rows(self._node(match.dispatch.ids), match.dispatch.top_k)
        gate_up, down = self._weight(builder, match.up.weight), self._weight(builder, match.down.weight)
        biases = [None if bias is None else self._node(bias) for bias in (match.up.bias, match.down.bias)]
        hidden = builder.cast(self._node(match.dispatch.hidden), gate_up)
        body = match.body
        fused = builder.call(
            _OPS.fused_experts.default,
            (hidden, gate_up, down, weights, ids, *biases),
            {"activation": body.activation, "alpha": body.alpha, "limit": body.limit, "glu_layout": body.glu_layout},
        )
        return fused, builder.cast(fused, match.output)

    def _topk(self, builder: _Builder, router: Router) -> tuple[fx.Node, fx.Node]:
        logits = builder.rows(self._node(router.logits), None)
        topk = builder.call(
            _OPS.fused_topk.default,
            (logits, None if router.bias is None else self._node(router.bias)),
            router.options(),
        )
        return builder.item(topk, 0, "topk_weights"), builder.item(topk, 1, "topk_ids")

    def _weight(self, builder: _Builder, weight: Weight) -> fx.Node:
        node = self._node(weight.node)
        return builder.call(_ATEN.transpose.int, (node, 1, 2), {}) if weight.transposed else node

    def _node(self, value: fx.Node) -> fx.Node:
        return self._replaced.get(value, self.canon.operand(value))


class _Builder:
    """Inserts calls with the metadata of the node they replace: source line, module, fake result."""

    def __init__(self, graph: fx.Graph, site: fx.Node) -> None:
        self.graph = graph
        self._meta: dict[str, Any] = {
            key: site.meta[key] for key in ("stack_trace", "nn_module_stack", "source_fn_stack") if key in site.meta
        }
        self._key = "val" if "val" in site.meta and "example_value" not in site.meta else "example_value"
        self._fake_mode = fake_mode_of(example(site))

    def call(self, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """A call without the arguments that equal the schema's defaults."""
        while args and args[-1] is None:
            args = args[:-1]
        defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
        kwargs = {name: value for name, value in kwargs.items() if name not in defaults or defaults[name] != value}
        name = target._overloadpacket.__name__
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        self._annotate(node, lambda fake: target(*fx.map_arg(args, fake), **fx.map_arg(kwargs, fake)))
        return node

    def item(self, source: fx.Node, index: int, name: str) -> fx.Node:
        """Element ``index`` of a tuple result."""
        node = self.graph.create_node("call_function", operator.getitem, (source, index), name=name)
        node.meta.update(self._meta)
        if self._key in source.meta:
            node.meta[self._key] = source.meta[self._key][index]
        return node

    def rows(self, node: fx.Node, width: int | None) -> fx.Node:
        """``node`` as ``[-1, width]``; its own last dimension when ``width`` is None."""
        value = example(node)
        if value is None or (value.dim() == 2 and width in (None, value.shape[1])):
            return node
        return self.call(_ATEN.reshape.default, (node, [-1, value.shape[-1] if width is None else width]), {})

    def cast(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """``node`` in the dtype of ``like``."""
        value, wanted = example(node), example(like)
        if value is None or wanted is None or value.dtype == wanted.dtype:
            return node
        return self.call(_ATEN.to.dtype, (node, wanted.dtype), {})

    def _annotate(self, node: fx.Node, run: Any) -> None:
        node.meta.update(self._meta)
        if self._fake_mode is not None:
            with self._fake_mode, torch.no_grad():
                node.meta[self._key] = run(lambda n: n.meta[self._key])


def sweep(graph: fx.Graph, canon: Canonical, seeds: Iterable[fx.Node]) -> None:
    """Erase ``seeds`` and what only they used, as far as nothing live reads it, in-place writes included.

    FX's own dead-code elimination either keeps in-place operations for ever or drops them while another name of their
    storage is still read; here a write dies when no live node after it reads any name of what it wrote.
    """
    erased: set[fx.Node] = set()
    heap = [(-canon.order[node], node.name, node) for node in seeds]
    heapq.heapify(heap)
    while heap:
        node = heapq.heappop(heap)[2]
        if node in erased or not _is_dead(canon, node, erased):
            continue
        touched = {*node.all_input_nodes}
        touched.update(writer for name in node.all_input_nodes for writer in canon.writers(name))
        graph.erase_node(node)
        erased.add(node)
        for other in touched - erased:
            if other in canon.order:
                heapq.heappush(heap, (-canon.order[other], other.name, other))


def _is_dead(canon: Canonical, node: fx.Node, erased: set[fx.Node]) -> bool:
    if node.op not in ("call_function", "call_method") or node.users:
        return False
    if not canon.is_writer(node):
        return not node.is_impure()
    names = canon.storage_names(node)
    if any(name.op in ("placeholder", "get_attr") for name in names):
        return False
    position = canon.order[node]
    readers = (user for name in names if name not in erased for user in name.users)
    return all(user is node or canon.order.get(user, len(canon.order)) < position for user in readers)
