"""The canonical reading: one name per operation, values through in-place operations, and hazards through aliases."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_passes.equal import holds, no_narrower
from compile_passes.memory import written
from compile_passes.reading import Reading
from compile_passes.vocabulary import equal_sizes, spell
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
    (node_of(operator.setitem, X, torch.zeros(4, dtype=torch.long), 1), "index_put"),
    (node_of("brand_new_", X, method=True), "brand_new"),
]


@pytest.mark.parametrize(("node", "name", "args"), SPELLINGS, ids=[f"{i}-{row[1]}" for i, row in enumerate(SPELLINGS)])
def test_one_name(node, name, args):
    call = spell(node)
    assert call.name == name and not written(node)
    assert {key: call.args[key] for key in args} == args


@pytest.mark.parametrize(("node", "name"), IN_PLACE, ids=[f"{i}-{row[1]}" for i, row in enumerate(IN_PLACE)])
def test_in_place_forms(node, name):
    assert spell(node).name == name and written(node) == (node.args[0],)


def reading(function, *args):
    graph = capture(function, *args).graph
    read = Reading(graph)
    return read, {node.name: node for node in graph.nodes}, graph.output_node()


def test_reader_after_a_write_reads_the_writer():
    def run(x, bias):
        out = x * 2
        before = out.sum()
        out.add_(bias)
        return out.relu(), before

    read, nodes, _ = reading(run, torch.randn(3), torch.randn(3))
    assert read.call(nodes["relu"])["x"] is nodes["add_"]
    assert read.call(nodes["before"])["x"] is nodes["out"]
    assert not read.hazards


def test_item_assignment_is_a_value():
    def run(perm):
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(3)
        return inverse + 1

    read, nodes, _ = reading(run, torch.tensor([2, 0, 1]))
    put = read.named(read.call(nodes["add"])["x"], "index_put")
    assert put is not None and put["index"].op == "placeholder"
    assert read.operand(read.call(nodes["add"])["x"]) is nodes["inverse"]


def test_read_through_another_view_is_a_hazard():
    def run(x):
        x = x + 1
        half = x[:2]
        x.mul_(3)
        return half * 2

    read, _, _ = reading(run, torch.randn(4))
    (hazard,) = (h for h in read.hazards.values() if h.reader.op != "output")
    assert (hazard.operand.name, hazard.writer.name) == ("half", "mul_")


def test_write_through_a_view_spoils_the_base():
    def run(x):
        x = x + 1
        x[:2].mul_(3)
        return x * 2

    read, _, _ = reading(run, torch.randn(4))
    assert [hazard.writer.name for hazard in read.hazards.values()] == ["mul_"]


def test_view_taken_after_the_write_is_no_hazard():
    def run(x):
        x = x + 1
        x.mul_(3)
        return x[:2] * 2

    read, _, _ = reading(run, torch.randn(4))
    assert not read.hazards


def test_a_copy_is_no_alias():
    def run(x):
        x = x + 1
        kept = x.clone()
        x.mul_(3)
        return kept * 2 + x

    read, _, _ = reading(run, torch.randn(4))
    assert not read.hazards


def test_same_through_reshapes_and_equal_calls():
    def run(x):
        return x.view(-1).sort()[1] // 2, x.reshape(2, 6).flatten().sort()[1] // 2, x.view(-1).sort()[1] // 3

    read, _, output = reading(run, torch.randn(3, 4))
    one, two, three = output.args[0]
    assert read.same(one, two) and not read.same(one, three)


def test_written_between():
    def run(x):
        x = x + 1
        y = x * 2
        x.add_(1)
        return y.relu(), x

    read, nodes, _ = reading(run, torch.randn(4))
    assert read.memory.written_between(nodes["x"], nodes["x"], nodes["relu"]) is nodes["add_"]
    assert read.memory.written_between(nodes["x"], nodes["x"], nodes["y"]) is None


def test_symbolic_sizes():
    graph = capture(lambda x: x.view(-1, 2), torch.randn(6, 2), dynamic=True).graph
    value = next(n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta["example_value"], torch.Tensor))
    size = value.meta["example_value"].shape[0]
    assert equal_sizes(size * 2, 2 * size) and not equal_sizes(size, size + 1) and equal_sizes(3, 3)


WRITERS = [
    (node_of(F.embedding, torch.zeros(3, dtype=torch.long), X, max_norm=1.0), 2),
    (node_of(F.embedding, torch.zeros(3, dtype=torch.long), X), 0),
    (node_of(F.batch_norm, X, torch.zeros(6), torch.ones(6), training=True), 3),
    (node_of(F.relu, X, inplace=True), 1),
    (node_of(F.leaky_relu, X, 0.1, True), 1),
    (node_of(F.relu, X), 0),
    (node_of("stride", X, method=True), 0),
    (node_of("view", X, 2, 12, method=True), 0),
    (node_of(torch.sort, X), 0),
    (node_of(lambda x: x, X), 1),
]


@pytest.mark.parametrize(
    ("node", "count"),
    WRITERS,
    ids=[f"{i}-{getattr(row[0].target, '__name__', row[0].target)}" for i, row in enumerate(WRITERS)],
)
def test_how_many_operands_are_written(node, count):
    assert len(written(node)) == count


@pytest.mark.parametrize(
    ("dtype", "count", "fits"),
    [
        (torch.bool, 2, True),
        (torch.bool, 3, False),
        (torch.int8, 128, True),
        (torch.int8, 129, False),
        (torch.uint8, 256, True),
        (torch.bfloat16, 257, True),
        (torch.bfloat16, 258, False),
        (torch.float32, 1 << 24, True),
        (torch.float32, (1 << 24) + 2, False),
        (torch.int64, 1 << 40, True),
    ],
    ids=str,
)
def test_a_dtype_that_holds_every_id(dtype, count, fits):
    assert holds(dtype, count) is fits


@pytest.mark.parametrize(
    ("dtype", "floor", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float8_e4m3fn, torch.float16, False),
        (torch.bfloat16, torch.float32, False),
    ],
    ids=str,
)
def test_a_cast_that_loses_nothing_of_the_hidden_states(dtype, floor, fits):
    assert no_narrower(dtype, floor) is fits


@pytest.mark.parametrize(
    "write", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.squeeze_()], ids=["t_", "unsqueeze_", "squeeze_"]
)
def test_a_changed_geometry_is_seen(write):
    def run(x):
        x = x + 1
        write(x)
        return x * 2

    assert reading(run, torch.randn(4, 6))[0].reshaper is not None
    assert reading(lambda x: (x + 1).add_(1), torch.randn(4, 6))[0].reshaper is None
