"""MoE layers whose loop over experts no compiler captures, after the public definition of each, in fewer lines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign import Expert

H, I, E, K = 16, 8, 4, 2


class Block(nn.Module):
    """A router and a list of experts; subclasses run them."""

    def __init__(self, *, dim: int = H, hidden: int = I, num_experts: int = E, top_k: int = K) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))
        self.top_k, self.num_experts = top_k, num_experts
        self.ep_size, self.ep_rank, self.experts_per_rank = 1, 0, num_experts

    def route(self, x):
        weights, ids = self.gate(x).float().softmax(-1).topk(self.top_k)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids


class MixtralHits(Block):
    """Mixtral of transformers 4.54: a loop over the experts that were hit."""

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = torch.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hitted = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hitted:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final.reshape(batch_size, sequence_length, hidden_dim), router_logits


class MixtralLists(Block):
    """Mixtral of transformers 4.36: positions as Python lists, empty experts left out."""

    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        routing_weights, selected_experts = self.route(hidden_states)
        final = torch.zeros_like(hidden_states)
        expert_mask = torch.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            if top_x.shape[0] == 0:
                continue
            top_x_list = top_x.tolist()
            idx_list = idx.tolist()
            current_state = hidden_states[None, top_x_list].reshape(-1, shape[-1])
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x_list, idx_list, None]
            final.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final.reshape(shape)


class DeepseekV3(Block):
    """DeepSeek-V3 of transformers 4.5x: the loop is in a method, behind `if token_indices.numel() > 0`."""

    def moe(self, hidden_states, topk_indices, topk_weights):
        final = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
        expert_mask = torch.nn.functional.one_hot(topk_indices, num_classes=len(self.experts))
        expert_mask = expert_mask.permute(2, 0, 1)
        for expert_idx in range(len(self.experts)):
            expert = self.experts[expert_idx]
            mask = expert_mask[expert_idx]
            token_indices, weight_indices = torch.where(mask)
            if token_indices.numel() > 0:
                expert_weights = topk_weights[token_indices, weight_indices]
                expert_input = hidden_states[token_indices]
                expert_output = expert(expert_input)
                weighted_output = expert_output * expert_weights.unsqueeze(-1)
                final.index_add_(0, token_indices, weighted_output)
        return final.type(hidden_states.dtype)

    def forward(self, hidden_states):
        orig_shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, orig_shape[-1])
        weights, ids = self.route(hidden_states)
        return self.moe(hidden_states, ids, weights).view(*orig_shape)


class DeepseekReference(Block):
    """DeepSeek's own inference code: counts on the host, experts without tokens left out."""

    def forward(self, x):
        shape = x.size()
        x = x.view(-1, shape[-1])
        weights, indices = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=self.num_experts).tolist()
        for i in range(0, self.num_experts):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return y.view(shape)


class MoeInfer(Block):
    """`moe_infer` of DeepSeek-V2, V3 and Kimi on the hub: slices of sorted rows, collected in a list."""

    def forward(self, hidden_states):
        orig_shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, orig_shape[-1])
        topk_weight, topk_idx = self.route(hidden_states)
        return self.moe_infer(hidden_states, topk_idx, topk_weight).view(*orig_shape)

    @torch.no_grad()
    def moe_infer(self, x, topk_ids, topk_weight):
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        if self.ep_size > 1:
            tokens_per_ep_rank = tokens_per_expert.view(self.ep_size, -1).sum(dim=1)
            sorted_tokens = sorted_tokens[tokens_per_ep_rank]
            tokens_per_expert = tokens_per_ep_rank
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            expert = self.experts[i + self.ep_rank * self.experts_per_rank]
            tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
            expert_out = expert(tokens_for_this_expert)
            outputs.append(expert_out)
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )


class MoeInferAdding(Block):
    """`moe_infer` of DeepSeek-MoE and minimind: slices by their ends, results added with scatter_reduce_; in training
    another loop, which can be captured as it is.
    """

    def forward(self, hidden_states):
        orig_shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, orig_shape[-1])
        topk_weight, topk_idx = self.route(hidden_states)
        flat_topk_idx = topk_idx.view(-1)
        if self.training:
            hidden_states = hidden_states.repeat_interleave(self.top_k, dim=0)
            y = torch.empty_like(hidden_states)
            for i, expert in enumerate(self.experts):
                y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
            return (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1).view(*orig_shape)
        return self.moe_infer(hidden_states, flat_topk_idx, topk_weight.view(-1, 1)).view(*orig_shape)

    @torch.no_grad()
    def moe_infer(self, x, flat_expert_indices, flat_expert_weights):
        expert_cache = torch.zeros_like(x)
        idxs = flat_expert_indices.argsort()
        tokens_per_expert = flat_expert_indices.bincount().cpu().numpy().cumsum(0)
        token_idxs = idxs // self.top_k
        for i, end_idx in enumerate(tokens_per_expert):
            start_idx = 0 if i == 0 else tokens_per_expert[i - 1]
            if start_idx == end_idx:
                continue
            expert = self.experts[i]
            exp_token_idx = token_idxs[start_idx:end_idx]
            expert_tokens = x[exp_token_idx]
            expert_out = expert(expert_tokens)
            expert_out.mul_(flat_expert_weights[idxs[start_idx:end_idx]])
            expert_cache.scatter_reduce_(0, exp_token_idx.view(-1, 1).repeat(1, x.shape[-1]), expert_out, reduce="sum")
        return expert_cache


