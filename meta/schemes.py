"""Number formats of weights and activations: one frozen row each. Only the row's NAME crosses an operator schema.

A quantised weight is its data and the scheme's list of scales, in the order of the row; an activation has a format of
its own, data and one scale. What the codes mean is said in :mod:`meta.formats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meta.dims import Dim, is_known_equal
from meta.formats import CODES, E4M3, E4M3_MAX, E8M0, Code, exponents

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: A group of elements that is the whole axis.
WHOLE = 0
#: A group along K of any size that divides it, which the scale's shape says.
ANY = -1

Scales = Sequence[Tensor]
Groups = tuple[int, int]


@dataclass(frozen=True)
class Scale:
    """One tensor of a scheme's list, ``[E, ceil(N / group_n), ceil(K / group_k)]``; last dimensions of 1 may be left
    out.

    Attributes:
        name: what messages call it.
        forms: weight elements along N and K that share an entry, each pair one form that a checkpoint may have:
            :data:`WHOLE` for the axis, :data:`ANY` for what the shape says.
        dtypes: those that a checkpoint may store it in; computed with in fp32. A factor in fp64 is the reciprocal of a
            divisor: :meth:`QuantScheme.dequantize` makes the quotient by that divisor of it.
        optional: may be left out; such entries come last, and the list's length says which are there.
        shift: whether it is a zero point: subtracted from the codes, where the others are multiplied with.
        of_rows: whether it decodes no weight, but is the static scale of the activations that the weight is multiplied
            with, calibrated before; without it the format of the activations computes scales of its own. Comes last.
    """

    name: str
    forms: tuple[Groups, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    optional: bool = False
    shift: bool = False
    of_rows: bool = False

    def __str__(self) -> str:
        shapes = (f"[E, {_words('N', n)}, {_words('K', k)}]" for n, k in self.forms)
        return f"{self.name} {' or '.join(shapes)}{' or nothing' if self.optional else ''}"

    def shape(self, E: Dim, N: Dim, K: Dim) -> tuple[Dim, Dim, Dim]:
        """Of an ``[E, N, K]`` weight whose groups run on over all N rows, in the first of the forms; :data:`ANY` as 128
        columns.
        """
        group_n, group_k = self.forms[0]
        return (E, groups(N, group_n), groups(K, 128 if group_k == ANY else group_k))

    def groups_of(self, sizes: Sequence[Dim], N: Dim, K: Dim) -> Groups | None:
        """The form that a scale of ``(.., N groups, K groups)`` has over N rows and K columns, or None."""
        rows, columns = sizes[-2:]
        for group_n, group_k in self.forms:
            if not is_known_equal(rows, groups(N, group_n)):
                continue
            if group_k != ANY:
                if is_known_equal(columns, groups(K, group_k)):
                    return group_n, group_k
            elif is_known_equal(columns, 1):
                return group_n, WHOLE
            elif not (isinstance(columns, int) and isinstance(K, int)):
                return group_n, ANY
            elif 0 < columns <= K and K % columns == 0:
                return group_n, K // columns
        return None

    def value(self, scale: Tensor) -> Tensor:
        """fp32, whatever a checkpoint stores it in: bytes of a factor are exponents. fp64 stays."""
        if scale.dtype == torch.uint8 and not self.shift:
            return exponents(scale)
        return scale if scale.dtype == torch.float64 else scale.float()


def _words(letter: str, group: int) -> str:
    plain = {WHOLE: "1", ANY: f"{letter} / G", 1: letter}
    return plain.get(group, f"ceil({letter} / {group})")


@dataclass(frozen=True)
class ActivationFormat:
    """How quantised activations ``[..., K]`` are stored.

    Attributes:
        name: of the format.
        dtype: of the stored elements.
        group: elements along K that share an fp32 scale; :data:`WHOLE` for a row.
        largest: the magnitude that the largest element of a group is stored as.
        scale_dtype: of the scales.
        pack: elements in a stored one.
    """

    name: str
    dtype: torch.dtype
    group: int
    largest: float
    scale_dtype: torch.dtype = torch.float32
    pack: int = 1

    def scale_width(self, K: Dim) -> Dim:
        """Scales of a row of K elements."""
        return groups(K, self.group)

    def quantize(self, rows: Tensor, static: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``x [..., K] float -> (stored [..., K], (scale fp32 [..., groups of K],))``, the scale ``max(max|x|, 1e-12) /
        largest`` of each group, the quotients rounded to nearest, ties to even, saturating.

        Args:
            static: fp32, broadcast over the rows: scales that were calibrated before, in the place of those.
        """
        K = rows.shape[-1]
        blocks = int(groups(K, self.group))
        wide = rows.float()
        if self.group != WHOLE:
            wide = torch.nn.functional.pad(wide, (0, blocks * self.group - K))
        wide = wide.unflatten(-1, (blocks, -1)) if K else wide.reshape(*rows.shape[:-1], blocks, 0)
        if static is None:
            scale = self.scale_of(wide.abs().amax(dim=-1) if K else wide.new_zeros(wide.shape[:-1]))
        else:
            scale = static.expand(wide.shape[:-1])
        quotient = _divided(wide, scale.unsqueeze(-1)).clamp(-self.largest, self.largest)
        quotient = quotient if self.dtype.is_floating_point else quotient.round()
        stored = quotient.flatten(-2)[..., :K].to(self.dtype, memory_format=torch.contiguous_format)
        return stored, (scale.clone(memory_format=torch.contiguous_format),)

    def scale_of(self, amax: Tensor) -> Tensor:
        """The scale that stores the magnitude ``amax`` as the largest."""
        return _scale_of(amax, self.largest, 1e-12)

    def dequantize(self, stored: Tensor, scales: Scales) -> Tensor:
        """``(stored, scales) -> fp32 [..., K]``."""
        (scale,) = scales
        if self.group != WHOLE:
            scale = scale.repeat_interleave(self.group, dim=-1)[..., : stored.shape[-1]]
        wide: Tensor = stored.float() * scale
        return wide


