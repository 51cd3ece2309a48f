"""Large exchanges among GPUs of one host: copy engines move the bytes, on a stream of their own.

No multiprocessor works for them, so what the caller runs meanwhile keeps its pace. Every rank has three slots that the
others write to, each with a part for every rank: two for copies, which calls take by turns, and one for the results of
whole layers, which kernels write. A slot is written when all its readers have told that they are done with what was
there, and read when its writers have told that they are; both are counted on the GPU, so that graphs replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meta.checks import fail
from moe_ops.groups import Group
from moe_ops.symmetric_memory import Shared, share

#: Bytes for one rank from which copy engines move them. us of an exchange between two H100s: one kernel takes 14 for
#: 2 MiB and 80 for 16; copies take 46 for 16 and some 15 beside that, whatever the size.
LARGE = 4 << 20
_COPIES, _RESULTS = 2, 2  # how many slots are for copies; which one is for results
_READY, _FREE = 0, 1
_ALIGNMENT = 256


class Arriving(NamedTuple):
    """What copy engines are moving.

    Attributes:
        tensors: where it arrives.
        event: after which it is there.
        sent: kept until then.
    """

    tensors: list[Tensor]
    event: torch.cuda.Event
    sent: Sequence[Tensor]


@dataclass
class Slots:
    """One group's slots on one GPU.

    Attributes:
        shared: the memory.
        buffers: uint8, that of every rank, as this process reaches it.
        told, taken: int32 ``[slots]``, uses of this rank's slots that it told as a writer, and as a reader.
        size: bytes of one rank's part of a slot.
        stream: of the copies.
        turn: copies so far.
    """

    group: Group
    shared: Shared
    buffers: list[Tensor]
    told: Tensor
    taken: Tensor
    size: int
    stream: torch.cuda.Stream
    turn: int = 0

    def _part(self, rank: int, slot: int, writer: int) -> Tensor:
        """The bytes of ``writer`` in a slot of ``rank``."""
        first = 4 * _front_words(self.group.size) + (slot * self.group.size + writer) * self.size
        return self.buffers[rank][first : first + self.size]

    def _flags(self, slot: int, kind: int) -> int:
        return (2 * slot + kind) * self.group.size

    def _tell(self, slot: int, kind: int) -> None:
        from moe_ops.kernels.triton import deliver

        count = (self.told if kind == _READY else self.taken)[slot : slot + 1]
        deliver.tell(self.shared.peers, count, self._flags(slot, kind), self.group.rank)

    def _wait(self, slot: int, kind: int) -> None:
        from moe_ops.kernels.triton import deliver

        count, more = (self.taken, 1) if kind == _READY else (self.told, 0)
        at = self._flags(slot, kind)
        deliver.wait_for(self.shared.peers, count[slot : slot + 1], at, self.group.rank, more)

    def start(self, sent: Sequence[Tensor], *, gather: bool, results: bool = False) -> Arriving:
        """Begin to move bytes; who reads them waits for the event first.

        Args:
            sent: uint8, flat and contiguous: as much for every rank, in rank order, or ``gather`` the same for all. Not
                to be changed before the event.
            results: the event stands for a free slot of results, too.
        """
        size, rank, slot = self.group.size, self.group.rank, self.turn % _COPIES
        self.turn += 1
        one = [tensor.shape[0] // (1 if gather else size) for tensor in sent]
        tensors = [tensor.new_empty(size * number) for tensor, number in zip(sent, one, strict=True)]
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            if results:
                self._wait(_RESULTS, _FREE)
            self._wait(slot, _FREE)
            for step in range(1, size):
                peer = (rank + step) % size
                places = _split(self._part(peer, slot, rank), one)
                for tensor, place, number in zip(sent, places, one, strict=True):
                    place.copy_(tensor if gather else tensor[peer * number : (peer + 1) * number])
            self._tell(slot, _READY)
            for tensor, out, number in zip(sent, tensors, one, strict=True):
                own = tensor if gather else tensor[rank * number : (rank + 1) * number]
                out[rank * number : (rank + 1) * number].copy_(own)
            self._wait(slot, _READY)
            for step in range(1, size):
                peer = (rank + step) % size
                places = _split(self._part(rank, slot, peer), one)
                for out, place, number in zip(tensors, places, one, strict=True):
                    out[peer * number : (peer + 1) * number].copy_(place)
            self._tell(slot, _FREE)
            event = torch.cuda.Event()
            event.record(self.stream)
        return Arriving(tensors, event, sent)

    def deliver(
        self, rows: Tensor, pair_to_row: Tensor | None, topk_weights: Tensor | None, *, first: int, tokens: int
    ) -> None:
        """Sums over pairs into the slots of results; see :func:`moe_ops.kernels.triton.deliver.deliver`."""
        from moe_ops.kernels.triton import deliver

        at = (4 * _front_words(self.group.size) + _RESULTS * self.group.size * self.size) // rows.element_size()
        deliver.deliver(
            rows, pair_to_row, topk_weights, peers=self.shared.peers, at=at, tokens=tokens, first=first,
            rank=self.group.rank,
        )  # fmt: skip

    def results(self, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[tokens, width]``: what all ranks delivered for this one's tokens, in rank order and fp32, rounded once."""
        from moe_ops.kernels.triton import deliver

        self._tell(_RESULTS, _READY)
        self._wait(_RESULTS, _READY)
        number = self.group.size * tokens * width * dtype.itemsize
        first = 4 * _front_words(self.group.size) + _RESULTS * self.group.size * self.size
        parts = self.buffers[self.group.rank][first : first + number].view(dtype).view(-1, tokens, width)
        out = deliver.sum_parts(parts)
        self._tell(_RESULTS, _FREE)
        return out


