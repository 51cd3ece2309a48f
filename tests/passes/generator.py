"""A seeded generator of MoE blocks and of near misses: programs that differ from a block in one place.

A block is a choice of router, dispatch, activation, spelling of the halves, combine, dtype, biases, storage order and
sizes, the sizes often equal by coincidence (T == E, T * K == H, ...) so that a rank alone says nothing. A near miss
replaces one part by something that a careless recogniser takes for it.

`python -m tests.passes.generator --count 5000 --seed 0` runs many of them and prints what came of them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations import moe  # noqa: F401  (registers its grouped product)

from benchmarks.parts import (
    ADDS,
    GATHERS,
    INVERSES,
    PUTS,
    SORTS,
    Sizes,
    counters,
    finishes,
    halves,
    searches,
    tokens_of_rows,
)
from tests.passes.compare import Outcome, check, difference

GROUPED, BATCHED = "grouped", "batched"


# Which sizes are symbols in the graph (those of the tokens, or the weights' too), as torch.compile's `dynamic`.
DYNAMIC: dict[str, bool | None] = {"none": False, "tokens": None, "all": True}


@dataclass
class Parts:
    """What a block is made of; a near miss replaces one of them.

    Attributes:
        route: (logits, bias) -> (weights, ids).
        hidden: what the experts read, from the hidden states.
        key: the ids by which rows are sorted and experts are gathered, from ids [T, K].
        sort: flat ids -> permutation.
        tokens: permutation -> token of each row.
        gather: (hidden, token of each row) -> rows.
        counts: flat ids -> rows per expert.
        offsets: (counts, flat ids, permutation) -> where each expert's rows end.
        weigh: (rows before the experts, weights of the rows) -> weighted rows.
        start: hidden -> what the results are added to.
        repeat: hidden -> rows in token order.
        activation: product -> rows of the second product.
        second_ids: ids by which the batched form gathers the second weight.
        row_weights: (flat weights, permutation) -> weights of the rows in sorted order.
        inverse: permutation -> where each row goes.
        combine: name of the way back to tokens.
        before_unsort: whether rows are weighted before they return to token order.
        finish: (rows [T, K, H], weights [T, K]) -> [T, H].
        add: (start, index, rows) -> [T, H].
        put: (rows, permutation) -> rows in token order.
        tokens_by_slot: hidden -> tokens that all slots' weights are multiplied with.
        at: what to do at a place in the block, with the values that it has by then.
        returns: extra results, from those values.
    """

    route: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    activation: Callable[[Tensor], Tensor]
    combine: str
    sort: Callable[[Tensor], Tensor]
    counts: Callable[[Tensor], Tensor]
    repeat: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    before_unsort: bool
    tokens: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor, Tensor], Tensor]
    gather: Callable[[Tensor, Tensor], Tensor] = lambda x, tokens: x[tokens]
    offsets: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda counts, flat, perm: counts.cumsum(0, dtype=torch.int32)
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda rows, weights: rows * weights.unsqueeze(-1)
    start: Callable[[Tensor], Tensor] = torch.zeros_like
    hidden: Callable[[Tensor], Tensor] = lambda x: x
    key: Callable[[Tensor], Tensor] = lambda ids: ids.reshape(-1)
    second_ids: Callable[[Tensor], Tensor] = lambda flat: flat
    row_weights: Callable[[Tensor, Tensor], Tensor] = lambda weights, perm: weights[perm]
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda zeros, index, rows: zeros.index_add(0, index, rows)
    put: Callable[[Tensor, Tensor], Tensor] = lambda out, perm: torch.empty_like(out).index_put_((perm,), out)
    tokens_by_slot: Callable[[Tensor], Tensor] = lambda x: x
    rows_out: Callable[[Tensor], Tensor] = lambda rows: rows
    at: dict[str, Callable[[dict[str, Tensor]], Any]] = field(default_factory=dict)
    returns: Callable[[dict[str, Tensor]], tuple[Any, ...]] = lambda values: ()


@dataclass(frozen=True)
class Case:
    """One generated program. ``traits`` names the choices made; ``mutations`` the near misses among them; ``by_slot``
    how gathered weights [T, K, ., .] are multiplied, empty for those of [R, ., .]; ``sliced``: in "products" or whole
    "experts", one after the other, on slices of the sorted rows.
    """

    seed: int
    sizes: Sizes
    form: str
    dtype: torch.dtype
    dynamic: str
    train: bool
    traits: tuple[str, ...]
    mutations: tuple[str, ...]
    parts: Parts
    original: Parts
    weights: dict[str, bool]
    by_slot: str = ""
    sliced: str = ""

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in vars(self.sizes).items())
        flags = [f"dynamic={self.dynamic}", *(["train"] if self.train else [])]
        flags += [name for name, on in self.weights.items() if on]
        changed = f" CHANGED: {', '.join(self.mutations)}" if self.mutations else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"seed {self.seed}: {sizes} {kind} {self.form} {self.sliced} {' '.join((*self.traits, *flags))}{changed}"


# ---- routers


def _chosen(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(scores, k, dim=-1)
    return weights, ids


def _renormalised(weights: Tensor, eps: float = 0.0) -> Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    return weights / (total + eps) if eps else weights / total


def _group_mask(choice: Tensor, groups: int, kept: int, ranking: str) -> Tensor:
    per_group = choice.view(choice.shape[0], groups, -1)
    best = per_group.topk(2, dim=-1)[0].sum(dim=-1) if ranking == "top2" else per_group.max(dim=-1).values
    ids = torch.topk(best, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter_(1, ids, 1)
    return mask.unsqueeze(-1).expand(-1, groups, choice.shape[-1] // groups).reshape(-1, choice.shape[-1]).bool()


def _softmax_after(values: Tensor) -> Tensor:
    return torch.softmax(values, dim=-1, dtype=torch.float32)


def routers(s: Sizes) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Every router form that `meta/routing.py` has a row for, in the spellings of real models."""
    k = s.K

    def softmax(logits, bias):
        return _chosen(F.softmax(logits, dim=1, dtype=torch.float), k)

    def softmax_renormalised(logits, bias):
        weights, ids = _chosen(logits.float().softmax(-1), k)
        return _renormalised(weights), ids

    def softmax_in_place(logits, bias):
        weights, ids = _chosen(torch.softmax(logits.float(), dim=-1), k)
        weights /= weights.sum(dim=-1, keepdim=True)
        return weights, ids

    def softmax_cast(logits, bias):
        weights, ids = _chosen(F.softmax(logits, dim=-1, dtype=torch.float32), k)
        return _renormalised(weights).to(logits.dtype), ids

    def topk_softmax(logits, bias):
        values, ids = _chosen(logits, k)
        return values.float().softmax(-1), ids

    def topk_softmax_dtype(logits, bias):
        values, ids = torch.topk(logits.float(), k)
        return F.softmax(values, 1), ids

    def sigmoid(logits, bias):
        return _chosen(logits.float().sigmoid(), k)

    def sigmoid_biased(logits, bias):
        scores = torch.sigmoid(logits.float())
        _, ids = torch.topk(scores + bias, k, dim=-1, sorted=False)
        return _renormalised(scores.gather(1, ids), 1e-20) * 2.5, ids

    def sigmoid_biased_plain(logits, bias):
        scores = logits.float().sigmoid()
        ids = torch.topk(scores + bias.unsqueeze(0), k, dim=1)[1]
        return torch.gather(scores, dim=-1, index=ids), ids

    def softmax_biased(logits, bias):
        scores = logits.float().softmax(dim=-1)
        ids = torch.topk(scores + bias, k)[1]
        return _renormalised(scores.gather(-1, ids)) * 1.5, ids

    def topk_sigmoid(logits, bias):
        values, ids = _chosen(logits, k)
        return values.float().sigmoid(), ids

    def sqrt_softplus(logits, bias):
        scores = F.softplus(logits.float()).sqrt()
        weights, ids = _chosen(scores, k)
        return _renormalised(weights), ids

    forms = {
        f.__name__: f
        for f in (softmax, softmax_renormalised, softmax_in_place, softmax_cast, topk_softmax, topk_softmax_dtype,
                  sigmoid, sigmoid_biased, sigmoid_biased_plain, softmax_biased, topk_sigmoid, sqrt_softplus)
    }  # fmt: skip
    if s.E % 4 == 0:
        groups, kept = s.E // 2, max(1, s.E // 4, -(-k // 2))

        def deepseek(logits, bias):
            scores = logits.float().sigmoid()
            choice = scores + bias.unsqueeze(0)
            mask = _group_mask(choice, groups, kept, "top2")
            ids = torch.topk(choice.masked_fill(~mask, float("-inf")), k=k, dim=-1, sorted=False)[1]
            return _renormalised(scores.gather(1, ids), 1e-20) * 2.5, ids

        def softmax_groups(logits, bias):
            scores = logits.float().softmax(dim=-1)
            mask = _group_mask(scores, groups, kept, "max")
            weights, ids = torch.topk(scores.masked_fill(~mask, 0.0), k=k, dim=-1, sorted=False)
            return weights * 16.0, ids

        forms |= {"deepseek": deepseek, "softmax_groups": softmax_groups}
    return forms


# ---- activations


def _oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "silu_reversed": lambda gate, up: up * F.silu(gate),
    "silu_spelled": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu2": lambda gate, up: F.relu(gate).square() * up,
    "oai": _oai,
    "clamped_silu": _clamped_silu,
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda h: F.silu(h),
    "gelu": lambda h: F.gelu(h),
    "relu2": lambda h: torch.pow(F.relu(h), 2),
}


