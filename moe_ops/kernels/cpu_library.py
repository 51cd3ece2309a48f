"""The C++ of ``cpu.cpp``, built at the first call, and how to call it."""

from __future__ import annotations

import ctypes
import warnings
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_ops.kernels import cpu_build

#: Of everything but products; without fp16 where the compiler has none.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Glu(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("kind", "rows", "columns", "gate_stride", "up_stride", "step", "out_stride")),
        ("up_place", c_int64),
        *((name, c_float) for name in ("alpha", "before", "after", "up_limit", "up_offset")),
    )


class Sum(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in ("tokens", "selected", "columns", "rows"))


class Weight(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("of_expert", "of_row", "of_column")),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("of_bias", "of_bias_column")),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("dtype", "tokens", "selected", "hidden", "columns", "width")),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("on_input", c_int64),
        *((name, Weight) for name in ("gate_up", "up", "down")),
        ("glu", Glu),
    )


class Lots(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("number", "experts", "few")),
        *((name, c_void_p) for name in ("ends", "lengths", "counts", "order")),
    )


_ARGUMENTS = {
    "moe_select": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int),
    "moe_lay_out": (c_void_p, c_void_p, c_int, c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_void_p),
    "moe_experts": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "moe_few": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int),
    "moe_activate": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "moe_combine": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
}


@cache
def library() -> Any:
    """The functions of ``cpu.cpp``, or None where it cannot be built."""
    try:
        loaded = cpu_build.built(Path(__file__).with_name("cpu.cpp"))
    except cpu_build.BuildError as error:
        warnings.warn(f"moe_ops: layers are slower on this CPU, as their C++ cannot be built: {error}", stacklevel=2)
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.moe_experts.restype = loaded.moe_has_fp16.restype = c_int
    if not loaded.moe_has_fp16():
        DTYPES.pop(torch.float16, None)
    return loaded
