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

from tests.cuda.racecheck import races_told

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


@pytest.mark.skipif(SANITIZER is None, reason="needs NVIDIA's compute-sanitizer")
@pytest.mark.parametrize(
    ("tool", "program"),
    [
        ("memcheck", ["sanitized"]),
        ("racecheck", ["sanitized"]),
        # initcheck does not see what a tensor map's stores write, and would report every read of it.
        ("initcheck", ["sanitized", "--stores-by-pointer"]),
        *((tool, ["sanitized_exchange"]) for tool in ("memcheck", "racecheck", "initcheck")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_clean(tool: str, program: list[str]):
    program = [sys.executable, "-m", f"tests.cuda.{program[0]}", *program[1:]]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "99", "--print-limit", "1000", *program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if "Host Frame" not in line]
    told = "\n".join([*lines[:40], done.stderr[-2000:]])
    reports = races_told(lines) if tool == "racecheck" else None
    assert "ran" in lines and (done.returncode == 0 or reports == []), told
