"""What a weight that stands for quantised bytes holds: the scheme, and where its operands are.

The one place that knows the tensor classes by which quantised weights reach a model. The answer is made of types,
attributes, dtypes and the shapes of scales, never of the names of models, and is asked of real tensors and of fake ones
alike. torchao's are known by what they carry, so that nothing of it is imported:

| torchao | a scale for each | activations | read as |
| --- | --- | --- | --- |
| ``Float8Tensor`` | row, block of 128 x 128, expert, stack | as they are | ``fp8_w8a16`` |
| ``Float8Tensor`` | row; expert, stack | fp8 | ``fp8_channel``; ``fp8_tensor`` |
| ``Float8Tensor`` | block of 128 x 128 | fp8, groups of 128 | ``fp8_block128`` |
| ``Int8Tensor`` | row, group of columns | as they are | ``int8_w8a16``, zero points included |
| ``Int8Tensor`` | row | int8, symmetric | ``int8_channel`` |
| ``IntxUnpackedToInt8Tensor`` | row, group of columns | as they are | ``int8_w8a16``, zero points of int8 |

One that lists anything else of itself which is set, or scales of dtypes that the scheme has not, is refused.

Dynamic scales of a whole tensor of activations are computed for every token, as the schemes say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta.checks import fail
from meta.formats import E4M3
from meta.schemes import SCHEMES, WHOLE
from moe_ops.ops import PLAIN
from moe_ops.quantized import QuantizedWeight

_ATEN = torch.ops.aten
_TRANSPOSE = (_ATEN.transpose.int, (1, 2))
#: What torchao's tensors list of themselves, and what of it is read here or changes no number of a product.
_LISTS = tuple(f"{needed}tensor_{kind}_names" for needed in ("", "optional_") for kind in ("data", "attribute"))
_KNOWN = frozenset(
    {"qdata", "scale", "zero_point", "block_size", "act_quant_kwargs"}
    | {"dtype", "target_dtype", "mm_config", "kernel_preference", "reduce_range"}
)


class Part(NamedTuple):
    """An inner tensor of a container, and what makes an operand of it.

    Attributes:
        name: of the attribute.
        calls: operators with their arguments behind the tensor: views.
    """

    name: str
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

    def of(self, weight: Tensor) -> Tensor:
        """The operand."""
        value = getattr(weight, self.name)
        for operator, arguments in self.calls:
            value = operator(value, *arguments)
        operand: Tensor = value
        return operand


@dataclass(frozen=True)
class Container:
    """How a quantised weight is read.

    Attributes:
        scheme: a name of :data:`meta.schemes.SCHEMES`.
        data: the bytes ``[E, N, K / pack]``.
        scales: what the scheme's row lists, in its order.
        transposed: the weight shows itself as ``[E, K, N]``.
    """

    scheme: str
    data: Part
    scales: tuple[Part, ...]
    transposed: bool


@dataclass(frozen=True)
class Unread:
    """A container that no scheme reads.

    Attributes:
        what: it is, for the end of a sentence.
        cure: what to do about it.
    """

    what: str
    cure: str


def read(weight: Tensor | None) -> Container | Unread | None:
    """How ``weight`` is read; None for one that is no container known here."""
    if isinstance(weight, QuantizedWeight):
        # Dynamo reads attributes of a wrapper tensor, and calls none of its methods.
        names = [spec.name for spec in SCHEMES[weight.scheme].scales if getattr(weight, spec.name) is not None]
        return Container(weight.scheme, Part("stored"), tuple(map(Part, names)), weight.transposed)
    if type(weight) in PLAIN or not isinstance(weight, Tensor):
        return None
    if all(hasattr(weight, name) for name in ("qdata", "scale", "block_size")):
        return _torchao(weight)
    return None


class Unpacked(NamedTuple):
    """What the weights of a call hold.

    Attributes:
        scheme: of all of them.
        data: bytes ``[E, N, K / pack]`` by the arguments' names; None for a weight that is left out.
        scales: what the scheme's row lists, in its order, by the same names; none for a weight that is left out.
    """

    scheme: str
    data: dict[str, Any]
    scales: dict[str, list[Tensor]]


def are_plain(*weights: Any) -> bool:
    """Whether none of the weights, each of them a tensor or None, can be a container: what most calls pay for these."""
    for weight in weights:
        if weight is not None and type(weight) not in PLAIN:
            return False
    return True


def unpacked(
    op: str,
    weights: Mapping[str, Any],
    scheme: str | None,
    scales: Mapping[str, Sequence[Tensor]],
    *,
    static: bool = False,
) -> Unpacked | None:
    """What the weights hold, where one of them is a container; else None.

    Args:
        op: for messages.
        weights: those of one call by the names of its arguments; None for one that is left out.
        scheme: as given beside them.
        scales: as given beside them, by the names of the arguments.
        static: whether the call quantises its rows, and may do so with a static scale that a weight brings.

    Raises:
        ValueError: a scheme or scales beside containers, which bring their own; one that no scheme reads, that is shown
            transposed, or that requires grad where gradients are recorded; weights that are not all quantised by one
            scheme; a static scale that is not wanted.
    """
    found = {name: read(weight) for name, weight in weights.items()}
    if all(container is None for container in found.values()):
        return None
    for name, value in (("scheme", scheme), *scales.items()):
        if value:
            got = value if isinstance(value, str) else f"{len(value)} tensors"
            raise fail(op, name, "left out beside quantised weights", got, "They bring their own.")
    first: str | None = None
    data: dict[str, Any] = dict.fromkeys(weights)
    parts: dict[str, list[Tensor]] = {name: [] for name in weights}
    for name, weight in weights.items():
        container = found[name]
        if weight is None:
            continue
        if isinstance(container, Unread):
            raise fail(op, name, "stored in a scheme", container.what, container.cure)
        if weight.requires_grad and torch.is_grad_enabled():
            rule, cure = "without requires_grad: quantised weights have no gradient", "Set requires_grad = False on it."
            raise fail(op, name, rule, True, cure)
        first = container.scheme if first is None and container is not None else first
        if container is None or container.scheme != first:
            got = "a plain tensor" if container is None else f"scheme {container.scheme!r}"
            raise fail(op, name, "quantised as the other weights are", got, "All of them share one scheme.")
        if container.transposed:
            raise fail(op, name, "[E, N, K]", f"a transposed {type(weight).__name__}", "Pass weight.transpose(1, 2).")
        if not static and SCHEMES[container.scheme].has_static(len(container.scales)):
            rule, cure = "without a static scale of rows, which are quantised before", "Make one of weight.scales[:-1]."
            raise fail(op, name, rule, f"a {type(weight).__name__} with {container.scales[-1].name}", cure)
        data[name] = container.data.of(weight)
        parts[name] = [part.of(weight) for part in container.scales]
    return None if first is None else Unpacked(first, data, parts)


def unpacked_layer(
    op: str,
    projections: Sequence[Any],
    scheme: str | None,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    static: bool,
) -> tuple[Any, ...]:
    """``(gate_up_proj, down_proj, up_proj, scheme, gate_up_scales, down_scales)`` of a layer, where its projections are
    containers: what they hold. See :func:`unpacked`.

    Args:
        projections: the first three.
        first, second: the last two, as given beside them.
        static: of :func:`unpacked`.
    """
    weights = dict(zip(("gate_up_proj", "down_proj", "up_proj"), projections, strict=True))
    found = unpacked(op, weights, scheme, {"gate_up_scales": first, "down_scales": second}, static=static)
    if found is None:
        return (*weights.values(), scheme, first, second)
    scales = found.scales
    return (*found.data.values(), found.scheme, scales["gate_up_proj"] + scales["up_proj"], scales["down_proj"])


def _torchao(weight: Any) -> Container | Unread:
    """A stack of all experts, ``[E, N, K]`` or ``[E, K, N]``, by the axis that a row of scales runs along."""
    kind, data, scale = type(weight).__name__, weight.qdata, weight.scale
    if weight.dim() != 3 or data.shape != weight.shape or scale.dim() != 3 or isinstance(weight.block_size, int):
        return Unread(f"torchao's {kind} of a form that no scheme has", "Use its Float8Tensor or Int8Tensor.")
    activations = getattr(weight, "act_quant_kwargs", None)
    reason = _unlike_ours(weight, activations)
    if reason is not None:
        return Unread(f"torchao's {kind} with {reason}", "Quantise its activations dynamically and symmetrically.")
    for transposed in (False, True):
        found = _scheme(weight, scale.shape, activations, transposed)
        if found is not None:
            scheme, names = found
            for spec, name in zip(SCHEMES[scheme].scales, names, strict=False):
                dtype = getattr(weight, name).dtype
                if dtype not in spec.dtypes:
                    wanted = " or ".join(str(known) for known in spec.dtypes)
                    return Unread(f"torchao's {kind} with {name} of {dtype}", f"Quantise it with {name} of {wanted}.")
            calls = (_TRANSPOSE,) if transposed else ()
            shared = scale.shape[0] == 1 and data.shape[0] != 1
            spread = (*calls, (_ATEN.expand.default, ([data.shape[0], -1, -1],))) if shared else calls
            return Container(scheme, Part("qdata", calls), tuple(Part(name, spread) for name in names), transposed)
    said = f"torchao's {kind} of {data.dtype} with scales {list(scale.shape)} of a weight {list(data.shape)}"
    if activations is not None:
        said += f" and activations by {getattr(activations, 'granularity', None)}"
    return Unread(said, "Quantise it by PerRow(), PerTensor() or PerBlock([1, 128, 128]) of the contracted dimension.")


def _unlike_ours(weight: Any, activations: Any) -> str | None:
    """What it does that no scheme does: whatever is not known here may change numbers."""
    for name in (name for names in _LISTS for name in getattr(type(weight), names, ())):
        if name not in _KNOWN and getattr(weight, name, None) is not None:
            return str(name)
    for name in ("hp_value_lb", "hp_value_ub"):
        if getattr(activations, name, None) is not None:
            return f"bounds of its activations' scales, {name}"
    mapping = getattr(getattr(activations, "mapping_type", None), "name", "SYMMETRIC")
    return None if mapping.startswith("SYMMETRIC") else f"activations by an {mapping.lower()} mapping"


def _scheme(weight: Any, sizes: torch.Size, activations: Any, transposed: bool) -> tuple[str, list[str]] | None:
    """The scheme, and the attributes that its row lists."""
    (experts, rows, columns), (E, N, K) = sizes, weight.shape
    if transposed:
        (rows, columns), (N, K) = (columns, rows), (K, N)
    if experts not in (1, E):
        return None
    if weight.qdata.dtype == torch.int8:
        return _integers(weight, (rows, columns), (N, K), activations)
    if weight.qdata.dtype != E4M3:
        return None
    names = ["fp8_w8a16"] if activations is None else ["fp8_tensor", "fp8_channel", "fp8_block128"]
    for name in names:
        row = SCHEMES[name]
        form = row.scales[0].groups_of((rows, columns), N, K)
        group = WHOLE if row.rows is None else row.rows.group
        if form is not None and (activations is None or _group(activations, E4M3) == group):
            return name, ["scale"]
    return None


def _integers(
    weight: Any, grid: tuple[int, int], sizes: tuple[int, int], activations: Any
) -> tuple[str, list[str]] | None:
    name = "int8_w8a16" if activations is None else "int8_channel"
    if SCHEMES[name].scales[0].groups_of(grid, *sizes) is None:
        return None
    if activations is not None:  # whose products take weights without a zero point
        return (name, ["scale"]) if _group(activations, torch.int8) == WHOLE else None
    return name, ["scale"] if getattr(weight, "zero_point", None) is None else ["scale", "zero_point"]


def _group(activations: Any, dtype: torch.dtype) -> int | None:
    """Columns of an activation that share a scale; None for what no scheme has."""
    if getattr(activations, "float8_dtype", dtype) != dtype:
        return None
    granularity: Any = getattr(activations, "granularity", None)
    if hasattr(granularity, "group_size"):
        return int(granularity.group_size)
    known = type(granularity).__name__ in ("PerRow", "PerTensor", "PerToken")
    return WHOLE if known and getattr(granularity, "dim", -1) == -1 else None
