"""What code can leave behind beside what it returns: attributes, objects, globals; remembered, named and put back.

Looked at are the modules of a block, the classes that they are of, and the globals, closures and defaults of the code
of these classes and of the functions of their packages that it names; in all of these, what lists, dictionaries, sets,
arrays and objects hold. What is long is known by its length alone; what is longer still, or large, is not put back.
"""

from __future__ import annotations

import dis
import logging
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import CallableProxyType, ProxyType

import numpy as np
import torch
from torch import Tensor, nn

from compile_passes.reached import OF_TORCH, inner_code, package_of
from compile_passes.source import NotStatic

log = logging.getLogger(__name__)

# What torch itself keeps in a module.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
# What names code, and holds nothing.
_CODE = (FunctionType, MethodType, ModuleType, type, staticmethod, classmethod, property, GetSetDescriptorType)
# Objects of these hold what is theirs, but for those that hold nothing but what they are given.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"torch", "numpy", "triton", "moe_ops", "compile_passes", "meta"}
_PUBLIC = (SimpleNamespace, Namespace)
_MOST = 50_000  # values in all
_LONG, _LONGEST = 1_000, 20_000  # entries of a container that is looked into, and of one that is put back
_LARGE = 2**24  # bytes of a tensor
_MISSING = object()


@dataclass(frozen=True)
class _Slot:
    """A name that can be given another value: an attribute, a global, a variable of a closure."""

    said: str
    owner: Any  # a dictionary, a class, a cell; None: what has no name of its own, as a default
    name: str
    value: Any = None

    def get(self) -> Any:
        if self.owner is None:
            return self.value
        if isinstance(self.owner, CellType):
            return _MISSING if self.owner == CellType() else self.owner.cell_contents
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.name, _MISSING)

    def put_back(self, value: Any) -> None:
        if self.owner is None or self.get() is value:
            return
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
            if value is _MISSING:
                del self.owner[self.name]
        elif value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Effects:
    """Where the code of a block, and of its copies, can leave something."""

    def __init__(self, block: nn.Module) -> None:
        kinds = dict.fromkeys(type(module) for module in block.modules())
        # transformers' own blocks keep nothing: `generate`, caches and hubs need not be followed.
        self.packages = {package_of(kind.__module__) for kind in kinds} - _LIBRARIES - {"transformers"}
        self.classes = [
            one for one in dict.fromkeys(one for kind in kinds for one in kind.__mro__) if self._is_own(one)
        ]
        self.named = [*self.classes]  # with those of objects and functions that their code names
        self.shared = self._shared(block)

    def _is_own(self, code: type | FunctionType | ModuleType) -> bool:
        return package_of(code.__name__ if isinstance(code, ModuleType) else code.__module__) in self.packages

    def slots(self, block: nn.Module) -> Iterator[_Slot]:
        """Each under a name of its own: two files may have globals of one name."""
        said: dict[str, int] = {}
        for slot in self._slots(block):
            said[slot.said] = said.get(slot.said, 0) + 1
            yield slot if said[slot.said] == 1 else replace(slot, said=f"{slot.said} ({said[slot.said]})")

    def _slots(self, block: nn.Module) -> Iterator[_Slot]:
        for path, module in block.named_modules():
            for name in vars(module):
                if name not in OF_TORCH:
                    yield _Slot(f"{path}.{name}".lstrip("."), vars(module), name)
        for one in self.named:
            yield from (_Slot(f"{one.__qualname__}.{name}", one, name) for name in list(vars(one)) if name[:2] != "__")
        yield from self.shared

    def _shared(self, block: nn.Module) -> list[_Slot]:
        """Globals, closures and defaults of the code of a block's classes, and of what it is given to call."""
        waiting = [part for module in block.modules() for name, part in vars(module).items() if name not in OF_TORCH]
        waiting += [part for one in self.classes for part in vars(one).values()]
        found: dict[tuple[int, str], _Slot] = {}
        seen: set[Any] = set()
        while waiting:
            value = waiting.pop()
            if is_proxy(value):
                continue
            while isinstance(value, staticmethod | classmethod | MethodType):
                value = value.__func__
            if isinstance(value, property):
                waiting += [value.fget, value.fset]
            elif isinstance(value, FunctionType):
                if self._is_own(value) and value.__code__ not in seen:
                    seen.add(value.__code__)
                    for slot in self._named_by(value):
                        found.setdefault((id(slot.owner or slot.value), slot.name), slot)
                        waiting.append(slot.get())
            else:
                kind = value if isinstance(value, type) else type(value)
                if kind not in seen and self._is_own(kind) and not issubclass(kind, nn.Module):
                    seen.add(kind)
                    self.named.append(kind)
                    waiting += vars(kind).values()
        return [slot for slot in found.values() if is_proxy(slot.get()) or not isinstance(slot.get(), _CODE)]

    def _named_by(self, function: FunctionType) -> Iterator[_Slot]:
        code, space = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield _Slot(name, cell, name)
        for place, value in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            yield _Slot(f"default {place} of {function.__qualname__}", None, str(place), value)
        yield from (_Slot(f"{function.__qualname__}.{name}", vars(function), name) for name in vars(function))
        read, written, attributes = _globals(code)
        for name in sorted((read & space.keys()) | written):
            value = space.get(name)
            if not isinstance(value, ModuleType):
                yield _Slot(name, space, name)
            elif self._is_own(value):
                inside = sorted(attributes & vars(value).keys())
                yield from (_Slot(f"{name}.{inner}", vars(value), inner) for inner in inside)


