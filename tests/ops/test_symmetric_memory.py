"""Buffers that are kept for a group: used again, replaced by larger ones, never made while a graph is captured."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from moe_ops.symmetric_memory import at_least


class Buffer(NamedTuple):
    size: int


def test_buffers_grow_by_powers_of_two_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # torch for CPUs has none
    held: list[Buffer] = []
    sizes = [at_least("op", "symm", held, size, Buffer).size for size in (5, 8, 3, 9)]
    assert sizes == [8, 8, 8, 16]
    assert held == [Buffer(8), Buffer(16)], "a captured graph goes on with the first"


def test_none_is_made_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert at_least("op", "symm", [Buffer(8)], 8, Buffer) == Buffer(8)
    with pytest.raises(
        ValueError, match=r"op: transport must be .*'symm' inside a CUDA graph's capture\. Run the layer"
    ):
        at_least("op", "symm", [Buffer(8)], 9, Buffer)
