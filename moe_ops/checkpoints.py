"""Quantised experts from checkpoints, layer after layer, as their bytes stand there.

:func:`read_experts` brings the tensors of one layer to operands, :func:`load_experts_` puts those of a whole model in
the place of its float parameters. Which keys there are is found by :mod:`moe_ops.checkpoint_files`, what they mean is
said in :mod:`moe_ops.checkpoint_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from meta.checks import fail
from meta.gemm_shapes import weight_operand
from meta.operands import Operand
from meta.schemes import FLOAT_DTYPES, WHOLE, QuantScheme
from moe_ops.checkpoint_files import Checkpoint, Members
from moe_ops.checkpoint_layouts import OP, Signature, Stored, canonical
from moe_ops.progress import progress
from moe_ops.quantized import QuantizedWeight
from moe_ops.quantized_state import put
from moe_ops.stacked import StackedExperts, stacked_experts


def read_experts(
    checkpoint: Checkpoint | str | Path, prefix: str, device: torch.device | str = "cpu"
) -> dict[str, Operand]:
    """The weights of one layer's experts, as they are stored.

    Args:
        checkpoint: a folder or a file of safetensors.
        prefix: what the layer's keys begin with, such as ``"model.layers.3.mlp.experts"``.
        device: where the operands go, one expert after the other.

    Returns:
        ``gate_up_proj`` (``up_proj`` of experts without a gate) and ``down_proj``, each ``[E, N, K / pack]`` with the
        list of scales of its scheme. Gates and up halves that are stored apart are stacked, gate first.

    Raises:
        ValueError: a tensor is missing, or of no known layout; its key is named.
    """
    if not isinstance(checkpoint, Checkpoint):
        with Checkpoint(checkpoint) as opened:
            return read_experts(opened, prefix, device)
    weights = checkpoint.members(prefix)
    operands = {name: _operand(name, prefix, members, torch.device(device)) for name, members in weights.items()}
    first, second = (_row_of(operand).name for operand in operands.values())
    if first != second:
        rule = f"stored in one scheme, {first!r} like {next(iter(operands))}"
        raise fail(OP, f"{prefix}.down_proj", rule, repr(second))
    return operands


def load_experts_(
    model: nn.Module,
    checkpoint: str | Path,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> dict[str, str]:
    """Replace the expert weights of a model by the quantised ones of a checkpoint, in place and layer after layer.

    What each layer's new weights take is all the memory that is needed beyond that of one expert; a model that was made
    on the meta device keeps its experts there until they are replaced. Nothing but the experts (their biases included)
    is loaded, nothing else is changed. Progress goes to stderr.

    Args:
        model: with experts as transformers stores them: 3-D parameters ``gate_up_proj`` (``up_proj`` without a gate)
            and ``down_proj`` of one module, in a float dtype, which stays that of their numbers.
        checkpoint: a file of safetensors, or a folder with some, with or without an index; the layouts are those of
            gpt-oss, compressed-tensors, ModelOpt and DeepSeek.
        filter: ``(name, module) -> bool`` by the experts module's name in ``named_modules()``, as that of
            :func:`moe_ops.quantize_`, to leave out layers that the checkpoint has in a float dtype; None takes all.

    Returns:
        The scheme of every module that was filled, by its name.

    Raises:
        ValueError: a model without such modules, files that cannot be read, or experts that the checkpoint does not
            have in their shape, with their biases and in a layout that is known; the key is named. Layers before that
            one are replaced by then.

    Source: the layouts of :mod:`moe_ops.checkpoint_layouts`; compressed-tensors 0.20 where it writes them.

    Example::

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        schemes = moe_ops.load_experts_(model, "folder/of/the/checkpoint")
    """
    if not isinstance(model, nn.Module):
        raise fail(OP, "model", "a torch.nn.Module", type(model).__name__)
    found = [one for one in stacked_experts(model) if {*one.names} & {"gate_up_proj", "up_proj"}]
    modules = {one.name: one for one in found if "down_proj" in one.names}
    modules = {name: one for name, one in modules.items() if filter is None or filter(name, one.module)}
    if not modules:
        rule = "a model with modules of 3-D parameters gate_up_proj (or up_proj) and down_proj that the filter takes"
        raise fail(OP, "model", rule, type(model).__name__)
    schemes = {}
    with Checkpoint(checkpoint) as source:
        prefixes = {name: source.prefix_of(name) for name in modules}
        if len({*prefixes.values()}) < len(prefixes):
            raise fail(OP, "checkpoint", "with keys of its own for each module of experts", prefixes)
        with progress() as bars:
            advance = bars.bar("experts", len(modules))
            for name, experts in modules.items():
                schemes[name] = _load_layer(experts, source, prefixes[name])
                advance(description=name)
    return schemes


def _load_layer(experts: StackedExperts, source: Checkpoint, prefix: str) -> str:
    """Fill one module once everything that is put there has been read and checked; the scheme's name."""
    name, module, transposed = experts.name, experts.module, bool(experts.transposed)
    weights = source.members(prefix)
    if not getattr(module, "is_concatenated", True) and len(weights.get("gate_up_proj", [[]])[0]) == 2:
        rule = f"one weight of interleaved rows, as {name} computes with"
        raise fail(OP, f"{prefix}.gate_up_proj", rule, "gate and up apart")
    held = [_parameter(module, name, weight) for weight in weights]
    operands = read_experts(source, prefix, _device_of(held[0]))
    found = {f"{weight}_bias": _bias(members) for weight, members in weights.items()}
    for bias, members in zip(found, weights.values(), strict=True):
        if found[bias] is None and isinstance(getattr(module, bias, None), Tensor):
            first = members[0][0]
            key = f"{first.name}{'_' if first.stacked else '.'}bias"
            rule, cure = f"complete, with {key!r} for {name}.{bias}", "Make the model with the checkpoint's config."
            raise fail(OP, "checkpoint", rule, "no such key", cure)
    biases = {bias: tensor for bias, tensor in found.items() if tensor is not None}
    for weight, operand in operands.items():
        E, N, width = operand.data.shape
        K = width * _row_of(operand).pack
        _check_shape(module, name, weight, (E, K, N) if transposed else (E, N, K))
    for bias, tensor in biases.items():
        _check_shape(module, name, bias, tuple(tensor.shape))
    for weight, operand in operands.items():
        place(module, weight, operand, transposed)
    for bias, tensor in biases.items():
        old = _parameter(module, name, bias)
        module.register_parameter(bias, nn.Parameter(tensor.to(_device_of(old), old.dtype), old.requires_grad))
    return _row_of(operands["down_proj"]).name


