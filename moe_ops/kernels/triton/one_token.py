"""One token's experts in one kernel, for Hopper: at T = 1 weights are read once, and all else is a start or an end.

One program a multiprocessor. A warp has tensor maps bring weight rows, of both products, to a ring in shared memory, as
soon as there is room, so that the second product's weights are there when its rows are. The other warps multiply: a
step is 16 weight rows (of GEMM 2 sometimes eight), of each eight slices that follow each other. The tensor core takes
the rows' slices as 128 rows, and the same slices of the token's vector as the eight columns beside them; of every
slice's rows the column that is its own counts. So no weight passes through a register, and nothing moves between
threads but sums.

What GEMM 1 leaves travels through memory, which holds a NaN before that no conversion makes: programs read until none
is left, and no barrier of all programs is needed. So all programs have to run at once: it is a cooperative launch.

Few bytes at a time are on their way, about as many as the memory's latency asks for: what waits for memory behind
others' weights, GEMM 1's results first of all, waits longer. us of a layer on an H200 with Qwen3-30B-A3B's dimensions
in bf16, when a first version had 48, 64, 96 and 128 KiB of each multiprocessor on their way: 21.2, 21.9, 22.5, 22.9.

us by `small`'s kernels and by this one, H200: Qwen3-30B-A3B in bf16 22.2 and 21.3, fp8_block128 16.9 and 15.2,
fp8_channel 18.6 and 15.5; OLMoE-1B-7B 27.6 and 26.3, 21.2 and 18.5, 24.4 and 18.7; gpt-oss-120b 50.3 and 49.8, 40.2 and
38.1, 38.6 and 38.1. Mixtral-8x7B in bf16 158.6 and 162.2: so many bytes are left to `small`. What GEMM 1 leaves to be
rounded to e4m3 is fp32: of bf16, 0.4 us less, some are rounded to others, and small layers' errors beside
float64 were up to 1.17 of what rounding once has. Where the rest of the time goes, and what was tried:
benchmarks/comparisons/h200-one-token.json.

Written in Gluon, Triton's language of layouts, which has no interpreter: that runs `small` for the same layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meta.arch import TYPICAL
from meta.schemes import WHOLE
from moe_ops.counters import Row
from moe_ops.kernels.triton.act_quant import apply_activation
from moe_ops.kernels.triton.hopper import ring
from moe_ops.kernels.triton.launch import LARGEST_STRIDE, PROGRAM_BYTES, ExpertMM, descriptor_strides
from moe_ops.kernels.triton.packed_tile import factor_of, fetch_held, of_rows
from moe_ops.kernels.triton.programs import multiprocessors
from moe_ops.kernels.triton.record import launch
from moe_ops.kernels.triton.route import ABSENT, ABSENT_AT_ONCE, leave_absent
from moe_ops.kernels.triton.scales import group_scale, quantize_tile, store_as
from moe_ops.kernels.triton.tile_loads import CONCAT, INTERLEAVED, NOT_GATED
from moe_ops.kernels.triton.util import cdiv, count_pairs, is_counted, load_expert, pdl_release, pdl_wait

SLICE_BYTES = gl.constexpr(128)
LINES = gl.constexpr(128)  # slices of weight rows in a step: rows of a product
STEP_BYTES = gl.constexpr(LINES.value * SLICE_BYTES.value)
WARPS = gl.constexpr(8)  # that multiply
MOST_SLICES = gl.constexpr(16)  # of a vector in a step
FEWEST_STAGES = 6
MOST_BYTES = 2**28  # of a token's experts
ON_THEIR_WAY = gl.constexpr(4)  # steps
ON_THEIR_WAY_LATE = gl.constexpr((3, 2))  # and from the last LATE steps of GEMM 1 on, beside which its results are:
LATE = gl.constexpr((6, 4))  # of weights as they are, and quantised
AHEAD = gl.constexpr(6)  # steps whose scales are
LOADS = gl.constexpr(8)  # of a thread that are on their way together
WIDEST_LOAD = gl.constexpr(16)  # bytes


@gluon.constexpr_function
def steps_of(slices, w):
    """How many steps so many slices of a product are."""
    return -(-slices // w[0][8])


@gluon.constexpr_function
def steps_at_once(steps, most):
    """How many steps are multiplied at a time, so that no product waits for another."""
    return max(n for n in (1, 2, 3, 6) if n <= most and steps % n == 0)


@gluon.constexpr_function
def power_of_2(count):
    """The smallest power of two that is as large."""
    return 1 << max(count - 1, 0).bit_length()


@gluon.constexpr_function
def slices_at_once(slices, bytes_of_slice):
    """Slices of vectors that are copied at a time."""
    most = LOADS.value * WIDEST_LOAD.value * 32 * WARPS.value // bytes_of_slice
    return max(MOST_SLICES.value, min(most, power_of_2(slices)))


@gluon.constexpr_function
def slices_held(slices, bytes_of_slice):
    """Slices that there is shared memory for."""
    at_once = slices_at_once(slices, bytes_of_slice)
    return -(-slices // at_once) * at_once


@gluon.constexpr_function
def bytes_left(quantised):
    """Of a slice of what GEMM 1 leaves: fp32 where it is quantised."""
    return SLICE_BYTES.value * (4 if quantised else 1)


@gluon.constexpr_function
def _flat(bytes_of_element, slices, columns):
    """So many slices of vectors as they are copied. Each number is one thread's: of two that read it, one might be told
    of what the other has not seen.
    """
    at_once = min(WIDEST_LOAD.value // bytes_of_element, slices * columns // (32 * WARPS.value))
    threads = columns // at_once
    return gl.BlockedLayout([1, at_once], [32 // threads, threads], [WARPS.value, 1], [1, 0])


@gluon.jit
def _expert(routed, pair, exists, SIZES: gl.constexpr):
    """The place of each pair's expert among those held here, or their number."""
    if SIZES[0][2] < 0:
        return load_expert(routed[0], None, pair, exists, SIZES[0][1], 0)
    else:
        return load_expert(routed[0], routed[1], pair, exists, SIZES[0][1], SIZES[0][2])


