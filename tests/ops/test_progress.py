"""Progress of long work: bars on a terminal, lines everywhere."""

from __future__ import annotations

import sys

import pytest

from moe_ops.progress import progress


@pytest.mark.parametrize("rich", [True, False], ids=["no terminal", "no rich"])
def test_lines_are_all_that_is_printed(rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress() as bars:
        one, other = bars.bar("layers", 2), bars.bar("compiling", None)
        one()
        one(description="layer 1")
        other(completed=3, total=7)
        bars.say("layer 1: found [0, 1]")
    assert capsys.readouterr() == ("", "layer 1: found [0, 1]\n")


def test_a_terminal_shows_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress() as bars:
        advance = bars.bar("layers", 2)
        advance()
        advance(description="layer 1")
    assert "layer 1" in (shown := capsys.readouterr().err) and "2/2" in shown
