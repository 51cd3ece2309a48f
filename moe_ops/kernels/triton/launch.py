"""Host side of an expert GEMM: what a launch needs besides the rows, and the tensor-map descriptors for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from meta.operands import Operand
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.mm_tile import (
    CONCAT,
    INTERLEAVED,
    NOT_GATED,
    POINTERS,
    TMA_KN,
    TMA_NK,
)
from moe_ops.kernels.triton.util import cdiv, next_power_of_2

GLU_CODES = {"none": NOT_GATED.value, "concat": CONCAT.value, "interleaved": INTERLEAVED.value}
SCALE_GROUP = 128  # columns per activation scale of fp8_block128


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch that follow from the tensors and the config."""

    a_desc: TensorDescriptor | None
    w_desc: TensorDescriptor | None
    strides: tuple[Any, Any, Any]
    block: tuple[int, int, int, int, int]
    loads: tuple[bool, int]
    n_tiles: int


def _descriptor_strides(tensor: torch.Tensor, inner: int) -> bool:
    """Whether a tensor map can address `tensor`: 16-byte aligned base and outer strides, unit inner stride."""
    size = tensor.element_size()
    outer = [s for d, s in enumerate(tensor.stride()) if d != inner]
    return tensor.stride(inner) == 1 and tensor.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in outer)


@dataclass(frozen=True)
class ExpertMM:
    """One projection of every expert.

    Args:
        operand: [E, N, K] (N = 2 * out features when gated), any strides, with its scales f32 [E, ceil(N/128),
            ceil(K/128)].
        glu_layout: "none", "concat" or "interleaved".
        activation: name, or None for a plain product.
        bias: [E, N]; rows_scale: f32 [rows, ceil(K/128)].
        quantize_output: write e4m3 with 1x128 scales instead of `out_dtype`.
    """

    operand: Operand
    out_dtype: torch.dtype
    up: Operand | None = None
    glu_layout: str = "none"
    activation: str | None = None
    alpha: float = 0.0
    limit: float = 0.0
    bias: torch.Tensor | None = None
    rows_scale: torch.Tensor | None = None
    quantize_output: bool = False
    glu: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "glu", GLU_CODES[self.glu_layout])

    @property
    def weight(self) -> torch.Tensor:
        return self.operand.data

    @property
    def weight_scale(self) -> torch.Tensor | None:
        return self.operand.scales[0] if self.operand.scales else None

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[2]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1] // (2 if self.glu else 1)

    def allocate(self, leading: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised output and scale for rows of shape `leading`."""
        N = self.out_features
        dtype = torch.float8_e4m3fn if self.quantize_output else self.out_dtype
        scale_shape = (*leading, cdiv(N, SCALE_GROUP)) if self.quantize_output else (0,)
        return like.new_empty((*leading, N), dtype=dtype), like.new_empty(scale_shape, dtype=torch.float32)

    def _weight_load(self, config: MMConfig) -> int:
        """Descriptor loads along whichever of K and N is contiguous, pointers for any other strides."""
        if not config.w_tma:
            return POINTERS.value
        if _descriptor_strides(self.weight, inner=2):
            return TMA_NK.value
        # Two output columns per pair of weight columns: the concat view below needs the second half 16-byte aligned.
        half_aligned = self.glu != CONCAT.value or self.out_features * self.weight.element_size() % 16 == 0
        return TMA_KN.value if half_aligned and _descriptor_strides(self.weight, inner=1) else POINTERS.value

    def _weight_descriptor(self, load: int, config: MMConfig) -> TensorDescriptor | None:
        if load == POINTERS.value:
            return None
        E, rows, K = self.weight.shape
        stride_e, stride_n, stride_k = self.weight.stride()
        I = self.out_features
        block_n, block_k = config.block_n, config.block_k
        halves = 2 if self.weight_scale is None else 1  # quantised: gate and up are two products
        if load == TMA_NK.value:
            if self.glu == CONCAT.value:
                shape, strides = [E, 2, I, K], [stride_e, I * stride_n, stride_n, 1]
                return TensorDescriptor(self.weight, shape, strides, [1, halves, block_n // 2, block_k])
            return TensorDescriptor(self.weight, [E, rows, K], [stride_e, stride_n, 1], [1, block_n, block_k])
        if self.glu == CONCAT.value:
            shape, strides = [E, K, 2, I], [stride_e, stride_k, I, 1]
            return TensorDescriptor(self.weight, shape, strides, [1, block_k, halves, block_n // 2])
        return TensorDescriptor(self.weight, [E, K, rows], [stride_e, stride_k, 1], [1, block_k, block_n])

    def prepare(self, a: torch.Tensor, config: MMConfig, *, gathered: bool) -> Launch:
        """Descriptors, strides and constants of a launch on rows `a` [rows, K]."""
        a_tma = config.a_tma and not gathered and _descriptor_strides(a, inner=1)
        w_load = self._weight_load(config)
        out_columns = config.block_n // (2 if self.glu else 1)
        a_desc = (
            TensorDescriptor(a, list(a.shape), list(a.stride()), [config.block_m, config.block_k]) if a_tma else None
        )
        return Launch(
            a_desc=a_desc,
            w_desc=self._weight_descriptor(w_load, config),
            strides=(
                self.weight.stride(),
                None if self.weight_scale is None else self.weight_scale.stride(),
                None if self.bias is None else self.bias.stride(),
            ),
            block=(config.block_m, config.block_n, config.block_k, config.group_m, next_power_of_2(self.num_experts)),
            loads=(a_tma, w_load),
            n_tiles=cdiv(self.out_features, out_columns),
        )
