"""The passes, and the runner that times, counts, checks, logs and traces them.

Four passes, in this order, all on the graph that Dynamo captured: one node there is still one user-level operation,
and autograd comes after, so that training goes through the same match.

1. `FUSE`: MoE blocks become `fused_topk` + `fused_experts`.
2. `CAUSAL`: attention whose mask is causal for every input reads none, which in training can save as much as `FUSE`.
3. `SHARE`: attention reads key and value heads without copies of them, which at decode can cost as much as the experts.
4. `JOIN`, where nothing in the graph needs a gradient: `fused_topk` + `fused_experts`, and chains of stage operators
   that a user wrote, become `fused_moe` or `fused_experts`.

The backends run them before Inductor sees the graph (`run_all`), so that they run, count and log whatever the caches
hold. `MoEPass` is the same for Inductor's hooks (`fuse()`, export), which torch calls on a cache miss alone.

Nothing that goes wrong in a pass reaches the user's program: the graph is left as it was, the error is counted in
``counters["moe_ops"]["errors"]`` and logged. The exceptions by which Dynamo is steered pass through.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from compile_passes import compat
from compile_passes.apart import guarded
from compile_passes.attention import may_repeat_heads, share_heads, shareable
from compile_passes.builder import operator_name
from compile_passes.causal import causal_calls, drop_masks, may_be_causal
from compile_passes.decide import Decision, decide
from compile_passes.identity import identity
from compile_passes.join import join
from compile_passes.match import Made, MoEMatch, Refusal, Router, in_words
from compile_passes.reading import Reading
from compile_passes.recognise import recognise, recognise_calls, symbolic_numbers
from compile_passes.rewrite import Rewriter
from compile_passes.saved_routing import routing_of
from compile_passes.transaction import change
from compile_passes.turns import check_used, write_out
from compile_passes.vocabulary import tensors_of
from moe_ops.choice import LAYERS

log = logging.getLogger(__name__)

#: Tracebacks of the last errors of the passes in this process; the counters are for users, who may clear them.
last_errors: deque[str] = deque(maxlen=16)
#: Of a block in a graph that may be cut anywhere.
_WHOLE = (
    "Dynamo cuts the graph at the bounds of DistributedDataParallel's buckets, and stacked experts fill one: set "
    "torch._dynamo.config.optimize_ddp = False before the first call, or compile with moe_ops.compile(ddp_model)."
)
_CURE = 'Please report it with the traceback that TORCH_LOGS="+compile_passes" shows.'


@dataclass
class Report:
    """What a pass did to one graph.

    Attributes:
        fused, staged, refused: MoE blocks; the staged ones keep code of their own between the experts and the combine.
        routed: `fused_experts` calls of the model's own that got a `fused_topk`.
        joined: operators that took the place of several.
        causal_masks: attention calls that say that they are causal in the place of a mask that does.
        shared_heads: attention calls, and products of written-out attention, that no longer repeat heads.
        errors: what went wrong in the pass itself, one line each.
        apart: positions of inputs that have to be different memory for the changed graph to be right, in pairs.
        original: the graph before the change, when there are such pairs.
    """

    fused: list[Decision] = field(default_factory=list)
    staged: list[Decision] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    joined: int = 0
    routed: int = 0
    causal_masks: int = 0
    shared_heads: int = 0
    errors: list[str] = field(default_factory=list)
    apart: list[tuple[int, int]] = field(default_factory=list)
    original: fx.GraphModule | None = None

    @property
    def changed(self) -> bool:
        """Whether the graph is another one than before."""
        attention = self.causal_masks or self.shared_heads
        return bool(self.fused or self.staged or self.joined or self.routed or attention or self.errors)


@dataclass(frozen=True)
class Plan:
    """What a pass found in a graph; ``apply`` changes the graph and completes the report. None: nothing to change."""

    report: Report
    apply: Callable[[], None] | None = None


@dataclass(frozen=True)
class Pass:
    """A named graph transformation: ``plan`` reads a graph without changing it."""

    name: str
    plan: Callable[[fx.Graph], Plan]


def fuse_blocks(graph: fx.Graph, checked: bool = False) -> Plan:
    """Replace every MoE block of ``graph`` that the operators accept.

    Args:
        checked: whether the caller enters the compiled graph through `apart.guarded`. Without it, a block that reads an
            input while another one is overwritten is refused: the two may be one memory in the next call.

    Raises:
        torch._dynamo.exc.TensorifyScalarRestartAnalysis: under Dynamo, when a number in a block (a clamp limit, a
            scaling factor) is symbolic; Dynamo then traces again with it as a constant.
    """
    reading = Reading(graph)
    found, calls = recognise(reading), recognise_calls(reading)
    numbers = symbolic_numbers(reading, [*found, *calls])
    if compat.can_restart_with_constants(numbers):
        log.debug("tracing again with %d symbolic numbers as constants", len(numbers))
        compat.restart_with_constants(numbers)
    report = Report()
    for row in found:
        outcome = _decided(row, report, checked) if isinstance(row, MoEMatch) else row
        if isinstance(outcome, Decision):
            (report.fused if outcome.match.combine.staged is None else report.staged).append(outcome)
        else:
            report.refused.append(outcome)

    def apply() -> None:
        _keep_original(graph, report)
        rewriter = Rewriter(reading)
        for decision in report.staged:
            rewriter.apply(decision.match)
        nodes = [rewriter.apply(decision.match) for decision in report.fused]
        for call in calls:
            rewriter.apply_router(call)
        report.routed = len(calls)
        _add_routers(graph, report.fused, nodes)

    return Plan(report, apply if report.fused or report.staged or calls else None)


def _add_routers(graph: fx.Graph, fused: list[Decision], nodes: Sequence[fx.Node]) -> None:
    """Give the blocks whose weights were made of dense scores the `fused_topk` that makes them, if there is one."""
    places = {node: place for place, node in enumerate(nodes) if isinstance(fused[place].match.combine.weights, Made)}
    if not places:
        return
    reading = Reading(graph)
    rewriter = Rewriter(reading)
    for call in recognise_calls(reading):
        if call.call in places:
            rewriter.apply_router(call)
            place = places[call.call]
            fused[place] = replace(fused[place], match=replace(fused[place].match, router=call.router))


def _decided(match: MoEMatch, report: Report, checked: bool) -> Decision | Refusal:
    """The decision on one block; an error in it refuses that block alone."""
    if match.apart and not checked:
        overwritten, read = min(match.apart, key=lambda pair: (pair[0].name, pair[1].name))
        return Refusal(
            match.down.anchor, f"{in_words(overwritten)} is overwritten and may be the memory of {in_words(read)}, "
            "which the MoE block reads, in another call.",
            'Compile with backend="moe_ops", which looks at them in every call.',
        )  # fmt: skip
    try:
        return decide(match)
    except compat.control_exceptions():
        raise
    except Exception as error:
        report.errors.append(_record("deciding on a block", error))
        return _refusal(match, error)


def _keep_original(graph: fx.Graph, report: Report) -> None:
    """Keep a copy of the graph for calls in which inputs share memory that the fused blocks need to be apart."""
    inputs = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    decisions = [*report.fused, *report.staged]
    pairs = {(inputs[one], inputs[other]) for decision in decisions for one, other in decision.match.apart}
    if pairs:
        report.apart, report.original = sorted(pairs), compat.private_copy(graph)


def drop_causal_masks(graph: fx.Graph) -> Plan:
    """Let attention whose mask is causal for every input say so; see `causal`."""
    if not may_be_causal(graph):
        return Plan(Report())
    reading, report = Reading(graph), Report()
    found = causal_calls(reading)

    def apply() -> None:
        report.causal_masks = drop_masks(Rewriter(reading), found)

    return Plan(report, apply if found else None)


def share_attention_heads(graph: fx.Graph) -> Plan:
    """Let grouped-query attention read its heads in place; see `attention`."""
    if not any(map(may_repeat_heads, graph.nodes)):
        return Plan(Report())
    reading, report = Reading(graph), Report()
    found = shareable(reading)

    def apply() -> None:
        report.shared_heads = share_heads(Rewriter(reading), found)

    return Plan(report, apply if found else None)


def join_operators(graph: fx.Graph) -> Plan:
    """Join operators that are one step of a larger one; see `join`."""
    report = Report()

    def apply() -> None:
        report.joined = join(graph)

    return Plan(report, apply if any(operator_name(node) for node in graph.nodes) else None)


def save_routing(graph: fx.Graph) -> Plan:
    """Have the routing of every block saved, before a graph is cut into forward and backward; see `saved_routing`."""
    found = routing_of(graph)

    def apply() -> None:
        for node in found:
            compat.must_save(node)

    return Plan(Report(), apply if found else None)


FUSE = Pass("moe_ops_fuse_blocks", fuse_blocks)
#: `FUSE` for the graph of a backend, which looks at the inputs of every call.
FUSE_CHECKED = Pass("moe_ops_fuse_blocks", partial(fuse_blocks, checked=True))
CAUSAL = Pass("moe_ops_causal_masks", drop_causal_masks)
SHARE = Pass("moe_ops_share_heads", share_attention_heads)
JOIN = Pass("moe_ops_join", join_operators)
PASSES = (FUSE, CAUSAL, SHARE, JOIN)
#: For the graph of forward and backward.
SAVE = Pass("moe_ops_save_routing", save_routing)


def run(step: Pass, graph: fx.Graph) -> Report:
    """Run one pass: check, count, time, log, trace. Never raises an error of the pass."""
    before = str(graph) if compat.is_tracing() else None
    start = time.perf_counter()
    report = _fail_closed(step, graph)
    if report.refused and compat.cut_for_ddp():
        report.refused = [replace(row, cure=_WHOLE) for row in report.refused]
    seconds = time.perf_counter() - start
    section = compat.counters()["moe_ops"]
    section["fused"] += len(report.fused)
    section["staged"] += len(report.staged)
    section["refused"] += len(report.refused)
    section["joined"] += report.joined
    section["causal_masks"] += report.causal_masks
    section["shared_heads"] += report.shared_heads
    section["errors"] += len(report.errors)
    if before is not None and report.changed:
        compat.trace_artifact(f"{step.name}_before", before)
        compat.trace_artifact(f"{step.name}_after", str(graph))
    _log(step, report, seconds)
    return report


def _fail_closed(step: Pass, graph: fx.Graph) -> Report:
    """Plan and apply; after an error the graph is as it was, and the blocks found are refused."""
    plan = Plan(Report())
    try:
        plan = step.plan(graph)
        if plan.apply is not None:
            change(graph, plan.apply)
    except compat.control_exceptions():
        raise
    except Exception as error:
        found = plan.report
        refused = [_refusal(decision.match, error) for decision in (*found.fused, *found.staged)]
        return Report(refused=[*found.refused, *refused], errors=[*found.errors, _record(step.name, error)])
    return plan.report


def _record(what: str, error: Exception) -> str:
    """Log an error of ours, keep its traceback, and return its one line."""
    last_errors.append("".join(traceback.format_exception(error)))
    line = f"{what}: {_one_line(error)}"
    log.warning("an error in moe_ops, the graph is left as it was: %s. %s", line, _CURE)
    log.debug("%s", last_errors[-1])
    return line


def _refusal(match: MoEMatch, error: Exception) -> Refusal:
    return Refusal(match.down.anchor, f"An error in moe_ops: {_one_line(error)}.", _CURE)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(" .")


def _log(step: Pass, report: Report, seconds: float) -> None:
    for decision in (*report.fused, *report.staged):
        router = decision.match.router
        kept = router.routing if isinstance(router, Router) else router.reason
        done = "fused" if decision.match.combine.staged is None else "staged"
        where, form = decision.match.location, decision.match.dispatch.form
        log.info("%s %s: %s experts, routing: %s, backend %s", done, where, form, kept, decision.backend)
        if decision.match.merged is not None:
            log.info("low-rank factors stay added to the weights of %s: %s", where, decision.match.merged)
    for text in dict.fromkeys(str(refusal) for refusal in report.refused):  # once for all layers that share a line
        log.warning("not fused: %s", text)
    blocks = (len(report.fused), len(report.staged), len(report.refused))
    log.debug("%s: %d fused, %d staged, %d refused, %d joined, %d masks dropped, %d attention calls share heads, "
              "in %.1f ms", step.name, *blocks, report.joined, report.causal_masks, report.shared_heads,
              1e3 * seconds)  # fmt: skip


def graph_modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """``gm`` and the bodies of its higher-order operators (checkpointed regions, branches), innermost last."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def needs_gradient(graphs: Iterable[fx.Graph]) -> bool:
    """Whether autograd will differentiate anything that these graphs compute.

    The example values tell: what is computed from a tensor that requires grad requires it too, unless the code switched
    gradients off there. Inputs alone do not (parameters require grad in inference, too), nor does a call that returned
    its input (`weight.float()` of an fp32 parameter).
    """
    if compat.is_ahead_of_time():
        return False
    nodes = [node for graph in graphs for node in graph.nodes]
    inputs = {id(value) for node in nodes if node.op in ("placeholder", "get_attr") for value in tensors_of(node)}
    computed = [v for node in nodes if node.op.startswith("call_") for v in tensors_of(node) if id(v) not in inputs]
    if not computed:  # a graph without example values
        return torch.is_grad_enabled()
    return any(value.requires_grad and (torch.is_grad_enabled() or not _is_leaf(value)) for value in computed)


