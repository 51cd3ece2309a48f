"""An MoE block as a few stages that somebody who never saw a graph can read, before and after.

    router -> top-k -> dispatch -> expert products -> combine          becomes          one operator

A graph is described before the passes change it (`Snapshot`); what a block's operations are for is told from how they
hang together: what leads to the selection, what lies between the expert products, what comes after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from compile_passes.builder import arguments, operator_name
from compile_passes.match import MoEMatch, leaves, location, module_of, source
from compile_passes.vocabulary import example, is_in_place_name, target_name, tensors_of
from moe_ops.graphs import describe, operation

#: The steps of a block, and what else reads a value from inside of it.
ROLES = ("router", "top-k", "dispatch", "experts", "combine", "outside")
_PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "einsum", "grouped_mm", "_grouped_mm", "scaled_grouped_mm"}
)
# What selects experts; the first of these that a block has.
_SELECTIONS = (frozenset({"topk"}), frozenset({"argmax", "max", "one_hot", "sort"}), frozenset({"softmax", "sigmoid"}))
_NEAR = 120
_DEPTH = 6


@dataclass(frozen=True)
class Line:
    """A source line of a block.

    Attributes:
        code, location: its text and place.
        operations: names of the operations that it became.
        shape: shape of what it makes.
        stopped: whether it is where a recogniser stopped.
        times: how often it stands there; experts in a loop run the same lines.
    """

    code: str
    location: str
    operations: tuple[str, ...]
    shape: str
    stopped: bool = False
    times: int = 1


@dataclass(frozen=True)
class Stage:
    """What one part of a block does (one of `ROLES`), by its source lines."""

    role: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Operator:
    """A call of ours: its name, (name, shape) of its tensors, (name, value) of its options, the shape of its result."""

    name: str
    tensors: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    shape: str


@dataclass(frozen=True)
class Diagram:
    """A block before (stages, and its operations one by one) and after; nothing comes after for a refused one."""

    stages: tuple[Stage, ...]
    operations: tuple[str, ...]
    after: tuple[Operator, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the graph holds every part of a block: a selection, two products, and what comes after them."""
        roles = {stage.role: stage.lines for stage in self.stages}
        products = sum(line.times for line in roles.get("experts", ()) if _PRODUCTS.intersection(line.operations))
        return {"top-k", "experts", "combine"} <= set(roles) and products > 1


