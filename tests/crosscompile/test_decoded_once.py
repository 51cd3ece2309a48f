"""Products of codes that are decoded once, in Gluon, compile for Hopper: no sum spills, nothing waits."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ops.backends.triton_plans import PACKED
from moe_ops.kernels.triton import expert_mm, launch, permute
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.decoded_fp8_mm import _decoded_fp8_mm_kernel
from moe_ops.kernels.triton.decoded_once_mm import _decoded_once_mm_kernel
from moe_ops.kernels.triton.folded_mm import _folded_mm_kernel
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import fit
from moe_ops.kernels.triton.panels import COUNTERS
from tests.crosscompile.compiling import Compiled
from tests.crosscompile.test_decoded_fp8 import MANY, product
from tests.crosscompile.test_packed import TYPES, common_arguments, compile_gluon, descriptor, halves_in_order

SCHEMES = ("mxfp4_a8", "w4a8_fp8")
SHARED = MMConfig(128, 256, 64, 8, 8, 3, a_tma=True, w_tma=True)
#: Those whose codes become bf16, each beside rows of that.
WIDE = ("mxfp4", "nvfp4", "mxfp8", "int8_w8a16", "fp8_w8a16")
#: The kernel whose every tile decodes its weights, and what tensor cores multiply with e4m3 rows.
IN_EVERY_TILE = {"mxfp4_a8": _folded_mm_kernel, "w4a8_fp8": _decoded_fp8_mm_kernel}
NUMBERS = {"mxfp4_a8": "E5M2", "w4a8_fp8": "E4M3"}


def of_scheme(scheme: str, layout: str | None, **options: Any) -> ExpertMM:
    """GEMM 1 of a layout, or GEMM 2, which quantises nothing for rows of bf16."""
    mm = product(scheme, layout, **options)
    return replace(mm, quantize_output=mm.form is not None and mm.quantize_output)


def compile_product(mm: ExpertMM, *, experts: int = 8, swapped: bool = False) -> Compiled:
    rows = torch.empty(512, mm.in_features, dtype=torch.bfloat16 if mm.form is None else mm.form.dtype)
    out, _ = mm.allocate((512,), rows)
    made, memory, memory_desc = mm.prepare_decoded_once(rows, out, MANY if mm.form else SHARED)
    arguments = common_arguments(mm) | {
        "a_desc": descriptor(made.a_desc), "w": f"*{TYPES[mm.weight.dtype]}:16", "w_desc": descriptor(made.w_desc),
        "memory": f"*{TYPES[memory.dtype]}:16", "memory_desc": descriptor(memory_desc), "told": "*i32:16",
        "out_desc": descriptor(made.out_desc), "a_scale": mm.form and "*fp32:16", "out_scale": "*fp32:16",
    }  # fmt: skip
    for name in ("w_zeros", "up_zeros_offset"):
        del arguments[name]
    return compile_gluon(_decoded_once_mm_kernel, mm, made, arguments, experts=experts, swapped=swapped)


# Layouts with two halves change how both decode and what leaves, those without only what leaves; tables of experts are
# of warps that multiply nothing: the largest with one of the others.
@pytest.mark.parametrize(
    ("scheme", "layout", "experts"),
    [
        *((scheme, "concat", 8) for scheme in SCHEMES),
        ("mxfp4_a8", "interleaved", 8),
        ("w4a8_fp8", "interleaved", 512),
        ("w4a8_fp8", "none", 8),
        ("mxfp4_a8", None, 8),
        *((scheme, layout, 8) for scheme, layout in zip(WIDE, itertools.cycle(["concat", "interleaved", None]))),
        ("mxfp4", "none", 512),
    ],
    ids=str,
)
def test_compiles(scheme: str, layout: str | None, experts: int) -> None:
    """Both groups of warps take decoded numbers from shared memory; no sum of theirs leaves registers in a step."""
    kernel = compile_product(of_scheme(scheme, layout, bias=layout == "concat"), experts=experts)
    sizes = ("128",) if scheme == "mxfp4_a8" else ("64", "128")  # of rows of tokens, where they are the second operand
    if scheme in WIDE:
        wanted = {f"HGMMA.64x{size}x16.F32.BF16" for size in sizes}
        assert kernel.stores_16_bytes, "of what is decoded, to memory"
    else:
        wanted = {f"QGMMA.64x{size}x32.F32.E4M3.{NUMBERS[scheme]}" for size in sizes}
    assert set(re.findall(r"[QH]GMMA\S+", kernel.sass)) == wanted
    steps = [body for body in kernel.loops if sum("GMMA" in line[1] for line in body) == 8]
    assert len(steps) >= 2 * len(sizes), "one for each group of warps"
    for body in sorted(steps, key=len)[: 2 * len(sizes)]:
        assert len(body) < (80 if scheme in WIDE else 260)
        spilled = [line for line in body if line[1].startswith(("LDL", "STL"))]
        assert len(spilled) <= (2 if scheme == "w4a8_fp8" else 0), "an address of scales, at the most"
    assert "CCTL" not in kernel.sass, "what is waited for is not acquired, which would empty L1"


@pytest.mark.parametrize("layout", ["concat", None], ids=str)
def test_leaves_rows_in_the_order_of_a_product_that_decodes_in_every_tile(layout: str | None) -> None:
    compile_product(replace(of_scheme("mxfp4", layout), out_order=(32, 8)))


@pytest.mark.parametrize("scheme", ["mxfp4_a8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("sizes", [(1184, 320), (1216, 320)], ids=["one_by_one", "in_pairs"])
def test_compiles_for_scales_that_no_wide_load_takes(scheme: str, sizes: tuple[int, int]) -> None:
    compile_product(of_scheme(scheme, "concat", sizes=sizes))


@pytest.mark.parametrize("swapped", [False, True], ids=["gate_first", "up_first"])
@pytest.mark.parametrize("scheme", [*SCHEMES, "mxfp8"])
def test_the_gate_comes_first_wherever_it_is(scheme: str, swapped: bool) -> None:
    """The descriptor begins with the half of the lower address; scales are looked up in the order of the halves."""
    halves = halves_in_order(compile_product(of_scheme(scheme, "concat", bias=True), swapped=swapped))
    assert halves == (["1", "0"] if swapped else ["0", "1"])


def launches(mm: ExpertMM, rows: int, monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[tuple[Any, dict]]:
    """Kernels and their arguments, of a product of so many rows on a Hopper GPU."""
    launched: list[tuple[Any, dict]] = []
    monkeypatch.setattr(expert_mm, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)

    def note(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        launched.append((kernel, dict(zip(kernel.arg_names, arguments, strict=False))))

    monkeypatch.setattr(expert_mm, "launch", note)
    monkeypatch.setattr(permute, "launch", note)
    monkeypatch.setattr(expert_mm, "quantize_sorted", lambda *of, pdl: of)
    a, tile = torch.empty(rows, mm.in_features, dtype=torch.bfloat16), SHARED
    if mm.form is not None:
        mm = replace(mm, rows_scale=torch.ones(rows, mm.in_features // 128 if mm.folds_scales else 1))
        a, tile = a.to(torch.float8_e4m3fn), MANY
    extents = torch.tensor([100, rows]).int()
    launched.append((None, {"results": expert_mm.grouped_mm(a, mm, extents, tile, num_rows=rows, pdl=True, **given)}))
    return launched


@pytest.mark.parametrize(
    ("scheme", "rows", "once"),
    [
        *(("mxfp4_a8", rows, once) for rows, once in [(256, False), (511, False), (512, True), (2000, True)]),
        *(("w4a8_fp8", rows, once) for rows, once in [(256, False), (1023, False), (1024, True), (2000, True)]),
    ],
)
def test_which_products_it_takes(scheme: str, rows: int, once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts that have two tiles of rows each, or four; programs' words, where they tell one another something, are
    made 0 before, unless they are given so.
    """
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm, other = product(scheme, "concat"), _decoded_once_mm_kernel if once else IN_EVERY_TILE[scheme]
    words = mm.words_told(fit(MANY, mm), rows)
    assert (words > 1) == once and (words > 0) == (once or scheme == "w4a8_fp8")
    kernels = [kernel for kernel, _ in launches(mm, rows, monkeypatch)[:-1]]
    assert kernels == ([permute._clear_kernel, other] if words else [other])
    given = torch.zeros(words, dtype=torch.int32) if words else None
    kernels = [kernel for kernel, _ in launches(mm, rows, monkeypatch, told=given)[:-1]]
    assert kernels == [other]


