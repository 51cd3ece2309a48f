"""Memory of every GPU of a group that the group's other GPUs write to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meta.checks import fail
from moe_ops import compat
from moe_ops.agreement import exchange_texts
from moe_ops.compat import constant_in_graphs
from moe_ops.groups import Group, PerGroup, process_group, resolve
from moe_ops.stream_ops import submit, wait_equal, write


class Shared(NamedTuple):
    """What a group's ranks share.

    Attributes:
        memory: int32, this rank's buffer.
        handle: of torch's symmetric memory; kept alive.
        buffers: every rank's memory, as this process reaches it.
        peers: int64 ``[W]``, the addresses of these.
    """

    memory: Tensor
    handle: Any
    buffers: list[Tensor]
    peers: Tensor


def share(group: Group, front: Tensor, words: int, device: torch.device) -> Shared:
    """Buffers of as many words on every rank, the first of which are those of ``front``. A collective.

    The addresses are kept behind them: memory of torch's own allocator may belong to a CUDA graph.
    """
    from torch.distributed import _symmetric_memory as symmetric

    words = -(-words // 4) * 4
    memory = symmetric.empty(words + 2 * group.size, dtype=torch.int32, device=device)
    memory[: front.shape[0]].copy_(front)
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(memory, process_group(group.name))
    peers = memory[words:].view(torch.int64)
    peers.copy_(torch.tensor(handle.buffer_ptrs, dtype=torch.int64))
    buffers = [
        memory if rank == group.rank else handle.get_buffer(rank, memory.shape, memory.dtype)
        for rank in range(group.size)
    ]
    dist.barrier(process_group(group.name))  # no rank writes a flag that another one is about to clear
    return Shared(memory, handle, buffers, peers)


class _Sized(Protocol):
    @property
    def size(self) -> int:
        """How much it has room for."""


Buffers = TypeVar("Buffers", bound=_Sized)


def at_least(op: str, transport: str, held: list[Buffers], size: int, make: Callable[[int], Buffers]) -> Buffers:
    """The last of ``held`` if it has room for ``size``, else one more, made for the next power of two: a collective.

    The others stay: a graph that was captured goes on using those that it was captured with.

    Raises:
        ValueError: one must be made inside the capture of a CUDA graph.
    """
    if not held or held[-1].size < size:
        if torch.cuda.is_current_stream_capturing():
            cure = "Run the layer once, with as many tokens, before the capture."
            got = f"{transport!r} inside a CUDA graph's capture"
            raise fail(op, "transport", "one that has its buffers", got, cure)
        held.append(make(1 << (size - 1).bit_length()))
    return held[-1]


#: What was found out of a group, at most one answer.
_available: PerGroup[list[bool]] = PerGroup(list)


@constant_in_graphs
def available(op: str, name: str) -> bool:
    """Whether the ranks of group ``name`` can write into each other's GPUs: they try it, once, at the same call."""
    known = _available[name]
    if known or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return known == [True]
    group, found = resolve(op, name), False
    if group.size > 1 and "nccl" in dist.get_backend_config(process_group(name)):
        hosts = exchange_texts(op, group, f"host {socket.gethostname()}")
        found = len(set(hosts)) == 1 and _all_can(op, group)
    known.append(found)
    return found


def _all_can(op: str, group: Group) -> bool:
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with compat.without_fake_tensors():
            memory = share(group, torch.zeros(4, dtype=torch.int32), 4, device).memory
            submit(torch.cuda.current_stream(device), [write(memory.data_ptr(), 1), wait_equal(memory.data_ptr(), 1)])
        tried = "works"
    except RuntimeError as failure:
        tried = str(failure)
    return set(exchange_texts(op, group, tried)) == {"works"}
