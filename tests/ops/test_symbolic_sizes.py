"""One graph for every number of tokens: sizes that follow from it, a capacity among them, stay symbolic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters

import moe_ops

E, K, H, I = 4, 2, 16, 8
_make = torch.Generator().manual_seed(0)
GATE_UP, DOWN = torch.randn(E, 2 * I, H, generator=_make), torch.randn(E, H, I, generator=_make)
TOKENS = (3, 16, 40, 7)
#: Joined stages are another kernel. The terms of a result are as large as 50, so that its last bit says little.
CLOSE = {"atol": 1e-4, "rtol": 1e-5}


def experts(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return moe_ops.fused_experts(x, GATE_UP, DOWN, weights, ids, format="batched", capacity=x.shape[0] // 2 + 1)


def experts_of_every_token(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return moe_ops.fused_experts(x, GATE_UP, DOWN, weights, ids, format="batched", capacity=x.shape[0])


def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    capacity = (x.shape[0] * K * 5 // 4 + E - 1) // E
    return moe_ops.fused_moe(x, x[:, :E], GATE_UP, DOWN, top_k=K, format="batched", capacity=capacity)


def stages(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    batch, counts, slots = moe_ops.batched_dispatch(x, ids, num_experts=E, capacity=x.shape[0] // 2 + 1)
    h, _ = torch.ops.moe_ops.batched_mm_glu(batch, GATE_UP, counts)
    return moe_ops.batched_combine(moe_ops.batched_mm(h, DOWN, counts), slots, weights)


def a_row_of_experts_for_every_token(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=x.shape[0] + E)
    return moe_ops.moe_unpermute(rows, places, weights) + offsets.shape[0]


FUNCTIONS = (experts, experts_of_every_token, layer, stages, a_row_of_experts_for_every_token)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(tokens)
    tensors = (torch.randn(tokens, H, generator=make), torch.rand(tokens, K, generator=make),
               torch.randint(0, E, (tokens, K), generator=make))  # fmt: skip
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensors


def compiled(function: Callable[..., Any], backend: str) -> tuple[Callable[..., Any], list[Any]]:
    graphs: list[Any] = []
    inner = torch._dynamo.lookup_backend(backend)

    def count(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(gm)
        return inner(gm, example_inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=count, fullgraph=True), graphs


@pytest.mark.parametrize(
    ("function", "backend"),
    [*((function, "aot_eager") for function in FUNCTIONS), (layer, "inductor"), (stages, "moe_ops")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_one_graph_for_every_number_of_tokens(function: Callable[..., Any], backend: str) -> None:
    run, graphs = compiled(function, backend)
    for tokens in TOKENS:
        with torch.no_grad():
            torch.testing.assert_close(run(*inputs(tokens)), function(*inputs(tokens)), **CLOSE)
    assert len(graphs) == 1


@pytest.mark.parametrize("function", [experts, layer], ids=lambda function: function.__name__)
def test_one_graph_in_training(function: Callable[..., Any]) -> None:
    run, graphs = compiled(function, "aot_eager")
    for tokens in TOKENS:
        got, wanted = ([value.requires_grad_() if value.is_floating_point() else value for value in inputs(tokens)]
                       for _ in range(2))  # fmt: skip
        run(*got).square().sum().backward()
        function(*wanted).square().sum().backward()
        torch.testing.assert_close(got[0].grad, wanted[0].grad)
    assert len(graphs) == 1


@pytest.mark.skipif(
    "shape_id" not in inspect.signature(mark_unbacked).parameters,
    reason="this torch has no name for a size that several tensors have and nobody may ask for",
)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("on_input", [False, True], ids=["on_output", "on_input"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_one_graph_for_a_number_of_tokens_that_nobody_may_ask_for(format: str, on_input: bool, grad: bool) -> None:
    """No tokens among them."""

    def steps(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        prepared = moe_ops.prepare(x, weights, ids, num_experts=E, format=format, weight_on_input=on_input)
        return moe_ops.finalize(moe_ops.experts(prepared, GATE_UP, DOWN), prepared)

    run, graphs = compiled(steps, "aot_eager")
    for tokens in (5, 9, 1, 0):
        found = []
        for function in (run, steps):
            given = x, weights, _ = [tensor.detach().clone() for tensor in inputs(tokens)]
            for tensor in given:
                mark_unbacked(tensor, 0, shape_id="tokens")
            x.requires_grad_(grad)
            weights.requires_grad_(grad)
            result = function(*given)
            if grad:
                result.square().sum().backward()
            found.append((result.detach(), x.grad, weights.grad))
        torch.testing.assert_close(*found, **CLOSE)
    assert len(graphs) == 1


def test_a_capacity_below_one_is_an_error_under_compile_too() -> None:
    def none_of_two(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, GATE_UP, DOWN, weights, ids, format="batched", capacity=x.shape[0] // 2)

    run, _ = compiled(none_of_two, "eager")
    run(*inputs(8))
    with pytest.raises(ValueError, match="fused_experts: capacity must be >= 1, got 0"):
        none_of_two(*inputs(1))
    with pytest.raises(Exception, match="capacity must be >= 1"):
        run(*inputs(1))


def test_stages_with_a_symbolic_capacity_are_joined() -> None:
    counters.clear()
    run, graphs = compiled(stages, "moe_ops_eager")
    with torch.no_grad():
        for tokens in TOKENS:
            torch.testing.assert_close(run(*inputs(tokens)), stages(*inputs(tokens)), **CLOSE)
    assert len(graphs) == 1 and counters["moe_ops"]["joined"] == 1 and not counters["moe_ops"]["errors"]


def by_the_largest(ids: Tensor) -> int:
    """How many rows the expert of the most pairs has, which is read on the host."""
    return int(torch.bincount(ids.flatten().long(), minlength=E).max().item())


def experts_of_the_data(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return moe_ops.fused_experts(x, GATE_UP, DOWN, weights, ids, format="batched", capacity=by_the_largest(ids))


def dispatched_by_the_data(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    batch, counts, slots = moe_ops.batched_dispatch(x, ids, num_experts=E, capacity=by_the_largest(ids))
    h = moe_ops.batched_mm_glu(batch, GATE_UP, counts)
    return moe_ops.batched_combine(moe_ops.batched_mm(h, DOWN, counts), slots, weights)


def prepared_by_the_data(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    given = {"num_experts": E, "format": "batched", "capacity": by_the_largest(ids)}
    prepared = moe_ops.prepare(x, weights, ids, **given)  # type: ignore[arg-type]
    return moe_ops.finalize(moe_ops.experts(prepared, GATE_UP, DOWN), prepared)


@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("function", [experts_of_the_data, dispatched_by_the_data, prepared_by_the_data])
def test_capacities_that_the_data_decides_are_captured(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in TOKENS:
        make = torch.Generator().manual_seed(tokens)
        x, scores = torch.randn(tokens, H, generator=make), torch.randn(tokens, E, generator=make)
        weights, ids = moe_ops.fused_topk(scores, top_k=K)
        torch.testing.assert_close(compiled(x, weights, ids), function(x, weights, ids), **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1
