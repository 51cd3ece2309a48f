"""triton_kernels' layer with mxfp4 weights, the way vLLM serves gpt-oss on Hopper: both products by `matmul_ogs`, bytes
and scales in Hopper's layouts, the activation in the first product.

The interface is that of the version that vLLM 0.33 brings (benchmarks/carry.py). The layouts are named here, not asked
for: what the package would choose on another GPU is another kernel. Bytes and scales are those of `ours_mxfp4`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from benchmarks.cases import Case, InputSet
from benchmarks.timing import Thunk

WARPS = 8  # of a product: the layout of the scales holds it, and vLLM takes the default
GROUPS = 4  # of 32 elements, whose scales a product reads together


@triton.jit(repr=lambda _: "gated_silu")  # part of the product's name, which can have no dots
def gated_silu(rows):
    """`[M, 2 N]` fp32, gate and up columns in turn, to `[M, N]`. The package's own is silu(gate) * (up + 1)."""
    gate, up = tl.split(tl.reshape(rows, (rows.shape[0], rows.shape[1] // 2, 2)))
    return gate / (1 + tl.exp(-gate)) * up


def bind(case: Case, inputs: InputSet) -> Thunk:
    """The layer of one input set, router logits to output."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.routing import routing

    made = case.weights.form("triton_kernels_mxfp4", lambda: projections(case))
    (gate_up, gate_up_precision), (down, down_precision) = made
    activation = FusedActivation(FnSpecs("gated_silu", gated_silu, ()), (), 2)

    def run() -> torch.Tensor:
        with products_in_one_part():
            data, gather, scatter = routing(inputs.router_logits, case.shape.K)
            hidden = matmul_ogs(
                inputs.hidden_states,
                gate_up,
                None,
                data,
                gather_indx=gather,
                precision_config=gate_up_precision,
                fused_activation=activation,
            )
            return matmul_ogs(
                hidden,
                down,
                None,
                data,
                scatter_indx=scatter,
                precision_config=down_precision,
                gammas=data.gate_scal,
            )

    return run


@contextmanager
def products_in_one_part() -> Iterator[None]:
    """Products inside are not split along K, as vLLM has it on Hopper. Those of the peer `triton_kernels` stay as the
    package chooses: the setting is the package's, for all that run after it.
    """
    from triton_kernels.matmul_ogs_details import opt_flags

    opt_flags.update_opt_flags_constraints({"split_k": 1})
    try:
        yield
    finally:
        opt_flags.reset_opt_flags_constraints()


def projections(case: Case) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """`weight_and_precision` of both projections."""
    tensors = case.weights.quantized("mxfp4")
    (gate_up_scale,), (down_scale,) = tensors["gate_up_scales"], tensors["down_scales"]
    gate_up = weight_and_precision(in_turn(tensors["gate_up_proj"]), in_turn(gate_up_scale.view(torch.uint8)))
    return gate_up, weight_and_precision(tensors["down_proj"], down_scale.view(torch.uint8))


def in_turn(rows: torch.Tensor) -> torch.Tensor:
    """`[E, 2I, X]`, all gate rows before all up rows, to the same with a gate and an up row in turn."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def weight_and_precision(stored: torch.Tensor, scale: torch.Tensor) -> tuple[Any, Any]:
    """(weight `[E, K, N]`, `PrecisionConfig` with its scales), in Hopper's layouts.

    Args:
        stored: bytes `[E, N, K / 2]`, the earlier of two elements in the low half.
        scale: e8m0 as bytes, `[E, N, K / 32]`. They are padded to whole GROUPS: the product has no mask for them.
    """
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    bytes_EKN = wrap_torch_tensor(stored.transpose(1, 2), dtype=FP4)
    scales_EKN = wrap_torch_tensor(F.pad(scale, (0, -scale.shape[2] % GROUPS)).transpose(1, 2))
    weight = convert_layout(bytes_EKN, layout.HopperMXValueLayout, mx_axis=1)
    scales = convert_layout(scales_EKN, layout.HopperMXScaleLayout, mx_axis=1, num_warps=WARPS)
    return weight, PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))
