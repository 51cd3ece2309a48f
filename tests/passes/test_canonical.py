"""The canonical reading: one name per operation, values through in-place operations, and hazards through aliases."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_passes.canonical import Canonical, equal_sizes
from compile_passes.vocabulary import spell
from tests.passes.blocks import capture

ATEN = torch.ops.aten


def node_of(target, *args, method=False, **kwargs) -> fx.Node:
    graph = fx.Graph()
    placeholders = {}

    def made(value):
        if isinstance(value, torch.Tensor):
            node = placeholders.setdefault(id(value), graph.placeholder(f"p{len(placeholders)}"))
            node.meta["example_value"] = value
            return node
        return value

    args = tuple(made(value) for value in args)
    return graph.call_method(target, args, kwargs) if method else graph.call_function(target, args, kwargs)


X, Y = torch.zeros(4, 6), torch.zeros(4, 6)
SPELLINGS = [
    (node_of(torch.softmax, X, -1), "softmax", {"dim": -1}),
    (node_of(F.softmax, X, dim=-1, dtype=torch.float32), "softmax", {"dim": -1, "dtype": torch.float32}),
    (node_of("softmax", X, -1, method=True), "softmax", {"dim": -1}),
    (node_of(ATEN.softmax.int, X, -1), "softmax", {"dim": -1}),
    (node_of(ATEN._softmax.default, X, -1, False), "softmax", {"dim": -1}),
    (node_of(operator.floordiv, X, 2), "floordiv", {"y": 2}),
    (node_of(torch.div, X, 2, rounding_mode="floor"), "floordiv", {"y": 2}),
    (node_of(ATEN.floor_divide.default, X, 2), "floordiv", {"y": 2}),
    (node_of("clamp_min", X, 0.5, method=True), "clamp", {"min": 0.5}),
    (node_of(ATEN.clamp_min.default, X, 0.5), "clamp", {"min": 0.5}),
    (node_of(operator.getitem, X, (Ellipsis, slice(None, 3))), "getslice", {}),
    (node_of(operator.getitem, X, (slice(None), None)), "view", {}),
    (node_of("type_as", X, Y, method=True), "cast", {}),
    (node_of("size", X, 0, method=True), "metadata", {}),
    (node_of(ATEN.histc.default, X, 8, 0, 7), "histc", {"bins": 8, "min": 0, "max": 7}),
    (node_of(torch.topk, X, k=2, dim=-1, sorted=False), "topk", {"k": 2, "dim": -1, "sorted": False}),
]
IN_PLACE = [
    (node_of(operator.iadd, X, Y), "add"),
    (node_of("add_", X, Y, method=True), "add"),
    (node_of(ATEN.add_.Tensor, X, Y), "add"),
    (node_of(operator.itruediv, X, Y), "div"),
    (node_of("clamp_", X, method=True, max=1), "clamp"),
    (node_of(F.silu, X, inplace=True), "silu"),
    (node_of(operator.setitem, X, Y, 1), "index_put"),
    (node_of("brand_new_", X, method=True), "brand_new"),
]


@pytest.mark.parametrize(("node", "name", "args"), SPELLINGS, ids=[f"{i}-{row[1]}" for i, row in enumerate(SPELLINGS)])
def test_one_name(node, name, args):
    call = spell(node)
    assert call.name == name and not call.writes
    assert {key: call.args[key] for key in args} == args


@pytest.mark.parametrize(("node", "name"), IN_PLACE, ids=[f"{i}-{row[1]}" for i, row in enumerate(IN_PLACE)])
def test_in_place_forms(node, name):
    call = spell(node)
    assert call.name == name and call.writes == ("x",)


def reading(function, *args):
    graph = capture(function, *args).graph
    canon = Canonical(graph)
    return canon, {node.name: node for node in graph.nodes}, graph.output_node()


def test_reader_after_a_write_reads_the_writer():
    def run(x, bias):
        out = x * 2
        before = out.sum()
        out.add_(bias)
        return out.relu(), before

    canon, nodes, _ = reading(run, torch.randn(3), torch.randn(3))
    assert canon.call(nodes["relu"])["x"] is nodes["add_"]
    assert canon.call(nodes["before"])["x"] is nodes["out"]
    assert not canon.hazards


def test_item_assignment_is_a_value():
    def run(perm):
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(3)
        return inverse + 1

    canon, nodes, _ = reading(run, torch.tensor([2, 0, 1]))
    put = canon.named(canon.call(nodes["add"])["x"], "index_put")
    assert put is not None and put["index"].op == "placeholder"
    assert canon.operand(canon.call(nodes["add"])["x"]) is nodes["inverse"]


def test_read_through_another_view_is_a_hazard():
    def run(x):
        x = x + 1
        half = x[:2]
        x.mul_(3)
        return half * 2

    canon, _, _ = reading(run, torch.randn(4))
    (hazard,) = (h for h in canon.hazards.values() if h.reader.op != "output")
    assert (hazard.operand.name, hazard.writer.name) == ("half", "mul_")


def test_write_through_a_view_spoils_the_base():
    def run(x):
        x = x + 1
        x[:2].mul_(3)
        return x * 2

    canon, _, _ = reading(run, torch.randn(4))
    assert [hazard.writer.name for hazard in canon.hazards.values()] == ["mul_"]


def test_view_taken_after_the_write_is_no_hazard():
    def run(x):
        x = x + 1
        x.mul_(3)
        return x[:2] * 2

    canon, _, _ = reading(run, torch.randn(4))
    assert not canon.hazards


def test_a_copy_is_no_alias():
    def run(x):
        x = x + 1
        kept = x.clone()
        x.mul_(3)
        return kept * 2 + x

    canon, _, _ = reading(run, torch.randn(4))
    assert not canon.hazards


def test_same_through_reshapes_and_equal_calls():
    def run(x):
        return x.view(-1).sort()[1] // 2, x.reshape(2, 6).flatten().sort()[1] // 2, x.view(-1).sort()[1] // 3

    canon, _, output = reading(run, torch.randn(3, 4))
    one, two, three = output.args[0]
    assert canon.same(one, two) and not canon.same(one, three)


def test_written_between():
    def run(x):
        x = x + 1
        y = x * 2
        x.add_(1)
        return y.relu(), x

    canon, nodes, _ = reading(run, torch.randn(4))
    assert canon.written_between(nodes["x"], nodes["relu"]) is nodes["add_"]
    assert canon.written_between(nodes["x"], nodes["y"]) is None


def test_symbolic_sizes():
    graph = capture(lambda x: x.view(-1, 2), torch.randn(6, 2), dynamic=True).graph
    value = next(n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta["example_value"], torch.Tensor))
    size = value.meta["example_value"].shape[0]
    assert equal_sizes(size * 2, 2 * size) and not equal_sizes(size, size + 1) and equal_sizes(3, 3)
