"""What is computed from the halves of the first expert product: read as a number times a product of known functions.

Spellings are equal because the formulas are: `x * sigmoid(x)`, `F.silu(x)`, `x / (1 + exp(-x))` and
`0.5 * x * (1 + tanh(x / 2))` are all x and sigmoid(x) as factors. The rules are

    sigmoid(z) = 1 / (1 + exp(-z))          2 sigmoid(2 z) = 1 + tanh(z)        sigmoid(-z) = 1 - sigmoid(z)
    2 cdf(x) = 1 + erf(x / sqrt(2))         silu(z) = z sigmoid(z)              gelu(x) = x cdf(x)

with z a multiple of x, and `gelu(approximate="tanh")` alike, of a cubic in x. A sum that no rule reads is unknown. A
factor may have one number for each row, as routing weights have: what it is others have to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from compile_passes.patterns.halves import Half, Halves, finite_bounds
from compile_passes.vocabulary import Call, equal_sizes, example, has_sizes, same_shape

# A formula of more factors is none of ours.
_MOST_FACTORS = 8
_HIGHEST_POWER = 3
# The argument of tanh in gelu's approximation: _LINEAR * x + _CUBIC * x ** 3.
_LINEAR = math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
# Constants of formulas are written with this relative precision, and better.
_PRECISION = 1e-6
_READ = "mul div neg square pow addcmul add sub silu gelu relu sigmoid tanh erf clamp reciprocal"


@dataclass(frozen=True)
class Factor:
    """A function of ``half``, x.

    kind: "plain" x, "plus_one" x + 1, "sigmoid" and "tanh" of alpha x, "relu", "cdf" of the normal distribution,
        "cdf_tanh" its approximation, "silu_max" min(silu(x), alpha); "erf" and "tanh_cubic" 2 cdf - 1 of either.
    """

    kind: str
    half: Half
    alpha: float = 1.0


@dataclass(frozen=True)
class OfRows:
    """``weights`` [..., 1], which multiply rows in ``product`` [..., I]."""

    weights: fx.Node
    product: fx.Node


@dataclass(frozen=True)
class Term:
    """``coefficient`` times the product of ``factors``, and of what has one number for each row."""

    coefficient: float
    factors: tuple[Factor, ...] = ()
    of_rows: tuple[OfRows, ...] = ()

    def __mul__(self, other: Term) -> Term:
        factors, of_rows = self.factors + other.factors, self.of_rows + other.of_rows
        return Term(self.coefficient * other.coefficient, factors, of_rows)


@dataclass(frozen=True)
class _Polynomial:
    """The coefficients, by power, of a polynomial in ``half``, which a constant has none of."""

    half: Half | None
    terms: dict[int, float]

    def __add__(self, other: _Polynomial) -> _Polynomial | None:
        powers = {*self.terms, *other.terms}
        summed = {power: self.terms.get(power, 0.0) + other.terms.get(power, 0.0) for power in powers}
        return self._of_both(other, summed)

    def __mul__(self, other: _Polynomial) -> _Polynomial | None:
        product: dict[int, float] = {}
        for power, number in self.terms.items():
            for more, factor in other.terms.items():
                product[power + more] = product.get(power + more, 0.0) + number * factor
        return self._of_both(other, product)

    def _of_both(self, other: _Polynomial, terms: dict[int, float]) -> _Polynomial | None:
        if max(terms, default=0) > _HIGHEST_POWER or (self.half and other.half and self.half != other.half):
            return None
        return _Polynomial(self.half or other.half, {power: number for power, number in terms.items() if number != 0})

    def multiple(self) -> float | None:
        """a of a x."""
        return self.terms[1] if set(self.terms) == {1} else None

    def is_cubic_of_gelu(self, times: float) -> bool:
        """Whether it is ``times`` the argument of tanh in gelu's approximation."""
        if set(self.terms) != {1, 3}:
            return False
        return _close(self.terms[1], times * _LINEAR) and _close(self.terms[3], times * _CUBIC)


def _is_trained(value: fx.Node) -> bool:
    """Whether a gradient passes: at 0 that of a clamp is 1, and of relu 0, by which weights of 0 would never change."""
    made = example(value)
    return made is None or made.requires_grad


