"""Rows, ids and weights that are inputs of a graph each, as behind a graph break at a router: their sizes are symbols
of their own, which indexing does not compare.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.functional import grouped_mm
from torch.torch_version import TorchVersion

import moe_ops
from tests.corpus.families import available, build, tokens
from tests.passes.blocks import E, H, silu_glu, weights


class Experts(nn.Module):
    """Sorted rows, of as many slots as the ids have."""

    def __init__(self) -> None:
        super().__init__()
        made = weights()
        self.w1, self.w2 = nn.Parameter(made["w1"]), nn.Parameter(made["w2"])

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor, combine: str) -> Tensor:
        top_k = ids.size(-1)
        ordered, perm = ids.reshape(-1).sort()
        rows, scores = x[perm // top_k], scores.reshape(-1)[perm].unsqueeze(-1)
        if combine == "before":
            rows = rows * scores
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        out = grouped_mm(silu_glu(grouped_mm(rows, self.w1.mT, offs=offsets)), self.w2.mT, offs=offsets)
        if combine != "before":
            out = out * scores
        if combine == "inverse":
            return out[perm.argsort()].view(x.size(0), top_k, H).sum(1)
        return torch.zeros_like(x).index_add(0, perm // top_k, out)


EXPERTS = Experts()


def given(rows: int, top_k: int = 2, *, of: int | None = None, by: int | None = None) -> tuple[Tensor, ...]:
    """Inputs of so many tokens; ``of`` hidden states and ``by`` weights, where these are more."""
    torch.manual_seed(rows)
    x, scores = torch.randn(of or rows, H).bfloat16(), torch.rand(by or rows, top_k).bfloat16()
    return x, torch.rand(rows, E).topk(top_k).indices, scores


def blocks(call: Callable[..., Tensor], combine: str, *inputs: Tensor) -> tuple[int, int]:
    """(fused, refused) of what a call compiles; its numbers are those of eager code."""
    counters.clear()
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs, combine), EXPERTS(*inputs, combine), rtol=2e-2, atol=2e-2)
    return counters["moe_ops"]["fused"], counters["moe_ops"]["refused"]


def compiled(dynamic: bool | None = None) -> Callable[..., Tensor]:
    torch.compiler.reset()
    call: Callable[..., Tensor] = torch.compile(EXPERTS, backend="moe_ops_eager", fullgraph=True, dynamic=dynamic)
    return call


@pytest.mark.parametrize("combine", ["inverse", "index_add", "before"])
def test_a_second_number_of_tokens_is_fused(combine: str) -> None:
    call = compiled()
    assert [blocks(call, combine, *given(rows)) for rows in (16, 9, 12)] == [(1, 0), (1, 0), (0, 0)]


@pytest.mark.parametrize("combine", ["inverse", "index_add", "before"])
def test_numbers_that_are_all_symbols_are_fused(combine: str) -> None:
    """The slots are a number in what is compiled, the tokens are not."""
    call = compiled(dynamic=True)
    assert [blocks(call, combine, *given(rows)) for rows in (16, 9)] == [(1, 0), (0, 0)]
    assert [blocks(call, combine, *given(rows, 3)) for rows in (16, 9)] == [(1, 0), (0, 0)]


@pytest.mark.parametrize("dynamic", [None, True], ids=["found", "dynamic"])
@pytest.mark.parametrize(
    ("combine", "more"),
    [("inverse", {"by": 20}), ("index_add", {"by": 20}), ("index_add", {"of": 20}), ("before", {"of": 20})],
    ids=lambda value: value if isinstance(value, str) else f"more_{'weights' if 'by' in value else 'tokens'}",
)
def test_rows_that_no_id_names_are_compiled_apart(combine: str, more: dict[str, int], dynamic: bool | None) -> None:
    """Code that has more of one than of the others computes what it did, and the others stay fused."""
    call = compiled(dynamic)
    blocks(call, combine, *given(16))
    blocks(call, combine, *given(9))
    assert blocks(call, combine, *given(12, **more)) == (0, 1)
    assert blocks(call, combine, *given(13, by=13)) == (0, 0)


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="no such graph comes from a cache before")
@pytest.mark.slow
def test_code_from_a_cache_holds_the_guards() -> None:
    """Inductor calls no pass then: what the passes guarded is in its entry."""
    with fresh_cache(), moe_ops.fuse():
        for fused in (1, 0):
            torch.compiler.reset()
            call = torch.compile(EXPERTS, dynamic=True)
            assert blocks(call, "index_add", *given(16)) == (fused, 0)
            assert blocks(call, "index_add", *given(12, by=20)) == (0, fused)
            blocks(call, "index_add", *given(9, 3))
            assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["found", "dynamic"])
def test_layers_one_by_one_that_record_router_logits(dynamic: bool | None) -> None:
    """transformers' hooks break the graph of a layer between the router and the experts."""
    if not available("qwen3_moe"):
        pytest.skip("transformers has no qwen3_moe")
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    model.config.output_router_logits = True
    torch.compiler.reset()
    with torch.no_grad():
        wanted = [model(input_ids=tokens(2, length), use_cache=False).logits for length in (8, 5, 7)]
        model.model.layers[0].compile(backend="moe_ops_eager", dynamic=dynamic)
        counters.clear()
        got = [model(input_ids=tokens(2, length), use_cache=False).logits for length in (8, 5, 7)]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert counters["moe_ops"]["fused"] >= 1 and not counters["moe_ops"]["refused"]
