"""What is timed: ways to compute an MoE layer, each turning a case into one function per input set.

Three kinds of work are compared, and every result row names its own:
- "moe": router logits to output. "experts": routing is given, to output. "gemms": the two expert products alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import optional_peers
from benchmarks.cases import Case, InputSet
from benchmarks.models import own_code
from benchmarks.results import OURS
from benchmarks.timing import Thunk
from meta.schemes import SCHEMES

FP8 = "fp8_block128"
GATHER_LIMIT_BYTES = 16e9  # batched_mm copies the weights of every (token, expert) pair


@dataclass(frozen=True)
class Peer:
    """A row of the comparison.

    Attributes:
        work: "moe", "experts" or "gemms" (module docstring).
        prepare: case -> one thunk per input set; the thunk returns the layer's output `[T, H]` (None for "gemms").
        scheme: of the quantised weights that it reads, for its roof; None for the weights as they are.
        missing: why the peer cannot run here, or None.
        unfit: why it cannot run a case, or None.
        exact: whether the output is the layer's own, so that an error against it means something.
        note: what to know of it on a case, for its row, or None.
    """

    name: str
    work: str
    prepare: Callable[[Case], list[Thunk]]
    scheme: str | None = None
    missing: Callable[[], str | None] = lambda: None
    unfit: Callable[[Case], str | None] = lambda case: None
    exact: bool = True
    note: Callable[[Case], str | None] = lambda case: None

    @property
    def is_ours(self) -> bool:
        """Whether it times this project's operators."""
        return self.name.startswith(OURS)


def ours(
    scheme: str | None = None, format: str = "grouped", experts_only: bool = False
) -> Callable[[Case], list[Thunk]]:
    """This project's operators: `fused_moe`, or `fused_experts` where routing is given."""

    def prepare(case: Case) -> list[Thunk]:
        import moe_ops

        tensors = case.weights.arguments(scheme)
        options = {"scheme": scheme, "format": format}
        if format == "batched":
            options["capacity"] = batched_capacity(case)

        def bind(inputs: InputSet) -> Thunk:
            if experts_only:
                topk = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
                return lambda: moe_ops.fused_experts(inputs.hidden_states, **tensors, **topk, **options)
            top_k = case.shape.K
            return lambda: moe_ops.fused_moe(
                inputs.hidden_states, inputs.router_logits, **tensors, top_k=top_k, **options
            )

        return [bind(inputs) for inputs in case.sets]

    return prepare


