"""Fake implementations: a rule's answer, allocated. Nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from meta.calls import Call

Outputs = Tensor | tuple[Tensor, ...]


def allocate(call: Call) -> Outputs:
    """Contiguous, uninitialised outputs."""
    outputs = tuple(torch.empty(sizes, dtype=dtype, device=call.device) for sizes, dtype in call.outputs)
    return outputs[0] if len(outputs) == 1 else outputs
