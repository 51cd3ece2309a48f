"""The benchmarks' command line on whatever machine runs the tests, and the report made of a sample result file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters as compilations

from benchmarks import e2e, forms, host, layers, load, models, peers, pictures, report, timing
from benchmarks.__main__ import main
from benchmarks.cases import layer_weights, make_case
from benchmarks.models import MODELS
from benchmarks.plots import draw_layers, plots_of
from benchmarks.results import RESULTS, ResultFile, load_results
from benchmarks.shapes import SHAPES, TINY_SHAPES, parse_shapes
from compile_passes.diagram import Diagram, Line, Operator, Stage
from moe_ops import counters

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


def in_turn_document() -> dict[str, Any]:
    """As a GPU makes them now: ceilings, ratios, a second routing, and a whole that beats its part."""
    document = sample_document()
    for row in document["rows"]:
        if row["us"] is not None:
            ratio = 20.0 / 50.0 if row["peer"] == "hf_grouped" else 1.0
            row |= {
                "ratio": ratio,
                "ratio_low": ratio - 0.01,
                "ratio_high": ratio + 0.01,
                "sm_mhz": 1500,
                "watts": 690.0,
            }
    document["rows"][0]["flag"] = "ours is faster than its part ours_experts: 20.0 against 30.0 us"
    document["rows"] += [row | {"routing": "zipf"} for row in document["rows"][1:]]
    rates = {"bf16_tflops": 680.0, "fp8_tflops": 1340.0, "read_gbps": 4400.0}
    return document | {"reference": "ours", "ceilings": rates}


def test_list_names_shapes_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    for name in (*SHAPES, *TINY_SHAPES, "ours", "hf_grouped", "hf_batched", "grouped_mm", "sonicmoe"):
        assert name in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shapes", "nonsense"],
        ["--shapes", "2x3x8x8"],
        ["--peers", "nonsense"],
        ["--routing", "nonsense"],
        ["--tokens", "1,x"],
        ["--rounds", "14"],
        ["e2e", "--rounds", "14"],
        ["e2e", "--rows", "8"],
        ["compare", "--new", ".", "--old", "nowhere"],
        ["compare", "--old", ".", "--new", ".", "--peers", "hf_moe"],
    ],
    ids=" ".join,
)
def test_bad_option_is_named_with_what_is_valid(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"benchmarks: {arguments[-2]} must ") and ", got " in said


def test_a_shape_can_be_spelled() -> None:
    (shape,) = parse_shapes("16x1x5120x8192")
    assert (shape.name, shape.E, shape.K, shape.H, shape.I) == ("16x1x5120x8192", 16, 1, 5120, 8192)


@pytest.mark.parametrize(
    "names",
    ["ours,ours_experts,hf_batched,grouped_mm", "ours_compiled,hf_moe", "ours_batched", "ours_fp8,ours_fp8_batched"],
    ids=str,
)
def test_layers_run_and_are_accurate(names: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    arguments = ["--shapes", TINY.name, "--tokens", "1,5", "--peers", names, "--json", str(path)]
    assert main([*arguments, "--routing", "zipf", "--rounds", "15"]) == 0
    document = json.loads(path.read_text())
    assert {"date", "device", "commit", "versions", "method", "scheme"} <= set(document)
    assert len(document["rows"]) == 2 * len(names.split(","))
    assert document["reference"] == names.split(",")[0]
    for row in document["rows"]:
        assert row["us"] is not None, row["reason"]
        assert row["routing"] == "zipf" and row["us_low"] <= row["us"] <= row["us_high"]
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"] and 3 <= row["rounds"] <= 15
        assert row["ratio"] == 1.0 or row["peer"] != document["reference"]
        limit = 0.1 if "fp8" in row["peer"] else 0.02
        assert row["error"] is None or row["error"] < limit, row


def test_a_compiled_layer_of_ours_that_was_not_fused_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(layer_weights(TINY, torch.float32, "cpu"), 1)
    monkeypatch.setattr(peers, "transformers_moe", lambda case, backend: [lambda: None])
    with pytest.raises(RuntimeError, match="nothing was fused in the layer of"):
        peers.transformers_fused(case)


def test_missing_peer_is_a_row_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    arguments = ["--shapes", TINY.name, "--tokens", "1", "--peers", "sonicmoe", "--json", str(path)]
    assert main(arguments) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["us"] is None
    assert "CUDA" in row["reason"] or "not installed" in row["reason"]


@pytest.mark.slow
def test_e2e_runs_every_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = models.MODELS["tiny"]
    monkeypatch.setitem(models.MODELS, "tiny", replace(tiny, config={**tiny.config, "num_hidden_layers": 1}))
    path = tmp_path / "e2e.json"
    variants = "grouped_mm,grouped_mm compiled,moe_ops"
    arguments = ["e2e", "--model", "tiny", "--rows", "2x1", "--variants", variants, "--json", str(path)]
    assert main([*arguments, "--rounds", "15", "--steps", "2"]) == 0
    document = json.loads(path.read_text())
    assert document["cache_length"] == 64
    assert "2 steps, whose next is issued behind the last, each" in document["method"]
    rows = {row["variant"]: row for row in document["rows"]}
    assert all(row["ms"] is not None for row in rows.values()), rows
    assert {row["rounds"] for row in rows.values()} == {15}
    assert {row["recompiles"] for row in rows.values()} == {0}, "variants live side by side"
    assert [rows[name]["graphs"] for name in variants.split(",")] == [0, 1, 1]
    best = rows[rows["moe_ops"]["reference"]]
    assert best["variant"] != "moe_ops" and best["ratio"] == 1.0 and rows["moe_ops"]["ratio_low"] > 0
    found = {name: rows["moe_ops"][name] for name in ("fused", "refused", "causal_masks", "shared_heads")}
    assert found == {"fused": 1, "refused": 0, "causal_masks": 0, "shared_heads": 1}


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

    def interrupted(*args: Any, **options: Any) -> list[dict[str, Any]]:
        if len(done) == rows:
            raise KeyboardInterrupt
        done.append(1)
        case = {"shape": "tiny", "T": 1, "routing": "uniform", "peer": "ours"}
        case |= {"batch": 1, "new_tokens": 1, "variant": "moe_ops"}
        return [case | {"us": None, "ms": None, "reason": "made up"}]

    monkeypatch.setattr(layers, "time_case", interrupted)
    monkeypatch.setattr(e2e, "time_case", interrupted)
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


@pytest.mark.parametrize("make", [sample_document, in_turn_document], ids=["older", "in_turn"])
def test_plots_from_a_sample_file(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    document = make()
    plots = ["time", "share"] + (["ratio"] if "reference" in document else [])
    paths = draw_layers(document, tmp_path, "sample")
    assert [path.name for path in paths] == [f"sample-{plot}.{kind}" for plot in plots for kind in ("png", "svg")]
    assert all(path.stat().st_size > 1000 for path in paths)
    before = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in draw_layers(document, tmp_path, "sample")] == before


def test_a_file_of_ours_alone_is_compared_to_nobody() -> None:
    document = in_turn_document()
    document["rows"] = [row for row in document["rows"] if row["peer"].startswith("ours")]
    assert document["rows"] and plots_of(document) == ["time", "share"]
    assert "best of others" not in report.layers_table(document, "uniform")
    assert "best of others" in report.layers_table(in_turn_document(), "uniform")


def test_report_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "draw_block", drawn_block)
    (tmp_path / "sample.json").write_text(json.dumps(sample_document()))
    readme = tmp_path / "README.md"
    readme.write_text("".join(f"<!-- generated:{name} -->\n<!-- /generated:{name} -->\n" for name in report.SECTIONS))
    options = ["report", "--results", str(tmp_path), "--pages", str(readme)]
    assert main([*options, "--check"]) == 1, "nothing is generated yet"
    assert main(options) == 0
    assert main([*options, "--check"]) == 0
    text = readme.read_text()
    assert "| qwen3-30b-a3b | 16 | 160 | 320 (50%) | 800 (20%) | - |" in text
    assert report.NO_RESULTS in text, "there is no file of whole models"


def test_report_of_peers_timed_in_turn() -> None:
    text = report.layers_section({"sample": in_turn_document()})
    assert "bf16 680 TFLOP/s, fp8 1340 TFLOP/s, read 4400 GB/s; SM clock 1500 to 1500 MHz; 690 to 690 W." in text
    assert "| 1 | 10.0 | 20.0 (50%)† | 50.0 (20%) 0.40x | - | 0.40 (0.39 to 0.41) hf_grouped |" in text
    assert "† qwen3-30b-a3b, 1: ours is faster than its part ours_experts: 20.0 against 30.0 us." in text
    assert text.count("ours / best of others") == 2 and text.count("Routing `zipf`:") == 1
    assert "](results/sample-ratio.png" in text


def drawn_block(folder: Path) -> list[Path]:
    """The picture of a block, without looking for one in a model."""
    lines = (Line("ids = topk(scores)", "model.py:3", ("topk", "getitem"), "[16, 2] int64"),)
    after = Operator("fused_moe", (("hidden_states", "[16, 64] float32"),), (("top_k", "2"),), "[16, 64] float32")
    stages = (Stage("top-k", lines), Stage("outside", lines))
    return pictures.draw_diagram(Diagram(stages, ("a", "b"), (after,)), folder)


def test_picture_of_a_block(tmp_path: Path) -> None:
    (png, svg) = drawn_block(tmp_path)
    text = svg.read_text()
    assert png.stat().st_size > 1000
    words = ("topk, index", "moe_ops.fused_moe", "top_k=2", "2 operations")
    assert [word for word in words if word not in text] == [] and "outside" not in text


def test_bars_of_the_first_page_are_the_fastest_of_their_kind(tmp_path: Path) -> None:
    times = {"grouped_mm": 8.0, "grouped_mm compiled": 4.0, "batched_mm reduce-overhead": 2.0, "moe_ops": 1.6,
             "moe_ops reduce-overhead": 1.0, "shared heads alone reduce-overhead": 0.5}  # fmt: skip
    rows = [{"batch": 4, "new_tokens": 1, "variant": name, "ms": ms} for name, ms in times.items()]
    rows += [row | {"batch": 8, "ms": None} for row in rows] + [row | {"new_tokens": 2048} for row in rows]
    document = {"kind": "e2e", "device": "a GPU", "cache_length": 64, "config": MODELS["tiny"].config, "rows": rows}
    assert pictures.steps_of(document) == [
        pictures.Steps(4, {"eager": 500.0, "torch.compile": 2000.0, "moe_ops": 4000.0})
    ]
    assert pictures.title_of(document) == "tiny, cache of 64"
    (png, svg) = pictures.draw_tokens({"sample": document}, tmp_path)
    assert png.stat().st_size > 1000 and "4,000" in svg.read_text()
    assert pictures.draw_tokens({"sample": document | {"rows": rows[:1]}}, tmp_path) == [], "nothing to compare with"


def test_first_page_shows_published_models_before_parts_of_them() -> None:
    rows = [{"batch": 8, "new_tokens": 1, "variant": "grouped_mm", "ms": 8.0},
            {"batch": 8, "new_tokens": 1, "variant": "grouped_mm compiled", "ms": 4.0},
            {"batch": 8, "new_tokens": 1, "variant": "moe_ops", "ms": 2.0, "ratio": 0.5}]  # fmt: skip
    head = {"kind": "e2e", "device": "a GPU", "cache_length": 64, "rows": rows, "date": "today", "commit": "c"}
    head |= {"versions": {"torch": "2", "triton": "3"}}
    documents = {name: head | {"config": MODELS[name].config} for name in ("qwen3-4l", "OLMoE-1B-7B", "Mixtral-8x7B")}
    assert list(pictures.of_the_first_page(documents)) == ["OLMoE-1B-7B", "Mixtral-8x7B"]
    assert list(pictures.of_the_first_page({"qwen3-4l": documents["qwen3-4l"]})) == ["qwen3-4l"]
    text = report.tokens_section(documents)
    assert "OLMoE-1B-7B, cache of 64" in text and "4 layers" not in text
    text = report.summary_section(documents)
    assert "| steps of 4 layers of Qwen3-30B-A3B | 2.0x | a GPU | `qwen3-4l.json` |" in text
    assert "| steps of OLMoE-1B-7B, Mixtral-8x7B | 2.0x | a GPU | `OLMoE-1B-7B.json`, `Mixtral-8x7B.json` |" in text


def test_summary_of_layers_of_several_files() -> None:
    """Two files of one GPU are one line, and a loss shows."""

    def document(**gains: float) -> dict[str, Any]:
        rows = [{"form": form, "plain_call_us": gain, "ours_call_us": 1.0} for form, gain in gains.items()]
        return {"kind": "forms", "device": "a GPU", "rows": rows}

    text = report.summary_section({"one": document(llama4=4.0, switch=0.957), "two": document(dbrx=2.0)})
    line = "| 3 layers of other people's code | 0.96x to 4.0x | a GPU | `one.json`, `two.json` |"
    assert line in text


def test_report_of_counting() -> None:
    row = {"shape": "mixtral", "T": 8, "peer": "ours", "off_us": 10.0, "on_us": 10.1}
    row |= {"ratio": 1.01, "ratio_low": 1.0, "ratio_high": 1.02}
    assert "| mixtral | 8 | ours | 10.0 | 10.1 | 1.01 (1.00 to 1.02) |" in report.load_table({"rows": [row]})


def test_report_of_variants_timed_in_turn() -> None:
    row = {"batch": 8, "new_tokens": 1}
    ours = row | {"variant": "moe_ops", "ms": 0.9, "ratio": 0.6, "ratio_low": 0.55, "ratio_high": 0.65}
    theirs = row | {"variant": "grouped_mm", "ms": 1.5, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    text = report.e2e_table({"rows": [theirs, ours]})
    assert "best of moe_ops / best of transformers" in text and "| 8 x 1 | 1.5 | 0.9 | 0.60 (0.55 to 0.65) |" in text


def test_report_of_quantised_variants_alone() -> None:
    """They are compared with our unquantised one, which is no gain over transformers'."""
    row = {"batch": 8, "new_tokens": 1, "reference": "moe_ops"}
    plain = row | {"variant": "moe_ops", "ms": 1.5, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    codes = row | {"variant": "moe_ops mxfp4", "ms": 0.9, "ratio": 0.6, "ratio_low": 0.55, "ratio_high": 0.65}
    document = {"kind": "e2e", "device": "a GPU", "config": MODELS["tiny"].config, "rows": [plain, codes]}
    text = report.e2e_table(document)
    assert "| best / moe_ops |" in text and "| 8 x 1 | 1.5 | 0.9 | 0.60 (0.55 to 0.65) |" in text
    assert "| steps of" not in report.summary_section({"one": document})


def test_quantised_variants_are_compared_with_the_plain_one() -> None:
    names = ("moe_ops mxfp4 reduce-overhead", "moe_ops reduce-overhead")
    rows: dict[str, dict[str, Any]] = {name: {"recompiles": 0} for name in names}
    e2e.add_times(rows, {name: [us] * 15 for name, us in zip(names, (500.0, 1000.0), strict=True)})
    assert {(row["ratio"], row["reference"]) for row in rows.values()} == {(0.5, names[1]), (1.0, names[1])}


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


def test_times_while_the_load_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_BUDGET_S", 0.0)
    path = tmp_path / "load.json"
    command = ["load", "--shapes", "tiny-mixtral", "--tokens", "2", "--json", str(path)]
    assert main(command) == 0 and counters.active == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["peer"] for row in rows] == list(load.TIMED)
    assert all(row["on_us"] > 0 and row["off_us"] > 0 and row["ratio_low"] <= row["ratio"] for row in rows)


