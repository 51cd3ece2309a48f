"""A seeded generator of MoE blocks that run one expert after the other over stacked weights, and of near misses.

A block is a choice of router, of a way to take the weights of one expert, of a product, of the rows an expert gets, and
of a way to collect results. A near miss changes one of them, often for one expert alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.parts import Sizes
from tests.passes import generator
from tests.passes.blocks import FEW
from tests.passes.compare import Outcome
from tests.passes.generator import GATED, PLAIN

# ---- the weights of one expert, and products with them

SLICES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "index": lambda w: [w[e] for e in range(w.shape[0])],
    "select": lambda w: [w.select(0, e) for e in range(w.shape[0])],
    "unbind": lambda w: list(w.unbind(0)),
    "iteration": lambda w: list(w),
    "index_all": lambda w: [w[e, ...] for e in range(w.shape[0])],
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "matmul": lambda x, w, b: x @ w.t() if b is None else x @ w.T + b,
    "matmul_transposed": lambda x, w, b: torch.matmul(x, w.transpose(0, 1)) if b is None else b + torch.matmul(x, w.mT),
    "linear_and_add": lambda x, w, b: F.linear(x, w) if b is None else F.linear(x, w) + b,
}

# ---- all tokens: (ids, weights, E) -> what multiplies the results of each expert


def _dense(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    return torch.zeros(*ids.shape[:-1], experts, dtype=weights.dtype).scatter(-1, ids, weights)


FACTORS: dict[str, Callable[[Tensor, Tensor, int], list[Tensor]]] = {
    "sum_of_equal": lambda ids, w, n: [(w * (ids == e)).sum(-1, keepdim=True) for e in range(n)],
    "sum_of_equal_reversed": lambda ids, w, n: [((ids == e).to(w.dtype) * w).sum(-1).unsqueeze(-1) for e in range(n)],
    "sum_of_where": lambda ids, w, n: [torch.where(ids == e, w, 0.0).sum(dim=-1, keepdim=True) for e in range(n)],
    "sum_of_one_hot": lambda ids, w, n: ([(w * hot).sum(-1, keepdim=True) for hot in F.one_hot(ids, n).unbind(-1)]),
    "column": lambda ids, w, n: [_dense(ids, w, n)[..., e, None] for e in range(n)],
    "column_slice": lambda ids, w, n: (lambda scores: [scores[..., e : e + 1] for e in range(n)])(_dense(ids, w, n)),
    "column_select": lambda ids, w, n: (lambda scores: [scores.select(-1, e).unsqueeze(-1) for e in range(n)])(
        _dense(ids, w, n)
    ),
    "column_unbind": lambda ids, w, n: [score.unsqueeze(-1) for score in _dense(ids, w, n).unbind(-1)],
    "column_split": lambda ids, w, n: list(_dense(ids, w, n).split(1, dim=-1)),
}

# ---- rows: (ids, e, E) -> (token, slot)

PAIRS: dict[str, Callable[[Tensor, int, int], tuple[Tensor, Tensor]]] = {
    "where": lambda ids, e, n: torch.where(ids == e),
    "nonzero": lambda ids, e, n: (ids == e).nonzero(as_tuple=True),
    "where_one_hot": lambda ids, e, n: torch.where(F.one_hot(ids, n)[:, :, e]),
    "mixtral": lambda ids, e, n: torch.where(F.one_hot(ids, num_classes=n).permute(2, 1, 0)[e])[::-1],
    "tokens_first": lambda ids, e, n: torch.where(F.one_hot(ids, n).permute(2, 0, 1)[e]),
    "columns": lambda ids, e, n: torch.nonzero(ids == e).unbind(1),
    "rows": lambda ids, e, n: tuple((ids == e).nonzero().t()),
}
TAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, token: x[token],
    "index_none": lambda x, token: x[None, token].reshape(-1, x.shape[-1]),
    "index_select": lambda x, token: x.index_select(0, token),
}
WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_none": lambda w, token, slot: w[token, slot, None],
    "unsqueeze": lambda w, token, slot: w[token, slot].unsqueeze(-1),
    "view": lambda w, token, slot: w[token, slot].view(-1, 1),
}


def _set(out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    out[token] += rows
    return out


def _assign(out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    out[token] = out[token] + rows
    return out


ADDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda out, token, rows: out.index_add(0, token, rows),
    "index_add_": lambda out, token, rows: out.index_add_(0, token, rows),
    "set": _set,
    "assign": _assign,
    "scatter_add": lambda out, token, rows: out.scatter_add(0, token.unsqueeze(-1).expand(-1, rows.shape[1]), rows),
    "accumulated": lambda out, token, rows: out.index_put((token,), rows, accumulate=True),
}
STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "more": lambda x: x * 0.5,
}
PICKS: dict[str, Callable[[list[Tensor], Tensor, Tensor], Tensor]] = {
    "gather": lambda outs, ids, w: (
        torch.stack(outs, dim=1).gather(1, ids.unsqueeze(-1).expand(-1, -1, outs[0].shape[-1])) * w[..., None]
    ).sum(1),
    "index": lambda outs, ids, w: (
        torch.stack(outs, 1)[torch.arange(ids.shape[0])[:, None], ids] * w.unsqueeze(-1)
    ).sum(dim=1),
    "einsum": lambda outs, ids, w: torch.einsum("te,teh->th", _dense(ids, w, len(outs)), torch.stack(outs, 1)),
    "sum": lambda outs, ids, w: (torch.stack(outs) * _dense(ids, w, len(outs)).t().unsqueeze(-1)).sum(0),
    "bmm": lambda outs, ids, w: (_dense(ids, w, len(outs)).unsqueeze(1) @ torch.stack(outs, dim=-2)).squeeze(1),
    "last_sum": lambda outs, ids, w: (torch.stack(outs, dim=-1) * _dense(ids, w, len(outs))[:, None]).sum(-1),
    "last_expanded": lambda outs, ids, w: torch.sum(
        (last := torch.stack(outs, dim=2)) * _dense(ids, w, len(outs)).unsqueeze(1).expand_as(last), dim=2
    ),
    "last_matmul": lambda outs, ids, w: (torch.stack(outs, -1) @ _dense(ids, w, len(outs)).unsqueeze(-1)).squeeze(-1),
    "last_einsum": lambda outs, ids, w: torch.einsum("the,te->th", torch.stack(outs, -1), _dense(ids, w, len(outs))),
    "last_turned": lambda outs, ids, w: torch.einsum(
        "te,teh->th", _dense(ids, w, len(outs)), torch.stack(outs, -1).transpose(1, 2)
    ),
}
# One expert for each token: (out, mask [T], rows for all tokens or those of the mask, weights [T]) -> out.


def _put_where(out: Tensor, mask: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.where(mask.unsqueeze(-1), expert(x), out)


def _add_where(out: Tensor, mask: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return out + torch.where(mask[:, None], expert(x), 0.0)


def _put_at(out: Tensor, mask: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (mine,) = torch.where(mask)
    out[mine] = expert(x[mine])
    return out


def _copy_at(out: Tensor, mask: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    mine = mask.nonzero().squeeze(-1)
    return out.index_copy(0, mine, expert(x[mine]))


def _put_by_mask(out: Tensor, mask: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out[mask] = expert(x[mask])
    return out


def _scatter_at(out: Tensor, mask: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (mine,) = torch.where(mask)
    return out.scatter(0, mine[:, None].expand(-1, out.shape[-1]), expert(x[mine]))


SINGLES = {"where": _put_where, "add_where": _add_where, "put": _put_at, "copy": _copy_at, "mask": _put_by_mask,
           "scatter": _scatter_at}  # fmt: skip


def _slot_factors(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    return out + (weights[:, k] * (ids[:, k] == e)).unsqueeze(-1) * expert(x)


def _slot_where(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    return out + torch.where(ids[:, k : k + 1] == e, weights[:, k : k + 1] * expert(x), 0.0)


def _slot_rows(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    (token,) = torch.where(ids.select(1, k) == e)
    return out.index_add_(0, token, expert(x[token]) * weights[token, k, None])


def _slot_masks(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    mine = ids.unbind(-1)[k] == e
    out[mine] += weights[..., k][mine].unsqueeze(-1) * expert(x[mine])
    return out


def _slot_entries(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    mine = ids[..., k] == e
    out[mine] = out[mine] + weights[mine, k, None] * expert(x[mine])
    return out


def _slot_filled(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    return out + (weights[:, k, None] * expert(x)).masked_fill((ids[:, k] != e)[:, None], 0.0)


def _slot_zeros(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    return out + torch.where(ids[:, k, None] == e, weights[..., k, None] * expert(x), torch.zeros_like(x))


def _slot_others(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, e: int, k: int, expert: Any) -> Tensor:
    return out + weights[:, None, k] * torch.where(~(ids[:, k] == e).unsqueeze(1), 0.0, expert(x))


# Rows of all pairs: (out [T * K, H], mask of some, experts of rows, x, K) -> out.


def _pairs_by_mask(out: Tensor, mine: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor, k: int) -> Tensor:
    out[mine] = expert(x.repeat_interleave(k, dim=0)[mine])
    return out


def _pairs_by_place(out: Tensor, mine: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor, k: int) -> Tensor:
    (place,) = torch.where(mine)
    out[place] = expert(x[place // k])
    return out


def _pairs_copied(out: Tensor, mine: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor, k: int) -> Tensor:
    place = mine.nonzero().squeeze(-1)
    return out.index_copy(0, place, expert(x.repeat_interleave(k, dim=0)[place]))


def _pairs_scattered(out: Tensor, mine: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor, k: int) -> Tensor:
    place = mine.nonzero(as_tuple=True)[0]
    return out.scatter(0, place[:, None].expand(-1, out.shape[1]), expert(x[place // k]))


def _pairs_added(out: Tensor, mine: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor, k: int) -> Tensor:
    (place,) = torch.where(mine)
    return out.index_add_(0, place, expert(x[place // k]))


def _pairs_by_slot(out: Tensor, mine: Tensor, expert: Callable[[Tensor], Tensor], x: Tensor, k: int) -> Tensor:
    token, slot = torch.where(mine)
    out[token, slot] = expert(x[token])
    return out


PUTS = {"mask": _pairs_by_mask, "place": _pairs_by_place, "copied": _pairs_copied, "scattered": _pairs_scattered,
        "added": _pairs_added, "slot": _pairs_by_slot}  # fmt: skip
SLOTS = {"factors": _slot_factors, "where": _slot_where, "filled": _slot_filled, "zeros": _slot_zeros,
         "others": _slot_others, "rows": _slot_rows, "masks": _slot_masks, "entries": _slot_entries}  # fmt: skip
WAYS = ("factors", "factors", "rows", "rows", "rows", "stacked", "masked", "pairs", "pairs", "single", "slots", "slots")


@dataclass(frozen=True)
class Case:
    """One generated program; ``change`` is what a near miss does: a place in the block and a function of what is there.

    Attributes:
        way: "factors" (all tokens, times a factor), "rows" (those of an expert's pairs), "stacked" (picked from the
            results of all), "masked" (tokens by a mask), "pairs" (rows of pairs put back), "single" (one expert for
            each token, weighted after all of them), "slots" (a step for every expert and slot).
    """

    seed: int
    sizes: Sizes
    way: str
    batch: int
    dtype: torch.dtype
    dynamic: str
    train: bool
    gated: bool
    biased: bool
    apart: bool
    names: dict[str, str]
    mutations: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in vars(self.sizes).items())
        flags = [name for name in ("train", "gated", "biased", "apart") if getattr(self, name)]
        changed = f" CHANGED: {', '.join(self.mutations)}" if self.mutations else ""
        kind = str(self.dtype).removeprefix("torch.")
        spelled = " ".join(f"{part}={name}" for part, name in self.names.items())
        return (f"unrolled seed {self.seed}: {sizes} {kind} {self.way} batch={self.batch} dynamic={self.dynamic} "
                f"{spelled} {' '.join(flags)}{changed}")  # fmt: skip


def block(case: Case, mutations: tuple[str, ...]) -> Callable[..., Any]:
    """A function of the case's inputs."""
    s, names = case.sizes, case.names
    last = s.E - 1

    def at(place: str, value: Any, e: int = -1) -> Any:
        """``value`` as the near misses have it at ``place``, of expert ``e``."""
        for name in mutations:
            where, change = MUTATIONS[name]
            if where == place:
                value = change(value, e, s)
        return value

    def run(x, gate, bias, w1, w2, b1, b2):
        of_sequences = case.way == "factors" or names.get("slot") in ("masks", "entries")
        x = x.view(case.batch, -1, s.H) if of_sequences and case.batch > 1 else x
        weights, ids = generator.routers(s)[names["router"]](F.linear(x, gate), bias)
        weights, ids = at("weights", weights.to(x.dtype)), at("ids", ids)
        take, product = SLICES[names["slices"]], PRODUCTS[names["product"]]
        halves = [(w, b) for w, b in zip(w1.chunk(2, 1), b1.chunk(2, 1), strict=True)] if case.apart else [(w1, b1)]
        firsts = [list(zip(take(w), take(b), strict=True)) for w, b in halves]
        seconds = at("seconds", list(zip(take(w2), take(b2), strict=True)))
        extra = []

        def expert(e: int, rows: Tensor) -> Tensor:
            parts = [product(rows, w, b if case.biased else None) for w, b in (first[e] for first in firsts)]
            if not case.gated:
                a = PLAIN[names["activation"]](parts[0])
            else:
                gate_up = parts if case.apart else generator.halves(s)[names["halves"]](parts[0])
                a = GATED[names["activation"]](*gate_up)
            a = at("inner", a, e)
            if "inner_escapes" in mutations and e == 0:
                extra.append(a.float().sum())
            w, b = seconds[e]
            return at("result", product(a, w, b if case.biased else None), e)

        experts = at("experts", list(range(s.E)))
        start = STARTS[names["start"]](x)
        if case.way == "factors":
            factors = at("factors", FACTORS[names["factors"]](ids, weights, s.E))
            out = start
            for e in experts:
                row = at("row", factors[e] * expert(e, at("tokens", x, e)), e)
                out = out + row if names["sum"] == "add" else out.add_(row) if names["sum"] == "add_" else row + out
        elif case.way == "stacked":
            outs = [expert(e, at("tokens", x, e)) for e in experts]
            out = PICKS[names["pick"]](at("outs", outs), ids, weights)
        elif case.way == "rows":
            out = start
            for e in experts:
                token, slot = at("pairs", PAIRS[names["pairs"]](ids, at("number", e, e), s.E), e)
                rows = expert(e, at("tokens", TAKES[names["take"]](x, token), e))
                rows = rows * at("row_weights", WEIGHTS[names["weights"]](weights, token, slot), e)
                out = ADDS[names["add"]](out, at("target", token, e), at("row", rows, e))
        elif case.way == "masked":
            out = start
            for e in experts:
                mask = at("mask", (ids == at("number", e, e)).any(dim=-1), e)
                if names["score"] == "sum":
                    score = (weights * (ids == e)).sum(-1)[mask].unsqueeze(-1)
                else:
                    score = _dense(ids, weights, s.E)[mask, e].unsqueeze(1)
                out[mask] += at("row", expert(e, at("tokens", x[mask], e)) * score, e)
        elif case.way == "slots":
            out, slots = start, range(s.K)
            steps = [(e, k) for k in slots for e in experts] if names["outer"] == "slots" else [
                (e, k) for e in experts for k in slots]  # fmt: skip
            for e, k in at("steps", steps):
                run_one = lambda rows, e=e: at("row", expert(e, at("tokens", rows, e)), e)  # noqa: E731
                out = SLOTS[names["slot"]](out, x, ids, weights, at("number", e, e), k, run_one)
        elif case.way == "single":
            out = torch.zeros_like(x) if names["single"] == "add_where" else start
            for e in experts:
                mask = at("mask", ids[:, 0] == at("number", e, e), e)
                out = SINGLES[names["single"]](
                    out, mask, lambda rows, e=e: at("row", expert(e, at("tokens", rows, e)), e), x
                )
            out = out * weights
        else:
            by_slot, empty = names["put"] == "slot", names["start"] == "new_zeros" and names["put"] != "added"
            numbers = ids if by_slot else ids.view(-1)
            outs = (torch.empty if empty else torch.zeros)(*numbers.shape, s.H, dtype=x.dtype)
            for e in experts:
                mask = at("mask", numbers == at("number", e, e), e)
                outs = PUTS[names["put"]](
                    outs, mask, lambda rows, e=e: at("row", expert(e, at("tokens", rows, e)), e), x, s.K
                )
            out = (outs.view(-1, s.K, s.H) * weights.unsqueeze(-1)).sum(1)
        if "scores_returned" in mutations:
            extra.append(weights.float().mean(0))
        if last > 0 and "result_again" in mutations:
            extra.append(expert(last, x.reshape(-1, s.H)).float().mean())
        return at("out", out).to(x.dtype), *extra

    return run


