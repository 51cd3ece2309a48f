"""Expert weights that are a stored weight plus products of two thin factors: low-rank adapters (LoRA).

``W + s (B @ A)`` over all experts is as large as ``W``, and so is its gradient. Rows go through ``W``, ``A`` and ``B``
instead: ``x (W + s B A)^T = x W^T + s (x A^T) B^T``. Read are ``baddbmm``, and sums with a product that ``bmm``,
``matmul`` or ``einsum`` makes, scaled by a number, transposed and cast; several such terms may be added one after
another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compile_passes.equal import is_float_cast
from compile_passes.match import Factor, LowRank, Product, Refusal, Weight, in_words
from compile_passes.patterns.contraction import swaps_last_two
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, example, has_shape, rank, same_shape, two_labelled

_SUM = "Write it as weight + scale * torch.bmm(B, A), with B [E, N, r], A [E, r, K] and a number as scale."
_WHOLE = "Keep the sum whole up to the product with the rows, and cut the rows' result."
_STORED = (0, 1, 2)


def without_updates(reading: Reading, product: Product) -> Product | Refusal | None:
    """``product`` with the stored weight in the place of the sum that its weight is, and what is added to that.

    Returns:
        None when the weight is no sum; a refusal when it is one that is not of this kind.
    """
    weight, whole = product.weight, example(product.weight.node)
    if whole is None or whole.dim() != 3 or not whole.dtype.is_floating_point:
        return None
    base, updates = weight.node, list[LowRank]()
    while (step := _step(reading, base, weight, whole)) is not None:
        if isinstance(step, Refusal):
            if updates:
                break
            return step
        base = step[0]
        updates.append(step[1])
    if not updates:
        return None
    if weight.part is not None or weight.experts is not None:
        return Refusal(
            weight.node, f"{in_words(weight.node)} is a sum of a weight and low-rank factors, of which parts go into "
            "several products.", _WHOLE,
        )  # fmt: skip
    held = example(base)
    dtype = None if held is None or held.dtype == whole.dtype else whole.dtype
    return replace(product, weight=replace(weight, node=base, updates=tuple(updates), dtype=dtype))


def _step(
    reading: Reading, value: fx.Node, weight: Weight, whole: torch.Tensor
) -> tuple[fx.Node, LowRank] | Refusal | None:
    """What a sum adds to, and its low-rank term; a refusal of a sum without one."""
    node = _bare(reading, value, whole.dtype)
    sums = _terms(reading, node)
    for base, delta, scale in sums:
        if not same_shape(base, value):
            continue
        found = _factors(reading, delta, whole.dtype, value) if not isinstance(delta, tuple) else delta
        if found is None:
            continue
        left, right = (replace(factor, node=_bare(reading, factor.node, whole.dtype)) for factor in found[:2])
        update = _update(left, right, scale * found[2], weight.transposed, value)
        if update is None:
            continue
        stored = _bare(reading, base, whole.dtype)
        return _unfit(node, update, whole) or (stored, update)
    if not sums:
        return None
    return Refusal(
        node, f"{in_words(node)} adds to the experts' weights what is not known to be a product of two factors "
        "[E, N, r] and [E, r, K].", _SUM,
    )  # fmt: skip


_Terms = tuple[Factor, Factor, float]


def _terms(reading: Reading, node: Any) -> list[tuple[Any, Any, float]]:
    """(what is added to, the term or its factors, the number that multiplies it), every way to take a sum."""
    call = reading.read(node, "baddbmm", "bias y beta alpha")
    if call is not None:
        if _number(call["alpha"]) is None or call["beta"] != 1:
            return [(call["bias"], None, 1.0)]
        return [(call["bias"], (Factor(call["x"], _STORED), Factor(call["y"], _STORED), 1.0), float(call["alpha"]))]
    call = reading.read(node, "add sub", "y alpha")
    scale = None if call is None else _number(call["alpha"])
    if call is None or scale is None or example(call["x"]) is None or example(call["y"]) is None:
        return []
    if call.name == "sub":
        return [(call["x"], call["y"], -scale)]
    return [(call["x"], call["y"], scale), *([(call["y"], call["x"], 1.0)] if scale == 1 else [])]


def _factors(reading: Reading, value: Any, floor: torch.dtype, like: fx.Node) -> _Terms | None:
    """(left [E, P, r], right [E, r, Q], number) of which ``value``, of the shape of ``like``, is the product."""
    if not same_shape(value, like):
        return None
    scale, swapped = 1.0, False
    while True:
        value = _bare(reading, value, floor)
        call = reading.read(value, "mul div transpose mt permute", "y dim0 dim1 dims")
        if call is None:
            break
        if call.name in ("mul", "div"):
            taken = _scaled(call)
            if taken is None:
                return None
            value, scale = taken[0], scale * taken[1]
        elif swaps_last_two(call):
            value, swapped = call["x"], not swapped
        else:
            return None
    found = _batched(reading, value) or _einsum(reading, value)
    if found is None:
        return None
    left, right = found
    if swapped:
        left, right = _turned(right), _turned(left)
    return left, right, scale


def _batched(reading: Reading, value: Any) -> tuple[Factor, Factor] | None:
    call = reading.read(value, "bmm", "y")
    return None if call is None else (Factor(call["x"], _STORED), Factor(call["y"], _STORED))


def _einsum(reading: Reading, value: Any) -> tuple[Factor, Factor] | None:
    """``einsum("enr,erk->enk", B, A)`` in any letters and orders but for the result's experts, which come first."""
    found = two_labelled(reading.read(value, "einsum", "arg1 arg2"))
    if found is None or len(found[2]) != 3:
        return None
    operands, labels, result = found
    expert, row, column = list(result)
    for one, other in ((0, 1), (1, 0)):
        inner = {*labels[one]} & {*labels[other]} - {expert}
        if len(inner) != 1:
            return None
        (shared,) = inner
        if {*labels[one]} == {expert, row, shared} and {*labels[other]} == {expert, shared, column}:
            orders = (expert + row + shared, expert + shared + column)
            left, right = (
                Factor(operands[at], tuple(labels[at].index(letter) for letter in order))
                for at, order in zip((one, other), orders, strict=True)
            )
            return left, right
    return None


