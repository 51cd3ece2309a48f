"""How codes are stored and what they mean: one row per code. A row's NAME is what kernels choose their decoder by.

Two codes of four bits share a byte, the low nibble first: the canonical layout of compressed-tensors' int4 and of OCP's
and NVIDIA's e2m1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E8M0 = torch.float8_e8m0fnu
#: Magnitudes of the three low bits of e2m1 (OCP Microscaling Formats v1.0, table 4).
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Code:
    """One code of a weight's elements.

    Attributes:
        name: what kernels know it by.
        dtype: of a stored element.
        pack: codes in it, along K.
        largest: the largest magnitude on both sides of 0.
        decode: ``stored [..., K / pack] -> fp32 [..., K]``.
        encode: ``fp32 [..., K], in units of the scale -> stored``, rounded to nearest, ties to even, saturating.
        zero: the code that means 0 where no zero point is given, of codes without a sign; ``decode`` subtracts it.
    """

    name: str
    dtype: torch.dtype
    pack: int
    largest: float
    decode: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]
    zero: int = 0


def unpack(stored: Tensor) -> Tensor:
    """The nibbles ``[..., K]`` of bytes ``[..., K / 2]``, as uint8."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def pack(nibbles: Tensor) -> Tensor:
    """Bytes ``[..., ceil(K / 2)]`` of nibbles ``[..., K]``."""
    if nibbles.shape[-1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    pairs = nibbles.to(torch.uint8).unflatten(-1, (-1, 2))
    packed: Tensor = pairs[..., 0] | pairs[..., 1] << 4
    return packed


def exponents(scale: Tensor) -> Tensor:
    """fp32 powers of two from e8m0 or from the bytes that it is; 255 is NaN."""
    if scale.dtype != torch.uint8:
        return scale.float()
    # Not by a view as e8m0, of which Inductor makes no tensor on a CPU. fp32 has these exponents in front of 23 bits;
    # of the least, 2^-127, and of NaN the first of those bits is set.
    code = scale.int()
    powers: Tensor = (code << 23 | ((code == 0) | (code == 255)).int() << 22).view(torch.float32)
    return powers


def _decode_e2m1(stored: Tensor) -> Tensor:
    # The table is computed: torch.export takes no constants of a Python list that appear inside of a wrapper tensor.
    code = torch.arange(16, device=stored.device)
    mantissa, exponent = code & 1, code >> 1 & 3
    magnitude = torch.ldexp((mantissa + 2 * (exponent > 0)).float(), exponent.clamp(min=1) - 2)
    wide: Tensor = torch.where(code > 7, -magnitude, magnitude)[unpack(stored).long()]
    return wide


def _encode_e2m1(value: Tensor) -> Tensor:
    # Rounding x / step to an integer, ties to even, and going back is rounding to e2m1; the step is that of the binade:
    # a half, one and two. By products, which are exact whoever compiles them.
    magnitude = value.abs().clamp(max=6.0)
    upper = torch.where(magnitude < 4.0, magnitude.round(), (magnitude * 0.5).round() * 2.0)
    rounded = torch.where(magnitude < 2.0, (magnitude * 2.0).round() * 0.5, upper)
    table = torch.tensor(E2M1_VALUES, device=value.device)
    code = torch.searchsorted(table, rounded.contiguous())
    return pack(code + 8 * torch.signbit(value))


def _integers(bits: int) -> Callable[[Tensor], Tensor]:
    most = 2 ** (bits - 1) - 1
    return lambda value: value.round().clamp(-most - 1, most)


CODES: dict[str, Code] = {
    row.name: row
    for row in (
        Code("e4m3", E4M3, 1, E4M3_MAX, Tensor.float, lambda v: v.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)),
        Code("int8", torch.int8, 1, 127.0, Tensor.float, lambda v: _integers(8)(v).to(torch.int8)),
        Code(
            "int4",
            torch.uint8,
            2,
            7.0,
            lambda stored: unpack(stored).float() - 8,
            lambda v: pack(_integers(4)(v) + 8),
            zero=8,
        ),
        Code("e2m1", torch.uint8, 2, 6.0, _decode_e2m1, _encode_e2m1),
    )
}
