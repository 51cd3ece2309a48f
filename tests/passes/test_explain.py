"""The report, its table, and the command line."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import compile_passes
import moe_ops
from benchmarks.loops import Block
from compile_passes.__main__ import main
from compile_passes.tiny import model_of, tiny_model
from tests.corpus.families import available, build, tokens
from tests.passes.blocks import E, H, K, batched, block, silu_glu, softmax_router, weights
from tests.passes.test_backend import Loop
from tests.passes.test_forms import dense_softmax


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


needs_muse_spark = pytest.mark.skipif(not available("muse_spark"), reason="transformers has no muse_spark")


def normed_over_rows():
    """muse_spark, but for a norm after the experts that is over all rows together; and its inputs."""
    model = build("muse_spark", torch.float32, "grouped_mm")
    for layer in model.layers:
        layer.mlp.experts.post_expert_norm._norm = lambda x: x * torch.rsqrt(x.pow(2).mean() + 1e-6)
    return model, {"input_ids": tokens(1, 8)}


@needs_muse_spark
def test_refused_row():
    model, inputs = normed_over_rows()
    report = moe_ops.explain(model, **inputs)
    assert len(report.refused) == 2 and not report.fused and not report.staged
    row = report.refused[0]
    assert "normalisation" in row.reason and "test_explain.py" in row.location and row.cure
    first = f"refused: {row.module} ({row.location})"  # the module first: all blocks of transformers share a line
    lines = [first, f"  line: {row.source}", f"  why:  {row.reason}", f"  cure: {row.cure}"]
    assert row.source and row.module == "layers.0.mlp.experts" and "\n".join(lines) in str(report)


def test_router_that_stays_is_named():
    report = moe_ops.explain(build("gemma4", torch.bfloat16, "grouped_mm"), input_ids=tokens(1, 8))
    assert report.fused[0].routing == "kept" and "stays in the graph" in report.fused[0].router_note
    assert report.fused[0].router_note in str(report)


def test_graph_breaks_do_not_raise():
    report = moe_ops.explain(build("mixtral", torch.float32, "eager", num_hidden_layers=1), input_ids=tokens(1, 3))
    assert report.graph_breaks >= 1 and report.graphs > 1
    assert any("modeling_mixtral.py" in reason for reason in report.graph_break_reasons)
    assert "moe_ops.compile(model) switches it" in report.refused[0].cure


def test_other_loops_are_named():
    report = moe_ops.explain(Loop(), torch.randn(5, H))
    assert ["Python loop" in row.reason for row in report.refused] == [True]
    assert report.refused[0].cure.startswith("moe_ops.compile(model) gives it a static form")


class Break(torch.nn.Module):
    """A block of stacked experts with a graph break somewhere inside."""

    def __init__(self, place):
        super().__init__()
        self.experts = StackedExperts(place)

    def forward(self, x):
        return self.experts(x)


class StackedExperts(torch.nn.Module):
    """Stacked weights, gathered."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        for name, value in weights(dtype=torch.float32).items():
            if name != "x":
                setattr(self, name, torch.nn.Parameter(value))

    def forward(self, x):
        topk_weights, ids = softmax_router(x, self.gate)
        if self.place == "after the router":
            torch._dynamo.graph_break()
        rows, flat = x.repeat_interleave(K, dim=0), ids.reshape(-1)
        h = torch.bmm(self.w1[flat], rows.unsqueeze(-1)).squeeze(-1)
        if self.place == "between the products":
            torch._dynamo.graph_break()
        out = torch.bmm(self.w2[flat], silu_glu(h).unsqueeze(-1)).squeeze(-1)
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def test_a_block_cut_by_a_graph_break_is_refused_once():
    report = moe_ops.explain(Break("between the products"), weights(dtype=torch.float32)["x"])
    assert len(report.refused) == 1 and not report.fused
    row = report.refused[0]
    assert "cuts the block in pieces" in row.reason and "test_explain.py" in row.reason
    assert "test_explain.py" in row.location and row.module == "experts"


