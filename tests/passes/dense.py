"""A seeded generator of MoE blocks that send every token through every expert, and of near misses.

A block is a choice of scores that leave K experts, of a product for each projection, of what the scores multiply, and
of a way to sum over the experts, on tokens [T, H] or [B, S, H]. A near miss changes the scores, the tokens or the
products in one place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.parts import Sizes
from tests.passes import generator
from tests.passes.compare import Outcome
from tests.passes.generator import GATED, PLAIN

INF = float("inf")

# ---- scores [..., E] from logits, of which K are not zero


def _topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, ids = scores.topk(k, dim=-1)
    return weights, ids


def _chosen(logits: Tensor, s: Sizes) -> tuple[Tensor, Tensor]:
    return _topk(logits.float().softmax(-1), s.K)


def _scattered(logits, s):
    weights, ids = _chosen(logits, s)
    return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, ids, weights)


def _scattered_in_place(logits, s):
    weights, ids = _topk(logits.softmax(-1), s.K)
    return torch.zeros(logits.shape, dtype=logits.dtype).scatter_(-1, ids, weights / weights.sum(-1, keepdim=True))


def _scatter_added(logits, s):
    weights, ids = _topk(logits.sigmoid(), s.K)
    return torch.zeros_like(logits).scatter_add(-1, ids, weights * 2.5)


def _softmax_of_the_rest(logits, s):
    values, ids = _topk(logits, s.K)
    return torch.full_like(logits, -INF).scatter_(-1, ids, values).softmax(-1)


def _sigmoid_of_the_rest(logits, s):
    values, ids = _topk(logits, s.K)
    return torch.sigmoid(torch.full_like(logits, -INF).scatter(-1, ids, values))


def _multiplied(logits, s):
    scores = logits.softmax(-1)
    scores = scores * torch.zeros_like(scores).scatter(-1, scores.topk(s.K, dim=-1).indices, 1.0)
    return scores / scores.sum(-1, keepdim=True)


def _multiplied_by_one_hot(logits, s):
    scores = logits.float().sigmoid()
    scores = F.one_hot(scores.topk(s.K, dim=-1)[1], s.E).sum(-2) * scores
    return scores / (scores.sum(-1, keepdim=True) + 1e-9)


def _multiplied_by_any(logits, s):
    scores = logits.softmax(-1)
    kept = (scores.topk(s.K, dim=-1).indices.unsqueeze(-1) == torch.arange(s.E)).any(-2)
    scores = scores * kept
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-6)


def _filled(logits, s):
    dropped = torch.ones_like(logits, dtype=torch.bool).scatter(-1, logits.topk(s.K, dim=-1).indices, False)
    return logits.masked_fill(dropped, -INF).softmax(dim=-1)


def _filled_but(logits, s):
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(s.K, dim=-1).indices, True)
    return F.softmax(logits.masked_fill(~kept, -INF), -1, dtype=torch.float32)


def _filled_where_zero(logits, s):
    kept = F.one_hot(logits.topk(s.K, dim=-1).indices, s.E).amax(-2)
    return logits.masked_fill(kept == 0, -INF).softmax(-1)


def _where(logits, s):
    kept = F.one_hot(logits.topk(s.K, dim=-1).indices, s.E).sum(dim=-2).bool()
    return torch.where(kept, logits, -INF).softmax(-1)


def _where_not(logits, s):
    kept = F.one_hot(logits.topk(s.K, dim=-1).indices, s.E).sum(dim=-2) > 0
    return torch.where(~kept, torch.zeros_like(logits), logits.sigmoid())


def _one_hot(logits, s):
    weights, ids = _chosen(logits, s)
    return (F.one_hot(ids, num_classes=s.E) * weights.unsqueeze(-1)).sum(-2)


def _one_hot_einsum(logits, s):
    weights, ids = _chosen(logits, s)
    return torch.einsum("...k,...ke->...e" if logits.dim() > 3 else _LETTERS[logits.dim()], weights,
                        F.one_hot(ids, s.E).to(weights.dtype))  # fmt: skip


def _one_hots_one_by_one(logits, s):
    weights, ids = _chosen(logits, s)
    return sum(F.one_hot(ids[..., k], s.E) * weights[..., k : k + 1] for k in range(s.K))


def _argmax_after_argmax(logits, s):
    """GShard's way to the best two, for any number of them."""
    scores, total, left = logits.float().softmax(-1), None, logits
    for _ in range(s.K):
        ids = left.argmax(dim=-1)
        hot = F.one_hot(ids, num_classes=s.E)
        gate = (scores * hot).sum(dim=-1)
        total = gate[..., None] * hot if total is None else total + gate[..., None] * hot
        left = left.masked_fill(hot.bool(), -INF)
    return total


