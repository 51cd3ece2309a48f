"""Calls of every operator: positional arguments and keywords by a readable id, for tests that treat operators alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meta.routing import ROUTINGS
from meta.schemes import SCHEMES
from tests.ops.layers import VARIANTS, Layer, Variant


@dataclass(frozen=True)
class Call:
    """One call of ``torch.ops.moe_ops.<op>``."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.moe_ops, self.op).default

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor argument, those in lists included."""
        return [leaf for leaf in tree_leaves(self.args) if isinstance(leaf, Tensor)]

    def run(self) -> tuple[Tensor, ...]:
        outputs = self.overload(*self.args, **self.kwargs)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def _topk_calls() -> dict[str, Call]:
    logits, bias = torch.randn(5, 8), torch.randn(8)
    calls = {}
    for name, row in ROUTINGS.items():
        groups = {"num_groups": 4, "topk_groups": 2} if row.group else {}
        calls[f"fused_topk-{name}"] = Call("fused_topk", (logits,), {"top_k": 2, "routing": name, **groups})
    calls["fused_topk-bias"] = Call("fused_topk", (logits, bias), {"top_k": 3, "routing": "sigmoid", "scale": 2.0})
    calls["fused_topk-bf16"] = Call("fused_topk", (logits.bfloat16(),), {"top_k": 8, "renormalize": False})
    calls["fused_topk-no_tokens"] = Call("fused_topk", (logits[:0],), {"top_k": 2})
    calls["fused_topk-strided"] = Call("fused_topk", (torch.randn(8, 5).t(),), {"top_k": 2, "renorm_eps": 1e-20})
    for name in ("softmax", "topk_softmax", "sigmoid", "bf16", "no_tokens", "strided"):
        call = calls[f"fused_topk-{name}"]
        weights, ids = call.run()
        given = (torch.randn_like(weights), call.args[0], ids)
        calls[f"fused_topk_backward-{name}"] = Call("fused_topk_backward", given, call.kwargs)
    return calls


def _move_calls() -> dict[str, Call]:
    calls = {}
    for name in ("plain", "bf16", "expert_map", "minus_ids", "no_ids", "one_expert", "no_tokens", "int64_ids"):
        layer = VARIANTS[name].build()
        x, ids, expert_map = (layer.tensors[key] for key in ("hidden_states", "topk_ids", "expert_map"))
        E = layer.tensors["gate_up_proj"].shape[0]
        calls[f"moe_permute-{name}"] = permute = Call("moe_permute", (x, ids, expert_map), {"num_experts": E})
        options = {"num_experts": E, "capacity": 2}
        calls[f"batched_dispatch-{name}"] = dispatch = Call("batched_dispatch", (x, ids, expert_map), options)
        weights = layer.tensors["topk_weights"]
        rows, _, pair_to_row = permute.run()
        sorting = calls[f"sort_pairs-{name}"] = Call("sort_pairs", (ids, expert_map), {"num_experts": E, "capacity": 2})
        places = sorting.run()
        weight, bias = (layer.tensors[key] for key in ("gate_up_proj", "gate_up_bias"))
        if name in ("plain", "bf16", "expert_map", "no_tokens"):
            calls[f"gathered_mm-{name}"] = Call("gathered_mm", (x, weight, *places, weights, bias), {})
            calls[f"expert_sums-{name}"] = Call("expert_sums", (x, *places, weights), {})
        calls[f"moe_unpermute-{name}"] = Call("moe_unpermute", (rows, pair_to_row, weights), {})
        batch, _, slots = dispatch.run()
        calls[f"batched_combine-{name}"] = Call("batched_combine", (batch, slots, weights), {})
    return calls


def _quantise_calls() -> dict[str, Call]:
    counts = torch.tensor([2, 0], dtype=torch.int32)
    scheme = {"scheme": "fp8_block128"}
    return {
        "quantize_rows-bf16": Call("quantize_rows", (torch.randn(3, 256).bfloat16(),), scheme),
        "quantize_rows-ragged": Call("quantize_rows", (torch.randn(3, 130),), scheme),
        "quantize_rows-one_ragged": Call("quantize_rows", (torch.randn(1, 130),), scheme),
        "quantize_rows-none": Call("quantize_rows", (torch.randn(0, 128),), scheme),
        "quantize_batched-fp32": Call("quantize_batched", (torch.randn(2, 3, 200), counts), scheme),
    }


def _gemm_calls() -> dict[str, Call]:
    calls = {}
    names = ("plain", "bf16", "transposed", "bias", "interleaved", "not_gated", "gpt_oss", "no_tokens", "empty_experts")
    for name in names:
        layer = VARIANTS[name].build()
        t, options = layer.tensors, layer.options
        E, T = t["gate_up_proj"].shape[0], t["topk_ids"].shape[0]
        rows, offsets, _ = torch.ops.moe_ops.moe_permute(t["hidden_states"], t["topk_ids"], num_experts=E)
        batch, counts, _ = torch.ops.moe_ops.batched_dispatch(
            t["hidden_states"], t["topk_ids"], num_experts=E, capacity=max(T, 1)
        )
        first, bias = t["gate_up_proj"], t["gate_up_bias"]
        calls[f"grouped_mm_glu-{name}"] = Call("grouped_mm_glu", (rows, first, offsets, [], None, bias), options)
        calls[f"grouped_mm-{name}"] = Call("grouped_mm", (rows, first, offsets, [], bias), {})
        calls[f"batched_mm_glu-{name}"] = Call("batched_mm_glu", (batch, first, counts, [], None, bias), options)
        calls[f"batched_mm-{name}"] = Call("batched_mm", (batch, first, counts, [], bias), {"out_dtype": torch.float32})
        grad_rows = torch.randn(rows.shape[0], 5).to(rows.dtype)
        calls[f"grouped_wgrad-{name}"] = Call("grouped_wgrad", (grad_rows, rows, offsets), {})
        if name in ("plain", "bf16", "no_tokens"):
            places = torch.ops.moe_ops.sort_pairs(t["topk_ids"], num_experts=E)
            grad_tokens = torch.randn(T, 5).to(rows.dtype)
            calls[f"grouped_wgrad-{name}_tokens"] = Call("grouped_wgrad", (grad_tokens, rows, *places), {})
            of_rows = (grad_rows, t["hidden_states"], *places)
            calls[f"grouped_wgrad-{name}_of_rows"] = Call("grouped_wgrad", of_rows, {"tokens": "rows"})
    return {**calls, **_fp8_gemm_calls()}


def _fp8_gemm_calls() -> dict[str, Call]:
    scheme = SCHEMES["fp8_block128"]
    weight, scales = scheme.quantize(torch.randn(2, 256, 160))
    rows, (rows_scale,) = scheme.rows.quantize(torch.randn(4, 160))
    batch, (batch_scale,) = scheme.rows.quantize(torch.randn(2, 3, 160))
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    counts = torch.tensor([0, 3], dtype=torch.int32)
    by_rows, by_batch = (rows, weight, offsets, list(scales)), (batch, weight, counts, list(scales))
    glu_rows, glu_batch = (*by_rows, None, None, rows_scale), (*by_batch, None, None, batch_scale)
    by_rows, by_batch = (*by_rows, None, rows_scale), (*by_batch, None, batch_scale)
    name, quantised = {"scheme": "fp8_block128"}, {"scheme": "fp8_block128", "quantize_output": True}
    return {
        "grouped_mm_glu-fp8": Call("grouped_mm_glu", glu_rows, name),
        "grouped_mm_glu-fp8_quantised": Call("grouped_mm_glu", glu_rows, quantised),
        "grouped_mm-fp8": Call("grouped_mm", by_rows, {**name, "out_dtype": torch.float16}),
        "batched_mm_glu-fp8": Call("batched_mm_glu", glu_batch, name),
        "batched_mm_glu-fp8_quantised": Call("batched_mm_glu", glu_batch, quantised),
        "batched_mm-fp8": Call("batched_mm", by_batch, name),
    }


def _layer_calls() -> dict[str, Call]:
    calls = {}
    for name, variant in VARIANTS.items():
        layer = variant.build()
        calls[f"fused_experts-{name}"] = Call("fused_experts", layer.args(), layer.options)
        if "scheme" in layer.options:
            continue
        args = [value for name, value in layer.tensors.items() if not name.endswith("_scales")]
        saving = calls[f"fused_experts_saving-{name}"] = Call("fused_experts_saving", tuple(args), layer.options)
        if name in OF_KERNELS:
            continue
        second, first = _backward_calls(layer, saving)
        calls[f"fused_experts_backward-{name}"] = second
        if name in OF_FIRST:
            calls[f"fused_experts_backward_first-{name}"] = first
        if name in ("plain", "separate_bias", "weight_on_input_bias_bf16"):
            again = tuple(layer.tensors[key] for key in ("hidden_states", "gate_up_proj", "up_proj", "gate_up_bias"))
            given = (*second.args[:3], *(part.new_empty(0) for part in second.args[3:5]), *second.args[5:], *again)
            calls[f"fused_experts_backward-{name}_again"] = Call(second.op, given, second.kwargs)
            calls[f"fused_experts_backward_first-{name}_sparing"] = Call(
                first.op, (*first.args[:-1], None), {**first.kwargs, "sparing": True}
            )
            needs = [False, True, name == "separate_bias", *[False] * 2]
            calls[f"fused_experts_backward_first-{name}_weights"] = Call(
                first.op, first.args, {**first.kwargs, "needs": needs}
            )
        if name in ("plain", "batched", "expert_map_bias"):
            for again in ("activation", "all"):
                options = {**layer.options, "recompute": again}
                calls[f"fused_experts_saving-{name}_{again}"] = Call("fused_experts_saving", tuple(args), options)
    return {**calls, **_moe_calls()}


#: Variants that differ in what kernels compute, and in no size or type.
OF_KERNELS = (
    "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss_not_gated", "silu_clamp", "silu_then_clamp", "quick_gelu",
    "silu_softcap", "fp16", "bf16_weights_bf16", "bias_fp16", "transposed_fp16", "int64_ids", "interleaved",
)  # fmt: skip
#: Variants that differ in what the step through the first product is given.
OF_FIRST = (
    "plain", "bf16", "fp64", "bias", "transposed", "not_gated", "expert_map_bias", "no_ids", "no_tokens", "batched",
    "separate", "separate_bias", "weight_on_input", "weight_on_input_bias_bf16",
)  # fmt: skip
#: What of a layer's options its gradient takes.
OF_BACKWARD = ("activation", "alpha", "limit", "glu_layout", "weight_on_input")


def _backward_calls(layer: Layer, saving: Call) -> tuple[Call, Call]:
    """The two steps of a layer's gradient, with what its forward saved."""
    t, options = layer.tensors, {name: value for name, value in layer.options.items() if name in OF_BACKWARD}
    grad, (_, *saved) = torch.randn_like(t["hidden_states"]), saving.run()
    if t["up_proj"] is not None:
        options["glu_layout"] = "separate"
    given = (grad, t["down_proj"], t["topk_weights"], *saved, t["down_bias"])
    second = Call("fused_experts_backward", given, {"value": True, **options})
    of_gate, of_up, *_ = second.run()
    on_input = options.get("weight_on_input", False)
    needs = [True, True, t["up_proj"] is not None, t["gate_up_bias"] is not None, on_input]
    inputs = (t["hidden_states"], t["gate_up_proj"], t["topk_weights"], *saved[2:], t["up_proj"], grad)
    return second, Call(
        "fused_experts_backward_first", (of_gate, of_up, *inputs), {"needs": needs, "weight_on_input": on_input}
    )


