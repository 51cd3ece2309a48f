"""From tokens to the batched format: every expert's tokens in its own block of `capacity` rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meta.schemes import WHOLE, ActivationFormat
from moe_ops.counters import Row
from moe_ops.kernels.triton.act_quant import group_columns, room
from moe_ops.kernels.triton.order import line_in_order
from moe_ops.kernels.triton.permute import COUNT_ALL_PAIRS, clear, place_pairs, scatter_rows, store_row
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.util import (
    cdiv,
    count_pairs,
    is_counted,
    load_expert,
    next_power_of_2,
    pdl_release,
    pdl_wait,
    unit_stride,
)

FEW_PAIRS = 1024  # up to here one kernel that counts and copies saves more than its repeated reading of all ids costs
COUNT_BLOCK = 16  # experts counted by one program


@triton.jit(do_not_specialize=["R", "capacity"])
def _dispatch_few_kernel(
    hidden_ptr,
    weights_ptr,
    topk_ids_ptr,
    expert_map_ptr,
    rows_ptr,
    scale_ptr,
    counts_ptr,
    slots_ptr,
    R,
    E,
    E_GLOBAL,
    H,
    capacity,
    stride_t,
    load_ptr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
    ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p < R: find the slot of pair p by counting its expert's earlier pairs, and copy BLOCK_H columns there.

    Programs R, R + 1, ...: count the pairs of BLOCK_E experts each, for the layer's counters too. No program waits for
    another.
    Bytes: 4 R (R + E / BLOCK_E) from L2 for the ids, R H sizeof(element) read, R H sizeof(row element) written.
    """
    pdl_wait(PDL)
    pdl_release(PDL)
    p = tl.program_id(0)
    column = tl.program_id(1)
    if p < R:
        h = column * BLOCK_H + tl.arange(0, BLOCK_H)
        x = tl.load(hidden_ptr + (p // TOP_K).to(tl.int64) * stride_t + h, mask=h < H, other=0.0)
        x = line_in_order(x, ORDER)
        expert = load_expert(topk_ids_ptr, expert_map_ptr, p, p < R, E, E_GLOBAL)
        earlier = tl.zeros([BLOCK_Q], tl.int32)
        for start in range(0, R, BLOCK_Q):
            q = start + tl.arange(0, BLOCK_Q)
            other = load_expert(topk_ids_ptr, expert_map_ptr, q, q < p, E, E_GLOBAL)
            earlier += ((other == expert) & (q < p)).to(tl.int32)
        place = tl.sum(earlier, axis=0)
        kept = (expert < E) & (place < capacity)
        slot = tl.where(kept, expert * capacity + place, -1)
        if column == 0:
            tl.store(slots_ptr + p, slot)
        weight = None if weights_ptr is None else tl.load(weights_ptr + p).to(tl.float32)
        store_row(x, weight, slot, kept, column * BLOCK_H, rows_ptr, scale_ptr, H, BLOCK_H, GROUP)
    elif column == 0:
        counted = is_counted(load_ptr, True)
        e = (p - R) * BLOCK_E + tl.arange(0, BLOCK_E)
        mine = tl.zeros([BLOCK_E, BLOCK_Q], tl.int32)
        for start in range(0, R, BLOCK_Q):
            q = start + tl.arange(0, BLOCK_Q)
            expert = load_expert(topk_ids_ptr, expert_map_ptr, q, q < R, E, E_GLOBAL)
            mine += (e[:, None] == expert[None, :]).to(tl.int32)
        kept = tl.minimum(tl.sum(mine, axis=1), capacity)
        tl.store(counts_ptr + e, kept, mask=e < E)
        count_pairs(load_ptr, counted, e, kept, e < E)


def dispatch(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    capacity: int,
    expert_map: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    *,
    form: ActivationFormat | None = None,
    order: tuple[int, int] | None = None,
    by_choice: bool = False,
    pdl: bool = False,
    load: Row | None = None,
    cleared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Copy every pair's token to its slot: one kernel for few pairs, else one or two for the slots and one to copy.

    The first `capacity` pairs of an expert, by pair index or `by_choice` (k, then token), keep their slots; the others
    are dropped. Batch rows past an expert's count are not written.

    Args:
        hidden_states: [T, H]; topk_ids: [T, K] i32 or i64, dropped when outside the experts held here.
        topk_weights: [T, K] to multiply the tokens by (fp32, rounded), or None.
        form: of the rows; None for the tokens' dtype.
        order: of their columns, see `permute.scatter_rows`.
        load: the layer's counters, to which pairs that keep their slots are added, or None.
        cleared: i32 words that become 0, if there are pairs, or None.

    Returns:
        (batch [E, C, H], its scales [E, C, groups of H] or None, expert_num_tokens i32 [E] at most C,
        slots i32 [T, K] = e * C + c, or -1 when dropped).
    """
    (T, H), TOP_K = hidden_states.shape, topk_ids.shape[1]
    R, E = T * TOP_K, num_experts
    if form is None:
        group, batch, scale = 0, hidden_states.new_empty((E, capacity, H)), None
    else:
        group, (batch, scale) = group_columns(form, H), room((E, capacity, H), form, hidden_states.device)
    # Rows with one scale each are quantised between the products as well: one kernel fewer here leaves a layer five.
    few = COUNT_ALL_PAIRS if form is not None and form.group == WHOLE else FEW_PAIRS
    if R == 0 or R > few or H == 0 or by_choice:
        ids = topk_ids.t() if by_choice else topk_ids
        counts, _, slots = place_pairs(ids, E, expert_map, capacity, pdl, load=load, cleared=cleared)
        slots = slots.t().contiguous() if by_choice else slots
        scatter_rows(hidden_states, slots, topk_weights, batch, scale, pdl, group, order)
        return batch, scale, counts, slots
    if cleared is not None:
        clear(cleared, pdl)
    counts = torch.empty(E, dtype=torch.int32, device=topk_ids.device)
    slots = torch.empty((T, TOP_K), dtype=torch.int32, device=topk_ids.device)
    hidden_states = unit_stride(hidden_states)
    block_h = max(group, order[0] if order else 0, 128, min(next_power_of_2(H), 1024))
    launch(
        _dispatch_few_kernel,
        (R + cdiv(E, COUNT_BLOCK), cdiv(H, block_h)),
        hidden_states,
        None if topk_weights is None else topk_weights.contiguous(),
        topk_ids.contiguous(),
        None if expert_map is None else expert_map.contiguous(),
        batch,
        scale,
        counts,
        slots,
        R,
        E,
        0 if expert_map is None else expert_map.shape[0],
        H,
        capacity,
        hidden_states.stride(0),
        load_ptr=load,
        TOP_K=TOP_K,
        BLOCK_H=block_h,
        BLOCK_Q=max(16, min(128, next_power_of_2(R))),
        BLOCK_E=COUNT_BLOCK,
        GROUP=group,
        ORDER=order,
        PDL=pdl,
        num_warps=max(4, min(16, block_h // 512)),
        launch_pdl=pdl,
    )
    return batch, scale, counts, slots
