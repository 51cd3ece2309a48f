"""One process of several: runs the checks in their order, and writes what was wrong with each.

    python -m tests.distributed.worker --size 2 --rank 0 --port 29500 --out FILE

A rank meets the others after every check. After one that failed on any rank they go on in a new group, so that nobody
gets what the old one still holds. Two checks that hang end the run.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.checks import CHECKS
from tests.distributed.ranks import PATIENCE, Check, Ranks

HANGS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("size", "rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="parts of the names of checks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=options.size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    checks = {
        name: check
        for name, check in CHECKS.items()
        if options.size in check.sizes and (not options.only or any(part in name for part in options.only))
    }
    with options.out.open("w") as out:
        for name, wrong in run(checks, options.rank, options.size):
            out.write(json.dumps([name, wrong]) + "\n")
            out.flush()  # whatever becomes of this process
    dist.destroy_process_group()


def run(checks: dict[str, Check], rank: int, size: int) -> Iterator[tuple[str, str]]:
    """Name of every check, and what was wrong with it, "" if nothing."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=PATIENCE))  # moe_ops.ep asks it
    meeting = dist.PrefixStore("checks", store)
    ranks, hangs = Ranks(rank, size), 0
    for name, check in checks.items():
        if hangs == HANGS:
            yield name, f"not run: {HANGS} checks before it hung"
            continue
        ranks.errors, start = [], time.perf_counter()
        try:
            check.run(ranks)
        except Exception:
            ranks.errors.append(traceback.format_exc())
        seconds = time.perf_counter() - start
        yield name, "\n".join(ranks.errors)
        print(f"{seconds:6.2f} s {name}", flush=True)
        meeting.set(f"{name}/{rank}", ("failed", "hung")[seconds > PATIENCE] if ranks.errors else "")
        keys = [f"{name}/{member}" for member in range(size)]
        meeting.wait(keys, timedelta(seconds=3 * PATIENCE))
        outcomes = [meeting.get(key).decode() for key in keys]
        hangs += "hung" in outcomes
        if any(outcomes):
            ranks = Ranks(rank, size)


if __name__ == "__main__":
    main()
