"""The samples of the README and of the other pages run, in order; generated sections are what the result files give."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main

ROOT = Path(__file__).parents[2]
MAKEFILE = ROOT / "Makefile"
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "moe_ops/README.md", "benchmarks/README.md")}
SHELL = [block for text in PAGES.values() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
COMMANDS = [line for block in SHELL for line in block.splitlines()]


def samples(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL)


def run_samples(name: str) -> None:
    """In one namespace; leading newlines make a traceback's line numbers those of the page."""
    namespace: dict[str, object] = {"__name__": "readme"}
    try:
        for number, sample in enumerate(samples(name)):
            line = PAGES[name][: PAGES[name].index(sample)].count("\n")
            exec(compile("\n" * line + sample, f"{name} (sample {number})", "exec"), namespace)
    finally:
        if torch.distributed.is_initialized():  # a sample's group of one rank
            torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_samples_of_the_readme_run() -> None:
    assert len(samples("README.md")) >= 6
    run_samples("README.md")


@pytest.mark.slow
def test_samples_of_the_operators_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_samples("moe_ops/README.md")
    assert "fused_experts: down_proj must be" in capsys.readouterr().out


def test_the_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= 200


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")], ids=str)
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^([a-z -]+ )?{target}( [a-z -]+)?:.*##", MAKEFILE.read_text(), re.MULTILINE)


def test_generated_sections_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--check"]) == 0, capsys.readouterr().out


def test_benchmark_commands_parse(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [command.split("#")[0].split()[3:] for command in COMMANDS if command.startswith("python -m benchmarks")]
    assert commands
    named = ["train", "train-step", "e2e", "host", "load", "forms", "first-call", "compare", "carry", "models"]
    named += ["report"]
    for command in commands:
        subcommand = [command.pop(0)] if command and command[0] in named else []
        with pytest.raises(SystemExit) as caught:
            main([*subcommand, *command, "--help"])
        assert caught.value.code == 0


def test_links_to_files_exist() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"