def _scatters_added(logits, s):
    weights, ids = _chosen(logits, s)
    one, other = (torch.zeros_like(weights[..., :1]).expand(*logits.shape[:-1], s.E) for _ in range(2))
    total = one.scatter(-1, ids[..., :1], weights[..., :1])
    if s.K > 1:
        total = total + other.scatter(-1, ids[..., 1:], weights[..., 1:])
    return total / total.sum(-1, keepdim=True)


_LETTERS = {2: "tk,tke->te", 3: "bsk,bske->bse"}

SCORES: dict[str, Callable[[Tensor, Sizes], Tensor]] = {
    form.__name__[1:]: form
    for form in (_scattered, _scattered_in_place, _scatter_added, _softmax_of_the_rest, _sigmoid_of_the_rest,
                 _multiplied, _multiplied_by_one_hot, _multiplied_by_any, _filled, _filled_but, _filled_where_zero,
                 _where, _where_not, _one_hot, _one_hot_einsum, _one_hots_one_by_one, _argmax_after_argmax,
                 _scatters_added)
}  # fmt: skip
# With K of 1.
FIRST: dict[str, Callable[[Tensor, Sizes], Tensor]] = {
    "argmax": lambda logits, s: (lambda scores: scores * F.one_hot(scores.argmax(-1), s.E))(logits.softmax(-1)),
    "max": lambda logits, s: _max(logits, s),
}


def _max(logits: Tensor, s: Sizes) -> Tensor:
    values, ids = logits.softmax(-1).max(dim=-1)
    return F.one_hot(ids, s.E) * values.unsqueeze(-1)


# ---- products. The first takes tokens [..., H], or rows for every expert; "te" is [T, E, .] and "et" [E, T, .]

