"""What the wheel holds, what it registers, and who may import whom."""

import ast
import importlib
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("meta", "moe_ops", "compile_passes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", source, source]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    (path,) = source.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_wheel_holds_every_module_and_only_the_packages(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for pattern in ("*.py", "*.cpp", "py.typed", "configs/*.json")
        for path in (ROOT / package).rglob(pattern)
    }
    assert expected <= names, sorted(expected - names)


@pytest.mark.slow
def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    def read(ending: str) -> str:
        (name,) = (name for name in wheel.namelist() if name.endswith(ending))
        return wheel.read(name).decode()

    entry_points = read("dist-info/entry_points.txt")
    assert "[torch_dynamo_backends]" in entry_points
    assert "moe_ops = compile_passes.backend:moe_ops\n" in entry_points
    assert "[console_scripts]\nmoe-ops = compile_passes.__main__:main\n" in entry_points
    assert "Apache License" in read("LICENSE")
    metadata = read("dist-info/METADATA")
    assert "Name: moe-compile" in metadata
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("name", ["moe_ops", "moe_ops_eager"])
def test_entry_point_is_a_backend(name: str) -> None:
    import torch

    assert callable(getattr(importlib.import_module("compile_passes.backend"), name))
    assert name in torch._dynamo.list_backends(exclude_tags=())


def test_the_command_line_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`moe-ops`, `python -m moe_ops` and `python -m compile_passes` are one function."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["moe-ops"]
    module, _, name = script.partition(":")
    main = getattr(importlib.import_module(module), name)
    assert importlib.import_module("moe_ops.__main__").main is main
    monkeypatch.setattr(sys, "argv", ["moe-ops", "--help"])
    monkeypatch.delitem(sys.modules, "moe_ops.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("moe_ops", run_name="__main__")  # as `python -m` does
    help_of = capsys.readouterr().out
    assert ended.value.code == 0
    assert help_of.startswith("usage: moe-ops") and "explain" in help_of and "tune" in help_of


def test_import_layers() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed")
    outcome = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_no_assert_outside_tests(package: str) -> None:
    """Validation raises ValueError: an assert is gone under `python -O`."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert not found
