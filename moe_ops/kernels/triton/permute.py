"""Where every routed pair goes, and the copy that takes it there.

Pair p = t * TOP_K + k. Sorted rows: pairs ordered by expert, then by p. Batched slots: e * capacity + the pair's place
among e's pairs. Both are "count the pairs that come before mine", so the same kernels compute them, without atomics
and hence without run-to-run differences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meta.arch import TYPICAL
from moe_ops.counters import Row
from moe_ops.kernels.triton.act_quant import Beside, beside_arguments, fill, quantize_beside
from moe_ops.kernels.triton.block_scales import quantize_group, store_nv_rows
from moe_ops.kernels.triton.order import line_in_order
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.util import (
    CLEARED,
    cdiv,
    clear_part,
    count_pairs,
    is_counted,
    load_expert,
    next_power_of_2,
    pdl_release,
    pdl_wait,
    round_to,
    unit_stride,
)

COUNT_ALL_PAIRS = 4096  # up to here R^2 comparisons, spread over all multiprocessors, beat a second kernel
CHUNK = 128  # pairs ranked against one another at once in the large path
MULTIPROCESSORS = TYPICAL.multiprocessors  # about how many programs run side by side


@triton.jit(do_not_specialize=["R", "capacity", "T"])
def _place_small_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    counts_ptr,
    row_to_pair_ptr,
    pair_to_row_ptr,
    R,
    E,
    E_GLOBAL,
    capacity,
    hidden_ptr,
    q_ptr,
    scale_ptr,
    T,
    H,
    stride_h,
    load_ptr,
    cleared_ptr,
    CLEARED_COUNT,
    BATCHED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program places BLOCK_P items by comparing each with all R pairs; no program waits for another. Those behind
    them quantise rows.

    Items 0 .. R - 1 are the pairs, R .. R + E - 1 stand for the experts. With key = expert * R + p, the row of a pair
    is the number of smaller keys, and the cumulative end of expert e the number of keys below (e + 1) * R. Batched,
    only keys from expert * R on count. Dropped pairs sort last, so their rows are exactly the tail to fill with -1.
    Those that place pairs make words 0, if there are any.

    Comparisons: R (R + E). Bytes: 4 R (R + E) / BLOCK_P from L2, and 8 R + 4 E written.
    """
    pdl_wait(PDL)
    pdl_release(PDL)
    placing = (R + E + BLOCK_P - 1) // BLOCK_P
    if tl.program_id(0) >= placing:
        quantize_beside(tl.program_id(0) - placing, hidden_ptr, q_ptr, scale_ptr, T, H, stride_h, GROUP)
    else:
        counted = is_counted(load_ptr, True)
        item = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        is_pair = item < R
        expert = load_expert(topk_ids_ptr, expert_map_ptr, item, is_pair, E, E_GLOBAL)
        expert = tl.where(is_pair, expert, item - R)
        place = tl.where(is_pair, item, R)
        if BATCHED:
            first = expert * R
            length = place.to(tl.uint32)
        else:
            first = tl.zeros_like(expert)
            length = (expert * R + place).to(tl.uint32)
        smaller = tl.zeros([BLOCK_P, BLOCK_Q], tl.int32)
        for start in tl.range(0, R, BLOCK_Q, loop_unroll_factor=4):
            q = start + tl.arange(0, BLOCK_Q)
            key = load_expert(topk_ids_ptr, expert_map_ptr, q, q < R, E, E_GLOBAL) * R + q
            key = tl.where(q < R, key, 0x7FFFFFFF)
            smaller += ((key[None, :] - first[:, None]).to(tl.uint32) < length[:, None]).to(tl.int32)
        row = tl.sum(smaller, axis=1)

        is_expert = (item >= R) & (item < R + E)
        held = is_pair & (expert < E)
        if BATCHED:
            tl.store(counts_ptr + item - R, tl.minimum(row, capacity), mask=is_expert)
            row = tl.where(held & (row < capacity), expert * capacity + row, -1)
        else:
            tl.store(counts_ptr + item - R, row, mask=is_expert)
            tl.store(row_to_pair_ptr + row, tl.where(held, item, -1), mask=is_pair)
            row = tl.where(held, row, -1)
        tl.store(pair_to_row_ptr + item, row, mask=is_pair)
        count_pairs(load_ptr, counted, expert, tl.full([BLOCK_P], 1, tl.int32), is_pair & (row >= 0))
        if cleared_ptr is not None:
            clear_part(cleared_ptr, tl.program_id(0), placing, CLEARED_COUNT)


