"""Random layers of quantised experts: sizes, forms, groups, routing and places in memory side by side, as no list of
cases has them. A seed is a layer.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS
from meta.schemes import ANY, SCHEMES
from tests.ops.scheme_layers import FORMS, SchemeLayer, build, further, in_groups

QUANTISED = [name for name, row in SCHEMES.items() if row.quantized]
#: Of results of few elements, whose error chance has a part in.
CONTRACT_OF_FEW = 1.3


def random_layer(seed: int, *, device: str, largest: int, elements: int, tokens: tuple[int, ...]) -> SchemeLayer:
    """Of H and I up to `largest`, at most as many `elements` of a weight of all experts, and one of these numbers of
    tokens.
    """
    pick = random.Random(seed)
    torch.manual_seed(seed)
    row = SCHEMES[pick.choice(QUANTISED)]
    form, unit = pick.choice(FORMS), pick.choice([32, 64, 128])
    E = pick.choice([many for many in (1, 3, 8, 60, 256) if many * unit**2 <= elements])
    sizes = (E, pick.randint(1, min(E, 8)), *(unit * pick.randint(1, largest // unit) for _ in range(2)))
    while E * sizes[2] * sizes[3] > elements:
        sizes = (*sizes[:2], *(max(unit, size // (2 * unit) * unit) for size in sizes[2:]))
    options: dict[str, Any] = {"form": form, "bias": pick.random() < 0.5, "expert_map": pick.random() < 0.25}
    if row.static_rows is not None and form != "separate":
        options["static"] = pick.random() < 0.25
    layer = build(row.name, T=pick.choice(tokens), sizes=sizes, device=device, **options)
    if any(columns == ANY for _, columns in row.scales[0].forms) and form not in ("halves", "separate"):
        zeros = pick.choice([None, torch.int8, torch.uint8]) if any(spec.shift for spec in row.scales) else None
        layer = in_groups(layer, pick.choice([size for size in (32, 64, 128) if unit % size == 0]), zeros)
    ids = layer.tensors["topk_ids"]
    if pick.random() < 0.3:
        ids = ids.masked_fill(torch.rand(ids.shape, device=device) < 0.3, -1)
    tensors = {name: _elsewhere(value, pick) for name, value in layer.tensors.items()}
    chosen = ACTIVATIONS[pick.choice(list(ACTIVATIONS))]
    options = {**layer.options, "activation": chosen.name, "alpha": chosen.alpha, "limit": chosen.limit}
    return replace(layer, tensors={**tensors, "topk_ids": ids}, options=options)


def _elsewhere(value: Any, pick: random.Random) -> Any:
    """The same, one time in four further in memory."""
    if isinstance(value, list):
        return [_elsewhere(one, pick) for one in value]
    if not isinstance(value, Tensor) or pick.random() < 0.75:
        return value
    return further(value, pick.choice([1, 2, 4, 8, 16]))
