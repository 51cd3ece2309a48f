"""Time of a whole model's step: what transformers offers today against this project's backend.

One step is one forward pass of `batch x new` tokens with a static cache whose every position is attended to (the new
tokens are its last ones), ending in the logits of each sequence's last token.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.intervals import fields, median_interval, ratio_interval
from benchmarks.layers import release
from benchmarks.models import TRANSFORMERS, VARIANTS, Model, Variant
from benchmarks.results import ResultFile, progress_bar, why
from benchmarks.timing import IN_TURN, INTERVALS, ROUNDS, WARM_SECONDS, Run, in_turn, warm

METHOD = (
    "{layers} decoder layers, random {dtype} weights, StaticCache of {cache} positions (or the new tokens, if more) "
    "attended to in full, logits of the last token only. Every variant compiles afresh with static shapes and "
    "fullgraph=True; all of a row are in one process, run in turn for {warm} s, to hot clocks, then in {in_turn}, "
    "{steps} each, timed {clock}; before {them}, outside the timing, the device idles and the cache is set back; "
    "{intervals}"
)
WARMUP_STEPS = 4  # CUDA graph trees warm up, record and replay within the first three
GATHER_LIMIT_BYTES = 30e9  # batched_mm copies the weights of every (token, expert) pair


def parse_row(text: str) -> tuple[int, int]:
    """(batch, new tokens) of "8x1".

    Raises:
        ValueError: anything else.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"benchmarks: --rows must be BATCHxNEW such as 8x1, got {text!r}.")
    return int(parts[0]), int(parts[1])


def new_results(model: Model, path: Path | None, commit: str, length: int, rounds: int, steps: int) -> ResultFile:
    """The file of a run, without rows."""
    of_steps = ("a step", "it") if steps == 1 else (f"{steps} steps, whose next is issued behind the last,", "them")
    method = method_of(METHOD, model, rounds, cache=length, steps=of_steps[0], them=of_steps[1])
    return ResultFile(path, "e2e", method, commit=commit, cache_length=length, config=model.config)


def method_of(text: str, model: Model, rounds: int, **own: Any) -> str:
    """How variants of ``model`` are timed: ``text``, which may name what of it is ``own``, filled in."""
    return text.format(
        layers=model.config["num_hidden_layers"],
        dtype=model.dtype,
        warm=WARM_SECONDS,
        in_turn=IN_TURN.format(rounds=rounds),
        clock="by CUDA events" if torch.cuda.is_available() else "by the wall clock",
        intervals=INTERVALS.format(
            unit="ms",
            division="",
            of="the variant's time over that of transformers' fastest variant, or our unquantised one (the row's "
            "reference)",
        ),
        **own,
    )


def run(
    model: Model,
    rows: Sequence[tuple[int, int]],
    variants: Sequence[str],
    results: ResultFile,
    *,
    length: int,
    rounds: int = ROUNDS,
    steps: int = 1,
) -> None:
    """Time every row under every variant; a variant that cannot run is a row with the reason instead of a time."""
    with built(model) as network, uncached(), progress_bar() as progress:
        task = progress.add_task("e2e", total=len(rows) * len(variants))
        for batch, new in rows:
            case = Case(network, batch, new, max(length, new * steps), steps)

            def say(name: str, title: str = f"{batch}x{new}") -> None:
                progress.update(task, description=f"{title} {name}")

            for row in time_case(case, variants, rounds, say):
                results.add(row)
                progress.console.print(describe(row), highlight=False, soft_wrap=True)
                progress.advance(task)


@dataclass(frozen=True)
class Case:
    """``steps`` of ``batch`` sequences with ``new`` tokens each; theirs are the last of ``length`` in the cache."""

    network: Any
    batch: int
    new: int
    length: int
    steps: int = 1

    def unfit(self, variant: Variant) -> str | None:
        """Why a variant is not tried, or None."""
        config = self.network.config
        pairs = self.batch * self.new * config.num_experts_per_tok
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        gathered = pairs * 6 * config.hidden_size * width
        if variant.experts == "batched_mm" and gathered > GATHER_LIMIT_BYTES:
            return f"copies {gathered / 1e9:.0f} GB of weights"
        return None


