"""`moe_ops.rows` as kernels: the gradient of the activation between the two products as a pass of its own over sorted
rows. All is computed in fp32 from what stood before the activation, rounded as it was.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from meta.activations import CLAMP_PASSES_AT_BOUNDS
from meta.operands import Glu
from moe_ops.counters import Row
from moe_ops.kernels.triton import permute
from moe_ops.kernels.triton.act_quant import NAN, apply_activation, tanh
from moe_ops.kernels.triton.collect import collect
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.util import cdiv, next_power_of_2, round_to
from moe_ops.kernels.triton.wgrad import gathers, gathers_any_number
from moe_ops.rows import Routed

# Of a program's tile: us on an H200, T = 16384, of 8 x 256 and of 4 x 1024: gpt-oss-120b 615 and 723, Mixtral-8x7B 1450
# and 1603, DeepSeek-V3 832 and 983.
ELEMENTS, COLUMNS = 2048, 256

AT_BOUNDS = tl.constexpr(CLAMP_PASSES_AT_BOUNDS)

Tensor = torch.Tensor

__all__ = ["collect", "gather_rows", "gathers", "gathers_any_number", "glu_rows_backward", "sort_pairs"]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _passes(value, limit):
    """Where `value`, clamped to at most `limit`, has a gradient."""
    if AT_BOUNDS:
        return value <= limit
    else:
        return value < limit


@triton.jit
def _silu_gradient(grad, gate):
    sigmoid = _sigmoid(gate)
    return grad * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))


@triton.jit
def _gate_gradient(grad, gate, alpha, limit, ACTIVATION: tl.constexpr):
    """`grad` times the derivative of the gate's activation; as in `meta/activations.py`, a kink selects."""
    if ACTIVATION == "silu":
        return _silu_gradient(grad, gate)
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        return grad * (cdf + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327)
    elif ACTIVATION == "gelu_tanh":
        bent = tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        curve = 0.5 * gate * (1.0 - bent * bent) * 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
        return grad * (0.5 * (1.0 + bent) + curve)
    elif ACTIVATION == "relu":
        return tl.where(gate <= 0.0, 0.0, grad)
    elif ACTIVATION == "relu2":
        return tl.where(gate <= 0.0, 0.0, 2.0 * grad * gate)
    elif ACTIVATION == "swiglu_oai":
        clipped = tl.minimum(gate, limit, propagate_nan=NAN)
        sigmoid = _sigmoid(alpha * clipped)
        return tl.where(_passes(gate, limit), grad * (sigmoid * (1.0 + alpha * clipped * (1.0 - sigmoid))), 0.0)
    elif ACTIVATION == "quick_gelu":
        sigmoid = _sigmoid(alpha * gate)
        return grad * (sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid)))
    elif ACTIVATION == "silu_softcap":
        bent = tanh(gate / alpha)
        sigmoid = _sigmoid(gate)
        return grad * (sigmoid * (1.0 - bent * bent + alpha * bent * (1.0 - sigmoid)))
    elif ACTIVATION == "silu_then_clamp":
        return _silu_gradient(tl.where(_passes(gate * _sigmoid(gate), limit), grad, 0.0), gate)
    else:
        tl.static_assert(ACTIVATION == "silu_clamp", "unknown activation")
        return tl.where(_passes(gate, limit), _silu_gradient(grad, gate), 0.0)


