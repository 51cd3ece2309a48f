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

#: By files, names of what warps with work of their own tell one another in shared memory.
TOLD = {
    ("folded_mm.py",): (r"tops_of(_step)?", r"far_of"),
    ("panels.py", "decoded_plain_mm.py"): (r"fours_of",),
    ("hopper.py",): (r"of",),
}


def _accesses(files: tuple[str, ...], name: str) -> set[str]:
    """Where it is stored and loaded."""
    found = re.compile(rf"\b({name})\.index\([^()]*\)\.(store|load)\(")
    lines = [(file, at) for file in files for at in enumerate((KERNELS / file).read_text().splitlines(), start=1)]
    return {f"{file}:{number}" for file, (number, line) in lines if found.search(line)}


ORDERED = [BEGINNINGS, *(_accesses(files, name) for files, names in TOLD.items() for name in names)]


def races_told(lines: list[str]) -> list[list[str]]:
    """The races that racecheck reports of what we wrote.

    Triton tells warps through shared memory with which work they begin, between barriers of the whole program. Where
    warps have barriers of their own as well, racecheck reports what it writes and reads there: also of a kernel that
    has no shared memory, and whose warps meet at one `gl.thread_barrier` (compute-sanitizer 2025, Triton 3.6).

    What is TOLD is stored by several threads, which meet at a `gl.thread_barrier`, behind which one of them arrives at
    the mbarrier that all readers wait for. That orders it (PTX, memory consistency model: causality order, by bar.sync,
    and by what arrives and waits with release and acquire). racecheck orders what the arriving thread stored alone, and
    does not see what matrices of registers (stmatrix) store, as of other kernels. Of any other place it is told.
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
    return [places for places in reports if not places or not any(set(places) <= known for known in ORDERED)]
