"""Under activation checkpointing the routing of the forward is kept for the backward, whatever else is computed again.

Inductor computes a checkpointed region again in the backward graph, where other kernels may round the router's input in
another way; two scores that are almost equal may then change places, and gradients be those of other experts than the
forward used. Ids and weights take K numbers each for a token; a token's hidden states take some thousands.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from compile_passes import compat
from compile_passes.identity import identity
from compile_passes.rewrite import arguments, operator_name

# How far up the way from ids to the selection that made them is followed: casts, reshapes, a scale.
_STEPS = 8


class SavedRouting(compat.CustomGraphPass):
    """Inductor's pass on the graph of forward and backward, before it is cut in two; then the user's own passes."""

    def __init__(self, users: tuple[Any, ...] = ()) -> None:
        self.users = users

    def __call__(self, graph: fx.Graph) -> None:
        save_routing(graph)
        for own in self.users:
            own(graph)

    def uuid(self) -> Any | None:
        """Our identity and the users'; None, which turns caching off, when one of theirs has none."""
        theirs = [own.uuid() if isinstance(own, compat.CustomGraphPass) else None for own in self.users]
        return identity(f"saved routing {theirs!r}") if all(theirs) else None


def save_routing(graph: fx.Graph) -> list[fx.Node]:
    """Mark what selects the experts of every block, and its weights, as values that are saved; returns the nodes."""
    marked = [node for call in graph.nodes if operator_name(call) == "fused_experts_saving" for node in _routing(call)]
    for node in dict.fromkeys(marked):
        compat.must_save(node)
    return marked


def _routing(call: fx.Node) -> Iterator[fx.Node]:
    given = arguments(call)
    for name in ("topk_weights", "topk_ids"):
        node: Any = given[name]
        for _ in range(_STEPS):
            if not isinstance(node, fx.Node) or node.op != "call_function":
                break
            yield node
            if node.target is operator.getitem:  # of topk, sort, fused_topk: all results of one selection
                yield from (node.args[0], *node.args[0].users)  # type: ignore[misc, union-attr]
                break
            inputs = node.all_input_nodes
            node = inputs[0] if len(inputs) == 1 else None
