"""A file of the user's that has the name of one of the packages is named, with the cure, in place of a puzzle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_script(folder: Path, program: str, name: str = "script.py") -> str:
    """Last line of what a script in ``folder`` says on stderr; Python puts the script's folder first on the path."""
    script = folder / name
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout
    return result.stderr.strip().splitlines()[-1]


def message(by: str, name: str, found: Path) -> str:
    return (
        f"ImportError: {by}: the package {name!r} must be {ROOT / name / '__init__.py'}, got {found}, which Python "
        "finds first. Rename that file or folder, or take its folder off sys.path."
    )


@pytest.mark.parametrize("imported", [False, True], ids=["not_imported", "imported_before"])
def test_a_users_meta_beside_the_script(imported: bool, tmp_path: Path) -> None:
    own = tmp_path / "meta.py"
    own.write_text("NUMBER = 1\n")
    said = run_script(tmp_path, ("import meta\n" if imported else "") + "import moe_ops\n")
    assert said == message("moe_ops", "meta", own)


def test_a_users_package_of_that_name(tmp_path: Path) -> None:
    own = tmp_path / "meta" / "__init__.py"
    own.parent.mkdir()
    own.write_text("")
    assert run_script(tmp_path, "import moe_ops\n") == message("moe_ops", "meta", own)


def test_a_users_compile_passes(tmp_path: Path) -> None:
    own = tmp_path / "compile_passes.py"
    own.write_text("")
    said = run_script(tmp_path, "import moe_ops\nmoe_ops.compile(print)\n")
    assert said == message("moe_ops", "compile_passes", own)


@pytest.mark.parametrize("program", ["import compile_passes", "import compile_passes.backend"], ids=str)
def test_a_script_called_moe_ops(program: str, tmp_path: Path) -> None:
    said = run_script(tmp_path, f"if __name__ == '__main__':\n    {program}\n", name="moe_ops.py")
    assert said == message("compile_passes", "moe_ops", tmp_path / "moe_ops.py")


def test_a_folder_without_init_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    assert run_script(tmp_path, "import moe_ops\nraise SystemExit('imported')\n") == "imported"
