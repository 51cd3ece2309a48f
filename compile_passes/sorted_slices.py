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
import copy
from dataclasses import dataclass

from compile_passes.chunks import chunks_of
from compile_passes.slice_bounds import Slices, has_both_ends, slices_of
from compile_passes.source import NotStatic, Scope, blocks, called, is_zero, names, one_a_row, subject, sure


@dataclass(frozen=True)
class _Order:
    """`order = flat.argsort()`: its name, where it is made, and what it sorts."""

    name: str
    place: ast.Assign
    flat: ast.expr


def unsort(tree: ast.FunctionDef, scope: Scope, loop: ast.For) -> Slices | None:
    """Rewrite the slices of ``loop`` in place.

    Returns:
        What they were, with the expert's number, which the loop has to be over; None when there are none in the loop.

    Raises:
        NotStatic: there are, and what they are slices of is not known.
    """
    slices = slices_of(scope, loop) or chunks_of(scope, loop)
    if slices is None:
        return None
    loop.body[:0] = slices.beside
    uses = [node for statement in loop.body for node in ast.walk(statement) if _is_slice(node, slices)]
    if not uses:
        raise NotStatic("no rows are taken from one place to another of them", loop)
    return _Unsorting(tree, scope, loop, slices).run()


def _is_value(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Subscript)


def _is_slice(node: ast.AST, slices: Slices) -> bool:
    """`rows[start:end]`."""
    return has_both_ends(node) and ast.unparse(sure(ast.Subscript, node).slice) == f"{slices.start}:{slices.end}"


