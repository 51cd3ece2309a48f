"""The tolerances themselves: what eager code computes is green, and 2 % more of it (5 % of a gradient) is red."""

from __future__ import annotations

import pytest
import torch

from meta.schemes import SCHEMES
from tests.ops.errors import assert_accurate, largest_error, norm_error, slope_error
from tests.ops.layers import VARIANTS, Layer, dense_formula, plain_result
from tests.ops.test_autograd import TRAINABLE, fused, gradients

LOW = (torch.bfloat16, torch.float16)
RESULTS = [name for name, variant in VARIANTS.items() if variant.T and (variant.dtype in LOW or variant.scheme)]
GRADIENTS = [name for name in TRAINABLE if VARIANTS[name].dtype in LOW]


def results(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    got = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options)
    return got, dense_formula(layer.float64()), plain_result(layer)


def test_every_dtype_below_fp32_is_among_the_cases() -> None:
    assert {VARIANTS[name].scheme or VARIANTS[name].dtype for name in RESULTS} == {
        *LOW,
        *(name for name, row in SCHEMES.items() if row.quantized),
    }
    assert {VARIANTS[name].dtype for name in GRADIENTS} == set(LOW)


@pytest.mark.parametrize("factor", [0.98, 1.02])
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_off_by_two_percent_is_red(name: str, factor: float) -> None:
    got, exact, plain = results(VARIANTS[name].build())
    assert_accurate(got, exact, plain)
    with pytest.raises(AssertionError, match="norm of the error"):
        assert_accurate((got.float() * factor).to(got.dtype), exact, plain)


@pytest.mark.parametrize("factor", [0.95, 1.05])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_off_by_five_percent_is_red(name: str, factor: float) -> None:
    layer = VARIANTS[name].build()
    torch.manual_seed(0)
    grad = torch.randn_like(layer.tensors["hidden_states"])
    got, exact = gradients(layer, fused, grad), gradients(layer.float64(), dense_formula, grad)
    plain = gradients(layer, dense_formula, grad)
    for key, value in exact.items():
        assert_accurate(got[key], value, plain[key], dtype=grad.dtype, what=key)
        with pytest.raises(AssertionError, match=f"{key} norm of the error"):
            assert_accurate(
                (got[key].float() * factor).to(got[key].dtype), value, plain[key], dtype=grad.dtype, what=key
            )


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_a_wrong_scale_is_red_under_the_noise_of_any_format(factor: float) -> None:
    """Noise of 10 %, as four-bit weights have: the norm cannot see 2 % under it, the slope can."""
    exact = torch.randn(64, 256, dtype=torch.float64)
    plain, got = (exact * (1 + 0.1 * torch.randn(64, 256, dtype=torch.float64)) for _ in range(2))
    assert_accurate(got, exact, plain)
    with pytest.raises(AssertionError, match="slope"):
        assert_accurate(got * factor, exact, plain)


def test_one_wrong_element_is_red() -> None:
    exact = torch.randn(512, 512, dtype=torch.float64)
    got = exact.bfloat16()
    got[3, 5] += 0.1
    with pytest.raises(AssertionError, match="largest error"):
        assert_accurate(got, exact, exact.bfloat16())


def test_zeros_must_be_met_exactly() -> None:
    zero = torch.zeros(3, 4)
    assert_accurate(zero, zero.double(), zero)
    with pytest.raises(AssertionError, match="what I say norm"):
        assert_accurate(zero + 1e-30, zero.double(), zero, what="what I say")
    with pytest.raises(AssertionError, match=r"shape \(3, 4\) instead of \(4, 3\)"):
        assert_accurate(zero, zero.double().t(), zero)
    assert_accurate(zero[:0], zero[:0].double(), zero[:0])


def test_nan_is_red() -> None:
    exact = torch.randn(8, 8, dtype=torch.float64)
    got = exact.float()
    got[0, 0] = float("nan")
    with pytest.raises(AssertionError):
        assert_accurate(got, exact, exact.float())


def test_the_measures() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert norm_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert largest_error(torch.tensor([3.0, 5.0]), exact) == pytest.approx(0.25)
    assert slope_error(1.5 * exact, exact) == pytest.approx(0.5)
    assert slope_error(exact + torch.tensor([4.0, -3.0]), exact) == pytest.approx(0.0)
