"""How far a result may be from float64: no further than eager code of the same dtype is, and never off in scale.

A bound on the largest element alone has to leave room for the worst rounding of one element, so it lets every element
be off by as much. Two sums over the whole tensor see that at once: the Euclidean norm of the error, in which
independent roundings average out, and the slope of the result over the exact one, which they leave alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest distance of the slope from 1, whatever the noise of a format: half of the least error that must be seen.
SLOPE = 0.01
#: Luck in the roundings, against the error of eager code: the operators round less often than it does.
SLACK = 1.1
#: Steps of the type that sums are made in (fp64 for fp64, else fp32) which eager code may happen not to be off by.
STEPS_OF_SUM = 16


def norm_error(got: Tensor, exact: Tensor) -> float:
    """``|got - exact| / |exact|`` in Euclidean norms; of zeros, 0 when they are met exactly, else infinite."""
    difference, size = (got.double() - exact.double()).norm().item(), exact.double().norm().item()
    return difference / size if size else 0.0 if difference == 0.0 else float("inf")


def largest_error(got: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest exact element."""
    if exact.numel() == 0:
        return 0.0
    difference, size = (got.double() - exact.double()).abs().max().item(), exact.double().abs().max().item()
    return difference / size if size else 0.0 if difference == 0.0 else float("inf")


def slope_error(got: Tensor, exact: Tensor) -> float:
    """``<got, exact> / <exact, exact> - 1``: by how much the whole tensor is too large."""
    exact = exact.double().flatten()
    return float(got.double().flatten() @ exact / (exact @ exact) - 1) if exact.any() else 0.0


def assert_accurate(
    got: Tensor, exact: Tensor, plain: Tensor, *, dtype: torch.dtype | None = None, what: str = ""
) -> None:
    """`got` is as near to `exact` as `plain`, the result of eager code in `dtype`, is.

    Args:
        got: what is tested.
        exact: the same in float64.
        plain: the same from eager code in `dtype`; for a single rounding, ``exact.to(dtype)``.
        dtype: of the arithmetic; by default that of `got`.
        what: names the tensor in the message.
    """
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(exact.shape)}"
    dtype = dtype or got.dtype
    eps = torch.finfo(dtype).eps
    sums = STEPS_OF_SUM * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rows = (
        ("norm of the error", norm_error(got, exact), SLACK * norm_error(plain, exact) + eps / 4 + sums),
        ("largest error", largest_error(got, exact), 2 * largest_error(plain, exact) + eps + sums),
        ("slope - 1", abs(slope_error(got, exact)), SLOPE),
    )
    for name, error, allowed in rows:
        assert error <= allowed, f"{what} {name}: {error:.2e} > {allowed:.2e}".lstrip()


def assert_rounded(got: Tensor, exact: Tensor, *, what: str = "") -> None:
    """`got` is as near to `exact` as rounding it once to the dtype of `got` is."""
    assert_accurate(got, exact, exact.to(got.dtype), what=what)
