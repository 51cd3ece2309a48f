"""Where a loop's slices of rows sorted by expert start and end, as the source of the loop has it.

    for e, n in enumerate(counts):          end = start + n; ...; start = end
    for e, end in enumerate(ends):          start = 0 if e == 0 else ends[e - 1]
    for e in range(len(self.experts)):      the same with counts[e] and ends[e], or rows[offsets[e]:offsets[e + 1]]
    for expert, n in zip(self.experts, counts):                 the same, with expert = self.experts[_number_]
    for expert, a, b in zip(self.experts, starts, ends):        starts = [0, *ends[:-1]], or ends - counts
    for e, (a, b) in enumerate(pairwise(offsets)):              a = offsets[e], b = offsets[e + 1]

What is taken of an element is taken by the number: n is counts[e].

Nothing is proved here: what is made of such a loop is tried.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from compile_passes.source import ZEROS, Scope, assignments, called, is_zero, subject, sure

# What may lie between ids, or a mask of them, and counts of an expert's tokens.
CONVERSIONS = frozenset({
    "tolist", "cpu", "numpy", "cumsum", "bincount", "sum", "one_hot", "permute", "flatten", "view", "reshape", "long",
    "int", "to", "float", "squeeze", "detach", "ravel", "any", "transpose", "histc", "type", "nelement", "item",
})  # fmt: skip
_READ = frozenset({"item", "int", "tolist"})
# Calls that count ids into zeros.
_COUNTING = frozenset({"scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"})
_NUMBER = "_number_"  # of an expert, where the loop has no name for it


@dataclass(frozen=True)
class Slices:
    """The slices of a loop.

    Attributes:
        number: the name of the expert's number.
        start, end: as the slices have them.
        arithmetic: the statements that make these, and need not be there without them.
        empty, filled: what asks whether a slice is empty, and whether it is not.
        over_counts: whether the loop is over what the data knows, and not over the experts.
        beside: what the loop's other names are then, by the number.
        given: the names of counts or bounds that the loop goes over.
    """

    number: str
    start: str
    end: str
    arithmetic: tuple[ast.stmt, ...]
    empty: frozenset[str]
    filled: frozenset[str]
    over_counts: bool
    beside: tuple[ast.stmt, ...] = ()
    given: frozenset[str] = frozenset()


def slices_of(scope: Scope, loop: ast.For) -> Slices | None:
    """Slices that follow each other, by counts or by their ends."""
    over = called(loop.iter)
    beside, number = numbered(scope, loop)
    if over not in ("range", "enumerate", "zip", "pairwise") or not number:
        return None
    if over == "range" and len(sure(ast.Call, loop.iter).args) != 1:
        return None
    known = {name: _element(value, number) for name, value in beside.items() if _is_known(value, scope, loop)}
    if not known and over in ("zip", "pairwise"):
        return None
    others = {name: value for name, value in beside.items() if known and name not in known}
    return _Bounds(scope, loop, number, known).slices(taken_by_number(others, number, loop))


def numbered(scope: Scope, loop: ast.For) -> tuple[dict[str, ast.expr], str]:
    """As `side_by_side`, where the numbers that `experts, counts = unique(sorted_ids, return_counts=True)` gives first
    are those of a loop over both, which leaves out experts without rows.
    """
    beside, number = side_by_side(loop)
    for name, value in beside.items() if len(beside) > 1 else ():
        first = [part for part in _chain(value, scope, loop) if isinstance(part, ast.Subscript) and is_zero(part.slice)]
        if any(called(part.value) in ("unique", "unique_consecutive") for part in first):
            return {other: of for other, of in beside.items() if other != name}, name
    return beside, number


def _is_known(value: ast.expr, scope: Scope, loop: ast.For) -> bool:
    """Whether it is counts, or their ends, or ends that start with 0."""
    inner = value.value if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice) else value
    if counted(inner, scope, loop, loop=loop) is not None:
        return True
    made = [_all_but_the_last(part) for part in _chain(inner, scope, loop)]
    chain = [one for part in made for one in _chain(part, scope, loop)]
    behind = [found for one in chain if (found := _behind_zero(one)) is not None]
    behind += [one.left for one in chain if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub)]  # ends - counts
    return any(_is_cumulated(_all_but_the_last(part), scope, loop) for part in behind)


def _all_but_the_last(value: ast.expr) -> ast.expr:
    return value.value if isinstance(value, ast.Subscript) and ast.unparse(value.slice) == ":-1" else value


def _element(value: ast.expr, number: str) -> ast.expr:
    """Element number ``number`` of ``value``: that of ends[:-1] is ends[number], of ends[1:] ends[number + 1]."""
    place: ast.expr = ast.Name(number, ast.Load())
    cut = ast.unparse(value.slice) if isinstance(value, ast.Subscript) else ""
    if isinstance(value, ast.Subscript) and cut in (":-1", "1:"):
        value, place = value.value, ast.BinOp(place, ast.Add(), ast.Constant(1)) if cut == "1:" else place
    return ast.Subscript(value, place, ast.Load())


def side_by_side(loop: ast.For) -> tuple[dict[str, ast.expr], str]:
    """What the names of a loop go over side by side, and the name of its number; ({}, "") of other loops."""
    name, target, over = called(loop.iter), loop.target, loop.iter
    if isinstance(target, ast.Name):
        if name == "range":
            return {}, target.id
        return {target.id: over}, _NUMBER
    if not isinstance(target, ast.Tuple) or not isinstance(over, ast.Call):
        return {}, ""
    if any(word.arg != "strict" for word in over.keywords):
        return {}, ""
    number, part = _NUMBER, sure(ast.expr, target)
    if name == "enumerate" and len(over.args) == 1 and len(target.elts) == 2 and isinstance(target.elts[0], ast.Name):
        number, part, over = target.elts[0].id, target.elts[1], over.args[0]
    elif name not in ("zip", "pairwise"):
        return {}, ""
    pairs = [*_pairs(part, over)]
    if not all(isinstance(name, ast.Name) for name, _ in pairs):
        return {}, ""
    return {ast.unparse(name): value for name, value in pairs}, number


def _pairs(target: ast.expr, over: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(name, what it goes over) of `x in xs`, `x, y in zip(xs, ys)` and `x, y in pairwise(xs)`, one in another, too."""
    name = called(over)
    given = over.args if isinstance(over, ast.Call) else []
    parts = target.elts if isinstance(target, ast.Tuple) else []
    if name == "pairwise" and len(given) == 1 and len(parts) == 2:
        below, above = (ast.parse(f"({ast.unparse(given[0])})[{cut}]", mode="eval").body for cut in (":-1", "1:"))
        given, name = [below, above], "zip"
    if name != "zip" or len(parts) != len(given) or not parts:
        yield target, over
        return
    for part, value in zip(parts, given, strict=True):
        yield from _pairs(part, value)


