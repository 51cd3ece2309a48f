"""Which kernels a layer launches on an H200, told on a CPU: as many as it may have, and those of its scheme."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops import plans
from moe_ops.backends import triton as backend
from moe_ops.backends import triton_plans
from moe_ops.counters import Row
from moe_ops.kernels import triton as kernels
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import Layer
from tests.ops.scheme_layers import build

GPU = ("NVIDIA H200", 90)
ON_THE_GPU: dict[str, Callable[..., Any]] = {
    "gpu_of": lambda device: GPU,
    "hopper_with_gluon": lambda device: True,
    "pdl_launches": lambda device: True,
    "multiprocessors": lambda device: 132,
    "side_by_side": lambda *given: 132,
    "on_device": lambda tensor: contextlib.nullcontext(),
}
QUANTISED = sorted(triton_plans.DECODED | triton_plans.PROMOTED | {"int8_channel"})
E, K, H, I = 4, 2, 1024, 512
MOST = 4096  # tokens


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the kernels that are launched, none of which runs."""
    found: list[str] = []
    noting = {**ON_THE_GPU, "launch": lambda kernel, grid, *given, **options: found.append(kernel.fn.__name__)}
    for part in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{part.name}")
        for name, stand_in in noting.items():
            if callable(getattr(module, name, None)):
                monkeypatch.setattr(module, name, stand_in)
    return found


@cache
def of_scheme(scheme: str) -> dict[str, Any]:
    """Of the most tokens: quantising the weights takes ten times as long as to tell what is launched for them."""
    return build(scheme, T=MOST, sizes=(E, K, H, I)).tensors


def layer_of(scheme: str, T: int) -> dict[str, Any]:
    tensors = of_scheme(scheme)
    return tensors | {name: tensors[name][:T] for name in ("hidden_states", "topk_weights", "topk_ids")}


def run(scheme: str, T: int, format: str, static: bool = False) -> None:
    made, row = layer_of(scheme, T), SCHEMES[scheme]
    of_rows = torch.ones(E, 1, 1) if static else None
    first, second = (
        Operand(made[f"{name}_proj"], row, tuple(made[f"{name}_scales"]), of_rows) for name in ("gate_up", "down")
    )
    up = ExpertMM(first, torch.bfloat16, glu_layout="concat", activation="silu")
    layer = Layer(up, ExpertMM(second, torch.bfloat16), scheme, capacity=T if format == "batched" else None)
    plan = triton_plans.cheapest(plans.LayerKey(scheme, format, E, K, H, I, True), T, *GPU)
    layer.run(plan, Operand(made["hidden_states"], None), made["topk_weights"], made["topk_ids"])


@pytest.mark.parametrize("T", [1, 3, 17, 300])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", QUANTISED)
def test_a_layer_is_five_kernels_at_most(scheme: str, format: str, T: int, names: list[str]) -> None:
    run(scheme, T, format)
    assert 2 <= len(names) <= 5, names


@pytest.mark.parametrize("T", [1900, 2200])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", QUANTISED)
def test_products_of_many_rows_are_those_of_hopper(scheme: str, format: str, T: int, names: list[str]) -> None:
    """Of fewer than 1024 rows an expert, and of more, for which codes with scales of their own are decoded once."""
    run(scheme, T, format)
    shares = scheme in triton_plans.SHARED_OF_COLUMNS and T * K >= 1024 * E
    decoded = f"_decoded_{'plain_' if shares else '' if scheme in triton_plans.PACKED else 'once_'}mm_kernel"
    wanted = decoded if scheme in triton_plans.DECODED else "_promoted_mm_kernel"
    wanted = "_expert_mm_kernel" if scheme == "int8_channel" else wanted
    assert [name for name in names if name.endswith("_mm_kernel")] == [wanted] * 2


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", [name for name in QUANTISED if SCHEMES[name].static_rows is not None])
def test_static_scales_cost_many_rows_a_kernel_more(scheme: str, format: str, names: list[str]) -> None:
    """Which quantises what is sorted. Words that programs tell one another are made 0 by a kernel that is there."""
    run(scheme, MOST, format, static=True)
    assert len(names) <= 8 and "_clear_kernel" not in names, names


@pytest.mark.parametrize("T", [16, 2200])
@pytest.mark.parametrize("scheme", sorted(triton_plans.PACKED | triton_plans.PROMOTED))
def test_rows_of_a_product_in_gluon_are_counted_before(scheme: str, T: int, names: list[str]) -> None:
    """Of a stage of its own, which alone knows them, where they are many."""
    made, row = layer_of(scheme, T), SCHEMES[scheme]
    weight = Operand(made["gate_up_proj"], row, tuple(made["gate_up_scales"]))
    rows, scales = torch.empty(T * K, H, dtype=torch.bfloat16), ()
    if row.rows is not None:
        rows, scales = rows.to(row.rows.dtype), (torch.empty(T * K, row.rows.scale_width(H)),)
    call = SimpleNamespace(
        problem=SimpleNamespace(scheme=scheme, M=len(rows), format="grouped"), device=rows.device, weight=weight,
        x=Operand(rows, row.rows, scales), extents=torch.zeros(E, dtype=torch.int32), bias=None,
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    backend._gemm(call, Row(weight.data), glu_layout="concat", activation="silu")
    kernels = {"_decoded_mm_kernel", "_decoded_plain_mm_kernel", "_decoded_once_mm_kernel", "_promoted_mm_kernel"}
    assert ("_count_rows_kernel" in names) == (len(kernels.intersection(names)) == 1) == (T > 1000)
