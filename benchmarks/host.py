"""Host time of one MoE layer: what a call costs the CPU that issues it, and the way it takes through the code."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cases import Case, layer_weights, make_case
from benchmarks.peers import PEERS
from benchmarks.results import ResultFile
from benchmarks.shapes import Shape
from benchmarks.timing import Thunk

CALLS = 50  # issued without synchronising; a queue of launches holds about a thousand
ROUNDS = 15
REFERENCE = "hf_grouped"  # whose host time the others are a share of
METHOD = (
    f"host time of one call, {CALLS} issued without synchronising, which must take the host longer than the GPU or the "
    f"queue would fill; all peers in turn, {ROUNDS} rounds in one process: the median round; share: of {REFERENCE} in "
    "the same round, median. compiled: inside torch.compile(dynamic=False), inductor, default mode. files, calls: "
    "Python and C functions that one warm call enters, and the files that they are of, torch's own counted as one"
)


def run(shape: Shape, tokens: Sequence[int], results: ResultFile, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Measure every T, one row for each way to call."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with Progress(*columns, console=Console(stderr=True)) as progress, torch.no_grad():
        task = progress.add_task(shape.name, total=len(tokens))
        with torch._dynamo.config.patch(recompile_limit=256):
            weights = layer_weights(shape, dtype, device)
            for T in tokens:
                for row in measure(make_case(weights, T)):
                    results.add(row)
                    progress.console.print(describe(row), highlight=False, soft_wrap=True)
                progress.update(task, advance=1)


def ways(case: Case) -> dict[str, Thunk]:
    """Every way to call, by name."""
    eager = {"ours": PEERS["ours"].prepare(case)[0], "ours_fp8": PEERS["ours_fp8"].prepare(case)[0]}
    compiled = {
        f"{name}_compiled": torch.compile(thunk, fullgraph=True, dynamic=False) for name, thunk in eager.items()
    }
    return {**eager, **compiled, REFERENCE: PEERS[REFERENCE].prepare(case)[0]}


def measure(case: Case) -> list[dict[str, Any]]:
    """Rows of one case."""
    thunks = ways(case)
    for thunk in thunks.values():
        for _ in range(5):
            thunk()
    rounds: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(ROUNDS):
        for name, thunk in thunks.items():
            rounds[name].append(_issue_us(thunk))
    rows = []
    for name, thunk in thunks.items():
        share = statistics.median(mine / base for mine, base in zip(rounds[name], rounds[REFERENCE], strict=True))
        files, calls = path_of(thunk)
        row = {"shape": case.shape.name, "T": case.T, "peer": name, "host_us": statistics.median(rounds[name])}
        rows.append(row | {"share": share, "files": files, "calls": calls})
    return rows


def _issue_us(thunk: Thunk) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        thunk()
    return (time.perf_counter() - start) / CALLS * 1e6


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def path_of(thunk: Callable[[], Any]) -> tuple[int, int]:
    """(files, functions entered) of one warm call."""
    entered: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_filename)
        elif event == "c_call":
            entered.append("")

    sys.setprofile(note)
    try:
        thunk()
    finally:
        sys.setprofile(None)
    files = {"torch" if "/torch/" in name else name for name in entered if name}
    return len(files), len(entered) - 1  # less the call that ends the profile


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['shape']:>14} T={row['T']:<6} {row['peer']:<18}"
    return f"{head} {row['host_us']:8.1f} us  {row['share']:.2f}x  {row['files']} files  {row['calls']} calls"
