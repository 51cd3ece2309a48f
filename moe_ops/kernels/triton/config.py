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


def is_of_plain_mm(tile: MMConfig) -> bool:
    """Whether a tile of 16-bit products, of both sides, is that of `plain_mm`."""
    return tile.a_tma and tile[:3] == (128, 256, 64) and not tile.tall_m


def are_promoted(rows: int, num_experts: int) -> bool:
    """Whether experts have so many rows, all together, that `promoted_mm` is the faster one for them: 64 each where
    there are 8192, else up to 256, as few large tiles do not fill a GPU and weights are the time.

    us of a layer on an H100 by `mm_tile` and by it: Qwen3-30B-A3B, fp8_block128, T = 1024 (64 an expert) 294 and 286,
    T = 4096 600 and 554, fp8_channel 686 and 575; gpt-oss-120b, fp8_channel, T = 4096 (128 an expert) 1855 and 1694;
    Mixtral-8x7B, fp8_block128, T = 512 (128 an expert) 708 and 789, fp8_channel, T = 1024 1218 and 1117, T = 4096 4342
    and 3082.
    """
    return rows >= max(64, min(256, 8192 // num_experts)) * num_experts


def are_shared(rows: int, num_experts: int, folded: bool) -> bool:
    """Whether experts have so many rows, all together, that decoding a weight's rows once for all tiles is faster than
    in every tile (`decoded_once_mm`): 256 each where scales are folded into codes, which takes longer, else 512.

    us of a layer of w4a8_fp8 on an H200 by `decoded_fp8_mm` and by it: Qwen3-30B-A3B, T = 4096 (256 rows an expert)
    615, 666, T = 8192 1110, 1044; gpt-oss-120b, T = 8192 (256) 2732, 3310.
    """
    return rows >= (256 if folded else 512) * num_experts
