"""Which kernels a function launches, read from a captured CUDA graph.

A captured graph is the exact list of what a replay will run: nothing is sampled, nothing outside the function is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe_ops.capture import captured, warm_up

WARMUP_CALLS = 3  # compilation, tuning and lazy handles all happen in the first calls


def kernel_names(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Names of the GPU work that one call of `function(*args, **kwargs)` launches, in launch order.

    The function is called a few times, then captured in a CUDA graph whose nodes are listed through cuda-python. A
    function that cannot be captured (it synchronises, say) is listed by the profiler instead.

    Returns:
        One name per kernel; copies and fills that are not kernels appear as "memcpy" and "memset".

    Raises:
        RuntimeError: there is no CUDA device, or `function` itself fails.

    Example:
        >>> kernel_names(torch.relu, torch.ones(4, device="cuda"))  # doctest: +SKIP
        ['void at::native::vectorized_elementwise_kernel...']
    """
    if not torch.cuda.is_available():
        raise RuntimeError("kernel_names: there are no GPU kernels to list without a CUDA device.")
    call = partial(function, *args, **kwargs)
    warm_up(call, WARMUP_CALLS)
    try:
        from cuda.bindings import driver, runtime  # noqa: F401

        graph, _ = captured(call, keep_graph=True)
        return graph_kernel_names(graph)
    except (ImportError, RuntimeError):
        return profiled_kernel_names(function, *args, **kwargs)


def graph_kernel_names(graph: torch.cuda.CUDAGraph) -> list[str]:
    """The same list for a graph that was captured with `torch.cuda.CUDAGraph(keep_graph=True)`."""
    from cuda.bindings import driver, runtime

    handle = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, count = _checked(runtime.cudaGraphGetNodes(handle))
    nodes, count = _checked(runtime.cudaGraphGetNodes(handle, count))
    kinds = driver.CUgraphNodeType  # the runtime does not know what a stream itself does with memory
    names = []
    for node in nodes[:count]:
        (kind,) = _checked(driver.cuGraphNodeGetType(driver.CUgraphNode(int(node))))
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            names.append(_kernel_name(node))
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            names.append("memcpy")
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            names.append("memset")
    return names


def profiled_kernel_names(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The same list from torch.profiler, for functions that cannot be captured."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function(*args, **kwargs)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    events = [event for event in profile.events() if event.device_type == cuda]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def _kernel_name(node: Any) -> str:
    """The function name of a kernel node; newer libraries launch a CUkernel, where the CUfunction is null."""
    from cuda.bindings import driver

    (params,) = _checked(driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(int(node))))
    if int(params.func):
        (name,) = _checked(driver.cuFuncGetName(params.func))
    else:
        (name,) = _checked(driver.cuKernelGetName(params.kern))
    return name.decode() if isinstance(name, bytes) else str(name)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Strip the status of a cuda-python call, or raise it."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"kernel_names: {status.name} while reading a CUDA graph.")
    return tuple(values)
