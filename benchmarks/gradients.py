"""How far gradients of a layer are from those of fp32: one expert at a time, which large layers have the memory for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, InputSet

Tensor = torch.Tensor


def error(case: Case, inputs: InputSet, grad_output: Tensor, found: Sequence[Tensor]) -> float:
    """Largest Euclidean error among ``found``, each relative to fp32 by autograd.

    Args:
        inputs: what the layer was called with.
        grad_output: gradient of the layer's output, ``[T, H]``.
        found: gradients of hidden states ``[T, H]``, of router logits ``[T, E]``, and, if wanted, of both weights.
    """
    hidden, logits, ids = inputs.hidden_states.float(), inputs.router_logits.float().requires_grad_(), inputs.topk_ids
    ids = ids.long()
    scores = torch.softmax(logits, dim=-1).gather(1, ids)
    scores = scores / scores.sum(dim=-1, keepdim=True)
    grad_hidden, grad_scores = torch.zeros_like(hidden), torch.zeros_like(scores)
    weights = (case.weights.gate_up_proj, case.weights.down_proj)
    sums = [hidden.new_zeros(2, dtype=torch.float64) for _ in found[2:]]
    for expert in range(case.shape.E):
        token, slot = torch.where(ids == expert)
        x, score = hidden[token].requires_grad_(), scores.detach()[token, slot].requires_grad_()
        first, second = (weight[expert].detach().float().requires_grad_() for weight in weights)
        gate, up = F.linear(x, first).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, second) * score[:, None]
        exact = torch.autograd.grad(rows, [x, score, first, second], grad_output[token].float())
        grad_hidden.index_add_(0, token, exact[0])
        grad_scores[token, slot] = exact[1]
        for total, whole, part in zip(sums, found[2:], exact[2:], strict=False):
            total += _squares(whole[expert], part)
    (grad_logits,) = torch.autograd.grad(scores, [logits], grad_scores)
    sums += [_squares(found[0], grad_hidden), _squares(found[1], grad_logits)]
    return torch.stack([off / of for off, of in sums]).max().sqrt().item()  # a NaN is the largest


def _squares(found: Tensor, exact: Tensor) -> Tensor:
    """(of the difference, of what is exact), summed."""
    parts = (found.float() - exact, exact)
    return torch.stack([part.square().sum(dtype=torch.float64) for part in parts])
