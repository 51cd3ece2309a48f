"""Other projects' layers that have a backward, timed by `train` only where their code is importable.

They are found like those of benchmarks/optional_peers.py. Weights and routing are everyone's; a peer's own is what it
computes from them, and by which kernels. A peer whose interface has changed fails in its own row.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.carry import LIBRARY, PEERS
from benchmarks.cases import Case
from benchmarks.models import own_code
from benchmarks.optional_peers import not_importable
from benchmarks.peers import transformers_routing

Tensor = torch.Tensor
Layer = Callable[[Tensor, Tensor], Tensor]  # hidden states `[T, H]` and router logits `[T, E]` to `[T, H]`


@dataclass(frozen=True)
class TrainingPeer:
    """A row of the comparison.

    Attributes:
        package: what has to be importable.
        distribution: what has its version.
        layers: case -> (a layer for each input set; both weights, which ask for no gradient yet).
        note: what to know of its times, for the method of the result file.
    """

    package: str
    distribution: str
    layers: Callable[[Case], tuple[list[Layer], list[Tensor]]]
    note: str

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        return not_importable(self.package)

    def describe(self) -> str:
        """Package, version and note."""
        path = [*sys.path, str(PEERS / LIBRARY)]
        found = importlib.metadata.distributions(name=self.distribution, path=path)
        version = next((distribution.version for distribution in found), "of unknown version")
        return f"{self.distribution} {version}, {self.note}"


class HostReads(TorchFunctionMode):
    """Integers that the host reads inside are waited for in the first call, and remembered in all that follow.

    A call that waits for the device cannot be captured in a graph. What is read depends on the inputs alone, which
    never change here. Only integers: Triton's autotuner, in the first call, reads times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[int] = []
        self.asked = 0

    def __enter__(self) -> HostReads:
        self.asked = 0
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.item or args[0].is_floating_point():
            return func(*args, **(kwargs or {}))
        if self.asked == len(self.values):
            self.values.append(func(*args))
        self.asked += 1
        return self.values[self.asked - 1]


def leaves(case: Case) -> list[Tensor]:
    """Both weights, `[E, 2I, H]` and `[E, H, I]`, as leaves of their own: one that is trained changes no other peer."""
    return [tensor.detach() for tensor in (case.weights.gate_up_proj, case.weights.down_proj)]


def compiled_routing(top_k: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Router logits to weights in their dtype and ids of 32 bits, `[T, K]` each."""

    def routing(router_logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = transformers_routing(router_logits, top_k)
        return values, ids.to(torch.int32)

    return torch.compile(own_code(routing), fullgraph=True, dynamic=False)


def liger(case: Case) -> tuple[list[Layer], list[Tensor]]:
    """LinkedIn's Liger: its function of the experts, which takes our layout of weights."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    weights, routing = leaves(case), compiled_routing(case.shape.K)

    def bind() -> Layer:
        reads = HostReads()

        def layer(hidden_states: Tensor, router_logits: Tensor) -> Tensor:
            values, ids = routing(router_logits)
            with reads:
                return LigerFusedMoEFunction.apply(hidden_states, *weights, ids, values)

        return layer

    return [bind() for _ in case.sets], weights


def sonicmoe(case: Case) -> tuple[list[Layer], list[Tensor]]:
    """SonicMoE, its function for routing from elsewhere: it takes pairs in the order of their tokens, weights with the
    experts last in shape and first in memory, which ours are after a permutation, and all gate rows before all up rows.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    weights, routing = leaves(case), compiled_routing(case.shape.K)
    tokens = torch.arange(case.T, dtype=torch.int32, device=weights[0].device).repeat_interleave(case.shape.K)

    def layer(hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        values, ids = routing(router_logits)
        gate_up, down = (weight.permute(1, 2, 0) for weight in weights)
        stream = torch.cuda.current_stream().cuda_stream  # under capture not the one that prepares
        output, _ = moe_general_routing_inputs(
            hidden_states, values.flatten(), tokens, ids.flatten(), gate_up, None, down, None, case.shape.E, stream,
            ActivationType.SWIGLU, is_inference_mode_enabled=not torch.is_grad_enabled(), concat_layout=True,
        )  # fmt: skip
        return output

    return [layer] * len(case.sets), weights


FROZEN = "its backward computes gradients of frozen weights too"
OPTIONAL = {
    "liger": TrainingPeer(
        "liger_kernel",
        "liger-kernel",
        liger,
        "routing compiled, experts by LigerFusedMoEFunction; it waits for the number of its tiles in every forward, "
        f"here in the first alone, so that a graph can be captured; {FROZEN}",
    ),
    "sonicmoe": TrainingPeer(
        "sonicmoe",
        "sonic-moe",
        sonicmoe,
        f"routing compiled, experts by moe_general_routing_inputs, not by its own routing; {FROZEN}",
    ),
}
