"""The passes, and the runner that times, counts, checks, logs and traces them.

Three passes, in this order:

1. `fuse_blocks` on the Dynamo graph (`pre_grad_custom_pass`): one node there is still one user-level operation, and
   autograd comes after, so that training goes through the same match. MoE blocks become `fused_topk` + `fused_experts`.
2. `share_heads` on the same graph: attention reads key and value heads without copies of them, which at decode can
   cost as much as the experts.
3. `join` on the post-grad graph: `fused_topk` + `fused_experts`, and chains of stage operators that a user wrote,
   become `fused_moe` or `fused_experts`. Backward graphs keep what they need, as a value saved for backward has a
   reader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from compile_passes.attention import share_heads
from compile_passes.canonical import Canonical
from compile_passes.decide import Decision, decide
from compile_passes.identity import identity
from compile_passes.join import join
from compile_passes.match import MoEMatch, Refusal, Router
from compile_passes.recognise import recognise, recognise_calls
from compile_passes.rewrite import Rewriter
from moe_ops.compat_compile import (
    can_restart_with_constants,
    counters,
    is_tracing,
    restart_with_constants,
    trace_artifact,
)

log = logging.getLogger(__name__)


@dataclass
class Report:
    """What a pass did to one graph.

    Attributes:
        fused, refused: MoE blocks.
        routed: `fused_experts` calls of the model's own that got a `fused_topk`.
        joined: operators that took the place of several.
        shared_heads: attention calls that no longer repeat their key and value heads.
    """

    fused: list[Decision] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    joined: int = 0
    routed: int = 0
    shared_heads: int = 0


def fuse_blocks(graph: fx.Graph) -> Report:
    """Replace every MoE block of ``graph`` that the operators accept.

    Raises:
        torch._dynamo.exc.TensorifyScalarRestartAnalysis: under Dynamo, when a number in a block (a clamp limit, a
            scaling factor) is symbolic; Dynamo then traces again with it as a constant.
    """
    canon = Canonical(graph)
    found, calls = recognise(canon), recognise_calls(canon)
    if can_restart_with_constants(canon.asked_numbers):
        log.debug("tracing again with %d symbolic numbers as constants", len(canon.asked_numbers))
        restart_with_constants(canon.asked_numbers)
    rows = [decide(row) if isinstance(row, MoEMatch) else row for row in found]
    report = Report(
        [row for row in rows if isinstance(row, Decision)],
        [row for row in rows if isinstance(row, Refusal)],
        routed=len(calls),
    )
    rewriter = Rewriter(canon)
    for decision in report.fused:
        rewriter.apply(decision.match)
    for call in calls:
        rewriter.apply_router(call)
    return report


def share_attention_heads(graph: fx.Graph) -> Report:
    """Let grouped-query attention read its heads in place; see `attention`."""
    return Report(shared_heads=len(share_heads(graph)))


def join_operators(graph: fx.Graph) -> Report:
    """Join operators that are one step of a larger one; see `join`."""
    return Report(joined=join(graph))


@dataclass(frozen=True)
class Pass:
    """A named graph transformation."""

    name: str
    run: Callable[[fx.Graph], Report]


FUSE = Pass("moe_ops_fuse_blocks", fuse_blocks)
SHARE = Pass("moe_ops_share_heads", share_attention_heads)
JOIN = Pass("moe_ops_join", join_operators)
PRE_GRAD, POST_GRAD = (FUSE, SHARE), (JOIN,)


def run(step: Pass, graph: fx.Graph) -> Report:
    """Run one pass: count, time, lint, log, trace."""
    before = str(graph) if is_tracing() else None
    start = time.perf_counter()
    report = step.run(graph)
    seconds = time.perf_counter() - start
    section = counters()["moe_ops"]
    section["fused"] += len(report.fused)
    section["refused"] += len(report.refused)
    section["joined"] += report.joined
    section["shared_heads"] += report.shared_heads
    if report.fused or report.joined or report.routed or report.shared_heads:
        graph.lint()
        if before is not None:
            trace_artifact(f"{step.name}_before", before)
            trace_artifact(f"{step.name}_after", str(graph))
    _log(step, report, seconds)
    return report


def _log(step: Pass, report: Report, seconds: float) -> None:
    for decision in report.fused:
        router = decision.match.router
        kept = router.routing if isinstance(router, Router) else router.reason
        log.info("fused %s: %s experts, routing: %s, backend %s", decision.match.location, decision.match.dispatch.form,
                 kept, decision.backend)  # fmt: skip
    for text in dict.fromkeys(str(refusal) for refusal in report.refused):  # once for all layers that share a line
        log.warning("not fused: %s", text)
    log.debug("%s: %d fused, %d refused, %d joined, %d attention calls share heads, in %.1f ms", step.name,
              len(report.fused), len(report.refused), report.joined, report.shared_heads, 1e3 * seconds)  # fmt: skip


def graph_modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """``gm`` and the bodies of its higher-order operators (checkpointed regions, branches), innermost last."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


class MoEPass(CustomGraphPass):
    """Our passes of one hook as Inductor takes them, after the user's own.

    Args:
        steps: the passes.
        users: what the hook held before: None, a pass, or several.
    """

    def __init__(self, steps: tuple[Pass, ...], users: Any = None) -> None:
        self.steps = steps
        self.users: tuple[Any, ...] = _as_tuple(users)

    def __call__(self, graph: fx.Graph) -> None:
        for own in self.users:
            own(graph)
        for step in self.steps:
            run(step, graph)

    def uuid(self) -> Any | None:
        """Our identity and the users'; None, which turns caching off, when one of theirs has none."""
        theirs = [own.uuid() if isinstance(own, CustomGraphPass) else None for own in self.users]
        if not all(theirs):
            return None
        return identity(f"{[step.name for step in self.steps]} {theirs!r}")


def _as_tuple(users: Any) -> tuple[Any, ...]:
    """The user's passes, ours (from an enclosing `fuse()`) replaced by the users' passes that they carry."""
    given: Sequence[Any] = users if isinstance(users, list | tuple) else () if users is None else (users,)
    flat: list[Any] = []
    for own in given:
        flat.extend(own.users if isinstance(own, MoEPass) else (own,))
    return tuple(flat)
