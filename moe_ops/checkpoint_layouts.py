"""How checkpoints spell a quantised weight: the tensors of one projection as a scheme's row stores them.

A layout is known by the suffixes of its keys, their dtypes and shapes, never by a model's name:

| written by | weight | scales |
| --- | --- | --- |
| gpt-oss | ``_blocks`` uint8 ``[E, N, K / 32, 16]`` | ``_scales`` uint8 ``[E, N, K / 32]`` |
| compressed-tensors, ModelOpt, DeepSeek FP8 | ``weight`` e4m3 | ``weight_scale``, ``weight_scale_inv`` |
| compressed-tensors int | ``weight`` int8 | ``weight_scale``, ``weight_zero_point`` int8 |
| compressed-tensors packed | ``weight_packed`` int32, ``weight_shape`` | the same, zero points in int32 along N |
| compressed-tensors fp4 | ``weight_packed`` uint8 | ``weight_scale``; NVFP4: ``weight_global_scale``, divided by |
| this project | the parameter's name | that with ``_scale`` and so on: :mod:`moe_ops.quantized_state` |
| ModelOpt NVFP4 | ``weight`` uint8 | ``weight_scale``, ``weight_scale_2``, multiplied with |
| ModelOpt, all experts of Llama 4 or gpt-oss | the same, ``[E, K, N]`` | one for all of them, or turned, too |
| torchao, transformers | ``_.._qdata`` | ``_.._scale``, ``_.._zero_point``: :mod:`moe_ops.checkpoint_torchao` |
| DeepSeek MXFP4 | ``weight`` int8 ``[N, K / 2]`` | ``scale`` e8m0 ``[N, K / 32]`` |

DeepSeek's ``weight_scale_inv`` is multiplied with, too, whatever its name says. ``input_scale`` (compressed-tensors,
ModelOpt) is the static scale of the activations in front of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meta.checks import INDEX_DTYPES, fail
from meta.formats import E4M3, E8M0, unpack
from meta.schemes import FLOAT_DTYPES, SCHEMES, QuantScheme, Scale, ceil_div
from moe_ops.checkpoint_own import own_row
from moe_ops.checkpoint_parts import OP, OTHER_LAYOUT, Parts
from moe_ops.checkpoint_torchao import read_torchao

_EXPONENTS = (torch.uint8, E8M0)
#: What helps where a checkpoint has ``[E, K, N]``.
TURN = "Transpose weights and scales to [E, N, K], and save them anew."
#: The schemes of the same bytes that leave activations as they are.
_WEIGHTS_ALONE = {
    **dict.fromkeys(("fp8_tensor", "fp8_channel", "fp8_block128"), "fp8_w8a16"),
    "int8_channel": "int8_w8a16",
}


class Signature(NamedTuple):
    """Scheme, dtypes and shapes of a weight and its scales."""

    scheme: str
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    def __str__(self) -> str:
        return f"{self.scheme} of {', '.join(f'{dtype} {list(shape)}' for dtype, shape in self.tensors)}"


class Stored(NamedTuple):
    """A weight as ``scheme`` stores it: ``[.., N, K / pack]``, each scale ``[.., N groups, K groups]``."""

    scheme: QuantScheme
    data: Tensor
    scales: tuple[Tensor, ...]

    @property
    def signature(self) -> Signature:
        """What all experts of a layer have in common."""
        tensors = (self.data, *self.scales)
        return Signature(self.scheme.name, tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors))


def canonical(parts: Parts, *, halves: bool = False) -> Stored:
    """The weight of ``parts``, whichever layout they have; bytes are viewed, not copied, but those of 8-bit packs.

    What was written here keeps its scheme. Where the checkpoint quantises no activations, nor does the scheme.

    Args:
        parts: of one expert, ``[N, K / pack]``, or stacked, ``[E, N, K / pack]``.
        halves: N is a gate and an up half, each of which may have blocks of its own.

    Raises:
        ValueError: no layout of this module; names the key, what was expected and what is there.
    """
    kind = next((kind for kind in ("blocks", "packed", "qdata", "") if kind in parts), None)
    if kind is None:
        rule = "stored beside the weight that it belongs to"
        raise fail(OP, parts.any_key(), rule, sorted(parts.keys.values()), OTHER_LAYOUT)
    if kind == "qdata":
        name, data, scales = read_torchao(parts)
        parts.check_all_taken()
        return Stored(SCHEMES[name], data, scales)
    key, data = parts.take(kind)
    reader = _READERS.get((kind, data.dtype))
    if reader is None:
        rule = " or ".join(str(dtype) for known, dtype in _READERS if known == kind)
        cure = "Leave layers that are not quantised out by the filter; load_state_dict loads them."
        raise fail(OP, key, rule, data.dtype, cure if data.dtype in FLOAT_DTYPES else "Other codes have no scheme.")
    if data.dim() != 2 + parts.stacked + (kind == "blocks"):
        raise fail(OP, key, f"[{'E, ' if parts.stacked else ''}N, K], K packed or not", list(data.shape))
    row = own_row(parts, data, halves)
    stored = reader(parts, data, halves) if row is None else _own(parts, data, row)
    if parts.weights_alone and row is None:
        stored = stored._replace(scheme=SCHEMES[_WEIGHTS_ALONE.get(stored.scheme.name, stored.scheme.name)])
    if stored.scheme.rows is not None and "input_scale" in parts:
        stored = stored._replace(scales=(*stored.scales, _static(parts, stored)))
    parts.check_all_taken()
    return stored


def _static(parts: Parts, stored: Stored) -> Tensor:
    """fp32 ``[.., 1, 1]``: the static scale of the activations of each expert.

    Raises:
        ValueError: the scheme has none, or there are others or more than that.
    """
    (key, given), scheme, leading = parts.take("input_scale"), stored.scheme, stored.data.shape[:-2]
    scale = given.reshape(()).expand(leading).contiguous() if given.numel() == 1 else given
    if scheme.static_rows is None:
        rule = f"absent for scheme {scheme.name!r}, which computes scales of activations for every token"
        raise fail(OP, key, rule, "it", "Quantise the activations of the checkpoint dynamically.")
    if scale.numel() != leading.numel() or scale.dtype not in FLOAT_DTYPES:
        raise fail(OP, key, f"one number for each expert, {list(leading)}", f"{given.dtype} {list(given.shape)}")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        wrong = scale[~(scale.isfinite() & (scale > 0))].float()
        raise fail(OP, key, "finite and larger than 0", float(wrong[0]), "Calibrate the checkpoint anew.")
    if "input_zero_point" in parts:
        zero_key, zero = parts.take("input_zero_point")
        if bool(zero.float().any()):
            raise fail(OP, zero_key, f"0 for scheme {scheme.name!r}", "another number")
    return scale.float().reshape(*leading, 1, 1)


def _own(parts: Parts, data: Tensor, row: QuantScheme) -> Stored:
    scales = [spec.name for spec in row.scales if spec.name in parts and not spec.of_rows]
    return Stored(row, data, tuple(parts.take(name)[1] for name in scales))


def _blocks(parts: Parts, data: Tensor, halves: bool) -> Stored:
    if data.shape[-1] != 16:
        raise fail(OP, parts.keys["blocks"], "[E, N, K / 32, 16]", list(data.shape))
    return _stored("mxfp4", data.flatten(-2), parts.take("scales"))


def _fp4(parts: Parts, data: Tensor, halves: bool) -> Stored:
    key, scale = parts.take("scale")
    if scale.dtype in _EXPONENTS:
        return _stored("mxfp4", data, (key, scale))
    if scale.dtype != E4M3:
        raise fail(OP, key, "float8_e4m3fn for NVFP4, uint8 or float8_e8m0fnu for MXFP4", scale.dtype)
    whole_key, whole = parts.take("global_scale", "scale_2")
    if whole.dtype not in FLOAT_DTYPES:
        raise fail(OP, whole_key, "bfloat16, float16, float32 or float64", whole.dtype)
    if "packed" in parts and "global_scale" in parts:  # of compressed-tensors: beside a plain weight it is a factor
        whole = whole.double().reciprocal()  # with which products are the quotients by it
    return _stored("nvfp4", data, (key, scale), (whole_key, whole))


def _fp8(parts: Parts, data: Tensor, halves: bool) -> Stored:
    key, scale = parts.take("scale", "scale_inv")
    names: tuple[str, ...] = ("fp8_block128", "fp8_channel", "fp8_tensor")
    if scale.dtype in _EXPONENTS:
        names = ("mxfp8", "fp8_block128")
    elif scale.dim() < data.dim():  # a single block is written as [1, 1], a whole weight's scale is not
        names = ("fp8_tensor", "fp8_channel")
    (N, K), grid = data.shape[-2:], _grid(key, scale, data)
    for name in names:
        spec = SCHEMES[name].scales[0]
        if not fits(spec, grid, N, K, halves):
            continue
        if name == "fp8_block128":
            _check_border(key, grid, data, spec, halves)
            scale = scale.view(E8M0) if scale.dtype == torch.uint8 else scale
        return _stored(name, data, (key, scale))
    rule = f"{' or '.join(str(SCHEMES[name].scales[0]) for name in names)} for a weight {list(data.shape)}"
    is_turned = any(fits(SCHEMES[name].scales[0], grid.mT, K, N, False) for name in names)
    cure = (
        f"They fit a weight that is stored transposed. {TURN}" if is_turned else "Blocks of other sizes have no scheme."
    )
    raise fail(OP, key, rule, list(scale.shape), cure)


def _int8(parts: Parts, data: Tensor, halves: bool) -> Stored:
    key, scale = parts.take("scale")
    if scale.dtype in _EXPONENTS:
        return _stored("mxfp4", data.view(torch.uint8), (key, scale))
    by_row = _rows_of(key, scale, data)
    if by_row.shape[-1] == 1 and "zero_point" not in parts and not parts.has_zero_points:
        return _stored("int8_channel", data, (key, by_row))
    return _stored("int8_w8a16", data, (key, by_row), *_zero_points(parts, data, scale, lambda zero: zero))


def _packed_integers(parts: Parts, data: Tensor, halves: bool) -> Stored:
    columns = _packed_columns(parts, data, halves)
    bits = next((bits for bits in (4, 8) if data.shape[-1] == ceil_div(columns * bits, 32)), None)
    if bits is None or columns * bits % 8:
        rule = f"[.., N, K / 8] or [.., N, K / 4] of 4 or 8 bits for K = {columns}"
        raise fail(OP, parts.keys["packed"], rule, list(data.shape), "Other widths have no scheme.")
    stored = data.contiguous().view(torch.uint8)[..., : columns * bits // 8]
    key, scale = parts.take("scale")
    name, stored = ("int4_w4a16", stored) if bits == 4 else ("int8_w8a16", _signed(stored))
    rows = _grid(key, scale, data).shape[-2]  # those that have zero points: all, or one for a whole weight

    def zero_points(packed: Tensor) -> Tensor:
        codes = packed.transpose(-1, -2).contiguous().view(torch.uint8)
        codes = unpack(codes) if bits == 4 else _signed(codes)
        return codes[..., :rows].transpose(-1, -2).contiguous()

    packed_rows = -(-rows * bits // 32)
    zeros = _zero_points(parts, data, scale, zero_points, packed_rows)
    return _stored(name, stored, (key, _rows_of(key, scale, data)), *zeros)


def _packed_columns(parts: Parts, data: Tensor, halves: bool) -> int:
    """K, as ``weight_shape`` says it, ``[2]`` or one for each expert.

    Raises:
        ValueError: it is of another dtype or form, experts differ, or its N is not that of the weight.
    """
    key, shape = parts.take("shape")
    N = data.shape[-2]
    if shape.dtype not in INDEX_DTYPES or shape.shape not in ((2,), (*data.shape[:-2], 2)):
        rule = f"integers, {' or '.join(str([*form, 2]) for form in dict.fromkeys(((), (*data.shape[:-2],))))}"
        raise fail(OP, key, rule, f"{shape.dtype} {list(shape.shape)}")
    said = {(int(rows), int(columns)) for rows, columns in shape.view(-1, 2).tolist()}
    ((rows, columns), *others) = said
    if others or rows not in ((N, N // 2) if halves else (N,)):
        raise fail(OP, key, f"[N, K] with N = {N}", " and ".join(str([*one]) for one in sorted(said)))
    return columns


def _signed(stored: Tensor) -> Tensor:
    """int8 of codes that 128 was added to."""
    return stored.bitwise_xor(128).view(torch.int8)


def _zero_points(
    parts: Parts, data: Tensor, scale: Tensor, decode: Callable[[Tensor], Tensor], packed_rows: int | None = None
) -> list[tuple[str, Tensor]]:
    """The optional scale, in the codes of the weight: one for each entry of ``scale``.

    Args:
        packed_rows: what these take along N, of several in an int32; None for int8, one in each.
    """
    if "zero_point" not in parts and not parts.has_zero_points:
        return []
    key, zero = parts.take("zero_point")
    dtype = torch.int8 if packed_rows is None else torch.int32
    if zero.dtype != dtype:
        raise fail(OP, key, f"{dtype} beside a weight of {data.dtype}", zero.dtype)
    wanted, found = list(_grid(key, scale, data).shape), _grid(key, zero, data)
    wanted[-2] = wanted[-2] if packed_rows is None else packed_rows
    if list(found.shape) != wanted:
        raise fail(OP, key, f"{wanted} beside scales {list(scale.shape)}", list(zero.shape))
    return [(key, _rows_of(key, decode(found), data))]


_READERS: dict[tuple[str, torch.dtype], Callable[[Parts, Tensor, bool], Stored]] = {
    ("blocks", torch.uint8): _blocks,
    ("packed", torch.int32): _packed_integers,
    ("packed", torch.uint8): _fp4,
    ("", torch.uint8): _fp4,
    ("", E4M3): _fp8,
    ("", torch.int8): _int8,
}


def _stored(name: str, data: Tensor, *scales: tuple[str, Tensor]) -> Stored:
    """``data`` with scales in the order of the row, in a dtype that it has: half precision is widened, which is exact.

    Raises:
        ValueError: a scale of another dtype.
    """
    row = SCHEMES[name]
    found = []
    for spec, (key, scale) in zip(row.scales, scales, strict=False):
        if scale.dtype not in spec.dtypes and scale.dtype in (torch.float16, torch.bfloat16):
            scale = scale.float()
        if scale.dtype not in spec.dtypes:
            raise fail(OP, key, " or ".join(str(dtype) for dtype in spec.dtypes), scale.dtype)
        found.append(_grid(key, scale, data))
    return Stored(row, data, tuple(found))


def _grid(key: str, scale: Tensor, data: Tensor) -> Tensor:
    """``[.., N groups, K groups]``: dimensions of 1 that a checkpoint leaves out are put back at the end.

    Raises:
        ValueError: it has more dimensions than the weight, or other experts: beside a numbered expert's weight, what
            has a dimension of experts would be taken for the scale of all.
    """
    leading = data.shape[:-2]
    if scale.dim() < 2 and scale.numel() == 1:  # of a stack: one number for all experts
        return scale.reshape(()).expand(*leading, 1, 1).contiguous()
    grid = scale.reshape(*scale.shape, *(1,) * (data.dim() - scale.dim()))
    if grid.shape[:-2] != leading:
        rule = f"[{''.join(f'E={size}, ' for size in leading)}N groups, K groups] beside a weight {list(data.shape)}"
        raise fail(OP, key, rule, list(scale.shape))
    return grid


def _rows_of(key: str, scale: Tensor, data: Tensor) -> Tensor:
    """``[.., N, K groups]``, one entry for a whole weight written for each of its rows."""
    grid = _grid(key, scale, data)
    if grid.shape[-2] == 1:
        grid = grid.expand(*grid.shape[:-2], data.shape[-2], grid.shape[-1]).contiguous()
    return grid


def fits(spec: Scale, grid: Tensor, N: int, K: int, halves: bool) -> bool:
    """``grid`` is a form of ``spec`` over a weight of N rows and K columns, or over each of its halves."""
    if spec.groups_of(grid.shape, N, K) is not None:
        return True
    rows, columns = grid.shape[-2:]
    return halves and rows % 2 == 0 and spec.groups_of((rows // 2, columns), N // 2, K) is not None


def _check_border(key: str, grid: Tensor, data: Tensor, spec: Scale, halves: bool) -> None:
    """The number of scales says whether blocks start again at the up half, or it does not matter.

    Raises:
        ValueError: as many rows of blocks either way, at different places.
    """
    half, rows = data.shape[-2] // 2, spec.forms[0][0]
    if halves and half % rows and 2 * ceil_div(half, rows) == ceil_div(2 * half, rows):
        rule = f"of gate and up apart where {rows} does not divide I = {half}"
        raise fail(OP, key, rule, list(grid.shape), "Both have as many blocks whether these start again or run on.")