class Snapshot:
    """What a graph says of its operations, kept while passes change it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op.startswith("call_")]
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.text = {node: describe(node) for node in self.nodes}
        self._modules: dict[fx.Node, str] = {}
        self._operands: dict[fx.Node, list[fx.Node]] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.nodes}
        latest: dict[fx.Node, fx.Node] = {}  # the last write of a tensor, which its later readers read
        for node in self.nodes:
            self._operands[node] = [latest.get(value, value) for value in node.all_input_nodes]
            for value in self._operands[node]:
                self._readers.setdefault(value, []).append(node)
            if _writes(node) and node.all_input_nodes:
                latest[node.all_input_nodes[0]] = node

    def of_match(self, match: MoEMatch, after: tuple[Operator, ...]) -> Diagram:
        """A block that was fused."""
        routing = [*leaves(match.dispatch.ids), *leaves(match.combine.weights)]
        nodes = {*match.region, *self._router(routing)}
        products = {product.anchor for product in match.products} & set(self.order)
        if match.dispatch.form == "loop" or not products:
            products = {node for node in match.region if target_name(node) in _PRODUCTS}
        return self._diagram(nodes, products, routing, None, after)

    def of_refusal(self, stopped: fx.Node) -> Diagram | None:
        """The code around the operation at which a recogniser stopped; None where no expert product is near."""
        near, selections = self._own(self._near(stopped), stopped)
        before = self._reached(selections, self._operands, near)
        products = {node for node in near if target_name(node) in _PRODUCTS and node not in before}
        if not products:
            return None
        router = self._router(selections)
        upstream = self._reached(router, self._operands, near) - router
        related = self._reached(products, self._operands, near) | self._reached(products, self._readers, near)
        nodes = {node for node in near if (node in related or node in router) and node not in upstream}
        return self._diagram(nodes | router | {stopped}, products, None, stopped, ())

    def _diagram(
        self,
        nodes: Collection[fx.Node],
        products: Collection[fx.Node],
        routing: Iterable[fx.Node] | None,
        stopped: fx.Node | None,
        after: tuple[Operator, ...],
    ) -> Diagram:
        ordered = sorted((node for node in nodes if node in self.order), key=self.order.__getitem__)
        above, below = (self._reached(products, edges, ordered) for edges in (self._operands, self._readers))
        selections = self._selections([node for node in ordered if node not in below])
        selected = self._reached(selections, self._readers, ordered)
        router = self._router(selections) - selected
        routed = None if routing is None else self._reached(routing, self._operands, ordered)
        results = self._reached(self._last(products, ordered), self._readers, ordered)
        roles: dict[str, list[fx.Node]] = {role: [] for role in ROLES}
        for node in ordered:
            if node in below:
                role = "experts" if node in above else "combine" if node in results else "outside"
            elif node in selected:
                of_slots = node in routed if routed is not None else self._of_slots(node, selections, roles["top-k"])
                role = "top-k" if of_slots else "dispatch"
            else:
                role = "router" if node in router else "dispatch"
            roles[role].append(node)
        stages = tuple(Stage(role, _lines(found, stopped)) for role, found in roles.items() if found)
        return Diagram(stages, tuple(self.text[node] for node in ordered), after)

    def _of_slots(self, node: fx.Node, selections: Collection[fx.Node], known: Collection[fx.Node]) -> bool:
        """Whether a value made of the selection is still one for each token and slot: not sorted, counted or copied."""
        made = [value for value in self._operands[node] if value in known]
        ranks = {tensor.dim() for tensor in map(example, (node, *made)) if tensor is not None}
        return node in selections or (len(made) > 0 and len(ranks) <= 1)

    def _router(self, selected: Iterable[fx.Node]) -> set[fx.Node]:
        """What computes the selection, back to the product that gives the scores."""
        found: set[fx.Node] = set()
        stack = [node for node in selected if node in self.order]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                if target_name(node) not in _PRODUCTS:
                    stack += [value for value in self._operands[node] if value in self.order]
        return found if any(target_name(node) in _PRODUCTS for node in found) else set(selected) & set(self.order)

    def _selections(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        for names in _SELECTIONS:
            found = [node for node in nodes if target_name(node) in names]
            if found:
                return found
        return []

    def _near(self, node: fx.Node) -> list[fx.Node]:
        """The operations of the module that ``node`` is in, or of the one around it where the router is there."""
        path = module_of(node)
        if not self._modules:
            self._modules.update((other, f"{module_of(other)}.") for other in self.nodes)
        while True:
            inside = [other for other in self.nodes if self._modules[other].startswith(f"{path}." if path else "")]
            if not path or self._selections(inside):
                break
            path = path.rpartition(".")[0]
        middle = next((place for place, other in enumerate(inside) if self.order[other] >= self.order.get(node, 0)), 0)
        return inside[max(0, middle - _NEAR) : middle + _NEAR]

    def _own(self, near: list[fx.Node], stopped: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """The operations before the router of the next block, and the selections of the block of ``stopped``."""
        selections = set(self._selections(near))
        blocks: list[list[fx.Node]] = []
        apart = True  # selections with a product between them are those of two blocks
        for node in near:
            if node in selections:
                blocks += [[]] if apart else []
                blocks[-1].append(node)
            apart = (apart and node not in selections) or target_name(node) in _PRODUCTS
        here = self.order.get(stopped, 0)
        own = max((place for place, block in enumerate(blocks) if self.order[block[0]] <= here), default=0)
        if own + 1 >= len(blocks):
            return near, blocks[own] if blocks else []
        end = min(self.order[node] for node in self._router(blocks[own + 1]))
        return [node for node in near if self.order[node] < max(end, here + 1)], blocks[own]

    def _last(self, products: Collection[fx.Node], within: Iterable[fx.Node]) -> list[fx.Node]:
        """The products that lead to no other one."""
        leading: set[fx.Node] = set()
        for node in reversed(list(within)):
            if any(reader in leading or reader in products for reader in self._readers[node]):
                leading.add(node)
        return [product for product in products if product not in leading]

    def _reached(
        self, start: Iterable[fx.Node], edges: Mapping[fx.Node, list[fx.Node]], within: Iterable[fx.Node]
    ) -> set[fx.Node]:
        """``start``, and all that can be reached from there without leaving ``within``."""
        inside, found, stack = set(within), set[fx.Node](), list(start)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += [other for other in edges.get(node, ()) if other in inside]
        return found


def operators_of(weight: fx.Node, stages: bool = False) -> tuple[Operator, ...]:
    """The calls of ours that a block became: the one that takes ``weight``, or all ``stages`` of the chain that it is
    in, and the router when that is one, too.
    """
    level, calls = [weight], []
    for _ in range(_DEPTH):
        level = [user for node in level for user in node.users if user.op.startswith("call_")]
        calls = [node for node in level if operator_name(node)]
        if calls:
            break
    if not calls:
        return ()
    chain = _chain(calls[0]) if stages else calls[:1]
    routers: dict[fx.Node, None] = {}
    waiting = [value for value in arguments(chain[0]).values() if isinstance(value, fx.Node)]
    for _ in range(_DEPTH):
        routers |= {node: None for node in waiting if operator_name(node) == "fused_topk"}
        waiting = [value for node in waiting if not operator_name(node) for value in node.all_input_nodes[:1]]
    return tuple(_operator(node) for node in (*routers, *chain))


def _chain(stage: fx.Node) -> list[fx.Node]:
    """The calls of ours from `moe_permute` to the `moe_unpermute` of what ``stage`` makes, in graph order."""
    ends, seen = [stage], {stage}
    while ends and operator_name(ends[0]) != "moe_unpermute":
        users = [user for user in ends.pop(0).users if user not in seen and user.op.startswith("call_")]
        seen.update(users)
        ends += users if len(seen) < _NEAR else []
    found, waiting = dict[fx.Node, None](), ends[:1] or [stage]
    while waiting:
        node = waiting.pop()
        name = operator_name(node)
        if node in found or not node.op.startswith("call_") or len(found) > _NEAR:
            continue
        found[node] = None
        rows = [] if name == "moe_permute" else node.all_input_nodes if name is None else [arguments(node)["rows"]]
        waiting += rows
    return [node for node in stage.graph.nodes if node in found and operator_name(node)]


def _operator(node: fx.Node) -> Operator:
    """A call of ours; options that have their defaults are left out."""
    schema = getattr(node.target, "_schema", None)
    defaults = {argument.name: argument.default_value for argument in schema.arguments} if schema is not None else {}
    given = arguments(node)
    tensors = tuple((name, shape_of(value)) for name, value in given.items() if isinstance(value, fx.Node))
    options = tuple(
        (name, str(value))
        for name, value in given.items()
        if isinstance(value, bool | int | float | str) and value != defaults.get(name)
    )
    return Operator(operator_name(node) or "", tensors, options, shape_of(node))


def shape_of(node: fx.Node) -> str:
    """``[12, 32] bfloat16`` of the tensor that a node makes, or of each of several; empty for anything else."""
    return ", ".join(
        f"[{', '.join(map(str, value.shape))}] {str(value.dtype).removeprefix('torch.')}" for value in tensors_of(node)
    )


def _lines(nodes: Iterable[fx.Node], stopped: fx.Node | None) -> tuple[Line, ...]:
    """One entry for every run of operations of one source line, in order; what repeats itself is there once."""
    runs = []
    for (place, code), run in groupby(nodes, key=lambda node: (location(node), source(node))):
        group = list(run)
        names = dict.fromkeys(operation(node).rpartition(".")[2] for node in group)
        shape = next((text for node in reversed(group) if (text := shape_of(node))), "")
        runs.append(Line(code or ", ".join(names), place, tuple(names), shape, stopped in group))
    return tuple(_folded(runs))


def _folded(lines: list[Line]) -> Iterator[Line]:
    """``lines`` with sequences that follow themselves, as those of experts in a loop do, told once."""
    start = 0
    while start < len(lines):
        lengths = range(1, (len(lines) - start) // 2 + 1)
        length = next((n for n in lengths if lines[start : start + n] == lines[start + n : start + 2 * n]), 1)
        period, times = lines[start : start + length], 1
        while lines[start + times * length : start + (times + 1) * length] == period:
            times += 1
        yield from (replace(line, times=times) for line in period)
        start += times * length


def _writes(node: fx.Node) -> bool:
    name = target_name(node)
    return name == "setitem" or is_in_place_name(name)
