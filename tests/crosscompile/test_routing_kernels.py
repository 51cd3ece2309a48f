"""Routing, permuting, combining and quantising compile for every generation, without spills and as wide as claimed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from moe_ops.kernels.triton.act_quant import _quantize_kernel, _quantize_static_kernel
from moe_ops.kernels.triton.batched_io import _dispatch_few_kernel
from moe_ops.kernels.triton.combine import _combine_kernel, register_limit
from moe_ops.kernels.triton.permute import _count_kernel, _place_kernel, _place_small_kernel, _scatter_rows_kernel
from moe_ops.kernels.triton.route import ABSENT_AT_ONCE, _route_few_kernel
from moe_ops.kernels.triton.topk import _topk_kernel
from tests.crosscompile.compiling import CAPABILITIES, Compiled, compile_kernel

FP8_CAPABILITIES = (90, 100)


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel, and which of its global accesses must be 16 bytes wide."""

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    wide_loads: bool = False
    wide_stores: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def compile(self, capability: int) -> Compiled:
        absent = {n: None for n in self.kernel.arg_names if n not in self.signature and n not in self.constexprs}
        constexprs = {**absent, "PDL": False} if "PDL" in self.kernel.arg_names else absent
        return compile_kernel(
            self.kernel,
            self.signature,
            constexprs | self.constexprs,
            capability=capability,
            num_warps=self.num_warps,
            **self.options,
        )


