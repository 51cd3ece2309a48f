"""Host side of an expert GEMM: what a launch needs besides the rows, and the tensor-map descriptors for it."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from meta.arch import HOPPER, TYPICAL, device_arch
from meta.checks import fail
from meta.operands import Operand
from meta.schemes import WHOLE, ActivationFormat
from moe_ops.kernels.triton.codes import CODE_NUMBERS, codes_of_word
from moe_ops.kernels.triton.config import MMConfig, are_promoted, are_shared, is_of_plain_mm
from moe_ops.kernels.triton.packed_fp8_tile import step_columns
from moe_ops.kernels.triton.scales import HALF_GROUP
from moe_ops.kernels.triton.tile_loads import (
    CONCAT,
    INTERLEAVED,
    NOT_GATED,
    POINTERS,
    RAGGED,
    TMA_KN,
    TMA_NK,
)
from moe_ops.kernels.triton.util import INTERPRETED, cdiv, next_power_of_2
from moe_ops.kernels.triton.weight_scales import WeightScale, as_stored, one_form

# Halves in tensors of their own are a stack whose halves are far apart.
GLU_CODES = {
    "none": NOT_GATED.value,
    "concat": CONCAT.value,
    "separate": CONCAT.value,
    "interleaved": INTERLEAVED.value,
}
LARGEST_STRIDE = 2**40  # bytes, of a tensor map

# How programs get from tile to tile.
ONE_TILE = tl.constexpr(0)
TILE_BY_TILE = tl.constexpr(1)
STREAM = tl.constexpr(2)

FEWEST_COLUMNS = 16  # of a tile that are stored at once
PROGRAM_BYTES = 2048  # shared memory of a program besides its tiles: the driver's 1 KiB, barriers, reductions


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch that follow from the tensors and the config.

    block: BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, a power of two >= E, TALL_M and the stages of its loop. Descriptors are
    Triton's, or Gluon's, which name the layout in shared memory.
    """

    a_desc: Any
    w_desc: Any
    out_desc: Any
    strides: tuple[Any, Any, Any, int, Any, Any]
    block: tuple[int, ...]
    moves: tuple[bool, int, int, bool]
    walk: int
    n_tiles: int


def walk(config: MMConfig, a_tma: bool, quantized: bool, decoded: bool) -> int:
    """How programs walk; us of one expert GEMM on an H200, Qwen3-30B-A3B's where no other is named.

    ONE_TILE each, as many programs as there may be tiles, where tiles are small and the weights' bytes are the time:
    the hardware then balances better than equal shares do (GEMM 1, T = 64: 177.7 against 180.4), and where a stream's
    store buffer would cost a resident program (fp8_block128, GEMM 2, T = 16384: 584 against 627).
    STREAM where rows come by descriptor (GEMM 2, T = 4096: 220 against 260; T = 16384: 714 against 825).
    TILE_BY_TILE where threads gather the rows, whose copies cost more in a loop that runs on through the tiles (GEMM 1,
    T = 16384: 1426, as a stream 1490, one by one 1502), and where every product waits to be scaled (fp8_block128,
    GEMM 1, T = 4096: 328, 346, 393; Mixtral's GEMM 2: 1169, 1328, 1203), and beside decoded weights, where a stream's
    store buffer would cost one of two resident programs. Two heights are ONE_TILE: no loop runs on through tiles that
    differ, and of 128 and 64 rows TILE_BY_TILE is slower (GEMM 1, T = 4096: 428 against 483).
    """
    if config.tall_m or config.block_m < 64 or (config.block_m < 128 and (quantized or not a_tma)):
        return ONE_TILE.value
    return STREAM.value if a_tma and not (quantized or decoded) else TILE_BY_TILE.value


def descriptor_strides(tensor: torch.Tensor, inner: int) -> bool:
    """Whether a tensor map can address `tensor`: 16-byte aligned base and outer strides, unit inner stride."""
    size = tensor.element_size()
    outer = [s for d, s in enumerate(tensor.stride()) if d != inner]
    return tensor.stride(inner) == 1 and tensor.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in outer)


def ragged_rows(x: torch.Tensor, block_m: int, columns: int) -> TensorDescriptor:
    """Tensor map of `x` [R, N] for stores and loads of [block_m, columns] that end where the expert at hand does; what
    is loaded from there on is 0.

    They are at (2**30, end, 2**30 - left, column). The strides of these add up to row end - left: the outermost is
    2**34 elements less a row, and 2**30 * 2**34 elements are a multiple of the 2**64 bytes that addresses wrap around
    at. The third dimension is 2**30 long, so the row `left` below the first is out of bounds.
    """
    stride = x.stride(0)
    shape = [RAGGED.value + 1, 2**31 - 1, RAGGED.value, x.shape[1]]
    return TensorDescriptor(x, shape, [2**34 - stride, stride, stride, 1], [1, 1, block_m, columns])


#: Columns of a step of codes that are decoded for e4m3 rows; the fewest that a group of any packed product may have
#: where scales are not exact: a step is within one.
PACKED_COLUMNS, SMALLEST_GROUP = 128, 32
BLOCKS_N = 128  # weight rows of a product of scaled blocks
GLUON_ROWS = 128  # weight rows of a tile of `decoded_mm` and of `decoded_few_mm`
FEW_ROWS = 32  # of tokens, at most, in a tile of `decoded_few_mm`, or of quantised ones that are multiplied in bf16
FEW_PROGRAMS = 3  # of it on a multiprocessor
FEW_REGISTERS = 80  # of its threads when they start; those that multiply have 136 soon
FEW_COLUMNS = 64  # of an output that it writes at once
MOST_STEPS = 8  # of it that are on their way
IN_LINE = 128  # bytes of a row of shared memory that tensor cores read
PROMOTED_ROWS = 128  # of tokens, in a tile of `promoted_mm`
PANEL_BYTES = 128 * 2**20  # of decoded weights of eight bits, at most