def batched_capacity(case: Case) -> int:
    """Rows per expert that the batched format needs: the longest expert of any input set, a multiple of 16.

    The default (T rows for every expert) never drops a pair but would take E * T * H elements.
    """
    longest = max(int(inputs.topk_ids.flatten().bincount().max()) for inputs in case.sets)
    return -(-longest // 16) * 16


def transformers_experts(implementation: str) -> Callable[[Case], list[Thunk]]:
    """The experts of transformers' Qwen3-MoE (plain silu-gated experts) under torch.compile, static shapes."""

    def prepare(case: Case) -> list[Thunk]:
        compiled = torch.compile(transformers_module(case, implementation), fullgraph=True, dynamic=False)
        dtype = case.weights.down_proj.dtype
        routings = [(inputs.topk_ids.long(), inputs.topk_weights.to(dtype)) for inputs in case.sets]

        def bind(inputs: InputSet, ids: torch.Tensor, weights: torch.Tensor) -> Thunk:
            return lambda: compiled(inputs.hidden_states, ids, weights)

        return [bind(inputs, *routing) for inputs, routing in zip(case.sets, routings, strict=True)]

    return prepare


def transformers_moe(case: Case, **options: Any) -> list[Thunk]:
    """`transformers_layer`, one thunk for each input set."""
    compiled, _ = transformers_layer(case, **options)
    return [lambda inputs=inputs: compiled(inputs.hidden_states, inputs.router_logits) for inputs in case.sets]


def transformers_layer(case: Case, **options: Any) -> tuple[Callable[..., torch.Tensor], torch.nn.Module]:
    """(Qwen3-MoE's routing from logits, then its grouped_mm experts, in one function compiled with ``options``; the
    experts).
    """
    experts = transformers_module(case, "grouped_mm")
    top_k = case.shape.K

    def layer(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        values, ids = transformers_routing(router_logits, top_k)
        return experts(hidden_states, ids, values)

    return torch.compile(own_code(layer), fullgraph=True, dynamic=False, **options), experts


def transformers_routing(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights in the dtype of the logits, ids), `[T, K]` each, as Qwen3-MoE computes them."""
    values, ids = torch.topk(F.softmax(router_logits, dtype=torch.float, dim=-1), top_k, dim=-1)
    values = values / values.sum(dim=-1, keepdim=True)
    return values.to(router_logits.dtype), ids


def transformers_fused(case: Case) -> list[Thunk]:
    """The same code, compiled with this project's backend.

    Raises:
        RuntimeError: nothing was fused.
    """
    thunks, counts = transformers_moe(case, backend="moe_ops"), torch._dynamo.utils.counters["moe_ops"]
    before = counts["fused"]
    thunks[0]()
    if counts["fused"] == before:
        raise RuntimeError(f"nothing was fused in the layer of {case.shape.name}, T={case.T}")
    return thunks


def transformers_module(case: Case, implementation: str) -> torch.nn.Module:
    """transformers' experts module holding the case's weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    shape = case.shape
    config = Qwen3MoeConfig(num_experts=shape.E, hidden_size=shape.H, moe_intermediate_size=shape.I)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(case.weights.gate_up_proj, requires_grad=False)
    module.down_proj = torch.nn.Parameter(case.weights.down_proj, requires_grad=False)
    return module.eval()


def gather_too_large(case: Case) -> str | None:
    """batched_mm materialises [T * K, 3 I, H] weights."""
    size = case.T * case.shape.K * 3 * case.shape.H * case.shape.I * case.weights.down_proj.element_size()
    return f"copies {size / 1e9:.0f} GB of weights" if size > GATHER_LIMIT_BYTES else None


def torch_grouped_mm(case: Case) -> list[Thunk]:
    """torch's own grouped product, both projections, on rows sorted already: no routing, activation or combine."""
    weights = case.weights

    def bind(inputs: InputSet) -> Thunk:
        rows_RH, rows_RI, offsets_E = _sorted_rows(case, inputs)

        def run() -> None:
            F.grouped_mm(rows_RH, weights.gate_up_proj.transpose(1, 2), offs=offsets_E)
            F.grouped_mm(rows_RI, weights.down_proj.transpose(1, 2), offs=offsets_E)

        return run

    return [bind(inputs) for inputs in case.sets]


def torch_scaled_grouped_mm(case: Case) -> list[Thunk]:
    """torch's fp8 grouped product, one scale per row and per output channel, on rows sorted and quantised already."""
    shape, fp8 = case.shape, torch.float8_e4m3fn
    gate_up = case.weights.quantized(FP8)["gate_up_proj"].transpose(1, 2)
    down = case.weights.quantized(FP8)["down_proj"].transpose(1, 2)
    device = down.device
    scale_N = [torch.ones(shape.E, width, device=device) for width in (2 * shape.I, shape.H)]

    def bind(inputs: InputSet) -> Thunk:
        rows_RH, rows_RI, offsets_E = _sorted_rows(case, inputs)
        rows_RH, rows_RI = rows_RH.to(fp8), rows_RI.to(fp8)
        scale_R = torch.ones(rows_RH.shape[0], device=device)

        def run() -> None:
            for rows, weight, scale in ((rows_RH, gate_up, scale_N[0]), (rows_RI, down, scale_N[1])):
                torch._scaled_grouped_mm(rows, weight, scale_R, scale, offs=offsets_E, out_dtype=torch.bfloat16)

        return run

    return [bind(inputs) for inputs in case.sets]


def _sorted_rows(case: Case, inputs: InputSet) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of both products in expert order, `[R, H]` and `[R, I]`, and the cumulative ends `[E]`."""
    experts_R, order_R = inputs.topk_ids.flatten().sort(stable=True)
    rows_RH = inputs.hidden_states[order_R // case.shape.K]
    rows_RI = torch.randn(rows_RH.shape[0], case.shape.I, device=rows_RH.device, dtype=rows_RH.dtype)
    counts_E = experts_R.bincount(minlength=case.shape.E)
    return rows_RH, rows_RI, counts_E.cumsum(0).to(torch.int32)


def needs_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device"


BUILT_IN = (
    Peer("ours", "moe", ours()),
    Peer("ours_experts", "experts", ours(experts_only=True)),
    Peer("ours_batched", "moe", ours(format="batched")),
    Peer("ours_fp8", "moe", ours(scheme=FP8), FP8),
    Peer("ours_fp8_batched", "moe", ours(scheme=FP8, format="batched"), FP8),
    Peer("ours_compiled", "moe", transformers_fused),
    Peer("hf_moe", "moe", transformers_moe),
    Peer("hf_grouped", "experts", transformers_experts("grouped_mm")),
    Peer("hf_batched", "experts", transformers_experts("batched_mm"), unfit=gather_too_large),
    Peer("grouped_mm", "gemms", torch_grouped_mm, exact=False),
    Peer("scaled_grouped_mm", "gemms", torch_scaled_grouped_mm, FP8, missing=needs_cuda, exact=False),
)


def optional(package: str, work: str, prepare: Callable[[Case], list[Thunk]], **options: Any) -> Peer:
    """A peer that has the name of the package it needs."""
    return Peer(package, work, prepare, missing=partial(optional_peers.not_importable, package), **options)


OPTIONAL = (
    optional("vllm_kernel", "experts", optional_peers.vllm_kernel, note=optional_peers.vllm_note),
    optional("triton_kernels", "moe", optional_peers.triton_kernels, exact=False),
    Peer(
        "triton_kernels_mxfp4",
        "moe",
        optional_peers.triton_kernels_mxfp4,
        "mxfp4",
        missing=optional_peers.no_mxfp4_layouts,
        unfit=optional_peers.not_bf16,
    ),
    optional("sonicmoe", "moe", optional_peers.sonicmoe, unfit=optional_peers.routes_by_itself, exact=False),
)
OF_SCHEMES = tuple(
    Peer(f"ours_{scheme}{suffix}", "moe", ours(scheme=scheme, format=format), scheme)
    for scheme in (name for name, row in SCHEMES.items() if row.quantized and name != FP8)
    for format, suffix in (("grouped", ""), ("batched", "_batched"))
)
PEERS = {peer.name: peer for peer in (*BUILT_IN, *OF_SCHEMES, *OPTIONAL)}
DEFAULT_PEERS = {
    ("bf16", "grouped"): ("ours", "ours_experts", "hf_moe", "hf_grouped", "hf_batched", "grouped_mm"),
    ("bf16", "batched"): ("ours_batched", "ours", "hf_grouped"),
    (FP8, "grouped"): ("ours_fp8", "ours_fp8_batched", "ours", "scaled_grouped_mm"),
    (FP8, "batched"): ("ours_fp8_batched", "ours_batched"),
    **{(peer.scheme, "grouped"): ("ours", peer.name, f"{peer.name}_batched") for peer in OF_SCHEMES[::2]},
    **{(peer.scheme, "batched"): ("ours_batched", peer.name) for peer in OF_SCHEMES[1::2]},
}
#: (a whole, a part of it that is timed as well): where the whole is faster, something is wrong, or worth knowing.
PARTS = (("ours", "ours_experts"), ("hf_moe", "hf_grouped"), ("hf_grouped", "grouped_mm"))
