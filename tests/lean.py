"""Less of what takes a sixth of the suite's time and shows nothing in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.guards
from torch._dynamo import symbolic_convert, trace_rules, utils
from torch.utils import _config_module, _traceback


def leave_out() -> None:
    """In this process; each by a feature test, as torch may have dropped it."""
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):  # 23 ms for a compilation: it empties the CPU's caches
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):  # the collector comes by itself
        torch._dynamo.config.run_gc_after_compile = False
    if hasattr(torch._dynamo.config, "fake_tensor_cache_enabled"):  # a graph seen once finds little of its own in it
        torch._dynamo.config.fake_tensor_cache_enabled = False
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        if not absent.is_available():  # else every manual_seed keeps a seed and a stack for a device that never comes
            absent.manual_seed_all = lambda _: None
    _of_logs()
    for module, name in ((trace_rules, "check_file"), (_traceback, "shorten_filename")):
        if hasattr(module, name):  # of a few hundred files, asked for every function and every guard
            setattr(module, name, cache(getattr(module, name)))
    if _SETTING <= set(getattr(getattr(_config_module, "_ConfigEntry", None), "__annotations__", ())):
        _read_settings_at_once()


def _of_logs() -> None:
    """Every compilation writes all of torch's settings as JSON into a record of itself, and looks in every source file
    for the functions that have the lines it traces, for a log that nobody reads.
    """
    for kind in ("get_dynamo", "compiler", "scrubbed_inductor", "functorch"):
        if hasattr(utils, f"_{kind}_config_for_logging"):
            setattr(utils, f"_{kind}_config_for_logging", lambda: None)
    if hasattr(symbolic_convert, "get_funcname"):
        symbolic_convert.get_funcname = lambda *_: None


_SETTING = {
    "alias", "deprecated", "env_value_force", "env_value_default", "justknob", "default", "user_override", "hide",
}  # fmt: skip


def _read_settings_at_once() -> None:
    """Dynamo reads a setting two thousand times in a small compilation: hardly any of them is more than a value."""
    kind, absent, simple = _config_module.ConfigModule, _config_module._UNSET_SENTINEL, dict[int, bool]()
    read = kind.__getattr__

    def is_simple(entry: Any) -> bool:
        values: Iterable[Any] = (entry.env_value_force, entry.env_value_default)
        plain = not (entry.alias or entry.deprecated or entry.justknob) and all(value is absent for value in values)
        return plain and isinstance(entry.default, (int, float, str, tuple, type(None)))

    def quickly(self: Any, name: str) -> Any:
        entry = self._config.get(name)
        if entry is None or entry.hide:
            return read(self, name)
        known = simple.get(id(entry))
        if known is None:
            known = simple[id(entry)] = is_simple(entry)
        if not known:
            return read(self, name)
        value = entry.user_override.get()
        return entry.default if value is absent else value

    kind.__getattr__ = quickly
