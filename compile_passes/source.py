"""Source of a method as a tree, what its names stand for, and a function made of a changed tree."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from compile_passes.vocabulary import is_in_place_name

# Decorators that a changed function gets again.
_MODES: dict[str, Callable[[], Any]] = {
    "torch.no_grad()": torch.no_grad, "torch.no_grad": torch.no_grad,
    "torch.inference_mode()": torch.inference_mode, "torch.enable_grad()": torch.enable_grad,
}  # fmt: skip
# Calls that cut rows up, into parts of so many rows, and at such places.
CUTS = frozenset({"split", "split_with_sizes"})
CUTS_AT = frozenset({"tensor_split"})
# Calls that make zeros.
ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})

_Kind = TypeVar("_Kind")


class NotStatic(Exception):
    """Why there is no static form, in words, and at which line."""

    def __init__(self, reason: str, node: ast.AST | None = None) -> None:
        line = getattr(node, "lineno", None)
        super().__init__(reason if line is None else f"line {line}: {reason}")


def sure(kind: type[_Kind], value: Any) -> _Kind:
    """``value``, of a kind that it has been found to be of before.

    Raises:
        NotStatic: it is of another kind.
    """
    if not isinstance(value, kind):
        raise NotStatic("code that is not understood", value if isinstance(value, ast.AST) else None)
    return value


@dataclass(frozen=True)
class Source:
    """A method: its function without decorators, its tree with the line numbers of the file."""

    name: str
    function: FunctionType
    tree: ast.FunctionDef
    file: str
    modes: tuple[str, ...]


@dataclass(frozen=True)
class Helper:
    """A function with changed code, and those that it calls.

    Attributes:
        said: what was changed in them, one line each.
    """

    source: Source
    tree: ast.FunctionDef
    helpers: tuple[Helper, ...]
    said: tuple[str, ...]


def read(kind: type, name: str) -> Source | None:
    """The source of a method of a class; None where there is none.

    Raises:
        NotStatic: it is decorated by what may do anything.
    """
    whole = inspect.getattr_static(kind, name, None)
    found = read_function(whole) if isinstance(whole, FunctionType) else None
    if found is None:
        return None
    if any(mode not in _MODES for mode in found.modes) or (found.function is not whole and not found.modes):
        by = ", ".join(found.modes) or "something at run time"
        raise NotStatic(f"{kind.__name__}.{name} is decorated, by {by}", found.tree)
    call_it_self(found.tree)
    return replace(found, name=name)


def call_it_self(method: ast.FunctionDef) -> None:
    """Give the first argument of a method the name that it nearly always has, and by which all code here knows it."""
    arguments = [argument.arg for argument in ast.walk(method) if isinstance(argument, ast.arg)]
    first = next(iter([*method.args.posonlyargs, *method.args.args]), None)
    if first is None or "self" in names(method) | {*arguments} or arguments.count(first.arg) > 1:
        return
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and node.id == first.arg:
            node.id = "self"
    first.arg = "self"


def read_function(whole: FunctionType) -> Source | None:
    """The source of a function; None where there is none."""
    function = inspect.unwrap(whole)
    if not isinstance(function, FunctionType):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__name__:
        return None
    ast.increment_lineno(tree, first - 1)
    modes = tuple(ast.unparse(decorator) for decorator in tree.decorator_list)
    return Source(function.__name__, function, tree, inspect.getsourcefile(function) or "<unknown>", modes)


def methods_of(module: nn.Module) -> dict[str, Source]:
    """``forward`` of a module and the methods of its class that it calls, by name, those with a source.

    Raises:
        NotStatic: the source of ``forward`` is not to be had, or a method is decorated.
    """
    found: dict[str, Source] = {}
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        name = waiting.pop()
        source = read(type(module), name)
        if source is None and name == "forward":
            raise NotStatic(f"the source of {type(module).__name__}.forward is not available")
        if source is None:
            continue
        found[name] = source
        for node in ast.walk(source.tree):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self":
                inner = function.attr
                if inner not in seen and not hasattr(nn.Module, inner) and inner not in module._modules:
                    seen.add(inner)
                    waiting.append(inner)
    return found


def held(module: nn.Module, value: ast.expr) -> Any:
    """What ``self.a.b`` is in a method of ``module``; None for other expressions."""
    if isinstance(value, ast.Name):
        return module if value.id == "self" else None
    inside = held(module, value.value) if isinstance(value, ast.Attribute) else None
    return None if inside is None else getattr(inside, value.attr, None)  # type: ignore[attr-defined]


def build(
    source: Source, tree: ast.FunctionDef, helpers: Iterable[Helper] = (), beside: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The function of ``source`` with ``tree`` for its code: same globals, closure, defaults and line numbers.

    Args:
        helpers: functions that it calls by their names, to be called in place of those.
        beside: what other names of it stand for.

    Raises:
        NotStatic: it has names that only its class can spell.
    """
    function = source.function
    given = {helper.source.name: build(helper.source, copy.deepcopy(helper.tree), helper.helpers) for helper in helpers}
    given |= beside or {}
    for node in ast.walk(tree):
        spelled = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if spelled.startswith("__") and not spelled.endswith("__"):
            raise NotStatic(f"the name {spelled} is private to its class", node)
    tree.decorator_list, tree.returns = [], None
    _number(tree)
    free = [ast.arg(name) for name in (*function.__code__.co_freevars, *given)]
    around = ast.FunctionDef(
        name="around", args=ast.arguments([], free, None, [], [], None, []), body=[tree], decorator_list=[]
    )
    if hasattr(around, "type_params"):
        around.type_params = []
    module = ast.fix_missing_locations(ast.Module([around], []))
    outer = _inner(compile(module, source.file, "exec", dont_inherit=True), "around")
    code = _inner(outer, tree.name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in given.items()}
    made = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )  # fmt: skip
    made.__kwdefaults__, made.__qualname__, made.__module__ = (
        function.__kwdefaults__, function.__qualname__, function.__module__,
    )  # fmt: skip
    result: Callable[..., Any] = made
    for mode in reversed(source.modes):
        result = _MODES[mode]()(result)
    return result