def taken_by_number(beside: dict[str, ast.expr], number: str, loop: ast.For) -> list[ast.stmt]:
    """`name = value[number]` of names that a loop goes over."""
    return [
        ast.copy_location(ast.Assign([ast.Name(name, ast.Store())],
                                     ast.Subscript(value, ast.Name(number, ast.Load()), ast.Load())), loop)
        for name, value in beside.items()
    ]  # fmt: skip


def has_both_ends(node: ast.AST) -> bool:
    """Whether it is `rows[start:end]`."""
    index = node.slice if isinstance(node, ast.Subscript) else None
    return isinstance(index, ast.Slice) and None not in (index.lower, index.upper) and index.step is None


def counted(
    value: ast.expr | None, scope: Scope, place: ast.stmt, *, loop: ast.For, whole: bool = False
) -> set[str] | None:
    """The names of what ``value`` counts, and of all steps between, as far as these are in ``loop`` what they were
    there; None when it is something else than counts.

    Args:
        whole: whether what is counted is an answer itself.
    """
    found: set[str] = set()
    steps = int(whole)
    while value is not None:
        if isinstance(value, ast.Name):
            found |= {value.id} if scope.kept(value.id, place, loop) else set()
            inner = scope.assigned(value.id, place)
            if inner is None or not isinstance(inner[0], ast.Call) or called(inner[0]) not in CONVERSIONS:
                # zeros that something has been counted into, once
                again = inner is not None and scope.writes(value.id, inner[1], place) > 1
                return found if steps and not again else None
            if scope.value(value.id, place) is None:
                return None
            value, place = inner
        elif isinstance(value, ast.Attribute):
            return found | {ast.unparse(value)} if steps else None
        elif isinstance(value, ast.Call) and called(value) in CONVERSIONS:
            steps += 1
            value = subject(value)
        else:
            return found if _are_counted(value) or (steps and _are_compared(value)) else None
    return None


