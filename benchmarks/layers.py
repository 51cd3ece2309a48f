"""Time of one MoE layer by shape, number of tokens, routing and peer; all peers of a case are measured in turn."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import device
from benchmarks.cases import Case, Weights, layer_weights, make_case
from benchmarks.intervals import fields, median_interval, ratio_interval
from benchmarks.kernels import kernel_names, kernel_times
from benchmarks.peers import PARTS, Peer
from benchmarks.results import ResultFile, progress_bar, why
from benchmarks.shapes import Shape
from benchmarks.timing import INTERVALS, ROUNDS, Run, cpu_budget, in_turn, method, repeated, sequence, warm
from meta.arch import Arch

METHOD = (
    "one MoE layer; 8 input sets up to 64 tokens, 2 above; {timing}; {intervals}; sm_mhz, watts: while the graphs are "
    "replayed on after the last round; error: Euclidean, relative to a float64 computation of at most 16 tokens from "
    "the unquantised weights; roof: max(bytes / bandwidth, FLOPs / rate) with the distinct experts that the inputs are "
    "routed to and the header's ceilings ({ceilings}); kernels: torch.profiler, median of 5 replays, after everything "
    "was timed (dependent launches overlap); launches: of one call. Work: moe = router logits to output, experts = "
    "routing given, gemms = the two expert products alone"
)


@dataclass(frozen=True)
class Plan:
    """What is timed, with the ceilings that ``roof`` holds, and whether the times of ``kernels`` are wanted too."""

    shapes: Sequence[Shape]
    tokens: Sequence[int]
    peers: Sequence[Peer]
    routings: Sequence[str] = ("uniform",)
    dtype: torch.dtype = torch.bfloat16
    rounds: int = ROUNDS
    roof: Arch | None = None
    kernels: bool = True

    @property
    def reference(self) -> str | None:
        """The first of ours."""
        return next((peer.name for peer in self.peers if peer.is_ours), None)

    def cases(self, weights: Weights) -> Iterator[Case]:
        """Every case of a shape. Routing goes last: it changes nothing that has to be compiled."""
        for T in self.tokens:
            for routing in self.routings:
                yield make_case(weights, T, routing)

    def weights(self, shape: Shape) -> Weights:
        """On the GPU, if there is one."""
        return layer_weights(shape, self.dtype, "cuda" if torch.cuda.is_available() else "cpu")


def run(plan: Plan, results: ResultFile) -> None:
    """Time every case, one row for each peer; a peer that cannot run is a row with the reason instead of a time."""
    cases = len(plan.shapes) * len(plan.tokens) * len(plan.routings)
    # Static shapes: every T compiles on its own.
    with progress_bar() as progress, torch.no_grad(), torch._dynamo.config.patch(recompile_limit=256):
        task = progress.add_task("layers", total=cases * len(plan.peers))
        for shape in plan.shapes:
            for case in plan.cases(plan.weights(shape)):
                progress.update(task, description=f"{shape.name} T={case.T} {case.routing}")
                for row in time_case(case, plan, say=lambda text: progress.update(task, description=text)):
                    results.add(row)
                    progress.console.print(describe(row), highlight=False, soft_wrap=True)
                    progress.advance(task)
                empty_cache()
            del case
            release()
        if plan.kernels and torch.cuda.is_available():
            add_kernels(plan, results)


def release() -> None:
    """Give back what compiled code and dead cases hold."""
    torch.compiler.reset()
    gc.collect()
    empty_cache()


def empty_cache() -> None:
    """Give back the memory of dead graphs and failed calls."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def time_case(case: Case, plan: Plan, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Result rows of one case, in the order of the peers; never raises for what a peer cannot do."""
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for peer in plan.peers:
        say(f"{case.shape.name} T={case.T} {case.routing} {peer.name}")
        head = {"shape": case.shape.name, "T": case.T, "routing": case.routing, "peer": peer.name, "work": peer.work}
        outcome, call = prepare(case, peer, plan.roof)
        rows[peer.name] = head | outcome
        if call is not None:
            runs[peer.name] = Run(call)
    if runs:
        samples, state = measure(runs, plan.rounds)
        add_times(rows, samples, len(case.sets), plan.reference)
        for name in runs:
            rows[name] |= state
    return list(rows.values())


