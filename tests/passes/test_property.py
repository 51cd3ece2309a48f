"""Generated MoE blocks and near misses: compiled, each gives what eager torch gives; blocks fuse."""

from __future__ import annotations

import pytest

from tests.passes import generator
from tests.passes.compare import settled

BLOCKS, NEAR_MISSES, COUNTED = 32, 24, 32


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_block(seed):
    settled(generator.run, generator.make(seed, misses=0))


def test_blocks_fuse():
    """Refusing everything is not soundness: nearly every block that nothing was changed in is fused."""
    cases = (generator.make(seed, misses=0) for seed in range(3000, 3000 + COUNTED))
    outcomes = [generator.run(case) for case in cases if case.dynamic != "all"]
    fused = [outcome.fused == 1 for outcome in outcomes if outcome is not None]
    assert len(fused) > COUNTED // 2 and sum(fused) >= 0.98 * len(fused), f"{sum(fused)} of {len(fused)}"


@pytest.mark.parametrize("name", generator.MUTATIONS)
def test_near_miss(name):
    """Each near miss on its own, on the first block that it applies to."""
    settled(generator.run, generator.with_mutation(name))


@pytest.mark.parametrize("seed", range(1000, 1000 + NEAR_MISSES))
def test_changed_block(seed):
    """One or two near misses in one block, drawn at random."""
    settled(generator.run, generator.make(seed, misses=1 + seed % 2))
