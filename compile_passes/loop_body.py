"""The body of a loop over all experts: what it may not do, its expert's number, and what nobody reads any more."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from torch import nn

from compile_passes.slice_bounds import CONVERSIONS
from compile_passes.source import CUTS, CUTS_AT, NotStatic, assignments, blocks, called, is_zero, names, sure

# What may lie between the ids, or a mask of them, and the list of experts that were hit.
ELEMENTS = frozenset({"tolist", "cpu", "numpy", "flatten", "squeeze", "view", "reshape", "ravel", "detach", "sorted"})
POSITIVE = frozenset({"greater", "gt", "ne", "not_equal"})

# What may be left out when nobody reads it.
PURE = ELEMENTS | CONVERSIONS | POSITIVE | CUTS | CUTS_AT
PURE |= {"nonzero", "unique", "where", "bool", "argsort", "size", "len", "numel"}


class Element(ast.NodeTransformer):
    """The number of an expert in place of an element of a list of numbers.

    Args:
        name: of the element.
        rows: whether an element is a tensor [1]: what it picks has one dimension more.
    """

    def __init__(self, name: str, rows: bool, held: Callable[[ast.expr], Any]) -> None:
        self.name, self.rows, self.held = name, rows, held

    def _is(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Name) and value.id == self.name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute):
            inside = function.value
            if self._is(inside) and function.attr in ("item", "squeeze", "tolist", "cpu", "long", "view", "flatten"):
                return inside
            first = (not node.args and not node.keywords) or [is_zero(part) for part in node.args] == [True]
            if function.attr == "squeeze" and self._picks(inside) and first and self.rows:
                return ast.copy_location(self._picked(inside), node)
        elif isinstance(function, ast.Name) and function.id == "int" and len(node.args) == 1:
            inner = self.visit(node.args[0])
            if self._is(inner):
                return inner  # type: ignore[no-any-return]
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is(node.value) and is_zero(node.slice) and self.rows:
            return ast.copy_location(ast.Name(self.name, ast.Load()), node)
        if self.rows and is_zero(node.slice) and self._picks(node.value):
            return ast.copy_location(self._picked(node.value), node)
        if self.rows and self._is(node.slice) and not isinstance(self.held(node.value), nn.Module):
            if not isinstance(node.ctx, ast.Load):
                raise NotStatic(f"{ast.unparse(node)} is assigned to", node)
            return ast.Subscript(self._picked(node), ast.Constant(None), ast.Load())
        if self.rows and isinstance(node.slice, ast.Tuple) and any(map(self._is, node.slice.elts)):
            raise NotStatic(f"{ast.unparse(node)} indexes with a row of a list", node)
        return self.generic_visit(node)

    def _picks(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Subscript) and self._is(value.slice)

    def _picked(self, value: ast.AST) -> ast.expr:
        taken = sure(ast.Subscript, value)
        return ast.Subscript(self.visit(taken.value), taken.slice, ast.Load())


# What a loop does for experts that were hit alone.
_ONCE = (ast.Break, ast.Return, ast.Yield, ast.YieldFrom, ast.Raise, ast.Try, ast.Delete, ast.NamedExpr)


def check_after(tree: ast.AST, loop: ast.For) -> None:
    """Refuse a loop that leaves behind what the last of its rounds, or their number, made of a name."""
    end = loop.end_lineno or loop.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            raise NotStatic(f"`{ast.unparse(node)}`, where a loop may write what others read", node)
    later = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and getattr(node, "lineno", 0) > end]
    for name in {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}:
        again = [node.lineno for node in later if node.id == name and isinstance(node.ctx, ast.Store)]
        for node in later:
            if node.id == name and isinstance(node.ctx, ast.Load) and not any(line <= node.lineno for line in again):
                raise NotStatic(f"{name} of the last round is read after the loop", node)


def check_body(loop: ast.For) -> None:
    """Refuse what a loop over all experts would do more, or less, often than one over those that were hit."""
    if loop.orelse:
        raise NotStatic("a loop with an `else`", loop)
    for node in [part for statement in loop.body for part in ast.walk(statement)]:
        if isinstance(node, _ONCE):
            raise NotStatic(f"a `{type(node).__name__.lower()}` in the loop", node)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute):
                raise NotStatic(f"the loop writes {ast.unparse(target)}, for experts that were hit alone", node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            root: Any = function
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            if not isinstance(function, ast.Attribute) or not isinstance(root, ast.Name) or root.id == "self":
                raise NotStatic(f"the loop calls {ast.unparse(function)} for what that does", node)


def check_tests(loop: ast.For) -> None:
    """Refuse a loop that still asks how many tokens an expert has."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If | ast.IfExp | ast.Continue):
            test = getattr(node, "test", None)
            parts = [] if test is None else list(ast.walk(test))
            sizes = any(isinstance(part, ast.Attribute) and part.attr == "shape" for part in parts)
            if sizes or any(called(part) in ("any", "all", "numel", "size", "sum", "item", "len") for part in parts):
                raise NotStatic(
                    f"`if {ast.unparse(test) if test else test}` is more than a test for an empty expert", node
                )


