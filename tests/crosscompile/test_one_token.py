"""One token's experts in Gluon compile for Hopper, whatever their weights are: nothing spills, nothing waits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.kernels.triton import launch, layer, one_token
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.kernels.triton.one_token import OneToken, _one_token_kernel, _weight_map
from tests.crosscompile.compiling import Compiled, compile_kernel, quantized
from tests.crosscompile.test_packed import TYPES, descriptor

E, K, H, I = 128, 8, 2048, 768
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
CODED = ("fp8_block128", "fp8_channel", "fp8_tensor")
LAYOUTS = ("concat", "interleaved", "none")


def experts(
    scheme: str, layout: str = "concat", *, bias: bool = False, sizes: tuple[int, int] = (H, I)
) -> tuple[ExpertMM, ExpertMM]:
    """Both products of a layer; two experts have the strides of more."""
    hidden, width = sizes
    rows = width if layout == "none" else 2 * width
    quantised = scheme not in PLAIN and SCHEMES[scheme].rows is not None
    dtype, made = PLAIN.get(scheme, torch.bfloat16), []
    for n, k, options in (
        (rows, hidden, {"glu_layout": layout, "activation": "silu", "quantize_output": quantised}),
        (hidden, width, {}),
    ):
        if scheme in PLAIN:
            weight = Operand(torch.empty(2, n, k, dtype=dtype), None, ())
        else:
            stored, scales = quantized(scheme, n, k)
            weight = Operand(stored, SCHEMES[scheme], scales)
        shift = torch.empty(2, n, dtype=torch.bfloat16) if bias else None
        made.append(ExpertMM(weight, dtype, **options, bias=shift))
    return made[0], made[1]


def pointer(tensor: torch.Tensor | None) -> str | None:
    return None if tensor is None else f"*{TYPES[tensor.dtype]}:16"


def one_of(scheme: str, *arguments: Any, top_k: int = K, **options: Any) -> OneToken:
    one = OneToken.of(*experts(scheme, *arguments, **options), top_k, False)
    assert one is not None
    return one


def compile_layer(
    scheme: str, *arguments: Any, counted: bool = False, mapped: int = -1, weights: str = "fp32", **options: Any
) -> Compiled:
    one = one_of(scheme, *arguments, **options)
    names = ("UP_SIZES", "UP_STRIDES", "UP_SCHEME", "DOWN_SIZES", "DOWN_STRIDES", "DOWN_SCHEME")
    constants = dict(zip(names, one.products, strict=True)) | {"LAYER": one.layer(mapped, True, counted)}
    x = torch.float8_e4m3fn if one.quantised else one.down.out_dtype
    kinds = {
        "x": f"*{TYPES[x]}:16", "x_scale": "*fp32:16" if one.quantised else None,
        "up_desc": descriptor(_weight_map(one.up, one.sizes[0])),
        "down_desc": descriptor(_weight_map(one.down, one.sizes[1])),
        "up_scale": pointer(one.up.weight_scale), "up_scale_apart": "i32", "down_scale": pointer(one.down.weight_scale),
        "up_bias": pointer(one.up.bias), "down_bias": pointer(one.down.bias),
        "topk_weights": f"*{weights}:16", "topk_ids": "*i32:16", "expert_map": "*i32:16" if mapped >= 0 else None,
        "h": "*i32:16" if one.quantised else "*i16:16", "out": f"*{TYPES[one.down.out_dtype]}:16",
        "alpha": "fp32", "limit": "fp32", "load_ptr": "*i64:16" if counted else None,
    }  # fmt: skip
    kernel = compile_kernel(
        _one_token_kernel,
        {name: kind for name, kind in kinds.items() if kind is not None},
        {**constants, **{name: None for name, kind in kinds.items() if kind is None}},
        num_warps=8,
        launch_pdl=True,
    )
    assert kernel.shared <= 227 * 1024 and kernel.stack == 0 and not kernel.serialised and not kernel.voted
    return kernel


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    monkeypatch.setattr(one_token, "programs_on", lambda device: 131)


PRODUCTS = {"bf16": "HGMMA.64x{}x16.F32.BF16", "fp16": "HGMMA.64x{}x16.F32"}


def products(kernel: Compiled) -> set[str]:
    return set(re.findall(r"[HQ]GMMA\S+", kernel.sass))


# Weights as they are and weights with scales differ in the loop, and layouts in what is looked up beside it: each with
# every layout. All schemes have two halves behind one another and a bias below.
@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        *((scheme, layout) for scheme in ("bf16", "fp8_block128") for layout in LAYOUTS),
        ("fp16", "concat"),
        ("fp8_channel", "none"),
        ("fp8_tensor", "interleaved"),
    ],
)
def test_compiles(scheme: str, layout: str) -> None:
    """Weights go from shared memory to the tensor cores: no register has any."""
    kernel = compile_layer(scheme, layout)
    assert products(kernel) == {PRODUCTS.get(scheme, "QGMMA.64x{}x32.F32.E4M3.E4M3").format(8)}
    assert "LDSM" not in kernel.sass


@pytest.mark.parametrize("scheme", ["fp16", "fp8_block128", "fp8_channel"])
def test_compiles_with_biases_and_a_map_and_counters(scheme: str) -> None:
    compile_layer(scheme, "interleaved", bias=True, mapped=300, counted=True)


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [("bf16", "fp16"), ("fp16", "bf16"), ("fp8_block128", "bf16"), ("fp8_channel", "fp16"), ("fp8_tensor", "bf16")],
)
def test_compiles_with_routing_weights_of_16_bits(scheme: str, weights: str) -> None:
    compile_layer(scheme, bias=True, weights=weights)


def test_boxes_have_several_slices_where_they_fill_them() -> None:
    """Of 2880 columns 45 slices: three of 48 are no memory's, and GEMM 2 has eight rows a task, to share them out."""
    of_slices = slice(8, 11)  # slices in a step, rows of a task, slices of a box
    wide, whole = one_of("bf16", sizes=(2880, 2880), top_k=4), one_of("bf16")
    assert [(sizes[4], *sizes[of_slices]) for sizes in wide.sizes] == [(48, 8, 16, 8), (48, 16, 8, 16)]
    assert [(sizes[4], *sizes[of_slices]) for sizes in whole.sizes] == [(32, 8, 16, 8), (12, 8, 16, 4)]
    ragged = one_of("fp8_block128", sizes=(2880, 2880), top_k=4)
    assert [(sizes[4], *sizes[of_slices]) for sizes in ragged.sizes] == [(23, 8, 16, 1), (23, 16, 8, 1)]
    kernel = compile_layer("bf16", sizes=(2880, 2880), top_k=4)
    assert products(kernel) == {"HGMMA.64x8x16.F32.BF16", "HGMMA.64x16x16.F32.BF16"}


