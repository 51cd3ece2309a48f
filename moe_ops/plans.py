"""Which kernels with which tiles run one MoE layer on a GPU: measured plans where they win, else the cheapest by cost.

A plan is chosen from sizes alone, inside the operator, so that a batch size never causes a guard or a recompile.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meta.arch import FIRST_CAPABILITY, lookup_gpu
from meta.cost import TileCost, Work, pairwise_us, product_us, robust_us
from meta.schemes import SCHEMES
from moe_ops.kernels.triton.config import MMConfig, SmallConfig

CONFIG_DIR = Path(__file__).parent / "configs"
Cost = tuple[float, ...]
#: Sequences of kernels. A file that a user tuned with an older version may name others, which are passed over.
PATHS = ("small", "grouped", "batched")


@dataclass(frozen=True)
class LayerKey:
    """What a tuned plan is filed under; the number of tokens selects among the plans of one key."""

    scheme: str
    format: str
    E: int
    K: int
    H: int
    I: int
    gated: bool

    def __str__(self) -> str:
        return (
            f"{self.scheme} {self.format} E={self.E} K={self.K} H={self.H} I={self.I} "
            f"{'gated' if self.gated else 'plain'}"
        )


@dataclass(frozen=True)
class Plan:
    """The kernels of one layer.

    Args:
        path: "small" (no sorting, two kernels), "grouped" or "batched".
        up, down: tiles of the two GEMMs; quantising schemes: `up` has a scale group of output columns.
        us: measured microseconds, None for a plan by cost.
    """

    path: str
    up: MMConfig | SmallConfig
    down: MMConfig | SmallConfig
    us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, tiles as objects."""
        return {**asdict(self), "up": self.up._asdict(), "down": self.down._asdict()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Plan:
        tile = SmallConfig if row["path"] == "small" else MMConfig
        # By the fields of today: a file that an older version tuned may hold others.
        made = {
            name: tile(**{field: row[name][field] for field in tile._fields if field in row[name]})
            for name in ("up", "down")
        }
        return cls(**{**row, **made})


def user_directory() -> Path:
    """Where plans that a user tuned live: they come before the shipped ones."""
    return Path.home() / ".cache" / "moe_ops"


def file_name(gpu: str) -> str:
    """`NVIDIA H200` -> `nvidia_h200.json`."""
    return "_".join(gpu.lower().split()) + ".json"


def write(table: Mapping[str, Any], path: Path) -> None:
    """Write a file of plans, one a line. The rename keeps the old file whole until the new one is."""
    head = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in table.items() if name != "plans"]
    keys = [
        f"  {json.dumps(key)}: {{\n"
        + ",\n".join(f"   {json.dumps(tokens)}: {json.dumps(row)}" for tokens, row in rows.items())
        + "\n  }"
        for key, rows in table["plans"].items()
    ]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(["{", *head, ' "plans": {', ",\n".join(keys), " }", "}"]) + "\n")
    os.replace(partial, path)


@cache
def tuned(gpu: str) -> dict[str, dict[int, Plan]]:
    """All measured plans for a GPU, key -> tokens -> plan. Read once, before any graph is captured."""
    plans: dict[str, dict[int, Plan]] = {}
    for directory in (CONFIG_DIR, user_directory()):
        path = directory / file_name(gpu)
        if os.path.exists(path):
            for key, rows in json.loads(path.read_text())["plans"].items():
                of_key = plans.setdefault(key, {})
                for tokens, row in rows.items():
                    of_key.pop(int(tokens), None)  # where nothing won, no plan of another file does
                    if row is not None and row["path"] in PATHS:
                        of_key[int(tokens)] = Plan.from_json(row)
    return plans


@cache
def plan_for(key: LayerKey, at: int, gpu: str, sm: int) -> Plan:
    """The plan for the tokens of bucket `at`: the nearest measured one within half an octave, else the cheapest."""
    rows = tuned(gpu).get(str(key), {})
    near = min(rows, key=lambda tokens: abs(bucket(tokens) - at), default=None)
    if near is not None and abs(bucket(near) - at) <= 1:
        return rows[near]
    return cheapest(key, tokens_of(at), gpu, sm)


def bucket(tokens: int) -> int:
    """2 log2 of the number of tokens, rounded to the nearest integer: the granularity at which plans differ."""
    return round(2 * math.log2(max(tokens, 1)))


def tokens_of(at: int) -> int:
    """The number of tokens in the middle of bucket `at`."""
    return round(math.exp2(at / 2))


@cache
def gpu_of(index: int) -> tuple[str, int]:
    """(name, compute capability as 90) of a device."""
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), 10 * major + minor


# ---- tiles by what they cost ----


class Family(NamedTuple):
    """A tile shape, and what it costs in each of two kinds of product, where it serves there."""

    tile: MMConfig
    up: TileCost | None
    down: TileCost | None


