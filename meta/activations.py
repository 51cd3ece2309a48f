"""Expert activations: one row each, with its eager body and derivative.

A gated expert computes ``gate_fn(gate) * up_fn(up)`` from the two halves of its first projection; a non-gated expert
computes ``gate_fn`` alone. Bodies take and return the accumulation dtype (fp32, or fp64 as an oracle).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

GateFn = Callable[[Tensor, float, float], Tensor]
GateGrad = Callable[[Tensor, Tensor, float, float], Tensor]


def _clamp_passes_at_bounds() -> bool:
    """Whether torch's clamp has a gradient where its argument is a bound. In forward mode, whose formula is the same: a
    backward starts threads that stay, after which a process may not fork.
    """
    one = torch.ones((), device="cpu")
    with forward_ad.dual_level():
        return bool(forward_ad.unpack_dual(forward_ad.make_dual(one, one).clamp(max=1.0)).tangent)


with ThreadPoolExecutor(1) as thread:  # which is under none of the modes that this may be imported under
    #: Up to torch 2.13 it has.
    CLAMP_PASSES_AT_BOUNDS = thread.submit(_clamp_passes_at_bounds).result()


def _passes(value: Tensor, limit: float) -> Tensor:
    """Where ``value.clamp(max=limit)`` has a gradient."""
    return value <= limit if CLAMP_PASSES_AT_BOUNDS else value < limit


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        name: the name that crosses operator schemas.
        gate_fn: ``(gate, alpha, limit) -> f(gate)``.
        gate_grad: ``(grad, gate, alpha, limit) -> grad * f'(gate)``. Where autograd selects, at a kink, so does this: a
            product with 0 would let a NaN or an infinite ``grad`` through.
        clamp_up: whether the up half is clamped to ``[-limit, limit]``.
        cap_up: whether the up half is ``limit * tanh(up / limit)``.
        up_offset: added to the (clamped) up half.
        alpha: default of the ``alpha`` option; None when the activation has none (it is then passed 1.0).
        limit: default of the ``limit`` option; None when the activation has none (it is then passed infinity).
    """

    name: str
    gate_fn: GateFn
    gate_grad: GateGrad
    clamp_up: bool = False
    cap_up: bool = False
    up_offset: float = 0.0
    alpha: float | None = None
    limit: float | None = None

    def eager(self, gate: Tensor, up: Tensor | None, alpha: float, limit: float) -> Tensor:
        """The activation of one expert; ``up`` is None when it is not gated."""
        value = self.gate_fn(gate, alpha, limit)
        return value if up is None else value * self._up(up, limit)

    def backward(
        self, grad: Tensor, gate: Tensor, up: Tensor | None, alpha: float, limit: float
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of gate and up (None when not gated) from the gradient of the result; NaN where autograd's are."""
        if up is None:
            return self.gate_grad(grad, gate, alpha, limit), None
        grad_up = grad * self.gate_fn(gate, alpha, limit)
        if self.clamp_up:
            grad_up = torch.where(_passes(up.abs(), limit), grad_up, 0.0)
        if self.cap_up:
            grad_up = grad_up * (1 - torch.tanh(up / limit).square())
        return self.gate_grad(grad * self._up(up, limit), gate, alpha, limit), grad_up

    def _up(self, up: Tensor, limit: float) -> Tensor:
        if self.clamp_up:
            up = up.clamp(-limit, limit)
        if self.cap_up:
            up = torch.tanh(up / limit) * limit
        return up + self.up_offset if self.up_offset else up


def _silu(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return F.silu(gate)


def _silu_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    sigmoid = torch.sigmoid(gate)
    return grad * (sigmoid * (1 + gate * (1 - sigmoid)))


def _gelu(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return F.gelu(gate)


def _gelu_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
    return grad * (cdf + gate * torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi))


def _gelu_tanh(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def _gelu_tanh_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    slope = math.sqrt(2 / math.pi)
    tanh = torch.tanh(slope * (gate + 0.044715 * gate**3))
    curve = 0.5 * gate * (1 - tanh.square()) * slope * (1 + 3 * 0.044715 * gate.square())
    return grad * (0.5 * (1 + tanh) + curve)


def _relu(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.relu(gate)


def _relu_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.where(gate <= 0, 0.0, grad)


def _relu2(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.relu(gate).square()


def _relu2_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.where(gate <= 0, 0.0, 2 * grad * gate)


def _swiglu_oai(gate: Tensor, alpha: float, limit: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate)


def _swiglu_oai_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    clamped = gate.clamp(max=limit)
    sigmoid = torch.sigmoid(alpha * clamped)
    return torch.where(_passes(gate, limit), grad * (sigmoid * (1 + alpha * clamped * (1 - sigmoid))), 0.0)


def _silu_clamp(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return F.silu(gate.clamp(max=limit))


def _silu_clamp_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.where(_passes(gate, limit), _silu_grad(grad, gate, alpha, limit), 0.0)


def _silu_then_clamp(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return F.silu(gate).clamp(max=limit)


def _silu_then_clamp_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    return _silu_grad(torch.where(_passes(F.silu(gate), limit), grad, 0.0), gate, alpha, limit)


def _quick_gelu(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return gate * torch.sigmoid(alpha * gate)


def _quick_gelu_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    sigmoid = torch.sigmoid(alpha * gate)
    return grad * (sigmoid * (1 + alpha * gate * (1 - sigmoid)))


def _silu_softcap(gate: Tensor, alpha: float, limit: float) -> Tensor:
    return torch.tanh(gate / alpha) * alpha * torch.sigmoid(gate)


def _silu_softcap_grad(grad: Tensor, gate: Tensor, alpha: float, limit: float) -> Tensor:
    tanh, sigmoid = torch.tanh(gate / alpha), torch.sigmoid(gate)
    return grad * (sigmoid * (1 - tanh.square() + alpha * tanh * (1 - sigmoid)))


ACTIVATIONS: dict[str, Activation] = {
    row.name: row
    for row in (
        Activation("silu", _silu, _silu_grad),
        Activation("gelu", _gelu, _gelu_grad),
        Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_grad),
        Activation("relu", _relu, _relu_grad),
        Activation("relu2", _relu2, _relu2_grad),
        # gpt-oss: g = min(gate, limit); u = clamp(up, -limit, limit); g * sigmoid(alpha * g) * (u + 1)
        Activation("swiglu_oai", _swiglu_oai, _swiglu_oai_grad, clamp_up=True, up_offset=1.0, alpha=1.702, limit=7.0),
        # DeepSeek-V4: silu(min(gate, limit)) * clamp(up, -limit, limit)
        Activation("silu_clamp", _silu_clamp, _silu_clamp_grad, clamp_up=True, limit=7.0),
        # Step-3.7: min(silu(gate), limit) * clamp(up, -limit, limit)
        Activation("silu_then_clamp", _silu_then_clamp, _silu_then_clamp_grad, clamp_up=True, limit=7.0),
        # CLIP, and gated experts after it: gate * sigmoid(alpha * gate)
        Activation("quick_gelu", _quick_gelu, _quick_gelu_grad, alpha=1.702),
        # Inkling 2: alpha * tanh(gate / alpha) * sigmoid(gate) * limit * tanh(up / limit)
        Activation("silu_softcap", _silu_softcap, _silu_softcap_grad, cap_up=True, alpha=4.0, limit=25.0),
    )
}


def resolve_activation(op: str, name: str, alpha: float | None, limit: float | None) -> tuple[Activation, float, float]:
    """Row of ``name`` with its options filled in.

    Returns:
        The row, ``alpha`` (1.0 when the row has none) and ``limit`` (infinity when the row has none).

    Raises:
        ValueError: unknown name, an option the row does not have, a limit, or an alpha that is a cap, that is not
            positive.
    """
    row = ACTIVATIONS.get(name)
    if row is None:
        raise ValueError(f"{op}: activation must be one of {sorted(ACTIVATIONS)}, got {name!r}.")
    for option, value, default in (("alpha", alpha, row.alpha), ("limit", limit, row.limit)):
        if value is not None and default is None:
            raise ValueError(
                f"{op}: {option} must be None for activation {name!r}, got {value}. It has no such option."
            )
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: limit must be > 0, got {limit}.")
    if row.cap_up and alpha is not None and not alpha > 0:
        raise ValueError(f"{op}: alpha must be > 0 for activation {name!r}, the cap of the gate, got {alpha}.")
    alpha = row.alpha if alpha is None else alpha
    limit = row.limit if limit is None else limit
    return row, 1.0 if alpha is None else alpha, math.inf if limit is None else limit


def split_glu(hidden: Tensor, glu_layout: str) -> tuple[Tensor, Tensor | None]:
    """Gate and up views of a first projection's result ``[..., N]``; up is None for ``glu_layout="none"``."""
    if glu_layout == "none":
        return hidden, None
    if glu_layout == "interleaved":
        return hidden[..., 0::2], hidden[..., 1::2]
    half = hidden.shape[-1] // 2
    return hidden[..., :half], hidden[..., half:]


def join_glu(gate: Tensor, up: Tensor | None, glu_layout: str) -> Tensor:
    """Inverse of :func:`split_glu`: ``[..., N]`` from the gate and up halves."""
    if up is None:
        return gate
    if glu_layout == "interleaved":
        return torch.stack((gate, up), dim=-1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return torch.cat((gate, up), dim=-1)
