"""Which lists of experts can be given stacks: what has to hold of their parameters, of the code that reads these, and
of whoever else holds them.
"""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from compile_passes.effects import OF_TORCH, parts
from compile_passes.loops import number_of_experts
from compile_passes.reached import globals_of, names_of, of_torch, reached, words_of
from compile_passes.stack_slices import PLAIN, STACKS, numbered, sliced
from meta.checks import fail

# What a module has its parameters by, which one whose parameters are slices of a stack has none in.
_PARAMETERS = frozenset({"parameters", "named_parameters", "get_parameter", "_parameters", "state_dict"})
# What tells a parameter from a slice of one.
_OF_A_PARAMETER = frozenset({"Parameter", "is_leaf", "grad"})
# How a module's own tensors come into a state dict, and out of one: a stack is there in their place.
_STATE = ("_save_to_state_dict", "_load_from_state_dict", "state_dict", "load_state_dict")
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
                "_load_state_dict_post_hooks")  # fmt: skip


@dataclass(frozen=True)
class ExpertList:
    """A list of experts in a model: ``path`` as in ``named_modules()``, the names of an expert's parameters, and the
    module that has the list.
    """

    path: str
    module: nn.Module
    parameters: tuple[str, ...]
    owner: nn.Module | None

    @property
    def experts(self) -> list[nn.Module]:
        return list(numbered(self.module).values())


def expert_lists(model: nn.Module, names: tuple[str, ...] = ()) -> list[ExpertList]:
    """The lists of experts of ``model`` that are not stacked yet: those of the ``names``, or all that are called so,
    without lists around them or around stacked ones: these are left as they are.
    """
    found = []
    modules = dict(model.named_modules())
    for name in names:
        if not isinstance(modules.get(name), nn.ModuleList | nn.ModuleDict):
            raise fail("stack_experts_", "names", "paths of nn.ModuleList or nn.ModuleDict in the model", repr(name))
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        around = modules.get(parent)
        called = path in names if names else around is not None and number_of_experts(around, name, module) > 0
        if not called or not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(numbered(module)) < 2:
            continue
        if STACKS not in vars(module):
            first = next(iter(numbered(module).values()))
            parameters = tuple(name for name, _ in first.named_parameters(remove_duplicate=False))
            if parameters:
                found.append(ExpertList(path, module, parameters, around))
    inner = {one.module for one in found} | {module for module in modules.values() if STACKS in vars(module)}
    return [one for one in found if len(inner.intersection(one.module.modules())) == 1]


def why_not(found: ExpertList, taken: Mapping[int, str]) -> str | None:
    """Why a list cannot be stacked, in words; None when it can.

    Args:
        taken: what `taken_elsewhere` says of the model's parameters.
    """
    first = found.experts[0]
    kinds = dict.fromkeys(type(module) for expert in found.experts for module in expert.modules())
    owners = dict.fromkeys(kinds if found.owner is None else [type(found.owner), *kinds])
    asked = _asks(tuple(owners))
    if asked is not None:
        return f"{found.path}, as {asked}"
    shape = {name: _facts(weight) for name, weight in first.named_parameters(remove_duplicate=False)}
    for place, expert in enumerate(found.experts):
        where = f"{found.path}.{place}"
        own = dict(expert.named_parameters(remove_duplicate=False))
        if [type(module) for module in expert.modules()] != [type(module) for module in first.modules()]:
            return f"{where} is made of other modules than {found.path}.0"
        if list(own) != list(shape):
            return f"{where} has other parameters than {found.path}.0"
        for path, module in expert.named_modules():
            problem = _unfit_module(module)
            if problem is not None:
                return f"{where}{'.' * bool(path)}{path}, which {problem}"
        for name, weight in own.items():
            problem = _unfit(weight, shape[name]) or _unfit_attributes(weight, first.get_parameter(name), owners)
            problem = problem or taken.get(id(weight))
            if problem is not None:
                return f"{where}.{name}, which {problem}"
    return _underivable(found)


# ---- parameters


def _facts(weight: torch.Tensor) -> tuple[Any, ...]:
    return tuple(weight.shape), weight.dtype, weight.device, weight.requires_grad


def _unfit(weight: torch.Tensor, like: tuple[Any, ...]) -> str | None:
    if type(weight) is not nn.Parameter:
        return f"is a {type(weight).__name__}"
    if type(weight.data) is not torch.Tensor:
        return f"holds a {type(weight.data).__name__}"
    if _facts(weight) != like:
        mine = f"{weight.dtype} {list(weight.shape)} on {weight.device}, requires_grad={weight.requires_grad}"
        return f"is {mine}, unlike that of expert 0"
    if weight.grad is not None:
        return "has a gradient: stack the experts before training starts, or after zero_grad()"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "has a hook"
    return None


def _unfit_attributes(weight: torch.Tensor, first: torch.Tensor, kinds: Mapping[type, Any]) -> str | None:
    """What is set on a parameter goes to the stack: it has to be the same for all, and nothing that a forward reads."""
    mine, like = vars(weight), vars(first)
    for name in sorted(mine.keys() | like.keys()):
        value = mine.get(name)
        if (name in mine) != (name in like) or not isinstance(value, PLAIN) or value != like[name]:
            return f"has an attribute {name} that expert 0's has not, or that is no plain value"
        if name in _words(tuple(kinds)):
            return f"has an attribute {name}, which a slice of a stack has not"
    return None


