"""Number formats of weights and activations: one frozen row each. Only the row's NAME crosses an operator schema."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meta.dims import Dim

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

QuantizePair = Callable[[Tensor], tuple[Tensor, Tensor]]
Dequantize = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class QuantScheme:
    """How one name stores weights and activations.

    Attributes:
        name: the name that crosses operator schemas.
        weight_dtype: stored dtype of an ``[E, N, K]`` weight.
        activation: "none" (activations stay in the hidden dtype) or the activation format, e.g. "fp8_1x128".
        rows_dtype: stored dtype of activations; None when ``activation`` is "none".
        group_n, group_k: weight elements that share a scale along N and K; 0 when there are no scales.
        pack: logical K elements in one stored element.
        extras: further tensors that weights need, out of {"global_scale", "zero_point"}.
        error_bound: largest relative rounding error of one stored element against its scale group's value.
        quantize_weight: ``w [E, N, K] float -> (stored, scale)``.
        dequantize_weight: ``(stored, scale) -> fp32 [E, N, K]``.
        quantize_rows: ``x [..., K] float -> (stored [..., K], scale fp32 [..., ceil(K / 128)])``.
        dequantize_rows: ``(stored, scale) -> fp32 [..., K]``.
    """

    name: str
    weight_dtype: torch.dtype
    error_bound: float
    activation: str = "none"
    rows_dtype: torch.dtype | None = None
    group_n: int = 0
    group_k: int = 0
    pack: int = 1
    extras: frozenset[str] = frozenset()
    quantize_weight: QuantizePair | None = None
    dequantize_weight: Dequantize | None = None
    quantize_rows: QuantizePair | None = None
    dequantize_rows: Dequantize | None = None

    @property
    def quantized(self) -> bool:
        """Whether weights carry scales."""
        return self.group_k > 0

    @property
    def quantizes_rows(self) -> bool:
        """Whether activations are quantised too."""
        return self.rows_dtype is not None

    def weight_scale_shape(self, E: Dim, N: Dim, K: Dim) -> tuple[Dim, Dim, Dim] | None:
        """Shape of the fp32 scale of an ``[E, N, K]`` weight, or None."""
        return (E, ceil_div(N, self.group_n), ceil_div(K, self.group_k)) if self.quantized else None

    def rows_scale_width(self, K: Dim) -> Dim:
        """Columns of the fp32 scale of activations ``[..., K]``."""
        return ceil_div(K, self.group_k)

    def rows_scale_shape(self, R: Dim, K: Dim) -> tuple[Dim, Dim] | None:
        """Shape of the fp32 scale of activations ``[R, K]``, or None."""
        return (R, self.rows_scale_width(K)) if self.quantizes_rows else None


def ceil_div(a: Dim, b: int) -> Dim:
    """``ceil(a / b)`` for sizes, symbolic ones included."""
    return (a + b - 1) // b


def _expand_blocks(scale: Tensor, shape: torch.Size, group_n: int, group_k: int) -> Tensor:
    wide = scale.repeat_interleave(group_n, dim=-2).repeat_interleave(group_k, dim=-1)
    return wide[..., : shape[-2], : shape[-1]]


def _quantize_weight_block128(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with one fp32 scale ``max|w| / 448`` per 128 x 128 block (DeepSeek-V3, section 3.3)."""
    E, N, K = weight.shape
    blocks_n, blocks_k = math.ceil(N / 128), math.ceil(K / 128)
    padded = weight.new_zeros((E, blocks_n * 128, blocks_k * 128), dtype=torch.float32)
    padded[:, :N, :K] = weight
    amax = padded.abs().view(E, blocks_n, 128, blocks_k, 128).amax(dim=(2, 4))
    scale = _scale_of(amax)
    stored = (weight.float() / _expand_blocks(scale, weight.shape, 128, 128)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return stored, scale


def _scale_of(amax: Tensor) -> Tensor:
    """Scale of a group with this largest magnitude; the group of zeros gets a normal number.

    Divided by a tensor: torch on CUDA turns a division by a Python number into a product with its rounded reciprocal,
    and the same rows would have other scales there than on a CPU and in the kernels.
    """
    return amax.clamp(min=1e-12) / amax.new_full((), E4M3_MAX)


def _dequantize_weight_block128(stored: Tensor, scale: Tensor) -> Tensor:
    return stored.float() * _expand_blocks(scale, stored.shape, 128, 128)


def _quantize_rows_1x128(rows: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with one fp32 scale ``max(max|x|, 1e-12) / 448`` per row and 128 columns."""
    K = rows.shape[-1]
    blocks = math.ceil(K / 128)
    padded = torch.nn.functional.pad(rows.float(), (0, blocks * 128 - K)).reshape(*rows.shape[:-1], blocks, 128)
    scale = _scale_of(padded.abs().amax(dim=-1))
    stored = (padded / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).flatten(-2)[..., :K].to(E4M3)
    return stored.contiguous(), scale.clone(memory_format=torch.contiguous_format)


def _dequantize_rows_1x128(stored: Tensor, scale: Tensor) -> Tensor:
    return stored.float() * scale.repeat_interleave(128, dim=-1)[..., : stored.shape[-1]]


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
            activation="fp8_1x128",
            rows_dtype=E4M3,
            group_n=128,
            group_k=128,
            quantize_weight=_quantize_weight_block128,
            dequantize_weight=_dequantize_weight_block128,
            quantize_rows=_quantize_rows_1x128,
            dequantize_rows=_dequantize_rows_1x128,
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
