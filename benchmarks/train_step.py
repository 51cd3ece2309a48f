"""Time of a whole model's training step: forward, loss, backward, AdamW; transformers as it is today against this
project's backend.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.e2e import WARMUP_STEPS, add_times, built, counting, graph_counters, method_of, sharing_copy, uncached
from benchmarks.layers import empty_cache, release
from benchmarks.models import VARIANTS, Model, Variant
from benchmarks.results import ResultFile, progress_bar, why
from benchmarks.timing import Run, in_turn, wait, warm

ROUNDS = 15
ROWS = {"qwen3-4l": ((1, 4096), (4, 4096)), "tiny": ((1, 16), (2, 16))}  # batch x tokens
CHECKPOINTING = {"off": False, "on": True}
DEFAULT_VARIANTS = (
    "grouped_mm",
    "grouped_mm compiled",
    "grouped_mm reduce-overhead",
    "moe_ops",
    "moe_ops reduce-overhead",
    "attention alone",
)
LEARNING_RATE = 1e-8
OUT_OF_MEMORY = "out of memory"
METHOD = (
    "{layers} decoder layers, random {dtype} weights and tokens; a step is forward, transformers' loss of the next "
    "token, backward, AdamW(fused=True) over all parameters, and gradients set to None; lr={lr}, so that weights stay "
    "as they are and every variant routes alike. checkpointing: transformers', of every layer, not reentrant. "
    "Variants are compiled with static shapes and fullgraph=True and share parameters and optimizer; all of a row are "
    "in one process, run in turn for {warm} s, to hot clocks, then in {in_turn}, a step each, timed {clock}; before a "
    "step, outside the timing, the device idles; {intervals}; peak_bytes: most memory of a step beyond parameters and "
    "the optimizer's state, gradients included, of variants without CUDA graphs; loss: of the first step"
)


@dataclass(frozen=True)
class Case:
    """A step over ``tokens`` `[batch, length]`; ``optimizer`` holds the parameters of ``network``."""

    network: Any
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    checkpointing: bool

    def head(self, name: str) -> dict[str, Any]:
        """How a row begins."""
        batch, tokens = self.tokens.shape
        return {"batch": batch, "tokens": tokens, "checkpointing": self.checkpointing, "variant": name}


def new_results(model: Model, path: Path | None, commit: str, rounds: int) -> ResultFile:
    """The file of a run, without rows."""
    method = method_of(METHOD, model, rounds, lr=LEARNING_RATE)
    return ResultFile(path, "train-step", method, commit=commit, config=model.config)


def run(
    model: Model,
    rows: Sequence[tuple[int, int]],
    variants: Sequence[str],
    checkpointing: Sequence[bool],
    results: ResultFile,
    *,
    rounds: int = ROUNDS,
) -> None:
    """Time every row under every variant; a variant that cannot run is a row with the reason instead of a time."""
    with built(model) as network, uncached(), progress_bar() as progress:
        network.requires_grad_(True)
        optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, fused=True)
        task = progress.add_task("train-step", total=len(rows) * len(variants) * len(checkpointing))
        for batch, length in rows:
            tokens = made_tokens(network, batch, length)
            for on in checkpointing:
                title = f"{batch}x{length}{' checkpointing' if on else ''}"

                def say(name: str, title: str = title) -> None:
                    progress.update(task, description=f"{title} {name}")

                for row in time_case(Case(network, optimizer, tokens, on), variants, rounds, say):
                    results.add(row)
                    progress.console.print(describe(row), highlight=False, soft_wrap=True)
                    progress.advance(task)


def made_tokens(network: Any, batch: int, length: int) -> torch.Tensor:
    """Random tokens of the network's vocabulary, on its device: every variant reads the same."""
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(0, network.config.vocab_size, (batch, length), device=device, generator=generator)


def time_case(case: Case, variants: Sequence[str], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A result row for each variant: all are compiled, each to completion, then timed in turn."""
    release()
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name in variants:
        say(name)
        outcome, step = prepare(case, VARIANTS[name])
        rows[name] = case.head(name) | outcome
        if step is not None:
            runs[name] = step
    say("all in turn")
    for name in list(runs):  # with what all of them hold
        if reason := failure_of(case, runs[name]):
            rows[name] |= {"ms": None, "reason": f"{reason} beside the others"}
            del runs[name]
    warm(runs)
    samples = in_turn({name: counting(step, rows[name]) for name, step in runs.items()}, rounds)
    add_times(rows, samples)
    for row in rows.values():
        if row["ms"] is not None:
            row["tokens_per_s"] = case.tokens.numel() / row["ms"] * 1e3
    runs.clear()
    release()
    return list(rows.values())


def prepare(case: Case, variant: Variant) -> tuple[dict[str, Any], Run | None]:
    """(torch's counters, loss and memory; a step), or the reason and None."""
    counters.clear()
    start = time.perf_counter()
    outcome: dict[str, Any] = {}
    step = make_step(case, variant)

    def first_steps() -> None:
        outcome["loss"] = step().item()
        for _ in range(WARMUP_STEPS):
            step()
        outcome["peak_bytes"] = None if "mode" in (variant.compile_options or {}) else peak_bytes(step)

    reason = failure_of(case, first_steps)
    outcome |= {"ms": None, "reason": reason} if reason else {"first_steps_s": round(time.perf_counter() - start, 1)}
    return outcome | graph_counters(), None if reason else Run(step, wait)


def make_step(case: Case, variant: Variant) -> Callable[[], torch.Tensor]:
    """One step, which returns its loss."""
    network = sharing_copy(case.network).train()
    network.set_experts_implementation(variant.experts)
    if case.checkpointing:
        # What later releases of transformers call it, and what it was before.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(network, name) for name in names if hasattr(network, name))
        enable({"use_reentrant": False})
    forward = variant.compiled(network)

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss: torch.Tensor = forward(input_ids=case.tokens, labels=case.tokens, use_cache=False).loss
        loss.backward()
        case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def failure_of(case: Case, call: Callable[[], Any]) -> str | None:
    """Why a call does not work, or None; what it held is given back."""
    try:
        call()
        wait()
        return None
    except torch.OutOfMemoryError:
        reason = OUT_OF_MEMORY
    except Exception as failure:
        traceback.print_exc(limit=-3)
        reason = why(failure)
    case.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    empty_cache()
    return reason


def peak_bytes(step: Callable[[], Any]) -> int | None:
    """Memory that one step needs for a while, beyond what is there before it; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    on = "checkpointing " if row["checkpointing"] else ""
    head = f"{row['batch']}x{row['tokens']:<6} {on}{row['variant']:<28}"
    if row["ms"] is None:
        return f"{head} -  {row['reason']}"
    ratio = f"  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]" if "ratio" in row else ""
    peak = f"  peak {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] is not None else ""
    signals = ("graphs", "cudagraph_skips", "cudagraph_partitions", "fused", "refused", "causal_masks")
    counts = "  ".join(f"{name}={row[name]}" for name in signals)
    return (
        f"{head} {row['ms']:8.2f} ms  {row['tokens_per_s']:.0f} tokens/s{ratio}{peak}  loss {row['loss']:.3f}  {counts}"
    )
