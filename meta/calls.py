"""What an operator's rule makes of its flat arguments, once: operands, sizes and options, for everyone who comes after.

The same object goes to the backends, the checks of :mod:`moe_ops.debugging` and the choice of a backend, and its
``outputs`` are the fake implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta.dims import Dim, GemmProblem, LayerProblem, Problem
from meta.operands import Experts, Glu, Operand

Sizes = tuple[Dim, ...]
Output = tuple[Sizes, torch.dtype]


@dataclass(slots=True, kw_only=True)
class Call:
    """One accepted call.

    Attributes:
        op: name of the operator.
        problem: what a backend is chosen by.
        device: where the outputs live.
        outputs: ``(sizes, dtype)`` of every output; all are contiguous.
        backend: the one that the caller insists on, or None.
    """

    op: str
    problem: Problem
    device: torch.device
    outputs: tuple[Output, ...]
    backend: str | None = None


class RouterOptions(NamedTuple):
    """Keyword arguments of ``fused_topk``."""

    top_k: int
    routing: str
    renormalize: bool
    renorm_eps: float
    num_groups: int
    topk_groups: int
    scale: float


@dataclass(slots=True, kw_only=True)
class RouteCall(Call):
    """``fused_topk``."""

    router_logits: Tensor
    correction_bias: Tensor | None
    options: RouterOptions


@dataclass(slots=True, kw_only=True)
class DispatchCall(Call):
    """``moe_permute`` and ``batched_dispatch``, which has a capacity."""

    hidden_states: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None
    num_experts: Any  # ints outside of tracing
    capacity: Any = None
    slot_order: str = "token"


@dataclass(slots=True, kw_only=True)
class SortCall(Call):
    """``sort_pairs``: where the pairs of ``topk_ids [T, K]`` are; those past the capacity of an expert are dropped."""

    topk_ids: Tensor
    expert_map: Tensor | None
    num_experts: Any  # ints outside of tracing
    capacity: Any


@dataclass(slots=True, kw_only=True)
class CombineCall(Call):
    """``moe_unpermute`` and ``batched_combine``: ``rows [R, H]`` or ``[E, C, H]``, and where each pair's row is."""

    rows: Tensor
    places: Tensor
    topk_weights: Tensor
    added: Tensor | None


@dataclass(slots=True, kw_only=True)
class RouteBackwardCall(Call):
    """``fused_topk_backward``: the gradient of the logits from that of the weights, ``[T, K]``."""

    grad_weights: Tensor
    router_logits: Tensor
    topk_ids: Tensor
    options: RouterOptions


