"""What the tests of the kernels in Gluon share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import moe_ops
from moe_ops.backends import triton_plans
from moe_ops.census import kernel_names
from moe_ops.kernels.triton import launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.ops import LAUNCHERS
from moe_ops.testing import assert_cuda_graph_safe
from tests.ops.scheme_layers import SchemeLayer, assert_contract

#: Columns of a group of scales, and of what zero points are, if there are some.
GROUPS = pytest.mark.parametrize("columns", [32, 64, 128, 256])
ZEROS = pytest.mark.parametrize("zeros", [None, torch.int8, torch.uint8], ids=["scales", "int8", "uint8"])


@contextmanager
def every_tile(tile: MMConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both products by this tile, of decoded weights or of 16 bits, whatever a plan would take."""
    monkeypatch.setattr(triton_plans, "_hopper_tile", lambda *given: tile)
    monkeypatch.setattr(triton_plans, "_tile", lambda *given, **options: (tile, 0.0))
    planned = (triton_plans.plan_for, triton_plans.by_products, triton_plans.tile_for)
    for cached in planned:
        cached.cache_clear()
    yield
    for cached in planned:
        cached.cache_clear()


def run(layer: SchemeLayer, format: str, **given: torch.Tensor) -> torch.Tensor:
    return moe_ops.fused_experts(**{**layer.tensors, **given}, **layer.options, format=format, backend="triton")


def beside_tritons_tile(
    layer: SchemeLayer, kernel: str, launches: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """In both formats the results by a kernel in Gluon, and by Triton's tile where `taken`, a method of ExpertMM, says
    no; both as near to float64 as the scheme's row says, the first one again and again.
    """
    for format in ("grouped", "batched"):
        got = run(layer, format)
        assert_contract(got, layer)
        torch.use_deterministic_algorithms(False)
        names = kernel_names(partial(run, layer, format))
        assert sum(kernel in name for name in names) == launches, names
        assert all(torch.equal(run(layer, format), got) for _ in range(3))  # the last ones from a record
        with monkeypatch.context() as patched:
            patched.setattr(ExpertMM, taken, lambda *of: False)
            # Weights of another dtype: no record of the call above is fired.
            other = run(layer, format, topk_weights=layer.tensors["topk_weights"].double())
        assert_contract(other, layer)
        yield got, other


def assert_any_number_of_rows(layer: SchemeLayer, E: int, K: int) -> None:
    """All tokens to one expert, all to a few, and none to most."""
    T = layer.tensors["topk_ids"].shape[0]
    for spread in (1, 3):
        first = torch.randint(0, spread, (T, 1), device="cuda", dtype=torch.int32)
        layer.tensors["topk_ids"] = torch.cat([first, (first + 1 + torch.randint_like(first, E - K + 1)) % E], dim=1)
        for format in ("grouped", "batched"):
            assert_contract(run(layer, format), layer)


def forget() -> None:
    """The records of calls, which know nothing of what a test has changed."""
    for launcher in LAUNCHERS.values():
        launcher.forget()


def assert_panels_are_written_over(
    layer: SchemeLayer, panels: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits with memory for so few panels of so many columns, again and again."""
    expected = run(layer, "grouped")
    monkeypatch.setattr(launch, "PANEL_BYTES", panels * 256 * columns)
    forget()
    assert torch.equal(run(layer, "grouped"), expected)
    forget()


def assert_replays(layer: SchemeLayer, format: str, E: int) -> None:
    """With changed routing, a replay has the bits of a call."""
    ids = layer.tensors["topk_ids"]
    capacity = ids.shape[0] if format == "batched" else None

    def layer_with(ids: torch.Tensor) -> torch.Tensor:
        given = {**layer.tensors, "topk_ids": ids}
        return moe_ops.fused_experts(**given, **layer.options, format=format, capacity=capacity, backend="triton")

    torch.use_deterministic_algorithms(False)
    two = torch.arange(2, device="cuda", dtype=ids.dtype).expand_as(ids)
    changed = [((ids + 1) % E,), (two.contiguous(),)]
    assert_cuda_graph_safe(layer_with, (ids,), changed=changed, backend=None)
