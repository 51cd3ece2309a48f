"""Training steps of a whole model, as the benchmarks time them: a tiny one, and what happens where memory is short."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import models, train_step
from benchmarks.__main__ import main
from benchmarks.models import Variant

NAMES = ("grouped_mm", "grouped_mm compiled", "moe_ops")


@pytest.fixture
def few_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer, and backends that compile nothing."""
    tiny = models.MODELS["tiny"]
    monkeypatch.setitem(models.MODELS, "tiny", replace(tiny, config={**tiny.config, "num_hidden_layers": 1}))
    for name, backend in (("grouped_mm compiled", "eager"), ("moe_ops", "moe_ops_eager")):
        monkeypatch.setitem(models.VARIANTS, name, Variant("grouped_mm", {"backend": backend}))
    monkeypatch.setattr(train_step, "WARMUP_STEPS", 1)


def arguments(path: Path) -> list[str]:
    return ["train-step", "--model", "tiny", "--rows", "2x8", "--variants", ",".join(NAMES), "--json", str(path)]


@pytest.mark.usefixtures("few_and_cheap")
def test_steps_of_every_variant(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    assert main([*arguments(path), "--checkpointing", "on"]) == 0
    document = json.loads(path.read_text())
    assert document["kind"] == "train-step" and document["config"]["num_hidden_layers"] == 1
    rows = {row["variant"]: row for row in document["rows"]}
    assert tuple(rows) == NAMES
    for row in rows.values():
        assert (row["batch"], row["tokens"], row["checkpointing"], row["recompiles"]) == (2, 8, True, 0), row
        assert row["tokens_per_s"] == pytest.approx(16e3 / row["ms"]) and row["ratio_low"] <= row["ratio"]
        assert row["loss"] == pytest.approx(rows["grouped_mm"]["loss"], abs=1e-4), "all variants are one model"
    assert [rows[name]["graphs"] for name in NAMES] == [0, 1, 1]
    assert (rows["moe_ops"]["fused"], rows["moe_ops"]["refused"]) == (1, 0)
    assert rows["moe_ops"]["reference"] in NAMES[:2]


@pytest.mark.usefixtures("few_and_cheap")
def test_a_variant_without_memory_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails in its first step and another one beside the others; the third is timed."""
    made = train_step.make_step
    order: list[Variant] = []

    def short_of_memory(case: train_step.Case, variant: Variant) -> object:
        step, number = made(case, replace(variant, compile_options=None)), len(order)
        order.append(variant)

        def call() -> torch.Tensor:
            weight = case.network.model.embed_tokens.weight
            assert weight.grad is None, "a failed step leaves nothing behind"
            if number == 0 or (number == 1 and len(order) == 3):
                weight.grad = torch.ones_like(weight)
                raise torch.OutOfMemoryError("made up")
            return step()

        return call

    monkeypatch.setattr(train_step, "make_step", short_of_memory)
    path = tmp_path / "step.json"
    assert main(arguments(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("reason") for row in rows] == ["out of memory", "out of memory beside the others", None]
    assert rows[2]["ms"] > 0 and "ratio" not in rows[2]
    assert all(train_step.describe(row) for row in rows)
