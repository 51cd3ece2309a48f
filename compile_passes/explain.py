"""What the passes do to a model, without keeping it: blocks fused and refused, graphs, graph breaks, and why.

report = moe_ops.explain(model, tokens)
print(report)
report.refused[0].module, report.refused[0].location, report.refused[0].reason, report.refused[0].cure
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from compile_passes.adapters import find_adapters, why_not
from compile_passes.builder import operator_name
from compile_passes.captures import writes_out
from compile_passes.compat import break_reason, compiled, compiling_apart
from compile_passes.decide import Decision
from compile_passes.diagram import Diagram, Snapshot, operators_of
from compile_passes.loops import LEFT, cure, find_experts, find_loops
from compile_passes.match import Refusal, Router, module_of, source
from compile_passes.named import is_named, subject
from compile_passes.passes import CAUSAL, FUSE, FUSE_CHECKED, JOIN, SHARE, graph_modules, needs_gradient, run
from compile_passes.report import Fused, Refused, Report
from compile_passes.turns import NotAlike, check_used, write_out
from compile_passes.uncaptured import Seen, Stop, cut, defined_at, explanation, first_line, is_from_before
from meta.checks import fail
from moe_ops.compat import as_written

_GOT = re.compile(r": (got \w+\(.*\))\s*$", re.M)
_ADAPTED = "PEFT adds adapters to the experts' weights by a parametrization at every call, which cannot be captured."
_LOOP = "The experts run in a Python loop over sizes that only the data knows: no graph holds the block as a whole."


def explain(model: Any, *args: Any, **kwargs: Any) -> Report:
    """Capture ``model(*args, **kwargs)``, fuse what can be fused, run the result once, and report.

    Graph breaks, refusals and errors of the model are part of the report and are not raised. The model is not changed,
    but for what a call of it changes: buffers, such as the statistics of batch norms that train.

    Args:
        model: a model, or any function, and its inputs. Or what stands for a model, without inputs:
            "package.module:factory", a function that returns (model, inputs); a transformers model type ("mixtral"),
            configuration class or object, or a path to a config.json; or the name of a model on the hub
            ("Qwen/Qwen3-30B-A3B"), of which nothing is downloaded: its family is told by the local cache, or by the
            name. A tiny random model is made of the last ones, with keywords experts ("grouped_mm", "batched_mm" or
            "eager"), dtype (torch.bfloat16, or "bf16") and tokens (16), and is run without gradients.

    Raises:
        ValueError: ``model`` is a name that stands for nothing, comes with inputs, or is nothing that can be called.

    Example:
        >>> print(moe_ops.explain(model, input_ids))
        >>> print(moe_ops.explain("mistralai/Mixtral-8x7B-v0.1"))
    """
    if not is_named(model):
        if not callable(model):
            raise fail("explain", "model", "a module, a function or a model's name", type(model).__name__)
        return explained(model, args, kwargs)
    if args:
        raise ValueError("explain: a model by name must come without inputs: they are made with it. Give the model.")
    with torch.no_grad():
        return explained(*subject(model, **kwargs))


def explained(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    watch: Callable[[fx.Graph], None] = lambda graph: None,
) -> Report:  # fmt: skip
    """`explain` of a call; ``watch`` is given every graph before anything is fused in it."""
    module = model if isinstance(model, torch.nn.Module) else None
    collector = _Collector(Seen([] if module is None else find_experts(module)), watch)
    problem = None
    with as_written(model), compiling_apart(collector.collect, model) as (options, lost):
        try:
            compiled(model, backend=collector.collect, **options)(*args, **kwargs)
        except Exception as error:  # the report says so; a diagnosis must not end where the trouble starts
            problem = f"{type(error).__name__}: {_said(error)}"
    report = collector.report
    report.error = problem
    # Where a frame is captured again, the breaks are those of the second time, and what they are for is why it is.
    stops = [*(Stop(frame.reason, frame.where) for frame in lost if frame.again), *collector.breaks]
    report.graph_break_reasons = [stop.line for stop in stops]
    left = [frame for frame in lost if not frame.again]
    frames = (f"{frame.name} ({frame.location}): {first_line(frame.reason)} ({frame.where})" for frame in left)
    report.eager_frames = list(dict.fromkeys(frames))
    report.refused = _rows(collector)
    if module is not None:
        stops += [Stop(frame.reason, frame.where) for frame in left]
        report.refused += _in_no_graph(module, collector.seen, [] if report.error else stops)
        report.refused += _parametrized(module) if stops or report.error else []
    return report


def _said(error: Exception) -> str:
    """The first line of an error; of Dynamo's own, which names the operation in many lines, what torch said of it."""
    got = _GOT.search(str(error))
    return first_line(str(error)) if got is None else f"{first_line(str(error))} {got.group(1)}"


