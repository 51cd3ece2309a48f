"""A model with NaN in it gives NaN where its own code does: no token more, no token less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import compile_passes  # noqa: F401  (registers the backends)
from tests.corpus.families import available, build, one_layer, result, tokens

FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")  # softmax then top-k; sigmoid, bias and groups; top-k then softmax
NAN = float("nan")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def model_and_ids(family: str, form: str) -> tuple[nn.Module, torch.Tensor]:
    """Two sequences; the last token of the first one has an embedding that no other token has."""
    if not available(family):
        pytest.skip(f"transformers has no {family}")
    model, ids = build(family, torch.float32, form, **one_layer(family)), tokens(2, 8)
    ids[0, -1] = 100
    return model, ids


def router(model: nn.Module) -> nn.Module:
    (found,) = (module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router")))
    return found


def compare(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run both; returns the logits."""
    with torch.no_grad():
        wanted = result(model(input_ids=ids, use_cache=False))
        got = result(torch.compile(model, backend="moe_ops_eager", fullgraph=True)(input_ids=ids, use_cache=False))
    assert counters["moe_ops"]["fused"] == 1
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    return got


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_nan_token(family: str, form: str) -> None:
    model, ids = model_and_ids(family, form)
    with torch.no_grad():
        model.get_input_embeddings().weight[100] = NAN
    logits = compare(model, ids)
    assert logits[0, -1].isnan().all() and logits[1].isfinite().all()


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_in_the_router_alone(family: str, form: str) -> None:
    """The tokens are finite: only the routing weights can show that the router has diverged."""
    model, ids = model_and_ids(family, form)
    with torch.no_grad():
        router(model).weight[3, 0] = NAN
    assert compare(model, ids).isnan().all()


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_a_nan_in_the_correction_bias(form: str) -> None:
    """It decides which expert is chosen, and is in no weight: everything stays finite, and the same."""
    model, ids = model_and_ids("deepseek_v3", form)
    router(model).e_score_correction_bias[3] = NAN
    assert compare(model, ids).isfinite().all()
