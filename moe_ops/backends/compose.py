"""``fused_moe`` of the backends that run it as ``fused_topk`` and then ``fused_experts``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

#: Keyword arguments of ``fused_moe`` that are those of ``fused_topk``.
ROUTING_OPTIONS = ("top_k", "routing", "renormalize", "renorm_eps", "num_groups", "topk_groups", "scale")


def topk_then_experts(
    fused_topk: Callable[..., tuple[Tensor, Tensor]], fused_experts: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """A backend's ``fused_moe``, with the operator's signature, from its two halves."""

    def fused_moe(
        hidden_states: Tensor,
        router_logits: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        correction_bias: Tensor | None = None,
        *experts_tensors: Tensor | None,
        **options: Any,
    ) -> Tensor:
        routing = {name: options.pop(name) for name in ROUTING_OPTIONS}
        routed = fused_topk(router_logits, correction_bias, **routing)
        return fused_experts(hidden_states, gate_up_proj, down_proj, *routed, *experts_tensors, **options)

    return fused_moe