def inputs(case: Case) -> tuple[Tensor, ...]:
    """x, gate, bias, w1, w2, b1, b2."""
    weights = {"gated": case.gated, "transposed": False}
    given = generator.Case(case.seed, case.sizes, "", case.dtype, "", False, (), (), None, None, weights)  # type: ignore[arg-type]
    return generator.inputs(given)


# ---- near misses: a place in the block, and what is there instead


def _one(change: Callable[[Tensor], Any]) -> Callable[[Any, int, Sizes], Any]:
    """For expert 0 alone."""
    return lambda value, e, s: change(value) if e == 0 else value


def _all(change: Callable[[Any], Any]) -> Callable[[Any, int, Sizes], Any]:
    return lambda value, e, s: change(value)


MUTATIONS: dict[str, tuple[str, Callable[[Any, int, Sizes], Any]]] = {
    "one_expert_left_out": ("experts", _all(lambda experts: experts[1:])),
    "last_expert_left_out": ("experts", _all(lambda experts: experts[:-1])),
    "one_expert_twice": ("experts", _all(lambda experts: [*experts, experts[0]])),
    "experts_reversed": ("experts", _all(lambda experts: experts[::-1])),
    "second_weights_rolled": ("seconds", _all(lambda seconds: seconds[1:] + seconds[:1])),
    "second_weights_of_one": ("seconds", _all(lambda seconds: seconds[:1] * len(seconds))),
    "another_activation_in_one": ("inner", _one(lambda a: a.tanh())),
    "scaled_in_one": ("inner", _one(lambda a: a * 0.5)),
    "inner_normed": ("inner", _all(lambda a: F.rms_norm(a, (a.shape[-1],)))),
    "inner_escapes": ("nowhere", _all(lambda a: a)),
    "result_scaled_in_one": ("result", _one(lambda out: out * 2)),
    "result_shifted": ("result", _all(lambda out: out + 0.1)),
    "result_clamped": ("result", _all(lambda out: out.clamp(-0.1, 0.1))),
    "result_rolled": ("result", _one(lambda out: out.roll(1, 0))),
    "result_again": ("nowhere", _all(lambda out: out)),
    "row_weighted_twice_in_one": ("row", _one(lambda row: row * 0.3)),
    "row_negated": ("row", _one(lambda row: -row)),
    "tokens_rolled_in_one": ("tokens", _one(lambda x: x.roll(1, 0))),
    "tokens_scaled": ("tokens", _all(lambda x: x * 0.5)),
    "tokens_scaled_in_one": ("tokens", _one(lambda x: x * 0.5)),
    "tokens_flipped": ("tokens", _all(lambda x: x.flip(-1))),
    "factors_rolled": ("factors", _all(lambda factors: factors[1:] + factors[:1])),
    "factor_of_one_again": ("factors", _all(lambda factors: factors[:1] * len(factors))),
    "factor_constant_in_one": ("factors", _all(lambda factors: [torch.ones_like(factors[0]), *factors[1:]])),
    "factors_plus": ("factors", _all(lambda factors: [factor + 0.1 for factor in factors])),
    "factors_of_other_tokens": ("factors", _all(lambda factors: [factor.roll(1, 0) for factor in factors])),
    "another_number": ("number", lambda e, _, s: (e + 1) % s.E),
    "another_number_in_one": ("number", lambda e, _, s: 1 % s.E if e == 0 else e),
    "pairs_swapped": ("pairs", _all(lambda pairs: (pairs[1], pairs[0]))),
    "pairs_swapped_in_one": ("pairs", _one(lambda pairs: (pairs[1], pairs[0]))),
    "first_slot_always": ("pairs", _all(lambda pairs: (pairs[0], pairs[1] * 0))),
    "weights_of_other_pairs": ("row_weights", _one(lambda weights: weights.flip(0))),
    "weights_left_out": ("row_weights", _all(lambda weights: torch.ones_like(weights))),
    "weights_left_out_in_one": ("row_weights", _one(lambda weights: torch.ones_like(weights))),
    "added_elsewhere": ("target", _all(lambda token: token.flip(0))),
    "added_elsewhere_in_one": ("target", _one(lambda token: token * 0)),
    "mask_inverted_in_one": ("mask", _one(lambda mask: ~mask)),
    "mask_of_all": ("mask", _all(lambda mask: mask | True)),
    "mask_rolled": ("mask", _all(lambda mask: mask.roll(1, 0))),
    "ids_shifted": ("ids", lambda ids, e, s: (ids + 1) % s.E),
    "ids_of_one": ("ids", lambda ids, e, s: ids[..., :1].expand(ids.shape).contiguous()),
    "ids_beyond": ("ids", lambda ids, e, s: ids + 1),
    "ids_flipped": ("ids", lambda ids, e, s: ids.flip(-1)),
    "row_masked": ("row", _all(lambda row: torch.where(row[:, :1] > 0, row, 0.0))),
    "row_masked_by_feature": ("row", _all(lambda row: torch.where(torch.arange(row.shape[-1]) > 2, row, 0.0))),
    "result_masked": ("result", _all(lambda out: torch.where(out[..., :1] > 0, out, 0.0))),
    "result_masked_in_one": ("result", _one(lambda out: torch.where(out[..., :1] > 0, out, 0.0))),
    "one_step_left_out": ("steps", _all(lambda steps: steps[1:])),
    "one_step_twice": ("steps", _all(lambda steps: [*steps, steps[0]])),
    "one_step_of_another_slot": ("steps", _all(lambda steps: [(steps[0][0], steps[-1][1]), *steps[1:]])),
    "first_slot_for_all": ("steps", _all(lambda steps: [(e, 0) for e, _ in steps])),
    "weights_flipped": ("weights", _all(lambda weights: weights.flip(-1))),
    "weights_of_other_tokens": ("weights", _all(lambda weights: weights.roll(1, 0))),
    "outs_rolled": ("outs", _all(lambda outs: outs[1:] + outs[:1])),
    "outs_of_one": ("outs", _all(lambda outs: outs[:1] * len(outs))),
    "out_scaled": ("out", _all(lambda out: out * 0.5)),
    "out_activated": ("out", _all(lambda out: out.relu())),
    "scores_returned": ("nowhere", _all(lambda weights: weights)),
}  # fmt: skip
_PLACES = {
    "factors": {"weights", "ids", "seconds", "inner", "result", "experts", "factors", "row", "tokens", "out"},
    "stacked": {"weights", "ids", "seconds", "inner", "result", "experts", "tokens", "outs", "out"},
    "rows": {"weights", "ids", "seconds", "inner", "result", "experts", "pairs", "number", "tokens", "row_weights",
             "target", "row", "out"},
    "masked": {"weights", "ids", "seconds", "inner", "result", "experts", "number", "mask", "row", "tokens", "out"},
    "single": {"weights", "ids", "seconds", "inner", "result", "experts", "number", "mask", "row", "tokens", "out"},
    "slots": {"weights", "ids", "seconds", "inner", "result", "experts", "number", "steps", "row", "tokens", "out"},
    "pairs": {"weights", "ids", "seconds", "inner", "result", "experts", "number", "mask", "row", "tokens", "out"},
}  # fmt: skip


