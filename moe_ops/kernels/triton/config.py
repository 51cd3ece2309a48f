"""The knobs of an expert GEMM launch. Plain tuples: importable without Triton."""

from __future__ import annotations

from typing import NamedTuple


class MMConfig(NamedTuple):
    """Tile sizes of one expert GEMM. `block_n` counts weight rows: a gated GEMM writes block_n / 2 columns.

    group_m: row tiles of an expert that go along its columns together and share weight tiles in L2. a_tma: rows come
    (unless gathered) and leave by tensor-map descriptor where strides allow; w_tma: weights come so. tall_m: rows of
    the tiles of experts that have more than block_m, with a pipeline of tall_stages; 0: all tiles have block_m.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    a_tma: bool
    w_tma: bool
    tall_m: int = 0
    tall_stages: int = 0

    @property
    def rows(self) -> int:
        """Rows of the tallest tile."""
        return self.tall_m or self.block_m


class SmallConfig(NamedTuple):
    """Tile of one program of the small path: block_n output columns, block_k of the contraction at a time."""

    block_n: int
    block_k: int
    num_warps: int
