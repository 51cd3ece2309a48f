"""Between which numbers integers are, whatever the data: positions, constants, what is picked from or added to them.

Bounds are given up where a cast, or a sum, has no room for them: the integers that have some are those before the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from compile_passes.compat import statically_known_true
from compile_passes.equal import holds
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example, size_of

# Calls whose result holds only elements of their first operand.
_PICKS = frozenset(
    {"index", "gather", "getslice", "slice", "narrow", "select", "transpose", "permute", "mt", "expand", "repeat",
     "index_select", "take_along_dim", "repeat_interleave"}
)  # fmt: skip
# Calls that give the same numbers, where there is room for them: others look through these.
_SAME = frozenset({"view", "clone", "cast"})
# How far down integers are looked into.
_DEPTH = 8


class Bounds(NamedTuple):
    """Integers in ``[low, high)``; a ``high`` of None is not known."""

    low: int
    high: Any

    def within(self, count: Any) -> bool:
        """Whether all are in ``[0, count)``."""
        return self.low >= 0 and self.high is not None and _at_most(self.high, count)

    def apart_from(self, other: Bounds) -> bool:
        """Whether no number is in both."""
        sides = ((self.high, other.low), (other.high, self.low))
        return any(type(high) is int and high <= low for high, low in sides)


def bounds_of(reading: Reading, value: Any, depth: int = _DEPTH) -> Bounds | None:
    """The bounds of ``value``, a tensor of integers or a number."""
    if type(value) is int:
        return Bounds(value, value + 1)
    call, tensor = reading.call(value), example(value)
    if call is None or tensor is None or depth == 0 or reading.is_stale(value):
        return None
    found = _found(reading, value, call, depth - 1)
    if found is None and tensor.dtype == torch.bool and call.name not in _SAME:
        found = _BITS
    return found if found is not None and _has_room(tensor.dtype, found) else None


_BITS = Bounds(0, 2)


def _found(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    if call.name in _SAME:
        return bounds_of(reading, call["x"], depth + 1)
    if call.name in _PICKS:
        return bounds_of(reading, call["x"], depth)
    parts = _picked_from(reading, call)
    if parts is not None:
        return _of_all([bounds_of(reading, part, depth) for part in parts])
    if (understood := reading.read(value, "item argmax argsort", "index dim keepdim descending")) is not None:
        source = _positions_source(reading, understood)
        return None if source is None else Bounds(0, _axis(source))
    step = _STEPS.get(call.name)
    return None if step is None else step(reading, value, call, depth)


def _clamp(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    low, high = call["min"], size_of(call["max"])
    if type(low) is not int or not (high is None or isinstance(high, int | torch.SymInt)) or _may_be_nan(value):
        return None
    low = min(low, high) if isinstance(high, int) else low
    return Bounds(low, None if high is None else high + 1)


def _may_be_nan(value: Any) -> bool:
    tensor = example(value)
    return tensor is None or tensor.dtype.is_floating_point


def _randint(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    known = reading.read(value, "randint", "low high size dtype") is not None and type(call["low"]) is int
    return Bounds(call["low"], size_of(call["high"])) if known else None


def _mod(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    count = size_of(call["y"])
    known = reading.read(value, "mod", "y") is not None and isinstance(count, int | torch.SymInt)
    known &= not _may_be_nan(value)
    return Bounds(0, count) if known and statically_known_true(count > 0) else None


def _mul(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    """Of masks and one-hots, or of ones and a number."""
    one, other = (bounds_of(reading, call[side], depth) for side in "xy")
    if one is None or other is None:
        return None
    if one == other == _BITS:
        return _BITS
    return next((number for ones, number in ((one, other), (other, one)) if ones == (1, 2)), None)


def _sum(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    """Of integers and a number."""
    x, y = call["x"], call["y"]
    if reading.read(value, call.name, "y") is None:
        return None
    if call.name == "add" and type(x) is int:
        x, y = y, x
    found = bounds_of(reading, x, depth) if type(y) is int else None
    if found is None:
        return None
    more = y if call.name == "add" else -y
    return Bounds(found.low + more, None if found.high is None else found.high + more)


def _arange(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    start, end = call["start"] or 0, size_of(call["end"])
    return Bounds(start, end) if type(start) is int and call["step"] in (None, 1) else None


def _full(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    return bounds_of(reading, call["fill"]) if type(call["fill"]) is int else None


def _tensor(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    """A list in the code."""
    given = call["x"] if isinstance(call["x"], list | tuple) else [call["x"]]
    return _of_all([bounds_of(reading, one) if type(one) is int else None for one in given])


def _pad(reading: Reading, value: Any, call: Call, depth: int) -> Bounds | None:
    if call["mode"] not in (None, "constant"):
        return None
    filled = call["value"] or 0
    return _of_all([bounds_of(reading, one, depth) for one in (call["x"], filled)]) if type(filled) is int else None


_STEPS: dict[str, Callable[[Reading, Any, Call, int], Bounds | None]] = {
    "clamp": _clamp, "randint": _randint, "mod": _mod, "mul": _mul, "add": _sum, "sub": _sum, "arange": _arange,
    "full": _full, "tensor": _tensor, "pad": _pad, "one_hot": lambda *_: _BITS,
    **dict.fromkeys(("zeros", "zeros_like"), lambda *_: Bounds(0, 1)),
    **dict.fromkeys(("ones", "ones_like"), lambda *_: Bounds(1, 2)),
}  # fmt: skip


def _of_all(parts: list[Bounds | None]) -> Bounds | None:
    """The bounds of what is one of several."""
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    highs = [part.high for part in found]
    high = next((one for one in highs if one is not None and all(_at_most(other, one) for other in highs)), None)
    return Bounds(min(part.low for part in found), high)


def _at_most(one: Any, other: Any) -> bool:
    """Whether one end is no greater than another, for every input."""
    both = type(one) is int and type(other) is int
    return bool(one <= other) if both else one is not None and equal_sizes(one, other)


def _has_room(dtype: torch.dtype, found: Bounds) -> bool:
    """Whether a dtype has all integers between two bounds; of sizes that are symbols, those that counts are in have."""
    if dtype == torch.bool:
        return found.within(2)
    if type(found.high) is not int:
        return found.low >= 0 and holds(dtype, None)
    if dtype.is_floating_point:
        return max(-found.low, found.high - 1) <= 2 / torch.finfo(dtype).eps
    return not dtype.is_complex and torch.iinfo(dtype).min <= found.low and found.high - 1 <= torch.iinfo(dtype).max


def _picked_from(reading: Reading, call: Call) -> list[Any] | None:
    """The values, and numbers, among which every element of a result is one; None when it is computed otherwise."""
    if call.name in ("cat", "stack", "hstack", "vstack") and isinstance(call["x"], list | tuple):
        return list(call["x"])
    if call.name == "where" and len(call.args) == 3:
        return [call["x"], call["y"]]
    if call.name == "masked_fill":
        return [call["x"], call["value"]]
    if call.name == "item":
        source = reading.named(call["x"], "sort", "topk", "max", "chunk", "split")
        if source is not None and (source.name in ("chunk", "split") or call["index"] == 0):
            return [source["x"]]
    return None


def _positions_source(reading: Reading, call: Call) -> Call | None:
    """The call along whose dimension ``call`` holds positions: the second result of sort, topk or max, or its own."""
    if call.name != "item":
        return call
    return reading.named(call["x"], "sort", "topk", "max") if call["index"] == 1 else None


def _axis(call: Call) -> Any:
    """How many entries the dimension has along which ``call`` works, None where that is not known."""
    tensor, dim = example(call["x"]), call["dim"]
    if tensor is None or type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        return None
    return tensor.shape[dim]
