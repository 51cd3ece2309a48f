"""One MoE block over rows that are sorted by expert, and ways to write each of its steps, near misses among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

T, E, K, H, I = 12, 8, 2, 32, 16
SIZES = Sizes(T, E, K, H, I)


def _product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.mT, offs=offsets)


def _silu_glu(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    gate, up = _product(rows, weight, offsets).chunk(2, -1)
    return F.silu(gate) * up


def _two_products(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    w1, w3 = weight.chunk(2, dim=1)
    return F.silu(_product(rows, w1, offsets)) * _product(rows, w3, offsets)


def _split_by(split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def activated(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        gate, up = split(_product(rows, weight, offsets))
        return F.silu(gate) * up

    return activated


@dataclass(frozen=True)
class Steps:
    """How a sorted block is written.

    Attributes:
        sort: flat ids -> (ids in order, permutation).
        counts: (flat ids, ids in order) -> rows per expert.
        offsets: (rows per expert) -> where each expert's rows end.
        ends: (rows per expert, flat ids, permutation) -> the same, in place of ``offsets``.
        tokens: permutation -> token of every row.
        rows: (hidden states, token of every row) -> rows.
        before: (rows, weights, permutation) -> rows that the experts take.
        activated: (rows, first weight, where each expert's rows end) -> rows of the second product.
        weigh: (rows, weights, permutation) -> weighted rows.
        undo: (rows, permutation) -> rows in token order.
        total: rows in token order -> their sum for every token.
        finish: (rows in token order, weights) -> the same, in place of ``weigh`` and ``total``.
        add: (zeros, token of every row, weighted rows) -> the same, in place of ``undo`` and ``total``.
    """

    sort: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.sort
    counts: Callable[[Tensor, Tensor], Tensor] = lambda flat, ordered: torch.histc(ordered.float(), E, 0, E - 1)
    offsets: Callable[[Tensor], Tensor] = lambda counts: counts.cumsum(0, dtype=torch.int32)
    ends: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    tokens: Callable[[Tensor], Tensor] = lambda perm: perm // K
    rows: Callable[[Tensor, Tensor], Tensor] = lambda x, index: x[index]
    before: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda rows, weights, perm: rows
    activated: Callable[[Tensor, Tensor, Tensor], Tensor] = _silu_glu
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda out, weights, perm: (
        out * weights.reshape(-1)[perm].unsqueeze(-1)
    )
    undo: Callable[[Tensor, Tensor], Tensor] = lambda out, perm: out[perm.argsort()]
    total: Callable[[Tensor], Tensor] = lambda out: out.view(-1, K, H).sum(1)
    finish: Callable[[Tensor, Tensor], Tensor] | None = None
    add: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        """The experts' weighted results [T, H] for tokens [T, H], with ids and weights [T, K].

        Args:
            counts: rows per expert, where the caller has counted them.
        """
        flat = ids.reshape(-1)
        ordered, perm = self.sort(flat)
        counts = self.counts(flat, ordered) if counts is None else counts
        offsets = self.offsets(counts) if self.ends is None else self.ends(counts, flat, perm)
        rows = self.before(self.rows(x, self.tokens(perm)), weights, perm)
        out = _product(self.activated(rows, w1, offsets), w2, offsets)
        if self.finish is not None:
            return self.finish(self.undo(out, perm), weights).to(x.dtype)
        out = self.weigh(out, weights, perm)
        if self.add is not None:
            return self.add(torch.zeros_like(x), self.tokens(perm), out.to(x.dtype))
        return self.total(self.undo(out, perm)).to(x.dtype)


class SortedMoE(nn.Module):
    """A block whose router is softmax, topk, renormalised, and whose experts are written as ``steps`` say."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False, dtype=torch.bfloat16)
        self.gate_up_proj = nn.Parameter((torch.randn(E, 2 * I, H) * 0.2).bfloat16())
        self.down_proj = nn.Parameter((torch.randn(E, H, I) * 0.2).bfloat16())
        self.steps = steps

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(x).float().softmax(-1).topk(K)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, H)
        weights, ids = self.route(x)
        return self.steps(x, ids, weights, self.gate_up_proj, self.down_proj).view(hidden_states.shape)


