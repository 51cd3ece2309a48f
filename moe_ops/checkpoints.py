"""Quantised experts from checkpoints, layer after layer, as their bytes stand there.

:func:`read_experts` brings the tensors of one layer to operands, :func:`load_experts_` puts those of a whole model in
the place of its float parameters. Which keys there are is found by :mod:`moe_ops.checkpoint_files`, which module they
are of by :mod:`moe_ops.checkpoint_names`; what they mean is said in :mod:`moe_ops.checkpoint_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from meta.checks import accepts, check_module, check_type, describe_value, fail
from meta.operands import Operand
from meta.schemes import FLOAT_DTYPES
from moe_ops import compat
from moe_ops.checkpoint_files import Checkpoint, Members
from moe_ops.checkpoint_layouts import TURN
from moe_ops.checkpoint_names import candidates, check_prefixes, prefix_of
from moe_ops.checkpoint_operands import bias_of, operands_of, row_of
from moe_ops.checkpoint_parts import OP
from moe_ops.progress import progress
from moe_ops.quantized import QuantizedWeight
from moe_ops.quantized_state import check_keys, put
from moe_ops.stacked import (
    StackedExperts,
    check_filter,
    check_memory,
    check_orientation,
    places_of,
    selected,
    stacked_experts,
)

_OF_CONFIG = "Make the model with the checkpoint's config."


def read_experts(
    checkpoint: Checkpoint | str | Path, prefix: str, device: torch.device | str = "cpu"
) -> dict[str, Operand]:
    """The weights of one layer's experts, as they are stored.

    Args:
        checkpoint: a folder or a file of safetensors.
        prefix: what the layer's keys begin with, such as ``"model.layers.3.mlp.experts"``; ``""`` where these are the
            names of stacked parameters alone.
        device: where the operands go, one expert after the other.

    Returns:
        ``gate_up_proj`` (``up_proj`` of experts without a gate) and ``down_proj``, each ``[E, N, K / pack]`` with the
        list of scales of its scheme. Gates and up halves that are stored apart are stacked, gate first.

    Raises:
        ValueError: a tensor is missing, or of no known layout; its key is named. A prefix that is no string, or a
            device that is not there.
    """
    check_type(OP, "prefix", prefix, accepts("str"))
    try:
        place = torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError) as error:  # the last of a torch that was built without it
        got = f"{describe_value(device)}: {type(error).__name__}"
        raise fail(OP, "device", "a device that is there, or its name", got) from error
    if not isinstance(checkpoint, Checkpoint):
        with Checkpoint(checkpoint) as opened:
            return operands_of(opened.members(prefix), prefix, place)
    return operands_of(checkpoint.members(prefix), prefix, place)


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
            and ``down_proj`` of one module, or ``gate_proj``, ``up_proj`` and ``down_proj``, in a float dtype, which
            stays that of their numbers.
        checkpoint: a file of safetensors, an index of some, or a folder with some, with or without an index; the
            layouts are those of gpt-oss, compressed-tensors, ModelOpt, DeepSeek, torchao and of
            :mod:`moe_ops.quantized_state`. A ``config.json`` beside it that says that compressed-tensors quantised
            weights alone is heeded: schemes of 8 bits leave activations as they are then.
        filter: ``(name, module) -> bool`` by the experts module's name in ``named_modules()``, as that of
            :func:`moe_ops.quantize_`, to leave out layers that the checkpoint has in a float dtype; None takes all.

    Returns:
        The scheme of every module that was filled, by its name. A parameter of many names in the model stays one.

    Raises:
        ValueError: a model without such modules, a filter that takes a parameter under one of its names only, experts
            whose orientation their shapes do not say, weights that accelerate holds elsewhere, files that cannot be
            read, or keys that are not those of every module, whole and once: the model is as it was then. A tensor of
            another shape or of a layout that is not known, whose key is named: layers before that one are replaced by
            then.

    Source: the layouts of :mod:`moe_ops.checkpoint_layouts`; compressed-tensors 0.20 where it writes them.

    Example::

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        schemes = moe_ops.load_experts_(model, "folder/of/the/checkpoint")
    """
    check_module(OP, model)
    found = [
        one for one in stacked_experts(model, every_name=True) if {*one.names} & {"gate_up_proj", "up_proj"}
    ]  # a layer that shares a module may have keys of its own, which must say the same
    taken, refused = selected(OP, model, filter, [one for one in found if "down_proj" in one.names])
    if not taken:
        rule = "a model with modules of 3-D parameters gate_up_proj (or up_proj) and down_proj that the filter takes"
        raise fail(OP, "model", rule, type(model).__name__)
    check_filter(OP, taken, refused)
    check_memory(OP, model, taken)
    places = _Places(model)
    schemes = {}
    with compat.without_autocast(), Checkpoint(checkpoint) as source:
        prefixes = _prefixes(model, taken, source)
        layers = [_Layer(experts, source, prefixes[experts.name]) for experts in taken if experts.name in prefixes]
        with progress() as bars:
            advance = bars.bar("experts", len(layers))
            for layer in layers:
                schemes[layer.name] = layer.fill(places)
                advance(description=layer.name)
    filled = {id(weight): schemes[one.name] for one in taken if one.name in schemes for weight in _weights(one)}
    return {one.name: filled[id(_weights(one)[0])] for one in taken}