@dataclass(slots=True, kw_only=True)
class QuantizeCall(Call):
    """``quantize_rows`` and ``quantize_batched``, which has counts."""

    rows: Tensor
    expert_num_tokens: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class GemmCall(Call):
    """``grouped_mm`` and ``batched_mm``.

    Attributes:
        x: ``[R, K]`` sorted by expert, or ``[E, C, K]``.
        weight: ``[E, N, K]``.
        extents: int32 ``[E]``: offsets of grouped rows, or how many rows of each batch are used.
        bias: ``[E, N]`` or None.
    """

    problem: GemmProblem
    x: Operand
    weight: Operand
    extents: Tensor
    bias: Tensor | None

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the product."""
        return self.outputs[0][1]


@dataclass(slots=True, kw_only=True)
class GatheredCall(GemmCall):
    """``gathered_mm``: of rows that are taken from tokens ``x [T, K]``, times ``topk_weights [T, top-k]`` if given.

    Attributes:
        row_to_pair, pair_to_row: int32 ``[R]``, ``[T, top-k]``.
    """

    row_to_pair: Tensor
    pair_to_row: Tensor
    topk_weights: Tensor | None

    def of_rows(self, rows: Tensor) -> GemmCall:
        """The product of ``rows [R, K]``."""
        return GemmCall(
            op="grouped_mm",
            problem=self.problem,
            device=self.device,
            outputs=self.outputs,
            x=Operand(rows, None),
            weight=self.weight,
            extents=self.extents,
            bias=self.bias,
        )


@dataclass(slots=True, kw_only=True)
class GluCall(GemmCall):
    """``grouped_mm_glu`` and ``batched_mm_glu``.

    Attributes:
        up: the up half ``[E, I, K]`` when ``weight`` holds the gate's alone.
        quantize_output: write the activations quantised for the next product.
    """

    glu: Glu
    up: Operand | None
    quantize_output: bool = False


@dataclass(slots=True, kw_only=True)
class WgradCall(Call):
    """``grouped_wgrad``: ``grad_rows [R, N]`` and ``rows [R, K]``, sorted by expert, ``offsets`` int32 ``[E]``.

    With the places, int32 ``[R]`` and ``[T, top-k]``, ``tokens`` names which of the first two has tokens ``[T, ..]``,
    which the product gathers, or rows of them are made as sparingly as can be.
    """

    grad_rows: Tensor
    rows: Tensor
    offsets: Tensor
    row_to_pair: Tensor | None
    pair_to_row: Tensor | None
    tokens: str


@dataclass(slots=True, kw_only=True)
class SumsCall(Call):
    """``expert_sums``: of ``rows [R, N]`` sorted by expert; with ``row_to_pair`` and ``pair_to_row`` of tokens
    ``[T, N]``, times ``topk_weights [T, K]`` if given.
    """

    rows: Tensor
    offsets: Tensor
    row_to_pair: Tensor | None
    pair_to_row: Tensor | None
    topk_weights: Tensor | None


@dataclass(slots=True, kw_only=True)
class LayerCall(Call):
    """What ``fused_experts`` and ``fused_moe`` share."""

    problem: LayerProblem
    hidden_states: Operand
    experts: Experts
    expert_map: Tensor | None
    weight_on_input: bool

    @property
    def capacity(self) -> Any:
        """C, an int outside of tracing, or None in the grouped format."""
        return self.problem.C

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result."""
        return self.outputs[0][1]


@dataclass(slots=True, kw_only=True)
class ExpertsCall(LayerCall):
    """``fused_experts``."""

    topk_weights: Tensor
    topk_ids: Tensor
    recompute: str | None = None


@dataclass(slots=True, kw_only=True)
class BackwardCall(Call):
    """``fused_experts_backward``: from the output to what stood before the activation.

    Attributes:
        gate_up: ``[R, N]``, what stood there, in sorted rows, or None: of ``hidden_states`` and ``first``, the weights
            and a bias, it is computed again; up: ``[R, I]`` or None, where the halves are apart.
        offsets, row_to_pair, pair_to_row: int32 ``[E]``, ``[R]``, ``[T, K]``, where the pairs are among these rows.
        value: whether the weighted result of the activation is asked for.
    """

    grad_output: Tensor
    down: Tensor
    topk_weights: Tensor
    gate_up: Tensor | None
    up: Tensor | None
    offsets: Tensor
    row_to_pair: Tensor
    pair_to_row: Tensor
    down_bias: Tensor | None
    hidden_states: Tensor | None
    first: tuple[Tensor, ...]
    first_bias: Tensor | None
    glu: Glu
    weight_on_input: bool
    value: bool


@dataclass(slots=True, kw_only=True)
class FirstBackwardCall(Call):
    """``fused_experts_backward_first``: from what stood before the activation to the hidden states.

    Attributes:
        grads, weights: one each, or two where the halves are apart.
        grad_output: ``[T, H]`` to copy to sorted rows beside, or None.
        sparing: whether memory counts more than launches.
        needs: by name, see :data:`meta.dims.GRADIENTS`.
    """

    grads: tuple[Tensor, ...]
    hidden_states: Tensor
    weights: tuple[Tensor, ...]
    topk_weights: Tensor
    offsets: Tensor
    row_to_pair: Tensor
    pair_to_row: Tensor
    grad_output: Tensor | None
    weight_on_input: bool
    sparing: bool
    needs: dict[str, bool]


@dataclass(slots=True, kw_only=True)
class MoeCall(LayerCall):
    """``fused_moe``."""

    route: RouteCall

    def routed(self, topk_weights: Tensor, topk_ids: Tensor) -> ExpertsCall:
        """The experts' part of it."""
        return ExpertsCall(
            op=self.op,
            problem=self.problem,
            device=self.device,
            outputs=self.outputs,
            hidden_states=self.hidden_states,
            experts=self.experts,
            expert_map=self.expert_map,
            weight_on_input=self.weight_on_input,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
        )
