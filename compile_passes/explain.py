"""What the passes do to a model, without keeping it: blocks fused and refused, graphs, graph breaks, and why.

report = moe_ops.explain(model, tokens)
print(report)
report.refused[0].location, report.refused[0].reason, report.refused[0].cure
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from compile_passes.decide import Decision
from compile_passes.join import operator_name
from compile_passes.loops import find_loops
from compile_passes.match import Refusal, Router, module_of
from compile_passes.passes import FUSE, SHARE, graph_modules, run
from moe_ops.compat_compile import break_reason


@dataclass(frozen=True)
class Fused:
    """A block that was replaced.

    Attributes:
        location: source line of its second expert product.
        module: path of the experts' module, when the model is one of modules.
        routing: routing of `fused_topk`, or "kept" when the router stays in the graph.
        router_note: why the router stays; empty when it does not.
        experts: spelling of the experts in the model ("grouped_mm", "batched_mm").
        activation, glu_layout, scheme, backend: what the operator runs.
        E, K, H, I: experts, top-k, hidden and expert width.
    """

    location: str
    module: str
    routing: str
    router_note: str
    experts: str
    activation: str
    glu_layout: str
    scheme: str
    backend: str
    E: Any
    K: Any
    H: Any
    I: Any


@dataclass(frozen=True)
class Refused:
    """A block that was not replaced: where, why, and what can be done."""

    location: str
    module: str
    reason: str
    cure: str


@dataclass
class Report:
    """Result of `explain`.

    Attributes:
        fused, refused: MoE blocks, in graph order.
        shared_heads: attention calls that read key and value heads without repeating them.
        own_calls: calls of `fused_experts` or `fused_moe` that the model makes itself; nothing is left to fuse.
        graphs: graphs captured.
        graph_break_reasons: "reason (file:line)" of every graph break.
        error: why the model did not run, or None.
    """

    fused: list[Fused] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    shared_heads: int = 0
    own_calls: int = 0
    graphs: int = 0
    graph_break_reasons: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def graph_breaks(self) -> int:
        """Number of places at which capture stopped."""
        return len(self.graph_break_reasons)

    def __str__(self) -> str:
        lines = [
            f"{len(self.fused)} MoE block(s) fused, {len(self.refused)} refused; "
            f"{self.graphs} graph(s), {self.graph_breaks} graph break(s)"
        ]
        if self.fused:
            lines += ["", *_table(_FUSED_HEAD, [_fused_row(row) for row in self.fused])]
            lines += [f"  {_name(row)}: {row.router_note}" for row in self.fused if row.router_note]
        for row in self.refused:
            lines += [
                "",
                f"refused at {row.location}" + (f" ({row.module})" if row.module else ""),
                f"  why:  {row.reason}",
                f"  cure: {row.cure}",
            ]
        if self.shared_heads:
            lines += ["", f"{self.shared_heads} attention call(s) read key and value heads without repeating them"]
        if self.own_calls:
            lines += ["", f"{self.own_calls} call(s) of moe_ops operators are the model's own"]
        elif not self.fused and not self.refused:
            lines += [
                "",
                "No product with stacked expert weights is in a captured graph. Experts in Python code",
            ]
            lines += ["around a graph break are in no graph: see the breaks, and moe_ops.compile."]
        if self.graph_break_reasons:
            lines += ["", "graph breaks:", *(f"  {reason}" for reason in self.graph_break_reasons)]
        if self.error:
            lines += ["", f"the model raised: {self.error}"]
        return "\n".join(lines)


_LOOP = "The experts run in a Python loop whose trip count depends on the data: their products are in no graph."
_FUSED_HEAD = ("block", "routing", "experts", "activation", "scheme", "backend", "E", "K", "H", "I")


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Capture ``model(*args, **kwargs)``, fuse what can be fused, run the result once, and report.

    Graph breaks, refusals and errors of the model are part of the report and are not raised. The model is not changed.

    Example:
        >>> print(moe_ops.explain(model, input_ids))
    """
    report = Report()

    def collect(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        report.graphs += 1
        for part in graph_modules(gm):
            report.own_calls += sum(operator_name(node) in ("fused_experts", "fused_moe") for node in part.graph.nodes)
            found = run(FUSE, part.graph)
            report.fused += [_fused(decision) for decision in found.fused]
            report.refused += [_refused(refusal) for refusal in found.refused]
            report.shared_heads += run(SHARE, part.graph).shared_heads
            part.recompile()
        reason = break_reason(gm)
        if reason is not None:
            report.graph_break_reasons.append(f"{_first_line(reason[0])} ({reason[1]})")
        return gm.forward

    torch.compiler.reset()
    try:
        torch.compile(model, backend=collect)(*args, **kwargs)
    except Exception as error:  # the report says so; a diagnosis must not end where the trouble starts
        report.error = f"{type(error).__name__}: {_first_line(str(error))}"
    finally:
        torch.compiler.reset()
    if isinstance(model, torch.nn.Module):
        report.refused += [_refused_loop(loop.name, loop.switchable) for loop in find_loops(model)]
    return report


def _fused(decision: Decision) -> Fused:
    match, problem = decision.match, decision.problem
    router = match.router
    return Fused(
        location=match.location,
        module=module_of(match.down.anchor),
        routing=router.routing if isinstance(router, Router) else "kept",
        router_note="" if isinstance(router, Router) else router.reason,
        experts=match.dispatch.form,
        activation=match.body.activation,
        glu_layout=match.body.glu_layout,
        scheme=problem.scheme,
        backend=decision.backend,
        E=problem.E, K=problem.K, H=problem.H, I=problem.I,
    )  # fmt: skip


def _refused(refusal: Refusal) -> Refused:
    return Refused(refusal.location, module_of(refusal.node), refusal.reason, refusal.cure)


def _refused_loop(name: str, switchable: bool) -> Refused:
    cure = (
        'moe_ops.compile(model) switches it, or model.set_experts_implementation("grouped_mm").'
        if switchable
        else "Store the experts as stacked [E, N, K] weights and call F.grouped_mm or moe_ops.fused_experts."
    )
    return Refused(f"module {name}", name, _LOOP, cure)


def _first_line(text: str) -> str:
    return next((line for line in text.strip().splitlines() if line.strip()), "")


def _fused_row(row: Fused) -> tuple[str, ...]:
    activation = row.activation if row.glu_layout == "concat" else f"{row.activation} ({row.glu_layout})"
    sizes = (str(size) for size in (row.E, row.K, row.H, row.I))
    return (_name(row), row.routing, row.experts, activation, row.scheme, row.backend, *sizes)


def _name(row: Fused) -> str:
    return row.module or row.location.rsplit("/", 1)[-1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
