"""Calls that take rows, or put them, outside of loops, as indices, which is how other code here knows them.

torch.index_select(x, 0, rows)      x[rows]
out.index_copy_(0, rows, values)    out[rows] = values
"""

from __future__ import annotations

import ast

from compile_passes.source import called, is_zero, subject


def by_index(tree: ast.FunctionDef) -> None:
    """Rewrite them in place, where their dimension is a 0 in the text."""
    _ByIndex().visit(tree)


class _ByIndex(ast.NodeTransformer):
    def visit_For(self, node: ast.For) -> ast.AST:
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        given = _given(node.value, "index_copy_", 2)
        if given is None:
            return self.generic_visit(node)
        target = ast.copy_location(ast.Subscript(given[0], given[1], ast.Store()), node)
        return ast.copy_location(ast.Assign([target], given[2]), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        given = _given(node, "index_select", 1)
        return node if given is None else ast.copy_location(ast.Subscript(given[0], given[1], ast.Load()), node)


def _given(node: ast.expr, name: str, count: int) -> list[ast.expr] | None:
    """[what it is called on, its arguments behind the dimension] of a call of ``name`` along dimension 0."""
    if not isinstance(node, ast.Call) or called(node) != name:
        return None
    of = subject(node)
    rest = [part for part in node.args if part is not of]
    words = {word.arg: word.value for word in node.keywords}
    dim = words.pop("dim", None)
    if dim is None:
        dim, rest = (rest[0], rest[1:]) if rest else (None, rest)
    rest += [words.pop(word) for word in ("index", "source") if word in words]
    if of is None or dim is None or not is_zero(dim) or words or len(rest) != count:
        return None
    return [of, *rest]
