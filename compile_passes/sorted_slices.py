"""A loop over slices of rows sorted by expert, rewritten as a loop over the rows of each expert.

    order = ids.view(-1).argsort()                  ids = ids.view(-1).view(-1, K)
    rows = x[order // K]                            for e in range(len(self.experts)):
    for e, n in enumerate(counts.tolist()):             token, slot = torch.where(ids == e)
        end = start + n                                 out.index_add_(0, token, expert(x[token]) * ...)
        expert(rows[start:end]) ...
        start = end

The slice of an expert is its pairs: those at which the ids are its number. Where results are collected in a list and
put together behind the loop, the rows are left in the order of the pairs, and every expert writes its own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from compile_passes.source import NotStatic, Scope, bodies, called, is_zero, names, subject, sure

# What may lie between ids, or a mask of them, and counts of an expert's tokens.
CONVERSIONS = frozenset({
    "tolist", "cpu", "numpy", "cumsum", "bincount", "sum", "one_hot", "permute", "flatten", "view", "reshape", "long",
    "int", "to", "float", "squeeze", "detach", "ravel", "any", "transpose", "histc", "type", "nelement", "item",
})  # fmt: skip
_SORTS = frozenset({"argsort", "sort"})


def counted(value: ast.expr | None, scope: Scope, place: ast.stmt, *, whole: bool = False) -> set[str] | None:
    """The names of what ``value`` counts, and of all steps between; None when it is something else than counts.

    Args:
        whole: whether what is counted is an answer itself.
    """
    found: set[str] = set()
    steps = int(whole)
    while value is not None:
        if isinstance(value, ast.Name):
            found.add(value.id)
            inner = scope.value(value.id, place)
            if inner is None or not isinstance(inner[0], ast.Call) or called(inner[0]) not in CONVERSIONS:
                return found if steps else None
            value, place = inner
        elif isinstance(value, ast.Attribute):
            return found | {ast.unparse(value)} if steps else None
        elif isinstance(value, ast.Call) and called(value) in CONVERSIONS:
            steps += 1
            value = subject(value)
        else:
            return None
    return None


@dataclass(frozen=True)
class _Slices:
    """The slices of a loop: the number of the expert, and the names where one starts and ends."""

    number: str
    start: str
    end: str
    arithmetic: tuple[ast.stmt, ...]


@dataclass(frozen=True)
class _Order:
    """`order = flat.argsort()`: its name, where it is made, and what it sorts."""

    name: str
    place: ast.Assign
    flat: ast.expr


def unsort(tree: ast.FunctionDef, scope: Scope, loop: ast.For) -> str | None:
    """Rewrite the slices of ``loop`` in place.

    Returns:
        The name of the expert's number, which the loop has to be over; None when there are no slices in the loop.

    Raises:
        NotStatic: there are, and what they are slices of is not known.
    """
    slices = _slices(scope, loop)
    if slices is None:
        return None
    uses = [node for statement in loop.body for node in ast.walk(statement) if _is_slice(node, slices)]
    if not uses:
        raise NotStatic("no rows are taken from one place to another of them", loop)
    return _Unsorting(tree, scope, loop, slices).run()


def takes_slices(scope: Scope, loop: ast.For) -> bool:
    """Whether the rows of a loop are slices that follow each other."""
    return _slices(scope, loop) is not None


def _slices(scope: Scope, loop: ast.For) -> _Slices | None:
    """Slices that follow each other, by counts or by their ends."""
    target = loop.target
    if called(loop.iter) != "enumerate" or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return None
    number, given = target.elts
    iterated = sure(ast.Call, loop.iter).args
    if not isinstance(number, ast.Name) or not isinstance(given, ast.Name) or len(iterated) != 1:
        return None
    (source,) = iterated
    if counted(source, scope, loop) is None:
        return None
    cumulated = any(called(node) == "cumsum" for node in _chain(source, scope, loop))
    return (_by_ends if cumulated else _by_counts)(scope, loop, number.id, given.id)


def _by_counts(scope: Scope, loop: ast.For, number: str, count: str) -> _Slices | None:
    """`end = start + n`, and `start = end` at last."""
    sums = [part for part in loop.body if isinstance(part, ast.Assign) and isinstance(part.value, ast.BinOp)
            and isinstance(part.value.op, ast.Add) and count in names(part.value)]  # fmt: skip
    for first in sums:
        added = sure(ast.BinOp, first.value)
        terms = [added.left, added.right]
        starts = [term.id for term in terms if isinstance(term, ast.Name) and term.id != count]
        end = first.targets[0]
        if len(starts) != 1 or not isinstance(end, ast.Name):
            continue
        last = [part for part in loop.body if ast.unparse(part) == f"{starts[0]} = {end.id}"]
        begin = scope.value(starts[0], loop)
        if len(last) == 1 and begin is not None and is_zero(begin[0]):
            return _Slices(number, starts[0], end.id, (first, last[0]))
    return None


def _by_ends(scope: Scope, loop: ast.For, number: str, end: str) -> _Slices | None:
    """`start = 0 if i == 0 else ends[i - 1]`."""
    ends = ast.unparse(sure(ast.Call, loop.iter).args[0])
    for part in loop.body:
        if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
            if ast.unparse(part.value) == f"0 if {number} == 0 else {ends}[{number} - 1]":
                return _Slices(number, part.targets[0].id, end, (part,))
    return None


def _chain(value: ast.expr, scope: Scope, place: ast.stmt) -> list[ast.expr]:
    """The steps from ``value`` back to what it is made of, one operand each."""
    found: list[ast.expr] = []
    while True:
        value, place = scope.resolved(value, place)
        found.append(value)
        inner = subject(value) if isinstance(value, ast.Call) else None
        if inner is None or len(found) > 50:
            return found
        value = inner


def _is_slice(node: ast.AST, slices: _Slices) -> bool:
    """`rows[start:end]`."""
    index = node.slice if isinstance(node, ast.Subscript) else None
    return (
        isinstance(index, ast.Slice)
        and index.step is None
        and index.lower is not None
        and index.upper is not None
        and (ast.unparse(index.lower), ast.unparse(index.upper)) == (slices.start, slices.end)
    )


class _Unsorting(ast.NodeTransformer):
    """The loop over ``slices`` by the pairs of each expert."""

    def __init__(self, tree: ast.FunctionDef, scope: Scope, loop: ast.For, slices: _Slices) -> None:
        self.tree, self.scope, self.loop, self.slices = tree, scope, loop, slices
        self.order: _Order | None = None
        self.size: ast.expr | None = None  # K
        self.listed: str | None = None  # the list that results are collected in

    def run(self) -> str:
        loop, slices = self.loop, self.slices
        rest = [part for part in loop.body if part not in slices.arithmetic]
        rest = [part for part in rest if not self._is_test(part)]
        self.listed = self._collected(rest)
        loop.body = [self.visit(part) for part in rest]
        if self.order is None or self.size is None:
            raise NotStatic("the slices are not rows sorted by argsort", loop)
        for part in loop.body:
            if {slices.start, slices.end} & names(part):
                raise NotStatic(f"{slices.start} or {slices.end} is more than an end of a slice", part)
        (self._write_pairs if self.listed else self._add_tokens)()
        return slices.number

    def _is_test(self, statement: ast.stmt) -> bool:
        """`if start == end: continue`."""
        if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.body[0], ast.Continue):
            return False
        pair = {f"{self.slices.start} == {self.slices.end}", f"{self.slices.end} == {self.slices.start}"}
        return ast.unparse(statement.test) in pair

    def _collected(self, body: list[ast.stmt]) -> str | None:
        found = [node.value.func.value.id for part in body for node in ast.walk(part)
                 if isinstance(node, ast.Expr) and called(node.value) == "append"
                 and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
                 and isinstance(node.value.func.value, ast.Name)]  # fmt: skip
        if len(found) > 1:
            raise NotStatic("results are collected in several lists", self.loop)
        return found[0] if found else None

    # ---- slices, as rows of the pairs

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if _is_slice(node, self.slices):
            return self._rows(node.value, self.loop)
        if _is_slice(node.slice, self.slices):  # weights[order[start:end]], x[tokens[start:end]]
            inner = self._kind(node.slice.value, self.loop)  # type: ignore[attr-defined]
            return self._taken(node.value, inner)
        return self.generic_visit(node)

    def _rows(self, value: ast.expr, place: ast.stmt) -> ast.expr:
        """The rows of an expert's pairs of what was sorted."""
        kind = self._kind(value, place)
        if kind == "token":
            return self._token()
        made, where = self.scope.resolved(value, place)
        if kind is None and isinstance(made, ast.Subscript):
            if self.scope.changed(made.value, where, self.loop):
                raise NotStatic(f"{ast.unparse(made.value)} changes before the loop", self.loop)
            return self._taken(made.value, self._kind(made.slice, where))
        raise NotStatic(f"{ast.unparse(value)} is not known to be rows sorted by expert", self.loop)

    def _taken(self, source: ast.expr, kind: str | None) -> ast.expr:
        if kind == "token":
            index = "_pairs_" if self.listed else "_token_"
            return _expr(f"_rows_[{index}]" if self.listed else f"{ast.unparse(source)}[{index}]", x=source)
        if kind == "pair":
            if self.listed:
                return _expr(f"{ast.unparse(source)}[_pairs_]")
            return _expr(f"{ast.unparse(source)}.view(_ids_.shape)[_token_, _slot_, None]")
        raise NotStatic(f"{ast.unparse(source)} is not taken in the order of the experts", self.loop)

    def _token(self) -> ast.expr:
        if self.listed:
            raise NotStatic("results are collected in a list and by token", self.loop)
        return ast.Name("_token_", ast.Load())

    def _kind(self, value: ast.expr, place: ast.stmt) -> str | None:
        """ "pair": the order of the pairs; "token": their tokens; None: neither."""
        name = value.id if isinstance(value, ast.Name) else ""
        value, place = self.scope.resolved(value, place)
        divided: ast.expr | None = None
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv):
            divided, size = value.left, value.right
        elif isinstance(value, ast.Call) and called(value) in ("div", "floor_divide") and value.args:
            divided, size = subject(value), value.args[-1]
        if divided is not None:
            if self._kind(divided, place) != "pair" or (self.size and ast.unparse(self.size) != ast.unparse(size)):
                return None
            self.size = size
            return "token"
        flat = _sorted(value)
        if flat is None or not name or not isinstance(place, ast.Assign):
            return None
        order = _Order(name, place, flat)
        if self.order is not None and self.order.place is not place:
            raise NotStatic("the slices are of rows in several orders", self.loop)
        if self.scope.changed(flat, place, self.loop):
            raise NotStatic(f"{ast.unparse(flat)} changes before the loop", self.loop)
        self.order = order
        return "pair"

    # ---- results

    def _add_tokens(self) -> None:
        """Every expert adds its results to its tokens."""
        flat, size = ast.unparse(sure(_Order, self.order).flat), ast.unparse(sure(ast.expr, self.size))
        self._before(f"_ids_ = {flat}.view(-1, {size})")
        self.loop.body[:0] = _statements(f"_token_, _slot_ = torch.where(_ids_ == {self.slices.number})", self.loop)
        self.loop.body = [_add_rows(part) for part in self.loop.body]

    def _write_pairs(self) -> None:
        """Every expert writes the rows of its pairs, and what put them together and in order again is left out."""
        source = next((node for node in ast.walk(self.loop) if hasattr(node, "rows_of")), None)
        if source is None:
            raise NotStatic("no rows of tokens are taken", self.loop)
        flat, size = ast.unparse(sure(_Order, self.order).flat), ast.unparse(sure(ast.expr, self.size))
        self._before(
            f"_flat_ = {flat}\n_rows_ = {ast.unparse(source.rows_of)}.repeat_interleave({size}, dim=0)\n"
            "_outs_ = torch.empty_like(_rows_)"
        )
        append = f"{self.listed}.append"
        self.loop.body = [
            _statements(f"_outs_[_pairs_] = {ast.unparse(part.value.args[0])}", part)[0]  # type: ignore[attr-defined]
            if isinstance(part, ast.Expr) and ast.unparse(part).startswith(f"{append}(") else part
            for part in self.loop.body
        ]  # fmt: skip
        if any(self.listed in names(part) for part in self.loop.body):
            raise NotStatic(f"{self.listed} is more than a list of results", self.loop)
        self.loop.body[:0] = _statements(f"_pairs_ = _flat_ == {self.slices.number}", self.loop)
        self._joined()

    def _before(self, text: str) -> None:
        block = _block_of(self.tree, self.loop)
        place = block.index(self.loop)
        block[place:place] = _statements(text, self.loop)

    def _joined(self) -> None:
        """`outs = torch.cat(outputs)`, then `new[order] = outs`, and `new` in place of both."""
        order = sure(_Order, self.order).name
        for block in _blocks(self.tree):
            for statement in block:
                if not isinstance(statement, ast.Assign):
                    continue
                value: ast.expr = statement.value
                if isinstance(value, ast.IfExp) and self.listed in names(value.test):
                    value = value.body
                if called(value) not in ("cat", "concat", "vstack") or self.listed not in names(value):
                    continue
                joined = sure(ast.Name, statement.targets[0]).id
                put = [
                    other for inner in _blocks(self.tree) for other in inner if isinstance(other, ast.Assign)
                    and isinstance(target := other.targets[0], ast.Subscript)
                    and ast.unparse(target.slice) == order and ast.unparse(other.value) == joined
                ]  # fmt: skip
                if len(put) != 1 or not self.scope.alive(put[0]):
                    raise NotStatic(f"{joined} is not put back in the order of the pairs by an assignment", statement)
                empty = self._empty(put[0])
                reads = sum(isinstance(node, ast.Name) and node.id == joined for node in ast.walk(empty.value))
                if self.scope.reads(joined) != reads + 1:
                    raise NotStatic(f"{joined} is also used in the order of the experts", statement)
                statement.value = _expr("_outs_")
                _block_of(self.tree, empty).remove(empty)
                put[0].value, put[0].targets = _expr("_outs_"), [put[0].targets[0].value]  # type: ignore[attr-defined]
                put[0].targets[0].ctx = ast.Store()  # type: ignore[attr-defined]
                return
        raise NotStatic(f"{self.listed} is not put together by torch.cat", self.loop)

    def _empty(self, put: ast.Assign) -> ast.Assign:
        """Where the empty tensor is made that rows are put into."""
        target = put.targets[0]
        held = sure(ast.Subscript, target).value
        made = self.scope.value(held.id, put) if isinstance(held, ast.Name) else None
        if made is None or called(made[0]) not in ("empty_like", "zeros_like", "empty", "zeros", "new_empty"):
            raise NotStatic(f"what {ast.unparse(held)} holds before is not known", put)
        return sure(ast.Assign, made[1])


