"""A functional reading of a graph that mutates: every operand resolved to the node that defines its value there.

A Dynamo graph is torch code with its in-place operations left in (`out.add_(bias)`, `weights /= total`,
`inverse[perm] = arange`). `Canonical` walks the nodes once, in order, and keeps for every tensor the node that defined
its present value. A recogniser then reads pure data flow: after `out.add_(bias)`, a reader of `out` reads the `add`.

Aliasing. A write through one name changes what every other view of the same storage reads. Such a later read has no
functional meaning in the graph's own nodes; it is recorded as a hazard, and a region with a hazard inside is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_passes.vocabulary import Call, example, spell
from moe_ops.compat_compile import statically_known_true

# Results that may share their first operand's storage.
_MAY_ALIAS = frozenset(
    {"view", "transpose", "mt", "permute", "expand", "chunk", "split", "unbind", "slice", "getslice", "narrow", "cast",
     "select", "detach", "diagonal", "unfold", "movedim"}
)  # fmt: skip
_MULTIPLE_VIEWS = frozenset({"chunk", "split", "unbind"})
# Host arithmetic on constants that Dynamo leaves in the graph, as in `clamp(-limit, limit)`.
_ARITHMETIC: dict[str, Callable[..., int | float]] = {
    "neg": operator.neg, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv,
}  # fmt: skip


@dataclass(frozen=True)
class Hazard:
    """``reader`` reads ``operand`` after ``writer`` overwrote its storage through another name."""

    reader: fx.Node
    operand: fx.Node
    writer: fx.Node


class Canonical:
    """The calls of a graph in the common vocabulary, with operands resolved to values.

    A value is named by the node that defines it: for an in-place operation that is the operation's own node, even when
    the graph goes on to use the name of the tensor that was written.

    Attributes:
        graph: the graph as it was read.
        order: position of every node.
        hazards: reads that have no functional meaning, by reader.
        asked_numbers: symbolic numbers among the operands of calls that a recogniser looked at.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order: dict[fx.Node, int] = {}
        self.hazards: dict[fx.Node, Hazard] = {}
        self.asked_numbers: list[torch.SymFloat] = []
        self._calls: dict[fx.Node, Call] = {}
        self._constants: dict[fx.Node, int | float] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._storage: dict[fx.Node, fx.Node] = {}
        self._names: dict[fx.Node, set[fx.Node]] = {}
        self._object: dict[fx.Node, fx.Node] = {}
        self._objects: dict[fx.Node, set[fx.Node]] = {}
        self._current: dict[fx.Node, fx.Node] = {}
        self._overwritten: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, list[fx.Node]] = {}
        for position, node in enumerate(graph.nodes):
            self.order[node] = position
            self._visit(node)

    # ---- reading

    def call(self, value: Any) -> Call | None:
        """The canonical call that defines ``value``; None for anything that is not a call's node."""
        call = self._calls.get(value) if isinstance(value, fx.Node) else None
        if call is not None:
            numbers = (size_of(argument) for argument in call.args.values())
            self.asked_numbers.extend(number for number in numbers if isinstance(number, torch.SymFloat))
        return call

    def named(self, value: Any, *names: str) -> Call | None:
        """The call that defines ``value`` when its name is one of ``names``."""
        call = self._calls.get(value) if isinstance(value, fx.Node) else None
        return self.call(value) if call is not None and call.name in names else None

    def readers(self, value: fx.Node) -> list[fx.Node]:
        """Nodes that read ``value``, in graph order, mutations of other names included."""
        return self._readers.get(value, [])

    def operand(self, value: fx.Node) -> fx.Node:
        """A node that can be passed as an argument for ``value`` (an item assignment itself returns nothing)."""
        call = self.call(value)
        if call is not None and call.name == "index_put" and value.op == "call_function" and call.writes:
            target = value.args[0]
            if isinstance(target, fx.Node):
                return target
        return value

    def written_between(self, value: fx.Node, end: fx.Node) -> fx.Node | None:
        """The first node after ``value`` and before ``end`` that overwrites the storage of ``value``."""
        for writer in self._writes.get(self._storage[value], ()):
            if self.order[value] < self.order[writer] < self.order[end]:
                return writer
        return None

    def is_writer(self, node: fx.Node) -> bool:
        """Whether ``node`` overwrites one of its operands."""
        call = self._calls.get(node)
        return call is not None and bool(call.writes)

    def storage_names(self, node: fx.Node) -> set[fx.Node]:
        """All nodes that may share the storage of ``node``."""
        return self._names[self._storage[node]]

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that overwrite the storage of ``node``."""
        return self._writes.get(self._storage[node], []) if node in self._storage else []

    def adopt(self, old: fx.Node, new: fx.Node) -> None:
        """Give ``new``, which took the place of ``old`` in the graph, its position and storage."""
        self.order[new] = self.order[old]
        self._new_name(new, self._storage[old], self._object[old])

    # ---- values that are the same numbers

    def strip(self, value: Any) -> Any:
        """``value`` without the reshapes and the casts to its own dtype around it (same numbers, row-major order)."""
        *_, root = self.reshapes(value)
        return root

    def reshapes(self, value: Any) -> Iterator[Any]:
        """``value``, then what it is a reshape or no-op cast of, and so on to the root."""
        while True:
            yield value
            call = self.named(value, "view", "clone", "cast")
            if call is None or (call.name == "cast" and not is_noop_cast(value, call["x"])):
                return
            value = call["x"]

    def uncast(self, value: Any, stop: Container[Any] = ()) -> Any:
        """``value`` without reshapes and casts from a floating dtype to another, or an integer one to another.

        Goes no further than a value in ``stop``.
        """
        while value not in stop:
            call = self.named(value, "view", "clone", "cast")
            if call is None or (call.name == "cast" and not same_kind(value, call["x"])):
                break
            value = call["x"]
        return value

    def same(self, left: Any, right: Any, depth: int = 4) -> bool:
        """Whether two values are provably equal: one node through reshapes, or equal pure calls of equal operands."""
        left, right = self.strip(left), self.strip(right)
        if left is right:
            return True
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return type(left) is type(right) and bool(left == right)
        one, two = self.call(left), self.call(right)
        if depth == 0 or one is None or two is None or one.name != two.name or one.writes or two.writes:
            return False
        if one.name in _RANDOM or set(one.args) != set(two.args):
            return False
        return all(self.same(value, two.args[key], depth - 1) for key, value in one.args.items())

    # ---- construction

    def _visit(self, node: fx.Node) -> None:
        spelled = spell(node)
        for operand in node.all_input_nodes:
            if operand in self._overwritten:
                self.hazards.setdefault(node, Hazard(node, operand, self._overwritten[operand]))
            value = self._current.get(operand, operand)
            self._readers.setdefault(value, []).append(node)
        self._new_name(node, storage=node, tensor=node)
        if spelled is None:
            return
        args = {key: self._resolve(value) for key, value in spelled.args.items()}
        self._calls[node] = Call(spelled.name, args, spelled.writes)
        if args and all(isinstance(value, int | float) for value in args.values()) and spelled.name in _ARITHMETIC:
            self._constants[node] = _ARITHMETIC[spelled.name](*args.values())
        source = spelled.args.get("x")
        if isinstance(source, fx.Node) and self._aliases(node, spelled, source):
            self._new_name(node, storage=self._storage[source], tensor=node)
        for parameter in spelled.writes:
            target = node.kwargs.get("out") if parameter == "out" else spelled.args.get(parameter)
            if isinstance(target, fx.Node):
                self._write(node, target)

    def _aliases(self, node: fx.Node, call: Call, source: fx.Node) -> bool:
        if call.name == "item":
            producer = self._calls.get(source)
            return producer is not None and producer.name in _MULTIPLE_VIEWS
        if call.name == "cast":
            return example(node) is None or is_noop_cast(node, source)
        return call.name in _MAY_ALIAS

    def _new_name(self, node: fx.Node, storage: fx.Node, tensor: fx.Node) -> None:
        self._storage[node], self._object[node] = storage, tensor
        self._names.setdefault(storage, set()).add(node)
        self._objects.setdefault(tensor, set()).add(node)

    def _write(self, node: fx.Node, target: fx.Node) -> None:
        """Make ``node`` the value of every name of the tensor ``target``, and spoil the other views of its storage."""
        storage, tensor = self._storage[target], self._object[target]
        self._writes.setdefault(storage, []).append(node)
        for name in self._names[storage]:
            if self._object[name] is not tensor:
                self._overwritten[name] = node
        if node.op != "call_function" or node.target is not operator.setitem:
            self._new_name(node, storage, tensor)
        for name in self._objects[tensor]:
            self._current[name] = node
            self._overwritten.pop(name, None)

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._constants.get(value, self._current.get(value, value))
        if isinstance(value, list | tuple):
            resolved = [self._resolve(entry) for entry in value]
            return tuple(resolved) if isinstance(value, tuple) else resolved
        return value


_RANDOM = frozenset(
    {"rand_like", "randn_like", "rand", "randn", "dropout", "bernoulli", "empty", "empty_like", "uniform"}
)


def is_noop_cast(value: fx.Node, source: Any) -> bool:
    """Whether a cast changes neither dtype nor device."""
    after, before = example(value), example(source)
    if after is None or before is None:
        return False
    return after.dtype == before.dtype and after.device == before.device


def same_kind(value: fx.Node, source: Any) -> bool:
    """Whether a cast goes from a floating dtype to a floating dtype, or from an integer one to an integer one."""
    after, before = example(value), example(source)
    if after is None or before is None or after.device != before.device or torch.bool in (after.dtype, before.dtype):
        return False
    return after.dtype.is_floating_point == before.dtype.is_floating_point


def equal_sizes(left: Any, right: Any) -> bool:
    """Whether two sizes (ints, SymInts, or the graph nodes that compute them) are equal for every input."""
    return statically_known_true(size_of(left) == size_of(right))


def size_of(value: Any) -> Any:
    """The int or SymInt that ``value`` stands for."""
    if isinstance(value, fx.Node):
        return value.meta.get("example_value", value.meta.get("val"))
    return value
