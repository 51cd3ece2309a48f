"""Which kernels with which tiles run one MoE layer on a GPU: measured plans where there are any, a rule elsewhere.

A plan is chosen from sizes alone, inside the operator, so that a batch size never causes a guard or a recompile.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meta.arch import FIRST_CAPABILITY
from meta.schemes import SCHEMES
from moe_ops.kernels.triton.config import MMConfig, SmallConfig

CONFIG_DIR = Path(__file__).parent / "configs"
#: Sequences of kernels. A file that a user tuned with an older version may name others, which are passed over.
PATHS = ("small", "grouped", "batched")


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

    def __str__(self) -> str:
        return (
            f"{self.scheme} {self.format} E={self.E} K={self.K} H={self.H} I={self.I} "
            f"{'gated' if self.gated else 'plain'}"
        )


@dataclass(frozen=True)
class Plan:
    """The kernels of one layer.

    Args:
        path: "small" (no sorting, two kernels), "grouped" or "batched".
        up, down: tiles of the two GEMMs; quantising schemes: `up` has a scale group of output columns.
        us: measured microseconds, None for a plan of the rule.
    """

    path: str
    up: MMConfig | SmallConfig
    down: MMConfig | SmallConfig
    us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, tiles as objects."""
        return {**asdict(self), "up": self.up._asdict(), "down": self.down._asdict()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Plan:
        tile = SmallConfig if row["path"] == "small" else MMConfig
        # By the fields of today: a file that an older version tuned may hold others.
        made = {name: tile(**{field: row[name][field] for field in tile._fields}) for name in ("up", "down")}
        return cls(**{**row, **made})


def user_directory() -> Path:
    """Where plans that a user tuned live: they come before the shipped ones."""
    return Path.home() / ".cache" / "moe_ops"


def file_name(gpu: str) -> str:
    """`NVIDIA H200` -> `nvidia_h200.json`."""
    return "_".join(gpu.lower().split()) + ".json"


@cache
def tuned(gpu: str) -> dict[str, dict[int, Plan]]:
    """All measured plans for a GPU, key -> tokens -> plan. Read once, before any graph is captured."""
    plans: dict[str, dict[int, Plan]] = {}
    for directory in (CONFIG_DIR, user_directory()):
        path = directory / file_name(gpu)
        if os.path.exists(path):
            for key, rows in json.loads(path.read_text())["plans"].items():
                known = {int(tokens): Plan.from_json(row) for tokens, row in rows.items() if row["path"] in PATHS}
                plans.setdefault(key, {}).update(known)
    return plans


@cache
def plan_for(key: LayerKey, tokens_log2: int, gpu: str, sm: int) -> Plan:
    """The plan for about 2**tokens_log2 tokens: the nearest measured one, else the rule's."""
    rows = tuned(gpu).get(str(key))
    if rows:
        return rows[min(rows, key=lambda tokens: abs(math.log2(tokens) - tokens_log2))]
    return rule(key, 1 << tokens_log2, sm)


def bucket(tokens: int) -> int:
    """log2 of the number of tokens, rounded to the nearest integer: the granularity at which plans differ."""
    return round(math.log2(max(tokens, 1)))


@cache
def gpu_of(index: int) -> tuple[str, int]:
    """(name, compute capability as 90) of a device."""
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), 10 * major + minor


SMALL_PAIRS_PER_EXPERT = 0.25  # below it, pairs hardly ever share an expert: streaming per pair moves no extra bytes


def rule(key: LayerKey, tokens: int, sm: int) -> Plan:
    """Plan for shapes that nobody measured, from rows per expert and the generation alone."""
    rows = tokens * key.K / key.E
    form = SCHEMES[key.scheme].rows
    # Small kernels quantise a token again for every few columns: only tuning can say where that pays.
    if key.format == "grouped" and form is None and (tokens == 1 or rows <= SMALL_PAIRS_PER_EXPERT):
        return Plan("small", SmallConfig(2, 2048, 4), SmallConfig(1, 256, 4))
    up, down = tiles(key.scheme, rows, sm)
    if form is not None and not key.gated:
        up = up._replace(block_n=form.group)
    return Plan(key.format, up, down)


def tiles(scheme: str, rows: float, sm: int) -> tuple[MMConfig, MMConfig]:
    """Tiles of the two GEMMs for about `rows` rows per expert."""
    tma = sm >= FIRST_CAPABILITY["tma"]
    if scheme == "fp32":
        tile = MMConfig(16 if rows <= 16 else 64, 64, 32, 8, 4, 3, a_tma=False, w_tma=False)
    elif SCHEMES[scheme].rows is not None:
        if rows > 64:
            # us on an H200, Qwen3-30B-A3B, T = 4096: GEMM 1 328, with 64 rows 393; GEMM 2 169, with 256 columns 236.
            up = MMConfig(128, 256, 128, 8, 8, 3, a_tma=tma, w_tma=tma)
            return up, MMConfig(64, 128, 128, 8, 4, 3, a_tma=tma, w_tma=tma)
        else:
            up = MMConfig(16 if rows <= 16 else 32, 256, 128, 1, 8, 3, a_tma=False, w_tma=tma)
            return up, up._replace(block_n=128, num_warps=4)
    elif rows <= 16:
        tile = MMConfig(16, 128, 128 if tma else 64, 1, 4, 3, a_tma=False, w_tma=tma)
    elif rows <= 48:
        tile = MMConfig(32 if rows <= 32 else 64, 128, 64, 8, 4, 4, a_tma=False, w_tma=tma)
    elif tma:
        # us of GEMM 2 on an H200, T = 4096, against tiles of 128 x 256: Qwen3-30B-A3B 232 and 246, OLMoE-1B-7B 256 and
        # 268, gpt-oss-120b's dimensions 770 and 785.
        up = MMConfig(128, 256, 64, 8, 8, 3, a_tma=True, w_tma=True)
        return up, MMConfig(128, 128, 64, 8, 4, 3, a_tma=True, w_tma=True)
    else:
        tile = MMConfig(128, 128, 32, 8, 8, 4, a_tma=False, w_tma=False)
    return tile, tile
