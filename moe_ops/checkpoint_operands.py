"""The weights and biases of one layer's experts, from the tensors that a checkpoint has of each."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from meta.checks import fail
from meta.gemm_shapes import weight_operand
from meta.operands import Operand
from meta.schemes import FLOAT_DTYPES, SCHEMES, WHOLE, QuantScheme
from moe_ops.checkpoint_files import Members
from moe_ops.checkpoint_layouts import Signature, Stored, canonical
from moe_ops.checkpoint_parts import OP, Parts
from moe_ops.checkpoint_turned import turn_stacks


def operands_of(weights: dict[str, Members], prefix: str, device: torch.device) -> dict[str, Operand]:
    """``[E, N, K / pack]`` of every weight, one expert after the other.

    Raises:
        ValueError: a tensor is of no known layout, or the weights are of different schemes; a key is named.
    """
    turn_stacks(weights)
    operands = {name: _operand(name, prefix, members, device) for name, members in weights.items()}
    if {row_of(one).name for one in operands.values()} == {"int8_channel", "int8_w8a16"}:
        # A weight that is one group wide looks as if it had none; beside groups its activations stay as they are, too.
        operands = {name: replace(one, scheme=SCHEMES["int8_w8a16"]) for name, one in operands.items()}
    (first, one), *others = operands.items()
    for name, other in others:
        if row_of(other) is not row_of(one):
            rule = f"stored in one scheme, {row_of(one).name!r} like {first}"
            raise fail(OP, f"{prefix}.{name}", rule, repr(row_of(other).name))
    return operands


def row_of(operand: Operand) -> QuantScheme:
    """A weight's row; activations have formats."""
    return cast(QuantScheme, operand.scheme)


def bias_of(members: Members, operand: Operand) -> Tensor | None:
    """``[E, N]`` beside such a weight, or None where the checkpoint has none.

    Raises:
        ValueError: some experts or halves have none, or one of another dtype or shape; the key is named.
    """
    if not any("bias" in parts for halves in members for parts in halves):
        return None
    E, N, _ = operand.data.shape
    halves = [torch.cat([_bias(parts, E, N // len(half)) for parts in half], dim=-1) for half in members]
    return halves[0] if halves[0].dim() == 2 else torch.stack(halves)


def _bias(parts: Parts, E: int, N: int) -> Tensor:
    key, bias = parts.take("bias")
    shape = (E, N) if parts.stacked else (N,)
    if bias.dtype not in FLOAT_DTYPES or bias.shape != shape:
        rule = f"{list(shape)} of bfloat16, float16, float32 or float64, a number for each row of the weight"
        raise fail(OP, key, rule, f"{bias.dtype} {list(bias.shape)}")
    return bias


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
