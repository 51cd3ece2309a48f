"""Which captures are of loops in few turns: those for backends that write the other turns out; see `turns`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_ops.compat import constant_in_graphs

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WRITERS: set[Callable[..., Any]] = set()


@dataclass
class Capture:
    """A capture in which loops may run few turns; whether one did."""

    used: bool = False


class _Captures(threading.local):
    """The one that goes on in a thread."""

    now: Capture | None = None


_captures = _Captures()


def writes_out(backend: _Function) -> _Function:
    """A decorator of backends, and of methods that are such, which write out what was captured of loops."""
    _WRITERS.add(backend)
    return backend


@contextmanager
def few_turns(backend: Any) -> Iterator[Capture]:
    """Loops of static forms that are captured inside, in this thread, run few turns where ``backend`` writes the others
    out.
    """
    backend = getattr(backend, "compiler_fn", backend)  # torch.compile's wrapper of one with options
    before, now = _captures.now, Capture()
    _captures.now = now if getattr(backend, "__func__", backend) in _WRITERS else None
    try:
        yield now
    finally:
        _captures.now = before


def capture() -> Capture | None:
    """The capture that goes on in this thread, where loops may run few turns in it."""
    return _captures.now


@constant_in_graphs
def may_be_few() -> bool:
    """Whether there is one, as what is captured may ask."""
    return capture() is not None