def hopper_with_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon for Hopper's tensor cores run on the device."""
    return not INTERPRETED.value and device_arch(device) == f"sm{HOPPER}" and _has_gluon()


@cache
def _has_gluon() -> bool:
    """Other versions of Triton may lack what kernels call of Gluon, or call it otherwise."""
    try:
        called = importlib.import_module("moe_ops.kernels.triton.hopper").CALLED
    except (ImportError, AttributeError):
        return False
    return all(set(names) <= set(inspect.signature(of).parameters) for of, names in called.items())


def for_gluon(made: TensorDescriptor, word: torch.dtype = torch.int16) -> Any:
    """The same descriptor with a layout in shared memory that tensor cores read; of bytes of codes a word at once."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Descriptor

    if made.base.dtype == torch.uint8:
        strides = [stride // word.itemsize for stride in made.strides[:-1]] + [1]
        box = [*made.block_shape[:-1], made.block_shape[-1] // word.itemsize]
        shape = [*made.shape[:-1], made.shape[-1] // word.itemsize]
        made = TensorDescriptor(made.base.view(word), shape, strides, box)
    box, size = made.block_shape, made.base.element_size()
    layout = NVMMASharedLayout(max(s for s in (0, 32, 64, 128) if s <= box[-1] * size), 8 * size, len(box))
    return Descriptor(made.base, list(made.shape), list(made.strides), list(box), layout)


def _alike(one: Operand, other: Operand) -> bool:
    """Whether the tensors of both have the same dtypes, and the same strides wherever there is more than one entry."""

    def laid_out(operand: Operand) -> list[Any]:
        tensors = (operand.data, *operand.scales)
        return [(t.dtype, [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]) for t in tensors]

    return laid_out(one) == laid_out(other)


def as_bf16(form: ActivationFormat) -> ActivationFormat:
    """The same numbers, of e4m3, stored as bf16."""
    return replace(form, dtype=torch.bfloat16)


@dataclass(frozen=True)
class ExpertMM:
    """One projection of every expert.

    Args:
        operand: [E, N, K] (N = 2 * out features when gated), any strides, with its scales.
        up: the up half [E, out features, K] with its scales, when `operand` is the gate's alone ("separate").
        glu_layout: a name of `meta.dims.GLU_LAYOUTS`.
        activation: name, or None for a plain product.
        bias: [E, 2 * out features], or [E, out features] without a gate; rows_scale: [rows, groups of K].
        quantize_output: rows in the product's `form` instead of `out_dtype`.
        out_static: f32 [E, 1, 1], the scales that quantised rows get, or None for scales of their own.
        blocks: what the rows are that tensor cores multiply with the weights as they are stored (`meta.blocks`), None
            for a product that does not.
        in_words: whether weights are addressed as words of 32 bits, None for what products in tiles take.
        widened: whether quantised rows are multiplied as bf16, with weights decoded to that, see `beside`.
        widens_output: whether rows that it leaves quantised are stored as bf16, as `decoded_few_mm` gathers them.
        rows_order, out_order: the order of columns that its rows have, or get in registers, and its output gets
            (`order`); None for theirs.
    """

    operand: Operand
    out_dtype: torch.dtype
    up: Operand | None = None
    glu_layout: str = "none"
    activation: str | None = None
    alpha: float = 0.0
    limit: float = 0.0
    bias: torch.Tensor | None = None
    rows_scale: torch.Tensor | None = None
    quantize_output: bool = False
    out_static: torch.Tensor | None = None
    blocks: ActivationFormat | None = None
    in_words: bool | None = None
    widened: bool = False
    widens_output: bool = False
    rows_order: tuple[int, int] | None = None
    out_order: tuple[int, int] | None = None
    glu: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "glu", GLU_CODES[self.glu_layout])
        if self.up is not None and not _alike(self.operand, self.up):
            # One set of strides addresses both halves.
            for name in ("operand", "up"):
                half = getattr(self, name)
                specs = half.scheme.scales if half.scales else ()
                scales = tuple(one_form(spec, scale) for spec, scale in zip(specs, half.scales, strict=False))
                object.__setattr__(self, name, Operand(half.data.contiguous(), half.scheme, scales))

    @cached_property
    def weight(self) -> torch.Tensor:
        """As kernels address it: codes as words of four or eight, where it is words that are decoded, and its rows can
        be cut into them; in bytes for tensor cores, which take it as it is stored.
        """
        return self._addressed(self.operand.data)

    def _addressed(self, data: torch.Tensor) -> torch.Tensor:
        if self.in_words is None and not self.is_decoded:
            return data
        return data.view(torch.int32 if self.in_words is not False and self.has_words else torch.uint8)

    @property
    def has_words(self) -> bool:
        """Whether rows of codes can be cut into words of 32 bits."""
        data = self.operand.data
        apart = 0 if self.up is None else self.up.data.data_ptr() - data.data_ptr()
        outer = (*data.stride()[:-1], data.storage_offset(), data.shape[-1], data.data_ptr(), apart)
        return data.stride(-1) == 1 and all(n % 4 == 0 for n in outer)

    def _scale(self, at: int) -> WeightScale:
        """Number `at` of the scheme's list."""
        scale, group = as_stored(self.operand.scales[at]), self.operand.groups[at]
        if self.glu != CONCAT.value:
            return WeightScale(scale, group)
        if self.up is not None:
            other = as_stored(self.up.scales[at])
            apart = (other.data_ptr() - scale.data_ptr()) // scale.element_size()
            return WeightScale(scale, group, False, apart)
        if scale.dim() == 4:
            return WeightScale(scale, group, False, scale.stride(1))
        rows = group[0]
        runs_on = rows > 0 and self.out_features % rows != 0
        return WeightScale(scale, group, runs_on, self.out_features // rows * scale.stride(1) if rows else 0)

    @cached_property
    def decoding(self) -> dict[str, WeightScale]:
        """ "groups": the scale that changes along K, or of a scheme that quantises rows the first one; "zeros": what is
        subtracted from codes; "rows": the scale of whole rows.
        """
        found = {"groups": WeightScale(), "zeros": WeightScale(), "rows": WeightScale()}
        if self.operand.scales:
            first = self.operand.scheme.rows is not None
            for at, spec in enumerate(self.operand.scheme.scales[: len(self.operand.scales)]):
                scale = self._scale(at)
                role = "zeros" if spec.shift else "groups" if scale.group[1] or (first and at == 0) else "rows"
                found[role] = scale
        return found

    @property
    def decoded_by(self) -> tuple[Any, ...]:
        """What kernels decode weights by: the tensors of `decoding`, and of each the offset of the up half."""
        scales = [self.decoding[role] for role in ("groups", "zeros", "rows")]
        return *(scale.tensor for scale in scales), *(scale.up_offset for scale in scales)

    @property
    def form(self) -> ActivationFormat | None:
        """What its rows are, and its output where that is quantised; None for the hidden dtype."""
        if self.blocks is not None:
            return self.blocks
        return None if self.operand.scheme is None else self.operand.scheme.rows

    @property
    def is_packed(self) -> bool:
        """Whether weights are decoded, to bf16 or to e4m3, as the rows are: `packed_tile`, `packed_fp8_tile`."""
        return self._is_quantised and (self.operand.scheme.rows is None or self.operand.scheme.pack > 1)

    @property
    def _is_quantised(self) -> bool:
        """Whether a product itself applies scales, not the tensor cores."""
        return bool(self.operand.scales) and self.blocks is None

    @property
    def is_decoded(self) -> bool:
        """Whether weights are decoded to bf16: `packed_tile`."""
        return self.is_packed and (self.widened or self.operand.scheme.rows is None)

    def beside(self, config: MMConfig) -> ExpertMM:
        """As it is multiplied in such tiles: of few quantised rows with codes of four bits in bf16, to which they are
        decoded by fewer instructions than to e4m3, or to what scales are folded into.

        us of a layer on an H200 in e4m3 and so, T = 16, 64, 256 of Qwen3-30B-A3B's dimensions (32 rows at T = 256) and
        of gpt-oss-120b's (16): mxfp4_a8 141, 205, 236 and 109, 156, 230; 419, 872, 1036 and 335, 694, 822; w4a8_fp8 92,
        130, 151 and 80, 113, 169; 253, 512, 618 and 208, 427, 498.
        """
        few = config.block_m <= (FEW_ROWS if self.folds_scales and not config.a_tma else FEW_ROWS // 2)
        whole_steps = self.folds_scales or self.group_columns % PACKED_COLUMNS == 0
        if not (self.is_packed and self.waits_for_scales and few and whole_steps and self.has_words):
            return self
        order = None
        if config.a_tma:
            columns = min(FEW_COLUMNS, self.in_features & -self.in_features)
            order = (columns, codes_of_word(CODE_NUMBERS[self.operand.scheme.code.name]))
        return replace(self, widened=True, rows_order=order)

    @property
    def in_two(self) -> bool:
        """Whether its rows are fp16 beside weights decoded to bf16: then each number is multiplied as a sum of two."""
        return self.is_decoded and self.out_dtype == torch.float16 and not self.waits_for_scales

    @property
    def in_turns(self) -> bool:
        """Whether scales that no number of bf16 holds have turns of their own: `packed_tile`."""
        return self.widened and self.exact_scales

    @property
    def is_scaled(self) -> bool:
        """Whether every group's product waits for its scales: `mm_tile`."""
        return self._is_quantised and not self.is_packed

    @cached_property
    def blocks_of(self) -> tuple[int, int, int, bool] | None:
        """What `scaled_tile` needs: codes of the weights and of the rows, columns of a block, and whether the scales of
        both halves are aligned alike.
        """
        if self.blocks is None:
            return None
        codes = {1: CODE_NUMBERS["e4m3"], 2: CODE_NUMBERS["e2m1"]}
        weight, rows = CODE_NUMBERS[self.operand.scheme.code.name], codes[self.blocks.pack]
        return weight, rows, self.group_columns, self.up_scale_offset % 16 == 0

    @property
    def waits_for_scales(self) -> bool:
        """Whether rows are quantised, so that sums are scaled before they are added up."""
        return self._is_quantised and self.operand.scheme.rows is not None

    @cached_property
    def packed(self) -> tuple[Any, ...] | None:
        """What `packed_tile` needs: code, codes of a stored element, whether scales are multiplied in bf16; of the
        scale of groups rows and columns that share one, and whether they run on; of that of rows how many share one,
        and the same; columns of a quantised row that share a scale, -1 where rows are bf16; how many of a row's
        scales may be loaded at once; columns of the order that rows have, 0 for their own; `is_decoded`.
        """
        if not self.is_packed:
            return None
        inner, zeros, outer = (self.decoding[role] for role in ("groups", "zeros", "rows"))
        if inner.group[1] and zeros.group[1] not in (WHOLE, inner.group[1]):
            rule = f"of the scale's groups of {inner.group[1]} columns on a GPU, or one for a row"
            raise fail(self.operand.scheme.name, "zero_point", rule, f"groups of {zeros.group[1]}")
        code = self.operand.scheme.code
        return (
            CODE_NUMBERS[code.name],
            self.per_element,
            self.exact_scales,
            *(inner if inner.tensor is not None else zeros).group,
            inner.runs_on,
            outer.group[0],
            outer.runs_on,
            self.out_group if self.waits_for_scales else -1,
            inner.at_once,
            self.rows_order[0] if self.rows_order else 0,
            self.is_decoded,
        )

    def order(self, config: MMConfig) -> tuple[int, int] | None:
        """The order of columns that its rows should have for a tile to which they come by descriptor. Of sums that wait
        for their scales, two groups of warps write a tile: fewer columns, so that each has whole ones of its own. Of
        few rows as many as divide them, and those that a gated product left no more than it writes at once.
        """
        if not (self.is_decoded and config.a_tma) or self.shares(config):
            return None
        if self.takes_few(config):
            most = 2 * FEW_COLUMNS if self.glu else FEW_COLUMNS
            columns = min(config.block_k, most, self.in_features & -self.in_features)
        else:
            columns = min(config.block_k, SMALLEST_GROUP) if self.waits_decoded else config.block_k
        return columns, codes_of_word(CODE_NUMBERS[self.operand.scheme.code.name])

    @property
    def waits_decoded(self) -> bool:
        """Whether sums of products with decoded weights wait for the scales of groups of columns."""
        return self.is_decoded and not self.exact_scales and self.decoding["groups"].group[1] > 0

    def shares(self, config: MMConfig) -> bool:
        """Whether a tile of decoded weights is one of `decoded_plain_mm`, which decodes them for all tiles of rows."""
        return self.is_decoded and not self.widened and config.a_tma and config.block_n > GLUON_ROWS

    def takes_few(self, config: MMConfig) -> bool:
        """Whether a tile of rows that come by descriptor is one of `decoded_few_mm`."""
        return self.is_decoded and config.a_tma and config.block_m <= FEW_ROWS

    def gathers_few(self, config: MMConfig) -> bool:
        """Whether `decoded_few_mm` gathers its rows, quantised ones that are stored as bf16."""
        mm = self.beside(config)
        return mm.widened and mm.takes_few(config)

    def beside_few(self, config: MMConfig) -> MMConfig:
        """In the place of a tile of `decoded_few_mm` one of `packed_tile`, whose rows threads gather."""
        block_m = max(16, config.block_m)
        block_k = 64 if block_m == 32 and self.operand.scheme.pack == 1 else PACKED_COLUMNS
        return config._replace(block_m=block_m, block_k=block_k, group_m=1, num_warps=4, num_stages=4, a_tma=False)

    def specialises(self, config: MMConfig) -> bool:
        """Whether `decoded_mm` takes the product, of rows by descriptor, of few `decoded_few_mm`, or of e4m3 ones
        `decoded_fp8_mm`, `folded_mm`: where Gluon's Hopper is.
        """
        if not (self.is_packed and config.a_tma and hopper_with_gluon(self.weight.device)):
            return False
        if self.waits_for_scales and not self.widened:
            taken = config.block_m >= 128 and (self.folds_scales or self.group_columns % 64 == 0)
            size = 1 if self.quantizes_in_tile else 4 if self.quantize_output else self.out_dtype.itemsize
            taken = taken and not (self.folds_scales and size > 2)  # there is no room for more
        else:
            taken = self.weight.dtype == torch.int32 and not self.in_two
            taken = taken and (config.block_n == GLUON_ROWS or self.shares(config))
            if self.shares(config):
                taken = taken and self._decodes_once
            elif self.takes_few(config):
                taken = taken and self.in_features % SMALLEST_GROUP == 0
            else:
                taken = taken and config.block_k <= 128
            size = self.out_dtype.itemsize
        return taken and self.out_features * size % 16 == 0 and self._weight_load(config) == TMA_NK.value

    @property
    def _decodes_once(self) -> bool:
        """Whether `decoded_plain_mm` decodes its weights: no sum waits for scales, no zeros are subtracted, and 64
        columns of a row are of four groups at most.
        """
        if self.waits_decoded or self.decoding["zeros"].tensor is not None:
            return False
        return not self.exact_scales or self.decoding["groups"].group[1] >= 16

    @property
    def exact_scales(self) -> bool:
        """Whether a code times its group's scale is a bf16 number: the scale a power of two, or e4m3 beside e2m1, of
        groups of whole words.
        """
        scale = self.decoding["groups"]
        if scale.tensor is None or scale.group[1] not in (8, 16, 32, 64) or not self.is_decoded:
            return False
        dtype = scale.tensor.dtype
        return dtype == torch.uint8 or (dtype == torch.float8_e4m3fn and self.operand.scheme.code.name == "e2m1")

    @property
    def group_columns(self) -> int:
        """Columns of the groups of scales or zero points; 0 where a row is one."""
        return max(self.decoding[role].group[1] for role in ("groups", "zeros"))

    @property
    def folds_scales(self) -> bool:
        """Whether scales of groups are multiplied into codes of eight bits."""
        return self.is_packed and not self.is_decoded and self.operand.scheme.code.name == "e2m1"

    def row_columns(self, config: MMConfig) -> int:
        """Elements of the rows, as they are stored, that are loaded at a time."""
        if self.blocks is not None:
            return config.block_k // self.blocks.pack
        parts = self.is_packed and not self.is_decoded
        return step_columns(self.packed[0], self.group_columns, config.block_k) if parts else config.block_k

    @property
    def weight_scale(self) -> torch.Tensor | None:
        return self.decoding["groups"].tensor

    @cached_property
    def up_offset(self) -> int:
        """Elements from the gate half of a gated weight in two halves to its up half."""
        if self.up is not None:
            return (self.up.data.data_ptr() - self.weight.data_ptr()) // self.weight.element_size()
        return self.out_features * self.weight.stride(1) if self.glu == CONCAT.value else 0

    @property
    def lower_half(self) -> torch.Tensor:
        """The weight from its half on that is the lower one in memory: no stride of a tensor map is negative."""
        return self._addressed(self.up.data) if self.up_offset < 0 else self.weight

    @property
    def up_scale_offset(self) -> int:
        """The same of its scales, where their groups do not run on from one half into the other."""
        return self.decoding["groups"].up_offset

    @cached_property
    def scheme(self) -> tuple[Any, ...] | None:
        """What kernels need of the scheme: rows and columns of a weight that share a scale, whether these groups run on
        from the gate into the up half, whether the output is quantised by the product itself, `packed`, `blocks_of` and
        the output's order.
        """
        if not self.operand.scales:
            return None
        scale = self.decoding["groups"]
        return *scale.group, scale.runs_on, self.quantizes_in_tile, self.packed, self.blocks_of, self.out_order

    @property
    def out_form(self) -> ActivationFormat:
        """What its output is quantised to."""
        return as_bf16(self.form) if self.widens_output else self.form

    @property
    def out_group(self) -> int:
        """Columns of a quantised output that share a scale."""
        return self.form.group

    @property
    def quantizes_in_tile(self) -> bool:
        """Whether the epilogue quantises: a tile has whole scale groups, but never a whole row. Not of few rows, beside
        whose codes there is no room for as many columns.
        """
        return self.quantize_output and self.out_group != WHOLE and not self.widened

    @property
    def quantizes_rows(self) -> bool:
        """Whether a kernel behind the product quantises its rows."""
        return self.quantize_output and not self.quantizes_in_tile

    @property
    def strides(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
        """(weight, weight scale [E, N groups, K groups], bias) strides, None for what is absent."""
        return (
            self.weight.stride(),
            self.decoding["groups"].strides,
            None if self.bias is None else self.bias.stride(),
        )

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[2] * self.per_element

    @property
    def per_element(self) -> int:
        """Columns of an element of `weight`."""
        pack = 1 if self.operand.scheme is None else self.operand.scheme.pack
        return pack * self.weight.element_size() // self.operand.data.element_size()

    @property
    def out_features(self) -> int:
        return self.weight.shape[1] // (2 if self.glu and self.up is None else 1)

    def allocate(
        self, leading: tuple[int, ...], like: torch.Tensor, *, in_halves: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised output and scale for rows of shape `leading`, see `_left`."""
        dtype, scales, scale_dtype = self._left(in_halves)
        scale_shape = (*leading, scales) if scales else (0,)
        out = like.new_empty((*leading, self.out_features), dtype=dtype)
        return out, like.new_empty(scale_shape, dtype=scale_dtype)

    def _left(self, in_halves: bool) -> tuple[torch.dtype, int, torch.dtype]:
        """dtype of the output, how many scales a row of it has, and their dtype. For a kernel that quantises whole rows
        fp32, the numbers of an epilogue that does, or IN HALVES fp16 of units of their own, with the largest magnitudes
        of HALF_GROUP columns. Of bf16 the layer's error would be 1.00 to 1.02 times as large, but a single token's up
        to 1.17 times.
        """
        if self.quantizes_in_tile:
            return self.form.dtype, cdiv(self.out_features, self.out_group), self.form.scale_dtype
        if in_halves:
            return torch.float16, cdiv(self.out_features, HALF_GROUP.value), torch.float32
        return torch.float32 if self.quantize_output else self.out_dtype, 0, torch.float32

    def bytes_left(self, config: MMConfig, rows: int, sorted_rows: bool) -> int:
        """Of one of so many rows, for a kernel that quantises it then; 0 where none does. `sorted_rows`: the product
        does not gather them.
        """
        if not self.quantizes_rows:
            return 0
        dtype, scales, scale_dtype = self._left(sorted_rows and self.leaves_halves(config, rows))
        return self.out_features * dtype.itemsize + scales * scale_dtype.itemsize

    def _weight_load(self, config: MMConfig) -> int:
        """Descriptor loads along whichever of K and N is contiguous, pointers for any other strides."""
        apart = abs(self.up_offset) * self.weight.element_size()
        if not config.w_tma or apart % 16 or apart >= LARGEST_STRIDE:
            return POINTERS.value
        if descriptor_strides(self.weight, inner=2):
            return TMA_NK.value if self._fills_boxes(apart) else POINTERS.value
        return TMA_KN.value if descriptor_strides(self.weight, inner=1) else POINTERS.value

    def _fills_boxes(self, apart: int) -> bool:
        """Whether a tensor map may spread codes of four bits over bytes, as a product with rows of eight takes them:
        128 columns at a time, addresses and strides multiples of 32 bytes (CUDA driver API, 16U4_ALIGN16B).
        """
        if self.blocks is None or self.per_element == self.blocks.pack:
            return True
        places = (self.weight.data_ptr(), *self.weight.stride()[:2], apart)
        return self.in_features % 128 == 0 and all(place % 32 == 0 for place in places)

    def _weight_descriptor(self, load: int, config: MMConfig) -> TensorDescriptor | None:
        if load == POINTERS.value:
            return None
        E, rows, K = self.weight.shape
        stride_e, stride_n, stride_k = self.weight.stride()
        I = self.out_features
        block_n, block_k = config.block_n, config.block_k // self.per_element
        halves = 1 if self.is_scaled else 2  # quantised: gate and up are two products
        base = self.lower_half
        apart = abs(self.up_offset)
        if load == TMA_NK.value:
            if self.glu == CONCAT.value:
                shape, strides = [E, 2, I, K], [stride_e, apart, stride_n, 1]
                return TensorDescriptor(base, shape, strides, [1, halves, block_n // 2, block_k])
            return TensorDescriptor(self.weight, [E, rows, K], [stride_e, stride_n, 1], [1, block_n, block_k])
        if self.glu == CONCAT.value:
            shape, strides = [E, K, 2, I], [stride_e, stride_k, apart, 1]
            return TensorDescriptor(base, shape, strides, [1, block_k, halves, block_n // 2])
        return TensorDescriptor(self.weight, [E, K, rows], [stride_e, stride_k, 1], [1, block_k, block_n])

    def store_columns(self, out: torch.Tensor, config: MMConfig) -> int:
        """Columns of a tile that are stored at once, by way of shared memory beside the steps'.

        All of them, or half where memory for all would leave room for a program less, and fewer where half has no room:
        of fp32 beside operands of 16 bits.
        """
        columns, column = self.columns(config), config.rows * out.element_size()
        tile = (config.rows + config.block_n) * config.block_k * self.weight.element_size()
        stages = tile * (config.tall_stages or config.num_stages)
        room = TYPICAL.shared_kib * 1024
        left = room // max(1, room // (stages + PROGRAM_BYTES)) - stages - PROGRAM_BYTES
        if columns * column <= left:
            return columns
        columns //= 2
        while columns > FEWEST_COLUMNS and columns * column > room - stages - PROGRAM_BYTES:
            columns //= 2
        return columns

    def prepare_decoded(self, a: torch.Tensor, out: torch.Tensor, config: MMConfig) -> Launch:
        """The same for `decoded_mm` and `decoded_few_mm`; `block` ends with the steps that there is room for and the
        groups of warps.
        """
        few, at_once, groups = self.takes_few(config), self.columns_at_once(config), self.groups(config)
        part = config._replace(block_n=config.block_n // groups)
        weights = config.block_n * self.weight.element_size() // self.per_element
        gathers = few and self.widened
        step = config.block_k * ((0 if gathers else config.rows * a.element_size()) + weights)
        # A multiprocessor has 1 KiB more than one program may use.
        room = (TYPICAL.shared_kib + 1) * 1024 // FEW_PROGRAMS if few else TYPICAL.shared_kib * 1024
        room -= PROGRAM_BYTES + groups * config.rows * at_once * out.element_size()
        block = (*config[:4], next_power_of_2(self.num_experts), 0, min(MOST_STEPS, room // step), groups)
        # Boxes of lines behind one another are one of all of their rows.
        in_lines = not few and config.block_k * a.element_size() <= IN_LINE
        box = [min(config.rows, GLUON_ROWS // 2) if in_lines else config.rows, config.block_k]
        return Launch(
            a_desc=None if gathers else for_gluon(TensorDescriptor(a, list(a.shape), list(a.stride()), box)),
            w_desc=for_gluon(self._weight_descriptor(TMA_NK.value, part)),
            out_desc=for_gluon(ragged_rows(out, config.rows, at_once)),
            strides=(*self.strides, a.stride(0), self.decoding["zeros"].strides, self.decoding["rows"].strides),
            block=block,
            moves=(True, TMA_NK.value, at_once, self.up_offset < 0),
            walk=TILE_BY_TILE.value,
            n_tiles=cdiv(self.out_features, self.columns(config)),
        )

    def is_plain(self, config: MMConfig) -> bool:
        """Whether `plain_mm` takes the product, of rows by descriptor or gathered: where Gluon's Hopper is."""
        dtype = self.operand.data.dtype
        if not is_of_plain_mm(config) or self.operand.scales or dtype.itemsize != 2 or dtype != self.out_dtype:
            return False
        load = self._weight_load(config)
        taken = load == TMA_NK.value or (load == TMA_KN.value and self.glu != CONCAT.value)
        return taken and self.out_features % 8 == 0 and hopper_with_gluon(self.weight.device)

    def prepare_plain(
        self, a: torch.Tensor, out: torch.Tensor, kept: tuple[torch.Tensor, ...], config: MMConfig, top_k: int
    ) -> tuple[Launch, list[Any]]:
        """The same for `plain_mm`, and descriptors of two tensors that are kept, or what stands in for them.

        `block` ends with the steps that there is room for, `top_k` of gathered rows or 0, whether it is a weight's rows
        that are side by side, and whether anything is kept. Of gathered rows, of any stride, no descriptor brings any:
        the output's says how they lie in shared memory.
        """
        from moe_ops.kernels.triton.plain_mm import HALF, ROWS, STEP, columns_of

        at_once = HALF.value // (2 if self.glu == INTERLEAVED.value else 1)
        load, rows = self._weight_load(config), out if top_k else a
        step = (config.block_m + config.block_n) * STEP.value * a.element_size()
        room = TYPICAL.shared_kib * 1024 - PROGRAM_BYTES - config.block_m * at_once * out.element_size()
        block = (*config[:4], next_power_of_2(self.num_experts), 0, min(MOST_STEPS, room // step), top_k)
        out_desc = for_gluon(ragged_rows(out, ROWS.value, at_once))
        of_kept = [for_gluon(ragged_rows(part, ROWS.value, at_once)) for part in kept]
        made = Launch(
            a_desc=for_gluon(TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [ROWS.value, STEP.value])),
            w_desc=for_gluon(self._weight_descriptor(load, config)),
            out_desc=out_desc,
            strides=(*self.strides, a.stride(0), None, None),
            block=(*block, load == TMA_KN.value, bool(kept)),
            moves=(not top_k, load, at_once, self.up_offset < 0),
            walk=TILE_BY_TILE.value,
            n_tiles=cdiv(self.out_features, columns_of(self.glu)),
        )
        return made, of_kept + [out_desc] * (2 - len(of_kept))

    def promotes(self, config: MMConfig, rows: int) -> bool:
        """Whether `promoted_mm` takes the product of so many rows by descriptor."""
        return self.promotable(config) and are_promoted(rows, self.num_experts)

    def leaves_halves(self, config: MMConfig, rows: int) -> bool:
        """Whether of rows that a kernel quantises then `promoted_mm` leaves fp16: half the bytes to write and to read,
        1 to 3 % of a layer.
        """
        return self.quantizes_rows and self.out_static is None and self.promotes(config, rows)

    def promotable(self, config: MMConfig) -> bool:
        """Whether it would of enough rows: where Gluon's Hopper is."""
        large = config.a_tma and config.block_m == PROMOTED_ROWS and not config.tall_m
        if not (self.is_scaled and large):
            return False
        if not self.operand.data.dtype == self.operand.scheme.rows.dtype == torch.float8_e4m3fn:
            return False
        scale = self.decoding["groups"]
        # Of blocks, a half of a tile is one of the weight's, or of two where they run on, eight rows at a time.
        blocks = scale.group == (128, 128) and not (scale.runs_on and self.out_features % 8)
        taken = self._weight_load(config) == TMA_NK.value and (scale.group[1] == 0 or blocks)
        size = 1 if self.quantizes_in_tile else 4 if self.quantize_output else self.out_dtype.itemsize
        return taken and self.out_features * size % 16 == 0 and hopper_with_gluon(self.weight.device)

    def prepare_promoted(
        self, a: torch.Tensor, out: torch.Tensor, config: MMConfig, *, beside: int = 0, at_once: int | None = None
    ) -> Launch:
        """The same for `promoted_mm` and `folded_mm`, whose tile is one of theirs: two boxes of rows and two of weight
        rows a step; how many steps there is room for, `folded_mm` knows by itself. `beside`: bytes of shared memory
        for something else; at_once: columns that a group of warps writes at a time, if not theirs.
        """
        from moe_ops.kernels.triton.promoted_mm import HALF, ROWS, STEP, columns_of

        columns, theirs = columns_of(self.glu)
        at_once = theirs if at_once is None else at_once
        columns_at_once = STEP.value // a.element_size()
        part = config._replace(block_n=HALF.value * (2 if self.glu == CONCAT.value else 1), block_k=columns_at_once)
        weights = self._weight_descriptor(TMA_NK.value, part)
        if self.glu == CONCAT.value:
            weights.block_shape[1] = 1  # a box is of one half
        step = 2 * (ROWS.value + HALF.value) * STEP.value
        room = TYPICAL.shared_kib * 1024 - PROGRAM_BYTES - 2 * ROWS.value * at_once * out.element_size() - beside
        block = (PROMOTED_ROWS, 2 * HALF.value, STEP.value, config.group_m, next_power_of_2(self.num_experts), 0)
        return Launch(
            a_desc=for_gluon(TensorDescriptor(a, list(a.shape), list(a.stride()), [ROWS.value, columns_at_once])),
            w_desc=for_gluon(weights, torch.int32),
            out_desc=for_gluon(ragged_rows(out, ROWS.value, at_once)),
            strides=(*self.strides, a.stride(0), None, self.decoding["rows"].strides),
            block=(*block, min(MOST_STEPS, room // step), self.quantizes_rows and out.dtype == torch.float16),
            moves=(True, TMA_NK.value, at_once, self.up_offset < 0),
            walk=TILE_BY_TILE.value,
            n_tiles=cdiv(self.out_features, columns),
        )

    def decodes_once(self, config: MMConfig, rows: int) -> bool:
        """Whether `decoded_once_mm` takes the product of so many rows by descriptor, in the place of `folded_mm` or
        `decoded_fp8_mm`; or of 16 bits `decoded_plain_mm`, where the tile says so.
        """
        if self.is_decoded:
            return self.shares(config) and self.specialises(config)
        if not self.is_packed or self.gathers_few(config):
            return False
        whole_steps = self.folds_scales or self.group_columns % PACKED_COLUMNS == 0
        return whole_steps and are_shared(rows, self.num_experts, self.folds_scales) and self.specialises(config)

    def _draws(self, config: MMConfig, rows: int) -> bool:
        """Whether programs draw the product's tiles: `decoded_mm`, `decoded_fp8_mm`, `promoted_mm`, `plain_mm`."""
        if not self.is_packed:
            return self.is_plain(config) or self.promotes(config, rows)
        return self.specialises(config) and not (self.takes_few(config) or self.folds_scales)

    def words_told(self, config: MMConfig, rows: int) -> int:
        """How many words, which something has to make 0 before, programs of the product tell one another; 0 where they
        tell nothing.
        """
        if not self.decodes_once(config, rows):
            return int(self._draws(config, rows))
        from moe_ops.kernels.triton.panels import COUNTERS, columns_of_step
        from moe_ops.kernels.triton.promoted_mm import columns_of

        panels = self.num_experts * cdiv(self.out_features, columns_of(self.glu)[0])
        steps = cdiv(self.in_features, columns_of_step(self.scheme))
        return COUNTERS.value + panels * (1 + steps) + 32  # which a warp reads at once

    def prepare_decoded_once(
        self, a: torch.Tensor, out: torch.Tensor, config: MMConfig, top_k: int = 0
    ) -> tuple[Launch, torch.Tensor, Any]:
        """The same for `decoded_once_mm`, or `decoded_plain_mm` beside rows of 16 bits, `top_k` of gathered ones, with
        the memory that it decodes panels to and a descriptor of that; `block` ends with how many of them there is room
        for.
        """
        from moe_ops.kernels.triton.panels import CHUNK, code_bytes, columns_of_step
        from moe_ops.kernels.triton.promoted_mm import HALF

        at_once, step = None if self.folds_scales else CHUNK.value, columns_of_step(self.scheme)
        beside = code_bytes(self.scheme) - PROGRAM_BYTES // 2  # barriers are few
        made = self.prepare_promoted(a, out, config, beside=beside, at_once=at_once)
        columns = cdiv(self.in_features, step) * step
        numbers = torch.float8_e5m2 if self.folds_scales else a.dtype
        panels = min(self.num_experts * made.n_tiles, max(2, PANEL_BYTES // (2 * HALF.value * columns)))
        memory = a.new_empty((panels * 2 * HALF.value, columns), dtype=numbers)
        box = TensorDescriptor(memory, list(memory.shape), list(memory.stride()), [HALF.value, step])
        block = (*made.block[:7], top_k, False, False) if self.is_decoded else made.block
        return replace(made, block=(*block, panels)), memory, for_gluon(box)

    def prepare_decoded_fp8(self, a: torch.Tensor, out: torch.Tensor, config: MMConfig) -> Launch:
        """The same for `decoded_fp8_mm`, whose tile is one of its own."""
        from moe_ops.kernels.triton.decoded_fp8_mm import GROUPS, HEIGHT, MOST, ROWS

        group = self.group_columns
        step = min(PACKED_COLUMNS, group & -group) if group else PACKED_COLUMNS
        part = config._replace(block_n=HEIGHT.value, block_k=step)
        bytes_of_step = step * (MOST.value * ROWS.value + GROUPS.value * HEIGHT.value // 2)
        written = ROWS.value * GROUPS.value * self.columns(part) * out.element_size()
        room = TYPICAL.shared_kib * 1024 - PROGRAM_BYTES - written
        block = (MOST.value * ROWS.value, GROUPS.value * HEIGHT.value, step, config.group_m)
        return Launch(
            a_desc=for_gluon(TensorDescriptor(a, list(a.shape), list(a.stride()), [ROWS.value, step])),
            w_desc=for_gluon(self._weight_descriptor(TMA_NK.value, part)),
            out_desc=for_gluon(ragged_rows(out, ROWS.value, self.columns(part))),
            strides=(*self.strides, a.stride(0), None, self.decoding["rows"].strides),
            block=(*block, next_power_of_2(self.num_experts), 0, min(MOST_STEPS, room // bytes_of_step)),
            moves=(True, TMA_NK.value, self.columns(part), self.up_offset < 0),
            walk=TILE_BY_TILE.value,
            n_tiles=cdiv(self.out_features, GROUPS.value * self.columns(part)),
        )

    def columns(self, config: MMConfig) -> int:
        """Output columns of a tile."""
        return config.block_n // (2 if self.glu else 1)

    def columns_at_once(self, config: MMConfig) -> int:
        """Output columns that are written together: a tile's, those of one of the two groups of warps that `decoded_mm`
        may have, or what `decoded_few_mm` writes.
        """
        if self.takes_few(config) or self.shares(config):
            return FEW_COLUMNS
        return self.columns(config) // self.groups(config)

    def groups(self, config: MMConfig) -> int:
        """Groups of warps of a tile of `decoded_mm`: two where sums wait for their scales."""
        return 2 if self.waits_decoded and config.block_n == GLUON_ROWS and not self.takes_few(config) else 1

    def prepare(self, a: torch.Tensor, out: torch.Tensor, config: MMConfig, *, gathered: bool) -> Launch:
        """Descriptors, strides and constants of a launch on rows `a` [rows, K] that writes `out` [rows, N]."""
        a_tma = config.a_tma and not gathered and descriptor_strides(a, inner=1)
        w_load = self._weight_load(config)
        walked = walk(config, a_tma, self.waits_for_scales, self.is_decoded)
        described = config.a_tma and descriptor_strides(out, inner=1)
        # Memory by which threads exchange what they store by pointer is that of steps, but in a stream.
        store = self.store_columns(out, config) if described or walked == STREAM.value else self.columns(config)
        return Launch(
            a_desc=TensorDescriptor(a, list(a.shape), list(a.stride()), [config.rows, self.row_columns(config)])
            if a_tma
            else None,
            w_desc=self._weight_descriptor(w_load, config),
            out_desc=ragged_rows(out, config.rows, store) if described else None,
            strides=(
                *self.strides,
                a.stride(0) if a.shape[0] > 1 else a.shape[1],
                self.decoding["zeros"].strides,
                self.decoding["rows"].strides,
            ),
            block=(*config[:4], next_power_of_2(self.num_experts), config.tall_m, config.tall_stages),
            moves=(a_tma, w_load, store, self.up_offset < 0 and w_load != POINTERS.value),
            walk=walked,
            n_tiles=cdiv(self.out_features, self.columns(config)),
        )
