"""Times that the kernels of a layer in training cannot beat: what they must move and multiply, at measured ceilings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.kernel_names import short_name
from benchmarks.shapes import Shape
from meta.cost import expected_experts

ITEM_BYTES = 2  # of activations, weights and gradients: bf16


@dataclass(frozen=True)
class Layer:
    """A gated layer of ``shape`` with T tokens, its weights trained or not."""

    shape: Shape
    T: int
    trained: bool

    @property
    def rows(self) -> int:
        """R: pairs of a token and an expert."""
        return self.T * self.shape.K

    @property
    def tokens_and_rows(self) -> float:
        """Bytes of hidden states of all tokens, and of all rows: what gathers and sums of rows read and write."""
        return (self.T + self.rows) * self.shape.H * ITEM_BYTES


@dataclass(frozen=True)
class Work:
    """What one kernel does at the least."""

    flops: float = 0.0
    bytes: float = 0.0

    def floor_us(self, ceilings: Mapping[str, float]) -> float:
        """Microseconds at a run's ceilings (benchmarks/device.py): of the arithmetic or of the bytes, the longer."""
        return max(self.flops / (ceilings["bf16_tflops"] * 1e6), self.bytes / (ceilings["read_gbps"] * 1e3))


def product(layer: Layer, N: int, depth: int) -> Work:
    """Rows `[R, depth]` by weights `[E, N, depth]`, of the experts that have rows."""
    experts = expected_experts(layer.shape.E, layer.shape.K, layer.T)
    moved = layer.rows * (depth + N) + experts * N * depth
    return Work(2.0 * layer.rows * N * depth, moved * ITEM_BYTES)


def weight_gradient(layer: Layer, N: int, depth: int) -> Work:
    """Rows `[R, N]` by rows `[R, depth]` of each expert, every expert's written."""
    moved = layer.rows * (depth + N) + layer.shape.E * N * depth
    return Work(2.0 * layer.rows * N * depth, moved * ITEM_BYTES)


def products(layer: Layer) -> list[Work]:
    """Through both weights, and back."""
    H, I = layer.shape.H, layer.shape.I
    return [product(layer, *sizes) for sizes in ((2 * I, H), (H, I), (I, H), (H, 2 * I))]


def weight_gradients(layer: Layer) -> list[Work]:
    """Of both weights, where they are trained."""
    H, I = layer.shape.H, layer.shape.I
    return [weight_gradient(layer, *sizes) for sizes in ((2 * I, H), (H, I))] if layer.trained else []


def activation_gradient(layer: Layer) -> list[Work]:
    """A gradient and both halves read, two gradients written, and the weighted value where weights are trained."""
    return [Work(bytes=(5.0 + layer.trained) * layer.rows * layer.shape.I * ITEM_BYTES)]


def rows_moved(layer: Layer) -> list[Work]:
    """Rows gathered from tokens, or summed to them, once."""
    return [Work(bytes=layer.tokens_and_rows)]


def rows_exchanged(layer: Layer) -> list[Work]:
    """Gradients of rows summed to tokens, and rows of both factors of the weight gradients, taken from tokens."""
    return [Work(bytes=3.0 * layer.tokens_and_rows)]


@dataclass(frozen=True)
class Kind:
    """Kernels whose names ``pattern`` knows.

    Attributes:
        work: of all of them in one call; of one launch where ``each``, the launches of which the row counts.
    """

    title: str
    pattern: str
    work: Callable[[Layer], list[Work]]
    each: bool = False


KINDS = (
    Kind("products", r"_expert_mm_kernel|cutlass grouped gemm \S+ (?:tn|tt)", products),
    Kind("weight gradients", r"_wgrad_(mm_)?kernel|cutlass grouped gemm \S+ nt", weight_gradients),
    Kind("activation's gradient", r"_glu_rows_backward_kernel", activation_gradient),
    Kind("rows gathered", r"_scatter_rows_kernel", rows_moved, each=True),
    Kind("rows summed", r"_combine_kernel", rows_moved, each=True),
    Kind("summed and gathered", r"_collect_kernel", rows_exchanged),
)


@dataclass(frozen=True)
class Share:
    """Time of the kernels of a kind, by name, and the floor of what they do."""

    title: str
    names: tuple[str, ...]
    us: float
    floor_us: float


def shares(row: dict[str, Any], shape: Shape, ceilings: Mapping[str, float]) -> tuple[list[Share], float]:
    """(of every kind that a row of ours with ``kernels`` has, microseconds of all other kernels)."""
    layer, found = Layer(shape, row["T"], row["mode"] == "trained"), []
    left: dict[str, float] = {}
    for name, us in row["kernels"].items():
        left[short_name(name)] = left.get(short_name(name), 0.0) + us
    for kind in KINDS:
        times = {name: us for name, us in left.items() if re.fullmatch(kind.pattern, name)}
        works = kind.work(layer) * (_launches(row, times) if kind.each else 1)
        if times and works:
            floor = sum(work.floor_us(ceilings) for work in works)
            found.append(Share(kind.title, tuple(times), sum(times.values()), floor))
            left = {name: us for name, us in left.items() if name not in times}
    return found, sum(left.values())


def _launches(row: dict[str, Any], names: Mapping[str, float]) -> int:
    """How often a call launches these kernels; 0 of a file that does not say it."""
    counts = (row.get("kernels_forward", {}), row.get("kernels_backward", {}))
    return sum(of_pass.get(name, 0) for of_pass in counts for name in names)
