"""Several processes share a GPU: each gets the bits of a process alone, and its programs draw every tile once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]
PROCESSES = 4


def test_nothing_is_lost_where_turns_end():
    command = [sys.executable, "-m", "tests.cuda.in_company"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **options) for _ in range(PROCESSES)]
    for process, (lines, errors) in [(process, process.communicate(timeout=500)) for process in running]:
        assert process.returncode == 0, errors[-2000:]
        *told, last = lines.splitlines()
        assert last == "ran" and [line for line in told if ": 0 of " not in line] == []
