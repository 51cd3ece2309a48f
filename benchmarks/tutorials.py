"""MoE layers as single-file models, courses and hobby projects write them, each with a step of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.foreign import Expert
from benchmarks.loops import Block, E, H, I, K


def filled(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes, dtype=dtype) * sizes[-1] ** -0.5)


class LitGPT(Block):
    """litgpt's LLaMAMoE: masks by a comparison with all numbers, an addition in place for every expert."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        x = x.view(-1, C)
        probs, indices = torch.topk(self.gate(x), self.top_k)
        probs = probs.softmax(dim=1, dtype=torch.float).to(dtype=x.dtype)
        masks = indices.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks.permute(2, 0, 1), self.experts, strict=True):
            token_idx, expert_idx = torch.where(mask)
            y[token_idx] += probs[token_idx, expert_idx, None] * expert(x[token_idx])
        return y.view(B, T, C)


class UnflattenedPlaces(Block):
    """[batch, length] is never flattened: three lists of positions."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            batch, place, slot = torch.where(ids == e)
            y[batch, place] += weights[batch, place, slot, None] * expert(x[batch, place])
        return y


class UnflattenedMasks(Block):
    """[batch, length] is never flattened: a mask of the tokens that have an expert, which may be empty."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            chosen = (ids == e).any(-1)
            if chosen.any():
                scores = (weights * (ids == e)).sum(-1)
                y[chosen] += expert(x[chosen]) * scores[chosen].unsqueeze(-1)
        return y


class SlotByMask(Block):
    """A loop over slots and one over experts, the weights as a column of one."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(rows)
        y = torch.zeros_like(rows)
        for slot in range(self.top_k):
            for e in range(self.num_experts):
                chosen = ids[:, slot] == e
                if chosen.any():
                    y[chosen] += weights[chosen, slot : slot + 1] * self.experts[e](rows[chosen])
        return y.view_as(x)


class UnflattenedStack(Block):
    """Results of all experts beside each other, [batch, length, experts, width], the selected ones gathered."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        results = torch.stack([expert(x) for expert in self.experts], dim=2)
        index = ids.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
        return (torch.gather(results, 2, index) * weights.unsqueeze(-1)).sum(dim=2)


