"""What products of experts cost on this CPU, measured once: by it C++ decides how many rows to compute as a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice, pairwise
from math import log
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import compat

#: Of which a batched product is fast.
_BATCHED = (torch.bfloat16, torch.float32)
_SIZES = 256, 768  # sides of the measured weights
_EXPERTS, _FEW, _MORE = 8, 8, 40
# Of which the least is what other processes did not disturb; five were off by two times beside two of them. All that is
# measured is so in every round, as an undisturbed moment is not one thing's alone, twice, as the first finds threads
# that another one left.
_ROUNDS, _TIMES = 10, 2
_MEMORY = 2**26  # bytes, of which no cache holds the most
_LEAST = 0.5  # rows, so that a cost has a logarithm


class Power(NamedTuple):
    """A cost in rows that goes with a power of a weight's elements: from -1, the same time for all of them, to 1."""

    rows: float  # of a weight of the smaller size
    exponent: float

    @staticmethod
    def through(smaller: float, larger: float) -> Power:
        """Of both sizes' costs."""
        exponent = log(max(larger, _LEAST) / max(smaller, _LEAST)) / log(_SIZES[1] ** 2 / _SIZES[0] ** 2)
        return Power(max(smaller, _LEAST), min(max(exponent, -1.0), 1.0))

    def of(self, elements: int) -> float:
        """Rows that it costs as much as."""
        return float(self.rows * (elements / _SIZES[0] ** 2) ** self.exponent)


class Costs(NamedTuple):
    """What an expert costs beside its rows, in rows.

    Attributes:
        read: of its weight, which comes from memory: other layers' were read since.
        alone: more than that, outside of a batch: a product of its own wakes threads, and shares it out among them.
        one: likewise, of an expert with one row.
    """

    read: float
    alone: Power
    one: Power


@cache
def costs(dtype: torch.dtype, threads: int) -> Costs:
    """Measured on this process's threads, once, in 0.1 s in bf16 and 0.15 in fp32 on two cores.

    CPUs differ by ten times: alone, 768 x 768 in bf16, 13 rows on one whose threads spin, 43 where they sleep, 67 and
    150 on another.
    """
    with compat.without_operator_modes():
        products = [product for size in _SIZES for product in _products(size, dtype)]
        *taken, summed = _least_seconds([*products, partial(torch.sum, torch.full((_MEMORY // 4,), 0.5, device="cpu"))])
    half = len(taken) // 2
    (_, *smaller), (row, *larger) = _rows(*taken[:half]), _rows(*taken[half:])
    read = dtype.itemsize * _SIZES[1] ** 2 / _MEMORY * summed / row
    alone, one = (Power.through(*both) for both in zip(smaller, larger, strict=True))
    return Costs(read, alone, one)


def _products(size: int, dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Of weights ``[size, size]``: a batch of few rows, one of more, few one by one, one row each."""
    weights = torch.full((_EXPERTS, size, size), 0.5, dtype=dtype, device="cpu").transpose(1, 2)
    few, more = (torch.full((_EXPERTS, rows, size), 0.5, dtype=dtype, device="cpu") for rows in (_FEW, _MORE))
    of_few, of_more = few.new_empty(few.shape), more.new_empty(more.shape)

    def one_by_one(rows: int) -> None:
        for x, weight, result in zip(few.unbind(), weights.unbind(), of_few.unbind(), strict=True):
            torch.mm(x[:rows], weight, out=result[:rows])

    yield lambda: torch.bmm(few, weights, out=of_few)
    yield lambda: torch.bmm(more, weights, out=of_more)
    yield lambda: one_by_one(_FEW)
    yield lambda: one_by_one(1)


def _least_seconds(functions: list[Callable[[], object]]) -> list[float]:
    """Of each, of all rounds but the first."""
    rounds: list[list[float]] = []
    for _ in range(_ROUNDS + 1):
        taken = []
        for function in functions:
            times = [perf_counter()]
            for _ in range(_TIMES):
                function()
                times.append(perf_counter())
            taken.append(min(end - start for start, end in pairwise(times)))
        rounds.append(taken)
    return [min(taken) for taken in zip(*islice(rounds, 1, None), strict=True)]


def _rows(few: float, more: float, one_by_one: float, ones: float) -> tuple[float, float, float]:
    """Seconds of a row of a batch, and how many of them a product alone costs more, of few rows and of one."""
    row = max(more - few, 1e-9) / (_MORE - _FEW) / _EXPERTS
    read = few - _FEW * _EXPERTS * row
    alone, one = one_by_one - few, ones - read - _EXPERTS * row
    return row, alone / _EXPERTS / row, one / _EXPERTS / row


def costs_of(weight: Tensor) -> tuple[float, float, float] | None:
    """What reading one of ``[E, N, K]`` costs, one alone, and one alone with one row, in rows; None where no batch is
    faster.
    """
    elements = weight.shape[1] * weight.shape[2]
    if weight.dtype not in _BATCHED or not elements:
        return None
    return _of(costs(weight.dtype, torch.get_num_threads()), elements)


@cache
def _of(found: Costs, elements: int) -> tuple[float, float, float]:
    return found.read, found.alone.of(elements), found.one.of(elements)
