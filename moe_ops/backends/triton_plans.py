"""Which Triton kernels with which tiles run one MoE layer: the cheapest by cost, and what the tuner may try."""

from __future__ import annotations

from functools import cache, partial
from itertools import product as every
from typing import Any, NamedTuple

from meta.arch import FIRST_CAPABILITY, HOPPER, SCALED_BLOCKS, TYPICAL, lookup_gpu
from meta.cost import TileCost, Work, expected_experts, pairwise_us, product_us, robust_us
from meta.formats import E4M3
from meta.schemes import SCHEMES, WHOLE
from moe_ops.kernels.triton.config import MMConfig, SmallConfig, are_promoted, is_of_plain_mm
from moe_ops.plans import LayerKey, Plan, measured, tokens_of

NAME = "triton"
#: Sequence -> types of what its two products are told. "small": no sorting, two kernels.
SEQUENCES: dict[str, tuple[type[Any], ...]] = {
    "small": (SmallConfig, SmallConfig),
    "grouped": (MMConfig, MMConfig),
    "batched": (MMConfig, MMConfig),
}
Cost = tuple[float, ...]


def plan(sequence: str, up: MMConfig | SmallConfig, down: MMConfig | SmallConfig, us: float | None = None) -> Plan:
    """A plan of these kernels; quantising schemes: `up` has a scale group of output columns."""
    return Plan(NAME, sequence, (up, down), us)


@cache
def plan_for(key: LayerKey, at: int, gpu: str, sm: int) -> Plan:
    """The plan for the tokens of bucket `at`: a measured one, else the cheapest."""
    found = measured(key, at, gpu)
    return cheapest(key, tokens_of(at), gpu, sm) if found is None or found.backend != NAME else found


# ---- tiles by what they cost ----


class Family(NamedTuple):
    """A tile shape, and what it costs in each of two kinds of product, where it serves there."""

    tile: MMConfig
    up: TileCost | None
    down: TileCost | None


def _family(tile: MMConfig, up: Cost | None, down: Cost | None) -> Family:
    return Family(tile, _cost(tile, up), _cost(tile, down))


def _decoded(tile: MMConfig, *cost: float) -> Family:
    """A tile of both products of a layer alike."""
    return _family(tile, cost, cost)


def _cost(tile: MMConfig, cost: Cost | None) -> TileCost | None:
    return None if cost is None else tile_cost(tile, *cost)


