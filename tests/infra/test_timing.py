"""How the benchmarks time and what they say of it: rounds, intervals, ratios, flags, kernels."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import kernels, layers, timing
from benchmarks.cases import layer_weights, make_case
from benchmarks.intervals import median_interval, ratio_interval
from benchmarks.peers import PEERS
from benchmarks.results import why
from benchmarks.shapes import TINY_SHAPES

TINY = TINY_SHAPES["tiny-qwen3"]


def clock_that_thunks_move(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which perf_counter reads."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return now


@pytest.mark.parametrize("count", range(1, 8))
def test_each_follows_every_other_one_equally_often(count: int) -> None:
    names = "abcdefg"[:count]
    rounds = [timing.balanced(names, number) for number in range(count * (1 + count % 2))]
    assert all(sorted(order) == list(names) for order in rounds)
    followed = Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert set(followed) == set(itertools.permutations(names, 2)) and len(set(followed.values())) <= 1


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes before a call is not timed; repetition is divided out."""
    now, order = clock_that_thunks_move(monkeypatch), []

    def run(name: str, us: float) -> timing.Run:
        def call() -> None:
            order.append(name)
            now[0] += us * 1e-6

        def before() -> None:
            now[0] += 1.0

        return timing.Run(call, before, repeats=2 if name == "b" else 1)

    samples = timing.in_turn({name: run(name, us) for name, us in (("a", 3), ("b", 5), ("c", 7))}, 3)
    assert "".join(order) == "abbc" + "bbca" + "cabb"
    for name, us in (("a", 3), ("b", 5), ("c", 7)):
        assert samples[name] == pytest.approx([us] * 3, rel=1e-3)


def test_rounds_end_with_the_budget_but_not_before_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock_that_thunks_move(monkeypatch)

    def call() -> None:
        now[0] += 0.3

    runs = {"slow": timing.Run(call)}
    assert timing.cpu_budget(runs) == timing.CPU_BUDGET_S
    assert [len(timing.in_turn(runs, 9, budget_s=budget)["slow"]) for budget in (0.1, 1.0, None)] == [3, 4, 9]


def test_a_sample_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock_that_thunks_move(monkeypatch)

    def call() -> None:
        now[0] += 30e-6

    assert timing.repeated(timing.Run(call)).repeats == 7  # of 30 us: more than 0.2 ms


@pytest.mark.parametrize(
    ("samples", "expected"), [(range(15), (7, 3, 11)), (range(21), (10, 5, 15)), (range(3), (1, 0, 2))]
)
def test_interval_of_the_median(samples: range, expected: tuple[int, int, int]) -> None:
    """The order statistics of the sign test's tables; the range where there are too few."""
    assert median_interval([float(us) for us in reversed(samples)]) == expected


def test_ratio_is_taken_round_by_round() -> None:
    """Rounds that are slow for both change nothing; the ratio of the medians would be 1.5."""
    ours, theirs = [1.0, 9.0, 3.0], [2.0, 2.0, 6.0]
    assert ratio_interval(ours, theirs) == (0.5, 0.5, 4.5)


def test_times_of_rows_are_of_one_input_set_and_a_fast_whole_is_flagged() -> None:
    rows: dict[str, dict[str, Any]] = {name: {} for name in ("ours", "ours_experts", "hf_grouped")}
    samples = {"ours": [40.0] * 15, "ours_experts": [44.0] * 15, "hf_grouped": [80.0] * 15}
    layers.add_times(rows, samples, 4, "ours")
    assert [rows[name]["us"] for name in rows] == [10.0, 11.0, 20.0]
    assert (rows["hf_grouped"]["ratio"], rows["hf_grouped"]["ratio_low"]) == (0.5, 0.5)
    assert rows["ours"]["flag"] == "ours is faster than its part ours_experts: 10.0 against 11.0 us"
    samples["ours"] = [40.0, 46.0] * 7 + [43.0]
    layers.add_times(again := {name: {} for name in samples}, samples, 4, "ours")
    assert not any("flag" in row for row in again.values()), "the intervals overlap"


def test_a_peer_that_fails_is_a_row_and_the_others_go_on() -> None:
    def fails(case: Any) -> list[timing.Thunk]:
        raise torch.OutOfMemoryError("made up")

    peers = [replace(PEERS["grouped_mm"], name="fails", prepare=fails), PEERS["ours"]]
    plan = layers.Plan([TINY], [1], peers, rounds=15)
    failed, ours = layers.time_case(make_case(layer_weights(TINY, torch.bfloat16, "cpu"), 1), plan)
    assert (failed["us"], failed["reason"]) == (None, "out of memory")
    assert plan.reference == "ours" and ours["us"] > 0


def test_kernels_are_added_up_by_replay_and_set() -> None:
    names = ["void ns::gemm<int, 4>(float)", "void ns::gemm<int, 4>(float)", "_topk_kernel"]
    launches = [(name, us) for us in (2.0, 8.0, 4.0) for name in names]
    assert kernels.by_name(launches, 3, 2) == {"gemm": 4.0, "_topk_kernel": 2.0}
    assert kernels.by_name([("lost", 6.0)], 3, 2) == {"lost": 1.0}, "the mean where launches are missing"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("out of luck\nsecond line", "RuntimeError: out of luck"),
        ("at 26:15:\n    x = arange(0, N)\narange's range must be a power of 2", "RuntimeError: arange's range"),
        ("", "RuntimeError: "),
    ],
    ids=["first_line", "last_line", "silent"],
)
def test_the_reason_of_a_failure_is_its_telling_line(message: str, reason: str) -> None:
    assert why(RuntimeError(message)).startswith(reason)
