"""Integers and masks that are functions of their coordinates alone: positions, and comparisons of them.

Model code makes a causal mask of `arange`, slices, comparisons and gathers at every call, and under torch.compile that
is all in the graph: no number of it depends on what the model is given. `Coordinates` reads such values in closed form,
whatever the sizes: an integer tensor as one linear function of its coordinates, a mask as the inequalities that hold
where it is True. Anything else, or of anything else, is None.

    q, k = arange(T)[:, None], arange(T)[None, :]      1 * i        and 1 * j
    (k <= q) & (q - k < 512)                           i - j >= 0   and 511 + j - i >= 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compile_passes.compat import statically_known_true
from compile_passes.reading import Reading
from compile_passes.vocabulary import Call, equal_sizes, example

#: Where `Coordinates.tell` leaves what an operand of a nested graph is, in the metadata of its placeholder.
TOLD = "moe_ops_coordinates"
# Beyond these a sum of coordinates might not fit its integers, of whatever size a mask can be.
_STEEPEST, _FURTHEST = 16, 2**24
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Line:
    """``constant + sum(slopes[d] * coordinate[d])``, an integer at each element of a tensor."""

    constant: int
    slopes: tuple[int, ...]

    def plus(self, other: Line, times: int = 1) -> Line:
        """The sum with ``times`` as much as ``other``."""
        slopes = tuple(one + times * more for one, more in zip(self.slopes, other.slopes, strict=True))
        return Line(self.constant + times * other.constant, slopes)

    def times(self, factor: int) -> Line:
        """The product with a number."""
        return Line(self.constant * factor, tuple(factor * slope for slope in self.slopes))

    @property
    def is_constant(self) -> bool:
        """Whether it is the same everywhere."""
        return not any(self.slopes)

    def never_negative(self, sizes: Sequence[Any]) -> bool:
        """Whether it is at least 0 in all of a tensor of these sizes, for every input."""
        falling = [(slope, size) for slope, size in zip(self.slopes, sizes, strict=True) if slope < 0]
        if any(type(size) is not int for _, size in falling):
            return False
        return bool(self.constant + sum(slope * (size - 1) for slope, size in falling) >= 0)


@dataclass(frozen=True)
class Where:
    """1, or True, where every one of ``lines`` is at least 0, and 0 elsewhere; without lines, 1 everywhere."""

    lines: frozenset[Line] = frozenset()


Value = Line | Where


class Coordinates:
    """What the values of one graph are, as far as their coordinates tell."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._known: dict[fx.Node, Value | None] = {}

    def value(self, node: Any) -> Value | None:
        """What ``node``, a tensor of the graph, holds at each of its coordinates; None where that is not known."""
        tensor = example(node)
        if tensor is None:
            return None
        if node not in self._known:
            self._known[node] = None
            found = None if self._reading.is_stale(node) else self._found(node)
            self._known[node] = _settled(found, tensor)
        return self._known[node]

    def tell(self, body: fx.Graph, operands: Iterable[Any]) -> None:
        """Leave with the placeholders of ``body``, a graph that this one calls, what the ``operands`` hold."""
        for place, operand in zip(body.find_nodes(op="placeholder"), operands, strict=False):
            value = self.value(operand)
            if TOLD in place.meta and place.meta[TOLD] != value:
                value = None  # called twice, of two things
            place.meta[TOLD] = value

    def _found(self, node: fx.Node) -> Value | None:
        if node.op == "placeholder":
            told: Value | None = node.meta.get(TOLD)
            return told
        call = self._reading.call(node)
        reader = None if call is None else _READERS.get(call.name)
        if call is None or reader is None:
            return None
        read, parameters = reader
        return read(self, node, call) if call.passes_only({"x", *parameters.split()}) else None

    def at(self, value: Any, node: fx.Node) -> Value | None:
        """What an operand of ``node``, a number or a tensor that is broadcast to its shape, is at its coordinates."""
        dims = len(node_shape(node))
        if isinstance(value, bool | int):
            return Where() if value is True else Line(int(value), (0,) * dims)
        found, tensor = self.value(value), example(value)
        if found is None or tensor is None or tensor.dim() > dims:
            return None
        shape = node_shape(node)[dims - tensor.dim() :]
        if not all(_is(one, 1) or equal_sizes(one, other) for one, other in zip(tensor.shape, shape, strict=True)):
            return None
        return _mapped(found, lambda line: Line(line.constant, (0,) * (dims - len(line.slopes)) + line.slopes))

    def line(self, value: Any, node: fx.Node) -> Line | None:
        """As `at`, a number."""
        return _number(self.at(value, node), len(node_shape(node)))


