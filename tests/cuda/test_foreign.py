"""Layers of other people's code on a GPU: fused, as accurate as they were, captured, replayed with other routing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import compile_passes  # noqa: F401  (registers the backend)
import moe_ops
from benchmarks import foreign

pytestmark = pytest.mark.cuda

SIZES = {"dim": 512, "hidden": 256, "num_experts": 16, "top_k": 4}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "torchtitan": lambda: foreign.TorchTitanMoE(**SIZES),
    "torchtitan_after": lambda: foreign.TorchTitanMoE(score_before_experts=False, counting="scatter", **SIZES),
    "torchtitan_loop": lambda: foreign.TorchTitanMoE(looped=True, **SIZES),
    "granite": lambda: foreign.GraniteMoe(**SIZES),
    "gpt_fast": lambda: foreign.GptFast(**SIZES),
    "gpt_oss": lambda: foreign.GptOss(**SIZES),
    "llama4": lambda: foreign.Llama4(**SIZES | {"top_k": 1}),
    "llama4_of_transformers": lambda: foreign.Llama4OfTransformers(**SIZES | {"top_k": 1}),
    "sparse_by_mask": lambda: foreign.SparseByMask(**SIZES).bfloat16(),
    **{
        f"loop_{how}": lambda how=how: moe_ops.stack_experts_(foreign.ExpertLoop(how, **SIZES, dtype=torch.bfloat16))
        for how in ("transformers", "mistral", "mask", "stack")
    },
}


def layer(name: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = LAYERS[name]().eval()
    for weight in module.parameters():
        weight.requires_grad_(False)
    return module


def tokens(count: int, seed: int = 0) -> Tensor:
    make = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(1, count, SIZES["dim"], generator=make, device="cuda", dtype=torch.bfloat16)


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


@pytest.mark.parametrize("count", [1, 33, 700])
@pytest.mark.parametrize("name", LAYERS)
def test_fused_and_as_accurate(name: str, count: int):
    """Against the layer itself, whose own rounding in bf16 is a few thousandths of the largest element.

    Where a router's scores are bf16, two experts may have one score: a token in a hundred may go to the other.
    """
    module, x = layer(name), tokens(count)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        wanted = first(module(x)).float()
        got = first(torch.compile(module, backend="moe_ops", fullgraph=True)(x)).float()
    assert counters["moe_ops"]["fused"] == 1
    off = (got - wanted).abs().amax(-1) > 2e-2 * wanted.abs().max()
    assert off.sum() <= count // 100, f"{int(off.sum())} of {count} tokens"


@pytest.mark.parametrize("name", LAYERS)
def test_replayed_with_other_routing(name: str):
    """One captured graph gives the bits of a call, whatever the routing."""
    module, x = layer(name), tokens(48)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="moe_ops", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = first(compiled(x))
        for seed in (1, 2):
            x.copy_(tokens(48, seed))
            graph.replay()
            replayed = captured.clone()
            assert torch.equal(replayed, first(compiled(x)))


@pytest.mark.parametrize("count", [1, 64, 2048])
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_up_before_gate(layout: str, count: int):
    """Halves the other way round are two strided views of one weight."""
    e, k, h, i = 16, 4, 512, 256
    make = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device="cuda", dtype=torch.bfloat16)

    x, weight, down = normal(count, h), normal(e, 2 * i, h) * h**-0.5, normal(e, h, i) * i**-0.5
    weights, ids = normal(count, e).float().softmax(-1).topk(k)
    up, gate = (weight[:, :i], weight[:, i:]) if layout == "concat" else (weight[:, ::2], weight[:, 1::2])
    given = moe_ops.fused_experts(x, gate, down, weights, ids, up_proj=up)
    copied = moe_ops.fused_experts(x, torch.cat((gate, up), 1), down, weights, ids)
    wanted = torch.zeros(count, h, device="cuda", dtype=torch.float64)
    for slot in range(k):
        for expert in range(e):
            mine = ids[:, slot] == expert
            row = x[mine].double()
            a = nn.functional.silu(row @ gate[expert].double().T) * (row @ up[expert].double().T)
            wanted[mine] += weights[mine, slot, None].double() * (a @ down[expert].double().T)
    errors = [((result.double() - wanted).abs().max() / wanted.abs().max()).item() for result in (given, copied)]
    assert errors[0] <= 1.05 * errors[1] + 1e-4, errors
