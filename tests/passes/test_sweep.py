"""A sample of the sweep: aliases and writes of every kind that torch has, inside a block. The rest runs by hand."""

from __future__ import annotations

import pytest

from tests.passes import sweep
from tests.passes.spellings import Spelling, spellings

# One of so many of each kind. Views and what has no schema matter most, and are few.
EVERY = {"view": 3, "python": 2, "in place": 16, "foreach": 10, "out": 80}


def _sample() -> list[Spelling]:
    kept = []
    for kind, step in EVERY.items():
        kept += [spelling for spelling in spellings() if spelling.kind == kind][::step]
    return kept


@pytest.mark.parametrize("spelling", _sample(), ids=lambda spelling: spelling.name)
def test_in_a_block(spelling):
    found = sweep.result(spelling, "hidden")
    if found.word in ("not built", "no effect", "not captured"):
        pytest.skip(f"{found.word} {found.detail}")
    assert found.word == "right", f"{found.word}: {found.detail}"