def node_shape(node: fx.Node) -> Sequence[Any]:
    """Sizes of a tensor of the graph."""
    tensor = example(node)
    return () if tensor is None else tensor.shape


def _is(size: Any, number: int) -> bool:
    return statically_known_true(size == number)


def _settled(value: Value | None, tensor: torch.Tensor) -> Value | None:
    """``value`` of ``tensor``: without slopes along dimensions of size 1; None where its numbers might not fit."""
    if isinstance(value, Line) and tensor.dtype not in _INTEGERS:
        return None
    single = [_is(size, 1) for size in tensor.shape]
    if value is None or any(len(line.slopes) != len(single) for line in _lines(value)):
        return None
    value = _mapped(value, lambda line: replace(line, slopes=tuple(
        0 if one else slope for slope, one in zip(line.slopes, single, strict=True))))  # fmt: skip
    fits = all(abs(n) <= _STEEPEST for line in _lines(value) for n in line.slopes)
    return value if fits and all(abs(line.constant) <= _FURTHEST for line in _lines(value)) else None


def _lines(value: Value) -> Iterable[Line]:
    return (value,) if isinstance(value, Line) else value.lines


def _mapped(value: Value, change: Callable[[Line], Line]) -> Value:
    return change(value) if isinstance(value, Line) else Where(frozenset(map(change, value.lines)))


def _never(dims: int) -> Where:
    return Where(frozenset({Line(-1, (0,) * dims)}))


def _number(value: Value | None, dims: int) -> Line | None:
    """A number that may be of a mask which is the same everywhere."""
    if isinstance(value, Where):
        holds = _holds(value)
        return None if holds is None else Line(int(holds), (0,) * dims)
    return value


def _holds(value: Where) -> bool | None:
    """Whether a mask is True everywhere (True), nowhere (False), or neither for all that is known."""
    if any(line.is_constant and line.constant < 0 for line in value.lines):
        return False
    return True if all(line.is_constant for line in value.lines) else None


def _not(value: Where, dims: int) -> Where | None:
    holds = _holds(value)
    if holds is not None:
        return _never(dims) if holds else Where()
    if len(value.lines) != 1:
        return None
    (line,) = value.lines
    return Where(frozenset({line.times(-1).plus(Line(-1, (0,) * dims))}))


# ---- one function for each call that is known


