"""Loops over many experts, captured in three turns and written out in the graph.

Dynamo takes some 50 ms for a turn of a loop over experts, in every layer and for every shape, so that the first call of
a model with many experts takes minutes. Turns are alike but for the expert's number. So a loop of a static form says
where its turns begin, runs three of them while it is captured, and here the others are made of the last two: what is
the same in both stays as it is, a number that grows goes on growing, what a turn takes of the turn before it goes on.

That a loop may be captured so is shown once, in the trial of its static form: the graph has to be the one that all
turns make. Where more is left of a written turn after the passes than what has the same sizes in every turn, the graph
is captured again in full.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import fx, nn

from compile_passes.alike import are_alike
from compile_passes.captures import capture, may_be_few
from compile_passes.compat import is_of_the_data
from compile_passes.loops import ALIKE
from compile_passes.source import blocks, names, parsed, subject, sure
from compile_passes.vocabulary import example, size_of, tensors_of
from moe_ops.compat import constant_in_graphs, keep_in_graphs, object_at

#: How many turns are captured. Of the first, names may be bound that the others find; the other two tell what changes.
TURNS = 3
# Loops of fewer turns are captured as they are.
_MANY = TURNS + 1
# On nodes of loops that were written out, and of those that are their pattern.
_WRITTEN = "moe_ops_turn"

_library = torch.library.Library("compile_passes", "DEF")
_library.define("turn(int turns) -> ()")
_library.impl("turn", lambda turns: None, "CompositeExplicitAutograd")
_TURN = torch.ops.compile_passes.turn.default
keep_in_graphs(_TURN)


class NotAlike(Exception):
    """Why the turns of a loop cannot be written out."""


@constant_in_graphs
def turns_of(count: int, address: int) -> int:
    """How many turns of a loop of so many, in a method of the module at an address, are captured."""
    now = capture()
    if now is None or count < _MANY or not are_alike(object_at(address), _MANY):
        return count
    now.used = True
    return TURNS


# ---- code

_NAMES = ("_moe_ops_count_{}", "_moe_ops_captured_{}")
#: What the code of `in_turns` calls.
CALLED: dict[str, Any] = {
    "_moe_ops_turns_of": turns_of, "_moe_ops_turn": _TURN, "_moe_ops_is_captured": torch.compiler.is_dynamo_compiling,
    "_moe_ops_may_be_few": may_be_few, "_moe_ops_first": islice, "_moe_ops_indexed": (torch.Tensor, nn.Module),
}  # fmt: skip
# Libraries of functions that have names of a tensor's methods.
_PYTHONS = frozenset({"math", "operator", "numpy", "np", "random"})
_BEFORE = """
{count} = {of}
{captured} = {count}
if _moe_ops_is_captured() and _moe_ops_may_be_few() and {module}.{alike} and {indexed}:
    {captured} = _moe_ops_turns_of({count}, id({module}))
"""
_BEGINS = """
if {captured} < {count}:
    _moe_ops_turn({count})
"""
_ENDED = """
if {captured} < {count}:
    _moe_ops_turn(0)
"""


def in_turns(tree: ast.FunctionDef) -> ast.FunctionDef:
    """A method whose loops over experts say where their turns begin, and run few of them while captured."""
    tree = copy.deepcopy(tree)
    module = [*tree.args.posonlyargs, *tree.args.args][0].arg
    number = 0
    for body in list(blocks(tree)):
        for place, loop in reversed(list(enumerate(body))):
            found = _turns(loop)
            if isinstance(loop, ast.For) and found is not None:
                count, captured = (name.format(number) for name in _NAMES)
                number += 1
                indexed = [f"isinstance({base}, _moe_ops_indexed)" for base in found.indexed]
                fill = {"count": count, "captured": captured, "of": found.count, "module": module, "alike": ALIKE,
                        "indexed": " and ".join(["True", *indexed])}  # fmt: skip
                texts = (text.format(**fill) for text in (_BEFORE, _BEGINS, _ENDED))
                before, begins, ended = (parsed(text, loop.lineno) for text in texts)
                over = ast.parse(found.over.format(**fill), mode="eval").body
                few = ast.For(loop.target, ast.copy_location(over, loop), [*begins, *loop.body], [])
                body[place : place + 1] = [*before, ast.copy_location(few, loop), *ended]
    return tree


def turned(tree: ast.FunctionDef) -> list[ast.For]:
    """The loops of a method that `in_turns` changes."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.For) and _turns(node) is not None]