FIRST_PRODUCTS: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "te": {
        "einsum": lambda x, w: torch.einsum("th,enh->ten", x, w),
        "broadcast": lambda x, w: (x[:, None, None, :] @ w.mT).squeeze(2),
        "column": lambda x, w: (w @ x[:, None, :, None]).squeeze(-1),
    },
    "et": {
        "einsum": lambda x, w: torch.einsum("enh,th->etn", w, x),
        "matmul": lambda x, w: x @ w.transpose(1, 2),
        "unsqueezed": lambda x, w: torch.matmul(x.unsqueeze(0), w.mT),
        "bmm_of_expand": lambda x, w: torch.bmm(x.expand(w.shape[0], -1, -1), w.mT),
        "bmm_of_repeat": lambda x, w: torch.bmm(x.repeat(w.shape[0], 1).view(w.shape[0], -1, x.shape[1]), w.mT),
    },
    "bse": {"einsum": lambda x, w: torch.einsum("bsh,enh->bsen", x, w)},
    "ebs": {"einsum": lambda x, w: torch.einsum("bsh,enh->ebsn", x, w)},
    "bes": {
        "einsum": lambda x, w: torch.einsum("bsh,enh->besn", x, w),
        "matmul": lambda x, w: x.unsqueeze(1) @ w.mT,
    },
}
SECOND_PRODUCTS: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "te": {
        "einsum": lambda a, w: torch.einsum("tei,ehi->teh", a, w),
        "broadcast": lambda a, w: torch.matmul(a.unsqueeze(2), w.mT)[:, :, 0],
        "column": lambda a, w: (w @ a.unsqueeze(-1)).squeeze(3),
    },
    "et": {
        "einsum": lambda a, w: torch.einsum("eti,ehi->eth", a, w),
        "matmul": lambda a, w: a @ w.mT,
        "bmm": lambda a, w: torch.bmm(a, w.transpose(-1, -2)),
    },
    "bse": {"einsum": lambda a, w: torch.einsum("bsei,ehi->bseh", a, w)},
    "ebs": {"einsum": lambda a, w: torch.einsum("ebsi,ehi->ebsh", a, w)},
    "bes": {"matmul": lambda a, w: a @ w.mT},
}
SUMMED: dict[str, str] = {"te": "tei,ehi->th", "et": "eti,ehi->th", "bse": "bsei,ehi->bsh"}
# Rows for every expert, each multiplied by its score.
WEIGHTED: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "te": {
        "einsum": lambda x, scores: torch.einsum("th,te->teh", x, scores),
        "unsqueezed": lambda x, scores: x.unsqueeze(1) * scores.unsqueeze(-1),
        "repeat_interleave": lambda x, scores: (x.repeat_interleave(scores.shape[1], 0) * scores.reshape(-1, 1)).view(
            *scores.shape, x.shape[1]
        ),
    },
    "et": {
        "einsum": lambda x, scores: torch.einsum("te,th->eth", scores, x),
        "unsqueezed": lambda x, scores: x[None] * scores.t()[..., None],
        "repeat": lambda x, scores: (x.repeat(scores.shape[1], 1) * scores.transpose(0, 1).reshape(-1, 1)).view(
            scores.shape[1], *x.shape
        ),
        "gather": lambda x, scores: (x.gather(0, _tokens(x, scores)) * scores.t().reshape(-1, 1)).view(
            scores.shape[1], *x.shape
        ),
    },
}


def _tokens(x: Tensor, scores: Tensor) -> Tensor:
    """The token of every row, one expert after the other."""
    rows = torch.arange(x.shape[0]).view(1, -1).expand(scores.shape[1], -1)
    return rows.reshape(-1, 1).expand(-1, x.shape[1])


# ---- (results, scores) -> sums over the experts

COMBINES: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "te": {
        "einsum": lambda out, scores: torch.einsum("te,teh->th", scores, out),
        "sum": lambda out, scores: (out * scores.unsqueeze(-1)).sum(1),
        "bmm": lambda out, scores: torch.bmm(scores.unsqueeze(1), out).squeeze(1),
        "transposed": lambda out, scores: (out.transpose(0, 1) * scores.t().unsqueeze(-1)).sum(dim=0),
    },
    "et": {
        "einsum": lambda out, scores: torch.einsum("eth,te->th", out, scores),
        "sum": lambda out, scores: (scores.mT.unsqueeze(-1) * out).sum(0),
        "permuted": lambda out, scores: (out.permute(1, 0, 2) * scores[..., None]).sum(-2),
        "bmm": lambda out, scores: (scores.unsqueeze(1) @ out.transpose(0, 1)).squeeze(1),
    },
    "bse": {
        "einsum": lambda out, scores: torch.einsum("bse,bseh->bsh", scores, out),
        "sum": lambda out, scores: (out * scores.unsqueeze(-1)).sum(2),
    },
    "ebs": {
        "einsum": lambda out, scores: torch.einsum("bse,ebsh->bsh", scores, out),
        "sum": lambda out, scores: (out * scores.permute(2, 0, 1).unsqueeze(-1)).sum(0),
    },
    "bes": {"sum": lambda out, scores: (out * scores.transpose(1, 2)[..., None]).sum(1)},
}
INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "te": lambda scores: scores.unsqueeze(-1),
    "et": lambda scores: scores.t().unsqueeze(-1),
    "bse": lambda scores: scores.unsqueeze(-1),
    "ebs": lambda scores: scores.permute(2, 0, 1)[..., None],
    "bes": lambda scores: scores.transpose(-1, -2)[..., None],
}
PICKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gather": lambda out, ids, weights: (
        out.gather(1, ids.unsqueeze(-1).expand(-1, -1, out.shape[-1])) * weights.unsqueeze(-1)
    ).sum(1),
    "index": lambda out, ids, weights: torch.einsum(
        "tk,tkh->th", weights, out[torch.arange(out.shape[0]).unsqueeze(-1), ids]
    ),
    "take_along_dim": lambda out, ids, weights: (
        torch.take_along_dim(out, ids[..., None], dim=1) * weights[..., None]
    ).sum(dim=1),
}
HALVES = ("chunk", "split", "split_sizes", "slices", "narrow", "interleaved", "select", "tensor_split", "up_first",
          "interleaved_up_first")  # fmt: skip
ADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "te": lambda bias: bias, "et": lambda bias: bias.unsqueeze(1), "bse": lambda bias: bias[None, None],
    "ebs": lambda bias: bias[:, None, None], "bes": lambda bias: bias.unsqueeze(1),
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """What a block is made of; a near miss replaces one of them.

    Attributes:
        scores: logits -> scores for all experts.
        first, second: (rows, weight) -> product.
        activation: first product, or [gate, up] -> rows of the second.
        combine: (results, scores) -> sums.
        weigh: (tokens, scores) -> rows of the first product, where the scores come before it.
        inside: scores -> what multiplies the rows of the second product, where they come there.
        pick: (results, ids, weights) -> sums, where results of selected experts are gathered.
        bias: [E, N] -> what is added to a product.
        extra: more results, from what is between the products and from the scores.
    """

    scores: Callable[[Tensor, Sizes], Tensor]
    first: Callable[[Tensor, Tensor], Tensor]
    second: Callable[[Tensor, Tensor], Tensor]
    activation: Callable[[Any], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]
    weigh: Callable[[Tensor, Tensor], Tensor] | None
    inside: Callable[[Tensor], Tensor] | None
    pick: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    bias: Callable[[Tensor], Tensor] | None
    extra: Callable[[Tensor, Tensor], tuple[Any, ...]] = lambda inner, scores: ()


@dataclass(frozen=True)
class Case:
    """One generated program; as in `generator.Case`. ``order``: of the first product's result."""

    seed: int
    sizes: Sizes
    order: str
    batch: int
    dtype: torch.dtype
    dynamic: str
    train: bool
    gated: bool
    apart: bool
    traits: tuple[str, ...]
    parts: Parts
    original: Parts
    mutations: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in vars(self.sizes).items())
        flags = [f"dynamic={self.dynamic}"] + [name for name in ("train", "gated", "apart") if getattr(self, name)]
        changed = f" CHANGED: {', '.join(self.mutations)}" if self.mutations else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"dense seed {self.seed}: {sizes} {kind} {self.order} {' '.join((*self.traits, *flags))}{changed}"


