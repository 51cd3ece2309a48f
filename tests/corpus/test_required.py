"""The families that have to work: both compiled forms of the experts, bf16 and fp32, whole models of real classes.

For each: one graph, no break, every MoE layer fused, no recompile over token counts, and an error against the same
model in float64 that is no larger than the original code's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

import compile_passes  # noqa: F401  (registers the backends)
from compile_passes.tiny import use_experts
from tests.corpus.families import LAYERS, REQUIRED, available, build, one_layer, result, tokens

FORMS = ("grouped_mm", "batched_mm")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Whole-model medians move by this much when nothing but the order of an fp32 sum changes.
MEDIAN_SLACK = {"bf16": 1.02, "fp32": 1.05}

#: Of the families in fp32 both forms; in bf16, under sizes that nobody knows, one after the other.
BOTH = [(family, form) for form in FORMS for family in REQUIRED]
IN_TURN = [(family, FORMS[index % 2]) for index, family in enumerate(REQUIRED)]


@pytest.fixture(autouse=True)
def _fresh(family: str) -> Iterator[None]:
    if not available(family):
        pytest.skip(f"transformers has no {family}")
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def errors(output: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative error of every token's output vector."""
    return ((output.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten()


def assert_one_fused_graph(layers: int) -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert counters["moe_ops"]["refused"] == 0
    assert counters["moe_ops"]["fused"] == layers


def originals(model: torch.nn.Module, ids: torch.Tensor, form: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(the model's output in float64, the original code's error against it).

    In fp32 what differs between two codes is the order of sums, which a processor's matrix-vector and matrix-matrix
    products choose differently: there the measure is the less accurate of transformers' own two forms on the machine
    at hand."""
    exact_model = use_experts(copy.deepcopy(model).double(), "eager")
    exact = result(exact_model(input_ids=ids, use_cache=False))
    forms = (form,) if dtype == "bf16" else FORMS
    found = [errors(result(use_experts(model, own)(input_ids=ids, use_cache=False)), exact) for own in forms]
    use_experts(model, form)
    return exact, max(found, key=torch.median)


def assert_no_less_accurate(fused: torch.Tensor, original: torch.Tensor, dtype: str) -> None:
    """Each token is an observation. In low precision a few of them are routed to another expert by either code (that
    is what makes means useless), so the claim is on the median, and on a one-sided sign test over the pairs: the fused
    code must not lose more often than a fair coin would at three standard deviations."""
    assert fused.median() <= original.median() * MEDIAN_SLACK[dtype]
    decided = fused != original
    count, losses = int(decided.sum()), int((fused > original).sum())
    assert losses <= count / 2 + 3 * math.sqrt(count / 4)


@pytest.mark.parametrize(("family", "form"), BOTH, ids=[f"{form}-{family}" for family, form in BOTH])
def test_fp32_is_fused_and_no_less_accurate(family: str, form: str) -> None:
    """Compiled for the sizes of its 512 tokens; of one form, every layer of several."""
    settings = {} if form == "grouped_mm" else one_layer(family)
    model, ids = build(family, DTYPES["fp32"], form, **settings), tokens(8, 64)
    with torch.no_grad():
        exact, original = originals(model, ids, form, "fp32")
        compiled = torch.compile(model, backend="moe_ops_eager", fullgraph=True)
        fused = errors(result(compiled(input_ids=ids, use_cache=False)), exact)
    assert_one_fused_graph(1 if settings else LAYERS.get(family, 2))
    assert_no_less_accurate(fused, original, "fp32")


@pytest.mark.parametrize(("family", "form"), IN_TURN, ids=[f"{form}-{family}" for family, form in IN_TURN])
def test_bf16_is_fused_for_every_token_count_and_no_less_accurate(family: str, form: str) -> None:
    """Compiled once, on 10 tokens, for every size; the sizes know nothing of the dtype, the recogniser of both."""
    # Symbolic sizes take a capture several times as long; that every layer fuses is seen in the other test.
    model, ids = build(family, DTYPES["bf16"], form, **one_layer(family)), tokens(8, 64)
    compiled = torch.compile(model, backend="moe_ops_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        exact, original = originals(model, ids, form, "bf16")
        compiled(input_ids=tokens(2, 5), use_cache=False)
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch, length in ((2, 2), (3, 33)):
                compiled(input_ids=tokens(batch, length), use_cache=False)
            fused = errors(result(compiled(input_ids=ids, use_cache=False)), exact)
    assert_one_fused_graph(1)
    assert_no_less_accurate(fused, original, "bf16")
