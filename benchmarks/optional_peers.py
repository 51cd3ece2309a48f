"""Other projects' layers, timed only where their packages are importable; they are no dependencies of this one.

Each is called through its public functions, as its own users would. What a peer's kind of work excludes is said in its
docstring. A peer whose interface has changed fails in its own row.
"""

from __future__ import annotations

import importlib.util

import torch

from benchmarks.cases import Case, InputSet
from benchmarks.timing import Thunk


def not_importable(package: str) -> str | None:
    """Why a package's peer is left out, or None."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return None if importlib.util.find_spec(package) else f"package {package} is not installed"


def vllm(case: Case) -> list[Thunk]:
    """vLLM's Triton experts with its own alignment, routing given."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    weights = case.weights

    def bind(inputs: InputSet) -> Thunk:
        return lambda: fused_experts(
            inputs.hidden_states, weights.gate_up_proj, weights.down_proj, inputs.topk_weights, inputs.topk_ids
        )

    return [bind(inputs) for inputs in case.sets]


def triton_kernels(case: Case) -> list[Thunk]:
    """OpenAI's triton_kernels, router logits to output. Its gated activation reads gate and up rows alternately."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn

    shape = case.shape
    gate, up = case.weights.gate_up_proj.chunk(2, dim=1)
    gate_up_EHN = torch.stack([gate, up], dim=2).flatten(1, 2).transpose(1, 2).contiguous()
    down_EIH = case.weights.down_proj.transpose(1, 2).contiguous()
    activation = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.0, None), 2)
    precision = PrecisionConfig(allow_tf32=False)

    def bind(inputs: InputSet) -> Thunk:
        def run() -> torch.Tensor:
            data, gather, scatter = routing(inputs.router_logits, shape.K)
            hidden = matmul_ogs(
                inputs.hidden_states,
                gate_up_EHN,
                None,
                data,
                gather_indx=gather,
                precision_config=precision,
                fused_activation=activation,
            )
            return matmul_ogs(
                hidden, down_EIH, None, data, scatter_indx=scatter, precision_config=precision, gammas=data.gate_scal
            )

        return run

    return [bind(inputs) for inputs in case.sets]


def sonicmoe(case: Case) -> list[Thunk]:
    """SonicMoE's forward with its own router product, so it is given a router weight instead of logits."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    shape, weights = case.shape, case.weights
    router = torch.randn_like(weights.down_proj[0, 0, :1]).expand(shape.E, shape.H).contiguous() * 0.02
    gate_up, down = weights.gate_up_proj.permute(1, 2, 0), weights.down_proj.permute(1, 2, 0)

    def bind(inputs: InputSet) -> Thunk:
        def run() -> torch.Tensor:
            stream = torch.cuda.current_stream().cuda_stream  # under capture not the one that prepares
            return moe_TC_softmax_topk_layer(
                inputs.hidden_states, router, gate_up, None, down, None, shape.K, stream, ActivationType.SWIGLU, True
            )[0]

        return run

    return [bind(inputs) for inputs in case.sets]
