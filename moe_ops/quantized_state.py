"""State dicts of modules with quantised weights hold plain tensors: ``name`` the bytes, ``name_scale`` and so on.

So safetensors, `torch.load(weights_only=True)` and whoever reads files see nothing new. The scheme, the nominal dtype
and the orientation are in the state dict's metadata, which `torch.save` keeps and safetensors has no place for: a file
is loaded into a model that :func:`moe_ops.quantize_` has prepared with the same scheme, and the metadata is checked
where there is some.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from meta.checks import accepts, check_type, fail
from meta.schemes import QuantScheme
from moe_ops.quantized import QuantizedWeight, assemble, checked_parts, form_of

#: The key in a module's part of the metadata.
METADATA = "moe_ops"
_OP = "load_state_dict"


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


def check_keys(op: str, module: nn.Module, name: str, row: QuantScheme) -> None:
    """Raise where what the state dict would have of a weight in the scheme, the parameter ``name`` of ``module``, is
    there already under one of its keys.
    """
    for spec in row.scales:
        key = _key(name, spec.name)
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers), ("module", module._modules)):
            if key in held:
                rule = f"without a {kind} {key!r}, under which the state dict keeps scales of {name!r}"
                raise fail(op, type(module).__name__, rule, "one", "Rename it, or leave the module out by the filter.")


def entries(weight: QuantizedWeight, name: str) -> dict[str, Tensor]:
    """The plain tensors of ``weight`` under the keys that the state dict of a module has of its parameter ``name``."""
    return {_key(name, part): tensor for part, tensor in weight.parts().items()}


def write(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """The hook of ``state_dict``: plain tensors in the place of the module's weights, which are left if they are."""
    said = {}
    for name, weight in quantized_parameters(module):
        entry = state.get(prefix + name)
        if not isinstance(entry, QuantizedWeight):
            continue
        del state[prefix + name]
        state.update(entries(entry, prefix + name))
        said[name] = {"scheme": weight.scheme, "dtype": str(weight.dtype), "transposed": weight.transposed}
    if said:
        metadata[METADATA] = said


def read(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, missing: list[str],
    *others: Any,
) -> None:  # fmt: skip
    """The hook of ``load_state_dict``: weights in the place of plain tensors, which are left if they are.

    A parameter of the same shape takes the form of what is loaded: other groups, halves, dtypes and optional scales. Of
    one that is ``missing``, which torch says of the bytes, the scales are, too.

    Raises:
        ValueError: another scheme, a scale that is missing, or tensors that the scheme does not have, by their keys.
            Nothing of the module has changed then.
    """
    said = metadata.get(METADATA, {})
    loaded: list[tuple[QuantizedWeight, str, QuantizedWeight]] = []
    for name, weight in quantized_parameters(module):
        key = prefix + name
        stored = state.get(key)
        if stored is None:
            known = {key, *state, *missing}  # lists that were stacked ask twice
            missing += [part for part in entries(weight, key) if part not in known]
            continue
        if isinstance(stored, QuantizedWeight):
            loaded.append((weight, key, stored))
            continue
        scheme = said.get(name, {}).get("scheme", weight.scheme)
        if scheme != weight.scheme:
            cure = "Quantise the model with the scheme that its checkpoint was written with."
            raise fail(_OP, key, f"stored in scheme {weight.scheme!r}", f"scheme {scheme!r}", cure)
        loaded.append((weight, key, _rebuilt(weight, state, key)))
    assigned = metadata.get("assign_to_params_buffers", False)
    for weight, key, made in loaded:
        state[key] = made
        if not assigned and _differs_in_form_alone(weight, made):
            # With the numbers, though torch copies them again: whatever stops it, none are left that nobody wrote.
            weight.data = made.to(weight.device, weight.dtype, copy=True)


def _differs_in_form_alone(weight: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether the parts of ``other``, which has the same shape, scheme and orientation, have other forms."""
    alike = weight.shape == other.shape and weight.scheme == other.scheme and weight.transposed == other.transposed
    return alike and form_of(weight) != form_of(other)


def _rebuilt(weight: QuantizedWeight, state: dict[str, Any], key: str) -> QuantizedWeight:
    """The weight that the entries of ``key`` in a state dict are; its scales are taken out."""
    given: dict[str, Any] = {key: state[key]}
    for spec in weight.row.scales:
        scale = state.pop(_key(key, spec.name), None)
        if scale is not None:
            given[_key(key, spec.name)] = scale
        elif getattr(weight, spec.name) is not None:
            cure = "Load float weights first and call moe_ops.quantize_ then, or pass the whole state dict."
            if spec.optional:
                cure += " The model's own has it; one that was quantised without `inputs=`, or zero points, has not."
            raise fail(_OP, _key(key, spec.name), f"given for scheme {weight.scheme!r}", "nothing", cure)
    for name, part in given.items():
        check_type(_OP, name, part, accepts("Tensor"))
    return assemble(checked_parts(_OP, weight.row, given), weight.scheme, weight.dtype, weight.transposed)


def _key(name: str, part: str) -> str:
    return name if part == "stored" else f"{name}_{part}"
