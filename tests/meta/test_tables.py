"""Schemes, activations, problems, costs and the GPU table."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from meta import cost
from meta.activations import ACTIVATIONS, join_glu, resolve_activation, split_glu
from meta.arch import ARCHS, TYPICAL, device_arch, lacks, lookup, lookup_gpu
from meta.dims import LETTERS, LayerProblem, common_layout, weight_layout
from meta.formats import CODES, E8M0, exponents
from meta.schemes import SCHEMES, per_element, resolve_scheme
from moe_ops.ops import parse


def problem(
    T: int = 4, scheme: str | None = None, dtype: torch.dtype = torch.bfloat16, **options: object
) -> LayerProblem:
    x, ids = torch.randn(1, 256).to(dtype).expand(T, -1), torch.zeros(1, 2, dtype=torch.int32).expand(T, -1)
    dtype = torch.float8_e4m3fn if scheme else dtype
    width = 256 if options.get("glu_layout") == "none" else 128
    gate_up, down = torch.zeros(8, 256, 256, dtype=dtype), torch.zeros(8, 256, width, dtype=dtype)
    scales = ([torch.ones(8, 2, 2)], [torch.ones(8, 2, 1)]) if scheme else ([], [])
    return parse("fused_experts", x, gate_up, down, ids.float(), ids, *scales, scheme=scheme, **options).problem


#: Of a code in units of its scale: half a step beside a number, as a part of it and at least.
HALF_STEPS = {"e4m3": (2.0**-4, 2.0**-10), "int8": (0.0, 0.5), "int4": (0.0, 0.5), "e2m1": (0.25, 0.25)}


@pytest.mark.parametrize("name", [name for name, row in SCHEMES.items() if row.quantized])
def test_weight_round_trip_is_within_half_a_step(name: str) -> None:
    row = SCHEMES[name]
    weight = torch.randn(2, 200, 320)
    weight[0, :128, :128] *= 1e-3
    stored, scales = row.quantize(weight)
    assert stored.shape == (2, 200, 320 // row.pack) and stored.dtype == row.weight_dtype
    assert all(scale.dtype in spec.dtypes for scale, spec in zip(scales, row.scales, strict=False))
    back, factor = row.dequantize(stored, scales), torch.ones(())
    for spec, scale, form in zip(row.scales, scales, row.groups_of(stored, scales), strict=False):
        factor = factor * per_element(spec.value(scale), form, 200, 320)
    relative, least = HALF_STEPS[row.code.name]
    # Beside it, quotients and products of codes up to 127 are rounded to fp32: up to 2^-16 of a step.
    within = torch.maximum(relative * weight.abs(), least * factor) * (1 + 2.0**-15)
    # Microscaling's power of two may leave a group's largest element up to a step beyond the largest code, which it
    # then is; rounding a scale to bf16 or e4m3 does, too.
    largest = row.code.largest * factor
    assert ((back - weight).abs() <= within + (weight.abs() - largest).clamp(min=0)).all()
    assert (back - weight).norm() <= 0.15 * weight.norm()


def test_a_factor_in_fp64_divides() -> None:
    """Every e4m3 scale by divisors of every size: the IEEE quotient, which a product with fp32 reciprocals is not."""
    row, ones = SCHEMES["nvfp4"], torch.full((4096, 127, 8), 0x22, dtype=torch.uint8)
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(4096, 127).unsqueeze(2)
    divisor = torch.exp2(torch.rand(4096, 1, 1) * 200 - 100)
    quotient = (scale.float() / divisor).expand(-1, -1, 16)
    assert torch.equal(row.dequantize(ones, [scale, divisor.double().reciprocal()]), quotient)
    factor = divisor.reciprocal()
    product = row.dequantize(ones, [scale, factor])
    assert torch.equal(product, (scale.float() * factor).expand(-1, -1, 16)) and not torch.equal(product, quotient)


@pytest.mark.parametrize("name", CODES)
def test_codes_decode_what_they_encode(name: str) -> None:
    code = CODES[name]
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    stored = codes.view(code.dtype)
    value = code.decode(stored)
    real = ~value.isnan()
    assert value.shape == (1, 256 * code.pack)
    again = code.decode(code.encode(value.nan_to_num(0.0)))
    torch.testing.assert_close(again[real], value[real], rtol=0, atol=0)


def test_e2m1_is_the_table_of_the_specification() -> None:
    code = CODES["e2m1"]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    bytes_ = torch.tensor([[low | low + 8 << 4 for low in range(8)]], dtype=torch.uint8)
    wanted = torch.tensor([[sign * value for value in values for sign in (1, -1)]])
    assert torch.equal(code.decode(bytes_), wanted)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -9.0]])
    assert code.decode(code.encode(ties)).tolist() == [[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0]]


@pytest.mark.parametrize("dtype", [torch.uint8, E8M0], ids=["bytes", "e8m0"])
def test_exponents_are_powers_of_two(dtype: torch.dtype) -> None:
    """The least one, which fp32 has as a subnormal number, and NaN too."""
    wanted = torch.exp2(torch.arange(256).double() - 127).float()
    wanted[255] = torch.nan
    got = exponents(torch.arange(256, dtype=torch.uint8).view(dtype))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_zero_point_is_the_code_of_zero() -> None:
    row = SCHEMES["int4_w4a16"]
    stored, scale = torch.tensor([[[0x52, 0xF0]]], dtype=torch.uint8), torch.tensor([[[0.5, 2.0]]])
    assert row.dequantize(stored, [scale]).tolist() == [[[-3.0, -1.5, -16.0, 14.0]]]
    zero = torch.tensor([[[2, 15]]], dtype=torch.uint8)
    assert row.dequantize(stored, [scale, zero]).tolist() == [[[0.0, 1.5, -30.0, 0.0]]]


@pytest.mark.parametrize("shape", [(3, 300), (2, 3, 128), (0, 128), (3, 1)], ids=str)
def test_rows_round_trip_is_within_the_bound(shape: tuple[int, ...]) -> None:
    row, half = SCHEMES["fp8_block128"], 2.0**-4
    rows = torch.randn(shape)
    stored, (scale,) = row.rows.quantize(rows)
    assert stored.is_contiguous() and scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    back = row.rows.dequantize(stored, (scale,))
    steps = scale.repeat_interleave(128, -1)[..., : shape[-1]]
    assert ((back - rows).abs() <= half * rows.abs() + steps * 2**-9).all()


def test_rows_scale_is_the_largest_value_over_448() -> None:
    rows = torch.zeros(1, 256)
    rows[0, 3], rows[0, 200] = -44.8, 0.0
    stored, (scale,) = SCHEMES["fp8_block128"].rows.quantize(rows)
    torch.testing.assert_close(scale, torch.tensor([[0.1, 1e-12 / 448]]))
    assert float(stored[0, 3]) == -448.0


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_rows_are_frozen_and_consistent(name: str) -> None:
    row = SCHEMES[name]
    with pytest.raises(FrozenInstanceError):
        row.code = None
    assert row.quantized == (row.make_scales is not None) == bool(row.source)
    optional = [spec.optional for spec in row.scales]
    assert optional == sorted(optional), "the length of the list says which optional ones are there"
    assert row.quantized or resolve_scheme("op", None, row.weight_dtype) is row


@pytest.mark.parametrize("glu_layout", ["concat", "interleaved", "none"])
def test_glu_layouts_split_and_join(glu_layout: str) -> None:
    hidden = torch.arange(12.0).view(2, 6)
    gate, up = split_glu(hidden, glu_layout)
    assert torch.equal(join_glu(gate, up, glu_layout), hidden)
    firsts = {"concat": [0, 1, 2], "interleaved": [0, 2, 4], "none": [0, 1, 2, 3, 4, 5]}
    assert gate[0].tolist() == firsts[glu_layout]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_options_are_resolved(name: str) -> None:
    row, alpha, limit = resolve_activation("op", name, None, None)
    assert alpha == (row.alpha or 1.0) and limit == (row.limit or float("inf"))
    if row.limit is not None:
        assert resolve_activation("op", name, None, 3.0)[2] == 3.0


def test_weight_layouts() -> None:
    weight = torch.empty(2, 6, 4)
    assert weight_layout(weight) == "nk"
    assert weight_layout(torch.empty(2, 4, 6).transpose(1, 2)) == "kn"
    assert weight_layout(weight[:, :, ::2]) == "strided"
    assert common_layout(weight, torch.empty(2, 4, 6).transpose(1, 2)) == "strided"


def test_problem_reads_the_layer() -> None:
    found = problem(format="batched", capacity=3, expert_map=torch.zeros(9).int())
    assert (found.T, found.E, found.K, found.H, found.I, found.C, found.R) == (4, 8, 2, 256, 128, 3, 8)
    assert (found.scheme, found.arch, found.weight_layout, found.gated) == ("bf16", "cpu", "nk", True)
    assert (
        found.has_expert_map
        and not found.has_bias
        and hash(found) == hash(problem(format="batched", capacity=3, expert_map=torch.zeros(1).int()))
    )
    assert problem().C is None and problem(format="batched").C == 4
    assert problem(glu_layout="none").I == 256


def test_every_dimension_of_a_problem_has_a_letter() -> None:
    assert {"T", "E", "K", "R", "H", "I", "N", "C", "G"} == set(LETTERS)


def test_flops_and_bytes() -> None:
    found = problem()
    assert cost.flops(found) == 2 * 8 * (256 * 256 + 256 * 128)
    expert = 2 * (256 * 256 + 256 * 128)
    assert cost.expert_bytes(found) == expert
    tokens = 2 * 4 * 256 * 2
    assert cost.bytes_moved(found) == pytest.approx(cost.expected_experts(8, 2, 4) * expert + tokens)
    scales = 4 * (2 * 2 + 2 * 1)
    assert cost.expert_bytes(problem(scheme="fp8_block128")) == expert // 2 + scales


@pytest.mark.parametrize(("T", "wanted"), [(0, 0.0), (1, 2.0), (10_000, 8.0)])
def test_expected_experts(T: int, wanted: float) -> None:
    assert cost.expected_experts(8, 2, T) == pytest.approx(wanted)


def test_expected_experts_against_a_simulation() -> None:
    hits = [torch.rand(5, 8).argsort(1)[:, :2].unique().numel() for _ in range(2000)]
    assert cost.expected_experts(8, 2, 5) == pytest.approx(sum(hits) / len(hits), rel=0.02)


def test_roofline_is_memory_then_compute() -> None:
    h200 = lookup("NVIDIA H200")
    small, large = problem(T=1), problem(T=1 << 16)
    assert cost.roofline_us(small, h200) == pytest.approx(cost.bytes_moved(small) / 4.3e6)
    assert cost.roofline_us(large, h200) == pytest.approx(cost.flops(large) / 790e6)


@pytest.mark.parametrize("name", ARCHS)
def test_arch_rows(name: str) -> None:
    row = lookup(f"NVIDIA {name} 80GB")
    assert row is ARCHS[name]
    assert row.ceiling_tflops("bf16") <= row.peak_tflops["bf16"] and row.ceiling_tbps() <= row.dram_tbps
    assert ("fp8" in row.peak_tflops) == (lacks(row.sm, "fp8") is None)
    assert (row.multiprocessors > 0) == (name != "cpu")


@pytest.mark.parametrize(
    ("arch", "feature", "says"),
    [
        ("sm75", "kernels", "needs compute capability 8.0 or later, got sm75"),
        ("sm80", "kernels", None),
        ("sm86", "fp8", "needs compute capability 8.9 or later, got sm86"),
        ("sm89", "fp8", None),
        ("sm89", "tma", "needs compute capability 9.0 or later, got sm89"),
        ("sm90", "tma", None),
        ("sm100", "dependent_launch", None),
        ("cuda", "fp8", None),
        ("cpu", "tma", None),
    ],
)
def test_features_by_compute_capability(arch: str, feature: str, says: str | None) -> None:
    assert lacks(arch, feature) == says


def test_unknown_gpu_lists_the_rows() -> None:
    with pytest.raises(
        ValueError, match=r"name must contain one of \['A100', 'B200', 'H100', 'H200', 'cpu'\], got 'V100'"
    ):
        lookup("V100")


def test_architectures_of_devices() -> None:
    assert device_arch(torch.device("cpu")) == "cpu" and device_arch(torch.device("meta")) == "meta"
    assert device_arch(torch.device("cuda")).startswith(("sm", "cuda"))


def test_the_compute_roof_of_a_scheme_is_the_rate_of_its_products() -> None:
    h200 = lookup("NVIDIA H200")
    large = problem(T=1 << 18, scheme="fp8_block128")
    assert cost.roofline_us(large, h200) == pytest.approx(cost.flops(large) / (1e6 * h200.ceiling_tflops("fp8")))
    wide = problem(T=1 << 18, dtype=torch.float32)
    assert cost.roofline_us(wide, h200) == pytest.approx(cost.flops(wide) / (1e6 * h200.ceiling_tflops("tf32")))


@pytest.mark.parametrize(("of_weight", "wanted"), [(True, 2), (False, 1)], ids=["trained", "frozen"])
@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "separate"])
def test_flops_of_the_backward(of_weight: bool, wanted: int, apart: bool) -> None:
    """Through the first weight, and its gradient: products of one size, twice as many where the halves are apart."""
    flat = SimpleNamespace(
        gate_up_proj=(4, 8, 6), down_proj=(4, 6, 9), topk_weights=(5, 2), up_proj=(4, 8, 6) if apart else None,
        needs=(True, of_weight, of_weight, False, False), grad_output=None,
    )  # fmt: skip
    assert cost.OP_FLOPS["fused_experts_backward"](flat) == 2 * 5 * 2 * 6 * 9
    assert cost.OP_FLOPS["fused_experts_backward_first"](flat) == wanted * (1 + apart) * 2 * 5 * 2 * 8 * 6


@pytest.mark.parametrize(("T", "E", "K", "row_bytes", "expected"), [
    (4096, 128, 8, 5632, 4096),  # fits
    (65536, 128, 8, 5632, 16384),  # Qwen3-30B-A3B: four equal passes
    (65536, 256, 8, 18432, 16384),  # DeepSeek-V3: 512 rows an expert rather than 768 MiB
    (40000, 128, 8, 5632, 13440),  # three, of a multiple of 128 tokens
    (0, 8, 2, 64, 0),
    (5, 8, 0, 64, 128),
])  # fmt: skip
def test_tokens_per_pass(T: int, E: int, K: int, row_bytes: int, expected: int) -> None:
    step = cost.tokens_per_pass(T, E, K, row_bytes)
    assert step >= expected if T == 4096 else step == expected


@pytest.mark.parametrize(
    ("name", "row"),
    [("NVIDIA A100-SXM4-80GB", ARCHS["A100"]), ("another", TYPICAL), ("CPU x86_64", TYPICAL)],
    ids=["known", "unknown", "no_gpu"],
)
def test_launch_heuristics_go_on_without_a_row(name: str, row: object) -> None:
    assert lookup_gpu(name) is row
