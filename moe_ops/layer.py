"""A layer's experts in three steps, for code that puts something between them, such as expert parallelism's exchange.

``finalize(experts(prepare(...), ...), ...)`` is :func:`moe_ops.fused_experts`, in both formats and on every backend,
but for roundings that a whole layer need not make between its steps, from the stage operators alone: it differentiates,
traces and captures as they do. What stands between the steps need not be what the step before gave: rows may be sent
away and others received, and their number is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from meta.activations import ACTIVATIONS
from meta.calls import ExpertsCall, MoeCall
from meta.checks import (
    Accepts,
    accepts,
    check_float,
    check_name,
    check_placement,
    check_rank,
    check_shape,
    check_type,
    fail,
)
from meta.dims import FORMATS, GLU_LAYOUTS, SLOT_ORDERS, accumulation_dtype
from meta.gemm_shapes import half_width
from meta.schemes import SCHEMES, ceil_div, resolve_scheme
from moe_ops import choice, compat
from moe_ops.integrations.containers import are_plain, unpacked_layer
from moe_ops.ops import SIGNATURES, call, parse
from moe_ops.pairs import used_rows

#: Runs an operator by its name and flat arguments.
Stage = Callable[..., Any]


class Prepared(NamedTuple):
    """Rows by expert, and the way back to tokens; a pytree.

    Attributes:
        rows: ``[R, H]`` sorted by expert, or a batch ``[E, C, H]``; quantised if the scheme says so.
        rows_scale: of quantised rows, fp32 ``[..., groups of H]``, or None.
        extents: int32 ``[E]``: cumulative ends of sorted rows, or how many rows of each expert's batch are used.
        places: int32 ``[T, K]``: every pair's row, or its slot ``e * C + c``; -1 = dropped.
        topk_weights: ``[T, K]``, by which :func:`finalize` multiplies the results.
    """

    rows: Tensor
    rows_scale: Tensor | None
    extents: Tensor
    places: Tensor
    topk_weights: Tensor

    @property
    def format(self) -> str:
        """ "grouped" or "batched"."""
        return "batched" if self.rows.dim() == 3 else "grouped"


compat.name_in_files(Prepared)

_ACCEPTS = {
    **{name: accepts(kind) for name, kind in SIGNATURES["fused_experts"].types.items()},
    "prepared": Accepts((Prepared, fx.Proxy), False, False, "a moe_ops.Prepared", "Call moe_ops.prepare first."),
    "slot_order": accepts("str"),
    "num_experts": accepts("int"),
    "out_dtype": accepts("Optional[ScalarType]"),
    "result": accepts("Tensor"),
    "added": accepts("Optional[Tensor]"),
}
#: What the stages' arguments are called here.
_ROWS = {
    "rows": "prepared.rows", "batch": "prepared.rows", "rows_scale": "prepared.rows_scale",
    "batch_scale": "prepared.rows_scale", "offsets": "prepared.extents", "expert_num_tokens": "prepared.extents",
}  # fmt: skip
_FIRST = {**_ROWS, "weight": "gate_up_proj", "up_weight": "up_proj", "bias": "gate_up_bias",
          "weight_scales": "gate_up_scales"}  # fmt: skip
_SECOND = {**_ROWS, "weight": "down_proj", "bias": "down_bias", "weight_scales": "down_scales"}
_LAST = {"rows": "result", "batch": "result", "pair_to_row": "prepared.places", "slots": "prepared.places",
         "topk_weights": "prepared.topk_weights"}  # fmt: skip


#: Dimensions of ``prepared.rows`` by format.
_LETTERS = {"grouped": "R H", "batched": "E C H"}
_OF_OTHERS = "Pass what moe_ops.experts made of this prepared, every row in its place."


def _check(op: str, arguments: dict[str, Any]) -> bool:
    """Whether there is a proxy of FX among the arguments, of whose shape nobody can say anything."""
    traced = False
    for name, value in arguments.items():
        check_type(op, name, value, _ACCEPTS[name])
        if isinstance(value, Prepared):  # rows from elsewhere: the operators check the rest
            check_type(op, "prepared.rows", value.rows, _ACCEPTS["result"])
        traced = traced or isinstance(value, fx.Proxy)
    return traced


def _as_one(step: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A call of a step as one node of the graph that `torch.fx.symbolic_trace` makes: its shapes are for the graph."""
    return fx.Proxy.__torch_function__(step, (), (), arguments)


