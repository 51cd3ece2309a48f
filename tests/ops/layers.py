"""Random MoE layers for the operator tests, and the float64 formula that they are measured against."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meta.schemes import SCHEMES


@dataclass
class Layer:
    """Arguments of ``fused_experts`` by name, and its options."""

    tensors: dict[str, Any]  # tensors, lists of them, None
    options: dict[str, Any] = field(default_factory=dict)
    rows_scheme: str | None = None  # rounds the activations of `dense_formula`, as the operators do
    halves: int = 0  # see Variant

    def args(self) -> tuple[Any, ...]:
        return tuple(self.tensors.values())

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the operator's result."""
        dtype = self.tensors["hidden_states"].dtype
        return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype

    def float64(self) -> Layer:
        """The same layer in float64."""
        return self.wide(torch.float64)

    def wide(self, dtype: torch.dtype) -> Layer:
        """The same layer in another dtype, quantised weights dequantised, its activations still to be rounded."""
        tensors = dict(self.tensors)
        scheme = self.options.get("scheme")
        if scheme is not None:
            row, scales = SCHEMES[scheme], list(tensors["gate_up_scales"])
            count = len(scales) // (1 if tensors.get("up_proj") is None else 2)
            scales, up_scale = scales[:count], scales[count:]
            if self.halves == 3:
                scales = [scale.unflatten(1, (2, -1)) for scale in scales]
            tensors["gate_up_proj"] = row.dequantize(tensors["gate_up_proj"], scales)
            tensors["down_proj"] = row.dequantize(tensors["down_proj"], tensors["down_scales"])
            if up_scale:
                tensors["up_proj"] = row.dequantize(tensors["up_proj"], up_scale)
            tensors["gate_up_scales"], tensors["down_scales"] = [], []
            if (held := tensors.pop("hidden_states_scale", None)) is not None:
                tensors["hidden_states"] = row.rows.dequantize(tensors["hidden_states"], [held])
        wide = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in tensors.items()}
        rows_scheme = scheme if scheme is not None and SCHEMES[scheme].rows is not None else self.rows_scheme
        return Layer(wide, {k: v for k, v in self.options.items() if k != "scheme"}, rows_scheme)


@dataclass(frozen=True)
class Variant:
    """How a layer differs from the plainest one."""

    T: int = 7
    E: int = 6
    K: int = 3
    H: int = 48
    I: int = 40
    dtype: torch.dtype = torch.float32
    bias: bool = False
    transposed: bool = False
    expert_map: bool = False
    ids: str = "random"
    scheme: str | None = None
    ids_dtype: torch.dtype = torch.int32
    weights_dtype: torch.dtype = torch.float32
    options: tuple[tuple[str, Any], ...] = ()
    separate: bool = False
    halves: int = 0  # dimensions of scales that start again with the up half
    scale_dtype: torch.dtype = torch.float32  # of scales that are made in fp32
    stored_rows: bool = False

    def build(self, seed: int = 0) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        return _build(self, generator)


def _weight(shape: tuple[int, int, int], variant: Variant, generator: torch.Generator) -> Tensor:
    weight = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[2] ** 0.5
    if variant.transposed:
        return weight.transpose(1, 2).contiguous().to(variant.dtype).transpose(1, 2)
    return weight.to(variant.dtype)


def _ids(variant: Variant, generator: torch.Generator) -> Tensor:
    experts = 2 * variant.E if variant.expert_map else variant.E
    ids = torch.rand((variant.T, experts), generator=generator).argsort(dim=1)[:, : variant.K]
    if variant.ids == "one":
        ids = torch.full_like(ids, 2)
    elif variant.ids == "none":
        ids = torch.full_like(ids, -1)
    elif variant.ids == "minus":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
    elif variant.ids == "few":
        ids = ids % 2
    return ids.to(variant.ids_dtype)


