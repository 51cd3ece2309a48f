"""Sums of pairs written straight to the GPU that their token belongs to, and what is made of them there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.combine import sum_of_pairs, tile_of
from moe_ops.kernels.triton.util import cdiv, round_to, unit_stride


@triton.jit(do_not_specialize=["at"])
def _meet_kernel(peers, at, RANK: tl.constexpr, SIZE: tl.constexpr, SAY: tl.constexpr):
    """One program: 1 in word `at` + RANK of the other ranks' buffers, if SAY; then 1 in the words at `at` of this
    buffer is waited for, and taken back.

    Who sees the word sees what kernels and copies before this one wrote.
    """
    if SAY:
        for step in tl.static_range(1, SIZE):
            there = tl.load(peers + (RANK + step) % SIZE).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(there + at + RANK, 1, sem="release", scope="sys")
    here = tl.load(peers + RANK).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, SIZE):
        word = here + at + (RANK + step) % SIZE
        while tl.atomic_cas(word, 1, 0, sem="acquire", scope="sys") == 0:
            pass


def meet(peers: Tensor, at: int, rank: int, *, say: bool) -> None:
    """Wait for what the other ranks say.

    Args:
        peers: int64 ``[W]``, addresses of the ranks' buffers.
        at: of the words in a buffer, one for each rank that says something.
        rank: of this process.
        say: tell them first.
    """
    _meet_kernel[(1,)](peers, at, RANK=rank, SIZE=peers.shape[0], SAY=say, num_warps=1)


@triton.jit(do_not_specialize=["R", "tokens", "first", "number"])
def _deliver_kernel(
    rows_ptr,
    weights_ptr,
    pair_to_row_ptr,
    peers,
    R,
    H,
    stride_r,
    tokens,
    first,
    number,
    at,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program sums BLOCK_H columns of one of `number` tokens, as `_combine_kernel` does, for the token's rank.

    Token `first` + t belongs to rank (first + t) // tokens. Programs take tokens of the ranks by turns: sums that wait
    for a link stand beside those for this GPU's own memory. A program too many repeats the last token.
    Bytes: R H sizeof(element) read; H sizeof(element) for each token, those of others over the links.
    """
    per_turn = (number + SIZE - 1) // SIZE
    pid = tl.program_id(0)
    t = tl.minimum((pid % SIZE) * per_turn + pid // SIZE, number - 1)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if pair_to_row_ptr is None:
        acc = tl.load(rows_ptr + t.to(tl.int64) * stride_r + h, mask=h < H, other=0.0).to(tl.float32)
    else:
        acc = sum_of_pairs(rows_ptr, weights_ptr, pair_to_row_ptr, t, h, R, H, stride_r, TOP_K, BLOCK_H)
    owner = (first + t) // tokens
    place = (RANK * tl.cast(tokens, tl.int64) + first + t - owner * tokens) * H
    there = tl.load(peers + owner).to(tl.pointer_type(rows_ptr.dtype.element_ty))
    tl.store(tl.multiple_of(there, 16) + at + place + h, round_to(acc, rows_ptr.dtype.element_ty), mask=h < H)


def deliver(
    rows: Tensor,
    pair_to_row: Tensor | None,
    topk_weights: Tensor | None,
    *,
    peers: Tensor,
    at: int,
    tokens: int,
    first: int,
    rank: int,
) -> None:
    """Write sums over pairs to the ranks of their tokens.

    Args:
        rows: ``[R, H]`` bf16, fp16 or fp32, any row stride.
        pair_to_row: int32 ``[n, K]``, of tokens ``first`` to ``first + n`` of all ranks; outside ``[0, R)`` = dropped;
            None: rows are the sums.
        topk_weights: ``[n, K]`` any float dtype, or None for weights of 1.
        peers: int64 ``[W]``, addresses of the ranks' buffers.
        at: where in a buffer the results ``[W, tokens, H]`` of all ranks for one begin, in numbers of their dtype.
        tokens: T of every rank.
        rank: of this process.
    """
    R, H = rows.shape
    number, top_k = (R, 1) if pair_to_row is None else pair_to_row.shape
    size = peers.shape[0]
    if number == 0:
        return
    rows = unit_stride(rows)
    block_h, options = tile_of(rows, top_k, many=True)
    _deliver_kernel[(cdiv(number, size) * size, cdiv(H, block_h))](
        rows,
        None if topk_weights is None else topk_weights.contiguous(),
        None if pair_to_row is None else pair_to_row.contiguous(),
        peers,
        R,
        H,
        rows.stride(0),
        tokens,
        first,
        number,
        at,
        RANK=rank,
        SIZE=size,
        TOP_K=top_k,
        BLOCK_H=block_h,
        **options,
    )


@triton.jit(do_not_specialize=["T"])
def _sum_kernel(parts_ptr, out_ptr, T, H, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds BLOCK numbers of every part, in order and in fp32. Bytes: (SIZE + 1) T H sizeof(element)."""
    n = tl.cast(T, tl.int64) * H
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        acc += tl.load(parts_ptr + rank * n + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, round_to(acc, out_ptr.dtype.element_ty), mask=at < n)


def sum_parts(parts: Tensor) -> Tensor:
    """``[W, T, H]`` bf16, fp16 or fp32, contiguous, summed over W in order and in fp32, rounded once."""
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    block = 2048
    if out.numel():
        _sum_kernel[(cdiv(out.numel(), block),)](
            parts, out, *out.shape, SIZE=parts.shape[0], BLOCK=block, num_warps=block * parts.element_size() // 512
        )
    return out
