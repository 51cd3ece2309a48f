"""Time of forward and backward of one MoE layer by shape, number of tokens and peer, trained or with frozen experts."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import compile_passes.backend  # noqa: F401  (registers it)
from benchmarks.cases import Case, InputSet, layer_weights, make_case
from benchmarks.kernels import kernel_times
from benchmarks.layers import add_times, empty_cache, measure, release
from benchmarks.peers import transformers_layer
from benchmarks.results import ResultFile, progress_bar, why
from benchmarks.shapes import Shape
from benchmarks.timing import INTERVALS, ROUNDS, Run, method, sequence

TOKENS = (1024, 4096, 16384)
TINY_TOKENS = (16, 256)
MODES = ("trained", "frozen")
PEERS = {"ours_compiled": {"backend": "moe_ops"}, "hf_moe": {}}  # what torch.compile is given
REFERENCE = next(iter(PEERS))
CHECKED_TOKENS = 1024  # most tokens of a case whose gradients are compared with exact ones
METHOD = (
    "forward and backward of one MoE layer, router logits to gradients of hidden states, logits, and of both weights "
    "where trained; the same code (transformers' Qwen3-MoE routing and grouped_mm experts) under torch.compile "
    "(fullgraph, static shapes) with each backend; {timing}; {intervals}; forward_us: without gradients, timed alike; "
    "peak_bytes: most memory of one call, uncaptured, beyond what was held before and the gradients that it returns; "
    "error: largest Euclidean error among the gradients, relative to fp32 by autograd, one expert at a time, of cases "
    "of at most {checked} tokens; kernels: torch.profiler, median of 5 replays, after everything was timed"
)


@dataclass(frozen=True)
class Step:
    """Forward and backward of a layer on one input set."""

    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: InputSet
    grad_output: torch.Tensor
    weights: Sequence[torch.Tensor]

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Gradients of hidden states, logits and the weights."""
        leaves = [tensor.detach().requires_grad_() for tensor in (self.inputs.hidden_states, self.inputs.router_logits)]
        output = self.layer(*leaves)
        return torch.autograd.grad(output, [*leaves, *self.weights], self.grad_output)

    def forward(self) -> torch.Tensor:
        """The output, without what a backward needs."""
        with torch.no_grad():
            return self.layer(self.inputs.hidden_states, self.inputs.router_logits)


def run(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    modes: Sequence[str],
    results: ResultFile,
    *,
    rounds: int = ROUNDS,
    kernels: bool = True,
) -> None:
    """Time every case, one row for each peer; a peer that cannot run is a row with the reason instead of a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with progress_bar() as progress, torch._dynamo.config.patch(recompile_limit=256):
        task = progress.add_task("train", total=len(shapes) * len(tokens) * len(modes))
        for shape in shapes:
            weights = layer_weights(shape, torch.bfloat16 if device == "cuda" else torch.float32, device)
            for T in tokens:
                for mode in modes:
                    progress.update(task, description=f"{shape.name} T={T} {mode}")
                    case = make_case(weights, T)
                    rows = time_case(case, mode, rounds)
                    for row in rows:
                        results.add(row)
                        progress.console.print(describe(row), highlight=False, soft_wrap=True)
                    del case
                    release()
                    progress.advance(task)
            del weights
            release()
        if kernels and device == "cuda":
            _add_kernels(shapes, results)


def steps(case: Case, mode: str, options: dict[str, Any]) -> list[Step]:
    """One step for each input set, of a layer compiled with ``options``."""
    layer, experts = transformers_layer(case, **options)
    weights = list(experts.parameters()) if mode == "trained" else []
    for weight in weights:
        weight.requires_grad_()
    generator = torch.Generator(case.sets[0].hidden_states.device).manual_seed(1)
    return [
        Step(layer, inputs, torch.empty_like(inputs.hidden_states).normal_(generator=generator), weights)
        for inputs in case.sets
    ]


def time_case(case: Case, mode: str, rounds: int) -> list[dict[str, Any]]:
    """Result rows of one case; never raises for what a peer cannot do."""
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    forwards: dict[str, Run] = {}
    for name, options in PEERS.items():
        head = {"shape": case.shape.name, "T": case.T, "mode": mode, "peer": name}
        try:
            made = steps(case, mode, options)
            known: dict[str, Any] = {"error": error(case, made[0]) if case.T <= CHECKED_TOKENS else None}
            known["peak_bytes"] = peak_bytes(made[0])
            runs[name] = Run(sequence(made))
            forwards[name] = Run(sequence([step.forward for step in made]))
        except Exception as failure:
            known = {"us": None, "reason": why(failure)}
            traceback.print_exc(limit=-3)
            empty_cache()
        rows[name] = head | known
    if runs:
        samples, state = measure(runs, rounds)
        add_times(rows, samples, len(case.sets), REFERENCE)
        forward: dict[str, dict[str, Any]] = {name: {} for name in forwards}
        add_times(forward, measure(forwards, rounds)[0], len(case.sets), None)
        for name in runs:
            rows[name] |= state | {"forward_us": forward[name]["us"]}
    return list(rows.values())


def peak_bytes(step: Step) -> int | None:
    """Memory that one call needs for a while, beyond its inputs and the gradients that it returns."""
    if not torch.cuda.is_available():
        return None
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = step()
    torch.cuda.synchronize()
    held = sum(grad.untyped_storage().nbytes() for grad in grads)
    return torch.cuda.max_memory_allocated() - before - held


def error(case: Case, step: Step) -> float:
    """Largest relative error among a step's gradients."""
    expected = exact_gradients(case, step)
    found = step()
    return max(
        ((grad.float() - exact).norm() / exact.norm()).item() for grad, exact in zip(found, expected, strict=False)
    )


