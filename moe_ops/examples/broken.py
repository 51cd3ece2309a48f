"""Five ways in which a Mixture-of-Experts model loses its speed under torch.compile without an error, and what
`moe_ops.testing` says of each: `python -m moe_ops.examples.broken`.

Every model here is `Sound` with one method changed. All of them run and give their right results: without a check
nobody notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ops.testing import assert_cuda_graph_safe, assert_fused, assert_no_recompiles

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 32, 16


class Sound(nn.Module):
    """A block that is fused: router, top-k, gathered expert weights, weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up_experts = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5)
        self.down_experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return self.combine(self.experts(self.rows(x), ids.reshape(-1)), weights)

    def rows(self, x: Tensor) -> Tensor:
        """One row for each token and slot, the slots of a token beside each other."""
        return x.repeat_interleave(TOP_K, dim=0)

    def experts(self, rows: Tensor, ids: Tensor) -> Tensor:
        return self.down(self.activation(self.up(rows, ids)), ids)

    def up(self, rows: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.gate_up_experts[ids], rows.unsqueeze(-1)).squeeze(-1)

    def activation(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up

    def down(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(self.down_experts[ids], hidden.unsqueeze(-1)).squeeze(-1)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return (rows * weights.reshape(-1, 1)).view(-1, TOP_K, HIDDEN).sum(1)


class GraphBreak(Sound):
    """A check of the values between the products: Python has to know them before it goes on."""

    def activation(self, hidden: Tensor) -> Tensor:
        if hidden.isnan().any():
            raise FloatingPointError("the experts' hidden values are NaN")
        return super().activation(hidden)


class Recompiles(Sound):
    """Tokens in chunks of 16 by a Python loop, whose length is burnt into the compiled code."""

    def forward(self, x: Tensor) -> Tensor:
        chunks = [x[start : start + 16] for start in range(0, x.shape[0], 16)]
        return torch.cat([super(Recompiles, self).forward(chunk) for chunk in chunks])


class HostSync(Sound):
    """The size of the result is a value on the device, for which the host waits in every call."""

    def experts(self, rows: Tensor, ids: Tensor) -> Tensor:
        used = int(ids.max()) + 1
        return super().experts(rows, ids.clamp(max=used - 1))


class WrongLayout(Sound):
    """Rows of gate and up in turns of eight, as weights are packed for some kernels."""

    def activation(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.view(-1, WIDTH // 8, 2, 8).unbind(2)
        return (F.silu(gate) * up).reshape(-1, WIDTH)


class Escapes(Sound):
    """The experts' hidden values leave the block for a statistic, so that they have to be in memory."""

    def activation(self, hidden: Tensor) -> Tensor:
        self.norm = hidden.norm()
        return super().activation(hidden)


@dataclass(frozen=True)
class Example:
    """A broken model, the check that finds it, and what mends it."""

    model: type[Sound]
    check: Callable[[Sound], object]
    cure: str

    def message(self) -> str:
        """What the check says.

        Raises:
            ValueError: nothing; the check passes.
        """
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                self.check(self.model())
        except AssertionError as error:
            return str(error)
        raise ValueError(f"{self.model.__name__}: the check must fail on a model that is broken, and passes.")


def tokens(size: int = 12) -> Tensor:
    """Hidden states of ``size`` tokens."""
    return torch.randn(size, HIDDEN)


def _fused(model: Sound) -> object:
    return assert_fused(model, tokens(), blocks=1)


EXAMPLES = {
    "a graph break": Example(GraphBreak, _fused, "Check outside of the model, or with torch._assert_async."),
    "a compilation for every batch size": Example(
        Recompiles,
        lambda model: assert_no_recompiles(model, tokens, sizes=(4, 20, 40)),
        "Leave the loop out: the operators bound their own workspace.",
    ),
    "a wait for the device": Example(
        HostSync, lambda model: assert_cuda_graph_safe(model, tokens()), "Size by the number of experts."
    ),
    "a wrong layout": Example(WrongLayout, _fused, "Store all rows of the gate first, then those of up."),
    "a value that escapes": Example(Escapes, _fused, "Take statistics of what goes into the block or comes out of it."),
}


def main() -> None:
    """Print what is said of every example, and what mends it."""
    for name, example in EXAMPLES.items():
        print(f"{name} ({example.model.__name__})\n\n{example.message()}\n\nHere: {example.cure}\n")


if __name__ == "__main__":
    main()
