"""Host time of one MoE layer: what a call costs the CPU that issues it, and the way it takes through the code."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import moe_ops
from benchmarks.cases import Case, layer_weights, make_case
from benchmarks.peers import FP8, transformers_module
from benchmarks.results import ResultFile, progress_bar
from benchmarks.shapes import Shape
from benchmarks.timing import Thunk

CALLS = 50  # issued without synchronising; a queue of launches holds about a thousand
ROUNDS = 15
LAYERS = 8  # of a graph whose entry, which is torch's, is paid once
REFERENCE = "hf_grouped"  # whose host time the others are a share of
METHOD = (
    f"host time of one layer, {CALLS} issued without synchronising, all ways in turn, {ROUNDS} rounds in one process: "
    f"the median round; share: of {REFERENCE} (transformers' grouped_mm experts, routing given; ours routes too) "
    f"compiled in the same way and round (eager: compiled), median. compiled: torch.compile(dynamic=False), inductor, "
    f"default mode, one layer a graph; in a graph: {LAYERS} layers a graph, divided by {LAYERS}. files, calls: Python "
    "and C functions that one warm call enters, and the files that they are of, torch's own counted as one"
)


def run(shape: Shape, tokens: Sequence[int], results: ResultFile, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Measure every T, one row for each way to call."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with progress_bar() as progress, torch.no_grad():
        task = progress.add_task(shape.name, total=len(tokens))
        with torch._dynamo.config.patch(recompile_limit=256):
            weights = layer_weights(shape, dtype, device)
            for T in tokens:
                for row in measure(make_case(weights, T)):
                    results.add(row)
                    progress.console.print(describe(row), highlight=False, soft_wrap=True)
                progress.update(task, advance=1)


def ways(case: Case) -> dict[str, tuple[Thunk, int]]:
    """Every way to call, by name, and how many layers one call has."""
    inputs = case.sets[0]
    x, options = inputs.hidden_states, {"router_logits": inputs.router_logits, "top_k": case.shape.K}
    plain = {"gate_up_proj": case.weights.gate_up_proj, "down_proj": case.weights.down_proj}
    module = transformers_module(case, "grouped_mm")
    routing = inputs.topk_ids.long(), inputs.topk_weights.to(x.dtype)
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "ours": lambda x: moe_ops.fused_moe(x, **plain, **options),
        "ours_fp8": lambda x: moe_ops.fused_moe(x, **case.weights.quantized(FP8), scheme=FP8, **options),
        REFERENCE: lambda x: module(x, *routing),
    }
    made: dict[str, tuple[Thunk, int]] = {}
    for name, layer in layers.items():
        if name != REFERENCE:
            made[name] = partial(layer, x), 1
        made[f"{name} compiled"] = partial(torch.compile(layer, fullgraph=True, dynamic=False), x), 1
        chain = torch.compile(partial(_chain, layer), fullgraph=True, dynamic=False)
        made[f"{name} in a graph"] = partial(chain, x), LAYERS
    return made


def _chain(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        x = layer(x)
    return x


def measure(case: Case) -> list[dict[str, Any]]:
    """Rows of one case."""
    thunks = ways(case)
    for thunk, _ in thunks.values():
        for _ in range(5):
            thunk()
    rounds: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(ROUNDS):
        for name, (thunk, layers) in thunks.items():
            rounds[name].append(_issue_us(thunk, CALLS // layers) / layers)
    rows = []
    for name, (thunk, layers) in thunks.items():
        base = rounds[f"{REFERENCE} {'compiled' if layers == 1 else 'in a graph'}"]
        share = statistics.median(mine / theirs for mine, theirs in zip(rounds[name], base, strict=True))
        files, calls = path_of(thunk)
        row = {"shape": case.shape.name, "T": case.T, "peer": name, "host_us": statistics.median(rounds[name])}
        rows.append(row | {"share": share, "files": files, "calls": calls})
    return rows


def _issue_us(thunk: Thunk, calls: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(calls):
        thunk()
    return (time.perf_counter() - start) / calls * 1e6


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
    head = f"{row['shape']:>14} T={row['T']:<6} {row['peer']:<22}"
    return f"{head} {row['host_us']:8.1f} us  {row['share']:.2f}x  {row['files']} files  {row['calls']} calls"
