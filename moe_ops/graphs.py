"""Operations of a captured graph as text, one line each."""

from __future__ import annotations

import torch
from torch import fx


def lines(graph: fx.Graph) -> list[str]:
    """One line per operation of a graph."""
    return [describe(node) for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]


def describe(node: fx.Node) -> str:
    """`name = operation(arguments)`."""
    arguments = [str(argument) for argument in node.args]
    arguments += [f"{name}={value}" for name, value in node.kwargs.items() if value is not None]
    return f"{node.name} = {operation(node)}({', '.join(arguments)})"


def operation(node: fx.Node) -> str:
    """Name of the operation of a node: `torch.bmm`, `.view` for a method, `getitem`."""
    target = node.target if isinstance(node.target, str) else torch.fx.node._get_qualified_name(node.target)
    return "." + target if node.op == "call_method" else target.removeprefix("_operator.").removeprefix("torch._VF.")