def test_path_of_a_call_counts_functions_and_files() -> None:
    def called() -> int:
        return len(json.dumps([1]))

    files, calls = host.path_of(called)
    assert files == 3 and calls >= 5  # this one, json's two; each Python and C function that is entered


def test_layers_of_others_and_their_table(tmp_path: Path) -> None:
    """The whole run, small: the layer fused, timed in both ways, as accurate as bf16 is."""
    out = tmp_path / "forms.json"
    assert main(["forms", "--forms", "mistral-loop", "--rounds", "15", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [row["form"] for row in document["rows"]] == ["mistral-loop"]
    assert all(row["ours_call_us"] > 0 and row["plain_call_us"] > 0 and row["error"] < 0.02 for row in document["rows"])
    assert "| mistral-loop | 8 | 2 | 256 | 896 | 1 |" in report.forms_table(document)
    assert main(["forms", "--forms", "nothing", "--json", str(tmp_path / "other.json")]) == 2


def test_layers_of_transformers_are_fused_beside_the_plain_one() -> None:
    """Ours has parameters of its own: a list whose weights somebody else holds, too, stays a list."""
    layer = forms.FORMS["switch-transformers"].make(dim=16, hidden=16, num_experts=4, top_k=1).eval()
    x = torch.randn(1, 8, 16)
    with torch.no_grad():
        ours = forms._ours(layer)
        compilations.clear()
        torch.testing.assert_close(forms._first(ours(x)), forms._first(layer(x)))
    assert compilations["moe_ops"]["fused"] == 1


def test_passes_in_a_first_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layer fused; the passes are a part of the call. Their share of a deep model is in a committed file."""
    out = tmp_path / "first.json"
    assert main(["first-call", "--models", "torchtitan", "--layers", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["layers"]) for row in rows] == [("torchtitan", 2)]
    assert all(0 < row["share"] == row["passes"] / row["seconds"] < 0.5 for row in rows)
    assert main(["first-call", "--layers", "0"]) == 2
    assert "--layers" in capsys.readouterr().err


def test_report_needs_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# nothing\n")
    assert main(["report", "--results", str(tmp_path), "--pages", str(readme)]) == 2
    assert f"generated:{next(iter(report.SECTIONS))}" in capsys.readouterr().err


@pytest.mark.parametrize("stem", sorted(load_results(RESULTS)), ids=str)
def test_committed_results_say_how_they_were_made(stem: str) -> None:
    document = load_results(RESULTS)[stem]
    assert {"kind", "date", "device", "commit", "versions", "method", "rows"} <= set(document)
    assert document["rows"]
