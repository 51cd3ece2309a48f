"""What is said of repeated measurements: their median, and an interval that holds the true one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
FEWEST = 15  # samples: with fewer the interval is little less than the whole range


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): order statistics between which the median lies with 95 % at least, for any distribution.

    The k-th smallest and the k-th largest miss it only when fewer than k samples fall on one side, so k is the largest
    with ``2 P(Binomial(n, 1/2) < k) <= 5 %``: 4 of 15, 6 of 21. Below six samples there is none: the range is given.
    """
    ordered = sorted(samples)
    n, k, tail = len(ordered), 0, 0.0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - CONFIDENCE:
            break
        k += 1
    k = max(k, 1)
    return statistics.median(ordered), ordered[k - 1], ordered[n - k]


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """`median_interval` of ours / theirs, round by round: what slows a whole round down is in both."""
    return median_interval([mine / other for mine, other in zip(ours, theirs, strict=True)])


def fields(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    """An interval as it stands in a result row: ``name``, ``name_low``, ``name_high``."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def enough_rounds(rounds: int) -> int:
    """``rounds``.

    Raises:
        ValueError: fewer than an interval needs.
    """
    if rounds < FEWEST:
        raise ValueError(
            f"benchmarks: --rounds must be at least {FEWEST}, which an interval of 95 % needs, got {rounds}. Leave it "
            "out, or time fewer shapes, tokens or rows to save time."
        )
    return rounds
