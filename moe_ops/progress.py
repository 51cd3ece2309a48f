"""Progress of what takes long: bars on a terminal, where rich is installed; lines that say what was found, always."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Bars:
    """Bars below each other, on stderr.

    Args:
        shown: rich's, or None where there is none.
    """

    def __init__(self, shown: Any | None) -> None:
        self._shown = shown

    def bar(self, description: str, total: int | None) -> Callable[..., None]:
        """Add a bar; what it returns takes its new ``completed``, ``total`` and ``description``, or advances it by one
        where it is told none of the first.
        """
        if self._shown is None:
            return lambda **changes: None
        shown, task = self._shown, self._shown.add_task(description, total=total)

        def update(**changes: Any) -> None:
            shown.update(task, **(changes if "completed" in changes else {"advance": 1, **changes}))

        return update

    def say(self, text: str) -> None:
        """A line above the bars."""
        if self._shown is None:
            print(text, file=sys.stderr)
        else:
            self._shown.console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Bars]:
    """Bars for as long as the context is open."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        yield Bars(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield Bars(shown)