def _family(tile: MMConfig, up: Cost | None, down: Cost | None) -> Family:
    return Family(tile, _cost(tile, up), _cost(tile, down))


def _cost(tile: MMConfig, cost: Cost | None) -> TileCost | None:
    if cost is None:
        return None
    tbps, fill_us, depth_us, programs, launch_us, *tall = cost
    sizes = (tile.block_m, tile.block_n)
    return TileCost(*sizes, tbps, fill_us, depth_us, int(programs), launch_us, tile.tall_m, *tall)


#: Rows loaded by threads, also where they are sorted; rows by descriptor, where they are.
_gathered, _streamed = (partial(MMConfig, a_tma=a_tma, w_tma=True) for a_tma in (False, True))

#: TB/s, us to fill, us for 1024 columns, programs, us to launch, us for 1024 columns of a tall tile
#: (`meta.cost.TileCost`), of rows that are gathered and of sorted rows, or, where the rows are quantised, as GEMM 1 and
#: as GEMM 2: fitted to times that `python -m benchmarks tiles` measures and fits
#: (benchmarks/comparisons/h200-tiles.json).
FAMILIES: dict[str, tuple[Family, ...]] = {
    "plain": (
        # Two heights: as fast as 16 rows alone where experts have few (DeepSeek-V3, T = 128: 1.00 and 1.01 of it in the
        # two GEMMs), 0.4 to 0.7 of it where all tokens are on K experts.
        _family(
            _gathered(16, 128, 128, 8, 4, 3, tall_m=64, tall_stages=2),
            (4.55, 0.02, 9.29, 2, 3.9, 13.43),
            (4.45, 0.70, 4.40, 1, 4.5, 6.47),
        ),
        _family(_gathered(16, 64, 256, 1, 4, 3), (4.75, 0.02, 2.94, 1, 4.9), (4.54, 0.37, 2.62, 1, 4.0)),
        _family(_gathered(64, 128, 64, 8, 4, 4), (4.48, 0.02, 10.54, 2, 5.3), (4.35, 0.96, 4.82, 1, 4.1)),
        # Short ends: 0.89 to 1.02 of the time of 128 rows alone, gathered (eight models, T = 1024 to 16384).
        _family(
            _streamed(64, 256, 64, 8, 8, 4, tall_m=128, tall_stages=4),
            (4.33, 1.99, 10.36, 1, 8.8, 13.29),
            (4.31, 3.74, 7.24, 1, 11.3, 13.30),
        ),
        _family(_streamed(128, 128, 64, 8, 4, 3), (4.08, 1.73, 15.31, 2, 1.2), (4.05, 0.20, 6.93, 1, 4.8)),
        _family(_streamed(128, 256, 64, 8, 8, 4), (4.13, 2.71, 13.07, 1, 4.6), (4.05, 1.81, 12.95, 1, 3.8)),
    ),
    # GEMM 1 writes a scale group of output columns, which are 256 weight rows.
    "scaled": (
        _family(_gathered(16, 256, 128, 1, 4, 3), (4.31, 0.02, 4.86, 1, 6.9), None),
        _family(_streamed(64, 256, 128, 8, 8, 3), (4.05, 2.49, 6.19, 1, 12.2), None),
        _family(_streamed(128, 256, 128, 8, 8, 3), (3.79, 5.57, 8.15, 1, 6.1), None),
        _family(_gathered(16, 128, 128, 1, 4, 3), None, (4.13, 0.19, 4.49, 2, 3.6)),
        _family(_streamed(64, 128, 128, 8, 4, 3), None, (4.24, 1.35, 7.23, 3, 8.4)),
        _family(_streamed(128, 128, 128, 8, 8, 3), None, (3.01, 3.07, 4.82, 1, 5.5)),
    ),
}
#: TB/s, us to launch of the two small kernels (`meta.cost.pairwise_us`).
PAIRWISE = {"plain": (4.45, 5.0), "scaled": (3.7, 7.2)}
AROUND_US = 2.0  # of the kernels that sort pairs and combine results, beyond what the products hide
SMALL_PAIRS = 64  # the most that the small kernels were ever seen to win with


def kind(scheme: str) -> str:
    """The tiles that serve a scheme: a name of FAMILIES."""
    return "plain" if SCHEMES[scheme].rows is None else "scaled"


def cheapest(key: LayerKey, tokens: int, gpu: str, sm: int) -> Plan:
    """The plan that should be fastest by `meta.cost`, for shapes that nobody measured."""
    plan, us = _by_products(key, tokens, gpu, sm)
    if tokens * key.K <= SMALL_PAIRS and key.format == "grouped" and key.scheme != "fp32":
        first, second = _works(key, tokens)
        expert_bytes = (first.N * first.depth + second.N * second.depth) * first.itemsize
        if pairwise_us(first, expert_bytes, *PAIRWISE[kind(key.scheme)]) < us + AROUND_US:
            return Plan("small", *small_tiles(key))
    return plan


