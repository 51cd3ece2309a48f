"""`moe_ops.ep` over 2 and 4 processes on the CPU: every check of `tests.distributed.checks` is one test for each size.

python -m pytest tests/distributed -k "2-gather-bf16-uniform"
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.distributed import processes
from tests.distributed.checks import CHECKS

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")

CASES = [(size, name) for size in processes.SIZES for name, check in CHECKS.items() if size in check.sizes]


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], str]:
    """What was wrong with a check. The first test of a size runs all of its checks, in whichever test process."""
    root = tmp_path_factory.getbasetemp()
    folder = Path(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root, "distributed")

    def look(size: int, name: str) -> str:
        with FileLock(f"{folder}.lock"):
            found = folder / f"{size}.json"
            if not found.exists():
                folder.mkdir(exist_ok=True)
                found.write_text(json.dumps(processes.run(size, folder)))
        outcomes = json.loads(found.read_text())
        return outcomes["wrong"].get(name, outcomes["died"] or "not run")

    return look


@pytest.mark.parametrize(("size", "name"), CASES, ids=[f"{size}-{name}" for size, name in CASES])
def test_on_every_rank(outcome, size, name):
    wrong = outcome(size, name)
    assert not wrong, wrong
