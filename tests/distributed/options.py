"""What layers can be told, and how their experts may be stored, over a group as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import moe_ops
from moe_ops import ep
from tests.distributed.equal import roundings
from tests.distributed.ranks import CROSSING, Check, E, H, I, Layer, Ranks, integers, quantised, random

TOKENS = 5


def _weight_on_input(tokens: int) -> Layer:
    layer = integers(tokens)
    return layer._replace(options={**layer.options, "weight_on_input": True})


def _biases(tokens: int) -> Layer:
    layer, made = integers(tokens), torch.Generator().manual_seed(2)
    sizes = {"gate_up_bias": I, "down_bias": H}
    biases = {name: torch.randint(-3, 4, (E, size), generator=made).float() for name, size in sizes.items()}
    return layer._replace(of_experts=biases)


def _batched(tokens: int) -> Layer:
    layer = integers(tokens)
    return layer._replace(options={**layer.options, "format": "batched"})


def _up_proj(tokens: int) -> Layer:
    layer = integers(tokens)
    return layer._replace(
        of_experts={"up_proj": layer.gate_up.flip(0)}, options={"activation": "relu", "glu_layout": "separate"}
    )


def _activation(tokens: int) -> Layer:
    """gpt-oss's, its halves interleaved."""
    options = {"activation": "swiglu_oai", "glu_layout": "interleaved", "alpha": 1.5, "limit": 2.0}
    return random(tokens)._replace(options=options)


def _three_experts_a_rank(tokens: int) -> Layer:
    return integers(tokens, experts=12 if tokens == 4 * TOKENS else 6)


def _strided(tokens: int) -> Layer:
    """Weights, routing weights and tokens that are views of larger or transposed memory."""
    layer = integers(tokens)
    gate_up, down = (tensor.mT.contiguous().mT for tensor in (layer.gate_up, layer.down))
    x, weights = (torch.stack((tensor, -tensor), -1)[..., 0] for tensor in (layer.x, layer.weights))
    return layer._replace(x=x, weights=weights, ids=layer.ids.T.contiguous().T, gate_up=gate_up, down=down)


def _one_column(tokens: int) -> Layer:
    """Rows, weights and ids of one column, whose strides are those of a row of them."""
    layer = integers(tokens, width=1)
    columns = (tensor[:, :1].T.clone(memory_format=torch.contiguous_format).T for tensor in layer[:3])
    return layer._replace(**dict(zip(("x", "weights", "ids"), columns, strict=True)))


def _int32_ids_bf16_weights(tokens: int) -> Layer:
    layer = integers(tokens)
    return layer._replace(ids=layer.ids.int(), weights=layer.weights.bfloat16())


LAYERS: dict[str, Callable[[int], Layer]] = {
    made.__name__.strip("_"): made
    for made in (
        _weight_on_input, _biases, _batched, _up_proj, _activation, _three_experts_a_rank, _strided,
        _one_column, _int32_ids_bf16_weights,
    )
}  # fmt: skip


def equal(name: str, ranks: Ranks) -> None:
    layer = LAYERS[name](ranks.size * TOKENS)
    want = layer.alone()
    for transport in CROSSING:
        got, want_here = ranks.run(layer, transport), ranks.share(transport, want)
        if name == "activation":
            ranks.close(got, want_here, 1e-6, transport)
        else:
            ranks.same(got, want_here, transport)


def quantised_weight(ranks: Ranks) -> None:
    """Parameters that bring their scales are their parts; rows of weights weighed before travel in bf16."""
    layer = quantised(ranks.size * TOKENS)
    scheme, (first, second) = "fp8_block128", layer.of_experts.values()
    for options in ({}, {"weight_on_input": True}):
        layer = layer._replace(options={"scheme": scheme, **options})
        want, bound = layer.alone(), roundings(layer, ranks.size)
        for transport in CROSSING:
            parts = ((layer.gate_up, first), (layer.down, second))
            weights = (
                moe_ops.QuantizedWeight(*(ranks.held(transport, part) for part in pair), scheme=scheme)
                for pair in parts
            )
            x, routing, ids = (ranks.share(transport, tensor) for tensor in layer[:3])
            got = moe_ops.fused_experts(x, *weights, routing, ids, group=ranks.group, transport=transport, **options)
            ranks.same(got, ranks.run(layer, transport), f"{transport}, {options}, parts")
            shares = (ranks.share(transport, tensor) for tensor in (want, bound))
            ranks.close(got, *shares, f"{transport}, {options}")


def rows_of_a_scheme(ranks: Ranks) -> None:
    """``prepare(scheme=)`` gives rows in the scheme's format, those of `moe_ops.quantize_rows` in rank order."""
    layer = quantised(ranks.size * TOKENS)
    stored, scale = moe_ops.quantize_rows(layer.x, scheme="fp8_block128")
    x, weights, ids = (ranks.share(None, tensor) for tensor in layer[:3])
    prepared = ep.prepare(x, weights, ids, num_experts=E, group=ranks.group, transport="gather", scheme="fp8_block128")
    ranks.same(prepared.rows.view(torch.uint8), stored.view(torch.uint8), "rows")
    ranks.same(prepared.rows_scale, scale, "scales")
    block = E // ranks.size
    local = layer.ids - ranks.rank * block
    ranks.same(prepared.topk_ids, torch.where((local >= 0) & (local < block), local, -1).int(), "ids")


FOUR = ("biases", "batched", "three_experts_a_rank", "strided")
CHECKS = {
    **{f"option-{name}": Check(partial(equal, name), (2, 4) if name in FOUR else (2,)) for name in LAYERS},
    "option-quantized_weight": Check(quantised_weight),
    "option-rows_of_a_scheme": Check(rows_of_a_scheme, (2, 4)),
}
