"""Loops that put their results into a tensor: which of the writes recorded a gradient, where the tensor itself shows
what it came to in the end.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.passes.blocks import E, softmax_router, weights
from tests.passes.compare import check
from tests.passes.test_unrolled import expert


def added_without_gradients(x, gate, w1, w2):
    out, (topk_weights, ids) = torch.zeros_like(x), softmax_router(x, gate)
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = topk_weights[token, slot, None] * expert(x[token], w1[e], w2[e])
        with torch.set_grad_enabled(e == E - 1):
            out.index_add_(0, token, rows)
    return out


def put_without_gradients(x, gate, w1, w2):
    scores, choice = F.linear(x, gate).softmax(-1).max(dim=-1)
    out = torch.zeros_like(x)
    for e in range(E):
        rows = expert(x[choice == e], w1[e], w2[e])
        with torch.set_grad_enabled(e > 0):
            out[choice == e] = rows
    return out * scores.unsqueeze(-1)


@pytest.mark.parametrize("form", [added_without_gradients, put_without_gradients], ids=lambda form: form.__name__)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_some_results_are_put_there_without_gradients(form, training):
    outcome = check(form, *weights(dtype=torch.float64).values(), gradients=training, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0 if training else 1)
