"""What a check is given: its rank, the groups, and MoE layers whose tokens and experts it takes its share of."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ops

#: Seconds that a collective, and a rank of `moe_ops.ep`, waits for the others: what a check that hangs costs.
PATIENCE = 30
CROSSING = ("gather", "all_to_all", "replicated")
TRANSPORTS = (*CROSSING, "local")
ROUTINGS = ("uniform", "one_rank", "idle_rank", "holes")
E, K, H, I = 8, 3, 32, 16
#: Of fp8_block128: two scales for a row, the second of a part of a block.
WIDE = 160


class Layer(NamedTuple):
    """One MoE layer and its tokens: of all ranks together, T for each.

    Attributes:
        x, weights, ids: ``[W * T, H]`` and ``[W * T, K]``.
        gate_up, down: of all experts.
        of_experts: other tensors, and lists of them, with a row for each expert: arguments of `moe_ops.fused_experts`.
        options: the rest of its arguments.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    of_experts: dict[str, Any]
    options: dict[str, Any]

    def alone(self, ids: Tensor | None = None) -> Tensor:
        """The result of one process that has all tokens and experts."""
        return moe_ops.fused_experts(
            self.x, self.gate_up, self.down, self.weights, self.ids if ids is None else ids,
            **self.of_experts, **self.options,
        )  # fmt: skip


class Ranks:
    """This process among those that run a check.

    Attributes:
        rank, size: of this process.
        group: of all processes.
        alone: of this process.
        errors: what :meth:`expect` found wrong. It does not raise: a rank that left would keep the others waiting.
        turn: how often one rank has compiled for all.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.errors, self.turn = rank, size, list[str](), 0
        self.alone = [dist.new_group([member]) for member in range(size)][rank]
        self.group = self.new_group()

    def new_group(self, ranks: list[int] | None = None) -> Any:
        """A group of all ranks, or of some; every rank calls it."""
        return dist.new_group(ranks, timeout=timedelta(seconds=PATIENCE))

    def compiles(self) -> bool:
        """Whether it is this rank's turn to compile. The others run eager code: what crosses is the same, so that code
        of the two kinds shows more than two of one, and a compilation is paid for once.
        """
        self.turn += 1
        return self.turn % self.size == self.rank

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function, compiled on the rank whose turn it is."""
        return torch.compile(function, fullgraph=True, **options) if self.compiles() else function

    def expect(self, fine: bool, message: str, *got_and_want: Tensor) -> None:
        if not fine:
            self.errors.append(f"{message}: {_difference(*got_and_want)}" if got_and_want else message)

    def same(self, got: Tensor, want: Tensor, what: str) -> None:
        """Equal to the bit."""
        alike = got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)
        self.expect(alike, what, got, want)

    def close(self, got: Tensor, want: Tensor, within: float | Tensor, what: str) -> None:
        """No further than ``within``: for each element, or times the largest one."""
        alike = got.shape == want.shape and got.dtype == want.dtype
        if alike and want.numel():
            bound = within if isinstance(within, Tensor) else within * want.abs().max().double()
            alike = bool(((got.double() - want.double()).abs() <= bound).all())
        self.expect(alike, what, got, want)

    def group_of(self, transport: str | None) -> Any:
        return self.alone if transport == "local" else self.group

    def share(self, transport: str | None, tensor: Tensor) -> Tensor:
        """Of a tensor for the tokens of all ranks, the part that this rank passes and gets back."""
        return tensor if transport == "replicated" else tensor.tensor_split(self.size)[self.rank]

    def held(self, transport: str | None, tensor: Any) -> Any:
        """Of a tensor for all experts, this rank's block; of lists, lists."""
        if isinstance(tensor, list):
            return [self.held(transport, each) for each in tensor]
        return tensor if transport == "local" else tensor.tensor_split(self.size)[self.rank]

    def run(self, layer: Layer, transport: str | None, **more: Any) -> Tensor:
        """This rank's part of the layer."""
        of_experts = {name: self.held(transport, tensor) for name, tensor in layer.of_experts.items()}
        x, weights, ids = (self.share(transport, tensor) for tensor in (layer.x, layer.weights, layer.ids))
        gate_up, down = (self.held(transport, tensor) for tensor in (layer.gate_up, layer.down))
        options = {"group": self.group_of(transport), "transport": transport, **of_experts, **layer.options, **more}
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, **options)


def _difference(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    distance = (got.double() - want.double()).abs()
    return f"by up to {distance.max().item():.3g} in {int((distance > 0).sum())} of {distance.numel()} elements"


class Check(NamedTuple):
    """What every rank runs, in how many processes."""

    run: Callable[[Ranks], None]
    sizes: tuple[int, ...] = (2,)


def integers(tokens: int, **sizes: int) -> Layer:
    """Small integers in fp32, and an activation that keeps them: sums in any order are exact."""
    x, weights, ids, up, down = random(tokens, **sizes)[:5]
    up = up[:, : down.shape[2]]
    whole = [(tensor * 8).round().clamp(-3, 3) for tensor in (x, weights, up, down)]
    return Layer(*whole[:2], ids, *whole[2:], {}, {"activation": "relu", "glu_layout": "none"})


def random(
    tokens: int, dtype: torch.dtype = torch.float32, *, experts: int = E, width: int = H, seed: int = 0
) -> Layer:
    """Random numbers, the same on every rank."""
    made = torch.Generator().manual_seed(seed)
    x, gate_up, down = (
        torch.randn(shape, generator=made).to(dtype)
        for shape in ((tokens, width), (experts, 2 * I, width), (experts, width, I))
    )
    ids = torch.rand(tokens, experts, generator=made).topk(K).indices
    return Layer(x, torch.rand(tokens, K, generator=made), ids, gate_up / width**0.5, down / I**0.5, {}, {})


def quantised(tokens: int, scheme: str = "fp8_block128") -> Layer:
    """bf16 rows and quantised weights."""
    layer = random(tokens, torch.bfloat16, width=WIDE)
    (gate_up, *first), (down, *second) = (
        moe_ops.quantize_weight(weight, scheme=scheme) for weight in (layer.gate_up, layer.down)
    )
    return layer._replace(
        gate_up=gate_up, down=down, of_experts={"gate_up_scales": first, "down_scales": second},
        options={"scheme": scheme},
    )  # fmt: skip


def routed(layer: Layer, routing: str, size: int) -> Layer:
    """The layer with ids of a kind."""
    made, ids = torch.Generator().manual_seed(1), layer.ids
    experts = layer.gate_up.shape[0]
    if routing == "one_rank":  # of the last rank all; a token may name one twice
        block = experts // size
        ids = torch.randint(experts - block, experts, ids.shape, generator=made)
    elif routing == "idle_rank":  # the tokens of the first rank go nowhere
        ids = ids.clone()
        ids[: ids.shape[0] // size] = -1
    elif routing == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=made) < 0.4, -1, ids)
    return layer._replace(ids=ids)