def _moe_calls() -> dict[str, Call]:
    calls = {}
    for name in (
        "plain",
        "bf16",
        "gpt_oss",
        "not_gated",
        "weight_on_input",
        "batched",
        "no_tokens",
        "fp8",
        "expert_map",
        "separate_bias",
        "fp8_separate",
    ):
        variant: Variant = VARIANTS[name]
        t = variant.build().tensors
        logits = torch.randn(variant.T, variant.E * (2 if variant.expert_map else 1))
        lists, rest = ("gate_up_scales", "down_scales"), ("up_proj", "gate_up_bias", "down_bias", "expert_map")
        experts = (t["hidden_states"], logits, t["gate_up_proj"], t["down_proj"])
        args = (*experts, *(t[name] for name in lists), None, *(t[name] for name in rest))
        calls[f"fused_moe-{name}"] = Call("fused_moe", args, {"top_k": 2, **variant.build().options})
    return calls


torch.manual_seed(0)
CALLS: dict[str, Call] = {**_topk_calls(), **_move_calls(), **_quantise_calls(), **_gemm_calls(), **_layer_calls()}

#: Operators with a gradient formula.
DIFFERENTIABLE = (
    "fused_topk", "fused_experts", "fused_experts_saving", "fused_moe", "moe_permute", "moe_unpermute",
    "batched_dispatch", "batched_combine", "grouped_mm_glu", "grouped_mm", "batched_mm_glu", "batched_mm",
)  # fmt: skip


