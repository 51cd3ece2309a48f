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

from compile_passes.builder import arguments, operator_name

# How far up the way from ids to the selection that made them is followed: casts, reshapes, a scale.
_STEPS = 8


def routing_of(graph: fx.Graph) -> list[fx.Node]:
    """What selects the experts of every block in a graph of forward and backward, and its weights."""
    calls = [node for node in graph.nodes if operator_name(node) == "fused_experts_saving"]
    return list(dict.fromkeys(node for call in calls for node in _routing(call)))


def _routing(call: fx.Node) -> Iterator[fx.Node]:
    given = arguments(call)
    for name in ("topk_weights", "topk_ids"):
        node: Any = given[name]
        for _ in range(_STEPS):
            if not isinstance(node, fx.Node) or node.op != "call_function":
                break
            yield node
            if node.target is operator.getitem:  # of topk, sort, fused_topk: all results of one selection
                yield from (node.args[0], *node.args[0].users)  # type: ignore[union-attr]
                break
            inputs = node.all_input_nodes
            node = inputs[0] if len(inputs) == 1 else None