def block(case: Case, parts: Parts) -> Callable[..., Any]:
    """A function of the case's inputs."""
    s = case.sizes

    def projected(rows: Tensor, weight: Tensor, bias: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        out = times(rows, weight)
        return out if parts.bias is None else out + parts.bias(bias)

    def run(x, gate, w1, w2, b1, b2):
        tokens = x.view(case.batch, -1, s.H) if len(case.order) == 3 else x
        logits = F.linear(tokens, gate)
        if parts.pick is not None:
            weights, ids = _chosen(logits, s)
            scores = weights
        else:
            scores = parts.scores(logits, s)
        rows = tokens if parts.weigh is None else parts.weigh(tokens, scores).to(x.dtype)
        if case.apart:
            halves = zip(w1.chunk(2, 1), b1.chunk(2, 1), strict=True)
            h: Any = [projected(rows, weight, bias, parts.first) for weight, bias in halves]
        else:
            h = projected(rows, w1, b1, parts.first)
        a = parts.activation(h)
        if parts.inside is not None:
            a = (a * parts.inside(scores)).to(x.dtype)
        out = projected(a, w2, b2, parts.second)
        if parts.pick is not None:
            y = parts.pick(out, ids, weights.to(out.dtype))
        else:
            y = parts.combine(out, scores.to(out.dtype))
        return y.to(x.dtype), *parts.extra(a, scores)

    return run


def inputs(case: Case) -> tuple[Tensor, ...]:
    """x, gate, w1, w2, b1, b2."""
    weights = {"gated": case.gated, "transposed": False}
    x, gate, _, w1, w2, b1, b2 = generator.inputs(
        generator.Case(case.seed, case.sizes, "", case.dtype, "", False, (), (), None, None, weights)  # type: ignore[arg-type]
    )
    return x, gate, w1, w2, b1, b2


# ---- near misses


Change = Callable[[Parts, Case], Parts | None]


def _of_scores(
    change: Callable[[Tensor, Sizes], Tensor], applies: Callable[[Case], bool] = lambda case: True
) -> Change:
    """Other scores for all experts: ``change(scores, sizes)``."""

    def apply(parts: Parts, case: Case) -> Parts | None:
        if parts.pick is not None or not applies(case):
            return None
        return replace(parts, scores=lambda logits, s: change(parts.scores(logits, s), s))

    return apply


def _scored(make: Callable[[Tensor, Sizes], Tensor], applies: Callable[[Case], bool] = lambda case: True) -> Change:
    """Other scores, from the logits."""
    return lambda parts, case: replace(parts, scores=make) if parts.pick is None and applies(case) else None


def _more_than_k(case: Case) -> bool:
    return case.sizes.E > case.sizes.K


def _square(case: Case) -> bool:
    return case.order in ("te", "et") and case.sizes.T == case.sizes.E


def _combined(change: Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], Tensor], on: Any) -> Change:
    def apply(parts: Parts, case: Case) -> Parts | None:
        if parts.pick is not None or parts.weigh is not None or parts.inside is not None or not on(case):
            return None
        return replace(parts, combine=lambda out, scores: change(parts.combine, out, scores))

    return apply


def _picked(change: Callable[[Any, Tensor, Tensor, Tensor, Sizes], Tensor]) -> Change:
    def apply(parts: Parts, case: Case) -> Parts | None:
        if parts.pick is None:
            return None
        pick = parts.pick
        return replace(parts, pick=lambda out, ids, weights: change(pick, out, ids, weights, case.sizes))

    return apply


def _between(change: Callable[[Tensor, Case], Tensor], on: Callable[[Case], bool] = lambda case: True) -> Change:
    """Something else between the products."""

    def apply(parts: Parts, case: Case) -> Parts | None:
        return replace(parts, activation=lambda h: change(parts.activation(h), case)) if on(case) else None

    return apply


def _by_threshold(logits: Tensor, s: Sizes) -> Tensor:
    rounded = (logits * 2).round()  # with ties
    least = rounded.topk(s.K, dim=-1).values[..., -1:]
    return rounded.masked_fill(rounded < least, -INF).softmax(-1)


def _twice(logits: Tensor, s: Sizes) -> Tensor:
    scores = logits.softmax(-1)
    ids = torch.stack([logits.argmax(-1), logits.abs().argmax(-1)], -1)
    return torch.zeros_like(scores).scatter(-1, ids, scores.gather(-1, ids))


def _only_te(case: Case) -> bool:
    return case.order == "te"


