"""From a graph to its MoE blocks: run the recognisers from every second expert product and prove the result closed.

No side effects: the graph is only read. Time is linear in the graph: one canonical reading, then bounded local walks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from compile_passes.canonical import Canonical, equal_sizes, size_of
from compile_passes.match import Body, Combine, Dispatch, MoEMatch, Product, Refusal, RoutedCall, Router
from compile_passes.patterns.activation import recognise_body
from compile_passes.patterns.combine import recognise_combine
from compile_passes.patterns.dispatch import ids_within, recognise_dispatch
from compile_passes.patterns.experts import feeding_products, find_products, unpaired
from compile_passes.patterns.router import recognise_router
from compile_passes.vocabulary import example

_ESCAPE_CURE = "Only the routing logits, weights and ids may be used outside of the block."


def recognise(canon: Canonical) -> list[MoEMatch | Refusal]:
    """Every MoE block of the graph, as a match or as the reason why it is none, in graph order."""
    products = find_products(canon)
    found: list[MoEMatch | Refusal] = []
    paired: set[fx.Node] = set()
    for anchor, down in products.items():
        feeding = feeding_products(canon, down, products)
        if feeding:
            paired.update((anchor, *(product.anchor for product in feeding)))
            found.append(_block(canon, down, feeding))
    found.extend(unpaired(product) for anchor, product in products.items() if anchor not in paired)
    return found


def recognise_calls(canon: Canonical) -> list[RoutedCall]:
    """The `fused_experts` calls that the model makes itself (`experts_implementation="moe_ops"`) and their routers.

    A call whose router is not recognised is left as it is: there is nothing to tell the user.
    """
    found: list[RoutedCall] = []
    for node in canon.graph.nodes:
        call = canon.named(node, "moe_ops::fused_experts")
        weight, given = (None, None) if call is None else (example(call["gate_up_proj"]), example(call["topk_ids"]))
        if call is None or weight is None or given is None or call["expert_map"] is not None:
            continue
        dispatch = Dispatch("moe_ops", call["hidden_states"], canon.uncast(call["topk_ids"]), None, given.shape[-1])
        combine = Combine(canon.uncast(call["topk_weights"]), node)
        router = recognise_router(canon, combine.weights, dispatch.ids, dispatch.top_k)
        if isinstance(router, Refusal) or _router_lives(canon, router, dispatch, combine, {node}, weight.shape[0]):
            continue
        found.append(RoutedCall(node, router, combine.weights, dispatch.ids))
    return found


def _block(canon: Canonical, down: Product, feeding: list[Product]) -> MoEMatch | Refusal:
    if len(feeding) > 1:
        return Refusal(
            down.anchor, "Gate and up projections are separate weights.",
            "Store them as one [E, 2I, H] weight (torch.cat((w1, w3), dim=1)), gate first.",
        )  # fmt: skip
    up = feeding[0]
    body = recognise_body(canon, down.rows, [up.result])
    if isinstance(body, Refusal):
        return body
    dispatch = recognise_dispatch(canon, up, down)
    if isinstance(dispatch, Refusal):
        return dispatch
    combine = recognise_combine(canon, dispatch, down)
    if isinstance(combine, Refusal):
        return combine
    return _close(canon, up, down, body[0], dispatch, combine)


def _close(
    canon: Canonical, up: Product, down: Product, body: Body, dispatch: Dispatch, combine: Combine
) -> MoEMatch | Refusal:
    """Add router and region, and prove that nothing outside reads, and nothing overwrites, what the block computes."""
    weight = example(up.weight.node)
    experts = None if weight is None else weight.shape[0]
    if dispatch.perm is None:
        dispatch = replace(dispatch, ids=ids_within(canon, dispatch.ids, experts))
    dispatch = replace(dispatch, ids=canon.uncast(dispatch.ids))
    inputs = {dispatch.hidden, dispatch.ids, combine.weights, up.weight.node, down.weight.node}
    inputs.update(bias for bias in (up.bias, down.bias) if bias is not None)
    region = closure(canon, combine.output, inputs)
    problem = _escape(canon, region, combine.output, inputs) or _overwritten(canon, region, combine.output, inputs)
    if problem is not None:
        return problem
    router = recognise_router(canon, combine.weights, dispatch.ids, dispatch.top_k)
    if isinstance(router, Router):
        router = _router_lives(canon, router, dispatch, combine, region, experts) or router
    return MoEMatch(up, down, body, dispatch, combine, router, tuple(sorted(region, key=canon.order.__getitem__)))


def closure(canon: Canonical, output: fx.Node, inputs: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that compute ``output`` from ``inputs``, writes to their values without a later reader included."""
    stop = set(inputs)
    region: set[fx.Node] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node in region or node in stop or canon.call(node) is None or _is_size(node):
            continue
        region.add(node)
        stack.extend(_operands(canon, node))
        stack.extend(reader for reader in canon.readers(node) if canon.is_writer(reader) and not canon.readers(reader))
    return region


