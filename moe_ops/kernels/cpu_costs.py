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

import torch
from torch import Tensor

from moe_ops import compat

#: Of which a batched product is fast.
_BATCHED = (torch.bfloat16, torch.float32)
_SIZES = 256, 768, 1536  # sides of the measured weights
_EXPERTS = 8, 8, 4  # and how many there are
ROWS = 1, 2, 4, 8  # of products; with more, one more costs one
_MORE = 40
# Of which the least is what other processes did not disturb; all that is measured is so in every round, as an
# undisturbed moment is not one thing's alone, twice, as the first finds threads that another one left.
_ROUNDS, _SECONDS, _TIMES = 4, 0.25, 2
_MEMORY = 2**27  # bytes of weights, of which no cache holds the most: other layers' were read since
_LEAST = 0.1  # rows, so that a cost has a logarithm


@dataclass(frozen=True, eq=False)  # one is told from another as fast as may be
class Costs:
    """What products of an expert cost whose weight is read from memory, in further rows of a batch.

    Attributes:
        batch, alone: with as many rows as :data:`ROWS` has, of weights of each of the measured sizes; one among others
            of a batch, and one by itself, which wakes threads and is shared out among them.
    """

    batch: tuple[tuple[float, ...], ...]
    alone: tuple[tuple[float, ...], ...]

    def of(self, elements: int) -> tuple[float, ...]:
        """(in a batch, alone), with each number of rows, of a weight that has so many."""
        return tuple(_between(costs, elements) for costs in (*self.batch, *self.alone))


@cache
def costs(dtype: torch.dtype, threads: int) -> Costs:
    """Measured on this process's threads, once, in half a second.

    CPUs and dtypes differ by ten times: alone, on two cores, 8 rows by 768 x 768 cost 13 more in bf16 where threads
    spin, 43 where they sleep, 67 and 150 on another CPU; as much time with larger weights. In fp32 they cost 8 more,
    and so they do with larger ones; a single row costs 12 more, as both threads then read a weight more slowly.
    """
    with compat.without_operator_modes():
        memory = torch.full((_MEMORY // dtype.itemsize,), 0.5, dtype=dtype, device="cpu")
        sizes = zip(_SIZES, _EXPERTS, strict=True)
        taken = _least_seconds([product for of in sizes for product in _products(memory, *of)])
    of_size = len(taken) // len(_SIZES)
    of_sizes = [_in_rows(taken[n * of_size : (n + 1) * of_size]) for n in range(len(_SIZES))]
    found = tuple(zip(*of_sizes, strict=True))
    return Costs(found[: len(ROWS)], found[len(ROWS) :])


def _products(memory: Tensor, size: int, experts: int) -> Iterator[Callable[[], object]]:
    """Of weights ``[size, size]``: batches of each number of rows and of more, and the former one by one."""
    of_all = experts * size * size
    batches = memory[: len(memory) // of_all * of_all].view(-1, experts, size, size).transpose(2, 3).unbind()
    others = cycle(batches)

    def batch(x: Tensor, result: Tensor) -> object:
        return torch.bmm(x, next(others), out=result)

    def one_by_one(x: Tensor, result: Tensor) -> None:
        for part, weight, to in zip(x.unbind(), next(others).unbind(), result.unbind(), strict=True):
            torch.mm(part, weight, out=to)

    operands = []
    for rows in (*ROWS, _MORE):
        x = memory.new_full((experts, rows, size), 0.5)
        operands.append((x, torch.empty_like(x)))
    yield from (partial(batch, *pair) for pair in operands)
    yield from (partial(one_by_one, *pair) for pair in operands[: len(ROWS)])


def _least_seconds(functions: list[Callable[[], object]]) -> list[float]:
    """Of each, of all rounds but the first."""
    rounds: list[list[float]] = []
    until = perf_counter() + _SECONDS
    while len(rounds) <= _ROUNDS or perf_counter() < until:
        taken = []
        for function in functions:
            times = [perf_counter()]
            for _ in range(_TIMES):
                function()
                times.append(perf_counter())
            taken.append(min(end - start for start, end in pairwise(times)))
        rounds.append(taken)
    return [min(taken) for taken in zip(*islice(rounds, 1, None), strict=True)]


def _in_rows(taken: list[float]) -> tuple[float, ...]:
    """Batches and products one by one with each number of rows, in further rows of a batch."""
    batches, more, alone = taken[: len(ROWS)], taken[len(ROWS)], taken[len(ROWS) + 1 :]
    row = max(more - batches[-1], 1e-9) / (_MORE - ROWS[-1])
    return tuple(seconds / row for seconds in (*batches, *alone))


def _between(measured: Sequence[float], elements: int) -> float:
    """By a power of the elements between two sizes: from -1, the same time for all of them, to 0, the same rows."""
    sizes = [size * size for size in _SIZES]
    place = min(max(bisect(sizes, elements), 1), len(sizes) - 1)
    smaller, larger = (max(measured[n], _LEAST) for n in (place - 1, place))
    exponent = min(max(log(larger / smaller) / log(sizes[place] / sizes[place - 1]), -1.0), 0.0)
    return float(smaller * (elements / sizes[place - 1]) ** exponent)


def costs_of(weight: Tensor) -> ctypes.Array[ctypes.c_double] | None:
    """:meth:`Costs.of` weights ``[E, N, K]``, for C; None where no batch is faster."""
    elements = weight.shape[1] * weight.shape[2]
    if weight.dtype not in _BATCHED or not elements:
        return None
    return _of(costs(weight.dtype, torch.get_num_threads()), elements)


@cache
def _of(found: Costs, elements: int) -> ctypes.Array[ctypes.c_double]:
    of_weight = found.of(elements)
    return (ctypes.c_double * len(of_weight))(*of_weight)