class _Collector:
    """The backend that `explain` compiles with: it runs the passes, and keeps what they say."""

    def __init__(self, seen: Seen, watch: Callable[[fx.Graph], None]) -> None:
        self.seen, self.watch, self.report = seen, watch, Report()
        self.refused: list[tuple[Refusal, str, Diagram | None]] = []
        self.breaks: list[Stop] = []

    @writes_out
    def collect(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = {name: _copied(value) for name, value in vars(self).items()}
        try:
            return self._collect(gm, inputs)
        except NotAlike:  # it comes again, with all turns of its loops
            vars(self).update(before)
            raise

    def _collect(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        parts = graph_modules(gm)
        for part in parts:
            write_out(part.graph)
        self.report.graphs += 1
        self.seen.graph(gm, inputs)
        joins = not needs_gradient(part.graph for part in parts)
        for part in parts:
            self.watch(part.graph)
            self._fuse(part, checked=part is gm, joins=joins)
            check_used(part.graph)
            part.recompile()
        reason = break_reason(gm)
        if reason is not None:
            self.breaks.append(Stop(*reason))
        return gm.forward

    def _fuse(self, part: fx.GraphModule, checked: bool, joins: bool) -> None:
        """Run on one graph what the backend runs on it."""
        report, seen, snapshot = self.report, self.seen, Snapshot(part.graph)
        own = [node for node in part.graph.nodes if operator_name(node) in ("fused_experts", "fused_moe")]
        report.own_calls += len(own)
        found = run(FUSE_CHECKED if checked else FUSE, part.graph)
        report.causal_masks += run(CAUSAL, part.graph).causal_masks
        report.shared_heads += run(SHARE, part.graph).shared_heads
        if joins:
            run(JOIN, part.graph)
        report.errors += found.errors
        for rows, decisions in ((report.fused, found.fused), (report.staged, found.staged)):
            for decision in decisions:
                made = operators_of(decision.match.down.weight.node, stages=decision.match.updated)
                rows.append(_fused(decision, self._drawn(partial(snapshot.of_match, decision.match, made))))
        for refusal in found.refused:
            diagram = self._drawn(partial(snapshot.of_refusal, refusal.node))
            self.refused.append((refusal, seen.report(refusal.node), diagram))
        seen.modules.update(row.module for row in (*report.fused, *report.staged))
        for node in (*own, *(decision.match.down.weight.node for decision in (*found.fused, *found.staged))):
            seen.report(node)

    def _drawn(self, draw: Callable[[], Diagram | None]) -> Diagram | None:
        """A block's picture; an error in drawing it is reported, and takes nothing else away."""
        try:
            return draw()
        except Exception as error:
            self.report.errors.append(f"drawing a block: {type(error).__name__}: {first_line(str(error))}")
            return None


def _copied(value: Any) -> Any:
    """A copy of what a collector keeps, and of the lists and sets in it."""
    made = copy.copy(value)
    if isinstance(made, Report | Seen):
        vars(made).update({name: copy.copy(part) for name, part in vars(made).items()})
    return made


def _rows(collector: _Collector) -> list[Refused]:
    """What the report says of refusals in graphs; the pieces of a block that a graph break cuts are one row."""
    rows: dict[Any, Refused] = {}
    for position, (refusal, path, diagram) in enumerate(collector.refused):
        whole = diagram is not None and diagram.whole and not is_from_before(refusal.node)
        stop = None if whole else cut(refusal.node, collector.breaks)
        if stop is None:
            line = source(refusal.node)
            rows[position] = Refused(path, refusal.location, refusal.reason, refusal.cure, line, diagram)
        else:
            rows[path, stop.where] = Refused(path, stop.where, *stop.cutting, stop.source)
    return list(rows.values())


def _in_no_graph(model: torch.nn.Module, seen: Seen, stops: Sequence[Stop]) -> list[Refused]:
    """The blocks of the model that no graph holds as a whole: those that loop over the data, and the others."""
    loops = find_loops(model)
    rows = []
    for loop in loops:
        weights = [weight for weight in loop.module.parameters() if weight.dim() > 1]
        if not seen.is_reported(loop.name, weights):
            left = LEFT.get(loop.module)
            why = _LOOP if left is None else f"{_LOOP} moe_ops.compile left it as it is: {left}"
            rows.append(Refused(loop.name, defined_at(loop.module), why, cure(loop, tried=left is not None)))
    for group in seen.experts:
        looped = any(f"{group.name}.".startswith(f"{loop.name}.") or f"{loop.name}.".startswith(f"{group.name}.")
                     or not loop.name for loop in loops)  # fmt: skip
        if looped or seen.is_reported(group.name, group.weights):
            continue
        found = explanation(model, group, seen, stops)
        if found is not None:
            rows.append(Refused(group.name, defined_at(group.module), *found))
    return rows


def _parametrized(model: torch.nn.Module) -> list[Refused]:
    """PEFT's adapters of stacked weights, as far as they run as it writes them, which breaks the graph."""
    rows = []
    for adapted in find_adapters(model):
        reason, mend = why_not(adapted) or ("", "moe_ops.compile(model) captures the adapters as sums.")
        why = f"{_ADAPTED}{f' They stay so: {reason}.' if reason else ''}"
        rows.append(Refused(adapted.path, defined_at(adapted.wrappers[0]), why, mend))
    return rows


def _fused(decision: Decision, diagram: Diagram | None) -> Fused:
    match, problem = decision.match, decision.problem
    router = match.router
    return Fused(
        module=module_of(match.down.anchor),
        location=match.location,
        routing=router.routing if isinstance(router, Router) else "kept",
        router_note="" if isinstance(router, Router) else router.reason,
        experts=match.dispatch.form,
        staged=match.combine.staged is not None,
        low_rank=match.ranks,
        merged_note="" if match.merged is None else f"{match.merged.reason} {match.merged.cure}",
        activation=match.body.activation,
        glu_layout=match.body.glu_layout,
        scheme=problem.scheme,
        backend=decision.backend,
        E=problem.E, K=problem.K, H=problem.H, I=problem.I,
        diagram=diagram,
    )  # fmt: skip
