"""One output tile of an expert GEMM whose weights are codes of four bits and whose activations are e4m3.

The codes are decoded in registers to numbers of eight bits, exactly, and are the first operand of the product, as in
`packed_tile`. Their columns stay in order, so that rows come as those of any other scheme do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.codes import E2M1, codes_of_bytes, e2m1_value
from moe_ops.kernels.triton.packed_tile import of_rows
from moe_ops.kernels.triton.scales import decode_scale, load_row_scale, load_scale, load_stored_scale
from moe_ops.kernels.triton.tile_loads import BOTH, halves_of, load_rows, load_weight, weight_rows
from moe_ops.kernels.triton.util import INTERPRETED, widen

INT4_UNIT = tl.constexpr(8.0)  # of decoded codes
# First halves of tables, see `int4_parts`.
BELOW = tl.constexpr(0x595A5B5C)
ABOVE = tl.constexpr(0x2C282000)
SIGNS = tl.constexpr(-0x7F7F7F80)  # 0x80808080
# The largest scale of a step counts as 2^13: six times that is a number of e5m2, and half of 2^-13 a normal one.
FOLDED_UNIT = tl.constexpr(2.0**-13)
WINDOW = tl.constexpr(26)
FIRST = tl.constexpr(-1)  # turn through the columns, whose sum is nearly always all there is to do
NO_NUMBER = tl.constexpr(0x7F7F7F7F)  # four NaN
# e5m2 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^-13; a power of two more adds 4 to each but that of 0.
LOW_BYTES = tl.constexpr(0x0A080400)
LOW_POWER = tl.constexpr(0x04040400)
HIGH_BYTES = tl.constexpr(0x12100E0C)
HIGH_POWER = tl.constexpr(0x04040404)


@triton.jit
def int4_parts(words, below, above):
    """Of four codes in a word of 16 bits two words of 32, (p, q), for which 2 p + q is e4m3 of (code - 8) / 8, byte by
    byte.

    Two tables of eight bytes, of codes below 8, halved, as the upper bit of a byte must be clear there, and from 8 on:
    a selector whose upper bit is set reads 0 from either. `below` and `above` are their first halves, BELOW and ABOVE.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 flipped;
        xor.b32 flipped, $2, 0x8888;
        prmt.b32 $0, $3, 0x50545658, $2;
        prmt.b32 $1, $4, 0x36343230, flipped;
        }
        """,
        "=&r,=r,r,r,r",
        [words, below, above],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def join_int4(parts):
    """e4m3, four in a word, of `int4_parts`."""
    return parts[0] + parts[0] + parts[1]


@triton.jit
def e2m1_parts(words, low, high):
    """Of four e2m1 codes in a word of 16 bits two words of 32: their signs, in the upper bit of a byte, and e5m2 of
    their magnitudes, from tables of four bytes, `low` for codes 0 to 3 and `high` for 4 to 7.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 up, magnitude;
        and.b32 magnitude, $2, 0x7777;
        shl.b32 up, $2, 4;
        prmt.b32 $0, up, $2, 0x5140;
        prmt.b32 $1, $3, $4, magnitude;
        }
        """,
        "=&r,=r,r,r,r",
        [words, low, high],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def join_e2m1(parts):
    """e5m2, four in a word, of `e2m1_parts`."""
    return (parts[0] & SIGNS) | parts[1]


@triton.jit
def _words(stored):
    """Two bytes at a time, whose four codes decode to a register: no byte moves behind the decoder."""
    first, second = tl.split(stored.reshape(stored.shape[0], stored.shape[1] // 2, 2))
    return first.to(tl.int32) | (second.to(tl.int32) << 8)


@triton.jit
def in_order(fours, DTYPE: tl.constexpr):
    """DTYPE [rows, 4 columns] of words [rows, columns] of four."""
    even = tl.join(fours.to(tl.int8), (fours >> 16).to(tl.int8))
    odd = tl.join((fours >> 8).to(tl.int8), (fours >> 24).to(tl.int8))
    return tl.join(even, odd).reshape(fours.shape[0], 4 * fours.shape[1]).to(DTYPE, bitcast=True)


@triton.jit
def decode_int4(stored):
    """e4m3 [rows, 2 columns], in units of INT4_UNIT, of bytes [rows, columns]; fp32 in the interpreter."""
    if INTERPRETED:
        return (codes_of_bytes(stored) - 8).to(tl.float32) / INT4_UNIT
    return in_order(join_int4(int4_parts(_words(stored), BELOW, ABOVE)), tl.float8e4nv)


@triton.jit
def fold(exponents, turn):
    """How e2m1 codes are decoded whose groups have scales of powers of two, `exponents` i32 [rows, groups] with 127 for
    1: to which power `top` [rows] of two the product belongs, and the groups' powers in units of it, as `e2m1_parts`
    takes them.

    In the FIRST turn through the columns all groups count. Where a scale is more than 2^WINDOW below the largest, no
    e5m2 number is the code's, and every code but 0 becomes NaN. Of later turns the first has groups within 2^WINDOW of
    the largest, the next those within as much below them, and so on.

    Returns:
        (top, power, exists, far): i32 [rows], below 0 where no group counts, i32 [rows, groups] in 0 .. WINDOW where
        the group does, whether that is so, and the bytes of codes other than 0 where not.
    """
    top = tl.max(exponents, axis=1) - tl.maximum(turn, 0) * (WINDOW + 1)
    power = exponents - top[:, None] + WINDOW
    return top, power, (power >= 0) & (power <= WINDOW), tl.where(turn == FIRST, NO_NUMBER, 0)


@triton.jit
def decode_e2m1(stored, power, exists, far):
    """e5m2 [rows, 2 columns] of bytes [rows, columns], see `fold`, in units of FOLDED_UNIT; fp32 in the interpreter."""
    ROWS: tl.constexpr = stored.shape[0]
    GROUPS: tl.constexpr = power.shape[1]
    if INTERPRETED:
        size: tl.constexpr = 2 * stored.shape[1] // GROUPS
        value = e2m1_value(codes_of_bytes(stored)).reshape(ROWS, GROUPS, size)
        scale = ((power + 114) << 23).to(tl.float32, bitcast=True)
        otherwise = tl.where((value != 0.0) & (far != 0), float("nan"), 0.0)
        return tl.where(exists[:, :, None], value * scale[:, :, None], otherwise).reshape(ROWS, 2 * stored.shape[1])
    low = tl.where(exists, power * LOW_POWER + LOW_BYTES, far & -0x100)
    high = tl.where(exists, power * HIGH_POWER + HIGH_BYTES, far)
    words = _words(stored)
    size: tl.constexpr = words.shape[1] // GROUPS
    low = tl.broadcast_to(low[:, :, None], (ROWS, GROUPS, size)).reshape(ROWS, words.shape[1])
    high = tl.broadcast_to(high[:, :, None], (ROWS, GROUPS, size)).reshape(ROWS, words.shape[1])
    return in_order(join_e2m1(e2m1_parts(words, low, high)), tl.float8e5)


@triton.jit
def _cut(tile, PARTS: tl.constexpr):
    """PARTS equal parts of the columns of a tile, 1, 2 or 4."""
    ROWS: tl.constexpr = tile.shape[0]
    if PARTS == 1:
        return (tile,)
    elif PARTS == 2:
        return tl.split(tile.reshape(ROWS, 2, tile.shape[1] // 2).permute(0, 2, 1))
    else:
        even, odd = tl.split(tile.reshape(ROWS, 2, 2, tile.shape[1] // 4).permute(0, 3, 1, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.constexpr_function
def step_columns(code, group, block):
    """Columns of one product: those of a step where scales are folded into e2m1 codes, else as many of them as are
    always within one group.
    """
    return block if code == E2M1 or not group else min(block, group & -group)


@triton.jit
def _scales_at(
    inner,
    k,
    w_valid,
    K: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_K: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Scales as stored [rows, PARTS] of columns k, k + STEP, ..., 0 past the last."""
    part = tl.arange(0, PARTS)
    group = (k + part * STEP) // GROUP_K if GROUP_K > 0 else part * 0
    mask = w_valid[:, None] & (k + part * STEP < K)[None, :]
    return load_stored_scale(inner[:, None] + group[None, :] * STRIDE, mask)


