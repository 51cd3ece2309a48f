"""Times of several functions, measured in turn: the same kernel takes up to 1.2 times as long on a hot GPU as on a cool
one, so that only functions timed in the same rounds can be compared.

A layer is timed over several input sets, one after the other: with a single one the weights of a small batch would be
served from the cache, which no running model sees.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Thunk = Callable[[], Any]
ROUNDS = 21
# Long products run into the power limit: a GPU that idled while the peers were compiled would flatter the first rounds.
WARM_SECONDS = 0.5
SAMPLE_US = 200.0  # a sample takes at least as long, by repetition
CPU_BUDGET_S = 1.0  # for each function: rounds end once they took this long, but never before the third
IN_TURN = "{rounds} rounds, everyone once in each, each behind every other one equally often"
CUDA_METHOD = (
    "all input sets in one captured CUDA graph for each peer; the graphs of all peers are replayed in turn for "
    f"{WARM_SECONDS} s, to hot clocks, then in {IN_TURN}, each repeated to at least {SAMPLE_US / 1e3} ms, by CUDA "
    "events, the queue never empty"
)
CPU_METHOD = (
    f"wall clock over all input sets, at most {IN_TURN}, each repeated to at least {SAMPLE_US / 1e3} ms; rounds end "
    f"after {CPU_BUDGET_S} s for each peer"
)
INTERVALS = (
    "{unit}: the median of the rounds{division}, with the order statistics that hold it with 95 % (low, high); "
    "ratio: {of} in the same round, median and interval alike"
)


@dataclass(frozen=True)
class Run:
    """What is timed: ``repeats`` times ``call``, after ``before``, which is not."""

    call: Thunk
    before: Thunk = lambda: None
    repeats: int = 1

    def __call__(self) -> None:
        self.before()
        for _ in range(self.repeats):
            self.call()


def method(rounds: int = ROUNDS) -> str:
    """How this machine times layers, for the result file."""
    return (CUDA_METHOD if torch.cuda.is_available() else CPU_METHOD).format(rounds=rounds)


def sequence(thunks: Sequence[Thunk], pool: Any = None) -> Thunk:
    """All thunks in one call: a replay of their captured graph on a GPU, else one after the other.

    Graphs of one ``pool`` (of :func:`graph_pool`) share memory: one can be replayed when another one is done.
    """
    return _captured(thunks, pool) if torch.cuda.is_available() else lambda: [thunk() for thunk in thunks]


def graph_pool() -> Any:
    """Memory for graphs that are never replayed at once, and whose results nobody reads; None without a GPU."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


@dataclass(frozen=True)
class _Captured:
    """A graph, and the thunks that it was captured from: they hold the memory that it reads."""

    graph: torch.cuda.CUDAGraph
    thunks: Sequence[Thunk]

    def __call__(self) -> None:
        self.graph.replay()


def _captured(thunks: Sequence[Thunk], pool: Any) -> Thunk:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for thunk in thunks:
                thunk()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for thunk in thunks:
            thunk()
    return _Captured(graph, thunks)


def warm(runs: Mapping[str, Run], seconds: float = WARM_SECONDS) -> None:
    """All of them in turn; the last pass is left in the GPU's queue, behind which the first sample is issued."""
    deadline = time.perf_counter() + (seconds if torch.cuda.is_available() else 0.0)
    while time.perf_counter() < deadline:
        for run in runs.values():
            run()
        wait()
    for run in runs.values():
        run()


def repeated(run: Run) -> Run:
    """``run`` as often as a sample needs."""
    wait()
    run()  # behind which the next is issued
    start = _mark()
    run()
    end = _mark()
    wait()
    return replace(run, repeats=max(1, math.ceil(SAMPLE_US / max(_elapsed_us(start, end), 1e-3))))


def balanced(names: Sequence[str], number: int) -> list[str]:
    """Order in a round: in as many as there are names, or twice as many of an odd number, each name follows every other
    one equally often (E. J. Williams, 1949). On a GPU at its power limit one that follows another that multiplies all
    the time is slower than behind one that waits for memory.
    """
    count = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    order = [names[(place + number) % count] for place in zigzag]
    return order[::-1] if count % 2 and number // count % 2 else order


def in_turn(runs: Mapping[str, Run], rounds: int, *, budget_s: float | None = None) -> dict[str, list[float]]:
    """Microseconds of one call by name, a sample a round.

    On a GPU nothing waits for the device but what a run's ``before`` waits for.
    """
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for number in range(rounds):
        if budget_s is not None and number >= 3 and time.perf_counter() - begin > budget_s:
            break
        for name in balanced(list(runs), number):
            runs[name].before()
            start = _mark()
            for _ in range(runs[name].repeats):
                runs[name].call()
            marks[name].append((start, _mark()))
    wait()
    return {name: [_elapsed_us(*pair) / runs[name].repeats for pair in pairs] for name, pairs in marks.items()}


def cpu_budget(runs: Mapping[str, Run]) -> float | None:
    """Seconds that the rounds may take; on a GPU they are all made."""
    return None if torch.cuda.is_available() else CPU_BUDGET_S * len(runs)


def _mark() -> Any:
    """A point in time of the device that is timed."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_us(start: Any, end: Any) -> float:
    return (end - start) * 1e6 if isinstance(start, float) else start.elapsed_time(end) * 1e3


def wait() -> None:
    """Until the device has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