@dataclass(frozen=True)
class QuantScheme:
    """How one name stores weights and activations.

    Attributes:
        name: the name that crosses operator schemas.
        code: of the elements of an ``[E, N, K]`` weight; None where they are floats.
        scales: the tensors that decode a weight, in the order of the operators' lists.
        rows: format of the activations; None when they stay in the hidden dtype.
        blocks: name of that of :data:`meta.blocks.BLOCKS` which tensor cores multiply with the weights as they are
            stored: on GPUs that have such, kernels bring the activations into it.
        float_dtype: of weights without a code.
        make_scales: ``w fp32 [E, N, K] -> the scales`` that :meth:`quantize` stores it with.
        source: paper or specification.
    """

    name: str
    code: Code | None = None
    scales: tuple[Scale, ...] = ()
    rows: ActivationFormat | None = None
    blocks: str | None = None
    float_dtype: torch.dtype = torch.bfloat16
    make_scales: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    source: str = ""

    @property
    def quantized(self) -> bool:
        """Whether weights carry scales."""
        return self.code is not None

    @property
    def weight_dtype(self) -> torch.dtype:
        """Stored dtype of a weight."""
        return self.float_dtype if self.code is None else self.code.dtype

    @property
    def static_rows(self) -> Scale | None:
        """The static scale that weights may carry for their activations, or None."""
        return next((spec for spec in self.scales if spec.of_rows), None)

    def has_static(self, scales: int) -> bool:
        """Whether a list of so many scales has the static one, which comes last."""
        return self.static_rows is not None and scales == len(self.scales)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of stored weights, scales and activations."""
        found = {self.weight_dtype} | {dtype for spec in self.scales for dtype in spec.dtypes}
        return found if self.rows is None else found | {self.rows.dtype}

    @property
    def pack(self) -> int:
        """Logical K elements in one stored element."""
        return 1 if self.code is None else self.code.pack

    @property
    def bits(self) -> int:
        """Of one element."""
        return self.weight_dtype.itemsize * 8 // self.pack

    def groups_of(self, data: Tensor, scales: Scales) -> list[Groups]:
        """Rows and columns of a weight that share an entry of each scale."""
        found = []
        for spec, scale in zip(self.scales, scales, strict=False):
            N = data.shape[1] // 2 if scale.dim() == 4 else data.shape[1]
            form = spec.groups_of(scale.shape, N, data.shape[2] * self.pack)
            if form is None:
                raise ValueError(f"{self.name}: {spec} expected, got {list(scale.shape)} for {list(data.shape)}.")
            found.append(form)
        return found

    def dequantize(self, stored: Tensor, scales: Scales) -> Tensor:
        """``(stored, scales) -> fp32 [E, N, K]``: ``(code - zero point) * (product of the scales)``.

        The product is made in the widest dtype of its factors and rounded to fp32. Of ``s`` and ``1 / d`` in fp64, with
        ``s``, ``d`` and the result normal in fp32, it is the IEEE quotient ``s / d``: two roundings to fp64 move it by
        at most 2^-52 of itself, and no quotient of numbers of 24 bits is closer than 2^-49 of itself to the middle
        between two numbers of fp32. A division would depend on who compiles it: that of Triton is not IEEE's.
        """
        if self.code is None:
            return stored.float()
        value, factor = self.code.decode(stored), None
        N, K = value.shape[1:]
        parts = zip(self.scales, scales, self.groups_of(stored, scales), strict=False)
        for spec, scale, form in parts:
            if spec.of_rows:
                continue
            wide = per_element(spec.value(scale), form, N, K)
            if spec.shift:
                value = value + self.code.zero - wide
            else:
                factor = wide if factor is None else factor * wide
        return value if factor is None else value * factor.float()

    def quantize(self, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``w [E, N, K] float -> (stored, scales)``; the quotients by the scales rounded to nearest, ties to even.

        A number that is not finite makes NaN of the scales that it has, and so of all numbers that share one of them:
        few codes have a NaN of their own, and every dtype of a scale has.
        """
        if self.code is None or self.make_scales is None:
            raise ValueError(f"quantize_weight: scheme must be one that quantises weights, got {self.name!r}.")
        _, N, K = weight.shape
        wide = weight.float()
        scales = self.make_scales(wide)
        factor = torch.ones((), device=weight.device)
        for spec, scale in zip(self.scales, scales, strict=False):
            if (form := spec.groups_of(scale.shape, N, K)) is not None:
                factor = factor * per_element(spec.value(scale), form, N, K)
        return self.code.encode(_divided(wide, factor).nan_to_num(0.0)), scales  # beside a NaN scale any code will do


