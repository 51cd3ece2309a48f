"""Less of what takes a tenth of the suite's time and shows nothing in it."""

from __future__ import annotations

import torch
import torch._dynamo.config
import torch._dynamo.guards


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
