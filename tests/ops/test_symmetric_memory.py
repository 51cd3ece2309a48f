"""Buffers that are kept for a group: used again, replaced by larger ones, never made while a graph is captured."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from moe_ops import groups
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


def test_what_is_kept_of_a_group_is_not_that_of_the_next_one_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Anything:
        pass

    there = {"0": Anything(), "1": Anything()}
    monkeypatch.setattr(groups, "process_group", there.get)
    kept = groups.PerGroup[list[int]](list)
    kept["0"].append(1)
    kept["1"].append(2)
    assert (kept["0"], kept["1"]) == ([1], [2])
    there["0"] = Anything()
    assert (kept["0"], kept["1"]) == ([], [2])
