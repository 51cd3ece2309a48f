"""The examples in the documentation of public functions run and print what they say."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist

import moe_ops
from moe_ops import api, checkpoints, debugging, ep, layer, load, quantized, quantizing, stages

FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = {
    test.name: test
    for module in (api, stages, layer, ep, debugging, load, checkpoints, quantized, quantizing)
    for test in FINDER.find(module, globs={"torch": torch, "moe_ops": moe_ops})
    if test.examples
}


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    """What torchrun makes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(EXAMPLES[name]).failed == 0


OTHERS = ("debug", "Prepared", "QuantizedWeight")
FUNCTIONS = [name for name in moe_ops.__all__ if name not in (*moe_ops._FROM_PASSES, *OTHERS)]
FUNCTIONS += ["ep.prepare", "ep.experts", "ep.finalize"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_documents_itself(name: str) -> None:
    documentation = attrgetter(name)(moe_ops).__doc__
    assert all(section in documentation for section in ("Args:", "Returns:", "Raises:", "Source:", "Example:"))
