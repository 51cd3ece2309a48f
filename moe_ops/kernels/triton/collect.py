"""What stands between the products of a layer's backward besides the activation: gradients of rows to their tokens, and
sums of every expert's rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.combine import combine
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.util import cdiv, next_power_of_2, round_to, unit_stride

Tensor = torch.Tensor

SUM_ROWS, SUM_COLUMNS = 64, 64


@triton.jit
def _collect_kernel(
    rows,
    pair_to_row,
    x,
    weights,
    grad,
    grad_rows,
    dots,
    out,
    H,
    stride_x,
    stride_grad,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    COPY: tl.constexpr,
):
    """One program sums BLOCK_H columns of one token over its TOP_K rows, k ascending, every num_programs(1)-th block.

    With `weights` a row counts times its weight, and its product with the token, over all columns, goes to `dots`: then
    there is one program a token. With COPY the token itself, times the weights, takes the place of its rows' gradients,
    which nobody else reads; `grad_rows` get the rows of `grad`.
    Bytes: (R + T) H elements read, T H written, R H more with COPY and R H with `grad_rows`.
    """
    t = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_K)
    products = tl.zeros([BLOCK_K], tl.float32)
    for start in range(tl.program_id(1) * BLOCK_H, H, tl.num_programs(1) * BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        inside = h < H
        token = tl.load(x + t * stride_x + h, mask=inside, other=0.0)
        total = tl.zeros([BLOCK_H], tl.float32)
        for k in tl.static_range(TOP_K):
            row = tl.load(pair_to_row + t * TOP_K + k)
            y = tl.load(rows + row.to(tl.int64) * H + h, mask=(row >= 0) & inside, other=0.0).to(tl.float32)
            if weights is None:
                total += y
            else:
                total += y * tl.where(row >= 0, tl.load(weights + t * TOP_K + k).to(tl.float32), 0.0)
                product = tl.sum(tl.where(inside & (row >= 0), y * token.to(tl.float32), 0.0), axis=0)
                products = tl.where(slots == k, products + product, products)
        tl.store(out + t * H + h, round_to(total, out.dtype.element_ty), mask=inside)
        for k in tl.static_range(TOP_K):
            row = tl.load(pair_to_row + t * TOP_K + k)
            at, kept = row.to(tl.int64) * H + h, (row >= 0) & inside
            if COPY:
                if weights is None:
                    tl.store(rows + at, token, mask=kept)
                else:
                    weight = tl.load(weights + t * TOP_K + k).to(tl.float32)
                    tl.store(rows + at, round_to(token.to(tl.float32) * weight, rows.dtype.element_ty), mask=kept)
            if grad_rows is not None:
                tl.store(grad_rows + at, tl.load(grad + t * stride_grad + h, mask=inside, other=0.0), mask=kept)
    if weights is not None:
        tl.store(dots + t * TOP_K + slots, products, mask=slots < TOP_K)


def collect(
    grad_rows: Tensor,
    pair_to_row: Tensor,
    row_to_pair: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor | None,
    grad_output: Tensor | None,
    *,
    rows: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """As :func:`moe_ops.rows.collect`; rows past the last are uninitialised."""
    if not rows and topk_weights is None and grad_output is None:
        return combine(grad_rows, pair_to_row, None), None, None, None
    hidden_states = unit_stride(hidden_states)
    grad_output = None if grad_output is None else unit_stride(grad_output)
    (T, H), top_k = hidden_states.shape, pair_to_row.shape[1]
    out = hidden_states.new_empty((T, H))
    copies = None if grad_output is None else torch.empty_like(grad_rows)
    dots = None if topk_weights is None else hidden_states.new_empty((T, top_k), dtype=torch.float32)
    if out.numel():
        block_h = min(next_power_of_2(H), 1024)
        launch(
            _collect_kernel,
            (T, 1 if topk_weights is not None else cdiv(H, block_h)),
            grad_rows,
            pair_to_row,
            hidden_states,
            None if topk_weights is None else topk_weights.contiguous(),
            grad_output,
            copies,
            dots,
            out,
            H,
            hidden_states.stride(0),
            0 if grad_output is None else grad_output.stride(0),
            top_k,
            next_power_of_2(top_k),
            block_h,
            rows,
            num_warps=max(1, block_h // 256),
        )
    return out, grad_rows if rows else None, copies, dots


@triton.jit
def _expert_sums_kernel(
    rows,
    offsets,
    row_to_pair,
    weights,
    out,
    stride,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: COLUMNS of the sum of one expert's rows, in row order; with TOP_K > 0 row r is that of token
    row_to_pair[r] // TOP_K, times the weight of its pair if there are weights. Bytes: R N elements.
    """
    expert = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        exists = row < end
        if TOP_K > 0:
            pair = tl.load(row_to_pair + row, mask=exists, other=0)
            row = pair // TOP_K
        at = row.to(tl.int64)[:, None] * stride + column[None, :]
        value = tl.load(rows + at, mask=exists[:, None] & (column < N)[None, :], other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + pair, mask=exists, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(out + expert.to(tl.int64) * N + column, tl.sum(total, axis=0), mask=column < N)


def expert_sums(
    rows: Tensor,
    offsets: Tensor,
    row_to_pair: Tensor | None = None,
    pair_to_row: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> Tensor:
    """Sum of every expert's rows, f32 [E, N].

    Args:
        rows: [R, N], or with the places i32 [R] and [T, K] of sorted rows tokens [T, N], times the weights [T, K] if
            there are any.
        offsets: [E] i32 cumulative ends.
    """
    rows, E, N = unit_stride(rows), offsets.shape[0], rows.shape[1]
    out = rows.new_empty((E, N), dtype=torch.float32)
    if out.numel():
        launch(
            _expert_sums_kernel,
            (cdiv(N, SUM_COLUMNS), E),
            rows,
            offsets,
            row_to_pair,
            None if topk_weights is None else topk_weights.contiguous(),
            out,
            rows.stride(0),
            N,
            0 if pair_to_row is None else pair_to_row.shape[1],
            SUM_ROWS,
            SUM_COLUMNS,
            num_warps=4,
        )
    return out
