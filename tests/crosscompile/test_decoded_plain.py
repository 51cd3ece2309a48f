"""Products of 16 bits with codes that are decoded once, in Gluon, compile for Hopper: no sum spills, nothing waits."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ops.backends.triton_plans import PACKED
from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.decoded_plain_mm import _decoded_plain_mm_kernel
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import Layer, fit
from moe_ops.kernels.triton.panels import COUNTERS
from moe_ops.plans import Plan
from tests.crosscompile.compiling import Compiled
from tests.crosscompile.test_decoded_fp8 import product as product_of
from tests.crosscompile.test_packed import (
    common_arguments,
    compile_gluon,
    descriptor,
    halves_in_order,
    note_launch,
)

TOP_K = 8
TILE = MMConfig(128, 256, 64, 8, 8, 3, a_tma=True, w_tma=True)
SCHEMES = ("mxfp4", "nvfp4", "mxfp8", "int8_w8a16", "fp8_w8a16")
LAYOUTS = ("concat", "interleaved", "none", None)


def product(scheme: str, layout: str | None, **options: Any) -> ExpertMM:
    """GEMM 1 of a layout, or GEMM 2, which quantises nothing for rows of bf16."""
    return replace(product_of(scheme, layout, **options), quantize_output=False)


def compile_product(mm: ExpertMM, *, gathered: bool = False, experts: int = 8, swapped: bool = False) -> Compiled:
    rows = torch.empty(512, mm.in_features, dtype=torch.bfloat16)
    made, memory, memory_desc = mm.prepare_decoded_once(
        rows, mm.allocate((512,), rows)[0], TILE, TOP_K if gathered else 0
    )
    arguments = common_arguments(mm) | {
        "a": "*bf16:16", "a_desc": descriptor(made.a_desc), "row_to_pair": "*i32:16" if gathered else None,
        "w_desc": descriptor(made.w_desc), "memory": "*bf16:16", "memory_desc": descriptor(memory_desc),
        "told": "*i32:16", "out_desc": descriptor(made.out_desc),
    }  # fmt: skip
    assert memory.dtype == torch.bfloat16
    for name in ("up_offset", "w_zeros", "up_zeros_offset"):
        del arguments[name]
    return compile_gluon(_decoded_plain_mm_kernel, mm, made, arguments, experts=experts, swapped=swapped)


# Every scheme and layout, rows gathered and sorted; tables of experts are of warps that multiply nothing: the largest
# with one of the others.
@pytest.mark.parametrize(
    ("scheme", "layout", "gathered", "experts"),
    [
        *zip(SCHEMES, itertools.cycle(LAYOUTS), itertools.cycle([True, False]), itertools.repeat(8)),
        ("mxfp8", None, False, 8),
        ("mxfp4", "none", True, 512),
    ],
    ids=str,
)
def test_compiles(scheme: str, layout: str | None, gathered: bool, experts: int) -> None:
    """A step is one product of 256 weight rows for both groups of warps, whose sums stay in registers."""
    kernel = compile_product(product(scheme, layout, bias=layout == "concat"), gathered=gathered, experts=experts)
    assert kernel.stack <= 80, "where a tile ends, or is looked for"
    assert set(re.findall(r"HGMMA\S+", kernel.sass)) == {"HGMMA.64x256x16.F32.BF16"}
    loops = [body for body in kernel.loops if len(body) < 100]
    steps = [body for body in loops if sum("HGMMA" in line[1] for line in body) == 4]
    assert len(steps) >= 2, "one for each group of warps"
    assert not any(line[1].startswith(("LDL", "STL")) for body in steps for line in body)
    assert kernel.stores_16_bytes, "of what is decoded, to memory"
    assert len(re.findall(r"LDGSTS\.E.*", kernel.sass)) == (32 if gathered else 0)
    assert "CCTL" not in kernel.sass, "what is waited for is not acquired, which would empty L1"


@pytest.mark.parametrize("layout", ["concat", None], ids=str)
def test_leaves_rows_in_the_order_of_a_product_that_decodes_in_every_tile(layout: str | None) -> None:
    compile_product(replace(product("mxfp4", layout), out_order=(32, 8)))


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("sizes", [(1184, 320), (1216, 320)], ids=["one_by_one", "in_pairs"])
def test_compiles_for_scales_that_no_wide_load_takes(scheme: str, sizes: tuple[int, int]) -> None:
    compile_product(product(scheme, "concat", sizes=sizes), gathered=True)


@pytest.mark.parametrize("swapped", [False, True], ids=["gate_first", "up_first"])
def test_the_gate_comes_first_wherever_it_is(swapped: bool) -> None:
    """The descriptor begins with the half of the lower address; scales are looked up in the order of the halves."""
    halves = halves_in_order(compile_product(product("mxfp8", "concat", bias=True), swapped=swapped))
    assert halves == (["1", "0"] if swapped else ["0", "1"])


@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_which_weights_it_takes(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose sums wait for no scales and that no zero points are subtracted from; others have the tile in which
    every one decodes. Rows are in their own order.
    """
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm, once = product(scheme, "concat"), scheme in SCHEMES
    assert fit(TILE, mm) == (TILE if once else TILE._replace(block_n=128))
    assert (mm.words_told(fit(TILE, mm), 100) > 1) == once
    assert fit(TILE, mm, as_they_are=True).block_n == 128 and not fit(TILE, mm, as_they_are=True).a_tma
    if once:
        assert mm.order(TILE) is None and mm.order(TILE._replace(block_n=128)) is not None
        assert mm.columns_at_once(TILE) == 64
        assert not replace(mm, out_dtype=torch.float16).specialises(TILE), "rows of two parts"
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    assert fit(TILE, mm).block_n == 128, "no such GPU"