def prepare(case: Case, peer: Peer, roof: Arch | None) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """(what is known of a peer before it is timed, all its input sets in one call), or the reason and None."""
    reason = peer.missing() or peer.unfit(case)
    if reason:
        return {"us": None, "reason": reason}, None
    try:
        thunks = peer.prepare(case)
        output = thunks[0]()
        known: dict[str, Any] = {"error": case.error(output) if peer.exact else None}
        del output
        known["roof_us"] = case.roof_on(roof, peer.scheme) if roof is not None else None
        known["roof_kind"] = peer.scheme or str(case.weights.down_proj.dtype).removeprefix("torch.")
        known["note"] = peer.note(case)
        return known, sequence(thunks)
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except Exception as failure:
        reason = why(failure)
        traceback.print_exc(limit=-3)
    empty_cache()
    return {"us": None, "reason": reason}, None


def measure(runs: Mapping[str, Run], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """(samples of every run, in microseconds; clock and power)."""
    warm(runs)
    runs = {name: repeated(run) for name, run in runs.items()}
    warm(runs, 0.0)
    samples = in_turn(runs, rounds, budget_s=cpu_budget(runs))
    return samples, device.state_while(runs.values())


def add_times(
    rows: dict[str, dict[str, Any]], samples: Mapping[str, Sequence[float]], sets: int, reference: str | None
) -> None:
    """Write into rows, by peer, what their samples say; ``sets`` input sets make a sample."""
    for name, of_peer in samples.items():
        rows[name] |= fields("us", median_interval([us / sets for us in of_peer])) | {"rounds": len(of_peer)}
        if reference is not None and reference in samples:
            rows[name] |= fields("ratio", ratio_interval(samples[reference], of_peer))
    for whole, part in PARTS:
        if whole in samples and part in samples and rows[whole]["us_high"] < rows[part]["us_low"]:
            times = f"{rows[whole]['us']:.1f} against {rows[part]['us']:.1f} us"
            rows[whole]["flag"] = f"{whole} is faster than its part {part}: {times}"


def add_kernels(plan: Plan, results: ResultFile) -> None:
    """Write the times of kernels into our rows. Nothing is timed afterwards: a profiler, once loaded, may slow all."""
    rows = {(row["shape"], row["T"], row["routing"], row["peer"]): row for row in results.rows}
    for shape in plan.shapes:
        for case in plan.cases(plan.weights(shape)):
            for peer in plan.peers:
                row = rows[shape.name, case.T, case.routing, peer.name]
                if peer.is_ours and row["us"] is not None:
                    try:
                        thunks = peer.prepare(case)
                        row["launches"] = len(kernel_names(thunks[0]))
                        row["kernels"] = kernel_times(sequence(thunks), len(case.sets))
                    except RuntimeError as failure:  # the times stand without them
                        print(f"benchmarks: no times of kernels for {describe(row)}: {failure}")
                    results.write()
        del case
        release()


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    routing = "" if row["routing"] == "uniform" else f"{row['routing']} "
    head = f"{row['shape']:>14} T={row['T']:<6} {routing}{row['peer']:<18}"
    if row["us"] is None:
        return f"{head} -  {row['reason']}"
    roof = f"  roof {row['roof_us']:.1f} us ({row['roof_us'] / row['us']:.0%})" if row["roof_us"] else ""
    error = f"  error {row['error']:.1e}" if row["error"] is not None else ""
    ratio = f"  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]" if "ratio" in row else ""
    flag = f"  FLAG {row['flag']}" if "flag" in row else ""
    return f"{head} {row['us']:10.1f} us [{row['us_low']:.1f}, {row['us_high']:.1f}]{ratio}{roof}{error}{flag}"


def layer_method(rounds: int) -> str:
    """The method as it is written into the result file."""
    intervals = INTERVALS.format(
        unit="us", division=", divided by the number of sets", of="the header's reference peer's time over the peer's"
    )
    return METHOD.format(timing=method(rounds), intervals=intervals, ceilings=device.METHOD)
