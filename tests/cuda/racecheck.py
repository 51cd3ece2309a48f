"""What compute-sanitizer's racecheck reports, less what Triton adds to kernels in Gluon."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "moe_ops/kernels/triton"


def _beginnings(file: Path) -> Iterator[str]:
    """Where kernels in Gluon begin, and where they have warps begin with different work: Triton writes down the line of
    the call or that of the `if` around it.
    """
    for kernel in ast.parse(file.read_text()).body:
        starts = [
            node.lineno
            for node in ast.walk(kernel)
            if isinstance(node, ast.If | ast.Expr) and "gl.warp_specialize(" in ast.unparse(node)
        ]
        if isinstance(kernel, ast.FunctionDef) and starts:
            yield from (f"{file.name}:{line}" for line in (kernel.lineno, *starts))


BEGINNINGS = {place for file in KERNELS.glob("*.py") for place in _beginnings(file)}


def races_told(lines: list[str]) -> list[list[str]]:
    """The races that racecheck reports of what we wrote.

    Triton tells warps through shared memory with which work they begin, between barriers of the whole program. Where
    warps have barriers of their own as well, racecheck reports what it writes and reads there: also of a kernel that
    has no shared memory, and whose warps meet at one `gl.thread_barrier` (compute-sanitizer 2025, Triton 3.6).
    """
    reports: list[list[str]] = []
    for line in lines:
        if "Race reported" in line:
            reports.append([])
        if reports and (place := re.search(r" access at \S+ in (\w+\.py:\d+)", line)):
            reports[-1].append(place[1])
    summary = re.search(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)", "\n".join(lines))
    if summary is None or sum(map(int, summary.groups())) != len(reports):
        return [["more races than are told"]]
    return [places for places in reports if not places or not set(places) <= BEGINNINGS]
