"""Tiles that an expert's rows should fill, against the binomial distribution summed in full."""

from __future__ import annotations

import math

import pytest

from meta.cost import row_tiles


def summed(T: int, share: float, rows: int, tall_rows: int) -> tuple[float, float]:
    short = tall = 0.0
    for n in range(T + 1):
        probability = math.comb(T, n) * share**n * (1 - share) ** (T - n)
        height = tall_rows or rows
        for first in range(0, n, height):
            is_short = min(height, n - first) <= rows
            short, tall = short + probability * is_short, tall + probability * (not is_short)
    return short, tall


@pytest.mark.parametrize("tall_rows", [0, 64], ids=["one_height", "two_heights"])
@pytest.mark.parametrize("T, share", [(1, 0.25), (7, 0.5), (64, 1 / 16), (300, 1 / 8), (900, 0.2), (40, 1.0)], ids=str)
def test_tiles_are_those_of_the_binomial_distribution(T: int, share: float, tall_rows: int) -> None:
    assert row_tiles(T, share, 16, tall_rows) == pytest.approx(summed(T, share, 16, tall_rows), abs=1e-4)


@pytest.mark.parametrize("tall_rows", [0, 64], ids=["one_height", "two_heights"])
def test_the_last_of_many_tiles_is_half_full(tall_rows: int) -> None:
    found, wanted = row_tiles(1000, 0.25, 16, tall_rows), summed(1000, 0.25, 16, tall_rows)
    assert sum(found) == pytest.approx(sum(wanted), rel=0.03)
    assert found[0] == pytest.approx(wanted[0], rel=0.1)
