"""One of two processes that exchange words by the kernel that writes into the other's memory, interpreted.

TRITON_INTERPRET=1 python -m tests.interpreted.pushing --rank 0 --memory FILE FILE
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from moe_ops.kernels.triton import push

RANKS, SLOT = 2, 1024
#: Fewer than on a GPU, and small: so that tensors take several blocks of several programs, and end within one.
push.PROGRAMS, push.BLOCK = 3, 16
#: Words of each tensor for a rank, and whether all ranks get the same.
CALLS = [((100, 7, 1), True), ((48,), False), ((5,), True), ((130, 3, 2, 9), True), ((97,), False)]
WORDS = push.flag_words(RANKS) + 2 * RANKS * SLOT


def words(call: int, number: int, rank: int, size: int) -> Tensor:
    """What a rank sends."""
    generator = torch.Generator().manual_seed(1000 * call + 10 * number + rank)
    return torch.randint(-(2**31), 2**31 - 1, (size,), generator=generator, dtype=torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--memory", nargs=RANKS, required=True)
    options = parser.parse_args()
    buffers = [torch.from_file(name, shared=True, size=WORDS, dtype=torch.int32) for name in options.memory]
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    calls = torch.zeros(push.PROGRAMS, dtype=torch.int32)
    for call, (sizes, gather) in enumerate(CALLS):
        of_all = [
            [words(call, number, rank, size * (1 if gather else RANKS)) for rank in range(RANKS)]
            for number, size in enumerate(sizes)
        ]
        received = [torch.full((RANKS * size,), -1, dtype=torch.int32) for size in sizes]
        sent = [of_one[options.rank] for of_one in of_all]
        push.exchange(peers, calls, RANKS * SLOT, SLOT, sent, received, options.rank, gather)
        for size, of_one, got in zip(sizes, of_all, received, strict=True):
            parts = of_one if gather else [each.view(RANKS, size)[options.rank] for each in of_one]
            assert torch.equal(got, torch.cat(parts)), f"call {call}, {size} words"
    assert calls.tolist() == [len(CALLS)] * push.PROGRAMS
    print("all words arrived")


if __name__ == "__main__":
    main()
