"""Layers whose experts are spread over the ranks of a process group, each against the whole layer on one GPU.

Run by `torchrun --nproc-per-node W -m benchmarks ep`: every rank runs this, the first one writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import moe_ops
from benchmarks import timing
from benchmarks.intervals import fields, median_interval, ratio_interval
from benchmarks.results import ResultFile
from benchmarks.shapes import Shape
from benchmarks.timing import IN_TURN, INTERVALS, SAMPLE_US, WARM_SECONDS
from moe_ops import ep
from moe_ops.groups import resolve
from moe_ops.symmetric_memory import share

TOKENS = (2, 32, 128, 1024, 8192)  # of all ranks together
TRANSPORTS = ("gather", "symm", "all_to_all", "replicated")
WHOLE, LOCAL, EXCHANGE, FP8_EXCHANGE = "one GPU", "local experts", "exchange", "exchange, rows in fp8"
DIRECT, RAW, LINK = "exchange, symm", "collectives alone", "copies alone"
SHARED, AFTER, BESIDE = "shared expert alone", "symm, shared expert after", "symm, shared expert between"
METHOD = (
    "one layer, weights random, routing given and uniform; every rank has tokens / ranks of them; "
    f"`{WHOLE}`: all tokens and all experts on every GPU; a transport's name: moe_ops.fused_experts(group=...) under "
    f"torch.compile(fullgraph=True); `{LOCAL}`: what this rank's experts do of that (rows of `gather`); `{EXCHANGE}`: "
    "moe_ops.ep.prepare, then ep.finalize of the rows themselves, compiled, by gather, in the rows' dtype or in fp8 "
    f"on the way out (fp8_block128), `{DIRECT}`: by symm; `{RAW}`: an all-gather and an all-to-all of as many bytes "
    f"as `{EXCHANGE}`; `{LINK}`: as many into the other ranks' memory, by copy engines, nobody waiting for them; "
    f"`{BESIDE}`: the layer's steps with a shared expert of half the routed FLOPs, its first product between "
    f"the halves of prepare, its second one between those of finalize, `{AFTER}`: behind finalize, both compiled; "
    f"`{SHARED}`: that expert without a layer; "
    f"everything in captured CUDA graphs, replayed in turn for {WARM_SECONDS} s, then in {IN_TURN}, "
    f"each repeated to at least {SAMPLE_US / 1e3} ms after one replay that is not "
    "timed, by CUDA events, the slowest rank counts; {intervals}; error: Euclidean, relative to `" + WHOLE + "`"
)


@dataclass(frozen=True)
class Layer:
    """A layer on this rank.

    Attributes:
        shape: of the whole layer.
        weights: of all experts, the same on every rank.
        tokens: of all ranks: hidden states, routing weights, ids.
    """

    shape: Shape
    weights: tuple[Tensor, Tensor]
    tokens: tuple[Tensor, Tensor, Tensor]

    @property
    def own_weights(self) -> tuple[Tensor, Tensor]:
        """Of this rank's experts."""
        gate_up, down = (own_part(weight) for weight in self.weights)
        return gate_up, down

    @property
    def own_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank."""
        x, weights, ids = (own_part(tensor).contiguous() for tensor in self.tokens)
        return x, weights, ids


def own_part(tensor: Tensor) -> Tensor:
    """This rank's block of the first dimension."""
    size = tensor.shape[0] // dist.get_world_size()
    return tensor[dist.get_rank() * size : (dist.get_rank() + 1) * size]


