"""A loop over the experts that were hit, rewritten as a loop over all experts, which can be captured.

    for e in hit.nonzero(): ...                     for e in range(len(self.experts)): ...
    if not mask.any(): continue                     -
    x[token.tolist()]                               x[token]
    token[:n] if len(token) > n else token          token[:n]

An expert without tokens computes nothing from no rows. That the rest of the loop does nothing for it either is what
`trial` finds out. All other code stays as it is, so that a rewritten loop differs in nothing but the empty experts.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compile_passes.chunks import unroll_comprehensions
from compile_passes.dispatchers import without_dispatchers, without_own_gradients
from compile_passes.emptiness import Tests, is_empty, without_tests
from compile_passes.first_rows import first_rows_alone
from compile_passes.inherited import call_by_name, inherited_methods, is_inherited
from compile_passes.loop_body import (
    ELEMENTS,
    POSITIVE,
    PURE,
    Element,
    check_after,
    check_body,
    check_tests,
    computes_alone,
    drop_lists_of_positions,
    drop_unread,
    take_known_branches,
)
from compile_passes.loops import LISTS, counts_of_experts, decides, has_data_dependent_calls
from compile_passes.row_calls import by_index
from compile_passes.slice_bounds import CONVERSIONS, counted, slices_of
from compile_passes.sorted_slices import unsort
from compile_passes.source import (
    Helper,
    NotStatic,
    Scope,
    Source,
    build,
    called,
    held,
    is_zero,
    methods_of,
    names,
    parsed,
    separate,
    subject,
    sure,
)
from compile_passes.turns import CALLED, in_turns, turned
from compile_passes.updates import Updates
from compile_passes.zero_sums import drop_results_of_zeros, drop_zero_sums

# Calls after which a token's experts may be counted once each, however often it has one.
_ONE_OF_SEVERAL = frozenset({
    "scatter", "scatter_", "index_fill", "index_fill_", "index_put", "index_put_", "amax", "any", "clamp", "clamp_",
    "bool",
})  # fmt: skip


@dataclass(frozen=True)
class StaticForm:
    """What replaces the methods of a module.

    Attributes:
        methods: name of a method -> the function that takes its place.
        said: what was rewritten, one line each: ``file:line: old -> new``.
        holds: conditions on ``self`` without which the original has to run.
        converts: (module, dtype) as expressions on ``self``: what the original converts in its first call.
        helpers: name of a method -> functions beside the module that it calls, with changed code.
        by_number: whether the original takes its experts by the numbers of the ids, of which a negative one counts from
            the end, or moves the rows of others: the form is equal where the ids are none, which no trial can tell.
        once: whether the original counts a token's expert once, however often it has it: the form, which counts its
            pairs, is equal where it never has it twice.
        left_out: conditions on the arguments of ``forward`` that hold where it is given hidden states alone, as in a
            trial, where the form has to know of its ids: with other arguments they may be others.
        as_written: whether it is the original's code, to be captured in few turns.
    """

    methods: dict[str, ast.FunctionDef]
    sources: dict[str, Source]
    said: tuple[str, ...]
    holds: tuple[str, ...]
    converts: tuple[tuple[ast.expr, ast.expr], ...] = ()
    helpers: Mapping[str, tuple[Helper, ...]] = field(default_factory=dict)
    by_number: bool = False
    once: bool = False
    left_out: tuple[str, ...] = ()
    as_written: bool = False

    @property
    def of_some_ids(self) -> bool:
        """Whether it is equal for some ids alone."""
        return self.by_number or self.once

    @property
    def has_turns(self) -> bool:
        """Whether it has loops that may be captured in few turns."""
        return any(map(turned, self.methods.values()))

    def trees(self) -> Iterator[ast.FunctionDef]:
        """The changed code, that of helpers included."""
        yield from self.methods.values()
        waiting = [helper for helpers in self.helpers.values() for helper in helpers]
        while waiting:
            helper = waiting.pop()
            yield helper.tree
            waiting.extend(helper.helpers)

    def functions(self, *, training: bool | None = None, few: bool = False) -> dict[str, Callable[..., Any]]:
        """The functions by the names of the methods that they replace, compiled afresh.

        Args:
            training: run the original in the other mode; None replaces it in both.
            few: let loops be captured in few turns.
        """
        made = {}
        for name, tree in self.methods.items():
            own = in_turns(tree) if few else copy.deepcopy(tree)
            mode = [] if training is None else [f"{'' if training else 'not '}{_given(own)[0]}.training"]
            holds = [*self.holds, *mode, *(self.left_out if name == "forward" else ())]
            if holds and not is_inherited(name):  # what calls that is the original then
                own.body[:0] = [_original_unless(own, self.sources[name], holds)]
            made[name] = build(self.sources[name], own, self.helpers.get(name, ()), CALLED if few else None)
        return made


def static_form(module: nn.Module) -> StaticForm:
    """The static form of the loops over experts in ``forward`` of a module, and in the methods that it calls.

    Raises:
        NotStatic: why there is none.
    """
    methods: dict[str, ast.FunctionDef] = {}
    sources: dict[str, Source] = {}
    said: list[str] = []
    holds: dict[str, None] = {}
    unknown: list[str] = []
    by_number = once = False
    beside: dict[str, _Method] = {}
    found = methods_of(module)
    found |= inherited_methods(module, found)
    pure = PURE.union(name for name, source in found.items() if computes_alone(source.tree))
    written = frozenset(name for source in found.values() for name in _attributes_written(source.tree))
    for name, source in found.items():
        rewriting = _Method(module, source, pure, written)
        rewriting.run()
        unknown += rewriting.unknown
        if rewriting.said:
            methods[name], sources[name] = rewriting.tree, source
            said += rewriting.said
            holds.update(dict.fromkeys(rewriting.holds))
            by_number |= rewriting.by_number
            once |= rewriting.once
        else:
            beside[name] = rewriting
    if not methods:
        raise NotStatic(unknown[0] if unknown else "no loop in it is over the experts that were hit")
    for name, other in beside.items():
        if other.beside:
            methods[name], sources[name] = other.tree, other.source
            said += other.beside
    _call_inherited(module, found, beside, methods, sources)
    left_out = _left_out(found["forward"].tree) if by_number or once else ()
    if left_out and methods.keys() != {"forward"}:
        raise NotStatic("its ids may be others where forward is given more than hidden states", found["forward"].tree)
    return StaticForm(methods, sources, tuple(said), tuple(holds), by_number=by_number, once=once, left_out=left_out)


def in_few_turns(module: nn.Module) -> StaticForm:
    """The code of a module as it is, whose loops over experts may be captured in few turns.

    Raises:
        NotStatic: it has no such loop.
    """
    sources = {name: source for name, source in methods_of(module).items() if turned(source.tree)}
    said = [
        f"line {loop.lineno}: `for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}`"
        for source in sources.values() for loop in turned(source.tree)
    ]  # fmt: skip
    if not said:
        raise NotStatic("no loop in it is over a number of experts")
    methods = {name: copy.deepcopy(source.tree) for name, source in sources.items()}
    return StaticForm(methods, sources, tuple(said), (), as_written=True)


def _call_inherited(
    module: nn.Module, found: Mapping[str, Source], unchanged: Mapping[str, _Method],
    methods: dict[str, ast.FunctionDef], sources: dict[str, Source],
) -> None:  # fmt: skip
    """Have methods call what is changed of those that `super()` calls, which makes them changed, too."""
    waiting = True
    while waiting:
        waiting = False
        for name, source in found.items():
            tree = methods[name] if name in methods else unchanged[name].tree
            if call_by_name(type(module), name, tree, methods):
                methods[name], sources[name] = tree, source
                waiting = True


class _Method:
    """The rewriting of one method, in a copy of its tree.

    Args:
        pure: calls that are left out where nobody reads them.
        written: attributes that the methods write, which may change before they are asked for.
    """

    def __init__(self, module: nn.Module, source: Source, pure: frozenset[str], written: frozenset[str]) -> None:
        self.module, self.source, self.pure, self.written = module, source, pure, written
        self.tree = copy.deepcopy(source.tree)
        self.dropped = drop_zero_sums(self.tree) + drop_results_of_zeros(self.tree)
        self.beside = without_own_gradients(self.tree)
        by_index(self.tree)
        separate(self.tree)
        unroll_comprehensions(self.tree)
        self.limited = first_rows_alone(self.tree)
        self.said: list[str] = []
        self.unknown: list[str] = []
        self.holds: list[str] = []
        self.by_number = self.once = False
        self.dead = self._dead()
        self.scope = Scope(self.tree, self.dead)

    def run(self) -> None:
        for loop in [node for node in ast.walk(self.tree) if isinstance(node, ast.For | ast.While)]:
            if self.scope.alive(loop):
                self._loop(loop)
        self.said += without_dispatchers(self.tree, self.scope, self.source.function)
        self.said += self.limited + self.dropped
        if self.said:
            self.said += self.beside
            if self.source.function.__globals__.get("torch") is not torch:
                raise NotStatic("torch is called otherwise there", self.tree)
            take_known_branches(self.tree, self.dead)
            drop_lists_of_positions(self.tree)
            drop_unread(self.tree, self.pure)
            ast.fix_missing_locations(self.tree)
        else:
            self.holds.clear()

    def _dead(self) -> frozenset[int]:
        """Bodies of `if` that do not run, as plain attributes of the module say: other processes, other layouts."""
        dead = set()
        self.bodies: list[list[ast.stmt]] = []  # kept, so that no other list gets their identity
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and any(isinstance(part, ast.Assign) for part in ast.walk(node)):
                known = self._evaluated(node.test)
                if known is not None:
                    self.bodies.append(node.orelse if known else node.body)
                    dead.add(id(self.bodies[-1]))
                    text = ast.unparse(node.test)
                    self.holds.append(text if known else f"not ({text})")
        return frozenset(dead)

    def _evaluated(self, test: ast.expr) -> bool | None:
        """The value of a condition on nothing but plain attributes of the module; None for other conditions."""
        allowed = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant, ast.Attribute, ast.Name, ast.Load, ast.Not,
                   ast.And, ast.Or, ast.cmpop)  # fmt: skip
        parts = list(ast.walk(test))
        if not all(isinstance(part, allowed) for part in parts):
            return None
        chains = [part for part in parts if isinstance(part, ast.Attribute)]
        if not chains or names(test) != {"self"} or any(chain.attr in {"training", *self.written} for chain in chains):
            return None
        values = [self.held(chain) for chain in chains]
        if any(not isinstance(value, int | float | str | None) for value in values if not _holds_more(value)):
            return None
        if any(isinstance(value, torch.Tensor) for value in values):
            return None
        try:
            return bool(eval(compile(ast.Expression(test), "<test>", "eval"), {"self": self.module}))
        except Exception:  # in a branch that another condition keeps from running
            return None

    def held(self, value: ast.expr) -> Any:
        """What ``self.a.b`` is; None for other expressions."""
        return held(self.module, value)

    # ---- one loop

    def _loop(self, loop: ast.For | ast.While) -> None:
        if isinstance(loop, ast.While):
            if any(called(node) in CONVERSIONS | {"any", "nonzero", "pop"} for node in ast.walk(loop)):
                raise NotStatic("a `while` loop over what only the data knows", loop)
            return
        before, text = ast.dump(loop), ast.unparse(loop.iter)
        kept = copy.deepcopy(loop)
        head = f"for {ast.unparse(loop.target)} in {text}"
        updates = Updates(loop, self.scope)
        counts = self._counts(loop, updates)
        unsorted = unsort(self.tree, self.scope, loop)
        self.by_number |= unsorted is not None
        self.once |= unsorted is not None and any(map(_is_once, ast.walk(self.tree)))
        if unsorted is not None and unsorted.over_counts:
            number = unsorted.number
            loop.iter, loop.target = _range(self._experts(loop, number)), ast.Name(number, ast.Store())
        elif unsorted is None:
            self._over_all(loop, updates)
        tests = Tests(self.scope, counts, updates if unsorted is None else None)
        loop.body = without_tests(loop.body, tests) or [ast.Pass()]
        if ast.dump(loop) == before:
            self._note(loop)
            return
        check_body(kept)
        check_after(self.tree, kept)
        check_tests(loop)
        new = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
        self.said.append(f"line {loop.lineno}: `{head}`" + (f" as `{new}`" if new != head else " without its tests"))

    def _note(self, loop: ast.For) -> None:
        """Remember what keeps a loop that was not rewritten from being captured."""
        tests = [node for node in ast.walk(loop) if isinstance(node, ast.If) and decides(node)]
        if has_data_dependent_calls(loop.iter) or called(self.scope.resolved(loop.iter, loop)[0]) == "tolist":
            self.unknown.append(f"line {loop.lineno}: {ast.unparse(loop.iter)} is no list of the experts that were hit")
        elif tests:
            test, asked = tests[0], Tests(self.scope, frozenset(), None, any_rows=True)
            why = ": the loop writes more than the rows that it asks about, or other ones, as far as can be told"
            self.unknown.append(
                f"line {test.lineno}: `if {ast.unparse(test.test)}` is no test for an expert without tokens"
                + why * (is_empty(test.test, test, asked) is not None)
            )

    def _counts(self, loop: ast.For, updates: Updates) -> frozenset[str]:
        """Names of numbers of the rows that the loop writes, and of lists of them."""

        def counts(value: ast.expr) -> bool:
            roots = counted(value, self.scope, loop, loop=loop)
            return roots is not None and (updates.chosen_by(roots) or slices_of(self.scope, loop) is not None)

        taken = [node.value for node in ast.walk(loop) if isinstance(node, ast.Subscript)]
        found = {value.id for value in taken if isinstance(value, ast.Name) and counts(value)}
        if called(loop.iter) in ("enumerate", "zip") and isinstance(loop.target, ast.Tuple):
            given = loop.iter.args  # type: ignore[attr-defined]
            given = [ast.Constant(0), *given] if called(loop.iter) == "enumerate" else given
            for part, value in zip(loop.target.elts, given, strict=False):
                if isinstance(part, ast.Name) and counts(value):
                    found.add(part.id)
        return frozenset(found)

    def _over_all(self, loop: ast.For, updates: Updates) -> None:
        """Give a loop over what the data knows the numbers of all experts."""
        name = called(loop.iter)
        if name in ("enumerate", "zip") and isinstance(loop.target, ast.Tuple):
            self._beside_counts(loop)
            return
        listed = self._listed(loop)
        if listed is None:
            return
        if not isinstance(loop.target, ast.Name):
            raise NotStatic(f"a loop over {ast.unparse(loop.iter)} with several names", loop)
        element, rows, roots = loop.target.id, *listed
        check_body(loop)
        if not updates.chosen_by(roots):
            raise NotStatic(f"what the loop writes is not chosen by {ast.unparse(loop.iter)} alone", loop)
        number = _number(loop, element)
        if rows and number is not None:
            element, rows, loop.body = number, False, loop.body[1:]
            loop.target = ast.Name(element, ast.Store())
        count = self._experts(loop, element)
        loop.body = [Element(element, rows, self.held).visit(statement) for statement in loop.body]
        loop.body = [part for part in loop.body if not _is_itself(part)]
        loop.iter = _range(count)

    def _beside_counts(self, loop: ast.For) -> None:
        """`for i, n in enumerate(counts)` where n is only tested, `for expert, n in zip(self.experts, counts)`."""
        parts, targets = sure(ast.Call, loop.iter).args, sure(ast.Tuple, loop.target).elts
        if called(loop.iter) == "enumerate":
            if len(parts) != 1 or len(targets) != 2 or counted(parts[0], self.scope, loop, loop=loop) is None:
                return
            self._only_tested(loop, targets[1])
            loop.target = targets[0]
            loop.iter = _range(self._experts(loop, ast.unparse(targets[0])))
            return
        numbers = [counted(part, self.scope, loop, loop=loop) is not None for part in parts]
        if not any(numbers) or len(parts) != len(targets):
            return
        kept = [(part, target) for part, target, number in zip(parts, targets, numbers, strict=True) if not number]
        for target, number in zip(targets, numbers, strict=True):
            if number:
                self._only_tested(loop, target)
        if len(kept) != 1:
            raise NotStatic(f"a loop over {ast.unparse(loop.iter)}", loop)
        ((loop.iter, loop.target),) = kept

    def _only_tested(self, loop: ast.For, target: ast.expr) -> None:
        name = ast.unparse(target)
        tests = Tests(_Everywhere(self.scope), frozenset({name}), None)
        inside = without_tests(copy.deepcopy(loop.body), tests)
        if any(name in names(statement) for statement in inside):
            raise NotStatic(f"{name} rows of an expert are not taken in a known way", loop)

    def _listed(self, loop: ast.For) -> tuple[bool, set[str]] | None:
        """(whether elements are rows [1], names of what they were found in) of a list of the experts that were hit."""
        value, place = self.scope.resolved(loop.iter, loop)
        flat = False
        while True:
            if isinstance(value, ast.Call) and called(value) in ELEMENTS and subject(value) is not None:
                flat |= called(value) in ("flatten", "squeeze", "view", "reshape", "ravel")
                inner = subject(value)
            elif isinstance(value, ast.Subscript) and _whole(value.slice):
                flat |= isinstance(value.slice, ast.Tuple)
                inner = value.value
            else:
                break
            value, place = self.scope.resolved(sure(ast.expr, inner), place)
        if isinstance(value, ast.Subscript) and is_zero(value.slice):  # nonzero(as_tuple=True)[0], where(condition)[0]
            flat, (value, place) = True, self.scope.resolved(value.value, place)
        name = called(value)
        if not isinstance(value, ast.Call) or name not in ("nonzero", "unique", "where", "argwhere"):
            return None
        if name == "unique" and (value.keywords or len(value.args) > 1):
            raise NotStatic(f"{ast.unparse(value)} gives more than the experts that were hit", loop)
        self.by_number |= name == "unique" and not _asks_for_negative(loop)
        given = subject(value)
        if name == "unique":
            roots = counted(given, self.scope, place, loop=loop, whole=True)
        else:
            roots = self._positive(given, place, loop)
        if roots is None:
            raise NotStatic(f"{ast.unparse(value)} may be other experts than those that were hit", loop)
        return not flat and name != "unique", roots

    def _positive(self, value: ast.expr | None, place: ast.stmt, loop: ast.For) -> set[str] | None:
        """The names of what ``value`` says is more than zero."""
        if value is None:
            return None
        value, place = self.scope.resolved(value, place)
        if isinstance(value, ast.Compare) and len(value.ops) == 1 and is_zero(value.comparators[0]):
            inner = value.left if isinstance(value.ops[0], ast.Gt | ast.NotEq) else None
        elif isinstance(value, ast.Call) and called(value) in POSITIVE:
            given = [subject(value), *value.args][-2:]
            inner = given[0] if len(given) == 2 and is_zero(value.args[-1]) else None
        elif isinstance(value, ast.Call) and called(value) in ("bool", "any"):
            return self._positive(subject(value), place, loop)
        else:
            return counted(value, self.scope, place, loop=loop)
        return None if inner is None else counted(inner, self.scope, place, loop=loop)

    # ---- how many experts there are

    def _experts(self, loop: ast.For, element: str) -> ast.expr:
        """An expression for the number of experts: of what the loop takes by the expert's number.

        A weight goes before a mask, which may have a class more: an expert without a weight cannot be hit. Where the
        loop does something else for some numbers, these need no weight, and the mask says how many there are.
        """
        local = weight = None
        parts = [part for statement in loop.body for part in ast.walk(statement)]
        for node in parts:
            if not isinstance(node, ast.Subscript) or element not in names(node.slice):
                continue
            found = self._length(node.value)
            if found is not None and ast.unparse(node.slice) in (element, f"{element}[0]", f"str({element})"):
                weight = weight or found
            if isinstance(node.value, ast.Name) and ast.unparse(node.slice) in (element, f"{element}[0]"):
                local = local or ast.parse(f"{node.value.id}.shape[0]", mode="eval").body
            if self._is_view(node.value, loop) and ast.unparse(node.slice) == element:
                weight = weight or ast.parse(f"{ast.unparse(node.value)}.shape[0]", mode="eval").body
        if weight is not None:
            others = any(isinstance(part, ast.If) and element in names(part.test) for part in parts)
            return local if others and local is not None else weight
        counts = counts_of_experts(self.module)
        stacks = {weight.shape[0] for weight in self.module.parameters(recurse=False) if weight.dim() > 2}
        for sizes in (counts, set() if local is not None else stacks):
            if len(sizes) == 1:
                return ast.Constant(sizes.pop())
        if local is None:
            raise NotStatic("how many experts there are is not known", loop)
        return local

    def _is_view(self, value: ast.expr, loop: ast.For) -> bool:
        """Whether ``value`` is a view of a parameter that is the same for every expert."""
        parts = [part for statement in loop.body for part in ast.walk(statement)]
        written = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        if not isinstance(value, ast.Call) or called(value) not in ("view", "reshape") or names(value) & written:
            return False
        given = subject(value)
        return given is not None and isinstance(self.held(given), nn.Parameter)

    def _length(self, value: ast.expr) -> ast.expr | None:
        held = self.held(value)
        text = ast.unparse(value)
        if isinstance(held, LISTS) and held is not self.module:
            return ast.parse(f"len({text})", mode="eval").body
        if isinstance(held, torch.Tensor) and held.dim() > 1:
            return ast.parse(f"{text}.shape[0]", mode="eval").body
        return None


class _Everywhere(Scope):
    """A scope for a copy of a loop's body: what its names stand for is asked of the original nowhere."""

    def __init__(self, scope: Scope) -> None:
        self.original = scope

    def alive(self, statement: ast.stmt) -> bool:
        return True

    def resolved(self, value: ast.expr, place: ast.stmt, *, as_made: bool = False) -> tuple[ast.expr, ast.stmt]:
        return value, place


