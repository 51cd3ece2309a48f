"""What this project does, shown on real model classes with random weights: `python -m moe_ops.examples.quickstart`.

The MoE block's graph before and after the pass; for every model graphs and graph breaks, kernels per MoE layer (on a
GPU), a block's error against float64 before and after, and the time of the whole model against the same model run
eagerly (by its own loop over experts, and by transformers' default, grouped_mm) and under plain torch.compile.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import moe_ops
from moe_ops.census import kernel_names
from moe_ops.examples.families import FAMILIES, Family
from moe_ops.graphs import lines

BATCH, SEQUENCE = 2, 64
WARMUP_CALLS = 3
MIN_ROUNDS, TIMED_MS = 3, 2000.0
console = Console(highlight=False, width=max(Console().width, 110))  # the closing table needs the width


@dataclass
class Outcome:
    """One line of the closing table."""

    family: str
    fused: int
    refused: int
    graphs: int
    graph_breaks: int
    kernels: int | None
    original_error: float
    fused_error: float
    loop_ms: float
    eager_ms: float
    compiled_ms: float
    fused_ms: float


@dataclass
class Block:
    """The first MoE block of a model, compiled on its own: the pictures, and the function that draws them."""

    module: torch.nn.Module
    compiled: Callable[[torch.Tensor], Any]
    hidden_states: torch.Tensor
    before: list[str]
    after: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen families; 0 when every MoE block was fused."""
    names = [family.name for family in FAMILIES]
    parser = argparse.ArgumentParser(prog="python -m moe_ops.examples.quickstart", description=__doc__)
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--graphs", default="first", choices=("first", "all", "none"), help="whose graphs to print")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.cuda.get_device_name() if device == "cuda" else "CPU, dimensions scaled down"
    console.print(f"moe-compile on torch {torch.__version__}, {place}, bfloat16, {BATCH} x {SEQUENCE} tokens\n")
    outcomes = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, torch.no_grad():
        task = progress.add_task("")
        for index, family in enumerate(family for family in FAMILIES if family.name in options.models):
            show = options.graphs == "all" or (options.graphs == "first" and index == 0)

            def step(text: str, name: str = family.name) -> None:
                progress.update(task, description=f"{name}: {text}")

            outcomes.append(run(family, device, show, step))
            console.print(f"[bold]{family.name}[/bold]: {sentence(outcomes[-1])}\n")
    console.print(summary(outcomes))
    return int(any(outcome.refused or not outcome.fused for outcome in outcomes))


def run(family: Family, device: str, show_graphs: bool, step: Callable[[str], None]) -> Outcome:
    """Everything that is shown of one family."""
    step("building the model")
    model: Any = family.build(device, torch.bfloat16)
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, SEQUENCE), device=device)
    step("explaining what is fused")
    report = moe_ops.explain(model, tokens, use_cache=False)
    step("compiling one MoE block")
    block = compile_block(model, tokens, "moe_ops" if show_graphs or device == "cuda" else "moe_ops_eager")
    if show_graphs:
        show(family.name, block)
        console.print(str(report), markup=False, soft_wrap=True)
        console.print()
    step("computing the block in float64")
    original_error, fused_error = block_errors(block)
    kernels = None
    if device == "cuda":
        step("counting kernels")
        kernels = len(kernel_names(block.compiled, block.hidden_states))
    torch.compiler.reset()
    # On a GPU a model this shallow is bound by launches: every compiled variant gets CUDA graphs.
    mode = "reduce-overhead" if device == "cuda" else "default"
    step("timing the model's own loop over experts")
    model.set_experts_implementation("eager")
    loop = time_ms([model], tokens)
    model.set_experts_implementation("grouped_mm")
    plain = torch.compile(model, mode=mode)
    variants: list[Callable[..., Any]] = [model, plain, torch.compile(model, backend="moe_ops", mode=mode)]
    for text, variant in zip(
        ("as it is", "under plain torch.compile", 'under backend="moe_ops"'), variants, strict=True
    ):
        step(f"warming the model up {text}")
        for _ in range(WARMUP_CALLS):
            variant(tokens, use_cache=False)
    step("timing all three in turn")
    times = time_ms(variants, tokens)
    torch.compiler.reset()
    signals = (len(report.fused), len(report.refused), report.graphs, report.graph_breaks)
    return Outcome(family.name, *signals, kernels, original_error, fused_error, *loop, *times)