def test_a_break_before_the_experts_leaves_them_fused():
    report = moe_ops.explain(Break("after the router"), weights(dtype=torch.float32)["x"])
    assert (len(report.fused), report.refused, report.graph_breaks) == (1, [], 1)
    assert report.fused[0].routing == "kept"


class Two(torch.nn.Module):
    """Two layers beside each other."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


def test_a_layer_that_is_in_no_graph_is_refused_beside_one_that_is_fused():
    model = Two(StackedExperts("nowhere"), StackedExperts("nowhere"))
    model.second.forward = torch._dynamo.disable(model.second.forward)
    report = moe_ops.explain(model, weights(dtype=torch.float32)["x"])
    assert len(report.fused) == 1 and [row.module for row in report.refused] == ["second"]
    assert "None of its weights is in a captured graph" in report.refused[0].reason


class Loops:
    """A loop over the experts, and who names it."""

    @staticmethod
    def run(x, gate, w1, w2):
        topk_weights, ids = softmax_router(x, gate)
        out = torch.zeros_like(x)
        for e in range(len(w1)):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, silu_glu(x[token] @ w1[e].t()) @ w2[e].t() * topk_weights[token, slot, None])
        return out


class Looped(StackedExperts):
    """Code of another class, called by its name or as a value."""

    def forward(self, x):
        run = Loops.run if self.place == "named" else self.place
        return run(x, self.gate, self.w1, self.w2)


class Doubled(Two):
    """The same, with something to capture in front."""

    def forward(self, x):
        return self.second(self.first(x * 2))


@pytest.mark.parametrize("code", ["named", Loops.run], ids=["named", "held"])
def test_hooks_that_record_are_no_reason_of_a_loop_that_is_not_captured(code):
    """As transformers records router logits, where Dynamo captures no ContextVar: a graph breaks at the hook first."""
    model = Doubled(torch.nn.Linear(H, H), Looped(code))
    model.first.register_forward_hook(lambda module, args, output: torch._dynamo.graph_break())
    report = moe_ops.explain(model, weights(dtype=torch.float32)["x"])
    assert report.graph_break_reasons[0].startswith("Call to `torch._dynamo.graph_break()`")
    (row,) = report.refused
    line = Loops.run.__code__.co_firstlineno + 5
    assert row.module == "second" and f"Dynamic shape operator ({__file__}:{line})" in row.reason
    assert "capture_dynamic_output_shape_ops = True" in row.cure


class Unread(torch.nn.Module):
    """What no recogniser reads, with the weights of an MoE layer."""

    def __init__(self):
        super().__init__()
        for name, value in weights(dtype=torch.float32).items():
            if name != "x":
                setattr(self, name, torch.nn.Parameter(value))

    def forward(self, x):
        return x + self.gate.sum() + self.w1.sum() * self.w2.sum()


def test_a_break_in_one_layer_is_no_reason_of_another():
    model = Two(StackedExperts("between the products"), Unread())
    rows = {row.module: row for row in moe_ops.explain(model, weights(dtype=torch.float32)["x"]).refused}
    assert "cuts the block in pieces" in rows["first"].reason
    assert "not in a form in which experts are recognised" in rows["second"].reason


class Chosen(Block):
    """Experts choose their tokens."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        scores, tokens = self.gate(flat).softmax(-1).T.topk(2)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            out[tokens[e]] += expert(flat[tokens[e]]) * scores[e, :, None]
        return out.view_as(x)


class OfRelu(Block):
    """As many experts for a token as have a positive gate."""

    def forward(self, x):
        gates = torch.relu(self.gate(x))
        return sum(gates[..., e, None] * expert(x) for e, expert in enumerate(self.experts))


