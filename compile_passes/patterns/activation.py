"""What happens between the two expert products: an activation of the gate, times the up half if there is one.

The expression is read as a product of factors (`act(g) * u`, `u * act(g)`, `(u + 1) * (g * sigmoid(a * g))`,
`addcmul(x, x, u)`), so that the order of multiplication and the spelling of SiLU do not matter. Casts to floating
dtypes no narrower than the experts' own are looked through: the fused operator computes the activation in fp32 from the
fp32 accumulator. Operands that broadcast are no halves of one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_passes.match import Body, Refusal
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, rank, same_shape
from meta.activations import ACTIVATIONS

_CURE = f"Use one of the activations {', '.join(ACTIVATIONS)} on the (gate, up) halves of one product."


@dataclass(frozen=True)
class _Half:
    """A part of the first product: all of it, or its gate (0) or up (1) half; clamped to ``[low, high]``."""

    source: fx.Node
    layout: str
    index: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class _Factor:
    """``kind`` of ``half``; "plain" is the half itself, plus one if ``plus_one``; alpha scales a sigmoid's argument."""

    kind: str
    half: _Half
    alpha: float = 1.0
    plus_one: bool = False


def recognise_body(
    reading: Reading, rows: fx.Node, results: Iterable[fx.Node], floor: torch.dtype
) -> tuple[Body, tuple[fx.Node, ...]] | Refusal:
    """The activation whose value is ``rows``.

    Args:
        rows: operand of the second product.
        results: the values that first products may have.
        floor: the narrowest dtype that a cast may go to.

    Returns:
        The body and the results of the first products that it reads: the gate's, then the up half's if it is another.
    """
    return _Reader(reading, frozenset(results), floor).body(rows)


