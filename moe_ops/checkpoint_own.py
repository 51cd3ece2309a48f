"""Weights in the keys that :mod:`moe_ops.quantized_state` writes, which do not name their scheme."""

from __future__ import annotations

from torch import Tensor

from meta.checks import fail
from meta.schemes import SCHEMES, QuantScheme, Scale
from moe_ops.checkpoint_parts import OP, Parts


def own_row(parts: Parts, data: Tensor, halves: bool) -> QuantScheme | None:
    """The scheme of a weight whose keys are the parameter's name, with ``_scale`` and so on behind it.

    Args:
        parts: of the weight, whose scales are read.
        data: ``[E, N, K / pack]``.
        halves: N is a gate and an up half, each of which may have groups of its own.

    Returns:
        The only row that has these scales in their dtypes and shapes; None for keys of others, and for shapes of none.

    Raises:
        ValueError: there are more such rows, which differ in what becomes of activations.
    """
    if not parts.stacked or parts.keys.get("") != parts.name or parts.keys.get("scale") != f"{parts.name}_scale":
        return None
    scales = {part: parts.read(part) for part in parts.of_the_weight - {""}}
    rows = [row for row in SCHEMES.values() if row.quantized and _is_of(row, data, scales, halves)]
    rows = [row for row in rows if row.static_rows is not None or "input_scale" not in parts]
    if len(rows) > 1:
        names = " or ".join(repr(row.name) for row in rows)
        cure = "Call moe_ops.quantize_ with the scheme that it was written with, then load_state_dict."
        raise fail(OP, parts.keys[""], "of a scheme that its dtypes and shapes tell", names, cure)
    return rows[0] if rows else None


def _is_of(row: QuantScheme, data: Tensor, scales: dict[str, Tensor], halves: bool) -> bool:
    """The scales are those of ``row``, and none of them is missing."""
    specs = {spec.name: spec for spec in row.scales if not spec.of_rows}
    least = {name for name, spec in specs.items() if not spec.optional}
    if data.dtype != row.weight_dtype or not least <= scales.keys() <= specs.keys():
        return False
    E, N, K = *data.shape[:2], data.shape[2] * row.pack
    return all(
        scale.shape[:1] == (E,) and _is_scale(specs[name], scale, N, K, halves) for name, scale in scales.items()
    )


def _is_scale(spec: Scale, scale: Tensor, N: int, K: int, halves: bool) -> bool:
    if scale.dtype not in spec.dtypes:
        return False
    if scale.dim() == 4:
        return halves and scale.shape[1] == 2 and spec.groups_of(scale.shape, N // 2, K) is not None
    return scale.dim() == 3 and spec.groups_of(scale.shape, N, K) is not None
