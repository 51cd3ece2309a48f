"""The parts of an MoE block, each in the spellings that people use. The tests draw blocks from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """T tokens, E experts, K experts per token, H hidden, I expert width."""

    T: int
    E: int
    K: int
    H: int
    I: int


def halves(s: Sizes) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Ways to take gate and up from the first product."""
    return {
        "chunk": lambda h: h.chunk(2, dim=-1),
        "chunk_last": lambda h: torch.chunk(h, 2, h.dim() - 1),
        "split": lambda h: h.split(s.I, dim=-1),
        "split_sizes": lambda h: torch.split(h, [s.I, s.I], dim=-1),
        "slices": lambda h: (h[..., : s.I], h[..., s.I :]),
        "narrow": lambda h: (h.narrow(-1, 0, s.I), h.narrow(-1, s.I, s.I)),
        "interleaved": lambda h: (h[..., ::2], h[..., 1::2]),
        "unbind": lambda h: h.view(-1, 2, s.I).unbind(1),
        "view": lambda h: (h.view(-1, 2, s.I)[:, 0], h.view(-1, 2, s.I)[:, 1]),
        "select": lambda h: (h.unflatten(-1, (2, s.I)).select(-2, 0), h.unflatten(-1, (2, s.I)).select(-2, 1)),
        "tensor_split": lambda h: h.tensor_split(2, dim=-1),
        "interleaved_unbind": lambda h: h.view(-1, s.I, 2).unbind(-1),
        "interleaved_view": lambda h: (h.unflatten(-1, (-1, 2))[..., 0], h.unflatten(-1, (s.I, 2))[..., 1]),
        "up_first": lambda h: h.chunk(2, dim=-1)[::-1],
        "up_first_view": lambda h: h.view(-1, 2, s.I).unbind(1)[::-1],
        "interleaved_up_first": lambda h: (h[..., 1::2], h[..., ::2]),
    }


SORTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda flat: torch.sort(flat)[1],
    "argsort": lambda flat: torch.argsort(flat),
    "sort_stable": lambda flat: flat.sort(stable=True).indices,
    "argsort_stable": lambda flat: flat.argsort(dim=-1, stable=True),
}


