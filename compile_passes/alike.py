"""Whether the experts of lists are alike, so that what is captured of a few goes for all of them.

Stacked experts have their weights in one memory, but each is a module of its own, with attributes that code may read.
Their classes (`stack_slices.sliced`) tell when one is set: what was captured is no longer valid then.
"""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from compile_passes.loops import ALIKE, LISTS, PARAMETERS
from compile_passes.reached import OF_TORCH
from compile_passes.stack_slices import METHODS, RELY, SLICE, STACKS, is_watched, original, slices_in
from compile_passes.trial import HOOKS

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def are_alike(module: nn.Module, many: int) -> bool:
    """Whether the experts of ``module`` are alike, in lists of ``many`` and more: modules of the same classes with the
    same attributes, without hooks, and in the order of their slices.

    ``vars(module)[ALIKE]`` is 0 from when an attribute of one of them is set.
    """
    holders, parts = [], set[nn.Module]()
    for inner in module.modules():
        if STACKS in vars(inner):
            holders.append(inner)
            experts = _in_order(inner)
            if experts is None or not all(_are_equal(experts[0], other) for other in experts[1:]):
                return False
            parts |= {part for expert in experts for part in expert.values()}
        elif isinstance(inner, LISTS) and not isinstance(inner, PARAMETERS) and len(inner) >= many:
            return False
    others = [inner for inner in module.modules() if inner not in parts]
    if any(isinstance(value, list | tuple | dict | set) and len(value) >= many
           for other in others for value in _own(other).values()):  # fmt: skip
        return False  # something for every expert, of which nobody hears when it changes
    told = [*holders, *parts]
    if not all(map(is_watched, told)):
        return False
    for part in told:
        RELY.setdefault(part, WeakKeyDictionary())[module] = part.training == module.training
    return bool(vars(module).get(ALIKE))


def _in_order(holder: nn.Module) -> list[dict[str, nn.Module]] | None:
    """Path -> module in each expert of a list; None where others were put there since, or where an expert is not at the
    number of its slices: by its place, and by its name, if that has a number.
    """
    experts = {name: child for name, child in holder.named_children() if any(True for _ in slices_in(child))}
    if not experts:
        return [] if SLICE in vars(holder) else None
    stacks = [holder._parameters[name] for name in vars(holder)[STACKS]]
    counts = {stack.shape[0] for stack in stacks if stack is not None}
    numbers = [{number for *_, slices in slices_in(child) for _, number in slices.values()}
               for child in experts.values()]  # fmt: skip
    named = [[int(digits) for digits in re.findall(r"\d+", name)[-1:]] for name in experts]
    if counts != {len(experts)} or numbers != [{place} for place in range(len(experts))]:
        return None
    if named != [[first + place for first in named[0]] for place in range(len(experts))]:
        return None
    return [dict(child.named_modules(remove_duplicate=False)) for child in experts.values()]


def _are_equal(one: dict[str, nn.Module], other: dict[str, nn.Module]) -> bool:
    return list(one) == list(other) and all(map(_is_equal, one.values(), other.values()))


def _is_equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether code cannot tell two modules apart, but by their slices."""
    if original(type(one)) is not original(type(other)) or one.training != other.training:
        return False
    if any(getattr(inner, name, None) for inner in (one, other) for name in HOOKS):
        return False
    pairs = [(vars(one)[of], vars(other)[of]) for of in ("_parameters", "_buffers")] + [(_own(one), _own(other))]
    return all(here.keys() == there.keys() and all(_is_same(value, there[name]) for name, value in here.items())
               for here, there in pairs)  # fmt: skip


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


def _own(module: nn.Module) -> dict[str, Any]:
    """What is set on a module, beside what every module has and what we put there."""
    return {name: value for name, value in vars(module).items()
            if name not in OF_TORCH and name not in METHODS and not name.startswith("_moe_ops")}  # fmt: skip
