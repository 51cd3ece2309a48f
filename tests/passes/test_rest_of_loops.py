"""Unrolled loops of models in transformers that have a form of their own, with every expert in turn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_passes.match import MoEMatch, Refusal
from tests.passes.blocks import E, H, I, K, T, found, weights
from tests.passes.compare import assert_same

IDENTITIES = 2


def router(x, gate):
    values, ids = F.linear(x, gate).float().softmax(-1).topk(K, dim=-1)
    return values.to(x.dtype), ids


def silu(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def clamped_after(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate).clamp(max=0.5) * up.clamp(min=-0.5, max=0.5)


def by_one_hot(x, gate, w1, w2, classes=E + 1, activation=silu, order=range(E)):
    """A one-hot with a class for no expert, as step3p7 and most "eager" loops have it."""
    topk_weights, ids = router(x, gate)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=classes).permute(2, 1, 0)
    for e in order:
        slot, token = torch.where(mask[e])
        rows = F.linear(activation(F.linear(x[token], w1[e])), w2[e]) * topk_weights[token, slot, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out


def step3p7(x, gate, w1, w2):
    return by_one_hot(x, gate, w1, w2, activation=clamped_after)


def dbrx(x, gate, w1, v1, w2):
    """Flat weights [E * I, H], viewed anew for every expert."""
    tokens = x.reshape(-1, H)
    topk_weights, ids = router(tokens, gate)
    out = torch.zeros_like(tokens)
    mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
    for e in range(E):
        slot, token = torch.where(mask[e])
        rows = tokens[token]
        v, g, d = (flat.view(-1, I, H)[e] for flat in (v1, w1, w2))
        made = (F.silu(rows.matmul(g.T)) * rows.matmul(v.T)).matmul(d)
        out.index_add_(0, token, made.view(-1, H) * topk_weights[token, slot, None])
    return out.view(x.shape[0], -1, H)


def dbrx_in_parts(x, gate, w1, v1, w2):
    """As transformers 4.4x has it: all experts' weights at once, a list of parts of one expert each."""
    tokens = x.reshape(-1, H)
    topk_weights, ids = router(tokens, gate)
    out = torch.zeros_like(tokens)
    mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
    weights_of = [[one.squeeze(dim=0) for one in flat.view(E, I, H).chunk(E, dim=0)] for flat in (v1, w1, w2)]
    for e, (v, g, d) in enumerate(zip(*weights_of, strict=True)):
        slot, token = torch.where(mask[e])
        rows = tokens[None, token].reshape(-1, H)
        made = (F.silu(rows.matmul(g.t())) * rows.matmul(v.t())).matmul(d)
        out.index_add_(0, token, made * topk_weights[token, slot, None])
    return out.view(x.shape[0], -1, H)


def longcat(x, gate, w1, w2):
    """Experts after the last one give their tokens back; the first weight has rows for them, which nobody reads."""
    topk_weights, ids = router(x, gate)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=E + IDENTITIES).permute(2, 1, 0)
    for e in range(E + IDENTITIES):
        slot, token = torch.where(mask[e].squeeze(0))
        rows = x[token]
        if e < E:
            rows = F.linear(silu(F.linear(rows, w1[e])), w2[e])
        out.index_add_(0, token, (rows * topk_weights[token, slot, None]).to(x.dtype))
    return out


