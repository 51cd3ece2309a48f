"""What the report makes of result files of training: tables, floors, plots, and what was before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_report as report
from benchmarks.floors import shares
from benchmarks.models import MODELS
from benchmarks.report import summary_section
from benchmarks.shapes import Shape

CEILINGS = {"bf16_tflops": 500.0, "read_gbps": 4000.0}
SHAPE = Shape("small", E=4, K=2, H=1000, I=500)


def row(peer: str, us: float | None, **more: Any) -> dict[str, Any]:
    ratio = None if us is None else 100.0 / us
    interval = {"ratio": ratio, "ratio_low": ratio, "ratio_high": ratio} if ratio else {"reason": "out of memory"}
    sizes = {"peak_bytes": 2**20 * 50, "saved_bytes": 2**20 * 20, "forward_us": 30.0, "error": 0.00321}
    return {"shape": "qwen3-30b-a3b", "T": 1024, "mode": "trained", "peer": peer, "us": us} | interval | sizes | more


def document(*rows: dict[str, Any], **header: Any) -> dict[str, Any]:
    head = {"device": "A GPU", "date": "today", "commit": "c", "versions": {"torch": "2"}, "method": "made up"}
    return {"kind": "train", "reference": "ours_compiled", "rows": list(rows)} | head | header


def sample() -> dict[str, dict[str, Any]]:
    """Today's file with all there is, and an older one that knows less."""
    counts = {"_expert_mm_kernel": 2, "_combine_kernel": 1}
    kernels = {"_expert_mm_kernel": 60.0, "_combine_kernel": 20.0, "other": 5.0}
    ours = row("ours_compiled", 100.0, kernels=kernels, kernels_forward=counts, kernels_backward=counts)
    ours |= {"launches_forward": 14, "launches_backward": 7}
    rows = [ours, row("ours_all", 125.0, peak_bytes=2**20 * 25), row("hf_moe", 200.0, peak_bytes=2**20 * 100)]
    rows += [row("liger", 400.0)]
    rows += [row("ours_compiled", 100.0, T=4096), row("hf_moe", None, T=4096)]
    before = document(row("ours_compiled", 100.0), row("hf_moe", 80.0))
    for old in before["rows"]:
        del old["saved_bytes"]
    return {"gpu": document(*rows, ceilings=CEILINGS), "gpu-baseline": before}


def test_tables_of_training() -> None:
    text = report.train_section(sample())
    now, before = text.split("### Before: ")
    assert "| 1024 | trained | 100 | 200 | 0.50 (0.50 to 0.50) | 1.25 | 30.0 / 30.0 | 50 / 100 | " in now
    assert " | 20 / 20 | 14 + 7 / - | 3.2e-03 / 3.2e-03 |" in now
    assert "| qwen3-30b-a3b | 4096 | trained | 100 | - | - | - |" in now and "(`-`): hf_moe: out of memory." in now
    assert "| ours_all | 125 | 0.80 (0.80 to 0.80) | 25 | 20 | 0.50x | 0.25x | - | 3.2e-03 |" in now
    assert "| liger | 400 | 0.25 (0.25 to 0.25) | 50 | 20 | 1.00x | 0.50x | - | 3.2e-03 |" in now
    assert "Backward of qwen3-30b-a3b, T=1024, trained: 2 x `_expert_mm_kernel`, 1 x `_combine_kernel`." in now
    assert "](results/gpu-ratio.png)" in now and "Ceilings in the same run: bf16 500 TFLOP/s" in now
    assert "| 80.0 | 1.25 (1.25 to 1.25) | 30.0 / 30.0 | 50 / 50 | - / - | - / - |" in before
    assert "gpu-baseline.json" in before and "results/" not in before.replace("benchmarks/results/", "")
    assert report.train_section({}) == report.NO_RESULTS


def test_shares_of_floors_are_in_the_table() -> None:
    text = report.floors_table(sample()["gpu"])
    # R H = 8192 x 2048, twice, and T H = 1024 x 2048: 37.7 MB at 4 TB/s, launched twice.
    assert "| 20.0 (94%) | 5.0 | 85.0 (" in text
    assert "Products: `_expert_mm_kernel`; rows summed: `_combine_kernel`." in text
    assert report.floors_table(document(row("ours_compiled", 1.0))) == ""
    assert report.floors_table(document(*sample()["gpu"]["rows"])) == "", "a file without ceilings has no floors"


