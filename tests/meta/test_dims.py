"""What a backend is told of a call: every size, type and option from the argument that holds it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

import moe_ops  # noqa: F401  (defines the operators that tests/ops/calls.py builds its arguments with)
from moe_ops.ops import parse
from tests.ops.calls import CALLS
from tests.ops.layers import VARIANTS

GROUPED = {"format": "grouped", "C": None}
PLAIN = {"has_bias": False, "has_expert_map": False, "weight_on_input": False}
#: By call id: what its problem must say. Sizes that differ from one another show which argument they were read from.
SAID: dict[str, dict[str, Any]] = {
    "fused_topk-bias": {"scheme": "", "dtype": torch.float32},
    "moe_permute-bf16": {"scheme": "", "dtype": torch.bfloat16},
    "quantize_rows-bf16": {"scheme": "fp8_block128", "dtype": torch.bfloat16},
    "grouped_mm_glu-interleaved": {"M": 21, "E": 6, "K": 48, "N": 40, "glu_layout": "interleaved", "C": None},
    "grouped_mm-bias": {"M": 21, "E": 6, "K": 48, "N": 80, "has_bias": True, "glu_layout": "none", "activation": None},
    "grouped_mm-interleaved": {"scheme": "fp32", "format": "grouped"},
    "grouped_mm-plain": {"has_bias": False, "weight_layout": "nk"},
    "grouped_mm-transposed": {"weight_layout": "kn"},
    "batched_mm_glu-plain": {"M": 42, "E": 6, "K": 48, "N": 40, "C": 7, "activation": "silu", "glu_layout": "concat"},
    "batched_mm-bf16": {"M": 42, "K": 48, "N": 80, "C": 7, "scheme": "bf16", "dtype": torch.bfloat16},
    "batched_mm-fp8": {"M": 6, "E": 2, "K": 160, "N": 256, "C": 3, "format": "batched", "scheme": "fp8_block128"},
    "fused_experts-plain": {"T": 7, "E": 6, "K": 3, "H": 48, "I": 40, "activation": "silu", **GROUPED, **PLAIN},
    "fused_experts-gpt_oss": {"activation": "swiglu_oai", "glu_layout": "interleaved", "has_bias": True},
    "fused_experts-not_gated": {"I": 40, "glu_layout": "none"},
    "fused_experts-separate_transposed": {"I": 40, "glu_layout": "separate", "weight_layout": "kn"},
    "fused_experts-fp8_rows": {"H": 160, "dtype": torch.float8_e4m3fn, "scheme": "fp8_block128"},
    "fused_experts-weight_on_input": {**PLAIN, "weight_on_input": True},
    "fused_experts-batched": {"format": "batched", "C": 7},
    "fused_experts-batched_overflow_map": {"E": 6, "format": "batched", "C": 1, "has_expert_map": True},
    "fused_moe-fp8": {"K": 2, "H": 160, "I": 144, "scheme": "fp8_block128", "dtype": torch.bfloat16},
    "fused_moe-expert_map": {"E": 6, "has_expert_map": True, "has_bias": False},
}


@pytest.mark.parametrize("name", SAID)
def test_a_problem_says_what_the_call_is(name: str) -> None:
    call = CALLS[name]
    problem = asdict(parse(call.op, *call.args, **call.kwargs).problem)
    assert {key: problem[key] for key in SAID[name]} == SAID[name]
    assert problem["device_type"] == "cpu"


@pytest.mark.parametrize("given", ["gate_up_bias", "down_bias", "expert_map"])
def test_one_optional_tensor_is_enough_to_be_told(given: str) -> None:
    t = VARIANTS["expert_map_bias"].build().tensors
    layer = {name: value for name, value in t.items() if name not in ("gate_up_bias", "down_bias", "expert_map")}
    problem = parse("fused_experts", **layer, **{given: t[given]}).problem
    assert (problem.has_bias, problem.has_expert_map) == (given != "expert_map", given == "expert_map")
    without = parse("fused_experts", **layer).problem
    assert (without.has_bias, without.has_expert_map) == (False, False)


def test_sizes_are_symbolic_when_any_of_them_is() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    t = VARIANTS["batched"].build().tensors
    fixed = parse("fused_experts", **t, format="batched", capacity=3).problem
    assert not fixed.has_symbols and fixed.C == 3 and fixed.R == 21 and fixed.gated
    symbol = ShapeEnv().create_unbacked_symint()
    assert parse("fused_experts", **t, format="batched", capacity=symbol).problem.has_symbols
