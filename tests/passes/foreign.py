"""MoE layers as people write them outside of transformers: after the public definition of each, in fewer lines.

Where a layer has its own names for dimensions they are kept: that is the code a user has.
"""

from __future__ import annotations

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


class TorchTitan(nn.Module):
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
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False, dtype=dtype)
        self.w1, self.w3 = (_filled(num_experts, hidden, dim, dtype=dtype) for _ in range(2))
        self.w2 = _filled(num_experts, dim, hidden, dtype=dtype)
        self.shared_experts = SwiGLU(dim, hidden, dtype) if shared else None
        self.num_experts, self.top_k, self.score_func = num_experts, top_k, score_func
        self.route_norm, self.route_scale, self.counting = route_norm, route_scale, counting
        self.score_before_experts = score_before_experts
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
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offsets))
        h = h * torch._grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(h, self.w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)

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