def _attributes_written(tree: ast.AST) -> set[str]:
    parts = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in parts if not isinstance(node.ctx, ast.Load)}


def _holds_more(value: Any) -> bool:
    """Whether a value is only a way to an attribute: a configuration."""
    return value is not None and not isinstance(value, int | float | str | torch.Tensor) and hasattr(value, "__dict__")


def _is_once(node: ast.AST) -> bool:
    """``x.scatter_(1, ids, 1)``, ``x[rows, ids] = 1``, ``hot.amax(1)``: of several at one place one is left."""
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant) and any(isinstance(one, ast.Subscript) for one in node.targets)
    return called(node) in _ONE_OF_SEVERAL


def _asks_for_negative(loop: ast.For) -> bool:
    """Whether the loop treats negative numbers apart: `if e < 0: continue`, `if e == -1: continue`."""
    tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If)]
    for part in (part for test in tests for part in ast.walk(test)):
        if isinstance(part, ast.Compare) and ast.unparse(part.left) == ast.unparse(loop.target):
            (operator, *_), (other, *_) = part.ops, part.comparators
            if isinstance(other, ast.UnaryOp) or (is_zero(other) and isinstance(operator, ast.Lt | ast.GtE)):
                return True
    return False


def _range(count: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("range", ast.Load()), [count], [])


