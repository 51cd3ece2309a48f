"""Models of transformers whose loop over experts has no other form there: switch transformers and nllb, as they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.loops import STATIC
from compile_passes.tiny import model_of, tiny_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _nothing_compiled_stays() -> Iterator[None]:
    """Code of transformers that Dynamo has left to Python here is tried again in other tests."""
    yield
    torch.compiler.reset()


def switch() -> Any:
    """Capacity 2: tokens are dropped."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, num_sparse_encoder_layers=1,
        num_experts=4, expert_capacity=2,
    )  # fmt: skip
    return tiny_model(config, transformers.SwitchTransformersEncoderModel)


def nllb() -> Any:
    """Its loop has an expert for each of the bits of a mask, and a dropout for all of them beside the experts."""
    config = transformers.NllbMoeConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, num_experts=4, encoder_sparse_step=1,
        decoder_sparse_step=1, expert_capacity=2, moe_eval_capacity_token_fraction=0.2,
    )  # fmt: skip
    return tiny_model(config, transformers.NllbMoeModel)


MODELS = {"switch_transformers": (switch, 1), "nllb_moe": (nllb, 2)}


def inputs(name: str, count: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, count), generator=torch.Generator().manual_seed(count))
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "nllb_moe" else {})


@pytest.mark.parametrize("name", MODELS)
def test_fused(name: str) -> None:
    make, blocks = MODELS[name]
    model = make()
    with torch.no_grad():
        expected = {n: model(**inputs(name, n)).last_hidden_state for n in (12, 7, 5)}
    keys = list(model.state_dict())
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        function = moe_ops.compile(model, backend="moe_ops_eager")
    texts = [str(warning.message) for warning in said]
    assert any(
        "proved equal on a copy of one layer" in text and "In training the original runs" in text for text in texts
    )
    seen = []
    with torch.no_grad():
        for count, value in expected.items():
            out = function(**inputs(name, count)).last_hidden_state
            torch.testing.assert_close(out, value, atol=1e-5, rtol=1e-5)
            seen.append((counters["stats"]["unique_graphs"], counters["moe_ops"]["fused"]))
    assert seen[1] == seen[2], "the third number of tokens is compiled again"
    assert seen[0][1] == blocks and seen[1][1] == 2 * blocks and counters["moe_ops"]["refused"] == 0
    assert sorted(model.state_dict()) == sorted(keys)
    moe_ops.restore(model)
    assert list(model.state_dict()) == keys and not any(STATIC in vars(module) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**inputs(name, 7)).last_hidden_state, expected[7])


def test_router_in_another_dtype_than_the_model() -> None:
    """The original makes the router's weights float32 in its first call: `moe_ops.compile` does."""
    model = switch().to(torch.bfloat16)
    with torch.no_grad():
        expected = model(**inputs("switch_transformers", 6)).last_hidden_state
    model = switch().to(torch.bfloat16)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = moe_ops.compile(model, backend="moe_ops_eager")
    counters.clear()
    with torch.no_grad():
        out = function(**inputs("switch_transformers", 6)).last_hidden_state
    torch.testing.assert_close(out, expected, atol=5e-2, rtol=5e-2)
    assert model.encoder.block[1].layer[1].mlp.router.classifier.weight.dtype == torch.float32
    assert counters["moe_ops"]["fused"] == 1


@pytest.mark.parametrize("family", ["dbrx", "longcat_flash"])
def test_weights_that_are_views_and_experts_without_weights(family: str) -> None:
    """dbrx views a flat weight anew for every expert; some of longcat's experts return their tokens as they are."""
    config, kind = model_of(family)
    model, ids = tiny_model(config, kind, dtype=torch.float32), torch.randint(3, 100, (1, 16))
    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(ids).logits
        function = moe_ops.compile(model, backend="moe_ops_eager")
        counters.clear()
        torch.testing.assert_close(function(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert counters["moe_ops"]["fused"] > 0 and counters["moe_ops"]["refused"] == 0
        moe_ops.restore(model)
        assert torch.equal(model(ids).logits, expected)
