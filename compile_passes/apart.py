"""Inputs of a graph that a fusion needs to be different memory, looked at in every call.

A graph that overwrites one input (a counter of tokens per expert, say) and reads another inside a block is fused on the
condition that the two do not overlap. No fake tensor shows whether they will in the next call, and Dynamo has no guard
for it: `StorageOverlap` compares offsets in one storage that it takes for granted. So the compiled code is entered
through a check of the addresses, and where it fails, the graph as it was captured runs instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch

from compile_passes.compat import inner_tensors

log = logging.getLogger(__name__)


def guarded(
    compiled: Callable[..., Any], original: Callable[..., Any], pairs: Iterable[tuple[int, int]]
) -> Callable[..., Any]:
    """``compiled`` for calls in which no pair of inputs shares memory, ``original`` for all others.

    Args:
        pairs: positions of inputs.
    """
    places = sorted(set(pairs))

    def run(*inputs: Any) -> Any:
        if any(overlap(inputs[one], inputs[other]) for one, other in places):
            log.info("inputs share memory that the fused code needs to be apart: this call runs as it was captured")
            return original(*inputs)
        return compiled(*inputs)

    return run


def overlap(left: Any, right: Any) -> bool:
    """Whether the storages of two tensors may have a byte in common."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    return any(_overlap(one, other) for one, other in product(inner_tensors(left), inner_tensors(right)))


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    try:
        (start, size), (other, length) = _span(left), _span(right)
    except (NotImplementedError, RuntimeError):  # no storage to look at
        return True
    return left.device == right.device and start < other + length and other < start + size


def _span(tensor: torch.Tensor) -> Sequence[int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
