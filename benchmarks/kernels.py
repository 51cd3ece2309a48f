"""Kernels of a layer: the time of each, from torch's profiler, and how many a call launches, from a captured graph."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import torch

from benchmarks.kernel_names import short_name
from benchmarks.timing import Thunk
from moe_ops.census import kernel_names

REPLAYS = 5


def kernel_times(call: Thunk, sets: int) -> dict[str, float]:
    """Microseconds of one layer call by kernel, where ``call`` holds ``sets`` of them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return by_name([(event.name, event.time_range.elapsed_us()) for event in events], REPLAYS, sets)


def by_name(launches: Sequence[tuple[str, float]], replays: int, sets: int) -> dict[str, float]:
    """Microseconds a layer call by short name: all launches of that name in a replay, over the sets, the median replay.

    ``launches``: (name, microseconds) in the order of time. Where some were lost, the mean stands for the median.
    """
    durations: dict[str, list[float]] = {}
    for name, us in launches:
        durations.setdefault(short_name(name), []).append(us)
    times = {}
    for name, of_name in durations.items():
        size, rest = divmod(len(of_name), replays)
        totals = [sum(of_name[start : start + size]) for start in range(0, len(of_name), size)] if not rest else []
        times[name] = round((statistics.median(totals) if totals else sum(of_name) / replays) / sets, 3)
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def launches(forward: Thunk, step: Thunk) -> tuple[dict[str, int], dict[str, int]]:
    """(launches of a forward by short name, those of the backward alone), copies and fills included.

    Args:
        forward: that keeps what the backward needs.
        step: the same forward with its backward.
    """
    return by_pass(kernel_names(forward), kernel_names(step))


def by_pass(forward: Sequence[str], step: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """`launches` of the names of both, in any order: the backward has what the step has beyond the forward."""
    first, both = Counter(map(short_name, forward)), Counter(map(short_name, step))
    return dict(first), dict(both - first)
