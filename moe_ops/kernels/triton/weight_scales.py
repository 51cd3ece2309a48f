"""Scales of a quantised weight as kernels address them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meta.formats import E4M3
from meta.schemes import Scale


class WeightScale(NamedTuple):
    """One scale of a weight as kernels address it.

    tensor: e8m0, which Triton does not know, as the bytes that it is. group: rows and columns of the weight that share
    an entry. runs_on: whether these groups run on from the gate into the up half; up_offset: elements to that of the up
    half where they do not.
    """

    tensor: torch.Tensor | None = None
    group: tuple[int, int] = (0, 0)
    runs_on: bool = False
    up_offset: int = 0

    @property
    def strides(self) -> tuple[int, int, int] | None:
        """Of [E, N groups, K groups]; no step along an axis that shares one entry."""
        if self.tensor is None:
            return None
        n, k = (stride if group else 0 for stride, group in zip(self.tensor.stride()[-2:], self.group, strict=True))
        return self.tensor.stride(0), n, k

    @property
    def at_once(self) -> int:
        """How many bytes of a row's scales are a word at an address that it divides: 4, 2 or 1."""
        if self.tensor is None or self.strides[2] != 1 or self.tensor.data_ptr() % 16:
            return 1
        return math.gcd(4, *self.strides[:2], self.up_offset, self.tensor.shape[-1])


def as_stored(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def one_form(spec: Scale, scale: torch.Tensor) -> torch.Tensor:
    """In bytes what is nothing but exponents, in its dtype what has no other, else in fp32; contiguous."""
    exponents = not spec.shift and all(dtype.itemsize == 1 and dtype != E4M3 for dtype in spec.dtypes)
    same = exponents or len(spec.dtypes) == 1
    return (as_stored(scale) if same else spec.value(scale).float()).contiguous()
