"""The example that trains: curves lie on each other, what is not fused or is wrong is said, Ctrl-C keeps what is there.

Without code generation: the same graphs, captured and rewritten, then run as they are.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from compile_passes.backend import moe_ops_eager
from moe_ops.examples import curves, finetune, text, training
from moe_ops.examples.finetune import main
from moe_ops.examples.training import EAGER, FUSED, NUDGED, PLAIN, Run, Settings, Way

WAYS = {EAGER: Way(), PLAIN: Way("eager"), FUSED: Way("moe_ops_eager"), NUDGED: Way(nudged=True)}
STEPS, BATCH, LENGTH = 20, 16, 64
SIZES = {"layers": 1, "rate": 5e-3, "steps": STEPS, "batch": BATCH, "length": LENGTH, "dtype": "float32"}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Ended:
    """One run of the command."""

    status: int
    out: str
    err: str
    document: dict[str, Any]
    picture: Path


@pytest.fixture(autouse=True)
def _on_a_cpu_without_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WAYS", WAYS)
    monkeypatch.setattr(finetune, "_device", lambda: "cpu")


@pytest.fixture
def ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def run(*arguments: str) -> Ended:
        paths = tmp_path / "curves.png", tmp_path / "runs.json"
        status = main([*SMALL, "--output", str(paths[0]), "--json", str(paths[1]), *arguments])
        printed = capsys.readouterr()
        return Ended(status, printed.out, printed.err, json.loads(paths[1].read_text()), paths[0])

    return run


def settings(**changed: Any) -> Settings:
    given = finetune._settings(finetune._parser().parse_args(SMALL))
    return replace(given, device="cpu", **changed)


def trained(given: Settings, ways: dict[str, Way]) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    training.train(given, ways, text.split(), runs, lambda name, run: None)
    return runs


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return trained(settings(), WAYS)


def test_the_command_trains_and_says_what_it_measured(
    ended: Callable[..., Ended], runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def train(given: Settings, ways: Any, texts: Any, found: dict[str, Run], tell: Callable[[str, Run], None]) -> None:
        """The runs that were made, if they are asked for."""
        assert given == settings() and ways == WAYS and texts == text.split()
        found.update(runs)
        for name, run in runs.items():
            tell(name, run)

    monkeypatch.setattr(training, "train", train)
    found = ended()
    assert found.status == 0, found.err
    assert "MoE layers fused: 1 of 1; graphs: 1, breaks: 0" in found.out
    rows = {row["name"]: row for row in found.document["runs"]}
    assert list(rows) == list(WAYS) and found.document["settings"]["family"] == "qwen3_moe"
    assert [row["fused"] for row in rows.values()] == [0, 0, 1, 0], "each counts what it compiled itself"
    assert [row["graphs"] for row in rows.values()] == [0, 1, 1, 0]
    for name, row in rows.items():
        assert f"│ {name} " in found.out
        assert len(row["losses"]) == len(row["seconds"]) == STEPS
        assert 5.3 < row["losses"][0] < 5.8, "a byte of 256, not known yet"
        assert row["last_loss"] < 3.5 and row["validation"] < 3.5, "what bytes are frequent, at least"
        assert row["tokens_per_second"] == pytest.approx(BATCH * LENGTH / row["step_seconds"])
    data = found.picture.read_bytes()
    assert data[1:4] == b"PNG" and struct.unpack(">II", data[16:24]) == (1200, 840)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("mixtral", dict(checkpointing=True)),
        ("olmoe", dict(freeze_experts=True)),
        ("gpt_oss", dict(accumulate=2)),
        ("deepseek_v3", dict(dtype="bfloat16")),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_other_families_are_fused_and_trained_alike(family: str, changed: dict[str, Any]) -> None:
    given = settings(family=finetune.TRAINED[family], steps=3, batch=4, length=24, **changed)
    eager, fused = trained(given, {name: WAYS[name] for name in (EAGER, FUSED)}).values()
    assert (fused.layers, fused.fused, fused.refused, fused.errors, fused.graph_breaks) == (1, 1, 0, 0, 0)
    assert eager.losses[2] < eager.losses[0] - 0.05
    assert training.furthest(fused, eager) < (3e-2 if given.dtype == "bfloat16" else 1e-4)


def test_frozen_experts_stay_as_they_are() -> None:
    given = settings(freeze_experts=True)
    frozen = {name for name, parameter in given.model().named_parameters() if not parameter.requires_grad}
    assert frozen == {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize("on", [True, False])
def test_layers_are_checkpointed_where_it_is_asked_for(on: bool) -> None:
    layers = settings(checkpointing=on).model().model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [on]


def test_micro_batches_are_one_batch() -> None:
    given = settings(steps=4, length=24)
    whole, parts = (
        trained(one, {EAGER: Way()})[EAGER] for one in (given, replace(given, batch=BATCH // 4, accumulate=4))
    )
    assert training.furthest(parts, whole) < 1e-4
    assert parts.tokens == whole.tokens == BATCH * 24


def test_nudged_weights_are_a_rounding_step_away() -> None:
    plain, nudged = (dict(settings().model(way).named_parameters()) for way in (False, True))
    assert any(not torch.equal(plain[name], nudged[name]) for name in plain)
    for name, value in plain.items():
        torch.testing.assert_close(nudged[name], value, rtol=2 * torch.finfo(torch.float32).eps, atol=0.0)


def _without_gradient(argument: str) -> Callable[..., Any]:
    """The backend, and the fused operator's gradient of an argument is lost."""

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        moe_ops_eager(gm, inputs)
        (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.moe_ops.fused_experts.default)
        names = [row.name for row in call.target._schema.arguments]
        place = names.index(argument)
        with gm.graph.inserting_before(call):
            call.update_arg(place, gm.graph.call_method("detach", (call.args[place],)))
        gm.recompile()
        return gm.forward

    return backend