def with_grad(call: Call) -> Call:
    """The same call with gradients asked of every argument that can have one, and of fresh leaves."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == torch.float8_e4m3fn:
            return value
        return value.detach().clone(memory_format=torch.preserve_format).requires_grad_()

    return Call(call.op, tuple(leaf(value) for value in call.args), call.kwargs)


#: Options that change what kernels compute, and nothing that is traced around them.
_OF_KERNELS_ALONE = ("activation", "alpha", "limit", "scheme", "routing", "top_k", "scale", "renorm_eps")


def _traits(call: Call) -> set[tuple[Any, ...]]:
    """What a compiler sees of a call: of each argument its kind, dtype and layout, and the options by value."""
    found = {(call.op, name, str(value)) for name, value in call.kwargs.items() if name not in _OF_KERNELS_ALONE}
    for at, value in enumerate(call.args):
        if isinstance(value, Tensor):
            found |= {(call.op, at, value.dtype), (call.op, at, "contiguous", value.is_contiguous())}
            found |= {(call.op, at, "empty", value.numel() == 0), (call.op, at, "one", value.shape[:1] == (1,))}
        elif isinstance(value, list):
            found.add((call.op, at, tuple(getattr(part, "ndim", part) for part in value)))
        else:
            found.add((call.op, at, str(value)))
    return found


def covering(names: Iterable[str]) -> list[str]:
    """Of calls, those that have a trait which no earlier one has: every trait of every operator is in one at least."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for name in names:
        traits = _traits(CALLS[name])
        if not traits <= seen:
            kept.append(name)
        seen |= traits
    return kept
