"""A one-hot whose number of classes the data says, and of which the first ones are taken: written with a fixed number.

    F.one_hot(index, max(index.max() + 1, count))[..., :count]   (index.unsqueeze(-1) == arange(count)).long()

The classes are at least ``count``, and as many as any index needs, so that all that is beyond ``count`` is zeros. Such
code is often in a function beside the module: a method that is bound gets the changed function by the same name.
"""

from __future__ import annotations

import ast
import builtins
import copy
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_passes.loop_body import drop_unread
from compile_passes.loops import names_called
from compile_passes.source import Helper, NotStatic, Scope, Source, called, methods_of, read_function, subject
from compile_passes.static_loops import StaticForm

#: What to do by hand.
FIX_CLASSES = "Write it as (index.unsqueeze(-1) == torch.arange(count)).long(), of as many classes as it is told."
# How far functions that call functions are followed.
_DEPTH = 3
# Calls that may be written twice.
_CASTS = frozenset({"long", "to", "int", "type"})
# What computes a number of classes, and may be left out when nobody reads it.
_COUNTING = frozenset({"max", "amax", "item", "int"})


def without_class_counts(module: nn.Module) -> StaticForm | None:
    """The methods of a module with fixed numbers of classes; None when it asks the data for none."""
    methods: dict[str, ast.FunctionDef] = {}
    sources: dict[str, Source] = {}
    helpers: dict[str, tuple[Helper, ...]] = {}
    said: list[str] = []
    if "one_hot" not in names_called(type(module)):
        return None
    try:
        found = methods_of(module)
    except NotStatic:
        return None
    for name, source in found.items():
        changed = with_fixed_counts(source)
        if changed is not None:
            methods[name], sources[name], helpers[name] = changed.tree, source, changed.helpers
            said += changed.said
    return StaticForm(methods, sources, tuple(dict.fromkeys(said)), (), helpers=helpers) if methods else None


def with_fixed_counts(source: Source, depth: int = _DEPTH) -> Helper | None:
    """The code of ``source``, and of the functions that it calls, with fixed numbers of classes, or None."""
    tree = copy.deepcopy(source.tree)
    rewriting = _FixedCounts(source, Scope(tree))
    rewriting.visit(tree)
    if rewriting.said:
        if source.function.__globals__.get("torch") is not torch:
            return None
        drop_unread(tree, _COUNTING)
        ast.fix_missing_locations(tree)
    inner = [with_fixed_counts(other, depth - 1) for other in _functions(source)] if depth else []
    helpers = tuple(helper for helper in inner if helper is not None)
    said = (*rewriting.said, *(line for helper in helpers for line in helper.said))
    return Helper(source, tree, helpers, said) if said else None


def _functions(source: Source) -> list[Source]:
    """The functions beside the module that ``source`` calls, by the names that it calls them by."""
    names = {node.func.id for node in ast.walk(source.tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    given = {arg.arg for arg in ast.walk(source.tree) if isinstance(arg, ast.arg)}
    stored = {node.id for node in ast.walk(source.tree)
              if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}  # fmt: skip
    read = []
    for name in sorted(names - given - stored):
        value = source.function.__globals__.get(name)
        found = read_function(value) if isinstance(value, FunctionType) and value is not source.function else None
        if found is not None and not found.modes:
            read.append(replace(found, name=name))
    return read


class _FixedCounts(ast.NodeTransformer):
    """Rewrites `one_hot(index, max(index.max() + 1, count))[..., :count]`."""

    def __init__(self, source: Source, scope: Scope) -> None:
        self.source, self.scope = source, scope
        self.said: list[str] = []
        self._statement: ast.stmt | None = None

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and self.scope.alive(node):
            self._statement = node
        return super().visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        count, call = _first(node.slice), node.value
        if count is None or not isinstance(call, ast.Call) or self._object(call.func) is not F.one_hot:
            return node
        index = call.args[0] if call.args else None
        classes = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "num_classes")]
        if index is None or len(classes) != 1 or len(call.args) + len(call.keywords) != 2:
            return node
        if not _may_be_copied(index) or not self._covers(classes[0], index, count):
            return node
        what, limit = ast.unparse(index), ast.unparse(count)
        new = ast.parse(f"({what}.unsqueeze(-1) == torch.arange({limit}, device={what}.device)).long()", mode="eval")
        self.said.append(f"line {node.lineno}: `{ast.unparse(node)}` as `{ast.unparse(new.body)}`")
        return ast.copy_location(new.body, node)

    def _covers(self, classes: ast.expr, index: ast.expr, count: ast.expr) -> bool:
        """Whether ``classes`` is the largest of ``count`` and of what ``index`` needs."""
        if self._statement is None:
            return False
        value, place = self.scope.resolved(classes, self._statement)
        if not isinstance(value, ast.Call) or self._object(value.func) is not max or value.keywords:
            return False
        if len(value.args) != 2 or self.scope.changed(count, place, self._statement):
            return False
        others = [part for part in value.args if ast.dump(part) != ast.dump(count)]
        return len(others) == 1 and self._needed(others[0], place, index)

    def _needed(self, value: ast.expr, place: ast.stmt, index: ast.expr) -> bool:
        """Whether ``value`` is more than the largest number in ``index``."""
        more = 0
        while self._statement is not None:
            value, place = self.scope.resolved(value, place)
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                left, right = value.left, value.right
                number, rest = (left, right) if isinstance(left, ast.Constant) else (right, left)
                if not isinstance(number, ast.Constant) or type(number.value) is not int:
                    return False
                more, value = more + number.value, rest
            elif isinstance(value, ast.Call) and called(value) in ("item", "int") and subject(value) is not None:
                value = subject(value)  # type: ignore[assignment]
            else:
                break
        if not isinstance(value, ast.Call) or called(value) not in ("max", "amax") or value.keywords or more < 1:
            return False
        of, function = subject(value), value.func
        if of is None or not isinstance(function, ast.Attribute) or self._statement is None:
            return False
        of_all = len(value.args) == (0 if of is function.value else 1)
        return of_all and ast.dump(of) == ast.dump(index) and not self.scope.changed(index, place, self._statement)

    def _object(self, value: ast.expr) -> Any:
        """What a name, or an attribute of one, is in the function's module."""
        if isinstance(value, ast.Name):
            found = self.source.function.__globals__
            return found[value.id] if value.id in found else getattr(builtins, value.id, None)
        inside = self._object(value.value) if isinstance(value, ast.Attribute) else None
        return None if inside is None else getattr(inside, value.attr, None)  # type: ignore[attr-defined]


def _first(index: ast.expr) -> ast.expr | None:
    """``n`` of `[..., :n]`."""
    parts = index.elts if isinstance(index, ast.Tuple) else []
    if len(parts) != 2 or not isinstance(parts[0], ast.Constant) or parts[0].value is not Ellipsis:
        return None
    last = parts[1]
    return last.upper if isinstance(last, ast.Slice) and last.lower is None and last.step is None else None


def _may_be_copied(value: ast.expr) -> bool:
    allowed = (ast.Name, ast.Attribute, ast.Call, ast.Load, ast.Constant)
    parts = list(ast.walk(value))
    return all(isinstance(part, allowed) for part in parts) and all(
        called(part) in _CASTS for part in parts if isinstance(part, ast.Call)
    )
