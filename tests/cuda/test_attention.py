"""Attention on a GPU that shares its key and value heads, or reads no mask: the error stays what it was."""

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


def causal_mask(batch, length):
    """As transformers makes it where no mask is given: sequences may be packed, for all that it knows."""
    positions = torch.arange(length, device="cuda").unsqueeze(0).expand(batch, -1)
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batches = torch.arange(batch, device="cuda")[:, None, None, None]
    places = torch.arange(length, device="cuda")
    queries, keys = places[None, None, :, None], places[None, None, None, :]
    same = packed[batches, queries] == packed[batches, keys]
    return ((keys <= queries) & same).expand(batch, 1, length, length)


def causal_step(q, k, v):
    return step(q, k, v, causal_mask(q.shape[0], q.shape[2]))


def results_and_gradients(function, q, k, v, upstream, dynamic=False):
    """Of copies of q, k and v that lie as a projection leaves them: [B, T, heads, D] in memory."""
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    for leaf in leaves if dynamic else ():
        torch._dynamo.mark_dynamic(leaf, 2)
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_causal_training_reads_no_mask(dynamic):
    """Another kernel than with the mask; as near to float64 as that one, forward and backward."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 1024, D, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    upstream = torch.randn_like(q)
    torch.compiler.reset()
    counters.clear()
    with fresh_cache():
        compiled = torch.compile(causal_step, backend="moe_ops", fullgraph=True)
        found = results_and_gradients(compiled, q, k, v, upstream, dynamic)
    assert counters["moe_ops"]["causal_masks"] == 1 and counters["moe_ops"]["errors"] == 0
    masked = results_and_gradients(causal_step, q, k, v, upstream)
    exact = results_and_gradients(causal_step, *(x.double() for x in (q, k, v)), upstream)
    for got, original, want in zip(found, masked, exact, strict=True):
        error, allowed = ((one.double() - want).norm() / want.norm() for one in (got, original))
        assert error <= allowed * 1.05


def test_views_of_a_causal_result():
    """Of queries whose heads are apart in memory. Kernels leave the result in layouts of their own."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 256, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def attended(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, causal_mask(q.shape[0], q.shape[2]))

    apart = attended(q, k, v).is_contiguous()

    def viewed(q, k, v):
        out = attended(q, k, v)
        return (out if apart else out.transpose(1, 2)).view(q.shape[0], -1)

    torch.compiler.reset()
    counters.clear()
    with torch.no_grad(), fresh_cache():
        got = torch.compile(viewed, backend="moe_ops", fullgraph=True)(q, k, v)
        original, exact = viewed(q, k, v), attended(q.double(), k.double(), v.double())
    assert counters["moe_ops"]["causal_masks"] == 1
    exact = (exact if apart else exact.transpose(1, 2)).reshape(2, -1)
    error, allowed = ((one.double() - exact).norm() for one in (got, original))
    assert error <= allowed * 1.05
