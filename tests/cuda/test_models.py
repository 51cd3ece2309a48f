"""Whole models of real classes on a GPU: fused in one graph, captured without a skip, no less accurate."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch

import compile_passes  # noqa: F401  (registers the backends)
from compile_passes.tiny import use_experts
from moe_ops.census import profiled_kernel_names
from moe_ops.testing import assert_cuda_graph_safe, assert_fused, assert_no_graph_breaks, assert_no_recompiles
from tests.corpus.families import LAYERS, REQUIRED, available, build, result, tokens

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"]),
    pytest.mark.parametrize("family", REQUIRED),
]
MEDIAN_SLACK = 1.02  # whole-model medians move by this much when nothing but the order of an fp32 sum changes


@pytest.fixture
def model(family: str, form: str) -> Iterator[torch.nn.Module]:
    if not available(family):
        pytest.skip(f"transformers has no {family}")
    torch.compiler.reset()
    yield build(family, torch.bfloat16, form).cuda()
    torch.compiler.reset()


def inputs(batch: int, length: int, seed: int = 1) -> dict[str, torch.Tensor | bool]:
    return {"input_ids": tokens(batch, length, seed).cuda(), "use_cache": False}


def test_fused_in_one_graph_over_token_counts(model, family):
    assert_fused(model, inputs(2, 8), blocks=LAYERS.get(family, 2))
    assert_no_graph_breaks(model, inputs(2, 8))
    assert_no_recompiles(model, lambda size: inputs(1, size), sizes=(5, 2, 7, 33, 64))


def test_captured_whole_with_changed_routing(model):
    """reduce-overhead: zero skips, zero partitions, replays bit-equal to the same code without CUDA graphs."""
    assert_cuda_graph_safe(model, inputs(2, 8), changed=[inputs(2, 8, seed=2), inputs(2, 8, seed=3)])


def test_no_less_accurate(model):
    ids = inputs(8, 64)
    exact_model = use_experts(copy.deepcopy(model).double(), "eager")
    with torch.no_grad():
        exact = result(exact_model(**ids)).double()
        compiled = torch.compile(model, backend="moe_ops", fullgraph=True)
        original, fused = (
            ((result(run(**ids)).double() - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten()
            for run in (model, compiled)
        )
    assert fused.median() <= original.median() * MEDIAN_SLACK
    decided = fused != original
    count, losses = int(decided.sum()), int((fused > original).sum())
    assert losses <= count / 2 + 3 * math.sqrt(count / 4)


def test_experts_are_our_kernels(model):
    with torch.no_grad():
        compiled = torch.compile(model, backend="moe_ops", fullgraph=True)
        compiled(**inputs(1, 8))
        names = " ".join(profiled_kernel_names(lambda: compiled(**inputs(1, 8))))
    assert "_expert_mm_kernel" in names or "_small_glu_kernel" in names
    assert "prepare_grouped_gemm" not in names, "torch's grouped product still runs"
