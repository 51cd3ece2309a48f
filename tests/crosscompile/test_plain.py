"""Products of 16 bits in Gluon compile for Hopper: nothing spills, no tensor core waits for the one before."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import Layer
from moe_ops.kernels.triton.plain_mm import _plain_mm_kernel
from tests.crosscompile.compiling import Compiled
from tests.crosscompile.test_packed import TYPES, compile_gluon, descriptor, halves_in_order, note_launch

H, I, TOP_K = 2048, 768, 8
MANY = MMConfig(128, 256, 64, 8, 8, 4, a_tma=True, w_tma=True)
LAYOUTS = ("concat", "interleaved", "none", None)
#: Layout, whether [E, K, N] is stored, whether rows are gathered, dtype: each of them in both ways.
COMPILED = [
    ("concat", False, False, torch.bfloat16),
    ("concat", False, True, torch.bfloat16),
    ("interleaved", True, True, torch.bfloat16),
    ("none", False, True, torch.float16),
    (None, False, False, torch.bfloat16),
    (None, True, False, torch.bfloat16),
]


def product(
    layout: str | None,
    *,
    turned: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    width: int = I,
    depth: int = H,
) -> ExpertMM:
    """GEMM 1 of a layout, or GEMM 2; `turned`: [E, K, N] is stored."""
    N, K = (width if layout == "none" else 2 * width, depth) if layout else (depth, width)
    weight = torch.empty(2, K, N, dtype=dtype).mT if turned else torch.empty(2, N, K, dtype=dtype)
    first: dict[str, Any] = {"glu_layout": layout, "activation": "silu"} if layout else {}
    shift = torch.empty(2, N, dtype=dtype) if bias else None
    return ExpertMM(Operand(weight, SCHEMES["bf16"], ()), dtype, **first, bias=shift)


def kept_of(mm: ExpertMM, rows: int) -> tuple[torch.Tensor, ...]:
    """What stands before an activation: halves that do not alternate are two."""
    width = mm.out_features * (2 if mm.glu else 1)
    both = torch.empty(rows, width, dtype=mm.out_dtype)
    return both.chunk(2, 1) if mm.glu_layout == "concat" else (both,)


def compile_plain(
    mm: ExpertMM, *, gathered: bool = False, keeps: bool = False, experts: int = 8, swapped: bool = False
) -> Compiled:
    rows, out = (torch.empty(256, width, dtype=mm.out_dtype) for width in (mm.in_features, mm.out_features))
    made, of_kept = mm.prepare_plain(rows, out, kept_of(mm, 256) if keeps else (), MANY, TOP_K if gathered else 0)
    stored = f"*{TYPES[mm.out_dtype]}:16"
    arguments = {
        "a": stored, "a_desc": descriptor(made.a_desc), "row_to_pair": "*i32:16" if gathered else None,
        "extents": "*i32:16", "w_desc": descriptor(made.w_desc), "bias": None if mm.bias is None else stored,
        "out_desc": descriptor(made.out_desc), "kept_desc": descriptor(of_kept[0]),
        "kept_up_desc": descriptor(of_kept[1]), "told": "*i32:16", "num_rows": "i32", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    return compile_gluon(_plain_mm_kernel, mm, made, arguments, experts=experts, swapped=swapped)


def steps(kernel: Compiled) -> list[list[Any]]:
    """Loops over the steps of a tile: 64 columns are four instructions."""
    loops = [body for body in kernel.loops if len(body) < 100]
    return [body for body in loops if sum("HGMMA.64x256x16" in line[1] for line in body) == 4]


@pytest.mark.parametrize(("layout", "turned", "gathered", "dtype"), COMPILED, ids=str)
def test_compiles(layout: str | None, turned: bool, gathered: bool, dtype: torch.dtype) -> None:
    """A step is one product of 256 weight rows, for both groups of warps; copies of whole steps are not masked."""
    kernel = compile_plain(product(layout, turned=turned, bias=True, dtype=dtype), gathered=gathered)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills"
    assert len(steps(kernel)) >= 2
    copies = re.findall(r"LDGSTS\.E.*", kernel.sass)
    assert len(copies) == (32 if gathered else 0) and not any(", !P" in copy for copy in copies)


@pytest.mark.parametrize(("layout", "turned"), [("concat", False), ("interleaved", True)], ids=str)
def test_compiles_where_something_is_kept(layout: str, turned: bool) -> None:
    """For gradients: three stores of a group's columns in the place of one."""
    mm = product(layout, turned=turned, bias=True)
    kernel, other = (compile_plain(mm, gathered=True, keeps=keeps) for keeps in (True, False))
    assert kernel.stack == 0 and len(steps(kernel)) >= 2
    assert kernel.sass.count("UTMASTG") == 3 * other.sass.count("UTMASTG") > 0


@pytest.mark.parametrize("swapped", [False, True])
def test_the_gate_comes_first_wherever_it_is(swapped: bool) -> None:
    """One descriptor has both halves, the one of the lower address first; a bias is added to each in its place."""
    kernel = compile_plain(product("concat", bias=True), swapped=swapped)
    assert set(halves_in_order(kernel)) == {"0"} and kernel.stack == 0