def _arange(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    start, step = call["start"], call["step"]
    return Line(start, (step,)) if type(start) is int and type(step) is int else None


def _add(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    one, other, times = at.line(call["x"], node), at.line(call["y"], node), call["alpha"]
    if one is None or other is None or type(times) is not int:
        return None
    return one.plus(other, times if call.name == "add" else -times)


def _mul(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    both = at.at(call["x"], node), at.at(call["y"], node)
    if all(isinstance(value, Where) for value in both):
        return _and(at, node, call)
    one, other = at.line(call["x"], node), at.line(call["y"], node)
    if one is None or other is None or not (one.is_constant or other.is_constant):
        return None
    return one.times(other.constant) if other.is_constant else other.times(one.constant)


def _neg(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    line = at.line(call["x"], node)
    return None if line is None else line.times(-1)


def _and(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    one, other = at.at(call["x"], node), at.at(call["y"], node)
    return Where(one.lines | other.lines) if isinstance(one, Where) and isinstance(other, Where) else None


def _inverse(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    value, tensor = at.at(call["x"], node), example(call["x"])
    if not isinstance(value, Where) or tensor is None or tensor.dtype != torch.bool:  # of integers, each bit
        return None
    return _not(value, len(node_shape(node)))


def _compared(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    dims = len(node_shape(node))
    x, y = at.at(call["x"], node), at.at(call["y"], node)
    one, other = _number(x, dims), _number(y, dims)
    if one is not None and other is not None:
        return _sign(call.name, one.plus(other, -1))
    if not isinstance(x, Where) or other is None or not other.is_constant:
        return None
    then, otherwise = (_TESTS[call.name](number - other.constant) for number in (1, 0))
    if then == otherwise:
        return Where() if then else _never(dims)
    return x if then else _not(x, dims)


_TESTS: dict[str, Callable[[int], bool]] = {
    "eq": lambda n: n == 0, "ne": lambda n: n != 0, "ge": lambda n: n >= 0, "gt": lambda n: n > 0,
    "le": lambda n: n <= 0, "lt": lambda n: n < 0,
}  # fmt: skip


def _sign(name: str, difference: Line) -> Where | None:
    """Where ``difference`` is at least, at most, ... 0."""
    dims = len(difference.slopes)
    if difference.is_constant:
        return Where() if _TESTS[name](difference.constant) else _never(dims)
    less, one = difference.times(-1), Line(1, (0,) * dims)
    lines = {
        "ge": (difference,), "gt": (difference.plus(one, -1),), "le": (less,), "lt": (less.plus(one, -1),),
        "eq": (difference, less), "ne": (),
    }[name]  # fmt: skip
    return Where(frozenset(lines)) if lines else None


def _filled(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    number = {"ones": 1, "ones_like": 1, "zeros": 0, "zeros_like": 0}.get(call.name, call["fill"])
    dims = len(node_shape(node))
    if number in (0, 1):
        return Where() if number else _never(dims)
    return Line(number, (0,) * dims) if type(number) is int else None


def _same(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    return at.value(call["x"])


def _cast(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    value, tensor = at.value(call["x"]), example(node)
    return value if isinstance(value, Where) or (tensor is not None and tensor.dtype in _INTEGERS) else None


def _view(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    """Reshapes that only add or take away dimensions of size 1."""
    value, before, after = at.value(call["x"]), node_shape(call["x"]), node_shape(node)
    kept, places = ([d for d, size in enumerate(shape) if not _is(size, 1)] for shape in (before, after))
    if value is None or len(kept) != len(places):
        return None
    if not all(equal_sizes(before[d], after[place]) for d, place in zip(kept, places, strict=True)):
        return None
    sources = dict(zip(places, kept, strict=True))
    return _picked(value, [sources.get(d) for d in range(len(after))])


def _picked(value: Value, sources: Sequence[int | None]) -> Value:
    """``value`` with other dimensions: of each the one that it was, or None where its coordinate counts for nothing."""

    def moved(line: Line) -> Line:
        return Line(line.constant, tuple(0 if d is None else line.slopes[d] for d in sources))

    return _mapped(value, moved)


def _expand(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    return at.at(call["x"], node)


def _turned(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    value, dims = at.value(call["x"]), len(node_shape(node))
    if call.name == "permute":
        order = call["dims"]
    else:
        one, other = (call["dim0"], call["dim1"]) if call.name == "transpose" else (-1, -2)
        order = list(range(dims))
        if type(one) is not int or type(other) is not int or dims < 2:
            return None
        order[one], order[other] = order[other], order[one]
    if value is None or not isinstance(order, list | tuple) or not all(type(d) is int for d in order):
        return None
    return _picked(value, [d % dims for d in order])


def _sliced(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    """Basic indexing: slices, numbers, None and the ellipsis."""
    value, before = at.value(call["x"]), node_shape(call["x"])
    parts = list(call["index"]) if isinstance(call["index"], tuple) else [call["index"]]
    rest = len(before) - sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in parts:
        place = parts.index(Ellipsis)
        parts[place : place + 1] = [slice(None)] * rest
    else:
        parts += [slice(None)] * rest
    return None if value is None else _taken(value, before, parts)


def _taken(value: Value, before: Sequence[Any], parts: Sequence[Any]) -> Value | None:
    sources: list[int | None] = []
    starts: list[int] = []
    steps: list[int] = []
    for part in parts:
        if part is None:
            sources.append(None)
            continue
        size, d = before[len(starts)], len(starts)
        start, step = (part.start, part.step) if isinstance(part, slice) else (part, 1)
        start, step = 0 if start is None else start, 1 if step is None else step
        if type(start) is not int or type(step) is not int:
            return None
        if start < 0:
            if type(size) is not int:
                return None
            start = max(start + size, 0)
        starts.append(start)
        steps.append(step)
        if isinstance(part, slice):
            sources.append(d)

    def moved(line: Line) -> Line:
        constant = line.constant + sum(slope * start for slope, start in zip(line.slopes, starts, strict=True))
        return Line(constant, tuple(slope * step for slope, step in zip(line.slopes, steps, strict=True)))

    return _picked(_mapped(value, moved), sources)


def _narrowed(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    """`select`, `narrow` and ATen's `slice` as indexing."""
    value, before, dim = at.value(call["x"]), node_shape(call["x"]), call["dim"] or 0
    if value is None or type(dim) is not int:
        return None
    part = call["index"] if call.name == "select" else slice(call["start"], None, call["step"])
    parts: list[Any] = [slice(None)] * len(before)
    parts[dim] = part
    return _taken(value, before, parts)


def _gathered(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    """``x[i, j]``: as many tensors of positions, broadcast to one shape, as ``x`` has dimensions."""
    value, before, after = at.value(call["x"]), node_shape(call["x"]), node_shape(node)
    index = call["index"] if isinstance(call["index"], list | tuple) else (call["index"],)
    if value is None or len(index) != len(before):
        return None
    places = [at.at(part, node) if isinstance(part, fx.Node) else None for part in index]
    lines = [line for line in places if isinstance(line, Line)]
    if len(lines) != len(before):
        return None
    if not all(_is_inside(line, size, after) for line, size in zip(lines, before, strict=True)):
        return None

    def moved(line: Line) -> Line:
        found = Line(line.constant, (0,) * len(after))
        for slope, place in zip(line.slopes, lines, strict=True):
            found = found.plus(place, slope)
        return found

    return _mapped(value, moved)


def _is_inside(place: Line, size: Any, shape: Sequence[Any]) -> bool:
    """Whether ``place`` is a position of a dimension of this size, everywhere in a tensor of ``shape``."""
    moving = [d for d, slope in enumerate(place.slopes) if slope]
    if not moving:
        return place.constant >= 0 and statically_known_true(size > place.constant)
    (first, *more) = moving
    return not more and place.constant == 0 and place.slopes[first] == 1 and equal_sizes(shape[first], size)


def _cumsum(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    line, dim, dims = at.line(call["x"], node), call["dim"], len(node_shape(node))
    if line is None or not line.is_constant or type(dim) is not int or not dims:
        return None
    slopes = [0] * dims
    slopes[dim] = line.constant
    return Line(line.constant, tuple(slopes))


def _diff(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    """Differences of neighbours along a dimension; the first is that to ``prepend``, one element, if there is one."""
    x, dim, dims = at.value(call["x"]), call["dim"], len(node_shape(node))
    if not isinstance(x, Line) or call["n"] != 1 or type(dim) is not int or call["append"] is not None:
        return None
    slope = Line(x.slopes[dim], (0,) * dims)
    if call["prepend"] is None:
        return slope
    before = at.value(call["prepend"])
    if not isinstance(before, Line) or not _is(node_shape(call["prepend"])[dim], 1):
        return None
    first = list(x.slopes)
    first[dim] = 0
    return slope if Line(x.constant, tuple(first)).plus(before, -1) == slope else None


def _triangle(at: Coordinates, node: fx.Node, call: Call) -> Value | None:
    value, diagonal, dims = at.value(call["x"]), call["diagonal"], len(node_shape(node))
    if not isinstance(value, Where) or type(diagonal) is not int or dims < 2:
        return None
    below = Line(diagonal, (0,) * (dims - 2) + (1, -1))
    kept = below if call.name == "tril" else below.times(-1)
    return Where(value.lines | {kept})


#: What reads a call, and the parameters beside "x" that it accounts for.
_READERS: dict[str, tuple[Callable[[Coordinates, fx.Node, Call], Value | None], str]] = {
    "arange": (_arange, "start end step dtype"),
    "add": (_add, "y alpha"), "sub": (_add, "y alpha"), "mul": (_mul, "y"), "neg": (_neg, ""),
    "and": (_and, "y"), "not": (_inverse, ""),
    **dict.fromkeys(_TESTS, (_compared, "y")),
    **dict.fromkeys(("ones", "ones_like", "zeros", "zeros_like", "full"), (_filled, "size fill dtype")),
    "clone": (_same, ""), "detach": (_same, ""), "cast": (_cast, ""),
    "view": (_view, ""), "expand": (_expand, ""),
    "transpose": (_turned, "dim0 dim1"), "mt": (_turned, ""), "permute": (_turned, "dims"),
    "getslice": (_sliced, "index"),
    "select": (_narrowed, "dim index"), "narrow": (_narrowed, "dim start length"),
    "slice": (_narrowed, "dim start end step"),
    "index": (_gathered, "index"), "fancy": (_gathered, "index"),
    "cumsum": (_cumsum, "dim dtype"), "diff": (_diff, "n dim prepend append"),
    "tril": (_triangle, "diagonal"), "triu": (_triangle, "diagonal"),
}  # fmt: skip
