"""torchtitan's dispatcher over two processes, in a layer such as torchtitan's; its base class is played here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import moe_ops
from tests.distributed.doors import Checks

E, K, D, WIDTH, T = 8, 3, 32, 16, 11


class BaseEPTokenDispatcher:
    """What torchtitan's class of this name gives: sizes from a configuration, and the mesh."""

    @dataclass(kw_only=True)
    class Config:
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: DeviceMesh | None = None

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        self.ep_mesh = ep_mesh


def dispatcher(ranks: int) -> Any:
    """Ours, as torchtitan would make it."""
    name = "torchtitan.models.common.token_dispatcher"
    if name not in sys.modules:
        module = ModuleType(name)
        module.BaseEPTokenDispatcher = BaseEPTokenDispatcher  # type: ignore[attr-defined]
        parents = name.split(".")[:-1]
        sys.modules |= {".".join(parents[: i + 1]): ModuleType(parents[i]) for i in range(len(parents))}
        sys.modules[name] = module
    from moe_ops.integrations.torchtitan import TokenDispatcher

    made = TokenDispatcher(TokenDispatcher.Config(num_experts=E, top_k=K))
    made.wire_meshes(ep_mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)) if ranks > 1 else None)
    return made


def block(given: Any, x: Tensor, scores: Tensor, ids: Tensor, weights: list[Tensor]) -> Tensor:
    """torchtitan's routed experts: dispatch, three grouped products, combine."""
    w1, w2, w3 = weights
    rows, counts, metadata = given.dispatch(x, scores, ids, counts_of(ids))
    ends = counts.cumsum(0, dtype=torch.int32)
    h = F.silu(torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends))
    h = h * torch._grouped_mm(rows, w3.transpose(1, 2), offs=ends)
    out = torch._grouped_mm(h, w2.transpose(1, 2), offs=ends)
    padding = {"num_local_tokens_after_padding": x.shape[0], "local_seq_len_after_padding": x.shape[0]}
    return given.combine(out, metadata, x, **padding)


def counts_of(ids: Tensor) -> Tensor:
    return torch.zeros(E, dtype=torch.int64).scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))


def numbers(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Tokens of all ranks, and all experts."""
    generator = torch.Generator().manual_seed(0)
    size = dist.get_world_size() * T
    x, logits = torch.randn(size, D, generator=generator), torch.randn(size, E, generator=generator)
    scores, ids = logits.sigmoid().topk(K)
    shapes = ((E, WIDTH, D), (E, D, WIDTH), (E, WIDTH, D))
    return x.to(dtype), scores, ids, [(torch.randn(shape, generator=generator) / 5).to(dtype) for shape in shapes]


def own(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(dist.get_world_size())[rank]


def compare(rank: int, compiled: bool) -> None:
    """Output and gradients are those of one process. torch captures its grouped product of bf16 alone."""
    x, scores, ids, weights = numbers(torch.bfloat16 if compiled else torch.float32)
    alone = [tensor.clone().requires_grad_() for tensor in (x, scores, *weights)]
    joined = torch.cat(alone[2::2], 1)
    want = moe_ops.fused_experts(alone[0], joined, alone[3], alone[1], ids)
    grad = torch.linspace(-1, 1, want.numel()).view_as(want).to(want.dtype)
    wanted = torch.autograd.grad(want, alone, grad)
    given = dispatcher(dist.get_world_size())
    leaves = [own(tensor, rank).clone().requires_grad_() for tensor in (x, scores, *weights)]

    def run(x: Tensor, scores: Tensor, ids: Tensor, weights: list[Tensor]) -> Tensor:
        return block(given, x, scores, ids, weights)

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    got = function(leaves[0], leaves[1], own(ids, rank), leaves[2:])
    found = torch.autograd.grad(got, leaves, own(grad, rank))
    for one, other in zip((got, *found), (want, *wanted), strict=True):
        # Of bf16: the activation is rounded before the second product, as torchtitan has it, and results on both ranks.
        error = (one.float() - own(other, rank).float()).norm() / own(other, rank).float().norm()
        assert error < (2**-6 if compiled else 1e-6), error


def torchtitan_eager(rank: int, folder: Path) -> None:
    compare(rank, compiled=False)


def torchtitan_captured(rank: int, folder: Path) -> None:
    compare(rank, compiled=True)


def torchtitan_without_a_mesh(rank: int, folder: Path) -> None:
    """One rank: its experts are all."""
    x, scores, ids, weights = numbers()
    got = block(dispatcher(1), x, scores, ids, weights)
    want = moe_ops.fused_experts(x, torch.cat(weights[::2], 1), weights[1], scores, ids)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


CHECKS: Checks = {check.__name__: check for check in (torchtitan_eager, torchtitan_captured, torchtitan_without_a_mesh)}