def test_columns_behind_the_last_are_not_gathered() -> None:
    """200 are no whole steps: there copies are masked, for another token's may be no numbers."""
    copies = re.findall(r"LDGSTS\.E.*", compile_plain(product("concat", depth=200), gathered=True).sass)
    assert len(copies) == 32 and all(", !P" in copy for copy in copies)


def test_tables_of_many_experts() -> None:
    assert compile_plain(product("concat"), gathered=True, experts=512).stack <= 64  # of the warp that looks for tiles


@pytest.mark.parametrize(
    ("layout", "options", "taken"),
    [
        *((layout, {}, True) for layout in LAYOUTS),
        *((layout, {"turned": True}, layout != "concat") for layout in LAYOUTS),
        ("concat", {"dtype": torch.float16}, True),
        ("concat", {"dtype": torch.float32}, False),
        ("concat", {"width": 772}, False),
    ],
    ids=str,
)
def test_which_products_it_takes(
    layout: str | None, options: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU: rows of 16 bytes, halves that one descriptor has beside one another."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm = product(layout, **options)
    assert mm.is_plain(MANY) == taken
    for other in ({"a_tma": False}, {"block_m": 64}, {"block_n": 128}, {"block_m": 64, "tall_m": 128}):
        assert not mm.is_plain(MANY._replace(**other))
    assert not replace(mm, out_dtype=torch.float32).is_plain(MANY) or mm.out_dtype == torch.float32
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    assert not mm.is_plain(MANY)


def test_quantised_weights_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    stored, scales = SCHEMES["int8_w8a16"].quantize(torch.randn(2, 256, 128))
    assert not ExpertMM(Operand(stored, SCHEMES["int8_w8a16"], scales), torch.bfloat16).is_plain(MANY)


@pytest.mark.parametrize("keeps", [False, True], ids=["leaves", "keeps"])
@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
def test_every_argument_of_a_launch_has_its_place(gathered: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, mm = note_launch(monkeypatch), product("concat", bias=True)
    rows, extents = torch.empty(512, H, dtype=torch.bfloat16), torch.tensor([100, 512], dtype=torch.int32)
    told, pairs = torch.zeros(mm.words_told(MANY, 512), dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    gather: dict[str, Any] = {"row_to_pair": pairs, "top_k": TOP_K} if gathered else {}
    kept = kept_of(mm, 512) if keeps else ()
    out, _ = expert_mm.grouped_mm(rows, mm, extents, MANY, num_rows=512, pdl=True, told=told, kept=kept, **gather)
    assert list(launched) == _plain_mm_kernel.arg_names and told.numel() == 1
    same = {"a": rows, "bias": mm.bias, "extents": extents, "told": told, "row_to_pair": pairs if gathered else None}
    assert all(launched[name] is value for name, value in same.items())
    bases = {"a_desc": out if gathered else rows, "w_desc": mm.weight, "out_desc": out}
    bases |= dict(zip(("kept_desc", "kept_up_desc"), kept or (out, out), strict=True))
    assert all(launched[name].base is tensor for name, tensor in bases.items())
    sizes = {"num_rows": 512, "E": 2, "N": I, "K": H, "GLU": mm.glu, "ACTIVATION": "silu", "SWAPPED": False}
    assert {name: launched[name] for name in sizes} == sizes
    assert launched["BLOCK"][6:] == (4, TOP_K if gathered else 0, False, keeps)


def test_what_it_cannot_read_or_write_goes_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, or what is kept, whose addresses no descriptor takes, and rows of another dtype."""
    launched, mm = note_launch(monkeypatch), product("concat")
    extents = torch.tensor([100, 512], dtype=torch.int32)
    monkeypatch.setattr(expert_mm, "side_by_side", lambda *of: 132)
    rows = torch.empty(512, H + 4, dtype=torch.bfloat16)
    for given, options in (
        (rows[:, 4:], {}),
        (rows[:, :H].float(), {}),
        (rows[:, :H].clone(), {"kept": torch.empty(512, 2 * I + 4, dtype=torch.bfloat16)[:, 4:].chunk(2, 1)}),
    ):
        launched.clear()
        expert_mm.grouped_mm(given, mm, extents, MANY, num_rows=512, **options)
        assert list(launched) == expert_mm._expert_mm_kernel.arg_names


def test_the_sort_makes_the_counters_of_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no kernel of its own has to."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    layer = Layer(product("concat"), product(None), "bf16")
    told = layer._told((MANY, MANY), torch.empty(64, 8, dtype=torch.int32))
    assert told.both is not None and told.both.numel() == 2
    assert told.first is not None and told.first.data_ptr() == told.both.data_ptr()
    few = MANY._replace(block_m=16, a_tma=False)
    assert layer._told((few, few), torch.empty(64, 8, dtype=torch.int32)) == (None, None, None)