class Formulas:
    """Reads formulas of ``halves``.

    Attributes:
        stuck: the innermost node of a formula that could not be read, or None.
    """

    def __init__(self, halves: Halves) -> None:
        self.halves = halves
        self.stuck: fx.Node | None = None
        self._terms: dict[fx.Node, Term | None] = {}
        self._polynomials: dict[fx.Node, _Polynomial | None] = {}

    def term(self, value: Any) -> Term | None:
        """The product that ``value`` is, or None."""
        value = self.halves.uncast(value)
        if type(value) in (int, float):
            return Term(float(value))
        if not isinstance(value, fx.Node):
            return None
        if value not in self._terms:
            found = self._read(value)
            if found is not None and len(found.factors) > _MOST_FACTORS:
                found = None
            if found is None and self.stuck is None:
                self.stuck = value
            self._terms[value] = found
        return self._terms[value]

    def _read(self, value: fx.Node) -> Term | None:
        half = self.halves.half(value)
        if half is not None:
            is_relu = half.is_positive_part and not _is_trained(value)
            return Term(1.0, (Factor("relu", replace(half, low=None)) if is_relu else Factor("plain", half),))
        weighted = self._weighted(value)
        if weighted is not None:
            term = self.term(weighted[0])
            return None if term is None else term * Term(1.0, of_rows=(OfRows(weighted[1], value),))
        call = self.halves.elementwise(value, _READ, "y approximate tensor1 tensor2 min max")
        return None if call is None else _STEPS[call.name](self, call)

    def _weighted(self, value: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """(rows, weights) of ``rows [..., I] * weights [..., 1]``."""
        call, shape = self.halves.reading.read(value, "mul", "y"), example(value)
        if call is None or shape is None or shape.dim() == 0 or equal_sizes(shape.shape[-1], 1):
            return None
        for one, other in (("x", "y"), ("y", "x")):
            rows, weights = call[one], call[other]
            if same_shape(rows, value) and has_sizes(weights, [*shape.shape[:-1], 1]):
                return rows, weights
        return None

    # ---- products

    def _product(self, call: Call) -> Term | None:
        one = self.term(call["x"])
        other = None if one is None else self.term(call["y"])
        return None if one is None or other is None else one * other

    def _quotient(self, call: Call) -> Term | None:
        above = self.term(call["x"])
        below = None if above is None else self._inverse(call["y"])
        return None if above is None or below is None else above * below

    def _reciprocal(self, call: Call) -> Term | None:
        return self._inverse(call["x"])

    def _inverse(self, value: Any) -> Term | None:
        """1 over a number, or over ``1 + exp(z)``."""
        value = self.halves.uncast(value)
        if type(value) in (int, float):
            return Term(1 / value) if value != 0 else None
        call = self.halves.elementwise(value, "add", "y")
        found = None if call is None else _number_and_rest(call)
        inner = self.halves.elementwise(self.halves.uncast(found[1]), "exp") if found and found[0] == 1 else None
        argument = None if inner is None else self._polynomial(inner["x"])
        return None if argument is None else _sigmoid(argument, -1.0)

    def _negative(self, call: Call) -> Term | None:
        term = self.term(call["x"])
        return None if term is None else Term(-1.0) * term

    def _power(self, call: Call) -> Term | None:
        power = 2 if call.name == "square" else call["y"]
        term = self.term(call["x"]) if power in (2, 3) else None
        if term is None:
            return None
        return term * term if power == 2 else term * term * term

    # ---- sums

    def _sum(self, call: Call) -> Term | None:
        sign = -1.0 if call.name == "sub" else 1.0
        found = _number_and_rest(call)
        if found is None:
            return self._common_factor(call) if sign > 0 else None
        number, rest = found
        term = self.term(rest)
        if term is None:
            return None
        first = rest is call["x"]
        return _shifted(sign * number if first else number, term if first else Term(sign) * term)

    def _common_factor(self, call: Call) -> Term | None:
        """``x + x * y`` is ``x * (1 + y)``."""
        for one, other in (("x", "y"), ("y", "x")):
            product = self.halves.elementwise(self.halves.uncast(call[other]), "mul", "y")
            for factor, rest in (("x", "y"), ("y", "x")) if product is not None else ():
                if product is not None and self._same(call[one], product[factor]):
                    return self._one_more(call[one], product[rest])
        return None

    def _added_product(self, call: Call) -> Term | None:
        """``addcmul(x, x, y)``."""
        for one, other in (("tensor1", "tensor2"), ("tensor2", "tensor1")):
            if self._same(call["x"], call[one]):
                return self._one_more(call["x"], call[other])
        return None

    def _one_more(self, value: Any, other: Any) -> Term | None:
        term = self.term(value)
        more = None if term is None else self.term(other)
        shifted = None if more is None else _shifted(1.0, more)
        return None if term is None or shifted is None else term * shifted

    def _same(self, one: Any, other: Any) -> bool:
        return self.halves.reading.same(self.halves.uncast(one), self.halves.uncast(other))

    # ---- functions

    def _function(self, call: Call) -> Term | None:
        argument = self._polynomial(call["x"])
        half = None if argument is None else argument.half
        if argument is None or half is None:
            return None
        multiple = argument.multiple()
        if call.name == "sigmoid":
            return _sigmoid(argument, 1.0)
        if call.name == "silu":
            factors = (Factor("plain", half), Factor("sigmoid", half, _rounded(multiple or 0.0)))
            return Term(multiple, factors) if multiple else None
        if call.name == "tanh":
            if argument.is_cubic_of_gelu(1.0):
                return Term(1.0, (Factor("tanh_cubic", half),))
            return Term(1.0, (Factor("tanh", half, multiple),)) if multiple else None
        if call.name == "relu":
            return Term(multiple, (Factor("relu", half),)) if multiple and multiple > 0 else None
        if call.name == "erf":
            return Term(1.0, (Factor("erf", half),)) if multiple and _close(multiple, math.sqrt(0.5)) else None
        kind = {"none": "cdf", "tanh": "cdf_tanh"}.get(call["approximate"])
        return Term(1.0, (Factor("plain", half), Factor(kind, half))) if kind and multiple == 1 else None

    def _clamped(self, call: Call) -> Term | None:
        """A clamp of silu from above; one at infinity is none."""
        if not all(bound is None or type(bound) in (int, float) for bound in (call["min"], call["max"])):
            return None
        low, high = finite_bounds(call)
        term = self.term(call["x"])
        if term is None or (low is None and high is None):
            return term
        half = term.factors[0].half if term.factors else None
        silu = half is not None and is_silu(term, half)
        return Term(1.0, (Factor("silu_max", half, float(high)),)) if silu and half and low is None and high else None

    # ---- arguments of functions

    def _polynomial(self, value: Any) -> _Polynomial | None:
        value = self.halves.uncast(value)
        if type(value) in (int, float):
            return _Polynomial(None, {0: float(value)})
        if not isinstance(value, fx.Node):
            return None
        if value not in self._polynomials:
            self._polynomials[value] = self._read_polynomial(value)
        return self._polynomials[value]

    def _read_polynomial(self, value: fx.Node) -> _Polynomial | None:
        half = self.halves.half(value)
        if half is not None:
            return _Polynomial(half, {1: 1.0})
        call = self.halves.elementwise(value, "add sub mul div neg square pow", "y")
        one = None if call is None else self._polynomial(call["x"])
        if call is None or one is None:
            return None
        if call.name in ("square", "pow"):
            power = 2 if call.name == "square" else call["y"]
            squared = one * one if power in (2, 3) else None
            return squared if squared is None or power == 2 else squared * one
        if call.name == "neg":
            return one * _Polynomial(None, {0: -1.0})
        if call.name == "div":
            by = call["y"]
            return one * _Polynomial(None, {0: 1 / by}) if type(by) in (int, float) and by != 0 else None
        other = self._polynomial(call["y"])
        if other is None:
            return None
        if call.name == "mul":
            return one * other
        signed = other * _Polynomial(None, {0: -1.0 if call.name == "sub" else 1.0})
        return None if signed is None else one + signed


def is_silu(term: Term, half: Half) -> bool:
    """Whether ``term`` is silu of ``half``."""
    wanted = {Factor("plain", half), Factor("sigmoid", half, 1.0)}
    return term.coefficient == 1 and not term.of_rows and len(term.factors) == 2 and set(term.factors) == wanted


def _sigmoid(argument: _Polynomial, sign: float) -> Term | None:
    """sigmoid of ``sign`` times the argument."""
    multiple = argument.multiple()
    if argument.half is None:
        return None
    if argument.is_cubic_of_gelu(2.0 * sign):
        return Term(1.0, (Factor("cdf_tanh", argument.half),))
    return Term(1.0, (Factor("sigmoid", argument.half, _rounded(sign * multiple)),)) if multiple else None


def _shifted(number: float, term: Term) -> Term | None:
    """``number + term`` as a product."""
    if number == 0:
        return term
    if len(term.factors) != 1 or term.of_rows:
        return None
    (factor,) = term.factors
    plus, minus = _close(term.coefficient, number), _close(term.coefficient, -number)
    if factor.kind == "plain" and plus:
        return Term(number, (replace(factor, kind="plus_one"),))
    if factor.kind == "tanh" and (plus or minus):
        alpha = _rounded((2 if plus else -2) * factor.alpha)
        return Term(2 * number, (Factor("sigmoid", factor.half, alpha),))
    if factor.kind == "sigmoid" and minus:
        return Term(number, (replace(factor, alpha=-factor.alpha),))
    kind = {"erf": "cdf", "tanh_cubic": "cdf_tanh"}.get(factor.kind)
    return Term(2 * number, (Factor(kind, factor.half),)) if kind and plus else None


def _number_and_rest(call: Call) -> tuple[float, Any] | None:
    """(the number, the other operand) of a call with one number."""
    for number, rest in (("x", "y"), ("y", "x")):
        if type(call[number]) in (int, float):
            return float(call[number]), call[rest]
    return None


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_PRECISION)


def _rounded(number: float) -> float:
    """``number`` without the rounding errors of what was computed of constants."""
    return float(f"{number:.12g}")


_STEPS: dict[str, Callable[[Formulas, Call], Term | None]] = {
    "mul": Formulas._product, "div": Formulas._quotient, "reciprocal": Formulas._reciprocal,
    "neg": Formulas._negative, "square": Formulas._power, "pow": Formulas._power, "add": Formulas._sum,
    "sub": Formulas._sum, "addcmul": Formulas._added_product, "clamp": Formulas._clamped,
    **dict.fromkeys(("silu", "gelu", "relu", "sigmoid", "tanh", "erf"), Formulas._function),
}  # fmt: skip
