"""The experts of a block as calls of the stage operators, for blocks with code of their own between these.

Rows go through a weight and through the low-rank factors that are added to it side by side. What is added, and the
activation, is plain code in the accumulation dtype, which Inductor makes one kernel of:

    moe_permute -> grouped_mm(W1) + s grouped_mm(grouped_mm(A1), B1) -> activation -> the same with W2 -> moe_unpermute

A scheme that quantises activations has `quantize_rows` behind `moe_permute`, as the layer has it.

Each row is made of its own alone. Rows of no expert are memory that nobody wrote, before and after; no product and no
`moe_unpermute` reads them, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from compile_passes.match import Body
from meta.activations import resolve_activation
from meta.dims import accumulation_dtype
from meta.schemes import SCHEMES

if TYPE_CHECKING:
    from compile_passes.builder import Builder

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Stored:
    """One expert product as nodes of the rewritten graph: ``weight`` [E, N, K], ``bias`` [E, N] or None, (down
    [E, r, K], up [E, N, r], scale) of the low-rank factors, and the ``scheme`` and ``scales`` of a quantised weight.
    """

    weight: fx.Node
    bias: fx.Node | None
    updates: tuple[tuple[fx.Node, fx.Node, float], ...] = ()
    scheme: str | None = None
    scales: Sequence[fx.Node] = ()


def product(
    builder: Builder,
    rows: fx.Node,
    stored: Stored,
    offsets: fx.Node,
    dtype: torch.dtype,
    rows_scale: fx.Node | None = None,
) -> fx.Node:
    """Rows [R, N] of ``rows`` [R, K], which are quantised where they have a scale, through one weight and its factors.

    The sum is in ``dtype``, so that one tensor of it is kept for the backward, and not its terms.
    """
    given: dict[str, Any] = {"rows": rows, "weight": stored.weight, "offsets": offsets, "bias": stored.bias}
    if stored.scheme is not None:
        given |= {"weight_scales": list(stored.scales), "scheme": stored.scheme}
    if rows_scale is not None:
        given |= {"rows_scale": rows_scale, "out_dtype": dtype}
    made = builder.operator("grouped_mm", given)
    if stored.updates:
        made = builder.to(made, accumulation_dtype(dtype))
    for down, up, scale in stored.updates:
        thin = builder.operator("grouped_mm", {"rows": rows, "weight": down, "offsets": offsets})
        added = builder.operator("grouped_mm", {"rows": thin, "weight": up, "offsets": offsets})
        added = builder.to(added, accumulation_dtype(dtype))
        made = builder.call(_ATEN.add.Tensor, (made, builder.times(added, scale)))
    return builder.to(made, dtype)


def activated(
    builder: Builder, rows: fx.Node, firsts: Sequence[Stored], offsets: fx.Node, body: Body, dtype: torch.dtype
) -> fx.Node:
    """Rows [R, I] after the first products, of which one at least has low-rank factors, and the activation."""
    made = [product(builder, rows, stored, offsets, dtype) for stored in firsts]
    code = _activation(body.activation, body.alpha, body.limit, body.glu_layout, body.up_first, len(made), dtype)
    return builder.inline(code, made)


@cache
def _activation(
    name: str, alpha: float | None, limit: float | None, layout: str, up_first: bool, count: int, dtype: torch.dtype
) -> fx.Graph:
    """The activation of one first product, or of gate and up, as a graph."""
    row, alpha, limit = resolve_activation("fused_experts", name, alpha, limit)
    run = partial(_apply, lambda gate, up: row.eager(gate, up, alpha, limit), layout, up_first, dtype)
    one: Callable[..., Tensor] = lambda h: run((h,))  # noqa: E731  (the tracer reads their parameters)
    two: Callable[..., Tensor] = lambda gate, up: run((gate, up))  # noqa: E731
    return fx.Tracer().trace(one if count == 1 else two)


def _apply(
    run: Callable[[Tensor, Tensor | None], Tensor],
    layout: str,
    up_first: bool,
    dtype: torch.dtype,
    products: tuple[Tensor, ...],
) -> Tensor:
    wide = [h.to(accumulation_dtype(dtype)) for h in products]
    halves: Any = wide if len(wide) == 2 else _halves(wide[0], layout)
    if halves is None:
        return run(wide[0], None).to(dtype)
    first = 1 if up_first and len(wide) == 1 else 0
    return run(halves[first], halves[1 - first]).to(dtype)


def _halves(h: Tensor, layout: str) -> tuple[Tensor, ...] | None:
    """What the halves of [R, 2I] are, without a look at its shape, which is not there yet."""
    if layout == "interleaved":
        return h[..., 0::2], h[..., 1::2]
    return None if layout == "none" else h.chunk(2, dim=-1)


def expert_rows(
    builder: Builder,
    tokens: Mapping[str, Any],
    firsts: Sequence[Stored],
    last: Stored,
    body: Body,
    glu: Mapping[str, Any] | None,
) -> tuple[fx.Node, fx.Node]:
    """(results of the experts, sorted by expert, [R, H]; where each pair's row is [T, K]).

    Args:
        tokens: ``hidden_states`` [T, H] in the weights' dtype, ``topk_ids`` [T, K] and ``num_experts``.
        firsts: the first product, or gate's and up's.
        glu: arguments of `grouped_mm_glu` in the place of the first products; None where one of these has factors.
    """
    dtype = builder.value(tokens["hidden_states"]).dtype
    permuted = builder.operator("moe_permute", tokens)
    rows, offsets, places = (
        builder.item(permuted, place, name) for place, name in enumerate(("rows", "offsets", "pair_to_row"))
    )
    if glu is None:
        return product(builder, activated(builder, rows, firsts, offsets, body, dtype), last, offsets, dtype), places
    given: dict[str, Any] = {"rows": rows, "offsets": offsets, **glu}
    quantises = last.scheme is not None and SCHEMES[last.scheme].rows is not None
    if quantises:
        stored = builder.operator("quantize_rows", {"rows": rows, "scheme": last.scheme})
        given |= {name: builder.item(stored, place, name) for place, name in enumerate(("rows", "rows_scale"))}
        given["quantize_output"] = True
    first = builder.operator("grouped_mm_glu", given)
    inner = builder.item(first, 0, "activated")
    scale = builder.item(first, 1, "activated_scale") if quantises else None
    return product(builder, inner, last, offsets, dtype, scale), places
