"""Result files: one JSON document per run, rewritten after every row so that a killed run keeps what it has.

A run never writes over the file of another one.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meta.schemes import SCHEMES, resolve_scheme

RESULTS = Path(__file__).parent / "results"
OURS = "ours"  # what names of this project's peers begin with
PACKAGES = ("torch", "triton", "transformers", "moe-compile")


def new_path(given: Path | None, default: Path) -> Path:
    """Where a run's results go: ``given``, or ``default`` with the first number behind its name that is free.

    Raises:
        ValueError: ``given`` is there already.
    """
    if given is not None:
        _must_be_new(given)
        return given
    numbered, number = default, 1
    while numbered.exists():
        number += 1
        numbered = default.with_stem(f"{default.stem}-{number}")
    return numbered


def _must_be_new(path: Path) -> None:
    if path.exists():
        raise ValueError(
            f"benchmarks: --json must name a new file, got {path}, which holds an older result. Name another one, or "
            "move that one away."
        )


class ResultFile:
    """A growing list of rows under a header that says when, where, with what and how they were measured.

    Raises:
        ValueError: the file is there already.
    """

    def __init__(self, path: Path | None, kind: str, method: str, *, commit: str, **header: Any) -> None:
        if path is not None:
            _must_be_new(path)
        self.path = path
        self.document: dict[str, Any] = {
            "kind": kind,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "device": device_name(),
            "commit": commit,
            "versions": versions(),
            "method": method,
            **header,
            "rows": [],
        }

    @classmethod
    def resume(cls, path: Path, kind: str, method: str, *, commit: str, **header: Any) -> ResultFile:
        """The file of an interrupted run, with its rows, to which more are added; `resumed` in it says when.

        Raises:
            ValueError: there is none, or it was made in another way, of other code, or elsewhere.
        """
        if not path.exists():
            raise ValueError(
                f"benchmarks: --resume must name the file of an interrupted run, got {path}, which is not there. "
                "Use --json for a new one."
            )
        document = json.loads(path.read_text())
        resumed = cls(None, kind, method, commit=commit, **header)
        same = ("kind", "device", "commit", "versions", "method", *header)
        if other := [name for name in same if document.get(name) != resumed.document[name]]:
            raise ValueError(
                f"benchmarks: --resume must name a file made in the same way by the same code on the same device, got "
                f"{path} with another {', '.join(other)}. Start a new file with --json."
            )
        document.setdefault("resumed", []).append(resumed.document["date"])
        document["rows"] = document.pop("rows")  # last, as everywhere
        resumed.path, resumed.document = path, document
        return resumed

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.document["rows"]

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and write the whole file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """The rename keeps the old file whole until the new one is."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(partial, self.path)


def progress_bar() -> Progress:
    """On stderr, so that what is printed on stdout can be piped; without a terminal it prints nothing."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def versions() -> dict[str, str]:
    """Versions of what is measured, and of what measures."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def numbers_of(document: dict[str, Any]) -> str:
    """What the weights of a file of layers are: the scheme, or the dtype of weights as they are, for which one scheme
    stands on the command line.
    """
    scheme, dtype = str(document["scheme"]), document.get("dtype")
    if dtype is None or SCHEMES[scheme].quantized:
        return scheme
    return resolve_scheme("benchmarks", None, getattr(torch, dtype)).name


def device_name() -> str:
    """The GPU's name, or the CPU's architecture and core count."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def current_commit() -> str:
    """The commit of this checkout."""
    return commit_of(Path(__file__).parent)


def commit_of(folder: Path) -> str:
    """The commit of a checkout ("+" when files differ from it), or "unknown" of another folder."""
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def why(failure: Exception) -> str:
    """One line: the first of the message, or the last where the first only says where (Triton's compiler does so)."""
    lines = [line for line in str(failure).strip().splitlines() if line.strip()] or [""]
    return f"{type(failure).__name__}: {lines[-1 if lines[0].endswith(':') else 0].strip()[:200]}"


def load_results(folder: Path = RESULTS, kind: str | None = None) -> dict[str, dict[str, Any]]:
    """Result documents of a folder by file stem, in name order; `kind` keeps one kind."""
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {stem: document for stem, document in documents.items() if kind in (None, document["kind"])}
