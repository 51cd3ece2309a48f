"""Narrower copies of a block: the same code and the same number of experts on a fraction of the widths.

All widths are divided by one factor, so that sums, halves and multiples of them fit as before. Code that has a width
from somewhere else (a global, a product of two widths) does not run on such a copy, and nothing is concluded from it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compile_passes.loops import LISTS, numbered_experts
from moe_ops.quantized import QuantizedWeight

_LEAST = 64  # smaller sizes are those of heads, groups and the like
_MULTIPLE = 16  # of every width: 32 bytes of bf16, as matrix kernels ask
_COUNTS = ("num", "n_", "experts_per", "ep_")  # how names of numbers of experts begin
_PARTS = (2, 3, 4)  # of which a weight may be stacked


@dataclass(frozen=True)
class Narrowing:
    """``widths`` of a block become ``factor`` times smaller; all other sizes stay."""

    factor: int
    widths: frozenset[int]

    def size(self, value: int) -> int:
        """A size in the narrower copy."""
        return value // self.factor if value in self.widths else value

    def widened(self, value: int) -> int:
        """The size of which ``value`` is that in the narrower copy."""
        return value * self.factor if value * self.factor in self.widths else value


FULL = Narrowing(1, frozenset())


def narrowing(block: nn.Module) -> Narrowing | None:
    """By how much a block can be narrowed; None where its widths have no factor in common that is of use."""
    weights = [tensor for tensor in (*block.parameters(), *block.buffers()) if tensor.is_floating_point()]
    counts = {weight.shape[0] for weight in weights if weight.dim() > 2}
    counts |= {len(module) for module in block.modules() if isinstance(module, LISTS)}
    counts |= {len(numbered_experts(module)[1]) for module in block.modules()} - {0}
    settings = list(_settings(block))
    counts |= {value for name, value in settings if "expert" in name and name.startswith(_COUNTS)}
    found = {size for weight in weights for size in weight.shape if size >= _LEAST} - counts
    multiples = {*counts, *_PARTS}
    widths = found | {
        value
        for _, value in settings
        if value >= _LEAST and value not in counts and any(value * times in found for times in multiples)
    }
    if not widths:
        return None
    shared, kept = math.gcd(*widths), counts | {size for weight in weights for size in weight.shape} - widths
    for factor in range(min(widths) // _MULTIPLE, 1, -1):
        if shared % (factor * _MULTIPLE) == 0 and not kept & {width // factor for width in widths}:
            return Narrowing(factor, frozenset(widths))
    return None


def narrow_copy(block: nn.Module, to: Narrowing, device: torch.device) -> nn.Module:
    """A copy with the first values of each weight and buffer along each width; quantised weights are numbers in it."""
    memo: dict[int, Any] = {}
    for weight in block.parameters():
        made = _part(weight, to, device)
        memo[id(weight)] = nn.Parameter(made, weight.requires_grad)
    memo.update({id(value): _part(value, to, device) for value in block.buffers()})
    copied = copy.deepcopy(block, memo)
    if not to.widths:
        return copied
    seen: set[int] = set()
    for module, original in zip(copied.modules(), block.modules(), strict=True):
        _set_sizes(module, original, to, seen)
    return copied


def _part(value: Tensor, to: Narrowing, device: torch.device) -> Tensor:
    if isinstance(value, QuantizedWeight):
        value = value.dequantize()
    return value.detach()[tuple(slice(to.size(size)) for size in value.shape)].to(device, copy=True)


def _settings(block: nn.Module) -> Iterator[tuple[str, int]]:
    """Names and values of the numbers that are set on modules and on what hangs on them."""
    seen: set[int] = set()
    waiting: list[Any] = list(block.modules())
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in vars(owner).items():
            if type(value) is int:
                yield name, value
            elif _is_record(value):
                waiting.append(value)


def _set_sizes(copied: Any, original: Any, to: Narrowing, seen: set[int]) -> None:
    """Write the narrower sizes into the attributes of a copy, and of the objects that were copied with it."""
    if copied is original or id(copied) in seen:
        return
    seen.add(id(copied))
    for name, value in list(vars(original).items()):
        if type(value) is int:
            vars(copied)[name] = to.size(value)
        elif type(value) in (tuple, list) and all(type(size) is int for size in value):
            vars(copied)[name] = type(value)(to.size(size) for size in value)
        elif _is_record(value):
            _set_sizes(vars(copied)[name], value, to, seen)


def _is_record(value: Any) -> bool:
    """Whether a value is an object with attributes of its own: a configuration, say."""
    return hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | Tensor) and not callable(value)
