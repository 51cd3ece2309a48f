"""A tensor and everything that decodes it, never apart, and the experts of a layer made of such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from meta.dims import Dim
from meta.schemes import ActivationFormat, Groups, QuantScheme


@dataclass(slots=True)
class Operand:
    """One weight ``[E, N, K]`` (any strides) or activation ``[..., K]``.

    Attributes:
        data: as the scheme stores it.
        scheme: the weight's or the activation format's row; None for activations that are not quantised.
        scales: the row's tensors that decode the data, in its order. One over the halves of a gate|up stack is ``[E,
            2, N groups, K groups]``.
        static: fp32 ``[E, 1, 1]`` of a weight: the scale that the activations of each expert get, or None, for scales
            of their own.
    """

    data: Tensor
    scheme: QuantScheme | ActivationFormat | None
    scales: tuple[Tensor, ...] = ()
    static: Tensor | None = None

    @property
    def listed(self) -> list[Tensor]:
        """The list that operators take."""
        return [*self.scales] if self.static is None else [*self.scales, self.static]

    def dequantized(self) -> Tensor:
        """fp32 when it is quantised, else the data."""
        if self.scheme is None or not self.scales:
            return self.data
        return self.scheme.dequantize(self.data, self.scales)

    @property
    def groups(self) -> list[Groups]:
        """Rows and columns that share an entry of each scale of a weight."""
        return self.scheme.groups_of(self.data, self.scales) if isinstance(self.scheme, QuantScheme) else []

    def of_expert(self, expert: int) -> Tensor:
        """``[N, K]`` of one expert of a weight, as :meth:`dequantized`."""
        return self.of_experts(slice(expert, expert + 1)).dequantized()[0] if self.scales else self.data[expert]

    def of_experts(self, some: slice) -> Operand:
        """Views of some experts of a weight."""
        static = None if self.static is None else self.static[some]
        return Operand(self.data[some], self.scheme, tuple(scale[some] for scale in self.scales), static)


def quantized(rows: Tensor, form: ActivationFormat | None, static: Tensor | None = None) -> Operand:
    """Activations ``[..., K]`` as ``form`` stores them, with ``static`` scales if given; as they are without one."""
    if form is None:
        return Operand(rows, None)
    data, scales = form.quantize(rows, static)
    return Operand(data, form, scales)


class Glu(NamedTuple):
    """An activation with its options filled in: names of :data:`meta.activations.ACTIVATIONS` and
    :data:`meta.dims.GLU_LAYOUTS`.
    """

    activation: str
    alpha: float
    limit: float
    layout: str


@dataclass(slots=True)
class Experts:
    """The weights of one layer and what it computes between its two products.

    Attributes:
        scheme: of all three weights.
        gate_up: ``[E, 2I, H]``; ``[E, I, H]`` of the gate alone beside ``up``, and where there is no gate.
        down: ``[E, H, I]``.
        up: ``[E, I, H]`` when the layout is "separate", else None.
        gate_up_bias, down_bias: ``[E, 2I]`` (``[E, I]`` without a gate) and ``[E, H]``, or None.
    """

    scheme: QuantScheme
    gate_up: Operand
    down: Operand
    up: Operand | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    glu: Glu

    @property
    def count(self) -> Dim:
        """E."""
        return self.gate_up.data.shape[0]
