"""Sorted rows that are cut into a slice for each expert, by counts that the host reads."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tests.passes import generator
from tests.passes.compare import Outcome
from tests.passes.generator import GROUPED, Case


def make(seed: int, misses: int | None = None) -> Case:
    """The next routed case of sorted rows, cut."""
    rng = random.Random(seed)
    while (case := generator.make(rng.randrange(10**9), misses)).form != GROUPED or case.dynamic == "all":
        pass
    return replace(case, seed=seed, sliced=rng.choice(("products", "experts")))


def run(case: Case) -> Outcome | None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        return generator.run(case)
