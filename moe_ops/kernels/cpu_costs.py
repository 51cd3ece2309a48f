"""What products of experts cost on this CPU, measured once: by it C++ decides how many rows to compute as a batch."""

from __future__ import annotations

import ctypes
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice, pairwise
from math import log
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import compat
from moe_ops.kernels.cpu_library import DTYPES, library

#: Of which a batched product is fast.
_BATCHED = (torch.bfloat16, torch.float32)
_SIZES = 256, 768, 1536  # sides of the measured weights
_EXPERTS = 8, 8, 4  # and how many there are
ROWS = 1, 2, 4, 8, 40  # of products; `Costs` of cpu.cpp has the same
_FEW = 4  # of these numbers: those that may be few
# Of which the least is what other processes did not disturb; all that is measured is so in every round, as an
# undisturbed moment is not one thing's alone, twice, as the first finds threads that another one left. Beside processes
# that need all cores a product may take a quarter of a second, in which its threads wait for each other.
_ROUNDS, _SECONDS, _TIMES = 4, 0.5, 2
_MEMORY = 2**27  # bytes of weights, of which no cache holds the most: other layers' were read since
_WORTHWHILE = 0.9  # of the time of torch's products: what is measured of other sizes is not as exact
_LEAST = 0.1  # rows, so that a cost has a logarithm


class OfWeight(NamedTuple):
    """What products by a weight of so many elements cost.

    Attributes:
        few: up to how many rows of an expert C++ multiplies itself.
        of_rows: ``Costs`` of cpu.cpp; None where no batch is faster.
    """

    few: int
    of_rows: ctypes.Array[ctypes.c_double] | None


@dataclass(frozen=True, eq=False)  # one is told from another as fast as may be
class Costs:
    """What products of an expert cost whose weight is read from memory, in further rows of a batch.

    Attributes:
        batch, alone, few: with as many rows as :data:`ROWS` has, of weights of each of the measured sizes; one among
            others of a batch, one by itself, which wakes threads and is shared out among them, and one among others by
            C++, which reads rows of the weights as they come and keeps threads awake.
    """

    batch: tuple[tuple[float, ...], ...]
    alone: tuple[tuple[float, ...], ...]
    few: tuple[tuple[float, ...], ...]

    def of(self, elements: int) -> OfWeight:
        """Of a weight that has so many."""
        kinds = self.batch, self.alone, self.few
        batch, alone, few = ([_between(costs, elements) for costs in kind] for kind in kinds)
        faster = [own < _WORTHWHILE * by_torch for own, by_torch in zip(few, alone[:_FEW], strict=True)]
        number = faster.index(False) if False in faster else _FEW
        each = [*batch, *alone, *few]
        return OfWeight(ROWS[number - 1] if number else 0, (ctypes.c_double * len(each))(*each))


@cache
def costs(dtype: torch.dtype, threads: int) -> Costs | None:
    """Measured on this process's threads, once, in half a second; None where others leave too little of them for that.

    CPUs and dtypes differ by ten times: alone, on two cores, 8 rows by 768 x 768 cost 13 more in bf16 where threads
    spin, 43 where they sleep, 67 and 150 on another CPU; as much time with larger weights. In fp32 they cost 8 more,
    and so they do with larger ones; a single row costs 12 more, as both threads then read a weight more slowly.
    """
    with compat.without_operator_modes():
        memory = torch.full((_MEMORY // dtype.itemsize,), 0.5, dtype=dtype, device="cpu")
        sizes = zip(_SIZES, _EXPERTS, strict=True)
        taken = _least_seconds([product for of in sizes for product in _products(memory, *of, threads)])
    of_size = len(taken) // len(_SIZES)
    of_sizes = [_in_rows(taken[n * of_size : (n + 1) * of_size]) for n in range(len(_SIZES))] if taken else [None]
    if None in of_sizes:
        return None
    return Costs(*(tuple(zip(*kind, strict=True)) for kind in zip(*of_sizes, strict=True)))


def _products(memory: Tensor, size: int, experts: int, threads: int) -> Iterator[Callable[[], object]]:
    """Of weights ``[size, size]``: batches of each number of rows, one by one, few of them by C++."""
    of_all = experts * size * size
    others = cycle(memory[: len(memory) // of_all * of_all].view(-1, experts, size, size).unbind())

    def batch(x: Tensor, result: Tensor) -> object:
        return torch.bmm(x, next(others).transpose(1, 2), out=result)

    def one_by_one(x: Tensor, result: Tensor) -> None:
        for part, weight, to in zip(x.unbind(), next(others).unbind(), result.unbind(), strict=True):
            torch.mm(part, weight.t(), out=to)

    def few(x: Tensor, result: Tensor) -> None:
        places = next(others).data_ptr(), x.data_ptr(), result.data_ptr()
        library().moe_few(DTYPES[x.dtype], *places, experts, x.shape[1], size, size, threads)

    operands = []
    for rows in ROWS:
        x = memory.new_full((experts, rows, size), 0.5)
        operands.append((x, torch.empty_like(x)))
    for product in (batch, one_by_one):
        yield from (partial(product, *pair) for pair in operands)
    yield from (partial(few, *pair) for pair in operands[:_FEW])


def _least_seconds(functions: list[Callable[[], object]]) -> list[float]:
    """Of each, of all rounds but the first; nothing where time is up before there are two."""
    rounds: list[list[float]] = []
    until = perf_counter() + _SECONDS
    while len(rounds) <= _ROUNDS:
        taken = []
        for function in functions:
            times = [perf_counter()]
            for _ in range(_TIMES):
                function()
                times.append(perf_counter())
            taken.append(min(end - start for start, end in pairwise(times)))
            if times[-1] > until:
                return [min(taken) for taken in zip(*islice(rounds, 1, None), strict=True)]
        rounds.append(taken)
    return [min(taken) for taken in zip(*islice(rounds, 1, None), strict=True)]


def _in_rows(taken: list[float]) -> tuple[tuple[float, ...], ...] | None:
    """Batches, products one by one, and those of C++ with each number of rows, in further rows of a batch.

    None of times that other processes have made: of which more rows take no longer.
    """
    number = len(ROWS)
    row = (taken[number - 1] - taken[number - 2]) / (ROWS[-1] - ROWS[-2])
    if row <= 0:
        return None
    kinds = taken[:number], taken[number : 2 * number], taken[2 * number :]
    return tuple(tuple(seconds / row for seconds in kind) for kind in kinds)


def _between(measured: Sequence[float], elements: int) -> float:
    """By a power of the elements between two sizes: from -1, the same time for all of them, to 0, the same rows."""
    sizes = [size * size for size in _SIZES]
    place = min(max(bisect(sizes, elements), 1), len(sizes) - 1)
    smaller, larger = (max(measured[n], _LEAST) for n in (place - 1, place))
    exponent = min(max(log(larger / smaller) / log(sizes[place] / sizes[place - 1]), -1.0), 0.0)
    return float(smaller * (elements / sizes[place - 1]) ** exponent)


def costs_of(weight: Tensor) -> OfWeight:
    """:meth:`Costs.of` weights ``[E, N, K]``."""
    elements = weight.shape[1] * weight.shape[2]
    found = costs(weight.dtype, torch.get_num_threads()) if weight.dtype in _BATCHED and elements else None
    return _UNKNOWN if found is None else _of(found, elements)


@cache
def _of(found: Costs, elements: int) -> OfWeight:
    return found.of(elements)


_UNKNOWN = OfWeight(2, None)  # so few are faster, or as fast, on all that were measured
