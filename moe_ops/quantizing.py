"""``quantize_``: the experts of a model to a scheme, in place, with the error that it makes, and static scales of their
activations from inputs of the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meta.checks import accepts, check_module, check_name, check_type, fail
from meta.schemes import FLOAT_DTYPES, QuantScheme, joined
from moe_ops import compat
from moe_ops.calibration import largest_rows
from moe_ops.progress import progress
from moe_ops.quantized import QuantizedWeight, quantized_schemes
from moe_ops.quantized_state import check_keys, put
from moe_ops.stacked import (
    StackedExperts,
    check_filter,
    check_memory,
    check_orientation,
    places_of,
    selected,
    stacked_experts,
    unclear_stacks,
)

_OP = "quantize_"


@dataclass(frozen=True)
class QuantizedParameter:
    """One parameter that was replaced.

    Attributes:
        name: as in ``named_parameters()``.
        shape: its logical shape.
        error: root of the mean square of the difference, over that of the weight; NaN for a meta tensor, and for a
            weight that is not finite everywhere.
        before, after: bytes that it took, and takes with its scales.
        input_scale: the static scale of its activations, or None.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    before: int
    after: int
    input_scale: float | None = None


@dataclass(frozen=True)
class QuantizationReport:
    """What :func:`quantize_` did; printed, it is a table with a line for each parameter.

    Attributes:
        scheme: name of the scheme.
        parameters: those that were replaced, in the order of the model; one of many names is there once.
        left: names of modules that the filter takes, some of whose weights are quantised already, and others not: they
            are left as they are.
        unclear: names of modules that the filter takes, in which several pairs of 3-D parameters have the shapes of
            experts: they are left as they are, too.
    """

    scheme: str
    parameters: tuple[QuantizedParameter, ...]
    left: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()

    @property
    def worst(self) -> QuantizedParameter:
        """The parameter with the largest error; NaN is larger than any number."""
        return max(self.parameters, key=lambda parameter: (math.isnan(parameter.error), parameter.error))

    def __str__(self) -> str:
        width = max(len(parameter.name) for parameter in self.parameters)
        lines = [f"{'parameter':{width}}  {'shape':>20}  relative rms error     MiB ->     MiB"]
        for one in self.parameters:
            shape = " x ".join(map(str, one.shape))
            sizes = f"{one.before / 2**20:7.2f} -> {one.after / 2**20:7.2f}"
            rows = "" if one.input_scale is None else f"  activations in steps of {one.input_scale:.3g}"
            lines.append(f"{one.name:{width}}  {shape:>20}  {one.error:18.5f}  {sizes}{rows}")
        before, after = (sum(getattr(one, name) for one in self.parameters) for name in ("before", "after"))
        share = f"{after / before:.3f} of the bytes" if before else "no bytes"
        lines.append(f"{self.scheme}: {len(self.parameters)} parameters, {share}, worst {self.worst.name}")
        if self.left:
            names = ", ".join(self.left)
            lines.append(f"left as they are, with weights that are quantised and others that are not: {names}")
        if self.unclear:
            names = ", ".join(self.unclear)
            lines.append(f"left as they are, as several pairs of weights have the shapes of experts: {names}")
            lines.append("(those that are named gate_up_proj or up_proj, and down_proj, are taken)")
        return "\n".join(lines)


def quantize_(
    model: nn.Module,
    scheme: str,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    inputs: Iterable[Any] | None = None,
) -> QuantizationReport:
    """Replace the expert weights of a model by :class:`QuantizedWeight` parameters, which have no gradient.

    Experts are found by structure: a module with two or three float parameters of its own in three dimensions, over the
    same experts, whose widths are those of experts: ``[E, I or 2I, H]`` and ``[E, H, I]``, or both transposed. The
    state dict of such a module holds plain tensors from then on: see :mod:`moe_ops.quantized_state`. One expert at a
    time is held in fp32. A parameter of many names in the model stays one, replaced under each of them.

    Args:
        model: any module; transformers' experts modules are found in it.
        scheme: a name of :data:`meta.schemes.SCHEMES` that quantises weights.
        filter: ``(name, module) -> bool`` by the experts module's name in ``named_modules()``; None takes all.
        inputs: what the model is called with, one after the other, before anything is replaced: tensors, tuples of
            positional or mappings of keyword arguments. Activations get static scales then, by the largest magnitude
            in front of each weight. All experts of a layer get the same one: those that few tokens select are not
            calibrated by those few. None leaves them dynamic.

    Returns:
        The error of each parameter, and the modules that were left because they are quantised in part.

    Raises:
        ValueError: an unknown scheme, no experts, experts whose orientation their shapes do not say, a width that the
            scheme's packing does not divide, a filter that takes a parameter under one of its names only, weights that
            accelerate holds elsewhere, or inputs that do not calibrate. The model is as it was then.

    Source: that of the scheme's row.

    Example:
        >>> experts = torch.nn.Module()
        >>> experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 64, 64))
        >>> experts.down_proj = torch.nn.Parameter(torch.randn(4, 64, 32))
        >>> report = moe_ops.quantize_(torch.nn.Sequential(experts), "mxfp4", filter=lambda name, module: name == "0")
        >>> report.worst.name.startswith("0."), report.worst.error < 0.15
        (True, True)
    """
    check_module(_OP, model)
    check_type(_OP, "scheme", scheme, accepts("str"))
    rows = quantized_schemes()
    check_name(_OP, "scheme", scheme, rows)
    row = rows[scheme]
    found, left, unclear = _selected(model, filter)
    for experts in found:
        _check(experts, row)
    check_memory(_OP, model, found)
    places = places_of(model)
    for module, name in [
        place for experts in found for one in experts.parameters.values() for place in places[id(one)]
    ]:
        check_keys(_OP, module, name, row)
    static = {} if inputs is None else _calibrated(model, found, row, inputs)
    waiting = dict[int, tuple[str, Tensor, bool]]()
    for experts in found:
        for full, given in experts.parameters.items():
            waiting.setdefault(id(given), (full, given, bool(experts.transposed)))
    report: list[QuantizedParameter] = []
    with compat.without_autocast(), progress() as bars:
        advance = bars.bar("quantising", len(waiting))
        for key in [*waiting]:
            full, given, transposed = waiting.pop(key)  # nothing else keeps it when it is replaced
            scale = static.get(key)
            weight, error = _quantized(given, row, transposed, scale)
            entry = (full, tuple(given.shape), error, given.nbytes, weight.stored_bytes)
            report.append(QuantizedParameter(*entry, None if scale is None else float(scale)))
            parameter = nn.Parameter(weight, requires_grad=False)
            for module, name in places[key]:
                put(module, name, parameter)
            advance()
    return QuantizationReport(scheme, tuple(report), left, unclear)