# ---- dispatch and combine


COMBINES = ("index", "put", "add")
STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "more": lambda x: x * 0.5,
    "itself": lambda x: x,
    "its_view": lambda x: x.view(-1).view(x.shape),
    "its_copy": lambda x: x.clone(),
}
BY_SLOT = ("einsum", "einsum_of_all", "matmul", "matmul_from_the_left")


def repeats(s: Sizes) -> dict[str, Callable[[Tensor], Tensor]]:
    """Rows in token order."""
    return {
        "repeat_interleave": lambda x: x.repeat_interleave(s.K, dim=0),
        "ramp": lambda x: x[torch.arange(x.shape[0] * s.K) // s.K],
        "function": lambda x: torch.repeat_interleave(x, s.K, 0),
        "expand": lambda x: x.unsqueeze(1).expand(-1, s.K, -1).reshape(-1, x.shape[1]),
        "repeat": lambda x: x[:, None].repeat(1, s.K, 1).view(-1, x.shape[1]),
    }


# ---- the program


def block(case: Case, parts: Parts) -> Callable[..., Any]:
    """A function of the case's inputs."""
    s = case.sizes
    transposed, biased = case.weights["transposed"], case.weights["biased"]
    apart, before = case.weights["apart"], case.weights["before"]

    def times_one(rows: Tensor, weight: Tensor) -> Tensor:
        return rows @ weight if transposed else F.linear(rows, weight)

    def product(rows: Tensor, weight: Tensor, offsets: Any) -> Tensor:
        if case.sliced:
            return torch.cat([times_one(mine, weight[e]) for e, mine in enumerate(rows.split(offsets))])
        given = weight if transposed else weight.transpose(-2, -1)
        if rows.dtype == torch.bfloat16:
            return torch._grouped_mm(rows, given, offs=offsets)
        return torch.ops.transformers.grouped_mm_fallback(rows, given, offsets)

    def gathered(rows: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Rows [R, .] or [T, K, .], or tokens [T, .], times the weights at ids [R] or [T, K]."""
        chosen = weight[ids] if case.by_slot != "einsum_of_all" else weight[ids, ...]
        if case.by_slot.startswith("einsum"):
            lead = "tk" if ids.dim() == 2 else "r"
            mine = lead if rows.dim() > ids.dim() else "t"
            return torch.einsum(f"{mine}i, {lead}{'io' if transposed else 'oi'} -> {lead}o", rows, chosen)
        if rows.dim() == ids.dim() == 2:
            rows = rows.unsqueeze(1)
        if case.by_slot == "matmul_from_the_left":
            return torch.matmul(rows.unsqueeze(-2), chosen if transposed else chosen.mT).squeeze(-2)
        chosen = chosen.transpose(-2, -1) if transposed else chosen
        if case.by_slot == "matmul":
            return (chosen @ rows.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(chosen, rows.unsqueeze(-1)).squeeze(-1)

    def run(x, gate, bias, w1, w2, b1, b2):
        x, w1, w2 = x * 1, w1 * 1, w2 * 1
        values: dict[str, Tensor] = {"hidden": x, "w1": w1, "w2": w2}

        def reach(place: str, **more: Tensor) -> None:
            values.update(more)
            if place in parts.at:
                parts.at[place](values)

        logits = F.linear(x, gate)
        weights, ids = parts.route(logits, bias)
        reach("routed", weights=weights, ids=ids, logits=logits)
        x = parts.hidden(x)
        flat = parts.key(ids)
        if case.form == GROUPED:
            perm = parts.sort(flat)
            rows = parts.gather(x, parts.tokens(perm))
            if before:
                rows = parts.weigh(rows, parts.row_weights(weights.reshape(-1), perm)).to(x.dtype)
            counts = parts.counts(flat)
            offsets = counts.long().tolist() if case.sliced else parts.offsets(counts, flat, perm)
            reach("gathered", rows=rows, perm=perm)
        if case.sliced == "experts":
            out = torch.cat([one_expert(e, mine, w1, w2, b1, b2) for e, mine in enumerate(rows.split(offsets))])
            reach("first", h=out)
            reach("activated", a=out)
        elif case.form == GROUPED:
            h = first(lambda w: product(rows, w, offsets), w1, lambda b: b[flat[perm]], b1)
            reach("first", h=h[0] if isinstance(h, list) else h)
            a = parts.activation(h)
            reach("activated", a=a)
            out = product(a, w2, offsets)
            out = out + b2[flat[perm]] if biased else out
        else:
            rows = parts.repeat(x) if before or not case.by_slot else parts.tokens_by_slot(x)
            if before:
                rows = parts.weigh(rows, weights.reshape(-1)).to(x.dtype)
            chosen = flat
            if case.by_slot:
                chosen = flat.view(-1, s.K)
                rows = rows.view(-1, s.K, s.H) if before else rows
            reach("gathered", rows=rows, flat=flat)
            h = first(lambda w: gathered(rows, w, chosen), w1, lambda b: b[chosen], b1)
            reach("first", h=h[0] if isinstance(h, list) else h)
            a = parts.activation(h)
            a = a.reshape(*chosen.shape, s.I) if case.by_slot else a
            reach("activated", a=a)
            chosen = parts.second_ids(flat).view(chosen.shape)
            out = gathered(a, w2, chosen)
            out = (out + b2[chosen] if biased else out).reshape(-1, s.H)
        reach("second", out=out)
        out = parts.rows_out(out)
        if case.form == BATCHED and before:
            y = out.view(-1, s.K, s.H).sum(1)
        elif case.form == BATCHED:
            y = parts.finish(out, weights)
        else:
            y = sorted_back(x, out, weights, perm)
        reach("done", y=y)
        return y.to(x.dtype), *parts.returns(values)

    def first(
        times: Callable[[Tensor], Tensor], weight: Tensor, rows_of: Callable[[Tensor], Tensor], bias: Tensor
    ) -> Any:
        """The first product, or two of them with one half of the weight each: [gate, up]."""
        if not apart:
            return times(weight) + rows_of(bias) if biased else times(weight)
        halves = [(w, b) for w, b in zip(weight.chunk(2, -1 if transposed else -2), bias.chunk(2, -1), strict=True)]
        return [times(w) + rows_of(b) if biased else times(w) for w, b in halves]

    def one_expert(e: int, mine: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        a = parts.activation(first(lambda w: times_one(mine, w), w1[e], lambda b: b, b1[e]))
        out = times_one(a, w2[e])
        return out + b2[e] if biased else out

    def sorted_back(x: Tensor, out: Tensor, weights: Tensor, perm: Tensor) -> Tensor:
        weighted = before
        if not before and (parts.before_unsort or parts.combine == "add"):
            out, weighted = out * parts.row_weights(weights.reshape(-1), perm).unsqueeze(-1), True
        if parts.combine == "add":
            return parts.add(parts.start(x), parts.tokens(perm), out.to(x.dtype))
        out = parts.put(out, perm) if parts.combine == "put" else out[parts.inverse(perm)]
        return out.view(-1, s.K, s.H).sum(1) if weighted else parts.finish(out, weights)

    return run


def inputs(case: Case) -> tuple[Tensor, ...]:
    """x, gate, bias, w1, w2, b1, b2. The logits of a token are well apart, so that rounding never swaps two experts."""
    s, make = case.sizes, torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=make) * scale

    n = 2 * s.I if case.weights["gated"] else s.I
    basis = torch.linalg.qr(normal(s.H, s.H))[0]
    gate = basis[: s.E]
    apart = torch.stack([torch.randperm(s.E, generator=make) for _ in range(s.T)]).float() * (3.0 / s.E)
    apart = apart + torch.rand(s.T, s.E, generator=make) / s.E - 1.5
    x = apart @ gate + normal(s.T, s.H - s.E, scale=0.6) @ basis[s.E :]
    first, second = (s.E, n, s.H), (s.E, s.H, s.I)
    if case.weights["transposed"]:
        first, second = (s.E, s.H, n), (s.E, s.I, s.H)
    bias = normal(s.E)
    values = (x, gate, bias, normal(*first), normal(*second), normal(s.E, n), normal(s.E, s.H))
    return tuple(value if value is bias else value.to(case.dtype) for value in values)


# ---- near misses: each changes ``parts`` and says whether it applies


Mutation = Callable[[Parts, Case, random.Random], bool]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def _routed(change: Callable[[Sizes, Tensor, Tensor, Callable[..., Any], Tensor], Any]) -> Mutation:
    """A change of what the router returns; ``change(sizes, weights, ids, route, logits)``."""

    def apply(parts: Parts, case: Case, rng: random.Random) -> bool:
        route, s = parts.route, case.sizes

        def changed(logits, bias):
            weights, ids = route(logits, bias)
            return change(s, weights, ids, lambda value: route(value, bias), logits)

        parts.route = changed
        return True

    return apply


def _replaced_router(build: Callable[[Sizes], Any], needs: Callable[[Sizes], bool] = lambda s: True) -> Mutation:
    def apply(parts: Parts, case: Case, rng: random.Random) -> bool:
        if not needs(case.sizes):
            return False
        parts.route = build(case.sizes)
        return True

    return apply


def _topk_by(**options: Any) -> Callable[[Sizes], Any]:
    return lambda s: lambda logits, bias: torch.topk(logits.float().softmax(-1), s.K, **options)


def _scores(change: Callable[[Tensor, Sizes], Tensor]) -> Callable[[Sizes], Any]:
    return lambda s: lambda logits, bias: _chosen(change(logits.float(), s), s.K)


def _weights(change: Callable[[Tensor], Tensor]) -> Mutation:
    return _routed(lambda s, weights, ids, route, logits: (change(weights), ids))


def _ids(change: Callable[[Tensor, Sizes], Tensor]) -> Mutation:
    return _routed(lambda s, weights, ids, route, logits: (weights, change(ids, s)))


def _biased(add: Callable[[Tensor, Tensor, Sizes], Tensor], gathered: str = "scores") -> Callable[[Sizes], Any]:
    def build(s: Sizes) -> Any:
        def route(logits, bias):
            scores = logits.float().sigmoid()
            choice = add(scores, bias, s)
            ids = torch.topk(choice, s.K, dim=-1)[1]
            return (choice if gathered == "choice" else scores).gather(1, ids), ids

        return route

    return build


def _renormalised_by(total: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Sizes], Any]:
    """``total(weights, scores)`` is what the weights are divided by."""

    def build(s: Sizes) -> Any:
        def route(logits, bias):
            scores = logits.float().softmax(-1)
            weights, ids = _chosen(scores, s.K)
            return weights / total(weights, scores), ids

        return route

    return build


def _grouped_limit(**options: Any) -> Callable[[Sizes], Any]:
    """DeepSeek's group limit with one part changed."""

    def build(s: Sizes) -> Any:
        def route(logits, bias):
            scores = logits.float().sigmoid()
            groups, kept = s.E // 2, -(-s.K // 2)
            axes = options.get("view", lambda value: value.view(-1, groups, 2))
            best = options.get("rank", lambda value: value.topk(2, dim=-1)[0].sum(-1))(axes(scores))
            ids = torch.topk(best, kept, **{"dim": -1, **options.get("topk", {})})[1]
            mask = torch.zeros_like(best).scatter_(options.get("dim", 1), ids, options.get("value", 1))
            wide = options.get("wide", lambda value: value.unsqueeze(-1).expand(-1, -1, 2))(mask)
            dead = options.get("dead", lambda value: ~value)(wide.reshape(-1, s.E).bool())
            ids = torch.topk(scores.masked_fill(dead, options.get("fill", float("-inf"))), s.K)[1]
            return scores.gather(1, ids), ids

        return route

    return build


def _grouped_sizes(s: Sizes) -> bool:
    return s.E % 2 == 0 and s.E >= 4


ROUTER_MISSES: dict[str, Mutation] = {
    "smallest_chosen": _replaced_router(_topk_by(dim=-1, largest=False)),
    "smallest_chosen_by_position": _replaced_router(
        lambda s: lambda logits, bias: torch.topk(logits.float().softmax(-1), s.K, -1, False)
    ),
    "topk_over_tokens": _replaced_router(
        lambda s: lambda logits, bias: tuple(v.t() for v in torch.topk(logits.float().softmax(-1), s.K, 0)),
        lambda s: s.T == s.E,
    ),
    "softmax_over_tokens": _replaced_router(_scores(lambda logits, s: logits.softmax(0))),
    "softmax_over_everything": _replaced_router(
        _scores(lambda logits, s: logits.reshape(-1).softmax(-1).view(-1, s.E))
    ),
    "softmax_in_halves": _replaced_router(
        _scores(lambda logits, s: logits.view(-1, 2, s.E // 2).softmax(-1).view(-1, s.E)), lambda s: s.E % 2 == 0
    ),
    "softmax_of_pairs_of_tokens": _replaced_router(
        _scores(lambda logits, s: logits.view(-1, 2 * s.E).softmax(-1).view(-1, s.E)), lambda s: s.T % 2 == 0
    ),
    "softmax_of_the_transposed": _replaced_router(_scores(lambda logits, s: logits.t().softmax(0).t().sigmoid())),
    "temperature": _replaced_router(_scores(lambda logits, s: (logits / 0.7).softmax(-1))),
    "log_softmax": _replaced_router(_scores(lambda logits, s: logits.log_softmax(-1))),
    "softmin": _replaced_router(_scores(lambda logits, s: F.softmin(logits, dim=-1))),
    "softplus_beta": _replaced_router(_scores(lambda logits, s: F.softplus(logits, beta=2).sqrt())),
    "softplus_threshold": _replaced_router(_scores(lambda logits, s: F.softplus(logits, 1, 0.1).sqrt())),
    "scores_scaled": _replaced_router(_scores(lambda logits, s: logits.softmax(-1) * 1.3)),
    "scores_in_bf16": _replaced_router(_scores(lambda logits, s: logits.softmax(-1).bfloat16().float())),
    "scores_squared": _replaced_router(_scores(lambda logits, s: logits.softmax(-1).square())),
    "hard_sigmoid": _replaced_router(_scores(lambda logits, s: F.hardsigmoid(logits))),
    "more_chosen_than_used": _replaced_router(
        lambda s: lambda logits, bias: tuple(v[:, 1:] for v in torch.topk(logits.float().softmax(-1), s.K + 1)),
        lambda s: s.K < s.E,
    ),
    "more_chosen_first_used": _replaced_router(
        lambda s: lambda logits, bias: tuple(v[:, : s.K] for v in torch.topk(logits.float().softmax(-1), s.K + 1)),
        lambda s: s.K < s.E,
    ),
    "bias_per_token": _replaced_router(
        _biased(lambda scores, bias, s: scores + bias.view(-1, 1)), lambda s: s.T == s.E
    ),
    "bias_twice": _replaced_router(_biased(lambda scores, bias, s: torch.add(scores, bias, alpha=2))),
    "bias_taken_off": _replaced_router(_biased(lambda scores, bias, s: scores - bias)),
    "bias_multiplied": _replaced_router(_biased(lambda scores, bias, s: scores * bias)),
    "bias_in_the_weights": _replaced_router(_biased(lambda scores, bias, s: scores + bias, "choice")),
    "bias_of_every_token": _replaced_router(
        _biased(lambda scores, bias, s: scores + bias.view(-1, 1) * torch.ones(s.T, s.E)), lambda s: s.T == s.E
    ),
    "bias_flipped": _replaced_router(_biased(lambda scores, bias, s: scores.flip(-1) + bias)),
    "sum_of_other_weights": _replaced_router(
        _renormalised_by(lambda weights, scores: weights.flip(0).sum(-1, keepdim=True))
    ),
    "sum_of_all_scores": _replaced_router(
        _renormalised_by(lambda weights, scores: scores.square().sum(-1, keepdim=True))
    ),
    "sum_of_squares": _replaced_router(
        _renormalised_by(lambda weights, scores: weights.square().sum(-1, keepdim=True))
    ),
    "sum_over_tokens": _replaced_router(_renormalised_by(lambda weights, scores: weights.sum(0, keepdim=True))),
    "sum_over_everything": _replaced_router(
        _renormalised_by(lambda weights, scores: weights.reshape(-1).sum(0, keepdim=True))
    ),
    "sum_without_keepdim": _replaced_router(
        _renormalised_by(lambda weights, scores: weights.sum(-1)), lambda s: s.T == s.K or s.T == 1
    ),
    "sum_clamped": _replaced_router(
        _renormalised_by(lambda weights, scores: weights.sum(-1, keepdim=True).clamp(min=0.9))
    ),
    "sum_with_large_eps": _replaced_router(
        _renormalised_by(lambda weights, scores: weights.sum(-1, keepdim=True) + 0.25)
    ),
    "sum_with_eps_twice": _replaced_router(
        _renormalised_by(lambda weights, scores: torch.add(weights.sum(-1, keepdim=True), 0.25, alpha=2))
    ),
    "sum_minus_eps": _replaced_router(_renormalised_by(lambda weights, scores: weights.sum(-1, keepdim=True) - 0.05)),
    "sum_of_half": _replaced_router(
        _renormalised_by(lambda weights, scores: weights[:, :1].sum(-1, keepdim=True)), lambda s: s.K > 1
    ),
    "largest_weight": _replaced_router(_renormalised_by(lambda weights, scores: weights.amax(-1, keepdim=True))),
    "norm_of_weights": _replaced_router(_renormalised_by(lambda weights, scores: weights.norm(dim=-1, keepdim=True))),
    "worst_groups": _replaced_router(_grouped_limit(topk={"largest": False}), _grouped_sizes),
    "groups_strided": _replaced_router(
        _grouped_limit(wide=lambda mask: mask.unsqueeze(1).expand(-1, 2, -1)), _grouped_sizes
    ),
    "groups_over_tokens": _replaced_router(
        _grouped_limit(topk={"dim": 0}, dim=0), lambda s: _grouped_sizes(s) and s.T >= -(-s.K // 2) and s.T == s.E
    ),
    "group_mask_not_inverted": _replaced_router(_grouped_limit(dead=lambda value: value), _grouped_sizes),
    "groups_by_their_worst": _replaced_router(
        _grouped_limit(rank=lambda value: value.topk(2, dim=-1, largest=False)[0][..., 0]), _grouped_sizes
    ),
    "groups_by_their_mean_product": _replaced_router(
        _grouped_limit(rank=lambda value: value.topk(2, dim=-1)[0].prod(-1)), _grouped_sizes
    ),
    "groups_by_the_second": _replaced_router(
        _grouped_limit(rank=lambda value: value.topk(2, dim=-1)[0][..., 1]), _grouped_sizes
    ),
    "groups_ranked_as_strided": _replaced_router(
        _grouped_limit(view=lambda value: value.view(value.shape[0], 2, -1).transpose(1, 2)), _grouped_sizes
    ),
    "groups_filled_with_half": _replaced_router(_grouped_limit(fill=0.5), _grouped_sizes),
    "group_mask_of_zeros": _replaced_router(_grouped_limit(value=0), _grouped_sizes),
    "weights_truncated": _weights(lambda weights: torch.div(weights, 0.1, rounding_mode="trunc")),
    "weights_floored": _weights(lambda weights: weights // 0.1),
    "weights_in_float8": _weights(lambda weights: weights.to(torch.float8_e4m3fn).to(weights.dtype)),
    "weights_as_integers": _weights(lambda weights: (weights * 9).int().to(weights.dtype)),
    "weights_reinterpreted": _weights(lambda weights: (weights.bfloat16() * 1).view(torch.float16).float()),
    "weights_of_the_next_slot": _weights(lambda weights: weights.roll(1, -1)),
    "weights_of_the_next_token": _weights(lambda weights: weights.roll(1, 0)),
    "weights_of_the_flipped": _weights(lambda weights: weights.flip(-1)),
    "weights_sorted": _weights(lambda weights: weights.sort(-1)[0]),
    "weights_twice": _weights(lambda weights: weights + weights),
    "weights_plus_one": _weights(lambda weights: weights + 1),
    "weights_into_one": _weights(lambda weights: 1 / (weights + 0.1)),
    "weights_power": _weights(lambda weights: weights**2),
    "weights_reshaped": _routed(
        lambda s, weights, ids, route, logits: (weights.t().reshape(weights.shape), ids)
    ),
    "weights_of_dropout": _weights(lambda weights: F.dropout(weights, 0.5)),
    "weights_by_tensor": _weights(lambda weights: weights * torch.linspace(0.5, 1.5, weights.shape[-1])),
    "weights_by_token": _weights(lambda weights: weights * torch.linspace(0.5, 1.5, weights.shape[0]).view(-1, 1)),
    "weights_masked": _weights(lambda weights: weights.masked_fill(weights < 0.3, 0.0)),
    "weights_clamped": _weights(lambda weights: weights.clamp(max=0.3)),
    "weights_of_other_logits": _routed(
        lambda s, weights, ids, route, logits: (route(logits.flip(0))[0], ids)
    ),
    "weights_at_other_ids": _routed(
        lambda s, weights, ids, route, logits: (logits.float().softmax(-1).gather(1, ids.flip(-1)), ids)
    ),
    "weights_gathered_over_tokens": _routed(
        lambda s, weights, ids, route, logits: (
            logits.float().softmax(-1).t().gather(0, ids[: s.E].t() % s.T).t().contiguous(), ids)
        if s.T == s.E else (weights + 0.1, ids)
    ),
    "ids_of_other_logits": _routed(lambda s, weights, ids, route, logits: (weights, route(-logits)[1])),
    "ids_rolled": _ids(lambda ids, s: ids.roll(1, 0)),
    "ids_flipped": _ids(lambda ids, s: ids.flip(-1)),
    "ids_next": _ids(lambda ids, s: (ids + 1) % s.E),
    "ids_negative": _ids(lambda ids, s: ids - s.E),
    "ids_clamped": _ids(lambda ids, s: ids.clamp(0, max(0, s.E - 2))),
    "ids_equal": _ids(lambda ids, s: ids // 2 * 2),
    "ids_mapped": _ids(lambda ids, s: torch.arange(s.E).flip(0)[ids]),
    "ids_in_bool": _ids(lambda ids, s: ids.bool().long()),
    "ids_in_int8": _ids(lambda ids, s: ids.to(torch.int8).long()),
    "ids_reshaped": _ids(lambda ids, s: ids.t().reshape(ids.shape)),
    "ids_sorted": _ids(lambda ids, s: ids.sort(-1)[0]),
    "ids_drawn": _ids(lambda ids, s: torch.randint(0, s.E, ids.shape)),
    "ids_xored": _ids(lambda ids, s: ids ^ 1 if s.E % 2 == 0 else ids),
}  # fmt: skip
MUTATIONS.update(ROUTER_MISSES)


def _set(
    form: str | None,
    applies: Callable[[Sizes], bool] = lambda s: True,
    where: Callable[[Case], bool] = lambda case: True,
    **build: Any,
) -> Mutation:
    """Replace parts by ``build[name](sizes)``, for one form of dispatch or both."""

    def apply(parts: Parts, case: Case, rng: random.Random) -> bool:
        if (form is not None and case.form != form) or not applies(case.sizes) or not where(case):
            return False
        for name, make in build.items():
            setattr(parts, name, make(case.sizes))
        return True

    return apply


def _is_by_slot(case: Case) -> bool:
    """Whether one set of tokens meets the weights of all slots."""
    return bool(case.by_slot) and not case.weights["before"]


def _is_weighed(case: Case) -> bool:
    """Whether the routing weights come before the experts."""
    return case.weights["before"]


def _adds(add: Callable[[Sizes], Any]) -> Mutation:
    return _set(GROUPED, combine=lambda s: "add", add=add)


def _counted(change: Callable[[Tensor, Tensor, Sizes], Tensor]) -> Mutation:
    """Counts that still add up to R: ``change(counts, flat, sizes)``."""
    return _set(
        GROUPED,
        counts=lambda s: lambda flat: change(torch.histc(flat.float(), bins=s.E, min=0, max=s.E - 1), flat, s),
    )


def _finished(change: Callable[[Tensor, Tensor, Sizes], Tensor], applies: Any = lambda s: True) -> Mutation:
    return _set(
        None, applies, before_unsort=lambda s: False, combine=lambda s: "index",
        finish=lambda s: lambda rows, weights: change(rows, weights, s),
    )  # fmt: skip


MUTATIONS.update(
    {
        "descending": _set(GROUPED, sort=lambda s: lambda flat: flat.sort(descending=True)[1]),
        "descending_argsort": _set(GROUPED, sort=lambda s: lambda flat: torch.argsort(flat, -1, True)),
        "not_sorted": _set(GROUPED, sort=lambda s: lambda flat: torch.arange(flat.shape[0])),
        "sorted_by_other_ids": _set(GROUPED, sort=lambda s: lambda flat: flat.flip(0).argsort(stable=True)),
        "perm_rolled": _set(GROUPED, sort=lambda s: lambda flat: flat.argsort(stable=True).roll(1)),
        "tokens_modulo": _set(GROUPED, tokens=lambda s: lambda perm: perm % s.T),
        "tokens_by_other_k": _set(GROUPED, tokens=lambda s: lambda perm: perm // (s.K + 1)),
        "tokens_truncated_late": _set(
            GROUPED, tokens=lambda s: lambda perm: torch.div(perm + 1, s.K, rounding_mode="trunc") % s.T
        ),
        "tokens_of_the_inverse": _set(GROUPED, tokens=lambda s: lambda perm: perm.argsort() // s.K),
        "counts_flipped": _counted(lambda counts, flat, s: counts.flip(0)),
        "counts_rolled": _counted(lambda counts, flat, s: counts.roll(1)),
        "counts_sorted": _counted(lambda counts, flat, s: counts.sort()[0]),
        "counts_of_other_ids": _counted(
            lambda counts, flat, s: torch.histc((flat // 2 * 2).float(), bins=s.E, min=0, max=s.E - 1)
        ),
        "histogram_of_other_range": _counted(
            lambda counts, flat, s: torch.histc(flat.float(), bins=s.E, min=0, max=2 * s.E)
        ),
        "weights_by_the_inverse": _set(
            GROUPED, before_unsort=lambda s: True, row_weights=lambda s: lambda weights, perm: weights[perm.argsort()]
        ),
        "weights_not_sorted": _set(
            GROUPED, before_unsort=lambda s: True, row_weights=lambda s: lambda weights, perm: weights
        ),
        "weights_by_the_flipped": _set(
            GROUPED, before_unsort=lambda s: True, row_weights=lambda s: lambda weights, perm: weights[perm.flip(0)]
        ),
        "not_unsorted": _set(
            GROUPED, combine=lambda s: "index", inverse=lambda s: lambda perm: torch.arange(perm.shape[0])
        ),
        "sorted_twice": _set(GROUPED, combine=lambda s: "index", inverse=lambda s: lambda perm: perm),
        "unsorted_twice": _set(
            GROUPED, combine=lambda s: "index", inverse=lambda s: lambda perm: perm.argsort().argsort()
        ),
        "unsorted_descending": _set(
            GROUPED, combine=lambda s: "index", inverse=lambda s: lambda perm: perm.argsort(descending=True)
        ),
        "inverse_flipped": _set(
            GROUPED, combine=lambda s: "index", inverse=lambda s: lambda perm: perm.argsort().flip(0)
        ),
        "added_twice": _adds(lambda s: lambda zeros, index, rows: zeros.index_add(0, index, rows, alpha=2)),
        "added_into_more": _adds(
            lambda s: lambda zeros, index, rows: torch.zeros(s.T + 3, s.H, dtype=rows.dtype).index_add(0, index, rows)
        ),
        "added_into_ones": _adds(lambda s: lambda zeros, index, rows: torch.ones_like(zeros).index_add(0, index, rows)),
        "added_elsewhere": _adds(
            lambda s: lambda zeros, index, rows: zeros.index_add(0, (index + 1) % zeros.shape[0], rows)
        ),
        "copied_not_added": _adds(lambda s: lambda zeros, index, rows: zeros.index_copy(0, index, rows)),
        "reduced_by_maximum": _adds(lambda s: lambda zeros, index, rows: zeros.index_reduce(0, index, rows, "amax")),
        "index_put_without_accumulate": _adds(lambda s: lambda zeros, index, rows: zeros.index_put((index,), rows)),
        "index_put_accumulated": _adds(lambda s: lambda zeros, index, rows: zeros.index_put((index,), rows, True)),
        "scattered_not_added": _adds(
            lambda s: lambda zeros, index, rows: zeros.scatter(0, index.unsqueeze(-1).expand_as(rows), rows)
        ),
        "scatter_added_over_features": _adds(
            lambda s: lambda zeros, index, rows: zeros.scatter_add(0, index.unsqueeze(-1).expand_as(rows), rows).flip(0)
        ),
        "counts_of_one_expert_more": _set(
            GROUPED, counts=lambda s: lambda flat: F.one_hot(flat + 1, s.E + 1).sum(0)[: s.E]
        ),
        "counts_of_shifted_experts": _set(
            GROUPED, counts=lambda s: lambda flat: (flat[:, None] == torch.arange(1, s.E + 1)).sum(0)
        ),
        "counts_of_two_each": _set(
            GROUPED,
            counts=lambda s: lambda flat: (
                torch.zeros(s.E, dtype=torch.long).scatter_add(0, flat, torch.full_like(flat, 2)) - 1
            ).clamp(min=0),
        ),
        "counts_set_not_added": _set(
            GROUPED,
            counts=lambda s: lambda flat: torch.zeros(s.E, dtype=torch.long).index_put((flat,), torch.ones_like(flat)),
        ),
        "counts_of_one_expert_twice": _set(
            GROUPED, counts=lambda s: lambda flat: torch.stack([(flat == max(e, 1)).sum() for e in range(s.E)])
        ),
        "counts_of_the_larger": _set(
            GROUPED, counts=lambda s: lambda flat: torch.stack([(flat >= e).sum() for e in range(s.E)])
        ),
        "counts_of_the_slots": _set(
            GROUPED, lambda s: s.T == s.E,
            counts=lambda s: lambda flat: F.one_hot(flat.view(-1, s.K), s.E).sum(dim=(1, 2)),
        ),
        "counts_over_the_experts": _set(
            GROUPED, lambda s: s.T * s.K == s.E and s.T > 1, counts=lambda s: lambda flat: F.one_hot(flat, s.E).sum(1)
        ),
        "counts_of_first_choices": _set(
            GROUPED, counts=lambda s: lambda flat: F.one_hot(flat.view(-1, s.K)[:, 0], s.E).sum(0)
        ),
        "counts_of_tokens": _set(
            GROUPED, counts=lambda s: lambda flat: F.one_hot(flat.view(-1, s.K) // 2, s.E).sum(1).count_nonzero(dim=0)
        ),
        "searched_without_the_equal": _set(
            GROUPED,
            offsets=lambda s: lambda counts, flat, perm: torch.searchsorted(flat[perm], torch.arange(s.E)).int(),
        ),
        "searched_past_the_equal": _set(
            GROUPED,
            offsets=lambda s: lambda counts, flat, perm: (
                torch.searchsorted(flat[perm], torch.arange(1, s.E + 1), right=True).int()
            ),
        ),
        "searched_in_unsorted_ids": _set(
            GROUPED,
            offsets=lambda s: lambda counts, flat, perm: (
                torch.searchsorted(flat, torch.arange(s.E), right=True).cummax(0)[0].int()
            ),
        ),
        "searched_in_other_ids": _set(
            GROUPED,
            offsets=lambda s: lambda counts, flat, perm: (
                torch.searchsorted((flat // 2).sort()[0], torch.arange(s.E), right=True).int()
            ),
        ),
        "tokens_listed_by_slot": _set(
            GROUPED, tokens=lambda s: lambda perm: torch.arange(perm.shape[0] // s.K).repeat(s.K)[perm]
        ),
        "tokens_listed_by_slot_expanded": _set(
            GROUPED,
            tokens=lambda s: lambda perm: torch.arange(perm.shape[0] // s.K)[None].expand(s.K, -1).reshape(-1)[perm],
        ),
        "tokens_listed_in_pair_order": _set(
            GROUPED, tokens=lambda s: lambda perm: torch.arange(perm.shape[0] // s.K).repeat_interleave(s.K)
        ),
        "tokens_sorted_twice": _set(
            GROUPED, tokens=lambda s: lambda perm: torch.arange(perm.shape[0] // s.K).repeat_interleave(s.K)[perm][perm]
        ),
        "slots_for_tokens": _set(GROUPED, lambda s: s.T >= s.K, tokens=lambda s: lambda perm: perm % s.K),
        "gathered_by_column": _set(
            GROUPED, lambda s: s.T * s.K <= s.H and s.T == s.H,
            gather=lambda s: lambda x, tokens: x.gather(1, tokens[None].expand(x.shape[0], -1)).t()[:, : s.H],
        ),
        "gathered_from_two_tokens": _set(
            GROUPED,
            gather=lambda s: lambda x, tokens: x.gather(
                0, (tokens[:, None] + torch.arange(x.shape[1]) % 2) % x.shape[0]
            ),
        ),
        "tokens_flipped_by_slot": _set(BATCHED, where=_is_by_slot, tokens_by_slot=lambda s: lambda x: x.flip(0)),
        "tokens_rounded_by_slot": _set(
            BATCHED, where=_is_by_slot, tokens_by_slot=lambda s: lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)
        ),
        "expanded_by_slot": _set(
            BATCHED, repeat=lambda s: lambda x: x.unsqueeze(0).expand(s.K, -1, -1).reshape(-1, x.shape[1])
        ),
        "rows_multiplied": _set(
            None,
            gather=lambda s: lambda x, tokens: x[tokens] * torch.linspace(0.5, 1.5, tokens.shape[0])[:, None],
            repeat=lambda s: lambda x: (
                x.repeat_interleave(s.K, 0) * torch.linspace(0.5, 1.5, x.shape[0] * s.K)[:, None]
            ),
        ),
        "weighed_by_addition": _set(
            None, where=_is_weighed, weigh=lambda s: lambda rows, weights: rows + weights.unsqueeze(-1)
        ),
        "weighed_twice": _set(
            None, where=_is_weighed, weigh=lambda s: lambda rows, weights: rows * weights[:, None] * weights[:, None]
        ),
        "weighed_by_the_flipped": _set(
            None, where=_is_weighed, weigh=lambda s: lambda rows, weights: rows * weights.flip(0).unsqueeze(-1)
        ),
        "weighed_by_column": _set(
            None, lambda s: s.T * s.K == s.H, _is_weighed, weigh=lambda s: lambda rows, weights: rows * weights[None]
        ),
        "added_to_a_view": _adds(lambda s: lambda start, index, rows: (
            start.view(-1, 2, s.H // 2).flatten(1).index_add_(0, index, rows) + start)),
        "added_in_place_and_read": _adds(lambda s: lambda start, index, rows: start.index_add_(0, index, rows) + start),
        "added_to_two": _adds(lambda s: lambda start, index, rows: start.index_add(0, index, rows) + start.index_add(
            0, index, rows * 2)),
        "scatter_added_by_column": _adds(
            lambda s: lambda start, index, rows: start.scatter_add(
                0, (index[:, None] + torch.arange(rows.shape[1]) % 2) % start.shape[0], rows)
        ),
        "put_by_the_inverse": _set(
            GROUPED, combine=lambda s: "put",
            put=lambda s: lambda out, perm: torch.empty_like(out).index_copy(0, perm.argsort(), out),
        ),
        "einsum_over_tokens": _finished(
            lambda rows, weights, s: torch.einsum("tkh,tk->kh", rows.view(-1, s.K, s.H), weights.to(rows.dtype)),
            lambda s: s.T == s.K,
        ),
        "einsum_of_the_transposed": _finished(
            lambda rows, weights, s: torch.einsum("tkh,kt->th", rows.view(-1, s.K, s.H), weights.to(rows.dtype)),
            lambda s: s.T == s.K,
        ),
        "einsum_of_features": _finished(
            lambda rows, weights, s: torch.einsum("tkh,th->tk", rows.view(-1, s.K, s.H), weights.to(rows.dtype)),
            lambda s: s.K == s.H,
        ),
        "einsum_by_slot": _finished(
            lambda rows, weights, s: torch.einsum("kth,tk->th", rows.view(s.K, -1, s.H), weights.to(rows.dtype))
        ),
        "bmm_of_the_flipped": _finished(
            lambda rows, weights, s: torch.bmm(
                weights.to(rows.dtype).flip(-1).unsqueeze(1), rows.view(-1, s.K, s.H)).squeeze(1)
        ),
        "tiled_tokens": _set(BATCHED, repeat=lambda s: lambda x: x.repeat(s.K, 1)),
        "reversed_ramp": _set(
            BATCHED, repeat=lambda s: lambda x: x[torch.arange(start=s.T * s.K - 1, end=-1, step=-1) // s.K]
        ),
        "strided_ramp": _set(BATCHED, repeat=lambda s: lambda x: x[torch.arange(0, 2 * s.T * s.K, 2) // s.K % s.T]),
        "late_ramp": _set(BATCHED, repeat=lambda s: lambda x: x[torch.arange(1, s.T * s.K + 1) // s.K % s.T]),
        "features_repeated": _set(
            BATCHED, lambda s: s.T * s.K == s.H and s.H == s.K * s.T,
            repeat=lambda s: lambda x: x.repeat_interleave(s.K, 0).t().contiguous(),
        ),
        "second_ids_rolled": _set(BATCHED, second_ids=lambda s: lambda flat: flat.roll(1)),
        "second_ids_flipped": _set(BATCHED, second_ids=lambda s: lambda flat: flat.flip(0)),
        "second_ids_clamped": _set(BATCHED, second_ids=lambda s: lambda flat: flat.clamp(max=max(0, s.E - 2))),
        "key_transposed": _set(None, key=lambda s: lambda ids: ids.t().reshape(-1)),
        "key_flipped": _set(None, key=lambda s: lambda ids: ids.reshape(-1).flip(0)),
        "key_wrapped": _set(BATCHED, key=lambda s: lambda ids: ids.reshape(-1) - s.E),
        "key_as_int32": _set(None, key=lambda s: lambda ids: ids.reshape(-1).to(torch.int32).long()),
        "hidden_in_bf16": _set(None, hidden=lambda s: lambda x: (x * 1.001).bfloat16().to(x.dtype)),
        "hidden_in_float8": _set(None, hidden=lambda s: lambda x: x.to(torch.float8_e5m2).to(x.dtype)),
        "hidden_flipped": _set(None, hidden=lambda s: lambda x: x.flip(0)),
        "hidden_scaled": _set(None, hidden=lambda s: lambda x: x * 1.5),
        "hidden_transposed": _set(None, lambda s: s.T == s.H, hidden=lambda s: lambda x: x.t()),
        "rows_in_float8": _set(None, rows_out=lambda s: lambda rows: rows.to(torch.float8_e4m3fn).to(rows.dtype)),
        "rows_in_integers": _set(None, rows_out=lambda s: lambda rows: (rows * 8).int().to(rows.dtype)),
        # (one weighted row for each token is the block's result, whose last bit becomes any bit)
        "rows_reinterpreted": _set(
            None, where=lambda case: case.sizes.K > 1 or not case.weights["before"],
            rows_out=lambda s: lambda rows: rows.bfloat16().clone().view(torch.float16).to(rows.dtype),
        ),
        "rows_doubled": _set(None, rows_out=lambda s: lambda rows: rows + rows),
        "rows_flipped": _set(None, rows_out=lambda s: lambda rows: rows.flip(0)),
        "rows_rolled": _set(None, rows_out=lambda s: lambda rows: rows.roll(1, -1)),
        "rows_transposed": _set(
            None, lambda s: s.T * s.K == s.H, rows_out=lambda s: lambda rows: rows.t().contiguous()
        ),
        "rows_normed": _set(None, rows_out=lambda s: lambda rows: F.rms_norm(rows, (s.H,))),
        "summed_over_tokens": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1)).sum(0),
            lambda s: s.T == s.K or s.T == 1,
        ),
        "summed_as_transposed": _finished(
            lambda rows, weights, s: (rows * weights.reshape(-1, 1)).view(s.K, -1, s.H).sum(0)
        ),
        "summed_over_features": _finished(
            lambda rows, weights, s: (rows * weights.reshape(-1, 1)).view(-1, s.H, s.K).sum(-1)
        ),
        "summed_over_last": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1)).transpose(1, 2).sum(-1)
        ),
        "averaged": _finished(lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1)).mean(1)),
        "maximum_of_slots": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1)).amax(1)
        ),
        "cumulated": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1)).cumsum(1)[:, 0]
        ),
        "one_slot_left_out": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1))[:, 1:].sum(1), lambda s: s.K > 1
        ),
        "weights_along_features": _finished(
            lambda rows, weights, s: (rows * weights.reshape(1, -1)).view(-1, s.K, s.H).sum(1),
            lambda s: s.T * s.K == s.H,
        ),
        "weights_of_other_tokens": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.flip(0).unsqueeze(-1)).sum(1)
        ),
        "weights_transposed": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.t().unsqueeze(-1)).sum(1),
            lambda s: s.T == s.K,
        ),
        "weights_transposed_flat": _finished(
            lambda rows, weights, s: (rows * weights.t().reshape(-1, 1)).view(-1, s.K, s.H).sum(1)
        ),
        "weights_left_out": _finished(lambda rows, weights, s: rows.view(-1, s.K, s.H).sum(1)),
        "weights_applied_twice": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1) * weights.unsqueeze(-1)).sum(1)
        ),
        "weights_added": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) + weights.unsqueeze(-1)).sum(1)
        ),
        "weights_divided": _finished(
            lambda rows, weights, s: (rows.view(-1, s.K, s.H) / (weights.unsqueeze(-1) + 0.1)).sum(1)
        ),
        "weights_after_the_sum": _finished(
            lambda rows, weights, s: rows.view(-1, s.K, s.H).sum(1) * weights[:, :1]
        ),
    }
)  # fmt: skip


