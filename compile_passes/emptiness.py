"""Tests of a loop for an expert without tokens: what they look like, and the loop without them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from compile_passes.source import Scope, called, is_zero, rows_counted, subject
from compile_passes.updates import Updates

# Calls that say how many of a mask's entries hold, or whether one does.
_COUNTS = frozenset({"sum", "any", "count_nonzero"})
# Calls that a number passes through.
_NUMBER = frozenset({"item", "int", "bool", "cpu", "long"})


@dataclass(frozen=True)
class Tests:
    """What a loop may ask.

    Attributes:
        counts: names of numbers of an expert's rows that the loop itself is over, or of lists of them.
        updates: what the loop writes; None where its rows are slices as long as the counts say.
        any_rows: whether it may ask about rows, too, that are not known to be all that it writes.
    """

    scope: Scope
    counts: frozenset[str]
    updates: Updates | None
    any_rows: bool = False


def without_tests(body: list[ast.stmt], tests: Tests) -> list[ast.stmt]:
    """``body`` of a loop with the code for hit experts in the place of `if` an expert was hit."""
    made: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If) and tests.scope.alive(statement):
            empty = is_empty(statement.test, statement, tests)
            if empty is True and isinstance(statement.body[0], ast.Continue):
                made += without_tests(statement.orelse, tests)
                continue
            idle = all(isinstance(other, ast.Continue | ast.Pass) for other in statement.orelse)
            if empty is False and idle:
                made += without_tests(statement.body, tests)
                continue
        for name in ("body", "orelse"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list) and inner:
                setattr(statement, name, without_tests(inner, tests) or [ast.Pass()])
        made.append(statement)
    return made


def is_empty(test: ast.expr, place: ast.stmt, tests: Tests) -> bool | None:
    """True: ``test`` holds where there are no rows; False: where there are some; None: it is no such test."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = is_empty(test.operand, place, tests)
        return None if inner is None else not inner
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        (operator,), (bound,) = test.ops, test.comparators
        if not _is_number(test.left, place, tests) or not isinstance(bound, ast.Constant):
            return None
        if is_zero(bound):
            kinds: dict[type[ast.cmpop], bool] = {ast.Eq: True, ast.LtE: True, ast.NotEq: False, ast.Gt: False}
            return kinds.get(type(operator))
        if type(bound.value) is int and bound.value == 1:
            return {ast.Lt: True, ast.GtE: False}.get(type(operator))
        return None
    return False if _is_number(test, place, tests) else None


def _is_number(value: ast.expr, place: ast.stmt, tests: Tests) -> bool:
    """Whether ``value`` is the number of rows that the loop writes, or whether there are any."""
    if isinstance(value, ast.Name) and value.id in tests.counts:
        return True
    value, place = tests.scope.resolved(value, place)
    rows = rows_counted(value)
    if rows is not None:
        return _are_rows(rows, place, tests)
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Name) and value.value.id in tests.counts
    if not isinstance(value, ast.Call):
        return False
    inner = subject(value)
    if inner is None:
        return False
    if called(value) in _NUMBER:
        return _is_number(inner, place, tests)
    # `mask.sum()`, but not `mask.sum(0)`
    own = isinstance(value.func, ast.Attribute) and inner is value.func.value
    asked = called(value) in _COUNTS and not value.keywords and not (value.args if own else value.args[1:])
    return asked and _are_rows(inner, place, tests)


def _are_rows(value: ast.expr, place: ast.stmt, tests: Tests) -> bool:
    return tests.any_rows or (tests.updates is not None and tests.updates.emptied_by(value, place))
