"""vLLM's Triton experts: its kernel and its configurations, carried (benchmarks/carry.py), and what stands around them.

Written from what vLLM's `fused_experts` does: align rows to blocks of one expert, product, silu times up, product times
the routing weights, sum over K. The alignment is made once, on the host, outside of what is timed, which favours the
peer. The two small kernels between the products are ours.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.carry import CONFIGURATIONS, PEERS
from benchmarks.cases import Case, InputSet
from benchmarks.timing import Thunk

BLOCK = 1024
COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def silu_mul_kernel(gate_up, output, width: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(output + row * width + column, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(rows, output, width: tl.constexpr, slots: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(slots):
        total += tl.load(rows + (token * slots + slot) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * width + column, total.to(output.dtype.element_ty), mask=inside)


def bind(case: Case, inputs: InputSet) -> Thunk:
    """The experts of one input set."""
    shape, weights, like = case.shape, case.weights, inputs.hidden_states
    config, _ = configuration(case)
    pairs = case.T * shape.K
    blocks = alignment(inputs.topk_ids, shape.E, config["BLOCK_SIZE_M"])
    gate_up_RN, down_RH = like.new_empty(pairs, 2 * shape.I), like.new_empty(pairs, shape.H)
    hidden_RI, output_TH = like.new_empty(pairs, shape.I), torch.empty_like(like)
    routing_weights = inputs.topk_weights.float().contiguous()

    def run() -> torch.Tensor:
        product(like, weights.gate_up_proj, gate_up_RN, routing_weights, blocks, config, slots=shape.K, weighted=False)
        silu_mul_kernel[pairs, triton.cdiv(shape.I, BLOCK)](gate_up_RN, hidden_RI, shape.I, BLOCK)
        product(hidden_RI, weights.down_proj, down_RH, routing_weights, blocks, config, slots=1, weighted=True)
        sum_kernel[case.T, triton.cdiv(shape.H, BLOCK)](down_RH, output_TH, shape.H, shape.K, BLOCK)
        return output_TH

    return run


def product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    routing_weights: torch.Tensor,
    blocks: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, int],
    config: dict[str, int],
    *,
    slots: int,
    weighted: bool,
) -> None:
    """One launch: output row p is rows[p // slots] times the weight of its expert."""
    from vllm_kernel import fused_moe_kernel

    token_ids, experts, end, padded = blocks
    N, K = weight.shape[1:]
    no_scales = [0] * 9  # five strides of scales, two of a bias, and the two group sizes
    fused_moe_kernel[(triton.cdiv(padded, config["BLOCK_SIZE_M"]) * triton.cdiv(N, config["BLOCK_SIZE_N"]),)](
        rows, weight, output, None, None, None, routing_weights, token_ids, experts, end,
        N, K, padded, rows.shape[0] * slots, *rows.stride(),
        weight.stride(0), weight.stride(2), weight.stride(1), *output.stride(), *no_scales,
        naive_block_assignment=token_ids is None, MUL_ROUTED_WEIGHT=weighted, top_k=slots,
        compute_type=COMPUTE_TYPES[rows.dtype], use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
        per_channel_quant=False, HAS_BIAS=False, SWAP_AB=False, USE_TD=False, SPLIT_K=1, **config,
    )  # fmt: skip


def alignment(
    topk_ids: torch.Tensor, E: int, block: int
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, int]:
    """(pairs in the order of their experts, each expert's padded to whole blocks; the experts of the blocks; how many
    rows that is, on the device and here). Few pairs are not ordered: each has a block, and there is no first tensor.
    """
    device, pairs = topk_ids.device, topk_ids.numel()
    ids = topk_ids.flatten().to(torch.int32)
    if pairs * 4 <= E:
        return None, ids, torch.tensor([pairs * block], dtype=torch.int32, device=device), pairs * block
    counts_E = ids.bincount(minlength=E)
    blocks_E = (counts_E + block - 1) // block
    padded = int(blocks_E.sum()) * block
    order = ids.sort(stable=True)
    first_E, first_padded_E = counts_E.cumsum(0) - counts_E, (blocks_E.cumsum(0) - blocks_E) * block
    expert_R = order.values.long()
    place_R = first_padded_E[expert_R] + torch.arange(pairs, device=device) - first_E[expert_R]
    tokens = torch.full((padded,), pairs, dtype=torch.int32, device=device)
    tokens[place_R] = order.indices.to(torch.int32)
    experts = torch.arange(E, dtype=torch.int32, device=device).repeat_interleave(blocks_E)
    return tokens, experts, torch.tensor([padded], dtype=torch.int32, device=device), padded


def configuration(case: Case) -> tuple[dict[str, int], str]:
    """(launch parameters, where they are from): vLLM's file for the shape and GPU at its nearest T, else its rule."""
    device = torch.cuda.get_device_name().replace(" ", "_")
    name = "NVIDIA_H200" if "H200" in device.split("_") else device
    tuned = PEERS / CONFIGURATIONS / f"E={case.shape.E},N={case.shape.I},device_name={name}.json"
    if not tuned.exists():
        return default_configuration(case.T, case.shape.E), "vLLM's default configuration"
    rows: dict[str, Any] = json.loads(tuned.read_text())
    nearest = min((key for key in rows if key.isdigit()), key=lambda key: abs(int(key) - case.T))
    return {key: value for key, value in rows[nearest].items() if key != "SPLIT_K"}, "vLLM's tuned configuration"


def default_configuration(T: int, E: int) -> dict[str, int]:
    """vLLM 0.33's for 16-bit weights without a file."""
    return {
        "BLOCK_SIZE_M": 16 if T <= 32 else 32 if T <= 96 else 64 if T <= 512 else 128,
        "BLOCK_SIZE_N": 64 if T <= 64 else 128,
        "BLOCK_SIZE_K": 128 if T <= 64 else 64,
        "GROUP_SIZE_M": 16 if T // E > 128 else 1,
        "num_warps": 4 if T <= 128 else 8,
        "num_stages": 4 if T <= 32 else 3,
    }
