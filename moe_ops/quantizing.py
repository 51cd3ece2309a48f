"""``quantize_``: the experts of a model to a scheme, in place, with the error that it makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
from torch import Tensor, nn

from meta.checks import accepts, check_name, check_type, fail
from meta.schemes import FLOAT_DTYPES, QuantScheme
from moe_ops.quantized import QuantizedWeight, quantized_schemes
from moe_ops.quantized_state import put

_OP = "quantize_"


@dataclass(frozen=True)
class QuantizedParameter:
    """One parameter that was replaced.

    Attributes:
        name: as in ``named_parameters()``.
        shape: its logical shape.
        error: root of the mean square of the difference, over that of the weight; NaN for a meta tensor.
        before, after: bytes that it took, and takes with its scales.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    before: int
    after: int


@dataclass(frozen=True)
class QuantizationReport:
    """What :func:`quantize_` did; printed, it is a table with a line for each parameter.

    Attributes:
        scheme: name of the scheme.
        parameters: those that were replaced, in the order of the model.
    """

    scheme: str
    parameters: tuple[QuantizedParameter, ...]

    @property
    def worst(self) -> QuantizedParameter:
        """The parameter with the largest error."""
        return max(self.parameters, key=lambda parameter: parameter.error)

    def __str__(self) -> str:
        width = max(len(parameter.name) for parameter in self.parameters)
        lines = [f"{'parameter':{width}}  {'shape':>20}  relative rms error     MiB ->     MiB"]
        for one in self.parameters:
            shape = " x ".join(map(str, one.shape))
            sizes = f"{one.before / 2**20:7.2f} -> {one.after / 2**20:7.2f}"
            lines.append(f"{one.name:{width}}  {shape:>20}  {one.error:18.5f}  {sizes}")
        before, after = (sum(getattr(one, name) for one in self.parameters) for name in ("before", "after"))
        share = f"{after / before:.3f} of the bytes" if before else "no bytes"
        lines.append(f"{self.scheme}: {len(self.parameters)} parameters, {share}, worst {self.worst.name}")
        return "\n".join(lines)


def quantize_(
    model: nn.Module, scheme: str, *, filter: Callable[[str, nn.Module], bool] | None = None
) -> QuantizationReport:
    """Replace the expert weights of a model by :class:`QuantizedWeight` parameters, which have no gradient.

    Experts are found by structure: a module with two or three float parameters of its own in three dimensions, over the
    same experts, whose widths are those of experts: ``[E, I or 2I, H]`` and ``[E, H, I]``, or both transposed. The
    state dict of such a module holds plain tensors from then on: see :mod:`moe_ops.quantized_state`. One expert at a
    time is held in fp32.

    Args:
        model: any module; transformers' experts modules are found in it.
        scheme: a name of :data:`meta.schemes.SCHEMES` that quantises weights.
        filter: ``(name, module) -> bool`` by the experts module's name in ``named_modules()``; None takes all.

    Returns:
        The error of each parameter.

    Raises:
        ValueError: an unknown scheme, no experts, experts whose orientation their shapes do not say, or a width that
            the scheme's packing does not divide. The model is as it was then.

    Source: that of the scheme's row.

    Example:
        >>> experts = torch.nn.Module()
        >>> experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 64, 64))
        >>> experts.down_proj = torch.nn.Parameter(torch.randn(4, 64, 32))
        >>> report = moe_ops.quantize_(torch.nn.Sequential(experts), "mxfp4", filter=lambda name, module: name == "0")
        >>> report.worst.name.startswith("0."), report.worst.error < 0.15
        (True, True)
    """
    if not isinstance(model, nn.Module):
        raise fail(_OP, "model", "a torch.nn.Module", type(model).__name__)
    check_type(_OP, "scheme", scheme, accepts("str"))
    rows = quantized_schemes()
    check_name(_OP, "scheme", scheme, rows)
    row = rows[scheme]
    found = [one for one in _experts(model) if filter is None or filter(one.name, one.module)]
    if not found:
        cure = "Lists of experts become such modules by moe_ops.stack_experts_; quantised ones stay as they are."
        rule = "a module with stacked float experts that the filter takes"
        raise fail(_OP, "model", rule, type(model).__name__, cure)
    for experts in found:
        _check(experts, row)
    made: dict[int, QuantizedWeight] = {}
    report: list[QuantizedParameter] = []
    with _progress(sum(len(experts.names) for experts in found)) as advance:
        for experts in found:
            for name in experts.names:
                given = getattr(experts.module, name)
                if id(given) not in made:
                    weight, error = _quantized(given, row, bool(experts.transposed))
                    made[id(given)] = weight
                    entry = (f"{experts.name}.{name}".lstrip("."), tuple(given.shape), error, given.nbytes)
                    report.append(QuantizedParameter(*entry, weight.stored_bytes))
                put(experts.module, name, made[id(given)])
                advance()
    return QuantizationReport(scheme, tuple(report))


