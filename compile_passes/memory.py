"""Who shares memory with whom, and who writes what: from the fake tensors and the schemas, never from names.

Sharing. Two tensors of a graph share memory when their fake tensors have one untyped storage. Different storages prove
the opposite only for a tensor that the graph makes itself: two graph inputs may be views of one storage at the next
call, which no fake tensor of this call can show.

Writing. A call writes what its schema marks as written, what it is given as ``out=``, and the tensor of an ``inplace``
flag. A call without a schema that is not known to be pure (`PURE`) writes every tensor that it touches.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from compile_passes.compat import inner_tensors
from compile_passes.vocabulary import OPERATORS_IN_PLACE, example, is_in_place_name, method_name, size_of, target_name


@dataclass(frozen=True)
class Signature:
    """What matters of one overload of an operator.

    Attributes:
        name: qualified name, without the overload's.
        tags: torch's tags of the overload.
        positional: for each positional argument, whether the call writes it, None for "yes, all of a list".
        named: the same by name, keyword-only arguments included.
    """

    name: str
    tags: frozenset[torch.Tag]
    positional: tuple[bool | None, ...]
    named: Mapping[str, bool | None]


@dataclass(frozen=True)
class Overloads:
    """The overloads that a call may be one of, and where any of them writes: always, or when it is passed a name."""

    signatures: tuple[Signature, ...] = ()

    @cached_property
    def always(self) -> bool:
        """Whether an overload writes a positional argument."""
        return any(is_written is not False for s in self.signatures for is_written in s.positional)

    @cached_property
    def names(self) -> frozenset[str]:
        """The arguments that an overload writes, by name."""
        return frozenset(n for s in self.signatures for n, is_written in s.named.items() if is_written is not False)


# Functions of torch that write an argument which their schema does not mark: running statistics, renormalised rows.
_UNDECLARED = frozenset(
    {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
     "_batch_norm_impl_index", "batch_norm_update_stats", "embedding", "embedding_bag"}
)  # fmt: skip
# What torch's modules hold of Python functions that are no operations on tensors.
_NO_OPERATION = frozenset({"assert_int_or_pair", "align_tensors"})
# Of the undeclared writers, these write only when they are asked to.
_WRITES_IF = {"embedding": "max_norm", "embedding_bag": "max_norm"}
# Where torch keeps its builtins.
_BUILTINS = ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special")
# Tensor methods and attributes without an ATen operator of their name.
PURE_METHODS = frozenset(
    {"float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool", "type", "cpu", "cuda",
     "size", "stride", "dim", "ndimension", "nelement", "element_size", "storage_offset", "is_contiguous", "tolist",
     "get_device", "is_floating_point", "is_complex", "is_signed", "dim_order", "norm", "split",
     "unique", "unique_consecutive", "stft", "istft", "lu", "index_select", "__len__", "__bool__"}
)  # fmt: skip


def _python_functions(module: Any) -> Iterator[Callable[..., Any]]:
    """The functions that ``module`` defines in Python under a public name."""
    for name, value in vars(module).items():
        own = isinstance(value, FunctionType) and value.__module__ == module.__name__
        if own and not name.startswith("_") and not is_in_place_name(name) and name not in _NO_OPERATION:
            yield value


#: Callables without a schema that write nothing, unless they are asked to by ``inplace`` or ``out``.
PURE: frozenset[Any] = frozenset(
    {function for module in (F, torch.functional) for function in _python_functions(module)
     if function.__name__ not in _UNDECLARED}
    | {value for value in vars(operator).values() if isinstance(value, BuiltinFunctionType)
       and value not in OPERATORS_IN_PLACE and value.__name__ not in ("setitem", "delitem", "iconcat", "call")}
    | {builtins.getattr, torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite,
     getattr(torch, "sym_sum", None), getattr(torch._C._autograd, "_get_data_attr", None)}
)  # fmt: skip


# What the names of torch's Python functions that draw numbers have in them.
_RANDOM = ("dropout", "fractional_max_pool", "gumbel", "multi_head_attention", "rrelu")


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands whose memory ``node`` overwrites."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return ()
    given = _nodes(node.kwargs.get("out"))
    if node.op == "call_function":
        found = _by_function(node, node.target)
    elif node.op == "call_method":
        found = _by_overloads(node, _method_overloads(str(node.target)), str(node.target) in PURE_METHODS)
    else:
        found = _tensors(node)
    return tuple(dict.fromkeys((*given, *found)))


def _by_function(node: fx.Node, target: Any) -> Iterable[fx.Node]:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return () if _bodies_are_pure(node) else _tensors(node)
    if target is operator.setitem or target in OPERATORS_IN_PLACE:
        return [value for value in node.args[:1] if isinstance(value, fx.Node) and _may_be_tensor(value)]
    name = target_name(node)
    if name in _UNDECLARED:
        asked = _argument(node, target, _WRITES_IF[name]) if name in _WRITES_IF else True
        return _tensors(node) if asked not in (None, False) else ()
    if target in PURE:
        flag = _argument(node, target, "inplace")
        return _tensors(node) if flag not in (None, False) else ()
    return _by_overloads(node, _overloads(target), pure=False)


def _by_overloads(node: fx.Node, overloads: Overloads, pure: bool) -> Iterable[fx.Node]:
    """What the overloads that ``node`` may be a call of write; everything when there is none, unless it is ``pure``."""
    if not overloads.signatures:
        return () if pure else _tensors(node)
    if not overloads.always and not any(name in overloads.names for name in node.kwargs):
        return ()
    bound = [values for signature in overloads.signatures if (values := _bind(node, signature)) is not None]
    if not bound:  # sizes as separate arguments, as in `x.view(2, 3)`, fit no schema
        return _tensors(node) if overloads.always else ()
    return [target for values in bound for value in values for target in _nodes(value)]


def _bind(node: fx.Node, signature: Signature) -> list[Any] | None:
    """The values that ``node`` passes to the written arguments of an overload; None when it cannot be a call of it."""
    if len(node.args) > len(signature.positional):
        return None
    given = list(zip(signature.positional, node.args, strict=False))
    for name, value in node.kwargs.items():
        name = "self" if name == "input" else name
        if name not in signature.named and name != "out":
            return None
        given.append((signature.named.get(name, False), value))
    if any(is_written is None and example(value) is not None for is_written, value in given):
        return None  # one tensor where the overload takes a list
    return [value for is_written, value in given if is_written is not False]


def _argument(node: fx.Node, function: Any, name: str) -> Any:
    """What ``node`` passes as parameter ``name`` of a Python function, or None."""
    if name in node.kwargs:
        return node.kwargs[name]
    place = _places(function).get(name)
    return node.args[place] if place is not None and place < len(node.args) else None


@cache
def _places(function: Any) -> Mapping[str, int]:
    try:
        return {name: place for place, name in enumerate(inspect.signature(function).parameters)}
    except (TypeError, ValueError):
        return {}


def _bodies_are_pure(node: fx.Node) -> bool:
    """Whether a higher-order operator is made of graphs, none of which writes its inputs."""
    module = node.graph.owning_module
    bodies = [getattr(module, str(o.target), None) for o in node.all_input_nodes if o.op == "get_attr"]
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    return bool(graphs) and not any(map(_writes_inputs, graphs))


def _writes_inputs(graph: fx.Graph) -> bool:
    memory = Memory(graph)
    return any(memory.shares(target) & memory.outside for write in memory.writes for target in memory.writes[write])


def signatures_of(node: fx.Node) -> tuple[Signature, ...]:
    """The overloads that ``node`` may be a call of; empty when torch has no schema for it."""
    if node.op == "call_method":
        return _method_overloads(str(node.target)).signatures
    return _overloads(node.target).signatures if node.op == "call_function" else ()


@cache
def _method_overloads(name: str) -> Overloads:
    return Overloads() if name in PURE_METHODS else _of_packet(getattr(torch.ops.aten, method_name(name), None))


@cache
def _overloads(target: Any) -> Overloads:
    if isinstance(target, torch._ops.OpOverload):
        return Overloads((_signature(target),))
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _of_packet(target)
    name = getattr(target, "__name__", "")
    return _of_packet(getattr(torch.ops.aten, name, None)) if name and _is_torchs(target, name) else Overloads()


def _of_packet(packet: Any) -> Overloads:
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return Overloads()
    names: list[str] = packet.overloads()
    return Overloads(tuple(_signature(getattr(packet, name)) for name in names))


def _signature(overload: torch._ops.OpOverload) -> Signature:
    schema = overload._schema
    named: dict[str, bool | None] = {}
    for argument in schema.arguments:
        kind = str(argument.type)
        is_written = argument.alias_info is not None and bool(argument.alias_info.is_write) and "Tensor" in kind
        named[argument.name] = None if is_written and "List" in kind else is_written
    positional = tuple(named[argument.name] for argument in schema.arguments if not argument.kwarg_only)
    return Signature(schema.name, frozenset(overload.tags), positional, named)


def _is_torchs(target: Any, name: str) -> bool:
    """Whether ``target`` is torch's own builtin ``name`` (a user's function may have any name), or a Tensor method."""
    if isinstance(target, FunctionType):
        return False
    modules = (getattr(torch._C, holder, None) for holder in _BUILTINS)
    return any(getattr(holder, name, None) == target for holder in (*modules, torch, torch.Tensor))


def is_deterministic(node: fx.Node) -> bool:
    """Whether equal operands give an equal result: no random numbers, no uninitialised memory."""
    signatures = signatures_of(node)
    if node.op == "call_function" and not signatures and not isinstance(node.target, BuiltinFunctionType):
        known = node.target in PURE or node.target in OPERATORS_IN_PLACE
        return known and not any(word in target_name(node) for word in _RANDOM)
    if any(s.name.removeprefix("aten::").startswith(("empty", "new_empty", "resize")) for s in signatures):
        return False
    return not any(torch.Tag.nondeterministic_seeded in signature.tags for signature in signatures)


def changes_geometry(node: fx.Node) -> bool:
    """Whether ``node`` changes the shape, the strides or the storage of a tensor that already exists.

    The fake tensor that the graph holds for it then shows the state after the change wherever it is read.
    """
    name = target_name(node)
    if name in ("set_", "resize_", "resize_as_", "_set_data_attr", "set_data"):
        return True
    return name != "detach_" and any(torch.Tag.inplace_view in signature.tags for signature in signatures_of(node))


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [operand for operand in node.all_input_nodes if _may_be_tensor(operand)]


def _may_be_tensor(node: fx.Node) -> bool:
    return not isinstance(size_of(node), bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


class Memory:
    """The storages of a graph's tensors, and its writes in order.

    Attributes:
        order: position of every node.
        outside: storages that existed before the graph ran: of inputs, parameters and constants.
        writes: writer -> the operands that it overwrites, in graph order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order: dict[fx.Node, int] = {}
        self.outside: set[int] = set()
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._shares: dict[fx.Node, frozenset[int]] = {}
        self._may_be: dict[int, frozenset[int]] = {}  # storage of a fake result -> those that it may really be
        self._names: dict[int, list[fx.Node]] = {}
        self._writers: dict[int, list[fx.Node]] = {}
        for position, node in enumerate(graph.nodes):
            self.order[node] = position
            self._visit(node)

    def shares(self, node: fx.Node) -> frozenset[int]:
        """The storages that ``node`` may read or be; a node that writes and returns nothing has those it writes."""
        return self._shares.get(node, frozenset())

    def names(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that share a storage with ``node``, in graph order, itself included."""
        keys = self.shares(node)
        if len(keys) == 1:
            return self._names[next(iter(keys))]
        return sorted({name for key in keys for name in self._names[key]}, key=self.order.__getitem__)

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that overwrite a storage of ``node``, in graph order."""
        found = {writer for key in self.shares(node) for writer in self._writers.get(key, ())}
        return sorted(found, key=self.order.__getitem__)

    def is_outside(self, node: fx.Node) -> bool:
        """Whether ``node`` may be memory that existed before the graph ran."""
        return not self.outside.isdisjoint(self.shares(node))

    def written_between(self, value: fx.Node, start: fx.Node, end: fx.Node | None) -> fx.Node | None:
        """The first node after ``start`` and before ``end`` (None: the graph's) that overwrites ``value``."""
        return next((writer for writer in self.writers(value) if self._between(writer, start, end)), None)

    def outside_writes(self, start: fx.Node, end: fx.Node | None) -> Iterator[tuple[fx.Node, fx.Node]]:
        """(writer, target) of the writes after ``start`` and before ``end`` to memory from outside of the graph."""
        for writer, targets in self.writes.items():
            if self._between(writer, start, end):
                yield from ((writer, target) for target in targets if self.is_outside(target))

    def origins(self, node: fx.Node) -> list[fx.Node]:
        """The graph inputs and constants whose storage ``node`` has."""
        return [name for name in self.names(node) if name.op in ("placeholder", "get_attr")]

    def _between(self, writer: fx.Node, start: fx.Node, end: fx.Node | None) -> bool:
        return self.order[start] < self.order[writer] and (end is None or self.order[writer] < self.order[end])

    def _visit(self, node: fx.Node) -> None:
        targets = tuple(target for target in written(node) if target in self._shares)
        keys = storages(size_of(node))
        overwritten: frozenset[int] = frozenset().union(*map(self.shares, targets))
        if targets:
            self.writes[node] = targets
            for key in overwritten:
                self._writers.setdefault(key, []).append(node)
        if keys is None and targets and size_of(node) is None:  # an item assignment: a value without a name of its own
            keys = overwritten
        elif keys is None:  # no facts: it may be any of its operands, or memory of its own
            keys = frozenset().union(*map(self.shares, node.all_input_nodes)) | {-1 - self.order[node]}
        else:
            if _may_return_operand(node):
                operands = frozenset().union(*map(self.shares, node.all_input_nodes))
                self._may_be.update(dict.fromkeys(keys, operands))
            keys = keys.union(*(self._may_be.get(key, ()) for key in keys))  # of its views, too
        self._shares[node] = keys
        for key in keys:
            self._names.setdefault(key, []).append(node)
        if node.op in ("placeholder", "get_attr"):
            self.outside.update(keys)


def _may_return_operand(node: fx.Node) -> bool:
    """Whether ``node`` returns its operand itself under conditions that its fake tensor does not show."""
    name = target_name(node)
    return "dropout" in name or name == "rrelu"


def storages(value: Any) -> frozenset[int] | None:
    """The storages of a fake result; empty for numbers; None when they cannot be known."""
    if isinstance(value, torch.Tensor):
        try:
            return frozenset(inner.untyped_storage()._cdata for inner in inner_tensors(value))
        except (NotImplementedError, RuntimeError):  # sparse tensors, and those that functorch wraps
            return None
    if isinstance(value, list | tuple):
        parts = [storages(part) for part in value]
        return None if None in parts else frozenset().union(*(part for part in parts if part is not None))
    return None if value is None else frozenset()
