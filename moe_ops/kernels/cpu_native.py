"""What the CPU backend has in C++ (``cpu.cpp``).

Every function but :func:`selected` returns None for what it does not serve: other dtypes, activations that it does not
know, and anything where no C++ compiler is found. Plain tensor code computes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int64
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from meta import routing
from meta.activations import ACTIVATIONS
from meta.calls import ExpertsCall
from meta.operands import Glu
from moe_ops import counters
from moe_ops.kernels import cpu_library as c
from moe_ops.kernels.cpu_costs import costs_of
from moe_ops.kernels.cpu_library import DTYPES, library

# Elements between the products of experts that pass both together: what is there stays in a cache, and the next ones
# have its memory. us of a layer's products and activation on two cores in bf16, 8 experts, K = 2, T = 4096, all experts
# at once and four lots: H = 256 7785 and 5159, H = 768 26125 and 23838. Fewer elements are not worth a lot's threads
# that are woken: T = 1024, H = 768 7199 and 8736.
_IN_A_LOT = 2**21
_IDS = (torch.int32, torch.int64)
_PRODUCTS = (torch.float32, torch.bfloat16)  # few CPUs multiply fp16
# In the order of cpu.cpp.
_SILU, _BY_SIGMOID, _GELU, _GELU_TANH, _RELU, _RELU2 = range(6)
_NO_WEIGHT = c.Weight()


class _Gate(NamedTuple):
    """What cpu.cpp computes of a gate, and where its limit holds: before that, or after."""

    kind: int
    before: bool = False
    after: bool = False


_GATES = {
    "silu": _Gate(_SILU),
    "gelu": _Gate(_GELU),
    "gelu_tanh": _Gate(_GELU_TANH),
    "relu": _Gate(_RELU),
    "relu2": _Gate(_RELU2),
    "swiglu_oai": _Gate(_BY_SIGMOID, before=True),
    "silu_clamp": _Gate(_SILU, before=True),
    "silu_then_clamp": _Gate(_SILU, after=True),
    "quick_gelu": _Gate(_BY_SIGMOID),
}


def selected(choice_TE: Tensor, scores_TE: Tensor, k: int, shares: bool) -> tuple[Tensor, Tensor]:
    """:func:`meta.routing.selected`, of fp32 without sorting, and with plain tensor code's bits."""
    if choice_TE.dtype != torch.float32 or (native := library()) is None:
        return routing.selected(choice_TE, scores_TE, k, shares)
    (tokens, number), choice_TE, scores_TE = choice_TE.shape, choice_TE.contiguous(), scores_TE.contiguous()
    weights = torch.empty((tokens, k), dtype=torch.float32, device="cpu")
    ids = torch.empty((tokens, k), dtype=torch.int32, device="cpu")
    tensors = choice_TE.data_ptr(), scores_TE.data_ptr()
    results = weights.data_ptr(), ids.data_ptr()
    native.moe_select(*tensors, tokens, number, k, shares, *results, torch.get_num_threads())
    return weights, ids