def _row_of(operand: Operand) -> QuantScheme:
    """A weight's row; activations have formats."""
    return cast(QuantScheme, operand.scheme)


def _parameter(module: nn.Module, name: str, parameter: str) -> Tensor:
    """A float parameter that is to be replaced."""
    held = getattr(module, parameter, None)
    if not isinstance(held, Tensor) or held.dtype not in FLOAT_DTYPES:
        got = held.dtype if isinstance(held, Tensor) else "none"
        raise fail(OP, f"{name}.{parameter}", "a parameter of bfloat16, float16, float32 or float64", got)
    return held


def _check_shape(module: nn.Module, name: str, parameter: str, shape: tuple[int, ...]) -> None:
    held = _parameter(module, name, parameter)
    if tuple(held.shape) != shape:
        rule = f"{list(shape)} as in the checkpoint"
        raise fail(OP, f"{name}.{parameter}", rule, list(held.shape), "Make the model with the checkpoint's config.")


def _device_of(parameter: Tensor) -> torch.device:
    """Where what replaces it goes: the CPU for what has no memory yet."""
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _operand(name: str, prefix: str, members: Members, device: torch.device) -> Operand:
    """One weight of a layer, checked by its scheme's row."""
    halves = name == "gate_up_proj"
    is_whole = len(members[0]) == 1
    if is_whole and members[0][0].stacked:
        stored = canonical(members[0][0], halves=halves)
    else:
        stored = _stack(members, device, halves=halves and is_whole)
    data, scales = stored.data.to(device), [scale.to(device) for scale in stored.scales]
    E, N, width = data.shape
    sizes = (E, N, width * stored.scheme.pack)
    argument = f"{prefix}.{name} scales"
    return weight_operand(OP, argument, data, stored.scheme, scales, sizes, halves=halves)


