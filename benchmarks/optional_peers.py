"""Other projects' layers, timed only where their code is importable; they are no dependencies of this one.

Code is found where it is installed, or in the ignored folder `.peers` that `python -m benchmarks carry` fills. What a
peer's kind of work excludes is said in its docstring. A peer whose interface has changed fails in its own row.
"""

from __future__ import annotations

import importlib.util
import site
import sys

import torch

from benchmarks.carry import LIBRARY, PEERS
from benchmarks.cases import Case, InputSet
from benchmarks.timing import Thunk


def not_importable(package: str) -> str | None:
    """Why a package's peer is left out, or None. What is installed goes before what was carried."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    carried = str(PEERS / LIBRARY)
    if carried not in sys.path:
        site.addsitedir(carried)  # at the end, with the folders that packages name in `.pth` files
    return None if importlib.util.find_spec(package) else f"package {package} is not installed, nor in {carried}"


def vllm_kernel(case: Case) -> list[Thunk]:
    """vLLM's Triton kernel with its own choice of configuration; rows are aligned outside of what is timed."""
    from benchmarks import vllm_peer  # which needs triton

    return [vllm_peer.bind(case, inputs) for inputs in case.sets]


def vllm_note(case: Case) -> str:
    """Whether vLLM has a tuned file for the case."""
    from benchmarks import vllm_peer

    return vllm_peer.configuration(case)[1]


def triton_kernels(case: Case) -> list[Thunk]:
    """OpenAI's triton_kernels, router logits to output. Its gated activation reads gate and up columns alternately."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn

    shape = case.shape
    gate_up_EHN, down_EIH = case.weights.form("triton_kernels", lambda: _transposed(case))
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


def _transposed(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """`[E, H, 2I]` with gate and up columns in turn, and `[E, I, H]`, both contiguous, without a third copy."""
    gate_EIH, up_EIH = case.weights.gate_up_proj.chunk(2, dim=1)
    E, I, H = gate_EIH.shape
    gate_up_EHN = gate_EIH.new_empty(E, H, 2 * I)
    gate_up_EHN[..., 0::2] = gate_EIH.transpose(1, 2)
    gate_up_EHN[..., 1::2] = up_EIH.transpose(1, 2)
    return gate_up_EHN, case.weights.down_proj.transpose(1, 2).contiguous()


def triton_kernels_mxfp4(case: Case) -> list[Thunk]:
    """The same layer with mxfp4 weights, those of `ours_mxfp4`, and Hopper's layouts of them."""
    from benchmarks import mxfp4_peer  # which needs triton

    return [mxfp4_peer.bind(case, inputs) for inputs in case.sets]


def no_mxfp4_layouts() -> str | None:
    """Why `triton_kernels_mxfp4` is left out, or None: without the layouts the package runs a slower kernel."""
    reason = not_importable("triton_kernels")
    if reason is None and torch.cuda.get_device_capability()[0] != 9:
        return "needs a GPU of compute capability 9, for which its layouts of mxfp4 weights are"
    return reason


def not_bf16(case: Case) -> str | None:
    """Why a peer that takes bf16 activations alone cannot run a case, or None."""
    dtype = case.weights.down_proj.dtype
    return None if dtype == torch.bfloat16 else f"takes bf16 activations, not {str(dtype).removeprefix('torch.')}"


def routes_by_itself(case: Case) -> str | None:
    """Why a peer that takes no logits cannot run a case, or None."""
    return None if case.routing == "uniform" else "routes by a product of its own, which is uniform"


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