@pytest.mark.parametrize("scheme", CODED)
def test_numbers_of_e4m3_are_packed_with_others(scheme: str) -> None:
    """Of slices that do not exist, too, whose numbers are alike: see `one_token._unlike`."""
    kernel = compile_layer(scheme, sizes=(640, 384), top_k=2)
    packed = re.findall(r"F2FP\.SATFINITE\.E4M3\.F32\.PACK_AB_MERGE_C (R\d+), \S+, \S+, (R\w+)", kernel.sass)
    assert packed and {before for _, before in packed} <= {"RZ", *(made for made, _ in packed)}


REFUSED = {
    "weights_on_input": lambda up, down: (up, down, K, True),
    "many_bytes": lambda up, down: (*experts("bf16", sizes=(4096, 14336)), K, False),
    "rows_of_fp32": lambda up, down: (replace(up, out_dtype=torch.float32), down, K, False),
    "outputs": lambda up, down: (*experts("bf16", sizes=(2048, 764)), K, False),
    "other_weights": lambda up, down: (up, experts("fp16")[1], K, False),
    "no_rows": lambda up, down: (up, turned(down), K, False),
}


def turned(mm: ExpertMM) -> ExpertMM:
    """With a weight whose columns are contiguous."""
    data = mm.operand.data.transpose(1, 2).contiguous().transpose(1, 2)
    return replace(mm, operand=Operand(data, None, ()))


@pytest.mark.parametrize("case", REFUSED)
def test_other_layers_are_left_to_other_kernels(case: str) -> None:
    up, down = experts("bf16")
    assert OneToken.of(up, down, K, False) is not None
    assert OneToken.of(*REFUSED[case](up, down)) is None


def test_not_among_processes_that_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for another process may hold a multiprocessor that the programs of this one have to have."""
    monkeypatch.setattr(layer, "hopper_with_gluon", lambda device: True)
    made = layer.Layer(*experts("bf16"), "bf16")
    assert made.one_token(1, K) is not None and made.one_token(2, K) is None
    for world, taken in ((1, True), (2, False)):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda world=world: world)
        assert (made.one_token(1, K) is not None) == taken


@pytest.mark.parametrize("scheme", ["int8_channel", "mxfp4", "fp8_w8a16"])
def test_other_codes_are_left_to_other_kernels(scheme: str) -> None:
    assert OneToken.of(*experts(scheme), K, False) is None
