"""Which MoE blocks of a model are in no graph, or in pieces: what capture saw, held against the modules of the model.

A recogniser reads graphs. A block that runs in a function that Dynamo left to Python, or that a graph break cuts, is in
none of them as a whole, so that no recogniser can say a word about it. The weights of the experts tell: they are inputs
of the graphs that compute with them.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from torch import fx, nn

from compile_passes.class_counts import FIX_CLASSES, without_class_counts
from compile_passes.compat import is_disabled
from compile_passes.loops import ExpertGroup, are_projections, has_router, makes_lists
from compile_passes.match import functions, module_of
from moe_ops.graphs import TORCH, operation

#: What to do about a graph break.
MEND = (
    "Take what stopped the capture out of the block, or write it with tensors alone: torch.where in place of `if`, no "
    "print, no .item(), no .tolist()."
)
_WALK = 400
# What Dynamo says of `torch.where(condition)`, `nonzero`, `bincount` and boolean masks.
_OF_THE_DATA = "Dynamic shape operator"
# What it says of `tolist` and `item`.
_NUMBERS_OF_THE_DATA = ("Data dependent operator", "capture_scalar_outputs")
_ALLOW_NUMBERS = (
    "Where rows are cut by counts, moe_ops.compile(model) allows that capture; by hand: "
    "torch._dynamo.config.capture_scalar_outputs = True (which fullgraph=True sets). Elsewhere: "
)
# Operations by which experts are chosen for a token, or tokens for an expert.
_CHOOSING = frozenset({"topk", "argmax", "max", "sort", "argsort", "kthvalue", "multinomial", "fused_topk"})
_ALLOW = (
    "Where no list is made of what tensors hold, moe_ops.compile(model) allows that capture, and stacks a list of "
    "experts; by hand: torch._dynamo.config.capture_dynamic_output_shape_ops = True (which fullgraph=True sets), and "
    "moe_ops.stack_experts_(model)."
)
# How Dynamo calls the rest of a function behind a graph break.
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


@dataclass(frozen=True)
class Stop:
    """A place at which capture stopped: why, ``file:line``, and the (file, function) of every frame on the stack."""

    reason: str
    where: str
    functions: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """``first line of the reason (file:line)``."""
        return f"{first_line(self.reason)} ({self.where})"

    @property
    def of_the_data(self) -> bool:
        """Whether it stopped at an operation whose result has a size that only the data knows."""
        return _OF_THE_DATA in self.reason

    @property
    def of_numbers(self) -> bool:
        """Whether it stopped where code asks a tensor for its numbers."""
        return any(word in self.reason for word in _NUMBERS_OF_THE_DATA)

    @property
    def cutting(self) -> tuple[str, str]:
        """(reason, cure) of a block that is in two graphs for it."""
        if self.of_the_data:
            return f"A result whose size only the data knows cuts the block in pieces: {self.line}.", _ALLOW
        return f"A graph break cuts the block in pieces: {self.line}.", self.mend

    @property
    def mend(self) -> str:
        """What to do about the graph break."""
        return f"{_ALLOW_NUMBERS}{MEND[:1].lower()}{MEND[1:]}" if self.of_numbers else MEND

    @property
    def source(self) -> str:
        """The text of the source line."""
        file, _, line = self.where.rpartition(":")
        return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


@dataclass
class Seen:
    """What went through the backend: the experts' weights in graphs, and those of the blocks that were reported.

    Attributes:
        experts: the blocks of the model.
        in_graphs: ids of their weights that are in a graph.
        reported: ids of their weights that a fused or refused block, or a call of ours, takes.
        modules: paths of the modules in which such blocks are.
        chosen: whether something is chosen in a graph that holds experts' weights.
    """

    experts: list[ExpertGroup]
    in_graphs: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    chosen: bool = False

    def __post_init__(self) -> None:
        self._weights = {id(weight) for group in self.experts for weight in group.weights}
        self._inputs: dict[str, int] = {}

    def graph(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Remember which weights are inputs of a captured graph."""
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        self._inputs = dict(zip(names, map(id, inputs), strict=False))
        held = self._weights.intersection(self._inputs.values())
        self.in_graphs |= held
        self.chosen |= bool(held) and any(map(_chooses, _nodes(gm)))

    def report(self, node: fx.Node) -> str:
        """Remember the experts' weights next to ``node``, which belongs to a block that is reported.

        Returns:
            Path of the block's module. Where capture began inside the model, the graph alone knows a part of it.
        """
        path = module_of(node)
        self.modules.add(path)
        level, known = [node], {node}
        while level and len(known) < _WALK:
            # bodies of checkpointed regions call their inputs as the graph around them does
            found = {self._inputs[value.name] for value in level if value.name in self._inputs} & self._weights
            if found:
                self.reported |= found
                return next(group.name for group in self.experts if found & set(map(id, group.weights)))
            # what a block counts and sorts by is nearer to its products than to those of the layer before
            near = [value for inner in level for value in (*inner.all_input_nodes, *inner.users)]
            level = list(dict.fromkeys(value for value in near if value not in known and value.op != "output"))
            known.update(level)
        return path

    def is_reported(self, name: str, weights: Iterable[nn.Parameter] = ()) -> bool:
        """Whether a block with these weights, or in the module of this name, is reported."""
        inside = (path == name or path.startswith(f"{name}.") for path in self.modules if name)
        return any(inside) or any(id(weight) in self.reported for weight in weights)