class _Unsorting(ast.NodeTransformer):
    """The loop over ``slices`` by the pairs of each expert."""

    def __init__(self, tree: ast.FunctionDef, scope: Scope, loop: ast.For, slices: Slices) -> None:
        self.tree, self.scope, self.loop, self.slices = tree, scope, loop, slices
        self.order: _Order | None = None
        self.size: ast.expr | None = None  # K
        self.listed: str | None = None  # the list or buffer that results are collected in

    def run(self) -> Slices:
        loop, slices = self.loop, self.slices
        rest = [part for part in loop.body if part not in slices.arithmetic]
        rest = [_Filled(slices).visit(part) for part in rest]
        rest = [inner for part in rest for inner in self._without_test(part)]
        self.listed = self._collected(rest)
        rest = [self._put(part) for part in rest]
        loop.body = [self.visit(part) for part in self._with_pairs_spelled_out(rest)]
        if self.order is None or self.size is None:
            raise NotStatic("the slices are not rows sorted by argsort", loop)
        for part in loop.body:
            if any(ast.unparse(node) in (slices.start, slices.end) for node in ast.walk(part) if _is_value(node)):
                raise NotStatic(f"{slices.start} or {slices.end} is more than an end of a slice", part)
            if more := slices.given & names(part):
                raise NotStatic(f"{min(more)} is more than a number of rows", part)
        (self._write_pairs if self.listed else self._add_tokens)()
        return slices

    def _without_test(self, statement: ast.stmt) -> list[ast.stmt]:
        """Nothing of `if start == end: continue`, the body of `if start < end`: rows of no token change nothing."""
        if isinstance(statement, ast.If):
            test = ast.unparse(statement.test)
            *before, last = statement.body
            if test in self.slices.empty and isinstance(last, ast.Continue) and all(map(_appends, before)):
                return [] if not statement.orelse else [statement]
            if test in self.slices.filled and _names_assigned(statement.orelse) <= _names_assigned(statement.body):
                return statement.body
        return [statement]

    def _collected(self, body: list[ast.stmt]) -> str | None:
        """The list, or the buffer of sorted rows, that every expert puts its results in."""
        found = [node.value.func.value.id for part in body for node in ast.walk(part)
                 if isinstance(node, ast.Expr) and called(node.value) == "append"
                 and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
                 and isinstance(node.value.func.value, ast.Name)]  # fmt: skip
        found += [ast.unparse(to.value) for part in body if (to := self._slice_written(part)) is not None]
        if len(found) > 1:
            raise NotStatic("results are collected in several lists", self.loop)
        return found[0] if found else None

    def _slice_written(self, statement: ast.stmt) -> ast.Subscript | None:
        """`outs[start:end]` of `outs[start:end] = rows`."""
        to = statement.targets[0] if isinstance(statement, ast.Assign) else None
        return to if isinstance(to, ast.Subscript) and _is_slice(to, self.slices) else None

    def _put(self, statement: ast.stmt) -> ast.stmt:
        """`outs.append(rows)` and `outs[start:end] = rows` as rows of the pairs."""
        rows: ast.expr | None = None
        if self._slice_written(statement) is not None:
            rows = sure(ast.Assign, statement).value
        elif isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(f"{self.listed}.append("):
            rows = sure(ast.Call, statement.value).args[0]
        return statement if rows is None else _statements(f"_outs_[_pairs_] = {ast.unparse(rows)}", statement)[0]

    def _with_pairs_spelled_out(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """``body`` with `order[start:end]` wherever it has a name for that."""
        assigned = [part for part in body if isinstance(part, ast.Assign) and self._sliced(part.value) == "pair"]
        held = {to.id: part for part in assigned if isinstance(to := part.targets[0], ast.Name)}
        once = {name: part for name, part in held.items() if self.scope.stores(name) == 1}
        rest = [part for part in body if part not in once.values()]
        return [_Spelled({name: part.value for name, part in once.items()}).visit(part) for part in rest]

    # ---- slices, as rows of the pairs

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        narrow = len(index) == 2 and isinstance(index[1], ast.Constant) and index[1].value is None
        if len(index) == 1 or narrow:
            if _is_slice(ast.Subscript(node.value, index[0]), self.slices):  # weights[start:end, None]
                return self._rows(node.value, self.loop, narrow=narrow)
            kind = self._sliced(index[0])
            if kind:  # weights[order[start:end], None], x[tokens[start:end]]
                return self._taken(node.value, kind, narrow=narrow)
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        kind = self._divided(node, self.loop)
        return self._one(kind) if kind else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        kind = self._divided(node, self.loop)
        return self._one(kind) if kind else self.generic_visit(node)

    def _one(self, kind: str) -> ast.expr:
        return self._token() if kind == "token" else ast.Name("_slot_", ast.Load())

    def _sliced(self, value: ast.expr) -> str | None:
        """The kind of what ``value`` is a slice of, or is made of one."""
        if _is_slice(value, self.slices):
            return self._kind(sure(ast.Subscript, value).value, self.loop)
        return self._divided(value, self.loop)

    def _rows(self, value: ast.expr, place: ast.stmt, *, narrow: bool = False) -> ast.expr:
        """The rows of an expert's pairs of what was sorted; ``narrow``: with a dimension of 1 behind the first."""
        kind = self._kind(value, place)
        if kind == "token" and not narrow:
            return self._token()
        made, where = self.scope.resolved(value, place)
        if kind is None and isinstance(made, ast.Subscript):
            if self.scope.changed(made.value, where, self.loop):
                raise NotStatic(f"{ast.unparse(made.value)} changes before the loop", self.loop)
            return self._taken(made.value, self._kind(made.slice, where), narrow=narrow)
        raise NotStatic(f"{ast.unparse(value)} is not known to be rows sorted by expert", self.loop)

    def _taken(self, source: ast.expr, kind: str | None, *, narrow: bool = False) -> ast.expr:
        """Rows of ``source`` at the places of an expert's tokens or pairs; ``narrow``: with a dimension of 1 behind."""
        text = ast.unparse(source)
        if kind == "token" and not narrow:
            index = "_pairs_" if self.listed else "_token_"
            return _expr(f"_rows_[{index}]" if self.listed else f"{text}[{index}]", x=source)
        if kind == "pair":
            behind = ", None" if narrow else ""
            if self.listed and not narrow and (repeated := self._repeated(source)) is not None:
                return _expr("_rows_[_pairs_]", x=repeated)
            if self.listed:
                return _expr(f"{text}[_pairs_{behind}]")
            taken = f"{text}.view(_ids_.shape)[_token_, _slot_{behind}]"  # of [P] or [P, 1]
            return _expr(taken if narrow else f"{taken}.view(-1, *{text}.shape[1:])")
        raise NotStatic(f"{text} is not taken in the order of the experts", self.loop)

    def _repeated(self, source: ast.expr) -> ast.expr | None:
        """x of `x.repeat_interleave(K, dim=0)`, a row for every pair."""
        made, where = self.scope.resolved(source, self.loop)
        if not isinstance(made, ast.Call) or called(made) != "repeat_interleave":
            return None
        rows = subject(made)
        given = [part for part in made.args if part is not rows]
        words = {word.arg: word.value for word in made.keywords}
        size = words.pop("repeats", None) or (given.pop(0) if given else None)
        dim = words.pop("dim", None) or (given.pop(0) if given else None)
        if rows is None or size is None or dim is None or not is_zero(dim) or words or given:
            return None
        if self.scope.changed(rows, where, self.loop) or (self.size and ast.unparse(self.size) != ast.unparse(size)):
            return None
        self.size = size
        return rows

    def _token(self) -> ast.expr:
        if self.listed:
            raise NotStatic("results are collected in a list and by token", self.loop)
        return ast.Name("_token_", ast.Load())

    def _kind(self, value: ast.expr, place: ast.stmt) -> str | None:
        """ "pair": the order of the pairs; "token": their tokens; "slot": which of a token's; None: none of these."""
        name = value.id if isinstance(value, ast.Name) else ""
        value, place = self.scope.resolved(value, place)
        divided = self._divided(value, place)
        if divided is not None:
            return divided
        size = self._size_of_tokens(value, place)
        if size is not None and (not self.size or ast.unparse(self.size) == ast.unparse(size)):
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

    def _divided(self, value: ast.expr, place: ast.stmt) -> str | None:
        """ "token" for pairs divided by their number for a token, "slot" for the rest of that."""
        kind = "token"
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv | ast.Mod):
            pairs, size = value.left, value.right
            kind = "token" if isinstance(value.op, ast.FloorDiv) else "slot"
        elif isinstance(value, ast.Call) and called(value) in ("div", "floor_divide") and value.args:
            pairs, size = sure(ast.expr, subject(value)), value.args[-1]
        else:
            return None
        found = self._sliced(pairs) if isinstance(pairs, ast.Subscript) else self._kind(pairs, place)
        if found != "pair" or (self.size and ast.unparse(self.size) != ast.unparse(size)):
            return None
        self.size = size
        return kind

    def _size_of_tokens(self, value: ast.expr, place: ast.stmt) -> ast.expr | None:
        """K of `tokens[order]`, of the token of every pair."""
        if not isinstance(value, ast.Subscript) or self._kind(value.slice, place) != "pair":
            return None
        made, where = self.scope.resolved(value.value, place)
        while isinstance(made, ast.Call) and called(made) in ("flatten", "reshape", "view", "contiguous"):
            made, where = self.scope.resolved(sure(ast.expr, subject(made)), where)
        if not isinstance(made, ast.Call):
            return None
        of, _ = self.scope.resolved(sure(ast.expr, subject(made)), where)
        numbers, tall = of, False
        if isinstance(of, ast.Call) and called(of) in ("unsqueeze", "view", "reshape"):
            numbers, tall = sure(ast.expr, subject(of)), ast.unparse(of.args[-1]) in ("1", "-1")
        elif isinstance(of, ast.Subscript) and ast.unparse(of.slice) in (":, None", "(:, None)"):
            numbers, tall = of.value, True
        if called(self.scope.resolved(numbers, where)[0]) != "arange" or not made.args:
            return None
        if called(made) == "repeat_interleave" and not tall:
            return made.args[-1]
        if called(made) in ("expand", "repeat") and tall and len(made.args) == 2:
            return made.args[-1]
        if called(made) == "expand_as" and tall:
            return _expr(f"{ast.unparse(made.args[0])}.shape[-1]")
        return None

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
        if any(self.listed in names(part) for part in self.loop.body):
            raise NotStatic(f"{self.listed} is more than what results are put in", self.loop)
        self.loop.body[:0] = _statements(f"_pairs_ = _flat_ == {self.slices.number}", self.loop)
        _Behind(self).run()

    def _before(self, text: str) -> None:
        block = _block_of(self.tree, self.loop)
        place = block.index(self.loop)
        block[place:place] = _statements(text, self.loop)


