"""Reference and CPU backend against the float64 formula, over every form of a layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moe_ops
from meta.activations import ACTIVATIONS
from moe_ops import reference
from moe_ops.backends import cpu
from moe_ops.ops import parse
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, Layer, Variant, dense_formula, kept_ids, plain_result, relative_error

experts = torch.ops.moe_ops.fused_experts
BACKENDS = ("reference", "cpu")
SAME = 3e-6  # two fp32 computations of one number in different orders of summation


def run(layer: Layer, backend: str) -> torch.Tensor:
    return experts(**layer.tensors, **layer.options, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_experts_match_the_float64_formula(name: str, backend: str) -> None:
    layer = VARIANTS[name].build()
    got, wanted = run(layer, backend), dense_formula(layer.float64())
    assert got.dtype == layer.out_dtype
    assert got.shape == wanted.shape and got.is_contiguous()
    assert_accurate(got, wanted, plain_result(layer))


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.scheme])
def test_fp8_backends_agree_beyond_the_quantisation_error(name: str) -> None:
    layer = VARIANTS[name].build()
    bits = {torch.float32: 2e-3, torch.bfloat16: 1e-2}  # an e4m3 tie may fall either way after an fp32 rounding
    assert relative_error(run(layer, "cpu"), run(layer, "reference")) <= bits[layer.out_dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["minus_ids", "no_ids", "batched_overflow", "batched_overflow_map", "expert_map"])
def test_dropped_pairs_add_exactly_nothing(name: str, backend: str) -> None:
    """Whatever their weight is; and the same weight on one pair that is not dropped is seen in its token alone."""
    layer = VARIANTS[name].build()
    t = layer.tensors
    kept = kept_ids(t["topk_ids"], t["expert_map"], t["gate_up_proj"].shape[0], layer.options.get("capacity")) >= 0
    assert not kept.all()
    clean, weights = run(layer, backend), t["topk_weights"]
    t["topk_weights"] = weights.masked_fill(~kept, float("nan"))
    assert torch.equal(run(layer, backend), clean)
    assert torch.equal(clean[~kept.any(1)], torch.zeros_like(clean[~kept.any(1)]))
    if kept.any():
        token, slot = kept.nonzero()[0].tolist()
        t["topk_weights"][token, slot] = float("nan")
        assert run(layer, backend).isnan().any(1).nonzero().flatten().tolist() == [token]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "bf16", "batched"])
def test_a_map_without_entries_holds_no_expert(name: str, backend: str) -> None:
    """Its memory has no address, as that of a map that is not there."""
    layer = VARIANTS[name].build()
    layer.tensors["expert_map"] = torch.empty(0, dtype=torch.int32)
    assert not run(layer, backend).any()


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_ids_out_of_range_are_dropped(format: str) -> None:
    layer = Variant(ids="minus").build()
    wanted = run(layer, "reference")
    layer.options["format"] = format
    ids = layer.tensors["topk_ids"]
    layer.tensors["topk_ids"] = ids.masked_fill(ids < 0, 1000)
    assert relative_error(run(layer, "cpu"), wanted) <= SAME


def test_sliced_arguments_give_the_same_bits() -> None:
    layer = Variant().build()
    wanted = run(layer, "cpu")
    for name in ("hidden_states", "topk_weights", "topk_ids"):
        tensor = layer.tensors[name]
        wide = torch.cat((tensor, tensor), dim=1)
        layer.tensors[name] = wide[:, : tensor.shape[1]]
        assert not layer.tensors[name].is_contiguous()
    assert torch.equal(run(layer, "cpu"), wanted)


def test_weights_with_no_contiguous_dimension() -> None:
    layer = Variant().build()
    wanted = run(layer, "cpu")
    for name in ("gate_up_proj", "down_proj"):
        layer.tensors[name] = layer.tensors[name].repeat_interleave(2, dim=2)[:, :, ::2]
        assert 1 not in layer.tensors[name].stride()
    assert relative_error(run(layer, "cpu"), wanted) <= SAME


def test_runs_are_bit_identical() -> None:
    layer = Variant(T=65, dtype=torch.bfloat16).build()
    assert torch.equal(run(layer, "cpu"), run(layer, "cpu"))


def test_batched_capacity_that_holds_everything_equals_grouped() -> None:
    layer = Variant(T=20).build()
    wanted = run(layer, "cpu")
    layer.options.update(format="batched", capacity=20)
    assert torch.equal(run(layer, "cpu"), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [7, 8, 9])
def test_capacity_one_short_exactly_full_and_with_room(capacity: int, backend: str) -> None:
    layer = Variant(T=8, K=1, ids="one").build()  # more pairs than experts: sorted, whatever the capacity
    grouped = run(layer, backend)
    layer.options.update(format="batched", capacity=capacity)
    kept = min(capacity, 8)
    got = run(layer, backend)
    assert torch.equal(got[:kept], grouped[:kept]) and not got[kept:].any() and grouped.any(1).all()
    t = layer.tensors
    module = {"cpu": cpu, "reference": reference}[backend]
    call = parse("batched_dispatch", t["hidden_states"], t["topk_ids"], num_experts=6, capacity=capacity)
    batch, counts, slots = module.batched_dispatch(call)
    assert counts.tolist() == [0, 0, kept, 0, 0, 0]
    assert slots.flatten().tolist() == [2 * capacity + place if place < kept else -1 for place in range(8)]
    assert torch.equal(batch[2, :kept], t["hidden_states"][:kept])


@pytest.mark.parametrize("name", ["plain", "bf16", "gpt_oss", "not_gated", "expert_map_bias", "separate_bias"])
def test_stage_chains_equal_the_fused_operator(name: str) -> None:
    layer = VARIANTS[name].build()
    t, options = layer.tensors, dict(layer.options)
    E = t["gate_up_proj"].shape[0]
    glu = {key: options.pop(key) for key in ("activation", "alpha", "limit", "glu_layout") if key in options}
    glu["up_weight"] = t["up_proj"]
    wanted = run(layer, "cpu")
    routed = (t["hidden_states"], t["topk_ids"], t["expert_map"])

    rows, offsets, pair_to_row = moe_ops.moe_permute(*routed, num_experts=E)
    value = moe_ops.grouped_mm_glu(rows, t["gate_up_proj"], offsets, bias=t["gate_up_bias"], **glu)
    out = moe_ops.grouped_mm(value, t["down_proj"], offsets, bias=t["down_bias"])
    assert relative_error(moe_ops.moe_unpermute(out, pair_to_row, t["topk_weights"]), wanted) <= 1e-6

    batch, counts, slots = moe_ops.batched_dispatch(*routed, num_experts=E, capacity=t["topk_ids"].shape[0])
    value = moe_ops.batched_mm_glu(batch, t["gate_up_proj"], counts, bias=t["gate_up_bias"], **glu)
    out = moe_ops.batched_mm(value, t["down_proj"], counts, bias=t["down_bias"])
    assert relative_error(moe_ops.batched_combine(out, slots, t["topk_weights"]), wanted) <= 1e-6


def test_fp8_stage_chain_equals_the_fused_operator() -> None:
    layer = VARIANTS["fp8"].build()
    t, scheme = layer.tensors, "fp8_block128"
    rows, offsets, pair_to_row = moe_ops.moe_permute(t["hidden_states"], t["topk_ids"], num_experts=6)
    stored, scale = moe_ops.quantize_rows(rows, scheme=scheme)
    first = {"scheme": scheme, "rows_scale": scale, "weight_scales": t["gate_up_scales"], "quantize_output": True}
    value, value_scale = moe_ops.grouped_mm_glu(stored, t["gate_up_proj"], offsets, **first)
    second = {"scheme": scheme, "rows_scale": value_scale, "weight_scales": t["down_scales"]}
    out = moe_ops.grouped_mm(value, t["down_proj"], offsets, **second)
    got = moe_ops.moe_unpermute(out, pair_to_row, t["topk_weights"])
    assert relative_error(got, run(layer, "cpu")) <= 1e-2  # the fused operator keeps the last rows in fp32


def test_fused_moe_is_topk_then_experts() -> None:
    layer = Variant().build()
    t = {name: layer.tensors[name] for name in ("hidden_states", "gate_up_proj", "down_proj")}
    logits = torch.randn(7, 6)
    routing = {"top_k": 2, "routing": "sigmoid_group_top2", "num_groups": 2, "topk_groups": 1, "scale": 2.5}
    bias = torch.randn(6)
    weights, ids = moe_ops.fused_topk(logits, bias, **routing)
    wanted = moe_ops.fused_experts(*t.values(), weights, ids, activation="gelu")
    for backend in BACKENDS:
        got = moe_ops.fused_moe(
            t["hidden_states"],
            logits,
            t["gate_up_proj"],
            t["down_proj"],
            correction_bias=bias,
            activation="gelu",
            backend=backend,
            **routing,
        )
        assert relative_error(got, wanted) <= SAME


def of_halves(dtype: torch.dtype = torch.float16, rows: int = 3) -> dict[str, torch.Tensor]:
    """A layer whose gates are -102400, and whose other products 1280, beyond or within what fp16 holds."""
    up, x = torch.zeros(2, 16, 64, dtype=dtype), torch.full((rows, 64), 40.0, dtype=dtype)
    up[:, :8], up[:, 8:] = -40.0, 0.5
    return {
        "hidden_states": x, "gate_up_proj": up, "down_proj": torch.ones(2, 64, 8, dtype=dtype),
        "topk_weights": torch.ones(rows, 1), "topk_ids": torch.arange(rows)[:, None] % 2,
    }  # fmt: skip


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "quick_gelu", "silu_clamp", "swiglu_oai"])
@pytest.mark.parametrize("rows", [1, 9])
def test_gates_beyond_fp16_are_activated_in_fp32(rows: int, activation: str, format: str) -> None:
    given, limits = of_halves(rows=rows), {"limit": 7.0} if activation in ("silu_clamp", "swiglu_oai") else {}
    options = {"activation": activation, "format": format, "capacity": rows if format == "batched" else None, **limits}
    wide = {name: tensor if name == "topk_ids" else tensor.double() for name, tensor in given.items()}
    assert torch.equal(moe_ops.fused_experts(**given, **options), moe_ops.fused_experts(**wide, **options).half())


def test_results_beyond_fp16_are_weighted_in_fp32() -> None:
    given = of_halves() | {"gate_up_proj": torch.full((2, 16, 64), 0.1).half()}
    wide = {name: tensor if name == "topk_ids" else tensor.double() for name, tensor in given.items()}
    assert moe_ops.fused_experts(**wide).min() > 65504
    few = {"topk_weights": torch.full((3, 1), 0.01)}
    found, exact = moe_ops.fused_experts(**given | few).double(), moe_ops.fused_experts(**wide | few)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_results_asked_for_in_fp32_are_not_rounded_before(
    format: str, dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    make = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, generator=make).to(dtype) for size in ((12, 40), (3, 24, 40)))
    added = None if bias is None else torch.randn(3, 24, generator=make).to(bias)
    exact = torch.einsum("erk,enk->ern", rows.double().view(3, 4, 40), weight.double())
    exact = (exact if added is None else exact + added.double()[:, None]).view(12, 24)
    for wanted, least in ((torch.float32, 1e-6), (dtype, 1.05 * relative_error(exact.to(dtype), exact))):
        if format == "grouped":
            ends = torch.tensor([4, 8, 12], dtype=torch.int32)
            found = moe_ops.grouped_mm(rows, weight, ends, bias=added, out_dtype=wanted)
        else:
            counts = torch.full((3,), 4, dtype=torch.int32)
            found = moe_ops.batched_mm(rows.view(3, 4, 40), weight, counts, bias=added, out_dtype=wanted).view(12, 24)
        assert found.dtype == wanted and relative_error(found, exact) <= least


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    T=st.integers(0, 9),
    E=st.integers(1, 9),
    K=st.integers(1, 4),
    H=st.integers(1, 33),
    I=st.integers(1, 33),
    bias=st.booleans(),
    transposed=st.booleans(),
    expert_map=st.booleans(),
    ids=st.sampled_from(["random", "minus", "one", "none", "few"]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    glu_layout=st.sampled_from(["concat", "interleaved", "none"]),
    weight_on_input=st.booleans(),
    capacity=st.none() | st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_cpu_backend_equals_reference(
    activation: str, glu_layout: str, weight_on_input: bool, capacity: int | None, seed: int, **shape: object
) -> None:
    options = {"activation": activation, "glu_layout": glu_layout, "weight_on_input": weight_on_input}
    if capacity is not None:
        options.update(format="batched", capacity=capacity)
    shape["K"] = min(shape["K"], shape["E"])
    layer = Variant(**shape, options=tuple(options.items())).build(seed)
    # With a width of 1 a product that nearly cancels is the whole result; a wrong row or weight is off by its own size.
    assert relative_error(run(layer, "cpu"), run(layer, "reference")) <= 1e-4
