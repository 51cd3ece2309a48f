"""Data parallel and sharded training of compiled models: blocks fused, one process's gradients, no recompilation."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.distributed.processes import START
from tests.passes import two_processes
from tests.passes.two_processes import Outcome

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All ways, in one pair of processes, whichever of the test processes asks first: starting them from nothing takes
    longer than what they do.
    """
    root = tmp_path_factory.getbasetemp()
    folder = Path(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root, "two_processes")
    with FileLock(f"{folder}.lock"):
        if not (folder / "outcomes").exists():
            folder.mkdir(exist_ok=True)
            torch.multiprocessing.start_processes(
                two_processes.run, (str(folder),), two_processes.RANKS, start_method=START.get_start_method()
            )
    found: dict[str, Outcome] = pickle.loads((folder / "outcomes").read_bytes())
    return found


@pytest.mark.parametrize("way", two_processes.WAYS)
def test_gradients_are_those_of_one_process(outcomes, way):
    outcome = outcomes[way]
    assert outcome.worst <= 2e-5 and outcome.errors == 0


@pytest.mark.parametrize("way", two_processes.WAYS)
def test_no_step_compiles_again(outcomes, way):
    first, *later = outcomes[way].graphs
    assert first > 0 and set(later) == {first}


@pytest.mark.parametrize("way", ["ddp", "fsdp_layers", "fsdp_whole"])
def test_every_block_is_fused(outcomes, way):
    assert (outcomes[way].fused, outcomes[way].refused) == (2, 0)


def test_blocks_that_buckets_cut_are_named_with_the_cure(outcomes):
    """Under plain torch.compile Dynamo cuts the graph of a model in DistributedDataParallel."""
    assert outcomes["ddp_cut"].refused > 0
    assert "torch._dynamo.config.optimize_ddp = False" in outcomes["ddp_cut"].said
