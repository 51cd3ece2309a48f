"""What code can leave behind beside what it returns: attributes, objects, globals; remembered, named and put back.

Looked at are the modules of a block, the classes that they are of, and the globals and closures that the code of these
classes names, with the functions among them; in all of these, what lists, dictionaries, sets and objects hold.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compile_passes.reached import names_of
from compile_passes.source import NotStatic

# What torch itself keeps in a module.
OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
# What names code, and holds nothing.
_CODE = (FunctionType, MethodType, ModuleType, type, staticmethod, classmethod, property, GetSetDescriptorType)
# Objects of these hold what is theirs; functions of transformers beside its modules keep nothing of a forward.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "triton", "moe_ops", "compile_passes", "meta"}
_FUNCTIONS_OF = _LIBRARIES | {"transformers"}
# More is not looked through for every run of a trial.
_MOST = 50_000


@dataclass(frozen=True)
class _Slot:
    """A name that can be given another value: an attribute, a global, a variable of a closure."""

    said: str
    owner: dict[str, Any] | type | CellType
    name: str

    def get(self) -> Any:
        if isinstance(self.owner, CellType):
            return self.owner.cell_contents
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner))[self.name]

    def put_back(self, value: Any) -> None:
        try:
            if self.get() is value:
                return
        except (KeyError, ValueError):  # taken away
            pass
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class Effects:
    """Where the code of a block, and of its copies, can leave something."""

    def __init__(self, block: nn.Module) -> None:
        self.shared = _shared(block)

    def slots(self, block: nn.Module) -> Iterator[_Slot]:
        for path, module in block.named_modules():
            for name in vars(module):
                if name not in OF_TORCH:
                    yield _Slot(f"{path}.{name}".lstrip("."), vars(module), name)
        yield from self.shared

    def left(self, block: nn.Module) -> dict[str, Any]:
        """Tensors and plain values that are there, by where they are."""
        found: dict[str, Any] = {}
        seen = _seen(block)
        for slot in self.slots(block):
            found.update(_walk(slot.said, slot.get(), seen))
        return found


class Kept:
    """All that a run of ``block`` can write to, beside parameters and buffers, as it is before the run.

    Raises:
        NotStatic: it is more than can be looked through.
    """

    def __init__(self, effects: Effects, block: nn.Module) -> None:
        self.block = block
        self.values = [(slot, slot.get()) for slot in effects.slots(block)]
        self.names = {id(module): set(vars(module)) for module in block.modules()}
        self.holders = _seen(block)
        for slot, value in self.values:
            for _ in _walk(slot.said, value, self.holders):
                pass

    def put_back(self) -> None:
        for module in self.block.modules():
            for name in set(vars(module)) - self.names.get(id(module), set(vars(module))):
                del vars(module)[name]
        for slot, value in self.values:
            slot.put_back(value)
        for holder, before in self.holders.values():
            _refill(holder, before)


# ---- names


def _shared(block: nn.Module) -> list[_Slot]:
    """What all modules of the classes of a block share: attributes of classes, globals, closures."""
    waiting = [part for module in block.modules() for name, part in vars(module).items() if name not in OF_TORCH]
    waiting += [one for module in block.modules() for one in type(module).__mro__]
    found: dict[tuple[int, str], _Slot] = {}
    seen: set[Any] = set()
    code: CodeType | type
    while waiting:
        value = waiting.pop()
        while isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        if isinstance(value, FunctionType) and not _is_of(value.__module__, _FUNCTIONS_OF):
            code, slots = value.__code__, _named_by(value)
        elif isinstance(value, type) and not _is_of(value.__module__, _FUNCTIONS_OF):
            code, slots = value, _attributes(value)
        else:
            waiting += [value.fget, value.fset] if isinstance(value, property) else []
            waiting += [type(value)] if _is_object(value) else []
            continue
        if code not in seen:
            seen.add(code)
            for slot in slots:
                found.setdefault((id(slot.owner), slot.name), slot)
                waiting.append(slot.get())
    return [slot for slot in found.values() if not isinstance(slot.get(), _CODE)]


def _attributes(one: type) -> Iterator[_Slot]:
    yield from (_Slot(f"{one.__qualname__}.{name}", one, name) for name in vars(one))


def _named_by(function: FunctionType) -> Iterator[_Slot]:
    """Variables of its closure, globals, and what it reads of modules that are globals."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():  # an empty one has no value yet
            yield _Slot(name, cell, name)
    read, space = names_of(function.__code__), function.__globals__
    for name in sorted(read & space.keys()):
        value = space[name]
        if not isinstance(value, ModuleType):
            yield _Slot(name, space, name)
        elif not _is_of(value.__name__, _FUNCTIONS_OF):
            inside = sorted(read & vars(value).keys())
            yield from (_Slot(f"{name}.{inner}", vars(value), inner) for inner in inside)