def _are_counted(value: ast.expr) -> bool:
    """`zeros.scatter_add_(0, ids, ones)`."""
    into = subject(value) if isinstance(value, ast.Call) and called(value) in _COUNTING else None
    return into is not None and called(into) in ZEROS


def _are_compared(value: ast.expr) -> bool:
    """`ids[..., None] == experts`."""
    return isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.Eq)


def _is_cumulated(value: ast.expr, scope: Scope, place: ast.stmt) -> bool:
    return any(called(node) == "cumsum" for node in _chain(value, scope, place))


def _chain(value: ast.expr, scope: Scope, place: ast.stmt, *, as_made: bool = False) -> Iterator[ast.expr]:
    """The steps from ``value`` back to what it is made of, one operand each; ``as_made``: past what is written to."""
    for _ in range(50):
        value, place = scope.resolved(value, place, as_made=as_made)
        yield value
        inner = subject(value) if isinstance(value, ast.Call) else None
        if inner is None:
            return
        value = inner


class _Bounds:
    """The bounds of the slices in a loop, by the number of an expert.

    Args:
        given: names that the loop itself assigns to, of counts or of their ends.
    """

    def __init__(self, scope: Scope, loop: ast.For, number: str, given: dict[str, ast.expr] | None = None) -> None:
        self.scope, self.loop, self.number = scope, loop, number
        self.given = given or {}
        self.assigned: dict[str, tuple[ast.expr, ast.stmt]] = dict(_assigned(loop))
        self.used: list[ast.stmt] = []

    def slices(self, beside: list[ast.stmt]) -> Slices | None:
        found = {
            (ast.unparse(index.lower), ast.unparse(index.upper)): (index.lower, index.upper)
            for part in self.loop.body for node in ast.walk(part)
            if isinstance(node, ast.Subscript)
            for index in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])
            if isinstance(index, ast.Slice) and index.lower is not None and index.upper is not None
        }  # fmt: skip
        for (start, end), (below, above) in found.items():
            self.used = []
            begin = self._zero_before(below)
            lower, upper = self._bare(below, but=begin), self._bare(above, but=begin)
            counts = self._ended(upper, begin) if begin else self._followed(lower, upper)
            if counts is not None:
                return replace(self._made(start, end, counts), beside=tuple(beside), given=frozenset(self.given))
        return None

    def _made(self, start: str, end: str, counts: str) -> Slices:
        texts = {counts, *(name for name, (value, _) in self.assigned.items() if self._text(value) == counts)}
        texts |= {name for name, value in self.given.items() if ast.unparse(value) == counts}
        empty = {f"{text} {test}" for text in texts for test in ("== 0", "< 1", "<= 0")}
        empty |= {f"not {text}" for text in texts}
        filled = {f"{text} {test}" for text in texts for test in ("!= 0", "> 0", ">= 1")} | texts
        empty |= {f"{start} == {end}", f"{end} == {start}", f"{end} <= {start}", f"{start} >= {end}"}
        filled |= {f"{start} != {end}", f"{end} != {start}", f"{end} > {start}", f"{start} < {end}"}
        numbers = [
            place for name, (value, place) in self.assigned.items()
            if name not in (start, end) and called(value) in _READ and place not in self.used
        ]  # fmt: skip
        return Slices(
            self.number, start, end, (*self.used, *numbers), frozenset(empty), frozenset(filled), bool(self.given)
        )  # fmt: skip

    def _bare(self, value: ast.expr, seen: frozenset[str] = frozenset(), *, but: str | None = None) -> ast.expr:
        """``value`` without reading it on the host, and without the names of the loop's body, ``but`` one."""
        while True:
            if isinstance(value, ast.Call) and called(value) in _READ and (inner := subject(value)) is not None:
                value = inner
            elif isinstance(value, ast.Name) and value.id in self.given:
                return self.given[value.id]
            elif isinstance(value, ast.Name) and value.id in self.assigned and value.id not in (*seen, but):
                seen |= {value.id}
                value, place = self.assigned[value.id]
                if place not in self.used:
                    self.used.append(place)
            elif isinstance(value, ast.BinOp):
                left, right = (self._bare(side, seen, but=but) for side in (value.left, value.right))
                return ast.BinOp(left, value.op, right)
            else:
                return value

    def _text(self, value: ast.expr, *, but: str | None = None) -> str:
        used, self.used = self.used, []
        text = ast.unparse(self._bare(value, but=but))
        self.used = used
        return text

    def _followed(self, lower: ast.expr, upper: ast.expr) -> str | None:
        """The counts where slices follow each other by their ends."""
        if not isinstance(upper, ast.Subscript):
            return None
        ends, index, start, number = ast.unparse(upper.value), ast.unparse(upper.slice), ast.unparse(lower), self.number
        if index == f"{number} + 1":
            found = start == f"{ends}[{number}]" and self._is_behind_zero(upper.value)
            return f"{ast.unparse(upper)} - {start}" if found else None
        if index != number or not self._is_ends(upper.value):
            return None
        if start in _before(ends, number):
            return f"{ends}[{number}] - {start}"
        starts = lower.value if isinstance(lower, ast.Subscript) and ast.unparse(lower.slice) == number else lower
        if starts is not lower and self._are_starts(starts, upper.value):
            return f"{ast.unparse(upper)} - {start}"
        chain = _chain(starts, self.scope, self.loop)
        made = next((part for part in chain if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)), None)
        if made is None:
            return None
        cumulated = self._cumulated(upper.value) if starts is not lower else None
        of_ends = cumulated is not None and self._cumulated(made.left) == cumulated
        if of_ends or ast.unparse(made.left) in (ends, ast.unparse(upper)):  # ends - counts
            counts = ast.unparse(made.right)
            return counts if starts is lower else f"{counts}[{number}]"
        return None

    def _are_starts(self, starts: ast.expr, ends: ast.expr) -> bool:
        """Whether ``starts`` are a 0 and all ``ends`` but the last."""
        cumulated = self._cumulated(ends)
        for made in _chain(starts, self.scope, self.loop):
            behind = _behind_zero(made)
            if behind is None and isinstance(made, ast.Subscript) and ast.unparse(made.slice) == ":-1":
                behind = next(filter(None, map(_behind_zero, _chain(made.value, self.scope, self.loop))), None)
            elif isinstance(behind, ast.Subscript):
                behind = behind.value if ast.unparse(behind.slice) == ":-1" else None
            else:
                behind = None
            if behind is not None:
                return cumulated is not None and self._cumulated(behind) == cumulated
        return False

    def _cumulated(self, value: ast.expr) -> str | None:
        """The call of `cumsum` that ``value`` is made of."""
        chain = _chain(value, self.scope, self.loop)
        return next((ast.unparse(part) for part in chain if called(part) == "cumsum"), None)

    def _zero_before(self, start: ast.expr) -> str | None:
        """The name that slices start from, where it is 0 before the loop."""
        begin = self.scope.value(start.id, self.loop) if isinstance(start, ast.Name) else None
        return start.id if begin is not None and is_zero(begin[0]) and isinstance(start, ast.Name) else None

    def _ended(self, upper: ast.expr, start: str) -> str | None:
        """The counts where every slice starts where the last one ended: `start = end` at the loop's end."""
        if isinstance(upper, ast.BinOp) and isinstance(upper.op, ast.Add):
            sides = [ast.unparse(side) for side in (upper.left, upper.right)]
            counts = [
                side for side in (upper.left, upper.right)
                if isinstance(side, ast.Subscript) and ast.unparse(side.slice) == self.number
            ]  # fmt: skip
            if len(counts) != 1 or start not in sides or not self._are_counts(counts[0].value):
                return None
            count = ast.unparse(counts[0])
            ends = {f"{start} + {count}", f"{count} + {start}"}
        elif (
            isinstance(upper, ast.Subscript) and ast.unparse(upper.slice) == self.number and self._is_ends(upper.value)
        ):
            count, ends = "", {ast.unparse(upper)}
        else:
            return None
        for part in self.loop.body:
            to = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
            if to is None or ast.unparse(to) != start:
                continue
            if isinstance(part, ast.Assign):
                moved = self._text(part.value, but=start) in ends
            else:
                added = isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Add)
                moved = added and self._text(part.value) == count  # type: ignore[attr-defined]
            if not moved:
                return None
            self.used.append(part)
            return count or f"{ast.unparse(upper)} - {start}"
        return None

    def _is_ends(self, value: ast.expr) -> bool:
        return _is_cumulated(value, self.scope, self.loop) and self._are_counts(value)

    def _are_counts(self, value: ast.expr) -> bool:
        return counted(value, self.scope, self.loop, loop=self.loop) is not None

    def _is_behind_zero(self, value: ast.expr) -> bool:
        """Whether ``value`` is a 0 and the ends behind it: padded, or put together."""
        unwritten = [*_chain(value, self.scope, self.loop)]
        for made in _chain(value, self.scope, self.loop, as_made=True):
            if called(made) in ("zeros", "new_zeros"):
                return self._ends_written(made)
            if made not in unwritten:
                return False
            behind = _behind_zero(made)
            if behind is not None:
                return _is_cumulated(behind, self.scope, self.loop)
        return False

    def _ends_written(self, zeros: ast.expr) -> bool:
        """Whether the one thing that is written into ``zeros`` are the ends, behind the first: `bounds[1:] = ...`."""
        statements = [part for part in self.scope.statements() if isinstance(part, ast.Assign)]
        held = {ast.unparse(part.targets[0]) for part in statements if part.value is zeros}
        written = [
            part for part in statements
            if isinstance(to := part.targets[0], ast.Subscript) and ast.unparse(to.value) in held
        ]  # fmt: skip
        behind = [ast.unparse(sure(ast.Subscript, part.targets[0]).slice) for part in written]
        return behind == ["1:"] and _is_cumulated(written[0].value, self.scope, written[0])


