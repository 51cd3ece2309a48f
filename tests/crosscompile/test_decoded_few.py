"""Few rows times decoded weights in Gluon compile for Hopper: no warp waits for another, nothing spills in a loop."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import FEW_TILES, PACKED, tile_for
from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.decoded_few_mm import _decoded_few_mm_kernel
from moe_ops.kernels.triton.launch import FEW_PROGRAMS, FEW_REGISTERS, ExpertMM
from moe_ops.kernels.triton.layer import Layer, fit
from moe_ops.plans import Plan, bucket
from tests.crosscompile.compiling import Compiled, compile_kernel
from tests.crosscompile.test_decoded import LAYOUTS, row_operand
from tests.crosscompile.test_packed import E, H, I, K, common_arguments, descriptor, product

pytestmark = pytest.mark.usefixtures("on_hopper")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)


def compile_few(scheme: str, layout: str | None, tokens: int = 16, known: bool = True, **options: Any) -> Compiled:
    sizes = (2 * I, H) if layout else (H, I)
    tile = tile_for(scheme, E, bucket(tokens * K), *sizes, "NVIDIA H200", 90, "up")
    return compile_product(*product(scheme, tile, layout=layout, **options), known=known)


def compile_product(mm: ExpertMM, tile: MMConfig, rows: torch.Tensor, known: bool = True) -> Compiled:
    assert mm.takes_few(tile) and mm.specialises(tile)
    out, _ = mm.allocate((256,), rows)
    made = mm.prepare_decoded_few(rows, out, tile)
    arguments = common_arguments(mm) | {
        "a_desc": descriptor(made.a_desc), "w_desc": descriptor(made.w_desc), "out_desc": descriptor(made.out_desc),
    }  # fmt: skip
    del arguments["up_offset"]
    constants = {
        **{"E": E, "N": mm.out_features, "K": mm.in_features, "STRIDES": made.strides, "BLOCK": made.block},
        **{"GLU": mm.glu, "ACTIVATION": mm.activation, "SWAPPED": False, "SCHEME": mm.scheme, "BATCHED": False},
        **{"PDL": True, "KNOWN": known},
    }
    kernel = compile_kernel(
        _decoded_few_mm_kernel,
        {name: kind for name, kind in arguments.items() if kind is not None},
        {**constants, **{name: None for name, kind in arguments.items() if kind is None}},
        num_warps=tile.num_warps,
        launch_pdl=True,
        maxnreg=FEW_REGISTERS,
    )
    assert FEW_PROGRAMS * 8 * 32 * kernel.registers <= 65536 and FEW_PROGRAMS * (kernel.shared + 1024) <= 228 * 1024
    (loop,) = [body for body in kernel.loops if sum(name.startswith("HMMA") for _, name, _ in body) > 2][:1]
    assert not [name for _, name, _ in loop if name.startswith(("LDL", "STL", "STS", "HGMMA", "SHFL"))]
    return kernel


@LAYOUTS
@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_compiles(scheme: str, layout: str | None) -> None:
    compile_few(scheme, layout)


@LAYOUTS
def test_compiles_with_a_bias(layout: str | None) -> None:
    compile_few("mxfp4", layout, bias=torch.empty(2, 2 * I if layout else H, dtype=torch.bfloat16))


@LAYOUTS
def test_compiles_behind_a_kernel_that_counts_rows(layout: str | None) -> None:
    compile_few("mxfp4", layout, known=False)


@pytest.mark.parametrize(
    ("scheme", "rows", "columns"),
    [(scheme, *tile) for scheme, tiles in FEW_TILES.items() for tile in tiles.values()],
)
def test_other_heights_compile(scheme: str, rows: int, columns: int) -> None:
    tile = MMConfig(rows, 128, columns, 1, 4, 3, a_tma=True, w_tma=True)
    kernel = compile_product(*product(scheme, tile, layout="concat"))
    assert {"HMMA.16816.F32.BF16"} == set(re.findall(r"HMMA\S+", kernel.sass))


@pytest.mark.parametrize("H, I", [(2048, 768), (2880, 2880), (1408, 704), (320, 160)])
def test_rows_that_gemm_1_leaves_are_in_the_order_of_gemm_2(H: int, I: int) -> None:
    """As many columns as it writes at once, or fewer; its own rows, which are copied, have twice as many."""
    row, tile = SCHEMES["mxfp4"], MMConfig(8, 128, 256, 1, 4, 3, a_tma=True, w_tma=True)
    up = ExpertMM(row_operand(row, 2 * I, H), torch.bfloat16, glu_layout="concat", activation="silu")
    down = ExpertMM(row_operand(row, H, I), torch.bfloat16)
    first, second = Layer(up, down, "mxfp4")._tiles(Plan("triton", "grouped", (tile, tile)))
    assert up.specialises(first) and down.specialises(second)
    assert up.columns_at_once(first) % down.order(second)[0] == 0 == I % down.order(second)[0]
    assert (up.order(first)[0], down.order(second)[0]) == (min(128, H & -H), min(64, I & -I))


def test_products_that_it_cannot_take_gather_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 rows, which are multiplied in two parts, rows that are taken as they are, and a GPU that is no Hopper."""
    tile = MMConfig(8, 128, 256, 1, 4, 3, a_tma=True, w_tma=True)
    gathered = MMConfig(16, 128, 128, 1, 4, 4, a_tma=False, w_tma=True)
    assert product("mxfp4", tile, layout="concat", dtype=torch.float16)[1] == gathered
    mm, fitted, _ = product("mxfp4", tile, layout="concat")
    assert fitted == tile and fit(tile, mm, as_they_are=True) == gathered
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: False)
    assert fit(tile, mm) == gathered
    wide = tile._replace(block_m=32, block_k=128)
    assert [fit(wide, product(scheme, tile, layout="concat")[0]).block_k for scheme in ("mxfp4", "mxfp8")] == [128, 64]


