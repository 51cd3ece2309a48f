"""`moe-ops tune`: what it is asked for, what it keeps when it is stopped, and what it calls the fastest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_passes.__main__ import main, parser
from moe_ops import autotune, plans, tuning
from moe_ops.backends import triton_plans
from moe_ops.backends.triton_plans import plan
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.plans import LayerKey, Plan

TILE = MMConfig(16, 128, 128, 1, 4, 3, a_tma=False, w_tma=True)


def keys(*arguments: str) -> dict[str, LayerKey]:
    return tuning.keys_of(parser().parse_args(["tune", *arguments]))


def test_shapes_and_models() -> None:
    found = keys("--shape", "8,2,64,32", "--model", "mixtral-8x7b", "--scheme", "fp8_block128")
    assert found == {
        "8,2,64,32": LayerKey("fp8_block128", "grouped", 8, 2, 64, 32, True),
        "mixtral-8x7b": LayerKey("fp8_block128", "grouped", 8, 2, 4096, 14336, True),
    }
    assert not keys("--shape", "8,2,64,32", "--not-gated")["8,2,64,32"].gated


CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "qwen3_moe": (
        {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64, "moe_intermediate_size": 24}, (16, 4, 64, 24),
    ),
    "mixtral": (
        {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96}, (8, 2, 64, 96),
    ),
    "deepseek_v3": (
        {"n_routed_experts": 32, "num_experts_per_tok": 8, "hidden_size": 64, "moe_intermediate_size": 16},
        (32, 8, 64, 16),
    ),
    "muse_spark": (
        {"text_config": {"num_local_experts": 16, "moe_hidden_size": 32, "moe_intermediate_size": 24}}, (16, 8, 32, 24),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_configuration_of_transformers(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip(f"transformers.models.{model_type}")
    fields, (E, K, H, I) = CONFIGS[model_type]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    (key,) = keys("--model", str(tmp_path)).values()
    assert (key.E, key.K, key.H, key.I) == (E, K, H, I)


BAD = {
    "nothing": ([], "--model or --shape must be given"),
    "three": (["--shape", "8,2,64"], "--shape must be E,K,H,I, got '8,2,64'"),
    "zero": (["--shape", "8,0,64,32"], "--shape must be positive integers"),
    "top_k": (["--shape", "2,8,64,32"], "--shape must have K <= E, got E=2, K=8"),
    "tokens": (["--shape", "8,2,64,32", "--tokens", "1,x"], "--tokens must be positive integers"),
    "no_gpu": (["--shape", "8,2,64,32"], "needs a CUDA device"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "no_gpu" and torch.cuda.is_available():
        pytest.skip("there is one")
    arguments, message = BAD[name]
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["tune", "--model", str(tmp_path)]) == 2
    assert "--model must be a Mixture of Experts" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["missing", "no JSON", "two widths"])
def test_models_that_cannot_be_read(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "no JSON":
        (tmp_path / "config.json").write_text("{")
    elif what == "two widths":
        pytest.importorskip("transformers.models.ernie4_5_vl_moe")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie4_5_vl_moe"}))
    assert main(["tune", "--model", str(tmp_path / "none" if what == "missing" else tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tune: --model must ") and said.rstrip().endswith("Pass --shape E,K,H,I.")
    assert ("have one I, got [" in said) == (what == "two widths")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """A GPU that measures nothing: the numbers of tokens that it was asked for, in turn."""
    asked: list[int] = []

    def tune(layer: Any, tokens: int) -> Plan | None:
        if len(asked) == 2 and 1 not in asked[2:]:
            asked.append(1)  # only once
            raise KeyboardInterrupt
        asked.append(tokens)
        return plan("grouped", TILE, TILE, us=float(tokens)) if tokens < 32 else None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    monkeypatch.setattr(autotune, "TrialLayer", lambda key, device: SimpleNamespace(key=key))
    monkeypatch.setattr(autotune, "precompile", lambda jobs, processes: iter([(1, 1, "one that does not")]))
    monkeypatch.setattr(autotune, "tune", tune)
    monkeypatch.setattr(autotune, "by_cost", lambda *_: plan("grouped", TILE, TILE))
    monkeypatch.setattr(plans, "gpu_of", lambda _: ("Test GPU", 90))
    monkeypatch.setattr(plans, "user_directory", lambda: tmp_path)
    yield asked


def test_a_stopped_run_goes_on(measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "--shape", "8,2,64,32", "--tokens", "4,8,16,32"]
    assert main(arguments) == tuning.INTERRUPTED
    path = tmp_path / "test_gpu.json"
    key = str(LayerKey("bf16", "grouped", 8, 2, 64, 32, True))
    assert list(json.loads(path.read_text())["plans"][key]) == ["4", "8"]
    assert "the same command goes on from there" in capsys.readouterr().err
    assert main(arguments) == 0
    assert measured == [4, 8, 1, 16, 32]
    assert "2 plans measured, 2 were there" in capsys.readouterr().out
    plans.tuned.cache_clear()
    assert plans.tuned("Test GPU")[key][16] == plan("grouped", TILE, TILE, us=16.0)
    assert 32 not in plans.tuned("Test GPU")[key]  # the plan by cost serves
    plans.tuned.cache_clear()
    assert main([*arguments, "--again"]) == 0
    assert measured[5:] == [4, 8, 16, 32]


def test_plans_of_another_gpu_are_not_mixed_in(
    measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"gpu": "Another GPU", "plans": {}}))
    assert main(["tune", "--shape", "8,2,64,32", "--output", str(path)]) == 2
    assert "--output must hold plans of Test GPU, got those of Another GPU" in capsys.readouterr().err
    assert measured == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"gpu": "Test GPU", "plans": []}'], ids=str)
def test_a_file_that_holds_no_plans_is_kept(
    text: str, measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    assert main(["tune", "--shape", "8,2,64,32", "--output", str(path)]) == 2
    assert f"tune: --output {path} must be a whole file of plans" in capsys.readouterr().err
    assert measured == [] and path.read_text() == text


@pytest.mark.parametrize("cost_us", [100.0, 89.0, None], ids=["slower", "within_3_percent", "among_them"])
def test_candidates_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch, cost_us: float | None) -> None:
    """On a GPU that grows slower with every measurement the fastest plan wins, though it comes last in every scan. It
    is kept where it beats the plan by cost by more than 3 %.
    """
    tiles = [TILE._replace(num_stages=stages) for stages in (3, 4, 5)]
    other = TILE._replace(block_n=64) if cost_us else tiles[2]
    seen: list[float] = []

    def heated(thunks: list[Callable[[], float]], repeats: int = 9) -> float:
        seen.append(thunks[0]())
        return seen[-1] * (1 + 0.02 * len(seen))

    def run(plan: Plan, *inputs: Any) -> float:
        up, down = plan.configs
        return cost_us if cost_us and up == other else 100.0 - up.num_stages - down.num_stages

    monkeypatch.setattr(autotune, "graph_us", heated)
    monkeypatch.setattr(plans, "gpu_of", lambda _: ("Test GPU", 90))
    monkeypatch.setattr(triton_plans, "candidates", lambda *_: {"grouped": (tiles, tiles), "small": ([], [])})
    monkeypatch.setattr(autotune, "by_cost", lambda *_: plan("grouped", other, other))
    layer = SimpleNamespace(key=None, run=run, inputs=lambda tokens, sets: [()])
    best = autotune.tune(layer, 4)
    if cost_us == 100.0:
        assert [tile.num_stages for tile in best.configs] == [5, 5]
    else:
        assert best is None


def test_no_candidate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "gpu_of", lambda _: ("Test GPU", 90))
    monkeypatch.setattr(triton_plans, "candidates", lambda *_: {"grouped": ([], [])})
    with pytest.raises(RuntimeError, match="no candidate runs"):
        autotune.tune(SimpleNamespace(key="a layer", inputs=lambda tokens, sets: []), 4)
