"""Expert GEMMs in both formats, activation in the epilogue.

Grouped: sorted rows [R, K] x [E, N, K] -> [R, N]. Batched: [E, C, K] x [E, N, K] -> [E, C, N], work bounded by
expert_num_tokens. They differ in one thing, which rows belong to which expert, so one kernel serves both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.counters import Row
from moe_ops.kernels.triton.act_quant import quantize_batched, quantize_sorted, quantize_static
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.launch import (
    FEW_PROGRAMS,
    FEW_REGISTERS,
    ONE_TILE,
    STREAM,
    ExpertMM,
    Launch,
    descriptor_strides,
    ragged_rows,
)
from moe_ops.kernels.triton.mm_tile import compute_tile
from moe_ops.kernels.triton.permute import clear
from moe_ops.kernels.triton.programs import most_registers, multiprocessors, side_by_side
from moe_ops.kernels.triton.record import launch, on_device, with_memory
from moe_ops.kernels.triton.util import (
    cdiv,
    count_pairs,
    cut_into_tiles,
    find_tile,
    is_counted,
    next_power_of_2,
    pdl_release,
    pdl_wait,
    uniform,
)


@triton.jit
def _count_rows(load_ptr, table, E: tl.constexpr):
    """Add every expert's rows to the layer's counters."""
    e, start, end, _ = table
    count_pairs(load_ptr, is_counted(load_ptr, True), e, end - start, (e < E) & (end > start))


@triton.jit(do_not_specialize=["num_rows"])
def _count_rows_kernel(extents, num_rows, load_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr, BATCHED: tl.constexpr):
    """One program counts the rows of every expert."""
    _count_rows(load_ptr, cut_into_tiles(tl.arange(0, BLOCK_E), extents, num_rows, E, 1, 0, 1, BATCHED), E)


@triton.jit(do_not_specialize=["num_rows", "up_scale_offset", "up_zeros_offset", "up_outer_offset"])
def _expert_mm_kernel(
    a,
    a_desc,
    a_scale,
    row_to_pair,
    extents,
    w,
    w_desc,
    up_offset,
    w_scale,
    w_zeros,
    w_outer,
    up_scale_offset,
    up_zeros_offset,
    up_outer_offset,
    bias,
    out,
    out_desc,
    out_scale,
    kept,
    kept_desc,
    kept_up,
    kept_up_desc,
    num_rows,
    alpha,
    limit,
    load_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDES: tl.constexpr,
    BLOCK: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MOVES: tl.constexpr,
    SCHEME: tl.constexpr,
    BATCHED: tl.constexpr,
    WALK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: tiles of BLOCK_M rows of one expert times BLOCK_N rows of its weight, every num_programs-th of them.

    How many tiles there are is known on the device only, from the experts' `extents`: cumulative row ends, or BATCHED,
    how many of each block's `num_rows` are used. WALK, see `launch.walk`: ONE_TILE needs a program for every tile; of
    the others as many as run at once do. A STREAM is one loop over tiles and k: the next tile's loads run under this
    tile's epilogue. Each tile is summed over k in order, by one program.
    Bytes: sum over experts with rows of N_w * K * w_size, + R * K + R * N activations. FLOPs: 2 * R * N_w * K.
    The first program adds the rows of every expert to the layer's counters, if it is given any.
    What stood before the activation goes to `kept`, its up half to `kept_up` where it is apart, if there are these.
    With TOP_K > 0 the rows of `a` are tokens: row r reads token row_to_pair[r] // TOP_K, so no permuted copy exists.
    """
    columns: tl.constexpr = BLOCK[1] if GLU == 0 else BLOCK[1] // 2
    N_TILES: tl.constexpr = (N + columns - 1) // columns
    pdl_wait(PDL)
    pdl_release(PDL)
    tensors = (
        a,
        a_desc,
        a_scale,
        row_to_pair,
        w,
        w_desc,
        w_scale,
        up_offset,
        up_scale_offset,
        (w_scale, w_zeros, w_outer, up_scale_offset, up_zeros_offset, up_outer_offset),
        bias,
        out,
        out_desc,
        out_scale,
        (kept, kept_desc, kept_up, kept_up_desc),
        alpha,
        limit,
    )
    table = cut_into_tiles(tl.arange(0, BLOCK[4]), extents, num_rows, E, BLOCK[0], BLOCK[5], N_TILES, BATCHED)
    if load_ptr is not None:
        if tl.program_id(0) == 0:
            _count_rows(load_ptr, table, E)
    if WALK == ONE_TILE:
        tile = tl.program_id(0)
        expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], BLOCK[5], N_TILES, BLOCK[3])
        if first < past:
            where = (expert, first, past, n_tile * columns)
            if BLOCK[5] > 0 and past - first > BLOCK[0]:
                compute_tile(*where, *tensors, N, K, TOP_K, STRIDES, BLOCK, GLU, ACTIVATION, MOVES, SCHEME, TALL=True)
            else:
                compute_tile(*where, *tensors, N, K, TOP_K, STRIDES, BLOCK, GLU, ACTIVATION, MOVES, SCHEME)
    else:
        tiles = uniform(tl.max(table[3], axis=0))
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=WALK == STREAM):
            expert, first, past, n_tile = find_tile(tile, table, BLOCK[0], BLOCK[5], N_TILES, BLOCK[3])
            where = (expert, first, past, n_tile * columns)
            compute_tile(*where, *tensors, N, K, TOP_K, STRIDES, BLOCK, GLU, ACTIVATION, MOVES, SCHEME)


