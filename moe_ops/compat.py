"""The private or version-dependent parts of torch that the package uses, each behind a feature test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AfterImport(MetaPathFinder):
    """Lets the other finders find one module, and has a callback run once after its import."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Once(spec.loader, self)
        return spec


class _Once(Loader):
    """Stands in for a module's loader until the module's code runs: from then on only its own loader is to be seen."""

    def __init__(self, loader: Any, finder: _AfterImport) -> None:
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:  # a spec may have been asked for, and kept, without an import
            sys.meta_path.remove(self.finder)
            self.finder.callback()


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Run ``callback`` now if module ``name`` is loaded, else right after its first import.

    ``torch.utils.flop_counter`` imports triton; formulas registered this way do not make every process pay for that.
    The module keeps its own loader and spec, so that reloading, its source and pickling by name are as without this.
    """
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))
