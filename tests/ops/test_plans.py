"""The shipped plans can be read and fit the GPU they name; where none was measured, the cheapest by cost serves."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meta.arch import lookup
from meta.cost import Work, product_us
from meta.schemes import SCHEMES
from moe_ops import backends, plans
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton.config import MMConfig

TILE = MMConfig(16, 32, 32, 2, 4, 2, a_tma=True, w_tma=True)
FILES = sorted(plans.CONFIG_DIR.glob("*.json"))


@pytest.fixture(autouse=True)
def _fresh_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plans, "user_directory", lambda: tmp_path)
    for table in (plans.tuned, plans.measured, triton_plans.plan_for):
        table.cache_clear()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_plans_fit_their_gpu(path: Path) -> None:
    gpu = json.loads(path.read_text())["gpu"]
    assert plans.file_name(gpu) == path.name
    shared_bytes = lookup(gpu).shared_kib * 1024
    for key, rows in plans.tuned(gpu).items():
        element = SCHEMES[key.split()[0]].weight_dtype.itemsize
        for plan in rows.values():
            assert tuple(map(type, plan.configs)) == backends.sequences(plan.backend)[plan.sequence]
            for tile in plan.configs:
                if isinstance(tile, MMConfig):
                    used = (tile.block_m + tile.block_n) * tile.block_k * element * tile.num_stages
                    assert used <= shared_bytes, (key, tile)


KEY = plans.LayerKey("bf16", "grouped", 7, 2, 512, 256, True)


def write(path: Path, rows: dict[int, plans.Plan | None], key: plans.LayerKey = KEY) -> None:
    table = {"plans": {str(key): {str(tokens): plan and plan.to_json() for tokens, plan in rows.items()}}}
    path.write_text(json.dumps(table))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 6, 11, 16, 90, 91, 1024, 4000, 10**6])
def test_a_bucket_is_half_an_octave(tokens: int) -> None:
    middle = plans.tokens_of(plans.bucket(tokens))
    assert middle == 1 if tokens < 2 else abs(math.log2(middle / tokens)) <= 0.27  # a quarter, and rounding


def test_a_measured_plan_serves_half_an_octave_to_either_side(tmp_path: Path) -> None:
    made = {tokens: triton_plans.plan("grouped", TILE, TILE, us=float(tokens)) for tokens in (4, 64)}
    write(tmp_path / "a_gpu.json", made)
    tokens = (1, 3, 4, 5, 23, 48, 64, 90, 128)
    chosen = [triton_plans.plan_for(KEY, plans.bucket(T), "a gpu", 90).us for T in tokens]
    assert chosen == [None, 4, 4, 4, None, 64, 64, 64, None]
    assert triton_plans.plan_for(KEY, plans.bucket(23), "a gpu", 90) == triton_plans.cheapest(KEY, 23, "a gpu", 90)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_plans_survive_being_written_and_read(path: Path) -> None:
    rows = [plan for row in plans.tuned(json.loads(path.read_text())["gpu"]).values() for plan in row.values()]
    assert {plan.sequence for plan in rows} >= {"small", "grouped", "batched"}
    for plan in rows:
        assert plans.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def cheapest(tokens: int, scheme: str = "bf16", sm: int = 90, gpu: str = "NVIDIA H200", **sizes: Any) -> plans.Plan:
    made = {"E": 8, "K": 2, "H": 512, "I": 256, "gated": True, "format": "grouped", **sizes}
    return triton_plans.cheapest(plans.LayerKey(scheme=scheme, **made), tokens, gpu, sm)


ROW = '{"gpu": "Test GPU", "plans": {"a layer": {"16": %s}}}'
DAMAGED = {
    **{"empty": "", "cut": '{"gpu": "Test GPU", "plans": {', "list": "[]", "nothing": "{}"},
    "list of plans": '{"gpu": "Test GPU", "plans": []}',
    "no configs": ROW % '{"backend": "triton", "sequence": "grouped"}',
    **{"tokens": '{"gpu": "Test GPU", "plans": {"a layer": {"x": null}}}', "no text": "\udcff"},
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_of_the_user_is_named_and_left_out(name: str, tmp_path: Path) -> None:
    path = tmp_path / plans.file_name("Test GPU")
    path.write_text(DAMAGED[name], errors="surrogateescape")
    with pytest.warns(UserWarning, match=re.escape(f"moe_ops: {path} must be a whole file of plans")) as caught:
        assert plans.tuned("Test GPU") == {} == plans.tuned("Test GPU")
    assert len(caught) == 1
    with pytest.raises(
        ValueError, match=re.escape(f"{path} must be a whole file of plans, as moe-ops tune writes it, got ")
    ):
        plans.read(path)


def test_the_cheapest_plan_follows_the_sizes() -> None:
    assert cheapest(1).sequence == "small" and cheapest(1, format="batched").sequence == "batched"
    assert cheapest(64).sequence == "grouped"
    assert [cheapest(tokens, "fp32").configs[0].block_m for tokens in (64, 65)] == [16, 64]
    for tokens in (64, 4096):
        tiles = [cheapest(tokens, "fp8_block128", gated=gated).configs[0] for gated in (True, False)]
        assert [tile.block_n for tile in tiles] == [256, 128]
    assert [cheapest(4096, sm=sm).configs[0].w_tma for sm in (80, 90)] == [False, True]


@pytest.mark.parametrize(
    ("gated", "sm", "rows"),
    [(True, 89, 64), (False, 89, 128), (True, 90, 128)],
    ids=["halves", "whole", "promoted_mm"],
)
def test_scales_run_on_from_one_half_into_the_other_alone(gated: bool, sm: int, rows: int) -> None:
    """Of 192 columns of each half a block of 128 is of both; without halves none is, and one kernel takes them."""
    key = plans.LayerKey("fp8_block128", "grouped", 8, 2, 512, 192, gated)
    assert triton_plans.cheapest(key, 4096, "NVIDIA H200", sm).configs[0].block_m == rows


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128"])
def test_tiles_grow_with_an_experts_rows(scheme: str) -> None:
    tiles = [cheapest(2**octave, scheme, E=64, K=4, H=4096, I=1024).configs[0] for octave in range(2, 16)]
    heights = [max(tile.block_m, tile.tall_m) for tile in tiles if isinstance(tile, MMConfig)]
    assert heights == sorted(heights) and heights[0] == 16 and heights[-1] == 128


def test_which_costs_a_product_has() -> None:
    """GEMM 1 of the batched format, whose rows are sorted, has those of GEMM 2; quantised, it has its own. Where rows
    are gathered beside a tensor core's work, by the largest tile, that costs nothing.
    """
    assert triton_plans.product("bf16", first=True, gathered=True) == "up"
    assert triton_plans.product("bf16", first=True, gathered=False) == triton_plans.product(
        "bf16", first=False, gathered=False
    )
    assert triton_plans.product("fp8_block128", first=True, gathered=False) == "up"
    (largest,) = (
        family for family in triton_plans.FAMILIES["plain"] if triton_plans.has_short_ends("bf16", family.tile)
    )
    assert largest.up is not None and largest.down is not None
    for tokens in (3000, 16384):
        work = Work(64, 8, tokens, 2048, 2048, 2.0)
        assert product_us(work, largest.up, 132) == pytest.approx(product_us(work, largest.down, 132), rel=0.02)


def test_pairs_that_share_experts_are_sorted() -> None:
    """Of eight experts few tokens take all; of 512 eight tokens hardly share one, but T = 1 is small for both."""
    few, many = ({"E": E, "K": K, "H": 2048, "I": 1024} for E, K in ((8, 2), (512, 8)))
    assert [cheapest(tokens, **few).sequence for tokens in (1, 8)] == ["small", "grouped"]
    assert [cheapest(tokens, **many).sequence for tokens in (1, 4)] == ["small", "small"]


@pytest.mark.parametrize("scheme", sorted(triton_plans.PACKED))
def test_decoded_weights_of_few_tokens(scheme: str) -> None:
    """A step of a row is of whole loads, and ends with the row or near it; every sequence has tiles to time."""
    sizes = {"qwen3": (128, 8, 2048, 768), "gpt_oss": (128, 4, 2880, 2880), "odd": (60, 6, 1408, 704)}
    for E, K, H, I in sizes.values():
        key = plans.LayerKey(scheme, "grouped", E, K, H, I, True)
        found = [triton_plans.cheapest(key, tokens, "NVIDIA H200", 90) for tokens in (1, 64)]
        assert [plan.sequence for plan in found] == ["small", "grouped"]
        for depth, tile in zip((H, I), found[0].configs, strict=True):
            assert (
                tile.block_k * SCHEMES[scheme].bits % 128 == 0
                and -(-depth // tile.block_k) * tile.block_k <= 1.4 * depth
            )
        assert all(map(all, triton_plans.candidates(key, 1, 90).values()))
    batched = plans.LayerKey(scheme, "batched", 128, 8, 2048, 768, True)
    assert triton_plans.cheapest(batched, 1, "NVIDIA H200", 90).sequence == "batched"


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "Another GPU"])
@pytest.mark.parametrize("scheme", sorted(triton_plans.DECODED))
def test_tiles_of_decoded_weights_grow_with_an_experts_rows(scheme: str, gpu: str) -> None:
    """Eight rows by `decoded_few_mm`, or what is gathered, to 256, or 128 where sums wait for scales; one for both
    products, as they were timed.
    """
    heights = []
    for tokens in (64, 128, 300, 700, 4096):
        first, second = triton_plans.cheapest(
            plans.LayerKey(scheme, "grouped", 128, 8, 2048, 768, True), tokens, gpu, 90
        ).configs
        assert first == second
        heights.append(first.block_m)
    wait = scheme not in triton_plans.PACKED or scheme == "int4_w4a16"
    assert heights == sorted(heights) and heights[0] == (16 if scheme == "w4a8_fp8" else 8)
    assert heights[3] == (64 if scheme == "w4a8_fp8" else 128) and heights[-1] == (128 if wait else 256)


@pytest.mark.parametrize("hidden", [2048, 4096, 8192])
@pytest.mark.parametrize("scheme", sorted(triton_plans.PACKED))
def test_tiles_of_many_rows_share_decoded_weights(scheme: str, hidden: int) -> None:
    """Of codes with scales of their own, from 1024 rows an expert on, of longer weight rows from more; on Hopper."""
    rows = max(1024, hidden // (4 if scheme == "mxfp8" else 2))
    wanted = 256 if scheme in ("mxfp4", "nvfp4", "mxfp8") else 128
    for tokens, columns in ((rows * 16 - 100, 128), (rows * 16, wanted)):
        key = plans.LayerKey(scheme, "grouped", 128, 8, hidden, 768, True)
        for sm, width in ((90, columns), (80, 128)):
            tiles = triton_plans.cheapest(key, tokens, "Another GPU", sm).configs
            assert [tile.block_n for tile in tiles] == [width, width]


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4_a8", "nvfp4"])
def test_products_of_scaled_blocks(scheme: str) -> None:
    """Of 128 weight rows, for any number of tokens, and never by the small kernels; other GPUs decode."""
    for tokens in (1, 64, 4096):
        key = plans.LayerKey(scheme, "grouped", 128, 8, 2048, 768, True)
        plan = triton_plans.cheapest(key, tokens, "NVIDIA B200", 100)
        assert plan.sequence == "grouped" and all(tile.block_n == 128 for tile in plan.configs)
        found = triton_plans.candidates(key, tokens, 100)
        assert list(found) == ["grouped"] and all(found["grouped"])
        assert {tile.block_n for tiles in found["grouped"] for tile in tiles} == {128}
        other, hopper = (triton_plans.cheapest(key, tokens, "Another GPU", sm) for sm in (120, 90))
        assert other == hopper or tokens > 1  # which Hopper has kernels of its own for
        assert all(tile.block_n <= 128 and tile.block_m <= 128 for tile in other.configs if isinstance(tile, MMConfig))


def test_tiles_fit_the_gpu() -> None:
    for gpu, sm, kib in (("NVIDIA A100-SXM4-80GB", 80, 163), ("NVIDIA H200", 90, 227)):
        for tokens in (16, 300, 5000):
            plan = cheapest(tokens, gpu=gpu, sm=sm, H=4096, I=2048)
            for tile in plan.configs:
                assert (tile.block_m + tile.block_n) * tile.block_k * 2 * tile.num_stages <= kib * 1024


def test_a_sequence_that_is_no_more_is_passed_over(tmp_path: Path) -> None:
    """As older versions wrote it, beside one that still is."""
    old = {"path": "grouped", "up": TILE._asdict(), "down": TILE._asdict(), "us": 1.0}
    gone = {"backend": "triton", "sequence": "torch_grouped", "configs": [], "us": 1.0}
    rows = {
        "64": old,
        "128": gone,
        "256": {**gone, "backend": "gone"},
        "512": triton_plans.plan("grouped", TILE, TILE, us=2.0).to_json(),
    }
    (tmp_path / plans.file_name("a gpu")).write_text(json.dumps({"plans": {str(KEY): rows, "another": {"64": old}}}))
    assert [triton_plans.plan_for(KEY, plans.bucket(tokens), "a gpu", 90).us for tokens in (64, 128, 256, 512)] == [
        None
    ] * 3 + [2.0]
    assert plans.tuned("a gpu")["another"] == {}


def test_where_a_user_measured_that_nothing_wins_no_shipped_plan_serves(tmp_path: Path) -> None:
    gpu, key = "NVIDIA H200", plans.LayerKey("fp8_block128", "grouped", 256, 8, 7168, 2048, True)
    assert triton_plans.plan_for(key, plans.bucket(256), gpu, 90).us is not None
    write(tmp_path / plans.file_name(gpu), {256: None}, key)
    plans.tuned.cache_clear()
    assert 256 not in plans.tuned(gpu)[str(key)] and 512 in plans.tuned(gpu)[str(key)]


def test_a_tall_tile_counts_where_memory_is_short() -> None:
    tile = MMConfig(16, 128, 128, 8, 4, 3, a_tma=False, w_tma=True, tall_m=128, tall_stages=3)
    assert triton_plans.fits(tile, 2, 227) and not triton_plans.fits(tile, 2, 163)
    assert triton_plans.fits(tile._replace(tall_m=0, tall_stages=0), 2, 163)


def test_a_file_of_plans_has_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    table = {"gpu": "a gpu", "plans": {"a key": {"4": triton_plans.plan("grouped", TILE, TILE).to_json(), "8": None}}}
    plans.write(table, path)
    assert json.loads(path.read_text()) == table and len(path.read_text().splitlines()) == 9


def test_a_users_own_plan_comes_first(tmp_path: Path) -> None:
    gpu = json.loads(FILES[0].read_text())["gpu"]
    key = plans.LayerKey("bf16", "grouped", 128, 8, 2048, 768, True)
    mine = triton_plans.plan("grouped", TILE, TILE, us=1.0)
    write(tmp_path / plans.file_name(gpu), {4096: mine}, key)
    assert triton_plans.plan_for(key, plans.bucket(4096), gpu, 90) == mine


def test_a_measured_plan_names_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "gpu_of", lambda device: (f"gpu {device.index}", 90))
    write(tmp_path / "gpu_1.json", {64: triton_plans.plan("grouped", TILE, TILE)})
    sizes = {"scheme": KEY.scheme, "format": KEY.format, "E": 7, "K": 2, "H": 512, "I": 256, "gated": True}

    def fastest(T: int, device: str) -> str | None:
        return plans.fastest_backend(SimpleNamespace(**sizes, T=T), torch.device(device))

    assert [fastest(64, "cuda:1"), fastest(64, "cuda:0"), fastest(8, "cuda:1")] == ["triton", None, None]
    assert fastest(64, "cpu") is None
