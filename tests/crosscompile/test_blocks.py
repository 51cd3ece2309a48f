"""Products of scaled blocks, and what quantises rows for them, compile for sm_100: tensor cores multiply by the scales,
weights come by descriptor, and nothing spills. No such GPU has run them.
"""

from __future__ import annotations

import pytest

from meta.blocks import BLOCKS
from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import tile_for
from moe_ops.kernels.triton.act_quant import _quantize_kernel
from moe_ops.kernels.triton.permute import _place_small_kernel
from moe_ops.plans import bucket
from tests.crosscompile.test_packed import E, H, I, K, compile_packed, products
from tests.crosscompile.test_routing_kernels import (
    BESIDE,
    IDS,
    PLACES,
    PLACING,
    QUANTIZE,
    QUANTIZED,
    SCATTER,
    Case,
    dispatch_case,
    route_case,
    scatter_case,
)

#: The instruction that a scheme's weights and rows are multiplied by.
INSTRUCTIONS = {
    "mxfp8": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale",
    "mxfp4_a8": r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale",
    "nvfp4": r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale",
}
NV_ROWS = {"rows_ptr": "*u8:16", "scale_ptr": "*u8:16"}
MX_SCALE, NV_CODES = {"scale_ptr": "*u8:16"}, {"q_ptr": "*u8:16", "scale_ptr": "*u8:16"}


# Both kinds of blocks in all products, and codes of either size.
@products(
    {
        "16_gate_up": ("mxfp4_a8", "nvfp4"),
        "4096_gate_up": sorted(INSTRUCTIONS),
        "4096_down": ("mxfp8", "nvfp4"),
    }
)
def test_tensor_cores_multiply_by_the_scales(scheme: str, tokens: int, gated: bool) -> None:
    """By the tile of so many tokens."""
    sizes = (2 * I, H) if gated else (H, I)
    tile = tile_for(scheme, E, bucket(tokens * K), *sizes, "NVIDIA B200", 100, "up")
    kernel = compile_packed(scheme, tile, gated=gated, capability=100, blocks=BLOCKS[SCHEMES[scheme].blocks])
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.ptx_count(INSTRUCTIONS[scheme]) == kernel.ptx_count(r"tcgen05\.mma") > 0
    assert kernel.ptx_count(r"cp\.async\.bulk\.tensor") > 0, "weights come by descriptor"
    assert kernel.ptx_count(r"ld\.global\S*\.b8") <= 2, "scales come in words"
    assert kernel.shared <= 227 * 1024


@pytest.mark.parametrize("tokens", [16, 4096])
@pytest.mark.parametrize("scheme", ["mxfp4", "int4_w4a16"])
def test_decoded_weights_are_multiplied_by_tensor_cores(scheme: str, tokens: int) -> None:
    tile = tile_for(scheme, E, bucket(tokens * K), 2 * I, H, "NVIDIA B200", 100, "up")
    kernel = compile_packed(scheme, tile, gated=True, capability=100)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.ptx_count(r"tcgen05\.mma\S*kind::f16") > 0


CASES = {
    "mx_rows": Case(_quantize_kernel, QUANTIZE | MX_SCALE, {"GROUP": 32, "BLOCK_M": 128}),
    "mx_beside": Case(_place_small_kernel, IDS | PLACES | BESIDE | MX_SCALE, {**PLACING, "GROUP": 32}),
    "mx_routed": route_case(128, 8, "softmax", 1, quantized=True, group=32),
    "mx_copies": scatter_case(SCATTER | QUANTIZED | MX_SCALE),
    "nv_rows": Case(_quantize_kernel, QUANTIZE | NV_CODES, {"GROUP": 2048, "BLOCK_M": 2}),
    "nv_long_rows": Case(_quantize_kernel, QUANTIZE | NV_CODES | {"x_ptr": "*fp32:16"}, {"GROUP": 16384, "BLOCK_M": 1}),
    "nv_beside": Case(_place_small_kernel, IDS | PLACES | BESIDE | NV_CODES, {**PLACING, "GROUP": 8192}),
    "nv_copies": scatter_case(SCATTER | NV_ROWS, 8192),
    "nv_dispatched": dispatch_case(NV_ROWS, 8192),
}
CASES["mx_routed"].signature.update(MX_SCALE)
CASES["mx_copies"].constexprs.update(GROUP=32)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_quantised_without_spills(name: str) -> None:
    kernel = CASES[name].compile(100)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