MUTATIONS: dict[str, Change] = {
    "all_experts": _scored(lambda logits, s: logits.softmax(-1), _more_than_k),
    "threshold": _scored(_by_threshold),
    "added_to_all": _scored(lambda logits, s: _one_hots_one_by_one(logits, s) + 0.1 * logits.softmax(-1), _more_than_k),
    "one_added": _scored(lambda logits, s: _one_hots_one_by_one(logits, s) + 0.01),
    "term_not_zero_elsewhere": _scored(
        lambda logits, s: (
            _one_hots_one_by_one(logits, s)
            + torch.full_like(logits, 0.1).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0].exp())
        )
    ),
    "masks_added": _scored(
        lambda logits, s: (
            sum(F.one_hot(logits.topk(s.K)[1][..., k], s.E) for k in range(s.K)) + logits.softmax(-1) * 0.1
        )
    ),
    "added_of_other_tokens": _scored(
        lambda logits, s: _argmax_after_argmax(logits, s) + _argmax_after_argmax(logits, s).roll(1, 0),
        lambda case: case.sizes.T > 1,
    ),
    "ids_twice": _scored(_twice),
    "not_zero_elsewhere": _scored(
        lambda logits, s: torch.full_like(logits, 0.1).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0])
    ),
    "softmax_over_a_low_fill": _scored(
        lambda logits, s: torch.full_like(logits, -2).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0]).softmax(-1)
    ),
    "softmax_over_zeros": _scored(
        lambda logits, s: torch.zeros_like(logits).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0]).softmax(-1)
    ),
    "softmax_over_tokens": _scored(
        lambda logits, s: torch.full_like(logits, -INF).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0]).softmax(0)
    ),
    "sigmoid_of_zeros": _scored(
        lambda logits, s: torch.zeros_like(logits).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0]).sigmoid()
    ),
    "scattered_over_tokens": _scored(
        lambda logits, s: torch.zeros_like(logits).scatter(0, logits.topk(min(s.T, s.K), dim=0)[1], logits.softmax(-1)),
        lambda case: len(case.order) == 2,
    ),
    "topk_over_tokens": _scored(
        lambda logits, s: torch.where(F.one_hot(logits.topk(1, dim=0)[1], s.T).sum(0).bool().mT, logits.sigmoid(), 0.0),
        lambda case: len(case.order) == 2,
    ),
    "smallest": _scored(
        lambda logits, s: torch.zeros_like(logits).scatter(-1, logits.topk(s.K, largest=False)[1], logits.topk(s.K)[0])
    ),
    "one_expert_too_many": _scored(
        lambda logits, s: logits.softmax(-1) * F.one_hot(logits.topk(min(s.K + 1, s.E))[1], s.E).sum(-2)
    ),
    "inverted_mask": _scored(
        lambda logits, s: logits.softmax(-1) * (1 - F.one_hot(logits.topk(s.K)[1], s.E).sum(-2)), _more_than_k
    ),
    "mask_of_other_ids": _scored(
        lambda logits, s: (
            torch.zeros_like(logits).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0])
            * F.one_hot(logits.abs().topk(s.K)[1], s.E).sum(-2)
        )
    ),
    "weights_of_other_ids": _scored(
        lambda logits, s: torch.zeros_like(logits).scatter(-1, logits.topk(s.K)[1], logits.sigmoid()[..., : s.K])
    ),
    "two_scatters": _scored(
        lambda logits, s: (
            torch.zeros_like(logits)
            .scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0])
            .scatter(-1, logits.abs().topk(1)[1], 1.0)
        )
    ),
    "scattered_over_ones": _scored(
        lambda logits, s: torch.ones_like(logits).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0])
    ),
    "scattered_over_scores": _scored(
        lambda logits, s: logits.softmax(-1).scatter(-1, logits.topk(s.K)[1], logits.topk(s.K)[0])
    ),
    "scores_rolled": _of_scores(lambda scores, s: scores.roll(1, -1)),
    "scores_of_other_tokens": _of_scores(lambda scores, s: scores.roll(1, 0)),
    "scores_flipped": _of_scores(lambda scores, s: scores.flip(-1)),
    "scores_plus": _of_scores(lambda scores, s: scores + 0.05),
    "scores_minus": _of_scores(lambda scores, s: scores - scores.mean(-1, keepdim=True)),
    "scores_clamped": _of_scores(lambda scores, s: scores.clamp(min=0.02)),
    "scores_cumulated": _of_scores(lambda scores, s: scores.cumsum(-1)),
    "scores_again_normalised": _of_scores(lambda scores, s: scores.softmax(-1)),
    "scores_squared": _of_scores(lambda scores, s: scores * scores),
    "scores_by_token_sum": _of_scores(lambda scores, s: scores / scores.sum(0, keepdim=True)),
    "scores_to_the_power": _of_scores(lambda scores, s: scores**0.5),
    "scores_as_mask": _of_scores(lambda scores, s: (scores > 0).to(scores.dtype)),
    "scores_overwritten": _of_scores(lambda scores, s: scores.index_fill(-1, torch.tensor([0]), 0.3)),
    "scores_times_token": _of_scores(
        lambda scores, s: scores * torch.linspace(0.5, 1, scores.shape[0]).view(-1, *[1] * (scores.dim() - 1))
    ),
    "scores_times_expert": _of_scores(lambda scores, s: scores * torch.linspace(0.5, 1, s.E)),
    "scores_transposed": _of_scores(lambda scores, s: scores.t().contiguous(), _square),
    "scores_viewed": _of_scores(
        lambda scores, s: scores.t().contiguous().view(scores.shape), lambda case: len(case.order) == 2
    ),
    "summed_over_tokens": _combined(
        lambda combine, out, scores: (out * scores.t().unsqueeze(-1)).sum(1),
        lambda case: _square(case) and case.order == "et",
    ),
    "results_transposed": _combined(lambda combine, out, scores: combine(out.transpose(0, 1), scores), _square),
    "results_viewed": _combined(
        lambda combine, out, scores: combine(out.transpose(0, 1).contiguous().view(out.shape), scores),
        lambda case: len(case.order) == 2,
    ),
    "weighted_twice": _combined(
        lambda combine, out, scores: combine(out * scores.unsqueeze(-1), scores),
        lambda case: case.order in ("te", "bse"),
    ),
    "maximum": _combined(lambda combine, out, scores: (out * scores.unsqueeze(-1)).amax(1), _only_te),
    "mean": _combined(lambda combine, out, scores: (out * scores.unsqueeze(-1)).mean(1), _only_te),
    "first_experts": _combined(lambda combine, out, scores: (out * scores.unsqueeze(-1))[:, :-1].sum(1), _only_te),
    "cumulated": _combined(lambda combine, out, scores: (out * scores.unsqueeze(-1)).cumsum(1)[:, 0], _only_te),
    "without_scores": _combined(lambda combine, out, scores: out.sum(1), _only_te),
    "activated_results": _combined(lambda combine, out, scores: combine(out.tanh(), scores), lambda case: True),
    "picked_by_others": _picked(lambda pick, out, ids, weights, s: pick(out, (ids + 1) % s.E, weights)),
    "picked_twice": _picked(lambda pick, out, ids, weights, s: pick(out, ids[:, :1].expand(-1, s.K), weights)),
    "picked_in_another_order": _picked(lambda pick, out, ids, weights, s: pick(out, ids.flip(-1), weights)),
    "picked_for_other_tokens": _picked(lambda pick, out, ids, weights, s: pick(out.roll(1, 0), ids, weights)),
    "picked_without_weights": _picked(lambda pick, out, ids, weights, s: pick(out, ids, weights * 0 + 1)),
    "inner_rolled": _between(lambda a, case: a.roll(1, 0)),
    "inner_transposed": _between(lambda a, case: a.transpose(0, 1).contiguous(), _square),
    "inner_viewed": _between(
        lambda a, case: a.transpose(0, 1).contiguous().view(a.shape), lambda case: len(case.order) == 2
    ),
    "inner_normed": _between(lambda a, case: F.rms_norm(a, (a.shape[-1],))),
    "inner_plus": _between(lambda a, case: a + 0.1),
    "inner_escapes": lambda parts, case: replace(parts, extra=lambda inner, scores: (inner.float().mean(),)),
    "inner_by_expert": _between(lambda a, case: a * torch.linspace(0.5, 1, case.sizes.E).unsqueeze(-1), _only_te),
    "scores_returned": lambda parts, case: replace(parts, extra=lambda inner, scores: (scores.float().mean(0),)),
    "other_tokens_first": lambda parts, case: replace(parts, first=lambda x, w: parts.first(x.roll(1, 0), w)),
    "tokens_cut": lambda parts, case: (
        replace(parts, first=lambda x, w: parts.first(x * (torch.arange(x.shape[-1]) > 0), w))
    ),
    "experts_reversed": lambda parts, case: replace(parts, second=lambda a, w: parts.second(a, w.flip(0))),
}  # fmt: skip


