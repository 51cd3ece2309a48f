"""Time of forward and backward of one MoE layer by shape, number of tokens and peer, trained or with frozen experts."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters

import compile_passes.backend  # noqa: F401  (registers it)
from benchmarks import device
from benchmarks.cases import Case, Weights, layer_weights, make_case
from benchmarks.gradients import error
from benchmarks.kernels import kernel_times, launches
from benchmarks.layers import add_times, empty_cache, measure, release
from benchmarks.peers import transformers_layer
from benchmarks.results import OURS, ResultFile, progress_bar, why
from benchmarks.shapes import Shape
from benchmarks.step import Step, peak_bytes, saved_bytes
from benchmarks.timing import INTERVALS, ROUNDS, Run, Thunk, graph_pool, method, sequence
from benchmarks.training_peers import OPTIONAL

TOKENS = (1024, 4096, 16384)
TINY_TOKENS = (16, 256)
MODES = ("trained", "frozen")
#: What torch.compile is given.
PEERS: dict[str, dict[str, Any]] = {
    "ours_compiled": {"backend": "moe_ops"},
    "ours_activation": {"backend": "moe_ops", "options": {"recompute": "activation"}},
    "hf_moe": {},
}
REFERENCE, THEIRS = "ours_compiled", "hf_moe"
CHECKED_TOKENS = 1024  # most tokens of a case whose gradients are compared with exact ones
ROOM = 4  # times the bytes of its weights that a layer needs: weights, gradients in a graph, and of a call without one
OUT_OF_MEMORY = "out of memory"
METHOD = (
    "forward and backward of one MoE layer, router logits to gradients of hidden states, logits, and of both weights "
    "where trained; the same code (transformers' Qwen3-MoE routing and grouped_mm experts) under torch.compile "
    "(fullgraph, static shapes) with each backend; {timing}; graphs share their memory; {intervals}; forward_us: "
    "without gradients, timed alike; "
    "peak_bytes: most memory of one call, uncaptured, beyond what was held before and the gradients that it returns; "
    "saved_bytes: what a forward leaves behind for the backward, beyond its output; neither holds inputs, parameters "
    "or gradients; error: largest Euclidean error among the gradients, relative to fp32 by autograd, one expert at a "
    "time, of cases of at most {checked} tokens; ceilings: {ceilings}; kernels: torch.profiler, median of 5 replays, "
    "after everything was timed; launches: of one call, in a captured graph, those of the backward beyond those of the "
    "forward that keeps what it needs"
)


@dataclass(frozen=True)
class Plan:
    """What is timed, and whether the times of kernels are wanted too."""

    shapes: Sequence[Shape]
    tokens: Sequence[int]
    modes: Sequence[str] = MODES
    peers: Sequence[str] = tuple(PEERS)
    rounds: int = ROUNDS
    kernels: bool = True

    @property
    def reference(self) -> str:
        """Whose time over each peer's is the ratio."""
        return REFERENCE if REFERENCE in self.peers else self.peers[0]


@dataclass(frozen=True)
class Prepared:
    """A peer on a case: its steps, and all of them in one call."""

    steps: Sequence[Step]
    call: Thunk
    forward: Thunk


