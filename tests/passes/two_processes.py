"""Two processes on the CPU that train one small model of two MoE layers, for `test_training_distributed`.

Every way of training makes one `Outcome`; gradients are compared with those of one process that sees both batches.
"""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops

T, E, K, H, I = 12, 16, 2, 64, 256  # the first weight of a layer is larger than a bucket of 1 MB
STEPS, RANKS = 2, 2


@dataclass(frozen=True)
class Outcome:
    """Blocks and graphs after every step, the largest relative difference of a gradient, and what was logged."""

    fused: int
    refused: int
    errors: int
    graphs: list[int]
    worst: float
    said: str


class Layer(nn.Module):
    """A router and stacked experts, and what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.gate_up, self.down = (
            nn.Parameter(torch.randn(shape) / 8) for shape in ((E, H), (E, 2 * I, H), (E, H, I))
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = F.linear(x, self.gate).softmax(-1).topk(K, dim=-1)
        flat = ids.reshape(-1)
        gate, up = torch.bmm(self.gate_up[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        out = torch.bmm(self.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return x + (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(RANKS * step + rank))


def ddp(model: nn.Sequential) -> Callable[..., Any]:
    return moe_ops.compile(_ddp(model), backend="moe_ops_eager")


def ddp_cut(model: nn.Sequential) -> Callable[..., Any]:
    return torch.compile(_ddp(model), backend="moe_ops_eager")


def fsdp_layers(model: nn.Sequential) -> Callable[..., Any]:
    sharded = _sharded(model)
    for layer in model:
        layer.compile(backend="moe_ops_eager")
    return sharded


def fsdp_whole(model: nn.Sequential) -> Callable[..., Any]:
    return torch.compile(_sharded(model), backend="moe_ops_eager")


WAYS = {way.__name__: way for way in (ddp, ddp_cut, fsdp_layers, fsdp_whole)}


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


def _sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(rank: int, folder: str) -> None:
    """Every way; rank 0 writes the outcomes to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    wanted = _alone(copy.deepcopy(model))
    outcomes = {name: _train(copy.deepcopy(model), way, rank, wanted) for name, way in WAYS.items()}
    if rank == 0:
        Path(folder, "outcomes").write_bytes(pickle.dumps(outcomes))
    dist.destroy_process_group()


def _alone(model: nn.Module) -> list[list[Tensor]]:
    """The gradients of every step, of the mean of both batches' losses."""
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(batch(step, rank)).square().mean() / RANKS for rank in range(RANKS)).backward()
        steps.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return steps


def _train(model: nn.Sequential, way: Callable[..., Any], rank: int, wanted: list[list[Tensor]]) -> Outcome:
    torch.compiler.reset()
    counters.clear()
    torch._dynamo.config.optimize_ddp = True
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("compile_passes").addHandler(listener)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = way(model)
    optimizer, graphs, worst = torch.optim.SGD(model.parameters(), lr=0.1), [], 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        compiled(batch(step, rank)).square().mean().backward()
        for parameter, expected in zip(model.parameters(), wanted[step], strict=True):
            grad: Any = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            worst = max(worst, ((whole - expected).abs().max() / expected.abs().max()).item())
        optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    logging.getLogger("compile_passes").removeHandler(listener)
    passes = counters["moe_ops"]
    return Outcome(passes["fused"], passes["refused"], passes["errors"], graphs, worst, "\n".join(said))
