"""Chunks that `split` makes of rows sorted by expert, in a loop over experts, written as slices of these rows.

    for e, chunk in enumerate(torch.split(rows, sizes))         chunk is rows[_start_:_end_]
    for expert, chunk in zip(self.experts, rows.split(sizes))   the same, with expert = self.experts[_number_]
    chunks[e] in a loop over range, [expert(chunk) for ...]     the same, in a loop
    rows.tensor_split(ends[:-1])                                as rows.split(sizes)
    outs[start : start + len(chunk)] = expert(chunk)            outs[_start_:_end_] = ..., where that is its place

Nothing is proved here, not even that the sizes are counts of an expert's rows: what is made of such a loop is tried.
"""

from __future__ import annotations

import ast
import copy
import itertools

from compile_passes.comprehensions import unrolled
from compile_passes.slice_bounds import CONVERSIONS, Slices, has_both_ends, numbered, side_by_side, taken_by_number
from compile_passes.source import CUTS, CUTS_AT, Scope, assignments, called, is_zero, subject, sure

_START, _END = "_start_", "_end_"


def chunks_of(scope: Scope, loop: ast.For) -> Slices | None:
    """The chunks that the loop is over, or takes by its number; their names, and what takes them, become slices."""
    beside, number = numbered(scope, loop)
    taken = {name: rows for name, value in beside.items() if (rows := _split(value, scope, loop)) is not None}
    if taken:
        others = {name: value for name, value in beside.items() if name not in taken}
        loop.body[:0] = taken_by_number(others, number, loop)
    replacing = _Slicing(scope, loop, number, taken)
    loop.body = [replacing.visit(part) for part in loop.body]
    if not replacing.found or not number:
        return None
    counts = {chunk: (f"{chunk}.shape[0]", f"{chunk}.size(0)", f"len({chunk})") for chunk in replacing.found}
    _cut_alike(scope, loop, frozenset(text for texts in counts.values() for text in texts))
    held = [*itertools.chain(*map(assignments, loop.body))]
    empty, filled = set[str](), set[str]()
    for chunk, texts in counts.items():
        known = {*texts, f"{chunk}.numel()", f"{chunk}.nelement()"}
        for count in known | {ast.unparse(name) for name, value in held if ast.unparse(value) in known}:
            empty |= {f"{count} {test}" for test in ("== 0", "< 1", "<= 0")} | {f"not {count}"}
            filled |= {f"{count} {test}" for test in ("> 0", "!= 0", ">= 1")} | {count}
    return Slices(number, _START, _END, (), frozenset(empty), frozenset(filled), bool(taken))


def _cut_alike(scope: Scope, loop: ast.For, counts: frozenset[str]) -> None:
    """Slices that follow each other by ``counts``, the chunks' sizes, as those that the chunks are:

    start = 0 before the loop, `outs[start : start + len(chunk)] = ...` in it, and then `start += len(chunk)`.
    """
    held = {name.id: ast.unparse(value) for part in loop.body for name, value in assignments(part)
            if isinstance(name, ast.Name)}  # fmt: skip
    sizes = counts | {name for name, text in held.items() if text in counts}
    for moved in loop.body:
        to = moved.targets[0] if isinstance(moved, ast.Assign) else getattr(moved, "target", None)
        begin = scope.value(to.id, loop) if isinstance(to, ast.Name) else None
        if begin is None or not is_zero(begin[0]):
            continue
        start = ast.unparse(sure(ast.Name, to))
        ends = {f"{start} + {size}" for size in sizes} | {f"{size} + {start}" for size in sizes}
        ends |= {name for name, text in held.items() if text in ends}
        given = ast.unparse(sure(ast.expr, getattr(moved, "value", None)))
        added = isinstance(moved, ast.AugAssign) and isinstance(moved.op, ast.Add) and given in sizes
        if added or (isinstance(moved, ast.Assign) and given in ends):
            loop.body.remove(moved)
            for index in [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Slice)]:
                if ast.unparse(index) in {f"{start}:{end}" for end in ends}:
                    index.lower, index.upper = ast.Name(_START, ast.Load()), ast.Name(_END, ast.Load())
            return


def unroll_comprehensions(tree: ast.FunctionDef) -> None:
    """Lists that are made of chunks or slices by an expression, as loops that append to them."""
    scope = Scope(tree)
    unrolled(tree, lambda loop, statement: scope.alive(statement) and _cuts(scope, statement, loop))


def _cuts(scope: Scope, statement: ast.stmt, loop: ast.For) -> bool:
    """Whether a loop is over chunks, or takes chunks or slices by the number of an expert."""
    beside, number = side_by_side(loop)
    if any(_split(value, scope, statement) is not None for value in beside.values()):
        return True
    items = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Subscript)]
    if any(number and ast.unparse(item.slice) == number and _split(item.value, scope, statement) for item in items):
        return True
    return bool(number) and any(map(has_both_ends, items))


def _split(value: ast.expr, scope: Scope, place: ast.stmt) -> ast.expr | None:
    """The rows of `torch.split(rows, sizes, dim=0)`, `rows.split(sizes)`, `rows.tensor_split(ends[:-1])`, which nothing
    changes until ``place``.
    """
    made, where = scope.resolved(value, place)
    if not isinstance(made, ast.Call) or called(made) not in CUTS | CUTS_AT:
        return None
    may_cut = _may_be_counts if called(made) in CUTS else _may_be_ends
    rows = subject(made)
    rest = [part for part in made.args if part is not rows] + [
        word.value for word in made.keywords if word.arg not in ("dim", "tensor")
    ]
    dims = [word.value for word in made.keywords if word.arg == "dim"] + rest[1:]
    if rows is None or not rest or not may_cut(rest[0], scope, where) or not all(map(is_zero, dims)):
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


def _may_be_ends(value: ast.expr, scope: Scope, place: ast.stmt) -> bool:
    """Whether places are sums of counts, one by one, without the last."""
    summed = last_left_out = False
    while True:
        value, place = scope.resolved(value, place)
        if isinstance(value, ast.Call) and called(value) in CONVERSIONS:
            summed |= called(value) == "cumsum"
            inner = subject(value)
        elif isinstance(value, ast.Subscript) and ast.unparse(value.slice) == ":-1" and not last_left_out:
            last_left_out, inner = True, value.value
        else:
            inner = None
        if inner is None:
            return summed and last_left_out and _may_be_counts(value, scope, place)
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