def _is_size(node: fx.Node) -> bool:
    """Whether ``node`` computes a number on the host, which blocks may share freely."""
    return isinstance(size_of(node), int | float | torch.SymInt | torch.SymFloat | torch.Size)


def _operands(canon: Canonical, node: fx.Node) -> list[fx.Node]:
    """The values that ``node`` reads, the raw names of written tensors included."""
    call = canon.call(node)
    values: list[fx.Node] = list(node.all_input_nodes)
    fx.map_arg(tuple(call.args.values()) if call is not None else (), values.append)
    return values


def _escape(canon: Canonical, region: set[fx.Node], output: fx.Node, inputs: set[fx.Node]) -> Refusal | None:
    """A refusal when a node outside of the region uses an interior value."""
    for node in region:
        if node is output or canon.strip(canon.uncast(node)) in inputs:
            continue
        for user in node.users:
            if user not in region:
                return Refusal(
                    node, f"An interior value of the MoE block, {node.name}, is also used by {user.name}.", _ESCAPE_CURE
                )
    return None


def _overwritten(canon: Canonical, region: set[fx.Node], output: fx.Node, inputs: set[fx.Node]) -> Refusal | None:
    """A refusal when the block reads overwritten memory through an alias, or an input is overwritten too early."""
    for node in region:
        hazard = canon.hazards.get(node)
        if hazard is not None:
            return Refusal(
                hazard.writer, f"{hazard.writer.name} overwrites memory that {node.name} reads through another view.",
                "Use the out-of-place form of this operation.",
            )  # fmt: skip
    for value in inputs:
        writer = canon.written_between(value, output)
        if writer is not None:
            return Refusal(
                writer, f"{writer.name} overwrites {value.name} before the MoE block has finished with it.",
                "Use the out-of-place form of this operation, or move it after the block.",
            )  # fmt: skip
    return None


def _router_lives(
    canon: Canonical, router: Router, dispatch: Dispatch, combine: Combine, region: set[fx.Node], experts: object
) -> Refusal | None:
    """A refusal of the router when its own topk would stay alive beside the fused one, or its input changes."""
    logits = example(router.logits)
    if logits is None or not equal_sizes(logits.shape[-1], experts):
        return _router_kept(router.logits, "it does not score the experts of the weights")
    inputs = {router.logits} if router.bias is None else {router.logits, router.bias}
    inside = region | closure(canon, combine.weights, inputs) | closure(canon, dispatch.ids, inputs)
    topk = dispatch.ids.all_input_nodes[0]
    for value in _views(canon, (dispatch.ids, combine.weights, *topk.users)):
        for user in (*value.users, *canon.readers(value)):
            if user not in inside:
                return _router_kept(user, f"{value.name} is also used by {user.name}")
    hazard = next((canon.hazards[node] for node in inside if node in canon.hazards), None)
    if hazard is not None:
        return _router_kept(hazard.writer, f"{hazard.writer.name} overwrites memory that it reads through another view")
    for value in inputs:
        writer = canon.written_between(value, combine.output)
        if writer is not None:
            return _router_kept(writer, f"{writer.name} overwrites its input")
    return None


def _router_kept(node: fx.Node, reason: str) -> Refusal:
    return Refusal(
        node, f"The router stays in the graph: {reason}.", "Nothing to do: the experts are fused all the same."
    )


def _views(canon: Canonical, values: Iterable[fx.Node]) -> list[fx.Node]:
    """``values`` and the nodes that hold the same numbers in another shape or dtype."""
    found: list[fx.Node] = []
    stack = list(values)
    while stack:
        node = stack.pop()
        if node not in found:
            found.append(node)
            stack.extend(r for r in canon.readers(node) if canon.named(r, "view", "cast") is not None)
    return found