class _Reader:
    def __init__(self, reading: Reading, results: frozenset[fx.Node], floor: torch.dtype) -> None:
        self.reading, self.results, self.floor = reading, results, floor

    def body(self, rows: fx.Node) -> tuple[Body, tuple[fx.Node, ...]] | Refusal:
        terms: list[_Factor] = []
        for value in self._factors(rows):
            factor = self._factor(value) if isinstance(value, fx.Node | _PlusOne) else None
            if factor is None:
                return _unknown(self.reading, value if isinstance(value, fx.Node) else rows)
            terms.append(factor)
        found = _decide(terms, rows)
        if isinstance(found, Refusal) or self._fits(found[0], found[1], rows):
            return found
        return Refusal(rows, "The value between the expert products is not [rows, expert width].", _CURE)

    def _fits(self, body: Body, sources: tuple[fx.Node, ...], rows: fx.Node) -> bool:
        """Whether ``rows`` has the elements of each first product's ``[R, I]``, or those of one half of ``[R, 2I]``."""
        after, whole = example(rows), body.glu_layout in ("none", "separate")
        for source in sources:
            before = example(source)
            if before is None or after is None or not same_shape(source, sources[0]):
                return False
            if not equal_sizes(after.numel() * (1 if whole else 2), before.numel()):
                return False
        return True

    def _uncast(self, value: Any) -> Any:
        return self.reading.uncast(value, self.floor, self.results)

    def _elementwise(self, value: Any, names: str, parameters: str = "") -> Call | None:
        """As `Reading.read`, of a call all of whose tensors have the shape of its result: nothing is broadcast."""
        call = self.reading.read(value, names, parameters)
        if call is None:
            return None
        tensors = [operand for operand in call.args.values() if example(operand) is not None]
        return call if all(same_shape(operand, value) for operand in tensors) else None

    def _factors(self, value: Any) -> list[Any]:
        """The factors of a tree of multiplications; constants other than 1 are factors too."""
        value = self._uncast(value)
        call = self._elementwise(value, "mul addcmul", "y tensor1 tensor2")
        if call is not None and call.name == "mul":
            return self._factors(call["x"]) + self._factors(call["y"])
        if call is not None:
            for one, other in (("tensor1", "tensor2"), ("tensor2", "tensor1")):
                if self.reading.same(call["x"], call[one]):  # x + x * u = x * (u + 1)
                    return [*self._factors(call["x"]), _PlusOne(call[other])]
        return [] if type(value) in (int, float) and value == 1 else [value]

    def _factor(self, value: Any) -> _Factor | None:
        if isinstance(value, _PlusOne):
            half = self._half(value.value)
            return None if half is None else _Factor("plain", half, plus_one=True)
        half = self._half(value)
        if half is not None:
            return _Factor("plain", half)
        call = self._elementwise(value, "add", "y")
        if call is not None:
            shifted = next((call[a] for a, b in (("x", "y"), ("y", "x")) if _is_one(call[b])), None)
            half = self._half(shifted)
            return None if half is None else _Factor("plain", half, plus_one=True)
        return self._activated(value)

    def _activated(self, value: Any) -> _Factor | None:
        call = self._elementwise(value, "silu gelu relu sigmoid square pow", "y approximate")
        if call is None:
            return None
        kind, operand, alpha = call.name, call["x"], 1.0
        if kind == "square" or (kind == "pow" and call["y"] == 2):
            inner = self._elementwise(self._uncast(operand), "relu")
            kind, operand = ("relu2", inner["x"]) if inner is not None else ("", None)
        elif kind == "sigmoid":
            scaled = self._elementwise(self._uncast(operand), "mul", "y")
            if scaled is not None:
                for one, other in (("x", "y"), ("y", "x")):
                    if isinstance(scaled[other], int | float):
                        operand, alpha = scaled[one], float(scaled[other])
        elif kind == "gelu" and call["approximate"] != "none":
            kind = "gelu_tanh" if call["approximate"] == "tanh" else ""
        half = self._half(operand)
        return None if half is None or kind not in _KINDS else _Factor(kind, half, alpha)

    def _half(self, value: Any) -> _Half | None:
        value = self._uncast(value)
        if value in self.results:
            return _Half(value, "none", 0)
        call = self._elementwise(value, "clamp", "min max")
        if call is not None:
            inner = self._half(call["x"])
            bounds = (call["min"], call["max"])
            if inner is None or inner.low is not None or inner.high is not None:
                return None
            if not all(bound is None or isinstance(bound, int | float) for bound in bounds):
                return None
            return _Half(inner.source, inner.layout, inner.index, *bounds)
        return self._split(value)

    def _split(self, value: Any) -> _Half | None:
        """An element of chunk or split, a slice of the last dimension, or one of two along a dimension of size 2:
        (first, second) or (even, odd).
        """
        call = self.reading.read(value, "item getslice slice narrow select", "index dim start end step length")
        if call is None:
            return None
        chosen = self._selected(call)
        if chosen is not None:
            return self._of_two(*chosen)
        if call.name == "item":
            parts = self.reading.read(call["x"], "chunk split tensor_split", "chunks size sizes dim")
            source = self._source(parts["x"]) if parts is not None else None
            if parts is None or source is None or call["index"] not in (0, 1):
                return None
            width = _width(source)
            halves = parts["chunks"] == 2 if parts.name == "chunk" else _halves(parts, width)
            dim = 0 if parts["dim"] is None else parts["dim"]
            last = dim in (-1, (rank(parts["x"]) or 0) - 1)
            return _Half(source, "concat", call["index"]) if last and halves and width % 2 == 0 else None
        bounds, source = _slice_of_last(call), self._source(call["x"])
        if bounds is None or source is None:
            return None
        width = _width(source)
        start, stop, step = bounds.indices(width)
        if step == 2 and start in (0, 1) and width % 2 == 0:  # `_fits` sees where it stops
            return _Half(source, "interleaved", start)
        if step == 1 and width % 2 == 0 and (start, stop) in ((0, width // 2), (width // 2, width)):
            return _Half(source, "concat", int(start > 0))
        return None

    def _selected(self, call: Call) -> tuple[Any, int, int] | None:
        """(x, dimension, place) of ``x[..., place, ...]``, whatever else of x is taken whole."""
        if call.name == "item":
            parts = self.reading.read(call["x"], "unbind", "dim")
            return None if parts is None else (parts["x"], parts["dim"], call["index"])
        if call.name == "select":
            return call["x"], call["dim"], call["index"]
        index = call["index"] if call.name == "getslice" else None
        index = index if isinstance(index, tuple) else (index,)
        numbers = [place for place, part in enumerate(index) if type(part) is int]
        whole = all(part is Ellipsis or part == slice(None) for part in index if type(part) is not int)
        if len(numbers) != 1 or not whole:
            return None
        (place,) = numbers
        return call["x"], place - len(index) if Ellipsis in index[:place] else place, index[place]

    def _of_two(self, value: Any, dim: Any, place: Any) -> _Half | None:
        """Gate or up of the product's result as [R, 2, I] or [R, I, 2]."""
        shape, source = example(value), self._uncast(value)
        rows = example(source) if source in self.results else None
        if shape is None or rows is None or type(dim) is not int or place not in (0, 1, -1, -2):
            return None
        lead, width, dim = shape.dim() - 2, _width(source), dim % shape.dim()
        for at, layout, sizes in ((lead, "concat", (2, width // 2)), (lead + 1, "interleaved", (width // 2, 2))):
            fits = any(has_shape(value, *front, *sizes) for front in _leads(rows))
            if dim == at and width % 2 == 0 and fits:
                return _Half(source, layout, place % 2)
        return None

    def _source(self, value: Any) -> fx.Node | None:
        """The product's result ``[..., N]`` that ``value``, of the same rows, is: its halves are those of N."""
        source = self._uncast(value)
        rows = example(source) if source in self.results else None
        if rows is None:
            return None
        return source if any(has_shape(value, *lead, rows.shape[-1]) for lead in _leads(rows)) else None


def _leads(rows: torch.Tensor) -> tuple[tuple[Any, ...], ...]:
    """The shapes that rows [..., N] have in front of N, as they are and one after the other."""
    lead = tuple(rows.shape[:-1])
    count = math.prod(lead)
    return (lead, (count,), (count, 1), (1, count))


def _is_one(value: Any) -> bool:
    return type(value) in (int, float) and value == 1


@dataclass(frozen=True)
class _PlusOne:
    value: Any


_KINDS = frozenset({"silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"})


def _decide(terms: list[_Factor], rows: fx.Node) -> tuple[Body, tuple[fx.Node, ...]] | Refusal:
    active = [term for term in terms if term.kind != "plain"]
    plain = [term for term in terms if term.kind == "plain"]
    if len(active) == 2 and active[0] == active[1] and active[0].kind == "relu":
        active = [_Factor("relu2", active[0].half)]
    if len(active) != 1:
        return Refusal(rows, f"{len(active)} activations between the expert products instead of one.", _CURE)
    gate, alpha, kind = active[0].half, active[0].alpha, active[0].kind
    if kind == "sigmoid":
        own = next((term for term in plain if term.half == gate and not term.plus_one), None)
        if own is None:
            return Refusal(rows, "The gate passes through a bare sigmoid, which is no known activation.", _CURE)
        plain.remove(own)
        kind = "silu"
    if len(plain) > 1:
        return Refusal(rows, "More than two factors between the expert products.", _CURE)
    up = plain[0] if plain else None
    named = _name(kind, alpha, gate, up)
    if named is None:
        return Refusal(rows, f"The clamps or scales around {kind} match no known activation.", _CURE)
    half = None if up is None else up.half
    layout = _layout(gate, half)
    if layout is None:
        return Refusal(
            rows, "Gate and up are not the halves of one product, nor two products.",
            "Store gate and up in one [E, 2I, H] weight, gate first.",
        )  # fmt: skip
    sources = (gate.source,) if half is None or half.source is gate.source else (gate.source, half.source)
    return Body(*named, layout, up_first=layout in ("concat", "interleaved") and gate.index == 1), sources


def _name(kind: str, alpha: float, gate: _Half, up: _Factor | None) -> tuple[str, float | None, float | None] | None:
    """(activation, alpha, limit), or None when there is no such row."""
    limit, plus_one = gate.high, up is not None and up.plus_one
    if gate.low is not None:
        return None
    if up is not None and (up.half.low, up.half.high) != ((None, None) if limit is None else (-limit, limit)):
        return None
    if limit is None:
        return None if plus_one or alpha != 1.0 else (kind, None, None)
    if kind != "silu":
        return None
    if plus_one:
        return "swiglu_oai", alpha, float(limit)
    return ("silu_clamp", None, float(limit)) if alpha == 1.0 else None


def _layout(gate: _Half, up: _Half | None) -> str | None:
    if up is None:
        return "none" if gate.layout == "none" else None
    if gate.source is not up.source:
        return "separate" if gate.layout == up.layout == "none" else None
    return gate.layout if gate.layout == up.layout and {gate.index, up.index} == {0, 1} else None


def _unknown(reading: Reading, value: fx.Node) -> Refusal:
    """The refusal of a factor: it is no known function, or a known one of something that is no half of the product."""
    call = reading.call(value)
    name = call.name if call is not None else value.name
    if name not in _KINDS or call is None or not isinstance(call["x"], fx.Node):
        return Refusal(value, f"Unknown activation between the expert products (at {name}).", _CURE)
    operand = reading.strip(call["x"])
    inner = reading.call(operand)
    what = inner.name if inner is not None else getattr(operand, "name", str(operand))
    return Refusal(
        value, f"The operand of {name} is not the gate half of the first expert product, as far as can be proved (it "
        f"comes from {what}).", "Take the halves with h.chunk(2, dim=-1), or h[..., ::2] and h[..., 1::2].",
    )  # fmt: skip


def _slice_of_last(call: Call) -> slice | None:
    """The slice of the last dimension that ``call`` takes, when it takes nothing else."""
    if call.name == "getslice":
        index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
        *lead, last = index
        if isinstance(last, slice) and all(part is Ellipsis or part == slice(None) for part in lead):
            whole = len(index) == (rank(call["x"]) or 0) or Ellipsis in lead
            return (
                last if whole and all(isinstance(b, int | None) for b in (last.start, last.stop, last.step)) else None
            )
        return None
    dim, source_rank = call["dim"], rank(call["x"]) or 0
    numbers = (call["start"], call["length"] if call.name == "narrow" else call["end"], call["step"])
    if not all(isinstance(number, int | None) for number in numbers) or call["start"] is None:
        return None
    if call.name in ("slice", "narrow") and dim in (-1, source_rank - 1):
        end = call["start"] + call["length"] if call.name == "narrow" else call["end"]
        return slice(call["start"], end, call["step"])
    return None


def _halves(parts: Call, width: int) -> bool:
    if parts.name == "tensor_split":
        return list(parts["sizes"]) == [width // 2] if parts["sizes"] is not None else bool(parts["size"] == 2)
    if parts["sizes"] is not None:
        return list(parts["sizes"]) == [width // 2, width // 2]
    return bool(parts["size"] == width // 2)


def _width(value: fx.Node) -> int:
    tensor = example(value)
    return tensor.shape[-1] if tensor is not None and isinstance(tensor.shape[-1], int) else 0
