"""Fake implementations: a shape rule's answer, allocated. Nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta.checks import Checked

Outputs = Tensor | tuple[Tensor, ...]


def make_fake(rule: Callable[..., Checked]) -> Callable[..., Outputs]:
    """A fake implementation with the signature of ``rule``: contiguous, uninitialised outputs."""

    def fake(*args: Any, **kwargs: Any) -> Outputs:
        checked = rule(*args, **kwargs)
        outputs = tuple(torch.empty(sizes, dtype=dtype, device=checked.device) for sizes, dtype in checked.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    return fake