def _public(op: str, names: dict[str, str]) -> Stage:
    """The operators as public functions run them, their errors in the words of `op`; under torch.compile it is the
    compiler that asks for a result's shape, and errors keep the operator's words.
    """

    def run(name: str, *args: Any, **options: Any) -> Any:
        try:
            return call(name, *args, **options)
        except ValueError as error:
            found = re.match(r"\w+: (\w+)(.*)", str(error), re.DOTALL)
            if found is None:
                raise
            argument, rest = found.groups()
            rest = re.sub(r"(?<=for )\w+|(?<=as )\w+", lambda word: names.get(word[0], word[0]), rest)
            raise ValueError(f"{op}: {names.get(argument, argument)}{rest}") from None

    return run


def prepare(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None = None,
    *,
    num_experts: int,
    weight_on_input: bool = False,
    scheme: str | None = None,
    format: str = "grouped",
    capacity: int | None = None,
    slot_order: str = "token",
) -> Prepared:
    """Bring every token to its selected experts, and quantise the rows once.

    Args:
        hidden_states: ``[T, H]`` float.
        topk_weights: ``[T, K]`` any float dtype.
        topk_ids: ``[T, K]`` int32 or int64; -1 and ids out of range are dropped.
        expert_map: ``[E_global]`` global id to local id or -1, or None when ids are local.
        num_experts: E, experts held here.
        weight_on_input: multiply the rows, not the results, by the routing weights.
        scheme: a name of :data:`meta.schemes.SCHEMES`, whose activation format the rows get; None keeps them.
        format: "grouped" (sorted rows) or "batched" (``[E, C, H]``).
        capacity: C, batched format only; pairs past the first C of an expert are dropped. None means T, with which
            none is where each token's experts are different places.
        slot_order: of :func:`moe_ops.batched_dispatch`; batched format only.

    Returns:
        A :class:`Prepared`; its rows that hold no pair are uninitialised.

    Raises:
        ValueError: a wrong shape, dtype, device or name.

    Source: MegaBlocks (arXiv 2211.15841) and GShard (arXiv 2006.16668).

    Example:
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> prepared = moe_ops.prepare(torch.randn(4, 16), weights, ids, num_experts=8)
        >>> prepared.rows.shape, prepared.extents.shape
        (torch.Size([8, 16]), torch.Size([8]))
    """
    op = "prepare"
    arguments = {
        "hidden_states": hidden_states, "topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map,
        "num_experts": num_experts, "weight_on_input": weight_on_input, "scheme": scheme, "format": format,
        "capacity": capacity, "slot_order": slot_order,
    }  # fmt: skip
    if _check(op, arguments):
        node: Prepared = _as_one(prepare, arguments)
        return node
    check_rank(op, "topk_ids", topk_ids, "T K")
    check_shape(op, "topk_weights", topk_weights, "T K", tuple(topk_ids.shape))
    check_float(op, "topk_weights", topk_weights)
    check_placement(op, {"hidden_states": hidden_states, "topk_weights": topk_weights})
    check_name(op, "format", format, FORMATS)
    if scheme is not None:
        check_name(op, "scheme", scheme, SCHEMES)
    if format == "grouped" and capacity is not None:
        raise fail(op, "capacity", "None for format='grouped'", capacity, "Pass format='batched'.")
    check_name(op, "slot_order", slot_order, SLOT_ORDERS)
    if format == "grouped" and slot_order != "token":
        raise fail(op, "slot_order", "'token' for format='grouped'", repr(slot_order), "Pass format='batched'.")
    rows = "hidden_states * topk_weights" if weight_on_input else "hidden_states"
    run = _public(op, {"rows": rows, "batch": rows})
    return _prepare(
        run, hidden_states, topk_weights, topk_ids, expert_map, num_experts, weight_on_input, scheme, format, capacity,
        slot_order,
    )  # fmt: skip


def _quantizes(scheme: str | None) -> bool:
    """Whether rows are quantised for it."""
    return scheme is not None and SCHEMES[scheme].rows is not None


def _prepare(
    run: Stage,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: Any,
    weight_on_input: bool,
    scheme: str | None,
    format: str,
    capacity: Any,
    slot_order: str = "token",
) -> Prepared:
    tokens = (hidden_states, topk_ids, expert_map)
    if format == "grouped":
        rows, extents, places = run("moe_permute", *tokens, num_experts=num_experts)
    else:
        options = {"num_experts": num_experts, "capacity": capacity, "slot_order": slot_order}
        rows, extents, places = run("batched_dispatch", *tokens, **options)
    if weight_on_input:
        rows = _weighed(rows, extents, places, topk_weights)
        topk_weights = torch.ones_like(topk_weights)
    scale = None
    if _quantizes(scheme) and format == "grouped":
        rows, scale = run("quantize_rows", rows, scheme=scheme)
    elif _quantizes(scheme):
        rows, scale = run("quantize_batched", rows, extents, scheme=scheme)
    return Prepared(rows, scale, extents, places, topk_weights)


