"""Routing weights that multiply the rows between the two expert products, as Megatron has them: the second product is
linear, so that they are weights of its results.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moe_ops
from tests.passes.blocks import E, H, I, K, silu_glu, weights
from tests.passes.compare import check, refusals

# What stands between the products, of gate and up [R, I] and the weights [R, 1].
BETWEEN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "behind": lambda gate, up, w: F.silu(gate) * up * w,
    "in_front": lambda gate, up, w: w * (F.silu(gate) * up),
    "on_the_gate": lambda gate, up, w: (F.silu(gate) * w) * up,
    "on_the_up_half": lambda gate, up, w: F.silu(gate) * (up * w),
    "in_fp32": lambda gate, up, w: (F.silu(gate.float()) * up.float() * w.float()).to(gate.dtype),
    "twice_as_large": lambda gate, up, w: 2 * (F.gelu(gate) * up * w),
}


def route(x, gate):
    values, ids = F.linear(x, gate).float().softmax(-1).topk(K)
    return values / values.sum(-1, keepdim=True), ids


def sorted_rows(between, combine="index_add", weigh=lambda w, perm: w.flatten()[perm, None], after=None, bias=None):
    def program(x, gate, w1, w2):
        w, ids = route(x, gate)
        ordered, perm = ids.flatten().sort()
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        h = F.grouped_mm(x[perm // K], w1.mT, offs=offsets)
        rows = between(*h.chunk(2, dim=-1), weigh(w, perm).to(h.dtype))
        out = F.grouped_mm(rows, w2.mT, offs=offsets)
        out = out if bias is None else out + bias(x)[ordered]
        out = out if after is None else out * after(w, perm).to(out.dtype)
        if combine == "index_add":
            return torch.zeros_like(x).index_add(0, perm // K, out)
        return out[perm.argsort()].view(-1, K, H).sum(1)

    return program


def gathered(between, last="tki,tkhi->tkh"):
    def program(x, gate, w1, w2):
        w, ids = route(x, gate)
        h = torch.einsum("th,tknh->tkn", x, w1[ids])
        rows = between(*h.chunk(2, dim=-1), w[..., None].to(h.dtype))
        out = torch.einsum(last, rows, w2[ids])
        return out.sum(1) if out.dim() == 3 else out

    return program


def all_tokens(between):
    def program(x, gate, w1, w2):
        w, ids = route(x, gate)
        scores = torch.zeros(x.shape[0], E, dtype=w.dtype).scatter(1, ids, w).to(x.dtype)
        h = torch.bmm(x.expand(E, -1, -1), w1.mT)
        return torch.bmm(between(*h.chunk(2, dim=-1), scores.mT[..., None]), w2.mT).sum(0)

    return program


def sigma_moe(x, gate, w1, w2):
    w, ids = F.linear(x, gate).sigmoid().topk(K)
    h = torch.einsum("th,tknh->tkn", x, w1[:, :I][ids]).relu() * w.unsqueeze(-1)
    return torch.einsum("tki,tkhi->th", h, w2[ids])


PROGRAMS = {
    "sigma_moe": sigma_moe,
    **{f"sorted-{name}": sorted_rows(between) for name, between in BETWEEN.items()},
    "sorted-inverse": sorted_rows(BETWEEN["behind"], combine="inverse"),
    **{f"gathered-{name}": gathered(BETWEEN[name]) for name in ("behind", "on_the_gate")},
    "gathered-summed": gathered(BETWEEN["behind"], "tki,tkhi->th"),
    "gathered-summed_unweighted": gathered(lambda gate, up, w: F.silu(gate) * up, "tki,tkhi->th"),
    **{f"dense-{name}": all_tokens(BETWEEN[name]) for name in ("behind", "on_the_gate", "on_the_up_half")},
}


def given(name):
    """grouped_mm takes bf16 alone on a CPU."""
    return weights(dtype=torch.bfloat16 if name.startswith("sorted") else torch.float64).values()


@pytest.mark.parametrize("name", PROGRAMS)
def test_fused(name):
    outcome = check(PROGRAMS[name], *given(name), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize(
    "name", ["sorted-behind", "sorted-on_the_gate", "gathered-behind", "gathered-summed", "dense-on_the_up_half"]
)
def test_gradients(name):
    outcome = check(PROGRAMS[name], *given(name), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def in_the_gate(gate, up, w):
    return F.silu(gate * w) * up


def squared(gate, up, w):
    return F.silu(gate) * w * up * w


def plus_one(gate, up, w):
    return F.silu(gate) * (up * w + 1)


def of_the_rows(gate, up, w):
    return F.silu(gate) * up * up.abs().amax(-1, keepdim=True)


def first_sums(x, gate, w1, w2):
    w, ids = route(x, gate)
    h = torch.einsum("tkh,tknh->tn", x.unsqueeze(1) * w[..., None], w1[ids])
    return (torch.einsum("ti,tkhi->tkh", silu_glu(h), w2[ids]) * w[..., None]).sum(1)


def a_bias_behind_the_sum(x, gate, w1, w2):
    w, ids = route(x, gate)
    h = silu_glu(torch.einsum("th,tknh->tkn", x, w1[ids]))
    return torch.einsum("tki,tkhi->th", h * w[..., None], w2[ids]) + w2[ids[:, 0], :, 0]


@pytest.mark.parametrize(("program", "fused"), [(first_sums, 0), (a_bias_behind_the_sum, 1)])
def test_sums_elsewhere(program, fused):
    outcome = check(program, *weights(dtype=torch.float64).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, fused)


def one_expert_and_a_bias(x, gate, w1, w2):
    """Its sum is of one row, to which its bias is added."""
    ids = F.linear(x, gate).topk(1).indices
    h = silu_glu(torch.einsum("th,tknh->tkn", x, w1[ids]))
    return torch.einsum("tki,tkhi->th", h, w2[ids]) + w2[:, :, 0][ids[:, 0]]


def in_another_shape(x, gate, w1, w2):
    w, ids = route(x, gate)
    scores = torch.zeros(x.shape[0], E, dtype=w.dtype).scatter(1, ids, w).to(x.dtype)
    h = torch.bmm(x.expand(E, -1, -1), w1.mT).flatten(0, 1)
    return torch.bmm((silu_glu(h) * scores.mT.reshape(-1, 1)).view(E, x.shape[0], -1), w2.mT).sum(0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [(one_expert_and_a_bias, "sums a token's rows before its bias"), (in_another_shape, "in another shape")],
)
def test_what_stops_it(program, reason):
    (row, *_) = refusals(program, *weights(dtype=torch.float64).values(), fullgraph=True)
    assert reason in row.reason and row.cure


AFTER = BETWEEN["behind"]
MISSES = {
    "in_the_gate": (sorted_rows(in_the_gate), "not the gate half"),
    "twice_between": (sorted_rows(squared), "several numbers each"),
    "shifted": (sorted_rows(plus_one), ""),
    "of_the_rows": (sorted_rows(of_the_rows), "cannot be proved to be the routing weights"),
    "in_token_order": (
        sorted_rows(AFTER, weigh=lambda w, perm: w.flatten()[:, None]),
        "cannot be proved to be the routing weights",
    ),
    "of_the_inverse": (
        sorted_rows(AFTER, weigh=lambda w, perm: w.flatten()[perm.argsort(), None]),
        "cannot be proved to be the routing weights",
    ),
    "and_after": (sorted_rows(AFTER, after=lambda w, perm: w.flatten()[perm, None]), ""),
    "before_a_bias": (sorted_rows(AFTER, bias=lambda x: torch.arange(E * H).view(E, H).to(x.dtype)), "adds a bias"),
}


@pytest.mark.parametrize("name", MISSES)
def test_left_alone(name):
    program, reason = MISSES[name]
    assert any(reason in row.reason for row in refusals(program, *given("sorted")))


class Expert(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False)
        self.down = nn.Linear(I, H, bias=bias)

    def forward(self, x, w):
        return self.down(F.silu(self.gate(x)) * self.up(x) * w)


class Loop(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(E))


class Hits(Loop):
    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token], w[token, slot, None]))
        return out


class Slices(Loop):
    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(K)
        perm = ids.flatten().argsort()
        counts = torch.bincount(ids.flatten(), minlength=E).tolist()
        rows, own = x[perm // K].split(counts), w.flatten()[perm].split(counts)
        done = [expert(part, mine[:, None]) for expert, part, mine in zip(self.experts, rows, own, strict=True)]
        done = torch.cat(done)
        return torch.zeros_like(x).index_add(0, perm // K, done)


class Masks(Loop):
    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(K)
        return sum(expert(x, (w * (ids == e)).sum(-1, keepdim=True)) for e, expert in enumerate(self.experts))


def losses(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out, x.grad, model.router.weight.grad


@pytest.mark.parametrize("kind", [Hits, Slices, Masks])
def test_loops(kind):
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(13, H, dtype=torch.float64)
    expected = losses(model, x)
    model.zero_grad()
    compiled = moe_ops.compile(model)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for got, wanted in zip(losses(compiled, x), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert torch._dynamo.utils.counters["moe_ops"]["fused"] == 1


@pytest.mark.parametrize("kind", [Hits, Masks])
def test_loops_of_experts_with_a_bias(kind):
    """It is not weighted."""
    torch.manual_seed(0)
    model, x = kind(bias=True), torch.randn(13, H)
    with torch.no_grad():
        expected = model(x)
        torch._dynamo.utils.counters.clear()
        torch.testing.assert_close(moe_ops.compile(model)(x), expected)
    assert torch._dynamo.utils.counters["moe_ops"]["fused"] == 0
