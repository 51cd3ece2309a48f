"""`moe_ops.ep` over 2 and 4 processes on the CPU: every check of `tests.distributed.checks` is one test for each size.

python -m pytest tests/distributed -k "2-gather-bf16-uniform"
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.checks import CHECKS
from tests.distributed.processes import outcome

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")

CASES = [(size, name) for size in (2, 4) for name, check in CHECKS.items() if size in check.sizes]


@pytest.mark.parametrize(("size", "name"), CASES, ids=[f"{size}-{name}" for size, name in CASES])
def test_on_every_rank(size: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = outcome(tmp_path_factory, size, name, "tests.distributed.worker")
    assert not wrong, wrong
