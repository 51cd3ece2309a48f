"""`moe_ops.ep` over two GPUs: every check of `tests.cuda.expert_parallel`, and of its NVSHMEM part, is one test."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from tests.cuda import expert_parallel, expert_parallel_nvshmem
from tests.distributed.processes import outcome

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("name", [name for name, _ in expert_parallel.checks()])
def test_on_every_gpu(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = outcome(tmp_path_factory, 2, name, "tests.cuda.expert_parallel")
    assert not wrong, wrong


@pytest.mark.skipif(not symmetric.is_nvshmem_available(), reason="needs NVSHMEM")
@pytest.mark.parametrize("name", [name for name, _ in expert_parallel_nvshmem.checks()])
def test_over_nvshmem(name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")  # read when a process first makes such memory
    wrong = outcome(tmp_path_factory, 2, name, "tests.cuda.expert_parallel_nvshmem")
    assert not wrong, wrong
