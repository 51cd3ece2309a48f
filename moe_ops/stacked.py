"""Where a model keeps experts as stacks: modules with two or three 3-D parameters of their own over the same experts.

Found by structure: widths that are those of experts, ``[E, I or 2I, H]`` and ``[E, H, I]``, or both transposed. Where
none fit, or not these alone, by the names that transformers gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations

from torch import Tensor, nn

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


def stacked_experts(model: nn.Module) -> Iterator[StackedExperts]:
    """Every module with stacked experts, in the order of ``named_modules()``."""
    for name, module in model.named_modules():
        stacked = {key: value for key, value in module.named_parameters(recurse=False) if value.dim() == 3}
        names = _by_shape(stacked) or next((known for known in _NAMES if stacked.keys() >= {*known}), None)
        if names is None:
            continue
        ways = _ways([stacked[key] for key in names])
        said = getattr(module, "is_transposed", None)
        if said is None or (ways and said not in ways):
            said = _only(ways, stacked[names[0]].shape[0], model)
        yield StackedExperts(name, module, names, bool(ways), None if said is None else bool(said))


def _by_shape(stacked: dict[str, Tensor]) -> tuple[str, ...] | None:
    """The only three, or two, that have the shapes of experts."""
    for count in (3, 2):
        groups = [keys for keys in combinations(stacked, count) if _ways([stacked[key] for key in keys])]
        if len(groups) == 1:
            return groups[0]
    return None


def _only(ways: dict[bool, set[int]], num_experts: int, model: nn.Module) -> bool | None:
    """The one of `_ways`, or the only one whose hidden width the model shows elsewhere: a router's, which has a row for
    every expert, or else those of norms.
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


def _ways(weights: list[Tensor]) -> dict[bool, set[int]]:
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
