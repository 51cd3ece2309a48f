"""Products of decoded weights compile for Hopper: weights are operands in registers, and nothing spills."""

from __future__ import annotations

import re

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import PACKED, tile_for
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import _expert_mm_kernel
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import fit
from moe_ops.plans import bucket
from tests.crosscompile.compiling import Compiled, compile_kernel

E, K, H, I = 128, 8, 2048, 768
TYPES = {torch.uint8: "u8", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv", torch.bfloat16: "bf16"}
TYPES |= {torch.float32: "fp32", torch.int32: "i32"}


def compile_packed(scheme: str, tile: MMConfig, *, gated: bool) -> Compiled:
    """One product with Qwen3-30B-A3B's dimensions: GEMM 1 with gathered rows, or GEMM 2."""
    N, depth = (2 * I, H) if gated else (H, I)
    stored, scales = SCHEMES[scheme].quantize(torch.randn(2, N, depth))
    activation = "silu" if gated else None
    weight = Operand(stored, SCHEMES[scheme], scales)
    mm = ExpertMM(weight, torch.bfloat16, glu_layout="concat" if gated else "none", activation=activation)
    tile = fit(tile, mm)
    rows, out = (torch.empty(256, columns, dtype=torch.bfloat16) for columns in (depth, mm.out_features))
    made = mm.prepare(rows, out, tile, gathered=gated)
    code = TYPES[mm.weight.dtype]
    arguments: dict[str, str | None] = {
        "a": "*bf16:16",
        "a_desc": None,
        "a_scale": None,
        "row_to_pair": "*i32:16" if gated else None,
        "extents": "*i32:16",
        "w": f"*{code}:16",
        "w_desc": f"tensordesc<{code}[{', '.join(map(str, made.w_desc.block_shape))}]>",
        "bias": None,
        "out": "*bf16:16",
        "out_desc": None,
        "out_scale": "*fp32:16",
        "load_ptr": None,
        **dict.fromkeys(("num_rows", "up_scale_offset", "up_zeros_offset", "up_outer_offset"), "i32"),
        "up_offset": "i32:16",
        **dict.fromkeys(("alpha", "limit"), "fp32"),
    }
    for role, name in (("groups", "w_scale"), ("zeros", "w_zeros"), ("rows", "w_outer")):
        scale = mm.decoding[role].tensor
        arguments[name] = None if scale is None else f"*{TYPES[scale.dtype]}:16"
    constants = {
        **{"E": E, "N": mm.out_features, "K": depth, "TOP_K": K if gated else 0, "STRIDES": made.strides},
        **{"BLOCK": made.block, "GLU": mm.glu, "ACTIVATION": activation, "MOVES": made.moves, "SCHEME": mm.scheme},
        **{"BATCHED": False, "WALK": made.walk, "PDL": True},
    }
    return compile_kernel(
        _expert_mm_kernel,
        {name: kind for name, kind in arguments.items() if kind is not None},
        {**constants, **{name: None for name, kind in arguments.items() if kind is None}},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=True,
    )


@pytest.mark.parametrize(
    ("tokens", "gated"),
    [(16, True), (256, True), (4096, True), (4096, False)],
    ids=["16_gate_up", "256_gate_up", "4096_gate_up", "4096_down"],
)
@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_compiles(scheme: str, tokens: int, gated: bool) -> None:
    """By the tile of so many tokens."""
    sizes = (2 * I, H) if gated else (H, I)
    tile = tile_for(scheme, E, bucket(tokens * K), *sizes, "NVIDIA H200", 90, "up")
    kernel = compile_packed(scheme, tile, gated=gated)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    products = re.findall(r"HGMMA\S+ R\d+, (\S+),", kernel.sass)
    assert products and all(operand.startswith("R") for operand in products)
    assert kernel.ptx_count(r"cp\.async\.bulk\.tensor") > 0, "weights come by descriptor"
