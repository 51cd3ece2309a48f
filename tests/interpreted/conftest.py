"""Fixtures for kernels run by Triton's CPU interpreter."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random data in every run."""
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fill every new uninitialised tensor with NaN, or -77 where there is none; returns "which entries still are"."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **kwargs: fill(new_empty(self, *args, **kwargs)))
    return lambda tensor: tensor.float().isnan() if tensor.is_floating_point() else tensor == -77