def make(seed: int, misses: int | None = None) -> Case:
    """The case of ``seed``, with ``misses`` near misses (None: none for a third of the seeds, else one or two)."""
    rng = random.Random(seed)
    sizes = generator._sizes(rng)
    gated = rng.random() < 0.85
    biased, apart = rng.random() < 0.2, gated and rng.random() < 0.25
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    dynamic = rng.choice(("none",) * 14 + ("tokens",) * 5 + ("all",))
    order = rng.choice(("te", "te", "et", "et", "bse", "ebs", "bes"))
    batch = rng.choice([b for b in (1, 2, 3) if sizes.T % b == 0])
    place = rng.choice(("after", "after", "after", "inside", "before", "picked"))
    if biased and place != "picked":
        place = "after"
    if place == "picked":
        order = "te"
    if place == "before":
        order = rng.choice(("te", "et"))

    def pick(forms: dict[str, Any]) -> tuple[str, Any]:
        name = rng.choice(list(forms))
        return name, forms[name]

    score_name, scores = pick(FIRST if sizes.K == 1 and rng.random() < 0.5 else SCORES)
    half, split = pick({name: form for name, form in generator.halves(sizes).items() if name in HALVES})
    act, both = pick(GATED)
    plain_name, plain = pick(PLAIN)
    first_name, first = pick(FIRST_PRODUCTS[order])
    second_name, second = pick(SECOND_PRODUCTS[order])
    combine_name, combine = pick(COMBINES[order])
    weigh_name, weigh = pick(WEIGHTED[order]) if place == "before" else ("", None)
    pick_name, picks = pick(PICKS) if place == "picked" else ("", None)
    if place == "before":
        letters = "teh,enh->ten" if order == "te" else "eth,enh->etn"
        first_name, first = "einsum", lambda rows, w: torch.einsum(letters, rows, w)
    if place in ("before", "inside"):
        at = {"te": 1, "et": 0, "bse": 2, "ebs": 0, "bes": 1}[order]
        summed = order in SUMMED and rng.random() < 0.5
        if summed:
            second_name, second = "summed", lambda a, w: torch.einsum(SUMMED[order], a, w)
        combine_name, combine = "", lambda out, scores: out if summed else out.sum(at)

    def activated(h: Any) -> Tensor:
        if not gated:
            return plain(h)
        return both(*(h if isinstance(h, list) else split(h)))

    parts = Parts(
        scores, first, second, activated, combine, weigh, INSIDE[order] if place == "inside" else None, picks,
        ADDED[order] if biased else None,
    )  # fmt: skip
    traits = ("" if place == "picked" else score_name, *((act, "" if apart else half) if gated else (plain_name,)),
              first_name, second_name, place, weigh_name, pick_name or combine_name,
              "biased" if biased else "")  # fmt: skip
    train = dtype == torch.float32 and rng.random() < 0.3
    case = Case(
        seed, sizes, order, batch, dtype, dynamic, train, gated, apart, tuple(filter(None, traits)), parts, parts
    )
    if misses is None:
        misses = rng.choice((0, 1, 1, 1, 2, 2))
    names: list[str] = []
    for _ in range(40 * misses):
        name = rng.choice(list(MUTATIONS))
        changed = MUTATIONS[name](case.parts, case)
        if changed is not None and len(names) < misses:
            case = replace(case, parts=changed)
            names.append(name)
    return replace(case, mutations=tuple(names))


def with_mutation(name: str) -> Case:
    """The first block in fp32 that the near miss ``name`` applies to, and that it gives another result."""
    blocks = (case for seed in range(400) if (case := make(seed, misses=0)).dtype == torch.float32)
    changed = ((case, MUTATIONS[name](case.parts, case)) for case in blocks)
    cases = (replace(case, parts=parts, mutations=(name,)) for case, parts in changed if parts is not None)
    programs = lambda case: (block(case, case.parts), block(case, case.original))  # noqa: E731
    return generator.first_that_changes(name, cases, programs, inputs)


def run(case: Case) -> Outcome | None:
    """What compiling the case comes to; None when eager torch itself raises."""
    return generator.outcome_of(case, block(case, case.parts), inputs(case))