def skipping(x, gate, w1, w2):
    """One expert more than there are weights: whoever chooses it is left out."""
    topk_weights, ids = router(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = F.linear(silu(F.linear(x[token], w1[e])), w2[e]) * topk_weights[token, slot, None]
        out.index_add_(0, token, rows)
    return out


def more_gates(more: int, stacked: bool = False):
    given = weights(dtype=torch.float32)
    given["gate"] = torch.cat((given["gate"], given["gate"][:more] * 0.9))
    if stacked:
        given["w1"] = torch.cat((given["w1"], given["w1"][:more]))
    return given


def flat():
    given = weights(dtype=torch.float32)
    halves = given["w1"].reshape(E, 2, I, H).unbind(1)
    w1, v1 = (half.reshape(E * I, H) for half in halves)
    w2 = given["w2"].mT.reshape(E * I, H).contiguous()
    return {"x": given["x"].view(2, T // 2, H), "gate": given["gate"], "w1": w1, "v1": v1, "w2": w2}


FORMS = {
    "a_class_for_no_expert": (by_one_hot, weights(dtype=torch.float32)),
    "step3p7": (step3p7, weights(dtype=torch.float32)),
    "dbrx_in_parts": (dbrx_in_parts, flat()),
    "dbrx": (dbrx, flat()),
    "longcat": (longcat, more_gates(IDENTITIES, stacked=True)),
    "longcat_of_as_many_weights": (longcat, more_gates(IDENTITIES)),
    "skip_expert": (skipping, more_gates(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_fused_and_right(name: str) -> None:
    run, inputs = FORMS[name]
    (row,) = found(run, **inputs)
    assert isinstance(row, MoEMatch) and row.dispatch.form == "loop", str(row)
    outcome = assert_same(run, *inputs.values(), fullgraph=True, gradients=name in ("dbrx", "dbrx_in_parts", "longcat"))
    assert outcome.fused == 1


def test_only_the_experts_that_there_are_get_weights() -> None:
    (row,) = found(longcat, **more_gates(IDENTITIES, stacked=True))
    assert row.up.weight.experts == E and row.down.weight.experts is None
    (row,) = found(longcat, **more_gates(IDENTITIES))
    assert row.up.weight.experts is None


def test_views_of_different_weights_are_not_one() -> None:
    """Every expert takes its slice of another view: of the flat weight, and of a copy of it."""

    def run(x, gate, w1, v1, w2):
        tokens = x.reshape(-1, H)
        topk_weights, ids = router(tokens, gate)
        out = torch.zeros_like(tokens)
        for e in range(E):
            token, slot = torch.where(ids == e)
            own = w1 if e else w1 * 2
            made = F.linear(F.silu(F.linear(tokens[token], own.view(-1, I, H)[e])), w2.view(-1, H, I)[e])
            out.index_add_(0, token, made * topk_weights[token, slot, None])
        return out

    assert not any(isinstance(row, MoEMatch) for row in found(run, **flat()))


def test_views_in_another_shape_are_not_one() -> None:
    def run(x, gate, w1, v1, w2):
        tokens = x.reshape(-1, H)
        topk_weights, ids = router(tokens, gate)
        out = torch.zeros_like(tokens)
        for e in range(E):
            token, slot = torch.where(ids == e)
            own = w1.view(-1, I, H)[e] if e else w1.view(-1, H, I)[e].mT.contiguous()
            made = F.linear(F.silu(F.linear(tokens[token], own)), w2.view(-1, H, I)[e])
            out.index_add_(0, token, made * topk_weights[token, slot, None])
        return out

    assert not any(isinstance(row, MoEMatch) for row in found(run, **flat()))


def test_ids_beyond_the_classes_raise_in_the_original() -> None:
    """Given ids may be anything, and F.one_hot raises where they are no class."""

    def run(x, ids, topk_weights, w1, w2):
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=E + 1).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, F.linear(silu(F.linear(x[token], w1[e])), w2[e]) * topk_weights[token, slot, None])
        return out

    given = weights(dtype=torch.float32)
    given.pop("gate")
    rows = found(run, **given, ids=torch.randint(0, E, (T, K)), topk_weights=torch.rand(T, K))
    assert all(isinstance(row, Refusal) for row in rows)


def test_a_loop_over_some_experts_is_refused() -> None:
    def run(x, gate, w1, w2):
        return by_one_hot(x, gate, w1, w2, order=range(E - 1))

    rows = found(run, **weights(dtype=torch.float32))
    assert all(isinstance(row, Refusal) for row in rows) and rows


LATER = {
    "added_in_place": lambda out, x: out.add_(x),
    "index_added_in_place": lambda out, x: out.index_add_(0, torch.arange(T), x),
    "set": lambda out, x: out.__setitem__(0, 0),
    "twice": lambda out, x: (out.mul_(2), out.add_(x)),
    "through_a_view": lambda out, x: out.view(T // 2, -1).add_(x.view(T // 2, -1)),
}


@pytest.mark.parametrize("name", LATER)
def test_what_the_model_writes_into_the_result_later_stays(name: str) -> None:
    """Statements that write the sum in place, by the name of the zeros that the loop began with."""

    def run(x, gate, w1, w2):
        out = by_one_hot(x, gate, w1, w2)
        LATER[name](out, x)
        return out

    outcome = assert_same(run, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert outcome.fused == 1 or name == "through_a_view"
