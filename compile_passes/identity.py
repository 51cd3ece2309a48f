"""What compiled code depends on besides the graph: the identity that Inductor's caches store next to it.

Operator implementations, fakes and tuned tables are in none of Inductor's keys, so this identity covers every source
and configuration file of the three packages, the versions of torch and triton, the device and the backend override.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("meta", "moe_ops", "compile_passes")
_SUFFIXES = frozenset({".py", ".json", ".cu", ".cuh", ".h"})


def identity(extra: str = "") -> str:
    """A digest that changes whenever the passes or the operators may behave differently."""
    parts = (_sources(), _versions(), _device(), os.environ.get("MOE_OPS_BACKEND", ""), extra)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> str:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return f"{torch.__version__} {triton}"


@cache
def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
