"""What code runs when a module's ``forward`` does, as far as names tell: methods, properties, functions beside it."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Collection, Iterator
from functools import cache, cached_property, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

OF_TORCH = frozenset(vars(nn.Module()))  # what every module has in attributes
_LONGEST = 1_000  # entries of a table of functions: what has more is data


def reached(
    kinds: Collection[type[nn.Module]], *more: str, held: bool = False, functions: tuple[FunctionType, ...] = ()
) -> Iterator[FunctionType]:
    """``forward`` of classes, members of other names, what these name of members, on whatever object, and the functions
    that they name, and so on; without torch's own.

    A name that a tensor has, too, is a member's where it is read of a function's first argument.

    Args:
        held: with the functions, too, that are called as something of what they name: of a module, class or object, in
            a partial or a table, and with those that are defaults of arguments.
        functions: others that they call: `functions_of` modules of these classes.
    """
    kinds = [kind for kind in kinds if not of_torch(kind.__module__)]
    waiting = [function for kind in kinds for name in ("forward", *more) for function in _members(kind, name)]
    waiting += functions
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function
        named, members = names_of(function.__code__), members_named(function)
        for kind in kinds:
            # `super().forward(x)`, `Base.forward(self, x)`: which of the classes is meant is not told apart.
            inherited = not named.isdisjoint({"super", *(base.__name__ for base in kind.__mro__[1:])})
            waiting += [found for name in members for found in _members(kind, name, inherited)]
        values = [function.__globals__[name] for name in named & function.__globals__.keys()]
        for cell in function.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # it has no value yet
                pass
        if held:
            values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            values = _inside(values, named)
        for value in values:
            waiting += _functions(value)


def functions_of(module: nn.Module) -> tuple[FunctionType, ...]:
    """The functions that a module has in attributes: as they are, in partials and tables, of objects to be called."""
    values = [value for name, value in vars(module).items() if name not in OF_TORCH]
    return tuple(function for value in _inside(values, set()) for function in _functions(value))


def members_named(function: FunctionType) -> set[str]:
    """The names of what may be members of modules in a function's code."""
    named = names_of(function.__code__)
    doubtful = {name for name in named if hasattr(Tensor, name)}
    return named - doubtful | (doubtful & _read_of_the_first(function) if doubtful else set())


@cache
def tree_of(function: FunctionType) -> ast.AST | None:
    """The syntax tree of a function's source, where there is one."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None


def _read_of_the_first(function: FunctionType) -> set[str]:
    tree, first = tree_of(function), function.__code__.co_varnames[:1]
    if tree is None:
        return names_of(function.__code__)
    reads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    return {node.attr for node in reads if node.value.id in first}  # type: ignore[attr-defined]


def names_of(code: CodeType) -> set[str]:
    """The globals and attributes that a piece of code, and what is defined in it, names."""
    return set(code.co_names).union(*map(names_of, inner_code(code)))


def words_of(code: CodeType) -> set[str]:
    """The same, and the strings by which `getattr` may read them."""
    own = {value for value in code.co_consts if isinstance(value, str)}
    return names_of(code) | own.union(*map(words_of, inner_code(code)))


def package_of(module: str | None) -> str:
    """The package that a module of this name is in."""
    return (module or "").partition(".")[0]


def of_torch(module: str | None) -> bool:
    """Whether a module of this name is torch's."""
    return package_of(module) == "torch"


def _knows_no_modules(module: str | None) -> bool:
    """Whether what a module of this name defines is torch's, or Python's own."""
    return of_torch(module) or package_of(module) in sys.stdlib_module_names


def inner_code(code: CodeType) -> list[CodeType]:
    """What is defined in a piece of code: lambdas, comprehensions, functions."""
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _members(kind: type[nn.Module], name: str, inherited: bool = False) -> list[FunctionType]:
    """What a class calls by a name; ``inherited``: and what the classes call so that it derives from."""
    owners = [base for base in kind.__mro__ if name in vars(base)]
    return [
        function
        for owner in (owners if inherited else owners[:1])
        if not of_torch(owner.__module__)
        for function in _functions(vars(owner)[name])
    ]


def _inside(values: list[Any], named: set[str]) -> list[Any]:
    """``values``, and what code that has these ``named`` may call of them."""
    found, seen = [], set[int]()
    while values:
        value = values.pop()
        kind = type(value)
        if id(value) in seen or of_torch(getattr(kind, "__module__", None)):
            continue
        seen.add(id(value))
        found.append(value)
        if issubclass(kind, partial):
            values.append(value.func)
        elif kind in (dict, OrderedDict):
            values += value.values() if len(value) <= _LONGEST else ()
        elif kind in (list, tuple):
            values += value if len(value) <= _LONGEST else ()
        elif issubclass(kind, ModuleType):
            own = named & vars(value).keys()
            values += [] if _knows_no_modules(value.__name__) else [vars(value)[name] for name in own]
        elif not issubclass(kind, FunctionType):
            bases = value.__mro__ if issubclass(kind, type) else kind.__mro__
            owned = [vars(base) for base in bases if not _knows_no_modules(base.__module__)]
            values += [members[name] for members in owned for name in {*named, "__call__"} & members.keys()]
    return found


def _functions(value: Any) -> list[FunctionType]:
    """The Python function that a member or a global is, without what is wrapped around it."""
    kind = type(value)  # isinstance would ask proxies for their class, and whatever answers every question
    if issubclass(kind, property):
        value = value.fget
    elif issubclass(kind, cached_property):
        value = value.func
    elif issubclass(kind, staticmethod | classmethod):
        value = value.__func__
    if not issubclass(type(value), FunctionType):
        return []
    value = inspect.unwrap(value)
    return [value] if isinstance(value, FunctionType) and not of_torch(value.__module__) else []
