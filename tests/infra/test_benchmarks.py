"""The benchmarks' command line on whatever machine runs the tests, and the report made of a sample result file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import e2e, host, layers, report, timing
from benchmarks.__main__ import main
from benchmarks.cases import layer_weights, make_case
from benchmarks.plots import draw_layers
from benchmarks.results import RESULTS, ResultFile, load_results
from benchmarks.shapes import SHAPES, TINY_SHAPES
from meta.arch import lookup

TINY = TINY_SHAPES["tiny-qwen3"]


def sample_document() -> dict[str, Any]:
    rows = []
    for T in (1, 16, 256):
        for peer, us in (("ours", 20.0 * T), ("hf_grouped", 50.0 * T)):
            row = {"shape": "qwen3-30b-a3b", "T": T, "peer": peer, "work": "moe", "us": us, "error": 1e-3}
            rows.append(row | {"roof_us": 10.0 * T, "roof_kind": "bf16"})
    rows.append({"shape": "qwen3-30b-a3b", "T": 1, "peer": "vllm", "work": "experts", "us": None, "reason": "missing"})
    header = {"scheme": "bf16", "format": "grouped", "method": "made up", "device": "Sample", "commit": "0" * 12}
    return {"kind": "layers", "date": "2000-01-01", "versions": {"torch": "2.11.0"}, **header, "rows": rows}


def test_list_names_shapes_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    for name in (*SHAPES, *TINY_SHAPES, "ours", "hf_grouped", "hf_batched", "grouped_mm", "sonicmoe"):
        assert name in printed


@pytest.mark.parametrize(
    "arguments",
    [["--shapes", "nonsense"], ["--peers", "nonsense"], ["--tokens", "1,x"], ["e2e", "--rows", "8"]],
    ids=lambda arguments: arguments[-2].strip("-"),
)
def test_bad_option_is_named_with_what_is_valid(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "peers", ["ours,ours_experts,hf_batched,grouped_mm", "ours_batched", "ours_fp8,ours_fp8_batched"], ids=str
)
def test_layers_run_and_are_accurate(peers: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    arguments = ["--shapes", TINY.name, "--tokens", "1,5", "--replays", "2", "--peers", peers, "--json", str(path)]
    assert main(arguments) == 0
    document = json.loads(path.read_text())
    assert {"date", "device", "commit", "versions", "method", "scheme"} <= set(document)
    assert len(document["rows"]) == 2 * len(peers.split(","))
    for row in document["rows"]:
        assert row["us"] is not None, row["reason"]
        limit = 0.1 if "fp8" in row["peer"] else 0.02
        assert row["error"] is None or row["error"] < limit, row


def test_missing_peer_is_a_row_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    arguments = ["--shapes", TINY.name, "--tokens", "1", "--peers", "sonicmoe", "--json", str(path)]
    assert main(arguments) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["us"] is None
    assert "CUDA" in row["reason"] or "not installed" in row["reason"]


@pytest.mark.slow
def test_e2e_runs_every_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = e2e.MODELS["tiny"]
    monkeypatch.setitem(e2e.MODELS, "tiny", replace(tiny, config={**tiny.config, "num_hidden_layers": 1}))
    path = tmp_path / "e2e.json"
    variants = "grouped_mm,grouped_mm compiled,moe_ops"
    arguments = ["e2e", "--model", "tiny", "--rows", "2x1", "--steps", "2", "--variants", variants, "--json", str(path)]
    assert main(arguments) == 0
    document = json.loads(path.read_text())
    assert document["cache_length"] == 64
    rows = {row["variant"]: row for row in document["rows"]}
    assert all(row["ms"] is not None for row in rows.values()), rows
    assert rows["moe_ops"]["graphs"] == 1
    assert (rows["moe_ops"]["fused"], rows["moe_ops"]["refused"]) == (1, 0)


def test_result_file_is_whole_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    results = ResultFile(path, "layers", "made up", commit="0")
    for number in range(3):
        results.add({"number": number})
        assert len(json.loads(path.read_text())["rows"]) == number + 1
    assert [entry.name for entry in path.parent.iterdir()] == ["rows.json"]


def test_json_that_is_there_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "older.json"
    path.write_text("older")
    for command in (["--shapes", TINY.name], ["e2e", "--model", "tiny"]):
        assert main([*command, "--json", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"benchmarks: --json must name a new file, got {path}, which holds an older result. Name"
        )
    with pytest.raises(ValueError, match="must name a new file"):
        ResultFile(path, "layers", "made up", commit="0")
    assert path.read_text() == "older"


def test_default_files_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.OUT", tmp_path)
    arguments = ["--shapes", TINY.name, "--tokens", "1", "--peers", "sonicmoe"]
    kept: dict[str, str] = {}
    for names in (["grouped"], ["grouped", "grouped-2"], ["grouped", "grouped-2", "grouped-3"]):
        assert main(arguments) == 0
        texts = {path.stem: path.read_text() for path in tmp_path.iterdir()}
        assert set(texts) == {f"layers-bf16-{name}" for name in names}
        assert kept.items() <= texts.items(), "an older file is what it was"
        kept = texts


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("command", ["layers", "e2e"])
def test_interrupt_is_one_line_and_keeps_the_rows(
    command: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = []

    def interrupted(*args: Any, **options: Any) -> dict[str, Any]:
        if len(done) == rows:
            raise KeyboardInterrupt
        done.append(1)
        times = {"us": None, "ms": None, "reason": "made up"}
        return {"shape": "tiny", "T": 1, "peer": "ours", **times} if command == "layers" else times

    monkeypatch.setattr(layers, "time_peer", interrupted)
    monkeypatch.setattr(e2e, "time_variant", interrupted)
    path = tmp_path / "rows.json"
    options = {"layers": ["--shapes", TINY.name, "--tokens", "1,2,3", "--peers", "ours"], "e2e": ["--model", "tiny"]}
    assert main([command, *options[command], "--json", str(path)]) == 130
    said = capfd.readouterr().err
    assert "Traceback" not in said
    kept = f"{rows} rows are kept in {path}" if rows else "no row was measured"
    assert said.splitlines()[-1] == f"benchmarks: interrupted, {kept}."
    assert path.exists() == bool(rows)
    if rows:
        assert len(json.loads(path.read_text())["rows"]) == rows


def test_time_is_that_of_one_input_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four thunks of 3 us each, by a clock that they move themselves."""
    now = [0.0]

    def thunk() -> None:
        now[0] += 3e-6

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timing.time_us([thunk] * 4, replays=5) == pytest.approx(3.0)
    assert "divided by the number of sets" in timing.method()


