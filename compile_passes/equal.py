"""When two values are provably the same numbers, and what may be looked through on the way to them.

Looked through are only operations that keep every number and the row-major order: reshapes, copies, and casts whose
target holds whatever the value can be. An axis is never judged after something was looked through: matchers compare
whole shapes with `vocabulary.has_shape`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from compile_passes.compat import statically_known_true
from compile_passes.memory import is_deterministic
from compile_passes.vocabulary import Call, example, same_shape

# How far down two expressions are compared.
_DEPTH = 8
# Names that stand for more than one function, for those who ask no further than what they are of.
_SEVERAL = frozenset({"norm", "vector_norm", "embedding"})
# Dtypes in which counts of rows are exact whatever their number (fp32 up to 2 ** 24 of them).
_COUNTING = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})


@cache
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Values:
    """The part of `reading.Reading` that compares values."""

    def call(self, value: Any) -> Call | None:
        """The call that defines ``value``."""
        raise NotImplementedError

    def named(self, value: Any, *names: str) -> Call | None:
        """The call that defines ``value`` when its name is one of ``names``, whatever its arguments."""
        call = self.call(value)
        return call if call is not None and call.name in names else None

    def read(self, value: Any, names: str, parameters: str = "") -> Call | None:
        """The call that defines ``value``, if its name is one of ``names`` and the reader accounts for its arguments.

        Args:
            names: canonical names, separated by blanks.
            parameters: those that the caller reads, separated by blanks. A call that passes any other argument, and not
                its default, is not one that the caller understands: None.
        """
        call = self.call(value)
        if call is None or call.name not in _words(names):
            return None
        return call if call.passes_only(_words("x " + parameters)) else None

    def is_stale(self, value: Any) -> bool:
        """Whether ``value`` was computed from memory that had been overwritten through another name."""
        raise NotImplementedError

    def strip(self, value: Any) -> Any:
        """``value`` without the reshapes and the casts to its own dtype around it (same numbers, row-major order)."""
        *_, root = self.reshapes(value)
        return root

    def reshapes(self, value: Any) -> Iterator[Any]:
        """``value``, then what it is a reshape or no-op cast of, and so on to the root."""
        while True:
            yield value
            call = self.read(value, "view clone cast")
            if call is None or (call.name == "cast" and not is_noop_cast(value, call["x"])):
                return
            value = call["x"]

    def unwrap(self, value: Any) -> Any:
        """``value`` without what `strip` removes, as far as the shape stays the same."""
        return [node for node in self.reshapes(value) if node is value or same_shape(node, value)][-1]

    def uncast(self, value: Any, floor: torch.dtype, stop: Container[Any] = ()) -> Any:
        """``value`` without reshapes and casts between floating dtypes to one no narrower than ``floor``.

        Goes no further than a value in ``stop``.
        """
        *_, root = self.casts(value, floor, stop)
        return root

    def casts(self, value: Any, floor: torch.dtype, stop: Container[Any] = ()) -> Iterator[Any]:
        """``value``, then what it is a reshape, or a cast as `uncast` looks through it, of, and so on to the root."""
        while True:
            yield value
            call = self.read(value, "view clone cast") if value not in stop else None
            if call is None or (call.name == "cast" and not is_float_cast(value, call["x"], floor)):
                return
            value = call["x"]

    def exact(self, value: Any, count: Any) -> Any:
        """``value``, integers in ``[0, count)``, without reshapes and casts to dtypes that hold all of them, of what is
        still there.
        """
        while not self.is_stale(value) and (call := self.read(value, "view clone cast")) is not None:
            after = example(value)
            if call.name == "cast" and (after is None or not holds(after.dtype, count)):
                break
            value = call["x"]
        return value

    def faithful(self, value: Any, count: Any, also: torch.dtype | None = None) -> Any:
        """``value``, integers of which nobody knows whether they are in ``[0, count)``, without reshapes and the casts
        that keep those that are, and make none of the others one of them; casts of integers to ``also``, too.
        """
        while (call := self.read(value, "view clone cast")) is not None:
            after, before = example(value), example(call["x"])
            if call.name == "cast":
                if after is None or before is None:
                    break
                named = after.dtype == also and not before.dtype.is_floating_point
                if not named and not is_faithful(after.dtype, before.dtype, count):
                    break
            value = call["x"]
        return value

    def is_zeros(self, value: Any) -> bool:
        """Whether ``value`` is 0 everywhere, made so, in whatever shape."""
        return self.named(self.strip(value), "zeros", "zeros_like") is not None

    def same(self, left: Any, right: Any, depth: int = _DEPTH) -> bool:
        """Whether two values hold provably equal numbers in row-major order: one node, or equal pure calls."""
        left, right = self.strip(left), self.strip(right)
        if left is right:
            return True
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return _equal_constants(left, right)
        one, two = self.call(left), self.call(right)
        if depth == 0 or one is None or two is None or one.name != two.name or set(one.args) != set(two.args):
            return False
        if one.name in _SEVERAL and left.target != right.target:
            return False
        if self.is_stale(left) or self.is_stale(right) or not (is_deterministic(left) and is_deterministic(right)):
            return False
        return _alike(left, right) and all(
            self._identical(value, two.args[key], depth - 1) for key, value in one.args.items()
        )

    def _identical(self, left: Any, right: Any, depth: int) -> bool:
        """As `same`, and of one shape."""
        if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
            return all(self._identical(one, two, depth) for one, two in zip(left, right, strict=True))
        return _alike(left, right) and self.same(left, right, depth)


def _alike(left: Any, right: Any) -> bool:
    """Whether two tensors have one shape and dtype (`x.int()` and `x.bool()` are calls of one name and one operand)."""
    one, two = example(left), example(right)
    if one is None or two is None:
        return one is two
    return one.dtype == two.dtype and same_shape(left, right)


def _equal_constants(left: Any, right: Any) -> bool:
    if isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt):
        return isinstance(left, int | torch.SymInt) and statically_known_true(left == right)
    return type(left) is type(right) and bool(left == right)


def is_noop_cast(value: fx.Node, source: Any) -> bool:
    """Whether a cast changes neither dtype nor device."""
    after, before = example(value), example(source)
    if after is None or before is None:
        return False
    return after.dtype == before.dtype and after.device == before.device


def is_float_cast(value: fx.Node, source: Any, floor: torch.dtype) -> bool:
    """Whether a cast goes from a floating dtype to one that is no narrower than ``floor``, on one device."""
    after, before = example(value), example(source)
    if after is None or before is None or after.device != before.device:
        return False
    return before.dtype.is_floating_point and no_narrower(after.dtype, floor)


def no_narrower(dtype: torch.dtype, floor: torch.dtype) -> bool:
    """Whether ``dtype`` has the precision and the range of ``floor``."""
    if not dtype.is_floating_point or not floor.is_floating_point:
        return dtype == floor
    one, two = torch.finfo(dtype), torch.finfo(floor)
    return one.eps <= two.eps and one.max >= two.max


def narrower(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """The narrower of two floating dtypes; ``left`` when neither is."""
    return right if no_narrower(left, right) else left


def is_faithful(after: torch.dtype, before: torch.dtype, count: Any) -> bool:
    """Whether a cast keeps all numbers in ``[0, count)``, and makes no other number one of them."""
    if before == torch.bool or after == before:
        return True
    if after.is_floating_point:  # rounds to what is as large or larger
        return holds(after, count + 1)
    if before.is_floating_point or torch.bool == after or before.is_complex or after.is_complex:
        return False
    one, two = torch.iinfo(after), torch.iinfo(before)
    return one.min <= two.min and one.max >= two.max


def holds(dtype: torch.dtype, count: Any) -> bool:
    """Whether ``dtype`` represents every integer in ``[0, count)``."""
    if dtype in _COUNTING and not (isinstance(count, int) and dtype == torch.float32):
        return True
    if dtype == torch.bool or not isinstance(count, int):
        return isinstance(count, int) and count <= 2
    return count - 1 <= (2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max)
