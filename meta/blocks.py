"""Activations in blocks along K whose scales tensor cores multiply by themselves, and which schemes have such.

Kernels make them inside of a layer or of a product; no operator takes or returns them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meta.arch import scales_blocks
from meta.checks import fail
from meta.dims import Dim
from meta.formats import CODES, E4M3, E4M3_MAX, exponents
from meta.schemes import WHOLE, ActivationFormat, QuantScheme, Scales, ceil_div

#: Columns of a block, of powers of two and of e4m3 scales.
MX_BLOCK, NV_BLOCK = 32, 16
#: Bytes of a row of nvfp4's scales before the first of them: the row's fp32 factor, and what keeps them aligned.
FACTOR_BYTES = 16
E2M1_MAX = CODES["e2m1"].largest
_INFINITY = 0x7F800000  # bits of fp32; those of NaN are larger


@dataclass(frozen=True)
class MxRows(ActivationFormat):
    """e4m3, and for 32 columns the least power of two that leaves none of them above 448: e8m0, as uint8.

    A block with an element that is not finite is NaN. Source: OCP Microscaling Formats v1.0, rounded up as arXiv
    2506.08027 (recipes for MXFP8) does: OCP's own rule cuts off what is between 448 and 512.
    """

    def quantize(self, rows: Tensor, static: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``x [..., K] float -> (e4m3 [..., K], (uint8 [..., ceil(K / 32)],))``; ``static`` is refused."""
        _refuse(self, static)
        wide = _blocks(rows.float(), MX_BLOCK)
        bits = _magnitude_bits(wide).amax(dim=-1)
        # 448 = 1.75 * 2^8: a mantissa above 1.75 carries into the exponent.
        exponent = ((bits + 0x1FFFFF >> 23) - 8).clamp(min=1)
        exponent = torch.where(bits >= _INFINITY, 255, exponent)
        inverse = torch.where(exponent == 255, 127, 254 - exponent).to(torch.uint8)
        stored = CODES["e4m3"].encode(wide * exponents(inverse).unsqueeze(-1))
        return stored.flatten(-2)[..., : rows.shape[-1]].contiguous(), (exponent.to(torch.uint8),)

    def dequantize(self, stored: Tensor, scales: Scales) -> Tensor:
        """``(stored, scales) -> fp32 [..., K]``."""
        (scale,) = scales
        wide: Tensor = stored.float() * exponents(scale).repeat_interleave(MX_BLOCK, dim=-1)[..., : stored.shape[-1]]
        return wide


@dataclass(frozen=True)
class NvRows(ActivationFormat):
    """e2m1, and for 16 columns an e4m3 scale in units of one fp32 factor of the row, which makes the largest of them
    448. A row with an element that is not finite is NaN.

    A row's scales are bytes: the factor, nothing up to :data:`FACTOR_BYTES`, then the e4m3 numbers. Source: NVIDIA,
    NVFP4, its factor of a tensor taken row by row: no row depends on another.
    """

    def scale_width(self, K: Dim) -> Dim:
        """Bytes of a row's scales, a multiple of 16."""
        return FACTOR_BYTES + 16 * ceil_div(K, 16 * NV_BLOCK)

    def quantize(self, rows: Tensor, static: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``x [..., K] float -> (uint8 [..., K / 2], (uint8 [..., scale_width(K)],))``; ``static`` is refused."""
        _refuse(self, static)
        wide = _blocks(rows.float(), NV_BLOCK)
        bits = _magnitude_bits(wide).amax(dim=-1)
        most = bits.amax(dim=-1, keepdim=True)
        largest = most.new_full((), E4M3_MAX * E2M1_MAX, dtype=torch.float32)
        factor = most.view(torch.float32).clamp(min=1e-12) / largest
        factor = torch.where(most >= _INFINITY, float("nan"), factor)
        part = bits.view(torch.float32) / largest.new_full((), E2M1_MAX) / factor
        scale = part.clamp(2.0**-9, E4M3_MAX).to(E4M3)
        # One division a block; the kernels do the same.
        inverse = torch.ones_like(part) / (scale.float() * factor)
        stored = CODES["e2m1"].encode((wide * inverse.unsqueeze(-1)).nan_to_num(0.0).flatten(-2))
        held = stored.new_zeros((*rows.shape[:-1], int(self.scale_width(rows.shape[-1]))))
        held[..., :4] = factor.contiguous().view(torch.uint8)
        held[..., FACTOR_BYTES : FACTOR_BYTES + scale.shape[-1]] = scale.view(torch.uint8)
        return stored[..., : rows.shape[-1] // 2].contiguous(), (held,)

    def dequantize(self, stored: Tensor, scales: Scales) -> Tensor:
        """``(stored, scales) -> fp32 [..., K]``."""
        factor, scale = self.split(scales[0], 2 * stored.shape[-1])
        wide = CODES["e2m1"].decode(stored)
        return wide * (scale.float() * factor).repeat_interleave(NV_BLOCK, dim=-1)[..., : wide.shape[-1]]

    def split(self, scale: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """``uint8 [..., scale_width(K)] -> (factor fp32 [..., 1], e4m3 [..., ceil(K / 16)])``."""
        blocks = scale[..., FACTOR_BYTES : FACTOR_BYTES + int(ceil_div(K, NV_BLOCK))].contiguous()
        return scale[..., :4].contiguous().view(torch.float32), blocks.view(E4M3)


#: By the names that schemes call them by (`QuantScheme.blocks`).
BLOCKS: dict[str, ActivationFormat] = {
    "mxfp8": MxRows("mxfp8_1x32", E4M3, MX_BLOCK, E4M3_MAX, scale_dtype=torch.uint8),
    "nvfp4": NvRows("nvfp4_1x16", torch.uint8, WHOLE, E2M1_MAX, scale_dtype=torch.uint8, pack=2),
}


def blocks_on(scheme: QuantScheme, arch: str) -> ActivationFormat | None:
    """What a device of this architecture multiplies the scheme's weights with as they are stored, None where it cannot.

    Activations that operators are given quantised (`QuantScheme.rows`) are taken as they are.
    """
    return BLOCKS[scheme.blocks] if scheme.blocks is not None and scales_blocks(arch) else None


def _refuse(form: ActivationFormat, static: Tensor | None) -> None:
    """A block has a scale of its own, whatever was calibrated."""
    if static is not None:
        raise fail(form.name, "static", "None", "a tensor", "Blocks have scales of their own.")


def _blocks(wide: Tensor, size: int) -> Tensor:
    """``[..., K] -> [..., ceil(K / size), size]``, zeros at the end."""
    padded: Tensor = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % size)).unflatten(-1, (-1, size))
    return padded


def _magnitude_bits(wide: Tensor) -> Tensor:
    """Bits of fp32 magnitudes as int32, which are in the order of these; NaN above all."""
    return wide.contiguous().view(torch.int32) & 0x7FFFFFFF
