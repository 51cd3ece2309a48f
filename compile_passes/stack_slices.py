"""Layers of experts that read slices of stacked parameters, and state dicts with the keys of single experts.

A layer's class gets a property in the place of each of its parameters; what is saved of it, and loaded into it alone,
are the slices. Of a whole list the stacks are loaded, as only these can be assigned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from compile_passes.loops import ALIKE
from meta.checks import fail
from moe_ops import quantized_state
from moe_ops.quantized import QuantizedWeight

# On a list: stacked parameter -> the parameter of an expert that it holds. On a layer of an expert, and on a list of
# parameters: the list, and its own parameter -> (stacked parameter, the expert's number).
STACKS, SLICE = "_moe_ops_stacks", "_moe_ops_slice"
# What may be set on a parameter, and goes to its stack.
PLAIN = (bool, int, float, str, type(None), tuple, list, dict, set, frozenset, torch.dtype)

#: Of modules of experts: those whose captured code goes by what it found in another expert, and whether their mode was
#: the same; see `alike`.
RELY: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, bool]] = WeakKeyDictionary()
# Methods by which attributes of a module become others, and what is in a list.
_OF_NAMES = ("__setattr__", "__delattr__", "register_parameter", "register_buffer")
_CHANGES = (*_OF_NAMES, "__delitem__", "add_module", "insert", "clear")
_SLICED: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
# Lists whose stacks were loaded, and in which call: the list of missing keys, of which every call has its own.
_LOADED: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def slices_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module, dict[str, tuple[str, int]]]]:
    """(path, module, list, own parameter -> (stacked one, number of the expert)) of what reads slices in a module."""
    for path, inner in module.named_modules(remove_duplicate=False):
        if SLICE in vars(inner):
            yield path, inner, *vars(inner)[SLICE]


def original(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that one of `sliced` was derived from."""
    found: type[nn.Module] = vars(kind).get("_moe_ops_original", kind)
    return found


def is_watched(module: nn.Module) -> bool:
    """Whether it is told when an attribute of the module is set."""
    return "_moe_ops_original" in vars(type(module))


