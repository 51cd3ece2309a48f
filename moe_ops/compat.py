"""The private or version-dependent parts of torch that the package uses, each behind a feature test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def has_grouped_mm() -> bool:
    """Whether torch has a grouped GEMM under either of its names."""
    return hasattr(torch.nn.functional, "grouped_mm") or hasattr(torch, "_grouped_mm")


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """torch's grouped GEMM.

    Args:
        rows: ``[R, K]``; or ``[N, R]`` for the product that sums over the rows of each group.
        weight: ``[E, K, N]``; or ``[R, K]`` for the second form.
        offsets: ``[E]`` int32 cumulative ends.

    Returns:
        ``[R, N]``, rows past ``offsets[-1]`` uninitialised; or ``[E, N, K]``.
    """
    if hasattr(torch.nn.functional, "grouped_mm"):
        return torch.nn.functional.grouped_mm(rows, weight, offs=offsets)
    return torch._grouped_mm(rows, weight, offs=offsets)


class _AfterImport(MetaPathFinder, Loader):
    """Loads one module as usual, then runs a callback; removes itself first, so it acts once."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        self.loader: Any = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.callback()


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Run ``callback`` now if module ``name`` is loaded, else right after its first import.

    ``torch.utils.flop_counter`` imports triton; formulas registered this way do not make every process pay for that.
    """
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))
