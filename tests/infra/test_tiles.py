"""The costs of tiles: fitted to times whose constants are known, printed as FAMILIES has them; how tiles are timed."""

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import tiles
from benchmarks.__main__ import main
from benchmarks.results import ResultFile
from meta.cost import TileCost, Work, product_us
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton.config import MMConfig

COMMITTED = [
    Path(tiles.__file__).parent / "comparisons" / name for name in ("h200-tiles.json", "h200-tiles-decoded.json")
]
TINY = "16x2x256x128"
TALL, WIDE = (triton_plans.FAMILIES["plain"][number].tile for number in (0, 5))
COSTS = [
    (TALL, TileCost(16, 128, 3.9, 0.8, 4.4, 2, 5.2, 64, 9.0)),
    (WIDE, TileCost(128, 256, 3.1, 2.2, 13.0, 1, 6.6)),
]


@pytest.mark.parametrize(("tile", "known"), COSTS, ids=["two_heights", "one"])
@pytest.mark.parametrize("outliers", [0, 1])
def test_fit_predicts_what_it_was_made_from(outliers: int, tile: MMConfig, known: TileCost) -> None:
    """A single time that is twice what it should be moves most others by less than 1 %, as it is damped."""
    dimensions = [(128, 8, 1536, 2048), (8, 2, 4096, 14336), (128, 2, 1024, 2048), (8, 8, 768, 4096)]
    works = [Work(E, K, T, N, depth, 2) for E, K, N, depth in dimensions for T in (2, 16, 48, 128, 1024, 3000)]
    times = [((work,), product_us(work, known, 132) * (1 + (work in works[5 : 5 + outliers]))) for work in works]
    found = tiles.fit(tile, times, 132, 4.8)
    errors = [abs(math.log(product_us(work, found, 132) / product_us(work, known, 132))) for work in works]
    assert found.programs == known.programs and found.tall_rows == known.tall_rows
    assert (statistics.median(errors) if outliers else max(errors)) < 0.01


def test_constants_are_printed_as_families_has_them() -> None:
    rows = [row for family in triton_plans.FAMILIES.values() for row in family]
    names = {name: getattr(triton_plans, name) for name in ("_decoded", "_family", "_gathered", "_streamed")}
    assert [eval(tiles.family(*row), names) for row in rows] == rows


def test_regret_is_of_tiles_timed_together() -> None:
    """Tiles are picked as by plans, which do not know the routing; a single tile of a case has no regret."""
    head = {"shape": "qwen3", "scheme": "bf16", "gemm": "up"}
    document, low = {"shapes": {"qwen3": [128, 8, 2048, 768]}}, triton_plans.FAMILIES["plain"][1].tile

    def row(T: int, routing: str, tile: MMConfig, us: float, **more: int) -> dict[str, Any]:
        return {**head, "T": T, "routing": routing, "tile": tile, "us": us, **more}

    rows = [row(4096, "uniform", TALL, 100.0), row(4096, "uniform", WIDE, 150.0)]
    rows += [row(1024, "k_experts", TALL, 30.0, run=1), row(1024, "k_experts", WIDE, 50.0, run=1)]
    rows += [row(1024, "k_experts", WIDE, 10.0, run=2)]
    rows += [row(128, "half_empty", TALL, 24.0), row(128, "half_empty", low, 20.0)]
    costs = {**dict(COSTS), low: TileCost(16, 64, 4.0, 0.8, 2.2, 1, 5.2)}  # best with even routing, by 2 %
    found = tiles.regrets(document, rows, costs, 132)
    assert found == {"uniform": [1.5], "k_experts": [1.0], "half_empty": [1.2]}


def test_committed_times_are_what_families_says() -> None:
    """Every tile of FAMILIES is in a file and no other; its constants are within 15 % of half of the times."""
    errors: dict[tuple[str, str, MMConfig], list[float]] = {}
    for document in map(tiles.load, COMMITTED):
        for row in document["rows"]:
            tile = MMConfig(*row["tile"])
            key = row["scheme"], row["gemm"], tile
            families = triton_plans.FAMILIES[tiles.KINDS[key[0]]]
            (cost,) = (tiles._cost_of(family, key[1]) for family in families if family.tile == tile)
            us = tiles.layer_us(tiles.works_of(document, row, row["routing"]), cost, 132)
            errors.setdefault(key, []).append(abs(math.log(us / row["us"])))
    wanted = {(scheme, gemm, tile) for scheme, gemm in CASES for tile in tiles.tiles_of(scheme, gemm)}
    assert set(errors) == wanted
    assert max(map(statistics.median, errors.values())) < 0.15


