"""One kernel for routing, sorting and quantising a few tokens, against the three kernels that it stands for."""

import pytest
import torch

from meta.routing import ROUTINGS
from meta.schemes import SCHEMES
from moe_ops.kernels.triton import permute
from moe_ops.kernels.triton.act_quant import beside, quantize_rows
from moe_ops.kernels.triton.permute import sort_pairs
from moe_ops.kernels.triton.route import route_few
from moe_ops.kernels.triton.topk import fused_topk, is_few
from tests.ops.nan_cases import POISONS, E, logits_and_bias, routing_options

ROUTING = {"top_k": 4, "routing": "softmax", "renormalize": True, "renorm_eps": 0.0, "num_groups": 1, "topk_groups": 1}
ROUTING |= {"scale": 1.0}
GROUPED = ROUTING | {"routing": "sigmoid_group_top2", "num_groups": 4, "topk_groups": 2, "scale": 2.5}


def assert_quantized(rows, got, scheme):
    q, scale = quantize_rows(rows, SCHEMES[scheme].rows)
    assert torch.equal(got[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(got[1], scale)


def check(T, E, routing, *, H=200, bias=None, expert_map=None, held=None, scheme="bf16", logits=None):
    logits = torch.randn(T, E).bfloat16() if logits is None else logits
    x = torch.randn(T, 2 * H).bfloat16()[:, :H]
    held = E if held is None else held
    routed = route_few(x, logits, bias, held, expert_map, form=SCHEMES[scheme].rows, pdl=False, **routing)
    weights, ids = fused_topk(logits, bias, **routing)
    assert torch.equal(routed.topk_weights.view(torch.int32), weights.view(torch.int32))
    order = (routed.offsets, routed.row_to_pair, routed.pair_to_row)
    for got, want in zip(order, sort_pairs(ids, held, expert_map), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)
    if SCHEMES[scheme].rows is not None:
        assert_quantized(x, (routed.tokens, routed.tokens_scale), scheme)
    else:
        assert routed.tokens is x and routed.tokens_scale is None


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("E", [8, 60, 128])
@pytest.mark.parametrize("T", [1, 2, 3, 8, 15])
def test_equals_the_three_kernels(T, E, scheme, poisoned):
    check(T, E, ROUTING, scheme=scheme)


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_any_number_of_experts_a_token(top_k, poisoned):
    check(7, 24, ROUTING | {"top_k": top_k}, scheme="fp8_block128")


@pytest.mark.parametrize("T", [3, 8])
def test_groups_and_a_bias(T, poisoned):
    check(T, 16, GROUPED, bias=torch.randn(16))


def test_expert_map(poisoned):
    expert_map = torch.full((24,), -1)
    expert_map[torch.randperm(24)[:6]] = torch.arange(6)
    check(5, 24, ROUTING, expert_map=expert_map, held=6, scheme="fp8_block128")


@pytest.mark.parametrize("most", [4096, 8], ids=["in_one_kernel", "in_one_of_its_own"])
@pytest.mark.parametrize("T", [1, 40])
def test_sorting_quantises_beside(T, most, poisoned, monkeypatch):
    monkeypatch.setattr(permute, "COUNT_ALL_PAIRS", most)
    x, ids = torch.randn(T, 400).bfloat16()[:, :200], torch.randint(-1, 12, (T, 4))
    rows = beside(x, SCHEMES["fp8_block128"].rows)
    for got, want in zip(sort_pairs(ids, 12, rows=rows), sort_pairs(ids, 12), strict=True):
        assert torch.equal(got, want)
    assert_quantized(x, (rows.quantized, rows.scale), "fp8_block128")
    assert beside(x, SCHEMES["bf16"].rows) is None
    assert type(rows.programs) is int, "a record writes grids down as numbers"


@pytest.mark.parametrize("poison", ["nan_beside_inf", "nan_bias"])
@pytest.mark.parametrize("routing", [name for name, row in ROUTINGS.items() if row.supports_bias])
def test_nan_and_infinity(routing, poison, poisoned):
    logits, bias = logits_and_bias(POISONS[poison])
    check(5, E, routing_options(routing), bias=bias, logits=logits)


def test_where_it_is_used():
    assert is_few(8, 8, 256) and not is_few(16, 2, 256), "more logits than registers of a program should hold"
    assert is_few(8, 8, 64) and not is_few(9, 8, 64), "more pairs than one program sorts in time"
    assert is_few(32, 2, 8) and not is_few(0, 2, 8)