@dataclass(frozen=True)
class _Turns:
    """What a loop says of its turns, as source.

    Attributes:
        count: how many there are.
        over: what it goes over if only so many of them are ``{captured}``.
        indexed: what it takes elements of by its number.
    """

    count: str
    over: str
    indexed: list[str]


def _turns(loop: ast.AST) -> _Turns | None:
    """The turns of a loop where all of them run, are alike and are counted before: over numbers from 0, or over what a
    module holds, with its numbers or without.
    """
    if not isinstance(loop, ast.For) or loop.orelse:
        return None
    if any(isinstance(part, ast.Break | ast.Return | ast.Yield | ast.YieldFrom) for part in ast.walk(loop)):
        return None
    indexed = _indexed(loop)
    if indexed is None or not _grows_alike(loop):
        return None
    over, given = loop.iter, []
    if isinstance(over, ast.Call) and not over.keywords:
        given = [ast.unparse(value) for value in over.args]
    name = ast.unparse(over.func) if isinstance(over, ast.Call) else ""
    if name == "range" and (len(given) == 1 or (len(given) == 2 and given[0] == "0")):
        return _Turns(given[-1], "range({captured})", indexed)
    held = over.args[0] if isinstance(over, ast.Call) and name == "enumerate" and len(given) == 1 else over
    if not isinstance(held, ast.Attribute) or not _is_named(held):
        return None
    return _Turns(f"len({ast.unparse(held)})", f"_moe_ops_first({ast.unparse(over)}, {{captured}})", indexed)


def _is_named(value: ast.expr) -> bool:
    """Whether it is a name, or an attribute of one."""
    return all(isinstance(part, ast.Name | ast.Attribute | ast.Load) for part in ast.walk(value))


def _grows_alike(loop: ast.For) -> bool:
    """Whether nothing in a loop tells some of its turns from others, whatever the sizes and the modes: no branch asks
    for what a turn makes, and its number is an index, is compared with tensors, or is given to operations on such, at
    most times what is the same for all, and that added.
    """
    around = {inner: outer for outer in ast.walk(loop) for inner in ast.iter_child_nodes(outer)}
    body = [part for statement in loop.body for part in ast.walk(statement)]
    made = {part.id for part in [*ast.walk(loop.target), *body]
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}  # fmt: skip
    asked = [part.test for part in body if isinstance(part, ast.If | ast.IfExp | ast.While | ast.Assert)]
    asked += [test for part in body if isinstance(part, ast.comprehension) for test in part.ifs]
    asked += [part for part in body if isinstance(part, ast.BoolOp)]
    if any(made & names(test) for test in asked):
        return False
    number = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    if not isinstance(loop.iter, ast.Call):
        return True  # over the modules themselves
    uses = [part for part in body if isinstance(part, ast.Name) and part.id == ast.unparse(number)]
    return all(isinstance(use.ctx, ast.Load) and _is_linear(use, around, made) for use in uses)


def _is_linear(number: ast.expr, around: dict[ast.AST, ast.AST], made: set[str]) -> bool:
    """Whether what is made of a number grows by as much in every turn, and goes where that is seen in the graph."""
    outer = around[number]
    if isinstance(outer, ast.BinOp):
        other = outer.right if outer.left is number else outer.left
        steady = isinstance(outer.op, ast.Add | ast.Sub | ast.Mult) and not names(other) & made
        return steady and _is_linear(outer, around, made)
    if isinstance(outer, ast.Tuple | ast.Slice):
        return _is_linear(outer, around, made)
    if isinstance(outer, ast.Call):
        library, _, name = ast.unparse(outer.func).rpartition(".")
        of_tensors = library not in _PYTHONS and (library in ("torch", "F") or hasattr(torch.Tensor, name))
        return of_tensors if library else name == "str" and _is_index(outer, around)
    if isinstance(outer, ast.FormattedValue):
        return _is_index(sure(ast.JoinedStr, around[outer]), around)
    return _is_index(number, around) or isinstance(outer, ast.Compare)