def _activates(change: Callable[[Tensor, Callable[[Tensor], Tensor], Sizes], Tensor], gated: bool = True) -> Mutation:
    def apply(parts: Parts, case: Case, rng: random.Random) -> bool:
        if (gated and not case.weights["gated"]) or case.weights["apart"]:
            return False
        activation, s = parts.activation, case.sizes
        parts.activation = lambda h: change(h, activation, s)
        return True

    return apply


def _products(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Mutation:
    """A change of the results of two first products."""

    def apply(parts: Parts, case: Case, rng: random.Random) -> bool:
        if not case.weights["apart"]:
            return False
        activation = parts.activation
        parts.activation = lambda h: activation(list(change(*h)))
        return True

    return apply


MUTATIONS.update(
    {
        "gate_and_up_exchanged": _products(lambda gate, up: (up, gate)),
        "gate_for_both": _products(lambda gate, up: (gate, gate)),
        "up_of_the_next_row": _products(lambda gate, up: (gate, up.roll(1, 0))),
        "up_rounded": _products(lambda gate, up: (gate, up.to(torch.float8_e4m3fn).to(gate.dtype))),
        "halves_of_two_products": _products(
            lambda gate, up: (
                torch.cat([gate, up], -1)[..., : gate.shape[-1]],
                torch.cat([up, gate], -1)[..., gate.shape[-1] :],
            )
        ),
    }
)


def _silu_of(split: Callable[[Tensor, Sizes], tuple[Tensor, Tensor]], shape: bool = True) -> Mutation:
    def change(h, activation, s):
        gate, up = split(h, s)
        return (F.silu(gate) * up).reshape(h.shape[0], s.I)

    return _activates(change)


def _gating(act: Callable[[Tensor, Tensor], Tensor]) -> Mutation:
    return _activates(lambda h, activation, s: act(*h.chunk(2, -1)))


MUTATIONS.update(
    {
        "up_before_gate": _silu_of(lambda h, s: h.chunk(2, -1)[::-1]),
        "first_half_for_both": _silu_of(lambda h, s: (h.view(-1, 2, s.I)[:, 0], h.view(-1, 2, s.I)[:, 0])),
        "halves_of_two_kinds": _silu_of(lambda h, s: (h.view(-1, 2, s.I)[:, 1], h.view(-1, s.I, 2)[..., 0])),
        "halves_interleaved_by_view": _silu_of(lambda h, s: h.view(h.shape[0], -1, 2).chunk(2, -1)),
        "halves_in_blocks": _silu_of(lambda h, s: h.view(h.shape[0], 4, -1).chunk(2, -1)),
        "halves_odd_before_even": _silu_of(lambda h, s: (h[..., 1::2], h[..., ::2])),
        "halves_overlap": _silu_of(lambda h, s: (h[..., : s.I], h[..., s.I - 1 : -1])),
        "halves_are_the_same": _silu_of(lambda h, s: (h[..., : s.I], h[..., : s.I])),
        "halves_flipped": _silu_of(lambda h, s: (h[..., : s.I], h[..., s.I :].flip(-1))),
        "halves_of_rolled": _silu_of(lambda h, s: h.roll(1, -1).chunk(2, -1)),
        "halves_of_strided": _silu_of(lambda h, s: h.view(-1, s.I, 2).transpose(1, 2).chunk(2, 1)),
        "halves_of_the_rows": _silu_of(
            lambda h, s: h.reshape(2, -1).chunk(2, 0) if h.shape[0] % 2 == 0 else h.flip(-1).chunk(2, -1)
        ),
        "mixed_halves": _silu_of(lambda h, s: (h[..., : s.I], h[..., 1::2])),
        "sigmoid_of_up": _gating(lambda gate, up: gate * torch.sigmoid(up) * up),
        "tanh": _gating(lambda gate, up: torch.tanh(gate) * up),
        "mish": _gating(lambda gate, up: F.mish(gate) * up),
        "elu": _gating(lambda gate, up: F.elu(gate) * up),
        "leaky": _gating(lambda gate, up: F.leaky_relu(gate) * up),
        "hardswish": _gating(lambda gate, up: F.hardswish(gate) * up),
        "bare_sigmoid": _gating(lambda gate, up: torch.sigmoid(gate) * up),
        "quick_gelu": _gating(lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up),
        "silu_of_both": _gating(lambda gate, up: F.silu(gate) * F.silu(up)),
        "silu_of_the_product": _gating(lambda gate, up: F.silu(gate * up)),
        "silu_plus_up": _gating(lambda gate, up: F.silu(gate) + up),
        "silu_minus_up": _gating(lambda gate, up: F.silu(gate) * (up - 1)),
        "silu_up_plus_one": _gating(lambda gate, up: F.silu(gate) * (up + 1)),
        "silu_up_plus_two_ones": _gating(lambda gate, up: F.silu(gate) * torch.add(up, 1, alpha=2)),
        "silu_doubled": _gating(lambda gate, up: 2 * F.silu(gate) * up),
        "silu_negated": _gating(lambda gate, up: -F.silu(gate) * up),
        "silu_of_half": _gating(lambda gate, up: F.silu(gate * 0.5) * up),
        "silu_cubed": _gating(lambda gate, up: F.silu(gate) * up * up),
        "relu_cubed": _gating(lambda gate, up: F.relu(gate).pow(3) * up),
        "relu6": _gating(lambda gate, up: F.relu6(gate * 9) * up),
        "gate_clamped_below": _gating(lambda gate, up: F.silu(gate.clamp(min=-0.1)) * up),
        "gate_clamped_alone": _gating(lambda gate, up: F.silu(gate.clamp(max=0.1)) * up),
        "up_clamped_alone": _gating(lambda gate, up: F.silu(gate) * up.clamp(-0.1, 0.1)),
        "up_clamped_one_side": _gating(lambda gate, up: F.silu(gate.clamp(max=0.1)) * up.clamp(max=0.1)),
        "up_clamped_wider": _gating(lambda gate, up: F.silu(gate.clamp(max=0.1)) * up.clamp(-0.1, 0.2)),
        "clamped_after_silu": _gating(lambda gate, up: F.silu(gate).clamp(max=0.1) * up.clamp(-0.1, 0.1)),
        "clamped_both_sides": _gating(lambda gate, up: F.silu(gate.clamp(-0.1, 0.1)) * up.clamp(-0.1, 0.1)),
        "oai_without_one": _gating(
            lambda gate, up: up.clamp(-0.1, 0.1) * (gate.clamp(max=0.1) * torch.sigmoid(gate.clamp(max=0.1) * 1.702))
        ),
        "oai_other_gate": _gating(
            lambda gate, up: (up.clamp(-0.1, 0.1) + 1) * (gate * torch.sigmoid(gate.clamp(max=0.1) * 1.702))
        ),
        "addcmul_value": _gating(lambda gate, up: torch.addcmul(F.silu(gate), F.silu(gate), up, value=0.5)),
        "rows_mixed": _gating(lambda gate, up: F.silu(gate) * up.flip(0)),
        "rows_rolled_between": _gating(lambda gate, up: (F.silu(gate) * up).roll(1, 0)),
        "dropout_between": _gating(lambda gate, up: F.dropout(F.silu(gate) * up, 0.5)),
        "float8_between": _activates(
            lambda h, activation, s: activation(h).to(torch.float8_e4m3fn).to(h.dtype), gated=False
        ),
        "integers_between": _activates(lambda h, activation, s: (activation(h) * 8).int().to(h.dtype), gated=False),
        "float8_before": _activates(lambda h, activation, s: activation(h.to(torch.float8_e5m2).to(h.dtype)), False),
        "softmax_between": _activates(lambda h, activation, s: activation(h).softmax(-1), gated=False),
        "norm_between": _activates(lambda h, activation, s: F.layer_norm(activation(h), (s.I,)), gated=False),
        "shifted_between": _activates(lambda h, activation, s: activation(h) + 0.1, gated=False),
        "transposed_between": _activates(
            lambda h, activation, s: activation(h).t().contiguous().view(h.shape[0], s.I), gated=False
        ),
        "features_permuted_between": _activates(lambda h, activation, s: activation(h).flip(-1), gated=False),
    }
)


# ---- writes through aliases, values that escape


FLOAT_ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "t": lambda x: x.t() if x.dim() < 3 else x.mT,
    "T": lambda x: x.mT if x.dim() > 2 else x.T,
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "as_strided": lambda x: x.as_strided((3,), (1,)),
    "tensor_split": lambda x: x.tensor_split(2)[0],
    "first": lambda x: x[0],
    "slice": lambda x: x[..., 1:4],
    "unbind": lambda x: x.unbind(-1)[1],
    "einsum": lambda x: torch.einsum("...ij->...ji", x),
    "flatten": lambda x: x.flatten(),
    "expand": lambda x: x.expand_as(x),
    "view_of_ints": lambda x: x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)[..., :1],
    "movedim": lambda x: x.movedim(0, -1),
    "same_dtype": lambda x: x.to(x.dtype),
    "swapaxes": lambda x: x.swapaxes(-1, -2),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "no_dropout": lambda x: F.dropout(x, 0.5, False),
    "broadcast": lambda x: torch.broadcast_tensors(x, torch.ones(()))[0],
    "diagonal": lambda x: x.diagonal(0, -2, -1),
    "unfold": lambda x: x.unfold(-1, 1, 1),
}
FLOAT_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul": lambda x: x.mul_(-2),
    "add": lambda x: x.add_(1),
    "copy": lambda x: x.copy_(torch.ones_like(x)),
    "fill": lambda x: x.fill_(1),
    "zero": lambda x: x.zero_(),
    "foreach": lambda x: torch._foreach_mul_([x], 3),
    "out": lambda x: torch.mul(x, 3, out=x),
    "setitem": lambda x: x.__setitem__(Ellipsis, 1),
    "neg": lambda x: x.neg_(),
    "functional": lambda x: torch.neg_(x),
    "masked": lambda x: x.masked_fill_(torch.ones_like(x, dtype=torch.bool), 1),
    "aten": lambda x: torch.ops.aten.mul_.Tensor(x, torch.full((), 2).to(x.dtype)),
}
INT_WRITES: dict[str, Callable[[Tensor, int], Any]] = {
    "zero": lambda x, top: x.zero_(),
    "clamp": lambda x, top: x.clamp_(0, max(0, top - 2)),
    "and": lambda x, top: x.bitwise_and_(1),
    "remainder": lambda x, top: x.remainder_(max(1, top - 1)),
    "flip": lambda x, top: x.copy_(x.flip(0)),
    "foreach": lambda x, top: torch._foreach_clamp_max_([x], max(0, top - 2)),
}
PLACES = ("routed", "gathered", "first", "activated", "second", "done")
TARGETS = ("hidden", "weights", "logits", "rows", "h", "a", "out", "w1", "w2")
INT_TARGETS = ("ids", "flat", "perm", "offsets")


