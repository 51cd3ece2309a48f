"""A training step of one layer, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.cases import InputSet


@dataclass(frozen=True)
class Step:
    """Forward and backward of a layer on one input set."""

    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: InputSet
    grad_output: torch.Tensor
    weights: Sequence[torch.Tensor]

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Gradients of hidden states, logits and the weights."""
        leaves = self._leaves()
        output = self.layer(*leaves)
        return torch.autograd.grad(output, [*leaves, *self.weights], self.grad_output)

    def saving(self) -> torch.Tensor:
        """The output, and behind it what a backward needs."""
        return self.layer(*self._leaves())

    def forward(self) -> torch.Tensor:
        """The output, without what a backward needs."""
        with torch.no_grad():
            return self.layer(self.inputs.hidden_states, self.inputs.router_logits)

    def _leaves(self) -> list[torch.Tensor]:
        return [tensor.detach().requires_grad_() for tensor in (self.inputs.hidden_states, self.inputs.router_logits)]


def peak_bytes(step: Step) -> int | None:
    """Memory that one call needs for a while, beyond its inputs and the gradients that it returns; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = step()
    torch.cuda.synchronize()
    held = sum(grad.untyped_storage().nbytes() for grad in grads)
    return torch.cuda.max_memory_allocated() - before - held


def saved_bytes(step: Step) -> int | None:
    """Memory between forward and backward, beyond inputs and output; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = step.saving()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - output.untyped_storage().nbytes()