class CountedMoE(SortedMoE):
    """Its forward counts with `bincount`.

    Args:
        balanced: the counts also feed the buffer of a load balancer.
    """

    def __init__(self, *, balanced: bool = False) -> None:
        super().__init__(Steps())
        self.load = nn.Buffer(torch.zeros(E)) if balanced else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, H)
        weights, ids = self.route(x)
        counts = torch.bincount(ids.flatten(), minlength=E)
        if self.load is not None:
            with torch.no_grad():
                self.load.add_(counts)
        return self.steps(x, ids, weights, self.gate_up_proj, self.down_proj, counts).view(hidden_states.shape)


def table_of_choices(flat: Tensor, value: bool | int = True, dtype: torch.dtype = torch.bool) -> Tensor:
    """[T, E]: what every token chose."""
    return torch.zeros(flat.shape[0] // K, E, dtype=dtype).scatter(1, flat.view(-1, K), value)


def put_back(blank: Tensor, perm: Tensor, out: Tensor) -> Tensor:
    """Rows in token order, by an item assignment."""
    blank[perm] = out
    return blank


def _added_in_place(zeros: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    zeros.index_add_(0, index, rows)
    return zeros


def _put_for_each_slot(zeros: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    zeros[index] = zeros[index] + rows
    return zeros


#: The same block with one step written otherwise.
SPELLINGS: dict[str, Steps] = {"as it is": Steps()}
SPELLINGS |= {
    f"sort: {name}": Steps(sort=lambda flat, sort=sort: (flat[sort(flat)], sort(flat)))  # type: ignore[misc]
    for name, sort in SORTS.items()
}
SPELLINGS |= {
    "sort: stable, both results": Steps(sort=lambda flat: torch.sort(flat, stable=True)),
    "sort: of int32": Steps(sort=lambda flat: flat.to(torch.int32).sort(0)),
}
SPELLINGS |= {
    f"counts: {name}": Steps(counts=lambda flat, ordered, count=count: count(flat))  # type: ignore[misc]
    for name, count in counters(SIZES).items()
}
SPELLINGS |= {
    "counts: bincount": Steps(counts=lambda flat, ordered: torch.bincount(flat, minlength=E)),
    "counts: a table of choices": Steps(counts=lambda flat, ordered: table_of_choices(flat).sum(0)),
    "counts: a table of numbers": Steps(
        counts=lambda flat, ordered: table_of_choices(flat, 1, torch.long).sum((0,)).to(torch.int32)
    ),
}
SPELLINGS |= {f"offsets: {name}": Steps(ends=search) for name, search in searches(SIZES).items()}
SPELLINGS |= {
    "offsets: cast after the sum": Steps(offsets=lambda counts: counts.cumsum(0).to(torch.int32)),
    "offsets: summed in integers": Steps(offsets=lambda counts: counts.to(torch.int32).cumsum(-1, dtype=torch.int32)),
}
SPELLINGS |= {f"tokens: {name}": Steps(tokens=tokens) for name, tokens in tokens_of_rows(SIZES).items()}
SPELLINGS |= {
    "tokens: floor_divide": Steps(tokens=lambda perm: perm.floor_divide(K)),
    "tokens: of int32": Steps(tokens=lambda perm: perm.to(torch.int32) // K),
}
SPELLINGS |= {f"rows: {name}": Steps(rows=gather) for name, gather in GATHERS.items()}
SPELLINGS |= {
    "rows: repeat_interleave[perm]": Steps(
        tokens=lambda perm: perm, rows=lambda x, perm: x.repeat_interleave(K, dim=0)[perm]
    ),
    "rows: expand[perm]": Steps(
        tokens=lambda perm: perm, rows=lambda x, perm: x[:, None].expand(-1, K, -1).reshape(-1, H)[perm]
    ),
    "rows: repeat[perm]": Steps(
        tokens=lambda perm: perm, rows=lambda x, perm: x.unsqueeze(1).repeat(1, K, 1).view(-1, H)[perm]
    ),
}
SPELLINGS |= {f"halves: {name}": Steps(activated=_split_by(split)) for name, split in halves(SIZES).items()}
SPELLINGS |= {"halves: two products, w1 and w3": Steps(activated=_two_products)}
SPELLINGS |= {
    f"inverse: {name}": Steps(undo=lambda out, perm, inverse=inverse: out[inverse(perm)])  # type: ignore[misc]
    for name, inverse in INVERSES.items()
}
SPELLINGS |= {
    "inverse: index_put": Steps(
        undo=lambda out, perm: out[torch.empty_like(perm).index_put((perm,), torch.arange(perm.numel()))]
    ),
    "inverse: scatter, not in place": Steps(
        undo=lambda out, perm: out[torch.empty_like(perm).scatter(0, perm, torch.arange(perm.numel()))]
    ),
    "inverse: sort": Steps(undo=lambda out, perm: out[torch.sort(perm)[1]]),
}
SPELLINGS |= {f"put back: {name}": Steps(undo=put) for name, put in PUTS.items()}
SPELLINGS |= {
    "put back: item assignment": Steps(undo=lambda out, perm: put_back(torch.empty_like(out), perm, out)),
    "put back: into zeros": Steps(undo=lambda out, perm: torch.zeros_like(out).index_put((perm,), out)),
    "put back: asking for shapes": Steps(undo=lambda out, perm: out[perm.argsort()].view(out.shape[0], -1)),
}
SPELLINGS |= {f"add: {name}": Steps(add=add) for name, add in ADDS.items()}
SPELLINGS |= {"add: index_add_, then the name": Steps(add=_added_in_place)}
SPELLINGS |= {f"sum: {name}": Steps(finish=finish) for name, finish in finishes(SIZES).items()}
SPELLINGS |= {
    "sum: by keyword": Steps(total=lambda out: out.view(-1, K, H).sum(dim=-2)),
    "sum: a list of dimensions": Steps(total=lambda out: out.view(-1, H).unflatten(0, (-1, K)).sum((1,))),
}
SPELLINGS |= {
    "weights: a column first": Steps(
        weigh=lambda out, weights, perm: out * weights.reshape(-1, 1).view(-1)[perm].view(-1, 1)
    ),
    "weights: the left factor": Steps(weigh=lambda out, weights, perm: weights.reshape(-1)[perm].unsqueeze(-1) * out),
    "weights: by token and slot": Steps(
        weigh=lambda out, weights, perm: out * weights[perm // K, perm % K].unsqueeze(-1)
    ),
    "weights: before the experts": Steps(
        before=lambda rows, weights, perm: (rows * weights.reshape(-1)[perm].unsqueeze(-1)).to(rows.dtype),
        weigh=lambda out, weights, perm: out,
    ),
}

#: The same block with one step that computes something else, or something that nobody can prove to be the same.
NEAR_MISSES: dict[str, Steps] = {
    "sort: descending": Steps(sort=lambda flat: flat.sort(descending=True)),
    "sort: of other ids": Steps(sort=lambda flat: flat.flip(0).sort()),
    "counts: one bin too many": Steps(counts=lambda flat, ordered: torch.histc(ordered.float(), E, 0, E + 1)),
    "counts: of clamped ids": Steps(
        counts=lambda flat, ordered: torch.histc(flat.clamp(max=E - 2).float(), E, 0, E - 1)
    ),
    "counts: of half the tokens": Steps(counts=lambda flat, ordered: table_of_choices(flat)[: T // 2].sum(0)),
    "counts: weighted": Steps(counts=lambda flat, ordered: torch.zeros(E).index_add(0, flat, ordered + 1.0)),
    "offsets: where experts begin": Steps(offsets=lambda counts: (counts.cumsum(0) - counts).to(torch.int32)),
    "tokens: by remainder": Steps(tokens=lambda perm: perm % T),
    "tokens: by another top_k": Steps(tokens=lambda perm: perm // (K + 1)),
    "halves: silu of both": Steps(activated=_split_by(lambda h: (h.chunk(2, -1)[0], F.silu(h.chunk(2, -1)[1])))),
    "halves: that overlap": Steps(activated=_split_by(lambda h: (h[..., :I], h[..., I - 1 : -1]))),
    "weights: of the inverse": Steps(
        weigh=lambda out, weights, perm: out * weights.reshape(-1)[perm.argsort()].unsqueeze(-1)
    ),
    "weights: not in the order of the rows": Steps(weigh=lambda out, weights, perm: out * weights.reshape(-1, 1)),
    "weights: before and after": Steps(
        before=lambda rows, weights, perm: (rows * weights.reshape(-1)[perm].unsqueeze(-1)).to(rows.dtype)
    ),
    "inverse: the permutation itself": Steps(undo=lambda out, perm: out[perm]),
    "put back: added to ones": Steps(
        undo=lambda out, perm: torch.ones_like(out).index_put((perm,), out, accumulate=True)
    ),
    "add: in place of a sum": Steps(add=_put_for_each_slot),
    "sum: the mean": Steps(total=lambda out: out.view(-1, K, H).mean(1)),
    "sum: over tokens": Steps(total=lambda out: out.view(K, -1, H).sum(0)),
}
