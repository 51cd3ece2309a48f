"""Activations, and the stand-alone kernels that quantise rows.

`apply_activation` is the one definition of every activation on the device: the GEMM epilogues inline it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from meta.blocks import NV_BLOCK
from meta.schemes import WHOLE, ActivationFormat
from moe_ops.kernels.triton.block_scales import nv_scale_bytes, quantize_group, quantize_nv_rows
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.scales import HALF_GROUP, from_half, group_scale, largest_magnitude, store_as
from moe_ops.kernels.triton.util import cdiv, next_power_of_2, pdl_release, pdl_wait, unit_stride

PROGRAMS = 4096  # of quantize_batched, over all experts: enough to fill a GPU while most experts hold few rows
BESIDE = tl.constexpr(512)  # columns of a program that quantises beside another kernel's work, or one scale group
AT_ONCE = tl.constexpr(4096)  # columns that a program loads at a time, of a scale group that it cannot hold,
HELD = tl.constexpr(16384)  # which is one of more columns than these
NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def tanh(x):
    """tanh(x) to a few units in the last place; the series below 1/4, where 1 - exp(-2 x) would cancel."""
    square = x * x
    series = 1.0 + square * (
        -0.3333333333 + square * (0.1333333333 + square * (-0.05396825397 + square * 0.02186948854))
    )
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0.0, -large, large))


@triton.jit
def _gate_activation(gate, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation of the gate alone; `x / (1 + exp(-x))` is x * sigmoid(x) with a single division."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z) with z = sqrt(2 / pi) * (x + 0.044715 x^3)
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == "relu":
        return tl.maximum(gate, 0.0, propagate_nan=NAN)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0, propagate_nan=NAN)
        return positive * positive
    elif ACTIVATION == "swiglu_oai":
        clipped = tl.minimum(gate, limit, propagate_nan=NAN)
        return clipped / (1.0 + tl.exp(-alpha * clipped))
    elif ACTIVATION == "quick_gelu":
        return gate / (1.0 + tl.exp(-alpha * gate))
    elif ACTIVATION == "silu_softcap":
        return alpha * tanh(gate / alpha) / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "silu_then_clamp":
        return tl.minimum(gate / (1.0 + tl.exp(-gate)), limit, propagate_nan=NAN)
    else:
        tl.static_assert(ACTIVATION == "silu_clamp", "unknown activation")
        clipped = tl.minimum(gate, limit, propagate_nan=NAN)
        return clipped / (1.0 + tl.exp(-clipped))


@triton.jit
def apply_activation(gate, up, alpha, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """`act(gate) * up` in fp32 (`act(gate)` when not GATED), as `meta/activations.py` defines each name.

    Args:
        gate: fp32 tile of any shape; `up`: the same shape (ignored when not GATED: pass `gate`).
        alpha, limit: fp32 scalars, read by "swiglu_oai" and "silu_softcap" (both), "quick_gelu" (alpha), "silu_clamp"
            and "silu_then_clamp" (limit).
        ACTIVATION: a name of `meta.activations.ACTIVATIONS`.

    Returns:
        fp32 tile. NaN in `gate` or `up` stays NaN.
    """
    activated = _gate_activation(gate, alpha, limit, ACTIVATION)
    if GATED:
        if ACTIVATION == "swiglu_oai":
            return activated * (tl.clamp(up, -limit, limit, propagate_nan=NAN) + 1.0)
        elif ACTIVATION == "silu_softcap":
            return activated * (limit * tanh(up / limit))
        elif ACTIVATION == "silu_clamp" or ACTIVATION == "silu_then_clamp":
            return activated * tl.clamp(up, -limit, limit, propagate_nan=NAN)
        else:
            return activated * up
    else:
        return activated


@triton.jit
def quantize_groups(
    first,
    x_ptr,
    q_ptr,
    scale_ptr,
    rows,
    K,
    groups,
    stride_r,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    largest_ptr=None,
):
    """Quantise scale groups first .. first + BLOCK_M - 1 (GROUP columns each), numbered through the rows.

    Groups of more than HELD columns are read twice: for their scale, and for their quotients. `largest_ptr`: of whole
    rows in fp16 of units of their own the largest magnitudes, see `scales.from_half`.
    """
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    if largest_ptr is not None:
        _quantize_halves(first, x_ptr, largest_ptr, q_ptr, scale_ptr, rows, K, stride_r, DTYPE, GROUP, BLOCK_M)
    elif DTYPE == tl.uint8:
        STEP: tl.constexpr = GROUP if GROUP < AT_ONCE else AT_ONCE
        quantize_nv_rows(first, x_ptr, q_ptr, scale_ptr, rows, K, stride_r, GROUP, BLOCK_M, STEP)
    else:
        _quantize_groups(first, x_ptr, q_ptr, scale_ptr, rows, K, groups, stride_r, DTYPE, GROUP, BLOCK_M)


@triton.jit
def _quantize_groups(
    first,
    x_ptr,
    q_ptr,
    scale_ptr,
    rows,
    K,
    groups,
    stride_r,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The same of formats that number scales as groups are numbered."""
    g = first + tl.arange(0, BLOCK_M)
    r = (g // groups).to(tl.int64)[:, None]
    exists = g < rows * groups
    if GROUP <= HELD:
        k = (g % groups * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        inside = exists[:, None] & (k < K)
        x = tl.load(x_ptr + r * stride_r + k, mask=inside, other=0.0).to(tl.float32)
        q, scale = quantize_group(x, DTYPE, scale_ptr.dtype.element_ty)
        tl.store(q_ptr + r * K + k, q, mask=inside)
    else:
        tl.static_assert(BLOCK_M == 1, "groups of many columns are taken one by one")
        first_k = (g % groups * GROUP)[:, None] + tl.arange(0, AT_ONCE)[None, :]
        amax = tl.zeros([BLOCK_M], tl.float32)
        for start in range(0, GROUP, AT_ONCE):
            k = first_k + start
            x = tl.load(x_ptr + r * stride_r + k, mask=exists[:, None] & (k < K), other=0.0).to(tl.float32)
            amax = tl.maximum(amax, largest_magnitude(x, DTYPE), propagate_nan=NAN)
        scale = group_scale(amax, DTYPE)
        for start in range(0, GROUP, AT_ONCE):
            k = first_k + start
            inside = exists[:, None] & (k < K)
            x = tl.load(x_ptr + r * stride_r + k, mask=inside, other=0.0).to(tl.float32)
            tl.store(q_ptr + r * K + k, store_as(x, scale, DTYPE), mask=inside)
    tl.store(scale_ptr + g, scale, mask=exists)


@triton.jit
def _quantize_halves(
    first, x_ptr, largest_ptr, q_ptr, scale_ptr, rows, K, stride_r, DTYPE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Quantise rows first .. first + BLOCK_M - 1 of halves; GROUP: a power of two that holds their columns."""
    ALL: tl.constexpr = (GROUP + HALF_GROUP - 1) // HALF_GROUP
    PARTS: tl.constexpr = min(ALL, HELD // HALF_GROUP)  # of a row, at a time
    parts = (K + HALF_GROUP - 1) // HALF_GROUP
    r = first + tl.arange(0, BLOCK_M)
    part = tl.arange(0, ALL)[None, :]
    exists = (r < rows)[:, None] & (part < parts)
    largest = tl.load(largest_ptr + r.to(tl.int64)[:, None] * parts + part, mask=exists, other=0.0)
    scale = group_scale(tl.max(largest, axis=1), DTYPE)
    tl.store(scale_ptr + r, scale, mask=r < rows)
    of_parts = tl.broadcast_to(scale[:, None], [BLOCK_M, PARTS]).reshape(BLOCK_M * PARTS)
    at = tl.arange(0, BLOCK_M * PARTS)
    row = (first + at // PARTS).to(tl.int64)
    for start in range(0, ALL, PARTS):
        group = start + at % PARTS
        k = (group * HALF_GROUP)[:, None] + tl.arange(0, HALF_GROUP)[None, :]
        inside = (row < rows)[:, None] & (k < K)
        x = tl.load(x_ptr + row[:, None] * stride_r + k, mask=inside, other=0.0)
        x = from_half(x, tl.load(largest_ptr + row * parts + group, mask=(row < rows) & (group < parts), other=0.0))
        tl.store(q_ptr + row[:, None] * K + k, store_as(x, of_parts, DTYPE), mask=inside)


def room(size: tuple[int, ...], form: ActivationFormat, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for quantised rows [..., H] and their scales [..., groups of H]."""
    stored, scales = (*size[:-1], size[-1] // form.pack), (*size[:-1], form.scale_width(size[-1]))
    return (
        torch.empty(stored, dtype=form.dtype, device=device),
        torch.empty(scales, dtype=form.scale_dtype, device=device),
    )


def count_groups(columns: int, quantized: torch.Tensor, scale: torch.Tensor) -> int:
    """Scale groups of a row: one of formats that keep all of its scales together, which are those of packed codes."""
    return 1 if quantized.shape[-1] < columns else scale.shape[-1]


def group_columns(form: ActivationFormat, width: int) -> int:
    """Columns that share a scale, as kernels take them: for whole rows a power of two that holds them, and a block."""
    return next_power_of_2(max(width, NV_BLOCK if form.pack > 1 else 1)) if form.group == WHOLE else form.group


class Beside(NamedTuple):
    """Rows that a kernel quantises beside its own work, in further programs.

    Args:
        rows: [T, H], unit stride along H; quantized, scale: of `room`.
        group: columns that share a scale, see `group_columns`.
    """

    rows: torch.Tensor
    quantized: torch.Tensor
    scale: torch.Tensor
    group: int

    @property
    def programs(self) -> int:
        """How many programs that takes."""
        groups = self.rows.shape[0] * count_groups(self.rows.shape[1], self.quantized, self.scale)
        return cdiv(groups, max(1, BESIDE.value // self.group))


def beside(rows: torch.Tensor, form: ActivationFormat | None) -> Beside | None:
    """Room for quantised `rows`, None where products take them as they are."""
    if form is None:
        return None
    return Beside(rows, *room(tuple(rows.shape), form, rows.device), group_columns(form, rows.shape[1]))


def beside_arguments(rows: Beside | None) -> dict[str, Any]:
    """What a kernel that calls `quantize_beside` takes."""
    if rows is None:
        return {"hidden_ptr": None, "q_ptr": None, "scale_ptr": None, "H": 0, "stride_h": 0, "GROUP": 0}
    tensors = {"hidden_ptr": rows.rows, "q_ptr": rows.quantized, "scale_ptr": rows.scale}
    return {**tensors, "H": rows.rows.shape[1], "stride_h": rows.rows.stride(0), "GROUP": rows.group}


@triton.jit
def quantize_beside(program, hidden_ptr, q_ptr, scale_ptr, rows, H, stride_h, GROUP: tl.constexpr):
    """What program number `program` of those beside does; GROUP 0: nothing."""
    if GROUP > 0:
        groups = (H + GROUP - 1) // GROUP
        BLOCK_M: tl.constexpr = BESIDE // GROUP if GROUP < BESIDE else 1
        quantize_groups(program * BLOCK_M, hidden_ptr, q_ptr, scale_ptr, rows, H, groups, stride_h, GROUP, BLOCK_M)


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(
    x_ptr,
    largest_ptr,
    counts_ptr,
    q_ptr,
    scale_ptr,
    rows,
    K,
    groups,
    stride_e,
    stride_r,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program quantises blocks of BLOCK_M scale groups (GROUP columns of one row) of one expert.

    Groups are numbered through the rows of the expert, so no width of K leaves lanes idle. Programs of an expert share
    out the blocks of its first counts[e] rows (of all rows when counts is None). With `largest_ptr` elements are fp16
    of units of their own.

    Bytes: rows (K (sizeof(element) + sizeof(code)) + sizeof(scale) groups), and 4 of each 128 columns of halves.
    """
    # Released first: the next kernel may load weights from now on, and waits for this one, which waits here.
    pdl_release(PDL)
    pdl_wait(PDL)
    e = tl.program_id(1).to(tl.int64)
    PACK: tl.constexpr = 2 if q_ptr.dtype.element_ty == tl.uint8 else 1
    used = rows
    if counts_ptr is not None:
        used = tl.minimum(tl.load(counts_ptr + e), rows)
    for first in range(tl.program_id(0) * BLOCK_M, used * groups, tl.num_programs(0) * BLOCK_M):
        quantize_groups(
            first,
            x_ptr + e * stride_e,
            q_ptr + e * rows * (K // PACK),
            scale_ptr + e * rows * (groups if PACK == 1 else nv_scale_bytes(K)),
            used,
            K,
            groups,
            stride_r,
            GROUP,
            BLOCK_M,
            None if largest_ptr is None else largest_ptr + e * rows * ((K + HALF_GROUP - 1) // HALF_GROUP),
        )


def _quantize(
    x: torch.Tensor,
    counts: torch.Tensor | None,
    q: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    pdl: bool = False,
    largest: torch.Tensor | None = None,
) -> None:
    """Quantise [E, rows, K] into `q` and `scale`, one kernel; `counts` bounds the rows on the device. `largest`: of
    rows of halves.
    """
    (E, rows, K), groups = x.shape, count_groups(x.shape[2], q, scale)
    if scale.numel() == 0 or (counts is not None and counts.numel() == 0):
        return
    if x.stride(2) != 1:
        x = x.contiguous()
    many = rows * groups >= 4096
    block_m = max(1, (4096 if many else 512) // group)
    columns = block_m * (group if group <= HELD.value else AT_ONCE.value)
    blocks = cdiv(rows * groups, block_m)
    launch(
        _quantize_kernel,
        (blocks if counts is None else min(blocks, max(1, PROGRAMS // E)), E),
        x,
        largest,
        counts,
        q,
        scale,
        rows,
        K,
        groups,
        x.stride(0),
        x.stride(1),
        GROUP=group,
        BLOCK_M=block_m,
        PDL=pdl,
        num_warps=min(16, max(1, columns // (1024 if many else 512))),
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["rows"])
def _quantize_static_kernel(
    x_ptr,
    extents_ptr,
    static_ptr,
    row_to_pair_ptr,
    q_ptr,
    scale_ptr,
    rows,
    K,
    stride_r,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP_K: tl.constexpr,
    BATCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program quantises every num_programs-th row of all experts, BATCHED: of expert number program_id(1), by the
    scale of the row's expert; rows past `extents` are neither read nor written.

    Bytes: R (K (sizeof(element) + 1) + 4).
    """
    pdl_release(PDL)
    pdl_wait(PDL)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    e = tl.arange(0, BLOCK_E)
    if BATCHED:
        expert = tl.program_id(1)
        used = tl.minimum(tl.load(extents_ptr + expert), rows)
        first_row = expert.to(tl.int64) * rows
    else:
        ends = tl.load(extents_ptr + e, mask=e < E, other=0)
        used = tl.minimum(tl.max(ends, axis=0), rows)
        first_row = tl.program_id(1).to(tl.int64)  # 0
    for r in range(tl.program_id(0), used, tl.num_programs(0)):
        if not BATCHED:
            expert = tl.sum(((ends <= r) & (e < E)).to(tl.int32), axis=0)
        scale = tl.load(static_ptr + expert)
        row = first_row + r
        source = row
        if row_to_pair_ptr is not None:
            source = (tl.load(row_to_pair_ptr + row) // TOP_K).to(tl.int64)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + source * stride_r + k, mask=k < K, other=0.0).to(tl.float32)
            # Beyond the largest number of DTYPE it saturates; an infinity's quotient would be no number.
            x = tl.clamp(x, -512.0 * scale, 512.0 * scale, propagate_nan=NAN)
            q = store_as(x[None, :], scale + tl.zeros([1], tl.float32), DTYPE)
            tl.store(q_ptr + row * K + k[None, :], q, mask=k[None, :] < K)
        tl.store(scale_ptr + row, scale)


def quantize_static(
    x: torch.Tensor,
    extents: torch.Tensor,
    static: torch.Tensor,
    form: ActivationFormat,
    pairs: tuple[torch.Tensor, int] | None = None,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows of every expert by a scale that was calibrated before.

    Args:
        x: [R, K] sorted rows, a batch [E, C, K], or tokens [T, K] with `pairs`.
        extents: i32 [E], cumulative ends of the sorted rows, or how many rows of each expert's batch are used.
        static: f32 [E, 1, 1].
        pairs: row_to_pair i32 [R] of the sorted rows that are made of tokens, and top-k.

    Returns:
        (q [R, K] or [E, C, K] as `form` stores rows, scale f32 [R, 1] or [E, C, 1]); rows past `extents` are
        uninitialised.
    """
    x, batched, E = unit_stride(x), x.dim() == 3, static.shape[0]
    if batched:
        x = x.contiguous()
    row_to_pair, top_k = (None, 0) if pairs is None else pairs
    leading = tuple(x.shape[:-1]) if row_to_pair is None else (row_to_pair.shape[0],)
    K, rows = x.shape[-1], leading[-1]
    q, scale = room((*leading, K), form, x.device)
    if q.numel() == 0:
        return q, scale
    block_k = min(next_power_of_2(K), AT_ONCE.value)
    launch(
        _quantize_static_kernel,
        (min(rows, max(1, PROGRAMS // E)), E) if batched else (min(rows, PROGRAMS), 1),
        x,
        extents,
        static.contiguous(),
        row_to_pair,
        q,
        scale,
        rows,
        K,
        x.stride(-2),
        E=E,
        BLOCK_E=next_power_of_2(E),
        BLOCK_K=block_k,
        TOP_K=top_k,
        BATCHED=batched,
        PDL=pdl,
        num_warps=min(8, max(1, block_k // 512)),
        launch_pdl=pdl,
    )
    return q, scale


def fill(rows: Beside, pdl: bool) -> None:
    """Quantise in a kernel of its own, where no other one does it beside its work."""
    _quantize(rows.rows[None], None, rows.quantized[None], rows.scale[None], rows.group, pdl)


def quantize_rows(
    rows: torch.Tensor, form: ActivationFormat, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations by row and group of columns.

    Args:
        rows: [R, K] any float dtype, any row stride.
        pdl: launch as a programmatic dependent of the kernel before.

    Returns:
        (q [R, K], scale [R, groups of K]), as `form.quantize` makes them.
    """
    made = beside(rows, form)
    fill(made, pdl)
    return made.quantized, made.scale


def quantize_batched(
    batch: torch.Tensor,
    expert_num_tokens: torch.Tensor | None,
    form: ActivationFormat,
    largest: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the first expert_num_tokens[e] rows of each expert; other rows are neither read nor written.

    Args:
        batch: [E, C, K]; expert_num_tokens: i32 [E] on the device, or None for all rows.
        largest: f32 [E, C, ceil(K / HALF_GROUP)], of fp16 rows in units of their own (`scales.store_as`).
        pdl: launch as a programmatic dependent of the kernel before.

    Returns:
        (q [E, C, K], scale [E, C, groups of K]), as `form.quantize` makes them.
    """
    q, scale = room(tuple(batch.shape), form, batch.device)
    _quantize(batch, expert_num_tokens, q, scale, group_columns(form, batch.shape[2]), pdl, largest)
    return q, scale


def quantize_sorted(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    form: ActivationFormat,
    largest: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows [R, K] below the last of `offsets` i32 [E]; other rows are neither read nor written. `largest`:
    as for `quantize_batched`, [R, ceil(K / HALF_GROUP)].
    """
    made = beside(rows, form)
    _quantize(rows[None], offsets[-1:], made.quantized[None], made.scale[None], made.group, pdl, largest)
    return made.quantized, made.scale