def test_time_on_a_gpu_is_that_of_one_input_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "_graph_rounds", lambda thunks, replays: [9.0, 12.0, 40.0][:replays])
    assert timing.time_us([lambda: None] * 4, replays=3) == 3.0, "the median, over four sets"


H200_TBPS, H200_TFLOPS = 4.3, {None: 790.0, "fp8_block128": 790.0 * 1979 / 989}


@pytest.mark.parametrize("scheme", [None, "fp8_block128"], ids=["bf16", "fp8"])
def test_roof_of_many_tokens_is_the_arithmetic_at_the_rate_of_the_scheme(scheme: str | None) -> None:
    case = make_case(layer_weights(TINY, torch.bfloat16, "cpu"), 4096)
    flops = 2 * 4096 * TINY.K * 3 * TINY.H * TINY.I
    assert case.roof_on(lookup("H200"), scheme) == pytest.approx(flops / (H200_TFLOPS[scheme] * 1e6), rel=1e-6)


@pytest.mark.parametrize("scheme", [None, "fp8_block128"], ids=["bf16", "fp8"])
def test_roof_of_one_token_is_the_memory_of_its_experts(scheme: str | None) -> None:
    case = make_case(layer_weights(TINY, torch.bfloat16, "cpu"), 1)
    assert len(case.sets) == 8 and case.distinct_experts == [TINY.K] * 8
    weights = TINY.K * 3 * TINY.H * TINY.I
    scales = TINY.K * 4 * (2 * TINY.I // 128 * (TINY.H // 128) + TINY.H // 128 * (TINY.I // 128))
    moved = 2 * weights if scheme is None else weights + scales
    moved += 2 * TINY.H * 2  # the token in, and out
    assert case.roof_on(lookup("H200"), scheme) == pytest.approx(moved / (H200_TBPS * 1e6), rel=1e-6)


def test_there_is_no_roof_without_a_gpu() -> None:
    assert make_case(layer_weights(TINY, torch.bfloat16, "cpu"), 1).roof_us(None) is None


def test_exact_answer_is_the_layer() -> None:
    weights = layer_weights(TINY, torch.float64, "cpu")
    case = make_case(weights, 5)
    inputs = case.sets[0]
    output = torch.zeros_like(inputs.hidden_states)
    for token in range(5):
        for slot in range(TINY.K):
            expert = int(inputs.topk_ids[token, slot])
            gate, up = (weights.gate_up_proj[expert] @ inputs.hidden_states[token]).chunk(2)
            result = weights.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            output[token] += inputs.topk_weights[token, slot] * result
    assert case.error(output) < 1e-12


def test_plots_from_a_sample_file(tmp_path: Path) -> None:
    paths = draw_layers(sample_document(), tmp_path, "sample")
    assert sorted(path.suffix for path in paths) == [".png", ".png", ".svg", ".svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in draw_layers(sample_document(), tmp_path, "sample")] == before


def test_report_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sample.json").write_text(json.dumps(sample_document()))
    readme = tmp_path / "README.md"
    readme.write_text("".join(f"<!-- generated:{name} -->\n<!-- /generated:{name} -->\n" for name in report.SECTIONS))
    options = ["report", "--results", str(tmp_path), "--readme", str(readme)]
    assert main([*options, "--check"]) == 1, "nothing is generated yet"
    assert main(options) == 0
    assert main([*options, "--check"]) == 0
    text = readme.read_text()
    assert "| qwen3-30b-a3b | 16 | 160 | 320 (50%) | 800 (20%) | - |" in text
    assert report.NO_RESULTS in text, "there is no file of whole models"


def test_host_times_and_their_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to call is a row; the reference is its own share, and a warm call passes few files."""
    for name, few in (("LAYERS", 2), ("ROUNDS", 2), ("CALLS", 4)):
        monkeypatch.setattr(host, name, few)
    path = tmp_path / "host.json"
    assert main(["host", "--shape", "tiny-mixtral", "--tokens", "1", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    rows = {row["peer"]: row for row in document["rows"]}
    reference = rows[f"{host.REFERENCE} compiled"]
    assert len(rows) == 8 and reference["share"] == 1.0
    assert all(row["host_us"] > 0 and row["files"] > 0 and row["calls"] > 0 for row in rows.values())
    assert rows["ours"]["share"] == pytest.approx(rows["ours"]["host_us"] / reference["host_us"], rel=1.0)
    cells = [f"{rows['ours']['host_us']:.1f}", f"{rows['ours']['host_us']:.0f}"]
    assert any(f"| tiny-mixtral | 1 | ours | {cell} |" in report.host_table(document) for cell in cells)


def test_path_of_a_call_counts_functions_and_files() -> None:
    def called() -> int:
        return len(json.dumps([1]))

    files, calls = host.path_of(called)
    assert files == 3 and calls >= 5  # this one, json's two; each Python and C function that is entered


def test_report_needs_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# nothing\n")
    assert main(["report", "--results", str(tmp_path), "--readme", str(readme)]) == 2
    assert "generated:schemes" in capsys.readouterr().err


@pytest.mark.parametrize("stem", sorted(load_results(RESULTS)), ids=str)
def test_committed_results_say_how_they_were_made(stem: str) -> None:
    document = load_results(RESULTS)[stem]
    assert {"kind", "date", "device", "commit", "versions", "method", "rows"} <= set(document)
    assert document["rows"]
