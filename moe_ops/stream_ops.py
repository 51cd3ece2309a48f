"""Words in memory that a CUDA stream itself waits for and writes, between its kernels and copies.

No multiprocessor works for that, so it happens beside a product that fills all of them. CUDA's driver has it
(``cuStreamBatchMemOp``), torch hands on a part of it only. It is captured into CUDA graphs like a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

_WAIT, _WRITE, _EQUAL = 1, 2, 1  # of CUstreamBatchMemOpType; CU_STREAM_WAIT_VALUE_EQ


class _Parameters(ctypes.Structure):
    """One CUstreamBatchMemOpParams, 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
    )


class Op(NamedTuple):
    """Wait until the 32-bit word at ``address`` equals ``value``, or write it.

    A write is seen by any GPU after everything that the stream did before it.
    """

    operation: int
    address: int
    value: int


def wait_equal(address: int, value: int) -> Op:
    """The stream goes on when the word is ``value``."""
    return Op(_WAIT, address, value)


def write(address: int, value: int) -> Op:
    """The word becomes ``value``."""
    return Op(_WRITE, address, value)


@cache
def _function() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(_Parameters), ctypes.c_uint32]
    return function


def submit(stream: torch.cuda.Stream, ops: Sequence[Op]) -> None:
    """Put ``ops`` on a stream, one behind the other.

    Raises:
        RuntimeError: there is no such function, or the device has no such operations.
    """
    made = (_Parameters * len(ops))()
    for one, op in zip(made, ops, strict=True):
        one.operation, one.address, one.value = op
        one.flags = _EQUAL if op.operation == _WAIT else 0
    try:
        status = _function()(stream.cuda_stream, len(ops), made, 0)
    except (AttributeError, OSError) as missing:
        raise RuntimeError(f"moe_ops: CUDA's driver has no operations of streams on memory: {missing}") from missing
    if status:
        raise RuntimeError(f"moe_ops: cuStreamBatchMemOp failed with CUresult {status}")
