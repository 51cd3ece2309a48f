"""What counting the experts' load costs: a layer's captured CUDA graph, replayed while nobody counts and while somebody
does. What it costs when nobody does is the difference from a checkout without it: `python -m benchmarks compare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.cases import Case, layer_weights, make_case
from benchmarks.intervals import fields, median_interval, ratio_interval
from benchmarks.layers import release
from benchmarks.peers import PEERS
from benchmarks.results import ResultFile, progress_bar
from benchmarks.shapes import Shape
from benchmarks.timing import INTERVALS, Run, cpu_budget, in_turn, method, repeated, sequence, warm
from moe_ops import counters

TIMED = ("ours", "ours_batched", "ours_fp8")
METHOD = "one graph for both, which the flag on the device tells apart; {timing}; {intervals}"


def run(shapes: Sequence[Shape], tokens: Sequence[int], results: ResultFile, rounds: int) -> None:
    """Measure every layer at every T, one row for each of our layers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with progress_bar() as progress, torch.no_grad():
        task = progress.add_task("load", total=len(shapes) * len(tokens) * len(TIMED))
        for shape in shapes:
            weights = layer_weights(shape, torch.bfloat16, device)
            for T in tokens:
                case = make_case(weights, T)
                for name in TIMED:
                    results.add(measure(case, name, rounds))
                    progress.console.print(describe(results.rows[-1]), highlight=False, soft_wrap=True)
                    progress.advance(task)
            del case, weights
            release()


def measure(case: Case, name: str, rounds: int) -> dict[str, Any]:
    """A row: microseconds of a layer off and on, and the ratio of on to off."""
    call = sequence(PEERS[name].prepare(case))
    try:
        runs = {way: Run(call, before=partial(turn, way == "on")) for way in ("off", "on")}
        warm(runs)
        runs = {way: repeated(run) for way, run in runs.items()}
        warm(runs, 0.0)
        samples = in_turn(runs, rounds, budget_s=cpu_budget(runs))
    finally:
        turn(False)
    row: dict[str, Any] = {"shape": case.shape.name, "T": case.T, "peer": name}
    for way, of_way in samples.items():
        row |= fields(f"{way}_us", median_interval([us / len(case.sets) for us in of_way]))
    return row | fields("ratio", ratio_interval(samples["on"], samples["off"]))


def turn(on: bool) -> None:
    """Set the flags, if they are not so."""
    if (counters.active > 0) != on:
        counters.turn(1 if on else -1)


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['shape']:>14} T={row['T']:<6} {row['peer']:<14}"
    times = (
        f"off {row['off_us']:8.1f} us [{row['off_us_low']:.1f}, {row['off_us_high']:.1f}]  on {row['on_us']:8.1f} us"
    )
    return f"{head} {times}  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"


def load_method(rounds: int) -> str:
    """The method as it is written into the result file."""
    intervals = INTERVALS.format(unit="us", division=", divided by the number of sets", of="on over off")
    return METHOD.format(timing=method(rounds), intervals=intervals)
