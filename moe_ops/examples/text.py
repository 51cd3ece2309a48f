"""Text that every machine with Python has, as bytes: docstrings of the standard library, or of this package."""

from __future__ import annotations

import ast
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import moe_ops

SYMBOLS = 256  # a token is a byte
SHORTEST = 80  # characters of a docstring that is kept: shorter ones are hardly sentences
HELD_OUT = 10  # one module of so many is for validation


def docstrings(folder: Path) -> list[bytes]:
    """For each module of ``folder``, in the order of their names, its longer docstrings below each other."""
    found = []
    for path in sorted(folder.glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # what this Python does not read is no text of ours either
            continue
        owners = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        texts = [text for text in map(ast.get_docstring, owners) if text and len(text) >= SHORTEST]
        if texts:
            found.append("\n\n".join(texts).encode(errors="replace"))
    return found


@cache
def split() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes of other modules to validate on, uint8 [N] and [M], about ten to one."""
    modules = docstrings(Path(sysconfig.get_path("stdlib")))
    if len(modules) < HELD_OUT:  # a Python that comes without its sources
        modules = docstrings(Path(moe_ops.__file__).parent)
    held_out = modules[HELD_OUT - 1 :: HELD_OUT]
    rest = [module for place, module in enumerate(modules, 1) if place % HELD_OUT]
    return _joined(rest), _joined(held_out)


def windows(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """``count`` random windows of ``text`` as tokens, int64 [count, length]; the same ones for a seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def _joined(modules: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n\n".join(modules)), dtype=torch.uint8)
