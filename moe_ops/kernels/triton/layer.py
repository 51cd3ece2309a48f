"""One layer's experts by a plan: the kernel sequences behind the operators, the tuner and the benchmarks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from meta.arch import FIRST_CAPABILITY, SCALED_BLOCKS
from meta.blocks import blocks_on
from meta.checks import fail
from meta.cost import tokens_per_pass
from meta.operands import Operand
from meta.schemes import WHOLE, ActivationFormat, QuantScheme
from moe_ops import plans
from moe_ops.backends import triton_plans
from moe_ops.counters import Row
from moe_ops.kernels.triton import act_quant, batched_io, combine, permute, route, small
from moe_ops.kernels.triton.config import MMConfig, are_promoted
from moe_ops.kernels.triton.expert_mm import batched_mm as launch_batched_mm
from moe_ops.kernels.triton.expert_mm import grouped_mm as launch_grouped_mm
from moe_ops.kernels.triton.launch import (
    BLOCKS_N,
    GLUON_ROWS,
    PACKED_COLUMNS,
    SMALLEST_GROUP,
    ExpertMM,
    as_bf16,
    descriptor_strides,
    hopper_with_gluon,
)
from moe_ops.kernels.triton.route import Routed
from moe_ops.kernels.triton.tile_loads import CONCAT, NOT_GATED
from moe_ops.kernels.triton.util import INTERPRETED, unit_stride
from moe_ops.plans import Plan

if TYPE_CHECKING:
    from moe_ops.kernels.triton.one_token import OneToken

Tensor = torch.Tensor


INTERPRETED_CAPABILITY = FIRST_CAPABILITY["tma"]  # what the interpreter stands for: a Hopper


def gpu_of(device: torch.device) -> tuple[str, int]:
    """(name, capability) of the device."""
    if INTERPRETED.value:
        return "interpreter", INTERPRETED_CAPABILITY
    return plans.gpu_of(device)


def blocks_for(weight: Operand, rows: Operand, device: torch.device) -> ActivationFormat | None:
    """What `rows` become for tensor cores that take `weight` as it is stored; None where the device has none, and of
    rows that were given quantised.
    """
    if rows.scales or not isinstance(weight.scheme, QuantScheme):
        return None
    return blocks_on(weight.scheme, f"sm{gpu_of(device)[1]}")


def plans_for(device: torch.device, blocks: ActivationFormat | None) -> tuple[str, int]:
    """(name, capability) that plans go by: without `blocks` that of a GPU which has no products of them."""
    name, sm = gpu_of(device)
    return name, sm if blocks is not None else min(sm, SCALED_BLOCKS.start - 1)


def pdl_launches(device: torch.device) -> bool:
    """Whether kernels of one layer may overlap their starts: each waits for the one before it prior to any access."""
    return not INTERPRETED.value and gpu_of(device)[1] >= FIRST_CAPABILITY["dependent_launch"]


class Ends(NamedTuple):
    """Both ends of a layer whose tokens come from other GPUs and go back there, as `moe_ops.choice.between` says."""

    arrive: Callable[[], None]
    deliver: Callable[..., None]


class Told(NamedTuple):
    """Words of both products, see `ExpertMM.words_told`, and of each; None where there are none."""

    both: Tensor | None = None
    first: Tensor | None = None
    second: Tensor | None = None


#: Makes the tokens' results of rows, the row of every pair, and the weights.
Collect = Callable[[Tensor, Tensor, Tensor | None], Any]


@dataclass(frozen=True)
class Layer:
    """One layer's experts and the options that no plan changes.

    Args:
        up, down: the two projections.
        expert_map: [E_global] local id or -1, or None.
        weight_on_input: multiply the rows, not the results, by the routing weights.
        capacity: rows per expert of the batched format.
        scheme: name of the weights' scheme.
    """

    up: ExpertMM
    down: ExpertMM
    scheme: str
    expert_map: Tensor | None = None
    weight_on_input: bool = False
    capacity: int | None = None

    def run(self, plan: Plan, hidden_states: Operand, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """[T, H] of hidden_states [T, H] routed by topk_weights, topk_ids [T, K], with the kernels of `plan`."""
        hidden_states = _unit_stride(hidden_states)
        rows = hidden_states.data
        if plan.sequence == "small" and small.refuses(self.up, self.down, plan.configs, self.weight_on_input):
            sizes = (self.up.num_experts, topk_ids.shape[1], self.up.in_features, self.up.out_features)
            key = plans.LayerKey(self.scheme, "grouped", *sizes, self.up.glu != NOT_GATED.value)
            plan = triton_plans.by_products(key, plans.bucket(rows.shape[0]), *plans_for(rows.device, self.up.blocks))
        if plan.sequence == "small":
            return self._small(plan, hidden_states, topk_weights, topk_ids)
        if plan.sequence == "batched":
            return self._batched(plan, hidden_states, topk_weights, topk_ids)
        if self._tokens_per_pass(plan, topk_ids) >= rows.shape[0]:
            return self._grouped(plan, hidden_states, topk_weights, topk_ids)
        out = rows.new_empty((rows.shape[0], self.down.out_features), dtype=self.down.out_dtype)
        for first, tokens, *routing in self._passes(plan, hidden_states, topk_weights, topk_ids):
            self._grouped(plan, tokens, *routing, self._combined(out[first : first + tokens.data.shape[0]]))
        return out

    def run_between(
        self, plan: Plan, hidden_states: Operand, topk_weights: Tensor, topk_ids: Tensor, ends: Ends
    ) -> None:
        """As `run`, of tokens that arrive while they are sorted, if the plan sorts any; results are delivered."""
        if plan.sequence != "grouped":
            ends.arrive()
            ends.deliver(self.run(plan, hidden_states, topk_weights, topk_ids), None, None, first=0)
            return
        for first, tokens, *routing in self._passes(plan, _unit_stride(hidden_states), topk_weights, topk_ids):
            arrive = ends.arrive if first == 0 else None
            self._grouped(plan, tokens, *routing, partial(ends.deliver, first=first), arrive)

    def _passes(
        self, plan: Plan, hidden_states: Operand, topk_weights: Tensor, topk_ids: Tensor
    ) -> Iterator[tuple[int, Operand, Tensor, Tensor]]:
        """Parts of a batch that go through the experts one after the other: the first token, tokens and routing."""
        step = self._tokens_per_pass(plan, topk_ids)
        for first in range(0, topk_ids.shape[0], step):
            part = slice(first, first + step)
            scales = tuple(scale[part] for scale in hidden_states.scales)
            tokens = Operand(hidden_states.data[part], hidden_states.scheme, scales)
            yield first, tokens, topk_weights[part], topk_ids[part]

    def _tokens_per_pass(self, plan: Plan, topk_ids: Tensor) -> int:
        copies = self._copies_rows(plan, topk_ids)
        before = self._row_bytes(self.up.in_features) if copies else 0
        before += self._first().bytes_left(self._tiles(plan)[0], topk_ids.numel(), copies)
        result = self.down.out_features * self.down.out_dtype.itemsize
        # Copies, and what is quantised, end where results begin.
        row_bytes = self._row_bytes(self.up.out_features) + max(before, result)
        return tokens_per_pass(topk_ids.shape[0], self.up.num_experts, topk_ids.shape[1], row_bytes)

    def _row_bytes(self, columns: int) -> int:
        """Bytes of a product's input row."""
        if self.form is None:
            return columns * self.down.out_dtype.itemsize
        stored, scales = columns // self.form.pack, int(self.form.scale_width(columns))
        return stored * self.form.dtype.itemsize + scales * self.form.scale_dtype.itemsize

    def _small(self, plan: Plan, hidden_states: Operand, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        pdl = pdl_launches(hidden_states.data.device)
        rows, rows_scale = self._quantized(hidden_states, self.form, pdl)
        one = self.one_token(*topk_ids.shape)
        if one is not None:
            routing = (topk_weights.contiguous(), topk_ids.contiguous())
            absent = one.room(rows)
            one_token_kernels().fill(absent, pdl)
            return one.run(rows, rows_scale, *routing, absent, expert_map=self.expert_map, pdl=pdl, load=self.load)
        return small.small_experts(
            rows,
            topk_weights.contiguous(),
            topk_ids.contiguous(),
            replace(self._first(), rows_scale=rows_scale),
            self.down,
            plan.configs,
            expert_map=self.expert_map,
            weight_on_input=self.weight_on_input,
            pdl=pdl,
            load=self.load,
        )

    def one_token(self, tokens: int, top_k: int) -> OneToken | None:
        """The kernel that runs a token's experts, None where none does, and among processes that work together: all of
        its programs have to run at once, and a kernel that waits for another process may keep them from it. Should that
        process wait for what comes behind this kernel, nobody would ever go on.
        """
        if tokens != 1 or not hopper_with_gluon(self.up.weight.device) or _is_one_of_several():
            return None
        return one_token_kernels().OneToken.of(self._first(), self.down, top_k, self.weight_on_input)

    def _quantized(self, rows: Operand, form: ActivationFormat | None, pdl: bool) -> tuple[Tensor, Tensor | None]:
        """Rows and their scales as the products take them."""
        if form is not None and not rows.scales:
            return act_quant.quantize_rows(rows.data, form, pdl=pdl)
        return rows.data, rows.scales[0] if rows.scales else None

    def _combined(self, out: Tensor | None = None) -> Collect:
        """The results in order of tokens, written to `out` if given."""
        return partial(combine.combine, out=out, pdl=pdl_launches(self.down.weight.device))

    def _grouped(
        self,
        plan: Plan,
        hidden_states: Operand,
        topk_weights: Tensor,
        topk_ids: Tensor,
        collect: Collect | None = None,
        arrive: Callable[[], None] | None = None,
    ) -> Any:
        rows = hidden_states.data
        copied = self._copies_rows(plan, topk_ids, described=descriptor_strides(rows, inner=1))
        pdl, (before, after) = pdl_launches(rows.device), self._weights(topk_weights)
        static, top_k, form = self.up.operand.static, topk_ids.shape[1], self._rows_form(plan)
        beside = None if copied or hidden_states.scales else act_quant.beside(rows, form)
        sorting, tiles = (topk_ids, self.up.num_experts, self.expert_map), self._tiles(plan)
        told = self._told(tiles, topk_ids)
        if arrive is not None and beside is not None:
            arrive()  # the sort's kernel quantises the tokens
            arrive, pdl = None, False  # it waits for more than the kernel before it
        options = {"pdl": pdl, "rows": beside, "load": self.load, "cleared": told.both}
        offsets, row_to_pair, pair_to_row = permute.sort_pairs(*sorting, **options)
        if arrive is not None:
            arrive()
            pdl = False
        if static is not None:
            pairs = (row_to_pair, top_k)
            if before is not None:
                rows, pairs = permute.gather_rows(rows, pair_to_row, before, pdl=pdl), None
            gather, tokens = None, act_quant.quantize_static(rows, offsets, static, form, pairs, pdl=pdl)
        elif copied:
            order = self.up.order(tiles[0])
            gather, tokens = None, self._sorted(hidden_states, form, pair_to_row, before, pdl, order)
        else:
            gather = row_to_pair
            tokens = self._quantized(hidden_states, form, pdl) if beside is None else (beside.quantized, beside.scale)
        h = self._gemm_1(plan, Routed(after, None, offsets, gather, pair_to_row, *tokens), pdl, told.first)
        del tokens  # copies of many rows: their memory is GEMM 2's
        y = self._gemm_2(plan, *h, offsets, pair_to_row, told.second)
        return (collect or self._combined())(y, pair_to_row, after)

    def _copies_rows(self, plan: Plan, topk_ids: Tensor, described: bool = True) -> bool:
        """Whether GEMM 1 reads sorted copies of the tokens: where they carry the routing weights, or are quantised, or
        multiplied with decoded weights, and its tile has many rows, which come faster by descriptor. The batched
        format, which always copies, took 0.92 to 0.96 of the time of gathered rows on an H200 (Mixtral-8x7B from 64
        rows an expert on, Qwen3-30B-A3B from 256). `decoded_plain_mm` gathers tokens if a tensor map could describe
        them: `described`.

        Not where whole rows are quantised beside the sort: there a kernel quantises between the products as well, and a
        layer has five; but where a kernel in Gluon takes the product of many rows, and gathers none (Mixtral-8x7B,
        T = 2048, fp8_channel 1837 us, copied 1391). With static scales each copy has that of its expert.
        """
        if self.up.operand.static is not None:
            return True
        first, tile = self._first(), self._tiles(plan)[0]
        if self.weight_on_input or first.order(tile) is not None or (first.shares(tile) and not described):
            return True
        if not (self.quantizes and tile.a_tma) or first.gathers_few(tile):
            return False
        if not (self.quantizes_rows and permute.quantises_beside(topk_ids)):
            return True
        many = are_promoted(topk_ids.numel(), self.up.num_experts)
        return many and (first.specialises(tile) or first.promotable(tile))

    def _tiles(self, plan: Plan, gathered: bool = False, given: bool = False) -> tuple[MMConfig, MMConfig]:
        """Both products' tiles. GEMM 1 leaves its rows in GEMM 2's order of columns, whole ones at once. Rows that are
        `given` quantised, or that GEMM 1 quantises, are no bf16 numbers.
        """
        up, first, second = self._first(), *plan.configs
        if given and up.gathers_few(first):
            first = up.beside_few(first)
        first = fit(first, up, as_they_are=gathered and not up.shares(first))
        if self.down.gathers_few(second) and not up.beside(first).quantizes_rows:
            second = self.down.beside_few(second)
        second = fit(second, self.down)
        order = self.down.order(second)
        if order is not None:
            steps = order[0] // self.up.columns_at_once(first)
            if steps > 1 and self.down.takes_few(second):
                second = fit(self.down.beside_few(second), self.down)
            elif steps > 1:
                second = second._replace(block_k=second.block_k // steps, num_stages=min(4, second.num_stages * steps))
        return first, second

    def _rows_form(self, plan: Plan) -> ActivationFormat | None:
        """What GEMM 1's rows are quantised to: numbers of `form`, in bf16 where it gathers few."""
        tile = self._tiles(plan)[0]
        return as_bf16(self.form) if self._first().gathers_few(tile) else self.form

    def _sorted(
        self,
        hidden_states: Operand,
        form: ActivationFormat | None,
        pair_to_row: Tensor,
        topk_weights: Tensor | None,
        pdl: bool,
        order: tuple[int, int] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens by expert, times `topk_weights` if given, and their scales, as the products take them."""
        rows = hidden_states.data
        if form is None or hidden_states.scales:
            made = [permute.gather_rows(rows, pair_to_row, topk_weights, pdl=pdl, order=order)]
            made += [permute.gather_rows(scale, pair_to_row, pdl=pdl) for scale in hidden_states.scales]
            return made[0], made[1] if len(made) > 1 else None
        quantized, scale = act_quant.room((pair_to_row.numel(), rows.shape[1]), form, rows.device)
        group = act_quant.group_columns(form, rows.shape[1])
        permute.scatter_rows(rows, pair_to_row, topk_weights, quantized, scale, pdl, group)
        return quantized, scale

    def run_routed(
        self, plan: Plan, hidden_states: Tensor, router_logits: Tensor, correction_bias: Tensor | None, **routing: Any
    ) -> Tensor:
        """`run` from router logits, where `topk.is_few`; `routing` as in `fused_topk`."""
        grouped = plan.sequence == "grouped"
        one = None if grouped else self.one_token(*router_logits.shape[:1], routing["top_k"])
        absent = None if one is None else one.room(hidden_states)
        routed = route.route_few(
            unit_stride(hidden_states),
            router_logits,
            correction_bias,
            self.up.num_experts if grouped else None,
            self.expert_map,
            form=self._rows_form(plan) if grouped else self.form,
            pdl=pdl_launches(hidden_states.device),
            load=self.load,
            absent=absent,
            **routing,
        )
        if one is not None:
            given = (routed.tokens, routed.tokens_scale, routed.topk_weights, routed.topk_ids, absent)
            pdl = pdl_launches(hidden_states.device)
            return one.run(*given, expert_map=self.expert_map, pdl=pdl, load=self.load)
        if grouped:
            pdl, tiles, pairs = pdl_launches(hidden_states.device), self._tiles(plan), routed.pair_to_row
            order = self.up.order(tiles[0])
            if order is not None:
                copies = permute.gather_rows(routed.tokens, pairs, pdl=pdl, order=order)
                routed = replace(routed, row_to_pair=None, tokens=copies)
            h = self._gemm_1(plan, routed, pdl)
            y = self._gemm_2(plan, *h, routed.offsets, pairs)
            return self._combined()(y, routed.pair_to_row, routed.topk_weights)
        scales = () if routed.tokens_scale is None else (routed.tokens_scale,)
        tokens = Operand(routed.tokens, self.form, scales)
        return self.run(plan, tokens, routed.topk_weights, routed.topk_ids)

    def _told(self, tiles: tuple[MMConfig, MMConfig], topk_ids: Tensor) -> Told:
        """What programs of the products tell one another, for the kernel that sorts the pairs to make 0."""
        rows = topk_ids.numel()
        if self.capacity is not None:
            rows = min(rows, self.up.num_experts * self.capacity)
        first, second = self._first().words_told(tiles[0], rows), self.down.words_told(tiles[1], rows)
        if not first + second:
            return Told()
        both = topk_ids.new_empty(first + second, dtype=torch.int32)
        return Told(both, both[:first] if first else None, both[first:] if second else None)

    def _gemm_1(self, plan: Plan, routed: Routed, pdl: bool, told: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Activated rows by expert and their scales, of rows that `routed.row_to_pair` gathers from tokens, or of
        sorted rows.
        """
        pairs = routed.pair_to_row
        rows = {"num_rows": pairs.numel(), "pdl": pdl, "told": told}
        gathered = routed.row_to_pair is not None
        given = self.quantizes and routed.tokens.dtype == self.form.dtype
        first, second = self._tiles(plan, gathered, given)
        orders = {"rows_order": self.up.order(first), "out_order": self.down.order(second)}
        widens = self.down.gathers_few(second)
        up = replace(self._first(), rows_scale=routed.tokens_scale, widens_output=widens, **orders)
        gather = {"row_to_pair": routed.row_to_pair, "top_k": pairs.shape[1] if gathered else 0}
        # A kernel that quantises lets this one start before it waits for the sort.
        known = not gathered and not self.quantizes
        return launch_grouped_mm(routed.tokens, up, routed.offsets, first, known=known, **gather, **rows)

    def _gemm_2(
        self,
        plan: Plan,
        h: Tensor,
        h_scale: Tensor,
        offsets: Tensor,
        pair_to_row: Tensor,
        told: Tensor | None = None,
    ) -> Tensor:
        """The experts' results, from the rows of GEMM 1."""
        rows: dict[str, Any] = {"num_rows": pair_to_row.numel(), "pdl": pdl_launches(h.device), "known": True}
        rows["told"] = told
        tile = self._tiles(plan)[1]
        return launch_grouped_mm(h, self._second(h_scale, self.down.order(tile)), offsets, tile, **rows)[0]

    def _batched(self, plan: Plan, hidden_states: Operand, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        pdl, (before, after) = pdl_launches(hidden_states.data.device), self._weights(topk_weights)
        first, second = self._tiles(plan, given=bool(hidden_states.scales))
        order, out_order, static = self.up.order(first), self.down.order(second), self.up.operand.static
        rows_form = self._rows_form(plan)
        form = None if hidden_states.scales or static is not None else rows_form
        routing = (topk_ids, self.up.num_experts, self.capacity, self.expert_map, before)
        told = self._told((first, second), topk_ids)
        batch, batch_scale, counts, slots = batched_io.dispatch(
            hidden_states.data, *routing, form=form, order=order, pdl=pdl, load=self.load, cleared=told.both
        )
        if hidden_states.scales:
            scales = hidden_states.scales[0]
            batch_scale = scales.new_empty((*batch.shape[:2], scales.shape[1]))
            permute.scatter_rows(scales, slots, None, batch_scale, None, pdl)
        elif static is not None:
            batch, batch_scale = act_quant.quantize_static(batch, counts, static, rows_form, pdl=pdl)
        bound = {"most_rows": topk_ids.numel(), "pdl": pdl}
        options = {"rows_order": order, "out_order": out_order, "widens_output": self.down.gathers_few(second)}
        up = replace(self._first(), rows_scale=batch_scale, **options)
        h, h_scale = launch_batched_mm(batch, up, counts, first, told=told.first, **bound)
        down = self._second(h_scale, out_order)
        y, _ = launch_batched_mm(h, down, counts, second, known=True, told=told.second, **bound)
        return combine.combine(y.flatten(0, 1), slots, after, pdl=pdl)

    @property
    def load(self) -> Row:
        """The counters of this layer: of every sequence, the kernel that first knows all pairs adds them."""
        return Row(self.down.weight)

    @property
    def form(self) -> ActivationFormat | None:
        """What rows are quantised to for the products; None where they are not."""
        return self.up.form

    @property
    def quantizes(self) -> bool:
        """Whether rows are quantised for the products."""
        return self.form is not None

    @property
    def has_static_rows(self) -> bool:
        """Whether activations of either product have scales that were calibrated before."""
        return self.up.operand.static is not None or self.down.operand.static is not None

    @property
    def quantizes_rows(self) -> bool:
        """Whether a row has one scale, so that no tile can quantise its part of it."""
        return self.form is not None and self.form.group == WHOLE

    def _weights(self, topk_weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Routing weights of the rows before the experts, and of the results after them."""
        return (topk_weights, None) if self.weight_on_input else (None, topk_weights)

    def _first(self) -> ExpertMM:
        """GEMM 1; quantising schemes: its rows are quantised for GEMM 2."""
        return replace(self.up, quantize_output=self.quantizes, out_static=self.down.operand.static)

    def _second(self, h_scale: Tensor, order: tuple[int, int] | None) -> ExpertMM:
        """GEMM 2 on the rows that GEMM 1 left."""
        scale = h_scale if self.quantizes else None
        return self.down if scale is order is None else replace(self.down, rows_scale=scale, rows_order=order)


def _is_one_of_several() -> bool:
    """Whether this process belongs to a group of several."""
    group = torch.distributed
    return bool(group.is_available() and group.is_initialized() and group.get_world_size() > 1)


@cache
def one_token_kernels() -> ModuleType:
    """`one_token`, which is in Gluon: imported where that is."""
    return importlib.import_module("moe_ops.kernels.triton.one_token")


def _unit_stride(tokens: Operand) -> Operand:
    return Operand(unit_stride(tokens.data), tokens.scheme, tuple(scale.contiguous() for scale in tokens.scales))


def fit(tile: MMConfig, mm: ExpertMM, *, as_they_are: bool = False) -> MMConfig:
    """An epilogue that quantises needs one scale group of output columns, and beside blocks that run on, where every
    column has its scale, registers for 64 rows, but in `promoted_mm`; an e4m3 product of interleaved halves no more
    than 128 columns beside as many rows, as it is one product, and promoted. A sum that is scaled group by group needs
    no more columns at a time than a group has, and of decoded weights, which wait beside it, registers for 64 rows, of
    tokens, or of weights that are decoded to e4m3: but in `decoded_mm`. So do rows of fp16, both of whose parts wait.
    Rows that are copied into a product's order of columns, not taken as they are, are whole steps. A sum whose scales
    are folded into codes needs as many threads as weight rows, and no more. A product of scaled blocks is of 128 weight
    rows, neither more nor fewer. Few rows that a kernel in Gluon cannot take are gathered, and of many each tile
    decodes its weights where no kernel does for all.
    """
    mm = mm.beside(tile)
    if mm.shares(tile):
        if not as_they_are and mm.specialises(tile):
            return tile
        tile = tile._replace(block_n=GLUON_ROWS)
    specialised = (not as_they_are or mm.gathers_few(tile)) and mm.specialises(tile)
    if mm.takes_few(tile) and not specialised:
        tile = mm.beside_few(tile)
    if mm.blocks is not None:
        return tile._replace(block_n=BLOCKS_N)
    if mm.quantizes_in_tile:
        tile = tile._replace(block_n=(2 if mm.glu else 1) * mm.out_group)
        if mm.decoding["groups"].runs_on and not mm.promotable(tile):
            tile = tile._replace(block_m=min(tile.block_m, 64))
    if mm.is_packed and not mm.is_decoded:
        tile = tile._replace(block_k=PACKED_COLUMNS)
        if specialised:
            return tile
        if tile.block_m > 64:
            narrow = {"block_m": 64} if mm.folds_scales else {"block_n": 64}
            tile = tile._replace(**narrow, num_warps=4)
    if mm.folds_scales:
        # Of fewer rows than threads the compiler would move the decoded codes through shared memory.
        return tile._replace(num_warps=tile.block_n // 32)
    if mm.quantizes_in_tile:
        return tile
    if mm.is_scaled and mm.glu != CONCAT.value and tile.rows >= 128:
        return tile._replace(block_n=min(tile.block_n, 128))
    if mm.packed is None:
        return tile
    if not specialised:
        tile = tile._replace(block_m=min(tile.block_m, GLUON_ROWS))
    if mm.in_two and tile.block_m > 64:
        tile = tile._replace(block_m=64, num_warps=4, num_stages=4)
    if not mm.exact_scales and (columns := mm.group_columns):
        wide = mm.takes_few(tile) and columns % PACKED_COLUMNS == 0
        block_k = tile.block_k if wide else min(tile.block_k, columns & -columns)
        if block_k < SMALLEST_GROUP:
            raise fail(mm.operand.scheme.name, "scales", f"of groups that {SMALLEST_GROUP} divides on a GPU", columns)
        if not mm.is_decoded:  # several groups are a step, each with a sum of its own: of four, for 64 rows
            return tile._replace(block_m=min(tile.block_m, 64 if 4 * block_k <= tile.block_k else 128))
        tile = tile._replace(block_k=block_k)
        if tile.block_m > 64 and not specialised:
            tile = tile._replace(block_m=64, num_warps=4, num_stages=4)
        tile = tile._replace(block_m=min(tile.block_m, 128))
    if mm.takes_few(tile):
        return tile
    if mm.order(tile) is not None:
        steps = min(tile.block_k, mm.in_features & -mm.in_features)
        ordered = steps >= SMALLEST_GROUP and not as_they_are
        tile = tile._replace(block_k=steps) if ordered else tile._replace(a_tma=False)
    # Rows that threads bring into order: registers have room for 64.
    return tile._replace(block_m=min(tile.block_m, 64)) if mm.is_decoded and not tile.a_tma else tile
