"""Few rows times decoded weights in Gluon compile for Hopper: what fits beside one another, and no spill in a loop."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import DECODED, FAMILIES, PACKED, kind, tile_for
from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.decoded_few_mm import _decoded_few_mm_kernel
from moe_ops.kernels.triton.launch import FEW_PROGRAMS, FEW_REGISTERS, ExpertMM
from moe_ops.kernels.triton.layer import Layer, fit
from moe_ops.plans import Plan, bucket
from tests.crosscompile.compiling import Compiled
from tests.crosscompile.test_decoded import KINDS, UNSTACKED, assert_places, compile_made, row_operand
from tests.crosscompile.test_packed import E, H, I, K, product
from tests.ops.scheme_layers import further

pytestmark = pytest.mark.usefixtures("on_hopper")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)


#: Quantised rows, which the kernel gathers.
GATHERED = sorted(DECODED - PACKED)
FEW = MMConfig(8, 128, 256, 1, 4, 3, a_tma=True, w_tma=True)


def compile_few(scheme: str, layout: str | None, known: bool = True, **options: Any) -> Compiled:
    sizes = (2 * I, H) if layout else (H, I)
    tile = tile_for(scheme, E, bucket(16 * K), *sizes, "NVIDIA H200", 90, "up")
    return compile_product(*product(scheme, tile, layout=layout, **options), known=known)


def compile_product(mm: ExpertMM, tile: MMConfig, rows: torch.Tensor, known: bool = True) -> Compiled:
    assert mm.takes_few(tile) and mm.specialises(tile)
    options = {"num_warps": tile.num_warps, "maxnreg": FEW_REGISTERS}
    kernel = compile_made(_decoded_few_mm_kernel, mm, tile, rows, KNOWN=known, **options)
    assert FEW_PROGRAMS * 8 * 32 * kernel.registers <= 65536 and FEW_PROGRAMS * (kernel.shared + 1024) <= 228 * 1024
    (loop,) = [body for body in kernel.loops if sum(name.startswith("HMMA") for _, name, _ in body) > 2][:1]
    assert not [name for _, name, _ in loop if name.startswith(("LDL", "STL", "STS", "HGMMA", "SHFL"))]
    return kernel


@KINDS
def test_compiles(scheme: str, layout: str | None) -> None:
    compile_few(scheme, layout)


@pytest.mark.parametrize("layout", ["concat", "interleaved", None], ids=["concat", "interleaved", "down"])
@pytest.mark.parametrize("scheme", GATHERED)
def test_compiles_for_rows_that_it_gathers(scheme: str, layout: str | None) -> None:
    """16 bytes a thread at a time; scales that no number of bf16 holds leave no spill, either."""
    kernel = compile_product(*product(scheme, FEW, layout=layout), known=layout is None)
    assert kernel.stack == 0 and kernel.loads_16_bytes


@pytest.mark.parametrize("scheme", GATHERED)
def test_compiles_for_rows_that_it_gathers_of_no_more_than_half_a_step(scheme: str) -> None:
    mm = ExpertMM(row_operand(scheme, H, 128), torch.bfloat16).beside(FEW)
    rows = torch.empty(256, 128, dtype=torch.bfloat16)
    assert mm.takes_few(FEW) and mm.specialises(FEW)
    kernel = compile_made(_decoded_few_mm_kernel, mm, FEW, rows, KNOWN=True, num_warps=4, maxnreg=FEW_REGISTERS)
    assert kernel.stack == 0


@UNSTACKED
def test_compiles_with_a_bias(layout: str | None) -> None:
    compile_few("mxfp4", layout, bias=torch.empty(2, 2 * I if layout else H, dtype=torch.bfloat16))


@pytest.mark.parametrize(("scheme", "experts"), [("mxfp4", 512), ("int4_w4a16", 128), ("int4_w4a16", 512)])
def test_tables_of_many_experts_stay_out_of_the_loop(
    scheme: str, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registers that they do not fit into are read again for each tile, not for each step."""
    monkeypatch.setattr(ExpertMM, "num_experts", experts)
    compile_few(scheme, "concat")


@pytest.mark.parametrize("layout", ["concat", None], ids=["concat", "down"])
def test_compiles_behind_a_kernel_that_counts_rows(layout: str | None) -> None:
    compile_few("mxfp4", layout, known=False)


@pytest.mark.parametrize(
    ("scheme", "tile"),
    [
        pytest.param(scheme, family.tile, id=f"{scheme}-{family.tile.block_m}")
        for scheme in ("int4_w4a16", "int8_w8a16", "mxfp8", "nvfp4")  # one of each kind of tiles
        for family in FAMILIES[kind(scheme)]
        if family.tile.a_tma and family.tile.block_m <= 32
    ],
)
def test_other_heights_compile(scheme: str, tile: MMConfig) -> None:
    kernel = compile_product(*product(scheme, tile, layout="concat"))
    assert {"HMMA.16816.F32.BF16"} == set(re.findall(r"HMMA\S+", kernel.sass))


@pytest.mark.parametrize("H, I", [(2048, 768), (2880, 2880), (1408, 704), (320, 160)])
def test_rows_that_gemm_1_leaves_are_in_the_order_of_gemm_2(H: int, I: int) -> None:
    """As many columns as it writes at once, or fewer; its own rows, which are copied, have twice as many."""
    up = ExpertMM(row_operand("mxfp4", 2 * I, H), torch.bfloat16, glu_layout="concat", activation="silu")
    down = ExpertMM(row_operand("mxfp4", H, I), torch.bfloat16)
    first, second = Layer(up, down, "mxfp4")._tiles(Plan("triton", "grouped", (FEW, FEW)))
    assert up.specialises(first) and down.specialises(second)
    assert up.columns_at_once(first) % down.order(second)[0] == 0 == I % down.order(second)[0]
    assert (up.order(first)[0], down.order(second)[0]) == (min(128, H & -H), min(64, I & -I))


