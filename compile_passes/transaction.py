"""A change of a graph is made as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx


def change(graph: fx.Graph, apply: Callable[[], None]) -> None:
    """Run ``apply``, which changes ``graph``, and check the result; when either fails, the graph is as it was before.

    What is kept is a list of every node's fields, which costs a small part of what a copy of the graph does; ``apply``
    may change any node but not what a node's arguments or metadata hold inside. The nodes of a graph that was put back
    are new ones, except for its placeholders: Dynamo keeps what it knows about the inputs on those.

    Raises:
        BaseException: whatever ``apply`` raised, or torch's description of what is wrong with the changed graph.
    """
    kept = [(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, n.meta) for n in graph.nodes]
    try:
        apply()
        graph.lint()
    except BaseException:
        _clear(graph)
        made = {node: node for node, op, *_ in kept if op == "placeholder"}
        for node, op, target, args, kwargs, name, kind, meta in kept:
            if node not in made:
                new_args, new_kwargs = fx.map_arg((args, kwargs), made.__getitem__)
                made[node] = graph.create_node(op, target, new_args, new_kwargs, name, kind)
                made[node].meta = meta
        raise


def _clear(graph: fx.Graph) -> None:
    """Erase every node but the placeholders, in whatever order and however wrongly they refer to each other."""
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    for node in nodes:
        node.args, node.kwargs = (), {}
    for node in nodes:
        graph.erase_node(node)
