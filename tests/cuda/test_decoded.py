"""Products of decoded weights in Gluon on a Hopper GPU, beside those of Triton's tile for the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from moe_ops.backends import triton_plans
from moe_ops.census import kernel_names
from moe_ops.kernels.triton.config import MMConfig
from tests.cuda.specialised import (
    GROUPS,
    ZEROS,
    assert_any_number_of_rows,
    assert_panels_are_written_over,
    assert_replays,
    beside_tritons_tile,
    every_tile,
    run,
)
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build, in_groups

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory")]
SCHEMES = sorted(triton_plans.PACKED)
ONCE = [scheme for scheme in SCHEMES if scheme != "int4_w4a16"]  # whose sums wait for no scales of groups of columns
ONCE_TILE = MMConfig(128, 256, 64, 8, 8, 3, a_tma=True, w_tma=True)
MANY = 4200  # tokens, whose experts have more than 1024 rows each
#: E, K, H, I: whole tiles; an odd number of steps of both products, and no whole tiles of columns; one expert.
SIZES = {"whole": (8, 2, 1024, 512), "odd": (6, 2, 1152, 640), "ragged": (3, 2, 320, 160), "one": (1, 1, 256, 128)}


#: Rows of experts, whose last ones are less than a tile of 128 or 256, no more than half of one, or a quarter.
ROWS = (0, 1, 63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257, 320, 321, 449)


@pytest.fixture(params=[(128, 128), (256, 128), (128, 256)], ids=["128", "256", "once"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Tiles of so many rows and weight rows, whatever a plan would take; the last ones share decoded weights."""
    with every_tile(MMConfig(*request.param, 64, 8, 8, 3, a_tma=True, w_tma=True), monkeypatch):
        yield request.param


def layer_of(scheme: str, T: int, size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=T, sizes=SIZES[size], device="cuda", bias=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_is_as_near_to_float64_as_tritons_tile(scheme, size, form, tile, monkeypatch):
    """With the same bits where sums are not scaled, beside which a bias may be added in one rounding or in two, and the
    tensor cores' instruction is the same, which adds up in an order of its own: not that of tiles of 32 rows.
    """
    layer = layer_of(scheme, 700, size, form=form)
    kernel = "_decoded_plain_mm" if tile[1] == 256 else "_decoded_mm"
    if scheme not in ONCE:
        kernel = "_decoded_"  # groups of some sizes are whole rows
    for got, other in beside_tritons_tile(layer, kernel, 2, "specialises", monkeypatch):
        assert scheme not in ("mxfp4", "mxfp8") or tile[1] == 256 or torch.equal(other, got)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("T", [200, 1000, 5000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_any_number_of_rows(scheme, T):
    assert_any_number_of_rows(layer_of(scheme, T), *SIZES["whole"][:2])


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_whose_last_rows_are_no_whole_tile(scheme):
    layer = build(scheme, T=sum(ROWS), sizes=(len(ROWS), 1, 1024, 512), device="cuda", bias=True)
    ids = torch.arange(len(ROWS), dtype=torch.int32).repeat_interleave(torch.tensor(ROWS))
    layer.tensors["topk_ids"] = ids[torch.randperm(len(ids))].cuda()[:, None]
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@pytest.mark.parametrize("T", [1000, 4200])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, format, T):
    assert_replays(layer_of(scheme, T), format, SIZES["whole"][0])


@pytest.mark.parametrize("panels", [2, 3])
@pytest.mark.parametrize("scheme", ONCE)
def test_memory_of_panels_is_written_over_again_and_again(scheme, panels, monkeypatch):
    with every_tile(ONCE_TILE, monkeypatch):
        assert_panels_are_written_over(layer_of(scheme, MANY), panels, SIZES["whole"][2], monkeypatch)


@pytest.mark.parametrize("scheme", ONCE)
def test_which_tiles_share_decoded_weights(scheme):
    """Those of experts with many rows, of codes with scales of their own; rows are gathered, not copied before."""
    shares = scheme in triton_plans.SHARED_OF_COLUMNS
    for T, kernel in ((1600, "_decoded_mm"), (MANY, "_decoded_plain_mm" if shares else "_decoded_mm")):
        names = kernel_names(partial(run, layer_of(scheme, T), "grouped"))
        assert sum(kernel in name for name in names) == 2, names
        assert any("_scatter_rows" in name for name in names) == (kernel == "_decoded_mm"), names


@pytest.mark.parametrize("scheme", ONCE)
def test_tokens_of_any_strides(scheme, monkeypatch):
    """Of which a tensor map could describe some, and others not: those are copied."""
    layer = layer_of(scheme, MANY)
    x = layer.tensors["hidden_states"]
    wide = torch.full((MANY, x.shape[1] + 68), float("nan"), device="cuda", dtype=x.dtype)
    with every_tile(ONCE_TILE, monkeypatch):
        expected = run(layer, "grouped")
        for width in (64, 68):
            part = wide[:, : x.shape[1] + width].as_strided(x.shape, (x.shape[1] + width, 1)).copy_(x)
            assert torch.equal(run(layer, "grouped", hidden_states=part), expected)


@GROUPS
@ZEROS
@pytest.mark.parametrize("scheme", ["int4_w4a16", "int8_w8a16"])
def test_groups_of_columns(scheme, zeros, columns):
    layer = in_groups(layer_of(scheme, 700), columns, zeros)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)
