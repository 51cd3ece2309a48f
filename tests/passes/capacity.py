"""A seeded generator of MoE blocks with a capacity, as products with one-hots of places, and of near misses.

A block is a choice of how a token's choices are laid out, of how places are counted, of what drops a pair, of the
weights, of the products that move tokens to slots and back, and of the order of all dimensions. A near miss changes one
of them.
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
from tests.passes.compare import Outcome
from tests.passes.generator import GATED, PLAIN

# ---- places: a one-hot [.., T, E] -> how many of its expert came before, at the elements that are set


def _exclusive(hot: Tensor) -> Tensor:
    return F.pad(hot, (0, 0, 1, 0)).cumsum(dim=-2)[..., :-1, :]


RANKS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda hot: hot.cumsum(-2) - 1,
    "cumsum_float": lambda hot: torch.cumsum(hot.float(), dim=hot.dim() - 2) - 1.0,
    "cumsum_without_itself": lambda hot: hot.cumsum(dim=-2) - hot,
    "cumsum_plus": lambda hot: torch.cumsum(hot, -2) + -1,
    "exclusive": _exclusive,
    "exclusive_times": lambda hot: _exclusive(hot) * hot,
}
# (places [.., E], one-hot, capacity) -> the one-hot of those that are kept
FITS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "lt": lambda places, hot, n: hot * (places < n),
    "le": lambda places, hot, n: hot * places.le(n - 1),
    "not_ge": lambda places, hot, n: hot * ~(places >= n),
    "float": lambda places, hot, n: hot * (places < float(n)).to(hot.dtype),
    "where": lambda places, hot, n: torch.where(places < n, hot, 0),
    "filled": lambda places, hot, n: hot.masked_fill(places >= n, 0),
    "swapped": lambda places, hot, n: torch.gt(n, places) * hot if isinstance(n, Tensor) else (places < n) * hot,
}
# (places [.., E], kept one-hot, ids) -> places of the one expert of each
PLACES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda places, kept, ids: (places * kept).sum(-1),
    "sum_reversed": lambda places, kept, ids: torch.sum(kept * places, dim=-1),
    "gathered": lambda places, kept, ids: places.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * kept.sum(-1),
}
SLOTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "one_hot": lambda places, n: F.one_hot(places.long(), n),
    "one_hot_float": lambda places, n: F.one_hot(places.to(torch.int64), num_classes=n).float(),
    "arange": lambda places, n: places.long().unsqueeze(-1) == torch.arange(n),
    "one_hot_of_more": lambda places, n: F.one_hot(places.long(), n + 3)[..., :n],
}
# (weights [.., E] that are zero but for the kept, slots [.., C]) -> [.., E, C]
OUTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda scores, slots: scores.unsqueeze(-1) * slots.unsqueeze(-2),
    "mul_none": lambda scores, slots: slots[..., None, :] * scores[..., None],
    "einsum": lambda scores, slots: torch.einsum("...e,...c->...ec", scores, slots.to(scores.dtype)),
    "matmul": lambda scores, slots: scores.unsqueeze(-1) @ slots.unsqueeze(-2).to(scores.dtype),
}
# (one-hot of a later choice, gates, ids) -> that of those that count
SECOND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "all": lambda hot, gates, ids: hot,
    "none": lambda hot, gates, ids: torch.zeros_like(hot),
    "threshold": lambda hot, gates, ids: hot * (gates.gather(-1, ids.unsqueeze(-1)) > 0.2),
}
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda combine: combine.bool(),
    "ne": lambda combine: combine != 0,
    "gt": lambda combine: combine > 0,
    "to_bool": lambda combine: combine.to(torch.bool),
}
LAYOUTS = ("choices", "choices", "flat", "scattered", "one")
PRODUCTS = ("einsum", "einsum", "einsum_reversed", "matmul", "matmul_flat")
ORDERS = ("tec", "tec", "etc", "ect", "cte")


@dataclass(frozen=True)
class Case:
    """One generated program.

    Attributes:
        layout: "choices" (a cumsum for each choice, the second behind the first), "flat" (one cumsum over choices and
            tokens), "scattered" (a mask [T, E] with K set), "one" (K of 1).
        groups: sequences that each have slots of their own.
        order: of the dimensions of what moves the tokens.
    """

    seed: int
    sizes: Sizes
    capacity: int
    layout: str
    groups: int
    order: str
    dtype: torch.dtype
    dynamic: str
    train: bool
    gated: bool
    biased: bool
    names: dict[str, str]
    mutations: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in vars(self.sizes).items())
        flags = [name for name in ("train", "gated", "biased") if getattr(self, name)]
        changed = f" CHANGED: {', '.join(self.mutations)}" if self.mutations else ""
        kind = str(self.dtype).removeprefix("torch.")
        spelled = " ".join(f"{part}={name}" for part, name in self.names.items())
        return (f"capacity seed {self.seed}: {sizes} C={self.capacity} {kind} {self.layout} groups={self.groups} "
                f"{self.order} dynamic={self.dynamic} {spelled} {' '.join(flags)}{changed}")  # fmt: skip


def block(case: Case, mutations: tuple[str, ...]) -> Callable[..., Any]:
    """A function of the case's inputs."""
    s, names, extra = case.sizes, case.names, []

    def at(place: str, value: Any) -> Any:
        """``value`` as the near misses have it at ``place``."""
        for name in mutations:
            where, change = MUTATIONS[name]
            if where == place:
                value = change(value, case)
        return value

    def tensors(gates: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """W and D, [.., T, E, C], of gates [.., T, E] and ids [.., T, K]."""
        kept, places, ids = _laid_out(case, gates, ids, at)
        if names["scores"] == "of_all":
            scores = [(gates.unsqueeze(0) if case.layout == "flat" else gates) * mask for mask in kept]
        else:
            scores = of_choices(gates, ids, kept)
        if names["renormalised"] == "after" and names["scores"] == "of_all" and case.layout != "flat":
            total = sum(score.sum(-1, keepdim=True) for score in scores)
            scores = [score / total.clamp(min=1e-6) for score in scores]
        slots = [SLOTS[names["slots"]](at("place", place), case.capacity) for place in places]
        if case.layout == "scattered":
            parts = [scores[0].unsqueeze(-1) * slots[0]]
            alone = [kept[0].unsqueeze(-1) * slots[0]]
        else:
            parts = [OUTER[names["outer"]](score, slot) for score, slot in zip(scores, slots, strict=True)]
            alone = [OUTER[names["outer"]](mask.to(gates.dtype), slot) for mask, slot in zip(kept, slots, strict=True)]
        if case.layout == "flat":
            parts, alone = [parts[0].sum(0)], [alone[0].sum(dim=0)]
        combine = at("combine", sum(parts[1:], parts[0]))
        built = sum(alone[1:], alone[0])
        mask = built if names["mask"] == "built" else MASKS[names["mask"]](combine)
        return at("weights", combine), at("mask", mask)

    def of_choices(gates: Tensor, ids: Tensor, kept: list[Tensor]) -> list[Tensor]:
        """Weights [.., T, E] of the gates [.., T] of every choice, renormalised over all of them."""
        chosen = [gates.gather(-1, ids[..., choice, None]).squeeze(-1) for choice in range(ids.shape[-1])]
        total, scores = sum(chosen) + 1e-9, []
        for choice, (gate, mask) in enumerate(zip(chosen, kept, strict=True)):
            if names["scores"] == "in_place":
                gate /= total
                if "gate_escapes" in mutations:
                    extra.append(gate * 2)
                gate *= mask.sum(-1)
            else:
                gate = gate / total * mask.sum(-1)
            scores.append(gate.unsqueeze(-1) * F.one_hot(ids[..., choice], s.E))
        if "gate_is_read_later" in mutations:
            extra.append(chosen[0])
        return scores

    def experts(rows: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        first = torch.einsum("ech,enh->ecn", rows, w1) if names["experts"] == "einsum" else rows @ w1.transpose(1, 2)
        first = first + b1.unsqueeze(1) if case.biased else first
        inner = GATED[names["activation"]](*first.chunk(2, -1)) if case.gated else PLAIN[names["activation"]](first)
        inner = at("inner", inner)
        second = torch.bmm(inner, w2.mT) if names["experts"] == "bmm" else torch.einsum("ecn,ehn->ech", inner, w2)
        return second + b2[:, None] if case.biased else second

    def run(x, gate, bias, w1, w2, b1, b2):
        extra.clear()
        given = x.view(case.groups, -1, s.H) if case.groups > 1 else x
        gates = at("gates", F.linear(given, gate).float().softmax(-1))
        ids = at("ids", gates.topk(s.K, dim=-1).indices)
        combine, mask = tensors(gates, ids)
        combine, mask = combine.to(x.dtype), mask.to(x.dtype)
        if "mask_escapes" in mutations:
            extra.append(mask.sum())
        moved = at("tokens", given)
        if case.groups > 1:
            rows = torch.einsum("gtd,gtec->egcd", moved, mask)
        else:
            rows = _moved(names["to"], case.order, mask, moved, s.E)
        shape = rows.shape
        out = experts(at("rows", rows).reshape(s.E, -1, s.H), w1, w2, b1, b2)
        if "rows_escape" in mutations:
            extra.append(rows.float().sum())
        out = at("out", out).reshape(shape)
        if case.groups > 1:
            result = torch.einsum("egcd,gtec->gtd", out, combine).reshape(-1, s.H)
        else:
            result = _returned(names["back"], combine, out)
        if "counts_returned" in mutations:
            extra.append(F.one_hot(ids, s.E).sum((0, 1)))
        return at("result", result).to(x.dtype), *extra

    return run


def _laid_out(
    case: Case, gates: Tensor, ids: Tensor, at: Callable[[str, Any], Any]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(one-hots of what is kept, places, ids) for every cumsum."""
    names, experts, capacity = case.names, case.sizes.E, at("limit", case.capacity)
    rank, fits, place = RANKS[names["rank"]], FITS[names["fits"]], PLACES[names["place"]]
    if case.layout == "scattered":
        hot = torch.zeros_like(gates).scatter_(-1, ids, at("ones", 1))
        found = at("rank", rank(at("counted", hot)))
        kept = fits(found, hot, capacity)
        return [kept], [found * kept], ids
    if case.layout == "flat":
        hot = F.one_hot(ids, experts).permute(1, 0, 2)
        flat = at("counted", hot.reshape(-1, experts))
        found = at("rank", rank(flat).reshape(hot.shape))
        kept = fits(found, hot, capacity)
        return [kept], [place(found, kept, ids.t())], ids
    before: Any = None
    masks, places = [], []
    for choice in range(ids.shape[-1]):
        hot = F.one_hot(ids[..., choice], experts)
        if before is not None:
            hot = at("second", SECOND[names["second"]](hot, gates, ids[..., choice]))
        found = at("rank", rank(at("counted", hot)))
        if before is not None:
            found = found + at("offset", before) if names["rank"] != "exclusive_times" else (found + before) * hot
        kept = fits(found, hot, capacity)
        masks.append(kept)
        places.append(place(found, kept, ids[..., choice]))
        count = (kept if names["behind"] == "kept" else hot).sum(dim=-2, keepdim=True)
        before = count if before is None else before + count
    return masks, places, ids


def _moved(name: str, order: str, mask: Tensor, x: Tensor, experts: int) -> Tensor:
    """[E, C, H] of a mask [T, E, C]."""
    if name.startswith("einsum"):
        turned = mask.permute(*("tec".index(axis) for axis in order))
    if name == "einsum":
        return torch.einsum(f"{order},th->ech", turned, x)
    if name == "einsum_reversed":
        return torch.einsum(f"th,{order}->ech", x, turned)
    if name == "matmul":
        return mask.permute(1, 2, 0) @ x
    return (mask.reshape(x.shape[0], -1).t() @ x).view(experts, -1, x.shape[1])


def _returned(name: str, combine: Tensor, out: Tensor) -> Tensor:
    """[T, H] of results [E, C, H]."""
    if name == "einsum":
        return torch.einsum("tec,ech->th", combine, out)
    if name == "einsum_reversed":
        return torch.einsum("ech,tec->th", out, combine)
    return combine.view(combine.shape[0], -1) @ out.reshape(-1, out.shape[-1])


def inputs(case: Case) -> tuple[Tensor, ...]:
    """x, gate, bias, w1, w2, b1, b2."""
    weights = {"gated": case.gated, "transposed": False}
    given = generator.Case(case.seed, case.sizes, "", case.dtype, "", False, (), (), None, None, weights)  # type: ignore[arg-type]
    return generator.inputs(given)


# ---- near misses: a place in the block, and what is there instead

MUTATIONS: dict[str, tuple[str, Callable[[Any, Case], Any]]] = {
    "places_of_all_tokens": ("counted", lambda hot, c: torch.ones_like(hot)),
    "places_of_other_tokens": ("counted", lambda hot, c: hot.roll(1, -2)),
    "places_of_other_experts": ("counted", lambda hot, c: hot.roll(1, -1)),
    "places_of_some": ("counted", lambda hot, c: hot * (torch.arange(hot.shape[-2]) % 2).unsqueeze(-1)),
    "places_from_one": ("rank", lambda rank, c: rank + 1),
    "places_halved": ("rank", lambda rank, c: rank // 2),
    "places_backwards": ("rank", lambda rank, c: rank.flip(-2)),
    "places_rolled": ("rank", lambda rank, c: rank.roll(1, -1)),
    "places_clamped": ("rank", lambda rank, c: rank.clamp(max=c.capacity - 1)),
    "places_wrapped": ("rank", lambda rank, c: rank % c.capacity),
    "place_clamped": ("place", lambda place, c: place.clamp(max=max(c.capacity - 2, 0))),
    "place_zero": ("place", lambda place, c: place * 0),
    "place_of_other_tokens": ("place", lambda place, c: place.roll(1, -1)),
    "second_not_behind": ("offset", lambda before, c: before * 0),
    "second_behind_less": ("offset", lambda before, c: before - 1),
    "second_behind_other_experts": ("offset", lambda before, c: before.roll(1, -1)),
    "limit_smaller": ("limit", lambda limit, c: max(limit - 1, 1)),
    "limit_larger": ("limit", lambda limit, c: limit + 1),
    "scattered_twos": ("ones", lambda one, c: 2),
    "weights_squared": ("weights", lambda combine, c: combine * combine),
    "weights_shifted": ("weights", lambda combine, c: combine + 0.1),
    "weights_of_other_slots": ("weights", lambda combine, c: combine.roll(1, -1)),
    "weights_of_other_experts": ("weights", lambda combine, c: combine.roll(1, -2)),
    "weights_of_other_tokens": ("weights", lambda combine, c: combine.roll(1, -3)),
    "weights_negative": ("combine", lambda combine, c: -combine),
    "mask_of_other_tokens": ("mask", lambda mask, c: mask.roll(1, -3)),
    "mask_of_other_slots": ("mask", lambda mask, c: mask.roll(1, -1)),
    "mask_of_other_experts": ("mask", lambda mask, c: mask.roll(1, -2)),
    "mask_of_more": ("mask", lambda mask, c: mask.bool() | mask.bool().roll(1, -3)),
    "mask_doubled": ("mask", lambda mask, c: mask.float() * 2),
    "mask_weighted": ("combine", lambda combine, c: combine * 0.5),
    "mask_above": ("mask", lambda mask, c: mask.float() > 0.5),
    "ids_flipped": ("ids", lambda ids, c: ids.flip(-1)),
    "ids_shifted": ("ids", lambda ids, c: (ids + 1) % c.sizes.E),
    "ids_repeated": ("ids", lambda ids, c: ids[..., :1].expand(ids.shape).contiguous()),
    "gates_negative": ("gates", lambda gates, c: gates - 0.3),
    "gates_zero": ("gates", lambda gates, c: gates * (gates > 0.2)),
    "tokens_scaled": ("tokens", lambda x, c: x * 0.5),
    "tokens_rolled": ("tokens", lambda x, c: x.roll(1, -2)),
    "tokens_normed": ("tokens", lambda x, c: F.layer_norm(x, (x.shape[-1],))),
    "rows_normed": ("rows", lambda rows, c: F.layer_norm(rows, (rows.shape[-1],))),
    "rows_rolled": ("rows", lambda rows, c: rows.roll(1, -2)),
    "rows_shifted": ("rows", lambda rows, c: rows + 0.1),
    "inner_normed": ("inner", lambda inner, c: F.rms_norm(inner, (inner.shape[-1],))),
    "out_rolled": ("out", lambda out, c: out.roll(1, 1)),
    "out_of_other_experts": ("out", lambda out, c: out.flip(0)),
    "out_scaled": ("out", lambda out, c: out * 2),
    "result_activated": ("result", lambda result, c: result.relu()),
    "second_of_others": ("second", lambda hot, c: hot.roll(1, -2)),
    "second_of_other_experts": ("second", lambda hot, c: hot.roll(1, -1)),
    "second_counted_twice": ("second", lambda hot, c: hot * 2),
    "gate_escapes": ("in place", lambda value, c: value),
    "gate_is_read_later": ("of choices", lambda value, c: value),
    "mask_escapes": ("nowhere", lambda value, c: value),
    "rows_escape": ("nowhere", lambda value, c: value),
    "counts_returned": ("nowhere", lambda value, c: value),
}
_PLACES = {
    "offset": lambda case: case.layout == "choices" and case.sizes.K > 1 and case.names["rank"] != "exclusive_times",
    "ones": lambda case: case.layout == "scattered",
    "second": lambda case: case.layout == "choices" and case.sizes.K > 1,
    "in place": lambda case: case.names["scores"] == "in_place",
    "of choices": lambda case: case.names["scores"] != "of_all",
}


def make(seed: int, misses: int | None = None) -> Case:
    """The case of ``seed``, with ``misses`` near misses (None: none for a third of the seeds, else one or two)."""
    rng = random.Random(seed)
    sizes = generator._sizes(rng)
    layout = rng.choice(LAYOUTS)
    sizes = replace(sizes, K=1) if layout == "one" else replace(sizes, K=min(max(sizes.K, 2), sizes.E, 3))
    groups = rng.choice([g for g in (1, 1, 2) if sizes.T % g == 0 and (g == 1 or layout in ("choices", "one"))])
    tokens = sizes.T // groups
    capacity = rng.choice((1, 2, 3, max(tokens // 2, 1), tokens, sizes.E))
    gated = rng.random() < 0.7
    names = {part: rng.choice(list(forms)) for part, forms in {
        "rank": RANKS, "fits": FITS, "place": PLACES, "slots": SLOTS, "outer": OUTER, "mask": [*MASKS, "built"],
        "to": PRODUCTS, "back": ("einsum", "einsum_reversed", "matmul_flat"), "experts": ("bmm", "einsum", "matmul"),
        "renormalised": ("none", "after"), "behind": ("all", "kept"), "activation": GATED if gated else PLAIN,
    }.items()}  # fmt: skip
    by_choice = layout in ("choices", "one")
    names["scores"] = rng.choice(("of_all", "of_all", "of_choice", "in_place") if by_choice else ("of_all",))
    names["second"] = rng.choice(("all", "all", *SECOND))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    dynamic, biased = rng.choice(("none",) * 5 + ("tokens",)), rng.random() < 0.25
    case = Case(seed, sizes, capacity, layout, groups, rng.choice(ORDERS), dtype, dynamic, False, gated, biased, names)
    case = replace(case, train=case.dtype == torch.float32 and rng.random() < 0.2)
    if misses is None:
        misses = rng.choice((0, 1, 1, 1, 2, 2))
    fitting = [name for name in MUTATIONS if applies(name, case)]
    return replace(case, mutations=tuple(rng.sample(fitting, misses)))


def applies(name: str, case: Case) -> bool:
    """Whether the place that a near miss changes is in the block."""
    return _PLACES.get(MUTATIONS[name][0], lambda case: True)(case)


def with_mutation(name: str) -> Case:
    """The first block in fp32 that the near miss ``name`` applies to, and that it gives another result."""
    return generator.with_named(name, sys.modules[__name__])


def run(case: Case) -> Outcome | None:
    """What compiling the case comes to; None when eager torch itself raises."""
    return generator.outcome_of(case, block(case, case.mutations), inputs(case))