def tile_cost(tile: MMConfig, *constants: float) -> TileCost:
    """What a tile costs by constants in the order of `TileCost`'s, of which a tile of one height has one less."""
    tbps, fill_us, depth_us, programs, launch_us, *of_tall = constants
    ends = bool(of_tall) and not tile.tall_m
    short, tall = (tile.block_m // 2, tile.block_m) if ends else (tile.block_m, tile.tall_m)
    return TileCost(short, tile.block_n, tbps, fill_us, depth_us, int(programs), launch_us, tall, *of_tall)


def has_short_ends(scheme: str, tile: MMConfig) -> bool:
    """Whether an expert's last rows, where they are no more than half of a tile, take less time: `decoded_mm`,
    `plain_mm`.
    """
    if kind(scheme) == "plain":
        return is_of_plain_mm(tile)
    return scheme in PACKED and tile.a_tma and tile.block_m >= 128


#: Rows loaded by threads, also where they are sorted; rows by descriptor, where they are.
_gathered, _streamed = (partial(MMConfig, a_tma=a_tma, w_tma=True) for a_tma in (False, True))

#: TB/s, us to fill, us for 1024 columns, programs, us to launch, us for 1024 columns of a tall tile
#: (`meta.cost.TileCost`), of rows that are gathered and of sorted rows, or, where the rows are quantised, as GEMM 1 and
#: as GEMM 2: fitted to times that `python -m benchmarks tiles` measures and fits
#: (benchmarks/comparisons/h200-tiles.json). Of weights that are decoded, by scheme or code, of both GEMMs alike
#: (benchmarks/comparisons/h200-tiles-decoded.json): there the time of the tile picked is 1.00 to 1.007 of that of the
#: best one, on average, at most 1.09.
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
            (4.26, 0.02, 11.26, 1, 3.5, 13.81),
            (4.21, 3.05, 9.23, 1, 5.8, 13.17),
        ),
        _family(_streamed(128, 128, 64, 8, 4, 3), (4.16, 0.02, 15.59, 2, 2.6), (4.07, 0.12, 6.94, 1, 4.7)),
        # By `plain_mm` on Hopper, with short ends: where an expert has 256 rows or more, 0.88 to 1.03 of the time of
        # the better one of the two before (eight models, both GEMMs).
        _family(
            _streamed(128, 256, 64, 8, 8, 4),
            (4.18, 0.02, 11.53, 1, 4.0, 12.83),
            (4.17, 0.17, 12.64, 1, 7.4, 12.56),
        ),
    ),
    # GEMM 1 writes a scale group of output columns, which are 256 weight rows. Not fitted to rows with one scale each,
    # which these tiles serve, too.
    "scaled": (
        _family(_gathered(16, 256, 128, 1, 4, 3), (4.31, 0.02, 4.86, 1, 6.9), None),
        _family(_streamed(64, 256, 128, 8, 8, 3), (4.05, 2.49, 6.19, 1, 12.2), None),
        _family(_streamed(128, 256, 128, 8, 8, 3), (3.79, 5.57, 8.15, 1, 6.1), None),
        _family(_gathered(16, 128, 128, 1, 4, 3), None, (4.13, 0.19, 4.49, 2, 3.6)),
        _family(_streamed(64, 128, 128, 8, 4, 3), None, (4.24, 1.35, 7.23, 3, 8.4)),
        _family(_streamed(128, 128, 128, 8, 8, 3), None, (3.01, 3.07, 4.82, 1, 5.5)),
    ),
    "e2m1": (
        _decoded(_streamed(8, 128, 256, 1, 4, 3), 3.51, 0.02, 5.07, 2, 6.0),
        _decoded(_gathered(16, 128, 128, 1, 4, 4), 4.17, 0.02, 3.07, 1, 6.0),
        _decoded(_streamed(16, 128, 256, 1, 4, 3), 3.51, 0.02, 3.04, 1, 7.8),
        _decoded(_gathered(32, 128, 128, 1, 4, 4), 4.80, 0.02, 4.25, 1, 6.0),
        _decoded(_streamed(128, 128, 64, 8, 8, 3), 4.80, 0.28, 5.22, 1, 9.9, 7.53),
        _decoded(_streamed(256, 128, 64, 8, 8, 3), 1.31, 0.02, 11.58, 2, 7.9, 26.37),
    ),
    "nvfp4": (
        _decoded(_streamed(8, 128, 256, 1, 4, 3), 2.82, 0.09, 5.38, 2, 6.1),
        _decoded(_gathered(16, 128, 128, 1, 4, 4), 2.87, 0.02, 3.67, 1, 6.0),
        _decoded(_streamed(16, 128, 256, 1, 4, 3), 2.98, 0.02, 3.28, 1, 8.0),
        _decoded(_streamed(32, 128, 128, 1, 4, 3), 3.09, 0.02, 4.45, 1, 6.0),
        _decoded(_streamed(128, 128, 64, 8, 8, 3), 2.68, 0.22, 5.61, 1, 9.7, 8.24),
        _decoded(_streamed(256, 128, 64, 8, 8, 3), 1.22, 0.02, 12.76, 2, 7.8, 27.59),
    ),
    "int4": (
        _decoded(_streamed(8, 128, 256, 1, 4, 3), 4.31, 0.05, 2.01, 1, 7.8),
        _decoded(_gathered(16, 128, 128, 1, 4, 4), 4.80, 0.12, 2.59, 1, 6.0),
        _decoded(_streamed(16, 128, 256, 1, 4, 3), 4.80, 0.38, 4.74, 2, 9.0),
        _decoded(_gathered(32, 128, 128, 1, 4, 4), 4.80, 0.02, 3.82, 1, 6.0),
        _decoded(_streamed(128, 128, 64, 8, 8, 3), 1.94, 2.58, 2.93, 1, 7.1, 6.22),
    ),
    "e4m3": (
        _decoded(_streamed(8, 128, 256, 1, 4, 3), 4.31, 0.02, 3.83, 1, 9.1),
        _decoded(_gathered(16, 128, 128, 1, 4, 4), 4.46, 0.62, 4.39, 1, 6.0),
        _decoded(_streamed(16, 128, 256, 1, 4, 3), 4.07, 0.02, 4.66, 1, 9.8),
        _decoded(_gathered(32, 128, 64, 1, 4, 4), 4.80, 0.02, 10.48, 2, 6.0),
        _decoded(_streamed(128, 128, 64, 8, 8, 3), 4.80, 0.02, 7.12, 1, 10.5, 9.58),
        _decoded(_streamed(256, 128, 64, 8, 8, 3), 2.26, 0.04, 8.43, 1, 10.2, 14.43),
    ),
    "int8": (
        _decoded(_streamed(8, 128, 256, 1, 4, 3), 4.32, 0.02, 3.14, 1, 6.0),
        _decoded(_gathered(16, 128, 128, 1, 4, 4), 4.57, 0.02, 3.53, 1, 8.4),
        _decoded(_streamed(16, 128, 256, 1, 4, 3), 4.32, 0.02, 3.47, 1, 9.2),
        _decoded(_gathered(32, 128, 64, 1, 4, 4), 4.72, 0.02, 4.19, 1, 7.8),
        _decoded(_streamed(128, 128, 64, 8, 8, 3), 3.48, 0.02, 5.64, 1, 10.3, 8.44),
        _decoded(_streamed(256, 128, 64, 8, 8, 3), 2.36, 0.35, 7.16, 1, 9.6, 13.88),
    ),
    "mxfp4_a8": (
        _decoded(_streamed(8, 128, 256, 1, 4, 3), 2.94, 0.02, 3.39, 1, 9.8),
        _decoded(_gathered(16, 128, 128, 1, 4, 4), 2.55, 0.23, 3.72, 1, 9.6),
        _decoded(_gathered(32, 128, 128, 1, 4, 4), 1.82, 1.18, 5.09, 1, 6.0),
        _decoded(_streamed(128, 128, 128, 8, 8, 3), 4.80, 2.54, 10.73, 2, 10.0),
    ),
    "w4a8_fp8": (
        _decoded(_gathered(16, 128, 128, 1, 4, 4), 4.80, 1.51, 4.36, 2, 6.0),
        _decoded(_gathered(32, 128, 128, 1, 4, 4), 4.80, 0.70, 3.26, 1, 6.7),
        _decoded(_gathered(64, 128, 128, 8, 4, 3), 4.80, 1.56, 4.25, 1, 6.0),
        _decoded(_streamed(128, 128, 128, 8, 8, 3), 1.40, 0.78, 6.28, 1, 10.6),
    ),
}
#: TB/s, us to launch of the two small kernels (`meta.cost.pairwise_us`), by scheme, `kind`, or code of weights that are
#: decoded for bf16: with the next ones, those that choose best for layers of three dimensions on an H200 and an H100,
#: T = 1 to 8 (on average 1.004 of the time of the better one, at most 1.14, on the H200 at most 1.05). us on the H200,
#: T = 2 and 8: Qwen3-30B-A3B, mxfp4 22.3 and 70.0, int4_w4a16 22.3 and 68.7, fp8_w8a16 24.7 and 73.7; DeepSeek-V3,
#: mxfp4 154 and 623, int4_w4a16 160 and 670, fp8_w8a16 167 and 637. Those by scheme, on the H200: at most 1.01
#: (`benchmarks/comparisons/h200-few-quantised-rows.json`).
PAIRWISE = {
    "plain": (4.45, 5.0),
    "scaled": (3.7, 7.2),
    "e2m1": (2.2, 6.0),
    "int4": (2.2, 3.5),
    "e4m3": (3.9, 5.9),
    "int8": (3.6, 8.1),
    "int8_channel": (4.3, 8.0),
    "w4a8_fp8": (2.7, 13.5),
    "mxfp4_a8": (2.1, 9.5),
}
#: The same of one product of decoded weights in tiles, by scheme or code; us of the same layers 27.2 and 55.8, 24.0 and
#: 47.3, 36.5 and 78.6; 141 and 415, 122 and 359, 205 and 636.
PACKED_PRODUCT = {
    "e2m1": (2.48, 7.0),
    "int4": (2.8, 3.8),
    "e4m3": (3.9, 10.5),
    "int8": (3.6, 5.7),
    "w4a8_fp8": (2.8, 7.0),
    "mxfp4_a8": (2.0, 7.0),
}
AROUND_US = 2.0  # of the kernels that sort pairs and combine results, beyond what the products hide
SMALL_PAIRS = 64  # the most that the small kernels were ever seen to win with


