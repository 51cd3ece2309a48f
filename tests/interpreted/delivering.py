"""One of two processes that deliver sums of pairs into each other's memory, interpreted.

TRITON_INTERPRET=1 python -m tests.interpreted.delivering --rank 0 --memory FILE FILE
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from moe_ops.kernels.triton import deliver

RANKS, TOKENS, WIDTH, TOP_K = 2, 5, 24, 3
RESULTS = 16  # words before the results
WORDS = RESULTS + RANKS * TOKENS * WIDTH
USES = 4
#: Tokens of all ranks that one call delivers: all at once, or in parts that no rank's tokens divide.
PARTS = [(0, 10)], [(0, 3), (3, 9), (9, 10)]


def pairs(use: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``[R, WIDTH]``, the row of every pair of all ranks' tokens, some dropped, and weights."""
    generator = torch.Generator().manual_seed(10 * use + rank)
    rows = torch.randn(40, WIDTH, generator=generator)
    places = torch.randint(-1, 41, (RANKS * TOKENS, TOP_K), generator=generator, dtype=torch.int32)
    return rows, places, torch.rand(places.shape, generator=generator)


def sums(use: int, rank: int) -> Tensor:
    """What a rank delivers for all tokens, in fp64."""
    rows, places, weights = pairs(use, rank)
    kept = (places >= 0) & (places < rows.shape[0])
    taken = rows.double()[places.clamp(0, rows.shape[0] - 1).long()]
    return (taken * (weights * kept).double().unsqueeze(-1)).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--memory", nargs=RANKS, required=True)
    options = parser.parse_args()
    rank, buffers = options.rank, [
        torch.from_file(name, shared=True, size=WORDS, dtype=torch.int32) for name in options.memory
    ]  # fmt: skip
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    parts = buffers[rank][RESULTS:].view(torch.float32).view(RANKS, TOKENS, WIDTH)
    for use in range(USES):
        rows, places, weights = pairs(use, rank)
        parts.fill_(torch.nan)
        deliver.meet(peers, 0, rank, say=True)
        for first, end in PARTS[use % 2]:
            of_part = (places[first:end], weights[first:end])
            deliver.deliver(rows, *of_part, peers=peers, at=RESULTS, tokens=TOKENS, first=first, rank=rank)
        deliver.meet(peers, 2, rank, say=True)
        got = deliver.sum_parts(parts)
        want = sum(sums(use, other) for other in range(RANKS))[rank * TOKENS : (rank + 1) * TOKENS]
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
        deliver.meet(peers, 4, rank, say=True)
    plain = torch.randn(RANKS * TOKENS, WIDTH)
    deliver.deliver(plain, None, None, peers=peers[[rank, rank]], at=RESULTS, tokens=TOKENS, first=0, rank=0)
    assert torch.equal(parts[0], plain[TOKENS:])  # both ranks' tokens went to the same place here, these last
    print("all sums arrived")


if __name__ == "__main__":
    main()
