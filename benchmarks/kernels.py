"""Time of each kernel of a layer, from torch's profiler."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import torch

from benchmarks.timing import Thunk

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


def short_name(name: str) -> str:
    """A kernel's own name, without the template arguments, parameters and namespaces of C++."""
    plain = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0].strip()
    return plain.split("::")[-1] or name[:40]