@mutation
def written_in_between(parts: Parts, case: Case, rng: random.Random) -> bool:
    target, place = rng.choice(TARGETS), rng.choice(PLACES)
    alias, write = rng.choice(sorted(FLOAT_ALIASES)), rng.choice(sorted(FLOAT_WRITES))
    parts.at[place] = _write(target, FLOAT_ALIASES[alias], FLOAT_WRITES[write])
    parts.at[place].__name__ = f"{write} of {alias} of {target} when {place}"
    return True


def _write(target: str, alias: Callable[[Tensor], Tensor], write: Callable[[Tensor], Any]) -> Any:
    def act(values: dict[str, Tensor]) -> None:
        if target in values:
            write(alias(values[target]))

    return act


@mutation
def alias_taken_early(parts: Parts, case: Case, rng: random.Random) -> bool:
    """The alias is made before the block and written inside."""
    target = rng.choice(("hidden", "weights", "w1", "w2"))
    place = rng.choice(PLACES[1:])
    alias, write = rng.choice(sorted(FLOAT_ALIASES)), rng.choice(sorted(FLOAT_WRITES))

    def remember(values: dict[str, Tensor]) -> None:
        values["alias"] = FLOAT_ALIASES[alias](values[target])

    parts.at["routed"] = remember
    parts.at[place] = lambda values: FLOAT_WRITES[write](values["alias"])
    parts.at[place].__name__ = f"{write} of an earlier {alias} of {target} when {place}"
    return True


