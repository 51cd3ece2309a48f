"""Lists of experts as stacked weights: one parameter [E, ...] for what every expert of an `nn.ModuleList` has.

A pass cannot rebind parameters, and copying E weights into one at every call would cost more than the experts. So the
list itself is given the stacks, and each expert's layer reads its slice of them: the model's code runs as before, its
state dict has the old keys, and a loop over the list is a loop over slices of one tensor, which the passes fuse.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_passes.loops import asks_for_parameters, number_of_experts
from meta.checks import check_module, fail
from moe_ops import quantized_state
from moe_ops.quantized import QuantizedWeight

log = logging.getLogger(__name__)

# On a list: stacked parameter -> the parameter of an expert that it holds. On a layer of an expert: the list, the
# expert's number, and its own parameter -> stacked parameter.
_STACKS, _SLICE = "_moe_ops_stacks", "_moe_ops_slice"
_TRANSPOSED = "is_transposed"  # transformers' word, which `moe_ops.stacked` reads
FREEZE = "requires_grad_"  # nn.Module's method: an expert's modules have their own, as it would find no parameters


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
        return list(_numbered(self.module).values())


def stack_experts_(model: nn.Module, *names: str) -> nn.Module:
    """Give every list of experts of ``model`` one stacked parameter ``[E, ...]`` per parameter of an expert, in place.

    The experts' layers read slices of the stacks, so the model computes what it did, to the bit, and
    ``torch.compile(model, backend="moe_ops")`` can fuse a loop over them. ``state_dict`` and ``load_state_dict`` keep
    the old keys, both ways; of stacks that `quantize_` replaced, these hold each expert's bytes and stand beside those
    of its scales. Beyond the model itself it needs the memory of one stack at a time. Call it before the optimizer,
    DDP or FSDP are made: the experts' parameters are new ones. `restore` undoes it.

    Args:
        model: a module.
        names: paths of the lists, as in ``model.named_modules()``; by default every ``nn.ModuleList`` and
            ``nn.ModuleDict`` of two or more modules whose name has "expert" in it. Of lists in one another the
            innermost are stacked.

    Returns:
        ``model``.

    Raises:
        ValueError: there is no such list; its experts differ in class, in parameters, shapes, dtypes or devices; a
            parameter has a gradient or a hook, is used twice, is no plain tensor, or is held by an optimizer,
            DistributedDataParallel or FSDP. Nothing is changed then.

    Example:
        >>> model = moe_ops.stack_experts_(model)
        >>> compiled = torch.compile(model, backend="moe_ops")
    """
    check_module("stack_experts_", model)
    lists = expert_lists(model, names)
    if not lists:
        raise fail(
            "stack_experts_", "model", 'a module with an nn.ModuleList, not stacked yet, called "...expert..."',
            f"{type(model).__name__} without one. Name the list: stack_experts_(model, \"layers.0.ffns\")",
        )  # fmt: skip
    taken = taken_elsewhere(model)
    for found in lists:
        problem = why_not(found, taken)
        if problem is not None:
            raise fail("stack_experts_", "model", "a model whose lists of experts can be stacked", problem)
    for found in lists:
        stack_list(found)
    return model


def unstack(model: nn.Module) -> nn.Module:
    """Undo `stack_experts_`: every expert has its own parameters again, with the present values and gradients."""
    lists = [module for module in model.modules() if _STACKS in vars(module)]
    stacked = {id(module._parameters[name]) for module in lists for name in vars(module)[_STACKS]}
    holders = (
        {type(optimizer).__name__ for optimizer, held in _holders(torch.optim.Optimizer) if stacked & held}
        if stacked
        else set()
    )
    for module in lists:
        _unstack(module, vars(module)[_STACKS])
    for name in sorted(holders):
        message = (
            f"moe_ops.restore: a {name} optimizer holds stacked experts that the model no longer has: make it anew."
        )
        warnings.warn(message, stacklevel=3)
    return model


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
        if not called or not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(_numbered(module)) < 2:
            continue
        if _STACKS not in vars(module):
            first = next(iter(_numbered(module).values()))
            parameters = tuple(name for name, _ in first.named_parameters(remove_duplicate=False))
            if parameters:
                found.append(ExpertList(path, module, parameters, around))
    inner = {one.module for one in found} | {module for module in modules.values() if _STACKS in vars(module)}
    return [one for one in found if len(inner.intersection(one.module.modules())) == 1]


def why_not(found: ExpertList, taken: Mapping[int, str]) -> str | None:
    """Why a list cannot be stacked, in words; None when it can.

    Args:
        taken: what `taken_elsewhere` says of the model's parameters.
    """
    first = found.experts[0]
    inside = [module for expert in found.experts for module in expert.modules()]
    for kind in dict.fromkeys(map(type, [*([found.owner] if found.owner is not None else []), *inside])):
        if (asked := asks_for_parameters(kind)) is not None:
            return f"{found.path}, as {kind.__name__}.forward asks for {asked}, which experts of a stack have none of"
    shape = {name: _facts(weight) for name, weight in first.named_parameters(remove_duplicate=False)}
    for place, expert in enumerate(found.experts):
        where = f"{found.path}.{place}"
        own = dict(expert.named_parameters(remove_duplicate=False))
        if [type(module) for module in expert.modules()] != [type(module) for module in first.modules()]:
            return f"{where} is made of other modules than {found.path}.0"
        if list(own) != list(shape):
            return f"{where} has other parameters than {found.path}.0"
        for name, weight in own.items():
            problem = _unfit(weight, shape[name]) or taken.get(id(weight))
            if problem is not None:
                return f"{where}.{name}, which {problem}"
    return None


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


def taken_elsewhere(model: nn.Module) -> dict[int, str]:
    """Parameters that somebody holds besides their expert, by id, and who: the model once more, an optimizer, or what
    brings gradients together.
    """
    users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    taken = {weight: "the model uses in more than one place" for weight, count in users.items() if count > 1}
    for holder, held in _holders(torch.optim.Optimizer, *_parallel()):
        why = f"a {type(holder).__name__} optimizer holds already: make it after stacking the experts"
        if isinstance(holder, nn.Module):
            cure = "make it around the model after moe_ops.stack_experts_(model)"
            why = f"a {type(holder).__name__} holds already: {cure}"
        taken.update(dict.fromkeys(held, why))
    return taken


def _holders(*classes: type) -> Iterator[tuple[Any, set[int]]]:
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


# ---- stacking


def stack_list(found: ExpertList) -> None:
    """Replace the parameters of a list's experts by slices of stacked ones."""
    stacks: dict[str, str] = {}
    vars(found.module)[_STACKS] = stacks
    linear = True
    experts = found.experts
    for name in found.parameters:
        stacked = name.replace(".", "_")
        owners = [_owner(expert, name) for expert in experts]
        linear &= all(isinstance(owner, nn.Linear) for owner, _ in owners)
        weights = [owner._parameters[own] for owner, own in owners]
        first = weights[0]
        with torch.no_grad():
            data = torch.stack([weight for weight in weights if weight is not None])
        for number, (owner, own) in enumerate(owners):
            del owner._parameters[own]
            _, _, slices = vars(owner).setdefault(_SLICE, (found.module, number, {}))
            slices[own] = stacked
            owner.__class__ = _sliced(_original(type(owner)), tuple(sorted(slices)))
        del weights, owners
        found.module.register_parameter(stacked, nn.Parameter(data, first is None or first.requires_grad))
        stacks[stacked] = name
    for module in [module for expert in experts for module in expert.modules()]:
        vars(module)[FREEZE] = partial(_freeze, module)
    if linear:  # [E, N, K], which the shapes alone need not say
        vars(found.module)[_TRANSPOSED] = False
    found.module.register_state_dict_post_hook(_split_state)
    found.module.register_load_state_dict_pre_hook(_stack_state)
    log.info("stacked %d experts of %s: %s", len(experts), found.path or "the model", ", ".join(stacks.values()))


