"""Where a loop adds the results of an expert, and what says that there is nothing to add.

A test for an empty expert may only be left out when "empty" is said of the very rows that the loop adds results to:
with other rows, few tokens of small weight for example, an expert would be skipped that has tokens.
"""

from __future__ import annotations

import ast

from compile_passes.source import Scope, called, names, subject
from compile_passes.vocabulary import is_in_place_name

# Calls that write rows of the tensor that they are called on, and which argument says what rows.
_WRITES = {
    "index_add_": 1, "index_add": 1, "scatter_add_": 1, "scatter_add": 1, "scatter_reduce_": 1, "scatter_reduce": 1,
    "index_copy_": 1, "index_copy": 1, "scatter_": 1, "index_put_": 0, "index_put": 0,
}  # fmt: skip
# The same rows, or the same places, in another shape or type.
_SAME = frozenset({
    "view", "flatten", "squeeze", "reshape", "unsqueeze", "long", "int", "bool", "to", "contiguous", "tolist", "detach",
    "expand", "repeat", "clone", "ravel", "cpu", "expand_as", "view_as", "type",
})  # fmt: skip


class Updates:
    """The rows that a loop writes.

    Args:
        loop: a loop over experts.
        scope: of the function that it is in.
    """

    def __init__(self, loop: ast.For, scope: Scope) -> None:
        self.scope, self.loop = scope, loop
        self._inside = frozenset(ast.walk(loop))
        self.known = True
        self.rows: list[tuple[ast.expr, ast.stmt]] = []
        self.outside = scope.read_outside(loop)
        for statement in (node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.stmt)):
            if scope.alive(statement):
                self._add(statement, loop)

    def _add(self, statement: ast.stmt, loop: ast.For) -> None:
        value: ast.AST = getattr(statement, "value", None) or ast.Pass()
        expressions = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt)]
        calls = [node for part in expressions for node in ast.walk(part) if isinstance(node, ast.Call)]
        is_write = isinstance(statement, ast.Expr | ast.Assign) and called(value) in _WRITES
        write = value if is_write and isinstance(value, ast.Call) else None
        self.known &= not any(self._writes_outside(call, statement) for call in calls if call is not write)
        if write is not None:
            place = _WRITES[called(write)]
            words = [word.value for word in write.keywords if word.arg == "index"]
            given = write.args[place] if len(write.args) > place else words[0] if words else None
            if given is None or not isinstance(write.func, ast.Attribute):
                self.known = False
            else:
                self.rows.append((given, statement))
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            if isinstance(target, ast.Subscript):
                self.rows.append((target.slice, statement))
            elif isinstance(target, ast.Name) and not isinstance(statement, ast.For):
                self.known &= target.id not in self.outside
        if isinstance(statement, ast.Expr) and called(value) in ("append", "extend", "add", "update"):
            self.known = False

    def _writes_outside(self, call: ast.Call, place: ast.stmt) -> bool:
        """Whether a call writes what is there in place, as ``x.add_(y)`` does, and that is not the loop's own."""
        in_place = is_in_place_name(called(call))
        out = next((word.value for word in call.keywords if word.arg == "out"), None)
        written = subject(call) if in_place else out
        while written is not None:
            if isinstance(written, ast.Name):
                found = self.scope.assigned(written.id, place)
                if found is None:
                    return written.id in self.outside or not self.scope.stores(written.id)
                if found[1] not in self._inside:
                    return True
                written, place = found
            elif isinstance(written, ast.Subscript) and self._is_rows(written, place):
                return False  # a copy
            elif isinstance(written, ast.Attribute | ast.Subscript):
                written = written.value
            else:
                written = subject(written) if isinstance(written, ast.Call) and called(written) in _SAME else None
        return False

    def emptied_by(self, value: ast.expr, place: ast.stmt) -> bool:
        """Whether all that the loop writes are the rows, or the places, that ``value`` holds, or the first of them."""
        one = ast.dump(self._places(value, place)[0])
        rows = [{ast.dump(self._places(row, where, first)[0]) for first in (False, True)} for row, where in self.rows]
        return self.known and bool(rows) and all(one in row for row in rows)

    def chosen_by(self, roots: set[str]) -> bool:
        """Whether all that the loop writes are places in a mask that is made of one of ``roots``."""
        return self.known and bool(self.rows) and all(
            roots & self._made_of(*self._places(row, where)) for row, where in self.rows
        )  # fmt: skip

    def _made_of(self, value: ast.expr, place: ast.stmt) -> set[str]:
        """Names that ``value`` reads, and those that these are made of, if they are in the loop what they were."""
        seen: set[str] = set()
        found: set[str] = set()
        waiting = [(name, place) for name in names(value)]
        while waiting:
            name, where = waiting.pop()
            if name not in seen:
                seen.add(name)
                found |= {name} if self.scope.kept(name, where, self.loop) else set()
                made = self.scope.value(name, where)
                waiting += [] if made is None else [(inner, made[1]) for inner in names(made[0])]
        return found

    def _places(self, value: ast.expr, place: ast.stmt, first: bool = False) -> tuple[ast.expr, ast.stmt]:
        """The mask in whose places the rows are, and where it is read; with ``first`` the mask of rows, too, of which
        they are the first ones.
        """
        while True:
            value, place = self.scope.resolved(value, place)
            inner: ast.expr | None = None
            if isinstance(value, ast.Tuple):  # x[None, token]
                parts = [part for part in value.elts if not isinstance(part, ast.Constant | ast.Slice)]
                inner = parts[0] if len(parts) == 1 or self._are_listed(parts, place) else None
            elif isinstance(value, ast.Call):
                name = called(value)
                if name in _SAME or name == "any" or (name in ("where", "nonzero") and _of_one(value)):
                    inner = subject(value)  # any of some is where one of them is
            elif isinstance(value, ast.Subscript):
                if called(value.value) in ("where", "nonzero") and isinstance(value.slice, ast.Constant):
                    inner = value.value
                elif _adds_dimensions(value.slice):
                    inner = value.value
                elif self._is_rows(value, place):
                    inner = value.slice
                elif first and isinstance(value.slice, ast.Slice):
                    inner = value.value
            if inner is None:
                return value, place
            value = inner

    def _are_listed(self, parts: list[ast.expr], place: ast.stmt) -> bool:
        """Whether ``parts`` are what one `where` lists: as many each."""
        made = [self.scope.resolved(part, place)[0] for part in parts]
        lists = [one.value for one in made if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant)]
        calls = {ast.dump(one) for one in lists if isinstance(one, ast.Call) and called(one) in ("where", "nonzero")}
        return len(lists) == len(parts) and len(calls) == 1

    def _is_rows(self, value: ast.Subscript, place: ast.stmt) -> bool:
        """Whether ``value`` is ``x[token]`` or ``x[mask]``: what picks is computed in the loop, and no number."""
        index = value.slice
        if isinstance(index, ast.Tuple):
            index = next((part for part in index.elts if isinstance(part, ast.Name)), index)
        made, _ = self.scope.resolved(index, place)
        if isinstance(made, ast.Subscript):  # places from `where(mask)`; `e[0]` of the loop's own `e` is a number
            return called(made.value) in ("where", "nonzero")
        return isinstance(made, ast.Compare) or (isinstance(made, ast.Call) and called(made) not in ("int", "item"))


def _adds_dimensions(index: ast.expr) -> bool:
    """`[:, None]`: all elements, in another shape."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(isinstance(part, ast.Constant) and part.value is None for part in parts) and all(
        part.value in (None, ...) if isinstance(part, ast.Constant)
        else isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None
        for part in parts
    )  # fmt: skip


def _of_one(call: ast.Call) -> bool:
    """Whether a call of `where` is one of a condition alone."""
    return called(call) == "nonzero" or len(call.args) == 1
