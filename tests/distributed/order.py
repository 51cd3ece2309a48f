"""What Inductor makes of code that computes something between the halves of exchanges; no other rank is there.

python -m tests.distributed.order
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import moe_ops
from moe_ops import ep

E, K, H, I = 8, 2, 64, 32


def layer(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """A shared expert stands between the halves."""
    preparing = ep.prepare_start(x, weights, ids, num_experts=E, group=dist.group.WORLD, transport="symm")
    h = F.silu(x @ up)
    prepared = ep.prepare_wait(preparing, [h])
    finalizing = ep.finalize_start(ep.experts(prepared, gate_up, down), prepared)
    return ep.finalize_wait(finalizing, h @ up.T)


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    on_cpu = torch.library.Library("moe_ops", "IMPL")
    on_cpu.impl("symm_start", lambda tensors, *, group, gather, apart: tensors[0].new_empty(1), "CPU")

    def received(
        token: Tensor, tensors: list[Tensor], after: list[Tensor], *, group: str, gather: bool
    ) -> list[Tensor]:
        return [tensor.repeat(2 if gather else 1, *[1] * (tensor.dim() - 1)) for tensor in tensors]

    on_cpu.impl("symm_wait", received, "CPU")
    ep._transport = lambda *arguments: "symm"
    weights, ids = moe_ops.fused_topk(torch.randn(16, E), top_k=K)
    tensors = (torch.randn(16, H), weights, ids, torch.randn(E // 2, 2 * I, H), torch.randn(E // 2, H, I))
    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(layer, fullgraph=True), *tensors, torch.randn(H, I))
    print(re.findall(r"= torch\.ops\.moe_ops\.(symm_\w+)|(mm)\(|\.(fused_experts)\(", code[-1]))


if __name__ == "__main__":
    main()
