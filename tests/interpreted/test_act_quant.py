"""Activations and the quantise kernels against their eager rows."""

import pytest
import torch

from meta.activations import ACTIVATIONS, resolve_activation, split_glu
from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.kernels.triton.act_quant import quantize_batched, quantize_rows, quantize_sorted
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM

FP8 = SCHEMES["fp8_block128"]
#: One for each format of activations.
SCHEMES_OF_ROWS = ["fp8_block128", "fp8_channel", "int8_channel"]
TILE = MMConfig(16, 64, 16, 2, 4, 2, a_tma=False, w_tma=False)
NAN, INF = float("nan"), float("inf")


def bits(tensor):
    return tensor.view(torch.uint8)


def activated(h, activation, alpha, limit, glu_layout, rows=None, offsets=None):
    """`h` after an activation in the epilogue of a product of zeros, as the bias: row r is that of expert r."""
    count, n = h.shape
    mm = ExpertMM(
        Operand(torch.zeros(count, n, 16, dtype=h.dtype), None), h.dtype, bias=h, glu_layout=glu_layout,
        activation=activation, alpha=alpha, limit=limit,
    )  # fmt: skip
    rows = torch.zeros(count, 16, dtype=h.dtype) if rows is None else rows
    offsets = torch.arange(1, count + 1, dtype=torch.int32) if offsets is None else offsets
    return grouped_mm(rows, mm, offsets, TILE, num_rows=rows.shape[0])[0]


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Every activation in every layout, each with every dtype: every pair of values, not every three.
EPILOGUES = [
    (activation, glu_layout, DTYPES[(one + other) % 3])
    for one, activation in enumerate(ACTIVATIONS)
    for other, glu_layout in enumerate(("concat", "interleaved", "none"))
]


@pytest.mark.parametrize(("activation", "glu_layout", "dtype"), EPILOGUES, ids=str)
def test_the_activation_equals_the_eager_one(activation, glu_layout, dtype, poisoned):
    row, alpha, limit = resolve_activation("test", activation, None, None)
    h = (6 * torch.randn(7, 200)).to(dtype)[:, : 100 if glu_layout == "none" else 200]
    out = activated(h, activation, alpha, limit, glu_layout)
    expected = row.eager(*split_glu(h.double(), glu_layout), alpha, limit)
    assert out.dtype == dtype and out.shape == (7, 100) and out.is_contiguous()
    eps = max(torch.finfo(dtype).eps, 3e-6)
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_survives_every_clamp(activation):
    _, alpha, limit = resolve_activation("test", activation, None, None)
    h = torch.tensor([[NAN, 1.0, 2.0, 3.0], [1.0, 1.0, NAN, 3.0], [100.0, -100.0, 100.0, -100.0]])
    out = activated(h, activation, alpha, limit, "concat")
    assert out[:2].isnan().tolist() == [[True, False], [True, False]]
    assert not out[2].isnan().any()


def test_activated_rows_stop_at_the_last_offset(poisoned):
    h, offsets = torch.randn(3, 32), torch.tensor([2, 2, 5], dtype=torch.int32)
    out = activated(h, "silu", 1.0, INF, "concat", rows=torch.randn(9, 16), offsets=offsets)
    assert not poisoned(out[:5]).any() and poisoned(out[5:]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [128, 384, 200, 72, 1, 5000])
@pytest.mark.parametrize("scheme", SCHEMES_OF_ROWS)
def test_quantize_rows_bit_for_bit(scheme, K, dtype, poisoned):
    form = SCHEMES[scheme].rows
    rows = (torch.randn(9, K) * torch.logspace(-13, 8, 9)[:, None]).to(dtype)
    rows[4] = 0.0
    q, scale = quantize_rows(rows, form)
    expected_q, (expected_scale,) = form.quantize(rows)
    assert q.dtype == form.dtype and q.is_contiguous() and scale.is_contiguous()
    assert torch.equal(scale, expected_scale)
    assert torch.equal(bits(q), bits(expected_q))


def test_quantize_rows_of_any_stride():
    wide = torch.randn(6, 300)
    for rows in (wide[:, 10:210], wide[:, ::2], wide[::2]):
        q, scale = quantize_rows(rows, SCHEMES["fp8_block128"].rows)
        expected_q, (expected_scale,) = FP8.rows.quantize(rows.contiguous())
        assert torch.equal(scale, expected_scale) and torch.equal(bits(q), bits(expected_q))


def test_quantize_rows_many_groups():
    rows = torch.randn(130, 4096).bfloat16()
    q, scale = quantize_rows(rows, SCHEMES["fp8_block128"].rows)
    expected_q, (expected_scale,) = FP8.rows.quantize(rows)
    assert torch.equal(scale, expected_scale) and torch.equal(bits(q), bits(expected_q))


def test_nan_and_infinity_stay_visible():
    rows = torch.randn(3, 128)
    rows[0, 5], rows[1, 7] = NAN, INF
    q, scale = quantize_rows(rows, SCHEMES["fp8_block128"].rows)
    dequantised = FP8.rows.dequantize(q, (scale,))
    assert dequantised[0].isnan().nonzero().tolist() == [[5]]
    assert dequantised[1].isnan().any()
    assert dequantised[2].isfinite().all()


def test_int8_of_ties_goes_to_even():
    q, scale = quantize_rows(torch.tensor([[0.5, 1.5, 2.5, -0.5, -3.5, 126.5, 127.0]]), SCHEMES["int8_channel"].rows)
    assert scale.item() == 1.0 and q.tolist() == [[0, 2, 2, 0, -4, 126, 127]]


