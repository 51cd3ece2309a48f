"""Races that Triton's own code is reported for are told from those of ours."""

from __future__ import annotations

from tests.cuda.racecheck import BEGINNINGS, races_told


def test_races_of_what_triton_adds_are_told_from_ours():
    triton, ours = sorted(BEGINNINGS)[0], "decoded_mm.py:1"
    race = (
        "========= Error: Race reported between Read access at _k+0x10 in {}\n"
        "=========     and Write access at _k+0x20 in {}"
    )
    summary = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)"

    def told(*races: tuple[str, str], summed: int | None = None) -> list[list[str]]:
        text = "\n".join([*(race.format(*places) for places in races), summary.format(summed or len(races))])
        return races_told(text.splitlines())

    assert told((triton, triton)) == []
    assert told((triton, triton), (triton, ours)) == [[triton, ours]]
    assert told((triton, triton), summed=2) == [["more races than are told"]]
