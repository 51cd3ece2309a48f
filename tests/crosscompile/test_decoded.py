"""Products of decoded weights in Gluon compile for Hopper: registers stay apart, nothing spills, nothing waits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import PACKED
from moe_ops.kernels.triton import expert_mm, hopper, launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.decoded_mm import _decoded_mm_kernel
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.layer import Layer
from moe_ops.plans import Plan
from tests.crosscompile.compiling import Compiled, compile_kernel, quantized
from tests.crosscompile.test_packed import H, I, K, common_arguments, descriptor, product
from tests.ops.scheme_layers import further

# Scales of rows are applied behind the loop, those within a step where it decodes, those of groups to its sums. Layouts
# change which rows a thread decodes: every scheme with halves behind one another, of each kind one with the others.
COMPILED = [
    *((scheme, "concat") for scheme in sorted(PACKED)),
    *((scheme, "interleaved") for scheme in ("fp8_w8a16", "nvfp4", "int4_w4a16")),
    *((scheme, None) for scheme in ("int8_w8a16", "mxfp8", "int4_w4a16")),
]
# Rows of tokens of a tile; where sums wait for scales, registers have room for 128.
HIGH, HIGHER = (MMConfig(rows, 128, 64, 8, 8, 3, a_tma=True, w_tma=True) for rows in (128, 256))
KINDS = pytest.mark.parametrize(
    ("scheme", "layout"), COMPILED, ids=[f"{scheme}-{layout or 'down'}" for scheme, layout in COMPILED]
)
IN_TILES = pytest.mark.parametrize(
    ("scheme", "layout", "tile"),
    [(*kind, tile) for kind in COMPILED for tile in (HIGH, HIGHER) if tile == HIGH or kind[0] != "int4_w4a16"],
    ids=lambda value: str(value.block_m) if isinstance(value, MMConfig) else value or "down",
)
UNSTACKED = pytest.mark.parametrize("layout", ["interleaved", None], ids=["interleaved", "down"])


def compile_decoded(scheme: str, layout: str | None, tile: MMConfig = HIGH, **options: Any) -> Compiled:
    mm, fitted, rows = product(scheme, tile, layout=layout, **options)
    return compile_product(mm, fitted._replace(block_m=tile.block_m), rows)


def compile_made(
    kernel: Any, mm: ExpertMM, tile: MMConfig, rows: torch.Tensor, num_warps: int | None = None, **more: Any
) -> Compiled:
    """A kernel in Gluon of decoded weights, of what is prepared for it; more: its other constants, and options."""
    out, _ = mm.allocate((256,), rows)
    made = mm.prepare_decoded(rows, out, tile)
    arguments = common_arguments(mm) | {
        "a_desc": descriptor(made.a_desc), "w_desc": descriptor(made.w_desc), "out_desc": descriptor(made.out_desc),
    }  # fmt: skip
    del arguments["up_offset"]
    if kernel is _decoded_mm_kernel:
        arguments["told"] = "*i32:16"
    elif "TOP_K" in kernel.arg_names:  # `decoded_few_mm`, which gathers quantised rows
        gathered = {"a": "*bf16:16", "a_scale": "*fp32:16", "row_to_pair": "*i32:16"}
        arguments |= gathered if mm.widened else dict.fromkeys(gathered)
        more = {"TOP_K": K if mm.widened else None, **more}
    constants = {
        **{"E": mm.num_experts, "N": mm.out_features, "K": mm.in_features, "STRIDES": made.strides},
        **{"BLOCK": made.block, "GLU": mm.glu, "ACTIVATION": mm.activation, "SWAPPED": False, "SCHEME": mm.scheme},
        **{"BATCHED": False, "PDL": True, **{name: more.pop(name) for name in set(more) & set(kernel.arg_names)}},
    }
    return compile_kernel(
        kernel,
        {name: kind for name, kind in arguments.items() if kind is not None},
        {**constants, **{name: None for name, kind in arguments.items() if kind is None}},
        num_warps=num_warps or 8 // made.block[7],
        launch_pdl=True,
        **more,
    )


def compile_product(mm: ExpertMM, fitted: MMConfig, rows: torch.Tensor) -> Compiled:
    """Of a tile as it is where there is such a GPU."""
    kernel = compile_made(_decoded_mm_kernel, mm, fitted, rows)
    assert kernel.stack == 0 or mm.num_experts > 128, f"{kernel.stack} bytes of spills"
    assert kernel.loops and not kernel.serialised and not kernel.overwritten
    products = re.findall(r"HGMMA\S+ R\d+, (\S+),", kernel.sass)
    assert products and all(operand.startswith("R") for operand in products)
    return kernel


@IN_TILES
def test_compiles(scheme: str, layout: str | None, tile: MMConfig) -> None:
    """Of all rows of tokens that a tile may have, a half and a quarter. One product is under way while the next weights
    are decoded, but where it is scaled. Scales of groups, where there are any, are prefetched.
    """
    kernel = compile_decoded(scheme, layout, tile)
    heights = {64, 128, tile.block_m}
    assert set(map(int, re.findall(r"HGMMA\.64x(\d+)x16", kernel.sass))) == heights
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", kernel.ptx)
    scaled = scheme == "int4_w4a16"
    assert waits.count("1") == (0 if scaled else 2 * len(heights))
    assert ("prefetch.global.L2" in kernel.ptx) == (scheme not in ("fp8_w8a16", "int8_w8a16"))


@UNSTACKED
def test_compiles_with_a_bias(layout: str | None) -> None:
    rows = 2 * I if layout else H
    compile_decoded("mxfp4", layout, bias=torch.empty(2, rows, dtype=torch.bfloat16))


@pytest.mark.parametrize(("scheme", "zeros"), [("int4_w4a16", torch.int8), ("int8_w8a16", torch.uint8)], ids=str)
def test_compiles_with_zero_points(scheme: str, zeros: torch.dtype) -> None:
    compile_decoded(scheme, "concat", zeros=zeros)


@pytest.mark.parametrize("layout", ["concat", None], ids=["concat", "down"])
def test_compiles_for_blocks_of_scales(layout: str | None) -> None:
    """Sums that wait for the scales of fp8_block128."""
    kernel = compile_decoded("fp8_w8a16", layout, stored_as="fp8_block128")
    assert set(re.findall(r"HGMMA\.64x(\d+)x16", kernel.sass)) == {"64", "128"}


@pytest.mark.parametrize(
    ("columns", "layout"),
    [(128, "concat"), (256, "interleaved"), (256, None)],
    ids=["128-concat", "256-interleaved", "256-down"],
)
def test_rows_that_gemm_1_leaves_are_in_the_order_of_gemm_2(columns: int, layout: str | None) -> None:
    """int4: of as many columns as a group has, the scales are those of rows, and GEMM 2's sums wait for none."""
    scheme, rows = "int4_w4a16", 2 * columns if layout else columns
    options = {"glu_layout": layout} if layout else {}
    up = ExpertMM(row_operand(scheme, rows, 256), torch.bfloat16, **options, activation="silu")
    down = ExpertMM(row_operand(scheme, 256, columns), torch.bfloat16)
    layer = Layer(up, down, scheme)
    first, second = layer._tiles(Plan("triton", "grouped", (HIGH, HIGH)))
    order = down.order(second)
    given = torch.empty(256, 256, dtype=torch.bfloat16)
    compile_product(replace(up, rows_order=up.order(first), out_order=order), first, given)
    compile_product(replace(down, rows_order=order), second, given[:, :columns].contiguous())


