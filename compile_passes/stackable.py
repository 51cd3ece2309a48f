"""Which lists of experts can be given stacks: what has to hold of their parameters, of the code that reads these, and
of whoever else holds them.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_passes import compat
from compile_passes.asked import asked_around, asked_of_experts, words
from compile_passes.effects import is_proxy, parts
from compile_passes.loops import LISTS, PARAMETERS, number_of_experts, numbered_experts
from compile_passes.reached import OF_TORCH, functions_of, of_torch, package_of
from compile_passes.stack_slices import PLAIN, STACKS, sliced
from meta.checks import fail

# How a module's own tensors come into a state dict, and out of one: a stack is there in their place.
_STATE = ("_save_to_state_dict", "_load_from_state_dict", "state_dict", "load_state_dict")
_COPIES = ("__deepcopy__", "__reduce__", "__reduce_ex__")
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
                "_load_state_dict_post_hooks")  # fmt: skip


@dataclass(frozen=True)
class ExpertList:
    """A list of experts in a model: ``path`` as in ``named_modules()``, and the module that has the list.

    Attributes:
        module: the list; a module that has experts beside other modules; a list of parameters.
        keys: of the experts among its children; none of a list of parameters.
        called: what the keys of experts beside other modules have in common.
    """

    path: str
    module: nn.Module
    owner: nn.Module | None
    keys: tuple[str, ...]
    called: str = ""

    @property
    def name(self) -> str:
        return self.path or type(self.module).__name__

    @property
    def experts(self) -> list[nn.Module]:
        return [self.module.get_submodule(key) for key in self.keys]

    def owners(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """For each stack the modules of the experts that its slices belong to, and their names there."""
        if not self.keys:
            return {"stacked": [(self.module, own) for own in self.module._parameters]}
        found = {}
        for name, _ in self.experts[0].named_parameters(remove_duplicate=False):
            path, _, own = name.rpartition(".")
            found[name] = [(expert.get_submodule(path), own) for expert in self.experts]
        return found


def expert_lists(model: nn.Module, names: tuple[str, ...] = ()) -> list[ExpertList]:
    """The lists of experts of ``model`` that are not stacked yet: those of the ``names``, or all that are called so,
    without lists around them or around stacked ones: these are left as they are.
    """
    found = []
    modules = dict(model.named_modules())
    for name in names:
        if not isinstance(modules.get(name), LISTS) and not numbered_experts(modules.get(name))[1]:
            raise fail("stack_experts_", "names", "paths of nn.ModuleList or nn.ModuleDict in the model", repr(name))
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        around = modules.get(parent)
        if STACKS in vars(module) or (names and path not in names):
            continue
        prefix, keys = numbered_experts(module)
        if keys and any(True for _ in module.get_submodule(keys[0]).parameters()):
            found.append(ExpertList(path, module, module, keys, prefix))
        elif isinstance(module, LISTS) and (names or (around is not None and number_of_experts(around, name, module))):
            # A dropout for all experts beside them has no weights.
            keys = tuple(key for key, child in module.named_children() if any(True for _ in child.parameters()))
            if len(keys) > 1 or (isinstance(module, PARAMETERS) and len(module._parameters) > 1):
                found.append(ExpertList(path, module, around, keys))
    inner = {one.module for one in found} | {module for module in modules.values() if STACKS in vars(module)}
    return [one for one in found if len(inner.intersection(one.module.modules())) == 1]


def why_not(found: ExpertList, taken: Mapping[int, str]) -> str | None:
    """Why a list cannot be stacked, in words; None when it can.

    Args:
        taken: what `taken_elsewhere` says of the model's parameters.
    """
    experts = dict(zip(found.keys, found.experts, strict=True)) or {"": found.module}
    start, first = next(iter(experts.items()))
    kinds = tuple(dict.fromkeys(type(module) for expert in experts.values() for module in expert.modules()))
    asked = asked_of_experts(kinds, () if found.owner is None else (type(found.owner),))
    if asked is not None:
        return f"{found.name}, as {asked}"
    problem = _unfit_module(found.module) if found.called else None  # that of a list is torch's, as a rule
    if problem is not None:
        return f"{found.name}, which {problem}"
    shape = {name: _facts(weight) for name, weight in first.named_parameters(remove_duplicate=False)}
    for key, expert in experts.items():
        where = f"{found.path}.{key}".strip(".")
        own = dict(expert.named_parameters(remove_duplicate=False))
        if [type(module) for module in expert.modules()] != [type(module) for module in first.modules()]:
            return f"{where} is made of other modules than {found.path}.{start}"
        if list(own) != list(shape):
            return f"{where} has other parameters than {found.path}.{start}"
        for path, module in expert.named_modules():
            problem = _unfit_module(module)
            if problem is not None:
                return f"{where}{'.' * bool(path)}{path}, which {problem}"
        for name, weight in own.items():
            like = name if found.keys else next(iter(own))  # in a list of parameters, all are alike
            problem = _unfit(weight, shape[like]) or _unfit_attributes(weight, first.get_parameter(like), kinds)
            problem = problem or taken.get(id(weight))
            if problem is not None:
                return f"{where}.{name}, which {problem}"
    if isinstance(found.module, PARAMETERS):
        held = [name for name, _ in found.module.named_parameters()]
        keys = found.module.keys() if isinstance(found.module, nn.ParameterDict) else range(len(found.module))
        if held != [str(key) for key in keys]:
            return f"{found.name}, which has others than the parameters of its list"
    return _underivable(found)


# ---- parameters


def _facts(weight: torch.Tensor) -> tuple[Any, ...]:
    return tuple(weight.shape), weight.dtype, weight.device, weight.requires_grad


def _unfit(weight: torch.Tensor, like: tuple[Any, ...]) -> str | None:
    if type(weight) is not nn.Parameter:
        return f"is a {type(weight).__name__}"
    if type(weight.data) is not torch.Tensor:
        return f"holds a {type(weight.data).__name__}"
    if _facts(weight)[:-1] == like[:-1] and weight.requires_grad != like[-1]:
        said = "trains" if weight.requires_grad else "is frozen"
        return f"{said}, unlike that of expert 0: a stack trains as a whole, and weight decay reaches all of it"
    if _facts(weight) != like:
        return f"is {weight.dtype} {list(weight.shape)} on {weight.device}, unlike that of expert 0"
    if weight.grad is not None:
        return "has a gradient: stack the experts before training starts, or after zero_grad()"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "has a hook"
    return None


def _unfit_attributes(weight: torch.Tensor, first: torch.Tensor, kinds: tuple[type[nn.Module], ...]) -> str | None:
    """What is set on a parameter goes to the stack: it has to be the same for all, and nothing that a forward reads."""
    mine, like = vars(weight), vars(first)
    for name in sorted(mine.keys() | like.keys()):
        if (name in mine) != (name in like) or not _is_equal(mine[name], like[name]):
            return f"has an attribute {name} that expert 0's has not, or that is no plain value"
        if name in words(kinds):
            return f"has an attribute {name}, which a slice of a stack has not"
    return None


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other)
    except Exception:  # of tensors in a list
        return False


def taken_elsewhere(model: nn.Module, lists: list[ExpertList]) -> dict[int, str]:
    """Parameters that somebody holds besides their expert, by id, and who: the model once more, attributes of modules
    that are no parameters of theirs, code around the experts of ``lists``, an optimizer, or what brings gradients
    together.
    """
    experts = {inner for found in lists for expert in found.experts for inner in expert.modules()}
    outside = list(holders(model))  # first: a name of one here would be a holder
    users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    taken = {weight: "the model uses in more than one place" for weight, count in users.items() if count > 1}
    memory: dict[int, list[int]] = {}
    for weight in model.parameters():
        memory.setdefault(_memory_of(weight), []).append(id(weight))
    for path, module in model.named_modules():
        asked = None if module in experts else asked_around((type(module),), functions_of(module))
        if asked is not None:
            taken |= {id(weight): f"{asked}, to find one stack for all experts" for weight in module.parameters()}
        for said, held in _beside(module):
            found = [id(held)] if isinstance(held, nn.Parameter) else memory.get(_memory_of(held), [])
            taken |= dict.fromkeys(found, f"{path or type(model).__name__} also holds as {said}")
    for holder, ids in outside:
        why = f"a {type(holder).__name__} outside of the model has, too"
        if isinstance(holder, torch.optim.Optimizer):
            why = f"a {type(holder).__name__} optimizer holds already: make it after stacking the experts"
        elif isinstance(holder, _parallel()):
            cure = "make it around the model after moe_ops.stack_experts_(model)"
            why = f"a {type(holder).__name__} holds already: {cure}"
        taken.update(dict.fromkeys(ids, why))
    return taken


def _beside(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are no parameters of a module's own, and that it holds: in a list, in an object, as buffers."""
    waiting: list[tuple[str, Any]] = [*module.named_buffers(recurse=False)]
    waiting += [(name, value) for name, value in vars(module).items() if name not in OF_TORCH]
    seen: set[int] = set()
    while waiting:
        said, value = waiting.pop()
        if is_proxy(value) or id(value) in seen or len(seen) > 10_000:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield said, value
        else:
            waiting += [(said + name, part) for name, part in parts(value)]


