"""The shipped plans can be read, fit the GPU they name, and the nearest one serves a size that nobody measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meta.arch import lookup
from meta.schemes import SCHEMES
from moe_ops import plans
from moe_ops.kernels.triton.config import MMConfig, SmallConfig

FILES = sorted(plans.CONFIG_DIR.glob("*.json"))


@pytest.fixture(autouse=True)
def _fresh_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plans, "user_directory", lambda: tmp_path)
    for table in (plans.tuned, plans.plan_for):
        table.cache_clear()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_plans_fit_their_gpu(path: Path) -> None:
    gpu = json.loads(path.read_text())["gpu"]
    assert plans.file_name(gpu) == path.name
    shared_bytes = lookup(gpu).shared_kib * 1024
    for key, rows in plans.tuned(gpu).items():
        element = SCHEMES[key.split()[0]].weight_dtype.itemsize
        for plan in rows.values():
            assert plan.path in ("small", "grouped", "batched", "torch_grouped")
            for tile in (plan.up, plan.down):
                if isinstance(tile, MMConfig):
                    used = (tile.block_m + tile.block_n) * tile.block_k * element * tile.num_stages
                    assert used <= shared_bytes, (key, tile)
                else:
                    assert tile is None or isinstance(tile, SmallConfig)


def test_nearest_measured_plan_else_the_rule() -> None:
    gpu = json.loads(FILES[0].read_text())["gpu"]
    key = plans.LayerKey("bf16", "grouped", 128, 8, 2048, 768, True)
    rows = plans.tuned(gpu)[str(key)]
    assert plans.plan_for(key, plans.bucket(4096), gpu, 90) is rows[4096]
    assert plans.plan_for(key, plans.bucket(10**6), gpu, 90) is rows[max(rows)]
    other = plans.LayerKey("bf16", "grouped", 7, 2, 512, 256, True)
    assert plans.plan_for(other, 5, gpu, 90) == plans.rule(other, 32, 90)


def test_a_users_own_plan_comes_first(tmp_path: Path) -> None:
    gpu = json.loads(FILES[0].read_text())["gpu"]
    key = plans.LayerKey("bf16", "grouped", 128, 8, 2048, 768, True)
    mine = plans.Plan("torch_grouped", None, None, us=1.0)
    table = {"plans": {str(key): {"4096": mine.to_json()}}}
    (tmp_path / plans.file_name(gpu)).write_text(json.dumps(table))
    assert plans.plan_for(key, 12, gpu, 90) == mine