def _is_of(module: str | None, packages: frozenset[str] | set[str]) -> bool:
    return (module or "").partition(".")[0] in packages


# ---- values


def _seen(block: nn.Module) -> dict[int, tuple[Any, Any]]:
    """Tensors that are looked after otherwise."""
    return {id(value): (value, value) for value in (*block.parameters(), *block.buffers())}


def _walk(said: str, value: Any, seen: dict[int, tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in ``value``; ``seen`` gets what holds them, with a copy."""
    if isinstance(value, _PLAIN):
        yield said, value
        return
    if id(value) in seen or isinstance(value, nn.Parameter):
        return
    if len(seen) > _MOST:
        raise NotStatic(f"what its code can write to is more than {_MOST} values, {said} among them")
    held = _copied(value)
    if held is not None:
        seen[id(value)] = (value, held)
    if isinstance(value, Tensor):
        yield said, held
    elif isinstance(value, set | frozenset):
        yield said, frozenset(part for part in value if isinstance(part, _PLAIN))
    elif isinstance(value, list | tuple | deque):
        yield f"len({said})", len(value)
    for name, part in parts(value):
        yield from _walk(said + name, part, seen)


def _copied(value: Any) -> Any:
    """What a value that can be written to holds."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, set | frozenset):
        return set(value)
    return dict(vars(value)) if _is_object(value) else None


def parts(value: Any) -> list[tuple[str, Any]]:
    """What lists, dictionaries, objects and bound methods hold, and how it is written after their name."""
    if isinstance(value, dict):
        held = dict.items(value)
        keys = [key if isinstance(key, _PLAIN) else f"#{place}" for place, key in enumerate(dict.keys(value))]
        return [(f"[{key!r}]", part) for key, (_, part) in zip(keys, held, strict=True)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{place}]", part) for place, part in enumerate(value)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    return [(f".{name}", part) for name, part in vars(value).items()] if _is_object(value) else []


def _is_object(value: Any) -> bool:
    """Whether a value is an object that holds what somebody's code put there."""
    others = (nn.Module, type, ModuleType, FunctionType, MethodType)
    return (
        hasattr(value, "__dict__") and not isinstance(value, others) and not _is_of(type(value).__module__, _LIBRARIES)
    )


def _refill(holder: Any, before: Any) -> None:
    """Make what was walked through hold again what it held."""
    if isinstance(holder, Tensor):
        if holder is not before and holder.shape == before.shape and not torch.equal(holder, before):
            with torch.no_grad():
                holder.copy_(before)
    elif isinstance(holder, list | deque):
        if [*map(id, holder)] != [*map(id, before)]:
            holder.clear()
            holder.extend(before)
    elif isinstance(holder, set):
        if holder != before:
            holder.clear()
            holder.update(before)
    elif not isinstance(holder, tuple | frozenset):
        held = holder if isinstance(holder, dict) else vars(holder)
        now = dict(dict.items(held))
        if [*now] != [*before] or any(now[name] is not value for name, value in before.items()):
            held.clear()
            held.update(before)
