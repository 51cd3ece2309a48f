"""Products of decoded weights compile for Hopper: weights are operands in registers, and nothing spills; and the
decoders of whole words decode.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from meta.formats import CODES, E4M3
from meta.operands import Operand
from meta.schemes import SCHEMES, ActivationFormat
from moe_ops.backends.triton_plans import DECODED, PACKED, tile_for
from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton import packed_fp8_tile as fp8
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import _expert_mm_kernel
from moe_ops.kernels.triton.launch import ExpertMM, Launch, as_bf16
from moe_ops.kernels.triton.layer import fit
from moe_ops.kernels.triton.programs import most_registers
from moe_ops.plans import bucket
from tests.crosscompile.compiling import Compiled, compile_kernel, quantized
from tests.crosscompile.ptx import run

E, K, H, I = 128, 8, 2048, 768
TYPES = {torch.uint8: "u8", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv", torch.bfloat16: "bf16"}
TYPES |= {torch.float16: "fp16"}
TYPES |= {torch.int16: "i16", torch.float8_e5m2: "fp8e5"}
TYPES |= {torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32"}


def descriptor(made: TensorDescriptor | GluonDescriptor | None) -> str | None:
    if made is None:
        return None
    layout = f",{made.layout!r}" if isinstance(made, GluonDescriptor) else ""
    return f"tensordesc<{TYPES[made.base.dtype]}[{', '.join(map(str, made.block_shape))}]{layout}>"


def product(
    scheme: str, tile: MMConfig, *, layout: str | None, blocks: ActivationFormat | None = None, wide: bool = False,
    stored_as: str | None = None, zeros: torch.dtype | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> tuple[ExpertMM, MMConfig, torch.Tensor]:  # fmt: skip
    """(one product with Qwen3-30B-A3B's dimensions, its tile, rows): GEMM 1 of a layout of two halves, or GEMM 2; of
    rows in a format of `meta.blocks`, which GEMM 1 leaves, too; fp32 scales in fp64 where `wide`; of what another
    scheme stores, `stored_as`; with zero points; of hidden states of a `dtype`.
    """
    N, depth = (2 * I, H) if layout else (H, I)
    stored, scales = quantized(stored_as or scheme, N, depth)
    scales = tuple(scale.double() if wide and scale.dtype == torch.float32 else scale for scale in scales)
    if zeros is not None:
        scales += (torch.zeros(scales[0].shape, dtype=zeros),)
    weight = Operand(stored, SCHEMES[scheme], scales)
    form = blocks or SCHEMES[scheme].rows
    first = {"glu_layout": layout, "activation": "silu", "quantize_output": form is not None} if layout else {}
    mm = ExpertMM(weight, dtype, **first, blocks=blocks, **options)
    tile = fit(tile, mm)
    order = mm.order(tile)
    out_order = (min(order[0], mm.columns(tile)), order[1]) if order and layout else None
    mm = replace(mm, rows_order=order, out_order=out_order).beside(tile)
    rows = torch.empty(256, depth, dtype=dtype)
    if form is not None:
        stored = as_bf16(form) if mm.gathers_few(tile) else form
        rows = torch.empty(256, depth // form.pack, dtype=stored.dtype)
    return mm, tile, rows


def common_arguments(mm: ExpertMM) -> dict[str, str | None]:
    """Kernel arguments that are no constants, of any kernel of decoded weights."""
    arguments: dict[str, str | None] = {
        "extents": "*i32:16",
        "bias": None if mm.bias is None else "*bf16:16",
        "up_offset": "i32:16",
        **dict.fromkeys(("num_rows", "up_scale_offset", "up_zeros_offset", "up_outer_offset"), "i32"),
        **dict.fromkeys(("alpha", "limit"), "fp32"),
    }
    for role, name in (("groups", "w_scale"), ("zeros", "w_zeros"), ("rows", "w_outer")):
        scale = mm.decoding[role].tensor
        arguments[name] = None if scale is None else f"*{TYPES[scale.dtype]}:16"
    return arguments


def compile_gluon(
    kernel: Any, mm: ExpertMM, made: Launch, arguments: dict[str, str | None], *, experts: int, swapped: bool
) -> Compiled:
    """A kernel in Gluon of what is prepared for it, with tables of so many experts; `arguments`: those that are no
    constants.
    """
    constants = {
        **{"E": experts, "N": mm.out_features, "K": mm.in_features, "STRIDES": made.strides},
        **{"BLOCK": (*made.block[:4], 1 << (experts - 1).bit_length(), *made.block[5:]), "GLU": mm.glu},
        **{"ACTIVATION": mm.activation, "SWAPPED": swapped, "SCHEME": mm.scheme, "BATCHED": False, "PDL": True},
    }
    compiled = compile_kernel(
        kernel,
        {name: kind for name, kind in arguments.items() if kind is not None},
        {**constants, **{name: None for name, kind in arguments.items() if kind is None}},
        num_warps=4,
        launch_pdl=True,
    )
    assert compiled.loops and not compiled.serialised and compiled.shared <= 227 * 1024 and not compiled.voted
    return compiled


def note_launch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a kernel is given on a Hopper GPU, once it is launched, by names of arguments."""
    launched: dict[str, Any] = {}
    monkeypatch.setattr(expert_mm, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    monkeypatch.setattr(
        expert_mm,
        "launch",
        lambda kernel, grid, *given, **options: launched.update(zip(kernel.arg_names, given, strict=True)),
    )
    return launched


def halves_in_order(kernel: Compiled) -> list[str | None]:
    """Of weights that come by a descriptor of both halves, the numbers of these as they are asked for."""
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", kernel.ptx))
    loads = re.findall(r"tensor\.4d\.shared::cluster\S+ \[[^]]+\], \[[^,]+, \{([^}]*)\}\]", kernel.ptx)
    return [constants.get(load.split(", ")[2]) for load in loads]


def compile_packed(
    scheme: str, tile: MMConfig, *, gated: bool, capability: int = 90, **options: Any
) -> Compiled:  # fmt: skip
    """A `product`, with gathered rows where GEMM 1's tile has few."""
    mm, tile, rows = product(scheme, tile, layout="concat" if gated else None, **options)
    out, out_scale = mm.allocate((256,), rows)
    form = mm.form
    gathered = gated and not tile.a_tma
    made = mm.prepare(rows, out, tile, gathered=gathered)
    arguments: dict[str, str | None] = common_arguments(mm) | {
        "a": f"*{TYPES[rows.dtype]}:16",
        "a_desc": descriptor(made.a_desc),
        "a_scale": None if form is None else f"*{TYPES[form.scale_dtype]}:16",
        "row_to_pair": "*i32:16" if gathered else None,
        "w": f"*{TYPES[mm.weight.dtype]}:16",
        "w_desc": descriptor(made.w_desc),
        "out": f"*{TYPES[out.dtype]}:16",
        "out_desc": descriptor(made.out_desc),
        "out_scale": f"*{TYPES[out_scale.dtype]}:16",
        **dict.fromkeys(("kept", "kept_desc", "kept_up", "kept_up_desc", "load_ptr")),
    }
    constants = {
        **{
            "E": E,
            "N": mm.out_features,
            "K": mm.in_features,
            "TOP_K": K if gathered else 0,
            "STRIDES": (*made.strides, None),
        },
        **{"BLOCK": made.block, "GLU": mm.glu, "ACTIVATION": mm.activation, "MOVES": made.moves, "SCHEME": mm.scheme},
        **{"BATCHED": False, "WALK": made.walk, "PDL": True},
    }
    return compile_kernel(
        _expert_mm_kernel,
        {name: kind for name, kind in arguments.items() if kind is not None},
        {**constants, **{name: None for name, kind in arguments.items() if kind is None}},
        capability=capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=True,
        maxnreg=most_registers(
            tile, mm.glu, scaled=mm.is_scaled, decoded=mm.is_decoded, in_two=mm.in_two, in_turns=mm.in_turns
        ),
    )


PRODUCTS = {
    "16_gate_up": (16, True),
    "256_gate_up": (256, True),
    "4096_gate_up": (4096, True),
    "4096_down": (4096, False),
}


def products(chosen: dict[str, Iterable[str]]) -> pytest.MarkDecorator:
    """Cases of a test: of each of PRODUCTS the schemes that it is compiled for."""
    cases = {f"{scheme}-{name}": (scheme, *PRODUCTS[name]) for name, schemes in chosen.items() for scheme in schemes}
    return pytest.mark.parametrize(("scheme", "tokens", "gated"), cases.values(), ids=cases)


def compile_for(scheme: str, tokens: int, gated: bool, **options: Any) -> Compiled:
    """By the tile of so many tokens."""
    sizes = (2 * I, H) if gated else (H, I)
    tile = tile_for(scheme, E, bucket(tokens * K), *sizes, "NVIDIA H200", 90, "up")
    kernel = compile_packed(scheme, tile, gated=gated, **options)
    tile = product(scheme, tile, layout="concat" if gated else None, **options)[1]
    if tile.block_m > 64:
        assert 2 * kernel.registers * 32 * tile.num_warps <= 65536, "two programs share a multiprocessor"
        assert 2 * (kernel.shared + 1024) <= 228 * 1024, "and its memory"
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.ptx_count(r"cp\.async\.bulk\.tensor") > 0, "weights come by descriptor"
    return kernel


# A decoder is the same in all products: every scheme where most rows leave the fewest registers, and between rows of
# bf16 and of fp16 in two of the others; in all of them the one whose sums wait for scales.
@products(
    {
        "16_gate_up": ("fp8_w8a16", "int4_w4a16", "mxfp4", "mxfp4_a8", "w4a8_fp8"),
        "256_gate_up": ("int4_w4a16", "int8_w8a16", "nvfp4"),
        "4096_gate_up": sorted(PACKED),
        "4096_down": ("int4_w4a16", "mxfp8"),
    }
)
def test_compiles(scheme: str, tokens: int, gated: bool) -> None:
    assert_first_operands_are_decoded(compile_for(scheme, tokens, gated))


def test_32_rows_compile_beside_scales_that_have_turns() -> None:
    tile = MMConfig(32, 128, 128, 1, 4, 4, a_tma=False, w_tma=True)
    kernel = compile_packed("mxfp4_a8", tile, gated=True)
    assert kernel.stack == 0
    assert_first_operands_are_decoded(kernel)


def assert_first_operands_are_decoded(kernel: Compiled) -> None:
    """They are in registers, and no step ends before its products have read them."""
    products = re.findall(r"HGMMA\S+ R\d+, (\S+),", kernel.sass)
    assert products and all(operand.startswith("R") for operand in products)
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", kernel.ptx)
    assert waits and set(waits) == {"0"}


@products(
    {
        "16_gate_up": ("int4_w4a16", "int8_w8a16", "mxfp8"),
        "256_gate_up": ("fp8_w8a16", "int4_w4a16", "mxfp4"),
        "4096_gate_up": sorted(PACKED),
        "4096_down": ("int4_w4a16", "nvfp4"),
    }
)
def test_compiles_for_fp16_activations(scheme: str, tokens: int, gated: bool) -> None:
    """In bf16, both parts of a row with the same decoded weights: every first operand is read twice."""
    kernel = compile_for(scheme, tokens, gated, dtype=torch.float16)
    products = re.findall(r"HGMMA\S+\.BF16 R\d+, (R\d+),", kernel.sass)
    assert products and kernel.ptx_count("wgmma.mma_async") == len(products)
    assert all(count % 2 == 0 for count in Counter(products).values())
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", kernel.ptx)
    assert waits and set(waits) == {"0"} and not kernel.overwritten


@pytest.mark.parametrize("gated", [True, False], ids=["gate_up", "down"])
def test_sums_that_wait_for_scales_have_fewer_rows(gated: bool) -> None:
    """Of blocks, for a scheme whose scales may be those of rows: registers hold two sums of 64."""
    tile = tile_for("fp8_w8a16", E, bucket(4096 * K), 2 * I, H, "NVIDIA H200", 90, "up")
    kernel = compile_packed("fp8_w8a16", tile, gated=gated, stored_as="fp8_block128")
    assert tile.block_m > 64 and kernel.stack == 0
    assert set(re.findall(r"HGMMA\.64x(\d+)x16", kernel.sass)) == {"64"}


@products({"256_gate_up": ["nvfp4"], "4096_gate_up": ["nvfp4"]})
def test_a_factor_in_fp64_is_rounded_once(scheme: str, tokens: int, gated: bool) -> None:
    """Where it is loaded: nothing is computed in fp64, and no register more is needed in the loop."""
    narrow, wide = (compile_for(scheme, tokens, gated, wide=wide) for wide in (False, True))
    assert wide.ptx_count(r"cvt\.rn\.f32\.f64") > 0 == narrow.ptx_count(r"\.f64")
    assert wide.ptx_count(r"(mul|add|fma|div)\S*\.f64") == 0
    assert wide.registers <= max(narrow.registers + 2, 128)


@products(
    {
        "256_gate_up": ["w4a8_fp8"],
        "4096_gate_up": sorted(DECODED - PACKED),
        "4096_down": sorted(DECODED - PACKED),
    }
)
def test_compiles_for_e4m3_rows(scheme: str, tokens: int, gated: bool) -> None:
    """Every product is of eight bits, and its first operand registers, which codes are decoded to where they are."""
    kernel = compile_for(scheme, tokens, gated)
    products = re.findall(r"QGMMA\S+ R\d+, (\S+),", kernel.sass)
    assert products and all(operand.startswith("R") for operand in products) and "HGMMA" not in kernel.sass
    weights = "e4m3" if SCHEMES[scheme].code.name == "int4" else "e5m2"
    assert kernel.ptx_count(rf"wgmma\.mma_async\S+k32\.f32\.{weights}\.e4m3 ") == len(products)
    before = kernel.ptx[: kernel.ptx.index("wgmma.mma_async")]
    decoded = before[before.rindex("0x50545658" if weights == "e4m3" else "0x5140") :]
    assert not re.search(r"st\.shared\.(v\d\.)?b32|stmatrix", decoded), "codes go through shared memory"


@pytest.mark.parametrize("power", [None, 0, 13, fp8.WINDOW.value], ids=str)
def test_decoders(power: int | None) -> None:
    """Of words that have every byte at every place: int4, and e2m1 times a power of two."""
    decoder = fp8.int4_parts if power is None else fp8.e2m1_parts
    dtype, factor = (E4M3, fp8.INT4_UNIT.value) if power is None else (torch.float8_e5m2, 2.0 ** (13 - (power or 0)))
    code = CODES["int4" if power is None else "e2m1"]
    for first in range(256):
        stored = torch.tensor([first, first * 5 + 1 & 255], dtype=torch.uint8)
        registers = {"$2": int(stored.view(torch.int16)) & 0xFFFFFFFF}
        if power is None:
            registers |= {"$3": fp8.BELOW.value, "$4": fp8.ABOVE.value}
        else:
            registers["$3"] = fp8.LOW_BYTES.value + power * fp8.LOW_POWER.value
            registers["$4"] = fp8.HIGH_BYTES.value + power * fp8.HIGH_POWER.value
        registers = run(decoder.src.split('"""')[3], registers)  # behind its docstring
        first_part, second = registers["$0"], registers["$1"]
        joined = 2 * first_part + second if power is None else first_part & fp8.SIGNS.value | second
        words = torch.tensor([joined]).to(torch.int32)
        assert torch.equal(words.view(dtype).float() * factor, code.decode(stored))
