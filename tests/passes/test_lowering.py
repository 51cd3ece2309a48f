"""What Inductor emits for the operators: a plain call with no more than it needs, in the strides of the fake."""

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


def emitted(function, *inputs):
    """(result, lines of the emitted code that call an operator of ours)."""
    with fresh_cache():
        torch.compiler.reset()
        result, codes = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    return result, [
        line.strip() for code in codes for line in code.splitlines() if re.search(r"= .*moe_ops\S*\(", line)
    ]


def test_inference():
    up, down = weights()

    def block(x, logits):
        return torch.relu(moe_ops.fused_moe(x * 2, logits, up, down, top_k=K)) + 1

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad():
        found, lines = emitted(block, x, logits)
        torch.testing.assert_close(found, block(x, logits))
    assert len(lines) == 1
    assert re.search(r"= moe_ops_direct\.fused_moe\(.*, top_k=2\)$", lines[0]), lines


def test_a_tensor_behind_absent_ones():
    """Tensors are passed by position: what a signature is taken of."""
    up, down = weights()
    expert_map = torch.tensor([1, 0, -1, 3])

    def block(x, logits):
        return moe_ops.fused_moe(x, logits, up, down, top_k=K, expert_map=expert_map, scale=2.0)

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad():
        found, lines = emitted(block, x, logits)
        torch.testing.assert_close(found, block(x, logits))
    assert "expert_map=" not in lines[0] and lines[0].endswith("top_k=2, scale=2.0)"), lines


def test_several_results():
    up, down = weights()

    def block(x, logits):
        chosen, ids = moe_ops.fused_topk(logits, top_k=K)
        return moe_ops.fused_experts(x, up, down, chosen, ids), ids + 1

    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad():
        found, lines = emitted(block, x, logits)
        torch.testing.assert_close(found, block(x, logits))
    assert [re.search(r"moe_ops_direct\.(\w+)", line).group(1) for line in lines] == ["fused_topk", "fused_experts"]


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
    assert "moe_ops_direct.fused_experts_saving(" in text and "moe_ops_direct.fused_experts_backward(" in text
    assert "torch.ops.moe_ops.fused_moe.default(" not in text


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
    assert "moe_ops_direct" not in "\n".join(codes)
