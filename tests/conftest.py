"""Collection rules shared by every test folder.

- `tests/interpreted` runs kernels in Triton's CPU interpreter. The switch is read when a kernel module is imported, so
  those tests are a process of their own: they are collected only when TRITON_INTERPRET=1, and then nothing else is.
- Tests marked `cuda` are skipped where there is no CUDA device.
"""

import os
from pathlib import Path

import pytest
import torch

import compile_passes  # noqa: F401  (registers the backends in a checkout that is not installed)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep the interpreter's folder and the others apart."""
    if collection_path.parent != TESTS or not collection_path.is_dir():
        return None
    return True if (collection_path.name == "interpreted") != INTERPRETED else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `cuda` tests without a device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)
