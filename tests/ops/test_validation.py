"""Every wrong argument gives one clear ValueError: operator, argument, rule with letters and values, got, cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from meta.checks import check_placement
from meta.schemes import SCHEMES
from meta.shapes import RULES
from tests.ops.calls import CALLS
from tests.ops.layers import VARIANTS
from tests.ops.valid import (
    PUBLIC,
    E,
    H,
    I,
    K,
    T,
    backward,
    backward_first,
    batched,
    batched_fp8,
    combine,
    dispatch,
    fp8,
    gather,
    grouped,
    grouped_fp8,
    layer,
    moe,
    permute,
    quantize,
    quantize_batch,
    saving,
    sort,
    sums,
    topk,
    topk_backward,
    unpermute,
    wgrad,
)

#: Names that quantise activations.
QUANTIZE_ROWS = sorted(name for name, row in SCHEMES.items() if row.rows is not None)

Case = tuple[str, Callable[..., dict[str, Any]], dict[str, Any], str]

half = torch.randn(T, H).half()
CASES: dict[str, Case] = {
    "down_transposed": (
        "fused_experts",
        layer,
        {"down_proj": torch.randn(E, I, H)},
        "fused_experts: down_proj must be [E=8, H=16, I=12], got [8, 12, 16]. Did you pass it transposed?",
    ),
    "gate_up_transposed": (
        "fused_experts",
        layer,
        {"gate_up_proj": torch.randn(E, H, 2 * I)},
        "fused_experts: gate_up_proj must be [E=8, N=16, H=16], got [8, 16, 24]. Did you pass it transposed?",
    ),
    "down_experts": (
        "fused_experts",
        layer,
        {"down_proj": torch.randn(3, H, I)},
        "down_proj must be [E=8, H=16, I=12], got [3",
    ),
    "gate_up_rank": (
        "fused_experts",
        layer,
        {"gate_up_proj": torch.randn(E, H)},
        "gate_up_proj must be [E, N, H], got [8, 16]",
    ),
    "odd_gate_up": (
        "fused_experts",
        layer,
        {"gate_up_proj": torch.randn(E, 23, H)},
        "gate_up_proj must be [E, N = 2 * I, ...] for glu_layout='concat', got N=23. For experts",
    ),
    "hidden_rank": (
        "fused_experts",
        layer,
        {"hidden_states": torch.randn(1, T, H)},
        "hidden_states must be [T, H], got [1, 4, 16]",
    ),
    "hidden_integer": (
        "fused_experts",
        layer,
        {"hidden_states": torch.ones(T, H).int()},
        "hidden_states must be bfloat16, float16",
    ),
    "hidden_dtype": (
        "fused_experts",
        layer,
        {"hidden_states": half},
        "hidden_states must be torch.float32, got torch.float16. Cast it to the weights' dtype.",
    ),
    "down_dtype": (
        "fused_experts",
        layer,
        {"down_proj": torch.randn(E, H, I).half()},
        "down_proj must be torch.float32, got",
    ),
    "weights_integer": (
        "fused_experts",
        layer,
        {"topk_weights": torch.ones(T, K).int()},
        "topk_weights must be bfloat16",
    ),
    "weights_shape": (
        "fused_experts",
        layer,
        {"topk_weights": torch.rand(T, 3)},
        "topk_weights must be [T=4, K=2], got [4, 3]",
    ),
    "ids_tokens": (
        "fused_experts",
        layer,
        {"topk_ids": torch.zeros(5, K).int()},
        "topk_ids must be [T=4, K=2], got [5, 2]",
    ),
    "ids_rank": ("fused_experts", layer, {"topk_ids": torch.zeros(T).int()}, "topk_ids must be [T, K], got [4]"),
    "ids_float": (
        "fused_experts",
        layer,
        {"topk_ids": torch.zeros(T, K)},
        "topk_ids must be int32 or int64, got torch.float32",
    ),
    "ids_int16": (
        "fused_experts",
        layer,
        {"topk_ids": torch.zeros(T, K).short()},
        "topk_ids must be int32 or int64, got torch.int16",
    ),
    "map_float": (
        "fused_experts",
        layer,
        {"expert_map": torch.zeros(E)},
        "expert_map must be int32 or int64, got torch.float32",
    ),
    "map_rank": (
        "fused_experts",
        layer,
        {"expert_map": torch.zeros(E, 1).int()},
        "expert_map must be [E_global], got [8, 1]",
    ),
    "gate_up_bias": (
        "fused_experts",
        layer,
        {"gate_up_bias": torch.zeros(E, I)},
        "gate_up_bias must be [E=8, N=24], got [8, 12]",
    ),
    "down_bias": ("fused_experts", layer, {"down_bias": torch.zeros(H)}, "down_bias must be [E=8, H=16], got [16]"),
    "bias_integer": (
        "fused_experts",
        layer,
        {"down_bias": torch.zeros(E, H).int()},
        "down_bias must be bfloat16, float16",
    ),
    "device": (
        "fused_experts",
        layer,
        {"down_proj": torch.empty(E, H, I, device="meta")},
        "down_proj must be on cpu like hidden_states",
    ),
    "sparse": (
        "fused_experts",
        layer,
        {"hidden_states": torch.randn(T, H).to_sparse()},
        "hidden_states must be a strided tensor, got",
    ),
    "activation": (
        "fused_experts",
        layer,
        {"activation": "swish"},
        "activation must be one of ['gelu', 'gelu_tanh', 'quick_gelu', 'relu'",
    ),
    "alpha": ("fused_experts", layer, {"alpha": 2.0}, "alpha must be None for activation 'silu', got 2.0"),
    "limit": ("fused_experts", layer, {"activation": "silu_clamp", "limit": -1.0}, "limit must be > 0, got -1.0"),
    "cap": ("fused_experts", layer, {"activation": "silu_softcap", "alpha": 0.0}, "alpha must be > 0 for activation"),
    "glu_layout": (
        "fused_experts",
        layer,
        {"glu_layout": "split"},
        "glu_layout must be one of ['concat', 'interleaved', 'none', 'separate'], got",
    ),
    "scheme": (
        "fused_experts",
        layer,
        {"scheme": "int3"},
        f"scheme must be one of {sorted(SCHEMES)}, got",
    ),
    "scheme_of_other_weights": (
        "fused_experts",
        layer,
        {"scheme": "bf16"},
        "weights must be torch.bfloat16 for scheme='bf16', got",
    ),
    "format": (
        "fused_experts",
        layer,
        {"format": "dense"},
        "format must be one of ['batched', 'grouped'], got 'dense'",
    ),
    "capacity_grouped": (
        "fused_experts",
        layer,
        {"capacity": 3},
        "capacity must be None for format 'grouped', got 3. Pass format=",
    ),
    "capacity_zero": ("fused_experts", layer, {"format": "batched", "capacity": 0}, "capacity must be >= 1, got 0"),
    "backend": (
        "fused_experts",
        layer,
        {"backend": "cuda"},
        "backend must be one of ['cpu', 'reference', 'triton'], got",
    ),
    "scale_unquantised": (
        "fused_experts",
        layer,
        {"gate_up_scales": [torch.ones(E, 1, 1)]},
        "gate_up_scales must be empty for scheme 'fp32', got 1 tensors. Pass the weights' scheme.",
    ),
    "fp8_without_scheme": (
        "fused_experts",
        fp8,
        {"scheme": None},
        "scheme must be given for weights of dtype torch.float8_e4m3fn",
    ),
    "fp8_no_scale": (
        "fused_experts",
        fp8,
        {"down_scales": []},
        "down_scales must be [scale [E, ceil(N / 128), ceil(K / 128)]] for scheme 'fp8_block128', got 0 tensors",
    ),
    "fp8_scale_shape": (
        "fused_experts",
        fp8,
        {"down_scales": [torch.ones(E, 2, 1)]},
        "down_scales[0] must be [E=8, N_groups=1, K_groups=1], got",
    ),
    "fp8_scale_dtype": (
        "fused_experts",
        fp8,
        {"gate_up_scales": [torch.ones(E, 1, 1).half()]},
        "gate_up_scales[0] must be torch.float32 or torch.bfloat16 or torch.float8_e8m0fnu, got torch.float16",
    ),
    "fp8_too_many_scales": (
        "fused_experts",
        fp8,
        {"gate_up_scales": [torch.ones(E, 1, 1)] * 2},
        "gate_up_scales must be [scale [E, ceil(N / 128), ceil(K / 128)]] for scheme 'fp8_block128', got 2 tensors",
    ),
    "fp8_halves_shape": (
        "fused_experts",
        fp8,
        {"gate_up_scales": [torch.ones(E, 2, 2, 1)]},
        "gate_up_scales[0] must be [E=8, 2=2, I_groups=1, K_groups=1], got [8, 2, 2, 1]",
    ),
    "fp8_halves_of_interleaved": (
        "fused_experts",
        fp8,
        {"gate_up_scales": [torch.ones(E, 2, 1, 1)], "glu_layout": "interleaved"},
        "gate_up_scales[0] must be [E=8, N_groups=1, K_groups=1], got [8, 2, 1, 1]",
    ),
    "fp8_halves_of_down": (
        "fused_experts",
        fp8,
        {"down_scales": [torch.ones(E, 2, 1, 1)]},
        "down_scales[0] must be [E=8, N_groups=1, K_groups=1], got [8, 2, 1, 1]",
    ),
    "fp8_separate_without_its_scales": (
        "fused_experts",
        fp8,
        {
            "up_proj": torch.zeros(E, 2 * I, H, dtype=torch.float8_e4m3fn),
            "down_proj": torch.zeros(E, H, 2 * I, dtype=torch.float8_e4m3fn),
        },
        "gate_up_scales must be as many tensors for up_proj as for gate_up_proj, after them, got 1 tensors",
    ),
    "rows_scale_unquantised": (
        "fused_experts",
        layer,
        {"hidden_states_scale": torch.ones(T, 1)},
        "hidden_states_scale must be None for scheme 'fp32', got a tensor",
    ),
    "rows_scale_shape": (
        "fused_experts",
        fp8,
        {"hidden_states": torch.zeros(T, H, dtype=torch.float8_e4m3fn), "hidden_states_scale": torch.ones(T, 2)},
        "hidden_states_scale must be [T=4, H_groups=1], got [4, 2]",
    ),
    "rows_scale_of_floats": (
        "fused_experts",
        fp8,
        {"hidden_states_scale": torch.ones(T, 1)},
        "hidden_states must be torch.float8_e4m3fn, got torch.float32. Call moe_ops.quantize_rows first.",
    ),
    "rows_without_scale": (
        "fused_experts",
        fp8,
        {"hidden_states": torch.zeros(T, H, dtype=torch.float8_e4m3fn)},
        "hidden_states must be bfloat16, float16, float32 or float64, got torch.float8_e4m3fn",
    ),
    "rows_scale_with_weight_on_input": (
        "fused_experts",
        fp8,
        {
            "hidden_states": torch.zeros(T, H, dtype=torch.float8_e4m3fn),
            "hidden_states_scale": torch.ones(T, 1),
            "weight_on_input": True,
        },
        "hidden_states_scale must be None with weight_on_input, got a tensor. Weigh the rows before",
    ),
    "separate_without_up": (
        "fused_experts",
        layer,
        {"glu_layout": "separate"},
        "up_proj must be given for glu_layout='separate', got None. Pass the up projection.",
    ),
    "up_of_interleaved": (
        "fused_experts",
        layer,
        {"glu_layout": "interleaved", "up_proj": torch.randn(E, 2 * I, H)},
        "up_proj must be None for glu_layout='interleaved', got a tensor. Pass glu_layout='separate'.",
    ),
    "up_beside_both_halves": (
        "fused_experts",
        layer,
        {"up_proj": torch.randn(E, I, H)},
        f"up_proj must be [E={E}, I={2 * I}, K={H}], got [{E}, {I}, {H}].",
    ),
    "up_shape": (
        "fused_experts",
        layer,
        {"up_proj": torch.randn(E, I, H), "down_proj": torch.randn(E, H, 2 * I)},
        "up_proj must be [E=8, I=24, K=16], got [8, 12, 16]",
    ),
    "up_dtype": (
        "fused_moe",
        moe,
        {"up_proj": torch.randn(E, 2 * I, H).bfloat16(), "down_proj": torch.randn(E, H, 2 * I)},
        "up_proj must be torch.float32, got torch.bfloat16. Store it as gate_up_proj is stored.",
    ),
    "up_bias": (
        "fused_experts",
        layer,
        {
            "up_proj": torch.randn(E, 2 * I, H),
            "down_proj": torch.randn(E, H, 2 * I),
            "gate_up_bias": torch.zeros(E, 2 * I),
        },
        "gate_up_bias must be [E=8, N=48], got [8, 24]",
    ),
    "up_weight_shape": (
        "grouped_mm_glu",
        grouped,
        {"up_weight": torch.randn(E, 2 * I, H + 1)},
        "up_weight must be [E=8, I=24, K=16], got [8, 24, 17]",
    ),
    "added_shape": (
        "moe_unpermute",
        unpermute,
        {"added": torch.zeros(T, H + 1)},
        "added must be [T=4, H=16], got [4, 17]",
    ),
    "added_integer": (
        "batched_combine",
        combine,
        {"added": torch.zeros(T, H).int()},
        "added must be bfloat16, float16",
    ),
    "slot_order": (
        "batched_dispatch",
        dispatch,
        {"slot_order": "k"},
        "slot_order must be one of ['choice', 'token'], got 'k'",
    ),
    "k_above_e": (
        "fused_topk",
        topk,
        {"top_k": 9},
        "fused_topk: top_k must be <= E=8, got 9. A token cannot select more experts than it may choose from.",
    ),
    "k_zero": ("fused_topk", topk, {"top_k": 0}, "top_k must be >= 1, got 0"),
    "k_above_groups": (
        "fused_topk",
        topk,
        {"routing": "sigmoid_group_max", "num_groups": 4, "topk_groups": 1, "top_k": 3},
        "top_k must be <= 2 = E=8 / num_groups=4 * topk_groups=1, got 3",
    ),
    "routing": ("fused_topk", topk, {"routing": "top2"}, "routing must be one of ['sigmoid', 'sigmoid_group_max'"),
    "groups_without_routing": (
        "fused_topk",
        topk,
        {"num_groups": 2},
        "num_groups must be 1 for routing 'softmax', got 2. Use one of",
    ),
    "groups_divide": (
        "fused_topk",
        topk,
        {"routing": "softmax_group_max", "num_groups": 3},
        "num_groups must be a divisor of E=8",
    ),
    "groups_of_two": (
        "fused_topk",
        topk,
        {"routing": "softmax_group_top2", "num_groups": 8},
        "num_groups must be a divisor of E=8 leaving >= 2 experts a group, got 8",
    ),
    "topk_groups": (
        "fused_topk",
        topk,
        {"routing": "softmax_group_max", "num_groups": 2, "topk_groups": 3},
        "topk_groups must be <= num_groups=2, got 3",
    ),
    "topk_groups_of_one": ("fused_topk", topk, {"topk_groups": 3}, "topk_groups must be <= num_groups=1, got 3"),
    "renorm_eps": ("fused_topk", topk, {"renorm_eps": -1.0}, "renorm_eps must be >= 0, got -1.0"),
    "logits_rank": (
        "fused_topk",
        topk,
        {"router_logits": torch.randn(2, T, E)},
        "router_logits must be [T, E], got [2, 4, 8]",
    ),
    "logits_integer": (
        "fused_topk",
        topk,
        {"router_logits": torch.ones(T, E).int()},
        "router_logits must be bfloat16, float16",
    ),
    "correction_bias_shape": (
        "fused_topk",
        topk,
        {"correction_bias": torch.zeros(7)},
        "correction_bias must be [E=8], got [7]",
    ),
    "correction_bias_routing": (
        "fused_topk",
        topk,
        {"routing": "topk_softmax", "correction_bias": torch.zeros(E)},
        "correction_bias must be None for routing 'topk_softmax'",
    ),
    "moe_logits_experts": (
        "fused_moe",
        moe,
        {"router_logits": torch.randn(T, 9)},
        "router_logits must be [T=4, E=8], got [4, 9]",
    ),
    "moe_logits_tokens": (
        "fused_moe",
        moe,
        {"router_logits": torch.randn(3, E)},
        "router_logits must be [T=4, E=8], got [3, 8]",
    ),
    "moe_logits_global": (
        "fused_moe",
        moe,
        {"expert_map": torch.zeros(16).int()},
        "router_logits must be [T=4, E_global=16], got [4, 8]",
    ),
    "moe_k_above_e": ("fused_moe", moe, {"top_k": 9}, "fused_moe: top_k must be <= E=8, got 9"),
    "moe_down_transposed": (
        "fused_moe",
        moe,
        {"down_proj": torch.randn(E, I, H)},
        "fused_moe: down_proj must be [E=8, H=16, I=12], got",
    ),
    "permute_many_experts": (
        "moe_permute",
        permute,
        {"num_experts": 2**31},
        "num_experts must be <= 2147483647 so that an expert's number fits int32, got 2147483648. Pass how many",
    ),
    "permute_experts": ("moe_permute", permute, {"num_experts": 0}, "num_experts must be >= 1, got 0"),
    "permute_ids": (
        "moe_permute",
        permute,
        {"topk_ids": torch.zeros(T, K)},
        "topk_ids must be int32 or int64, got torch.float32",
    ),
    "permute_tokens": (
        "moe_permute",
        permute,
        {"topk_ids": torch.zeros(3, K).int()},
        "topk_ids must be [T=4, K=2], got [3, 2]",
    ),
    "dispatch_capacity": ("batched_dispatch", dispatch, {"capacity": 0}, "capacity must be >= 1, got 0"),
    "dispatch_overflow": (
        "batched_dispatch",
        dispatch,
        {"capacity": 2**30},
        "capacity must be <= 268435455 so that a slot number fits int32, got 1073741824",
    ),
    "unpermute_rows": (
        "moe_unpermute",
        unpermute,
        {"rows": torch.randn(7, 2, H)},
        "rows must be [R, H], got [7, 2, 16]",
    ),
    "unpermute_places": (
        "moe_unpermute",
        unpermute,
        {"pair_to_row": torch.zeros(T, K).long()},
        "pair_to_row must be torch.int32, got torch.int64. Pass it as the dispatch operator returned it.",
    ),
    "unpermute_weights": (
        "moe_unpermute",
        unpermute,
        {"topk_weights": torch.rand(T, 1)},
        "topk_weights must be [T=4, K=2], got",
    ),
    "combine_batch": ("batched_combine", combine, {"batch": torch.randn(E, H)}, "batch must be [E, C, H], got [8, 16]"),
    "combine_slots": (
        "batched_combine",
        combine,
        {"slots": torch.zeros(T, K)},
        "slots must be torch.int32, got torch.float32",
    ),
    "quantize_scheme": (
        "quantize_rows",
        quantize,
        {"scheme": "bf16"},
        f"quantize_rows: scheme must be one of {QUANTIZE_ROWS}, got 'bf16'",
    ),
    "quantize_rank": (
        "quantize_rows",
        quantize,
        {"rows": torch.randn(8)},
        "rows must be [R, K], got [8]",
    ),
    "quantize_counts": (
        "quantize_batched",
        quantize_batch,
        {"expert_num_tokens": torch.zeros(3).int()},
        "expert_num_tokens must be [E=2], got [3]",
    ),
    "gemm_transposed": (
        "grouped_mm",
        grouped,
        {"weight": torch.randn(E, H, 2 * I)},
        "weight must be [E=8, N=16, K=16], got [8, 16, 24]. Did you pass it transposed?",
    ),
    "gemm_dtype": (
        "grouped_mm",
        grouped,
        {"rows": torch.randn(6, H).half()},
        "rows must be torch.float32, got torch.float16. Cast",
    ),
    "gemm_offsets": ("grouped_mm", grouped, {"offsets": torch.zeros(9).int()}, "offsets must be [E=8], got [9]"),
    "gemm_offsets_dtype": (
        "grouped_mm",
        grouped,
        {"offsets": torch.zeros(E).long()},
        "offsets must be torch.int32, got torch.int64",
    ),
    "gemm_bias": ("grouped_mm", grouped, {"bias": torch.zeros(E, I)}, "bias must be [E=8, N=24], got [8, 12]"),
    "gemm_out_dtype": (
        "grouped_mm",
        grouped,
        {"out_dtype": torch.int32},
        "out_dtype must be bfloat16, float16, float32 or float64, got",
    ),
    "gemm_rows_scale": (
        "grouped_mm",
        grouped,
        {"rows_scale": torch.ones(6, 1)},
        "rows_scale must be None for scheme 'fp32'",
    ),
    "glu_quantize": (
        "grouped_mm_glu",
        grouped,
        {"quantize_output": True},
        "quantize_output must be False for scheme 'fp32', got True",
    ),
    "glu_odd": (
        "grouped_mm_glu",
        grouped,
        {"weight": torch.randn(E, 23, H)},
        "weight must be [E, N = 2 * I, ...] for glu_layout='concat'",
    ),
    "fp8_rows": (
        "grouped_mm",
        grouped_fp8,
        {"rows": torch.randn(6, H)},
        "rows must be torch.float8_e4m3fn, got torch.float32. Call moe_ops.quantize_rows first.",
    ),
    "fp8_rows_scale": (
        "grouped_mm",
        grouped_fp8,
        {"rows_scale": None},
        "rows_scale must be given for scheme 'fp8_block128', got None",
    ),
    "fp8_rows_scale_shape": (
        "grouped_mm",
        grouped_fp8,
        {"rows_scale": torch.ones(6, 2)},
        "rows_scale must be [R=6, K_groups=1], got",
    ),
    "batch_experts": (
        "batched_mm",
        batched,
        {"batch": torch.randn(3, 3, H)},
        "batch must be [E=8, C=3, K=16], got [3, 3, 16]",
    ),
    "batch_rank": ("batched_mm", batched, {"batch": torch.randn(3, H)}, "batch must be [E, C, K], got [3, 16]"),
    "batch_counts": (
        "batched_mm_glu",
        batched,
        {"expert_num_tokens": torch.zeros(E)},
        "expert_num_tokens must be torch.int32, got",
    ),
}


#: Every other check of the rules.
MORE: dict[str, Case] = {
    "bias_dtype_gate_up": (
        "fused_experts",
        layer,
        {"gate_up_bias": torch.zeros(E, 2 * I).int()},
        "gate_up_bias must be bfloat16",
    ),
    "fp8_down_scale_dtype": (
        "fused_experts",
        fp8,
        {"down_scales": [torch.ones(E, 1, 1).double()]},
        "down_scales[0] must be torch.float32 or torch.bfloat16 or torch.float8_e8m0fnu, got torch.float64",
    ),
    "fp8_gate_up_no_scale": (
        "fused_experts",
        fp8,
        {"gate_up_scales": ()},
        "gate_up_scales must be [scale [E, ceil(N / 128), ceil(K / 128)]] for scheme 'fp8_block128', got 0 tensors",
    ),
    "fp8_gate_up_scale_shape": (
        "fused_experts",
        fp8,
        {"gate_up_scales": [torch.ones(E, 1, 2)]},
        "gate_up_scales[0] must be [E=8, N_groups=1, K_groups=1], got [8, 1, 2]",
    ),
    "fp8_down_dtype": (
        "fused_experts",
        fp8,
        {"down_proj": torch.zeros(E, H, I)},
        "down_proj must be torch.float8_e4m3fn, got torch.float32. Both projections share one scheme.",
    ),
    "fp8_hidden_integer": (
        "fused_experts",
        fp8,
        {"hidden_states": torch.ones(T, H).int()},
        "hidden_states must be bfloat16, float16",
    ),
    "down_scale_unquantised": (
        "fused_experts",
        layer,
        {"down_scales": [torch.ones(E, 1, 1)]},
        "down_scales must be empty for scheme 'fp32'",
    ),
    "down_rank": ("fused_experts", layer, {"down_proj": torch.randn(E, H)}, "down_proj must be [E, H, I], got [8, 16]"),
    "weights_rank": (
        "fused_experts",
        layer,
        {"topk_weights": torch.rand(T)},
        "topk_weights must be [T=4, K=2], got [4]",
    ),
    "format_of_moe": (
        "fused_moe",
        moe,
        {"format": "dense"},
        "format must be one of ['batched', 'grouped'], got 'dense'",
    ),
    "glu_layout_of_moe": (
        "fused_moe",
        moe,
        {"glu_layout": "split"},
        "glu_layout must be one of ['concat', 'interleaved', 'none', 'separate'], got 'split'",
    ),
    "moe_hidden_rank": (
        "fused_moe",
        moe,
        {"hidden_states": torch.randn(1, T, H)},
        "hidden_states must be [T, H], got [1, 4, 16]",
    ),
    "moe_bias_integer": (
        "fused_moe",
        moe,
        {"correction_bias": torch.zeros(E).int()},
        "correction_bias must be bfloat16",
    ),
    "moe_map_float": ("fused_moe", moe, {"expert_map": torch.zeros(E)}, "expert_map must be int32 or int64"),
    "correction_bias_integer": (
        "fused_topk",
        topk,
        {"correction_bias": torch.zeros(E).int()},
        "correction_bias must be bfloat16",
    ),
    "correction_bias_rank": (
        "fused_topk",
        topk,
        {"correction_bias": torch.zeros(1, E)},
        "correction_bias must be [E=8], got [1, 8]",
    ),
    "num_groups_zero": ("fused_topk", topk, {"num_groups": 0}, "num_groups must be >= 1, got 0"),
    "topk_groups_zero": ("fused_topk", topk, {"topk_groups": 0}, "topk_groups must be >= 1, got 0"),
    "renorm_eps_nan": ("fused_topk", topk, {"renorm_eps": float("nan")}, "renorm_eps must be >= 0, got nan"),
    "permute_hidden_rank": (
        "moe_permute",
        permute,
        {"hidden_states": torch.randn(H)},
        "hidden_states must be [T, H], got [16]",
    ),
    "permute_hidden_integer": (
        "moe_permute",
        permute,
        {"hidden_states": torch.ones(T, H).int()},
        "hidden_states must be bfloat16",
    ),
    "permute_ids_rank": (
        "moe_permute",
        permute,
        {"topk_ids": torch.zeros(T).int()},
        "topk_ids must be [T, K], got [4]",
    ),
    "permute_map": (
        "moe_permute",
        permute,
        {"expert_map": torch.zeros(E, 1).int()},
        "expert_map must be [E_global], got [8, 1]",
    ),
    "dispatch_experts": ("batched_dispatch", dispatch, {"num_experts": 0}, "num_experts must be >= 1, got 0"),
    "dispatch_map": ("batched_dispatch", dispatch, {"expert_map": torch.zeros(E)}, "expert_map must be int32 or int64"),
    "unpermute_rank": (
        "moe_unpermute",
        unpermute,
        {"rows": torch.randn(1, T * K, H)},
        "rows must be [R, H], got [1, 8, 16]",
    ),
    "unpermute_integer": ("moe_unpermute", unpermute, {"rows": torch.ones(T * K, H).int()}, "rows must be bfloat16"),
    "unpermute_places_rank": (
        "moe_unpermute",
        unpermute,
        {"pair_to_row": torch.zeros(T).int()},
        "pair_to_row must be [T, K], got [4]",
    ),
    "unpermute_weights_integer": (
        "moe_unpermute",
        unpermute,
        {"topk_weights": torch.ones(T, K).int()},
        "topk_weights must be bfloat16",
    ),
    "combine_integer": ("batched_combine", combine, {"batch": torch.ones(E, 2, H).int()}, "batch must be bfloat16"),
    "combine_slots_rank": (
        "batched_combine",
        combine,
        {"slots": torch.zeros(T).int()},
        "slots must be [T, K], got [4]",
    ),
    "combine_weights": (
        "batched_combine",
        combine,
        {"topk_weights": torch.rand(T, 3)},
        "topk_weights must be [T=4, K=2], got [4, 3]",
    ),
    "quantize_integer": ("quantize_rows", quantize, {"rows": torch.ones(2, 8).int()}, "rows must be bfloat16"),
    "quantize_batched_rank": (
        "quantize_batched",
        quantize_batch,
        {"batch": torch.randn(2, 8)},
        "batch must be [E, C, K], got [2, 8]",
    ),
    "quantize_batched_integer": (
        "quantize_batched",
        quantize_batch,
        {"batch": torch.ones(2, 3, 8).int()},
        "batch must be bfloat16",
    ),
    "quantize_batched_scheme": (
        "quantize_batched",
        quantize_batch,
        {"scheme": "fp16"},
        f"scheme must be one of {QUANTIZE_ROWS}, got 'fp16'",
    ),
    "quantize_counts_dtype": (
        "quantize_batched",
        quantize_batch,
        {"expert_num_tokens": torch.zeros(2).long()},
        "expert_num_tokens must be torch.int32, got torch.int64",
    ),
    "gemm_rank": ("grouped_mm", grouped, {"rows": torch.randn(1, 6, H)}, "rows must be [R, K], got [1, 6, 16]"),
    "gemm_weight_rank": (
        "grouped_mm",
        grouped,
        {"weight": torch.randn(2 * I, H)},
        "weight must be [E, N, K], got [24, 16]",
    ),
    "gemm_bias_integer": ("grouped_mm", grouped, {"bias": torch.zeros(E, 2 * I).int()}, "bias must be bfloat16"),
    "gemm_scheme": (
        "grouped_mm",
        grouped,
        {"scheme": "int3"},
        f"scheme must be one of {sorted(SCHEMES)}, got 'int3'",
    ),
    "gemm_scheme_of_other_weights": (
        "grouped_mm",
        grouped,
        {"scheme": "bf16"},
        "weights must be torch.bfloat16 for scheme='bf16', got torch.float32. Convert",
    ),
    "gemm_weight_scale": (
        "grouped_mm",
        grouped,
        {"weight_scales": [torch.ones(E, 1, 1)]},
        "weight_scales must be empty for scheme 'fp32', got 1 tensors",
    ),
    "glu_activation": ("grouped_mm_glu", grouped, {"activation": "swish"}, "activation must be one of ['gelu'"),
    "glu_layout": (
        "grouped_mm_glu",
        grouped,
        {"glu_layout": "split"},
        "glu_layout must be one of ['concat', 'interleaved', 'none', 'separate']",
    ),
    "fp8_weight_scale_dtype": (
        "grouped_mm",
        grouped_fp8,
        {"weight_scales": [torch.ones(E, 1, 1).half()]},
        "weight_scales[0] must be torch.float32 or torch.bfloat16 or torch.float8_e8m0fnu, got torch.float16",
    ),
    "fp8_weight_scale": (
        "grouped_mm",
        grouped_fp8,
        {"weight_scales": []},
        "weight_scales must be [scale [E, ceil(N / 128), ceil(K / 128)]] for scheme 'fp8_block128', got 0 tensors",
    ),
    "fp8_weight_scale_shape": (
        "grouped_mm",
        grouped_fp8,
        {"weight_scales": [torch.ones(E, 2, 1)]},
        "weight_scales[0] must be [E=8, N_groups=1, K_groups=1], got",
    ),
    "fp8_rows_scale_dtype": (
        "grouped_mm",
        grouped_fp8,
        {"rows_scale": torch.ones(6, 1).double()},
        "rows_scale must be torch.float32, got torch.float64",
    ),
    "fp8_batch": (
        "batched_mm",
        batched_fp8,
        {"batch": torch.randn(E, 3, H)},
        "batch must be torch.float8_e4m3fn, got torch.float32. Call moe_ops.quantize_batched first.",
    ),
    "fp8_batch_scale": (
        "batched_mm",
        batched_fp8,
        {"batch_scale": None},
        "batch_scale must be given for scheme 'fp8_block128', got None. Call moe_ops.quantize_batched first.",
    ),
    "fp8_batch_scale_dtype": (
        "batched_mm",
        batched_fp8,
        {"batch_scale": torch.ones(E, 3, 1).half()},
        "batch_scale must be torch.float32, got torch.float16",
    ),
    "fp8_batch_scale_shape": (
        "batched_mm",
        batched_fp8,
        {"batch_scale": torch.ones(E, 3)},
        "batch_scale must be [E=8, C=3, K_groups=1], got [8, 3]",
    ),
    "batch_weight": (
        "batched_mm",
        batched,
        {"weight": torch.randn(E, H, 2 * I)},
        "weight must be [E=8, N=16, K=16], got [8, 16, 24]. Did you pass it transposed?",
    ),
    "batch_bias": ("batched_mm", batched, {"bias": torch.zeros(E, I)}, "bias must be [E=8, N=24], got [8, 12]"),
    "batch_counts_size": (
        "batched_mm",
        batched,
        {"expert_num_tokens": torch.zeros(9).int()},
        "expert_num_tokens must be [E=8], got [9]",
    ),
    "grad_rank": (
        "fused_experts_backward",
        backward,
        {"grad_output": torch.randn(T)},
        "grad_output must be [T, H], got [4]",
    ),
    "grad_shape": (
        "fused_experts_backward",
        backward,
        {"grad_output": torch.randn(T, 5)},
        "grad_output must be [T=4, H=16], got [4, 5]",
    ),
    "grad_weight": (
        "fused_experts_backward",
        backward,
        {"down_proj": torch.randn(E, H, I).half()},
        "down_proj must be torch.float32, got torch.float16",
    ),
    "grad_saved": (
        "fused_experts_backward",
        backward,
        {"gate_up": torch.randn(5, 2 * I)},
        "gate_up must be [R=8, N=24], got [5, 24]",
    ),
    "grad_saved_half": (
        "fused_experts_backward",
        backward,
        {"glu_layout": "separate", "gate_up": torch.randn(T * K, I), "up": torch.randn(T * K, 3)},
        "up must be [R=8, N=12], got [8, 3]",
    ),
    "grad_again": (
        "fused_experts_backward",
        backward,
        {"hidden_states": torch.randn(T, H)},
        "gate_up_proj must be a tensor beside hidden_states, got None",
    ),
    "grad_again_weight": (
        "fused_experts_backward",
        backward,
        {"hidden_states": torch.randn(T, H), "gate_up_proj": torch.randn(E, I, H)},
        "gate_up_proj must be [E=8, N=24, H=16], got [8, 12, 16]",
    ),
    "wgrad_kind": (
        "grouped_wgrad",
        wgrad,
        {"tokens": "both"},
        "tokens must be one of ['grad_rows', 'rows'], got 'both'",
    ),
    "grad_places": (
        "fused_experts_backward",
        backward,
        {"pair_to_row": torch.zeros(T, 3).int()},
        "row_to_pair must be [R=12], got [8]",
    ),
    "grad_weights": (
        "fused_experts_backward",
        backward,
        {"topk_weights": torch.rand(T, 3)},
        "topk_weights must be [T=4, K=2], got [4, 3]",
    ),
    "grad_offsets": (
        "fused_experts_backward",
        backward,
        {"offsets": torch.zeros(3).int()},
        "offsets must be [E=8], got [3]",
    ),
    "grad_activation": (
        "fused_experts_backward",
        backward,
        {"activation": "swish"},
        "activation must be one of ['gelu'",
    ),
    "first_needs": (
        "fused_experts_backward_first",
        backward_first,
        {"needs": [True] * 3},
        "needs must be 5 booleans, got 3",
    ),
    "first_rows": (
        "fused_experts_backward_first",
        backward_first,
        {"grad_gate_up": torch.randn(T * K, I)},
        "grad_gate_up must be [R=8, N=24], got [8, 12]",
    ),
    "first_hidden": (
        "fused_experts_backward_first",
        backward_first,
        {"hidden_states": torch.randn(T, 3)},
        "hidden_states must be [T=4, H=16], got [4, 3]",
    ),
    "first_beside": (
        "fused_experts_backward_first",
        backward_first,
        {"grad_output": torch.randn(T, H).half()},
        "grad_output must be torch.float32, got torch.float16",
    ),
    "router_grad": (
        "fused_topk_backward",
        topk_backward,
        {"grad_weights": torch.randn(T, 3)},
        "grad_weights must be [T=4, K=2], got [4, 3]",
    ),
    "router_grad_ids": (
        "fused_topk_backward",
        topk_backward,
        {"topk_ids": torch.zeros(T, K)},
        "topk_ids must be int32 or int64, got torch.float32",
    ),
    "sort_capacity": ("sort_pairs", sort, {"capacity": 0}, "capacity must be >= 1, got 0"),
    "sort_ids": ("sort_pairs", sort, {"topk_ids": torch.zeros(T).int()}, "topk_ids must be [T, K], got [4]"),
    "gather_places": (
        "gathered_mm",
        gather,
        {"row_to_pair": torch.zeros(5).int()},
        "row_to_pair must be [R=8], got [5]",
    ),
    "gather_weight": (
        "gathered_mm",
        gather,
        {"weight": torch.randn(E, 5, 3)},
        "weight must be [E=8, N=5, K=16], got [8, 5, 3]",
    ),
    "gather_weights": (
        "gathered_mm",
        gather,
        {"topk_weights": torch.rand(T, 3)},
        "topk_weights must be [T=4, K=2], got [4, 3]",
    ),
    "saving_ids": ("fused_experts_saving", saving, {"topk_ids": torch.zeros(T)}, "topk_ids must be [T, K], got [4]"),
    "saving_recompute": (
        "fused_experts_saving",
        saving,
        {"recompute": "none"},
        "recompute must be one of ['activation', 'all'], got 'none'",
    ),
    "experts_recompute": (
        "fused_experts",
        layer,
        {"recompute": "everything"},
        "recompute must be one of ['activation', 'all'], got 'everything'",
    ),
    "moe_recompute": (
        "fused_moe",
        moe,
        {"recompute": "everything"},
        "recompute must be one of ['activation', 'all'], got 'everything'",
    ),
    "wgrad_dtype": (
        "grouped_wgrad",
        wgrad,
        {"grad_rows": torch.randn(6, I).half()},
        "grad_rows must be torch.float32, got torch.float16",
    ),
    "wgrad_rows": ("grouped_wgrad", wgrad, {"rows": torch.randn(5, H)}, "rows must be [R=6, K=16], got [5, 16]"),
    "wgrad_tokens": (
        "grouped_wgrad",
        wgrad,
        {"pair_to_row": torch.zeros(6, K).int()},
        "row_to_pair must be a tensor beside pair_to_row, got None",
    ),
    "wgrad_offsets": (
        "grouped_wgrad",
        wgrad,
        {"offsets": torch.zeros(E)},
        "offsets must be torch.int32, got torch.float32",
    ),
    "sums_weights": (
        "expert_sums",
        sums,
        {"topk_weights": torch.rand(T, K)},
        "topk_weights must be None without pair_to_row, got a tensor",
    ),
    "sums_places": (
        "expert_sums",
        sums,
        {"row_to_pair": torch.zeros(6).int()},
        "row_to_pair must be None without pair_to_row, got a tensor",
    ),
}
CASES |= MORE


def call_of(case: Case) -> tuple[Any, dict[str, Any], str]:
    op, base, changes, message = case
    return getattr(torch.ops.moe_ops, op).default, base(**changes), message


@pytest.mark.parametrize("name", CASES)
def test_bad_argument(name: str) -> None:
    op, arguments, message = call_of(CASES[name])
    with pytest.raises(ValueError) as caught:
        op(**arguments)
    op_name = f"{CASES[name][0]}: "
    assert str(caught.value).startswith(op_name)
    # The message begins with the argument's name.
    assert str(caught.value).removeprefix(op_name).startswith(message.removeprefix(op_name))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("sparse", "device")])
def test_bad_argument_compiled(name: str) -> None:
    torch._dynamo.reset()
    op, arguments, message = call_of(CASES[name])
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    options = {key: value for key, value in arguments.items() if not isinstance(value, Tensor)}
    compiled = torch.compile(lambda tensors: op(**tensors, **options), backend="eager", fullgraph=True)
    with pytest.raises(Exception) as caught:
        compiled(tensors)
    assert message.replace("'", "\\'") in str(caught.value) or message in str(caught.value)


def test_symbolic_sizes_are_shown_by_their_values() -> None:
    torch._dynamo.reset()
    arguments = layer(down_proj=torch.randn(E, I, H))
    compiled = torch.compile(torch.ops.moe_ops.fused_experts.default, backend="eager", fullgraph=True, dynamic=True)
    with pytest.raises(Exception) as caught:
        compiled(**arguments)
    assert "down_proj must be [E=8, H=16, I=12], got [8, 12, 16]. Did you pass it transposed?" in str(caught.value)


@pytest.mark.parametrize("base", [layer, fp8], ids=["unquantised", "fp8"])
def test_the_unchanged_calls_are_valid(base: Callable[..., dict[str, Any]]) -> None:
    assert torch.ops.moe_ops.fused_experts(**base()).shape == (T, H)


@pytest.mark.parametrize("op", RULES)
def test_every_operator_has_a_case(op: str) -> None:
    assert op in {case[0] for case in CASES.values()}


@pytest.mark.parametrize("scheme", ["fp8_w8a16", "int4_w4a16", "int8_w8a16", "w4a8_fp8"])
def test_halves_apart_have_scales_of_the_same_groups(scheme: str) -> None:
    """One form addresses both: what is read of another one is beside it."""
    row, gate, up = SCHEMES[scheme], torch.randn(3, 64, 128), torch.randn(3, 64, 128)
    data, (scale, *more) = row.quantize(gate)
    other, (of_up, *more_of_up) = row.quantize(up)
    form = of_up[:, :1] if scheme == "fp8_w8a16" else torch.cat((of_up, of_up), dim=2)
    down, scales = row.quantize(torch.randn(3, 128, 64))
    x, weights, ids = torch.randn(2, 128).bfloat16(), torch.rand(2, 1), torch.zeros(2, 1, dtype=torch.int32)

    def layer(of_up: Tensor) -> Tensor:
        given = {"gate_up_scales": [scale, *more, of_up, *more_of_up], "down_scales": scales}
        return moe_ops.fused_experts(x, data, down, weights, ids, up_proj=other, scheme=scheme, **given)

    layer(of_up)
    with pytest.raises(ValueError, match="gate_up_scales must be of the same groups for up_proj as for gate_up_proj"):
        layer(form)


def test_public_functions_raise_the_same() -> None:
    with pytest.raises(ValueError, match="fused_experts: format must be one of"):
        moe_ops.fused_experts(**layer(), format="dense")
    with pytest.raises(ValueError, match=r"quantize_weight: scheme must be one of .*'fp8_block128', .*, got 'bf16'"):
        moe_ops.quantize_weight(torch.randn(1, 2, 2), scheme="bf16")


def test_none_means_no_gate() -> None:
    arguments = layer(gate_up_proj=torch.randn(E, I, H))
    got = moe_ops.fused_experts(**arguments, glu_layout=None, activation="relu2")
    assert torch.equal(got, moe_ops.fused_experts(**arguments, glu_layout="none", activation="relu2"))


def test_unquantised_glu_returns_one_tensor_and_quantised_a_pair() -> None:
    assert isinstance(moe_ops.grouped_mm_glu(*CALLS["grouped_mm_glu-plain"].args[:3]), Tensor)
    rows, weight, offsets, weight_scales, *_, rows_scale = CALLS["grouped_mm_glu-fp8"].args
    scales = {"scheme": "fp8_block128", "rows_scale": rows_scale, "weight_scales": weight_scales}
    value, scale = moe_ops.grouped_mm_glu(rows, weight, offsets, quantize_output=True, **scales)
    assert value.dtype == torch.float8_e4m3fn and scale.shape == (4, 1)


def tensors_of(op: str) -> list[str]:
    """Arguments of an operator that are tensors."""
    arguments = getattr(torch.ops.moe_ops, op).default._schema.arguments
    return [argument.name for argument in arguments if "Tensor" in str(argument.type)]


BASES = {
    **{op: base for op, base in PUBLIC.items() if op in RULES},
    "fused_experts_saving": saving,
    "fused_experts_backward": backward,
    "fused_experts_backward_first": backward_first,
    "fused_topk_backward": topk_backward,
    "sort_pairs": sort,
    "gathered_mm": gather,
    "grouped_wgrad": wgrad,
    "expert_sums": sums,
}
#: Every tensor of every operator but the first, to whose device the others are compared.
FIRST = {op: tensors_of(op)[0] for op in BASES}
OTHERS = [(op, argument) for op in BASES for argument in tensors_of(op) if argument != FIRST[op]]


@pytest.mark.parametrize(("op", "argument"), OTHERS, ids=lambda value: value)
def test_a_tensor_on_another_gpu(op: str, argument: str) -> None:
    """cuda:0 beside cuda:1, which fake tensors have without a GPU."""
    with FakeTensorMode():
        arguments = {
            name: torch.empty(value.shape, dtype=value.dtype, device="cuda:0") if isinstance(value, Tensor) else value
            for name, value in BASES[op]().items()
        }
        given = arguments.get(argument)
        is_list = argument.endswith("_scales")
        other = torch.empty((1,) if given is None or is_list else given.shape, device="cuda:1")
        arguments[argument] = [other] if is_list else other
        with pytest.raises(ValueError) as caught:
            getattr(torch.ops.moe_ops, op).default(**arguments)
    wanted = (
        f"{op}: {argument}{'[0]' if is_list else ''} must be on cuda:0 like {FIRST[op]}, got cuda:1. Move it first."
    )
    assert str(caught.value) == wanted


#: Tensors whose dispatch keys are others than those of plain ones, and what they are told.
STRANGE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "a strided tensor, got torch.sparse_coo. Call"),
    "sparse_meta": (lambda: torch.eye(2).to_sparse().to("meta"), "a strided tensor, got torch.sparse_coo. Call"),
    "csr_meta": (lambda: torch.eye(2).to_sparse_csr().to("meta"), "a strided tensor, got torch.sparse_csr. Call"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        r"a strided tensor, got a nested one. Concatenate its parts: torch.cat\(x.unbind\(\)\).",
    ),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
        r"a tensor of numbers, got one of torch.qint8. Call .dequantize\(\) first.",
    ),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize(("op", "argument"), OTHERS, ids=lambda value: value)
def test_a_strange_tensor(op: str, argument: str, kind: str) -> None:
    make, rule = STRANGE[kind]
    is_list = argument.endswith("_scales")
    arguments = BASES[op](**{argument: [make()] if is_list else make()})
    place = argument + r"\[0\]" if is_list else argument
    with pytest.raises(ValueError, match=f"^{op}: {place} must be {rule}"):
        getattr(torch.ops.moe_ops, op).default(**arguments)


GIVEN = [
    (op, name) for op in BASES for name, value in BASES[op]().items() if isinstance(value, Tensor) and value.numel()
]


@pytest.mark.parametrize(("op", "argument"), GIVEN, ids=lambda value: value)
def test_a_tensor_whose_memory_was_freed(op: str, argument: str) -> None:
    """As FSDP frees parameters between calls; kernels would read the address 0, warm ones too."""
    run = getattr(torch.ops.moe_ops, op).default
    for _ in range(3):
        run(**BASES[op]())
        arguments = BASES[op]()
        arguments[argument] = arguments[argument].clone()
        arguments[argument].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"^{op}: {argument} must be a tensor with memory, got one whose storage"):
            run(**arguments)


@pytest.mark.parametrize("size", [(), (3,), (1, 1, 1, 1)], ids=str)
def test_rows_of_no_format(size: tuple[int, ...]) -> None:
    arguments = PUBLIC["experts"]()
    prepared = arguments.pop("prepared")._replace(rows=torch.zeros(size))
    with pytest.raises(ValueError, match=r"^experts: prepared.rows must be \[R, H\], got .*It has 2 dimensions"):
        moe_ops.experts(prepared, **arguments)


def test_a_rule_without_tensors_says_so() -> None:
    with pytest.raises(ValueError, match=r"^op: arguments must be tensors, got none"):
        check_placement("op", {"hidden_states": None})


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("rows", [7, 9])
def test_a_gated_weight_has_an_even_number_of_rows(format: str, rows: int) -> None:
    x = torch.randn(4, 8) if format == "grouped" else torch.randn(2, 4, 8)
    counts = torch.tensor([2, 4], dtype=torch.int32)
    name = "grouped_mm_glu" if format == "grouped" else "batched_mm_glu"
    product = getattr(moe_ops, name)
    with pytest.raises(ValueError, match=rf"{name}: weight must be .*N = 2 \* I.*, got N={rows}.*glu_layout='none'"):
        product(x, torch.randn(2, rows, 8), counts)
    assert product(x, torch.randn(2, rows, 8), counts, glu_layout="none")[0].shape[-1] == rows
    assert product(x, torch.randn(2, 6, 8), counts)[0].shape[-1] == 3


def test_only_a_transposed_weight_is_asked_whether_it_is_transposed() -> None:
    x, weights, ids = torch.randn(4, 8), torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    gate_up, down = torch.randn(3, 12, 8), torch.randn(3, 8, 6)

    def message(gate_up: torch.Tensor, down: torch.Tensor) -> str:
        with pytest.raises(ValueError) as caught:
            moe_ops.fused_experts(x, gate_up, down, weights, ids)
        return str(caught.value)

    assert message(gate_up.mT, down).endswith("Did you pass it transposed?")
    assert message(torch.randn(3, 12, 9), down).endswith(".") and "transposed" not in message(
        torch.randn(3, 12, 9), down
    )


def test_what_a_message_asks_for_is_right() -> None:
    """Of one number for all experts, and of a bias that a routing has not."""
    x, up, down, weights, ids = list(VARIANTS["plain"].build().tensors.values())[:5]
    E = len(down)
    (first, first_scale), (second, second_scale) = (
        moe_ops.quantize_weight(weight, scheme="fp8_channel") for weight in (up, down)
    )
    scales = {"gate_up_scales": [first_scale, torch.tensor(0.1)], "down_scales": [second_scale]}
    with pytest.raises(ValueError, match=rf"gate_up_scales\[1\] must be \[E={E}, .*\], got \[\]"):
        moe_ops.fused_experts(x, first, second, weights, ids, scheme="fp8_channel", **scales)
    with pytest.raises(
        ValueError, match=r"correction_bias must be None for .*, got a tensor. Leave it out, or use one of"
    ):
        moe_ops.fused_topk(torch.randn(3, E), torch.zeros(E), top_k=2, routing="topk_softmax")