def counters(s: Sizes) -> dict[str, Callable[[Tensor], Tensor]]:
    """Rows per expert."""
    return {
        "histc": lambda flat: torch.histc(flat.float(), bins=s.E, min=0, max=s.E - 1),
        "histc_sorted": lambda flat: torch.histc(flat.sort()[0].float(), bins=s.E, min=0, max=s.E - 1),
        "histc_of_whole_bins": lambda flat: torch.histc(flat.float(), bins=s.E, min=0, max=s.E),
        "scattered": lambda flat: (
            torch.zeros(flat.shape[0] // s.K, s.E, dtype=torch.bool).scatter(1, flat.view(-1, s.K), True).sum(0)
        ),
        "one_hot": lambda flat: F.one_hot(flat, s.E).sum(0),
        "one_hot_of_slots": lambda flat: F.one_hot(flat.view(-1, s.K), num_classes=s.E).sum(dim=(0, 1)),
        "one_hot_twice": lambda flat: F.one_hot(flat.view(-1, s.K), s.E).sum(1).float().sum(0),
        "equal": lambda flat: (flat[:, None] == torch.arange(s.E)).sum(0),
        "equal_reversed": lambda flat: torch.eq(torch.arange(s.E)[None], flat.unsqueeze(1)).count_nonzero(dim=0),
        "equal_one_by_one": lambda flat: torch.stack([(flat == e).sum() for e in range(s.E)]),
        "scatter_add": lambda flat: torch.zeros(s.E, dtype=torch.long).scatter_add_(0, flat, torch.ones_like(flat)),
        "index_add": lambda flat: torch.zeros(s.E).index_add(0, flat, torch.ones(flat.shape[0])),
        "index_put": lambda flat: torch.zeros(s.E, dtype=torch.int32).index_put_(
            (flat,), torch.ones_like(flat).int(), accumulate=True
        ),
    }


def searches(s: Sizes) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Where each expert's rows end, without counts."""
    return {
        "searched": lambda counts, flat, perm: torch.searchsorted(flat[perm], torch.arange(s.E), right=True).int(),
        "searched_left": lambda counts, flat, perm: torch.searchsorted(
            flat.sort()[0], torch.arange(1, s.E + 1), out_int32=True
        ),
        "bucketized": lambda counts, flat, perm: torch.bucketize(
            torch.arange(s.E), flat[perm], right=True, out_int32=True
        ),
    }


def tokens_of_rows(s: Sizes) -> dict[str, Callable[[Tensor], Tensor]]:
    """The token of every sorted row."""
    return {
        "floor": lambda perm: perm // s.K,
        "div_floor": lambda perm: torch.div(perm, s.K, rounding_mode="floor"),
        "div_trunc": lambda perm: perm.div(s.K, rounding_mode="trunc"),
        "listed": lambda perm: torch.arange(perm.shape[0] // s.K).repeat_interleave(s.K)[perm],
        "listed_by_expand": lambda perm: (
            torch.arange(perm.shape[0] // s.K)[:, None].expand(-1, s.K).reshape(-1).gather(0, perm)
        ),
        "listed_by_repeat": lambda perm: (
            torch.arange(perm.shape[0] // s.K).view(-1, 1).repeat(1, s.K).view(-1).index_select(0, perm)
        ),
    }


GATHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, tokens: x[tokens],
    "index_select": lambda x, tokens: x.index_select(0, tokens),
    "gather": lambda x, tokens: torch.gather(x, 0, tokens[:, None].expand(-1, x.shape[1])),
    "gather_repeat": lambda x, tokens: x.gather(0, tokens.unsqueeze(-1).repeat(1, x.shape[1])),
    "take_along_dim": lambda x, tokens: torch.take_along_dim(x, tokens[:, None], dim=0),
}


def _scattered_inverse(perm: Tensor) -> Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel())
    return inverse


INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "scattered": _scattered_inverse,
    "argsort": lambda perm: torch.argsort(perm),
    "scatter": lambda perm: torch.empty_like(perm).scatter_(0, perm, torch.arange(perm.shape[0])),
    "index_copy": lambda perm: torch.zeros_like(perm).index_copy(0, perm, torch.arange(perm.numel())),
}
ADDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda start, index, rows: start.index_add(0, index, rows),
    "index_add_": lambda start, index, rows: start.index_add_(0, index, rows),
    "scatter_add": lambda start, index, rows: start.scatter_add(0, index[:, None].expand(-1, rows.shape[1]), rows),
    "scatter_add_": lambda start, index, rows: start.scatter_add_(0, index[:, None].repeat(1, rows.shape[1]), rows),
    "accumulated": lambda start, index, rows: start.index_put((index,), rows, accumulate=True),
}
PUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda out, perm: torch.empty_like(out).index_put_((perm,), out),
    "index_copy": lambda out, perm: torch.empty_like(out).index_copy_(0, perm, out),
    "scatter": lambda out, perm: torch.zeros_like(out).scatter(0, perm[:, None].expand(-1, out.shape[1]), out),
}


def finishes(s: Sizes) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Weighted rows [R, H] summed over the K slots."""
    return {
        "view": lambda rows, weights: (rows.view(-1, s.K, s.H) * weights.unsqueeze(-1)).sum(1),
        "view_sum_minus_two": lambda rows, weights: (rows.view(-1, s.K, s.H) * weights[..., None]).sum(dim=-2),
        "before_view": lambda rows, weights: (rows * weights.reshape(-1, 1)).view(-1, s.K, s.H).sum(dim=1),
        "reversed": lambda rows, weights: torch.sum(weights.unsqueeze(-1) * rows.reshape(-1, s.K, s.H), 1),
        "einsum": lambda rows, weights: torch.einsum("tkh,tk->th", rows.view(-1, s.K, s.H), weights.to(rows.dtype)),
        "einsum_reversed": lambda rows, weights: torch.einsum(
            "b e, b e d -> b d", weights.to(rows.dtype), rows.view(-1, s.K, s.H)
        ),
        "bmm": lambda rows, weights: torch.bmm(weights.to(rows.dtype).unsqueeze(1), rows.view(-1, s.K, s.H)).squeeze(1),
    }
