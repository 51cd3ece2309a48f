"""How one MoE layer is run on a GPU, where that was measured: files of plans, by layer and number of tokens.

What a backend can be told, and what it does where nothing was measured, is in the module that its row in
:data:`moe_ops.backends.BACKENDS` names. A plan is chosen from sizes alone, inside the operator, so that a batch size
never causes a guard or a recompile.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meta.dims import LayerProblem
from moe_ops import backends

CONFIG_DIR = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class LayerKey:
    """What a tuned plan is filed under; the number of tokens selects among the plans of one key."""

    scheme: str
    format: str
    E: int
    K: int
    H: int
    I: int
    gated: bool

    @classmethod
    def of(cls, problem: LayerProblem) -> LayerKey:
        """The key of a layer whose sizes are numbers."""
        E, K, H, I = (int(size) for size in (problem.E, problem.K, problem.H, problem.I))
        return cls(problem.scheme, problem.format, E, K, H, I, problem.gated)

    def __str__(self) -> str:
        return (
            f"{self.scheme} {self.format} E={self.E} K={self.K} H={self.H} I={self.I} "
            f"{'gated' if self.gated else 'plain'}"
        )


@dataclass(frozen=True)
class Plan:
    """How one layer is run.

    Args:
        backend: name of a row of :data:`moe_ops.backends.BACKENDS`.
        sequence: the kernels, a name of the ``SEQUENCES`` of that backend's plans.
        configs: what each of them is told, of the types that ``SEQUENCES`` holds.
        us: measured microseconds, None for a plan by cost.
    """

    backend: str
    sequence: str
    configs: tuple[Any, ...]
    us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, configs as objects."""
        configs = [config._asdict() for config in self.configs]
        return {"backend": self.backend, "sequence": self.sequence, "configs": configs, "us": self.us}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Plan | None:
        """None for a plan that a version with other backends or sequences wrote."""
        types = backends.sequences(row.get("backend", "")).get(row.get("sequence", ""))
        if types is None:
            return None
        # By the fields of today: a file that an older version tuned may hold others.
        configs = [
            kind(**{field: values[field] for field in kind._fields if field in values})
            for kind, values in zip(types, row["configs"], strict=True)
        ]
        return cls(row["backend"], row["sequence"], tuple(configs), row["us"])


def user_directory() -> Path:
    """Where plans that a user tuned live: they come before the shipped ones."""
    return Path.home() / ".cache" / "moe_ops"


def file_name(gpu: str) -> str:
    """`NVIDIA H200` -> `nvidia_h200.json`."""
    return "_".join(gpu.lower().split()) + ".json"


def write(table: Mapping[str, Any], path: Path) -> None:
    """Write a file of plans, one a line. The rename keeps the old file whole until the new one is."""
    head = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in table.items() if name != "plans"]
    keys = [
        f"  {json.dumps(key)}: {{\n"
        + ",\n".join(f"   {json.dumps(tokens)}: {json.dumps(row)}" for tokens, row in rows.items())
        + "\n  }"
        for key, rows in table["plans"].items()
    ]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(["{", *head, ' "plans": {', ",\n".join(keys), " }", "}"]) + "\n")
    os.replace(partial, path)


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[int, Plan | None]]]:
    """A file of plans, as it is stored, and key -> tokens -> plan: None where nothing won, or for another version.

    Raises:
        ValueError: it is no whole one.
    """
    try:
        stored = json.loads(path.read_text())
        found = {
            key: {int(tokens): None if row is None else Plan.from_json(row) for tokens, row in rows.items()}
            for key, rows in stored["plans"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = "must be a whole file of plans, as moe-ops tune writes it"
        raise ValueError(f"{path} {rule}, got {type(error).__name__}: {error}. Delete it, and tune again.") from error
    return stored, found


@cache
def tuned(gpu: str) -> dict[str, dict[int, Plan]]:
    """All measured plans for a GPU, key -> tokens -> plan. Read once, before any graph is captured."""
    plans: dict[str, dict[int, Plan]] = {}
    for directory in (CONFIG_DIR, user_directory()):
        path = directory / file_name(gpu)
        if not os.path.exists(path):
            continue
        try:
            _, found = read(path)
        except ValueError as error:  # calls that ask for no plan do not end by one
            warnings.warn(f"moe_ops: {error} Until then its plans are left out.", stacklevel=2)
            continue
        for key, rows in found.items():
            of_key = plans.setdefault(key, {})
            for tokens, plan in rows.items():
                of_key.pop(tokens, None)  # where nothing won, no plan of another file does
                if plan is not None:
                    of_key[tokens] = plan
    return plans


@cache
def measured(key: LayerKey, at: int, gpu: str) -> Plan | None:
    """The nearest measured plan within half an octave of the tokens of bucket `at`."""
    rows = tuned(gpu).get(str(key), {})
    near = min(rows, key=lambda tokens: abs(bucket(tokens) - at), default=None)
    return rows[near] if near is not None and abs(bucket(near) - at) <= 1 else None


def fastest_backend(problem: LayerProblem, device: torch.device) -> str | None:
    """The backend that measured fastest for a layer and its number of tokens, None where nothing was measured."""
    if device.type != "cuda":
        return None
    plan = measured(LayerKey.of(problem), bucket(int(problem.T)), gpu_of(device)[0])
    return None if plan is None else plan.backend


def bucket(tokens: int) -> int:
    """2 log2 of the number of tokens, rounded to the nearest integer: the granularity at which plans differ."""
    return round(2 * math.log2(max(tokens, 1)))


def tokens_of(at: int) -> int:
    """The number of tokens in the middle of bucket `at`."""
    return round(math.exp2(at / 2))


def gpu_of(device: torch.device) -> tuple[str, int]:
    """(name, compute capability as 90) of a device, without an index of the current one."""
    return _gpu_at(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _gpu_at(index: int) -> tuple[str, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), 10 * major + minor
