"""What a diverged or masked router meets: logits, biases, and the answer of torch's own formula; and experts in eager
code, whose NaN results and gradients the operators must share.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.routing import ROUTINGS

NAN, INF = float("nan"), float("inf")
T, E, K, BAD = 5, 16, 4, 2


@dataclass(frozen=True)
class Poison:
    """Values for experts of token BAD, or of the correction bias, which all tokens share."""

    logits: tuple[tuple[int | slice, float], ...] = ()
    bias: tuple[tuple[int | slice, float], ...] = ()


POISONS = {
    "nan_logit": Poison(((3, NAN),)),
    "nan_row": Poison(((slice(None), NAN),)),
    "more_nan_than_k": Poison(((slice(2, None), NAN),)),
    "a_nan_in_every_group": Poison(((slice(1, None, 4), NAN),)),
    "inf": Poison(((5, INF),)),
    "nan_beside_inf": Poison(((5, INF), (9, NAN), (10, -INF))),
    "all_minus_inf": Poison(((slice(None), -INF),)),
    "minus_inf": Poison(((5, -INF),)),
    "fewer_than_k_unmasked": Poison(((slice(1, 15), -INF),)),
    "nan_bias": Poison(bias=((7, NAN),)),
    "nan_and_infinite_bias": Poison(bias=((1, INF), (2, -INF), (9, NAN), (12, -INF))),
    "nan_logit_and_bias": Poison(((3, NAN),), bias=((12, NAN),)),
}

#: Every routing with everything that it can meet.
CASES = {
    f"{routing}-{name}": (routing, poison)
    for routing, row in ROUTINGS.items()
    for name, poison in POISONS.items()
    if row.supports_bias or not poison.bias
}


def logits_and_bias(poison: Poison, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
    """``[T, E]`` and ``[E]``: healthy random numbers but for the poison."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((T, E), generator=generator).to(dtype)
    bias = torch.randn(E, generator=generator) if poison.bias else None
    for where, value in poison.logits:
        logits[BAD, where] = value
    for where, value in poison.bias:
        bias[where] = value
    return logits, bias


def routing_options(routing: str, **changed: Any) -> dict[str, Any]:
    """The keyword arguments of ``fused_topk``."""
    groups = {"num_groups": 4, "topk_groups": 2} if ROUTINGS[routing].group else {"num_groups": 1, "topk_groups": 1}
    options = {"top_k": K, "routing": routing, "renormalize": True, "renorm_eps": 0.0, "scale": 2.5}
    return {**options, **groups, **changed}


def _best(values: Tensor, k: int) -> Tensor:
    """Columns of the k greatest values, one by one: NaN first, then descending; equals by ascending column."""

    def order(row: list[float]) -> list[int]:
        return sorted(range(len(row)), key=lambda i: (0, 0.0, i) if row[i] != row[i] else (1, -row[i], i))[:k]

    return torch.tensor([order(row) for row in values.tolist()])


