"""Products of decoded weights in Gluon on a Hopper GPU, beside those of Triton's tile for the same rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ops.backends import triton_plans
from moe_ops.kernels.triton.config import MMConfig
from tests.cuda.specialised import (
    GROUPS,
    ZEROS,
    assert_any_number_of_rows,
    assert_replays,
    beside_tritons_tile,
    every_tile,
    run,
)
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build, in_groups

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory")]
SCHEMES = sorted(triton_plans.PACKED)
#: E, K, H, I: whole tiles; an odd number of steps of both products, and no whole tiles of columns; one expert.
SIZES = {"whole": (8, 2, 1024, 512), "odd": (6, 2, 1152, 640), "ragged": (3, 2, 320, 160), "one": (1, 1, 256, 128)}


@pytest.fixture(params=[64, 128])
def height(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Tiles of so many rows, whatever a plan would take."""
    with every_tile(MMConfig(request.param, 128, 64, 8, 8, 3, a_tma=True, w_tma=True), monkeypatch):
        yield request.param


def layer_of(scheme: str, T: int, size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=T, sizes=SIZES[size], device="cuda", bias=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_as_near_to_float64_as_tritons_tile(scheme, size, form, height, monkeypatch):
    """With the same bits where sums are not scaled, beside which a bias may be added in one rounding or in two, and the
    tensor cores' instruction is the same, which adds up in an order of its own: not that of tiles of 32 rows.
    """
    layer = layer_of(scheme, 700, size, form=form)
    for got, other in beside_tritons_tile(layer, "_decoded_mm", 2, "specialises", monkeypatch):
        assert scheme not in ("mxfp4", "mxfp8") or height == 64 or torch.equal(other, got)


@pytest.mark.usefixtures("height")
@pytest.mark.parametrize("T", [200, 1000, 5000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_any_number_of_rows(scheme, T):
    assert_any_number_of_rows(layer_of(scheme, T), *SIZES["whole"][:2])


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, format):
    assert_replays(layer_of(scheme, 1000), format, SIZES["whole"][0])


@GROUPS
@ZEROS
@pytest.mark.parametrize("scheme", ["int4_w4a16", "int8_w8a16"])
def test_groups_of_columns(scheme, zeros, columns):
    layer = in_groups(layer_of(scheme, 700), columns, zeros)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)
