"""CUDA graphs of calls that may turn out not to be capturable.

torch (2.11 to 2.13) lets go of nothing when a capture fails: the stream of the capture stays the current one, the
device's generator refuses to draw ("Offset increment outside graph capture"), and the allocator goes on to ask for each
allocation whether it belongs to the graph. A process that asks whether something can be captured has to go on after
the answer no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


def warm_up(function: Callable[[], Any], calls: int = 1) -> None:
    """Call it on another stream than the current one, as what is to be captured has to be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(calls):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def captured(function: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `function()` and what it returned, which replays write. `options` are those of CUDAGraph.

    Raises:
        RuntimeError: torch's, where something cannot be captured; what was current before is so again.
    """
    graph, pool = torch.cuda.CUDAGraph(**options), torch.cuda.graph_pool_handle()
    try:
        with contained(), torch.cuda.graph(graph, pool=pool):
            outputs = function()
    except RuntimeError:
        leave_pool(pool)
        raise
    return graph, outputs


@contextmanager
def contained() -> Iterator[None]:
    """Captures inside may fail: the current stream is what it was afterwards, and the generators of all devices are.

    What is drawn inside comes from copies of the generators' states, which a failed capture makes useless.
    """
    stream = torch.cuda.current_stream()
    states = [(generator, generator.graphsafe_get_state()) for generator in torch.cuda.default_generators]
    for generator, _ in states:
        generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)
        for generator, state in states:
            generator.graphsafe_set_state(state)


def leave_pool(pool: tuple[int, int] | None) -> None:
    """End a failed capture's allocations on the current device, where torch has not done it."""
    if pool is None:
        return
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # that it is not allocating there
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def first_cause(error: BaseException) -> BaseException:
    """What ended a capture: torch raises once more, of any reason, when the capture is closed."""
    while error.__context__ is not None:
        error = error.__context__
    return error
