"""What the benchmarks time: how tokens are routed, the roof of a case, and its exact answer."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import layer_weights, make_case
from benchmarks.device import measured_arch
from benchmarks.shapes import TINY_SHAPES, parse_shapes
from meta.arch import lookup

TINY = TINY_SHAPES["tiny-qwen3"]


@pytest.mark.parametrize("routing", ["uniform", "zipf", "half_empty", "k_experts"])
def test_routing_is_what_it_says(routing: str) -> None:
    shape, T = replace(TINY, E=32), 2048
    case = make_case(layer_weights(replace(shape, H=16, I=16), torch.bfloat16, "cpu"), T, routing)
    assert case.sets[0].router_logits.dtype == torch.bfloat16
    counts_E = case.sets[0].topk_ids.flatten().bincount(minlength=shape.E).sort(descending=True).values
    expected = T * shape.K / shape.E
    if routing == "uniform":
        assert counts_E.min() > expected / 2 and counts_E.max() < expected * 2
    elif routing == "zipf":
        # The first draw is popularity itself: a share of 1 / sum of rank ** -1.2, the rest without replacement.
        first_E = case.sets[0].topk_ids[:, 0].bincount(minlength=shape.E).sort(descending=True).values
        shares = torch.arange(1, shape.E + 1) ** -1.2
        assert first_E[0] / T == pytest.approx((shares / shares.sum())[0].item(), rel=0.15)
        assert counts_E[0] > 3 * expected > 6 * counts_E[-1]
    else:
        chosen = {"half_empty": shape.E // 2, "k_experts": shape.K}[routing]
        assert int((counts_E > 0).sum()) == chosen == case.distinct_experts[0]
        assert counts_E[:chosen].min() > T * shape.K / chosen / 2
    assert not torch.equal(*(inputs.topk_ids.unique() for inputs in case.sets)) or routing in ("uniform", "zipf")


def test_routing_that_a_shape_does_not_allow_is_named() -> None:
    weights = layer_weights(parse_shapes("4x3x16x16")[0], torch.float32, "cpu")
    with pytest.raises(ValueError, match="--routing half_empty must leave 3 experts of a token, got 2 of 4"):
        make_case(weights, 1, "half_empty")


def test_roof_of_a_run_is_what_it_measured() -> None:
    arch = measured_arch({"bf16_tflops": 600.0, "fp8_tflops": 1100.0, "read_gbps": 4000.0})
    assert arch is not None and measured_arch(None) is None
    assert [arch.ceiling_tflops(kind) for kind in ("bf16", "tf32", "fp8")] == [600.0, 300.0, 1100.0]
    assert arch.ceiling_tbps() == 4.0


H200_TBPS, H200_TFLOPS = 4.3, {None: 790.0, "fp8_block128": 790.0 * 1979 / 989}


@pytest.mark.parametrize("scheme", [None, "fp8_block128"], ids=["bf16", "fp8"])
def test_roof_of_many_tokens_is_the_arithmetic_at_the_rate_of_the_scheme(scheme: str | None) -> None:
    case = make_case(layer_weights(TINY, torch.bfloat16, "cpu"), 4096)
    flops = 2 * 4096 * TINY.K * 3 * TINY.H * TINY.I
    assert case.roof_on(lookup("H200"), scheme) == pytest.approx(flops / (H200_TFLOPS[scheme] * 1e6), rel=1e-6)


@pytest.mark.parametrize("scheme", [None, "fp8_block128"], ids=["bf16", "fp8"])
def test_roof_of_one_token_is_the_memory_of_its_experts(scheme: str | None) -> None:
    case = make_case(layer_weights(TINY, torch.bfloat16, "cpu"), 1)
    assert len(case.sets) == 8 and case.distinct_experts == [TINY.K] * 8
    weights = TINY.K * 3 * TINY.H * TINY.I
    scales = TINY.K * 4 * (2 * TINY.I // 128 * (TINY.H // 128) + TINY.H // 128 * (TINY.I // 128))
    moved = 2 * weights if scheme is None else weights + scales
    moved += 2 * TINY.H * 2  # the token in, and out
    assert case.roof_on(lookup("H200"), scheme) == pytest.approx(moved / (H200_TBPS * 1e6), rel=1e-6)


def test_exact_answer_is_the_layer() -> None:
    weights = layer_weights(TINY, torch.float64, "cpu")
    case = make_case(weights, 5)
    inputs = case.sets[0]
    output = torch.zeros_like(inputs.hidden_states)
    for token in range(5):
        for slot in range(TINY.K):
            expert = int(inputs.topk_ids[token, slot])
            gate, up = (weights.gate_up_proj[expert] @ inputs.hidden_states[token]).chunk(2)
            result = weights.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            output[token] += inputs.topk_weights[token, slot] * result
    assert case.error(output) < 1e-12
