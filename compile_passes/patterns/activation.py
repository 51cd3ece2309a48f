"""What happens between the two expert products: an activation of the gate, times the up half if there is one.

The expression is read as a product of factors (`act(g) * u`, `u * act(g)`, `(u + 1) * (g * sigmoid(a * g))`,
`addcmul(x, x, u)`), so that the order of multiplication and the spelling of SiLU do not matter. Casts between floating
dtypes are looked through: the fused operator computes the activation in fp32 from the fp32 accumulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_passes.canonical import Canonical
from compile_passes.match import Body, Refusal
from compile_passes.vocabulary import Call, example

_CURE = "Use one of meta.activations.ACTIVATIONS, or add a row there and its spelling to patterns/activation.py."


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


def recognise_body(canon: Canonical, rows: fx.Node, results: Iterable[fx.Node]) -> tuple[Body, fx.Node] | Refusal:
    """The activation whose value is ``rows``.

    Args:
        rows: operand of the second product.
        results: the values that first products may have.

    Returns:
        The body and the first product's result that it reads.
    """
    return _Reader(canon, frozenset(results)).body(rows)


class _Reader:
    def __init__(self, canon: Canonical, results: frozenset[fx.Node]) -> None:
        self.canon, self.results = canon, results

    def body(self, rows: fx.Node) -> tuple[Body, fx.Node] | Refusal:
        terms: list[_Factor] = []
        for value in self._factors(rows):
            factor = self._factor(value) if isinstance(value, fx.Node | _PlusOne) else None
            if factor is None:
                return _unknown(self.canon, value if isinstance(value, fx.Node) else rows)
            terms.append(factor)
        return _decide(terms, rows)

    def _uncast(self, value: Any) -> Any:
        return self.canon.uncast(value, self.results)

    def _factors(self, value: Any) -> list[Any]:
        """The factors of a tree of multiplications; constants other than 1 are factors too."""
        value = self._uncast(value)
        call = self.canon.call(value)
        if call is not None and call.name == "mul":
            return self._factors(call["x"]) + self._factors(call["y"])
        if call is not None and call.name == "addcmul" and call["value"] in (None, 1):
            for one, other in (("tensor1", "tensor2"), ("tensor2", "tensor1")):
                if self.canon.same(call["x"], call[one]):  # x + x * u = x * (u + 1)
                    return [*self._factors(call["x"]), _PlusOne(call[other])]
        return [] if value == 1 else [value]

    def _factor(self, value: Any) -> _Factor | None:
        if isinstance(value, _PlusOne):
            half = self._half(value.value)
            return None if half is None else _Factor("plain", half, plus_one=True)
        half = self._half(value)
        if half is not None:
            return _Factor("plain", half)
        call = self.canon.call(value)
        if call is None:
            return None
        if call.name == "add":
            shifted = next((call[a] for a, b in (("x", "y"), ("y", "x")) if call[b] == 1), None)
            half = self._half(shifted) if call["alpha"] in (None, 1) else None
            return None if half is None else _Factor("plain", half, plus_one=True)
        return self._activated(call)

    def _activated(self, call: Call) -> _Factor | None:
        kind, operand, alpha = call.name, call["x"], 1.0
        if kind == "square" or (kind == "pow" and call["y"] == 2):
            inner = self.canon.named(self._uncast(operand), "relu")
            kind, operand = ("relu2", inner["x"]) if inner is not None else ("", None)
        elif kind == "sigmoid":
            scaled = self.canon.named(self._uncast(operand), "mul")
            if scaled is not None:
                for one, other in (("x", "y"), ("y", "x")):
                    if isinstance(scaled[other], int | float):
                        operand, alpha = scaled[one], float(scaled[other])
        elif kind == "gelu" and call["approximate"] not in (None, "none"):
            kind = "gelu_tanh"
        elif kind == "masked_fill":
            return None
        half = self._half(operand)
        return None if half is None or kind not in _KINDS else _Factor(kind, half, alpha)

    def _half(self, value: Any) -> _Half | None:
        value = self._uncast(value)
        if value in self.results:
            return _Half(value, "none", 0)
        call = self.canon.named(value, "clamp")
        if call is not None:
            inner = self._half(call["x"])
            bounds = (call["min"], call["max"])
            if inner is None or inner.low is not None or inner.high is not None:
                return None
            if not all(bound is None or isinstance(bound, int | float) for bound in bounds):
                return None
            return _Half(inner.source, inner.layout, inner.index, *bounds)
        return self._split(value)

    def _split(self, value: fx.Node) -> _Half | None:
        """An element of chunk or split, or a slice of the last dimension: (first, second) or (even, odd)."""
        call = self.canon.call(value)
        if call is None:
            return None
        if call.name == "item":
            parts = self.canon.named(call["x"], "chunk", "split")
            if parts is None or self._uncast(parts["x"]) not in self.results or call["index"] not in (0, 1):
                return None
            source = self._uncast(parts["x"])
            width = _width(source)
            sizes = {"chunk": parts["chunks"] == 2, "split": _halves(parts, width)}
            last = parts["dim"] in (-1, (_rank(source) or 0) - 1)
            return _Half(source, "concat", call["index"]) if last and sizes[parts.name] else None
        bounds = _slice_of_last(call)
        source = self._uncast(call["x"]) if bounds is not None else None
        if bounds is None or source not in self.results:
            return None
        start, stop, step = bounds.indices(_width(source))
        width = _width(source)
        if step == 2 and start in (0, 1) and stop >= width - 1:
            return _Half(source, "interleaved", start)
        if step == 1 and (start, stop) in ((0, width // 2), (width // 2, width)):
            return _Half(source, "concat", int(start > 0))
        return None


@dataclass(frozen=True)
class _PlusOne:
    value: Any


_KINDS = frozenset({"silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid"})


def _decide(terms: list[_Factor], rows: fx.Node) -> tuple[Body, fx.Node] | Refusal:
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
    layout = _layout(gate, None if up is None else up.half)
    if layout is None:
        return Refusal(
            rows, "Gate and up are not the (first, second) or (even, odd) halves of one product.",
            "Store gate and up in one [E, 2I, H] weight, gate first.",
        )  # fmt: skip
    return Body(*named, layout), gate.source


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
    if gate.source is not up.source or gate.layout != up.layout or (gate.index, up.index) != (0, 1):
        return None
    return gate.layout


def _unknown(canon: Canonical, value: fx.Node) -> Refusal:
    call = canon.call(value)
    name = call.name if call is not None else value.name
    return Refusal(value, f"Unknown activation between the expert products (at {name}).", _CURE)


def _slice_of_last(call: Call) -> slice | None:
    """The slice of the last dimension that ``call`` takes, when it takes nothing else."""
    if call.name == "getslice":
        index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
        *lead, last = index
        if isinstance(last, slice) and all(part is Ellipsis or part == slice(None) for part in lead):
            whole = len(index) == (_rank(call["x"]) or 0) or Ellipsis in lead
            return (
                last if whole and all(isinstance(b, int | None) for b in (last.start, last.stop, last.step)) else None
            )
        return None
    dim, source_rank = call["dim"], _rank(call["x"]) or 0
    if call.name in ("slice", "narrow") and dim in (-1, source_rank - 1) and isinstance(call["start"], int):
        end = call["start"] + call["length"] if call.name == "narrow" else call["end"]
        return slice(call["start"], end, call["step"])
    return None


def _halves(parts: Call, width: int) -> bool:
    if parts["sizes"] is not None:
        return list(parts["sizes"]) == [width // 2, width // 2]
    return bool(parts["size"] == width // 2)


def _width(value: fx.Node) -> int:
    tensor = example(value)
    return tensor.shape[-1] if tensor is not None and isinstance(tensor.shape[-1], int) else 0


def _rank(value: Any) -> int | None:
    tensor = example(value)
    return None if tensor is None else tensor.dim()
