"""Shape rules of the four GEMM operators, which share one body: grouped rows or an expert batch, with or without a
GLU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meta.activations import resolve_activation
from meta.checks import (
    Checked,
    Sizes,
    check_dtype,
    check_float,
    check_name,
    check_placement,
    check_rank,
    check_shape,
    fail,
)
from meta.dims import GLU_LAYOUTS, Dim, Problem
from meta.schemes import FLOAT_DTYPES, QuantScheme, ceil_div, resolve_scheme


@dataclass(slots=True)
class Gemm:
    """The tensors of one GEMM operator under the names its messages use."""

    op: str
    batched: bool
    x: Tensor
    weight: Tensor
    counts: Tensor
    bias: Tensor | None
    x_scale: Tensor | None
    weight_scale: Tensor | None
    weight_global_scale: Tensor | None
    weight_zero_point: Tensor | None

    @property
    def x_name(self) -> str:
        """Name of the activations argument."""
        return "batch" if self.batched else "rows"

    @property
    def counts_name(self) -> str:
        """Name of the argument that says which rows belong to which expert."""
        return "expert_num_tokens" if self.batched else "offsets"


def check_bias(op: str, argument: str, bias: Tensor | None, letters: str, sizes: Sizes) -> None:
    """A float bias ``[E, N]`` or None."""
    if bias is not None:
        check_float(op, argument, bias)
        check_shape(op, argument, bias, letters, sizes)


def check_weight_extras(
    op: str,
    prefix: str,
    scheme: QuantScheme,
    sizes: tuple[Dim, Dim, Dim],
    scale: Tensor | None,
    global_scale: Tensor | None,
    zero_point: Tensor | None,
) -> None:
    """Scales and zero points are given exactly when the scheme has them; the scale's shape and dtype are right.

    Args:
        prefix: start of the argument names, e.g. ``"gate_up_"``.
        sizes: the logical ``(E, N, K)`` of the weight.
    """
    wanted = scheme.weight_scale_shape(*sizes)
    if wanted is None:
        if scale is not None:
            raise fail(
                op, f"{prefix}scale", f"None for scheme {scheme.name!r}", "a tensor", "Pass the weights' scheme."
            )
    else:
        rule = f"[E, ceil(N / {scheme.group_n}), ceil(K / {scheme.group_k})]"
        if scale is None:
            raise fail(op, f"{prefix}scale", f"fp32 {rule} for scheme {scheme.name!r}", "None")
        check_dtype(op, f"{prefix}scale", scale, torch.float32)
        check_shape(op, f"{prefix}scale", scale, "E N_groups K_groups", wanted)
    for name, tensor in (("global_scale", global_scale), ("zero_point", zero_point)):
        if (tensor is not None) != (name in scheme.extras):
            rule = "given" if name in scheme.extras else "None"
            got = "None" if tensor is None else "a tensor"
            raise fail(op, f"{prefix}{name}", f"{rule} for scheme {scheme.name!r}", got)


def _check_activations(gemm: Gemm, scheme: QuantScheme, width: Dim) -> None:
    """Dtype of the activations, and their scale when the scheme quantises them."""
    op, x, name = gemm.op, gemm.x, gemm.x_name
    if scheme.rows_dtype is None:
        if gemm.x_scale is not None:
            raise fail(op, f"{name}_scale", f"None for scheme {scheme.name!r}", "a tensor")
        if scheme.quantized:
            check_float(op, name, x)
        else:
            check_dtype(op, name, x, gemm.weight.dtype, "Cast it to the weights' dtype.")
        return
    cure = f"Call moe_ops.quantize_{'batched' if gemm.batched else 'rows'} first."
    check_dtype(op, name, x, scheme.rows_dtype, cure)
    if gemm.x_scale is None:
        raise fail(op, f"{name}_scale", f"given for scheme {scheme.name!r}", "None", cure)
    check_dtype(op, f"{name}_scale", gemm.x_scale, torch.float32)
    sizes = (*x.shape[:-1], scheme.rows_scale_width(width))
    check_shape(op, f"{name}_scale", gemm.x_scale, "E C K_groups" if gemm.batched else "R K_groups", sizes)


def _check_gemm(gemm: Gemm, scheme_name: str | None) -> tuple[torch.device, QuantScheme, Dim, Dim, Dim]:
    """Everything but the activation function; returns device, scheme, E, N and K."""
    op, x, weight = gemm.op, gemm.x, gemm.weight
    device = check_placement(
        op,
        {
            gemm.x_name: x,
            "weight": weight,
            gemm.counts_name: gemm.counts,
            "bias": gemm.bias,
            f"{gemm.x_name}_scale": gemm.x_scale,
            "weight_scale": gemm.weight_scale,
            "weight_global_scale": gemm.weight_global_scale,
            "weight_zero_point": gemm.weight_zero_point,
        },
    )
    check_rank(op, gemm.x_name, x, "E C K" if gemm.batched else "R K")
    check_rank(op, "weight", weight, "E N K")
    scheme = resolve_scheme(op, scheme_name, weight.dtype)
    experts, rows_of_weight, _ = weight.shape
    width = x.shape[-1]
    check_shape(op, "weight", weight, "E N K", (experts, rows_of_weight, ceil_div(width, scheme.pack)), hint=True)
    if gemm.batched:
        check_shape(op, "batch", x, "E C K", (experts, x.shape[1], width))
    check_dtype(op, gemm.counts_name, gemm.counts, torch.int32)
    check_shape(op, gemm.counts_name, gemm.counts, "E", (experts,))
    check_bias(op, "bias", gemm.bias, "E N", (experts, rows_of_weight))
    extras = (gemm.weight_scale, gemm.weight_global_scale, gemm.weight_zero_point)
    check_weight_extras(op, "weight_", scheme, (experts, rows_of_weight, width), *extras)
    _check_activations(gemm, scheme, width)
    return device, scheme, experts, rows_of_weight, width


def half_width(op: str, argument: str, rows_of_weight: Dim, glu_layout: str) -> Dim:
    """I from N; raises when a gated weight has an odd number of rows."""
    if glu_layout == "none":
        return rows_of_weight
    if isinstance(rows_of_weight, int) and rows_of_weight % 2:
        cure = "For experts without a gate pass glu_layout='none'."
        raise fail(op, argument, f"[E, N = 2 * I, ...] for glu_layout={glu_layout!r}", f"N={rows_of_weight}", cure)
    return rows_of_weight // 2


def _problem(gemm: Gemm, scheme: QuantScheme, E: Dim, K: Dim, width_out: Dim, activation: str, glu: str) -> Problem:
    return Problem.of_stage(
        gemm.x,
        T=gemm.x.shape[0] * gemm.x.shape[1] if gemm.batched else gemm.x.shape[0],
        E=E,
        H=K,
        I=width_out,
        C=gemm.x.shape[1] if gemm.batched else None,
        scheme=scheme.name,
        activation=activation,
        glu_layout=glu,
        weight=gemm.weight,
        has_bias=gemm.bias is not None,
    )


def _glu(
    gemm: Gemm,
    activation: str,
    alpha: float | None,
    limit: float | None,
    glu_layout: str,
    scheme_name: str | None,
    quantize_output: bool,
) -> Checked:
    row, alpha, limit = resolve_activation(gemm.op, activation, alpha, limit)
    check_name(gemm.op, "glu_layout", glu_layout, GLU_LAYOUTS)
    device, scheme, experts, rows_of_weight, width = _check_gemm(gemm, scheme_name)
    width_out = half_width(gemm.op, "weight", rows_of_weight, glu_layout)
    lead = tuple(gemm.x.shape[:-1])
    out_dtype = torch.bfloat16 if scheme.rows_dtype is not None else gemm.x.dtype
    scale_sizes: Sizes = (0,)
    if quantize_output:
        if scheme.rows_dtype is None:
            rule = f"False for scheme {scheme.name!r}"
            raise fail(gemm.op, "quantize_output", rule, "True", "This scheme keeps activations unquantised.")
        out_dtype = scheme.rows_dtype
        scale_sizes = (*lead, scheme.rows_scale_width(width_out))
    return Checked(
        _problem(gemm, scheme, experts, width, width_out, row.name, glu_layout),
        device,
        (((*lead, width_out), out_dtype), (scale_sizes, torch.float32)),
        {"scheme": scheme.name, "alpha": alpha, "limit": limit},
    )


def _plain(gemm: Gemm, scheme_name: str | None, out_dtype: torch.dtype | None) -> Checked:
    device, scheme, experts, rows_of_weight, width = _check_gemm(gemm, scheme_name)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if scheme.rows_dtype is not None else gemm.x.dtype
    elif out_dtype not in FLOAT_DTYPES:
        raise fail(gemm.op, "out_dtype", "bfloat16, float16, float32 or float64", out_dtype)
    return Checked(
        _problem(gemm, scheme, experts, width, rows_of_weight, "", "none"),
        device,
        (((*gemm.x.shape[:-1], rows_of_weight), out_dtype),),
        {"scheme": scheme.name, "out_dtype": out_dtype},
    )


def grouped_mm_glu(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    rows_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str = "concat",
    scheme: str | None = None,
    quantize_output: bool = False,
) -> Checked:
    """``rows [R, K]``, ``weight [E, N, K]`` -> ``[R, I]`` and its scale (numel 0 unless ``quantize_output``)."""
    scales = (rows_scale, weight_scale, weight_global_scale, weight_zero_point)
    gemm = Gemm("grouped_mm_glu", False, rows, weight, offsets, bias, *scales)
    return _glu(gemm, activation, alpha, limit, glu_layout, scheme, quantize_output)


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    rows_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    scheme: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Checked:
    """``rows [R, K]``, ``weight [E, N, K]`` -> ``[R, N]``."""
    scales = (rows_scale, weight_scale, weight_global_scale, weight_zero_point)
    return _plain(Gemm("grouped_mm", False, rows, weight, offsets, bias, *scales), scheme, out_dtype)


def batched_mm_glu(
    batch: Tensor,
    weight: Tensor,
    expert_num_tokens: Tensor,
    bias: Tensor | None = None,
    batch_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str = "concat",
    scheme: str | None = None,
    quantize_output: bool = False,
) -> Checked:
    """``batch [E, C, K]``, ``weight [E, N, K]`` -> ``[E, C, I]`` and its scale (numel 0 unless ``quantize_output``)."""
    scales = (batch_scale, weight_scale, weight_global_scale, weight_zero_point)
    gemm = Gemm("batched_mm_glu", True, batch, weight, expert_num_tokens, bias, *scales)
    return _glu(gemm, activation, alpha, limit, glu_layout, scheme, quantize_output)


def batched_mm(
    batch: Tensor,
    weight: Tensor,
    expert_num_tokens: Tensor,
    bias: Tensor | None = None,
    batch_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_global_scale: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    *,
    scheme: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Checked:
    """``batch [E, C, K]``, ``weight [E, N, K]`` -> ``[E, C, N]``."""
    scales = (batch_scale, weight_scale, weight_global_scale, weight_zero_point)
    return _plain(Gemm("batched_mm", True, batch, weight, expert_num_tokens, bias, *scales), scheme, out_dtype)
