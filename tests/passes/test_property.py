"""Generated MoE blocks and near misses: compiled, each gives what eager torch gives; blocks fuse."""

from __future__ import annotations

import pytest

from tests.passes import generator
from tests.passes.compare import settled

BLOCKS, NEAR_MISSES = 40, 12


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_block(seed):
    """Refusing everything is not soundness: a block that nothing was changed in is fused, but for one of which every
    size is a symbol.
    """
    case = generator.make(seed, misses=0)
    outcome = settled(generator.run, case)
    assert outcome.fused == 1 or case.dynamic == "all", str(case)


@pytest.mark.parametrize("name", generator.MUTATIONS)
def test_near_miss(name):
    """Each near miss on its own, on the first block that it applies to."""
    settled(generator.run, generator.with_mutation(name))


@pytest.mark.parametrize("seed", range(1000, 1000 + NEAR_MISSES))
def test_changed_block(seed):
    """One or two near misses in one block, drawn at random."""
    settled(generator.run, generator.make(seed, misses=1 + seed % 2))
