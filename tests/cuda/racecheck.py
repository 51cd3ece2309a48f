"""What compute-sanitizer's racecheck reports, less what Triton adds to kernels in Gluon."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Where a kernel in Gluon begins, and where it has warps begin with different work.
BEGINNINGS = {
    f"{file.name}:{number}"
    for file in (ROOT / "moe_ops/kernels/triton").glob("*.py")
    if "gl.warp_specialize(" in file.read_text()
    for number, line in enumerate(file.read_text().splitlines(), 1)
    if re.match(r"def _\w+_mm_kernel\(|\s+gl\.warp_specialize\(", line)
}


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
