"""The example that trains, at a family's own dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_ops.examples.finetune import main

pytestmark = pytest.mark.cuda


def test_real_dimensions(tmp_path: Path) -> None:
    results = tmp_path / "runs.json"
    small = "--family olmoe --real --layers 1 --steps 6 --batch 2 --length 512 --no-picture"
    assert main([*small.split(), "--json", str(results)]) == 0
    runs = json.loads(results.read_text())["runs"]
    assert len(runs) == 4 and all(run["peak_bytes"] > 2**30 for run in runs), "parameters and AdamW's state alone"
