"""One output tile of an expert GEMM whose weights are codes of four or eight bits and whose activations are bf16;
fp16, whose rows are multiplied as the sum of two of bf16; or few rows of e4m3, whose numbers are bf16, too.

The stored bytes come by descriptor and are decoded in registers (`codes`), where they are the first operand of the
product; the rows are the second. The accumulator is therefore the tile transposed, and weight rows fill the 64 rows
that the tensor core always computes, however few tokens there are.

The columns of both operands are in an order in which a thread's codes are side by side in memory (`order`): of many
rows in the copies that they come from, by descriptor, else in the tile. Scales are fetched a step ahead. Instructions
of a loop step of 128 by 128 codes and a warp: mxfp4 416, nvfp4 453, int4_w4a16 336, fp8_w8a16 569; decoded byte by
byte, scales through shared memory, 536, 801, 481 and 617.

Each step waits for its products; of two programs on a multiprocessor one decodes while the other multiplies. On Hopper
`decoded_few_mm` has most products of few rows instead, and `decoded_mm` those of many. Their decoded weights do not go
through shared memory: there tensor cores read them once for every 64 rows, which with their stores is 1.3 times what
shared memory delivers in the time of the products (us of a layer on an H200, T = 4096, rows by descriptor both times:
Qwen3-30B-A3B, mxfp4 849 and 798, int8_w8a16 877 and 800; Mixtral-8x7B, mxfp4 5812 and 5330).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

from moe_ops.kernels.triton.codes import (
    E2M1,
    E2M1_SHIFT,
    E2M1_UNIT,
    E4M3,
    E4M3_SHIFT,
    E4M3_UNIT,
    as_words,
    codes_of_word,
    decode_words,
)
from moe_ops.kernels.triton.order import in_order
from moe_ops.kernels.triton.scales import decode_scale, load_row_scale, load_scale
from moe_ops.kernels.triton.tile_loads import BOTH, halves_of, load_rows, load_weight, weight_rows
from moe_ops.kernels.triton.util import INTERPRETED, widen

# Exponents of the scales that leave e2m1 numbers of bf16 as it is decoded, 127 for 1.
LEAST = tl.constexpr(128 - E2M1_SHIFT.value)
MOST = tl.constexpr(254 - E2M1_SHIFT.value)


@triton.jit
def of_rows(
    scale, apart, expert, w_row, half, N: tl.constexpr, GROUP_N: tl.constexpr, RUNS_ON: tl.constexpr,
    STRIDES: tl.constexpr,
):  # fmt: skip
    """Where the first of each weight row's scales is; those of the up half are `apart` unless the groups run on."""
    if GROUP_N == 0:
        at = w_row * 0
    elif RUNS_ON:
        at = (w_row + half * N) // GROUP_N
    else:
        at = w_row // GROUP_N
    start = expert.to(tl.int64) * STRIDES[0]
    return scale + start + (half.to(tl.int64) * apart if not RUNS_ON else 0) + at * STRIDES[1]


@triton.constexpr_function
def load_of(bits):
    """The instruction that loads as many bits."""
    return f"ld.global.nc.u{bits} $0, [$1];"


@triton.jit
def bits_of(stored):
    """int32 of the bits of numbers of at most 32."""
    return stored.to(tl.core.get_int_dtype(stored.dtype.primitive_bitwidth, False), bitcast=True).to(tl.int32)


@triton.jit
def fetch(pointers):
    """`bits_of` what is at `pointers`, all of which exist, loaded by the threads that use it.

    Triton loads in an order of its own, and brings a loop's values from there to those threads through shared memory,
    past a barrier in every step.
    """
    if INTERPRETED:
        bits = bits_of(tl.load(pointers))
    else:
        INSTRUCTION: tl.constexpr = load_of(pointers.dtype.element_ty.primitive_bitwidth)
        bits = tl.inline_asm_elementwise(
            INSTRUCTION, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    return bits


@triton.jit
def load_words(pointers, BYTES: tl.constexpr):
    """int32 of words of so many bytes that begin at `pointers` to one."""
    return bits_of(tl.load(pointers.to(tl.pointer_type(tl.core.get_int_dtype(8 * BYTES, False)))))


@triton.constexpr_function
def held_load_of(bits):
    """The instruction that loads as many bits where its second operand is not 0, and is 0 elsewhere."""
    return f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u{bits} $0, [$1]; }}"


