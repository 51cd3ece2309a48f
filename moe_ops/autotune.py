"""Measure which plan runs each (shape, tokens) fastest on this GPU: what `moe-ops tune` does.

Kernels are compiled beforehand in parallel processes, from shapes alone; then every candidate layer is timed inside a
captured CUDA graph that rotates over several inputs, so that the weights of a decode step do not come from L2. A scan
of all candidates picks a few, which are timed in turns: a GPU that has grown hot slows down whatever comes last.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from meta.operands import Operand
from meta.schemes import SCHEMES, QuantScheme, joined
from moe_ops import backends, plans
from moe_ops.capture import captured, warm_up
from moe_ops.plans import LayerKey, Plan

TOKENS = tuple(2**octave for octave in range(15))  # a plan serves half an octave to either side
INPUT_SETS = 4


# ---- timing ----


def graph_us(thunks: list[Callable[[], object]], repeats: int = 9) -> float:
    """Median microseconds of one thunk, all of them back to back in one replayed CUDA graph."""

    def call() -> None:
        for thunk in thunks:
            thunk()

    warm_up(call)
    graph, _ = captured(call)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(thunks))
    return float(statistics.median(times))


#: (hidden_states, topk_weights, topk_ids).
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TrialLayer:
    """Random weights and inputs of one key on one device (`meta` for compiling only), and a way to run a plan."""

    def __init__(self, key: LayerKey, device: str) -> None:
        self.key, self.device = key, device
        scheme = SCHEMES[key.scheme]
        rows = (2 if key.gated else 1) * key.I
        self.weights = []
        for n, k in ((rows, key.H), (key.H, key.I)):
            weight = torch.empty(key.E, n, k, device=device, dtype=torch.bfloat16)
            if device != "meta":
                weight.normal_(0, 0.02)
            self.weights.append(self._quantized(scheme, weight) if scheme.quantized else Operand(weight, scheme))

    def _quantized(self, scheme: QuantScheme, weight: torch.Tensor) -> Operand:
        E, n, k = weight.shape
        if scheme.make_scales is None:
            raise ValueError(f"autotune: scheme must quantise weights, got {scheme.name!r}.")
        if self.device == "meta":
            _, made = scheme.quantize(torch.zeros(1, n, k))  # shapes and dtypes
            stored = torch.empty((E, n, k // scheme.pack), dtype=scheme.weight_dtype, device="meta")
            return Operand(stored, scheme, tuple(scale.to("meta").expand(E, -1, -1) for scale in made))
        stored, scales = joined([scheme.quantize(weight[e : e + 1].float()) for e in range(E)])
        return Operand(stored, scheme, scales)

    def inputs(self, tokens: int, sets: int) -> list[Inputs]:
        """`sets` of (hidden_states, topk_weights, topk_ids) with uniform routing."""
        key, made = self.key, []
        for _ in range(sets):
            x = torch.empty(tokens, key.H, device=self.device, dtype=torch.bfloat16)
            weights = torch.empty(tokens, key.K, device=self.device, dtype=torch.float32)
            ids = torch.empty(tokens, key.K, device=self.device, dtype=torch.int32)
            if self.device != "meta":
                x.normal_()
                weights.uniform_()
                ids = torch.rand(tokens, key.E, device=self.device).topk(key.K).indices.int()
            made.append((x, weights, ids))
        return made

    def run(self, plan: Plan, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The layer's output by `plan`."""
        module, capacity = backends.load(plan.backend), self.capacity(x.shape[0])
        if isinstance(module, str):
            raise RuntimeError(f"autotune: {plan.backend} must be importable, but {module}.")
        out: torch.Tensor = module.run_plan(self.key, plan, self.weights, x, weights, ids, capacity=capacity)
        return out

    def capacity(self, tokens: int) -> int:
        """Rows per expert of the batched format: four times an even load, as engines provision it."""
        return min(tokens, 4 * -(-tokens * self.key.K // self.key.E) + 16)


# ---- parallel compilation ----


@contextmanager
def compile_only() -> Iterator[None]:
    """Turn every Triton launch in this process into a compilation."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.__getitem__
    JITFunction.__getitem__ = lambda self, grid: lambda *args, **kwargs: self.warmup(*args, grid=grid, **kwargs)
    try:
        yield
    finally:
        JITFunction.__getitem__ = launch


def _compile(job: tuple[LayerKey, int, Plan]) -> str | None:
    key, tokens, plan = job
    layer = TrialLayer(key, "meta")
    try:
        with compile_only():
            layer.run(plan, *layer.inputs(tokens, 1)[0])
    except Exception as error:  # one candidate that does not compile must not end the tuning of the others
        return f"{plan}: {type(error).__name__}: {str(error)[:200]}"
    return None


def precompile(jobs: Iterable[tuple[LayerKey, int, Plan]], processes: int) -> Iterator[tuple[int, int, str | None]]:
    """Fill Triton's disk cache for all jobs: (how many are done, of how many, why one did not compile or None)."""
    jobs = list({(key, plan): (key, count, plan) for key, count, plan in jobs}.values())  # sizes do not reach the code
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, error in enumerate(pool.imap_unordered(_compile, jobs, chunksize=2), 1):
            yield done, len(jobs), error


# ---- search ----


FINALISTS = 4  # of a scan, to be timed in turns


def _scan(layer: TrialLayer, sets: Sequence[Inputs], found: Iterable[Plan]) -> list[Plan]:
    """The fastest few of these plans by one measurement of each; those that do not run are said and left out."""
    timed = []
    for plan in found:
        try:
            us = graph_us([partial(layer.run, plan, *inputs) for inputs in sets])
        except Exception as error:
            print(f"\n{plan}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)
            torch.cuda.synchronize()
            continue
        timed.append(replace(plan, us=us))
    return sorted(timed, key=_us)[:FINALISTS]


WORTH = 0.97  # of the time of the plan by cost: what a measured plan must stay below to be kept


def by_cost(key: LayerKey, tokens: int) -> Plan:
    """What serves where nothing was measured."""
    _, preferred = next(backends.tunable())
    found: Plan = preferred.cheapest(key, tokens, *plans.gpu_of(torch.device("cuda")))
    return found


def searches(key: LayerKey, tokens: int) -> Iterator[tuple[Plan, tuple[list[Any], ...]]]:
    """(a plan to start from, what to try in place of each of its configs), for every backend and sequence that serves
    at this size.
    """
    _, sm = plans.gpu_of(torch.device("cuda"))
    for name, module in backends.tunable():
        for sequence, found in module.candidates(key, tokens, sm).items():
            if all(found):
                yield Plan(name, sequence, tuple(of_config[0] for of_config in found)), found


def _with(plan: Plan, index: int, config: Any) -> Plan:
    return replace(plan, configs=(*plan.configs[:index], config, *plan.configs[index + 1 :]))


def tune(layer: TrialLayer, tokens: int) -> Plan | None:
    """The fastest plan: one config after another, for each sequence; then the best sequence. None where the plan by
    cost is as fast, or nearly.

    Raises:
        RuntimeError: no candidate runs.
    """
    sets = layer.inputs(tokens, INPUT_SETS if tokens <= 256 else 1)
    winners = []
    for start, found in searches(layer.key, tokens):
        finalists = [start]
        for index, configs in enumerate(found):
            best = finalists[0]
            finalists = _scan(layer, sets, [_with(best, index, config) for config in configs])
            if not finalists:
                break
            if index + 1 < len(found):
                finalists = rematch(layer, sets, finalists)
        winners += finalists
    if not winners:
        raise RuntimeError(f"tune: no candidate runs for {layer.key} and {tokens} tokens.")
    known = by_cost(layer.key, tokens)
    ranked = rematch(layer, sets, [known, *(plan for plan in winners if replace(plan, us=None) != known)])
    limit = next(_us(plan) for plan in ranked if replace(plan, us=None) == known)
    return ranked[0] if _us(ranked[0]) < WORTH * limit else None


def _us(plan: Plan) -> float:
    return math.inf if plan.us is None else plan.us


def rematch(layer: TrialLayer, sets: Sequence[Inputs], plans_found: list[Plan], rounds: int = 3) -> list[Plan]:
    """A few plans, the fastest first, timed in turns, there and back: so that a steady drift falls on all alike."""
    times: list[list[float]] = [[] for _ in plans_found]
    order = range(len(plans_found))
    for _ in range(rounds if len(plans_found) > 1 else 1):
        both = [0.0] * len(plans_found)
        for i in (*order, *reversed(order)):
            both[i] += graph_us([partial(layer.run, plans_found[i], *inputs) for inputs in sets]) / 2
        for samples, us in zip(times, both, strict=True):
            samples.append(us)
    timed = [replace(plan, us=statistics.median(samples)) for plan, samples in zip(plans_found, times, strict=True)]
    return sorted(timed, key=_us)


def jobs_for(key: LayerKey, tokens: Iterable[int]) -> Iterator[tuple[LayerKey, int, Plan]]:
    """Everything `tune` will launch. All configs are tried at once, so that no kernel is compiled twice."""
    for count in tokens:
        yield key, count, by_cost(key, count)
        for start, found in searches(key, count):
            for i in range(max(map(len, found))):
                configs = tuple(of_config[min(i, len(of_config) - 1)] for of_config in found)
                yield key, count, replace(start, configs=configs)
