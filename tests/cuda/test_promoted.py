"""Products of e4m3 in Gluon on a Hopper GPU, beside those of Triton's tile for the same rows."""

from __future__ import annotations

import pytest
import torch

from moe_ops.backends import triton_plans
from tests.cuda.specialised import assert_any_number_of_rows, assert_replays, beside_tritons_tile, run
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory")]
SCHEMES = sorted(triton_plans.PROMOTED)
#: E, K, H, I: whole tiles; half a tile of columns at the end, and of a step; less than one; one expert; blocks that run
#: on into the up half, in the first one and in later ones.
SIZES = {
    **{"whole": (8, 2, 1024, 512), "odd": (6, 2, 1216, 640), "small": (3, 2, 192, 128), "one": (1, 1, 256, 128)},
    **{"runs_on": (4, 2, 640, 432), "short": (3, 2, 256, 80)},
}
T = 4200  # more pairs, of whichever K, than tokens are quantised for beside the sort


def layer_of(scheme: str, tokens: int, size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=tokens, sizes=SIZES[size], device="cuda", bias=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_has_the_numbers_of_tritons_tile(scheme, size, form, monkeypatch):
    """Which adds up the same 128 columns at a time. Rows that are quantised as a whole it leaves in fp32, not in fp16:
    some numbers in the middle between two of e4m3 are rounded to the other one.
    """
    layer = layer_of(scheme, T, size, form=form)
    for got, other in beside_tritons_tile(layer, "_promoted_mm", 2, "promotes", monkeypatch):
        of_blocks = scheme == "fp8_block128"
        assert (other.double() - got.double()).norm() <= (1e-3 if of_blocks else 1e-2) * got.double().norm()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_halves_that_are_apart_may_lie_in_any_order(scheme):
    """In one allocation: the up half before the gate, and behind it."""
    layer = layer_of(scheme, T, form="separate")
    gate, up = layer.tensors["gate_up_proj"], layer.tensors["up_proj"]
    for first in (0, 1):
        room = torch.empty(2, *gate.shape, device="cuda", dtype=gate.dtype)
        given = {"gate_up_proj": room[first].copy_(gate), "up_proj": room[1 - first].copy_(up)}
        for format in ("grouped", "batched"):
            assert_contract(run(layer, format, **given), layer)


@pytest.mark.parametrize("tokens", [1000, 5000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_any_number_of_rows(scheme, tokens):
    """Also a group of warps without rows."""
    assert_any_number_of_rows(layer_of(scheme, tokens, "odd"), *SIZES["odd"][:2])


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, format):
    assert_replays(layer_of(scheme, T), format, SIZES["whole"][0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_not_numbers_stay_in_their_rows(scheme):
    layer = layer_of(scheme, T)
    x = layer.tensors["hidden_states"]
    got = run(layer, "grouped")
    broken = run(
        layer, "grouped", hidden_states=torch.where(torch.arange(T, device="cuda")[:, None] == 7, float("nan"), x)
    )
    others = torch.arange(T, device="cuda") != 7
    assert torch.equal(broken[others], got[others]) and broken[7].isnan().all()