#: What quantised weights are made of.
CODE = {name: row.code.name for name, row in SCHEMES.items() if row.code is not None}
#: Schemes whose weights are decoded for bf16 activations.
PACKED = frozenset(name for name, row in SCHEMES.items() if row.quantized and row.rows is None)
#: And those whose codes are decoded for e4m3 ones.
DECODED = PACKED | {name for name, row in SCHEMES.items() if row.pack > 1}
#: And those of e4m3 on both sides, whose products of many rows are `promoted_mm`'s where there is Gluon for Hopper.
PROMOTED = frozenset(
    name
    for name, row in SCHEMES.items()
    if row.rows is not None and name not in DECODED and row.rows.dtype == row.weight_dtype == E4M3
)


def _gathered_decoded(scheme: str, work: Work) -> MMConfig:
    """Few rows, gathered by threads, beside weight rows that fill the 64 rows of a tensor core's product; fewer of them
    make more programs, where there are few.

    us of a layer on an H200, 32 rows by steps of 64 and of 128 columns: Qwen3-30B-A3B's dimensions, T = 256, fp8_w8a16
    192 and 200, mxfp8 211 and 224.
    """
    rows, pairs = work.T * work.K / work.E, work.T * work.K
    if pairs <= 16 and scheme in PACKED:
        return _gathered(16, 64, 128, 1, 4, 4)
    if rows <= 12:
        return _gathered(16, 128, 128, 1, 4, 4)
    return _gathered(32, 128, 64 if SCHEMES[scheme].pack == 1 else 128, 1, 4, 4)


