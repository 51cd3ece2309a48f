"""The decode path: a few (token, expert) pairs, no sorting, each pair streams its expert's weights once.

Two kernels replace sort, two GEMMs and combine: with T * K pairs far fewer than experts almost no weight is shared
between pairs, so a matrix-vector product per pair moves the same bytes as a grouped GEMM, starts at once, and keeps
many more loads in flight. The second kernel owns its output columns for all K experts of a token, so the weighted sum
is a register accumulation in fixed order and the unweighted rows never exist. Weights that are decoded have sums of
their own: `packed_rows`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from meta.schemes import WHOLE
from moe_ops.counters import Row
from moe_ops.kernels.triton.act_quant import apply_activation, quantize_rows
from moe_ops.kernels.triton.config import SmallConfig
from moe_ops.kernels.triton.launch import SMALLEST_GROUP, ExpertMM
from moe_ops.kernels.triton.packed_rows import load_stored, packed_glu_sums, packed_operand, row_sums, vectors_at
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.scales import load_scale
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED, expert_rows
from moe_ops.kernels.triton.util import (
    INTERPRETED,
    cdiv,
    count_pair,
    is_counted,
    load_expert,
    next_power_of_2,
    pdl_release,
    pdl_wait,
    round_to,
    widen,
)


@triton.jit
def _lanes(product, VECTOR: tl.constexpr):
    """`product` [..., BLOCK_K] summed over what one thread loaded at once, [..., BLOCK_K / VECTOR]: fewer registers for
    a running sum. us on an H200, T = 1: Mixtral in fp8 129 without and 93 with it, Qwen3-30B-A3B 18.0 and 17.6; but in
    bf16 21.9 and 29.6, so of quantised weights alone.
    """
    if VECTOR == 1:
        return product
    elif len(product.shape) == 2:
        return tl.sum(product.reshape(product.shape[0], product.shape[1] // VECTOR, VECTOR), axis=2)
    else:
        parts = product.reshape(product.shape[0], product.shape[1], product.shape[2] // VECTOR, VECTOR)
        return tl.sum(parts, axis=3)


@triton.jit
def _add(total, tile, vector):
    """total + tile * vector, and the sum of what one thread loaded at once, where `total` has fewer columns: of words
    of int8 that of four products, exact, by one instruction, where floats would be eight, four of them conversions.
    """
    if tile.dtype != tl.int32:
        VECTOR: tl.constexpr = tile.shape[-1] // total.shape[-1]
        return total + _lanes(widen(tile) * vector, VECTOR)
    elif INTERPRETED:
        for byte in tl.static_range(4):
            total += ((tile << (24 - 8 * byte)) >> 24) * ((vector << (24 - 8 * byte)) >> 24)
        return total
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [tile, vector, total], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.constexpr_function
def at_once(scheme, element):
    """Elements of a weight that a thread loads at once and sums up."""
    return 1 if scheme is None or element == tl.int32 else 128 // element.primitive_bitwidth


@triton.constexpr_function
def sums_of(element):
    """What products with weights of this type are summed in."""
    return tl.int32 if element == tl.int32 else tl.float32


@triton.constexpr_function
def has_groups(scheme):
    """Whether scales belong to groups of columns, not to whole rows."""
    return scheme is not None and scheme[1] != 0


@triton.constexpr_function
def packed_of(scheme):
    """See `launch.ExpertMM.packed`."""
    return None if scheme is None else scheme[4]


@triton.jit
def _scaled_input(
    x,
    x_scale,
    w_scale,
    x_row,
    expert,
    w_row,
    k,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    SCHEME: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The vector a weight tile is multiplied with: x itself, or quantised x times its scales and those of weight row
    `w_row`, group by group; scales of whole rows come behind the sum.
    """
    if not has_groups(SCHEME):
        return x
    else:
        GROUP: tl.constexpr = SCHEME[1]
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        group = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
        pointers = w_scale + expert.to(tl.int64) * STRIDES[0] + (w_row // SCHEME[0]) * STRIDES[1] + group * STRIDES[2]
        scale = tl.load(x_scale + x_row.to(tl.int64) * GROUPS + group, mask=group < GROUPS, other=0.0)
        scale *= load_scale(pointers, group < GROUPS)
        return (x.reshape(BLOCK_K // GROUP, GROUP) * scale[:, None]).reshape(BLOCK_K)


@triton.jit
def _weight_rows(w, expert, row, valid, k, K: tl.constexpr, STRIDES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_N, BLOCK_K] of the expert's weight as stored; 0 outside."""
    k_index = k + tl.arange(0, BLOCK_K)
    pointers = (
        w
        + expert.to(tl.int64) * STRIDES[0]
        + row.to(tl.int64)[:, None] * STRIDES[1]
        + k_index.to(tl.int64)[None, :] * STRIDES[2]
    )
    mask = valid[:, None] if K % BLOCK_K == 0 else valid[:, None] & (k_index < K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _rows_of_halves(column, GLU: tl.constexpr):
    """Weight rows of the gate and of the up half that make these columns, each of its own half where they are two."""
    if GLU == INTERLEAVED:
        return 2 * column, 2 * column + 1
    else:
        return column, column


@triton.jit
def _glu_sums(
    x,
    x_scale,
    x_factor,
    w,
    w_scale,
    up_offset,
    up_scale_offset,
    token,
    expert,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """fp32 [BLOCK_N] products of the vector at `x` with the gate's rows and with the up half's, from column `first` on;
    without a gate both are the same. `x_factor`: multiplied with x, and rounded as x is stored, or None.
    """
    W_STRIDES: tl.constexpr = STRIDES[0]
    SCALE_STRIDES: tl.constexpr = STRIDES[1]
    column = first + tl.arange(0, BLOCK_N)
    valid = column < N
    gate_row, up_row = _rows_of_halves(column, GLU)
    w_up = w + up_offset if GLU == CONCAT else w
    ELEMENT: tl.constexpr = w.dtype.element_ty
    SUMS: tl.constexpr = BLOCK_K // at_once(SCHEME, ELEMENT)
    gate = tl.zeros((BLOCK_N, SUMS), sums_of(ELEMENT))
    up = tl.zeros((BLOCK_N, SUMS), sums_of(ELEMENT))
    for k in range(0, K, BLOCK_K):
        # Weights first: they take longest.
        gate_tile = _weight_rows(w, expert, gate_row, valid, k, K, W_STRIDES, BLOCK_K)
        up_tile = _weight_rows(w_up, expert, up_row, valid, k, K, W_STRIDES, BLOCK_K) if GLU > 0 else gate_tile
        k_index = k + tl.arange(0, BLOCK_K)
        value = tl.load(x + k_index, mask=k_index < K, other=0.0)
        if ELEMENT != tl.int32:
            value = widen(value)
        if x_factor is not None:
            value = round_to(value * x_factor, x.dtype.element_ty).to(tl.float32)
        row = 2 * first if GLU == INTERLEAVED else first
        scales = (x_scale, w_scale, token, expert)
        gate_in = _scaled_input(value, *scales, row, k, K, SCALE_STRIDES, SCHEME, BLOCK_K)
        gate = _add(gate, gate_tile, gate_in[None, :])
        if GLU > 0:
            up_in = gate_in
            if GLU == CONCAT and has_groups(SCHEME):
                # Groups that run on over both halves are counted from the stack's first row.
                row = N + first if SCHEME[2] else first
                scales = (x_scale, w_scale + (0 if SCHEME[2] else up_scale_offset), token, expert)
                up_in = _scaled_input(value, *scales, row, k, K, SCALE_STRIDES, SCHEME, BLOCK_K)
            up = _add(up, up_tile, up_in[None, :])
    gate_sum = tl.sum(gate, axis=1).to(tl.float32)
    up_sum = tl.sum(up, axis=1).to(tl.float32)
    if SCHEME is not None and not has_groups(SCHEME):
        of_x = tl.load(x_scale + token)
        scales = w_scale + expert.to(tl.int64) * SCALE_STRIDES[0]
        gate_sum *= of_x * load_scale(scales + gate_row * SCALE_STRIDES[1], valid)
        if GLU > 0:
            scales += up_scale_offset if GLU == CONCAT else 0
            up_sum *= of_x * load_scale(scales + up_row * SCALE_STRIDES[1], valid)
    return gate_sum, up_sum


@triton.jit
def _small_glu_kernel(
    x,
    x_scale,
    topk_weights,
    topk_ids,
    expert_map,
    w,
    w_scale,
    w_zeros,
    w_outer,
    bias,
    h,
    up_offset,
    up_scale_offset,
    up_zeros_offset,
    up_outer_offset,
    stride_x,
    alpha,
    limit,
    load_ptr,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCHEME: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N activated columns of one pair. h[pair, n] = act(x_t . w_gate[n]) * (x_t . w_up[n]).

    The up half starts `up_offset` elements behind the gate, its scales `up_scale_offset` behind the gate's.
    Grid: (ceil(N / BLOCK_N), T * K). Bytes: pairs * N_w * K * w_size. FLOPs: 2 * pairs * N_w * K, on the CUDA cores,
    whose rate is far above what the weight stream needs. The first program of a pair adds it to the layer's counters.
    """
    BIAS_STRIDES: tl.constexpr = STRIDES[2]
    pdl_wait(PDL)
    pdl_release(PDL)
    pair = tl.program_id(1)
    expert = load_expert(topk_ids, expert_map, pair, pair >= 0, E, MAPPED)
    if expert < E:
        counted = is_counted(load_ptr, tl.program_id(0) == 0)
        first = tl.program_id(0) * BLOCK_N
        column = first + tl.arange(0, BLOCK_N)
        valid = column < N
        token = pair // TOP_K
        x_factor = None
        if WEIGHT_ON_INPUT:
            x_factor = tl.load(topk_weights + pair).to(tl.float32)
        if packed_of(SCHEME) is None:
            vector = x + token.to(tl.int64) * stride_x
            gate_sum, up_sum = _glu_sums(
                vector, x_scale, x_factor, w, w_scale, up_offset, up_scale_offset, token, expert, first, N, K, STRIDES,
                BLOCK_N, BLOCK_K, GLU, SCHEME,
            )  # fmt: skip
        else:
            scales = (w_scale, w_zeros, w_outer, up_scale_offset, up_zeros_offset, up_outer_offset)
            gate_sum, up_sum = packed_glu_sums(
                x, x_scale, x_factor, token, stride_x, w, scales, up_offset, expert, first, N, K, STRIDES, BLOCK_N,
                BLOCK_K, GLU, packed_of(SCHEME),
            )  # fmt: skip
        if BIAS_STRIDES is not None:
            shift = bias + expert.to(tl.int64) * BIAS_STRIDES[0]
            gate_row, up_row = _rows_of_halves(column, GLU)
            gate_sum += tl.load(shift + gate_row * BIAS_STRIDES[1], mask=valid, other=0.0).to(tl.float32)
            if GLU > 0:
                bias_row = N + column if GLU == 1 else up_row
                up_sum += tl.load(shift + bias_row * BIAS_STRIDES[1], mask=valid, other=0.0).to(tl.float32)
        value = apply_activation(gate_sum, up_sum, alpha, limit, ACTIVATION, GLU > 0)
        tl.store(h + pair.to(tl.int64) * N + column, round_to(value, h.dtype.element_ty), mask=valid)
        count_pair(load_ptr, counted, expert)


@triton.jit
def _add_product(
    total,
    tile,
    h,
    h_scale,
    pair,
    held,
    scale,
    w_scale,
    expert,
    first,
    k,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    SCHEME: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + tile * scale h, of BLOCK_K columns of h [pairs, K] from k on, see `_add`; of words without `scale`."""
    k_index = k + tl.arange(0, BLOCK_K)
    mask = held[:, None] & (k_index < K)[None, :]
    value = tl.load(h + pair.to(tl.int64)[:, None] * K + k_index[None, :], mask=mask, other=0.0)
    if tile.dtype != tl.int32:
        value = widen(value)
    if has_groups(SCHEME):
        PAIRS: tl.constexpr = tile.shape[0]
        GROUP: tl.constexpr = SCHEME[1]
        group = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
        pointers = (
            w_scale + expert[:, None] * STRIDES[0] + (first // SCHEME[0]) * STRIDES[1] + group[None, :] * STRIDES[2]
        )
        inside = held[:, None] & (group * GROUP < K)[None, :]
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        group_scale = tl.load(h_scale + pair.to(tl.int64)[:, None] * GROUPS + group[None, :], mask=inside, other=0.0)
        group_scale *= load_scale(pointers, inside)
        value = value.reshape(PAIRS, BLOCK_K // GROUP, GROUP) * group_scale[:, :, None]
        value = value.reshape(PAIRS, BLOCK_K)
    if tile.dtype != tl.int32:
        value *= scale[:, None]
    return _add(total, tile, value[:, None, :])


@triton.jit
def _down_products(
    tile,
    rows,
    exists,
    h,
    h_scale,
    pair,
    held,
    scale,
    w_scale,
    expert,
    first,
    K: tl.constexpr,
    W_STRIDES: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,
    SCHEME: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_P, BLOCK_N] products of `scale` h with the weight rows at `rows`, whose first columns are `tile`."""
    SUMS: tl.constexpr = BLOCK_K // at_once(SCHEME, tile.dtype)
    total = tl.zeros((rows.shape[0], rows.shape[1], SUMS), sums_of(tile.dtype))
    BY_ROW: tl.constexpr = SCHEME is not None and not has_groups(SCHEME)
    factor = scale
    if BY_ROW:
        factor *= tl.load(h_scale + pair, mask=held, other=0.0)
    operands = (h, h_scale, pair, held, factor, w_scale, expert, first)
    if SCHEME is None:
        # Nothing on its way while a product is made: us on an H200, gpt-oss-120b in bf16, T = 1: 50.1, else 55.0.
        total = _add_product(total, tile, *operands, 0, K, SCALE_STRIDES, SCHEME, BLOCK_K)
        for k in range(BLOCK_K, K, BLOCK_K):
            tile = expert_rows(rows, exists, k, K, W_STRIDES, BLOCK_K)
            total = _add_product(total, tile, *operands, k, K, SCALE_STRIDES, SCHEME, BLOCK_K)
    else:
        for k in range(0, K, BLOCK_K):
            following = expert_rows(rows, exists, k + BLOCK_K, K, W_STRIDES, BLOCK_K)
            total = _add_product(total, tile, *operands, k, K, SCALE_STRIDES, SCHEME, BLOCK_K)
            tile = following
    products = tl.sum(total, axis=2).to(tl.float32)
    if tile.dtype == tl.int32:
        products *= factor[:, None]
    if BY_ROW:
        column = first + tl.arange(0, rows.shape[1])
        pointers = w_scale + expert[:, None] * SCALE_STRIDES[0] + column[None, :] * SCALE_STRIDES[1]
        products *= load_scale(pointers, exists)
    return products


@triton.jit
def _small_down_kernel(
    h,
    h_scale,
    topk_weights,
    topk_ids,
    expert_map,
    w,
    w_scale,
    w_zeros,
    w_outer,
    bias,
    out,
    E: tl.constexpr,
    MAPPED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCHEME: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N columns of one token's output, out[t] = sum_k weight_k * (w[e_k] h_k + bias[e_k]).

    Grid: (ceil(N / BLOCK_N), T). Bytes: pairs * N * K * w_size. All TOP_K experts' rows are one load
    [BLOCK_P, BLOCK_N, BLOCK_K] (BLOCK_P a power of two >= TOP_K), so no expert waits for another; the lanes are summed
    once, at the end, in an order that depends on nothing.
    """
    W_STRIDES: tl.constexpr = STRIDES[0]
    SCALE_STRIDES: tl.constexpr = STRIDES[1]
    BIAS_STRIDES: tl.constexpr = STRIDES[2]
    PACKED: tl.constexpr = packed_of(SCHEME)
    token = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_P)
    pair = token * TOP_K + place
    expert = load_expert(topk_ids, expert_map, pair, place < TOP_K, E, MAPPED)
    held = expert < E
    expert = tl.minimum(expert, E - 1).to(tl.int64)  # of a dropped pair any: nothing of it is read
    exists = held[:, None] & (column < N)[None, :]
    # The kernel before writes h alone: weights and ids were there when it started.
    if PACKED is None:
        rows = w + expert[:, None] * W_STRIDES[0] + column.to(tl.int64)[None, :] * W_STRIDES[1]
        tile = expert_rows(rows, exists, 0, K, W_STRIDES, BLOCK_K)
    else:
        scales = (w_scale, w_zeros, w_outer, 0, 0, 0)
        where = (expert[:, None], column[None, :], tl.zeros((1, 1), tl.int32), exists)
        operand = packed_operand(w, scales, 0, *where, N, PACKED, STRIDES)
        tile = load_stored(operand, 0, K, PACKED, STRIDES, BLOCK_K)
    pdl_wait(PDL)
    pdl_release(PDL)
    if WEIGHT_ON_INPUT:
        scale = tl.where(held, 1.0, 0.0)
    else:
        # `where`, not a product with 0: a dropped pair's weight may be NaN.
        scale = tl.where(held, tl.load(topk_weights + pair, mask=held, other=0.0).to(tl.float32), 0.0)
    if PACKED is None:
        of_rows = (h, h_scale, pair, held, scale, w_scale, expert, first)
        products = _down_products(tile, rows, exists, *of_rows, K, W_STRIDES, SCALE_STRIDES, SCHEME, BLOCK_K)
    else:
        vectors = vectors_at(h, h_scale, pair, K, K, PACKED)
        products = row_sums(tile, operand, vectors, held, None, K, PACKED, STRIDES, BLOCK_K, True) * scale[:, None]
    result = tl.sum(products, axis=0)
    if BIAS_STRIDES is not None:
        pointers = bias + expert[:, None] * BIAS_STRIDES[0] + column[None, :] * BIAS_STRIDES[1]
        result += tl.sum(scale[:, None] * tl.load(pointers, mask=exists, other=0.0).to(tl.float32), axis=0)
    tl.store(out + token.to(tl.int64) * N + column, round_to(result, out.dtype.element_ty), mask=column < N)


def reads_rows(up: ExpertMM, down: ExpertMM) -> bool:
    """Whether the weights' rows are contiguous, as a stream of them has to be: of weights stored [E, K, N] every row is
    in pieces. us on an H200, T = 1, bf16: gpt-oss-20b 279 so, 67 with the best tiles for it, 64 by products.
    """
    weights = (up.weight, down.weight)
    return all(weight.stride(2) == 1 for weight in weights)


def _strides(mm: ExpertMM) -> tuple[tuple[int, ...] | None, ...]:
    """Of the weight, its scales of groups, the bias, zero points, scales of rows; None for what is absent."""
    return *mm.strides, mm.decoding["zeros"].strides, mm.decoding["rows"].strides


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """int32 [R, K / 4] of int8 [R, K], of which four divides K."""
    places = (rows.data_ptr(), rows.storage_offset(), rows.stride(0))
    return (rows if all(n % 4 == 0 for n in places) else rows.clone(memory_format=torch.contiguous_format)).view(
        torch.int32
    )


def refuses(up: ExpertMM, down: ExpertMM, config: tuple[SmallConfig, SmallConfig], weight_on_input: bool) -> bool:
    """Whether a program's weight rows could span two scale groups, or a token's pairs differ before they are quantised
    or by the scales of their experts, or a word's codes have two scales, or rows of int8 are not made of words, or are
    blocks for tensor cores: none of which these kernels handle.
    """
    if up.scheme is None or down.scheme is None:
        return False
    if up.blocks is not None:
        return True
    if up.operand.static is not None or down.operand.static is not None or (up.form is not None and weight_on_input):
        return True
    if up.is_packed:
        return any(not mm.exact_scales and mm.group_columns % SMALLEST_GROUP for mm in (up, down))
    if up.operand.scheme.code.name == "int8":
        return not (up.has_words and down.has_words)
    if up.scheme[1] == WHOLE:
        return False
    step = config[0].block_n * (2 if up.glu_layout == "interleaved" else 1)
    aligned = up.scheme[0] % step == 0 and down.scheme[0] % config[1].block_n == 0
    return not (aligned and up.out_features % step == 0)


def small_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    up: ExpertMM,
    down: ExpertMM,
    config: tuple[SmallConfig, SmallConfig],
    *,
    expert_map: torch.Tensor | None,
    weight_on_input: bool,
    pdl: bool = False,
    load: Row | None = None,
) -> torch.Tensor:
    """Experts of a few tokens in two launches, and one between them that quantises if the scheme says so.

    Args:
        hidden_states: [T, H], unit stride along H; topk_weights, topk_ids: [T, K], contiguous.
        up, down: the two projections; `up` has the activation, the rows' scales, and whether its output is quantised.
        expert_map: [E_global] local id or -1.
        pdl: start each kernel while the one before still runs (programmatic dependent launch).
        load: the layer's counters, or None.

    Returns:
        [T, H] in the dtype of `down.out_dtype`.
    """
    T, top_k = topk_ids.shape
    in_words, dots = None, up.is_scaled and up.operand.scheme.code.name == "int8"
    if up.is_decoded and up.operand.scheme.code.name == "e4m3":
        # Sums of single numbers want fp32, which an instruction makes of bytes. Of words, by halves that are bf16, it
        # is 1824 instructions for 1048, and 21.9 us of a layer for 17.1 (Qwen3-30B-A3B's dimensions, H200).
        in_words = False
    elif up.is_packed or dots:
        in_words = True
    if in_words is not None:
        up, down = replace(up, in_words=in_words), replace(down, in_words=in_words)
    E, intermediate, hidden = up.num_experts, up.out_features, down.out_features
    first, second = config
    columns, hidden_columns, first_k, second_k = up.in_features, intermediate, first.block_k, second.block_k
    if dots:
        hidden_states = _in_words(hidden_states)
        columns, hidden_columns, first_k, second_k = (n // 4 for n in (columns, hidden_columns, first_k, second_k))
    # Quantised from fp32, the numbers that the large path's epilogue quantises.
    h_dtype = torch.float32 if up.quantize_output else hidden_states.dtype
    h = hidden_states.new_empty((T * top_k, intermediate), dtype=h_dtype)
    out = hidden_states.new_empty((T, hidden), dtype=down.out_dtype)
    mapped = 0 if expert_map is None else expert_map.shape[0]
    launch(
        _small_glu_kernel,
        (cdiv(intermediate, first.block_n), T * top_k),
        hidden_states,
        up.rows_scale,
        topk_weights,
        topk_ids,
        expert_map,
        up.weight,
        up.weight_scale,
        up.decoding["zeros"].tensor,
        up.decoding["rows"].tensor,
        up.bias,
        h,
        up.up_offset,
        up.up_scale_offset,
        up.decoding["zeros"].up_offset,
        up.decoding["rows"].up_offset,
        hidden_states.stride(0),
        up.alpha,
        up.limit,
        load,
        E,
        mapped,
        top_k,
        intermediate,
        columns,
        _strides(up),
        first.block_n,
        first_k,
        up.glu,
        up.activation,
        up.scheme,
        weight_on_input,
        pdl,
        num_warps=first.num_warps,
        num_stages=1,
        launch_pdl=pdl,
    )
    h_scale = None
    if up.quantize_output:
        h, h_scale = quantize_rows(h, up.form, pdl=pdl)
        h = _in_words(h) if dots else h
    launch(
        _small_down_kernel,
        (cdiv(hidden, second.block_n), T),
        h,
        h_scale,
        topk_weights,
        topk_ids,
        expert_map,
        down.weight,
        down.weight_scale,
        down.decoding["zeros"].tensor,
        down.decoding["rows"].tensor,
        down.bias,
        out,
        E,
        mapped,
        top_k,
        next_power_of_2(top_k),
        hidden,
        hidden_columns,
        _strides(down),
        second.block_n,
        second_k,
        down.scheme,
        weight_on_input,
        pdl,
        num_warps=second.num_warps,
        num_stages=1,
        launch_pdl=pdl,
    )
    return out