def topk_case(E: int, K: int, score: str, dtype: str, tokens: int = 1, groups: int = 1, bias: bool = False) -> Case:
    signature = {
        "logits_ptr": f"*{dtype}:16",
        "weights_ptr": "*fp32:16",
        "ids_ptr": "*i32:16",
        "T": "i32",
        "stride_t": "i32:16" if E % 16 == 0 else "i32",
        "renorm_eps": "fp32",
        "scale": "fp32",
    }
    slots = 1 << (max(E // groups, 32 // groups) - 1).bit_length()
    constexprs = {
        "stride_e": 1,
        "E": E,
        "TOP_K": K,
        "SCORE": score,
        "AFTER": "softmax" if score == "none" else "none",
        "GROUP_SCORE": "top2" if groups > 1 else None,
        "GROUPS": groups,
        "TOPK_GROUPS": max(1, groups // 2),
        "RENORMALIZE": True,
        "BLOCK_T": tokens,
        "BLOCK_G": groups,
        "BLOCK_S": slots,
        "PACKED": dtype != "fp32" and score in ("softmax", "none") and not bias and groups == 1,
    }
    return Case(_topk_kernel, signature | ({"bias_ptr": "*fp32:16"} if bias else {}), constexprs, num_warps=1)


IDS = {"topk_ids_ptr": "*i64:16", "R": "i32", "E": "i32:16", "E_GLOBAL": "i32:16"}
MAPPED = {**IDS, "expert_map_ptr": "*i64:16"}
LOAD = {"load_ptr": "*i64:16"}
PLACES = LOAD | {"counts_ptr": "*i32:16", "row_to_pair_ptr": "*i32:16", "pair_to_row_ptr": "*i32:16", "capacity": "i32"}
SLOTS = LOAD | {"counts_ptr": "*i32:16", "pair_to_row_ptr": "*i32:16", "capacity": "i32"}
PLACING = {"BATCHED": False, "BLOCK_P": 32, "BLOCK_Q": 128, "GROUP": 0}
BESIDE = {"hidden_ptr": "*bf16:16", "q_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16", "T": "i32"}
BESIDE |= {"H": "i32:16", "stride_h": "i32:16"}
TABLE = {"table_ptr": "*i32:16", "blocks": "i32"}
WEIGHTS = {"weights_ptr": "*fp32:16"}
SCATTER = {
    "hidden_ptr": "*bf16:16",
    "pair_to_row_ptr": "*i32:16",
    "rows_ptr": "*bf16:16",
    "H": "i32:16",
    "stride_t": "i32:16",
}
QUANTIZED = {"rows_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16"}
COMBINE = {
    "rows_ptr": "*bf16:16",
    "pair_to_row_ptr": "*i32:16",
    "out_ptr": "*bf16:16",
    "R": "i32",
    "H": "i32:16",
    "stride_r": "i32:16",
}
QUANTIZE = {"x_ptr": "*bf16:16", "q_ptr": "*fp8e4nv:16", "scale_ptr": "*fp32:16", "counts_ptr": "*i32:16"}
QUANTIZE |= dict.fromkeys(("K", "groups", "stride_e", "stride_r"), "i32:16") | {"rows": "i32"}
STATIC = {name: QUANTIZE[name] for name in ("x_ptr", "q_ptr", "scale_ptr", "K", "stride_r", "rows")}
STATIC |= {"extents_ptr": "*i32:16", "static_ptr": "*fp32:16", "row_to_pair_ptr": "*i32:16"}
WIDE = {"wide_loads": True, "wide_stores": True}


def row_case(columns: int, element: str, num_warps: int, **wide: bool) -> Case:
    """Rows of fp32, as GEMM 1 leaves them, of up to so many columns."""
    signature = {name: kind.replace("bf16", "fp32").replace("fp8e4nv", element) for name, kind in QUANTIZE.items()}
    del signature["groups"]
    return Case(_quantize_kernel, signature, {"GROUP": columns, "BLOCK_M": 1, "groups": 1}, num_warps, **wide)


def halves_case(columns: int, rows: int, num_warps: int) -> Case:
    """The same of fp16 in units of 128 columns."""
    signature = QUANTIZE | {"x_ptr": "*fp16:16", "largest_ptr": "*fp32:16"}
    del signature["groups"]
    return Case(_quantize_kernel, signature, {"GROUP": columns, "BLOCK_M": rows, "groups": 1}, num_warps, **WIDE)


def route_case(
    E: int, K: int, score: str, tokens: int, quantized: bool, group: int = 128, one_token: bool = False, **options: Any
) -> Case:
    """The kernel of `topk_case` that also sorts and quantises, or makes results of `one_token` absent."""
    topk = topk_case(E, K, score, "bf16", tokens=tokens, **options)
    signature = topk.signature | {"offsets_ptr": "*i32:16", "row_to_pair_ptr": "*i32:16", "pair_to_row_ptr": "*i32:16"}
    signature |= LOAD | {"E_HELD": "i32:16", "E_GLOBAL": "i32"} | (BESIDE if quantized else {})
    signature |= {"absent_ptr": "*i16:16", "ABSENT_COUNT": "i32"} if one_token else {}
    sizes = {"BLOCK_K": K, "BLOCK_E": E, "GROUP": group if quantized else 0, "BESIDE_PROGRAMS": 4 if quantized else 0}
    sizes |= {"ABSENT_BLOCK": ABSENT_AT_ONCE.value, "EARLY": one_token}
    return Case(_route_few_kernel, signature, topk.constexprs | sizes, num_warps=tokens)


def place_case(signature: dict[str, str], batched: bool, block_e: int) -> Case:
    constexprs = {"BATCHED": batched, "BLOCK": 1024, "BLOCK_E": block_e, "BLOCK_B": 4096 // block_e, "CHUNK": 128}
    return Case(_place_kernel, signature | TABLE, constexprs, wide_loads=True)


def scatter_case(signature: dict[str, str], row: int = 0, order: tuple[int, int] | None = None) -> Case:
    """`row`: columns of a whole row that has one scale; `order`: of the copies' columns."""
    group = row or (128 if "scale_ptr" in signature else 0)
    constexprs = {"TOP_K": 8, "BLOCK_H": row or 2048, "GROUP": group, "ORDER": order}
    return Case(
        _scatter_rows_kernel,
        signature,
        constexprs,
        num_warps=8,
        wide_loads=order is None,
        wide_stores=not group,
    )


def dispatch_case(rows: dict[str, str], row: int = 0) -> Case:
    """`row`: as in `scatter_case`."""
    group = row or (128 if rows else 0)
    sizes = {"TOP_K": 8, "BLOCK_H": row or 1024, "BLOCK_Q": 128, "BLOCK_E": 16, "GROUP": group, "ORDER": None}
    signature = SCATTER | IDS | LOAD | {"counts_ptr": "*i32:16", "slots_ptr": "*i32:16", "capacity": "i32"} | rows
    del signature["pair_to_row_ptr"]
    warps = 16 if row else 4
    return Case(_dispatch_few_kernel, signature, sizes, warps, wide_loads=True, wide_stores=not rows)


def combine_case(top_k: int, weights: dict[str, str], dtype: str = "bf16", vectorised: bool = True) -> Case:
    signature = {name: kind.replace("bf16", dtype) for name, kind in (COMBINE | weights).items()}
    if not vectorised:
        signature |= {"H": "i32", "stride_r": "i32"}
    return Case(
        _combine_kernel,
        signature,
        {"TOP_K": top_k, "BLOCK_H": 1024 if dtype == "bf16" else 512},
        options={"maxnreg": register_limit(top_k, vectorised)},
        wide_loads=vectorised,
        wide_stores=vectorised,
    )


CLEARED = {"cleared_ptr": "*i32:16", "CLEARED_COUNT": "i32"}
COUNTS, COUNTING = {"table_ptr": "*i32:16"}, {"BLOCK": 1024, "BLOCK_Q": 512, "BLOCK_E": 128}
CASES = {
    "topk_qwen3": topk_case(128, 8, "softmax", "bf16"),
    "topk_qwen3_many_tokens": topk_case(128, 8, "softmax", "bf16", tokens=4),
    "topk_qwen3_fp32": topk_case(128, 8, "softmax", "fp32", tokens=4),
    "topk_mixtral": topk_case(8, 2, "softmax", "bf16"),
    "topk_gpt_oss": topk_case(128, 4, "none", "bf16"),
    "topk_deepseek_v3": topk_case(256, 8, "sigmoid", "fp32", groups=8, bias=True),
    "topk_deepseek_v3_many_tokens": topk_case(256, 8, "sigmoid", "fp32", tokens=2, groups=8, bias=True),
    "topk_512_experts": topk_case(512, 22, "sqrtsoftplus", "fp32", bias=True),
    "topk_60_experts": topk_case(60, 4, "softmax", "bf16"),
    "route_few_qwen3": route_case(128, 8, "softmax", 4, quantized=False),
    "route_few_qwen3_quantising": route_case(128, 8, "softmax", 4, quantized=True),
    "route_few_qwen3_8_tokens": route_case(128, 8, "softmax", 8, quantized=False),
    "route_few_one_token": route_case(128, 8, "softmax", 1, quantized=False, one_token=True),
    "route_few_one_token_quantising": route_case(128, 8, "softmax", 1, quantized=True, one_token=True),
    "route_few_deepseek_v3_quantising": route_case(256, 8, "sigmoid", 8, quantized=True, groups=8, bias=True),
    "place_8_pairs": Case(_place_small_kernel, IDS | PLACES, {**PLACING, "BLOCK_Q": 16}),
    "place_few": Case(_place_small_kernel, IDS | PLACES, PLACING),
    "place_few_quantising": Case(_place_small_kernel, IDS | PLACES | BESIDE, {**PLACING, "GROUP": 128}),
    "place_few_slots": Case(_place_small_kernel, MAPPED | SLOTS, {**PLACING, "BATCHED": True}),
    "place_few_clearing": Case(_place_small_kernel, IDS | PLACES | CLEARED, PLACING),
    "count": Case(_count_kernel, IDS | COUNTS, COUNTING),
    "count_clearing": Case(_count_kernel, IDS | COUNTS | CLEARED, COUNTING),
    "place_128_experts": place_case(IDS | PLACES, False, 128),
    "place_512_experts": place_case(MAPPED | PLACES, False, 512),
    "place_slots": place_case(IDS | SLOTS, True, 128),
    "scatter": scatter_case(SCATTER),
    "scatter_weighted": scatter_case(SCATTER | WEIGHTS),
    "scatter_quantising": scatter_case(SCATTER | QUANTIZED),
    "scatter_in_order": scatter_case(SCATTER, order=(128, 8)),
    "copy_in_order": scatter_case({k: v for k, v in SCATTER.items() if k != "pair_to_row_ptr"}, order=(64, 4)),
    "dispatch_few": dispatch_case({}),
    "dispatch_few_quantising": dispatch_case(QUANTIZED),
    "combine": combine_case(8, {}),
    "combine_weighted": combine_case(8, WEIGHTS),
    "combine_top_16": combine_case(16, WEIGHTS),
    "combine_top_22": combine_case(22, WEIGHTS),
    "combine_top_32": combine_case(32, WEIGHTS),
    "combine_fp32": combine_case(8, WEIGHTS, "fp32"),
    "combine_odd_width": combine_case(8, WEIGHTS, vectorised=False),
    "combine_added": combine_case(8, WEIGHTS | {"added_ptr": "*bf16:16", "stride_added": "i32:16"}),
    "quantize": Case(_quantize_kernel, QUANTIZE, {"GROUP": 128, "BLOCK_M": 32}, **WIDE),
    "quantize_halves": halves_case(1024, 4, 4),
    "quantize_long_halves": halves_case(16384, 1, 16),
    "quantize_rows": row_case(2048, "fp8e4nv", 4, **WIDE),
    "rows_to_int8": row_case(2048, "i8", 4, **WIDE),
    "long_rows_to_int8": row_case(16384, "i8", 8, **WIDE),
    "dispatch_few_quantising_rows": dispatch_case(QUANTIZED, 8192),
    "scatter_quantising_rows": scatter_case(SCATTER | QUANTIZED, 8192),
    "route_few_quantising_rows": route_case(128, 8, "softmax", 1, quantized=True, group=4096),
    "place_few_quantising_rows": Case(_place_small_kernel, IDS | PLACES | BESIDE, {**PLACING, "GROUP": 8192}),
    "quantize_static": Case(
        _quantize_static_kernel,
        STATIC,
        {"E": 128, "BLOCK_E": 128, "BLOCK_K": 2048, "TOP_K": 8, "BATCHED": False},
        **WIDE,
    ),
    "quantize_few_as_bf16": Case(
        _quantize_kernel, QUANTIZE | {"q_ptr": "*bf16:16"}, {"GROUP": 128, "BLOCK_M": 4}, num_warps=1, **WIDE
    ),
    "place_few_quantising_as_bf16": Case(
        _place_small_kernel, IDS | PLACES | BESIDE | {"q_ptr": "*bf16:16"}, {**PLACING, "GROUP": 128}
    ),
    "quantize_few": Case(_quantize_kernel, QUANTIZE, {"GROUP": 128, "BLOCK_M": 4}, num_warps=1, **WIDE),
}


# A generation changes how instructions are chosen, not which sizes spill: all sizes on Hopper, elsewhere the first one
# of each kernel, and of each that quantises.
FIRST = {(case.kernel.__name__, "quanti" in name): name for name, case in reversed(CASES.items())}
COMPILED = [(90, name) for name in CASES] + [
    (capability, name)
    for (_, quantises), name in FIRST.items()
    for capability in (FP8_CAPABILITIES if quantises else CAPABILITIES)  # no e4m3 conversion before sm_89
    if capability != 90
]


@pytest.mark.parametrize(("capability", "name"), COMPILED, ids=[f"sm_{of}-{name}" for of, name in COMPILED])
def test_compiles_without_spills_and_with_wide_accesses(capability, name):
    case = CASES[name]
    kernel = case.compile(capability)
    assert kernel.stack == 0, f"{kernel.stack} bytes of spills, {kernel.registers} registers"
    assert kernel.registers * case.num_warps * 32 <= 65536 // 2, "at least two programs must fit a multiprocessor"
    assert kernel.loads_16_bytes or not case.wide_loads
    assert kernel.stores_16_bytes or not case.wide_stores


@pytest.mark.parametrize("name", ["topk_qwen3", "topk_gpt_oss", "scatter", "combine_weighted"])
def test_compiles_as_a_programmatic_dependent(name):
    case = CASES[name]
    kernel = Case(case.kernel, case.signature, case.constexprs | {"PDL": True}, case.num_warps).compile(90)
    assert "griddepcontrol.wait" in kernel.ptx and "griddepcontrol.launch_dependents" in kernel.ptx


def test_one_token_is_routed_without_shared_memory():
    """A round of selection is one warp-wide integer reduction for 16-bit logits, two for fp32."""
    packed, exact = CASES["topk_qwen3"].compile(90), topk_case(128, 8, "softmax", "fp32").compile(90)
    assert packed.shared == exact.shared == 0
    assert packed.sass.count("REDUX") == 8 and exact.sass.count("REDUX") == 16


def test_combine_issues_all_its_loads_before_it_adds():
    order = re.findall(r"\b(LDG\.E\.128|FFMA)\b", CASES["combine_weighted"].compile(90).sass)
    assert order[:8] == ["LDG.E.128"] * 8 and "LDG.E.128" not in order[8:]
