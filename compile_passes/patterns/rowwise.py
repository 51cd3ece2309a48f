"""Row-wise code between the second expert product and the combine: a norm of each expert's result, for example.

Code that makes each row of its result of the same row of its operand alone does not care in which order rows are, so
it may stay in the graph, and read rows that the operators sorted in their own way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compile_passes.match import Staged
from compile_passes.reading import Reading
from compile_passes.safety import CREATES, readers_of_numbers
from compile_passes.vocabulary import Call, equal_sizes, example, rank

_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "square", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "erf", "relu",
     "silu", "gelu", "sigmoid", "tanh", "softplus", "clamp", "addcmul", "cast", "clone"}
)  # fmt: skip
_REDUCTIONS = frozenset({"mean", "sum", "amax", "var", "vector_norm", "softmax"})
_READ = "x y alpha rounding_mode tensor1 tensor2 value approximate min max beta threshold dim keepdim dtype unbiased"
# A norm spelled out has about ten calls.
_MOST = 32


def row_wise(reading: Reading, rows: fx.Node) -> Staged | None:
    """The code that makes one value of ``rows`` [R, H], row by row, and whose other values nobody else reads."""
    count = _rows_in(rows)
    if count is None:
        return None
    nodes, beside = {rows}, dict[fx.Node, None]()
    heap, seen = [(reading.order[reader], reader) for reader in reading.readers(rows)], set[fx.Node]()
    heapq.heapify(heap)
    while heap and len(nodes) <= _MOST:
        node = heapq.heappop(heap)[1]
        if node in seen or reading.named(node, *CREATES) is not None:
            continue
        seen.add(node)
        others = _step(reading, node, nodes, count)
        if others is None:
            continue
        nodes.add(node)
        beside.update(dict.fromkeys(others))
        for reader in reading.readers(node):
            heapq.heappush(heap, (reading.order[reader], reader))
    ends = [node for node in nodes if any(reader not in nodes for reader in readers_of_numbers(reading, node))]
    inside = nodes - {rows}
    if len(ends) != 1 or ends[0] is rows or any(reading.is_writer(node) for node in inside):
        return None
    return Staged(rows, ends[0], frozenset(inside), tuple(beside))


def _rows_in(node: Any) -> Any:
    tensor = example(node)
    return tensor.shape[0] if tensor is not None and tensor.dim() > 0 else None


def _step(reading: Reading, node: fx.Node, rows: set[fx.Node], count: Any) -> Sequence[fx.Node] | None:
    """The operands beside ``rows`` of which ``node`` makes a row of each row; None where it does something else."""
    call, made = reading.call(node), example(node)
    if call is None or made is None or made.dim() == 0 or not equal_sizes(made.shape[0], count):
        return None
    if not made.dtype.is_floating_point or made.dtype.itemsize < 2:
        return None  # a sum in another order, which is as accurate, would come out a whole step apart
    operands: list[fx.Node] = []
    fx.map_arg(tuple(call.args.values()), operands.append)
    inside = [operand for operand in operands if operand in rows]
    beside = [operand for operand in operands if operand not in rows and example(operand) is not None]
    if len(inside) + len(beside) != len(operands) or any(operand not in call.args.values() for operand in operands):
        return None  # sizes, and lists of tensors
    if call.name == "norm":
        return beside if inside == [call["x"]] and _norms_rows(call) else None
    if call.name == "view":
        return [] if inside == operands[:1] and equal_sizes(_rows_in(call["x"]), count) else None
    if not call.passes_only(_READ.split()) and call.name != "cast":
        return None
    if call.name in _REDUCTIONS:
        return [] if inside == operands and _keeps_rows(call) else None
    fits = call.name in _ELEMENTWISE and all(rank(operand) == made.dim() for operand in inside)
    return beside if fits and all(_is_alike_for_all(operand, made) for operand in beside) else None


def _keeps_rows(call: Call) -> bool:
    """Whether a reduction leaves the first dimension alone."""
    dims, size = call["dim"], rank(call["x"]) or 0
    dims = list(dims) if isinstance(dims, list | tuple) else [dims]
    return bool(dims) and all(type(dim) is int and -size <= dim < size and dim % size != 0 for dim in dims)


def _norms_rows(call: Call) -> bool:
    """Whether a norm is over the last dimensions, and not the first one."""
    shapes = [value for value in call.args.values() if isinstance(value, list | tuple | torch.Size)]
    return len(shapes) == 1 and 0 < len(shapes[0]) < (rank(call["x"]) or 0)


def _is_alike_for_all(value: fx.Node, made: torch.Tensor) -> bool:
    """Whether ``value`` is broadcast over the first dimension of ``made``."""
    tensor = example(value)
    if tensor is None or tensor.dim() > made.dim():
        return False
    return tensor.dim() < made.dim() or equal_sizes(tensor.shape[0], 1)