def _packed_tile(scheme: str, work: Work) -> MMConfig:
    """A tile of `packed_tile`, where there is no Gluon for Hopper.

    us of a layer on an H100 of (1) Qwen3-30B-A3B's, (2) Mixtral-8x7B's dimensions: 64 rows that threads gather, and
    that come by descriptor in the order of the product: (1), T = 1024, mxfp4 376 and 311; 64 rows by descriptor, and
    128, of four warps and of eight: T = 4096, mxfp4 845, 817 and 798, int8_w8a16 923, 806 and 800; by steps of 64 and
    of 128 columns: GEMM 1 of (2), mxfp4 3529 and 3034, of (1) 456 and 471.
    """
    rows, wide = work.T * work.K / work.E, SCHEMES[scheme].pack > 1 and work.depth % 128 == 0
    if rows > 96 and scheme != "int4_w4a16":
        deep = wide and (scheme == "nvfp4" or work.depth >= 4096)
        return _streamed(128, 128, 128, 8, 8, 2) if deep else _streamed(128, 128, 64, 8, 8, 3)
    if rows > 48:
        return _streamed(64, 128, 128, 8, 4, 3) if wide else _streamed(64, 128, 64, 8, 4, 4)
    return _gathered_decoded(scheme, work)


def _packed_fp8_tile(scheme: str, work: Work) -> MMConfig:
    """A tile of `packed_fp8_tile`, there: as many e4m3 rows beside the weight rows as leave registers for a sum and one
    that waits for its scales.

    us of a layer of Qwen3-30B-A3B's dimensions on an H200, T = 4096, tiles of 64 x 128, 128 x 128 and 128 x 64:
    w4a8_fp8 844, 894, 795; mxfp4_a8 1219, 1833, 2703.
    """
    if work.T * work.K <= 64 * work.E:
        return _gathered_decoded(scheme, work)
    return _streamed(64, 128, 128, 8, 4, 3) if CODE[scheme] == "e2m1" else _streamed(128, 64, 128, 8, 4, 3)


#: Rows an expert up to which codes of a scheme are decoded for eight rows at a time, by `decoded_few_mm`. us of a layer
#: on an H200 by `packed_tile` and by it (benchmarks/comparisons/h200-gathered-few-rows.json), T = 16 and 64: mxfp4_a8,
#: Qwen3-30B-A3B 110 and 99, 156 and 137, gpt-oss-120b 352 and 302, 726 and 649; w4a8_fp8 82 and 78, 114 and 113, 211
#: and 224, 443 and 466.
FEW_ROWS = {scheme: 0 if scheme == "w4a8_fp8" else 5 for scheme in DECODED}


#: Rows an expert from which on weights are decoded once for all tiles of rows, of codes that have scales of their own,
#: and so many for each of a weight row's columns: decoded, more rows at a time leave L2. us of a layer on an H200 where
#: every tile of 256 rows decodes them, and so (benchmarks/comparisons/h200-decoded-plain-mm.json): Qwen3-30B-A3B (2048
#: columns; 512 rows, 1024) mxfp4 1196 and 1391, 2349 and 2282, mxfp8 1322 and 1630, 2576 and 2393; Mixtral-8x7B (4096;
#: 1024, 4096) mxfp4 4655 and 4937, 18707 and 17960, mxfp8 5324 and 5122, 19505 and 18139, but int8_w8a16 4600 and 4810,
#: 18233 and 18588.
SHARED_ROWS = 1024
SHARED_OF_COLUMNS = {"mxfp4": 0.5, "nvfp4": 0.5, "mxfp8": 0.25}


