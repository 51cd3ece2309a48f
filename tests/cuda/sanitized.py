"""Every kernel on small layers, to be run under NVIDIA's compute-sanitizer: `test_sanitizers.py` does.

Tensors are allocations of their own (PYTORCH_NO_CUDA_MEMORY_CACHING): the sanitizer then sees where each one ends and
what nothing has written. It does not see what a tensor map's stores write: --stores-by-pointer keeps to the others.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch

import moe_ops
from moe_ops.kernels.triton import wgrad
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import ExpertMM
from tests.cuda.specialised import every_tile

E, K, H, I = 6, 2, 256, 192
TOKENS = (1, 3, 40, 300)
#: With how many tokens; fp8_channel for the kernels of one token and of experts with 256 rows and more, mxfp4_a8, also
#: of such experts, and w4a8_fp8 for those of codes beside e4m3.
SCHEMES = {
    **{None: TOKENS, "fp8_block128": TOKENS, "mxfp4": TOKENS},
    **{"fp8_channel": (1, 900), "mxfp4_a8": (300, 900), "w4a8_fp8": (300,)},
}
LARGEST = MMConfig(128, 256, 64, 8, 8, 4, a_tma=True, w_tma=True)
MANY_EXPERTS = 24  # of few rows each, of codes


def main() -> None:
    """Layers, their steps and their gradients, in both formats and every scheme."""
    if "--stores-by-pointer" in sys.argv:
        prepare = ExpertMM.prepare
        ExpertMM.prepare = lambda self, *given, **options: replace(prepare(self, *given, **options), out_desc=None)
        ExpertMM.specialises = lambda self, config: False  # those kernels store by tensor map alone,
        ExpertMM.promotes = lambda self, config, rows: False  # and so do these
        ExpertMM.is_plain = lambda self, config: False
        allows = wgrad.descriptor_strides
        wgrad.descriptor_strides = lambda x, inner: inner == 1 and allows(x, inner=inner)  # inner = 2: the gradient
    torch.manual_seed(0)
    for scheme, format in itertools.product(SCHEMES, ("grouped", "batched")):
        made = weights(scheme)
        for T in SCHEMES[scheme]:
            print(scheme, format, T, flush=True)  # which of them was the last, where one never ends
            x, logits = torch.randn(T, H, device="cuda").bfloat16(), torch.randn(T, E, device="cuda")
            moe_ops.fused_moe(x, logits, top_k=K, format=format, **made)
            stages(x, logits, format, made)
    for scheme, format in itertools.product(("mxfp4", "int4_w4a16"), ("grouped", "batched")):
        x, logits = torch.randn(40, H, device="cuda").bfloat16(), torch.randn(40, MANY_EXPERTS, device="cuda")
        moe_ops.fused_moe(x, logits, top_k=K, format=format, **weights(scheme, MANY_EXPERTS))
    made = {name: weight.requires_grad_() for name, weight in weights(None).items()}
    for T in TOKENS:
        x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        moe_ops.fused_moe(x, torch.randn(T, E, device="cuda"), top_k=K, **made).float().pow(2).sum().backward()
    by_the_largest_tile()
    torch.cuda.synchronize()
    print("ran")


def by_the_largest_tile() -> None:
    """Layers of 16 bits and their gradients, and of codes that tiles share, by the tile of very many rows, which no
    plan takes for so few.
    """
    made = {name: weight.requires_grad_() for name, weight in weights(None).items()}
    with MonkeyPatch.context() as patched, every_tile(LARGEST, patched):
        for format in ("grouped", "batched"):
            print("the largest tile", format, flush=True)
            x = torch.randn(300, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            logits = torch.randn(300, E, device="cuda")
            moe_ops.fused_moe(x, logits, top_k=K, format=format, **made).float().pow(2).sum().backward()
            for scheme in ("mxfp4", "mxfp8"):
                moe_ops.fused_moe(x.detach(), logits, top_k=K, format=format, **weights(scheme))


def weights(scheme: str | None, experts: int = E, width: int = H, inner: int = I) -> dict[str, Any]:
    """Arguments of a layer. The last expert's memory is the last of its allocation."""
    made: dict[str, Any] = {}
    for name, (n, k) in {"gate_up": (2 * inner, width), "down": (width, inner)}.items():
        weight = (torch.randn(experts, n, k, device="cuda") * k**-0.5).bfloat16()
        if scheme is None:
            made[f"{name}_proj"] = weight
        else:
            made[f"{name}_proj"], *made[f"{name}_scales"] = moe_ops.quantize_weight(weight, scheme=scheme)
    return made if scheme is None else {**made, "scheme": scheme}


def stages(x: torch.Tensor, logits: torch.Tensor, format: str, made: dict[str, Any]) -> None:
    """The three steps, some experts without a row."""
    topk_weights, topk_ids = moe_ops.fused_topk(logits, top_k=K)
    scheme = made.get("scheme")
    topk_ids = topk_ids.clamp(max=E - 2)  # the last expert has no row
    if format == "batched" or scheme is None:
        topk_ids[-1] = -1  # else rows behind the last pair, which nothing wrote, would be quantised for nothing
    prepared = moe_ops.prepare(x, topk_weights, topk_ids, num_experts=E, format=format, scheme=scheme)
    moe_ops.finalize(moe_ops.experts(prepared, **made), prepared)


if __name__ == "__main__":
    main()
