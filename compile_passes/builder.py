"""How nodes are inserted into a graph: calls of operators with every argument spelled out, and with metadata.

AOTInductor counts the arguments of a call, and knows no defaults.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import fx

from compile_passes.compat import fake_mode_of, symbolic_sizes
from compile_passes.match import Made, Weight
from compile_passes.vocabulary import example, size_of
from meta.dims import accumulation_dtype
from moe_ops.ops import by_name

_OPS = torch.ops.moe_ops
_ATEN = torch.ops.aten


def operator_name(node: Any) -> str | None:
    """Name of a ``moe_ops`` operator call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    target = node.target
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    if not isinstance(packet, torch._ops.OpOverloadPacket) or not packet._qualified_op_name.startswith("moe_ops::"):
        return None
    return packet._qualified_op_name.removeprefix("moe_ops::")


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a ``moe_ops`` operator call by name, defaults included."""
    return by_name(operator_name(node) or "", node.args, node.kwargs)


class Builder:
    """Inserts calls with the metadata of the node they replace: source line, module, fake result.

    Args:
        like: a node with the fake result of ``site``, which may have none of its own.

    Attributes:
        made: the calls that were inserted.
        values: those of values that the graph did not hold, by identity, with the value that keeps it.
        weights: the nodes that hold the experts' weights ``[E, N, K]``.
    """

    def __init__(self, graph: fx.Graph, site: fx.Node, like: fx.Node | None = None) -> None:
        self.graph = graph
        self._meta: dict[str, Any] = {
            key: site.meta[key] for key in ("stack_trace", "nn_module_stack", "source_fn_stack") if key in site.meta
        }
        shown = (site if like is None else like).meta
        self._key = "val" if "val" in shown and "example_value" not in shown else "example_value"
        self._fake_mode = fake_mode_of(example(site if like is None else like))
        self.made: list[fx.Node] = []
        self.values: dict[int, tuple[Made, fx.Node]] = {}
        self.weights: dict[Weight, fx.Node] = {}

    def operator(self, name: str, values: Mapping[str, Any]) -> fx.Node:
        """A call of one of our operators with every argument of its schema: ``values``, and defaults for the rest."""
        overload = getattr(_OPS, name).default
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in overload._schema.arguments:
            value = values.get(argument.name, argument.default_value)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return self.call(overload, tuple(args), kwargs)

    def call(
        self, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A call with the fake result of its operands."""
        return self._node("call_function", target, args, kwargs or {}, target._overloadpacket.__name__)

    def _node(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs, name=name)
        node.meta.update(self._meta)
        self.made.append(node)
        if self._fake_mode is not None:
            with self._fake_mode, symbolic_sizes(), torch.no_grad():
                values, options = fx.map_arg(args, size_of), fx.map_arg(kwargs, size_of)
                run = getattr(values[0], target) if kind == "call_method" else partial(target, *values[:1])
                node.meta[self._key] = run(*values[1:], **options)
        return node

    def inline(self, code: fx.Graph, values: Sequence[fx.Node]) -> fx.Node:
        """The result of ``code``, calls alone, with its placeholders bound to ``values``."""
        bound, given = dict[fx.Node, fx.Node](), iter(values)
        for node in code.nodes:
            if node.op == "placeholder":
                bound[node] = next(given)
            elif node.op == "output":
                break
            else:
                args, kwargs = (fx.map_arg(value, bound.__getitem__) for value in (node.args, node.kwargs))
                bound[node] = self._node(node.op, node.target, args, kwargs, node.name)
        return bound[cast(fx.Node, code.output_node().args[0])]

    def value(self, node: fx.Node) -> torch.Tensor:
        """The fake tensor of ``node``.

        Raises:
            RuntimeError: it has none.
        """
        found = example(node)
        if found is None:
            raise RuntimeError(f"the graph does not know the shape of {node.name}")
        return found

    def attribute(self, source: fx.Node, name: str) -> fx.Node:
        """An inner tensor of a wrapper tensor."""
        node = self.graph.create_node("call_function", getattr, (source, name), name=f"{source.name}_{name}")
        node.meta.update(self._meta)
        node.meta[self._key] = getattr(self.value(source), name)
        return node

    def item(self, source: fx.Node, index: int, name: str) -> fx.Node:
        """Element ``index`` of a tuple result."""
        node = self.graph.create_node("call_function", operator.getitem, (source, index), name=name)
        node.meta.update(self._meta)
        if self._key in source.meta:
            node.meta[self._key] = source.meta[self._key][index]
        return node

    def rows_of(self, node: fx.Node, width: int) -> fx.Node:
        """Integers as ``[-1, width]``."""
        return node if self.value(node).shape[-1] == width else self.call(_ATEN.reshape.default, (node, [-1, width]))

    def weighed(self, tokens: fx.Node, weights: fx.Node) -> fx.Node:
        """``[T * K, H]``: every token ``[T, H]`` times each of its weights ``[T, K]``, rounded once."""
        value = self.value(tokens)
        wide = accumulation_dtype(value.dtype)
        one, other = (
            self.call(_ATEN.unsqueeze.default, (self.to(node, wide), dim)) for node, dim in ((tokens, 1), (weights, 2))
        )
        product = self.to(self.call(_ATEN.mul.Tensor, (one, other)), value.dtype)
        return self.call(_ATEN.reshape.default, (product, [-1, value.shape[1]]))

    def dense(self, node: fx.Node) -> fx.Node:
        """``node`` with entries that are neighbours in memory along one of the last two dimensions."""
        if 1 in self.value(node).stride()[-2:]:
            return node
        return self.call(_ATEN.contiguous.default, (node,))

    def laid_out(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """``node`` with its dimensions in this order in memory, the last fastest."""
        back = [order.index(dim) for dim in range(len(order))]
        result = self.call(_ATEN.permute.default, (node, list(order)))
        result = self.call(_ATEN.contiguous.default, (result,))
        return self.call(_ATEN.permute.default, (result, back))

    def times(self, node: fx.Node, number: float) -> fx.Node:
        """``node`` times a number."""
        return node if number == 1 else self.call(_ATEN.mul.Scalar, (node, number))

    def rows(self, node: fx.Node, width: int | None) -> fx.Node:
        """``node`` as ``[-1, width]``; its own last dimension when ``width`` is None."""
        value = example(node)
        if value is None or (value.dim() == 2 and width in (None, value.shape[1])):
            return node
        return self.call(_ATEN.reshape.default, (node, [-1, value.shape[-1] if width is None else width]))

    def constant(self, node: fx.Node) -> fx.Node:
        """``node`` without its gradient: what only selects has none, and a result of it alone would require one."""
        value = example(node)
        return self.call(_ATEN.detach.default, (node,)) if value is not None and value.requires_grad else node

    def integers(self, ids: fx.Node) -> fx.Node:
        """``ids`` in a dtype that the operators take."""
        value = example(ids)
        if value is None or value.dtype in (torch.int32, torch.int64):
            return ids
        return self.call(_ATEN.to.dtype, (ids, torch.int64, False, False, None))

    def scaled(self, weights: fx.Node, scale: float, dtype: torch.dtype) -> fx.Node:
        """``scale`` times routing weights, in ``dtype``, fp32 and wider."""
        value = example(weights)
        if scale == 1:
            return weights
        if value is not None:
            wide = reduce(torch.promote_types, (value.dtype, dtype, torch.float32))
            weights = self.to(weights, wide)
        return self.call(_ATEN.mul.Scalar, (weights, scale))

    def part(self, node: fx.Node, rows: slice) -> fx.Node:
        """A view of ``node``: some entries of its second dimension."""
        return self.call(_ATEN.slice.Tensor, (node, 1, rows.start, rows.stop, rows.step or 1))

    def joined(self, one: fx.Node, other: fx.Node) -> fx.Node:
        """Two biases ``[E, I]`` as one ``[E, 2I]``."""
        return self.call(_ATEN.cat.default, ([one, other], 1))

    def wrapped(self, ids: fx.Node, weight: fx.Node) -> fx.Node:
        """``ids`` with the number of experts added where they are negative, as indexing by them counts."""
        stacked = example(weight)
        if stacked is None:
            return ids
        negative = self.call(_ATEN.lt.Scalar, (ids, 0))
        return self.call(_ATEN.where.self, (negative, self.call(_ATEN.add.Scalar, (ids, stacked.shape[0], 1)), ids))

    def cast(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """``node`` in the dtype of ``like``."""
        wanted = example(like)
        return node if wanted is None else self.to(node, wanted.dtype)

    def to(self, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """``node`` in ``dtype``; None: as it is."""
        value = example(node)
        if value is None or dtype is None or value.dtype == dtype:
            return node
        return self.call(_ATEN.to.dtype, (node, dtype, False, False, None))
