"""Number formats of weights and activations: one frozen row each. Only the row's NAME crosses an operator schema.

A quantised weight is its data and the scheme's list of scales, in the order of the row; an activation has a format of
its own, data and one scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meta.dims import Dim

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: A group of elements that is the whole axis.
WHOLE = 0

Scales = Sequence[Tensor]
Quantize = Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]
Dequantize = Callable[[Tensor, Scales], Tensor]


@dataclass(frozen=True)
class Scale:
    """One tensor of a scheme's list, ``[E, ceil(N / group_n), ceil(K / group_k)]``.

    Attributes:
        name: what messages call it.
        group_n, group_k: weight elements along N and K that share an entry; :data:`WHOLE` for the axis.
        dtypes: those that a checkpoint may store it in; computed with in fp32.
        optional: may be left out; such entries come last, and the list's length says which are there.
    """

    name: str
    group_n: int
    group_k: int
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    optional: bool = False

    def __str__(self) -> str:
        sizes = ("1" if group == WHOLE else f"ceil({letter} / {group})" for letter, group in
                 (("N", self.group_n), ("K", self.group_k)))  # fmt: skip
        return f"{self.name} [E, {', '.join(sizes)}]{' or nothing' if self.optional else ''}"

    def shape(self, E: Dim, N: Dim, K: Dim) -> tuple[Dim, Dim, Dim]:
        """Of an ``[E, N, K]`` weight whose groups run on over all N rows."""
        return (E, groups(N, self.group_n), groups(K, self.group_k))

    def halves_shape(self, E: Dim, N: Dim, K: Dim) -> tuple[Dim, Dim, Dim, Dim]:
        """Of an ``[E, 2 I, K]`` stack of gate and up whose groups start again with the up half."""
        return (E, 2, groups(N // 2, self.group_n), groups(K, self.group_k))


@dataclass(frozen=True)
class ActivationFormat:
    """How quantised activations ``[..., K]`` are stored.

    Attributes:
        name: of the format.
        dtype: of the stored elements.
        group: elements along K that share an fp32 scale; :data:`WHOLE` for a row.
        quantize: ``x [..., K] float -> (stored [..., K], (scale fp32 [..., ceil(K / group)],))``.
        dequantize: ``(stored, scales) -> fp32 [..., K]``.
    """

    name: str
    dtype: torch.dtype
    group: int
    quantize: Quantize
    dequantize: Dequantize

    def scale_width(self, K: Dim) -> Dim:
        """Scales of a row of K elements."""
        return groups(K, self.group)


@dataclass(frozen=True)
class QuantScheme:
    """How one name stores weights and activations.

    Attributes:
        name: the name that crosses operator schemas.
        weight_dtype: stored dtype of an ``[E, N, K]`` weight.
        error_bound: largest relative rounding error of one stored element against its scale group's value.
        scales: the tensors that decode a weight, in the order of the operators' lists.
        rows: format of the activations; None when they stay in the hidden dtype.
        pack: logical K elements in one stored element.
        quantize: ``w [E, N, K] float -> (stored, scales)``.
        dequantize: ``(stored, scales) -> fp32 [E, N, K]``.
    """

    name: str
    weight_dtype: torch.dtype
    error_bound: float
    scales: tuple[Scale, ...] = ()
    rows: ActivationFormat | None = None
    pack: int = 1
    quantize: Quantize | None = None
    dequantize: Dequantize | None = None

    @property
    def quantized(self) -> bool:
        """Whether weights carry scales."""
        return bool(self.scales)


def groups(size: Dim, group: int) -> Dim:
    """Groups that cover ``size`` elements, symbolic sizes included."""
    return 1 if group == WHOLE else ceil_div(size, group)


def ceil_div(a: Dim, b: int) -> Dim:
    """``ceil(a / b)`` for sizes, symbolic ones included."""
    return (a + b - 1) // b


def per_element(scale: Tensor, spec: Scale, N: int, K: int) -> Tensor:
    """The fp32 value of every element ``[E, N, K]`` (or broadcast over a :data:`WHOLE` axis) of a weight's scale.

    Args:
        scale: of :meth:`Scale.shape`, or of :meth:`Scale.halves_shape`.
    """
    wide = scale.float()
    if scale.dim() == 4:
        wide = _spread(wide, 2, spec.group_n, N // 2).flatten(1, 2)
    else:
        wide = _spread(wide, 1, spec.group_n, N)
    return _spread(wide, -1, spec.group_k, K)


def _spread(scale: Tensor, dim: int, group: int, size: int) -> Tensor:
    return scale if group == WHOLE else scale.repeat_interleave(group, dim=dim).narrow(dim, 0, size)


def _quantize_weight_block128(weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """e4m3 with one fp32 scale ``max|w| / 448`` per 128 x 128 block (DeepSeek-V3, section 3.3)."""
    E, N, K = weight.shape
    blocks_n, blocks_k = math.ceil(N / 128), math.ceil(K / 128)
    padded = weight.new_zeros((E, blocks_n * 128, blocks_k * 128), dtype=torch.float32)
    padded[:, :N, :K] = weight
    amax = padded.abs().view(E, blocks_n, 128, blocks_k, 128).amax(dim=(2, 4))
    scale = _scale_of(amax)
    quotient = weight.float() / per_element(scale, _BLOCK128, N, K)
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), (scale,)


def _scale_of(amax: Tensor) -> Tensor:
    """Scale of a group with this largest magnitude; the group of zeros gets a normal number.

    Divided by a tensor: torch on CUDA turns a division by a Python number into a product with its rounded reciprocal,
    and the same rows would have other scales there than on a CPU and in the kernels.
    """
    return amax.clamp(min=1e-12) / amax.new_full((), E4M3_MAX)


def _dequantize_weight_block128(stored: Tensor, scales: Scales) -> Tensor:
    return stored.float() * per_element(scales[0], _BLOCK128, stored.shape[1], stored.shape[2])


def _quantize_rows_1x128(rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """e4m3 with one fp32 scale ``max(max|x|, 1e-12) / 448`` per row and 128 columns."""
    K = rows.shape[-1]
    blocks = math.ceil(K / 128)
    padded = torch.nn.functional.pad(rows.float(), (0, blocks * 128 - K)).reshape(*rows.shape[:-1], blocks, 128)
    scale = _scale_of(padded.abs().amax(dim=-1))
    stored = (padded / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).flatten(-2)[..., :K].to(E4M3)
    return stored.contiguous(), (scale.clone(memory_format=torch.contiguous_format),)


def _dequantize_rows_1x128(stored: Tensor, scales: Scales) -> Tensor:
    return stored.float() * scales[0].repeat_interleave(128, dim=-1)[..., : stored.shape[-1]]


_BLOCK128 = Scale("scale", 128, 128, (torch.float32, torch.bfloat16, torch.float8_e8m0fnu))

SCHEMES: dict[str, QuantScheme] = {
    row.name: row
    for row in (
        QuantScheme("bf16", torch.bfloat16, 2.0**-8),
        QuantScheme("fp16", torch.float16, 2.0**-11),
        QuantScheme("fp32", torch.float32, 2.0**-24),
        QuantScheme("fp64", torch.float64, 2.0**-53),  # gradient checks and oracles; the CPU backend alone runs it
        QuantScheme(
            "fp8_block128",
            E4M3,
            2.0**-4,
            scales=(_BLOCK128,),
            rows=ActivationFormat("fp8_1x128", E4M3, 128, _quantize_rows_1x128, _dequantize_rows_1x128),
            quantize=_quantize_weight_block128,
            dequantize=_dequantize_weight_block128,
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
