"""Products of e4m3 whose sums are promoted, in Gluon, compile for Hopper: nothing spills in a loop, nothing waits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import PROMOTED, tile_for
from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton.config import MMConfig, are_promoted
from moe_ops.kernels.triton.folded_mm import _folded_mm_kernel
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import Layer, fit
from moe_ops.kernels.triton.promoted_mm import _promoted_mm_kernel
from moe_ops.plans import Plan, bucket
from tests.crosscompile.compiling import Compiled, quantized
from tests.crosscompile.test_packed import TYPES, compile_gluon, descriptor, halves_in_order, note_launch

E, H, I = 128, 2048, 768
MANY = MMConfig(128, 256, 128, 8, 8, 3, a_tma=True, w_tma=True)
LAYOUTS = ("concat", "interleaved", "none", None)
CASES = [(scheme, layout) for scheme in sorted(PROMOTED) for layout in LAYOUTS]
# Scales of blocks are multiplied in the loop: all layouts. Those of rows and of whole weights are multiplied behind it
# and differ in strides: every layout with one of them, and both with the one whose results leave in halves.
COMPILED = [
    *(("fp8_block128", layout, 8) for layout in LAYOUTS),
    *(("fp8_channel", layout, 8) for layout in ("concat", "none", None)),
    *(("fp8_tensor", layout, 8) for layout in ("concat", "interleaved")),
    ("fp8_block128", "concat", 512),
]
SWAPPED = [(scheme, False) for scheme in sorted(PROMOTED)] + [("fp8_block128", True), ("fp8_channel", True)]


def product(
    scheme: str,
    layout: str | None,
    *,
    bias: bool = False,
    of_scales: torch.dtype = torch.float32,
    width: int = I,
) -> ExpertMM:
    """GEMM 1 of a layout, or GEMM 2."""
    N, depth = (width if layout == "none" else 2 * width, H) if layout else (H, width)
    stored, scales = quantized(scheme, N, depth)
    scales = tuple(scale.to(of_scales) for scale in scales)
    first: dict[str, Any] = {"glu_layout": layout, "activation": "silu", "quantize_output": True} if layout else {}
    shift = torch.empty(2, N, dtype=torch.bfloat16) if bias else None
    return ExpertMM(Operand(stored, SCHEMES[scheme], scales), torch.bfloat16, **first, bias=shift)


def compile_promoted(mm: ExpertMM, *, experts: int = 8, swapped: bool = False) -> Compiled:
    """By `promoted_mm`, or by `folded_mm` what that takes."""
    rows = torch.empty(256, mm.in_features, dtype=torch.float8_e4m3fn)
    out, _ = mm.allocate((256,), rows, in_halves=mm.quantizes_rows)
    made = mm.prepare_promoted(rows, out, MANY)
    arguments = {
        "a_desc": descriptor(made.a_desc), "a_scale": "*fp32:16", "extents": "*i32:16",
        "w_desc": descriptor(made.w_desc), "w_scale": f"*{TYPES[mm.weight_scale.dtype]}:16", "up_scale_offset": "i32",
        "bias": None if mm.bias is None else "*bf16:16", "out_desc": descriptor(made.out_desc),
        "out_scale": "*fp32:16", "num_rows": "i32", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    kernel = _folded_mm_kernel if mm.folds_scales else _promoted_mm_kernel
    if not mm.folds_scales:
        arguments["told"] = "*i32:16"
    return compile_gluon(kernel, mm, made, arguments, experts=experts, swapped=swapped)


@pytest.mark.parametrize(("scheme", "layout", "experts"), COMPILED, ids=str)
def test_compiles(scheme: str, layout: str | None, experts: int) -> None:
    """A step is two products of 128 weight rows, of 128 columns: four instructions each, for both groups of warps."""
    kernel = compile_promoted(product(scheme, layout, bias=layout == "concat"), experts=experts)
    assert kernel.stack <= 24 or experts == 512, f"{kernel.stack} bytes of spills"
    steps = [body for body in kernel.loops if sum("QGMMA" in line[1] for line in body) == 8]
    assert len(steps) >= 2, "one for each group of warps"
    for body in sorted(steps, key=len)[:2]:
        assert {line[1] for line in body if "GMMA" in line[1]} == {"QGMMA.64x128x32.F32.E4M3.E4M3"}
        assert not [line for line in body if line[1].startswith(("LDL", "STL"))]
        assert len(body) < 260


@pytest.mark.parametrize(("layout", "of_scales"), [("concat", torch.bfloat16), (None, torch.float8_e8m0fnu)], ids=str)
def test_compiles_for_scales_of_other_types(layout: str | None, of_scales: torch.dtype) -> None:
    assert compile_promoted(product("fp8_block128", layout, of_scales=of_scales)).stack <= 24


@pytest.mark.parametrize(
    ("scheme", "swapped"), SWAPPED, ids=[f"{scheme}-{'up' if swapped else 'gate'}_first" for scheme, swapped in SWAPPED]
)
def test_the_gate_comes_first_wherever_it_is(scheme: str, swapped: bool) -> None:
    """The descriptor begins with the half of the lower address; scales are multiplied in the order of the halves."""
    halves = halves_in_order(compile_promoted(product(scheme, "concat", bias=True), swapped=swapped))
    assert halves == (["1", "0"] if swapped else ["0", "1"]) * (len(halves) // 2) and halves


@pytest.mark.parametrize(
    ("scheme", "layout", "taken"),
    [
        *((scheme, layout, True) for scheme, layout in CASES),
        ("int8_channel", "concat", False),
        ("w4a8_fp8", "concat", False),
    ],
    ids=str,
)
def test_which_products_it_takes(scheme: str, layout: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, of experts with many rows that come by descriptor."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = product(scheme, layout)
    tile = fit(MANY, mm)
    assert mm.promotes(tile, 1024) == taken
    assert not mm.promotes(tile, 256)
    assert not mm.promotes(tile._replace(a_tma=False), 1024) and not mm.promotes(tile._replace(block_m=64), 1024)
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    assert not mm.promotes(tile, 1024)


@pytest.mark.parametrize("width", [2880, 64])
def test_blocks_that_run_on_into_the_up_half(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upper half is of two blocks; of which one a column is costs no instruction of the loop but the factors'."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = product("fp8_block128", "concat", bias=True, width=width)
    assert mm.decoding["groups"].runs_on and mm.promotes(fit(MANY, mm), 4096)
    longest = [
        max(len(body) for body in compile_promoted(of).loops if sum("QGMMA" in line[1] for line in body) == 8)
        for of in (mm, product("fp8_block128", "concat", bias=True))
    ]
    assert longest[0] <= longest[1] + 16


def test_blocks_that_run_on_within_eight_rows_are_left_to_another_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fp32, whose rows of 196 columns a descriptor could write."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    for width, taken in ((196, False), (200, True)):
        mm = replace(product("fp8_block128", "concat", width=width), quantize_output=False, out_dtype=torch.float32)
        assert mm.promotable(MANY) == taken


def test_blocks_that_run_on_get_fewer_rows_of_another_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not run: every column would have its scale, for which 128 rows leave no registers."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    rows = [fit(MANY, product("fp8_block128", "concat", width=width)).block_m for width in (192, 256)]
    assert rows == [64, 128]


MANY_ROWS = [(128, 64), (512, 64), (64, 128), (32, 256), (8, 256)]
FEW_ROWS = [(128, 32), (512, 32), (64, 64), (32, 128), (8, 128)]


@pytest.mark.parametrize(
    ("experts", "rows", "promoted"),
    [*((*sizes, True) for sizes in MANY_ROWS), *((*sizes, False) for sizes in FEW_ROWS)],
)
def test_plans_are_made_for_it(experts: int, rows: int, promoted: bool) -> None:
    """Both products get its tile where experts have the rows for it; GEMM 2 has fewer rows a tile elsewhere."""
    assert are_promoted(experts * rows, experts) == promoted
    tile = tile_for("fp8_block128", experts, bucket(experts * rows), 2048, 768, "NVIDIA H200", 90, "down")
    assert (tile.block_m == 128) == promoted
    other = tile_for("fp8_block128", experts, bucket(experts * rows), 2048, 768, "NVIDIA H200", 100, "down")
    assert other.block_m < 128


def test_its_instructions_are_those_of_eight_bits() -> None:
    kernel = compile_promoted(product("fp8_channel", "concat", bias=True))
    assert kernel.ptx_count(r"wgmma\.mma_async\S+k32\.f32\.e4m3\.e4m3 ") == len(re.findall(r"QGMMA", kernel.sass))
    assert "HGMMA" not in kernel.sass and kernel.sass.count("UTMALDG") >= 4 and "UTMASTG" in kernel.sass


def test_every_argument_of_a_launch_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launch(monkeypatch)
    mm = replace(product("fp8_block128", "concat", bias=True), rows_scale=torch.ones(512, H // 128))
    rows, extents = torch.empty(512, H, dtype=torch.float8_e4m3fn), torch.tensor([100, 512], dtype=torch.int32)
    told = torch.zeros(mm.words_told(MANY, 512), dtype=torch.int32)
    out, out_scale = expert_mm.grouped_mm(rows, mm, extents, MANY, num_rows=512, pdl=True, told=told)
    assert list(launched) == _promoted_mm_kernel.arg_names
    same = {"a_scale": mm.rows_scale, "w_scale": mm.weight_scale, "bias": mm.bias, "extents": extents}
    same |= {"out_scale": out_scale, "told": told}
    assert told.numel() == 1 and all(launched[name] is value for name, value in same.items())
    bases = {"a_desc": rows, "w_desc": mm.weight, "out_desc": out}
    assert all(launched[name].base is tensor for name, tensor in bases.items())
    sizes = {"num_rows": 512, "E": 2, "N": I, "K": H, "GLU": mm.glu, "ACTIVATION": "silu", "SWAPPED": False}
    sizes |= {"up_scale_offset": I // 128 * (H // 128), "SCHEME": mm.scheme, "PDL": True, "BATCHED": False}
    assert {name: launched[name] for name in sizes} == sizes


@pytest.mark.parametrize("batched", [False, True], ids=["grouped", "batched"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_rows_that_are_quantised_as_a_whole_leave_in_halves(
    static: bool, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their largest magnitudes, for the kernel that quantises them; by scales that are known already in fp32."""
    launched, given = note_launch(monkeypatch), list[Any]()
    for name in ("quantize_sorted", "quantize_batched", "quantize_static"):
        monkeypatch.setattr(expert_mm, name, lambda *of, pdl: given.extend(of) or (None, None))
    mm = replace(product("fp8_channel", "concat"), out_static=torch.ones(2, 1, 1) if static else None)
    rows, counts = torch.empty(512, H, dtype=torch.float8_e4m3fn), torch.tensor([100, 256], dtype=torch.int32)
    told = torch.zeros(1, dtype=torch.int32)
    if batched:
        mm = replace(mm, rows_scale=torch.ones(2, 256, 1))
        expert_mm.batched_mm(rows.view(2, 256, H), mm, counts, MANY, told=told)
    else:
        mm = replace(mm, rows_scale=torch.ones(512, 1))
        expert_mm.grouped_mm(rows, mm, counts, MANY, num_rows=512, told=told)
    assert given[0].dtype == (torch.float32 if static else torch.float16)
    assert launched["BLOCK"][7] is not static and launched["out_desc"].base.data_ptr() == given[0].data_ptr()
    if not static:
        assert given[3] is launched["out_scale"] and given[3].shape == (*given[0].shape[:-1], I // 128)
        assert launched["out_desc"].base.dtype == torch.float16 and launched["BLOCK"][6] == 4


@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
def test_rows_of_other_kernels_leave_in_fp32(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows, or of rows that the product gathers."""
    left: list[Any] = []
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    monkeypatch.setattr(expert_mm, "_launch", lambda *of, **options: None)
    monkeypatch.setattr(expert_mm, "quantize_sorted", lambda *of, pdl: left.extend(of))
    mm, count = product("fp8_channel", "concat"), 512 if gathered else 256
    rows, counts = torch.empty(count, H, dtype=torch.float8_e4m3fn), torch.tensor([100, count], dtype=torch.int32)
    pairs = torch.arange(count, dtype=torch.int32) if gathered else None
    expert_mm.grouped_mm(rows, mm, counts, MANY, num_rows=count, row_to_pair=pairs, top_k=1)
    assert left[0].dtype == torch.float32 and left[3] is None


def test_passes_know_what_a_row_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of 768 columns: fp16 and six magnitudes, or fp32 where another kernel takes the product; nothing where the
    product itself quantises, or nobody does.
    """
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = product("fp8_channel", "concat")
    assert mm.bytes_left(MANY, 4096, sorted_rows=True) == 2 * I + 4 * 6
    few_rows = mm.bytes_left(MANY, 128, sorted_rows=True)
    static = replace(mm, out_static=torch.ones(2, 1, 1)).bytes_left(MANY, 4096, sorted_rows=True)
    assert {few_rows, static, mm.bytes_left(MANY, 4096, sorted_rows=False)} == {4 * I}
    assert product("fp8_block128", "concat").bytes_left(MANY, 4096, sorted_rows=True) == 0
    assert product("fp8_channel", None).bytes_left(MANY, 4096, sorted_rows=True) == 0


@pytest.mark.parametrize(
    ("pairs", "copied"), [(96, False), (600, False), (2047, False), (2048, True), (4096, True), (5000, True)]
)
@pytest.mark.parametrize("scheme", ["fp8_channel", "w4a8_fp8", "int8_channel"])
def test_rows_that_are_quantised_beside_the_sort_are_copied_where_they_are_many(
    scheme: str, pairs: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight experts with 256 rows each, for a kernel in Gluon: it takes one launch more."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)

    def operand(N: int, K: int) -> Operand:
        stored, scales = SCHEMES[scheme].quantize(torch.randn(1, N, K))
        return Operand(stored.expand(8, -1, -1), SCHEMES[scheme], tuple(s.expand(8, -1, -1) for s in scales))

    up = ExpertMM(operand(512, 256), torch.bfloat16, glu_layout="concat", activation="silu")
    layer = Layer(up, ExpertMM(operand(256, 256), torch.bfloat16), scheme)
    plan = Plan("triton", "grouped", (MANY, MANY))
    ids = torch.zeros(pairs, 1, dtype=torch.int32)
    assert layer._copies_rows(plan, ids) == (copied and (scheme != "int8_channel" or pairs > 4096))