def explanation(model: nn.Module, group: ExpertGroup, seen: Seen, stops: Sequence[Stop]) -> tuple[str, str] | None:
    """(reason, cure) of a block that nothing reported; None when nothing is wrong with it: it was not run."""
    near = _stop_inside(model, group, stops)
    lists = any(makes_lists(type(module)) for module in _inside_out(model, group))
    if not any(id(weight) in seen.in_graphs for weight in group.weights):
        # Hooks that record stop a capture, too, but what they are called in is captured up to them and from there on.
        stop = near or min(
            stops,
            key=lambda stop: ("HOP" not in stop.reason, not stop.of_the_data and not stop.of_numbers),
            default=None,
        )
        if stop is None:
            return _disabled(model, group)
        reason = f"None of its weights is in a captured graph: the code around it was left to Python, {stop.line}."
        if "checkpoint" in stop.reason:
            return f"The checkpointed region runs in Python. {reason}", (
                "Nothing inside a checkpointed region may write to what is outside of it. Where transformers records "
                "router logits there, set model.config.output_router_logits and use moe_ops.compile(model), which "
                "lets Dynamo capture that; else leave out what records values, or gradient checkpointing."
            )
        return reason, _ALLOW if stop.of_the_data and not lists else stop.mend
    if near is not None and near.of_the_data and not lists:
        return (
            f"Capture stops in its loop, at an operation whose result has a size of the data: {near.line}.",
            _ALLOW,
        )
    if near is not None and any(without_class_counts(module) for module in _inside_out(model, group)):
        return (
            f"A one-hot asks the data for its number of classes, which cuts the block in pieces: {near.line}.",
            "moe_ops.compile(model) gives it a fixed number, where it can prove that equal. By hand: "
            f"{FIX_CLASSES[0].lower()}{FIX_CLASSES[1:]}",
        )
    if near is not None:
        return (
            f"A graph break cuts the block in pieces: {near.line}.",
            f"{near.mend} Or call moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, "
            "topk_ids) in place of the experts.",
        )
    if not are_projections(group.module):
        return (
            "Its experts are not two projections with an activation between them, which is what is fused.",
            "Nothing is to be done for torch.compile, which captures them as they are.",
        )
    if not seen.chosen:
        return (
            "Its weights are in a captured graph in which nothing is chosen, by topk, argmax or a sort: all experts "
            "count for every token, or they are given with it.",
            "Nothing to do where all of them count, as in a soft mixture: no call of moe_ops computes that. Where a "
            "token is given with its experts' ids: moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, "
            "topk_weights, topk_ids).",
        )
    return (
        "Its weights are in a captured graph, but not in a form in which experts are recognised.",
        "Where every token has the ids and weights of as many experts, call moe_ops.fused_experts(hidden_states, "
        "gate_up_proj, down_proj, topk_weights, topk_ids) in its place, with the id -1 for a pair that is dropped. No "
        "call computes experts that choose their tokens, or as many for a token as pass a threshold.",
    )


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The operations of a captured graph, those of checkpointed regions included."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.op in ("call_function", "call_method"))


def _chooses(node: fx.Node) -> bool:
    parts = operation(node).strip(".").split(".")
    return not _CHOOSING.isdisjoint(parts)