@triton.jit
def _exponents_at(inner, k, w_valid, K: tl.constexpr, STRIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Bytes of four scales [rows], of columns k .. k + 127, in words of as many of them as may be loaded at once; 0
    past the last.
    """
    group = k // 32
    if AT_ONCE == 4:
        return (tl.load((inner + group).to(tl.pointer_type(tl.int32)), mask=w_valid & (k < K), other=0),)
    elif AT_ONCE == 2:
        words = (inner + group).to(tl.pointer_type(tl.int16))
        low = tl.load(words, mask=w_valid & (k < K), other=0)
        return low, tl.load(words + 1, mask=w_valid & (k + 64 < K), other=0)
    else:
        first = tl.load(inner + group * STRIDE, mask=w_valid & (k < K), other=0)
        second = tl.load(inner + (group + 1) * STRIDE, mask=w_valid & (k + 32 < K), other=0)
        third = tl.load(inner + (group + 2) * STRIDE, mask=w_valid & (k + 64 < K), other=0)
        return first, second, third, tl.load(inner + (group + 3) * STRIDE, mask=w_valid & (k + 96 < K), other=0)


@triton.jit
def _exponents(words, AT_ONCE: tl.constexpr):
    """i32 [rows, 4] of the words of `_exponents_at`: each row's in one thread, whatever the layout of the loads."""
    if AT_ONCE == 4:
        word = words[0]
        first, second, third, fourth = word & 0xFF, (word >> 8) & 0xFF, (word >> 16) & 0xFF, (word >> 24) & 0xFF
    elif AT_ONCE == 2:
        low, high = words[0].to(tl.int32), words[1].to(tl.int32)
        first, second, third, fourth = low & 0xFF, (low >> 8) & 0xFF, high & 0xFF, (high >> 8) & 0xFF
    else:
        first, second = words[0].to(tl.int32), words[1].to(tl.int32)
        third, fourth = words[2].to(tl.int32), words[3].to(tl.int32)
    return tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(first.shape[0], 4)


@triton.jit
def _spread(exponents, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """How far the exponents of each row [rows, groups] of columns k .. k + BLOCK_K - 1 are apart."""
    lower = exponents
    if K % BLOCK_K != 0:
        GROUPS: tl.constexpr = exponents.shape[1]
        lower = tl.where((k + tl.arange(0, GROUPS) * (BLOCK_K // GROUPS) < K)[None, :], exponents, 255)
    return tl.max(exponents, axis=1) - tl.min(lower, axis=1)


@triton.jit
def _row_scales(a_scale, a_row, row_valid, k, K: tl.constexpr, GROUP: tl.constexpr):
    """`load_row_scale`. Many of them are loaded once, as one of several columns, and shared out from there: else every
    thread loads those of all rows that its accumulators have.
    """
    if a_row.shape[0] < 64:
        return load_row_scale(a_scale, a_row, row_valid, k, K, GROUP)
    copy = tl.arange(0, 8)[None, :]
    return tl.sum(load_row_scale(a_scale, a_row[:, None], row_valid[:, None] & (copy == 0), k, K, GROUP), axis=1)


@triton.jit
def _add_columns(
    accumulator,
    spread,
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
    up_offset,
    expert,
    n_start,
    w_row,
    w_valid,
    K: tl.constexpr,
    A_STRIDE: tl.constexpr,
    W_STRIDES: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GLU: tl.constexpr,
    A_TMA: tl.constexpr,
    W_LOAD: tl.constexpr,
    SWAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`accumulator` [weight rows, rows] and the products of all columns that count in this `turn`, see `fold`; and
    `spread` [weight rows] or how many powers of two the scales of a step are apart, if that is more.
    """
    CODE: tl.constexpr = PACKED[0]
    GROUP_K: tl.constexpr = PACKED[4]
    ROWS_GROUP: tl.constexpr = PACKED[8]
    BLOCK_N: tl.constexpr = accumulator.shape[0]
    FOLDED: tl.constexpr = CODE == E2M1
    STEP: tl.constexpr = step_columns(CODE, GROUP_K, BLOCK_K)
    PARTS: tl.constexpr = BLOCK_K // STEP
    AT_ONCE: tl.constexpr = PACKED[9]
    if FOLDED:
        tl.static_assert(BLOCK_K == 4 * GROUP_K and BLOCK_K == ROWS_GROUP, "a step is a group of the rows")
        stored_scale = _exponents_at(inner, 0, w_valid, K, GROUP_STRIDE, AT_ONCE)
    else:
        stored_scale = _scales_at(inner, 0, w_valid, K, STEP, PARTS, GROUP_K, GROUP_STRIDE)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # fmt: off
        stored = load_weight(
            w, w_desc, up_offset, w_row, w_valid, expert, n_start, k // 2, K // 2, W_STRIDES, BLOCK_N, BLOCK_K // 2,
            GLU, W_LOAD, SWAPPED, BOTH,
        ).T
        # fmt: on
        scale = stored_scale
        # The next step's come while this one is multiplied: loads of single bytes have no pipeline of their own.
        if FOLDED:
            stored_scale = _exponents_at(inner, k + BLOCK_K, w_valid, K, GROUP_STRIDE, AT_ONCE)
            exponents = _exponents(scale, AT_ONCE)
            top, power, exists, far = fold(exponents, turn)
            spread = tl.maximum(spread, _spread(exponents, k, K, BLOCK_K))
            weights = (decode_e2m1(stored, power, exists, far),)
            factors = (decode_scale(tl.maximum(top, 0).to(tl.uint8)),)
        else:
            stored_scale = _scales_at(inner, k + BLOCK_K, w_valid, K, STEP, PARTS, GROUP_K, GROUP_STRIDE)
            weights, factors = _cut(decode_int4(stored), PARTS), _cut(decode_scale(scale), PARTS)
        for part in tl.static_range(PARTS):
            column = k + part * STEP
            valid = row_valid & (column < K) if K % BLOCK_K != 0 else row_valid
            rows = load_rows(a, a_desc, a_row, valid, row_start, column, K, A_STRIDE, STEP, A_TMA)
            product = tl.dot(weights[part], (widen(rows) if INTERPRETED else rows).T, input_precision="ieee")
            if ROWS_GROUP > 0:
                row_scale = _row_scales(a_scale, a_row, row_valid, column, K, ROWS_GROUP)
                # Here, as the sums of the largest scales are near the end of fp32.
                product *= (row_scale * FOLDED_UNIT if FOLDED else row_scale)[None, :]
            accumulator += product * factors[part].reshape(BLOCK_N)[:, None]
    return accumulator, spread


@triton.jit
def packed_fp8_tile(
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
    OUTER_STRIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 accumulator [BLOCK_M, BLOCK_N] of a tile: sum over k of a[row, k] * decoded w[expert, n, k].

    The products of at most 128 columns are added up by the tensor core, whose sum has too few bits for more. int4: they
    are those of one group of columns, and multiplied with its scale. e2m1: the scales are powers of two, and a step's
    are folded into its codes, which is exact in e5m2 for any that are within 2^WINDOW of each other; the largest is
    multiplied with behind the product. Where others are further apart beside codes that are not 0, the tile is computed
    again in turns (`fold`): so every scale counts as it is stored.

    Args: see `packed_tile`; a_scale: f32 [rows, groups of K] of the rows, PACKED[8] columns in a group, 0 for all.
    """
    CODE: tl.constexpr = PACKED[0]
    inner, _, outer, inner_apart, _, outer_apart = scales
    w_row, w_valid = weight_rows(n_start, N, BLOCK_N, GLU)
    half = halves_of(BLOCK_N, GLU, SWAPPED)
    inner = of_rows(inner, inner_apart, expert, w_row, half, N, PACKED[3], PACKED[5], GROUP_STRIDES)
    operands = (
        a, a_desc, a_scale, a_row, row_valid, row_start, w, w_desc, inner, up_offset, expert, n_start, w_row, w_valid,
    )  # fmt: skip
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    spread = tl.zeros((BLOCK_N,), tl.int32)
    turn = tl.full((), FIRST, tl.int32)
    if CODE == E2M1:
        last = turn
        while turn <= last:
            accumulator, spread = _add_columns(
                accumulator, spread, turn, *operands, K, A_STRIDE, W_STRIDES, GROUP_STRIDES[2], BLOCK_K, GLU, A_TMA,
                W_LOAD, SWAPPED, PACKED, STAGES,
            )  # fmt: skip
            lost = tl.max(((accumulator != accumulator) & row_valid[None, :]).to(tl.int32))
            furthest = tl.max(spread, axis=0)
            again = (turn == FIRST) & (lost > 0) & (furthest > WINDOW)
            accumulator = tl.where(again, 0.0, accumulator)
            last = tl.where(again, furthest // (WINDOW + 1), last)
            turn += 1
    else:
        accumulator, spread = _add_columns(
            accumulator, spread, turn, *operands, K, A_STRIDE, W_STRIDES, GROUP_STRIDES[2], BLOCK_K, GLU, A_TMA,
            W_LOAD, SWAPPED, PACKED, STAGES,
        )  # fmt: skip
        accumulator *= INT4_UNIT
    if PACKED[8] == 0:
        accumulator *= tl.load(a_scale + a_row, mask=row_valid, other=0.0)[None, :]
    if outer is not None:
        pointers = of_rows(outer, outer_apart, expert, w_row, half, N, PACKED[6], PACKED[7], OUTER_STRIDES)
        accumulator *= load_scale(pointers, w_valid)[:, None]
    return accumulator.T
