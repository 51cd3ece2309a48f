"""Builds the C++ of the CPU backend: once for a machine, torch and source, in some seconds, without Inductor.

Inductor could build it, too; to import it and to ask it which vectors there are takes two seconds of every process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from moe_ops.plans import user_directory

_COMPILERS = ("g++", "clang++", "c++")
# Vectors of this machine; sums in the order in which they are written.
_FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -shared -fPIC".split()
_SECONDS = 300


class BuildError(Exception):
    """Why there is no library."""


def built(source: Path) -> ctypes.CDLL:
    """The library of a C++ file that uses torch's C interface.

    Raises:
        BuildError: without a compiler, or where it, or the loader, refuses.
    """
    command = _command()
    text = source.read_bytes()
    of = [torch.__version__, torch.__file__, *command, _processor()]
    name = hashlib.sha256(text + "\0".join(of).encode()).hexdigest()[:16]
    directory = user_directory() / "cpu"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / f"{name}.so"
        if not library.exists():
            _compile(command, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{directory}: {error}") from error


def _command() -> list[str]:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise BuildError(f"none of {', '.join(_COMPILERS)} is on PATH, and CXX is not set.")
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"{sys.platform} is not supported.")
    home = Path(torch.__file__).parent
    threads = ["-fopenmp"] if sys.platform == "linux" else []
    return [*compiler.split(), *_FLAGS, *threads, f"-I{home / 'include'}", f"-L{home / 'lib'}", "-ltorch_cpu"]


def _processor() -> str:
    """What `-march=native` depends on: homes are shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compile(command: list[str], source: Path, library: Path) -> None:
    """Under another name first: another process may load it as soon as it is there."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        # Libraries are named behind what needs them.
        whole = [*command[:1], str(source), "-o", str(made), *command[1:]]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{command[0]} took more than {_SECONDS} s.") from None
        if done.returncode:
            words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise BuildError(f"{command[0]}: {next((line for line in words if 'error' in line), words[0])}")
        made.replace(library)
