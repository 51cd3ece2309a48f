"""Compiled code leaves between two halves what stands between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_products_stay_between_the_halves() -> None:
    """Without the tensors that the waits are told of, both products come last."""
    command = [sys.executable, "-m", "tests.distributed.order"]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    names = ["".join(names) for names in eval(found.stdout.splitlines()[-1])]
    assert names == ["symm_start", "mm", "symm_wait", "fused_experts", "symm_start", "mm", "symm_wait"]
