"""A functional reading of a graph that mutates: every operand resolved to the node that defines its value there.

A Dynamo graph is torch code with its in-place operations left in (`out.add_(bias)`, `weights /= total`,
`inverse[perm] = arange`). `Reading` walks the nodes once, in order, and keeps for every tensor the node that defined
its present value. A recogniser then reads pure data flow: after `out.add_(bias)`, a reader of `out` reads the `add`.

A write through one name changes what every other view of the same memory reads. Views that cover the same elements in
the same arrangement read the new value; a later read of any other view has no functional meaning in the graph's own
nodes. It is recorded as a hazard, and a region with a hazard inside is refused.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_passes.equal import Values
from compile_passes.memory import Memory, changes_geometry, storages
from compile_passes.vocabulary import Call, equal_sizes, example, is_assertion, same_shape, size_of, spell, target_name

# Host arithmetic on constants that Dynamo leaves in the graph, as in `clamp(-limit, limit)`.
_ARITHMETIC: dict[str, Callable[..., int | float]] = {
    "neg": operator.neg, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv,
}  # fmt: skip
# Calls that open or close a scope, or set a mode, for the calls after them.
_OPENS = re.compile(r"_?enter_|_?push_|.*_increment_nesting$")
_CLOSES = re.compile(r"_?exit_|_?pop_|.*_decrement_nesting$")
_SETS = re.compile(r"_?set_")
_TRANSFORMS = re.compile(r".*_increment_nesting$|_?enter_dual_level$")
_GRAD_MODE = "_set_grad_enabled"
_AUTOCAST = re.compile(r"_?(enter|exit)_autocast$")
# Calls whose result requires grad when an operand does, unless gradients are off. (A view of a parameter does so then,
# too.)
_DIFFERENTIABLE = frozenset(
    {"linear", "matmul", "bmm", "baddbmm", "einsum", "mul", "add", "sub", "grouped_mm", "index", "embedding"}
)


@dataclass(frozen=True)
class Hazard:
    """``reader`` reads ``operand`` after ``writer`` overwrote its memory through another name."""

    reader: fx.Node
    operand: fx.Node
    writer: fx.Node


class Reading(Values):
    """The calls of a graph in the common vocabulary, with operands resolved to values.

    A value is named by the node that defines it: for an in-place operation that is the operation's own node, even when
    the graph goes on to use the name of the tensor that was written.

    Attributes:
        graph: the graph as it was read.
        memory: its storages and writes.
        order: position of every node.
        hazards: reads that have no functional meaning, by reader.
        scopes: for every node, the scopes (inference mode, functorch levels ...) and modes that it runs under.
        reshaper: a node that changes the geometry of an existing tensor, after which no fake tensor can be trusted, or
            None.
        kernel_choice: the first node that says which kernels of attention torch may choose, or None.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.memory = Memory(graph)
        self.order = self.memory.order
        self.hazards: dict[fx.Node, Hazard] = {}
        self.scopes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.reshaper: fx.Node | None = None
        self.kernel_choice: fx.Node | None = None
        self._calls: dict[fx.Node, Call] = {}
        self._constants: dict[fx.Node, int | float] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._current: dict[fx.Node, fx.Node] = {}
        self._overwritten: dict[fx.Node, fx.Node] = {}
        self._scope: tuple[fx.Node, ...] = ()
        self._grad_mode: bool | None = None
        self._grad_modes: dict[fx.Node, bool | None] = {}
        self._read_as: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        self._kinds: dict[fx.Node, fx.Node] = {}
        self._of_storages: dict[frozenset[int] | None, list[fx.Node]] = {}
        for node in graph.nodes:
            self._visit(node)

    def call(self, value: Any) -> Call | None:
        """The canonical call that defines ``value``; None for anything that is not a call's node."""
        return self._calls.get(value) if isinstance(value, fx.Node) else None

    def readers(self, value: fx.Node) -> list[fx.Node]:
        """Nodes that read ``value``, in graph order, mutations of other names included, mere checks left out."""
        return self._readers.get(value, [])

    def values_of(self, node: fx.Node) -> list[fx.Node]:
        """The values of the tensors that ``node`` is given, in the order of its operands."""
        return list(dict.fromkeys(self._read_as.get(node, {}).values()))

    def operand(self, value: fx.Node) -> fx.Node:
        """A node that can be passed as an argument for ``value`` (some writers return nothing, or something else)."""
        targets = self.memory.writes.get(value, ())
        return targets[0] if len(targets) == 1 and size_of(value) is None else value

    def is_stale(self, value: Any) -> bool:
        """Whether ``value`` was computed from memory that had been overwritten through another name."""
        return isinstance(value, fx.Node) and value in self.hazards

    def is_writer(self, node: fx.Node) -> bool:
        """Whether ``node`` overwrites one of its operands."""
        return node in self.memory.writes

    def is_check(self, node: fx.Node) -> bool:
        """Whether ``node`` only asserts something about its operands."""
        return is_assertion(node)

    def opens_transform(self, node: fx.Node) -> bool:
        """Whether ``node`` opens a level of a function transform (vmap, grad, jvp)."""
        return _TRANSFORMS.match(target_name(node)) is not None

    def later_reads(
        self, value: fx.Node, replaced: Mapping[fx.Node, fx.Node] | None = None
    ) -> list[tuple[fx.Node, fx.Node]]:
        """(user, name) of the uses after ``value`` of older names of the same tensor, or of what ``replaced`` them."""
        names = [name for name in self.memory.names(value)
                 if self.order[name] < self.order[value] and self._is_name_of(name, value)]  # fmt: skip
        names += dict.fromkeys(replaced[name] for name in names if name in replaced) if replaced else ()
        return [(user, name) for name in names for user in name.users if self.order.get(user, -1) > self.order[value]]

    def _is_name_of(self, name: fx.Node, value: fx.Node) -> bool:
        return _same_geometry(self.operand(name), self.operand(value))

    def reads_after(self, user: fx.Node, name: fx.Node, output: fx.Node) -> bool:
        """Whether ``user`` reads through ``name`` the value ``output``, or one that was made of it in place later."""
        value = self._read_as.get(user, {}).get(name)
        return value is not None and (value is output or self.order[value] > self.order[output])

    def grad_enabled(self, site: fx.Node) -> bool:
        """Whether gradients are recorded at ``site``, as far as the graph shows: False when nothing in it needs one."""
        mode = self.grad_mode(site)
        if mode is not None:
            return mode
        for node, call in self._calls.items():
            if self._grad_modes[node] is not None or call.name not in _DIFFERENTIABLE:
                continue
            # What is not recorded, and requires grad, a later `requires_grad_` was called of: that is done in any mode.
            if _needs_grad(node.all_input_nodes) and not (_needs_grad([node]) and _is_leaf(node)):
                return _needs_grad([node])
        return False

    def grad_mode(self, site: fx.Node) -> bool | None:
        """What the graph says of gradients at ``site``: recorded, or not; None where it has said nothing yet."""
        return self._grad_modes.get(site)

    def adopt(self, old: fx.Node, new: fx.Node) -> None:
        """Give ``new``, which took the place of ``old`` in the graph, its position."""
        self.order[new] = self.order[old]

    def _visit(self, node: fx.Node) -> None:
        self.scopes[node], self._grad_modes[node] = self._scope, self._grad_mode
        if self.is_check(node):
            return
        spelled = spell(node)
        values = self._read_as[node] = {name: self._current.get(name, name) for name in node.all_input_nodes}
        for operand, value in values.items():
            if operand in self._overwritten:
                self.hazards.setdefault(node, Hazard(node, operand, self._overwritten[operand]))
            self._readers.setdefault(value, []).append(node)
        if spelled is None:
            return
        args = {key: self._resolve(value) for key, value in spelled.args.items()}
        self._calls[node] = Call(spelled.name, args)
        numbers = list(args.values())
        if numbers and spelled.name in _ARITHMETIC and all(isinstance(value, int | float) for value in numbers):
            self._constants[node] = _ARITHMETIC[spelled.name](*numbers)
        self._track_scopes(node)
        if node in self.memory.writes:
            self._write(node, self.memory.writes[node])

    def _write(self, node: fx.Node, targets: tuple[fx.Node, ...]) -> None:
        """Make ``node`` the value of every name of the tensor that it writes, and spoil the other views of its memory,
        those among them that have another gradient: what `x.detach()` writes is not what gives ``x`` one.

        A writer of several tensors, or one that returns something else than what it wrote, defines no single value: all
        names of what it writes are spoiled.
        """
        if changes_geometry(node):
            self.reshaper = self.reshaper or node
        single = targets[0] if len(targets) == 1 else None
        if single is not None and node.target is not operator.setitem and not _same_geometry(node, single):
            single = None
        for target in targets:
            for name in self.memory.names(target):
                if self.order[name] >= self.order[node]:
                    break
                if single is not None and self._kind(name) is self._kind(single):
                    self._current[name] = node
                    self._overwritten.pop(name, None)
                else:
                    self._overwritten[name] = node

    def _kind(self, name: fx.Node) -> fx.Node:
        """The first name that may be read for ``name``: turns of a loop write one tensor under as many names, and all
        of them would be compared with each other.
        """
        if name not in self._kinds:
            known = self._of_storages.setdefault(storages(example(name)), [])
            self._kinds[name] = next((one for one in known if _is_same_tensor(one, name)), name)
            if self._kinds[name] is name:
                known.append(name)
        return self._kinds[name]

    def _track_scopes(self, node: fx.Node) -> None:
        if node.op != "call_function" or any(example(operand) is not None for operand in node.all_input_nodes):
            return
        name = target_name(node)
        if name == _GRAD_MODE:
            self._grad_mode = bool(node.args[0])
        elif example(node) is not None or _AUTOCAST.match(name):  # what autocast does shows in the results' dtypes
            return
        elif _OPENS.match(name) or _SETS.match(name):
            self._scope = (*self._scope, node)
        elif _CLOSES.match(name):
            self._scope = self._scope[:-1]
        elif "_sdpa_kernel" in name and self.kernel_choice is None:
            self.kernel_choice = node

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._constants.get(value, self._current.get(value, value))
        if isinstance(value, list | tuple):
            resolved = [self._resolve(entry) for entry in value]
            return tuple(resolved) if isinstance(value, tuple) else resolved
        return value


def _needs_grad(nodes: Iterable[fx.Node]) -> bool:
    values = map(example, nodes)
    return any(value is not None and value.requires_grad for value in values)


def _is_leaf(node: fx.Node) -> bool:
    value = example(node)
    return value is not None and value.is_leaf


def _is_same_tensor(left: fx.Node, right: fx.Node) -> bool:
    """Whether one name may be read for the other: the same elements, and a gradient for both of them or neither."""
    return _same_geometry(left, right) and (left is right or _needs_grad([left]) == _needs_grad([right]))


def _same_geometry(left: fx.Node, right: fx.Node) -> bool:
    """Whether two names of one storage cover the same elements in the same arrangement."""
    one, two = example(left), example(right)
    if left is right or one is None or two is None:
        return left is right
    try:
        offsets = one.storage_offset(), two.storage_offset()
        strides = list(zip(one.stride(), two.stride(), strict=True)) if one.dim() == two.dim() else [(0, 1)]
        shared = one.untyped_storage()._cdata == two.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False
    return (
        shared and one.dtype == two.dtype and same_shape(left, right)
        and all(equal_sizes(a, b) for a, b in (offsets, *strides))
    )  # fmt: skip