def _build(variant: Variant, generator: torch.Generator) -> Layer:
    T, E, K, H, I, dtype = variant.T, variant.E, variant.K, variant.H, variant.I, variant.dtype
    options = dict(variant.options)
    N = I if options.get("glu_layout") == "none" else 2 * I
    tensors: dict[str, Any] = {
        "hidden_states": torch.randn((T, H), generator=generator).to(dtype),
        "gate_up_proj": _weight((E, N, H), variant, generator),
        "down_proj": _weight((E, H, I), variant, generator),
        "topk_weights": torch.rand((T, K), generator=generator).to(variant.weights_dtype),
        "topk_ids": _ids(variant, generator),
        "gate_up_scales": [],
        "down_scales": [],
        "up_proj": None,
        "gate_up_bias": torch.randn((E, N), generator=generator).to(dtype) if variant.bias else None,
        "down_bias": torch.randn((E, H), generator=generator).to(dtype) if variant.bias else None,
        "expert_map": None,
    }
    if variant.expert_map:
        local = torch.full((2 * E,), -1, dtype=torch.int32)
        local[torch.randperm(2 * E, generator=generator)[:E]] = torch.arange(E, dtype=torch.int32)
        tensors["expert_map"] = local
    if variant.separate:
        tensors["gate_up_proj"], tensors["up_proj"] = (half.clone() for half in tensors["gate_up_proj"].chunk(2, dim=1))
    if variant.scheme is not None:
        _quantize(tensors, variant)
        options["scheme"] = variant.scheme
    return Layer(tensors, options, halves=variant.halves)


def _quantize(tensors: dict[str, Any], variant: Variant) -> None:
    """Put the scheme's data and scales in the place of the weights, and of the hidden states if asked to."""
    scheme = SCHEMES[variant.scheme]
    halves = tensors["gate_up_proj"].chunk(2, dim=1) if variant.halves else (tensors["gate_up_proj"],)
    gate_up = [scheme.quantize(half) for half in halves]
    tensors["gate_up_proj"] = torch.cat([stored for stored, _ in gate_up], dim=1)
    join = torch.stack if variant.halves == 4 else torch.cat
    scales = [join(list(of_both), dim=1) for of_both in zip(*(scales for _, scales in gate_up), strict=True)]
    if variant.separate:
        tensors["up_proj"], up_scales = scheme.quantize(tensors["up_proj"])
        scales += up_scales
    tensors["down_proj"], down_scales = scheme.quantize(tensors["down_proj"])
    for name, given in (("gate_up_scales", scales), ("down_scales", down_scales)):
        change = variant.scale_dtype != torch.float32
        tensors[name] = [s.to(variant.scale_dtype) if change and s.dtype == torch.float32 else s for s in given]
    if variant.stored_rows:
        tensors["hidden_states"], (tensors["hidden_states_scale"],) = scheme.rows.quantize(tensors["hidden_states"])


