"""Training, as the benchmarks time it: names and launches of kernels, a run that goes on, gradients that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import timing, train
from benchmarks.__main__ import main
from benchmarks.cases import layer_weights, make_case
from benchmarks.gradients import error
from benchmarks.kernel_names import short_name
from benchmarks.kernels import by_name, by_pass
from benchmarks.results import RESULTS, ResultFile, load_results
from benchmarks.shapes import TINY_SHAPES

BASELINE = load_results(RESULTS)["h200-train-baseline"]
TINY = TINY_SHAPES["tiny-mixtral"]
ONE = ["train", "--shapes", TINY.name, "--tokens", "5"]


def mangled() -> dict[str, set[str]]:
    """Names of CUTLASS's kernels in a committed file, as the profiler gave them, by the modes that ran them."""
    found: dict[str, set[str]] = {}
    for row in BASELINE["rows"]:
        for name in row.get("kernels", {}):
            if name.startswith("_ZN"):
                found.setdefault(name, set()).add(row["mode"])
    return found


def test_mangled_products_have_short_names_that_tell_them_apart() -> None:
    names = mangled()
    tiles = ("128x256x64", "64x128x128")
    expected = {f"cutlass grouped gemm {tile} {layout}" for tile in tiles for layout in ("tn", "tt")}
    assert {short_name(name) for name in names} == expected | {"cutlass grouped gemm 128x256x64 nt"}
    assert len(names) == 5 and min(map(len, names)) > 1000
    for name, modes in names.items():
        assert (modes == {"trained"}) == short_name(name).endswith("nt"), "the product of a weight's gradient"


@pytest.mark.parametrize(
    "name, short",
    {
        "_expert_mm_kernel": "_expert_mm_kernel",
        "Memcpy DtoD (Device -> Device)": "Memcpy DtoD",
        "void at::native::vectorized_elementwise_kernel<4, at::native::F<c10::BFloat16> >(int)":
            "vectorized_elementwise_kernel",
        "void at::native::(anonymous namespace)::fill_index<int>(int*)": "fill_index",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(P)":
            "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEviT0_T1_":
            "vectorized_elementwise_kernel",
        "_Z13plain_in_cudaPf": "plain_in_cuda",
    }.items(),
    ids=lambda text: text[:24],
)  # fmt: skip
def test_names_of_other_kernels(name: str, short: str) -> None:
    assert short_name(name) == short == short_name(short)


