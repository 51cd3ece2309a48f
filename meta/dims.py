"""The dimension letters used everywhere, the fixed names of options, and what backends are told of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
GLU_LAYOUTS = ("concat", "interleaved", "separate", "none")
SLOT_ORDERS = ("token", "choice")
#: What ``fused_experts_backward_first`` returns the gradients of.
GRADIENTS = ("hidden_states", "gate_up_proj", "up_proj", "gate_up_bias", "topk_weights")
#: What a layer in training computes again in the backward instead of keeping it: what stood before the activation
#: ("activation"), and where the sorted rows are, too ("all").
RECOMPUTE = ("activation", "all")

Dim = int | torch.SymInt


@dataclass(frozen=True, slots=True)
class Problem:
    """What a backend may look at to accept, refuse or tune: sizes, types and options, never data.

    Routing and row movement have no more than this.

    Attributes:
        dtype: of the first tensor.
        scheme: of weights or activations; empty where there is none.
    """

    dtype: torch.dtype
    device_type: str
    arch: str
    scheme: str

    @property
    def has_symbols(self) -> bool:
        """Whether a size is symbolic, so that the problem cannot be hashed."""
        return False


@dataclass(frozen=True, slots=True)
class GemmProblem(Problem):
    """One product of rows with their experts' weights.

    Attributes:
        M: rows; in the batched format E * C.
        N: columns of the result; half of the weight's rows when ``glu_layout`` is "concat" or "interleaved".
        K: contraction length.
        activation: None for a plain product.
    """

    M: Dim
    E: Dim
    N: Dim
    K: Dim
    C: Dim | None
    format: str
    activation: str | None
    glu_layout: str
    weight_layout: str
    has_bias: bool

    @property
    def has_symbols(self) -> bool:
        return _any_symbol(self.M, self.E, self.N, self.K, self.C)


@dataclass(frozen=True, slots=True)
class LayerProblem(Problem):
    """The experts of one layer."""

    T: Dim
    E: Dim
    K: Dim
    H: Dim
    I: Dim
    C: Dim | None
    format: str
    activation: str
    glu_layout: str
    weight_layout: str
    has_bias: bool
    has_expert_map: bool
    weight_on_input: bool

    @property
    def has_symbols(self) -> bool:
        return _any_symbol(self.T, self.E, self.K, self.H, self.I, self.C)

    @property
    def R(self) -> Dim:
        """Routed rows, T * K."""
        return self.T * self.K

    @property
    def gated(self) -> bool:
        """Whether the first projection holds a gate and an up half."""
        return self.glu_layout != "none"


def _any_symbol(*sizes: Dim | None) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)


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
    first, *others = map(weight_layout, weights)
    return first if all(layout == first for layout in others) else "strided"


def is_known_equal(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal; a guard where they have values, no where they have none."""
    return is_known(a == b)


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether something holds of sizes; a guard where they have values, no where they have none."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():  # to Dynamo symbols are numbers
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_one(size: Dim) -> bool:
    """Whether a size or stride is known to be 1, without adding a guard."""
    if isinstance(size, int):
        return size == 1
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == 1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are computed in: fp32, or fp64 for fp64 data."""
    return torch.float64 if dtype == torch.float64 else torch.float32
