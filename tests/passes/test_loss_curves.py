"""Twenty steps of training as eager torch does them: a few of the cases of `python -m tests.passes.loss_curves`."""

from __future__ import annotations

import dataclasses

import pytest

from tests.passes.loss_curves import Curve, curve, row


@pytest.mark.parametrize(("family", "program"), [("qwen3_moe", "checkpointing"), ("olmoe", "autocast")])
def test_losses_of_twenty_steps(family, program):
    case = curve(family, program)
    assert case.good, row(case)
    assert case.exact[-1] < 0.95 * case.exact[0], "the model learns, so that steps matter"


@pytest.mark.parametrize(
    "change",
    [{"compiled": [3.0, 2.5]}, {"fused": 1}, {"graphs": 2}, {"errors": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_bad_case_is_not_good(change):
    case = Curve("family", "plain", [3.0, 2.0], [3.0, 2.1], [3.0, 2.1], 0.1, 2, 1, 0)
    assert case.good
    bad = dataclasses.replace(case, **change)
    assert not bad.good and "TOO FAR" in row(bad)