@pytest.mark.parametrize("mode", ["trained", "frozen"])
def test_floors_by_hand(mode: str) -> None:
    """T = 100000 tokens: every expert has rows, and R = 200000 of them make arithmetic the floor of products."""
    trained = mode == "trained"
    names = ["_expert_mm_kernel", "cutlass grouped gemm 64x128x128 tt", "cutlass grouped gemm 128x256x64 nt"]
    names += ["_glu_rows_backward_kernel", "_scatter_rows_kernel", "sort"]
    kernels = dict.fromkeys(names if trained else [name for name in names if not name.endswith("nt")], 10.0)
    counts = {"kernels_forward": {"_scatter_rows_kernel": 1}, "kernels_backward": {"_scatter_rows_kernel": 1 + trained}}
    found, rest = shares({"T": 100000, "mode": mode, "kernels": kernels} | counts, SHAPE, CEILINGS)
    by_title = {share.title: share for share in found}
    assert rest == 10.0 and by_title["products"].names == tuple(names[:2]) and by_title["products"].us == 20.0
    R, H, I = 200000, 1000, 500
    product = 2 * R * I * H / 500e6  # us; gate and up are two of them
    floors = {"products": 6 * product, "activation's gradient": 5 * R * I * 2 / 4e6}
    floors["rows gathered"] = 2 * (R + 100000) * H * 2 / 4e6
    if trained:
        floors["weight gradients"] = 3 * product
        floors["activation's gradient"] *= 6 / 5
        floors["rows gathered"] *= 3 / 2
    assert {title: share.floor_us for title, share in by_title.items()} == pytest.approx(floors)


def test_floor_of_few_rows_is_the_weights_that_are_read() -> None:
    """One token of two experts: their weights once each way, and rows that are nothing beside them."""
    (share,), _ = shares({"T": 1, "mode": "frozen", "kernels": {"_expert_mm_kernel": 9.0}}, SHAPE, CEILINGS)
    assert share.floor_us == pytest.approx(2 * 2 * 3 * 500 * 1000 * 2 / 4e6, rel=0.01)


def test_plot_of_training(tmp_path: Path) -> None:
    documents = sample()
    paths = report.draw_train(documents, tmp_path)
    assert [path.name for path in paths] == ["gpu-ratio.png", "gpu-ratio.svg"] and set(paths) == set(tmp_path.iterdir())
    assert paths == report.train_plot_paths(documents, tmp_path)
    drawn = paths[1].read_text()
    assert "trained, before" in drawn and "ours_compiled / hf_moe" in drawn and "qwen3-30b-a3b" in drawn
    assert paths[1].read_bytes() == report.draw_train(documents, tmp_path)[1].read_bytes()
    del documents["gpu-baseline"]
    assert "before" not in report.draw_train(documents, tmp_path)[1].read_text()


def test_table_of_training_steps() -> None:
    head = {"batch": 4, "tokens": 4096, "checkpointing": False, "tokens_per_s": 1000.0, "peak_bytes": 3 * 2**30}
    ratio = {"ratio": 0.8, "ratio_low": 0.79, "ratio_high": 0.81}
    rows = [
        head | {"variant": "grouped_mm", "ms": None, "reason": "out of memory"},
        head | {"variant": "grouped_mm compiled", "ms": 100.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0},
        head | {"variant": "moe_ops", "ms": 80.0, "tokens_per_s": 1250.0} | ratio,
        head | {"variant": "moe_ops reduce-overhead", "ms": 82.0, "peak_bytes": None} | ratio,
    ]
    text = report.train_step_section({"gpu": document(*rows, kind="train-step")})
    assert "| 4 x 4096 | off | - | 100 (3.0) | 80 (3.0) | 82 | 0.80 (0.79 to 0.81) | 1250 / 1000 |" in text
    assert "Left out (`-`): grouped_mm: out of memory." in text and "Method: made up." in text
    assert report.train_step_section({}) == report.NO_RESULTS


def test_training_on_the_first_page() -> None:
    """What was before is no gain of today."""
    rows = [row("ours_compiled", 100.0), row("hf_moe", 200.0), row("hf_moe", 125.0, shape="olmoe-1b-7b")]
    step = {"batch": 1, "tokens": 4096, "checkpointing": False, "variant": "moe_ops", "ratio": 0.8}
    steps = [step, step | {"batch": 4, "ratio": 0.5}, step | {"variant": "grouped_mm", "ratio": 1.0}]
    documents = {"gpu": document(*rows), "gpu-baseline": document(row("hf_moe", 10.0))}
    documents["gpu-step"] = document(*steps, kind="train-step", config=MODELS["qwen3-4l"].config)
    text = summary_section(documents)
    assert "| forward and backward of a layer of 2 models | 1.2x to 2.0x | A GPU | `gpu.json` |" in text
    assert "| training steps of 4 layers of Qwen3-30B-A3B | 1.2x to 2.0x | A GPU | `gpu-step.json` |" in text
    assert text.count("A GPU") == 2