class Limited(Block):
    """An expert takes two tokens at most."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, ids = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            token, slot = (token[: self.top_k], slot[: self.top_k]) if token.numel() > self.top_k else (token, slot)
            if token.numel() > 0:
                out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


@pytest.mark.parametrize(
    ("kind", "reason", "cure"),
    [
        (Chosen, "Experts choose their tokens here, by `scores, tokens =", "Nothing to do: what is fused"),
        (OfRelu, "in which nothing is chosen", "no call of moe_ops computes that"),
        (Limited, "is more than a test for an empty expert", "of tokens beyond a capacity, have the id -1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_call_computes(kind, reason, cure):
    """The cure is no call that computes something else."""
    torch.manual_seed(0)
    model = kind().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moe_ops.compile(model, backend="moe_ops_eager")
    with torch.no_grad():
        (row,) = moe_ops.explain(model, torch.randn(1, 9, 16)).refused
    assert reason in row.reason and cure in row.cure


class DenseConvolutions(torch.nn.Module):
    """Experts that are no two projections, each on all tokens."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(8, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Conv1d(8, 8, 1) for _ in range(4))

    def forward(self, x):
        outputs = torch.stack([expert(x.t()).t() for expert in self.experts], dim=1)
        return (outputs * self.router(x).softmax(-1).unsqueeze(-1)).sum(1)


def test_nothing_is_advised_where_experts_are_no_two_projections():
    (row,) = moe_ops.explain(DenseConvolutions(), torch.randn(3, 8)).refused
    assert "are not two projections" in row.reason and "Nothing is to be done" in row.cure