def _front_words(size: int) -> int:
    """Words before the slots: flags, then both counts."""
    words = 2 * (_COPIES + 1) * (size + 1)
    return -(-words // (_ALIGNMENT // 4)) * (_ALIGNMENT // 4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _split(part: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Where tensors of so many bytes stand in a rank's part."""
    places, first = [], 0
    for size in sizes:
        places.append(part[first : first + size])
        first += _aligned(size)
    return places


def part_of(sizes: Sequence[int]) -> int:
    """Bytes of a part that holds tensors of so many."""
    return sum(map(_aligned, sizes))


#: By group and device; a graph that was captured goes on using those that it was captured with.
_held: dict[tuple[str, torch.device], list[Slots]] = {}


def slots_for(op: str, group: Group, size: int, device: torch.device) -> Slots:
    """Slots whose parts have at least ``size`` bytes; a collective where they must be made.

    Raises:
        ValueError: they must be made inside the capture of a CUDA graph.
    """
    held = _held.setdefault((group.name, device), [])
    if not held or held[-1].size < size:
        if torch.cuda.is_current_stream_capturing():
            cure = "Run the layer once, with as many tokens, before the capture."
            raise fail(op, "transport", "one that has its buffers", "'symm' inside a CUDA graph's capture", cure)
        held.append(_make(group, max(LARGE, 1 << (size - 1).bit_length()), device))
    return held[-1]


def _make(group: Group, size: int, device: torch.device) -> Slots:
    front = _front_words(group.size)
    shared = share(group, front, front + (_COPIES + 1) * group.size * size // 4, device)
    buffers = [buffer.view(torch.uint8) for buffer in shared.buffers]
    flags = 2 * (_COPIES + 1) * group.size
    told, taken = (shared.memory[flags + (_COPIES + 1) * number :][: _COPIES + 1] for number in range(2))
    return Slots(group, shared, buffers, told, taken, size, torch.cuda.Stream(device, priority=-1))


def start(op: str, sent: Sequence[Tensor], group: Group, *, gather: bool) -> Arriving | None:
    """:meth:`Slots.start`, or None where it is not worth copies."""
    sizes = [tensor.shape[0] // (1 if gather else group.size) for tensor in sent]
    if sum(sizes) < LARGE:
        return None
    return slots_for(op, group, part_of(sizes), sent[0].device).start(sent, gather=gather)
