"""The shipped plans can be read, fit the GPU they name, and the nearest one serves a size that nobody measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meta.arch import lookup
from meta.schemes import SCHEMES
from moe_ops import plans
from moe_ops.kernels.triton.config import MMConfig, SmallConfig

TILE = MMConfig(16, 32, 32, 2, 4, 2, a_tma=True, w_tma=True)
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
            assert plan.path in ("small", "grouped", "batched")
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


@pytest.mark.parametrize(
    "tokens, log2",
    [(0, 0), (1, 0), (2, 1), (3, 2), (5, 2), (6, 3), (11, 3), (12, 4), (90, 6), (91, 7), (1448, 10), (1449, 11)],
)
def test_token_counts_between_powers_of_two_go_to_the_nearer_one(tokens: int, log2: int) -> None:
    assert plans.bucket(tokens) == log2


def test_a_token_count_between_two_measured_ones_takes_the_nearer_plan(tmp_path: Path) -> None:
    key = plans.LayerKey("bf16", "grouped", 7, 2, 512, 256, True)
    measured = {tokens: plans.Plan("grouped", TILE, TILE, us=float(tokens)) for tokens in (4, 64)}
    table = {"plans": {str(key): {str(tokens): plan.to_json() for tokens, plan in measured.items()}}}
    (tmp_path / plans.file_name("a gpu")).write_text(json.dumps(table))
    chosen = [plans.plan_for(key, plans.bucket(tokens), "a gpu", 90).us for tokens in (1, 4, 11, 23, 40, 10**5)]
    assert chosen == [4, 4, 4, 64, 64, 64]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_plans_survive_being_written_and_read(path: Path) -> None:
    rows = [plan for row in plans.tuned(json.loads(path.read_text())["gpu"]).values() for plan in row.values()]
    assert {plan.path for plan in rows} >= {"small", "grouped", "batched"}
    for plan in rows:
        assert plans.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_rules_tiles_follow_rows_generation_and_scheme() -> None:
    def rule(scheme: str, tokens: int, sm: int = 90, gated: bool = True, format: str = "grouped") -> plans.Plan:
        return plans.rule(plans.LayerKey(scheme, format, 8, 2, 512, 256, gated), tokens, sm)

    assert [rule("bf16", tokens).path for tokens in (1, 2)] == ["small", "grouped"]
    assert rule("bf16", 1, format="batched").path == "batched" and rule("fp8_block128", 1).path == "grouped"
    # 16, 32, 48 and 64 rows an expert are the last of their tile.
    assert [rule("bf16", tokens).up.block_m for tokens in (64, 65, 128, 129, 192, 193)] == [16, 32, 32, 64, 64, 128]
    assert [rule("fp8_block128", tokens).up.block_m for tokens in (64, 65, 256, 257)] == [16, 32, 32, 128]
    assert [rule("fp32", tokens).up.block_m for tokens in (64, 65)] == [16, 64]
    for tokens in (8, 4096):
        assert [rule("fp8_block128", tokens, gated=gated).up.block_n for gated in (True, False)] == [256, 128]
    assert [rule("bf16", 4096, sm).up.a_tma for sm in (80, 90)] == [False, True]


def test_a_sequence_that_is_no_more_is_passed_over(tmp_path: Path) -> None:
    """As an older version wrote it, beside one that still is."""
    key = plans.LayerKey("bf16", "grouped", 7, 2, 512, 256, True)
    old = {"path": "torch_grouped", "up": None, "down": None, "us": 1.0}
    rows = {"64": old, "512": plans.Plan("grouped", TILE, TILE, us=2.0).to_json()}
    (tmp_path / plans.file_name("a gpu")).write_text(json.dumps({"plans": {str(key): rows, "another": {"64": old}}}))
    assert [plans.plan_for(key, plans.bucket(tokens), "a gpu", 90).us for tokens in (64, 512)] == [2.0, 2.0]
    assert plans.tuned("a gpu")["another"] == {}


def test_a_users_own_plan_comes_first(tmp_path: Path) -> None:
    gpu = json.loads(FILES[0].read_text())["gpu"]
    key = plans.LayerKey("bf16", "grouped", 128, 8, 2048, 768, True)
    mine = plans.Plan("grouped", TILE, TILE, us=1.0)
    table = {"plans": {str(key): {"4096": mine.to_json()}}}
    (tmp_path / plans.file_name(gpu)).write_text(json.dumps(table))
    assert plans.plan_for(key, 12, gpu, 90) == mine
