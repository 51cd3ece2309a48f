"""Lists of experts' results that are made by an expression, as loops that append to them.

    outs = [expert(part) for expert, part in zip(self.experts, rows.split(sizes))]
    rows = torch.cat([expert(part) for ... if len(part) > 0])[inverse]
    return torch.cat([self.experts[e](rows[ends[e] : ends[e + 1]]) for e in range(E)])

What is not over chunks or slices stays an expression.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

from compile_passes.source import blocks, called, names, subject

# Calls that take a list of results, whose parts are in its order.
_OF_LISTS = frozenset({"cat", "concat", "concatenate", "vstack", "list", "tuple"})
# What is between a statement and a list that it makes on every run of it: not `a if b else c`, `a and b`, lambdas.
_ALWAYS = ast.Call | ast.Attribute | ast.Subscript | ast.BinOp | ast.Tuple | ast.List | ast.keyword


def unrolled(tree: ast.FunctionDef, cuts: Callable[[ast.For, ast.stmt], bool]) -> None:
    """Unroll lists in place.

    Args:
        cuts: whether a loop, in the place of a statement, is over parts of rows, or takes such.
    """
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for block in blocks(tree):
        for statement in list(block):
            for name, value in [*_listed(statement)]:
                loop = _loop(name, value, taken - _inside(tree, value))
                if cuts(loop, statement):
                    first = ast.Assign([ast.Name(name, ast.Store())], ast.List([], ast.Load()))
                    place = block.index(statement)
                    block[place:place] = [_at(part, statement) for part in (first, loop)]
                    if isinstance(statement, ast.Assign) and statement.value is value:
                        block.remove(statement)
                    else:
                        _Replacing(value, name).visit(statement)


def _listed(statement: ast.stmt) -> Iterator[tuple[str, ast.ListComp | ast.GeneratorExp]]:
    """(name, value) of the lists that a statement makes, once each."""
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
        return
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    if isinstance(target, ast.Name) and isinstance(statement.value, ast.ListComp):
        if _is_simple(statement.value) and target.id not in names(statement.value):
            yield target.id, statement.value
        return
    waiting: list[ast.AST | None] = [statement.value]
    while waiting:
        node = waiting.pop()
        made = subject(node) if isinstance(node, ast.Call) and called(node) in _OF_LISTS else None
        if isinstance(made, ast.ListComp | ast.GeneratorExp) and _is_simple(made):
            yield f"_listed_{made.lineno}_{made.col_offset}_", made
        elif isinstance(node, _ALWAYS):
            waiting.extend(ast.iter_child_nodes(node))


def _is_simple(value: ast.ListComp | ast.GeneratorExp) -> bool:
    """Whether it goes over one thing, and gives no names to the function."""
    alone = len(value.generators) == 1 and not value.generators[0].is_async
    return alone and not any(isinstance(part, ast.NamedExpr) for part in ast.walk(value))


def _inside(tree: ast.FunctionDef, value: ast.expr) -> set[str]:
    """Names that are nowhere but in ``value``."""
    mine = {id(node) for node in ast.walk(value)}
    outside = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in mine}
    outside |= {arg.arg for arg in ast.walk(tree) if isinstance(arg, ast.arg)}
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} - outside


def _loop(name: str, value: ast.ListComp | ast.GeneratorExp, taken: set[str]) -> ast.For:
    """The loop that appends to `name`; its names, which end with the list, are others where the function has such."""
    value = copy.deepcopy(value)
    over = value.generators[0]
    own = {node.id for node in ast.walk(over.target) if isinstance(node, ast.Name)} & taken
    for part in (over.target, value.elt, *over.ifs):
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and node.id in own:
                node.id = f"_{node.id}_of_{name.strip('_')}_"
    append = ast.Attribute(ast.Name(name, ast.Load()), "append", ast.Load())
    inner: ast.stmt = ast.Expr(ast.Call(append, [value.elt], []))
    for test in reversed(over.ifs):
        inner = ast.If(test, [inner], [])
    return ast.For(over.target, over.iter, [inner], [])


class _Replacing(ast.NodeTransformer):
    """A name in the place of a list."""

    def __init__(self, value: ast.expr, name: str) -> None:
        self.value, self.name = value, name

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return ast.Name(self.name, ast.Load()) if node is self.value else super().generic_visit(node)


def _at(made: ast.stmt, like: ast.stmt) -> ast.stmt:
    for node in ast.walk(made):
        if isinstance(node, ast.stmt):
            ast.copy_location(node, like)
    return made
