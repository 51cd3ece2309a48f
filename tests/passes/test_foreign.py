"""Layers of `benchmarks/foreign.py`: fused in one graph, equal to eager, no recompile, gradients as eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops
from benchmarks.first_call import Decoder
from benchmarks.foreign import GptFast, GptOss, Llama4, Llama4OfTransformers, SparseByMask, TorchTitanMoE
from compile_passes.passes import run_all
from tests.passes.compare import check, compiled, difference

DIM = 32


def titan(**options: object) -> Callable[[], nn.Module]:
    return lambda: TorchTitanMoE(dim=DIM, **options)  # type: ignore[arg-type]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    f"torchtitan_{'before' if before else 'after'}_{'shared' if shared else 'alone'}_{counting}": titan(
        score_before_experts=before, shared=shared, counting=counting
    )
    for before, shared, counting in itertools.product((True, False), (True, False), ("histc", "scatter"))
}
LAYERS |= {
    "torchtitan_without_bias": titan(biased=False),
    "torchtitan_softmax": titan(score_func="softmax", route_norm=False, route_scale=2.5),
    "torchtitan_top_1": titan(top_k=1),
    "torchtitan_fp32": titan(dtype=torch.float32, score_before_experts=False),
    "gpt_fast": lambda: GptFast(dim=DIM),
    "gpt_fast_top_1": lambda: GptFast(dim=DIM, top_k=1),
    "gpt_oss": lambda: GptOss(dim=DIM),
    "gpt_oss_top_4": lambda: GptOss(dim=DIM, top_k=4),
    "llama4": lambda: Llama4(dim=DIM),
    "llama4_top_2": lambda: Llama4(dim=DIM, top_k=2),
    "llama4_of_transformers": lambda: Llama4OfTransformers(dim=DIM),
    "sparse_by_mask": lambda: SparseByMask(dim=DIM),
}


def layer(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]()


def tokens(batch: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(batch, 3, DIM, generator=torch.Generator().manual_seed(batch)).to(dtype)


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


@pytest.mark.parametrize("name", LAYERS)
def test_fused_in_one_graph(name: str):
    """One for the first number of tokens, one for all others."""
    module = layer(name)
    function = compiled(module, fullgraph=True)
    with torch.no_grad():
        for batch in (4, 9, 2, 16):
            x = tokens(batch, dtype_of(module))
            found = function(x)
            # The products are in bf16 whatever the tokens are in; in others than the first tokens scores may be tied.
            assert batch != 4 or difference(found, module(x), 3e-2) is None
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2 and counters["moe_ops"]["fused"] == graphs


# With one renormalised expert for each token the router's gradient is nothing but rounding.
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.endswith("top_1")])
def test_gradients(name: str):
    module = layer(name)
    x = tokens(4, dtype_of(module))
    names = [key for key, value in module.named_parameters() if value.dtype.is_floating_point]

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        module.zero_grad()
        given = x.detach().clone().requires_grad_()
        result = function(given)
        out = result if isinstance(result, Tensor) else result[0]
        (out.float() * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        return [given.grad, *(value.grad for key, value in module.named_parameters() if key in names)]

    expected = gradients(module)
    counters.clear()
    found = gradients(compiled(module, fullgraph=True))
    assert counters["moe_ops"]["fused"] == 1
    for key, one, other in zip(("x", *names), found, expected, strict=True):
        scale = other.float().abs().max().clamp(min=1e-3)
        error = (one.float() - other.float()).abs().max() / scale
        assert error <= 4e-2, f"{key}: {error:.3g}"


@pytest.mark.parametrize(
    "name", ["torchtitan_before_shared_histc", "torchtitan_after_alone_scatter", "gpt_fast", "gpt_oss"]
)
def test_layer_after_layer(name: str):
    """Each is a block of its own: what sums over the experts of one is no activation of the next."""
    torch.manual_seed(0)
    report = moe_ops.explain(Decoder(LAYERS[name], layers=3), tokens(4))
    assert (len(report.fused), [row.reason for row in report.refused]) == (3, [])


def test_counts_still_feed_the_load_balancer():
    """The block is fused although a buffer reads its counts, and the buffer gets them."""
    one, other = layer("torchtitan_before_shared_histc"), layer("torchtitan_before_shared_histc")
    counters.clear()
    with torch.no_grad():
        compiled(one, fullgraph=True)(tokens(4))
        other(tokens(4))
    assert counters["moe_ops"]["fused"] == 1
    assert torch.equal(one.tokens_per_expert, other.tokens_per_expert) and one.tokens_per_expert.sum() == 4 * 3 * 2


def test_rows_weighted_in_more_bits_than_the_experts_take():
    """fp32 rows times scores, then bf16: the operator would round the rows before it multiplies them, too."""
    torch.manual_seed(0)
    module = TorchTitanMoE(dim=DIM, dtype=torch.float32)
    outcome = check(module, tokens(4, torch.float32), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


@pytest.mark.parametrize("name", ["llama4", "torchtitan_before_shared_histc", "gpt_fast", "sparse_by_mask"])
def test_nothing_of_the_block_stays(name: str):
    """Not even an in-place sum whose result is read through a view: the experts' products are gone from the graph."""
    left: list[str] = []

    def collect(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        run_all(gm)
        left.extend(str(node.target) for node in gm.graph.nodes if node.op.startswith("call_"))
        return gm.forward

    torch._dynamo.reset()
    module = layer(name)
    torch.compile(module, backend=collect, fullgraph=True)(tokens(4, dtype_of(module)))
    assert any("fused_experts" in target for target in left)
    products = ("bmm", "grouped_mm", "einsum", "scatter_add")
    assert [target for target in left if any(word in target for word in products)] == []
