"""Flop formulas, through torch's own counter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from meta.shapes import RULES
from tests.ops.calls import CALLS

T, E, K, H, I = 5, 4, 2, 16, 8
LAYER = 2 * T * K * (2 * I * H + H * I)


def count(function: object, *args: object, **kwargs: object) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(T, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)


def test_experts() -> None:
    weights, ids = moe_ops.fused_topk(torch.randn(T, E), top_k=K)
    assert count(moe_ops.fused_experts, *tensors(), weights, ids) == LAYER


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("scheme", ["fp8_channel", "int4_w4a16", "mxfp4"])
def test_codes_that_share_a_byte_are_counted_each(scheme: str, separate: bool) -> None:
    wide = 4 * H, 4 * I
    weights, ids = moe_ops.fused_topk(torch.randn(T, E), top_k=K)
    shapes = [(wide[1], wide[0])] * 2 if separate else [(2 * wide[1], wide[0])]
    made = [moe_ops.quantize_weight(torch.randn(E, *shape), scheme=scheme) for shape in (*shapes, wide)]
    *first, down = made
    up = {"up_proj": first[1][0]} if separate else {}
    scales = {"gate_up_scales": [scale for one in first for scale in one[1:]], "down_scales": down[1:]}
    x = torch.randn(T, wide[0], dtype=torch.bfloat16)
    counted = count(moe_ops.fused_experts, x, first[0][0], down[0], weights, ids, scheme=scheme, **up, **scales)
    assert counted == 16 * LAYER


def test_moe() -> None:
    x, gate_up, down = tensors()
    assert count(moe_ops.fused_moe, x, torch.randn(T, E), gate_up, down, top_k=K) == LAYER


def test_stages() -> None:
    x, gate_up, _ = tensors()
    offsets = torch.full((E,), T, dtype=torch.int32)
    assert count(moe_ops.grouped_mm_glu, x, gate_up, offsets) == 2 * T * 2 * I * H
    assert count(moe_ops.grouped_mm, x, gate_up, offsets) == 2 * T * 2 * I * H
    batch, counts = torch.randn(E, 3, H), torch.zeros(E, dtype=torch.int32)
    assert count(moe_ops.batched_mm, batch, gate_up, counts) == 2 * E * 3 * 2 * I * H


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen_weights"])
def test_backward(frozen: bool) -> None:
    x, gate_up, down = tensors()
    weights, ids = moe_ops.fused_topk(torch.randn(T, E), top_k=K)
    for tensor in (x,) if frozen else (x, gate_up, down):
        tensor.requires_grad_()
    out = moe_ops.fused_experts(x, gate_up, down, weights, ids)
    first, second = 2 * T * K * 2 * I * H, 2 * T * K * H * I
    wanted = (first + second) * (1 if frozen else 2)
    assert count(out.sum().backward) == wanted


@pytest.mark.parametrize("op", RULES)
def test_every_operator_has_a_formula(op: str) -> None:
    from torch.utils.flop_counter import flop_registry

    assert getattr(torch.ops.moe_ops, op) in flop_registry


def test_formulas_are_there_where_the_counter_was_imported_first() -> None:
    """Of the other order see `test_import_hook.py`."""
    code = "from torch.utils.flop_counter import flop_registry\nimport moe_ops, torch\n"
    code += "print(torch.ops.moe_ops.fused_moe in flop_registry)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "True", result.stderr


def test_moving_operators_count_nothing() -> None:
    call = CALLS["moe_permute-plain"]
    assert count(call.run) == 0