def test_gemm_2_gathers_its_rows_in_steps_of_a_group_where_gemm_1_writes_fewer_columns() -> None:
    """Behind weights that no descriptor takes."""
    row = SCHEMES["int4_w4a16"]

    def operand(N: int, depth: int, offset: int) -> Operand:
        stored = further(torch.empty(2, N, depth // 2, dtype=torch.uint8), offset)
        return Operand(stored, row, (torch.empty(2, N, depth // 64, dtype=torch.bfloat16),))

    up = ExpertMM(operand(2 * I, H, 8), torch.bfloat16, glu_layout="concat", activation="silu")
    down = ExpertMM(operand(H, I, 0), torch.bfloat16)
    first, second = Layer(up, down, row.name)._tiles(Plan("triton", "grouped", (FEW, FEW)))
    assert not up.specialises(first) and not second.a_tma and second.block_k == 64


def test_products_that_it_cannot_take_gather_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 rows, which are multiplied in two parts, rows that are taken as they are, and a GPU that is no Hopper."""
    tile = FEW
    gathered = MMConfig(16, 128, 128, 1, 4, 4, a_tma=False, w_tma=True)
    assert product("mxfp4", tile, layout="concat", dtype=torch.float16)[1] == gathered
    mm, fitted, _ = product("mxfp4", tile, layout="concat")
    assert fitted == tile and fit(tile, mm, as_they_are=True) == gathered
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    assert fit(tile, mm) == gathered
    wide = tile._replace(block_m=32, block_k=128)
    assert [fit(wide, product(scheme, tile, layout="concat")[0]).block_k for scheme in ("mxfp4", "mxfp8")] == [128, 64]


def layer_of_gathered() -> Layer:
    up = ExpertMM(row_operand("mxfp4_a8", 2 * I, H), torch.bfloat16, glu_layout="concat", activation="silu")
    return Layer(up, ExpertMM(row_operand("mxfp4_a8", H, I), torch.bfloat16), "mxfp4_a8")


def test_rows_to_gather_are_quantised_to_bf16_numbers() -> None:
    layer, plan = layer_of_gathered(), Plan("triton", "grouped", (FEW, FEW))
    assert layer._tiles(plan) == (FEW, FEW)
    assert layer._rows_form(plan).dtype == torch.bfloat16 and layer.form.dtype == torch.float8_e4m3fn
    assert not layer._copies_rows(plan, torch.zeros(16, K, dtype=torch.int32))


def test_rows_that_are_e4m3_already_are_multiplied_by_another_tile() -> None:
    """Those that a caller gives, and those that an epilogue of GEMM 1 quantises."""
    layer, many = layer_of_gathered(), MMConfig(64, 128, 128, 8, 4, 3, a_tma=True, w_tma=True)
    given = layer._tiles(Plan("triton", "grouped", (FEW, FEW)), given=True)
    assert given == (layer.up.beside_few(FEW), FEW)
    first, second = layer._tiles(Plan("triton", "grouped", (many, FEW)))
    assert layer._first().beside(first).quantizes_in_tile and second == layer.down.beside_few(FEW)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a launch by name, once there is one."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(expert_mm, "multiprocessors", lambda device: 132)

    def launch_it(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        found.update(zip(kernel.arg_names, given, strict=True), grid=grid, options=options)

    monkeypatch.setattr(expert_mm, "launch", launch_it)
    return found


def test_every_argument_of_a_launch_that_gathers_has_its_place(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised: dict[str, Any] = {}
    monkeypatch.setattr(expert_mm, "quantize_sorted", lambda *of, **how: quantised.update(of=of) or of[:2])
    mm, fitted, rows = product("mxfp4_a8", FEW, layout="concat", rows_scale=torch.empty(32, H // 128))
    extents, pairs = torch.tensor([4, 8], dtype=torch.int32), torch.arange(256, dtype=torch.int32)
    given = {"num_rows": 256, "row_to_pair": pairs, "top_k": K, "pdl": True}
    expert_mm.grouped_mm(rows, replace(mm, widens_output=True), extents, fitted, **given)
    assert launched["a"] is rows and launched["a_scale"] is mm.rows_scale and launched["row_to_pair"] is pairs
    assert (launched["a_desc"], launched["TOP_K"], launched["KNOWN"]) == (None, K, False)
    assert launched["STRIDES"][3] == rows.stride(0) == H
    out, _, form = quantised["of"][:3]
    assert (out.shape, out.dtype, form.dtype) == ((256, I), torch.float32, torch.bfloat16)


def test_every_argument_of_a_launch_has_its_place(launched: dict[str, Any]) -> None:
    bias = torch.zeros(2, 2 * I, dtype=torch.bfloat16)
    mm, fitted, rows = product("int4_w4a16", FEW, layout="concat", zeros=torch.int8, bias=bias)
    extents = torch.tensor([4, 8], dtype=torch.int32)
    out, _ = expert_mm.grouped_mm(rows, mm, extents, fitted, num_rows=256, pdl=True, known=True)
    assert_places(launched, mm, rows, out, extents)
    assert (launched["PDL"], launched["KNOWN"]) == (True, True)
    assert launched["grid"] == (min(34 * 12, FEW_PROGRAMS * 132),)
    assert launched["options"] == {"num_warps": 4, "launch_pdl": True, "maxnreg": FEW_REGISTERS}