def _unstack(module: nn.Module, stacks: Mapping[str, str]) -> None:
    stacked = {name: module._parameters.pop(name) for name in stacks}
    for inner in module.modules():
        vars(inner).pop(FREEZE, None)
    for _, owner, holder, number, slices in _slices(module):
        if holder is not module:
            continue
        owner.__class__ = _original(type(owner))
        del vars(owner)[_SLICE]
        for own, name in slices.items():
            held = stacked[name]
            if held is not None:
                weight = nn.Parameter(held.detach()[number].clone(), held.requires_grad)
                weight.grad = None if held.grad is None else held.grad[number].clone()
                owner.register_parameter(own, weight)
    del vars(module)[_STACKS]
    vars(module).pop(_TRANSPOSED, None)
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (_split_state, _stack_state)]:
            del hooks[key]


def _owner(expert: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of an expert that a parameter belongs to, and its name there."""
    path, _, own = name.rpartition(".")
    return expert.get_submodule(path), own


_SLICED: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _sliced(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class ``kind`` whose parameters ``names`` are slices of stacked ones, the same for all experts."""
    if (kind, names) in _SLICED:
        return _SLICED[kind, names]
    members = {name: property(_reader(name)) for name in names} | _methods(kind, names)
    made = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "_moe_ops_original": kind})
    return _SLICED.setdefault((kind, names), made)


def _reader(name: str) -> Any:
    def read(self: nn.Module) -> torch.Tensor:
        module, number, slices = self.__dict__[_SLICE]
        stacked: torch.Tensor = module._parameters[slices[name]]
        return stacked[number]

    return read


