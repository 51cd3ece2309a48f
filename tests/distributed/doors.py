"""Two gloo processes that enter expert parallelism by other doors than its functions: a list of checks.

    python -m tests.distributed.doors --checks of_transformers --rank 0 --port 29500 --folder FOLDER

A check is a function of a module, listed in its ``CHECKS``: it raises where something is wrong. Every rank runs all of
them in one order; each makes the same collectives, whatever it finds, before it compares anything.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
#: Seconds that a rank waits for another one, and that all checks of a module may take.
PATIENCE, LIMIT = 30, 240
#: Characters of what a process that died wrote at last.
TAIL = 3000

Checks = dict[str, Callable[[int, Path], None]]


def run(checks: str, folder: Path) -> dict[str, str]:
    """Name of a check -> what was wrong with it on any rank, or nothing.

    Raises:
        RuntimeError: a process died, or was not done in time; with the end of what it wrote.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    logs = [folder / f"{checks}_{rank}.log" for rank in range(RANKS)]
    started = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.distributed.doors", "--checks", checks, "--folder", str(folder)]
        command += ["--rank", str(rank), "--port", str(port)]
        with log.open("w") as said:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said))
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            break
        time.sleep(0.1)
    for process in started:
        process.kill()
        process.wait()
    if any(process.returncode for process in started):
        ends = [f"rank {rank}, {one.returncode}:\n{logs[rank].read_text()[-TAIL:]}" for rank, one in enumerate(started)]
        raise RuntimeError("\n".join(ends))
    found = [json.loads(_results(folder, checks, rank).read_text()) for rank in range(RANKS)]
    return {
        name: "\n".join(f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(found) if of_rank[name])
        for name in found[0]
    }


def _results(folder: Path, checks: str, rank: int) -> Path:
    return folder / f"{checks}_{rank}.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE),
    )  # fmt: skip
    checks: Checks = import_module(f"tests.distributed.{options.checks}").CHECKS
    found = {}
    for name, check in checks.items():
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        start = time.perf_counter()
        try:
            check(options.rank, options.folder)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        dist.barrier()
    _results(options.folder, options.checks, options.rank).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
