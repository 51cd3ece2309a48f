"""Lists of experts as stacked weights: one parameter [E, ...] for what every expert of a list has.

A pass cannot rebind parameters, and copying E weights into one at every call would cost more than the experts. So the
list itself is given the stacks, and each expert's layer reads its slice of them (`stack_slices`): the model's code runs
as before, its state dict has the old keys, and a loop over the list is a loop over slices of one tensor, which the
passes fuse. What `stackable` cannot prove to be as before stays a list.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress

import torch
from torch import nn

from compile_passes.asked import words
from compile_passes.loops import LISTS
from compile_passes.stack_slices import (
    METHODS,
    SLICE,
    STACKS,
    Method,
    drop_stacks,
    is_watched,
    load_stacks,
    make_single,
    original,
    sliced,
)
from compile_passes.stackable import ExpertList, expert_lists, holders, taken_elsewhere, why_not
from meta.checks import check_module, fail

log = logging.getLogger(__name__)

_TRANSPOSED = "is_transposed"  # transformers' word, which `moe_ops.stacked` reads


def stack_experts_(model: nn.Module, *names: str) -> nn.Module:
    """Give every list of experts of ``model`` one stacked parameter ``[E, ...]`` per parameter of an expert, in place.

    The experts' layers read slices of the stacks, so the model computes what it did, to the bit, and
    ``torch.compile(model, backend="moe_ops")`` can fuse a loop over them. ``state_dict`` and ``load_state_dict`` keep
    the old keys, both ways; of stacks that `quantize_` replaced, these hold each expert's bytes and stand beside those
    of its scales. Beyond the model itself it needs the memory of one stack at a time. Call it before the optimizer,
    DDP or FSDP are made: the experts' parameters are new ones. `restore` undoes it.

    Args:
        model: a module.
        names: paths of the lists, as in ``model.named_modules()``, or of modules with experts that are called by
            numbers (``expert_0``, ...); by default every ``nn.ModuleList``, ``nn.ModuleDict`` and ``nn.ParameterList``
            of two or more that is called experts, or is as long as a router beside it has scores, such an
            ``nn.ParameterDict`` by numbered keys, and all such modules. Of lists in one another the innermost are
            stacked.

    Returns:
        ``model``.

    Raises:
        ValueError: there is no such list; its experts differ in class, in parameters, shapes, dtypes or devices; a
            parameter has a gradient or a hook, is used twice, is no plain tensor, or is held by an attribute, an
            optimizer, DistributedDataParallel or FSDP; code around it asks for parameters or classes, or writes state
            dicts of its own. Nothing is changed then.

    Example:
        >>> model = moe_ops.stack_experts_(model)
        >>> compiled = torch.compile(model, backend="moe_ops")
    """
    check_module("stack_experts_", model)
    lists = expert_lists(model, names)
    if not lists:
        raise fail(
            "stack_experts_", "model", 'a module with an nn.ModuleList, not stacked yet, called "...expert..."',
            f"{type(model).__name__} without one. If one has another name, give it: "
            'stack_experts_(model, "layers.0.ffns")',
        )  # fmt: skip
    taken = taken_elsewhere(model, lists)
    for found in lists:
        problem = why_not(found, taken)
        if problem is not None:
            raise fail("stack_experts_", "model", "a model whose lists of experts can be stacked", problem)
    for found in lists:
        stack_list(found)
    return model


def watch(holder: nn.Module) -> None:
    """Have a list that holds stacks, and the modules of its experts, tell when something is set on them. A module with
    experts beside others is left as it is.
    """
    for module in holder.modules() if isinstance(holder, LISTS) else ():
        if not is_watched(module):
            with suppress(Exception):  # of whatever runs when somebody derives from a class
                module.__class__ = sliced(type(module), ())


def unstack(model: nn.Module) -> nn.Module:
    """Undo `stack_experts_`: every expert has its own parameters again, with the present values and gradients."""
    lists = [module for module in model.modules() if STACKS in vars(module)]
    stacked = {id(module._parameters[name]) for module in lists for name in vars(module)[STACKS]}
    held = holders(model) if stacked else ()
    names = {
        type(holder).__name__ for holder, ids in held if isinstance(holder, torch.optim.Optimizer) and stacked & ids
    }
    for module in list(model.modules()):
        for name in [name for name in METHODS if isinstance(vars(module).get(name), Method)]:
            del vars(module)[name]
        if SLICE in vars(module):
            make_single(module)
        elif is_watched(module):
            module.__class__ = original(type(module))
    for module in lists:
        _drop(module)
    for name in sorted(names):
        message = (
            f"moe_ops.restore: a {name} optimizer holds stacked experts that the model no longer has: make it anew."
        )
        warnings.warn(message, stacklevel=3)
    return model


def stack_list(found: ExpertList) -> None:
    """Replace the parameters of a list's experts by slices of stacked ones."""
    module, owners = found.module, found.owners()
    layers = list({id(owner): owner for pairs in owners.values() for owner, _ in pairs}.values())
    stacks: dict[str, str] = {}
    try:
        for name in owners:
            stacked = _free_name(found, name)
            module.register_parameter(stacked, _stacked([owner.get_parameter(own) for owner, own in owners[name]]))
            stacks[stacked] = name
            for number, (owner, own) in enumerate(owners[name]):
                del owner._parameters[own]
                vars(owner).setdefault(SLICE, (module, {}))[1][own] = stacked, number
    except BaseException:  # for want of memory
        for layer in layers:
            if SLICE in vars(layer):
                make_single(layer)
        for stacked in stacks:
            del module._parameters[stacked]
        raise
    for layer in layers:
        layer.__class__ = sliced(original(type(layer)), tuple(sorted(vars(layer)[SLICE][1])))
    vars(module)[STACKS] = stacks
    watch(module)
    for inner in [inner for expert in found.experts for inner in expert.modules()]:
        vars(inner).update({name: Method(inner, name) for name in METHODS})
    if not found.called and all(isinstance(layer, nn.Linear) for layer in layers):
        vars(module)[_TRANSPOSED] = False  # [E, N, K], which the shapes alone need not say
    module.register_state_dict_post_hook(drop_stacks)
    module.register_load_state_dict_pre_hook(load_stacks)
    log.info("stacked the experts of %s: %s", found.name, ", ".join(stacks.values()))


def _stacked(weights: list[nn.Parameter]) -> nn.Parameter:
    """One parameter of all, whose slices have the strides that the single ones have, and the attributes of theirs."""
    first = weights[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    back = sorted(range(first.dim()), key=order.__getitem__)
    with torch.no_grad():
        data = torch.stack([weight.permute(order) for weight in weights])
    made = nn.Parameter(data.permute(0, *(1 + dim for dim in back)), first.requires_grad)
    vars(made).update(vars(first))
    return made


def _free_name(found: ExpertList, name: str) -> str:
    """A name for a stack that nothing of the list has, and of a module with experts beside others no code asks for."""
    start = f"{found.called.rstrip('_')}_" if found.called else ""
    free = start + name.replace(".", "_")
    while hasattr(found.module, free) or (found.called and free in words((type(found.module),))):
        free += "_"
    return free


def _drop(module: nn.Module) -> None:
    for name in vars(module).pop(STACKS):
        del module._parameters[name]
    if isinstance(module, LISTS):
        vars(module).pop(_TRANSPOSED, None)
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (drop_stacks, load_stacks)]:
            del hooks[key]
