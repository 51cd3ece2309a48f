"""One timed case: weights of a layer, input sets with their routing, the roof, and the exact answer on a sample."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F

from benchmarks.routings import router_logits
from benchmarks.shapes import Shape
from meta.arch import Arch
from meta.cost import roofline_us
from meta.dims import LayerProblem
from meta.routing import route
from meta.schemes import joined
from moe_ops.ops import parse

SAMPLED_TOKENS = 16  # tokens whose exact answer is computed, so that checking costs little next to timing
QUANTIZE_CHUNK = 8  # experts quantised at a time: the fp32 copies of all of them would not fit


@dataclass(frozen=True)
class InputSet:
    """Inputs of one call: hidden_states `[T, H]`, router_logits `[T, E]`, and their routing, `[T, K]` each."""

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


@dataclass
class Weights:
    """Both projections, `[E, 2I, H]` and `[E, H, I]`, and on demand other forms of them, each made once a shape."""

    shape: Shape
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    _forms: dict[str, Any] = field(default_factory=dict)

    def form(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` returned the first time that ``name`` was asked for."""
        if name not in self._forms:
            self._forms[name] = make()
        return self._forms[name]

    def arguments(self, scheme: str | None) -> dict[str, Any]:
        """The weight and scale arguments of `fused_moe`."""
        plain = {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        return plain if scheme is None else self.quantized(scheme)

    def quantized(self, scheme: str) -> dict[str, Any]:
        """The weight and scale arguments of `fused_moe` under a quantised scheme."""
        return self.form(scheme, lambda: self._quantize(scheme))

    def _quantize(self, scheme: str) -> dict[str, Any]:
        gate_up, gate_up_scales = _quantize(self.gate_up_proj, scheme)
        down, down_scales = _quantize(self.down_proj, scheme)
        scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
        return {"gate_up_proj": gate_up, "down_proj": down, **scales}


@dataclass(frozen=True)
class Case:
    """A shape at T tokens that are routed in one way."""

    shape: Shape
    T: int
    weights: Weights
    sets: list[InputSet]
    routing: str = "uniform"

    def roof_on(self, arch: Arch, scheme: str | None) -> float:
        """Least microseconds on ``arch``, from the experts really routed to (meta/cost.py)."""
        inputs = self.sets[0]
        lists: dict[str, Any] = {"gate_up_scales": (), "down_scales": (), **self.weights.arguments(scheme)}
        call = parse(
            "fused_experts", inputs.hidden_states, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids,
            scheme=scheme, **lists,
        )  # fmt: skip
        problem = cast(LayerProblem, call.problem)
        return statistics.mean(roofline_us(problem, arch, experts) for experts in self.distinct_experts)

    @cached_property
    def distinct_experts(self) -> list[int]:
        """Experts that each input set is routed to."""
        return [int(inputs.topk_ids.unique().numel()) for inputs in self.sets]

    @cached_property
    def sample(self) -> torch.Tensor:
        """Indices of the tokens that are checked."""
        device = self.sets[0].hidden_states.device
        return torch.arange(0, self.T, max(1, self.T // SAMPLED_TOKENS), device=device)[:SAMPLED_TOKENS]

    @cached_property
    def exact(self) -> torch.Tensor:
        """float64 output of the first input set at the sampled tokens, `[S, H]`, one expert at a time."""
        inputs = self.sets[0]
        rows_SH = inputs.hidden_states[self.sample].double()
        ids_SK = inputs.topk_ids[self.sample]
        weights_SK = inputs.topk_weights[self.sample].double()
        output_SH = torch.zeros_like(rows_SH)
        for expert in ids_SK.unique().tolist():
            token, slot = torch.where(ids_SK == expert)
            gate, up = (rows_SH[token] @ self.weights.gate_up_proj[expert].double().T).chunk(2, dim=-1)
            result = (F.silu(gate) * up) @ self.weights.down_proj[expert].double().T
            output_SH.index_add_(0, token, result * weights_SK[token, slot].unsqueeze(-1))
        return output_SH

    def error(self, output: torch.Tensor) -> float:
        """Relative error, in the Euclidean norm over the sample, of a peer's output for the first input set."""
        difference = output[self.sample].double() - self.exact
        return (difference.norm() / self.exact.norm()).item()


def input_sets(T: int) -> int:
    """How many input sets rotate: enough that a small batch's experts come from memory and not from the cache."""
    return 8 if T <= 64 else 2


def layer_weights(shape: Shape, dtype: torch.dtype, device: str) -> Weights:
    """Random weights of a layer."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    return Weights(shape, normal(shape.E, 2 * shape.I, shape.H), normal(shape.E, shape.H, shape.I))


def make_case(weights: Weights, T: int, routing: str = "uniform") -> Case:
    """Random inputs, routed under a distribution of benchmarks/routings.py."""
    shape, like = weights.shape, weights.gate_up_proj
    generator = torch.Generator(like.device).manual_seed(T)
    sets = []
    for _ in range(input_sets(T)):
        logits = router_logits(routing, shape, T, like.dtype, like.device, generator)
        topk_weights, topk_ids = route(logits, None, routing="softmax", top_k=shape.K, renormalize=True)
        hidden_states = torch.empty(T, shape.H, dtype=like.dtype, device=like.device).normal_(generator=generator)
        sets.append(InputSet(hidden_states, logits, topk_weights, topk_ids))
    return Case(shape, T, weights, sets, routing)


def _quantize(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    from moe_ops import quantize_weight

    parts = (quantize_weight(chunk, scheme=scheme) for chunk in weight.split(QUANTIZE_CHUNK))
    stored, scales = joined([(codes, of_codes) for codes, *of_codes in parts])
    return stored, list(scales)
