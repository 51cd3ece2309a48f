"""Times of both expert GEMMs alone, or of weights that are decoded of whole layers, with every tile of
`moe_ops.backends.triton_plans.FAMILIES`, and the constants of `meta.cost.TileCost` that fit them: on another GPU, the
table to put in its place.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import input_sets
from benchmarks.layers import empty_cache
from benchmarks.results import ResultFile, device_name, progress_bar
from benchmarks.routings import router_logits
from benchmarks.shapes import Shape, parse_shapes
from benchmarks.timing import IN_TURN, Run, in_turn, repeated, sequence, warm
from meta.arch import FIRST_CAPABILITY, lookup_gpu
from meta.cost import TileCost, Work, product_us, robust_us
from meta.routing import route
from meta.schemes import SCHEMES
from moe_ops.autotune import TrialLayer, precompile
from moe_ops.backends.triton_plans import (
    DECODED,
    FAMILIES,
    Family,
    has_short_ends,
    kind,
    plan,
    runs_on,
    tile_cost,
)
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.plans import LayerKey, Plan, gpu_of

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3", 128, 8, 2048, 768),
        Shape("mixtral", 8, 2, 4096, 14336),
        Shape("gptoss", 128, 4, 2880, 2880),
        Shape("olmoe", 64, 8, 2048, 1024),
        Shape("dsv3", 256, 8, 7168, 2048),
        Shape("scout", 16, 1, 5120, 8192),
        Shape("next", 512, 10, 2048, 512),
        Shape("dsv2", 160, 6, 5120, 1536),
        Shape("granite", 40, 8, 1536, 512),
        Shape("phi", 16, 2, 4096, 6400),
    )
}
TOKENS = (2, 5, 16, 48, 128, 400, 1024, 3000, 8192)
KINDS = {scheme: kind(scheme) for scheme in ("bf16", "fp8_block128", *sorted(DECODED))}
GEMMS = ("up", "down")
#: Both by one tile, with all around them: weights that are decoded take rows in an order that the sort gives them.
LAYER = "layer"
#: Routing -> experts that tokens choose among.
EXPERTS: dict[str, Callable[[Shape], int]] = {
    "uniform": lambda shape: shape.E,
    "half_empty": lambda shape: shape.E - shape.E // 2,
    "k_experts": lambda shape: shape.K,
}
#: us to launch a GEMM, at the least: alone, and with its share of the sort and the combination, which times of many
#: bytes do not tell.
LEAST_US = {**dict.fromkeys(GEMMS, 1.0), LAYER: 6.0}
ROUNDS = 7
WARM_SECONDS = 0.1
METHOD = (
    "GEMM 1 (up, gathered rows, activation) and GEMM 2 (down) alone, launched as programmatic dependents, or (layer) "
    "both by one tile with sorting and combining around them; 8 input sets up to 64 tokens, 2 above; one captured "
    f"graph for each tile over all sets, replayed in turn for {WARM_SECONDS} s, then in "
    f"{IN_TURN.format(rounds=ROUNDS)}; us: the median, divided by the number of sets; tile: fields of MMConfig"
)


def parse_layers(text: str | None) -> list[Shape]:
    """Names of SHAPES and whatever `parse_shapes` takes, comma-separated; None: all of SHAPES."""
    names = text.split(",") if text else list(SHAPES)
    return [shape for name in names for shape in ([SHAPES[name]] if name in SHAPES else parse_shapes(name))]


def new_results(path: Path, commit: str, shapes: Sequence[Shape]) -> ResultFile:
    """The file of a run, without rows.

    Raises:
        ValueError: no GPU whose tiles these are, or a shape too small for a routing.
    """
    if not torch.cuda.is_available() or gpu_of(torch.device("cuda"))[1] < FIRST_CAPABILITY["tma"]:
        raise ValueError(
            f"benchmarks: tiles must run on a GPU with tensor-map descriptors (Hopper or later), got {device_name()}. "
            "Run it there, or fit a file that was made there with --fit."
        )
    for shape, routing in product(shapes, EXPERTS):
        router_logits(routing, shape, 1, torch.float32, "cpu", torch.Generator())
    dimensions = {shape.name: [shape.E, shape.K, shape.H, shape.I] for shape in shapes}
    return ResultFile(path, "tiles", METHOD, commit=commit, shapes=dimensions)


# ---- measuring ----


def run(shapes: Iterable[Shape], tokens: Sequence[int], schemes: Iterable[str], results: ResultFile) -> None:
    """Compile every tile, then time it in every case; the file is written after each number of tokens."""
    # Where scale groups run on into the up half, it is another kernel, for which no constant stands.
    pairs = [(scheme, shape) for scheme, shape in product(schemes, shapes) if not runs_on(scheme, shape.I)]
    jobs = [job for scheme, shape in pairs for job in compilations(scheme, shape)]
    with progress_bar() as progress, torch.no_grad():
        task = progress.add_task("compiling", total=len(jobs))
        for done, total, error in precompile(jobs, os.cpu_count() or 2):
            progress.update(task, completed=done, total=total)
            if error:
                progress.console.print(error, highlight=False, soft_wrap=True)
        task = progress.add_task("tiles", total=len(pairs) * len(tokens))
        for scheme, shape in pairs:
            layer = TrialLayer(key_of(scheme, shape), "cuda")
            for T in tokens:
                progress.update(task, description=f"{scheme} {shape.name} T={T}")
                rows = []
                for routing, gemm in product(EXPERTS, gemms_of(scheme)):
                    rows += time_case(layer, shape, T, routing, gemm)
                    empty_cache()
                results.rows.extend(rows)
                results.write()
                progress.advance(task)
            del layer
            empty_cache()


def key_of(scheme: str, shape: Shape) -> LayerKey:
    """A gated layer."""
    return LayerKey(scheme, "grouped", shape.E, shape.K, shape.H, shape.I, gated=True)


def gemms_of(scheme: str) -> tuple[str, ...]:
    """What is timed of a scheme."""
    return (LAYER,) if scheme in DECODED else GEMMS


def compilations(scheme: str, shape: Shape) -> Iterator[tuple[LayerKey, int, Plan]]:
    """All tiles of both GEMMs, as layers for `precompile`."""
    tiles = [tiles_of(scheme, gemm) for gemm in GEMMS]
    for up, down in zip_longest(*tiles):
        yield key_of(scheme, shape), 64, plan("grouped", up or tiles[0][0], down or tiles[1][0])


def tiles_of(scheme: str, gemm: str) -> list[MMConfig]:
    """Tiles of FAMILIES that serve a GEMM, or both."""
    return [family.tile for family in FAMILIES[KINDS[scheme]] if _cost_of(family, gemm) is not None]


def _cost_of(family: Family, gemm: str) -> TileCost | None:
    return family.up if gemm == "up" else family.down


def worth_timing(tile: MMConfig, rows: float) -> bool:
    """Not with tiles mostly empty or far too many at ``rows`` an expert: no plan takes them, and a fit would bend."""
    return tile.block_m <= max(64, 8 * rows) and tile.rows >= min(128, rows / 6)


def time_case(layer: TrialLayer, shape: Shape, T: int, routing: str, gemm: str) -> list[dict[str, Any]]:
    """One row for each tile that is worth it; the tiles in turn. One that cannot run has no time, but a reason."""
    scheme = layer.key.scheme
    head = {"shape": shape.name, "scheme": scheme, "gemm": gemm, "T": T, "routing": routing}
    tiles = [tile for tile in tiles_of(scheme, gemm) if worth_timing(tile, T * shape.K / shape.E)]
    rows = {str(list(tile)): {**head, "tile": list(tile), "us": None} for tile in tiles}
    generator = torch.Generator(layer.device).manual_seed(T)
    calls = []
    for _ in range(input_sets(T)):
        logits = router_logits(routing, shape, T, torch.float32, layer.device, generator)
        weights, ids = route(logits, top_k=shape.K)
        calls.append(layer_call(layer, weights, ids) if gemm == LAYER else gemm_call(layer, gemm, ids))
    runs: dict[str, Run] = {}
    for name, tile in zip(rows, tiles, strict=True):
        try:
            calls[0](tile)
            runs[name] = Run(sequence([partial(call, tile) for call in calls]))
        except Exception as failure:
            rows[name]["reason"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    warm(runs, WARM_SECONDS)
    runs = {name: repeated(run) for name, run in runs.items()}
    warm(runs, 0.0)
    for name, samples in in_turn(runs, ROUNDS).items():
        rows[name]["us"] = round(statistics.median(samples) / len(calls), 3)
    return list(rows.values())


def gemm_call(layer: TrialLayer, gemm: str, ids: torch.Tensor) -> Callable[[MMConfig], Any]:
    """One GEMM as the layer launches it, of random rows: tokens `[T, H]` gathered by ids `[T, K]`, or `[T * K, I]`."""
    from moe_ops.kernels.triton import act_quant, permute
    from moe_ops.kernels.triton.expert_mm import grouped_mm
    from moe_ops.kernels.triton.launch import ExpertMM

    key, first, scale = layer.key, gemm == "up", None
    offsets, row_to_pair, _ = permute.sort_pairs(ids, key.E)
    size = (ids.shape[0], key.H) if first else (ids.numel(), key.I)
    rows = torch.randn(size, device=ids.device, dtype=torch.bfloat16)
    if quantizes := SCHEMES[key.scheme].rows is not None:
        rows, scale = act_quant.quantize_rows(rows, SCHEMES[key.scheme].rows)
    form = {"glu_layout": "concat", "activation": "silu", "quantize_output": quantizes} if first else {}
    mm = ExpertMM(layer.weights[GEMMS.index(gemm)], torch.bfloat16, rows_scale=scale, **form)
    gather = {"row_to_pair": row_to_pair, "top_k": key.K} if first else {}
    pdl = ids.device.type == "cuda"
    return lambda tile: grouped_mm(rows, mm, offsets, tile, num_rows=ids.numel(), pdl=pdl, **gather)


def layer_call(layer: TrialLayer, weights: torch.Tensor, ids: torch.Tensor) -> Callable[[MMConfig], Any]:
    """A layer of random tokens with this routing, `weights` and `ids` [T, K], both GEMMs by one tile."""
    x = torch.randn((ids.shape[0], layer.key.H), device=ids.device, dtype=torch.bfloat16)
    return lambda tile: layer.run(plan("grouped", tile, tile), x, weights, ids)


# ---- fitting ----

#: The GEMMs that were timed together.
Works = tuple[Work, ...]
Costs = dict[MMConfig, TileCost]


def layer_us(works: Works, cost: TileCost, multiprocessors: int) -> float:
    """Microseconds that they should take together."""
    return sum(product_us(work, cost, multiprocessors) for work in works)


def fit(
    tile: MMConfig,
    times: Sequence[tuple[Works, float]],
    multiprocessors: int,
    tbps: float,
    least_us: float = 1.0,
    *,
    short_ends: bool = False,
) -> TileCost:
    """The constants, on a GPU whose memory has so many TB/s, with `least_us` to launch at the least, rounded as
    FAMILIES has them, of a tile of two heights or with `short_ends` one more, whose `layer_us` is nearest to measured
    times by ratio: least squares of the logarithm, with outliers beyond 5 % damped, and one program rather than more
    unless they gain 3 %.
    """
    from scipy.optimize import least_squares

    def cost(logs: Sequence[float], programs: int) -> TileCost:
        tbps, fill_us, depth_us, launch_us, *tall = (math.exp(value) for value in logs)
        return tile_cost(tile, tbps, fill_us, depth_us, programs, launch_us, *tall)

    def errors(logs: Sequence[float], programs: int) -> list[float]:
        tried = cost(logs, programs)
        return [math.log(layer_us(works, tried, multiprocessors) / us) for works, us in times]

    tall, best = short_ends or tile.tall_m > 0, (math.inf, TileCost(0, 0, 0.0, 0.0, 0.0, 0, 0.0))
    # Not faster than memory: of times that it never decides, nothing else would bound it.
    low, high = [0.0, -4.0, -3.0, math.log(least_us), -3.0], [math.log(tbps), 4.0, 5.0, 2.5, 5.0]
    for programs in (1, 2, 3):
        start = [4.2, 0.3, programs * (2 + tile.block_m * tile.block_n / 4096), least_us + 3, programs * 4.0]
        logs, bounds = [math.log(value) for value in start[: 4 + tall]], (low[: 4 + tall], high[: 4 + tall])
        found = least_squares(errors, logs, args=(programs,), bounds=bounds, loss="soft_l1", f_scale=0.05)
        if found.cost < 0.97 * best[0]:
            best = found.cost, cost(found.x, programs)
    return TileCost(*(round(value, 1 if name == "launch_us" else 2) for name, value in best[1]._asdict().items()))


def load(path: Path) -> dict[str, Any]:
    """A file of this command.

    Raises:
        ValueError: any other.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict) or document.get("kind") != "tiles":
        raise ValueError(f"benchmarks: --fit must name a file that `tiles --json` wrote, got {path}.")
    return document


