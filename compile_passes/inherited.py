"""Methods that `super()` calls, under names of their own, so that a module can have others in their place.

    super().forward(x)      self._moe_ops_base_Base_forward(x)

What is bound to an instance is found by `self`, and not by `super()`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from torch import nn

from compile_passes.reached import of_torch
from compile_passes.source import Source, called, read

_PREFIX = "_moe_ops_base_"


def is_inherited(name: str) -> bool:
    """Whether it is a name that is given here."""
    return name.startswith(_PREFIX)


def inherited_methods(module: nn.Module, own: Mapping[str, Source]) -> dict[str, Source]:
    """The methods that `super()` calls in ``own`` methods of a module, and in these again, by their new names."""
    found: dict[str, Source] = {}
    waiting = [*own.items()]
    while waiting:
        name, source = waiting.pop()
        for _, base, method in _calls(type(module), name, source.tree):
            alias = _alias(base, method)
            inherited = None if alias in found else read(base, method)
            if inherited is not None:
                found[alias] = inherited
                waiting.append((alias, inherited))
    return found


def call_by_name(kind: type[nn.Module], name: str, tree: ast.FunctionDef, changed: Mapping[str, object]) -> bool:
    """Give calls of `super()` in a method of ``kind`` the new names of ``changed`` methods; whether there are any."""
    calls = [(call, _alias(base, method)) for call, base, method in _calls(kind, name, tree)]
    calls = [(call, alias) for call, alias in calls if alias in changed]
    for call, alias in calls:
        call.func = ast.copy_location(ast.Attribute(ast.Name("self", ast.Load()), alias, ast.Load()), call.func)
    ast.fix_missing_locations(tree)
    return bool(calls)


def _alias(base: type, method: str) -> str:
    return f"{_PREFIX}{base.__name__}_{method}"


def _calls(kind: type[nn.Module], name: str, tree: ast.FunctionDef) -> Iterator[tuple[ast.Call, type, str]]:
    """(call, class that has the method, its name) for each call of `super()` in a method, by its own or new name."""
    owner = _owner(kind, name)
    if owner is None:
        return
    behind = kind.__mro__[kind.__mro__.index(owner) + 1 :]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if called(node.func.value) != "super" or ast.unparse(node.func.value) not in (
            "super()", f"super({owner.__name__}, self)"
        ):  # fmt: skip
            continue
        method = node.func.attr
        base = next((base for base in behind if method in vars(base)), None)
        if base is not None and not of_torch(base.__module__):
            yield node, base, method


def _owner(kind: type[nn.Module], name: str) -> type | None:
    """The class of which a method is."""
    for base in kind.__mro__:
        if name in vars(base) or (is_inherited(name) and name.startswith(f"{_PREFIX}{base.__name__}_")):
            return base
    return None
