"""What a problem costs: floating point operations, bytes, and the time neither can beat.

The figures feed the flop counter, the roofline plots and the tuner's pruning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from meta.arch import Arch
from meta.blocks import blocks_on
from meta.dims import GRADIENTS, Dim, LayerProblem
from meta.schemes import SCHEMES, ceil_div

Shape = Sequence[int]


def projection_rows(problem: LayerProblem) -> Dim:
    """N of the first projection."""
    return problem.I * 2 if problem.gated else problem.I


def flops(problem: LayerProblem) -> Dim:
    """Multiplications and additions of both expert GEMMs, ``2 R N H + 2 R I H``; routing, activation are left out."""
    return 2 * problem.R * problem.H * (projection_rows(problem) + problem.I)


def expected_experts(E: int, K: int, T: int) -> float:
    """Expected number of distinct experts that T tokens select when every K of E are equally likely.

    One token misses an expert with probability ``1 - K / E``, so ``E * (1 - (1 - K / E) ** T)``.
    """
    return E * (1.0 - (1.0 - min(K / E, 1.0)) ** T) if E else 0.0


def expert_bytes(problem: LayerProblem) -> int:
    """Bytes of one expert's two weights, scales included."""
    scheme = SCHEMES[problem.scheme]
    H, I = int(problem.H), int(problem.I)
    total = 0
    for N, K in ((int(projection_rows(problem)), H), (H, I)):
        total += N * int(ceil_div(K, scheme.pack)) * scheme.weight_dtype.itemsize
        for spec in scheme.scales:
            total += (
                0 if spec.of_rows else spec.dtypes[0].itemsize * math.prod(int(size) for size in spec.shape(1, N, K))
            )
    return total


def bytes_moved(problem: LayerProblem, experts: float | None = None) -> float:
    """Least traffic of the experts of a layer: weights of the distinct experts once, tokens in once, tokens out once.

    ``experts`` is the number of distinct experts when it is known; uniform routing is assumed otherwise.
    """
    if experts is None:
        experts = expected_experts(int(problem.E), int(problem.K), int(problem.T))
    return experts * expert_bytes(problem) + 2.0 * int(problem.T) * int(problem.H) * problem.dtype.itemsize


class Work(NamedTuple):
    """One grouped product of a layer: T tokens, each for K of E experts, by weights of N rows and ``depth`` columns of
    ``itemsize`` bytes, half of one where a byte holds two codes.
    """

    E: int
    K: int
    T: int
    N: int
    depth: int
    itemsize: float


class TileCost(NamedTuple):
    """What a kernel with tiles of ``rows`` by ``columns`` (of the weight) costs on an H200, see :func:`product_us`.

    Attributes:
        tbps: bandwidth it reaches when bytes are its time, TB/s.
        fill_us: of a tile, before its first product and behind its last.
        depth_us: of 1024 columns of the contraction, in one tile.
        programs: that a multiprocessor runs at once.
        launch_us: of a kernel that does nothing else.
        tall_rows, tall_depth_us: of the tiles where an expert has more than ``rows`` left; 0 where all are alike.
    """

    rows: int
    columns: int
    tbps: float
    fill_us: float
    depth_us: float
    programs: int
    launch_us: float
    tall_rows: int = 0
    tall_depth_us: float = 0.0


MANY_ROWS = 200  # of an expert: from here on what its last tile holds is as good as evenly distributed