@triton.jit(do_not_specialize=["R"])
def _count_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    table_ptr,
    R,
    E,
    E_GLOBAL,
    cleared_ptr,
    CLEARED_COUNT,
    BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program counts the pairs of each expert among its BLOCK pairs: row `program` of table i32 [blocks, BLOCK_E].
    All together make words 0, if there are any.

    Bytes: R sizeof(id) + 4 BLOCK_E blocks.
    """
    pdl_wait(PDL)
    pdl_release(PDL)
    block = tl.program_id(0)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, BLOCK, BLOCK_Q):
        p = block * BLOCK + start + tl.arange(0, BLOCK_Q)
        expert = load_expert(topk_ids_ptr, expert_map_ptr, p, p < R, E, E_GLOBAL)
        counts += tl.histogram(tl.where(expert < E, expert, 0), BLOCK_E, mask=expert < E)
    tl.store(table_ptr + block * BLOCK_E + tl.arange(0, BLOCK_E), counts)
    if cleared_ptr is not None:
        clear_part(cleared_ptr, block, tl.num_programs(0), CLEARED_COUNT)


@triton.jit(do_not_specialize=["R", "capacity", "blocks"])
def _place_kernel(
    topk_ids_ptr,
    expert_map_ptr,
    table_ptr,
    counts_ptr,
    row_to_pair_ptr,
    pair_to_row_ptr,
    R,
    E,
    E_GLOBAL,
    capacity,
    blocks,
    load_ptr,
    BATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program places its BLOCK pairs, after summing for itself the count table up to its own row.

    `next` [BLOCK_E] is the row of each expert's next pair. CHUNK pairs at a time are ranked by comparing all of them,
    placed at next[expert] + rank, and then counted into `next`. Program 0 also writes the offsets (or counts), and adds
    to the layer's counters.

    Comparisons: R CHUNK. Bytes: R sizeof(id) + 4 BLOCK_E blocks^2 from L2, and 8 R + 4 E written.
    """
    pdl_wait(PDL)
    pdl_release(PDL)
    block = tl.program_id(0)
    counted = is_counted(load_ptr, block == 0)
    e = tl.arange(0, BLOCK_E)
    before = tl.zeros([BLOCK_B, BLOCK_E], tl.int32)
    total = tl.zeros([BLOCK_B, BLOCK_E], tl.int32)
    for start in range(0, blocks, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        counts = tl.load(table_ptr + b[:, None] * BLOCK_E + e[None, :], mask=(b < blocks)[:, None], other=0)
        total += counts
        before += tl.where((b < block)[:, None], counts, 0)
    next = tl.sum(before, axis=0)
    totals = tl.sum(total, axis=0)
    if BATCHED:
        kept = tl.minimum(totals, capacity)
        result = kept
    else:
        kept = totals
        result = tl.cumsum(totals, axis=0)
        next += result - totals
    if block == 0:
        tl.store(counts_ptr + e, result, mask=e < E)
        count_pairs(load_ptr, counted, e, kept, e < E)

    i = tl.arange(0, CHUNK)
    if not BATCHED:
        rows = tl.sum(totals, axis=0)
        for start in range(0, BLOCK, CHUNK):
            p = block * BLOCK + start + i
            tl.store(row_to_pair_ptr + p, tl.full([CHUNK], -1, tl.int32), mask=(p >= rows) & (p < R))
    p = block * BLOCK + i
    following = load_expert(topk_ids_ptr, expert_map_ptr, p, p < R, E, E_GLOBAL)
    for start in range(0, BLOCK, CHUNK):
        p = block * BLOCK + start + i
        expert = following
        # The next chunk's ids travel while this one is placed; past the block they are read and not used.
        following = load_expert(topk_ids_ptr, expert_map_ptr, p + CHUNK, p + CHUNK < R, E, E_GLOBAL)
        held = expert < E
        earlier = (expert[:, None] == expert[None, :]) & (i[:, None] < i[None, :])
        bin = tl.where(held, expert, 0)
        row = tl.gather(next, bin, axis=0) + tl.sum(earlier.to(tl.int32), axis=0)
        next += tl.histogram(bin, BLOCK_E, mask=held)
        if BATCHED:
            row = tl.where(held & (row < capacity), expert * capacity + row, -1)
        else:
            tl.store(row_to_pair_ptr + row, p, mask=held)
            row = tl.where(held, row, -1)
        tl.store(pair_to_row_ptr + p, row, mask=p < R)


def place_pairs(
    topk_ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None,
    capacity: int | None,
    pdl: bool,
    rows: Beside | None = None,
    load: Row | None = None,
    cleared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Give every pair its row (capacity None) or its slot: one kernel up to `COUNT_ALL_PAIRS` pairs, else two. That one
    may quantise `rows` too. Pairs that get one are counted in `load`. The words `cleared` i32 become 0, if there are
    pairs.

    Returns:
        (offsets, row_to_pair, pair_to_row), or with a capacity (counts clamped to it, None, slots).
    """
    T, TOP_K = topk_ids.shape
    R, E, device = T * TOP_K, num_experts, topk_ids.device
    counts = torch.empty(E, dtype=torch.int32, device=device)
    row_to_pair = None if capacity is not None else torch.empty(R, dtype=torch.int32, device=device)
    pair_to_row = torch.empty((T, TOP_K), dtype=torch.int32, device=device)
    if R == 0:
        return counts.zero_(), row_to_pair, pair_to_row
    ids = (topk_ids.contiguous(), None if expert_map is None else expert_map.contiguous())
    outputs = (counts, row_to_pair, pair_to_row)
    sizes = (R, E, 0 if expert_map is None else expert_map.shape[0])
    options = {"PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    words = {"cleared_ptr": cleared, "CLEARED_COUNT": 0 if cleared is None else cleared.numel()}
    batched = capacity is not None
    if R <= COUNT_ALL_PAIRS:
        block_q = max(16, min(128, next_power_of_2(R)))
        launch(
            _place_small_kernel,
            (cdiv(R + E, 32) + (0 if rows is None else rows.programs),),
            *ids,
            *outputs,
            *sizes,
            capacity or 0,
            **beside_arguments(rows),
            T=T,
            load_ptr=load,
            **words,
            BATCHED=batched,
            BLOCK_P=32,
            BLOCK_Q=block_q,
            **options,
        )
        return counts, row_to_pair, pair_to_row
    block = _block_of_pairs(R)
    blocks = cdiv(R, block)
    block_e = max(32, next_power_of_2(E))
    table = torch.empty((blocks, block_e), dtype=torch.int32, device=device)
    counting = {"BLOCK": block, "BLOCK_Q": min(512, block), "BLOCK_E": block_e}
    launch(_count_kernel, (blocks,), *ids, table, *sizes, **words, **counting, **options)
    launch(
        _place_kernel,
        (blocks,),
        *ids,
        table,
        *outputs,
        *sizes,
        capacity or 0,
        blocks,
        load_ptr=load,
        BATCHED=batched,
        BLOCK=block,
        BLOCK_E=block_e,
        BLOCK_B=max(1, 4096 // block_e),
        CHUNK=CHUNK,
        **options,
    )
    return counts, row_to_pair, pair_to_row


def _block_of_pairs(R: int) -> int:
    """Pairs per program of the large path: one program per multiprocessor, until the table would have too many rows.

    Every program reads the whole table (R / block rows) and walks its own chunks, so block grows with the square root.
    """
    block = CHUNK
    while cdiv(R, block) > max(MULTIPROCESSORS, block // 8):
        block *= 2
    return block


def quantises_beside(topk_ids: torch.Tensor) -> bool:
    """Whether the sort of these pairs is one kernel, which quantises rows as well."""
    return 0 < topk_ids.numel() <= COUNT_ALL_PAIRS


def sort_pairs(
    topk_ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    *,
    pdl: bool = False,
    rows: Beside | None = None,
    load: Row | None = None,
    cleared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stable counting sort of the pairs by expert.

    Args:
        topk_ids: [T, K] i32 or i64; ids outside the experts held here are dropped.
        expert_map: i32 or i64 [E_global] -> local expert or -1, or None.
        pdl: launch as programmatic dependents of the kernels before.
        rows: what to quantise as well, in the same kernel up to `COUNT_ALL_PAIRS` pairs.
        load: the layer's counters, or None.
        cleared: i32 words that become 0, if there are pairs, or None.

    Returns:
        (offsets i32 [E] cumulative ends, row_to_pair i32 [R] with -1 past offsets[-1], pair_to_row i32 [T, K] with -1
        for dropped pairs).
    """
    beside = rows if quantises_beside(topk_ids) else None
    offsets, row_to_pair, pair_to_row = place_pairs(topk_ids, num_experts, expert_map, None, pdl, beside, load, cleared)
    if rows is not None and beside is None:
        fill(rows, pdl)
    return offsets, row_to_pair, pair_to_row


@triton.jit
def store_row(
    x,
    weight,
    row,
    kept,
    h_start,
    rows_ptr,
    scale_ptr,
    H,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write columns h_start .. h_start + BLOCK_H - 1 of a token to `row`, times `weight` if given, if `kept`.

    The product is rounded to the token's dtype. GROUP > 0: then quantised with a scale for every GROUP columns.
    """
    y = x
    if weight is not None:
        y = round_to(x.to(tl.float32) * weight, x.dtype)
    if GROUP > 0:
        group = tl.arange(0, BLOCK_H // GROUP)
        columns = h_start + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        wide = tl.reshape(y.to(tl.float32), [BLOCK_H // GROUP, GROUP])
        DTYPE: tl.constexpr = rows_ptr.dtype.element_ty
        if DTYPE == tl.uint8:
            store_nv_rows(wide, row.to(tl.int64) + 0 * group, kept & (group == 0), rows_ptr, scale_ptr, H)
        else:
            quantized, scale = quantize_group(wide, DTYPE, scale_ptr.dtype.element_ty)
            tl.store(rows_ptr + row.to(tl.int64) * H + columns, quantized, mask=(columns < H) & kept)
            groups = (H + GROUP - 1) // GROUP
            g = h_start // GROUP + group
            tl.store(scale_ptr + row.to(tl.int64) * groups + g, scale, mask=(g < groups) & kept)
    else:
        h = h_start + tl.arange(0, BLOCK_H)
        tl.store(rows_ptr + row.to(tl.int64) * H + h, y, mask=(h < H) & kept)


@triton.jit
def _clear_kernel(words_ptr, COUNT, PDL: tl.constexpr):
    pdl_wait(PDL)
    pdl_release(PDL)
    clear_part(words_ptr, tl.program_id(0), tl.num_programs(0), COUNT)


def clear(words: torch.Tensor, pdl: bool) -> torch.Tensor:
    """`words` i32, made 0."""
    grid = (cdiv(words.numel(), CLEARED.value),)
    launch(_clear_kernel, grid, words, words.numel(), PDL=pdl, num_warps=4, launch_pdl=pdl)
    return words


@triton.jit
def _scatter_rows_kernel(
    hidden_ptr,
    weights_ptr,
    pair_to_row_ptr,
    rows_ptr,
    scale_ptr,
    H,
    stride_t,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program reads BLOCK_H columns of one token once and writes them to each of its TOP_K rows, or to the row of
    its number.

    Bytes: T H sizeof(element) + R H sizeof(row element).
    """
    pdl_wait(PDL)
    pdl_release(PDL)
    t = tl.program_id(0)
    h_start = tl.program_id(1) * BLOCK_H
    h = h_start + tl.arange(0, BLOCK_H)
    x = line_in_order(tl.load(hidden_ptr + t.to(tl.int64) * stride_t + h, mask=h < H, other=0.0), ORDER)
    for k in tl.static_range(TOP_K):
        row = t if pair_to_row_ptr is None else tl.load(pair_to_row_ptr + t * TOP_K + k)
        weight = None if weights_ptr is None else tl.load(weights_ptr + t * TOP_K + k).to(tl.float32)
        store_row(x, weight, row, row >= 0, h_start, rows_ptr, scale_ptr, H, BLOCK_H, GROUP)


def scatter_rows(
    hidden_states: torch.Tensor,
    pair_to_row: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    rows: torch.Tensor,
    rows_scale: torch.Tensor | None,
    pdl: bool,
    group: int = 0,
    order: tuple[int, int] | None = None,
) -> None:
    """Write token t, times its k-th weight if given, to `rows[pair_to_row[t, k]]` where that is not -1, or to row t.

    With a `group` of columns that share a scale the rows are quantised here, their scales go to `rows_scale`; with an
    `order` (`order`), whose columns divide H, theirs are in it.
    """
    T, H = hidden_states.shape
    TOP_K = 1 if pair_to_row is None else pair_to_row.shape[1]
    if T == 0 or TOP_K == 0 or H == 0:
        return
    hidden_states = unit_stride(hidden_states)
    columns = order[0] if order else 0
    block_h = max(group, columns, 128, min(next_power_of_2(H), 2048 if T >= 256 else 512))
    launch(
        _scatter_rows_kernel,
        (T, cdiv(H, block_h)),
        hidden_states,
        None if topk_weights is None else topk_weights.contiguous(),
        None if pair_to_row is None else pair_to_row.contiguous(),
        rows,
        rows_scale,
        H,
        hidden_states.stride(0),
        TOP_K=TOP_K,
        BLOCK_H=block_h,
        GROUP=group,
        ORDER=order,
        PDL=pdl,
        num_warps=max(1, min(8, block_h // 256), min(16, block_h // 1024)),
        launch_pdl=pdl,
    )


def gather_rows(
    hidden_states: torch.Tensor,
    pair_to_row: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    *,
    pdl: bool = False,
    order: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Expert-sorted copies of the tokens.

    Args:
        hidden_states: [T, H], any row stride.
        pair_to_row: i32 [T, K], from `sort_pairs`, or None for copies in the order that they have.
        topk_weights: [T, K] any float dtype, or None: multiplied in fp32, then rounded to the dtype of hidden_states.
        order: see `scatter_rows`.

    Returns:
        rows [T * K, H], or [T, H]; rows that no pair maps to are uninitialised.
    """
    T, H = hidden_states.shape
    rows = hidden_states.new_empty((T if pair_to_row is None else pair_to_row.numel(), H))
    scatter_rows(hidden_states, pair_to_row, topk_weights, rows, None, pdl, order=order)
    return rows
