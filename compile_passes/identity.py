"""What compiled code depends on besides the graph: the identity that Inductor's caches store next to it.

Operator implementations, fakes and tuned tables are in none of Inductor's keys, so this identity covers every source
and configuration file of the three packages, the versions of torch and triton, every visible device and the backend
override.
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
# The distributions that hold the module `triton`: the released one, and the one that nightly builds of torch require.
_TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")


def identity(extra: str = "") -> str:
    """A digest that changes whenever the passes or the operators may behave differently."""
    parts = (_sources(), _versions(), _devices(), os.environ.get("MOE_OPS_BACKEND", ""), extra)
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
    return " ".join([f"torch {torch.__version__}", *filter(None, map(_version, _TRITONS))])


def _version(distribution: str) -> str:
    """``name version`` of an installed distribution, else nothing."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return ""


def _devices() -> str:
    """Name and capability of every visible CUDA device, in order: a model may run on any, or several, of them.

    The answer is kept per set of visible devices, which a process may change until CUDA starts.
    """
    return _describe(torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"


@cache
def _describe(count: int) -> str:
    devices = ((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count))
    return "; ".join(f"{name} {capability}" for name, capability in devices)
