"""Our layers of two checkouts, timed by the benchmarks of this one: a process of each in turn, old new old new.

Two processes are needed because both checkouts' packages have the same names.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer
from benchmarks.results import ResultFile

METHOD = (
    "the benchmarks of this checkout with the packages of either one, {pairs} processes of each in turn (old new old "
    "new); us: medians, as `python -m benchmarks` takes them, by process; ratio: new / old, the median of neighbouring "
    "processes, low and high the least and the largest"
)
HERE = Path(__file__).resolve().parent.parent
PACKAGES = ("meta", "moe_ops", "compile_passes")
# `benchmarks` is found before the checkout, which has one too, goes to the front; -P keeps the working folder out.
WORKER = (
    "import sys; sys.path.insert(0, {here!r}); import benchmarks; sys.path[0] = {folder!r}; "
    "from benchmarks.compare import worker; sys.exit(worker({folder!r}, sys.argv[1:]))"
)
Key = tuple[str, int, str, str]


def checkout(option: str, folder: Path) -> Path:
    """``folder``, resolved.

    Raises:
        ValueError: it does not hold the packages.
    """
    missing = [name for name in PACKAGES if not (folder / name / "__init__.py").exists()]
    if missing:
        raise ValueError(
            f"benchmarks: {option} must be a checkout with {', '.join(PACKAGES)}, got {folder} without "
            f"{', '.join(missing)}. `git worktree add` makes one of any commit."
        )
    return folder.resolve()


def our_peers(peers: Sequence[Peer]) -> str:
    """Names of ours among ``peers``, for the option.

    Raises:
        ValueError: none is.
    """
    names = [peer.name for peer in peers if peer.is_ours]
    if not names:
        raise ValueError("benchmarks: --peers must name one of ours (ours, ours_fp8, ...), got only others'. Add one.")
    return ",".join(names)


def run(checkouts: Mapping[str, Path], options: Mapping[str, str], pairs: int, results: ResultFile) -> None:
    """Time ``pairs`` processes of each checkout, and add a row for each (shape, T, routing, peer)."""
    times: dict[str, list[dict[Key, float | None]]] = {name: [] for name in checkouts}
    for _ in range(pairs):
        for name, folder in checkouts.items():
            print(f"{name}: {folder}", flush=True)
            times[name].append(time_checkout(folder, options))
    for key in times["new"][0]:
        row = dict(zip(("shape", "T", "routing", "peer"), key, strict=True))
        row |= compared([run[key] for run in times["old"]], [run[key] for run in times["new"]])
        results.add(row)
        print(describe(row))


def compared(old: Sequence[float | None], new: Sequence[float | None]) -> dict[str, Any]:
    """Times of both, and the ratio new / old over the pairs, None where one did not run."""
    row: dict[str, Any] = {"old_us": list(old), "new_us": list(new), "ratio": None}
    if None not in (*old, *new):
        ratios = [after / before for before, after in zip(old, new, strict=True)]  # type: ignore[operator]
        row |= {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    return row


def time_checkout(folder: Path, options: Mapping[str, str]) -> dict[Key, float | None]:
    """Medians of one process."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "layers.json"
        code = WORKER.format(here=str(HERE), folder=str(folder))
        arguments = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-P", "-c", code, *arguments, "--times-only", f"--json={path}"]
        status = subprocess.run(command, cwd=scratch).returncode
        if status or not path.exists():
            raise ValueError(
                f"benchmarks: compare must be able to run the layers of {folder}, got exit status {status}; the cause "
                "is above. A checkout that lacks what these benchmarks import from it cannot be compared."
            )
        rows = json.loads(path.read_text())["rows"]
    return {(row["shape"], row["T"], row["routing"], row["peer"]): row["us"] for row in rows}


def worker(folder: str, arguments: Sequence[str]) -> int:
    """In a process of its own: `layers` with the packages of ``folder``, which are first on the path.

    Raises:
        ValueError: another installation goes before them.
    """
    from benchmarks.__main__ import main

    for name in PACKAGES:
        found = Path(import_module(name).__file__ or "").resolve()
        if not found.is_relative_to(folder):
            raise ValueError(f"benchmarks: compare must import {name} from {folder}, got {found}. Uninstall that one.")
    return main(["layers", *arguments])


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['shape']:>14} T={row['T']:<6} {row['routing']:<10} {row['peer']:<18}"
    if row["ratio"] is None:
        return f"{head} -"
    return f"{head} new / old {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
