"""LoRA on stacked expert weights, as PEFT's ``LoraConfig(target_parameters=[...])`` writes it, in a form to capture.

PEFT's `ParamWrapper` runs the experts while a parametrization of their weight is registered: a change of the module's
class, buffers and parameters at every call, by a context manager, at each of which Dynamo breaks the graph. Here the
wrapper that is next to the experts calls a twin of them while Dynamo captures: an object that shares all their state
and reads ``weight + scale * (B @ A)`` where they read a weight. The passes take that sum apart again
(`patterns.low_rank`). Eager calls, merging, saving, and whatever else PEFT does, see the experts themselves and no
change. Nothing here imports PEFT.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# On a wrapper: the twin that stands for the experts. On the experts: the wrappers around them.
TWIN, _WRAPPERS = "_moe_ops_twin", "_moe_ops_wrappers"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MERGE = "Merge the adapter (model.merge_and_unload()) to compile it for inference; to train it,"


@dataclass(frozen=True)
class Adapted:
    """The wrappers around one module, outermost first, by the path of that one in a model."""

    path: str
    wrappers: tuple[Any, ...]

    @property
    def experts(self) -> nn.Module:
        """The module whose parameters are adapted."""
        inside: nn.Module = self.wrappers[-1].base_layer
        return inside


class Twin:
    """A module that shares all state of ``original`` and reads its adapted parameters with what is added to them.

    A copy of a model makes a twin of the copied experts.
    """

    def __init__(self, original: nn.Module, names: tuple[str, ...]) -> None:
        kind = _adapted_class(type(original), names)
        self.original, self.names = original, names
        self.module: nn.Module = kind.__new__(kind)
        object.__setattr__(self.module, "__dict__", vars(original))

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        return Twin(copy.deepcopy(self.original, memo), self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        return Twin, (self.original, self.names)


def find_adapters(model: nn.Module) -> list[Adapted]:
    """Modules of ``model`` whose parameters PEFT adapts in a way that cannot be captured, as they are now."""
    found, inner = list[Adapted](), set[int]()
    for path, module in model.named_modules():
        if not _is_wrapper(module) or id(module) in inner:
            continue
        wrappers: list[Any] = [module]
        while _is_wrapper(wrappers[-1].base_layer):
            wrappers.append(wrappers[-1].base_layer)
        inner.update(map(id, wrappers))
        if not all(_bound_forward(wrapper) is forward for wrapper in wrappers):
            found.append(Adapted(path, tuple(wrappers)))
    return found


def why_not(adapted: Adapted) -> tuple[str, str] | None:
    """(why the adapters of a module stay as PEFT runs them, what to do about it); None when they need not."""
    experts = adapted.experts
    bound = next((name for name in vars(experts) if callable(inspect.getattr_static(type(experts), name, None))), None)
    if bound is not None:
        return f"the {bound} of the module inside of them is bound to the instance", (
            f"{_MERGE} take off what binds it before moe_ops.compile."
        )
    for wrapper in adapted.wrappers:
        name = str(wrapper.parameter_name)
        weight = experts._parameters.get(name)
        if _bound_forward(wrapper) not in (None, forward):
            return f"the forward of the adapter of {name} is bound to the instance already", (
                "Take off what binds it (hooks of accelerate: remove_hook_from_module) before moe_ops.compile."
            )
        if weight is None or inspect.getattr_static(type(experts), name, None) is not None:
            return f"{name} is no parameter of its module, or is parametrized otherwise", (
                f"{_MERGE} remove the other parametrization of {name}."
            )
        if weight.dtype not in _FLOATS:
            return f"{name} is {weight.dtype}, to which PEFT adds in another dtype than it multiplies in", (
                f"{_MERGE} load the model in bfloat16."
            )
        if weight.dim() not in (2, 3) or (weight.dim() == 3) != (wrapper.num_experts > 1):
            return f"{name} is {list(weight.shape)}, and no [E, N, K] of several experts", (
                f"{_MERGE} adapt the module of {name} itself (target_modules)."
            )
    return None


def adapt(adapted: Adapted) -> None:
    """Let Dynamo capture the adapters of one module as sums."""
    experts = adapted.experts
    names = tuple(dict.fromkeys(str(wrapper.parameter_name) for wrapper in adapted.wrappers))
    vars(experts)[_WRAPPERS] = adapted.wrappers
    twin = Twin(experts, names)
    for wrapper in adapted.wrappers:
        vars(wrapper)[TWIN] = twin if wrapper is adapted.wrappers[-1] else None
        vars(wrapper)["forward"] = MethodType(forward, wrapper)


def restore_adapters(model: nn.Module) -> None:
    """Undo `adapt` for every module of ``model``."""
    for module in list(model.modules()):
        vars(module).pop(_WRAPPERS, None)
        if TWIN in vars(module):
            del vars(module)[TWIN]
            vars(module).pop("forward", None)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is PEFT's wrapper of one parameter of the module inside of it."""
    kinds = type(module).__mro__
    named = any(kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft.") for kind in kinds)
    return named and all(hasattr(module, name) for name in ("base_layer", "parameter_name", "num_experts", "scaling"))


def _bound_forward(wrapper: nn.Module) -> Any:
    """What is bound to the instance in the place of the class's forward; None where nothing else is."""
    bound = vars(wrapper).get("forward")
    function = getattr(bound, "__func__", bound)
    return None if function is type(wrapper).forward else function


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`ParamWrapper.forward`; while Dynamo captures, without its parametrization."""
    twin, unmerges = self.__dict__[TWIN], self.disable_adapters and self.merged
    bound = twin is not None and "forward" in self.base_layer.__dict__  # to the experts, and not to their twin
    if not torch.compiler.is_compiling() or unmerges or bound or kwargs.get("adapter_names") is not None:
        return type(self).forward(self, x, *args, **kwargs)
    kwargs.pop("adapter_names", None)
    return self.base_layer(x, *args, **kwargs) if twin is None else twin.module(x, *args, **kwargs)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _adapted_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class ``kind`` whose parameters ``names`` are read with what adapters add, the same for all its modules."""
    if (kind, names) not in _CLASSES:
        members: dict[str, Any] = {name: property(_reader(name)) for name in names}
        _CLASSES[kind, names] = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
    return _CLASSES[kind, names]


def _reader(name: str) -> Any:
    def read(self: nn.Module) -> Tensor:
        weight: Any = self._parameters[name]
        for wrapper in self.__dict__[_WRAPPERS]:
            if wrapper.parameter_name == name and not wrapper.disable_adapters and not wrapper.merged:
                weight = _added(wrapper, weight)
        added: Tensor = weight
        return added

    return read


def _added(wrapper: Any, weight: Tensor) -> Tensor:
    """``weight`` and what the active adapters of a wrapper add to it, in its dtype."""
    for adapter in wrapper.active_adapters:
        if adapter not in wrapper.lora_A:
            continue
        a, b, scale = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, wrapper.scaling[adapter]
        if wrapper.num_experts == 1:
            half = a.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16)
            delta = (b.float() @ a.float() if half else b @ a) * scale
            weight = weight + delta.to(weight.dtype)
            continue
        a = a.reshape(wrapper.num_experts, -1, a.shape[-1]).to(weight.dtype)  # [E, r, in]
        b = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1).to(weight.dtype)  # [E, out, r]
        stored_out_first = getattr(wrapper, "_did_swap_in_out_features", False)
        left, right = (b, a) if stored_out_first else (a.mT, b.mT)
        with torch.autocast(device_type=weight.device.type, enabled=False):
            weight = torch.baddbmm(weight, left, right, alpha=scale)
    return weight
