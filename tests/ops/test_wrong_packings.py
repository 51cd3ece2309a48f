"""Twelve ways to store quantised experts wrongly, and the error of each: operator, argument, rule, what was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops

E, H, I, T, K = 4, 64, 96, 3, 2
Given = dict[str, Any]


def layer(scheme: str) -> Given:
    """A layer that is accepted."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(E, n, k, generator=generator) for n, k in ((2 * I, H), (H, I)))
    (gate_up, *gate_up_scales), (down, *down_scales) = (
        moe_ops.quantize_weight(weight, scheme=scheme) for weight in (first, second)
    )
    return {
        "hidden_states": torch.randn(T, H, generator=generator).bfloat16(), "gate_up_proj": gate_up, "down_proj": down,
        "topk_weights": torch.ones(T, K), "topk_ids": torch.zeros(T, K, dtype=torch.int32), "scheme": scheme,
        "gate_up_scales": gate_up_scales, "down_scales": down_scales,
    }  # fmt: skip


def both(change: Callable[[Tensor], Tensor]) -> Callable[[Given], Given]:
    """Of both weights."""
    return lambda given: {name: change(given[name]) for name in ("gate_up_proj", "down_proj")}


def scales(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[Given], Given]:
    """Of the first weight's list."""
    return lambda given: {"gate_up_scales": change(given["gate_up_scales"])}


def unpacked(stored: Tensor) -> Tensor:
    return torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


#: id -> (scheme, how it is stored wrongly, the message).
WRONG: dict[str, tuple[str, Callable[[Given], Given], str]] = {
    "words of int32, as checkpoints pack four bits": (
        "int4_w4a16", both(lambda stored: stored.view(torch.int32)),
        "weights must be torch.uint8 for scheme='int4_w4a16', got torch.int32. Convert the weights or",
    ),
    "one nibble in a byte": (
        "mxfp4", both(unpacked), "gate_up_proj must be [E=4, N=192, H=32], got [4, 192, 64].",
    ),
    "packed along the rows": (
        "mxfp4", both(lambda stored: unpacked(stored)[:, ::2]),
        "gate_up_proj must be [E=4, N=96, H=32], got [4, 96, 64].",
    ),
    "transposed bytes": (
        "int4_w4a16", both(lambda stored: stored.transpose(1, 2)),
        "gate_up_proj must be [E=4, N=32, H=32], got [4, 32, 192].",
    ),
    "blocks of 16 bytes apart, as gpt-oss has them": (
        "mxfp4", both(lambda stored: stored.unflatten(-1, (-1, 16))),
        "gate_up_proj must be [E, N, H], got [4, 192, 2, 16].",
    ),
    "scales transposed": (
        "mxfp4", scales(lambda given: [given[0].transpose(1, 2)]),
        "gate_up_scales[0] must be [E=4, N_groups=192, K_groups=2], got [4, 2, 192].",
    ),
    "groups of another format": (
        "mxfp4", scales(lambda given: [given[0].repeat_interleave(2, 2)]),
        "gate_up_scales[0] must be [E=4, N_groups=192, K_groups=2], got [4, 192, 4].",
    ),
    "exponents as numbers": (
        "mxfp8", scales(lambda given: [given[0].float()]),
        "gate_up_scales[0] must be torch.float8_e8m0fnu or torch.uint8, got torch.float32.",
    ),
    "no second scale": (
        "nvfp4", scales(lambda given: given[:1]),
        "gate_up_scales must be [scale [E, N, ceil(K / 16)], global_scale [E, 1, 1]] for scheme 'nvfp4', got 1 tensors",
    ),
    "scales in another order": (
        "nvfp4", scales(lambda given: given[::-1]), "gate_up_scales[0] must be torch.float8_e4m3fn, got torch.float32.",
    ),
    "groups that do not cover the columns": (
        "int4_w4a16", scales(lambda given: [torch.ones(E, 2 * I, 3)]),
        "gate_up_scales[0] must be [E=4, N=192, G_count], G_count a divisor of K=64, got [4, 192, 3].",
    ),
    "zero points in packed words": (
        "int4_w4a16", scales(lambda given: [*given, torch.zeros(E, 2 * I // 8, 1, dtype=torch.int32)]),
        "gate_up_scales[1] must be torch.uint8 or torch.int8, got torch.int32.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_packing_has_an_error_of_its_own(name: str) -> None:
    scheme, change, message = WRONG[name]
    given = layer(scheme)
    moe_ops.fused_experts(**given)
    with pytest.raises(ValueError) as caught:
        moe_ops.fused_experts(**given | change(given))
    assert re.match(re.escape(f"fused_experts: {message}"), str(caught.value)), str(caught.value)


def test_there_are_twelve() -> None:
    messages = {message for _, _, message in WRONG.values()}
    assert len(WRONG) == len(messages) == 12