def start() -> torch.device:
    """Join the group that torchrun made.

    Raises:
        ValueError: this process was not started by torchrun, or there is no GPU for it.
    """
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("benchmarks: ep must be run by torchrun. torchrun --nproc-per-node 2 -m benchmarks ep")
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise ValueError(f"benchmarks: ep must have a GPU for every rank, got {torch.cuda.device_count()} of them.")
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def run(shapes: Sequence[Shape], tokens: Sequence[int], results: ResultFile, rounds: int, device: torch.device) -> None:
    """Measure every layer at every number of tokens, one row for everything that is timed."""
    for shape in shapes:
        generator = torch.Generator(device).manual_seed(0)
        weights = tuple(
            torch.empty(shape.E, n, k, device=device, dtype=torch.bfloat16).normal_(generator=generator).mul_(k**-0.5)
            for n, k in ((2 * shape.I, shape.H), (shape.H, shape.I))
        )
        for number in tokens:
            x = torch.randn(number, shape.H, device=device, generator=generator).bfloat16()
            logits = torch.randn(number, shape.E, device=device, generator=generator)
            layer = Layer(shape, (weights[0], weights[1]), (x, *moe_ops.fused_topk(logits, top_k=shape.K)))
            for row in measure(layer, rounds):
                if dist.get_rank() == 0:
                    results.add(row)
                    print(describe(row), flush=True)


def measure(layer: Layer, rounds: int) -> list[dict[str, Any]]:
    """Rows of one layer."""
    calls, graphs, errors = timed(layer), {}, {}
    with torch.no_grad():
        want = moe_ops.fused_experts(layer.tokens[0], *layer.weights, *layer.tokens[1:])
        for name, call in calls.items():
            graphs[name], output = captured(call)
            if name in (*TRANSPORTS, BESIDE, AFTER):
                graphs[name].replay()
                reference = want if name == "replicated" else own_part(want)
                reference = reference if name in TRANSPORTS else reference + calls[SHARED]()
                errors[name] = float((output.float() - reference.float()).norm() / reference.float().norm())
        samples = in_turn(graphs, rounds)
    rows, number = [], layer.tokens[0].shape[0]
    for name, times in samples.items():
        row = {"shape": layer.shape.name, "tokens": number, "ranks": dist.get_world_size(), "what": name}
        row |= {"error": errors.get(name)} | fields("us", median_interval(times))
        rows.append(row | fields("ratio", ratio_interval(samples[WHOLE], times)))
    torch.compiler.reset()
    return rows


def timed(layer: Layer) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name; collectives are called in the same order on every rank."""
    group, shape = dist.group.WORLD, layer.shape
    x, weights, ids = layer.own_tokens
    gate_up, down = layer.own_weights

    def whole() -> Tensor:
        return moe_ops.fused_experts(layer.tokens[0], *layer.weights, *layer.tokens[1:])

    def over_ranks(transport: str, *tokens: Tensor) -> Tensor:
        return moe_ops.fused_experts(tokens[0], gate_up, down, *tokens[1:], group=group, transport=transport)

    def exchange(scheme: str | None, transport: str) -> Tensor:
        options = {"num_experts": shape.E, "group": group, "scheme": scheme, "transport": transport}
        prepared = ep.prepare(x, weights, ids, **options)
        rows = prepared.rows if scheme is None else results_of_fp8
        return ep.finalize(rows, prepared)

    compiled = torch.compile(over_ranks, fullgraph=True, dynamic=False)
    compiled_exchange = torch.compile(exchange, fullgraph=True, dynamic=False)
    prepared = ep.prepare(x, weights, ids, num_experts=shape.E, group=group, transport="gather")
    results_of_fp8 = prepared.rows.clone()
    shared = Shared(shape, x.device)

    def with_shared(between: bool) -> Tensor:
        return beside((x, weights, ids), (gate_up, down), shape.E, shared, between)

    compiled_shared = torch.compile(with_shared, fullgraph=True, dynamic=False)
    calls: dict[str, Callable[[], Tensor]] = {WHOLE: whole}
    for transport in TRANSPORTS:
        tokens = layer.tokens if transport == "replicated" else layer.own_tokens
        calls[transport] = lambda transport=transport, tokens=tokens: compiled(transport, *tokens)
    return calls | {
        LOCAL: lambda: ep.experts(prepared, gate_up, down),
        EXCHANGE: lambda: compiled_exchange(None, "gather"),
        FP8_EXCHANGE: lambda: compiled_exchange("fp8_block128", "gather"),
        DIRECT: lambda: compiled_exchange(None, "symm"),
        RAW: lambda: collectives(prepared.rows),
        LINK: Link(x),
        SHARED: lambda: shared.second(shared.first(x)),
        BESIDE: lambda: compiled_shared(True),
        AFTER: lambda: compiled_shared(False),
    }


class Shared:
    """A shared expert of half the FLOPs of a token's K experts."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        width = shape.K * shape.I // 2
        self.gate_up = torch.randn(2 * width, shape.H, device=device, dtype=torch.bfloat16) * shape.H**-0.5
        self.down = torch.randn(shape.H, width, device=device, dtype=torch.bfloat16) * width**-0.5
        for weight in (self.gate_up, self.down):
            dist.broadcast(weight, 0)

    def first(self, x: Tensor) -> Tensor:
        """``[T, width]``."""
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.silu(gate) * up

    def second(self, h: Tensor) -> Tensor:
        """``[T, H]``."""
        return F.linear(h, self.down)