def sliced(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class ``kind`` whose parameters ``names`` are slices of stacked ones, the same for all experts."""
    if (kind, names) in _SLICED:
        return _SLICED[kind, names]
    members = {name: property(_reader(name), _writer(name)) for name in names} | _methods(kind, names)
    made = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "_moe_ops_original": kind})
    return _SLICED.setdefault((kind, names), made)


def make_single(module: nn.Module, *, gradients: bool = True) -> None:
    """Give a layer that reads slices parameters of its own, with the values, and gradients, that it has now."""
    holder, slices = vars(module).pop(SLICE)
    module.__class__ = original(type(module))
    for own, (name, number) in slices.items():
        held = holder._parameters[name]
        if held is not None:
            weight = nn.Parameter(held.detach()[number].clone(), held.requires_grad)
            vars(weight).update({key: value for key, value in vars(held).items() if isinstance(value, PLAIN)})
            weight.grad = None if held.grad is None or not gradients else held.grad[number].clone()
            module.register_parameter(own, weight)


def _reader(name: str) -> Any:
    def read(self: nn.Module) -> Tensor:
        module, slices = self.__dict__[SLICE]
        stacked, number = slices[name]
        return _slice(module._parameters[stacked], number)

    return read


def _slice(weight: Tensor, number: int) -> Tensor:
    """One expert's part of a stack, and of its gradient: torch gives what is no leaf none, and who clips or logs the
    gradients of an expert would find nothing.
    """
    found = weight[number]
    if not torch.compiler.is_compiling() and weight.is_leaf and weight.grad is not None:
        found.grad = weight.grad[number]
    return found


def _writer(name: str) -> Any:
    def write(self: nn.Module, value: Any) -> None:
        held = getattr(self, name)
        if not isinstance(value, Tensor) or not _is_same_memory(value, held):
            raise _left_in_place("assignment", name, value)

    return write


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor is a slice that was read and written in place, as by ``weight += delta``."""
    here = one.data_ptr() == other.data_ptr() and one.device == other.device and one.dtype == other.dtype
    return here and one.shape == other.shape and one.stride() == other.stride()


def _left_in_place(op: str, name: str, value: Any) -> ValueError:
    rule = "left in its place, as it is a slice of the parameter of all experts"
    cure = "Write into it by copy_ under torch.no_grad(), or call moe_ops.restore(model) first."
    return fail(op, name, rule, f"a new {type(value).__name__}", cure)


def _methods(kind: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        reduced: Any = kind.__reduce_ex__(self, max(2, protocol))
        _, (_, *given), *state = reduced
        return _renewed, (kind, names, *given), *state  # pickle finds no class that is made here by its name

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        """With its list, a slice of the copied stack; without, a layer with parameters of its own."""
        function, given, state, *_ = self.__reduce_ex__(4)
        made = memo[id(self)] = function(*copy.deepcopy(given, memo))
        alone = id(state[SLICE][0]) not in memo
        made.__setstate__(copy.deepcopy({**state, SLICE: None} if alone else state, memo))
        if alone:
            vars(made)[SLICE] = state[SLICE]
            make_single(made, gradients=False)
        return made

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if name not in names:
            kind.register_parameter(self, name, param)
        elif param is None or not _is_same_memory(param, getattr(self, name)):  # of what a list sets it makes one
            raise _left_in_place("register_parameter", name, param)

    def save(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for key, part in _entries(self, prefix):
            destination[key] = part if keep_vars else part.detach()
        kind._save_to_state_dict(self, destination, prefix, keep_vars)

    def load(
        self: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *others: Any
    ) -> None:
        holder = vars(self)[SLICE][0]
        for key, part in _entries(self, prefix) if holder is not self else ():  # its hook loads all of a list
            if key in state:
                _load(part, key, state.pop(key), others[-1])
            elif strict and _LOADED.get(holder) is not missing:
                missing.append(key)
        kind._load_from_state_dict(self, state, prefix, metadata, strict, missing, *others)

    def item(self: Any, index: Any) -> Any:
        """As a list of parameters has it; a part of one holds slices, which `append` would make parameters of."""
        if not isinstance(index, slice):
            return nn.ParameterList.__getitem__(self, index)
        part = nn.ParameterList()
        for place in list(range(len(self)))[index]:  # not index.indices, which not every Dynamo captures
            setattr(part, str(len(part)), self[place])
            part._size += 1
        return part

    def joined(*pairs: Any) -> nn.ParameterDict:
        """A dict that holds slices, of which one that is made in the usual way would make parameters."""
        made = nn.ParameterDict()
        for key, value in (pair for items in pairs for pair in items):
            made._keys[key] = None
            setattr(made, key, value)
        return made

    own = {"__reduce_ex__": reduce} | _watched(kind, names, {"register_parameter": register} if names else {})
    if not names:
        return own
    own |= {"__getitem__": item} if issubclass(kind, nn.ParameterList) else {}
    if issubclass(kind, nn.ParameterDict):
        own["copy"] = lambda self: joined(self.items())
        own["__or__"] = lambda self, other: joined(self.items(), other.items())
        own["__ror__"] = lambda self, other: joined(other.items(), self.items())
    return own | {"_save_to_state_dict": save, "_load_from_state_dict": load, "__deepcopy__": deepcopy}


def _watched(kind: type[nn.Module], names: tuple[str, ...], own: dict[str, Any]) -> dict[str, Any]:
    """Methods of a module of an expert, or of a list of experts, that tell when something is set or put there: those
    that it has of its own, or those of its class. A mode is told of where it is not that of the loop, which
    ``model.train()`` reaches before the experts, or was not.
    """

    def telling(change: str, method: Any) -> Any:
        def tell(self: nn.Module, *given: Any, **named: Any) -> Any:
            result = method(self, *given, **named)
            name = given[0] if given else named.get("name")
            if change not in _OF_NAMES or name not in names:
                for loop, same in RELY.get(self, {}).items():
                    if ALIKE in vars(loop) and (name != "training" or not same or self.training != loop.training):
                        vars(loop)[ALIKE] = 0
            return result

        return tell

    methods = {change: getattr(kind, change) for change in _CHANGES if hasattr(kind, change)} | own
    return {change: telling(change, method) for change, method in methods.items()}


def _renewed(kind: type[nn.Module], names: tuple[str, ...], *given: Any) -> nn.Module:
    made = sliced(kind, names)
    return made.__new__(made, *given)


def freeze(module: nn.Module, requires_grad: bool = True) -> nn.Module:
    """`requires_grad_` of a module of an expert, which has no parameters of its own to freeze."""
    for _, _, holder, slices in slices_in(module):
        if any(holder.get_parameter(name).requires_grad != requires_grad for name, _ in slices.values()):
            rule = f"{not requires_grad}, as of all experts of the list, whose weights are one parameter"
            cure = "Call it on the list, or on this expert before moe_ops.compile or after moe_ops.restore(model)."
            raise fail("requires_grad_", "requires_grad", rule, requires_grad, cure)
    return type(module).requires_grad_(module, requires_grad)


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """`named_parameters` of a module of an expert: its slices, which a penalty or a count of its weights is of.

    Of the module alone there are none: who asks so (DDP, FSDP) goes through all modules for what there is to train.
    """
    yield from type(module).named_parameters(module, prefix, recurse, remove_duplicate)
    for path, inner, holder, slices in slices_in(module) if recurse else ():
        for own, (stacked, _) in slices.items():
            if holder._parameters[stacked] is not None:
                yield ".".join(filter(None, (prefix, path, own))), getattr(inner, own)


def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """`zero_grad` of a module of an expert: zeros, as a stack's gradient is there for all experts, or for none."""
    type(module).zero_grad(module, set_to_none)
    for _, _, holder, slices in slices_in(module):
        for stacked, number in slices.values():
            weight = holder._parameters[stacked]
            if weight is not None and weight.grad is not None:
                weight.grad.data[number].zero_()


#: Methods of nn.Module that each module of an expert has its own of, as torch's would find no parameters to change.
METHODS: dict[str, Any] = {"requires_grad_": freeze, "named_parameters": named_parameters, "zero_grad": zero_grad}


class Method:
    """One of `METHODS` of a module: as a bound method has them its ``__func__``, which Dynamo reads, but pickled by its
    name, where a bound method is read of a module that has no attributes yet.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.__func__(self.module, *given, **named)

    @property
    def __func__(self) -> Any:
        return METHODS[self.name]


# ---- state dicts


def _entries(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The keys and the memory of a layer's slices; of quantised stacks their bytes and scales."""
    holder, slices = vars(module)[SLICE]
    for own, (name, number) in slices.items():
        weight = holder._parameters[name]
        if isinstance(weight, QuantizedWeight):
            entries = quantized_state.entries(weight, prefix + own).items()
            yield from ((key, part[number]) for key, part in entries)
        elif weight is not None:
            yield prefix + own, _slice(weight, number)


def _load(part: Tensor, key: str, value: Any, errors: list[str]) -> None:
    if not isinstance(value, Tensor) or value.shape != part.shape:
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        errors.append(f"size mismatch for {key}: {given} in the checkpoint, {list(part.shape)} in the model.")
    elif part.is_meta:
        errors.append(f"{key}: a slice of a stack on the meta device is loaded with the whole list alone.")
    else:
        with torch.no_grad():
            part.copy_(value)


def _keys(module: nn.Module) -> Iterator[list[tuple[str, dict[str, int]]]]:
    """Of each stacked parameter its keys in a state dict, one for every tensor that a quantised one is made of, each
    with the keys of this tensor's slices and their numbers. They are looked for, as experts may have been put into the
    list, moved and taken out since.
    """
    found: dict[str, dict[str, int]] = {stacked: {} for stacked in vars(module)[STACKS]}
    for path, _, holder, slices in slices_in(module):
        if holder is module:
            for own, (stacked, number) in slices.items():
                found[stacked][f"{path}.{own}".lstrip(".")] = number
    for stacked, numbers in found.items():
        weight = module._parameters[stacked]
        if isinstance(weight, QuantizedWeight):
            parts = zip(*(quantized_state.keys_of(weight, name) for name in (stacked, *numbers)), strict=True)
            yield [(part, dict(zip(names, numbers.values(), strict=True))) for part, *names in parts]
        else:
            yield [(stacked, numbers)]


def drop_stacks(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave stacked parameters out of a state dict that has the slices of them."""
    quantized_state.write(module, state, prefix, metadata)  # its own hook may come later
    for part, _ in [pair for of_one in _keys(module) for pair in of_one]:
        state.pop(prefix + part, None)


def load_stacks(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """The old keys of a state dict, each slice's own, as the stacked ones."""
    _LOADED[module] = missing
    for pairs in _keys(module):
        weight = module.get_parameter(pairs[0][0])
        whole = isinstance(weight, QuantizedWeight) or weight.is_meta  # it cannot be loaded for some of its experts
        made, wrong = {}, []
        for part, numbers in pairs:
            given = {number: state.pop(prefix + key) for key, number in numbers.items() if prefix + key in state}
            name = f"{prefix}*.{next(iter(numbers), part).partition('.')[2]}".rstrip(".")
            some = bool(given)
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
    quantized_state.read(module, state, prefix, metadata, strict, missing)  # its own hook may have come before
