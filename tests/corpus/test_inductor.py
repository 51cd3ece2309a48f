"""Whole models through Inductor: one graph for every token count, fused and joined, the model's numbers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import compile_passes  # noqa: F401  (registers the backends)
from tests.corpus.families import build, result, tokens


@pytest.mark.slow
def test_inductor() -> None:
    """Of a grouped form; of the batched one see `tests/passes/test_export.py`."""
    model = build("mixtral", torch.float32, "grouped_mm", num_hidden_layers=1)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="moe_ops", fullgraph=True, dynamic=True)
    with fresh_cache(), torch.no_grad():
        compiled(input_ids=tokens(1, 5), use_cache=False)
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in (2, 64):
                ids = tokens(1, length)
                torch.testing.assert_close(
                    result(compiled(input_ids=ids, use_cache=False)), result(model(input_ids=ids, use_cache=False)),
                    rtol=1e-4, atol=1e-4,
                )  # fmt: skip
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    blocks = {name: counters["moe_ops"][name] for name in ("fused", "refused", "joined")}
    assert blocks == {"fused": 1, "refused": 0, "joined": 1}
    torch.compiler.reset()