def works_of(document: Mapping[str, Any], row: Mapping[str, Any], routing: str) -> Works:
    """What a row's GEMMs have to do if its tokens were routed so."""
    shape = Shape(row["shape"], *document["shapes"][row["shape"]])
    up = Work(EXPERTS[routing](shape), shape.K, row["T"], 2 * shape.I, shape.H, SCHEMES[row["scheme"]].bits / 8)
    down = up._replace(N=shape.H, depth=shape.I)
    return {"up": (up,), "down": (down,), LAYER: (up, down)}[row["gemm"]]


def report(document: Mapping[str, Any]) -> Iterator[str]:
    """Lines: of every kind the rows of FAMILIES fitted to its schemes' times, and the regret of picking tiles by
    them.
    """
    arch = lookup_gpu(document["device"])
    timed = [{**row, "tile": MMConfig(*row["tile"])} for row in document["rows"] if row["us"] is not None]
    for name in dict.fromkeys(KINDS[row["scheme"]] for row in timed):
        of_kind = [row for row in timed if KINDS[row["scheme"]] == name]
        schemes = ", ".join(dict.fromkeys(row["scheme"] for row in of_kind))
        costs: dict[str, Costs] = {}
        for gemm in dict.fromkeys(row["gemm"] for row in of_kind):
            of_tile: dict[MMConfig, list[tuple[Works, float]]] = {}
            rows = [row for row in of_kind if row["gemm"] == gemm]
            for row in rows:
                if row["routing"] == "k_experts":
                    continue  # a fit that bends to it predicts even routing worse, and picks for it no better
                of_tile.setdefault(row["tile"], []).append((works_of(document, row, row["routing"]), row["us"]))
            known = (arch.multiprocessors, arch.dram_tbps, LEAST_US[gemm])
            ends = {tile: has_short_ends(rows[0]["scheme"], tile) for tile in of_tile}
            costs[gemm] = {tile: fit(tile, of_tile[tile], *known, short_ends=ends[tile]) for tile in sorted(of_tile)}
            for routing, ratios in regrets(document, rows, costs[gemm], arch.multiprocessors).items():
                mean, worst = math.exp(statistics.fmean(map(math.log, ratios))), max(ratios)
                yield f"{schemes} {gemm} {routing}: picked / best {mean:.3f}, at most {worst:.2f}, {len(ratios)} cases"
        yield f'"{name}": (  # {schemes}'
        up, down = (costs.get(LAYER) or costs.get(gemm, {}) for gemm in GEMMS)
        for tile in sorted(up | down):
            yield f"    {family(tile, up.get(tile), down.get(tile))},"
        yield "),"