def make(seed: int, misses: int | None = None) -> Case:
    """The case of ``seed``, with ``misses`` near misses (None: none for a third of the seeds, else one or two)."""
    rng = random.Random(seed)
    sizes = generator._sizes(rng, most=FEW)
    gated, biased = rng.random() < 0.8, rng.random() < 0.25
    apart = gated and rng.random() < 0.4
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    way = rng.choice(WAYS)
    if way == "single":
        sizes = replace(sizes, K=1)
    names = {
        "router": rng.choice(list(generator.routers(sizes))), "slices": rng.choice(list(SLICES)),
        "product": rng.choice(list(PRODUCTS)), "start": rng.choice(list(STARTS)),
        "activation": rng.choice(list(GATED if gated else PLAIN)),
        "halves": rng.choice([name for name in generator.halves(sizes) if "unbind" not in name and "view" not in name]),
    }  # fmt: skip
    more = {"factors": {"factors": FACTORS, "sum": ("add", "add_", "radd")}, "stacked": {"pick": PICKS},
            "rows": {"pairs": PAIRS, "take": TAKES, "weights": WEIGHTS, "add": ADDS}, "single": {"single": SINGLES},
            "slots": {"slot": SLOTS, "outer": ("slots", "experts")},
            "masked": {"score": ("sum", "scores")}, "pairs": {"put": PUTS}}  # fmt: skip
    names |= {part: rng.choice(list(forms)) for part, forms in more.get(way, {}).items()}
    batch = rng.choice([b for b in (1, 1, 2) if sizes.T % b == 0])
    if (batch > 1 and names["router"] in ("deepseek", "softmax_groups", "sigmoid_biased")) or names["start"] == "more":
        batch = 1
    if names["router"] == "topk_softmax_dtype" or ("softmax" in names["router"] and batch > 1):
        batch, names["router"] = batch, "sigmoid" if batch > 1 else names["router"]
    dynamic = rng.choice(("none",) * 5 + ("tokens",))
    train = dtype == torch.float32 and rng.random() < 0.2 and way in ("factors", "stacked")
    if train and names.get("sum") == "add_":
        names["sum"] = "add"
    case = Case(seed, sizes, way, batch, dtype, dynamic, train, gated, biased, apart, names)
    if misses is None:
        misses = rng.choice((0, 1, 1, 1, 2, 2))
    fitting = [name for name in MUTATIONS if applies(name, case)]
    return replace(case, mutations=tuple(rng.sample(fitting, misses)))


def applies(name: str, case: Case) -> bool:
    """Whether the place that a near miss changes is in the block."""
    return MUTATIONS[name][0] in _PLACES[case.way] | {"nowhere"}


def with_mutation(name: str) -> Case:
    """The first block in fp32 that the near miss ``name`` applies to, and that it gives another result."""
    return generator.with_named(name, sys.modules[__name__])


def run(case: Case) -> Outcome | None:
    """What compiling the case comes to; None when eager torch itself raises."""
    return generator.outcome_of(case, block(case, case.mutations), inputs(case))
