"""Starts the processes, waits for them, and gathers what each of them found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
#: Seconds for all checks of one size.
LIMIT = 240
#: Characters of what a process that died wrote at last.
TAIL = 3000


def outcome(factory: pytest.TempPathFactory, size: int, name: str, module: str, *more: str) -> str:
    """What was wrong with a check, "" if nothing. The first test of a module and size runs all of its checks, in
    whichever test process.
    """
    root = factory.getbasetemp()
    folder = Path(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root, "-".join([module, *more, str(size)]))
    with FileLock(f"{folder}.lock"):
        found = folder / "found.json"
        if not found.exists():
            folder.mkdir(exist_ok=True)
            found.write_text(json.dumps(run(size, folder, module, *more)))
    outcomes = json.loads(found.read_text())
    wrong: str = outcomes["wrong"].get(name, outcomes["died"] or "not run")
    return wrong


def run(size: int, folder: Path, module: str, *more: str) -> dict[str, Any]:
    """All checks of ``module``, a program that is told its rank, in ``size`` processes.

    Returns:
        ``wrong``: what every check found, by name, "" if nothing. ``died``: the end of what processes wrote that died
        or were not done in time, "" if none.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outs = [folder / f"{size}_{rank}.json" for rank in range(size)]
    logs = [out.with_suffix(".log") for out in outs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    started = []
    for rank, (out, log) in enumerate(zip(outs, logs, strict=True)):
        options = {"size": size, "rank": rank, "port": port, "out": out}
        command = [sys.executable, "-m", module]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))] + [*more]
        with log.open("w") as said:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said))
    try:
        _wait(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    died = [rank for rank, process in enumerate(started) if process.returncode]
    ends = (f"rank {rank} ended with {started[rank].returncode}:\n{logs[rank].read_text()[-TAIL:]}" for rank in died)
    found = [dict(map(json.loads, out.read_text().splitlines())) if out.exists() else {} for out in outs]
    names = list(dict.fromkeys(name for of_rank in found for name in of_rank))
    wrong = {name: _on_ranks(name, found) for name in names}
    # What went well on some ranks is no outcome; what went wrong on one is, and the others may wait for that rank.
    known = {name: text for name, text in wrong.items() if text or all(name in of_rank for of_rank in found)}
    return {"died": "\n".join(ends), "wrong": known}


def _on_ranks(name: str, found: list[dict[str, str]]) -> str:
    return "\n".join(f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(found) if of_rank.get(name))


def _wait(started: list[subprocess.Popen[bytes]]) -> None:
    """Until all are done, one died, or the time is up."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            time.sleep(2)  # the others may say more about it
            return
        time.sleep(0.1)