def test_a_checkpointed_region_that_runs_in_python_is_refused():
    model = build("mixtral", torch.float32, "grouped_mm", num_hidden_layers=1).train().requires_grad_(True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    report = moe_ops.explain(model, input_ids=tokens(1, 8), use_cache=False, output_router_logits=True)
    assert [row.module for row in report.refused] == ["model.layers.0.mlp.experts"]
    assert "The checkpointed region runs in Python" in report.refused[0].reason
    assert "output_router_logits" in report.refused[0].cure
    assert any("checkpoint" in frame or "HOP" in frame for frame in report.eager_frames)


def test_products_in_separate_graphs_are_refused():
    """jetmoe counts on the host, one line before its products."""
    config, model_class = model_of("jetmoe")
    config.num_hidden_layers = 1
    report = moe_ops.explain(tiny_model(config, model_class), input_ids=tokens(1, 8))
    assert [row.module for row in report.refused] == [
        f"model.layers.0.{part}" for part in ("mlp", "self_attention.experts")
    ]
    assert all(re.search(r"modeling_jetmoe.py:\d+", row.reason) for row in report.refused)


def test_functions_left_to_python_are_named():
    def inner(x):
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + 1
        return x

    report = moe_ops.explain(lambda x: inner(x * 2) * 3, torch.zeros(3))
    assert any(frame.startswith("inner (") and "test_explain.py" in frame for frame in report.eager_frames)
    assert "functions left to Python" in str(report)


@pytest.mark.parametrize("recursive", [True, False], ids=["all_of_it", "its_frame"])
def test_a_disabled_block_in_a_list_of_layers_is_refused(recursive):
    """Dynamo gives up the frame of the list, and says nothing of why. What a frame calls is captured nevertheless."""
    block = build("mixtral", torch.float32, "grouped_mm", num_hidden_layers=1).model.layers[0].mlp
    block.forward = torch.compiler.disable(block.forward, recursive=recursive)
    layers, x = torch.nn.Sequential(torch.nn.Identity(), block), torch.randn(1, 8, block.gate.weight.shape[1])
    report = moe_ops.explain(layers, x)
    assert len(report.fused) == (0 if recursive else 1)
    assert [row.module for row in report.refused] == (["1.experts"] if recursive else [])
    reason = "torch.compiler.disable keeps it from Dynamo: 1.forward ("
    assert all(row.reason.startswith(reason) for row in report.refused)


def test_a_form_that_is_not_fused_is_no_absence():
    report = moe_ops.explain(dense_softmax, **weights(dtype=torch.float32))
    assert len(report.refused) == 1 and "8 experts" in report.refused[0].reason
    assert "No MoE block is in a captured graph" not in str(report)
    assert "No MoE block is in a captured graph" in str(moe_ops.explain(torch.relu, torch.zeros(3)))


class Helped(torch.nn.Module):
    """Code that is compiled in two frames, the second shared with other callers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(H, H)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return _help(x)


def _help(x):
    return (x * 2).relu()


@pytest.mark.parametrize("same_model", [True, False], ids=["same model", "shared code"])
def test_what_else_is_compiled_stays_compiled(same_model):
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    model, x = Helped(), torch.randn(3, H)
    mine = torch.compile(model if same_model else _help, backend=count)
    for size in (5, 7):  # neither size may be remembered: what comes next would be compiled for any size
        assert moe_ops.explain(model, torch.randn(size, H)).graphs == 2
    mine(x)
    sizes = [node.meta["example_value"].shape[0] for node in graphs[-1].graph.nodes if node.op == "placeholder"]
    compiled = len(graphs)
    before = {section: dict(entries) for section, entries in counters.items()}
    assert moe_ops.explain(model, x).graphs == 2
    assert {section: dict(entries) for section, entries in counters.items()} == before
    with torch.compiler.set_stance("fail_on_recompile"):
        mine(x)
    assert len(graphs) == compiled and sizes == [3]


def test_the_model_is_unchanged_and_can_be_explained_again():
    model = build("mixtral", torch.float32, "grouped_mm")
    names, state = set(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (str(moe_ops.explain(model, input_ids=tokens(1, 8))) for _ in range(2))
    assert first == second and "2 MoE block(s) fused" in first
    assert set(vars(model)) == names
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


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


def test_dtypes_go_by_the_names_of_the_command_line():
    assert moe_ops.explain("mixtral", dtype="fp32", tokens=4).fused[0].scheme == "fp32"
    for dtype in ("float", 16, torch.int8):
        with pytest.raises(ValueError, match="dtype must be one of bf16, fp32, fp16, got "):
            moe_ops.explain("mixtral", dtype=dtype)


def test_no_name_is_no_folder():
    with pytest.raises(ValueError, match="explain: '' must be the name of a model of a known family"):
        moe_ops.explain("")


def test_what_is_no_python_is_reported():
    """TorchScript has no forward to look at, and Dynamo compiles no frame of a model that is nothing else."""
    x = torch.randn(4, H)
    traced = torch.jit.trace(torch.nn.Linear(H, H).requires_grad_(False), x)
    for model in (traced, torch.nn.Sequential(traced, torch.jit.script(torch.nn.ReLU()))):
        report = moe_ops.explain(model, x)
        assert (report.fused, report.refused, report.error) == ([], [], None)
        torch.testing.assert_close(moe_ops.compile(model)(x), model(x))


@pytest.mark.parametrize("what", [["mixtral", "--tokens", "8"], ["tests.passes.test_explain:factory"]], ids=" ".join)
def test_command_line(what, capsys):
    assert main(["explain", *what]) == 0
    assert "fused, 0 refused; 1 graph(s), 0 graph break(s)" in capsys.readouterr().out


def test_command_line_config_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "olmoe", "hidden_size": 2048, "norm_topk_prob": True})
    )
    assert main(["explain", str(tmp_path), "--experts", "batched_mm"]) == 0
    assert "2 MoE block(s) fused" in capsys.readouterr().out


@needs_muse_spark
def test_command_line_says_what_was_refused(capsys):
    assert main(["explain", "tests.passes.test_explain:normed_over_rows"]) == 1
    assert "normalisation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_model"], "must be the name of a model of a known family"),
        (["no_such_module:factory"], "must be module:factory"),
        (["tests.passes.test_explain:NOT_A_FUNCTION"], "must be a function"),
        (["tests.passes.test_explain:not_a_pair"], "must return (model, inputs)"),
        (["mixtral", "--tokens", "0"], "tokens must be at least 1, got 0"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


# What stands between these types and a small model, and what the one line says of it.
NO_MODEL = {
    "chameleon": "cannot be made tiny",
    "cohere2_vision": "million parameters are left",
    "cohere_compass": "cannot be made tiny",
    "cosmos3_edge": "cannot be made tiny",
    "depth_anything": "has no text model",
    "vit": "takes no token ids",
}


@pytest.mark.parametrize("family", NO_MODEL)
def test_types_without_a_tiny_model_end_in_one_line(family, capsys):
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"transformers has no {family}")
    code, printed = main(["explain", family]), capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("explain: ") and NO_MODEL[family] in printed.err
    assert len(printed.err.strip().splitlines()) == 1


@pytest.mark.parametrize("family", ["dots1", "dbrx"])
def test_types_that_need_more_than_sizes_are_reported(family, capsys):
    code, printed = main(["explain", family, "--tokens", "8"]), capsys.readouterr()
    assert code == (0 if family == "dots1" else 1)
    assert "MoE block(s) fused" in printed.out and "the model raised" not in printed.out
    assert printed.err == ""


def test_nothing_is_printed_before_the_report():
    command = [sys.executable, "-m", "compile_passes", "explain", "gpt_oss", "--experts", "eager", "--tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "") and done.stdout.startswith("0 MoE block(s) fused, 2 refused")


def _texts():
    """Every string in the code that makes refusals, with its place."""
    package = Path(compile_passes.__file__).parent
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text())
        documentation = {id(node.body[0].value) for node in ast.walk(tree)
                         if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
                         and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                yield f"{file.relative_to(package)}:{node.lineno}", node.value


def test_advice_is_for_the_user_of_a_wheel():
    """Who installed the package has no folder to add a row in."""
    texts = list(_texts())
    assert len(texts) > 300
    words = ("patterns/", "meta/", "add a row", "compile_passes/")
    assert [place for place, text in texts if any(word in text.lower() for word in words)] == []


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--help"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0 and "module:factory" in printed and "config.json" in printed


class InHelpers(StackedExperts):
    """The same, each step in a method of its own; a break in one of them cuts the block, elsewhere it does not."""

    def __init__(self, place, activation=silu_glu):
        super().__init__(place)
        self.activation = activation

    def forward(self, x):
        topk_weights, ids = softmax_router(x, self.gate)
        if self.place == "before":
            self.stop()
        rows, flat = x.repeat_interleave(K, dim=0), ids.reshape(-1)
        out = self.product(self.w2, flat, self.between(self.product(self.w1, flat, rows)))
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    def product(self, weight, ids, rows):
        return torch.bmm(weight[ids], rows.unsqueeze(-1)).squeeze(-1)

    def between(self, h):
        if self.place == "between":
            self.stop()
        return self.activation(h)

    def stop(self):
        torch._dynamo.graph_break()


def test_a_break_in_a_helper_cuts_the_block():
    report = moe_ops.explain(InHelpers("between"), weights(dtype=torch.float32)["x"])
    assert ["cuts the block in pieces" in row.reason for row in report.refused] == [True]
    assert report.refused[0].source == "torch._dynamo.graph_break()"


def test_a_break_elsewhere_hides_no_other_reason():
    """The block is whole in the graph after the break, and refused for its activation."""

    def tanh_glu(h):
        gate, up = h.chunk(2, dim=-1)
        return torch.tanh(gate) * up

    report = moe_ops.explain(WholeAfterBreak(tanh_glu), weights(dtype=torch.float32)["x"])
    assert report.graph_breaks == 1
    assert ["activation" in row.reason for row in report.refused] == [True]


class WholeAfterBreak(InHelpers):
    """A graph break and the block in one forward, one after the other."""

    def __init__(self, activation):
        super().__init__("nowhere", activation)

    def forward(self, x):
        x = x * 0.5
        torch._dynamo.graph_break()
        topk_weights, ids = softmax_router(x, self.gate)
        rows, flat = x.repeat_interleave(K, dim=0), ids.reshape(-1)
        h = torch.bmm(self.w1[flat], rows.unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(self.w2[flat], self.activation(h).unsqueeze(-1)).squeeze(-1)
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def test_where_dynamo_is_off_there_are_no_graphs():
    with torch._dynamo.config.patch(disable=True):
        report = moe_ops.explain(torch.nn.Linear(4, 4), torch.randn(2, 4))
    assert (report.graphs, report.error, report.fused, report.refused) == (0, None, [], [])
