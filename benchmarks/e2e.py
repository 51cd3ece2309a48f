"""Time of a whole model's step: what transformers offers today against this project's backend.

One step is one forward pass of `batch x new` tokens with a static cache whose every position is attended to (the new
tokens are its last ones), ending in the logits of each sequence's last token.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import compile_passes  # noqa: F401  (registers the backend in a checkout that is not installed)
from benchmarks.results import ResultFile, progress_bar
from benchmarks.timing import cuda_event_ms
from compile_passes.compat import mode_options
from compile_passes.passes import SHARE, MoEPass, Pass

METHOD = (
    "{layers} decoder layers, random {dtype} weights, StaticCache of {cache} positions (or the new tokens, if more) "
    "attended to in full, logits of the last token only; a step is timed {clock}; the cache is set back between steps, "
    "outside the timing; median of {steps} steps. Every variant compiles afresh with static shapes and fullgraph=True"
)
WARMUP_STEPS = 4  # CUDA graph trees warm up, record and replay within the first three
GATHER_LIMIT_BYTES = 30e9  # batched_mm copies the weights of every (token, expert) pair


@dataclass(frozen=True)
class Model:
    """A configuration to build, and the rows (batch, new tokens) that are timed on it."""

    config: dict[str, Any]
    dtype: torch.dtype
    cache_length: int
    rows: tuple[tuple[int, int], ...]


MODELS = {
    # Qwen3-30B-A3B's dimensions; the vocabulary is cut so that embeddings do not dominate four layers.
    "qwen3-4l": Model(
        {
            "num_hidden_layers": 4,
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
        torch.bfloat16,
        cache_length=1024,
        rows=((1, 1), (8, 1), (32, 1), (1, 2048), (4, 2048)),
    ),
    "tiny": Model(
        {
            "num_hidden_layers": 2,
            "vocab_size": 1000,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "norm_topk_prob": True,
            "max_position_embeddings": 512,
        },
        torch.float32,
        cache_length=64,
        rows=((1, 1), (8, 1), (1, 64)),
    ),
}


@dataclass(frozen=True)
class Variant:
    """An experts implementation of transformers, and how the model is compiled (None: not at all).

    ``steps``: passes of this project to add to the default backend, which tells their part in a gain apart.
    """

    experts: str
    compile_options: dict[str, Any] | None = field(default_factory=dict)
    steps: tuple[Pass, ...] = ()

    def describe(self) -> str:
        """For the listing."""
        if self.compile_options is None:
            return f"{self.experts} experts, eager"
        steps = "".join(f", pass {step.name}" for step in self.steps)
        return f"{self.experts} experts, torch.compile({self.compile_options or ''}){steps}"

    def compiled(self, network: Any) -> Any:
        """``network`` as this variant runs it."""
        if self.compile_options is None:
            return network
        options = dict(self.compile_options)
        if self.steps:  # torch.compile takes a mode or options, not both
            options = {"options": mode_options(options.pop("mode", None), False) | options}
            options["options"]["pre_grad_custom_pass"] = MoEPass(self.steps)
        return torch.compile(network, fullgraph=True, dynamic=False, **options)


REDUCE = {"mode": "reduce-overhead"}
VARIANTS = {
    "grouped_mm": Variant("grouped_mm", None),
    "grouped_mm compiled": Variant("grouped_mm"),
    "grouped_mm reduce-overhead": Variant("grouped_mm", REDUCE),
    "batched_mm reduce-overhead": Variant("batched_mm", REDUCE),
    "shared heads alone reduce-overhead": Variant("grouped_mm", REDUCE, (SHARE,)),
    "moe_ops": Variant("grouped_mm", {"backend": "moe_ops"}),
    "moe_ops reduce-overhead": Variant("grouped_mm", {"backend": "moe_ops", **REDUCE}),
}


def parse_row(text: str) -> tuple[int, int]:
    """(batch, new tokens) of "8x1".

    Raises:
        ValueError: anything else.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"benchmarks: --rows must be BATCHxNEW such as 8x1, got {text!r}.")
    return int(parts[0]), int(parts[1])


