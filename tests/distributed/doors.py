"""Two gloo processes that enter expert parallelism by other doors than its functions: a list of checks.

    python -m tests.distributed.doors --checks of_transformers --size 2 --rank 0 --port 29500 --out FILE

A check is a function of a module, listed in its ``CHECKS``: it raises where something is wrong. Every rank runs all of
them in one order; each makes the same collectives, whatever it finds, before it compares anything.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2
#: Seconds that a rank waits for another one.
PATIENCE = 30

Checks = dict[str, Callable[[int, Path], None]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checks", required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("size", "rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=options.size,
        timeout=timedelta(seconds=PATIENCE),
    )  # fmt: skip
    checks: Checks = import_module(f"tests.distributed.{options.checks}").CHECKS
    for name, check in checks.items():
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        start = time.perf_counter()
        try:
            check(options.rank, options.out.parent)
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        with options.out.open("a") as out:
            print(json.dumps([name, wrong]), file=out)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