def _sorted(value: ast.expr) -> ast.expr | None:
    """What ``value`` is the ascending order of."""
    if isinstance(value, ast.Subscript) and called(value.value) == "sort":
        one = isinstance(value.slice, ast.Constant) and value.slice.value == 1
        call = value.value if one else None
    elif isinstance(value, ast.Attribute) and value.attr == "indices" and called(value.value) == "sort":
        call = value.value
    else:
        call = value if called(value) == "argsort" else None
    if not isinstance(call, ast.Call) or any(word.arg == "descending" for word in call.keywords):
        return None
    given = subject(call)
    rest = [part for part in call.args if part is not given]
    return given if all(ast.unparse(part) in ("0", "-1") for part in rest) else None


def _add_rows(statement: ast.stmt) -> ast.stmt:
    """`out.scatter_reduce_(0, token.view(-1, 1).repeat(1, n), rows, reduce="sum")` as `index_add_`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or called(call) not in ("scatter_reduce_", "scatter_add_") or len(call.args) < 3:
        return statement
    wide, words = call.args[1], {word.arg: ast.unparse(word.value) for word in call.keywords}
    summed = called(call) == "scatter_add_" or words == {"reduce": "'sum'"}
    narrow = wide
    while isinstance(narrow, ast.Call) and called(narrow) in ("repeat", "expand", "view", "unsqueeze", "reshape"):
        narrow = subject(narrow) or narrow
    if (
        not summed
        or not is_zero(call.args[0])
        or not isinstance(narrow, ast.Name)
        or not isinstance(call.func, ast.Attribute)
    ):
        return statement
    text = f"{ast.unparse(call.func.value)}.index_add_(0, {narrow.id}, {ast.unparse(call.args[2])})"
    return _statements(text, statement)[0]


def _expr(text: str, x: ast.expr | None = None) -> ast.expr:
    made = ast.parse(text, mode="eval").body
    if x is not None:
        made.rows_of = x  # type: ignore[attr-defined]
    return made


def _statements(text: str, like: ast.stmt) -> list[ast.stmt]:
    made = ast.parse(text).body
    for node in (part for statement in made for part in ast.walk(statement)):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = like.lineno  # type: ignore[attr-defined]
    return made


def _blocks(tree: ast.FunctionDef) -> list[list[ast.stmt]]:
    return [inner for node in ast.walk(tree) if isinstance(node, ast.stmt) for inner in bodies(node)]


def _block_of(tree: ast.FunctionDef, statement: ast.stmt) -> list[ast.stmt]:
    return next(block for block in _blocks(tree) if statement in block)
