"""From a graph to its MoE blocks: run the recognisers from every second expert product and prove the result closed.

No side effects: the graph is only read. Time is linear in the graph: one reading, then bounded local walks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compile_passes.equal import narrower
from compile_passes.match import (
    KEEP,
    Body,
    Combine,
    Dispatch,
    MoEMatch,
    Product,
    Refusal,
    RoutedCall,
    Router,
    in_words,
    leaves,
)
from compile_passes.patterns.activation import of_rows_and_bias, recognise_body
from compile_passes.patterns.capacity import recognise_capacity
from compile_passes.patterns.chains import Expert, find_siblings
from compile_passes.patterns.dense import recognise_dense
from compile_passes.patterns.experts import feeding_products, find_products, unpaired
from compile_passes.patterns.forms import name_forms
from compile_passes.patterns.ids import are_in_range, are_not_negative, exact_ids, ids_within
from compile_passes.patterns.low_rank import without_updates
from compile_passes.patterns.routed import narrowest, routed_rows
from compile_passes.patterns.router import kept, recognise_router
from compile_passes.patterns.selection import integer_weights
from compile_passes.patterns.siblings import recognise_loop
from compile_passes.reading import Reading
from compile_passes.safety import (
    CREATES,
    Pairs,
    changed_memory,
    different_gradient,
    different_scope,
    spoiled,
    unknown_tensors,
)
from compile_passes.vocabulary import example, size_of

_ESCAPE_CURE = "Only the routing logits, weights and ids may be used outside of the block."


def recognise(reading: Reading) -> list[MoEMatch | Refusal]:
    """Every MoE block of the graph, as a match or as the reason why it is none, in graph order."""
    products = find_products(reading)
    found: list[MoEMatch | Refusal] = []
    paired: set[fx.Node] = set()
    guesses: dict[fx.Node, Refusal] = {}
    refused: dict[fx.Node, Refusal] = {}
    for anchor, down in products.items():
        feeding = feeding_products(reading, down, products)
        outcome = _block(reading, down, feeding) if feeding else None
        if isinstance(outcome, Refusal) and down.spread is None:
            middle = next((product.anchor for product in feeding if product.anchor in refused), None)
            if middle is not None:
                found.remove(refused.pop(middle))
                outcome = _deeper(down)
            refused[anchor] = outcome
        if isinstance(outcome, Refusal) and down.spread is not None:
            guesses[anchor] = outcome  # attention and ensembles are pairs of such products, too
        elif outcome is not None:
            paired.update((anchor, *(product.anchor for product in feeding)))
            found.append(outcome)
    # Where no norm is between layers, the second product of one and the first one of the next look like a block, too.
    inner = {product.anchor for match in found if isinstance(match, MoEMatch) for product in match.products}
    found = [row for row in found if not any(row is refused.get(anchor) for anchor in inner)]
    siblings = find_siblings(reading)
    seconds = {expert.down.anchor for loops in siblings for loop in loops for expert in loop}
    for loops in siblings:
        first = loops[0][0]
        deeper = _deeper(first.down) if any(up.anchor in seconds for up in first.ups) else None
        for loop, downs in _loop_blocks(reading, loops):
            if isinstance(loop, Refusal):
                guesses.update(dict.fromkeys(downs, deeper or loop))
            else:
                paired.update(downs)
                found.append(loop)
    routed = {anchor for anchor, product in products.items() if product.spread is None}
    alone = {anchor: unpaired(product) for anchor, product in products.items() if anchor in routed - paired}
    found.extend(name_forms(reading, routed | paired, guesses, alone))
    return found


def _deeper(down: Product) -> Refusal:
    """Of a second product whose first one is the second of another: what is said of each alone is of no block."""
    return Refusal(
        down.anchor, "Its experts are more than two projections, one after the other.",
        f"Experts of two projections (gate and up, then down) are fused. {KEEP}",
    )  # fmt: skip


def recognise_calls(reading: Reading) -> list[RoutedCall]:
    """The `fused_experts` calls that the model makes itself (`experts_implementation="moe_ops"`) and their routers.

    A call whose router is not recognised is left as it is: there is nothing to tell the user.
    """
    found: list[RoutedCall] = []
    for node in reading.graph.nodes:
        call = reading.named(node, "moe_ops::fused_experts")
        if call is None or call["expert_map"] is not None:
            continue
        hidden, weight, given = (example(call[name]) for name in ("hidden_states", "gate_up_proj", "topk_ids"))
        if hidden is None or weight is None or given is None or given.dim() != 2:
            continue
        experts, floor = weight.shape[0], narrowest(hidden, weight.dtype)
        ids, weights = exact_ids(reading, call["topk_ids"], experts), reading.uncast(call["topk_weights"], floor)
        router = recognise_router(
            reading, weights, ids, tokens=hidden.shape[0], experts=experts, top_k=given.shape[1], floor=floor
        )
        if isinstance(router, Router) and _router_lives(reading, router, ids, weights, node, {node}) == frozenset():
            found.append(RoutedCall(node, router, weights, ids))
    return found


def symbolic_numbers(reading: Reading, found: Iterable[MoEMatch | Refusal | RoutedCall]) -> list[torch.SymFloat]:
    """Numbers that are symbolic in the arithmetic around the blocks (a clamp limit, a scaling factor).

    No recogniser can compare them with anything; as constants they may make a refused block a match.
    """
    seeds = [row.output if isinstance(row, MoEMatch) else row.node if isinstance(row, Refusal) else row.call
             for row in found]  # fmt: skip
    seeds += [product.weight.node for row in found if isinstance(row, MoEMatch) for product in row.products]
    numbers: list[torch.SymFloat] = []
    seen: set[fx.Node] = set()
    stack = [*seeds, *(reader for seed in seeds for reader in reading.readers(seed))]
    while stack:
        node = stack.pop()
        call = reading.call(node)
        if node in seen or call is None or call.name in ("linear", "matmul", "embedding", "norm"):
            continue
        seen.add(node)
        operands = list(call.args.values())
        numbers += [size for value in operands if isinstance(size := size_of(value), torch.SymFloat)]
        skipped = call["x"] if call.name in ("index", "repeat_interleave") and _is_float(call["x"]) else None
        stack += [value for value in operands if isinstance(value, fx.Node) and value is not skipped]
    return numbers


def _is_float(value: Any) -> bool:
    tensor = example(value)
    return tensor is not None and tensor.dtype.is_floating_point


def _untouched(reading: Reading) -> Refusal | None:
    if reading.reshaper is None:
        return None
    return Refusal(
        reading.reshaper, f"{in_words(reading.reshaper)} changes the shape or the storage of a tensor in place, after "
        "which the graph's own record of it cannot be trusted.", "Use the out-of-place form of this operation.",
    )  # fmt: skip


def _block(reading: Reading, down: Product, feeding: list[Product]) -> MoEMatch | Refusal:
    problem = _untouched(reading)
    if problem is not None:
        return problem
    stacked = example(feeding[0].weight.node)
    if stacked is None:
        return Refusal(down.anchor, "The graph carries no shapes for this block.", "Compile with fake tensors.")
    dtype = narrower(feeding[0].dtype, down.dtype)
    summed = next((product for product in feeding if product.summed), None)
    if summed is not None:
        return Refusal(
            summed.anchor, "The first product of the experts sums the slots of every token.",
            f"Experts whose rows stay apart up to the last product are fused. {KEEP}",
        )  # fmt: skip
    early = next((product for product in feeding if product.weighed is not None), None)
    if early is not None:
        return Refusal(
            early.anchor, "The first product of the experts multiplies by scores as well.",
            "Apply the weights after the experts, or multiply the tokens by them before.",
        )  # fmt: skip
    between = recognise_body(reading, down.rows, [product.result for product in feeding], dtype)
    if isinstance(between, Refusal):
        return between
    ups = [next(product for product in feeding if product.result is source) for source in between.sources]
    unused = [product for product in feeding if product not in ups]
    if unused:
        return Refusal(
            unused[0].anchor, "More expert products than gate and up come before the last one.",
            "Give every expert one product, or gate and up, before the last one.",
        )  # fmt: skip
    if down.spread is None:
        if between.of_rows is not None and down.bias is not None:
            return of_rows_and_bias(between.of_rows)
        found = routed_rows(reading, ups, down, dtype, None if between.of_rows is None else between.of_rows.weights)
    else:
        plain = between.of_rows is None and down.weighed is None
        slots = recognise_capacity(reading, ups, down, dtype) if plain else None
        found = slots or recognise_dense(reading, ups, down, dtype, between.of_rows)
    if isinstance(found, Refusal):
        return found
    dispatch, combine = found
    hidden = example(dispatch.hidden)
    if dispatch.weights is not None and (hidden is None or hidden.dtype != stacked.dtype):
        return Refusal(
            leaves(dispatch.weights)[0], "The routing weights multiply the rows in another dtype than that of the "
            "experts.", "Give the block hidden states in the experts' dtype, or apply the weights after the experts.",
        )  # fmt: skip
    return _close(reading, ups, down, between.body, dispatch, combine, narrowest(hidden, dtype))


def _loop_blocks(
    reading: Reading, loops: list[list[Expert]]
) -> list[tuple[MoEMatch | Refusal, list[fx.Node]]]:  # fmt: skip
    """What the loops over the same weights are, and their second products: one block with a loop for every slot,
    several of these where the code runs the experts again, or one block each.
    """
    count = len(loops)
    for slots in (size for size in range(count, 1, -1) if count % size == 0):
        found: list[tuple[MoEMatch | Refusal, list[fx.Node]]] = []
        for first in range(0, count, slots):
            experts = [expert for loop in loops[first : first + slots] for expert in loop]
            block = _loop_block(reading, experts)
            if isinstance(block, Refusal):
                break
            found.append((block, [expert.down.anchor for expert in experts]))
        else:
            return found
    return [(_loop_block(reading, loop), [expert.down.anchor for expert in loop]) for loop in loops]


def _loop_block(reading: Reading, experts: list[Expert]) -> MoEMatch | Refusal:
    found = _untouched(reading) or recognise_loop(reading, experts)
    if isinstance(found, Refusal):
        return found
    floor = narrowest(example(found.dispatch.hidden), found.down.dtype)
    return _close(reading, found.ups, found.down, found.body, found.dispatch, found.combine, floor)


def _close(
    reading: Reading,
    ups: list[Product],
    down: Product,
    body: Body,
    dispatch: Dispatch,
    combine: Combine,
    floor: torch.dtype,
) -> MoEMatch | Refusal:
    """As `_closed`, with low-rank factors apart from the weights that they are added to, where that can be proved."""
    whole = _closed(reading, ups, down, body, dispatch, combine, floor)
    found = [without_updates(reading, product) for product in (*ups, down)]
    if isinstance(whole, Refusal) or not any(found):
        return whole
    merged = next((row for row in found if isinstance(row, Refusal)), None)
    *firsts, last = (
        row if isinstance(row, Product) else product for row, product in zip(found, (*ups, down), strict=True)
    )
    if (*firsts, last) == (*ups, down):
        return replace(whole, merged=merged)
    apart = _closed(reading, firsts, last, body, dispatch, combine, floor)
    if isinstance(apart, Refusal):
        return replace(whole, merged=apart)
    return replace(apart, merged=merged, whole=whole)


def _closed(
    reading: Reading,
    ups: list[Product],
    down: Product,
    body: Body,
    dispatch: Dispatch,
    combine: Combine,
    floor: torch.dtype,
) -> MoEMatch | Refusal:
    """Add router and region, and prove that nothing outside reads, and nothing overwrites, what the block computes."""
    fixed = down.bias is not None or dispatch.weights is not None or combine.staged is not None
    if body.scale != 1 and fixed:
        return Refusal(
            down.anchor, f"The experts' inner values are multiplied by {body.scale}, which the routing weights cannot "
            "take over: a bias is added, the model's own code runs on the results, or they multiply the input.",
            "Multiply the second projection's weight by it.",
        )  # fmt: skip
    given = combine.weights
    if isinstance(given, fx.Node) and not _is_float(given):
        return integer_weights(given)
    weight, hidden = example(down.weight.node), example(dispatch.hidden)
    experts = None if weight is None else weight.shape[0]
    if isinstance(dispatch.ids, fx.Node):
        ids = _own_ids(reading, dispatch, dispatch.ids, experts)
        if isinstance(ids, Refusal):
            return ids
        dispatch = ids
    if combine.staged is not None and not are_in_range(reading, dispatch.ids, experts):
        return Refusal(
            combine.staged.end, "The model's own code runs on each expert's result, and on rows of ids that cannot be "
            "proved to be in [0, number of experts), for which the operators make no row.",
            "Take the ids from topk over the experts.",
        )  # fmt: skip
    unseen, up_half = kept(combine.output, "it was not looked at"), ups[1] if len(ups) > 1 else None
    match = MoEMatch(ups[0], down, body, dispatch, combine, unseen, (), up_half=up_half)
    region = between = closure(reading, combine.output, match.inputs)
    sizes = {size for product in match.products for size in product.sizes}
    region |= (idle := _idle(reading, region - {combine.output}, sizes))
    for size in sizes & idle:
        region |= closure(reading, size.all_input_nodes[0], match.inputs)
    above = _upstream(reading, region, match.inputs)
    routing = {*leaves(dispatch.ids), *leaves(combine.weights), *combine.unread}
    region = region - above - _read_elsewhere(reading, region - above, routing | above, combine.output)
    problem = (
        unknown_tensors(region, match.inputs, [product.weight.node for product in match.products])
        or different_scope(reading, region)
        or _escape(reading, region, combine.output, match.inputs)
        or spoiled(reading, between)
    )
    if problem is not None:
        return problem
    unsafe = changed_memory(reading, region, match.inputs, combine.output, combine.output)
    if isinstance(unsafe, Refusal):
        return unsafe
    # What stays may cut gradients off, too: the operators read the scores that it is made of, and not it.
    problem = different_gradient(reading, between, match.inputs, combine.output, combine.output)
    if problem is not None:
        return problem
    match = replace(match, region=_ordered(reading, region), apart=unsafe)
    if not isinstance(dispatch.ids, fx.Node):
        return replace(
            match, router=kept(combine.output, "some of its pairs are dropped, or slots are found one by one")
        )
    if not isinstance(combine.weights, fx.Node):
        return replace(match, router=kept(combine.output, "its scores are for all experts"))
    router = recognise_router(
        reading, combine.weights, dispatch.ids, tokens=None if hidden is None else math.prod(hidden.shape[:-1]),
        experts=experts, top_k=dispatch.top_k, floor=floor,
    )  # fmt: skip
    if isinstance(router, Refusal):
        return replace(match, router=router)
    more = _router_lives(reading, router, dispatch.ids, combine.weights, combine.output, region)
    if isinstance(more, Refusal):
        return replace(match, router=more)
    if body.scale != 1 and router.rounded is not None:
        return replace(match, router=kept(combine.output, "its weights are rounded before they are scaled"))
    router = replace(router, scale=router.scale * body.scale)
    return replace(match, router=router, apart=frozenset((*match.apart, *more)))


def _own_ids(reading: Reading, dispatch: Dispatch, ids: fx.Node, experts: Any) -> Dispatch | Refusal:
    """``dispatch`` with its ids as the graph computed them, and with what the operator has to know of them."""
    wrapped = dispatch.form == "batched_mm" and not are_in_range(reading, ids, experts)
    if dispatch.perm is None:
        ids = ids_within(reading, ids, experts)
    elif _may_be_negative(reading, ids, experts):
        return Refusal(
            ids, "The expert ids cannot be proved not to be negative, and a negative one would move every "
            "row to another expert.", "Take them from topk, or clamp them with .clamp(0, num_experts - 1).",
        )  # fmt: skip
    return replace(dispatch, ids=exact_ids(reading, ids, experts), wrapped=wrapped)


def _ordered(reading: Reading, region: set[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(sorted(region, key=reading.order.__getitem__))


def _may_be_negative(reading: Reading, ids: fx.Node, experts: Any) -> bool:
    """Whether the graph itself computes ids that are not proved: ids given to it, or read from a table, are the model's
    data, and the sorted form gives rows of a negative id no meaning that anybody could rely on."""
    call = reading.call(reading.faithful(ids, experts, also=torch.int32))
    return call is not None and call.name != "index" and not are_not_negative(reading, ids)


def closure(reading: Reading, output: fx.Node, inputs: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that compute ``output`` from ``inputs``, writes to their own memory without a later reader included."""
    stop = set(inputs)
    region: set[fx.Node] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node in region or node in stop or reading.call(node) is None or _is_size(node):
            continue
        region.add(node)
        stack.extend(_operands(reading, node))
        stack.extend(reader for reader in reading.readers(node) if _dies_with(reading, reader, region))
    return region


