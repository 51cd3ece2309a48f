"""Whatever goes wrong in a pass, the user's program runs as it was written; the error is counted and logged."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

import moe_ops
from compile_passes import passes
from compile_passes.compat import control_exceptions
from compile_passes.passes import FUSE, JOIN, SHARE, Plan, Report, run
from compile_passes.transaction import change
from tests.passes.blocks import batched, block, capture, counts, weights
from tests.passes.test_attention import attend, expanded
from tests.passes.test_attention import inputs as attention_inputs
from tests.passes.test_join import grouped_stages


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def boom(*_args):
    raise KeyError("boom")


def half_done(graph):
    """A rewrite that gives up in the middle: nodes inserted, uses replaced, others erased."""
    *_, last, output = graph.nodes
    with graph.inserting_before(last):
        graph.call_function(torch.relu, (last.args[0],))
    output.args = ((),)
    graph.erase_node(last)
    raise KeyError("boom")


def ill_formed(graph):
    """A rewrite that ends with a value used before it is computed."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    *_, last, _ = graph.nodes
    first.args = (last,)


def check(function, inputs):
    """Compiled is eager."""
    with torch.no_grad():
        got = torch.compile(function, backend="moe_ops_eager", fullgraph=True)(**inputs)
    torch.testing.assert_close(got, function(**inputs))


@pytest.mark.provokes_errors
@pytest.mark.parametrize("where", ["recognise", "recognise_calls", "decide", "Reading", "Rewriter.apply"])
def test_error_in_fusing(where, monkeypatch, caplog):
    owner = passes
    for part in where.split(".")[:-1]:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, where.split(".")[-1], boom)
    with caplog.at_level(logging.DEBUG, "compile_passes"):
        check(block(batched), weights(dtype=torch.float32))
    found = where in ("decide", "Rewriter.apply")
    assert counters["moe_ops"] == counts(refused=int(found), errors=1)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "an error in moe_ops" in warned[0] and "KeyError: 'boom'" in warned[0] and "\n" not in warned[0]
    if found:
        assert warned[1].startswith("not fused: ") and "blocks.py" in warned[1] and "KeyError" in warned[1]
    traces = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert any('raise KeyError("boom")' in message for message in traces)


@pytest.mark.provokes_errors
def test_garbage_is_collected_again_after_an_error(monkeypatch):
    seen = []
    monkeypatch.setattr(passes, "recognise", lambda reading: seen.append(gc.isenabled()) or boom())
    check(block(batched), weights(dtype=torch.float32))
    assert seen == [False] and gc.isenabled()


@pytest.mark.provokes_errors
def test_explain_shows_errors(monkeypatch):
    monkeypatch.setattr(passes, "decide", boom)
    report = moe_ops.explain(block(batched), **weights(dtype=torch.float32))
    assert len(report.errors) == 1 and "KeyError" in report.errors[0]
    assert f"an error in moe_ops: {report.errors[0]}" in str(report)


@pytest.mark.provokes_errors
def test_error_on_one_block_leaves_the_others_fused(monkeypatch):
    real, seen = passes.decide, []

    def second_fails(match):
        seen.append(match)
        return real(match) if len(seen) == 1 else boom()

    monkeypatch.setattr(passes, "decide", second_fails)

    def two(x, gate, w1, w2):
        return block(batched)(block(batched)(x, gate, w1, w2), gate, w1, w2)

    check(two, weights(dtype=torch.float32))
    assert counters["moe_ops"] == counts(fused=1, refused=1, joined=1, errors=1)


@pytest.mark.provokes_errors
@pytest.mark.parametrize("rewrite", [half_done, ill_formed])
@pytest.mark.parametrize("step", ["fuse", "share", "join"])
def test_failed_rewrite_leaves_the_graph_as_it_was(step, rewrite, monkeypatch):
    function, inputs, broken = {
        "fuse": (block(batched), weights(dtype=torch.float32), "Rewriter.apply"),
        "share": (attend(expanded), dict(zip("q k v mask".split(), attention_inputs(), strict=True)), "share_heads"),
        "join": (grouped_stages, weights(dtype=torch.float32), "join"),
    }[step]
    gm = capture(function, **inputs)
    before, placeholders = structure(gm.graph), [node for node in gm.graph.nodes if node.op == "placeholder"]
    result = {"fuse": FUSE, "share": SHARE, "join": JOIN}[step]
    if step == "fuse":
        monkeypatch.setattr(passes.Rewriter, "apply", lambda self, match: rewrite(self.graph))
    else:
        monkeypatch.setattr(passes, broken, rewrite)
    report = run(result, gm.graph)
    assert len(report.errors) == counters["moe_ops"]["errors"] == 1 and not report.fused
    assert structure(gm.graph) == before
    assert [node for node in gm.graph.nodes if node.op == "placeholder"] == placeholders, "Dynamo's own objects"
    check(function, inputs)


