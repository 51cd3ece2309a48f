"""The other families of transformers with the shared experts: a layer of each is fused, or staged.

That each of several layers is, ten families show in `test_required.py`, and `test_models_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from compile_passes.match import Refusal
from compile_passes.passes import FUSE, Report, run
from compile_passes.tiny import IN_FP32
from tests.corpus.families import (
    KEPT_ROUTERS,
    OTHERS,
    OWN_ACTIVATIONS,
    REQUIRED,
    STAGED,
    UNLIKE_LAYERS,
    available,
    build,
    one_layer,
    tokens,
)


def passes_on(model: torch.nn.Module) -> Report:
    """Capture a model in one graph and run the pass on it; the rewritten graph is run once."""
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        reports.append(run(FUSE, gm.graph))
        gm.recompile()
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(input_ids=tokens(2, 8))
    torch.compiler.reset()
    assert len(reports) == 1
    return reports[0]


@pytest.mark.parametrize("family", OTHERS)
def test_family(family: str) -> None:
    if not available(family):
        pytest.skip(f"transformers has no {family}")
    # The tails are shared code, tested in both forms on ten families and on hand-written blocks; here routers differ.
    for form in ("grouped_mm", "batched_mm") if family in OWN_ACTIVATIONS else ("grouped_mm",):
        dtype = torch.float32 if family in IN_FP32 else torch.bfloat16
        settings = {} if family in UNLIKE_LAYERS else one_layer(family)
        report = passes_on(build(family, dtype, form, **settings))
        layers = 1 if settings else 2
        assert not report.refused, report.refused[0]
        done = report.staged if family in STAGED else report.fused
        assert len(done) == layers == len(report.fused) + len(report.staged)
        routers = {decision.match.router for decision in done}
        kept = [router.reason for router in routers if isinstance(router, Refusal)]
        assert all(KEPT_ROUTERS[family] in reason for reason in kept)
        assert bool(kept) == (family in KEPT_ROUTERS)


def test_every_decorated_family_is_listed() -> None:
    """A family that a newer transformers adds should be added here; none is listed twice."""
    assert len(set(REQUIRED) | set(OTHERS)) == len(REQUIRED) + len(OTHERS) == 67