def _upstream(reading: Reading, region: set[fx.Node], inputs: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes of the region that stay, because what the operators read is computed from them."""
    first = min(map(reading.order.__getitem__, region), default=0)
    above: set[fx.Node] = set()
    stack = list(inputs)
    while stack:
        for value in _operands(reading, stack.pop()):
            if value not in above and reading.order[value] >= first:
                above.add(value)
                stack.append(value)
    return above & region


def _read_elsewhere(
    reading: Reading, region: set[fx.Node], routing: set[fx.Node], output: fx.Node
) -> set[fx.Node]:  # fmt: skip
    """The nodes of the region that stay, because somebody else reads what they make of ids and weights alone: counts
    that a load-balancing buffer wants, scores for a loss.
    """
    made: set[fx.Node] = set()
    for node in _ordered(reading, region - {output}):
        if all(value in routing or value in made or _is_size(value) for value in _operands(reading, node)):
            made.add(node)
    stack = [node for node in made if any(reader not in region for reader in reading.readers(node))]
    staying: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in made and node not in staying:
            staying.add(node)
            stack.extend(_operands(reading, node))
    return staying


def _idle(reading: Reading, region: set[fx.Node], sizes: set[fx.Node]) -> set[fx.Node]:
    """The sizes that are asked of what the region computes, and of ``sizes`` those that it reads itself, as far as
    nobody else but checks of them uses them.
    """
    idle = set(sizes)
    stack = [reader for node in (*region, *sizes) for reader in reading.readers(node)]
    while stack:
        node = stack.pop()
        if node not in idle and node not in region and (_is_size(node) or reading.named(node, "item") is not None):
            idle.add(node)
            stack.extend(reading.readers(node))
    while used := {node for node in idle if any(r not in region and r not in idle for r in reading.readers(node))}:
        idle -= used
    return idle


def _dies_with(reading: Reading, writer: fx.Node, region: set[fx.Node]) -> bool:
    """Whether ``writer`` only changes what ``region`` computes, and nobody reads the change."""
    targets = reading.memory.writes.get(writer, ())
    if not targets or reading.readers(writer):
        return False
    return all(name in region or name is writer for target in targets for name in reading.memory.names(target))


def _is_size(node: fx.Node) -> bool:
    """Whether ``node`` computes a number on the host, which blocks may share freely."""
    return isinstance(size_of(node), int | float | torch.SymInt | torch.SymFloat | torch.SymBool | torch.Size)


def _operands(reading: Reading, node: fx.Node) -> list[fx.Node]:
    """The values whose numbers ``node`` reads, the raw names of written tensors included."""
    call = reading.call(node)
    if call is not None and call.name in CREATES:
        return []
    values: list[fx.Node] = list(node.all_input_nodes)
    fx.map_arg(tuple(call.args.values()) if call is not None else (), values.append)
    return values


def _escape(reading: Reading, region: set[fx.Node], output: fx.Node, inputs: frozenset[fx.Node]) -> Refusal | None:
    """A refusal when a node outside of the region reads an interior value."""
    for node in region:
        if node is output or _is_copy_of(reading, node, inputs):
            continue
        for user in reading.readers(node):
            if user not in region:
                return Refusal(
                    node, f"A value inside of the MoE block, {in_words(node)}, is also used by {in_words(user)}.",
                    _ESCAPE_CURE,
                )  # fmt: skip
    return None


def _is_copy_of(reading: Reading, node: fx.Node, inputs: frozenset[fx.Node]) -> bool:
    """Whether ``node`` is an input of the block in another shape or dtype, which anybody may use."""
    while (call := reading.named(node, "view", "clone", "cast")) is not None:
        node = call["x"]
    return node in inputs


def _router_lives(
    reading: Reading, router: Router, ids: fx.Node, weights: fx.Node, output: fx.Node, region: set[fx.Node]
) -> Pairs | Refusal:
    """What `changed_memory` says of the router; a refusal when its own topk would stay alive beside the fused one."""
    inputs = frozenset({router.logits} if router.bias is None else {router.logits, router.bias})
    own = closure(reading, weights, inputs) | closure(reading, ids, inputs)
    inside = region | own
    chosen = reading.named(ids, "item")
    results = chosen["x"].users if chosen is not None else ()
    views = {value: root for root in (ids, weights, *results) for value in _views(reading, root)}
    for value, root in views.items():
        for user in reading.readers(value):
            if user not in inside and user not in views:
                return kept(user, f"{in_words(root)} is also used by {in_words(user)}")
    problem = unknown_tensors(own, inputs) or different_scope(reading, inside)
    if problem is None:
        problem = different_gradient(reading, own, inputs, weights, output)
    if problem is not None:
        return kept(problem.node, problem.reason)
    changed = changed_memory(reading, inside, inputs, output, output)
    return kept(changed.node, changed.reason) if isinstance(changed, Refusal) else changed


def _views(reading: Reading, value: fx.Node) -> list[fx.Node]:
    """``value`` and the nodes that hold the same numbers in another shape or dtype."""
    found: list[fx.Node] = []
    stack = [value]
    while stack:
        node = stack.pop()
        if node not in found:
            found.append(node)
            stack.extend(r for r in reading.readers(node) if reading.named(r, "view", "cast") is not None)
    return found
