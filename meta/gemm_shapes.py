"""Rules of the four GEMM operators, which share one body, and what every rule asks of a weight.

Grouped rows or an expert batch, with or without a GLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meta.activations import resolve_activation
from meta.arch import device_arch
from meta.calls import GemmCall, GluCall, Output, Sizes
from meta.checks import (
    check_dtype,
    check_float,
    check_name,
    check_placement,
    check_rank,
    check_shape,
    describe,
    fail,
)
from meta.dims import GLU_LAYOUTS, Dim, GemmProblem, common_layout, is_known_equal
from meta.operands import Glu, Operand
from meta.schemes import ANY, FLOAT_DTYPES, SCHEMES, WHOLE, QuantScheme, Scale, ceil_div, groups, resolve_scheme

#: An operator's arguments by the names of its schema.
Flat = Any


def by_place(argument: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """A list argument's tensors, named for messages."""
    return {f"{argument}[{i}]": tensor for i, tensor in enumerate(tensors)}


def check_bias(op: str, argument: str, bias: Tensor | None, letters: str, sizes: Sizes) -> None:
    """A float bias ``[E, N]`` or None."""
    if bias is not None:
        check_float(op, argument, bias)
        check_shape(op, argument, bias, letters, sizes)


def check_packed(op: str, argument: str, letter: str, width: Dim, scheme: QuantScheme) -> None:
    """A contraction length that whole stored elements cover."""
    if isinstance(width, int) and width % scheme.pack:
        rule = f"of a last dimension {letter} that {scheme.pack} divides for scheme {scheme.name!r}"
        raise fail(op, argument, rule, f"{letter}={width}", f"A stored element holds {scheme.pack} codes.")


def weight_operand(
    op: str,
    argument: str,
    data: Tensor,
    scheme: QuantScheme,
    scales: Sequence[Tensor],
    sizes: tuple[Dim, Dim, Dim],
    *,
    halves: bool = False,
    names: Sequence[str] = (),
) -> Operand:
    """A weight with the scales that its scheme asks for.

    Args:
        argument: the list of scales, e.g. ``"gate_up_scales"``.
        sizes: the logical ``(E, N, K)`` of the weight.
        names: what messages call each scale; by their places in the list where there are none.
        halves: its rows are a gate and an up half, at whose border the groups may start again.
    """
    if not scheme.scales and not scales:
        return Operand(data, scheme)
    least = sum(not spec.optional for spec in scheme.scales)
    if not least <= len(scales) <= len(scheme.scales):
        rule = f"[{', '.join(str(spec) for spec in scheme.scales)}]" if scheme.scales else "empty"
        cure = "Pass them in this order." if scheme.scales else "Pass the weights' scheme."
        raise fail(op, argument, f"{rule} for scheme {scheme.name!r}", f"{len(scales)} tensors", cure)
    checked: list[Tensor] = []
    static = None
    for name, scale, spec in zip(names or by_place(argument, scales), scales, scheme.scales, strict=False):
        # Both halves are multiplied with the same rows.
        found = _check_scale(op, name, scale, spec, sizes, halves and not spec.of_rows)
        if spec.of_rows:
            static = found
        else:
            checked.append(found)
    return Operand(data, scheme, tuple(checked), static)


