"""Builds the C++ of the CPU backend: once for a machine, torch and source, in some seconds, without Inductor.

Inductor could build it, too; to import it and to ask it which vectors there are takes two seconds of every process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
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
    compiler, flags, libraries = _commands()
    of = [torch.__version__, torch.__file__, *compiler, *flags, *libraries, _processor()]
    name = hashlib.sha256(source.read_bytes() + "\0".join(of).encode()).hexdigest()[:16]
    try:
        directory = user_directory() / "cpu"
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / f"{name}.so"
        if not library.exists():
            _compile([*compiler, *flags, str(source)], libraries, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:  # the latter of users without a home
        raise BuildError(str(error)) from error


def _commands() -> tuple[list[str], list[str], list[str]]:
    """The compiler's words, those before a source, and libraries, which are named behind what needs them."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    compiler = chosen or [name for name in _COMPILERS if shutil.which(name)][:1]
    if not compiler:
        raise BuildError(f"none of {', '.join(_COMPILERS)} is on PATH, and CXX is not set.")
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"{sys.platform} is not supported.")
    home = Path(torch.__file__).parent
    threads = ["-fopenmp"] if sys.platform == "linux" else []
    return compiler, [*_FLAGS, *threads, f"-I{home / 'include'}"], [f"-L{home / 'lib'}", "-ltorch_cpu"]


def _processor() -> str:
    """What `-march=native` depends on: homes are shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compile(command: list[str], libraries: list[str], library: Path) -> None:
    """Under another name first, and on the disk: another process may load it as soon as it is there, and would be
    killed by one that is not whole.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        whole = [*command, "-o", str(made), *libraries]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{command[0]} took more than {_SECONDS} s.") from None
        if done.returncode:
            words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise BuildError(f"{command[0]}: {next((line for line in words if 'error' in line), words[0])}")
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(library)
