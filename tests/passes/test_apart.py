"""Which tensors may share memory."""

from __future__ import annotations

import pytest
import torch

from compile_passes.apart import guarded, overlap

MEMORY = bytearray(64)


def part(start: int, stop: int) -> torch.Tensor:
    """A tensor whose storage is the bytes from ``start`` to ``stop``."""
    return torch.frombuffer(MEMORY, dtype=torch.uint8, offset=start, count=stop - start)


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ((0, 8), (0, 8), True),
        ((0, 8), (8, 16), False),
        ((8, 16), (0, 8), False),
        ((0, 9), (8, 16), True),
        ((8, 16), (0, 9), True),
        ((0, 64), (20, 21), True),
        ((20, 21), (0, 64), True),
        ((0, 8), (30, 40), False),
        ((30, 40), (0, 8), False),
    ],
)
def test_overlap(left, right, shared):
    assert overlap(part(*left), part(*right)) is shared


def test_no_tensor_and_no_other_device_overlaps():
    tensor = part(0, 8)
    assert not overlap(tensor, 3) and not overlap(None, tensor)
    assert not overlap(torch.empty(0, device="meta"), tensor)


def test_a_tensor_without_storage_may_be_anywhere():
    assert overlap(torch.eye(3).to_sparse(), part(0, 8)) and overlap(part(0, 8), torch.eye(3).to_sparse())


def test_the_original_runs_where_a_pair_overlaps():
    run = guarded(lambda *inputs: "compiled", lambda *inputs: "original", [(0, 2), (1, 2)])
    assert run(part(0, 8), part(0, 8), part(8, 16)) == "compiled"
    assert run(part(0, 8), part(9, 12), part(10, 16)) == "original"
    assert run(part(10, 12), part(0, 8), part(10, 16)) == "original"
