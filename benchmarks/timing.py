"""Time of a function: replays of a captured CUDA graph on a GPU, the wall clock elsewhere.

Several functions are timed together, each with its own inputs, one after the other: with a single input set the weights
of a small batch would be served from the cache, which no running model sees.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Thunk = Callable[[], Any]
# Long products run into the power limit: a GPU that idled while a peer was compiled would flatter that peer.
WARM_SECONDS = 0.3
CUDA_METHOD = (
    f"all input sets in one captured CUDA graph, replayed for {WARM_SECONDS} s to reach steady clocks, then the median "
    "of {replays} replays measured by CUDA events, divided by the number of sets"
)
CPU_METHOD = "wall clock over all input sets in turn, median of {replays} rounds, divided by the number of sets"
CPU_BUDGET_S = 1.0  # stop adding rounds once they took this long


def time_us(thunks: Sequence[Thunk], replays: int = 20) -> float:
    """Median microseconds of one thunk."""
    rounds = _graph_rounds if torch.cuda.is_available() else _wall_rounds
    return statistics.median(rounds(thunks, replays)) / len(thunks)


def method(replays: int = 20) -> str:
    """What `time_us` does on this machine, for the result file."""
    return (CUDA_METHOD if torch.cuda.is_available() else CPU_METHOD).format(replays=replays)


def _graph_rounds(thunks: Sequence[Thunk], replays: int) -> list[float]:
    """Microseconds of all thunks together, as often as asked."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for thunk in thunks:
                thunk()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for thunk in thunks:
            thunk()
    deadline = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < deadline:
        graph.replay()
        torch.cuda.synchronize()
    return [cuda_event_ms(graph.replay) * 1e3 for _ in range(replays)]


def cuda_event_ms(function: Thunk) -> float:
    """Milliseconds that the GPU spends between the start and the end of one call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _wall_rounds(thunks: Sequence[Thunk], replays: int) -> list[float]:
    """As `_graph_rounds`, by the wall clock."""
    for thunk in thunks:
        thunk()
    samples: list[float] = []
    while len(samples) < replays and (len(samples) < 3 or sum(samples) < CPU_BUDGET_S * 1e6):
        start = time.perf_counter()
        for thunk in thunks:
            thunk()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples
