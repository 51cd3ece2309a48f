"""The expert GEMM kernels compile for every generation, with its matrix and copy instructions and without spills."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from meta.operands import Operand
from moe_ops.backends.triton_plans import small_tiles
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import _expert_mm_kernel
from moe_ops.kernels.triton.launch import STREAM, ExpertMM, walk
from moe_ops.kernels.triton.programs import most_registers
from moe_ops.kernels.triton.small import _small_down_kernel, _small_glu_kernel
from moe_ops.kernels.triton.tile_loads import (
    CONCAT,
    INTERLEAVED,
    NOT_GATED,
    POINTERS,
    TMA_KN,
    TMA_NK,
)
from moe_ops.plans import LayerKey
from tests.crosscompile.compiling import CAPABILITIES, Compiled, compile_kernel

E, H, I = 8, 4096, 14336
ELEMENTS = {"fp8e4nv": torch.float8_e4m3fn, "i8": torch.int8}  # of quantised weights and rows


def tensormap(load: int, glu: int, block_n: int, block_k: int, dtype: str) -> str:
    half, halves = block_n // 2, 1 if dtype in ELEMENTS else 2
    if load == TMA_NK.value:
        block = [1, halves, half, block_k] if glu == CONCAT.value else [1, block_n, block_k]
    else:
        block = [1, block_k, halves, half] if glu == CONCAT.value else [1, block_k, block_n]
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"


def compile_mm(
    block: tuple[int, int, int],
    *,
    glu: int = CONCAT.value,
    a_tma: bool = True,
    w_load: int = TMA_NK.value,
    quantized: bool = False,
    quantize: bool = False,
    by_row: str | None = None,
    gather: bool = False,
    batched: bool = False,
    capability: int = 90,
    warps: int = 8,
    stages: int = 3,
    dtype: str = "bf16",
    activation: str | None = None,
    tall: tuple[int, int] = (0, 0),
    counted: bool = False,
    kept: bool = False,
    result: str | None = None,
    by_pointer: bool = False,
) -> Compiled:
    """One expert GEMM with Mixtral's dimensions: GEMM 1 when gated or activated, else GEMM 2.

    Args:
        by_row: the element of quantised weights and rows that have one scale for each of their rows.
        kept: what stands before the activation is written, too.
        result: the output's element; by_pointer: its rows begin where no descriptor can write.
    """
    first, quantized = glu != NOT_GATED.value, quantized or by_row is not None
    N, K = (I, H) if first else (H, I)
    rows_n = 2 * N if first else N
    a_type = w_type = (by_row or "fp8e4nv") if quantized else dtype
    # Rows that threads gather leave by descriptor all the same: the config says so, not how they came.
    config = MMConfig(*block, 8, warps, stages, block[0] >= 64 and capability >= 90, True, *tall)
    layout = {NOT_GATED.value: "none", CONCAT.value: "concat", INTERLEAVED.value: "interleaved"}[glu]
    element = ELEMENTS.get(w_type, torch.bfloat16)
    weight = Operand(torch.empty(E, rows_n, K, device="meta", dtype=element), None)
    mm = ExpertMM(weight, torch.bfloat16, glu_layout=layout)
    out_type = result or ("fp8e4nv" if quantize else "fp32" if by_row and first else dtype)
    out_dtypes = {"fp32": torch.float32, **ELEMENTS}
    out = torch.empty(256, N, device="meta", dtype=out_dtypes.get(out_type, torch.bfloat16))
    store, by_descriptor = mm.store_columns(out, config), config.a_tma and not by_pointer
    scales = (rows_n, 1, 0) if by_row else (rows_n // 128 * (K // 128), K // 128, 1)
    strides = (
        (rows_n * K, 1, rows_n) if w_load == TMA_KN.value else (rows_n * K, K, 1),
        scales if quantized else None,
        None,
        K,
        None,
        None,
        (N if glu == NOT_GATED.value else 2 * N) if kept else None,
    )
    signature = {
        "a": f"*{a_type}:16",
        "w": f"*{w_type}:16",
        "out": f"*{out_type}:16",
        "extents": "*i32:16",
        "num_rows": "i32",
        "up_offset": "i32:16",
        **dict.fromkeys(("up_scale_offset", "up_zeros_offset", "up_outer_offset"), "i32"),
        "alpha": "fp32",
        "limit": "fp32",
    }
    constexprs = {
        "E": E,
        "N": N,
        "K": K,
        "TOP_K": 2 if gather else 0,
        "STRIDES": strides,
        "BLOCK": (*block, 8, E, *tall),
        "GLU": glu,
        **dict.fromkeys(("bias", "w_zeros", "w_outer")),
        "ACTIVATION": activation or ("silu" if first else None),
        "MOVES": (a_tma, w_load, store, False),
        "SCHEME": ((1, 0, False, False) if by_row else (128, 128, False, quantize)) + (None, None, None)
        if quantized
        else None,
        "BATCHED": batched,
        "WALK": walk(config, a_tma, quantized, decoded=False),
        "PDL": capability >= 90,
    }
    optional = {
        "a_desc": f"tensordesc<{a_type}[{config.rows}, {block[2]}]>" if a_tma else None,
        "w_desc": None if w_load == POINTERS.value else tensormap(w_load, glu, block[1], block[2], w_type),
        "out_desc": f"tensordesc<{out_type}[1, 1, {config.rows}, {store}]>" if by_descriptor else None,
        "a_scale": "*fp32:16" if quantized else None,
        "w_scale": "*fp32:16" if quantized else None,
        "out_scale": "*fp32:16",
        "row_to_pair": "*i32:16" if gather else None,
        "load_ptr": "*i64:16" if counted else None,
        "kept": f"*{dtype}:16" if kept else None,
        "kept_desc": f"tensordesc<{dtype}[1, 1, {config.rows}, {store}]>" if kept and by_descriptor else None,
        "kept_up": f"*{dtype}:16" if kept and glu == CONCAT.value else None,
        "kept_up_desc": f"tensordesc<{dtype}[1, 1, {config.rows}, {store}]>"
        if kept and by_descriptor and glu == CONCAT.value
        else None,
    }
    for name, kind in optional.items():
        if kind is None:
            constexprs[name] = None
        else:
            signature[name] = kind
    return compile_kernel(
        _expert_mm_kernel,
        signature,
        constexprs,
        capability=capability,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=capability >= 90,
        maxnreg=most_registers(config, glu, scaled=quantized, decoded=False, in_two=False),
    )


LARGE = (128, 256, 64)


FORMS = {
    "glu_concat": dict(glu=CONCAT.value),
    "glu_interleaved": dict(glu=INTERLEAVED.value),
    "glu_concat_transposed": dict(glu=CONCAT.value, w_load=TMA_KN.value),
    "glu_interleaved_transposed": dict(glu=INTERLEAVED.value, w_load=TMA_KN.value),
    "glu_gathered": dict(glu=CONCAT.value, a_tma=False, gather=True),
    "down": dict(glu=NOT_GATED.value),
    "down_transposed": dict(glu=NOT_GATED.value, w_load=TMA_KN.value),
    "batched_glu": dict(glu=CONCAT.value, batched=True),
    "batched_down": dict(glu=NOT_GATED.value, batched=True),
    "glu_counted": dict(glu=CONCAT.value, counted=True),
    "batched_glu_counted": dict(glu=CONCAT.value, batched=True, counted=True),
}


# With most steps in shared memory wide results in every way, narrow ones by pointer: by descriptor they are below.
@pytest.mark.parametrize(
    ("form", "stages", "result", "by_pointer"),
    [
        *((form, 4, "fp32", by_pointer) for form in ("down", "glu_interleaved") for by_pointer in (False, True)),
        *((form, 4, "bf16", True) for form in ("down", "glu_interleaved")),
        ("down", 3, "fp32", False),
        ("glu_interleaved", 3, "bf16", True),
    ],
)
def test_results_fit_beside_all_steps(form, stages, result, by_pointer):
    """Those of fp32 are twice the bytes of what is multiplied: `out_dtype`, and gradients that are added up later."""
    kernel = compile_mm(LARGE, stages=stages, result=result, by_pointer=by_pointer, **FORMS[form])
    assert kernel.shared <= 227 * 1024
    assert ("UTMASTG" in kernel.sass) != by_pointer


STREAMS = ["glu_concat", "down", "batched_glu"]


# Every form with most steps in shared memory, with fewer those that are looked into below.
@pytest.mark.parametrize(("form", "stages"), [*((form, 4) for form in FORMS), *((form, 3) for form in STREAMS)])
def test_large_tiles_on_hopper_use_wgmma_and_tma_without_spills(form, stages):
    kernel = compile_mm(LARGE, stages=stages, **FORMS[form])
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert "HGMMA.64x256x16" in kernel.sass
    assert "UTMALDG" in kernel.sass and "UTMASTG" in kernel.sass
    assert kernel.shared <= 227 * 1024


@pytest.mark.parametrize(
    ("glu", "tall"),
    [(CONCAT, (0, 0)), (CONCAT, (128, 4)), (INTERLEAVED, (128, 4)), (NOT_GATED, (0, 0))],
    ids=["concat-one_height", "concat-short_ends", "interleaved-short_ends", "not_gated-one_height"],
)
def test_what_stood_before_the_activation_is_kept_without_spills(glu, tall):
    """Of gathered rows, as a layer in training has them; whole tiles leave by descriptor."""
    block = (64 if tall[0] else 128, 256, 64)
    form = dict(glu=glu.value, a_tma=False, gather=True, activation="silu", stages=4, tall=tall)
    plain, kernel = compile_mm(block, **form), compile_mm(block, **form, kept=True)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.shared <= 227 * 1024 and kernel.sass.count("HGMMA") == plain.sass.count("HGMMA") > 0
    assert kernel.sass.count("UTMASTG") > plain.sass.count("UTMASTG") > 0


@pytest.mark.parametrize("form", STREAMS)
def test_a_stream_multiplies_while_the_next_tile_is_loaded(form):
    """One loop over tiles and k: products wait for the one before, not for themselves, except before an epilogue.

    What follows from a tile's number is uniform: or the loop would take every thread 240 registers and more.
    """
    assert walk(MMConfig(*LARGE, 8, 8, 3, True, True), True, quantized=False, decoded=False) == STREAM.value
    kernel = compile_mm(LARGE, **FORMS[form])
    assert kernel.ptx_count(r"wgmma\.wait_group\.sync\.aligned 1") == 1
    assert kernel.ptx_count(r"wgmma\.wait_group\.sync\.aligned 0") == 2, "before an epilogue in the loop, and behind it"
    assert kernel.ptx_count(r"wgmma\.mma_async") == LARGE[2] // 16, "products in a single loop"
    assert kernel.registers <= 192


@pytest.mark.parametrize(("form", "warps"), [("down", 4), ("down", 8), ("glu_concat", 8), ("glu_gathered", 8)])
def test_two_programs_of_128_by_128_share_a_multiprocessor(form, warps):
    kernel = compile_mm((128, 128, 64), warps=warps, **FORMS[form])
    assert 2 * (kernel.shared + 1024) <= 228 * 1024
    assert 2 * kernel.registers * 32 * warps <= 65536


@pytest.mark.parametrize("form", ["glu", "glu_quantising", "down", "batched_glu"])
def test_fp8_on_hopper_uses_qgmma_and_tma_without_spills(form):
    forms = {
        "glu": dict(glu=CONCAT.value),
        "glu_quantising": dict(glu=CONCAT.value, quantize=True),
        "down": dict(glu=NOT_GATED.value),
        "batched_glu": dict(glu=CONCAT.value, batched=True, quantize=True),
    }
    tall = {"glu_quantising": (128, 256, 128), "batched_glu": (128, 256, 128), "down": (128, 128, 128)}
    for block in [(64, 256, 128), *filter(None, [tall.get(form)])]:
        kernel = compile_mm(block, quantized=True, **forms[form])
        assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert "QGMMA" in kernel.sass
    assert "UTMALDG" in kernel.sass


@pytest.mark.parametrize("form", ["glu_concat", "down", "batched_glu"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_rows_with_one_scale_on_hopper(element, form):
    """e4m3 is promoted to fp32 tile by tile; int8 sums up in the tensor core."""
    kernel = compile_mm((128, 128 if form == "down" else 256, 128), by_row=element, **FORMS[form])
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    products = 4 if form == "down" else 8
    assert kernel.sass.count({"fp8e4nv": "QGMMA", "i8": "IGMMA"}[element]) == products, "in a single loop"
    assert "UTMALDG" in kernel.sass and "UTMASTG" in kernel.sass and kernel.shared <= 227 * 1024
    if form == "down":
        assert kernel.ptx_count(r"add\.(rn\.)?f32") == (64 if element == "fp8e4nv" else 0)


@pytest.mark.parametrize("form", ["glu_gathered", "down"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_decode_tiles_of_rows_with_one_scale(element, form):
    form = {**FORMS[form], "a_tma": False}
    kernel = compile_mm((16, 256 if "gather" in form else 128, 128), by_row=element, warps=4, **form)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.ptx_count(r"mma\.sync") > 0 and "UTMALDG" in kernel.sass
    assert 3 * kernel.registers * 32 * 4 <= 65536 and 3 * (kernel.shared + 1024) <= 228 * 1024


def test_int8_rows_on_ampere():
    kernel = compile_mm(
        (64, 128, 128), by_row="i8", a_tma=False, w_load=POINTERS.value, capability=80, warps=4, glu=NOT_GATED.value
    )
    assert kernel.stack == 0 and kernel.ptx_count(r"mma\.sync\S+\.s8\.s8") > 0


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_decode_tiles_use_the_tensor_cores_without_spills(quantized):
    kernel = compile_mm((16, 128, 128), a_tma=False, gather=True, quantized=quantized, warps=4)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.ptx_count(r"mma\.sync") > 0
    assert "UTMALDG" in kernel.sass


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("form", ["glu_gathered", "batched_glu"])
def test_three_programs_of_16_rows_that_quantise_share_a_multiprocessor(form, stages):
    kernel = compile_mm((16, 256, 128), quantized=True, quantize=True, warps=4, stages=stages, **FORMS[form])
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert 3 * kernel.registers * 32 * 4 <= 65536 and 3 * (kernel.shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_two_heights_keep_two_programs_of_four_warps_on_a_multiprocessor(gated):
    """Both pipelines in one kernel: tensor cores by warp and by warp group, no spills, memory for two."""
    form = {"glu": CONCAT.value, "gather": True} if gated else {"glu": NOT_GATED.value}
    kernel = compile_mm((16, 128, 128), a_tma=False, warps=4, tall=(64, 2), **form)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.ptx_count(r"mma\.sync") > 0 and "HGMMA" in kernel.sass
    assert 2 * (kernel.shared + 1024) <= 227 * 1024 and kernel.registers <= 255


@pytest.mark.parametrize("form", ["glu_gathered", "glu_concat", "down", "batched_glu"])
def test_short_ends_of_a_large_tile_spill_nothing(form):
    """128 rows by 256, rows by descriptor where they are sorted; 64 rows by pointer at the end of an expert."""
    kernel = compile_mm((64, 256, 64), stages=4, tall=(128, 4), **FORMS[form])
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert "HGMMA.64x256x16" in kernel.sass and "HGMMA.64x128x16" in kernel.sass
    assert kernel.shared <= 227 * 1024


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("activation", "glu"), [("swiglu_oai", INTERLEAVED), ("relu2", NOT_GATED), ("gelu", CONCAT)], ids=str
)
def test_activations_compile_without_spills(activation, glu, capability):
    tma = capability >= 90
    loads = {"a_tma": tma, "w_load": TMA_NK.value if tma else POINTERS.value}
    kernel = compile_mm((64, 128, 64), glu=glu.value, activation=activation, capability=capability, warps=4, **loads)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.loads_16_bytes or tma


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("form", ["glu", "down"])
def test_every_generation(capability, form):
    tma = capability >= 90
    kernel = compile_mm(
        (64, 128, 64),
        glu=CONCAT.value if form == "glu" else NOT_GATED.value,
        a_tma=tma,
        w_load=TMA_NK.value if tma else POINTERS.value,
        capability=capability,
        warps=4,
    )
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"


# All sizes on Hopper, elsewhere each kernel and each model once.
@pytest.mark.parametrize(
    ("capability", "scheme", "model", "stage"),
    [
        *product((90,), ("bf16", "fp8_block128", "fp8_channel", "int8_channel"), ("qwen3", "mixtral"), ("glu", "down")),
        *((*of, "qwen3", "glu") for of in ((80, "bf16"), (100, "bf16"), (100, "fp8_block128"))),
        *((*of, "mixtral", "down") for of in ((80, "bf16"), (100, "bf16"), (100, "fp8_block128"))),
    ],
)
def test_small_kernels_stream_16_bytes_a_thread(capability, scheme, model, stage):
    experts, top_k, hidden, inter = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336)}[model]
    key = LayerKey(scheme, "grouped", experts, top_k, hidden, inter, gated=True)
    tile = small_tiles(key, tokens=1)[stage == "down"]
    N, K = (inter, hidden) if stage == "glu" else (hidden, inter)
    w_type = {"bf16": "bf16", "int8_channel": "i8"}.get(scheme, "fp8e4nv")
    quantized, by_row = scheme != "bf16", scheme.endswith("channel")
    scale = ((N, 1, 0) if by_row else (N // 128 * (K // 128), K // 128, 1)) if quantized else None
    signature = {"topk_weights": "*fp32:16", "topk_ids": "*i32:16", "w": f"*{w_type}:16"}
    constexprs = {
        "expert_map": None,
        "bias": None,
        "E": experts,
        "MAPPED": 0,
        "TOP_K": top_k,
        "N": N,
        "K": K,
        "STRIDES": ((N * K * (2 if stage == "glu" else 1), K, 1), scale, None, None, None),
        "w_zeros": None,
        "w_outer": None,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SCHEME": ((1, 0, False, False, None) if by_row else (128, 128, False, False, None)) if quantized else None,
        "WEIGHT_ON_INPUT": False,
        "PDL": False,
    }
    rows = "x" if stage == "glu" else "h"
    for scale_of in ("w_scale", f"{rows}_scale"):
        if quantized:
            signature[scale_of] = "*fp32:16"
        else:
            constexprs[scale_of] = None
    signature |= {rows: f"*{w_type}:16"}
    if stage == "glu":
        signature |= {
            "h": "*fp32:16" if quantized else "*bf16:16",
            "alpha": "fp32",
            "limit": "fp32",
            "stride_x": "i32:16",
        }
        signature |= {"up_offset": "i32:16", "load_ptr": "*i64:16"}
        signature |= dict.fromkeys(("up_scale_offset", "up_zeros_offset", "up_outer_offset"), "i32")
        constexprs |= {"GLU": CONCAT.value, "ACTIVATION": "silu"}
    else:
        signature["out"] = "*bf16:16"
        constexprs |= {"BLOCK_P": top_k}
    function = _small_glu_kernel if stage == "glu" else _small_down_kernel
    options = {"capability": capability, "num_warps": tile.num_warps, "num_stages": 1}
    kernel = compile_kernel(function, signature, constexprs, **options)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.loads_16_bytes
