"""How many pairs every expert of a layer computed: rows of counters on each device, found by the address of the layer's
weights.

Kernels that know the experts of pairs are given a row: `[flag, count of expert 0, count of expert 1, ...]` int64. They
read the flag on the device and add where it is set, so a CUDA graph that was captured with the flag at 0 counts as soon
as it is 1: nothing is captured or compiled again. Graphs hold the addresses of rows, so a row stays where it is, and
counters only grow: who wants to know what happened between two moments subtracts. Compiled code that layers share has
no name of a layer in it; the address of its weights tells them apart.

A backend counts what its experts compute: on the device by a :class:`Row`, or from the host by :func:`count` while
:data:`active`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 256  # of a block
MOST_ROWS = 4096  # of as many experts on a device; layers past them share one more
ANY_OTHER = 0  # the address that stands for their weights
_LINE = 16  # counters that a row's length is a multiple of: rows begin at lines of the cache

active = 0  # open `moe_ops.load_statistics` blocks of this process

_moment = 0  # that `mark` gave out last
_lock = threading.RLock()
_tables: dict[tuple[torch.device, int], Rows] = {}


class Row(NamedTuple):
    """The row of a layer as an argument of a launch; `weight` `[E, ...]` is what the layer is known by."""

    weight: Tensor

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    def tensor(self) -> Tensor:
        """The row's memory."""
        if self.weight.is_meta:  # a kernel is compiled, and not run
            return self.weight.new_empty(1 + self.experts, dtype=torch.int64)
        return rows_of(self.weight.device, self.experts).row(self.weight.data_ptr())


class Rows(dict[int, int]):
    """The rows of layers of as many experts on one device: addresses of rows by addresses of weights.

    Attributes:
        blocks: ``[ROWS, length]`` int64, in which rows are given out in order.
        addresses: of the weights of each row that was given out.
        asked: the moment (:func:`mark`) after which each row was last asked for.
        uncounted: rows of layers whose first call ever was in a CUDA graph's capture, before there was a block.
    """

    def __init__(self, device: torch.device, experts: int) -> None:
        super().__init__()
        self.device, self.experts = device, experts
        self.blocks: list[Tensor] = []
        self.addresses: list[int] = []
        self.asked: list[int] = []
        self.uncounted: dict[int, Tensor] = {}
        self._rows: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def __missing__(self, address: int) -> int:
        return self.row(address).data_ptr()

    def row(self, address: int) -> Tensor:
        """The row of the layer whose weights begin at `address`."""
        with _lock:
            if address not in self._numbers and len(self.addresses) >= MOST_ROWS:
                address = ANY_OTHER
            if address not in self._numbers and not self._has_room(address):
                return self.uncounted[address]
            number = self._numbers.setdefault(address, len(self.addresses))
            if number == len(self.addresses):
                self.addresses.append(address)
                self.asked.append(_moment)
            self.asked[number] = _moment
            row = self._rows[number]
            if address != ANY_OTHER:
                self[address] = row.data_ptr()
            return row

    def counted(self, before: Sequence[Tensor] = ()) -> tuple[list[int], list[int], list[Tensor]]:
        """The addresses of all layers in the order of rows, when each was asked for last, and copies of the blocks less
        those of another moment.
        """
        with _lock:
            blocks = [block - old for block, old in zip(self.blocks, before, strict=False)]
            blocks += [block.clone() for block in self.blocks[len(blocks) :]]
            return list(self.addresses), list(self.asked), blocks

    def _has_room(self, address: int) -> bool:
        """Whether there is a row for one more layer; in a capture without any, `uncounted` has one for it."""
        free = len(self._rows) - len(self.addresses)
        if _capturing(self.device):
            if free == 0:
                if address not in self.uncounted:
                    # Memory of the graph's own, which its every replay fills with 0: a flag that is never set.
                    self.uncounted[address] = self._zeros(1)[0]
                return False
        elif free < ROWS // 2:  # a capture that comes finds room for layers that nobody called before it
            self._grow()
        return True

    def _grow(self) -> None:
        """Another block. A thread of its own makes it, which knows neither the memory pool that CUDA graphs warm up in,
        nor modes of the caller's, nor inference mode.
        """
        with ThreadPoolExecutor(1) as other:
            block = other.submit(self._block).result()
        self.blocks.append(block)
        self._rows += block.unbind(0)

    def _block(self) -> Tensor:
        block = self._zeros(ROWS)
        block[:, 0] = active
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # kernels of any stream may be given a row of it
        return block

    def _zeros(self, rows: int) -> Tensor:
        length = -(-(1 + self.experts) // _LINE) * _LINE
        return torch.zeros((rows, length), dtype=torch.int64, device=self.device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def rows_of(device: torch.device, experts: int) -> Rows:
    """The rows of layers of `experts` on `device`."""
    found = _tables.get((device, experts))
    if found is None:
        with _lock:
            found = _tables.setdefault((device, experts), Rows(device, experts))
    return found


def tables() -> list[Rows]:
    """Those that were asked for so far."""
    with _lock:
        return list(_tables.values())


def mark() -> int:
    """A moment. Rows that are asked for from here on say so: launches have to ask again, once."""
    global _moment
    with _lock:
        _moment += 1
        for rows in _tables.values():
            rows.clear()
        return _moment


def turn(change: int) -> None:
    """One block more or less that wants to know: writes the flags, in the order of each device's current stream."""
    global active
    with _lock:
        active += change
        for rows in _tables.values():
            for block in rows.blocks:
                block[:, 0].fill_(active)


def count(weight: Tensor, pairs: Sequence[int]) -> None:
    """Add the pairs that each expert of the layer with `weight` `[E, ...]` computed, of a backend on the CPU."""
    row = Row(weight).tensor()
    with _lock:
        row[1 : 1 + len(pairs)] += torch.tensor(pairs)