def row_operand(scheme: str, rows: int, columns: int) -> Operand:
    stored, scales = quantized(scheme, rows, columns)
    return Operand(stored, SCHEMES[scheme], scales)


@pytest.mark.parametrize(("scheme", "experts"), [("mxfp4", 512), ("int4_w4a16", 8), ("int4_w4a16", 512)])
def test_tables_of_many_experts_stay_out_of_the_loop(
    scheme: str, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registers that they do not fit into are read again for each tile, not for each step."""
    monkeypatch.setattr(ExpertMM, "num_experts", experts)
    loops = [body for body in compile_decoded(scheme, "concat").loops if 1 < len(body) < 400]
    assert loops
    for body in loops:
        assert not [line for line in body if line[1].startswith(("LDL", "STL"))]


@pytest.mark.parametrize(
    ("scheme", "taken"),
    [*((scheme, True) for scheme in sorted(PACKED)), ("fp8_block128", False)],
)
def test_which_products_it_takes(scheme: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, of 128 weight rows that come by descriptor; those that wait for scales keep their rows there."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    mm, fitted, _ = product(scheme, HIGH, layout="concat" if taken else None)
    assert mm.specialises(fitted) == taken
    assert not taken or (fitted.block_m, fitted.block_n) == (128, 128)
    others = (fitted._replace(a_tma=False), fitted._replace(w_tma=False), fitted._replace(block_n=64))
    assert not any(mm.specialises(other) for other in others)
    monkeypatch.undo()
    assert not mm.specialises(fitted), "no such GPU"


def test_weights_between_words_and_rows_of_odd_bytes_are_not_its(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    row = SCHEMES["mxfp4"]
    stored, scales = row.quantize(torch.randn(2, 100, 256))
    assert not ExpertMM(Operand(stored, row, scales), torch.bfloat16).specialises(HIGH), "100 columns of 2 bytes"
    stored, scales = row.quantize(torch.randn(2, 128, 256))
    assert ExpertMM(Operand(stored, row, scales), torch.bfloat16).specialises(HIGH)
    assert not ExpertMM(Operand(further(stored, 1), row, scales), torch.bfloat16).specialises(HIGH)


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_other_versions_of_triton_may_have_no_gluon(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise error(name)

    assert launch._has_gluon.__wrapped__()
    monkeypatch.setattr(launch.importlib, "import_module", missing)
    assert not launch._has_gluon.__wrapped__()


def test_other_versions_of_gluon_may_be_called_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hopper.CALLED, hopper.mbarrier.wait, ("barrier", "phase"))
    assert not launch._has_gluon.__wrapped__()


def test_every_argument_of_a_launch_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, Any] = {}
    monkeypatch.setattr(expert_mm, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        expert_mm,
        "launch",
        lambda kernel, grid, *given, **options: launched.update(zip(kernel.arg_names, given, strict=True)),
    )
    bias = torch.zeros(2, 2 * I, dtype=torch.bfloat16)
    mm, fitted, rows = product("int4_w4a16", HIGH, layout="concat", zeros=torch.int8, bias=bias)
    out, _ = mm.allocate((256,), rows)
    extents = torch.tensor([100, 256], dtype=torch.int32)
    told = torch.zeros(1, dtype=torch.int32)
    of = expert_mm._of_decoded(rows, mm, extents, fitted, out, told)
    expert_mm._launch_specialised(mm, of, (256, 4, 256, False), rows.device, pdl=True)
    assert list(launched) == _decoded_mm_kernel.arg_names
    assert_places(launched, mm, rows, out, extents)
    assert launched["PDL"] is True and launched["told"] is told


def assert_places(
    launched: dict[str, Any], mm: ExpertMM, rows: torch.Tensor, out: torch.Tensor, extents: torch.Tensor
) -> None:
    """Arguments by name are those of GEMM 1 of int4_w4a16 in two halves, with zero points and a bias."""
    scale, zeros = mm.operand.scales
    same = {"w_scale": scale, "w_zeros": zeros, "w_outer": None, "bias": mm.bias, "extents": extents}
    assert mm.bias is not None and all(launched[name] is value for name, value in same.items())
    bases = {"a_desc": rows, "w_desc": mm.weight, "out_desc": out}
    assert all(launched[name].base is tensor for name, tensor in bases.items())
    halves = {"up_scale_offset": scale[0, :I].numel(), "up_zeros_offset": zeros[0, :I].numel(), "up_outer_offset": 0}
    sizes = {"num_rows": 256, "E": 2, "N": I, "K": H, "GLU": mm.glu, "ACTIVATION": "silu", "SWAPPED": False}
    assert {name: launched[name] for name in halves | sizes} == halves | sizes
    assert launched["SCHEME"] == mm.scheme and launched["BATCHED"] is False