def _are_shared(scheme: str, work: Work) -> bool:
    """Whether weights are decoded once for all tiles of rows."""
    of_columns = SHARED_OF_COLUMNS.get(scheme)
    return of_columns is not None and work.T * work.K >= max(SHARED_ROWS, of_columns * work.depth) * work.E


def _hopper_tile(scheme: str, works: tuple[Work, ...], multiprocessors: int) -> MMConfig:
    """A tile of weights that are decoded, on Hopper, for a product or for both of a layer, as they were timed: the
    cheapest, but for few rows always those that few rows have.
    """
    work = works[0]
    if work.T * work.K <= FEW_ROWS[scheme] * work.E:
        return _streamed(8, 128, 256, 1, 4, 3)
    if _are_shared(scheme, work):
        return _streamed(128, 256, 64, 8, 8, 3)
    costs = {family.tile: family.down for family in FAMILIES[kind(scheme)] if family.down is not None}
    return _cheapest(costs, works, multiprocessors)


def in_blocks(scheme: str, sm: int) -> bool:
    """Whether tensor cores take a scheme's weights as they are stored (`meta.blocks`)."""
    return SCHEMES[scheme].blocks is not None and sm in SCALED_BLOCKS


def small_serves(scheme: str, sm: int) -> bool:
    """Whether the small kernels take a scheme's weights."""
    return not in_blocks(scheme, sm)


def _blocks_tile(scheme: str, work: Work) -> MMConfig:
    """128 weight rows are a tensor core's product, 128 bytes of each of them a line of shared memory; tokens as an
    expert has them. Compiled and interpreted, never timed.
    """
    rows = work.T * work.K / work.E
    columns = 256 if SCHEMES[scheme].blocks == "nvfp4" else 128
    if rows > 48:
        return _streamed(128, 128, columns, 8, 8, 4)
    if rows > 24:
        return _gathered(64, 128, columns, 1, 8, 4)
    return _gathered(16 if rows <= 12 else 32, 128, columns, 1, 4, 4)


def kind(scheme: str) -> str:
    """The tiles that serve a scheme: a name of FAMILIES."""
    if scheme in DECODED:
        return scheme if scheme in FAMILIES else CODE[scheme]
    return "plain" if SCHEMES[scheme].rows is None else "scaled"


def cheapest(key: LayerKey, tokens: int, gpu: str, sm: int) -> Plan:
    """The plan that should be fastest by `meta.cost`, for shapes that nobody measured."""
    grouped, us = _by_products(key, tokens, gpu, sm)
    few = tokens * key.K <= SMALL_PAIRS and key.scheme != "fp32"
    if key.format == "grouped" and small_serves(key.scheme, sm) and few:
        first, second = _works(key, tokens)
        expert_bytes = (first.N * first.depth + second.N * second.depth) * SCHEMES[key.scheme].bits // 8
        costs = PAIRWISE.get(key.scheme) or PAIRWISE[CODE[key.scheme] if key.scheme in PACKED else kind(key.scheme)]
        if pairwise_us(first, expert_bytes, *costs) < us + AROUND_US:
            return plan("small", *small_tiles(key, tokens))
    return grouped


@cache
def by_products(key: LayerKey, at: int, gpu: str, sm: int) -> Plan:
    """The cheapest plan of grouped products, where the small kernels cannot serve."""
    return _by_products(key, tokens_of(at), gpu, sm)[0]


