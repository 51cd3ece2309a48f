"""Blocks whose weights are containers of quantised bytes: what the operator reads of them, or why it does not.

The model's own code computes with the dequantised numbers. The operator computes from the bytes, as their scheme says:
the same products where activations stay as they are, and where the scheme has a format for rows, with rounded rows,
which is what the user asked for by the scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from compile_passes.match import MoEMatch, Product, Refusal, in_words
from compile_passes.vocabulary import example
from meta.schemes import SCHEMES
from moe_ops.integrations import containers
from moe_ops.integrations.containers import Container, Part, Unread

#: The containers of a block by the node of the weight. (Products hold symbolic sizes, which have no hash.)
Containers = Mapping[fx.Node, Container]

_LEAVE = "Leave this layer out by the filter of moe_ops.quantize_, or write it as gate, up and down of all experts."


def read_containers(match: MoEMatch) -> Containers | Refusal:
    """The container of every product's weight; empty where all are plain tensors."""
    found = {node: containers.read(example(node)) for node in (product.weight.node for product in match.products)}
    if not any(found.values()):
        return {}
    for node, container in found.items():
        if isinstance(container, Unread):
            return Refusal(match.down.anchor, f"{in_words(node)} is {container.what}.", container.cure)
    plain = "no scheme (or the graph takes parts of what is quantised)"
    known = {node: container for node, container in found.items() if isinstance(container, Container)}
    schemes = sorted({known[node].scheme if node in known else plain for node in found})
    if len(schemes) > 1:
        return Refusal(
            match.down.anchor, f"The projections of this block are stored in different schemes: {', '.join(schemes)}.",
            "Quantise all of them with one scheme, as stacks of all experts.",
        )  # fmt: skip
    results = [example(node) for node in (match.output, match.combine.total, match.down.anchor)]
    if any(value is not None and value.requires_grad for value in results):
        return Refusal(
            match.down.anchor, "The block's weights are quantised, for which the operators have no gradient, and one "
            "is recorded.", "Run the model under torch.no_grad() or torch.inference_mode(), or train it as it is.",
        )  # fmt: skip
    for product in match.products:
        reason = _problem(match, product, known[product.weight.node])
        if reason is not None:
            said = f"{in_words(product.weight.node)} is quantised, and {reason}."
            return Refusal(product.anchor, said, _LEAVE)
    return known


def _problem(match: MoEMatch, product: Product, container: Container) -> str | None:
    weight = product.weight
    if weight.transposed != container.transposed:
        return "the product contracts the dimension along which each scale has its own row"
    if weight.part is not None or weight.experts is not None:
        return "the block uses a part of it"
    if weight.updates or weight.dtype is not None:
        return "low-rank factors are added to it"
    if product is match.up and match.body.up_first:
        return "its up half stands where the operators expect the gate"
    if match.combine.staged is not None and SCHEMES[container.scheme].has_static(len(container.scales)):
        return "its activations have a static scale, and the model's own code stays between the experts and the combine"
    return None


def list_arguments(match: MoEMatch, found: Containers, take: Callable[[Product, Part], Any]) -> dict[str, Any]:
    """The operator's arguments that say how the bytes are read; ``take``: a part of a product's weight."""
    *firsts, last = [[take(product, part) for part in found[product.weight.node].scales] for product in match.products]
    first = [scale for scales in firsts for scale in scales]
    return {"scheme": found[match.down.weight.node].scheme, "gate_up_scales": first, "down_scales": last}


def nominal_dtype(match: MoEMatch) -> torch.dtype | None:
    """What hidden states are cast to before quantised weights: that of the products."""
    weight = example(match.up.weight.node)
    return match.dtype if match.dtype is not None or weight is None else weight.dtype
