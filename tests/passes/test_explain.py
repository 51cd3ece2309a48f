"""The report, its table, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import moe_ops
from compile_passes.__main__ import main
from tests.corpus.families import build, tokens
from tests.passes.blocks import E, H, batched, block, weights
from tests.passes.test_backend import Loop


def factory():
    """A model for the command line."""
    return block(batched), weights()


NOT_A_FUNCTION = E


def not_a_pair():
    """What a factory must not return."""
    return block(batched)


def test_fused_row():
    report = moe_ops.explain(build("gpt_oss", torch.bfloat16, "batched_mm"), input_ids=tokens(2, 8))
    assert (len(report.fused), report.refused, report.graphs, report.graph_breaks, report.error) == (2, [], 1, 0, None)
    row = report.fused[1]
    assert (row.E, row.K, row.H, row.I) == (8, 2, 64, 96)
    assert (row.routing, row.experts, row.scheme, row.backend) == ("topk_softmax", "batched_mm", "bf16", "cpu")
    assert (row.activation, row.glu_layout, row.module) == ("swiglu_oai", "interleaved", "model.layers.1.mlp.experts")
    assert "integrations/moe.py" in row.location
    assert "swiglu_oai (interleaved)" in str(report) and "model.layers.1.mlp.experts" in str(report)


def test_refused_row():
    report = moe_ops.explain(build("muse_spark", torch.float32, "grouped_mm"), input_ids=tokens(1, 8))
    assert len(report.refused) == 2 and not report.fused
    row = report.refused[0]
    assert "normalisation" in row.reason and "modeling_muse_spark.py" in row.location and row.cure
    assert "why:" in str(report) and "cure:" in str(report)


def test_router_that_stays_is_named():
    report = moe_ops.explain(build("gemma4", torch.bfloat16, "grouped_mm"), input_ids=tokens(1, 8))
    assert report.fused[0].routing == "kept" and "stays in the graph" in report.fused[0].router_note
    assert report.fused[0].router_note in str(report)


def test_graph_breaks_do_not_raise():
    report = moe_ops.explain(build("mixtral", torch.float32, "eager"), input_ids=tokens(2, 8))
    assert report.graph_breaks >= 1 and report.graphs > 1
    assert any("modeling_mixtral.py" in reason for reason in report.graph_break_reasons)
    assert "moe_ops.compile(model) switches it" in report.refused[0].cure


def test_other_loops_are_named():
    report = moe_ops.explain(Loop(), torch.randn(5, H))
    assert any("Python loop" in row.reason for row in report.refused)


def test_calls_of_the_model_itself():
    def run(x, w1, w2, topk_weights, ids):
        return moe_ops.fused_experts(x, w1, w2, topk_weights, ids)

    inputs = weights()
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    report = moe_ops.explain(run, x, w1, w2, torch.rand(len(x), 2), torch.randint(0, E, (len(x), 2)))
    assert report.own_calls == 1 and not report.fused
    assert "1 call(s) of moe_ops operators" in str(report)


def test_an_error_of_the_model_is_reported():
    def broken(x):
        raise RuntimeError("no such luck")

    assert "no such luck" in moe_ops.explain(broken, torch.zeros(1)).error


@pytest.mark.parametrize("what", ["mixtral", "tests.passes.test_explain:factory"])
def test_command_line(what, capsys):
    assert main(["explain", what, "--tokens", "8"]) == 0
    assert "fused, 0 refused; 1 graph(s), 0 graph break(s)" in capsys.readouterr().out


def test_command_line_config_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "olmoe", "hidden_size": 2048, "norm_topk_prob": True})
    )
    assert main(["explain", str(tmp_path), "--experts", "batched_mm"]) == 0
    assert "2 MoE block(s) fused" in capsys.readouterr().out


def test_command_line_says_what_was_refused(capsys):
    assert main(["explain", "muse_spark"]) == 1
    assert "normalisation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_model"], "must be a transformers model type"),
        (["no_such_module:factory"], "must be module:factory"),
        (["tests.passes.test_explain:NOT_A_FUNCTION"], "must be a function"),
        (["tests.passes.test_explain:not_a_pair"], "must return (model, inputs)"),
        (["mixtral", "--tokens", "0"], "--tokens must be at least 1"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help():
    done = subprocess.run(
        [sys.executable, "-m", "compile_passes", "explain", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "module:factory" in done.stdout and "config.json" in done.stdout