def _weighed(rows: Tensor, extents: Tensor, places: Tensor, topk_weights: Tensor) -> Tensor:
    """Every row times the weight of its pair, in fp32; zero where a row holds none, whatever is in its memory."""
    wide, number = accumulation_dtype(rows.dtype), rows.flatten(0, -2).shape[0]  # `Size.numel` is no symbol
    # Brought to rows rather than picked for them: where there are no pairs, none could be.
    places = places.reshape(-1).long()
    places = torch.where(places < 0, number, places)  # one that is cut off
    of_rows = topk_weights.new_zeros(number + 1, dtype=wide).scatter(0, places, topk_weights.reshape(-1).to(wide))
    of_rows = of_rows[:number].view(*rows.shape[:-1], 1)
    return torch.where(used_rows(rows, extents), rows, 0).to(wide).mul(of_rows).to(rows.dtype)


def experts(
    prepared: Prepared,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str | None = "concat",
    up_proj: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    scheme: str | None = None,
    gate_up_scales: Sequence[Tensor] = (),
    down_scales: Sequence[Tensor] = (),
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Both products of every expert, with the activation between them.

    Args:
        prepared: of :func:`prepare`, or rows from elsewhere with their extents.
        gate_up_proj, ..., down_scales: of :func:`moe_ops.fused_experts`.
        out_dtype: dtype of the result; None means that of the rows (bf16 for quantised ones).

    Returns:
        ``[R, H]`` or ``[E, C, H]``; rows that hold no pair are uninitialised.

    Raises:
        ValueError: a wrong shape, dtype, device or name.

    Source: MegaBlocks (arXiv 2211.15841).

    Example:
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> prepared = moe_ops.prepare(torch.randn(4, 16), weights, ids, num_experts=8)
        >>> moe_ops.experts(prepared, torch.randn(8, 64, 16), torch.randn(8, 16, 32)).shape
        torch.Size([8, 16])
    """
    op, layout = "experts", "none" if glu_layout is None else glu_layout
    arguments = {
        "prepared": prepared,
        "gate_up_proj": gate_up_proj, "down_proj": down_proj, "activation": activation, "alpha": alpha, "limit": limit,
        "glu_layout": layout, "up_proj": up_proj, "gate_up_bias": gate_up_bias, "down_bias": down_bias,
        "scheme": scheme, "gate_up_scales": gate_up_scales, "down_scales": down_scales, "out_dtype": out_dtype,
    }  # fmt: skip
    if _check(op, arguments):
        node: Tensor = _as_one(experts, arguments)
        return node
    if not are_plain(gate_up_proj, down_proj, up_proj):
        gate_up_proj, down_proj, up_proj, scheme, gate_up_scales, down_scales = unpacked_layer(
            op, (gate_up_proj, down_proj, up_proj), scheme, gate_up_scales, down_scales, static=False
        )
    check_name(op, "glu_layout", layout, GLU_LAYOUTS)
    pack = resolve_scheme(op, scheme, gate_up_proj.dtype).pack
    # Else the second product would blame what the first took: the rows and their extents.
    check_rank(op, "prepared.rows", prepared.rows, _LETTERS[prepared.format])
    check_rank(op, "gate_up_proj", gate_up_proj, "E N H")
    check_rank(op, "down_proj", down_proj, "E H I")
    if down_proj.shape[0] != gate_up_proj.shape[0]:
        raise fail(op, "down_proj", f"of E={gate_up_proj.shape[0]} experts, as gate_up_proj", down_proj.shape[0])
    if down_proj.dtype != gate_up_proj.dtype:
        raise fail(op, "down_proj", f"{gate_up_proj.dtype}, as gate_up_proj", down_proj.dtype)
    hidden = prepared.rows.shape[-1]
    sizes = (*gate_up_proj.shape[:2], ceil_div(hidden, pack))
    check_shape(op, "gate_up_proj", gate_up_proj, "E N H", sizes, hint=True)
    width = half_width(op, "gate_up_proj", sizes[1], layout if up_proj is None else "separate")
    check_shape(op, "down_proj", down_proj, "E H I", (sizes[0], hidden, ceil_div(width, pack)), hint=True)
    if _quantizes(scheme) and prepared.rows_scale is None:
        rule, cure = f"given for scheme {scheme!r}", f"Pass scheme={scheme!r} to moe_ops.prepare."
        raise fail(op, "prepared.rows_scale", rule, "None", cure)
    first = [gate_up_proj, prepared.extents, gate_up_scales, up_proj, gate_up_bias, prepared.rows_scale]
    second = [down_proj, prepared.extents, down_scales, down_bias]
    glu = {"activation": activation, "alpha": alpha, "limit": limit, "glu_layout": layout}
    return _experts(_public(op, _FIRST), _public(op, _SECOND), prepared, first, second, glu, scheme, out_dtype)


def _experts(
    run_first: Stage,
    run_second: Stage,
    prepared: Prepared,
    first: list[Any],
    second: list[Any],
    glu: dict[str, Any],
    scheme: str | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """`first`, `second`: the products' positional arguments behind their rows."""
    prefix, quantize = prepared.format, _quantizes(scheme)
    h, h_scale = run_first(f"{prefix}_mm_glu", prepared.rows, *first, **glu, scheme=scheme, quantize_output=quantize)
    scale = h_scale if quantize else None
    result: Tensor = run_second(f"{prefix}_mm", h, *second, scale, scheme=scheme, out_dtype=out_dtype)
    return result


def finalize(result: Tensor, prepared: Prepared, added: Tensor | None = None) -> Tensor:
    """Bring the experts' results back to their tokens: weighted sums in fp32, in the order of k.

    Args:
        result: of :func:`experts`, ``[R, H]`` or ``[E, C, H]``: a row for each of ``prepared.rows``.
        prepared: of :func:`prepare`.
        added: ``[T, H]`` any float dtype, a shared expert's output: added to the sum before it is rounded, or None.

    Returns:
        ``[T, H]`` in the dtype of the result.

    Raises:
        ValueError: a wrong shape, dtype or device.

    Source: MegaBlocks (arXiv 2211.15841).

    Example:
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> prepared = moe_ops.prepare(torch.randn(4, 16), weights, ids, num_experts=8)
        >>> result = moe_ops.experts(prepared, torch.randn(8, 64, 16), torch.randn(8, 16, 32))
        >>> moe_ops.finalize(result, prepared).shape
        torch.Size([4, 16])
    """
    op = "finalize"
    arguments = {"result": result, "prepared": prepared, "added": added}
    if _check(op, arguments):
        node: Tensor = _as_one(finalize, arguments)
        return node
    letters = _LETTERS[prepared.format]
    check_rank(op, "result", result, letters)
    check_rank(op, "prepared.rows", prepared.rows, letters)
    sizes = (*prepared.rows.shape[:-1], result.shape[-1])
    check_shape(op, "result", result, letters, sizes, cure=_OF_OTHERS)
    return _finalize(_public(op, _LAST), result, prepared, added)


def _finalize(run: Stage, result: Tensor, prepared: Prepared, added: Tensor | None = None) -> Tensor:
    collect = "batched_combine" if prepared.format == "batched" else "moe_unpermute"
    tokens: Tensor = run(collect, result, prepared.places, prepared.topk_weights, added)
    return tokens


def composed(layer: ExpertsCall | MoeCall, module: ModuleType) -> Tensor:
    """``fused_experts`` or ``fused_moe`` around a backend that has none: the stages that ``module`` has, and for the
    others those that are chosen without a request.

    Raises:
        ValueError: rows that are quantised already, which no stage moves.
    """

    def run(name: str, *args: Any, **options: Any) -> Any:
        stage = parse(name, *args, **options)
        return choice.stage_of(module, stage)(stage)

    if layer.hidden_states.scales:
        rule = f"None for backend={layer.backend!r}, whose layer is composed of stages"
        raise fail(layer.op, "hidden_states_scale", rule, "a tensor", "Pass hidden_states before they are quantised.")
    if layer.experts.gate_up.static is not None or layer.experts.down.static is not None:
        rule = f"dynamic for backend={layer.backend!r}, whose layer is composed of stages"
        raise fail(layer.op, "scales of activations", rule, "static ones", "Leave the last of the scales out.")
    if isinstance(layer, MoeCall):
        route = layer.route
        layer = layer.routed(*run("fused_topk", route.router_logits, route.correction_bias, **route.options._asdict()))
    weights, glu, scheme = layer.experts, layer.experts.glu, layer.experts.scheme
    prepared = _prepare(
        run, layer.hidden_states.data, layer.topk_weights, layer.topk_ids, layer.expert_map, weights.count,
        layer.weight_on_input, scheme.name, layer.problem.format, layer.capacity or None,
    )  # fmt: skip
    up, up_scales = (None, ()) if weights.up is None else (weights.up.data, weights.up.scales)
    first = [
        weights.gate_up.data, prepared.extents, [*weights.gate_up.scales, *up_scales], up, weights.gate_up_bias,
        prepared.rows_scale,
    ]  # fmt: skip
    second = [weights.down.data, prepared.extents, list(weights.down.scales), weights.down_bias]
    row = ACTIVATIONS[glu.activation]  # which was filled in what it does not take
    alpha, limit = glu.alpha if row.alpha is not None else None, glu.limit if row.limit is not None else None
    options = {"activation": glu.activation, "alpha": alpha, "limit": limit, "glu_layout": glu.layout}
    result = _experts(run, run, prepared, first, second, options, scheme.name, layer.out_dtype)
    return _finalize(run, result, prepared)