@mutation
def ids_written_in_between(parts: Parts, case: Case, rng: random.Random) -> bool:
    target, place, write = rng.choice(("ids", "flat")), rng.choice(PLACES), rng.choice(sorted(INT_WRITES))
    if case.form == GROUPED:
        target = "ids"
    top = case.sizes.E

    def act(values: dict[str, Tensor]) -> None:
        if target in values:
            INT_WRITES[write](values[target], top)

    act.__name__ = f"{write} of {target} when {place}"
    parts.at[place] = act
    return True


@mutation
def perm_written_in_between(parts: Parts, case: Case, rng: random.Random) -> bool:
    if case.form != GROUPED:
        return False
    parts.at[rng.choice(PLACES[1:])] = lambda values: values["perm"].copy_(values["perm"].flip(0))
    return True


@mutation
def value_escapes(parts: Parts, case: Case, rng: random.Random) -> bool:
    name = rng.choice((*TARGETS, *INT_TARGETS, "y"))
    change = rng.choice(
        (lambda value: value, lambda value: value * 2, lambda value: value.sum(), lambda value: value[0])
    )
    parts.returns = lambda values: (change(values[name]),) if name in values else ()
    return True


@mutation
def written_after(parts: Parts, case: Case, rng: random.Random) -> bool:
    """A value that the block read is written afterwards and returned."""
    name = rng.choice(("hidden", "weights", "w1", "w2", "y", "rows", "h", "out"))
    alias = rng.choice(sorted(FLOAT_ALIASES))
    parts.at["done"] = lambda values: FLOAT_ALIASES[alias](values[name]).mul_(2)
    parts.returns = lambda values: (values[name],)
    return True