def _weights(experts: StackedExperts) -> list[Tensor]:
    return [*experts.parameters.values()]


def _prefixes(model: nn.Module, taken: list[StackedExperts], source: Checkpoint) -> dict[str, str]:
    """What the keys of every module begin with, by its name. Of modules that have all weights in common some may have
    no keys of their own.
    """
    ties: dict[tuple[int, ...], list[str]] = {}
    for one in taken:
        ties.setdefault(tuple(map(id, _weights(one))), []).append(one.name)
    stored = [[name for name in names if candidates(name, source.numbered)] or names for names in ties.values()]
    chosen = {name for names in stored for name in names}
    prefixes = {one.name: prefix_of(one.name, source.numbered) for one in taken if one.name in chosen}
    check_prefixes(prefixes, [name for name, _ in model.named_modules()])
    return prefixes


class _Places:
    """Where the parameters of a model stand, each of which is replaced under all of its names."""

    def __init__(self, model: nn.Module) -> None:
        self._of = places_of(model)
        self._made: dict[int, nn.Parameter] = {}

    def has_made(self, parameter: Tensor) -> bool:
        """Whether it is a new one: what it replaced had another name, too."""
        return id(parameter) in self._made

    def replace(self, old: Tensor, new: nn.Parameter) -> list[tuple[nn.Module, str]]:
        """The modules and names where ``new`` is to be put for ``old``."""
        self._made[id(new)] = new
        return self._of.pop(id(old))


