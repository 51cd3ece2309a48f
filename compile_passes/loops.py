"""Expert loops that no compiler can capture: switch transformers models to a form that can be, name the others.

A loop over the experts that were hit (`for e in hit.nonzero()`) has a trip count that only the data knows. Dynamo
breaks the graph there, and the expert products are in no graph at all, so that no pass can find them.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from dataclasses import dataclass

from torch import nn

log = logging.getLogger(__name__)

CAPTURABLE = "grouped_mm"
# What transformers' `use_experts_implementation` sets on every instance of a class that it decorates.
_DECORATED = ("config", "has_gate", "has_bias", "is_transposed")
_SETTING = "_experts_implementation"
_DATA_DEPENDENT = ("nonzero", "torch.where(", ".tolist()", ".item()", "index_add_", "bincount")


@dataclass(frozen=True)
class ExpertLoop:
    """A module that runs its experts in a Python loop. ``switchable``: transformers offers the same in one graph."""

    name: str
    module: nn.Module
    switchable: bool


def find_loops(model: nn.Module) -> list[ExpertLoop]:
    """Modules whose experts run as a Python loop: transformers experts on "eager", or a loop over hits."""
    found = []
    for name, module in model.named_modules():
        if all(hasattr(module, attribute) for attribute in _DECORATED):
            if getattr(module.config, _SETTING, None) == "eager":
                found.append(ExpertLoop(name, module, switchable=True))
        elif _holds_experts(name, module) and _loops_over_data(type(module)):
            found.append(ExpertLoop(name, module, switchable=False))
    return found


def prepare(model: nn.Module) -> None:
    """Make the experts of ``model`` capturable where transformers can, and warn about what was and was not done."""
    loops = find_loops(model)
    switch = getattr(model, "set_experts_implementation", None)
    if any(loop.switchable for loop in loops) and switch is not None:
        switch(CAPTURABLE)
        for loop in loops:
            if loop.switchable:
                setattr(loop.module.config, _SETTING, CAPTURABLE)
        _say(
            f'moe_ops.compile: switched the experts of {type(model).__name__} from the "eager" loop, which cannot be '
            f'captured, to experts_implementation="{CAPTURABLE}".'
        )
    rest = [loop for loop in loops if not (loop.switchable and switch is not None)]
    if rest:
        _say(
            f"moe_ops.compile: {rest[0].name or type(rest[0].module).__name__} ({type(rest[0].module).__name__}) and "
            f"{len(rest) - 1} more run their experts in a Python loop, which cannot be captured; they are left as is. "
            "Store the experts as stacked [E, N, K] weights and use F.grouped_mm or moe_ops.fused_experts."
        )


def _say(message: str) -> None:
    log.info(message)
    warnings.warn(message, stacklevel=4)


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Whether ``module`` is called like experts or has a list of them."""
    lists = (child for child, value in module.named_children() if isinstance(value, nn.ModuleList))
    return "expert" in name.rsplit(".", 1)[-1] or any("expert" in child for child in lists)


def _loops_over_data(kind: type[nn.Module]) -> bool:
    """Whether the source of ``forward`` has a loop next to an operation whose result size depends on the data."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return re.search(r"^\s*for ", source, re.MULTILINE) is not None and any(word in source for word in _DATA_DEPENDENT)
