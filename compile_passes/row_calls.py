"""Calls that take rows, or put them, as indices, which is how other code here knows them; but for `narrow` outside of
loops.

x.narrow(0, start, count)           x[start:start + count]
torch.index_select(x, 0, rows)      x[rows]
out.index_copy_(0, rows, values)    out[rows] = values
out = torch.empty_like(values).index_copy_(0, rows, values)    and this is both
out = torch.zeros_like(values).scatter_(0, rows[:, None].expand_as(values), values)    the same
"""

from __future__ import annotations

import ast
import copy

from compile_passes.source import called, is_zero, names, one_a_row, subject

# Calls whose result nobody else has.
_NEW = ("empty_like", "zeros_like", "empty", "zeros", "new_empty", "new_zeros")


def by_index(tree: ast.FunctionDef) -> None:
    """Rewrite them in place, where their dimension is a 0 in the text."""
    _ByIndex().visit(tree)
    _BySlice().visit(tree)


class _BySlice(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        given = _given(node, "narrow", 2)
        if given is None:
            return node
        rows, start, count = given
        end = ast.BinOp(copy.deepcopy(start), ast.Add(), count)
        made = ast.Subscript(rows, ast.Slice(start, end), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(made, node))


class _ByIndex(ast.NodeTransformer):
    def visit_For(self, node: ast.For) -> ast.AST:
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        given = _put(node.value, "index_copy_", "scatter_")
        if given is None:
            return self.generic_visit(node)
        target = ast.copy_location(ast.Subscript(given[0], given[1], ast.Store()), node)
        return ast.copy_location(ast.Assign([target], given[2]), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        made, given = node.targets[0], _put(node.value, "index_copy_", "scatter_")
        if given is None and _is_new(subject(node.value) if isinstance(node.value, ast.Call) else None):
            given = _put(node.value, "index_copy", "scatter")
        if given is None or len(node.targets) > 1 or not isinstance(made, ast.Name):
            return self.generic_visit(node)
        if made.id in names(given[1]) | names(given[2]):  # what it was before
            return self.generic_visit(node)
        target = ast.Subscript(ast.Name(made.id, ast.Load()), given[1], ast.Store())
        statements = [ast.Assign([made], given[0]), ast.Assign([target], given[2])]
        return [ast.fix_missing_locations(ast.copy_location(one, node)) for one in statements]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        given = _given(node, "index_select", 1)
        return node if given is None else ast.copy_location(ast.Subscript(given[0], given[1], ast.Load()), node)


def _is_new(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and called(value) in _NEW


def _put(node: ast.expr, by_rows: str, by_numbers: str) -> list[ast.expr] | None:
    """[what rows are put into, which, and the rows] of calls of these names."""
    given = _given(node, by_numbers, 2)
    if given is None:
        return _given(node, by_rows, 2)
    to, index, rows = given
    narrow = one_a_row(index)
    return None if narrow is index else [to, narrow, rows]


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
    rest += [words.pop(word) for word in ("index", "source", "src", "start", "length") if word in words]
    if of is None or dim is None or not is_zero(dim) or words or len(rest) != count:
        return None
    return [of, *rest]
