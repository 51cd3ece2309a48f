"""The report as JSON and as a page: what it says, that it needs nothing else, and that no text becomes markup."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F

import moe_ops
from compile_passes.__main__ import main
from compile_passes.diagram import ROLES, Diagram, Line, Operator, Stage
from compile_passes.report import Fused, Refused, Report
from tests.passes.blocks import E, H, I, K, batched, block, grouped, weights
from tests.passes.test_attention import S, interleaved
from tests.passes.test_attention import inputs as attention_inputs
from tests.passes.test_backend import Loop

STEPS = [role for role in ROLES if role != "outside"]


@pytest.fixture(scope="module")
def fused() -> Report:
    with torch.no_grad():
        return moe_ops.explain(block(grouped), **weights())


@pytest.fixture(scope="module")
def refused() -> Report:
    def tanh_glu(h):
        gate, up = h.chunk(2, dim=-1)
        return torch.tanh(gate) * up

    with torch.no_grad():
        return moe_ops.explain(block(batched, activation=tanh_glu), **weights())


KEYS = {
    "module", "location", "status", "routing", "router_note", "experts", "activation", "glu_layout", "scheme",
    "backend", "low_rank", "merged_note", "operators", "sizes", "reason", "cure", "source",
}  # fmt: skip
TOP = {
    "schema", "blocks", "graphs", "graph_breaks", "eager_frames", "errors", "causal_masks", "shared_heads", "own_calls",
    "error",
}  # fmt: skip


def test_dictionary_of_a_fused_block(fused):
    found = fused.to_dict()
    assert set(found) == TOP and (found["schema"], found["graphs"], found["graph_breaks"]) == (1, 1, [])
    (row,) = found["blocks"]
    assert set(row) == KEYS and row["status"] == "fused"
    assert row["sizes"] == {"E": E, "K": K, "H": H, "I": I} and row["operators"] == ["fused_moe"]
    assert (row["routing"], row["experts"], row["activation"]) == ("softmax", "grouped_mm", "silu")
    assert (row["reason"], row["cure"], row["source"]) == (None, None, None)


def test_dictionary_of_a_refused_block(refused):
    (row,) = refused.to_dict()["blocks"]
    assert set(row) == KEYS and row["status"] == "refused"
    assert "activation" in row["reason"] and row["cure"] and row["source"] == "return torch.tanh(gate) * up"
    assert "test_page.py" in row["location"]
    assert [row[key] for key in ("routing", "sizes", "operators")] == [None] * 3


def test_dictionary_survives_json(fused, refused):
    for report in (fused, refused):
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_symbolic_sizes_are_text():
    sizes = dict.fromkeys("EKHI", torch.SymInt)
    row = Fused("", "a.py:1 in f", "softmax", "", "dense", "silu", "concat", "bf16", "cpu", **sizes)
    assert row.to_dict()["sizes"]["E"] == str(torch.SymInt)


def test_what_runs_in_training_is_two_operators():
    inputs = {name: value.requires_grad_(name != "x") for name, value in weights(dtype=torch.float32).items()}
    (row,) = moe_ops.explain(block(batched), **inputs).fused
    assert row.to_dict()["operators"] == ["fused_topk", "fused_experts"]
    assert row.diagram.after[0].shape == "[12, 2] float32, [12, 2] int32"


def lines_of(diagram, role):
    return [line.code for stage in diagram.stages if stage.role == role for line in stage.lines]


def test_stages_of_a_fused_block(fused):
    diagram = fused.fused[0].diagram
    assert [stage.role for stage in diagram.stages] == list(STEPS)
    assert any("topk" in code for code in lines_of(diagram, "top-k"))
    assert "rows = x[perm // K]" in lines_of(diagram, "dispatch")
    assert "ordered, perm = torch.sort(flat)" in lines_of(diagram, "dispatch")
    assert lines_of(diagram, "experts") == [
        "return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)",
        "gate, up = h.chunk(2, dim=-1)",
        "return F.silu(gate) * up",
        "return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)",
    ]
    assert any("sum(1)" in code for code in lines_of(diagram, "combine"))
    (operator,) = diagram.after
    assert ("hidden_states", "[12, 32] bfloat16") in operator.tensors and ("top_k", "2") in operator.options
    assert not any(name == "scale" for name, _ in operator.options), "defaults are left out"


def test_stages_of_a_refused_block(refused):
    diagram = refused.refused[0].diagram
    assert [stage.role for stage in diagram.stages] == list(STEPS) and diagram.after == ()
    stopped = [(stage.role, line.code) for stage in diagram.stages for line in stage.lines if line.stopped]
    assert stopped == [("experts", "return torch.tanh(gate) * up")]


def test_what_reads_a_value_from_inside_is_outside():
    def run(x, gate, w1, w2):
        seen = []
        out = block(grouped, probe=lambda _, value: seen.append(value.abs().amax()))(x, gate, w1, w2)
        return out, seen[0]

    with torch.no_grad():
        report = moe_ops.explain(run, **weights())
    diagram = report.refused[0].diagram
    (outside,) = lines_of(diagram, "outside")
    assert "seen.append(value.abs().amax())" in outside
    assert outside not in lines_of(diagram, "combine") and "reads a value from inside" in report.html()


def test_a_router_that_stays_is_shown_as_such():
    def router(x, gate):
        values, ids = F.linear(x, gate).float().softmax(-1).topk(K, dim=-1)
        return values.roll(1, 0), ids

    with torch.no_grad():
        report = moe_ops.explain(block(batched, router), **weights())
    assert report.fused[0].to_dict()["operators"] == ["fused_experts"]
    text = " ".join(Tags(report.html()).text)
    assert "Router stays" in text and "stays as it is" in text and report.fused[0].router_note in text
    assert "Router stays" not in " ".join(Tags(moe_ops.explain("mixtral").html()).text)


def test_experts_in_a_loop_are_drawn_once():
    def loop(x, gate, w1, w2):
        values, ids = F.linear(x, gate).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            one, two = F.linear(x, w1[e]).chunk(2, -1)
            out = out + (values * (ids == e)).sum(-1, keepdim=True) * F.linear(F.silu(one) * two, w2[e])
        return out

    with torch.no_grad():
        (row,) = moe_ops.explain(loop, **weights(dtype=torch.float32)).fused
    (experts,) = (stage for stage in row.diagram.stages if stage.role == "experts")
    assert {line.times for line in experts.lines} == {E}


def test_a_block_in_no_graph_is_a_row_without_a_picture():
    report = moe_ops.explain(Loop(), torch.randn(5, H))
    (row,) = report.refused
    assert row.diagram is None and "in Loop.forward" in row.location
    assert "Python loop" in report.html() and "Python loop" in report._repr_html_()


def test_attention_is_counted():
    """One call that reads no mask, and one that keeps its mask and shares its heads."""

    def attention(q, k, v, mask, **inputs):
        shared = F.scaled_dot_product_attention(q, interleaved(k), interleaved(v), attn_mask=mask)
        causal = torch.ones(S, S, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(shared, shared, shared, causal), block(batched)(**inputs)

    with torch.no_grad():
        report = moe_ops.explain(attention, *attention_inputs(S), **weights())
    found = report.to_dict()
    assert (found["causal_masks"], found["shared_heads"], len(report.fused)) == (1, 1, 1)
    page = " ".join("".join(Tags(report.html()).text).split())
    for text in (str(report), page):
        assert "1 attention call(s) are causal without reading a mask" in text and "1 attention call(s) or pro" in text


def test_an_error_in_drawing_takes_nothing_away(monkeypatch):
    monkeypatch.setattr("compile_passes.diagram.Snapshot.of_match", lambda *_: 1 // 0)
    with torch.no_grad():
        report = moe_ops.explain(block(batched), **weights())
    assert len(report.fused) == 1 and report.fused[0].diagram is None and report.error is None
    assert report.errors == ["drawing a block: ZeroDivisionError: integer division or modulo by zero"]


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects them, their attributes and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


FORMS = {"page": Report.html, "notebook": Report._repr_html_}


@pytest.mark.parametrize("form", FORMS)
def test_a_page_needs_nothing_else(form, fused, refused):
    text = FORMS[form](Report(fused=fused.fused, refused=refused.refused, graphs=2))
    tags = Tags(text)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(tags.seen)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in tags.attributes}
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text
    assert ("html" in tags.seen) == (form == "page")


def test_a_page_says_it_in_words(fused, refused):
    text = " ".join(Tags(Report(fused=fused.fused, refused=refused.refused, graphs=2).html()).text)
    for words in ("Router", "Top-k", "Dispatch", "Expert products", "Combine", "moe_ops.fused_moe", "nearest miss",
                  "return torch.tanh(gate) * up", "Cure.", "[12, 32] bfloat16", "blocks.py:68 in grouped"):  # fmt: skip
        assert words in text, words


EVIL = "<script>alert('\"&')</script>"


def evil() -> Report:
    line = Line(EVIL, f"{EVIL}:1 in {EVIL}", (EVIL,), EVIL, stopped=True)
    operator = Operator(EVIL, ((EVIL, EVIL),), ((EVIL, EVIL),), EVIL)
    diagram = Diagram((Stage("router", (line,)),), (EVIL,), (operator,))
    sizes = dict.fromkeys("EKHI", EVIL)
    row = Fused(EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, **sizes, diagram=diagram)
    left = Refused(EVIL, EVIL, EVIL, EVIL, EVIL, diagram)
    staged, alone = replace(row, staged=True), Refused("", EVIL, EVIL, EVIL)
    return Report([row, row], [staged], [left, left, alone], 0, 0, 0, 1, [EVIL], [EVIL], [EVIL], EVIL)


@pytest.mark.parametrize("form", FORMS)
def test_no_text_becomes_markup(form):
    tags = Tags(FORMS[form](evil()))
    assert tags.open == [] and "script" not in tags.seen
    assert "".join(tags.text).count(EVIL) > 10
    assert {name for name, _ in tags.attributes} <= {"class", "style", "title", "lang", "charset", "name", "content"}


@pytest.mark.parametrize("form", FORMS)
def test_blocks_that_are_alike_are_shown_once(form, fused):
    rows = [Fused(**{**vars(fused.fused[0]), "module": f"layers.{index}"}) for index in range(48)]
    text = FORMS[form](Report(fused=rows))
    assert text.count("layers.0") == 1 and "and 47 more, which are alike" in text


def test_an_empty_report():
    assert "no MoE block is in a captured graph" in Report().html()


def test_command_line_json(capsys):
    assert main(["explain", "tests.passes.test_explain:factory", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["blocks"]
    assert (row["status"], row["operators"]) == ("fused", ["fused_moe"])


def test_command_line_page(tmp_path, capsys):
    file = tmp_path / "report.html"
    assert main(["explain", "tests.passes.test_explain:factory", "--html", str(file)]) == 0
    assert file.read_text().startswith("<!doctype html>") and "1 MoE block(s) fused" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["no/such/folder/report.html", ""], ids=["no folder", "a folder"])
def test_a_page_that_cannot_be_written(place, tmp_path, capsys):
    assert main(["explain", "tests.passes.test_explain:factory", "--html", str(tmp_path / place)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("explain: --html must be a file") and len(said.err.splitlines()) == 1
    assert said.out == "", "before anything is compiled"


def test_a_page_for_which_there_is_no_room(tmp_path, capsys, monkeypatch):
    def write_text(path, text, encoding):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", write_text)
    assert main(["explain", "tests.passes.test_explain:factory", "--html", str(tmp_path / "report.html")]) == 2
    said = capsys.readouterr()
    assert "must be a file that can be written" in said.err and "(No space left on device)" in said.err
    assert "1 MoE block(s) fused" in said.out, "what was found out is not lost"


def test_each_of_two_blocks_is_drawn_alone():
    def twice(x, gate, w1, w2):
        first = block(batched, activation=lambda h: torch.tanh(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])
        second = block(grouped, activation=lambda h: torch.cos(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])
        return second(first(x, gate, w1, w2), gate, w1, w2)

    with torch.no_grad():
        report = moe_ops.explain(twice, **weights())
    one, other = (row.diagram for row in report.refused)
    for diagram, mine, theirs in ((one, "torch.tanh", "torch.cos"), (other, "torch.cos", "torch.tanh")):
        code = [line.code for stage in diagram.stages for line in stage.lines]
        assert [stage.role for stage in diagram.stages] == STEPS
        assert any(mine in text for text in code) and not any(theirs in text for text in code), code
