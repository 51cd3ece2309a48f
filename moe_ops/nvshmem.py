"""The transport ``nvshmem``: rows travel alone, counted on the GPUs, by torch's ``all_to_all_vdev_2d`` over NVSHMEM.

For groups of several hosts with many ranks: a rank gets the rows that it was sent and no others, so that fewer bytes
cross than ``gather`` sends, and nothing is dropped as ``all_to_all`` may. It is there where torch's symmetric memory is
NVSHMEM's, which is said before a process starts: ``TORCH_SYMMMEM=NVSHMEM``. It has no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meta.checks import fail
from moe_ops.groups import Group, constant, process_group, resolve

_OP = "ep.prepare"
MOST_RANKS = 16  # that torch's kernel takes
_MOST = 4  # tensors of one call


@constant
def available(name: str) -> bool:
    """Whether torch's symmetric memory is NVSHMEM's here, for a group over NCCL."""
    from torch.distributed import _symmetric_memory as symmetric

    if not torch.cuda.is_available() or "nccl" not in dist.get_backend_config(process_group(name)):
        return False
    return symmetric.get_backend(torch.device("cuda", torch.cuda.current_device())) == "NVSHMEM"


class _Buffer(NamedTuple):
    """Symmetric memory for rows of one width: what is sent and what is received, uint8 ``[rows, width]``."""

    sent: Tensor
    received: Tensor


class _Buffers(NamedTuple):
    """Of a group.

    Attributes:
        rows: by number among the tensors of a call, and width.
        given: int64 ``[2, W]``, how many rows go to every rank, and where they begin; and zeros.
        made: the same of rows that came, for every tensor of a call its own: ranks write into those of each other.
    """

    rows: dict[tuple[int, int], _Buffer]
    given: list[Tensor]
    made: list[Tensor]


#: By group and device; a graph that was captured goes on using those that it was captured with.
_held: dict[tuple[str, torch.device], _Buffers] = {}
_kept: list[_Buffer] = []


def _buffers(group: Group, device: torch.device) -> _Buffers:
    from torch.distributed import _symmetric_memory as symmetric

    held = _held.get((group.name, device))
    if held is None:
        _refuse_capture()
        words = [symmetric.empty(2, group.size, dtype=torch.int64, device=device) for _ in range(_MOST + 3)]
        for tensor in words:
            symmetric.rendezvous(tensor.zero_(), process_group(group.name))
        held = _held[group.name, device] = _Buffers({}, words[:2], words[2:])
    return held


def _buffer(held: _Buffers, group: Group, number: int, rows: int, width: int, device: torch.device) -> _Buffer:
    from torch.distributed import _symmetric_memory as symmetric

    known = held.rows.get((number, width))
    if known is None or known.sent.shape[0] < rows:
        _refuse_capture()
        size = (1 << (rows - 1).bit_length(), width)
        known = _Buffer(*(symmetric.empty(*size, dtype=torch.uint8, device=device) for _ in range(2)))
        for tensor in known:
            symmetric.rendezvous(tensor, process_group(group.name))
        held.rows[number, width] = known
        _kept.append(known)
    return known


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        cure = "Run the layer once, with as many tokens, before the capture."
        raise fail(_OP, "transport", "one that has its buffers", "'nvshmem' inside a CUDA graph's capture", cure)


def _nvshmem_exchange(tensors: list[Tensor], splits: Tensor, *, group: str) -> list[Tensor]:
    members, device = resolve(_OP, group), splits.device
    held, name, rows = _buffers(members, device), members.name, tensors[0].shape[0]
    exchange = torch.ops.symm_mem.all_to_all_vdev_2d_offset
    buffers = [_buffer(held, members, number, rows, tensor.shape[1], device) for number, tensor in enumerate(tensors)]
    held.given[0].copy_(splits)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.sent[:rows].copy_(tensor)
    for buffer, made in zip(buffers, held.made, strict=False):
        exchange(buffer.sent, buffer.received, held.given[0], made, name)
    out = [*(buffer.received[:rows].clone() for buffer in buffers), held.made[0].clone()]
    # A rank reads what the others sent: nobody may write there again before all have come here.
    exchange(buffers[0].sent, buffers[0].received, held.given[1], held.made[-1], name)
    return out


def _nvshmem_exchange_fake(tensors: list[Tensor], splits: Tensor, *, group: str) -> list[Tensor]:
    return [*(tensor.new_empty(tensor.shape) for tensor in tensors), splits.new_empty(splits.shape)]


_library = torch.library.Library("moe_ops", "FRAGMENT")
_library.define(
    "nvshmem_exchange(Tensor[] tensors, Tensor splits, *, str group) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("nvshmem_exchange", _nvshmem_exchange, "CUDA")
torch.library.register_fake("moe_ops::nvshmem_exchange", _nvshmem_exchange_fake, lib=_library)


def exchange(tensors: list[Tensor], splits: Tensor, group: Group) -> tuple[list[Tensor], Tensor]:
    """Rows of every tensor to the ranks that they are for.

    Args:
        tensors: ``[R, ...]`` each.
        splits: int64 ``[2, W]``: how many rows go to every rank, and where the first of them stands.

    Returns:
        ``[R, ...]`` each: what the ranks sent this one, in rank order, one behind the other, then what is of no use;
        and the splits of that, with which it goes back to where it was.
    """
    if tensors[0].shape[0] == 0:
        return tensors, splits
    flat = [tensor.detach().flatten(1).contiguous().view(torch.uint8) for tensor in tensors]
    *moved, made = torch.ops.moe_ops.nvshmem_exchange(flat, splits, group=group.name)
    return [there.view(own.dtype).view(own.shape) for there, own in zip(moved, tensors, strict=True)], made