class MakeMoE(Block):
    """The sparse mixture of tutorials, nanoGPT's among them: masks, and `if mask.any()`."""

    def forward(self, x):
        logits = self.gate(x)
        top, indices = logits.topk(self.top_k, dim=-1)
        gating_output = torch.full_like(logits, float("-inf")).scatter(-1, indices, top).softmax(-1)
        final_output = torch.zeros_like(x)
        flat_x = x.view(-1, x.size(-1))
        flat_gating_output = gating_output.view(-1, gating_output.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_input = flat_x[flat_mask]
                expert_output = expert(expert_input)
                gating_scores = flat_gating_output[flat_mask, i].unsqueeze(1)
                weighted_output = expert_output * gating_scores
                final_output[expert_mask] += weighted_output.squeeze(1)
        return final_output


class MakeMoECapacity(Block):
    """makeMoE's with an expert capacity: an expert takes the first of its tokens, as many as it has room for."""

    def forward(self, x):
        batch_size, seq_len, _ = x.shape
        logits = self.gate(x)
        top, indices = logits.topk(self.top_k, dim=-1)
        gating_output = torch.full_like(logits, float("-inf")).scatter(-1, indices, top).softmax(-1)
        flat_x = x.view(-1, x.size(-1))
        flat_gating_output = gating_output.view(-1, gating_output.size(-1))
        tokens_per_batch = batch_size * seq_len * self.top_k
        expert_capacity = int((tokens_per_batch / self.num_experts) * 1.0)
        updates = torch.zeros_like(flat_x)
        for i, expert in enumerate(self.experts):
            flat_mask = (indices == i).any(dim=-1).view(-1)
            selected = torch.nonzero(flat_mask).squeeze(-1)
            limited = selected[:expert_capacity] if selected.numel() > expert_capacity else selected
            if limited.numel() > 0:
                weights = flat_gating_output[limited, i].unsqueeze(1)
                updates.index_add_(0, limited, expert(flat_x[limited]) * weights)
        return updates.view(batch_size, seq_len, -1)


class Unique(Block):
    """A loop over the ids that occur."""

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        w, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * w[token, slot, None])
        return out.view(shape)


class BesideCounts(Block):
    """Experts and their counts side by side, by zip."""

    def forward(self, x):
        w, ids = self.route(x.flatten(0, -2))
        counts = torch.bincount(ids.flatten(), minlength=len(self.experts))
        out, e = torch.zeros_like(x.flatten(0, -2)), 0
        rows = x.flatten(0, -2)
        for e, count in enumerate(counts.tolist()):
            if not count:
                continue
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](rows[token]) * w[token, slot, None])
        return out.view(x.shape)


class StackedExperts(nn.Module):
    """The eager experts of transformers 5, over stacked weights, outside of its own switch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(E, H, I) * 0.2)

    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])
        top_k_weights, top_k_index = self.gate(hidden_states).softmax(-1).topk(K)
        final_hidden_states = torch.zeros_like(hidden_states)
        with torch.no_grad():
            expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts)
            expert_mask = expert_mask.permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]
            if expert_idx == self.num_experts:
                continue
            top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[token_idx]
            gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current_hidden_states = F.silu(gate) * up
            current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])
            current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
            final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
        return final_hidden_states.view(shape)


class GptOssExperts(nn.Module):
    """Those of gpt-oss in transformers 4.55: a loop over hits in training, every token through every expert else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = (nn.Parameter(torch.randn(E, *shape, 2 * I) * 0.2) for shape in ((H,), ()))
        self.down, self.down_bias = (nn.Parameter(torch.randn(E, *shape, H) * 0.2) for shape in ((I,), ()))

    def gated(self, both):
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    def forward(self, x, ids=None, weights=None):
        sequences, x = x.shape[0], x.reshape(-1, x.shape[-1])
        experts = weights.shape[1]
        if self.training:
            out = torch.zeros_like(x)
            with torch.no_grad():
                mask = F.one_hot(ids, num_classes=experts + 1).permute(2, 1, 0)
                hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
            for expert in hit[:]:
                expert = expert[0]
                if expert == experts:
                    continue
                with torch.no_grad():
                    _, token = torch.where(mask[expert])
                both = x[token] @ self.up[expert] + self.up_bias[expert]
                rows = self.gated(both) @ self.down[expert] + self.down_bias[expert]
                out.index_add_(0, token, (rows * weights[token, expert, None]).to(x.dtype))
            return out.view(sequences, -1, x.shape[-1])
        x = x.repeat(experts, 1).view(experts, -1, x.shape[-1])
        both = torch.bmm(x, self.up) + self.up_bias[..., None, :]
        rows = torch.bmm(self.gated(both), self.down) + self.down_bias[..., None, :]
        rows = rows.view(experts, sequences, -1, x.shape[-1])
        return (rows * weights.transpose(0, 1).view(experts, sequences, -1)[..., None]).sum(dim=0)


class GptOssMLP(nn.Module):
    """Its router, which makes scores for all experts, and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E), GptOssExperts()

    def forward(self, x):
        logits = self.router(x.reshape(-1, x.shape[-1]))
        best, ids = logits.topk(K, dim=-1)
        scores = torch.zeros_like(logits).scatter_(1, ids, best.softmax(dim=1))
        return self.experts(x, ids=ids, weights=scores), scores


FORMS = (
    MixtralHits, MixtralLists, DeepseekV3, DeepseekReference, MoeInfer, MoeInferAdding, MakeMoE, MakeMoECapacity,
    Unique, BesideCounts, StackedExperts,
)  # fmt: skip
