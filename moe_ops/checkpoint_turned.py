"""Stacks that a checkpoint stores ``[E, K, N]``, as some models hold them: ModelOpt's of Llama 4 and of gpt-oss.

Their scales say so by their shapes or, where one number is that of a whole weight, the layer's weights do together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta.checks import fail
from meta.formats import E4M3, E8M0
from meta.schemes import SCHEMES
from moe_ops.checkpoint_files import Members
from moe_ops.checkpoint_layouts import fits
from moe_ops.checkpoint_parts import OP, Parts
from moe_ops.stacked import orientations

#: Whose scales may lie beside codes of a dtype that name no layout by their key.
_ROWS = {E4M3: ("fp8_w8a16", "mxfp8"), torch.uint8: ("nvfp4", "mxfp4"), torch.int8: ("int8_w8a16", "mxfp4")}
_NOTHING: frozenset[str] = frozenset()
_WEIGHT = frozenset({"", "qdata"})
_SCALES = ("scale", "scale_inv")
#: ModelOpt turns blocks with the weight they are of, and leaves the scales of channels ``[E, N]``.
_ALL = _WEIGHT | {*_SCALES, "zero_point"}


def turn_stacks(weights: dict[str, Members]) -> None:
    """Have the stacks of a layer read as ``[E, N, K]`` that are stored the other way round, all of them or none.

    Raises:
        ValueError: scales say that they are stored so, and the shapes of the weights that they are not, or vice versa;
            the key of a scale is named.
    """
    stacks = [(parts, name == "gate_up_proj") for name, members in weights.items() for parts in members[0]]
    if not all(parts.stacked and _WEIGHT & parts.keys.keys() for parts, _ in stacks):
        return
    ways = [_ways(parts, halves) for parts, halves in stacks]
    as_stored, turned = all(_NOTHING in way for way in ways), all(any(way) for way in ways)
    if not as_stored and not turned:  # some are no stacks, or of no scales that are known here
        return
    said = orientations([_weight(parts) for parts, _ in stacks])
    if as_stored != turned and {*said} == {as_stored}:  # True is said of weights that are turned
        parts, key = next((parts, key) for parts, _ in stacks for key in _SCALES if key in parts)
        rule = f"along K of weights [E, {'K, N' if as_stored else 'N, K'}], which the layer's are by their shapes"
        cure = "Quantise along K: no scheme has a scale for each column."
        raise fail(OP, parts.keys[key], rule, f"{[*parts.like(key).shape]} beside {[*_weight(parts).shape]}", cure)
    if not turned or (as_stored and {*said} != {True}):
        return
    alike = next((way for way in (_ALL, _WEIGHT) if all(way in one for one in ways)), None)
    for (parts, _), way in zip(stacks, ways, strict=True):  # a square of blocks is stored as those of the others are
        parts.turned = alike or next(filter(None, way))


def _ways(parts: Parts, halves: bool) -> list[frozenset[str]]:
    """The parts that may be turned together, as far as scales of the known layouts fit."""
    data, key = _weight(parts), next((part for part in _SCALES if part in parts), None)
    if data.dim() != 3 or data.dtype not in _ROWS or key is None:
        return []
    scale = parts.like(key)
    grids = {_NOTHING: scale}
    if scale.dim() > 2:
        grids[_ALL] = scale.mT
    if "qdata" not in parts:  # of torchao, whose scales lie as the weight does
        grids[_WEIGHT] = scale
    return [way for way, grid in grids.items() if _fit(grid, data.mT if way else data, data.dtype, halves)]


def _weight(parts: Parts) -> Tensor:
    return parts.like(next(part for part in _WEIGHT if part in parts))


def _fit(scale: Tensor, data: Tensor, dtype: torch.dtype, halves: bool) -> bool:
    grid = scale.reshape(*scale.shape, *(1,) * (3 - scale.dim()))
    if grid.dim() != 3 or grid.shape[1:] == (1, 1):
        return grid.dim() == 3
    read_as = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.uint8: E8M0}
    kind = read_as.get(scale.dtype, scale.dtype)
    rows = [SCHEMES[name] for name in _ROWS[dtype]]
    return any(
        kind in row.scales[0].dtypes and fits(row.scales[0], grid, data.shape[-2], data.shape[-1] * row.pack, halves)
        for row in rows
    )
