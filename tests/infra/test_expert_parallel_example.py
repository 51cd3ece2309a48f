"""The example of expert parallelism: two processes by torchrun, and what it says without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_ops.examples import expert_parallel

ROOT = Path(__file__).parents[2]
NAMES = ("gather", "all_to_all", "replicated", "gather, shared expert")


def test_without_torchrun_it_says_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert expert_parallel.main([]) == 2
    assert "torchrun --nproc-per-node 2 -m moe_ops.examples.expert_parallel" in capsys.readouterr().err


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")
def test_two_processes_give_what_one_gives() -> None:
    """Compiled without Inductor: it has nothing to say of the exchanges, and takes half a minute."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "moe_ops.examples.expert_parallel", "--backend", "aot_eager"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = {
        name: line[24:].split() for line in result.stdout.splitlines() for name in NAMES if line[:24].strip() == name
    }
    assert list(lines) == list(NAMES), result.stdout
    rows_out, rows_back, choices = 64 * 256 * 4, 64 * 256 * 4, 64 * 2 * 8
    assert lines["gather"][0] == lines["all_to_all"][0] == f"{(rows_out + rows_back + choices) / 1024:.0f}"
    assert lines["replicated"][0] == f"{2 * rows_back / 1024:.0f}"
    for name, (_, *errors, eager, compiled) in lines.items():
        assert all(float(error) < 1e-6 for error in errors), name
        assert float(eager) > 0 and float(compiled) > 0
