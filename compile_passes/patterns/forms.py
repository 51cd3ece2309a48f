"""The last recogniser: it never matches, it names the MoE forms that no other recogniser reads.

A block that nothing reports is a block that nobody mends. What all forms have in common is looked for: two products
with an activation between them, weights that come straight from the graph's inputs, and a routing value (what a topk,
an argmax, a one-hot or a softmax over the experts gives) that chooses the weights, chooses or weighs the rows before
the first product, or chooses or weighs the results after the second.

    gathered   weight[ids], then einsum, matmul or bmm
    dense      a product with all stacked weights, for every token
    loop       separate weights [N, K] of every expert, on the tokens of a mask or on all of them
    capacity   rows moved to [expert, slot] and back by products with a one-hot
    opaque     a custom operator that takes the experts' weights, or is called after them
    hub        products that are operators of a kernel library, as transformers calls for fine-grained FP8

Each needs more than one expert, so that a plain MLP under a gate is none; attention has no activation between its
products, LoRA none either, ensembles have no routing value, and product keys gather vectors instead of matrices.

One walk in graph order; every node is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from compile_passes.match import Refusal, in_words
from compile_passes.patterns.flow import GATHERS, VIEWS, Evidence, Flow, Pair, Route, rank_of, shape_of
from compile_passes.reading import Reading
from compile_passes.vocabulary import equal_sizes, example

_OWN = ("aten", "prims", "prim", "moe_ops", "transformers", "higher_order", "profiler", "inductor", "c10d")
_MOE_NAME = re.compile(r"moe|expert", re.IGNORECASE)
_HUB_PRODUCT = re.compile(r"matmul_(grouped|batched)$")

_CALL = "moe_ops.fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids)"


def name_forms(
    reading: Reading,
    taken: set[fx.Node],
    known: Mapping[fx.Node, Refusal] | None = None,
    alone: Mapping[fx.Node, Refusal] | None = None,
) -> list[Refusal]:
    """A refusal for every MoE block in a form that is not fused, in graph order, one for each block.

    Args:
        taken: nodes of the blocks that are reported already; a block with a product among them is left out.
        known: what a recogniser says of a second product that may be no MoE block's.
        alone: what is said of products among ``taken`` that have no other one, as far as recognisers read those.
    """
    flow = Flow(reading)
    for node in reading.graph.nodes:
        flow.visit(node)
    hub = _hub(flow)
    found = _stacked(flow, taken, known or {}) + _siblings(flow, taken, known or {}) + [*dict.fromkeys(hub.values())]
    found += _opaque(flow, taken | hub.keys()) + _alone(flow, taken, alone or {})
    return sorted(found, key=lambda refusal: reading.order[refusal.node])


def _stacked(flow: Flow, taken: set[fx.Node], known: Mapping[fx.Node, Refusal]) -> list[Refusal]:
    """Blocks whose products take the stacked weights of all experts, or weights gathered by expert ids."""
    found: dict[fx.Node, Refusal] = {}
    for pair in flow.pairs:
        if pair.up in taken or pair.down in taken or flow.stacked(pair.up) is None or flow.stacked(pair.down) is None:
            continue
        up, down = flow.products[pair.up], flow.products[pair.down]
        if up in flow.gathered and down in flow.gathered:
            changed = _changed(pair.up, flow) or _changed(pair.down, flow)
            found.setdefault(pair.down, changed or _gathered(pair, flow))
            continue
        experts = shape_of(down)[0]
        if up in flow.gathered or down in flow.gathered or not equal_sizes(experts, shape_of(up)[0]):
            continue
        for evidence in flow.evidence(pair):
            if _routes_to(evidence.route, experts):
                refusal = known.get(pair.down) or _dense(pair, evidence)
                if evidence.by == "product" and evidence.before and refusal.node in (pair.up, pair.down):
                    # what is known is only that the rows are no tokens
                    refusal = _capacity(pair) if evidence.route.chosen else _mixed_tokens(pair)
                found.setdefault(evidence.route.source, refusal)
                break
    return list(found.values())


def _siblings(flow: Flow, taken: set[fx.Node], known: Mapping[fx.Node, Refusal]) -> list[Refusal]:
    """Blocks whose experts are separate products with matrices, held together by one router."""
    inner = {pair.up for pair in flow.pairs}
    blocks: dict[fx.Node, dict[fx.Node, Evidence]] = {}
    for pair in flow.pairs:
        if (
            pair.down in inner
            or pair.down in taken
            or any(rank_of(flow.products[end]) != 2 for end in (pair.up, pair.down))
        ):
            continue
        for evidence in flow.evidence(pair):
            blocks.setdefault(evidence.route.source, {}).setdefault(pair.down, evidence)
    named: set[fx.Node] = set()
    found = []
    # Where no norm is between layers, the scores of one seem to weigh the next one's rows, too: the last one's do not.
    for experts in reversed(blocks.values()):
        experts = {down: evidence for down, evidence in experts.items() if down not in named}
        # w[e] is one weight, however often a loop over slots takes it
        roots = {_spelled(root): root for root in (flow.products[down] for down in experts)}
        if not experts or len({str(shape_of(root)) for root in roots.values()}) > 1:
            continue
        first, evidence = next(iter(experts.items()))
        if _routes_to(evidence.route, len(roots)) or (first in known and evidence.route.chosen):
            named.update(experts)
            stacked = rank_of(flow.weight[flow.products[first]]) >= 3
            found.append(known.get(first) or _loop(first, len(roots), evidence, stacked))
    return found


def _hub(flow: Flow) -> dict[fx.Node, Refusal]:
    """Products of quantised stacks by a kernel library: what is said of the last one over the same rows, by each."""
    blocks: dict[tuple[fx.Node, ...], list[fx.Node]] = {}
    for node in flow.operators:
        if _is_custom(node) and _HUB_PRODUCT.search(_qualified(node)):
            places = tuple(operand for operand in flow.reading.values_of(node) if _is_integer(operand))
            blocks.setdefault(places, []).append(node)
    return {
        node: Refusal(
            products[-1],
            f"The experts' products are the operator {_qualified(products[-1])} of a kernel library, which quantises "
            "the rows itself.",
            "Import moe_ops.integrations.transformers and call model.set_experts_implementation('moe_ops'): it runs on "
            "the same bytes and scales. Elsewhere call moe_ops.fused_experts with scheme='fp8_block128'.",
        )
        for products in blocks.values()
        for node in products
    }


def _alone(flow: Flow, taken: set[fx.Node], alone: Mapping[fx.Node, Refusal]) -> list[Refusal]:
    """What is said of ``alone``; where there is another product, what is said of that one."""
    found = dict(alone)
    for pair in flow.pairs:
        for one, other in ((pair.up, pair.down), (pair.down, pair.up)):
            if one in alone and other not in taken:
                found[one] = _changed(other, flow) or _unread(other)
    return list(found.values())


def _unread(product: fx.Node) -> Refusal:
    return Refusal(
        product,
        f"Of the two products of these experts, {in_words(product)} is none that is read: one sum, over the width of "
        "the rows, for every pair of a token and an expert.",
        "Let it give the rows of all pairs, [tokens, top_k, hidden], to weigh and to sum behind it; or call "
        f"{_CALL} in place of both.",
    )


def _is_integer(node: fx.Node) -> bool:
    value = example(node)
    return value is not None and not value.dtype.is_floating_point


def _opaque(flow: Flow, taken: set[fx.Node]) -> list[Refusal]:
    """Custom operators that hide a block."""
    found = []
    for node in flow.operators:
        operands = flow.reading.values_of(node)
        weights = [flow.weight[operand] for operand in operands if operand in flow.weight and rank_of(operand) >= 3]
        routed = any(operand in flow.route for operand in operands)
        hides = routed and len(set(weights)) >= 2 and len({str(shape_of(weight)[0]) for weight in weights}) == 1
        if node not in taken and _is_custom(node) and (hides or _MOE_NAME.search(_qualified(node))):
            found.append(
                Refusal(
                    node,
                    f"The custom operator {_qualified(node)} hides the experts: what it computes is not in the graph.",
                    "Nothing to do if it is a fused kernel that you want. Else call the code inside it directly, so "
                    f"that it is traced, or call {_CALL}.",
                )
            )
    return found


def _gathered(pair: Pair, flow: Flow) -> Refusal:
    ids = flow.gathered[flow.products[pair.down]]
    return Refusal(
        pair.down,
        f"The expert weights are gathered for every routed row, by {in_words(ids)}, and multiplied by a product that "
        "is not fused in this spelling.",
        f"Give the stacked weights to {_CALL}, which reads them in place.",
    )


def _changed(product: fx.Node, flow: Flow) -> Refusal | None:
    """The refusal of a product with gathered weights that are no longer those of the stack."""
    weight = flow.products[product]
    if weight not in flow.gathered:
        return None
    while flow.names[weight] in VIEWS:
        weight = flow.reading.values_of(weight)[0]
    if flow.names[weight] in GATHERS:
        return None
    return Refusal(
        weight,
        f"The expert weights that are gathered for every routed row are changed, by {in_words(weight)}, before they "
        "are multiplied with.",
        "Change the stacked weights, before the gather.",
    )


def _dense(pair: Pair, evidence: Evidence) -> Refusal:
    weighted = evidence.before and evidence.by == "mul"
    return Refusal(
        pair.down,
        "Every token is multiplied by the weights of all experts, and the routing weights pick from the results"
        + (" (here they multiply the input)." if weighted else "."),
        f"Call {_CALL[:-1]}{', weight_on_input=True' if weighted else ''}) with the ids that topk selects: it computes "
        "the selected experts alone.",
    )


def _capacity(pair: Pair) -> Refusal:
    return Refusal(
        pair.down,
        "Rows are moved to their experts by a product with a one-hot or dispatch mask (GShard): it costs tokens x "
        "experts x capacity, and is not fused.",
        f"Call {_CALL} with the ids and weights that make the mask: there is no capacity to exceed, and a pair with "
        "the id -1 is dropped.",
    )


def _mixed_tokens(pair: Pair) -> Refusal:
    return Refusal(
        pair.down,
        "The rows of the experts are mixtures of all tokens (Soft MoE), by scores from which nothing was chosen, by "
        "topk or argmax.",
        "Nothing to do: no token has experts of its own, which is what is fused.",
    )


def _loop(down: fx.Node, experts: int, evidence: Evidence, stacked: bool) -> Refusal:
    if evidence.before and evidence.by == "product":
        how = "on the rows that a product with a one-hot or dispatch mask (GShard) gives it"
    elif evidence.before and evidence.by != "mul":
        how = "on the rows that a mask, an index or a split selects"
    elif evidence.route.chosen:
        how = "on every token, and the router picks from the results"
    else:
        return Refusal(
            down,
            f"{experts} experts run one after the other on every token, and scores from which nothing was chosen, by "
            "topk or argmax, weigh the results: a soft mixture.",
            "Nothing to do where every expert counts for every token. Else choose by topk.",
        )
    cure = f"Replace the loop by one call, {_CALL}."
    if not stacked:
        cure = (
            "Compile with moe_ops.compile(model), which stacks the experts' weights or says what keeps it from that, "
            "or call moe_ops.stack_experts_(model) before an optimizer is made: a loop over stacked weights can be "
            f"fused. Or stack them once, as [E, 2I, H] (gate, then up) and [E, H, I], and r{cure[1:]}"
        )
    return Refusal(down, f"{experts} experts run one after the other, each with its own products, {how}.", cure)


def _spelled(weight: fx.Node) -> str:
    return weight.name if weight.op in ("placeholder", "get_attr") else f"{weight.target}{weight.args}"


def _is_custom(node: fx.Node) -> bool:
    return _qualified(node).split("::")[0] not in _OWN


def _qualified(node: fx.Node) -> str:
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name  # type: ignore[union-attr]
    return str(name)


def _routes_to(route: Route, experts: Any) -> bool:
    """Whether a routing value tells ``experts`` experts apart, and there is more than one."""
    sizes = (route.scored, *shape_of(route.source)[-1:])
    return not equal_sizes(experts, 1) and any(equal_sizes(size, experts) for size in sizes)
