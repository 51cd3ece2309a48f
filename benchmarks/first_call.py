"""What the passes cost the first call of a deep model: seconds of the call, of them in the passes, and their share."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops
from benchmarks import foreign, loops, tutorials
from benchmarks.results import ResultFile, progress_bar
from compile_passes import passes
from compile_passes.tiny import model_of, tiny_model

WIDTH, HEADS = 32, 4
_CALLS = 51
METHOD = (
    "tiny models of many layers, attention and an MoE layer in turn, each in a process of its own, no gradients, "
    "moe_ops.compile with Inductor, without caches. seconds: the first call, from capture to "
    "result; passes: of these in our passes, what they look at included; prepared: what moe_ops.compile took before, "
    "with its trial of one layer, of loops over 64 experts; again: the first call with another number of tokens; "
    "call_us: a later call, median of 51"
)


class Attention(nn.Module):
    """Causal attention, projections without biases."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv, self.out = (nn.Linear(WIDTH, parts * WIDTH, bias=False, dtype=dtype) for parts in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Attention and an MoE layer in turn, with a norm before each and a residual around it."""

    def __init__(self, make: Callable[[], nn.Module], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.attention = nn.ModuleList(Attention(next(layer.parameters()).dtype) for layer in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for attention, layer in zip(self.attention, self.layers, strict=True):
            x = x + attention(F.rms_norm(x, x.shape[-1:]))
            result = layer(F.rms_norm(x, x.shape[-1:]))
            x = x + (result[0] if isinstance(result, tuple) else result).view_as(x)
        return x


def _of_transformers(family: str, layers: int) -> tuple[nn.Module, Tensor]:
    config, kind = model_of(family)
    config.num_hidden_layers = layers
    model = tiny_model(config, kind, dtype=torch.float32, experts="grouped_mm")
    return model, torch.randint(3, 100, (1, 16))


def _of_others(make: Callable[[], nn.Module], layers: int) -> tuple[nn.Module, Tensor]:
    model = Decoder(make, layers)
    return model, torch.randn(1, 16, WIDTH, dtype=next(model.parameters()).dtype)


def _of_loops(make: Callable[..., nn.Module], layers: int) -> tuple[nn.Module, Tensor]:
    return Decoder(partial(make, dim=WIDTH, hidden=WIDTH, num_experts=64), layers), torch.randn(1, 16, WIDTH)


MODELS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "qwen3-moe": partial(_of_transformers, "qwen3_moe"),
    "torchtitan": partial(_of_others, foreign.TorchTitanMoE),
    "llama4": partial(_of_others, foreign.Llama4),
    "deepspeed": partial(_of_others, foreign.DeepSpeed),
    "mask-loop": partial(_of_others, partial(foreign.ExpertLoop, "mask")),
    "where-loop": partial(_of_others, partial(foreign.ExpertLoop, "transformers")),
    "hits-of-64": partial(_of_loops, loops.MixtralHits),
    "slices-of-64": partial(_of_loops, loops.MoeInfer),
    "places-of-64": partial(_of_loops, tutorials.UnflattenedPlaces),
}


def run(names: Sequence[str], layers: int, results: ResultFile) -> None:
    """Measure every model once, one row each, where nothing was compiled before: it is the first call of a process."""
    apart = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with apart, progress_bar() as progress:
        task = progress.add_task("first calls", total=len(names))
        for row in apart.map(partial(measure, layers=layers), names):
            results.add(row)
            progress.console.print(describe(row), highlight=False, soft_wrap=True)
            progress.update(task, advance=1)


@torch.no_grad()
def measure(name: str, layers: int) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    model, given = MODELS[name](layers)
    counters.clear()
    row: dict[str, Any] = {"model": name, "layers": layers}
    with torch._inductor.config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        function = moe_ops.compile(model.eval(), fullgraph=True)
        row["prepared"] = time.perf_counter() - start
        counters.clear()
        with _timed() as spent:
            row["seconds"] = _seconds_of(function, given)
        if counters["moe_ops"]["fused"] != layers:
            raise RuntimeError(f"benchmarks: {counters['moe_ops']['fused']} of {layers} blocks of {name} are fused")
        row["again"] = _seconds_of(function, given[:, :8])
        row["call_us"] = statistics.median(_seconds_of(function, given) for _ in range(_CALLS)) * 1e6
    return row | {"passes": sum(spent), "share": sum(spent) / row["seconds"]}


def _seconds_of(function: Callable[[Tensor], Any], given: Tensor) -> float:
    start = time.perf_counter()
    function(given)
    return time.perf_counter() - start


@contextmanager
def _timed() -> Iterator[list[float]]:
    """The seconds of every pass inside."""
    spent: list[float] = []
    inner = passes.run

    def run_timed(*given: Any) -> passes.Report:
        start = time.perf_counter()
        try:
            return inner(*given)
        finally:
            spent.append(time.perf_counter() - start)

    with mock.patch.object(passes, "run", run_timed):
        yield spent


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    of_call = f"first call {row['seconds']:6.1f} s, passes {row['passes']:5.2f} s, {100 * row['share']:.1f} %, "
    of_call += f"prepared in {row['prepared']:.1f} s, again {row['again']:.1f} s, then {row['call_us']:.0f} us"
    return f"{row['model']:>12} {row['layers']:3d} layers: {of_call}"
