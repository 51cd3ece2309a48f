"""Layers again and again, whose bits must not change, and products, whose tiles must be drawn once each: to be run in
several processes at once, as `test_in_company.py` does.

A GPU that processes share stops all warps of a program anywhere, and goes on with each of them some time later. What
warps leave to chance then happens: see `hopper._by_one_lane`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import moe_ops
from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM
from tests.cuda.sanitized import weights

E, K, H, I = 32, 8, 2048, 768
SECONDS = 1.0
AT_ONCE = 8  # layers that are under way: turns end anywhere in them
#: Scheme, None without one -> tokens, which is to say kernels: of few rows an expert, of 256, of 1024.
LAYERS = {
    None: (1, 16, 1024, 4096),
    "fp8_block128": (16, 1024),
    "fp8_channel": (1, 4096),
    "mxfp4": (1, 16, 1024, 4096),
    "mxfp8": (4096,),
    "int4_w4a16": (16, 1024),
    "mxfp4_a8": (16, 1024, 4096),
    "w4a8_fp8": (1024, 4096),
}
PLAIN = MMConfig(128, 256, 64, 8, 8, 4, a_tma=True, w_tma=True)


def main() -> None:
    """A line of every layer, in both formats, of gradients and of products."""
    torch.manual_seed(0)
    for gathered in (False, True):
        draw(gathered)
    for scheme, sizes in LAYERS.items():
        made = weights(scheme, E, H, I)
        for T in sizes:
            x, logits = torch.randn(T, H, device="cuda").bfloat16(), torch.randn(T, E, device="cuda")
            for format in ("grouped", "batched"):
                repeat(f"{scheme or 'bf16'} {format} T={T}", partial(layer, x, logits, top_k=K, format=format, **made))
    made = {name: weight.requires_grad_() for name, weight in weights(None, E, H, I).items()}
    for T in (512, 4096):
        x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        logits = torch.randn(T, E, device="cuda", requires_grad=True)
        repeat(f"gradients T={T}", partial(step, x, logits, made))
    print("ran")


def layer(*given: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return [moe_ops.fused_moe(*given, **options)]


def step(x: torch.Tensor, logits: torch.Tensor, made: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A layer and its gradients."""
    out = moe_ops.fused_moe(x, logits, top_k=K, **made)
    return [out, *torch.autograd.grad(out, [x, logits, *made.values()], out)]


def repeat(told: str, run: Callable[[], list[torch.Tensor]]) -> None:
    """Run it for a while, and say how often some of its outputs had other bits than the first time."""
    first = run()
    run()  # what is compiled and loaded once is behind it
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    times, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(AT_ONCE):
            changed += torch.stack([(a != b).any() for a, b in zip(run(), first, strict=True)]).any()
        times += AT_ONCE
        torch.cuda.synchronize()
    print(f"{told}: {int(changed)} of {times} with other bits", flush=True)


def draw(gathered: bool) -> None:
    """Run a product for a while, and say how often its programs drew other numbers than those of its tiles, and
    each one behind them.
    """
    rows = 1024 * E
    weight = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16)
    mm = ExpertMM(Operand(weight, SCHEMES["bf16"], ()), torch.bfloat16, bias=None)
    offsets = torch.arange(1, E + 1, device="cuda", dtype=torch.int32) * (rows // E)
    gather = {"row_to_pair": torch.randperm(rows, device="cuda", dtype=torch.int32), "top_k": K} if gathered else {}
    x = torch.randn(rows // K if gathered else rows, H, device="cuda", dtype=torch.bfloat16)
    tiles = rows // PLAIN.block_m * (2 * I // PLAIN.block_n)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    grouped_mm(x, mm, offsets, PLAIN, num_rows=rows, **gather)
    others, times, end = 0, 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        counters = torch.zeros(AT_ONCE, 1, dtype=torch.int32, device="cuda")
        for told in counters:
            grouped_mm(x, mm, offsets, PLAIN, num_rows=rows, told=told, **gather)
        others += int((counters != tiles + programs).sum())
        times += AT_ONCE
    print(f"product, {'gathered' if gathered else 'sorted'}: {others} of {times} with other numbers", flush=True)


if __name__ == "__main__":
    main()