@cache
def by_products(key: LayerKey, at: int, gpu: str, sm: int) -> Plan:
    """The cheapest plan of grouped products, where the small kernels cannot serve."""
    return _by_products(key, tokens_of(at), gpu, sm)[0]


def _by_products(key: LayerKey, tokens: int, gpu: str, sm: int) -> tuple[Plan, float]:
    """The plan, and the microseconds that both products should take."""
    first, second = _works(key, tokens)
    gathered = key.format == "grouped"
    up, up_us = _tile(key.scheme, first, gpu, sm, product(key.scheme, first=True, gathered=gathered))
    down, down_us = _tile(key.scheme, second, gpu, sm, product(key.scheme, first=False, gathered=False))
    form = SCHEMES[key.scheme].rows
    if form is not None and not key.gated:
        up = up._replace(block_n=form.group)
    return Plan(key.format, up, down), up_us + down_us


def _works(key: LayerKey, tokens: int) -> tuple[Work, Work]:
    itemsize = SCHEMES[key.scheme].weight_dtype.itemsize
    first = Work(key.E, key.K, tokens, (2 if key.gated else 1) * key.I, key.H, itemsize)
    return first, first._replace(N=key.H, depth=key.I)


def product(scheme: str, *, first: bool, gathered: bool) -> str:
    """The column of FAMILIES for a product: of quantised rows whether it is GEMM 1, whose epilogue quantises, else
    whether its rows are gathered.
    """
    return "up" if (first if kind(scheme) == "scaled" else gathered) else "down"


def small_tiles(key: LayerKey) -> tuple[SmallConfig, SmallConfig]:
    """Tiles of the small kernels, by what ran fastest at T = 1 on an H200: the second holds all K experts of a token
    at once, so that its columns are fewer the larger K is.
    """
    if kind(key.scheme) == "scaled":
        up = SmallConfig(8, 1024 if key.H % 2048 else 2048, 4)
        return up, SmallConfig(4, 1024 if key.K <= 4 else 256, 4)
    up = SmallConfig(4, 2048, 4) if key.H <= 2048 else SmallConfig(2, 2048, 8 if key.H <= 4096 else 4)
    return up, SmallConfig(8 if key.K <= 4 else 2, 256, 8)


@cache
def tile_for(scheme: str, E: int, at: int, N: int, depth: int, gpu: str, sm: int, column: str) -> MMConfig:
    """The tile that should run one product of a bucket's rows fastest, of the kind that a `column` of FAMILIES is for:
    E experts' weights of N rows and `depth` columns.
    """
    work = Work(E, 1, tokens_of(at), N, depth, SCHEMES[scheme].weight_dtype.itemsize)
    return _tile(scheme, work, gpu, sm, column)[0]


def _tile(scheme: str, work: Work, gpu: str, sm: int, column: str) -> tuple[MMConfig, float]:
    """The tile, and the microseconds that it should take."""
    tma = sm >= FIRST_CAPABILITY["tma"]
    if scheme == "fp32":
        return MMConfig(16 if work.T * work.K <= 16 * work.E else 64, 64, 32, 8, 4, 3, a_tma=False, w_tma=False), 0.0
    arch = lookup_gpu(gpu)
    # Then every column has its scale, for which 128 rows leave no registers (us on an H200, gpt-oss-120b's dimensions,
    # T = 4096: 4428, with 64 rows 1893).
    ragged = column == "up" and runs_on(scheme, work.N // 2)
    costs = {
        family.tile: cost
        for family in FAMILIES[kind(scheme)]
        if (cost := getattr(family, column)) is not None
        and fits(family.tile, work.itemsize, arch.shared_kib)
        and not (ragged and cost.rows > 64)
    }
    tile = min(costs, key=lambda tile: robust_us(work, costs[tile], arch.multiprocessors))
    us = product_us(work, costs[tile], arch.multiprocessors)
    if not tma:
        # Products whose operands are registers, not shared memory, want a tile spread over more warps.
        warps = 8 if tile.block_m * tile.block_n >= 128 * 128 else tile.num_warps
        tile = tile._replace(a_tma=False, w_tma=False, num_warps=warps)
    return tile, us


def runs_on(scheme: str, columns: int) -> bool:
    """Whether scale groups run on from the gate into the up half, of so many columns each."""
    return any(columns % spec.group_n for spec in SCHEMES[scheme].scales)


def fits(tile: MMConfig, bytes_per_element: int, shared_kib: int) -> bool:
    """Whether the software pipeline's tiles fit in shared memory."""
    pipelines = ((tile.block_m, tile.num_stages), (tile.tall_m, tile.tall_stages))
    elements = max((rows + tile.block_n) * tile.block_k * stages for rows, stages in pipelines)
    return elements * bytes_per_element <= shared_kib * 1024 - 4096
