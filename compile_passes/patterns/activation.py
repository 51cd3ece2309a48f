"""What happens between the two expert products: an activation of the gate, times the up half if there is one.

`formula` reads it as a number times a product of functions of the halves, so that the order of multiplication and the
spelling of an activation do not matter. Casts to floating dtypes no narrower than the experts' own are looked through:
the fused operator computes the activation in fp32 from the fp32 accumulator. Operands that broadcast are no halves of
one product. The number, and a factor with one number for each row, are left to the routing weights: the second product
is linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from compile_passes.match import KEEP, Body, Refusal
from compile_passes.patterns.formula import Factor, Formulas, OfRows, Term
from compile_passes.patterns.halves import Half, Halves
from compile_passes.reading import Reading
from compile_passes.vocabulary import example, same_count, same_shape
from meta.activations import ACTIVATIONS

_CURE = (
    f"Fused are the activations {', '.join(ACTIVATIONS)} on the (gate, up) halves of one product; another one in the "
    f"place of this is another function. {KEEP}"
)
_OF_ROWS = "Multiply the results of the second product, before its bias: they are the same multiples of these rows."
# Functions that only the gate goes through; tanh may be on both halves, as a cap.
_ACTIVE = frozenset({"sigmoid", "cdf", "cdf_tanh", "relu", "silu_max"})
_FUNCTIONS = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh"})
# Activations without options, by the factors of the gate.
_OF_GATE = {
    ("cdf", "plain"): "gelu", ("cdf_tanh", "plain"): "gelu_tanh", ("relu",): "relu", ("relu", "relu"): "relu2",
}  # fmt: skip


@dataclass(frozen=True)
class Between:
    """What lies between the products.

    Attributes:
        body: the activation.
        sources: the results of the first products that it reads: the gate's, then the up half's if it is another.
        of_rows: what multiplies the rows, or None.
    """

    body: Body
    sources: tuple[fx.Node, ...]
    of_rows: OfRows | None = None


def recognise_body(
    reading: Reading, rows: fx.Node, results: Iterable[fx.Node], floor: torch.dtype
) -> Between | Refusal:
    """The activation whose value is ``rows``.

    Args:
        rows: operand of the second product.
        results: the values that first products may have.
        floor: the narrowest dtype that a cast may go to.
    """
    formulas = Formulas(Halves(reading, results, floor))
    term = formulas.term(rows)
    if term is None:
        return _unknown(formulas.halves, rows if formulas.stuck is None else formulas.stuck)
    found = _decide(term, rows)
    if isinstance(found, Refusal) or _fits(found.body, found.sources, rows):
        return found
    return Refusal(rows, "The value between the expert products is not [rows, expert width].", _CURE)


def of_rows_and_bias(of_rows: OfRows) -> Refusal:
    """The refusal of rows that are multiplied by a number each before a product with a bias."""
    return Refusal(
        of_rows.product, "The rows between the expert products are multiplied by a number for each of them, and the "
        "second product adds a bias, which the routing weights would multiply.", _OF_ROWS,
    )  # fmt: skip


def _fits(body: Body, sources: tuple[fx.Node, ...], rows: fx.Node) -> bool:
    """Whether ``rows`` has the elements of each first product's ``[R, I]``, or those of one half of ``[R, 2I]``."""
    after, whole = example(rows), body.glu_layout in ("none", "separate")
    for source in sources:
        before = example(source)
        if before is None or after is None or not same_shape(source, sources[0]):
            return False
        if not same_count(after, before, 1 if whole else 2):
            return False
    return True


def _decide(term: Term, rows: fx.Node) -> Between | Refusal:
    if len(term.of_rows) > 1:
        return Refusal(rows, "The rows between the expert products are multiplied by several numbers each.", _OF_ROWS)
    halves: dict[Half, list[Factor]] = {}
    for factor in term.factors:
        halves.setdefault(factor.half, []).append(factor)
    gates = [half for half, factors in halves.items() if any(factor.kind in _ACTIVE for factor in factors)]
    strange = next((factor for factor in term.factors if factor.kind not in ("plain", "plus_one")), None)
    if not gates and strange is not None:
        return Refusal(rows, f"Unknown activation between the expert products (at {strange.kind}).", _CURE)
    if not gates and any(half.is_positive_part for half in halves):
        return Refusal(rows, "clamp(min=0) has another derivative at 0 than relu, and is trained.", "Write torch.relu.")
    if len(gates) != 1:
        return Refusal(rows, f"{len(gates)} activations between the expert products instead of one.", _CURE)
    (gate,) = gates
    factors = halves.pop(gate)
    if [factor.kind for factor in factors] == ["sigmoid"]:
        return Refusal(rows, "The gate passes through a bare sigmoid, which is no known activation.", _CURE)
    if sum(map(len, halves.values())) > 1:
        return Refusal(rows, "More than two factors between the expert products.", _CURE)
    up = next((factors[0] for factors in halves.values()), None)
    named = _name(gate, factors, up)
    if named is None:
        kinds = " * ".join(factor.kind for factor in factors)
        return Refusal(rows, f"The clamps or scales around {kinds} match no known activation.", _CURE)
    activation, alpha, limit, caps = named
    scale = float(f"{term.coefficient / caps:.12g}")
    if scale == 0 or not math.isfinite(scale):
        return Refusal(rows, f"The value between the expert products is multiplied by {scale}.", _CURE)
    half = None if up is None else up.half
    layout = _layout(gate, half)
    if layout is None:
        return Refusal(
            rows, "Gate and up are not the halves of one product, nor two products.",
            "Store gate and up in one [E, 2I, H] weight, gate first.",
        )  # fmt: skip
    sources = (gate.source,) if half is None or half.source is gate.source else (gate.source, half.source)
    up_first = layout in ("concat", "interleaved") and gate.index == 1
    body = Body(activation, alpha, limit, layout, up_first=up_first, scale=scale)
    return Between(body, sources, *term.of_rows)


