"""What recognisers return: the parts of an MoE block as graph nodes, or the reason why there is none."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import fx

from compile_passes.adapters import TWIN
from compile_passes.equal import narrower
from compile_passes.vocabulary import example
from moe_ops.graphs import TORCH, frame, frames, trace_of

#: The end of a cure for what no operator computes: any other function would be another model's.
KEEP = (
    "To keep what is computed, leave it as it is, or call moe_ops.moe_permute, grouped_mm and moe_unpermute around "
    "code of your own."
)
_SCOPES = re.compile(r"_(?:modules|parameters|buffers)_")


@dataclass(frozen=True)
class Refusal:
    """A "no": the node that stopped the recogniser, why, and what the user can do about it."""

    node: fx.Node
    reason: str
    cure: str

    @property
    def location(self) -> str:
        """``file:line in function`` of the user's code, or the node's name when the graph does not know."""
        return location(self.node)

    def __str__(self) -> str:
        return f"{self.location}: {self.reason} {self.cure}"


def location(node: fx.Node) -> str:
    """Innermost source line outside of torch that ``node`` was traced from."""
    file, line, function, _ = frame(trace_of(node))
    return f"{file}:{line} in {function}" if file else f"node {node.name}"


def source(node: fx.Node) -> str:
    """The text of that source line; empty when the graph does not know it."""
    return frame(trace_of(node))[3].strip()


def in_words(node: fx.Node) -> str:
    """``node`` for somebody who knows the model and not the graph: its source line and where that is."""
    if node.op == "output":
        return "what the captured code returns"
    if node.op in ("placeholder", "get_attr"):
        name = node.name.removeprefix("l_").strip("_")  # as Dynamo spells them: l_self_modules_gate_parameters_weight_
        return f"the input {_SCOPES.sub('.', name)}"
    file, line, _, code = frame(trace_of(node))
    return f"`{code.strip()}` ({os.path.basename(file)}:{line})" if code else f"the operation {node.name}"


def functions(node: fx.Node) -> list[tuple[str, str]]:
    """(file, function) of the frames outside of torch that ``node`` was traced in, outermost first."""
    return [(file, function) for file, _, function, _ in frames(trace_of(node)) if not file.startswith(TORCH)]


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that ``node`` was traced in, as in ``named_modules()``; empty when unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(
        r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]", lambda m: "." + next(g for g in m.groups() if g), path
    )
    path = path.replace(f".__dict__.{TWIN}.module", ".base_layer").replace(".__dict__._modules.", ".")
    return path.removeprefix("L.self").removeprefix("L").strip(".")


@dataclass(frozen=True)
class Made:
    """A value that the graph does not hold: ``operator`` of ``args``: nodes, such values, constants, lists of them."""

    operator: torch._ops.OpOverload
    args: tuple[Any, ...]


# A value that the rewritten graph reads.
Value = fx.Node | Made


def everywhere(ids: Value, number: float, dtype: torch.dtype) -> Made:
    """The routing weights of a sum that has none, but for one ``number``: for every one of ``ids``, in ``dtype``."""
    aten = torch.ops.aten
    return Made(aten.full_like.default, (Made(aten.to.dtype, (ids, dtype)), number))


def leaves(value: Value) -> list[fx.Node]:
    """The nodes that ``value`` is, or is made of."""
    if isinstance(value, fx.Node):
        return [value]
    args = [part for arg in value.args for part in (arg if isinstance(arg, list | tuple) else (arg,))]
    return [node for arg in args if isinstance(arg, fx.Node | Made) for node in leaves(arg)]


def dtype_of(value: Value) -> torch.dtype | None:
    """The dtype of ``value``; None where the graph does not say it."""
    if isinstance(value, fx.Node):
        tensor = example(value)
        return None if tensor is None else tensor.dtype
    given = next((arg for arg in value.args if isinstance(arg, torch.dtype)), None)
    parts = [part for arg in value.args for part in (arg if isinstance(arg, list | tuple) else (arg,))]
    found = [dtype_of(part) for part in parts if isinstance(part, fx.Node | Made)]
    known = [dtype for dtype in found if dtype is not None]
    return given or (reduce(torch.promote_types, known) if known else None)


def in_dtype(value: Value, dtype: torch.dtype) -> Value:
    """``value`` in at least ``dtype``: what it is without its casts may be narrower, which would round its products."""
    held = dtype_of(value)
    if held is None or not held.is_floating_point or torch.promote_types(held, dtype) == held:
        return value
    return Made(torch.ops.aten.to.dtype, (value, torch.promote_types(held, dtype)))


@dataclass(frozen=True)
class Part:
    """``length`` entries of a tensor along ``dim``, from ``start`` on; None: entry ``start``, without its dimension."""

    dim: int
    start: int
    length: int | None

    def call(self, value: Any) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
        """The operator that takes it from ``value``, and its arguments."""
        if self.length is None:
            return torch.ops.aten.select.int, (value, self.dim, self.start)
        return torch.ops.aten.slice.Tensor, (value, self.dim, self.start, self.start + self.length, 1)


@dataclass(frozen=True)
class Factor:
    """A stacked factor of a low-rank product: ``node`` with its three dimensions in the order ``dims``."""

    node: fx.Node
    dims: tuple[int, ...]


@dataclass(frozen=True)
class LowRank:
    """``scale * up @ down``, which is added to an expert weight [E, N, K]: ``down`` [E, r, K], ``up`` [E, N, r]."""

    down: Factor
    up: Factor
    scale: float
    rank: int


@dataclass(frozen=True)
class Weight:
    """An expert weight: ``node`` holds ``[E, N, K]``, or ``[E, K, N]`` when ``transposed``.

    ``experts``: how many of them the block has, the first ones; None means all. ``part``: what of ``node`` it is, such
    as its gate half. ``updates``: what the graph adds to ``node``, which is cast to ``dtype``, if that is another.
    """

    node: fx.Node
    transposed: bool
    experts: int | None = None
    part: Part | None = None
    updates: tuple[LowRank, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All that it is made of."""
        return (self.node, *(part.node for update in self.updates for part in (update.down, update.up)))