def _is_index(value: ast.expr, around: dict[ast.AST, ast.AST]) -> bool:
    outer = around[value]
    return isinstance(outer, ast.Subscript) and outer.slice is value


def _indexed(loop: ast.For) -> list[str] | None:
    """What a loop takes elements of by its number, which has to hold tensors or modules: of a list of numbers, or of
    functions, nobody would hear when one is changed. None where that is made in the loop.
    """
    body = [part for statement in loop.body for part in ast.walk(statement)]
    made = {part.id for part in body if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    numbers = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
    found: list[ast.expr | None] = [
        part.value for part in body if isinstance(part, ast.Subscript) and names(part.slice) & numbers
    ]
    while any(isinstance(base, ast.Call) for base in found):
        found = [subject(base) if isinstance(base, ast.Call) else base for base in found]  # what it is made of
    bases = [base for base in found if base is not None and not names(base) & made]
    return sorted({*map(ast.unparse, bases)}) if len(bases) == len(found) and all(map(_is_named, bases)) else None


# ---- graphs


def write_out(graph: fx.Graph) -> bool:
    """Write out the turns of the loops in a graph that were captured in few; whether there are any.

    Raises:
        NotAlike: the turns of one are not alike.
    """
    nodes = list(graph.nodes)
    places = [place for place, node in enumerate(nodes) if node.target is _TURN]
    found = bool(places)
    while places:
        begins, places = places[: TURNS + 1], places[TURNS + 1 :]
        count, *others, last = (nodes[place].args[0] for place in begins)
        if len(begins) <= TURNS or last != 0 or others != [count] * (TURNS - 1):
            raise NotAlike("a loop is not captured as a whole")
        parts = [nodes[begin + 1 : end] for begin, end in pairwise(begins)]
        _Loop(graph, parts, nodes[begins[-1]], count).write()
        for place in begins:
            graph.erase_node(nodes[place])
    return found


def is_written(node: fx.Node) -> bool:
    """Whether a node belongs to a loop that was written out."""
    return _WRITTEN in node.meta


def check_used(graph: fx.Graph) -> None:
    """Raise NotAlike where something is left of what was written out that has a size that only the data knows: its node
    tells that of another turn.
    """
    for node in graph.nodes:
        if node.meta.get(_WRITTEN, 0) >= TURNS and any(map(is_of_the_data, _sizes(node))):
            raise NotAlike(f"{node.name} of a turn of a loop is left")


def _sizes(node: fx.Node) -> list[Any]:
    value = size_of(node)
    return [value, *(size for tensor in tensors_of(node) for size in tensor.shape)]


def as_text(graph: fx.Graph) -> list[Any]:
    """A graph as what can be compared with another one, in which nodes may have other names."""
    places: dict[fx.Node, str] = {}
    rows: list[Any] = []

    def said(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return places[value]
        if isinstance(value, tuple | list):
            return [type(value).__name__, *map(said, value)]
        if isinstance(value, dict):
            return {name: said(part) for name, part in value.items()}
        if isinstance(value, slice):
            return ["slice", *map(said, (value.start, value.stop, value.step))]
        return type(value).__name__, value

    for node in graph.nodes:
        places[node] = f"%{len(places)}"
        found = example(node)
        kind = None if found is None else (found.dtype, found.dim(), found.requires_grad)
        target = None if node.op in ("placeholder", "output") else node.target
        rows.append((node.op, target, said(_without_message(node)), said(node.kwargs), kind))
    return rows


def _without_message(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, of an assertion without what it says, which names nodes."""
    return node.args[:1] if node.target is torch.ops.aten._assert_scalar.default else node.args


class _Loop:
    """A loop of ``count`` turns, of which ``parts`` are captured, and that ends at ``end``."""

    def __init__(self, graph: fx.Graph, parts: list[list[fx.Node]], end: fx.Node, count: int) -> None:
        self.graph, self.end, self.count = graph, end, count
        self.turns = list(parts)
        # Of every node of the captured turns its place there.
        self.first, self.one, self.two = [{node: place for place, node in enumerate(part)} for part in parts]
        if [(node.op, node.target) for node in self.one] != [(node.op, node.target) for node in self.two]:
            raise NotAlike("a turn has other operations than the one before it")

    def write(self) -> None:
        inside = {**self.first, **self.one, **self.two}
        behind = dict.fromkeys(user for node in inside for user in node.users if user not in inside)
        with self.graph.inserting_before(self.end):
            for turn in range(TURNS, self.count):
                made: list[fx.Node] = []
                self.turns.append(made)
                for one, two in zip(self.one, self.two, strict=True):
                    args = self._taken(_without_message(one), _without_message(two))
                    args, kwargs = args + two.args[len(args) :], self._taken(one.kwargs, two.kwargs)
                    node = self.graph.create_node(two.op, two.target, args, kwargs)
                    node.meta = {**two.meta, _WRITTEN: turn}
                    made.append(node)
        for turn, part in enumerate(self.turns[:TURNS]):
            for node in part:
                node.meta[_WRITTEN] = turn
        for node in behind:
            node.args, node.kwargs = self._found_behind(node.args), self._found_behind(node.kwargs)

    def _taken(self, one: Any, two: Any) -> Any:
        """An argument in the turn that is being written, of what it is in the captured ones."""
        if isinstance(one, fx.Node) and isinstance(two, fx.Node):
            return self._node_taken(one, two)
        if type(one) is not type(two) or (isinstance(one, tuple | list | dict) and len(one) != len(two)):
            raise NotAlike(f"a turn takes {two}, where the one before it takes {one}")
        if isinstance(one, tuple | list):
            made = [self._taken(*pair) for pair in zip(one, two, strict=True)]
            return made if isinstance(one, list) else tuple(made)
        if isinstance(one, dict):
            if list(one) != list(two):
                raise NotAlike(f"a turn takes {list(two)}, where the one before it takes {list(one)}")
            return {name: self._taken(part, two[name]) for name, part in one.items()}
        if isinstance(one, slice):
            return slice(*(self._taken(getattr(one, end), getattr(two, end)) for end in ("start", "stop", "step")))
        if type(one) is int:
            return two + (len(self.turns) - TURNS) * (two - one)
        if one is not two and one != two:
            raise NotAlike(f"a turn takes {two}, where the one before it takes {one}")
        return two

    def _node_taken(self, one: fx.Node, two: fx.Node) -> fx.Node:
        if one in self.one and self.two.get(two) == self.one[one]:
            return self.turns[-1][self.one[one]]
        if two in self.one and one not in self.one and one not in self.two:  # of the turn before
            return self.turns[-2][self.one[two]]
        if one is two and one not in self.one:
            return one
        raise NotAlike(f"a turn takes {two}, where the one before it takes {one}")

    def _found_behind(self, value: Any) -> Any:
        """An argument of a node behind the loop: what the last turn made, or lists of what every turn made."""
        if isinstance(value, fx.Node):
            if value in self.first or value in self.one:
                raise NotAlike(f"{value}, which one of the first turns made, is used behind the loop")
            return self.turns[-1][self.two[value]] if value in self.two else value
        if isinstance(value, tuple | list):
            made: list[Any] = []
            rest = list(value)
            while rest:
                if self._is_of_turns(rest[:TURNS]):
                    place = self.two[rest[TURNS - 1]]
                    made += [rest[0], *(turn[place] for turn in self.turns[1:])]
                    del rest[:TURNS]
                else:
                    made.append(self._found_behind(rest.pop(0)))
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, dict):
            return {name: self._found_behind(part) for name, part in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._found_behind, (value.start, value.stop, value.step)))
        return value

    def _is_of_turns(self, values: list[Any]) -> bool:
        """Whether these are what the captured turns made, one after the other, at one place."""
        if len(values) < TURNS or not all(isinstance(value, fx.Node) for value in values):
            return False
        first, one, two = values
        return first in self.first and one in self.one and self.two.get(two) == self.one[one]