class LastStack(Block):
    """Results of all experts behind each other, [batch, length, width, experts], times gates that are mostly zero."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        gates = torch.zeros(*x.shape[:-1], self.num_experts, dtype=x.dtype, device=x.device).scatter(-1, ids, weights)
        results = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return torch.sum(results * gates.unsqueeze(-2).expand_as(results), dim=-1)


class StackedWeights(nn.Module):
    """A router and weights of all experts in one tensor each; subclasses run them."""

    def __init__(self, *, dim: int = 16, hidden: int = 8, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.w_in, self.w_out = filled(num_experts, 2 * hidden, dim), filled(num_experts, dim, hidden)
        self.b_in, self.b_out = filled(num_experts, 2 * hidden), filled(num_experts, dim)
        self.top_k, self.num_experts = top_k, num_experts

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True), ids

    def expert(self, rows: Tensor, e: int) -> Tensor:
        gate, up = F.linear(rows, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])


class SplitPairs(StackedWeights):
    """The sorted pairs are split: the tokens of every expert, and their weights."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.route(rows)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        sizes = F.one_hot(flat, self.num_experts).sum(0).tolist()
        tokens, scores = (order // self.top_k).split(sizes), weights.reshape(-1)[order].split(sizes)
        y = torch.zeros_like(rows)
        for e in range(self.num_experts):
            y.index_add_(0, tokens[e], self.expert(rows[tokens[e]], e) * scores[e][:, None])
        return y.view_as(x)


class Nonzero(StackedWeights):
    """A loop over stacked weights, as matrices [in, out] with biases, whose pairs nonzero lists."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.route(rows)
        y = rows.new_zeros(rows.shape)
        for e in range(self.num_experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (rows[token] @ self.w_in[e].t() + self.b_in[e]).chunk(2, dim=-1)
            out = (F.silu(gate) * up) @ self.w_out[e].t() + self.b_out[e]
            y.index_add_(0, token, out * weights[token, slot].unsqueeze(1))
        return y.view_as(x)


class RepeatedBiases(StackedWeights):
    """torchtitan's gpt-oss: biases repeated by counts, the activation by addcmul, results reduced to their tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.route(rows)
        counts = torch.histc(ids.view(-1).float(), bins=self.num_experts, min=0, max=self.num_experts)
        order = ids.view(-1).argsort(stable=True)
        tokens, offsets = order // self.top_k, counts.cumsum(0, dtype=torch.int32)
        h = self.product(rows[tokens], self.w_in, self.b_in, offsets, counts.long())
        gate, linear = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
        gate = gate * torch.sigmoid(1.702 * gate)
        out = self.product(torch.addcmul(gate, gate, linear), self.w_out, self.b_out, offsets, counts.long())
        out = out * weights.view(-1)[order, None]
        index = tokens[:, None].expand(-1, rows.shape[1])
        return torch.zeros_like(rows).scatter_reduce(0, index, out.to(rows.dtype), reduce="sum").view_as(x)

    @staticmethod
    def product(rows: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
        out = torch._grouped_mm(rows.bfloat16(), weight.bfloat16().transpose(-2, -1), offs=offsets)
        return out + bias.bfloat16().repeat_interleave(counts, dim=0, output_size=rows.shape[0])


class UnflattenedGather(StackedWeights):
    """[batch, length] is never flattened: weights gathered for every selection, with biases, and products by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        h = torch.einsum("bsh,bskih->bski", x, self.w_in[ids]) + self.b_in[ids]
        gate, up = h.chunk(2, dim=-1)
        out = torch.einsum("bski,bskhi->bskh", F.silu(gate) * up, self.w_out[ids]) + self.b_out[ids]
        return torch.einsum("bsk,bskh->bsh", weights, out)


class RoundedFirst(StackedWeights):
    """Hidden states are rounded to the experts' dtype before rows are taken, and the sum is not."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.route(rows)
        flat = ids.flatten()
        order = flat.argsort()
        offsets = F.one_hot(flat, self.num_experts).sum(0).cumsum(0).int()
        h = torch._grouped_mm(rows.bfloat16()[order // self.top_k], self.w_in.bfloat16().mT, offs=offsets)
        gate, up = h.chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, self.w_out.bfloat16().mT, offs=offsets)[order.argsort()]
        return (out.view(-1, self.top_k, x.shape[-1]) * weights.unsqueeze(-1)).sum(1).view_as(x)


class FeedForwards(nn.Module):
    """A list of experts that is not called so, beside a router with a bias."""

    def __init__(self, *, dim: int = 16, hidden: int = 8, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.ffns = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.router(rows).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(rows)
        for e, ffn in enumerate(self.ffns):
            chosen = ids == e
            if not chosen.any():
                continue
            token, slot = torch.where(chosen)
            y[token] += ffn(rows[token]) * weights[token, slot, None]
        return y.view_as(x)


class HalvesInTheLoop(StackedWeights):
    """Every expert takes its gate and its up weight out of one stack, and the rows of the tokens that chose it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.route(rows)
        y = torch.zeros_like(rows)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            gate, up = self.w_in[e].chunk(2, dim=0)
            h = F.silu(F.linear(rows[token], gate)) * F.linear(rows[token], up)
            y.index_add_(0, token, F.linear(h, self.w_out[e]) * weights[token, slot, None])
        return y.view_as(x)


class BestTwoOneHots(StackedWeights):
    """The best expert, then the next best, as one-hots times their gates, added; one einsum weighs and sums."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        gates = logits.softmax(dim=-1)
        best = F.one_hot(logits.argmax(dim=-1), self.num_experts)
        next_best = F.one_hot(logits.masked_fill(best.bool(), float("-inf")).argmax(dim=-1), self.num_experts)
        one, two = ((gates * mask).sum(dim=-1, keepdim=True) for mask in (best, next_best))
        scores = one / (one + two) * best + two / (one + two) * next_best
        gate, up = torch.einsum("bsh,ekh->bsek", x, self.w_in).chunk(2, dim=-1)
        return torch.einsum("bsek,ehk,bse->bsh", F.silu(gate) * up, self.w_out, scores)


class WeightedInside(Expert):
    """The routing weights multiply what the second projection takes."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x) * weights[:, None])


class ListedByMask(Block):
    """Megatron's dispatcher: a mask [experts, tokens] lists tokens and weights; experts take what counts cut off."""

    def __init__(self, *, dim: int = H, hidden: int = I, num_experts: int = E, top_k: int = K) -> None:
        super().__init__(dim=dim, hidden=hidden, num_experts=num_experts, top_k=top_k)
        self.experts = nn.ModuleList(WeightedInside(dim, hidden) for _ in range(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        top, ids = logits.topk(self.top_k, dim=1)
        probs = torch.zeros_like(logits).scatter(1, ids, top.softmax(dim=-1))
        routing_map = torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
        mask = routing_map.mT.contiguous()
        places = torch.arange(tokens.shape[0], device=x.device).unsqueeze(0).expand(self.num_experts, -1)
        sorted_indices = places.masked_select(mask)
        counts = routing_map.sum(dim=0).tolist()
        rows = torch.split(tokens.index_select(0, sorted_indices), counts)
        weights = torch.split(probs.mT.contiguous().masked_select(mask), counts)
        parts = []
        for expert, part, given in zip(self.experts, rows, weights, strict=True):
            parts.append(expert(part, given))
        places = sorted_indices.unsqueeze(1).expand(-1, tokens.shape[1])
        return torch.zeros_like(tokens).scatter_add_(0, places, torch.cat(parts)).view_as(x)


LAYERS = {
    "litgpt: a mask for every expert": LitGPT,
    "[batch, length] as they are: three lists of positions": UnflattenedPlaces,
    "[batch, length] as they are: masks, and any()": UnflattenedMasks,
    "[batch, length] as they are: results stacked and gathered": UnflattenedStack,
    "results stacked along the last dimension, times gates": LastStack,
    "[batch, length] as they are: gathered weights, einsum": UnflattenedGather,
    "slots, then experts, by masks and any()": SlotByMask,
    "tokens and weights of sorted pairs, split": SplitPairs,
    "stacked weights with biases, nonzero for every expert": Nonzero,
    "torchtitan's gpt-oss: biases repeated by counts": RepeatedBiases,
    "grouped_mm, hidden states rounded before rows are taken": RoundedFirst,
    "a list that is not called experts": FeedForwards,
    "halves of one stacked weight, in the loop": HalvesInTheLoop,
    "the best two as one-hots, one einsum of three operands": BestTwoOneHots,
    "Megatron: a mask lists the tokens, weights between the projections": ListedByMask,
}
