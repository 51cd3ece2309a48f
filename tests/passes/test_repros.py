"""Programs that look like MoE blocks, or like attention with repeated heads, and differ from them in one place.

Each is compared with eager torch. Whether it fuses is not asserted: a program that differs may be refused, or fused
where the operators can express the difference.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe  # noqa: F401  (registers its grouped product)

from moe_ops.logs import quiet
from tests.passes.compare import assert_same, check, compiled, difference

T, E, K, H, I = 12, 8, 2, 32, 16
Program = Callable[..., Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Make ``function(x, gate, w1, w2)`` one test."""
    PROGRAMS[function.__name__] = function
    return function


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((T, H), (E, H), (E, 2 * I, H), (E, H, I))
    x, *rest = (torch.randn(shape, generator=make) for shape in shapes)
    return x, *(weight * 0.3 for weight in rest)


def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The grouped product of transformers for weights that are not bf16, [E, N, K] as they are stored."""
    return torch.ops.transformers.grouped_mm_fallback(rows, weight.mT, offsets)


def glu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(scores, K, -1)
    return weights, ids


def soft(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return choose(F.linear(x, gate).softmax(-1))


def nothing(**values: Tensor) -> None:
    """No write between the parts of a block."""


def batched(x, weights, ids, w1, w2, act=glu, between=nothing):
    """Gathered weights, rows in token order; ``between`` is called after the first product and before the second."""
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(K, 0)
    h = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1)
    between(x=x, weights=weights, ids=ids, h=h)
    out = torch.bmm(w2[flat], act(h).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def grouped(
    x, weights, ids, w1, w2, *, act=glu, between=nothing, sort=torch.sort, count=None, offset=0, gather=None, undo=None,
    tokens=lambda perm: perm // K, combine=None,
):  # fmt: skip
    """Sorted rows through grouped products."""
    flat = ids.reshape(-1)
    ordered, perm = sort(flat)
    rows = x[tokens(perm)]
    counts = torch.histc(ordered.float(), bins=E, min=0, max=E - 1) if count is None else count(flat)
    offsets = (counts.cumsum(0) + offset).to(torch.int32)
    h = product(rows, w1, offsets)
    between(x=x, weights=weights, ids=ids, h=h, rows=rows, perm=perm, offsets=offsets)
    out = product(act(h), w2, offsets)
    if combine is not None:
        return combine(out, perm)
    out = out * weights.reshape(-1)[perm if gather is None else gather(perm)].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel())
    return out[inverse if undo is None else undo(inverse)].view(-1, K, H).sum(1)


# ---- R1: an axis is another one than it seems


@program
def R1_softmax_inside_expert_groups(x, gate, w1, w2):
    scores = F.linear(x, gate).view(-1, 2, E // 2).softmax(-1).view(-1, E)
    return batched(x, *choose(scores), w1, w2)


@program
def R1_softmax_over_the_tokens(x, gate, w1, w2):
    x = x[:E]
    return batched(x, *choose(F.linear(x, gate).softmax(0)), w1, w2)


@program
def R1_softmax_over_everything(x, gate, w1, w2):
    return batched(x, *choose(F.linear(x, gate).view(-1).softmax(-1).view(-1, E)), w1, w2)


@program
def R1_renormalised_over_everything(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, weights / weights.reshape(-1).sum(0, keepdim=True), ids, w1, w2)


@program
def R1_renormalised_over_pairs_of_tokens(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    pairs = weights.view(-1, 2 * K)
    return batched(x, (pairs / pairs.sum(-1, keepdim=True)).view(-1, K), ids, w1, w2)


@program
def R1_topk_over_half_of_the_experts(x, gate, w1, w2):
    weights, ids = torch.topk(F.linear(x, gate).softmax(-1).view(-1, E // 2), 1, -1)
    return batched(x, weights.view(-1, K), ids.view(-1, K), w1, w2)


# ---- R2, R3, R6: an argument that is not read


def group_limited(x, gate, w1, w2, fill=float("-inf"), mask_value=1, **options):
    scores = F.linear(x, gate).sigmoid()
    best = scores.view(-1, 4, 2).topk(2, -1)[0].sum(-1)
    kept = torch.zeros_like(best).scatter_(1, torch.topk(best, 2, **{"dim": -1, **options})[1], mask_value)
    mask = kept.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, E).bool()
    ids = torch.topk(scores.masked_fill(~mask, fill), K, -1)[1]
    return batched(x, scores.gather(1, ids), ids, w1, w2)


@program
def R2_group_limited(x, gate, w1, w2):
    return group_limited(x, gate, w1, w2)


@program
def R2_worst_groups_kept(x, gate, w1, w2):
    return group_limited(x, gate, w1, w2, largest=False)


@program
def R2_groups_excluded_with_zero(x, gate, w1, w2):
    return group_limited(x, gate, w1, w2, fill=0.0)


@program
def R2_groups_scored_by_their_worst(x, gate, w1, w2):
    scores = F.linear(x, gate).sigmoid()
    best = scores.view(-1, 4, 2).topk(2, -1, largest=False)[0].sum(-1)
    kept = torch.zeros_like(best).scatter_(1, torch.topk(best, 2, -1)[1], 1)
    mask = kept.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, E).bool()
    ids = torch.topk(scores.masked_fill(~mask, float("-inf")), K, -1)[1]
    return batched(x, scores.gather(1, ids), ids, w1, w2)


@program
def R2_groups_are_strided(x, gate, w1, w2):
    scores = F.linear(x, gate).sigmoid()
    best = scores.view(-1, 4, 2).topk(2, -1)[0].sum(-1)
    kept = torch.zeros_like(best).scatter_(1, torch.topk(best, 2, -1)[1], 1)
    mask = kept.unsqueeze(1).expand(-1, 2, 4).reshape(-1, E).bool()
    ids = torch.topk(scores.masked_fill(~mask, float("-inf")), K, -1)[1]
    return batched(x, scores.gather(1, ids), ids, w1, w2)


@program
def R2_groups_limited_over_tokens(x, gate, w1, w2):
    x = x[:4]
    scores = F.linear(x, gate).sigmoid()
    best = scores.view(-1, 4, 2).topk(2, -1)[0].sum(-1)
    kept = torch.zeros_like(best).scatter_(0, torch.topk(best, 2, 0)[1], 1)
    mask = kept.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, E).bool()
    ids = torch.topk(scores.masked_fill(~mask, float("-inf")), K, -1)[1]
    return batched(x, scores.gather(1, ids), ids, w1, w2)


@program
def R2_smallest_scores_chosen(x, gate, w1, w2):
    return batched(x, *torch.topk(F.linear(x, gate).softmax(-1), K, -1, False), w1, w2)


@program
def R2_topk_over_the_tokens(x, gate, w1, w2):
    x = x[:E]
    weights, ids = torch.topk(F.linear(x, gate).softmax(-1), K, 0)
    return batched(x, weights.t(), ids.t(), w1, w2)


@program
def R3_truncating_division(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, torch.div(weights, 0.1, rounding_mode="trunc"), ids, w1, w2)


@program
def R3_flooring_division_by_the_sum(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, torch.div(weights * 9, weights.sum(-1, keepdim=True), rounding_mode="floor"), ids, w1, w2)


@program
def R3_scaled_sum_in_the_denominator(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, weights / torch.add(weights.sum(-1, keepdim=True), 0.5, alpha=2), ids, w1, w2)


@program
def R3_sum_of_squares_in_the_denominator(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, weights / (weights * weights).sum(-1, keepdim=True), ids, w1, w2)


@program
def R3_token_of_a_row_by_truncation_of_another(x, gate, w1, w2):
    return grouped(x, *soft(x, gate), w1, w2, tokens=lambda perm: torch.div(perm + 1, K, rounding_mode="trunc") % T)


@program
def R6_view_as_another_dtype(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, (weights.bfloat16() * 1).view(torch.float16).float(), ids, w1, w2)


@program
def R6_bits_of_the_weights_as_ids(x, gate, w1, w2):
    weights, _ = soft(x, gate)
    return batched(x, weights, weights.view(torch.int32).long() % E, w1, w2)


# ---- R4, R5, R11, R22: ranks that agree by coincidence


@program
def R4_bias_per_token_when_T_is_E(x, gate, w1, w2):
    x = x[:E]
    scores = F.linear(x, gate).sigmoid()
    ids = torch.topk(scores + gate[:, 0].view(-1, 1), K, -1)[1]
    return batched(x, scores.gather(1, ids), ids, w1, w2)


@program
def R4_bias_per_token_and_expert(x, gate, w1, w2):
    scores = F.linear(x, gate).sigmoid()
    ids = torch.topk(scores + scores.t()[:, :1].reshape(1, -1), K, -1)[1]
    return batched(x, scores.gather(1, ids), ids, w1, w2)


@program
def R4_bias_added_with_alpha(x, gate, w1, w2):
    scores = F.linear(x, gate).sigmoid()
    ids = torch.topk(torch.add(scores, gate[:, 0], alpha=3), K, -1)[1]
    return batched(x, scores.gather(1, ids), ids, w1, w2)


@program
def R5_interleaved_by_view(x, gate, w1, w2):
    def act(h):
        g, u = h.view(h.shape[0], -1, 2).chunk(2, -1)
        return (F.silu(g) * u).squeeze(-1)

    return batched(x, *soft(x, gate), w1, w2, act=act)


@program
def R5_tensor_parallel_blocks(x, gate, w1, w2):
    def act(h):
        g, u = h.view(h.shape[0], 4, -1).chunk(2, -1)
        return (F.silu(g) * u).flatten(1)

    return batched(x, *soft(x, gate), w1, w2, act=act)


@program
def R5_halves_over_the_rows(x, gate, w1, w2):
    def act(h):
        g, u = h.view(2, -1, h.shape[1]).transpose(0, 1).reshape(-1, 2 * h.shape[1]).chunk(2, -1)
        return (F.silu(g) * u).reshape(h.shape[0], -1)[:, :I]

    return batched(x, *soft(x, gate), w1, w2, act=act)


@program
def R5_up_before_gate(x, gate, w1, w2):
    def act(h):
        u, g = h.chunk(2, -1)
        return F.silu(g) * u

    return batched(x, *soft(x, gate), w1, w2, act=act)


@program
def R5_halves_of_unequal_parts(x, gate, w1, w2):
    def act(h):
        g, u = h.split([I + 8, I - 8], -1)
        return F.silu(g[:, :I]) * F.pad(u, (0, 8))

    return batched(x, *soft(x, gate), w1, w2, act=act)


def add_into(tokens: int, **options: Any):
    """Combine by index_add into ``tokens`` rows."""

    def run(x, gate, w1, w2):
        weights, ids = soft(x, gate)

        def combine(out, perm):
            out = out * weights.reshape(-1)[perm].unsqueeze(-1)
            return torch.zeros(tokens, H).index_add(0, perm // K, out, **options)

        return grouped(x, weights, ids, w1, w2, combine=combine)

    return run


PROGRAMS["R11_index_add_into_as_many_rows"] = add_into(T)
PROGRAMS["R11_index_add_into_more_rows"] = add_into(T + 3)
PROGRAMS["R11_index_add_with_alpha"] = add_into(T, alpha=2)


@program
def R11_index_add_into_ones(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    combine = lambda out, perm: torch.ones(T, H).index_add(0, perm // K, out * weights.reshape(-1)[perm].unsqueeze(-1))  # noqa: E731
    return grouped(x, weights, ids, w1, w2, combine=combine)


@program
def R22_weights_broadcast_along_the_features_when_R_is_H(x, gate, w1, w2):
    x = torch.cat([x, x[: H // K - T]])
    weights, ids = soft(x, gate)
    flat = ids.reshape(-1)
    h = torch.bmm(w1[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[flat], glu(h).unsqueeze(-1))
    return (out * weights.view(1, -1, 1)).view(-1, K, H).sum(1)


@program
def R22_sum_over_the_features_when_K_is_H(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    flat = ids.reshape(-1)
    h = torch.bmm(w1[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[flat], glu(h).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return out.view(-1, H, K).sum(2)


@program
def R22_slots_and_tokens_swapped(x, gate, w1, w2):
    x = x[:K]
    weights, ids = soft(x, gate)
    flat = ids.reshape(-1)
    h = torch.bmm(w1[flat], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[flat], glu(h).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return out.view(K, -1, H).sum(0)


# ---- R7: memory known under another name


def written_through(alias: Callable[[Tensor], Tensor]) -> Program:
    """A block whose hidden states are doubled, through an alias, after they were gathered."""

    def run(x, gate, w1, w2):
        x = x * 1

        def between(**_):
            alias(x).mul_(-2)

        return batched(x, *soft(x, gate), w1, w2, between=between)

    return run


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "data": lambda x: x.data,
    "real": lambda x: x.real,
    "as_strided": lambda x: x.as_strided((4,), (1,)),
    "tensor_split": lambda x: x.tensor_split(2)[0],
    "hsplit": lambda x: x.hsplit(2)[1],
    "unbind": lambda x: x.unbind(0)[3],
    "iteration": lambda x: list(x)[3],
    "unfold": lambda x: x.unfold(0, 2, 2),
    "swapaxes": lambda x: torch.swapaxes(x, 0, 1),
    "view_as_other_dtype": lambda x: x.view(torch.int32),
    "same_dtype": lambda x: x.float(),
    "expanded": lambda x: x.expand(1, -1, -1),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "dropout_of_nothing": lambda x: F.dropout(x, 0.5, training=False),
    "part_of_a_dropout_of_nothing_in_training": lambda x: F.dropout(x, 0.0)[2:5],
    "identity_module": lambda x: nn.Identity()(x),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(1))[0],
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "sum_to_size": lambda x: x.sum_to_size(T, H),
    "slices": lambda x: x[2:5, ::2],
    "integer_index": lambda x: x[3],
    "aten_alias": lambda x: torch.ops.aten.alias.default(x),
    "aten_slice": lambda x: torch.ops.aten.slice.Tensor(x, 0, 1, 3),
    "as_tensor": lambda x: torch.as_tensor(x),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
}
PROGRAMS.update({f"R7_written_through_{name}": written_through(alias) for name, alias in ALIASES.items()})


# ---- R8: a write that is not seen


def written_by(write: Callable[[Tensor], Any]) -> Program:
    """A block whose hidden states are written after they were gathered."""

    def run(x, gate, w1, w2):
        x = x * 1

        def between(**_):
            write(x)

        return batched(x, *soft(x, gate), w1, w2, between=between)

    return run


def _split_out(x: Tensor) -> None:
    torch.topk(x[:, :4], 2, out=(x[:, 4:6], torch.empty(T, 2, dtype=torch.long)))


def _frexp(x: Tensor) -> None:
    torch.frexp(torch.full((T, H), 6.0), out=(x, torch.empty(T, H, dtype=torch.int32)))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "foreach_mul": lambda x: torch._foreach_mul_([x], 0.5),
    "foreach_copy": lambda x: torch._foreach_copy_([x], [torch.ones(T, H)]),
    "foreach_zero_of_many": lambda x: torch._foreach_zero_([torch.ones(3), x]),
    "out": lambda x: torch.mul(x.clone(), 2.0, out=x),
    "out_pair": _frexp,
    "out_pair_of_views": _split_out,
    "leaky_relu_module": nn.LeakyReLU(0.1, inplace=True),
    "relu_module": nn.ReLU(inplace=True),
    "hardtanh_module": nn.Hardtanh(-0.1, 0.1, inplace=True),
    "relu_positional": lambda x: F.relu(x, True),
    "leaky_relu_positional": lambda x: F.leaky_relu(x, 0.1, True),
    "elu_keyword": lambda x: F.elu(x, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.0, 1.0, True),
    "dropout": lambda x: F.dropout(x, 1.0, True, True),
    "imod": lambda x: operator.imod(x, 0.5),
    "ipow": lambda x: operator.ipow(x, 2),
    "ifloordiv": lambda x: operator.ifloordiv(x, 0.5),
    "setitem": lambda x: x.__setitem__(slice(2, 5), 0.0),
    "setitem_mask": lambda x: x.__setitem__(x > 0, 0.0),
    "setitem_of_index": lambda x: x.__setitem__(torch.tensor([1, 3]), 0.0),
    "copy": lambda x: x.copy_(torch.ones(T, H)),
    "index_copy": lambda x: x.index_copy_(0, torch.tensor([1]), torch.ones(1, H)),
    "scatter": lambda x: x.scatter_(0, torch.zeros(1, H, dtype=torch.long), 5.0),
    "swap_by_data": lambda x: x.data.zero_(),
    "normal": lambda x: nn.init.normal_(x),
    "renorm": lambda x: x.renorm_(2, 0, 0.1),
    "addmm": lambda x: x.addmm_(torch.ones(T, 3), torch.ones(3, H)),
    "masked_fill": lambda x: x.masked_fill_(x > 0, 0.0),
    "lerp": lambda x: x.lerp_(torch.ones(T, H), 0.5),
    "clip": lambda x: torch.clip_(x, -0.1, 0.1),
    "aten_add": lambda x: torch.ops.aten.add_.Tensor(x, x),
    "aten_out": lambda x: torch.ops.aten.mul.out(x, 2.0 * torch.ones(()), out=x),
    "running_mean": lambda x: F.batch_norm(torch.ones(4, H), x[0], torch.ones(H), training=True),
    "max_norm": lambda x: F.embedding(torch.tensor([0, 1]), x, max_norm=0.1),
    "uniform": lambda x: x.uniform_(0.9, 1.1),
}
PROGRAMS.update({f"R8_written_by_{name}": written_by(write) for name, write in WRITES.items()})


@program
def R8_foreach_writes_the_weights(x, gate, w1, w2):
    w1 = w1 * 1

    def between(**_):
        torch._foreach_mul_([w1], 0.5)

    return batched(x, *soft(x, gate), w1, w2, between=between)


@program
def R8_iand_of_the_ids(x, gate, w1, w2):
    def between(ids, **_):
        ids &= 3

    return batched(x, *soft(x, gate), w1, w2, between=between)


@program
def R8_imod_of_the_ids(x, gate, w1, w2):
    def between(ids, **_):
        ids %= 3

    return batched(x, *soft(x, gate), w1, w2, between=between)


@program
def R8_rows_written_in_a_list(x, gate, w1, w2):
    def between(h, **_):
        torch._foreach_add_([h], 1.0)

    return batched(x, *soft(x, gate), w1, w2, between=between)


@program
def R8_unknown_write_of_the_rows(x, gate, w1, w2):
    def between(h, **_):
        h.erfinv_()
        h.nan_to_num_(0.5)

    return grouped(x, *soft(x, gate), w1, w2, between=between)


@program
def R8_offsets_written(x, gate, w1, w2):
    def between(offsets, **_):
        offsets[: E - 1] = 0

    return grouped(x, *soft(x, gate), w1, w2, between=between)


@program
def R8_permutation_written(x, gate, w1, w2):
    def between(perm, **_):
        perm.copy_(perm.flip(0))

    return grouped(x, *soft(x, gate), w1, w2, between=between)


@program
def R8_weights_written(x, gate, w1, w2):
    def between(weights, **_):
        weights.t().mul_(2.0)

    return grouped(x, *soft(x, gate), w1, w2, between=between)


# ---- R10, R12: two draws, another order


@program
def R10_random_ids_drawn_twice(x, gate, w1, w2):
    weights, _ = soft(x, gate)
    first, second = torch.randint(0, E, (T * K,)), torch.randint(0, E, (T * K,))
    h = torch.bmm(w1[first], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[second], glu(h).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


@program
def R10_random_weights_in_the_sum(x, gate, w1, w2):
    _, ids = soft(x, gate)
    return batched(x, torch.rand(T, K) / torch.rand(T, K).sum(-1, keepdim=True), ids, w1, w2)


@program
def R10_dropout_drawn_twice(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, F.dropout(weights, 0.5) / F.dropout(weights, 0.5).sum(-1, keepdim=True).add(1), ids, w1, w2)


def by_ramp(ramp: Callable[[], Tensor]) -> Program:
    """Rows gathered by ``ramp() // K``."""

    def run(x, gate, w1, w2):
        weights, ids = soft(x, gate)
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x[ramp() // K].unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[flat], glu(h).unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    return run


R = T * K
PROGRAMS["R12_ramp"] = by_ramp(lambda: torch.arange(R))
PROGRAMS["R12_reversed_ramp"] = by_ramp(lambda: torch.arange(start=R - 1, end=-1, step=-1))
PROGRAMS["R12_flipped_ramp"] = by_ramp(lambda: torch.arange(R).flip(0))
PROGRAMS["R12_ramp_from_one"] = by_ramp(lambda: torch.arange(1, R + 1) % R)
PROGRAMS["R12_ramp_by_twos"] = by_ramp(lambda: torch.arange(0, 2 * R, 2) // 2 % 5)
PROGRAMS["R12_ramp_of_floats"] = by_ramp(lambda: (torch.arange(R, dtype=torch.float32) * 0.5).long())


@program
def R12_tokens_repeated_in_blocks(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    flat = ids.reshape(-1)
    h = torch.bmm(w1[flat], x.repeat(K, 1).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[flat], glu(h).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


PROGRAMS.update(
    {
        f"R12_{name}": lambda x, gate, w1, w2, options=options: grouped(x, *soft(x, gate), w1, w2, **options)
        for name, options in {
            "descending_sort": dict(sort=lambda flat: torch.sort(flat, descending=True)),
            "weights_of_the_inverse": dict(gather=lambda perm: perm.argsort()),
            "inverse_of_the_inverse": dict(undo=lambda inverse: inverse.argsort()),
            "offsets_one_too_high": dict(offset=-1),
            "tokens_by_remainder": dict(tokens=lambda perm: perm % T),
            "tokens_by_another_k": dict(tokens=lambda perm: perm // (2 * K)),
            "histogram_of_other_range": dict(count=lambda flat: torch.histc(flat.float(), bins=E, min=0, max=E)),
            "histogram_of_other_ids": dict(count=lambda flat: torch.bincount(flat.flip(0) // 2 * 2, minlength=E)),
        }.items()
    }
)


# ---- R13, R14, R20: ids outside of the range, narrow dtypes, ids counted once


@program
def R13_negative_ids_wrap(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, weights, torch.where(weights < 0.2, -1, ids), w1, w2)


@program
def R13_all_ids_negative(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, weights, ids - E, w1, w2)


@program
def R13_ids_from_a_table(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, weights, (torch.arange(E) - 3)[ids], w1, w2)


@program
def R13_ids_clamped_to_fewer(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, weights, ids.clamp(0, E - 3), w1, w2)


@program
def R14_rows_through_float8(x, gate, w1, w2):
    return batched(x, *soft(x, gate), w1, w2, act=lambda h: glu(h).to(torch.float8_e4m3fn).to(h.dtype))


@program
def R14_rows_through_bfloat16(x, gate, w1, w2):
    return batched(x, *soft(x, gate), w1, w2, act=lambda h: glu(h).to(torch.bfloat16).to(h.dtype))


@program
def R14_hidden_through_bfloat16(x, gate, w1, w2):
    return batched(x.bfloat16().float(), *soft(x, gate), w1, w2)


@program
def R14_weights_through_half(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, (weights * 1e-7).half().float() * 1e6, ids, w1, w2)


@program
def R14_weights_through_integers(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    return batched(x, (weights * 9).int().float(), ids, w1, w2)


@program
def R14_scores_through_bfloat16(x, gate, w1, w2):
    return batched(x, *choose(F.linear(x, gate).softmax(-1).bfloat16()), w1, w2)


def many_experts(gate, w1, w2):
    """200 different experts, so that an id may not fit in int8."""
    scale = torch.arange(200).view(-1, 1)
    return gate.repeat(25, 1) * scale, w1.repeat(25, 1, 1) * scale.unsqueeze(-1) / 200, w2.repeat(25, 1, 1)


def through(narrow: torch.dtype) -> Program:
    """Ids that are cast to ``narrow`` and back."""

    def run(x, gate, w1, w2):
        gate, w1, w2 = many_experts(gate, w1, w2)
        ids = torch.topk(F.linear(x, gate), K, -1)[1]
        return batched(x, torch.ones(T, K), ids.to(narrow).long(), w1, w2)

    return run


PROGRAMS["R14_ids_through_int8"] = through(torch.int8)
PROGRAMS["R14_ids_through_int32"] = through(torch.int32)
PROGRAMS["R14_ids_through_float8"] = through(torch.float8_e5m2)
PROGRAMS["R14_ids_through_bool"] = through(torch.bool)
PROGRAMS["R14_ids_through_bfloat16"] = through(torch.bfloat16)


def one_hot_counts(flat):
    """torchtitan's counts: right when a token's ids are distinct."""
    return torch.zeros(T, E, dtype=torch.bool).scatter(1, flat.view(-1, K), True).sum(0)


@program
def R20_one_hot_counts_of_distinct_ids(x, gate, w1, w2):
    return grouped(x, *soft(x, gate), w1, w2, count=one_hot_counts)


@program
def R20_one_hot_counts_of_equal_ids(x, gate, w1, w2):
    weights, ids = soft(x, gate)
    rows = grouped(x, weights, ids // 4 * 4, w1, w2, count=one_hot_counts, combine=lambda out, perm: out)
    first = torch.zeros(T, E, dtype=torch.bool).scatter(1, ids // 4 * 4, True).sum()
    return rows * (torch.arange(T * K) < first).unsqueeze(-1)  # rows behind the last offset hold anything


# ---- R18: attention


def attention(query, **options: Any) -> Program:
    """Attention over repeated key and value heads [1, 2 -> 8, T, 16]; ``query(x, key)`` gives the query."""

    def run(x, gate, w1, w2):
        def heads(value):
            return value.view(1, T, 2, 16).transpose(1, 2).repeat_interleave(4, 1)

        key = heads(x)
        return F.scaled_dot_product_attention(query(x, key), key, heads(x + 1), **options)

    return run


PROGRAMS["R18_query_of_its_own"] = attention(lambda x, key: torch.cat([x.view(1, T, 2, 16).transpose(1, 2)] * 4, 1))
PROGRAMS["R18_query_is_the_repeated_key"] = attention(lambda x, key: key)
PROGRAMS["R18_query_is_a_product_of_the_key"] = attention(lambda x, key: key * 2)
PROGRAMS["R18_query_of_one_head"] = attention(lambda x, key: x[None, None, :, :16])
PROGRAMS["R18_query_of_one_head_causal"] = attention(lambda x, key: x[None, None, :, :16], is_causal=True)
PROGRAMS["R18_mask_is_the_query"] = attention(lambda x, key: key, attn_mask=torch.ones(T, T).tril())


@program
def R18_value_is_the_repeated_key(x, gate, w1, w2):
    key = x.view(1, T, 2, 16).transpose(1, 2).repeat_interleave(4, 1)
    query = torch.cat([x.view(1, T, 2, 16).transpose(1, 2)] * 4, 1)
    return F.scaled_dot_product_attention(query, key, key)


@program
def R18_key_is_written_before_the_attention(x, gate, w1, w2):
    source = (x * 1).view(1, T, 2, 16).transpose(1, 2)
    key, value = source.repeat_interleave(4, 1), (source + 1).repeat_interleave(4, 1)
    source.swapaxes(1, 2).mul_(3.0)
    query = torch.cat([x.view(1, T, 2, 16).transpose(1, 2)] * 4, 1)
    return F.scaled_dot_product_attention(query, key, value)


@program
def R18_key_is_used_twice(x, gate, w1, w2):
    key = x.view(1, T, 2, 16).transpose(1, 2).repeat_interleave(4, 1)
    query = torch.cat([x.view(1, T, 2, 16).transpose(1, 2)] * 4, 1)
    return F.scaled_dot_product_attention(query, key, key + 1), key


# ---- R21: logits that are no numbers


def with_logits(change: Callable[[Tensor], Tensor], router: Callable[[Tensor], Any], tail: Program) -> Program:
    """A block whose logits are not all finite."""

    def run(x, gate, w1, w2):
        return tail(x, *router(change(F.linear(x, gate))), w1, w2)

    return run


def _at(value: float, tokens: tuple[int, ...], experts: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    place = torch.zeros(T, E, dtype=torch.bool)
    place[tuple(torch.meshgrid(torch.tensor(tokens), torch.tensor(experts), indexing="ij"))] = True
    return lambda logits: torch.where(place.to(logits.device), value, logits)


def _renormalised(weights, ids):
    return weights / weights.sum(-1, keepdim=True), ids


def _sigmoid_biased(logits):
    scores = logits.sigmoid()
    ids = (scores + torch.linspace(-0.5, 0.5, E)).topk(K, -1)[1]
    return _renormalised(scores.gather(1, ids), ids)


def _topk_softmax(logits):
    values, ids = logits.topk(K, -1)
    return values.softmax(-1), ids


LOGITS = {
    "one_nan": _at(float("nan"), (1,), (3,)),
    "a_row_of_nan": _at(float("nan"), (1,), tuple(range(E))),
    "all_nan": _at(float("nan"), tuple(range(T)), tuple(range(E))),
    "plus_inf": _at(float("inf"), (2,), (5,)),
    "minus_inf": _at(float("-inf"), (2, 3), (5,)),
    "a_row_of_minus_inf": _at(float("-inf"), (2,), tuple(range(E))),
    "a_row_of_plus_inf": _at(float("inf"), (2,), tuple(range(E))),
}
ROUTERS = {
    "softmax": lambda logits: choose(logits.softmax(-1)),
    "softmax_renormalised": lambda logits: _renormalised(*choose(logits.softmax(-1))),
    "topk_softmax": _topk_softmax,
    "sigmoid": lambda logits: choose(logits.sigmoid()),
    "sigmoid_biased": _sigmoid_biased,
}


def _tail_by_name(name: str) -> Program:
    return {"batched": batched, "grouped": grouped}[name]


PROGRAMS.update(
    {
        f"R21_{logits}_{router}_{tail}": with_logits(LOGITS[logits], ROUTERS[router], _tail_by_name(tail))
        for logits in LOGITS
        for router in ROUTERS
        for tail in ("batched", "grouped")
        # Scores that are all 1: which of equal experts torch.topk takes is not defined.
        if (logits, router) != ("a_row_of_plus_inf", "sigmoid")
    }
)


@program
def R21_weights_of_zero_over_zero(x, gate, w1, w2):
    weights, ids = choose(torch.sigmoid(F.linear(x, gate) - torch.where(torch.arange(T) == 1, 1e4, 0.0).unsqueeze(-1)))
    return batched(x, *_renormalised(weights, ids), w1, w2)


@program
def R21_hidden_state_of_nan(x, gate, w1, w2):
    logits = F.linear(x, gate)
    x = torch.where(torch.arange(T).unsqueeze(-1) == 4, float("nan"), x)
    return batched(x, *choose(logits.softmax(-1)), w1, w2)


@program
def R21_expert_of_nan(x, gate, w1, w2):
    w1 = torch.where(torch.arange(E).view(-1, 1, 1) == 2, float("nan"), w1)
    return grouped(x, *soft(x, gate), w1, w2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_eager(name):
    assert_same(PROGRAMS[name], *inputs())


# ---- R9: graph inputs of one storage


def written_between(x, gate, w1, w2, other):
    """``other`` is written after the hidden states were gathered."""

    def between(**_):
        other.mul_(-2.0)

    return batched(x, *soft(x, gate), w1, w2, between=between)


def overlapping(kind: str) -> tuple[Tensor, ...]:
    x, gate, w1, w2 = inputs()
    others = {
        "the same tensor": lambda: x,
        "a flat view": lambda: x.view(-1),
        "a transposed view": lambda: x.t(),
        "a part": lambda: x[3:5],
        "the first weight": lambda: w1,
        "a part of the second weight": lambda: w2[1:3],
        "other memory": lambda: torch.ones(T),
    }
    return x, gate, w1, w2, others[kind]()


OVERLAPS = ("the same tensor", "a flat view", "a transposed view", "a part", "the first weight",
            "a part of the second weight", "other memory")  # fmt: skip


@pytest.mark.parametrize("kind", OVERLAPS)
def test_inputs_of_one_storage(kind):
    assert_same(written_between, *overlapping(kind))


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("first", ["separate", "overlapping"])
def test_separate_and_overlapping_inputs_of_one_compiled_function(kind, first):
    """The same shapes once in separate storages and once in one: whichever came first, both are right."""
    shared = overlapping(kind)
    calls = [tuple(value.clone(memory_format=torch.preserve_format) for value in shared), shared]
    if first == "overlapping":
        calls.reverse()
    with torch.no_grad(), quiet():
        run = compiled(written_between)
        for args in calls:
            expected_args, own_args = copy.deepcopy(args), copy.deepcopy(args)
            expected = written_between(*expected_args)
            problem = difference((run(*own_args), own_args), (expected, expected_args))
            assert problem is None, problem


class Counting(nn.Module):
    """A block that counts tokens per expert in a buffer, as routers with a balancing bias do."""

    def __init__(self) -> None:
        super().__init__()
        _, gate, w1, w2 = inputs()
        self.gate, self.w1, self.w2 = (nn.Parameter(value) for value in (gate, w1, w2))
        self.register_buffer("tokens_per_expert", torch.zeros(E))

    def forward(self, x):
        weights, ids = soft(x, self.gate)
        self.tokens_per_expert.add_(torch.bincount(ids.reshape(-1), minlength=E))
        return batched(x, weights, ids, self.w1, self.w2)


def test_a_counted_buffer_does_not_stop_the_block():
    outcome = check(lambda module, x: module(x), Counting(), inputs()[0])
    assert outcome.problem is None and outcome.fused == 1, outcome


# ---- R15, R16: contexts


def frozen_router(x, gate, w1, w2):
    logits = F.linear(x, gate)
    with torch.no_grad():
        weights, ids = torch.topk(logits.softmax(-1), K, -1)
    return batched(x, weights, ids, w1, w2)


def test_a_router_under_no_grad_gets_no_gradient():
    x, *rest = inputs()
    leaves = [value.requires_grad_() for value in rest]
    frozen_router(x, *leaves).sum().backward()
    assert leaves[0].grad is None
    expected = [value.grad for value in leaves[1:]]
    for value in leaves:
        value.grad = None
    with quiet():
        compiled(frozen_router)(x, *leaves).sum().backward()
    assert leaves[0].grad is None
    assert difference([value.grad for value in leaves[1:]], expected) is None


def one_token(x, gate, w1, w2):
    """The block for a single token [H]."""
    weights, ids = soft(x.unsqueeze(0), gate)
    h = torch.bmm(w1[ids.reshape(-1)], x.unsqueeze(0).repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[ids.reshape(-1)], glu(h).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def scalar(x, gate, w1, w2):
    return batched(x, *soft(x, gate), w1, w2).square().sum()


TRANSFORMS: dict[str, Program] = {
    "vmap_over_tokens": torch.func.vmap(one_token, in_dims=(0, None, None, None)),
    "vmap_over_batches": lambda x, gate, w1, w2: torch.func.vmap(lambda part: batched(part, *soft(part, gate), w1, w2))(
        x.view(2, T // 2, H)
    ),
    "grad": torch.func.grad(scalar, argnums=(0, 2)),
    "grad_and_value": torch.func.grad_and_value(scalar, argnums=1),
    "jvp": lambda x, gate, w1, w2: torch.func.jvp(
        lambda value: batched(value, *soft(value, gate), w1, w2), (x,), (torch.ones_like(x),)
    ),
    "vjp": lambda x, gate, w1, w2: torch.func.vjp(lambda value: batched(value, *soft(value, gate), w1, w2), x)[1](
        torch.ones_like(x)
    ),
    "jacrev": lambda x, gate, w1, w2: torch.func.jacrev(lambda value: scalar(value, gate, w1, w2))(x),
    "block_beside_a_vmap": lambda x, gate, w1, w2: (
        batched(x, *soft(x, gate), w1, w2),
        torch.func.vmap(one_token, in_dims=(0, None, None, None))(x, gate, w1, w2),
    ),
    "functional_call": lambda x, gate, w1, w2: torch.func.functional_call(
        Counting(), {"gate": gate, "w1": w1, "w2": w2}, (x,)
    ),
}


def _runs(function: Program, *args: Any) -> bool:
    """Whether Dynamo and torch alone can compile ``function``; what they cannot is no fault of the passes."""
    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(function, backend="eager")(*copy.deepcopy(args))
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_a_function_transform(name):
    function = TRANSFORMS[name]
    outcome = check(function, *inputs())
    if outcome.crashed and not _runs(function, *inputs()):
        pytest.skip("torch.compile(backend='eager') does not run it either")
    assert outcome.problem is None, outcome.problem


class Scaled(Tensor):
    """A weight stored as int8 codes and a scale, as quantisation libraries store it: a traceable wrapper subclass."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, strides=codes.stride())

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return Scaled(inner["codes"], inner["scale"])

    def dequantised(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            (value,) = args
            return Scaled(value.codes, value.scale)
        plain = torch.utils._pytree.tree_map_only(Scaled, Scaled.dequantised, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def scaled(weight: Tensor) -> Scaled:
    scale = weight.abs().amax() / 127
    return Scaled((weight / scale).round().to(torch.int8), scale)


@pytest.mark.parametrize("which", ["first", "second", "both"])
@pytest.mark.parametrize("tail", ["batched", "grouped"])
def test_weights_of_a_tensor_subclass(which, tail):
    x, gate, w1, w2 = inputs()
    w1 = scaled(w1) if which in ("first", "both") else w1
    w2 = scaled(w2) if which in ("second", "both") else w2
    block = _tail_by_name(tail)

    def run(x, gate, w1, w2):
        return block(x, *soft(x, gate), w1, w2)

    with torch.no_grad(), quiet():
        expected = run(x, gate, w1, w2)
        got = compiled(run)(x, gate, w1, w2)
    assert difference(got, expected) is None


# ---- R19: written after the block, in training


def written_after(what: str) -> Program:
    """``what`` is written in place once the block has read it."""

    def run(x, gate, w1, w2):
        z = x * 1
        weights, ids = soft(z, gate)
        copies = {"hidden": z, "weights": weights * 1, "ids": ids, "first": w1 * 1, "second": w2 * 1, "output": None}
        y = batched(z, copies["weights"], ids, copies["first"], copies["second"])
        value = y if what == "output" else copies[what]
        value.mul_(2) if what == "ids" else value.add_(1.0)
        return y, value, z

    return run


@pytest.mark.parametrize("what", ["hidden", "weights", "ids", "first", "second", "output"])
def test_written_after_the_block_in_training(what):
    """Eager torch raises in backward where it saved what was written; the compiled program raises then or is right."""
    function = written_after(what)

    def train(run):
        leaves = [value.requires_grad_() for value in inputs()]
        results = run(*leaves)
        try:
            sum(value.square().sum() for value in results if value.is_floating_point()).backward()
        except RuntimeError as error:
            return str(error)
        return [value.grad for value in leaves]

    with quiet():
        expected, got = train(function), train(compiled(function))
    if isinstance(expected, str):
        assert "inplace operation" in expected
        assert isinstance(got, str) or got is not None
    else:
        assert not isinstance(got, str), got
        assert difference(got, expected) is None