# ---- cases


def _sizes(rng: random.Random, most: int = 8) -> Sizes:
    """With ``most`` experts at most."""
    e = min(rng.choice((2, 3, 4, 5, 6, 8, 8)), most)
    k = rng.randint(1, min(e, 4))
    t, h, i = rng.choice((1, 2, 3, 4, 5, 7, 8, 12, 16)), rng.choice((8, 16, 24, 32)), rng.choice((8, 16, 24))
    coincidence = rng.choice(("none", "none", "T=E", "R=H", "K=1", "E=K", "I=H", "R=E", "T=K", "H=2I", "T=H", "2I=R"))
    if coincidence == "T=E":
        t = e
    elif coincidence == "R=H":
        t = h // k if h % k == 0 else t
    elif coincidence == "K=1":
        k = 1
    elif coincidence == "E=K":
        k = e
    elif coincidence == "I=H":
        i = h
    elif coincidence == "R=E" and e % k == 0:
        t = e // k
    elif coincidence == "T=K":
        t = k
    elif coincidence == "H=2I":
        h, i = 32, 16
    elif coincidence == "T=H":
        t = h = 16
    elif coincidence == "2I=R" and 2 * i % k == 0:
        t = 2 * i // k
    return Sizes(t, e, k, h, i)


def make(seed: int, misses: int | None = None) -> Case:
    """The case of ``seed``, with ``misses`` near misses (None: none for a third of the seeds, else one or two)."""
    rng = random.Random(seed)
    s = _sizes(rng)
    form = rng.choice((GROUPED, BATCHED))
    weights = {"transposed": rng.random() < 0.25, "biased": rng.random() < 0.25, "gated": rng.random() < 0.85}
    weights |= {"apart": weights["gated"] and rng.random() < 0.2, "before": rng.random() < 0.15}
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    dynamic = rng.choice(("none",) * 14 + ("tokens",) * 5 + ("all",))
    train = dtype == torch.float32 and rng.random() < 0.3

    def pick(forms: dict[str, Any]) -> tuple[str, Any]:
        name = rng.choice(list(forms))
        return name, forms[name]

    router, route = pick(routers(s))
    half, split = pick(halves(s))
    act, gated = pick(GATED)
    plain_name, plain = pick(PLAIN)
    sort_name, sort = pick(SORTS)
    count_name, counts = pick(counters(s))
    inverse_name, inverse = pick(INVERSES)
    repeat_name, repeat = pick(repeats(s))
    finish_name, finish = pick(finishes(s))
    token_name, tokens = pick(tokens_of_rows(s))
    gather_name, gather = pick(GATHERS)
    add_name, add = pick(ADDS)
    put_name, put = pick(PUTS)
    combine = rng.choice(COMBINES)
    before = rng.random() < 0.5
    search_name, search = pick(searches(s)) if rng.random() < 0.2 else ("", None)
    shared, start = combine == "add" and rng.random() < 0.3, rng.choice(list(STARTS))
    start = "its_copy" if train else start  # eager torch needs what is overwritten in place

    def activated(h: Any) -> Tensor:
        if not weights["gated"]:
            return plain(h)
        return gated(*(h if isinstance(h, list) else split(h)))

    def parts() -> Parts:
        more = {} if search is None else {"offsets": search}
        if shared:
            more["start"] = STARTS[start]
        return Parts(
            route=route, activation=activated, combine=combine, sort=sort, counts=counts, repeat=repeat,
            inverse=inverse, before_unsort=before, tokens=tokens, gather=gather, add=add, put=put, finish=finish,
            **more,
        )  # fmt: skip

    body = (act, half) if weights["gated"] else (plain_name,)
    back = {"index": inverse_name, "put": put_name, "add": f"{add_name}{f'_to_{start}' if shared else ''}"}[combine]
    tail = (sort_name, search_name or count_name, token_name, gather_name, combine, back, finish_name,
            "weights_first" if before else "weights_last")  # fmt: skip
    by_slot = rng.choice(BY_SLOT) if form == BATCHED and rng.random() < 0.5 else ""
    traits = (router, *body, *(tail if form == GROUPED else (by_slot or repeat_name, finish_name)))
    changed = parts()
    case = Case(seed, s, form, dtype, dynamic, train, traits, (), changed, parts(), weights, by_slot)
    if misses is None:
        misses = rng.choice((0, 1, 1, 1, 2, 2))
    names: list[str] = []
    while len(names) < misses:
        name = rng.choice(list(MUTATIONS))
        if MUTATIONS[name](changed, case, rng):
            written = [act.__name__ for act in changed.at.values() if act.__name__ not in ("<lambda>", "remember")]
            names.append(f"{name} ({'; '.join(written)})" if "in_between" in name or "early" in name else name)
    return Case(**{**vars(case), "mutations": tuple(names)})