@dataclass(frozen=True)
class _Experts:
    """A module with stacked experts; ``transposed`` is None where the shapes fit both ways."""

    name: str
    module: nn.Module
    names: tuple[str, ...]
    transposed: bool | None


def _experts(model: nn.Module) -> Iterator[_Experts]:
    for name, module in model.named_modules():
        stacked = {key: value for key, value in module.named_parameters(recurse=False) if _is_stacked(value)}
        for count in (3, 2):
            groups = [keys for keys in combinations(stacked, count) if (_ways([stacked[key] for key in keys]))]
            if len(groups) == 1:
                ways = _ways([stacked[key] for key in groups[0]])
                said = getattr(module, "is_transposed", None)
                way = said if said in ways else next(iter(ways)) if len(ways) == 1 else None
                yield _Experts(name, module, groups[0], way)
                break


def _is_stacked(value: Tensor) -> bool:
    return type(value) is nn.Parameter and value.dim() == 3 and value.dtype in FLOAT_DTYPES


def _ways(weights: list[Tensor]) -> set[bool]:
    """Whether they are experts as ``[E, N, K]`` (False is in the set) or transposed (True)."""
    if len({weight.shape[0] for weight in weights}) > 1:
        return set()
    found = set()
    for transposed in (False, True):
        shapes = [weight.shape[:0:-1] if transposed else weight.shape[1:] for weight in weights]
        for (hidden, width), *firsts in permutations(shapes):
            rows = (width,) if len(firsts) > 1 else (width, 2 * width)
            if all(N in rows and K == hidden for N, K in firsts):
                found.add(transposed)
    return found


def _check(experts: _Experts, row: QuantScheme) -> None:
    if experts.transposed is None:
        shapes = [list(getattr(experts.module, name).shape) for name in experts.names]
        cure = "Set module.is_transposed, or pass a filter that leaves it out."
        raise fail(_OP, experts.name or "model", "of shapes that are [E, N, K] or [E, K, N]", f"{shapes}, both", cure)
    for name in experts.names:
        shape = getattr(experts.module, name).shape
        K = shape[1 if experts.transposed else 2]
        if K % row.pack:
            rule = f"of a contracted width that {row.pack} divides for scheme {row.name!r}"
            raise fail(_OP, f"{experts.name}.{name}".lstrip("."), rule, K, "Leave it out by the filter.")


def _quantized(weight: Tensor, row: QuantScheme, transposed: bool) -> tuple[QuantizedWeight, float]:
    """The weight in the scheme, and its relative error."""
    dense = weight.detach().transpose(1, 2) if transposed else weight.detach()
    stored: list[Tensor] = []
    scales: list[tuple[Tensor, ...]] = []
    lost = total = 0.0
    for expert in dense.split(1):
        codes, of_codes = row.quantize(expert)
        stored.append(codes)
        scales.append(of_codes)
        if not weight.is_meta:
            wide = expert.double()
            lost += float((row.dequantize(codes, of_codes) - wide).square().sum())
            total += float(wide.square().sum())
    made = QuantizedWeight(
        torch.cat(stored), [_joined(parts) for parts in zip(*scales, strict=True)], scheme=row.name,
        dtype=weight.dtype, transposed=transposed,
    )  # fmt: skip
    return made, math.nan if weight.is_meta else math.sqrt(lost / total) if total else 0.0


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """``torch.cat``, by bytes where the dtype has 8 bits: not every device joins those."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal, where rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("quantising", total=total)
        yield lambda: progress.advance(task)
