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
from torch.torch_version import TorchVersion

import moe_ops
from tests.corpus.families import available, build, tokens
from tests.passes.blocks import E, H, I, K, T

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
    """Models beside each other, of tensors only, as export wants them: one package is linked for all."""

    def __init__(self, *models: torch.nn.Module) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(models)

    def forward(self, ids: torch.Tensor) -> Any:
        return [model(input_ids=ids, use_cache=False).logits for model in self.models]


class Gathered(torch.nn.Module):
    """Weights gathered by ids, and einsum, which takes its operands as they are or as a list."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.w1 = (torch.nn.Parameter(torch.randn(*size) / 4) for size in ((E, H), (E, 2 * I, H)))
        self.w2, self.listed = torch.nn.Parameter(torch.randn(E, H, I) / 4), listed

    def einsum(self, text: str, *operands: torch.Tensor) -> torch.Tensor:
        return torch.einsum(text, [*operands]) if self.listed else torch.einsum(text, *operands)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x @ self.gate.t()).softmax(-1).topk(K)
        gate, up = self.einsum("th,tknh->tkn", x, self.w1[ids]).chunk(2, -1)
        rows = self.einsum("tkn,tkhn->tkh", torch.nn.functional.silu(gate) * up, self.w2[ids])
        return self.einsum("tkh,tk->th", rows, weights)


class Scores(Gathered):
    """All experts for all tokens, by scores that are turned around."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.gate.t()
        best, ids = logits.topk(K)
        scores = torch.full_like(logits, float("-inf")).scatter(1, ids, best).softmax(-1)
        gate, up = torch.bmm(x.expand(E, -1, -1), self.w1.transpose(1, 2)).chunk(2, -1)
        return (torch.bmm(torch.nn.functional.silu(gate) * up, self.w2.mT) * scores.t()[..., None]).sum(0)


class Loop(Gathered):
    """A loop over experts, that weights rows by an index which adds a dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x @ self.gate.t()).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(ids, E).permute(2, 1, 0)
        for e in range(E):
            slot, token = torch.where(mask[e])
            gate, up = (x[token] @ self.w1[e].t()).chunk(2, -1)
            rows = torch.nn.functional.silu(gate) * up @ self.w2[e].t()
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


class Sorted(Gathered):
    """Rows that are sorted by expert, and weighted in the same way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x @ self.gate.t()).softmax(-1).topk(K)
        order = ids.view(-1).argsort(stable=True)
        token, slot = order // K, order % K
        ends = torch.nn.functional.one_hot(ids.view(-1), E).sum(0).cumsum(0, dtype=torch.int32)
        w1, w2 = (weight.bfloat16().transpose(1, 2) for weight in (self.w1, self.w2))
        gate, up = torch.nn.functional.grouped_mm(x[token].bfloat16(), w1, offs=ends).chunk(2, -1)
        rows = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, w2, offs=ends).float()
        return torch.zeros_like(x).index_add(0, token, rows * weights[token, slot, None])


@pytest.mark.parametrize("exported", [False, True], ids=["compiled", "exported"])
@pytest.mark.parametrize("listed", [False, True], ids=["operands", "list"])
@pytest.mark.parametrize("kind", [Gathered, Scores])
def test_spellings_of_aten(kind: type[Gathered], listed: bool, exported: bool) -> None:
    """What export makes of a module is fused as what Dynamo does, and so is einsum of a list."""
    check_fused(kind(listed), exported)


@pytest.mark.parametrize("exported", [False, True], ids=["compiled", "exported"])
@pytest.mark.parametrize("kind", [Loop, Sorted])
def test_weights_that_are_given_a_dimension_by_their_index(kind: type[Gathered], exported: bool) -> None:
    """Export has weights[token, slot, None] with that dimension before they are indexed."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_fused(kind(False), exported, atol=1e-5 if kind is Loop else 2e-2)  # the other's products are in bf16


def check_fused(model: torch.nn.Module, exported: bool, atol: float = 1e-5) -> None:
    x = torch.randn(T, H)
    with torch.no_grad():
        expected = model(x)
        run = torch.export.export(model, (x,)).module() if exported else model
        torch.compiler.reset()
        counters.clear()
        result = torch.compile(run, backend="moe_ops_eager", fullgraph=True)(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=atol)
    assert counters["moe_ops"]["fused"] == 1


FAMILIES = {"mixtral": "grouped_mm", "gpt_oss": "batched_mm"}


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="packages crash when they are loaded before")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exported_models_are_fused_saved_and_loaded(tmp_path: Path) -> None:
    if missing := [family for family in FAMILIES if not available(family)]:
        pytest.skip(f"transformers has no {' and no '.join(missing)}")
    made = [build(family, torch.float32, form, num_hidden_layers=1) for family, form in FAMILIES.items()]
    model, ids = Logits(*made), tokens(2, 8)
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
    assert found == {"fused": 2, "refused": 0, "joined": 2, "errors": 0}

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
