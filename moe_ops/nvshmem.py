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

from moe_ops.compat import constant_in_graphs
from moe_ops.exchanges import as_bytes
from moe_ops.groups import Group, PerGroup, process_group, resolve
from moe_ops.symmetric_memory import at_least

_OP = "ep.prepare"
MOST_RANKS = 16  # that torch's kernel takes
_MOST = 4  # tensors of one call


@constant_in_graphs
def available(name: str) -> bool:
    """Whether torch's symmetric memory is NVSHMEM's here, for a group over NCCL."""
    from torch.distributed import _symmetric_memory as symmetric

    if not torch.cuda.is_available() or "nccl" not in dist.get_backend_config(process_group(name)):
        return False
    return symmetric.get_backend(torch.device("cuda", torch.cuda.current_device())) == "NVSHMEM"


class _Rows(NamedTuple):
    """Symmetric memory for rows of one width: what is sent and what is received, uint8 ``[size, width]``."""

    size: int
    sent: Tensor
    received: Tensor


class _Splits(NamedTuple):
    """Symmetric memory of a group, int64 ``[2, W]`` each.

    Attributes:
        size: W.
        given: how many rows go to every rank, and where they begin; and zeros.
        made: the same of rows that came, for every tensor of a call its own: ranks write into those of each other.
    """

    size: int
    given: list[Tensor]
    made: list[Tensor]


#: Of a group by device; of rows by number among the tensors of a call, and width, too.
_splits: PerGroup[dict[torch.device, list[_Splits]]] = PerGroup(dict)
_rows: PerGroup[dict[tuple[torch.device, int, int], list[_Rows]]] = PerGroup(dict)


def _empty(group: Group, number: int, *sizes: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """So many tensors of the group's symmetric memory, zeros. A collective."""
    from torch.distributed import _symmetric_memory as symmetric

    made = [symmetric.empty(*sizes, dtype=dtype, device=device).zero_() for _ in range(number)]
    for tensor in made:
        symmetric.rendezvous(tensor, process_group(group.name))
    return made


def _splits_of(group: Group, device: torch.device) -> _Splits:
    def make(size: int) -> _Splits:
        words = _empty(group, _MOST + 3, 2, group.size, dtype=torch.int64, device=device)
        return _Splits(group.size, words[:2], words[2:])

    return at_least(_OP, "nvshmem", _splits[group.name].setdefault(device, []), group.size, make)


def _rows_of(group: Group, number: int, rows: int, width: int, device: torch.device) -> _Rows:
    def make(size: int) -> _Rows:
        return _Rows(size, *_empty(group, 2, size, width, dtype=torch.uint8, device=device))

    return at_least(_OP, "nvshmem", _rows[group.name].setdefault((device, number, width), []), rows, make)


def _nvshmem_exchange(tensors: list[Tensor], splits: Tensor, *, group: str) -> list[Tensor]:
    members, device = resolve(_OP, group), splits.device
    held, name, rows = _splits_of(members, device), members.name, tensors[0].shape[0]
    exchange = torch.ops.symm_mem.all_to_all_vdev_2d_offset
    buffers = [_rows_of(members, number, rows, tensor.shape[1], device) for number, tensor in enumerate(tensors)]
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
    flat = [as_bytes(tensor.flatten(1)) for tensor in tensors]
    *moved, made = torch.ops.moe_ops.nvshmem_exchange(flat, splits, group=group.name)
    return [there.view(own.dtype).view(own.shape) for there, own in zip(moved, tensors, strict=True)], made
