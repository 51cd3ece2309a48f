"""Contractions of rows with the stacked weights of all experts, by what each dimension is, however they are spelled.

Dimensions are tokens t, experts e and a feature; einsum, matmul with or without broadcasting, bmm and baddbmm come to
one `Product`. The rows, and the result, have one order of tokens and experts throughout (`match.Spread`): views keep
it, transpositions change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from compile_passes.match import Product, Spread, Weight
from compile_passes.reading import Reading
from compile_passes.vocabulary import (
    Call,
    Labelled,
    equal_sizes,
    example,
    has_shape,
    rank,
    same_shape,
    scored,
    two_labelled,
)  # fmt: skip


@dataclass(frozen=True)
class _Parts:
    """A contraction: its rows and their order, the weight, and the order of the result."""

    rows: fx.Node
    of_rows: Spread | None
    weight: Weight
    of_result: Spread | None
    weighed: tuple[fx.Node, Spread] | None = None


def dense_product(reading: Reading, node: fx.Node) -> Product | None:
    """A product of every token with the weights of every expert, and the bias that is added to it."""
    found = _by_einsum(reading, node) or _by_matmul(reading, node)
    if found is None:
        return None
    weight = peel_transpose(reading, Weight(reading.unwrap(found.weight.node), found.weight.transposed))
    stacked = example(weight.node)
    if stacked is None or equal_sizes(stacked.shape[0], 1):
        return None
    call, orders = reading.named(node, "baddbmm"), (found.of_rows, found.of_result)
    bias = None if call is None else _stacked_bias(reading, call["bias"], node, found.of_result)
    if call is not None and bias is None:
        return None
    product = Product(node, found.rows, weight, weight.node, bias, None, (), node, spread=orders, weighed=found.weighed)
    return _with_bias(reading, product)


def _by_einsum(reading: Reading, node: fx.Node) -> _Parts | None:
    """``einsum("th,ehi->tei", x, w)`` in any letters; ``"tei,ehi->th"`` sums over the experts as well, and
    ``"tei,ehi,te->th"`` multiplies by scores.
    """
    found = two_labelled(reading.read(node, "einsum", "arg1 arg2"))
    if found is not None:
        return _of_two(node, found, None)
    ways = scored(reading.read(node, "einsum", "arg1 arg2 arg3"))
    return next((parts for scores, two in ways if (parts := _of_two(node, two, scores)) is not None), None)


def _of_two(node: fx.Node, found: Labelled, scores: tuple[fx.Node, str] | None) -> _Parts | None:
    """The contraction of two operands; scores have a letter for each token and for the expert."""
    operands, labels, result = found
    for place in (0, 1):
        rows, weight, of_rows, of_weight = operands[1 - place], operands[place], labels[1 - place], labels[place]
        if len(of_weight) != 3 or not of_rows or not result:
            continue
        expert, inner, outer = of_weight[0], of_rows[-1], result[-1]
        if expert in (inner, outer) or {*of_weight} != {expert, inner, outer} or inner == outer:
            continue
        tokens = of_rows[:-1].replace(expert, "")
        if not tokens or result[:-1].replace(expert, "") != tokens or not (expert in of_rows or expert in result):
            continue
        if scores is not None and (expert not in scores[1] or scores[1].replace(expert, "") != tokens):
            continue
        given, made, held = example(rows), example(node), example(scores[0]) if scores is not None else None
        if given is None or made is None:
            return None
        orders = (_spread(given, of_rows.find(expert)), _spread(made, result.find(expert)))
        weighed = None
        if scores is not None and held is not None:
            weighed = (scores[0], spread_of(held.shape, scores[1].index(expert)))
        return _Parts(rows, orders[0], Weight(weight, of_weight[2] == outer), orders[1], weighed)
    return None


def _by_matmul(reading: Reading, node: fx.Node) -> _Parts | None:
    """``x [T, H] @ w [E, H, I]``, ``x [E or 1, T, H] @ w``, ``x [T, E or 1, 1, H] @ w``, and from the other side
    ``w [E, I, H] @ x [..., H, 1]``; with a bias, too.
    """
    call, made = reading.read(node, "matmul bmm baddbmm", "y bias"), example(node)
    if call is None or made is None or (call.name == "baddbmm" and rank(call["bias"]) is None):
        return None
    for side, other, transposed in (("y", "x", True), ("x", "y", False)):
        weight, rows = example(call[side]), example(call[other])
        if weight is None or rows is None or weight.dim() != 3 or rows.dim() < 2:
            continue
        if side == "x" and not (rows.dim() > 2 and equal_sizes(rows.shape[-1], 1)):
            continue
        experts, at = weight.shape[0], made.dim() - 3
        if not equal_sizes(made.shape[at], experts) or (rows.dim() > 2 and not equal_sizes(made.dim(), rows.dim())):
            continue
        mine = None
        if rows.dim() > 2 and equal_sizes(rows.shape[at], experts):
            mine = _spread(rows, at) if side == "y" else _spread(rows.squeeze(-1), at)
        result = made if side == "y" else made.squeeze(-1)
        return _Parts(call[other], mine, Weight(call[side], transposed), _spread(result, at))
    return None


def spread_of(sizes: Sequence[Any], at: int) -> Spread:
    """The order of rows of these sizes, with the experts at ``at``."""
    return Spread(prod(sizes[:at]), prod(sizes[at + 1 :]))


def _spread(tensor: torch.Tensor, at: int) -> Spread | None:
    """The order of ``[..., features]`` with the experts at dimension ``at``."""
    return None if at < 0 else spread_of(tensor.shape[:-1], at)


def moves_one(call: Call, dims: int, at: int | None) -> list[int] | None:
    """`permutation`, where all dimensions but ``at`` stay in their order."""
    found = None if at is None else permutation(call, dims)
    others = [dim for dim in found or () if dim != at]
    return found if others == sorted(others) else None


# Calls of which `permutation` says what they do.
TRANSPOSES = ("transpose", "permute", "mt", "t")


def permutation(call: Call, dims: int) -> list[int] | None:
    """For every dimension of the result of a transposition, the dimension of its operand."""
    order = list(range(dims))
    if call.name == "permute":
        given = call["dims"] if isinstance(call["dims"], list | tuple) else ()
        found = [dim % dims for dim in given if type(dim) is int]
        return found if sorted(found) == order else None
    pair = (call["dim0"], call["dim1"]) if call.name == "transpose" else (-2, -1)
    if dims < 2 or not all(type(dim) is int for dim in pair):
        return None
    one, other = (dim % dims for dim in pair)
    order[one], order[other] = order[other], order[one]
    return order


def alike(one: Spread | None, other: Spread | None) -> bool:
    """Whether two orders are one, or there is none."""
    if one is None or other is None:
        return one is other
    return equal_sizes(one.before, other.before) and equal_sizes(one.after, other.after)


def axis_of(shape: Sequence[Any], spread: Spread, experts: Any) -> int | None:
    """The dimension of the experts in a value ``[..., features]`` of this order; None where it has none of its own."""
    for at in range(len(shape) - 1):
        fits = equal_sizes(prod(shape[:at]), spread.before) and equal_sizes(prod(shape[at + 1 : -1]), spread.after)
        if equal_sizes(shape[at], experts) and fits:
            return at
    return None


def _with_bias(reading: Reading, product: Product) -> Product:
    """Follow a product through the removal of dimensions of size 1 and the addition of a bias."""
    value, order = product.result, product.spread[1] if product.spread else None
    while product.bias is None and len(readers := reading.readers(value)) == 1:
        (reader,) = readers
        if reading.read(reader, "view") is not None and _drops_ones(reader, value):
            value = reader
            continue
        call = reading.read(reader, "add", "y") if same_shape(reader, value) else None
        added = None if call is None else call["y"] if call["x"] is value else call["x"]
        bias = None if added is None else _stacked_bias(reading, added, value, order)
        return replace(product, bias=bias, result=value if bias is None else reader)
    return replace(product, result=value)


def _drops_ones(reader: fx.Node, value: fx.Node) -> bool:
    after, before = example(reader), example(value)
    if after is None or before is None:
        return False
    left, right = ([size for size in shape if not equal_sizes(size, 1)] for shape in (after.shape, before.shape))
    return after.dim() < before.dim() and len(left) == len(right) and all(map(equal_sizes, left, right))


def _stacked_bias(reading: Reading, value: Any, result: fx.Node, order: Spread | None) -> fx.Node | None:
    """The ``[E, N]``, or ``[E, 1, N]``, that ``value`` adds to every token's row of each expert in ``result``."""
    shape, given = example(result), example(value)
    if order is None or shape is None or given is None or given.dim() > shape.dim():
        return None
    root = next((node for node in reading.reshapes(value) if _is_stacked(example(node), shape.shape[-1])), None)
    stacked = example(root)
    if stacked is None:
        return None
    at = axis_of(shape.shape, order, stacked.shape[0])
    ones = [1] * shape.dim()
    if at is None:
        return None
    ones[at], ones[-1] = stacked.shape[0], stacked.shape[-1]
    return root if has_shape(value, *ones[shape.dim() - given.dim() :]) and shape.dim() - given.dim() <= at else None


def _is_stacked(bias: torch.Tensor | None, width: Any) -> bool:
    """Whether ``bias`` is ``[E, N]`` or, as it is added to the rows of each expert, ``[E, 1, N]``."""
    if bias is None or bias.dim() not in (2, 3) or not equal_sizes(bias.shape[-1], width):
        return False
    return bias.dim() == 2 or equal_sizes(bias.shape[1], 1)


def peel_transpose(reading: Reading, weight: Weight) -> Weight:
    """The same weight without transpositions of its last two dimensions."""
    while (call := reading.read(weight.node, "transpose mt permute", "dim0 dim1 dims")) is not None:
        if not swaps_last_two(call):
            break
        weight = Weight(reading.unwrap(call["x"]), not weight.transposed)
    return weight


def swaps_last_two(call: Call) -> bool:
    """Whether a transposition or permutation swaps the last two of three or more dimensions, and moves no other."""
    dims = rank(call["x"])
    return dims is not None and dims > 2 and permutation(call, dims) == [*range(dims - 2), dims - 1, dims - 2]
