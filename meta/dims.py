"""The dimension letters used everywhere, the fixed names of options, and the description of one problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meta.arch import device_arch

LETTERS: dict[str, str] = {
    "T": "tokens",
    "E": "experts held by this process",
    "K": "experts selected per token (top-k); inside a GEMM, its contraction length",
    "R": "routed rows, R = T * K",
    "H": "hidden width",
    "I": "intermediate width of one expert",
    "N": "rows of an expert weight: 2 * I for gated experts, I otherwise",
    "C": "capacity: rows kept per expert in the batched format",
    "G": "scale group",
}

FORMATS = ("grouped", "batched")
GLU_LAYOUTS = ("concat", "interleaved", "none")
BACKEND_NAMES = ("triton", "torch_grouped", "cpu", "reference")

Dim = int | torch.SymInt


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything a backend may look at to accept, refuse or tune: sizes, types and options, never data.

    A stage operator fills the sizes it knows and leaves the others 0. For a single grouped or batched GEMM, ``T`` is
    the number of rows, ``K`` is 1, ``H`` the contraction length and ``I`` the width of the result.
    """

    T: Dim
    E: Dim
    K: Dim
    H: Dim
    I: Dim
    C: Dim | None
    scheme: str
    activation: str
    glu_layout: str
    dtype: torch.dtype
    device_type: str
    arch: str
    format: str
    weight_layout: str
    has_bias: bool = False
    weight_on_input: bool = False
    has_expert_map: bool = False

    @property
    def R(self) -> Dim:
        """Routed rows, T * K."""
        return self.T * self.K

    @property
    def gated(self) -> bool:
        """Whether the first projection holds a gate and an up half."""
        return self.glu_layout != "none"

    @property
    def has_symbols(self) -> bool:
        """Whether a size is symbolic, so that the problem cannot be hashed."""
        return any(isinstance(size, torch.SymInt) for size in (self.T, self.E, self.K, self.H, self.I, self.C))

    @classmethod
    def from_experts(
        cls,
        hidden_states: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        activation: str = "silu",
        glu_layout: str = "concat",
        weight_on_input: bool = False,
        scheme: str | None = None,
        format: str = "grouped",
        capacity: Dim | None = None,
    ) -> Problem:
        """Describe the experts of one layer; reads sizes, strides and types of (possibly fake) tensors.

        Args:
            hidden_states: ``[T, H]``.
            gate_up_proj: ``[E, 2I, H]`` (``[E, I, H]`` when ``glu_layout="none"``), any strides.
            down_proj: ``[E, H, I]``, any strides.
            topk_ids: ``[T, K]``; only its size K is used.
        """
        from meta.schemes import resolve_scheme

        return cls.of_layer(
            hidden_states,
            gate_up_proj,
            down_proj,
            topk_ids.shape[1],
            resolve_scheme("fused_experts", scheme, gate_up_proj.dtype).name,
            has_bias=gate_up_bias is not None or down_bias is not None,
            has_expert_map=expert_map is not None,
            activation=activation,
            glu_layout=glu_layout,
            weight_on_input=weight_on_input,
            format=format,
            capacity=capacity,
        )

    @classmethod
    def of_layer(
        cls,
        hidden_states: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        top_k: Dim,
        scheme: str,
        *,
        has_bias: bool,
        has_expert_map: bool,
        activation: str,
        glu_layout: str,
        weight_on_input: bool,
        format: str,
        capacity: Dim | None,
    ) -> Problem:
        """As :meth:`from_experts`, with K and the scheme's name already known."""
        tokens, hidden = hidden_states.shape
        width = gate_up_proj.shape[1]
        return cls(
            T=tokens,
            E=gate_up_proj.shape[0],
            K=top_k,
            H=hidden,
            I=width if glu_layout == "none" else width // 2,
            C=None if format == "grouped" else (tokens if capacity is None else capacity),
            scheme=scheme,
            activation=activation,
            glu_layout=glu_layout,
            dtype=hidden_states.dtype,
            device_type=hidden_states.device.type,
            arch=device_arch(hidden_states.device),
            format=format,
            weight_layout=common_layout(gate_up_proj, down_proj),
            has_bias=has_bias,
            weight_on_input=weight_on_input,
            has_expert_map=has_expert_map,
        )

    @classmethod
    def of_stage(
        cls,
        tensor: torch.Tensor,
        *,
        T: Dim,
        E: Dim,
        K: Dim = 1,
        H: Dim = 0,
        I: Dim = 0,
        C: Dim | None = None,
        scheme: str = "",
        activation: str = "",
        glu_layout: str = "none",
        weight: torch.Tensor | None = None,
        has_bias: bool = False,
        has_expert_map: bool = False,
    ) -> Problem:
        """Describe one stage operator by its first tensor and the sizes that it knows."""
        return cls(
            T=T,
            E=E,
            K=K,
            H=H,
            I=I,
            C=C,
            scheme=scheme,
            activation=activation,
            glu_layout=glu_layout,
            dtype=tensor.dtype,
            device_type=tensor.device.type,
            arch=device_arch(tensor.device),
            format="grouped" if C is None else "batched",
            weight_layout="" if weight is None else weight_layout(weight),
            has_bias=has_bias,
            has_expert_map=has_expert_map,
        )


def weight_layout(weight: torch.Tensor) -> str:
    """``"nk"`` when the last dimension of an ``[E, N, K]`` view is contiguous, ``"kn"`` when N is, else
    ``"strided"``.
    """
    strides = weight.stride()
    if is_one(strides[2]):
        return "nk"
    return "kn" if is_one(strides[1]) else "strided"


def common_layout(*weights: torch.Tensor) -> str:
    """The layout that all weights share, or ``"strided"``."""
    layouts = {weight_layout(weight) for weight in weights}
    return layouts.pop() if len(layouts) == 1 else "strided"


def is_one(size: Dim) -> bool:
    """Whether a size or stride is known to be 1, without adding a guard."""
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == 1)
