"""The first rows of an expert alone, those within its capacity, without asking how many there are.

    selected[:capacity] if selected.numel() > capacity else selected      selected[:capacity]
    if len(token) > capacity: token = token[:capacity]                    token = token[:capacity]

A slice ends where there are no more rows, so that the other side of the test is the slice, too, whatever the capacity.
"""

from __future__ import annotations

import ast

from compile_passes.source import Scope, assignments, called, is_zero, rows_counted


def first_rows_alone(tree: ast.FunctionDef) -> list[str]:
    """Rewrite them in the loops of a function, in place; which, one line each."""
    found: list[str] = []
    scope = Scope(tree)
    for loop in [node for node in ast.walk(tree) if isinstance(node, ast.For)]:
        rewriting = _FirstRows(scope)
        loop.body = [made for statement in loop.body for made in rewriting.statements(statement)]
        found += rewriting.said
    return found


class _FirstRows(ast.NodeTransformer):
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.said: list[str] = []

    def statements(self, statement: ast.stmt) -> list[ast.stmt]:
        """``statement``, or what takes its place."""
        made = self.visit(statement)
        return made if isinstance(made, list) else [made]

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        asked = _asked(node.test)
        cut = None if asked is None or node.orelse or not asked[2] else self._cut(node, *asked[:2])
        if cut is None or asked is None or asked[0] not in cut:
            return node
        self._say(node, f"if {ast.unparse(node.test)}", f"{asked[0]}[:{asked[1]}]")
        return node.body

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        asked = _asked(node.test)
        if asked is None:
            return node
        name, limit, more = asked
        cut, whole = (node.body, node.orelse) if more else (node.orelse, node.body)
        if _first(cut) != (name, limit) or ast.unparse(whole) != name:
            return node
        self._say(node, ast.unparse(node), ast.unparse(cut))
        return cut

    def _cut(self, node: ast.If, asked: str, limit: str) -> list[str] | None:
        """The names of which the body keeps the first ``limit``, all as long as ``asked`` is; None: it does more."""
        found: list[str] = []
        for statement in node.body:
            pairs = [(ast.unparse(target), _first(value)) for target, value in assignments(statement)]
            if not pairs or any(first != (name, limit) for name, first in pairs):
                return None
            found += [name for name, _ in pairs]
        origins = {self._origin(name, node) for name in found}
        return found if [*found] == [asked] or (len(origins) == 1 and None not in origins) else None

    def _origin(self, name: str, place: ast.stmt) -> tuple[str, ast.stmt] | None:
        """What lists the positions of which ``name`` are those in one dimension."""
        found = self.scope.value(name, place) if name.isidentifier() else None
        if found is None or not isinstance(found[0], ast.Subscript):
            return None
        lists = found[0].value
        return (ast.unparse(lists), found[1]) if called(lists) in ("where", "nonzero") else None

    def _say(self, node: ast.stmt | ast.expr, before: str, after: str) -> None:
        self.said.append(f"line {node.lineno}: `{before}` as `{after}`")


def _first(value: ast.expr) -> tuple[str, str] | None:
    """(x, n) of ``x[:n]``."""
    index = value.slice if isinstance(value, ast.Subscript) else None
    if not isinstance(value, ast.Subscript) or not isinstance(index, ast.Slice) or index.upper is None:
        return None
    if index.step is not None or not (index.lower is None or is_zero(index.lower)):
        return None
    return ast.unparse(value.value), ast.unparse(index.upper)


def _asked(test: ast.expr) -> tuple[str, str, bool] | None:
    """(x, n, whether that says that there are more) of a comparison of the number of rows of x with n."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    (operator,), left, (right,) = test.ops, test.left, test.comparators
    more = isinstance(operator, ast.Gt | ast.GtE)
    if not more and not isinstance(operator, ast.Lt | ast.LtE):
        return None
    for one, other, says in ((left, right, more), (right, left, not more)):
        counted = rows_counted(one)
        if counted is not None:
            return ast.unparse(counted), ast.unparse(other), says
    return None