def _memory_of(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; an own number for what has none."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return (tensor.untyped_storage().data_ptr() if plain else 0) or -id(tensor)


def holders(model: nn.Module) -> Iterator[tuple[Any, set[int]]]:
    """All optimizers, what brings gradients together, and modules that are not in ``model``, with the ids of the
    parameters that each one holds itself; nothing where no parameter has another holder than its module.
    """
    if not _may_be_held(model):
        return
    inside, parallel = set(map(id, model.modules())), _parallel()
    for thing in _instances(torch.optim.Optimizer, nn.Module):
        if isinstance(thing, torch.optim.Optimizer):
            yield thing, {id(weight) for group in thing.param_groups for weight in group["params"]}
        elif isinstance(thing, parallel):
            yield thing, set(map(id, thing.parameters()))
        elif id(thing) not in inside:
            yield thing, set(map(id, vars(thing).get("_parameters", {}).values()))


def _may_be_held(model: nn.Module) -> bool:
    """Whether somebody else refers to a parameter, or may do so out of Python's sight. Only then all that is alive is
    looked through: a tenth of a second and more.
    """
    if not compat.references_are_counted() or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    alone = _references({"": nn.Parameter(torch.empty(0))})
    return any(_references(module._parameters) > alone for module in model.modules())


def _references(parameters: Mapping[str, torch.Tensor | None]) -> int:
    """The most that there are to one of these."""
    return max((sys.getrefcount(weight) for weight in parameters.values() if weight is not None), default=0)


def _parallel() -> tuple[type[nn.Module], ...]:
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
    if any(package_of(base.__module__) == "peft" for base in type(module).__mro__):
        return "has an adapter of PEFT, which is not fused there: merge it (model.merge_and_unload()) before"
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, whose parameters cannot be replaced: make the model of the modules before torch.jit"
    for name in (*_STATE, *_COPIES):
        owner = next((base for base in type(module).__mro__ if name in vars(base)), object)
        if owner is not object and not of_torch(owner.__module__):
            return f"has a {name} of its own, which a stack would pass by"
    if any(getattr(module, name, None) for name in _STATE_HOOKS):
        return "has a hook on its state dict, which a stack would pass by"
    return None


def _underivable(found: ExpertList) -> str | None:
    """Why a layer of an expert cannot be one that reads slices."""
    own: dict[nn.Module, list[str]] = {}
    for owner, name in [pairs[0] for pairs in found.owners().values()]:
        own.setdefault(owner, []).append(name)
    for owner, names in own.items():
        kind = type(owner)
        try:
            sliced(kind, tuple(sorted(names)))
        except Exception as error:  # of whatever runs when somebody derives from a class
            return f"{found.name}, as no class can be derived from {kind.__name__}: {type(error).__name__}: {error}"
    return None