@pytest.mark.parametrize("argument", ["gate_up_proj", "topk_weights"])
def test_a_wrong_gradient_is_not_taken_for_rounding(
    argument: str, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = trained(settings(), {FUSED: Way(_without_gradient(argument))})[FUSED]
    tolerated = training.tolerance(runs)
    assert training.average(runs[FUSED], runs[EAGER]) <= tolerated
    assert finetune._judge(settings(), text.split(), {**runs, FUSED: wrong}, tolerated) == 1
    assert "finetune: the fused curve is" in capsys.readouterr().err


def test_a_curve_that_is_not_a_number_is_said(runs: dict[str, Run], capsys: pytest.CaptureFixture[str]) -> None:
    lost = replace(runs[FUSED], losses=[*runs[FUSED].losses[:-1], float("nan")])
    assert finetune._judge(settings(), text.split(), {**runs, FUSED: lost}, 1.0) == 1
    assert "finetune: the fused curve is nan" in capsys.readouterr().err


@pytest.mark.parametrize("counts", [dict(fused=0), dict(refused=1), dict(errors=1)], ids=lambda row: next(iter(row)))
def test_what_was_not_fused_is_said(
    counts: dict[str, int], runs: dict[str, Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "explained", lambda self, tokens: f"refused at {list(tokens.shape)}")
    given = {**runs, FUSED: replace(runs[FUSED], **counts)}
    assert finetune._judge(settings(), text.split(), given, training.tolerance(runs)) == 1
    printed = capsys.readouterr()
    assert printed.out == f"refused at {[BATCH, LENGTH]}\n" and "1 MoE layers were fused; above is why" in printed.err


def test_explained_is_the_training_that_was_run() -> None:
    given = settings(batch=2)
    said = given.explained(given.micro_batches(text.split()[0], 0)[0])
    assert "model.layers.0.mlp.experts" in said


def test_ctrl_c_keeps_what_was_measured(ended: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    loss = Settings.loss

    def interrupted(self: Settings, *given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise KeyboardInterrupt
        return loss(self, *given)

    monkeypatch.setattr(Settings, "loss", interrupted)
    found = ended("--batch", "2")
    assert found.status == finetune.INTERRUPTED and "stopped by Ctrl-C" in found.err
    rows = found.document["runs"]
    assert [len(row["losses"]) for row in rows] == [len(row["seconds"]) for row in rows] == [3, 3, 2, 2]
    assert found.document["tolerance"] is None and "│ moe_ops " in found.out


def test_real_dimensions_are_one_at_a_time() -> None:
    assert finetune._together(settings()) == [WAYS]
    assert finetune._together(settings(real=True)) == [{name: way} for name, way in WAYS.items()]


def test_a_picture_of_what_there_is(runs: dict[str, Run], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves.draw({EAGER: runs[EAGER], PLAIN: Run(1024)}, "stopped", None, tmp_path / "part.png")
    assert (tmp_path / "part.png").stat().st_size > 10_000


WRONG = {
    "--family": ("--family bert", "--family must be one of qwen3_moe, mixtral, deepseek_v3, gpt_oss, olmoe, got bert."),
    "--dtype": ("--dtype fp8", "--dtype must be one of float32, bfloat16, autocast, got fp8."),
    "--steps": ("--steps 2", "--steps must be at least 3, got 2."),
    "--batch": ("--batch 0", "--batch must be at least 1, got 0."),
    "--length": ("--length 1", "--length must be at least 2, got 1."),
    "--length, text": ("--length 100000000", "--length must be at most "),
    "--layers": ("--layers 0", "--layers must be at least 1, got 0."),
    "--accumulate": ("--accumulate 0", "--accumulate must be at least 1, got 0."),
    "--rate": ("--rate 0", "--rate must be above 0 and at most 1, got 0.0."),
    "a word": ("--steps many", "argument --steps: invalid int value: 'many'"),
    "--output": ("--output none/a.png", "none/a.png must be in a folder that is there, got none of the name none."),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_an_error_in_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[name]
    _refused(arguments, message, capsys)


def test_older_results_are_not_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    older = tmp_path / "older.json"
    older.write_text("{}")
    _refused(f"--json {older}", f"--json must name a new file, got {older}, which is there.", capsys)


def test_real_dimensions_are_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    _refused("--real", "--real must have a GPU, got a CPU.", capsys)


def test_a_picture_needs_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _refused("", 'the picture is drawn with matplotlib, got none. pip install -e ".[bench]"', capsys)


def _refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is said before anything is trained."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as caught:
        patched.setattr(finetune, "_train_all", None)
        main(arguments.split())
    printed = capsys.readouterr()
    assert caught.value.code == 2 and not printed.out
    assert printed.err.startswith(f"finetune: {message}") and printed.err.count("\n") == 1


def test_the_text_is_that_of_the_standard_library_in_two_parts() -> None:
    training_text, held_out = (bytes(part.tolist()) for part in text.split())
    assert len(training_text) > 4 * len(held_out) > 4 * 4096
    assert not any(paragraph in training_text for paragraph in held_out.split(b"\n\n") if len(paragraph) > 300)


def test_windows_are_the_same_for_a_seed_and_stay_inside() -> None:
    found = torch.arange(50, dtype=torch.uint8)
    first, again, other = (text.windows(found, 200, 48, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.dtype == torch.int64 and torch.equal(first, first[:, :1] + torch.arange(48))
    assert first[:, 0].unique().tolist() == [0, 1, 2]


def test_without_the_librarys_sources_the_text_is_this_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "broken.py").write_text("def (")
    text.split.cache_clear()
    request.addfinalizer(text.split.cache_clear)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    found = [bytes(part.tolist()) for part in text.split()]
    assert b"Mixture-of-experts operators for PyTorch" in found[0] + found[1] and len(found[1]) > 1000