def _is_leaf(value: torch.Tensor) -> bool:
    """Whether no call made ``value``. Torch does not say it of a view that was taken under `no_grad` and written in
    place; what it does not say counts as no.
    """
    try:
        return value.is_leaf
    except RuntimeError:
        return False


def run_all(gm: fx.GraphModule) -> list[Report]:
    """Run every pass on ``gm`` and on the bodies of its higher-order operators.

    What is compiled of the result has to be entered through `enter`.

    Raises:
        NotAlike: turns of a loop that were written out are left, or cannot be.
    """
    parts = graph_modules(gm)
    for part in parts:
        if write_out(part.graph):
            part.recompile()
    steps = _steps(PASSES, [part.graph for part in parts])
    reports = []
    with _no_collection():
        for part in parts:
            made = [run(FUSE_CHECKED if step is FUSE and part is gm else step, part.graph) for step in steps]
            if any(report.changed for report in made):
                part.recompile()
            reports += made
            check_used(part.graph)
    return reports


def recompute_in(gm: fx.GraphModule, recompute: str | None) -> None:
    """Have every layer of ``gm`` that says nothing of it compute again in the backward what ``recompute`` names."""
    for part in graph_modules(gm) if recompute is not None else ():
        for node in part.graph.nodes:
            if operator_name(node) in LAYERS and node.kwargs.get("recompute") is None:
                node.kwargs = {**node.kwargs, "recompute": recompute}
        part.recompile()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: it would walk all that Dynamo holds, for as long as the passes take themselves."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def enter(compiled: Callable[..., Any], reports: Iterable[Report]) -> Callable[..., Any]:
    """``compiled``, which runs what `run_all` made, behind the checks that its reports ask for."""
    for report in reports:
        if report.original is not None:
            compiled = guarded(compiled, report.original, report.apart)
    return compiled