def parsed(text: str, line: int) -> list[ast.stmt]:
    """Statements of a text, all at one line of a file."""
    made = ast.parse(text).body
    for node in (node for statement in made for node in ast.walk(statement)):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = line
    return made


def _number(tree: ast.FunctionDef) -> None:
    """Give what was made of other text the line of the statement that it is in."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt):
            for node in ast.iter_child_nodes(statement):
                parts = [] if isinstance(node, ast.stmt) else ast.walk(node)
                for part in parts:
                    if isinstance(part, ast.expr):
                        part.lineno = part.end_lineno = statement.lineno
                        part.col_offset = part.end_col_offset = 0


def _inner(code: CodeType, name: str) -> CodeType:
    return next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)


# ---- what names stand for

# Calls whose result may be a view of what they are called on.
VIEWS = frozenset({
    "view", "flatten", "squeeze", "reshape", "unsqueeze", "to", "contiguous", "detach", "expand", "ravel", "cpu",
    "expand_as", "view_as", "type", "transpose", "permute", "t", "narrow", "select", "diagonal", "chunk", "split",
    "unbind", "numpy", "long", "int", "float", "bool",
})  # fmt: skip


@dataclass(frozen=True)
class _Store:
    """An assignment to a name: of ``value`` (None: not known), in the statement ``place``."""

    value: ast.expr | None
    place: ast.stmt


class Scope:
    """Which value a name has at a statement, where the text of the function alone tells.

    Args:
        tree: a function.
        dead: bodies of `if` that are known not to run.
    """

    def __init__(self, tree: ast.FunctionDef, dead: frozenset[int] = frozenset()) -> None:
        self._order: dict[ast.stmt, int] = {}
        self._blocks: dict[ast.stmt, tuple[ast.stmt, ...]] = {}
        self._branches: dict[ast.stmt, tuple[int, ...]] = {}
        self._stores: dict[str, list[_Store]] = {}
        self._writes: dict[str, list[ast.stmt]] = {}
        self._walk(tree.body, (), (), dead)
        self._find_writes()

    def _walk(
        self, body: list[ast.stmt], blocks: tuple[ast.stmt, ...], branches: tuple[int, ...], dead: frozenset[int]
    ) -> None:
        for statement in body:
            self._order[statement] = len(self._order)
            self._blocks[statement], self._branches[statement] = blocks, branches
            for name, value in _stored(statement):
                self._stores.setdefault(name, []).append(_Store(value, statement))
            for inner in bodies(statement):
                if id(inner) not in dead:
                    known = isinstance(statement, ast.With) or any(id(other) in dead for other in bodies(statement))
                    self._walk(inner, (*blocks, statement), branches if known else (*branches, id(inner)), dead)

    def alive(self, statement: ast.stmt) -> bool:
        """Whether the statement is in no body that is known not to run."""
        return statement in self._order

    def value(self, name: str, place: ast.stmt) -> tuple[ast.expr, ast.stmt] | None:
        """What was assigned to ``name`` last before ``place``, and where; None when that depends on the run, and where
        it has been written to since.
        """
        found = self.assigned(name, place)
        if found is None:
            return None
        loops = [block for block in self._blocks[place] if isinstance(block, ast.For | ast.While)]
        loops = [loop for loop in loops if not self._is_in(found[1], loop)]
        again = any(self._is_in(write, loop) for write in self._writes.get(name, []) for loop in loops)
        return None if again or self.writes(name, found[1], place) else found

    def assigned(self, name: str, place: ast.stmt) -> tuple[ast.expr, ast.stmt] | None:
        """The same, whatever has been written to it since."""
        stores = self._stores.get(name, [])
        before = [store for store in stores if self._order[store.place] < self._order[place]]
        loops = [block for block in self._blocks[place] if isinstance(block, ast.For | ast.While)]
        # What the round before has left is assigned to anew where the last assignment is in the loop, too.
        loops = [loop for loop in loops if not before or loop not in self._blocks[before[-1].place]]
        again = any(
            loop in (*self._blocks[store.place], store.place) and loop is not store.place
            for store in stores if store not in before for loop in loops
        )  # fmt: skip
        if not before or again or before[-1].value is None:
            return None
        last = before[-1]
        inside = self._branches[last.place]
        return (last.value, last.place) if self._branches[place][: len(inside)] == inside and last.value else None

    def _find_writes(self) -> None:
        """Note for each name what writes to it, by that name or by one of the same memory."""
        held = {
            name: set[str]().union(*(self._memory_of(store.value, store.place) for store in stores))
            for name, stores in self._stores.items()
        }
        for statement in self._order:
            memory = set[str]().union(*(self._memory_of(written, statement) for written in _written(statement)))
            for name in memory | {name for name, views in held.items() if views & memory}:
                self._writes.setdefault(name, []).append(statement)

    def _memory_of(self, value: ast.expr | None, place: ast.stmt) -> set[str]:
        """The names of what ``value`` may be a view of."""
        found: set[str] = set()
        while value is not None:
            if isinstance(value, ast.Name):
                found.add(value.id)
                made = self.assigned(value.id, place)
                value, place = (None, place) if made is None else made
            elif isinstance(value, ast.Attribute | ast.Subscript):
                value = value.value
            else:
                value = subject(value) if isinstance(value, ast.Call) and called(value) in VIEWS else None
        return found

    def kept(self, name: str, since: ast.stmt, loop: ast.For) -> bool:
        """Whether what ``name`` is where ``since`` reads it is what it is in all rounds of ``loop``."""
        end = max(order for part, order in self._order.items() if part is loop or self._is_in(part, loop))
        places = [*(store.place for store in self._stores.get(name, [])), *self._writes.get(name, [])]
        return not any(self._order[since] <= self._order[place] <= end for place in places)

    def _is_in(self, statement: ast.stmt, block: ast.stmt) -> bool:
        return block in self._blocks[statement]

    def changed(self, value: ast.expr, since: ast.stmt, until: ast.stmt) -> bool:
        """Whether a name that ``value`` reads is assigned or written to between two statements."""
        between, read = range(self._order[since], self._order[until]), names(value)
        stored = (self._order[store.place] for name in read for store in self._stores.get(name, []))
        return any(place in between for place in stored) or any(self.writes(name, since, until) for name in read)

    def writes(self, name: str, since: ast.stmt, until: ast.stmt) -> int:
        """How many statements between two write to what ``name`` is."""
        return sum(self._order[since] < self._order[place] < self._order[until] for place in self._writes.get(name, []))

    def before(self, one: ast.stmt, other: ast.stmt) -> bool:
        return self._order[one] < self._order[other]

    def behind(self, block: ast.stmt) -> list[ast.stmt]:
        """The statements that follow ``block``, those inside others included."""
        return [s for s, around in self._blocks.items() if self.before(block, s) and block not in around]

    def statements(self) -> list[ast.stmt]:
        """All that may run, in the order of the text."""
        return [*self._order]

    def stores(self, name: str) -> int:
        """How many times ``name`` is assigned to."""
        return len(self._stores.get(name, []))

    def reads(self, name: str) -> int:
        """How many times statements that may run read ``name``."""
        parts = [part for statement in self._order for part in ast.iter_child_nodes(statement)
                 if not isinstance(part, ast.stmt)]  # fmt: skip
        found = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name) and node.id == name]
        return sum(isinstance(node.ctx, ast.Load) for node in found)

    def resolved(self, value: ast.expr, place: ast.stmt, *, as_made: bool = False) -> tuple[ast.expr, ast.stmt]:
        """``value``, or what the name that it is stands for, and where; ``as_made``: whatever was written to it."""
        found_by = self.assigned if as_made else self.value
        while isinstance(value, ast.Name) and (found := found_by(value.id, place)) is not None:
            value, place = found
        return value, place

    def read_outside(self, block: ast.stmt) -> set[str]:
        """Names that are read by statements that are not in ``block``."""
        rest = [
            statement for statement, around in self._blocks.items()
            if block not in around and statement is not block and not self._never_both(block, statement)
        ]  # fmt: skip
        parts = [part for statement in rest for part in ast.iter_child_nodes(statement)
                 if not isinstance(part, ast.stmt)]  # fmt: skip
        return {name for part in parts for name in names(part)}

    def _never_both(self, one: ast.stmt, other: ast.stmt) -> bool:
        """Whether ``other`` is in the other body of an `if` that runs once, or behind one whose body returns."""
        for around in self._blocks[one]:
            if isinstance(around, ast.For | ast.While):
                return False
            mine = [body for body in bodies(around) if id(body) in self._branches[one]]
            if isinstance(around, ast.If) and mine:
                if around in self._blocks[other]:
                    if id(mine[0]) not in self._branches[other]:
                        return True
                elif self.before(around, other) and isinstance(mine[0][-1], ast.Return | ast.Raise):
                    return True
        return False


def bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements inside a compound statement."""
    found = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(statement, "handlers", [])]
    return [body for body in found if isinstance(body, list) and body]


def blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements inside all compound statements of a tree, itself included."""
    return [inner for node in ast.walk(tree) if isinstance(node, ast.stmt) for inner in bodies(node)]


def _stored(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a statement itself assigns, and the value where it is one expression."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _targets(target, statement.value)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield from _targets(statement.target, statement.value)
    elif isinstance(statement, ast.AugAssign):
        yield from _targets(statement.target, None)
    elif isinstance(statement, ast.For):
        yield from _targets(statement.target, None)
    elif isinstance(statement, ast.With):
        for item in statement.items:
            if item.optional_vars is not None:
                yield from _targets(item.optional_vars, None)


def _written(statement: ast.stmt) -> Iterator[ast.expr | None]:
    """What a statement itself writes in place, as ``x[i] = y``, ``x += y``, ``x.add_(y)`` and ``out=x`` do."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    yield from (target for target in targets if isinstance(target, ast.Subscript | ast.Attribute))
    if isinstance(statement, ast.AugAssign):
        yield statement.target
    parts = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt)]
    for call in (node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)):
        words = {word.arg: word.value for word in call.keywords}
        if is_in_place_name(called(call)) or "inplace" in words:
            yield subject(call)
        yield words.get("out")


def assignments(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of `a = p`, and of `a, b = p, q` both pairs."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [*zip(target.elts, value.elts, strict=True)]
    return [(target, value)]


def separate(tree: ast.FunctionDef) -> None:
    """Make two assignments of `a, b = p, q` in place, where no value reads a name that is assigned."""
    for block in blocks(tree):
        for statement in list(block):
            pairs = assignments(statement)
            written = [target.id for target, _ in pairs if isinstance(target, ast.Name)]
            apart = len(pairs) > 1 and len({*written}) == len(pairs)
            if apart and not any({*written} & names(value) for _, value in pairs):
                place = block.index(statement)
                block[place : place + 1] = [
                    ast.copy_location(ast.Assign([target], value), statement) for target, value in pairs
                ]


def _targets(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        items = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
        for position, part in enumerate(target.elts):
            item: ast.expr | None = None if value is None else ast.Subscript(value, ast.Constant(position), ast.Load())
            item = items[position] if items is not None and not _starred([*items, *target.elts]) else item
            yield from _targets(part, item)


def _starred(parts: Iterable[ast.expr]) -> bool:
    return any(isinstance(part, ast.Starred) for part in parts)


def names(tree: ast.AST) -> set[str]:
    """The names that are read in a tree."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def called(node: ast.AST) -> str:
    """The last part of the name of the function that a call calls; "" for what is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def subject(call: ast.Call) -> ast.expr | None:
    """``x`` of ``x.f(...)`` and of ``torch.f(x, ...)`` or ``F.f(x)``."""
    function = call.func
    if isinstance(function, ast.Attribute):
        inside = function.value
        library = ast.unparse(inside) in ("torch", "F", "nn.functional", "torch.nn.functional")
        if not library:
            return inside
    return call.args[0] if call.args else None


def rows_counted(value: ast.expr) -> ast.expr | None:
    """x of ``len(x)``, ``x.shape[0]``, ``x.size(0)`` and ``x.numel()``, which is as many for a list of rows."""
    if isinstance(value, ast.Subscript):
        shape = value.value
        first = is_zero(value.slice) and isinstance(shape, ast.Attribute) and shape.attr == "shape"
        return shape.value if first and isinstance(shape, ast.Attribute) else None
    if not isinstance(value, ast.Call) or value.keywords:
        return None
    inside = subject(value)
    own = isinstance(value.func, ast.Attribute) and inside is value.func.value
    given = [is_zero(part) for part in (value.args if own else value.args[1:])]
    wanted: dict[str, list[bool]] = {"len": [], "numel": [], "nelement": [], "size": [True]}
    return inside if wanted.get(called(value)) == given and not (own and called(value) == "len") else None


def one_a_row(index: ast.expr) -> ast.expr:
    """The numbers of rows that an index of as many columns as these have is made of: `rows.view(-1, 1).expand(-1, n)`,
    `rows[:, None].expand_as(x)`; ``index`` itself where it is no such.
    """
    while isinstance(index, ast.Call) and called(index) in (
        "repeat", "expand", "expand_as", "view", "unsqueeze", "reshape"
    ):  # fmt: skip
        index = subject(index) or index
    return index.value if isinstance(index, ast.Subscript) and isinstance(index.slice, ast.Tuple) else index


def is_zero(value: ast.AST) -> bool:
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value == 0