@pytest.mark.parametrize("K", [96, 5000])
def test_a_row_of_int8_says_nan_by_its_scale(K):
    rows = torch.randn(3, K)
    rows[0, -1], rows[1, 7] = NAN, INF
    q, scale = quantize_rows(rows, SCHEMES["int8_channel"].rows)
    dequantised = SCHEMES["int8_channel"].rows.dequantize(q, (scale,))
    assert dequantised[:2].isnan().all() and dequantised[2].isfinite().all()


@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_channel"])
def test_quantize_sorted_stops_at_the_last_offset(scheme, poisoned):
    rows, offsets = torch.randn(9, 200), torch.tensor([2, 2, 5], dtype=torch.int32)
    rows[5:] = NAN
    q, scale = quantize_sorted(rows, offsets, SCHEMES[scheme].rows)
    expected_q, (expected_scale,) = SCHEMES[scheme].rows.quantize(rows[:5])
    assert torch.equal(scale[:5], expected_scale) and torch.equal(bits(q[:5]), bits(expected_q))
    assert poisoned(q[5:]).all() and poisoned(scale[5:]).all()


def in_halves(rows):
    """fp32 rows [.., K] as `promoted_mm` leaves them: fp16 in units of 128 columns, the largest of which is 2^14 to
    2^15 of them, and the largest magnitudes; also the numbers that they stand for.
    """
    K = rows.shape[-1]
    groups = torch.nn.functional.pad(rows, (0, -K % 128)).unflatten(-1, (-1, 128))
    largest = groups.abs().nan_to_num(nan=0.0, posinf=INF).amax(-1)
    finite = largest.clamp(2.0**-112, torch.finfo(torch.float32).max)
    unit = (torch.floor(torch.log2(finite.double())) - 14).exp2()[..., None]
    halves = (groups.double() / unit).half()
    return halves.flatten(-2)[..., :K].contiguous(), largest, (halves.double() * unit).flatten(-2)[..., :K]


@pytest.mark.parametrize("K", [768, 72, 200, 5000, 17000])
def test_rows_of_halves_are_quantised_by_their_largest_magnitude(K, poisoned):
    """The scale is that of the rows in fp32, numbers are those of rows rounded to eleven bits."""
    rows = torch.randn(9, K) * torch.logspace(-30, 30, 9)[:, None] * torch.logspace(-6, 0, K)
    rows[4] = 0.0
    halves, largest, stood_for = in_halves(rows)
    assert (stood_for - rows.double()).abs().amax() > 0
    torch.testing.assert_close(stood_for, rows.double(), rtol=2.0**-11, atol=0)
    q, scale = quantize_sorted(halves, torch.tensor([2, 2, 7], dtype=torch.int32), SCHEMES["fp8_channel"].rows, largest)
    assert torch.equal(scale[:7], SCHEMES["fp8_channel"].rows.quantize(rows)[1][0][:7])
    expected = (stood_for.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(bits(q[:7]), bits(expected[:7]))
    assert poisoned(q[7:]).all() and poisoned(scale[7:]).all()


@pytest.mark.parametrize("K", [384, 200])
def test_batches_of_halves_touch_only_counted_rows(K, poisoned):
    batch, counts = torch.randn(3, 70, K), torch.tensor([2, 0, 79], dtype=torch.int32)
    halves, largest, stood_for = in_halves(batch)
    q, scale = quantize_batched(halves, counts, SCHEMES["fp8_channel"].rows, largest)
    expected = (stood_for.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    for e, count in enumerate([2, 0, 70]):
        assert torch.equal(bits(q[e, :count]), bits(expected[e, :count]))
        assert poisoned(scale[e, count:]).all() and poisoned(q[e, count:]).all()


def test_nan_and_infinity_of_halves_stay_visible():
    rows = torch.randn(3, 256)
    rows[0, 5], rows[1, 7] = NAN, INF
    halves, largest, _ = in_halves(rows)
    q, scale = quantize_sorted(halves, torch.tensor([3], dtype=torch.int32), SCHEMES["fp8_channel"].rows, largest)
    dequantised = SCHEMES["fp8_channel"].rows.dequantize(q, (scale,))
    assert dequantised[0].isnan().nonzero().tolist() == [[5]]
    assert dequantised[1].isnan().any() and dequantised[2].isfinite().all()


@pytest.mark.parametrize("C", [4, 70])
@pytest.mark.parametrize("scheme", SCHEMES_OF_ROWS)
def test_quantize_batched_touches_only_counted_rows(scheme, C, poisoned):
    batch = torch.randn(4, C, 200).bfloat16()
    counts = torch.tensor([2, 0, C, C + 9], dtype=torch.int32)
    q, scale = quantize_batched(batch, counts, SCHEMES[scheme].rows)
    expected_q, (expected_scale,) = SCHEMES[scheme].rows.quantize(batch)
    for e, count in enumerate(counts.clamp(max=C).tolist()):
        assert torch.equal(scale[e, :count], expected_scale[e, :count])
        assert torch.equal(bits(q[e, :count]), bits(expected_q[e, :count]))
        assert poisoned(scale[e, count:]).all() and poisoned(q[e, count:]).all()


@pytest.mark.parametrize("shape", [(0, 128), (3, 0)])
def test_nothing_to_quantise(shape):
    q, scale = quantize_rows(torch.randn(shape), SCHEMES["fp8_block128"].rows)
    assert q.shape == shape and scale.shape == (shape[0], -(-shape[1] // 128))
