"""Collection rules shared by every test folder.

- `tests/interpreted` runs kernels in Triton's CPU interpreter. The switch is read when a kernel module is imported, so
  those tests are a process of their own: they are collected only when TRITON_INTERPRET=1, and then nothing else is.
- Tests marked `cuda` are skipped where there is no CUDA device.
- No test may make a pass fail: a pass that fails leaves the graph as it was, so that the outputs alone would not tell.
  Tests marked `provokes_errors` do it on purpose.
"""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest import runner
from _pytest.logging import catching_logs

import compile_passes  # noqa: F401  (registers the backends in a checkout that is not installed)
from compile_passes.passes import last_errors
from moe_ops import runtime
from moe_ops.ops import LAUNCHERS
from tests.lean import leave_out

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TESTS = Path(__file__).parent


def _roomy(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    return runner.pytest_runtest_protocol(item, nextitem)


# CPython keeps its frames in chunks of 16 KiB, and maps and unmaps memory at every call across the end of one: two
# thousand times in a small test, where a loop of Dynamo or of Triton's interpreter happens to lie there. A frame as
# large as this comes with a chunk of 2 MiB, of which the deeper ones use what is left.
_roomy.__code__ = _roomy.__code__.replace(co_stacksize=(1 << 20) // 8)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, its fixtures included, where there is room for its frames."""
    return _roomy(item, nextitem)


def _on_the_root(catching: catching_logs[Any]) -> Any:
    """pytest hangs its handlers on all 83 loggers of torch that do not propagate, too, six times for a test: that takes
    a millisecond, and for a handler torch writes a trace of every compilation, graphs and guards as text and JSON.
    """
    root = logging.getLogger()
    root.addHandler(catching.handler)
    catching.attached_loggers.append(root)
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    return catching.handler


def pytest_configure(config: pytest.Config) -> None:
    """Markers that need this file, and less of what shows nothing."""
    config.addinivalue_line("markers", "provokes_errors: makes a pass fail on purpose")
    gc.set_threshold(50_000, 20, 50)
    leave_out()
    if set(catching_logs.__slots__) == {"attached_loggers", "handler", "level", "orig_level"}:
        catching_logs.__enter__ = _on_the_root  # type: ignore[method-assign]
    root = logging.getLogger()
    set_level = root.setLevel
    # pytest sets the level that there is, twelve times for a test, and each time every logger forgets what it knew.
    root.setLevel = lambda level: None if level == root.level else set_level(level)  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="module")
def _only_objects_of_the_module() -> None:
    """A collection, and a search of all objects for optimizers (every `moe_ops.compile` of a list of experts), goes
    through what this module's tests made: in the heap of a whole run each takes a second, in that of one file nothing.
    """
    torch.compiler.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_learnt() -> None:
    """No test runs what a call of another one, under other plans or backends, left behind."""
    for launcher in LAUNCHERS.values():
        launcher.forget()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill every uninitialised allocation, with NaN where there is one, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_hopper() -> None:
    """Skips where kernels in Gluon for Hopper do not run."""
    from moe_ops.kernels.triton.launch import hopper_with_gluon

    if not hopper_with_gluon(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU and Gluon")


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Why each recorded call of the Triton backend has no record."""
    from moe_ops.kernels.triton.record import Recorder

    found: list[str | None] = []
    finish = Recorder.finish

    def note(self: Recorder, result: Any) -> Any:
        made = finish(self, result)
        found.append(self.reason)
        return made

    monkeypatch.setattr(Recorder, "finish", note)
    return found


@pytest.fixture(autouse=True)
def _no_errors_in_passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test during which a pass failed, even when it cleared the counters."""
    last_errors.clear()
    yield
    errors = list(last_errors)
    last_errors.clear()
    if errors and request.node.get_closest_marker("provokes_errors") is None:
        pytest.fail("a pass of moe_ops failed:\n" + "\n".join(errors), pytrace=False)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep the interpreter's folder and the others apart."""
    if collection_path.parent != TESTS or not collection_path.is_dir():
        return None
    return True if (collection_path.name == "interpreted") != INTERPRETED else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `cuda` tests without a device; those marked `slow` first, so that no process is left with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry each time that a call goes through a launcher."""
    calls: list[int] = []
    call = runtime.Launcher.__call__
    monkeypatch.setattr(
        runtime.Launcher, "__call__", lambda self, *args, **kwargs: calls.append(1) or call(self, *args, **kwargs)
    )
    return calls
