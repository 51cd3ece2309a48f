"""State dicts of modules with quantised weights hold plain tensors: ``name`` the bytes, ``name_scale`` and so on.

So safetensors, `torch.load(weights_only=True)` and whoever reads files see nothing new. The scheme, the nominal dtype
and the orientation are in the state dict's metadata, which `torch.save` keeps and safetensors has no place for: a file
is loaded into a model that :func:`moe_ops.quantize_` has prepared with the same scheme, and the metadata is checked
where there is some.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meta.checks import fail
from moe_ops.quantized import QuantizedWeight

#: The key in a module's part of the metadata.
METADATA = "moe_ops"


def quantized_parameters(module: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """The quantised parameters that are the module's own, under each of their names."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if isinstance(parameter, QuantizedWeight):
            yield name, parameter


def put(module: nn.Module, name: str, weight: Tensor) -> None:
    """The :class:`QuantizedWeight` as the frozen parameter ``name`` of ``module``, whose state dict, and what is loaded
    from one, holds plain tensors from then on. One that is a parameter is put there itself: it may have other names.
    """
    parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    module.register_parameter(name, parameter)
    if write not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(write)
        module.register_load_state_dict_pre_hook(read)


def keys_of(weight: QuantizedWeight, name: str) -> list[str]:
    """Every key that the state dict of a module may have of ``weight``, its parameter ``name``."""
    return [_key(name, part) for part in ("stored", *(spec.name for spec in weight.row.scales))]


def write(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """The hook of ``state_dict``: plain tensors in the place of the module's weights, which are left if they are."""
    said = {}
    for name, weight in quantized_parameters(module):
        entry = state.get(prefix + name)
        if not isinstance(entry, QuantizedWeight):
            continue
        del state[prefix + name]
        for part, tensor in entry.parts().items():
            state[_key(prefix + name, part)] = tensor
        said[name] = {"scheme": weight.scheme, "dtype": str(weight.dtype), "transposed": weight.transposed}
    if said:
        metadata[METADATA] = said


def read(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any
) -> None:  # fmt: skip
    """The hook of ``load_state_dict``: weights in the place of plain tensors, which are left if they are."""
    said = metadata.get(METADATA, {})
    for name, weight in quantized_parameters(module):
        key = prefix + name
        stored = state.get(key)
        if stored is None or isinstance(stored, QuantizedWeight):
            continue
        scheme = said.get(name, {}).get("scheme", weight.scheme)
        if scheme != weight.scheme:
            cure = "Quantise the model with the scheme that its checkpoint was written with."
            raise fail("load_state_dict", key, f"stored in scheme {weight.scheme!r}", f"scheme {scheme!r}", cure)
        made = _rebuilt(weight, state, key)
        if _dtypes(made) != _dtypes(weight):  # it has an optional scale that the one at hand has not, or a wider one
            weight.data = torch.empty_like(made, device=weight.device)
        state[key] = made


def _dtypes(weight: QuantizedWeight) -> dict[str, torch.dtype]:
    return {name: part.dtype for name, part in weight.parts().items()}


def _rebuilt(weight: QuantizedWeight, state: dict[str, Any], key: str) -> QuantizedWeight:
    """The weight that the entries of ``key`` in a state dict are; its scales are taken out."""
    scales: list[Tensor] = []
    for spec in weight.row.scales:
        scale = state.pop(_key(key, spec.name), None)
        if scale is not None:
            scales.append(scale)
        elif getattr(weight, spec.name) is not None:
            cure = "Load float weights first and call moe_ops.quantize_ then, or pass the whole state dict."
            raise fail("load_state_dict", _key(key, spec.name), f"given for scheme {weight.scheme!r}", "nothing", cure)
    form: dict[str, Any] = {"scheme": weight.scheme, "dtype": weight.dtype, "transposed": weight.transposed}
    return QuantizedWeight(state[key], scales, **form)


def _key(name: str, part: str) -> str:
    return name if part == "stored" else f"{name}_{part}"
