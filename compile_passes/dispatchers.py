"""Rows that an object hands out to experts, and puts together again, as all rows times gates that are mostly 0.

    dispatcher = SparseDispatcher(E, gates)           _gates_ = gates
    rows = dispatcher.dispatch(x)                     rows = [x] * _gates_.shape[1]
    outs = [self.experts[e](rows[e]) for e in ...]    the same
    y = dispatcher.combine(outs)                      y = sum(_gates_[:, e, None] * out for e, out in enumerate(outs))

The object sorts the places of the gates that are not 0 by expert; davidmrau's is copied very often. Nothing is proved
here: what is made of such code is tried.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from compile_passes.reached import names_of, reached
from compile_passes.source import CUTS, NotStatic, Scope, Source, blocks, called, names, read, subject, sure

_ADDING = frozenset({"index_add", "index_add_", "scatter_add", "scatter_add_"})
# Calls of a leaf of zeros whose own gradient nobody reads: it is not written to.
_WRITING_ELSEWHERE = frozenset({"scatter", "scatter_add", "index_add", "index_put"})
_MADE = frozenset({"zeros", "zeros_like", "new_zeros", "full", "full_like"})


def has_dispatcher(kind: type[nn.Module]) -> bool:
    """Whether code that ``forward`` of a class reaches makes such an object."""
    for function in reached((kind,)):
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        if any(_gates_of(value) is not None for value in named):
            return True
    return False


def without_dispatchers(tree: ast.FunctionDef, scope: Scope, function: FunctionType) -> list[str]:
    """Rewrite what objects of a function hand out; which they are, one line each.

    Raises:
        NotStatic: an object does more than that.
    """
    said = []
    for block in blocks(tree):
        for statement in list(block):
            made = _made(statement, function.__globals__) if scope.alive(statement) else None
            if made is not None:
                said.append(f"line {statement.lineno}: rows of `{ast.unparse(made.call)}` as all rows times the gates")
                _Replaced(tree, made).run(block, statement)
    return said


def without_own_gradients(tree: ast.FunctionDef) -> list[str]:
    """Leave out the `requires_grad=True` of zeros that are a function's own, and only written to, out of place, which
    Dynamo does not capture: nobody can read their gradient.
    """
    said = []
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    safe = [node.func.value for node in ast.walk(tree) if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITING_ELSEWHERE]  # fmt: skip
    for statement in [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]:
        target, value = statement.targets[0], statement.value
        if not isinstance(target, ast.Name) or not isinstance(value, ast.Call) or called(value) not in _MADE:
            continue
        asked = [word for word in value.keywords if word.arg == "requires_grad" and ast.unparse(word.value) == "True"]
        if asked and all(any(node is other for other in safe) for node in reads if node.id == target.id):
            value.keywords.remove(asked[0])
            said.append(f"line {statement.lineno}: `{target.id}` without a gradient of its own, which nobody reads")
    return said


@dataclass(frozen=True)
class _Made:
    """`name = Kind(...)`."""

    name: str
    kind: type
    call: ast.Call
    gates: ast.expr


def _made(statement: ast.stmt, known: Mapping[str, Any]) -> _Made | None:
    value = statement.value if isinstance(statement, ast.Assign) else None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name) or not isinstance(target, ast.Name):
        return None
    kind = known.get(value.func.id)
    place = _gates_of(kind)
    if place is None or any(isinstance(part, ast.Starred) for part in value.args):
        return None
    number, name = place
    words = [word.value for word in value.keywords if word.arg == name]
    given = words[0] if words else value.args[number] if number < len(value.args) else None
    return None if given is None else _Made(target.id, sure(type, kind), value, given)


def _gates_of(kind: Any) -> tuple[int, str] | None:
    """(place, name) of the argument whose places other than 0 a class of plain objects asks for and sorts."""
    if not inspect.isclass(kind) or issubclass(kind, nn.Module):
        return None
    starting = inspect.getattr_static(kind, "__init__", None)
    if not isinstance(starting, FunctionType) or "nonzero" not in names_of(starting.__code__):
        return None
    source = _read(kind, "__init__")
    if source is None:
        return None
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    if not any(called(call) in ("sort", "argsort") for call in calls):
        return None
    given = [argument.arg for argument in source.tree.args.args[1:]]
    for call in calls:
        asked = names(sure(ast.expr, subject(call))) if called(call) == "nonzero" and subject(call) else set()
        for number, name in enumerate(given):
            if asked - {"torch"} == {name}:
                return number, name
    return None


def _read(kind: type, name: str) -> Source | None:
    try:
        return read(kind, name)
    except NotStatic:
        return None


class _Replaced(ast.NodeTransformer):
    """The calls of one object's methods."""

    def __init__(self, tree: ast.FunctionDef, made: _Made) -> None:
        self.tree, self.made = tree, made

    def run(self, block: list[ast.stmt], statement: ast.stmt) -> None:
        kept = ast.Assign([ast.Name("_gates_", ast.Store())], self.made.gates)
        block[block.index(statement)] = ast.copy_location(kept, statement)
        for body in blocks(self.tree):
            for part in list(body):
                if self._is_unread(part) and len(body) > 1:
                    body.remove(part)
        self.visit(self.tree)
        if self.made.name in names(self.tree):
            raise NotStatic(f"what else {self.made.kind.__name__} does is not known", statement)

    def _method(self, node: ast.AST) -> ast.Call | None:
        function = node.func if isinstance(node, ast.Call) else None
        own = isinstance(function, ast.Attribute) and ast.unparse(function.value) == self.made.name
        return node if own and isinstance(node, ast.Call) else None

    def _is_unread(self, statement: ast.stmt) -> bool:
        """`gates = dispatcher.expert_to_gates()`, a list that nobody reads."""
        call = self._method(statement.value) if isinstance(statement, ast.Assign) else None
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if call is None or call.args or not isinstance(target, ast.Name):
            return False
        later = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == target.id
                 and isinstance(node.ctx, ast.Load) and node.lineno > statement.lineno]  # fmt: skip
        return not later

    def visit_Call(self, node: ast.Call) -> ast.AST:
        call = self._method(node)
        if call is None:
            return self.generic_visit(node)
        source = _read(self.made.kind, called(call))
        if source is None or len(call.args) != 1 or any(ast.unparse(word.value) != "True" for word in call.keywords):
            raise NotStatic(f"what {ast.unparse(call)} does is not known", call)
        given, inner = ast.unparse(self.visit(call.args[0])), [*ast.walk(source.tree)]
        calls = {called(part) for part in inner}
        if calls & {"exp", "log"}:
            raise NotStatic(f"{ast.unparse(call)} adds exponentials of results, which are no sum of the results", call)
        adding = [part for part in inner if isinstance(part, ast.Call) and called(part) in _ADDING]
        if adding:
            rows = sure(ast.expr, adding[0].args[-1])
            cast = ".float()" if called(rows) == "float" else ""
            text = f"sum((_gates_[:, _e_, None] * _out_){cast} for _e_, _out_ in enumerate({given}))"
        elif calls & CUTS:
            text = f"[{given}] * _gates_.shape[1]"
        else:
            raise NotStatic(f"what {ast.unparse(call)} does is not known", call)
        return ast.copy_location(ast.parse(text, mode="eval").body, node)
