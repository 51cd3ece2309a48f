"""The committed table of model families says what the passes do, family by family."""

from __future__ import annotations

import pytest

from benchmarks.families import OWN_CODE, TABLE, families, looked_at, summary
from tests.corpus.families import OTHERS, REQUIRED, STAGED, available

LINES = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
ROWS = LINES[2:]


@pytest.mark.parametrize("family", ["muse_spark", "inkling2", "llama4", "dbrx"])
def test_rows_are_true(family: str) -> None:
    """A sample; that all families of the shared forms are fused or staged is what the tests beside this one see."""
    if family not in families():
        pytest.skip(f"transformers has no {family}")
    for row in looked_at(family):
        assert str(row) in ROWS, f"{row}\nis not in {TABLE.name}: run python -m benchmarks models"


def test_every_family_has_its_rows() -> None:
    named = {row.split(" | ")[0].removeprefix("| ") for row in ROWS}
    assert named == {*REQUIRED, *OTHERS, *OWN_CODE}
    assert named >= set(families())


def test_all_shared_forms_are_fused_or_staged() -> None:
    for row in ROWS:
        family, form, blocks, *_ = row.removeprefix("| ").split(" | ")
        if form != "own":
            assert form == "grouped_mm, batched_mm" and "refused" not in blocks, row
            assert ("staged" in blocks) == (family in STAGED), row


def test_doge_is_left_alone() -> None:
    """Its experts are rows of embeddings, chosen by product keys: no experts of two projections."""
    if not available("mixtral") or "doge" not in families():
        pytest.skip("transformers has no doge")
    (row,) = looked_at("doge")
    if "must be Tensor, not tuple" in row.why:
        pytest.skip("this transformers cannot run it")
    assert (row.blocks, row.why) == ("none found", "")
    assert summary([row]) == "Families with experts of their own: 1 without a block."
