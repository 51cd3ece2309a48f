"""A second process, for which everything is in torch's caches, counts, logs and refuses what the first one did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, logging, sys
import torch
from torch._dynamo.utils import counters
import moe_ops
from tests.passes.test_warm_cache import CASES, program

lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(f"{record.levelname} {record.getMessage()}")

logger = logging.getLogger("compile_passes")
logger.setLevel(logging.INFO)
logger.addHandler(Keep())
found = {}
for case in CASES:
    torch.compiler.reset()
    counters.clear()
    lines.clear()
    function, inputs, dynamic = program(case)
    compiled = torch.compile(function, backend="moe_ops", dynamic=dynamic, fullgraph=True)
    with torch.set_grad_enabled(case == "training"):
        output = compiled(**inputs)
        if case == "training":
            output.sum().backward()
        tolerance = 2e-2 if inputs["x"].dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(output, function(**inputs), rtol=tolerance, atol=tolerance)
    caches = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
    found[case] = {"counts": dict(counters["moe_ops"]), "lines": list(lines), "caches": caches}

from moe_ops import runtime

calls, call = [], runtime.Launcher.__call__
runtime.Launcher.__call__ = lambda self, *args, **options: calls.append(1) or call(self, *args, **options)
torch.compiler.reset()
counters.clear()
torch.manual_seed(0)
made = [torch.randn(4, 48, 16) / 16, torch.randn(4, 16, 24)]
block = torch.compile(lambda x, logits: moe_ops.fused_moe(x * 2, logits, *made, top_k=2), fullgraph=True, dynamic=True)
same, through = [], []
with torch.no_grad():
    for T in (8, 8, 8, 40, 40, 40):
        x, logits = torch.randn(T, 16), torch.randn(T, 4)
        expected = moe_ops.fused_moe(x * 2, logits, *made, top_k=2, backend="reference")
        calls.clear()
        same.append(torch.allclose(block(x, logits), expected, atol=1e-4))
        through.append(len(calls))
found["sites"] = {"same": same, "through": through, "hits": counters["inductor"]["fxgraph_cache_hit"]}
print(json.dumps(found))
"""
JOINED = {"fused": 1, "refused": 0, "joined": 1, "causal_masks": 0, "shared_heads": 0, "staged": 0, "errors": 0}
CASES = {
    "inference": JOINED,
    "training": {**JOINED, "joined": 0},
    "refused": {**JOINED, "fused": 0, "refused": 1, "joined": 0},
    "symbolic_float": JOINED,
    "attention": {**JOINED, "shared_heads": 1},
}


def program(name):
    """(function, its inputs, dynamic) of a case."""
    import torch
    import torch.nn.functional as F

    from tests.passes.blocks import batched, block, grouped, weights
    from tests.passes.test_attention import attend, expanded
    from tests.passes.test_attention import inputs as attention_inputs
    from tests.passes.test_backend import refused_block

    inputs = weights(dtype=torch.float32)
    if name == "training":
        return block(batched), {key: value.requires_grad_() for key, value in inputs.items()}, None
    if name == "refused":
        return refused_block, inputs, None
    if name == "attention":
        heads = dict(zip("q k v mask".split(), attention_inputs(), strict=True))

        def both(q, k, v, mask, **inputs):
            return block(batched)(**inputs), attend(expanded)(q, k, v, mask)

        return both, {**heads, **inputs}, None
    if name == "symbolic_float":

        class Limited(torch.nn.Module):
            """A limit that dynamic=True makes symbolic: the passes have Dynamo trace a second time."""

            limit = 0.75

            def forward(self, x, gate, w1, w2):
                def activation(h):
                    first, second = h.chunk(2, dim=-1)
                    return F.silu(first.clamp(max=self.limit)) * second.clamp(-self.limit, self.limit)

                return block(grouped, activation=activation)(x, gate, w1, w2)

        return Limited(), weights(), True
    return block(batched), inputs, None


def run(cache: Path) -> dict[str, Any]:
    """What a new process finds with this cache, by case."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """(first, second): two processes, one after the other, with one cache; once for all workers of a test run."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    results, cache = shared / "warm_cache.json", shared / "inductor"
    with FileLock(f"{results}.lock"):
        if not results.exists():
            results.write_text(json.dumps([run(cache), run(cache)]))
    first, second = json.loads(results.read_text())
    return first, second


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_call_sites_of_a_second_process_learn_anew(processes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Emitted code holds nothing of the process that wrote it."""
    for hits, answer in enumerate(process["sites"] for process in processes):
        assert all(answer["same"]) and answer["through"] == [1, 1, 0, 1, 1, 0]
        assert answer["hits"] == hits


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_second_process_says_what_the_first_said(case: str, processes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    first, second = (process[case] for process in processes)
    assert first["counts"] == second["counts"] == CASES[case]
    assert first["lines"] == second["lines"]
    assert any(("WARNING not fused" if case == "refused" else "INFO fused") in line for line in first["lines"])
    assert first["caches"] == {"hit": 0, "miss": first["caches"]["miss"], "bypass": 0} and first["caches"]["miss"] >= 1
    assert second["caches"]["hit"] == 1 and second["caches"]["bypass"] == 0