def row_tiles(T: int, share: float, rows: int, tall_rows: int = 0) -> tuple[float, float]:
    """Of an expert that each of T tokens selects with probability ``share``: how many tiles of ``rows`` its rows fill,
    expected, and how many of ``tall_rows``, which take their place, unless 0, as long as more than ``rows`` are left.
    """
    mean = T * share

    def tiles(n: int) -> tuple[float, float]:
        if not tall_rows:
            return float(-(-n // rows)), 0.0
        full, left = divmod(n, tall_rows)
        return float(0 < left <= rows), float(full + (left > rows))

    if share >= 1.0:
        return tiles(T)
    if mean >= MANY_ROWS:
        if not tall_rows:
            return mean / rows + 0.5, 0.0
        short = rows / tall_rows
        return short, mean / tall_rows + 0.5 - short
    odds, probability = share / (1.0 - share), (1.0 - share) ** T
    short, tall, left = 0.0, 0.0, 1.0 - probability
    for n in range(1, T + 1):
        probability *= odds * (T - n + 1) / n
        low, high = tiles(n)
        short += probability * low
        tall += probability * high
        left -= probability
        if n > mean and left < 1e-6:
            break
    return short, tall


def product_us(work: Work, cost: TileCost, multiprocessors: int) -> float:
    """Microseconds that a grouped product should take: its launch, and the longer of its bytes and its tiles.

    Bytes: weights of the distinct experts, rows in and out once. Tiles: as many as the rows of every expert fill,
    as many at a time as the multiprocessors run. Where both are near each other they get into each other's way.
    """
    short, tall = row_tiles(work.T, work.K / work.E, cost.rows, cost.tall_rows)
    distinct, pairs = expected_experts(work.E, work.K, work.T), work.T * work.K
    moved = distinct * work.N * work.depth * work.itemsize + pairs * (work.depth * work.itemsize + work.N)
    waves = work.E * (short + tall) * -(-work.N // cost.columns) / (multiprocessors * cost.programs)
    waves = math.ceil(waves) if waves < 8 else waves + 0.5
    depth_us = (short * cost.depth_us + tall * cost.tall_depth_us) / (short + tall)
    memory = moved / (cost.tbps * 1e6)
    compute = waves * (cost.fill_us + depth_us * work.depth / 1024)
    return cost.launch_us + math.pow(memory**6 + compute**6, 1 / 6)


def pairwise_us(work: Work, expert_bytes: int, tbps: float, launch_us: float) -> float:
    """Microseconds of kernels that stream an expert's weights for every pair: the second reader of an expert finds
    some of them in the cache.
    """
    distinct = expected_experts(work.E, work.K, work.T)
    return launch_us + (0.3 * distinct + 0.7 * work.T * work.K) * expert_bytes / (tbps * 1e6)


SKEW = 0.1


def robust_us(work: Work, cost: TileCost, multiprocessors: int) -> float:
    """`product_us` with even routing, and a little of it with all tokens on the same K experts: the host cannot know.

    us of tiles picked so against the best of nine, geometric mean over both GEMMs of six layers on an H200: even
    routing 1.01, half of the experts empty 1.03, K experts 1.17; of tiles picked for even routing alone 1.01, 1.07 and
    1.76.
    """
    even = product_us(work, cost, multiprocessors)
    return even * math.pow(product_us(work._replace(E=work.K), cost, multiprocessors), SKEW)


PASS_BYTES = 768 * 2**20  # of rows between the products and behind them: with the sort within 1 GiB
PASS_ROWS = 512  # an expert, at the least: every pass reads the weights again, which far fewer rows would wait for


def tokens_per_pass(T: int, E: int, K: int, row_bytes: int) -> int:
    """How many of T tokens the experts should take at once, so that their rows need no more than :data:`PASS_BYTES`.

    Passes are of equal length, a multiple of 128.

    Args:
        row_bytes: of what a pair's row needs in all buffers together.
    """
    most = max(PASS_BYTES // max(K * row_bytes, 1), PASS_ROWS * E // max(K, 1), 1)
    passes = max(-(-T // most), 1)
    return -(-T // (passes * 128)) * 128


def _kind(problem: LayerProblem, arch: Arch) -> str:
    scheme = SCHEMES[problem.scheme]
    if (form := blocks_on(scheme, arch.sm)) is not None:
        return "fp8" if form.pack == 1 else "fp4"
    if scheme.rows is not None:
        return "fp8"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(problem.dtype, "tf32")


def roofline_us(problem: LayerProblem, arch: Arch, experts: float | None = None) -> float:
    """Microseconds that no implementation can beat: the larger of memory time and compute time (see `bytes_moved`)."""
    memory = bytes_moved(problem, experts) / (arch.ceiling_tbps() * 1e6)
    compute = int(flops(problem)) / (arch.ceiling_tflops(_kind(problem, arch)) * 1e6)
    return max(memory, compute)


def _no_flops(flat: Any) -> int:
    """Operators that only move or rank data."""
    return 0


def _gemm_flops(flat: Any) -> int:
    """``2 * rows * N * K``. In the batched format every slot counts: how many are filled is known to the device
    alone.
    """
    x: Shape = flat.rows if hasattr(flat, "rows") else flat.batch
    separate = getattr(flat, "up_weight", None) is not None
    return int(2 * math.prod(x) * flat.weight[1] * (2 if separate else 1))


def _wgrad_flops(flat: Any) -> int:
    """``2 * rows * N * K``."""
    rows = flat.rows if flat.tokens == "grad_rows" else flat.grad_rows
    return int(2 * rows[0] * flat.grad_rows[1] * flat.rows[1])


def _gathered_flops(flat: Any) -> int:
    """``2 * rows * N * K``."""
    return int(2 * math.prod(flat.pair_to_row) * flat.weight[1] * flat.weight[2])


def _products(flat: Any, pairs: int) -> tuple[int, int]:
    """Of the first projection and of the second, for so many routed pairs."""
    columns, H = flat.gate_up_proj[1] * (1 if flat.up_proj is None else 2), flat.down_proj[1]
    I = columns if flat.glu_layout == "none" else columns // 2  # the last dimensions may hold two codes a byte
    return 2 * pairs * columns * H, 2 * pairs * H * I


def _fused_experts_flops(flat: Any) -> int:
    return sum(_products(flat, math.prod(flat.topk_weights)))


def _fused_moe_flops(flat: Any) -> int:
    return sum(_products(flat, flat.hidden_states[0] * flat.top_k))


def _backward_flops(flat: Any) -> int:
    """Through the second weight."""
    return int(2 * math.prod(flat.topk_weights) * flat.down_proj[1] * flat.down_proj[2])


def _backward_first_flops(flat: Any) -> int:
    """Through the first weight, if that is needed, and its gradient."""
    needs = dict(zip(GRADIENTS, flat.needs, strict=True))
    halves = {"gate_up_proj": flat.gate_up_proj, "up_proj": flat.up_proj}
    through = needs["hidden_states"] or needs["topk_weights"]
    products = sum(through + needs[name] for name, half in halves.items() if half is not None)
    return int(2 * math.prod(flat.topk_weights) * flat.gate_up_proj[1] * flat.gate_up_proj[2] * products)


#: Formulas for ``torch.utils.flop_counter``, of the arguments by name, with the shapes of tensors.
OP_FLOPS: dict[str, Callable[[Any], int]] = {
    "fused_topk": _no_flops,
    "moe_permute": _no_flops,
    "moe_unpermute": _no_flops,
    "fused_topk_backward": _no_flops,
    "sort_pairs": _no_flops,
    "gathered_mm": _gathered_flops,
    "expert_sums": _no_flops,
    "batched_dispatch": _no_flops,
    "batched_combine": _no_flops,
    "quantize_rows": _no_flops,
    "quantize_batched": _no_flops,
    "grouped_mm_glu": _gemm_flops,
    "grouped_mm": _gemm_flops,
    "batched_mm_glu": _gemm_flops,
    "batched_mm": _gemm_flops,
    "grouped_wgrad": _wgrad_flops,
    "fused_experts": _fused_experts_flops,
    "fused_experts_saving": _fused_experts_flops,
    "fused_experts_backward": _backward_flops,
    "fused_experts_backward_first": _backward_first_flops,
    "fused_moe": _fused_moe_flops,
}