def compile_block(model: torch.nn.Module, tokens: torch.Tensor, backend: str) -> Block:
    """Compile the first MoE block alone, and record its graph where the pass sees it and where Inductor lowers it.

    "moe_ops_eager" runs the same operators without generating code, which is quicker; it has no second picture.
    """
    module = next(module for module in model.modules() if isinstance(getattr(module, "experts", None), torch.nn.Module))
    seen: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    model(tokens, use_cache=False)
    hook.remove()
    before: list[str] = []
    after: list[str] = []

    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

    def record_before(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        before[:] = lines(gm.graph)
        traced: Callable[..., Any] = compiler(gm, inputs, options={"post_grad_custom_post_pass": record_after})
        return traced

    def record_after(graph: torch.fx.Graph) -> None:
        after[:] = lines(graph)

    compiled = torch.compile(module, backend=record_before, fullgraph=True)
    compiled(seen[0])
    return Block(module, lambda hidden_states: first(compiled(hidden_states)), seen[0], before, after)


def show(name: str, block: Block) -> None:
    """Print a block's graph before and after."""
    console.print(f"[bold]The MoE block of {name}, as captured: {len(block.before)} operations[/bold]")
    for line in block.before:
        console.print(f"  {line}", style="dim", markup=False, no_wrap=True, overflow="ellipsis")
    console.print(f"[bold]The same block, as compiled: {len(block.after)} operations[/bold]")
    for line in block.after:
        style = "green" if "moe_ops" in line else "dim"
        console.print(f"  {line}", style=style, markup=False, soft_wrap=True)
    console.print()


def block_errors(block: Block) -> tuple[float, float]:
    """Errors of the original and of the fused block against the block in float64, each the median over tokens.

    The median, because a token whose two best experts tie within bfloat16 may be routed otherwise in float64, in both.
    """
    exact: Any = copy.deepcopy(block.module).double()
    exact.experts.config._experts_implementation = "eager"
    wanted = first(exact(block.hidden_states.double()))
    del exact

    def error(output: torch.Tensor) -> float:
        difference = (output.double() - wanted).flatten(0, -2).norm(dim=-1)
        return float((difference / wanted.flatten(0, -2).norm(dim=-1)).median())

    return error(first(block.module(block.hidden_states))), error(block.compiled(block.hidden_states))


def first(output: Any) -> torch.Tensor:
    """The hidden states of a block that may return its router's scores too."""
    hidden_states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_states


def time_ms(functions: Sequence[Callable[..., Any]], tokens: torch.Tensor) -> list[float]:
    """Median milliseconds of a call of each, taken in turn so that a busy moment of the machine hits all alike."""
    samples: list[list[float]] = [[] for _ in functions]
    while len(samples[0]) < MIN_ROUNDS or sum(map(sum, samples)) < TIMED_MS:
        for function, taken in zip(functions, samples, strict=True):
            start = time.perf_counter()
            function(tokens, use_cache=False)
            if tokens.is_cuda:
                torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in samples]


def sentence(outcome: Outcome) -> str:
    """An outcome in words."""
    kernels = f", {outcome.kernels} kernels per MoE block" if outcome.kernels else ""
    return (
        f"{outcome.fused} MoE blocks fused, {outcome.refused} refused; {outcome.graphs} graph, "
        f"{outcome.graph_breaks} breaks{kernels}; block error against float64 {outcome.fused_error:.2e}, "
        f"original {outcome.original_error:.2e}; {outcome.fused_ms:.2f} ms, "
        f"torch.compile {outcome.compiled_ms:.2f} ms, eager {outcome.eager_ms:.2f} ms"
    )


def summary(outcomes: list[Outcome]) -> Table:
    """All outcomes as a table."""
    table = Table(
        title="Whole models of two layers",
        caption="error, original: of the first MoE block against float64, fused and as it was. kernels: of one block, "
        "router product and shared experts included. Times in ms: transformers' loop over experts, its grouped_mm "
        "eager, the same under torch.compile, and under this backend.",
    )
    table.add_column("model")
    for name in ("fused", "graphs", "breaks", "kernels", "error", "original", "loop", "eager", "compile", "moe_ops"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.family,
            f"{outcome.fused}/{outcome.fused + outcome.refused}",
            str(outcome.graphs),
            str(outcome.graph_breaks),
            "-" if outcome.kernels is None else str(outcome.kernels),
            f"{outcome.fused_error:.2e}",
            f"{outcome.original_error:.2e}",
            f"{outcome.loop_ms:.2f}",
            f"{outcome.eager_ms:.2f}",
            f"{outcome.compiled_ms:.2f}",
            f"{outcome.fused_ms:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