def test_launches_of_a_backward_are_those_beyond_the_forward() -> None:
    forward = ["_topk_kernel", "_expert_mm_kernel", "_expert_mm_kernel", "memset"]
    step = ["_expert_mm_kernel", *forward, "_expert_mm_kernel", "_wgrad_kernel", "memset"]
    first, second = by_pass(forward, step)
    assert first == {"_topk_kernel": 1, "_expert_mm_kernel": 2, "memset": 1}
    assert second == {"_expert_mm_kernel": 2, "_wgrad_kernel": 1, "memset": 1}
    times = by_name([(name, 2.0) for name in step] * 5, replays=5, sets=2)
    assert times["_expert_mm_kernel"] == 4.0 and times["_wgrad_kernel"] == 1.0


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on what compiles the graphs."""
    backends = {"ours_compiled": {"backend": "moe_ops_eager"}, "hf_moe": {"backend": "eager"}}
    monkeypatch.setattr(train, "PEERS", backends)
    monkeypatch.setattr(timing, "CPU_BUDGET_S", 0.0)
    monkeypatch.setattr(timing, "SAMPLE_US", 0.0)


@pytest.mark.usefixtures("without_inductor")
def test_a_run_and_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    assert main([*ONE, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["kind"] == "train" and document["reference"] == "ours_compiled" and document["ceilings"] is None
    keys = [(row["mode"], row["peer"]) for row in document["rows"]]
    assert keys == [(mode, peer) for mode in train.MODES for peer in train.PEERS]
    for row in document["rows"]:
        assert row["us"] > 0 and row["forward_us"] > 0 and row["error"] < 1e-5, row.get("reason")
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]


def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = tmp_path / "train.json", []

    def stopped(case: Any, mode: str, *rest: Any) -> list[dict[str, Any]]:
        made.append(mode)
        if len(made) == 2:
            raise KeyboardInterrupt
        head = {"shape": case.shape.name, "T": case.T, "mode": mode, "us": None, "reason": f"made up {len(made)}"}
        return [head | {"peer": peer} for peer in train.PEERS]

    monkeypatch.setattr(train, "time_case", stopped)
    assert main([*ONE, "--json", str(path)]) == 130
    kept = json.loads(path.read_text())
    peers = len(train.PEERS)
    assert [row["mode"] for row in kept["rows"]] == ["trained"] * peers
    kept["rows"].append(kept["rows"][0] | {"mode": "frozen"})  # as if it was killed between a case's rows
    path.write_text(json.dumps(kept))
    assert main([*ONE, "--resume", str(path)]) == 0
    assert made == ["trained", "frozen", "frozen"], "what was measured is not measured again"
    document = json.loads(path.read_text())
    rows = document["rows"]
    assert len(document["resumed"]) == 1 and list(document)[-1] == "rows"
    assert rows[:peers] == kept["rows"][:peers]
    assert [row["mode"] for row in rows[peers:]] == ["frozen"] * peers
    for other in (["--resume", str(path), "--commit", "another"], ["--resume", str(tmp_path / "none.json")]):
        capsys.readouterr()
        assert main([*ONE, *other]) == 2
        assert capsys.readouterr().err.startswith("benchmarks: --resume must name ")


@pytest.mark.usefixtures("without_inductor")
def test_kernels_are_those_of_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made a second time for them but what was dropped; a row whose kernels fail keeps its times."""
    made, steps, failing = [], train.steps, iter([True, False])

    def counted(*args: Any) -> list[train.Step]:
        made.append(args)
        return steps(*args)

    def launches(forward: Any, step: Any) -> tuple[dict[str, int], dict[str, int]]:
        if next(failing):
            raise RuntimeError("made up")
        assert forward().shape == (3, TINY.H) and len(step()) == 2
        return {"topk": 1, "mm": 2}, {"mm": 2, "memset": 1}

    monkeypatch.setattr(train, "steps", counted)
    monkeypatch.setattr(train, "launches", launches)
    monkeypatch.setattr(train, "kernel_times", lambda call, sets: {"mm": float(sets)})
    plan = train.Plan([TINY], [3], modes=["frozen"], peers=["ours_compiled", "hf_moe"], rounds=3)
    case, held = make_case(layer_weights(TINY, torch.float32, "cpu"), 3), train.Kept(wanted=True)
    results = ResultFile(None, "train", "made up", commit="0")
    results.rows.extend(train.time_case(case, "frozen", plan, held))
    del held.by_key[train.key_of(results.rows[1])]
    train.add_kernels(plan, results, held)
    assert len(made) == 3 and not held.by_key
    first, second = results.rows
    assert first["us"] > 0 and "kernels" not in first, "its kernels failed"
    assert second["kernels"] == {"mm": len(case.sets)} and second["kernels_backward"] == {"mm": 2, "memset": 1}
    assert (second["launches_forward"], second["launches_backward"]) == (3, 3)


def test_a_peer_that_cannot_run_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(train, "steps", fail)
    case = make_case(layer_weights(TINY, torch.float32, "cpu"), 4)
    rows = train.time_case(case, "trained", train.Plan([TINY], [4]), train.Kept(wanted=False))
    assert [(row["us"], row["reason"]) for row in rows] == [(None, "out of memory")] * len(train.PEERS)
    assert all("out of memory" in train.describe(row) for row in rows)


def test_a_step_of_ours_that_was_not_fused_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "PEERS", {"ours_compiled": {"backend": "eager"}})
    case = make_case(layer_weights(TINY, torch.float32, "cpu"), 4)
    outcome, prepared = train.prepare(case, "frozen", "ours_compiled", None)
    assert prepared is None and "nothing was fused" in outcome["reason"]


@pytest.mark.parametrize("which", [None, 0, 1, 2, 3], ids=["none", "hidden_states", "logits", "gate_up", "down"])
def test_error_sees_every_gradient(which: int | None) -> None:
    case = make_case(layer_weights(TINY, torch.float32, "cpu"), 4)
    inputs = case.sets[0]
    leaves = [inputs.hidden_states.clone().requires_grad_(), inputs.router_logits.clone().requires_grad_()]
    weights = [case.weights.gate_up_proj.requires_grad_(), case.weights.down_proj.requires_grad_()]
    grad = torch.ones_like(inputs.hidden_states)
    scores, ids = leaves[1].softmax(-1).topk(TINY.K)
    scores = scores / scores.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,enh->ten", leaves[0], weights[0]).chunk(2, dim=-1)
    every = torch.einsum("ten,ehn->teh", torch.nn.functional.silu(gate) * up, weights[1])
    output = (every.gather(1, ids[..., None].expand(-1, -1, TINY.H)) * scores[..., None]).sum(1)
    found = list(torch.autograd.grad(output, [*leaves, *weights], grad))
    if which is not None:
        found[which] = found[which] * 1.01
    assert error(case, inputs, grad, found) == pytest.approx(0.0 if which is None else 0.01, abs=1e-4)