def _disabled(model: nn.Module, group: ExpertGroup) -> tuple[str, str] | None:
    """(reason, cure) of a block that torch.compiler.disable keeps from Dynamo, which reports it as a graph break, but
    not where it gives the frame around up for it, as that of a loop over layers.
    """
    parts = group.name.split(".") if group.name else []
    for depth in range(len(parts) + 1):
        name = ".".join(parts[:depth])
        module = model.get_submodule(name)
        if is_disabled(module.forward):
            what = f"{name or type(model).__name__}.forward ({defined_at(module)})"
            return (
                f"torch.compiler.disable keeps it from Dynamo: {what}.",
                "Disable what cannot be captured alone, or with recursive=False.",
            )
    return None


def cut(node: fx.Node, breaks: Sequence[Stop]) -> Stop | None:
    """The graph break inside the forward that ``node`` is from, or what that calls, if there is one: its block is cut.

    Code that is in no forward is a function that was compiled.
    """
    frames = [(file, _resumed(name)) for file, name in functions(node)]
    last = max((place for place, (_, name) in enumerate(frames) if name == "forward"), default=0)
    around = frames[: last + 1]
    for stop in breaks:
        stopped = [(file, _resumed(name)) for file, name in stop.functions if not file.startswith(TORCH)]
        if around and stopped[: len(around)] == around:
            return stop
    return None


def is_from_before(node: fx.Node) -> bool:
    """Whether ``node`` is a value that was computed before a graph break."""
    return node.op == "placeholder" and any(_RESUMED.match(name) for _, name in functions(node))


def _resumed(name: str) -> str:
    """The function that a function which Dynamo made continues."""
    return _RESUMED.sub(r"\1", name)


def defined_at(module: nn.Module) -> str:
    """``file:line in function`` of the code that a module runs; its class where the source is not there."""
    written: Any = getattr(type(module), "forward", None)  # TorchScript has none
    forward = inspect.unwrap(written)
    try:
        return f"{inspect.getsourcefile(forward)}:{inspect.getsourcelines(forward)[1]} in {forward.__qualname__}"
    except (OSError, TypeError):
        return f"class {type(module).__qualname__}"


def first_line(text: str) -> str:
    """The first line of ``text`` that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _stop_inside(model: nn.Module, group: ExpertGroup, stops: Sequence[Stop]) -> Stop | None:
    """The first stop inside the class of the experts, of their modules, or of a module around them."""
    found = (_stop_in(module, stops) for module in _inside_out(model, group))
    return next((stop for stop in found if stop is not None), None)


def _stop_in(module: nn.Module, stops: Sequence[Stop]) -> Stop | None:
    """The first stop inside the class of a module, one that it inherits from, or a function that their methods call."""
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        methods = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
        codes: list[Any] = [kind, *(value for method in methods for value in _named_in(method))]
        for code in codes:
            stop = _stop_in_code(code, stops)
            if stop is not None:
                return stop
    return None


def _named_in(method: FunctionType) -> Iterator[Any]:
    """The functions that a method names, and the functions and classes of Python modules and classes that it does."""
    names = method.__code__.co_names
    for value in map(method.__globals__.get, names):
        members = [vars(value).get(name) for name in names] if isinstance(value, ModuleType | type) else []
        yield from (each for each in (value, *members) if isinstance(each, FunctionType))
        yield from (each for each in members if isinstance(each, type))


def _stop_in_code(code: type | FunctionType, stops: Sequence[Stop]) -> Stop | None:
    try:
        lines, first = inspect.getsourcelines(code)
        file = inspect.getsourcefile(code)
    except (OSError, TypeError):
        return None
    for stop in stops:
        stop_file, _, line = stop.where.rpartition(":")
        if stop_file == file and line.isdigit() and first <= int(line) < first + len(lines):
            return stop
    return None


def _inside_out(model: nn.Module, group: ExpertGroup) -> Iterator[nn.Module]:
    yield from group.module.modules()
    name = group.name
    while name:
        name = name.rpartition(".")[0]
        around = model.get_submodule(name)
        # a router beside the experts, but not the other layers beside a layer
        beside = (around is not model or "." not in group.name) and not has_router(group)
        yield from around.children() if beside and not isinstance(around, nn.ModuleList) else ()
        yield around
