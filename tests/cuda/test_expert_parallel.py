"""`moe_ops.ep` over two GPUs: every check of `tests.cuda.expert_parallel` is one test."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.expert_parallel import checks
from tests.distributed.processes import outcome

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("name", [name for name, _ in checks()])
def test_on_every_gpu(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = outcome(tmp_path_factory, 2, name, "tests.cuda.expert_parallel")
    assert not wrong, wrong