def regrets(
    document: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], costs: Costs, multiprocessors: int
) -> dict[str, list[float]]:
    """By routing and case, the time of the tile that `robust_us` picks, which does not know the routing, over the best.

    Only tiles timed in turn are compared, where there were several.
    """
    cases: dict[tuple[Any, ...], dict[MMConfig, float]] = {}
    works: dict[tuple[Any, ...], Works] = {}
    for row in rows:
        case = (row["routing"], row["scheme"], row["shape"], row["T"], row.get("run"))
        cases.setdefault(case, {})[row["tile"]] = row["us"]
        works[case] = works_of(document, row, "uniform")
    found: dict[str, list[float]] = {}
    for case, us in cases.items():
        if len(us) == 1:
            continue
        picked = min(us, key=lambda tile: sum(robust_us(work, costs[tile], multiprocessors) for work in works[case]))
        found.setdefault(case[0], []).append(us[picked] / min(us.values()))
    return found


def family(tile: MMConfig, up: TileCost | None, down: TileCost | None) -> str:
    """A row of FAMILIES as it is written there."""

    def constants(cost: TileCost) -> str:
        tall = f", {cost.tall_depth_us:.2f}" if cost.tall_rows else ""
        return f"{cost.tbps:.2f}, {cost.fill_us:.2f}, {cost.depth_us:.2f}, {cost.programs}, {cost.launch_us:.1f}{tall}"

    made, tall = "_streamed" if tile.a_tma else "_gathered", f", tall_m={tile.tall_m}, tall_stages={tile.tall_stages}"
    sizes = ", ".join(map(str, tile[:6])) + (tall if tile.tall_m else "")
    if up is not None and up == down:
        return f"_decoded({made}({sizes}), {constants(up)})"
    both = (f"({constants(cost)})" if cost else "None" for cost in (up, down))
    return f"_family({made}({sizes}), {', '.join(both)})"
