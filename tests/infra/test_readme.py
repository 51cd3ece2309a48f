"""The README's samples run, in order, in one namespace; its generated sections are what the result files give."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main

README = Path(__file__).parents[2] / "README.md"
MAKEFILE = README.with_name("Makefile")
TEXT = README.read_text()
SAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.mark.slow
def test_samples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SAMPLES) >= 6
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, sample in enumerate(SAMPLES):
        line = TEXT[: TEXT.index(sample)].count("\n")
        # Leading newlines make a traceback's line numbers those of the README.
        exec(compile("\n" * line + sample, f"README.md (sample {number})", "exec"), namespace)
    assert "fused_experts: down_proj must be" in capsys.readouterr().out


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")], ids=str)
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^([a-z -]+ )?{target}( [a-z -]+)?:.*##", MAKEFILE.read_text(), re.MULTILINE)


def test_generated_sections_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--check"]) == 0, capsys.readouterr().out


def test_benchmark_commands_parse(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [command.split("#")[0].split()[3:] for command in COMMANDS if command.startswith("python -m benchmarks")]
    assert commands
    for command in commands:
        subcommand = [command.pop(0)] if command and command[0] in ("e2e", "host", "compare", "carry", "report") else []
        with pytest.raises(SystemExit) as caught:
            main([*subcommand, *command, "--help"])
        assert caught.value.code == 0


def test_links_to_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (README.parent / target).exists(), target
