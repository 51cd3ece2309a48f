"""Starts the processes, waits for them, and gathers what each of them found."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

#: Seconds for all checks of one size: two minutes of one core each, where cores are not shared.
LIMIT = 600
#: Characters of what a process that died wrote at last.
TAIL = 3000
#: Forked from a process that has imported everything, which takes as long as all checks of some modules; where there is
#: a GPU an import may have looked at it, and no forked process could use it.
START = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
START.set_forkserver_preload(["tests.distributed.ready"])


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
    started: list[BaseProcess] = []
    for rank, (out, log) in enumerate(zip(outs, logs, strict=True)):
        options = {"size": size, "rank": rank, "port": port, "out": out}
        words = [text for name, value in options.items() for text in (f"--{name}", str(value))] + [*more]
        started.append(START.Process(target=_program, args=(module, words, log)))
        started[-1].start()
    try:
        _wait(started)
    finally:
        for process in started:
            process.kill()
            process.join()
    died = [rank for rank, process in enumerate(started) if process.exitcode]
    ends = (f"rank {rank} ended with {started[rank].exitcode}:\n{logs[rank].read_text()[-TAIL:]}" for rank in died)
    found = [dict(map(json.loads, out.read_text().splitlines())) if out.exists() else {} for out in outs]
    names = list(dict.fromkeys(name for of_rank in found for name in of_rank))
    wrong = {name: _on_ranks(name, found) for name in names}
    # What went well on some ranks is no outcome; what went wrong on one is, and the others may wait for that rank.
    known = {name: text for name, text in wrong.items() if text or all(name in of_rank for of_rank in found)}
    return {"died": "\n".join(ends), "wrong": known}


def _program(module: str, words: list[str], log: Path) -> None:
    """``python -m module words`` in this process, which writes to ``log``."""
    import tests.distributed.ready  # noqa: F401  (a process that was not forked from one that has it)

    with log.open("w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _on_ranks(name: str, found: list[dict[str, str]]) -> str:
    return "\n".join(f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(found) if of_rank.get(name))


def _wait(started: list[BaseProcess]) -> None:
    """Until all are done, one died, or the time is up."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and any(process.exitcode is None for process in started):
        if any(process.exitcode for process in started):
            time.sleep(2)  # the others may say more about it
            return
        time.sleep(0.1)
