"""Valid arguments of the operators by name, with changes: what a test of one bad argument starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import moe_ops

T, E, K, H, I = 4, 8, 2, 16, 12


def layer(**changes: Any) -> dict[str, Any]:
    base = {
        "hidden_states": torch.randn(T, H),
        "gate_up_proj": torch.randn(E, 2 * I, H),
        "down_proj": torch.randn(E, H, I),
        "topk_weights": torch.rand(T, K),
        "topk_ids": torch.zeros(T, K, dtype=torch.int32),
        "gate_up_scales": [],
        "down_scales": [],
    }
    return {**base, **changes}


def fp8(**changes: Any) -> dict[str, Any]:
    base = {
        "gate_up_proj": torch.zeros(E, 2 * I, H, dtype=torch.float8_e4m3fn),
        "down_proj": torch.zeros(E, H, I, dtype=torch.float8_e4m3fn),
        "scheme": "fp8_block128",
        "gate_up_scales": [torch.ones(E, 1, 1)],
        "down_scales": [torch.ones(E, 1, 1)],
    }
    return layer(**{**base, **changes})


def moe(**changes: Any) -> dict[str, Any]:
    call = layer()
    del call["topk_weights"], call["topk_ids"]
    return {**call, "router_logits": torch.randn(T, E), "top_k": K, **changes}


def topk(**changes: Any) -> dict[str, Any]:
    return {"router_logits": torch.randn(T, E), "top_k": K, **changes}


def permute(**changes: Any) -> dict[str, Any]:
    ids = torch.zeros(T, K, dtype=torch.int32)
    return {"hidden_states": torch.randn(T, H), "topk_ids": ids, "num_experts": E, **changes}


def dispatch(**changes: Any) -> dict[str, Any]:
    return permute(**{"capacity": 4, **changes})


def unpermute(**changes: Any) -> dict[str, Any]:
    rows, places = torch.randn(T * K, H), torch.zeros(T, K, dtype=torch.int32)
    return {"rows": rows, "pair_to_row": places, "topk_weights": torch.rand(T, K), **changes}


def combine(**changes: Any) -> dict[str, Any]:
    batch, slots = torch.randn(E, 2, H), torch.zeros(T, K, dtype=torch.int32)
    return {"batch": batch, "slots": slots, "topk_weights": torch.rand(T, K), **changes}


def grouped(**changes: Any) -> dict[str, Any]:
    offsets = torch.zeros(E, dtype=torch.int32)
    base = {"rows": torch.randn(6, H), "weight": torch.randn(E, 2 * I, H), "offsets": offsets, "weight_scales": []}
    return {**base, **changes}


def grouped_fp8(**changes: Any) -> dict[str, Any]:
    weight = torch.zeros(E, 2 * I, H, dtype=torch.float8_e4m3fn)
    base = {"rows": torch.zeros(6, H, dtype=torch.float8_e4m3fn), "rows_scale": torch.ones(6, 1), "weight": weight}
    return grouped(**{**base, "weight_scales": [torch.ones(E, 1, 1)], "scheme": "fp8_block128", **changes})


def batched(**changes: Any) -> dict[str, Any]:
    counts = torch.zeros(E, dtype=torch.int32)
    base = {"batch": torch.randn(E, 3, H), "weight": torch.randn(E, 2 * I, H), "expert_num_tokens": counts}
    return {**base, "weight_scales": [], **changes}


def quantize(**changes: Any) -> dict[str, Any]:
    return {"rows": torch.randn(2, 8), "scheme": "fp8_block128", **changes}


def quantize_batch(**changes: Any) -> dict[str, Any]:
    counts = torch.zeros(2, dtype=torch.int32)
    return {"batch": torch.randn(2, 3, 8), "expert_num_tokens": counts, "scheme": "fp8_block128", **changes}


def weight(**changes: Any) -> dict[str, Any]:
    return {"weight": torch.randn(1, 2, 2), "scheme": "fp8_block128", **changes}


def batched_fp8(**changes: Any) -> dict[str, Any]:
    weight = torch.zeros(E, 2 * I, H, dtype=torch.float8_e4m3fn)
    base = {"batch": torch.zeros(E, 3, H, dtype=torch.float8_e4m3fn), "batch_scale": torch.ones(E, 3, 1)}
    return batched(
        **{**base, "weight": weight, "weight_scales": [torch.ones(E, 1, 1)], "scheme": "fp8_block128", **changes}
    )


def saving(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in layer(**changes).items() if not name.endswith("_scales")}


def _sorted() -> dict[str, Any]:
    """Where the pairs are, and what a layer's gradients need besides."""
    sizes = {"offsets": (E,), "row_to_pair": (T * K,), "pair_to_row": (T, K)}
    return {"topk_weights": torch.rand(T, K)} | {
        name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()
    }