def _by_products(key: LayerKey, tokens: int, gpu: str, sm: int) -> tuple[Plan, float]:
    """The plan, and the microseconds that both products should take."""
    first, second = _works(key, tokens)
    if key.scheme in DECODED and sm == HOPPER:
        tile = _hopper_tile(key.scheme, (first, second), lookup_gpu(gpu).multiprocessors)
        return plan(key.format, tile, tile), _decoded_us(key.scheme, first) + _decoded_us(key.scheme, second)
    gathered = key.format == "grouped"
    column = product(key.scheme, first=True, gathered=gathered)
    up, up_us = _tile(key.scheme, first, gpu, sm, column, gated=key.gated)
    down, down_us = _tile(key.scheme, second, gpu, sm, product(key.scheme, first=False, gathered=False))
    form = SCHEMES[key.scheme].rows
    if form is not None and not key.gated and key.scheme not in DECODED:
        up = up._replace(block_n=up.block_n // 2)
    return plan(key.format, up, down), up_us + down_us


def _works(key: LayerKey, tokens: int) -> tuple[Work, Work]:
    first = Work(key.E, key.K, tokens, (2 if key.gated else 1) * key.I, key.H, SCHEMES[key.scheme].bits / 8)
    return first, first._replace(N=key.H, depth=key.I)


def product(scheme: str, *, first: bool, gathered: bool) -> str:
    """The column of FAMILIES for a product: of quantised rows whether it is GEMM 1, whose epilogue quantises, else
    whether its rows are gathered.
    """
    return "up" if (first if kind(scheme) == "scaled" else gathered) else "down"


def _step_bytes(row: int, most: int) -> int:
    """How many bytes of a weight row, of so many, a step of the small kernels takes: all, so that every load is on its
    way at once, or as many as end near the row's end.
    """
    whole = max(16, 1 << (row - 1).bit_length())
    if whole <= most and whole <= 1.4 * row:
        return whole
    steps = [most >> octave for octave in range(most.bit_length() - 7)]
    return next((step for step in steps if -(-row // step) * step <= 1.1 * row), steps[-1])


def small_tiles(key: LayerKey, tokens: int) -> tuple[SmallConfig, SmallConfig]:
    """Tiles of the small kernels, by what ran fastest on an H200, at T = 1 where nothing is said of T: the second holds
    all K experts of a token at once, so that its columns are fewer the larger K is.

    Decoded weights, us (`small_of_words` of benchmarks/comparisons/h200-one-token.json has more): a token of
    Qwen3-30B-A3B in mxfp4, nvfp4, int8_w8a16, mxfp8 when the first kernel has 8 KiB of rows a step 12.2, 12.9, 15.8,
    15.9, of 16 KiB 12.4, 13.3, 17.4, 16.7, by two warps, twice as many loads a thread, 13.0, 12.9, 16.4, 16.5; four
    tokens 38.6, 39.7, 43.8, 45.2, by two warps 36.9, 37.2, 41.5, 42.0. Eight warps of the second kernel, T = 1: 12.8,
    13.3, 15.2, 15.6.
    """
    if key.scheme in DECODED:
        pack = SCHEMES[key.scheme].pack
        of_up, of_down = _step_bytes(key.H // pack, 1024), _step_bytes(key.I // pack, 512)
        # Four loads of 16 bytes a thread, eight where they are all: the compiler has the next step's on their way.
        rows = (8192 if key.I > of_down * pack else 16384) // of_down
        columns = max(1, min(8, rows // (1 << (key.K - 1).bit_length())))
        up = SmallConfig(min(8, 4096 // of_up), of_up * pack, 4 if tokens == 1 else 2)
        return up, SmallConfig(columns, of_down * pack, 8 if tokens == pack == 1 and key.K > 4 else 4)
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
    work = Work(E, 1, tokens_of(at), N, depth, SCHEMES[scheme].bits / 8)
    return _tile(scheme, work, gpu, sm, column)[0]


def _tile(scheme: str, work: Work, gpu: str, sm: int, column: str, *, gated: bool = True) -> tuple[MMConfig, float]:
    """The tile, and the microseconds that it should take; `gated`: whether GEMM 1's weights are two halves."""
    tma = sm >= FIRST_CAPABILITY["tma"]
    if scheme == "fp32":
        return MMConfig(16 if work.T * work.K <= 16 * work.E else 64, 64, 32, 8, 4, 3, a_tma=False, w_tma=False), 0.0
    if in_blocks(scheme, sm):
        return _blocks_tile(scheme, work), 0.0
    arch = lookup_gpu(gpu)
    if scheme in DECODED:
        if sm == HOPPER:
            tile = _hopper_tile(scheme, (work,), arch.multiprocessors)
        else:
            tile = (_packed_tile if scheme in PACKED else _packed_fp8_tile)(scheme, work)
        return (tile if tma else tile._replace(a_tma=False, w_tma=False)), _decoded_us(scheme, work)
    if scheme in PROMOTED and sm == HOPPER and are_promoted(work.T * work.K, work.E):
        return _streamed(128, 256, 128, 8, 8, 3), 0.0
    # Then every column has its scale, for which 128 rows leave no registers (us on an H200, gpt-oss-120b's dimensions,
    # T = 4096: 4428, with 64 rows 1893).
    ragged = column == "up" and gated and runs_on(scheme, work.N // 2)
    costs = {
        family.tile: cost
        for family in FAMILIES[kind(scheme)]
        if (cost := getattr(family, column)) is not None
        and fits(family.tile, SCHEMES[scheme].weight_dtype.itemsize, arch.shared_kib)
        and not (ragged and cost.rows > 64)
    }
    tile = _cheapest(costs, (work,), arch.multiprocessors)
    us = product_us(work, costs[tile], arch.multiprocessors)
    if not tma:
        # Products whose operands are registers, not shared memory, want a tile spread over more warps.
        warps = 8 if tile.block_m * tile.block_n >= 128 * 128 else tile.num_warps
        tile = tile._replace(a_tma=False, w_tma=False, num_warps=warps)
    return tile, us


def _decoded_us(scheme: str, work: Work) -> float:
    """Microseconds of a product of weights that are decoded, where bytes are its time."""
    tbps, launch_us = PACKED_PRODUCT.get(scheme) or PACKED_PRODUCT[CODE[scheme]]
    moved = expected_experts(work.E, work.K, work.T) * work.N * work.depth * work.itemsize
    return launch_us + moved / (tbps * 1e6)


def _cheapest(costs: dict[MMConfig, TileCost], works: tuple[Work, ...], multiprocessors: int) -> MMConfig:
    return min(costs, key=lambda tile: sum(robust_us(work, costs[tile], multiprocessors) for work in works))


def runs_on(scheme: str, columns: int) -> bool:
    """Whether scale groups run on from the gate into the up half, of so many columns each."""
    return any(columns % (spec.forms[0][0] or columns) for spec in SCHEMES[scheme].scales)


def fits(tile: MMConfig, bytes_per_element: int, shared_kib: int) -> bool:
    """Whether the software pipeline's tiles fit in shared memory."""
    pipelines = ((tile.block_m, tile.num_stages), (tile.tall_m, tile.tall_stages))
    elements = max((rows + tile.block_n) * tile.block_k * stages for rows, stages in pipelines)
    return elements * bytes_per_element <= shared_kib * 1024 - 4096


# ---- candidates ----


def _blocks_m(rows: float) -> list[int]:
    """Row tiles worth trying: at most about twice the rows of an expert, else most of a tile is padding."""
    limit = max(16, 2 * rows)
    return [m for m in (16, 32, 64, 128, 256) if m <= limit][-3:]


def gemm_candidates(scheme: str, rows: float, sm: int, *, gated: bool, first: bool) -> list[MMConfig]:
    """GEMM tiles to time. Weights always come by descriptor; rows by descriptor or gathered."""
    if in_blocks(scheme, sm):
        return _blocks_candidates(scheme, rows)
    if scheme in DECODED:
        return _packed_candidates(rows, sm) if scheme in PACKED else _packed_fp8_candidates(rows, sm)
    element = SCHEMES[scheme].weight_dtype.itemsize
    form = SCHEMES[scheme].rows
    quantizes = form is not None
    in_tile = form is not None and form.group != WHOLE
    found = []
    stage_counts = (2, 3, 4) if quantizes else (3, 4)
    # fp32 registers a thread per accumulator element: a scaled product needs a second set, half of one when gate and
    # up are two products.
    sets = 1.0 if not quantizes else 1.5 if first and gated else 2.0
    for block_m, block_n, block_k, warps, stages in every(
        _blocks_m(rows), (32, 64, 128, 256), (64, 128, 256), (4, 8), stage_counts
    ):
        accumulators = sets * block_m * block_n / (32 * warps)
        tile = MMConfig(block_m, block_n, block_k, 8 if rows > 16 else 1, warps, stages, a_tma=rows > 16, w_tma=True)
        if not 4 <= accumulators <= (192 if quantizes else 128) or not fits(tile, element, TYPICAL.shared_kib):
            continue
        if scheme in PROMOTED and sm == HOPPER and rows >= 256 and block_m == 128 and (warps, stages) != (8, 3):
            continue  # `promoted_mm`, whose warps and steps are its own
        whole_group = block_n == (256 if gated else 128)  # else an epilogue could not quantise
        if quantizes and (block_k != 128 or (first and in_tile and not whole_group)):
            continue
        if block_m >= 64 and (block_k > 128 or block_m * block_n < 8192 or block_n < 128):
            continue
        if block_m < 64 and (block_k < 128 or (warps == 8 and block_n < 128)):
            continue
        found.append(tile)
        if block_m >= 128 and stages == 3:
            found.append(tile._replace(group_m=16))
    return found


def _blocks_candidates(scheme: str, rows: float) -> list[MMConfig]:
    """Tiles of the 128 weight rows that `fit` gives all of them, and of whole lines of shared memory."""
    line = 256 if SCHEMES[scheme].blocks == "nvfp4" else 128
    group_m, a_tma = (8, True) if rows > 48 else (1, False)
    return [
        MMConfig(block_m, 128, columns, group_m, warps, stages, a_tma, w_tma=True)
        for block_m, columns, warps, stages in every(_blocks_m(rows), (line, 2 * line), (4, 8), (2, 3, 4))
        if block_m <= 128 and (block_m + 128) * columns * stages <= (TYPICAL.shared_kib - 16) * 1024
    ]


def _packed_candidates(rows: float, sm: int) -> list[MMConfig]:
    """Tiles whose sums and decoded weights a thread's registers hold."""
    found = []
    if sm == HOPPER and rows <= 48:  # `decoded_few_mm`
        found += [_streamed(height, 128, columns, 1, 4, 3) for height, columns in every((8, 16, 32), (128, 256))]
    for block_m, block_n, block_k, warps, stages in every(
        _blocks_m(rows), (64, 128), (64, 128, 256), (4, 8), (2, 3, 4, 5)
    ):
        ordered = block_m >= 64
        registers = block_n * (block_m + block_k // 2) / (32 * warps)
        deep = stages in ((2, 3) if block_m >= 128 else (3, 4) if ordered else (3, 4, 5))
        if sm == HOPPER and ordered and block_n == 128:  # `decoded_mm`, whose warps and steps are its own
            deep = (warps, stages) == (8, 3)
        if 24 <= registers <= (160 if ordered else 144) and block_n >= 16 * warps and deep:
            tile = MMConfig(block_m, block_n, block_k, 8 if rows > 16 else 1, warps, stages, ordered, w_tma=True)
            found.append(tile)
    return found


def _packed_fp8_candidates(rows: float, sm: int) -> list[MMConfig]:
    """The same where the rows are e4m3; `fit` gives them the columns and warps that a scheme needs."""
    found = []
    if sm == HOPPER and rows <= 16:  # `decoded_few_mm`
        found += [_streamed(height, 128, columns, 1, 4, 3) for height, columns in every((8, 16), (128, 256))]
    for block_m, block_n, warps, stages in every(_blocks_m(rows), (64, 128), (4, 8), (3, 4, 5)):
        registers = block_n * (2 * block_m + 32) / (32 * warps)
        if sm == HOPPER and block_m >= 128 and (block_n, warps) != (128, 8):
            continue  # `decoded_fp8_mm` and `folded_mm`, whose tiles are their own
        if 16 <= registers <= 144 and (stages == 3 or block_m <= 32):
            group_m, a_tma = (8, True) if block_m >= 64 else (1, False)
            found.append(MMConfig(block_m, block_n, 128, group_m, warps, stages, a_tma, w_tma=True))
    return found


def small_candidates(K: int, scheme: str, *, first: bool) -> list[SmallConfig]:
    """Tiles of the small path to time: each thread has 4 to 16 loads of 16 bytes in flight."""
    per_load = 128 // SCHEMES[scheme].bits
    rows, columns, tensors = (
        ((2, 4, 8, 16), (512, 1024, 2048), 2) if first else ((1, 2, 4, 8), (128, 256, 512, 1024), K)
    )
    return [
        SmallConfig(n, k, warps)
        for n, k, warps in every(rows, columns, (4, 8))
        if 2 <= tensors * n * k // (32 * warps * per_load) <= 16
    ]


def candidates(key: LayerKey, tokens: int, sm: int) -> dict[str, tuple[list[Any], ...]]:
    """Sequence -> what is worth timing for each of its products, for the sequences that make sense at this size."""
    rows = tokens * key.K / key.E
    both = (True, False)
    found: dict[str, tuple[list[Any], ...]]
    found = {key.format: tuple(gemm_candidates(key.scheme, rows, sm, gated=key.gated, first=first) for first in both)}
    # Small kernels serve where pairs rarely share experts.
    few = tokens * key.K <= 2 * key.E and tokens <= 8
    if key.format == "grouped" and small_serves(key.scheme, sm) and few:
        found["small"] = tuple(small_candidates(key.K, key.scheme, first=first) for first in both)
    return found