# (activation, alpha, limit, what of the formula's number belongs to it)
_Named = tuple[str, float | None, float | None, float]


def _name(gate: Half, factors: list[Factor], up: Factor | None) -> _Named | None:
    """The row of `meta.activations` with its options, or None when there is no such row."""
    kinds = tuple(sorted(factor.kind for factor in factors))
    alphas = {factor.kind: factor.alpha for factor in factors}
    if gate.low is not None:
        return None
    if kinds == ("sigmoid", "tanh"):
        return _softcap(gate, alphas, up)
    if up is not None and up.kind not in ("plain", "plus_one"):
        return None
    limit, plus_one = gate.high, up is not None and up.kind == "plus_one"
    if kinds == ("silu_max",):
        bounded = limit is None and not plus_one and _clamped_to(up, alphas["silu_max"])
        return ("silu_then_clamp", None, alphas["silu_max"], 1.0) if bounded else None
    if not _clamped_to(up, limit):
        return None
    if kinds != ("plain", "sigmoid"):
        name = _OF_GATE.get(kinds)
        return None if name is None or limit is not None or plus_one else (name, None, None, 1.0)
    alpha = alphas["sigmoid"]
    if limit is None:
        swish: _Named = ("silu", None, None, 1.0) if alpha == 1 else ("quick_gelu", alpha, None, 1.0)
        return None if plus_one else swish
    if plus_one:
        return "swiglu_oai", alpha, float(limit), 1.0
    return ("silu_clamp", None, float(limit), 1.0) if alpha == 1 else None


def _softcap(gate: Half, alphas: dict[str, float], up: Factor | None) -> _Named | None:
    """``tanh(g / a) * sigmoid(g) * tanh(u / l)``, a l times smaller than the activation."""
    if up is None or up.kind != "tanh" or alphas["sigmoid"] != 1 or min(alphas["tanh"], up.alpha) <= 0:
        return None
    if (gate.high, up.half.low, up.half.high) != (None, None, None):
        return None
    caps = [float(f"{1 / number:.12g}") for number in (alphas["tanh"], up.alpha)]
    return "silu_softcap", caps[0], caps[1], caps[0] * caps[1]


def _clamped_to(up: Factor | None, limit: float | None) -> bool:
    """Whether the up half, if there is one, is clamped to ``[-limit, limit]``, or not at all."""
    if up is None:
        return True
    return (up.half.low, up.half.high) == ((None, None) if limit is None else (-limit, limit))


def _layout(gate: Half, up: Half | None) -> str | None:
    if up is None:
        return "none" if gate.layout == "none" else None
    if gate.source is not up.source:
        return "separate" if gate.layout == up.layout == "none" else None
    return gate.layout if gate.layout == up.layout and {gate.index, up.index} == {0, 1} else None


def _unknown(halves: Halves, value: fx.Node) -> Refusal:
    """The refusal of a factor: it is no known function, or a known one of something that is no half of the product."""
    reading = halves.reading
    call = reading.call(value)
    name = call.name if call is not None else value.name
    if name not in _FUNCTIONS or call is None or not isinstance(call["x"], fx.Node):
        return Refusal(value, f"Unknown activation between the expert products (at {name}).", _CURE)
    whole, operand = halves.whole(call["x"]), reading.strip(call["x"])
    inner = reading.call(operand if whole in halves.results else whole)
    what = inner.name if inner is not None else getattr(operand, "name", str(operand))
    if whole not in halves.results and inner is not None:
        return Refusal(
            whole, f"The operand of {name} is not the gate half of the first expert product, but what {what} "
            "gives.", _CURE,
        )  # fmt: skip
    return Refusal(
        value, f"The operand of {name} is not the gate half of the first expert product, as far as can be proved (it "
        f"comes from {what}).", "Take the halves with h.chunk(2, dim=-1), or h[..., ::2] and h[..., 1::2].",
    )  # fmt: skip
