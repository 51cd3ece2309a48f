"""Products of int4 codes and rows of e4m3, in Gluon, compile for Hopper: nothing spills in a loop, nothing waits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import DECODED, PACKED, tile_for
from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.decoded_fp8_mm import MOST, _decoded_fp8_mm_kernel
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import fit
from moe_ops.plans import bucket
from tests.crosscompile.compiling import Compiled, quantized
from tests.crosscompile.test_packed import common_arguments, compile_gluon, descriptor, note_launch

H, I = 2048, 768
MANY = MMConfig(128, 128, 128, 8, 8, 3, a_tma=True, w_tma=True)


def product(scheme: str, layout: str | None, *, bias: bool = False, sizes: tuple[int, int] = (H, I)) -> ExpertMM:
    """GEMM 1 of a layout, or GEMM 2."""
    hidden, width = sizes
    N, depth = (width if layout == "none" else 2 * width, hidden) if layout else (hidden, width)
    stored, scales = quantized(scheme, N, depth)
    first: dict[str, Any] = {"glu_layout": layout, "activation": "silu", "quantize_output": True} if layout else {}
    shift = torch.empty(2, N, dtype=torch.bfloat16) if bias else None
    return ExpertMM(Operand(stored, SCHEMES[scheme], scales), torch.bfloat16, **first, bias=shift)


def compile_product(mm: ExpertMM, *, experts: int = 128, swapped: bool = False) -> Compiled:
    rows = torch.empty(256, mm.in_features, dtype=torch.float8_e4m3fn)
    out, _ = mm.allocate((256,), rows)
    made = mm.prepare_decoded_fp8(rows, out, MANY)
    arguments = common_arguments(mm) | {
        "a_desc": descriptor(made.a_desc), "a_scale": "*fp32:16", "w_desc": descriptor(made.w_desc),
        "out_desc": descriptor(made.out_desc), "told": "*i32:16",
    }  # fmt: skip
    for name in ("up_offset", "w_zeros", "up_zeros_offset"):
        del arguments[name]
    kernel = compile_gluon(_decoded_fp8_mm_kernel, mm, made, arguments, experts=experts, swapped=swapped)
    assert not kernel.overwritten
    return kernel


@pytest.mark.parametrize(("layout", "experts"), [("concat", 8), ("interleaved", 512), ("none", 8), (None, 8)], ids=str)
def test_compiles(layout: str | None, experts: int) -> None:
    """Weights are decoded into registers, products of 64 rows of tokens each of them is multiplied in. Of few experts
    nothing spills in a loop.
    """
    kernel = compile_product(product("w4a8_fp8", layout, bias=layout == "concat"), experts=experts)
    products = re.findall(r"(QGMMA\S+) R\d+, (\S+),", kernel.sass)
    assert {name for name, _ in products} == {"QGMMA.64x64x32.F32.E4M3.E4M3"}
    assert all(operand.startswith("R") for _, operand in products)
    steps = [body for body in kernel.loops if sum("QGMMA" in line[1] for line in body) == 4 * MOST.value]
    steps = [body for body in steps if any(line[1].startswith("SYNCS") for line in body) and len(body) < 470]
    assert len(steps) >= 2, "one for each group of warps"
    for body in steps:
        assert len([line for line in body if line[1].startswith(("LDL", "STL"))]) <= (0 if experts == 8 else 16)


@pytest.mark.parametrize(("scheme", "taken"), [*((s, True) for s in sorted(DECODED - PACKED)), ("fp8_channel", False)])
def test_which_products_it_takes(scheme: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, of experts with many rows that come by descriptor."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = product(scheme, "concat")
    tile = fit(MANY, mm)
    assert mm.specialises(tile) == taken
    assert not taken or tile.block_m == 128
    others = (tile._replace(a_tma=False), tile._replace(w_tma=False), tile._replace(block_m=64))
    assert not any(mm.specialises(other) for other in others)
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    assert not mm.specialises(tile) and (not taken or fit(MANY, mm).block_m * fit(MANY, mm).block_n <= 128 * 128)


@pytest.mark.parametrize("scheme", sorted(DECODED - PACKED))
def test_plans_are_made_for_it(scheme: str) -> None:
    """Where experts have many rows."""
    few, many = (tile_for(scheme, 128, bucket(128 * rows), 1536, 2048, "NVIDIA H200", 90, "up") for rows in (8, 128))
    assert (few.block_m, few.a_tma) == (16, False) and (many.block_m, many.a_tma) == (128, True)


@pytest.mark.parametrize("layout", ["concat", None], ids=str)
def test_every_argument_of_a_launch_has_its_place(layout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launch(monkeypatch)
    for name in ("quantize_sorted", "quantize_batched"):
        monkeypatch.setattr(expert_mm, name, lambda rows, *given, **options: (rows, None))
    mm = replace(product("w4a8_fp8", layout, bias=True), rows_scale=torch.ones(512, 1))
    rows, extents = torch.empty(512, mm.in_features, dtype=torch.float8_e4m3fn), torch.tensor([100, 512]).int()
    told = torch.zeros(mm.words_told(MANY, 512), dtype=torch.int32)
    out, _ = expert_mm.grouped_mm(rows, mm, extents, MANY, num_rows=512, pdl=True, told=told)
    assert list(launched) == _decoded_fp8_mm_kernel.arg_names
    scales = [mm.decoding[role] for role in ("groups", "rows")]
    same = {"a_scale": mm.rows_scale, "w_scale": scales[0].tensor, "w_outer": scales[1].tensor, "bias": mm.bias}
    assert launched["told"] is told and told.numel() == 1
    for name, value in (same | {"extents": extents}).items():
        given = launched[name]
        assert given is value or (given.data_ptr(), given.shape) == (value.data_ptr(), value.shape), name
    bases = {"a_desc": rows, "w_desc": mm.weight, "out_desc": out}
    assert all(launched[name].base.data_ptr() == tensor.data_ptr() for name, tensor in bases.items())
    assert out.dtype == (torch.float32 if layout else torch.bfloat16)  # no tile has whole rows
    sizes = {"num_rows": 512, "E": 2, "N": mm.out_features, "K": mm.in_features, "GLU": mm.glu, "SWAPPED": False}
    sizes |= {"up_scale_offset": scales[0].up_offset, "PDL": True, "BATCHED": False}
    assert {name: launched[name] for name in sizes} == sizes