#: Every form that the experts operators must accept.
VARIANTS: dict[str, Variant] = {
    "plain": Variant(),
    "bf16": Variant(dtype=torch.bfloat16),
    "fp16": Variant(dtype=torch.float16),
    "fp64": Variant(dtype=torch.float64),
    "bf16_weights_bf16": Variant(dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    "int64_ids": Variant(ids_dtype=torch.int64),
    "bias": Variant(bias=True),
    "bias_bf16": Variant(bias=True, dtype=torch.bfloat16),
    "bias_fp16": Variant(bias=True, dtype=torch.float16, T=33),
    "bias_fp64": Variant(bias=True, dtype=torch.float64, weights_dtype=torch.float64),
    "transposed": Variant(transposed=True),
    "transposed_bias_bf16": Variant(transposed=True, bias=True, dtype=torch.bfloat16),
    "transposed_fp16": Variant(transposed=True, dtype=torch.float16),
    "interleaved": Variant(options=(("glu_layout", "interleaved"),)),
    "not_gated": Variant(options=(("glu_layout", "none"), ("activation", "relu2"))),
    "not_gated_bias": Variant(bias=True, options=(("glu_layout", "none"), ("activation", "gelu"))),
    "gelu": Variant(options=(("activation", "gelu"),)),
    "gelu_tanh": Variant(options=(("activation", "gelu_tanh"),)),
    "relu": Variant(options=(("activation", "relu"),)),
    "relu2": Variant(options=(("activation", "relu2"),)),
    "gpt_oss": Variant(
        bias=True,
        transposed=True,
        options=(("activation", "swiglu_oai"), ("glu_layout", "interleaved"), ("alpha", 1.5), ("limit", 1.0)),
    ),
    "gpt_oss_not_gated": Variant(options=(("activation", "swiglu_oai"), ("glu_layout", "none"), ("limit", 0.5))),
    "silu_clamp": Variant(options=(("activation", "silu_clamp"), ("limit", 0.5))),
    "silu_then_clamp": Variant(options=(("activation", "silu_then_clamp"), ("limit", 0.3))),
    "quick_gelu": Variant(options=(("activation", "quick_gelu"), ("alpha", 1.6))),
    "silu_softcap": Variant(options=(("activation", "silu_softcap"), ("alpha", 0.5), ("limit", 0.7))),
    "expert_map": Variant(expert_map=True),
    "expert_map_bias": Variant(expert_map=True, bias=True, ids="minus"),
    "minus_ids": Variant(ids="minus"),
    "no_ids": Variant(ids="none"),
    "one_expert": Variant(ids="one"),
    "empty_experts": Variant(ids="few", E=12),
    "no_tokens": Variant(T=0),
    "one_token": Variant(T=1),
    "top1": Variant(K=1),
    "top_all": Variant(K=6),
    "weight_on_input": Variant(options=(("weight_on_input", True),)),
    "weight_on_input_bias_bf16": Variant(dtype=torch.bfloat16, bias=True, options=(("weight_on_input", True),)),
    "separate": Variant(separate=True),
    "separate_bias": Variant(separate=True, bias=True, dtype=torch.bfloat16),
    "separate_transposed": Variant(separate=True, transposed=True),
    "separate_batched": Variant(separate=True, options=(("format", "batched"), ("glu_layout", "separate"))),
    "batched": Variant(options=(("format", "batched"),)),
    "batched_bias_minus": Variant(ids="minus", bias=True, options=(("format", "batched"),)),
    "batched_overflow": Variant(ids="few", options=(("format", "batched"), ("capacity", 3))),
    "batched_overflow_map": Variant(expert_map=True, options=(("format", "batched"), ("capacity", 1))),
    "batched_no_tokens": Variant(T=0, options=(("format", "batched"),)),
    "fp8": Variant(scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=144),
    "fp8_fp32_bias": Variant(scheme="fp8_block128", bias=True, H=128, I=64),
    "fp8_batched": Variant(scheme="fp8_block128", dtype=torch.bfloat16, H=256, I=136, options=(("format", "batched"),)),
    "fp8_separate": Variant(scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=144, separate=True),
    "fp8_halves": Variant(scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=192, halves=3),
    "fp8_halves_4d": Variant(scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=224, halves=4),
    "fp8_bf16_scales": Variant(scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=136, scale_dtype=torch.bfloat16),
    "fp8_e8m0_scales": Variant(
        scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=192, halves=4, scale_dtype=torch.float8_e8m0fnu
    ),
    "fp8_rows": Variant(scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=136, stored_rows=True),
    "fp8_rows_batched": Variant(
        scheme="fp8_block128", dtype=torch.bfloat16, H=160, I=136, stored_rows=True, options=(("format", "batched"),)
    ),
    "fp8_no_tokens": Variant(scheme="fp8_block128", dtype=torch.bfloat16, T=0, H=128, I=128),
}
for _name in (name for name, row in SCHEMES.items() if row.quantized and name != "fp8_block128"):
    _form = {"scheme": _name, "dtype": torch.bfloat16, "H": 160, "I": 128}
    VARIANTS[_name] = Variant(**_form, bias=True, ids="minus")
    VARIANTS[f"{_name}_batched"] = Variant(**_form, options=(("format", "batched"), ("glu_layout", "interleaved")))
VARIANTS["fp8_tensor_halves"] = Variant(scheme="fp8_tensor", dtype=torch.bfloat16, H=160, I=48, halves=3)
VARIANTS["w4a8_fp8_separate"] = Variant(scheme="w4a8_fp8", dtype=torch.bfloat16, H=160, I=128, separate=True)
VARIANTS["nvfp4_halves"] = Variant(scheme="nvfp4", dtype=torch.bfloat16, H=160, I=48, halves=4)
VARIANTS["nvfp4_fp64"] = replace(VARIANTS["nvfp4_halves"], scale_dtype=torch.float64)

_ACTIVATIONS = {
    "silu": lambda g, alpha, limit: g / (1 + (-g).exp()),
    "gelu": lambda g, alpha, limit: 0.5 * g * (1 + torch.erf(g / 2**0.5)),
    "gelu_tanh": lambda g, alpha, limit: F.gelu(g, approximate="tanh"),
    "relu": lambda g, alpha, limit: g.clamp(min=0),
    "relu2": lambda g, alpha, limit: g.clamp(min=0) ** 2,
    "swiglu_oai": lambda g, alpha, limit: g.clamp(max=limit) / (1 + (-alpha * g.clamp(max=limit)).exp()),
    "silu_clamp": lambda g, alpha, limit: g.clamp(max=limit) / (1 + (-g.clamp(max=limit)).exp()),
    "silu_then_clamp": lambda g, alpha, limit: (g / (1 + (-g).exp())).clamp(max=limit),
    "quick_gelu": lambda g, alpha, limit: g / (1 + (-alpha * g).exp()),
    "silu_softcap": lambda g, alpha, limit: alpha * torch.tanh(g / alpha) / (1 + (-g).exp()),
}


def kept_ids(ids: Tensor, expert_map: Tensor | None, experts: int, capacity: int | None) -> Tensor:
    """Local ids, -1 where a pair contributes nothing."""
    local = torch.full(ids.shape, -1)
    counts = [0] * experts
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            if expert_map is not None:
                expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
            if 0 <= expert < experts and (capacity is None or counts[expert] < capacity):
                counts[expert] += 1
                local[t, k] = expert
    return local


def dense_formula(layer: Layer) -> Tensor:
    """``out = sum over k of w * E(x)``, every pair's weights gathered; differentiable, in the dtype of the layer."""
    t = layer.tensors

    def stored(rows: Tensor) -> Tensor:
        if layer.rows_scheme is None:
            return rows
        scheme = SCHEMES[layer.rows_scheme]
        return scheme.rows.dequantize(*scheme.rows.quantize(rows)).to(rows.dtype)

    x, gate_up, down, w = (t[name] for name in ("hidden_states", "gate_up_proj", "down_proj", "topk_weights"))
    gate_up = gate_up if t.get("up_proj") is None else torch.cat((gate_up, t["up_proj"]), dim=1)
    options = {"activation": "silu", "glu_layout": "concat", "alpha": None, "limit": None, **layer.options}
    alpha = 1.702 if options["alpha"] is None else options["alpha"]
    limit = 7.0 if options["limit"] is None else options["limit"]
    local = kept_ids(t["topk_ids"], t.get("expert_map"), gate_up.shape[0], options.get("capacity"))
    out = torch.zeros_like(x)
    for k in range(local.shape[1]):
        ids, kept = local[:, k].clamp(min=0), (local[:, k] >= 0).unsqueeze(1)
        weight = w[:, k : k + 1].to(x.dtype)
        before = weight if options.get("weight_on_input") else 1.0
        h = torch.einsum("tnh,th->tn", gate_up[ids], stored(x * before))
        h = h if t.get("gate_up_bias") is None else h + t["gate_up_bias"][ids]
        if options["glu_layout"] == "none":
            gate, up = h, None
        elif options["glu_layout"] == "interleaved":
            gate, up = h[:, 0::2], h[:, 1::2]
        else:
            gate, up = h.chunk(2, dim=1)
        value = _ACTIVATIONS[options["activation"]](gate, alpha, limit)
        if up is not None and options["activation"] in ("swiglu_oai", "silu_clamp", "silu_then_clamp"):
            up = up.clamp(-limit, limit)
        if up is not None and options["activation"] == "silu_softcap":
            up = limit * torch.tanh(up / limit)
        if up is not None:
            value = value * (up + 1 if options["activation"] == "swiglu_oai" else up)
        y = torch.einsum("thi,ti->th", down[ids], stored(value))
        y = y if t.get("down_bias") is None else y + t["down_bias"][ids]
        after = 1.0 if options.get("weight_on_input") else weight
        out = out + torch.where(kept, y * after, 0.0)
    return out


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest error against the largest wanted value."""
    if wanted.numel() == 0:
        return 0.0
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-12))


def plain_result(layer: Layer) -> Tensor:
    """The formula as eager code computes it: in the layer's dtype, or, for quantised rows, in fp32 and rounded once."""
    scheme, dtype = layer.options.get("scheme"), layer.out_dtype
    return dense_formula(layer if scheme is None else layer.wide(torch.float32)).to(dtype)


def factors_in_fp64(tensors: dict[str, Any], *, all_but_one: bool) -> None:
    """Second scales of nvfp4 as the reciprocals of divisors; of the up half that is stored apart in fp32 still, if
    ``all_but_one``.
    """
    for name in ("gate_up_scales", "down_scales"):
        scales = tensors[name]
        scales[1::2] = [scale.reciprocal().double().reciprocal() for scale in scales[1::2]]
    if all_but_one:
        tensors["gate_up_scales"][3] = tensors["gate_up_scales"][3].float()