def beside(tokens: Sequence[Tensor], weights: Sequence[Tensor], experts: int, shared: Shared, between: bool) -> Tensor:
    """The layer's steps and a shared expert, whose products stand where the steps wait, or behind them."""
    options = {"num_experts": experts, "group": dist.group.WORLD, "transport": "symm"}
    preparing = ep.prepare_start(*tokens, **options)
    h = shared.first(tokens[0]) if between else None
    prepared = ep.prepare_wait(preparing, () if h is None else (h,))
    finalizing = ep.finalize_start(ep.experts(prepared, *weights), prepared)
    if h is not None:
        return ep.finalize_wait(finalizing, shared.second(h))
    return ep.finalize_wait(finalizing) + shared.second(shared.first(tokens[0]))


class Link:
    """As many bytes as both exchanges send, copied into the other ranks' memory."""

    def __init__(self, rows: Tensor) -> None:
        group = resolve("benchmarks", dist.group.WORLD)
        words = rows.contiguous().view(torch.int32).view(-1)
        self.shared = share(group, words.new_empty(0), group.size * words.numel(), rows.device)
        self.words, self.group = words, group

    def __call__(self) -> Tensor:
        count, rank = self.words.numel(), self.group.rank
        for _ in range(2):
            for step in range(1, self.group.size):
                buffer = self.shared.buffers[(rank + step) % self.group.size]
                buffer[rank * count : (rank + 1) * count].copy_(self.words)
        return self.words


def collectives(rows: Tensor) -> Tensor:
    """The bytes of both exchanges, without anything around them."""
    ops, name, size = torch.ops._c10d_functional, dist.group.WORLD.group_name, dist.get_world_size()
    part = rows.shape[0] // size
    ops.wait_tensor(ops.all_gather_into_tensor(rows[:part], size, name))
    return ops.wait_tensor(ops.all_to_all_single(rows, [part] * size, [part] * size, name))


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of a call, and where its replays write."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    # Other threads of NCCL may ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = call()
    torch.cuda.synchronize()
    return graph, output


def in_turn(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    """Microseconds of a replay by name, a sample a round, of the slowest rank; all ranks replay in one order."""
    runs = {name: agreed(timing.Run(graph.replay, before=graph.replay)) for name, graph in graphs.items()}
    for _ in range(max(int(WARM_SECONDS * 1e6 / (SAMPLE_US * len(graphs))), 1)):  # as often on every rank
        for run in runs.values():
            run()
    own = timing.in_turn(runs, rounds)
    times = torch.tensor(list(own.values()))
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(own, times.tolist(), strict=True))


def agreed(run: timing.Run) -> timing.Run:
    """A run as often as a sample needs by the first rank's measurement, on all."""
    number = torch.tensor(timing.repeated(run).repeats)
    dist.broadcast(number, 0)
    return replace(run, repeats=int(number))


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    error = "" if row["error"] is None else f"  error {row['error']:.1e}"
    times = f"{row['us']:9.1f} us [{row['us_low']:.1f}, {row['us_high']:.1f}]  ratio {row['ratio']:.2f}"
    return f"{row['shape']:>14} tokens={row['tokens']:<6} {row['what']:<30} {times}{error}"


def ep_method(rounds: int) -> str:
    """The method as it is written into the result file."""
    intervals = INTERVALS.format(unit="us", division="", of=f"`{WHOLE}` over what the row names")
    return METHOD.format(rounds=rounds, intervals=intervals)