@dataclass(frozen=True)
class Spread:
    """An order of one row for every token and every expert: how many tokens vary slower than the expert, and faster.

    Tokens are numbered in one order throughout: ``[E, T, .]`` is (1, T), ``[T, E, .]`` is (T, 1).
    """

    before: Any
    after: Any


@dataclass(frozen=True)
class Product:
    """One matrix product of routed rows with their experts' weights, its bias added.

    Attributes:
        anchor: the matrix product itself.
        rows: its row operand ``[R, K]``, or ``[T, slots, K]``.
        weight: the stacked weight of all experts.
        routing_key: what says which expert a row belongs to: the group offsets (grouped), the counts of rows (slices)
            or the ids (batched); the weight itself where all experts take all tokens.
        bias: stacked bias ``[E, N]`` or ``[E, 1, N]``, or None.
        bias_ids: the expert id of every row by which the bias was gathered, or None; with ``bias_repeated`` the counts
            of rows by which it was repeated.
        masks: masks by which rows or the result were zeroed.
        result: the value ``[R, N]``, or ``[T, slots, N]``, after the bias and the masks.
        copies: K, where the rows are tokens ``[T, K]`` that each meet the weights of K experts.
        spread: where every token meets every expert, the order of the rows and that of the result, each None where it
            has no experts: the rows are the tokens, or the product sums over the experts.
        weighed: the scores by which the product multiplies the rows, as ``einsum("tei,ehi,te->th")`` does, and their
            order; None: by token and slot, as in ``"tki,tkhi,tk->th"``.
        summed: whether the product sums the slots of every token, as ``"tki,tkhi->th"`` does.
        sizes: where the rows are cut into a slice for each expert, the number of rows of each, on the host.
    """

    anchor: fx.Node
    rows: fx.Node
    weight: Weight
    routing_key: fx.Node
    bias: fx.Node | None
    bias_ids: fx.Node | None
    masks: tuple[fx.Node, ...]
    result: fx.Node
    copies: int | None = None
    spread: tuple[Spread | None, Spread | None] | None = None
    weighed: tuple[fx.Node, Spread | None] | None = None
    summed: bool = False
    sizes: tuple[fx.Node, ...] = ()
    bias_repeated: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What it multiplies in: the weight's dtype or, where autocast rounds the operands, that of its result."""
        stacked, made = example(self.weight.node), example(self.anchor)
        if stacked is None or made is None or not made.dtype.is_floating_point:
            return torch.float64 if stacked is None else stacked.dtype
        return narrower(made.dtype, stacked.dtype)  # fp16 of bf16 weights, as autocast has it


