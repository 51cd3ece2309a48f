"""How tokens are spread over experts: router logits, from which every peer takes the same routing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.shapes import Shape

ZIPF_EXPONENT = 1.2
NEVER = -30.0  # added to the logits of experts not to be chosen: finite, as a router's are

# Each from independent standard normal logits [T, E], and random numbers of its own.
Spread = Callable[[torch.Tensor, Shape, torch.Generator], torch.Tensor]


def router_logits(
    routing: str, shape: Shape, T: int, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Logits `[T, E]` under a distribution of ROUTINGS.

    Raises:
        ValueError: the shape does not allow it.
    """
    normal = torch.empty(T, shape.E, dtype=dtype, device=device).normal_(generator=generator)
    return ROUTINGS[routing](normal, shape, generator)


def _uniform(logits: torch.Tensor, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Nearly uniform routing: the heaviest in memory traffic for a given T."""
    return logits


def _zipf(logits: torch.Tensor, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """An expert's popularity is rank ** -1.2. Top-k of log popularity plus Gumbel noise samples without replacement."""
    rank_E = 1 + _shuffled(shape.E, logits.device, generator)
    uniform = torch.empty(logits.shape, device=logits.device).uniform_(1e-6, 1 - 1e-6, generator=generator)
    return (-ZIPF_EXPONENT * rank_E.log() - (-uniform.log()).log()).to(logits.dtype)


def _half_empty(logits: torch.Tensor, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Half of the experts are never chosen."""
    chosen = shape.E - shape.E // 2
    if chosen < shape.K:
        raise ValueError(
            f"benchmarks: --routing half_empty must leave {shape.K} experts of a token, got {chosen} of "
            f"{shape.E} ({shape.name}). Time it with another shape."
        )
    return _only(chosen, logits, generator)


def _k_experts(logits: torch.Tensor, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """All tokens on the same K experts."""
    return _only(shape.K, logits, generator)


def _only(chosen: int, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    never_E = _shuffled(logits.shape[1], logits.device, generator) >= chosen
    return logits + never_E.to(logits.dtype) * NEVER


def _shuffled(E: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Ranks from 0 by expert, in random order: popular experts are no neighbours."""
    return torch.randperm(E, device=device, generator=generator)


ROUTINGS: dict[str, Spread] = {"uniform": _uniform, "zipf": _zipf, "half_empty": _half_empty, "k_experts": _k_experts}