#: What is kept of what stands before an activation: nothing, all of it in one tensor, or its halves in two.
Kept = tuple[torch.Tensor, ...]


def _described(kept: Kept, config: MMConfig, made: Launch) -> tuple[torch.Tensor | TensorDescriptor | None, ...]:
    """Two tensors or None, each with a descriptor where it and the output may have one."""
    found: list[Any] = []
    for part in kept:
        mapped = made.out_desc is not None and descriptor_strides(part, inner=1)
        found += [part, ragged_rows(part, config.rows, made.moves[2]) if mapped else None]
    return *found, *[None] * (4 - len(found))


def grouped_mm(
    a: torch.Tensor,
    mm: ExpertMM,
    offsets: torch.Tensor,
    config: MMConfig,
    *,
    num_rows: int,
    row_to_pair: torch.Tensor | None = None,
    top_k: int = 0,
    pdl: bool = False,
    known: bool = False,
    load: Row | None = None,
    kept: Kept = (),
    told: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one grouped expert GEMM, and a kernel that quantises its rows where each has one scale.

    Args:
        a: [R, K] sorted rows, or [T, K] tokens when `row_to_pair` is given; unit stride along K.
        mm: weight, bias, scales, activation and output form (see `ExpertMM`).
        offsets: [E] i32 cumulative row ends.
        num_rows: R.
        row_to_pair: [R] i32, pair (t * top_k + k) of each sorted row.
        pdl: start while the kernel before still runs (programmatic dependent launch).
        known: with `pdl`, that the kernel before does not write `offsets`, and has waited for the one that does before
            it let this one start.
        load: counters of a layer, where no kernel before knew it.
        kept: [R, ..] with unit stride, to write what stands before the activation to: of halves that do not alternate
            both, which have the same strides.
        told: i32, `mm.words_told` of them and all 0, or None: then a kernel makes them, where there are any.

    Returns:
        (out [R, N], out_scale [R, groups of N], empty unless `mm.quantize_output`).
    """
    mm = mm.beside(config)
    in_halves = _comes_sorted(a, row_to_pair) and mm.leaves_halves(config, num_rows)
    out, out_scale = mm.allocate((num_rows,), a, in_halves=in_halves)
    grid = (num_rows, most_tiles(num_rows, mm.num_experts, config), num_rows, False)
    _launch(a, mm, offsets, config, (out, out_scale), grid, row_to_pair, top_k, pdl, known, load, kept, told)
    if mm.out_static is not None:
        return quantize_static(out, offsets, mm.out_static, mm.out_form, pdl=pdl)
    if mm.quantizes_rows:
        return quantize_sorted(out, offsets, mm.out_form, out_scale if in_halves else None, pdl=pdl)
    return out, out_scale


def batched_mm(
    batch: torch.Tensor,
    mm: ExpertMM,
    expert_num_tokens: torch.Tensor,
    config: MMConfig,
    *,
    most_rows: int | None = None,
    pdl: bool = False,
    known: bool = False,
    load: Row | None = None,
    told: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one batched expert GEMM, and a kernel that quantises its rows where each has one scale.

    Args:
        batch: [E, C, K], contiguous.
        mm: weight, bias, scales, activation and output form (see `ExpertMM`).
        expert_num_tokens: [E] i32, rows in use per expert.
        most_rows: bound on their sum, if the caller knows one below E * C: a smaller grid.
        pdl: start while the kernel before still runs (programmatic dependent launch).
        known: the same of `expert_num_tokens` as of `offsets` in `grouped_mm`.
        load: counters of a layer, where no kernel before knew it.
        told: as in `grouped_mm`.

    Returns:
        (out [E, C, N], out_scale [E, C, groups of N], empty unless `mm.quantize_output`). Rows past an
        expert's count are not written.
    """
    E, C, K = batch.shape
    mm = mm.beside(config)
    rows, row_tiles = E * C, E * cdiv(C, config.rows)
    if most_rows is not None:
        rows, row_tiles = min(rows, most_rows), min(row_tiles, most_tiles(most_rows, E, config))
    in_halves = _comes_sorted(batch.view(E * C, K), None) and mm.leaves_halves(config, rows)
    out, out_scale = mm.allocate((E, C), batch, in_halves=in_halves)
    outputs = (out.view(E * C, mm.out_features), out_scale)
    grid = (rows, row_tiles, C, True)
    _launch(batch.view(E * C, K), mm, expert_num_tokens, config, outputs, grid, None, 0, pdl, known, load, told=told)
    if mm.out_static is not None:
        return quantize_static(out, expert_num_tokens, mm.out_static, mm.out_form, pdl=pdl)
    if mm.quantizes_rows:
        return quantize_batched(out, expert_num_tokens, mm.out_form, out_scale if in_halves else None, pdl=pdl)
    return out, out_scale


def most_tiles(rows: int, num_experts: int, config: MMConfig) -> int:
    """Bound on row tiles when each expert's rows are cut into tiles by themselves."""
    return cdiv(rows, config.rows) + min(num_experts, rows)


def count_rows(load: Row, extents: torch.Tensor, num_rows: int, *, batched: bool = False) -> None:
    """Add every expert's rows to its layer's counters, before a product of many that counts none: kernels in Gluon.

    Args:
        extents, num_rows: as for `grouped_mm`; batched: counts, and rows of each expert's block.
    """
    E = extents.shape[0]
    launch(_count_rows_kernel, (1,), extents, num_rows, load, E=E, BLOCK_E=next_power_of_2(E), BATCHED=batched)


def _comes_sorted(a: torch.Tensor, row_to_pair: torch.Tensor | None) -> bool:
    """Whether kernels in Gluon may take the rows `a` [rows, K]: none are gathered."""
    return row_to_pair is None and descriptor_strides(a, inner=1)


def _launch(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    outputs: tuple[torch.Tensor, torch.Tensor],
    grid: tuple[int, int, int, bool],
    row_to_pair: torch.Tensor | None,
    top_k: int,
    pdl: bool,
    known: bool,
    load: Row | None,
    kept: Kept = (),
    told: torch.Tensor | None = None,
) -> None:
    """Launch a kernel on rows `a` [rows, K]; `grid`: (bounds on the rows of all experts and on row tiles, num_rows,
    batched).
    """
    out, out_scale = outputs
    if out.numel() == 0:
        return
    rows, row_tiles, num_rows, batched = grid
    gathers = mm.gathers_few(config) or mm.shares(config)
    as_they_come = _comes_sorted(a, None if gathers else row_to_pair)
    as_they_come &= load is None or not mm.takes_few(config)  # few rows are not worth a kernel that counts them
    in_order = not mm.is_decoded or ((mm.rows_order or mm.shares(config)) and a.dtype == torch.bfloat16)
    specialised = as_they_come and in_order and mm.specialises(config)
    promoted = as_they_come and not specialised and mm.promotes(config, rows)
    plain = a.dtype == mm.weight.dtype and mm.is_plain(config) and all(descriptor_strides(t, 1) for t in (a, *kept))
    if specialised or promoted or plain:
        if load is not None:
            count_rows(load, extents, num_rows, batched=batched)
        if told is None and (words := mm.words_told(config, rows)):
            told = clear(a.new_empty(words, dtype=torch.int32), pdl)
    if specialised:
        if mm.decodes_once(config, rows):
            of = _of_decoded_once(a, mm, extents, config, outputs, (row_to_pair, top_k), told)
            _launch_specialised(mm, of, grid, a.device, pdl)
        elif mm.takes_few(config):
            gather = (row_to_pair, top_k) if mm.widened else (None, None)
            _launch_few(a, mm, extents, config, out, grid, gather, pdl, known)
        elif mm.folds_scales:
            _launch_specialised(mm, _of_promoted(a, mm, extents, config, outputs, told), grid, a.device, pdl)
        elif mm.waits_for_scales:
            _launch_specialised(mm, _of_decoded_fp8(a, mm, extents, config, out, told), grid, a.device, pdl)
        else:
            of = _of_decoded(a, mm, extents, config, out, told)
            _launch_specialised(mm, of, grid, a.device, pdl)
        return
    if promoted:
        _launch_specialised(mm, _of_promoted(a, mm, extents, config, outputs, told), grid, a.device, pdl)
        return
    if plain:
        of = _of_plain(a, mm, extents, config, out, kept, (row_to_pair, top_k), told)
        _launch_specialised(mm, of, grid, a.device, pdl)
        return
    made = mm.prepare(a, out, config, gathered=row_to_pair is not None)
    arguments = (
        a,
        made.a_desc,
        mm.rows_scale,
        row_to_pair,
        extents,
        mm.weight,
        made.w_desc,
        mm.up_offset,
        *mm.decoded_by,
        mm.bias,
        out,
        made.out_desc,
        out_scale,
        *_described(kept, config, made),
        num_rows,
        mm.alpha,
        mm.limit,
        load,
        mm.num_experts,
        mm.out_features,
        mm.in_features,
        top_k,
        (*made.strides, kept[0].stride(0) if kept else None),
        made.block,
        mm.glu,
        mm.activation,
        made.moves,
        mm.scheme,
        batched,
        made.walk,
        pdl,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": pdl}
    kinds = {"scaled": mm.is_scaled, "decoded": mm.is_decoded, "in_two": mm.in_two, "in_turns": mm.in_turns}
    registers = most_registers(config, mm.glu, **kinds)
    if registers is not None:
        options["maxnreg"] = registers
    programs = row_tiles * made.n_tiles
    if made.walk != ONE_TILE.value:
        scales = tuple(scale.dtype for scale in mm.operand.scales)
        key = (arguments[-13:], load is None, config, a.dtype, out.dtype, scales, mm.bias is None, a.device)
        with on_device(a):
            programs = min(programs, side_by_side(_expert_mm_kernel, key, with_memory(arguments), options))
    launch(_expert_mm_kernel, (programs,), *arguments, **options)


#: Of a kernel in Gluon: itself, what `ExpertMM` prepared, its tensors and its warps.
Specialised = tuple[Any, Launch, tuple[Any, ...], int]


def _of_decoded(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    out: torch.Tensor,
    told: torch.Tensor | None,
) -> Specialised:
    """A launch of `decoded_mm`."""
    from moe_ops.kernels.triton.decoded_mm import _decoded_mm_kernel

    made = mm.prepare_decoded(a, out, config)
    tensors = (made.a_desc, extents, made.w_desc, *mm.decoded_by, mm.bias, made.out_desc, told)
    return _decoded_mm_kernel, made, tensors, 8 // made.block[7]


def _decoded_by_rows(mm: ExpertMM) -> tuple[Any, ...]:
    """The scales of groups and of whole weight rows, and of each the offset of the up half."""
    scales = (mm.decoding["groups"], mm.decoding["rows"])
    return *(scale.tensor for scale in scales), *(scale.up_offset for scale in scales)


def _of_decoded_fp8(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    out: torch.Tensor,
    told: torch.Tensor | None,
) -> Specialised:
    """A launch of `decoded_fp8_mm`."""
    from moe_ops.kernels.triton.decoded_fp8_mm import _decoded_fp8_mm_kernel

    made = mm.prepare_decoded_fp8(a, out, config)
    tensors = (made.a_desc, mm.rows_scale, extents, made.w_desc, *_decoded_by_rows(mm), mm.bias, made.out_desc, told)
    return _decoded_fp8_mm_kernel, made, tensors, 4


def _of_promoted(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    outputs: tuple[torch.Tensor, torch.Tensor],
    told: torch.Tensor | None,
) -> Specialised:
    """A launch of `promoted_mm`, or of `folded_mm`, which is told nothing."""
    from moe_ops.kernels.triton.folded_mm import _folded_mm_kernel
    from moe_ops.kernels.triton.promoted_mm import _promoted_mm_kernel

    out, out_scale = outputs
    made = mm.prepare_promoted(a, out, config)
    scales = (mm.weight_scale, mm.up_scale_offset)
    tensors = (made.a_desc, mm.rows_scale, extents, made.w_desc, *scales, mm.bias, made.out_desc, out_scale)
    if mm.folds_scales:
        return _folded_mm_kernel, made, tensors, 4
    return _promoted_mm_kernel, made, (*tensors, told), 4


def _of_plain(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    out: torch.Tensor,
    kept: Kept,
    gather: tuple[torch.Tensor | None, int],
    told: torch.Tensor | None,
) -> Specialised:
    """A launch of `plain_mm`."""
    from moe_ops.kernels.triton.plain_mm import _plain_mm_kernel

    row_to_pair, top_k = gather
    made, of_kept = mm.prepare_plain(a, out, kept, config, 0 if row_to_pair is None else top_k)
    tensors = (a, made.a_desc, row_to_pair, extents, made.w_desc, mm.bias, made.out_desc, *of_kept, told)
    return _plain_mm_kernel, made, tensors, 4


def _of_decoded_once(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    outputs: tuple[torch.Tensor, torch.Tensor],
    gather: tuple[torch.Tensor | None, int],
    told: torch.Tensor,
) -> Specialised:
    """A launch of `decoded_once_mm`, or of `decoded_plain_mm`, which alone gathers rows."""
    from moe_ops.kernels.triton.decoded_once_mm import _decoded_once_mm_kernel
    from moe_ops.kernels.triton.decoded_plain_mm import _decoded_plain_mm_kernel

    (out, out_scale), (row_to_pair, top_k) = outputs, gather
    made, memory, memory_desc = mm.prepare_decoded_once(a, out, config, 0 if row_to_pair is None else top_k)
    rest = (*_decoded_by_rows(mm), memory, memory_desc, told, mm.bias, made.out_desc)
    if mm.is_decoded:
        return _decoded_plain_mm_kernel, made, (a, made.a_desc, row_to_pair, extents, made.w_desc, *rest), 4
    weights = (mm.weight, made.w_desc, mm.up_offset)
    return _decoded_once_mm_kernel, made, (made.a_desc, mm.rows_scale, extents, *weights, *rest, out_scale), 4


def _launch_specialised(
    mm: ExpertMM, of: Specialised, grid: tuple[int, int, int, bool], device: torch.device, pdl: bool
) -> None:
    """Launch a kernel in Gluon, one program for each multiprocessor, with its tensors and the numbers behind them."""
    kernel, made, tensors, num_warps = of
    programs = min(grid[1] * made.n_tiles, multiprocessors(device))
    launch(kernel, (programs,), *tensors, *_numbers(mm, made, grid), pdl, num_warps=num_warps, launch_pdl=pdl)


def _launch_few(
    a: torch.Tensor,
    mm: ExpertMM,
    extents: torch.Tensor,
    config: MMConfig,
    out: torch.Tensor,
    grid: tuple[int, int, int, bool],
    gather: tuple[torch.Tensor | None, int | None],
    pdl: bool,
    known: bool,
) -> None:
    """A launch of `decoded_few_mm`, several programs for each multiprocessor, which does not wait for the kernel before
    if all but the rows is `known`; `gather`: where quantised rows come from, see there.
    """
    from moe_ops.kernels.triton.decoded_few_mm import _decoded_few_mm_kernel

    made, (row_to_pair, top_k) = mm.prepare_decoded(a, out, config), gather
    programs = min(grid[1] * made.n_tiles, FEW_PROGRAMS * multiprocessors(a.device))
    tensors = (
        made.a_desc,
        *((a, mm.rows_scale) if mm.widened else (None, None)),
        row_to_pair,
        extents,
        made.w_desc,
        *mm.decoded_by,
        mm.bias,
        made.out_desc,
    )
    numbers = (*_numbers(mm, made, grid), pdl, pdl and known, top_k)
    options = {"num_warps": config.num_warps, "launch_pdl": pdl, "maxnreg": FEW_REGISTERS}
    launch(_decoded_few_mm_kernel, (programs,), *tensors, *numbers, **options)


def _numbers(mm: ExpertMM, made: Launch, grid: tuple[int, int, int, bool]) -> tuple[Any, ...]:
    """What a kernel in Gluon is given behind its tensors."""
    _, _, num_rows, batched = grid
    numbers = (num_rows, mm.alpha, mm.limit, mm.num_experts, mm.out_features, mm.in_features, made.strides, made.block)
    return *numbers, mm.glu, mm.activation, made.moves[3], mm.scheme, batched
