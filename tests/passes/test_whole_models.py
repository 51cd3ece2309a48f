"""Models around MoE blocks: what they do with weights, routers, buffers and inputs of a block, call after call.

Each runs eagerly and compiled from equal modules, several calls in a row; everything that a caller sees is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers.integrations import moe  # noqa: F401  (registers its grouped product)

from moe_ops.logs import quiet
from tests.passes.compare import compiled, difference

T, E, K, H, I = 12, 8, 2, 16, 8


class Model(nn.Module):
    """A router and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=make) * 0.4)

        self.gate, self.w1, self.w2 = parameter(E, H), parameter(E, 2 * I, H), parameter(E, H, I)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(F.linear(x, self.gate).softmax(-1), K, -1)
        return weights / weights.sum(-1, keepdim=True), ids

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        h = torch.bmm(self.w1[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(self.w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.route(x))


Calls = Callable[[Callable[..., Any], Any], Any]


def tokens(count: int = T) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(1))


def assert_same(build: Callable[[], nn.Module], calls: Calls, **options: Any) -> int:
    """``calls(run, model)`` of a model and of the compiled one; how many blocks were fused."""
    model, other = build(), build()
    expected = calls(model, model)
    with quiet():
        got = calls(compiled(other, **options), other)
    problem = difference((got, dict(other.state_dict())), (expected, dict(model.state_dict())), 1e-4)
    assert problem is None, problem
    return int(counters["moe_ops"]["fused"])


def trained(run: Callable[..., Any], model: nn.Module, x: Tensor | None = None) -> Any:
    """Result and gradients of one step."""
    x = (tokens() if x is None else x).requires_grad_()
    y = run(x)
    y.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return y.detach(), x.grad, grads


# ---- checkpointed regions


class _Checkpointed(Model):
    """Dropout inside of checkpointed regions, one of them inside of another."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.nested = nested

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(Model.forward(self, F.dropout(x, 0.3)), 0.3)

    def twice(self, x: Tensor) -> Tensor:
        return checkpoint(self.dropped, x, use_reentrant=False) + F.dropout(x, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        region = self.twice if self.nested else self.dropped
        return checkpoint(region, x, use_reentrant=False)


@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
def test_dropout_in_checkpointed_regions(nested):
    """The mask of the forward is that of the backward where the graph runs as it is."""

    def calls(run, model):
        torch.manual_seed(2)
        return trained(run, model), trained(run, model)

    assert assert_same(lambda: _Checkpointed(nested), calls) == 1


# ---- weights that are written


class _OneExpertWritten(Model):
    """A view of a parameter, taken and written under `no_grad`: torch raises where one asks whether it is a leaf."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w1[0].mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("train", [True, False], ids=["train", "no_grad"])
def test_weights_of_one_expert_written_under_no_grad(train):
    def calls(run, model):
        with torch.set_grad_enabled(train):
            return run(tokens()), run(tokens())

    assert_same(_OneExpertWritten, calls)


# ---- forward-mode differentiation


def test_compiled_under_forward_mode():
    """Refused by name, not by an error that asks to be reported."""

    def calls(run, model):
        with torch.autograd.forward_ad.dual_level():
            y = run(torch.autograd.forward_ad.make_dual(tokens(), tokens().flip(0)))
            return torch.autograd.forward_ad.unpack_dual(y).tangent

    assert assert_same(Model, calls) == 0
    passes = counters["moe_ops"]
    assert (passes["refused"], passes["errors"]) == (counters["stats"]["unique_graphs"], 0)  # torch 2.14 captures none