@dataclass(frozen=True)
class Body:
    """What an expert computes with one half or two of its first product, or with two products.

    ``up_first``: the up half, or the odd rows' half, is where the operator expects the gate. ``scale`` multiplies the
    value, or the expert's result.
    """

    activation: str
    alpha: float | None
    limit: float | None
    glu_layout: str
    up_first: bool = False
    scale: float = 1.0

    def halves(self, rows: Any) -> tuple[slice, slice] | None:
        """Where gate and up are among the ``rows`` of a stacked weight, if the operator has to be told."""
        if not self.up_first:
            return None
        if self.glu_layout == "interleaved":
            return slice(1, None, 2), slice(0, None, 2)
        return slice(rows // 2, None), slice(0, rows // 2)


@dataclass(frozen=True)
class Dispatch:
    """How rows are made from tokens. ``form``: "grouped_mm", "batched_mm", "dense", "loop" or "capacity".

    ``hidden`` is [T, H]; where every token meets every expert it may be [..., H].

    ``ids`` is any value whose row-major elements are the R expert ids, -1 for a row that is dropped; ``perm`` sorts
    them by expert, None = unsorted. ``wrapped``: a negative id counts from the end, as indexing the weights by it does.
    ``weights``: R routing weights, row-major, that multiply the rows before the experts, or None.
    """

    form: str
    hidden: fx.Node
    ids: Value
    perm: fx.Node | None
    top_k: int
    wrapped: bool = False
    weights: Value | None = None


@dataclass(frozen=True)
class Staged:
    """Row-wise code of the model that stays between the second product and the combine.

    It makes ``end`` of ``start``, the rows [R, H] of one order or another, and of what is ``beside``; ``nodes`` are its
    calls, ``end`` included.
    """

    start: fx.Node
    end: fx.Node
    nodes: frozenset[fx.Node]
    beside: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Combine:
    """How rows return to tokens: the weights (R row-major elements) and the ``[T, H]`` result.

    ``total``: what sums over the experts. ``added``: the ``[T, H]`` that it adds to, or None. ``like``: a value of the
    result's shape where that is not [T, H]. ``staged``: what stays between the experts and it, or None. ``unread``:
    values that the block multiplies by zero and the operators do not read.
    """

    weights: Value
    output: fx.Node
    total: fx.Node
    added: fx.Node | None = None
    like: fx.Node | None = None
    staged: Staged | None = None
    unread: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Router:
    """A router in the terms of ``fused_topk``. ``rounded``: what its weights are cast to, narrower than the experts'
    own dtype, or None.
    """

    logits: fx.Node
    bias: fx.Node | None
    top_k: int
    routing: str
    renormalize: bool = False
    renorm_eps: float = 0.0
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    rounded: torch.dtype | None = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``fused_topk``."""
        return {name: value for name, value in vars(self).items() if name not in ("logits", "bias", "rounded")}


@dataclass(frozen=True)
class MoEMatch:
    """One MoE block: every role as a node, and the nodes that its replacement makes dead.

    ``up_half`` is the product with the up projection where that is a weight of its own, and ``up`` the gate's.
    ``router`` is a Refusal when the router stays in the graph and only the experts are replaced. ``apart``: pairs of
    graph inputs, one overwritten and the other read by the block, that have to be different memory in every call.
    ``merged`` is why a weight that the graph makes of a stored one and low-rank factors is read as it makes it, and
    ``whole`` the match that reads it so, where this one reads the factors.
    """

    up: Product
    down: Product
    body: Body
    dispatch: Dispatch
    combine: Combine
    router: Router | Refusal
    region: tuple[fx.Node, ...] = field(repr=False)
    apart: frozenset[tuple[fx.Node, fx.Node]] = field(default=frozenset(), repr=False)
    up_half: Product | None = None
    merged: Refusal | None = None
    whole: MoEMatch | None = field(default=None, repr=False)

    @property
    def updated(self) -> bool:
        """Whether low-rank factors are added to a weight."""
        return bool(self.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of these factors."""
        return tuple(update.rank for product in self.products for update in product.weight.updates)

    @property
    def inputs(self) -> frozenset[fx.Node]:
        """The values that the operator reads, or that the block alone reads."""
        routing = [*leaves(self.dispatch.ids), *leaves(self.combine.weights), *self.combine.unread]
        values = [self.dispatch.hidden, *routing, self.combine.added]
        for product in self.products:
            values += [*product.weight.nodes, product.bias]
        if self.combine.staged is not None:
            values += self.combine.staged.beside
        return frozenset(value for value in values if value is not None)

    @property
    def dtype(self) -> torch.dtype | None:
        """What the operator has to get its weights in: None, as they are; a dtype, where autocast rounds them to it.

        Hidden states are not rounded to it before they are weighted, nor the products where they are not alike.
        """
        stacked, hidden = example(self.down.weight.node), example(self.dispatch.hidden)
        found = {product.dtype for product in self.products}
        if stacked is None or hidden is None or len(found) > 1 or found == {stacked.dtype}:
            return None
        (dtype,) = found
        return None if self.dispatch.weights is not None and hidden.dtype != dtype else dtype

    @property
    def products(self) -> tuple[Product, ...]:
        """The expert products: gate and up, or gate, then up, and down."""
        return (self.up, self.down) if self.up_half is None else (self.up, self.up_half, self.down)

    @property
    def output(self) -> fx.Node:
        """The node that the fused operator replaces."""
        return self.combine.output

    @property
    def location(self) -> str:
        """Source line of the second expert product."""
        return location(self.down.anchor)


@dataclass(frozen=True)
class RoutedCall:
    """A `fused_experts` call that the model itself makes, whose weights and ids come from a router of `fused_topk`."""

    call: fx.Node
    router: Router
    weights: fx.Node
    ids: fx.Node