def exact_gradients(case: Case, step: Step) -> list[torch.Tensor]:
    """fp32 gradients of hidden states, logits and weights, one expert at a time."""
    inputs, shape = step.inputs, case.shape
    hidden = inputs.hidden_states.float().requires_grad_()
    logits = inputs.router_logits.float().requires_grad_()
    ids = inputs.topk_ids.long()
    scores = torch.softmax(logits, dim=-1).gather(1, ids)
    scores = scores / scores.sum(dim=-1, keepdim=True)
    grad_output = step.grad_output.float()
    grad_hidden, grad_scores = torch.zeros_like(hidden), torch.zeros_like(scores)
    grad_weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in step.weights]
    for expert in range(shape.E):
        token, slot = torch.where(ids == expert)
        if not token.numel():
            continue
        x, score = hidden.detach()[token].requires_grad_(), scores.detach()[token, slot].requires_grad_()
        of = [case.weights.gate_up_proj[expert], case.weights.down_proj[expert]]
        first, second = (weight.detach().float().requires_grad_() for weight in of)
        gate, up = F.linear(x, first).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, second) * score[:, None]
        grads = torch.autograd.grad(rows, [x, score, first, second], grad_output[token])
        grad_hidden.index_add_(0, token, grads[0])
        grad_scores[token, slot] = grads[1]
        for whole, part in zip(grad_weights, grads[2:], strict=False):
            whole[expert] = part
    (grad_logits,) = torch.autograd.grad(scores, [logits], grad_scores)
    return [grad_hidden, grad_logits, *grad_weights]


def _add_kernels(shapes: Sequence[Shape], results: ResultFile) -> None:
    """Write the times of kernels into all rows. Nothing is timed afterwards: a profiler, once loaded, may slow all."""
    for shape in shapes:
        weights = layer_weights(shape, torch.bfloat16, "cuda")
        for row in (row for row in results.rows if row["shape"] == shape.name and row["us"] is not None):
            case = make_case(weights, row["T"])
            try:
                made = steps(case, row["mode"], PEERS[row["peer"]])
                row["kernels"] = kernel_times(sequence(made), len(made))
            except RuntimeError as failure:  # the times stand without them
                print(f"benchmarks: no times of kernels for {describe(row)}: {failure}")
            results.write()
            del case
            release()


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['shape']:>14} T={row['T']:<6} {row['mode']:<8}{row['peer']:<14}"
    if row["us"] is None:
        return f"{head} -  {row['reason']}"
    ratio = f"  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]" if "ratio" in row else ""
    peak = f"  peak {row['peak_bytes'] / 2**20:.0f} MiB" if row["peak_bytes"] is not None else ""
    error = f"  error {row['error']:.1e}" if row["error"] is not None else ""
    return f"{head} {row['us']:10.1f} us  forward {row['forward_us']:9.1f} us{ratio}{peak}{error}"


def train_method(rounds: int) -> str:
    """The method as it is written into the result file."""
    intervals = INTERVALS.format(
        unit="us", division=", divided by the number of sets", of=f"{REFERENCE}'s time over the peer's"
    )
    return METHOD.format(timing=method(rounds), intervals=intervals, checked=CHECKED_TOKENS)
