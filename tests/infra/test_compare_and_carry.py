"""Two checkouts in processes of their own, and other projects' code taken from a wheel."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.__main__ import main
from benchmarks.carry import kernel_module


def test_comparison_is_of_neighbouring_processes() -> None:
    row = compare.compared([10.0, 20.0], [11.0, 18.0])
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == pytest.approx((1.0, 0.9, 1.1))
    assert compare.compared([10.0, None], [11.0, 18.0])["ratio"] is None


@pytest.mark.slow
def test_compare_runs_both_checkouts(tmp_path: Path) -> None:
    """The packages of a copy, in which there is another `benchmarks`, under the benchmarks of this checkout."""
    old, here = tmp_path / "old", Path(__file__).parents[2]
    for name in compare.PACKAGES:
        shutil.copytree(here / name, old / name, ignore=shutil.ignore_patterns("__pycache__"))
    (old / "benchmarks").mkdir()
    (old / "benchmarks" / "__init__.py").write_text("raise ImportError('the wrong one')")
    path = tmp_path / "comparison.json"
    arguments = ["--old", str(old), "--new", str(here), "--pairs", "1", "--shapes", "4x2x16x16", "--tokens", "1"]
    assert main(["compare", *arguments, "--peers", "ours,hf_grouped", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert document["kind"] == "comparison" and row["peer"] == "ours" and row["ratio"] > 0


def test_worker_of_the_wrong_checkout_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compare must import meta from"):
        compare.worker(str(tmp_path), [])


def test_kernels_are_carried_without_what_surrounds_them(tmp_path: Path) -> None:
    source = "import vllm\n\n\n@triton.jit\ndef write_zeros_to_output(a):\n    pass\n\n\ndef other():\n    pass\n\n\n"
    source += "@triton.jit\ndef fused_moe_kernel(\n    a,  # kept\n):\n    pass\n"
    module = kernel_module(source)
    assert "vllm" not in module and "other" not in module and module.count("@triton.jit") == 2 and "# kept" in module
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/model_executor/layers/fused_moe/fused_moe.py", source)
    assert main(["carry", str(wheel), "--to", str(tmp_path / "peers")]) == 2, "no triton_kernels"
    folder = "vllm/model_executor/layers/fused_moe/configs/E=8,N=16,device_name=NVIDIA_"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("vllm/third_party/triton_kernels/topk.py", "pass")
        for device in ("H200", "H100_80GB_HBM3", "H200,dtype=fp8_w8a8", "A100"):
            archive.writestr(f"{folder}{device}.json", "{}")
    assert main(["carry", str(wheel), "--to", str(tmp_path / "peers")]) == 0
    files = {str(path.relative_to(tmp_path / "peers")) for path in (tmp_path / "peers").rglob("*.*") if path.is_file()}
    tuned = {f"cfg/E=8,N=16,device_name=NVIDIA_{device}.json" for device in ("H200", "H100_80GB_HBM3")}
    assert files == {"lib/triton_kernels/topk.py", "lib/vllm_kernel.py", *tuned}