def groups(size: Dim, group: int) -> Dim:
    """Groups that cover ``size`` elements, symbolic sizes included."""
    return 1 if group == WHOLE else ceil_div(size, group)


def ceil_div(a: Dim, b: int) -> Dim:
    """``ceil(a / b)`` for sizes, symbolic ones included."""
    return (a + b - 1) // b


def per_element(scale: Tensor, form: Groups, N: int, K: int) -> Tensor:
    """The value of every element ``[E, N, K]`` (or broadcast over an axis of :data:`WHOLE`) of a weight's scale.

    Args:
        scale: ``[E, N groups, K groups]``, or ``[E, 2, N groups, K groups]`` over the halves of a gate|up stack.
        form: elements that share an entry; :data:`ANY`, of symbolic sizes, is what the scale's shape says.
    """
    group_n, group_k = form
    if group_k == ANY:
        group_k = K // scale.shape[-1]
    if scale.dim() == 4:
        # Inductor (2.13) fails on places that are divided by as many as there are, where that is a symbol.
        spread = scale.expand(-1, -1, N // 2, -1) if group_n == WHOLE else _spread(scale, 2, group_n, N // 2)
        scale = spread.flatten(1, 2)
    else:
        scale = _spread(scale, 1, group_n, N)
    return _spread(scale, -1, group_k, K)


def _spread(scale: Tensor, dim: int, group: int, size: int) -> Tensor:
    """Each entry ``group`` times, the last one as often as there is room for."""
    if group in (WHOLE, 1):
        return scale
    if isinstance(size, int) and size % group == 0:
        return scale.repeat_interleave(group, dim=dim)
    # Not a part of that: of an index that is divided by a group, Inductor (2.13, on a CPU) computes whole groups alone,
    # and leaves what memory held behind them. It does not know a quotient that is truncated for such an index.
    places = torch.arange(size, device=scale.device).div(group, rounding_mode="trunc")
    return scale.index_select(dim, places)


def _divided(a: Tensor, b: Tensor | float) -> Tensor:
    """The IEEE quotient of fp32 ``a`` and ``b``, whoever computes it: the same rows have the same bits everywhere.

    torch on CUDA turns a division by a Python number into a product with its rounded reciprocal, and Inductor's kernels
    there divide with an error of two units. In fp64 both are exact enough for the quotient rounded to fp32 to be right
    where it is normal (see `QuantScheme.dequantize`); eagerly that would take eight bytes a weight.
    """
    if torch.compiler.is_compiling():
        return (a.double() / (b.double() if isinstance(b, Tensor) else b)).float()
    return a / (b if isinstance(b, Tensor) else a.new_full((), b))


def _scale_of(amax: Tensor, largest: float, least: float = 2.0**-114) -> Tensor:
    """Scale of a group with this largest magnitude, or with ``least``: of weights a power of two, of which any scheme's
    scale is a normal number, so that small groups are not zeros.
    """
    return _divided(amax.clamp(min=least), largest)


def _amax(weight: Tensor, group_n: int, group_k: int) -> Tensor:
    """Largest magnitude of every group, fp32 ``[E, N groups, K groups]``; NaN where it is not finite."""
    _, N, K = weight.shape
    rows, columns = group_n or max(N, 1), group_k or max(K, 1)
    grid = int(groups(N, group_n)), int(groups(K, group_k))  # an axis without elements, as a whole, is a group of zeros
    padded = torch.nn.functional.pad(weight.abs(), (0, grid[1] * columns - K, 0, grid[0] * rows - N))
    found: Tensor = padded.unflatten(2, (grid[1], columns)).unflatten(1, (grid[0], rows)).amax(dim=(2, 4))
    return found.masked_fill(found.isinf(), math.nan)


def _scales(code: str, group_n: int, group_k: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """One fp32 scale ``max|w| / largest`` for every group."""
    largest = CODES[code].largest
    return lambda weight: (_scale_of(_amax(weight, group_n, group_k), largest),)


def _group_scales(code: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """bf16 scales of groups of 128 columns, or of a row whose length 128 does not divide."""
    largest = CODES[code].largest
    return lambda weight: (_scale_of(_amax(weight, 1, _columns(weight)), largest).bfloat16(),)


def _columns(weight: Tensor) -> int:
    # One group is a row: Inductor (2.13) takes a number of groups that depends on K for K, where it is 1.
    return 128 if weight.shape[2] > 128 and weight.shape[2] % 128 == 0 else WHOLE


def _mx_scales(code: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """e8m0 ``2^(floor(log2(max|w|)) - emax)`` of 32 columns (OCP Microscaling Formats v1.0, 6.3); 255 is NaN."""
    largest_exponent = math.frexp(CODES[code].largest)[1] - 1

    def scales(weight: Tensor) -> tuple[Tensor, ...]:
        amax = _amax(weight, 1, 32)
        exponent = torch.frexp(amax.clamp(min=2.0**-126))[1] - 1 - largest_exponent
        code = (exponent.clamp(-127, 127) + 127).masked_fill(amax.isnan(), 255)
        # Not a view of bytes, of which Inductor makes no tensor on a CPU: it leaves the cast, which is exact, to aten.
        return (exponents(code.to(torch.uint8)).to(E8M0),)

    return scales


def _nv_scales(weight: Tensor) -> tuple[Tensor, ...]:
    """e4m3 of 16 columns, in units of one fp32 number for an expert that makes the largest of them 448."""
    whole = _scale_of(_amax(weight, WHOLE, WHOLE), E4M3_MAX * CODES["e2m1"].largest)
    part = _divided(_divided(_amax(weight, 1, 16), CODES["e2m1"].largest), whole)
    return _positive_e4m3(part), whole


def _w4a8_scales(weight: Tensor) -> tuple[Tensor, ...]:
    """e4m3 of a group of columns, in units of one fp32 number for each row that makes the largest of them 448."""
    part = _scale_of(_amax(weight, 1, _columns(weight)), CODES["int4"].largest)
    row = _scale_of(part.amax(dim=2, keepdim=True), E4M3_MAX)
    return _positive_e4m3(_divided(part, row)), row


def _positive_e4m3(scale: Tensor) -> Tensor:
    return scale.clamp(2.0**-9, E4M3_MAX).to(E4M3)


FP8_1X128 = ActivationFormat("fp8_1x128", E4M3, 128, E4M3_MAX)
FP8_TOKEN = ActivationFormat("fp8_token", E4M3, WHOLE, E4M3_MAX)
INT8_TOKEN = ActivationFormat("int8_token", torch.int8, WHOLE, 127.0)


def joined(parts: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What `QuantScheme.quantize` made of some experts each, of all: ``(stored, scales)``."""
    stored, scales = zip(*parts, strict=True)
    return _cat(stored), tuple(_cat(of_all) for of_all in zip(*scales, strict=True))


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat`, by bytes where the dtype has 8 bits: not every device joins those."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(tuple(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


_FP32_OR_BF16 = (torch.float32, torch.bfloat16)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_BLOCKS = (128, 128)
_TENSOR, _CHANNEL, _GROUPS = (WHOLE, WHOLE), (1, WHOLE), (1, ANY)
_STATIC = Scale("input_scale", (_TENSOR,), optional=True, of_rows=True)
_OCP = "OCP Microscaling Formats v1.0"


def _code(name: str, code: str, *scales: Scale, **fields: object) -> QuantScheme:
    return QuantScheme(name, CODES[code], scales, **fields)  # type: ignore[arg-type]


SCHEMES: dict[str, QuantScheme] = {
    row.name: row
    for row in (
        QuantScheme("bf16", float_dtype=torch.bfloat16),
        QuantScheme("fp16", float_dtype=torch.float16),
        QuantScheme("fp32", float_dtype=torch.float32),
        QuantScheme("fp64", float_dtype=torch.float64),  # gradient checks and oracles; the CPU backend alone runs it
        _code(
            "fp8_tensor",
            "e4m3",
            Scale("scale", (_TENSOR,)),
            _STATIC,
            rows=FP8_TOKEN,
            make_scales=_scales("e4m3", *_TENSOR),
            source="compressed-tensors, ModelOpt: float-quantized, one scale for a tensor, for each half of a stack",
        ),
        _code(
            "fp8_channel",
            "e4m3",
            Scale("scale", (_CHANNEL,), _FP32_OR_BF16),
            _STATIC,
            rows=FP8_TOKEN,
            make_scales=_scales("e4m3", *_CHANNEL),
            source="compressed-tensors: float-quantized, one scale for a row of the weight",
        ),
        _code(
            "fp8_block128",
            "e4m3",
            Scale("scale", (_BLOCKS,), (torch.float32, torch.bfloat16, E8M0)),
            rows=FP8_1X128,
            make_scales=_scales("e4m3", *_BLOCKS),
            source="DeepSeek-V3, arXiv 2412.19437, section 3.3",
        ),
        _code(
            "fp8_w8a16",
            "e4m3",
            Scale("scale", (_BLOCKS, _CHANNEL, _TENSOR), (torch.float32, torch.bfloat16, E8M0)),
            make_scales=_scales("e4m3", *_CHANNEL),
            source="the weights of fp8_tensor, fp8_channel and fp8_block128",
        ),
        _code(
            "mxfp8",
            "e4m3",
            Scale("scale", ((1, 32),), (E8M0, torch.uint8)),
            blocks="mxfp8",
            make_scales=_mx_scales("e4m3"),
            source=_OCP,
        ),
        _code(
            "int8_channel",
            "int8",
            Scale("scale", (_CHANNEL,), _FLOATS),
            rows=INT8_TOKEN,
            make_scales=_scales("int8", *_CHANNEL),
            source="LLM.int8, arXiv 2208.07339, without outliers; SmoothQuant, arXiv 2211.10438",
        ),
        _code(
            "int8_w8a16",
            "int8",
            Scale("scale", (_GROUPS,), _FLOATS),
            Scale("zero_point", (_GROUPS,), (torch.int8, torch.uint8), optional=True, shift=True),
            make_scales=_scales("int8", *_CHANNEL),
            source="compressed-tensors: pack-quantized, 8 bits",
        ),
        _code(
            "int4_w4a16",
            "int4",
            Scale("scale", (_GROUPS,), _FLOATS),
            Scale("zero_point", (_GROUPS,), (torch.uint8, torch.int8), optional=True, shift=True),
            make_scales=_group_scales("int4"),
            source="compressed-tensors: pack-quantized, 4 bits; GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978",
        ),
        _code(
            "w4a8_fp8",
            "int4",
            Scale("scale", (_GROUPS,), (E4M3, torch.bfloat16, torch.float32)),
            Scale("channel_scale", (_CHANNEL,), optional=True),
            rows=FP8_TOKEN,
            make_scales=_w4a8_scales,
            source="LMDeploy and vLLM: QServe, arXiv 2405.04532, with e4m3 in the place of int8",
        ),
        _code(
            "mxfp4",
            "e2m1",
            Scale("scale", ((1, 32),), (E8M0, torch.uint8)),
            make_scales=_mx_scales("e2m1"),
            source=_OCP,
        ),
        _code(
            "mxfp4_a8",
            "e2m1",
            Scale("scale", ((1, 32),), (E8M0, torch.uint8)),
            rows=FP8_1X128,
            blocks="mxfp8",
            make_scales=_mx_scales("e2m1"),
            source=f"the weights of mxfp4, {_OCP}, the activations of fp8_block128",
        ),
        _code(
            "nvfp4",
            "e2m1",
            Scale("scale", ((1, 16),), (E4M3,)),
            Scale("global_scale", (_TENSOR,), (torch.float32, torch.float64)),
            blocks="nvfp4",
            make_scales=_nv_scales,
            source="NVIDIA, NVFP4; the second is ModelOpt's weight_scale_2, or 1 / compressed-tensors' in fp64",
        ),
    )
}

_BY_DTYPE = {row.weight_dtype: row for row in SCHEMES.values() if not row.quantized}


def resolve_scheme(op: str, name: str | None, weight_dtype: torch.dtype) -> QuantScheme:
    """Row of ``name``, or the unquantised row of ``weight_dtype`` when ``name`` is None.

    Raises:
        ValueError: unknown name, no row for the dtype, or a row whose weights have another dtype.
    """
    if name is None:
        row = _BY_DTYPE.get(weight_dtype)
        if row is None:
            raise ValueError(
                f"{op}: scheme must be given for weights of dtype {weight_dtype}, got None. "
                f"Pass one of {sorted(SCHEMES)}."
            )
        return row
    row = SCHEMES.get(name)
    if row is None:
        raise ValueError(f"{op}: scheme must be one of {sorted(SCHEMES)}, got {name!r}.")
    if row.weight_dtype != weight_dtype:
        raise ValueError(
            f"{op}: weights must be {row.weight_dtype} for scheme={name!r}, got {weight_dtype}. "
            "Convert the weights or pass the scheme that they are stored in."
        )
    return row