def _behind_zero(made: ast.expr) -> ast.expr | None:
    """What is behind a 0: padded, or put together."""
    if called(made) == "pad":
        given = sure(ast.Call, made).args
        return given[0] if len(given) > 1 and ast.unparse(given[1]) in ("(1, 0)", "[1, 0]") else None
    if called(made) in ("cat", "concat", "hstack"):
        parts = sure(ast.Call, made).args[0]
        both = parts.elts if isinstance(parts, ast.List | ast.Tuple) else []
        return both[1] if len(both) == 2 else None
    if isinstance(made, ast.BinOp) and isinstance(made.op, ast.Add):
        return made.right if ast.unparse(made.left) == "[0]" else None
    if isinstance(made, ast.List) and len(made.elts) == 2 and isinstance(made.elts[1], ast.Starred):
        return made.elts[1].value if is_zero(made.elts[0]) else None
    return None


def _before(ends: str, number: str) -> frozenset[str]:
    """Where the slice of an expert starts, by the ends of all."""
    last = f"{ends}[{number} - 1]"
    later = (f"{last} if {number} {test} else 0" for test in ("> 0", "!= 0", ">= 1"))
    return frozenset({f"0 if {number} == 0 else {last}", f"{last} if {number} else 0", *later})


def _assigned(loop: ast.For) -> dict[str, tuple[ast.expr, ast.stmt]]:
    """The names that statements of the loop's body assign to, once, with what and where."""
    found: dict[str, tuple[ast.expr, ast.stmt]] = {}
    twice: set[str] = set()
    for part in loop.body:
        for name, given in assignments(part):
            if isinstance(name, ast.Name):
                twice |= {name.id} & {*found}
                found[name.id] = (given, part)
    return {name: one for name, one in found.items() if name not in twice}
