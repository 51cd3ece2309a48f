"""The examples in the documentation of public functions run and print what they say."""

from __future__ import annotations

import doctest

import pytest
import torch

import moe_ops
from moe_ops import api, checkpoints, debugging, layer, load, quantized, quantizing, stages

FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = {
    test.name: test
    for module in (api, stages, layer, debugging, load, checkpoints, quantized, quantizing)
    for test in FINDER.find(module, globs={"torch": torch, "moe_ops": moe_ops})
    if test.examples
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(EXAMPLES[name]).failed == 0


CLASSES = ("Prepared", "QuantizedWeight")
FUNCTIONS = [name for name in moe_ops.__all__ if name not in (*moe_ops._FROM_PASSES, "debug", *CLASSES)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_documents_itself(name: str) -> None:
    documentation = getattr(moe_ops, name).__doc__
    assert all(section in documentation for section in ("Args:", "Returns:", "Raises:", "Source:", "Example:"))
