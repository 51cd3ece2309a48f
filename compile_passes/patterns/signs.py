"""Values that are never negative, by construction."""

from __future__ import annotations

from typing import Any

import torch

from compile_passes.reading import Reading
from compile_passes.vocabulary import example

# How far down a value is looked into.
_DEPTH = 24
# Calls whose result is not negative where these operands are not.
_OF_PARTS = {
    **dict.fromkeys(
        ("view", "cast", "clone", "gather", "expand", "transpose", "permute", "mt", "t", "getslice", "select", "slice",
         "sum", "cumsum", "amax", "index", "relu"), ("x",),
    ),
    **dict.fromkeys(("mul", "div", "where", "matmul", "bmm"), ("x", "y")),
    "scatter": ("x", "src"), "masked_fill": ("x", "value"),
}  # fmt: skip


def _keeps_sign(after: torch.Tensor | None, before: torch.Tensor) -> bool:
    """Whether numbers of 0 or more stay so by a cast: integers wrap where there is no room for them, and counts that
    are made as int64 leave room in int32.
    """
    if after is None or after.dtype.is_floating_point or before.dtype == torch.bool:
        return after is not None
    room = torch.iinfo(after.dtype).max
    return not before.dtype.is_floating_point and (torch.iinfo(before.dtype).max <= room or room >= 2**31 - 1)


def is_not_negative(reading: Reading, value: Any, depth: int = _DEPTH) -> bool:
    """Whether ``value`` is 0 or more, or NaN, whatever the data."""
    if type(value) in (int, float, bool):
        return bool(value >= 0)
    call, tensor = reading.call(value), example(value)
    if tensor is not None and tensor.dtype == torch.bool:
        return True
    if call is None or depth == 0 or reading.is_stale(value):
        return False
    if call.name in ("softmax", "sigmoid", "one_hot", "zeros", "zeros_like", "ones", "ones_like"):
        return True
    if call.name == "clamp" and is_not_negative(reading, call["min"]):
        return call["max"] is None or is_not_negative(reading, call["max"])
    if call.name in ("add", "einsum"):
        understood = reading.read(value, call.name, "y arg1 arg2 arg3")
        operands = [] if understood is None else list(call.args.values())
        operands = operands[call.name == "einsum" :]  # behind the equation
        return bool(operands) and all(is_not_negative(reading, part, depth - 1) for part in operands)
    before = example(call["x"]) if call.name == "cast" else None
    if before is not None and not _keeps_sign(tensor, before):
        return False
    if call.name == "item":
        best = reading.named(call["x"], "topk", "max", "sort")
        return best is not None and call["index"] == 0 and is_not_negative(reading, best["x"], depth - 1)
    parts = _OF_PARTS.get(call.name, ())
    return bool(parts) and all(is_not_negative(reading, call[part], depth - 1) for part in parts)
