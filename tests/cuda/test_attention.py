"""Attention that shares its key and value heads on a GPU: the kernel stays the same, and so does the error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import compile_passes  # noqa: F401  (registers the backends)
from tests.passes.test_attention import expanded

pytestmark = pytest.mark.cuda
B, HEADS, KV_HEADS, S, D = 4, 32, 4, 1024, 128


def inputs(length, dtype):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(B, heads, tokens, D, device="cuda", dtype=dtype)
        for heads, tokens in ((HEADS, length), (KV_HEADS, S), (KV_HEADS, S))
    )
    return q, k, v, torch.rand(B, 1, length, S, device="cuda") < 0.8


def step(q, k, v, mask):
    return F.scaled_dot_product_attention(q, expanded(k, HEADS // KV_HEADS), expanded(v, HEADS // KV_HEADS), mask)


@pytest.mark.parametrize("length", [1, 128], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shared_heads(length, dtype):
    q, k, v, mask = inputs(length, dtype)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad(), fresh_cache():  # passes run, and count, when nothing is cached
        shared = torch.compile(step, backend="moe_ops", fullgraph=True)(q, k, v, mask)
        repeated = step(q, k, v, mask)
        exact = step(q.double(), k.double(), v.double(), mask)
    assert counters["moe_ops"]["shared_heads"] == 1
    error, original = ((got.double() - exact).norm() / exact.norm() for got in (shared, repeated))
    assert error <= original * 1.02  # the same kernel; it may split the keys at other places


def written_out(q, k, v, mask):
    scores = q @ expanded(k, HEADS // KV_HEADS).mT * D**-0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ expanded(v, HEADS // KV_HEADS)


@pytest.mark.parametrize("length", [1, 128], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_of_shared_heads(length, dtype):
    """Of attention that is written out; what lies between them is rounded alike."""
    q, k, v, mask = inputs(length, dtype)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad(), fresh_cache():
        shared = torch.compile(written_out, backend="moe_ops", fullgraph=True)(q, k, v, mask)
        repeated = written_out(q, k, v, mask)
        exact = written_out(q.double(), k.double(), v.double(), mask)
    assert counters["moe_ops"]["shared_heads"] == 2
    error, original = ((got.double() - exact).norm() / exact.norm() for got in (shared, repeated))
    # In fp32 the order of a sum is all there is to either error, and cuBLAS has another for another shape.
    assert error <= original * (2 if dtype == torch.float32 else 1.02)
