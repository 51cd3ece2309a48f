"""What code runs when a module's ``forward`` does, as far as names tell: methods, properties, functions beside it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterator
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def reached(kinds: Collection[type[nn.Module]]) -> Iterator[FunctionType]:
    """``forward`` of classes, what it names of their members, on whatever object, and the functions that it names, and
    so on; without torch's own.
    """
    kinds = [kind for kind in kinds if not of_torch(kind.__module__)]
    waiting = [function for kind in kinds for function in _members(kind, "forward")]
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function
        for name in names_of(function.__code__):
            waiting += [found for kind in kinds for found in _members(kind, name)]
            waiting += _functions(function.__globals__.get(name))
        for cell in function.__closure__ or ():
            try:
                waiting += _functions(cell.cell_contents)
            except ValueError:  # it has no value yet
                pass


def names_of(code: CodeType) -> set[str]:
    """The globals and attributes that a piece of code, and what is defined in it, names."""
    return set(code.co_names).union(*map(names_of, _inner(code)))


def words_of(code: CodeType) -> set[str]:
    """The same, and the strings by which `getattr` may read them."""
    own = {value for value in code.co_consts if isinstance(value, str)}
    return names_of(code) | own.union(*map(words_of, _inner(code)))


def globals_of(code: CodeType) -> set[str]:
    """The globals alone, with those that are built in."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*map(globals_of, _inner(code)))


def of_torch(module: str | None) -> bool:
    """Whether a module of this name is torch's."""
    return (module or "").partition(".")[0] == "torch"


def _inner(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _members(kind: type[nn.Module], name: str) -> list[FunctionType]:
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return [] if owner is None or of_torch(owner.__module__) else _functions(vars(owner)[name])


def _functions(value: Any) -> list[FunctionType]:
    """The Python function that a member or a global is, without what is wrapped around it."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    value = inspect.unwrap(value) if callable(value) else value
    return [value] if isinstance(value, FunctionType) and not of_torch(value.__module__) else []