class _Filled(ast.NodeTransformer):
    """`expert(rows) if len(rows) else rows` as what it is where there are rows."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        test = ast.unparse(node.test)
        if test in self.slices.filled:
            return sure(ast.expr, self.visit(node.body))
        return sure(ast.expr, self.visit(node.orelse)) if test in self.slices.empty else self.generic_visit(node)


class _Behind(ast.NodeTransformer):
    """What is behind a loop over sorted rows, with the rows of all pairs in the pairs' own order.

    That order takes the place of the sorted one: `rows[order]` is `rows` there, and so is `rows[inverse]`. Code for
    which the order of rows is more than that gives something else then, which the trial finds.
    """

    def __init__(self, unsorting: _Unsorting) -> None:
        self.of, self.scope, self.loop = unsorting, unsorting.scope, unsorting.loop
        self.order = sure(_Order, unsorting.order)
        self.place: ast.stmt = self.loop
        self.empty: list[ast.Assign] = []
        self.put = False  # whether results have been put in order again

    def run(self) -> None:
        """
        Raises:
            NotStatic: results are not put in order again, nor added to their tokens.
        """
        for statement in self.scope.behind(self.loop):
            self.place = statement
            self.visit(statement)
        for made in self.empty:
            block = _block_of(self.of.tree, made)
            block.remove(made)
        if not self.put:
            results = "the list" if str(self.of.listed).startswith("_") else self.of.listed
            raise NotStatic(f"{results} is not put in the order of the pairs again", self.loop)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Subscript) and self._kind(target.slice) == "pair":
            if called(node.value) == "arange":
                return node
            self.put |= self._is_rows(node.value)
            self.empty.append(self._empty(target, node))
            target.value.ctx = ast.Store()  # type: ignore[attr-defined]
            node.targets = [target.value]
        node.value = self.visit(node.value)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """`torch.cat(outs) if outs else rows`: where no expert has tokens, none has."""
        of = node.body if names(node.test) & {self.of.listed} else None
        return self.generic_visit(node) if of is None else sure(ast.expr, self.visit(of))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id == self.of.listed:
            made = self.scope.assigned(node.id, self.place)
            return _expr("_outs_") if made is not None and self.scope.before(made[1], self.loop) else node
        value, place = self.scope.resolved(node, self.place)
        if isinstance(value, ast.Subscript) and self.scope.before(place, self.loop) and (
            self._kind(value.slice, place) == "pair" and not self.scope.changed(value.value, place, self.place)
        ):  # fmt: skip
            return copy.deepcopy(value.value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_inverse(node.slice):
            self.put = True
            return sure(ast.expr, self.visit(node.value))
        if self._kind(node.slice) == "pair":
            return sure(ast.expr, self.visit(node.value))
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        if len(index) == 2 and isinstance(index[1], ast.Constant) and self._kind(index[0]) == "pair":
            node.slice = ast.Tuple([ast.Slice(), index[1]], ast.Load())  # [order, None]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if called(node) in ("cat", "concat", "vstack") and names(node) & {self.of.listed}:
            return _expr("_outs_")
        narrow = _added_rows(node)
        if narrow is not None and isinstance(node.func, ast.Attribute) and self._kind(narrow) == "token":
            self.put = True
            size = copy.deepcopy(sure(ast.expr, self.of.size))
            rows = ast.Call(ast.Attribute(self.visit(node.args[2]), "unflatten", ast.Load()), [
                ast.Constant(0), ast.Tuple([ast.UnaryOp(ast.USub(), ast.Constant(1)), size], ast.Load()),
            ], [])  # fmt: skip
            summed = ast.Call(ast.Attribute(rows, "sum", ast.Load()), [ast.Constant(1)], [])
            name = "add_" if called(node).endswith("_") else "add"
            return ast.Call(ast.Attribute(self.visit(node.func.value), name, ast.Load()), [summed], [])
        return self.generic_visit(node)

    def _is_rows(self, value: ast.expr) -> bool:
        """Whether ``value`` is made of the results."""
        value, place = self.scope.resolved(value, self.place)
        return place is not self.place or bool(names(value) & {self.of.listed})

    def _kind(self, value: ast.expr, place: ast.stmt | None = None) -> str | None:
        made, where = self.scope.resolved(value, place or self.place)
        flat = _sorted(made)
        return self.of._kind(value, place or self.place) if flat is None or where is self.order.place else None

    def _is_inverse(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name) and self._is_put(value.id):
            return True
        made, place = self.scope.resolved(value, self.place)
        flat = _sorted(made)
        return flat is not None and place is not self.order.place and self._kind(flat, place) == "pair"

    def _is_put(self, name: str) -> bool:
        """Whether it is `name[order] = torch.arange(...)`."""
        puts = [
            statement for statement in self.scope.statements() if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Subscript) and ast.unparse(statement.targets[0].value) == name
        ]  # fmt: skip
        return len(puts) == 1 and called(puts[0].value) == "arange" and (
            self._kind(sure(ast.Subscript, puts[0].targets[0]).slice, puts[0]) == "pair"
        )  # fmt: skip

    def _empty(self, target: ast.Subscript, put: ast.Assign) -> ast.Assign:
        """Where the empty tensor is made that rows are put into."""
        held = target.value
        made = self.scope.value(held.id, put) if isinstance(held, ast.Name) else None
        if made is None or called(made[0]) not in ("empty_like", "zeros_like", "empty", "zeros", "new_empty"):
            raise NotStatic(f"what {ast.unparse(held)} holds before is not known", put)
        return sure(ast.Assign, made[1])


class _Spelled(ast.NodeTransformer):
    """Names as what they stand for."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.values.get(node.id, node)) if isinstance(node.ctx, ast.Load) else node