def take_known_branches(tree: ast.FunctionDef, dead: frozenset[int]) -> None:
    """Put the body that runs in the place of an `if` whose other one is known not to."""
    for block in blocks(tree):
        for statement in list(block):
            if isinstance(statement, ast.If) and dead & {id(statement.body), id(statement.orelse)}:
                place = block.index(statement)
                block[place : place + 1] = statement.orelse if id(statement.body) in dead else statement.body


def drop_lists_of_positions(tree: ast.FunctionDef) -> None:
    """`token.tolist()` that is only used to index is `token`, whether it has a name, one of several, or none."""
    for block in blocks(tree):
        block[:] = [one for statement in block for one in _one_by_one(statement)]
    inside: list[ast.expr] = []
    for taken in [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)]:
        if isinstance(taken.slice, ast.Tuple):
            taken.slice.elts = [_positions(part) for part in taken.slice.elts]
            inside += taken.slice.elts
        else:
            taken.slice = _positions(taken.slice)
            inside.append(taken.slice)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and called(node.value) == "tolist" and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            reads = sum(isinstance(part, ast.Name) and part.id == name for part in ast.walk(tree)) - 1
            if reads == sum(isinstance(part, ast.Name) and part.id == name for part in inside):
                node.value = _positions(node.value)


def _one_by_one(statement: ast.stmt) -> list[ast.stmt]:
    """`a, b = p.tolist(), q.tolist()` as a statement for each, where none reads what another one writes."""
    pairs = assignments(statement)
    if len(pairs) < 2 or not all(called(value) == "tolist" for _, value in pairs):
        return [statement]
    if set[str]().union(*(names(target) for target, _ in pairs)) & set[str]().union(*(names(v) for _, v in pairs)):
        return [statement]
    return [ast.copy_location(ast.Assign([target], value), statement) for target, value in pairs]


def _positions(value: ast.expr) -> ast.expr:
    """What a list is made of by `.tolist()`."""
    return sure(ast.Attribute, sure(ast.Call, value).func).value if called(value) == "tolist" else value


def drop_unread(tree: ast.FunctionDef, pure: frozenset[str] = PURE) -> None:
    """Leave out assignments that nobody reads any more: the lists of hit experts, and their counts.

    Args:
        pure: calls that may be left out.
    """
    while True:
        read_names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)]
                found = {name for part in parts for name in names(part)}
                own = node.targets[0] if isinstance(node, ast.Assign) else None
                read_names |= found - {own.id} if isinstance(own, ast.Name) else found
        dropped = 0
        for block in blocks(tree):
            for statement in list(block):
                if _is_unread(statement, read_names, pure) and len(block) > 1:
                    block.remove(statement)
                    dropped += 1
        if not dropped:
            return


def computes_alone(method: ast.FunctionDef) -> bool:
    """Whether a method may be left out when nobody reads what it returns."""
    told = [part for part in method.body[:1] if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)]
    parts = [part for statement in method.body if statement not in told for part in ast.walk(statement)]
    kinds = (ast.Return, ast.Assign)
    written = [target for part in parts if isinstance(part, ast.Assign) for target in part.targets]
    calls = [part for part in parts if isinstance(part, ast.Call)]
    return (
        all(isinstance(part, kinds) for part in parts if isinstance(part, ast.stmt))
        and all(isinstance(target, ast.Name) for target in written)
        and all(called(call) in PURE for call in calls)
    )


def _is_unread(statement: ast.stmt, read_names: set[str], pure: frozenset[str]) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    calls = [called(node) for node in ast.walk(statement.value) if isinstance(node, ast.Call)]
    return isinstance(target, ast.Name) and target.id not in read_names and all(name in pure for name in calls)
