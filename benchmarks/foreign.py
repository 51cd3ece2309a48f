"""MoE layers as people write them outside of transformers: after the public definition of each, in fewer lines.

Where a layer has its own names for dimensions they are kept: that is the code a user has. The tests fuse them, and
`python -m benchmarks forms` times them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _filled(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) * 0.1).to(dtype))


class SwiGLU(nn.Module):
    """A dense feed-forward layer, the shared expert of several of them."""

    def __init__(self, dim: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False, dtype=dtype) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TorchTitanMoE(nn.Module):
    """torchtitan's MoE (torchtitan/models/common/moe.py): three stacks, scores before or after the experts, counts that
    feed the buffer of a load balancer, results added to the shared expert's.
    """

    def __init__(
        self,
        *,
        dim: int = 32,
        hidden: int = 16,
        num_experts: int = 8,
        top_k: int = 2,
        score_func: str = "sigmoid",
        route_norm: bool = True,
        route_scale: float = 1.0,
        score_before_experts: bool = True,
        biased: bool = True,
        shared: bool = True,
        counting: str = "histc",
        looped: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False, dtype=dtype)
        self.w1, self.w3 = (_filled(num_experts, hidden, dim, dtype=dtype) for _ in range(2))
        self.w2 = _filled(num_experts, dim, hidden, dtype=dtype)
        self.shared_experts = SwiGLU(dim, hidden, dtype) if shared else None
        self.num_experts, self.top_k, self.score_func = num_experts, top_k, score_func
        self.route_norm, self.route_scale, self.counting = route_norm, route_scale, counting
        self.score_before_experts, self.looped = score_before_experts, looped
        self.register_buffer("expert_bias", torch.linspace(-0.01, 0.01, num_experts) if biased else None)
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts))

    def router(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x)
        if self.score_func == "sigmoid":
            scores = torch.sigmoid(logits.to(torch.float32))
        else:
            scores = F.softmax(logits.to(torch.float32), dim=1)
        if self.expert_bias is not None:
            _, selected = torch.topk(scores + self.expert_bias, k=self.top_k, dim=1, sorted=False)
            top_scores = scores.gather(dim=1, index=selected)
        else:
            top_scores, selected = torch.topk(scores, k=self.top_k, dim=1, sorted=False)
        if self.route_norm:
            top_scores = top_scores / (top_scores.sum(dim=-1, keepdim=True) + 1e-20)
        top_scores = top_scores * self.route_scale
        if self.counting == "histc":
            counts = torch.histc(selected.view(-1).float(), bins=self.num_experts, min=0, max=self.num_experts)
        else:
            counts = torch.zeros_like(scores, dtype=torch.bool).scatter(1, selected, True).sum(dim=0)
        return top_scores, selected, counts

    def experts(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.looped:
            return self.experts_in_a_loop(x, counts.long())
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)

    def experts_in_a_loop(self, x: Tensor, counts: Tensor) -> Tensor:
        """What runs where there is no grouped_mm; rows behind the last expert's would be padding."""
        sizes = counts.tolist()
        padding = x.shape[0] - sum(sizes)
        results = []
        for e, rows in enumerate(torch.split(x[: sum(sizes)], split_size_or_sections=sizes, dim=0)):
            h = F.silu(torch.matmul(rows, self.w1[e].transpose(-2, -1)))
            h = h * torch.matmul(rows, self.w3[e].transpose(-2, -1))
            results.append(torch.matmul(h, self.w2[e].transpose(-2, -1)))
        out = torch.cat(results, dim=0)
        return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))

    def forward(self, x: Tensor) -> Tensor:
        bs, slen, dim = x.shape
        x = x.view(-1, dim)
        top_scores, selected, counts = self.router(x)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(selected.view(-1), stable=True)
        scores_sorted = top_scores.view(-1)[order]
        tokens = (order // self.top_k).reshape(-1, 1).expand(-1, dim)
        routed_input = torch.gather(x, dim=0, index=tokens)
        if self.score_before_experts:
            routed_input = (routed_input.to(torch.float32) * scores_sorted.reshape(-1, 1)).to(x.dtype)
        routed_output = self.experts(routed_input, counts)
        out = self.shared_experts(x) if self.shared_experts is not None else torch.zeros_like(x)
        if not self.score_before_experts:
            routed_output = (routed_output.to(torch.float32) * scores_sorted.reshape(-1, 1)).to(x.dtype)
        out = out.scatter_add(dim=0, index=tokens, src=routed_output)
        return out.reshape(bs, slen, dim)


class ParallelExperts(nn.Module):
    """One projection of all experts, for rows sorted by expert."""

    def __init__(self, num_experts: int, input_size: int, output_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _filled(num_experts, output_size, input_size, dtype=dtype)

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        rows = inputs.split(expert_size, dim=0)
        return torch.cat([F.linear(part, self.weight[e]) for e, part in enumerate(rows)], dim=0)


class TopKGating(nn.Module):
    """The router beside `ParallelExperts`, which counts each expert's rows on the host."""

    def __init__(self, input_size: int, num_experts: int, top_k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(input_size, num_experts, bias=False, dtype=dtype)
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        top_k_logits, top_k_indices = self.layer(hidden).float().topk(self.top_k, dim=1)
        top_k_gates = torch.softmax(top_k_logits, dim=1).type_as(hidden)
        zeros = torch.zeros([top_k_gates.size(0), self.num_experts], dtype=top_k_gates.dtype, device=top_k_gates.device)
        gates = zeros.scatter(1, top_k_indices, 1)
        expert_size: list[int] = gates.long().sum(0).tolist()
        _, index_sorted_experts = top_k_indices.flatten().sort(0)
        batch_index = index_sorted_experts.div(self.top_k, rounding_mode="trunc")
        return batch_index, top_k_gates.flatten()[index_sorted_experts], expert_size


class GraniteMoe(nn.Module):
    """Granite 3's and JetMoE's mixture of experts (transformers 4.x): one module for each projection."""

    def __init__(
        self,
        *,
        dim: int = 32,
        hidden: int = 16,
        num_experts: int = 8,
        top_k: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.input_linear = ParallelExperts(num_experts, dim, 2 * hidden, dtype)
        self.output_linear = ParallelExperts(num_experts, hidden, dim, dtype)
        self.router = TopKGating(dim, num_experts, top_k, dtype)

    def forward(self, layer_input: Tensor) -> Tensor:
        bsz, length, emb_size = layer_input.size()
        layer_input = layer_input.reshape(-1, emb_size)
        batch_index, batch_gates, expert_size = self.router(layer_input)
        hidden = self.input_linear(layer_input[batch_index], expert_size)
        gate, up = hidden.chunk(2, dim=-1)
        expert_outputs = self.output_linear(F.silu(gate) * up, expert_size) * batch_gates[:, None]
        zeros = torch.zeros((bsz * length, emb_size), dtype=expert_outputs.dtype, device=expert_outputs.device)
        return zeros.index_add(0, batch_index, expert_outputs).view(bsz, length, emb_size)


class GptFast(nn.Module):
    """gpt-fast's mixture of experts (mixtral-moe/model.py): weights gathered for every slot, products by einsum."""

    def __init__(self, *, dim: int = 32, hidden: int = 16, num_experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False, dtype=torch.bfloat16)
        self.w1, self.w3 = (_filled(num_experts, hidden, dim, dtype=torch.bfloat16) for _ in range(2))
        self.w2 = _filled(num_experts, dim, hidden, dtype=torch.bfloat16)
        self.dim, self.top_k = dim, top_k

    def cond_ffn(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        w1_weights = self.w1[expert_indices]  # [T, A, D, D]
        w3_weights = self.w3[expert_indices]
        w2_weights = self.w2[expert_indices]
        x1 = F.silu(torch.einsum("ti,taoi -> tao", x, w1_weights))
        x3 = torch.einsum("ti, taoi -> tao", x, w3_weights)
        return torch.einsum("tao, taio -> tai", (x1 * x3), w2_weights)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.dim)
        scores = self.gate(x)
        expert_weights = F.softmax(scores, dim=-1)
        expert_weights, expert_indices = torch.topk(expert_weights, self.top_k, dim=-1)
        expert_weights /= expert_weights.sum(dim=-1, keepdim=True)
        expert_outs = self.cond_ffn(x, expert_indices)
        return torch.einsum("tai,ta -> ti", expert_outs, expert_weights)


class GptOss(nn.Module):
    """OpenAI's reference of gpt-oss (gpt_oss/torch/model.py): gathered weights and biases, halves in turn, clamps."""

    def __init__(self, *, dim: int = 32, hidden: int = 16, num_experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.norm = nn.RMSNorm(dim, dtype=dtype)
        self.gate = nn.Linear(dim, num_experts, dtype=dtype)
        self.mlp1_weight, self.mlp1_bias = (
            _filled(num_experts, 2 * hidden, *shape, dtype=dtype) for shape in ((dim,), ())
        )
        self.mlp2_weight, self.mlp2_bias = (_filled(num_experts, dim, *shape, dtype=dtype) for shape in ((hidden,), ()))
        self.top_k, self.dim = top_k, dim

    def swiglu(self, x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
        x_glu, x_linear = x[..., ::2], x[..., 1::2]
        x_glu = x_glu.clamp(min=None, max=limit)
        x_linear = x_linear.clamp(min=-limit, max=limit)
        return x_glu * torch.sigmoid(alpha * x_glu) * (x_linear + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.dim)
        t = self.norm(x)
        experts = torch.topk(self.gate(t), k=self.top_k, dim=-1, sorted=True)
        expert_weights = F.softmax(experts.values, dim=1)
        expert_indices = experts.indices
        t = torch.einsum("beck,bk->bec", self.mlp1_weight[expert_indices, ...], t)
        t = self.swiglu(t + self.mlp1_bias[expert_indices, ...])
        t = torch.einsum("beck,bek->bec", self.mlp2_weight[expert_indices, ...], t)
        t += self.mlp2_bias[expert_indices, ...]
        t = torch.einsum("bec,be->bc", t, expert_weights)
        return x + t


class Llama4(nn.Module):
    """Meta's llama 4 (models/llama4/moe.py), on one device: scores, zero for most experts, multiply the input; every
    expert takes a copy of every token, and results are added in place to those of the shared expert.
    """

    def __init__(self, *, dim: int = 32, hidden: int = 16, num_experts: int = 8, top_k: int = 1) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.router_DE = _filled(dim, num_experts, dtype=dtype)
        self.w_in_eDF, self.w_swiglu_eDF = (_filled(num_experts, dim, hidden, dtype=dtype) for _ in range(2))
        self.w_out_eFD = _filled(num_experts, hidden, dim, dtype=dtype)
        self.shared_expert = SwiGLU(dim, hidden, dtype)
        self.top_k = top_k

    def experts(self, routed_in_egD: Tensor) -> Tensor:
        e, D = self.w_in_eDF.shape[0], routed_in_egD.shape[-1]
        x_egD = routed_in_egD.view(e, -1, D)
        middle_out_egF = F.silu(torch.bmm(x_egD, self.w_in_eDF)) * torch.bmm(x_egD, self.w_swiglu_eDF)
        return torch.bmm(middle_out_egF, self.w_out_eFD).view(-1, D)

    def forward(self, x_bsD: Tensor) -> Tensor:
        _, slen, D = x_bsD.shape
        x_aD = x_bsD.view(-1, D)
        a = x_aD.shape[0]
        router_scores: Tensor = torch.matmul(x_aD, self.router_DE).transpose(0, 1)
        router_scores_aK, router_indices_aK = torch.topk(router_scores.transpose(0, 1), self.top_k, dim=1)
        router_scores = (
            torch.full_like(router_scores.transpose(0, 1), float("-inf"))
            .scatter_(1, router_indices_aK, router_scores_aK)
            .transpose(0, 1)
        )
        router_indices = torch.arange(a, device=x_aD.device).view(1, -1).expand(router_scores.size(0), -1)
        router_scores = torch.sigmoid(router_scores)
        tokens = router_indices.reshape(-1, 1).expand(-1, D)
        routed_in_EG_D = torch.gather(x_aD, dim=0, index=tokens)
        routed_in_EG_D = routed_in_EG_D * router_scores.reshape(-1, 1)
        out_aD = self.shared_expert(x_aD)
        routed_out_eg_D = self.experts(routed_in_EG_D)
        out_aD.scatter_add_(dim=0, index=tokens, src=routed_out_eg_D.view(-1, D))
        return out_aD.view(-1, slen, D)


class Llama4OfTransformers(nn.Module):
    """transformers' llama4 text MoE: as Meta's, with the copies by `repeat`, the scores returned, and `add_`."""

    def __init__(self, *, dim: int = 32, hidden: int = 16, num_experts: int = 8, top_k: int = 1) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.router = nn.Linear(dim, num_experts, bias=False, dtype=dtype)
        self.gate_up_proj = _filled(num_experts, dim, 2 * hidden, dtype=dtype)
        self.down_proj = _filled(num_experts, hidden, dim, dtype=dtype)
        self.shared_expert = SwiGLU(dim, hidden, dtype)
        self.top_k, self.num_experts, self.dim = top_k, num_experts, dim

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, self.dim)
        router_logits = self.router(hidden_states)
        router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=1)
        scores = torch.full_like(router_logits, float("-inf")).scatter_(1, router_indices, router_top_value)
        scores = torch.sigmoid(scores.float()).to(router_logits.dtype)
        routed_in = hidden_states.repeat(scores.shape[1], 1)
        routed_in = routed_in * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(routed_in.view(self.num_experts, -1, self.dim), self.gate_up_proj).chunk(2, dim=-1)
        routed_out = torch.bmm(up * F.silu(gate), self.down_proj).view(-1, self.dim)
        out = self.shared_expert(hidden_states)
        out.add_(routed_out.reshape(scores.shape[1], -1, routed_out.shape[-1]).sum(dim=0))
        return out, router_logits


class SparseByMask(nn.Module):
    """The mixture of tutorials ("makeMoE"): softmax over what a topk leaves, every expert for every token."""

    def __init__(self, *, dim: int = 32, hidden: int = 16, num_experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.route = nn.Linear(dim, num_experts)
        self.w1, self.b1 = (
            nn.Parameter(torch.randn(num_experts, dim, hidden) * 0.1),
            nn.Parameter(torch.randn(num_experts, hidden)),
        )
        self.w2, self.b2 = (
            nn.Parameter(torch.randn(num_experts, hidden, dim) * 0.1),
            nn.Parameter(torch.randn(num_experts, dim)),
        )
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        logits = self.route(x)
        top_k_logits, indices = logits.topk(self.top_k, dim=-1)
        sparse_logits = torch.full_like(logits, float("-inf")).scatter(-1, indices, top_k_logits)
        gates = F.softmax(sparse_logits, dim=-1)
        h = F.relu(torch.einsum("bth,ehi->btei", x, self.w1) + self.b1).square()
        out = torch.einsum("btei,eih->bteh", h, self.w2) + self.b2
        return torch.einsum("bte,bteh->bth", gates, out)


class Expert(nn.Module):
    """The expert of Mixtral: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=bias, dtype=dtype) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def perceptron(dim: int, hidden: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The expert of nanoGPT-like mixtures."""
    return nn.Sequential(nn.Linear(dim, hidden, dtype=dtype), nn.GELU(), nn.Linear(hidden, dim, dtype=dtype))


class ExpertLoop(nn.Module):
    """A list of experts, and a loop over it.

    Args:
        how: "transformers" (Mixtral up to 4.53: one-hot, where, index_add_), "mistral" (mistral-inference: where, an
            item assignment), "mask" (every expert for every token, times its weight), "slots" (the same, one selection
            after the other), "stack" (every expert for every token, stacked, the selected ones gathered).
    """

    def __init__(
        self,
        how: str,
        *,
        dim: int = 32,
        hidden: int = 16,
        num_experts: int = 8,
        top_k: int = 2,
        dtype: torch.dtype = torch.float32,
        make: Callable[..., nn.Module] = Expert,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False, dtype=dtype)
        self.experts = nn.ModuleList(make(dim, hidden, dtype) for _ in range(num_experts))
        self.how, self.top_k = how, top_k

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        weights, ids = self.gate(x).float().softmax(-1).topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return getattr(self, f"_{self.how}")(x, weights, ids).view(hidden_states.shape)

    def _transformers(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        expert_mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        for expert_idx in range(len(self.experts)):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = x[None, top_x].reshape(-1, x.shape[-1])
            rows = self.experts[expert_idx](current_state) * weights[top_x, idx, None]
            out.index_add_(0, top_x, rows.to(x.dtype))
        return out

    def _mistral(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(ids == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(x[batch_idx])
        return results

    def _mask(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + (weights * (ids == i)).sum(-1, keepdim=True) * expert(x)
        return out

    def _slots(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k in range(self.top_k):
            for i, expert in enumerate(self.experts):
                out = out + torch.where((ids[:, k] == i)[:, None], weights[:, k, None] * expert(x), 0.0)
        return out

    def _stack(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], dim=1)
        picked = outs.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(1)


class PostNormExperts(nn.Module):
    """Stacked experts with a norm after each, on rows sorted by expert: transformers' muse_spark, in fewer lines."""

    def __init__(self, *, dim: int = 32, hidden: int = 16, num_experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.gate_up_proj = _filled(num_experts, 2 * hidden, dim, dtype=torch.bfloat16)
        self.down_proj = _filled(num_experts, dim, hidden, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.zeros(dim))
        self.top_k = top_k

    def norm(self, x: Tensor) -> Tensor:
        wide = (x.float() * (1.0 + self.scale).float()).type_as(x).float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-8)).type_as(x)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()
        weights, ids = torch.topk(scores, self.top_k, dim=-1, sorted=False)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-15)
        ordered, perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(
            ordered.float(), bins=self.gate_up_proj.shape[0], min=0, max=self.gate_up_proj.shape[0] - 1
        )
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = torch._grouped_mm(x[perm // self.top_k], self.gate_up_proj.transpose(-2, -1), offs=offsets)
        gate, up = h.chunk(2, dim=-1)
        rows = self.norm(torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=offsets))
        rows = (rows * weights.reshape(-1)[perm].unsqueeze(-1))[torch.argsort(perm)]
        return rows.view(*ids.shape, -1).sum(dim=1).to(x.dtype).view(hidden_states.shape)


class DeepSpeed(nn.Module):
    """DeepSpeed's MOELayer with top2gating (deepspeed/moe/sharded_moe.py) on one device: every expert has slots for
    some tokens, second choices come behind all first ones, gates are renormalised over what is kept. Returns the result
    and the load-balancing loss.

    Args:
        capacity_factor: slots of an expert, by its even share of the tokens; the capacity is a number of Python here.
    """

    def __init__(
        self,
        *,
        dim: int = 32,
        hidden: int = 16,
        num_experts: int = 8,
        top_k: int = 2,
        capacity_factor: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden, dtype) for _ in range(num_experts))
        self.top_k, self.capacity_factor = top_k, capacity_factor

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        combine_weights, dispatch_mask, l_aux = self._gate(x.float())
        dispatched = torch.einsum("sec,sm->ecm", dispatch_mask.type_as(x), x).unsqueeze(0)
        chunks = dispatched.chunk(len(self.experts), dim=1)
        outs = torch.cat([expert(chunk) for chunk, expert in zip(chunks, self.experts, strict=True)], dim=1)
        combined = torch.einsum("sec,ecm->sm", combine_weights.type_as(x), outs.squeeze(0))
        return combined.reshape(hidden_states.shape), l_aux

    def _gate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates = F.softmax(F.linear(x, self.wg.weight.float()), dim=1)
        num_experts = gates.shape[1]
        capacity = max(math.ceil(x.shape[0] / num_experts * self.capacity_factor * self.top_k), 4)
        mask1 = F.one_hot(torch.argmax(gates, dim=1), num_classes=num_experts)
        rest = gates.masked_fill(mask1.bool(), float("-inf"))
        mask2 = F.one_hot(torch.argmax(rest, dim=1), num_classes=num_experts)
        locations1, locations2 = torch.cumsum(mask1, dim=0) - 1, torch.cumsum(mask2, dim=0) - 1
        locations2 += torch.sum(mask1, dim=0, keepdim=True)
        l_aux = torch.mean(gates.mean(dim=0) * mask1.float().mean(dim=0)) * num_experts * num_experts
        mask1 *= torch.lt(locations1, capacity)
        mask2 *= torch.lt(locations2, capacity)
        locations1_s, locations2_s = torch.sum(locations1 * mask1, dim=1), torch.sum(locations2 * mask2, dim=1)
        gates1_s = torch.einsum("se,se->s", gates, mask1.float())
        gates2_s = torch.einsum("se,se->s", gates, mask2.float())
        denom_s = torch.clamp(gates1_s + gates2_s, min=torch.finfo(gates.dtype).eps)
        gates1_s /= denom_s
        gates2_s /= denom_s
        gates1 = torch.einsum("s,se->se", gates1_s, mask1.float())
        gates2 = torch.einsum("s,se->se", gates2_s, mask2.float())
        locations1_sc = F.one_hot(locations1_s, num_classes=capacity).float()
        locations2_sc = F.one_hot(locations2_s, num_classes=capacity).float()
        combine1_sec = torch.einsum("se,sc->sec", gates1, locations1_sc)
        combine2_sec = torch.einsum("se,sc->sec", gates2, locations2_sc)
        combine_weights = combine1_sec + combine2_sec
        return combine_weights, combine_weights.bool(), l_aux