@triton.jit
def _gradients(grad, gate, up, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """(of the gate, of the up half, whatever when not GATED) from `grad`, that of the activation's result."""
    if not GATED:
        return _gate_gradient(grad, gate, alpha, limit, ACTIVATION), grad
    grad_up = grad * apply_activation(gate, gate, alpha, limit, ACTIVATION, False)
    if ACTIVATION == "swiglu_oai":
        factor = tl.clamp(up, -limit, limit, propagate_nan=NAN) + 1.0
        grad_up = tl.where(_passes(tl.abs(up), limit), grad_up, 0.0)
    elif ACTIVATION == "silu_clamp" or ACTIVATION == "silu_then_clamp":
        factor = tl.clamp(up, -limit, limit, propagate_nan=NAN)
        grad_up = tl.where(_passes(tl.abs(up), limit), grad_up, 0.0)
    elif ACTIVATION == "silu_softcap":
        bent = tanh(up / limit)
        factor = limit * bent
        grad_up = grad_up * (1.0 - bent * bent)
    else:
        factor = up
    return _gate_gradient(grad * factor, gate, alpha, limit, ACTIVATION), grad_up


@triton.jit
def _load_halves(gate, up, at, inside, column, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """(gate, up) [ROWS, COLUMNS] fp32; `at`: where the rows begin, `column`: the first of the tile."""
    if INTERLEAVED:
        both = column * 2 + tl.arange(0, 2 * COLUMNS)[None, :]
        first, second = tl.split(tl.load(gate + at + both, mask=inside).reshape(at.shape[0], COLUMNS, 2))
    else:
        one = column + tl.arange(0, COLUMNS)[None, :]
        first = tl.load(gate + at + one, mask=inside)
        second = first
        if GATED:
            second = tl.load(up + at + one, mask=inside)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _inside(exists, column, I: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements of a tile of COLUMNS there are; WIDE: of both halves side by side."""
    if WIDE:
        return exists[:, None] & (column * 2 + tl.arange(0, 2 * COLUMNS) < 2 * I)[None, :]
    else:
        return exists[:, None] & (column + tl.arange(0, COLUMNS) < I)[None, :]


@triton.jit(do_not_specialize=["R"])
def _glu_rows_backward_kernel(
    grad,
    gate,
    up,
    weights,
    row_to_pair,
    pair_to_row,
    offsets,
    grad_gate,
    grad_up,
    value,
    dots,
    of_weights,
    R,
    alpha,
    limit,
    E: tl.constexpr,
    I: tl.constexpr,
    STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: whole rows, COLUMNS at a time; a row's dot product is summed in the order of its columns, and goes
    to the weight of the row's pair. Of as many pairs it sets the gradients of dropped ones to 0.

    Bytes: R * I elements each of `grad`, the halves, their gradients and `value`, if it is asked for, which may be the
    memory of `grad`.
    """
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    if of_weights is not None:
        dropped = tl.load(pair_to_row + row, mask=row < R, other=0) < 0
        tl.store(of_weights + row, tl.zeros((ROWS,), tl.float32), mask=dropped)
    end = tl.load(offsets + E - 1)
    if first_row < end:
        exists = row < end
        row64 = row.to(tl.int64)[:, None]
        weight = tl.full((ROWS,), 1.0, tl.float32)
        if weights is not None:
            pair = tl.load(row_to_pair + row, mask=exists, other=0)
            weight = tl.load(weights + pair, mask=exists, other=0.0).to(tl.float32)
        dot = tl.zeros((ROWS,), tl.float32)
        if dots is not None:
            dot = tl.load(dots + row, mask=exists, other=0.0).to(tl.float32)
        for column in range(0, I, COLUMNS):
            inside = _inside(exists, column, I, False, COLUMNS)
            wide = _inside(exists, column, I, INTERLEAVED, COLUMNS)
            one = column + tl.arange(0, COLUMNS)[None, :]
            first, second = _load_halves(gate, up, row64 * STRIDE, wide, column, GATED, INTERLEAVED, COLUMNS)
            incoming = tl.load(grad + row64 * I + one, mask=inside, other=0.0).to(tl.float32)
            activated = apply_activation(first, second, alpha, limit, ACTIVATION, GATED)
            dot += tl.sum(tl.where(inside, incoming * activated, 0.0), axis=1)
            if value is not None:
                weighted = round_to(activated * weight[:, None], value.dtype.element_ty)
                tl.store(value + row64 * I + one, weighted, mask=inside)
            of_gate, of_up = _gradients(incoming * weight[:, None], first, second, alpha, limit, ACTIVATION, GATED)
            of_gate = round_to(of_gate, grad_gate.dtype.element_ty)
            if INTERLEAVED:
                of_up = round_to(of_up, grad_gate.dtype.element_ty)
                both = tl.join(of_gate, of_up).reshape(ROWS, 2 * COLUMNS)
                tl.store(grad_gate + row64 * STRIDE + column * 2 + tl.arange(0, 2 * COLUMNS)[None, :], both, mask=wide)
            else:
                tl.store(grad_gate + row64 * STRIDE + one, of_gate, mask=inside)
                if GATED:
                    tl.store(grad_up + row64 * STRIDE + one, round_to(of_up, grad_gate.dtype.element_ty), mask=inside)
        if of_weights is not None:
            tl.store(of_weights + pair, dot, mask=exists)


def sort_pairs(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None, *, counted_for: Tensor | None) -> Routed:
    """As :func:`moe_ops.rows.sort_pairs`."""
    return Routed(
        *permute.sort_pairs(topk_ids, num_experts, expert_map, load=None if counted_for is None else Row(counted_for))
    )


def gather_rows(tokens: Tensor, row_to_pair: Tensor, pair_to_row: Tensor, topk_weights: Tensor | None = None) -> Tensor:
    """As :func:`moe_ops.rows.gather_rows`, but rows past the last are uninitialised."""
    return permute.gather_rows(tokens, pair_to_row, topk_weights)


def _halves(gate_up: Tensor, up: Tensor | None, layout: str) -> tuple[Tensor, Tensor, int, int]:
    """(gate, up or whatever, elements from row to row, I) of contiguous tensors."""
    width = gate_up.shape[1]
    if layout in ("concat", "interleaved"):
        return gate_up, gate_up[:, width // 2 :] if layout == "concat" else gate_up, width, width // 2
    return gate_up, gate_up if up is None else up, width, width


def glu_rows_backward(
    grad: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    topk_weights: Tensor | None,
    places: tuple[Tensor, Tensor],
    glu: Glu,
    offsets: Tensor,
    *,
    value: bool,
    dots: Tensor | None,
    in_place: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """As :func:`moe_ops.rows.glu_rows_backward`, but rows past the last are uninitialised."""
    gate, other, stride, columns = _halves(gate_up, up, glu.layout)
    wide = min(COLUMNS, next_power_of_2(columns))
    rows = ELEMENTS // wide
    grad_gate, grad_up = gate_up, up  # each element is read before it is written, by the same program
    if not in_place:
        grad_gate, grad_up = torch.empty_like(gate_up), None if up is None else torch.empty_like(up)
    weighted = grad if value else None  # read where it is written, by the same program
    of_weights = None if topk_weights is None else grad.new_empty(topk_weights.shape, dtype=torch.float32)
    if grad.numel() and offsets.numel():
        gated, interleaved = glu.layout != "none", glu.layout == "interleaved"
        of_up = grad_up if grad_up is not None else _halves(grad_gate, None, glu.layout)[1]
        launch(
            _glu_rows_backward_kernel,
            (cdiv(gate_up.shape[0], rows),),
            grad,
            gate,
            other,
            None if topk_weights is None else topk_weights.contiguous(),
            *places,
            offsets,
            grad_gate,
            of_up,
            weighted,
            dots,
            of_weights,
            gate_up.shape[0],
            glu.alpha,
            glu.limit,
            offsets.shape[0],
            columns,
            stride,
            glu.activation,
            gated,
            interleaved,
            rows,
            wide,
            num_warps=8,
        )
    elif of_weights is not None:
        of_weights.zero_()  # without experts all are dropped
    return grad_gate, grad_up, weighted, of_weights