def _stack(members: Members, device: torch.device, *, halves: bool) -> Stored:
    """Weights of single experts, or halves that are stacked each, copied one by one to where they stay.

    Args:
        halves: each of these weights is a gate and an up half.

    Returns:
        ``[E, N, K / pack]``, and scales ``[E, N groups, K groups]``; ``[E, 2, ..]`` where their groups start again at
        the up half.
    """
    first: Signature | None = None
    targets: list[Tensor] = []
    for expert, weights in enumerate(members):
        for half, parts in enumerate(weights):
            stored = canonical(parts, halves=halves)
            tensors = (stored.data, *stored.scales)
            if first is None:
                first, scheme = stored.signature, stored.scheme
                count = len(members) if stored.data.dim() == 2 else stored.data.shape[0]
                targets = [
                    torch.empty(count, len(weights), *tensor.shape[-2:], dtype=tensor.dtype, device=device)
                    for tensor in tensors
                ]
            elif stored.signature != first:
                raise fail(OP, parts.any_key(), f"stored like expert 0's, {first}", stored.signature)
            for target, tensor in zip(targets, tensors, strict=True):
                target[expert if tensor.dim() == 2 else slice(None), half] = tensor
            del stored, tensors, tensor  # before the next one is read
    data, *scales = targets
    N, K = data.shape[-2], data.shape[-1] * scheme.pack
    joined = []
    for spec, scale in zip(scheme.scales, scales, strict=False):
        if spec.of_rows:
            joined.append(_of_both(scale, members))
            continue
        form = spec.groups_of(scale.shape, N, K)
        runs_on = form is not None and form[0] != WHOLE and N % form[0] == 0
        joined.append(scale.flatten(1, 2) if runs_on or scale.shape[1] == 1 else scale)
    return Stored(scheme, data.flatten(1, 2), tuple(joined))


def _of_both(static: Tensor, members: Members) -> Tensor:
    """``[E, 1, 1]`` of ``[E, halves, 1, 1]``: gate and up are multiplied with the same rows.

    Raises:
        ValueError: they were calibrated apart.
    """
    first = static[:, 0]
    for half in range(1, static.shape[1]):
        differs = (static[:, half] != first).flatten()
        if bool(differs.any()):
            expert = int(differs.int().argmax())
            key = members[expert if len(members) > 1 else 0][half].keys["input_scale"]
            rule = f"{float(first[expert])}, that of the gate, which is multiplied with the same rows"
            raise fail(OP, key, rule, float(static[expert, half]), "Calibrate both as one.")
    return first.contiguous()


def _bias(members: Members) -> Tensor | None:
    """``[E, N]``, or None where the checkpoint has none."""
    every = [parts for halves in members for parts in halves]
    if not any("bias" in parts for parts in every):
        return None
    halves = [torch.cat([parts.take("bias")[1] for parts in half], dim=-1) for half in members]
    return halves[0] if halves[0].dim() == 2 else torch.stack(halves)


def place(module: nn.Module, name: str, operand: Operand, transposed: bool) -> None:
    """Put ``operand`` where the parameter ``name`` of ``module`` stands, frozen, for numbers of the same dtype."""
    weight = QuantizedWeight(
        operand.data,
        operand.listed,
        scheme=_row_of(operand).name,
        dtype=getattr(module, name).dtype,
        transposed=transposed,
    )
    put(module, name, weight)
