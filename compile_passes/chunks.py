"""Chunks that `split` makes of rows sorted by expert, in a loop over experts, written as slices of these rows.

    for e, chunk in enumerate(torch.split(rows, sizes))         chunk is rows[_start_:_end_]
    for expert, chunk in zip(self.experts, rows.split(sizes))   the same, with expert = self.experts[_number_]
    chunks[e] in a loop over range, [expert(chunk) for ...]     the same, in a loop

Nothing is proved here, not even that the sizes are counts of an expert's rows: what is made of such a loop is tried.
"""

from __future__ import annotations

import ast
import copy

from compile_passes.slice_bounds import CONVERSIONS, Slices
from compile_passes.source import CUTS, Scope, bodies, called, is_zero, names, subject

_START, _END, _NUMBER = "_start_", "_end_", "_number_"


def chunks_of(scope: Scope, loop: ast.For) -> Slices | None:
    """The chunks that the loop is over, or takes by its number; their names, and what takes them, become slices."""
    beside, number = _parts(loop)
    taken = {name: rows for name, value in beside.items() if (rows := _split(value, scope, loop)) is not None}
    if taken:
        others = {name: value for name, value in beside.items() if name not in taken}
        loop.body[:0] = [
            ast.copy_location(ast.Assign([ast.Name(name, ast.Store())],
                              ast.Subscript(value, ast.Name(number, ast.Load()), ast.Load())), loop)
            for name, value in others.items()
        ]  # fmt: skip
    replacing = _Slicing(scope, loop, number, taken)
    loop.body = [replacing.visit(part) for part in loop.body]
    if not replacing.found or not number:
        return None
    empty, filled = set[str](), set[str]()
    for chunk in replacing.found:
        for count in (f"{chunk}.shape[0]", f"{chunk}.size(0)", f"{chunk}.numel()", f"{chunk}.nelement()",
                      f"len({chunk})"):  # fmt: skip
            empty |= {f"{count} {test}" for test in ("== 0", "< 1", "<= 0")} | {f"not {count}"}
            filled |= {f"{count} {test}" for test in ("> 0", "!= 0", ">= 1")} | {count}
    return Slices(number, _START, _END, (), frozenset(empty), frozenset(filled), bool(taken))


def unroll_comprehensions(tree: ast.FunctionDef) -> None:
    """Lists that are made of chunks by an expression, as loops that append to them."""
    scope = Scope(tree)
    for block in [inner for node in ast.walk(tree) if isinstance(node, ast.stmt) for inner in bodies(node)]:
        for statement in list(block):
            made = _listed(statement)
            if made is None or not scope.alive(statement):
                continue
            name, value = made
            over = value.generators[0]
            append = ast.Attribute(ast.Name(name, ast.Load()), "append", ast.Load())
            inner: ast.stmt = ast.Expr(ast.Call(append, [value.elt], []))
            for test in reversed(over.ifs):
                inner = ast.If(test, [inner], [])
            loop = ast.For(over.target, over.iter, [inner], [])
            if _is_of_chunks(scope, statement, loop):
                first = ast.Assign([ast.Name(name, ast.Store())], ast.List([], ast.Load()))
                place = block.index(statement)
                block[place : place + 1] = [_at(part, statement) for part in (first, loop)]


def _is_of_chunks(scope: Scope, statement: ast.stmt, loop: ast.For) -> bool:
    beside, number = _parts(loop)
    if any(_split(value, scope, statement) is not None for value in beside.values()):
        return True
    items = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Subscript)]
    return any(number and ast.unparse(item.slice) == number and _split(item.value, scope, statement) for item in items)