@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_which_weights_tiles_share_as_bf16(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose sums wait for no scales and that no zero points are subtracted from; others have the tile in which
    every one decodes. Rows that come by descriptor are in their own order.
    """
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm, once = of_scheme(scheme, "concat"), scheme in WIDE
    assert fit(SHARED, mm) == (SHARED if once else SHARED._replace(block_n=128))
    assert (mm.words_told(fit(SHARED, mm), 100) > 1) == once
    assert fit(SHARED, mm, as_they_are=True).block_n == 128 and not fit(SHARED, mm, as_they_are=True).a_tma
    if once:
        assert mm.order(SHARED) is None and mm.order(SHARED._replace(block_n=128)) is not None
        assert mm.columns_at_once(SHARED) == 64
        assert not replace(mm, out_dtype=torch.float16).specialises(SHARED), "rows of two parts"
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    assert fit(SHARED, mm).block_n == 128, "no such GPU"


def test_weights_with_zero_points_are_decoded_in_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = of_scheme("int8_w8a16", "concat")
    zeros = torch.zeros(mm.operand.scales[0].shape, dtype=torch.int8)
    shifted = replace(mm, operand=replace(mm.operand, scales=(*mm.operand.scales, zeros)))
    assert mm.specialises(SHARED) and not shifted.specialises(SHARED)


def test_products_of_groups_that_no_step_is_within_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of int4 codes are scaled after every step."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = product("w4a8_fp8", "concat")
    of_groups, *rest = mm.operand.scales
    scales = (of_groups.view(torch.uint8).repeat_interleave(2, dim=2).view(of_groups.dtype), *rest)
    narrow = replace(mm, operand=replace(mm.operand, scales=scales))
    assert narrow.group_columns == 64 and narrow.specialises(fit(MANY, narrow))
    assert mm.decodes_once(fit(MANY, mm), 2000) and not narrow.decodes_once(fit(MANY, narrow), 2000)


@pytest.mark.parametrize("layout", ["concat", "interleaved", None], ids=str)
@pytest.mark.parametrize("scheme", [*SCHEMES, *WIDE])
def test_every_argument_of_a_launch_has_its_place(
    scheme: str, layout: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mm, rows = of_scheme(scheme, layout, bias=True), 512 if scheme == "mxfp4_a8" else 1024
    (_, cleared), (_, launched), (_, returned) = launches(mm, rows, monkeypatch)
    out, out_scale = returned["results"][:2] if mm.folds_scales or not layout else (returned["results"][0], None)
    columns = 64 if scheme in WIDE else 128  # of a step
    assert list(launched) == _decoded_once_mm_kernel.arg_names
    scale, panels, steps = (
        mm.decoding["groups"],
        2 * -(-mm.out_features // (128 if layout else 256)),
        mm.in_features // columns,
    )
    assert launched["told"] is cleared["words_ptr"] and launched["told"].dtype == torch.int32
    assert launched["told"].numel() == COUNTERS.value + panels * (1 + steps) + 32 == cleared["COUNT"]
    assert launched["memory"].shape == (panels * 256, steps * columns) and launched["BLOCK"][8] == panels
    bases = {"w": mm.weight, "w_desc": mm.weight, "memory_desc": launched["memory"], "out_desc": out, "bias": mm.bias}
    bases |= {"w_scale": scale.tensor, "w_outer": mm.decoding["rows"].tensor}
    bases |= {"out_scale": out_scale} if mm.folds_scales else {}
    assert (launched["a_scale"] is None) == (scheme in WIDE)
    for name, tensor in bases.items():
        if tensor is None:
            assert launched[name] is None
            continue
        assert getattr(launched[name], "base", launched[name]).data_ptr() == tensor.data_ptr(), name
    assert (launched["w_scale"] is None) == (scheme in ("int8_w8a16", "fp8_w8a16")), "which have one for a row"
    sizes = {"num_rows": rows, "E": 2, "N": mm.out_features, "K": mm.in_features, "GLU": mm.glu, "SWAPPED": False}
    sizes |= {"up_offset": mm.up_offset, "up_scale_offset": scale.up_offset, "PDL": True, "BATCHED": False}
    assert {name: launched[name] for name in sizes} == sizes


def test_memory_of_panels_is_bounded() -> None:
    """However large the weights are."""
    mm = product("mxfp4_a8", None, sizes=(256, 14336))
    for experts in (2, 64):
        weight = mm.operand.data[:1].expand(experts, -1, -1)
        scales = tuple(scale[:1].expand(experts, -1, -1) for scale in mm.operand.scales)
        many = replace(mm, operand=replace(mm.operand, data=weight, scales=scales))
        rows = torch.empty(512, many.in_features, dtype=torch.float8_e4m3fn)
        made, memory, _ = many.prepare_decoded_once(rows, many.allocate((512,), rows)[0], MANY)
        assert memory.nbytes == made.block[8] * 256 * 14336 <= launch.PANEL_BYTES