def new_results(model: Model, path: Path | None, commit: str, length: int, steps: int) -> ResultFile:
    """The file of a run, without rows."""
    clock = "by CUDA events" if torch.cuda.is_available() else "by the wall clock"
    method = METHOD.format(
        layers=model.config["num_hidden_layers"], dtype=model.dtype, cache=length, clock=clock, steps=steps
    )
    return ResultFile(path, "e2e", method, commit=commit, cache_length=length, config=model.config)


def run(
    model: Model,
    rows: Sequence[tuple[int, int]],
    variants: Sequence[str],
    results: ResultFile,
    *,
    length: int,
    steps: int = 30,
) -> None:
    """Time every row under every variant; a variant that cannot run is a row with the reason instead of a time."""
    with built(model) as network, uncached(), progress_bar() as progress:
        task = progress.add_task("e2e", total=len(rows) * len(variants))
        for batch, new in rows:
            for name in variants:
                progress.update(task, description=f"{batch}x{new} {name}")
                row = {"batch": batch, "new_tokens": new, "cache_length": max(length, new), "variant": name}
                results.add(row | time_variant(network, VARIANTS[name], batch, new, max(length, new), steps))
                progress.console.print(describe(results.rows[-1]), highlight=False, soft_wrap=True)
                progress.advance(task)


def time_variant(network: Any, variant: Variant, batch: int, new: int, length: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, or the reason there is none; with torch's counters of graphs, skips and partitions."""
    config = network.config
    gathered = batch * new * config.num_experts_per_tok * 6 * config.hidden_size * config.moe_intermediate_size
    if variant.experts == "batched_mm" and gathered > GATHER_LIMIT_BYTES:
        return {"ms": None, "reason": f"copies {gathered / 1e9:.0f} GB of weights"}
    torch.compiler.reset()
    counters.clear()
    start = time.perf_counter()
    try:
        step, rewind = make_step(network, variant, batch, new, length)
        for _ in range(WARMUP_STEPS):
            rewind()
            step()
        warm = time.perf_counter() - start
        samples = []
        for _ in range(steps):
            rewind()
            samples.append(step_ms(step))
        outcome: dict[str, Any] = {"ms": statistics.median(samples), "first_steps_s": round(warm, 1)}
    except torch.OutOfMemoryError:
        outcome = {"ms": None, "reason": "out of memory"}
    except Exception as failure:
        traceback.print_exc(limit=-3)
        outcome = {"ms": None, "reason": f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"}
    return outcome | graph_counters() | {"peak_gb": release_memory()}


def make_step(
    network: Any, variant: Variant, batch: int, new: int, length: int
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """(one forward pass, setting the cache back to where the new tokens are its last)."""
    from transformers import StaticCache

    network.set_experts_implementation(variant.experts)
    device = next(network.parameters()).device
    cache = StaticCache(config=network.config, max_cache_len=length)
    config = network.config
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, network.dtype, device)
    tokens = torch.randint(0, network.config.vocab_size, (batch, new), device=device)
    forward = variant.compiled(network)

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length - new)

    return step, rewind


def step_ms(step: Callable[[], Any]) -> float:
    """Milliseconds of one step."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return cuda_event_ms(step)
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


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
        "shared_heads": ours["shared_heads"],
    }


def release_memory() -> float | None:
    """Free compiled code, graph pools and caches; returns the peak in GB since the last call."""
    torch.compiler.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 1)


@contextmanager
def built(model: Model) -> Iterator[Any]:
    """The network, made on its device and in its dtype so that no fp32 copy ever exists."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**model.config)).eval()
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
    signals = ("graphs", "cudagraph_skips", "cudagraph_partitions", "fused", "refused", "shared_heads")
    return f"{head} {row['ms']:8.3f} ms  " + "  ".join(f"{name}={row[name]}" for name in signals)