class Kept:
    """All that a run of ``block`` can write to, beside parameters and buffers, as it is before the run.

    Raises:
        NotStatic: it is more than can be looked through.
    """

    def __init__(self, effects: Effects, block: nn.Module) -> None:
        self.effects, self.block = effects, block
        self.values = [(slot, slot.get()) for slot in effects.slots(block)]
        self.names = [(owner, set(vars(owner))) for owner in (*block.modules(), *effects.named)]
        self.before, self.holders = self._look()

    def _look(self) -> tuple[dict[str, Any], dict[int, _Holder]]:
        """Tensors and plain values that are there, by where they are, and what holds them."""
        found: dict[str, Any] = {}
        holders = {id(value): _Holder(value, value) for value in (*self.block.parameters(), *self.block.buffers())}
        for slot in self.effects.slots(self.block):
            found.update(_walk(slot.said, slot.get(), holders))
        return found, holders

    def left(self) -> dict[str, Any]:
        """Tensors and plain values that are there now and were not before, or others, by where they are."""
        now, _ = self._look()
        gone = dict.fromkeys(self.before.keys() - now.keys(), "(taken away)")
        changed = {name: value for name, value in now.items() if name not in self.before or self._is_new(name, value)}
        return gone | changed

    def _is_new(self, name: str, value: Any) -> bool:
        before = self.before[name]
        return value is not before and (type(value) is not type(before) or bool(value != before))

    def put_back(self) -> None:
        """Make all of it what it was."""
        for owner, names in self.names:
            for name in set(vars(owner)) - names:
                if isinstance(owner, type):
                    delattr(owner, name)
                else:
                    del vars(owner)[name]
        steps: list[Callable[[], None]] = [partial(slot.put_back, value) for slot, value in self.values]
        for step in (*steps, *(holder.put_back for holder in self.holders.values())):
            try:
                step()
            except Exception as error:  # of somebody's own class; the others are put back all the same
                log.warning("the trial of a loop could not put back what it changed: %s", error)


# ---- names


def _globals(code: CodeType) -> tuple[set[str], set[str], set[str]]:
    """The globals that a piece of code reads, those that it writes, and the attributes that it names."""
    read, written, attributes = set(), set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(step.argval)
        elif isinstance(step.argval, str):
            attributes.add(step.argval)
    for inner in inner_code(code):
        for mine, found in zip((read, written, attributes), _globals(inner), strict=True):
            mine |= found
    return read, written, attributes


def is_proxy(value: Any) -> bool:
    """Whether a value stands for another one, which may be no more, and is no name of it."""
    return type(value) in (ProxyType, CallableProxyType)


# ---- values


@dataclass(frozen=True, eq=False)
class Written:
    """A tensor or an array: which one, and how often it has been written to, or its numbers."""

    value: Any
    state: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Written) and other.value is self.value and other.state == self.state

    def numbers(self) -> Tensor:
        """As they are now."""
        return (self.value if isinstance(self.value, Tensor) else torch.from_numpy(self.value)).detach().clone()


