"""The transport ``symm``: memory of every GPU that the others write to, and an operator that exchanges rows by it.

The operator is functional: its results are new tensors. The buffers behind it belong to the process group; they are
made at the first call on all ranks, and again for a larger one, which must not be in a CUDA graph's capture.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meta.checks import fail
from moe_ops import compat
from moe_ops.agreement import exchange_texts
from moe_ops.groups import Group, constant, process_group, resolve

_OP = "ep.prepare"
_LEAST = 1 << 18  # words of a slot: one megabyte


@dataclass(frozen=True)
class _Buffers:
    """What a group's ranks share.

    Attributes:
        memory, handle: of torch's symmetric memory; kept alive.
        peers: int64 ``[W]``, every rank's address of it.
        calls: int32, calls so far, by program.
        slot: words for one rank.
    """

    memory: Tensor
    handle: Any
    peers: Tensor
    calls: Tensor
    slot: int


#: By group and device; a graph that was captured goes on using those that it was captured with.
_held: dict[tuple[str, torch.device], list[_Buffers]] = {}
_available: dict[str, bool] = {}


@constant
def available(name: str) -> bool:
    """Whether the ranks of group ``name`` can write into each other's GPUs: they try it, once, at the same call."""
    known = _available.get(name)
    if known is not None or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return bool(known)
    group = resolve(_OP, name)
    if group.size > 1 and "nccl" in dist.get_backend_config(process_group(name)):
        hosts = exchange_texts(_OP, group, f"host {socket.gethostname()}")
        _available[name] = len(set(hosts)) == 1 and _all_can(group)
    return _available.setdefault(name, False)


def _all_can(group: Group) -> bool:
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with compat.without_fake_tensors():
            _buffers(group, 1, device)
        tried = "works"
    except RuntimeError as failure:
        tried = str(failure)
    return set(exchange_texts(_OP, group, tried)) == {"works"}


def _buffers(group: Group, words: int, device: torch.device) -> _Buffers:
    held = _held.setdefault((group.name, device), [])
    if not held or held[-1].slot < words:
        if torch.cuda.is_current_stream_capturing():
            cure = "Run the layer once, with as many tokens, before the capture."
            raise fail(_OP, "transport", "one that has its buffers", "'symm' inside a CUDA graph's capture", cure)
        held.append(_make(group, max(_LEAST, 1 << (words - 1).bit_length()), device))
    return held[-1]


def _make(group: Group, slot: int, device: torch.device) -> _Buffers:
    """A collective: every rank of the group comes here at the same call."""
    from torch.distributed import _symmetric_memory as symmetric

    from moe_ops.kernels.triton.push import PROGRAMS, flag_words

    memory = symmetric.empty(flag_words(group.size) + 2 * group.size * slot, dtype=torch.int32, device=device)
    memory[: flag_words(group.size)].zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(memory, process_group(group.name))
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    dist.barrier(process_group(group.name))  # no rank writes a flag that another one is about to clear
    return _Buffers(memory, handle, peers, torch.zeros(PROGRAMS, dtype=torch.int32, device=device), slot)


def _symm_exchange(tensors: list[Tensor], *, group: str, gather: bool) -> list[Tensor]:
    from moe_ops.kernels.triton.push import exchange

    members = resolve(_OP, group)
    size = members.size
    sent, received = [], []
    for tensor in tensors:
        flat = tensor.reshape(1 if gather else size, -1)
        if flat.shape[1] % 4:  # words of four bytes
            flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4))
        sent.append(flat.contiguous().view(torch.int32).view(-1))
        received.append(sent[-1].new_empty(sent[-1].shape[0] * (size if gather else 1)))
    words = sum((out.shape[0] // size + 3) // 4 * 4 for out in received)
    held = _buffers(members, words, tensors[0].device)
    exchange(held.peers, held.calls, size * held.slot, held.slot, sent, received, members.rank, gather)
    return [_unpadded(out, tensor, size, gather) for out, tensor in zip(received, tensors, strict=True)]


def _unpadded(words: Tensor, tensor: Tensor, size: int, gather: bool) -> Tensor:
    """Bytes ``[W * T, ...]`` or ``[W * C, ...]`` of what was received, as ``tensor`` was sent."""
    one = tensor.numel() // (1 if gather else size)
    parts = words.view(torch.uint8).view(size, -1)
    parts = parts if parts.shape[1] == one else parts[:, :one].contiguous()
    return parts.view(-1, *tensor.shape[1:])


def _symm_exchange_fake(tensors: list[Tensor], *, group: str, gather: bool) -> list[Tensor]:
    size = resolve(_OP, group).size if gather else 1
    return [tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:]) for tensor in tensors]


_library = torch.library.Library("moe_ops", "FRAGMENT")
_library.define(
    "symm_exchange(Tensor[] tensors, *, str group, bool gather) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("symm_exchange", _symm_exchange, "CUDA")
torch.library.register_fake("moe_ops::symm_exchange", _symm_exchange_fake, lib=_library)


def start(tensors: list[Tensor], group: Group, *, gather: bool) -> list[Tensor]:
    """Bytes of every rank's tensors, ``[W * T, ...]``; unless ``gather``, blocks of ``[W * C, ...]`` in rank order."""
    received: list[Tensor] = torch.ops.moe_ops.symm_exchange(tensors, group=group.name, gather=gather)
    return received