@gluon.constexpr_function
def _at_least_a_warp(size):
    """A power of two from `size` on, and of lanes: where several held the same pair, they would vote who counts it, see
    `hopper._by_one_lane`.
    """
    return max(1 << (size - 1).bit_length(), 32)


@gluon.jit
def _tasks(UP: gl.constexpr, SIZES: gl.constexpr):
    """This program's tasks of GEMM 1, the first, how far the others are from each other, and how many: all programs
    have as many, or one less, as all wait for the last.

    Of quantised weights every so-manieth: what all do last is together, the end of all results, so most slices are
    there when they are first asked for, and few are asked for again. us on an H200, Qwen3-30B-A3B, neighbours and so:
    fp8_block128 15.0 and 14.3, fp8_channel 15.9 and 15.3. In bf16, whose weights take longer than its results, the
    memory is faster with neighbours: 21.4 and 21.8.
    """
    TASKS: gl.constexpr = UP[0][0] // UP[0][5] * SIZES[0][0]
    program, programs = gl.program_id(0), gl.num_programs(0)
    if UP[0][6]:
        return program, programs, (TASKS - program + programs - 1) // programs
    else:
        first = program * TASKS // programs
        return first, 1, (program + 1) * TASKS // programs - first


@gluon.jit
def _bring(given, SIZES: gl.constexpr):
    """The warp that has weights of every step of both products brought, as soon as there is room."""
    up_desc, down_desc, stored, full, empty, routed, load_ptr = given
    TOP_K: gl.constexpr = SIZES[0][0]
    UP: gl.constexpr = SIZES[1]
    DOWN: gl.constexpr = SIZES[2]
    STEPS: gl.constexpr = steps_of(UP[0][4], UP)
    STEPS_DOWN: gl.constexpr = steps_of(TOP_K * DOWN[0][4], DOWN)
    TILES: gl.constexpr = UP[0][0] // UP[0][5]
    pdl_wait(SIZES[0][4])
    if SIZES[0][6]:
        if gl.program_id(0) == 0:
            pair = gl.arange(0, _at_least_a_warp(TOP_K), layout=gl.BlockedLayout([1], [32], [1], [0]))
            expert = _expert(routed, pair, pair < TOP_K, SIZES)
            count_pairs(load_ptr, is_counted(load_ptr, True), expert, expert * 0 + 1, expert < SIZES[0][1])
    first, apart, count = _tasks(UP, SIZES)
    place = 0
    KIND: gl.constexpr = 1 if UP[0][6] else 0
    MOST_LATE: gl.constexpr = ON_THEIR_WAY_LATE[KIND]
    late = count * STEPS - LATE[KIND]
    for task in range(first, first + count * apart, apart):
        expert = _expert(routed, task // TILES, task >= 0, SIZES)
        for step in range(STEPS):
            stage = _room(full, empty, place, gl.where(place < late, ON_THEIR_WAY, MOST_LATE), SIZES)
            for box in gl.static_range(UP[0][8] // UP[0][10]):
                slice = step * UP[0][8] + box * UP[0][10]
                _box(up_desc, expert, task % TILES * UP[0][5], slice, stored, stage, box, full, UP)
            place += 1
    for task in range(gl.program_id(0), DOWN[0][0] // DOWN[0][9], gl.num_programs(0)):
        for step in range(STEPS_DOWN):
            stage = _room(full, empty, place, MOST_LATE, SIZES)
            for box in gl.static_range(DOWN[0][8] // DOWN[0][10]):
                slice = step * DOWN[0][8] + box * DOWN[0][10]
                expert = _expert(routed, slice // DOWN[0][4], slice < TOP_K * DOWN[0][4], SIZES)
                _box(down_desc, expert, task * DOWN[0][9], slice % DOWN[0][4], stored, stage, box, full, DOWN)
            place += 1


@gluon.jit
def _box(desc, expert, row, slice, stored, stage, box: gl.constexpr, full, W: gl.constexpr):
    """Have some slices of a task's rows brought; beyond the last expert, row or column is 0."""
    BOXES: gl.constexpr = W[0][8] // W[0][10]
    room = stored.index(stage)
    if BOXES > 1:
        room = room.slice(box * (LINES // BOXES), LINES // BOXES, dim=0)
    room = room._reinterpret(desc.dtype, desc.block_shape, desc.layout)
    if W[0][10] == 1:
        tma.async_copy_global_to_shared(desc, [expert, 0, row, slice * W[0][3]], full.index(stage), room)
    else:
        tma.async_copy_global_to_shared(desc, [expert, slice, 0, row, 0], full.index(stage), room)


@gluon.jit
def _room(full, empty, place, most, SIZES: gl.constexpr):
    """The stage of step number `place`, once it is free and fewer than `most` steps are on their way."""
    STAGES: gl.constexpr = SIZES[0][3]
    stage = place % STAGES
    mbarrier.wait(empty.index(stage), (place // STAGES & 1) ^ 1)
    if place >= most:
        before = place - most
        mbarrier.wait(full.index(before % STAGES), before // STAGES & 1)
    mbarrier.expect(full.index(stage), STEP_BYTES)
    return stage


@gluon.jit
def _line_of(step, n_start, pair, routed, LAYOUT: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr):
    """Of each line of a step, slice by slice: (whether it has an expert here, its expert or 0, row of its stack, half,
    first column). `pair`: of all of them, or None where vectors of all pairs are one behind the other.
    """
    GLU: gl.constexpr = W[0][1]
    TOP_K: gl.constexpr = SIZES[0][0]
    line = gl.arange(0, LINES, layout=LAYOUT)
    slice, line = step * W[0][8] + line // W[0][9], line % W[0][9]
    if pair is None:
        pair, slice = slice // W[0][4], slice % W[0][4]
    else:
        pair = slice * 0 + pair
    expert = _expert(routed, pair, pair < TOP_K, SIZES)
    held = expert < SIZES[0][1]
    if GLU == NOT_GATED:
        row, half = n_start + line, line * 0
    else:
        row, half = n_start + line % 8, line // 8
        if GLU == INTERLEAVED:
            row, half = 2 * row + half, half * 0
        elif W[0][2]:
            half = 1 - half
    return held, gl.where(held, expert, 0), row, half, slice * W[0][3]


@gluon.jit
def _scales(step, n_start, pair, routed, decoding, W: gl.constexpr, SIZES: gl.constexpr):
    """Bits of the scale of each line of a step, see `_line_of`."""
    scale, apart = decoding
    SUM: gl.constexpr = W[3]
    SCHEME: gl.constexpr = W[2]
    STRIDES: gl.constexpr = W[1][1]
    LINE: gl.constexpr = gl.SliceLayout(1, SUM)
    held, expert, row, half, column = _line_of(step, n_start, pair, routed, LINE, W, SIZES)
    pointers = of_rows(scale, apart, expert, row, half, W[0][0], SCHEME[0], SCHEME[2], STRIDES)
    if SCHEME[1] > 0:
        pointers += gl.minimum(column // SCHEME[1], (W[0][7] + SCHEME[1] - 1) // SCHEME[1] - 1) * STRIDES[2]
    return fetch_held(pointers, held)


@gluon.jit
def _scales_of_up(number, routed, decoding, W: gl.constexpr, SIZES: gl.constexpr):
    """The same of step number `number` of this program's in GEMM 1."""
    STEPS: gl.constexpr = steps_of(W[0][4], W)
    TILES: gl.constexpr = W[0][0] // W[0][5]
    first, apart, _count = _tasks(W, SIZES)
    task = gl.minimum(first + number // STEPS * apart, TILES * SIZES[0][0] - 1)
    return _scales(number % STEPS, task % TILES * W[0][5], task // TILES, routed, decoding, W, SIZES)


@gluon.jit
def _scales_of_down(number, routed, decoding, W: gl.constexpr, SIZES: gl.constexpr):
    """The same of GEMM 2. Some programs have no task there."""
    STEPS: gl.constexpr = steps_of(SIZES[0][0] * W[0][4], W)
    task = gl.minimum(gl.program_id(0) + number // STEPS * gl.num_programs(0), W[0][0] // W[0][9] - 1)
    return _scales(number % STEPS, task * W[0][9], None, routed, decoding, W, SIZES)


@gluon.jit
def _shift(n_start, pair, routed, bias, W: gl.constexpr, SIZES: gl.constexpr):
    """Biases of GEMM 1's rows, in the first slice's lines."""
    LINE: gl.constexpr = gl.SliceLayout(1, W[3])
    held, expert, row, half, column = _line_of(0, n_start, pair, routed, LINE, W, SIZES)
    if W[1][2] is not None:
        where = bias + expert.to(gl.int64) * W[1][2][0] + (row + half * W[0][0]) * W[1][2][1]
        return gl.load(where, mask=held & (column == 0), other=0.0).to(gl.float32)
    else:
        return column.to(gl.float32) * 0.0


@gluon.jit
def _nothing(W: gl.constexpr):
    SLICES: gl.constexpr = W[0][8]
    SUM: gl.constexpr = W[3]
    return gl.zeros([LINES, SLICES], gl.float32, layout=SUM)


@gluon.jit
def _by_slices(product, factors, step, W: gl.constexpr):
    """Products of a step [lines, slices] as [slices, rows, slices]: times the factors of slices, if they have any."""
    SLICES: gl.constexpr = W[0][8]
    ROWS: gl.constexpr = W[0][9]
    wide = product.reshape([SLICES, ROWS, SLICES])
    if factors is not None:
        factor = factors.index(step).load(gl.SliceLayout(1, gl.SliceLayout(2, wide.type.layout)))
        wide *= factor[:, None][:, :, None]
    return wide


@gluon.jit
def _products(
    total, scales, group, place, of_memory, factors, scale, AT_ONCE: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr
):  # fmt: skip
    """`total` and the products of AT_ONCE steps; `scales`: of quantised weights bits of their lines' scales, step by
    step.
    """
    words_of, vectors, full, empty = of_memory
    STAGES: gl.constexpr = SIZES[0][3]
    nothing = _nothing(W)
    products = ()
    for n in gl.static_range(AT_ONCE):
        stage = (place + n) % STAGES
        mbarrier.wait(full.index(stage), (place + n) // STAGES & 1)
        vector = vectors.index(group * AT_ONCE + n).permute((1, 0))
        product = warpgroup_mma(words_of.index(stage), vector, nothing, use_acc=False, is_async=True)
        products = products + (product,)  # noqa: RUF005 (the compiler takes no star)
    products = warpgroup_mma_wait(0, products)
    for n in gl.static_range(AT_ONCE):
        product = products if AT_ONCE == 1 else products[n]
        if W[0][6]:
            product *= factor_of(scales[n], scale, False, 0)[:, None]
        total += _by_slices(product, factors, group * AT_ONCE + n, W)
    gl.thread_barrier()
    for n in gl.static_range(AT_ONCE):
        mbarrier.arrive(empty.index((place + n) % STAGES))
    return total


@gluon.jit
def _sums(total):
    """[rows] of products [slices, rows, slices]: of every slice's rows the column that is its own, added up."""
    WIDE: gl.constexpr = total.type.layout
    SLICES: gl.constexpr = total.shape[0]
    slice = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))
    column = gl.arange(0, SLICES, layout=gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))
    own = slice[:, None][:, :, None] == column[None, :][:, None, :]
    return gl.sum(gl.sum(gl.where(own, total, 0.0), axis=2), axis=0)


@gluon.jit
def _activated(total, shift, alpha, limit, W: gl.constexpr, ACTIVATION: gl.constexpr):
    """A task's outputs of GEMM 1, of its products and the biases of its lines."""
    if W[1][2] is not None:
        wide = gl.convert_layout(
            shift.reshape([total.shape[0], total.shape[1]]), gl.SliceLayout(2, total.type.layout), assert_trivial=True
        )
        total += wide[:, :, None]  # in the column that is the first slice's own, too
    sums = _sums(total)
    if W[0][1] == NOT_GATED:
        return apply_activation(sums, sums, alpha, limit, ACTIVATION, False)
    else:
        gate, up = gl.split(sums.reshape([2, 8]).permute([1, 0]))
        if W[0][2]:
            gate, up = up, gate
        return apply_activation(gate, up, alpha, limit, ACTIVATION, True)


@gluon.jit
def _leave(value, held, where):
    """Results of GEMM 1, of which none is what stands for those that are not there yet; 0 of a pair whose expert is not
    `held`: what its token times nothing is may be NaN.
    """
    bits = gl.where(held, value.to(where.dtype.element_ty, bitcast=True), 0)
    column = gl.arange(0, value.shape[0], layout=value.type.layout)
    gl.store(where + column, gl.where(bits == ABSENT, 0x7FFFFFFF if bits.dtype == gl.int32 else 0x7FFF, bits))


@gluon.jit
def _leave_result(total, n_start, out, routed, weights, bias, W: gl.constexpr, SIZES: gl.constexpr):
    """Write a task's outputs of GEMM 2, with the biases of the experts of all pairs, times their weights."""
    sums = _sums(total)
    TOP_K: gl.constexpr = SIZES[0][0]
    column = n_start + gl.arange(0, sums.shape[0], layout=sums.type.layout)
    if W[1][2] is not None:
        for pair in gl.static_range(TOP_K):
            expert = _expert(routed, column * 0 + pair, column >= 0, SIZES)
            held = expert < SIZES[0][1]
            where = bias + gl.where(held, expert, 0).to(gl.int64) * W[1][2][0] + column * W[1][2][1]
            weight = gl.load(weights + pair + column * 0, mask=held, other=0.0).to(gl.float32)
            sums += gl.where(held, weight * gl.load(where, mask=held, other=0.0).to(gl.float32), 0.0)
    gl.store(out + column, sums.to(out.dtype.element_ty))


@gluon.jit
def _in_parts(of_slices, COUNT: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory of steps in parts of COUNT slices, of each of which it has WIDTH."""
    PARTS: gl.constexpr = of_slices.shape[0] * of_slices.shape[1] // COUNT
    return of_slices._reinterpret(of_slices.dtype, [PARTS, COUNT, WIDTH], of_slices.layout)


@gluon.jit
def _numbers_in_parts(of_slices, COUNT: gl.constexpr):
    """The same of one number of each slice."""
    return of_slices._reinterpret(
        of_slices.dtype, [of_slices.shape[0] * of_slices.shape[1] // COUNT, COUNT], of_slices.layout
    )


@gluon.jit
def _token(x, x_scale, to, factors, W: gl.constexpr):
    """The token's vector, slice by slice, to shared memory, and the scales of a quantised one's slices."""
    COUNT: gl.constexpr = slices_at_once(W[0][4], SLICE_BYTES)
    FLAT: gl.constexpr = _flat(to.dtype.primitive_bitwidth // 8, COUNT, W[0][3])
    parts = _in_parts(to, COUNT, W[0][3])
    slice = gl.arange(0, COUNT, layout=gl.SliceLayout(1, FLAT))
    column = gl.arange(0, W[0][3], layout=gl.SliceLayout(0, FLAT))[None, :]
    for part in gl.static_range((W[0][4] + COUNT - 1) // COUNT):
        at = (part * COUNT + slice)[:, None] * W[0][3] + column
        parts.index(part).store(gl.load(x + at, mask=at < W[0][7], other=0.0))
        if W[0][6]:
            number = part * COUNT + slice
            scale = gl.load(x_scale + (number if W[2][1] > 0 else number * 0), mask=number < W[0][4], other=0.0)
            _numbers_in_parts(factors, COUNT).index(part).store(scale)


@gluon.jit
def _where(h, part, COUNT: gl.constexpr, FLAT: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr):
    """Where part number `part` of GEMM 1's results is, and which of it exists."""
    slice = part * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(1, FLAT))[:, None]
    column = slice % W[0][4] * W[0][3] + gl.arange(0, W[0][3], layout=gl.SliceLayout(0, FLAT))[None, :]
    return h + slice // W[0][4] * W[0][7] + column, (slice < SIZES[0][0] * W[0][4]) & (column < W[0][7])


@gluon.jit
def _awaited(found, where, exists):
    """What is there, once all of it is, and how many slices are missing then: none. `found`: what was there before."""
    missing = gl.max((found == ABSENT).to(gl.int32), axis=1)
    count = gl.sum(missing, axis=0)
    while count > 0:
        # Slices that are there are not asked for again: others' results wait behind all that is asked for.
        again = exists & (missing > 0)[:, None]
        found = gl.where(again, gl.load(where, mask=again, other=0, volatile=True), found)
        missing = gl.max((found == ABSENT).to(gl.int32), axis=1)
        count = gl.sum(missing, axis=0)
    return found, count


@gluon.jit
def _unlike(bits, none):
    """`bits`, as `none` is 0, which the compiler does not know. Of slices that do not exist it knows numbers to be 0,
    and where four of a thread are alike ptxas (CUDA 12.8) packs two in e4m3 with what another register holds.
    """
    column = gl.arange(0, bits.shape[1], layout=gl.SliceLayout(0, bits.type.layout))
    return bits | (none * column)[None, :]


@gluon.jit
def _weight_of(part, routed, weights, COUNT: gl.constexpr, LAYOUT: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr):
    """Routing weights of slices, 0 of those without an expert here: theirs may be NaN."""
    pair = (part * COUNT + gl.arange(0, COUNT, layout=LAYOUT)) // W[0][4]
    held = _expert(routed, pair, pair < SIZES[0][0], SIZES) < SIZES[0][1]
    return gl.where(held, gl.load(weights + pair, mask=held, other=0.0).to(gl.float32), 0.0)


@gluon.jit
def _results(h, to, factors, peaks, routed, weights, W: gl.constexpr, SIZES: gl.constexpr):
    """GEMM 1's results of all pairs to shared memory, once they are there, and the factors of their slices."""
    TOP_K: gl.constexpr = SIZES[0][0]
    SLICES_OF_ALL: gl.constexpr = TOP_K * W[0][4]
    COUNT: gl.constexpr = slices_at_once(SLICES_OF_ALL, bytes_left(W[0][6]))
    FLAT: gl.constexpr = _flat(h.dtype.element_ty.primitive_bitwidth // 8, COUNT, W[0][3])
    OF_SLICES: gl.constexpr = gl.SliceLayout(1, FLAT)
    PARTS: gl.constexpr = (SLICES_OF_ALL + COUNT - 1) // COUNT
    WHOLE_ROWS: gl.constexpr = W[0][6] and W[2][1] == 0
    parts = _in_parts(to, COUNT, W[0][3])
    of_parts = _numbers_in_parts(factors, COUNT)
    where, exists = _where(h, 0, COUNT, FLAT, W, SIZES)
    found = gl.load(where, mask=exists, other=0, volatile=True)
    none = 0
    for part in range(PARTS):
        weight = _weight_of(part, routed, weights, COUNT, OF_SLICES, W, SIZES)
        where, exists = _where(h, part, COUNT, FLAT, W, SIZES)
        after, after_exists = _where(h, part + 1, COUNT, FLAT, W, SIZES)
        following = gl.load(after, mask=after_exists, other=0, volatile=True)
        found, none = _awaited(found, where, exists)
        if WHOLE_ROWS:
            peaks._reinterpret(gl.int32, [peaks.shape[0] // COUNT, COUNT], peaks.layout).index(part).store(
                gl.max(found & 0x7FFFFFFF, axis=1)
            )
        elif W[0][6]:
            stored, scale = quantize_tile(_unlike(found, none).to(gl.float32, bitcast=True), gl.float8e4nv)
            parts.index(part).store(stored)
            of_parts.index(part).store(weight * scale)
        else:
            parts.index(part).store(found.to(to.dtype, bitcast=True))
            of_parts.index(part).store(weight)
        found = following
    if WHOLE_ROWS:
        gl.thread_barrier()
        BITS: gl.constexpr = peaks.shape[0]
        ALL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        other = gl.arange(0, BITS, layout=gl.SliceLayout(0, ALL))
        bits = peaks.load(gl.SliceLayout(0, ALL))
        for part in range(PARTS):
            where, exists = _where(h, part, COUNT, FLAT, W, SIZES)
            values = _unlike(gl.load(where, mask=exists, other=0, volatile=True), none)
            weight = _weight_of(part, routed, weights, COUNT, OF_SLICES, W, SIZES)
            slice = part * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(1, ALL))
            same = (slice // W[0][4])[:, None] == (other // W[0][4])[None, :]
            peak = gl.max(gl.where(same & (other < SLICES_OF_ALL)[None, :], bits[None, :], 0), axis=1)
            scale = group_scale(gl.convert_layout(peak, OF_SLICES).to(gl.float32, bitcast=True), gl.float8e4nv)
            parts.index(part).store(store_as(values.to(gl.float32, bitcast=True), scale, gl.float8e4nv))
            of_parts.index(part).store(weight * scale)


@gluon.jit
def _multiply(given, SIZES: gl.constexpr):
    """The warps that multiply."""
    (
        x, x_scale, h, out, topk_weights, routed, alpha, limit, up_decoding, up_bias, down_decoding, down_bias,
        words_of, full, empty, vectors, x_factors, results, factors, peaks,
    ) = given  # fmt: skip
    TOP_K: gl.constexpr = SIZES[0][0]
    UP: gl.constexpr = SIZES[1]
    DOWN: gl.constexpr = SIZES[2]
    ACTIVATION: gl.constexpr = SIZES[0][5]
    STEPS: gl.constexpr = steps_of(UP[0][4], UP)
    STEPS_DOWN: gl.constexpr = steps_of(TOP_K * DOWN[0][4], DOWN)
    TILES: gl.constexpr = UP[0][0] // UP[0][5]
    of_memory = (words_of, vectors, full, empty)
    nothing = _by_slices(_nothing(UP), None, 0, UP)
    pdl_wait(SIZES[0][4])
    first, apart, count = _tasks(UP, SIZES)
    place = 0
    AT_ONCE: gl.constexpr = steps_at_once(STEPS, 3)
    scales = ()
    if UP[0][6]:
        for n in gl.static_range(AHEAD):
            scales = scales + (_scales_of_up(n, routed, up_decoding, UP, SIZES),)  # noqa: RUF005
    _token(x, x_scale, vectors, x_factors, UP)
    fence_async_shared()
    gl.thread_barrier()
    for task in range(first, first + count * apart, apart):
        pair, n_start = task // TILES, task % TILES * UP[0][5]
        shift = _shift(n_start, pair, routed, up_bias, UP, SIZES)
        total = nothing
        for group in range(STEPS // AT_ONCE):
            now = scales
            if UP[0][6]:
                scales = scales[AT_ONCE:]
                for n in gl.static_range(AT_ONCE):
                    scales = scales + (_scales_of_up(place + AHEAD + n, routed, up_decoding, UP, SIZES),)  # noqa: RUF005
            total = _products(
                total, now, group, place, of_memory, x_factors if UP[0][6] else None, up_decoding[0], AT_ONCE, UP, SIZES
            )
            place += AT_ONCE
        value = _activated(total, shift, alpha, limit, UP, ACTIVATION)
        held = _expert(routed, pair, pair >= 0, SIZES) < SIZES[0][1]
        _leave(value if UP[0][6] else value.to(out.dtype.element_ty), held, h + pair * UP[0][0] + n_start)
    of_memory = (words_of, results, full, empty)
    first = gl.program_id(0)
    nothing_down = _by_slices(_nothing(DOWN), None, 0, DOWN)
    AT_ONCE_DOWN: gl.constexpr = steps_at_once(STEPS_DOWN, AHEAD)
    scales = ()
    if DOWN[0][6]:
        for n in gl.static_range(AHEAD):
            scales = scales + (_scales_of_down(n, routed, down_decoding, DOWN, SIZES),)  # noqa: RUF005
    _results(h, results, factors, peaks, routed, topk_weights, DOWN, SIZES)
    fence_async_shared()
    gl.thread_barrier()
    number = 0
    for task in range(first, DOWN[0][0] // DOWN[0][9], gl.num_programs(0)):
        sums = nothing_down
        for group in range(STEPS_DOWN // AT_ONCE_DOWN):
            now = scales
            if DOWN[0][6]:
                scales = scales[AT_ONCE_DOWN:]
                for n in gl.static_range(AT_ONCE_DOWN):
                    scales = scales + (_scales_of_down(number + AHEAD + n, routed, down_decoding, DOWN, SIZES),)  # noqa: RUF005
            sums = _products(sums, now, group, place, of_memory, factors, down_decoding[0], AT_ONCE_DOWN, DOWN, SIZES)
            place += AT_ONCE_DOWN
            number += AT_ONCE_DOWN
        _leave_result(sums, task * DOWN[0][9], out, routed, topk_weights, down_bias, DOWN, SIZES)


@gluon.jit
def _one_token_kernel(
    x,
    x_scale,
    up_desc,
    up_scale,
    up_scale_apart,
    up_bias,
    down_desc,
    down_scale,
    down_bias,
    topk_weights,
    topk_ids,
    expert_map,
    h,
    out,
    alpha,
    limit,
    load_ptr,
    LAYER: gl.constexpr,
    UP_SIZES: gl.constexpr,
    UP_STRIDES: gl.constexpr,
    UP_SCHEME: gl.constexpr,
    DOWN_SIZES: gl.constexpr,
    DOWN_STRIDES: gl.constexpr,
    DOWN_SCHEME: gl.constexpr,
):
    """out = sum over pairs of weight * down(act(gate(x)) * up(x)).

    Args:
        x: [H], its scales or None; h: [TOP_K, I] integers, all ABSENT before.
        LAYER: see `OneToken.layer`; UP_SIZES, DOWN_SIZES: see `_sizes`.

    Bytes: what the TOP_K experts have. Grid: programs that run all at once.
    """
    TOP_K: gl.constexpr = LAYER[0]
    STAGES: gl.constexpr = LAYER[3]
    PDL: gl.constexpr = LAYER[4]
    ELEMENT: gl.constexpr = x.dtype.element_ty
    QUANTISED: gl.constexpr = UP_SIZES[6]
    BITS: gl.constexpr = ELEMENT.primitive_bitwidth
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, UP_SIZES[8], 256 // BITS])
    SUM_DOWN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DOWN_SIZES[8], 256 // BITS])
    UP: gl.constexpr = (UP_SIZES, UP_STRIDES, UP_SCHEME, SUM)
    DOWN: gl.constexpr = (DOWN_SIZES, DOWN_STRIDES, DOWN_SCHEME, SUM_DOWN)
    SIZES: gl.constexpr = (LAYER, UP, DOWN)
    IN_SLICES: gl.constexpr = gl.NVMMASharedLayout(SLICE_BYTES.value, BITS, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SLICES: gl.constexpr = UP_SIZES[8]
    SLICES_DOWN: gl.constexpr = DOWN_SIZES[8]
    HELD: gl.constexpr = slices_held(UP_SIZES[4], SLICE_BYTES.value) // SLICES
    ALL_HELD: gl.constexpr = slices_held(TOP_K * DOWN_SIZES[4], bytes_left(QUANTISED))
    HELD_DOWN: gl.constexpr = ALL_HELD // SLICES_DOWN
    words_of = gl.allocate_shared_memory(ELEMENT, [STAGES, LINES, UP_SIZES[3]], IN_SLICES)
    vectors = gl.allocate_shared_memory(ELEMENT, [HELD, SLICES, UP_SIZES[3]], IN_SLICES)
    results = gl.allocate_shared_memory(ELEMENT, [HELD_DOWN, SLICES_DOWN, DOWN_SIZES[3]], IN_SLICES)
    factors = gl.allocate_shared_memory(gl.float32, [HELD_DOWN, SLICES_DOWN], LINE)
    x_factors = gl.allocate_shared_memory(gl.float32, [HELD if QUANTISED else 1, SLICES], LINE)
    peaks = gl.allocate_shared_memory(gl.int32, [power_of_2(ALL_HELD) if QUANTISED else 1], LINE)
    full, empty = ring(STAGES, 1)
    pdl_release(PDL)
    # A partition takes no None.
    routed = (topk_ids, expert_map if LAYER[2] >= 0 else topk_ids)
    up_decoding = (up_scale if QUANTISED else topk_weights, up_scale_apart)
    down_decoding = (down_scale if QUANTISED else topk_weights, 0)
    given = (
        x, x_scale if QUANTISED else topk_weights, h, out, topk_weights, routed, alpha, limit, up_decoding,
        up_bias if UP_STRIDES[2] is not None else x, down_decoding, down_bias if DOWN_STRIDES[2] is not None else x,
        words_of, full, empty, vectors, x_factors, results, factors, peaks,
    )  # fmt: skip
    brought = (up_desc, down_desc, words_of, full, empty, routed, load_ptr if LAYER[6] else topk_ids)
    gl.warp_specialize([(_multiply, (given, SIZES)), (_bring, (brought, SIZES))], [1], [24])


@triton.jit
def _absent_kernel(h, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """See `leave_absent`."""
    pdl_release(PDL)
    pdl_wait(PDL)
    leave_absent(h, tl.program_id(0), COUNT, BLOCK)


def _weight_map(mm: ExpertMM, sizes: tuple[Any, ...]) -> Any:
    """Tensor map of slices of a task's rows: eight of a gate and those of its ups, or 16, or eight."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    weight, apart = mm.lower_half, abs(mm.up_offset)
    experts, rows, columns = weight.shape
    stride_e, stride_n, _ = weight.stride()
    of_slice, of_task, of_box = sizes[3], sizes[9], sizes[10]
    halves = of_task // 8
    if mm.glu == CONCAT.value:
        shape, strides = [2, mm.out_features], [apart, stride_n]
    elif mm.glu == INTERLEAVED.value:
        shape, strides = [2, mm.out_features], [stride_n, 2 * stride_n]
    else:
        shape, strides = [halves, rows - 8 * (halves - 1)], [8 * stride_n, stride_n]
    if of_box > 1:
        shape, strides = [columns // of_slice, *shape, of_slice], [of_slice, *strides]
        box = [1, of_box, halves, 8, of_slice]
    else:
        shape, box = [*shape, columns], [1, halves, 8, of_slice]
    layout = NVMMASharedLayout(SLICE_BYTES.value, 8 * weight.element_size(), len(box))
    return TensorDescriptor(weight, [experts, *shape], [stride_e, *strides, 1], box, layout)


@dataclass(frozen=True)
class OneToken:
    """The launch of a layer's kernel for a token.

    Args:
        up, down: the two projections, `up` with what becomes of its output. top_k: experts of the token.
    """

    up: ExpertMM
    down: ExpertMM
    top_k: int

    @staticmethod
    def of(up: ExpertMM, down: ExpertMM, top_k: int, weight_on_input: bool) -> OneToken | None:
        """None where the kernel cannot run these experts."""
        if weight_on_input or not (_takes(up) and _takes(down)) or up.weight.dtype != down.weight.dtype:
            return None
        if up.out_features % (8 if up.glu else 16) or down.out_features % 16:
            return None
        made = OneToken(up, down, top_k)
        outputs = up.out_features * (2 if up.glu else 1)
        columns = outputs * up.in_features + down.out_features * down.in_features
        few = top_k * columns * up.weight.element_size() <= MOST_BYTES
        return made if few and made.stages >= FEWEST_STAGES else None

    @cached_property
    def sizes(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Of both products, see `_sizes`. Tasks of GEMM 2 have eight rows where the last round of 16 is a short one."""
        programs, outputs = programs_on(self.up.weight.device), self.down.out_features
        rounds = {rows: rows * cdiv(outputs, rows * programs) for rows in (16, 8)}
        return _sizes(self.up, 16), _sizes(self.down, min(rounds, key=rounds.__getitem__))

    @property
    def stages(self) -> int:
        """Steps that there is room for in shared memory."""
        up, down = self.sizes
        held, held_down = slices_held(up[4], SLICE_BYTES.value), slices_held(self.top_k * down[4], bytes_left(up[6]))
        taken = (SLICE_BYTES.value + 4) * (held + held_down) + 4 * power_of_2(held_down)
        return (TYPICAL.shared_kib * 1024 - PROGRAM_BYTES - taken) // STEP_BYTES.value

    @property
    def quantised(self) -> bool:
        """Whether rows are."""
        return self.up.is_scaled

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for GEMM 1's results, which `route.route_few` or `fill` makes absent: fp32 where they are quantised,
        the numbers that other kernels' epilogues quantise.
        """
        dtype = torch.int32 if self.quantised else torch.int16
        return torch.empty((self.top_k, self.up.out_features), dtype=dtype, device=like.device)

    def layer(self, mapped: int, pdl: bool, counted: bool) -> tuple[Any, ...]:
        """Constants: pairs, experts, entries of the map (-1: there is none), steps in shared memory, whether the kernel
        overlaps others, the activation, and whether pairs are counted.
        """
        return self.top_k, self.up.num_experts, mapped, self.stages, pdl, self.up.activation, counted

    @property
    def products(self) -> tuple[Any, ...]:
        """Constants of both products: sizes, strides and scheme."""
        up, down = self.sizes
        return up, self.up.strides, self.up.scheme, down, self.down.strides, self.down.scheme

    def run(
        self,
        tokens: torch.Tensor,
        tokens_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        absent: torch.Tensor,
        *,
        expert_map: torch.Tensor | None,
        pdl: bool,
        load: Row | None,
    ) -> torch.Tensor:
        """[1, H] of the token.

        Args:
            tokens: [1, H], unit stride along H, and its scales if it is quantised.
            topk_weights, topk_ids: [1, K], contiguous; expert_map: [E_global] local id or -1.
            absent: `room`, all of it absent.
            load: the layer's counters, or None.
        """
        up, down = self.up, self.down
        out = torch.empty((1, down.out_features), dtype=down.out_dtype, device=tokens.device)
        launch(
            _one_token_kernel,
            (programs_on(tokens.device),),
            tokens,
            tokens_scale,
            _weight_map(up, self.sizes[0]),
            up.weight_scale,
            up.up_scale_offset,
            up.bias,
            _weight_map(down, self.sizes[1]),
            down.weight_scale,
            down.bias,
            topk_weights,
            topk_ids,
            expert_map,
            absent,
            out,
            up.alpha,
            up.limit,
            load,
            self.layer(-1 if expert_map is None else expert_map.shape[0], pdl, load is not None),
            *self.products,
            num_warps=WARPS.value,
            launch_pdl=pdl,
            launch_cooperative_grid=True,
        )
        return out


def programs_on(device: torch.device) -> int:
    """One multiprocessor is left to what comes before."""
    return multiprocessors(device) - 1


def fill(absent: torch.Tensor, pdl: bool) -> None:
    """Make all of it absent."""
    grid = (cdiv(absent.numel(), ABSENT_AT_ONCE.value),)
    launch(_absent_kernel, grid, absent, absent.numel(), ABSENT_AT_ONCE.value, pdl, num_warps=4, launch_pdl=pdl)


def _takes(mm: ExpertMM) -> bool:
    """Whether the kernel can multiply with a weight as it is stored, slices of its rows by tensor map: 16 bits as the
    results have them, or e4m3 beside rows of e4m3, whose scales are of 128 columns both or of whole rows both.
    """
    apart = abs(mm.up_offset) * mm.weight.element_size()
    if mm.blocks is not None or mm.operand.static is not None or not descriptor_strides(mm.weight, inner=2):
        return False
    if apart % 16 or apart >= LARGEST_STRIDE:
        return False
    if mm.scheme is None:
        return mm.weight.dtype == mm.out_dtype and mm.weight.element_size() == 2
    if not mm.is_scaled or not mm.operand.data.dtype == mm.form.dtype == torch.float8_e4m3fn:
        return False
    rows, columns = mm.form.group, mm.decoding["groups"].group[1]
    return (rows, columns) in ((WHOLE, 0), (SLICE_BYTES.value, SLICE_BYTES.value))


def _sizes(mm: ExpertMM, rows: int) -> tuple[Any, ...]:
    """Outputs, gate, whether the up half is first, columns of a slice, slices of a row, outputs of a task, whether rows
    are quantised, columns, slices in a step, rows of a task, slices of a box.
    """
    of_slice, in_step = SLICE_BYTES.value // mm.weight.element_size(), LINES.value // rows
    slices = cdiv(mm.in_features, of_slice)
    of_box = 1
    if mm.in_features % of_slice == 0:
        # What is between the last slice of a row and the end of its box is no memory's, but it is multiplied.
        of_box = max(n for n in (1, 2, 4, 8, 16) if n <= in_step and cdiv(slices, n) * n <= 1.07 * slices)
        slices = cdiv(slices, of_box) * of_box
    outputs = rows // 2 if mm.glu else rows
    sizes = (mm.out_features, mm.glu, mm.up_offset < 0, of_slice, slices, outputs, mm.is_scaled, mm.in_features)
    return *sizes, in_step, rows, of_box