def _check_scale(
    op: str, argument: str, scale: Tensor, spec: Scale, sizes: tuple[Dim, Dim, Dim], halves: bool
) -> Tensor:
    """The scale, as ``[E, 2, N groups, K groups]`` where the groups start again at the up half, in either spelling."""
    if scale.dtype not in spec.dtypes:
        raise fail(op, argument, " or ".join(str(dtype) for dtype in spec.dtypes), scale.dtype, "Cast it first.")
    E, N, K = sizes
    halves = halves and not (isinstance(N, int) and (N % 2 or not N))  # an odd number of rows, or no row, has none
    given = scale
    few = 0 < scale.dim() < 3 or (scale.dim() == 0 and is_known_equal(E, 1))  # one number is the scale of one expert
    if few and spec.forms[-1][1] in (WHOLE, ANY):
        scale = scale.reshape(*scale.shape, *(1,) * (3 - scale.dim()))
    if halves and scale.dim() == 3 and spec.groups_of(scale.shape, N, K) is None:
        rows = [2 * groups(N // 2, group_n) for group_n, _ in spec.forms]
        if any(is_known_equal(scale.shape[1], count) for count in rows):
            apart = scale.unflatten(1, (2, -1))
            scale = scale if spec.groups_of(apart.shape, N // 2, K) is None else apart
    if halves and scale.dim() == 4 and is_known_equal(scale.shape[1], 2):
        if spec.groups_of(scale.shape, N // 2, K) is not None:
            check_shape(op, argument, scale, "E 2 I_groups K_groups", (E, *scale.shape[1:]))
            return scale
    elif scale.dim() == 3 and spec.groups_of(scale.shape, N, K) is not None:
        check_shape(op, argument, scale, "E N_groups K_groups", (E, *scale.shape[1:]))
        return scale
    shapes = [(E, groups(N, n), groups(K, k)) for n, k in spec.forms if k != ANY]
    if len(shapes) == len(spec.forms) == 1:
        if halves and scale.dim() == 4:
            n, k = spec.forms[0]
            check_shape(op, argument, given, "E 2 I_groups K_groups", (E, 2, groups(N // 2, n), groups(K, k)))
        check_shape(op, argument, given, "E N_groups K_groups", shapes[0])
    rules = [describe("E N_groups K_groups", sizes) for sizes in shapes]
    if len(shapes) < len(spec.forms):
        rules.append(f"{describe('E N', (E, N))[:-1]}, G_count], G_count a divisor of {describe('K', (K,))[1:-1]}")
    raise fail(op, argument, " or ".join(rules), list(given.shape))


def rows_operand(op: str, argument: str, x: Tensor, scheme: QuantScheme, scale: Tensor | None, letters: str) -> Operand:
    """Quantised activations with their scale."""
    if scheme.rows is None:
        raise fail(op, f"{argument}_scale", f"None for scheme {scheme.name!r}", "a tensor")
    cure = f"Call moe_ops.quantize_{'batched' if x.dim() == 3 else 'rows'} first."
    check_dtype(op, argument, x, scheme.rows.dtype, cure)
    if scale is None:
        raise fail(op, f"{argument}_scale", f"given for scheme {scheme.name!r}", "None", cure)
    check_dtype(op, f"{argument}_scale", scale, torch.float32)
    check_shape(op, f"{argument}_scale", scale, letters, (*x.shape[:-1], scheme.rows.scale_width(x.shape[-1])))
    return Operand(x, scheme.rows, (scale,))


def glu_layout(op: str, layout: str, argument: str, up: Tensor | None) -> str:
    """The layout; the default becomes "separate" beside the up projection ``argument``."""
    check_name(op, "glu_layout", layout, GLU_LAYOUTS)
    if up is None:
        if layout == "separate":
            raise fail(op, argument, "given for glu_layout='separate'", "None", "Pass the up projection.")
        return layout
    if layout not in ("concat", "separate"):
        raise fail(op, argument, f"None for glu_layout={layout!r}", "a tensor", "Pass glu_layout='separate'.")
    return "separate"


def half_width(op: str, argument: str, rows_of_weight: Dim, layout: str) -> Dim:
    """I from N; raises when a gated weight has an odd number of rows."""
    if layout in ("none", "separate"):
        return rows_of_weight
    if isinstance(rows_of_weight, int) and rows_of_weight % 2:
        cure = "For experts without a gate pass glu_layout='none'."
        raise fail(op, argument, f"[E, N = 2 * I, ...] for glu_layout={layout!r}", f"N={rows_of_weight}", cure)
    return rows_of_weight // 2


def _gemm(op: str, flat: Flat, glu: Glu | None) -> tuple[dict[str, Any], Operand | None]:
    """Fields of a :class:`GemmCall`, everything that the four have in common checked, and the up half."""
    batched = op.startswith("batched")
    x_name, counts_name = ("batch", "expert_num_tokens") if batched else ("rows", "offsets")
    if op == "gathered_mm":
        x_name = "tokens"
    x: Tensor = getattr(flat, x_name)
    scale: Tensor | None = getattr(flat, f"{x_name}_scale")
    counts: Tensor = getattr(flat, counts_name)
    weight: Tensor = flat.weight
    up: Tensor | None = flat.up_weight if glu is not None else None
    device = check_placement(
        op,
        {
            x_name: x,
            "weight": weight,
            counts_name: counts,
            **by_place("weight_scales", flat.weight_scales),
            "up_weight": up,
            "bias": flat.bias,
            f"{x_name}_scale": scale,
        },
    )
    check_rank(op, x_name, x, "E C K" if batched else "R K")
    check_rank(op, "weight", weight, "E N K")
    scheme = resolve_scheme(op, flat.scheme, weight.dtype)
    experts, rows_of_weight, _ = weight.shape
    width = x.shape[-1]
    sizes = (experts, rows_of_weight, width)
    check_packed(op, x_name, "K", width, scheme)
    check_shape(op, "weight", weight, "E N K", (experts, rows_of_weight, ceil_div(width, scheme.pack)), hint=True)
    if batched:
        check_shape(op, "batch", x, "E C K", (experts, x.shape[1], width))
    check_dtype(op, counts_name, counts, torch.int32)
    check_shape(op, counts_name, counts, "E", (experts,))
    out_width = rows_of_weight if glu is None else half_width(op, "weight", rows_of_weight, glu.layout)
    check_bias(op, "bias", flat.bias, "E N", (experts, rows_of_weight if up is None else 2 * rows_of_weight))
    first, second = stacked_or_separate(
        op, ("weight", "up_weight", "weight_scales"), weight, up, scheme, flat.weight_scales, sizes,
        halves=glu is not None and glu.layout == "concat",
    )  # fmt: skip
    if first.static is not None:
        rule = f"without the static scale of {x_name}, which are quantised before"
        raise fail(op, "weight_scales", rule, "one", f"Quantise {x_name} with it and pass it as {x_name}_scale.")
    if scheme.rows is not None:
        rows = rows_operand(op, x_name, x, scheme, scale, "E C K_groups" if batched else "R K_groups")
    else:
        if scale is not None:
            raise fail(op, f"{x_name}_scale", f"None for scheme {scheme.name!r}", "a tensor")
        if scheme.quantized:
            check_float(op, x_name, x)
        else:
            check_dtype(op, x_name, x, weight.dtype, "Cast it to the weights' dtype.")
        rows = Operand(x, None)
    problem = GemmProblem(
        dtype=x.dtype,
        device_type=device.type,
        arch=device_arch(device),
        scheme=scheme.name,
        M=x.shape[0] * x.shape[1] if batched else x.shape[0],
        E=experts,
        N=out_width,
        K=width,
        C=x.shape[1] if batched else None,
        format="batched" if batched else "grouped",
        activation=None if glu is None else glu.activation,
        glu_layout="none" if glu is None else glu.layout,
        weight_layout=common_layout(weight) if up is None else common_layout(weight, up),
        has_bias=flat.bias is not None,
    )
    out_dtype = torch.bfloat16 if scheme.rows is not None else x.dtype
    fields = {
        "op": op,
        "problem": problem,
        "device": device,
        "outputs": (((*x.shape[:-1], out_width), out_dtype),),
        "x": rows,
        "weight": first,
        "extents": counts,
        "bias": flat.bias,
    }
    return fields, second


def stacked_or_separate(
    op: str,
    names: tuple[str, str, str],
    weight: Tensor,
    up: Tensor | None,
    scheme: QuantScheme,
    scales: Sequence[Tensor],
    sizes: tuple[Dim, Dim, Dim],
    *,
    halves: bool,
) -> tuple[Operand, Operand | None]:
    """The first projection's operands: one, or the gate's and the up half's, whose scales come one list after the
    other.

    Args:
        names: of the weight, of the up half and of the list of scales.
        sizes: the logical ``(E, N, K)`` of ``weight``.
    """
    weight_name, up_name, scales_name = names
    if up is None:
        return weight_operand(op, scales_name, weight, scheme, scales, sizes, halves=halves), None
    check_dtype(op, up_name, up, weight.dtype, f"Store it as {weight_name} is stored.")
    check_shape(op, up_name, up, "E I K", tuple(weight.shape), hint=True)
    if len(scales) % 2:
        rule = f"as many tensors for {up_name} as for {weight_name}, after them"
        raise fail(op, scales_name, rule, f"{len(scales)} tensors")
    half = len(scales) // 2
    if scheme.has_static(half):
        rule = f"without static scales of activations beside {up_name}"
        raise fail(op, scales_name, rule, "some", "Stack gate and up: their rows are the same, and so is the scale.")
    gate = weight_operand(op, scales_name, weight, scheme, scales[:half], sizes)
    other = weight_operand(op, scales_name, up, scheme, scales[half:], sizes)
    if gate.groups != other.groups:  # kernels address both halves by one form
        rule = f"of the same groups for {up_name} as for {weight_name}"
        got = " and ".join(str([list(scale.shape) for scale in one.scales]) for one in (other, gate))
        raise fail(op, scales_name, rule, got, "Repeat each of the coarser ones for the groups that it is of.")
    return gate, other


def _glu(op: str, flat: Flat) -> GluCall:
    """``rows [R, K]`` or ``batch [E, C, K]`` -> the activated ``[..., I]`` and its scale (numel 0 unless
    ``quantize_output``).
    """
    row, alpha, limit = resolve_activation(op, flat.activation, flat.alpha, flat.limit)
    layout = glu_layout(op, flat.glu_layout, "up_weight", flat.up_weight)
    glu = Glu(row.name, alpha, limit, layout)
    fields, up = _gemm(op, flat, glu)
    sizes, dtype = fields["outputs"][0]
    scale: Output = ((0,), torch.float32)
    if flat.quantize_output:
        name = fields["problem"].scheme
        form = SCHEMES[name].rows
        if form is None:
            cure = "This scheme keeps activations unquantised."
            raise fail(op, "quantize_output", f"False for scheme {name!r}", "True", cure)
        dtype, scale = form.dtype, ((*sizes[:-1], form.scale_width(sizes[-1])), torch.float32)
    fields["outputs"] = ((sizes, dtype), scale)
    return GluCall(**fields, glu=glu, up=up, quantize_output=flat.quantize_output)


def plain_product(op: str, flat: Flat) -> GemmCall:
    """``rows [R, K]`` or ``batch [E, C, K]``, ``weight [E, N, K]`` -> ``[..., N]``."""
    fields, _ = _gemm(op, flat, None)
    if flat.out_dtype is not None:
        if flat.out_dtype not in FLOAT_DTYPES:
            raise fail(op, "out_dtype", "bfloat16, float16, float32 or float64", flat.out_dtype)
        fields["outputs"] = ((fields["outputs"][0][0], flat.out_dtype),)
    return GemmCall(**fields)


def grouped_mm_glu(flat: Flat) -> GluCall:
    return _glu("grouped_mm_glu", flat)


def grouped_mm(flat: Flat) -> GemmCall:
    return plain_product("grouped_mm", flat)


def batched_mm_glu(flat: Flat) -> GluCall:
    return _glu("batched_mm_glu", flat)


def batched_mm(flat: Flat) -> GemmCall:
    return plain_product("batched_mm", flat)
