"""What Inductor emits for the operators: a site for each call, and a call with no more than it needs, in the strides of
the fake.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.torch_version import TorchVersion

import moe_ops

E, K, H, I = 4, 2, 16, 24


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(E, 2 * I, H) * 0.1, torch.randn(E, H, I) * 0.1


def emitted(function, *inputs, **options):
    """(result, lines of the emitted code that make a site of ours, lines that call an operator of ours)."""
    with fresh_cache():
        torch.compiler.reset()
        result, codes = run_and_get_code(torch.compile(function, fullgraph=True, **options), *inputs)
    lines = [line.strip() for code in codes for line in code.splitlines()]
    calls = [line for line in lines if re.search(r"= (moe_ops_site\w*|torch\.ops\.moe_ops\S*)\(", line)]
    return result, [line for line in lines if line.startswith("moe_ops_site")], calls


def test_inference():
    up, down = weights()

    def block(x, logits):
        return torch.relu(moe_ops.fused_moe(x * 2, logits, up, down, top_k=K)) + 1

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad():
        found, sites, calls = emitted(block, x, logits)
        torch.testing.assert_close(found, block(x, logits))
    assert len(sites) == len(calls) == 1
    assert re.search(r"= \w+\['fused_moe'\]\.site\(\(-1, -1, -1, -1, 0, 0\), \(\), top_k=2\)$", sites[0]), sites
    name = sites[0].split(" = ")[0]
    assert re.search(rf"= {name}\(\(\), \w+, \w+, \w+, \w+\)$", calls[0]), calls


def test_a_tensor_behind_absent_ones():
    """Tensors are passed by position: what a signature is taken of."""
    up, down = weights()
    expert_map = torch.tensor([1, 0, -1, 3])

    def block(x, logits):
        return moe_ops.fused_moe(x, logits, up, down, top_k=K, expert_map=expert_map, scale=2.0)

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad():
        found, sites, calls = emitted(block, x, logits)
        torch.testing.assert_close(found, block(x, logits))
    assert sites[0].endswith("0, 0, None, None, None, None, -1), (), top_k=2, scale=2.0)"), sites
    assert "None" not in calls[0] and "=" not in calls[0].split(" = ")[1], calls


def test_sizes_that_vary():
    """A key holds the options that vary, for the call, and each symbol of the inputs' layouts once."""
    up, down = weights()

    def block(x, chosen, ids):
        return moe_ops.fused_experts(x, up, down, chosen, ids, format="batched", capacity=x.shape[0] * 2)

    x, chosen, ids = torch.randn(3, H), torch.rand(3, K), torch.zeros(3, K, dtype=torch.int32)
    for tensor in (x, chosen, ids):
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        found, sites, calls = emitted(block, x, chosen, ids)
        torch.testing.assert_close(found, block(x, chosen, ids))
    assert sites[0].endswith(", ('capacity',), format='batched')"), sites
    assert re.search(r"= moe_ops_site_buf\d+\(\(2\*(s\d+), \1, \), \w+, ", calls[0]), calls


def test_results_are_taken_at_their_word():
    """No call asks for the strides that the fake promised, and other tests hold operators to."""
    up, down = weights()

    def block(x, logits):
        chosen, ids = moe_ops.fused_topk(logits, top_k=K)
        return moe_ops.fused_experts(x, up, down, chosen, ids)

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad(), fresh_cache():
        torch.compiler.reset()
        _, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), x, logits)
    asserted = re.findall(r"assert_(?:size_stride|alignment)\((\w+),", code)
    assert asserted and all(name.startswith("arg") for name in asserted), asserted


def test_several_results():
    up, down = weights()

    def block(x, logits):
        chosen, ids = moe_ops.fused_topk(logits, top_k=K)
        return moe_ops.fused_experts(x, up, down, chosen, ids), ids + 1

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad():
        found, sites, calls = emitted(block, x, logits)
        torch.testing.assert_close(found, block(x, logits))
    assert [re.search(r"\['(\w+)'\]", site).group(1) for site in sites] == ["fused_topk", "fused_experts"]
    assert len(calls) == 2


def test_training():
    up, down = weights()
    up.requires_grad_()

    def block(x, logits):
        return moe_ops.fused_moe(x, logits, up, down, top_k=K)

    x, logits = torch.randn(3, H), torch.randn(3, E)

    def step(x, logits):
        up.grad = None
        torch.compile(block, fullgraph=True)(x, logits).sum().backward()
        return up.grad

    with fresh_cache():
        torch.compiler.reset()
        found, codes = run_and_get_code(step, x, logits)
    (expected,) = torch.autograd.grad(block(x, logits).sum(), up)
    torch.testing.assert_close(found, expected)
    text = "\n".join(codes)
    assert re.findall(r"\['(\w+)'\]\.site", text)[:2] == ["fused_topk", "fused_experts_saving"]
    assert "['fused_experts_backward'].site" in text and not re.search(r"= torch\.ops\.moe_ops\.", text)


def test_strides_of_the_fake():
    """A weight that Inductor computes arrives as eager code has it: kernels are chosen by strides."""
    _, down = weights()
    kn = torch.randn(E, H, 2 * I) * 0.1

    def block(x, logits):
        return moe_ops.fused_moe(x, logits, (kn * 2).transpose(1, 2), down, top_k=K)

    x, logits = torch.randn(3, H), torch.randn(3, E)
    seen = []
    launcher = moe_ops.ops.LAUNCHERS["fused_moe"]
    parse = launcher._parse
    launcher._parse = lambda *args, **kwargs: seen.append(args[2].stride()) or parse(*args, **kwargs)
    try:
        with torch.no_grad():
            emitted(block, x, logits)
            launcher.forget()
            block(x, logits)
    finally:
        launcher._parse = parse
    assert set(seen) == {(H * 2 * I, 1, 2 * I)}


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="C++ wrappers take no lists of tensors before")
def test_cpp_wrapper_calls_the_operator():
    up, down = weights()

    def block(x, logits):
        return moe_ops.fused_moe(x, logits, up, down, top_k=K)

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True), fresh_cache():
        torch.compiler.reset()
        found, codes = run_and_get_code(torch.compile(block, fullgraph=True), x, logits)
        torch.testing.assert_close(found, block(x, logits))
    assert "moe_ops_site" not in "\n".join(codes)