def by_torch(logits: Tensor, bias: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(weights, ids) as the models' code computes them, in float32, with the order of equal choices made definite."""
    row, x = ROUTINGS[options["routing"]], logits.float()
    score = {"softmax": x.softmax(-1), "sigmoid": x.sigmoid(), "sqrtsoftplus": F.softplus(x).sqrt(), "none": x}
    scores = score[row.score]
    choice = scores if bias is None else scores + bias.float()
    if row.group is not None:
        grouped = choice.unflatten(1, (options["num_groups"], -1))
        ranks = grouped.topk(2).values.sum(-1) if row.group == "top2" else grouped.max(-1).values
        kept = torch.zeros_like(ranks).scatter(1, _best(ranks, options["topk_groups"]), 1).bool()
        kept_ranks, best_ranks = ranks[kept].view(len(x), -1), ranks.topk(options["topk_groups"]).values
        torch.testing.assert_close(kept_ranks.sort().values, best_ranks.sort().values, equal_nan=True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -INF).flatten(1)
    ids = _best(choice, options["top_k"])
    torch.testing.assert_close(choice.gather(1, ids), choice.topk(options["top_k"]).values, equal_nan=True)
    weights = scores.gather(1, ids)
    if row.after == "softmax":
        weights = weights.softmax(-1)
    elif row.after == "sigmoid":
        weights = weights.sigmoid()
    if options["renormalize"]:
        weights = weights / (weights.sum(-1, keepdim=True) + options["renorm_eps"])
    return weights * options["scale"], ids.int()


def check_routing(weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, options: dict[str, Any]) -> None:
    """Valid and distinct ids, and torch's numbers, NaN included."""
    wanted_weights, wanted_ids = by_torch(logits, bias, options)
    assert all(len(set(row)) == len(row) and min(row) >= 0 and max(row) < logits.shape[1] for row in ids.tolist())
    assert torch.equal(ids.cpu(), wanted_ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.cpu(), wanted_weights, rtol=3e-6, atol=1e-30, equal_nan=True)


def experts_layer(
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    T: int = 7,
    E: int = 6,
    K: int = 3,
    H: int = 96,
    I: int = 40,
) -> dict[str, Tensor]:
    """The first arguments of ``fused_experts``. Behind the last column of tokens and weights there is NaN."""
    generator = torch.Generator().manual_seed(1)

    def padded(*shape: int) -> Tensor:
        wide = torch.full((*shape[:-1], shape[-1] + 32), NAN)
        wide[..., : shape[-1]] = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return wide.to(device, dtype)[..., : shape[-1]]

    ids = torch.rand((T, E), generator=generator).argsort(dim=1)[:, :K].int()
    return {
        "hidden_states": padded(T, H),
        "gate_up_proj": padded(E, 2 * I, H),
        "down_proj": padded(E, H, I),
        "topk_weights": torch.rand((T, K), generator=generator).to(device),
        "topk_ids": ids.to(device),
    }


def most_rows(ids: Tensor) -> int:
    """Rows of the longest expert: the least capacity that drops nothing."""
    return int(torch.bincount(ids[ids >= 0].flatten()).max())


def changed(layer: dict[str, Tensor], **values: tuple[Any, float]) -> dict[str, Tensor]:
    """A copy of the layer with ``name=(index, value)`` written; what lies behind the columns stays there."""
    poisoned = deepcopy(layer)
    for name, (index, value) in values.items():
        poisoned[name][index] = value
    return poisoned


def check_nan_stays_in_its_token(run: Callable[[dict[str, Tensor]], Tensor], layer: dict[str, Tensor]) -> None:
    """Token BAD with a NaN in its row, or one NaN weight, is NaN, and no bit of another token changes."""
    others = [t for t in range(layer["hidden_states"].shape[0]) if t != BAD]
    clean = run(layer)
    assert clean.isfinite().all()
    for poisoned in (
        changed(layer, hidden_states=(BAD, NAN)),
        changed(layer, hidden_states=((BAD, -1), NAN)),
        changed(layer, topk_weights=((BAD, 1), NAN)),
    ):
        out = run(poisoned)
        assert out[BAD].isnan().all()
        assert torch.equal(out[others], clean[others])


def check_dropped_pairs_are_exactly_zero(run: Callable[[dict[str, Tensor]], Tensor], layer: dict[str, Tensor]) -> None:
    """An id of -1 hides a NaN weight, a NaN token and an expert whose every result is NaN."""
    whole, unused = BAD, int(layer["topk_ids"][0, 0])
    ids = layer["topk_ids"].clone()
    ids[whole], ids[ids == unused] = -1, -1
    zero = {**layer, "topk_ids": ids, "topk_weights": layer["topk_weights"].masked_fill(ids < 0, 0.0)}
    clean = run(zero)
    assert (clean[whole] == 0).all() and clean.isfinite().all() and clean[0].abs().max() > 0
    poisoned = changed(zero, hidden_states=(whole, NAN), gate_up_proj=(unused, NAN), down_proj=(unused, NAN))
    poisoned["topk_weights"] = zero["topk_weights"].masked_fill(ids < 0, NAN)
    assert torch.equal(run(poisoned), clean)


def eager_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    glu_layout: str = "concat",
) -> Tensor:
    """Experts one by one over their own tokens, as a model without any of this writes them; differentiable."""
    row, out = ACTIVATIONS[activation], torch.zeros_like(x)
    alpha, limit = row.alpha or 1.0, row.limit or INF
    for e in range(gate_up.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        h = x[token] @ gate_up[e].T
        h = h if gate_up_bias is None else h + gate_up_bias[e]
        y = row.eager(*split_glu(h, glu_layout), alpha, limit) @ down[e].T
        y = y if down_bias is None else y + down_bias[e]
        out = out.index_add(0, token, y * weights[token, slot].unsqueeze(1))
    return out
