"""What the mxfp4 peer asks of triton_kernels, computed in fp32 on any device from the bytes that it is handed.

Names, arguments and conventions are those of the version that the benchmarks carry; nothing else of it is here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meta.schemes import SCHEMES

FP4 = "FP4"


class HopperMXValueLayout:
    """Of bytes."""


class HopperMXScaleLayout:
    """Of scales."""


@dataclass
class Wrapped:
    """A tensor `[E, K, N]`, K being contiguous, and what it was converted to."""

    data: Tensor
    dtype: Any = None
    layout: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def wrap_torch_tensor(tensor: Tensor, dtype: Any = None) -> Wrapped:
    assert tensor.dtype == torch.uint8 and tensor.stride(1) == 1, "packed along K"
    return Wrapped(tensor, dtype)


def convert_layout(tensor: Wrapped, layout: type, **options: Any) -> Wrapped:
    return Wrapped(tensor.data, tensor.dtype, layout, options)


@dataclass(frozen=True)
class FlexCtx:
    rhs_data: Any = None


@dataclass(frozen=True)
class PrecisionConfig:
    weight_scale: Wrapped
    flex_ctx: FlexCtx


@dataclass(frozen=True)
class FnSpecs:
    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]


@dataclass(frozen=True)
class FusedActivation:
    specs: FnSpecs
    fn_args: tuple[Any, ...]
    reduction_n: int


def routing(logits: Tensor, top_k: int) -> tuple[Any, Tensor, Tensor]:
    """(experts and weights of rows in expert order, the token of every row, the row of every (token, slot) pair)."""
    values_TK, ids_TK = logits.float().topk(top_k)
    experts, order = ids_TK.flatten().sort(stable=True)
    weights = values_TK.softmax(-1).flatten()[order]
    return SimpleNamespace(experts=experts, gate_scal=weights), order // top_k, order.argsort()


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put the package in place; returns what it holds: ``constraints`` in force, and those ``seen`` by each product."""
    state = SimpleNamespace(constraints={}, seen=[])

    def matmul_ogs(
        x: Tensor,
        w: Wrapped,
        bias: None,
        data: Any,
        *,
        gather_indx: Tensor | None = None,
        scatter_indx: Tensor | None = None,
        precision_config: PrecisionConfig,
        gammas: Tensor | None = None,
        fused_activation: FusedActivation | None = None,
    ) -> Tensor:
        state.seen.append(dict(state.constraints))
        rows = (x if gather_indx is None else x[gather_indx]).float()
        output = torch.einsum("rk,rkn->rn", rows, weight_of(w, precision_config)[data.experts])
        if fused_activation is not None:
            assert (fused_activation.specs.fn_arg_names, fused_activation.fn_args) == ((), ())
            assert fused_activation.specs.fn.__name__ == "gated_silu" and fused_activation.reduction_n == 2
            output = torch.nn.functional.silu(output[:, 0::2]) * output[:, 1::2]
        output = output if gammas is None else output * gammas.unsqueeze(1)
        if scatter_indx is not None:
            output = output[scatter_indx].unflatten(0, (-1, len(scatter_indx) // state.tokens)).sum(1)
        else:
            state.tokens = x.shape[0]
        return output.to(x.dtype)

    modules = {
        "matmul_ogs": {name: globals()[name] for name in ("FlexCtx", "FnSpecs", "FusedActivation", "PrecisionConfig")}
        | {"matmul_ogs": matmul_ogs},
        "routing": {"routing": routing},
        "numerics": {"InFlexData": SimpleNamespace},
        "tensor": {"FP4": FP4, "convert_layout": convert_layout, "wrap_torch_tensor": wrap_torch_tensor},
        "tensor_details": {
            "layout": SimpleNamespace(HopperMXValueLayout=HopperMXValueLayout, HopperMXScaleLayout=HopperMXScaleLayout)
        },
        "matmul_ogs_details": {
            "opt_flags": SimpleNamespace(
                update_opt_flags_constraints=state.constraints.update,
                reset_opt_flags_constraints=state.constraints.clear,
            )
        },
    }
    monkeypatch.setitem(sys.modules, "triton_kernels", ModuleType("triton_kernels"))
    for name, contents in modules.items():
        module = ModuleType(f"triton_kernels.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return state


def weight_of(w: Wrapped, precision: PrecisionConfig) -> Tensor:
    """fp32 `[E, K, N]` of bytes and scales in Hopper's layouts; the rest of a last group of scales is not read."""
    scale = precision.weight_scale
    assert (w.dtype, w.layout, w.options) == (FP4, HopperMXValueLayout, {"mx_axis": 1})
    assert (scale.layout, scale.options) == (HopperMXScaleLayout, {"mx_axis": 1, "num_warps": 8})
    assert scale.data.shape[1] % 4 == 0, "a product reads four scales at once"
    stored, of_groups = w.data.transpose(1, 2), scale.data.transpose(1, 2)[..., : w.data.shape[1] // 16]
    return SCHEMES["mxfp4"].dequantize(stored, (of_groups,)).transpose(1, 2)