def _whole(index: ast.expr) -> bool:
    """`[:]` or `[:, 0]`."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    first = parts[0]
    whole = isinstance(first, ast.Slice) and first.lower is None and first.upper is None and first.step is None
    return whole and all(map(is_zero, parts[1:]))


def _number(loop: ast.For, element: str) -> str | None:
    """The name that the first statement of a loop gives to the number in ``element``, which nothing else reads."""
    first = loop.body[0]
    forms = (f"{element}[0]", f"{element}.item()", f"int({element}.item())", f"int({element})", f"int({element}[0])")
    if not isinstance(first, ast.Assign) or len(first.targets) != 1 or not isinstance(first.targets[0], ast.Name):
        return None
    name = first.targets[0].id
    read = name != element and any(element in names(statement) for statement in loop.body[1:])
    return name if ast.unparse(first.value) in forms and not read else None


def _is_itself(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    return ast.unparse(statement.targets[0]) == ast.unparse(statement.value)


def _given(tree: ast.FunctionDef) -> list[str]:
    """Names of the arguments by position; what is called ``self`` as a rule is the first."""
    return [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args)]


def _left_out(tree: ast.FunctionDef) -> tuple[str, ...]:
    """Conditions that hold where the arguments that a function need not be given are not."""
    given = tree.args
    named = [*given.posonlyargs, *given.args]
    defaults = [*zip(named[len(named) - len(given.defaults) :], given.defaults, strict=True)]
    defaults += [(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default]
    holds = [f"not {arg.arg}" for arg in (given.vararg, given.kwarg) if arg is not None]
    for arg, default in defaults:
        if not isinstance(default, ast.Constant) or not isinstance(default.value, bool | None):
            raise NotStatic(f"its ids may be others where {arg.arg} is given", tree)
        holds.append(f"{arg.arg} is {default.value}")
    return tuple(holds)


def _original_unless(tree: ast.FunctionDef, source: Source, holds: list[str]) -> ast.stmt:
    """`if not (...): return type(self).forward(self, ...)`."""
    given = _given(tree)
    passed = [*given, *([f"*{tree.args.vararg.arg}"] if tree.args.vararg else [])]
    passed += [f"{arg.arg}={arg.arg}" for arg in tree.args.kwonlyargs]
    passed += [f"**{tree.args.kwarg.arg}"] if tree.args.kwarg else []
    condition = " and ".join(f"({hold})" for hold in holds)
    call = f"type({given[0]}).{source.name}({', '.join(passed)})"
    return parsed(f"if not ({condition}):\n    return {call}", tree.lineno)[0]