def test_every_argument_of_a_launch_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, Any] = {}
    monkeypatch.setattr(expert_mm, "multiprocessors", lambda device: 132)

    def launch_it(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        launched.update(zip(kernel.arg_names, given, strict=True), grid=grid, options=options)

    monkeypatch.setattr(expert_mm, "launch", launch_it)
    tile = MMConfig(8, 128, 256, 1, 4, 3, a_tma=True, w_tma=True)
    bias = torch.zeros(2, 2 * I, dtype=torch.bfloat16)
    mm, fitted, rows = product("int4_w4a16", tile, layout="concat", zeros=torch.int8, bias=bias)
    extents = torch.tensor([4, 8], dtype=torch.int32)
    out, _ = expert_mm.grouped_mm(rows, mm, extents, fitted, num_rows=256, pdl=True, known=True)
    scale, zeros = mm.operand.scales
    same = {"w_scale": scale, "w_zeros": zeros, "w_outer": None, "bias": bias, "extents": extents}
    assert all(launched[name] is value for name, value in same.items())
    bases = {"a_desc": rows, "w_desc": mm.weight, "out_desc": out}
    assert all(launched[name].base is tensor for name, tensor in bases.items())
    halves = {"up_scale_offset": scale[0, :I].numel(), "up_zeros_offset": zeros[0, :I].numel(), "up_outer_offset": 0}
    sizes = {"num_rows": 256, "E": 2, "N": I, "K": H, "GLU": mm.glu, "ACTIVATION": "silu", "SWAPPED": False}
    assert {name: launched[name] for name in halves | sizes} == halves | sizes
    assert (launched["PDL"], launched["KNOWN"], launched["BATCHED"]) == (True, True, False)
    assert launched["grid"] == (min(34 * 12, FEW_PROGRAMS * 132),)
    assert launched["options"] == {"num_warps": 4, "launch_pdl": True, "maxnreg": FEW_REGISTERS}
