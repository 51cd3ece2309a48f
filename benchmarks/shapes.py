"""The layers that are timed: real models' dimensions, and scaled-down ones for machines without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meta.layers import MODEL_LAYERS


@dataclass(frozen=True)
class Shape:
    """Dimensions of one MoE layer; the letters are those of meta/dims.py."""

    name: str
    E: int
    K: int
    H: int
    I: int

    def weight_bytes(self, bytes_per_element: float = 2) -> float:
        """Bytes of both projections of all experts."""
        return self.E * 3 * self.H * self.I * bytes_per_element


SHAPES = {name: Shape(name, *dimensions) for name, dimensions in MODEL_LAYERS.items()}
TINY_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny-qwen3", E=16, K=4, H=256, I=128),
        Shape("tiny-mixtral", E=8, K=2, H=256, I=384),
    )
}
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384)
TINY_TOKENS = (1, 16, 256)


def parse_shapes(text: str) -> list[Shape]:
    """Shapes of a comma-separated list; "all" and "tiny" name the two tables, "16x1x5120x8192" (E, K, H, I) any layer.

    Raises:
        ValueError: an unknown name, with the names there are, or more experts of a token than there are.
    """
    known = SHAPES | TINY_SHAPES
    groups = {"all": list(SHAPES.values()), "tiny": list(TINY_SHAPES.values())}
    chosen: list[Shape] = []
    for name in text.split(","):
        if name in groups:
            chosen += groups[name]
        elif name in known:
            chosen.append(known[name])
        elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", name):
            chosen.append(Shape(name, *map(int, name.split("x"))))
        else:
            raise ValueError(
                f"benchmarks: --shapes must be among {', '.join([*groups, *known])}, or ExKxHxI such as "
                f"16x1x5120x8192, got {name!r}."
            )
        if chosen[-1].K > chosen[-1].E:
            raise ValueError(f"benchmarks: --shapes must have K <= E, got {name!r}. It is spelled ExKxHxI.")
    return chosen
