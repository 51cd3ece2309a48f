"""What is never negative, whatever the data, and what only looks so."""

import pytest
import torch

from compile_passes.patterns.signs import is_not_negative
from compile_passes.reading import Reading
from tests.passes.blocks import capture

CASES = {
    "a sum": (lambda x: x.sigmoid() + x.softmax(-1), True),
    "a difference as a sum": (lambda x: torch.add(x.sigmoid(), x.softmax(-1), alpha=-1), False),
    "a product of two": (lambda x: torch.einsum("ab,ab->ab", x.sigmoid(), x.softmax(-1)), True),
    "a product of three": (lambda x: torch.einsum("ab,ab,ab->ab", x.sigmoid(), x.softmax(-1), x), False),
    "clamped below": (lambda x: x.clamp(min=0.0), True),
    "clamped below, and above to less": (lambda x: x.clamp(min=0.0, max=-1.0), False),
    "clamped to a range": (lambda x: x.clamp(0.0, 1.0), True),
    "counts": (lambda x: (x > 0).long().cumsum(0).int(), True),
    "what wraps": (lambda x: (x > 0).long().cumsum(0).to(torch.int8), False),
    "written through a view": (lambda x: [y := x.sigmoid(), y[:1].sub_(2), y * 1][-1], False),
    "a float as an integer": (lambda x: (x.sigmoid() * 300).to(torch.int8), False),
}


@pytest.mark.parametrize("case", CASES)
def test_is_not_negative(case):
    function, wanted = CASES[case]
    graph = capture(lambda x: function(x), torch.randn(4, 5)).graph
    (value,) = graph.output_node().args[0]
    assert is_not_negative(Reading(graph), value) is wanted