CASES = [(scheme, gemm) for scheme in tiles.KINDS for gemm in tiles.gemms_of(scheme)]


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_tile_is_timed_in_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_a_gpu: Any) -> None:
    """As often as it is worth it, with the experts of its routing; one that fails has a reason, and the fit goes on."""
    jobs, experts = [], []

    def gemm_call(layer: Any, gemm: str, ids: torch.Tensor) -> Any:
        experts.append(ids.unique().numel())

        def call(tile: MMConfig) -> None:
            if tile == WIDE:
                raise RuntimeError("made up")

        return call

    def compiled(given: Any, processes: int) -> Any:
        jobs.extend(given)
        yield len(jobs), len(jobs), None

    monkeypatch.setattr(tiles, "in_turn", lambda runs, rounds: {name: [3.0, 12.0, 10.0] for name in runs})
    monkeypatch.setattr(tiles, "gemm_call", gemm_call)
    monkeypatch.setattr(tiles, "layer_call", lambda layer, weights, ids: gemm_call(layer, tiles.LAYER, ids))
    monkeypatch.setattr(tiles, "precompile", compiled)
    monkeypatch.setattr(tiles, "TrialLayer", lambda key, device: SimpleNamespace(key=key, device="cpu"))
    shapes, path = tiles.parse_layers(TINY), tmp_path / "tiles.json"
    results = ResultFile(path, "tiles", tiles.METHOD, commit="0", shapes={TINY: [16, 2, 256, 128]})
    tiles.run(shapes, [256], tiles.KINDS, results)
    planned = {
        (key.scheme, gemm if gemm in tiles.gemms_of(key.scheme) else tiles.LAYER, tile)
        for key, _, plan in jobs
        for gemm, tile in zip(tiles.GEMMS, plan.configs, strict=True)
    }
    assert planned == {(scheme, gemm, tile) for scheme, gemm in CASES for tile in tiles.tiles_of(scheme, gemm)}
    assert tiles.input_sets(256) == 2
    chosen = [choose(shapes[0]) for choose in tiles.EXPERTS.values()]
    assert experts == [count for of in tiles.KINDS for count in chosen for _ in range(2 * len(tiles.gemms_of(of)))]
    rows = json.loads(path.read_text())["rows"]
    assert {(row["scheme"], row["gemm"], MMConfig(*row["tile"])) for row in rows} == planned
    assert len(rows) == 3 * len(planned)
    for row in rows:
        fails = MMConfig(*row["tile"]) == WIDE
        assert (row["us"], row.get("reason")) == ((None, "RuntimeError: made up") if fails else (5.0, None))


CHOSEN = [(0.1, [16, 64, 64, 128]), (16, [16, 64, 64, *[128] * 3]), (200, [64, 64, *[128] * 3]), (9000, [128] * 3)]


@pytest.mark.parametrize(("rows", "heights"), CHOSEN)
def test_tiles_too_high_or_too_low_are_not_timed(rows: float, heights: list[int]) -> None:
    """At so many rows an expert; two heights count as the taller where rows are many."""
    found = [tile.rows for tile in tiles.tiles_of("bf16", "up") if tiles.worth_timing(tile, rows)]
    assert sorted(found) == heights


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "tiles must run on a GPU"),
        (["--fit", "nowhere.json"], "--fit must name a file"),
        (["--fit", "README.md"], "--fit must name a file"),
        (["--shapes", "nonsense"], "--shapes must be among"),
        (["--scheme", "fp32"], "--scheme must be among"),
        (["--tokens", "0"], "--tokens must "),
        (["--json", str(COMMITTED[0])], "--json must name a new file"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], without_a_gpu: Any
) -> None:
    assert main(["tiles", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"benchmarks: {says}") and "got " in said


def test_a_file_is_fitted_and_the_constants_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(COMMITTED[0].read_text())
    kept = [row for row in document["rows"] if row["scheme"] == "fp8_block128" and row["shape"] == "mixtral"]
    path = tmp_path / "few.json"
    path.write_text(json.dumps(document | {"rows": kept}))
    assert main(["tiles", "--fit", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("fp8_block128 up uniform: picked / best 1.0")
    assert printed[2] == '"scaled": (  # fp8_block128' and printed[-1] == "),"
    assert len(printed) == 4 + len(triton_plans.FAMILIES["scaled"])