def taken_elsewhere(model: nn.Module) -> dict[int, str]:
    """Parameters that somebody holds besides their expert, by id, and who: the model once more, attributes of modules
    that are no parameters of theirs, code around the experts, an optimizer, or what brings gradients together.
    """
    users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    taken = {weight: "the model uses in more than one place" for weight, count in users.items() if count > 1}
    for path, module in model.named_modules():
        asked = _asks_around((type(module),))
        if asked is not None:
            taken |= {id(weight): f"{asked}, to find one stack for all experts" for weight in module.parameters()}
        for said, weight in _beside(module):
            taken[id(weight)] = f"{path or type(model).__name__} also holds as {said}"
    for holder, held in holders(torch.optim.Optimizer, *_parallel()):
        why = f"a {type(holder).__name__} optimizer holds already: make it after stacking the experts"
        if isinstance(holder, nn.Module):
            cure = "make it around the model after moe_ops.stack_experts_(model)"
            why = f"a {type(holder).__name__} holds already: {cure}"
        taken.update(dict.fromkeys(held, why))
    return taken


def _beside(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that attributes of a module hold: a list of them, or one that is no parameter of its own."""
    waiting = [(name, value) for name, value in vars(module).items() if name not in OF_TORCH]
    seen: set[int] = set()
    while waiting:
        said, value = waiting.pop()
        if isinstance(value, nn.Parameter):
            yield said, value
        elif id(value) not in seen and len(seen) < 10_000:
            seen.add(id(value))
            waiting += [(said + name, part) for name, part in parts(value) if not isinstance(part, PLAIN)]


def holders(*classes: type) -> Iterator[tuple[Any, set[int]]]:
    """All optimizers, or modules around others, of these classes, with the ids of what each one holds."""
    for thing in _instances(*classes):
        if isinstance(thing, nn.Module):
            yield thing, set(map(id, thing.parameters()))
        else:
            yield thing, {id(weight) for group in thing.param_groups for weight in group["params"]}


def _parallel() -> tuple[type, ...]:
    """The classes whose instances keep parameters that they found in a model, as far as they have been imported."""
    sharded = sys.modules.get("torch.distributed.fsdp")
    found = getattr(nn.parallel, "DistributedDataParallel", None), getattr(sharded, "FullyShardedDataParallel", None)
    return tuple(kind for kind in found if kind is not None)


def _instances(*classes: type) -> Iterator[Any]:
    """All that there are of these."""
    things = gc.get_objects()
    # By their types in one call: a third of the time of a loop. isinstance would ask proxies for their class.
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, classes)}
    for thing in things if kinds else ():
        if type(thing) in kinds:
            yield thing


# ---- modules, and their code


def _unfit_module(module: nn.Module) -> str | None:
    if any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__):
        return "has an adapter of PEFT, which is not fused there: merge it (model.merge_and_unload()) before"
    for name in _STATE:
        owner = next(base for base in type(module).__mro__ if name in vars(base))
        if not of_torch(owner.__module__):
            return f"has a {name} of its own, which a stack would pass by"
    if any(getattr(module, name, None) for name in _STATE_HOOKS):
        return "has a hook on its state dict, which a stack would pass by"
    return None


def _underivable(found: ExpertList) -> str | None:
    """Why a layer of an expert cannot be one that reads slices."""
    own: dict[str, list[str]] = {}
    for name in found.parameters:
        path, _, last = name.rpartition(".")
        own.setdefault(path, []).append(last)
    for path, names in own.items():
        kind = type(found.experts[0].get_submodule(path))
        try:
            sliced(kind, tuple(sorted(names)))
        except Exception as error:  # of whatever runs when somebody derives from a class
            return f"{found.path}, as no class can be derived from {kind.__name__}: {type(error).__name__}: {error}"
    return None


@cache
def _words(kinds: tuple[type[nn.Module], ...]) -> set[str]:
    """What code that ``forward`` of one of these classes calls may read attributes by."""
    return set[str]().union(*(words_of(function.__code__) for function in reached(kinds)))


@cache
def _asks(kinds: tuple[type[nn.Module], ...]) -> str | None:
    """What of modules' parameters and classes code that ``forward`` of one of these classes calls asks for."""
    for function in reached(kinds):
        code, said = function.__code__, function.__qualname__
        asked = sorted(names_of(code) & _PARAMETERS)
        if asked:
            return f"{said} asks for {asked[0]}, which experts of a stack have none of"
        told = sorted(names_of(code) & _OF_A_PARAMETER)
        if told:
            return f"{said} asks for {told[0]}, and a slice of a stack is no parameter"
        if "type" in globals_of(code) or "__class__" in names_of(code):
            return f"{said} asks for a class, and a layer that reads slices has one of its own"
    return None


@cache
def _asks_around(kinds: tuple[type[nn.Module], ...]) -> str | None:
    """What code that ``forward`` of one of these classes calls asks for of the parameters of all that is in a module;
    the first of them (`next(self.parameters()).dtype`) is no expert's.
    """
    asking = [function for function in reached(kinds) if not names_of(function.__code__).isdisjoint(_PARAMETERS)]
    said = (f"{one.__qualname__} asks for by {name}" for one in asking if (name := _asked_by(one)) is not None)
    return next(said, None)


def _asked_by(function: FunctionType) -> str | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or a piece of one
        return "a name that its code has"
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    firsts = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "next"]
    first = {node for call in firsts for node in ast.walk(call)}
    asked = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _PARAMETERS)
    return next((node.attr for node in asked if node not in first or not isinstance(node.value, ast.Name)), None)
