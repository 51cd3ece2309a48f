"""The C++ of ``cpu.cpp``, built at the first call, and what calls it.

Every function returns None for what it does not serve: other dtypes, rows of tables that it does not know, and anything
where no C++ compiler is found. Plain tensor code computes that.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta import routing
from meta.activations import ACTIVATIONS
from meta.calls import ExpertsCall
from meta.operands import Glu
from moe_ops import counters
from moe_ops.kernels import cpu_build
from moe_ops.kernels.cpu_costs import costs_of

# Elements between the products of experts that pass both together: what is there stays in a cache, and the next ones
# have its memory. us of a layer's products and activation on two cores in bf16, 8 experts, K = 2, T = 4096, all experts
# at once and four lots: H = 256 7785 and 5159, H = 768 26125 and 23838. Fewer elements are not worth a lot's threads
# that are woken: T = 1024, H = 768 7199 and 8736.
_IN_A_LOT = 2**21
_IDS = (torch.int32, torch.int64)
_PRODUCTS = (torch.float32, torch.bfloat16)  # few CPUs multiply fp16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# In the order of cpu.cpp.
_SILU, _BY_SIGMOID, _GELU, _GELU_TANH, _RELU, _RELU2 = range(6)


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


class _Glu(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("kind", "rows", "columns", "gate_stride", "up_stride", "step", "out_stride")),
        ("up_place", c_int64),
        *((name, c_float) for name in ("alpha", "before", "after", "up_limit", "up_offset")),
    )


class _Sum(ctypes.Structure):
    _fields_ = tuple((name, c_int64) for name in ("tokens", "selected", "columns", "rows"))


class _Weight(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("of_expert", "of_row", "of_column")),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("of_bias", "of_bias_column")),
    )


_NO_WEIGHT = _Weight()


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("dtype", "tokens", "selected", "hidden", "columns", "width")),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("on_input", c_int64),
        *((name, _Weight) for name in ("gate_up", "up", "down")),
        ("glu", _Glu),
    )


class _Lots(ctypes.Structure):
    _fields_ = (
        ("number", c_int64),
        ("experts", c_int64),
        *((name, c_void_p) for name in ("ends", "lengths", "counts", "order")),
    )


_ARGUMENTS = {
    "moe_select": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int),
    "moe_lay_out": (
        *(c_void_p, c_void_p, c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p),
        *(c_void_p, c_void_p),
    ),
    "moe_experts": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "moe_activate": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "moe_combine": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
}


@cache
def library() -> Any:
    """The functions of ``cpu.cpp``, or None where it cannot be built."""
    try:
        loaded = cpu_build.built(Path(__file__).with_name("cpu.cpp"))
    except cpu_build.BuildError as error:
        warnings.warn(f"moe_ops: layers are slower on this CPU, as their C++ cannot be built: {error}", stacklevel=2)
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.moe_experts.restype = loaded.moe_has_fp16.restype = c_int
    if not loaded.moe_has_fp16():
        _DTYPES.pop(torch.float16, None)
    return loaded


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
    layer = _Layer(
        *(_DTYPES[dtype], tokens, top_k, hidden, columns, width),
        *(x.data_ptr(), topk_weights.data_ptr(), call.weight_on_input),
        _weight(gate_up, gate_bias),
        _NO_WEIGHT if weights.up is None else _weight(weights.up.data, up_bias),
        _weight(weights.down.data, weights.down_bias),
        _glu(of, glu, 0, width, columns, columns, width),
    )
    found = torch.empty(pairs + 3 * number, dtype=torch.int64, device="cpu")
    ends = found.data_ptr() + 8 * pairs
    lots = _Lots(0, number, ends, ends + 8 * number, ends + 16 * number, found.data_ptr())
    of_layer, of_lots, sizes = byref(layer), byref(lots), (c_int64 * 2)()
    expert_map = None if call.expert_map is None else call.expert_map.long().contiguous()
    native.moe_lay_out(
        of_layer,
        ids.data_ptr(),
        ids.dtype == torch.int64,
        None if expert_map is None else expert_map.data_ptr(),
        0 if expert_map is None else len(expert_map),
        pairs if call.capacity is None else call.capacity,
        max(_IN_A_LOT // max(columns, 1), 1),
        costs_of(gate_up),
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


def _weight(data: Tensor, bias: Tensor | None) -> _Weight:
    """``[E, N, K]`` and ``[E, N]``."""
    if bias is None:
        return _Weight(data.data_ptr(), *data.stride())
    return _Weight(data.data_ptr(), *data.stride(), bias.data_ptr(), *bias.stride())


@lru_cache(maxsize=64)
def _glu(of: _Gate, glu: Glu, rows: int, columns: int, gate_stride: int, up_stride: int, out_stride: int) -> _Glu:
    """Of gates and ups in rows with these strides."""
    row, interleaved = ACTIVATIONS[glu.activation], glu.layout == "interleaved"
    return _Glu(
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
    if of is None or out.dtype not in _DTYPES or (native := library()) is None:
        return None
    first, last, (rows, columns) = results[0], results[-1], out.shape
    how = _glu(of, glu, rows, columns, first.stride(0), last.stride(0), out.stride(0))
    if len(results) == 2:
        up: int | None = last.data_ptr()
    else:
        up = None if how.up_place < 0 else first.data_ptr() + how.up_place * out.element_size()
    native.moe_activate(
        _DTYPES[out.dtype],
        first.data_ptr(),
        up,
        out.data_ptr(),
        byref(how),
        torch.get_num_threads(),
    )
    return out


def combine(
    rows: Tensor, places_TK: Tensor | None, weights_TK: Tensor | None, tokens: int, top_k: int, added_TH: Tensor | None
) -> Tensor | None:
    """Weighted sums ``[T, H]`` of rows; of the T * K in their order without places."""
    if rows.dtype not in _DTYPES or (native := library()) is None:
        return None
    if added_TH is not None and added_TH.dtype != rows.dtype:
        return None
    rows = rows.contiguous()
    number, hidden = rows.shape
    places = None if places_TK is None else places_TK.long().contiguous()
    weights = None if weights_TK is None else weights_TK.float().contiguous()
    added = None if added_TH is None else added_TH.contiguous()
    out = rows.new_empty((tokens, hidden))
    native.moe_combine(
        _DTYPES[rows.dtype],
        rows.data_ptr(),
        None if places is None else places.data_ptr(),
        None if weights is None else weights.data_ptr(),
        None if added is None else added.data_ptr(),
        out.data_ptr(),
        byref(_Sum(tokens, top_k, hidden, number)),
        torch.get_num_threads(),
    )
    return out
