"""NVIDIA's compute-sanitizer finds nothing in the kernels: no access out of bounds, no race, no read of what nothing
wrote.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


@pytest.mark.skipif(SANITIZER is None, reason="needs NVIDIA's compute-sanitizer")
@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("memcheck", []),
        ("racecheck", []),
        # initcheck does not see what a tensor map's stores write, and would report every read of it.
        ("initcheck", ["--stores-by-pointer"]),
    ],
    ids=["memcheck", "racecheck", "initcheck"],
)
def test_clean(tool: str, options: list[str]):
    program = [sys.executable, "-m", "tests.cuda.sanitized", *options]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "99", "--print-limit", "5", *program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    reports = [line for line in done.stdout.splitlines() if "Host Frame" not in line]
    assert done.returncode == 0 and "ran" in reports, "\n".join([*reports[:40], done.stderr[-2000:]])