def test_weights_with_zero_points_are_decoded_in_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = product("int8_w8a16", "concat")
    zeros = torch.zeros(mm.operand.scales[0].shape, dtype=torch.int8)
    shifted = replace(mm, operand=replace(mm.operand, scales=(*mm.operand.scales, zeros)))
    assert mm.specialises(TILE) and not shifted.specialises(TILE)


@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
@pytest.mark.parametrize("layout", ["concat", "interleaved", None], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_argument_of_a_launch_has_its_place(
    scheme: str, layout: str | None, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, mm = note_launch(monkeypatch), product(scheme, layout, bias=True)
    rows, extents = torch.empty(1024, mm.in_features, dtype=torch.bfloat16), torch.tensor([100, 1024]).int()
    told, pairs = torch.zeros(mm.words_told(TILE, 1024), dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    gather: dict[str, Any] = {"row_to_pair": pairs, "top_k": TOP_K} if gathered else {}
    out, _ = expert_mm.grouped_mm(rows, mm, extents, TILE, num_rows=1024, pdl=True, told=told, **gather)
    assert list(launched) == _decoded_plain_mm_kernel.arg_names
    panels, steps = 2 * -(-mm.out_features // (128 if layout else 256)), mm.in_features // 64
    assert told.numel() == COUNTERS.value + panels * (1 + steps) + 32
    assert launched["memory"].shape == (panels * 256, steps * 64)
    scale, outer = mm.decoding["groups"], mm.decoding["rows"]
    bases = {"a": rows, "a_desc": rows, "w_desc": mm.weight, "memory_desc": launched["memory"]}
    bases |= {"out_desc": out, "bias": mm.bias, "told": told, "w_scale": scale.tensor, "w_outer": outer.tensor}
    bases |= {"row_to_pair": pairs if gathered else None, "extents": extents}
    for name, tensor in bases.items():
        if tensor is None:
            assert launched[name] is None
            continue
        assert getattr(launched[name], "base", launched[name]).data_ptr() == tensor.data_ptr(), name
    assert (launched["w_scale"] is None) == (scheme in ("int8_w8a16", "fp8_w8a16")), "which have one for a row"
    sizes = {"num_rows": 1024, "E": 2, "N": mm.out_features, "K": mm.in_features, "GLU": mm.glu, "SWAPPED": False}
    sizes |= {"up_scale_offset": scale.up_offset, "PDL": True, "BATCHED": False}
    assert {name: launched[name] for name in sizes} == sizes
    assert launched["BLOCK"][6:] == (4, TOP_K if gathered else 0, False, False, panels)


def test_tokens_that_no_tensor_map_describes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of which GEMM 1 copies 16 bytes at a time begin at such places."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    layer = Layer(product("mxfp4", "concat"), product("mxfp4", None), "mxfp4")
    plan, ids = Plan("triton", "grouped", (TILE, TILE)), torch.empty(64, TOP_K, dtype=torch.int32)
    assert not layer._copies_rows(plan, ids) and layer._copies_rows(plan, ids, described=False)
    assert layer._tiles(plan, gathered=True) == (TILE, TILE)