@dataclass(frozen=True)
class _Holder:
    """What holds values, and what it held."""

    value: Any
    held: Any

    def put_back(self) -> None:
        value, held = self.value, self.held
        if value is held or held is None:
            return
        if isinstance(value, Tensor):
            if value._version != held[1]:
                with torch.no_grad():
                    if value.shape == held[0].shape and value.dtype == held[0].dtype:
                        value.copy_(held[0])
                    else:
                        value.data = held[0].clone()
        elif isinstance(value, np.ndarray):
            value[...] = held
        elif isinstance(value, list | deque):
            if [*map(id, value)] != [*map(id, held)]:
                value.clear()
                value.extend(held)
        elif isinstance(value, set):
            if value != held:
                value.clear()
                value.update(held)
        elif isinstance(value, dict):
            _put_items_back(value, held)
        else:
            own = _attributes_of(value)
            if own is not None:
                _put_items_back(own, held)
            else:
                for name, part in held.items():
                    object.__setattr__(value, name, part)


def _put_items_back(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    now = dict(dict.items(held))
    if [*now] != [*before] or any(now[name] is not value for name, value in before.items()):
        held.clear()
        held.update(before)


def _walk(said: str, value: Any, seen: dict[int, _Holder]) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in ``value``; ``seen`` gets what holds them, with what that holds."""
    waiting = [(said, value)]
    while waiting:
        said, value = waiting.pop()
        if value is _MISSING or is_proxy(value):
            continue
        if isinstance(value, _PLAIN):
            yield said, value
        elif id(value) not in seen and not isinstance(value, nn.Parameter):
            if len(seen) > _MOST:
                raise NotStatic(f"what its code can write to is more than {_MOST} values, {said} among them")
            yield from _known(said, value, seen)
            if _length(value) <= _LONG:
                waiting += [(said + name, part) for name, part in parts(value)]


def _known(said: str, value: Any, seen: dict[int, _Holder]) -> Iterator[tuple[str, Any]]:
    """What tells that a value was written to; ``seen`` gets what it holds."""
    held: Any = None
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        plain = type(value) is Tensor and value.layout == torch.strided and not value.is_meta
        small = plain and value.numel() * value.itemsize <= _LARGE
        held = (value.detach().clone(), version) if small else None
        yield said, Written(value, version)
    elif isinstance(value, np.ndarray):
        held = value.copy() if value.nbytes <= _LARGE and value.dtype != object else None
        yield said, Written(value, None if held is None else held.tobytes())
    elif isinstance(value, set | frozenset):
        held = set(value) if isinstance(value, set) else None
        short = len(value) <= _LONG
        yield said, frozenset(part for part in value if isinstance(part, _PLAIN)) if short else len(value)
    elif isinstance(value, list | tuple | deque | dict):
        if not isinstance(value, tuple) and len(value) <= _LONGEST:
            held = dict(dict.items(value)) if isinstance(value, dict) else list(value)
        yield f"len({said})", len(value)
    elif _is_object(value):
        held = dict(_items_of(value))
    seen[id(value)] = _Holder(value, held)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | deque | dict) else 0


def parts(value: Any) -> list[tuple[str, Any]]:
    """What lists, dictionaries, objects and bound methods hold, and how it is written after their name."""
    if isinstance(value, dict):
        keys = [key if isinstance(key, _PLAIN) else f"#{place}" for place, key in enumerate(dict.keys(value))]
        return [(f"[{key!r}]", part) for key, part in zip(keys, dict.values(value), strict=True)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{place}]", part) for place, part in enumerate(value)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    held = _items_of(value) if _is_object(value) else []
    if isinstance(value, nn.Module):  # one that is no part of the block
        held = [*((name, part) for name, part in held if name not in OF_TORCH), *value.named_buffers(recurse=False)]
    return [(f".{name}", part) for name, part in held]


def _is_object(value: Any) -> bool:
    """Whether a value is an object that holds what somebody's code put there."""
    if isinstance(value, _CODE):
        return False
    kind = type(value)
    return isinstance(value, nn.Module) or kind in _PUBLIC or package_of(kind.__module__) not in _LIBRARIES


def _items_of(value: Any) -> list[tuple[str, Any]]:
    """The attributes that an object has of its own, in slots too."""
    slots = [name for kind in type(value).__mro__ for name in _listed(vars(kind).get("__slots__", ()))]
    found = {name: part for name in slots if (part := _read(value, name)) is not _MISSING}
    return [*found.items(), *(_attributes_of(value) or {}).items()]


def _listed(slots: Any) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name[:2] != "__"]


def _attributes_of(value: Any) -> dict[str, Any] | None:
    found = _read(value, "__dict__")
    return found if isinstance(found, dict) else None


def _read(value: Any, name: str) -> Any:
    """An attribute, whatever else an object answers to; a property may raise anything."""
    try:
        return object.__getattribute__(value, name)
    except Exception:
        return _MISSING