def _selected(
    model: nn.Module, filter: Callable[[str, nn.Module], bool] | None
) -> tuple[list[StackedExperts], tuple[str, ...], tuple[str, ...]]:
    """The modules of float weights that the filter takes, the names of those that are quantised in part, and of those
    that do not say what their experts are.
    """
    taken, refused = selected(_OP, model, filter, stacked_experts(model))
    found = [one for one in taken if all(_floats(one))]
    left = tuple(one.name for one in taken if any(_floats(one)) and not all(_floats(one)))
    unclear = tuple(name for name, module in unclear_stacks(model) if filter is None or filter(name, module))
    if not found and left:
        cure = "Load its float weights first."
        raise fail(_OP, left[0] or "model", "of float weights alone", "some that are quantised", cure)
    if not found and unclear:
        cure = "Name them gate_up_proj or up_proj, and down_proj."
        raise fail(_OP, unclear[0] or "model", "of one pair of experts' shapes", "several pairs of weights", cure)
    if not found:
        cure = "Lists of experts become such modules by moe_ops.stack_experts_; quantised ones stay as they are."
        rule = "a module with stacked float experts that the filter takes"
        raise fail(_OP, "model", rule, type(model).__name__, cure)
    check_filter(_OP, found, refused)
    return found, left, unclear


def _floats(experts: StackedExperts) -> list[bool]:
    """Which of the weights are float parameters."""
    return [type(one) is nn.Parameter and one.dtype in FLOAT_DTYPES for one in experts.parameters.values()]


def _calibrated(
    model: nn.Module, found: list[StackedExperts], row: QuantScheme, inputs: Iterable[Any]
) -> dict[int, Tensor]:
    """The static scale of the rows of each weight, by the weight's identity."""
    if row.static_rows is None or row.rows is None:
        names = sorted(name for name, other in quantized_schemes().items() if other.static_rows is not None)
        raise fail(_OP, "scheme", f"one of {names} where inputs are given", repr(row.name), "Leave inputs out.")
    weights: dict[int, tuple[str, Tensor]] = {}
    for experts in found:
        if len(experts.names) > 2:
            cure = "Stack gate and up: their rows are the same, and so is the scale."
            raise fail(_OP, experts.name or "model", "of two stacks where inputs are given", [*experts.names], cure)
        weights |= {id(weight): (name, weight) for name, weight in experts.parameters.items()}
    amax = largest_rows(_OP, model, dict(weights.values()), inputs)
    return {key: row.rows.scale_of(amax[name]) for key, (name, _) in weights.items()}


def _check(experts: StackedExperts, row: QuantScheme) -> None:
    check_orientation(_OP, experts)
    for name, weight in experts.parameters.items():
        K = weight.shape[1 if experts.transposed else 2]
        if K % row.pack:
            rule = f"of a contracted width that {row.pack} divides for scheme {row.name!r}"
            raise fail(_OP, name, rule, K, "Leave it out by the filter.")


def _quantized(
    weight: Tensor, row: QuantScheme, transposed: bool, static: Tensor | None
) -> tuple[QuantizedWeight, float]:
    """The weight in the scheme, with the static scale of its activations if given, and its relative error."""
    dense = weight.detach().transpose(1, 2) if transposed else weight.detach()
    parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    lost = total = 0.0
    for expert in dense.split(1):
        codes, of_codes = row.quantize(expert)
        parts.append((codes, of_codes))
        if not weight.is_meta:
            wide = expert.double()
            lost += float((row.dequantize(codes, of_codes) - wide).square().sum())
            total += float(wide.square().sum())
    stored, scales = joined(parts)
    if static is not None:
        scales = (*scales, static.expand(weight.shape[0], 1, 1).contiguous())
    made = QuantizedWeight(stored, scales, scheme=row.name, dtype=weight.dtype, transposed=transposed)
    return made, math.nan if weight.is_meta else math.sqrt(lost / total) if total else 0.0