class _Layer:
    """A module and what fills it, checked as far as the names of keys and parameters go.

    Args:
        experts: the module.
        source: the checkpoint.
        prefix: what the keys begin with.

    Raises:
        ValueError: the checkpoint has other weights or biases than the module, or not each of them once.
    """

    def __init__(self, experts: StackedExperts, source: Checkpoint, prefix: str) -> None:
        if experts.transposed is None and all(weight.shape[1] == weight.shape[2] for weight in _weights(experts)):
            check_orientation(OP, experts)
        self.name, self._module, self._prefix = experts.name, experts.module, prefix
        self._said = experts.transposed
        self._weights = source.members(prefix, apart="gate_proj" in experts.names)
        if self._weights.keys() != {*experts.names}:
            rule = f"with {', '.join(sorted(experts.names))} of {self.name!r}"
            cure = f"{_OF_CONFIG} Or leave the module out by the filter."
            raise fail(OP, "checkpoint", rule, ", ".join(sorted(self._weights)), cure)
        self._interleaved = not getattr(self._module, "is_concatenated", True)
        if self._interleaved and len(self._weights.get("gate_up_proj", [[]])[0]) == 2:
            rule = f"one weight of interleaved rows, as {self.name} computes with"
            raise fail(OP, f"{prefix}.gate_up_proj", rule, "gate and up apart")
        for weight, members in self._weights.items():
            self._held(weight)
            self._check_bias(f"{weight}_bias", members)

    def _check_bias(self, bias: str, members: Members) -> None:
        """The module and the checkpoint have it, for all experts, or neither has."""
        every = [parts for halves in members for parts in halves]
        if any("bias" in parts for parts in every):
            self._held(bias)
            for parts in every:
                parts.find("bias")
        elif isinstance(getattr(self._module, bias, None), Tensor):
            first = every[0]
            key = f"{first.name}{'_' if first.stacked else '.'}bias"
            raise fail(OP, "checkpoint", f"complete, with {key!r} for {self.name}.{bias}", "no such key", _OF_CONFIG)

    def fill(self, places: _Places) -> str:
        """Put everything there once it has been read and checked; the scheme's name."""
        device = _device_of(self._held(next(iter(self._weights))))
        operands = operands_of(self._weights, self._prefix, device)
        for name, operand in operands.items():
            check_keys(OP, self._module, name, row_of(operand))
            apart = next((scale for scale in operand.scales if scale.dim() == 4), None)
            if self._interleaved and apart is not None:  # whose rows they are of, nothing says
                rule = f"of scales that do not start again at half of the rows, which {self.name} interleaves"
                raise fail(OP, f"{self._prefix}.{name}", rule, f"scales {list(apart.shape)}")
            if operand.static is not None and "gate_proj" in operands:
                rule = "without static scales of activations (input_scale) where gate and up are two parameters"
                cure = "Load it into a model that stacks them as gate_up_proj: their rows are the same."
                raise fail(OP, f"{self._prefix}.{name}", rule, "some", cure)
        shapes = {name: (*one.data.shape[:2], one.data.shape[2] * row_of(one).pack) for name, one in operands.items()}
        turned = {name: (E, K, N) for name, (E, N, K) in shapes.items()}
        transposed = self._said
        if transposed is None:  # the model does not tell, but what fits it does
            transposed = all(self._held(name).shape == shape for name, shape in turned.items())
        new: dict[str, Tensor] = {}
        for weight, operand in operands.items():
            held = self._checked(weight, (turned if transposed else shapes)[weight])
            scheme, dtype = row_of(operand).name, held.dtype
            new[weight] = QuantizedWeight(
                operand.data, operand.listed, scheme=scheme, dtype=dtype, transposed=transposed
            )
            bias, read = f"{weight}_bias", bias_of(self._weights[weight], operand)
            if read is not None:
                held = self._checked(bias, tuple(read.shape))
                new[bias] = read.to(_device_of(held), held.dtype)
        made = {name: tensor for name, tensor in new.items() if not places.has_made(self._held(name))}
        for name in new.keys() - made.keys():
            if not _is_same(new[name], self._held(name)):
                rule = "the same as that of the other names of the parameter"
                raise fail(OP, f"{self._prefix}.{name}", rule, "another", "Give each a parameter of its own.")
        for name, tensor in made.items():
            self._put(name, tensor, places, is_weight=name in operands)
        return row_of(operands["down_proj"]).name

    def _put(self, name: str, tensor: Tensor, places: _Places, *, is_weight: bool) -> None:
        held = self._held(name)
        if not isinstance(held, nn.Parameter):
            setattr(self._module, name, tensor)  # a buffer stays one
            return
        parameter = nn.Parameter(tensor, requires_grad=held.requires_grad and not is_weight)
        for module, its_name in places.replace(held, parameter):
            if is_weight:
                put(module, its_name, parameter)
            else:
                module.register_parameter(its_name, parameter)

    def _held(self, name: str) -> Tensor:
        """A float tensor of the module that is to be replaced."""
        held = getattr(self._module, name, None)
        if not isinstance(held, Tensor) or held.dtype not in FLOAT_DTYPES:
            got = held.dtype if isinstance(held, Tensor) else "none"
            raise fail(OP, f"{self.name}.{name}", "a parameter of bfloat16, float16, float32 or float64", got)
        return held

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        held = self._held(name)
        if tuple(held.shape) != shape:
            is_turned = len(shape) == 3 and tuple(held.mT.shape) == shape
            cure = f"It fits if the checkpoint is stored transposed. {TURN}" if is_turned else _OF_CONFIG
            raise fail(OP, f"{self.name}.{name}", f"{list(shape)} as in the checkpoint", list(held.shape), cure)
        return held


def _device_of(parameter: Tensor) -> torch.device:
    """Where what replaces it goes: the CPU for what has no memory yet."""
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _is_same(one: Tensor, other: Tensor) -> bool:
    """The same bytes, of the same scheme where they are quantised."""
    if not isinstance(one, QuantizedWeight) or not isinstance(other, QuantizedWeight):
        return torch.equal(one, other)
    mine, its = one.parts(), other.parts()
    same = one.scheme == other.scheme and mine.keys() == its.keys()
    return same and all(torch.equal(mine[part].view(torch.uint8), its[part].view(torch.uint8)) for part in mine)