def time_case(case: Case, variants: Sequence[str], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A result row for each variant: all are compiled, each to completion, then timed in turn."""
    release()
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name in variants:
        say(name)
        head = {"batch": case.batch, "new_tokens": case.new, "cache_length": case.length, "variant": name}
        outcome, step = prepare(case, VARIANTS[name])
        rows[name] = head | outcome
        if step is not None:
            runs[name] = step
    say("all in turn")
    warm(runs)
    samples = in_turn({name: counting(step, rows[name]) for name, step in runs.items()}, rounds)
    add_times(rows, samples)
    runs.clear()
    release()
    return list(rows.values())


def prepare(case: Case, variant: Variant) -> tuple[dict[str, Any], Run | None]:
    """(torch's counters of graphs, skips and partitions; a step), or the reason and None."""
    reason = case.unfit(variant)
    if reason:
        return {"ms": None, "reason": reason}, None
    counters.clear()
    start = time.perf_counter()
    step = None
    try:
        step, outcome = make_step(case, variant)
        for _ in range(-(-WARMUP_STEPS // case.steps)):
            step()
        outcome["first_steps_s"] = round(time.perf_counter() - start, 1)
    except torch.OutOfMemoryError:
        outcome = {"ms": None, "reason": "out of memory"}
    except Exception as failure:
        traceback.print_exc(limit=-3)
        outcome = {"ms": None, "reason": why(failure)}
    return outcome | graph_counters(), None if "reason" in outcome else step


def make_step(case: Case, variant: Variant) -> tuple[Run, dict[str, Any]]:
    """Forward passes, after setting the cache back to where the new tokens are its last; of quantised experts the
    bytes, over those of what they are made of.
    """
    from transformers import StaticCache

    network = sharing_copy(case.network)
    network.set_experts_implementation(variant.experts)
    made = {} if variant.scheme is None else {"expert_bytes": quantized(network, variant.scheme)}
    device, config = next(network.parameters()).device, network.config
    cache = StaticCache(config=config, max_cache_len=case.length)
    cache.early_initialization(case.batch, config.num_key_value_heads, config.head_dim, network.dtype, device)
    generator = torch.Generator(device).manual_seed(0)  # every variant reads the same tokens, and so the same experts
    tokens = torch.randint(0, config.vocab_size, (case.batch, case.new), device=device, generator=generator)
    forward = variant.compiled(network)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(case.length - case.new * case.steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return Run(step, rewind, case.steps), made


def quantized(network: Any, scheme: str) -> float:
    """Bytes of the experts' weights over what they were, after quantising those of ``network`` alone."""
    parameters = moe_ops.quantize_(network, scheme).parameters
    return sum(one.after for one in parameters) / sum(one.before for one in parameters)


def sharing_copy(network: Any) -> Any:
    """The same parameters and buffers in modules, and under a configuration, of their own.

    The implementation of the experts is a setting that graphs are guarded on, so variants cannot share it.
    """
    tensors = [*network.parameters(), *network.buffers()]
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def counting(run: Run, row: dict[str, Any]) -> Run:
    """``run``, adding to its row what it compiles: nothing, or it is no steady state that is timed."""
    row["recompiles"] = 0

    def call() -> None:
        before = counters["stats"]["unique_graphs"]
        run.call()
        row["recompiles"] += counters["stats"]["unique_graphs"] - before

    return replace(run, call=call)


def add_times(rows: dict[str, dict[str, Any]], samples: Mapping[str, Sequence[float]]) -> None:
    """Write into rows, by variant, what their samples say; a variant that recompiled has no time. Where transformers
    has none, quantised variants are compared with the first one whose weights are plain.
    """
    kept = {name: [us / 1e3 for us in of_name] for name, of_name in samples.items() if not rows[name]["recompiles"]}
    for name in samples:
        if name not in kept:
            rows[name] |= {"ms": None, "reason": f"compiled {rows[name]['recompiles']} times while it was timed"}
    theirs = [name for name in kept if name.startswith(TRANSFORMERS)]
    best = min(theirs, key=lambda name: median_interval(kept[name])[0], default=None)
    if best is None and any(VARIANTS[name].scheme for name in kept):
        best = next((name for name in kept if VARIANTS[name].scheme is None), None)
    for name, of_name in kept.items():
        rows[name] |= fields("ms", median_interval(of_name)) | {"rounds": len(of_name)}
        if best is not None:
            rows[name] |= fields("ratio", ratio_interval(of_name, kept[best])) | {"reference": best}


def graph_counters() -> dict[str, int]:
    """What torch counted since `counters.clear()`; `fused` and `refused` are this project's own."""
    inductor, ours = counters["inductor"], counters["moe_ops"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": inductor["cudagraph_skips"],
        "cudagraph_partitions": inductor["cudagraph_partitions"],
        "fused": ours["fused"],
        "refused": ours["refused"],
        "causal_masks": ours["causal_masks"],
        "shared_heads": ours["shared_heads"],
    }


@contextmanager
def built(model: Model) -> Iterator[Any]:
    """The network, made on its device and in its dtype so that no fp32 copy ever exists."""
    import transformers

    config = getattr(transformers, f"{model.family}Config")(**model.config)
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            network = getattr(transformers, f"{model.family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(default)
    yield network.requires_grad_(False)


@contextmanager
def uncached() -> Iterator[None]:
    """Compile every graph: partitions, and what was fused, are counted while compiling and not on a cache hit."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['batch']}x{row['new_tokens']:<5} {row['variant']:<42}"
    if row["ms"] is None:
        return f"{head} -  {row['reason']}"
    ratio = f"  ratio {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]" if "ratio" in row else ""
    signals = ("graphs", "cudagraph_skips", "cudagraph_partitions", "fused", "refused", "shared_heads")
    return f"{head} {row['ms']:8.3f} ms{ratio}  " + "  ".join(f"{name}={row[name]}" for name in signals)