def backward(**changes: Any) -> dict[str, Any]:
    saved = {"gate_up": torch.randn(T * K, 2 * I), "up": torch.empty(0), "down_proj": torch.randn(E, H, I)}
    return {"grad_output": torch.randn(T, H), **saved, **_sorted(), "value": True, **changes}


def backward_first(**changes: Any) -> dict[str, Any]:
    grads = {"grad_gate_up": torch.randn(T * K, 2 * I), "grad_up": torch.empty(0)}
    layer = {"hidden_states": torch.randn(T, H), "gate_up_proj": torch.randn(E, 2 * I, H)}
    return {**grads, **layer, **_sorted(), "needs": [True, True, False, True, False], **changes}


def topk_backward(**changes: Any) -> dict[str, Any]:
    ids = torch.zeros(T, K, dtype=torch.int32)
    base = {"grad_weights": torch.randn(T, K), "router_logits": torch.randn(T, E), "topk_ids": ids, "top_k": K}
    return {**base, **changes}


def sort(**changes: Any) -> dict[str, Any]:
    return {"topk_ids": torch.zeros(T, K, dtype=torch.int32), "num_experts": E, **changes}


def gather(**changes: Any) -> dict[str, Any]:
    base = {"tokens": torch.randn(T, H), "weight": torch.randn(E, 2 * I, H), **_sorted()}
    return {**base, **changes}


def wgrad(**changes: Any) -> dict[str, Any]:
    offsets = torch.zeros(E, dtype=torch.int32)
    return {"grad_rows": torch.randn(6, I), "rows": torch.randn(6, H), "offsets": offsets, **changes}


def sums(**changes: Any) -> dict[str, Any]:
    return {"rows": torch.randn(6, H), "offsets": torch.zeros(E, dtype=torch.int32), **changes}


def _prepared() -> Any:
    return moe_ops.prepare(torch.randn(T, H), torch.rand(T, K), torch.zeros(T, K, dtype=torch.int32), num_experts=E)


def prepare(**changes: Any) -> dict[str, Any]:
    ids = torch.zeros(T, K, dtype=torch.int32)
    base = {"hidden_states": torch.randn(T, H), "topk_weights": torch.rand(T, K), "topk_ids": ids, "num_experts": E}
    return {**base, **changes}


def experts(**changes: Any) -> dict[str, Any]:
    base = {"prepared": _prepared(), "gate_up_proj": torch.randn(E, 2 * I, H), "down_proj": torch.randn(E, H, I)}
    return {**base, **changes}


def finalize(**changes: Any) -> dict[str, Any]:
    return {"result": torch.randn(T * K, H), "prepared": _prepared(), **changes}


#: Public function -> its valid arguments.
PUBLIC: dict[str, Callable[..., dict[str, Any]]] = {
    "fused_topk": topk,
    "fused_experts": layer,
    "fused_moe": moe,
    "moe_permute": permute,
    "moe_unpermute": unpermute,
    "batched_dispatch": dispatch,
    "batched_combine": combine,
    "quantize_rows": quantize,
    "quantize_batched": quantize_batch,
    "grouped_mm_glu": grouped,
    "grouped_mm": grouped,
    "batched_mm_glu": batched,
    "batched_mm": batched,
    "quantize_weight": weight,
    "prepare": prepare,
    "experts": experts,
    "finalize": finalize,
}