def with_mutation(name: str) -> Case:
    """The first block that the near miss ``name`` applies to, in fp32, and gives another result.

    For the sizes of its inputs: symbolic ones take twice as long, and may be what a block is refused for.
    """

    def changed() -> Iterator[Case]:
        for seed in range(500):
            case = make(seed, misses=0)
            if case.dtype == torch.float32 and MUTATIONS[name](case.parts, case, random.Random(seed)):
                yield Case(**{**vars(case), "dynamic": "none", "mutations": (name,)})

    programs = lambda case: (block(case, case.parts), block(case, case.original))  # noqa: E731
    return first_that_changes(name, changed(), programs, inputs)


def run(case: Case) -> Outcome | None:
    """What compiling the case comes to; None when eager torch itself raises."""
    return outcome_of(case, block(case, case.parts), inputs(case))


# ---- what generated cases of all families have in common


Program = Callable[..., Any]
Inputs = Callable[[Any], tuple[Tensor, ...]]


def first_that_changes(
    name: str, cases: Iterable[Any], programs: Callable[[Any], tuple[Program, Program]], inputs: Inputs
) -> Any:
    """The first case whose near miss ``name`` gives another result than the block; the first one of all, if it is as
    good as what it replaces in each.

    Args:
        programs: the near miss and the block, of a case; inputs: what both take.
    """
    first = None
    for case in cases:
        first = first or case
        if _changes(case, *programs(case), inputs):
            return case
    if first is None:
        raise LookupError(name)
    return first