def _methods(kind: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        reduced: Any = kind.__reduce_ex__(self, max(2, protocol))
        _, (_, *given), *state = reduced
        return _renewed, (kind, names, *given), *state  # pickle finds no class that is made here by its name

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if name in names:
            rule = "left in its place, as it is a slice of the parameter of all experts"
            cure = "Write into it by copy_ under torch.no_grad(), or call moe_ops.restore(model) first."
            raise fail("register_parameter", name, rule, f"a new {type(param).__name__}", cure)
        kind.register_parameter(self, name, param)

    return {"__reduce_ex__": reduce, "register_parameter": register}


def _renewed(kind: type[nn.Module], names: tuple[str, ...], *given: Any) -> nn.Module:
    made = _sliced(kind, names)
    return made.__new__(made, *given)


def _freeze(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    """`requires_grad_` of a module of an expert, which has no parameters of its own to freeze."""
    for _, _, holder, _, slices in _slices(module):
        if any(holder.get_parameter(name).requires_grad != requires_grad for name in slices.values()):
            rule = f"{not requires_grad}, as of all experts of the list, whose weights are one parameter"
            cure = "Call it on the list, or on this expert before moe_ops.compile or after moe_ops.restore(model)."
            raise fail("requires_grad_", "requires_grad", rule, requires_grad, cure)
    return type(module).requires_grad_(module, requires_grad)


def _original(kind: type[nn.Module]) -> type[nn.Module]:
    found: type[nn.Module] = vars(kind).get("_moe_ops_original", kind)
    return found


# ---- state dicts with the keys of single experts


def _numbered(module: nn.Module) -> dict[str, nn.Module]:
    """The experts of a list by their keys: what has weights, which a dropout for all of them beside them has not."""
    return {key: child for key, child in module.named_children() if any(True for _ in child.parameters())}


def _slices(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, int, dict[str, str]]]:
    """(path, module, list, number of the expert, own parameter -> stacked one) of what reads slices in a module."""
    for path, inner in module.named_modules(remove_duplicate=False):
        if _SLICE in vars(inner):
            yield path, inner, *vars(inner)[_SLICE]


def _keys(module: nn.Module) -> Iterator[list[tuple[str, dict[str, int]]]]:
    """Of each stacked parameter its keys in a state dict, one for every tensor that a quantised one is made of, each
    with the keys of this tensor's slices and their numbers. They are looked for, as experts may have been put into the
    list, moved and taken out since.
    """
    found: dict[str, dict[str, int]] = {stacked: {} for stacked in vars(module)[_STACKS]}
    for path, _, holder, number, slices in _slices(module):
        if holder is module:
            for own, stacked in slices.items():
                found[stacked][f"{path}.{own}"] = number
    for stacked, numbers in found.items():
        weight = module._parameters[stacked]
        if isinstance(weight, QuantizedWeight):
            parts = zip(*(quantized_state.keys_of(weight, name) for name in (stacked, *numbers)), strict=True)
            yield [(part, dict(zip(names, numbers.values(), strict=True))) for part, *names in parts]
        else:
            yield [(stacked, numbers)]


def _split_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Stacked parameters under the keys that their slices had."""
    quantized_state.write(module, state, prefix, metadata)  # its own hook may come later
    held: dict[str, Any] = {}
    for part, numbers in [pair for of_one in _keys(module) for pair in of_one]:
        if prefix + part in state:
            stacked = state.pop(prefix + part)
            held |= {prefix + key: stacked[number] for key, number in numbers.items()}
    held |= {key: state.pop(key) for key in list(state) if key.startswith(prefix)}  # buffers of the experts
    order = {name: place for place, (name, _) in enumerate(module.named_children())}
    places = {key: order.get(key[len(prefix) :].partition(".")[0], len(order)) for key in held}
    state.update(sorted(held.items(), key=lambda item: places[item[0]]))


def _stack_state(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """The old keys of a state dict, each slice's own, as the stacked ones."""
    for pairs in _keys(module):
        weight = module.get_parameter(pairs[0][0])
        whole = isinstance(weight, QuantizedWeight) or weight.is_meta  # it cannot be loaded for some of its experts
        made, wrong = {}, []
        for part, numbers in pairs:
            given = {number: state.pop(prefix + key) for key, number in numbers.items() if prefix + key in state}
            name, some = f"{prefix}*.{next(iter(numbers), part).partition('.')[2]}", bool(given)
            if not whole and len(given) < weight.shape[0] and prefix + part not in state:  # the others keep theirs
                missing += [prefix + key for key, number in numbers.items() if number not in given]
                given = dict(enumerate(weight.detach())) | {key: value.to(weight) for key, value in given.items()}
            if 0 < len(given) < weight.shape[0]:
                wrong.append(f"{name}: {len(given)} of {weight.shape[0]} experts are in the checkpoint.")
            elif len({(value.shape, value.dtype, value.device) for value in given.values()}) > 1:
                wrong.append(f"{name}: the experts of the checkpoint differ in shape, dtype or device.")
            elif given:
                made[prefix + part] = torch.stack([given[n] for n in sorted(given)]) if some else weight
        errors += wrong
        if not wrong:  # else codes would be said to lack the scales that are wrong
            state.update(made)
    quantized_state.read(module, state, prefix, metadata)  # its own hook may have come before
