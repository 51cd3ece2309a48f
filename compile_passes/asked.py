"""What code asks of the modules that it runs beside their results: their parameters, and the classes that they are of.

Experts of a stack have slices in the place of parameters, lists of them the stacks, and layers that read slices have
classes of their own (`stack_slices`).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import FunctionType

from torch import nn

from compile_passes.reached import members_named, names_of, package_of, reached, tree_of, words_of
from compile_passes.zero_sums import is_zero_sum

# How a module's parameters are asked for by a call, and without one; and by which calls for slices in their place, as
# long as they are not of the module alone.
_CALLED = frozenset({"parameters", "named_parameters", "get_parameter", "state_dict"})
_READ = frozenset({"_parameters"})
_SLICES_TOO = frozenset({"parameters", "named_parameters"})
# What tells a parameter from a slice of one.
_OF_A_PARAMETER = frozenset({"Parameter", "is_leaf", "grad"})
_CLASSES = frozenset({"type", "__class__"})
# What a parameter has that a stack of such has, too, and calls that take nothing else of it.
_OF_A_STACK_TOO = frozenset({"dtype", "device", "is_cuda", "is_cpu", "is_meta", "requires_grad", "is_floating_point"})
_LIKE = frozenset({"to", "type_as"})
# Where a class decides.
_DECIDES = frozenset({"isinstance", "issubclass", "super"})


@cache
def asked_of_experts(kinds: tuple[type[nn.Module], ...], owner: tuple[type[nn.Module], ...]) -> str | None:
    """What code of experts, or of what has their list, asks for that is not their own in a stack, and which code.

    Args:
        kinds: classes of the modules of experts.
        owner: that of the module with their list, if there is one.
    """
    around = list(reached(owner, held=True))
    named = {name for function in around for name in members_named(function)}
    inside = list(reached(kinds, *sorted(named), held=True))
    packages = {package_of(kind.__module__) for kind in (*kinds, *owner)}
    for function, of_an_expert in (*((one, True) for one in inside), *((one, False) for one in around)):
        name = _parameters(function, of_an_expert=of_an_expert)
        if name is not None:
            return f"{function.__qualname__} asks for {name}, which are not an expert's own in a stack"
        if package_of(function.__module__) in packages:  # others know nothing of modules
            name = _class_or_kind(function)
            if name is not None:
                return f"{function.__qualname__} asks for {name}, and a slice, or what reads one, has another"
    return None


@cache
def asked_around(kinds: tuple[type[nn.Module], ...], functions: tuple[FunctionType, ...]) -> str | None:
    """Which code that ``forward`` of these classes, or these functions, call asks for all parameters of what
    is in a module, and by what; the dtype and device of the first (`next(self.parameters()).dtype`) are a stack's, too.
    """
    called = reached(kinds, held=True, functions=functions)
    named = ((function, _parameters(function, of_an_expert=False)) for function in called)
    return next((f"{function.__qualname__} asks for by {name}" for function, name in named if name is not None), None)


@cache
def words(kinds: tuple[type[nn.Module], ...]) -> set[str]:
    """What code that ``forward`` of one of these classes calls may read attributes by."""
    return set[str]().union(*(words_of(function.__code__) for function in reached(kinds)))


def _parameters(function: FunctionType, *, of_an_expert: bool) -> str | None:
    """By what a function asks for the parameters of a module that slices, or a stack, are not for it: of an expert all
    but calls for its slices, of others all but those for what the first has in common with a stack, and for a sum of
    all times 0.
    """
    if names_of(function.__code__).isdisjoint(_CALLED | _READ):
        return None
    tree = tree_of(function)
    if tree is None:
        return "parameters"
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    fine: set[ast.AST]
    if of_an_expert:
        plain = [node.func for node in calls if not (node.args or node.keywords)]
        fine = {node for node in plain if isinstance(node, ast.Attribute) and node.attr in _SLICES_TOO}
    else:
        harmless = [*_like_a_stack(tree), *filter(is_zero_sum, ast.walk(tree))]
        fine = {node for taken in harmless for node in ast.walk(taken)}
    called = {node.func for node in calls}
    asked = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in fine)
    return next((node.attr for node in asked if node.attr in _READ or (node.attr in _CALLED and node in called)), None)


def _like_a_stack(tree: ast.AST) -> Iterator[ast.AST]:
    """`next(...)` and `list(...)[0]` of which only what a stack has is asked: at once, or by a name of their own."""
    parts = [*ast.walk(tree)]
    asked = {node.value for node in parts if isinstance(node, ast.Attribute) and node.attr in _OF_A_STACK_TOO}
    for call in (node for node in parts if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        asked |= {*call.args} if call.func.attr in _LIKE else set()  # type: ignore[attr-defined]
    named = [node for node in parts if isinstance(node, ast.Name)]
    more = {node.id for node in named if isinstance(node.ctx, ast.Load) and node not in asked}
    stores = Counter(node.id for node in named if isinstance(node.ctx, ast.Store))
    for node in parts:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            asked |= {node.value} if name not in more and stores[name] == 1 else set()
    yield from (node for node in parts if _takes_the_first(node) and (node in asked or _gives_such(node)))


def _takes_the_first(node: ast.AST) -> bool:
    """`next(...)`, `list(...)[0]`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == 0
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next"


def _gives_such(node: ast.AST) -> bool:
    """`next(weight.dtype for weight in ...)`."""
    made = node.args[0] if isinstance(node, ast.Call) and node.args else None
    given = made.elt if isinstance(made, ast.GeneratorExp) else None
    return isinstance(given, ast.Attribute) and given.attr in _OF_A_STACK_TOO


def _class_or_kind(function: FunctionType) -> str | None:
    """By what a function tells modules, or parameters, from others, as far as something depends on that."""
    tree = tree_of(function)
    if tree is None or names_of(function.__code__).isdisjoint(_CLASSES | _OF_A_PARAMETER):
        return None
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _OF_A_PARAMETER and node not in called:
            return node.attr
        inside: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            inside = [node.left, *node.comparators]
            if any(_is_a_container(part, function) for part in inside):
                inside = []  # `type(out) is tuple`: no module or parameter is one
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _DECIDES:
            inside = [*node.args]
        elif isinstance(node, ast.Subscript):
            inside = [node.slice]
        elif isinstance(node, ast.Match):
            inside = [node.subject]
        if any(_is_a_class(part) for part in inside):
            return "a class"
    return None


def _is_a_container(value: ast.AST, function: FunctionType) -> bool:
    """`tuple`, `list` or `dict`, where nothing else is called so."""
    name = value.id if isinstance(value, ast.Name) else ""
    code = function.__code__
    other = name in function.__globals__ or name in (*code.co_varnames, *code.co_freevars, *code.co_cellvars)
    return name in ("tuple", "list", "dict") and not other


def _is_a_class(value: ast.AST) -> bool:
    """`type(x)`, `x.__class__`; `type(x).__name__` is what it was."""
    called = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "type"
    return called or (isinstance(value, ast.Attribute) and value.attr == "__class__")