def with_named(name: str, family: Any) -> Any:
    """The first block in fp32 of a family whose near misses are named, that ``name`` applies to and changes."""
    blocks = (case for seed in range(300) if (case := family.make(seed, misses=0)).dtype == torch.float32)
    cases = (replace(case, mutations=(name,)) for case in blocks if family.applies(name, case))
    programs = lambda case: (family.block(case, case.mutations), family.block(case, ()))  # noqa: E731
    return first_that_changes(name, cases, programs, family.inputs)


def _changes(case: Any, changed: Program, original: Program, inputs: Inputs) -> bool:
    """Whether eager torch runs the near miss, backwards too where the case trains, and gives another result."""
    try:
        if case.train:
            given = [value.requires_grad_(value.is_floating_point()) for value in inputs(case)]
            changed(*given)[0].sum().backward()
        with torch.no_grad():
            results = []
            for program in (changed, original):
                given = list(inputs(case))
                torch.manual_seed(0)
                results.append(program(*given))
            return difference(*results) is not None
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False


def outcome_of(case: Any, function: Program, given: tuple[Tensor, ...]) -> Outcome | None:
    """What compiling a case's program comes to; None when eager torch itself raises."""
    if case.dynamic == "tokens":
        torch._dynamo.maybe_mark_dynamic(given[0], 0)
    try:
        tolerance = 1e-3 if case.train else None  # gradients are sums over tokens, some of terms that cancel
        return check(
            function, *given, tolerance=tolerance, gradients=case.train, dynamic=DYNAMIC[case.dynamic], fullgraph=True
        )
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def main(arguments: list[str] | None = None) -> int:
    """Run many cases, with a progress line, and print what came of them and every failure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--misses", type=int, default=None, help="near misses in every case (default: 0 to 2)")
    names = ("routed", "sliced", "dense", "unrolled", "capacity")
    parser.add_argument("--family", choices=(*names, "all"), default="all", help="of forms; all: one after the other")
    parser.add_argument("--list", action="store_true", help="say of every case what became of it")
    options = parser.parse_args(arguments)
    families: dict[str, Any] = {
        name: sys.modules[__name__] if name == "routed" else import_module(f"tests.passes.{name}")
        for name in (names if options.family == "all" else [options.family])
    }
    counted: Counter[str] = Counter()
    failures: list[str] = []
    for number in range(options.count):
        family = list(families.values())[number % len(families)]
        case = family.make(options.seed + number, options.misses)
        outcome = family.run(case)
        kind = "near miss" if case.mutations else "block of symbolic sizes" if case.dynamic == "all" else "block"
        if outcome is None:
            word = "eager raises"
        elif outcome.problem is not None:
            word = "crashed" if outcome.crashed else "wrong"
            failures.append(f"{word}: {outcome.problem[:200]}\n    {case}")
        else:
            word = "fused" if outcome.fused else "refused"
        counted[word] += 1
        counted[f"{kind}, {word}"] += 1
        if options.list or (kind == "block" and word != "fused"):
            print(f"\r{word}: {case}")
        if sys.stderr.isatty() or number % 100 == 99:
            counts = ", ".join(f"{key} {counted[key]}" for key in ("fused", "refused", "wrong", "crashed"))
            print(f"\r{number + 1}/{options.count}  {counts}", end="\n" if not sys.stderr.isatty() else "",
                  file=sys.stderr, flush=True)  # fmt: skip
    print(*failures, sep="\n")
    for word, count in sorted(counted.items()):
        print(f"{word:28s} {count}")
    blocks = sum(count for word, count in counted.items() if word.startswith("block,"))
    if blocks:
        print(f"{100 * counted['block, fused'] / blocks:.1f} % of {blocks} blocks fused")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
