"""Products of codes that are decoded once, in Gluon, compile for Hopper: no sum spills, nothing waits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ops.kernels.triton import expert_mm, launch, permute
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
#: The kernel whose every tile decodes its weights, and what tensor cores multiply with e4m3 rows.
IN_EVERY_TILE = {"mxfp4_a8": _folded_mm_kernel, "w4a8_fp8": _decoded_fp8_mm_kernel}
NUMBERS = {"mxfp4_a8": "E5M2", "w4a8_fp8": "E4M3"}


def compile_product(mm: ExpertMM, *, experts: int = 8, swapped: bool = False) -> Compiled:
    rows = torch.empty(512, mm.in_features, dtype=torch.float8_e4m3fn)
    out, _ = mm.allocate((512,), rows)
    made, memory, memory_desc = mm.prepare_decoded_once(rows, out, MANY)
    arguments = common_arguments(mm) | {
        "a_desc": descriptor(made.a_desc), "w": f"*{TYPES[mm.weight.dtype]}:16", "w_desc": descriptor(made.w_desc),
        "memory": f"*{TYPES[memory.dtype]}:16", "memory_desc": descriptor(memory_desc), "told": "*i32:16",
        "out_desc": descriptor(made.out_desc), "a_scale": "*fp32:16", "out_scale": "*fp32:16",
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
    ],
    ids=str,
)
def test_compiles(scheme: str, layout: str | None, experts: int) -> None:
    """Both groups of warps take decoded numbers from shared memory; no sum of theirs leaves registers in a step."""
    kernel = compile_product(product(scheme, layout, bias=layout == "concat"), experts=experts)
    sizes = ("128",) if scheme == "mxfp4_a8" else ("64", "128")  # of rows of tokens, where they are the second operand
    wanted = {f"QGMMA.64x{size}x32.F32.E4M3.{NUMBERS[scheme]}" for size in sizes}
    assert set(re.findall(r"[QH]GMMA\S+", kernel.sass)) == wanted
    steps = [body for body in kernel.loops if sum("GMMA" in line[1] for line in body) == 8]
    assert len(steps) >= 2 * len(sizes), "one for each group of warps"
    for body in sorted(steps, key=len)[: 2 * len(sizes)]:
        assert len(body) < 260
        spilled = [line for line in body if line[1].startswith(("LDL", "STL"))]
        assert len(spilled) <= (2 if scheme == "w4a8_fp8" else 0), "an address of scales, at the most"
    assert "CCTL" not in kernel.sass, "what is waited for is not acquired, which would empty L1"


@pytest.mark.parametrize("sizes", [(1184, 320), (1216, 320)], ids=["one_by_one", "in_pairs"])
def test_compiles_for_scales_that_no_wide_load_takes(sizes: tuple[int, int]) -> None:
    compile_product(product("mxfp4_a8", "concat", sizes=sizes))


@pytest.mark.parametrize("swapped", [False, True], ids=["gate_first", "up_first"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gate_comes_first_wherever_it_is(scheme: str, swapped: bool) -> None:
    """The descriptor begins with the half of the lower address; scales are looked up in the order of the halves."""
    halves = halves_in_order(compile_product(product(scheme, "concat", bias=True), swapped=swapped))
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
    mm = replace(mm, rows_scale=torch.ones(rows, mm.in_features // 128 if mm.folds_scales else 1))
    a, extents = torch.empty(rows, mm.in_features, dtype=torch.float8_e4m3fn), torch.tensor([100, rows]).int()
    launched.append((None, {"results": expert_mm.grouped_mm(a, mm, extents, MANY, num_rows=rows, pdl=True, **given)}))
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
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_argument_of_a_launch_has_its_place(
    scheme: str, layout: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mm, rows = product(scheme, layout, bias=True), 512 if scheme == "mxfp4_a8" else 1024
    (_, cleared), (_, launched), (_, returned) = launches(mm, rows, monkeypatch)
    out, out_scale = returned["results"][:2] if mm.folds_scales or not layout else (returned["results"][0], None)
    columns = 128  # of a step
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
    for name, tensor in bases.items():
        if tensor is None:
            assert launched[name] is None
            continue
        assert getattr(launched[name], "base", launched[name]).data_ptr() == tensor.data_ptr(), name
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
