"""Races that Triton's own code is reported for are told from those of ours."""

from __future__ import annotations

from tests.cuda.racecheck import BEGINNINGS, ORDERED, races_told


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
    first, second = (sorted(places) for places in ORDERED[1:3])
    assert told((first[0], first[-1]), (second[0], second[-1])) == []
    assert told((first[0], second[0])) == [[first[0], second[0]]]


def test_what_warps_tell_one_another_is_found_where_it_is_stored_and_loaded():
    assert all(len(places) >= 2 for places in ORDERED)
    assert not any(one & other for at, one in enumerate(ORDERED) for other in ORDERED[:at])