@dataclass
class Kept:
    """What was timed, by the key of its row, until its kernels are: nothing is compiled twice for them.

    ``pool``: memory of the graphs of one shape, or of one case where nothing is kept.
    """

    wanted: bool
    by_key: dict[tuple[Any, ...], Prepared] = field(default_factory=dict)
    pool: Any = None

    def make_room(self, shape: Shape) -> None:
        """Before a shape: its own pool, and what is kept goes where memory is short."""
        empty_cache()
        if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < ROOM * shape.weight_bytes():
            self.drop()
        self.pool = graph_pool()

    def add(self, row: dict[str, Any], prepared: Prepared) -> None:
        """Keep it, if kernels are wanted."""
        if self.wanted:
            self.by_key[key_of(row)] = prepared

    def drop(self) -> None:
        """Give all memory back."""
        self.by_key.clear()
        gc.collect()
        empty_cache()
        self.pool = graph_pool()  # one whose graphs are gone cannot be used again


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from others of its file."""
    return row["shape"], row["T"], row["mode"], row["peer"]


def run(plan: Plan, results: ResultFile) -> None:
    """Time every case that has no rows yet, one row for each peer; a peer that cannot run is a row with the reason
    instead of a time.
    """
    on_gpu = torch.cuda.is_available()
    left = cases_left(plan, results)
    kept = Kept(plan.kernels and on_gpu)
    with progress_bar() as progress:
        task = progress.add_task("train", total=sum(map(len, left.values())))
        for shape, cases in left.items():
            if not cases:
                continue
            kept.make_room(shape)
            weights = made_weights(shape)
            for T, mode in cases:
                progress.update(task, description=f"{shape.name} T={T} {mode}")
                for row in time_case(make_case(weights, T), mode, plan, kept):
                    results.add(row)
                    progress.console.print(describe(row), highlight=False, soft_wrap=True)
                progress.advance(task)
                if not kept.by_key:
                    kept.drop()
            if not kept.by_key:
                del weights
                release()
        if kept.wanted:
            add_kernels(plan, results, kept)


def cases_left(plan: Plan, results: ResultFile) -> dict[Shape, list[tuple[int, str]]]:
    """(tokens, mode) by shape of the cases that the file has not every row of; a case's rows belong together, so that
    those of a part of its peers are taken out.
    """
    have = set(map(key_of, results.rows))
    left = {
        shape: [
            (T, mode)
            for T in plan.tokens
            for mode in plan.modes
            if not have.issuperset((shape.name, T, mode, peer) for peer in plan.peers)
        ]
        for shape in plan.shapes
    }
    again = {(shape.name, T, mode) for shape, cases in left.items() for T, mode in cases}
    results.rows[:] = [row for row in results.rows if key_of(row)[:3] not in again]
    return left


def made_weights(shape: Shape) -> Weights:
    """On the GPU in bf16, without one in fp32."""
    on_gpu = torch.cuda.is_available()
    return layer_weights(shape, torch.bfloat16 if on_gpu else torch.float32, "cuda" if on_gpu else "cpu")


def steps(case: Case, mode: str, peer: str) -> list[Step]:
    """One step for each input set, of a layer as ``peer`` compiles it, or of another project's."""
    if peer in OPTIONAL:
        layers, weights = OPTIONAL[peer].layers(case)
    else:
        layer, experts = transformers_layer(case, **PEERS[peer])
        layers, weights = [layer] * len(case.sets), list(experts.parameters())
    trained = weights if mode == "trained" else []
    for weight in trained:
        weight.requires_grad_()
    generator = torch.Generator(case.sets[0].hidden_states.device).manual_seed(1)
    return [
        Step(layer, inputs, torch.empty_like(inputs.hidden_states).normal_(generator=generator), trained)
        for layer, inputs in zip(layers, case.sets, strict=True)
    ]


def time_case(case: Case, mode: str, plan: Plan, kept: Kept) -> list[dict[str, Any]]:
    """Result rows of one case; never raises for what a peer cannot do."""
    rows: dict[str, dict[str, Any]] = {}
    made: dict[str, Prepared] = {}
    for name in plan.peers:
        head = {"shape": case.shape.name, "T": case.T, "mode": mode, "peer": name}
        outcome, prepared = prepare(case, mode, name, kept.pool)
        if outcome.get("reason") == OUT_OF_MEMORY and kept.by_key:
            kept.drop()
            outcome, prepared = prepare(case, mode, name, kept.pool)
        rows[name] = head | outcome
        if prepared is not None:
            made[name] = prepared
    if made:
        sets = len(case.sets)
        samples, state = measure({name: Run(prepared.call) for name, prepared in made.items()}, plan.rounds)
        add_times(rows, samples, sets, plan.reference)
        forward: dict[str, dict[str, Any]] = {name: {} for name in made}
        runs = {name: Run(prepared.forward) for name, prepared in made.items()}
        add_times(forward, measure(runs, plan.rounds)[0], sets, None)
        for name, prepared in made.items():
            rows[name] |= state | {"forward_us": forward[name]["us"]}
            kept.add(rows[name], prepared)
    return list(rows.values())