def _listed(statement: ast.stmt) -> tuple[str, ast.ListComp] | None:
    """(name, value) of `name = [... for ... in ...]`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Name) or not isinstance(value, ast.ListComp) or len(value.generators) != 1:
        return None
    stored = {node.id for node in ast.walk(value.generators[0].target) if isinstance(node, ast.Name)}
    return (target.id, value) if target.id not in stored | names(value) else None


def _at(made: ast.stmt, like: ast.stmt) -> ast.stmt:
    for node in ast.walk(made):
        if isinstance(node, ast.stmt):
            ast.copy_location(node, like)
    return made


def _parts(loop: ast.For) -> tuple[dict[str, ast.expr], str]:
    """What the loop's names go over side by side, and the name of its number."""
    name, target, over = called(loop.iter), loop.target, loop.iter
    if isinstance(target, ast.Name):
        if name == "range":
            return {}, target.id
        return {target.id: over}, _NUMBER
    if not isinstance(target, ast.Tuple) or not isinstance(over, ast.Call):
        return {}, ""
    if any(word.arg != "strict" for word in over.keywords):
        return {}, ""
    number, parts, given = _NUMBER, target.elts, over.args
    if name == "enumerate" and len(given) == 1 and len(parts) == 2 and isinstance(parts[0], ast.Name):
        number, parts = parts[0].id, [parts[1]]
        if isinstance(parts[0], ast.Tuple) and called(given[0]) == "zip" and isinstance(given[0], ast.Call):
            parts, given = parts[0].elts, given[0].args
    elif name != "zip":
        return {}, ""
    if len(parts) != len(given) or not all(isinstance(part, ast.Name) for part in parts):
        return {}, ""
    return {ast.unparse(part): value for part, value in zip(parts, given, strict=True)}, number


def _split(value: ast.expr, scope: Scope, place: ast.stmt) -> ast.expr | None:
    """The rows of `torch.split(rows, sizes, dim=0)`, `rows.split(sizes)`, which nothing changes until ``place``."""
    made, where = scope.resolved(value, place)
    if not isinstance(made, ast.Call) or called(made) not in CUTS:
        return None
    rows = subject(made)
    rest = [part for part in made.args if part is not rows] + [
        word.value for word in made.keywords if word.arg not in ("dim", "tensor")
    ]
    dims = [word.value for word in made.keywords if word.arg == "dim"] + rest[1:]
    if rows is None or not rest or not _may_be_counts(rest[0], scope, where) or not all(map(is_zero, dims)):
        return None
    return None if scope.changed(rows, where, place) else rows


def _may_be_counts(value: ast.expr, scope: Scope, place: ast.stmt) -> bool:
    """Whether sizes are what a call, or a caller, gives, in other forms, and nothing has been written to since."""
    while True:
        value, place = scope.resolved(value, place)
        if isinstance(value, ast.Name):
            return scope.assigned(value.id, place) is None
        if isinstance(value, ast.Subscript):  # one of several results
            return isinstance(value.value, ast.Call)
        inner = subject(value) if isinstance(value, ast.Call) and called(value) in CONVERSIONS else None
        if inner is None:
            return isinstance(value, ast.Call | ast.Attribute)
        value = inner


class _Slicing(ast.NodeTransformer):
    """Slices in the place of chunks."""

    def __init__(self, scope: Scope, loop: ast.For, number: str, taken: dict[str, ast.expr]) -> None:
        self.scope, self.loop, self.number, self.taken = scope, loop, number, taken
        self.found: dict[str, None] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        rows = self.taken.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if rows is None else self._slice(rows)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        rows = None
        if self.number and isinstance(node.ctx, ast.Load) and ast.unparse(node.slice) == self.number:
            rows = _split(node.value, self.scope, self.loop)
        return self.generic_visit(node) if rows is None else self._slice(rows)

    def _slice(self, rows: ast.expr) -> ast.expr:
        ends = ast.Slice(ast.Name(_START, ast.Load()), ast.Name(_END, ast.Load()))
        made = ast.Subscript(copy.deepcopy(rows), ends, ast.Load())
        self.found[ast.unparse(made)] = None
        return made
