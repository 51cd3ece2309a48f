"""Words that streams wait for and write: what CUDA's driver is given, by a driver that only looks."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from moe_ops import stream_ops


def test_the_driver_gets_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 bytes an operation: what, where, value, how (cuda.h, CUstreamBatchMemOpParams)."""
    seen = []

    def look(stream: int, count: int, made: object, flags: int) -> int:
        words = ctypes.cast(made, ctypes.POINTER(ctypes.c_uint64))
        seen.append((stream, flags, [[words[6 * number + place] for place in range(6)] for number in range(count)]))
        return 0

    monkeypatch.setattr(stream_ops, "_function", lambda: look)
    stream_ops.submit(SimpleNamespace(cuda_stream=7), [stream_ops.wait_equal(1 << 40, 1), stream_ops.write(64, 5)])
    assert ctypes.sizeof(stream_ops._Parameters) == 48
    assert seen == [(7, 0, [[1, 1 << 40, 1, 1, 0, 0], [2, 64, 5, 0, 0, 0]])]


def test_a_failure_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_ops, "_function", lambda: lambda *arguments: 801)
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp failed with CUresult 801"):
        stream_ops.submit(SimpleNamespace(cuda_stream=0), [stream_ops.write(64, 1)])


def test_a_driver_without_them_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(stream_ops, "_function", missing)
    with pytest.raises(RuntimeError, match=r"no operations of streams on memory: libcuda\.so\.1"):
        stream_ops.submit(SimpleNamespace(cuda_stream=0), [stream_ops.write(64, 1)])