def _steps(steps: Sequence[Pass], graphs: Iterable[fx.Graph]) -> list[Pass]:
    """``steps`` without `JOIN` where a gradient is needed: autograd has to see the values between the operators."""
    return [step for step in steps if step is not JOIN or not needs_gradient(graphs)]


class MoEPass(compat.CustomGraphPass):
    """Our passes as Inductor takes them on a hook, and after them the user's own.

    Without passes it changes nothing: it carries our identity into the cache key of graphs that were rewritten before
    Inductor saw them.

    Args:
        steps: the passes.
        users: what the hook held before: None, a pass, or several.

    Attributes:
        consultations: how often Inductor has run such passes or, to look into its caches, asked for their identity.
    """

    consultations: ClassVar[int] = 0

    def __init__(self, steps: Sequence[Pass] = (), users: Any = None) -> None:
        self.steps = tuple(steps)
        self.users: tuple[Any, ...] = users_passes(users)

    def __call__(self, graph: fx.Graph) -> None:
        MoEPass.consultations += 1
        for step in _steps(self.steps, [graph]):
            run(step, graph)
        for own in self.users:
            own(graph)

    def uuid(self) -> Any | None:
        """Our identity and the users'; None, which turns caching off, when one of theirs has none."""
        MoEPass.consultations += 1
        theirs = [own.uuid() if isinstance(own, compat.CustomGraphPass) else None for own in self.users]
        if not all(theirs):
            return None
        return identity(f"{[step.name for step in self.steps]} {theirs!r}")


def users_passes(hook: Any) -> tuple[Any, ...]:
    """The user's passes on a hook; of ours (from an enclosing `fuse()`), the user's passes that they carry."""
    given: Sequence[Any] = hook if isinstance(hook, list | tuple) else () if hook is None else (hook,)
    flat: list[Any] = []
    for own in given:
        flat.extend(own.users if isinstance(own, MoEPass) else (own,))
    return tuple(flat)
