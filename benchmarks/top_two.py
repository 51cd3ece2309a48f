"""The mixture of lucidrains/mixture-of-experts (mixture_of_experts/mixture_of_experts.py), in fewer lines: two experts
for each token, chosen as in tensor2tensor, and as many slots of every expert in every sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_EXPERT_CAPACITY = 4


def top1(t: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of the last dimension, and where it is."""
    values, index = t.topk(k=1, dim=-1)
    return values.squeeze(dim=-1), index.squeeze(dim=-1)


def cumsum_exclusive(t: Tensor, dim: int = -1) -> Tensor:
    """How much there is before each element."""
    behind = -dim - 1
    padded = F.pad(t, (*((0, 0) * behind), 1, 0)).cumsum(dim=dim)
    return padded[(..., slice(None, -1), *((slice(None),) * behind))]


def safe_one_hot(indexes: Tensor, max_length: int) -> Tensor:
    """A one-hot of ``max_length`` classes, zero for indices that are beyond them."""
    max_index = indexes.max() + 1
    return F.one_hot(indexes, max(max_index + 1, max_length))[..., :max_length]


class Top2Gating(nn.Module):
    """Gates: (dispatch [b, n, e, c], combine [b, n, e, c], the balancing loss) of tokens [b, n, d].

    Args:
        second_policy_train: what becomes of second choices: "all" are kept, or "none", those above a "threshold", or
            as many as the gates say at "random"; ``second_policy_eval`` in eval mode.
    """

    def __init__(
        self,
        dim: int,
        num_gates: int,
        *,
        second_policy_train: str = "random",
        second_policy_eval: str = "random",
        threshold: float = 0.2,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        eps: float = 1e-9,
    ) -> None:
        super().__init__()
        self.w_gating = nn.Parameter(torch.randn(dim, num_gates))
        self.num_gates, self.eps, self.threshold = num_gates, eps, threshold
        self.second_policy_train, self.second_policy_eval = second_policy_train, second_policy_eval
        self.capacity_factor_train, self.capacity_factor_eval = capacity_factor_train, capacity_factor_eval

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group_size, num_gates = x.shape[-2], self.num_gates
        policy = self.second_policy_train if self.training else self.second_policy_eval
        capacity_factor = self.capacity_factor_train if self.training else self.capacity_factor_eval
        raw_gates = torch.einsum("...bnd,...de->...bne", x, self.w_gating).softmax(dim=-1)
        gate_1, index_1 = top1(raw_gates)
        mask_1 = F.one_hot(index_1, num_gates).float()
        gates_without_top_1 = raw_gates * (1.0 - mask_1)
        gate_2, index_2 = top1(gates_without_top_1)
        mask_2 = F.one_hot(index_2, num_gates).float()
        denom = gate_1 + gate_2 + self.eps
        gate_1 /= denom
        gate_2 /= denom
        density_1, density_1_proxy = mask_1.mean(dim=-2), raw_gates.mean(dim=-2)
        loss = (density_1_proxy * density_1).mean() * float(num_gates**2)

        if policy == "none":
            mask_2 = torch.zeros_like(mask_2)
        elif policy == "threshold":
            mask_2 *= (gate_2 > self.threshold).float().unsqueeze(-1)
        elif policy == "random":
            probs = torch.zeros_like(gate_2).uniform_(0.0, 1.0)
            mask_2 *= (probs < (gate_2 / max(self.threshold, self.eps))).float().unsqueeze(-1)

        expert_capacity = min(group_size, int((group_size * capacity_factor) / num_gates))
        expert_capacity = max(expert_capacity, MIN_EXPERT_CAPACITY)
        expert_capacity_f = float(expert_capacity)

        position_in_expert_1 = cumsum_exclusive(mask_1, dim=-2) * mask_1
        mask_1 *= (position_in_expert_1 < expert_capacity_f).float()
        mask_1_count = mask_1.sum(dim=-2, keepdim=True)
        mask_1_flat = mask_1.sum(dim=-1)
        position_in_expert_1 = position_in_expert_1.sum(dim=-1)
        gate_1 *= mask_1_flat

        position_in_expert_2 = cumsum_exclusive(mask_2, dim=-2) + mask_1_count
        position_in_expert_2 *= mask_2
        mask_2 *= (position_in_expert_2 < expert_capacity_f).float()
        mask_2_flat = mask_2.sum(dim=-1)
        position_in_expert_2 = position_in_expert_2.sum(dim=-1)
        gate_2 *= mask_2_flat

        combine_tensor = (
            gate_1[..., None, None]
            * mask_1_flat[..., None, None]
            * F.one_hot(index_1, num_gates)[..., None]
            * safe_one_hot(position_in_expert_1.long(), expert_capacity)[..., None, :]
            + gate_2[..., None, None]
            * mask_2_flat[..., None, None]
            * F.one_hot(index_2, num_gates)[..., None]
            * safe_one_hot(position_in_expert_2.long(), expert_capacity)[..., None, :]
        )
        dispatch_tensor = combine_tensor.bool().to(combine_tensor)
        return dispatch_tensor, combine_tensor, loss


class Experts(nn.Module):
    """Stacked experts of two projections."""

    def __init__(self, dim: int, num_experts: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(torch.einsum("...nd,...dh->...nh", x, self.w1))
        return torch.einsum("...nh,...hd->...nd", hidden, self.w2)


class TopTwo(nn.Module):
    """The mixture: (tokens [b, n, d] through their experts, the balancing loss)."""

    def __init__(self, *, dim: int = 32, hidden: int = 16, num_experts: int = 8, **gating: Any) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = Top2Gating(dim, num_experts, **gating)
        self.experts = Experts(dim, num_experts, hidden)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        dispatch_tensor, combine_tensor, loss = self.gate(inputs)
        expert_inputs = torch.einsum("bnd,bnec->ebcd", inputs, dispatch_tensor)
        orig_shape = expert_inputs.shape
        expert_outputs = self.experts(expert_inputs.reshape(self.num_experts, -1, inputs.shape[-1]))
        output = torch.einsum("ebcd,bnec->bnd", expert_outputs.reshape(*orig_shape), combine_tensor)
        return output, loss * 1e-2