def prepare(case: Case, mode: str, peer: str, pool: Any) -> tuple[dict[str, Any], Prepared | None]:
    """(what is known of a peer before it is timed, its calls), or the reason and None."""
    if peer in OPTIONAL and (reason := OPTIONAL[peer].missing()):
        return {"us": None, "reason": reason}, None
    try:
        return _prepare(case, mode, peer, pool)
    except torch.OutOfMemoryError:
        reason = OUT_OF_MEMORY
    except Exception as failure:
        reason = why(failure)
        traceback.print_exc(limit=-3)
    gc.collect()
    empty_cache()
    return {"us": None, "reason": reason}, None


def _prepare(case: Case, mode: str, peer: str, pool: Any) -> tuple[dict[str, Any], Prepared]:
    before = counters["moe_ops"]["fused"]
    made = steps(case, mode, peer)
    found = made[0]()
    if peer.startswith(OURS) and counters["moe_ops"]["fused"] == before:
        raise RuntimeError("nothing was fused")
    known: dict[str, Any] = {"error": None}
    if case.T <= CHECKED_TOKENS:
        known["error"] = error(case, made[0].inputs, made[0].grad_output, found)
    del found
    known |= {"peak_bytes": peak_bytes(made[0]), "saved_bytes": saved_bytes(made[0])}
    return known, Prepared(made, sequence(made, pool), sequence([step.forward for step in made], pool))


def add_kernels(plan: Plan, results: ResultFile, kept: Kept) -> None:
    """Write times and launches of kernels into the rows that lack them, from what was timed, or made again where that
    was dropped. Nothing is timed afterwards: a profiler, once loaded, may slow all.
    """
    shapes = {shape.name: shape for shape in plan.shapes}
    weights: Weights | None = None
    for row in results.rows:
        known = row["shape"] in shapes and row["peer"] in (*PEERS, *OPTIONAL)
        if row["us"] is None or "kernels" in row or not known:
            continue
        try:
            prepared = kept.by_key.pop(key_of(row), None)
            if prepared is None:
                if weights is None or weights.shape.name != row["shape"]:
                    weights = None
                    gc.collect()
                    empty_cache()
                    weights = made_weights(shapes[row["shape"]])
                made = steps(make_case(weights, row["T"]), row["mode"], row["peer"])
                prepared = Prepared(made, sequence(made), made[0].forward)
            forward, backward = launches(prepared.steps[0].saving, prepared.steps[0])
            row |= {"launches_forward": sum(forward.values()), "launches_backward": sum(backward.values())}
            row |= {"kernels_forward": forward, "kernels_backward": backward}
            row["kernels"] = kernel_times(prepared.call, len(prepared.steps))
        except RuntimeError as failure:  # the times stand without them
            print(f"benchmarks: no times of kernels for {describe(row)}: {failure}")
        prepared = None
        empty_cache()
        results.write()


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['shape']:>14} T={row['T']:<6} {row['mode']:<8}{row['peer']:<14}"
    if row["us"] is None:
        return f"{head} -  {row['reason']}"
    ratio = f"  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]" if "ratio" in row else ""
    memory = ""
    for name in ("peak", "saved"):
        if (size := row[f"{name}_bytes"]) is not None:
            memory += f"  {name} {size / 2**20:.0f} MiB"
    off = f"  error {row['error']:.1e}" if row["error"] is not None else ""
    return f"{head} {row['us']:10.1f} us  forward {row['forward_us']:9.1f} us{ratio}{memory}{off}"


def train_method(plan: Plan) -> str:
    """The method as it is written into the result file."""
    intervals = INTERVALS.format(
        unit="us", division=", divided by the number of sets", of=f"{plan.reference}'s time over the peer's"
    )
    made = METHOD.format(
        timing=method(plan.rounds), intervals=intervals, checked=CHECKED_TOKENS, ceilings=device.METHOD
    )
    return "; ".join([made, *(f"{name}: {OPTIONAL[name].describe()}" for name in plan.peers if name in OPTIONAL)])
