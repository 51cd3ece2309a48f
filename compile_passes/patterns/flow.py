"""What every value of a graph is to an MoE block: a weight, a routing value, the inside of an expert, or none of them.

One walk in graph order. What is kept for a value follows from what is kept for its operands, so that a node is looked
at a bounded number of times. Nothing is proven here: it serves to name forms, not to rewrite them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_passes.reading import Reading
from compile_passes.safety import LIKE
from compile_passes.vocabulary import equal_sizes, example, tensors_of

_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot"})
# The same numbers, or some of them, in another shape: what a weight or a routing value goes through unchanged.
VIEWS = frozenset(
    {"view", "clone", "cast", "transpose", "mt", "t", "permute", "expand", "chunk", "split", "tensor_split", "unbind",
     "slice", "getslice", "narrow", "select", "item", "detach", "movedim", "getattr", "repeat", "einops_rearrange"}
)  # fmt: skip
_ACTIVATIONS = frozenset(
    {"relu", "silu", "gelu", "sigmoid", "tanh", "softplus", "clamp", "pow", "square", "leaky_relu", "elu", "mish",
     "relu6", "hardswish", "hardtanh", "selu", "celu", "glu", "erf", "exp", "softsign", "log_sigmoid", "prelu"}
)  # fmt: skip
_ELEMENTWISE = _ACTIVATIONS | frozenset(
    {"add", "sub", "mul", "div", "addcmul", "neg", "masked_fill", "where", "dropout", "minimum", "maximum", "abs"}
)
# A value that went through one of these is a normalised hidden state, and no longer the inside of an expert.
_NORMALISING = frozenset(
    {"rsqrt", "sqrt", "mean", "var", "norm", "vector_norm", "softmax", "sum", "var_mean", "native_layer_norm"}
)  # fmt: skip
# Choices: their result says by itself that rows go to some experts and not to others.
_CHOICES = frozenset({"topk", "argmax", "max", "sort", "argsort", "one_hot", "multinomial"})
# Scores: routing only where as many values are scored as there are experts.
_SCORES = frozenset({"softmax", "sigmoid", "log_softmax", "gumbel_softmax"})
GATHERS = frozenset({"index", "index_select", "gather", "fancy", "embedding", "take_along_dim", "repeat_interleave"})
_CARRIERS = VIEWS | _ELEMENTWISE
_JOINS = frozenset({"cat", "stack", "sum"})
_WALK = 16
_UPS = 4


@dataclass(frozen=True)
class Route:
    """A routing value: the logits or ids it comes from, the sizes of its last axis, and whether some were chosen."""

    source: fx.Node
    scored: Any
    width: Any
    chosen: bool


@dataclass(frozen=True)
class Pair:
    """Two products with an activation between them."""

    up: fx.Node
    down: fx.Node


@dataclass(frozen=True)
class Evidence:
    """Where a routing value meets the expert: before its first product or after its second, by which operation."""

    route: Route
    before: bool
    by: str


class Flow:
    """What is known of every value after one walk: is it a weight, a routing value, or the inside of an expert."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.weight: dict[fx.Node, fx.Node] = {}
        self.gathered: dict[fx.Node, fx.Node] = {}
        self.route: dict[fx.Node, Route] = {}
        self.mixed: dict[fx.Node, Evidence] = {}
        self.body: dict[fx.Node, tuple[tuple[fx.Node, ...], bool]] = {}
        self.normalised: set[fx.Node] = set()
        self.products: dict[fx.Node, fx.Node] = {}
        self.pairs: list[Pair] = []
        self.operators: list[fx.Node] = []
        self.names: dict[fx.Node, str] = {}
        self.root: dict[fx.Node, fx.Node] = {}
        self._met: dict[fx.Node, Route | None] = {}

    def visit(self, node: fx.Node) -> None:
        """Derive what is known of ``node`` from its operands."""
        if node.op in ("placeholder", "get_attr"):
            if rank_of(node) >= 2:
                self.weight[node] = node
            return
        call = self.reading.call(node)
        if call is None:
            return
        name = self.names[node] = call.name.removeprefix("aten::")
        operands = self.reading.values_of(node)
        if name in LIKE and isinstance(call["x"], fx.Node):
            operands = [call["x"]]
        if name in _CARRIERS and operands:
            self.root[node] = self.root.get(operands[0], operands[0])
        if name in _PRODUCTS:
            held = [call["weight"]] if name == "linear" else operands  # the rows of a layer may be an input, too
            self._product(node, operands, [operand for operand in held if self._is_matrix(operand)])
        else:
            if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
                self.operators.append(node)
            self._weights(node, name, operands)
            self._inside(node, name, operands)
            self._routing(node, name, operands)

    def _product(self, node: fx.Node, operands: list[fx.Node], weights: list[fx.Node]) -> None:
        if weights:
            # of two candidates the parameter (rows of an input may be gathered, too), else the gathered one, else the
            # one with more dimensions, else the second operand
            weight = max(
                weights,
                key=lambda w: (
                    not _is_activation(self.weight[w]), w in self.gathered, rank_of(self.weight[w]), operands.index(w)
                ),
            )  # fmt: skip
            self.products[node] = weight
            rows = [operand for operand in operands if operand is not weight]
            inside = [self.body[row] for row in rows if row in self.body and row not in self.normalised]
            ups = {up for body, active in inside if active for up in body}
            self.pairs += [Pair(up, node) for up in ups]
            self.body[node] = ((node,), False)
        routed = [operand for operand in operands if operand in self.route]
        others = [operand for operand in operands if operand not in self.route]
        if routed and not others:
            self.route[node] = max((self.route[operand] for operand in routed), key=lambda route: route.chosen)
        elif routed and any(operand not in self.weight or _is_activation(operand) for operand in others):
            self.mixed[node] = Evidence(self.route[routed[0]], True, "product")

    def _is_matrix(self, value: fx.Node) -> bool:
        """Whether ``value`` is a weight of at least two dimensions (a bias is none), or a gather of matrices."""
        if value not in self.weight or rank_of(value) < 2:
            return False
        return value not in self.gathered or rank_of(self.weight[value]) >= 3

    def _weights(self, node: fx.Node, name: str, operands: list[fx.Node]) -> None:
        if not operands or (name not in VIEWS and name not in GATHERS and name not in ("mul", "stack", "cat")):
            return
        if name == "embedding":
            operands = operands[::-1]
        source, rest = operands[0], operands[1:]
        if source not in self.weight:
            return
        root = self.weight[source]
        if name in GATHERS:
            if rest and _is_integer(rest[-1]):
                self.weight[node], self.gathered[node] = root, rest[-1]
        elif name in VIEWS or all(operand in self.weight for operand in rest):
            self.weight[node] = root
            if source in self.gathered:
                self.gathered[node] = self.gathered[source]

    def _routing(self, node: fx.Node, name: str, operands: list[fx.Node]) -> None:
        routed = [operand for operand in operands if operand in self.route]
        if not routed:
            self._start_of_routing(node, name, operands)
            if node not in self.route:
                self._carry(node, name, operands)
            return
        route = max((self.route[operand] for operand in routed), key=lambda route: route.chosen)
        if name in _CHOICES and not route.chosen:
            route = replace(route, chosen=True, width=_chosen_width(node, route.width))
        if not any(operand not in self.route and self._is_hidden(operand, route) for operand in operands):
            self.route[node] = route
        elif name not in _PRODUCTS:
            self.mixed[node] = Evidence(route, True, "gather" if name in GATHERS else name)

    def _start_of_routing(self, node: fx.Node, name: str, operands: list[fx.Node]) -> None:
        if name not in _CHOICES | _SCORES or not operands or (name == "max" and example(node) is not None):
            return
        scores = example(operands[0] if name != "one_hot" else node)
        if scores is None or scores.dim() == 0:
            return
        scored = scores.shape[-1]
        self.route[node] = Route(
            self.root.get(operands[0], operands[0]), scored, _chosen_width(node, scored), name in _CHOICES
        )

    def _carry(self, node: fx.Node, name: str, operands: list[fx.Node]) -> None:
        """A row that was chosen or weighed stays so through reshapes and elementwise operations, up to a norm."""
        if node in self.normalised:
            return
        if name in _CARRIERS or name in GATHERS or name in ("cat", "stack"):
            evidence = next((self.mixed[operand] for operand in operands if operand in self.mixed), None)
            if evidence is not None:
                self.mixed[node] = evidence

    def _is_hidden(self, value: fx.Node, route: Route) -> bool:
        """Whether ``value`` is a hidden state beside a routing value, rather than scores, a mask or a constant."""
        tensor, root = example(value), self.root.get(value, value)
        if tensor is None or not tensor.is_floating_point() or tensor.dim() < 2 or root is route.source:
            return False
        if not root.all_input_nodes and root.op not in ("placeholder", "get_attr"):
            return False  # made by zeros, full or the like
        width = tensor.shape[-1]
        return root in self.products or not any(equal_sizes(width, known) for known in (1, route.scored, route.width))

    def _inside(self, node: fx.Node, name: str, operands: list[fx.Node]) -> None:
        if name in _NORMALISING:
            if not _is_integer(node):
                self.normalised.add(node)
            return
        if name not in _CARRIERS:
            return
        if any(operand in self.normalised and operand not in self.route for operand in operands):
            self.normalised.add(node)
            return
        known = [self.body[operand] for operand in operands if operand in self.body]
        ups = tuple(dict.fromkeys(up for body, _ in known for up in body))
        if ups and len(ups) <= _UPS:
            self.body[node] = (ups, name in _ACTIVATIONS or any(active for _, active in known))

    def evidence(self, pair: Pair) -> list[Evidence]:
        """The routing values that meet the expert, those before its first product first."""
        rows = [operand for operand in self.reading.values_of(pair.up) if operand is not self.products[pair.up]]
        found = [self.mixed[row] for row in rows if row in self.mixed]
        inner = [operand for operand in self.reading.values_of(pair.down) if operand in self.mixed]
        found += [Evidence(self.mixed[row].route, False, self.mixed[row].by) for row in inner]
        return found + self._after(pair.down)

    def _after(self, down: fx.Node) -> list[Evidence]:
        seen: set[fx.Node] = set()
        queue = deque([down])
        while queue and len(seen) < _WALK:
            value = queue.popleft()
            seen.add(value)
            for user in self.reading.readers(value):
                name = self.names.get(user, "")
                routed = self._route_met(user)
                if routed is not None:
                    return [Evidence(routed, False, name)]
                if user not in seen and (name in _CARRIERS or name in _JOINS):
                    queue.append(user)
        return []

    def _route_met(self, user: fx.Node) -> Route | None:
        """The first routing value among the operands, of which a stack of all experts' results has many."""
        if user not in self._met:
            routes = (self.route[operand] for operand in self.reading.values_of(user) if operand in self.route)
            self._met[user] = next(routes, None)
        return self._met[user]

    def stacked(self, product: fx.Node) -> fx.Node | None:
        """The stacked weight ``[E, ., .]`` of a product with all experts at once, or with gathered ones."""
        weight = self.products[product]
        root = self.weight[weight]
        return root if rank_of(weight) >= 3 and rank_of(root) >= 2 else None


def _chosen_width(node: fx.Node, otherwise: Any) -> Any:
    """Size of the last axis of what a choice gives: K of a topk."""
    tensors = tensors_of(node)
    return tensors[0].shape[-1] if tensors and tensors[0].dim() else otherwise


def shape_of(value: fx.Node) -> tuple[Any, ...]:
    tensor = example(value)
    return () if tensor is None else tuple(tensor.shape)


def rank_of(value: fx.Node) -> int:
    tensor = example(value)
    return 0 if tensor is None else tensor.dim()


def _is_integer(value: fx.Node) -> bool:
    tensor = example(value)
    return tensor is not None and not tensor.is_floating_point() and tensor.dtype is not torch.bool


def _is_activation(value: fx.Node) -> bool:
    return not isinstance(example(value), torch.nn.Parameter)