def _update(left: Factor, right: Factor, scale: float, transposed: bool, like: fx.Node) -> LowRank | None:
    """The term as what rows go through, where the factors' shapes are those of a product of the shape of ``like``."""
    whole, shapes = example(like), [_shape(factor) for factor in (left, right)]
    if whole is None or any(shape is None for shape in shapes):
        return None
    (experts, rows, inner), (_, again, columns) = shapes  # type: ignore[misc]
    fits = has_shape(like, experts, rows, columns) and type(inner) is int and inner == again and inner > 0
    if not fits or not has_shape(right.node, *_stored_shape(right, (experts, inner, columns))):
        return None
    if transposed:  # rows meet the transposed sum
        return LowRank(_turned(left), _turned(right), scale, inner)
    return LowRank(right, left, scale, inner)


def _unfit(node: fx.Node, update: LowRank, whole: torch.Tensor) -> Refusal | None:
    """A refusal of factors that are no cheaper than their product, or that would be cast out of their range."""
    _, rows, columns = whole.shape
    small = type(rows) is int and type(columns) is int and update.rank * (rows + columns) < rows * columns
    if not small:
        return Refusal(
            node, f"The rank {update.rank} of what {in_words(node)} adds is too high for [{rows}, {columns}]: the "
            "factors of an expert hold as many numbers as its weight.", "Lower the rank.",
        )  # fmt: skip
    for factor in (update.down, update.up):
        held = example(factor.node)
        if held is None or held.device != whole.device or not held.dtype.is_floating_point:
            return Refusal(node, f"{in_words(factor.node)} is not on the weights' device, or no float.", _SUM)
        if torch.finfo(held.dtype).max > torch.finfo(whole.dtype).max * 2:
            return Refusal(
                node, f"The factors are {held.dtype}, which has numbers that the weights' {whole.dtype} has not.",
                "Cast the factors to the dtype of the weights before they are multiplied.",
            )  # fmt: skip
    return None


def _bare(reading: Reading, value: Any, floor: torch.dtype) -> Any:
    """``value`` without copies, casts to floating dtypes no narrower than ``floor``, and views of the same shape."""
    while (call := reading.read(value, "view clone cast")) is not None and same_shape(call["x"], value):
        if call.name == "cast" and not is_float_cast(value, call["x"], floor):
            break
        value = call["x"]
    return value


def _scaled(call: Call) -> tuple[Any, float] | None:
    """(the operand, the number that it is multiplied by)."""
    number = _number(call["y"])
    if call.name == "div":
        return None if not number or call["rounding_mode"] is not None else (call["x"], 1 / number)
    if number is not None:
        return call["x"], number
    number = _number(call["x"])
    return None if number is None else (call["y"], number)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _turned(factor: Factor) -> Factor:
    expert, rows, columns = factor.dims
    return replace(factor, dims=(expert, columns, rows))


def _shape(factor: Factor) -> tuple[Any, ...] | None:
    held = example(factor.node)
    return tuple(held.shape[dim] for dim in factor.dims) if held is not None and rank(factor.node) == 3 else None


def _stored_shape(factor: Factor, shape: tuple[Any, Any, Any]) -> list[Any]:
    """``shape``, that of the factor, as the shape of its node."""
    stored: list[Any] = [None] * 3
    for dim, size in zip(factor.dims, shape, strict=True):
        stored[dim] = size
    return stored
