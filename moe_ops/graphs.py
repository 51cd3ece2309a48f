"""Operations of a captured graph as text: what each one is, and the source line that it comes from."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n +([^\n]+))?')
# File, line, function and text of the line.
Frame = tuple[str, str, str, str]


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


def frames(trace: str) -> list[Frame]:
    """The Python frames in a stack trace, outermost first."""
    return _FRAME.findall(trace)


def frame(trace: str) -> Frame:
    """The innermost of them outside of torch; empty texts when there is none."""
    found = frames(trace)
    if not found:
        return "", "", "", ""
    return next((one for one in reversed(found) if not one[0].startswith(TORCH)), found[-1])


def trace_of(node: fx.Node) -> str:
    """The stack trace that ``node`` was made under; empty when the graph does not know."""
    return node.meta.get("stack_trace") or ""


def in_line(place: Frame) -> str:
    """`code  # file:line in function`."""
    file, line, function, code = place
    return f"{code.strip()}  # {file}:{line} in {function}"
