"""The expert GEMM on a GPU, for every way that its programs walk through the tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meta.operands import Operand
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import batched_mm, grouped_mm
from moe_ops.kernels.triton.launch import ONE_TILE, STREAM, TILE_BY_TILE, ExpertMM, walk
from tests.ops.errors import assert_rounded

pytestmark = pytest.mark.cuda
N, K, E, TOP_K = 200, 328, 6, 2  # neither divides into tiles
COUNTS = ([0, 300, 1, 128, 0, 77], [40, 0, 0, 0, 640, 129], [0] * 6, [1] * 6)
TILES = {
    "one_tile": MMConfig(16, 64, 64, 1, 4, 3, a_tma=False, w_tma=True),
    "two_heights": MMConfig(16, 128, 128, 8, 4, 3, a_tma=False, w_tma=True, tall_m=64, tall_stages=2),
    "short_ends": MMConfig(64, 256, 64, 9, 8, 4, a_tma=True, w_tma=True, tall_m=128, tall_stages=4),
    "stream": MMConfig(128, 128, 64, 4, 8, 3, a_tma=True, w_tma=True),
    "stream_in_halves": MMConfig(128, 256, 64, 2, 8, 4, a_tma=True, w_tma=True),
    "tile_by_tile": MMConfig(128, 128, 64, 4, 4, 3, a_tma=False, w_tma=True),
}


def test_the_tiles_of_this_file_walk_in_every_way():
    walks = {walk(tile, tile.a_tma, quantized=False, decoded=False) for tile in TILES.values()}
    assert walks == {ONE_TILE.value, STREAM.value, TILE_BY_TILE.value}


def product(w: torch.Tensor, rows: list[torch.Tensor], glu: str) -> torch.Tensor:
    """float64 silu(gate) * up, or the plain product, of every expert's rows."""
    parts = [r.double() @ w[e].double().T for e, r in enumerate(rows)]
    out = torch.cat(parts)
    if glu == "none":
        return out
    gate, up = out.chunk(2, -1) if glu == "concat" else (out[:, ::2], out[:, 1::2])
    return torch.nn.functional.silu(gate) * up


def projection(glu: str) -> ExpertMM:
    w = (torch.randn(E, N if glu == "none" else 2 * N, K, device="cuda") * K**-0.5).bfloat16()
    return ExpertMM(Operand(w, None), torch.bfloat16, glu_layout=glu, activation=None if glu == "none" else "silu")


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN, so that a row that must not be written shows."""
    allocate = ExpertMM.allocate

    def filled(self: ExpertMM, *arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, scale = allocate(self, *arguments, **options)
        return out.fill_(float("nan")), scale

    monkeypatch.setattr(ExpertMM, "allocate", filled)


def replays(run: Callable[[], torch.Tensor], extents: torch.Tensor, counts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of one captured graph for each of `counts`, written into `extents`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    results = []
    for count in counts:
        extents.copy_(count)
        graph.replay()
        results.append(out.clone())
    return results


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved"])
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("tile", TILES)
def test_grouped(tile, gathered, glu, monkeypatch):
    torch.manual_seed(0)
    poison(monkeypatch)
    mm, R = projection(glu), 1000
    a = torch.randn(R // TOP_K if gathered else R, K, device="cuda").bfloat16()
    row_to_pair = torch.randperm(R, device="cuda").int()
    gather = {"row_to_pair": row_to_pair, "top_k": TOP_K} if gathered else {}
    rows = a[row_to_pair.long() // TOP_K] if gathered else a
    offsets = torch.zeros(E, dtype=torch.int32, device="cuda")
    variants = [torch.tensor(counts, device="cuda").cumsum(0).int() for counts in COUNTS]

    def run() -> torch.Tensor:
        return grouped_mm(a, mm, offsets, TILES[tile], num_rows=R, **gather)[0]

    for counts, ends, out in zip(COUNTS, variants, replays(run, offsets, variants), strict=True):
        offsets.copy_(ends)
        used = sum(counts)
        assert torch.equal(run()[:used], out[:used]), "a replay with changed routing gives the bits of an eager call"
        assert_rounded(out[:used], product(mm.weight, list(rows[:used].split(counts)), glu))
        assert out[used:].isnan().all(), "rows of no expert are not written"


@pytest.mark.parametrize("glu", ["none", "concat", "interleaved"])
@pytest.mark.parametrize("tile", TILES)
def test_batched_beside_rows_of_nan(tile, glu, monkeypatch):
    torch.manual_seed(1)
    poison(monkeypatch)
    mm, C = projection(glu), 650
    batch = torch.randn(E, C, K, device="cuda").bfloat16()
    counts = torch.zeros(E, dtype=torch.int32, device="cuda")
    for used in COUNTS:
        counts.copy_(torch.tensor(used))
        for e, count in enumerate(used):
            batch[e, :count] = torch.randn(count, K, device="cuda")
            batch[e, count:] = float("nan")
        out, _ = batched_mm(batch, mm, counts, TILES[tile])
        got = torch.cat([out[e, :count] for e, count in enumerate(used)])
        assert_rounded(got, product(mm.weight, [batch[e, :count] for e, count in enumerate(used)], glu))
        assert all(out[e, count:].isnan().all() for e, count in enumerate(used)), "rows past a count are not written"


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
def test_offsets_that_make_no_sense_stay_in_bounds(tile, gathered):
    mm, R = projection("none"), 300
    a = torch.randn(R, K, device="cuda").bfloat16()
    row_to_pair = torch.randint(0, R * TOP_K, (R,), device="cuda").int()
    gather = {"row_to_pair": row_to_pair, "top_k": TOP_K} if gathered else {}
    offsets = torch.tensor([-7, 2**30, 5, 250, 299, 301], device="cuda", dtype=torch.int32)
    grouped_mm(a, mm, offsets, TILES[tile], num_rows=R, **gather)
    torch.cuda.synchronize()
