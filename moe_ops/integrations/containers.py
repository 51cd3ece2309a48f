"""What a weight that stands for quantised bytes holds: the scheme, and where its operands are.

The one place that knows the tensor classes by which quantised weights reach a model. The answer is made of types,
dtypes and the shapes of scales, never of the names of models, and is asked of real tensors and of fake ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meta.schemes import SCHEMES
from moe_ops.quantized import QuantizedWeight


@dataclass(frozen=True)
class Container:
    """How a quantised weight is read.

    Attributes:
        scheme: a name of :data:`meta.schemes.SCHEMES`.
        data: the attribute that holds the bytes ``[E, N, K / pack]``.
        scales: the attributes that hold what the scheme's row lists, in its order.
        transposed: the weight shows itself as ``[E, K, N]``.
    """

    scheme: str
    data: str
    scales: tuple[str, ...]
    transposed: bool


def read(weight: Tensor | None) -> Container | None:
    """How ``weight`` is read; None for one that is no container known here."""
    if isinstance(weight, QuantizedWeight):
        # Dynamo reads attributes of a wrapper tensor, and calls none of its methods.
        names = [spec.name for spec in SCHEMES[weight.scheme].scales if getattr(weight, spec.name) is not None]
        return Container(weight.scheme, "stored", tuple(names), weight.transposed)
    return None