def structure(graph):
    """The graph without the names of its nodes."""
    number = {node: position for position, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            node.target,
            fx.map_arg(node.args, number.get),
            fx.map_arg(node.kwargs, number.get),
            sorted(node.meta),
        )
        for node in graph.nodes
    ]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, *control_exceptions()], ids=lambda kind: kind.__name__)
def test_control_exceptions_pass_through_and_the_graph_is_put_back(kind):
    gm = capture(block(batched), **weights())
    before = structure(gm.graph)

    def interrupted():
        gm.graph.erase_node(gm.graph.output_node())
        raise kind

    with pytest.raises(kind):
        run(replace(FUSE, plan=lambda graph: Plan(Report(), interrupted)), gm.graph)
    assert structure(gm.graph) == before
    assert counters["moe_ops"]["errors"] == 0


def test_restart_analysis_is_among_the_control_exceptions():
    from torch._dynamo import exc

    assert issubclass(exc.TensorifyScalarRestartAnalysis, control_exceptions())
    assert issubclass(exc.SpeculationRestartAnalysis, control_exceptions())
    assert not issubclass(RuntimeError, control_exceptions())


def test_a_change_that_holds_is_kept():
    gm = capture(lambda x: (x + 1).relu(), x=torch.randn(3))
    nodes = list(gm.graph.nodes)

    def apply():
        nodes[-2].replace_all_uses_with(nodes[-3])
        gm.graph.erase_node(nodes[-2])

    change(gm.graph, apply)
    assert list(gm.graph.nodes) == [*nodes[:-2], nodes[-1]]


@pytest.mark.provokes_errors
def test_compilation_that_fails_counts_nothing(monkeypatch):
    """Dynamo traces again after some exceptions, and everything counts once."""
    from compile_passes import backend

    def fails(*_):
        raise torch._dynamo.exc.InternalTorchDynamoError("no")

    monkeypatch.setattr(backend.compat, "inductor", fails)
    with pytest.raises(Exception, match="no"), torch.no_grad():
        torch.compile(block(batched), backend="moe_ops")(**weights())
    assert not counters["moe_ops"]


# ---- programs in which operators of ours have no meaning


def per_example(transform):
    """The block applied under a function transform of torch.func."""

    def loss(x, *weight):
        return block(batched)(x, *weight).square().sum()

    def run(x, gate, w1, w2):
        if transform == "vmap":
            return torch.vmap(lambda rows: block(batched)(rows, gate, w1, w2))(x.unflatten(0, (2, -1)))
        if transform == "grad":
            return torch.func.grad(loss)(x, gate, w1, w2)
        return torch.func.jvp(lambda x: block(batched)(x, gate, w1, w2), (x,), (torch.ones_like(x),))

    return run, weights(dtype=torch.float32)


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_function_transforms_run_as_eager(transform, backend):
    function, inputs = per_example(transform)
    got = torch.compile(function, backend=backend)(**inputs)
    torch.testing.assert_close(got, function(**inputs), rtol=1e-4, atol=1e-5)
    assert counters["moe_ops"] == counts(refused=1)


class Scaled(torch.Tensor):
    """A weight kept as half of itself: the smallest tensor subclass that torch.compile can trace."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(
            cls, half.shape, strides=half.stride(), dtype=half.dtype, device=half.device
        )

    def __init__(self, half):
        self.half_of_it = half

    def __repr__(self):  # torch's own looks at the numbers, which a fake tensor does not have
        return "Scaled(...)"

    def __tensor_flatten__(self):
        return ["half_of_it"], None

    @staticmethod
    def __tensor_unflatten__(inner, _context, _size, _stride):
        return Scaled(inner["half_of_it"])

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        def plain(value):
            return value.half_of_it * 2 if isinstance(value, Scaled) else value

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0] / 2)
        return function(*args, **kwargs)


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_unknown_tensor_subclass_runs_as_eager(backend):
    inputs = weights(dtype=torch.float32)
    inputs["w1"], inputs["w2"] = Scaled(inputs["w1"] / 2), Scaled(inputs["w2"] / 2)
    with torch.no_grad():
        got = torch.compile(block(batched), backend=backend)(**inputs)
        torch.testing.assert_close(got, block(batched)(**inputs))
    assert counters["moe_ops"] == counts(refused=1)
