"""From tokens to the batched format: every expert's tokens in its own block of `capacity` rows."""

from __future__ import annotations

import torch

from moe_ops.kernels.triton.permute import place_pairs, scatter_rows


def dispatch(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    capacity: int,
    expert_map: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy every pair's token to its slot: one or two kernels for the slots, one for the copy.

    The first `capacity` pairs of an expert, by pair index, keep their slots; the others are dropped. Batch rows past
    an expert's count are not written.

    Args:
        hidden_states: [T, H]; topk_ids: [T, K] i32 or i64, dropped when outside the experts held here.
        topk_weights: [T, K] to multiply the tokens by (fp32, rounded), or None.

    Returns:
        (batch [E, C, H], expert_num_tokens i32 [E] at most C, slots i32 [T, K] = e * C + c, or -1 when dropped).
    """
    expert_num_tokens, _, slots = place_pairs(topk_ids, num_experts, expert_map, capacity, pdl)
    batch = hidden_states.new_empty((num_experts, capacity, hidden_states.shape[1]))
    scatter_rows(hidden_states, slots, topk_weights, batch, pdl)
    return batch, expert_num_tokens, slots
