"""One MoE layer whose experts are spread over processes, by every transport, against the same layer in one process.

    torchrun --nproc-per-node 2 -m moe_ops.examples.expert_parallel

Every process is a rank: on GPUs with NCCL where there is one for each, else on the CPU with gloo. A rank holds its
block of the experts and a batch of its own (under "replicated" all batches, as every rank does). Rank 0 prints, for
each transport, what a rank sends for one layer, the largest error of any rank, relative to the largest number of the
one-process layer, and the slowest rank's time, eager and compiled in one graph. In the last line a shared expert is
computed between the halves of both exchanges, and added before the sum is rounded.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import moe_ops
from moe_ops import ep

COMMAND = "torchrun --nproc-per-node 2 -m moe_ops.examples.expert_parallel"
ROUNDS = 10


class Sizes(NamedTuple):
    """T of a rank; E, K, H and I of the whole layer; S, width of the shared expert."""

    T: int
    E: int
    K: int
    H: int
    I: int
    S: int


class Layer(NamedTuple):
    """The layer of one process, the same numbers on every rank, and the tokens of all ranks."""

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    shared_up: Tensor
    shared_down: Tensor


class Way(NamedTuple):
    """A line of the table: what is run on which tokens, what it must give, and how many bytes a rank sends."""

    name: str
    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]
    wanted: Tensor
    sent: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as one rank of several; 2 where nothing has started the others."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        print(f"This example is one rank of several, which torchrun starts:\n\n    {COMMAND}", file=sys.stderr)
        return 2
    device = start()
    try:
        run(device, options.backend)
    finally:
        dist.destroy_process_group()
    return 0


def start() -> torch.device:
    """This rank's device, in a group of all ranks."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def run(device: torch.device, backend: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    on_gpu = device.type == "cuda"
    sizes = Sizes(1024, 64 * size, 8, 2048, 768, 3072) if on_gpu else Sizes(64, 4 * size, 2, 256, 128, 256)
    layer = make(sizes, size, device)
    if rank == 0:
        where = torch.cuda.get_device_name(device) if on_gpu else "CPU, gloo"
        dtype = str(layer.hidden_states.dtype).removeprefix("torch.")
        print(f"{size} ranks, {where}, {dtype}; each has {sizes.T} tokens and {sizes.E // size} experts of {sizes.E},")
        print(f"{sizes.H} wide, {sizes.I} inside, top {sizes.K}\n")
        print(f"{'':24}{'KiB':>10}{'error':>20}{'ms':>20}")
        print(f"{'transport':24}{'sent':>10}" + f"{'eager':>10}{'compiled':>10}" * 2)
    for way in ways(layer, sizes, size, rank):
        compiled = torch.compile(way.function, backend=backend, fullgraph=True)
        errors, times = [], []
        with torch.no_grad():
            for function in (way.function, compiled):
                errors.append(worst((function(*way.inputs) - way.wanted).abs().max() / way.wanted.abs().max()))
                times.append(worst(torch.tensor(milliseconds(function, way.inputs), device=device)))
        if rank == 0:
            columns = "".join(f"{error:10.1e}" for error in errors) + f"{times[0]:10.2f}{times[1]:10.2f}"
            print(f"{way.name:24}{way.sent / 1024:10.0f}{columns}", flush=True)


def make(sizes: Sizes, size: int, device: torch.device) -> Layer:
    """Random numbers from one seed; bf16 on GPUs."""
    made, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if device.type == "cuda" else torch.float32
    T, E, K, H, I, S = sizes

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=made) / math.sqrt(shape[-1])
        return values.to(device, dtype)

    logits = torch.randn(size * T, E, generator=made).to(device)
    weights, ids = moe_ops.fused_topk(logits, top_k=K)
    tokens = torch.randn(size * T, H, generator=made).to(device, dtype)
    return Layer(tokens, weights, ids, normal(E, 2 * I, H), normal(E, H, I), normal(S, H), normal(H, S))


def ways(layer: Layer, sizes: Sizes, size: int, rank: int) -> list[Way]:
    """Every transport that these ranks have, then the shared expert beside the best of them."""
    group = dist.group.WORLD
    held = slice(rank * sizes.E // size, (rank + 1) * sizes.E // size)
    gate_up, down = layer.gate_up_proj[held], layer.down_proj[held]
    x, weights, ids = everything = layer[:3]
    mine = x.chunk(size)[rank], weights.chunk(size)[rank], ids.chunk(size)[rank]
    whole = moe_ops.fused_experts(x, layer.gate_up_proj, layer.down_proj, weights, ids)
    shared = F.silu(x @ layer.shared_up.T) @ layer.shared_down.T

    def by(transport: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def function(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return moe_ops.fused_experts(x, gate_up, down, weights, ids, group=group, transport=transport)

        return function

    def beside(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        preparing = ep.prepare_start(x, weights, ids, num_experts=sizes.E, group=group)
        hidden = F.silu(x @ layer.shared_up.T)  # while rows are on their way
        prepared = ep.prepare_wait(preparing, [hidden])
        finalizing = ep.finalize_start(ep.experts(prepared, gate_up, down), prepared)
        added = hidden @ layer.shared_down.T  # while results are on theirs
        return ep.finalize_wait(finalizing, added)

    best = ep.prepare(*mine, num_experts=sizes.E, group=group).transport
    names = ("local",) if size == 1 else tuple(dict.fromkeys((best, "gather", "all_to_all", "replicated")))
    found = []
    for name in names:
        inputs, wanted = (everything, whole) if name == "replicated" else (mine, whole.chunk(size)[rank])
        found.append(Way(name, by(name), inputs, wanted, bytes_sent(name, layer, inputs, size)))
    total = (whole.float() + shared.float()).to(whole.dtype).chunk(size)[rank]
    return [*found, Way(f"{best}, shared expert", beside, mine, total, bytes_sent(best, layer, mine, size))]


def bytes_sent(transport: str, layer: Layer, inputs: tuple[Tensor, ...], size: int) -> int:
    """Of one rank for one layer; rows go out with K weights and ids of four bytes, and come back without."""
    tokens, choices = inputs[2].shape
    row = layer.hidden_states.shape[1] * layer.hidden_states.element_size()
    out = 0 if transport == "replicated" else row + 8 * choices
    return (size - 1) * tokens * (out + row)


def worst(value: Tensor) -> float:
    """The largest of all ranks."""
    value = value.float()
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def milliseconds(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> float:
    """The median of some calls, all ranks starting together."""
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        function(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


if __name__ == "__main__":
    status = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # torch's collectives in compiled graphs keep the group and its threads alive, and one that still drops a tensor of
    # Python's while the interpreter ends aborts the process.
    os._exit(status)
