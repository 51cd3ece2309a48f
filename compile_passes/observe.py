"""Notice calls of torch.compile while a block runs, without leaving anything behind in torch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Calls:
    """What was seen: ``made`` when this thread called torch.compile for the default backend."""

    thread: int = field(default_factory=threading.get_ident)
    made: bool = False


_lock = threading.Lock()
_watching: list[Calls] = []
_originals: list[Any] = []


@contextmanager
def default_compilations() -> Iterator[Calls]:
    """Watch this thread's calls of torch.compile for the default backend.

    Blocks may nest, and overlap between threads: torch.compile is replaced when the first begins and put back when the
    last ends. An inner block hands what it has seen to the block around it, since what was compiled may be called
    there: the inner one then reports nothing.
    """
    calls = Calls()
    with _lock:
        _watching.append(calls)
        if len(_watching) == 1:
            _install()
    try:
        yield calls
    finally:
        with _lock:
            _watching.remove(calls)
            if not _watching:
                _uninstall()
            outer = [other for other in _watching if other.thread == calls.thread]
        if outer:
            outer[-1].made |= calls.made
            calls.made = False


def _install() -> None:
    original = torch.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend", "inductor") == "inductor" and not kwargs.get("disable", False):
            _note()
        return original(*args, **kwargs)

    _originals.append(original)
    _replace(compile)


def _uninstall() -> None:
    """Put torch.compile back; not where somebody has replaced ours meanwhile, who will put it back and can call it."""
    original = _originals.pop()
    if getattr(torch.compile, "__wrapped__", None) is original:
        _replace(original)


def _replace(function: Any) -> None:
    setattr(torch, "compile", function)  # noqa: B010  (mypy: a function of the module, not an attribute to assign)


def _note() -> None:
    thread = threading.get_ident()
    with _lock:
        mine = [calls for calls in _watching if calls.thread == thread]
    if mine:
        mine[-1].made = True
