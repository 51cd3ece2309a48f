"""Where a model keeps experts as stacks: modules with two or three 3-D parameters of their own over the same experts.

Found by structure: widths that are those of experts, ``[E, I or 2I, H]`` and ``[E, H, I]``, or both transposed. Where
none fit, or not these alone, by the names that transformers gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
from torch import Tensor, nn

from meta.checks import describe_value, fail

#: In the order of the products.
_NAMES = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))


@dataclass(frozen=True)
class StackedExperts:
    """A module with stacked experts.

    Attributes:
        name: in ``named_modules()``.
        module: as it is found.
        names: of its parameters.
        fits: whether their shapes are those of experts.
        transposed: they are stored ``[E, K, N]``: what the only orientation that fits says, else the module's
            ``is_transposed``, else the orientation whose hidden width is that of a router or of norms, else None.
    """

    name: str
    module: nn.Module
    names: tuple[str, ...]
    fits: bool
    transposed: bool | None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By the names that they have in the model."""
        return {f"{self.name}.{name}".lstrip("."): getattr(self.module, name) for name in self.names}


def stacked_experts(model: nn.Module, *, every_name: bool = False) -> Iterator[StackedExperts]:
    """Every module with stacked experts, in the order of ``named_modules()``; or by each of its names, where it has
    several.
    """
    for name, module in model.named_modules(remove_duplicate=not every_name):
        stacked = _stacks(module)
        names = _names(stacked)
        if names is None:
            continue
        ways = orientations([stacked[key] for key in names])
        said = getattr(module, "is_transposed", None)
        if said is None or (ways and said not in ways):
            said = _only(ways, stacked[names[0]].shape[0], model)
        yield StackedExperts(name, module, names, bool(ways), None if said is None else bool(said))


def unclear_stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules in which several pairs of 3-D parameters have the shapes of experts, and no names say which are them."""
    for name, module in model.named_modules():
        stacked = _stacks(module)
        if _names(stacked) is None and any(_groups(stacked)):
            yield name, module


def selected(
    op: str, model: nn.Module, filter: Callable[[str, nn.Module], bool] | None, among: Iterable[StackedExperts]
) -> tuple[list[StackedExperts], list[StackedExperts]]:
    """Those of ``among`` that the filter takes, and all others of the model.

    Raises:
        ValueError: the filter is no function, or takes a module of TorchScript, whose parameters cannot be replaced.
    """
    if filter is not None and not callable(filter):
        raise fail(op, "filter", "a function (name, module) -> bool or None", describe_value(filter))
    taken = [one for one in among if filter is None or filter(one.name, one.module)]
    for one in taken:
        if isinstance(one.module, torch.jit.ScriptModule):
            cure = "Call it before torch.jit.trace or torch.jit.script, or leave the module out by the filter."
            raise fail(op, one.name or "model", "a module of Python", type(one.module).__name__, cure)
    names = {one.name for one in taken}
    return taken, [one for one in stacked_experts(model) if one.name not in names]


def check_filter(op: str, taken: list[StackedExperts], refused: list[StackedExperts]) -> None:
    """No parameter is in a module that is taken, and in one that is not.

    Raises:
        ValueError: naming both.
    """
    names = {id(weight): name for one in refused for name, weight in one.parameters.items()}
    for one in taken:
        for name, weight in one.parameters.items():
            if id(weight) in names:
                rule = f"the same for {name} and {names[id(weight)]}, one parameter of two names"
                raise fail(op, "filter", rule, "True and False", "Take both, or give one a parameter of its own.")


def check_orientation(op: str, experts: StackedExperts) -> None:
    """The shapes are those of experts, and say how they are stored, or the module or model does.

    Raises:
        ValueError: naming the module.
    """
    if experts.transposed is None or not experts.fits:
        shapes = [list(weight.shape) for weight in experts.parameters.values()]
        cure = f"{'Set module.is_transposed, or pass' if experts.fits else 'Pass'} a filter that leaves it out."
        got = f"{shapes}, {'both' if experts.fits else 'neither'}"
        raise fail(op, experts.name or "model", "of shapes that are [E, N, K] or [E, K, N]", got, cure)


def check_memory(op: str, model: nn.Module, found: list[StackedExperts]) -> None:
    """No weight is one that a hook of accelerate fills, and empties, around each call: it would do so for ever.

    Raises:
        ValueError: naming the weight.
    """
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        return
    for experts in found:
        for name, weight in experts.parameters.items():
            if weight.is_meta:
                before = "Quantise and load before offloading"
                cure = f"{before}, or take accelerate.hooks.remove_hook_from_submodules(model) first."
                raise fail(op, name, "in memory", "one on meta beside hooks of accelerate", cure)


def places_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every module that has a parameter, and its name there, by the parameter's identity."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((module, name))
    return found


def _stacks(module: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in module.named_parameters(recurse=False) if value.dim() == 3}


def _names(stacked: dict[str, Tensor]) -> tuple[str, ...] | None:
    """The only three, or two, that have the shapes of experts, or those with their names."""
    by_shape = next((groups[0] for groups in _groups(stacked) if len(groups) == 1), None)
    return by_shape or next((known for known in _NAMES if stacked.keys() >= {*known}), None)


def _groups(stacked: dict[str, Tensor]) -> list[list[tuple[str, ...]]]:
    """Every three of them that have the shapes of experts, and every two."""
    return [
        [keys for keys in combinations(stacked, count) if orientations([stacked[key] for key in keys])]
        for count in (3, 2)
    ]


def _only(ways: dict[bool, set[int]], num_experts: int, model: nn.Module) -> bool | None:
    """The one of `orientations`, or the only one whose hidden width the model shows elsewhere: a router's, which has a
    row for every expert, or else those of norms.
    """
    if len(ways) < 2:
        return next(iter(ways), None)
    shapes = [weight.shape for weight in model.parameters()]
    routers = {shape[1] for shape in shapes if len(shape) == 2 and shape[0] == num_experts}
    norms = {shape[0] for shape in shapes if len(shape) == 1}
    for known in (routers, norms):
        fitting = [way for way, widths in ways.items() if widths & known]
        if len(fitting) == 1:
            return fitting[0]
    return None


def orientations(weights: list[Tensor]) -> dict[bool, set[int]]:
    """Whether they are experts as ``[E, N, K]`` (False is there) or transposed (True), and of which hidden widths."""
    if len({weight.shape[0] for weight in weights}) > 1:
        return {}
    found: dict[bool, set[int]] = {}
    for transposed in (False, True):
        shapes = [weight.shape[:0:-1] if transposed else weight.shape[1:] for weight in weights]
        for (hidden, width), *firsts in permutations(shapes):
            rows = (width,) if len(firsts) > 1 else (width, 2 * width)
            if all(N in rows and K == hidden for N, K in firsts):
                found.setdefault(transposed, set()).add(hidden)
    return found
