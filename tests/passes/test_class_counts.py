"""One-hots whose number of classes the data says: bound with a fixed one that a trial has proved, fused, put back."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moe_ops
from benchmarks.top_two import TopTwo
from benchmarks.top_two import safe_one_hot as another
from compile_passes.class_counts import with_fixed_counts, without_class_counts
from compile_passes.loops import STATIC
from compile_passes.source import build, read_function
from tests.passes.compare import check

POLICIES = ("all", "threshold", "none")


def layer(**options) -> TopTwo:
    torch.manual_seed(0)
    return TopTwo(threshold=0.45, **options)


def tokens(count: int) -> Tensor:
    return torch.randn(2, count, 32, generator=torch.Generator().manual_seed(count))


def prepared(model: nn.Module) -> str:
    """What `moe_ops.compile` says of ``model``."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        moe_ops.compile(model)
    (line,) = (str(warning.message) for warning in said)
    return line


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fused(policy: str, train: bool):
    """One graph, in which every sequence has slots of its own; equal to the original, gradients too."""
    own, other = layer(second_policy_eval=policy, second_policy_train=policy), layer()
    other.load_state_dict(own.state_dict())
    own.train(train)
    said = prepared(own)
    assert "`(indexes.unsqueeze(-1) == torch.arange(max_length, device=indexes.device)).long()`" in said
    assert "moe_ops.restore(model) undoes it." in said and "runs." not in said
    outcome = check(own, tokens(12), gradients=train, fullgraph=True, tolerance=1e-4)
    assert (outcome.problem, outcome.fused) == (None, 1)
    wanted = own(tokens(12))
    moe_ops.restore(own)
    assert "forward" not in vars(own.gate) and STATIC not in vars(own.gate)
    torch.testing.assert_close(own(tokens(12)), wanted)


# Every policy where tokens are dropped and where none is, and few slots for few tokens with one of them.
@pytest.mark.parametrize(
    ("count", "factor", "policy"),
    [*((40, 0.5, policy) for policy in POLICIES), *((3, 2.0, policy) for policy in POLICIES), (3, 0.5, "all")],
    ids=str,
)
def test_capacities(count: int, factor: float, policy: str):
    model = layer(second_policy_eval=policy, capacity_factor_eval=factor).eval()
    expected = model(tokens(count))
    prepared(model)
    torch.testing.assert_close(model(tokens(count)), expected)
    outcome = check(model, tokens(count), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_random_policy():
    """What is drawn is drawn from the same numbers."""
    own, other = layer().eval(), layer().eval()
    assert "was proved equal" in prepared(own)
    results = []
    for one in (own, other):
        torch.manual_seed(1)
        results.append(one(tokens(12))[0])
    torch.testing.assert_close(*results)
    outcome = check(own, tokens(12), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_layers_share_a_sentence():
    model = nn.Sequential(*(nn.ModuleDict({"moe": layer(second_policy_eval="all")}) for _ in range(3))).eval()
    assert prepared(model).startswith("moe_ops.compile: 0.moe and 2 more (TopTwo) ask the data")
    assert all("forward" in vars(block["moe"].gate) for block in model)


def test_explain_says_so_before():
    (row,) = moe_ops.explain(nn.Sequential(layer().eval()), tokens(3)).refused
    assert "asks the data for its number of classes" in row.reason and "top_two.py:" in row.reason
    assert row.cure.startswith("moe_ops.compile(model) gives it a fixed number")


# ---- code that is and that is not of the form


def one_more(index, count):
    return F.one_hot(index, max(int(index.max()) + 1, count))[..., :count]


def of_keywords(index, count):
    return F.one_hot(index, num_classes=max(count, 1 + torch.max(index).item()))[..., :count]


def through_another(index, count):
    return another(index, count) * 2


def none_more(index, count):
    """The largest index has no class: it raises."""
    return F.one_hot(index, max(index.max(), count))[..., :count]


def of_others(index, count):
    return F.one_hot(index, max(index.flip(0).max() + 1, count))[..., :count]


def of_the_smallest(index, count):
    return F.one_hot(index, min(index.max() + 1, count))[..., :count]


def along_a_dimension(index, count):
    return F.one_hot(index, max(index.max(0) + 1, count))[..., :count]


def fewer_classes(index, count):
    return F.one_hot(index, max(index.max() + 1, count - 1))[..., :count]


def without_the_first(index, count):
    return F.one_hot(index, max(index.max() + 1, count))[..., 1:count]


def of_other_rows(index, count):
    return F.one_hot(index, max(index.max() + 1, count))[:count]


def changed_in_between(index, count):
    classes = max(index.max() + 1, count)
    index = index + 1
    return F.one_hot(index, classes)[..., :count]


def count_changed_in_between(index, count):
    classes = max(index.max() + 1, count)
    count = count * 2
    return F.one_hot(index, classes)[..., :count]


def of_another_one_hot(index, count):
    return dict(one_hot=one_more)["one_hot"](index, max(index.max() + 1, count))[..., :count]


HELPERS = {
    one_more: True, of_keywords: True, through_another: True, none_more: False, of_others: False,
    of_the_smallest: False, along_a_dimension: False, fewer_classes: False, without_the_first: False,
    of_other_rows: False, changed_in_between: False, count_changed_in_between: False, of_another_one_hot: False,
}  # fmt: skip


@pytest.mark.parametrize("function", HELPERS, ids=lambda function: function.__name__)
def test_form_of_the_code(function):
    """What is rewritten gives the same numbers, for indices within the count and beyond it."""
    changed = with_fixed_counts(read_function(function))
    assert (changed is not None) == HELPERS[function]
    if changed is not None:
        made = build(changed.source, changed.tree, changed.helpers)
        for index in (torch.tensor([[0, 3, 1]]), torch.tensor([[5, 0, 9]])):
            assert torch.equal(made(index, 4), function(index, 4))
            assert made(index, 4).dtype == torch.int64


def test_nothing_to_do():
    assert without_class_counts(nn.Linear(2, 2)) is None
    assert without_class_counts(layer().gate).said[0].startswith("line ")
