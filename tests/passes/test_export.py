"""torch.export and AOTInductor: a transformers model fused, equal, and as a package loaded in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import moe_ops
from tests.corpus.families import available, build, tokens

ROOT = Path(__file__).parents[2]
LOAD = """
import sys
import torch
package, data = sys.argv[1:]
ids, expected = torch.load(data)
try:
    torch._inductor.aoti_load_package(package)(ids)
except RuntimeError as error:
    print(error)
import moe_ops
compiled = torch._inductor.aoti_load_package(package)
torch.testing.assert_close(compiled(ids), expected, rtol=1e-4, atol=1e-4)
print("equal")
"""


class Logits(torch.nn.Module):
    """A model of tensors only, as export wants it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "form"), [("mixtral", "grouped_mm"), ("gpt_oss", "batched_mm")])
def test_exported_model_is_fused_saved_and_loaded(family: str, form: str, tmp_path: Path) -> None:
    if not available(family):
        pytest.skip(f"transformers has no {family}")
    model, ids = Logits(build(family, torch.float32, form, num_hidden_layers=1)), tokens(2, 8)
    torch.compiler.reset()
    counters.clear()
    package = str(tmp_path / "model.pt2")
    with torch.no_grad():
        expected = model(ids)
        exported = torch.export.export(model, (ids,))
        with moe_ops.fuse():
            torch._inductor.aoti_compile_and_package(exported, package_path=package)
        here = torch._inductor.aoti_load_package(package)(ids)
    torch.testing.assert_close(here, expected, rtol=1e-4, atol=1e-4)
    found = {name: counters["moe_ops"][name] for name in ("fused", "refused", "joined", "errors")}
    assert found == {"fused": 1, "refused": 0, "joined": 1, "errors": 0}

    torch.save((ids, expected), tmp_path / "data.pt")
    loaded = load(package, tmp_path / "data.pt")
    assert loaded.stdout.strip().endswith("equal"), loaded.stderr[-2000:]
    assert "Could not find schema for moe_ops::fused_moe" in loaded.stdout + loaded.stderr, "what the README quotes"


def load(package: str, data: Path) -> subprocess.CompletedProcess[str]:
    """Load and run the package in a new process, before it imports moe_ops and after."""
    return subprocess.run(
        [sys.executable, "-c", LOAD, package, str(data)], capture_output=True, text=True, timeout=280,
        cwd=data.parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