@triton.jit
def fetch_held(pointers, held):
    """:func:`fetch` where `held`, and 0 elsewhere. Not interpreted."""
    INSTRUCTION: tl.constexpr = held_load_of(pointers.dtype.element_ty.primitive_bitwidth)
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=&r,l,r", [pointers.to(tl.int64), held.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _scale_bits(
    inner, k, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_K: tl.constexpr, EXACT: tl.constexpr, STRIDES: tl.constexpr,
    WHERE_USED: tl.constexpr,
):  # fmt: skip
    """int32 of the bits of the scales of columns k .. k + BLOCK_K - 1: [rows, groups] where EXACT, else [rows] of the
    first group. Those of the last group stand in for what is behind the row.
    """
    LAST: tl.constexpr = (K + GROUP_K - 1) // GROUP_K - 1 if GROUP_K > 0 else 0
    if inner is None:
        bits = 0
    else:
        if EXACT:
            group = tl.minimum(k // GROUP_K + tl.arange(0, BLOCK_K // GROUP_K), LAST)
            pointers = inner[:, None] + group[None, :] * STRIDES[2]
        else:
            pointers = inner + (tl.minimum(k // GROUP_K, LAST) * STRIDES[2] if GROUP_K > 0 else 0)
        if WHERE_USED:
            bits = fetch(pointers)
        else:
            bits = bits_of(tl.load(pointers))
    return bits


@triton.jit
def factor_of(bits, inner, EXACT: tl.constexpr, SHIFT: tl.constexpr):
    """fp32 of scales, or where EXACT bf16 of them times 2^SHIFT; NaN from 2^(128 - SHIFT) on."""
    if inner is None:
        factor = 1.0
    else:
        DTYPE: tl.constexpr = inner.dtype.element_ty
        if EXACT and SHIFT > 0 and DTYPE == tl.uint8 and not INTERPRETED:
            factor = tl.minimum((bits << 7) + SHIFT * 128, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            stored = bits.to(tl.core.get_int_dtype(DTYPE.primitive_bitwidth, False)).to(DTYPE, bitcast=True)
            factor = decode_scale(stored) * 2.0**SHIFT
            if EXACT and not INTERPRETED:
                factor = factor.to(tl.bfloat16)
    return factor


@triton.jit
def awaited(summed):
    """The sum, which products have been added to: an instruction of no effect uses it, so that Triton waits for it.

    Else products run on into the next step, and tensor cores read the registers of their first operand while the next
    codes are decoded: Triton (3.6) waits for each product one step later, and the assembler, for which a register is
    free once the product is issued, decodes into it before that.
    """
    return tl.inline_asm_elementwise("", "=f,0", [summed], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _in_two(rows):
    """Two bf16 numbers whose sum is the fp16 one, which has three bits more; the second is 0 of what is not finite."""
    wide = rows.to(tl.float32)
    first = wide.to(tl.bfloat16)
    second = tl.where(tl.abs(wide) < float("inf"), wide - first.to(tl.float32), 0.0)
    return first, second.to(tl.bfloat16)


@triton.constexpr_function
def takes_turns(packed):
    """Whether scales are multiplied in bf16 of which every one counts: those beside quantised rows."""
    return packed[2] and packed[8] >= 0


@triton.jit
def _factor_in_turn(bits, turn):
    """bf16 of powers of two whose exponents are `bits`, 127 for 1, that count in this turn, times what `_unit_of_turn`
    brings back; 0 of others. In the first turn, 0, all count beside which e2m1 is a normal number, in the next two the
    smaller and the larger ones. 255 is NaN.
    """
    least = tl.where(turn == 0, LEAST, tl.where(turn == 1, 0, MOST + 1))
    most = tl.where(turn == 0, MOST, tl.where(turn == 1, LEAST - 1, 254))
    field = bits + tl.where(turn == 0, E2M1_SHIFT, tl.where(turn == 1, E2M1_SHIFT + 127, E2M1_SHIFT - 63))
    number = tl.where((bits >= least) & (bits <= most), field << 7, tl.where(bits == 255, 0x7FC0, 0))
    if INTERPRETED:
        return (number << 16).to(tl.float32, bitcast=True)
    else:
        return number.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _unit_of_turn(turn):
    """What products of e2m1 and of the factors of a turn are in units of."""
    return tl.where(turn == 0, E2M1_UNIT, tl.where(turn == 1, E2M1_UNIT / 2.0**127, E2M1_UNIT * 2.0**63))


@triton.jit
def _sum_columns(
    accumulator,
    turn,
    a,
    a_desc,
    a_scale,
    a_row,
    row_valid,
    row_start,
    w,
    w_desc,
    inner,
    zeros,
    up_offset,
    expert,
    n_start,
    w_row,
    w_valid,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    A_TMA: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP_STRIDES: tl.constexpr,
    ZERO_STRIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`accumulator` [BLOCK_N, BLOCK_M] and the products of all columns, in an order of the weight rows that is not
    theirs where `has_runs`, and but for turns in units that the end brings back; and, where there are turns, which of
    the next two some scale has.
    """
    CODE: tl.constexpr = PACKED[0]
    PACK: tl.constexpr = PACKED[1]
    EXACT: tl.constexpr = PACKED[2]
    GROUP_K: tl.constexpr = PACKED[4]
    ROWS_GROUP: tl.constexpr = PACKED[8]
    ORDERED: tl.constexpr = PACKED[10] > 0
    ORDER: tl.constexpr = PACKED[10] if ORDERED else BLOCK_K
    tl.static_assert(BLOCK_K % ORDER == 0, "rows have an order of this tile's")
    tl.static_assert(ROWS_GROUP <= 0 or BLOCK_K == ROWS_GROUP, "a step is a group of the rows")
    tl.static_assert(EXACT or GROUP_K % BLOCK_K == 0, "a step is within a group")
    PER_WORD: tl.constexpr = codes_of_word(CODE)
    SHIFT: tl.constexpr = shift_of(PACKED)
    TURNS: tl.constexpr = takes_turns(PACKED)
    WARPS: tl.constexpr = 4 if INTERPRETED else num_warps()
    IN_ORDER: tl.constexpr = has_runs(PACKED, BLOCK_N, BLOCK_K, WARPS)
    COLUMNS: tl.constexpr = BLOCK_K // PACK
    WHERE_USED: tl.constexpr = IN_ORDER or not EXACT
    # Of a step, what multiplies; of the next, what has been fetched.
    bits = _scale_bits(inner, 0, K, BLOCK_K, GROUP_K, EXACT, GROUP_STRIDES, WHERE_USED)
    others = tl.full((), 0, tl.int32)
    if TURNS:
        factor, others = _factor_in_turn(bits, turn), _other_turn(bits)
    else:
        factor = factor_of(bits, inner, EXACT, SHIFT)
    bits = _scale_bits(inner, BLOCK_K, K, BLOCK_K, GROUP_K, EXACT, GROUP_STRIDES, WHERE_USED)
    if ROWS_GROUP > 0:
        next_scale = load_row_scale(a_scale, a_row, row_valid, 0, K, ROWS_GROUP)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # fmt: off
        stored = load_weight(
            w, w_desc, up_offset, w_row, w_valid, expert, n_start, k // PACK, K // PACK, W_STRIDES, BLOCK_N, COLUMNS,
            GLU, W_LOAD, SWAPPED, BOTH,
        ).T
        # fmt: on
        zero = None
        if zeros is not None:
            group = k // GROUP_K if GROUP_K > 0 else 0
            zero = tl.load(zeros + group * ZERO_STRIDES[2], mask=w_valid, other=0)[:, None]
        if TURNS:
            following, others = _factor_in_turn(bits, turn), others | _other_turn(bits)
        else:
            following = factor_of(bits, inner, EXACT, SHIFT)
        bits = _scale_bits(inner, k + 2 * BLOCK_K, K, BLOCK_K, GROUP_K, EXACT, GROUP_STRIDES, WHERE_USED)
        if ROWS_GROUP > 0:
            row_scale = next_scale
            next_scale = load_row_scale(a_scale, a_row, row_valid & (k + BLOCK_K < K), k + BLOCK_K, K, ROWS_GROUP)
        WAITS: tl.constexpr = ROWS_GROUP > 0 or (inner is not None and not EXACT)
        summed = tl.zeros_like(accumulator) if WAITS else accumulator
        rows = load_rows(a, a_desc, a_row, row_valid, row_start, k, K, A_STRIDE, BLOCK_K, A_TMA)
        decoded = decode_words(as_words(stored), zero, CODE, EXACT)
        if EXACT:
            of_words = tl.broadcast_to(factor[:, :, None], (BLOCK_N, BLOCK_K // GROUP_K, GROUP_K // PER_WORD))
            decoded *= of_words.reshape(BLOCK_N, BLOCK_K // PER_WORD)[:, :, None, None]
        decoded = in_order(decoded.reshape(BLOCK_N, BLOCK_K), ORDER, PER_WORD)
        if not ORDERED:
            rows = in_order(rows, BLOCK_K, PER_WORD)
        if IN_ORDER:
            decoded = decoded.reshape(BLOCK_N // 16 // WARPS, 2, WARPS, 8, BLOCK_K).permute(0, 2, 1, 3, 4)
            decoded = decoded.reshape(BLOCK_N, BLOCK_K)
        if INTERPRETED:
            rows = widen(rows)
        elif rows.dtype == tl.float16:
            rows, rest = _in_two(rows)
            summed = tl.dot(decoded, rest.T, summed)
        elif ROWS_GROUP >= 0:
            rows = rows.to(tl.bfloat16)
        summed = tl.dot(decoded, rows.T, summed, input_precision="ieee")
        if not INTERPRETED:
            summed = awaited(summed)
        if ROWS_GROUP > 0:
            summed *= row_scale[None, :]
        if TURNS:
            summed *= _unit_of_turn(turn)
        if not WAITS:
            accumulator = summed
        elif EXACT or inner is None:
            accumulator += summed
        else:
            accumulator += summed * factor[:, None]
        factor = following
    return accumulator, others


@triton.jit
def _other_turn(bits):
    """The bit of the turn behind the first one in which a scale counts."""
    return tl.where(bits < LEAST, 1, tl.where(bits > MOST, 2, 0))


@triton.constexpr_function
def has_runs(packed, block_n, block_k, warps):
    """Whether a thread gets one run of a row from shared memory, where that is 16 words. With rows in the order of the
    product, nothing moves between threads, so that each can load the scales that it needs.
    """
    run = (packed[10] or block_k) // codes_of_word(packed[0]) // 4  # words of a thread's part of a row
    return packed[2] and run == 4 and block_n % (16 * warps) == 0


@triton.constexpr_function
def shift_of(packed):
    """Which power of two scales are times, that are multiplied in bf16."""
    if not packed[2]:
        return 0
    return {E2M1.value: E2M1_SHIFT.value, E4M3.value: E4M3_SHIFT.value}.get(packed[0], 0)


@triton.constexpr_function
def unit_of(packed):
    """What sums are multiplied with because of the numbers that codes became."""
    if packed[0] == E2M1.value:
        return E2M1_UNIT.value
    return E4M3_UNIT.value if packed[2] and packed[0] == E4M3.value else 1.0


@triton.jit
def packed_tile(
    a,
    a_desc,
    a_scale,
    a_row,
    row_valid,
    row_start,
    w,
    w_desc,
    scales,
    up_offset,
    expert,
    n_start,
    N: tl.constexpr,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    A_TMA: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP_STRIDES: tl.constexpr,
    ZERO_STRIDES: tl.constexpr,
    OUTER_STRIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 accumulator [BLOCK_M, BLOCK_N] of a tile: sum over k of a[row, k] * decoded w[expert, n, k].

    A scale of a power of two, or of few bits on a code of two, is multiplied in bf16, where the result is exact; any
    other where a group's sum is complete; one for a whole row of the weight at the end. Beside quantised rows, whose
    numbers are bf16, too, scales that no such number holds have turns of their own.

    Args: see `mm_tile.mm_tile`;
        a_scale: f32 [rows, groups of K] of quantised rows, PACKED[8] columns in a group, 0 for all.
        scales: (scale of groups of columns, zero points, scale of rows) and, of each, elements from the gate half to
            the up half; None for what is absent.
        PACKED: see `launch.ExpertMM.packed`; the strides are those of the three scales.
    """
    RUNS_ON: tl.constexpr = PACKED[5]
    inner, zeros, outer, inner_apart, zeros_apart, outer_apart = scales
    w_row, w_valid = weight_rows(n_start, N, BLOCK_N, GLU)
    half = halves_of(BLOCK_N, GLU, SWAPPED)
    held = tl.where(w_valid, w_row, 0)  # its scales stand in for those of rows that do not exist
    if inner is not None:
        inner = of_rows(inner, inner_apart, expert, held, half, N, PACKED[3], RUNS_ON, GROUP_STRIDES)
    if zeros is not None:
        zeros = of_rows(zeros, zeros_apart, expert, held, half, N, PACKED[3], RUNS_ON, ZERO_STRIDES)
    operands = (
        a, a_desc, a_scale, a_row, row_valid, row_start, w, w_desc, inner, zeros, up_offset, expert, n_start, w_row,
        w_valid,
    )  # fmt: skip
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    turn = tl.full((), 0, tl.int32)
    if takes_turns(PACKED):
        last = turn
        while turn <= last:
            accumulator, others = _sum_columns(
                accumulator, turn, *operands, K, A_STRIDE, W_STRIDES, BLOCK_M, BLOCK_N, BLOCK_K, GLU, A_TMA, W_LOAD,
                SWAPPED, PACKED, GROUP_STRIDES, ZERO_STRIDES, STAGES,
            )  # fmt: skip
            last = tl.minimum(tl.max(others), 2)
            turn += 1
    else:
        accumulator, _ = _sum_columns(
            accumulator, turn, *operands, K, A_STRIDE, W_STRIDES, BLOCK_M, BLOCK_N, BLOCK_K, GLU, A_TMA, W_LOAD,
            SWAPPED, PACKED, GROUP_STRIDES, ZERO_STRIDES, STAGES,
        )  # fmt: skip
        if unit_of(PACKED) != 1.0:
            accumulator *= unit_of(PACKED)
    WARPS: tl.constexpr = 4 if INTERPRETED else num_warps()
    if has_runs(PACKED, BLOCK_N, BLOCK_K, WARPS):
        accumulator = accumulator.reshape(BLOCK_N // 16 // WARPS, WARPS, 2, 8, BLOCK_M).permute(0, 2, 1, 3, 4)
        accumulator = accumulator.reshape(BLOCK_N, BLOCK_M)
    if PACKED[8] == 0:
        accumulator *= tl.load(a_scale + a_row, mask=row_valid, other=0.0)[None, :]
    if outer is not None:
        pointers = of_rows(outer, outer_apart, expert, w_row, half, N, PACKED[6], PACKED[7], OUTER_STRIDES)
        factor = load_scale(pointers, w_valid)
        accumulator *= factor[:, None]
    return accumulator.T
