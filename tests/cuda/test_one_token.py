"""One token's experts in one kernel, on a GPU: right whatever the weights are, the same bits each time, never stuck."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.census import kernel_names
from moe_ops.testing import assert_cuda_graph_safe
from tests.ops.scheme_layers import CONTRACT, SchemeLayer, build

SCHEMES = ("bf16", "fp16", "fp8_block128", "fp8_channel", "fp8_tensor")
FORMS = ("concat", "interleaved", "separate", "none", "halves")
#: E, K, H, I: fewer slices than there are threads to copy them; several parts; slices that end within the last box.
SIZES = {"small": (8, 2, 640, 384), "odd": (8, 3, 2048, 1152), "ragged": (4, 4, 2880, 2880)}
TOKENS = 8


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not on_hopper(), reason="the kernel is for Hopper"),
]


def one(layer: SchemeLayer, token: int, **changed: Any) -> torch.Tensor:
    """The layer's result for one of its tokens."""
    given = dict(layer.tensors)
    for name in ("hidden_states", "topk_weights", "topk_ids"):
        given[name] = given[name][token : token + 1]
    return moe_ops.fused_experts(**{**given, **changed}, **layer.options, backend="triton")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_as_near_to_float64_as_their_row_says(scheme: str, sizes: str, form: str):
    """Of several tokens together, as few numbers of one may be rounded luckily."""
    torch.manual_seed(0)
    layer = build(scheme, T=TOKENS, sizes=SIZES[sizes], form=form, bias=True, expert_map=True, device="cuda")
    got = torch.cat([one(layer, token) for token in range(TOKENS)]).double()
    expected = layer.float64()
    assert (got - expected).norm() <= CONTRACT * (layer.rounded() - expected).norm()
    torch.use_deterministic_algorithms(False)  # filling memory launches kernels of its own
    assert "_one_token_kernel" in kernel_names(lambda: one(layer, 0))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_call_has_the_same_bits(scheme: str, sizes: str):
    layer = build(scheme, T=1, sizes=SIZES[sizes], device="cuda")
    first = one(layer, 0)
    assert all(torch.equal(one(layer, 0), first) for _ in range(300))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme: str):
    layer = build(scheme, T=1, sizes=SIZES["odd"], device="cuda")
    torch.use_deterministic_algorithms(False)
    ids = layer.tensors["topk_ids"]

    def layer_with(ids: torch.Tensor) -> torch.Tensor:
        return one(layer, 0, topk_ids=ids)

    assert_cuda_graph_safe(layer_with, (ids,), changed=[((ids + 1) % SIZES["odd"][0],)], backend=None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_is_no_result_that_is_missing(scheme: str):
    """Even one whose bits are all ones, as those of results that are not there yet."""
    layer = build(scheme, T=1, sizes=SIZES["small"], device="cuda")
    x = torch.full_like(layer.tensors["hidden_states"].view(torch.int16), -1).view(layer.dtype)
    assert one(layer, 0, hidden_states=x).isnan().all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pairs_without_an_expert_here_count_for_nothing(scheme: str):
    layer = build(scheme, T=1, sizes=SIZES["small"], device="cuda")
    ids, weights = layer.tensors["topk_ids"].clone(), layer.tensors["topk_weights"].clone()
    ids[0, 1], weights[0, 1] = -1, float("nan")
    alone = one(layer, 0, topk_ids=ids[:, :1].contiguous(), topk_weights=weights[:, :1].contiguous())
    torch.testing.assert_close(one(layer, 0, topk_ids=ids, topk_weights=weights), alone, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_of_pairs_without_an_expert_here_is_read(scheme: str):
    """Neither what the token is, where none of its pairs has one, nor the first expert's scales."""
    layer = build(scheme, T=1, sizes=SIZES["small"], device="cuda")
    nan = torch.full_like(layer.tensors["hidden_states"], float("nan"))
    assert not one(layer, 0, hidden_states=nan, topk_ids=torch.full_like(layer.tensors["topk_ids"], -1)).any()
    ids = layer.tensors["topk_ids"].clone()
    ids[0] = torch.tensor([3, -1])
    expected, changed = one(layer, 0, topk_ids=ids), {}
    for name in ("gate_up", "down"):
        scales = [scale.clone() for scale in layer.tensors.get(f"{name}_scales", [])]
        for scale in scales:
            scale[0] = float("nan")
        changed[f"{name}_scales"] = scales
    assert torch.equal(one(layer, 0, topk_ids=ids, **(changed if scheme not in ("bf16", "fp16") else {})), expected)


def test_from_logits_it_is_two_kernels():
    made = {
        "gate_up_proj": torch.randn(128, 1536, 2048, device="cuda", dtype=torch.bfloat16) / 45,
        "down_proj": torch.randn(128, 2048, 768, device="cuda", dtype=torch.bfloat16) / 28,
    }
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(1, 128, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    for scheme in (None, "fp8_block128"):
        given = dict(made)
        if scheme is not None:
            for name in ("gate_up", "down"):
                given[f"{name}_proj"], *given[f"{name}_scales"] = moe_ops.quantize_weight(
                    made[f"{name}_proj"], scheme=scheme
                )
            given["scheme"] = scheme
        names = kernel_names(lambda given=given: moe_ops.fused_moe(x, logits, top_k=8, **given))
        assert names == ["_route_few_kernel", "_one_token_kernel"]


def test_streams_beside_each_other_do_not_wait_for_ever():
    """All programs of a layer have to run at once: two layers whose programs are mixed would never end."""
    layers = [build(scheme, T=1, sizes=SIZES["odd"], device="cuda") for scheme in ("bf16", "fp8_block128")]
    expected = [one(layer, 0) for layer in layers]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(400):
                if not torch.equal(one(layers[number % 2], 0), expected[number % 2]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