def experts(call: ExpertsCall) -> Tensor | None:
    """``fused_experts`` of weights that are multiplied as they are stored, fp32 or bf16, and biases in their dtype."""
    weights, x, glu = call.experts, call.hidden_states.data, call.experts.glu
    of, dtype, biased = _GATES.get(glu.activation), x.dtype, weights.gate_up_bias
    if of is None or dtype not in _PRODUCTS or weights.scheme.quantized or call.topk_ids.dtype not in _IDS:
        return None
    if any(bias is not None and bias.dtype != dtype for bias in (biased, weights.down_bias)):
        return None
    if (native := library()) is None:
        return None
    (tokens, top_k), ids, gate_up = call.topk_ids.shape, call.topk_ids.contiguous(), weights.gate_up.data
    number, columns, hidden = gate_up.shape
    x, topk_weights = x.contiguous(), call.topk_weights.float().contiguous()
    width, pairs = weights.down.data.shape[2], tokens * top_k
    gate_bias, up_bias = biased, None
    if biased is not None and weights.up is not None:
        gate_bias, up_bias = biased.split_with_sizes((columns, columns), dim=1)
    layer = c.Layer(
        *(DTYPES[dtype], tokens, top_k, hidden, columns, width),
        *(x.data_ptr(), topk_weights.data_ptr(), call.weight_on_input),
        _weight(gate_up, gate_bias),
        _NO_WEIGHT if weights.up is None else _weight(weights.up.data, up_bias),
        _weight(weights.down.data, weights.down_bias),
        _glu(of, glu, 0, width, columns, columns, width),
    )
    costs = costs_of(gate_up)
    found = torch.empty(pairs + 3 * number, dtype=torch.int64, device="cpu")
    ends = found.data_ptr() + 8 * pairs
    lots = c.Lots(0, number, costs.few, ends, ends + 8 * number, ends + 16 * number, found.data_ptr())
    of_layer, of_lots, sizes = byref(layer), byref(lots), (c_int64 * 2)()
    expert_map = None if call.expert_map is None else call.expert_map.long().contiguous()
    native.moe_lay_out(
        of_layer,
        ids.data_ptr(),
        ids.dtype == torch.int64,
        None if expert_map is None else expert_map.data_ptr(),
        -1 if expert_map is None else len(expert_map),
        pairs if call.capacity is None else call.capacity,
        max(_IN_A_LOT // max(columns, 1), 1),
        costs.of_rows,
        of_lots,
        sizes,
    )
    if counters.active:
        counters.count(weights.down.data, found[pairs + 2 * number :].tolist())
    # Two pieces, as glibc does not keep one of more than 32 MB: its pages would be new in every call.
    memory, results = (torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes)
    out = torch.empty((tokens, hidden), dtype=dtype, device="cpu")
    pieces = memory.data_ptr(), results.data_ptr(), out.data_ptr()
    if native.moe_experts(of_layer, of_lots, *pieces, torch.get_num_threads()):
        raise RuntimeError("fused_experts: torch refuses a product of its experts on a CPU; its own words are above.")
    return out


def _weight(data: Tensor, bias: Tensor | None) -> c.Weight:
    """``[E, N, K]`` and ``[E, N]``."""
    if bias is None:
        return c.Weight(data.data_ptr(), *data.stride())
    return c.Weight(data.data_ptr(), *data.stride(), bias.data_ptr(), *bias.stride())


@lru_cache(maxsize=64)
def _glu(of: _Gate, glu: Glu, rows: int, columns: int, gate_stride: int, up_stride: int, out_stride: int) -> c.Glu:
    """Of gates and ups in rows with these strides."""
    row, interleaved = ACTIVATIONS[glu.activation], glu.layout == "interleaved"
    return c.Glu(
        *(of.kind, rows, columns, gate_stride, up_stride, 2 if interleaved else 1, out_stride),
        -1 if glu.layout == "none" else 1 if interleaved else columns,
        glu.alpha,
        glu.limit if of.before else torch.inf,
        glu.limit if of.after else torch.inf,
        glu.limit if row.clamp_up else torch.inf,
        row.up_offset,
    )


def activate(results: Sequence[Tensor], glu: Glu, out: Tensor) -> Tensor | None:
    """``out [R, I]``, of ``[R, N]`` or of two halves in its dtype, whose rows are contiguous."""
    of = _GATES.get(glu.activation)
    if of is None or (native := library()) is None or out.dtype not in DTYPES:
        return None
    first, last, (rows, columns) = results[0], results[-1], out.shape
    how = _glu(of, glu, rows, columns, first.stride(0), last.stride(0), out.stride(0))
    if len(results) == 2:
        up: int | None = last.data_ptr()
    else:
        up = None if how.up_place < 0 else first.data_ptr() + how.up_place * out.element_size()
    native.moe_activate(DTYPES[out.dtype], first.data_ptr(), up, out.data_ptr(), byref(how), torch.get_num_threads())
    return out


def combine(rows: Tensor, places_TK: Tensor, weights_TK: Tensor | None, added_TH: Tensor | None) -> Tensor | None:
    """Weighted sums ``[T, H]`` of rows, at int64 places."""
    if (native := library()) is None or rows.dtype not in DTYPES:
        return None
    if added_TH is not None and added_TH.dtype != rows.dtype:
        return None
    rows, places = rows.contiguous(), places_TK.contiguous()
    weights = None if weights_TK is None else weights_TK.float().contiguous()
    added = None if added_TH is None else added_TH.contiguous()
    out = rows.new_empty((len(places), rows.shape[1]))
    native.moe_combine(
        DTYPES[rows.dtype],
        rows.data_ptr(),
        places.data_ptr(),
        None if weights is None else weights.data_ptr(),
        None if added is None else added.data_ptr(),
        out.data_ptr(),
        byref(c.Sum(*places.shape, rows.shape[1], len(rows))),
        torch.get_num_threads(),
    )
    return out