def _appends(statement: ast.stmt) -> bool:
    """Whether a statement does nothing but to put something in a list."""
    return isinstance(statement, ast.Expr) and called(statement.value) == "append"


def _names_assigned(body: list[ast.stmt]) -> set[str]:
    """The names that statements assign to; those that do anything else are names of their own."""
    simple = [part.targets[0] if isinstance(part, ast.Assign) and len(part.targets) == 1 else part for part in body]
    return {part.id if isinstance(part, ast.Name) else ast.dump(part) for part in simple
            if not isinstance(part, ast.Pass)}  # fmt: skip


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
    narrow = _added_rows(call) if isinstance(call, ast.Call) and called(call).endswith("_") else None
    if narrow is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return statement
    text = f"{ast.unparse(call.func.value)}.index_add_(0, {ast.unparse(narrow)}, {ast.unparse(call.args[2])})"
    return _statements(text, statement)[0]


def _added_rows(call: ast.Call) -> ast.expr | None:
    """Where a call adds rows to, one number each; None when it is another call."""
    name = called(call).removesuffix("_")
    if name not in ("index_add", "scatter_reduce", "scatter_add") or len(call.args) < 3 or not is_zero(call.args[0]):
        return None
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if words and (name != "scatter_reduce" or words != {"reduce": "'sum'"}):
        return None
    if name == "scatter_reduce" and not words:
        return None
    narrow = one_a_row(call.args[1])
    return narrow if name == "index_add" or narrow is not call.args[1] else None


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


def _block_of(tree: ast.FunctionDef, statement: ast.stmt) -> list[ast.stmt]:
    return next(block for block in blocks(tree) if statement in block)
