"""Large exchanges among GPUs of one host: copy engines move the bytes, on streams of their own.

No multiprocessor works for them, so what the caller runs meanwhile keeps its pace. Every rank has slots that the others
write to: two for copies, which calls take by turns, and two of whole layers: for their tokens, and for their results,
which kernels write. A word says of a slot and another rank that it may be read (``ready``: that rank has written), for
copies another one that it may be written (``free``: that rank has read what was there); who waits for a word takes it
back, so that captured graphs replay. Layers need no second word: who has a rank's tokens knows that it is done with the
results of the layer before, and who has its results that it is done with the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.groups import Group, PerGroup
from moe_ops.stream_ops import Op, submit, wait_equal, write
from moe_ops.symmetric_memory import Shared, at_least, share

#: Bytes for one rank from which copy engines move them. us of an exchange between two H100s: by one kernel 14 for 2 MiB
#: and 80 for 16; by copies 46 for 16 and some 20 beside that, whatever the size.
LARGE = 4 << 20
_COPIES, _TOKENS, _RESULTS, _SLOTS = 2, 2, 3, 4  # how many are for copies; which are of layers; how many in all
_READY, _FREE = 0, 1
_ALIGNMENT = 256


class Arriving(NamedTuple):
    """What copy engines are moving.

    Attributes:
        tensors: uint8, flat: where the bytes of all ranks arrive, in rank order.
        event: after which they are there.
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
        size: bytes of a slot.
        stream, beside: of copies to other ranks, and of this rank's own part.
        turn: copies so far.
    """

    group: Group
    shared: Shared
    buffers: list[Tensor]
    size: int
    stream: torch.cuda.Stream
    beside: torch.cuda.Stream
    turn: int = 0

    @property
    def _others(self) -> list[int]:
        """The other ranks, this one's neighbour first: no two ranks begin with the same one."""
        return [(self.group.rank + step) % self.group.size for step in range(1, self.group.size)]

    def _word(self, rank: int, slot: int, kind: int, other: int) -> int:
        """Address of the word in the memory of ``rank`` that is about ``other``."""
        return self.buffers[rank].data_ptr() + 4 * ((2 * slot + kind) * self.group.size + other)

    def _say(self, slot: int, kind: int) -> list[Op]:
        return [write(self._word(other, slot, kind, self.group.rank), 1) for other in self._others]

    def _hear(self, slot: int, kind: int) -> Iterator[Op]:
        for other in self._others:
            word = self._word(self.group.rank, slot, kind, other)
            yield from (wait_equal(word, 1), write(word, 0))

    def _first(self, slot: int) -> int:
        """Where a slot begins in every rank's buffer, in bytes."""
        return _front_bytes(self.group.size) + slot * self.size

    def _slot(self, rank: int, slot: int) -> Tensor:
        return self.buffers[rank][self._first(slot) :][: self.size]

    def _places(self, rank: int, slot: int, numbers: Sequence[int]) -> list[Tensor]:
        """Where tensors of so many bytes for one rank stand in a slot: those of all ranks one behind the other."""
        memory, places = self._slot(rank, slot), []
        for number in numbers:
            places.append(memory[: self.group.size * number])
            memory = memory[_aligned(self.group.size * number) :]
        return places

    def _fork(self) -> None:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        self.beside.wait_stream(current)

    def _push(self, slot: int, sent: Sequence[Tensor], numbers: Sequence[int], gather: bool) -> None:
        """Copies into the other ranks' slots."""
        rank = self.group.rank
        with torch.cuda.stream(self.stream):
            for other in self._others:
                places = self._places(other, slot, numbers)
                for tensor, there, number in zip(sent, places, numbers, strict=True):
                    _part(there, number, rank).copy_(tensor if gather else _part(tensor, number, other))

    def _own(self, tensors: Sequence[Tensor], sent: Sequence[Tensor], numbers: Sequence[int], gather: bool) -> None:
        """This rank's part, beside the others; the stream of copies waits for it."""
        rank = self.group.rank
        with torch.cuda.stream(self.beside):
            for tensor, out, number in zip(sent, tensors, numbers, strict=True):
                _part(out, number, rank).copy_(tensor if gather else _part(tensor, number, rank))
        self.stream.wait_stream(self.beside)

    def start(self, sent: Sequence[Tensor], *, gather: bool) -> Arriving:
        """Begin to move bytes; who reads them waits for the event first.

        Args:
            sent: uint8, flat and contiguous: as much for every rank, in rank order, or ``gather`` the same for all. Not
                to be changed before the event.
        """
        slot, shares = self.turn % _COPIES, 1 if gather else self.group.size
        self.turn += 1
        numbers = [tensor.shape[0] // shares for tensor in sent]
        here = self._places(self.group.rank, slot, numbers)
        tensors = [there.new_empty(there.shape) for there in here]
        self._fork()
        submit(self.stream, [*self._hear(slot, _FREE)])
        self._push(slot, sent, numbers, gather)
        submit(self.stream, [*self._say(slot, _READY), *self._hear(slot, _READY)])
        with torch.cuda.stream(self.stream):
            for other in self._others:
                for out, there, number in zip(tensors, here, numbers, strict=True):
                    _part(out, number, other).copy_(_part(there, number, other))
        submit(self.stream, self._say(slot, _FREE))
        self._own(tensors, sent, numbers, gather)
        return Arriving(tensors, self.stream.record_event(), sent)

    def start_tokens(self, sent: Sequence[Tensor]) -> Arriving:
        """As :meth:`start` of what all ranks get, for a layer that reads it in the slot, behind :meth:`arrive`, before
        it asks for its :meth:`results`.
        """
        numbers = [tensor.shape[0] for tensor in sent]
        tensors = self._places(self.group.rank, _TOKENS, numbers)
        self._fork()
        self._push(_TOKENS, sent, numbers, True)
        submit(self.stream, self._say(_TOKENS, _READY))
        self._own(tensors, sent, numbers, True)
        return Arriving(tensors, self.stream.record_event(), sent)

    def arrive(self, arriving: Arriving) -> None:
        """The stream waits for all tokens."""
        self._meet(_TOKENS, say=False)
        torch.cuda.current_stream(self.stream.device).wait_event(arriving.event)

    def _meet(self, slot: int, *, say: bool) -> None:
        """By a kernel, which sees a word sooner than a stream does."""
        from moe_ops.kernels.triton.deliver import meet

        meet(self.shared.peers, (2 * slot + _READY) * self.group.size, self.group.rank, say=say)

    def deliver(
        self, rows: Tensor, pair_to_row: Tensor | None, topk_weights: Tensor | None, *, first: int, tokens: int
    ) -> None:
        """Sums over pairs into the slots of results; see :func:`moe_ops.kernels.triton.deliver.deliver`."""
        from moe_ops.kernels.triton.deliver import deliver

        at = self._first(_RESULTS) // rows.element_size()
        deliver(
            rows, pair_to_row, topk_weights, peers=self.shared.peers, at=at, tokens=tokens, first=first,
            rank=self.group.rank,
        )  # fmt: skip

    def results(self, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[tokens, width]``: what all ranks delivered for this one's tokens, in rank order and fp32, rounded once."""
        from moe_ops.kernels.triton.deliver import sum_parts

        self._meet(_RESULTS, say=True)
        parts = self._slot(self.group.rank, _RESULTS)[: self.group.size * tokens * width * dtype.itemsize]
        out: Tensor = sum_parts(parts.view(dtype).view(-1, tokens, width))
        return out


def _part(tensor: Tensor, number: int, rank: int) -> Tensor:
    """A rank's of bytes of all ranks, ``number`` of each."""
    return tensor[rank * number : (rank + 1) * number]


def _front_bytes(size: int) -> int:
    """Before the slots: their words."""
    return _aligned(4 * 2 * _SLOTS * size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def slot_bytes(sizes: Sequence[int], group: Group) -> int:
    """Of a slot for tensors of so many bytes for one rank."""
    return sum(_aligned(group.size * size) for size in sizes)


#: Of a group by device.
_held: PerGroup[dict[torch.device, list[Slots]]] = PerGroup(dict)


def slots_for(op: str, group: Group, size: int, device: torch.device) -> Slots:
    """Slots of at least ``size`` bytes; a collective where they must be made.

    Raises:
        ValueError: they must be made inside the capture of a CUDA graph.
    """
    held = _held[group.name].setdefault(device, [])
    return at_least(op, "symm", held, max(size, LARGE), lambda size: _make(group, size, device))


def _make(group: Group, size: int, device: torch.device) -> Slots:
    front = torch.zeros(_SLOTS, 2, group.size, dtype=torch.int32)
    front[:, _FREE] = 1
    shared = share(group, front.flatten(), (_front_bytes(group.size) + _SLOTS * size) // 4, device)
    buffers = [buffer.view(torch.uint8) for buffer in shared.buffers]
    return Slots(group, shared, buffers, size, torch.cuda.Stream(device), torch.cuda.Stream(device))


def start(op: str, sent: Sequence[Tensor], group: Group, *, gather: bool) -> Arriving | None:
    """:meth:`Slots.start`, or None where it is not worth copies."""
    sizes = [tensor.shape[0] // (1 if gather else group.size) for tensor in sent]
    if sum(sizes) < LARGE:
        return None
    return slots_for(op, group, slot_bytes(sizes, group), sent[0].device).start(sent, gather=gather)
