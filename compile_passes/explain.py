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

from compile_passes.compat import break_reason, compiling_apart
from compile_passes.decide import Decision
from compile_passes.loops import cure, find_experts, find_loops
from compile_passes.match import Refusal, Router, module_of
from compile_passes.passes import FUSE, FUSE_CHECKED, SHARE, graph_modules, run
from compile_passes.rewrite import operator_name
from compile_passes.uncaptured import Seen, Stop, cut, explanation, first_line


@dataclass(frozen=True)
class Fused:
    """A block that was replaced.

    Attributes:
        location: source line of its second expert product.
        module: path of the experts' module, when the model is one of modules.
        routing: routing of `fused_topk`, or "kept" when the router stays in the graph.
        router_note: why the router stays; empty when it does not.
        experts: spelling of the experts in the model: "grouped_mm" (rows sorted by expert), "batched_mm" (weights
            gathered by ids), "dense" (all experts for all tokens), "loop" (one expert after the other).
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
        staged: blocks whose experts and combine are replaced, with code of the model (a norm) left between them.
        shared_heads: attention calls that read key and value heads without repeating them.
        own_calls: calls of `fused_experts` or `fused_moe` that the model makes itself; nothing is left to fuse.
        graphs: graphs captured.
        graph_break_reasons: "reason (file:line)" of every graph break.
        eager_frames: "function (file:line): reason (file:line)" of every function that Dynamo left to Python.
        errors: what went wrong in the passes themselves, one line each; the blocks concerned are among the refused.
        error: why the model did not run, or None.
    """

    fused: list[Fused] = field(default_factory=list)
    staged: list[Fused] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    shared_heads: int = 0
    own_calls: int = 0
    graphs: int = 0
    graph_break_reasons: list[str] = field(default_factory=list)
    eager_frames: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def graph_breaks(self) -> int:
        """Number of places at which capture stopped."""
        return len(self.graph_break_reasons)

    def __str__(self) -> str:
        staged = f"{len(self.staged)} staged, " if self.staged else ""
        lines = [
            f"{len(self.fused)} MoE block(s) fused, {staged}{len(self.refused)} refused; "
            f"{self.graphs} graph(s), {self.graph_breaks} graph break(s)"
        ]
        if self.fused:
            lines += ["", *_table(_FUSED_HEAD, [_fused_row(row) for row in self.fused])]
            lines += [f"  {_name(row)}: {row.router_note}" for row in self.fused if row.router_note]
        if self.staged:
            lines += ["", "staged: the model's own code stays between the experts and the combine"]
            lines += _table(_FUSED_HEAD, [_fused_row(row) for row in self.staged])
            lines += [f"  {_name(row)}: {row.router_note}" for row in self.staged if row.router_note]
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
        elif not self.fused and not self.staged and not self.refused:
            lines += ["", "No MoE block is in a captured graph."]
            if self.graph_break_reasons or self.eager_frames:
                lines += ["What runs around a graph break, or in a function left to Python, is in no graph: see below."]
        if self.graph_break_reasons:
            lines += ["", "graph breaks:", *(f"  {reason}" for reason in self.graph_break_reasons)]
        if self.eager_frames:
            lines += ["", "functions left to Python:", *(f"  {frame}" for frame in self.eager_frames)]
        lines += [f"\nan error in moe_ops: {line}" for line in self.errors]
        if self.error:
            lines += ["", f"the model raised: {self.error}"]
        return "\n".join(lines)


_LOOP = "The experts run in a Python loop over sizes that only the data knows: no graph holds the block as a whole."
_FUSED_HEAD = ("block", "routing", "experts", "activation", "scheme", "backend", "E", "K", "H", "I")


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Capture ``model(*args, **kwargs)``, fuse what can be fused, run the result once, and report.

    Graph breaks, refusals and errors of the model are part of the report and are not raised. The model is not changed.

    Example:
        >>> print(moe_ops.explain(model, input_ids))
    """
    report = Report()
    module = model if isinstance(model, torch.nn.Module) else None
    seen = Seen([] if module is None else find_experts(module))
    refused: list[tuple[Refusal, str]] = []
    breaks: list[Stop] = []

    def collect(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        report.graphs += 1
        seen.graph(gm, inputs)
        for part in graph_modules(gm):
            own = [node for node in part.graph.nodes if operator_name(node) in ("fused_experts", "fused_moe")]
            report.own_calls += len(own)
            found = run(FUSE_CHECKED if part is gm else FUSE, part.graph)
            report.fused += [_fused(decision) for decision in found.fused]
            report.staged += [_fused(decision) for decision in found.staged]
            report.errors += found.errors
            refused.extend((refusal, seen.report(refusal.node)) for refusal in found.refused)
            seen.modules.update(row.module for row in (*report.fused, *report.staged))
            for node in (*own, *(decision.match.down.weight.node for decision in (*found.fused, *found.staged))):
                seen.report(node)
            report.shared_heads += run(SHARE, part.graph).shared_heads
            part.recompile()
        reason = break_reason(gm)
        if reason is not None:
            breaks.append(Stop(*reason))
        return gm.forward

    with compiling_apart(collect, model) as (options, lost):
        try:
            torch.compile(model, backend=collect, **options)(*args, **kwargs)
        except Exception as error:  # the report says so; a diagnosis must not end where the trouble starts
            report.error = f"{type(error).__name__}: {first_line(str(error))}"
    report.graph_break_reasons = [stop.line for stop in breaks]
    frames = (f"{frame.name} ({frame.location}): {first_line(frame.reason)} ({frame.where})" for frame in lost)
    report.eager_frames = list(dict.fromkeys(frames))
    report.refused = _rows(refused, breaks)
    if module is not None:
        stops = [*breaks, *(Stop(frame.reason, frame.where) for frame in lost)]
        report.refused += _in_no_graph(module, seen, [] if report.error else stops)
    return report


def _rows(refused: Sequence[tuple[Refusal, str]], breaks: Sequence[Stop]) -> list[Refused]:
    """What the report says of refusals in graphs; the pieces of a block that a graph break cuts are one row."""
    rows: dict[Any, Refused] = {}
    for position, (refusal, path) in enumerate(refused):
        stop = cut(refusal.node, breaks)
        if stop is None:
            rows[position] = Refused(refusal.location, path, refusal.reason, refusal.cure)
        else:
            reason = f"A graph break cuts the block in pieces: {stop.line}."
            rows[path, stop.where] = Refused(stop.where, path, reason, "Take away what stopped the capture there.")
    return list(rows.values())


def _in_no_graph(model: torch.nn.Module, seen: Seen, stops: Sequence[Stop]) -> list[Refused]:
    """The blocks of the model that no graph holds as a whole: those that loop over the data, and the others."""
    loops = find_loops(model)
    rows = []
    for loop in loops:
        weights = [weight for weight in loop.module.parameters() if weight.dim() > 1]
        if not seen.is_reported(loop.name, weights):
            rows.append(Refused(f"module {loop.name}", loop.name, _LOOP, cure(loop)))
    for group in seen.experts:
        looped = any(f"{group.name}.".startswith(f"{loop.name}.") or f"{loop.name}.".startswith(f"{group.name}.")
                     or not loop.name for loop in loops)  # fmt: skip
        if looped or seen.is_reported(group.name, group.weights):
            continue
        found = explanation(model, group, seen, stops)
        if found is not None:
            rows.append(Refused(f"module {group.name}", group.name, *found))
    return rows


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
